// cudart_stub.c - a CUDA runtime whose GPU, a Hopper, fails each launch; memory is the host's
//   Stands in for libcudart.so.13 beside programs linked with CUDART=shared. They start, allocate
//   and copy; their first launch fails as at an illegal address, and so does every call behind it.
//   It has the calls that our programs make; the loader names one that is missing.
//   STUB_HANG=NAME    the launch of a kernel whose name contains NAME never returns
//   STUB_CRASH=NAME   the launch of such a kernel ends the program by SIGABRT
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static cudaError_t error; // of the first launch, for ever
static const char *hangs, *crashes;

__attribute__((constructor)) static void read_settings(void) {
    hangs = getenv("STUB_HANG");
    crashes = getenv("STUB_CRASH");
}

// ----------------------------------------------------------------------------
// kernels: a handle is the kernel's name

static struct {
    const void* function;
    const char* name;
} kernels[4096];
static int kernel_count;

void** __cudaRegisterFatBinary(void* image) { return (void**)image; }
void __cudaRegisterFatBinaryEnd(void** image) { (void)image; }
void __cudaUnregisterFatBinary(void** image) { (void)image; }
char __cudaInitModule(void** image) { return image != NULL; }
void __cudaRegisterVar(void** image, char* at, char* to, const char* name) {}
void __cudaRegisterFunction(void** image, const char* function, char* device, const char* name) {
    if (kernel_count == 4096) abort();
    kernels[kernel_count].function = function;
    kernels[kernel_count++].name = name;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    for (int i = 0; i < kernel_count; i++)
        if (kernels[i].function == function) *kernel = (cudaKernel_t)kernels[i].name;
    return cudaSuccess;
}

static struct {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
} call;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    call.grid = grid;
    call.block = block;
    call.shared = shared;
    call.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    *grid = call.grid;
    *block = call.block;
    *shared = call.shared;
    *(cudaStream_t*)stream = call.stream;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared, cudaStream_t stream) {
    while (hangs && strstr((const char*)kernel, hangs)) pause();
    if (crashes && strstr((const char*)kernel, crashes)) abort();
    error = cudaErrorIllegalAddress;
    return error;
}
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                             size_t shared, cudaStream_t stream) {
    cudaKernel_t kernel = (cudaKernel_t) "";
    __cudaGetKernel(&kernel, function);
    return __cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* function,
                                void** arguments) {
    return cudaLaunchKernel(function, c->gridDim, c->blockDim, arguments, c->dynamicSmemBytes,
                            c->stream);
}
cudaError_t cudaFuncSetAttribute(const void* function, enum cudaFuncAttribute attribute,
                                 int value) {
    return error;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks,
                                                                   const void* function,
                                                                   int threads, size_t shared,
                                                                   unsigned flags) {
    *blocks = 1;
    return error;
}

// ----------------------------------------------------------------------------
// the device

cudaError_t cudaGetDeviceCount(int* n) {
    *n = 1;
    return error;
}
cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return error;
}
cudaError_t cudaSetDevice(int device) { return device ? cudaErrorInvalidDevice : error; }
cudaError_t cudaGetLastError(void) { return error; }
cudaError_t cudaMemGetInfo(size_t* rest, size_t* all) {
    *rest = *all = 80ull << 30;
    return error;
}
const char* cudaGetErrorString(cudaError_t e) {
    return e == cudaSuccess ? "no error" : "an illegal memory access was encountered";
}

cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int device) {
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 228 << 10; break;
    default: *value = 1;
    }
    return error;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* p, int device) {
    memset(p, 0, sizeof(*p));
    strcpy(p->name, "a Hopper that fails");
    p->major = 9;
    p->multiProcessorCount = 132;
    p->totalGlobalMem = 80ull << 30;
    p->sharedMemPerBlockOptin = 227 << 10;
    return error;
}
static int succeed(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult* found) {
    *function = (void*)succeed;
    if (found) *found = cudaDriverEntryPointSuccess;
    return error;
}

// ----------------------------------------------------------------------------
// memory: pages are taken when they are touched, and copies above 1 MiB are not made

cudaError_t cudaMalloc(void** p, size_t bytes) {
    size_t* start = mmap(NULL, bytes + 4096, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return cudaErrorMemoryAllocation;
    *start = bytes;
    *p = (char*)start + 4096;
    return error;
}
cudaError_t cudaFree(void* p) {
    size_t* start = (size_t*)((char*)p - 4096);
    if (p) munmap(start, *start + 4096);
    return error;
}
cudaError_t cudaMallocHost(void** p, size_t bytes) { return cudaMalloc(p, bytes); }
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned flags) { return cudaMalloc(p, bytes); }
cudaError_t cudaFreeHost(void* p) { return cudaFree(p); }
cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t s) { return cudaMalloc(p, bytes); }
cudaError_t cudaFreeAsync(void* p, cudaStream_t s) { return cudaFree(p); }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
    *pool = NULL;
    return error;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute,
                                    void* value) {
    return error;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind) {
    if (!error && bytes <= 1 << 20) memcpy(to, from, bytes);
    return error;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t s) {
    return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t rows, enum cudaMemcpyKind kind, cudaStream_t s) {
    for (size_t i = 0; i < rows; i++)
        cudaMemcpyAsync((char*)to + i * to_pitch, (const char*)from + i * from_pitch, width, kind,
                        s);
    return error;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
    if (!error && bytes <= 1 << 20) memset(to, value, bytes);
    return error;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t s) {
    return cudaMemset(to, value, bytes);
}

// ----------------------------------------------------------------------------
// streams, events and graphs: nothing is late

static int something;
#define HANDLE(p) (*(p) = (void*)&something, error)
cudaError_t cudaStreamCreate(cudaStream_t* s) { return HANDLE(s); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned f) { return HANDLE(s); }
cudaError_t cudaEventCreate(cudaEvent_t* e) { return HANDLE(e); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned f) { return HANDLE(e); }
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* g, cudaGraph_t from, unsigned long long f) {
    return HANDLE(g);
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* g) { return HANDLE(g); }
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
    return error;
}
cudaError_t cudaStreamDestroy(cudaStream_t s) { return error; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { return error; }
cudaError_t cudaStreamQuery(cudaStream_t s) { return error; }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) { return error; }
cudaError_t cudaEventDestroy(cudaEvent_t e) { return error; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return error; }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { return error; }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
    *ms = 1;
    return error;
}
cudaError_t cudaGraphDestroy(cudaGraph_t g) { return error; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g) { return error; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t g, cudaStream_t s) {
    error = cudaErrorIllegalAddress;
    return error;
}
