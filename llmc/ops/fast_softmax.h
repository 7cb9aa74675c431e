// fast_softmax.h - exp below a softmax's maximum, as a polynomial that g++ vectorises
//   To copy: this file and types.h.
#pragma once
#include "types.h"

namespace llmc {

// exp(x) for x <= 88, in half the instructions; a softmax needs only x <= 0, below its maximum. The
// relative error is below 2e-7. It is 0 below -88; a NaN stays NaN.
inline float fast_exp_nonpositive(float x) {
    // Split x / ln2 = n + f with |f| <= 1/2. The second term is the part of 1 / ln2
    // that 1.44269502f lacks.
    float shifted = x * 1.44269502f + 12582912.0f;
    float n = shifted - 12582912.0f;
    float f = std::fma(x, 1.44269502f, -n); // exact
    f += x * 1.92596299e-8f;

    // Evaluate 2^f to 2e-8, exactly 1 at 0. Pairs of terms wait for each other less than
    // a chain would.
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
