// fp8_gather.cuh - parts of matrices as fp8 codes, on their way between ranks - arXiv:2310.18313
//   ZeRO-3 gathers weights in shards, and products of blocks cast them to e4m3 (linear.cuh). So
//   ranks may send codes, a byte an element instead of two. A shard begins and ends anywhere in a
//   matrix, and a block of 128 x 128 lies on several ranks:
//     1. maxima   a rank's largest magnitude in each block that it has a part of
//     2.          the caller takes the largest over all ranks
//     3. codes    of the rank's part, each with the scale of its whole block
//     4.          the caller gathers the codes of all parts
//     5. values   of all codes: code / scale, which are bf16 numbers
//   The bits of a product are those of weights that were gathered wide: the values are the values
//   of the same codes, and casting them again changes none. Their maximum is the block's, rounded
//   to e4m3. It gives the same scale, or a scale of twice that if it was rounded down to 224, and
//   at twice the scale every code has a code too. (A weight of 1.875 2^127 and more is excepted:
//   its code stands for infinity.)
//   x, values (count)   codes (count)   amax (fp8_piece_blocks) bits of |x|, 0 before step 1
//   Contract: amax max=   codes, values =   no order matters: bitwise repeatable.
//   Cost: each step reads its input once, and writes a byte or two an element.
//   To copy: this file, fp8.cuh, types.h and cuda_common.h.
#pragma once
#include <vector>
#include "fp8.cuh"

namespace llmc {

// Elements [first, first + count) of a matrix, row by row.
struct Fp8Piece {
    size_t rows, cols; // of the whole matrix
    size_t first, count;
    bool whole; // one scale for the matrix, else one for each square

    LLMC_HD size_t across() const { return (cols + FP8_BLOCK - 1) / FP8_BLOCK; }
};

// The number of a matrix's scales.
inline size_t fp8_piece_blocks(size_t rows, size_t cols, bool whole) {
    return whole ? 1 : ceil_div(rows, FP8_BLOCK) * ceil_div(cols, FP8_BLOCK);
}

// A run of up to 128 elements in one row and one block: `at` counts from the piece's start. The
// first and the last row of a piece may be cut, so a run may be empty.
struct Fp8Run {
    size_t at, count, block;
};
inline size_t fp8_runs(const Fp8Piece& p) {
    if (p.count == 0) return 0;
    size_t rows = (p.first + p.count - 1) / p.cols - p.first / p.cols + 1;
    return rows * p.across();
}
LLMC_HD inline Fp8Run fp8_run(const Fp8Piece& p, size_t number) {
    size_t row = p.first / p.cols + number / p.across(), square = number % p.across();
    size_t begin = row * p.cols + square * FP8_BLOCK;
    size_t row_end = (row + 1) * p.cols, end = begin + FP8_BLOCK, last = p.first + p.count;

    // Cut the run where the row ends, and where the piece begins and ends.
    end = end < row_end ? end : row_end;
    end = end < last ? end : last;
    begin = begin > p.first ? begin : p.first;
    size_t block = p.whole ? 0 : row / FP8_BLOCK * p.across() + square;
    return {begin - p.first, end > begin ? end - begin : 0, block};
}

// ----------------------------------------------------------------------------
// CPU

// Step 1. Threads have maxima of their own, and take the largest of them at the end.
template <typename T>
void fp8_piece_maxima(uint32_t* amax, const T* x, const Fp8Piece& p, Cpu) { // (blocks) (count)
    size_t blocks = fp8_piece_blocks(p.rows, p.cols, p.whole), runs = fp8_runs(p);
    #pragma omp parallel
    {
        std::vector<uint32_t> own(blocks);
        #pragma omp for
        for (size_t n = 0; n < runs; n++) {
            Fp8Run run = fp8_run(p, n);
            for (size_t i = 0; i < run.count; i++)
                own[run.block] = std::max(own[run.block], fp8_magnitude(x[run.at + i]));
        }
        #pragma omp critical
        for (size_t b = 0; b < blocks; b++)
            amax[b] = std::max(amax[b], own[b]);
    }
}

// Step 3.
template <typename T>
void fp8_piece_codes(e4m3* codes, const T* x, const uint32_t* amax, // (count) (count) (blocks)
                     const Fp8Piece& p, Cpu) {
    size_t runs = fp8_runs(p);
    #pragma omp parallel for
    for (size_t n = 0; n < runs; n++) {
        Fp8Run run = fp8_run(p, n);
        float scale = fp8_scale<e4m3>(amax[run.block]);
        for (size_t i = run.at; i < run.at + run.count; i++)
            codes[i] = fp8_code<e4m3>(to_float(x[i]), scale, false);
    }
}

// Step 5.
template <typename T>
void fp8_piece_values(T* values, const e4m3* codes,            // (count) (count)
                      const uint32_t* amax, const Fp8Piece& p, // (blocks)
                      Cpu) {
    size_t runs = fp8_runs(p);
    #pragma omp parallel for
    for (size_t n = 0; n < runs; n++) {
        Fp8Run run = fp8_run(p, n);
        float back = 1 / fp8_scale<e4m3>(amax[run.block]); // exact
        for (size_t i = run.at; i < run.at + run.count; i++)
            values[i] = fp8_result<T>(codes[i], back);
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

constexpr unsigned FP8_RUN_WARPS = 8; // in a block of threads

// Each step has a warp for each run: its lanes read neighbours. Return the run, or an empty one.
__device__ inline Fp8Run fp8_run_of_warp(const Fp8Piece& p, size_t runs) {
    size_t n = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    return n < runs ? fp8_run(p, n) : Fp8Run{};
}

template <typename T>
__global__ void fp8_piece_maxima_kernel(uint32_t* amax, const T* x, Fp8Piece p, size_t runs) {
    Fp8Run run = fp8_run_of_warp(p, runs);
    uint32_t most = 0;
    for (size_t i = threadIdx.x % 32; i < run.count; i += 32) {
        uint32_t m = fp8_magnitude(x[run.at + i]);
        most = m > most ? m : most;
    }
    most = warp_max(most);
    if (threadIdx.x % 32 == 0 && run.count)
        atomicMax(amax + run.block, most);
}

template <typename T>
__global__ void fp8_piece_codes_kernel(e4m3* codes, const T* x, const uint32_t* amax, Fp8Piece p,
                                       size_t runs) {
    Fp8Run run = fp8_run_of_warp(p, runs);
    if (!run.count) return;
    float scale = fp8_scale<e4m3>(amax[run.block]);
    for (size_t i = threadIdx.x % 32; i < run.count; i += 32)
        codes[run.at + i] = fp8_code<e4m3>(to_float(x[run.at + i]), scale, false);
}

template <typename T>
__global__ void fp8_piece_values_kernel(T* values, const e4m3* codes, const uint32_t* amax,
                                        Fp8Piece p, size_t runs) {
    Fp8Run run = fp8_run_of_warp(p, runs);
    if (!run.count) return;
    float back = 1 / fp8_scale<e4m3>(amax[run.block]);
    for (size_t i = threadIdx.x % 32; i < run.count; i += 32)
        values[run.at + i] = fp8_result<T>(codes[run.at + i], back);
}

// ----------------------------------------------------------------------------
// launchers; the arguments are the CPU versions'

template <typename Kernel, typename... Operands>
void launch_fp8_runs(Kernel* kernel, const Fp8Piece& p, cudaStream_t stream,
                     Operands... operands) {
    size_t runs = fp8_runs(p), blocks = ceil_div(runs, size_t(FP8_RUN_WARPS));
    LLMC_CHECK(blocks <= 0x7fffffff, "%zu runs are more than a grid has", runs);
    if (runs)
        launch(kernel, unsigned(blocks), FP8_RUN_WARPS * 32, 0, stream, operands..., p, runs);
}
template <typename T>
void fp8_piece_maxima(uint32_t* amax, const T* x, const Fp8Piece& p, cudaStream_t stream) {
    launch_fp8_runs(fp8_piece_maxima_kernel<T>, p, stream, amax, x);
}
template <typename T>
void fp8_piece_codes(e4m3* codes, const T* x, const uint32_t* amax, const Fp8Piece& p,
                     cudaStream_t stream) {
    launch_fp8_runs(fp8_piece_codes_kernel<T>, p, stream, codes, x, amax);
}
template <typename T>
void fp8_piece_values(T* values, const e4m3* codes, const uint32_t* amax, const Fp8Piece& p,
                      cudaStream_t stream) {
    launch_fp8_runs(fp8_piece_values_kernel<T>, p, stream, values, codes, amax);
}
#endif

} // namespace llmc
