// emulator_runtime.h - the part of CUDA's runtime library that the trainer and the tests use
//   Device memory is heap memory of the exact size. Kernels happen when they are issued, copies from
//   the host as late as they may (emulator::catch_up), so streams and events are always in order.
//   emulator::blocking counts the calls in which a host waits for a device: synchronization,
//   allocation, copies from or to memory that is not pinned.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

enum cudaError_t { cudaSuccess, cudaErrorMemoryAllocation, cudaErrorNotReady };
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
struct cudaUUID_t {
    char bytes[16];
};
struct cudaDeviceProp {
    char name[32];
    cudaUUID_t uuid;
};
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
// Each kind of GPU has a number of its own, so that facts of one are not taken for another's.
inline cudaError_t cudaGetDevice(int* device) {
    return *device = 10 * emulator::gpu.major + emulator::gpu.minor, cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
    return strcpy(p->name, "the emulator"), cudaSuccess;
}

namespace emulator {
inline std::atomic<long> questions = 0; // to a device or a kernel
}
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <typename F> cudaError_t cudaFuncSetAttribute(F*, cudaFuncAttribute, int) {
    return emulator::questions++, cudaSuccess;
}

enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor };
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int) {
    const emulator::Gpu& gpu = emulator::gpu;
    emulator::questions++;
    return *value = what == cudaDevAttrComputeCapabilityMajor ? gpu.major : gpu.minor, cudaSuccess;
}

namespace emulator {
inline std::atomic<long> blocking = 0;
inline std::mutex pinned_lock;
inline std::map<const char*, size_t> pinned; // start, bytes

inline bool is_pinned(const void* p) {
    std::lock_guard<std::mutex> lock(pinned_lock);
    const char* at = static_cast<const char*>(p);
    auto next = pinned.upper_bound(at);
    return next != pinned.begin() && at < std::prev(next)->first + std::prev(next)->second;
}
} // namespace emulator

template <typename T> cudaError_t cudaMalloc(T** p, size_t bytes) {
    emulator::blocking++;
    *p = static_cast<T*>(
        malloc(bytes ? bytes : 1)); // the exact size: AddressSanitizer sees each byte
    if (!*p) return cudaErrorMemoryAllocation;
    memset(static_cast<void*>(*p), 0xff, bytes); // NaN: nobody has written it
    return cudaSuccess;
}
template <typename T> cudaError_t cudaMallocHost(T** p, size_t bytes) {
    cudaError_t e = cudaMalloc(p, bytes);
    std::lock_guard<std::mutex> lock(emulator::pinned_lock);
    emulator::pinned[reinterpret_cast<char*>(*p)] = bytes;
    return e;
}
inline cudaError_t cudaFree(void* p) {
    emulator::catch_up();
    emulator::blocking++;
    return free(p), cudaSuccess;
}
inline cudaError_t cudaFreeHost(void* p) {
    std::lock_guard<std::mutex> lock(emulator::pinned_lock);
    emulator::pinned.erase(static_cast<char*>(p));
    return cudaFree(p);
}

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t) {
    if (!bytes) return cudaSuccess;
    if (kind == cudaMemcpyHostToDevice) emulator::blocking += !emulator::is_pinned(from);
    if (kind == cudaMemcpyDeviceToHost) emulator::blocking += !emulator::is_pinned(to);
    emulator::given.push_back([=] { memcpy(to, from, bytes); });
    if (kind != cudaMemcpyHostToDevice) emulator::catch_up();
    return cudaSuccess;
}
inline cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                     size_t width, size_t height, cudaMemcpyKind, cudaStream_t) {
    emulator::catch_up();
    for (size_t r = 0; r < height; r++)
        memcpy(static_cast<char*>(to) + r * to_pitch,
               static_cast<const char*>(from) + r * from_pitch, width);
    return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
    emulator::note_launch(&cudaMemsetAsync);
    return emulator::catch_up(), memset(p, value, bytes), cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) {
    static std::atomic<uintptr_t> made = 0; // a name: nobody looks behind it
    return *s = reinterpret_cast<cudaStream_t>(++made), cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
    emulator::blocking++;
    return emulator::catch_up(), cudaSuccess;
}
// So many queries of this thread are to say that its stream still has work: a peer does not come.
namespace emulator {
inline thread_local long busy_queries = 0;
}
inline cudaError_t cudaStreamQuery(cudaStream_t) {
    emulator::catch_up();
    return emulator::busy_queries-- > 0 ? cudaErrorNotReady : cudaSuccess;
}

// The pool of cudaMallocAsync, and the bytes that it keeps for its next caller.
typedef struct Pool* cudaMemPool_t;
enum cudaMemPoolAttr { cudaMemPoolAttrReleaseThreshold };
namespace emulator {
inline uint64_t pool_keeps = 0;
}
inline cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
    return *pool = nullptr, cudaSuccess;
}
inline cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
    return emulator::pool_keeps = *static_cast<uint64_t*>(value), cudaSuccess;
}
template <typename T> cudaError_t cudaMallocAsync(T** p, size_t bytes, cudaStream_t) {
    emulator::blocking--; // the host goes on
    return cudaMalloc(p, bytes);
}
inline cudaError_t cudaFreeAsync(void* p, cudaStream_t) {
    emulator::blocking--;
    return cudaFree(p);
}

// An event passes when it is recorded: all before it has happened.
typedef struct Event {
    std::chrono::steady_clock::time_point passed;
}* cudaEvent_t;
constexpr unsigned cudaEventDisableTiming = 2;
inline cudaError_t cudaEventCreate(cudaEvent_t* e) { return *e = new Event, cudaSuccess; }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return cudaEventCreate(e); }
inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t) {
    return e->passed = std::chrono::steady_clock::now(), cudaSuccess;
}
inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
    std::chrono::duration<float, std::milli> time = to->passed - from->passed;
    return *ms = time.count(), cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t e) { return delete e, cudaSuccess; }
