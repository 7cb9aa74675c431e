// grouped_sm90.cuh - the products of all experts in one launch, by TMA and wgmma, for Hopper
//   The operands and the three products of grouped_mma.cuh.
//   1. Each block counts the tiles of the experts before each expert, as there.
//   2. One block stays on each SM and takes every gridDim-th tile of 128 x 256. A band of 8 tiles
//      of rows has all its columns before the next band: blocks that run together share operands.
//   3. A producer thread loads stages of 64 of the sum by TMA, up to four ahead. wgmma reads an
//      operand whose lines run along the sum as K-major, any other one as MN-major.
//   4. Two consumer warpgroups have 64 x 256 each, in float. A stage is free when the products of
//      the next one are issued and its own are done. One beyond the last row multiplies nothing.
//   5. The last stage of dW's sum may hold rows of the next expert. The consumers overwrite them
//      with zeros, in both operands: 0 times a NaN is a NaN. Products of rows do not write them.
//   Contract: that of grouped_mma.cuh. Hopper only, M > 0; all M rows are there, even where starts
//             ends earlier. The sum is in the same order, 16 at a time, so bits are those of
//             mma.sync where the GPU's two instructions round alike, which PTX leaves open.
//   Cost: 2 M IC OC FLOPs each, and the empty rows and columns of tiles that are not full. A stage
//         takes 1024 clocks of tensor cores, and shared memory is as busy.
//   To copy: this file, gpu.h, grouped_mma.cuh, hopper.cuh, mma.cuh, tensor_cores.h,
//            types.h and cuda_common.h.
#pragma once
#include "cuda_common.h"
#include "gpu.h"
#include "grouped_mma.cuh"
#include "hopper.cuh"
#include "tensor_cores.h"
#include "types.h"

namespace llmc {

#if LLMC_KERNELS

// ----------------------------------------------------------------------------
// tiles and stages

// With 128 columns L2 and shared memory would take longer than the products.
struct Wide {
    static constexpr int ROWS = EXPERT_TILE, COLUMNS = 256; // of a tile
    static constexpr int BAND = 8;                          // tiles of rows
    static constexpr int DEPTH = 64;                        // of the sum, in a stage: 128 bytes
    static constexpr int STAGES = 4;
    static constexpr int CHUNK_BYTES = 64 * 128; // an operand's 64 lines, swizzled
    static constexpr int A_BYTES = ROWS / 64 * CHUNK_BYTES;
    static constexpr int STAGE_BYTES = A_BYTES + COLUMNS / 64 * CHUNK_BYTES;
    static constexpr int WARPGROUP = 128, CONSUMERS = 2 * WARPGROUP, THREADS = 3 * WARPGROUP;
};

struct WideTile {
    int e, row;      // the expert, and its first row
    int i, j;        // the tile's place in the expert's rows and columns, or in dW_e
    int lines = 0;   // how many are left from i on
    int columns = 0; // how many are left from j on
    int K = 0;       // the length of the sum
};

// Find a tile. A, B: as in expert_tile(); with A it is one of rows, otherwise of dW.
template <bool A, bool B>
__device__ WideTile find_tile(int tile, const int* first, const Groups& g) {
    const int columns = int(B ? g.OC : g.IC);
    const int across = (columns + Wide::COLUMNS - 1) / Wide::COLUMNS;
    int high = tiles_of(int(g.OC)); // every dW_e has as many tiles
    const int e = A ? expert_of(first, int(g.E), tile) : tile / (high * across);
    int at = tile - (A ? first[e] : e * high * across);
    if (A) high = (first[e + 1] - first[e]) / across;

    // Find its place in its band. The last band may be lower.
    const int band = at / (Wide::BAND * across) * Wide::BAND;
    const int together = high - band < Wide::BAND ? high - band : Wide::BAND;
    at -= band * across;
    const int i = (band + at % together) * Wide::ROWS;
    const int j = at / together * Wide::COLUMNS;
    const int row = g.starts[e];
    const int rows = g.starts[e + 1] - row;
    WideTile t = {e, row, i, j};
    t.lines = (A ? rows : int(g.OC)) - i;
    t.columns = columns - j;
    t.K = A ? int(B ? g.IC : g.OC) : rows;
    return t;
}

#if HOPPER_PASS
// The shared memory of a block, and the number of all tiles.
struct WideShared {
    unsigned char* stages; // (STAGES) a, b
    uint64_t* full;        // (STAGES) 1 arrival: the producer, with the bytes
    uint64_t* empty;       // (STAGES) 8 arrivals: the consumer warps have read it
    const int* first;      // (E+1) see count_tiles()
    int tiles;
};

// Load LINES lines of an operand from `line` and `depth` on. Elements beyond a matrix become zeros.
template <bool DEEP, int LINES>
__device__ void load_lines(unsigned char* to, const CUtensorMap* map, uint64_t* full, int line,
                           int depth, int matrix) {
    if constexpr (DEEP) {
        tma_load_4d(to, map, full, depth, line, matrix, 0);
    } else {
        for (int c = 0; c < LINES / 64; c++)
            tma_load_4d(to + c * Wide::CHUNK_BYTES, map, full, line + 64 * c, depth, matrix, 0);
    }
}

// The producer: load the stages of all tiles. One thread does it.
template <bool A, bool B>
__device__ void produce_stages(const WideShared& shared, const CUtensorMap* a, const CUtensorMap* b,
                               const Groups& g) {
    unsigned n = 0; // stages so far
    for (int tile = blockIdx.x; tile < shared.tiles; tile += gridDim.x) {
        const WideTile t = find_tile<A, B>(tile, shared.first, g);
        for (int k = 0; k < t.K; k += Wide::DEPTH, n++) {
            // Wait until the stage has been read. The first waits return at once.
            const unsigned stage = n % Wide::STAGES;
            mbar_wait(shared.empty + stage, (n / Wide::STAGES & 1) ^ 1);

            uint64_t* full = shared.full + stage;
            mbar_expect_tx(full, Wide::STAGE_BYTES);
            unsigned char* to = shared.stages + stage * Wide::STAGE_BYTES;
            const int depth = A ? k : t.row + k;
            const int line = A ? t.row + t.i : t.i;
            const int matrix = A ? t.e : 0;
            load_lines<A, Wide::ROWS>(to, a, full, line, depth, 0);
            load_lines<B, Wide::COLUMNS>(to + Wide::A_BYTES, b, full, t.j, depth, matrix);
        }
    }
}

// Write zeros over the lines of a stage from `first` on. All consumers must call it.
inline __device__ void clear_lines(unsigned char* stage, int first) {
    // A line is 8 packs of 16 bytes; the swizzle moves them within the line.
    for (int n = threadIdx.x - Wide::WARPGROUP; n < Wide::STAGE_BYTES / 16; n += Wide::CONSUMERS)
        if (n / 8 % 64 >= first)
            store(reinterpret_cast<float*>(stage) + 4 * n, Pack<float, 4>{});
    fence_async_smem();
    bar_sync(1, Wide::CONSUMERS); // all have written
}

// A consumer warpgroup: compute 64 rows of every tile.
template <bool A, bool B, typename T, typename O>
__device__ __forceinline__ void consume_stages(const WideShared& shared, O* out, const Groups& g,
                                               bool accumulate, int me) {
    // Describe both operands in the first stage; the others lie STAGE_BYTES further on each.
    const uint32_t at = smem_u32(shared.stages);
    const uint64_t a0 = descriptor(at + me * Wide::CHUNK_BYTES, Wide::CHUNK_BYTES, 1024);
    const uint64_t b0 = descriptor(at + Wide::A_BYTES, Wide::CHUNK_BYTES, 1024);
    constexpr int NEXT_A = (A ? 32 : 2048) / 16; // 16 of the sum: 32 bytes of a line, or 16 lines
    constexpr int NEXT_B = (B ? 32 : 2048) / 16;
    auto hand_back = [&](unsigned stage) {
        if (threadIdx.x % 32 == 0)
            mbar_arrive(shared.empty + stage);
    };

    unsigned n = 0; // stages so far
    for (int tile = blockIdx.x; tile < shared.tiles; tile += gridDim.x) {
        const WideTile t = find_tile<A, B>(tile, shared.first, g);
        if (t.K == 0 && accumulate) continue;
        const bool idle = 64 * me >= t.lines; // a warpgroup beyond the edge only hands stages back
        float sum[Wide::COLUMNS / 2] = {};
        for (int k = 0; k < t.K; k += Wide::DEPTH, n++) {
            const unsigned stage = n % Wide::STAGES;
            mbar_wait(shared.full + stage, n / Wide::STAGES & 1);
            if (!A && k + Wide::DEPTH > t.K)
                clear_lines(shared.stages + stage * Wide::STAGE_BYTES, t.K - k);

            // Issue the stage's products.
            const uint64_t behind = stage * (Wide::STAGE_BYTES / 16);
            if (!idle) {
                wg_fence(); // within the branch: before it, ptxas would serialise the products
                #pragma unroll
                for (int s = 0; s < Wide::DEPTH / 16; s++)
                    wgmma<T, Wide::COLUMNS, !A, !B>(sum, a0 + behind + s * NEXT_A,
                                                    b0 + behind + s * NEXT_B, 1);
                wg_commit();
            }

            // Wait for the products of the stage before, and hand it back.
            wg_wait<1>();
            if (k > 0) hand_back((n - 1) % Wide::STAGES);
        }
        wg_wait<0>();
        #pragma unroll
        for (float& x : sum)
            keep(x);
        if (t.K > 0) hand_back((n - 1) % Wide::STAGES);

        // Write the part of the tile that exists. A thread has two rows, and two columns of each 8.
        const int row = 64 * me + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
        const int column = 2 * (threadIdx.x % 4);
        const size_t stride = B ? g.OC : g.IC;
        const size_t line = A ? size_t(t.row) : t.e * g.OC;
        O* to = out + (line + t.i + row) * stride + t.j;
        #pragma unroll
        for (int x = 0; x < Wide::COLUMNS / 2; x += 2) {
            const int down = x / 2 % 2 * 8;
            const int c = x / 4 * 8 + column;
            if (row + down < t.lines && c < t.columns)
                write_pair(to + down * stride + c, sum[x], sum[x + 1], accumulate);
        }
    }
}
#endif

// ----------------------------------------------------------------------------
// kernel

// One of the three products. The grid is one block an SM.
template <bool A, bool B, typename T, typename O>
__global__ void __launch_bounds__(Wide::THREADS, 1)
    expert_wgmma_kernel(const __grid_constant__ CUtensorMap a,
                        const __grid_constant__ CUtensorMap b, O* out, const Groups g,
                        bool accumulate) {
#if HOPPER_PASS
    LLMC_SHARED(uint64_t, barriers, 2 * Wide::STAGES);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * Wide::STAGES; i++)
            mbar_init(barriers + i, i < Wide::STAGES ? 1 : Wide::CONSUMERS / 32);
        mbar_init_fence();
        tma_prefetch(&a);
        tma_prefetch(&b);
    }

    // Count the tiles; this is also the barrier behind the first lines.
    const int across = int(ceil_div(B ? g.OC : g.IC, size_t(Wide::COLUMNS)));
    int* first = reinterpret_cast<int*>(dynamic_shared() + Wide::STAGES * Wide::STAGE_BYTES);
    count_tiles(first, g.starts, int(g.E), across);
    const int of_weights = int(g.E) * tiles_of(int(g.OC)) * across;
    const int tiles = A ? first[g.E] : of_weights;
    const WideShared shared = {dynamic_shared(), barriers, barriers + Wide::STAGES, first, tiles};

    // The first warpgroup gives its registers away; one of its threads loads.
    const int role = __shfl_sync(ALL_LANES, int(threadIdx.x / Wide::WARPGROUP), 0);
    if (role == 0) {
        regs_dec<24>();
        if (threadIdx.x < 32 && elect_one())
            produce_stages<A, B>(shared, &a, &b, g);
    } else {
        regs_inc<240>();
        consume_stages<A, B, T>(shared, out, g, accumulate, role - 1);
    }
#else
    needs_sm90a();
#endif
}

// ----------------------------------------------------------------------------
// launchers

// The map of a stack of matrices (rows,columns). A box is a stage's lines, or a chunk of columns.
template <bool DEEP, int LINES, typename T>
CUtensorMap lines_map(const T* x, size_t matrices, size_t rows, size_t columns) {
    return make_tensor_map(x, {columns, rows, matrices, size_t(1)},
                           {columns, rows * columns, matrices * rows * columns},
                           {64u, unsigned(DEEP ? LINES : Wide::DEPTH), 1u, 1u}, true);
}

// out = or += a W_e^T (A, B) or a W_e (A); or dW_e = or += a_e^T b_e, where b is inp. The caller
// has asked grouped_mma_takes(); M > 0.
template <bool A, bool B, typename T, typename O>
void grouped_wgmma(O* out, const T* a, const T* b, const Groups& g, bool accumulate,
                   cudaStream_t stream) {
    CUtensorMap a_map = lines_map<A, Wide::ROWS>(a, 1, g.M, A && B ? g.IC : g.OC);
    CUtensorMap b_map = A ? lines_map<B, Wide::COLUMNS>(b, g.E, g.OC, g.IC)
                          : lines_map<B, Wide::COLUMNS>(b, 1, g.M, g.IC);
    size_t across = ceil_div(B ? g.OC : g.IC, size_t(Wide::COLUMNS));
    size_t high = g.E * tiles_of(int(g.OC));
    if (A) high = tiles_of(int(g.M)) + g.E; // at most
    size_t blocks = std::min(high * across, size_t(gpu_processors()));
    size_t bytes = Wide::STAGES * Wide::STAGE_BYTES + (g.E + 1) * sizeof(int);
    launch_shared(expert_wgmma_kernel<A, B, T, O>, unsigned(blocks), Wide::THREADS, bytes, stream,
                  a_map, b_map, out, g, accumulate);
}

// The same product by the GPU's fastest kernel. A and B as in expert_tile().
template <bool A, bool B, typename T, typename O>
void grouped_tensor_cores(O* out, const T* a, const T* b, const Groups& g, bool accumulate,
                          cudaStream_t stream) {
    if (is_hopper(stream) && g.M > 0)
        return grouped_wgmma<A, B>(out, a, b, g, accumulate, stream);
    if constexpr (A)
        grouped_mma_rows<B>(out, a, b, g, accumulate, stream);
    else
        grouped_mma_backward_weight(out, a, b, g, accumulate, stream);
}
#endif

} // namespace llmc
