// attention.cuh - causal attention with online softmax, in O(T) memory, forward and backward -
// arXiv:2205.14135
//   s_ij = q_i.k_j / sqrt(HS) - slope_h (pos_i - pos_j);  p = softmax over the keys that i sees;
//   out_i = sum_j p_ij v_j
//   i sees j when doc_start_i <= pos_j <= pos_i: positions and documents come from the batch, never
//   from an index.
//   q (B,Tq,NH,HS) rows q_stride apart   k, v (B,Tk,NKV,HS) rows kv_stride apart   out, dout
//   (B,Tq,NH,HS)
//   lse (B,NH,Tq) acc: log of the sum of exp, kept for backward, and to merge partial results over
//   blocks of keys.
//   MHA, MQA, GQA: head h reads key head h / (NH/NKV). ALiBi (arXiv:2108.12409): slopes (NH), or
//   null.
//   Backward: D_i = dout_i.out_i;  dS = P (dP - D) / sqrt(HS),  dP = dout V^T;  dV = P^T dout, dK =
//   dS^T Q, dQ = dS K
//   Contract: out, lse, dq, dk, dv =.  A row that sees nothing: out 0, lse -inf, gradients 0.
//             Bitwise repeatable for any number of threads: a task owns what it writes.
//   Cost: forward 4, backward 10 FLOPs per (query, key, channel) seen, in blocks of ATTENTION_Q x
//   ATTENTION_K; blocks
//         that no query sees are skipped. Memory beside the operands: tiles, and (Tk,HS) twice a
//         thread in backward.
//   To copy: this file, matmul.cuh and common.h.
#pragma once
#include <algorithm>
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
// CPU: tiles

// Rows of queries and of keys in a block: the largest with which what oneDNN allocates for itself
// in a bf16 product
// stays below 64 KiB (float products of any size take 72 KiB).
constexpr size_t ATTENTION_Q = 64, ATTENTION_K = 80;

// A thread's share of the scratch.
template <typename T> struct AttentionTile {
    acc_t<T>*scores, *dscores;      // (Q,K)
    T *p, *ds;                      // (Q,K) as operands
    acc_t<T>*sum, *part;            // (Q,HS), (max(Q,K),HS)
    acc_t<T>*row_max, *row_sum, *D; // (Q)
    acc_t<T>*dk, *dv;               // (Tk,HS)
    unsigned char* products;        // what the products themselves need
    size_t products_bytes;
};

inline Product scores_product(size_t rows, size_t keys, size_t HS, size_t q_stride,
                              size_t k_stride) {
    return {rows, keys, HS, {q_stride, 1}, {1, k_stride}, ATTENTION_K};
}
inline Product values_product(size_t rows, size_t keys, size_t HS, size_t v_stride) {
    return {rows, HS, keys, {ATTENTION_K, 1}, {v_stride, 1}, HS};
}
inline Product keys_product(size_t rows, size_t keys, size_t HS, size_t q_stride) {
    return {keys, HS, rows, {1, ATTENTION_K}, {q_stride, 1}, HS};
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
            need(scores_product(rows, keys, d.HS, d.q_stride, d.kv_stride));
            need(scores_product(rows, keys, d.HS, d.NH * d.HS, d.kv_stride));
            need(values_product(rows, keys, d.HS, d.kv_stride));
            need(keys_product(rows, keys, d.HS, d.q_stride));
            need(keys_product(rows, keys, d.HS, d.NH * d.HS));
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
    unsigned char* next = share;
    auto take = [&](auto*& p, size_t n) {
        p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(next);
        next += round_up(n * sizeof(*p), 256);
    };
    constexpr size_t Q = ATTENTION_Q, K = ATTENTION_K;
    take(tile.scores, Q * K), take(tile.dscores, Q * K);
    take(tile.p, Q * K), take(tile.ds, Q * K);
    take(tile.sum, Q * d.HS), take(tile.part, std::max(Q, K) * d.HS);
    take(tile.row_max, Q), take(tile.row_sum, Q), take(tile.D, Q);
    take(tile.dk, d.Tk * d.HS), take(tile.dv, d.Tk * d.HS);
    tile.products = next;
    tile.products_bytes = share_bytes - size_t(next - share);
    return size_t(next - share);
}

template <typename T> size_t attention_scratch_bytes(const AttentionDims& d, int threads, Cpu) {
    AttentionTile<T> tile;
    return (attention_tile<T>(tile, nullptr, 0, d) +
            round_up(attention_product_scratch<T>(d), 256)) *
           size_t(threads);
}

template <typename T>
AttentionTile<T> my_tile(const Blas& blas, const AttentionDims& d, Cpu where) {
    AttentionTile<T> tile;
    size_t share = blas.scratch_bytes / size_t(threads_here(where)) / 256 * 256;
    size_t used = attention_tile(
        tile, static_cast<unsigned char*>(blas.scratch) + size_t(thread_here()) * share, share, d);
    CHECK(used <= share, "attention needs %zu bytes of scratch a thread, the plan gave %zu", used,
          share);
    return tile;
}

// A product of one thread. Few rows (decoding) go through our own loops: each length would make
// oneDNN compile anew.
template <typename T, typename O>
void tile_matmul(O* out, const T* a, const T* b, const Product& p, const AttentionTile<T>& t,
                 Blas& blas, Cpu where) {
    const O* nothing = nullptr;
    if (p.M < 8 || p.K < 8)
        matmul_plain(out, a, b, (const T*)nullptr, nothing, p, t.products);
    else
        matmul(out, a, b, (const T*)nullptr, nothing, p, blas, 1 + size_t(thread_here()),
               t.products, t.products_bytes, where);
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
        A* row = scores + i * ATTENTION_K;
        int position = s.q_positions[i], start = s.doc_start[i];
        #pragma omp simd
        for (size_t j = 0; j < s.keys; j++) {
            A x = row[j] * scale - slope * A(position - s.k_positions[j]);
            bool seen = s.k_positions[j] <= position && s.k_positions[j] >= start;
            row[j] = seen ? x : A(-INFINITY);
        }
    }
}

template <typename A> void scale_scores(A* scores, const Sight& s, A scale, A slope) {
    if (!s.everything || slope != 0) return mask_scores(scores, s, scale, slope);
    for (size_t i = 0; i < s.rows; i++)
        for (size_t j = 0; j < s.keys; j++) scores[i * ATTENTION_K + j] *= scale;
}

// ----------------------------------------------------------------------------
// CPU: forward

// A block of scores joins the running softmax: new maxima, exponentials as operands, sums and
// outputs rescaled.
template <typename T> void online_softmax(AttentionTile<T>& t, const Sight& s, size_t HS) {
    typedef acc_t<T> A;
    for (size_t i = 0; i < s.rows; i++) {
        A *row = t.scores + i * ATTENTION_K, most = t.row_max[i], sum = 0;
        T* p = t.p + i * ATTENTION_K;
        #pragma omp simd reduction(max : most)
        for (size_t j = 0; j < s.keys; j++) most = row[j] > most ? row[j] : most;
        A base = most == A(-INFINITY) ? 0 : most, rescale = fast_exp(t.row_max[i] - base);
        #pragma omp simd reduction(+ : sum)
        for (size_t j = 0; j < s.keys; j++) {
            A e = fast_exp(row[j] - base);
            p[j] = from_acc<T>(e);
            sum += e;
        }
        t.row_max[i] = most;
        t.row_sum[i] = t.row_sum[i] * rescale + sum;
        for (size_t e = 0; e < HS; e++) t.sum[i * HS + e] *= rescale;
    }
}

template <typename T>
void attention_forward_block(T* out, acc_t<T>* lse, const T* q, const T* k,
                             const T* v, // (rows,HS) (rows), keys (Tk,HS)
                             const int* q_positions, const int* k_positions, const int* doc_start,
                             size_t rows, acc_t<T> slope, const AttentionDims& d,
                             AttentionTile<T>& t, Blas& blas, Cpu where) {
    typedef acc_t<T> A;
    A scale = 1 / std::sqrt(A(d.HS));
    std::fill_n(t.row_max, rows, A(-INFINITY));
    std::fill_n(t.row_sum, rows, A(0));
    std::fill_n(t.sum, rows * d.HS, A(0));
    for (size_t j = 0; j < d.Tk; j += ATTENTION_K) {
        Sight s =
            look(q_positions, doc_start, k_positions + j, rows, std::min(ATTENTION_K, d.Tk - j));
        if (s.nothing) continue;
        tile_matmul(t.scores, q, k + j * d.kv_stride,
                    scores_product(rows, s.keys, d.HS, d.q_stride, d.kv_stride), t, blas, where);
        scale_scores(t.scores, s, scale, slope);
        online_softmax(t, s, d.HS);
        tile_matmul(t.part, (const T*)t.p, v + j * d.kv_stride,
                    values_product(rows, s.keys, d.HS, d.kv_stride), t, blas, where);
        for (size_t i = 0; i < rows * d.HS; i++) t.sum[i] += t.part[i];
    }
    for (size_t i = 0; i < rows; i++) {
        bool seen = t.row_sum[i] > 0;
        A inverse = seen ? 1 / t.row_sum[i] : 0;
        for (size_t e = 0; e < d.HS; e++)
            out[i * d.NH * d.HS + e] = from_acc<T>(t.sum[i * d.HS + e] * inverse);
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
        AttentionTile<T> tile = my_tile<T>(blas, d, where);
        #pragma omp for collapse(3) schedule(dynamic)
        for (size_t b = 0; b < d.B; b++)
            for (size_t h = 0; h < d.NH; h++)
                for (size_t block = 0; block < blocks; block++) {
                    size_t i = (blocks - 1 - block) * ATTENTION_Q,
                           rows = std::min(ATTENTION_Q, d.Tq - i),
                           row = b * d.Tq + i; // longest first
                    const T *keys = k + b * d.Tk * d.kv_stride + h / group * d.HS,
                            *values = v + b * d.Tk * d.kv_stride + h / group * d.HS;
                    attention_forward_block(
                        out + (row * d.NH + h) * d.HS, lse + (b * d.NH + h) * d.Tq + i,
                        q + row * d.q_stride + h * d.HS, keys, values, q_positions + row,
                        k_positions + b * d.Tk, doc_start + row, rows,
                        acc_t<T>(slopes ? slopes[h] : 0), d, tile, blas, where);
                }
    }
}

// ----------------------------------------------------------------------------
// CPU: backward

// p = exp(s - lse), ds = p (dp - D) / sqrt(HS), both as operands
template <typename T>
void backward_scores(AttentionTile<T>& t, const acc_t<T>* lse, const Sight& s, acc_t<T> scale) {
    typedef acc_t<T> A;
    for (size_t i = 0; i < s.rows; i++) {
        const A *row = t.scores + i * ATTENTION_K, *dp = t.dscores + i * ATTENTION_K;
        T *p = t.p + i * ATTENTION_K, *ds = t.ds + i * ATTENTION_K;
        A base = lse[i] == A(-INFINITY) ? 0 : lse[i], D = t.D[i];
        #pragma omp simd
        for (size_t j = 0; j < s.keys; j++) {
            A e = fast_exp(row[j] - base);
            p[j] = from_acc<T>(e);
            ds[j] = from_acc<T>(e * (dp[j] - D) * scale);
        }
    }
}

// One head's block of queries: dq =, and its part of dk and dv into the tile's sums.
template <typename T>
void attention_backward_block(T* dq, const T* dout, const T* out, const acc_t<T>* lse, const T* q,
                              const T* k, const T* v, const int* q_positions,
                              const int* k_positions, const int* doc_start, size_t rows,
                              acc_t<T> slope, const AttentionDims& d, AttentionTile<T>& t,
                              Blas& blas, Cpu where) {
    typedef acc_t<T> A;
    A scale = 1 / std::sqrt(A(d.HS));
    size_t out_stride = d.NH * d.HS;
    for (size_t i = 0; i < rows; i++) {
        t.D[i] = 0;
        for (size_t e = 0; e < d.HS; e++)
            t.D[i] += to_acc(dout[i * out_stride + e]) * to_acc(out[i * out_stride + e]);
    }
    std::fill_n(t.sum, rows * d.HS, A(0));
    for (size_t j = 0; j < d.Tk; j += ATTENTION_K) {
        Sight s =
            look(q_positions, doc_start, k_positions + j, rows, std::min(ATTENTION_K, d.Tk - j));
        if (s.nothing) continue;
        const T *kj = k + j * d.kv_stride, *vj = v + j * d.kv_stride;
        tile_matmul(t.scores, q, kj, scores_product(rows, s.keys, d.HS, d.q_stride, d.kv_stride), t,
                    blas, where);
        scale_scores(t.scores, s, scale, slope);
        tile_matmul(t.dscores, dout, vj,
                    scores_product(rows, s.keys, d.HS, out_stride, d.kv_stride), t, blas, where);
        backward_scores(t, lse, s, scale);
        tile_matmul(t.part, (const T*)t.p, dout, keys_product(rows, s.keys, d.HS, out_stride), t,
                    blas, where);
        for (size_t i = 0; i < s.keys * d.HS; i++) t.dv[j * d.HS + i] += t.part[i];
        tile_matmul(t.part, (const T*)t.ds, q, keys_product(rows, s.keys, d.HS, d.q_stride), t,
                    blas, where);
        for (size_t i = 0; i < s.keys * d.HS; i++) t.dk[j * d.HS + i] += t.part[i];
        tile_matmul(t.part, (const T*)t.ds, kj, values_product(rows, s.keys, d.HS, d.kv_stride), t,
                    blas, where);
        for (size_t i = 0; i < rows * d.HS; i++) t.sum[i] += t.part[i];
    }
    for (size_t i = 0; i < rows; i++)
        for (size_t e = 0; e < d.HS; e++) dq[i * d.q_stride + e] = from_acc<T>(t.sum[i * d.HS + e]);
}

template <typename T>
void attention_backward(T* dq, T* dk, T* dv, const T* dout, const T* out, const acc_t<T>* lse,
                        const T* q, const T* k, const T* v, const int* q_positions,
                        const int* k_positions, const int* doc_start, const float* slopes,
                        const AttentionDims& d, Blas& blas, Cpu where) {
    size_t group = d.NH / d.NKV;
    #pragma omp parallel
    {
        AttentionTile<T> t = my_tile<T>(blas, d, where);
        #pragma omp for collapse(2) schedule(dynamic)
        for (size_t b = 0; b < d.B; b++)
            for (size_t kh = 0; kh < d.NKV;
                 kh++) { // a task owns a key head: its dk, dv, and the dq of the heads that read it
                size_t at = b * d.Tk * d.kv_stride + kh * d.HS;
                std::fill_n(t.dk, d.Tk * d.HS, acc_t<T>(0));
                std::fill_n(t.dv, d.Tk * d.HS, acc_t<T>(0));
                for (size_t h = kh * group; h < (kh + 1) * group; h++)
                    for (size_t i = 0; i < d.Tq; i += ATTENTION_Q) {
                        size_t row = b * d.Tq + i, o = (row * d.NH + h) * d.HS,
                               qo = row * d.q_stride + h * d.HS;
                        attention_backward_block(
                            dq + qo, dout + o, out + o, lse + (b * d.NH + h) * d.Tq + i, q + qo,
                            k + at, v + at, q_positions + row, k_positions + b * d.Tk,
                            doc_start + row, std::min(ATTENTION_Q, d.Tq - i),
                            acc_t<T>(slopes ? slopes[h] : 0), d, t, blas, where);
                    }
                for (size_t j = 0; j < d.Tk; j++)
                    for (size_t e = 0; e < d.HS; e++) {
                        dk[at + j * d.kv_stride + e] = from_acc<T>(t.dk[j * d.HS + e]);
                        dv[at + j * d.kv_stride + e] = from_acc<T>(t.dv[j * d.HS + e]);
                    }
            }
    }
}
