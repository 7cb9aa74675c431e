// attention_sm80.cuh - flash attention on tensor cores by mma.sync, for Ampere and later - arXiv:2307.08691
//   The operands, masks and results of attention.cuh, in bf16 and fp16, head sizes of 8 to 256 in
//   steps of 8: one that is not 32, 64, 96, 128 or 256 runs in the next, with zeros in shared memory.
//   A row is a (query, head) pair: the heads of a group follow each other, so a block reads the keys
//   of its group once. A warp owns rows of 16; keys come in tiles by cp.async, one ahead. Shared
//   memory is swizzled in chunks of 16 bytes, so that ldmatrix has no bank conflicts.
//   forward      a block owns rows, walks tiles of keys that they see
//   backward     dK, dV: a block owns keys, walks tiles of rows, with S^T = K Q^T, so that P^T and
//                dS^T are operands where they arise; dQ: a block owns rows, walks tiles of keys.
//                Two kernels, 7 products in place of 5, and no atomics: bitwise repeatable.
//   Tiles are skipped, and mask-free, by the least and largest position in them (Span).
//   Cost: products on tensor cores; an exp2 for each (query, key) seen, forward and in each backward
//         kernel. Scratch: spans of the tiles, and two numbers a row.
//   To copy: attention.cuh, which includes this file, attention_sm90.cuh, matmul.cuh, hopper.cuh and
//   common.h.
#pragma once
#include "attention.cuh"
#include "hopper.cuh"

#if KERNELS

constexpr int MMA_WARPS = 4, MMA_THREADS = MMA_WARPS * 32;
constexpr float LOG2E = 1.44269504f, LN2 = 0.693147181f;

// ----------------------------------------------------------------------------
// tiles in shared memory: rows of D elements, chunks of 8 swizzled

template <int D> __device__ int tile_at(int row, int chunk) {
    int swizzle = D / 8 % 8 == 0 ? row & 7 : row >> 1 & 3;
    return row * D + (chunk ^ swizzle) * 8;
}

// ROWS rows by cp.async; row(r) is where row r starts in global memory, null: zeros
template <int D, int ROWS, typename T, typename F>
__device__ void load_rows(T* tile, const T* somewhere, int HS, F row) {
    for (int k = threadIdx.x; k < ROWS * (D / 8); k += MMA_THREADS) {
        int r = k / (D / 8), chunk = k % (D / 8);
        const T* from = row(r);
        bool real = from && chunk * 8 < HS;
        cp_async16(tile + tile_at<D>(r, chunk), real ? from + chunk * 8 : somewhere, real ? 16 : 0);
    }
}

// rows [row, row + 16), channels [16 k, 16 k + 16) as the first operand of mma
template <int D, typename T>
__device__ void load_a(uint32_t (&a)[4], const T* tile, int row, int k) {
    int lane = threadIdx.x % 32;
    ldmatrix_x4(a, tile + tile_at<D>(row + lane % 16, 2 * k + lane / 16));
}
// rows [row, row + 16) as columns, channels [16 k, 16 k + 16) to sum over: second operands, two of
// 8 columns
template <int D, typename T>
__device__ void load_b(uint32_t (&b)[4], const T* tile, int row, int k) {
    int lane = threadIdx.x % 32;
    ldmatrix_x4(b, tile + tile_at<D>(row + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
}
// rows [row, row + 16) to sum over, channels [8 c, 8 c + 16) as columns
template <int D, typename T>
__device__ void load_b_rows(uint32_t (&b)[4], const T* tile, int row, int c) {
    int lane = threadIdx.x % 32;
    ldmatrix_x4_t(b, tile + tile_at<D>(row + lane % 16, c + lane / 16));
}

template <typename T>
__device__ void mma_pair(float (&left)[4], float (&right)[4], const uint32_t (&a)[4],
                         const uint32_t (&b)[4]) {
    uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
    mma_m16n8k16<T>(left, a, first);
    mma_m16n8k16<T>(right, a, second);
}

// s[m] (16, 8 NT) = rows [row + 16 m, ..) of a times the 8 NT rows of b, over D channels
template <int D, int MT, int NT, typename T>
__device__ void rows_times_rows(float (&s)[MT][NT][4], const T* a, int row, const T* b) {
    #pragma unroll
    for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int n = 0; n < NT; n++)
            #pragma unroll
            for (int i = 0; i < 4; i++) s[m][n][i] = 0;
    #pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t fa[MT][4], fb[4];
        #pragma unroll
        for (int m = 0; m < MT; m++) load_a<D>(fa[m], a, row + 16 * m, k);
        #pragma unroll
        for (int n = 0; n < NT; n += 2) {
            load_b<D>(fb, b, 8 * n, k);
            #pragma unroll
            for (int m = 0; m < MT; m++) mma_pair<T>(s[m][n], s[m][n + 1], fa[m], fb);
        }
    }
}

// sum[m] (16, 8 CT) += p[m] (16, 8 NT) times the 8 NT rows of b, its channels from 8 c on
template <int D, int MT, int NT, int CT, typename T>
__device__ void scores_times_rows(float (&sum)[MT][CT][4], const uint32_t (&p)[MT][NT / 2][4],
                                  const T* b, int c) {
    #pragma unroll
    for (int k = 0; k < NT / 2; k++)
        #pragma unroll
        for (int j = 0; j < CT; j += 2) {
            uint32_t fb[4];
            load_b_rows<D>(fb, b, 16 * k, c + j);
            #pragma unroll
            for (int m = 0; m < MT; m++) mma_pair<T>(sum[m][j], sum[m][j + 1], p[m][k], fb);
        }
}

// A product's result, two numbers of a row in a register, is the first operand of the next.
template <typename T, int NT>
__device__ void pack_scores(uint32_t (&p)[NT / 2][4], const float (&s)[NT][4]) {
    #pragma unroll
    for (int k = 0; k < NT / 2; k++)
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const float* x = s[2 * k + i / 2];
            p[k][i] = pack<T>(x[i % 2 * 2], x[i % 2 * 2 + 1]);
        }
}

// ----------------------------------------------------------------------------
// what a tile of rows sees of a tile of keys

// Keys, or the queries of (query, head) rows, `items` of them a tile.
struct Span {
    int low, high;
};
__device__ inline Span join_lanes(Span s) {
    for (int mask = 16; mask > 0; mask /= 2) {
        int low = __shfl_xor_sync(ALL_LANES, s.low, mask),
            high = __shfl_xor_sync(ALL_LANES, s.high, mask);
        s = {low < s.low ? low : s.low, high > s.high ? high : s.high};
    }
    return s;
}
// of x[from, to), by a warp
__device__ inline Span span_of(const int* x, size_t from, size_t to) {
    Span s = {INT_MAX, INT_MIN};
    for (size_t i = from + threadIdx.x % 32; i < to; i += 32)
        s = {x[i] < s.low ? x[i] : s.low, x[i] > s.high ? x[i] : s.high};
    return join_lanes(s);
}

enum Sees { NOTHING, SOME, ALL };
__device__ inline Sees what_is_seen(Span q, Span doc, Span k, int window) {
    if (k.low > q.high || k.high < doc.low || q.low - k.high >= window) return NOTHING;
    return k.high <= q.low && k.low >= doc.high && q.high - k.low < window ? ALL : SOME;
}

// Rows are (query, head of the group): row r is query r / group, head r % group.
template <typename T> struct RowOperands : AttentionOperands<T> {
    const Span *key_spans, *query_spans, *doc_spans; // (B, tiles) each
    const float* row_statistics;
    unsigned group, rows, padded; // heads a key head has; Tq * group; a multiple of every tile
    __device__ size_t query_of(unsigned row) const { return row / group; }
    __device__ size_t head_of(unsigned row, size_t kh) const { return kh * group + row % group; }
    __device__ const T* query_row(size_t b, size_t kh, unsigned row) const {
        return row < rows ? this->query(b, head_of(row, kh), query_of(row)) : nullptr;
    }
    __device__ const T* gradient_row(size_t b, size_t kh, unsigned row) const {
        return row < rows ? this->gradient(b, head_of(row, kh), query_of(row)) : nullptr;
    }
    // of every row, and of `padded` rows in all: lse in units of log 2, and D
    __device__ const float* statistics(size_t b, size_t kh, unsigned row) const {
        return row_statistics + 2 * ((b * this->d.NKV + kh) * padded + row);
    }
    // of the queries of rows [row, row + count)
    __device__ Span rows_span(const int* x, size_t b, unsigned row, unsigned count) const {
        size_t to = query_of(row + count - 1) + 1, Tq = this->d.Tq;
        return span_of(x + b * Tq, query_of(row), to < Tq ? to : Tq);
    }
};

// The tiles that are seen, in order; all lanes of a warp together.
struct TileWalk {
    int tiles, base = -32;
    unsigned seen = 0, whole = 0; // of the 32 tiles from base on
    // the next tile, or -1; look(tile) says what is seen of it; all: of every element
    template <typename F> __device__ int next(bool& all, F look) {
        while (!seen) {
            base += 32;
            if (base >= tiles) return -1;
            int tile = base + int(threadIdx.x % 32);
            Sees s = tile < tiles ? look(tile) : NOTHING;
            seen = __ballot_sync(ALL_LANES, s != NOTHING);
            whole = __ballot_sync(ALL_LANES, s == ALL);
        }
        int bit = __ffs(int(seen)) - 1;
        seen &= seen - 1;
        all = whole >> bit & 1;
        return base + bit;
    }
};

// spans (B, tiles) of x (B, n): tile t has items t * size / group to ((t + 1) * size - 1) / group
template <int UNUSED>
__global__ void attention_spans_kernel(Span* spans, const int* x, size_t n, unsigned size,
                                       unsigned group, unsigned tiles) {
    unsigned tile = blockIdx.x * MMA_WARPS + threadIdx.x / 32;
    if (tile >= tiles) return; // whole warps
    size_t from = size_t(tile) * size / group, to = ((tile + size_t(1)) * size - 1) / group + 1;
    Span s = span_of(x + blockIdx.y * n, from, to < n ? to : n);
    if (threadIdx.x % 32 == 0) spans[size_t(blockIdx.y) * tiles + tile] = s;
}

// For backward, by a warp: a row's lse in units of log 2, and D = dout.out. A row that sees nothing,
// and one beyond the last, has an lse of infinity: its p is exp2(score - lse) = 0.
template <typename T>
__device__ Pack<float, 2> row_statistics(const T* out, const float* lse, const RowOperands<T>& x,
                                         size_t b, size_t kh, unsigned row) {
    float row_lse = INFINITY, sum = 0;
    if (row < x.rows) {
        size_t i = x.query_of(row), h = x.head_of(row, kh);
        const T *o = out + ((b * x.d.Tq + i) * x.d.NH + h) * x.d.HS, *d = x.gradient(b, h, i);
        for (size_t e = threadIdx.x % 32; e < x.d.HS; e += 32)
            sum += to_float(o[e]) * to_float(d[e]);
        float natural = lse[(b * x.d.NH + h) * x.d.Tq + i];
        if (natural != -INFINITY) row_lse = natural * LOG2E;
    }
    return {row_lse, warp_sum(sum)};
}
template <typename T>
__global__ void attention_statistics_kernel(float* statistics, const T* out, const float* lse,
                                            const RowOperands<T> x) {
    unsigned row = blockIdx.x * MMA_WARPS + threadIdx.x / 32;
    size_t b = blockIdx.z, kh = blockIdx.y;
    if (row >= x.padded) return; // whole warps
    Pack<float, 2> y = row_statistics(out, lse, x, b, kh, row);
    if (threadIdx.x % 32 == 0) store(statistics + 2 * ((b * x.d.NKV + kh) * x.padded + row), y);
}

// What masks ask of a row; read where a tile needs a mask: registers are short.
struct RowSight {
    int position, doc_start;
    float slope; // in units of log 2
    bool real;
};
template <typename T>
__device__ RowSight row_sight(const RowOperands<T>& x, size_t b, size_t kh, unsigned row) {
    if (row >= x.rows) return {0, 0, 0, false};
    size_t i = b * x.d.Tq + x.query_of(row);
    return {x.q_positions[i], x.doc_start[i], x.slope(x.head_of(row, kh)) * LOG2E, true};
}
// y, a product, as a score in units of log 2; -inf where the row does not see the key
template <typename T>
__device__ float masked_score(float y, float scale, const RowSight& row, int key, int window) {
    int distance = row.position - key;
    bool seen = row.real && distance >= 0 && distance < window && key >= row.doc_start;
    return seen ? y * scale - row.slope * float(distance) : -INFINITY;
}

// s (16, 8 NT): rows from `row` on, keys from `key0` on
template <int NT, typename T>
__device__ void mask_scores(float (&s)[NT][4], const RowOperands<T>& x, size_t b, size_t kh,
                            unsigned row, size_t key0, float scale) {
    int lane = threadIdx.x % 32;
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        RowSight sight = row_sight(x, b, kh, row + 8 * i + lane / 4);
        #pragma unroll
        for (int n = 0; n < NT; n++)
            #pragma unroll
            for (int e = 0; e < 2; e++) {
                size_t key = key0 + 8 * n + 2 * (lane % 4) + e;
                float& y = s[n][2 * i + e];
                y = key < x.d.Tk ? masked_score<T>(y, scale, sight, x.k_positions[b * x.d.Tk + key],
                                                   x.d.window)
                                 : -INFINITY;
            }
    }
}

// Positions of a thread's two keys, 8 apart, where keys are rows.
struct KeySight {
    int position[2];
    bool real[2];
};
template <typename T> __device__ KeySight key_sight(const RowOperands<T>& x, size_t b, size_t key) {
    KeySight s;
    #pragma unroll
    for (int i = 0; i < 2; i++, key += 8) {
        s.real[i] = key < x.d.Tk;
        s.position[i] = s.real[i] ? x.k_positions[b * x.d.Tk + key] : 0;
    }
    return s;
}
// s (16, 8 MT) transposed: (query, head) rows from `row` on are columns
template <int MT, typename T>
__device__ void mask_columns(float (&s)[MT][4], const RowOperands<T>& x, size_t b, size_t kh,
                             unsigned row, const KeySight& keys, float scale) {
    int lane = threadIdx.x % 32;
    #pragma unroll
    for (int n = 0; n < MT; n++)
        #pragma unroll
        for (int e = 0; e < 2; e++) {
            RowSight sight = row_sight(x, b, kh, row + 8 * n + 2 * (lane % 4) + e);
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                float& y = s[n][2 * i + e];
                y = keys.real[i] ? masked_score<T>(y, scale, sight, keys.position[i], x.d.window)
                                 : -INFINITY;
            }
        }
}

// ----------------------------------------------------------------------------
// rows of a product's result: two a thread, 8 apart, of which it has columns 8 n + 2 (lane % 4) and
// the next; the four lanes of a row follow each other

__device__ inline float row_total(float x) {
    for (int mask = 1; mask < 4; mask *= 2) x += __shfl_xor_sync(ALL_LANES, x, mask);
    return x;
}

// The running softmax: scores s times factor become p = exp2(s - row_max); what was summed before
// must be multiplied by `rescale`. row_sum is of this lane's columns.
template <int NT>
__device__ void online_softmax(float (&s)[NT][4], float (&row_max)[2], float (&row_sum)[2],
                               float (&rescale)[2], float factor) {
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        float most = s[0][2 * i];
        #pragma unroll
        for (int n = 0; n < NT; n++)
            #pragma unroll
            for (int e = 0; e < 2; e++) {
                float y = s[n][2 * i + e];
                most = y > most ? y : most;
            }
        for (int mask = 1; mask < 4; mask *= 2) {
            float y = __shfl_xor_sync(ALL_LANES, most, mask);
            most = y > most ? y : most;
        }
        most = most * factor > row_max[i] ? most * factor : row_max[i];
        float base = most == -INFINITY ? 0 : most, total = 0;
        rescale[i] = ex2(row_max[i] - base);
        row_max[i] = most;
        #pragma unroll
        for (int n = 0; n < NT; n++)
            #pragma unroll
            for (int e = 0; e < 2; e++) {
                float& y = s[n][2 * i + e];
                y = ex2(y * factor - base);
                total += y;
            }
        row_sum[i] = row_sum[i] * rescale[i] + total;
    }
}
template <int CT> __device__ void scale_rows(float (&sum)[CT][4], const float (&factor)[2]) {
    #pragma unroll
    for (int c = 0; c < CT; c++)
        #pragma unroll
        for (int i = 0; i < 4; i++) sum[c][i] *= factor[i / 2];
}
// row i of the two, its first HS channels
template <typename T, int CT>
__device__ void store_row(T* to, const float (&sum)[CT][4], int i, float factor, int HS) {
    #pragma unroll
    for (int c = 0; c < CT; c++) {
        int e = 8 * c + 2 * (threadIdx.x % 4);
        if (e < HS)
            *reinterpret_cast<uint32_t*>(to + e) =
                pack<T>(sum[c][2 * i] * factor, sum[c][2 * i + 1] * factor);
    }
}

// ----------------------------------------------------------------------------
// forward

// Tiles: D channels, MT times 16 rows a warp, N keys.
template <typename T, int D, int MT, int N>
__global__ void __launch_bounds__(MMA_THREADS)
    attention_mma_forward_kernel(T* out, float* lse, const RowOperands<T> x) {
    constexpr int M = MMA_WARPS * MT * 16, NT = N / 8, CT = D / 8;
    const int HS = int(x.d.HS), lane = threadIdx.x % 32;
    const size_t b = blockIdx.z, kh = blockIdx.y;
    const unsigned row0 = (gridDim.x - 1 - blockIdx.x) * M; // the rows that see most first
    const int my_row = int(threadIdx.x / 32) * MT * 16;
    T* q = reinterpret_cast<T*>(dynamic_shared()); // (M, D)
    T *k = q + M * D, *v = k + 2 * N * D;          // (2, N, D) each

    load_rows<D, M>(q, x.q, HS, [&](int r) { return x.query_row(b, kh, row0 + r); });
    cp_async_commit();
    auto load_keys = [&](int stage, int tile) {
        auto from = [&](const T* p, int j) {
            size_t key = size_t(tile) * N + j;
            return key < x.d.Tk ? p + x.key(b, kh, key) : nullptr;
        };
        load_rows<D, N>(k + stage * N * D, x.k, HS, [&](int j) { return from(x.k, j); });
        load_rows<D, N>(v + stage * N * D, x.v, HS, [&](int j) { return from(x.v, j); });
    };
    const int tiles = int(ceil_div(x.d.Tk, size_t(N)));
    const Span positions = x.rows_span(x.q_positions, b, row0, M),
               docs = x.rows_span(x.doc_start, b, row0, M);
    auto look = [&](int tile) {
        Sees s = what_is_seen(positions, docs, x.key_spans[b * tiles + tile], x.d.window);
        return s == ALL && size_t(tile + 1) * N > x.d.Tk ? SOME : s;
    };
    TileWalk walk = {tiles};
    bool all = false, next_all = false;
    int tile = walk.next(all, look);
    if (tile >= 0) load_keys(0, tile);
    cp_async_commit();

    float row_max[MT][2], row_sum[MT][2] = {}, sum[MT][CT][4] = {};
    #pragma unroll
    for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int i = 0; i < 2; i++) row_max[m][i] = -INFINITY;
    const float scale = x.scale * LOG2E;

    for (int stage = 0; tile >= 0; stage ^= 1, all = next_all) {
        int next = walk.next(next_all, look);
        if (next >= 0) load_keys(stage ^ 1, next);
        cp_async_commit();
        cp_async_wait<1>(); // all but the next tile
        __syncthreads();    // of every thread

        // scores, and what is not seen: in units of log 2; the running softmax
        float s[MT][NT][4], factor = scale;
        rows_times_rows<D, MT, NT>(s, q, my_row, k + stage * N * D);
        if (!all || x.slopes) {
            #pragma unroll
            for (int m = 0; m < MT; m++)
                mask_scores(s[m], x, b, kh, row0 + my_row + 16 * m, size_t(tile) * N, scale);
            factor = 1;
        }
        #pragma unroll
        for (int m = 0; m < MT; m++) {
            float rescale[2];
            online_softmax(s[m], row_max[m], row_sum[m], rescale, factor);
            scale_rows(sum[m], rescale);
        }
        uint32_t p[MT][NT / 2][4];
        #pragma unroll
        for (int m = 0; m < MT; m++) pack_scores<T>(p[m], s[m]);
        scores_times_rows<D, MT, NT>(sum, p, v + stage * N * D, 0);
        __syncthreads(); // this stage is read, the tile after the next may come
        tile = next;
    }
    cp_async_wait<0>();

    #pragma unroll
    for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            unsigned row = row0 + my_row + 16 * m + 8 * i + lane / 4;
            float total = row_total(row_sum[m][i]);
            if (row >= x.rows) continue;
            bool seen = total != 0; // NaN has been seen
            T* to = out + ((b * x.d.Tq + x.query_of(row)) * x.d.NH + x.head_of(row, kh)) * x.d.HS;
            store_row(to, sum[m], i, seen ? 1 / total : 0, HS);
            if (lane % 4 == 0)
                lse[(b * x.d.NH + x.head_of(row, kh)) * x.d.Tq + x.query_of(row)] =
                    seen ? row_max[m][i] * LN2 + logf(total) : -INFINITY;
        }
}

// ----------------------------------------------------------------------------
// backward: dQ of a block's rows

template <typename T, int D, int N>
__global__ void __launch_bounds__(MMA_THREADS)
    attention_mma_backward_q_kernel(T* dq, const RowOperands<T> x) {
    constexpr int M = MMA_WARPS * 16, NT = N / 8, CT = D / 8;
    const int HS = int(x.d.HS), lane = threadIdx.x % 32, my_row = int(threadIdx.x / 32) * 16;
    const size_t b = blockIdx.z, kh = blockIdx.y;
    const unsigned row0 = (gridDim.x - 1 - blockIdx.x) * M;
    T* q = reinterpret_cast<T*>(dynamic_shared());              // (M, D)
    T *dout = q + M * D, *k = dout + M * D, *v = k + 2 * N * D; // (M, D), (2, N, D) twice

    load_rows<D, M>(q, x.q, HS, [&](int r) { return x.query_row(b, kh, row0 + r); });
    load_rows<D, M>(dout, x.q, HS, [&](int r) { return x.gradient_row(b, kh, row0 + r); });
    cp_async_commit();
    auto load_keys = [&](int stage, int tile) {
        auto from = [&](const T* p, int j) {
            size_t key = size_t(tile) * N + j;
            return key < x.d.Tk ? p + x.key(b, kh, key) : nullptr;
        };
        load_rows<D, N>(k + stage * N * D, x.k, HS, [&](int j) { return from(x.k, j); });
        load_rows<D, N>(v + stage * N * D, x.v, HS, [&](int j) { return from(x.v, j); });
    };
    const int tiles = int(ceil_div(x.d.Tk, size_t(N)));
    const Span positions = x.rows_span(x.q_positions, b, row0, M),
               docs = x.rows_span(x.doc_start, b, row0, M);
    auto look = [&](int tile) {
        Sees s = what_is_seen(positions, docs, x.key_spans[b * tiles + tile], x.d.window);
        return s == ALL && size_t(tile + 1) * N > x.d.Tk ? SOME : s;
    };
    TileWalk walk = {tiles};
    bool all = false, next_all = false;
    int tile = walk.next(all, look);
    if (tile >= 0) load_keys(0, tile);
    cp_async_commit();

    float row_lse[2], row_sum[2], sum[1][CT][4] = {};
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const float* statistics = x.statistics(b, kh, row0 + my_row + 8 * i + lane / 4);
        row_lse[i] = statistics[0], row_sum[i] = statistics[1];
    }
    const float scale = x.scale * LOG2E;

    for (int stage = 0; tile >= 0; stage ^= 1, all = next_all) {
        int next = walk.next(next_all, look);
        if (next >= 0) load_keys(stage ^ 1, next);
        cp_async_commit();
        cp_async_wait<1>(); // all but the next tile
        __syncthreads();    // of every thread

        float s[1][NT][4], dp[1][NT][4];
        rows_times_rows<D, 1, NT>(s, q, my_row, k + stage * N * D);
        rows_times_rows<D, 1, NT>(dp, dout, my_row, v + stage * N * D);
        float factor = scale;
        if (!all || x.slopes) {
            mask_scores(s[0], x, b, kh, row0 + my_row, size_t(tile) * N, scale);
            factor = 1;
        }
        #pragma unroll
        for (int n = 0; n < NT; n++)
            #pragma unroll
            for (int i = 0; i < 4; i++)
                s[0][n][i] =
                    ex2(s[0][n][i] * factor - row_lse[i / 2]) * (dp[0][n][i] - row_sum[i / 2]);
        uint32_t ds[1][NT / 2][4];
        pack_scores<T>(ds[0], s[0]);
        scores_times_rows<D, 1, NT>(sum, ds, k + stage * N * D, 0);
        __syncthreads(); // this stage is read
        tile = next;
    }
    cp_async_wait<0>();

    #pragma unroll
    for (int i = 0; i < 2; i++) {
        unsigned row = row0 + my_row + 8 * i + lane / 4;
        if (row >= x.rows) continue;
        T* to = dq + (b * x.d.Tq + x.query_of(row)) * x.d.q_stride + x.head_of(row, kh) * x.d.HS;
        store_row(to, sum[0], i, x.scale, HS);
    }
}

// ----------------------------------------------------------------------------
// backward: dK and dV of a block's keys

// Tiles: D channels, of which a warp owns D / SPLIT (its registers hold no more), M rows.
template <typename T, int D, int M, int SPLIT>
__global__ void __launch_bounds__(MMA_THREADS)
    attention_mma_backward_kv_kernel(T* dk, T* dv, const RowOperands<T> x) {
    constexpr int N = MMA_WARPS / SPLIT * 16, MT = M / 8, CT = D / SPLIT / 8;
    const int HS = int(x.d.HS), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int my_key = warp / SPLIT * 16, my_chunk = warp % SPLIT * CT;
    const size_t b = blockIdx.z, kh = blockIdx.y, key0 = size_t(blockIdx.x) * N;
    T* k = reinterpret_cast<T*>(dynamic_shared());           // (N, D)
    T *v = k + N * D, *q = v + N * D, *dout = q + 2 * M * D; // (N, D), (2, M, D) twice

    auto key_row = [&](const T* p, int j) {
        return key0 + j < x.d.Tk ? p + x.key(b, kh, key0 + j) : nullptr;
    };
    load_rows<D, N>(k, x.k, HS, [&](int j) { return key_row(x.k, j); });
    load_rows<D, N>(v, x.v, HS, [&](int j) { return key_row(x.v, j); });
    cp_async_commit();
    auto load_queries = [&](int stage, int tile) {
        load_rows<D, M>(q + stage * M * D, x.q, HS,
                        [&](int r) { return x.query_row(b, kh, unsigned(tile * M + r)); });
        load_rows<D, M>(dout + stage * M * D, x.q, HS,
                        [&](int r) { return x.gradient_row(b, kh, unsigned(tile * M + r)); });
    };
    const int tiles = int(ceil_div(x.rows, size_t(M)));
    const size_t key_end = key0 + N < x.d.Tk ? key0 + N : x.d.Tk;
    const Span keys = span_of(x.k_positions + b * x.d.Tk, key0, key_end);
    auto look = [&](int tile) {
        Sees s = what_is_seen(x.query_spans[b * tiles + tile], x.doc_spans[b * tiles + tile], keys,
                              x.d.window);
        return s == ALL && (unsigned(tile + 1) * M > x.rows || key0 + N > x.d.Tk) ? SOME : s;
    };
    TileWalk walk = {tiles};
    bool all = false, next_all = false;
    int tile = walk.next(all, look);
    if (tile >= 0) load_queries(0, tile);
    cp_async_commit();

    const KeySight sight = key_sight(x, b, key0 + my_key + lane / 4);
    float sum_k[1][CT][4] = {}, sum_v[1][CT][4] = {};
    const float scale = x.scale * LOG2E;

    for (int stage = 0; tile >= 0; stage ^= 1, all = next_all) {
        int next = walk.next(next_all, look);
        if (next >= 0) load_queries(stage ^ 1, next);
        cp_async_commit();
        cp_async_wait<1>(); // all but the next tile
        __syncthreads();    // of every thread

        // P^T and dS^T: keys are rows, (query, head) pairs columns
        float s[1][MT][4], dp[1][MT][4];
        rows_times_rows<D, 1, MT>(s, k, my_key, q + stage * M * D);
        rows_times_rows<D, 1, MT>(dp, v, my_key, dout + stage * M * D);
        float factor = scale;
        if (!all || x.slopes) {
            mask_columns(s[0], x, b, kh, unsigned(tile * M), sight, scale);
            factor = 1;
        }
        #pragma unroll
        for (int n = 0; n < MT; n++) {
            // of two rows: lse and D of the first, of the second
            Pack<float, 4> statistics =
                load<4>(x.statistics(b, kh, unsigned(tile * M + 8 * n + 2 * (lane % 4))));
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                float p = ex2(s[0][n][i] * factor - statistics.v[i % 2 * 2]);
                s[0][n][i] = p;
                dp[0][n][i] = p * (dp[0][n][i] - statistics.v[i % 2 * 2 + 1]);
            }
        }
        uint32_t operand[1][MT / 2][4];
        pack_scores<T>(operand[0], s[0]);
        scores_times_rows<D, 1, MT>(sum_v, operand, dout + stage * M * D, my_chunk);
        pack_scores<T>(operand[0], dp[0]);
        scores_times_rows<D, 1, MT>(sum_k, operand, q + stage * M * D, my_chunk);
        __syncthreads(); // this stage is read
        tile = next;
    }
    cp_async_wait<0>();

    #pragma unroll
    for (int i = 0; i < 2; i++) {
        size_t key = key0 + my_key + 8 * i + lane / 4;
        if (key >= x.d.Tk) continue;
        const size_t to = x.key(b, kh, key) + 8 * my_chunk;
        store_row(dk + to, sum_k[0], i, x.scale, HS - 8 * my_chunk);
        store_row(dv + to, sum_v[0], i, 1, HS - 8 * my_chunk);
    }
}

// ----------------------------------------------------------------------------
// launchers

// Whether these kernels can run it: 16-byte rows.
template <typename T, typename... Ps> bool mma_takes(const AttentionDims& d, const Ps*... ps) {
    return sizeof(T) == 2 && d.HS % 8 == 0 && d.HS <= 256 && d.q_stride % 8 == 0 &&
           d.kv_stride % 8 == 0 && ((uintptr_t(ps) % 16 == 0) && ...);
}

// f(D, MT, N): channels; 16 rows a warp, times MT; keys a tile of the forward pass
template <typename F> void pick_mma_kernel(size_t HS, F f) {
    HS <= 32    ? f(Int<32>(), Int<2>(), Int<64>())
    : HS <= 64  ? f(Int<64>(), Int<2>(), Int<64>())
    : HS <= 96  ? f(Int<96>(), Int<2>(), Int<32>())
    : HS <= 128 ? f(Int<128>(), Int<2>(), Int<32>())
                : f(Int<256>(), Int<1>(), Int<32>());
}
constexpr int MMA_KEYS = 32; // the smallest tile of keys, and the tile of the backward pass
constexpr int MMA_ROWS = 32; // a tile of (query, head) rows where a block owns keys

// the scratch: statistics of the rows, then the spans of the keys, of the queries, of their documents
struct MmaScratch {
    float* statistics;
    Span *keys, *queries, *docs;
};
inline unsigned padded_rows(const AttentionDims& d) {
    return unsigned(round_up(d.Tq * (d.NH / d.NKV), MMA_WARPS * 16));
}
inline size_t mma_scratch(MmaScratch* s, void* scratch, const AttentionDims& d) {
    size_t key_tiles = d.B * ceil_div(d.Tk, size_t(MMA_KEYS)),
           row_tiles = d.B * (padded_rows(d) / MMA_ROWS);
    size_t statistics = round_up(d.B * d.NKV * padded_rows(d) * 2 * sizeof(float), 256);
    if (s) {
        s->statistics = static_cast<float*>(scratch);
        s->keys = reinterpret_cast<Span*>(static_cast<unsigned char*>(scratch) + statistics);
        s->queries = s->keys + key_tiles, s->docs = s->queries + row_tiles;
    }
    return statistics + (key_tiles + 2 * row_tiles) * sizeof(Span);
}

inline void attention_spans(Span* spans, const int* x, size_t B, size_t n, unsigned size,
                            unsigned group, cudaStream_t stream) {
    unsigned tiles = unsigned(ceil_div(n * group, size_t(size)));
    launch(attention_spans_kernel<0>, dim3(unsigned(ceil_div(tiles, MMA_WARPS)), unsigned(B)),
           MMA_THREADS, 0, stream, spans, x, n, size, group, tiles);
}

template <typename T>
RowOperands<T> row_operands(const AttentionOperands<T>& x, const MmaScratch& s) {
    unsigned group = unsigned(x.d.NH / x.d.NKV);
    return {x,
            s.keys,
            s.queries,
            s.docs,
            s.statistics,
            group,
            unsigned(x.d.Tq) * group,
            padded_rows(x.d)};
}

template <typename T>
void attention_mma_forward(T* out, float* lse, const AttentionOperands<T>& operands, void* scratch,
                           cudaStream_t stream) {
    const AttentionDims& d = operands.d;
    MmaScratch s;
    mma_scratch(&s, scratch, d);
    RowOperands<T> x = row_operands(operands, s);
    pick_mma_kernel(d.HS, [&](auto D, auto MT, auto N) {
        constexpr int M = MMA_WARPS * MT * 16;
        attention_spans(s.keys, x.k_positions, d.B, d.Tk, N, 1, stream);
        dim3 grid(unsigned(ceil_div(x.rows, size_t(M))), unsigned(d.NKV), unsigned(d.B));
        launch(attention_mma_forward_kernel<T, D, MT, N>, grid, MMA_THREADS,
               (M + 4 * N) * D * sizeof(T), stream, out, lse, x);
    });
}

template <typename T>
void attention_mma_backward(T* dq, T* dk, T* dv, const AttentionOperands<T>& operands, const T* out,
                            const float* lse, void* scratch, cudaStream_t stream) {
    const AttentionDims& d = operands.d;
    MmaScratch s;
    mma_scratch(&s, scratch, d);
    RowOperands<T> x = row_operands(operands, s);
    attention_spans(s.keys, x.k_positions, d.B, d.Tk, MMA_KEYS, 1, stream);
    attention_spans(s.queries, x.q_positions, d.B, d.Tq, MMA_ROWS, x.group, stream);
    attention_spans(s.docs, x.doc_start, d.B, d.Tq, MMA_ROWS, x.group, stream);
    launch(attention_statistics_kernel<T>,
           dim3(x.padded / MMA_WARPS, unsigned(d.NKV), unsigned(d.B)), MMA_THREADS, 0, stream,
           s.statistics, out, lse, x);
    pick_mma_kernel(d.HS, [&](auto D, auto, auto) {
        constexpr int M = MMA_WARPS * 16, SPLIT = D > 128 ? 2 : 1, N = MMA_WARPS / SPLIT * 16;
        launch(attention_mma_backward_q_kernel<T, D, MMA_KEYS>,
               dim3(unsigned(ceil_div(x.rows, size_t(M))), unsigned(d.NKV), unsigned(d.B)),
               MMA_THREADS, (2 * M + 4 * MMA_KEYS) * D * sizeof(T), stream, dq, x);
        launch(attention_mma_backward_kv_kernel<T, D, MMA_ROWS, SPLIT>,
               dim3(unsigned(ceil_div(d.Tk, size_t(N))), unsigned(d.NKV), unsigned(d.B)),
               MMA_THREADS, (2 * N + 4 * MMA_ROWS) * D * sizeof(T), stream, dk, dv, x);
    });
}
#endif
