// cuda_common.h - what kernels share: vectors, reductions, launching, elementwise and row operators
//   Built three ways: nvcc (GPU); g++ -DEMULATE (the kernels' own source runs on the CPU, for
//   tests); g++ (no kernels: LLMC_KERNELS is 0).
//   Contract: a warp adds in the order of a butterfly, so sums are bitwise repeatable.
//   To copy: this file and types.h.
#pragma once
#include <map>
#include <string>
#include "types.h"

#if defined(__CUDACC__)
#define LLMC_KERNELS 1
#elif defined(EMULATE)
#include "../../test/harness/emulator.h"
#define LLMC_KERNELS 1
#else
#define LLMC_KERNELS 0
#endif

#if LLMC_KERNELS
namespace llmc {

// ----------------------------------------------------------------------------
// vectors

// N elements of T, for one load or store: 16 bytes where pointers and row length allow it, else one
// element. A larger Pack takes several loads of 16 bytes.
template <typename T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack { T v[N]; };
template <int N, typename T>
__device__ inline Pack<T, N> load(const T* p) {
    return *reinterpret_cast<const Pack<T, N>*>(p);
}
template <typename T, int N>
__device__ inline void store(T* p, Pack<T, N> x) {
    *reinterpret_cast<Pack<T, N>*>(p) = x;
}

// Load the P elements at p, or only the first `count` of them and zeros. Both branches produce
// words, not elements: given elements, the compiler would unpack each load at once, and one load
// would wait for the other.
template <int P, typename T>
__device__ Pack<T, P> load_some(const T* p, size_t count) {
    typedef std::conditional_t<P * sizeof(T) % 4 == 0, uint32_t, T> Word;
    constexpr int N = int(P * sizeof(T) / sizeof(Word));
    Pack<Word, N> words;
    if (count >= P) {
        words = load<N>(reinterpret_cast<const Word*>(p));
    } else {
        Pack<T, P> x = {};
        for (int i = 0; i < P; i++)
            if (size_t(i) < count)
                x.v[i] = p[i];
        words = bits_as<Pack<Word, N>>(x);
    }
    return bits_as<Pack<T, P>>(words);
}

// Store the P elements at p, or only the first `count` of them.
template <int P, typename T>
__device__ void store_some(T* p, Pack<T, P> x, size_t count) {
    if (count >= P) return store(p, x);
    for (int i = 0; i < P; i++)
        if (size_t(i) < count)
            p[i] = x.v[i];
}

// The number of elements in 16 bytes.
template <typename T> constexpr int VECTOR = 16 / sizeof(T);

// Whether rows of `row` elements at these addresses (null: absent) can be read 16 bytes at a time.
template <typename T, typename... Ps>
bool can_vectorize(size_t row, const Ps*... ps) {
    return row % VECTOR<T> == 0 && ((uintptr_t(ps) % 16 == 0) && ...);
}

// ----------------------------------------------------------------------------
// reductions

constexpr unsigned ALL_LANES = 0xffffffffu;

// The sum over a warp, in the order of a butterfly: every lane and every run gets the same bits.
template <typename A>
__device__ inline A warp_sum(A x) { // float or double
    for (int mask = 16; mask > 0; mask /= 2)
        x += __shfl_xor_sync(ALL_LANES, x, mask);
    return x;
}

// The largest value in a warp, returned to every lane.
__device__ inline float warp_max(float x) {
    for (int mask = 16; mask > 0; mask /= 2) {
        float y = __shfl_xor_sync(ALL_LANES, x, mask);
        x = y > x ? y : x;
    }
    return x;
}

// Declare shared memory by these two only, so that the emulator can own and poison it:
//   LLMC_SHARED(float, sums, 8 * 32)   declares float* or float[256]
//   dynamic_shared()                   the bytes that launch() was asked for, 1024-byte aligned
#if defined(__CUDACC__)
#define LLMC_SHARED(type, name, count) __shared__ __align__(128) type name[count]
extern __shared__ __align__(1024) unsigned char dynamic_shared_bytes[];
__device__ inline unsigned char* dynamic_shared() { return dynamic_shared_bytes; }
#else
#define LLMC_SHARED(type, name, count) \
    type* name = emulator::shared_array<type>(count, emulator::Site::current())
inline unsigned char* dynamic_shared() { return emulator::dynamic_shared_memory(); }
#endif

// The sum over a block of WARPS warps, returned to every thread. All threads must call it.
template <int WARPS, typename A>
__device__ A block_sum(A x) {
    LLMC_SHARED(A, sums, WARPS);
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0)
        sums[threadIdx.x / 32] = x;
    __syncthreads(); // all warps have written
    A sum = 0;
    for (int w = 0; w < WARPS; w++)
        sum += sums[w];
    __syncthreads(); // all threads have read: the next call may write
    return sum;
}

// The sums of K numbers over a block, with two barriers for all of them. All threads must call it.
template <int WARPS, int K>
__device__ void block_sums(float (&x)[K]) {
    LLMC_SHARED(float, sums, K * WARPS);

    // Sum within each warp.
    for (int k = 0; k < K; k++) {
        x[k] = warp_sum(x[k]);
        if (threadIdx.x % 32 == 0)
            sums[k * WARPS + threadIdx.x / 32] = x[k];
    }
    __syncthreads(); // all warps have written

    // Add the warps in order.
    for (int k = 0; k < K; k++) {
        x[k] = 0;
        for (int w = 0; w < WARPS; w++)
            x[k] += sums[k * WARPS + w];
    }
    __syncthreads(); // all threads have read: the next call may write
}

// ----------------------------------------------------------------------------
// launching

#define LLMC_CUDA_CHECK(call)                                           \
    do {                                                                \
        cudaError_t cuda_error_ = (call);                               \
        LLMC_CHECK(cuda_error_ == cudaSuccess, "CUDA says: %s",         \
                   cudaGetErrorString(cuda_error_));                    \
    } while (0)

// Queue the zeroing of device memory.
inline void device_zero(void* p, size_t bytes, cudaStream_t stream) {
    LLMC_CUDA_CHECK(cudaMemsetAsync(p, 0, bytes, stream));
}

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

// Allow a kernel to use more than 48 KB of shared memory. Each thread asks only when a size is
// larger than any before, so that a launch costs the host one call.
template <typename... Params>
void ask_for_shared(void (*kernel)(Params...), size_t bytes) {
    if (bytes <= size_t(48) << 10) return;
    static thread_local std::map<std::pair<int, const void*>, size_t> granted; // [GPU, kernel]
    size_t& most = granted[{current_gpu(), reinterpret_cast<const void*>(kernel)}];
    if (bytes <= most) return;
    LLMC_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         int(bytes)));
    most = bytes;
}

// Start a kernel. Every launch in every build goes through here, so none forgets the stream or
// the error check.
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, Args... args) {
    ask_for_shared(kernel, shared_bytes);
#if defined(__CUDACC__)
    kernel<<<grid, block, shared_bytes, stream>>>(Params(args)...);
#else
    if (!emulator::check_launch(grid, block, shared_bytes)) return;
    emulator::note_launch(kernel);
    auto threads = [=] { kernel(Params(args)...); };
    emulator::give(reinterpret_cast<const void*>(kernel), stream,
                   [=] { emulator::run_grid(grid, block, shared_bytes, threads); }, grid, block,
                   shared_bytes, Params(args)...);
#endif
    LLMC_CUDA_CHECK(cudaGetLastError());
}

// A compile-time constant that a generic lambda can take as an argument.
template <int N> struct Int {
    LLMC_HD constexpr operator int() const { return N; }
};

// ----------------------------------------------------------------------------
// elementwise operators: a thread takes P elements, the last thread may have fewer

constexpr unsigned ELEMENT_THREADS = 256;
// The index of this thread's first element.
template <int P> __device__ size_t first_element() {
    return (size_t(blockIdx.x) * ELEMENT_THREADS + threadIdx.x) * P;
}

// Call f(P, blocks) for n elements; not at all if there are none.
template <typename T, typename F>
void pick_element_kernel(size_t n, bool vector, F f) {
    if (n == 0) return;
    auto pick = [&](auto P) { f(P, unsigned(ceil_div(n, ELEMENT_THREADS * P))); };
    vector ? pick(Int<VECTOR<T>>()) : pick(Int<1>());
}

// ----------------------------------------------------------------------------
// row operators: a row is shared by so many warps that a thread has at most 64 bytes of it, for
// rows of up to 32 KB. A block's rows then stay in L1 while they are read more than once.

// Call f(P, warps a row) for rows of C elements.
template <typename T, typename F>
void pick_row_kernel(size_t C, bool vector, F f) {
    auto pick = [&](auto P) {
        size_t bytes = C * sizeof(T);
        bytes <= 2048 ? f(P, Int<1>()) : bytes <= 8192 ? f(P, Int<4>()) : f(P, Int<16>());
    };
    vector ? pick(Int<VECTOR<T>>()) : pick(Int<1>());
}

// A block has at least four warps. If a row takes one warp, a block has four rows.
template <int WARPS> constexpr unsigned row_block() { return WARPS < 4 ? 128 : WARPS * 32; }
template <int WARPS> dim3 row_grid(size_t N) {
    return dim3(unsigned(ceil_div(N, row_block<WARPS>() / (WARPS * 32))));
}

// A thread's place: its row n, and its number among the threads that share the row.
template <int WARPS> struct RowOfBlock {
    static constexpr unsigned threads = WARPS * 32;
    unsigned thread = threadIdx.x % threads;
    size_t n = size_t(blockIdx.x) * (row_block<WARPS>() / threads) + threadIdx.x / threads;

    // The sum over the row, returned to each of its threads. All threads of the row must call it.
    __device__ float sum(float x) const {
        if constexpr (WARPS == 1)
            return warp_sum(x);
        else
            return block_sum<WARPS>(x);
    }
};

} // namespace llmc
#endif
