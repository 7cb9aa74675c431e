// cuda_common.h - what kernels share: vectors, reductions, launching
//   Built three ways: nvcc (GPU); g++ -DEMULATE (the kernels' own source runs on the CPU, for
//   tests); g++ (no kernels: LLMC_KERNELS is 0).
//   Contract: a warp adds in the order of a butterfly, so sums are bitwise repeatable.
//   To copy: this file and types.h.
#pragma once
#include "types.h"

#if defined(__CUDACC__)
#define LLMC_KERNELS 1
#elif defined(EMULATE)
#include "../../test/harness/emulator.h"
#define LLMC_KERNELS 1
#else
#define LLMC_KERNELS 0
#endif

#if LLMC_KERNELS
namespace llmc {

// ----------------------------------------------------------------------------
// vectors

// N elements of T, for one load or store of 16 bytes or one element; a larger Pack takes several.
template <typename T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack { T v[N]; };
template <int N, typename T>
__device__ inline Pack<T, N> load(const T* p) {
    return *reinterpret_cast<const Pack<T, N>*>(p);
}
template <typename T, int N>
__device__ inline void store(T* p, Pack<T, N> x) {
    *reinterpret_cast<Pack<T, N>*>(p) = x;
}

// The number of elements in 16 bytes.
template <typename T> constexpr int VECTOR = 16 / sizeof(T);

// Whether rows of `row` elements at these addresses (null: absent) can be read 16 bytes at a time.
template <typename T, typename... Ps>
bool can_vectorize(size_t row, const Ps*... ps) {
    return row % VECTOR<T> == 0 && ((uintptr_t(ps) % 16 == 0) && ...);
}

// ----------------------------------------------------------------------------
// reductions

constexpr unsigned ALL_LANES = 0xffffffffu;

// The sum over a warp, in the order of a butterfly: every lane and every run gets the same bits.
template <typename A>
__device__ inline A warp_sum(A x) { // float or double
    for (int mask = 16; mask > 0; mask /= 2)
        x += __shfl_xor_sync(ALL_LANES, x, mask);
    return x;
}

// The largest value among lanes whose numbers differ in bits `last` to `first`, for each of them.
template <typename A>
__device__ inline A warp_max(A x, int first = 16, int last = 1) { // float or uint32_t
    for (int mask = first; mask >= last; mask /= 2) {
        A y = __shfl_xor_sync(ALL_LANES, x, mask);
        x = y > x ? y : x;
    }
    return x;
}

// Declare shared memory by LLMC_SHARED only, so that the emulator can own and poison it:
// LLMC_SHARED(float, sums, 8 * 32) declares float* or float[256].
#if defined(__CUDACC__)
#define LLMC_SHARED(type, name, count) __shared__ __align__(128) type name[count]
#endif

// Sum K numbers over a block of WARPS warps, for every thread. All threads must call it.
template <int WARPS, int K, typename A>
__device__ void block_sums(A (&x)[K]) {
    LLMC_SHARED(A, sums, K * WARPS);

    // Sum within each warp.
    for (int k = 0; k < K; k++) {
        x[k] = warp_sum(x[k]);
        if (threadIdx.x % 32 == 0)
            sums[k * WARPS + threadIdx.x / 32] = x[k];
    }
    __syncthreads(); // all warps have written

    // Add the warps in order.
    for (int k = 0; k < K; k++) {
        x[k] = 0;
        for (int w = 0; w < WARPS; w++)
            x[k] += sums[k * WARPS + w];
    }
    __syncthreads(); // all threads have read: the next call may write
}

// ----------------------------------------------------------------------------
// launching

#define LLMC_CUDA_CHECK(call)                                           \
    do {                                                                \
        cudaError_t cuda_error_ = (call);                               \
        LLMC_CHECK(cuda_error_ == cudaSuccess, "CUDA says: %s",         \
                   cudaGetErrorString(cuda_error_));                    \
    } while (0)

// Start a kernel with bytes of shared memory, or without. Every launch in every build goes through
// here, so none forgets the stream or the error check.
template <typename... Params, typename... Args>
void launch_bytes(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
                  cudaStream_t stream, Args... args) {
#if defined(__CUDACC__)
    kernel<<<grid, block, shared_bytes, stream>>>(Params(args)...);
#else
    emulator::launch(kernel, grid, block, shared_bytes, stream, Params(args)...);
#endif
    LLMC_CUDA_CHECK(cudaGetLastError());
}
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, cudaStream_t stream, Args... args) {
    launch_bytes(kernel, grid, block, 0, stream, args...);
}

// A compile-time constant that a generic lambda can take as an argument.
template <int N> struct Int {
    LLMC_HD constexpr operator int() const { return N; }
};

} // namespace llmc
#endif
