// int4.cuh - frozen weights in 4 bits, with a scale for 128 elements of a row - arXiv:2210.17323
//   A row is an output. Its groups of 128 inputs are quantised separately; the last may be shorter.
//   scale = 2 max|x| / 15,  code = rint(x / scale) + 8, from 0 to 15;   x ~ (code - 8) * scale
//   This is the symmetric grid of GPTQ and AutoGPTQ, rounded to the nearest point. 0 has a code,
//   and the largest positive number of a group comes back as 14/15 of itself.
//   x, out (rows,cols)   codes (rows*cols/2): two a byte, the first one in the upper half
//   scales (rows, cols/128 rounded up) float
//   Contract: =   CPU and GPU give the same bits: one product in float, rounded once to T. x must
//             be finite. A group below 2^-125 becomes zeros. 4.25 bits an element.
//   Cost: memory-bound: back reads 0.53 bytes an element and writes sizeof(T).
//   To copy: this file, elements.h, types.h and cuda_common.h.
#pragma once
#include <algorithm>
#include "cuda_common.h"
#include "elements.h"

namespace llmc {

constexpr size_t INT4_GROUP = 128; // elements of a row that share a scale
constexpr int INT4_ZERO = 8;       // the code of 0

// The number of groups in a row.
LLMC_HD inline size_t int4_groups(size_t cols) { return (cols + INT4_GROUP - 1) / INT4_GROUP; }

// The code of element i less the code of 0. An even element is in the upper half of its byte.
LLMC_HD inline float int4_value(uint8_t pair, size_t i) {
    return float(int(i % 2 ? pair & 15 : pair >> 4) - INT4_ZERO);
}

// ----------------------------------------------------------------------------
// CPU

// Quantise a matrix. A byte may have codes of two groups or rows: the first of its codes overwrites
// it, the second one is added. So this loop is serial.
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
            float scale = 2 * most / 15;
            float back = 1 / scale;
            if (!(back <= 3.4e38f))
                scale = back = 0;
            scales[r * groups + c0 / INT4_GROUP] = scale;

            // Write the codes. After an odd last element the lower half stays zero.
            for (size_t c = c0; c < end; c++) {
                size_t i = r * cols + c;
                // Clamp: the largest positive number is 7.5 steps above 0, but the last
                // code only 7.
                float value = float(to_acc(x[i]));
                float q = std::rint(value * back) + INT4_ZERO;
                q = std::min(15.0f, std::max(0.0f, q));
                int code = int(q);
                if (i % 2)
                    codes[i / 2] |= uint8_t(code);
                else
                    codes[i / 2] = uint8_t(code << 4);
            }
        }
}

// out = the values of the codes.
template <typename T>
void int4_dequantize(T* out, const uint8_t* codes, const float* scales, size_t rows, size_t cols,
                     Cpu) {
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < cols; c++) {
            // The codes of all rows are contiguous, but each row begins a new group of its scales.
            size_t i = r * cols + c;
            size_t group = r * int4_groups(cols) + c / INT4_GROUP;
            float scale = scales[group];
            // This product is exact if scales have 16 bits, as GPTQ's have.
            out[i] = from_acc<T>(int4_value(codes[i / 2], i) * scale);
        }
}

// ----------------------------------------------------------------------------
// CUDA

#if LLMC_KERNELS

// A thread has P elements, all of one group.
template <typename T, int P>
__global__ void int4_dequantize_kernel(T* out, const uint8_t* codes, const float* scales,
                                       size_t cols, size_t n) {
    size_t i = first_element<P>();
    if (i >= n) return;
    // The scale of the first element serves all: no group ends between them.
    size_t row = i / cols;
    float scale = scales[row * int4_groups(cols) + i % cols / INT4_GROUP];

    // Read all bytes at once. With P = 1 a thread reads a byte and uses its half.
    size_t bytes = (n + 1) / 2 - i / 2;
    constexpr int PAIRS = P < 2 ? 1 : P / 2;
    Pack<uint8_t, PAIRS> pairs = load_some<PAIRS>(codes + i / 2, bytes);
    Pack<T, P> values;
    // Round each value once.
    for (int k = 0; k < P; k++)
        values.v[k] = from_acc<T>(int4_value(pairs.v[k / 2], i + size_t(k)) * scale);
    store_some(out + i, values, n - i);
}

// ----------------------------------------------------------------------------
// launchers

// Any size and any alignment. A thread has several elements if no group or row can
// end between them.
template <typename T>
void int4_dequantize(T* out, const uint8_t* codes, const float* scales, size_t rows, size_t cols,
                     cudaStream_t stream) {
    size_t n = rows * cols;
    bool vector = can_vectorize<T>(cols, out, codes);
    pick_element_kernel<T>(n, vector, [&](auto P, unsigned grid) {
        launch(int4_dequantize_kernel<T, P>, grid, ELEMENT_THREADS, 0, stream, out, codes, scales,
               cols, n);
    });
}
#endif

} // namespace llmc
