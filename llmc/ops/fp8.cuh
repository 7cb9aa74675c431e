// fp8.cuh - 8-bit floats and matrices in them, with a scale for each block - arXiv:2209.05433
//   e4m3  sign, 4 bits of exponent, 3 of mantissa: from 2^-9 to 448, no infinity
//   e5m2  sign, 5 and 2: from 2^-16 to 57344, infinity and NaN as in IEEE's types
//   A matrix (rows,cols) is a code of 8 bits for each element and a scale for each block of them:
//     1. amax    the largest |x| of the block, as an integer: the bits of floats are in order
//     2. scale   the largest power of two with amax scale <= 448 (57344), from amax's exponent
//     3. code    x scale, rounded to nearest, ties to even;   x ~ code / scale
//   A block is 1 x 128 (ROWS), 128 x 1 (COLUMNS), 128 x 128 (SQUARES), or the matrix (WHOLE). The
//   last block of a row or column is smaller where 128 does not divide.
//
//   A power of two changes only the exponent, so quantising cuts mantissas and does no more: finite
//   numbers never saturate, a code stands for a bf16 number, and a different cut into blocks
//   changes results only where small numbers underflow. (From 1.875 2^127 on, at the end of bf16, a
//   code may stand for 2^128, which is infinity.)
//   In the order of bits NaN is larger than any number, so no maximum loses it. A block with an
//   infinity or a NaN has scale 1 and keeps its NaNs; e4m3 makes the infinity a NaN.
//   x (rows,cols) float or 16 bits; kernels take 16 bits only
//   out (rows,cols), transposed (cols,rows)   codes, or T: the values that they stand for
//   inverse   1 / scale of each block, in fp8_scales()'s order; its gaps are not written
//   Contract: out, transposed, inverse =   maxima do not depend on order: bitwise repeatable.
//   Cost: reads x once, WHOLE twice; writes a byte an element, two where values are wanted. The
//         kernels are the definition and not fast: 69 instructions an element for codes both ways,
//         beside which the bytes take less than half of the time on an H100.
//   Error of normal numbers: e4m3 2.7%, e5m2 5.3% of their root mean square.
//   To copy: this file, types.h and cuda_common.h.
#pragma once
#include <algorithm>
#include "cuda_common.h"
#include "types.h"

namespace llmc {

// ----------------------------------------------------------------------------
// the two formats

// The two formats. LEAST is the exponent of the least normal number, TOP the code of the largest
// finite number, and OVER the code of anything beyond it.
struct e4m3 {
    uint8_t bits;
    static constexpr int MANTISSA = 3, LEAST = -6;     // MANTISSA in bits
    static constexpr uint32_t TOP = 0x7e, OVER = 0x7f; // 448; beyond it: NaN
    static constexpr int TOP_EXPONENT = 8;
};
struct e5m2 {
    uint8_t bits;
    static constexpr int MANTISSA = 2, LEAST = -14;
    static constexpr uint32_t TOP = 0x7b, OVER = 0x7c; // 57344; beyond it: infinity
    static constexpr int TOP_EXPONENT = 15;
};

constexpr uint32_t FP8_INFINITY = 0x7f800000; // bits of a float; larger ones are NaN

// Round to nearest, ties to even. A number beyond the largest becomes the largest
// (saturate) or OVER.
template <typename F>
LLMC_HD inline F to_fp8(float x, bool saturate) {
    constexpr int M = F::MANTISSA, CUT = 23 - M;
    uint32_t u = bits_as<uint32_t>(x);
    uint32_t sign = u >> 24 & 0x80;
    u &= 0x7fffffff;

    // Round a subnormal by adding a power of two: one unit in that sum's last place is code 1.
    constexpr uint32_t big = uint32_t(127 + F::LEAST - M + 23) << 23;
    uint32_t low = bits_as<uint32_t>(bits_as<float>(u) + bits_as<float>(big)) - big;

    // Round a normal number's mantissa, and rebias its exponent.
    uint32_t high = (u + (1u << (CUT - 1)) - 1 + (u >> CUT & 1)) >> CUT;
    high -= uint32_t(126 + F::LEAST) << M;

    // Choose by |x|. Both results are computed, so that a loop has no branch.
    uint32_t code = u < uint32_t(127 + F::LEAST) << 23 ? low : high;
    code = code <= F::TOP ? code : saturate ? F::TOP : F::OVER;
    return {uint8_t(u > FP8_INFINITY ? 0x7f : sign | code)}; // a NaN loses its sign
}

// The value of a code, exactly. Placed as a float, its exponent and mantissa are the value over a
// power of two.
template <typename F>
LLMC_HD inline float fp8_value(F x) {
    constexpr float power = F::MANTISSA == 3 ? 0x1p120f : 0x1p112f;
    uint32_t code = x.bits & 0x7f, u = code << (23 - F::MANTISSA);
    uint32_t sign = uint32_t(x.bits & 0x80) << 24;
    uint32_t value = bits_as<uint32_t>(bits_as<float>(u) * power);
    return bits_as<float>((code <= F::TOP ? value : u | FP8_INFINITY) | sign);
}
LLMC_HD inline float to_float(e4m3 x) { return fp8_value(x); }
LLMC_HD inline float to_float(e5m2 x) { return fp8_value(x); }

// ----------------------------------------------------------------------------
// scales

// |x| as an integer that has the order of |x|.
template <typename T>
LLMC_HD inline uint32_t fp8_magnitude(T x) { return bits_as<uint32_t>(to_float(x)) & 0x7fffffff; }

// The scale of a block, from the largest fp8_magnitude in it. Both formats end at 1.75 2^n, so the
// mantissa of amax tells whether 2^(n - exponent) would be too large.
template <typename F>
LLMC_HD inline float fp8_scale(uint32_t amax) {
    constexpr uint32_t TOP_MANTISSA = 0x600000; // 0.75
    if (amax == 0 || amax >= FP8_INFINITY)
        return 1;
    int e = F::TOP_EXPONENT + 127 - int(amax >> 23) - ((amax & 0x7fffff) > TOP_MANTISSA);
    return bits_as<float>(uint32_t(127 + (e < 127 ? e : 127)) << 23);
}

// How the products of a linear layer quantise their operands (linear.cuh).
enum class Fp8 : uint8_t { NONE, BLOCK, TENSOR, DELAYED };

// Delayed scaling: the scale of a matrix is known before the matrix is (fp8_delayed.cuh).
struct Fp8Late {
    const float* scale = nullptr; // 0: no step has set it; null: compute the blocks' own
    uint32_t* amax = nullptr;     // the largest magnitude of this step; null: not wanted

    // The same for slot i of an array of matrices.
    LLMC_HD Fp8Late at(size_t i) const {
        return {scale ? scale + i : nullptr, amax ? amax + i : nullptr};
    }
};

// Round a scale down to a power of two, so that codes stand for bf16 numbers.
LLMC_HD inline float fp8_late_scale(float scale) {
    constexpr uint32_t EXPONENT = 0x7f800000, LEAST_NORMAL = 0x00800000;
    if (scale == 0) return 1;
    uint32_t power = bits_as<uint32_t>(scale) & EXPONENT;
    return bits_as<float>(power > LEAST_NORMAL ? power : LEAST_NORMAL);
}

constexpr size_t FP8_BLOCK = 128, FP8_ALIGN = 256; // elements; bytes
enum class Fp8Blocks : uint8_t { ROWS, COLUMNS, SQUARES, SQUARES_T, WHOLE };

// The stride between rows of squares' scales: a multiple of four, as cuBLASLt reads them.
LLMC_HD inline size_t fp8_square_row(size_t squares) { return (squares + 3) / 4 * 4; }

// The number of scales, in the layout that products read (fp8_matmul.cuh). A transpose has the same
// squares; SQUARES_T lays their scales out for it.
//   ROWS (cols/128, rows)            SQUARES   (rows/128, cols/128, up to a multiple of 4)
//   COLUMNS (rows/128, cols)         SQUARES_T (cols/128, rows/128, up to a multiple of 4)
//   WHOLE (1)
inline size_t fp8_scales(size_t rows, size_t cols, Fp8Blocks blocks) {
    size_t down = ceil_div(rows, FP8_BLOCK), across = ceil_div(cols, FP8_BLOCK);
    switch (blocks) {
    case Fp8Blocks::ROWS: return across * rows;
    case Fp8Blocks::COLUMNS: return down * cols;
    case Fp8Blocks::SQUARES: return down * fp8_square_row(across);
    case Fp8Blocks::SQUARES_T: return across * fp8_square_row(down);
    case Fp8Blocks::WHOLE: return 1;
    }
    return 0;
}

// Return a code itself, or the value that it stands for, as Out says.
template <typename Out, typename F>
LLMC_HD inline Out fp8_result(F code, float inverse) {
    if constexpr (std::is_same_v<Out, F>)
        return code;
    else
        return from_acc<Out>(fp8_value(code) * inverse);
}

// A tile of 128 x 128 elements and the blocks in it. A block's number is its row, its column, or 0.
struct Fp8Tile {
    size_t r0, c0;     // the first row and column
    size_t rows, cols; // of the whole matrix
    Fp8Blocks blocks;

    LLMC_HD bool has(size_t r, size_t c) const { return r0 + r < rows && c0 + c < cols; }
    LLMC_HD size_t block(size_t r, size_t c) const {
        return blocks == Fp8Blocks::ROWS ? r : blocks == Fp8Blocks::COLUMNS ? c : 0;
    }

    // The index of a block's scale, or -1 if the tile has no such block or another tile writes it.
    LLMC_HD ptrdiff_t place(size_t block) const {
        size_t down = r0 / FP8_BLOCK, across = c0 / FP8_BLOCK;
        size_t down_row = fp8_square_row(ceil_div(rows, FP8_BLOCK));
        size_t across_row = fp8_square_row(ceil_div(cols, FP8_BLOCK));
        bool first = block == 0;
        switch (blocks) {
        case Fp8Blocks::ROWS: return has(block, 0) ? ptrdiff_t(across * rows + r0 + block) : -1;
        case Fp8Blocks::COLUMNS: return has(0, block) ? ptrdiff_t(down * cols + c0 + block) : -1;
        case Fp8Blocks::SQUARES: return first ? ptrdiff_t(down * across_row + across) : -1;
        case Fp8Blocks::SQUARES_T: return first ? ptrdiff_t(across * down_row + down) : -1;
        case Fp8Blocks::WHOLE: return first && r0 + c0 == 0 ? 0 : -1;
        }
        return -1;
    }
};

// ----------------------------------------------------------------------------
// CPU

// Find the largest magnitude of each of a tile's blocks.
template <typename T>
void fp8_tile_maxima(uint32_t* amax, const T* x, const Fp8Tile& t) { // (128) (rows,cols)
    size_t count = std::min(FP8_BLOCK, t.cols - t.c0);
    for (size_t r = 0; r < FP8_BLOCK && t.has(r, 0); r++) {
        const T* row = x + (t.r0 + r) * t.cols + t.c0; // (count)

        // Each column has a maximum of its own; a row adds its maximum to its block's.
        if (t.blocks == Fp8Blocks::COLUMNS) {
            for (size_t c = 0; c < count; c++)
                amax[c] = std::max(amax[c], fp8_magnitude(row[c]));
        } else {
            uint32_t most = 0;
            for (size_t c = 0; c < count; c++)
                most = std::max(most, fp8_magnitude(row[c]));
            amax[t.block(r, 0)] = std::max(amax[t.block(r, 0)], most);
        }
    }
}

// The code of x. A finite number that a late scale makes too large saturates; infinity does not.
template <typename F>
LLMC_HD inline F fp8_code(float x, float scale, bool late) {
    return to_fp8<F>(x * scale, late && fp8_magnitude(x) < FP8_INFINITY);
}

// Quantise one tile. `whole` is the matrix's amax, used by WHOLE alone.
template <typename F, typename Out, typename T>
void fp8_quantise_tile(Out* out, Out* transposed, float* inverse, const T* x, uint32_t whole,
                       const Fp8Late& late, const Fp8Tile& t) {
    // Find the maxima of the tile's blocks, and their scales.
    uint32_t amax[FP8_BLOCK] = {whole};
    float scale[FP8_BLOCK], back[FP8_BLOCK];
    if (t.blocks != Fp8Blocks::WHOLE)
        fp8_tile_maxima(amax, x, t);
    for (size_t b = 0; b < FP8_BLOCK; b++) {
        scale[b] = late.scale ? fp8_late_scale(*late.scale) : fp8_scale<F>(amax[b]);
        back[b] = 1 / scale[b]; // exact
        if (ptrdiff_t at = t.place(b); inverse && at >= 0)
            inverse[at] = back[b];
    }

    // Quantise one row at a time, into out and into a column of the transpose.
    size_t count = std::min(FP8_BLOCK, t.cols - t.c0);
    for (size_t r = 0; r < FP8_BLOCK && t.has(r, 0); r++) {
        const T* row = x + (t.r0 + r) * t.cols + t.c0; // (count)
        bool own = t.blocks == Fp8Blocks::COLUMNS;     // each column has a scale of its own
        Out results[FP8_BLOCK];
        for (size_t c = 0; c < count; c++) {
            size_t b = own ? c : t.block(r, 0);
            F code = fp8_code<F>(to_float(row[c]), scale[b], late.scale);
            results[c] = fp8_result<Out>(code, back[b]);
        }

        // Write the row.
        if (out)
            std::copy(results, results + count, out + (t.r0 + r) * t.cols + t.c0);
        for (size_t c = 0; transposed && c < count; c++)
            transposed[(t.c0 + c) * t.rows + t.r0 + r] = results[c];
    }
}

// Quantise a matrix. One of out and transposed may be null. inverse: fp8_scales() floats that turn
// codes back into numbers, or null.
//   amax: one word of scratch for WHOLE; other blocks need none
//   late: for WHOLE, a scale that is already known; amax is then not touched
template <typename F, typename Out, typename T>
void fp8_quantise(Out* out, Out* transposed, float* inverse, // (rows,cols) (cols,rows)
                  const T* x, uint32_t* amax,                // (rows,cols) (1)
                  size_t rows, size_t cols, Fp8Blocks blocks, Cpu, Fp8Late late = {}) {
    // Find the maximum of the whole matrix first, if it is needed.
    uint32_t most = 0;
    if (blocks == Fp8Blocks::WHOLE && (!late.scale || late.amax)) {
        #pragma omp parallel for reduction(max : most)
        for (size_t i = 0; i < rows * cols; i++)
            most = std::max(most, fp8_magnitude(x[i]));
        if (late.scale)
            *late.amax = std::max(*late.amax, most);
        else
            *amax = most;
    }

    // Share out the tiles, which are independent.
    #pragma omp parallel for collapse(2)
    for (size_t r0 = 0; r0 < rows; r0 += FP8_BLOCK)
        for (size_t c0 = 0; c0 < cols; c0 += FP8_BLOCK)
            fp8_quantise_tile<F>(out, transposed, inverse, x, most, late,
                                 {r0, c0, rows, cols, blocks});
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

constexpr unsigned FP8_WARPS = 8;               // in a block
constexpr unsigned FP8_COLUMNS = FP8_BLOCK / 32; // of a lane: lane, lane + 32, ...

// *amax = the largest magnitude of n elements. It must start as 0.
template <typename T>
__global__ void fp8_amax_kernel(uint32_t* amax, const T* x, size_t n) {
    uint32_t most = 0;
    size_t step = size_t(gridDim.x) * blockDim.x;
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
        uint32_t m = fp8_magnitude(x[i]);
        most = m > most ? m : most;
    }

    most = warp_max(most);
    if (threadIdx.x % 32 == 0)
        atomicMax(amax, most);
}

// A block quantises one tile, held in shared memory. A warp has every eighth row, and a lane has
// four columns of a row.
template <typename F, typename Out, typename T>
__global__ void __launch_bounds__(FP8_WARPS * 32)
fp8_quantise_kernel(Out* out, Out* transposed, float* inverse, const T* x, const uint32_t* whole,
                    size_t rows, size_t cols, Fp8Blocks blocks, Fp8Late late) {
    static_assert(sizeof(T) == 2, "a tile of wider elements does not fit into shared memory");
    constexpr unsigned ROW = FP8_BLOCK + 2; // padded, so that a column lies in different banks
    LLMC_SHARED(T, tile, FP8_BLOCK * ROW);
    LLMC_SHARED(uint32_t, amax, FP8_BLOCK);
    Fp8Tile t = {blockIdx.y * FP8_BLOCK, blockIdx.x * FP8_BLOCK, rows, cols, blocks};
    unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    // Start the maxima with 0, or with the whole matrix's maximum.
    for (unsigned b = threadIdx.x; b < FP8_BLOCK; b += FP8_WARPS * 32)
        amax[b] = blocks == Fp8Blocks::WHOLE && !late.scale ? *whole : 0;
    __syncthreads(); // all maxima are set before a warp adds its own

    // Read the tile, and find the maxima of each row and of this lane's columns.
    uint32_t columns[FP8_COLUMNS] = {};
    for (unsigned r = warp; r < FP8_BLOCK; r += FP8_WARPS) {
        uint32_t most = 0;
        for (unsigned i = 0; i < FP8_COLUMNS; i++) {
            unsigned c = lane + 32 * i;
            if (!t.has(r, c)) continue;
            T value = x[(t.r0 + r) * cols + t.c0 + c];
            uint32_t m = fp8_magnitude(value);
            tile[r * ROW + c] = value;
            most = m > most ? m : most;
            columns[i] = m > columns[i] ? m : columns[i];
        }

        // Add the row's maximum to its block's.
        most = warp_max(most);
        bool wanted = late.amax || (blocks != Fp8Blocks::COLUMNS && blocks != Fp8Blocks::WHOLE);
        if (wanted && lane == 0)
            atomicMax(amax + t.block(r, 0), most);
    }
    for (unsigned i = 0; blocks == Fp8Blocks::COLUMNS && i < FP8_COLUMNS; i++)
        atomicMax(amax + lane + 32 * i, columns[i]);
    __syncthreads(); // the tile is there, and the maxima are complete

    // Add the tile to the step's maximum. Write the scales, one thread for each block.
    if (late.amax && threadIdx.x == 0)
        atomicMax(late.amax, amax[0]);
    auto scale_of = [&](size_t block) {
        return late.scale ? fp8_late_scale(*late.scale) : fp8_scale<F>(amax[block]);
    };
    if (inverse && threadIdx.x < FP8_BLOCK)
        if (ptrdiff_t at = t.place(threadIdx.x); at >= 0)
            inverse[at] = 1 / scale_of(threadIdx.x);

    // Write codes: the rows of the matrix, and the rows of its transpose.
    auto result = [&](unsigned r, unsigned c) {
        float scale = scale_of(t.block(r, c));
        F code = fp8_code<F>(to_float(tile[r * ROW + c]), scale, late.scale);
        return fp8_result<Out>(code, 1 / scale);
    };
    for (unsigned a = warp; a < FP8_BLOCK; a += FP8_WARPS)
        for (unsigned b = lane; b < FP8_BLOCK; b += 32) {
            if (out && t.has(a, b)) out[(t.r0 + a)
                * cols + t.c0 + b] = result(a, b);
            if (transposed && t.has(b, a))
                transposed[(t.c0 + a) * rows + t.r0 + b] = result(b, a);
        }
}

// ----------------------------------------------------------------------------
// launchers

// Quantise a matrix of 16-bit elements; the arguments are the CPU version's.
template <typename F, typename Out, typename T>
void fp8_quantise(Out* out, Out* transposed, float* inverse, // (rows,cols) (cols,rows)
                  const T* x, uint32_t* amax,                // (rows,cols) (1)
                  size_t rows, size_t cols, Fp8Blocks blocks, cudaStream_t stream,
                  Fp8Late late = {}) {
    size_t n = rows * cols;
    if (n == 0) return;

    // Find the maximum of the whole matrix first, if it is needed. A thread reads 16
    // numbers or more.
    if (blocks == Fp8Blocks::WHOLE && !late.scale) {
        unsigned many = unsigned(std::min(ceil_div(n, 4096), size_t(1024)));
        LLMC_CUDA_CHECK(cudaMemsetAsync(amax, 0, sizeof(uint32_t), stream));
        launch(fp8_amax_kernel<T>, many, 256, 0, stream, amax, x, n);
    }

    // Quantise, one block for each tile.
    dim3 tiles(unsigned(ceil_div(cols, FP8_BLOCK)), unsigned(ceil_div(rows, FP8_BLOCK)));
    LLMC_CHECK(tiles.y <= 65535, "%zu rows are more than a grid has", rows);
    launch(fp8_quantise_kernel<F, Out, T>, tiles, FP8_WARPS * 32, 0, stream, out, transposed,
           inverse, x, amax, rows, cols, blocks, late);
}
#endif

} // namespace llmc
