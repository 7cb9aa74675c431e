// types.h - element types, checks, and the arithmetic that every operator shares
//   Dims, one vocabulary everywhere:
//     B batch   T sequence   N rows (B*T)   C channels   L layers   F ffn width
//     V vocabulary   Vp padded V   NH heads   NKV key/value heads   HS head size
//     _tp _cp: this rank's share of a sharded dim
//   The last argument of every operator says where it runs: Cpu{} or a cudaStream_t.
//   Elements are float, bf16, fp16, or CUDA's __nv_bfloat16 and __half; tests use double as the
//   reference.
//   CPU versions accumulate in acc_t<T>: double for double, float for everything narrower. Their
//   reductions are split by fixed chunks, never by thread, so a result does not depend on the
//   number of threads.
//   Names are in the namespace llmc and macros begin with LLMC_, so that they clash with nothing in
//   a project that copies a file.
//   To copy: this file.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>
#include <atomic>
#include <type_traits>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define LLMC_HD __host__ __device__
#else
#define LLMC_HD
#endif
#if defined(EMULATE)
#include "../../test/harness/emulator_types.h"
#endif

namespace llmc {

// Passed as the last argument to run an operator on the CPU.
struct Cpu {};

// ----------------------------------------------------------------------------
// checks: say what is wrong, with the numbers, and what to do; one write, non-zero exit

inline thread_local int this_rank = 0; // only the messages below read it

// Print the message and end the job. Several ranks often find the same mistake: the other ranks
// give rank 0 two seconds to report it and end the job. Within a process only one thread reports.
[[noreturn]] inline void die(const char* message) {
    static std::atomic_flag said;
    if (this_rank > 0) sleep(2);
    while (said.test_and_set()) pause();

    // Build one line and write it at once, so that lines of several processes do not mix.
    char line[2048];
    int n = snprintf(line, sizeof(line), "%s: error: %s\n", program_invocation_short_name,
                     message);
    if (n > int(sizeof(line)) - 1)
        n = sizeof(line) - 1;
    line[n - 1] = '\n'; // a message that was cut needs it too

    // Show no control character: a message may quote a file, and a terminal obeys escape sequences.
    for (int i = 0; i < n - 1; i++)
        if ((unsigned char)line[i] < ' ' || line[i] == 127)
            line[i] = '?';
    fflush(stdout);
    fwrite(line, 1, n, stderr);
    _exit(1);
}

// clang-format off
// For a mistake in the program or the machine. Prints file, line, rank, condition and values.
#define LLMC_CHECK(cond, ...)                                                               \
    do {                                                                                    \
        if (!(cond)) {                                                                      \
            char check_text_[1024], check_line_[1536];                                      \
            snprintf(check_text_, sizeof(check_text_), __VA_ARGS__);                        \
            snprintf(check_line_, sizeof(check_line_), "%s:%d: rank %d: %s: %s", __FILE__,  \
                     __LINE__, llmc::this_rank, #cond, check_text_);                        \
            llmc::die(check_line_);                                                         \
        }                                                                                   \
    } while (0)

// For a mistake in what the user gave. Prints one plain line that says how to fix it.
#define LLMC_USER_CHECK(cond, ...)                                                          \
    do {                                                                                    \
        if (!(cond)) {                                                                      \
            char check_text_[1536];                                                         \
            snprintf(check_text_, sizeof(check_text_), __VA_ARGS__);                        \
            llmc::die(check_text_);                                                         \
        }                                                                                   \
    } while (0)
// clang-format on

// ----------------------------------------------------------------------------
// element types

// bf16 is the upper half of a float, fp16 is IEEE half precision. Arithmetic is done in float.
struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};

// Element types as values, for tables and files.
enum class Type : uint8_t { F32, BF16, F16, F64 };

struct TypeRow {
    size_t bytes;
    const char* name; // as in the headers of safetensors files
};

// There is no default case: the compiler warns of a missing type, and at run time die() reports it.
inline TypeRow type_row(Type t) {
    switch (t) {
    case Type::F32: return {4, "F32"};
    case Type::BF16: return {2, "BF16"};
    case Type::F16: return {2, "F16"};
    case Type::F64: return {8, "F64"};
    }
    die("an element type without a row in type_row()");
}

// The bytes and the name of a type.
inline size_t type_bytes(Type t) { return type_row(t).bytes; }
inline const char* type_name(Type t) { return type_row(t).name; }

// The Type of a C++ type.
template <typename T> LLMC_HD constexpr Type type_of();
template <>
LLMC_HD constexpr Type type_of<float>() { return Type::F32; }
template <>
LLMC_HD constexpr Type type_of<double>() { return Type::F64; }
template <>
LLMC_HD constexpr Type type_of<bf16>() { return Type::BF16; }
template <>
LLMC_HD constexpr Type type_of<fp16>() { return Type::F16; }

// Reinterpret the bits as another type of the same size.
template <typename To, typename From>
LLMC_HD inline To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    memcpy(static_cast<void*>(&y), &x, sizeof(To)); // void: CUDA's own types hide their bits
    return y;
}

// Convert to float, exactly. A type without an overload is refused, so that nothing is
// converted by accident.
template <typename T> LLMC_HD float to_float(T) = delete;
LLMC_HD inline float to_float(float x) { return x; }
LLMC_HD inline float to_float(bf16 x) {
#if defined(__CUDA_ARCH__)
    // One instruction, also for the upper half of a word: a shift would first have to extract it.
    float y;
    asm("mov.b32 %0, {0, %1};" : "=f"(y) : "h"(x.bits));
    return y;
#else
    return bits_as<float>(uint32_t(x.bits) << 16);
#endif
}
LLMC_HD inline float to_float(fp16 x) {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(x.bits));
#else
    // Put exponent and mantissa where a float has them. The result is the value times 2^-112,
    // for subnormals too.
    uint32_t u = (x.bits & 0x7fffu) << 13;
    uint32_t sign = uint32_t(x.bits & 0x8000u) << 16;
    float f = bits_as<float>(u) * 0x1p112f;

    // Infinity and NaN keep the largest exponent.
    bool finite = (x.bits & 0x7c00) != 0x7c00;
    return bits_as<float>((finite ? bits_as<uint32_t>(f) : u | 0x7f800000u) | sign);
#endif
}

// acc_t<T> is the type of sums of T, at least as wide as T.
template <typename T>
struct Accumulator { typedef float type; };
template <>
struct Accumulator<double> { typedef double type; };
template <typename T> using acc_t = typename Accumulator<T>::type;

// Convert from acc_t<T>: round to nearest, ties to even. A NaN stays a NaN.
template <typename T>
LLMC_HD inline T from_acc(acc_t<T> x) {
    static_assert(std::is_floating_point_v<T>,
                  "elements are float, double, llmc::bf16, llmc::fp16; __nv_bfloat16 and __half "
                  "too, where cuda_bf16.h and cuda_fp16.h are included before llmc's files");
    return T(x);
}
template <> LLMC_HD inline bf16 from_acc<bf16>(float f) {
#if defined(__CUDA_ARCH__)
    return {__bfloat16_as_ushort(__float2bfloat16_rn(f))};
#else
    uint32_t u = bits_as<uint32_t>(f);
    uint32_t rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    uint32_t nan = u >> 16 | 0x40;
    return {uint16_t(f != f ? nan : rounded)};
#endif
}
template <> LLMC_HD inline fp16 from_acc<fp16>(float f) {
#if defined(__CUDA_ARCH__)
    return {__half_as_ushort(__float2half_rn(f))};
#else
    uint32_t u = bits_as<uint32_t>(f);
    uint32_t sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;

    // Return a NaN, and infinity for 65520 and more, before the arithmetic below.
    if (u > 0x7f800000) return {uint16_t(sign | 0x7e00)};
    if (u >= 0x477ff000)
        return {uint16_t(sign | 0x7c00)};

    // Round a subnormal by adding 0.5: one unit in the last place of that sum is 2^-24.
    if (u < 0x38800000)
        return {uint16_t(sign | (bits_as<uint32_t>(bits_as<float>(u) + 0.5f) - 0x3f000000))};
    return {uint16_t(sign | ((u + 0xfff + (u >> 13 & 1) - 0x38000000) >> 13))};
#endif
}

// CUDA's own 16-bit types hold the same bits, so every operator also takes pointers to them.
#if defined(__CUDA_BF16_H__) && defined(__CUDA_FP16_H__)
template <>
LLMC_HD constexpr Type type_of<__nv_bfloat16>() { return Type::BF16; }
template <>
LLMC_HD constexpr Type type_of<__half>() { return Type::F16; }
LLMC_HD inline float to_float(__nv_bfloat16 x) { return to_float(bits_as<bf16>(x)); }
LLMC_HD inline float to_float(__half x) { return to_float(bits_as<fp16>(x)); }
template <>
LLMC_HD inline __nv_bfloat16 from_acc<__nv_bfloat16>(float x) {
    return bits_as<__nv_bfloat16>(from_acc<bf16>(x));
}
template <>
LLMC_HD inline __half from_acc<__half>(float x) {
    return bits_as<__half>(from_acc<fp16>(x));
}
#endif

// Convert to acc_t<T>, exactly.
template <typename T>
LLMC_HD inline acc_t<T> to_acc(T x) { return to_float(x); }
template <>
LLMC_HD inline double to_acc<double>(double x) { return x; }

// a / b rounded up, and a rounded up to a multiple of b.
LLMC_HD inline size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }
LLMC_HD inline size_t round_up(size_t a, size_t b) { return ceil_div(a, b) * b; }

// ----------------------------------------------------------------------------
// exp and tanh as polynomials: g++ vectorises libm's functions only under -ffast-math, which this
// project does not use

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

template <typename A>
inline A fast_exp_low(A x) { return fast_exp_nonpositive(x); } // old name

// tanh(x) with an absolute error below 3e-7.
inline float fast_tanh(float x) {
    float a = x < -9.0f ? -9.0f : x > 9.0f ? 9.0f : x;
    float e = fast_exp(2.0f * a);
    return (e - 1.0f) / (e + 1.0f);
}
inline double fast_tanh(double x) { return std::tanh(x); }

} // namespace llmc
