// fast_math.h - exp and tanh as polynomials, which g++ vectorises
//   libm's functions vectorise only under -ffast-math, which this project does not use.
//   To copy: this file and types.h. On AVX2 g++ vectorises them under -fno-trapping-math.
#pragma once
#include "types.h"

namespace llmc {

// exp(x) with a relative error below 2e-7. It is 0 below -87.3 and +inf above 88.7; a NaN stays a
// NaN.
inline float fast_exp(float x) {
    float clamped = x < -87.3f ? -87.3f : x > 88.7f ? 88.7f : x; // a NaN stays a NaN

    // Split x = n ln2 + r with |r| <= ln2 / 2. Adding 1.5 * 2^23 rounds to an integer.
    float shifted = clamped * 1.44269504f + 12582912.0f;
    float n = shifted - 12582912.0f;
    float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;

    // Evaluate exp(r).
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;

    // Scale by 2^n in two factors, because 2^128 is not a float.
    int32_t e = bits_as<int32_t>(shifted) - 0x4b400000;
    int32_t half = e >> 1;
    float s0 = bits_as<float>((half + 127) << 23);
    float s1 = bits_as<float>((e - half + 127) << 23);
    float y = p * s0 * s1;

    // Restore the results outside the clamped range.
    y = x < -87.3f ? 0.0f : y;
    y = x > 88.7f ? INFINITY : y;
    return x != x ? x : y;
}
inline double fast_exp(double x) { return std::exp(x); }

// tanh(x) with an absolute error below 3e-7.
inline float fast_tanh(float x) {
    float a = x < -9.0f ? -9.0f : x > 9.0f ? 9.0f : x;
    float e = fast_exp(2.0f * a);
    return (e - 1.0f) / (e + 1.0f);
}
inline double fast_tanh(double x) { return std::tanh(x); }

// exp(x) for x <= 88, in half the instructions; a softmax needs only x <= 0, below its maximum. The
// relative error is below 2e-7. It is 0 below -88; a NaN stays NaN.
inline float fast_exp_nonpositive(float x) {
    // Split x / ln2 = n + f, |f| <= 1/2. The second term is what 1.44269502f lacks of 1 / ln2.
    float shifted = x * 1.44269502f + 12582912.0f;
    float n = shifted - 12582912.0f;
    float f = std::fma(x, 1.44269502f, -n); // exact
    f += x * 1.92596299e-8f;

    // Evaluate 2^f to 2e-8, exactly 1 at 0. Pairs of terms wait for each other less than a chain.
    float ff = f * f;
    float p = 6.931472421e-1f * f + 1.0f;
    float q = 5.550310388e-2f * f + 2.402265221e-1f;
    float r = 1.340664341e-3f * f + 9.617692791e-3f;
    p = ((1.559467782e-4f * ff + r) * ff + q) * ff + p;
    float y = p * bits_as<float>((bits_as<uint32_t>(shifted) << 23) + 0x3f800000); // 2^-127 gives 0

    // Mask y to 0 far below, where it is meaningless. g++ would turn `x < -88 ? 0 : y` into a
    // branch and mask every instruction above with it, which is two thirds slower. A NaN is
    // not below -88.
    uint32_t keep = -uint32_t(!(x < -88.0f));
    return bits_as<float>(bits_as<uint32_t>(y) & keep);
}
inline double fast_exp_nonpositive(double x) { return std::exp(x); }

} // namespace llmc
