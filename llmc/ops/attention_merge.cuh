// attention_merge.cuh - join attention over two blocks of keys, by their lse - arXiv:2112.05682
//   m = max(lse, part_lse),   l = exp(lse - m) + exp(part_lse - m)
//   out = (out exp(lse - m) + part exp(part_lse - m)) / l,   lse = m + log(l)
//   out, part (B,T,NH,HS)   lse, part_lse (B,NH,T)   out in float (double in double), part in any
//   Contract: out, lse become those of both blocks, to rounding. Merge any number of blocks,
//             in any order. A row that saw nothing in a block (lse -inf) adds nothing, to the bit;
//             one that saw nothing at all keeps out 0, lse -inf.  Bitwise repeatable.
//   round_rows   converts sums in float, out or gradients, to the type that a block keeps; or a
//                first part to float, to be merged with the others
//   Cost: 2 reads + 1 write of out; memory-bound.
//   To copy: this file, elements.h, types.h and cuda_common.h.
#pragma once
#include "cuda_common.h"
#include "elements.h"

namespace llmc {

// The weights of a row's two results, and the lse of both.
template <typename A> struct MergeWeights {
    A old, part, lse;
};
template <typename A>
LLMC_HD inline MergeWeights<A> merge_weights(A lse, A part_lse) {
    // This test comes first: of two rows that saw nothing it keeps the old one.
    if (part_lse == A(-INFINITY))
        return {1, 0, lse};
    if (lse == A(-INFINITY))
        return {0, 1, part_lse};
    // Below the larger lse no exponential overflows, and one of them is 1.
    A most = lse > part_lse ? lse : part_lse;
    A old = std::exp(lse - most);
    A part = std::exp(part_lse - most);
    A total = old + part;
    return {old / total, part / total, most + std::log(total)};
}

// A weight of 0 leaves its number out. The number may be anything, and 0 times it a NaN.
template <typename A>
LLMC_HD inline A merged(MergeWeights<A> w, A old, A part) {
    if (w.part == 0) return old;
    return w.old == 0 ? part : old * w.old + part * w.part;
}

// ----------------------------------------------------------------------------
// CPU

template <typename A, typename P>
void attention_merge(A* out, A* lse, const P* part, const A* part_lse, size_t B, size_t T,
                     size_t NH, size_t HS, Cpu) {
    #pragma omp parallel for collapse(2)
    for (size_t b = 0; b < B; b++)
        for (size_t t = 0; t < T; t++)
            for (size_t h = 0; h < NH; h++) {
                // out has heads inside rows, lse rows inside heads.
                size_t row = (b * T + t) * NH + h;
                size_t at = (b * NH + h) * T + t;
                MergeWeights<A> w = merge_weights(lse[at], part_lse[at]);
                for (size_t e = row * HS; e < (row + 1) * HS; e++)
                    out[e] = merged(w, out[e], A(to_acc(part[e])));
                // Write lse last: the weights came from the old one.
                lse[at] = w.lse;
            }
}

// out = in, n elements a row: both may lie inside wider rows
template <typename T, typename F>
void round_rows(T* out, size_t out_stride, const F* in, size_t in_stride, size_t rows, size_t n,
                Cpu) {
    #pragma omp parallel for
    for (size_t i = 0; i < rows; i++) {
        T* to = out + i * out_stride;
        const F* from = in + i * in_stride;
        for (size_t c = 0; c < n; c++)
            to[c] = from_acc<T>(to_acc(from[c]));
    }
}

// ----------------------------------------------------------------------------
// CUDA: a warp a row; to round, a thread an element

#if LLMC_KERNELS
constexpr unsigned MERGE_WARPS = 4;

// Rows in out and lse are indexed as on the CPU.
template <typename P>
__global__ void attention_merge_kernel(float* out, float* lse, const P* part,
                                       const float* part_lse, size_t B, size_t T, size_t NH,
                                       size_t HS) {
    size_t row = size_t(blockIdx.x) * MERGE_WARPS + threadIdx.x / 32;
    if (row >= B * T * NH) return; // whole warps
    // Every lane computes the weights: two exponentials are cheaper than a shuffle of the results.
    size_t h = row % NH, t = row / NH % T, b = row / NH / T, at = (b * NH + h) * T + t;
    MergeWeights<float> w = merge_weights(lse[at], part_lse[at]);
    for (size_t e = row * HS + threadIdx.x % 32; e < (row + 1) * HS; e += 32)
        out[e] = merged(w, out[e], to_float(part[e]));
    __syncwarp(); // every lane has read lse
    if (threadIdx.x % 32 == 0)
        lse[at] = w.lse;
}

// A row of 64 or 128 channels is two or four trips of its warp.
template <typename P>
void attention_merge(float* out, float* lse, const P* part, const float* part_lse, size_t B,
                     size_t T, size_t NH, size_t HS, cudaStream_t stream) {
    launch(attention_merge_kernel<P>, unsigned(ceil_div(B * T * NH, size_t(MERGE_WARPS))),
           MERGE_WARPS * 32, 0, stream, out, lse, part, part_lse, B, T, NH, HS);
}

template <typename T, typename F>
__global__ void round_rows_kernel(T* out, size_t out_stride, const F* in, size_t in_stride,
                                  size_t rows, size_t n) {
    size_t i = first_element<1>();
    if (i >= rows * n) return;
    size_t row = i / n;
    size_t c = i % n;
    out[row * out_stride + c] = from_acc<T>(to_float(in[row * in_stride + c]));
}

template <typename T, typename F>
void round_rows(T* out, size_t out_stride, const F* in, size_t in_stride, size_t rows, size_t n,
                cudaStream_t stream) {
    pick_element_kernel<T>(rows * n, false, [&](auto, unsigned grid) {
        launch(round_rows_kernel<T, F>, grid, ELEMENT_THREADS, 0, stream, out, out_stride, in,
               in_stride, rows, n);
    });
}
#endif

} // namespace llmc
