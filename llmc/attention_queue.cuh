// attention_queue.cuh - attention's tiles of rows in a queue, longest first - arXiv:2407.08608
//   A block for each SM stays for the whole pass and claims one place of the queue after another:
//   it starts once, and its loads run ahead into the next tile. A sequence's tiles are sorted by
//   how many tiles of keys they see, by the very spans that tell which are skipped: windows,
//   documents and prefixes count as what they are. Place by place come first the longest tiles of
//   as many heads as L2 holds, then the next longest of each: what runs last is short.
//   Contract: each tile is claimed once, by whichever block comes first; no result shows which.
//             make_queue() also writes the ranges and spans of attention_rows.cuh.
//   Cost: one launch, a block a sequence; a word of global memory a claim.
//   To copy: this file, attention_rows.cuh, attention_types.h, mma.cuh, types.h and cuda_common.h.
#pragma once
#include "attention_rows.cuh"

namespace llmc {

#if LLMC_KERNELS

constexpr int QUEUE_THREADS = 1024; // of the block that sorts a sequence

// Heads take turns: first place 0 of each of `together` heads, then place 1, until these heads are
// done and the next ones start.
struct HeadPlace {
    unsigned head, at;
};
__device__ inline HeadPlace head_place(unsigned place, unsigned heads, unsigned together,
                                       unsigned places_a_head) {
    const unsigned some = together * places_a_head, first = place / some * together;
    const unsigned left = heads - first, here = left < together ? left : together;
    return {first + place % some % here, place % some / here};
}

// A tile of rows of a key head, and how many tiles of keys it sees; -1: there is no tile.
struct RowTile {
    unsigned b, kh, tile;
    int key_tiles;
};

struct TileQueue {
    unsigned* claimed;       // how many places are taken
    unsigned* order;         // (B,tiles) each sequence's tiles, longest first
    int* key_tiles;          // (B,tiles) that each of them sees
    unsigned heads_together; // key heads of all sequences whose tiles are mixed

    // Take the next place; all lanes of a warp together.
    template <typename T> __device__ RowTile claim(const RowOperands<T>& x) const {
        unsigned place = 0;
        if (threadIdx.x % 32 == 0)
            place = atomicAdd(claimed, 1u);
        place = __shfl_sync(ALL_LANES, place, 0);
        const unsigned NKV = unsigned(x.d.NKV), heads = unsigned(x.d.B) * NKV;
        if (place >= heads * x.tiles) return {0, 0, 0, -1};

        // All key heads of a sequence have the same order.
        const HeadPlace next = head_place(place, heads, heads_together, x.tiles);
        const unsigned b = next.head / NKV, tile = order[x.tile_at(b, next.at)];
        return {b, next.head % NKV, tile, key_tiles[x.tile_at(b, tile)]};
    }
};

// One block makes a sequence's ranges, spans and order. All sequences have equally many tiles, so
// each is sorted by itself, and places mix them.
template <typename T>
__global__ void __launch_bounds__(QUEUE_THREADS)
    attention_queue_kernel(const RowOperands<T> x, const TileQueue queue) {
    const size_t b = blockIdx.x;
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    if (b == 0 && threadIdx.x == 0)
        *queue.claimed = 0;

    // A warp describes a tile.
    for (unsigned tile = warp; tile < x.tiles; tile += warps)
        describe_rows(x, b, tile);
    for (unsigned tile = warp; tile < x.key_tiles; tile += warps)
        describe_keys(x, b, tile);
    __syncthreads();

    // Count the tiles of keys that a tile sees, 32 in one go.
    for (unsigned tile = warp; tile < x.tiles; tile += warps) {
        const RowSpans rows = x.row_spans[x.tile_at(b, tile)];
        int seen = 0;
        for (unsigned n = 0; n < x.key_tiles; n += 32) {
            const unsigned key_tile = n + lane;
            bool sees = key_tile < x.key_tiles &&
                        visibility(rows, x.key_spans[b * x.key_tiles + key_tile]) != NOTHING;
            seen += __popc(__ballot_sync(ALL_LANES, sees));
        }
        if (lane == 0)
            queue.key_tiles[x.tile_at(b, tile)] = seen;
    }
    __syncthreads();

    // A tile's place: how many are longer, or as long and before it.
    const int* lengths = queue.key_tiles + x.tile_at(b, 0);
    for (unsigned tile = threadIdx.x; tile < x.tiles; tile += blockDim.x) {
        unsigned place = 0;
        for (unsigned other = 0; other < x.tiles; other++)
            place += lengths[other] > lengths[tile] ||
                     (lengths[other] == lengths[tile] && other < tile);
        queue.order[x.tile_at(b, place)] = tile;
    }
}

// The scratch of a queue; heads_together is the caller's.
template <typename T>
void take_queue(TileQueue& queue, Pieces& pieces, const RowOperands<T>& x) {
    pieces.take(queue.claimed, 1);
    pieces.take(queue.order, x.d.B * x.tiles);
    pieces.take(queue.key_tiles, x.d.B * x.tiles);
}
template <typename T>
void make_queue(const TileQueue& queue, const RowOperands<T>& x, cudaStream_t stream) {
    launch(attention_queue_kernel<T>, unsigned(x.d.B), QUEUE_THREADS, 0, stream, x, queue);
}
#endif

} // namespace llmc
