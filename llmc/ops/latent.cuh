// latent.cuh - multi-head latent attention: keys and values by heads, or none - arXiv:2405.04434
//   heads   kv[n,h] = [plain key, value]   the product of row n's latent;  HS = plain + rotary
//             k[n,h]  = [plain key, k_rope[n]]      one rotary part serves all heads
//             v[n,h]  = [value, zeros]          as wide as k: attention's kernels read both alike
//             backward  dkv[n,h] = [dk's plain part, dv's first HS_v],
//                       dk_rope[n] = sum over h of dk's last
//   decode  attention over cached latents: no key or value by heads. W_k (plain,DC), W_v (HS_v,DC)
//           are the rows of kv_b that make head h's key and value of a latent c.
//             q.k = q_plain.(W_k c) + q_rope.k_rope = (W_k^T q_plain).c + q_rope.k_rope
//             out = sum_j p_j (W_v c_j) = W_v mean,   mean = sum_j p_j c_j
//           1. heads_to_latents   [W_k^T q_plain, q_rope]: the query absorbs W_k
//           2. latent_attention_forward   a key serves all heads; its first DC channels: the value
//           3. latents_to_heads   W_v mean: the output absorbs W_v
//   kv, dkv (N,NH,plain+HS_v)   k, v, dk, dv (N,NH,HS)   k_rope, dk_rope: rows of `rotary` channels
//   decode: q (B,Tq,NH,DC+DR)   k (B,Tk,DC+DR)   mean (B,Tq,NH,DC)   DC: channels of a latent
//   Contract: =, products of decode = or += (accumulate). Sums in acc, over heads in ascending
//             order, rounded once. A row that sees nothing has mean 0. Bitwise repeatable.
//   Cost: heads is memory-bound: 1 read of kv + 2 writes of k, and the same backward. decode takes
//         2 (2 DC + DR) FLOPs for each (query, head, key), against 2 (HS + HS_v) with keys by
//         heads: 3.4 times as many in DeepSeek. A key takes DC + DR elements of memory, against
//         NH (HS + HS_v). On a GPU each head reads the keys again, from the L2 cache.
//   To copy: this file, attention_cpu.cuh, attention_types.h, tensor_cores.h,
//            types.h and cuda_common.h.
#pragma once
#include <algorithm>
#include <vector>
#include "attention_cpu.cuh"
#include "attention_types.h"
#include "cuda_common.h"
#include "tensor_cores.h"
#include "types.h"

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

// The channels that a latent has at most on a GPU, whose kernels keep them in registers.
constexpr size_t MOST_LATENT = 1024;

// Rows [first, first + P) of each head's matrix, and where both sides of its products lie.
template <typename T> struct HeadMatrix {
    const T* w;            // (NH,rows,K)
    size_t NH, rows;       // heads, and rows of each
    size_t first, P, K;    // rows in use; columns
    size_t narrow, wide;   // elements between heads of (N,NH,P), and of (N,NH,K)
    bool accumulate = false;

    // Row p of those in use, of the head that number `at` of (N,NH) has.
    LLMC_HD const T* row(size_t at, size_t p) const {
        return w + (at % NH * rows + first + p) * K;
    }
};

// ----------------------------------------------------------------------------
// CPU: by heads

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

            // Copy this head's parts. The zeros after a value had no effect: drop their gradient.
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
// CPU: decode

// out[n,h] = or += W^T x[n,h]. From P channels of a head to K.
template <typename T>
void heads_to_latents(T* out, const T* x, const HeadMatrix<T>& m, size_t N, Cpu) {
    typedef acc_t<T> A;
    // Take a head's rows together, while its matrix is in the cache.
    #pragma omp parallel for collapse(2)
    for (size_t h = 0; h < m.NH; h++)
        for (size_t n = 0; n < N; n++) {
            size_t at = n * m.NH + h;
            std::vector<A> sum(m.K);

            // Add one row of the matrix after the other, which reads it in its order.
            for (size_t p = 0; p < m.P; p++) {
                A factor = to_acc(x[at * m.narrow + p]);
                const T* row = m.row(at, p);
                #pragma omp simd
                for (size_t c = 0; c < m.K; c++)
                    sum[c] += factor * to_acc(row[c]);
            }
            put_row(out + at * m.wide, sum.data(), m.K, m.accumulate);
        }
}

// The dot product of two rows, its terms in several sums.
template <typename T>
acc_t<T> latent_dot(const T* a, const T* b, size_t n) {
    acc_t<T> sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (size_t c = 0; c < n; c++)
        sum += to_acc(a[c]) * to_acc(b[c]);
    return sum;
}

// out[n,h] = or += W x[n,h]. From K channels to P of a head.
template <typename T>
void latents_to_heads(T* out, const T* x, const HeadMatrix<T>& m, size_t N, Cpu) {
    #pragma omp parallel for collapse(2)
    for (size_t h = 0; h < m.NH; h++)
        for (size_t n = 0; n < N; n++) {
            // Each output is one row's dot product.
            size_t at = n * m.NH + h;
            for (size_t p = 0; p < m.P; p++) {
                acc_t<T> sum = latent_dot(x + at * m.wide, m.row(at, p), m.K);
                put(out + at * m.narrow + p, sum, m.accumulate);
            }
        }
}

// mean = the latents, weighted by the softmax of their scores. x.d has one key head.
template <typename T>
void latent_attention_forward(T* mean, const AttentionOperands<T>& operands, Cpu) {
    typedef acc_t<T> A;
    const AttentionOperands<T> x = completed(operands);
    const AttentionDims& d = x.d;
    #pragma omp parallel for collapse(3)
    for (size_t b = 0; b < d.B; b++)
        for (size_t i = 0; i < d.Tq; i++)
            for (size_t h = 0; h < d.NH; h++) {
                // Score the keys that the query sees. The others keep -inf.
                std::vector<A> p(d.Tk, A(-INFINITY));
                for (size_t j = 0; j < d.Tk; j++) {
                    int distance = 0;
                    if (!x.visible(b, i, j, distance))
                        continue;
                    A product = latent_dot(x.query(b, h, i), x.k + x.key_at(b, 0, j), d.HS);
                    p[j] = x.capped(product);
                }
                reference_softmax(p);

                // Sum the latents. Those with weight 0 are skipped: a masked row may be NaN.
                std::vector<A> sum(d.HS_v);
                for (size_t j = 0; j < d.Tk; j++) {
                    const T* latent = x.k + x.key_at(b, 0, j);
                    #pragma omp simd
                    for (size_t c = 0; c < (p[j] != 0 ? d.HS_v : 0); c++)
                        sum[c] += p[j] * to_acc(latent[c]);
                }
                put_row(mean + x.out_at(b, h, i), sum.data(), d.HS_v, false);
            }
}

// ----------------------------------------------------------------------------
// CUDA kernels by heads: a block a row

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
// CUDA kernels of decode: a block for each head of each row

constexpr int DECODE_WARPS = 8, DECODE_THREADS = 32 * DECODE_WARPS;

// A thread sums one of the K channels, so neighbours read neighbouring elements of the matrix.
template <typename T>
__global__ void heads_to_latents_kernel(T* out, const T* x, HeadMatrix<T> m) {
    size_t at = blockIdx.x;
    const T* head = x + at * m.narrow;
    for (size_t c = threadIdx.x; c < m.K; c += DECODE_THREADS) {
        float sum = 0;
        for (size_t p = 0; p < m.P; p++)
            sum += to_float(head[p]) * to_float(m.row(at, p)[c]);
        put(out + at * m.wide + c, sum, m.accumulate);
    }
}

// A warp sums one of the P channels.
template <typename T>
__global__ void latents_to_heads_kernel(T* out, const T* x, HeadMatrix<T> m) {
    size_t at = blockIdx.x;
    unsigned lane = threadIdx.x % 32;
    const T* latent = x + at * m.wide;
    for (size_t p = threadIdx.x / 32; p < m.P; p += DECODE_WARPS) {
        // The lanes share the columns.
        float sum = 0;
        for (size_t c = lane; c < m.K; c += 32)
            sum += to_float(latent[c]) * to_float(m.row(at, p)[c]);
        sum = warp_sum(sum);
        if (lane == 0)
            put(out + at * m.narrow + p, sum, m.accumulate);
    }
}

// The softmax over the keys that one warp has met, or a whole block.
struct DecodeSoftmax {
    float most = -INFINITY, sum = 0; // the highest score; the sum of exp(score - most)
};

// Walk every DECODE_WARPS-th key. Lane l sums channels l + 32 k of the latents.
template <typename T, int D>
__device__ DecodeSoftmax decode_keys(float (&sum)[D], const float* q,
                                     const AttentionOperands<T>& x, size_t b, size_t i) {
    int lane = threadIdx.x % 32;
    int DC = int(x.d.HS_v);
    DecodeSoftmax s;
    for (size_t j = threadIdx.x / 32; j < x.d.Tk; j += DECODE_WARPS) {
        int distance = 0;
        if (!x.visible(b, i, j, distance)) continue; // all lanes skip it alike
        const T* key = x.k + x.key_at(b, 0, j);

        // Read the latent once: it is a part of the key, and the value.
        float latent[D], product = 0;
        #pragma unroll
        for (int k = 0; k < D; k++) {
            int c = lane + 32 * k;
            latent[k] = c < DC ? to_float(key[c]) : 0;
            product += c < DC ? q[c] * latent[k] : 0;
        }
        for (int c = DC + lane; c < int(x.d.HS); c += 32)
            product += q[c] * to_float(key[c]);
        float score = x.capped(warp_sum(product));

        // Online softmax: rescale the sums to the new maximum.
        float most = score > s.most ? score : s.most;
        float rescale = expf(s.most - most);
        float p = expf(score - most);
        s = {most, s.sum * rescale + p};
        #pragma unroll
        for (int k = 0; k < D; k++)
            sum[k] = sum[k] * rescale + p * latent[k];
    }
    return s;
}

// One query of one head. D = DC / 32, rounded up to a size that has a kernel.
template <typename T, int D>
__global__ void latent_attention_forward_kernel(T* mean, const AttentionOperands<T> x) {
    const AttentionDims& d = x.d;
    size_t h = blockIdx.x % d.NH;
    size_t i = blockIdx.x / d.NH % d.Tq;
    size_t b = blockIdx.x / d.NH / d.Tq;
    int warp = threadIdx.x / 32;
    float* q = reinterpret_cast<float*>(dynamic_shared()); // (HS)
    float* sums = q + d.HS;                                // (DECODE_WARPS,DC)
    DecodeSoftmax* parts = reinterpret_cast<DecodeSoftmax*>(sums + DECODE_WARPS * d.HS_v);

    // Load the query, which all warps read for each key.
    for (size_t c = threadIdx.x; c < d.HS; c += DECODE_THREADS)
        q[c] = to_float(x.query(b, h, i)[c]);
    __syncthreads();

    // Each warp leaves its sums and its softmax.
    float sum[D] = {};
    DecodeSoftmax part = decode_keys(sum, q, x, b, i);
    for (int k = 0, c = threadIdx.x % 32; k < D; k++, c += 32)
        if (c < int(d.HS_v))
            sums[warp * d.HS_v + c] = sum[k];
    if (threadIdx.x % 32 == 0)
        parts[warp] = part;
    __syncthreads();

    // Bring the warps to one maximum. A warp without keys has sum 0 and no weight.
    DecodeSoftmax all;
    for (int w = 0; w < DECODE_WARPS; w++)
        all.most = parts[w].most > all.most ? parts[w].most : all.most;
    float weight[DECODE_WARPS];
    for (int w = 0; w < DECODE_WARPS; w++) {
        weight[w] = parts[w].sum == 0 ? 0 : expf(parts[w].most - all.most);
        all.sum += weight[w] * parts[w].sum;
    }

    // Add the warps' sums, in their order.
    for (size_t c = threadIdx.x; c < d.HS_v; c += DECODE_THREADS) {
        float total = 0;
        for (int w = 0; w < DECODE_WARPS; w++)
            total += weight[w] * sums[w * d.HS_v + c];
        put(mean + x.out_at(b, h, i) + c, all.sum == 0 ? 0 : total / all.sum, false);
    }
}

// ----------------------------------------------------------------------------
// launchers: N blocks by heads, N NH blocks of decode

template <typename T>
void latent_heads_forward(T* k, T* v, const T* kv, const T* k_rope, size_t rope_stride,
                          const LatentHeads& d, size_t N, cudaStream_t stream) {
    launch(latent_heads_forward_kernel<T>, unsigned(N), LATENT_THREADS, stream, k, v, kv, k_rope,
           rope_stride, d);
}

template <typename T>
void latent_heads_backward(T* dkv, T* dk_rope, size_t rope_stride, const T* dk, const T* dv,
                           const LatentHeads& d, size_t N, cudaStream_t stream) {
    launch(latent_heads_backward_kernel<T>, unsigned(N), LATENT_THREADS, stream, dkv, dk_rope,
           rope_stride, dk, dv, d);
}

template <typename T>
void heads_to_latents(T* out, const T* x, const HeadMatrix<T>& m, size_t N,
                      cudaStream_t stream) {
    launch(heads_to_latents_kernel<T>, unsigned(N * m.NH), DECODE_THREADS, stream, out, x, m);
}

template <typename T>
void latents_to_heads(T* out, const T* x, const HeadMatrix<T>& m, size_t N,
                      cudaStream_t stream) {
    launch(latents_to_heads_kernel<T>, unsigned(N * m.NH), DECODE_THREADS, stream, out, x, m);
}

template <typename T>
void latent_attention_forward(T* mean, const AttentionOperands<T>& operands, cudaStream_t stream) {
    const AttentionOperands<T> x = completed(operands);
    const AttentionDims& d = x.d;
    LLMC_CHECK(d.HS_v <= MOST_LATENT, "latents of %zu channels: at most %zu", d.HS_v, MOST_LATENT);
    size_t shared = (d.HS + DECODE_WARPS * d.HS_v) * sizeof(float);
    shared += DECODE_WARPS * sizeof(DecodeSoftmax);
    unsigned blocks = unsigned(d.B * d.Tq * d.NH);

    // Three sizes keep compilation short. DeepSeek's 512 channels have their own.
    auto run = [&](auto D) {
        auto kernel = latent_attention_forward_kernel<T, D>;
        launch_shared(kernel, blocks, DECODE_THREADS, shared, stream, mean, x);
    };
    d.HS_v <= 128 ? run(Int<4>()) : d.HS_v <= 512 ? run(Int<16>()) : run(Int<32>());
}
#endif

} // namespace llmc
