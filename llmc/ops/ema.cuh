// ema.cuh - a running mean of weights beside training's - arXiv:1803.05407, arXiv:2312.02696
//   e <- b e + (1 - b) w,   b = min(decay, (1 + s) / (10 + s)),   s the steps done before this one
//   The early b is smaller, so that the weights a run starts from are soon forgotten; b reaches a
//   decay of 0.999 after 9,000 steps.
//   mean (n) acc   weight (n)   master (n) float, or the 16 bits that a bf16 lacks; null: none
//   Contract: mean =.  Nothing is written if !scale->finite, as the optimizer does. An element's
//             result depends on nothing but the element and s, so every shard and every chunk has
//             the same bits. CPU and GPU have the same bits.
//   Cost: memory-bound: 8 bytes and a weight's master for each element.
//   To copy: this file, element_type.h, elements.h, small_states.cuh, step_scale.h,
//            types.h and cuda_common.h.
#pragma once
#include "cuda_common.h"
#include "element_type.h"
#include "elements.h"
#include "small_states.cuh"
#include "step_scale.h"
#include "types.h"

namespace llmc {

// A bucket's weights, as exact as they are kept.
template <typename T> struct WeightMemory {
    const T* weight;
    const void* master; // float or uint16_t, as `masters` says; null: the weight is the master
    Masters masters = Masters::FLOAT;
};

// Weight i, joined with its master.
template <typename T> LLMC_HD acc_t<T> weight_at(const WeightMemory<T>& x, size_t i) {
    if constexpr (type_of<T>() == Type::BF16)
        if (x.masters == Masters::REMAINDER)
            return join_float({x.weight[i].bits, static_cast<const uint16_t*>(x.master)[i]});
    return x.master ? acc_t<T>(static_cast<const float*>(x.master)[i]) : to_acc(x.weight[i]);
}

// The share 1 - b by which the mean moves to the weights at a step, counted from 1.
LLMC_HD inline double ema_share(double decay, int64_t step) {
    double early = double(step) / double(9 + step);
    return 1 - (early < decay ? early : decay);
}

// One element. fma is written out, so that every version rounds alike.
template <typename A> LLMC_HD A ema_element(A mean, A weight, A share) {
    return std::fma(share, weight - mean, mean);
}

// ----------------------------------------------------------------------------
// CPU

// Move the mean of n weights.
template <typename T>
void ema_update(acc_t<T>* mean, const WeightMemory<T>& x, size_t n, double decay, // (n)
                const StepScale* scale, Cpu) {
    // A step that was skipped has changed no weight, and is not counted.
    if (!scale->finite) return;
    acc_t<T> share = acc_t<T>(ema_share(decay, scale->step));
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++)
        mean[i] = ema_element(mean[i], weight_at(x, i), share);
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

// The P weights from i on, of which `count` exist: all loads are under way before one is used.
template <int P, typename T>
__device__ Pack<float, P> weights_at(const WeightMemory<T>& x, size_t i, size_t count) {
    bool joined = x.masters == Masters::REMAINDER;
    if (x.master && !joined)
        return load_some<P>(static_cast<const float*>(x.master) + i, count);
    Pack<float, P> all;
    Pack<T, P> weight = load_some<P>(x.weight + i, count);
    if constexpr (type_of<T>() == Type::BF16)
        if (joined) {
            auto low = load_some<P>(static_cast<const uint16_t*>(x.master) + i, count);
            for (int k = 0; k < P; k++)
                all.v[k] = join_float({weight.v[k].bits, low.v[k]});
            return all;
        }
    for (int k = 0; k < P; k++)
        all.v[k] = to_float(weight.v[k]);
    return all;
}

template <typename T, int P>
__global__ void ema_update_kernel(float* mean, WeightMemory<T> x, size_t n, double decay,
                                  const StepScale* scale) {
    size_t i = first_element<P>();
    if (i >= n || !scale->finite) return;
    Pack<float, P> e = load_some<P>(mean + i, n - i);
    Pack<float, P> weight = weights_at<P>(x, i, n - i);
    float share = float(ema_share(decay, scale->step));
    for (int k = 0; k < P; k++)
        e.v[k] = ema_element(e.v[k], weight.v[k], share);
    store_some(mean + i, e, n - i);
}

// ----------------------------------------------------------------------------
// launchers

template <typename T>
void ema_update(float* mean, const WeightMemory<T>& x, size_t n, double decay,
                const StepScale* scale, cudaStream_t stream) {
    // A rank may update no element of a bucket; then nothing is launched.
    const unsigned char* master = static_cast<const unsigned char*>(x.master);
    pick_element_kernel<float>(n, can_vectorize<float>(0, mean, x.weight, master),
                               [&](auto P, unsigned grid) {
        launch(ema_update_kernel<T, P>, grid, ELEMENT_THREADS, stream, mean, x, n, decay, scale);
    });
}
#endif

} // namespace llmc
