// attention_rows.cuh - what the tensor-core kernels of attention share: rows, spans, masks, softmax
//   A row is a (query, head) pair of one key head: row r is query r / group, head r % group. The
//   heads of a group are adjacent, so a block reads the keys of its group once.
//   A KeyRange is the range of positions that a row sees, by document, causality and window. It is
//   computed once a pass, for 8 bytes a row and a launch. A Span is the least and largest position
//   in a tile: spans decide whether a tile of keys is skipped, read without a mask, or masked.
//   A product's result stays in registers in the layout of mma: a thread has two rows, 8 apart, and
//   of each row the columns 8 n + 2 (lane % 4) and the next. Four adjacent lanes share a row.
//   Scores are exponents of 2 ("in units of log 2"): p = exp2(s - lse).
//   To copy: this file, attention_types.h, tensor_cores.h, types.h and cuda_common.h.
#pragma once
#include <algorithm>
#include "attention_types.h"
#include "cuda_common.h"
#include "tensor_cores.h"
#include "types.h"

namespace llmc {

#if LLMC_KERNELS

constexpr int MMA_WARPS = 4, MMA_THREADS = MMA_WARPS * 32;
constexpr float LOG2E = 1.44269504f, LN2 = 0.693147181f;

// ----------------------------------------------------------------------------
// ranges and spans of positions

// The keys that a row sees, by their positions. It is empty if last < first.
struct KeyRange {
    int first, last;
};

// Whether a row sees the key at this position.
__device__ inline bool sees(KeyRange row, int key) { return key >= row.first && key <= row.last; }

// The position of padding at the end of a tile. No row sees it, and distances do not overflow.
constexpr int NO_KEY = INT_MAX / 2;

// The range of query i. Positions of keys are not negative, so a window that reaches beyond the
// first key begins at 0, and an infinite window does not overflow.
template <typename T>
__device__ KeyRange range_of(const AttentionOperands<T>& x, size_t b, size_t i) {
    const int last = x.q_positions[b * x.d.Tq + i];
    const int start = x.doc_start[b * x.d.Tq + i];
    const int left = last < x.d.window ? 0 : last - x.d.window + 1;
    return {left > start ? left : start, last};
}

// The least and the largest of some positions.
struct Span {
    int low, high;
};
constexpr Span NO_SPAN = {INT_MAX, INT_MIN};

// The span of both.
__device__ inline Span join(Span a, Span b) {
    return {b.low < a.low ? b.low : a.low, b.high > a.high ? b.high : a.high};
}

// Join the spans of all lanes. Every lane gets the result.
__device__ inline Span join_lanes(Span s) {
    // Exchange over 16, 8, 4, 2, 1 lanes.
    for (int mask = 16; mask > 0; mask /= 2)
        s = join(s, {__shfl_xor_sync(ALL_LANES, s.low, mask),
                     __shfl_xor_sync(ALL_LANES, s.high, mask)});
    return s;
}

// The spans of a tile of rows: of the first keys that the rows see, and of the last.
struct RowSpans {
    Span first, last;
};

// How much of a tile of keys is visible to a tile of rows.
enum Visibility { NOTHING, SOME, ALL };
__device__ inline Visibility visibility(RowSpans rows, Span keys) {
    // Compare the extremes, which decide for all pairs: is no key seen? Then, are all?
    if (keys.low > rows.last.high || keys.high < rows.first.low)
        return NOTHING;
    return keys.high <= rows.last.low && keys.low >= rows.first.high ? ALL : SOME;
}

// Walks the visible tiles in order, looking at 32 of them at once. A warp's lanes walk together.
struct TileWalk {
    int tiles, base = -32;
    unsigned seen = 0, whole = 0; // one bit for each of the 32 tiles from base on
    // Return the next visible tile, or -1. look(tile) returns its Visibility; `all` is set if the
    // whole tile is visible.
    template <typename F>
    __device__ int next(bool& all, F look) {
        // Each lane looks at one of the next 32 tiles, and two ballots collect the answers.
        while (!seen) {
            base += 32;
            if (base >= tiles) return -1;
            int tile = base + int(threadIdx.x % 32);
            Visibility v = tile < tiles ? look(tile) : NOTHING;
            seen = __ballot_sync(ALL_LANES, v != NOTHING);
            whole = __ballot_sync(ALL_LANES, v == ALL);
        }
        // Take the lowest remaining tile.
        int bit = __ffs(int(seen)) - 1;
        seen &= seen - 1;
        all = whole >> bit & 1;
        return base + bit;
    }
};

// ----------------------------------------------------------------------------
// operands by rows

// The operands as rows in tiles. Tile t has rows t * tile_rows and on, in tile_size slots. Further
// slots, and those beyond the last row, are idle.
template <typename T>
struct RowOperands : AttentionOperands<T> {
    unsigned group;                      // heads that share a key head
    unsigned rows;                       // Tq * group
    unsigned tile_size, tile_rows, tiles;
    unsigned tile_keys, key_tiles;       // keys in a tile, and the number of such tiles
    KeyRange* ranges;                    // (B,tiles,tile_size), empty for an idle row
    RowSpans* row_spans;                 // (B,tiles)
    Span* key_spans;                     // (B,key_tiles)
    float *row_lse, *row_sums;           // (B,NKV,tiles,tile_size) lse in units of log 2; D
    int* turns;                          // (B,NKV,tiles), or null: counters that start at 0
    float cap_factor;                    // with a soft cap: of products, before their tanh
    float factor;                        // of products, or of their tanh: exponents of 2

    __device__ size_t query_of(unsigned row) const { return row / group; }
    __device__ size_t head_of(unsigned row, size_t kh) const { return kh * group + row % group; }
    // The index of a tile, among those of a sequence's queries, or of a key head's rows.
    __device__ size_t tile_at(size_t b, unsigned tile) const { return b * tiles + tile; }
    __device__ size_t tile_at(size_t b, size_t kh, unsigned tile) const {
        return (b * this->d.NKV + kh) * tiles + tile;
    }
    __device__ const KeyRange* tile_ranges(size_t b, unsigned tile) const {
        return ranges + tile_at(b, tile) * tile_size;
    }
    // The position of a key, or NO_KEY beyond the last one.
    __device__ int position_of(size_t b, size_t key) const {
        return key < this->d.Tk ? this->k_positions[b * this->d.Tk + key] : NO_KEY;
    }
};

// The visibility of each tile of N keys to some rows. A last tile that is not full needs a mask.
template <typename T, int N> struct KeyTiles {
    const RowOperands<T>& x;
    size_t b;
    RowSpans rows;
    __device__ Visibility operator()(int tile) const {
        Visibility v = visibility(rows, x.key_spans[b * x.key_tiles + tile]);
        return v == ALL && size_t(tile + 1) * N > x.d.Tk ? SOME : v;
    }
};

// ----------------------------------------------------------------------------
// what a pass computes about its tiles before it starts

// Write the ranges of a tile's rows, and their spans. One warp does it.
template <typename T>
__device__ void describe_rows(const RowOperands<T>& x, size_t b, unsigned tile) {
    const unsigned lane = threadIdx.x % 32;
    RowSpans all = {NO_SPAN, NO_SPAN};

    // Write the ranges, one row a lane.
    for (unsigned slot = lane; slot < x.tile_size; slot += 32) {
        const unsigned row = tile * x.tile_rows + slot;
        KeyRange range = {0, -1};
        if (slot < x.tile_rows && row < x.rows) {
            range = range_of(x, b, x.query_of(row));
            all = {join(all.first, {range.first, range.first}),
                   join(all.last, {range.last, range.last})};
        }
        x.ranges[x.tile_at(b, tile) * x.tile_size + slot] = range;
    }

    // Join the lanes' spans.
    all = {join_lanes(all.first), join_lanes(all.last)};
    if (lane == 0)
        x.row_spans[x.tile_at(b, tile)] = all;
}

// Write the span of a tile of keys. One warp does it.
template <typename T>
__device__ void describe_keys(const RowOperands<T>& x, size_t b, unsigned tile) {
    const unsigned lane = threadIdx.x % 32;
    Span all = NO_SPAN;
    const size_t key0 = size_t(tile) * x.tile_keys;
    const size_t end = key0 + x.tile_keys;
    for (size_t key = key0 + lane; key < end && key < x.d.Tk; key += 32)
        all = join(all, {x.position_of(b, key), x.position_of(b, key)});
    all = join_lanes(all);
    if (lane == 0)
        x.key_spans[b * x.key_tiles + tile] = all;
}

// Whether spans rise from tile to tile of keys, as where positions rise: then the tiles of keys
// that a tile of rows sees are an interval. Each of some threads answers for its share of tiles.
template <typename T>
__device__ bool keys_rise(const RowOperands<T>& x, size_t b, unsigned thread, unsigned threads) {
    const Span* keys = x.key_spans + b * x.key_tiles;
    bool rise = true;
    for (unsigned i = thread + 1; i < x.key_tiles; i += threads)
        rise &= keys[i].low >= keys[i - 1].low && keys[i].high >= keys[i - 1].high;
    return rise;
}

// Describe a tile, if it exists: warp 0 describes the tile of rows, warp 1 the tile of keys.
template <typename T>
__device__ void describe_tile(const RowOperands<T>& x, size_t b, unsigned tile) {
    const unsigned warp = threadIdx.x / 32;
    if (warp == 0 && tile < x.tiles)
        describe_rows(x, b, tile);
    if (warp == 1 && tile < x.key_tiles)
        describe_keys(x, b, tile);
}

// Before forward: block x describes tile x of the rows and tile x of the keys.
template <typename T>
__global__ void attention_spans_kernel(const RowOperands<T> x) {
    describe_tile(x, blockIdx.y, blockIdx.x);
}

// Before backward: block x describes tile x of the rows and tile x of the keys, and computes each
// row's lse in units of log 2 and D = dout.out. Rows that see nothing and idle rows get an lse of
// infinity, so that their p is exp2(score - lse) = 0.
template <typename T>
__global__ void attention_statistics_kernel(const T* out, const float* lse,
                                            const RowOperands<T> x) {
    const unsigned tile = blockIdx.x;
    const unsigned lane = threadIdx.x % 8;
    const size_t b = blockIdx.z;
    const size_t kh = blockIdx.y;
    const size_t at = x.tile_at(b, kh, tile);
    // All key heads have the same positions, so one of them describes the tiles.
    if (kh == 0) describe_tile(x, b, tile);
    if (tile >= x.tiles) return;
    if (threadIdx.x == 0 && x.turns)
        x.turns[at] = 0;

    // Eight lanes share a row; each reads 16 bytes of its channels at a time.
    for (unsigned slot = threadIdx.x / 8; slot < x.tile_size; slot += MMA_THREADS / 8) {
        const unsigned row = tile * x.tile_rows + slot;
        float row_lse = INFINITY, sum = 0;
        if (slot < x.tile_rows && row < x.rows) {
            const size_t i = x.query_of(row);
            const size_t h = x.head_of(row, kh);
            for (size_t e = 8 * lane; e < x.d.HS; e += 64) {
                Pack<T, 8> o = load<8>(out + x.out_at(b, h, i) + e);
                Pack<T, 8> d = load<8>(x.gradient(b, h, i) + e);
                for (int j = 0; j < 8; j++)
                    sum += to_float(o.v[j]) * to_float(d.v[j]);
            }

            // Bring lse to units of log 2.
            const float natural = lse[x.lse_at(b, h, i)];
            if (natural != -INFINITY)
                row_lse = natural * LOG2E;
        }

        // Add up the row's eight lanes; the first one writes.
        for (int mask = 1; mask < 8; mask *= 2)
            sum += __shfl_xor_sync(ALL_LANES, sum, mask);
        if (lane == 0) {
            x.row_lse[at * x.tile_size + slot] = row_lse;
            x.row_sums[at * x.tile_size + slot] = sum;
        }
    }
}

// ----------------------------------------------------------------------------
// launchers of both, and their scratch

// Hands out pieces of the scratch. Without memory it only counts their bytes.
struct Pieces {
    unsigned char* memory;
    size_t used = 0;
    template <typename P> void take(P*& p, size_t n) {
        p = memory ? reinterpret_cast<P*>(memory + used) : nullptr;
        used += round_up(n * sizeof(P), 256);
    }
};

// Set up operands in tiles: tile_size slots for tile_rows rows, and tile_keys keys. A block takes
// block_tiles tiles of rows, so the last tiles may have no row.
template <typename T>
void take_rows(RowOperands<T>& x, Pieces& pieces, const AttentionOperands<T>& operands,
               unsigned tile_size, unsigned tile_rows, unsigned block_tiles, unsigned tile_keys,
               bool backward) {
    static_cast<AttentionOperands<T>&>(x) = completed(operands);
    const AttentionDims& d = x.d;
    x.cap_factor = x.scale / x.softcap;
    x.factor = (x.softcap == 0 ? x.scale : x.softcap) * LOG2E;
    x.group = unsigned(d.NH / d.NKV);
    x.rows = unsigned(d.Tq) * x.group;

    // Cut rows and keys into tiles.
    x.tile_size = tile_size;
    x.tile_rows = tile_rows;
    x.tiles = unsigned(ceil_div(x.rows, tile_rows * block_tiles)) * block_tiles;
    x.tile_keys = tile_keys;
    x.key_tiles = unsigned(ceil_div(d.Tk, tile_keys));

    // Take the scratch of the tiles.
    pieces.take(x.ranges, d.B * x.tiles * tile_size);
    pieces.take(x.row_spans, d.B * x.tiles);
    pieces.take(x.key_spans, d.B * x.key_tiles);
    if (!backward) return;
    pieces.take(x.row_lse, d.B * d.NKV * x.tiles * tile_size);
    pieces.take(x.row_sums, d.B * d.NKV * x.tiles * tile_size);
}

// Compute what forward needs of its tiles: ranges and spans.
template <typename T>
void attention_spans(const RowOperands<T>& x, cudaStream_t stream) {
    dim3 grid(std::max(x.tiles, x.key_tiles), unsigned(x.d.B));
    launch(attention_spans_kernel<T>, grid, MMA_THREADS / 2, stream, x);
}

// Compute what backward needs of its tiles: ranges, spans, lse and D.
template <typename T>
void attention_statistics(const T* out, const float* lse, const RowOperands<T>& x,
                          cudaStream_t stream) {
    dim3 grid(std::max(x.tiles, x.key_tiles), unsigned(x.d.NKV), unsigned(x.d.B));
    launch(attention_statistics_kernel<T>, grid, MMA_THREADS, stream, out, lse, x);
}

// ----------------------------------------------------------------------------
// masks of a product's result: -inf where the row does not see the key

// The score of product y with ALiBi, in units of log 2. The slope is in these units too.
__device__ inline float sloped(float y, float scale, float slope, KeyRange row, int key) {
    return y * scale - slope * float(row.last - key);
}

// Replace products by the tanh of a soft cap, in place.
template <int NT>
__device__ void cap_scores(float (&s)[NT][4], float cap_factor) {
    #pragma unroll
    for (int n = 0; n < NT; n++)
        #pragma unroll
        for (int i = 0; i < 4; i++)
            s[n][i] = tanh_approx(s[n][i] * cap_factor);
}

// Multiply p by the cap's derivative at tanh t. A masked t is -inf, and its p and the result are 0.
template <bool CAPPED>
__device__ float through_cap(float p, float t) {
    t = fmaxf(t, -1);
    return CAPPED ? p * (1 - t * t) : p;
}

// Mask s (16, 8 NT) in place. A thread has the ranges of its two rows, 8 apart. positions (8 NT)
// are the keys'.
template <int NT>
__device__ void mask_scores(float (&s)[NT][4], const KeyRange (&rows)[2], const int* positions) {
    #pragma unroll
    for (int n = 0; n < NT; n++) {
        Pack<int, 2> keys = load<2>(positions + 8 * n + 2 * (threadIdx.x % 4));
        #pragma unroll
        for (int e = 0; e < 4; e++)
            s[n][e] = sees(rows[e / 2], keys.v[e % 2]) ? s[n][e] : -INFINITY;
    }
}

// Add ALiBi in place, with the slopes of the thread's two rows.
template <int NT>
__device__ void slope_scores(float (&s)[NT][4], const KeyRange (&rows)[2], const float (&slopes)[2],
                             const int* positions, float scale) {
    #pragma unroll
    for (int n = 0; n < NT; n++) {
        Pack<int, 2> keys = load<2>(positions + 8 * n + 2 * (threadIdx.x % 4));
        #pragma unroll
        for (int e = 0; e < 4; e++)
            s[n][e] = sloped(s[n][e], scale, slopes[e / 2], rows[e / 2], keys.v[e % 2]);
    }
}

// The same for transposed scores s (16, 8 MT), whose rows are keys and whose columns are
// (query, head) rows. A thread has the positions of its two keys, 8 apart. ranges (8 MT) belong
// to the columns.
template <int MT>
__device__ void mask_columns(float (&s)[MT][4], const int (&keys)[2], const KeyRange* ranges) {
    #pragma unroll
    for (int n = 0; n < MT; n++) {
        Pack<KeyRange, 2> rows = load<2>(ranges + 8 * n + 2 * (threadIdx.x % 4));
        #pragma unroll
        for (int e = 0; e < 4; e++)
            s[n][e] = sees(rows.v[e % 2], keys[e / 2]) ? s[n][e] : -INFINITY;
    }
}

// Add ALiBi in place, to transposed scores. Each column has its own head.
template <int MT, typename T>
__device__ void slope_columns(float (&s)[MT][4], const RowOperands<T>& x, size_t kh, unsigned row,
                              const int (&keys)[2], const KeyRange* ranges) {
    #pragma unroll
    for (int n = 0; n < MT; n++)
        #pragma unroll
        for (int e = 0; e < 2; e++) {
            // Each column belongs to a head of its own, so it has its own slope.
            const unsigned column = 8 * n + 2 * (threadIdx.x % 4) + e;
            const float slope = x.slope(x.head_of(row + column, kh)) * LOG2E;
            #pragma unroll
            for (int i = 0; i < 2; i++)
                s[n][2 * i + e] = sloped(s[n][2 * i + e], x.factor, slope, ranges[column], keys[i]);
        }
}

// ----------------------------------------------------------------------------
// rows of a product's result

__device__ inline float row_total(float x) { // the sum over the four lanes of a row
    for (int mask = 1; mask < 4; mask *= 2)
        x += __shfl_xor_sync(ALL_LANES, x, mask);
    return x;
}

// Update the running softmax: scores s, times `factor`, become p = exp2(s - row_max). The caller
// multiplies earlier sums by `rescale`. row_sum covers only this lane's columns.
template <int NT>
__device__ void online_softmax(float (&s)[NT][4], float (&row_max)[2], float (&row_sum)[2],
                               float (&rescale)[2], float factor) {
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        // Find the row's maximum: over this lane's columns, then over the other lanes'. fmaxf
        // ignores a NaN, but the exponentials below carry it on.
        float most = s[0][2 * i];
        #pragma unroll
        for (int n = 0; n < NT; n++)
            #pragma unroll
            for (int e = 0; e < 2; e++)
                most = fmaxf(most, s[n][2 * i + e]);
        for (int mask = 1; mask < 4; mask *= 2)
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, mask));
        most = fmaxf(most * factor, row_max[i]);

        // Rescale to the new maximum. A row that has seen nothing takes 0 as its base.
        float base = most == -INFINITY ? 0 : most;
        float total = 0;
        rescale[i] = ex2(row_max[i] - base);
        row_max[i] = most;

        // Take the exponentials and their sum.
        #pragma unroll
        for (int n = 0; n < NT; n++)
            #pragma unroll
            for (int e = 0; e < 2; e++) {
                float& y = s[n][2 * i + e];
                y = ex2(y * factor - base);
                total += y;
            }
        // The lanes' shares of the sum are added once, at the end, by row_total().
        row_sum[i] = row_sum[i] * rescale[i] + total;
    }
}

// Multiply each row by its factor. Elements 0 and 1 belong to the first row, 2 and 3 to the second.
template <int CT>
__device__ void scale_rows(float (&sum)[CT][4], const float (&factor)[2]) {
    #pragma unroll
    for (int c = 0; c < CT; c++)
        #pragma unroll
        for (int i = 0; i < 4; i++)
            sum[c][i] *= factor[i / 2];
}

// Pack a product's result, two numbers of a row in a register, as the next one's first operand.
template <typename T, int NT>
__device__ void pack_scores(uint32_t (&p)[NT / 2][4], const float (&s)[NT][4]) {
    #pragma unroll
    for (int k = 0; k < NT / 2; k++)
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            // Parts 2 k and 2 k + 1 form 16 columns, in registers 0, 1 and 2, 3.
            const float* x = s[2 * k + i / 2];
            p[k][i] = pack<T>(x[i % 2 * 2], x[i % 2 * 2 + 1]);
        }
}

// Where results go: to memory of T, or of float, by = or +=.
template <typename T> struct Results {
    T* narrow = nullptr;
    float* wide = nullptr;
    bool accumulate;
    LLMC_HD Results(T* to, bool add = false) : narrow(to), accumulate(add) {}
    LLMC_HD Results(float* to, bool add) : wide(to), accumulate(add) {}

    // Put N neighbouring numbers, two at least.
    template <int N> __device__ void put(size_t at, Pack<float, N> x) const {
        for (int i = 0; accumulate && i < N; i++)
            x.v[i] += wide ? wide[at + i] : to_float(narrow[at + i]);
        if (wide) return store(wide + at, x);
        Pack<uint32_t, N / 2> packed;
        for (int i = 0; i < N / 2; i++)
            packed.v[i] = pack<T>(x.v[2 * i], x.v[2 * i + 1]);
        store(reinterpret_cast<uint32_t*>(narrow + at), packed);
    }
};

// Write the first HS channels of row i, the thread's first or second row, from index `to` on.
template <typename T, int CT>
__device__ void store_row(const Results<T>& results, size_t to, const float (&sum)[CT][4], int i,
                          float factor, int HS) {
    #pragma unroll
    for (int c = 0; c < CT; c++) {
        // HS may be less than what the kernel computes. Channels beyond it are not the caller's.
        int e = 8 * c + 2 * (threadIdx.x % 4);
        if (e < HS)
            results.put(to + e, Pack<float, 2>{sum[c][2 * i] * factor, sum[c][2 * i + 1] * factor});
    }
}
#endif

} // namespace llmc
