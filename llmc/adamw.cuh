// adamw.cuh - AdamW with decoupled decay over float masters, and plain SGD - arXiv:1711.05101
//   g = grad * scale,   m = b1 m + (1-b1) g,   v = b2 v + (1-b2) g^2
//   w -= lr * ((m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps) + decay * w)
//   weight (n) T   master (n) float, or null where the weight is its own master
//   grad, m, v (n) acc   or a table of tensors in one bucket, in one call
//   scale: {scale, finite, step} as grad_norm_finish leaves them; null: 1, true, h.step
//   Contract: master, m, v updated, weight = the master rounded to nearest. Nothing is written when
//             !scale->finite, nor between a table's tensors. Bitwise repeatable: an element
//             depends on nothing but itself; where the square root, the division and fma are IEEE
//             (nvcc without -use_fast_math, a CPU) all versions give the same bits.
//             Without a master, bf16 and fp16 lose steps below half a unit in the last place.
//             With h.stochastic they round up as often as the remainder says, by 16 random bits
//             of (seed, step, name, global element): the layout does not change them.
//   Cost: memory-bound: reads grad, master, m, v; writes master, m, v, weight: 30 bytes a bf16
//         parameter, 24 without a master. The GPU reads the scale where the norm left it.
//   To copy: this file, grad_norm.cuh, loss_scale.cuh, rand.h, types.h and cuda_common.h.
#pragma once
#include "cuda_common.h"
#include "grad_norm.cuh"
#include "rand.h"

namespace llmc {

// The settings of a step; each tensor's row says whether it decays.
struct AdamW {
    float lr, beta1, beta2, eps, decay;
    bool stochastic = false; // rounding, where there is no master
    uint64_t seed = 0;       // of the rounding
    int64_t step = 1;        // this step's number, from 1, where no StepScale brings it
};

// ----------------------------------------------------------------------------
// one element: what both versions do to it

// This step's numbers; without a StepScale every gradient is taken as it is.
LLMC_HD inline StepScale this_step(const StepScale* scale, int64_t step) {
    return scale ? *scale : StepScale{0, 1, 1, step};
}

// The numbers of a step. Explicit fma: the compiler must not decide whether to contract.
template <typename A> struct AdamWStep {
    A scale, b1, b2, lr, eps;
    A correct1, correct2; // 1 / (1 - beta^t)
    LLMC_HD AdamWStep(const AdamW& h, const StepScale& now)
        : scale(now.scale), b1(h.beta1), b2(h.beta2), lr(h.lr), eps(h.eps),
          correct1(A(now.correct1 > 0 ? now.correct1 : bias_correction(h.beta1, now.step))),
          correct2(A(now.correct2 > 0 ? now.correct2 : bias_correction(h.beta2, now.step))) {}

    // Update the moments; return the new weight.
    LLMC_HD A operator()(A& m, A& v, A grad, A w, A decay) const {
        A g = grad * scale;
        m = std::fma(b1, m, (1 - b1) * g);
        v = std::fma(b2, v, (1 - b2) * g * g);
        // Undo the moments' pull towards the 0 they started from.
        A change = m * correct1 / (std::sqrt(v * correct2) + eps);
        return std::fma(-lr, std::fma(decay, w, change), w);
    }
};

// w - lr * (g + decay * w)
template <typename A>
LLMC_HD inline A sgd_element(A grad, A w, A scale, A lr, A decay) {
    return std::fma(-lr, std::fma(decay, w, grad * scale), w);
}

// The bits of the bf16 or fp16 above or below in magnitude, each as often as x is near it:
// `random` is in [0, 2^16).
LLMC_HD inline uint16_t stochastic_bf16(float x, uint32_t random) {
    uint32_t u = bits_as<uint32_t>(x);
    if ((u & 0x7f800000) == 0x7f800000) return from_acc<bf16>(x).bits; // infinity, NaN
    // A carry leaves the lower half as often as the remainder says.
    return uint16_t((u + random) >> 16);
}
LLMC_HD inline uint16_t stochastic_fp16(float x, uint32_t random) {
    uint32_t u = bits_as<uint32_t>(x);
    uint32_t sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;

    // 65504 and more round to nearest: there is none above. A normal number drops 13 bits.
    if (u >= 0x477fe000) return from_acc<fp16>(x).bits;
    if (u >= 0x38800000)
        return uint16_t(sign | ((u + (random >> 3) - 0x38000000) >> 13));

    // Count a subnormal in units of 2^-24, with 16 bits behind the point.
    return uint16_t(sign | ((uint32_t(bits_as<float>(u) * 0x1p40f) + random) >> 16));
}

// Round an element of 16 bits at random; wider ones have nothing to lose.
template <typename T>
LLMC_HD inline T round_stochastic(acc_t<T> x, uint32_t random) {
    if constexpr (type_of<T>() == Type::BF16)
        return bits_as<T>(stochastic_bf16(x, random));
    else if constexpr (type_of<T>() == Type::F16)
        return bits_as<T>(stochastic_fp16(x, random));
    else
        return from_acc<T>(x); // float and double are their own masters
}

// Sixteen random bits for each element; a block of Philox serves eight elements.
struct RoundingBits {
    uint64_t seed, hash;
    uint64_t block = ~uint64_t(0); // the one whose words are here
    RandomWords words = {};
    // The step is part of the seed, else an element would err the same way each time.
    LLMC_HD RoundingBits(const AdamW& h, int64_t step, uint64_t hash)
        : seed(h.seed ^ uint64_t(step) << 32), hash(hash) {}
    LLMC_HD uint32_t operator()(uint64_t element) {
        // Draw a block once for its eight elements.
        if (element / 8 != block) {
            block = element / 8;
            words = random_block(seed, hash, block);
        }

        // Pick by comparing, not by an index, so that the words stay in registers.
        uint32_t k = uint32_t(element % 8);
        uint32_t word = words[0];
        for (uint32_t i = 1; i < 4; i++)
            word = k / 2 == i ? words[int(i)] : word;
        return word >> (k % 2 * 16) & 0xffff;
    }
};

// ----------------------------------------------------------------------------
// CPU

template <typename T>
void adamw_update(T* weight, float* master,                       // a bucket's; master or null
                  const acc_t<T>* grad, acc_t<T>* m, acc_t<T>* v, // the bucket's
                  const TensorRow* rows, size_t count,            // (count)
                  AdamW h, const StepScale* scale, Cpu) {
    typedef acc_t<T> A;
    StepScale now = this_step(scale, h.step);
    // Skip the whole step: a NaN in the moments would stay for ever.
    if (!now.finite) return;

    // Walk the tensors; threads share out the elements of each.
    const AdamWStep<A> update(h, now);
    for (size_t r = 0; r < count; r++) {
        const TensorRow& row = rows[r];
        size_t from = row.offset, to = row.offset + row.n;
        A decay = row.decay ? h.decay : 0;

        if (master) {
            // The master takes the step; the weight is its copy.
            #pragma omp parallel for simd
            for (size_t i = from; i < to; i++) {
                A w = update(m[i], v[i], grad[i], A(master[i]), decay);
                master[i] = float(w);
                weight[i] = from_acc<T>(w);
            }
        } else if (h.stochastic) {
            // Round at random, by blocks of eight that share random words.
            #pragma omp parallel for
            for (size_t i = from; i < to; i += 8) {
                RoundingBits random(h, now.step, row.hash);
                for (size_t k = i; k < i + 8 && k < to; k++) {
                    A w = update(m[k], v[k], grad[k], to_acc(weight[k]), decay);
                    weight[k] = round_stochastic<T>(w, random(row.first + (k - from)));
                }
            }
        } else {
            // Round to nearest.
            #pragma omp parallel for simd
            for (size_t i = from; i < to; i++)
                weight[i] = from_acc<T>(update(m[i], v[i], grad[i], to_acc(weight[i]), decay));
        }
    }
}

// w -= lr * (g + decay * w)
template <typename T>
void sgd_update(T* weight, float* master, const acc_t<T>* grad, // a bucket's; master or null
                const TensorRow* rows, size_t count,            // (count)
                float lr, float decay, const StepScale* scale, Cpu) {
    typedef acc_t<T> A;
    // SGD has no moments, and so no step number to correct them by.
    StepScale now = this_step(scale, 0);
    if (!now.finite) return;

    // Walk the tensors; threads share out the elements of each.
    A s = now.scale;
    for (size_t r = 0; r < count; r++) {
        A row_decay = rows[r].decay ? decay : 0;
        #pragma omp parallel for simd
        for (size_t i = rows[r].offset; i < rows[r].offset + rows[r].n; i++) {
            // A master has the bits that the weight has lost.
            A w = master ? A(master[i]) : to_acc(weight[i]);
            w = sgd_element(grad[i], w, s, A(lr), row_decay);
            if (master) master[i] = float(w);
            weight[i] = from_acc<T>(w);
        }
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

constexpr int UPDATE_THREADS = 256;
constexpr unsigned UPDATE_BLOCKS = 2048; // at most: each walks chunks of the table

// f(row, i, left): every thread's elements of each row, P from i on, or as many as are left
template <int P, typename F>
__device__ void for_each_element(const TensorTable& table, F f) {
    for (size_t c = blockIdx.x; c < table.chunks; c += gridDim.x) {
        TensorChunk chunk = find_chunk(table, c);
        for (size_t i = chunk.from + threadIdx.x * P; i < chunk.to; i += UPDATE_THREADS * P)
            f(chunk.row, i, chunk.to - i);
    }
}

// P weights as float: the masters, or the weights themselves.
template <int P, typename T>
__device__ Pack<float, P> load_weights(const T* weight, const float* master, size_t count) {
    if (master) return load_some<P>(master, count);
    Pack<T, P> narrow = load_some<P>(weight, count);
    Pack<float, P> w;
    for (int k = 0; k < P; k++)
        w.v[k] = to_float(narrow.v[k]);
    return w;
}

// P elements a thread at a time; blocks walk the table's chunks.
//   weight, master, grad, m, v: the bucket's, each row `offset` elements into them
template <typename T, int P>
__global__ void adamw_update_kernel(T* weight, float* master, const float* grad, float* m, float* v,
                                    __grid_constant__ const TensorTable table, AdamW h,
                                    const StepScale* scale) {
    StepScale now = this_step(scale, h.step);
    if (!now.finite) return;
    const AdamWStep<float> update(h, now);
    for_each_element<P>(table, [&](const TensorRow& row, size_t i, size_t count) {
        size_t at = row.offset + i;
        float decay = row.decay ? h.decay : 0;

        // Read, and take the step.
        Pack<float, P> g = load_some<P>(grad + at, count);
        Pack<float, P> pm = load_some<P>(m + at, count);
        Pack<float, P> pv = load_some<P>(v + at, count);
        Pack<float, P> w = load_weights<P>(weight + at, master ? master + at : nullptr, count);
        for (int k = 0; k < P; k++)
            w.v[k] = update(pm.v[k], pv.v[k], g.v[k], w.v[k], decay);

        // Round.
        Pack<T, P> rounded;
        if (!master && h.stochastic) {
            // Number elements within their tensor: sharding changes no bit.
            RoundingBits random(h, now.step, row.hash);
            for (int k = 0; k < P; k++)
                rounded.v[k] = round_stochastic<T>(w.v[k], random(row.first + i + k));
        } else {
            for (int k = 0; k < P; k++)
                rounded.v[k] = from_acc<T>(w.v[k]);
        }

        // Write.
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
    StepScale now = this_step(scale, 0);
    if (!now.finite) return;
    for_each_element<P>(table, [&](const TensorRow& row, size_t i, size_t count) {
        size_t at = row.offset + i;
        float row_decay = row.decay ? decay : 0;

        // Read, take the step, round to nearest.
        Pack<float, P> g = load_some<P>(grad + at, count);
        Pack<float, P> w = load_weights<P>(weight + at, master ? master + at : nullptr, count);
        Pack<T, P> rounded;
        for (int k = 0; k < P; k++) {
            w.v[k] = sgd_element(g.v[k], w.v[k], now.scale, lr, row_decay);
            rounded.v[k] = from_acc<T>(w.v[k]);
        }

        // Write.
        if (master) store_some(master + at, w, count);
        store_some(weight + at, rounded, count);
    });
}

// ----------------------------------------------------------------------------
// launchers

// Blocks for a table: each walks several chunks where there are more of them than UPDATE_BLOCKS.
inline unsigned update_grid(const TensorTable& table) {
    return table.chunks < UPDATE_BLOCKS ? unsigned(table.chunks) : UPDATE_BLOCKS;
}

// A launch for 64 tensors.
template <typename T>
void adamw_update(T* weight, float* master, const float* grad, float* m, float* v,
                  const TensorRow* rows, size_t count, AdamW h, const StepScale* scale,
                  cudaStream_t stream) {
    for_each_table(rows, count, [&](const TensorTable& table, size_t) {
        // Four elements at a time: 16 bytes of all but a narrow weight.
        bool vector = can_vectorize<float>(0, weight, master, grad, m, v) && rows_aligned<4>(table);
        launch(vector ? adamw_update_kernel<T, 4> : adamw_update_kernel<T, 1>,
               update_grid(table), UPDATE_THREADS, 0, stream,
               weight, master, grad, m, v, table, h, scale);
    });
}

template <typename T>
void sgd_update(T* weight, float* master, const float* grad, const TensorRow* rows, size_t count,
                float lr, float decay, const StepScale* scale, cudaStream_t stream) {
    for_each_table(rows, count, [&](const TensorTable& table, size_t) {
        // Four elements at a time, as in AdamW's launcher.
        bool vector = can_vectorize<float>(0, weight, master, grad) && rows_aligned<4>(table);
        launch(vector ? sgd_update_kernel<T, 4> : sgd_update_kernel<T, 1>,
               update_grid(table), UPDATE_THREADS, 0, stream,
               weight, master, grad, table, lr, decay, scale);
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

} // namespace llmc
