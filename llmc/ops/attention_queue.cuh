// attention_queue.cuh - attention's tiles of rows in a queue, longest first - arXiv:2407.08608
//   One block for each SM stays for the whole pass and claims one place of the queue after another.
//   It starts once, and its loads run ahead into its next tile. The tiles of a sequence are sorted
//   by the number of tiles of keys that they see. The same spans that decide which tiles are
//   skipped give this number, so windows, documents and prefixes count at their true cost. For as
//   many heads as L2 holds, the queue has the longest tile of each head, then the next longest of
//   each, and so on: the tiles that run last are short.
//   Contract: each tile is claimed once, by whichever block comes first; no result depends on
//             which. make_queue() also writes the ranges and spans of attention_rows.cuh.
//   Cost: one launch, a block a sequence; one atomic on a word of global memory a claim.
//   To copy: this file, attention_rows.cuh, attention_types.h, tensor_cores.h,
//            types.h and cuda_common.h.
#pragma once
#include "attention_rows.cuh"

namespace llmc {

#if LLMC_KERNELS

constexpr int QUEUE_THREADS = 1024; // in the block that sorts a sequence

// A place of the queue stands for a head and an index in the head's order. Heads take turns: index
// 0 of each of `together` heads, then index 1, and so on; then the next heads start.
struct HeadPlace {
    unsigned head, at;
};
__device__ inline HeadPlace head_place(unsigned place, unsigned heads, unsigned together,
                                       unsigned places_a_head) {
    const unsigned some = together * places_a_head;
    const unsigned first = place / some * together;
    const unsigned left = heads - first;
    const unsigned here = left < together ? left : together;
    return {first + place % some % here, place % some / here};
}

// A tile of rows of a key head, and the number of tiles of keys that it sees; -1: the
// queue is empty.
struct RowTile {
    unsigned b, kh, tile;
    int key_tiles;
};

// The queue of one pass, in global memory.
struct TileQueue {
    unsigned* claimed;       // the number of places taken
    unsigned* order;         // (B,tiles) the tiles of each sequence, longest first
    int* key_tiles;          // (B,tiles) the number of tiles of keys that each of them sees
    unsigned heads_together; // key heads, over all sequences, that take turns

    // Take the next place. All lanes of a warp must call it together.
    template <typename T> __device__ RowTile claim(const RowOperands<T>& x) const {
        unsigned place = 0;
        if (threadIdx.x % 32 == 0)
            place = atomicAdd(claimed, 1u);
        place = __shfl_sync(ALL_LANES, place, 0);
        const unsigned NKV = unsigned(x.d.NKV);
        const unsigned heads = unsigned(x.d.B) * NKV;
        if (place >= heads * x.tiles)
            return {0, 0, 0, -1};

        // All key heads of a sequence have the same order.
        const HeadPlace next = head_place(place, heads, heads_together, x.tiles);
        const unsigned b = next.head / NKV;
        const unsigned tile = order[x.tile_at(b, next.at)];
        return {b, next.head % NKV, tile, key_tiles[x.tile_at(b, tile)]};
    }
};

// Write a sequence's ranges, spans and order; one block a sequence. All sequences have equally many
// tiles, so each is sorted by itself, and places interleave them.
template <typename T>
__global__ void __launch_bounds__(QUEUE_THREADS)
    attention_queue_kernel(const RowOperands<T> x, const TileQueue queue) {
    const size_t b = blockIdx.x;
    const unsigned lane = threadIdx.x % 32;
    const unsigned warp = threadIdx.x / 32;
    const unsigned warps = blockDim.x / 32;
    if (b == 0 && threadIdx.x == 0)
        *queue.claimed = 0;

    // Describe each tile, one warp a tile.
    for (unsigned tile = warp; tile < x.tiles; tile += warps)
        describe_rows(x, b, tile);
    for (unsigned tile = warp; tile < x.key_tiles; tile += warps)
        describe_keys(x, b, tile);
    __syncthreads();

    // Count the tiles of keys that each tile sees, 32 at a time.
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

    // Find each tile's place: the number of tiles that are longer, or as long and before it.
    const int* lengths = queue.key_tiles + x.tile_at(b, 0);
    for (unsigned tile = threadIdx.x; tile < x.tiles; tile += blockDim.x) {
        unsigned place = 0;
        for (unsigned other = 0; other < x.tiles; other++)
            place += lengths[other] > lengths[tile] ||
                     (lengths[other] == lengths[tile] && other < tile);
        queue.order[x.tile_at(b, place)] = tile;
    }
}

// Take the queue's scratch. The caller sets heads_together.
template <typename T>
void take_queue(TileQueue& queue, Pieces& pieces, const RowOperands<T>& x) {
    pieces.take(queue.claimed, 1);
    pieces.take(queue.order, x.d.B * x.tiles);
    pieces.take(queue.key_tiles, x.d.B * x.tiles);
}

// Describe the tiles and fill the queue; reset the number of places taken.
template <typename T>
void make_queue(const TileQueue& queue, const RowOperands<T>& x, cudaStream_t stream) {
    launch(attention_queue_kernel<T>, unsigned(x.d.B), QUEUE_THREADS, 0, stream, x, queue);
}
#endif

} // namespace llmc
