// common.h - what every operator file needs: element types, checks, where code runs, vector maths
//   Dims, one vocabulary everywhere:  B batch  T sequence  C channels  L layers  V vocabulary  Vp
//   padded V
//     N rows (B*T)  NH heads  NKV key/value heads  HS head size  F ffn width;  _tp _cp: my share of
//     a sharded dim
//   Where code runs is the last argument of every operator: Cpu{} (a cudaStream_t will be the other
//   overload).
//   CPU versions accumulate in acc_t<T>: double for double, float for everything narrower. Their
//   reductions are split
//   by fixed chunks, never by thread, so that a result does not depend on the number of threads.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

struct Cpu {};

// ----------------------------------------------------------------------------
// checks: say what is wrong, with the numbers, and what to do; one write, non-zero exit

inline thread_local int this_rank = 0; // only ever read by the messages below

[[noreturn]] inline void die(const char* message) {
    char line[2048];
    int n = snprintf(line, sizeof(line), "train_gpt: error: %s%s\n", message,
                     this_rank ? " (see the first rank's message too)" : "");
    if (n > int(sizeof(line)) - 1) n = sizeof(line) - 1;
    fflush(stdout);
    fwrite(line, 1, n, stderr);
    exit(1);
}

// A mistake in the program or the machine: file, line, rank, the condition, the values.
#define CHECK(cond, ...)                                                                   \
    do {                                                                                   \
        if (!(cond)) {                                                                     \
            char check_text_[1024], check_line_[1536];                                     \
            snprintf(check_text_, sizeof(check_text_), __VA_ARGS__);                       \
            snprintf(check_line_, sizeof(check_line_), "%s:%d: rank %d: %s: %s", __FILE__, \
                     __LINE__, this_rank, #cond, check_text_);                             \
            die(check_line_);                                                              \
        }                                                                                  \
    } while (0)

// A mistake in what the user gave: one plain line with a fix.
#define USER_CHECK(cond, ...)                                        \
    do {                                                             \
        if (!(cond)) {                                               \
            char check_text_[1536];                                  \
            snprintf(check_text_, sizeof(check_text_), __VA_ARGS__); \
            die(check_text_);                                        \
        }                                                            \
    } while (0)

// ----------------------------------------------------------------------------
// element types

// bf16: the upper half of a float; arithmetic happens in float
struct bf16 {
    uint16_t bits;
};

enum class Type : uint8_t { F32, BF16, F16, F64 };
inline size_t type_bytes(Type t) { return t == Type::F64 ? 8 : t == Type::F32 ? 4 : 2; }
inline const char* type_name(Type t) { // the names of safetensors headers
    return t == Type::F64 ? "F64" : t == Type::F32 ? "F32" : t == Type::BF16 ? "BF16" : "F16";
}
template <typename T> constexpr Type type_of();
template <> constexpr Type type_of<float>() { return Type::F32; }
template <> constexpr Type type_of<double>() { return Type::F64; }
template <> constexpr Type type_of<bf16>() { return Type::BF16; }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t u = uint32_t(x.bits) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

// what sums of T are kept in; to_acc never narrows
template <typename T> struct Accumulator { typedef float type; };
template <> struct Accumulator<double> { typedef double type; };
template <typename T> using acc_t = typename Accumulator<T>::type;
template <typename T> inline acc_t<T> to_acc(T x) { return to_float(x); }
template <> inline double to_acc<double>(double x) { return x; }

template <typename T> inline T from_acc(acc_t<T> x) { return T(x); }
// round to nearest, ties to even; a NaN stays a NaN
template <> inline bf16 from_acc<bf16>(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    uint32_t rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16, nan = u >> 16 | 0x40;
    return {uint16_t(f != f ? nan : rounded)};
}

inline size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }
inline size_t round_up(size_t a, size_t b) { return ceil_div(a, b) * b; }

// Llama-3's scaling of rotary frequencies: a part of a model's shape, used by rope.cuh
struct RopeScaling {
    float factor = 1; // 1: none
    float low_freq_factor = 1, high_freq_factor = 4;
    int original_positions = 8192;
};

// ----------------------------------------------------------------------------
// exp and tanh as polynomials: g++ vectorises libm only under -ffast-math, which the project does
// not use

// exp(x), relative error below 2e-7; 0 below -87.3, +inf above 88.7, NaN stays NaN
inline float fast_exp(float x) {
    float clamped = x < -87.3f ? -87.3f : x > 88.7f ? 88.7f : x; // NaN fails both and passes
    // x = n ln2 + r with |r| <= ln2 / 2: exp(x) = 2^n exp(r); adding 1.5 * 2^23 rounds to an
    // integer
    float shifted = clamped * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    // two factors, since 2^128 is no float
    int32_t e;
    memcpy(&e, &shifted, 4);
    e -= 0x4b400000;
    int32_t half = e >> 1, b0 = (half + 127) << 23, b1 = (e - half + 127) << 23;
    float s0, s1;
    memcpy(&s0, &b0, 4);
    memcpy(&s1, &b1, 4);
    float y = p * s0 * s1;
    y = x < -87.3f ? 0.0f : y;
    y = x > 88.7f ? INFINITY : y;
    return x != x ? x : y;
}
inline double fast_exp(double x) { return std::exp(x); }

// exp(x) for x <= 88, as softmax has it below its maximum: a third fewer instructions
inline float fast_exp_low(float x) {
    float clamped = x < -87.3f ? -87.3f : x; // NaN passes
    float shifted = clamped * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits; // 2^n: the exponent of p grows by n
    memcpy(&bits, &shifted, 4);
    bits = (bits << 23) + 0x3f800000;
    float power;
    memcpy(&power, &bits, 4);
    return x < -87.3f ? 0.0f : p * power;
}
inline double fast_exp_low(double x) { return std::exp(x); }

// tanh(x), absolute error below 3e-7
inline float fast_tanh(float x) {
    float a = x < -9.0f ? -9.0f : x > 9.0f ? 9.0f : x;
    float e = fast_exp(2.0f * a);
    return (e - 1.0f) / (e + 1.0f);
}
inline double fast_tanh(double x) { return std::tanh(x); }
