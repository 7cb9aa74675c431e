// fast_math.h - exp and tanh as polynomials, which g++ vectorises
//   libm's functions vectorise only under -ffast-math, which this project does not use.
//   To copy: this file and types.h.
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

} // namespace llmc
