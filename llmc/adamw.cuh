// adamw.cuh - AdamW with decoupled decay over float master weights, and plain SGD -
// arXiv:1711.05101
//   g = grad * scale;  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2
//   w -= lr * ((m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps) + decay * w)
//   weight (n) T   master (n) float, or null where the weight is its own master   grad, m, v (n)
//   acc
//   Contract: master, m, v updated, weight = the master rounded to nearest; nothing is written when
//   !scale->finite.
//             Bitwise repeatable; an element depends on nothing but itself.
//   Cost: memory-bound: reads grad, master, m, v; writes master, m, v, weight: 30 bytes a bf16
//   parameter.
//   To copy: this file, grad_norm.cuh and common.h.
#pragma once
#include "common.h"
#include "grad_norm.cuh"

struct AdamW {
    float lr, beta1, beta2, eps, decay;
};

// ----------------------------------------------------------------------------
// CPU

template <typename T>
void adamw_update(T* weight, float* master, const acc_t<T>* grad, acc_t<T>* m, acc_t<T>* v,
                  size_t n, AdamW h, const StepScale* scale, Cpu) {
    typedef acc_t<T> A;
    if (!scale->finite) return;
    A s = scale->scale, b1 = h.beta1, b2 = h.beta2, lr = h.lr, eps = h.eps, decay = h.decay;
    A correct1 = A(1 / (1 - std::pow(double(h.beta1), double(scale->step))));
    A correct2 = A(1 / (1 - std::pow(double(h.beta2), double(scale->step))));
    auto update = [=](size_t i, A w) {
        A g = grad[i] * s;
        m[i] = b1 * m[i] + (1 - b1) * g;
        v[i] = b2 * v[i] + (1 - b2) * g * g;
        return w - lr * (m[i] * correct1 / (std::sqrt(v[i] * correct2) + eps) + decay * w);
    };
    if (master) {
        #pragma omp parallel for simd
        for (size_t i = 0; i < n; i++) {
            A w = update(i, master[i]);
            master[i] = float(w);
            weight[i] = from_acc<T>(w);
        }
    } else {
        #pragma omp parallel for simd
        for (size_t i = 0; i < n; i++) weight[i] = from_acc<T>(update(i, to_acc(weight[i])));
    }
}

// w -= lr * (g + decay * w)
template <typename T>
void sgd_update(T* weight, float* master, const acc_t<T>* grad, size_t n, float lr, float decay,
                const StepScale* scale, Cpu) {
    typedef acc_t<T> A;
    if (!scale->finite) return;
    A s = scale->scale;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) {
        A w = master ? A(master[i]) : to_acc(weight[i]);
        w -= A(lr) * (grad[i] * s + A(decay) * w);
        if (master) master[i] = float(w);
        weight[i] = from_acc<T>(w);
    }
}
