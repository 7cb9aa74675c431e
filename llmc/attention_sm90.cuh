// attention_sm90.cuh - flash attention for Hopper: TMA, wgmma, specialised warps - arXiv:2407.08608
//   The operands, masks and results of attention.cuh, in bf16 and fp16, head sizes of 8 to 128 in
//   steps of 8: one that is not 32, 64, 96 or 128 runs in the next; TMA fills with zeros.
//   A row is a (query, head) pair: a tile has all heads of a group for as many queries as fit, so a
//   block reads the keys of its group once. Where a group does not divide a tile, the tile's last
//   rows are idle.
//   A block is three warpgroups. One gives its registers away and keeps the loads ahead; two own 64
//   rows (forward) or 64 keys (backward) each. Tiles lie in chunks of 64 channels, 128 bytes a row,
//   under the 128-byte swizzle, as TMA writes and wgmma reads them.
//   forward      one tile's softmax runs under the next one's Q K^T and its own P V; the two
//                warpgroups take turns with the tensor cores, so that one's exponentials run under
//                the other's products
//   backward     a block owns keys: S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are operands
//                in registers; only dS passes through shared memory, for dQ = dS K. dK and dV stay
//                in registers over all heads of the group. dQ is summed over blocks in float in
//                global memory: in the order of the keys, last first, bitwise repeatable; or as
//                they come, which is faster (d.any_order)
//   Tiles are skipped, and mask-free, by the least and largest position in them (Span).
//   Cost: products on tensor cores, 2 forward and 5 backward; an exp2 for each (query, key) seen in
//         each. Scratch: spans of the tiles, two numbers a row, and dQ in float.
//   To copy: attention.cuh, which includes this file, attention_sm80.cuh, matmul.cuh, hopper.cuh and
//   common.h.
#pragma once
#include "attention.cuh"
#include "attention_sm80.cuh"

#if KERNELS

constexpr int WARPGROUP = 128, HOPPER_THREADS = 3 * WARPGROUP, CONSUMERS = 2 * WARPGROUP;
constexpr int HOPPER_KEYS = 128;  // of a tile
constexpr int FORWARD_ROWS = 128; // of a block's tile, idle ones included
constexpr int BACKWARD_ROWS = 64; // of a tile that a block of keys reads
constexpr int STAGES = 2;         // tiles that are loaded or in use
constexpr int CONSUMER_WARPS = CONSUMERS / 32;
enum { EVERY_CONSUMER = 1, TURN = 2 }; // named barriers; TURN + 1 is the other warpgroup's

// How TMA reaches the operands; boxes are one chunk of a tile.
struct HopperMaps {
    CUtensorMap q, k, v, out, dout;
};

template <typename T> struct HopperOperands : RowOperands<T> {
    unsigned tile_rows, tiles; // rows in use of a tile, all but the last tile full; tiles in all
    float *row_lse, *row_sums; // (B,NKV,tiles,BACKWARD_ROWS) lse in units of log 2, and D
    float* dq;                 // (B,NKV,tiles) fragments, see fragment_at()
    int* turns;                // (B,NKV,tiles) blocks of keys that have added to it
    __device__ size_t tile_index(size_t b, size_t kh, int tile) const {
        return (b * this->d.NKV + kh) * tiles + size_t(tile);
    }
};

#if HOPPER_PASS
// ----------------------------------------------------------------------------
// tiles in shared memory: chunks of 64 channels, in each 128 bytes a row

__device__ inline int ring_stage(int i) { return i % STAGES; }
__device__ inline uint32_t ring_parity(int i) { return uint32_t(i / STAGES) & 1; }

// What the loading warp says of a tile: which it is, and whether all of it is seen; -1 after the last
__device__ inline int tile_note(int tile, bool all) { return tile < 0 ? -1 : 2 * tile + all; }
__device__ inline int note_tile(int note) { return note / 2; }
__device__ inline bool note_all(int note) { return note & 1; }

template <int N> __device__ __forceinline__ float (&flat(float (&x)[N][4]))[4 * N] {
    return reinterpret_cast<float(&)[4 * N]>(x);
}
template <int N> __device__ __forceinline__ void hold(float (&x)[N][4]) {
    #pragma unroll
    for (int i = 0; i < N; i++)
        #pragma unroll
        for (int j = 0; j < 4; j++) keep(x[i][j]);
}

// s (64, 8 NT) = 64 rows of a times the 8 NT rows of b, over D channels; a chunk of them has
// a_rows, b_rows
template <typename T, int D, int NT>
__device__ __forceinline__ void issue_rows_times_rows(float (&s)[NT][4], uint32_t a, int a_rows,
                                                      uint32_t b, int b_rows) {
    wg_fence();
    #pragma unroll
    for (int k = 0; k < D / 16; k++)
        wgmma<T, 8 * NT, 0, 0>(flat(s), descriptor(a + k / 4 * a_rows * 128 + k % 4 * 32, 16, 1024),
                               descriptor(b + k / 4 * b_rows * 128 + k % 4 * 32, 16, 1024), k != 0);
    wg_commit();
}
// sum (64, 8 CT) += p (64, 16 KT) times 16 KT rows of b, all its channels; a chunk has b_rows
template <typename T, int KT, int CT>
__device__ __forceinline__ void issue_scores_times_rows(float (&sum)[CT][4],
                                                        const uint32_t (&p)[KT][4], uint32_t b,
                                                        int b_rows) {
    wg_fence();
    #pragma unroll
    for (int k = 0; k < KT; k++)
        wgmma_rs<T, 8 * CT, 1>(flat(sum), p[k], descriptor(b + k * 2048, b_rows * 128, 1024), 1);
    wg_commit();
}

// 16 rows from `row` on of a tile, from a product's result as pack_scores() has it
template <int KT>
__device__ void put_rows(unsigned char* tile, int rows, int row, const uint32_t (&p)[KT][4]) {
    int lane = threadIdx.x % 32, at = row + lane % 16;
    #pragma unroll
    for (int k = 0; k < KT; k++) {
        int chunk = 2 * k + lane / 16; // of 8 channels
        stmatrix_x4(tile + chunk / 8 * rows * 128 + at * 128 + ((chunk % 8) ^ (at & 7)) * 16, p[k]);
    }
}

// By a warp whose wait is over for all lanes: it has read what the barrier guards.
__device__ inline void release(uint64_t* barrier) {
    if (threadIdx.x % 32 == 0) mbar_arrive(barrier);
}
#endif

// ----------------------------------------------------------------------------
// forward

template <int D> constexpr int CHUNKS = (D + 63) / 64;
template <int D>
constexpr size_t FORWARD_BYTES = size_t(CHUNKS<D>) * 128 *
                                 (FORWARD_ROWS + 2 * STAGES * HOPPER_KEYS);

template <typename T, int D>
__global__ void __launch_bounds__(HOPPER_THREADS, 1)
    attention_hopper_forward_kernel(const __grid_constant__ HopperMaps maps, float* lse,
                                    const HopperOperands<T> x) {
#if HOPPER_PASS
    constexpr int M = FORWARD_ROWS, N = HOPPER_KEYS, NT = N / 8, CT = CHUNKS<D> * 8;
    constexpr int Q_BYTES = CHUNKS<D> * M * 128, K_BYTES = CHUNKS<D> * N * 128;
    unsigned char *q = dynamic_shared(), *k = q + Q_BYTES, *v = k + STAGES * K_BYTES;
    SHARED(int, tile_notes, STAGES);
    SHARED(uint64_t, barriers, 1 + 4 * STAGES);
    uint64_t *q_full = barriers, *k_full = q_full + 1, *v_full = k_full + STAGES,
             *k_free = v_full + STAGES, *v_free = k_free + STAGES;
    const size_t b = blockIdx.z, kh = blockIdx.y;
    const int block = int(gridDim.x - 1 - blockIdx.x); // the rows that see most first
    const unsigned row0 = unsigned(block) * x.tile_rows;
    if (threadIdx.x == 0) {
        mbar_init(q_full, 1);
        for (int i = 0; i < STAGES; i++) {
            mbar_init(k_full + i, 1), mbar_init(v_full + i, 1);
            mbar_init(k_free + i, CONSUMER_WARPS), mbar_init(v_free + i, CONSUMER_WARPS);
        }
        mbar_init_fence();
    }
    __syncthreads();

    const int role = __shfl_sync(ALL_LANES, int(threadIdx.x / WARPGROUP), 0);

    if (role == 0) {
        regs_dec<40>();
        if (threadIdx.x >= 32) return;
        const bool leader = elect_one();
        if (leader) {
            mbar_expect_tx(q_full, CHUNKS<D> * 128 * x.tile_rows);
            for (int c = 0; c < CHUNKS<D>; c++)
                tma_load_4d(q + c * M * 128, &maps.q, q_full, 64 * c, int(kh * x.group),
                            int(row0 / x.group), int(b));
        }
        const int tiles = int(ceil_div(x.d.Tk, size_t(N)));
        const Span positions = x.rows_span(x.q_positions, b, row0, x.tile_rows),
                   docs = x.rows_span(x.doc_start, b, row0, x.tile_rows);
        auto look = [&](int tile) {
            Sees s = what_is_seen(positions, docs, x.key_spans[b * tiles + tile], x.d.window);
            return s == ALL && size_t(tile + 1) * N > x.d.Tk ? SOME : s;
        };
        TileWalk walk = {tiles};
        for (int i = 0, tile = 0; tile >= 0; i++) {
            bool all = false;
            const int stage = ring_stage(i);
            tile = walk.next(all, look);
            auto load = [&](unsigned char* to, const CUtensorMap* map, uint64_t* full) {
                mbar_expect_tx(full + stage, K_BYTES);
                for (int c = 0; c < CHUNKS<D>; c++)
                    tma_load_4d(to + stage * K_BYTES + c * N * 128, map, full + stage, 64 * c,
                                int(kh), tile * N, int(b));
            };
            if (leader) {
                mbar_wait(k_free + stage, ring_parity(i) ^ 1);
                tile_notes[stage] = tile_note(tile, all);
                if (tile < 0) {
                    mbar_arrive(k_full + stage);
                } else {
                    load(k, &maps.k, k_full);
                    mbar_wait(v_free + stage, ring_parity(i) ^ 1);
                    load(v, &maps.v, v_full);
                }
            }
            __syncwarp();
        }
        return;
    }

    regs_inc<232>();
    const int me = role - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int my_row = 64 * me + 16 * warp; // of the tile
    const uint32_t my_q = smem_u32(q) + uint32_t(64 * me * 128), k_at = smem_u32(k),
                   v_at = smem_u32(v);
    const float scale = x.scale * LOG2E;
    float s[NT][4], sum[CT][4] = {}, row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {},
                    rescale[2];
    uint32_t p[NT / 2][4];
    auto softmax = [&](int note) { // s becomes p
        float factor = scale;
        if (!note_all(note) || x.slopes) {
            mask_scores(s, x, b, kh, row0 + unsigned(my_row), size_t(note_tile(note)) * N, scale);
            factor = 1;
        }
        online_softmax(s, row_max, row_sum, rescale, factor);
    };
    mbar_wait(q_full, 0);
    mbar_wait(k_full, 0);
    int note = tile_notes[0];
    if (note >= 0) {
        if (me == 1) bar_arrive(TURN, CONSUMERS); // the first turn is warpgroup 0's
        bar_sync(TURN + me, CONSUMERS);
        issue_rows_times_rows<T, D>(s, my_q, M, k_at, N);
        bar_arrive(TURN + 1 - me, CONSUMERS);
        wg_wait<0>(), hold(s), release(k_free);
        softmax(note);
        pack_scores<T>(p, s);
        int before = 0;
        for (int i = 1;; i++) {
            const int stage = ring_stage(i);
            mbar_wait(k_full + stage, ring_parity(i));
            mbar_wait(v_full + before, ring_parity(i - 1));
            note = tile_notes[stage];
            if (note < 0) break;
            bar_sync(TURN + me, CONSUMERS);
            issue_rows_times_rows<T, D>(s, my_q, M, k_at + stage * K_BYTES, N);
            issue_scores_times_rows<T>(sum, p, v_at + before * K_BYTES, N);
            bar_arrive(TURN + 1 - me, CONSUMERS);
            wg_wait<1>(), hold(s), release(k_free + stage);
            softmax(note);
            wg_wait<0>(), hold(sum), release(v_free + before);
            scale_rows(sum, rescale);
            pack_scores<T>(p, s);
            before = stage;
        }
        issue_scores_times_rows<T>(sum, p, v_at + before * K_BYTES, N);
        if (me == 0) bar_sync(TURN, CONSUMERS); // the turn that warpgroup 1 gave last
        wg_wait<0>(), hold(sum);
    }

    #pragma unroll
    for (int i = 0; i < 2; i++) {
        float total = row_total(row_sum[i]);
        bool seen = total != 0; // NaN has been seen
        rescale[i] = seen ? 1 / total : 0;
        unsigned slot = unsigned(my_row + 8 * i + lane / 4), row = row0 + slot;
        if (lane % 4 == 0 && slot < x.tile_rows && row < x.rows)
            lse[(b * x.d.NH + x.head_of(row, kh)) * x.d.Tq + x.query_of(row)] =
                seen ? row_max[i] * LN2 + logf(total) : -INFINITY;
    }
    scale_rows(sum, rescale);
    uint32_t o[CT / 2][4];
    pack_scores<T>(o, sum);
    put_rows(q, M, my_row, o); // nobody else reads these rows of q
    fence_async_smem();
    bar_sync(EVERY_CONSUMER, CONSUMERS);
    if (threadIdx.x == WARPGROUP) {
        for (int c = 0; c < CHUNKS<D>; c++)
            tma_store_4d(&maps.out, q + c * M * 128, 64 * c, int(kh * x.group), int(row0 / x.group),
                         int(b));
        bulk_commit();
        bulk_wait_read<0>();
    }
#endif
}

// ----------------------------------------------------------------------------
// backward

template <int D>
constexpr size_t BACKWARD_BYTES = size_t(CHUNKS<D>) *
                                      (2 * HOPPER_KEYS * 128 + 2 * STAGES * BACKWARD_ROWS * 128) +
                                  STAGES* HOPPER_KEYS * 128 +
                                  size_t(CHUNKS<D>) * BACKWARD_ROWS * 64 * sizeof(float);

// A warpgroup's (64, 64) part of dQ, chunk `chunk` of `chunks`: each thread's four numbers together,
// the threads' after each other. Two are of row 16 warp + lane / 4, two of the row 8 below.
__device__ inline size_t fragment_at(int j, int chunk, int chunks, int thread) {
    return (size_t(j) * chunks * WARPGROUP + size_t(chunk) * WARPGROUP + thread) * 4;
}

template <typename T, int D, bool ANY_ORDER>
__global__ void __launch_bounds__(HOPPER_THREADS, 1)
    attention_hopper_backward_kernel(const __grid_constant__ HopperMaps maps, T* dk, T* dv,
                                     const HopperOperands<T> x) {
#if HOPPER_PASS
    constexpr int M = BACKWARD_ROWS, N = HOPPER_KEYS, MT = M / 8, C = CHUNKS<D>, CT = C * 8;
    constexpr int K_BYTES = C * N * 128, Q_BYTES = C * M * 128, DS_BYTES = N * 128,
                  DQ_BYTES = C * M * 64 * int(sizeof(float));
    unsigned char *k = dynamic_shared(), *v = k + K_BYTES, *q = v + K_BYTES,
                  *dout = q + STAGES * Q_BYTES, *ds = dout + STAGES * Q_BYTES,
                  *dq = ds + STAGES * DS_BYTES;
    SHARED(float, tile_lse, STAGES* M);
    SHARED(float, tile_sums, STAGES* M);
    SHARED(int, tile_notes, STAGES);
    SHARED(uint64_t, barriers, 3 + 4 * STAGES);
    uint64_t *k_full = barriers, *dq_full = k_full + 1, *dq_free = dq_full + 1,
             *q_full = dq_free + 1, *dout_full = q_full + STAGES, *q_free = dout_full + STAGES,
             *dout_free = q_free + STAGES;
    const size_t b = blockIdx.z, kh = blockIdx.y;
    const int block = int(gridDim.x - 1 - blockIdx.x); // the last keys first: they are seen least
    const size_t key0 = size_t(block) * N;
    if (threadIdx.x == 0) {
        mbar_init(k_full, 1), mbar_init(dq_full, C * 4), mbar_init(dq_free, 1);
        for (int i = 0; i < STAGES; i++) {
            mbar_init(q_full + i, 1), mbar_init(dout_full + i, 1);
            mbar_init(q_free + i, CONSUMER_WARPS), mbar_init(dout_free + i, CONSUMER_WARPS);
        }
        mbar_init_fence();
    }
    // idle rows are zeros: 0 times what was there could be NaN
    const int idle = (M - int(x.tile_rows)) * 8;
    for (int i = threadIdx.x; i < idle * 2 * STAGES * C; i += HOPPER_THREADS)
        store(reinterpret_cast<float*>(q + i / idle * M * 128 + x.tile_rows * 128 + i % idle * 16),
              Pack<float, 4>{});
    fence_async_smem();
    __syncthreads();

    const int role = __shfl_sync(ALL_LANES, int(threadIdx.x / WARPGROUP), 0);

    if (role == 0) {
        regs_dec<24>();
        const int tiles = int(x.tiles);
        const Span keys =
            span_of(x.k_positions + b * x.d.Tk, key0, key0 + N < x.d.Tk ? key0 + N : x.d.Tk);
        auto sees = [&](int tile, Span keys) {
            return what_is_seen(x.query_spans[b * tiles + tile], x.doc_spans[b * tiles + tile],
                                keys, x.d.window);
        };
        auto look = [&](int tile) {
            Sees s = sees(tile, keys);
            return s == ALL && key0 + N > x.d.Tk ? SOME : s;
        };
        TileWalk walk = {tiles};
        bool all = false;
        const int warp = __shfl_sync(ALL_LANES, int(threadIdx.x / 32), 0);
        const bool leader = elect_one();
        if (warp == 0) { // loads
            if (leader) {
                mbar_expect_tx(k_full, 2 * K_BYTES);
                for (int c = 0; c < C; c++) {
                    tma_load_4d(k + c * N * 128, &maps.k, k_full, 64 * c, int(kh), int(key0),
                                int(b));
                    tma_load_4d(v + c * N * 128, &maps.v, k_full, 64 * c, int(kh), int(key0),
                                int(b));
                }
            }
            for (int i = 0, tile = 0; tile >= 0; i++) {
                const int stage = ring_stage(i);
                tile = walk.next(all, look);
                auto load = [&](unsigned char* to, const CUtensorMap* map, float* numbers,
                                const float* from, uint64_t* full) {
                    mbar_expect_tx(full + stage, C * 128 * x.tile_rows + M * sizeof(float));
                    for (int c = 0; c < C; c++)
                        tma_load_4d(to + stage * Q_BYTES + c * M * 128, map, full + stage, 64 * c,
                                    int(kh * x.group), tile * int(x.tile_rows / x.group), int(b));
                    bulk_load_1d(numbers + stage * M, from + x.tile_index(b, kh, tile) * M,
                                 M * sizeof(float), full + stage);
                };
                if (leader) {
                    mbar_wait(q_free + stage, ring_parity(i) ^ 1);
                    tile_notes[stage] = tile_note(tile, all);
                    if (tile < 0) {
                        mbar_arrive(q_full + stage);
                    } else {
                        load(q, &maps.q, tile_lse, x.row_lse, q_full);
                        mbar_wait(dout_free + stage, ring_parity(i) ^ 1);
                        load(dout, &maps.dout, tile_sums, x.row_sums, dout_full);
                    }
                }
                __syncwarp();
            }
        } else if (warp == 1) { // sums of dQ
            for (int i = 0, tile; (tile = walk.next(all, look)) >= 0; i++) {
                const size_t at = x.tile_index(b, kh, tile);
                int turn = 0; // blocks of later keys that add to this tile too
                for (int n = block + 1; !ANY_ORDER && n < int(gridDim.x); n += 32) {
                    int other = n + int(threadIdx.x % 32);
                    bool adds = other < int(gridDim.x) &&
                                sees(tile, x.key_spans[b * gridDim.x + other]) != NOTHING;
                    turn += __popc(__ballot_sync(ALL_LANES, adds));
                }
                if (leader) {
                    mbar_wait(dq_full, i & 1);
                    if (!ANY_ORDER) wait_for_turn(x.turns + at, turn);
                    bulk_reduce_add_f32(x.dq + at * (DQ_BYTES / sizeof(float)),
                                        reinterpret_cast<float*>(dq), DQ_BYTES);
                    bulk_commit();
                    if (ANY_ORDER)
                        bulk_wait_read<0>();
                    else
                        bulk_wait<0>(), pass_turn(x.turns + at); // not before the sum is there
                    mbar_arrive(dq_free);
                }
                __syncwarp();
            }
        }
        return;
    }

    regs_inc<240>();
    const int me = role - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4,
              thread = threadIdx.x % WARPGROUP;
    const int my_key = 64 * me + 16 * warp; // of the tile
    const uint32_t k_at = smem_u32(k), my_k = k_at + uint32_t(64 * me * 128),
                   my_v = smem_u32(v) + uint32_t(64 * me * 128), q_at = smem_u32(q),
                   dout_at = smem_u32(dout), ds_at = smem_u32(ds),
                   my_channels = k_at + uint32_t(C == 2 ? me * N * 128 : 0);
    const float scale = x.scale * LOG2E;
    float sum_k[CT][4] = {}, sum_v[CT][4] = {};
    mbar_wait(k_full, 0);
    for (int i = 0;; i++) {
        const int stage = ring_stage(i);
        float s[MT][4], dp[MT][4];
        mbar_wait(q_full + stage, ring_parity(i));
        const int note = tile_notes[stage];
        if (note < 0) break;
        issue_rows_times_rows<T, D>(s, my_k, N, q_at + stage * Q_BYTES, M);
        mbar_wait(dout_full + stage, ring_parity(i));
        issue_rows_times_rows<T, D>(dp, my_v, N, dout_at + stage * Q_BYTES, M);
        wg_wait<1>(), hold(s);
        float factor = scale;
        if (!note_all(note) || x.slopes) {
            const KeySight sight = key_sight(x, b, key0 + my_key + lane / 4);
            mask_columns(s, x, b, kh, note_tile(note) * x.tile_rows, sight, scale);
            factor = 1;
        }
        #pragma unroll
        for (int n = 0; n < MT; n++) {
            Pack<float, 2> l = load<2>(tile_lse + stage * M + 8 * n + 2 * (lane % 4));
            #pragma unroll
            for (int e = 0; e < 4; e++) s[n][e] = ex2(s[n][e] * factor - l.v[e % 2]);
        }
        uint32_t p[MT / 2][4], ds_operand[MT / 2][4];
        pack_scores<T>(p, s);
        wg_wait<0>(), hold(dp);
        #pragma unroll
        for (int n = 0; n < MT; n++) {
            Pack<float, 2> sums = load<2>(tile_sums + stage * M + 8 * n + 2 * (lane % 4));
            #pragma unroll
            for (int e = 0; e < 4; e++) dp[n][e] = s[n][e] * (dp[n][e] - sums.v[e % 2]);
        }
        pack_scores<T>(ds_operand, dp);
        issue_scores_times_rows<T>(sum_v, p, dout_at + stage * Q_BYTES, M);
        // dS^T for both warpgroups. The tile before the last one is read: everybody has waited for
        // its dQ before coming to the last barrier.
        put_rows(ds + stage * DS_BYTES, N, my_key, ds_operand);
        fence_async_smem();
        bar_sync(EVERY_CONSUMER, CONSUMERS);

        // dQ = dS K over all keys of the tile: 64 channels each, or all of them in turn
        auto dq_and_dk = [&](auto mine) {
            float part[8][4];
            if constexpr (mine) {
                wg_fence();
                #pragma unroll
                for (int n = 0; n < N / 16; n++)
                    wgmma<T, 64, 1, 1>(flat(part),
                                       descriptor(ds_at + stage * DS_BYTES + n * 2048, 16, 1024),
                                       descriptor(my_channels + n * 2048, 16, 1024), n != 0);
                wg_commit();
            }
            wg_wait<mine>(), hold(sum_v), release(dout_free + stage);
            issue_scores_times_rows<T>(sum_k, ds_operand, q_at + stage * Q_BYTES, M);
            if constexpr (mine) {
                wg_wait<1>(), hold(part);
                mbar_wait(dq_free, (i & 1) ^ 1);
                #pragma unroll
                for (int j = 0; j < 8; j++)
                    store(reinterpret_cast<float*>(dq) + fragment_at(j, C == 2 ? me : 0, C, thread),
                          Pack<float, 4>{part[j][0], part[j][1], part[j][2], part[j][3]});
                fence_async_smem();
                __syncwarp();
                release(dq_full);
            }
            wg_wait<0>(), hold(sum_k), release(q_free + stage);
        };
        if (C == 2 || i % 2 == me)
            dq_and_dk(Int<1>());
        else
            dq_and_dk(Int<0>());
    }

    #pragma unroll
    for (int i = 0; i < 2; i++) {
        size_t key = key0 + my_key + 8 * i + lane / 4;
        if (key >= x.d.Tk) continue;
        store_row(dk + x.key(b, kh, key), sum_k, i, x.scale, int(x.d.HS));
        store_row(dv + x.key(b, kh, key), sum_v, i, 1, int(x.d.HS));
    }
#endif
}

// dq (B,Tq,NH,HS) from the sums' fragments: a thread, four numbers. A block: 8 columns of a chunk
// and all rows of a tile.
template <typename T>
__global__ void attention_hopper_dq_kernel(T* dq, int chunks, const HopperOperands<T> x) {
    const size_t b = blockIdx.z, kh = blockIdx.y;
    const int tile = int(blockIdx.x) / (8 * chunks), j = int(blockIdx.x) % (8 * chunks) / chunks,
              chunk = int(blockIdx.x) % chunks, thread = threadIdx.x, lane = thread % 32;
    const int column = 64 * chunk + 8 * j + 2 * (lane % 4);
    const float* from = x.dq + x.tile_index(b, kh, tile) * size_t(chunks) * BACKWARD_ROWS * 64;
    Pack<float, 4> four = load<4>(from + fragment_at(j, chunk, chunks, thread));
    for (int i = 0; i < 2; i++) {
        unsigned slot = unsigned(thread / 32 * 16 + 8 * i + lane / 4),
                 row = unsigned(tile) * x.tile_rows + slot;
        if (slot >= x.tile_rows || row >= x.rows || column >= int(x.d.HS)) continue;
        T* to = dq + (b * x.d.Tq + x.query_of(row)) * x.d.q_stride + x.head_of(row, kh) * x.d.HS;
        store(to + column, Pack<T, 2>{from_acc<T>(four.v[2 * i] * x.scale),
                                      from_acc<T>(four.v[2 * i + 1] * x.scale)});
    }
}

// as attention_statistics_kernel, in this file's tiles
template <typename T>
__global__ void attention_hopper_statistics_kernel(const T* out, const float* lse,
                                                   const HopperOperands<T> x) {
    const unsigned slot = blockIdx.x * MMA_WARPS + threadIdx.x / 32, tile = slot / BACKWARD_ROWS;
    const size_t b = blockIdx.z, kh = blockIdx.y;
    const bool idle = slot % BACKWARD_ROWS >= x.tile_rows;
    const unsigned row = idle ? UINT_MAX : tile * x.tile_rows + slot % BACKWARD_ROWS;
    Pack<float, 2> y = row_statistics(out, lse, x, b, kh, row);
    const size_t at = x.tile_index(b, kh, int(tile)) * BACKWARD_ROWS + slot % BACKWARD_ROWS;
    if (threadIdx.x % 32 == 0) x.row_lse[at] = y.v[0], x.row_sums[at] = y.v[1];
}

// ----------------------------------------------------------------------------
// launchers

inline unsigned rows_in_use(const AttentionDims& d, int tile) { // whole groups
    unsigned group = unsigned(d.NH / d.NKV);
    return unsigned(tile) / group * group;
}

// Whether these kernels can run it: 16-byte rows, a group that fits in a tile.
template <typename T, typename... Ps> bool hopper_takes(const AttentionDims& d, const Ps*... ps) {
    return mma_takes<T>(d, ps...) && d.HS <= 128 && d.NH / d.NKV <= size_t(BACKWARD_ROWS);
}

// the scratch: dQ, statistics, turns, spans; what it needs in bytes
template <typename T>
size_t hopper_scratch(HopperOperands<T>* x, void* scratch, const AttentionDims& d) {
    size_t group = d.NH / d.NKV;
    if (d.HS > 128 || group > size_t(BACKWARD_ROWS)) return 0;
    size_t tiles = ceil_div(d.Tq * group, size_t(rows_in_use(d, BACKWARD_ROWS))),
           rows = d.B * d.NKV * tiles * BACKWARD_ROWS,
           key_tiles = ceil_div(d.Tk, size_t(HOPPER_KEYS));
    unsigned char* at = static_cast<unsigned char*>(scratch);
    size_t used = 0;
    auto take = [&](size_t bytes) {
        void* p = x ? at + used : nullptr;
        used += round_up(bytes, 256);
        return p;
    };
    void *dq = take(rows * round_up(d.HS, 64) * sizeof(float)),
         *turns = take(d.B * d.NKV * tiles * sizeof(int)), *lse = take(rows * sizeof(float)),
         *sums = take(rows * sizeof(float)), *keys = take(d.B * key_tiles * sizeof(Span)),
         *queries = take(d.B * tiles * sizeof(Span)), *docs = take(d.B * tiles * sizeof(Span));
    if (x) {
        x->dq = static_cast<float*>(dq), x->turns = static_cast<int*>(turns);
        x->row_lse = static_cast<float*>(lse), x->row_sums = static_cast<float*>(sums);
        x->key_spans = static_cast<Span*>(keys), x->query_spans = static_cast<Span*>(queries);
        x->doc_spans = static_cast<Span*>(docs);
        x->tiles = unsigned(tiles);
    }
    return used;
}

template <typename T>
HopperOperands<T> hopper_operands(const AttentionOperands<T>& x, int tile, void* scratch) {
    HopperOperands<T> y = {};
    static_cast<AttentionOperands<T>&>(y) = x;
    y.group = unsigned(x.d.NH / x.d.NKV), y.rows = unsigned(x.d.Tq) * y.group;
    hopper_scratch(&y, scratch, x.d);
    y.tile_rows = rows_in_use(x.d, tile);
    return y;
}

// (B,n,heads,HS): a box is 64 channels of `box_heads` heads of `box_n` queries or keys
template <typename T>
CUtensorMap heads_map(const T* x, const AttentionDims& d, size_t n, size_t heads, size_t stride,
                      unsigned box_heads, unsigned box_n) {
    return make_tensor_map(x, {d.HS, heads, n, d.B}, {d.HS, stride, n * stride},
                           {64, box_heads, box_n, 1}, true);
}
template <typename T> HopperMaps hopper_maps(const HopperOperands<T>& x, const T* out) {
    const AttentionDims& d = x.d;
    unsigned queries = x.tile_rows / x.group;
    HopperMaps m = {};
    m.q = heads_map(x.q, d, d.Tq, d.NH, d.q_stride, x.group, queries);
    m.k = heads_map(x.k, d, d.Tk, d.NKV, d.kv_stride, 1, HOPPER_KEYS);
    m.v = heads_map(x.v, d, d.Tk, d.NKV, d.kv_stride, 1, HOPPER_KEYS);
    m.out = heads_map(out, d, d.Tq, d.NH, d.NH * d.HS, x.group, queries);
    m.dout = x.dout ? heads_map(x.dout, d, d.Tq, d.NH, d.NH * d.HS, x.group, queries) : m.out;
    return m;
}

template <typename F> void pick_hopper_kernel(size_t HS, F f) {
    HS <= 32 ? f(Int<32>()) : HS <= 64 ? f(Int<64>()) : HS <= 96 ? f(Int<96>()) : f(Int<128>());
}

template <typename T>
void attention_hopper_forward(T* out, float* lse, const AttentionOperands<T>& operands,
                              void* scratch, cudaStream_t stream) {
    HopperOperands<T> x = hopper_operands(operands, FORWARD_ROWS, scratch);
    const AttentionDims& d = x.d;
    attention_spans(const_cast<Span*>(x.key_spans), x.k_positions, d.B, d.Tk, HOPPER_KEYS, 1,
                    stream);
    dim3 grid(unsigned(ceil_div(size_t(x.rows), size_t(x.tile_rows))), unsigned(d.NKV),
              unsigned(d.B));
    HopperMaps maps = hopper_maps(x, out);
    pick_hopper_kernel(d.HS, [&](auto D) {
        launch(attention_hopper_forward_kernel<T, D>, grid, HOPPER_THREADS, FORWARD_BYTES<D>,
               stream, maps, lse, x);
    });
}

template <typename T>
void attention_hopper_backward(T* dq, T* dk, T* dv, const AttentionOperands<T>& operands,
                               const T* out, const float* lse, void* scratch, cudaStream_t stream) {
    HopperOperands<T> x = hopper_operands(operands, BACKWARD_ROWS, scratch);
    const AttentionDims& d = x.d;
    unsigned heads = unsigned(d.NKV), B = unsigned(d.B);
    auto spans = [&](const Span* to, const int* from, size_t n, unsigned size, unsigned group) {
        attention_spans(const_cast<Span*>(to), from, d.B, n, size, group, stream);
    };
    spans(x.key_spans, x.k_positions, d.Tk, HOPPER_KEYS, 1);
    spans(x.query_spans, x.q_positions, d.Tq, x.tile_rows, x.group);
    spans(x.doc_spans, x.doc_start, d.Tq, x.tile_rows, x.group);
    launch(attention_hopper_statistics_kernel<T>,
           dim3(x.tiles * (BACKWARD_ROWS / MMA_WARPS), heads, B), MMA_THREADS, 0, stream, out, lse,
           x);
    size_t tiles = d.B * d.NKV * x.tiles;
    device_zero(x.dq, tiles * BACKWARD_ROWS * round_up(d.HS, 64) * sizeof(float), stream);
    device_zero(x.turns, tiles * sizeof(int), stream);
    HopperMaps maps = hopper_maps(x, out);
    dim3 grid(unsigned(ceil_div(d.Tk, size_t(HOPPER_KEYS))), heads, B);
    pick_hopper_kernel(d.HS, [&](auto D) {
        auto kernel = d.any_order ? attention_hopper_backward_kernel<T, D, true>
                                  : attention_hopper_backward_kernel<T, D, false>;
        launch(kernel, grid, HOPPER_THREADS, BACKWARD_BYTES<D>, stream, maps, dk, dv, x);
        launch(attention_hopper_dq_kernel<T>, dim3(x.tiles * 8 * CHUNKS<D>, heads, B), WARPGROUP, 0,
               stream, dq, CHUNKS<D>, x);
    });
}
#endif
