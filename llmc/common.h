// common.h - what every operator file needs: element types, checks, where code runs, launching
//   Dims, one vocabulary everywhere:  B batch  T sequence  C channels  L layers  V vocabulary
//     Vp padded V  N rows (B*T)  NH heads  NKV key/value heads  HS head size  F ffn width;
//     _tp _cp: my share of a sharded dim
//   Where code runs is the last argument of every operator: Cpu{} or a cudaStream_t. Both overloads
//   live in one binary. Built three ways: nvcc (GPU), g++ -DEMULATE (kernels run on the CPU, for
//   tests), g++ (no kernels).
//   CPU versions accumulate in acc_t<T>: double for double, float for everything narrower. Their
//   reductions are split by fixed chunks, never by thread, so that a result does not depend on the
//   number of threads.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>
#include <atomic>
#include <string>
#include <vector>

// ----------------------------------------------------------------------------
// which build

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define KERNELS 1
#elif defined(EMULATE)
#include "../test/emulator.h"
#define KERNELS 1
#else
#define KERNELS 0
#define __host__
#define __device__
#endif
#define HD __host__ __device__

struct Cpu {};

// ----------------------------------------------------------------------------
// checks: say what is wrong, with the numbers, and what to do; one write, non-zero exit

inline thread_local int this_rank = 0; // only ever read by the messages below

// Ranks often find the same mistake: the first one says it for all, and ends the job.
[[noreturn]] inline void die(const char* message) {
    static std::atomic_flag said;
    if (this_rank > 0) sleep(2);
    while (said.test_and_set()) pause();
    char line[2048];
    int n = snprintf(line, sizeof(line), "train_gpt: error: %s\n", message);
    if (n > int(sizeof(line)) - 1) n = sizeof(line) - 1;
    fflush(stdout);
    fwrite(line, 1, n, stderr);
    _exit(1); // the other threads go on until then
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

// bf16: the upper half of a float; fp16: IEEE half precision; arithmetic happens in float
struct bf16 {
    uint16_t bits;
};
struct fp16 {
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
template <> constexpr Type type_of<fp16>() { return Type::F16; }

template <typename To, typename From> HD inline To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    memcpy(&y, &x, sizeof(To));
    return y;
}

HD inline float to_float(float x) { return x; }
HD inline float to_float(bf16 x) { return bits_as<float>(uint32_t(x.bits) << 16); }
HD inline float to_float(fp16 x) {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(x.bits));
#else
    // exponent and mantissa in a float's place are 2^-112 of the value, subnormal numbers too
    uint32_t u = (x.bits & 0x7fffu) << 13, sign = uint32_t(x.bits & 0x8000u) << 16;
    float f = bits_as<float>(u) * 0x1p112f;
    bool finite = (x.bits & 0x7c00) != 0x7c00;
    return bits_as<float>((finite ? bits_as<uint32_t>(f) : u | 0x7f800000u) | sign);
#endif
}

// what sums of T are kept in; to_acc never narrows
template <typename T> struct Accumulator { typedef float type; };
template <> struct Accumulator<double> { typedef double type; };
template <typename T> using acc_t = typename Accumulator<T>::type;
template <typename T> HD inline acc_t<T> to_acc(T x) { return to_float(x); }
template <> HD inline double to_acc<double>(double x) { return x; }

// round to nearest, ties to even; a NaN stays a NaN
template <typename T> HD inline T from_acc(acc_t<T> x) { return T(x); }
template <> HD inline bf16 from_acc<bf16>(float f) {
#if defined(__CUDA_ARCH__)
    return {__bfloat16_as_ushort(__float2bfloat16_rn(f))};
#else
    uint32_t u = bits_as<uint32_t>(f);
    uint32_t rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16, nan = u >> 16 | 0x40;
    return {uint16_t(f != f ? nan : rounded)};
#endif
}
template <> HD inline fp16 from_acc<fp16>(float f) {
#if defined(__CUDA_ARCH__)
    return {__half_as_ushort(__float2half_rn(f))};
#else
    uint32_t u = bits_as<uint32_t>(f), sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    if (u > 0x7f800000) return {uint16_t(sign | 0x7e00)};  // NaN
    if (u >= 0x477ff000) return {uint16_t(sign | 0x7c00)}; // 65520 and more round to infinity
    if (u < 0x38800000) // subnormal: in a sum with 0.5 a unit in the last place is 2^-24
        return {uint16_t(sign | (bits_as<uint32_t>(bits_as<float>(u) + 0.5f) - 0x3f000000))};
    return {uint16_t(sign | ((u + 0xfff + (u >> 13 & 1) - 0x38000000) >> 13))};
#endif
}

HD inline size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }
HD inline size_t round_up(size_t a, size_t b) { return ceil_div(a, b) * b; }

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

// exp(x) for x <= 88, as softmax has it below its maximum, relative error below 2e-7, 0 below -88:
// half the instructions. exp(x) = 2^n 2^f with |f| <= 1/2; the polynomial is 2^f's to 2e-8, 1 at 0.
inline float fast_exp_low(float x) {
    float shifted = x * 1.44269502f + 12582912.0f, n = shifted - 12582912.0f;
    float f = std::fma(x, 1.44269502f, -n); // exact
    f += x * 1.92596299e-8f;                // what the float nearest to 1 / ln2 leaves
    // by pairs, which wait less for each other than a chain
    float ff = f * f, p = 6.931472421e-1f * f + 1.0f, q = 5.550310388e-2f * f + 2.402265221e-1f;
    float r = 1.340664341e-3f * f + 9.617692791e-3f;
    p = ((1.559467782e-4f * ff + r) * ff + q) * ff + p;
    float y = p * bits_as<float>((bits_as<uint32_t>(shifted) << 23) + 0x3f800000); // 2^-127 is 0
    // Far below, y is anything. Of `x < -88 ? 0 : y` g++ makes a branch, and then masks each
    // instruction above with it: two thirds slower. A NaN is not below.
    uint32_t keep = -uint32_t(!(x < -88.0f));
    return bits_as<float>(bits_as<uint32_t>(y) & keep);
}
inline double fast_exp_low(double x) { return std::exp(x); }

// tanh(x), absolute error below 3e-7
inline float fast_tanh(float x) {
    float a = x < -9.0f ? -9.0f : x > 9.0f ? 9.0f : x;
    float e = fast_exp(2.0f * a);
    return (e - 1.0f) / (e + 1.0f);
}
inline double fast_tanh(double x) { return std::tanh(x); }

// ----------------------------------------------------------------------------
// memory where things run, as the host reaches it

// in: from the host, which must not touch `from` before wait_for(); out: to the host, and wait
inline void copy_in(void* to, const void* from, size_t bytes, Cpu) {
    if (to != from) memcpy(to, from, bytes);
}
inline void copy_out(void* to, const void* from, size_t bytes, Cpu) { memcpy(to, from, bytes); }
inline void copy_rows(void* to, size_t to_stride, const void* from, size_t from_stride,
                      size_t row_bytes, size_t rows, Cpu) { // strides in bytes
    for (size_t r = 0; r < rows; r++)
        memcpy(static_cast<char*>(to) + r * to_stride,
               static_cast<const char*>(from) + r * from_stride, row_bytes);
}
inline void wait_for(Cpu) {}
// another stream beside this one
inline Cpu open_stream(Cpu where) { return where; }
inline void close_stream(Cpu) {}
// a point in what a stream has been given, for another one to wait at, once
inline int record_point(Cpu) { return 0; }
inline void wait_point(int, Cpu) {}

// Where the host prepares what copy_in() then sends: at home on the CPU, else in pinned memory.
inline void* staging_memory(size_t, Cpu) { return nullptr; }
inline void staging_free(void*, Cpu) {}
template <typename T> T* host_side(T* home, T*, Cpu) { return home; }

// Zero-filled memory where things run, or null when there is not enough.
inline void* device_memory(size_t bytes, Cpu) { // pages take room when they are first touched
    void* p = mmap(nullptr, bytes ? bytes : 1, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return nullptr;
    madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}
inline void device_free(void* p, size_t bytes, Cpu) { munmap(p, bytes ? bytes : 1); }
inline void device_zero(void* p, size_t bytes, Cpu) { memset(p, 0, bytes); }

// to[i] = value(i), computed by the host
template <typename T, typename F> void fill_memory(T* to, size_t n, F value, Cpu) {
    #pragma omp parallel for
    for (size_t i = 0; i < n; i++) to[i] = value(i);
}

// ----------------------------------------------------------------------------
// device code shared by kernels

#if KERNELS

// N elements of T in one load or store: 16 bytes where pointers and row length allow, else one
template <typename T, int N> struct alignas(N * sizeof(T)) Pack { T v[N]; };
template <int N, typename T> __device__ inline Pack<T, N> load(const T* p) {
    return *reinterpret_cast<const Pack<T, N>*>(p);
}
template <typename T, int N> __device__ inline void store(T* p, Pack<T, N> x) {
    *reinterpret_cast<Pack<T, N>*>(p) = x;
}

// The P elements at p, or the first `count` of them.
template <int P, typename T> __device__ Pack<T, P> load_some(const T* p, size_t count) {
    if (count >= P) return load<P>(p);
    Pack<T, P> x = {};
    for (int i = 0; i < P; i++)
        if (size_t(i) < count) x.v[i] = p[i];
    return x;
}
template <int P, typename T> __device__ void store_some(T* p, Pack<T, P> x, size_t count) {
    if (count >= P) return store(p, x);
    for (int i = 0; i < P; i++)
        if (size_t(i) < count) p[i] = x.v[i];
}

template <typename T> constexpr int VECTOR = 16 / sizeof(T);
// whether rows of `row` elements at these addresses (null: none) can be read 16 bytes at a time
template <typename T, typename... Ps> bool can_vectorize(size_t row, const Ps*... ps) {
    return row % VECTOR<T> == 0 && ((uintptr_t(ps) % 16 == 0) && ...);
}

constexpr unsigned ALL_LANES = 0xffffffffu;

// in the order of a butterfly: the same bits in every lane, and in every run
template <typename A> __device__ inline A warp_sum(A x) { // float or double
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(ALL_LANES, x, mask);
    return x;
}
__device__ inline float warp_max(float x) {
    for (int mask = 16; mask > 0; mask /= 2) {
        float y = __shfl_xor_sync(ALL_LANES, x, mask);
        x = y > x ? y : x;
    }
    return x;
}

// Shared memory has one spelling, so that the emulator can own and poison it:
//   SHARED(float, sums, 8 * 32);  declares float* or float[256]; dynamic_shared() is what launch()
//   was asked for, 1024-byte aligned.
#if defined(__CUDACC__)
#define SHARED(type, name, count) __shared__ __align__(128) type name[count]
extern __shared__ __align__(1024) unsigned char dynamic_shared_bytes[];
__device__ inline unsigned char* dynamic_shared() { return dynamic_shared_bytes; }
#else
#define SHARED(type, name, count) \
    type* name = emulator::shared_array<type>(count, emulator::Site::current())
inline unsigned char* dynamic_shared() { return emulator::dynamic_shared_memory(); }
#endif

// The sum over a block of WARPS warps, for every thread; all of them must call it.
template <int WARPS, typename A> __device__ A block_sum(A x) {
    SHARED(A, sums, WARPS);
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads(); // the sums of all warps are there
    A sum = 0;
    for (int w = 0; w < WARPS; w++) sum += sums[w];
    __syncthreads(); // and read: the next call may write
    return sum;
}

#define CUDA_CHECK(call)                                                                     \
    do {                                                                                     \
        cudaError_t cuda_error_ = (call);                                                    \
        CHECK(cuda_error_ == cudaSuccess, "CUDA says: %s", cudaGetErrorString(cuda_error_)); \
    } while (0)

inline void copy_in(void* to, const void* from, size_t bytes, cudaStream_t stream) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream));
}
inline void wait_for(cudaStream_t stream) { CUDA_CHECK(cudaStreamSynchronize(stream)); }
inline cudaStream_t open_stream(cudaStream_t) {
    cudaStream_t stream = nullptr;
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}
inline void close_stream(cudaStream_t stream) { CUDA_CHECK(cudaStreamDestroy(stream)); }
inline cudaEvent_t record_point(cudaStream_t stream) {
    cudaEvent_t point = nullptr;
    CUDA_CHECK(cudaEventCreateWithFlags(&point, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventRecord(point, stream));
    return point;
}
inline void wait_point(cudaEvent_t point, cudaStream_t stream) {
    CUDA_CHECK(cudaStreamWaitEvent(stream, point, 0));
    CUDA_CHECK(cudaEventDestroy(point)); // freed when it is reached
}
inline void copy_out(void* to, const void* from, size_t bytes, cudaStream_t stream) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream));
    wait_for(stream);
}
inline void copy_rows(void* to, size_t to_stride, const void* from, size_t from_stride,
                      size_t row_bytes, size_t rows, cudaStream_t stream) {
    CUDA_CHECK(cudaMemcpy2DAsync(to, to_stride, from, from_stride, row_bytes, rows,
                                 cudaMemcpyDeviceToDevice, stream));
}
inline void* staging_memory(size_t bytes, cudaStream_t) {
    void* p = nullptr;
    CUDA_CHECK(cudaMallocHost(&p, bytes));
    return p;
}
inline void staging_free(void* p, cudaStream_t) { CUDA_CHECK(cudaFreeHost(p)); }
template <typename T> T* host_side(T*, T* staged, cudaStream_t) { return staged; }
inline void* device_memory(size_t bytes, cudaStream_t stream) {
    void* p = nullptr;
    if (cudaMalloc(&p, bytes ? bytes : 1) != cudaSuccess) return nullptr;
    CUDA_CHECK(cudaMemsetAsync(p, 0, bytes, stream));
    return p;
}
inline void device_free(void* p, size_t, cudaStream_t) { CUDA_CHECK(cudaFree(p)); }
inline void device_zero(void* p, size_t bytes, cudaStream_t stream) {
    CUDA_CHECK(cudaMemsetAsync(p, 0, bytes, stream));
}
inline std::string device_name(cudaStream_t) {
    cudaDeviceProp properties;
    int current = 0;
    CUDA_CHECK(cudaGetDevice(&current));
    CUDA_CHECK(cudaGetDeviceProperties(&properties, current));
    return properties.name;
}
// Whether Hopper's own instructions (sm_90a) are there: no earlier and no later GPU has them.
inline bool is_hopper(cudaStream_t) {
    int current = 0, major = 0, minor = 0;
    CUDA_CHECK(cudaGetDevice(&current));
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, current));
    CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, current));
    return major == 9 && minor == 0;
}
template <typename T, typename F> void fill_memory(T* to, size_t n, F value, cudaStream_t stream) {
    constexpr size_t PART = size_t(1) << 22;
    std::vector<T> part(n < PART ? n : PART);
    for (size_t at = 0; at < n; at += PART) {
        size_t count = n - at < PART ? n - at : PART;
        fill_memory(
            part.data(), count, [&](size_t i) { return value(at + i); }, Cpu{});
        copy_in(to + at, part.data(), count * sizeof(T), stream);
        wait_for(stream);
    }
}

// One way to start a kernel, in every build: nothing can forget the stream or the error check.
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, Args... args) {
#if defined(__CUDACC__)
    if (shared_bytes > (size_t(48) << 10))
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        int(shared_bytes)));
    kernel<<<grid, block, shared_bytes, stream>>>(Params(args)...);
    CUDA_CHECK(cudaGetLastError());
#else
    (void)stream;
    emulator::run_grid(grid, block, 1, shared_bytes, [=] { kernel(Params(args)...); });
#endif
}

template <int N> struct Int { // a constant that a generic lambda can take as an argument
    HD constexpr operator int() const { return N; }
};

// ----------------------------------------------------------------------------
// elementwise operators: P elements a thread, the last thread fewer

constexpr unsigned ELEMENT_THREADS = 256;
template <int P> __device__ size_t first_element() {
    return (size_t(blockIdx.x) * ELEMENT_THREADS + threadIdx.x) * P;
}

// f(P, blocks) for n elements
template <typename T, typename F> void pick_element_kernel(size_t n, bool vector, F f) {
    if (n == 0) return;
    auto pick = [&](auto P) { f(P, unsigned(ceil_div(n, size_t(ELEMENT_THREADS) * P))); };
    vector ? pick(Int<VECTOR<T>>()) : pick(Int<1>());
}

// ----------------------------------------------------------------------------
// row operators: some warps share a row, as many as keep 64 bytes a thread, so that a block's rows
// stay in L1 while they are read more than once

template <typename T, typename F> void pick_row_kernel(size_t C, bool vector, F f) {
    auto pick = [&](auto P) {
        size_t bytes = C * sizeof(T);
        bytes <= 2048 ? f(P, Int<1>()) : bytes <= 8192 ? f(P, Int<4>()) : f(P, Int<16>());
    };
    vector ? pick(Int<VECTOR<T>>()) : pick(Int<1>());
}

template <int WARPS> constexpr unsigned row_block() { return WARPS < 4 ? 128 : WARPS * 32; }
template <int WARPS> dim3 row_grid(size_t N) {
    return dim3(unsigned(ceil_div(N, row_block<WARPS>() / (WARPS * 32))));
}

template <int WARPS> struct RowOfBlock {
    static constexpr unsigned threads = WARPS * 32; // that share the row
    unsigned thread = threadIdx.x % threads;
    size_t n = size_t(blockIdx.x) * (row_block<WARPS>() / threads) + threadIdx.x / threads;
    // over the row, for every thread of it; all of them must call it
    __device__ float sum(float x) const {
        if constexpr (WARPS == 1)
            return warp_sum(x);
        else
            return block_sum<WARPS>(x);
    }
};

// Sums over rows, K of them at once: blocks sum parts of the rows into scratch, and the parts are
// added in order. The number of parts depends on N alone, and so do the bits.
constexpr int COLUMN_WARPS = 8; // of a block
inline size_t column_parts(size_t N) { return N < 128 * 32 ? ceil_div(N, size_t(32)) : 128; }

// Block (column block, part), partial (parts, K, C): a lane owns P columns, the sums of the block's
// warps meet in shared memory in order. term.add(sum, n, c) adds row n's columns c to c + P.
template <int K, int P, typename Term>
__global__ void sum_columns_kernel(float* partial, Term term, size_t N, size_t C, size_t rows) {
    SHARED(float, sums, COLUMN_WARPS* K * 32 * P); // (warp, K, P, 32)
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    size_t c = (size_t(blockIdx.x) * 32 + lane) * P, from = blockIdx.y * rows;
    size_t to = from + rows < N ? from + rows : N;
    float sum[K][P] = {};
    if (c < C)
        for (size_t n = from + warp; n < to; n += COLUMN_WARPS) term.add(sum, n, c);
    float* mine = sums + warp * K * 32 * P;
    for (int k = 0; k < K; k++)
        for (int i = 0; i < P; i++) mine[(k * P + i) * 32 + lane] = sum[k][i];
    __syncthreads(); // the sums of all warps are there
    for (int j = threadIdx.x; j < K * 32 * P; j += COLUMN_WARPS * 32) {
        float total = 0;
        for (int w = 0; w < COLUMN_WARPS; w++) total += sums[w * K * 32 * P + j];
        size_t column = (size_t(blockIdx.x) * 32 + j % 32) * P + j / 32 % P;
        if (column < C) partial[(blockIdx.y * K + j / (32 * P)) * C + column] = total;
    }
}

template <typename A>
__global__ void add_parts_kernel(A* out, const A* partial, size_t parts, size_t stride, size_t C,
                                 bool accumulate) {
    size_t c = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (c >= C) return;
    A sum = 0;
    for (size_t part = 0; part < parts; part++) sum += partial[part * stride + c];
    out[c] = accumulate ? out[c] + sum : sum;
}

inline size_t sum_columns_scratch_bytes(size_t N, size_t C, int K) {
    return column_parts(N) * K * C * sizeof(float);
}

// out[k] (C) = or += the k-th sum; null: not wanted
template <typename T, int K, typename Term>
void sum_columns(float* const (&out)[K], Term term, void* scratch, size_t N, size_t C,
                 bool accumulate, bool vector, cudaStream_t stream) {
    float* partial = static_cast<float*>(scratch);
    size_t parts = column_parts(N), rows = ceil_div(N, parts);
    auto sum = [&](auto P) {
        dim3 grid(unsigned(ceil_div(C, size_t(32 * P))), unsigned(parts));
        launch(sum_columns_kernel<K, P, Term>, grid, COLUMN_WARPS * 32, 0, stream, partial, term, N,
               C, rows);
    };
    vector ? sum(Int<VECTOR<T>>()) : sum(Int<1>());
    for (int k = 0; k < K; k++)
        if (out[k])
            launch(add_parts_kernel<float>, unsigned(ceil_div(C, size_t(256))), 256, 0, stream,
                   out[k], partial + k * C, parts, K * C, C, accumulate);
}
#endif
