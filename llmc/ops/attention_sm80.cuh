// attention_sm80.cuh - flash attention by mma.sync, for Ampere and later - arXiv:2307.08691
//   The operands, masks and results of attention_types.h, in bf16 and fp16, for head sizes of 8 to
//   256 in steps of 8. A size other than 32, 64, 96, 128 and 256 runs as the next larger one,
//   padded with zeros.
//   Rows are (query, head) pairs (attention_rows.cuh). A warp owns 16 or 32 of them. Keys come in
//   tiles, which cp.async loads one tile ahead.
//   forward      a block owns rows and walks the tiles of keys that they see
//   backward     dK, dV: a block owns keys and walks tiles of rows. It computes S^T = K Q^T, so
//                that P^T and dS^T are in the registers that the next products read.
//                dQ: a block owns rows and walks tiles of keys.
//                The two kernels compute 7 products instead of 5, but need no atomics.
//   Contract: out, lse = in T.  dq, dk, dv = or += in T or float.  v has the layout of k, and there
//             is no soft cap with ALiBi (attention_kernels()).  A cap's tanh errs by 2^-11.
//             A row that sees nothing: out 0, lse -inf, gradients 0.  Bitwise repeatable.
//   Cost: products on tensor cores; an exp2 for each (query, key) seen, in forward and in each
//         kernel of backward. Scratch: the spans of tiles, and four numbers a row.
//   To copy: this file, attention_rows.cuh, attention_types.h, mma.cuh, tensor_cores.h,
//            types.h and cuda_common.h.
#pragma once
#include "attention_rows.cuh"
#include "attention_types.h"
#include "cuda_common.h"
#include "mma.cuh"
#include "tensor_cores.h"
#include "types.h"

namespace llmc {

#if LLMC_KERNELS

// Keys in a tile of the backward pass where a block owns rows. Above 128 channels there is room for
// 16 only: a block of sm_86, 89 or 120 has 99 KB of shared memory.
LLMC_HD constexpr int mma_backward_keys(size_t HS) { return HS > 128 ? 16 : 32; }
constexpr int MMA_ROWS = 32; // (query, head) rows in a tile where a block owns keys

// ----------------------------------------------------------------------------
// tiles in shared memory, as mma.cuh swizzles them

// Copy ROWS rows by cp.async. row(r) is the start of row r in global memory; null gives zeros.
template <int D, int ROWS, typename T, typename F>
__device__ void load_rows(T* tile, const T* somewhere, int HS, F row) {
    for (int k = threadIdx.x; k < ROWS * (D / 8); k += MMA_THREADS) {
        // Neighbouring threads copy neighbouring chunks of a row.
        int r = k / (D / 8);
        int chunk = k % (D / 8);
        const T* from = row(r);
        // For absent rows and channels beyond HS, read 0 bytes from a valid address: cp.async
        // then writes zeros.
        bool real = from && chunk * 8 < HS;
        cp_async16(tile + tile_at<D>(r, chunk), real ? from + chunk * 8 : somewhere, real ? 16 : 0);
    }
}

// A row of q, or of dout. Null beyond the last row, where load_rows() writes zeros.
template <typename T>
__device__ const T* query_row(const RowOperands<T>& x, size_t b, size_t kh, unsigned row) {
    if (row >= x.rows) return nullptr;
    return x.query(b, x.head_of(row, kh), x.query_of(row));
}
template <typename T>
__device__ const T* gradient_row(const RowOperands<T>& x, size_t b, size_t kh, unsigned row) {
    if (row >= x.rows) return nullptr;
    return x.gradient(b, x.head_of(row, kh), x.query_of(row));
}

// s[m] (16, 8 NT) = rows [row + 16 m, ..) of a times the 8 NT rows of b, over D channels.
template <int D, int MT, int NT, typename T>
__device__ void rows_times_rows(float (&s)[MT][NT][4], const T* a, int row, const T* b) {
    // Begin with zeros: products add.
    #pragma unroll
    for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int n = 0; n < NT; n++)
            #pragma unroll
            for (int i = 0; i < 4; i++)
                s[m][n][i] = 0;

    // Sum over the channels, 16 at a time. One load of b serves all rows of a.
    #pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t fa[MT][4], fb[4];
        #pragma unroll
        for (int m = 0; m < MT; m++)
            load_a<D>(fa[m], a, row + 16 * m, k);
        #pragma unroll
        for (int n = 0; n < NT; n += 2) {
            load_b<D>(fb, b, 8 * n, k);
            #pragma unroll
            for (int m = 0; m < MT; m++)
                mma_pair<T>(s[m][n], s[m][n + 1], fa[m], fb);
        }
    }
}

// sum[m] (16, 8 CT) += p[m] (16, 8 NT) times the 8 NT rows of b, their channels from 8 c on.
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
            for (int m = 0; m < MT; m++)
                mma_pair<T>(sum[m][j], sum[m][j + 1], p[m][k], fb);
        }
}

// ----------------------------------------------------------------------------
// tiles of keys, forward and for dQ

// Start the copies of one tile: N keys and values from key `tile * N` on. Where a mask or ALiBi
// needs them, load the keys' positions (N) too.
template <int D, int N, typename T>
__device__ void load_keys(T* k, T* v, int* positions, const RowOperands<T>& x, size_t b, size_t kh,
                          int tile, bool all) {
    auto from = [&](const T* p, int j) {
        size_t key = size_t(tile) * N + j;
        return key < x.d.Tk ? p + x.key_at(b, kh, key) : nullptr;
    };
    load_rows<D, N>(k, x.k, int(x.d.HS), [&](int j) { return from(x.k, j); });
    load_rows<D, N>(v, x.v, int(x.d.HS), [&](int j) { return from(x.v, j); });
    if ((!all || x.slopes) && threadIdx.x < N)
        positions[threadIdx.x] = x.position_of(b, size_t(tile) * N + threadIdx.x);
}

// Apply ALiBi and the mask to rows `row` and `row` + 8. Returns the factor that turns the scores
// into exponents of 2. To save registers, read the rows' ranges again for each masked tile.
template <int NT, typename T>
__device__ float mask_tile(float (&s)[NT][4], const RowOperands<T>& x, size_t b, size_t kh,
                           unsigned row, const int* positions) {
    // Here no slot of a tile is idle, so a row's number is its index.
    const KeyRange* ranges = x.tile_ranges(b, 0);
    const KeyRange rows[2] = {ranges[row], ranges[row + 8]};
    if (x.slopes) {
        const float slopes[2] = {x.slope(x.head_of(row, kh)) * LOG2E,
                                 x.slope(x.head_of(row + 8, kh)) * LOG2E};
        slope_scores(s, rows, slopes, positions, x.factor);
    }
    mask_scores(s, rows, positions);
    return x.slopes ? 1 : x.factor;
}

// ----------------------------------------------------------------------------
// forward

// Tiles: D channels, MT times 16 rows a warp, N keys.
template <typename T, int D, int MT, int N, bool CAPPED>
__global__ void __launch_bounds__(MMA_THREADS)
    attention_mma_forward_kernel(T* out, float* lse, const RowOperands<T> x) {
    // M rows a block, NT parts of 8 keys, CT parts of 8 channels.
    constexpr int M = MMA_WARPS * MT * 16;
    constexpr int NT = N / 8;
    constexpr int CT = D / 8;
    const int HS = int(x.d.HS);
    const int lane = threadIdx.x % 32;
    const size_t b = blockIdx.z;
    const size_t kh = blockIdx.y;
    const unsigned row0 = (gridDim.x - 1 - blockIdx.x) * M; // rows that see most go first
    const int my_row = int(threadIdx.x / 32) * MT * 16;
    T* q = reinterpret_cast<T*>(dynamic_shared()); // (M, D)
    T* k = q + M * D;                              // (2, N, D)
    T* v = k + 2 * N * D;                          // (2, N, D)
    LLMC_SHARED(int, positions, 2 * N);

    // Load the block's rows of q, and the first tile of keys.
    load_rows<D, M>(q, x.q, HS, [&](int r) { return query_row(x, b, kh, row0 + r); });
    cp_async_commit();

    // Find the first tile that some row sees; the others are never loaded. The rows' spans are read
    // again every 32 tiles: with 128 channels no registers are left to keep them.
    auto look = [&](int tile) {
        return KeyTiles<T, N>{x, b, x.row_spans[x.tile_at(b, row0 / M)]}(tile);
    };
    TileWalk walk = {int(x.key_tiles)};
    bool all = false, next_all = false;
    int tile = walk.next(all, look);
    if (tile >= 0)
        load_keys<D, N>(k, v, positions, x, b, kh, tile, all);
    cp_async_commit();

    // A thread keeps, for two rows of each 16, the maximum, its share of the sum, and 2 CT
    // numbers of out.
    float row_max[MT][2], row_sum[MT][2] = {};
    float sum[MT][CT][4] = {};
    #pragma unroll
    for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int i = 0; i < 2; i++)
            row_max[m][i] = -INFINITY;

    for (int stage = 0; tile >= 0; stage ^= 1, all = next_all) {
        // Start the next tile's copies, and wait for this tile's.
        int next = walk.next(next_all, look);
        const int to = stage ^ 1;
        if (next >= 0)
            load_keys<D, N>(k + to * N * D, v + to * N * D, positions + to * N, x, b, kh, next,
                            next_all);
        cp_async_commit();
        // For the last tile this group is empty. It counts all the same, so the wait is the same.
        cp_async_wait<1>(); // this thread's copies, all but the next tile's
        __syncthreads();    // and those of the other threads

        // Compute the scores, -inf where masked.
        float factor = x.factor;
        float s[MT][NT][4];
        rows_times_rows<D, MT, NT>(s, q, my_row, k + stage * N * D);
        #pragma unroll
        for (int m = 0; CAPPED && m < MT; m++)
            cap_scores(s[m], x.cap_factor);
        // A fully visible tile needs no mask.
        if (!all || x.slopes) {
            #pragma unroll
            for (int m = 0; m < MT; m++)
                factor = mask_tile(s[m], x, b, kh, row0 + my_row + 16 * m + lane / 4,
                                   positions + stage * N);
        }

        // Softmax: p replaces s, and the sums are rescaled to the new maximum.
        #pragma unroll
        for (int m = 0; m < MT; m++) {
            float rescale[2];
            online_softmax(s[m], row_max[m], row_sum[m], rescale, factor);
            scale_rows(sum[m], rescale);
        }

        // Add p v. p already has the layout of mma's first operand, so it stays in registers.
        uint32_t p[MT][NT / 2][4];
        #pragma unroll
        for (int m = 0; m < MT; m++)
            pack_scores<T>(p[m], s[m]);
        scores_times_rows<D, MT, NT>(sum, p, v + stage * N * D, 0);
        __syncthreads(); // this stage has been read: the tile after the next may overwrite it
        tile = next;
    }
    cp_async_wait<0>();

    // Divide by the sums of exponentials, and write out and lse.
    #pragma unroll
    for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            unsigned row = row0 + my_row + 16 * m + 8 * i + lane / 4;
            // Four lanes share a row. All of them must join in the sum before any may leave.
            float total = row_total(row_sum[m][i]);
            if (row >= x.rows) continue;
            bool seen = total != 0; // true for a NaN too
            const size_t h = x.head_of(row, kh);
            const size_t query = x.query_of(row);
            const size_t to = x.out_at(b, h, query);
            store_row(Results<T>(out), to, sum[m], i, seen ? 1 / total : 0, HS);
            if (lane % 4 == 0)
                lse[x.lse_at(b, h, query)] =
                    seen ? row_max[m][i] * LN2 + logf(total) : -INFINITY;
        }
}

// ----------------------------------------------------------------------------
// backward: dQ of a block's rows

// A block owns 64 rows and walks the tiles of N keys that they see.
template <typename T, int D, int N, bool CAPPED>
__global__ void __launch_bounds__(MMA_THREADS, D <= 64 ? 4 : 1) // blocks on an SM
    attention_mma_backward_q_kernel(const Results<T> dq, const RowOperands<T> x) {
    // A warp has 16 rows: S, dP and dQ must fit in its registers together.
    constexpr int M = MMA_WARPS * 16;
    constexpr int NT = N / 8;
    constexpr int CT = D / 8;
    const int HS = int(x.d.HS);
    const int lane = threadIdx.x % 32;
    const int my_row = int(threadIdx.x / 32) * 16;
    const size_t b = blockIdx.z;
    const size_t kh = blockIdx.y;
    // The last rows see most keys, so start them first.
    const unsigned row0 = (gridDim.x - 1 - blockIdx.x) * M;
    T* q = reinterpret_cast<T*>(dynamic_shared()); // (M, D)
    T* dout = q + M * D;                           // (M, D)
    T* k = dout + M * D;                           // (2, N, D)
    T* v = k + 2 * N * D;                          // (2, N, D)
    LLMC_SHARED(int, positions, 2 * N);

    // Load the block's rows of q and dout, and the first tile of keys.
    load_rows<D, M>(q, x.q, HS, [&](int r) { return query_row(x, b, kh, row0 + r); });
    // x.q serves as the valid address for absent rows; nothing is read from it.
    load_rows<D, M>(dout, x.q, HS, [&](int r) { return gradient_row(x, b, kh, row0 + r); });
    cp_async_commit();

    // Find the first tile of keys. The block's rows are two of the other kernel's tiles of rows.
    const RowSpans* spans = x.row_spans + x.tile_at(b, row0 / MMA_ROWS);
    const KeyTiles<T, N> look = {
        x, b, {join(spans[0].first, spans[1].first), join(spans[0].last, spans[1].last)}};
    TileWalk walk = {int(x.key_tiles)};
    bool all = false, next_all = false;
    int tile = walk.next(all, look);
    if (tile >= 0)
        load_keys<D, N>(k, v, positions, x, b, kh, tile, all);
    cp_async_commit();

    // Read lse and D of the thread's two rows. An idle row has lse = infinity, so its p is 0.
    float row_lse[2], row_sum[2];
    float sum[1][CT][4] = {};
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const size_t at = x.tile_at(b, kh, 0) * MMA_ROWS + row0 + my_row + 8 * i + lane / 4;
        row_lse[i] = x.row_lse[at];
        row_sum[i] = x.row_sums[at];
    }

    for (int stage = 0; tile >= 0; stage ^= 1, all = next_all) {
        // Start the next tile's copies, and wait for this tile's.
        int next = walk.next(next_all, look);
        const int to = stage ^ 1;
        if (next >= 0)
            load_keys<D, N>(k + to * N * D, v + to * N * D, positions + to * N, x, b, kh, next,
                            next_all);
        cp_async_commit();
        cp_async_wait<1>(); // this thread's copies, all but the next tile's
        __syncthreads();    // and those of the other threads

        // Compute S = Q K^T and dP = dO V^T.
        float factor = x.factor;
        float s[1][NT][4], dp[1][NT][4];
        rows_times_rows<D, 1, NT>(s, q, my_row, k + stage * N * D);
        rows_times_rows<D, 1, NT>(dp, dout, my_row, v + stage * N * D);
        if (CAPPED) cap_scores(s[0], x.cap_factor);
        if (!all || x.slopes)
            factor = mask_tile(s[0], x, b, kh, row0 + my_row + lane / 4, positions + stage * N);

        // Compute dS = P (dP - D) cap' in place of s.
        #pragma unroll
        for (int n = 0; n < NT; n++)
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                // p is 0 where masked, so dP needs no mask. i / 2 selects one of the
                // thread's two rows.
                float p = ex2(s[0][n][i] * factor - row_lse[i / 2]);
                s[0][n][i] =
                    through_cap<CAPPED>(p, s[0][n][i]) * (dp[0][n][i] - row_sum[i / 2]);
            }

        // Add dS K.
        uint32_t ds[1][NT / 2][4];
        pack_scores<T>(ds[0], s[0]);
        scores_times_rows<D, 1, NT>(sum, ds, k + stage * N * D, 0);
        __syncthreads(); // this stage has been read
        tile = next;
    }
    cp_async_wait<0>();

    // Write dq, scaled.
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        unsigned row = row0 + my_row + 8 * i + lane / 4;
        if (row >= x.rows) continue;
        const size_t to = x.query_at(b, x.head_of(row, kh), x.query_of(row));
        store_row(dq, to, sum[0], i, x.scale, HS);
    }
}

// ----------------------------------------------------------------------------
// backward: dK and dV of a block's keys

// Tiles: D channels and M rows. A warp owns D / SPLIT channels, as many as its registers hold.
template <typename T, int D, int M, int SPLIT, bool CAPPED>
__global__ void __launch_bounds__(MMA_THREADS, D <= 32 ? 4 : D <= 64 ? 3 : 2) // blocks on an SM
    attention_mma_backward_kv_kernel(const Results<T> dk, const Results<T> dv,
                                     const RowOperands<T> x) {
    // A block has N keys. With SPLIT = 2 two warps compute the same scores, then half of
    // the channels each.
    constexpr int N = MMA_WARPS / SPLIT * 16;
    constexpr int MT = M / 8;
    constexpr int CT = D / SPLIT / 8;
    constexpr int KEYS = mma_backward_keys(D); // in a span
    const int HS = int(x.d.HS);
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int my_key = warp / SPLIT * 16;
    const int my_chunk = warp % SPLIT * CT;
    const size_t b = blockIdx.z;
    const size_t kh = blockIdx.y;
    const size_t key0 = size_t(blockIdx.x) * N;
    T* k = reinterpret_cast<T*>(dynamic_shared()); // (N, D)
    T* v = k + N * D;                              // (N, D)
    T* q = v + N * D;                              // (2, M, D)
    T* dout = q + 2 * M * D;                       // (2, M, D)

    // Load the block's keys and values.
    auto key_row = [&](const T* p, int j) {
        return key0 + j < x.d.Tk ? p + x.key_at(b, kh, key0 + j) : nullptr;
    };
    load_rows<D, N>(k, x.k, HS, [&](int j) { return key_row(x.k, j); });
    load_rows<D, N>(v, x.v, HS, [&](int j) { return key_row(x.v, j); });
    cp_async_commit();

    // Find the tiles of rows that see these keys. A block with fewer than N keys needs a mask. Idle
    // rows need none, because their p is 0.
    Span keys = NO_SPAN;
    for (size_t first = key0; first < key0 + N && first < x.d.Tk; first += KEYS)
        keys = join(keys, x.key_spans[b * x.key_tiles + first / KEYS]);
    auto look = [&](int tile) {
        Visibility s = visibility(x.row_spans[x.tile_at(b, tile)], keys);
        return s == ALL && key0 + N > x.d.Tk ? SOME : s;
    };
    auto load_queries = [&](int stage, int tile) {
        load_rows<D, M>(q + stage * M * D, x.q, HS,
                        [&](int r) { return query_row(x, b, kh, unsigned(tile * M + r)); });
        load_rows<D, M>(dout + stage * M * D, x.q, HS,
                        [&](int r) { return gradient_row(x, b, kh, unsigned(tile * M + r)); });
    };

    // Load the first such tile.
    TileWalk walk = {int(x.tiles)};
    bool all = false, next_all = false;
    int tile = walk.next(all, look);
    if (tile >= 0) load_queries(0, tile);
    cp_async_commit();

    // Read the positions of the thread's two keys once. Its sums cover the warp's own channels.
    const size_t my_first = key0 + my_key + lane / 4;
    const int my_keys[2] = {x.position_of(b, my_first), x.position_of(b, my_first + 8)};
    float sum_k[1][CT][4] = {}, sum_v[1][CT][4] = {};

    for (int stage = 0; tile >= 0; stage ^= 1, all = next_all) {
        // Start the next tile's copies, and wait for this tile's.
        int next = walk.next(next_all, look);
        if (next >= 0) load_queries(stage ^ 1, next);
        cp_async_commit();
        cp_async_wait<1>(); // this thread's copies, all but the next tile's
        __syncthreads();    // and those of the other threads

        // Compute S^T = K Q^T and dP^T = V dO^T: keys are rows, (query, head) pairs are columns.
        float factor = x.factor;
        float s[1][MT][4], dp[1][MT][4];
        rows_times_rows<D, 1, MT>(s, k, my_key, q + stage * M * D);
        rows_times_rows<D, 1, MT>(dp, v, my_key, dout + stage * M * D);
        if (CAPPED) cap_scores(s[0], x.cap_factor);
        if (!all || x.slopes) {
            const KeyRange* ranges = x.tile_ranges(b, tile);
            if (x.slopes) {
                slope_columns(s[0], x, kh, unsigned(tile * M), my_keys, ranges);
                factor = 1;
            }
            mask_columns(s[0], my_keys, ranges);
        }

        // Compute P^T in place of s, and dS^T = P^T (dP^T - D) cap' in place of dp.
        #pragma unroll
        for (int n = 0; n < MT; n++) {
            // lse and D of the thread's two columns
            const size_t at = x.tile_at(b, kh, tile) * M + 8 * n + 2 * (lane % 4);
            Pack<float, 2> l = load<2>(x.row_lse + at);
            Pack<float, 2> sums = load<2>(x.row_sums + at);
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                float p = ex2(s[0][n][i] * factor - l.v[i % 2]);
                dp[0][n][i] =
                    through_cap<CAPPED>(p, s[0][n][i]) * (dp[0][n][i] - sums.v[i % 2]);
                s[0][n][i] = p;
            }
        }

        // Add P^T dO and dS^T Q. Keys are the rows of the scores, so P^T and dS^T already have the
        // layout of operands. One array serves both, to save registers.
        uint32_t operand[1][MT / 2][4];
        pack_scores<T>(operand[0], s[0]);
        scores_times_rows<D, 1, MT>(sum_v, operand, dout + stage * M * D, my_chunk);
        pack_scores<T>(operand[0], dp[0]);
        scores_times_rows<D, 1, MT>(sum_k, operand, q + stage * M * D, my_chunk);
        __syncthreads(); // this stage has been read
        tile = next;
    }
    cp_async_wait<0>();

    // Write dk, scaled, and dv.
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        size_t key = key0 + my_key + 8 * i + lane / 4;
        if (key >= x.d.Tk) continue;
        const size_t to = x.key_at(b, kh, key) + 8 * my_chunk;
        store_row(dk, to, sum_k[0], i, x.scale, HS - 8 * my_chunk);
        store_row(dv, to, sum_v[0], i, 1, HS - 8 * my_chunk);
    }
}

// ----------------------------------------------------------------------------
// launchers

// Call f(D, MT, N, CAPPED): channels; 16 MT rows a warp; N keys in a tile of the forward pass;
// whether there is a soft cap, for which only two sizes have a kernel.
template <typename F> void pick_mma_kernel(size_t HS, bool capped, F f) {
    auto pick = [&](auto D, auto MT, auto N) {
        if constexpr (D >= 128)
            if (capped) return f(D, MT, N, std::true_type());
        f(D, MT, N, std::false_type());
    };
    if (capped && HS <= 128) HS = 128;
    HS <= 32    ? pick(Int<32>(), Int<2>(), Int<64>())
    : HS <= 64  ? pick(Int<64>(), Int<2>(), Int<64>())
    : HS <= 96  ? pick(Int<96>(), Int<2>(), Int<32>())
    : HS <= 128 ? pick(Int<128>(), Int<2>(), Int<32>())
                : pick(Int<256>(), Int<1>(), Int<32>());
}

// Set up operands in tiles of `rows` rows and `keys` keys. Returns the bytes of scratch.
template <typename T>
size_t mma_operands(RowOperands<T>& x, const AttentionOperands<T>& operands, void* scratch,
                    unsigned rows, unsigned keys, bool backward) {
    Pieces pieces = {static_cast<unsigned char*>(scratch)};
    // The dQ kernel's blocks of 64 rows are two of the tiles that the dK, dV kernel walks.
    take_rows(x, pieces, operands, rows, rows, backward ? 2 : 1, keys, backward);
    return pieces.used;
}

// The scratch in bytes, for either pass.
inline size_t attention_mma_scratch_bytes(const AttentionDims& d) {
    // The scratch holds only floats and ints, so bf16 gives the size for fp16 too.
    AttentionOperands<bf16> operands;
    operands.d = d;
    RowOperands<bf16> x = {};
    size_t forward = 0;
    // Tiles of capped scores are the smallest.
    pick_mma_kernel(d.HS, true, [&](auto, auto MT, auto N, auto) {
        const unsigned rows = MMA_WARPS * MT * 16;
        forward = mma_operands(x, operands, nullptr, rows, N, false);
    });
    const unsigned keys = mma_backward_keys(d.HS);
    size_t backward = mma_operands(x, operands, nullptr, MMA_ROWS, keys, true);
    return std::max(forward, backward);
}

// Forward. scratch: attention_mma_scratch_bytes().
template <typename T>
void attention_mma_forward(T* out, float* lse, const AttentionOperands<T>& operands, void* scratch,
                           cudaStream_t stream) {
    LLMC_CHECK(attention_kernels(operands, false, false, out) == AttentionKernels::MMA,
               "mma.sync's attention does not take these operands");
    // Choose the tiles by the head's size. A block takes M rows of one key head.
    typedef native_t<T> Native;
    const bool capped = operands.softcap != 0;
    pick_mma_kernel(operands.d.HS, capped, [&](auto D, auto MT, auto N, auto CAPPED) {
        constexpr int M = MMA_WARPS * MT * 16;
        RowOperands<Native> x = {};
        mma_operands(x, as_native(operands), scratch, M, N, false);

        // Compute the spans first: the kernel uses them to choose the tiles that it loads.
        attention_spans(x, stream);
        dim3 grid(x.tiles, unsigned(x.d.NKV), unsigned(x.d.B));
        // Shared memory: M rows of q, and two stages of N keys and N values.
        launch_shared(attention_mma_forward_kernel<Native, D, MT, N, CAPPED>, grid, MMA_THREADS,
                      (M + 4 * N) * D * sizeof(T), stream, as_native(out), lse, x);
    });
}

// Backward. scratch: attention_mma_scratch_bytes().
template <typename T, typename Q, typename K>
void attention_mma_backward(Q* dq, K* dk, K* dv, const T* out, const float* lse,
                            const AttentionOperands<T>& operands, void* scratch,
                            cudaStream_t stream) {
    LLMC_CHECK(attention_kernels(operands, false, true, dq, dk, dv, out) == AttentionKernels::MMA,
               "mma.sync's attention does not take these operands");
    typedef native_t<T> Native;
    RowOperands<Native> x = {};
    const unsigned keys = mma_backward_keys(operands.d.HS);
    mma_operands(x, as_native(operands), scratch, MMA_ROWS, keys, true);
    const AttentionDims& d = x.d;

    // Compute the spans of the tiles, and lse and D of the rows.
    attention_statistics(as_native(out), lse, x, stream);

    // Compute dQ by blocks of rows, dK and dV by blocks of keys.
    auto in = [&](auto* to) { return Results<Native>(as_native(to), x.accumulate); };
    pick_mma_kernel(d.HS, x.softcap != 0, [&](auto D, auto, auto, auto CAPPED) {
        constexpr int M = MMA_WARPS * 16;
        constexpr int KEYS = mma_backward_keys(D);
        constexpr int SPLIT = D > 128 ? 2 : 1;
        constexpr int N = MMA_WARPS / SPLIT * 16;

        // Shared memory: q and dout of M rows, and two stages of keys and values.
        dim3 grid(unsigned(ceil_div(x.rows, M)), unsigned(d.NKV), unsigned(d.B));
        size_t bytes = (2 * M + 4 * KEYS) * D * sizeof(T);
        launch_shared(attention_mma_backward_q_kernel<Native, D, KEYS, CAPPED>, grid, MMA_THREADS,
                      bytes, stream, in(dq), x);

        // Shared memory: N keys and values, and two stages of q and dout.
        grid.x = unsigned(ceil_div(d.Tk, size_t(N)));
        bytes = (2 * N + 4 * MMA_ROWS) * D * sizeof(T);
        launch_shared(attention_mma_backward_kv_kernel<Native, D, MMA_ROWS, SPLIT, CAPPED>, grid,
                      MMA_THREADS, bytes, stream, in(dk), in(dv), x);
    });
}
#endif

} // namespace llmc
