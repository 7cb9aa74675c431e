// layernorm.cuh - LayerNorm, forward and backward - arXiv:1607.06450
//   out = (x - mean(x)) * rstd * weight + bias,   rstd = 1 / sqrt(var(x) + eps)              per
//   row of C
//   dx  = rstd * (g - mean(g) - xhat * mean(g * xhat)),   g = dout * weight,  xhat = (x - mean) *
//   rstd
//   inp, out, dinp, dout (N,C)   weight, bias (C)   dweight, dbias (C) acc   mean, rstd (N) acc,
//   kept for backward
//   Contract: out, mean, rstd =    dinp = dresidual + dx (dresidual may be dinp, or null)
//             dweight, dbias = or += (accumulate); null: frozen.  Bitwise repeatable for any number
//             of threads.
//   Cost: memory-bound. forward reads inp, writes out; backward_input reads inp, dout, dresidual,
//   writes dinp;
//         backward_weight reads inp, dout.
//   To copy: this file and common.h.
#pragma once
#include <type_traits>
#include "common.h"

// ----------------------------------------------------------------------------
// CPU

template <typename T>
void layernorm_forward(T* out, acc_t<T>* mean, acc_t<T>* rstd,       // (N,C) (N) (N)
                       const T* inp, const T* weight, const T* bias, // (N,C) (C) (C)
                       size_t N, size_t C, float eps, Cpu) {
    typedef acc_t<T> A;
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const T* x = inp + n * C;
        T* y = out + n * C;
        // Mean, then the variance around it: exact where one pass over x*x would cancel.
        A sum = 0, square = 0;
        #pragma omp simd reduction(+ : sum)
        for (size_t c = 0; c < C; c++) sum += to_acc(x[c]);
        A m = sum / A(C);
        #pragma omp simd reduction(+ : square)
        for (size_t c = 0; c < C; c++) square += (to_acc(x[c]) - m) * (to_acc(x[c]) - m);
        A r = 1 / std::sqrt(square / A(C) + A(eps));
        #pragma omp simd
        for (size_t c = 0; c < C; c++)
            y[c] = from_acc<T>((to_acc(x[c]) - m) * r * to_acc(weight[c]) + to_acc(bias[c]));
        mean[n] = m;
        rstd[n] = r;
    }
}

template <typename T>
void layernorm_backward_input(T* dinp, const T* dresidual,
                              const T* dout,                 // (N,C) = (N,C) or null, (N,C)
                              const T* inp, const T* weight, // (N,C) (C)
                              const acc_t<T>* mean, const acc_t<T>* rstd, size_t N, size_t C, Cpu) {
    typedef acc_t<T> A;
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const T *d = dout + n * C, *x = inp + n * C,
                *residual = dresidual ? dresidual + n * C : nullptr;
        T* dx = dinp + n * C;
        A m = mean[n], r = rstd[n], sum_g = 0, sum_gx = 0;
        #pragma omp simd reduction(+ : sum_g, sum_gx)
        for (size_t c = 0; c < C; c++) {
            A g = to_acc(d[c]) * to_acc(weight[c]);
            sum_g += g;
            sum_gx += g * ((to_acc(x[c]) - m) * r);
        }
        A mean_g = sum_g / A(C), mean_gx = sum_gx / A(C);
        auto gradient = [&](size_t c) {
            return r *
                   (to_acc(d[c]) * to_acc(weight[c]) - mean_g - (to_acc(x[c]) - m) * r * mean_gx);
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
void layernorm_backward_weight(acc_t<T>* dweight, acc_t<T>* dbias, // (C) (C), = or +=
                               const T* dout, const T* inp, const acc_t<T>* mean,
                               const acc_t<T>* rstd, size_t N, size_t C, bool accumulate, Cpu) {
    typedef acc_t<T> A;
    constexpr size_t COLUMNS =
        64; // a thread owns so many columns: the order of its sums is the rows'
    #pragma omp parallel for
    for (size_t c0 = 0; c0 < C; c0 += COLUMNS) {
        size_t count = C - c0 < COLUMNS ? C - c0 : COLUMNS;
        A dw[COLUMNS] = {}, db[COLUMNS] = {};
        auto add_rows = [&](auto columns) { // whole blocks have a constant width: sums in registers
            for (size_t n = 0; n < N; n++) {
                const T *d = dout + n * C + c0, *x = inp + n * C + c0;
                A m = mean[n], r = rstd[n];
                #pragma omp simd
                for (size_t c = 0; c < columns; c++) {
                    dw[c] += to_acc(d[c]) * ((to_acc(x[c]) - m) * r);
                    db[c] += to_acc(d[c]);
                }
            }
        };
        if (count == COLUMNS) add_rows(std::integral_constant<size_t, COLUMNS>());
        else add_rows(count);
        for (size_t c = 0; c < count; c++) {
            if (dweight) dweight[c0 + c] = accumulate ? dweight[c0 + c] + dw[c] : dw[c];
            if (dbias) dbias[c0 + c] = accumulate ? dbias[c0 + c] + db[c] : db[c];
        }
    }
}
