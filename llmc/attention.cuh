// attention.cuh - causal attention with online softmax, in O(T) memory, forward and backward -
// arXiv:2205.14135
//   s_ij = q_i.k_j / sqrt(HS) - slope_h (pos_i - pos_j);  p = softmax over the keys that i sees;
//   out_i = sum_j p_ij v_j
//   i sees j when doc_start_i <= pos_j <= pos_i: positions and documents come from the batch,
//   never from an index.
//   q (B,Tq,NH,HS) rows q_stride apart   k, v (B,Tk,NKV,HS) rows kv_stride apart   out, dout
//   (B,Tq,NH,HS)
//   lse (B,NH,Tq) acc: log of the sum of exp, kept for backward, and to merge partial results over
//   blocks of keys.
//   MHA, MQA, GQA: head h reads key head h / (NH/NKV). ALiBi (arXiv:2108.12409): slopes (NH), or
//   null.
//   Backward: D_i = dout_i.out_i;  dP = dout V^T;  dS = P (dP - D) / sqrt(HS);
//   dV = P^T dout, dK = dS^T Q, dQ = dS K
//   Contract: out, lse, dq, dk, dv =.  A row that sees nothing: out 0, lse -inf, gradients 0.
//             Bitwise repeatable for any number of threads: a task owns what it writes.
//   Cost: forward 4, backward 10 FLOPs per (query, key, channel) seen, in blocks of ATTENTION_Q x
//         ATTENTION_K; blocks that no query sees are skipped.
//         Memory beside the operands, a thread: tiles, k and v of a head, float dk and dv of a
//         head.
//   To copy: this file, matmul.cuh and common.h.
#pragma once
#include <algorithm>
#include <cstring>
#include "matmul.cuh"

struct AttentionDims {
    size_t B, Tq, Tk, NH, NKV, HS;
    size_t q_stride, kv_stride; // elements between rows of q, of k and v
};

// Head h of n (n a power of two) slopes by 2^(-8 (h+1) / n); other counts take every second slope
// of the next power.
inline void alibi_slopes(float* slopes, size_t NH) {
    size_t n = 1;
    while (n * 2 <= NH) n *= 2;
    for (size_t h = 0; h < NH; h++) {
        double exponent =
            h < n ? -8.0 * double(h + 1) / double(n) : -4.0 * double(2 * (h - n) + 1) / double(n);
        slopes[h] = float(std::pow(2.0, exponent));
    }
}

// ----------------------------------------------------------------------------
// CPU: tiles. All of them are dense, heads are copied so: oneDNN 2.6 takes a strided operand only
// by
// another, slower implementation, which allocates 70 to 230 KB at each call.

constexpr size_t ATTENTION_Q = 128, ATTENTION_K = 128; // rows of queries and of keys in a block
constexpr size_t ATTENTION_FEW = 8; // fewer rows (decoding) go through our own loops

template <typename T> struct HeadRows { // the rows of one head
    const T* data;
    size_t stride; // elements between rows
    const T* row(size_t i) const { return data + i * stride; }
};

// A thread's share of the scratch.
template <typename T> struct AttentionTile {
    acc_t<T> *scores, *dscores;      // (Q,K)
    T *p, *ds;                      // (Q,K) as operands
    T *q, *dout, *k, *v;            // (Q,HS) (Q,HS) (Tk,HS) (Tk,HS): dense copies of a head
    acc_t<T>* sum;                  // (Q,HS)
    acc_t<T>*row_max, *row_sum, *D; // (Q)
    acc_t<T>*dk, *dv;               // (Tk,HS)
    unsigned char* products;        // what the products themselves need
    size_t products_bytes;
};

inline Product scores_product(size_t rows, size_t keys, size_t HS, size_t q_stride,
                              size_t k_stride) {
    return {rows, keys, HS, {q_stride, 1}, {1, k_stride}, keys};
}
inline Product values_product(size_t rows, size_t keys, size_t HS, size_t v_stride) {
    return {rows, HS, keys, {keys, 1}, {v_stride, 1}, HS, true};
}
inline Product keys_product(size_t rows, size_t keys, size_t HS, size_t q_stride) {
    return {keys, HS, rows, {1, keys}, {q_stride, 1}, HS, true};
}

// The sizes that blocks of T rows come in.
inline std::vector<size_t> block_sizes(size_t T, size_t block) {
    std::vector<size_t> sizes;
    if (T >= block) sizes.push_back(block);
    if (T % block) sizes.push_back(T % block);
    return sizes;
}

template <typename T> size_t attention_product_scratch(const AttentionDims& d) {
    Type t = type_of<T>(), a = type_of<acc_t<T>>();
    size_t most = 0;
    auto need = [&](const Product& p) {
        most = std::max(most, matmul_scratch_bytes(p, t, a, false, false, 1));
    };
    for (size_t rows : block_sizes(d.Tq, ATTENTION_Q))
        for (size_t keys : block_sizes(d.Tk, ATTENTION_K)) {
            need(scores_product(rows, keys, d.HS, d.HS, d.HS));
            need(values_product(rows, keys, d.HS, d.HS));
            need(keys_product(rows, keys, d.HS, d.HS));
        }
    // with a key/value cache Tk grows, and its last block takes every size; the plain loops' need
    // covers those
    return most + matmul_plain_scratch_bytes(std::max(ATTENTION_K, d.HS), sizeof(acc_t<T>), 1);
}

// Lay a thread's share out; returns the bytes before the products' own scratch, which takes the
// rest.
template <typename T>
size_t attention_tile(AttentionTile<T>& tile, unsigned char* share, size_t share_bytes,
                      const AttentionDims& d) {
    size_t next = 0;
    auto take = [&](auto*& p, size_t n) {
        p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(share + next);
        next += round_up(n * sizeof(*p), 256);
    };
    size_t Q = ATTENTION_Q, K = ATTENTION_K;
    take(tile.scores, Q * K), take(tile.dscores, Q * K);
    take(tile.p, Q * K), take(tile.ds, Q * K);
    take(tile.q, Q * d.HS), take(tile.dout, Q * d.HS), take(tile.k, d.Tk * d.HS),
        take(tile.v, d.Tk * d.HS);
    take(tile.sum, Q * d.HS);
    take(tile.row_max, Q), take(tile.row_sum, Q), take(tile.D, Q);
    take(tile.dk, d.Tk * d.HS), take(tile.dv, d.Tk * d.HS);
    tile.products = share + next;
    tile.products_bytes = share_bytes - next;
    return next;
}

template <typename T> size_t attention_scratch_bytes(const AttentionDims& d, int threads, Cpu) {
    AttentionTile<T> tile;
    size_t share =
        attention_tile<T>(tile, nullptr, 0, d) + round_up(attention_product_scratch<T>(d), 256);
    return share * size_t(threads);
}

template <typename T>
AttentionTile<T> my_tile(const Blas& blas, const AttentionDims& d, Cpu where) {
    AttentionTile<T> tile;
    size_t share = blas.scratch_bytes / size_t(threads_here(where)) / 256 * 256;
    unsigned char* mine = static_cast<unsigned char*>(blas.scratch) + size_t(thread_here()) * share;
    size_t used = attention_tile(tile, mine, share, d);
    CHECK(used <= share, "attention needs %zu bytes of scratch a thread, the plan gave %zu", used,
          share);
    return tile;
}

template <typename T> HeadRows<T> dense_rows(T* to, HeadRows<T> from, size_t rows, size_t HS) {
    for (size_t i = 0; i < rows; i++) memcpy(to + i * HS, from.row(i), HS * sizeof(T));
    return {to, HS};
}

// A product with few rows or a short sum: dot products where rows of b^T are contiguous, else sums
// of rows of b.
template <typename T>
void few_rows_matmul(acc_t<T>* out, const T* a, const T* b, const Product& p) {
    typedef acc_t<T> A;
    for (size_t i = 0; i < p.M; i++) {
        A* row = out + i * p.out_row;
        const T* ai = a + i * p.a.row;
        if (!p.accumulate) std::fill_n(row, p.N, A(0));
        for (size_t j = 0; p.b.column != 1 && j < p.N; j++) {
            const T* bj = b + j * p.b.column;
            A sum = 0;
            #pragma omp simd reduction(+ : sum)
            for (size_t k = 0; k < p.K; k++)
                sum += to_acc(ai[k * p.a.column]) * to_acc(bj[k * p.b.row]);
            row[j] += sum;
        }
        for (size_t k = 0; p.b.column == 1 && k < p.K; k++) {
            const T* bk = b + k * p.b.row;
            A x = to_acc(ai[k * p.a.column]);
            #pragma omp simd
            for (size_t j = 0; j < p.N; j++) row[j] += x * to_acc(bk[j]);
        }
    }
}

// A product of one thread. oneDNN would have to be compiled anew for each length that decoding
// comes by.
template <typename T>
void tile_matmul(acc_t<T>* out, const T* a, const T* b, const Product& p, const AttentionTile<T>& t,
                 Blas& blas, Cpu where) {
    const T* bias = nullptr;
    const acc_t<T>* residual = nullptr;
    if (p.M < ATTENTION_FEW || p.K < ATTENTION_FEW) return few_rows_matmul(out, a, b, p);
    matmul(out, a, b, bias, residual, p, blas, 1 + size_t(thread_here()), t.products,
           t.products_bytes, where);
}

// ----------------------------------------------------------------------------
// CPU: what a block of queries sees of a block of keys

struct Sight {
    const int *q_positions, *doc_start; // (rows)
    const int* k_positions;             // (keys)
    size_t rows, keys;
    bool nothing, everything;
};

inline Sight look(const int* q_positions, const int* doc_start, const int* k_positions, size_t rows,
                  size_t keys) {
    auto [q_low, q_high] = std::minmax_element(q_positions, q_positions + rows);
    auto [d_low, d_high] = std::minmax_element(doc_start, doc_start + rows);
    auto [k_low, k_high] = std::minmax_element(k_positions, k_positions + keys);
    bool nothing = *k_low > *q_high || *k_high < *d_low,
         everything = *k_high <= *q_low && *k_low >= *d_high;
    return {q_positions, doc_start, k_positions, rows, keys, nothing, everything};
}

// Scores of a block in place: scaled, slanted, and -inf where a key is not seen.
template <typename A> void mask_scores(A* scores, const Sight& s, A scale, A slope) {
    for (size_t i = 0; i < s.rows; i++) {
        A* row = scores + i * s.keys;
        int position = s.q_positions[i], start = s.doc_start[i];
        #pragma omp simd
        for (size_t j = 0; j < s.keys; j++) {
            A x = row[j] * scale - slope * A(position - s.k_positions[j]);
            bool seen = s.k_positions[j] <= position && s.k_positions[j] >= start;
            row[j] = seen ? x : A(-INFINITY);
        }
    }
}

// Returns the factor that the scores still want: a block that is seen whole needs no pass of its
// own.
template <typename A> A finish_scores(A* scores, const Sight& s, A scale, A slope) {
    if (s.everything && slope == 0) return scale;
    mask_scores(scores, s, scale, slope);
    return 1;
}

// ----------------------------------------------------------------------------
// CPU: forward

// A block of scores joins the running softmax: new maxima, exponentials as operands, sums and
// outputs rescaled.
template <typename T>
void online_softmax(AttentionTile<T>& t, const Sight& s, size_t HS, acc_t<T> factor) {
    typedef acc_t<T> A;
    for (size_t i = 0; i < s.rows; i++) {
        const A* row = t.scores + i * s.keys;
        A most = A(-INFINITY), sum = 0;
        T* p = t.p + i * s.keys;
        #pragma omp simd reduction(max : most)
        for (size_t j = 0; j < s.keys; j++) most = row[j] > most ? row[j] : most;
        most = std::max(t.row_max[i], most * factor);
        A base = most == A(-INFINITY) ? 0 : most, rescale = fast_exp_low(t.row_max[i] - base);
        #pragma omp simd reduction(+ : sum)
        for (size_t j = 0; j < s.keys; j++) {
            A e = fast_exp_low(row[j] * factor - base);
            p[j] = from_acc<T>(e);
            sum += e;
        }
        t.row_max[i] = most;
        t.row_sum[i] = t.row_sum[i] * rescale + sum;
        for (size_t e = 0; e < HS; e++) t.sum[i * HS + e] *= rescale;
    }
}

// One head's block of queries: sum and row sums of the tile.
template <typename T>
void attention_forward_block(HeadRows<T> q, HeadRows<T> k, HeadRows<T> v, const int* q_positions,
                             const int* k_positions, const int* doc_start, size_t rows,
                             acc_t<T> slope, const AttentionDims& d, AttentionTile<T>& t,
                             Blas& blas, Cpu where) {
    typedef acc_t<T> A;
    A scale = 1 / std::sqrt(A(d.HS));
    std::fill_n(t.row_max, rows, A(-INFINITY));
    std::fill_n(t.row_sum, rows, A(0));
    std::fill_n(t.sum, rows * d.HS, A(0));
    for (size_t j = 0; j < d.Tk; j += ATTENTION_K) {
        Sight s =
            look(q_positions, doc_start, k_positions + j, rows, std::min(ATTENTION_K, d.Tk - j));
        if (s.nothing) continue;
        Product scores = scores_product(rows, s.keys, d.HS, q.stride, k.stride);
        tile_matmul(t.scores, q.data, k.row(j), scores, t, blas, where);
        A factor = finish_scores(t.scores, s, scale, slope);
        online_softmax(t, s, d.HS, factor);
        Product values = values_product(rows, s.keys, d.HS, v.stride);
        tile_matmul(t.sum, (const T*)t.p, v.row(j), values, t, blas, where);
    }
}

template <typename T> // out: rows NH*HS apart
void store_attention(T* out, acc_t<T>* lse, const AttentionTile<T>& t, size_t rows,
                     const AttentionDims& d) {
    typedef acc_t<T> A;
    for (size_t i = 0; i < rows; i++) {
        bool seen = !(t.row_sum[i] <= 0); // NaN has been seen
        A inverse = seen ? 1 / t.row_sum[i] : 0;
        const A* sum = t.sum + i * d.HS;
        for (size_t e = 0; e < d.HS; e++) out[i * d.NH * d.HS + e] = from_acc<T>(sum[e] * inverse);
        lse[i] = seen ? t.row_max[i] + std::log(t.row_sum[i]) : A(-INFINITY);
    }
}

template <typename T>
void attention_forward(T* out, acc_t<T>* lse, const T* q, const T* k, const T* v,
                       const int* q_positions, const int* k_positions, const int* doc_start,
                       const float* slopes, const AttentionDims& d, Blas& blas, Cpu where) {
    size_t blocks = ceil_div(d.Tq, ATTENTION_Q), group = d.NH / d.NKV;
    #pragma omp parallel
    {
        AttentionTile<T> t = my_tile<T>(blas, d, where);
        HeadRows<T> keys = {}, values = {};
        size_t held =
            size_t(-1); // where the keys at hand begin: neighbouring tasks mostly share them
        #pragma omp for collapse(3) schedule(dynamic)
        for (size_t b = 0; b < d.B; b++)
            for (size_t h = 0; h < d.NH; h++)
                for (size_t block = 0; block < blocks; block++) {
                    size_t i = (blocks - 1 - block) * ATTENTION_Q; // longest first
                    size_t rows = std::min(ATTENTION_Q, d.Tq - i), row = b * d.Tq + i;
                    size_t at = b * d.Tk * d.kv_stride + h / group * d.HS;
                    HeadRows<T> queries = {q + row * d.q_stride + h * d.HS, d.q_stride};
                    if (at != held) {
                        held = at, keys = {k + at, d.kv_stride}, values = {v + at, d.kv_stride};
                        if (d.Tq >= ATTENTION_FEW) {
                            keys = dense_rows(t.k, keys, d.Tk, d.HS);
                            values = dense_rows(t.v, values, d.Tk, d.HS);
                        }
                    }
                    if (rows >= ATTENTION_FEW) queries = dense_rows(t.q, queries, rows, d.HS);
                    attention_forward_block(queries, keys, values, q_positions + row,
                                            k_positions + b * d.Tk, doc_start + row, rows,
                                            acc_t<T>(slopes ? slopes[h] : 0), d, t, blas, where);
                    store_attention(out + (row * d.NH + h) * d.HS, lse + (b * d.NH + h) * d.Tq + i,
                                    t, rows, d);
                }
    }
}

// ----------------------------------------------------------------------------
// CPU: backward

// p = exp(s - lse), ds = p (dp - D) / sqrt(HS), both as operands
template <typename T>
void backward_scores(AttentionTile<T>& t, const acc_t<T>* lse, const Sight& s, acc_t<T> factor,
                     acc_t<T> scale) {
    typedef acc_t<T> A;
    for (size_t i = 0; i < s.rows; i++) {
        const A *row = t.scores + i * s.keys, *dp = t.dscores + i * s.keys;
        T *p = t.p + i * s.keys, *ds = t.ds + i * s.keys;
        A base = lse[i] == A(-INFINITY) ? 0 : lse[i], D = t.D[i];
        #pragma omp simd
        for (size_t j = 0; j < s.keys; j++) {
            A e = fast_exp_low(row[j] * factor - base);
            p[j] = from_acc<T>(e);
            ds[j] = from_acc<T>(e * (dp[j] - D) * scale);
        }
    }
}

// D = the sums of dout out, whose rows are NH*HS apart
template <typename T>
void backward_row_sums(AttentionTile<T>& t, const T* dout, const T* out, size_t rows,
                       const AttentionDims& d) {
    for (size_t i = 0; i < rows; i++) {
        acc_t<T> sum = 0;
        const T *a = dout + i * d.NH * d.HS, *b = out + i * d.NH * d.HS;
        #pragma omp simd reduction(+ : sum)
        for (size_t e = 0; e < d.HS; e++) sum += to_acc(a[e]) * to_acc(b[e]);
        t.D[i] = sum;
    }
}

// One head's block of queries: dq into the tile's sum, its part of dk and dv into theirs.
template <typename T>
void attention_backward_block(HeadRows<T> dout, const acc_t<T>* lse, HeadRows<T> q, HeadRows<T> k,
                              HeadRows<T> v, const int* q_positions, const int* k_positions,
                              const int* doc_start, size_t rows, acc_t<T> slope,
                              const AttentionDims& d, AttentionTile<T>& t, Blas& blas, Cpu where) {
    typedef acc_t<T> A;
    A scale = 1 / std::sqrt(A(d.HS));
    auto product = [&](A* out, const T* a, const T* b, const Product& p) {
        tile_matmul(out, a, b, p, t, blas, where);
    };
    std::fill_n(t.sum, rows * d.HS, A(0));
    for (size_t j = 0; j < d.Tk; j += ATTENTION_K) {
        Sight s =
            look(q_positions, doc_start, k_positions + j, rows, std::min(ATTENTION_K, d.Tk - j));
        if (s.nothing) continue;
        product(t.scores, q.data, k.row(j), scores_product(rows, s.keys, d.HS, q.stride, k.stride));
        product(t.dscores, dout.data, v.row(j),
                scores_product(rows, s.keys, d.HS, dout.stride, v.stride));
        A factor = finish_scores(t.scores, s, scale, slope);
        backward_scores(t, lse, s, factor, scale);
        product(t.dv + j * d.HS, t.p, dout.data, keys_product(rows, s.keys, d.HS, dout.stride));
        product(t.dk + j * d.HS, t.ds, q.data, keys_product(rows, s.keys, d.HS, q.stride));
        product(t.sum, t.ds, k.row(j), values_product(rows, s.keys, d.HS, k.stride));
    }
}

template <typename T>
void store_rows(T* out, const acc_t<T>* x, size_t rows, size_t stride, size_t HS) {
    for (size_t i = 0; i < rows; i++)
        for (size_t e = 0; e < HS; e++) out[i * stride + e] = from_acc<T>(x[i * HS + e]);
}

template <typename T>
void attention_backward(T* dq, T* dk, T* dv, const T* dout, const T* out, const acc_t<T>* lse,
                        const T* q, const T* k, const T* v, const int* q_positions,
                        const int* k_positions, const int* doc_start, const float* slopes,
                        const AttentionDims& d, Blas& blas, Cpu where) {
    size_t group = d.NH / d.NKV, out_stride = d.NH * d.HS;
    #pragma omp parallel
    {
        AttentionTile<T> t = my_tile<T>(blas, d, where);
// a task owns a key head: its dk, dv, and the dq of the heads that read it
        #pragma omp for collapse(2) schedule(dynamic)
        for (size_t b = 0; b < d.B; b++)
            for (size_t kh = 0; kh < d.NKV; kh++) {
                size_t at = b * d.Tk * d.kv_stride + kh * d.HS;
                std::fill_n(t.dk, d.Tk * d.HS, acc_t<T>(0));
                std::fill_n(t.dv, d.Tk * d.HS, acc_t<T>(0));
                HeadRows<T> keys = dense_rows(t.k, {k + at, d.kv_stride}, d.Tk, d.HS);
                HeadRows<T> values = dense_rows(t.v, {v + at, d.kv_stride}, d.Tk, d.HS);
                for (size_t h = kh * group; h < (kh + 1) * group; h++)
                    for (size_t i = 0; i < d.Tq; i += ATTENTION_Q) {
                        size_t rows = std::min(ATTENTION_Q, d.Tq - i), row = b * d.Tq + i;
                        size_t o = (row * d.NH + h) * d.HS, qo = row * d.q_stride + h * d.HS;
                        backward_row_sums(t, dout + o, out + o, rows, d);
                        HeadRows<T> queries = dense_rows(t.q, {q + qo, d.q_stride}, rows, d.HS);
                        HeadRows<T> gradients =
                            dense_rows(t.dout, {dout + o, out_stride}, rows, d.HS);
                        attention_backward_block(
                            gradients, lse + (b * d.NH + h) * d.Tq + i, queries, keys, values,
                            q_positions + row, k_positions + b * d.Tk, doc_start + row, rows,
                            acc_t<T>(slopes ? slopes[h] : 0), d, t, blas, where);
                        store_rows(dq + qo, t.sum, rows, d.q_stride, d.HS);
                    }
                store_rows(dk + at, t.dk, d.Tk, d.kv_stride, d.HS);
                store_rows(dv + at, t.dv, d.Tk, d.kv_stride, d.HS);
            }
    }
}
