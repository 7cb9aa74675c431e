// prefix.cuh - n trained keys and values before every sequence: prefix tuning - arXiv:2101.00190
//   s_j = cap(scale q.k_j),   total = exp(lse) + sum_j exp(s_j)          j: the keys of the prefix
//   out = (exp(lse) out + sum_j exp(s_j) v_j) / total,   lse = log(total)
//   Attention over the text gives out and lse, and enters here as one more key: its score is lse,
//   its value is out (arXiv:2112.05682). No kernel of attention knows of a prefix.
//   Backward reads the joined out and lse, and so does attention over the text: D = dout.out.
//   p_j = exp(s_j - lse),   ds_j = p_j (dout.v_j - D) cap'(s_j) scale
//   dq += sum_j ds_j k_j,   dk_j = sum ds_j q,   dv_j = sum p_j dout
//   The sums of dk, dv go over the batch, its queries, and the query heads that share the key.
//   q, dq (B,T,NH,HS)   k, v (n,NKV,HS)   out, dout (B,T,NH,HS)   lse (B,NH,T)   dk, dv (n,NKV,HS)
//   Every query sees all keys: they have no position, so no RoPE, mask, window or document.
//   Contract: out, lse become those of both parts; dq +=; dk, dv = or += (x.accumulate). HS up to
//             256 on a GPU.  Bitwise repeatable for any number of threads.
//   Cost: 4 B T NH HS n FLOPs forward, and 4 times as many backward, because queries and keys
//         each compute the scores. On a GPU dk and dv read all rows again for each key of the
//         prefix, from the L2 cache, which suits a prefix of some tens of keys.
//   To copy: this file, attention_cpu.cuh, attention_types.h, types.h and cuda_common.h.
#pragma once
#include "attention_cpu.cuh"
#include "cuda_common.h"

namespace llmc {

// A row's weight of one key, and the gradient of its score times the scale of q.k.
template <typename A> struct PrefixWeight {
    A p, ds;
};
template <typename T>
LLMC_HD inline PrefixWeight<acc_t<T>> prefix_weight(const AttentionOperands<T>& x,
                                                    acc_t<T> product, acc_t<T> lse,
                                                    acc_t<T> dp, acc_t<T> D) {
    acc_t<T> s = x.capped(product);
    acc_t<T> p = std::exp(s - lse);
    return {p, p * (dp - D) * x.cap_derivative(s) * x.scale};
}

// ----------------------------------------------------------------------------
// CPU: the text's result is the first key, the keys of the prefix follow it

template <typename T>
void prefix_forward(T* out, acc_t<T>* lse, const AttentionOperands<T>& operands, Cpu) {
    typedef acc_t<T> A;
    const AttentionOperands<T> x = completed(operands);
    const AttentionDims& d = x.d;
    #pragma omp parallel for collapse(2)
    for (size_t b = 0; b < d.B; b++)
        for (size_t i = 0; i < d.Tq; i++)
            for (size_t h = 0; h < d.NH; h++) {
                // Begin with the text: a key of score lse.
                T* row = out + x.out_at(b, h, i);
                A& all = lse[x.lse_at(b, h, i)];
                A most = all, total = 1;
                std::vector<A> sum(d.HS);
                for (size_t e = 0; e < d.HS; e++)
                    sum[e] = to_acc(row[e]);

                // Add the keys of the prefix, scaled by the largest score so far.
                for (size_t j = 0; j < d.Tk; j++) {
                    size_t key = x.key_at(0, h / (d.NH / d.NKV), j);
                    A s = x.capped(channel_dot(x.query(b, h, i), x.k + key, d.HS));
                    A next = std::max(most, s);
                    A old = std::exp(most - next), p = std::exp(s - next);
                    total = total * old + p;
                    for (size_t e = 0; e < d.HS; e++)
                        sum[e] = sum[e] * old + p * to_acc(x.v[key + e]);
                    most = next;
                }

                // Write the mean over both parts.
                all = most + std::log(total);
                for (size_t e = 0; e < d.HS; e++)
                    row[e] = from_acc<T>(sum[e] / total);
            }
}

// dq += what the prefix adds to the gradient of each query.
template <typename T>
void prefix_backward_queries(T* dq, const T* out, const acc_t<T>* lse,
                             const AttentionOperands<T>& x) {
    typedef acc_t<T> A;
    const AttentionDims& d = x.d;
    #pragma omp parallel for collapse(2)
    for (size_t b = 0; b < d.B; b++)
        for (size_t i = 0; i < d.Tq; i++)
            for (size_t h = 0; h < d.NH; h++) {
                const T* q = x.query(b, h, i);
                const T* dout = x.gradient(b, h, i);
                A D = channel_dot(dout, out + x.out_at(b, h, i), d.HS);

                // All sequences share the prefix: it is sequence 0 of its keys.
                std::vector<A> sum(d.HS);
                for (size_t j = 0; j < d.Tk; j++) {
                    size_t key = x.key_at(0, h / (d.NH / d.NKV), j);
                    A product = channel_dot(q, x.k + key, d.HS);
                    A dp = channel_dot(dout, x.v + key, d.HS);
                    A ds = prefix_weight(x, product, lse[x.lse_at(b, h, i)], dp, D).ds;
                    for (size_t e = 0; e < d.HS; e++)
                        sum[e] += ds * to_acc(x.k[key + e]);
                }

                // Add to the gradient that comes through the text.
                T* row = dq + x.query_at(b, h, i);
                for (size_t e = 0; e < d.HS; e++)
                    put(row + e, sum[e], true);
            }
}

// dk, dv: a task is one key of one head, and sums over all queries in their order.
template <typename T>
void prefix_backward_keys(acc_t<T>* dk, acc_t<T>* dv, const T* out, const acc_t<T>* lse,
                          const AttentionOperands<T>& x) {
    typedef acc_t<T> A;
    const AttentionDims& d = x.d;
    size_t group = d.NH / d.NKV;
    #pragma omp parallel for collapse(2)
    for (size_t j = 0; j < d.Tk; j++)
        for (size_t kh = 0; kh < d.NKV; kh++) {
            size_t key = x.key_at(0, kh, j);
            std::vector<A> k_sum(d.HS), v_sum(d.HS);

            // Walk over the rows that read this key: all queries of the heads in its group.
            for (size_t row = 0; row < d.B * d.Tq * group; row++) {
                size_t h = kh * group + row % group;
                size_t i = row / group % d.Tq, b = row / group / d.Tq;
                const T *q = x.query(b, h, i), *dout = x.gradient(b, h, i);
                A product = channel_dot(q, x.k + key, d.HS);
                A dp = channel_dot(dout, x.v + key, d.HS);
                A D = channel_dot(dout, out + x.out_at(b, h, i), d.HS);
                PrefixWeight<A> w = prefix_weight(x, product, lse[x.lse_at(b, h, i)], dp, D);
                for (size_t e = 0; e < d.HS; e++) {
                    k_sum[e] += w.ds * to_acc(q[e]);
                    v_sum[e] += w.p * to_acc(dout[e]);
                }
            }

            // Write both gradients, or add them to those of earlier micro-batches.
            for (size_t e = 0; e < d.HS; e++) {
                put(dk + key + e, k_sum[e], x.accumulate);
                put(dv + key + e, v_sum[e], x.accumulate);
            }
        }
}

// Both halves. dk and dv may be null: no gradient of the prefix is wanted.
template <typename T>
void prefix_backward(T* dq, acc_t<T>* dk, acc_t<T>* dv, const T* out, const acc_t<T>* lse,
                     const AttentionOperands<T>& operands, Cpu) {
    AttentionOperands<T> x = completed(operands);
    prefix_backward_queries(dq, out, lse, x);
    if (dk)
        prefix_backward_keys(dk, dv, out, lse, x);
}

// ----------------------------------------------------------------------------
// CUDA: a warp a row, whose lanes share the channels; lane l has the channels l, l + 32, ...

#if LLMC_KERNELS
constexpr unsigned PREFIX_WARPS = 8;
constexpr size_t PREFIX_CHANNELS = 256; // at most, in a head
constexpr int PREFIX_PACK = PREFIX_CHANNELS / 32;

// A lane's channels of a row, in float; 0 behind the last one.
struct PrefixRow {
    float v[PREFIX_PACK];
};
template <typename T>
__device__ PrefixRow prefix_row(const T* from, size_t HS) {
    PrefixRow row;
    for (int c = 0; c < PREFIX_PACK; c++) {
        size_t e = threadIdx.x % 32 + 32 * c;
        row.v[c] = e < HS ? to_float(from[e]) : 0;
    }
    return row;
}

// The dot product of two rows. Every lane gets it.
__device__ inline float prefix_dot(const PrefixRow& a, const PrefixRow& b) {
    float sum = 0;
    for (int c = 0; c < PREFIX_PACK; c++)
        sum += a.v[c] * b.v[c];
    return warp_sum(sum);
}

// Row number `row` of all (b,i,h), with the heads innermost.
struct PrefixPlace {
    size_t b, i, h;
};
__device__ inline PrefixPlace prefix_place(const AttentionDims& d, size_t row) {
    return {row / d.NH / d.Tq, row / d.NH % d.Tq, row % d.NH};
}

// out, lse = those of text and prefix. The loop is the CPU's.
template <typename T>
__global__ void prefix_forward_kernel(T* out, float* lse, AttentionOperands<T> x) {
    const AttentionDims& d = x.d;
    size_t number = size_t(blockIdx.x) * PREFIX_WARPS + threadIdx.x / 32;
    if (number >= d.B * d.Tq * d.NH) return; // whole warps
    auto [b, i, h] = prefix_place(d, number);

    // Begin with the text: a key of score lse.
    T* row = out + x.out_at(b, h, i);
    float* all = lse + x.lse_at(b, h, i);
    PrefixRow q = prefix_row(x.query(b, h, i), d.HS);
    PrefixRow sum = prefix_row(row, d.HS);
    float most = *all, total = 1;

    for (size_t j = 0; j < d.Tk; j++) {
        size_t key = x.key_at(0, h / (d.NH / d.NKV), j);
        float s = x.capped(prefix_dot(q, prefix_row(x.k + key, d.HS)));
        PrefixRow v = prefix_row(x.v + key, d.HS);
        float next = fmaxf(most, s);
        float old = expf(most - next), p = expf(s - next);
        total = total * old + p;
        for (int c = 0; c < PREFIX_PACK; c++)
            sum.v[c] = sum.v[c] * old + p * v.v[c];
        most = next;
    }

    // Write the mean, once every lane has read lse: the dot products' shuffles order no memory.
    __syncwarp();
    for (int c = 0; c < PREFIX_PACK; c++) {
        size_t e = threadIdx.x % 32 + 32 * c;
        if (e < d.HS)
            row[e] = from_acc<T>(sum.v[c] / total);
    }
    if (threadIdx.x % 32 == 0)
        *all = most + logf(total);
}

// dq += what the prefix adds. A warp has one row of queries.
template <typename T>
__global__ void prefix_queries_kernel(T* dq, const T* out, const float* lse,
                                      AttentionOperands<T> x) {
    const AttentionDims& d = x.d;
    size_t number = size_t(blockIdx.x) * PREFIX_WARPS + threadIdx.x / 32;
    if (number >= d.B * d.Tq * d.NH) return; // whole warps
    auto [b, i, h] = prefix_place(d, number);
    PrefixRow q = prefix_row(x.query(b, h, i), d.HS);
    PrefixRow dout = prefix_row(x.gradient(b, h, i), d.HS);
    float D = prefix_dot(dout, prefix_row(out + x.out_at(b, h, i), d.HS));
    float all = lse[x.lse_at(b, h, i)];

    // Add up over the keys in registers.
    PrefixRow sum = {};
    for (size_t j = 0; j < d.Tk; j++) {
        size_t key = x.key_at(0, h / (d.NH / d.NKV), j);
        PrefixRow k = prefix_row(x.k + key, d.HS);
        float dp = prefix_dot(dout, prefix_row(x.v + key, d.HS));
        float ds = prefix_weight(x, prefix_dot(q, k), all, dp, D).ds;
        for (int c = 0; c < PREFIX_PACK; c++)
            sum.v[c] += ds * k.v[c];
    }

    // Add to the gradient that comes through the text.
    T* row = dq + x.query_at(b, h, i);
    for (int c = 0; c < PREFIX_PACK; c++) {
        size_t e = threadIdx.x % 32 + 32 * c;
        if (e < d.HS)
            put(row + e, sum.v[c], true);
    }
}

// dk, dv. Block (j, kh) has one key; its warps share the rows that read it, and their sums are
// added in the order of the warps.
template <typename T>
__global__ void prefix_keys_kernel(float* dk, float* dv, const T* out, const float* lse,
                                   AttentionOperands<T> x) {
    LLMC_SHARED(float, sums, PREFIX_WARPS * 2 * PREFIX_CHANNELS); // (warp, dk and dv, channel)
    const AttentionDims& d = x.d;
    const size_t kh = blockIdx.y, group = d.NH / d.NKV;
    const size_t key = x.key_at(0, kh, blockIdx.x);
    const unsigned warp = threadIdx.x / 32;
    PrefixRow k = prefix_row(x.k + key, d.HS), v = prefix_row(x.v + key, d.HS);
    PrefixRow k_sum = {}, v_sum = {};

    // Walk over this warp's rows.
    for (size_t row = warp; row < d.B * d.Tq * group; row += PREFIX_WARPS) {
        size_t h = kh * group + row % group;
        size_t i = row / group % d.Tq, b = row / group / d.Tq;
        PrefixRow q = prefix_row(x.query(b, h, i), d.HS);
        PrefixRow dout = prefix_row(x.gradient(b, h, i), d.HS);
        float D = prefix_dot(dout, prefix_row(out + x.out_at(b, h, i), d.HS));
        float all = lse[x.lse_at(b, h, i)];
        auto [p, ds] = prefix_weight(x, prefix_dot(q, k), all, prefix_dot(dout, v), D);
        for (int c = 0; c < PREFIX_PACK; c++) {
            k_sum.v[c] += ds * q.v[c];
            v_sum.v[c] += p * dout.v[c];
        }
    }
    float* mine = sums + warp * 2 * PREFIX_CHANNELS;
    for (int c = 0; c < PREFIX_PACK; c++) {
        size_t e = threadIdx.x % 32 + 32 * c;
        mine[e] = k_sum.v[c];
        mine[PREFIX_CHANNELS + e] = v_sum.v[c];
    }
    __syncthreads();

    // Add the warps' sums: a thread has a channel of both gradients.
    if (threadIdx.x >= d.HS) return;
    float to_k = 0, to_v = 0;
    for (unsigned w = 0; w < PREFIX_WARPS; w++) {
        const float* theirs = sums + w * 2 * PREFIX_CHANNELS + threadIdx.x;
        to_k += theirs[0];
        to_v += theirs[PREFIX_CHANNELS];
    }
    put(dk + key + threadIdx.x, to_k, x.accumulate);
    put(dv + key + threadIdx.x, to_v, x.accumulate);
}

// A thread of the last kernel has a channel, so a block has at least as many threads as channels.
static_assert(PREFIX_WARPS * 32 >= PREFIX_CHANNELS, "a thread for each channel");

inline unsigned prefix_grid(const AttentionDims& d) {
    LLMC_CHECK(d.HS <= PREFIX_CHANNELS, "a prefix on a GPU has heads of at most %zu channels, not "
               "%zu", PREFIX_CHANNELS, d.HS);
    return unsigned(ceil_div(d.B * d.Tq * d.NH, size_t(PREFIX_WARPS)));
}
template <typename T>
void prefix_forward(T* out, float* lse, const AttentionOperands<T>& operands,
                    cudaStream_t stream) {
    AttentionOperands<T> x = completed(operands);
    launch(prefix_forward_kernel<T>, prefix_grid(x.d), PREFIX_WARPS * 32, 0, stream, out, lse, x);
}
template <typename T>
void prefix_backward(T* dq, float* dk, float* dv, const T* out, const float* lse,
                     const AttentionOperands<T>& operands, cudaStream_t stream) {
    AttentionOperands<T> x = completed(operands);
    unsigned threads = PREFIX_WARPS * 32;
    launch(prefix_queries_kernel<T>, prefix_grid(x.d), threads, 0, stream, dq, out, lse, x);
    if (!dk) return;
    dim3 keys(unsigned(x.d.Tk), unsigned(x.d.NKV));
    launch(prefix_keys_kernel<T>, keys, threads, 0, stream, dk, dv, out, lse, x);
}
#endif

// ----------------------------------------------------------------------------
// anywhere: as blocks call it, behind attention over the text

// The prefix of a layer: its rows, and the gradients that training makes of them.
struct PrefixRows {
    const void *k = nullptr, *v = nullptr; // (n,NKV,HS); null: the layer has no prefix
    void *dk = nullptr, *dv = nullptr;     // (n,NKV,HS) acc; null: not training
    size_t n = 0;
    size_t stride = 0;       // elements between rows; 0: NKV HS, all heads of a row
    bool accumulate = false; // dk, dv += instead of =
};

// The operands of attention over the text with the keys of the prefix in their place.
template <typename T>
AttentionOperands<T> prefix_operands(AttentionOperands<T> x, const PrefixRows& p) {
    x.k = static_cast<const T*>(p.k);
    x.v = static_cast<const T*>(p.v);
    x.accumulate = p.accumulate;
    // The rows serve every sequence of the batch.
    x.d.Tk = p.n;
    x.d.k_stride = x.d.v_stride = p.stride ? p.stride : x.d.NKV * x.d.HS;
    x.d.k_batch = x.d.v_batch = 0;
    return x;
}

// Join the prefix to what attention over the text gave.
template <typename T, typename S>
void join_prefix(T* out, acc_t<T>* lse, const AttentionOperands<T>& x, const PrefixRows& p,
                 S where) {
    if (!p.k) return;
    prefix_forward(out, lse, prefix_operands(x, p), where);
}

// Add the prefix's part to dq, and make the gradients of its rows. dq is the gradient of the
// rotated query: RoPE's backward pass comes later.
template <typename T, typename S>
void join_prefix_backward(T* dq, const T* out, const acc_t<T>* lse, const AttentionOperands<T>& x,
                          const PrefixRows& p, S where) {
    typedef acc_t<T> A;
    if (!p.k) return;
    A *dk = static_cast<A*>(p.dk), *dv = static_cast<A*>(p.dv);
    prefix_backward(dq, dk, dv, out, lse, prefix_operands(x, p), where);
}

} // namespace llmc
