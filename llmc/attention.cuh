// attention.cuh - causal attention with online softmax, in O(T) memory - arXiv:2205.14135
//   s_ij = q_i.k_j / sqrt(HS) - slope_h (pos_i - pos_j)
//   p = softmax over the keys that i sees,   out_i = sum_j p_ij v_j
//   i sees j when doc_start_i <= pos_j <= pos_i and, with a sliding window, pos_i - pos_j < window:
//   positions and documents come from the batch, never from an index.
//   q (B,Tq,NH,HS) rows q_stride apart   k, v (B,Tk,NKV,HS) rows kv_stride apart
//   out, dout (B,Tq,NH,HS)
//   lse (B,NH,Tq) acc: log of the sum of exp, kept for backward, and to merge partial results over
//   blocks of keys.
//   MHA, MQA, GQA: head h reads key head h / (NH/NKV). ALiBi (arXiv:2108.12409): slopes (NH), or
//   null.
//   Backward: D_i = dout_i.out_i;  dP = dout V^T;  dS = P (dP - D) / sqrt(HS)
//             dV = P^T dout,   dK = dS^T Q,   dQ = dS K
//   Contract: out, lse, dq, dk, dv =.  A row that sees nothing: out 0, lse -inf, gradients 0.
//             Bitwise repeatable, on the CPU for any number of threads: a task owns what it writes.
//   Cost: forward 4, backward 10 FLOPs per (query, key, channel) seen, in blocks of ATTENTION_Q x
//         ATTENTION_K; blocks that no query sees are skipped.
//         Memory beside the operands, a thread: tiles, k and v of a head, float dk and dv of a
//         head.
//   To copy: this file, attention_sm80.cuh, attention_sm90.cuh, hopper.cuh, matmul.cuh and common.h.
#pragma once
#include <algorithm>
#include <climits>
#include <cstring>
#include "matmul.cuh"

struct AttentionDims {
    size_t B, Tq, Tk, NH, NKV, HS;
    size_t q_stride, kv_stride; // elements between rows of q, of k and v
    int window = INT_MAX;       // how many keys a query sees, itself included
    bool any_order = false;     // Hopper: dQ's sums as they come, faster and not repeatable
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
// CPU: tiles. All of them are dense, heads are copied so: oneDNN 2.6 takes a strided operand only by
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
    acc_t<T>*scores, *dscores;      // (Q,K)
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
    int window;
    bool nothing, everything;
};

inline Sight look(const int* q_positions, const int* doc_start, const int* k_positions, size_t rows,
                  size_t keys, int window) {
    auto [q_low, q_high] = std::minmax_element(q_positions, q_positions + rows);
    auto [d_low, d_high] = std::minmax_element(doc_start, doc_start + rows);
    auto [k_low, k_high] = std::minmax_element(k_positions, k_positions + keys);
    bool nothing = *k_low > *q_high || *k_high < *d_low || *q_low - *k_high >= window,
         everything = *k_high <= *q_low && *k_low >= *d_high && *q_high - *k_low < window;
    return {q_positions, doc_start, k_positions, rows, keys, window, nothing, everything};
}

// Scores of a block in place: scaled, slanted, and -inf where a key is not seen.
template <typename A> void mask_scores(A* scores, const Sight& s, A scale, A slope) {
    for (size_t i = 0; i < s.rows; i++) {
        A* row = scores + i * s.keys;
        int position = s.q_positions[i], start = s.doc_start[i];
        #pragma omp simd
        for (size_t j = 0; j < s.keys; j++) {
            int distance = position - s.k_positions[j];
            A x = row[j] * scale - slope * A(distance);
            bool seen = distance >= 0 && distance < s.window && s.k_positions[j] >= start;
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
        Sight s = look(q_positions, doc_start, k_positions + j, rows,
                       std::min(ATTENTION_K, d.Tk - j), d.window);
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
        Sight s = look(q_positions, doc_start, k_positions + j, rows,
                       std::min(ATTENTION_K, d.Tk - j), d.window);
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

// What the log says of the kernels that are chosen: on the CPU there is no choice.
template <typename T> std::string attention_says(const AttentionDims&, Cpu) { return ""; }

// ----------------------------------------------------------------------------
// CUDA kernels for any type and head size: float arithmetic. A warp owns PLAIN_ROWS rows, a block's
// warps share tiles of 32 columns, a lane a column of the scores; the lanes then share a row's
// channels.

#if KERNELS

constexpr int PLAIN_WARPS = 4, PLAIN_ROWS = 4, PLAIN_BLOCK = PLAIN_WARPS * PLAIN_ROWS;

// What the kernels read; positions and doc_start as the batch has them.
template <typename T> struct AttentionOperands {
    const T *q, *k, *v, *dout;
    const int *q_positions, *k_positions, *doc_start;
    const float* slopes;
    AttentionDims d;
    float scale; // 1 / sqrt(HS)
    __device__ const T* query(size_t b, size_t h, size_t i) const {
        return q + (b * d.Tq + i) * d.q_stride + h * d.HS;
    }
    __device__ const T* gradient(size_t b, size_t h, size_t i) const {
        return dout + ((b * d.Tq + i) * d.NH + h) * d.HS;
    }
    __device__ size_t key(size_t b, size_t kh, size_t j) const { // in k and in v
        return (b * d.Tk + j) * d.kv_stride + kh * d.HS;
    }
    // whether query i sees key j; how far away it is
    __device__ bool sees(size_t b, size_t i, size_t j, int& distance) const {
        if (i >= d.Tq || j >= d.Tk) return false;
        int at = k_positions[b * d.Tk + j];
        distance = q_positions[b * d.Tq + i] - at;
        return distance >= 0 && distance < d.window && at >= doc_start[b * d.Tq + i];
    }
    __device__ float slope(size_t h) const { return slopes ? slopes[h] : 0; }
};

// `rows` rows of HS channels to shared memory, `stride` floats apart; row(i): null is zeros
template <typename F> __device__ void load_tile(float* tile, int rows, int HS, int stride, F row) {
    for (int k = threadIdx.x; k < rows * HS; k += PLAIN_WARPS * 32) {
        const auto* from = row(k / HS);
        tile[k / HS * stride + k % HS] = from ? to_float(from[k % HS]) : 0;
    }
}

__device__ inline float dot(const float* a, const float* b, int n) {
    float sum = 0;
    for (int e = 0; e < n; e++) sum += a[e] * b[e];
    return sum;
}

// sum[k] += x_j * tile[j][lane + 32 k] over the tile's 32 rows j, whose x_j is with lane j
template <int D>
__device__ void add_columns(float (&sum)[D], float x, const float* tile, int HS, int stride) {
    int lane = threadIdx.x % 32;
    for (int j = 0; j < 32; j++) {
        float xj = __shfl_sync(ALL_LANES, x, j);
        #pragma unroll
        for (int k = 0; k < D; k++)
            if (lane + 32 * k < HS) sum[k] += xj * tile[j * stride + lane + 32 * k];
    }
}

template <typename T, int D>
__device__ void store_channels(T* to, const float (&x)[D], float factor, int HS) {
    #pragma unroll
    for (int k = 0, e = threadIdx.x % 32; k < D; k++, e += 32)
        if (e < HS) to[e] = from_acc<T>(x[k] * factor);
}

// D = HS / 32, rounded up
template <typename T, int D>
__global__ void attention_forward_kernel(T* out, float* lse, const AttentionOperands<T> x) {
    const AttentionDims& d = x.d;
    int HS = int(d.HS), stride = HS + 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    size_t i0 = size_t(blockIdx.x) * PLAIN_BLOCK, h = blockIdx.y, b = blockIdx.z,
           kh = h / (d.NH / d.NKV);
    float* q = reinterpret_cast<float*>(dynamic_shared()); // (PLAIN_BLOCK, HS)
    float *k = q + PLAIN_BLOCK * HS, *v = k + 32 * stride; // (32, stride)
    load_tile(q, PLAIN_BLOCK, HS, HS,
              [&](int r) { return i0 + r < d.Tq ? x.query(b, h, i0 + r) : nullptr; });

    float sum[PLAIN_ROWS][D] = {}, row_max[PLAIN_ROWS], row_sum[PLAIN_ROWS] = {};
    for (float& m : row_max) m = -INFINITY;
    for (size_t j0 = 0; j0 < d.Tk; j0 += 32) {
        __syncthreads(); // the tiles before are read
        load_tile(k, 32, HS, stride,
                  [&](int j) { return j0 + j < d.Tk ? x.k + x.key(b, kh, j0 + j) : nullptr; });
        load_tile(v, 32, HS, stride,
                  [&](int j) { return j0 + j < d.Tk ? x.v + x.key(b, kh, j0 + j) : nullptr; });
        __syncthreads(); // these are there
        #pragma unroll
        for (int r = 0; r < PLAIN_ROWS; r++) {
            int row = warp * PLAIN_ROWS + r, distance = 0;
            bool seen = x.sees(b, i0 + row, j0 + lane, distance);
            if (!__any_sync(ALL_LANES, seen)) continue;
            float s = -INFINITY;
            if (seen)
                s = dot(q + row * HS, k + lane * stride, HS) * x.scale - x.slope(h) * distance;
            float most = warp_max(s);
            most = row_max[r] > most ? row_max[r] : most;
            float p = seen ? expf(s - most) : 0, rescale = expf(row_max[r] - most);
            row_max[r] = most;
            row_sum[r] = row_sum[r] * rescale + warp_sum(p);
            #pragma unroll
            for (int e = 0; e < D; e++) sum[r][e] *= rescale;
            add_columns(sum[r], p, v, HS, stride);
        }
    }
    #pragma unroll
    for (int r = 0; r < PLAIN_ROWS; r++) {
        size_t i = i0 + warp * PLAIN_ROWS + r;
        if (i >= d.Tq) continue;
        bool seen = row_sum[r] != 0; // NaN has been seen
        float inverse = seen ? 1 / row_sum[r] : 0;
        store_channels(out + ((b * d.Tq + i) * d.NH + h) * d.HS, sum[r], inverse, HS);
        if (lane == 0)
            lse[(b * d.NH + h) * d.Tq + i] = seen ? row_max[r] + logf(row_sum[r]) : -INFINITY;
    }
}

// D_i = dout_i.out_i, a warp a row: (B,Tq,NH) rows, D (B,NH,Tq)
template <typename T>
__global__ void attention_row_sums_kernel(float* D, const T* dout, const T* out, AttentionDims d) {
    size_t row = size_t(blockIdx.x) * PLAIN_WARPS + threadIdx.x / 32;
    if (row >= d.B * d.Tq * d.NH) return; // whole warps
    float sum = 0;
    for (size_t e = threadIdx.x % 32; e < d.HS; e += 32)
        sum += to_float(dout[row * d.HS + e]) * to_float(out[row * d.HS + e]);
    sum = warp_sum(sum);
    size_t h = row % d.NH, i = row / d.NH % d.Tq, b = row / d.NH / d.Tq;
    if (threadIdx.x % 32 == 0) D[(b * d.NH + h) * d.Tq + i] = sum;
}

// One score's p = exp(s - lse) and ds = p (dp - D), or zeros
struct PlainScore {
    float p, ds;
};
template <typename T>
__device__ PlainScore plain_score(const AttentionOperands<T>& x, const float* lse, const float* D,
                                  size_t b, size_t h, size_t i, size_t j, const float* q,
                                  const float* k, const float* dout, const float* v) {
    int distance = 0, HS = int(x.d.HS);
    if (!x.sees(b, i, j, distance)) return {0, 0};
    size_t at = (b * x.d.NH + h) * x.d.Tq + i;
    float p = expf(dot(q, k, HS) * x.scale - x.slope(h) * distance - lse[at]);
    return {p, p * (dot(dout, v, HS) - D[at])};
}

// rows are queries, columns keys
template <typename T, int D>
__global__ void attention_backward_q_kernel(T* dq, const AttentionOperands<T> x, const float* lse,
                                            const float* row_sums) {
    const AttentionDims& d = x.d;
    int HS = int(d.HS), stride = HS + 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    size_t i0 = size_t(blockIdx.x) * PLAIN_BLOCK, h = blockIdx.y, b = blockIdx.z,
           kh = h / (d.NH / d.NKV);
    float* q = reinterpret_cast<float*>(dynamic_shared());
    float *dout = q + PLAIN_BLOCK * HS, *k = dout + PLAIN_BLOCK * HS, *v = k + 32 * stride;
    load_tile(q, PLAIN_BLOCK, HS, HS,
              [&](int r) { return i0 + r < d.Tq ? x.query(b, h, i0 + r) : nullptr; });
    load_tile(dout, PLAIN_BLOCK, HS, HS,
              [&](int r) { return i0 + r < d.Tq ? x.gradient(b, h, i0 + r) : nullptr; });

    float sum[PLAIN_ROWS][D] = {};
    for (size_t j0 = 0; j0 < d.Tk; j0 += 32) {
        __syncthreads(); // the tiles before are read
        load_tile(k, 32, HS, stride,
                  [&](int j) { return j0 + j < d.Tk ? x.k + x.key(b, kh, j0 + j) : nullptr; });
        load_tile(v, 32, HS, stride,
                  [&](int j) { return j0 + j < d.Tk ? x.v + x.key(b, kh, j0 + j) : nullptr; });
        __syncthreads(); // these are there
        #pragma unroll
        for (int r = 0; r < PLAIN_ROWS; r++) {
            int row = warp * PLAIN_ROWS + r;
            PlainScore s = plain_score(x, lse, row_sums, b, h, i0 + row, j0 + lane, q + row * HS,
                                       k + lane * stride, dout + row * HS, v + lane * stride);
            add_columns(sum[r], s.ds, k, HS, stride);
        }
    }
    #pragma unroll
    for (int r = 0; r < PLAIN_ROWS; r++) {
        size_t i = i0 + warp * PLAIN_ROWS + r;
        if (i >= d.Tq) continue;
        store_channels(dq + (b * d.Tq + i) * d.q_stride + h * d.HS, sum[r], x.scale, HS);
    }
}

// rows are keys, columns the queries of all heads that read them
template <typename T, int D>
__global__ void attention_backward_kv_kernel(T* dk, T* dv, const AttentionOperands<T> x,
                                             const float* lse, const float* row_sums) {
    const AttentionDims& d = x.d;
    int HS = int(d.HS), stride = HS + 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    size_t j0 = size_t(blockIdx.x) * PLAIN_BLOCK, kh = blockIdx.y, b = blockIdx.z,
           group = d.NH / d.NKV;
    float* k = reinterpret_cast<float*>(dynamic_shared());
    float *v = k + PLAIN_BLOCK * HS, *q = v + PLAIN_BLOCK * HS, *dout = q + 32 * stride;
    load_tile(k, PLAIN_BLOCK, HS, HS,
              [&](int r) { return j0 + r < d.Tk ? x.k + x.key(b, kh, j0 + r) : nullptr; });
    load_tile(v, PLAIN_BLOCK, HS, HS,
              [&](int r) { return j0 + r < d.Tk ? x.v + x.key(b, kh, j0 + r) : nullptr; });

    float sum_k[PLAIN_ROWS][D] = {}, sum_v[PLAIN_ROWS][D] = {};
    for (size_t h = kh * group; h < (kh + 1) * group; h++)
        for (size_t i0 = 0; i0 < d.Tq; i0 += 32) {
            __syncthreads(); // the tiles before are read
            load_tile(q, 32, HS, stride,
                      [&](int i) { return i0 + i < d.Tq ? x.query(b, h, i0 + i) : nullptr; });
            load_tile(dout, 32, HS, stride,
                      [&](int i) { return i0 + i < d.Tq ? x.gradient(b, h, i0 + i) : nullptr; });
            __syncthreads(); // these are there
            #pragma unroll
            for (int r = 0; r < PLAIN_ROWS; r++) {
                int row = warp * PLAIN_ROWS + r;
                PlainScore s =
                    plain_score(x, lse, row_sums, b, h, i0 + lane, j0 + row, q + lane * stride,
                                k + row * HS, dout + lane * stride, v + row * HS);
                add_columns(sum_v[r], s.p, dout, HS, stride);
                add_columns(sum_k[r], s.ds, q, HS, stride);
            }
        }
    #pragma unroll
    for (int r = 0; r < PLAIN_ROWS; r++) {
        size_t j = j0 + warp * PLAIN_ROWS + r;
        if (j >= d.Tk) continue;
        store_channels(dk + x.key(b, kh, j), sum_k[r], x.scale, HS);
        store_channels(dv + x.key(b, kh, j), sum_v[r], 1, HS);
    }
}

// ----------------------------------------------------------------------------
// launchers: tensor cores where type, head size and alignment allow, else the plain kernels

#include "attention_sm90.cuh"

// f(HS / 32, rounded up): the head sizes that have a kernel
template <typename F> void pick_plain_kernel(size_t HS, F f) {
    CHECK(HS <= 256, "attention on a GPU has heads of at most 256 channels, not %zu", HS);
    HS <= 64 ? f(Int<2>()) : HS <= 128 ? f(Int<4>()) : f(Int<8>());
}
inline size_t plain_shared_bytes(size_t HS, int row_tiles) {
    return (row_tiles * PLAIN_BLOCK * HS + 2 * 32 * (HS + 1)) * sizeof(float);
}

template <typename T> size_t attention_scratch_bytes(const AttentionDims& d, int, cudaStream_t) {
    return std::max({mma_scratch(nullptr, nullptr, d), hopper_scratch<T>(nullptr, nullptr, d),
                     d.B * d.NH * d.Tq * sizeof(float)});
}
template <typename T> void check_attention_scratch(const AttentionDims& d, const Blas& blas) {
    size_t need = attention_scratch_bytes<T>(d, 1, cudaStream_t{});
    CHECK(need <= blas.scratch_bytes, "attention needs %zu bytes of scratch, the plan gave %zu",
          need, blas.scratch_bytes);
}

// Which kernels a launcher chooses for aligned operands, and why no better ones: for the log.
template <typename T> std::string attention_says(const AttentionDims& d, cudaStream_t stream) {
    if (!mma_takes<T>(d))
        return sizeof(T) == 2 ? "plain kernels: tensor cores take heads of 8 to 256 channels, a "
                                "multiple of 8, not " +
                                    std::to_string(d.HS)
                              : "plain kernels, in float";
    if (!is_hopper(stream)) return "flash attention by mma.sync: this GPU is no Hopper";
    if (hopper_takes<T>(d)) return "flash attention by wgmma";
    return "flash attention by mma.sync: Hopper's kernels take heads of at most 128 channels and "
           "64 "
           "heads a group";
}

template <typename T>
void attention_forward(T* out, float* lse, const T* q, const T* k, const T* v,
                       const int* q_positions, const int* k_positions, const int* doc_start,
                       const float* slopes, const AttentionDims& d, Blas& blas,
                       cudaStream_t stream) {
    AttentionOperands<T> x = {q,           k,         v,      nullptr, q_positions,
                              k_positions, doc_start, slopes, d,       1 / std::sqrt(float(d.HS))};
    check_attention_scratch<T>(d, blas);
    if constexpr (sizeof(T) == 2) {
        if (is_hopper(stream) && hopper_takes<T>(d, out, q, k, v))
            return attention_hopper_forward(out, lse, x, blas.scratch, stream);
        if (mma_takes<T>(d, out, q, k, v))
            return attention_mma_forward(out, lse, x, blas.scratch, stream);
    }
    dim3 grid(unsigned(ceil_div(d.Tq, size_t(PLAIN_BLOCK))), unsigned(d.NH), unsigned(d.B));
    pick_plain_kernel(d.HS, [&](auto D) {
        launch(attention_forward_kernel<T, D>, grid, PLAIN_WARPS * 32, plain_shared_bytes(d.HS, 1),
               stream, out, lse, x);
    });
}

template <typename T>
void attention_backward(T* dq, T* dk, T* dv, const T* dout, const T* out, const float* lse,
                        const T* q, const T* k, const T* v, const int* q_positions,
                        const int* k_positions, const int* doc_start, const float* slopes,
                        const AttentionDims& d, Blas& blas, cudaStream_t stream) {
    AttentionOperands<T> x = {q,           k,         v,      dout, q_positions,
                              k_positions, doc_start, slopes, d,    1 / std::sqrt(float(d.HS))};
    check_attention_scratch<T>(d, blas);
    if constexpr (sizeof(T) == 2) {
        if (is_hopper(stream) && hopper_takes<T>(d, out, dq, dk, dv, dout, q, k, v))
            return attention_hopper_backward(dq, dk, dv, x, out, lse, blas.scratch, stream);
        if (mma_takes<T>(d, dq, dk, dv, dout, q, k, v))
            return attention_mma_backward(dq, dk, dv, x, out, lse, blas.scratch, stream);
    }
    float* row_sums = static_cast<float*>(blas.scratch);
    launch(attention_row_sums_kernel<T>, unsigned(ceil_div(d.B * d.Tq * d.NH, size_t(PLAIN_WARPS))),
           PLAIN_WARPS * 32, 0, stream, row_sums, dout, out, d);
    dim3 q_grid(unsigned(ceil_div(d.Tq, size_t(PLAIN_BLOCK))), unsigned(d.NH), unsigned(d.B)),
        k_grid(unsigned(ceil_div(d.Tk, size_t(PLAIN_BLOCK))), unsigned(d.NKV), unsigned(d.B));
    size_t shared = plain_shared_bytes(d.HS, 2);
    pick_plain_kernel(d.HS, [&](auto D) {
        launch(attention_backward_q_kernel<T, D>, q_grid, PLAIN_WARPS * 32, shared, stream, dq, x,
               lse, row_sums);
        launch(attention_backward_kv_kernel<T, D>, k_grid, PLAIN_WARPS * 32, shared, stream, dk, dv,
               x, lse, row_sums);
    });
}
#endif
