// crossentropy.cuh - cross-entropy, split in steps for a sharded vocabulary - arXiv:1909.08053
//   loss = log(sum_v exp(l_v)) - l_target,   dl_v = (exp(l_v) / sum - [v = target]) * scale
//   1. max        row maximum                         a sharded vocabulary: all-reduce max
//   2. sum        sum of exp(l - max), target logit   a sharded vocabulary: all-reduce sum
//   3. loss, backward
//   With the whole vocabulary on one rank, max_sum does 1 and 2 in one reading of the logits, and
//   forward_backward does all three.
//   logits (N,Vp), columns from V on are padding   row_max, sum_exp, target_logit, losses (N) acc
//   targets (N): a negative one is ignored, with loss and gradient 0. A shard holds V columns of
//   the vocabulary, from vocab_start on.
//   Contract: all =.  backward writes the gradient over the logits, padding included.
//             A shard may have no column (V 0). A logit of -inf has probability 0; a row of
//             only -inf has the loss NaN. Bitwise repeatable. total gives the same bits in all
//             versions; forward_backward gives the bits of max_sum, loss and backward.
//   Cost: memory-bound: max, sum and max_sum read the logits, backward reads and writes them.
//         forward_backward reads them once from memory and once from the L2 cache, and writes them
//         once: its rows in flight fit 40 MB, up to 300 KB a row where there are 132 processors.
//   To copy: this file, fast_math.h, gpu.h, types.h and cuda_common.h.
#pragma once
#include <algorithm>
#include "cuda_common.h"
#include "fast_math.h"
#include "gpu.h"
#include "types.h"

namespace llmc {

// The factor that multiplies the gradient: a product of up to three numbers.
//   by       from the host; or `stored`, on the device. A CUDA graph replays a launch with the same
//            arguments, so a number that changes from step to step must lie in memory.
//   also     on the device, such as fp16's loss scale (loss_scale.cuh), which the host never reads
//   rows     a coefficient for each row (objective.cuh)
// With a softcap (elementwise.cuh) the gradient is taken to the logits before the cap: times
// 1 - (logit / softcap)^2, where `logit` is the capped one; with the root's form times this^(3/2).
struct GradientScale {
    double by;
    const float* also;
    float softcap;        // 0: no cap
    const double* stored; // replaces `by`, unless null
    const void* rows;     // (N) in the type of the sums, or null
    bool root_cap;        // the cap has the root's form
    LLMC_HD GradientScale(double by, const float* also = nullptr, float softcap = 0,
                          const double* stored = nullptr, const void* rows = nullptr,
                          bool root_cap = false)
        : by(by), also(also), softcap(softcap), stored(stored), rows(rows), root_cap(root_cap) {}
    // The product without the row's coefficient.
    template <typename A> LLMC_HD A value() const {
        A first = A(stored ? *stored : by);
        return also ? first * A(*also) : first;
    }
    // The product for row n.
    template <typename A> LLMC_HD A of_row(size_t n) const {
        return rows ? value<A>() * static_cast<const A*>(rows)[n] : value<A>();
    }
    // The same factor for a caller whose row 0 is row n.
    template <typename A> GradientScale from_row(size_t n) const {
        GradientScale scale = *this;
        if (rows)
            scale.rows = static_cast<const A*>(rows) + n;
        return scale;
    }
    // The slope of the softcap, from the capped logit.
    template <typename A> LLMC_HD A cap_slope(A logit) const {
        A slope = 1 - logit / A(softcap) * (logit / A(softcap));
        if (!root_cap) return slope;
        // Rounding may put a logit above the cap.
        return slope > 0 ? slope * std::sqrt(slope) : 0;
    }
};

// Whether this shard has the target, and its column (`own`).
LLMC_HD inline bool in_shard(int target, size_t vocab_start, size_t V, size_t* own) {
    *own = size_t(target) - vocab_start;
    return target >= 0 && size_t(target) >= vocab_start && *own < V;
}

// ----------------------------------------------------------------------------
// CPU

// Map the bits of a bf16 or fp16 to an integer of the same order, and back; a NaN lies beyond an
// infinity. Integers let one instruction take the largest of 32 elements.
inline int16_t ordered(int16_t bits) { return bits ^ ((bits >> 15) & 0x7fff); }

// Step 1. A shard without columns has the maximum -inf.
template <typename T>
void crossentropy_max(acc_t<T>* row_max, // (N)
                      const T* logits,   // (N,Vp)
                      size_t N, size_t V, size_t Vp, Cpu) {
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const T* l = logits + n * Vp; // (Vp)

        // 16-bit logits: compare their bits as integers.
        if constexpr (sizeof(T) == 2) {
            int16_t most = ordered(bits_as<int16_t>(from_acc<T>(-INFINITY))); // where V is 0
            #pragma omp simd reduction(max : most)
            for (size_t v = 0; v < V; v++) {
                int16_t x = ordered(bits_as<int16_t>(l[v]));
                most = x > most ? x : most;
            }
            // ordered() is its own inverse.
            row_max[n] = to_acc(bits_as<T>(ordered(most)));
        } else {
            acc_t<T> most = -INFINITY;
            #pragma omp simd reduction(max : most)
            for (size_t v = 0; v < V; v++)
                most = to_acc(l[v]) > most ? to_acc(l[v]) : most;
            row_max[n] = most;
        }
    }
}

// Step 2. row_max is the maximum of the whole row, over all shards, so that no term is above 1.
template <typename T>
void crossentropy_sum(acc_t<T>* sum_exp, acc_t<T>* target_logit, // (N) (N)
                      const T* logits, const int* targets,       // (N,Vp) (N)
                      const acc_t<T>* row_max,                   // (N)
                      size_t N, size_t V, size_t Vp, size_t vocab_start, Cpu) {
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const T* l = logits + n * Vp; // (Vp)

        // Sum this shard's columns, without the padding.
        acc_t<T> sum = 0;
        acc_t<T> m = row_max[n];
        #pragma omp simd reduction(+ : sum)
        for (size_t v = 0; v < V; v++)
            sum += fast_exp_nonpositive(to_acc(l[v]) - m);
        sum_exp[n] = sum;

        // Take the target's logit if this shard has it. Other shards give 0, so the sum over shards
        // is the target's logit.
        size_t own;
        target_logit[n] = in_shard(targets[n], vocab_start, V, &own) ? to_acc(l[own]) : 0;
    }
}

// Step 3, from the sums over all shards.
template <typename A>
void crossentropy_loss(A* losses,                                                 // (N)
                       const A* row_max, const A* sum_exp, const A* target_logit, // (N) each
                       const int* targets, size_t N, Cpu) {                       // (N)
    for (size_t n = 0; n < N; n++)
        // Add the maximum back: log(sum exp(l)) = log(sum exp(l - max)) + max.
        losses[n] = targets[n] < 0 ? 0 : std::log(sum_exp[n]) + row_max[n] - target_logit[n];
}

// The gradient, in place over the logits. A target in another shard subtracts nothing here.
template <typename T>
void crossentropy_backward(T* logits, const int* targets,                    // (N,Vp) (N)
                           const acc_t<T>* row_max, const acc_t<T>* sum_exp, // (N) (N)
                           GradientScale gradient_scale, size_t N, size_t V, size_t Vp,
                           size_t vocab_start, Cpu) {
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        acc_t<T> scale = gradient_scale.of_row<acc_t<T>>(n);
        T* l = logits + n * Vp; // (Vp)
        // An ignored row has the gradient 0.
        if (targets[n] < 0) {
            std::fill(l, l + Vp, from_acc<T>(0));
            continue;
        }

        // Keep the target's logit: the loop below overwrites it.
        acc_t<T> m = row_max[n], factor = scale / sum_exp[n];
        size_t own;
        bool here = in_shard(targets[n], vocab_start, V, &own);
        acc_t<T> target = here ? to_acc(l[own]) : 0;
        std::fill(l + V, l + Vp, from_acc<T>(0)); // the padding

        // With a softcap, multiply each logit's gradient by the slope of the cap.
        for (size_t v = 0; gradient_scale.softcap != 0 && v < V; v++) {
            acc_t<T> x = to_acc(l[v]);
            acc_t<T> d = fast_exp_nonpositive(x - m) * factor;
            if (here && own == v)
                d -= scale;
            l[v] = from_acc<T>(d * gradient_scale.cap_slope(x));
        }
        if (gradient_scale.softcap != 0) continue;

        // Write the probabilities, one less at the target.
        #pragma omp simd
        for (size_t v = 0; v < V; v++)
            l[v] = from_acc<T>(fast_exp_nonpositive(to_acc(l[v]) - m) * factor);
        if (here)
            l[own] = from_acc<T>(fast_exp_nonpositive(target - m) * factor - scale);
    }
}

// Steps 1 and 2 for a whole vocabulary: a row stays in the cache for the second reading.
template <typename T>
void crossentropy_max_sum(acc_t<T>* row_max, acc_t<T>* sum_exp, // (N) (N)
                          acc_t<T>* target_logit,               // (N)
                          const T* logits, const int* targets,  // (N,Vp) (N)
                          size_t N, size_t V, size_t Vp, Cpu where) {
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const T* l = logits + n * Vp; // (Vp)
        crossentropy_max(row_max + n, l, 1, V, Vp, where);
        crossentropy_sum(sum_exp + n, target_logit + n, l, targets + n, row_max + n, 1, V, Vp, 0,
                         where);
    }
}

// All three steps for a whole vocabulary: the loss and, over the logits, their gradient.
template <typename T>
void crossentropy_forward_backward(acc_t<T>* losses,              // (N)
                                   T* logits, const int* targets, // (N,Vp) (N)
                                   GradientScale scale, size_t N, size_t V, size_t Vp,
                                   Cpu where) {
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        T* l = logits + n * Vp; // (Vp)
        // Take the row through all three steps while it is in the cache.
        acc_t<T> max, sum, target;
        crossentropy_max_sum(&max, &sum, &target, l, targets + n, 1, V, Vp, where);
        crossentropy_loss(losses + n, &max, &sum, &target, targets + n, 1, where);
        crossentropy_backward(l, targets + n, &max, &sum, scale.from_row<acc_t<T>>(n), 1, V, Vp, 0,
                              where);
    }
}

// total (1) = the sum of the losses in double. The losses of a chunk are dealt to 32 sums; these
// sums, and then the chunks, are added in order. CPU and GPU give the same bits.
constexpr size_t TOTAL_CHUNK = 4096;
template <typename A>
void crossentropy_total(double* total, const A* losses, size_t N, Cpu) {
    *total = 0;
    for (size_t from = 0; from < N; from += TOTAL_CHUNK) {
        size_t to = from + TOTAL_CHUNK < N ? from + TOTAL_CHUNK : N;
        // The array stands for a warp's 32 lanes: the GPU adds in the same order.
        double lanes[32] = {};
        double sum = 0;
        for (size_t n = from; n < to; n++)
            lanes[n % 32] += losses[n];
        for (double lane : lanes) sum += lane;
        *total += sum;
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

constexpr int CROSSENTROPY_WARPS = 16; // a block has one row
constexpr unsigned CROSSENTROPY_THREADS = CROSSENTROPY_WARPS * 32;

// forward_backward reads a row twice, so the rows in flight should fit the L2 cache. A processor
// runs four blocks. Where L2 cannot hold four rows a processor, one or two blocks go on from row to
// row, and load more packs at a time, to keep as many bytes in flight. (The emulator's is small.)
constexpr int LONG_ROW_LOADS = 4;
#if defined(EMULATE)
constexpr size_t L2_OF_ROWS = 32 << 10;
#else
constexpr size_t L2_OF_ROWS = 40 << 20;
#endif

// The maximum of some logits, and their sum of exp(logit - maximum).
struct MaxSum {
    float max = -INFINITY, sum = 0;
};

// exp(x - max). A logit of -inf gives 0, even where the maximum is -inf too.
__device__ inline float exp_below(float x, float max) {
    return __expf(x - (max == -INFINITY ? 0 : max));
}

// Merge two parts of a row. The result is symmetric in a and b, so a butterfly of shuffles gives
// all lanes the same bits.
__device__ inline MaxSum join(MaxSum a, MaxSum b) {
    float max = b.max > a.max ? b.max : a.max;
    return {max, a.sum * exp_below(a.max, max) + b.sum * exp_below(b.max, max)};
}

// Merge the parts of all threads of a block and return the result to each. Every thread must call
// it. No barrier protects its shared memory from the next call.
__device__ inline MaxSum block_join(MaxSum x) {
    LLMC_SHARED(MaxSum, warps, CROSSENTROPY_WARPS);
    // Merge the lanes of each warp.
    for (int mask = 16; mask > 0; mask /= 2) {
        float max = __shfl_xor_sync(ALL_LANES, x.max, mask);
        float sum = __shfl_xor_sync(ALL_LANES, x.sum, mask);
        x = join(x, {max, sum});
    }
    if (threadIdx.x % 32 == 0)
        warps[threadIdx.x / 32] = x;
    __syncthreads(); // all warps have written

    // Merge the warps in every thread: all get the same bits, and no second barrier is needed.
    MaxSum all;
    for (int w = 0; w < CROSSENTROPY_WARPS; w++)
        all = join(all, warps[w]);
    return all;
}

// Call f(x) for the first V logits of a row, P at a time; the block's threads share them out. Vp is
// a multiple of P, so a load may reach into the padding: f sees -inf there.
template <int P, int LOADS = 1, typename T, typename F>
__device__ void for_each_logit(const T* row, size_t V, F f) {
    constexpr size_t STEP = CROSSENTROPY_THREADS * P;
    for (size_t first = threadIdx.x * P; first < V; first += LOADS * STEP) {
        // Start LOADS loads before the first is used.
        Pack<T, P> p[LOADS];
        for (int l = 0; l < LOADS; l++)
            if (first + l * STEP < V)
                p[l] = load<P>(row + first + l * STEP);

        #pragma unroll
        for (int l = 0; l < LOADS; l++) {
            size_t v = first + l * STEP;
            if (v >= V) break;
            float x[P];
            for (int i = 0; i < P; i++)
                x[i] = to_float(p[l].v[i]);

            // Hide the padding that the load brought. A comparison of 64 bits would
            // cost two instructions.
            if (V - v < P)
                for (int i = 1; i < P; i++)
                    x[i] = unsigned(i) < unsigned(V - v) ? x[i] : -INFINITY;
            f(x);
        }
    }
}

// The largest of P logits. A NaN is passed over here and shows in the sum of exponentials.
template <int P> __device__ float max_of(const float* x) {
    float max = x[0];
    for (int i = 1; i < P; i++)
        max = fmaxf(max, x[i]);
    return max;
}

// Step 1: one block a row, as in all the kernels below.
template <typename T, int P>
__global__ void crossentropy_max_kernel(float* row_max, const T* logits, size_t V, size_t Vp) {
    // The sums stay 0 here: only the maxima are merged.
    MaxSum mine;
    for_each_logit<P>(logits + blockIdx.x * Vp, V, [&](const float* x) {
        float max = max_of<P>(x);
        mine.max = max > mine.max ? max : mine.max;
    });
    mine = block_join(mine);
    if (threadIdx.x == 0)
        row_max[blockIdx.x] = mine.max;
}

// A thread's part of a row. It sums exp(logit - mine.max), or with FIND it looks for the maximum on
// the way and returns both.
template <int P, bool FIND, int LOADS = 1, typename T>
__device__ MaxSum part_of_row(MaxSum mine, const T* row, size_t V) {
    for_each_logit<P, LOADS>(row, V, [&](const float* x) {
        float max = FIND ? max_of<P>(x) : mine.max;
        // Rescale the sum so far to the larger maximum.
        if (max > mine.max) {
            mine.sum *= exp_below(mine.max, max);
            mine.max = max;
        }
        for (int i = 0; i < P; i++)
            mine.sum += exp_below(x[i], mine.max);
    });
    return mine;
}

// Step 2: the sum alone, or with FIND maximum and sum in one reading.
template <typename T, int P, bool FIND>
__global__ void crossentropy_sum_kernel(float* row_max, float* sum_exp, float* target_logit,
                                        const T* logits, const int* targets, size_t V, size_t Vp,
                                        size_t vocab_start) {
    size_t n = blockIdx.x, own;
    const T* row = logits + n * Vp; // (Vp)
    MaxSum mine;
    if (!FIND) mine.max = row_max[n];
    mine = block_join(part_of_row<P, FIND>(mine, row, V));

    // One thread writes. A shard without the target gives 0: the sum over shards is its logit.
    if (threadIdx.x > 0) return;
    if (FIND) row_max[n] = mine.max;
    sum_exp[n] = mine.sum;
    target_logit[n] = in_shard(targets[n], vocab_start, V, &own) ? to_float(row[own]) : 0;
}

// Step 3: one thread a row. All pointers are (N).
static __global__ void crossentropy_loss_kernel(float* losses, const float* row_max,
                                                const float* sum_exp, const float* target_logit,
                                                const int* targets, size_t N) {
    size_t n = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    // An ignored row has the loss 0.
    if (n < N)
        losses[n] = targets[n] < 0 ? 0 : logf(sum_exp[n]) + row_max[n] - target_logit[n];
}

// The gradient of a row, over its logits; each thread writes only what it has read. The row's end
// goes first, because the L2 cache may still hold it from the reading before.
template <int P, typename T>
__device__ void backward_of_row(T* row, int target, MaxSum all, GradientScale gradient_scale,
                                size_t n, size_t V, size_t Vp, size_t vocab_start) {
    float scale = gradient_scale.of_row<float>(n);
    float factor = scale / all.sum;
    size_t own;
    bool here = in_shard(target, vocab_start, V, &own);

    // Cover all of Vp: the padding gets zeros, and an ignored row nothing but zeros.
    for (size_t k = ceil_div(Vp, size_t(CROSSENTROPY_THREADS * P)); k-- > 0;) {
        size_t v = (k * CROSSENTROPY_THREADS + threadIdx.x) * P;
        if (v >= Vp) continue;
        Pack<T, P> p = {};
        if (target >= 0 && v < V) {
            p = load<P>(row + v);

            // Probabilities, one less at the target.
            bool own_is_mine = here && own - v < P;
            for (int i = 0; i < P; i++) {
                float d = exp_below(to_float(p.v[i]), all.max) * factor;
                if (own_is_mine && v + i == own)
                    d -= scale;
                if (gradient_scale.softcap != 0)
                    d *= gradient_scale.cap_slope(to_float(p.v[i]));
                p.v[i] = from_acc<T>(d);
            }

            // Clear the part of the pack that reaches into the padding.
            if (V - v < P)
                for (int i = 1; i < P; i++)
                    if (unsigned(i) >= unsigned(V - v))
                        p.v[i] = from_acc<T>(0);
        }
        store(row + v, p);
    }
}

// The last rows go first, because the L2 cache still holds them from the forward pass.
template <typename T, int P>
__global__ void crossentropy_backward_kernel(T* logits, const int* targets, const float* row_max,
                                             const float* sum_exp, GradientScale scale, size_t V,
                                             size_t Vp, size_t vocab_start) {
    size_t n = gridDim.x - 1 - blockIdx.x;
    MaxSum all = {row_max[n], sum_exp[n]};
    backward_of_row<P>(logits + n * Vp, targets[n], all, scale, n, V, Vp, vocab_start);
}

// All three steps in one launch. The second reading of a row comes from the L2 cache.
template <typename T, int P, int LOADS>
__global__ void crossentropy_forward_backward_kernel(float* losses, T* logits, const int* targets,
                                                     GradientScale scale, size_t N, size_t V,
                                                     size_t Vp) {
    for (size_t n = blockIdx.x, own; n < N; n += gridDim.x) {
        T* row = logits + n * Vp; // (Vp)

        // Read the target's logit before block_join's barrier; the gradient may overwrite it then.
        float target = in_shard(targets[n], 0, V, &own) ? to_float(row[own]) : 0;
        MaxSum all = block_join(part_of_row<P, true, LOADS>(MaxSum(), row, V));
        if (threadIdx.x == 0)
            losses[n] = targets[n] < 0 ? 0 : logf(all.sum) + all.max - target;
        backward_of_row<P>(row, targets[n], all, scale, n, V, Vp, 0);
        if (LOADS == 1) return; // a short row has a block of its own
        __syncthreads(); // all threads have left block_join: the next row may enter it
    }
}

// One block sums all losses: each of 32 warps takes a chunk, so a round takes 32 chunks.
static __global__ void crossentropy_total_kernel(double* total, const float* losses, size_t N) {
    LLMC_SHARED(double, sums, 32);
    size_t lane = threadIdx.x % 32;
    size_t warp = threadIdx.x / 32;
    double all = 0;
    for (size_t start = 0; start < N; start += 32 * TOTAL_CHUNK) {
        // Sum this warp's chunk: each lane its own losses, then the lanes in order.
        size_t from = start + warp * TOTAL_CHUNK;
        size_t to = from + TOTAL_CHUNK < N ? from + TOTAL_CHUNK : N;
        double x = 0, sum = 0;
        for (size_t n = from + lane; n < to; n += 32)
            x += losses[n];
        for (int l = 0; l < 32; l++)
            sum += __shfl_sync(ALL_LANES, x, l);

        // Add the chunks in order.
        if (lane == 0) sums[warp] = sum;
        __syncthreads(); // all warps have written
        for (int w = 0; threadIdx.x == 0 && w < 32 && start + w * TOTAL_CHUNK < N; w++)
            all += sums[w];
        __syncthreads(); // the first thread has read: the next round may write
    }
    if (threadIdx.x == 0) *total = all;
}

// ----------------------------------------------------------------------------
// launchers

// All launchers load 16 bytes at a time where a row's length and start allow it, else one element.
template <typename T>
void crossentropy_max(float* row_max, const T* logits, size_t N, size_t V, size_t Vp,
                      cudaStream_t stream) {
    bool vector = can_vectorize<T>(Vp, logits);
    launch(vector ? crossentropy_max_kernel<T, VECTOR<T>> : crossentropy_max_kernel<T, 1>,
           unsigned(N), CROSSENTROPY_THREADS, stream,
           row_max, logits, V, Vp);
}

template <typename T>
void crossentropy_sum(float* sum_exp, float* target_logit, const T* logits, const int* targets,
                      const float* row_max, size_t N, size_t V, size_t Vp, size_t vocab_start,
                      cudaStream_t stream) {
    bool vector = can_vectorize<T>(Vp, logits);
    // The kernel writes row_max only with FIND, so this cast is safe.
    launch(vector ? crossentropy_sum_kernel<T, VECTOR<T>, false>
                  : crossentropy_sum_kernel<T, 1, false>,
           unsigned(N), CROSSENTROPY_THREADS, stream,
           const_cast<float*>(row_max), sum_exp, target_logit, logits, targets, V, Vp,
           vocab_start);
}

template <typename T>
void crossentropy_max_sum(float* row_max, float* sum_exp, float* target_logit, const T* logits,
                          const int* targets, size_t N, size_t V, size_t Vp, cudaStream_t stream) {
    bool vector = can_vectorize<T>(Vp, logits);
    launch(vector ? crossentropy_sum_kernel<T, VECTOR<T>, true>
                  : crossentropy_sum_kernel<T, 1, true>,
           unsigned(N), CROSSENTROPY_THREADS, stream,
           row_max, sum_exp, target_logit, logits, targets, V, Vp, 0);
}

inline void crossentropy_loss(float* losses, const float* row_max, const float* sum_exp,
                              const float* target_logit, const int* targets, size_t N,
                              cudaStream_t stream) {
    launch(crossentropy_loss_kernel,
           unsigned(ceil_div(N, 256)), 256, stream,
           losses, row_max, sum_exp, target_logit, targets, N);
}

template <typename T>
void crossentropy_backward(T* logits, const int* targets, const float* row_max,
                           const float* sum_exp, GradientScale scale, size_t N, size_t V, size_t Vp,
                           size_t vocab_start, cudaStream_t stream) {
    bool vector = can_vectorize<T>(Vp, logits);
    launch(vector ? crossentropy_backward_kernel<T, VECTOR<T>> : crossentropy_backward_kernel<T, 1>,
           unsigned(N), CROSSENTROPY_THREADS, stream,
           logits, targets, row_max, sum_exp, scale, V, Vp, vocab_start);
}

// All three steps in one launch, for a whole vocabulary. It needs no memory but the losses.
template <typename T>
void crossentropy_forward_backward(float* losses, T* logits, const int* targets,
                                   GradientScale scale, size_t N, size_t V, size_t Vp,
                                   cudaStream_t stream) {
    size_t processors = gpu_processors();
    size_t fit = L2_OF_ROWS / (Vp * sizeof(T)) / processors; // rows a processor
    size_t blocks = N;
    if (fit < 4)
        blocks = std::min(N, (fit < 2 ? 1 : 2) * processors);
    auto run = [&](auto P) {
        launch(fit >= 4 ? crossentropy_forward_backward_kernel<T, P, 1>
                        : crossentropy_forward_backward_kernel<T, P, LONG_ROW_LOADS>,
               unsigned(blocks), CROSSENTROPY_THREADS, stream,
               losses, logits, targets, scale, N, V, Vp);
    };
    can_vectorize<T>(Vp, logits) ? run(Int<VECTOR<T>>()) : run(Int<1>());
}

// One block, so that the order of the sum depends on N alone.
inline void crossentropy_total(double* total, const float* losses, size_t N, cudaStream_t stream) {
    launch(crossentropy_total_kernel,
           1, 1024, stream,
           total, losses, N);
}
#endif

} // namespace llmc
