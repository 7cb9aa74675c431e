// small_states.cuh - masters and moments in fewer bits than float
//   remainder   a float master stored as a bf16 weight and the 16 bits that the weight lacks:
//                 weight    = upper half of the master, plus 1 where the lower half is 2^15 or more
//                 remainder = lower half of the master
//               Exact: every master is recovered. The weight is the master rounded to nearest,
//               ties away from zero. With ties to even, an even weight and a remainder of 2^15
//               could stand for two masters.
//   8 bits      blocks of 256 elements of a tensor, each with its largest magnitude, absmax:
//                 code = the nearest of a map's 256 values to x / absmax, ties to the lower code
//               The map has seven decades below 1, each with twice as many values as the decade
//               below it. The map of second moments, which have no sign, has twice as many values
//               in each (arXiv:2110.02861). A block whose absmax is 0 or subnormal is read as zero.
//   To copy: this file and types.h.
#pragma once
#include "types.h"

namespace llmc {

// How the bits that a 16-bit weight lacks are kept: in a float master, as a remainder, or not.
enum class Masters : uint8_t { FLOAT, REMAINDER, NONE };

// The storage format of moments.
enum class States : uint8_t { FLOAT, BF16, EIGHT_BIT };

// Bytes of one master, beside the weight's own two.
inline size_t master_bytes(Masters masters) {
    return masters == Masters::FLOAT ? 4 : masters == Masters::REMAINDER ? 2 : 0;
}

// ----------------------------------------------------------------------------
// remainders

// A float in two halves: the bits of a bf16 weight, and the bits that the weight lacks.
struct SplitFloat {
    uint16_t weight, remainder;
};

// Split a master into its weight, rounded to nearest, and its remainder.
LLMC_HD inline SplitFloat split_float(float x) {
    uint32_t u = bits_as<uint32_t>(x);
    // Keep a NaN's upper half, with a bit set that keeps it a NaN: rounding could make it a zero.
    if ((u & 0x7fffffff) > 0x7f800000)
        u = (u | 0x400000) & 0xffff0000;
    return {uint16_t((u + 0x8000) >> 16), uint16_t(u)};
}

// Recover the number that was split.
LLMC_HD inline float join_float(SplitFloat x) {
    uint32_t upper = uint32_t(x.weight) - (x.remainder >> 15); // undo the rounding up
    return bits_as<float>(upper << 16 | x.remainder);
}

// ----------------------------------------------------------------------------
// 8 bits

constexpr size_t STATE_BLOCK = 256; // elements that share an absmax

// The bytes of n moments. A quantised tensor (small) has its codes and then one float a block;
// another has floats. Each array starts at a multiple of 256 bytes.
LLMC_HD inline size_t codes_bytes(size_t n) { return round_up(n, STATE_BLOCK); }
LLMC_HD inline size_t state_bytes(size_t n, bool small) {
    if (!small) return round_up(4 * n, STATE_BLOCK);
    return codes_bytes(n) + round_up(4 * ceil_div(n, STATE_BLOCK), STATE_BLOCK);
}

// The value of a code; values rise with the code. In the map with a sign code 127 is zero, and no
// code stands for -1.
LLMC_HD inline float dynamic_value(bool is_signed, int code) {
    // Zero and the largest code, 1, belong to no decade.
    int zero = is_signed ? 127 : 0;
    if (code == zero || code == 255) return code == 255;

    // Find the decade, and the place in it: the value is the middle of an nth of [0.1, 1].
    int at = code > zero ? code - zero - 1 : zero - 1 - code;
    int n = is_signed ? 1 : 2;
    int decade = 0;
    while (at >= n) {
        at -= n;
        n *= 2;
        decade++;
    }

    // Numerator and denominator are exact: the division rounds once, the same everywhere.
    double below = 20.0 * n;
    for (int i = decade; i < 6; i++) {
        below *= 10;
    }
    float x = float((2 * n + 18 * at + 9) / below);
    return code < zero ? -x : x;
}

// The upper limit of a code: the largest float that is not nearer to the next code's value.
LLMC_HD inline float dynamic_middle(bool is_signed, int code) {
    // Nothing lies above the last code.
    if (code == 255) return 1;

    // The sum of two neighbours is exact in double.
    double lower = dynamic_value(is_signed, code);
    double upper = dynamic_value(is_signed, code + 1);
    double middle = (lower + upper) / 2;
    float x = float(middle);
    return x > middle ? nextafterf(x, -2.0f) : x;
}

// A map: the value and the upper limit of each code.
struct DynamicMap {
    const float *value, *middle; // (256)
};

// The code whose value is nearest to x, found by bisection.
LLMC_HD inline uint8_t dynamic_code(const DynamicMap& map, float x) {
    // Compare without branches that depend on x, so that the threads of a warp stay together.
    int code = 0;
    for (int step = 128; step > 0; step /= 2) {
        float middle = map.middle[code + step - 1];
        code += x > middle ? step : 0;
    }
    return uint8_t(code);
}

// The number that a block is divided by: its largest magnitude. A subnormal one would lose bits in
// the division and counts as zero, which makes the whole block zero.
LLMC_HD inline float block_scale(float largest) { return largest < 0x1p-126f ? 0 : largest; }
LLMC_HD inline float scaled(float x, float absmax) { return absmax > 0 ? x / absmax : 0; }

// The host's map, with or without a sign, made at the first call.
inline DynamicMap dynamic_map(bool is_signed) {
    struct Tables {
        float value[2][256];
        float middle[2][256];
        Tables() {
            // The first map has no sign, the second has one.
            for (int with = 0; with < 2; with++)
                for (int code = 0; code < 256; code++) {
                    value[with][code] = dynamic_value(with, code);
                    middle[with][code] = dynamic_middle(with, code);
                }
        }
    };
    static const Tables tables;
    return {tables.value[is_signed], tables.middle[is_signed]};
}

// Where a block's codes and its absmax lie within a tensor's bytes.
struct StateBlock {
    uint8_t* codes;
    float* absmax;
};
// The block that element i of a tensor of n elements belongs to; `codes` points at element i.
LLMC_HD inline StateBlock state_block(unsigned char* tensor, size_t n, size_t i) {
    // The scales follow the codes.
    float* scales = reinterpret_cast<float*>(tensor + codes_bytes(n));
    return {tensor + i, scales + i / STATE_BLOCK};
}

// Read n <= 256 numbers of a block.
inline void read_block(float* x, StateBlock b, size_t n, const DynamicMap& map) {
    float absmax = *b.absmax;
    for (size_t k = 0; k < n; k++) {
        float y = map.value[b.codes[k]];
        x[k] = y * absmax;
    }
}

// Quantise n <= 256 numbers into a block.
inline void write_block(StateBlock b, const float* x, size_t n, const DynamicMap& map) {
    // Find the scale, the block's largest magnitude.
    float largest = 0;
    for (size_t k = 0; k < n; k++) {
        float size = std::fabs(x[k]);
        largest = std::fmax(largest, size);
    }
    float absmax = block_scale(largest);
    *b.absmax = absmax;

    // Divide by the scale and take the nearest codes.
    for (size_t k = 0; k < n; k++) {
        float y = scaled(x[k], absmax);
        b.codes[k] = dynamic_code(map, y);
    }
}

} // namespace llmc
