// emulator_runtime.h - the part of CUDA's runtime library that the trainer and the tests use
//   Device memory is heap memory of the exact size. Kernels, copies and events wait in their
//   streams until the host asks for them (emulator_streams.h).
//   emulator::blocking counts the calls in which the host waits for the device: synchronization of
//   streams, allocation, and copies from or to memory that is not pinned. It does not count events.
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

// Addresses without memory behind them, for a dry run. They are never freed.
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
    if (e != cudaSuccess) return e;

    std::lock_guard<std::mutex> lock(emulator::pinned_lock);
    emulator::pinned[reinterpret_cast<char*>(*p)] = bytes;
    return e;
}
inline cudaError_t cudaFree(void* p) {
    if (emulator::not_captured("cudaFree")) return cudaErrorStreamCaptureUnsupported;
    emulator::run_own_streams();
    emulator::blocking++;
    if (!emulator::dry) free(p);
    return cudaSuccess;
}
inline cudaError_t cudaFreeHost(void* p) {
    {
        std::lock_guard<std::mutex> lock(emulator::pinned_lock);
        emulator::pinned.erase(static_cast<char*>(p));
    }
    // Without the lock, because it runs what was issued.
    bool dry = std::exchange(emulator::dry, false);
    cudaError_t e = cudaFree(p);
    return emulator::dry = dry, e;
}

namespace emulator {
// Fill the place of a copy to the host with NaN, unless a copy from the host is yet to read it.
inline void poison(void* to, size_t bytes) {
    StreamsLock lock(streams_mutex);
    const char* at = static_cast<const char*>(to);
    auto reads = [=](const Piece& p) { return p.from < at + bytes && at < p.from + p.bytes; };
    bool read = std::any_of(late_copies.begin(), late_copies.end(), reads);
    for (EmulatedStream* s : streams)
        read |= std::any_of(s->pieces.begin(), s->pieces.end(), reads);
    if (!read) memset(to, 0xff, bytes);
}
} // namespace emulator

// A copy whose host side is not pinned blocks the host; to the host, until it is over.
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream) {
    if (!bytes) return cudaSuccess;
    bool in = kind == cudaMemcpyHostToDevice, out = kind == cudaMemcpyDeviceToHost;
    bool blocks = (in && !emulator::is_pinned(from)) || (out && !emulator::is_pinned(to));
    emulator::blocking += blocks;
    if (out && !emulator::capture) emulator::poison(to, bytes);

    // Queue it, and say what it reads.
    const void* name = reinterpret_cast<const void*>(&cudaMemcpyAsync);
    emulator::note(name, to, from, bytes, int(kind));
    emulator::Piece copy;
    copy.run = [=] { return memcpy(to, from, bytes), true; };
    if (in) copy.from = static_cast<const char*>(from), copy.bytes = bytes;
    emulator::push(stream, std::move(copy));
    if (blocks && out && stream && !emulator::capture) emulator::run_stream(*stream);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                     size_t width, size_t height, cudaMemcpyKind,
                                     cudaStream_t stream) {
    // A GPU's own limit, cudaDevAttrMaxPitch.
    if (std::max(to_pitch, from_pitch) > INT_MAX) return cudaErrorInvalidPitchValue;
    auto copy = [=] {
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
    auto set = [=] { memset(p, value, bytes); };
    const void* name = reinterpret_cast<const void*>(&cudaMemsetAsync);
    return emulator::give(name, stream, set, p, value, bytes), cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) {
    emulator::StreamsLock lock(emulator::streams_mutex);
    emulator::streams.push_back(*s = new EmulatedStream);
    return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t s) {
    emulator::run_stream(*s);
    emulator::StreamsLock lock(emulator::streams_mutex);
    std::erase(emulator::streams, s);
    return delete s, cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    if (emulator::not_captured("cudaStreamSynchronize")) return cudaErrorStreamCaptureUnsupported;
    emulator::blocking++;
    s ? emulator::run_stream(*s) : emulator::run_late_copies();
    return cudaSuccess;
}
// How many of this thread's next stream queries report unfinished work, as if a peer never came.
namespace emulator {
inline thread_local long busy_queries = 0;
}
inline cudaError_t cudaStreamQuery(cudaStream_t s) {
    if (emulator::not_captured("cudaStreamQuery")) return cudaErrorStreamCaptureUnsupported;
    if (!s) emulator::run_late_copies();
    bool busy = emulator::busy_queries-- > 0 || (s && !emulator::is_over(*s));
    return busy ? cudaErrorNotReady : cudaSuccess;
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
inline cudaError_t cudaFreeAsync(void* p, cudaStream_t stream) {
    if (emulator::capture) return cudaSuccess;
    emulator::Piece piece;
    piece.run = [=] { return free(p), true; };
    return emulator::push(stream, std::move(piece)), cudaSuccess;
}

// An event is the mark of its last record. Its work, and waits for it, need the event no more.
typedef struct Event {
    emulator::MarkPointer mark = nullptr; // null: never recorded
    emulator::Graph* capture = nullptr;
    size_t place = 0; // in a capture: the pieces of its stream up to it
}* cudaEvent_t;
constexpr unsigned cudaEventDisableTiming = 2;
inline cudaError_t cudaEventCreate(cudaEvent_t* e) { return *e = new Event, cudaSuccess; }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return cudaEventCreate(e); }
inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t stream) {
    bool captured = emulator::is_captured(stream);
    *e = {emulator::push_mark(stream), captured ? emulator::capture : nullptr,
          captured ? emulator::capture->of[stream].size() : 0};
    return cudaSuccess;
}
inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
    emulator::StreamsLock lock(emulator::streams_mutex);
    if (!from->mark->passed || !to->mark->passed) return cudaErrorNotReady;
    std::chrono::duration<float, std::milli> time = to->mark->time - from->mark->time;
    return *ms = time.count(), cudaSuccess;
}
// A stream that waits for a captured stream's event joins the capture.
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t e, unsigned) {
    emulator::Graph* graph = emulator::capture;
    if (e->capture != graph && emulator::not_captured("a wait for an event from before"))
        return cudaErrorStreamCaptureUnsupported;
    if (!e->mark) return cudaSuccess;
    if (graph) graph->of[stream];
    if (graph && stream == graph->first) graph->joined[e->mark->stream] = e->place;
    return emulator::push_wait(stream, e->mark), cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    if (e->mark && e->mark->stream) emulator::run_stream(*e->mark->stream, e->mark.get());
    return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t e) { return delete e, cudaSuccess; }

// ----------------------------------------------------------------------------
// graphs: the work given to a stream between begin and end of a capture, repeated by each launch

typedef emulator::Graph* cudaGraph_t;
typedef emulator::Graph* cudaGraphExec_t;
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal };
inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (!stream || emulator::not_captured("a second capture"))
        return cudaErrorStreamCaptureUnsupported;
    emulator::capture = new emulator::Graph;
    emulator::capture->first = stream;
    return emulator::capture->of[stream], cudaSuccess;
}
// Ends the capture. Each other captured stream must have been joined behind its last work.
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    *graph = emulator::capture;
    emulator::capture = nullptr;
    auto runs = [](const emulator::Piece& p) { return bool(p.run); };
    for (auto& [other, pieces] : (*graph)->of)
        if (other != stream && std::any_of(pieces.begin() + ptrdiff_t((*graph)->joined[other]),
                                           pieces.end(), runs))
            return cudaErrorStreamCaptureUnjoined;
    return cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph,
                                        unsigned long long) {
    return *exec = graph, cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; } // cudaGraphExec_t owns it
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    emulator::note_launch(&cudaGraphLaunch);
    emulator::Piece piece;
    piece.run = [launch = emulator::make_replay(*graph)] { return emulator::run_replay(*launch); };
    return emulator::push(stream, std::move(piece)), cudaSuccess;
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    emulator::run_own_streams();
    for (void* p : graph->kept) free(p);
    return delete graph, cudaSuccess;
}
