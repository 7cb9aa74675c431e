// attention_cpu.cuh - attention by its definition, the reference of all versions - arXiv:1706.03762
//   p = softmax of s over the keys that i sees,   out_i = sum_j p_ij v_j   s: attention_types.h
//   D_i = dout_i.out_i,   ds_ij = p_ij (dout_i.v_j - D_i) cap'(s_ij)
//   dv_j = sum_i p_ij dout_i,   dk_j = scale sum_i ds_ij q_i,   dq_i = scale sum_j ds_ij k_j
//   out (B,Tq,NH,HS_v)   lse (B,NH,Tq) acc: log of the sum of exp   dq, dk, dv as q, k, v
//   Contract: out, lse =   dq, dk, dv = or += (x.accumulate).  T or acc_t<T> for out and gradients.
//             A row that sees nothing: out 0, lse -inf, gradients 0.  Bitwise repeatable.
//   Cost: one query at a time, a row of Tk scores at hand; no tiles. attention_tiled.cuh is the
//         fast one, and comes here for what it does not take.
//   To copy: this file, attention_types.h and types.h.
#pragma once
#include <algorithm>
#include <vector>
#include "attention_types.h"

namespace llmc {

// Sum in acc_t<T>, in the order of the channels.
template <typename T>
acc_t<T> channel_dot(const T* a, const T* b, size_t n) {
    acc_t<T> sum = 0;
    for (size_t e = 0; e < n; e++)
        sum += to_acc(a[e]) * to_acc(b[e]);
    return sum;
}

// A query's capped products with all keys (Tk), and its scores: with ALiBi, -inf where masked.
template <typename T>
void reference_scores(std::vector<acc_t<T>>& capped, std::vector<acc_t<T>>& scores,
                      const AttentionOperands<T>& x, size_t b, size_t h, size_t i) {
    typedef acc_t<T> A;
    size_t kh = h / (x.d.NH / x.d.NKV);
    for (size_t j = 0; j < x.d.Tk; j++) {
        int distance = 0;
        // Masked keys keep no capped product: nobody reads it.
        scores[j] = A(-INFINITY);
        if (!x.visible(b, i, j, distance)) continue;
        capped[j] = x.capped(channel_dot(x.query(b, h, i), x.k + x.key_at(b, kh, j), x.d.HS));
        scores[j] = capped[j] - A(x.slope(h)) * A(distance);
    }
}

// A task is one query of one head; tasks share nothing but the operands.
template <typename T, typename O>
void attention_forward_reference(O* out, acc_t<T>* lse, const AttentionOperands<T>& operands) {
    typedef acc_t<T> A;
    const AttentionOperands<T> x = completed(operands);
    const AttentionDims& d = x.d;
    #pragma omp parallel for collapse(3)
    for (size_t b = 0; b < d.B; b++)
        for (size_t h = 0; h < d.NH; h++)
            for (size_t i = 0; i < d.Tq; i++) {
                size_t kh = h / (d.NH / d.NKV);
                std::vector<A> capped(d.Tk), s(d.Tk), sum(d.HS_v);
                reference_scores(capped, s, x, b, h, i);

                // Softmax below the row's maximum; a row that sees nothing has none.
                A most = *std::max_element(s.begin(), s.end()), total = 0;
                bool seen = false;
                for (A y : s)
                    seen |= y != A(-INFINITY);
                // Leave -inf out by hand: where a row sees nothing, -inf - most
                // would be NaN.
                for (A& y : s) {
                    y = y == A(-INFINITY) ? 0 : std::exp(y - most);
                    total += y;
                }
                lse[x.lse_at(b, h, i)] = seen ? most + std::log(total) : A(-INFINITY);

                // The values' mean, weighted.
                for (size_t j = 0; j < d.Tk; j++)
                    // Skip weights of 0: a masked value may be NaN, and 0 times it too.
                    for (size_t e = 0; s[j] != 0 && e < d.HS_v; e++)
                        sum[e] += s[j] / total * to_acc(x.v[x.value_at(b, kh, j) + e]);
                for (size_t e = 0; e < d.HS_v; e++)
                    put(out + x.out_at(b, h, i) + e, sum[e], false);
            }
}

// One query's part of the gradients: dq (HS) whole, added to dk (Tk,HS) and dv (Tk,HS_v).
template <typename T>
void reference_backward_row(std::vector<acc_t<T>>& dq, std::vector<acc_t<T>>& dk,
                            std::vector<acc_t<T>>& dv, const T* out, const acc_t<T>* lse,
                            const AttentionOperands<T>& x, size_t b, size_t h, size_t i) {
    typedef acc_t<T> A;
    const AttentionDims& d = x.d;
    const T *q = x.query(b, h, i), *dout = x.gradient(b, h, i); // (HS), (HS_v)
    const A D = channel_dot(dout, out + x.out_at(b, h, i), d.HS_v);
    // Compute the scores again: forward kept no more of them than lse.
    std::vector<A> capped(d.Tk), s(d.Tk);
    reference_scores(capped, s, x, b, h, i);

    // Walk the keys that the query sees.
    std::fill(dq.begin(), dq.end(), A(0));
    for (size_t j = 0; j < d.Tk; j++) {
        // A masked key has p = 0 and gives nothing.
        if (s[j] == A(-INFINITY)) continue;
        size_t kh = h / (d.NH / d.NKV);
        const T *k = x.k + x.key_at(b, kh, j), *v = x.v + x.value_at(b, kh, j);
        // ds carries scale, so dq and dk need no factor of their own.
        A p = std::exp(s[j] - lse[x.lse_at(b, h, i)]);
        A ds = p * (channel_dot(dout, v, d.HS_v) - D) * x.cap_derivative(capped[j]) * x.scale;
        // dq is this query's alone; dk and dv collect over queries and heads.
        for (size_t e = 0; e < d.HS; e++)
            dq[e] += ds * to_acc(k[e]);
        for (size_t e = 0; e < d.HS; e++)
            dk[j * d.HS + e] += ds * to_acc(q[e]);
        for (size_t e = 0; e < d.HS_v; e++)
            dv[j * d.HS_v + e] += p * to_acc(dout[e]);
    }
}

// A task owns a key head: its dk and dv, and dq of the heads that read it.
template <typename T, typename Q, typename K>
void attention_backward_reference(Q* dq, K* dk, K* dv, const T* out, const acc_t<T>* lse,
                                  const AttentionOperands<T>& operands) {
    typedef acc_t<T> A;
    const AttentionOperands<T> x = completed(operands);
    const AttentionDims& d = x.d;
    size_t group = d.NH / d.NKV;
    #pragma omp parallel for collapse(2)
    for (size_t b = 0; b < d.B; b++)
        for (size_t kh = 0; kh < d.NKV; kh++) {
            // Sum over the queries of all heads that read this key head.
            // Sums stay in acc_t<T> to the end, so each gradient is rounded to K once.
            std::vector<A> row(d.HS), keys(d.Tk * d.HS), values(d.Tk * d.HS_v);
            for (size_t h = kh * group; h < (kh + 1) * group; h++)
                for (size_t i = 0; i < d.Tq; i++) {
                    reference_backward_row(row, keys, values, out, lse, x, b, h, i);
                    for (size_t e = 0; e < d.HS; e++)
                        // No other task writes this row of dq.
                        put(dq + x.query_at(b, h, i) + e, row[e], x.accumulate);
                }

            // Write dk and dv.
            for (size_t j = 0; j < d.Tk; j++) {
                for (size_t e = 0; e < d.HS; e++)
                    put(dk + x.key_at(b, kh, j) + e, keys[j * d.HS + e], x.accumulate);
                for (size_t e = 0; e < d.HS_v; e++)
                    put(dv + x.value_at(b, kh, j) + e, values[j * d.HS_v + e], x.accumulate);
            }
        }
}

} // namespace llmc
