// rmsnorm.cuh - RMSNorm, forward and backward - arXiv:1910.07467
//   out = x * rstd * weight,   rstd = 1 / sqrt(mean(x * x) + eps)                            per
//   row of C
//   dx  = rstd * (g - xhat * mean(g * xhat)),   g = dout * weight,  xhat = x * rstd
//   inp, out, dinp, dout (N,C)   weight (C)   dweight (C) acc   rstd (N) acc, kept for backward
//   Contract: out, rstd =    dinp = dresidual + dx (dresidual may be dinp, or null)
//             dweight = or += (accumulate); null: frozen.  Bitwise repeatable for any number of
//             threads.
//   Cost: memory-bound. forward reads inp, writes out; backward_input reads inp, dout, dresidual,
//   writes dinp;
//         backward_weight reads inp, dout.
//   To copy: this file and common.h.
#pragma once
#include "common.h"

// ----------------------------------------------------------------------------
// CPU

template <typename T>
void rmsnorm_forward(T* out, acc_t<T>* rstd, const T* inp, const T* weight, // (N,C) (N) (N,C) (C)
                     size_t N, size_t C, float eps, Cpu) {
    typedef acc_t<T> A;
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const T* x = inp + n * C;
        T* y = out + n * C;
        A square = 0;
        #pragma omp simd reduction(+ : square)
        for (size_t c = 0; c < C; c++) square += to_acc(x[c]) * to_acc(x[c]);
        A r = 1 / std::sqrt(square / A(C) + A(eps));
        #pragma omp simd
        for (size_t c = 0; c < C; c++) y[c] = from_acc<T>(to_acc(x[c]) * r * to_acc(weight[c]));
        rstd[n] = r;
    }
}

template <typename T>
void rmsnorm_backward_input(T* dinp, const T* dresidual,
                            const T* dout, // (N,C) = (N,C) or null, (N,C)
                            const T* inp, const T* weight, const acc_t<T>* rstd, size_t N, size_t C,
                            Cpu) {
    typedef acc_t<T> A;
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const T *d = dout + n * C, *x = inp + n * C,
                *residual = dresidual ? dresidual + n * C : nullptr;
        T* dx = dinp + n * C;
        A r = rstd[n], sum = 0;
        #pragma omp simd reduction(+ : sum)
        for (size_t c = 0; c < C; c++) sum += to_acc(d[c]) * to_acc(weight[c]) * (to_acc(x[c]) * r);
        A mean_gx = sum / A(C);
        auto gradient = [&](size_t c) {
            return r * (to_acc(d[c]) * to_acc(weight[c]) - to_acc(x[c]) * r * mean_gx);
        };
        if (residual) {
            #pragma omp simd
            for (size_t c = 0; c < C; c++) dx[c] = from_acc<T>(to_acc(residual[c]) + gradient(c));
        } else {
            #pragma omp simd
            for (size_t c = 0; c < C; c++) dx[c] = from_acc<T>(gradient(c));
        }
    }
}

template <typename T>
void rmsnorm_backward_weight(acc_t<T>* dweight, const T* dout, const T* inp,
                             const acc_t<T>* rstd, void* /*scratch*/, // (C) = or +=
                             size_t N, size_t C, bool accumulate, Cpu) {
    typedef acc_t<T> A;
    if (!dweight) return;
    constexpr size_t COLUMNS =
        64; // a thread owns so many columns: the order of its sums is the rows'
    #pragma omp parallel for
    for (size_t c0 = 0; c0 < C; c0 += COLUMNS) {
        size_t count = C - c0 < COLUMNS ? C - c0 : COLUMNS;
        A dw[COLUMNS] = {};
        for (size_t n = 0; n < N; n++) {
            const T *d = dout + n * C + c0, *x = inp + n * C + c0;
            A r = rstd[n];
            #pragma omp simd
            for (size_t c = 0; c < count; c++) dw[c] += to_acc(d[c]) * (to_acc(x[c]) * r);
        }
        for (size_t c = 0; c < count; c++)
            dweight[c0 + c] = accumulate ? dweight[c0 + c] + dw[c] : dw[c];
    }
}
