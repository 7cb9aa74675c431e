// attention_tiled.cuh - attention on the CPU in tiles: products, online softmax - arXiv:2205.14135
//   A task is a block of ATTENTION_Q queries of one head. It walks the blocks of ATTENTION_K keys:
//   scores = q k^T, masked; running maximum and sum; out += p v, rescaled when the maximum grows.
//   In backward a task is a key head: p from lse, ds = p (dout v^T - D) scale, then
//   dv += p^T dout,  dk += ds^T q,  dq += ds k.
//   q, k, v, out, lse: see attention_types.h.
//   Contract: out, lse =   dq, dk, dv = or += (x.accumulate).  T or acc_t<T> for out and gradients.
//             A row that sees nothing: out 0, lse -inf, gradients 0.
//             Bitwise repeatable for any number of threads, because a task owns what it writes.
//   Cost: forward 4, backward 10 FLOPs per (query, key, channel) seen; blocks that no query sees
//         are skipped. Memory of a thread: the tiles, k and v of a head, and dk and dv of a head in
//         acc_t<T>.
//   To copy: this file, attention_cpu.cuh, attention_types.h, element_type.h, fast_math.h, gpu.h,
//            matmul.cuh, types.h and cuda_common.h.
#pragma once
#include "attention_cpu.cuh"
#include "attention_types.h"
#include "element_type.h"
#include "fast_math.h"
#include "matmul.cuh"
#include "types.h"

namespace llmc {

constexpr size_t ATTENTION_Q = 128; // queries in a block
constexpr size_t ATTENTION_K = 128; // keys in a block
constexpr size_t ATTENTION_FEW = 8; // products with fewer rows (decoding) use our own loops

// Whether the tiles take these operands. The reference takes the others: a soft cap, or values of
// another width than keys.
template <typename T>
bool tiles_take(const AttentionOperands<T>& x) {
    return x.softcap == 0 && x.d.HS_v == x.d.HS;
}

// ----------------------------------------------------------------------------
// a thread's tiles. Heads are copied to dense rows, because with a strided operand oneDNN 2.6 uses
// a slower implementation, which allocates 70 to 230 KB at each call.

template <typename T>
struct HeadRows { // the rows of one head
    const T* data;
    size_t stride; // elements between rows
    const T* row(size_t i) const { return data + i * stride; }
};

// The arrays of a thread, in its share of the scratch.
template <typename T> struct AttentionTile {
    acc_t<T> *scores, *dscores; // (Q,K)
    T *p, *ds;                  // (Q,K) rounded to T, as operands of products
    T *q, *dout;                // (Q,HS) dense
    T *k, *v;                   // (Tk,HS) dense
    acc_t<T>* sum;              // (Q,HS)
    acc_t<T> *row_max, *row_sum, *D; // (Q)
    acc_t<T> *dk, *dv;               // (Tk,HS)
    unsigned char* products;         // scratch of the matrix products
    size_t products_bytes;
};

// The three shapes of products: (rows, keys) = q k^T;  (rows, HS) += p v;  (keys, HS) += p^T dout.
// A Product lists M, N, K; strides {row, column} of a and of b; row stride of out; accumulate.
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

// The sizes of the blocks that T rows are cut into: at most two, full blocks and the last one.
inline std::vector<size_t> block_sizes(size_t T, size_t block) {
    std::vector<size_t> sizes;
    if (T >= block) sizes.push_back(block);
    if (T % block) sizes.push_back(T % block);
    return sizes;
}

// The scratch that the largest of a thread's products needs.
template <typename T>
size_t attention_product_scratch(const AttentionDims& d) {
    Type t = type_of<T>(), a = type_of<acc_t<T>>();
    size_t most = 0;
    auto need = [&](const Product& p) {
        most = std::max(most, matmul_scratch_bytes(p, t, a, false, false, 1));
    };

    // Ask for every shape of block and every kind of product.
    for (size_t rows : block_sizes(d.Tq, ATTENTION_Q))
        for (size_t keys : block_sizes(d.Tk, ATTENTION_K)) {
            need(scores_product(rows, keys, d.HS, d.HS, d.HS));
            need(values_product(rows, keys, d.HS, d.HS));
            need(keys_product(rows, keys, d.HS, d.HS));
        }

    // With a key/value cache Tk grows, and its last block takes every size. For these, count the
    // scratch of the plain loops.
    return most + matmul_plain_scratch_bytes(std::min(ATTENTION_Q, d.Tq), sizeof(acc_t<T>), 1);
}

// Lay out a thread's share of the scratch. Returns the bytes of the tiles; the rest of the share is
// the products' scratch.
template <typename T>
size_t attention_tile(AttentionTile<T>& tile, unsigned char* share, size_t share_bytes,
                      const AttentionDims& d) {
    size_t next = 0;
    // Steps of 256 bytes put each array on cache lines of its own.
    auto take = [&](auto*& p, size_t n) {
        p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(share + next);
        next += round_up(n * sizeof(*p), 256);
    };
    size_t Q = ATTENTION_Q;
    size_t K = ATTENTION_K;

    // A block's scores and their gradients.
    take(tile.scores, Q * K);
    take(tile.dscores, Q * K);
    take(tile.p, Q * K);
    take(tile.ds, Q * K);

    // A head's operands.
    take(tile.q, Q * d.HS);
    take(tile.dout, Q * d.HS);
    take(tile.k, d.Tk * d.HS);
    take(tile.v, d.Tk * d.HS);

    // A head's sums.
    take(tile.sum, Q * d.HS);
    take(tile.row_max, Q);
    take(tile.row_sum, Q);
    take(tile.D, Q);
    take(tile.dk, d.Tk * d.HS);
    take(tile.dv, d.Tk * d.HS);

    tile.products = share + next;
    tile.products_bytes = share_bytes - next;
    return next;
}

// The scratch of all threads. A null share makes attention_tile only count.
template <typename T>
size_t attention_scratch_bytes(const AttentionDims& d, int threads, Cpu) {
    AttentionTile<T> tile;
    size_t tiles = attention_tile<T>(tile, nullptr, 0, d);
    return (tiles + round_up(attention_product_scratch<T>(d), 256)) * size_t(threads);
}

// This thread's tile, in its share of the scratch.
template <typename T>
AttentionTile<T> my_tile(const Blas& blas, const AttentionDims& d, Cpu where) {
    AttentionTile<T> tile;
    // Threads share the scratch evenly, in multiples of 256 bytes.
    size_t share = blas.scratch_bytes / size_t(threads_here(where)) / 256 * 256;
    unsigned char* mine = static_cast<unsigned char*>(blas.scratch) + thread_here() * share;
    size_t used = attention_tile(tile, mine, share, d);
    LLMC_CHECK(used <= share, "attention needs %zu bytes of scratch a thread, the plan gave %zu",
               used, share);
    return tile;
}

// Copy `rows` rows of HS channels to `to`, without gaps.
template <typename T>
HeadRows<T> dense_rows(T* to, HeadRows<T> from, size_t rows, size_t HS) {
    for (size_t i = 0; i < rows; i++)
        memcpy(to + i * HS, from.row(i), HS * sizeof(T));
    return {to, HS};
}

// A dot product of K elements, a_step and b_step apart.
template <typename A, typename T>
inline A few_dot(const T* a, const T* b, size_t K, size_t a_step, size_t b_step) {
    A sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (size_t k = 0; k < K; k++)
        sum += to_acc(a[k * a_step]) * to_acc(b[k * b_step]);
    return sum;
}

// A product with few rows or a short sum, in plain loops.
template <typename T>
void few_rows_matmul(acc_t<T>* out, const T* a, const T* b, const Product& p) {
    typedef acc_t<T> A;
    for (size_t i = 0; i < p.M; i++) {
        A* row = out + i * p.out_row;
        const T* ai = a + i * p.a.row;
        if (!p.accumulate)
            std::fill_n(row, p.N, A(0));

        // Where the rows of b^T are contiguous, take dot products. With steps of a constant 1 the
        // compiler loads whole vectors.
        bool dense = p.a.column == 1 && p.b.row == 1;
        for (size_t j = 0; p.b.column != 1 && j < p.N; j++) {
            const T* bj = b + j * p.b.column;
            row[j] += dense ? few_dot<A>(ai, bj, p.K, 1, 1)
                            : few_dot<A>(ai, bj, p.K, p.a.column, p.b.row);
        }

        // Otherwise add up rows of b, four at a time: a short row of out then stays in registers.
        // Beyond the last row, add it zero times.
        for (size_t k = 0; p.b.column == 1 && k < p.K; k += 4) {
            const T* bk[4];
            A x[4];
            for (size_t n = 0; n < 4; n++) {
                bk[n] = b + std::min(k + n, p.K - 1) * p.b.row;
                x[n] = k + n < p.K ? to_acc(ai[(k + n) * p.a.column]) : A(0);
            }
            #pragma omp simd
            for (size_t j = 0; j < p.N; j++) {
                A sum = row[j];
                for (size_t n = 0; n < 4; n++)
                    sum += x[n] * to_acc(bk[n][j]);
                row[j] = sum;
            }
        }
    }
}

// One thread's product. Few rows do not go to oneDNN: during decoding it would compile a new
// product for each length.
template <typename T>
void tile_matmul(acc_t<T>* out, const T* a, const T* b, const Product& p, const AttentionTile<T>& t,
                 Blas& blas, Cpu where) {
    // matmul can also add a bias and a residual; neither is used here.
    const T* bias = nullptr;
    const acc_t<T>* residual = nullptr;
    if (p.M < ATTENTION_FEW || p.K < ATTENTION_FEW)
        return few_rows_matmul(out, a, b, p);
    matmul(out, a, b, bias, residual, p, blas, 1 + size_t(thread_here()), t.products,
           t.products_bytes, where);
}

// ----------------------------------------------------------------------------
// the mask of a block of queries and a block of keys

// The positions of a block's queries and keys, and what follows for the block as a whole.
struct BlockMask {
    const int *q_positions, *doc_start; // (rows)
    const int* k_positions;             // (keys)
    size_t rows, keys;
    int window;
    bool nothing;    // no query sees any of the keys
    bool everything; // every query sees all of them
};

// Classify a block of queries and keys by their positions.
inline BlockMask mask_of(const int* q_positions, const int* doc_start, const int* k_positions,
                         size_t rows, size_t keys, int window) {
    // Compare only the extremes. A block that only looks mixed costs one pass of masking.
    auto [q_low, q_high] = std::minmax_element(q_positions, q_positions + rows);
    auto [d_low, d_high] = std::minmax_element(doc_start, doc_start + rows);
    auto [k_low, k_high] = std::minmax_element(k_positions, k_positions + keys);
    bool nothing = *k_low > *q_high || *k_high < *d_low || *q_low - *k_high >= window;
    bool everything = *k_high <= *q_low && *k_low >= *d_high && *q_high - *k_low < window;
    return {q_positions, doc_start, k_positions, rows, keys, window, nothing, everything};
}

// Scale a block's scores (rows, keys) in place, add ALiBi, and set masked ones to -inf. Returns the
// factor that scores still lack: leaving a fully visible block unscaled saves a pass.
template <typename A>
A finish_scores(A* scores, const BlockMask& m, A scale, A slope) {
    if (m.everything && slope == 0) return scale;
    for (size_t i = 0; i < m.rows; i++) {
        A* row = scores + i * m.keys;
        int position = m.q_positions[i];
        int start = m.doc_start[i];
        #pragma omp simd
        for (size_t j = 0; j < m.keys; j++) {
            int distance = position - m.k_positions[j];
            A x = row[j] * scale - slope * A(distance);
            // The same three tests as in AttentionOperands::visible().
            bool seen = distance >= 0 && distance < m.window && m.k_positions[j] >= start;
            row[j] = seen ? x : A(-INFINITY);
        }
    }
    return 1;
}

// ----------------------------------------------------------------------------
// forward

// Add a block's scores to the running softmax. The exponentials become operands (t.p), and the sums
// and outputs so far are rescaled to the new maximum.
template <typename T>
void online_softmax(AttentionTile<T>& t, const BlockMask& m, size_t HS, acc_t<T> factor) {
    typedef acc_t<T> A;
    for (size_t i = 0; i < m.rows; i++) {
        const A* row = t.scores + i * m.keys;
        T* p = t.p + i * m.keys;

        // Find the maximum so far. A row that has seen nothing takes 0 as its base.
        A most = A(-INFINITY), sum = 0;
        #pragma omp simd reduction(max : most)
        for (size_t j = 0; j < m.keys; j++)
            most = row[j] > most ? row[j] : most;
        most = std::max(t.row_max[i], most * factor);
        A base = most == A(-INFINITY) ? 0 : most;
        A rescale = fast_exp_nonpositive(t.row_max[i] - base);

        // Take exponentials relative to the maximum, and their sum.
        #pragma omp simd reduction(+ : sum)
        for (size_t j = 0; j < m.keys; j++) {
            A e = fast_exp_nonpositive(row[j] * factor - base);
            p[j] = from_acc<T>(e);
            sum += e;
        }

        // Update the row's running values for the next block of keys.
        t.row_max[i] = most;
        t.row_sum[i] = t.row_sum[i] * rescale + sum;
        for (size_t e = 0; e < HS; e++)
            t.sum[i * HS + e] *= rescale;
    }
}

// A block of queries of one head: its rows, their positions, and the keys they may see.
template <typename T> struct AttentionBlock {
    HeadRows<T> q, k, v, dout;
    const int *q_positions = nullptr, *doc_start = nullptr; // (rows)
    const int* k_positions = nullptr;                       // (Tk)
    size_t rows = 0;
    acc_t<T> slope = 0;
};

// Forward for one block. Leaves the sums in t.sum and t.row_sum.
template <typename T>
void attention_forward_block(const AttentionBlock<T>& a, const AttentionOperands<T>& x,
                             AttentionTile<T>& t, Blas& blas, Cpu where) {
    typedef acc_t<T> A;
    const AttentionDims& d = x.d;

    // Start with nothing seen.
    std::fill_n(t.row_max, a.rows, A(-INFINITY));
    std::fill_n(t.row_sum, a.rows, A(0));
    std::fill_n(t.sum, a.rows * d.HS, A(0));

    // Walk the blocks of keys that some query sees.
    for (size_t j = 0; j < d.Tk; j += ATTENTION_K) {
        BlockMask m = mask_of(a.q_positions, a.doc_start, a.k_positions + j, a.rows,
                              std::min(ATTENTION_K, d.Tk - j), d.window);
        if (m.nothing) continue;

        // Compute the scores, and mask them.
        Product scores = scores_product(a.rows, m.keys, d.HS, a.q.stride, a.k.stride);
        tile_matmul(t.scores, a.q.data, a.k.row(j), scores, t, blas, where);
        A factor = finish_scores(t.scores, m, x.scale, a.slope);

        // Take the softmax, and add the values that it weights.
        online_softmax(t, m, d.HS, factor);
        Product values = values_product(a.rows, m.keys, d.HS, a.v.stride);
        tile_matmul(t.sum, (const T*)t.p, a.v.row(j), values, t, blas, where);
    }
}

// Divide by the sums of exponentials. Write lse and one head's rows of out, which are NH*HS apart.
template <typename T, typename O>
void store_attention(O* out, acc_t<T>* lse, const AttentionTile<T>& t, size_t rows,
                     const AttentionDims& d) {
    typedef acc_t<T> A;
    for (size_t i = 0; i < rows; i++) {
        bool seen = !(t.row_sum[i] <= 0); // true for a NaN too
        A inverse = seen ? 1 / t.row_sum[i] : 0;
        const A* sum = t.sum + i * d.HS;
        for (size_t e = 0; e < d.HS; e++)
            out[i * d.NH * d.HS + e] = from_acc<O>(sum[e] * inverse);
        lse[i] = seen ? t.row_max[i] + std::log(t.row_sum[i]) : A(-INFINITY);
    }
}

// Forward on the CPU. blas.scratch: attention_scratch_bytes().
template <typename T, typename O>
void attention_forward(O* out, acc_t<T>* lse, const AttentionOperands<T>& operands, Blas& blas,
                       Cpu where) {
    const AttentionOperands<T> x = completed(operands);
    const AttentionDims& d = x.d;
    // The reference follows the definition, slowly.
    if (!tiles_take(x))
        return attention_forward_reference(out, lse, x);
    size_t blocks = ceil_div(d.Tq, ATTENTION_Q);
    size_t group = d.NH / d.NKV;
    #pragma omp parallel
    {
        // A thread keeps one tile for all its tasks.
        AttentionTile<T> t = my_tile<T>(blas, d, where);
        HeadRows<T> keys = {}, values = {};
        const T* held = nullptr; // the head whose keys are copied; the next task may share it

        // Hand out tasks as threads ask: one task reads a single block of keys, another all keys.
        #pragma omp for collapse(3) schedule(dynamic)
        for (size_t b = 0; b < d.B; b++)
            for (size_t h = 0; h < d.NH; h++)
                for (size_t block = 0; block < blocks; block++) {
                    size_t i = (blocks - 1 - block) * ATTENTION_Q; // longest first
                    size_t rows = std::min(ATTENTION_Q, d.Tq - i);

                    // Copy the operands to dense rows; the keys once for all tasks that share them.
                    const T* k = x.k + x.key_at(b, h / group, 0);
                    if (k != held) {
                        held = k;
                        keys = {k, d.k_stride};
                        values = {x.v + x.value_at(b, h / group, 0), d.v_stride};
                        // In decoding a copy would cost more than the products.
                        if (d.Tq >= ATTENTION_FEW) {
                            keys = dense_rows(t.k, keys, d.Tk, d.HS);
                            values = dense_rows(t.v, values, d.Tk, d.HS);
                        }
                    }
                    // Few queries are not copied: our own loops take any stride.
                    HeadRows<T> queries = {x.query(b, h, i), d.q_stride};
                    if (rows >= ATTENTION_FEW)
                        queries = dense_rows(t.q, queries, rows, d.HS);

                    // Run the block.
                    AttentionBlock<T> a = {queries, keys, values, {}};
                    a.q_positions = x.q_positions + b * d.Tq + i;
                    a.doc_start = x.doc_start + b * d.Tq + i;
                    a.k_positions = x.k_positions + b * d.Tk;
                    a.rows = rows;
                    a.slope = x.slope(h);
                    attention_forward_block(a, x, t, blas, where);
                    store_attention(out + x.out_at(b, h, i), lse + x.lse_at(b, h, i), t, rows, d);
                }
    }
}

// ----------------------------------------------------------------------------
// backward

// p = exp(s - lse) and ds = p (dp - D) scale, both rounded to T as operands.
template <typename T>
void backward_scores(AttentionTile<T>& t, const acc_t<T>* lse, const BlockMask& m, acc_t<T> factor,
                     acc_t<T> scale) {
    typedef acc_t<T> A;
    for (size_t i = 0; i < m.rows; i++) {
        const A *row = t.scores + i * m.keys, *dp = t.dscores + i * m.keys;
        T *p = t.p + i * m.keys, *ds = t.ds + i * m.keys;
        // A row that sees nothing has only -inf scores, so any finite base gives p = 0.
        A base = lse[i] == A(-INFINITY) ? 0 : lse[i];
        A D = t.D[i];
        #pragma omp simd
        for (size_t j = 0; j < m.keys; j++) {
            A e = fast_exp_nonpositive(row[j] * factor - base);
            p[j] = from_acc<T>(e);
            ds[j] = from_acc<T>(e * (dp[j] - D) * scale);
        }
    }
}

// D = the row sums of dout * out. Rows are NH*HS apart.
template <typename T>
void backward_row_sums(AttentionTile<T>& t, const T* dout, const T* out, size_t rows,
                       const AttentionDims& d) {
    for (size_t i = 0; i < rows; i++) {
        size_t row = i * d.NH * d.HS;
        t.D[i] = few_dot<acc_t<T>>(dout + row, out + row, d.HS, 1, 1);
    }
}

// Backward for one block. Leaves its dq in t.sum and adds its part of dk and dv to t.dk and t.dv.
template <typename T>
void attention_backward_block(const AttentionBlock<T>& a, const acc_t<T>* lse,
                              const AttentionOperands<T>& x, AttentionTile<T>& t, Blas& blas,
                              Cpu where) {
    typedef acc_t<T> A;
    const size_t rows = a.rows;
    const size_t HS = x.d.HS;
    // All five products of a block run in this thread, in its own scratch.
    auto product = [&](A* out, const T* left, const T* right, const Product& p) {
        tile_matmul(out, left, right, p, t, blas, where);
    };
    std::fill_n(t.sum, rows * HS, A(0));

    // Walk the blocks of keys. dq sums over all of them, in t.sum.
    for (size_t j = 0; j < x.d.Tk; j += ATTENTION_K) {
        BlockMask m = mask_of(a.q_positions, a.doc_start, a.k_positions + j, rows,
                              std::min(ATTENTION_K, x.d.Tk - j), x.d.window);
        if (m.nothing) continue;
        const T *k = a.k.row(j), *v = a.v.row(j);

        // Compute the scores again, and the gradients of p.
        product(t.scores, a.q.data, k, scores_product(rows, m.keys, HS, a.q.stride, a.k.stride));
        product(t.dscores, a.dout.data, v,
                scores_product(rows, m.keys, HS, a.dout.stride, a.v.stride));
        A factor = finish_scores(t.scores, m, x.scale, a.slope);
        backward_scores(t, lse, m, factor, x.scale);

        // Add to the three gradients. ds already carries scale, so dk and dq need no factor.
        product(t.dv + j * HS, t.p, a.dout.data, keys_product(rows, m.keys, HS, a.dout.stride));
        product(t.dk + j * HS, t.ds, a.q.data, keys_product(rows, m.keys, HS, a.q.stride));
        product(t.sum, t.ds, k, values_product(rows, m.keys, HS, a.k.stride));
    }
}

// Backward on the CPU. blas.scratch: attention_scratch_bytes().
template <typename T, typename Q, typename K>
void attention_backward(Q* dq, K* dk, K* dv, const T* out, const acc_t<T>* lse,
                        const AttentionOperands<T>& operands, Blas& blas, Cpu where) {
    const AttentionOperands<T> x = completed(operands);
    const AttentionDims& d = x.d;
    if (!tiles_take(x))
        return attention_backward_reference(dq, dk, dv, out, lse, x);
    size_t group = d.NH / d.NKV;
    size_t out_stride = d.NH * d.HS;
    #pragma omp parallel
    {
        AttentionTile<T> t = my_tile<T>(blas, d, where);
        // A task owns a key head: its dk and dv, and the dq of the heads that read it.
        #pragma omp for collapse(2) schedule(dynamic)
        for (size_t b = 0; b < d.B; b++)
            for (size_t kh = 0; kh < d.NKV; kh++) {
                // Clear the head's sums, and copy its keys and values to dense rows.
                std::fill_n(t.dk, d.Tk * d.HS, acc_t<T>(0));
                std::fill_n(t.dv, d.Tk * d.HS, acc_t<T>(0));
                const T *k = x.k + x.key_at(b, kh, 0), *v = x.v + x.value_at(b, kh, 0);
                HeadRows<T> keys = dense_rows(t.k, {k, d.k_stride}, d.Tk, d.HS);
                HeadRows<T> values = dense_rows(t.v, {v, d.v_stride}, d.Tk, d.HS);

                // Take the queries of every head that reads this key head, a block at a time.
                for (size_t h = kh * group; h < (kh + 1) * group; h++)
                    for (size_t i = 0; i < d.Tq; i += ATTENTION_Q) {
                        size_t rows = std::min(ATTENTION_Q, d.Tq - i);
                        const T* dout = x.gradient(b, h, i);
                        // D needs out, which the block itself never reads.
                        backward_row_sums(t, dout, out + x.out_at(b, h, i), rows, d);

                        // Copy the rows of q and dout, and point to the rest.
                        AttentionBlock<T> a = {{}, keys, values, {}};
                        a.q = dense_rows(t.q, {x.query(b, h, i), d.q_stride}, rows, d.HS);
                        a.dout = dense_rows(t.dout, {dout, out_stride}, rows, d.HS);
                        a.q_positions = x.q_positions + b * d.Tq + i;
                        a.doc_start = x.doc_start + b * d.Tq + i;
                        a.k_positions = x.k_positions + b * d.Tk;
                        a.rows = rows;
                        a.slope = x.slope(h);
                        // Add to dk and dv. dq is complete, because the block has met all keys.
                        attention_backward_block(a, lse + x.lse_at(b, h, i), x, t, blas, where);
                        store_rows(dq + x.query_at(b, h, i), t.sum, rows, d.q_stride, d.HS,
                                   x.accumulate);
                    }

                // Round the sums over all queries to the gradients' type, once.
                store_rows(dk + x.key_at(b, kh, 0), t.dk, d.Tk, d.k_stride, d.HS, x.accumulate);
                store_rows(dv + x.value_at(b, kh, 0), t.dv, d.Tk, d.v_stride, d.HS, x.accumulate);
            }
    }
}

// For the log: on the CPU there is no choice of kernels.
inline std::string attention_backend(const AttentionDims&, const AttentionCall&, Cpu) {
    return "";
}

} // namespace llmc
