// types.h - element types, checks, and the arithmetic that every operator shares
//   Dims, one vocabulary everywhere:
//     B batch   T sequence   N rows (B*T)   C channels   L layers   F ffn width
//     V vocabulary   Vp padded V   NH heads   NKV key/value heads   HS head size
//     _tp _cp: this rank's share of a sharded dim
//   The last argument of every operator says where it runs: Cpu{} or a cudaStream_t.
//   Elements are float, bf16, fp16, or CUDA's __nv_bfloat16 and __half; double is the reference.
//   CPU versions accumulate in acc_t<T>: double for double, float for everything narrower. Their
//   reductions are split by fixed chunks, never by thread, so a result does not depend on the
//   number of threads.
//   Names are in the namespace llmc and macros begin with LLMC_, so that they clash with nothing in
//   a project that copies a file.
//   To copy: this file.
#pragma once
#include <cmath>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
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

// Print the message, a printf format and its values, and end the job. Several ranks often find the
// same mistake: the others give rank 0 two seconds to report it. Only one thread reports.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void die(const char* format, ...) {
    static std::atomic_flag said;
    if (this_rank > 0) sleep(2);
    while (said.test_and_set()) pause();

    // Build one line and write it at once, so that lines of several processes do not mix.
    char line[2048];
    int n = snprintf(line, sizeof(line), "%s: error: ", program_invocation_short_name);
    va_list values;
    va_start(values, format);
    n += vsnprintf(line + n, sizeof(line) - n, format, values);
    va_end(values);
    n = n > int(sizeof(line)) - 2 ? int(sizeof(line)) - 2 : n;

    // Show no control character: a message may quote a file, and a terminal obeys escape sequences.
    for (int i = 0; i < n; i++)
        if ((unsigned char)line[i] < ' ' || line[i] == 127)
            line[i] = '?';
    line[n] = '\n';
    fflush(stdout);
    fwrite(line, 1, n + 1, stderr);
    _exit(1);
}

// For a mistake in the program or the machine. Prints file, line, rank, condition and values.
#define LLMC_CHECK(cond, format, ...)                                                           \
    ((cond) ? void() : llmc::die("%s:%d: rank %d: %s: " format, __FILE__, __LINE__,             \
                                 llmc::this_rank, #cond __VA_OPT__(, ) __VA_ARGS__))

// For a mistake in what the user gave. Prints one plain line that says how to fix it.
#define LLMC_USER_CHECK(cond, ...) ((cond) ? void() : llmc::die(__VA_ARGS__))

// ----------------------------------------------------------------------------
// element types

// bf16 is the upper half of a float, fp16 is IEEE half precision. Arithmetic is done in float.
struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};

// Reinterpret the bits as another type of the same size.
template <typename To, typename From>
LLMC_HD inline To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    memcpy(static_cast<void*>(&y), &x, sizeof(To)); // void: CUDA's own types hide their bits
    return y;
}

// Convert to float, exactly. A type without an overload is refused: no conversion is an accident.
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
    // Put exponent and mantissa where a float has them: the value times 2^-112, for subnormals too.
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
    if (u >= 0x477ff000) return {uint16_t(sign | 0x7c00)};

    // Round a subnormal by adding 0.5: one unit in the last place of that sum is 2^-24.
    if (u < 0x38800000)
        return {uint16_t(sign | (bits_as<uint32_t>(bits_as<float>(u) + 0.5f) - 0x3f000000))};
    return {uint16_t(sign | ((u + 0xfff + (u >> 13 & 1) - 0x38000000) >> 13))};
#endif
}

// CUDA's own 16-bit types hold the same bits, so every operator also takes pointers to them.
#if defined(__CUDA_BF16_H__) && defined(__CUDA_FP16_H__)
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

} // namespace llmc
