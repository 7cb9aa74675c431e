// layernorm.cuh - LayerNorm, forward and backward - arXiv:1607.06450
//   out = (x - mean(x)) * rstd * weight + bias,   rstd = 1 / sqrt(var(x) + eps)      per row of C
//   dx  = rstd * (g - mean(g) - xhat * mean(g * xhat)),
//         g = dout * weight,  xhat = (x - mean) * rstd
//   inp, out, dinp, dout (N,C)   weight, bias (C)   dweight, dbias (C) acc
//   mean, rstd (N) acc, kept for backward
//   Contract: out, mean, rstd =    dinp = dresidual + dx (dresidual may be dinp, or null)
//             dweight, dbias = or += (accumulate); null: frozen.
//             Bitwise repeatable, on the CPU for any number of threads: partial sums meet in a fixed
//             order, no atomics.
//   Cost: memory-bound. forward reads inp, writes out; backward_input reads inp, dout, dresidual,
//         writes dinp; backward_weight reads inp, dout, and on the GPU writes and reads a scratch
//         of layernorm_scratch_bytes.
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
                               const acc_t<T>* rstd, void* /*scratch*/, size_t N, size_t C,
                               bool accumulate, Cpu) {
    typedef acc_t<T> A;
    // a thread owns so many columns: the order of its sums is the rows', and AVX-512 holds them all
    constexpr size_t COLUMNS = 128;
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
        if (count == COLUMNS)
            add_rows(std::integral_constant<size_t, COLUMNS>());
        else
            add_rows(count);
        for (size_t c = 0; c < count; c++) {
            if (dweight) dweight[c0 + c] = accumulate ? dweight[c0 + c] + dw[c] : dw[c];
            if (dbias) dbias[c0 + c] = accumulate ? dbias[c0 + c] + db[c] : db[c];
        }
    }
}

inline size_t layernorm_scratch_bytes(size_t, size_t, Cpu) { return 0; }

// ----------------------------------------------------------------------------
// CUDA kernels

#if KERNELS

// WARPS warps share a row; P elements a load. Second and third readings of a row come from L1.
template <typename T, int P, int WARPS>
__global__ void layernorm_forward_kernel(T* out, float* mean, float* rstd, const T* inp,
                                         const T* weight, const T* bias, size_t N, size_t C,
                                         float eps) {
    RowOfBlock<WARPS> row;
    if (row.n >= N) return; // all threads of a row leave together
    const T* x = inp + row.n * C;
    T* y = out + row.n * C;

    // Mean, then the variance around it: exact where one pass over x*x would cancel.
    float sum = 0, square = 0;
    for (size_t c = row.thread * P; c < C; c += row.threads * P) {
        Pack<T, P> p = load<P>(x + c);
        for (int i = 0; i < P; i++) sum += to_float(p.v[i]);
    }
    float m = row.sum(sum) / float(C);
    for (size_t c = row.thread * P; c < C; c += row.threads * P) {
        Pack<T, P> p = load<P>(x + c);
        for (int i = 0; i < P; i++) square += (to_float(p.v[i]) - m) * (to_float(p.v[i]) - m);
    }
    float r = 1 / sqrtf(row.sum(square) / float(C) + eps);

    // Normalise, scale, shift.
    for (size_t c = row.thread * P; c < C; c += row.threads * P) {
        Pack<T, P> p = load<P>(x + c), w = load<P>(weight + c), b = load<P>(bias + c), o;
        for (int i = 0; i < P; i++)
            o.v[i] = from_acc<T>((to_float(p.v[i]) - m) * r * to_float(w.v[i]) + to_float(b.v[i]));
        store(y + c, o);
    }
    if (row.thread == 0) mean[row.n] = m, rstd[row.n] = r;
}

template <typename T, int P, int WARPS>
__global__ void layernorm_backward_input_kernel(T* dinp, const T* dresidual, const T* dout,
                                                const T* inp, const T* weight, const float* mean,
                                                const float* rstd, size_t N, size_t C) {
    RowOfBlock<WARPS> row;
    if (row.n >= N) return;
    const T *d = dout + row.n * C, *x = inp + row.n * C;
    float m = mean[row.n], r = rstd[row.n], sum_g = 0, sum_gx = 0;

    // The two row means of the gradient.
    for (size_t c = row.thread * P; c < C; c += row.threads * P) {
        Pack<T, P> pd = load<P>(d + c), px = load<P>(x + c), pw = load<P>(weight + c);
        for (int i = 0; i < P; i++) {
            float g = to_float(pd.v[i]) * to_float(pw.v[i]);
            sum_g += g;
            sum_gx += g * ((to_float(px.v[i]) - m) * r);
        }
    }
    float mean_g = row.sum(sum_g) / float(C), mean_gx = row.sum(sum_gx) / float(C);

    // The input gradient joins the residual stream.
    for (size_t c = row.thread * P; c < C; c += row.threads * P) {
        Pack<T, P> pd = load<P>(d + c), px = load<P>(x + c), pw = load<P>(weight + c), o = {};
        if (dresidual) o = load<P>(dresidual + row.n * C + c);
        for (int i = 0; i < P; i++) {
            float g = to_float(pd.v[i]) * to_float(pw.v[i]), xhat = (to_float(px.v[i]) - m) * r;
            o.v[i] = from_acc<T>(to_float(o.v[i]) + r * (g - mean_g - xhat * mean_gx));
        }
        store(dinp + row.n * C + c, o);
    }
}

// What row n adds to dweight and dbias.
template <typename T> struct LayernormWeightTerm {
    const T *dout, *inp;
    const float *mean, *rstd;
    size_t C;
    template <int P> __device__ void add(float (&sum)[2][P], size_t n, size_t c) const {
        Pack<T, P> pd = load<P>(dout + n * C + c), px = load<P>(inp + n * C + c);
        float m = mean[n], r = rstd[n];
        for (int i = 0; i < P; i++) {
            sum[0][i] += to_float(pd.v[i]) * ((to_float(px.v[i]) - m) * r);
            sum[1][i] += to_float(pd.v[i]);
        }
    }
};

// ----------------------------------------------------------------------------
// launchers

template <typename T>
void layernorm_forward(T* out, float* mean, float* rstd, const T* inp, const T* weight,
                       const T* bias, size_t N, size_t C, float eps, cudaStream_t stream) {
    bool vector = can_vectorize<T>(C, out, inp, weight, bias);
    pick_row_kernel<T>(C, vector, [&](auto P, auto WARPS) {
        launch(layernorm_forward_kernel<T, P, WARPS>, row_grid<WARPS>(N), row_block<WARPS>(), 0,
               stream, out, mean, rstd, inp, weight, bias, N, C, eps);
    });
}

template <typename T>
void layernorm_backward_input(T* dinp, const T* dresidual, const T* dout, const T* inp,
                              const T* weight, const float* mean, const float* rstd, size_t N,
                              size_t C, cudaStream_t stream) {
    bool vector = can_vectorize<T>(C, dinp, dresidual, dout, inp, weight);
    pick_row_kernel<T>(C, vector, [&](auto P, auto WARPS) {
        launch(layernorm_backward_input_kernel<T, P, WARPS>, row_grid<WARPS>(N), row_block<WARPS>(),
               0, stream, dinp, dresidual, dout, inp, weight, mean, rstd, N, C);
    });
}

inline size_t layernorm_scratch_bytes(size_t N, size_t C, cudaStream_t) {
    return sum_columns_scratch_bytes(N, C, 2);
}

template <typename T>
void layernorm_backward_weight(float* dweight, float* dbias, const T* dout, const T* inp,
                               const float* mean, const float* rstd, void* scratch, size_t N,
                               size_t C, bool accumulate, cudaStream_t stream) {
    if (!dweight && !dbias) return;
    sum_columns<T>({dweight, dbias}, LayernormWeightTerm<T>{dout, inp, mean, rstd, C}, scratch, N,
                   C, accumulate, can_vectorize<T>(C, dout, inp), stream);
}
#endif
