// gpu.h - the current GPU: its architecture, processors and name, and whether kernels can run
//   To copy: this file, types.h and cuda_common.h.
#pragma once
#include <map>
#include <string>
#include "cuda_common.h"

#if LLMC_KERNELS
namespace llmc {

// The number of the GPU that this thread's calls go to.
inline int current_gpu() {
    int gpu = 0;
    LLMC_CUDA_CHECK(cudaGetDevice(&gpu));
    return gpu;
}

// The architecture of the current GPU: 80 for sm_80. Launchers choose kernels by it, so each thread
// remembers the answer.
inline int gpu_architecture() {
    static thread_local std::map<int, int> known; // [GPU]
    int gpu = current_gpu();
    int& architecture = known[gpu];
    if (architecture) return architecture;
    int major = 0, minor = 0;
    LLMC_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu));
    LLMC_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, gpu));
    return architecture = 10 * major + minor;
}

// The number of processors (SMs) of the current GPU.
inline unsigned gpu_processors() {
    static thread_local std::map<int, int> known; // [GPU]
    int gpu = current_gpu();
    int& processors = known[gpu];
    if (!processors)
        LLMC_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, gpu));
    return unsigned(processors);
}

// Whether the GPU has Hopper's own instructions (sm_90a). No earlier and no later GPU has them.
inline bool is_hopper(cudaStream_t) { return gpu_architecture() == 90; }

// The name of the current GPU.
inline std::string device_name(cudaStream_t) {
    cudaDeviceProp properties;
    LLMC_CUDA_CHECK(cudaGetDeviceProperties(&properties, current_gpu()));
    return properties.name;
}

// Why kernels cannot run here, or "": there is no GPU, or the current one is too old for them.
inline std::string no_gpu_because() {
    int gpus = 0;
    cudaError_t answer = cudaGetDeviceCount(&gpus);
    if (answer != cudaSuccess)
        return std::string("no GPU answers (") + cudaGetErrorString(answer) + ")";
    if (gpus == 0) return "no GPU answers (there is none)";
    int architecture = gpu_architecture();
    if (architecture >= 80) return "";
    return device_name(cudaStream_t{}) + " is sm_" + std::to_string(architecture) +
           ": the kernels need sm_80 (Ampere) or later";
}

} // namespace llmc
#endif
