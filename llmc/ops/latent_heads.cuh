// latent_heads.cuh - latent attention's keys and values by heads, and back - arXiv:2405.04434
//   kv[n,h] = [plain key, value]   the product of row n's latent;  HS = plain + rotary
//   k[n,h]  = [plain key, k_rope[n]]      one rotary part serves all heads
//   v[n,h]  = [value, zeros]              as wide as k: attention's kernels read both alike
//   backward  dkv[n,h] = [dk's plain part, dv's first HS_v],  dk_rope[n] = sum over h of dk's last
//   kv, dkv (N,NH,plain+HS_v)   k, v, dk, dv (N,NH,HS)   k_rope, dk_rope: rows of `rotary` channels
//   Contract: everything =. The sum is in ascending order of heads, in acc, and rounded once:
//             bitwise repeatable.
//   Cost: memory-bound: 1 read of kv + 2 writes of k, and the same backward.
//   To copy: this file, types.h and cuda_common.h.
#pragma once
#include "cuda_common.h"

#include <algorithm>

namespace llmc {

// The channels of a head.
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

// Assemble keys and values by heads.
template <typename T>
void latent_heads_forward(T* k, T* v, const T* kv, const T* k_rope, // (N,NH,HS)^2 (N,NH,kv)
                          size_t rope_stride, const LatentHeads& d, size_t N, Cpu) {
    size_t plain = d.plain();
    // Rows are independent of each other.
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++)
        for (size_t h = 0; h < d.NH; h++) {
            // Find this head of this row in each of the three.
            size_t row = n * d.NH + h;
            const T* from = kv + row * d.kv();
            T* key = k + row * d.HS;
            T* value = v + row * d.HS;

            // Copy the two parts of the key, then the value with zeros after it.
            std::copy_n(from, plain, key);
            std::copy_n(k_rope + n * rope_stride, d.rotary, key + plain);
            std::copy_n(from + plain, d.HS_v, value);
            std::fill_n(value + d.HS_v, d.HS - d.HS_v, T{});
        }
}

// Split the gradients again, and sum those of the shared rotary part.
template <typename T>
void latent_heads_backward(T* dkv, T* dk_rope, size_t rope_stride, // (N,NH,kv) (N,rotary)
                           const T* dk, const T* dv,               // (N,NH,HS)^2
                           const LatentHeads& d, size_t N, Cpu) {
    size_t plain = d.plain();
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        for (size_t h = 0; h < d.NH; h++) {
            size_t row = n * d.NH + h;

            // Copy this head's own parts. The zeros after a value had no effect, so their
            // gradient is dropped.
            T* to = dkv + row * d.kv();
            std::copy_n(dk + row * d.HS, plain, to);
            std::copy_n(dv + row * d.HS, d.HS_v, to + plain);
        }

        // Sum over the heads: all of them have read the rotary part.
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

// Assemble one row's keys and values.
template <typename T>
__global__ void latent_heads_forward_kernel(T* k, T* v, const T* kv, const T* k_rope,
                                            size_t rope_stride, LatentHeads d) {
    // Numbers within a row fit 32 bits, which divide much faster than 64.
    size_t n = blockIdx.x;
    unsigned HS = unsigned(d.HS);
    unsigned plain = unsigned(d.plain());
    const T* rope = k_rope + n * rope_stride;
    for (unsigned at = threadIdx.x; at < unsigned(d.NH) * HS; at += LATENT_THREADS) {
        // Neighbouring threads have neighbouring channels of a head.
        unsigned c = at % HS;
        const T* from = kv + (n * d.NH + at / HS) * d.kv();
        size_t to = n * d.NH * HS + at;
        k[to] = c < plain ? from[c] : rope[c - plain];
        v[to] = c < d.HS_v ? from[plain + c] : from_acc<T>(0.0f);
    }
}

// Split one row's gradients again.
template <typename T>
__global__ void latent_heads_backward_kernel(T* dkv, T* dk_rope, size_t rope_stride, const T* dk,
                                             const T* dv, LatentHeads d) {
    // Copy plain parts and values.
    size_t n = blockIdx.x;
    unsigned width = unsigned(d.kv());
    unsigned plain = unsigned(d.plain());
    for (unsigned at = threadIdx.x; at < unsigned(d.NH) * width; at += LATENT_THREADS) {
        unsigned c = at % width;
        // dk and dv have the same layout.
        size_t head = (n * d.NH + at / width) * d.HS;
        dkv[n * d.NH * width + at] = c < plain ? dk[head + c] : dv[head + c - plain];
    }

    // Sum each rotary channel over the heads, one thread a channel.
    for (size_t c = threadIdx.x; c < d.rotary; c += LATENT_THREADS) {
        float sum = 0;
        for (size_t h = 0; h < d.NH; h++)
            sum += to_float(dk[(n * d.NH + h) * d.HS + plain + c]);
        dk_rope[n * rope_stride + c] = from_acc<T>(sum);
    }
}

// ----------------------------------------------------------------------------
// launchers: N blocks

// Assemble keys and values by heads.
template <typename T>
void latent_heads_forward(T* k, T* v, const T* kv, const T* k_rope, size_t rope_stride,
                          const LatentHeads& d, size_t N, cudaStream_t stream) {
    launch(latent_heads_forward_kernel<T>, unsigned(N), LATENT_THREADS, 0, stream, k, v, kv, k_rope,
           rope_stride, d);
}

// Split the gradients again, and sum those of the shared rotary part.
template <typename T>
void latent_heads_backward(T* dkv, T* dk_rope, size_t rope_stride, const T* dk, const T* dv,
                           const LatentHeads& d, size_t N, cudaStream_t stream) {
    launch(latent_heads_backward_kernel<T>, unsigned(N), LATENT_THREADS, 0, stream, dkv, dk_rope,
           rope_stride, dk, dv, d);
}
#endif

} // namespace llmc
