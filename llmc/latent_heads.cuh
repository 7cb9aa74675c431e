// latent_heads.cuh - latent attention's keys and values by heads, and back - arXiv:2405.04434
//   kv[n,h] = [plain key, value]   what a product makes of row n's latent;  HS = plain + rotary
//   k[n,h]  = [plain key, k_rope[n]]      one rotary part serves all heads
//   v[n,h]  = [value, zeros]              as wide as k: attention's kernels read both alike
//   backward  dkv[n,h] = [dk's plain part, dv's first HS_v],  dk_rope[n] = sum over h of dk's last
//   kv, dkv (N,NH,plain+HS_v)   k, v, dk, dv (N,NH,HS)   k_rope, dk_rope: rows of `rotary` channels
//   Contract: everything =. The sum goes by ascending head, in acc, and is rounded once: bitwise
//             repeatable.
//   Cost: memory-bound: 1 read of kv + 2 writes of k, and back.
//   To copy: this file, types.h and cuda_common.h.
#pragma once
#include "cuda_common.h"

#include <algorithm>

namespace llmc {

// Channels of a head.
struct LatentHeads {
    size_t NH;
    size_t HS;     // of q and k
    size_t HS_v;   // of v
    size_t rotary; // the last ones of a key
    LLMC_HD size_t plain() const { return HS - rotary; }
    LLMC_HD size_t kv() const { return plain() + HS_v; }
};

// ----------------------------------------------------------------------------
// CPU

template <typename T>
void latent_heads_forward(T* k, T* v, const T* kv, const T* k_rope, // (N,NH,HS)^2 (N,NH,kv)
                          size_t rope_stride, const LatentHeads& d, size_t N, Cpu) {
    size_t plain = d.plain();
    // Rows are independent of each other.
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++)
        for (size_t h = 0; h < d.NH; h++) {
            // Point at a head of a row, in each of the three.
            size_t row = n * d.NH + h;
            const T* from = kv + row * d.kv();
            T* key = k + row * d.HS;
            T* value = v + row * d.HS;
            // Copy the key's parts, then the value and zeros behind it.
            std::copy_n(from, plain, key);
            std::copy_n(k_rope + n * rope_stride, d.rotary, key + plain);
            std::copy_n(from + plain, d.HS_v, value);
            std::fill_n(value + d.HS_v, d.HS - d.HS_v, T{});
        }
}

template <typename T>
void latent_heads_backward(T* dkv, T* dk_rope, size_t rope_stride, // (N,NH,kv) (N,rotary)
                           const T* dk, const T* dv,               // (N,NH,HS)^2
                           const LatentHeads& d, size_t N, Cpu) {
    size_t plain = d.plain();
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        for (size_t h = 0; h < d.NH; h++) {
            size_t row = n * d.NH + h;
            // A head takes its own part of both; zeros behind a value had no effect.
            T* to = dkv + row * d.kv();
            std::copy_n(dk + row * d.HS, plain, to);
            std::copy_n(dv + row * d.HS, d.HS_v, to + plain);
        }

        // All heads have read the rotary part.
        for (size_t c = 0; c < d.rotary; c++) {
            acc_t<T> sum = 0;
            for (size_t h = 0; h < d.NH; h++)
                sum += to_acc(dk[(n * d.NH + h) * d.HS + plain + c]);
            dk_rope[n * rope_stride + c] = from_acc<T>(sum);
        }
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels: a block a row

#if LLMC_KERNELS
constexpr unsigned LATENT_THREADS = 256;

template <typename T>
__global__ void latent_heads_forward_kernel(T* k, T* v, const T* kv, const T* k_rope,
                                            size_t rope_stride, LatentHeads d) {
    // The row's heads; sizes of a row fit 32 bits, which divide much faster than 64.
    size_t n = blockIdx.x;
    unsigned HS = unsigned(d.HS);
    unsigned plain = unsigned(d.plain());
    const T* rope = k_rope + n * rope_stride;
    for (unsigned at = threadIdx.x; at < unsigned(d.NH) * HS; at += LATENT_THREADS) {
        // Threads side by side have neighbouring channels of a head.
        unsigned c = at % HS;
        const T* from = kv + (n * d.NH + at / HS) * d.kv();
        size_t to = n * d.NH * HS + at;
        k[to] = c < plain ? from[c] : rope[c - plain];
        v[to] = c < d.HS_v ? from[plain + c] : from_acc<T>(0.0f);
    }
}

template <typename T>
__global__ void latent_heads_backward_kernel(T* dkv, T* dk_rope, size_t rope_stride, const T* dk,
                                             const T* dv, LatentHeads d) {
    // Plain parts and values go as they are.
    size_t n = blockIdx.x;
    unsigned width = unsigned(d.kv());
    unsigned plain = unsigned(d.plain());
    for (unsigned at = threadIdx.x; at < unsigned(d.NH) * width; at += LATENT_THREADS) {
        unsigned c = at % width;
        // Both gradients have the same head at the same place.
        size_t head = (n * d.NH + at / width) * d.HS;
        dkv[n * d.NH * width + at] = c < plain ? dk[head + c] : dv[head + c - plain];
    }

    // A thread sums a rotary channel over the heads.
    for (size_t c = threadIdx.x; c < d.rotary; c += LATENT_THREADS) {
        float sum = 0;
        for (size_t h = 0; h < d.NH; h++)
            sum += to_float(dk[(n * d.NH + h) * d.HS + plain + c]);
        dk_rope[n * rope_stride + c] = from_acc<T>(sum);
    }
}

// ----------------------------------------------------------------------------
// launchers: N blocks

template <typename T>
void latent_heads_forward(T* k, T* v, const T* kv, const T* k_rope, size_t rope_stride,
                          const LatentHeads& d, size_t N, cudaStream_t stream) {
    launch(latent_heads_forward_kernel<T>, unsigned(N), LATENT_THREADS, 0, stream, k, v, kv, k_rope,
           rope_stride, d);
}

template <typename T>
void latent_heads_backward(T* dkv, T* dk_rope, size_t rope_stride, const T* dk, const T* dv,
                           const LatentHeads& d, size_t N, cudaStream_t stream) {
    launch(latent_heads_backward_kernel<T>, unsigned(N), LATENT_THREADS, 0, stream, dkv, dk_rope,
           rope_stride, dk, dv, d);
}
#endif

} // namespace llmc
