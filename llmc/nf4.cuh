// nf4.cuh - frozen weights in 4 bits, or in int8 rows - arXiv:2305.14314, arXiv:2208.07339
//   NF4   blocks of 64 elements in row-major order, y = x * (1 / the block's absmax)
//         code = the nearest of 16 values, a tie the lower one; two a byte, the first one high
//         absmax - offset in blocks of 256: the nearest of a map's 256 values, times absmax2
//   int8  q = rint(x * (127 / the row's absmax))
//   back  value * absmax in float, rounded once to T
//   x, out (n)   codes (n/2)   absmax (n/64): float, and then its codes
//   table: offset, map (256), absmax2 (n/16384); all lengths rounded up
//   Contract: =, the bytes that bitsandbytes' CUDA kernels make; CPU and GPU give the same. x is
//             finite. A block below 2^-128 becomes zeros. 4.13 bits an element, int8 8.
//   Cost: memory-bound: back reads 0.52 bytes an element and writes sizeof(T).
//   To copy: this file, types.h and cuda_common.h.
#pragma once
#include <algorithm>
#include "cuda_common.h"

namespace llmc {

constexpr size_t NF4_BLOCK = 64;         // elements that share an absmax
constexpr size_t NF4_SCALES_BLOCK = 256; // absmaxes that share an absmax2
constexpr size_t NF4_MAP = 256, NF4_TABLE = 1 + NF4_MAP; // where absmax2 begins in the table

inline size_t nf4_blocks(size_t n) { return ceil_div(n, NF4_BLOCK); }
inline size_t nf4_table_floats(size_t n) {
    return NF4_TABLE + ceil_div(nf4_blocks(n), NF4_SCALES_BLOCK);
}

// A parameter, or the piece of it that a rank has: whole blocks, in runs. The table is always the
// whole parameter's, and block b of a piece is that parameter's block number whole(b).
struct Nf4 {
    const uint8_t* codes = nullptr;  // (n/2)
    const uint8_t* absmax = nullptr; // (n/64)
    const float* table = nullptr;
    size_t run = ~size_t(0); // blocks of a run
    size_t part = 0;         // from one run to the next
    size_t first = 0;        // before the first run
    LLMC_HD size_t whole(size_t b) const { return b / run * part + first + b % run; }
};

// ----------------------------------------------------------------------------
// one element: what both versions do to it

// Quantiles of the normal distribution over the largest of them: normal numbers use all codes about
// equally often. 0 has a code, so that zeros stay zeros; below it are 7 values and above it 8.
LLMC_HD inline float nf4_value(unsigned code) {
    constexpr float values[16] = {
        -1,                    -0.6961928009986877f,  -0.5250730514526367f, -0.39491748809814453f,
        -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0,
        0.07958029955625534f,  0.16093020141124725f,  0.24611230194568634f, 0.33791524171829224f,
        0.44070982933044434f,  0.5626170039176941f,   0.7229568362236023f,  1};
    return values[code];
}

// The number of thresholds, midway between two values, that lie below y.
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

// The factor that takes a block's largest to `top`: one division, where bitsandbytes has one too.
// 0 where the quotient is not finite.
LLMC_HD inline float scale_to(float top, float absmax) {
    float scale = top / absmax;
    return scale <= 3.4e38f ? scale : 0;
}

// The nearest of a sorted map's values, as a binary search finds it: at the middle between two of
// them its last one.
LLMC_HD inline unsigned nearest_code(const float* map, float y) {
    unsigned low = 0, high = NF4_MAP - 1, at = 127;
    for (unsigned step = 64; step > 0; step /= 2) {
        (y > map[at] ? low : high) = at;
        at = y > map[at] ? at + step : at - step;
    }
    if (y > map[at])
        return y > (map[high] + map[at]) * 0.5f ? high : at;
    return y < (map[low] + map[at]) * 0.5f ? low : at;
}

// The absmax of a block. No fma: two roundings, as they are everywhere else.
LLMC_HD inline float nf4_absmax(const Nf4& w, size_t b) {
    float value = w.table[1 + w.absmax[b]];
    float absmax2 = w.table[NF4_TABLE + w.whole(b) / NF4_SCALES_BLOCK];
#if defined(__CUDA_ARCH__)
    return __fadd_rn(__fmul_rn(value, absmax2), w.table[0]);
#else
    return float(double(value) * absmax2) + w.table[0]; // no compiler fuses through double
#endif
}

// Element i; the first of a byte's two is its upper half.
LLMC_HD inline unsigned nf4_nibble(uint8_t pair, size_t i) { return i % 2 ? pair & 15 : pair >> 4; }

// ----------------------------------------------------------------------------
// the head of the table, made by the host

// 0, 1 and, for each power 10^-6 ... 1, 1, 2, 4, ... 64 midpoints of [0.1, 1] with both signs: the
// dynamic map of arXiv:2110.02861. Sums are rounded as torch.linspace rounds them, or a map would
// differ from the one in a file by its last bit.
inline void nf4_scale_map(float* map) { // (256)
    size_t at = 0;
    map[at++] = 0;
    map[at++] = 1;
    for (int i = 0; i < 7; i++) {
        int n = 1 << i;
        float step = (1.0f - 0.1f) / float(n), power = float(std::pow(10.0, i - 6));
        // Round the product by itself: through double no compiler fuses it with the sum.
        auto steps = [&](int k) { return float(double(step) * k); };

        // Each half is counted from its own end.
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

// offset = the mean of absmax: what is left has both signs, as the map has. Torch adds in float and
// in an order of its own, so its offset may differ by the last bit.
inline void nf4_begin_table(float* table, const float* absmax, size_t blocks) {
    double sum = 0;
    for (size_t b = 0; b < blocks; b++)
        sum += absmax[b];
    table[0] = float(sum / double(blocks));
    nf4_scale_map(table + 1);
}

// ----------------------------------------------------------------------------
// CPU

template <typename T>
void nf4_quantize(uint8_t* codes, float* absmax, const T* x, size_t n, Cpu) { // (n/2) (n/64) (n)
    #pragma omp parallel for
    for (size_t b = 0; b < nf4_blocks(n); b++) {
        size_t first = b * NF4_BLOCK, end = std::min(n, first + NF4_BLOCK);
        float most = 0;
        for (size_t i = first; i < end; i++)
            most = std::max(most, std::fabs(float(to_acc(x[i]))));
        absmax[b] = most;

        // A block has whole bytes: the half behind an odd last element stays zero.
        float scale = scale_to(1, most);
        for (size_t i = first; i < end; i++) {
            unsigned code = nf4_code(float(to_acc(x[i])) * scale);
            codes[i / 2] = uint8_t(i % 2 ? codes[i / 2] | code : code << 4);
        }
    }
}

// Quantise absmax, and write absmax2 behind the table's head.
inline void nf4_quantize_scales(uint8_t* codes, float* table, const float* absmax, // (blocks)
                                size_t blocks, Cpu) {
    for (size_t first = 0; first < blocks; first += NF4_SCALES_BLOCK) {
        size_t end = std::min(blocks, first + NF4_SCALES_BLOCK);
        float most = 0;
        for (size_t b = first; b < end; b++)
            most = std::max(most, std::fabs(absmax[b] - table[0]));
        table[NF4_TABLE + first / NF4_SCALES_BLOCK] = most;
        float scale = scale_to(1, most);
        for (size_t b = first; b < end; b++)
            codes[b] = uint8_t(nearest_code(table + 1, (absmax[b] - table[0]) * scale));
    }
}

template <typename T> void nf4_dequantize(T* out, const Nf4& w, size_t n, Cpu) { // (n)
    #pragma omp parallel for
    for (size_t b = 0; b < nf4_blocks(n); b++) {
        float absmax = nf4_absmax(w, b);
        // Two elements are in a byte.
        for (size_t i = b * NF4_BLOCK; i < std::min(n, (b + 1) * NF4_BLOCK); i++)
            out[i] = from_acc<T>(nf4_value(nf4_nibble(w.codes[i / 2], i)) * absmax);
    }
}

// Symmetric: -128 is no code, so that a row's largest of either sign comes back as it was.
// A row of W (OC,IC) is an output: its scale could also multiply the product's column.
template <typename T>
void int8_quantize(int8_t* codes, float* absmax, const T* x, // (rows,cols) (rows) (rows,cols)
                   size_t rows, size_t cols, Cpu) {
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++) {
        float most = 0;
        for (size_t c = 0; c < cols; c++)
            most = std::max(most, std::fabs(float(to_acc(x[r * cols + c]))));
        absmax[r] = most;
        float scale = scale_to(127, most);
        for (size_t c = 0; c < cols; c++)
            codes[r * cols + c] = int8_t(std::rint(float(to_acc(x[r * cols + c])) * scale));
    }
}

template <typename T>
void int8_dequantize(T* out, const int8_t* codes, const float* absmax, size_t rows, size_t cols,
                     Cpu) {
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < cols; c++)
            out[r * cols + c] = from_acc<T>(float(codes[r * cols + c]) * (absmax[r] / 127));
}

// ----------------------------------------------------------------------------
// CUDA

#if LLMC_KERNELS
constexpr int NF4_WARPS = 8; // of a block of threads

// The warp's number among those of the launch.
template <int WARPS> __device__ size_t warp_of_launch() {
    return size_t(blockIdx.x) * WARPS + threadIdx.x / 32;
}

// A warp has a block, a lane a byte of it.
template <typename T>
__global__ void nf4_quantize_kernel(uint8_t* codes, float* absmax, const T* x, size_t n) {
    size_t b = warp_of_launch<NF4_WARPS>(), lane = threadIdx.x % 32;
    if (b * NF4_BLOCK >= n) return;

    // Find the largest; behind the end there are zeros.
    size_t i = b * NF4_BLOCK + 2 * lane;
    float high = i < n ? to_float(x[i]) : 0;
    float low = i + 1 < n ? to_float(x[i + 1]) : 0;
    float most = warp_max(fmaxf(fabsf(high), fabsf(low)));
    if (lane == 0) absmax[b] = most;

    // The half behind an odd last element stays zero.
    float scale = scale_to(1, most);
    unsigned code = i + 1 < n ? nf4_code(low * scale) : 0;
    if (i < n)
        codes[i / 2] = uint8_t(nf4_code(high * scale) << 4 | code);
}

// A warp has a block of absmaxes.
template <int WARPS>
__global__ void nf4_quantize_scales_kernel(uint8_t* codes, float* table, const float* absmax,
                                           size_t blocks) {
    size_t block = warp_of_launch<WARPS>(), lane = threadIdx.x % 32;
    size_t first = block * NF4_SCALES_BLOCK;
    if (first >= blocks) return;
    size_t end = blocks - first < NF4_SCALES_BLOCK ? blocks : first + NF4_SCALES_BLOCK;

    // Find the largest distance from the offset, then the nearest of the map for each.
    float most = 0;
    for (size_t b = first + lane; b < end; b += 32)
        most = fmaxf(most, fabsf(absmax[b] - table[0]));
    most = warp_max(most);
    if (lane == 0) table[NF4_TABLE + block] = most;
    float scale = scale_to(1, most);
    for (size_t b = first + lane; b < end; b += 32)
        codes[b] = uint8_t(nearest_code(table + 1, (absmax[b] - table[0]) * scale));
}

// P elements a thread, all of one block.
template <typename T, int P>
__global__ void nf4_dequantize_kernel(T* out, Nf4 w, size_t n) {
    size_t i = first_element<P>();
    if (i >= n) return;
    float absmax = nf4_absmax(w, i / NF4_BLOCK);

    // Read the bytes at once. A single element takes its half of one.
    size_t bytes = (n + 1) / 2 - i / 2;
    constexpr int PAIRS = P < 2 ? 1 : P / 2;
    Pack<uint8_t, PAIRS> pairs = load_some<PAIRS>(w.codes + i / 2, bytes);
    Pack<T, P> values;
    for (int k = 0; k < P; k++)
        values.v[k] = from_acc<T>(nf4_value(nf4_nibble(pairs.v[k / 2], i + size_t(k))) * absmax);
    store_some(out + i, values, n - i);
}

// A warp has a row.
template <typename T>
__global__ void int8_quantize_kernel(int8_t* codes, float* absmax, const T* x, size_t rows,
                                     size_t cols) {
    size_t r = warp_of_launch<NF4_WARPS>(), lane = threadIdx.x % 32;
    if (r >= rows) return;

    // Read the row twice: for its largest, and to scale it.
    float most = 0;
    for (size_t c = lane; c < cols; c += 32)
        most = fmaxf(most, fabsf(to_float(x[r * cols + c])));
    most = warp_max(most);
    if (lane == 0) absmax[r] = most;
    float scale = scale_to(127, most);
    for (size_t c = lane; c < cols; c += 32)
        codes[r * cols + c] = int8_t(rintf(to_float(x[r * cols + c]) * scale));
}

template <typename T>
__global__ void int8_dequantize_kernel(T* out, const int8_t* codes, const float* absmax,
                                       size_t cols, size_t n) {
    size_t i = first_element<1>();
    if (i < n)
        out[i] = from_acc<T>(float(codes[i]) * (absmax[i / cols] / 127));
}

// ----------------------------------------------------------------------------
// launchers

template <typename T>
void nf4_quantize(uint8_t* codes, float* absmax, const T* x, size_t n, cudaStream_t stream) {
    unsigned grid = unsigned(ceil_div(nf4_blocks(n), size_t(NF4_WARPS)));
    launch(nf4_quantize_kernel<T>, grid, NF4_WARPS * 32, 0, stream, codes, absmax, x, n);
}

// The host has made the table's head.
inline void nf4_quantize_scales(uint8_t* codes, float* table, const float* absmax, size_t blocks,
                                cudaStream_t stream) {
    unsigned grid = unsigned(ceil_div(blocks, NF4_SCALES_BLOCK * NF4_WARPS));
    launch(nf4_quantize_scales_kernel<NF4_WARPS>, grid, NF4_WARPS * 32, 0, stream, codes, table,
           absmax, blocks);
}

// Any n and alignment.
template <typename T> void nf4_dequantize(T* out, const Nf4& w, size_t n, cudaStream_t stream) {
    bool vector = can_vectorize<T>(0, out, w.codes);
    pick_element_kernel<T>(n, vector, [&](auto P, unsigned grid) {
        launch(nf4_dequantize_kernel<T, P>, grid, ELEMENT_THREADS, 0, stream, out, w, n);
    });
}

template <typename T>
void int8_quantize(int8_t* codes, float* absmax, const T* x, size_t rows, size_t cols,
                   cudaStream_t stream) {
    unsigned grid = unsigned(ceil_div(rows, size_t(NF4_WARPS)));
    launch(int8_quantize_kernel<T>, grid, NF4_WARPS * 32, 0, stream, codes, absmax, x, rows, cols);
}

template <typename T>
void int8_dequantize(T* out, const int8_t* codes, const float* absmax, size_t rows, size_t cols,
                     cudaStream_t stream) {
    unsigned grid = unsigned(ceil_div(rows * cols, size_t(ELEMENT_THREADS)));
    launch(int8_dequantize_kernel<T>, grid, ELEMENT_THREADS, 0, stream, out, codes, absmax, cols,
           rows * cols);
}
#endif

} // namespace llmc
