// grad_norm.cuh - the global gradient norm, the clipping factor, and whether all is finite
//   norm = sqrt(sum g^2),  scale = min(1, clip / norm)   - arXiv:1211.5063
//   grad (n)   sums: one double per chunk of 4096 elements, so that the sum does not depend on how
//   it is shared out
//   Contract: sums =; finish adds them in order and writes {norm, scale, finite}; step counts
//   finite steps.
//   Cost: reads grad.
//   To copy: this file and common.h.
#pragma once
#include "common.h"

constexpr size_t GRAD_NORM_CHUNK = 4096;

// Written by the norm, read by the optimizer; stays where the gradients are, so that no step waits
// for the host.
struct StepScale {
    double norm;
    float scale;  // what gradients are multiplied with
    int finite;   // 0: the optimizer writes nothing
    int64_t step; // optimizer steps done, this one included
};

// ----------------------------------------------------------------------------
// CPU

template <typename A> void grad_squares(double* sums, const A* grad, size_t n, Cpu) {
    #pragma omp parallel for
    for (size_t chunk = 0; chunk < ceil_div(n, GRAD_NORM_CHUNK); chunk++) {
        size_t from = chunk * GRAD_NORM_CHUNK,
               to = from + GRAD_NORM_CHUNK < n ? from + GRAD_NORM_CHUNK : n;
        double sum = 0;
        #pragma omp simd reduction(+ : sum)
        for (size_t i = from; i < to; i++) sum += double(grad[i]) * double(grad[i]);
        sums[chunk] = sum;
    }
}

inline void grad_norm_finish(StepScale* out, const double* sums, size_t count, float clip, Cpu) {
    double sum = 0;
    for (size_t i = 0; i < count; i++) sum += sums[i];
    out->norm = std::sqrt(sum);
    out->finite = std::isfinite(sum);
    out->scale = clip > 0 && out->norm > clip ? float(clip / out->norm) : 1.0f;
    out->step += out->finite;
}

// grad += other: the two gradients of a tied table
template <typename A> void add_gradients(A* grad, const A* other, size_t n, Cpu) {
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) grad[i] += other[i];
}
