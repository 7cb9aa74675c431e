// memory.h - memory and streams where things run, as the host reaches them
//   Each function has two overloads, for Cpu{} and for a cudaStream_t: one text of the step serves
//   both of them.
//   To copy: this file, gpu.h, types.h and cuda_common.h.
#pragma once
#include <sys/mman.h>
#include <vector>
#include "cuda_common.h"
#include "gpu.h"
#include "types.h"

namespace llmc {

// ----------------------------------------------------------------------------
// CPU

// Copy bytes from the host. The host must not touch `from` before wait_for() returns.
inline void copy_in(void* to, const void* from, size_t bytes, Cpu) {
    if (to != from) memcpy(to, from, bytes);
}

// Copy bytes to the host. copy_out() fills `to` before it returns, copy_out_later() before
// wait_for() returns. A device copies while the host continues only if `to` is staging memory.
inline void copy_out_later(void* to, const void* from, size_t bytes, Cpu) {
    if (to != from) memcpy(to, from, bytes);
}
inline void copy_out(void* to, const void* from, size_t bytes, Cpu) { memcpy(to, from, bytes); }

// Copy the rows of a matrix. Strides are in bytes. CUDA refuses strides of 2 GiB or more, but for
// one row and for rows that lie side by side.
inline void copy_rows(void* to, size_t to_stride, const void* from, size_t from_stride,
                      size_t row_bytes, size_t rows, Cpu) {
    char* out = static_cast<char*>(to);
    const char* in = static_cast<const char*>(from);
    for (size_t r = 0; r < rows; r++)
        memcpy(out + r * to_stride, in + r * from_stride, row_bytes);
}

// Wait for all that the stream was given. On the CPU every call has done its work when it returns.
inline void wait_for(Cpu) {}

// Open another stream beside this one.
inline Cpu open_stream(Cpu where) { return where; }
inline void close_stream(Cpu) {}

// The device to which a thread's calls go. A new thread takes another's with use_device().
inline int current_device(Cpu) { return 0; }
inline void use_device(int, Cpu) {}

// A point after all work that a stream has been given so far. Another stream may wait for it once.
inline int record_point(Cpu) { return 0; }
inline void wait_point(int, Cpu) {}
inline void wait_here(int) {} // the host waits

// Host memory in which data are prepared for copy_in() and found after copy_out_later(): pinned
// memory beside a device, the data's own place on the CPU. host_side() chooses between the two.
inline void* staging_memory(size_t, Cpu) { return nullptr; }
inline void staging_free(void*, Cpu) {}
template <typename T>
T* host_side(T* home, T*, Cpu) { return home; }

// Zero-filled memory where kernels run, or null if there is not enough. On the CPU a page takes
// room only when it is first touched.
inline void* device_memory(size_t bytes, Cpu) {
    // mmap refuses a length of 0.
    void* p = mmap(nullptr, bytes ? bytes : 1, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return nullptr;
    // Ask for huge pages. A refusal does no harm.
    madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}
inline void device_free(void* p, size_t bytes, Cpu) { munmap(p, bytes ? bytes : 1); }
inline void device_zero(void* p, size_t bytes, Cpu) { memset(p, 0, bytes); }

// Zero-filled host memory for offloaded data, pinned beside a device; null if there is too little.
inline void* host_memory(size_t bytes, Cpu where) { return device_memory(bytes, where); }
inline void host_free(void* p, size_t bytes, Cpu where) { device_free(p, bytes, where); }

// to[i] = value(i), computed by the host.
template <typename T, typename F>
void fill_memory(T* to, size_t n, F value, Cpu) {
    #pragma omp parallel for
    for (size_t i = 0; i < n; i++)
        to[i] = value(i);
}

// ----------------------------------------------------------------------------
// GPU

#if LLMC_KERNELS

// A copy from pinned memory returns at once. From other memory the host may have to wait.
inline void copy_in(void* to, const void* from, size_t bytes, cudaStream_t stream) {
    LLMC_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream));
}
inline void device_zero(void* p, size_t bytes, cudaStream_t stream) {
    LLMC_CUDA_CHECK(cudaMemsetAsync(p, 0, bytes, stream));
}
inline void wait_for(cudaStream_t stream) { LLMC_CUDA_CHECK(cudaStreamSynchronize(stream)); }

// A non-blocking stream does not wait for the default stream.
inline cudaStream_t open_stream(cudaStream_t) {
    cudaStream_t stream = nullptr;
    LLMC_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}
inline int current_device(cudaStream_t) { return current_gpu(); }
inline void use_device(int gpu, cudaStream_t) { LLMC_CUDA_CHECK(cudaSetDevice(gpu)); }
inline void close_stream(cudaStream_t stream) { LLMC_CUDA_CHECK(cudaStreamDestroy(stream)); }

// An event without timing is the cheaper kind.
inline cudaEvent_t record_point(cudaStream_t stream) {
    cudaEvent_t point = nullptr;
    LLMC_CUDA_CHECK(cudaEventCreateWithFlags(&point, cudaEventDisableTiming));
    LLMC_CUDA_CHECK(cudaEventRecord(point, stream));
    return point;
}
inline void wait_point(cudaEvent_t point, cudaStream_t stream) {
    LLMC_CUDA_CHECK(cudaStreamWaitEvent(stream, point, 0));
    LLMC_CUDA_CHECK(cudaEventDestroy(point)); // CUDA frees it when the stream has reached it
}
inline void wait_here(cudaEvent_t point) {
    LLMC_CUDA_CHECK(cudaEventSynchronize(point));
    LLMC_CUDA_CHECK(cudaEventDestroy(point));
}
inline void copy_out_later(void* to, const void* from, size_t bytes, cudaStream_t stream) {
    LLMC_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream));
}
inline void copy_out(void* to, const void* from, size_t bytes, cudaStream_t stream) {
    copy_out_later(to, from, bytes, stream);
    wait_for(stream);
}
inline void copy_rows(void* to, size_t to_stride, const void* from, size_t from_stride,
                      size_t row_bytes, size_t rows, cudaStream_t stream) {
    bool dense = rows == 1 || (to_stride == row_bytes && from_stride == row_bytes);
    constexpr cudaMemcpyKind KIND = cudaMemcpyDeviceToDevice;
    LLMC_CUDA_CHECK(dense ? cudaMemcpyAsync(to, from, row_bytes * rows, KIND, stream)
                          : cudaMemcpy2DAsync(to, to_stride, from, from_stride, row_bytes, rows,
                                              KIND, stream));
}

// Copies from pinned memory run beside compute.
inline void* staging_memory(size_t bytes, cudaStream_t) {
    void* p = nullptr;
    LLMC_CUDA_CHECK(cudaMallocHost(&p, bytes));
    return p;
}
inline void staging_free(void* p, cudaStream_t) { LLMC_CUDA_CHECK(cudaFreeHost(p)); }
template <typename T>
T* host_side(T*, T* staged, cudaStream_t) { return staged; }

// Too little room is no error here: the caller says what did not fit. CUDA would report it once
// more at the next launch, so forget it.
inline void* no_memory() {
    cudaGetLastError();
    return nullptr;
}
inline void* device_memory(size_t bytes, cudaStream_t stream) {
    void* p = nullptr;
    if (cudaMalloc(&p, bytes ? bytes : 1) != cudaSuccess)
        return no_memory();
    LLMC_CUDA_CHECK(cudaMemsetAsync(p, 0, bytes, stream));
    return p;
}
inline void device_free(void* p, size_t, cudaStream_t) { LLMC_CUDA_CHECK(cudaFree(p)); }
inline void* host_memory(size_t bytes, cudaStream_t) {
    void* p = nullptr;
    if (cudaMallocHost(&p, bytes) != cudaSuccess)
        return no_memory();
    return memset(p, 0, bytes);
}
inline void host_free(void* p, size_t, cudaStream_t stream) { staging_free(p, stream); }
template <typename T, typename F>
void fill_memory(T* to, size_t n, F value, cudaStream_t stream) {
    constexpr size_t PART = size_t(1) << 22; // elements that the host holds at a time
    std::vector<T> part(n < PART ? n : PART);
    for (size_t at = 0; at < n; at += PART) {
        size_t count = n - at < PART ? n - at : PART;
        auto value_of_part = [&](size_t i) { return value(at + i); };
        fill_memory(part.data(), count, value_of_part, Cpu{});
        copy_in(to + at, part.data(), count * sizeof(T), stream);
        wait_for(stream);
    }
}
#endif

// ----------------------------------------------------------------------------
// anywhere

// Fill memory with numbers from -0.02 to 0.02, for work that is timed: on zeros a GPU's clock is
// higher than on data. The host computes 2^20 of them, which are then copied over and over.
template <typename T, typename S>
void fill_noise(T* to, size_t n, S where) {
    size_t done = n < size_t(1) << 20 ? n : size_t(1) << 20;
    auto value = [](size_t i) {
        double uniform = double(i * 0x9e3779b97f4a7c15ull >> 11) * 0x1p-53;
        return from_acc<T>(acc_t<T>(0.04 * (uniform - 0.5)));
    };
    fill_memory(to, done, value, where);
    for (size_t count; done < n; done += count) {
        count = n - done < done ? n - done : done;
        size_t bytes = count * sizeof(T);
        copy_rows(to + done, bytes, to, bytes, bytes, 1, where);
    }
}

} // namespace llmc
