// adamw.cuh - AdamW with decoupled decay over float masters, and plain SGD - arXiv:1711.05101
//   g = grad * scale,   m = b1 m + (1-b1) g,   v = b2 v + (1-b2) g^2
//   w -= lr * ((m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps) + decay * w)
//   weight (n) T   master (n) float, or null where the weight is its own master
//   grad, m, v (n) acc   or a table of tensors in one bucket, in one call
//   Contract: master, m, v updated, weight = the master rounded to nearest; nothing is written when
//             !scale->finite, nor between a table's tensors. Bitwise repeatable: an element
//             depends on nothing but itself; where the square root, the division and fma are IEEE
//             (nvcc without -use_fast_math, a CPU) all versions give the same bits.
//             Without a master, bf16 and fp16 lose steps below half a unit in the last place;
//             with h.stochastic they round up as often as the remainder says, by 16 random bits
//             of (seed, step, name, global element): the layout does not change them.
//   Cost: memory-bound: reads grad, master, m, v; writes master, m, v, weight: 30 bytes a bf16
//         parameter, 24 without a master. The GPU reads the scale where the norm left it.
//   To copy: this file, grad_norm.cuh, rand.h and common.h.
#pragma once
#include "common.h"
#include "grad_norm.cuh"
#include "rand.h"

struct AdamW {
    float lr, beta1, beta2, eps, decay;
    bool stochastic = false; // rounding, where there is no master
    uint64_t seed = 0;       // of the rounding
};

// ----------------------------------------------------------------------------
// one element: what both versions do to it

HD inline double power(double base, int64_t n) {
    double x = 1;
    for (; n > 0; n /= 2, base *= base)
        if (n % 2) x *= base;
    return x;
}

// The numbers of a step. Sums of products are written as fma, so that no compiler chooses.
template <typename A> struct AdamWStep {
    A scale, b1, b2, lr, eps, correct1, correct2;
    HD AdamWStep(const AdamW& h, float scale, int64_t step)
        : scale(scale),
          b1(h.beta1),
          b2(h.beta2),
          lr(h.lr),
          eps(h.eps),
          correct1(A(1 / (1 - power(double(h.beta1), step)))),
          correct2(A(1 / (1 - power(double(h.beta2), step)))) {}
    HD A operator()(A& m, A& v, A grad, A w, A decay) const {
        A g = grad * scale;
        m = std::fma(b1, m, (1 - b1) * g);
        v = std::fma(b2, v, (1 - b2) * g * g);
        A change = m * correct1 / (std::sqrt(v * correct2) + eps);
        return std::fma(-lr, std::fma(decay, w, change), w);
    }
};

template <typename A> HD inline A sgd_element(A grad, A w, A scale, A lr, A decay) {
    return std::fma(-lr, std::fma(decay, w, grad * scale), w);
}

// to the number above or below in magnitude, as often as near: `random` is in [0, 2^16)
template <typename T> HD inline T round_stochastic(acc_t<T> x, uint32_t) { return T(x); }
template <> HD inline bf16 round_stochastic<bf16>(float x, uint32_t random) {
    uint32_t u = bits_as<uint32_t>(x);
    if ((u & 0x7f800000) == 0x7f800000) return from_acc<bf16>(x); // infinity, NaN
    return {uint16_t((u + random) >> 16)};
}
template <> HD inline fp16 round_stochastic<fp16>(float x, uint32_t random) {
    uint32_t u = bits_as<uint32_t>(x), sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    if (u >= 0x477fe000) return from_acc<fp16>(x); // 65504 and more: there is none above
    if (u >= 0x38800000)                           // 13 bits are dropped
        return {uint16_t(sign | ((u + (random >> 3) - 0x38000000) >> 13))};
    // subnormal: units of 2^-24, with 16 bits behind the point
    return {uint16_t(sign | ((uint32_t(bits_as<float>(u) * 0x1p40f) + random) >> 16))};
}

// Sixteen random bits for each element; a block of Philox has eight elements'.
struct RoundingBits {
    uint64_t seed, hash, block = ~uint64_t(0);
    RandomWords words = {};
    HD RoundingBits(const AdamW& h, int64_t step, uint64_t hash)
        : seed(h.seed ^ uint64_t(step) << 32), hash(hash) {}
    HD uint32_t operator()(uint64_t element) {
        if (element / 8 != block) words = random_block(seed, hash, block = element / 8);
        uint32_t k = uint32_t(element % 8), word = words[0];
        for (uint32_t i = 1; i < 4; i++) word = k / 2 == i ? words[int(i)] : word; // in registers
        return word >> (k % 2 * 16) & 0xffff;
    }
};

// ----------------------------------------------------------------------------
// CPU

template <typename T>
void adamw_update(T* weight, float* master, const acc_t<T>* grad, acc_t<T>* m, acc_t<T>* v,
                  const TensorRow* rows, size_t count, AdamW h, const StepScale* scale, Cpu) {
    typedef acc_t<T> A;
    if (!scale->finite) return;
    const AdamWStep<A> update(h, scale->scale, scale->step);
    for (size_t r = 0; r < count; r++) {
        const TensorRow& row = rows[r];
        size_t from = row.offset, to = row.offset + row.n;
        A decay = row.decay ? h.decay : 0;
        if (master) {
            #pragma omp parallel for simd
            for (size_t i = from; i < to; i++) {
                A w = update(m[i], v[i], grad[i], A(master[i]), decay);
                master[i] = float(w);
                weight[i] = from_acc<T>(w);
            }
        } else if (h.stochastic) {
            #pragma omp parallel for
            for (size_t i = from; i < to; i += 8) {
                RoundingBits random(h, scale->step, row.hash);
                for (size_t k = i; k < i + 8 && k < to; k++)
                    weight[k] =
                        round_stochastic<T>(update(m[k], v[k], grad[k], to_acc(weight[k]), decay),
                                            random(row.first + (k - from)));
            }
        } else {
            #pragma omp parallel for simd
            for (size_t i = from; i < to; i++)
                weight[i] = from_acc<T>(update(m[i], v[i], grad[i], to_acc(weight[i]), decay));
        }
    }
}

// w -= lr * (g + decay * w)
template <typename T>
void sgd_update(T* weight, float* master, const acc_t<T>* grad, const TensorRow* rows, size_t count,
                float lr, float decay, const StepScale* scale, Cpu) {
    typedef acc_t<T> A;
    if (!scale->finite) return;
    A s = scale->scale;
    for (size_t r = 0; r < count; r++) {
        A row_decay = rows[r].decay ? decay : 0;
        #pragma omp parallel for simd
        for (size_t i = rows[r].offset; i < rows[r].offset + rows[r].n; i++) {
            A w = master ? A(master[i]) : to_acc(weight[i]);
            w = sgd_element(grad[i], w, s, A(lr), row_decay);
            if (master) master[i] = float(w);
            weight[i] = from_acc<T>(w);
        }
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if KERNELS

constexpr int UPDATE_THREADS = 256;
constexpr unsigned UPDATE_BLOCKS = 2048; // at most: each walks chunks of the table

// f(row, i, left): every thread's elements of each row, P from i on, or as many as are left
template <int P, typename F> __device__ void for_each_element(const TensorTable& table, F f) {
    for (size_t c = blockIdx.x; c < table.chunks; c += gridDim.x) {
        TensorChunk chunk = find_chunk(table, c);
        for (size_t i = chunk.from + threadIdx.x * P; i < chunk.to; i += UPDATE_THREADS * P)
            f(chunk.row, i, chunk.to - i);
    }
}

template <typename T, int P>
__global__ void adamw_update_kernel(T* weight, float* master, const float* grad, float* m, float* v,
                                    __grid_constant__ const TensorTable table, AdamW h,
                                    const StepScale* scale) {
    if (!scale->finite) return;
    const AdamWStep<float> update(h, scale->scale, scale->step);
    for_each_element<P>(table, [&](const TensorRow& row, size_t i, size_t count) {
        size_t at = row.offset + i;
        float decay = row.decay ? h.decay : 0;
        Pack<float, P> g = load_some<P>(grad + at, count), pm = load_some<P>(m + at, count),
                       pv = load_some<P>(v + at, count), w;
        Pack<T, P> rounded;
        if (master) {
            w = load_some<P>(master + at, count);
        } else {
            rounded = load_some<P>(weight + at, count);
            for (int k = 0; k < P; k++) w.v[k] = to_float(rounded.v[k]);
        }
        for (int k = 0; k < P; k++) w.v[k] = update(pm.v[k], pv.v[k], g.v[k], w.v[k], decay);
        if (!master && h.stochastic) {
            RoundingBits random(h, scale->step, row.hash);
            for (int k = 0; k < P; k++)
                rounded.v[k] = round_stochastic<T>(w.v[k], random(row.first + i + k));
        } else {
            for (int k = 0; k < P; k++) rounded.v[k] = from_acc<T>(w.v[k]);
        }
        store_some(m + at, pm, count);
        store_some(v + at, pv, count);
        if (master) store_some(master + at, w, count);
        store_some(weight + at, rounded, count);
    });
}

template <typename T, int P>
__global__ void sgd_update_kernel(T* weight, float* master, const float* grad,
                                  __grid_constant__ const TensorTable table, float lr, float decay,
                                  const StepScale* scale) {
    if (!scale->finite) return;
    float s = scale->scale;
    for_each_element<P>(table, [&](const TensorRow& row, size_t i, size_t count) {
        size_t at = row.offset + i;
        float row_decay = row.decay ? decay : 0;
        Pack<float, P> g = load_some<P>(grad + at, count), w;
        Pack<T, P> rounded;
        if (master) {
            w = load_some<P>(master + at, count);
        } else {
            rounded = load_some<P>(weight + at, count);
            for (int k = 0; k < P; k++) w.v[k] = to_float(rounded.v[k]);
        }
        for (int k = 0; k < P; k++) {
            w.v[k] = sgd_element(g.v[k], w.v[k], s, lr, row_decay);
            rounded.v[k] = from_acc<T>(w.v[k]);
        }
        if (master) store_some(master + at, w, count);
        store_some(weight + at, rounded, count);
    });
}

// ----------------------------------------------------------------------------
// launchers

inline unsigned update_grid(const TensorTable& table) {
    return table.chunks < UPDATE_BLOCKS ? unsigned(table.chunks) : UPDATE_BLOCKS;
}

template <typename T>
void adamw_update(T* weight, float* master, const float* grad, float* m, float* v,
                  const TensorRow* rows, size_t count, AdamW h, const StepScale* scale,
                  cudaStream_t stream) {
    for_each_table(rows, count, [&](const TensorTable& table, size_t) {
        // four elements: 16 bytes of all but a narrow weight
        bool vector = can_vectorize<float>(0, weight, master, grad, m, v) && rows_aligned<4>(table);
        launch(vector ? adamw_update_kernel<T, 4> : adamw_update_kernel<T, 1>, update_grid(table),
               UPDATE_THREADS, 0, stream, weight, master, grad, m, v, table, h, scale);
    });
}

template <typename T>
void sgd_update(T* weight, float* master, const float* grad, const TensorRow* rows, size_t count,
                float lr, float decay, const StepScale* scale, cudaStream_t stream) {
    for_each_table(rows, count, [&](const TensorTable& table, size_t) {
        bool vector = can_vectorize<float>(0, weight, master, grad) && rows_aligned<4>(table);
        launch(vector ? sgd_update_kernel<T, 4> : sgd_update_kernel<T, 1>, update_grid(table),
               UPDATE_THREADS, 0, stream, weight, master, grad, table, lr, decay, scale);
    });
}
#endif

// ----------------------------------------------------------------------------
// one tensor is a table of one row

template <typename T, typename S>
void adamw_update(T* weight, float* master, const acc_t<T>* grad, acc_t<T>* m, acc_t<T>* v,
                  size_t n, AdamW h, const StepScale* scale, S where) {
    TensorRow row = {0, n};
    adamw_update(weight, master, grad, m, v, &row, 1, h, scale, where);
}

template <typename T, typename S>
void sgd_update(T* weight, float* master, const acc_t<T>* grad, size_t n, float lr, float decay,
                const StepScale* scale, S where) {
    TensorRow row = {0, n};
    sgd_update(weight, master, grad, &row, 1, lr, decay, scale, where);
}
