// grouped_matmul.cuh - a product for each expert, over rows that are sorted by expert
//   Rows [starts[e], starts[e+1]) belong to expert e, which has W_e (OC,IC) of a stack of E:
//     out = or += inp W_e^T      dinp = or += dout W_e      dW_e = or += dout_e^T inp_e
//   inp, dinp (M,IC)   out, dout (M,OC)   W (E,OC,IC)   dW (E,OC,IC) acc   starts (E+1)
//   On the CPU each expert's rows take products of matmul.cuh. oneDNN makes a product for each
//   number of rows that it sees, so an expert's rows are cut into powers of two from 64 to 1024;
//   fewer rows than 64 run in our own loops. On a GPU all experts take one launch, on tensor cores
//   (grouped_mma.cuh, grouped_sm90.cuh). Float, and sizes that are not multiples of 8, have a
//   simple kernel: tiles of 64 x 64 in shared memory, float arithmetic. It is correct, not fast. A
//   block finds its expert by walking starts, which the host never reads.
//   Contract: out, dinp, dW = or += (accumulate). dW of an expert without rows becomes 0, or is
//             left unchanged when accumulating. Bitwise repeatable; on a GPU a row's bits depend on
//             nothing but the row and its expert's matrix.
//   Cost: 2 M IC OC FLOPs each.
//   To copy: this file, element_type.h, gpu.h, grouped_mma.cuh, grouped_sm90.cuh, hopper.cuh,
//            matmul.cuh, mma.cuh, tensor_cores.h, types.h and cuda_common.h.
#pragma once
#include <bit>
#include "cuda_common.h"
#include "element_type.h"
#include "grouped_mma.cuh"
#include "grouped_sm90.cuh"
#include "matmul.cuh"
#include "types.h"

namespace llmc {

// ----------------------------------------------------------------------------
// CPU

// The limits of a block of rows on the CPU; each size is one oneDNN product.
constexpr size_t LEAST_ROWS = 64;
constexpr size_t MOST_ROWS = 1024;

// Call f(e, first, count) for each block of rows of each expert e.
template <typename F>
void for_each_row_block(const Groups& g, F f) {
    for (size_t e = 0; e < g.E; e++) {
        size_t end = g.starts[e + 1];
        size_t count;
        for (size_t first = g.starts[e]; first < end; first += count) {
            // Take the largest power of two that is left; below LEAST_ROWS take the rest.
            size_t left = end - first;
            count = left < LEAST_ROWS ? left : std::min(std::bit_floor(left), MOST_ROWS);
            f(e, first, count);
        }
    }
}

// The product out = inp W_e^T for `rows` rows.
inline Product grouped_forward_product(const Groups& g, size_t rows, bool accumulate) {
    return {rows, g.OC, g.IC, {g.IC, 1}, {1, g.IC}, g.OC, accumulate};
}

// The product dinp = dout W_e. Its sum runs along the columns of W_e.
inline Product grouped_input_product(const Groups& g, size_t rows, bool accumulate) {
    return {rows, g.IC, g.OC, {g.OC, 1}, {g.IC, 1}, g.IC, accumulate};
}

// The product dW_e = dout_e^T inp_e. Its sum runs over the rows.
inline Product grouped_weight_product(const Groups& g, size_t rows, bool accumulate) {
    return {g.OC, g.IC, rows, {1, g.OC}, {g.IC, 1}, g.IC, accumulate};
}

// The product of one block of rows.
template <typename T, typename O>
void grouped_block(O* out, const T* a, const T* b, const Product& p, size_t rows, Blas& blas,
                   Cpu where) {
    const T* no_bias = nullptr;
    const O* no_residual = nullptr;
    // Few rows run in our own loops: making a library product would cost more than they do.
    if (rows < LEAST_ROWS)
        return matmul_plain(out, a, b, no_bias, no_residual, p, blas.scratch);
    matmul(out, a, b, no_bias, no_residual, p, blas, where);
}

// The largest scratch that a block of any of the three products needs.
template <typename T>
size_t grouped_scratch_bytes(const Groups& g, Cpu where) {
    Type t = type_of<T>();        // of W and activations
    Type a = type_of<acc_t<T>>(); // of gradients
    size_t tallest = std::max(g.OC, LEAST_ROWS);
    size_t most = matmul_plain_scratch_bytes(tallest, sizeof(acc_t<T>), threads_here(where));

    // Ask for every number of rows that a block may have.
    for (size_t rows = LEAST_ROWS; rows <= std::min(g.M, MOST_ROWS); rows *= 2)
        for (bool accumulate : {false, true}) {
            Product forward = grouped_forward_product(g, rows, accumulate);
            Product input = grouped_input_product(g, rows, accumulate);
            Product weight = grouped_weight_product(g, rows, accumulate);
            most = std::max({most, matmul_scratch_bytes({forward, input}, t, t, where),
                             matmul_scratch_bytes({weight}, t, a, where)});
        }
    return most;
}

// out = or += inp W_e^T.
template <typename T>
void grouped_forward(T* out, const T* inp, const T* w, // (M,OC) (M,IC) (E,OC,IC)
                     const Groups& g, bool accumulate, Blas& blas, Cpu where) {
    for_each_row_block(g, [&](size_t e, size_t first, size_t rows) {
        grouped_block(out + first * g.OC, inp + first * g.IC, w + e * g.OC * g.IC,
                      grouped_forward_product(g, rows, accumulate), rows, blas, where);
    });
}

// dinp = or += dout W_e.
template <typename T>
void grouped_backward_input(T* dinp, const T* dout, const T* w, // (M,IC) (M,OC) (E,OC,IC)
                            const Groups& g, bool accumulate, Blas& blas, Cpu where) {
    for_each_row_block(g, [&](size_t e, size_t first, size_t rows) {
        grouped_block(dinp + first * g.IC, dout + first * g.OC, w + e * g.OC * g.IC,
                      grouped_input_product(g, rows, accumulate), rows, blas, where);
    });
}

// dW_e = or += dout_e^T inp_e.
template <typename T>
void grouped_backward_weight(acc_t<T>* dw, const T* dout, const T* inp, // (E,OC,IC) (M,OC) (M,IC)
                             const Groups& g, bool accumulate, Blas& blas, Cpu where) {
    // An expert without rows has no block that writes: write zeros.
    size_t matrix = g.OC * g.IC;
    for (size_t e = 0; e < g.E; e++)
        if (!accumulate && g.starts[e] == g.starts[e + 1])
            std::fill_n(dw + e * matrix, matrix, acc_t<T>(0));

    // An expert's first block of rows writes, the others add.
    for_each_row_block(g, [&](size_t e, size_t first, size_t rows) {
        bool adds = accumulate || first > size_t(g.starts[e]);
        grouped_block(dw + e * matrix, dout + first * g.OC, inp + first * g.IC,
                      grouped_weight_product(g, rows, adds), rows, blas, where);
    });
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

// A tile of out has 64 x 64 elements, 4 x 4 of them a thread. Shared memory holds 16 of K.
constexpr unsigned GROUPED_TILE = 64, GROUPED_K = 16, GROUPED_THREADS = 256;

// Read GROUPED_K x GROUPED_TILE elements into `tile` as float, with zeros beyond the edges.
// Neighbouring threads read along the stride of 1.
template <typename T>
__device__ void read_grouped_tile(float* tile, const T* x, Strides s, // (k,i) at k row + i column
                                  size_t ks, size_t is) {
    for (unsigned at = threadIdx.x; at < GROUPED_K * GROUPED_TILE; at += GROUPED_THREADS) {
        // Number the elements along the stride of 1. Either way each is read once.
        bool along_k = s.row == 1;
        unsigned k = at / GROUPED_TILE;
        unsigned i = at % GROUPED_TILE;
        if (along_k) {
            k = at % GROUPED_K;
            i = at / GROUPED_K;
        }

        // Write 0 beyond the edges.
        bool there = k < ks && i < is;
        tile[k * GROUPED_TILE + i] = there ? to_float(x[k * s.row + i * s.column]) : 0.0f;
    }
}

// One tile: out (rows,cols) = or += the sum over K of a(k,i) b(k,j). All threads must call it.
template <typename T, typename O>
__device__ void grouped_tile(O* out, size_t out_row, const T* a, Strides sa, const T* b, Strides sb,
                             size_t rows, size_t cols, size_t K, bool accumulate) {
    LLMC_SHARED(float, tile_a, GROUPED_K * GROUPED_TILE);
    LLMC_SHARED(float, tile_b, GROUPED_K * GROUPED_TILE);

    // This thread's 4 x 4 elements.
    unsigned i0 = threadIdx.x / 16 * 4;
    unsigned j0 = threadIdx.x % 16 * 4;
    float sum[4][4] = {};

    // Walk the sum, GROUPED_K at a time.
    for (size_t k0 = 0; k0 < K; k0 += GROUPED_K) {
        read_grouped_tile(tile_a, a + k0 * sa.row, sa, K - k0, rows);
        read_grouped_tile(tile_b, b + k0 * sb.row, sb, K - k0, cols);
        __syncthreads(); // both tiles are there
        for (unsigned k = 0; k < GROUPED_K; k++)
            for (unsigned i = 0; i < 4; i++)
                for (unsigned j = 0; j < 4; j++) {
                    float x = tile_a[k * GROUPED_TILE + i0 + i];
                    float y = tile_b[k * GROUPED_TILE + j0 + j];
                    sum[i][j] += x * y;
                }
        __syncthreads(); // all have read: the next round may write
    }

    // Write the part of the tile that exists.
    for (unsigned i = 0; i < 4; i++)
        for (unsigned j = 0; j < 4; j++) {
            size_t row = i0 + i;
            size_t col = j0 + j;
            if (row >= rows || col >= cols) continue;

            // Round once, the old value included.
            O& to = out[row * out_row + col];
            float x = sum[i][j];
            if (accumulate) x += to_float(to);
            to = from_acc<O>(x);
        }
}

// Products of rows with W: out (M,cols) = or += a (M,K) b_e, where b_e(k,j) is in the
// expert's matrix. blockIdx.y counts tiles of rows, expert after expert; some of the last
// blocks have no tile.
template <typename T>
__global__ void grouped_rows_kernel(T* out, const T* a, const T* b, Strides sb, Groups g,
                                    size_t cols, size_t K, bool accumulate) {
    // Find the expert of this tile.
    size_t tile = blockIdx.y, e = 0;
    for (; e < g.E; e++) {
        size_t rows = size_t(g.starts[e + 1] - g.starts[e]);
        size_t tiles = ceil_div(rows, GROUPED_TILE);
        if (tile < tiles) break;
        tile -= tiles;
    }
    if (e == g.E)
        return; // all threads leave together

    // Point at the tile's rows, and at its columns of W.
    size_t first = size_t(g.starts[e]) + tile * GROUPED_TILE;
    size_t end = size_t(g.starts[e + 1]);
    size_t j = size_t(blockIdx.x) * GROUPED_TILE;
    grouped_tile(out + first * cols + j, cols, a + first * K, {1, K},
                 b + e * g.OC * g.IC + j * sb.column, sb, end - first, cols - j, K, accumulate);
}

// A block has a tile of one expert's gradient and sums over all of the expert's rows.
template <typename T>
__global__ void grouped_weight_kernel(float* dw, const T* dout, const T* inp, Groups g,
                                      bool accumulate) {
    size_t e = blockIdx.z;
    size_t first = size_t(g.starts[e]);
    size_t end = size_t(g.starts[e + 1]);

    // The first row and column of the tile within the gradient.
    size_t i = size_t(blockIdx.y) * GROUPED_TILE;
    size_t j = size_t(blockIdx.x) * GROUPED_TILE;
    grouped_tile(dw + e * g.OC * g.IC + i * g.IC + j, g.IC, dout + first * g.OC + i, {g.OC, 1},
                 inp + first * g.IC + j, {g.IC, 1}, g.OC - i, g.IC - j, end - first, accumulate);
}

// ----------------------------------------------------------------------------
// launchers

// No scratch: tiles are in shared memory.
template <typename T>
size_t grouped_scratch_bytes(const Groups&, cudaStream_t) { return 0; }

// The grid of grouped_rows_kernel. Each expert may end in a tile that is not full.
inline dim3 grouped_grid(const Groups& g, size_t cols) {
    // Blocks without a tile return at once.
    return dim3(unsigned(ceil_div(cols, GROUPED_TILE)),
                unsigned(ceil_div(g.M, GROUPED_TILE) + g.E));
}

// out = or += inp W_e^T. starts must be on the device; the host never reads it.
template <typename T>
void grouped_forward(T* out, const T* inp, const T* w, const Groups& g, bool accumulate, Blas&,
                     cudaStream_t stream) {
    if constexpr (IS_BF16_OR_FP16<T>)
        if (grouped_mma_takes<T>(g, out, inp, w))
            return grouped_tensor_cores<true, true>(out, inp, w, g, accumulate, stream);
    launch(grouped_rows_kernel<T>, grouped_grid(g, g.OC), GROUPED_THREADS, stream, out, inp, w,
           Strides{1, g.IC}, g, g.OC, g.IC, accumulate);
}

// dinp = or += dout W_e: the same kernel with the strides of W exchanged.
template <typename T>
void grouped_backward_input(T* dinp, const T* dout, const T* w, const Groups& g, bool accumulate,
                            Blas&, cudaStream_t stream) {
    if constexpr (IS_BF16_OR_FP16<T>)
        if (grouped_mma_takes<T>(g, dinp, dout, w))
            return grouped_tensor_cores<true, false>(dinp, dout, w, g, accumulate, stream);
    launch(grouped_rows_kernel<T>, grouped_grid(g, g.IC), GROUPED_THREADS, stream, dinp, dout, w,
           Strides{g.IC, 1}, g, g.IC, g.OC, accumulate);
}

// dW_e = or += dout_e^T inp_e. An expert without rows still has its blocks, which write zeros.
template <typename T>
void grouped_backward_weight(float* dw, const T* dout, const T* inp, const Groups& g,
                             bool accumulate, Blas&, cudaStream_t stream) {
    if constexpr (IS_BF16_OR_FP16<T>)
        if (grouped_mma_takes<T>(g, dw, dout, inp))
            return grouped_tensor_cores<false, false>(dw, dout, inp, g, accumulate, stream);
    // One block for each tile of each expert's matrix.
    dim3 grid(unsigned(ceil_div(g.IC, GROUPED_TILE)), unsigned(ceil_div(g.OC, GROUPED_TILE)),
              unsigned(g.E));
    launch(grouped_weight_kernel<T>, grid, GROUPED_THREADS, stream, dw, dout, inp, g, accumulate);
}
#endif

} // namespace llmc
