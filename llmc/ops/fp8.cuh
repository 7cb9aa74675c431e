// fp8.cuh - 8-bit floats and matrices in them, with a scale for each block - arXiv:2209.05433
//   e4m3  sign, 4 bits of exponent, 3 of mantissa: from 2^-9 to 448, no infinity
//   e5m2  sign, 5 and 2: from 2^-16 to 57344
//   A matrix (rows,cols) is a code of 8 bits for each element and a scale for each block of them:
//     1. amax    the largest |x| of the block, as an integer: the bits of floats are in order
//     2. scale   the largest power of two with amax scale <= 448 (57344), from amax's exponent
//     3. code    x scale, rounded to nearest, ties to even; infinity becomes NaN; x ~ code / scale
//   A block is 1 x 128 (ROWS), 128 x 1 (COLUMNS), 128 x 128 (SQUARES) or all (WHOLE), less at ends;
//   in MXFP8 (arXiv:2310.10537) 1 x 32 (MX_ROWS) or 32 x 1 (MX_COLUMNS), 1 / scale a byte (E8M0).
//   A power of two changes only the exponent, so quantising cuts mantissas and does no more: finite
//   numbers never saturate, a code stands for a bf16 number, and a different cut into blocks
//   changes results only where small numbers underflow. (From 1.875 2^127 on it may be infinity.)
//   In the order of bits NaN is larger than any number, so no maximum loses it. A block with an
//   infinity or a NaN has scale 1, under which its other numbers may saturate.
//   x (rows,cols) float or 16 bits; kernels take 16 bits only
//   out (rows,cols), transposed (cols,rows)   codes, or T: the values that they stand for
//   inverse   1 / scale of each block, in fp8_scales()'s order: float, with gaps that are not
//             written, or MX's exponents
//   Contract: out, transposed, inverse =   maxima do not depend on order: bitwise repeatable.
//   Cost: reads x once, WHOLE twice; writes a byte an element, two where values are wanted.
//         From sm_89 on codes take 11 instructions an element, which fit beside the bytes.
//   Error of normal numbers: e4m3 2.7%, e5m2 5.3% of their root mean square.
//   To copy: this file, elements.h, types.h and cuda_common.h.
#pragma once
#include <algorithm>
#include "cuda_common.h"
#include "elements.h"
#include "types.h"

namespace llmc {

// ----------------------------------------------------------------------------
// the two formats

// LEAST is the exponent of the least normal number, TOP the code of the largest number.
struct e4m3 {
    uint8_t bits;
    static constexpr int MANTISSA = 3, LEAST = -6;     // MANTISSA in bits
    static constexpr uint32_t TOP = 0x7e; // 448
    static constexpr int TOP_EXPONENT = 8;
};
struct e5m2 {
    uint8_t bits;
    static constexpr int MANTISSA = 2, LEAST = -14;
    static constexpr uint32_t TOP = 0x7b; // 57344
    static constexpr int TOP_EXPONENT = 15;
};

constexpr uint32_t FP8_INFINITY = 0x7f800000; // bits of a float; larger ones are NaN

// Round to nearest, ties to even; what is beyond the largest number, and infinity, becomes the
// largest. CUDA's headers put cvt.rn.satfinite in the place of this function.
template <typename F>
LLMC_HD inline F to_fp8(float x) {
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
    code = code <= F::TOP ? code : F::TOP;
    return {uint8_t(u > FP8_INFINITY ? 0x7f : sign | code)}; // a NaN loses its sign
}

// The value of a code, exactly. Placed as a float, its exponent and mantissa are the value over a
// power of two.
template <typename F>
LLMC_HD inline float fp8_value(F x) {
    const float power = bits_as<float>(uint32_t(253 + F::LEAST) << 23);
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
    if (amax == 0 || amax >= FP8_INFINITY) return 1;
    int e = F::TOP_EXPONENT + 127 - int(amax >> 23) - ((amax & 0x7fffff) > TOP_MANTISSA);
    return bits_as<float>(uint32_t(127 + (e < 127 ? e : 127)) << 23);
}

// How the products of a linear layer quantise their operands (linear.cuh).
enum class Fp8 : uint8_t { NONE, BLOCK, TENSOR, DELAYED, MX, NVFP4 };

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
constexpr size_t MX_BLOCK = 32;                    // elements
enum class Fp8Blocks : uint8_t {
    ROWS, COLUMNS, SQUARES, SQUARES_T, WHOLE, MX_ROWS, MX_COLUMNS, NVFP4_ROWS, NVFP4_COLUMNS
};
// Whether a scale is a byte; whether codes are nvfp4.cuh's, of 4 bits.
LLMC_HD constexpr bool is_mx(Fp8Blocks blocks) { return blocks >= Fp8Blocks::MX_ROWS; }
LLMC_HD constexpr bool is_nvfp4(Fp8Blocks blocks) { return blocks >= Fp8Blocks::NVFP4_ROWS; }

// Whether a block lies in one row; whether in one column.
LLMC_HD constexpr bool in_rows(Fp8Blocks b) {
    return b == Fp8Blocks::ROWS || b == Fp8Blocks::MX_ROWS;
}
LLMC_HD constexpr bool in_columns(Fp8Blocks b) {
    return b == Fp8Blocks::COLUMNS || b == Fp8Blocks::MX_COLUMNS;
}

// The stride between rows of squares' scales: a multiple of four, as cuBLASLt reads them.
LLMC_HD inline size_t fp8_square_row(size_t squares) { return (squares + 3) / 4 * 4; }

// The number of scales, in the layout that products read (fp8_matmul.cuh). A transpose has the same
// squares; SQUARES_T lays their scales out for it.
//   ROWS (cols/128, rows)            SQUARES   (rows/128, cols/128, up to a multiple of 4)
//   COLUMNS (rows/128, cols)         SQUARES_T (cols/128, rows/128, up to a multiple of 4)
//   WHOLE (1)
//   MX_ROWS (rows/128, cols/128, 32, 4, 4): of a tile, row % 32, row / 32, cols/32
//   MX_COLUMNS (cols/128, rows/128, 32, 4, 4): the same of the transpose
//   NVFP4_ROWS, NVFP4_COLUMNS: the same with 64 along K for 128
inline size_t fp8_scales(size_t rows, size_t cols, Fp8Blocks blocks) {
    size_t down = ceil_div(rows, FP8_BLOCK), across = ceil_div(cols, FP8_BLOCK);
    using enum Fp8Blocks;
    switch (blocks) {
    case ROWS: return across * rows;
    case COLUMNS: return down * cols;
    case SQUARES: return down * fp8_square_row(across);
    case SQUARES_T: return across * fp8_square_row(down);
    case WHOLE: return 1;
    case MX_ROWS:
    case MX_COLUMNS: return down * across * 4 * FP8_BLOCK;
    case NVFP4_ROWS: return down * ceil_div(cols, 64) * 4 * FP8_BLOCK;
    case NVFP4_COLUMNS: return across * ceil_div(rows, 64) * 4 * FP8_BLOCK;
    }
    return 0;
}
inline size_t fp8_scale_bytes(size_t rows, size_t cols, Fp8Blocks blocks) {
    return fp8_scales(rows, cols, blocks) * (is_mx(blocks) ? 1 : sizeof(float));
}

// inverse[at] = 1 / scale. E8M0 is the exponent of a float; 2^-127, a subnormal float, has 0. A
// block of zeros has 0 too, which is what cuBLASLt wants beyond the matrix.
LLMC_HD inline void fp8_put_inverse(void* inverse, ptrdiff_t at, float scale, uint32_t amax,
                                    Fp8Blocks blocks) {
    if (is_mx(blocks))
        static_cast<uint8_t*>(inverse)[at] =
            amax ? uint8_t(254 - (bits_as<uint32_t>(scale) >> 23)) : 0;
    else
        static_cast<float*>(inverse)[at] = 1 / scale; // exact
}

// Return a code itself, or the value that it stands for, as Out says.
template <typename Out, typename F>
LLMC_HD inline Out fp8_result(F code, float inverse) {
    if constexpr (std::is_same_v<Out, F>)
        return code;
    else
        return from_acc<Out>(fp8_value(code) * inverse);
}

// A tile of 128 x 128 elements and the blocks in it. A block's number is its row, its column, or 0;
// MX has four in a row or column, 128 numbers apart.
struct Fp8Tile {
    using enum Fp8Blocks;
    size_t r0, c0;     // the first row and column
    size_t rows, cols; // of the whole matrix
    Fp8Blocks blocks;

    LLMC_HD bool has(size_t r, size_t c) const { return r0 + r < rows && c0 + c < cols; }
    LLMC_HD size_t block(size_t r, size_t c) const {
        bool row = in_rows(blocks);
        size_t part = is_mx(blocks) ? (row ? c : r) / MX_BLOCK : 0;
        return part * FP8_BLOCK + (row ? r : in_columns(blocks) ? c : 0);
    }
    LLMC_HD size_t numbers() const { return is_mx(blocks) ? 4 * FP8_BLOCK : FP8_BLOCK; }

    // The index of a block's scale, or -1 if the tile has no such block or another tile writes it.
    LLMC_HD ptrdiff_t place(size_t block) const {
        size_t down = r0 / FP8_BLOCK, across = c0 / FP8_BLOCK;
        size_t down_row = fp8_square_row(ceil_div(rows, FP8_BLOCK));
        size_t across_row = fp8_square_row(ceil_div(cols, FP8_BLOCK));
        bool first = block == 0;
        switch (blocks) {
        case ROWS: return has(block, 0) ? ptrdiff_t(across * rows + r0 + block) : -1;
        case COLUMNS: return has(0, block) ? ptrdiff_t(down * cols + c0 + block) : -1;
        case SQUARES: return first ? ptrdiff_t(down * across_row + across) : -1;
        case SQUARES_T: return first ? ptrdiff_t(across * down_row + down) : -1;
        case WHOLE: return first && r0 + c0 == 0 ? 0 : -1;
        case MX_ROWS: return mx_place(down * ceil_div(cols, FP8_BLOCK) + across, block);
        case MX_COLUMNS: return mx_place(across * ceil_div(rows, FP8_BLOCK) + down, block);
        default: return -1;
        }
    }
    // The index of an MX block's scale. A tile has all its blocks, beyond the matrix too.
    LLMC_HD static ptrdiff_t mx_place(size_t tile, size_t block) {
        size_t row = block % FP8_BLOCK;
        return ptrdiff_t(tile * 4 * FP8_BLOCK + row % 32 * 16 + row / 32 * 4 + block / FP8_BLOCK);
    }
};

// ----------------------------------------------------------------------------
// CPU

// x scale, of which to_fp8() makes the code of x. An infinity becomes NaN.
LLMC_HD inline float fp8_scaled(float x, float scale) {
    return x * scale + x * 0;
}
template <typename F>
LLMC_HD inline F fp8_code(float x, float scale) {
    return to_fp8<F>(fp8_scaled(x, scale));
}

// Quantise one tile. `whole` is the matrix's amax, used by WHOLE alone.
template <typename F, typename Out, typename T>
void fp8_quantise_tile(Out* out, Out* transposed, void* inverse, const T* x, uint32_t whole,
                       const Fp8Late& late, const Fp8Tile& t) {
    // Find the maxima of the tile's blocks, and their scales.
    uint32_t amax[4 * FP8_BLOCK] = {whole};
    float scale[4 * FP8_BLOCK], back[4 * FP8_BLOCK];
    size_t down = std::min(FP8_BLOCK, t.rows - t.r0);
    size_t across = std::min(FP8_BLOCK, t.cols - t.c0);
    const T* tile = x + t.r0 * t.cols + t.c0; // (down, across) of (rows,cols)
    for (size_t r = 0; r < down && t.blocks != Fp8Blocks::WHOLE; r++)
        for (size_t c = 0; c < across; c++) {
            uint32_t& most = amax[t.block(r, c)];
            most = std::max(most, fp8_magnitude(tile[r * t.cols + c]));
        }
    for (size_t b = 0; b < t.numbers(); b++) {
        scale[b] = late.scale ? fp8_late_scale(*late.scale) : fp8_scale<F>(amax[b]);
        back[b] = 1 / scale[b]; // exact
        if (ptrdiff_t at = t.place(b); inverse && at >= 0)
            fp8_put_inverse(inverse, at, scale[b], amax[b], t.blocks);
    }

    // Quantise one row at a time, into out and into a column of the transpose.
    for (size_t r = 0; r < down; r++) {
        Out results[FP8_BLOCK];
        for (size_t c = 0; c < across; c++) {
            size_t b = t.block(r, c);
            F code = fp8_code<F>(to_float(tile[r * t.cols + c]), scale[b]);
            results[c] = fp8_result<Out>(code, back[b]);
        }
        if (out)
            std::copy(results, results + across, out + (t.r0 + r) * t.cols + t.c0);
        for (size_t c = 0; transposed && c < across; c++)
            transposed[(t.c0 + c) * t.rows + t.r0 + r] = results[c];
    }
}

// *amax = the largest magnitude of n elements.
template <typename T>
void fp8_amax(uint32_t* amax, const T* x, size_t n, Cpu) {
    uint32_t most = 0;
    #pragma omp parallel for reduction(max : most)
    for (size_t i = 0; i < n; i++)
        most = std::max(most, fp8_magnitude(x[i]));
    *amax = most;
}

// Quantise a matrix. One of out and transposed may be null. inverse: fp8_scales() numbers that turn
// codes back into x, or null.
//   amax: one word of scratch for WHOLE; other blocks need none
//   late: for WHOLE, a scale that is already known; amax is then not touched
template <typename F, typename Out, typename T>
void fp8_quantise(Out* out, Out* transposed, void* inverse, // (rows,cols) (cols,rows)
                  const T* x, uint32_t* amax,               // (rows,cols) (1)
                  size_t rows, size_t cols, Fp8Blocks blocks, Cpu, Fp8Late late = {}) {
    // Find the maximum of the whole matrix first, if it is needed.
    uint32_t most = 0;
    if (blocks == Fp8Blocks::WHOLE && (!late.scale || late.amax)) {
        fp8_amax(&most, x, rows * cols, Cpu{});
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

constexpr unsigned FP8_THREADS = 256; // in a block
constexpr unsigned FP8_SIDE = 8;      // a thread of fp8_quantise_kernel has 8 x 8 elements
typedef Pack<uint32_t, FP8_SIDE / 2> Fp8Words; // eight elements

__device__ inline uint32_t fp8_larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// A word of two elements, shifted by one, has the order of the upper one's |x|; shifted by 17, that
// of the lower one's. Return the magnitude of such a word's element.
template <typename T>
__device__ inline uint32_t fp8_word_magnitude(uint32_t word) {
    return fp8_magnitude(bits_as<T>(uint16_t(word >> 17)));
}

// to_fp8() of two numbers.
template <typename F>
__device__ inline Pack<F, 2> fp8_pair(float x, float y) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t codes;
    if constexpr (std::is_same_v<F, e4m3>)
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(y), "f"(x));
    else
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(y), "f"(x));
    return bits_as<Pack<F, 2>>(codes);
#else
    return {to_fp8<F>(x), to_fp8<F>(y)};
#endif
}

// *amax = the largest magnitude of n elements. It must start as 0.
template <typename T>
__global__ void fp8_amax_kernel(uint32_t* amax, const T* x, size_t n, bool packs) {
    uint32_t most = 0;
    size_t step = size_t(gridDim.x) * ELEMENT_THREADS * FP8_SIDE;
    for (size_t i = first_element<FP8_SIDE>(); i < n; i += step) {
        auto words = bits_as<Fp8Words>(load_some<FP8_SIDE>(x + i, n - i, packs));
        for (uint32_t w : words.v)
            most = fp8_larger(most, fp8_larger(w << 1, w << 17));
    }

    most = warp_max(fp8_word_magnitude<T>(most));
    if (threadIdx.x % 32 == 0)
        atomicMax(amax, most);
}

// A block quantises one tile; each of its threads holds 8 x 8 elements in registers. A warp has 64
// rows of 32 columns, so that it reads and writes whole sectors of 32 bytes, of the transpose too.
// SQUARES stand for all whose tiles have one scale.
template <typename F, typename Out, typename T, Fp8Blocks BLOCKS>
__global__ void __launch_bounds__(FP8_THREADS)
fp8_quantise_kernel(Out* out, Out* transposed, void* inverse, const T* x, const uint32_t* whole,
                    size_t rows, size_t cols, Fp8Blocks blocks, Fp8Late late, bool packs) {
    static_assert(sizeof(T) == 2, "a word has two elements");
    constexpr unsigned P = FP8_SIDE;
    constexpr bool MX = is_mx(BLOCKS), ROWS = in_rows(BLOCKS), COLUMNS = in_columns(BLOCKS);
    constexpr unsigned SCALES = ROWS || COLUMNS ? P : 1; // of a thread's elements
    constexpr int FIRST = ROWS ? 2 : MX ? 8 : 16, LAST = COLUMNS ? 4 : 1; // bits of lanes
    LLMC_SHARED(uint32_t, amax, FP8_BLOCK);
    LLMC_SHARED(float, scales, FP8_BLOCK);
    if (MX) blocks = BLOCKS;
    Fp8Tile t = {blockIdx.y * FP8_BLOCK, blockIdx.x * FP8_BLOCK, rows, cols, blocks};
    auto scale_at = [](unsigned r, unsigned c) { return ROWS ? r : COLUMNS ? c : 0; };

    // Place the thread: its first row and column, and how many of each there are.
    unsigned warp = threadIdx.x / 32;
    unsigned lane = threadIdx.x % 32;
    unsigned r0 = warp % 2 * 64 + lane / 4 * P;
    unsigned c0 = warp / 2 * 32 + lane % 4 * P;
    size_t row = t.r0 + r0;
    size_t column = t.c0 + c0;
    size_t down = row < rows ? rows - row : 0;
    size_t across = column < cols ? cols - column : 0;

    // Read its elements, as words; zeros stand for those beyond the matrix.
    Fp8Words words[P] = {};
    const T* from = x + row * cols + column;
    for (unsigned r = 0; r < P; r++, from += cols)
        if (r < down)
            words[r] = bits_as<Fp8Words>(load_some<P>(from, across, packs));

    // Start the tile's maxima with 0, or with the whole matrix's maximum.
    if (threadIdx.x < FP8_BLOCK)
        amax[threadIdx.x] = whole ? *whole : 0;
    __syncthreads(); // all maxima are set before a warp adds its own

    // Find the maxima of its blocks.
    uint32_t most[SCALES] = {};
    for (unsigned r = 0; r < P; r++)
        for (unsigned c = 0; c < P; c++) {
            uint32_t& m = most[scale_at(r, c)];
            m = fp8_larger(m, words[r].v[c / 2] << (c % 2 ? 1 : 17));
        }
    for (uint32_t& m : most)
        m = fp8_word_magnitude<T>(warp_max(m, FIRST, LAST));
    bool first = (lane & (2 * FIRST - LAST)) == 0; // of these lanes
    Pack<float, SCALES> scale;
    if constexpr (MX) {
        // A warp has whole blocks. Scales of neighbouring rows or columns lie 16 apart.
        ptrdiff_t at = t.place(t.block(r0, c0));
        for (unsigned s = 0; s < SCALES; s++) {
            scale.v[s] = fp8_scale<F>(most[s]);
            if (inverse && first)
                fp8_put_inverse(inverse, at + 16 * s, scale.v[s], most[s], BLOCKS);
        }
    } else {
        // Add the warp's maxima to the tile's.
        for (unsigned s = 0; s < SCALES && first; s++)
            atomicMax(amax + scale_at(r0, c0) + s, most[s]);
        __syncthreads(); // the maxima are complete

        // Add the tile to the step's maximum. Find the scales, one thread for each.
        if (late.amax && threadIdx.x == 0)
            atomicMax(late.amax, amax[0]);
        if (unsigned b = threadIdx.x; b < FP8_BLOCK) {
            scales[b] = late.scale ? fp8_late_scale(*late.scale) : fp8_scale<F>(amax[b]);
            if (ptrdiff_t at = t.place(b); inverse && at >= 0)
                fp8_put_inverse(inverse, at, scales[b], amax[b], BLOCKS);
        }
        __syncthreads(); // the scales are there
        scale = load<SCALES>(scales + scale_at(r0, c0));
    }

    // Write rows of the matrix, and rows of its transpose.
    auto write = [&](auto turned, Out* to, size_t stride, size_t many, size_t count) {
        #pragma unroll
        for (unsigned i = 0; i < P; i++, to += stride) {
            float s[P], number[P];
            for (unsigned k = 0; k < P; k++) {
                unsigned r = turned ? k : i;
                unsigned c = turned ? i : k;
                T value = bits_as<Pack<T, P>>(words[r]).v[c];
                s[k] = scale.v[scale_at(r, c)];
                number[k] = fp8_scaled(to_float(value), s[k]);
            }
            Pack<Out, P> results;
            for (unsigned k = 0; k < P; k += 2) {
                Pack<F, 2> codes = fp8_pair<F>(number[k], number[k + 1]);
                results.v[k] = fp8_result<Out>(codes.v[0], 1 / s[k]);
                results.v[k + 1] = fp8_result<Out>(codes.v[1], 1 / s[k + 1]);
            }
            if (i < many)
                store_some(to, results, count, packs);
        }
    };
    if (out)
        write(Int<0>(), out + row * cols + column, cols, down, across);
    if (transposed)
        write(Int<1>(), transposed + column * rows + row, rows, across, down);
}

// ----------------------------------------------------------------------------
// launchers

// *amax = the largest magnitude of n elements.
template <typename T>
void fp8_amax(uint32_t* amax, const T* x, size_t n, cudaStream_t stream) {
    unsigned many = unsigned(std::min(ceil_div(n, 4096), size_t(1024)));
    LLMC_CUDA_CHECK(cudaMemsetAsync(amax, 0, sizeof(uint32_t), stream));
    launch(fp8_amax_kernel<T>, many, ELEMENT_THREADS, stream, amax, x, n, can_vectorize<T>(0, x));
}

// Quantise a matrix of 16-bit elements; the arguments are the CPU version's.
template <typename F, typename Out, typename T>
void fp8_quantise(Out* out, Out* transposed, void* inverse, // (rows,cols) (cols,rows)
                  const T* x, uint32_t* amax,               // (rows,cols) (1)
                  size_t rows, size_t cols, Fp8Blocks blocks, cudaStream_t stream,
                  Fp8Late late = {}) {
    size_t n = rows * cols;
    if (n == 0) return;

    // Find the maximum of the whole matrix first, if it is needed.
    bool packs = can_vectorize<T>(transposed ? rows | cols : cols, x, out, transposed);
    if (blocks != Fp8Blocks::WHOLE || late.scale)
        amax = nullptr;
    if (amax)
        fp8_amax(amax, x, n, stream);

    // Quantise, one block for each tile.
    dim3 tiles(unsigned(ceil_div(cols, FP8_BLOCK)), unsigned(ceil_div(rows, FP8_BLOCK)));
    LLMC_CHECK(tiles.y <= 65535, "%zu rows are more than a grid has", rows);
    using enum Fp8Blocks;
    auto kernel = blocks == ROWS         ? fp8_quantise_kernel<F, Out, T, ROWS>
                  : blocks == COLUMNS    ? fp8_quantise_kernel<F, Out, T, COLUMNS>
                  : blocks == MX_ROWS    ? fp8_quantise_kernel<F, Out, T, MX_ROWS>
                  : blocks == MX_COLUMNS ? fp8_quantise_kernel<F, Out, T, MX_COLUMNS>
                                         : fp8_quantise_kernel<F, Out, T, SQUARES>;
    launch(kernel, tiles, FP8_THREADS, stream, out, transposed, inverse, x, amax, rows, cols,
           blocks, late, packs);
}
#endif

} // namespace llmc
