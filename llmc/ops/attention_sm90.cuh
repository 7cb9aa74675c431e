// attention_sm90.cuh - flash attention for Hopper: TMA, wgmma, specialised warps - arXiv:2407.08608
//   The operands, masks and results of attention_types.h, in bf16 and fp16, for head sizes of 8 to
//   256 in steps of 8. Backward ends at 128, and soft caps begin at 72: attention_sm80.cuh has the
//   others. A size without a kernel runs as the next larger one that has one; TMA pads with zeros.
//   Rows are (query, head) pairs (attention_rows.cuh). A tile has all heads of a group for as many
//   queries as fit. Where a group does not divide a tile, the tile's last rows are idle.
//   A block is three warpgroups. One gives its registers away and keeps the loads ahead; the other
//   two own 64 rows (forward) or 64 keys (backward) each. Tiles lie in chunks of 64 channels, 128
//   bytes a row, under the 128-byte swizzle, as TMA writes and wgmma reads them.
//   forward      One block stays on each SM and takes tiles of rows from a queue, longest first;
//                loads and stores run beside the tile that is computed. The softmax of one tile of
//                keys runs under P V of the tile before. The two warpgroups take turns with the
//                tensor cores: the exponentials of one run under the products of the other.
//   backward     A block owns keys and reads tiles of 128 rows (64 if a head has more than 64
//                channels). It computes S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are
//                operands in registers; only dS passes through shared memory, for dQ = dS K. dK and
//                dV stay in registers over all heads of the group. dQ is summed over blocks, in
//                float, in global memory, in the order of the blocks' indices: they must start in
//                it. GPUs do, but CUDA does not promise it; else the run ends with an error.
//   Contract: out, lse = in T.  dq, dk, dv = or += in T or float.  v has the layout of k, and there
//             is no soft cap with ALiBi (attention_kernels()).  A cap's tanh errs by 2^-11.
//             A row that sees nothing: out 0, lse -inf, gradients 0.  Bitwise repeatable.
//   Cost: products on tensor cores, 2 forward and 5 backward; an exp2 for each (query, key) seen in
//         each, and with a cap a tanh. Launches: 3 forward, 3 backward. Scratch: spans and turns of
//         the tiles, four numbers a row, and dQ in float.
//   Without nvcc this file declares nothing; the CPU's version is attention_cpu.cuh.
//   To copy: this file, attention_rows.cuh, attention_types.h, hopper.cuh, tensor_cores.h,
//            types.h and cuda_common.h.
#pragma once
#include "attention_rows.cuh"
#include "attention_types.h"
#include "cuda_common.h"
#include "hopper.cuh"
#include "tensor_cores.h"
#include "types.h"

namespace llmc {

#if LLMC_KERNELS

// ----------------------------------------------------------------------------
// the queue of the forward pass: tiles of rows, longest first
//   One block for each SM stays for the whole pass and claims one place of the queue after another.
//   It starts once, and its loads run ahead into its next tile. The tiles of a sequence are sorted
//   by the number of tiles of keys that they see, to a 255th of all. The same spans that decide
//   which tiles are skipped give this number, so windows and documents count at their true cost.
//   For as many heads as L2 holds, the queue has the longest tile of each head, then the next
//   longest of each, and so on: the tiles that run last are short. No result depends on which block
//   claims a tile.

constexpr unsigned QUEUE_THREADS = 256; // in the block that sorts a sequence

// A place of the queue stands for a key head and an index in the head's order. Heads take turns:
// index 0 of each of `together` heads, then index 1, and so on; then the next heads start.
struct HeadPlace {
    unsigned b, kh, at;
};
__device__ inline HeadPlace head_place(const AttentionDims& d, unsigned place, unsigned together,
                                       unsigned places_a_head) {
    const unsigned NKV = unsigned(d.NKV);
    const unsigned some = together * places_a_head;
    const unsigned first = place / some * together;
    const unsigned left = unsigned(d.B) * NKV - first;
    const unsigned here = left < together ? left : together;
    const unsigned head = first + place % some % here;
    return {head / NKV, head % NKV, place % some / here};
}

// A tile of rows of a key head, the first tile of keys that it may see, and the number of those
// that it sees; -1: the queue is empty.
struct RowTile {
    unsigned b, kh, tile;
    int first_keys, key_tiles;
};

// The queue of one pass, in global memory.
struct TileQueue {
    unsigned* claimed;       // the number of places taken
    RowTile* tiles;          // (B,tiles) of the first key head
    RowTile* order;          // (B,tiles) the same, those of each sequence longest first
    unsigned heads_together; // key heads, over all sequences, that take turns

    // Take the next place. All lanes of a warp must call it together.
    template <typename T> __device__ RowTile claim(const RowOperands<T>& x) const {
        unsigned place = 0;
        if (threadIdx.x % 32 == 0)
            place = atomicAdd(claimed, 1u);
        place = __shfl_sync(ALL_LANES, place, 0);
        if (place >= unsigned(x.d.B * x.d.NKV) * x.tiles)
            return {0, 0, 0, 0, -1};

        // All key heads of a sequence have the same order.
        const HeadPlace next = head_place(x.d, place, heads_together, x.tiles);
        RowTile rows = order[x.tile_at(next.b, next.at)];
        rows.kh = next.kh;
        return rows;
    }
};

// Sort the tiles of a sequence by counting; one block a sequence. All sequences have equally many
// tiles, so each is sorted by itself, and places interleave them.
template <typename T>
__global__ void __launch_bounds__(QUEUE_THREADS)
    attention_queue_kernel(const RowOperands<T> x, const TileQueue queue) {
    LLMC_SHARED(int, longer, QUEUE_THREADS); // the number of tiles of a length, then of longer too
    LLMC_SHARED(int, falls, 1);
    const unsigned b = blockIdx.x;
    const unsigned thread = threadIdx.x;
    const int key_tiles = int(x.key_tiles);
    const Span* keys = x.key_spans + b * x.key_tiles;
    RowTile* tiles = queue.tiles + x.tile_at(b, 0);
    longer[thread] = 0;
    if (thread == 0) *falls = 0;
    if (thread + b == 0) *queue.claimed = 0;
    __syncthreads();

    // In a whole context spans rise from tile to tile of keys.
    if (!keys_rise(x, b, thread, QUEUE_THREADS)) atomicAdd(falls, 1);
    __syncthreads();

    // Count the tiles of keys that each tile of rows sees. If spans rise, these follow each other:
    // behind those that end before the rows' first key, up to the first that begins too late.
    auto count = [&](auto holds) {
        int n = 0;
        for (int step = 1 << 30; step > 0; step /= 2) // it holds for the first n
            if (step <= key_tiles - n && holds(keys[n + step - 1])) n += step;
        return n;
    };
    auto length = [&](unsigned tile) { // the longest has QUEUE_THREADS - 1
        return unsigned(tiles[tile].key_tiles) * (QUEUE_THREADS - 1) / x.key_tiles;
    };
    for (unsigned tile = thread; tile < x.tiles; tile += QUEUE_THREADS) {
        const RowSpans rows = x.row_spans[x.tile_at(b, tile)];
        int first = 0, seen = 0;
        if (*falls == 0) {
            first = count([&](Span k) { return k.high < rows.first.low; });
            seen = count([&](Span k) { return k.low <= rows.last.high; });
            seen = seen > first ? seen - first : 0;
        }
        for (int i = 0; *falls > 0 && i < key_tiles; i++)
            seen += visibility(rows, keys[i]) != NOTHING;
        tiles[tile] = {b, 0, tile, first, seen};
        atomicAdd(longer + length(tile), 1);
    }
    __syncthreads();

    // Add up from the longest on, over distances of 1, 2, 4, ... lengths.
    for (unsigned step = 1; step < QUEUE_THREADS; step *= 2) {
        const int more = thread + step < QUEUE_THREADS ? longer[thread + step] : 0;
        __syncthreads();
        longer[thread] += more;
        __syncthreads();
    }

    // Give each tile a place behind all longer ones.
    for (unsigned tile = thread; tile < x.tiles; tile += QUEUE_THREADS)
        queue.order[x.tile_at(b, atomicAdd(longer + length(tile), -1) - 1)] = tiles[tile];
}

// Describe the tiles and fill the queue; reset the number of places taken.
template <typename T>
void make_queue(const TileQueue& queue, const RowOperands<T>& x, cudaStream_t stream) {
    attention_spans(x, stream);
    launch(attention_queue_kernel<T>, unsigned(x.d.B), QUEUE_THREADS, stream, x, queue);
}

// ----------------------------------------------------------------------------
// both passes

constexpr int WARPGROUP = 128; // threads
constexpr int HOPPER_THREADS = 3 * WARPGROUP;
constexpr int CONSUMERS = 2 * WARPGROUP;
LLMC_HD constexpr int hopper_keys(size_t HS) { return HS > 128 ? 64 : 128; } // in a tile
constexpr int FORWARD_ROWS = 128; // in a block's tile, with idle ones
constexpr int STAGES = 2;         // tiles that are loaded or in use
// A warp releases k before it masks, so positions of keys stay for twice as many tiles.
constexpr int POSITION_STAGES = 2 * STAGES;
// The number of blocks that run at once, one on each SM, and the part of L2 for their operands:
// values for an H100, and no sm_90 GPU has more SMs. The emulator's are small, to take every path.
#if defined(EMULATE)
constexpr unsigned BLOCKS_AT_ONCE = 4;
constexpr size_t L2_BYTES = 256 << 10;
#else
constexpr unsigned BLOCKS_AT_ONCE = 132;
constexpr size_t L2_BYTES = 40 << 20;
#endif
constexpr int CONSUMER_WARPS = CONSUMERS / 32;
enum { EVERY_CONSUMER = 1, TURN = 2 }; // named barriers; consumer warpgroup `me` has TURN + me

// TMA's maps of the operands. A box is one chunk of a tile.
struct HopperMaps {
    CUtensorMap q, k, v, out, dout;
};

// The operands of these kernels. turns (B,NKV,tiles) says who has added to a tile's dQ: 1 + the
// last such block of keys, by its place in their order.
template <typename T>
struct HopperOperands : RowOperands<T> {
    float* dq;               // (B,NKV,tiles) fragments, see fragment_at()
    TileQueue queue;         // the tiles of rows; backward uses heads_together alone
    bool first_keys_first;   // backward: blocks start with the first keys, or the last
};

template <int D> constexpr int CHUNKS = (D + 63) / 64; // of 64 channels, in a row of a tile
// The rows of a tile that a block of keys reads: 128 rows of one chunk, or 64 rows of two. Both are
// two parts of 64 x 64, so each warpgroup computes one part of dQ.
template <int D> constexpr int BACKWARD_ROWS = D > 64 ? 64 : 128;
constexpr int PARTS = 2;

// ----------------------------------------------------------------------------
// tiles in shared memory: chunks of 64 channels, in each 128 bytes a row

// Tile i goes to stage i % STAGES, whose barriers are then in phase i / STAGES. A consumer waits
// for the tile's own phase; the producer waits for the phase before, hence its ^ 1.
__device__ inline int ring_stage(int i) { return i % STAGES; }
__device__ inline uint32_t ring_parity(int i) { return uint32_t(i / STAGES) & 1; }

// The producer's note: a tile's number, -1 after the last one, and whether all of it is visible.
struct TileNote {
    int tile, all;
};

// Masks and softmax take parts of 8 columns; wgmma() takes the registers of n parts as one array.
template <int n, int N>
__device__ __forceinline__ float (&flat(float (&x)[N][4], int first = 0))[4 * n] {
    return reinterpret_cast<float(&)[4 * n]>(x[first]);
}

// Call it after a wait: it keeps the compiler from reading the accumulators x earlier.
template <int N>
__device__ __forceinline__ void hold(float (&x)[N][4]) {
    #pragma unroll
    for (float& y : flat<N>(x))
        keep(y);
}

// The descriptor of the operand `bytes` further on, in units of 16 bytes. An address stays in the
// low word, so NARROW adds to that word alone: fewer instructions where ptxas keeps descriptors in
// a thread's registers (forward), more where it keeps them in uniform registers (backward).
template <bool NARROW>
__device__ __forceinline__ uint64_t further(uint64_t descriptor, uint32_t bytes) {
    if (!NARROW) return descriptor + bytes / 16;
    return (descriptor & 0xffffffff00000000) | uint32_t(uint32_t(descriptor) + bytes / 16);
}

// Issue s (64, 8 NT) = 64 rows of a times the 8 NT rows of b, over D channels. A chunk has a_rows
// or b_rows rows.
template <typename T, int D, bool NARROW, int NT>
__device__ __forceinline__ void issue_rows_times_rows(float (&s)[NT][4], uint32_t a, int a_rows,
                                                      uint32_t b, int b_rows) {
    // Advancing a descriptor is cheaper than building the next one.
    const uint64_t a_at = descriptor(a, 16, 1024);
    const uint64_t b_at = descriptor(b, 16, 1024);
    wg_fence();
    #pragma unroll
    for (int k = 0; k < D / 16; k++)
        // 16 channels are 32 bytes of a chunk's row. The first product overwrites s.
        wgmma<T, 8 * NT, 0, 0>(flat<NT>(s),
                               further<NARROW>(a_at, k / 4 * a_rows * 128 + k % 4 * 32),
                               further<NARROW>(b_at, k / 4 * b_rows * 128 + k % 4 * 32), k != 0);
    wg_commit();
}

// Issue sum (64, 8 CT) += p (64, 16 KT) times 16 KT rows of b. A chunk has b_rows rows.
template <typename T, bool NARROW, int KT, int CT>
__device__ __forceinline__ void issue_scores_times_rows(float (&sum)[CT][4],
                                                        const uint32_t (&p)[KT][4], uint32_t b,
                                                        int b_rows) {
    const uint64_t b_at = descriptor(b, b_rows * 128, 1024);
    constexpr int PART = CT % 16 == 0 ? 16 : 8; // a product has 128 channels, or 64
    wg_fence();
    #pragma unroll
    for (int k = 0; k < KT; k++)
        #pragma unroll
        for (int c = 0; c < CT; c += PART)
            // b is MN-major: one product takes 16 rows of 128 bytes, 2048 bytes of each chunk.
            wgmma_rs<T, 8 * PART, 1>(flat<PART>(sum, c), p[k],
                                     further<NARROW>(b_at, c / 8 * b_rows * 128 + k * 2048), 1);
    wg_commit();
}

// Write 16 rows of a tile from `row` on. p is a product's result, packed by pack_scores().
template <int KT>
__device__ void put_rows(unsigned char* tile, int rows, int row, const uint32_t (&p)[KT][4]) {
    int lane = threadIdx.x % 32;
    int at = row + lane % 16;
    #pragma unroll
    for (int k = 0; k < KT; k++) {
        // Swizzle by hand as TMA does, because TMA or wgmma will read the tile.
        int chunk = 2 * k + lane / 16; // of 8 channels
        stmatrix_x4(tile + chunk / 8 * rows * 128 + at * 128 + ((chunk % 8) ^ (at & 7)) * 16, p[k]);
    }
}

// Begin a block: initialise barriers that follow each other, by the numbers of their arrivals, and
// prefetch maps. The block's barrier comes next.
template <int... ARRIVALS, typename... Maps>
__device__ __forceinline__ void begin_block(uint64_t* barriers, const Maps&... maps) {
    if (threadIdx.x == 0) {
        (mbar_init(barriers++, ARRIVALS), ...);
        mbar_init_fence();
    }
    if (threadIdx.x == 32) (tma_prefetch(&maps), ...);
}

// Load a tile by TMA, a chunk of channels after another: the rows in the box from a head and a
// query or key on. A chunk has `rows` rows.
template <int C>
__device__ __forceinline__ void load_chunks(unsigned char* tile, int rows, const CUtensorMap* map,
                                            uint64_t* full, size_t head, size_t from, size_t b) {
    for (int c = 0; c < C; c++)
        tma_load_4d(tile + c * rows * 128, map, full, 64 * c, int(head), int(from), int(b));
}

// Run the roles of a block. A role has a whole warpgroup, since all four warps must execute
// setmaxnreg and wgmma. The first one gives registers away, of 168 that a launch gives to each
// thread, and two of its warps work.
template <typename Block>
__device__ __forceinline__ void run_roles(const Block& block) {
    const int role = __shfl_sync(ALL_LANES, int(threadIdx.x / WARPGROUP), 0);
    if (role > 0) {
        regs_inc<Block::MANY_REGISTERS>();
        return block.consume(role - 1);
    }
    regs_dec<Block::FEW_REGISTERS>();
    const int warp = __shfl_sync(ALL_LANES, int(threadIdx.x / 32), 0);
    if (warp == 0) block.produce();
    if (warp == 1) block.hand_out();
}

// Arrive once for a warp. All its lanes have passed their wait, so it has read what is guarded.
__device__ inline void release(uint64_t* barrier) {
    if (threadIdx.x % 32 == 0)
        mbar_arrive(barrier);
}

// ----------------------------------------------------------------------------
// forward: a producer warp, a warp that stores out, two consumer warpgroups of 64 rows each
//
//   barrier          arrivals a phase                     who waits, for tile n of rows, i of keys
//   q_full           1: producer, with q's bytes (none    all others: phase n, before they read
//                       after the last tile)                which tile of rows it is
//   q_free           9: consumer warps, the last Q K^T    producer: phase n - 1, before it loads q
//                       is done; storer, it has read        again
//   out_full         8: consumer warps, their rows of     storer: phase n
//                       out are in shared memory
//   out_free         1: storer, TMA has read them         consumers: phase n - 1, before they write
//   k_full[stage]    1: producer, with k's bytes          consumers: phase i / STAGES, before Q K^T
//   v_full[stage]    1: producer, with v's bytes          consumers: phase i / STAGES, before P V
//   k_free[stage]    8: consumer warps, Q K^T is done     producer: phase i / STAGES - 1, before
//   v_free[stage]    8: consumer warps, P V is done         loading into the stage again
//   TURN + me        256: the other warpgroup, when its   warpgroup `me`, before it issues its own
//                       products are issued, and `me`
//
// n and i count all tiles of the block, so rings and turns continue from tile to tile. Where out
// overwrites q, the producer waits for out_free, phase n - 1, and consumers for q_free, phase n.

// A block of the forward pass: its operands, its shared memory, and the roles of its warps. At 128
// and at 256 channels it takes 192 KB, so an SM has one block.
template <typename T, int D, bool CAPPED> struct ForwardBlock {
    static constexpr int M = FORWARD_ROWS, N = hopper_keys(D), C = CHUNKS<D>;
    static constexpr int FEW_REGISTERS = 40, MANY_REGISTERS = 232; // 40 + 2 * 232 = 3 * 168
    static constexpr int Q_BYTES = C * M * 128, K_BYTES = C * N * 128; // of a tile
    static constexpr bool OUT_IN_Q = D > 128; // there is no room for both: out overwrites q
    static constexpr size_t BYTES = (OUT_IN_Q ? 1 : 2) * Q_BYTES + 2 * STAGES * K_BYTES;
    const HopperMaps& maps;
    const HopperOperands<T>& x;
    float* lse;                              // (B,NH,Tq)
    RowTile* q_rows;                         // the tile of rows that q has
    int* key_positions;                      // (POSITION_STAGES, N) for tiles that need a mask
    TileNote* notes;                         // (STAGES)
    // The barriers follow each other from q_full on.
    uint64_t* q_full;
    uint64_t* q_free = q_full + 1;
    uint64_t* out_full = q_free + 1;
    uint64_t* out_free = out_full + 1;
    uint64_t* k_full = out_free + 1;         // (STAGES)
    uint64_t* v_full = k_full + STAGES;      // (STAGES)
    uint64_t* k_free = v_full + STAGES;      // (STAGES)
    uint64_t* v_free = k_free + STAGES;      // (STAGES)
    unsigned char* q = dynamic_shared();     // (C, M, 64)
    unsigned char* out = OUT_IN_Q ? q : q + Q_BYTES; // (C, M, 64)
    unsigned char* k = out + Q_BYTES;        // (STAGES, C, N, 64)
    unsigned char* v = k + STAGES * K_BYTES; // (STAGES, C, N, 64)

    // Load every tile of keys that a tile of rows sees, up to STAGES ahead. i counts these tiles.
    __device__ __forceinline__ void load_keys(const RowTile& rows, int& i, bool leader) const {
        const int lane = threadIdx.x % 32;
        const size_t b = rows.b;
        const KeyTiles<T, N> look = {x, b, x.row_spans[x.tile_at(b, rows.tile)]};
        TileWalk walk = {int(x.key_tiles), rows.first_keys - 32};
        for (const int end = i + rows.key_tiles; i < end; i++) {
            // The walk finds as many tiles as the queue has counted.
            bool all = false;
            const int stage = ring_stage(i);
            const int tile = walk.next(all, look);

            // One barrier covers all chunks of a tile.
            auto load = [&](unsigned char* to, const CUtensorMap* map, uint64_t* full) {
                mbar_expect_tx(full + stage, K_BYTES);
                load_chunks<C>(to + stage * K_BYTES, N, map, full + stage, rows.kh,
                               size_t(tile) * N, b);
            };

            // Read the positions that a mask will need while the stage is still in use.
            const bool masked = !all || x.slopes;
            int positions[N / 32];
            for (int j = 0; masked && j < N / 32; j++)
                positions[j] = x.position_of(b, size_t(tile) * N + 32 * j + lane);

            // Wait until the stage is free again. The first STAGES waits return at once.
            mbar_wait(k_free + stage, ring_parity(i) ^ 1);
            for (int j = 0; masked && j < N / 32; j++)
                key_positions[i % POSITION_STAGES * N + 32 * j + lane] = positions[j];
            __syncwarp();
            if (leader) {
                notes[stage] = {tile, all};

                // Load k at once, and v when its stage is free: P V runs one tile later than Q K^T.
                load(k, &maps.k, k_full);
                mbar_wait(v_free + stage, ring_parity(i) ^ 1);
                load(v, &maps.v, v_full);
            }

            __syncwarp(); // all lanes vote in the walk
        }
    }

    // The producer: claim tiles of rows until none is left, and load q and the keys of each.
    __device__ __forceinline__ void produce() const {
        const bool leader = elect_one();
        for (int n = 0, i = 0;; n++) {
            // Claim the next tile while the tile before is still being computed.
            const RowTile rows = x.queue.claim(x);

            // Load q when the last scores of the tile before are done, and out is not in its place.
            if (leader) {
                mbar_wait(OUT_IN_Q ? out_free : q_free, (n & 1) ^ 1);
                *q_rows = rows;
                if (rows.key_tiles < 0) {
                    mbar_arrive(q_full);
                } else {
                    // Idle rows are not loaded and do not count as bytes.
                    mbar_expect_tx(q_full, C * 128 * x.tile_rows);
                    load_chunks<C>(q, M, &maps.q, q_full, rows.kh * x.group,
                                   rows.tile * (x.tile_rows / x.group), rows.b);
                }
            }
            __syncwarp();

            // Load the keys into the ring, as its stages become free.
            if (rows.key_tiles < 0) return;
            load_keys(rows, i, leader);
        }
    }

    // The storer: store out, tile after tile. One thread does it.
    __device__ __forceinline__ void hand_out() const {
        if (!elect_one()) return;
        for (int n = 0;; n++) {
            // Read which rows to store. Then the producer may overwrite this with the next tile.
            mbar_wait(q_full, n & 1);
            const RowTile rows = *q_rows;
            if (rows.key_tiles < 0) return;
            mbar_arrive(q_free);

            // Store the tile. Idle rows are outside the box.
            mbar_wait(out_full, n & 1);
            for (int c = 0; c < C; c++)
                tma_store_4d(&maps.out, out + c * M * 128, 64 * c, int(rows.kh * x.group),
                             int(rows.tile * (x.tile_rows / x.group)), int(rows.b));
            bulk_commit();
            // TMA must have read it before the next tile's out is written, or the block ends.
            bulk_wait_read<0>();
            mbar_arrive(out_free);
        }
    }

    // Divide by the sums of exponentials. Write lse, and put out into shared memory for the storer.
    __device__ __forceinline__ void epilogue(const RowTile& rows, int n, int my_row,
                                             float (&sum)[8 * C][4], const float (&row_max)[2],
                                             const float (&row_sum)[2]) const {
        const int lane = threadIdx.x % 32;
        // Four lanes share a row: all of them join in the sum, and the first one writes lse.
        float inverse[2];
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            float total = row_total(row_sum[i]);
            bool seen = total != 0; // true for a NaN too
            inverse[i] = seen ? 1 / total : 0;
            unsigned slot = unsigned(my_row + 8 * i + lane / 4);
            unsigned row = rows.tile * x.tile_rows + slot;
            if (lane % 4 == 0 && slot < x.tile_rows && row < x.rows)
                lse[x.lse_at(rows.b, x.head_of(row, rows.kh), x.query_of(row))] =
                    seen ? row_max[i] * LN2 + logf(total) : -INFINITY;
        }

        // Write out to shared memory, where TMA can read it.
        scale_rows(sum, inverse);
        uint32_t o[4 * C][4];
        pack_scores<T>(o, sum);
        // Wait until nobody reads q, or for the store of the tile before, which ended long ago.
        if (OUT_IN_Q) mbar_wait(q_free, n & 1);
        else mbar_wait(out_free, (n & 1) ^ 1);
        put_rows(out, M, my_row, o);
        fence_async_smem();
        __syncwarp();
        release(out_full);
    }

    // Compute one tile of rows, 64 rows of out in each warpgroup. S = Q K^T of one tile of keys
    // runs together with P V of the tile before. i counts tiles of keys, n tiles of rows.
    __device__ __forceinline__ void compute(const RowTile& rows, int me, int n, int& i) const {
        // Addresses point at the warpgroup's 64 rows; my_row is the first of the warp's 16.
        const int my_row = 64 * me + 16 * (threadIdx.x / 32 % 4); // in the tile
        const uint32_t my_q = smem_u32(q) + uint32_t(64 * me * 128);
        const uint32_t k_at = smem_u32(k);
        const uint32_t v_at = smem_u32(v);
        const float scale = x.factor;
        // A thread holds two rows of s (64, N) and of out (64, 64 C), 8 apart among its warp's 16.
        float s[N / 8][4], sum[8 * C][4] = {};
        float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {}, rescale[2];
        uint32_t p[N / 16][4];

        // Find what this thread's two rows see.
        const unsigned my_first = unsigned(my_row) + threadIdx.x % 32 / 4;
        const KeyRange* my_ranges = x.tile_ranges(rows.b, rows.tile) + my_first;
        const KeyRange ranges[2] = {my_ranges[0], my_ranges[8]};

        // Mask a tile's scores and add them to the running softmax.
        auto softmax = [&](int i, bool all) { // for tile i; p replaces s
            float factor = scale;
            const int* positions = key_positions + i % POSITION_STAGES * N;
            if (CAPPED) cap_scores(s, x.cap_factor);
            if (!CAPPED && x.slopes) {
                const unsigned row = rows.tile * x.tile_rows + my_first;
                const float slopes[2] = {x.slope(x.head_of(row, rows.kh)) * LOG2E,
                                         x.slope(x.head_of(row + 8, rows.kh)) * LOG2E};
                slope_scores(s, ranges, slopes, positions, scale);
                factor = 1;
            }
            if (!all) mask_scores(s, ranges, positions);
            online_softmax(s, row_max, row_sum, rescale, factor);
        };

        // Call it when Q K^T of tile i is done: release its keys, and after the last tile q.
        const int end = i + rows.key_tiles;
        auto release_scores = [&](int stage) {
            release(k_free + stage);
            if (i + 1 == end) release(q_free);
        };

        // Rows that see no tile go straight to the end.
        if (rows.key_tiles == 0) {
            __syncwarp(); // every lane has read q_rows
            release(q_free);
        } else {
            // Compute the first tile's scores.
            int before = ring_stage(i); // stage of the tile that p belongs to
            mbar_wait(k_full + before, ring_parity(i));
            bool all = notes[before].all;
            bar_sync(TURN + me, CONSUMERS);
            issue_rows_times_rows<T, D, true>(s, my_q, M, k_at + before * K_BYTES, N);
            bar_arrive(TURN + 1 - me, CONSUMERS);
            wg_wait<0>();
            hold(s);
            release_scores(before);
            softmax(i, all);
            pack_scores<T>(p, s);

            while (++i < end) {
                const int stage = ring_stage(i);
                // Wait for this tile's keys, and for the values of the tile before.
                mbar_wait(k_full + stage, ring_parity(i));
                mbar_wait(v_full + before, ring_parity(i - 1));
                all = notes[stage].all;

                // When it is this warpgroup's turn, issue Q K^T of it and P V of the tile before.
                bar_sync(TURN + me, CONSUMERS);
                issue_rows_times_rows<T, D, true>(s, my_q, M, k_at + stage * K_BYTES, N);
                issue_scores_times_rows<T, true>(sum, p, v_at + before * K_BYTES, N);
                bar_arrive(TURN + 1 - me, CONSUMERS);

                // Run this tile's softmax while the tensor cores compute P V.
                wg_wait<1>();
                hold(s);
                release_scores(stage);
                softmax(i, all);
                never(row_sum[0] < 0); // keeps the wait below after the exponentials

                // Rescale the sums to the new maximum.
                wg_wait<0>();
                hold(sum);
                release(v_free + before);
                scale_rows(sum, rescale);
                pack_scores<T>(p, s);
                before = stage;
            }

            // Add P V of the last tile.
            mbar_wait(v_full + before, ring_parity(i - 1));
            issue_scores_times_rows<T, true>(sum, p, v_at + before * K_BYTES, N);
            wg_wait<0>();
            hold(sum);
            release(v_free + before);
        }
        epilogue(rows, n, my_row, sum, row_max, row_sum);
    }

    // A consumer: compute the tiles of rows that the producer claims, one after the other.
    __device__ __forceinline__ void consume(int me) const {
        if (me == 1) bar_arrive(TURN, CONSUMERS); // warpgroup 0 has the first turn
        for (int n = 0, i = 0;; n++) {
            mbar_wait(q_full, n & 1);
            const RowTile rows = *q_rows;
            if (rows.key_tiles < 0) break;
            compute(rows, me, n, i);
        }
        if (me == 0) bar_sync(TURN, CONSUMERS); // takes the last turn that warpgroup 1 gave
    }
};

// Forward. The grid is one block for each SM; a block claims its tiles from x.queue.
template <typename T, int D, bool CAPPED>
__global__ void __launch_bounds__(HOPPER_THREADS, 1)
    attention_hopper_forward_kernel(const __grid_constant__ HopperMaps maps, float* lse,
                                    const HopperOperands<T> x) {
#if HOPPER_PASS
    LLMC_SHARED(RowTile, q_rows, 1);
    LLMC_SHARED(int, key_positions, POSITION_STAGES * hopper_keys(D));
    LLMC_SHARED(TileNote, notes, STAGES);
    LLMC_SHARED(uint64_t, barriers, 4 + 4 * STAGES);
    const ForwardBlock<T, D, CAPPED> block = {maps, x, lse, q_rows, key_positions, notes, barriers};

    // Arrivals as in the table above: those of q, of out, of the full and of the free k and v.
    constexpr int W = CONSUMER_WARPS;
    begin_block<1, W + 1, W, 1, 1, 1, 1, 1, W, W, W, W>(barriers, maps.q, maps.k, maps.v, maps.out);
    __syncthreads();

    run_roles(block);
#else
    needs_sm90a();
#endif
}

// ----------------------------------------------------------------------------
// backward: a producer warp, a warp that adds to dQ, two consumer warpgroups of 64 keys each
//
//   barrier             arrivals a phase                      who waits, for tile i
//   k_full              1: producer, with k's and v's bytes   consumers, once
//   q_full[stage]       1: producer, with q's and lse's       consumers: phase i / STAGES, before
//                          bytes, none after the last           S^T = K Q^T
//   dout_full[stage]    1: producer, with dout's and D's      consumers: phase i / STAGES, before
//                          bytes                                dP^T = V dO^T
//   q_free[stage]       8: consumer warps, dS^T Q is done     producer: phase i / STAGES - 1, when
//   dout_free[stage]    8: consumer warps, P^T dO is done       it loads into the stage again
//   dq_full             8: consumer warps, their part of      adder: phase i
//                          dS K is in shared memory
//   dq_free             1: adder, the tile's part has left    consumers: phase i - 1, before they
//                          shared memory                        write the next part
//   EVERY_CONSUMER      256: consumers, their keys' dS^T is   consumers, before dS K over all keys
//                          in shared memory

// The index of a thread's four numbers among dQ's fragments. For each 8 columns j of a part, and
// for each part, the threads of a warpgroup follow each other with four numbers each: two of row 16
// warp + lane / 4, and two of the row 8 below.
__device__ inline size_t fragment_at(int j, int part, int thread) {
    return (size_t(j) * PARTS * WARPGROUP + size_t(part) * WARPGROUP + thread) * 4;
}

// A block of the backward pass: its operands, its shared memory (192 KB at 64 and at 128 channels),
// and the roles of its warps.
template <typename T, int D, bool CAPPED> struct BackwardBlock {
    static constexpr int M = BACKWARD_ROWS<D>, N = hopper_keys(D), C = CHUNKS<D>;
    static constexpr int FEW_REGISTERS = 24, MANY_REGISTERS = 240; // 24 + 2 * 240 = 3 * 168
    static constexpr int K_BYTES = C * N * 128, Q_BYTES = C * M * 128; // of a tile
    static constexpr int DS_BYTES = N * M * 2, DQ_BYTES = PARTS * 64 * 64 * int(sizeof(float));
    static constexpr size_t BYTES = 2 * K_BYTES + STAGES * (2 * Q_BYTES + DS_BYTES) + DQ_BYTES;
    const HopperMaps& maps;
    const HopperOperands<T>& x;
    const Results<T>&dk, &dv;
    size_t b, kh;                                 // the key head
    int at;                                       // the block's place among those of the head
    float *tile_lse, *tile_sums;                  // (STAGES, M)
    KeyRange* tile_ranges;                        // (STAGES, M) of the rows
    int* key_positions;                           // (N)
    TileNote* notes;                              // (STAGES)
    // The barriers follow each other from k_full on.
    uint64_t* k_full;
    uint64_t* dq_full = k_full + 1;
    uint64_t* dq_free = dq_full + 1;
    uint64_t* q_full = dq_free + 1;               // (STAGES)
    uint64_t* dout_full = q_full + STAGES;        // (STAGES)
    uint64_t* q_free = dout_full + STAGES;        // (STAGES)
    uint64_t* dout_free = q_free + STAGES;        // (STAGES)
    unsigned char* k = dynamic_shared();          // (C, N, 64)
    unsigned char* v = k + K_BYTES;               // (C, N, 64)
    unsigned char* q = v + K_BYTES;               // (STAGES, C, M, 64)
    unsigned char* dout = q + STAGES * Q_BYTES;   // (STAGES, C, M, 64)
    unsigned char* ds = dout + STAGES * Q_BYTES;  // (STAGES, M / 64, N, 64) dS^T
    float* dq = reinterpret_cast<float*>(ds + STAGES * DS_BYTES); // (PARTS, 64, 64) fragments

    // The tile of keys of the block at a place. Blocks start in the order of places, which is the
    // order in which a tile's dQ is summed.
    __device__ int key_tile(int at) const {
        return x.first_keys_first ? at : int(x.key_tiles) - 1 - at;
    }
    __device__ size_t key0() const { return size_t(key_tile(at)) * N; }

    // Walk to the next tile of rows that sees the block's keys. Producer and adder walk the same
    // tiles in the same order.
    __device__ __forceinline__ int next_rows(TileWalk& walk, bool& all) const {
        return walk.next(all, [&](int tile) {
            const Span keys = x.key_spans[b * x.key_tiles + key_tile(at)];
            const Visibility v = visibility(x.row_spans[x.tile_at(b, tile)], keys);
            return v == ALL && key0() + N > x.d.Tk ? SOME : v;
        });
    }

    // The producer: load k and v, then every tile of rows that sees them, up to STAGES ahead.
    __device__ __forceinline__ void produce() const {
        const bool leader = elect_one();
        if (leader) {
            // One barrier covers k and v, which are loaded once and stay.
            mbar_expect_tx(k_full, 2 * K_BYTES);
            load_chunks<C>(k, N, &maps.k, k_full, kh, key0(), b);
            load_chunks<C>(v, N, &maps.v, k_full, kh, key0(), b);
        }

        // Walk the tiles. A note of -1 ends them.
        TileWalk walk = {int(x.tiles)};
        for (int i = 0, tile = 0; tile >= 0; i++) {
            bool all = false;
            const int stage = ring_stage(i);
            tile = next_rows(walk, all);
            // Load the numbers of all rows too, idle or not: lse and ranges with q, D with dout.
            const size_t rows_at = x.tile_at(b, kh, tile) * M;
            auto load = [&](unsigned char* to, const CUtensorMap* map, uint64_t* full,
                            unsigned more_bytes) {
                mbar_expect_tx(full + stage, C * 128 * x.tile_rows + more_bytes);
                load_chunks<C>(to + stage * Q_BYTES, M, map, full + stage, kh * x.group,
                               tile * (x.tile_rows / x.group), b);
            };
            auto load_numbers = [&](auto* to, const auto* from, uint64_t* full) {
                bulk_load_1d(to + stage * M, from, M * sizeof(*to), full + stage);
            };

            // One lane issues the loads of a stage when the stage is free.
            if (leader) {
                mbar_wait(q_free + stage, ring_parity(i) ^ 1);
                notes[stage] = {tile, all};
                if (tile < 0) {
                    mbar_arrive(q_full + stage);
                } else {
                    load(q, &maps.q, q_full, M * (sizeof(float) + sizeof(KeyRange)));
                    load_numbers(tile_lse, x.row_lse + rows_at, q_full);
                    load_numbers(tile_ranges, x.tile_ranges(b, tile), q_full);
                    mbar_wait(dout_free + stage, ring_parity(i) ^ 1);
                    load(dout, &maps.dout, dout_full, M * sizeof(float));
                    load_numbers(tile_sums, x.row_sums + rows_at, dout_full);
                }
            }
            __syncwarp();
        }
    }

    // The adder: add the block's part of each tile's dQ to global memory, in the order of blocks.
    __device__ __forceinline__ void hand_out() const {
        const bool leader = elect_one();
        const int lane = threadIdx.x % 32;

        // Its turn in a tile is 1 + the last block before it that also adds to the tile, or 0.
        // Where positions rise from key to key, a tile's visible keys are an interval: that is the
        // next block or none. Else look further, 32 blocks at a time.
        const Span* keys = x.key_spans + b * x.key_tiles;
        const bool rises = __ballot_sync(ALL_LANES, !keys_rise(x, b, lane, 32)) == 0;
        auto turn_in = [&](int tile) {
            const RowSpans rows = x.row_spans[x.tile_at(b, tile)];
            for (int n = at; n > 0; n -= 32) {
                const int other = n - 1 - lane; // the nearest in lane 0
                bool adds = other >= 0 && visibility(rows, keys[key_tile(other)]) != NOTHING;
                const unsigned found = __ballot_sync(ALL_LANES, adds);
                if (found) return n + 1 - __ffs(int(found));
                if (rises) break;
            }
            return 0;
        };

        // Walk the tiles, and know the next one's turn early.
        TileWalk walk = {int(x.tiles)};
        bool all = false;
        int tile = -1, turn = 0;
        auto next = [&] {
            tile = next_rows(walk, all);
            if (tile >= 0) turn = turn_in(tile);
        };
        next();
        for (int i = 0; tile >= 0; i++) {
            // Add when it is this block's turn. The first block stores instead, so that nobody has
            // to zero dQ. The consumers may write the next part as soon as this one is read.
            const size_t sums = x.tile_at(b, kh, tile);
            const int passed = at + 1 - turn;
            if (leader) {
                float* to = x.dq + sums * PARTS * 64 * 64;
                mbar_wait(dq_full, i & 1);
                // The blocks before this one already run (see the header), so the wait ends.
                wait_for_turn(x.turns + sums, turn);
                if (turn == 0)
                    bulk_store_1d(to, dq, DQ_BYTES);
                else
                    bulk_reduce_add_f32(to, dq, DQ_BYTES);
                bulk_commit();
                bulk_wait_read<0>();
                mbar_arrive(dq_free);
            }
            __syncwarp();

            // Find the next turn while the sum is on its way: it must have reached global memory
            // before this turn is passed on.
            next();
            if (leader) {
                bulk_wait<0>();
                pass_turn(x.turns + sums, passed);
            }
            __syncwarp();
        }
    }

    // Compute this warpgroup's part of dQ = dS K, and dK += dS^T Q, for tile i.
    __device__ __forceinline__ void sum_tile(float (&sum_k)[8 * C][4], float (&sum_v)[8 * C][4],
                                             const uint32_t (&ds_operand)[M / 16][4], int i,
                                             int me) const {
        // Groups complete in order; the number in each wait is how many may still be in flight.
        const int stage = ring_stage(i);
        const int thread = threadIdx.x % WARPGROUP;
        // Share dQ out by channels, or by rows where there is only one chunk of channels.
        const uint32_t my_channels = smem_u32(k) + uint32_t(C == 2 ? me * N * 128 : 0);
        const uint32_t my_ds = smem_u32(ds) + uint32_t(C == 2 ? 0 : me * N * 128);

        // Issue dS K over all keys of the tile: (64, 64), this warpgroup's rows or its channels.
        float part[8][4];
        wg_fence();
        #pragma unroll
        for (int n = 0; n < N / 16; n++)
            // Both operands are MN-major: dS^T and K are read as stored, the sum is over keys.
            wgmma<T, 64, 1, 1>(flat<8>(part),
                               descriptor(my_ds + stage * DS_BYTES + n * 2048, 16, 1024),
                               descriptor(my_channels + n * 2048, 16, 1024), n != 0);
        wg_commit();

        // Wait for P^T dO, which was issued before; then issue dS^T Q.
        wg_wait<1>();
        hold(sum_v);
        release(dout_free + stage);
        issue_scores_times_rows<T, false>(sum_k, ds_operand, smem_u32(q) + stage * Q_BYTES, M);

        // Hand this part of dQ to the adder.
        wg_wait<1>();
        hold(part);
        // Wait until the adder has read the part of the tile before.
        mbar_wait(dq_free, (i & 1) ^ 1);
        #pragma unroll
        for (int j = 0; j < 8; j++)
            store(dq + fragment_at(j, me, thread),
                  Pack<float, 4>{part[j][0], part[j][1], part[j][2], part[j][3]});
        fence_async_smem();
        __syncwarp();
        release(dq_full);
        wg_wait<0>();
        hold(sum_k);
        release(q_free + stage);
    }

    // A consumer: compute dK and dV of 64 keys, and this warpgroup's part of the tiles' dQ.
    __device__ __forceinline__ void consume(int me) const {
        const int lane = threadIdx.x % 32;
        // Addresses point at the warpgroup's 64 keys; my_key is the first of the warp's 16.
        const int my_key = 64 * me + 16 * (threadIdx.x / 32 % 4); // in the tile
        const uint32_t my_k = smem_u32(k) + uint32_t(64 * me * 128);
        const uint32_t my_v = smem_u32(v) + uint32_t(64 * me * 128);
        const uint32_t q_at = smem_u32(q);
        const uint32_t dout_at = smem_u32(dout);
        // dK and dV (64, 64 C) stay in registers over all tiles.
        float sum_k[8 * C][4] = {}, sum_v[8 * C][4] = {};
        mbar_wait(k_full, 0);
        for (int i = 0;; i++) {
            // Compute S^T = K Q^T and dP^T = V dO^T: keys are rows, (query, head) pairs columns.
            const int stage = ring_stage(i);
            float s[M / 8][4], dp[M / 8][4];
            mbar_wait(q_full + stage, ring_parity(i));
            const TileNote note = notes[stage];
            if (note.tile < 0) break;
            issue_rows_times_rows<T, D, false>(s, my_k, N, q_at + stage * Q_BYTES, M);
            mbar_wait(dout_full + stage, ring_parity(i));
            issue_rows_times_rows<T, D, false>(dp, my_v, N, dout_at + stage * Q_BYTES, M);

            // Compute P^T = exp2(S^T - lse), and P^T cap' in place of s, while dP^T is computed.
            wg_wait<1>();
            hold(s);
            float factor = x.factor;
            if (CAPPED) cap_scores(s, x.cap_factor);
            if (!note.all || (!CAPPED && x.slopes)) {
                // To save registers, read the keys' positions each time: most tiles need no mask.
                const int* positions = key_positions + my_key + lane / 4;
                const int keys[2] = {positions[0], positions[8]};
                const KeyRange* ranges = tile_ranges + stage * M;
                if (!CAPPED && x.slopes) {
                    slope_columns(s, x, kh, note.tile * x.tile_rows, keys, ranges);
                    factor = 1;
                }
                mask_columns(s, keys, ranges);
            }
            float exact_p[M / 8][4];
            #pragma unroll
            for (int n = 0; n < M / 8; n++) {
                // lse of the two columns that this thread has in part n.
                Pack<float, 2> l = load<2>(tile_lse + stage * M + 8 * n + 2 * (lane % 4));
                #pragma unroll
                for (int e = 0; e < 4; e++) {
                    exact_p[n][e] = ex2(s[n][e] * factor - l.v[e % 2]);
                    s[n][e] = through_cap<CAPPED>(exact_p[n][e], s[n][e]);
                }
            }
            uint32_t p[M / 16][4], p_cap[M / 16][4], ds_operand[M / 16][4];
            pack_scores<T>(p, exact_p);
            pack_scores<T>(p_cap, s);

            // 128 rows, or a cap, leave no registers for P cap' in float: keep it rounded.
            constexpr bool ROUNDED = M == 128 || CAPPED;
            // No register of p is all ones: p >= 0 or the NaN 0x7fff. This test keeps the wait
            // after the exponentials; with a rounded P cap' only if it asks for every register.
            uint32_t common = UINT_MAX;
            #pragma unroll
            for (int k = ROUNDED ? 0 : M / 16 - 1; k < M / 16; k++)
                #pragma unroll
                for (int j = ROUNDED ? 0 : 3; j < 4; j++)
                    common &= p[k][j];
            never(common == UINT_MAX);

            // Compute dS^T = P^T cap' (dP^T - D).
            wg_wait<0>();
            hold(dp);
            #pragma unroll
            for (int n = 0; n < M / 8; n++) {
                // D of the same two columns.
                Pack<float, 2> sums = load<2>(tile_sums + stage * M + 8 * n + 2 * (lane % 4));
                #pragma unroll
                for (int e = 0; e < 4; e++) {
                    const uint32_t pair = p_cap[n / 2][n % 2 * 2 + e / 2];
                    float rounded = to_float(__builtin_bit_cast(Pack<T, 2>, pair).v[e % 2]);
                    dp[n][e] = (ROUNDED ? rounded : s[n][e]) * (dp[n][e] - sums.v[e % 2]);
                }
            }
            pack_scores<T>(ds_operand, dp);
            issue_scores_times_rows<T, false>(sum_v, p, dout_at + stage * Q_BYTES, M);

            // Share dS^T with the other warpgroup. The stage held that of tile i - 2, which nobody
            // reads any more: both warpgroups waited for its dS K before the barrier of tile i - 1.
            put_rows(ds + stage * DS_BYTES, N, my_key, ds_operand);
            fence_async_smem();
            bar_sync(EVERY_CONSUMER, CONSUMERS);

            sum_tile(sum_k, sum_v, ds_operand, i, me);
        }

        // Write dk, scaled, and dv.
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            size_t key = key0() + my_key + 8 * i + lane / 4;
            if (key >= x.d.Tk) continue;
            const size_t to = x.key_at(b, kh, key);
            store_row(dk, to, sum_k, i, x.scale, int(x.d.HS));
            store_row(dv, to, sum_v, i, 1, int(x.d.HS));
        }
    }
};

// Backward: dK, dV, and the sums of dQ. The grid is one block for each key head's tile of keys.
template <typename T, int D, bool CAPPED>
__global__ void __launch_bounds__(HOPPER_THREADS, 1)
    attention_hopper_backward_kernel(const __grid_constant__ HopperMaps maps, const Results<T> dk,
                                     const Results<T> dv, const HopperOperands<T> x) {
#if HOPPER_PASS
    constexpr int M = BACKWARD_ROWS<D>, N = hopper_keys(D), C = CHUNKS<D>;
    LLMC_SHARED(float, tile_lse, STAGES * M);
    LLMC_SHARED(float, tile_sums, STAGES * M);
    LLMC_SHARED(KeyRange, tile_ranges, STAGES * M);
    LLMC_SHARED(int, key_positions, N);
    LLMC_SHARED(TileNote, notes, STAGES);
    LLMC_SHARED(uint64_t, barriers, 3 + 4 * STAGES);

    // As many heads run together as L2 holds: first one block of each head, then the next of each.
    const HeadPlace here = head_place(x.d, blockIdx.x, x.queue.heads_together, x.key_tiles);
    const BackwardBlock<T, D, CAPPED> block = {maps, x, dk, dv, here.b, here.kh, int(here.at),
                                               tile_lse, tile_sums, tile_ranges, key_positions,
                                               notes, barriers};
    // Arrivals as in the table above: those of k, of dq, of the full and of the free q and dout.
    constexpr int W = CONSUMER_WARPS;
    begin_block<1, W, 1, 1, 1, 1, 1, W, W, W, W>(barriers, maps.k, maps.v, maps.q, maps.dout);

    // Read the positions of the block's keys.
    if (threadIdx.x < N)
        key_positions[threadIdx.x] = x.position_of(here.b, block.key0() + threadIdx.x);

    // Zero the idle rows of q and dout: uninitialised contents times 0 could be a NaN.
    const int idle = (M - int(x.tile_rows)) * 8;
    for (int i = threadIdx.x; i < idle * 2 * STAGES * C; i += HOPPER_THREADS)
        store(reinterpret_cast<float*>(block.q + i / idle * M * 128 + x.tile_rows * 128 +
                                       i % idle * 16),
              Pack<float, 4>{});
    fence_async_smem();
    __syncthreads();
    run_roles(block);
#else
    needs_sm90a();
#endif
}

// Write dq (B,Tq,NH,HS) from the fragments of its sums. A block takes 16 columns of a part: in 16
// bits they are a whole sector of memory, 32 bytes.
template <typename T>
__global__ void attention_hopper_dq_kernel(const Results<T> dq, const HopperOperands<T> x) {
    const size_t b = blockIdx.z;
    const size_t kh = blockIdx.y;
    const int tile = int(blockIdx.x) / (4 * PARTS);
    const int j = int(blockIdx.x) % (4 * PARTS) / PARTS * 2;
    const int part = int(blockIdx.x) % PARTS;
    const int thread = threadIdx.x;
    const int lane = thread % 32;
    const int odd = lane % 2;

    // A part is 64 rows of the tile, or 64 channels. A lane writes 4 columns of two rows.
    const bool by_rows = x.tile_size == 128;
    const int first = by_rows ? 64 * part : 0;
    const int column = (by_rows ? 0 : 64 * part) + 8 * (j + odd) + 2 * (lane % 4 - odd);
    const size_t at = x.tile_at(b, kh, tile);
    const float* from = x.dq + at * PARTS * 64 * 64;
    if (thread == 0) check_turn(x.turns + at);

    // Read columns of the first 8, and of the other 8: two of one row, two of the row 8 below. If
    // no block had a turn, no key is seen and nothing was stored: dq is 0.
    Pack<float, 4> left = {}, right = {};
    if (x.turns[at] > 0) {
        left = load<4>(from + fragment_at(j, part, thread));
        right = load<4>(from + fragment_at(j + 1, part, thread));
    }
    for (int i = 0; i < 2; i++) {
        // Trade with the neighbour, so that a lane's columns follow each other: an even one takes
        // of the first 8, an odd one of the other 8.
        Pack<float, 4> four;
        for (int e = 0; e < 2; e++) {
            const float l = left.v[2 * i + e] * x.scale, r = right.v[2 * i + e] * x.scale;
            const float got = __shfl_xor_sync(ALL_LANES, odd ? l : r, 1);
            four.v[e] = odd ? got : l;
            four.v[2 + e] = odd ? r : got;
        }

        // Write, but skip idle rows and padding channels.
        unsigned slot = unsigned(first + thread / 32 * 16 + 8 * i + lane / 4);
        unsigned row = unsigned(tile) * x.tile_rows + slot;
        if (slot < x.tile_rows && row < x.rows && column < int(x.d.HS))
            dq.put(x.query_at(b, x.head_of(row, kh), x.query_of(row)) + column, four);
    }
}

// ----------------------------------------------------------------------------
// launchers

// Set up the operands in the tiles of one pass. Returns the bytes of scratch.
template <typename T>
size_t hopper_operands(HopperOperands<T>& x, const AttentionOperands<T>& operands, void* scratch,
                       bool backward) {
    // Every tile of rows has whole groups, so that one box of TMA loads it.
    const int backward_rows = operands.d.HS > 64 ? BACKWARD_ROWS<128> : BACKWARD_ROWS<64>;
    const unsigned tile = backward ? backward_rows : FORWARD_ROWS; // with idle rows
    const unsigned group = unsigned(operands.d.NH / operands.d.NKV);
    Pieces pieces = {static_cast<unsigned char*>(scratch)};
    take_rows(x, pieces, operands, tile, tile / group * group, 1,
              hopper_keys(operands.d.HS), backward);
    const size_t heads = x.d.B * x.d.NKV;
    const size_t channels = round_up(x.d.HS, 64);
    auto heads_in_l2 = [&](size_t head_bytes) {
        return unsigned(std::clamp(L2_BYTES / head_bytes, size_t(1), heads));
    };
    if (!backward) {
        // Only k and v need L2: they are read many times, q and out once.
        pieces.take(x.queue.claimed, 1);
        pieces.take(x.queue.tiles, x.d.B * x.tiles);
        pieces.take(x.queue.order, x.d.B * x.tiles);
        x.queue.heads_together = heads_in_l2(x.d.Tk * channels * 2 * sizeof(T));
        return pieces.used;
    }
    pieces.take(x.turns, heads * x.tiles);
    pieces.take(x.dq, heads * x.tiles * PARTS * 64 * 64);

    // L2 holds a head's q, dout, k and v in T, and its dQ in float.
    x.queue.heads_together = heads_in_l2((x.rows + x.d.Tk) * channels * 2 * sizeof(T) +
                                         x.rows * channels * sizeof(float));
    // Under a causal mask the first keys take longest, so they should start first. But then blocks
    // of a head wait for each other if more than two run at once. Behind the last keys none waits.
    x.first_keys_first = 2 * x.queue.heads_together >= BLOCKS_AT_ONCE;
    return pieces.used;
}

// The scratch in bytes, for either pass.
inline size_t attention_hopper_scratch_bytes(const AttentionDims& d) {
    // Other kernels run these sizes.
    if (d.HS > 256 || d.NH / d.NKV > MOST_HEADS)
        return 0;
    // bf16 stands for fp16 too, because the scratch holds only floats and ints.
    AttentionOperands<bf16> operands;
    operands.d = d;
    HopperOperands<bf16> x = {};
    size_t forward = hopper_operands(x, operands, nullptr, false);
    return d.HS > 128 ? forward : std::max(forward, hopper_operands(x, operands, nullptr, true));
}

// The maps of all operands. A box is 64 channels: of a tile's keys in one head, or of a tile's
// queries in all heads of a group.
template <typename T>
HopperMaps hopper_maps(const HopperOperands<T>& x, const T* out) {
    const AttentionDims& d = x.d;
    auto rows = [&](const T* from, size_t stride, size_t batch) {
        return make_tensor_map(from, {d.HS, d.NH, d.Tq, d.B}, {d.HS, stride, batch},
                               {64, x.group, x.tile_rows / x.group, 1}, true);
    };
    auto keys = [&](const T* from) {
        return make_tensor_map(from, {d.HS, d.NKV, d.Tk, d.B}, {d.HS, d.k_stride, d.k_batch},
                               {64, 1, x.tile_keys, 1}, true);
    };
    // Forward has no dout; any valid map will do.
    const size_t row = d.NH * d.HS;
    return {rows(x.q, d.q_stride, d.q_batch), keys(x.k), keys(x.v), rows(out, row, d.Tq * row),
            rows(x.dout ? x.dout : out, row, d.Tq * row)};
}

// Call f(D, CAPPED): HS rounded up to a size that has a kernel; whether there is a soft cap.
template <typename F> void pick_hopper_kernel(size_t HS, bool capped, F f) {
    auto pick = [&](auto D) {
        if constexpr (D == 128 || D == 256)
            if (capped) return f(D, std::true_type());
        f(D, std::false_type());
    };
    if (capped) HS = HS <= 128 ? 128 : 256;
    HS <= 32    ? pick(Int<32>())
    : HS <= 64  ? pick(Int<64>())
    : HS <= 96  ? pick(Int<96>())
    : HS <= 128 ? pick(Int<128>())
    : HS <= 192 ? pick(Int<192>())
                : pick(Int<256>());
}

// Forward. scratch: attention_hopper_scratch_bytes().
template <typename T>
void attention_hopper_forward(T* out, float* lse, const AttentionOperands<T>& operands,
                              void* scratch, cudaStream_t stream) {
    LLMC_CHECK(attention_kernels(operands, true, false, out) == AttentionKernels::WGMMA,
               "Hopper's attention does not take these operands");
    typedef native_t<T> Native;
    HopperOperands<Native> x = {};
    hopper_operands(x, as_native(operands), scratch, false);
    // Compute the spans first: they sort the tiles, and tell the producer what to load.
    make_queue<Native>(x.queue, x, stream);
    HopperMaps maps = hopper_maps(x, as_native(out));
    pick_hopper_kernel(x.d.HS, x.softcap != 0, [&](auto D, auto CAPPED) {
        launch_shared(attention_hopper_forward_kernel<Native, D, CAPPED>, BLOCKS_AT_ONCE,
                      HOPPER_THREADS, ForwardBlock<Native, D, CAPPED>::BYTES, stream, maps, lse, x);
    });
}

// Backward. scratch: attention_hopper_scratch_bytes().
template <typename T, typename Q, typename K>
void attention_hopper_backward(Q* dq, K* dk, K* dv, const T* out, const float* lse,
                               const AttentionOperands<T>& operands, void* scratch,
                               cudaStream_t stream) {
    LLMC_CHECK(attention_kernels(operands, true, true, dq, dk, dv, out) == AttentionKernels::WGMMA,
               "Hopper's attention does not take these operands");
    typedef native_t<T> Native;
    HopperOperands<Native> x = {};
    hopper_operands(x, as_native(operands), scratch, true);
    const AttentionDims& d = x.d;

    // Compute the spans of the tiles, and lse and D of the rows; reset the turns.
    attention_statistics(as_native(out), lse, x, stream);

    // Compute dK, dV and the sums of dQ, then dQ from its sums.
    HopperMaps maps = hopper_maps(x, as_native(out));
    const unsigned grid = unsigned(d.B * d.NKV) * x.key_tiles;
    auto in = [&](auto* to) { return Results<Native>(as_native(to), x.accumulate); };
    pick_hopper_kernel(d.HS, x.softcap != 0, [&](auto D, auto CAPPED) {
        if constexpr (D <= 128)
            launch_shared(attention_hopper_backward_kernel<Native, D, CAPPED>, grid, HOPPER_THREADS,
                          BackwardBlock<Native, D, CAPPED>::BYTES, stream, maps, in(dk), in(dv), x);
    });
    dim3 dq_grid(x.tiles * 4 * PARTS, unsigned(d.NKV), unsigned(d.B));
    launch(attention_hopper_dq_kernel<Native>, dq_grid, WARPGROUP, stream, in(dq), x);
}
#endif

} // namespace llmc
