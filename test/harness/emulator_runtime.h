// emulator_runtime.h - the part of CUDA's runtime library that the trainer and the tests use
//   Device memory is heap memory of the exact size. A kernel runs when it is issued, and a copy
//   from the host as late as it may (emulator::catch_up): streams and events stay in order.
//   emulator::blocking counts the calls in which the host waits for the device: synchronization,
//   allocation, and copies from or to memory that is not pinned.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

enum cudaError_t {
    cudaSuccess,
    cudaErrorMemoryAllocation,
    cudaErrorInvalidPitchValue,
    cudaErrorNotReady,
    cudaErrorStreamCaptureUnsupported,
    cudaErrorStreamCaptureUnjoined
};
enum cudaMemcpyKind {
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
constexpr unsigned cudaStreamNonBlocking = 1;

inline const char* cudaGetErrorString(cudaError_t e) {
    return e == cudaSuccess                         ? "no error"
           : e == cudaErrorMemoryAllocation         ? "out of memory"
           : e == cudaErrorInvalidPitchValue        ? "invalid pitch argument"
           : e == cudaErrorStreamCaptureUnsupported ? "not permitted while a stream is captured"
           : e == cudaErrorStreamCaptureUnjoined    ? "captured streams that were not joined"
                                                    : "not ready";
}
inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }

// The error that a call of this thread has left. Reading it forgets it.
namespace emulator {
inline thread_local cudaError_t last_error = cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return std::exchange(emulator::last_error, cudaSuccess); }
struct cudaUUID_t {
    char bytes[16];
};
struct cudaDeviceProp {
    char name[32];
    cudaUUID_t uuid;
};
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
// Each kind of GPU has a device number of its own, so that facts cached about one kind are not
// used for another.
inline cudaError_t cudaGetDevice(int* device) {
    return *device = 10 * emulator::gpu.major + emulator::gpu.minor, cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
    return strcpy(p->name, "the emulator"), cudaSuccess;
}

namespace emulator {
inline std::atomic<long> questions = 0; // calls that ask a device or set a kernel's attribute
}
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <typename F> cudaError_t cudaFuncSetAttribute(F*, cudaFuncAttribute, int) {
    return emulator::questions++, cudaSuccess;
}

enum cudaDeviceAttr {
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrComputeCapabilityMinor,
    cudaDevAttrMultiProcessorCount
};
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int) {
    const emulator::Gpu& gpu = emulator::gpu;
    emulator::questions++;
    if (what == cudaDevAttrMultiProcessorCount) return *value = gpu.processors, cudaSuccess;
    return *value = what == cudaDevAttrComputeCapabilityMajor ? gpu.major : gpu.minor, cudaSuccess;
}

namespace emulator {
inline std::atomic<long> blocking = 0;
inline std::mutex pinned_lock;
inline std::map<const char*, size_t> pinned; // start, bytes

// Whether an address is in memory from cudaMallocHost.
inline bool is_pinned(const void* p) {
    std::lock_guard<std::mutex> lock(pinned_lock);
    const char* at = static_cast<const char*>(p);
    auto next = pinned.upper_bound(at);
    return next != pinned.begin() && at < std::prev(next)->first + std::prev(next)->second;
}
} // namespace emulator

// Addresses without memory behind them, for a dry run. They are never freed.
namespace emulator {
inline void* addresses(size_t bytes) {
    return mmap(nullptr, bytes ? bytes : 1, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                -1, 0);
}
} // namespace emulator

template <typename T> cudaError_t cudaMalloc(T** p, size_t bytes) {
    if (emulator::not_captured("cudaMalloc")) return cudaErrorStreamCaptureUnsupported;
    emulator::blocking++;

    // Allocate the exact size, so that AddressSanitizer checks every byte.
    constexpr size_t MOST = size_t(1) << 40; // more than any GPU has
    if (emulator::dry) return *p = static_cast<T*>(emulator::addresses(bytes)), cudaSuccess;
    *p = bytes < MOST ? static_cast<T*>(malloc(bytes ? bytes : 1)) : nullptr;
    if (!*p) return emulator::last_error = cudaErrorMemoryAllocation;
    memset(static_cast<void*>(*p), 0xff, bytes); // NaN until somebody writes it
    return cudaSuccess;
}
template <typename T> cudaError_t cudaMallocHost(T** p, size_t bytes) {
    bool dry = std::exchange(emulator::dry, false); // the host's memory is memory
    cudaError_t e = cudaMalloc(p, bytes);
    emulator::dry = dry;
    std::lock_guard<std::mutex> lock(emulator::pinned_lock);
    emulator::pinned[reinterpret_cast<char*>(*p)] = bytes;
    return e;
}
inline cudaError_t cudaFree(void* p) {
    if (emulator::not_captured("cudaFree")) return cudaErrorStreamCaptureUnsupported;
    emulator::catch_up();
    emulator::blocking++;
    if (!emulator::dry) free(p);
    return cudaSuccess;
}
inline cudaError_t cudaFreeHost(void* p) {
    {
        std::lock_guard<std::mutex> lock(emulator::pinned_lock);
        emulator::pinned.erase(static_cast<char*>(p));
    }
    bool dry = std::exchange(emulator::dry, false);
    cudaError_t e = cudaFree(p);
    return emulator::dry = dry, e;
}

// A copy from the host waits in emulator::given. Every other copy runs those first, then itself. A
// copy whose host side is not pinned blocks the host.
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream) {
    if (!bytes) return cudaSuccess;

    // Count a copy that blocks the host.
    if (kind == cudaMemcpyHostToDevice) emulator::blocking += !emulator::is_pinned(from);
    if (kind == cudaMemcpyDeviceToHost) emulator::blocking += !emulator::is_pinned(to);

    // Run the copy, or put it into the graph that is being captured.
    auto copy = [=] {
        emulator::given.push_back([=] { memcpy(to, from, bytes); });
        if (kind != cudaMemcpyHostToDevice) emulator::catch_up();
    };
    const void* name = reinterpret_cast<const void*>(&cudaMemcpyAsync);
    return emulator::give(name, stream, copy, to, from, bytes, int(kind)), cudaSuccess;
}
inline cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                     size_t width, size_t height, cudaMemcpyKind,
                                     cudaStream_t stream) {
    // A GPU's own limit, cudaDevAttrMaxPitch.
    if (std::max(to_pitch, from_pitch) > INT_MAX) return cudaErrorInvalidPitchValue;
    auto copy = [=] {
        emulator::catch_up();
        for (size_t r = 0; r < height; r++)
            memcpy(static_cast<char*>(to) + r * to_pitch,
                   static_cast<const char*>(from) + r * from_pitch, width);
    };
    const void* name = reinterpret_cast<const void*>(&cudaMemcpy2DAsync);
    emulator::give(name, stream, copy, to, to_pitch, from, from_pitch, width, height);
    return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
    emulator::note_launch(&cudaMemsetAsync);
    auto set = [=] { emulator::catch_up(), memset(p, value, bytes); };
    const void* name = reinterpret_cast<const void*>(&cudaMemsetAsync);
    return emulator::give(name, stream, set, p, value, bytes), cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) {
    static std::atomic<uintptr_t> made = 0; // a stream is a number; nothing reads through it
    return *s = reinterpret_cast<cudaStream_t>(++made), cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
    if (emulator::not_captured("cudaStreamSynchronize")) return cudaErrorStreamCaptureUnsupported;
    emulator::blocking++;
    return emulator::catch_up(), cudaSuccess;
}
// How many of this thread's next stream queries report unfinished work, as if a peer never came.
namespace emulator {
inline thread_local long busy_queries = 0;
}
inline cudaError_t cudaStreamQuery(cudaStream_t) {
    if (emulator::not_captured("cudaStreamQuery")) return cudaErrorStreamCaptureUnsupported;
    emulator::catch_up();
    return emulator::busy_queries-- > 0 ? cudaErrorNotReady : cudaSuccess;
}

// The pool of cudaMallocAsync: pool_keeps is the number of free bytes that it keeps
// for later allocations.
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
// Memory that a graph allocates has the same address in each replay, and is freed with the graph.
template <typename T> cudaError_t cudaMallocAsync(T** p, size_t bytes, cudaStream_t) {
    if (emulator::Graph* graph = emulator::capture)
        return graph->kept.push_back(*p = static_cast<T*>(malloc(bytes))), cudaSuccess;
    emulator::blocking--; // undoes cudaMalloc's count: here the host does not wait
    return cudaMalloc(p, bytes);
}
inline cudaError_t cudaFreeAsync(void* p, cudaStream_t) {
    if (emulator::capture) return cudaSuccess;
    emulator::blocking--;
    return cudaFree(p);
}

// An event has passed as soon as it is recorded, because all work before it has happened. In a
// capture it is a position in its stream's work.
typedef struct Event {
    std::chrono::steady_clock::time_point passed;
    cudaStream_t stream = nullptr;
    emulator::Graph* capture = nullptr;
    size_t place = 0;
}* cudaEvent_t;
constexpr unsigned cudaEventDisableTiming = 2;
inline cudaError_t cudaEventCreate(cudaEvent_t* e) { return *e = new Event, cudaSuccess; }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return cudaEventCreate(e); }
inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t stream) {
    bool captured = emulator::capture && emulator::capture->of.count(stream);
    *e = {std::chrono::steady_clock::now(), stream, captured ? emulator::capture : nullptr,
          captured ? emulator::capture->of[stream] : 0};
    return cudaSuccess;
}
inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
    std::chrono::duration<float, std::milli> time = to->passed - from->passed;
    return *ms = time.count(), cudaSuccess;
}
// A stream that waits for a captured stream's event joins the capture.
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t e, unsigned) {
    emulator::Graph* graph = emulator::capture;
    if (e->capture != graph && emulator::not_captured("a wait for an event from before"))
        return cudaErrorStreamCaptureUnsupported;
    if (!graph) return cudaSuccess;
    graph->of[stream];
    if (stream == graph->first) graph->joined[e->stream] = e->place;
    return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t e) { return delete e, cudaSuccess; }

// ----------------------------------------------------------------------------
// graphs: the work given to a stream between begin and end of a capture, repeated by each launch

typedef emulator::Graph* cudaGraph_t;
typedef emulator::Graph* cudaGraphExec_t;
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal };
inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (!stream || emulator::not_captured("a second capture"))
        return cudaErrorStreamCaptureUnsupported;
    emulator::catch_up();
    emulator::capture = new emulator::Graph;
    emulator::capture->first = stream;
    return emulator::capture->of[stream], cudaSuccess;
}
// Ends the capture. Each other captured stream must have been joined at its last piece of work.
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    *graph = emulator::capture;
    emulator::capture = nullptr;
    for (auto& [other, work] : (*graph)->of)
        if (other != stream && (*graph)->joined[other] != work)
            return cudaErrorStreamCaptureUnjoined;
    return cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph,
                                        unsigned long long) {
    return *exec = graph, cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; } // cudaGraphExec_t owns it
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
    emulator::note_launch(&cudaGraphLaunch);
    for (const emulator::Given& given : graph->given) given.work();
    return cudaSuccess;
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    for (void* p : graph->kept) free(p);
    return delete graph, cudaSuccess;
}
