// grouped_mma.cuh - the products of all experts in one launch, by mma.sync, for Ampere and later
//   Rows [starts[e], starts[e+1]) belong to expert e, which has W_e (OC,IC) of a stack of E:
//     forward   out = or += inp W_e^T      weight   dW_e = or += dout_e^T inp_e
//     input     dinp = or += dout W_e
//   inp, dinp (M,IC)   out, dout (M,OC)   W (E,OC,IC)   dW (E,OC,IC) float   starts (E+1)
//   1. Each block counts the tiles of the experts before each expert. starts is read on the device,
//      so the host waits for nothing.
//   2. Two blocks stay on each SM and take every gridDim-th tile of 128 x 128. The tiles of an
//      expert are adjacent, those that share columns of W_e first. An expert without rows has none.
//   3. A tile sums over 32 of K at a time. Stages come by cp.async, two ahead. An operand whose
//      rows run along K is read by ldmatrix as it is, any other one transposed.
//   4. Eight warps have 64 x 32 each, in float; a warp beyond the last row or column does nothing.
//   Contract: bf16 and fp16; OC and IC multiples of 8, pointers of 16 bytes (grouped_mma_takes()).
//             out, dinp, dW = or +=, rounded once. dW of an expert without rows becomes 0, or is
//             left unchanged when accumulating. Bitwise repeatable: a row's bits depend on nothing
//             but the row and W_e.
//   Cost: 2 M IC OC FLOPs each, and the empty rows of tiles that are not full. The shape is an
//         A100's: on an H100, mma.sync and its loads leave at most 56% of wgmma's rate.
//   To copy: this file, gpu.h, mma.cuh, tensor_cores.h, types.h and cuda_common.h.
#pragma once
#include <algorithm>
#include "cuda_common.h"
#include "gpu.h"
#include "mma.cuh"
#include "tensor_cores.h"
#include "types.h"

namespace llmc {

// A stack of E matrices (OC,IC), and the rows that belong to each.
struct Groups {
    const int* starts; // (E+1), in memory where the product runs
    size_t E, OC, IC;
    size_t M; // all rows
};

#if LLMC_KERNELS

// ----------------------------------------------------------------------------
// tiles

// A wider tile reads each operand less often, but leaves more rows of a small expert's tile empty.
// With 128 x 128 each byte of a stage serves 64 FLOPs.
constexpr int EXPERT_TILE = 128; // rows and columns of a block's tile
constexpr int EXPERT_DEPTH = 32; // length of the sum in a stage
constexpr int EXPERT_STAGES = 3;
constexpr int EXPERT_THREADS = 256;
constexpr int EXPERT_STAGE = EXPERT_TILE * EXPERT_DEPTH; // elements of one operand
constexpr int EXPERT_I = 64, EXPERT_J = 32;              // a warp's part of a tile

// A matrix in memory, from a tile's first element on: element c of line l is at data + l * stride +
// c. With DEEP, lines are the tile's rows (or columns) and the sum runs along them. Otherwise the
// sum runs over the lines.
template <typename T> struct Lines {
    const T* data;
    int stride;
    int lines, columns; // how many exist
};

// The number of elements of a line in shared memory.
template <bool DEEP> constexpr int LINE = DEEP ? EXPERT_DEPTH : EXPERT_TILE;

// One thread's copies of an operand: two chunks of each stage. Addresses and edges are found once a
// tile; a stage only advances them.
template <bool DEEP, typename T> struct StageCopies {
    static constexpr int CHUNKS = LINE<DEEP> / 8;
    static constexpr int APART = EXPERT_THREADS / CHUNKS; // lines: both have the same swizzle
    static_assert(EXPERT_STAGE / 8 == 2 * EXPERT_THREADS && APART % 8 == 0);
    const T* from[2]; // in the next stage
    int left[2];      // of the sum, from there on; an absent line has none
    int to;           // where the first chunk lies in a stage
    int64_t step;     // from stage to stage

    __device__ explicit StageCopies(const Lines<T>& x) {
        int place = threadIdx.x / CHUNKS;
        int column = threadIdx.x % CHUNKS * 8;
        to = tile_at<LINE<DEEP>>(place, column / 8);
        step = EXPERT_DEPTH * (DEEP ? int64_t(1) : int64_t(x.stride));
        for (int i = 0; i < 2; i++) {
            int line = place + i * APART;
            left[i] = DEEP ? x.columns - column : x.lines - line;
            if (DEEP ? line >= x.lines : column >= x.columns) left[i] = 0;
            from[i] = x.data + (left[i] > 0 ? int64_t(line) * x.stride + column : 0);
        }
    }

    // Start those of the next stage. Zeros lie beyond the edges.
    __device__ void start(T* stage) {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            cp_async16(stage + to + i * APART * LINE<DEEP>, from[i], left[i] > 0 ? 16 : 0);
            from[i] += step;
            left[i] -= EXPERT_DEPTH;
        }
    }
};

// Load 16 rows from `row` on, and the k-th 16 of the sum, as the first operand.
template <bool DEEP, typename T>
__device__ void first_operand(uint32_t (&a)[4], const T* stage, int row, int k) {
    if constexpr (DEEP)
        load_a<LINE<DEEP>>(a, stage, row, k);
    else
        load_a_rows<LINE<DEEP>>(a, stage, 16 * k, row / 8);
}

// The same as columns: two second operands.
template <bool DEEP, typename T>
__device__ void second_operand(uint32_t (&b)[4], const T* stage, int row, int k) {
    if constexpr (DEEP)
        load_b<LINE<DEEP>>(b, stage, row, k);
    else
        load_b_rows<LINE<DEEP>>(b, stage, 16 * k, row / 8);
}

// sum (64,32) += a stage's rows from i on times its columns from j on.
template <bool A, bool B, typename T>
__device__ void multiply_stage(float (&sum)[EXPERT_I / 16][EXPERT_J / 8][4],
                               const T* a, const T* b, int i, int j) {
    // Each mma takes 16 of the sum. The rows stay in registers while the columns pass.
    #pragma unroll
    for (int k = 0; k < EXPERT_DEPTH / 16; k++) {
        uint32_t fa[EXPERT_I / 16][4], fb[4];
        #pragma unroll
        for (int m = 0; m < EXPERT_I / 16; m++)
            first_operand<A>(fa[m], a, i + 16 * m, k);
        // One load of b serves all rows of a.
        #pragma unroll
        for (int n = 0; n < EXPERT_J / 8; n += 2) {
            second_operand<B>(fb, b, j + 8 * n, k);
            #pragma unroll
            for (int m = 0; m < EXPERT_I / 16; m++)
                mma_pair<T>(sum[m][n], sum[m][n + 1], fa[m], fb);
        }
    }
}

// Write two neighbouring columns: out = or += the sum, rounded once.
template <typename O>
__device__ void write_pair(O* out, float left, float right, bool accumulate) {
    // Add the old value in float, before the one rounding.
    if (accumulate) {
        Pack<O, 2> before = load<2>(out);
        left += to_float(before.v[0]);
        right += to_float(before.v[1]);
    }
    store(out, Pack<O, 2>{{from_acc<O>(left), from_acc<O>(right)}});
}

// One tile of out (rows,columns) = or += the sum over K of a and b. All threads must call it.
template <bool A, bool B, typename T, typename O>
__device__ void expert_tile(O* out, int stride, const Lines<T>& a, const Lines<T>& b,
                            int rows, int columns, int K, bool accumulate) {
    // A stage has two operands, one behind the other.
    T* stages = reinterpret_cast<T*>(dynamic_shared());
    int steps = (K + EXPERT_DEPTH - 1) / EXPERT_DEPTH;
    StageCopies<A, T> copies_a(a);
    StageCopies<B, T> copies_b(b);
    auto start = [&](int step) {
        T* stage = stages + step % EXPERT_STAGES * 2 * EXPERT_STAGE;
        if (step < steps) {
            copies_a.start(stage);
            copies_b.start(stage + EXPERT_STAGE);
        }
        cp_async_commit(); // an empty group counts too
    };

    // Find the warp's part. A thread keeps two rows of each 16 and two columns of each 8.
    int warp = threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    int my_i = warp / (EXPERT_TILE / EXPERT_J) * EXPERT_I;
    int my_j = warp % (EXPERT_TILE / EXPERT_J) * EXPERT_J;
    // A warp beyond the edges only copies.
    bool idle = my_i >= rows || my_j >= columns;
    float sum[EXPERT_I / 16][EXPERT_J / 8][4] = {};

    // Walk the sum: multiply one stage while two more are in flight.
    for (int ahead = 0; ahead < EXPERT_STAGES - 1; ahead++)
        start(ahead);
    for (int step = 0; step < steps; step++) {
        cp_async_wait<EXPERT_STAGES - 2>(); // this thread's copies of the stage
        __syncthreads(); // and all others'; the stage before has been read and may be overwritten
        start(step + EXPERT_STAGES - 1);
        const T* stage = stages + step % EXPERT_STAGES * 2 * EXPERT_STAGE;
        if (!idle)
            multiply_stage<A, B>(sum, stage, stage + EXPERT_STAGE, my_i, my_j);
    }
    cp_async_wait<0>();
    __syncthreads(); // all stages have been read: the next tile may overwrite them

    // Write the part of the tile that exists.
    if (idle) return;
    #pragma unroll
    for (int m = 0; m < EXPERT_I / 16; m++)
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = my_i + 16 * m + 8 * half + lane / 4;
            #pragma unroll
            for (int n = 0; n < EXPERT_J / 8; n++) {
                int j = my_j + 8 * n + 2 * (lane % 4);
                if (i >= rows || j >= columns) continue;
                const float* x = sum[m][n] + 2 * half;
                write_pair(out + size_t(i) * size_t(stride) + size_t(j), x[0], x[1], accumulate);
            }
        }
}

// ----------------------------------------------------------------------------
// kernels

// The number of tiles that cover n rows or columns.
LLMC_HD constexpr int tiles_of(int n) { return (n + EXPERT_TILE - 1) / EXPERT_TILE; }

// first[e] (E+1) = the number of tiles of the experts before e, of which `across` are side by side.
inline __device__ void count_tiles(int* first, const int* starts, int E, int across) {
    int lane = threadIdx.x % 32;
    int before = 0;
    // One warp computes the prefix sums, 32 experts at a time.
    for (int e0 = 0; threadIdx.x < 32 && e0 < E; e0 += 32) {
        int e = e0 + lane;
        int rows = e < E ? starts[e + 1] - starts[e] : 0;
        int sum = tiles_of(rows) * across;
        for (int d = 1; d < 32; d *= 2) {
            int other = __shfl_up_sync(ALL_LANES, sum, d);
            if (lane >= d) sum += other;
        }

        // Each lane now has the sum up to its expert.
        if (e < E) first[e + 1] = before + sum;
        // The last lane has the sum of all 32.
        before += __shfl_sync(ALL_LANES, sum, 31);
    }
    if (threadIdx.x == 0) first[0] = 0;
    __syncthreads(); // all may read
}

// The expert of tile `tile`, by binary search: the last one whose first tile is not later.
inline __device__ int expert_of(const int* first, int E, int tile) {
    int low = 0;
    int high = E; // first[low] <= tile < first[high]
    while (high - low > 1) {
        int middle = (low + high) / 2;
        (first[middle] <= tile ? low : high) = middle;
    }
    return low;
}

// Products of rows with W: out (M,columns) = or += a (M,K) times the expert's matrix. K runs along
// the lines of the matrix (DEEP) or over them.
template <bool DEEP, typename T>
__global__ void __launch_bounds__(EXPERT_THREADS, 2) // blocks on an SM
    expert_rows_kernel(T* out, const T* a, const T* w, const Groups g, bool accumulate) {
    int columns = int(DEEP ? g.OC : g.IC);
    int K = int(DEEP ? g.IC : g.OC);
    int across = tiles_of(columns);
    // The counts of tiles lie behind the stages.
    int* first = reinterpret_cast<int*>(reinterpret_cast<T*>(dynamic_shared()) +
                                        EXPERT_STAGES * 2 * EXPERT_STAGE);
    count_tiles(first, g.starts, int(g.E), across);

    for (int tile = blockIdx.x; tile < first[g.E]; tile += gridDim.x) {
        // Find the tile's expert, columns, rows. Tiles that share columns of W_e are consecutive.
        int e = expert_of(first, int(g.E), tile);
        int high = (first[e + 1] - first[e]) / across; // tiles of rows
        int j = (tile - first[e]) / high * EXPERT_TILE;
        int row = g.starts[e] + (tile - first[e]) % high * EXPERT_TILE;

        // Point at the rest of the expert's rows, and of its matrix.
        int rows = g.starts[e + 1] - row;
        int left = columns - j;
        const T* matrix = w + size_t(e) * g.OC * g.IC + size_t(j) * (DEEP ? K : 1);
        Lines<T> of_rows = {a + size_t(row) * K, K, rows, K};
        Lines<T> of_w = {matrix, int(g.IC), DEEP ? left : K, DEEP ? K : left};
        expert_tile<true, DEEP>(out + size_t(row) * columns + j, columns, of_rows, of_w, rows,
                                left, K, accumulate);
    }
}

// Gradients of W: a tile of one expert's matrix sums over all of the expert's rows.
template <typename T>
__global__ void __launch_bounds__(EXPERT_THREADS, 2) // blocks on an SM
    expert_weight_kernel(float* dw, const T* dout, const T* inp, const Groups g, bool accumulate) {
    // Sizes fit an int, which takes half the registers of a size_t.
    int OC = int(g.OC);
    int IC = int(g.IC);
    int high = tiles_of(OC);
    int across = tiles_of(IC);
    for (int tile = blockIdx.x; tile < int(g.E) * high * across; tile += gridDim.x) {
        // The first row and column of the tile within the gradient.
        int e = tile / (high * across);
        int i = tile / across % high * EXPERT_TILE;
        int j = tile % across * EXPERT_TILE;

        // Both operands have one line for each row of the expert.
        int row = g.starts[e];
        int rows = g.starts[e + 1] - row;
        if (rows == 0 && accumulate) continue;
        Lines<T> a = {dout + size_t(row) * OC + i, OC, rows, OC - i};
        Lines<T> b = {inp + size_t(row) * IC + j, IC, rows, IC - j};
        expert_tile<false, false>(dw + (size_t(e) * OC + i) * IC + j, IC, a, b, OC - i, IC - j,
                                  rows, accumulate);
    }
}

// ----------------------------------------------------------------------------
// launchers

// Whether tensor cores take it. cp.async moves 16 bytes of a line. Float, and the CPU's double,
// have no such kernel.
template <typename T, typename... Ps>
bool grouped_mma_takes(const Groups& g, const Ps*... ps) {
    bool aligned = ((uintptr_t(ps) % 16 == 0) && ...);
    return IS_BF16_OR_FP16<T> && g.OC % 8 == 0 && g.IC % 8 == 0 && aligned;
}

// The number of blocks: two for each SM, or one for each tile there may be.
inline unsigned expert_blocks(size_t tiles) {
    return unsigned(std::min(tiles, size_t(2) * gpu_processors()));
}

// Shared memory: three stages of two operands, and where each expert's tiles begin.
template <typename T>
size_t expert_shared_bytes(const Groups& g) {
    return EXPERT_STAGES * 2 * EXPERT_STAGE * sizeof(T) + (g.E + 1) * sizeof(int);
}

// out = or += a W_e^T (DEEP: the forward pass), or a W_e (the gradient of the input).
template <bool DEEP, typename T>
void grouped_mma_rows(T* out, const T* a, const T* w, const Groups& g, bool accumulate,
                      cudaStream_t stream) {
    // Each expert may end in a tile that is not full.
    size_t across = tiles_of(int(DEEP ? g.OC : g.IC));
    size_t most = (tiles_of(int(g.M)) + g.E) * across;
    launch_shared(expert_rows_kernel<DEEP, T>, expert_blocks(most), EXPERT_THREADS,
                  expert_shared_bytes<T>(g), stream, out, a, w, g, accumulate);
}

// dW_e = or += dout_e^T inp_e. An expert without rows still has its tiles, which are written as
// zeros. Tiles are in the order of experts, not of work. But a block's tiles are gridDim apart, so
// an expert with many rows is spread over all blocks.
template <typename T>
void grouped_mma_backward_weight(float* dw, const T* dout, const T* inp, const Groups& g,
                                 bool accumulate, cudaStream_t stream) {
    size_t tiles = g.E * tiles_of(int(g.OC)) * tiles_of(int(g.IC));
    launch_shared(expert_weight_kernel<T>, expert_blocks(tiles), EXPERT_THREADS,
                  expert_shared_bytes<T>(g), stream, dw, dout, inp, g, accumulate);
}
#endif

} // namespace llmc
