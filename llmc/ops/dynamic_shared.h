// dynamic_shared.h - shared memory whose size a launch gives: more than the declared 48 KB
//   To copy: this file, types.h and cuda_common.h.
#pragma once
#include <algorithm>
#include <map>
#include "cuda_common.h"

#if LLMC_KERNELS
namespace llmc {

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
    launch(kernel, grid, block, bytes, stream, args...);
}

} // namespace llmc
#endif
