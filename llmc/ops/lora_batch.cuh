// lora_batch.cuh - many low-rank adapters in one batch, each beside its own rows - arXiv:2311.03285
//   out[n] += s_k (inp[n] A_k^T) B_k^T       k: the adapter of row n; a row may have none
//   inp (N,IC)   out (N,OC)   A_k (r_k,IC)   B_k (OC,r_k)   room (N, largest r)
//   The base weight multiplies all rows in one product, which is most of the work. Rows of one
//   adapter lie together, because a sequence has one, so each run of them takes the two thin
//   products of lora.cuh. Ranks may differ. On a GPU one launch takes the rows of all short runs,
//   as Punica's kernels do (arXiv:2310.18547).
//   Contract: out +=. Rows without an adapter stay what they were.
//             On the CPU a row has the bits that its adapter alone would give it, where a
//             product's row does not depend on the number of rows. The kernel rounds less.
//   Cost: 2 r_k (IC + OC) FLOPs a row; two products for each run of rows. The kernel reads A_k and
//         B_k again for each row, from L2 where rows share them.
//   To copy: this file, element_type.h, elements.h, gpu.h, lora.cuh, matmul.cuh,
//            types.h and cuda_common.h.
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

// ----------------------------------------------------------------------------
// CUDA kernel and its launcher: runs of few rows

// Whether the kernel takes a run. The CPU has the two products of lora.cuh for all of them.
inline bool lora_by_row(const LoraRows&, const Lora&, Cpu) { return false; }

#if LLMC_KERNELS

// While texts grow by a token a step, neighbours seldom share an adapter: two launches a run would
// then take longer than their work. Longer runs, such as prompts, have products on tensor cores.
constexpr size_t LORA_FEW_ROWS = 16, LORA_MOST_RANK = 256;
inline bool lora_by_row(const LoraRows& run, const Lora& l, cudaStream_t) {
    return run.rows <= LORA_FEW_ROWS && l.rank <= LORA_MOST_RANK;
}

// The rows of one launch, each with its adapter. The kernel takes the table by value, so nothing is
// copied to the device before it.
struct LoraRow {
    const void *a, *b; // (r,IC) (OC,r)
    size_t row;
    unsigned rank;
    float scale;
};
constexpr unsigned LORA_LAUNCH_ROWS = 64, LORA_WARPS = 8;
struct LoraTable {
    LoraRow rows[LORA_LAUNCH_ROWS];
};

// A block takes a row. Its h (r) stays in shared memory as float, where the two products of
// lora.cuh round it to T. A row's bits depend on nothing but the row and its adapter.
template <typename T>
__global__ void lora_rows_kernel(T* out, const T* inp, LoraTable table, size_t OC, size_t IC) {
    LLMC_SHARED(float, h, LORA_MOST_RANK);
    const LoraRow& l = table.rows[blockIdx.x];
    const T *a = static_cast<const T*>(l.a), *b = static_cast<const T*>(l.b);
    const T* x = inp + l.row * IC; // (IC)
    T* y = out + l.row * OC;       // (OC)
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    // h = s A x: each warp takes rows of A in turn.
    for (unsigned k = warp; k < l.rank; k += LORA_WARPS) {
        float sum = 0;
        for (size_t c = lane; c < IC; c += 32)
            sum += to_float(x[c]) * to_float(a[k * IC + c]);
        sum = warp_sum(sum);
        if (lane == 0)
            h[k] = l.scale * sum;
    }
    __syncthreads(); // all warps have written h

    // y += B h: each thread takes outputs in turn.
    for (size_t o = threadIdx.x; o < OC; o += blockDim.x) {
        float sum = 0;
        for (unsigned k = 0; k < l.rank; k++)
            sum += h[k] * to_float(b[o * l.rank + k]);
        y[o] = from_acc<T>(to_float(y[o]) + sum);
    }
}

// Run the kernel for all runs that it takes, LORA_LAUNCH_ROWS rows at a time.
template <typename T>
void lora_rows_forward(T* out, const T* inp, const Lora* adapters, const LoraRuns& runs, size_t OC,
                       size_t IC, cudaStream_t stream) {
    // A launch takes its table by value, so each has a table of its own.
    LoraTable table = {};
    unsigned count = 0;
    auto flush = [&] {
        if (count)
            launch(lora_rows_kernel<T>, count, LORA_WARPS * 32, 0, stream, out, inp, table, OC, IC);
        count = 0;
    };

    // Fill tables.
    for (const LoraRows& run : runs) {
        const Lora& l = adapters[run.adapter];
        if (!l.rank || !lora_by_row(run, l, stream))
            continue;
        for (size_t row = run.first; row < run.first + run.rows; row++) {
            table.rows[count++] = {l.a, l.b, row, unsigned(l.rank), float(l.scale)};
            if (count == LORA_LAUNCH_ROWS) flush();
        }
    }
    flush();
}
#endif

// ----------------------------------------------------------------------------
// anywhere

// Add to each run of rows what its adapter says. An adapter of rank 0 leaves this matrix alone.
template <typename T, typename S>
void lora_batch_forward(T* out, const T* inp, const Lora* adapters, // (N,OC) (N,IC)
                        const LoraRuns& runs, T* room,              // room (N,r)
                        size_t OC, size_t IC, Blas& blas, S where) {
    // Long runs take the two products, each on its own.
    for (const LoraRows& run : runs) {
        const Lora& l = adapters[run.adapter];
        if (!l.rank || lora_by_row(run, l, where))
            continue;
        lora_forward(out + run.first * OC, inp + run.first * IC, l, room, run.rows, OC, IC, blas,
                     where);
    }

    // On a GPU all rows of short runs share a launch.
    if constexpr (!std::is_same_v<S, Cpu>)
        lora_rows_forward(out, inp, adapters, runs, OC, IC, where);
}

} // namespace llmc
