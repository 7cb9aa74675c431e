// tensor_cores.h - what tensor-core kernels share: types, addresses, packing, large shared memory
//   The 16-bit types are bf16 and fp16 exactly, by name: another type of the same size is refused.
//   Each wrapper has an executable model: test/harness/emulator_warp.h.
//   To copy: this file, types.h and cuda_common.h.
#pragma once
#include <algorithm>
#include <map>
#include <type_traits>
#include "cuda_common.h"

#if defined(EMULATE)
#include "../../test/harness/emulator_warp.h"
#elif defined(__CUDACC__)
#define LLMC_DEV __device__ __forceinline__
#endif

namespace llmc {

// Whether tensor cores take the type here. The test is by name: __nv_bfloat16 is as wide as fp16.
template <typename T>
constexpr bool IS_BF16_OR_FP16 = std::is_same_v<T, bf16> || std::is_same_v<T, fp16>;
#define LLMC_TENSOR_CORE_TYPE(T)                  \
    static_assert(IS_BF16_OR_FP16<T>,             \
                  "tensor cores take llmc::bf16 and llmc::fp16; as_native() turns pointers to " \
                  "__nv_bfloat16 and __half into those")

#if defined(__CUDACC__)
// The address of shared memory within its own space, as instructions need it.
LLMC_DEV uint32_t smem_u32(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// 2^x. ex2(-inf) is 0, which masks rely on. Relative error about 2^-22; denormal results become 0.
LLMC_DEV float ex2(float x) { // 2^x
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// tanh(x), with a relative error of at most 2^-11.
LLMC_DEV float tanh_approx(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Two numbers as T in one register, `low` in its lower half.
template <typename T>
LLMC_DEV uint32_t pack(float low, float high) {
    LLMC_TENSOR_CORE_TYPE(T);
    uint32_t r;
    if constexpr (std::is_same_v<T, bf16>)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
#endif

#if LLMC_KERNELS

// The bytes that launch_shared() was asked for, 1024-byte aligned; the emulator has its own.
#if defined(__CUDACC__)
extern __shared__ __align__(1024) unsigned char dynamic_shared_bytes[];
__device__ inline unsigned char* dynamic_shared() { return dynamic_shared_bytes; }
#else
using emulator::dynamic_shared;
#endif

// Start a kernel with so many bytes. A kernel must be allowed to use more than 48 KB: each thread
// asks only when a size is larger than any before, so that a launch costs the host one call.
template <typename... Params, typename... Args>
void launch_shared(void (*kernel)(Params...), dim3 grid, dim3 block, size_t bytes,
                   cudaStream_t stream, Args... args) {
    if (bytes > size_t(48) << 10) {
        static thread_local std::map<std::pair<int, const void*>, size_t> granted; // [GPU, kernel]
        int gpu = 0;
        LLMC_CUDA_CHECK(cudaGetDevice(&gpu));
        size_t& most = granted[{gpu, reinterpret_cast<const void*>(kernel)}];
        if (bytes > most)
            LLMC_CUDA_CHECK(cudaFuncSetAttribute(
                kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)));
        most = std::max(most, bytes);
    }
    launch_bytes(kernel, grid, block, bytes, stream, args...);
}
#endif

} // namespace llmc
