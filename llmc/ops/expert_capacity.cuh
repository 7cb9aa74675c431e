// expert_capacity.cuh - capacity: the most that an expert takes of a sequence - arXiv:2101.03961
//   capacity = ceil(factor K T / E)      T tokens of a sequence choose K of E experts each
//   An expert takes the first `capacity` slots that chose it, by position. A slot behind these is
//   dropped: it becomes a choice of "expert" E, which exists on no rank. So the sort of moe.cuh
//   gives it no row, and nothing sends, multiplies or adds anything for it:
//     out = residual + sum over j of k_j g_j f(x)      k_j = 1 if slot j is taken, 0 if dropped
//     G_j = dL/dg_j = k_j dout . f(x)                  the gradient of a dropped gate is 0
//   The gates of the other slots stay as they are: S, which divides them, still has the scores of
//   all K choices (moe.cuh). A dropped choice therefore moves the router through S alone:
//     dlogits = scale q (G - sum q G), with G = 0
//   k is a constant, as the choice itself is. The balance terms and the choice's bias see what the
//   router chose, not what was dropped; otherwise a full expert would look even.
//   Counts belong to a sequence, which no layout cuts, so that every layout drops the same slots. A
//   count over a rank's micro-batch would change the model with dp and with the size of the batch.
//   Order by position is causal: later tokens change nothing for earlier ones. Order by
//   gate, which keeps the surest choices, is not, and is not built.
//   Training and evaluation drop. Generation does not: a new token comes without the others.
//   choices, ids (M) ints, M = sequences K T    dropped (E) ints: slots dropped, += or null
//   Contract: ids = the expert of a slot, E if it is dropped.   Bitwise repeatable: integers alone.
//   Cost: memory-bound. Each of E blocks reads all M choices from L2, as the sort does.
//   To copy: this file, fast_math.h, moe.cuh, rows.cuh, types.h and cuda_common.h.
#pragma once
#include "cuda_common.h"
#include "moe.cuh"

namespace llmc {

// How many slots an expert takes. A plan derives the last two numbers from the first.
struct ExpertCapacity {
    double factor = 0; // over an even share of a sequence's slots; 0: no slot is dropped
    size_t slots = 0;  // of a sequence: the capacity; 0: any number
    size_t T = 0;      // tokens in a sequence
};

// The capacity of each expert in sequences of T tokens. A token chooses an expert at most once.
inline ExpertCapacity expert_capacity(double factor, size_t T, size_t E, size_t K) {
    if (factor == 0) return {};
    // Decimals such as 1.1 are no doubles: a product that is a hair above a whole number is meant
    // to be that number.
    double even = double(K * T) / double(E);
    double slots = std::ceil(factor * even * (1 - 1e-12));
    return {factor, std::clamp(size_t(slots), size_t(1), T), T};
}

// ----------------------------------------------------------------------------
// CPU

// Drop the slots behind the capacity. `length` slots are a sequence.
inline void drop_over_capacity(int* ids, int* dropped, const int* choices, size_t M, // (M) (E) (M)
                               size_t length, size_t E, size_t capacity, Cpu) {
    std::vector<size_t> taken(E);
    for (size_t i = 0; i < M; i++) {
        // A sequence begins with empty experts.
        if (i % length == 0)
            std::fill(taken.begin(), taken.end(), 0);

        // Take the slot if its expert has room.
        size_t e = size_t(choices[i]);
        bool fits = taken[e]++ < capacity;
        ids[i] = int(fits ? e : E);
        if (dropped) dropped[e] += !fits;
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

// Block e walks the slots of all sequences, and decides on those that chose its expert.
static __global__ void drop_over_capacity_kernel(int* ids, int* dropped, const int* choices,
                                                 size_t M, size_t length, size_t E,
                                                 size_t capacity) {
    LLMC_SHARED(int, of_warp, SLOT_THREADS / 32);
    int e = int(blockIdx.x);
    int over = 0; // slots dropped

    for (size_t sequence = 0; sequence < M; sequence += length) {
        // Number the matches of a sequence from 0, as many slots at a time as there are threads.
        int before = 0;
        for (size_t first = 0; first < length; first += SLOT_THREADS) {
            size_t i = sequence + first + threadIdx.x;
            bool match = first + threadIdx.x < length && choices[i] == e;
            int matches = 0;
            int number = before + rank_of_match(match, of_warp, &matches);
            if (match) ids[i] = size_t(number) < capacity ? e : int(E);
            before += matches;
        }
        if (size_t(before) > capacity) over += before - int(capacity);
    }
    if (dropped && threadIdx.x == 0) dropped[e] += over;
}

// ----------------------------------------------------------------------------
// launcher

inline void drop_over_capacity(int* ids, int* dropped, const int* choices, size_t M, size_t length,
                               size_t E, size_t capacity, cudaStream_t stream) {
    launch(drop_over_capacity_kernel, unsigned(E), SLOT_THREADS, stream, ids, dropped, choices, M,
           length, E, capacity);
}
#endif

} // namespace llmc
