// attention_cpu.cuh - attention by its definition, the reference of all versions - arXiv:1706.03762
//   p = softmax of s over the keys that i sees,   out_i = sum_j p_ij v_j   s: attention_types.h
//   D_i = dout_i.out_i,   ds_ij = p_ij (dout_i.v_j - D_i) cap'(s_ij)
//   dv_j = sum_i p_ij dout_i,   dk_j = scale sum_i ds_ij q_i,   dq_i = scale sum_j ds_ij k_j
//   out (B,Tq,NH,HS_v)   lse (B,NH,Tq) acc: log of the sum of exp   dq, dk, dv as q, k, v
//   Contract: out, lse =   dq, dk, dv = or += (x.accumulate).  T or acc_t<T> for out and gradients.
//             A row that sees nothing: out 0, lse -inf, gradients 0.  Bitwise repeatable.
//   Cost: one query at a time, with its row of Tk scores; no tiles. attention_tiled.cuh is the fast
//         version, and calls this one for operands that it does not take.
//   To copy: this file, attention_types.h and types.h.
#pragma once
#include <algorithm>
#include <vector>
#include "attention_types.h"
#include "types.h"

namespace llmc {

// The dot product of two rows, summed in acc_t<T> in the order of the channels.
template <typename T>
acc_t<T> channel_dot(const T* a, const T* b, size_t n) {
    acc_t<T> sum = 0;
    for (size_t e = 0; e < n; e++)
        sum += to_acc(a[e]) * to_acc(b[e]);
    return sum;
}

// Write n finished sums, or add them to what is there.
template <typename O, typename A>
void put_row(O* to, const A* sums, size_t n, bool accumulate) {
    for (size_t e = 0; e < n; e++)
        put(to + e, sums[e], accumulate);
}

// The same for rows of n sums, which go to rows that are `stride` apart.
template <typename O, typename A>
void store_rows(O* to, const A* sums, size_t rows, size_t stride, size_t n, bool accumulate) {
    for (size_t i = 0; i < rows; i++)
        put_row(to + i * stride, sums + i * n, n, accumulate);
}

// The products of one query with all keys, which both forward and backward need.
template <typename T> struct ReferenceScores {
    std::vector<acc_t<T>> capped; // (Tk) before ALiBi; masked keys are never read
    std::vector<acc_t<T>> s;      // (Tk) with ALiBi, -inf where masked
};

// The scores of query i of head h with all keys.
template <typename T>
ReferenceScores<T> reference_scores(const AttentionOperands<T>& x, size_t b, size_t h, size_t i) {
    typedef acc_t<T> A;
    size_t kh = h / (x.d.NH / x.d.NKV);
    const T* q = x.query(b, h, i);

    // Multiply with the keys that the query sees. The others keep -inf.
    std::vector<A> capped(x.d.Tk);
    std::vector<A> s(x.d.Tk, A(-INFINITY));
    for (size_t j = 0; j < x.d.Tk; j++) {
        int distance = 0;
        if (!x.visible(b, i, j, distance)) continue;
        const T* k = x.k + x.key_at(b, kh, j);
        A product = channel_dot(q, k, x.d.HS);
        capped[j] = x.capped(product);

        // ALiBi: a key counts less the further back it is.
        s[j] = capped[j] - A(x.slope(h)) * A(distance);
    }
    return {capped, s};
}

// Turn scores into weights that add up to 1. Returns lse: -inf for a row that sees nothing.
template <typename A>
A reference_softmax(std::vector<A>& s) {
    A most = *std::max_element(s.begin(), s.end());
    bool seen = std::any_of(s.begin(), s.end(), [](A y) { return y != A(-INFINITY); });

    // Test for -inf by hand: in a row that sees nothing, -inf - most would be NaN.
    A total = 0;
    for (A& y : s) {
        bool masked = y == A(-INFINITY);
        y = masked ? 0 : std::exp(y - most);
        total += y;
    }
    if (!seen) return A(-INFINITY);

    // Divide the weights, not the sum of values: out is the mean that the definition states.
    for (A& y : s)
        y /= total;
    return most + std::log(total);
}

// Forward by the definition. A task is one query of one head; tasks share only the operands.
template <typename T, typename O>
void attention_forward_reference(O* out, acc_t<T>* lse, const AttentionOperands<T>& operands) {
    typedef acc_t<T> A;
    const AttentionOperands<T> x = completed(operands);
    const AttentionDims& d = x.d;
    #pragma omp parallel for collapse(3)
    for (size_t b = 0; b < d.B; b++)
        for (size_t h = 0; h < d.NH; h++)
            for (size_t i = 0; i < d.Tq; i++) {
                std::vector<A> p = reference_scores(x, b, h, i).s;
                lse[x.lse_at(b, h, i)] = reference_softmax(p);

                // Sum the weighted values. Skip weights of 0: a masked value may be NaN.
                size_t kh = h / (d.NH / d.NKV);
                std::vector<A> sum(d.HS_v);
                for (size_t j = 0; j < d.Tk; j++) {
                    const T* v = x.v + x.value_at(b, kh, j);
                    for (size_t e = 0; p[j] != 0 && e < d.HS_v; e++)
                        sum[e] += p[j] * to_acc(v[e]);
                }

                // Round each sum once.
                put_row(out + x.out_at(b, h, i), sum.data(), d.HS_v, false);
            }
}

// Sums of gradients in acc_t<T>, so that each gradient is rounded once.
template <typename T> struct ReferenceSums {
    std::vector<acc_t<T>> dq; // (HS)     of one query
    std::vector<acc_t<T>> dk; // (Tk,HS)  of one key head, over its queries and heads
    std::vector<acc_t<T>> dv; // (Tk,HS_v)
};

// Compute the dq of one query, and add its part to dk and dv.
template <typename T>
void reference_backward_row(ReferenceSums<T>& sums, const T* out, const acc_t<T>* lse,
                            const AttentionOperands<T>& x, size_t b, size_t h, size_t i) {
    typedef acc_t<T> A;
    const AttentionDims& d = x.d;
    const T* q = x.query(b, h, i);       // (HS)
    const T* dout = x.gradient(b, h, i); // (HS_v)
    size_t kh = h / (d.NH / d.NKV);

    // Compute the scores again: forward kept only lse.
    const ReferenceScores<T> scores = reference_scores(x, b, h, i);
    const A row_lse = lse[x.lse_at(b, h, i)];
    const T* row = out + x.out_at(b, h, i); // (HS_v)
    const A D = channel_dot(dout, row, d.HS_v);
    std::fill(sums.dq.begin(), sums.dq.end(), A(0));

    // Walk the keys. D is the mean of dp under p, which the softmax's gradient subtracts.
    for (size_t j = 0; j < d.Tk; j++) {
        // A masked key has p = 0 and contributes nothing.
        if (scores.s[j] == A(-INFINITY)) continue;
        const T* k = x.k + x.key_at(b, kh, j);
        const T* v = x.v + x.value_at(b, kh, j);

        // Let ds carry scale, so that dq and dk need no factor of their own.
        A p = std::exp(scores.s[j] - row_lse);
        A dp = channel_dot(dout, v, d.HS_v);
        A ds = p * (dp - D) * x.cap_derivative(scores.capped[j]) * x.scale;

        // Add up by channels: dq belongs to this query, dk and dv sum over queries.
        A* dk = sums.dk.data() + j * d.HS;
        A* dv = sums.dv.data() + j * d.HS_v;
        for (size_t e = 0; e < d.HS; e++) {
            sums.dq[e] += ds * to_acc(k[e]);
            dk[e] += ds * to_acc(q[e]);
        }
        for (size_t e = 0; e < d.HS_v; e++)
            dv[e] += p * to_acc(dout[e]);
    }
}

// Backward by the definition. A task owns a key head: dk and dv, and dq of the heads that read it.
template <typename T, typename Q, typename K>
void attention_backward_reference(Q* dq, K* dk, K* dv, const T* out, const acc_t<T>* lse,
                                  const AttentionOperands<T>& operands) {
    typedef std::vector<acc_t<T>> Sums;
    const AttentionOperands<T> x = completed(operands);
    const AttentionDims& d = x.d;
    size_t group = d.NH / d.NKV;
    #pragma omp parallel for collapse(2)
    for (size_t b = 0; b < d.B; b++)
        for (size_t kh = 0; kh < d.NKV; kh++) {
            // Sum over the queries of all heads that read this key head.
            ReferenceSums<T> sums = {Sums(d.HS), Sums(d.Tk * d.HS), Sums(d.Tk * d.HS_v)};
            for (size_t h = kh * group; h < (kh + 1) * group; h++)
                for (size_t i = 0; i < d.Tq; i++) {
                    reference_backward_row(sums, out, lse, x, b, h, i);

                    // No other task writes this row of dq.
                    put_row(dq + x.query_at(b, h, i), sums.dq.data(), d.HS, x.accumulate);
                }

            // Write dk and dv.
            K* k = dk + x.key_at(b, kh, 0);
            K* v = dv + x.value_at(b, kh, 0);
            store_rows(k, sums.dk.data(), d.Tk, d.k_stride, d.HS, x.accumulate);
            store_rows(v, sums.dv.data(), d.Tk, d.v_stride, d.HS_v, x.accumulate);
        }
}

// ----------------------------------------------------------------------------
// ALiBi

// Fill in the slopes. With n heads, n a power of two, head h has the slope 2^(-8 (h+1) / n).
// Further heads take every second slope of the next power of two.
inline void alibi_slopes(float* slopes, size_t NH) { // (NH)
    size_t n = 1;
    while (n * 2 <= NH) n *= 2;
    for (size_t h = 0; h < NH; h++) {
        // From head n on: 2^(-4/n), 2^(-12/n), ..., with exponents between the first heads'.
        double first = -8.0 * double(h + 1) / double(n);
        double further = -4.0 * double(2 * (h - n) + 1) / double(n);
        slopes[h] = float(std::pow(2.0, h < n ? first : further));
    }
}

} // namespace llmc
