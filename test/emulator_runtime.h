// emulator_runtime.h - the part of CUDA's runtime library that the trainer and the tests use
//   Device memory is heap memory of the exact size; copies and kernels of a stream happen when they
//   are issued, so streams and events are always in order.
#pragma once
#include <cstdlib>
#include <cstring>

enum cudaError_t { cudaSuccess, cudaErrorMemoryAllocation };
enum cudaMemcpyKind {
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
constexpr unsigned cudaStreamNonBlocking = 1;

inline const char* cudaGetErrorString(cudaError_t e) {
    return e == cudaSuccess ? "no error" : "out of memory";
}
inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
struct cudaDeviceProp {
    char name[32];
};
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
    return strcpy(p->name, "the emulator"), cudaSuccess;
}

enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor };
// An Ampere, so that launchers choose what needs no more; Hopper's kernels are launched by their tests.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int) {
    return *value = what == cudaDevAttrComputeCapabilityMajor ? 8 : 0, cudaSuccess;
}

template <typename T> cudaError_t cudaMalloc(T** p, size_t bytes) {
    *p = static_cast<T*>(
        malloc(bytes ? bytes : 1)); // the exact size: AddressSanitizer sees each byte
    if (!*p) return cudaErrorMemoryAllocation;
    memset(static_cast<void*>(*p), 0xff, bytes); // NaN: nobody has written it
    return cudaSuccess;
}
template <typename T> cudaError_t cudaMallocHost(T** p, size_t bytes) {
    return cudaMalloc(p, bytes);
}
inline cudaError_t cudaFree(void* p) { return free(p), cudaSuccess; }
inline cudaError_t cudaFreeHost(void* p) { return free(p), cudaSuccess; }

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t) {
    if (bytes) memcpy(to, from, bytes);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                     size_t width, size_t height, cudaMemcpyKind, cudaStream_t) {
    for (size_t r = 0; r < height; r++)
        memcpy(static_cast<char*>(to) + r * to_pitch,
               static_cast<const char*>(from) + r * from_pitch, width);
    return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
    return memset(p, value, bytes), cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) {
    return *s = nullptr, cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
typedef struct Event* cudaEvent_t;
constexpr unsigned cudaEventDisableTiming = 2;
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
    return *e = nullptr, cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
