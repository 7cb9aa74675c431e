// lora_batch.cuh - many low-rank adapters in one batch, each beside its own rows - arXiv:2311.03285
//   out[n] += s_k (inp[n] A_k^T) B_k^T       k: the adapter of row n; a row may have none
//   inp (N,IC)   out (N,OC)   A_k (r_k,IC)   B_k (OC,r_k)   room (N, largest r)
//   The base weight multiplies all rows in one product, which is most of the work. Rows of one
//   adapter lie together, because a sequence has one, so each run of them takes the two thin
//   products of lora.cuh. Ranks may differ.
//   Contract: out +=. Rows without an adapter stay what they were.
//             A row has the bits that its adapter alone would give it, where a product's row does
//             not depend on the number of rows.
//   Cost: 2 r_k (IC + OC) FLOPs a row; two products for each run of rows.
//   To copy: this file, lora.cuh, matmul.cuh, types.h and cuda_common.h.
#pragma once
#include <vector>
#include "lora.cuh"

namespace llmc {

// A run of adjacent rows that use the same adapter.
struct LoraRows {
    size_t first, rows;
    size_t adapter; // a number below the count of adapters
};
typedef std::vector<LoraRows> LoraRuns;

// Find the runs in B sequences of T rows, whose adapters are given (-1: none). Neighbours with the
// same adapter share a run.
inline LoraRuns lora_rows(const int* adapters, size_t B, size_t T) { // (B)
    LoraRuns runs;
    for (size_t b = 0; b < B; b++) {
        if (adapters[b] < 0) continue;
        size_t adapter = size_t(adapters[b]);
        bool joins = b > 0 && adapters[b - 1] == adapters[b];
        if (joins)
            runs.back().rows += T;
        else
            runs.push_back({b * T, T, adapter});
    }
    return runs;
}

// Add to each run of rows what its adapter says. An adapter of rank 0 leaves this matrix alone.
template <typename T, typename S>
void lora_batch_forward(T* out, const T* inp, const Lora* adapters, // (N,OC) (N,IC)
                        const LoraRuns& runs, T* room,              // room (N,r)
                        size_t OC, size_t IC, Blas& blas, S where) {
    for (const LoraRows& run : runs) {
        const Lora& l = adapters[run.adapter];
        if (!l.rank) continue;
        lora_forward(out + run.first * OC, inp + run.first * IC, l, room, run.rows, OC, IC, blas,
                     where);
    }
}

} // namespace llmc
