// crossentropy.cuh - cross-entropy over rows of logits, split for a sharded vocabulary - arXiv:1909.08053
//   loss = log(sum_v exp(l_v)) - l_target,   dl_v = (exp(l_v) / sum - [v = target]) * scale
//   1. max     row maximum                           (vocabulary-parallel: all-reduce max)
//   2. sum     sum of exp(l - max), target logit     (all-reduce sum)
//      max_sum is both in one reading, where the vocabulary is whole
//   3. loss, backward
//   logits (N,Vp), columns from V on are padding   row_max, sum_exp, target_logit, losses (N) acc
//   targets (N), negative: ignored, loss and gradient 0; a shard holds V columns from vocab_start
//   Contract: all =;  backward writes the gradient over the logits, padding included.
//             A shard may have no column (V 0). A logit of -inf has probability 0; a row of nothing else has no loss (NaN).
//             Bitwise repeatable; total has the same bits in all versions.
//   Cost: memory-bound: max, sum and max_sum read the logits, backward reads and writes them.
//   To copy: this file and common.h.
#pragma once
#include "common.h"

// ----------------------------------------------------------------------------
// CPU

// The bits of a 16-bit element as a number of the same order (a NaN is beyond an infinity), and back:
// the largest of 32 in one instruction.
inline int16_t ordered(int16_t bits) { return bits ^ ((bits >> 15) & 0x7fff); }

template <typename T>
void crossentropy_max(acc_t<T>* row_max, const T* logits, size_t N, size_t V, size_t Vp, Cpu) {
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const T* l = logits + n * Vp;
        if constexpr (sizeof(T) == 2) {
            int16_t most = ordered(int16_t(from_acc<T>(-INFINITY).bits)); // where V is 0
            #pragma omp simd reduction(max : most)
            for (size_t v = 0; v < V; v++) {
                int16_t x = ordered(int16_t(l[v].bits));
                most = x > most ? x : most;
            }
            row_max[n] = to_acc(T{uint16_t(ordered(most))});
        } else {
            acc_t<T> most = -INFINITY;
            #pragma omp simd reduction(max : most)
            for (size_t v = 0; v < V; v++) most = to_acc(l[v]) > most ? to_acc(l[v]) : most;
            row_max[n] = most;
        }
    }
}

template <typename T>
void crossentropy_sum(acc_t<T>* sum_exp, acc_t<T>* target_logit, const T* logits,
                      const int* targets, const acc_t<T>* row_max, size_t N, size_t V, size_t Vp,
                      size_t vocab_start, Cpu) {
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const T* l = logits + n * Vp;
        acc_t<T> sum = 0, m = row_max[n];
        #pragma omp simd reduction(+ : sum)
        for (size_t v = 0; v < V; v++) sum += fast_exp_low(to_acc(l[v]) - m);
        sum_exp[n] = sum;
        int64_t own = int64_t(targets[n]) - int64_t(vocab_start);
        target_logit[n] = targets[n] >= 0 && own >= 0 && own < int64_t(V) ? to_acc(l[own]) : 0;
    }
}

template <typename A>
void crossentropy_loss(A* losses, const A* row_max, const A* sum_exp, const A* target_logit,
                       const int* targets, size_t N, Cpu) {
    for (size_t n = 0; n < N; n++)
        losses[n] = targets[n] < 0 ? 0 : std::log(sum_exp[n]) + row_max[n] - target_logit[n];
}

template <typename T>
void crossentropy_backward(T* logits, const int* targets, const acc_t<T>* row_max,
                           const acc_t<T>* sum_exp, acc_t<T> scale, size_t N, size_t V, size_t Vp,
                           size_t vocab_start, Cpu) {
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        T* l = logits + n * Vp;
        if (targets[n] < 0) {
            memset(l, 0, Vp * sizeof(T));
            continue;
        }
        acc_t<T> m = row_max[n], factor = scale / sum_exp[n];
        int64_t own = int64_t(targets[n]) - int64_t(vocab_start);
        bool here = own >= 0 && own < int64_t(V);
        acc_t<T> target = here ? to_acc(l[own]) : 0;
        #pragma omp simd
        for (size_t v = 0; v < V; v++) l[v] = from_acc<T>(fast_exp_low(to_acc(l[v]) - m) * factor);
        for (size_t v = V; v < Vp; v++) l[v] = from_acc<T>(0);
        if (here) l[own] = from_acc<T>(fast_exp_low(target - m) * factor - scale);
    }
}

// Row sums of both kinds in one reading of the logits: a row stays in the cache for the second.
template <typename T>
void crossentropy_max_sum(acc_t<T>* row_max, acc_t<T>* sum_exp, acc_t<T>* target_logit,
                          const T* logits, const int* targets, size_t N, size_t V, size_t Vp,
                          Cpu where) {
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        crossentropy_max(row_max + n, logits + n * Vp, 1, V, Vp, where);
        crossentropy_sum(sum_exp + n, target_logit + n, logits + n * Vp, targets + n, row_max + n,
                         1, V, Vp, 0, where);
    }
}

// total = the sum of the losses in double: a chunk's losses go round 32 sums, and these, and then
// the chunks, are added in order
constexpr size_t TOTAL_CHUNK = 4096;
template <typename A> void crossentropy_total(double* total, const A* losses, size_t N, Cpu) {
    *total = 0;
    for (size_t from = 0; from < N; from += TOTAL_CHUNK) {
        size_t to = from + TOTAL_CHUNK < N ? from + TOTAL_CHUNK : N;
        double lanes[32] = {}, sum = 0;
        for (size_t n = from; n < to; n++) lanes[n % 32] += losses[n];
        for (double lane : lanes) sum += lane;
        *total += sum;
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if KERNELS

constexpr int CROSSENTROPY_WARPS = 16; // of a block; a block has a row
constexpr unsigned CROSSENTROPY_THREADS = CROSSENTROPY_WARPS * 32;

// What is known of some logits: their maximum, and the sum of exp(logit - maximum).
struct MaxSum {
    float max = -INFINITY, sum = 0;
};
// exp(x - max), 0 for a logit of -inf, also where there has been nothing else
__device__ inline float exp_below(float x, float max) {
    return __expf(x - (max == -INFINITY ? 0 : max));
}
// symmetric: a butterfly gives all lanes the same bits
__device__ inline MaxSum join(MaxSum a, MaxSum b) {
    float max = b.max > a.max ? b.max : a.max;
    return {max, a.sum * exp_below(a.max, max) + b.sum * exp_below(b.max, max)};
}
// Over the block, for every thread; all of them must call it, once.
__device__ inline MaxSum block_join(MaxSum x) {
    SHARED(MaxSum, warps, CROSSENTROPY_WARPS);
    for (int mask = 16; mask > 0; mask /= 2)
        x = join(
            x, {__shfl_xor_sync(ALL_LANES, x.max, mask), __shfl_xor_sync(ALL_LANES, x.sum, mask)});
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads(); // those of all warps are there
    MaxSum all;
    for (int w = 0; w < CROSSENTROPY_WARPS; w++) all = join(all, warps[w]);
    return all;
}

// f(logits, count): the block's threads share out the V first logits of a row, P at a time; Vp is a
// multiple of P, so a load may reach into the padding
template <int P, typename T, typename F>
__device__ void for_each_logit(const T* row, size_t V, F f) {
    for (size_t v = threadIdx.x * P; v < V; v += CROSSENTROPY_THREADS * P) {
        Pack<T, P> p = load<P>(row + v);
        float x[P];
        for (int i = 0; i < P; i++) x[i] = to_float(p.v[i]);
        if (V - v < P)
            for (int i = 1; i < P; i++) x[i] = size_t(i) < V - v ? x[i] : -INFINITY;
        f(x);
    }
}
template <int P> __device__ float max_of(const float* x) {
    float max = x[0];
    for (int i = 1; i < P; i++) max = x[i] > max ? x[i] : max;
    return max;
}

template <typename T, int P>
__global__ void crossentropy_max_kernel(float* row_max, const T* logits, size_t V, size_t Vp) {
    MaxSum mine;
    for_each_logit<P>(logits + blockIdx.x * Vp, V, [&](const float* x) {
        float max = max_of<P>(x);
        mine.max = max > mine.max ? max : mine.max;
    });
    mine = block_join(mine);
    if (threadIdx.x == 0) row_max[blockIdx.x] = mine.max;
}

__device__ inline bool in_shard(int target, size_t vocab_start, size_t V, size_t* own) {
    *own = size_t(target) - vocab_start;
    return target >= 0 && size_t(target) >= vocab_start && *own < V;
}

// The sum below a maximum that is given, or (FIND) below one found on the way.
template <typename T, int P, bool FIND>
__global__ void crossentropy_sum_kernel(float* row_max, float* sum_exp, float* target_logit,
                                        const T* logits, const int* targets, size_t V, size_t Vp,
                                        size_t vocab_start) {
    size_t n = blockIdx.x, own;
    const T* row = logits + n * Vp;
    MaxSum mine;
    if (!FIND) mine.max = row_max[n];
    for_each_logit<P>(row, V, [&](const float* x) {
        float max = FIND ? max_of<P>(x) : mine.max;
        if (max > mine.max) mine.sum *= exp_below(mine.max, max), mine.max = max;
        for (int i = 0; i < P; i++) mine.sum += exp_below(x[i], mine.max);
    });
    mine = block_join(mine);
    if (threadIdx.x > 0) return;
    if (FIND) row_max[n] = mine.max;
    sum_exp[n] = mine.sum;
    target_logit[n] = in_shard(targets[n], vocab_start, V, &own) ? to_float(row[own]) : 0;
}

static __global__ void crossentropy_loss_kernel(float* losses, const float* row_max,
                                                const float* sum_exp, const float* target_logit,
                                                const int* targets, size_t N) {
    size_t n = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (n < N) losses[n] = targets[n] < 0 ? 0 : logf(sum_exp[n]) + row_max[n] - target_logit[n];
}

// The last rows first: they are what the second level cache still has of the forward pass.
template <typename T, int P>
__global__ void crossentropy_backward_kernel(T* logits, const int* targets, const float* row_max,
                                             const float* sum_exp, float scale, size_t V, size_t Vp,
                                             size_t vocab_start) {
    size_t n = gridDim.x - 1 - blockIdx.x, own;
    T* row = logits + n * Vp;
    int target = targets[n];
    float max = row_max[n], factor = scale / sum_exp[n];
    bool here = in_shard(target, vocab_start, V, &own);
    for (size_t v = threadIdx.x * P; v < Vp; v += CROSSENTROPY_THREADS * P) {
        Pack<T, P> p = {};
        if (target >= 0 && v < V) {
            p = load<P>(row + v);
            bool own_is_mine = here && own - v < P;
            for (int i = 0; i < P; i++) {
                float d = exp_below(to_float(p.v[i]), max) * factor;
                if (own_is_mine && v + i == own) d -= scale;
                p.v[i] = from_acc<T>(d);
            }
            if (V - v < P)
                for (int i = 1; i < P; i++)
                    if (size_t(i) >= V - v) p.v[i] = from_acc<T>(0);
        }
        store(row + v, p);
    }
}

// One block; a warp a chunk, 32 chunks a round.
static __global__ void crossentropy_total_kernel(double* total, const float* losses, size_t N) {
    SHARED(double, sums, 32);
    size_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    double all = 0;
    for (size_t start = 0; start < N; start += 32 * TOTAL_CHUNK) {
        size_t from = start + warp * TOTAL_CHUNK,
               to = from + TOTAL_CHUNK < N ? from + TOTAL_CHUNK : N;
        double x = 0, sum = 0;
        for (size_t n = from + lane; n < to; n += 32) x += losses[n];
        for (int l = 0; l < 32; l++) sum += __shfl_sync(ALL_LANES, x, l);
        if (lane == 0) sums[warp] = sum;
        __syncthreads(); // the sums of all chunks are there
        for (int w = 0; threadIdx.x == 0 && w < 32 && start + w * TOTAL_CHUNK < N; w++)
            all += sums[w];
        __syncthreads(); // and read
    }
    if (threadIdx.x == 0) *total = all;
}

// ----------------------------------------------------------------------------
// launchers

template <typename T>
void crossentropy_max(float* row_max, const T* logits, size_t N, size_t V, size_t Vp,
                      cudaStream_t stream) {
    auto run = [&](auto P) {
        launch(crossentropy_max_kernel<T, P>, unsigned(N), CROSSENTROPY_THREADS, 0, stream, row_max,
               logits, V, Vp);
    };
    can_vectorize<T>(Vp, logits) ? run(Int<VECTOR<T>>()) : run(Int<1>());
}

template <typename T>
void crossentropy_sum(float* sum_exp, float* target_logit, const T* logits, const int* targets,
                      const float* row_max, size_t N, size_t V, size_t Vp, size_t vocab_start,
                      cudaStream_t stream) {
    auto run = [&](auto P) {
        launch(crossentropy_sum_kernel<T, P, false>, unsigned(N), CROSSENTROPY_THREADS, 0, stream,
               const_cast<float*>(row_max), sum_exp, target_logit, logits, targets, V, Vp,
               vocab_start);
    };
    can_vectorize<T>(Vp, logits) ? run(Int<VECTOR<T>>()) : run(Int<1>());
}

template <typename T>
void crossentropy_max_sum(float* row_max, float* sum_exp, float* target_logit, const T* logits,
                          const int* targets, size_t N, size_t V, size_t Vp, cudaStream_t stream) {
    auto run = [&](auto P) {
        launch(crossentropy_sum_kernel<T, P, true>, unsigned(N), CROSSENTROPY_THREADS, 0, stream,
               row_max, sum_exp, target_logit, logits, targets, V, Vp, 0);
    };
    can_vectorize<T>(Vp, logits) ? run(Int<VECTOR<T>>()) : run(Int<1>());
}

inline void crossentropy_loss(float* losses, const float* row_max, const float* sum_exp,
                              const float* target_logit, const int* targets, size_t N,
                              cudaStream_t stream) {
    launch(crossentropy_loss_kernel, unsigned(ceil_div(N, size_t(256))), 256, 0, stream, losses,
           row_max, sum_exp, target_logit, targets, N);
}

template <typename T>
void crossentropy_backward(T* logits, const int* targets, const float* row_max,
                           const float* sum_exp, float scale, size_t N, size_t V, size_t Vp,
                           size_t vocab_start, cudaStream_t stream) {
    auto run = [&](auto P) {
        launch(crossentropy_backward_kernel<T, P>, unsigned(N), CROSSENTROPY_THREADS, 0, stream,
               logits, targets, row_max, sum_exp, scale, V, Vp, vocab_start);
    };
    can_vectorize<T>(Vp, logits) ? run(Int<VECTOR<T>>()) : run(Int<1>());
}

inline void crossentropy_total(double* total, const float* losses, size_t N, cudaStream_t stream) {
    launch(crossentropy_total_kernel, 1, 1024, 0, stream, total, losses, N);
}
#endif
