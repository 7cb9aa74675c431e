// crossentropy.cuh - cross-entropy, split in steps for a sharded vocabulary - arXiv:1909.08053
//   loss = log(sum_v exp(l_v)) - l_target,   dl_v = (exp(l_v) / sum - [v = target]) * scale
//   1. max        row maximum                         a sharded vocabulary: all-reduce max
//   2. sum        sum of exp(l - max), target logit   a sharded vocabulary: all-reduce sum
//   3. loss, backward
//   Where the vocabulary is whole, max_sum is 1 and 2 in one reading, forward_backward all three.
//   logits (N,Vp), columns from V on are padding   row_max, sum_exp, target_logit, losses (N) acc
//   targets (N): negative is ignored, loss and gradient 0; a shard holds V columns from vocab_start
//   Contract: all =.  backward writes the gradient over the logits, padding included.
//             A shard may have no column (V 0). A logit of -inf has probability 0; a row of
//             nothing else has no loss (NaN). Bitwise repeatable; total has the same bits in all
//             versions, forward_backward those of max_sum, loss and backward.
//   Cost: memory-bound: max, sum and max_sum read the logits, backward reads and writes them.
//   To copy: this file, types.h and cuda_common.h.
#pragma once
#include <algorithm>
#include "cuda_common.h"

namespace llmc {

// The gradient is multiplied by a number, and by a second one where there is one: it lies where the
// logits are, for the host does not know it (loss_scale.cuh). Logits behind a softcap
// (elementwise.cuh) give the gradient of what they were before: times 1 - (logit / softcap)^2.
// The first number may lie there too: a step's launches then have the arguments of any step's.
// Rows may have a coefficient each: it comes to the product as the third number (objective.cuh).
struct GradientScale {
    double by;
    const float* also;
    float softcap;        // 0: none
    const double* stored; // in place of `by`, or null
    const void* rows;     // (N) of the sums' type, or null
    LLMC_HD GradientScale(double by, const float* also = nullptr, float softcap = 0,
                          const double* stored = nullptr, const void* rows = nullptr)
        : by(by), also(also), softcap(softcap), stored(stored), rows(rows) {}
    template <typename A> LLMC_HD A value() const {
        A first = A(stored ? *stored : by);
        return also ? first * A(*also) : first;
    }
    template <typename A> LLMC_HD A of_row(size_t n) const {
        return rows ? value<A>() * static_cast<const A*>(rows)[n] : value<A>();
    }
    // As rows from n on have it.
    template <typename A> GradientScale from_row(size_t n) const {
        GradientScale scale = *this;
        if (rows) scale.rows = static_cast<const A*>(rows) + n;
        return scale;
    }
    template <typename A> LLMC_HD A cap_slope(A logit) const {
        return 1 - logit / A(softcap) * (logit / A(softcap));
    }
};

// ----------------------------------------------------------------------------
// CPU

// The bits of a bf16 or fp16 as an integer of the same order (a NaN beyond an infinity), and back:
// the largest of 32 elements takes one instruction.
inline int16_t ordered(int16_t bits) { return bits ^ ((bits >> 15) & 0x7fff); }

// 1. A shard without columns has the maximum -inf.
template <typename T>
void crossentropy_max(acc_t<T>* row_max, // (N)
                      const T* logits,   // (N,Vp)
                      size_t N, size_t V, size_t Vp, Cpu) {
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const T* l = logits + n * Vp; // (Vp)

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

// 2. Below the maximum of the whole row: no term is above 1.
template <typename T>
void crossentropy_sum(acc_t<T>* sum_exp, acc_t<T>* target_logit, // (N) (N)
                      const T* logits, const int* targets,       // (N,Vp) (N)
                      const acc_t<T>* row_max,                   // (N)
                      size_t N, size_t V, size_t Vp, size_t vocab_start, Cpu) {
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const T* l = logits + n * Vp; // (Vp)

        // Sum the shard's own columns; the padding takes no part.
        acc_t<T> sum = 0;
        acc_t<T> m = row_max[n];
        #pragma omp simd reduction(+ : sum)
        for (size_t v = 0; v < V; v++)
            sum += fast_exp_nonpositive(to_acc(l[v]) - m);
        sum_exp[n] = sum;

        // Pick the target's logit, if this shard has it.
        int64_t own = int64_t(targets[n]) - int64_t(vocab_start);
        bool here = targets[n] >= 0 && own >= 0 && own < int64_t(V);
        target_logit[n] = here ? to_acc(l[own]) : 0;
    }
}

// 3. From the sums of all shards.
template <typename A>
void crossentropy_loss(A* losses,                                                 // (N)
                       const A* row_max, const A* sum_exp, const A* target_logit, // (N) each
                       const int* targets, size_t N, Cpu) {                       // (N)
    for (size_t n = 0; n < N; n++)
        // Put the maximum back: log(sum exp(l)) = log(sum exp(l - max)) + max.
        losses[n] = targets[n] < 0 ? 0 : std::log(sum_exp[n]) + row_max[n] - target_logit[n];
}

// In place. Another shard's target subtracts nothing here.
template <typename T>
void crossentropy_backward(T* logits, const int* targets,                    // (N,Vp) (N)
                           const acc_t<T>* row_max, const acc_t<T>* sum_exp, // (N) (N)
                           GradientScale gradient_scale, size_t N, size_t V, size_t Vp,
                           size_t vocab_start, Cpu) {
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        acc_t<T> scale = gradient_scale.of_row<acc_t<T>>(n);
        T* l = logits + n * Vp; // (Vp)
        // An ignored row has no gradient.
        if (targets[n] < 0) {
            memset(l, 0, Vp * sizeof(T));
            continue;
        }

        // Keep the target's logit, which the loop below overwrites.
        acc_t<T> m = row_max[n], factor = scale / sum_exp[n];
        int64_t own = int64_t(targets[n]) - int64_t(vocab_start);
        bool here = own >= 0 && own < int64_t(V);
        acc_t<T> target = here ? to_acc(l[own]) : 0;

        // Go back through a softcap, logit by logit.
        for (size_t v = 0; gradient_scale.softcap != 0 && v < V; v++) {
            acc_t<T> x = to_acc(l[v]);
            acc_t<T> d = fast_exp_nonpositive(x - m) * factor;
            if (here && size_t(own) == v) d -= scale;
            l[v] = from_acc<T>(d * gradient_scale.cap_slope(x));
        }
        if (gradient_scale.softcap != 0) {
            std::fill(l + V, l + Vp, from_acc<T>(0));
            continue;
        }

        // Write the probabilities, zeros in the padding, and at the target one less.
        #pragma omp simd
        for (size_t v = 0; v < V; v++)
            l[v] = from_acc<T>(fast_exp_nonpositive(to_acc(l[v]) - m) * factor);
        for (size_t v = V; v < Vp; v++)
            l[v] = from_acc<T>(0);
        if (here)
            l[own] = from_acc<T>(fast_exp_nonpositive(target - m) * factor - scale);
    }
}

// Maximum and sum in one reading of the logits: a row stays in the cache for the second.
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

// The loss and, over the logits, its gradient, where the vocabulary is whole.
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

// total (1) = the sum of the losses in double. A chunk's losses go round 32 sums; these, and then
// the chunks, are added in order.
constexpr size_t TOTAL_CHUNK = 4096;
template <typename A>
void crossentropy_total(double* total, const A* losses, size_t N, Cpu) {
    *total = 0;
    for (size_t from = 0; from < N; from += TOTAL_CHUNK) {
        size_t to = from + TOTAL_CHUNK < N ? from + TOTAL_CHUNK : N;
        // A warp's 32 lanes, here an array: the GPU adds in the same order.
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

constexpr int CROSSENTROPY_WARPS = 16; // of a block; a block has a row
constexpr unsigned CROSSENTROPY_THREADS = CROSSENTROPY_WARPS * 32;

// Some logits' maximum, and their sum of exp(logit - maximum).
struct MaxSum {
    float max = -INFINITY, sum = 0;
};

// exp(x - max): 0 for a logit of -inf, even where the maximum is -inf too
__device__ inline float exp_below(float x, float max) {
    return __expf(x - (max == -INFINITY ? 0 : max));
}

// Symmetric in a and b: a butterfly gives all lanes the same bits.
__device__ inline MaxSum join(MaxSum a, MaxSum b) {
    float max = b.max > a.max ? b.max : a.max;
    return {max, a.sum * exp_below(a.max, max) + b.sum * exp_below(b.max, max)};
}

// Join over the block, for every thread; all of them must call it, once.
__device__ inline MaxSum block_join(MaxSum x) {
    // Join the lanes of each warp.
    LLMC_SHARED(MaxSum, warps, CROSSENTROPY_WARPS);
    for (int mask = 16; mask > 0; mask /= 2) {
        float max = __shfl_xor_sync(ALL_LANES, x.max, mask);
        float sum = __shfl_xor_sync(ALL_LANES, x.sum, mask);
        x = join(x, {max, sum});
    }
    if (threadIdx.x % 32 == 0)
        warps[threadIdx.x / 32] = x;
    __syncthreads(); // all warps have written

    // Join the warps, every thread for itself: all get the same bits without a second barrier.
    MaxSum all;
    for (int w = 0; w < CROSSENTROPY_WARPS; w++)
        all = join(all, warps[w]);
    return all;
}

// f(logits): the block's threads share out a row's first V logits, P at a time. Vp is a multiple of
// P, so a load may reach into the padding, which is -inf to f.
template <int P, typename T, typename F>
__device__ void for_each_logit(const T* row, size_t V, F f) {
    for (size_t v = threadIdx.x * P; v < V; v += CROSSENTROPY_THREADS * P) {
        Pack<T, P> p = load<P>(row + v);
        float x[P];
        for (int i = 0; i < P; i++)
            x[i] = to_float(p.v[i]);

        // Hide padding that the load brought. Comparisons of 64 bits would cost two instructions.
        if (V - v < P)
            for (int i = 1; i < P; i++)
                x[i] = unsigned(i) < unsigned(V - v) ? x[i] : -INFINITY;
        f(x);
    }
}
// The largest of P logits. A NaN is passed over: the sum of exponentials has it.
template <int P> __device__ float max_of(const float* x) {
    float max = x[0];
    for (int i = 1; i < P; i++)
        max = fmaxf(max, x[i]);
    return max;
}

// A block a row, as in all the kernels below.
template <typename T, int P>
__global__ void crossentropy_max_kernel(float* row_max, const T* logits, size_t V, size_t Vp) {
    // The sums stay 0 here: only the maxima join.
    MaxSum mine;
    for_each_logit<P>(logits + blockIdx.x * Vp, V, [&](const float* x) {
        float max = max_of<P>(x);
        mine.max = max > mine.max ? max : mine.max;
    });
    mine = block_join(mine);
    if (threadIdx.x == 0)
        row_max[blockIdx.x] = mine.max;
}

// Whether the shard has the target; its column.
__device__ inline bool in_shard(int target, size_t vocab_start, size_t V, size_t* own) {
    *own = size_t(target) - vocab_start;
    return target >= 0 && size_t(target) >= vocab_start && *own < V;
}

// A thread's part of a row: the sum below the maximum that `mine` brings, or (FIND) below the one
// found on the way.
template <int P, bool FIND, typename T>
__device__ MaxSum part_of_row(MaxSum mine, const T* row, size_t V) {
    for_each_logit<P>(row, V, [&](const float* x) {
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

// The sum alone, or (FIND) maximum and sum in one reading.
template <typename T, int P, bool FIND>
__global__ void crossentropy_sum_kernel(float* row_max, float* sum_exp, float* target_logit,
                                        const T* logits, const int* targets, size_t V, size_t Vp,
                                        size_t vocab_start) {
    size_t n = blockIdx.x, own;
    const T* row = logits + n * Vp; // (Vp)
    MaxSum mine;
    if (!FIND) mine.max = row_max[n];
    mine = block_join(part_of_row<P, FIND>(mine, row, V));

    // Write from one thread. Shards without the target give 0: their sum is the logit.
    if (threadIdx.x > 0) return;
    if (FIND) row_max[n] = mine.max;
    sum_exp[n] = mine.sum;
    target_logit[n] = in_shard(targets[n], vocab_start, V, &own) ? to_float(row[own]) : 0;
}

// A thread a row; all pointers are (N).
static __global__ void crossentropy_loss_kernel(float* losses, const float* row_max,
                                                const float* sum_exp, const float* target_logit,
                                                const int* targets, size_t N) {
    size_t n = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    // An ignored row has no loss.
    if (n < N)
        losses[n] = targets[n] < 0 ? 0 : logf(sum_exp[n]) + row_max[n] - target_logit[n];
}

// A row's gradient over its logits; each thread writes only what it has read. The row's end goes
// first: the second level cache may still have it from the reading before.
template <int P, typename T>
__device__ void backward_of_row(T* row, int target, MaxSum all, GradientScale gradient_scale,
                                size_t n, size_t V, size_t Vp, size_t vocab_start) {
    float scale = gradient_scale.of_row<float>(n);
    float factor = scale / all.sum;
    size_t own;
    bool here = in_shard(target, vocab_start, V, &own);

    // Reach all of Vp: the padding gets zeros, an ignored row nothing but zeros.
    for (size_t k = ceil_div(Vp, size_t(CROSSENTROPY_THREADS * P)); k-- > 0;) {
        size_t v = (k * CROSSENTROPY_THREADS + threadIdx.x) * P;
        if (v >= Vp) continue;
        Pack<T, P> p = {};
        if (target >= 0 && v < V) {
            p = load<P>(row + v);

            // Probabilities; at the target one less.
            bool own_is_mine = here && own - v < P;
            for (int i = 0; i < P; i++) {
                float d = exp_below(to_float(p.v[i]), all.max) * factor;
                if (own_is_mine && v + i == own) d -= scale;
                if (gradient_scale.softcap != 0) d *= gradient_scale.cap_slope(to_float(p.v[i]));
                p.v[i] = from_acc<T>(d);
            }

            // Clear what reaches into the padding.
            if (V - v < P)
                for (int i = 1; i < P; i++)
                    if (unsigned(i) >= unsigned(V - v))
                        p.v[i] = from_acc<T>(0);
        }
        store(row + v, p);
    }
}

// The last rows go first: the second level cache still has them from the forward pass.
template <typename T, int P>
__global__ void crossentropy_backward_kernel(T* logits, const int* targets, const float* row_max,
                                             const float* sum_exp, GradientScale scale, size_t V,
                                             size_t Vp, size_t vocab_start) {
    size_t n = gridDim.x - 1 - blockIdx.x;
    MaxSum all = {row_max[n], sum_exp[n]};
    backward_of_row<P>(logits + n * Vp, targets[n], all, scale, n, V, Vp, vocab_start);
}

// The second reading of a row comes from the second level cache.
template <typename T, int P>
__global__ void crossentropy_forward_backward_kernel(float* losses, T* logits, const int* targets,
                                                     GradientScale scale, size_t V, size_t Vp) {
    size_t n = blockIdx.x, own;
    T* row = logits + n * Vp; // (Vp)

    // Read the target's logit before block_join's barrier: after it the gradient may lie there.
    float target = in_shard(targets[n], 0, V, &own) ? to_float(row[own]) : 0;
    MaxSum all = block_join(part_of_row<P, true>(MaxSum(), row, V));
    if (threadIdx.x == 0)
        losses[n] = targets[n] < 0 ? 0 : logf(all.sum) + all.max - target;
    backward_of_row<P>(row, targets[n], all, scale, n, V, Vp, 0);
}

// One block: a warp a chunk, 32 chunks a round.
static __global__ void crossentropy_total_kernel(double* total, const float* losses, size_t N) {
    LLMC_SHARED(double, sums, 32);
    size_t lane = threadIdx.x % 32;
    size_t warp = threadIdx.x / 32;
    double all = 0;
    for (size_t start = 0; start < N; start += 32 * TOTAL_CHUNK) {
        // Sum this warp's chunk: a lane its own losses, then the lanes in order.
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

// In each launcher: 16 bytes a load where a row's length and start allow, else one element.
template <typename T>
void crossentropy_max(float* row_max, const T* logits, size_t N, size_t V, size_t Vp,
                      cudaStream_t stream) {
    auto run = [&](auto P) {
        launch(crossentropy_max_kernel<T, P>,
               unsigned(N), CROSSENTROPY_THREADS, 0, stream,
               row_max, logits, V, Vp);
    };
    can_vectorize<T>(Vp, logits) ? run(Int<VECTOR<T>>()) : run(Int<1>());
}

template <typename T>
void crossentropy_sum(float* sum_exp, float* target_logit, const T* logits, const int* targets,
                      const float* row_max, size_t N, size_t V, size_t Vp, size_t vocab_start,
                      cudaStream_t stream) {
    // The kernel writes row_max only where it looks for it (FIND), so the cast is safe.
    auto run = [&](auto P) {
        launch(crossentropy_sum_kernel<T, P, false>,
               unsigned(N), CROSSENTROPY_THREADS, 0, stream,
               const_cast<float*>(row_max), sum_exp, target_logit, logits, targets, V, Vp,
               vocab_start);
    };
    can_vectorize<T>(Vp, logits) ? run(Int<VECTOR<T>>()) : run(Int<1>());
}

// Where the vocabulary is whole.
template <typename T>
void crossentropy_max_sum(float* row_max, float* sum_exp, float* target_logit, const T* logits,
                          const int* targets, size_t N, size_t V, size_t Vp, cudaStream_t stream) {
    auto run = [&](auto P) {
        launch(crossentropy_sum_kernel<T, P, true>,
               unsigned(N), CROSSENTROPY_THREADS, 0, stream,
               row_max, sum_exp, target_logit, logits, targets, V, Vp, 0);
    };
    can_vectorize<T>(Vp, logits) ? run(Int<VECTOR<T>>()) : run(Int<1>());
}

// Call it when the shards' sums are joined.
inline void crossentropy_loss(float* losses, const float* row_max, const float* sum_exp,
                              const float* target_logit, const int* targets, size_t N,
                              cudaStream_t stream) {
    launch(crossentropy_loss_kernel,
           unsigned(ceil_div(N, 256)), 256, 0, stream,
           losses, row_max, sum_exp, target_logit, targets, N);
}

// In place, from the whole row's maximum and sum.
template <typename T>
void crossentropy_backward(T* logits, const int* targets, const float* row_max,
                           const float* sum_exp, GradientScale scale, size_t N, size_t V, size_t Vp,
                           size_t vocab_start, cudaStream_t stream) {
    auto run = [&](auto P) {
        launch(crossentropy_backward_kernel<T, P>,
               unsigned(N), CROSSENTROPY_THREADS, 0, stream,
               logits, targets, row_max, sum_exp, scale, V, Vp, vocab_start);
    };
    can_vectorize<T>(Vp, logits) ? run(Int<VECTOR<T>>()) : run(Int<1>());
}

// Where the vocabulary is whole: one launch, and no memory but the losses.
template <typename T>
void crossentropy_forward_backward(float* losses, T* logits, const int* targets,
                                   GradientScale scale, size_t N, size_t V, size_t Vp,
                                   cudaStream_t stream) {
    auto run = [&](auto P) {
        launch(crossentropy_forward_backward_kernel<T, P>,
               unsigned(N), CROSSENTROPY_THREADS, 0, stream,
               losses, logits, targets, scale, V, Vp);
    };
    can_vectorize<T>(Vp, logits) ? run(Int<VECTOR<T>>()) : run(Int<1>());
}

// One block, so that the order of the sum depends on N alone.
inline void crossentropy_total(double* total, const float* losses, size_t N, cudaStream_t stream) {
    launch(crossentropy_total_kernel,
           1, 1024, 0, stream,
           total, losses, N);
}
#endif

} // namespace llmc
