// nvfp4.cuh - matrices in 4-bit floats, with scales of blocks and of the matrix - arXiv:2509.25149
//   e2m1  sign, 2 bits of exponent, 1 of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6; no infinity, no NaN
//   An operand of a product is (outer,K), whose sum runs over K: a matrix, or its transpose.
//     1. factor   of the matrix: the largest power of two with amax factor <= 6 * 448
//     2. scale    of 16 neighbours along K, or of 16 x 16: amax factor / 6 as e4m3, a byte
//     3. code     x factor / scale as e2m1, to nearest, ties to even; x ~ code scale / factor
//   The paper's recipe rounds weights in squares of 16 x 16, so that W and W^T stand for the same
//   numbers; gradients stochastically, up or down with the mean right (here their scales are
//   rounded up, so that none saturates); and both operands of dW after a Hadamard transform of 16
//   neighbours along K, which spreads outliers and leaves the product. Its factor is any float; a
//   power of two makes a code stand for a bf16 number: 2 bits of mantissa times 4. Its random bits
//   are drawn; here they are a hash of the number, of its block's largest and of its place in the
//   square: equal numbers have equal codes in every layout whose cuts 16 divides.
//   x      (outer,K) with strides, 16 bits; float on the CPU
//   out    (outer,K/16) words of 16 codes, the first in the lowest bits: K is a multiple of 16; or
//          T, where x has them: the values that codes stand for, transformed if they are
//   scales (outer/128, K/64, 32, 4, 4): of a tile, outer % 32, outer / 32, K/16; 0 beyond the
//          matrix; or null
//   Contract: out, scales, head =   bitwise repeatable; NaN or infinity makes its block NaN.
//   Cost: reads x twice, writes half a byte and 1/16 an element.
//   Error of normal numbers: 9.5% of their root mean square, 11% in squares, 15% stochastically.
//   To copy: this file, elements.h, fp8.cuh, types.h and cuda_common.h.
#pragma once
#include <cmath>
#include "cuda_common.h"
#include "elements.h"
#include "fp8.cuh"
#include "types.h"

namespace llmc {

constexpr size_t NVFP4_BLOCK = 16; // elements

// An operand, and how it is rounded.
struct Nvfp4 {
    size_t outer, K;
    size_t row, column; // elements from one o, and from one k, to the next; one of them is 1
    bool squares, hadamard, stochastic;

    LLMC_HD bool has(size_t o, size_t k) const { return o < outer && k < K; }
};

// The words before an operand. A product's sums are multiplied by its first operand's alpha, and
// what they are added to by beta.
struct Nvfp4Head {
    uint32_t amax; // bits of the largest magnitude
    float inverse; // 1 / factor
    float alpha, beta;
};

// ----------------------------------------------------------------------------
// numbers

struct e2m1 { // the sign in bit 7; codes have it in bit 3
    uint8_t bits;
    static constexpr int MANTISSA = 1, LEAST = 0;
    static constexpr uint32_t TOP = 7; // 6
};
LLMC_HD inline unsigned e2m1_code(e2m1 x) { return (x.bits >> 4 & 8) | (x.bits & 7); }
LLMC_HD inline float e2m1_value(unsigned code) { // of four bits
    return fp8_value(e2m1{uint8_t((code & 8) << 4 | (code & 7))});
}

// x rounded up or down to a number of e2m1, right on average: up if random, in [0,1), is at least 1
// less the rest of a step. Steps are half of the power of two below |x|, or of 1.
LLMC_HD inline float e2m1_stochastic(float x, float random) {
    constexpr uint32_t ONE = 0x3f800000, EXPONENT = 0x7f800000;
    uint32_t power = bits_as<uint32_t>(x) & EXPONENT;
    power = power > ONE ? power : ONE;
    float steps = std::fabs(x) * 2 * bits_as<float>(2 * ONE - power);
    return std::copysign(std::floor(steps + random) / 2 * bits_as<float>(power), x);
}

// The factor of a matrix. 6 * 448 is 1.3125 2^11. A transform makes numbers up to 4 times as large.
// Beyond 2^112 a factor over a scale would overflow.
LLMC_HD inline float nvfp4_factor(uint32_t amax, bool hadamard) {
    constexpr uint32_t TOP_MANTISSA = 0x280000; // 0.3125
    if (amax == 0 || amax >= FP8_INFINITY) return 1;
    int e = 11 + 127 - int(amax >> 23) - ((amax & 0x7fffff) > TOP_MANTISSA) - 2 * hadamard;
    return bits_as<float>(uint32_t(127 + (e < 112 ? e : 112)) << 23);
}

// A number in [0,1), of 16 bits: MurmurHash3's finaliser.
LLMC_HD inline float nvfp4_random(uint32_t x, uint32_t amax, size_t place) {
    uint32_t h = x ^ (amax + uint32_t(place)) * 0x9e3779b1u;
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    return float((h ^ h >> 16) >> 16) * 0x1p-16f;
}

// ----------------------------------------------------------------------------
// a block: 16 neighbours along K, from (o,k) on

struct Nvfp4Block {
    size_t o, k;
    float x[NVFP4_BLOCK]; // 0 beyond the operand
    uint32_t amax;

    template <typename T> LLMC_HD void read(const T* from, const Nvfp4& how) {
        for (size_t i = 0; i < NVFP4_BLOCK; i++)
            if (how.has(o, k + i))
                x[i] = to_float(from[o * how.row + (k + i) * how.column]);
    }

    // Transform the numbers if they are all there, and find the largest.
    LLMC_HD void prepare(const Nvfp4& how) {
        constexpr uint32_t SIGNS = 0x243f; // random, the same for both operands of a product
        if (how.hadamard && k + NVFP4_BLOCK <= how.K) {
            for (size_t i = 0; i < NVFP4_BLOCK; i++)
                x[i] *= SIGNS >> i & 1 ? -0.25f : 0.25f;
            for (size_t far = 1; far < NVFP4_BLOCK; far *= 2)
                for (size_t i = 0; i < NVFP4_BLOCK; i++)
                    if (!(i & far)) {
                        float a = x[i], b = x[i + far];
                        x[i] = a + b;
                        x[i + far] = a - b;
                    }
        }
        amax = 0;
        for (float v : x)
            amax = fp8_magnitude(v) > amax ? fp8_magnitude(v) : amax;
    }

    // Write codes, or values, and the scale.
    template <typename Out>
    LLMC_HD void write(Out* out, uint8_t* scales, float factor, const Nvfp4& how) const {
        e4m3 scale = fp8_code<e4m3>(bits_as<float>(amax), factor / 6);
        scale.bits += how.stochastic && fp8_value(scale) < bits_as<float>(amax) * (factor / 6);
        size_t tile = o / FP8_BLOCK * ceil_div(how.K, 64) + k / 64;
        if (scales)
            scales[Fp8Tile::mx_place(tile, k % 64 / 16 * FP8_BLOCK + o % FP8_BLOCK)] =
                how.has(o, k) ? scale.bits : 0;
        if (!how.has(o, k)) return;

        // A scale of 0 makes codes 0, and one that is NaN makes values NaN.
        float size = fp8_value(scale);
        float up = size > 0 ? factor / size : size;
        float down = size * (1 / factor);
        uint64_t codes = 0;
        for (size_t i = 0; i < NVFP4_BLOCK; i++) {
            float v = x[i] * up;
            size_t place = o % NVFP4_BLOCK * NVFP4_BLOCK + i;
            if (how.stochastic)
                v = e2m1_stochastic(v, nvfp4_random(bits_as<uint32_t>(x[i]), amax, place));
            e2m1 code = to_fp8<e2m1>(v);
            codes |= uint64_t(e2m1_code(code)) << 4 * i;
            if constexpr (!std::is_same_v<Out, uint64_t>)
                if (k + i < how.K)
                    out[o * how.row + (k + i) * how.column] =
                        from_acc<Out>(fp8_value(code) * down);
        }
        if constexpr (std::is_same_v<Out, uint64_t>)
            out[(o * how.K + k) / NVFP4_BLOCK] = codes;
    }
};

// ----------------------------------------------------------------------------
// CPU

// Quantise an operand.
template <typename Out, typename T>
void nvfp4_quantise(Out* out, uint8_t* scales, Nvfp4Head* head, const T* x, const Nvfp4& how, Cpu) {
    fp8_amax(&head->amax, x, how.outer * how.K, Cpu{});
    float factor = nvfp4_factor(head->amax, how.hadamard);
    head->inverse = 1 / factor;

    // Take square after square, in whole tiles of scales.
    size_t outer = round_up(how.outer, FP8_BLOCK), K = round_up(how.K, 64);
    #pragma omp parallel for collapse(2)
    for (size_t o = 0; o < outer; o += NVFP4_BLOCK)
        for (size_t k = 0; k < K; k += NVFP4_BLOCK) {
            Nvfp4Block rows[NVFP4_BLOCK] = {};
            uint32_t most = 0;
            for (Nvfp4Block& b : rows) {
                b.o = o + size_t(&b - rows);
                b.k = k;
                b.read(x, how);
                b.prepare(how);
                most = std::max(most, b.amax);
            }
            for (Nvfp4Block& b : rows) {
                if (how.squares) b.amax = most;
                b.write(out, scales, factor, how);
            }
        }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

constexpr unsigned NVFP4_THREADS = 256, NVFP4_OUTER = 64; // a block has 64 x 64 elements

// A thread quantises a block. 16 neighbours in a warp have a square. Warps read whole sectors: of
// 32 rows one each, or of 16 rows 32 columns.
template <typename Out, typename T>
__global__ void __launch_bounds__(NVFP4_THREADS)
nvfp4_quantise_kernel(Out* out, uint8_t* scales, Nvfp4Head* head, const T* x, Nvfp4 how,
                      bool packs) {
    constexpr size_t P = 8;
    Nvfp4Block b = {};
    b.o = size_t(blockIdx.x) * NVFP4_OUTER + threadIdx.x % NVFP4_OUTER;
    b.k = (blockIdx.y * (NVFP4_THREADS / NVFP4_OUTER) + threadIdx.x / NVFP4_OUTER) * NVFP4_BLOCK;

    // Read its elements: every one, or packs of neighbours.
    if (how.column > 1)
        b.read(x, how);
    size_t count = how.column == 1 && how.has(b.o, b.k) ? how.K - b.k : 0;
    for (size_t i = 0; i < count && i < NVFP4_BLOCK; i += P) {
        Pack<T, P> v = load_some<P>(x + b.o * how.row + b.k + i, count - i, packs);
        for (size_t j = 0; j < P; j++)
            b.x[i + j] = to_float(v.v[j]);
    }

    // Find the scale of the block, or of the square, and write.
    b.prepare(how);
    if (how.squares) b.amax = warp_max(b.amax, NVFP4_BLOCK / 2);
    float factor = nvfp4_factor(head->amax, how.hadamard);
    b.write(out, scales, factor, how);
    if (b.o == 0 && b.k == 0)
        head->inverse = 1 / factor;
}

// Write the factors of a product of codes. One thread.
__global__ void nvfp4_alpha_kernel(Nvfp4Head* a, const Nvfp4Head* b, bool adds) {
    a->alpha = a->inverse * b->inverse;
    a->beta = adds;
}

// ----------------------------------------------------------------------------
// launchers

// Quantise an operand; the arguments are the CPU version's.
template <typename Out, typename T>
void nvfp4_quantise(Out* out, uint8_t* scales, Nvfp4Head* head, const T* x, const Nvfp4& how,
                    cudaStream_t stream) {
    fp8_amax(&head->amax, x, how.outer * how.K, stream);
    size_t K = ceil_div(how.K, 64);
    dim3 blocks(unsigned(round_up(how.outer, FP8_BLOCK) / NVFP4_OUTER), unsigned(K));
    LLMC_CHECK(K <= 65535, "a sum over %zu numbers is longer than a grid", how.K);
    launch(nvfp4_quantise_kernel<Out, T>, blocks, NVFP4_THREADS, stream, out, scales, head, x, how,
           can_vectorize<T>(how.row, x));
}
#endif

} // namespace llmc
