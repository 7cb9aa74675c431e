// rows.cuh - what row operators share: the threads of a row, and sums over a strip of rows
//   A row is shared by so many warps that a thread has at most 64 bytes of it, for rows of up to
//   32 KB. A block's rows then stay in L1 while they are read more than once.
//   In the backward pass of a norm a block owns a strip of rows. A thread has the same columns of
//   every row, and keeps K sums for each of them in registers; where a row is too long for that
//   (PACKS 0) the sums stay in memory, in the block's part.
//   To copy: this file, types.h and cuda_common.h.
#pragma once
#include "cuda_common.h"
#include "types.h"

#if LLMC_KERNELS
namespace llmc {

// Call f(P, warps a row) for rows of C elements.
template <typename T, typename F>
void pick_row_kernel(size_t C, bool vector, F f) {
    auto pick = [&](auto P) {
        size_t bytes = C * sizeof(T);
        bytes <= 2048 ? f(P, Int<1>()) : bytes <= 8192 ? f(P, Int<4>()) : f(P, Int<16>());
    };
    vector ? pick(Int<VECTOR<T>>()) : pick(Int<1>());
}

// A block has at least four warps. If a row takes one warp, a block has four rows.
template <int WARPS> constexpr unsigned row_block() { return WARPS < 4 ? 128 : WARPS * 32; }
template <int WARPS> dim3 row_grid(size_t N) {
    return dim3(unsigned(ceil_div(N, row_block<WARPS>() / (WARPS * 32))));
}

// A thread's place: its row n, and its number among the threads that share the row.
template <int WARPS> struct RowOfBlock {
    static constexpr unsigned threads = WARPS * 32;
    static constexpr unsigned rows = row_block<WARPS>() / threads; // in a block
    unsigned thread = threadIdx.x % threads;
    size_t n = size_t(blockIdx.x) * rows + threadIdx.x / threads;

    // Sum K numbers over the row; each of its threads gets the sums. All of them must call it.
    template <int K> __device__ void sum(float (&x)[K]) const {
        if constexpr (WARPS > 1) {
            block_sums<WARPS>(x);
        } else {
            for (int k = 0; k < K; k++)
                x[k] = warp_sum(x[k]);
        }
    }
    __device__ float sum(float x) const {
        float one[1] = {x};
        sum(one);
        return one[0];
    }
};

// A block's strip of rows, and K sums of each column over them. A thread takes PACKS packs of a
// row. If a row takes one warp, the block works on four rows at a time.
template <int K, int P, int WARPS, int PACKS> struct StripOfRows : RowOfBlock<WARPS> {
    static constexpr int HELD = PACKS ? PACKS : 1; // packs in registers at a time
    size_t first, end, C;
    float* part; // (K,C) the block's; null: not wanted
    float sums[HELD][K][P] = {};

    // The block's strip of `length` rows, of N in all.
    __device__ StripOfRows(float* parts, size_t N, size_t C, size_t length) : C(C) {
        size_t from = blockIdx.x * length;
        first = from + threadIdx.x / this->threads;
        end = from + length < N ? from + length : N;
        part = parts ? parts + blockIdx.x * K * C : nullptr;
    }

    // Call f(k, c) for each of this thread's packs: its index among those held, its first column.
    template <typename F>
    __device__ void for_packs(F f) const {
        if constexpr (PACKS == 0) {
            for (size_t c = this->thread * P; c < C; c += this->threads * P)
                f(0, c);
        } else {
            #pragma unroll
            for (int k = 0; k < PACKS; k++)
                if (size_t c = (this->thread + k * this->threads) * P; c < C)
                    f(k, c);
        }
    }

    // With PACKS 0 row n takes what earlier rows left of the pack at c, adds to it, and leaves it.
    __device__ void take(size_t n, size_t c) {
        for (int k = 0; k < K; k++)
            for (int i = 0; i < P; i++)
                sums[0][k][i] = part && n != first ? part[k * C + c + i] : 0;
    }
    __device__ void leave(int at, size_t c) const {
        for (int k = 0; part && k < K; k++)
            for (int i = 0; i < P; i++)
                part[k * C + c + i] = sums[at][k][i];
    }
    // Write the block's part after the last row, from sums in registers. All threads must call it.
    __device__ void write() {
        if constexpr (PACKS > 0 && WARPS == 1) {
            // The four rows have a warp each: add them in order. A lane's numbers lie 32 apart.
            LLMC_SHARED(float, shared, K * P * 32 * PACKS);
            for (unsigned w = 0; w < 4; w++) {
                if (threadIdx.x / 32 == w)
                    #pragma unroll
                    for (int j = 0; j < K * P * PACKS; j++) {
                        float& x = sums[j / (K * P)][j / P % K][j % P];
                        if (w > 0) x += shared[j * 32 + this->thread];
                        shared[j * 32 + this->thread] = x;
                    }
                __syncthreads(); // the next warp reads it
            }
            if (threadIdx.x / 32 < 3) return;
        }
        if constexpr (PACKS > 0)
            for_packs([&](int at, size_t c) { leave(at, c); });
    }
};

// Call f(P, WARPS, PACKS) for rows of C elements: as few threads as hold a row in one or two packs
// each. With three sums, 512 threads have registers for one pack only.
template <typename T, int K, typename F>
void pick_strip_kernel(size_t C, bool vector, F f) {
    constexpr int V = VECTOR<T>;
    constexpr int LONG = K == 1 ? 2 : 0;
    if (!vector)
        return C <= 32 ? f(Int<1>(), Int<1>(), Int<1>()) : f(Int<1>(), Int<4>(), Int<0>());
    size_t packs = C / V;
    packs <= 32      ? f(Int<V>(), Int<1>(), Int<1>())
    : packs <= 128   ? f(Int<V>(), Int<4>(), Int<1>())
    : packs <= 256   ? f(Int<V>(), Int<4>(), Int<2>())
    : packs <= 512   ? f(Int<V>(), Int<16>(), Int<1>())
    : packs <= 1024  ? f(Int<V>(), Int<16>(), Int<LONG>())
                     : f(Int<V>(), Int<16>(), Int<0>());
}

} // namespace llmc
#endif
