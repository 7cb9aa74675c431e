// rmsnorm.cuh - RMSNorm, forward and backward - arXiv:1910.07467
//   out = x * rstd * weight,   rstd = 1 / sqrt(mean(x * x) + eps)      per row of C
//   dx  = rstd * (g - xhat * mean(g * xhat)),   g = dout * weight,  xhat = x * rstd
//   inp, out, dinp, dout (N,C)   weight (C)   dweight (C) acc   rstd (N) acc, kept for backward
//   Contract: out, rstd =    dinp = dresidual + dx (dresidual may be dinp, or null)
//             dweight = or += (accumulate); null: frozen.
//             Bitwise repeatable, on the CPU for any number of threads: partial sums meet in a fixed
//             order, no atomics.
//   Cost: memory-bound. forward reads inp, writes out; backward_input reads inp, dout, dresidual,
//         writes dinp; backward_weight reads inp, dout, and on the GPU writes and reads a scratch
//         of rmsnorm_scratch_bytes.
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

// a thread owns so many columns: the order of its sums is the rows', and AVX-512 holds them all
struct RmsnormColumns {
    constexpr operator size_t() const { return 128; }
};

template <typename T>
void rmsnorm_backward_weight(acc_t<T>* dweight, const T* dout, const T* inp, const acc_t<T>* rstd,
                             void* /*scratch*/, // (C) = or +=
                             size_t N, size_t C, bool accumulate, Cpu) {
    typedef acc_t<T> A;
    if (!dweight) return;
    constexpr size_t COLUMNS = RmsnormColumns();
    #pragma omp parallel for
    for (size_t c0 = 0; c0 < C; c0 += COLUMNS) {
        size_t count = C - c0 < COLUMNS ? C - c0 : COLUMNS;
        A dw[COLUMNS] = {};
        auto add_rows = [&](auto columns) { // whole blocks have a constant width: sums in registers
            for (size_t n = 0; n < N; n++) {
                const T *d = dout + n * C + c0, *x = inp + n * C + c0;
                A r = rstd[n];
                #pragma omp simd
                for (size_t c = 0; c < columns; c++) dw[c] += to_acc(d[c]) * (to_acc(x[c]) * r);
            }
        };
        if (count == COLUMNS)
            add_rows(RmsnormColumns());
        else
            add_rows(count);
        for (size_t c = 0; c < count; c++)
            dweight[c0 + c] = accumulate ? dweight[c0 + c] + dw[c] : dw[c];
    }
}

inline size_t rmsnorm_scratch_bytes(size_t, size_t, Cpu) { return 0; }

// ----------------------------------------------------------------------------
// CUDA kernels

#if KERNELS

// WARPS warps share a row; P elements a load. The second reading of a row comes from L1.
template <typename T, int P, int WARPS>
__global__ void rmsnorm_forward_kernel(T* out, float* rstd, const T* inp, const T* weight, size_t N,
                                       size_t C, float eps) {
    RowOfBlock<WARPS> row;
    if (row.n >= N) return; // all threads of a row leave together
    const T* x = inp + row.n * C;
    float square = 0;
    for (size_t c = row.thread * P; c < C; c += row.threads * P) {
        Pack<T, P> p = load<P>(x + c);
        for (int i = 0; i < P; i++) square += to_float(p.v[i]) * to_float(p.v[i]);
    }
    float r = 1 / sqrtf(row.sum(square) / float(C) + eps);
    for (size_t c = row.thread * P; c < C; c += row.threads * P) {
        Pack<T, P> p = load<P>(x + c), w = load<P>(weight + c);
        for (int i = 0; i < P; i++) p.v[i] = from_acc<T>(to_float(p.v[i]) * r * to_float(w.v[i]));
        store(out + row.n * C + c, p);
    }
    if (row.thread == 0) rstd[row.n] = r;
}

template <typename T, int P, int WARPS>
__global__ void rmsnorm_backward_input_kernel(T* dinp, const T* dresidual, const T* dout,
                                              const T* inp, const T* weight, const float* rstd,
                                              size_t N, size_t C) {
    RowOfBlock<WARPS> row;
    if (row.n >= N) return;
    const T *d = dout + row.n * C, *x = inp + row.n * C;
    float r = rstd[row.n], sum = 0;

    // The row mean of g * xhat.
    for (size_t c = row.thread * P; c < C; c += row.threads * P) {
        Pack<T, P> pd = load<P>(d + c), px = load<P>(x + c), pw = load<P>(weight + c);
        for (int i = 0; i < P; i++)
            sum += to_float(pd.v[i]) * to_float(pw.v[i]) * (to_float(px.v[i]) * r);
    }
    float mean_gx = row.sum(sum) / float(C);

    // The input gradient joins the residual stream.
    for (size_t c = row.thread * P; c < C; c += row.threads * P) {
        Pack<T, P> pd = load<P>(d + c), px = load<P>(x + c), pw = load<P>(weight + c), o = {};
        if (dresidual) o = load<P>(dresidual + row.n * C + c);
        for (int i = 0; i < P; i++) {
            float g = to_float(pd.v[i]) * to_float(pw.v[i]), xhat = to_float(px.v[i]) * r;
            o.v[i] = from_acc<T>(to_float(o.v[i]) + r * (g - xhat * mean_gx));
        }
        store(dinp + row.n * C + c, o);
    }
}

// What row n adds to dweight.
template <typename T> struct RmsnormWeightTerm {
    const T *dout, *inp;
    const float* rstd;
    size_t C;
    template <int P> __device__ void add(float (&sum)[1][P], size_t n, size_t c) const {
        Pack<T, P> pd = load<P>(dout + n * C + c), px = load<P>(inp + n * C + c);
        float r = rstd[n];
        for (int i = 0; i < P; i++) sum[0][i] += to_float(pd.v[i]) * (to_float(px.v[i]) * r);
    }
};

// ----------------------------------------------------------------------------
// launchers

template <typename T>
void rmsnorm_forward(T* out, float* rstd, const T* inp, const T* weight, size_t N, size_t C,
                     float eps, cudaStream_t stream) {
    bool vector = can_vectorize<T>(C, out, inp, weight);
    pick_row_kernel<T>(C, vector, [&](auto P, auto WARPS) {
        launch(rmsnorm_forward_kernel<T, P, WARPS>, row_grid<WARPS>(N), row_block<WARPS>(), 0,
               stream, out, rstd, inp, weight, N, C, eps);
    });
}

template <typename T>
void rmsnorm_backward_input(T* dinp, const T* dresidual, const T* dout, const T* inp,
                            const T* weight, const float* rstd, size_t N, size_t C,
                            cudaStream_t stream) {
    bool vector = can_vectorize<T>(C, dinp, dresidual, dout, inp, weight);
    pick_row_kernel<T>(C, vector, [&](auto P, auto WARPS) {
        launch(rmsnorm_backward_input_kernel<T, P, WARPS>, row_grid<WARPS>(N), row_block<WARPS>(),
               0, stream, dinp, dresidual, dout, inp, weight, rstd, N, C);
    });
}

inline size_t rmsnorm_scratch_bytes(size_t N, size_t C, cudaStream_t) {
    return sum_columns_scratch_bytes(N, C, 1);
}

template <typename T>
void rmsnorm_backward_weight(float* dweight, const T* dout, const T* inp, const float* rstd,
                             void* scratch, size_t N, size_t C, bool accumulate,
                             cudaStream_t stream) {
    if (!dweight) return;
    sum_columns<T>({dweight}, RmsnormWeightTerm<T>{dout, inp, rstd, C}, scratch, N, C, accumulate,
                   can_vectorize<T>(C, dout, inp), stream);
}
#endif
