// nf4.cuh - frozen weights in NF4, int4, int8 - arXiv:2305.14314 arXiv:2210.17323 arXiv:2208.07339
//   NF4   blocks of 64 elements in row-major order, y = x * (1 / the block's absmax)
//         code = the nearest of 16 values, a tie the lower one; two codes a byte, the first one in
//         its upper half
//         absmax - offset in blocks of 256: the nearest of a map's 256 values, times absmax2
//   int4  a row's groups of 128 elements; the last may be shorter. step = 2 max|x| / 15,
//         code = rint(x / step) + 8, from 0 to 15: the symmetric grid of GPTQ, to the nearest point
//   int8  q = rint(x * (127 / the row's absmax))
//   back  value * absmax (int4: (code - 8) * step) in float, rounded once to T
//   The host quantises once, before training; a device only goes back.
//   x, out (n)   codes (n/2)   absmax (n/64): float, and then its codes
//   table: offset, map (256), absmax2 (n/16384); int4's steps (rows, cols/128); lengths rounded up
//   Contract: =, CPU and GPU give the same bits; NF4 and int8 the bytes of bitsandbytes' CUDA
//             kernels for the same offset, which torch may round another way. x must be finite. A
//             block below 2^-128, or a group below 2^-125, becomes zeros.
//             NF4 takes 4.13 bits an element, int4 4.25, int8 8.
//   Cost: memory-bound: back reads 0.52 bytes an element (NF4) and writes sizeof(T).
//   To copy: this file, elements.h, types.h and cuda_common.h.
#pragma once
#include <algorithm>
#include "cuda_common.h"
#include "elements.h"
#include "types.h"

namespace llmc {

constexpr size_t NF4_BLOCK = 64;         // elements that share an absmax
constexpr size_t NF4_SCALES_BLOCK = 256; // absmaxes that share an absmax2
constexpr size_t NF4_MAP = 256, NF4_TABLE = 1 + NF4_MAP; // absmax2 begins at NF4_TABLE

// The number of blocks, and of floats in a table, for n elements.
inline size_t nf4_blocks(size_t n) { return ceil_div(n, NF4_BLOCK); }
inline size_t nf4_table_floats(size_t n) {
    return NF4_TABLE + ceil_div(nf4_blocks(n), NF4_SCALES_BLOCK);
}

// A parameter in NF4, or this rank's piece of it, which is whole blocks in runs. The table is
// always the whole parameter's; block b of the piece is block whole(b) of the parameter.
struct Nf4 {
    const uint8_t* codes = nullptr;  // (n/2)
    const uint8_t* absmax = nullptr; // (n/64)
    const float* table = nullptr;
    size_t run = ~size_t(0); // blocks in a run
    size_t part = 0;         // blocks from one run's start to the next
    size_t first = 0;        // blocks before the first run
    LLMC_HD size_t whole(size_t b) const {
        if (b < run) return first + b; // a GPU divides 64 bits in many instructions
        return b / run * part + first + b % run;
    }
};

constexpr size_t INT4_GROUP = 128; // elements of a row that share a step
constexpr int INT4_ZERO = 8;       // the code of 0

// The number of groups in a row.
LLMC_HD inline size_t int4_groups(size_t cols) { return (cols + INT4_GROUP - 1) / INT4_GROUP; }

// ----------------------------------------------------------------------------
// one element: what both versions do to it

// The value of a code. The values are quantiles of the normal distribution, divided by the largest,
// so normal numbers use all codes about equally often. 0 has a code, so that zeros stay zeros; 7
// values lie below it and 8 above.
LLMC_HD inline float nf4_value(unsigned code) {
    static constexpr float values[16] = { // not static, each thread would have its own copy
        -1,                    -0.6961928009986877f,  -0.5250730514526367f, -0.39491748809814453f,
        -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0,
        0.07958029955625534f,  0.16093020141124725f,  0.24611230194568634f, 0.33791524171829224f,
        0.44070982933044434f,  0.5626170039176941f,   0.7229568362236023f,  1};
    return values[code];
}

// The code nearest to y: the number of thresholds, each midway between two values, below y.
LLMC_HD inline unsigned nf4_code(float y) {
    constexpr float thresholds[15] = {
        -0.8480964004993439f,  -0.6106329262256622f,   -0.4599952697753906f, -0.33967943489551544f,
        -0.23460740596055984f, -0.13791173323988914f,  -0.045525018125772476f,
        0.03979014977812767f,  0.1202552504837513f,    0.2035212516784668f,  0.2920137718319893f,
        0.3893125355243683f,   0.5016634166240692f,    0.6427869200706482f,  0.8614784181118011f};
    unsigned code = 0;
    for (float threshold : thresholds)
        code += y > threshold;
    return code;
}

// The factor that scales a block's largest magnitude to `top`. bitsandbytes divides once in the
// same place. 0 if the quotient is not finite.
LLMC_HD inline float scale_to(float top, float absmax) {
    float scale = top / absmax;
    return scale <= 3.4e38f ? scale : 0;
}

// The index of the value in a sorted map nearest to y, found by binary search. At the exact middle
// between two values it is the one where the search ended.
LLMC_HD inline unsigned nearest_code(const float* map, float y) {
    unsigned low = 0;
    unsigned high = NF4_MAP - 1;
    unsigned at = 127;
    for (unsigned step = 64; step > 0; step /= 2) {
        (y > map[at] ? low : high) = at;
        at = y > map[at] ? at + step : at - step;
    }
    if (y > map[at])
        return y > (map[high] + map[at]) * 0.5f ? high : at;
    return y < (map[low] + map[at]) * 0.5f ? low : at;
}

// A product that is rounded before anything is added to it. Compilers would fuse the two into an
// fma, g++ even where the product is one in double.
LLMC_HD inline float rounded_product(float x, float y) {
#if defined(__CUDA_ARCH__)
    return __fmul_rn(x, y);
#else
    volatile float product = x * y;
    return product;
#endif
}

// The absmax of a block, rounded twice, as bitsandbytes has it.
LLMC_HD inline float nf4_absmax(const Nf4& w, size_t b) {
    float value = w.table[1 + w.absmax[b]];
    float absmax2 = w.table[NF4_TABLE + w.whole(b) / NF4_SCALES_BLOCK];
    return rounded_product(value, absmax2) + w.table[0];
}

// The code of element i from its byte: an even element is in the upper half.
LLMC_HD inline unsigned nibble_of(uint8_t pair, size_t i) { return i % 2 ? pair & 15 : pair >> 4; }

// The value of an int4 code, in steps. This product with its step is exact if steps have 16 bits,
// as GPTQ's have.
LLMC_HD inline float int4_value(unsigned code) { return float(int(code) - INT4_ZERO); }

// ----------------------------------------------------------------------------
// the head of the table, made by the host

// The dynamic map of arXiv:2110.02861: 0, 1 and, for each power of ten from 10^-6 to 1, the
// midpoints of 1, 2, 4, ... 64 equal parts of [0.1, 1] times it, with both signs. Sums are rounded
// as torch.linspace rounds them; otherwise the map would differ from one in a file by its last bit.
inline void nf4_scale_map(float* map) { // (256)
    size_t at = 0;
    map[at++] = 0;
    map[at++] = 1;
    for (int i = 0; i < 7; i++) {
        int n = 1 << i;
        float step = (1.0f - 0.1f) / float(n);
        float power = float(std::pow(10.0, i - 6));
        auto steps = [&](int k) { return rounded_product(step, float(k)); };

        // Count each half from its own end, as torch.linspace does.
        auto bound = [&](int k) {
            return k < (n + 1) / 2 ? 0.1f + steps(k) : 1.0f - steps(n - k);
        };
        for (int k = 0; k < n; k++) {
            float middle = (bound(k) + bound(k + 1)) / 2 * power;
            map[at++] = middle;
            map[at++] = -middle;
        }
    }
    std::sort(map, map + NF4_MAP);
}

// Write the head of the table. offset = the mean of absmax, so that the differences from it have
// both signs, as the map has. Torch adds in float and in another order, so its offset may differ
// by the last bit.
inline void nf4_begin_table(float* table, const float* absmax, size_t blocks) {
    double sum = 0;
    for (size_t b = 0; b < blocks; b++)
        sum += absmax[b];
    table[0] = float(sum / double(blocks));
    nf4_scale_map(table + 1);
}

// ----------------------------------------------------------------------------
// CPU

// Quantise n elements: codes, and each block's absmax in float.
template <typename T>
void nf4_quantize(uint8_t* codes, float* absmax, const T* x, size_t n, Cpu) { // (n/2) (n/64) (n)
    #pragma omp parallel for
    for (size_t b = 0; b < nf4_blocks(n); b++) {
        size_t first = b * NF4_BLOCK;
        size_t end = std::min(n, first + NF4_BLOCK);
        float most = 0;
        for (size_t i = first; i < end; i++)
            most = std::max(most, std::fabs(float(to_acc(x[i]))));
        absmax[b] = most;

        // A block has whole bytes. After an odd last element the lower half stays zero.
        float scale = scale_to(1, most);
        for (size_t i = first; i < end; i++) {
            unsigned code = nf4_code(float(to_acc(x[i])) * scale);
            codes[i / 2] = uint8_t(i % 2 ? codes[i / 2] | code : code << 4);
        }
    }
}

// Quantise the absmaxes, and write their absmax2 after the table's head.
inline void nf4_quantize_scales(uint8_t* codes, float* table, const float* absmax, // (blocks)
                                size_t blocks, Cpu) {
    for (size_t first = 0; first < blocks; first += NF4_SCALES_BLOCK) {
        size_t end = std::min(blocks, first + NF4_SCALES_BLOCK);
        float most = 0;
        for (size_t b = first; b < end; b++)
            most = std::max(most, std::fabs(absmax[b] - table[0]));

        // Quantise the block's absmaxes.
        table[NF4_TABLE + first / NF4_SCALES_BLOCK] = most;
        float scale = scale_to(1, most);
        for (size_t b = first; b < end; b++)
            codes[b] = uint8_t(nearest_code(table + 1, (absmax[b] - table[0]) * scale));
    }
}

// out = the values of n elements.
template <typename T> void nf4_dequantize(T* out, const Nf4& w, size_t n, Cpu) { // (n)
    #pragma omp parallel for
    for (size_t b = 0; b < nf4_blocks(n); b++) {
        float absmax = nf4_absmax(w, b);
        // A byte holds two elements.
        for (size_t i = b * NF4_BLOCK; i < std::min(n, (b + 1) * NF4_BLOCK); i++)
            out[i] = from_acc<T>(nf4_value(nibble_of(w.codes[i / 2], i)) * absmax);
    }
}

// Quantise a matrix to int4. A byte may have codes of two groups or rows: the first of its codes
// overwrites it, the second one is added. So this loop is serial.
template <typename T>
void int4_quantize(uint8_t* codes, float* scales, const T* x, size_t rows, size_t cols, Cpu) {
    size_t groups = int4_groups(cols);
    for (size_t r = 0; r < rows; r++)
        for (size_t c0 = 0; c0 < cols; c0 += INT4_GROUP) {
            // Find the largest magnitude of the group.
            size_t end = std::min(cols, c0 + INT4_GROUP);
            float most = 0;
            for (size_t c = c0; c < end; c++)
                most = std::max(most, std::fabs(float(to_acc(x[r * cols + c]))));

            // The step of the grid, and its inverse. Both are 0 if the group is too small to scale.
            float scale = 2 * most / 15, back = 1 / scale;
            if (!(back <= 3.4e38f)) scale = back = 0;
            scales[r * groups + c0 / INT4_GROUP] = scale;

            // Write the codes. After an odd last element the lower half stays zero.
            for (size_t c = c0; c < end; c++) {
                size_t i = r * cols + c;
                // Clamp: the largest positive number is 7.5 steps above 0, the last code only 7.
                float q = std::rint(float(to_acc(x[i])) * back) + INT4_ZERO;
                int code = int(std::min(15.0f, std::max(0.0f, q)));
                if (i % 2)
                    codes[i / 2] |= uint8_t(code);
                else
                    codes[i / 2] = uint8_t(code << 4);
            }
        }
}

// out = the values of int4 codes.
template <typename T>
void int4_dequantize(T* out, const uint8_t* codes, const float* scales, size_t rows, size_t cols,
                     Cpu) {
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < cols; c++) {
            // The codes of all rows are contiguous, but each row begins a new group of its scales.
            size_t i = r * cols + c;
            float scale = scales[r * int4_groups(cols) + c / INT4_GROUP];
            out[i] = from_acc<T>(int4_value(nibble_of(codes[i / 2], i)) * scale);
        }
}

// Quantise rows to int8. The grid is symmetric: -128 is not a code, so that a row's largest number
// comes back as it was with either sign. A row of W (OC,IC) is an output, so its scale could also
// multiply a column of the product.
template <typename T>
void int8_quantize(int8_t* codes, float* absmax, const T* x, // (rows,cols) (rows) (rows,cols)
                   size_t rows, size_t cols, Cpu) {
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++) {
        // Find the row's largest magnitude.
        float most = 0;
        for (size_t c = 0; c < cols; c++)
            most = std::max(most, std::fabs(float(to_acc(x[r * cols + c]))));

        // Quantise the row.
        absmax[r] = most;
        float scale = scale_to(127, most);
        for (size_t c = 0; c < cols; c++)
            codes[r * cols + c] = int8_t(std::rint(float(to_acc(x[r * cols + c])) * scale));
    }
}

// out = the values of int8 codes.
template <typename T>
void int8_dequantize(T* out, const int8_t* codes, const float* absmax, size_t rows, size_t cols,
                     Cpu) {
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++) {
        // Ask for the codes two rows ahead: they arrive while this row is converted.
        for (size_t c = 0; c < cols; c += 64)
            __builtin_prefetch(codes + (r + 2) * cols + c);
        for (size_t c = 0; c < cols; c++)
            out[r * cols + c] = from_acc<T>(float(codes[r * cols + c]) * (absmax[r] / 127));
    }
}

// ----------------------------------------------------------------------------
// CUDA

#if LLMC_KERNELS

// Operands of the 4-bit kernel: value() gives the number of a code, factor() that of element i,
// which its neighbours in a pack share.
struct Nf4Pairs : Nf4 {
    LLMC_HD float value(unsigned code) const { return nf4_value(code); }
    LLMC_HD float factor(size_t i) const { return nf4_absmax(*this, i / NF4_BLOCK); }
};
struct Int4Pairs {
    const uint8_t* codes;
    const float* scales;
    size_t cols;
    LLMC_HD float value(unsigned code) const { return int4_value(code); }
    LLMC_HD float factor(size_t i) const {
        return scales[i / cols * int4_groups(cols) + i % cols / INT4_GROUP];
    }
};

// A thread has P elements, all of one block or group.
template <typename T, int P, typename W>
__global__ void dequantize_pairs_kernel(T* out, W w, size_t n) {
    size_t i = first_element<P>();
    if (i >= n) return;
    float factor = w.factor(i);

    // Read all bytes at once. With P = 1 a thread reads a byte and uses its half.
    size_t bytes = (n + 1) / 2 - i / 2;
    constexpr int PAIRS = P < 2 ? 1 : P / 2;
    Pack<uint8_t, PAIRS> pairs = load_some<PAIRS>(w.codes + i / 2, bytes);
    Pack<T, P> values;
    for (int k = 0; k < P; k++)
        values.v[k] = from_acc<T>(w.value(nibble_of(pairs.v[k / 2], i + size_t(k))) * factor);
    store_some(out + i, values, n - i);
}

template <typename T>
__global__ void int8_dequantize_kernel(T* out, const int8_t* codes, const float* absmax,
                                       size_t cols, size_t n) {
    size_t i = first_element<1>();
    if (i < n)
        out[i] = from_acc<T>(float(codes[i]) * (absmax[i / cols] / 127));
}

// ----------------------------------------------------------------------------
// launchers: any size and any alignment

// A thread has several elements if no block, group or row can end between them.
template <typename T, typename W>
void dequantize_pairs(T* out, const W& w, size_t n, size_t cols, cudaStream_t stream) {
    bool vector = can_vectorize<T>(cols, out, w.codes);
    pick_element_kernel<T>(n, vector, [&](auto P, unsigned grid) {
        launch(dequantize_pairs_kernel<T, P, W>, grid, ELEMENT_THREADS, stream, out, w, n);
    });
}
template <typename T> void nf4_dequantize(T* out, const Nf4& w, size_t n, cudaStream_t stream) {
    dequantize_pairs(out, Nf4Pairs{w}, n, NF4_BLOCK, stream);
}
template <typename T>
void int4_dequantize(T* out, const uint8_t* codes, const float* scales, size_t rows, size_t cols,
                     cudaStream_t stream) {
    dequantize_pairs(out, Int4Pairs{codes, scales, cols}, rows * cols, cols, stream);
}
template <typename T>
void int8_dequantize(T* out, const int8_t* codes, const float* absmax, size_t rows, size_t cols,
                     cudaStream_t stream) {
    unsigned grid = unsigned(ceil_div(rows * cols, size_t(ELEMENT_THREADS)));
    launch(int8_dequantize_kernel<T>, grid, ELEMENT_THREADS, stream, out, codes, absmax, cols,
           rows * cols);
}
#endif

} // namespace llmc
