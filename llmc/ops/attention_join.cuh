// attention_join.cuh - keys, a prefix, sinks that join attention by log-sum-exp - arXiv:2112.05682
//   Attention over some keys is one more key: its score is lse, its value is out. So more keys join
//   what attention over the text gave, and no kernel of attention knows of them.
//   merge    attention over another block of keys, such as another rank's:
//              m = max(lse, part_lse),   l = exp(lse - m) + exp(part_lse - m)
//              out = (out exp(lse - m) + part exp(part_lse - m)) / l,   lse = m + log(l)
//   prefix   n trained keys and values before every sequence (prefix tuning, arXiv:2101.00190):
//              s_j = cap(scale q.k_j),   total = exp(lse) + sum_j exp(s_j)
//              out = (exp(lse) out + sum_j exp(s_j) v_j) / total,   lse = log(total)
//            Every query sees all keys: they have no position, so no RoPE, mask, document.
//   sinks    a logit s of each head, a key whose value is 0 (arXiv:2508.10925):
//              out' = out sigmoid(lse - s),   lse' = log(exp(lse) + exp(s))
//   Backward reads the joined out and lse, and so does attention over the text: D = dout.out.
//     prefix   p_j = exp(s_j - lse),   ds_j = p_j (dout.v_j - D) cap'(s_j) scale
//              dq += sum_j ds_j k_j,   dk_j = sum ds_j q,   dv_j = sum p_j dout
//              The sums of dk, dv go over the batch, its queries, and the heads that share the key.
//     sinks    ds = - sum over rows of exp(s - lse') D
//   q, dq, out, dout (B,T,NH,HS)   lse (B,NH,T)   k, v (n,NKV,HS), dk, dv acc   sinks (NH)
//   part (B,T,NH,HS), part_lse (B,NH,T): the other block's; out in float then (double in double)
//   sums (parts,stride): parts of ds, of which NH columns are written; add_parts() adds them up. A
//   part is a range of rows: all of them on the CPU.
//   Contract: out, lse become those of all keys; dq +=; dk, dv = or += (x.accumulate); sums =.
//             Merge any number of blocks, in any order. A row that saw nothing in a block (lse
//             -inf) adds nothing, to the bit; one that saw nothing at all keeps out 0, lse -inf. A
//             prefix's heads have up to 256 channels on a GPU. Bitwise repeatable for any number of
//             threads.
//   Cost: merge and sinks are memory-bound. A prefix takes 4 B T NH HS n FLOPs forward, and 4 times
//         as many backward, because queries and keys each compute the scores. On a GPU dk and dv
//         read all rows again for each key of the prefix, from the L2 cache: it suits tens of keys.
//   To copy: this file, attention_cpu.cuh, attention_types.h, types.h and cuda_common.h.
#pragma once
#include <algorithm>
#include <vector>
#include "attention_cpu.cuh"
#include "attention_types.h"
#include "cuda_common.h"
#include "types.h"

namespace llmc {

// ----------------------------------------------------------------------------
// one row

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

// A row's weight of one key, and the gradient of its score times the scale of q.k.
template <typename A> struct PrefixWeight {
    A p, ds;
};
template <typename T>
LLMC_HD inline PrefixWeight<acc_t<T>> prefix_weight(const AttentionOperands<T>& x, acc_t<T> product,
                                                    acc_t<T> lse, acc_t<T> dp, acc_t<T> D) {
    acc_t<T> s = x.capped(product);
    acc_t<T> p = std::exp(s - lse);
    return {p, p * (dp - D) * x.cap_derivative(s) * x.scale};
}

// log(exp(lse) + exp(s)). A row that saw no key has an lse of -infinity.
template <typename A> LLMC_HD A joined_lse(A lse, A s) {
    // The larger one stays outside of the exponential, so that none overflows.
    A most = lse > s ? lse : s;
    return most + std::log1p(std::exp(-std::fabs(lse - s)));
}

// ----------------------------------------------------------------------------
// CPU

// Join another block of keys.
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

// Join a prefix: the text's result is the first key, the keys of the prefix follow it.
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
                    A old = std::exp(most - next);
                    A p = std::exp(s - next);
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
                put_row(dq + x.query_at(b, h, i), sum.data(), d.HS, true);
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
                size_t i = row / group % d.Tq;
                size_t b = row / group / d.Tq;
                const T* q = x.query(b, h, i);
                const T* dout = x.gradient(b, h, i);
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
            put_row(dk + key, k_sum.data(), d.HS, x.accumulate);
            put_row(dv + key, v_sum.data(), d.HS, x.accumulate);
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

// Join sinks. Threads share out rows, in backward heads.
template <typename T>
void sinks_forward(T* out, acc_t<T>* lse, const T* sinks, const AttentionOperands<T>& operands,
                   Cpu) {
    typedef acc_t<T> A;
    const AttentionOperands<T> x = completed(operands);
    #pragma omp parallel for collapse(2)
    for (size_t b = 0; b < x.d.B; b++)
        for (size_t i = 0; i < x.d.Tq; i++)
            for (size_t h = 0; h < x.d.NH; h++) {
                // Find the share of the softmax that is left for the text.
                A& all = lse[x.lse_at(b, h, i)];
                A s = to_acc(sinks[h]);
                A share = 1 / (1 + std::exp(s - all));

                // Scale the row: a sink's value is 0.
                T* row = out + x.out_at(b, h, i);
                for (size_t c = 0; c < x.d.HS_v; c++)
                    row[c] = from_acc<T>(share * to_acc(row[c]));
                all = joined_lse(all, s);
            }
}

// The gradients of sinks, each a sum over all rows: one part, so no stride is needed.
template <typename T>
void sinks_backward(acc_t<T>* sums, size_t, const T* out, const acc_t<T>* lse, const T* sinks,
                    const AttentionOperands<T>& operands, Cpu) {
    typedef acc_t<T> A;
    const AttentionOperands<T> x = completed(operands);
    #pragma omp parallel for
    for (size_t h = 0; h < x.d.NH; h++) {
        A sum = 0;
        A s = to_acc(sinks[h]);
        for (size_t n = 0; n < x.d.B * x.d.Tq; n++) {
            size_t b = n / x.d.Tq;
            size_t i = n % x.d.Tq;
            A D = channel_dot(out + x.out_at(b, h, i), x.gradient(b, h, i), x.d.HS_v);

            // The sink's share of the softmax; lse is the joined one.
            A p = std::exp(s - lse[x.lse_at(b, h, i)]);
            sum -= p * D;
        }
        sums[h] = sum;
    }
}

// The number of parts of the gradient's sums. It does not depend on the rows.
constexpr size_t SINK_PARTS = 64; // on a GPU
inline size_t sink_parts(Cpu) { return 1; }

// ----------------------------------------------------------------------------
// CUDA: a warp a head's row

#if LLMC_KERNELS
inline size_t sink_parts(cudaStream_t) { return SINK_PARTS; }
constexpr unsigned JOIN_WARPS = 8;

// Row number `row` of all (b,i,h), with the heads innermost.
struct RowPlace {
    size_t b, i, h;
};
__device__ inline RowPlace row_place(const AttentionDims& d, size_t row) {
    return {row / d.NH / d.Tq, row / d.NH % d.Tq, row % d.NH};
}

// Join another block of keys. Rows in out and lse are indexed as on the CPU.
template <typename P>
__global__ void attention_merge_kernel(float* out, float* lse, const P* part, const float* part_lse,
                                       size_t B, size_t T, size_t NH, size_t HS) {
    size_t row = size_t(blockIdx.x) * JOIN_WARPS + threadIdx.x / 32;
    if (row >= B * T * NH) return; // whole warps
    // Every lane computes the weights: two exponentials are cheaper than a shuffle of the results.
    size_t h = row % NH;
    size_t t = row / NH % T;
    size_t b = row / NH / T;
    size_t at = (b * NH + h) * T + t;
    MergeWeights<float> w = merge_weights(lse[at], part_lse[at]);
    for (size_t e = row * HS + threadIdx.x % 32; e < (row + 1) * HS; e += 32)
        out[e] = merged(w, out[e], to_float(part[e]));
    __syncwarp(); // every lane has read lse
    if (threadIdx.x % 32 == 0)
        lse[at] = w.lse;
}

// ---- a prefix: the lanes share the channels; lane l has the channels l, l + 32, ...
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

// out, lse = those of text and prefix. The loop is the CPU's.
template <typename T>
__global__ void prefix_forward_kernel(T* out, float* lse, AttentionOperands<T> x) {
    const AttentionDims& d = x.d;
    size_t number = size_t(blockIdx.x) * JOIN_WARPS + threadIdx.x / 32;
    if (number >= d.B * d.Tq * d.NH) return; // whole warps
    auto [b, i, h] = row_place(d, number);

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
        float old = expf(most - next);
        float p = expf(s - next);
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
    size_t number = size_t(blockIdx.x) * JOIN_WARPS + threadIdx.x / 32;
    if (number >= d.B * d.Tq * d.NH) return; // whole warps
    auto [b, i, h] = row_place(d, number);
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

// dk, dv. Block (j, kh) has one key. Keys are few: the many warps share the rows that read it.
constexpr unsigned KEY_WARPS = 24;
template <typename T>
__global__ void __launch_bounds__(KEY_WARPS * 32)
prefix_keys_kernel(float* dk, float* dv, const T* out, const float* lse, AttentionOperands<T> x) {
    LLMC_SHARED(float, sums, 2 * PREFIX_CHANNELS); // (dk and dv, channel)
    const AttentionDims& d = x.d;
    const size_t kh = blockIdx.y;
    const size_t group = d.NH / d.NKV;
    const size_t key = x.key_at(0, kh, blockIdx.x);
    const unsigned warp = threadIdx.x / 32;
    PrefixRow k = prefix_row(x.k + key, d.HS);
    PrefixRow v = prefix_row(x.v + key, d.HS);
    PrefixRow k_sum = {}, v_sum = {};

    // Walk over this warp's rows. Numbers of 32 bits divide much faster than of 64.
    const unsigned queries = unsigned(d.B * d.Tq), T_q = unsigned(d.Tq);
    for (unsigned h = unsigned(kh * group); h < (kh + 1) * group; h++)
        for (unsigned n = warp; n < queries; n += KEY_WARPS) {
            unsigned b = n / T_q;
            unsigned i = n % T_q;
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

    // Add the warps' sums, one warp after the other.
    for (unsigned w = 0; w < KEY_WARPS; w++) {
        float* at = sums + threadIdx.x % 32;
        for (int c = 0; c < PREFIX_PACK && warp == w; c++, at += 32) {
            at[0] = k_sum.v[c] + (w > 0 ? at[0] : 0);
            at[PREFIX_CHANNELS] = v_sum.v[c] + (w > 0 ? at[PREFIX_CHANNELS] : 0);
        }
        __syncthreads(); // the next warp reads them
    }

    // A thread has a channel of both gradients.
    if (threadIdx.x >= d.HS) return;
    put(dk + key + threadIdx.x, sums[threadIdx.x], x.accumulate);
    put(dv + key + threadIdx.x, sums[PREFIX_CHANNELS + threadIdx.x], x.accumulate);
}

static_assert(KEY_WARPS * 32 >= PREFIX_CHANNELS, "a thread for each channel");

// ---- sinks: backward a warp a head's part
template <typename T>
__global__ void sinks_forward_kernel(T* out, float* lse, const T* sinks, AttentionOperands<T> x) {
    size_t number = size_t(blockIdx.x) * JOIN_WARPS + threadIdx.x / 32;
    if (number >= x.d.B * x.d.Tq * x.d.NH) return; // whole warps
    auto [b, i, h] = row_place(x.d, number);

    // Find the share of the softmax that is left for the text.
    float* all = lse + x.lse_at(b, h, i);
    float before = *all;
    float s = to_float(sinks[h]);
    float share = 1 / (1 + expf(s - before));

    // The lanes share out the channels.
    T* row = out + x.out_at(b, h, i);
    for (size_t c = threadIdx.x % 32; c < x.d.HS_v; c += 32)
        row[c] = from_acc<T>(share * to_float(row[c]));

    // Every lane has read lse: the first one may write it.
    __syncwarp();
    if (threadIdx.x % 32 == 0) *all = joined_lse(before, s);
}

template <typename T>
__global__ void sinks_backward_kernel(float* sums, size_t stride, const T* out, const float* lse,
                                      const T* sinks, AttentionOperands<T> x) {
    size_t number = size_t(blockIdx.x) * JOIN_WARPS + threadIdx.x / 32;
    if (number >= SINK_PARTS * x.d.NH) return; // whole warps
    size_t part = number / x.d.NH;
    size_t h = number % x.d.NH;
    float s = to_float(sinks[h]);
    float sum = 0;

    // Walk over the part's rows, of which there may be none.
    size_t rows = x.d.B * x.d.Tq;
    size_t end = rows * (part + 1) / SINK_PARTS;
    for (size_t n = rows * part / SINK_PARTS; n < end; n++) {
        size_t b = n / x.d.Tq;
        size_t i = n % x.d.Tq;
        const T* row = out + x.out_at(b, h, i);
        const T* drow = x.gradient(b, h, i);
        float D = 0;
        for (size_t c = threadIdx.x % 32; c < x.d.HS_v; c += 32)
            D += to_float(row[c]) * to_float(drow[c]);

        // All lanes get the row's sum, and add the same.
        float p = expf(s - lse[x.lse_at(b, h, i)]);
        sum -= p * warp_sum(D);
    }
    if (threadIdx.x % 32 == 0) sums[part * stride + h] = sum;
}

// ----------------------------------------------------------------------------
// launchers

// One warp for each of n rows or parts.
template <typename Kernel, typename... Args>
void launch_join(Kernel* kernel, size_t n, cudaStream_t stream, Args... args) {
    launch(kernel, unsigned(ceil_div(n, size_t(JOIN_WARPS))), JOIN_WARPS * 32, stream, args...);
}
inline size_t joined_rows(const AttentionDims& d) { return d.B * d.Tq * d.NH; }

template <typename P>
void attention_merge(float* out, float* lse, const P* part, const float* part_lse, size_t B,
                     size_t T, size_t NH, size_t HS, cudaStream_t stream) {
    launch_join(attention_merge_kernel<P>, B * T * NH, stream, out, lse, part, part_lse, B, T, NH,
                HS);
}

inline void check_prefix(const AttentionDims& d) {
    LLMC_CHECK(d.HS <= PREFIX_CHANNELS, "a prefix on a GPU has heads of at most %zu channels, not "
               "%zu", PREFIX_CHANNELS, d.HS);
}
template <typename T>
void prefix_forward(T* out, float* lse, const AttentionOperands<T>& operands, cudaStream_t stream) {
    AttentionOperands<T> x = completed(operands);
    check_prefix(x.d);
    launch_join(prefix_forward_kernel<T>, joined_rows(x.d), stream, out, lse, x);
}
template <typename T>
void prefix_backward(T* dq, float* dk, float* dv, const T* out, const float* lse,
                     const AttentionOperands<T>& operands, cudaStream_t stream) {
    AttentionOperands<T> x = completed(operands);
    check_prefix(x.d);
    launch_join(prefix_queries_kernel<T>, joined_rows(x.d), stream, dq, out, lse, x);
    if (!dk) return;
    dim3 keys(unsigned(x.d.Tk), unsigned(x.d.NKV));
    launch(prefix_keys_kernel<T>, keys, KEY_WARPS * 32, stream, dk, dv, out, lse, x);
}

// Sinks. Parts without rows become 0.
template <typename T>
void sinks_forward(T* out, float* lse, const T* sinks, const AttentionOperands<T>& operands,
                   cudaStream_t stream) {
    AttentionOperands<T> x = completed(operands);
    launch_join(sinks_forward_kernel<T>, joined_rows(x.d), stream, out, lse, sinks, x);
}
template <typename T>
void sinks_backward(float* sums, size_t stride, const T* out, const float* lse, const T* sinks,
                    const AttentionOperands<T>& operands, cudaStream_t stream) {
    AttentionOperands<T> x = completed(operands);
    launch_join(sinks_backward_kernel<T>, SINK_PARTS * x.d.NH, stream, sums, stride, out, lse,
                sinks, x);
}
#endif

// ----------------------------------------------------------------------------
// anywhere: as blocks call it, behind attention over the text

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

// The sinks of these heads, and the parts of their gradient.
template <typename T> struct Sinks {
    // The heads are those with which this rank attends.
    const T* logits = nullptr; // (NH); null: the model has none
    acc_t<T>* sums = nullptr;  // (parts,stride); null: not training
    size_t stride = 0;         // heads of the rank
};

// Join prefix and sinks, those that there are, to what attention over the text gave.
template <typename T, typename S>
void join_keys(T* out, acc_t<T>* lse, const AttentionOperands<T>& x, const PrefixRows& prefix,
               const Sinks<T>& sinks, S where) {
    if (prefix.k) prefix_forward(out, lse, prefix_operands(x, prefix), where);
    if (sinks.logits) sinks_forward(out, lse, sinks.logits, x, where);
}

// Add their part to dq, and make their own gradients. dq is the gradient of the rotated query:
// RoPE's backward pass comes later.
template <typename T, typename S>
void join_keys_backward(T* dq, const T* out, const acc_t<T>* lse, const AttentionOperands<T>& x,
                        const PrefixRows& prefix, const Sinks<T>& sinks, S where) {
    typedef acc_t<T> A;
    A *dk = static_cast<A*>(prefix.dk), *dv = static_cast<A*>(prefix.dv);
    if (prefix.k)
        prefix_backward(dq, dk, dv, out, lse, prefix_operands(x, prefix), where);
    if (sinks.logits)
        sinks_backward(sinks.sums, sinks.stride, out, lse, sinks.logits, x, where);
}

} // namespace llmc
