// tensor_cores.h - what kernels of all tensor cores share: their types, addresses, packing, exp2
//   The 16-bit types are bf16 and fp16 exactly, by name: another type of the same size is refused.
//   Each wrapper has an executable model: test/harness/emulator_warp.h.
//   To copy: this file, types.h and cuda_common.h.
#pragma once
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

} // namespace llmc
