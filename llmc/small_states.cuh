// small_states.cuh - masters and moments in fewer bits than float
//   remainder   a float master as a bf16 weight and the 16 bits that it lacks:
//                 weight    = upper half of the master, plus 1 where the lower half is 2^15 or more
//                 remainder = lower half of the master
//               Exact: every number comes back. The weight is the master rounded to nearest, ties
//               away from zero; with ties to even an even weight could stand for two masters.
//   8 bits      blocks of 256 elements of a tensor, with their largest magnitude:
//                 code = the nearest of a map's 256 values to x / absmax, ties to the lower code
//               The map has seven decades below 1, each with twice the values of the one below it;
//               second moments, which have no sign, have twice as many (arXiv:2110.02861). A block
//               whose absmax is 0 or subnormal is zero.
//   To copy: this file and types.h.
#pragma once
#include "types.h"

namespace llmc {

// Masters hold the bits that 16-bit weights lack: as floats, as remainders, or not at all.
enum class Masters : uint8_t { FLOAT, REMAINDER, NONE };

// Moments are stored in one of three formats.
enum class States : uint8_t { FLOAT, BF16, EIGHT_BIT };

// A master's bytes; the weight's own two are not counted.
inline size_t master_bytes(Masters masters) {
    return masters == Masters::FLOAT ? 4 : masters == Masters::REMAINDER ? 2 : 0;
}

// ----------------------------------------------------------------------------
// remainders

// A float in two halves: the bits of a bf16 weight, and those that it lacks.
struct SplitFloat {
    uint16_t weight, remainder;
};

LLMC_HD inline SplitFloat split_float(float x) {
    uint32_t u = bits_as<uint32_t>(x);
    // A NaN keeps what fits the weight, and stays one: rounding could make it a zero.
    if ((u & 0x7fffffff) > 0x7f800000) u = (u | 0x400000) & 0xffff0000;
    return {uint16_t((u + 0x8000) >> 16), uint16_t(u)};
}

// The number that was split.
LLMC_HD inline float join_float(SplitFloat x) {
    uint32_t upper = uint32_t(x.weight) - (x.remainder >> 15); // undo the rounding up
    return bits_as<float>(upper << 16 | x.remainder);
}

// ----------------------------------------------------------------------------
// 8 bits

constexpr size_t STATE_BLOCK = 256; // elements that share an absmax

// Bytes of n elements: codes and then a float a block, or floats, each from a multiple of 256 on.
LLMC_HD inline size_t codes_bytes(size_t n) { return round_up(n, STATE_BLOCK); }
LLMC_HD inline size_t state_bytes(size_t n, bool small) {
    // Floats of what is not quantised.
    if (!small) return round_up(4 * n, STATE_BLOCK);
    return codes_bytes(n) + round_up(4 * ceil_div(n, STATE_BLOCK), STATE_BLOCK);
}

// The value of a code, in rising order. With a sign 127 is zero, and there is no -1.
LLMC_HD inline float dynamic_value(bool is_signed, int code) {
    // The two ends and zero are no part of a decade.
    int zero = is_signed ? 127 : 0;
    if (code == zero || code == 255) return code == 255;

    // Find the decade, and the place in it: the middle of one of n equal parts of [0.1, 1].
    int at = code > zero ? code - zero - 1 : zero - 1 - code;
    int n = is_signed ? 1 : 2;
    int decade = 0;
    while (at >= n) {
        at -= n;
        n *= 2;
        decade++;
    }

    // Numerator and denominator are exact: one rounding, the same everywhere.
    double below = 20.0 * n;
    for (int i = decade; i < 6; i++) {
        below *= 10;
    }
    float x = float((2 * n + 18 * at + 9) / below);
    return code < zero ? -x : x;
}

// The largest float that is not nearer to the next code.
LLMC_HD inline float dynamic_middle(bool is_signed, int code) {
    // Nothing lies above the last.
    if (code == 255) return 1;

    // The sum of two neighbours is exact in double.
    double lower = dynamic_value(is_signed, code);
    double upper = dynamic_value(is_signed, code + 1);
    double middle = (lower + upper) / 2;
    float x = float(middle);
    return x > middle ? nextafterf(x, -2.0f) : x;
}

// A map's values and middles.
struct DynamicMap {
    const float *value, *middle; // (256)
};

// The code nearest to x, by halves.
LLMC_HD inline uint8_t dynamic_code(const DynamicMap& map, float x) {
    // No branch depends on x: threads of a warp stay together.
    int code = 0;
    for (int step = 128; step > 0; step /= 2) {
        float middle = map.middle[code + step - 1];
        code += x > middle ? step : 0;
    }
    return uint8_t(code);
}

// Blocks are divided by their largest magnitude. A subnormal one would lose bits, and then
// counts as zero.
LLMC_HD inline float block_scale(float largest) { return largest < 0x1p-126f ? 0 : largest; }
LLMC_HD inline float scaled(float x, float absmax) { return absmax > 0 ? x / absmax : 0; }

// The host's maps.
inline DynamicMap dynamic_map(bool is_signed) {
    struct Tables {
        float value[2][256];
        float middle[2][256];
        Tables() {
            // Without signs, then with them.
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

// Where a block's codes and its absmax lie in a tensor's bytes (codes_bytes(n) + 4 a block).
struct StateBlock {
    uint8_t* codes;
    float* absmax;
};
LLMC_HD inline StateBlock state_block(unsigned char* tensor, size_t n, size_t i) {
    // Scales follow the codes.
    float* scales = reinterpret_cast<float*>(tensor + codes_bytes(n));
    return {tensor + i, scales + i / STATE_BLOCK};
}

// A block's numbers, and back: n <= 256.
inline void read_block(float* x, StateBlock b, size_t n, const DynamicMap& map) {
    float absmax = *b.absmax;
    for (size_t k = 0; k < n; k++) {
        float y = map.value[b.codes[k]];
        x[k] = y * absmax;
    }
}
inline void write_block(StateBlock b, const float* x, size_t n, const DynamicMap& map) {
    // Find the scale.
    float largest = 0;
    for (size_t k = 0; k < n; k++) {
        float size = std::fabs(x[k]);
        largest = std::fmax(largest, size);
    }
    float absmax = block_scale(largest);
    *b.absmax = absmax;

    // Divide by it, and take the nearest codes.
    for (size_t k = 0; k < n; k++) {
        float y = scaled(x[k], absmax);
        b.codes[k] = dynamic_code(map, y);
    }
}

} // namespace llmc
