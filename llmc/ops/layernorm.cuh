// layernorm.cuh - LayerNorm, forward and backward - arXiv:1607.06450
//   out = (x - mean(x)) * rstd * weight + bias,   rstd = 1 / sqrt(var(x) + eps)      per row of C
//   dx  = rstd * (g - mean(g) - xhat * mean(g * xhat)),
//         g = dout * weight,  xhat = (x - mean) * rstd
//   inp, out, dinp, dout (N,C)   weight, bias (C)   dweight, dbias (C) acc
//   mean, rstd (N) acc, kept for backward
//   Contract: out, mean, rstd =    dinp = dresidual + dx (dresidual may be dinp, or null)
//             sums = parts of three column sums: dweight, dbias, and dresidual's rows. The last is
//             the gradient of the bias of the branch's last projection. `sums` has
//             layernorm_sums() elements; null: not wanted. add_parts adds up the parts that
//             layernorm_parts lists. Without dresidual the CPU leaves the third unwritten.
//             Bitwise repeatable, on the CPU for any number of threads: parts are added in a fixed
//             order, no atomics.
//   Cost: memory-bound. forward reads inp and writes out; backward reads inp, dout and dresidual
//         and writes dinp. On the GPU backward also writes one part of `sums` for about 32 rows.
//   To copy: this file, partial_sums.cuh, rows.cuh, types.h and cuda_common.h.
#pragma once
#include "cuda_common.h"
#include "partial_sums.cuh"
#include "rows.cuh"
#include "types.h"

namespace llmc {

// ----------------------------------------------------------------------------
// CPU

// Each row is a task. mean and rstd are kept for backward.
template <typename T>
void layernorm_forward(T* out, acc_t<T>* mean, acc_t<T>* rstd,       // (N,C) (N) (N)
                       const T* inp, const T* weight, const T* bias, // (N,C) (C) (C)
                       size_t N, size_t C, float eps, Cpu) {
    typedef acc_t<T> A;
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const T* x = inp + n * C; // (C)
        T* y = out + n * C;       // (C)

        // Take the mean, then the variance around it: one pass over x and x*x would cancel digits.
        A sum = 0, square = 0;
        #pragma omp simd reduction(+ : sum)
        for (size_t c = 0; c < C; c++)
            sum += to_acc(x[c]);
        A m = sum / A(C);
        #pragma omp simd reduction(+ : square)
        for (size_t c = 0; c < C; c++)
            square += (to_acc(x[c]) - m) * (to_acc(x[c]) - m);
        A r = 1 / std::sqrt(square / A(C) + A(eps));

        // Normalise, scale, shift. All rows share weight and bias, which stay in the cache.
        #pragma omp simd
        for (size_t c = 0; c < C; c++)
            y[c] = from_acc<T>((to_acc(x[c]) - m) * r * to_acc(weight[c]) + to_acc(bias[c]));

        // Keep the statistics unrounded: backward must use the same values.
        mean[n] = m;
        rstd[n] = r;
    }
}

// Both gradients. On the CPU there is one part, so `sums` holds the three sums themselves.
template <typename T>
void layernorm_backward(T* dinp, acc_t<T>* sums, const T* dresidual,  // (N,C) (1,3,C) (N,C) or null
                        const T* dout, const T* inp, const T* weight, // (N,C) (N,C) (C)
                        const acc_t<T>* mean, const acc_t<T>* rstd,   // (N) (N)
                        size_t N, size_t C, Cpu) {
    typedef acc_t<T> A;
    // Sum over rows: dout * xhat, dout, dresidual. This is first: dinp may overwrite dresidual.
    const T* others = dresidual ? dresidual : dout; // (N,C) without dresidual their sum is dropped
    auto add_row = [&](auto& sum, size_t n, size_t c0, auto columns) {
        const T* d = dout + n * C + c0;       // (columns)
        const T* x = inp + n * C + c0;        // (columns)
        const T* third = others + n * C + c0; // (columns)
        A m = mean[n], r = rstd[n];
        #pragma omp simd
        for (size_t c = 0; c < columns; c++) {
            sum[0][c] += to_acc(d[c]) * ((to_acc(x[c]) - m) * r);
            sum[1][c] += to_acc(d[c]);
            sum[2][c] += to_acc(third[c]);
        }
    };
    if (sums)
        sum_columns<3>({sums, sums + C, dresidual ? sums + 2 * C : nullptr}, N, C, false, add_row);

    // Take the gradient of the input; each row is a task.
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const T* d = dout + n * C;                                   // (C)
        const T* x = inp + n * C;                                    // (C)
        const T* residual = dresidual ? dresidual + n * C : nullptr; // (C)
        T* dx = dinp + n * C;                                        // (C)

        // Take two means: mean(g) passes through the row's mean, mean(g * xhat) through rstd.
        A m = mean[n], r = rstd[n];
        A sum_g = 0, sum_gx = 0;
        #pragma omp simd reduction(+ : sum_g, sum_gx)
        for (size_t c = 0; c < C; c++) {
            A g = to_acc(d[c]) * to_acc(weight[c]);
            sum_g += g;
            sum_gx += g * ((to_acc(x[c]) - m) * r);
        }
        A mean_g = sum_g / A(C);
        A mean_gx = sum_gx / A(C);

        // Add the norm's own gradient to the residual's, in loops that vectorise.
        auto gradient = [&](size_t c) {
            return r *
                   (to_acc(d[c]) * to_acc(weight[c]) - mean_g - (to_acc(x[c]) - m) * r * mean_gx);
        };
        if (residual) {
            #pragma omp simd
            for (size_t c = 0; c < C; c++)
                dx[c] = from_acc<T>(to_acc(residual[c]) + gradient(c));
        } else {
            #pragma omp simd
            for (size_t c = 0; c < C; c++)
                dx[c] = from_acc<T>(gradient(c));
        }
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

// WARPS warps share a row; a load takes P elements. The row is read three times: twice from L1.
//   out, inp (N,C)   weight, bias (C)   mean, rstd (N)
template <typename T, int P, int WARPS>
__global__ void layernorm_forward_kernel(T* out, float* mean, float* rstd, const T* inp,
                                         const T* weight, const T* bias, size_t N, size_t C,
                                         float eps) {
    RowOfBlock<WARPS> row;
    if (row.n >= N) return; // all threads of a row leave together
    const T* x = inp + row.n * C; // (C)
    T* y = out + row.n * C;       // (C)

    // Take the mean, then the variance around it. A single pass over x and x*x would cancel digits.
    float sum = 0, square = 0;
    for (size_t c = row.thread * P; c < C; c += row.threads * P) {
        Pack<T, P> p = load<P>(x + c);
        for (int i = 0; i < P; i++)
            sum += to_float(p.v[i]);
    }
    float m = row.sum(sum) / float(C);
    for (size_t c = row.thread * P; c < C; c += row.threads * P) {
        Pack<T, P> p = load<P>(x + c);
        for (int i = 0; i < P; i++)
            square += (to_float(p.v[i]) - m) * (to_float(p.v[i]) - m);
    }
    float r = 1 / sqrtf(row.sum(square) / float(C) + eps);

    // Normalise, scale, shift.
    for (size_t c = row.thread * P; c < C; c += row.threads * P) {
        Pack<T, P> p = load<P>(x + c),
                   w = load<P>(weight + c),
                   b = load<P>(bias + c), o;
        for (int i = 0; i < P; i++)
            o.v[i] = from_acc<T>((to_float(p.v[i]) - m) * r * to_float(w.v[i]) + to_float(b.v[i]));
        store(y + c, o);
    }

    // Keep the statistics: one thread of the row writes them.
    if (row.thread > 0) return;
    mean[row.n] = m;
    rstd[row.n] = r;
}

// A block owns a strip of rows. One reading of the strip gives both the rows' input gradients and
// the strip's part of the three sums. dresidual may be dinp: a thread reads its elements before it
// writes them.
//   dinp, dresidual, dout, inp (N,C)   sums (parts,3,C)   weight (C)   mean, rstd (N)
template <typename T, int P, int WARPS, int PACKS>
__global__ void layernorm_backward_kernel(T* dinp, float* sums, const T* dresidual, const T* dout,
                                          const T* inp, const T* weight, const float* mean,
                                          const float* rstd, size_t N, size_t C, size_t rows) {
    StripOfRows<3, P, WARPS, PACKS> strip(sums, N, C, rows);
    for (size_t n = strip.first; n < strip.end; n += strip.rows) {
        float m = mean[n], r = rstd[n];
        Pack<T, P> d[strip.HELD], x[strip.HELD], o[strip.HELD];

        // Load a pack of dout and inp, and the residual's gradient (zero where there is none).
        auto read = [&](int k, size_t c) {
            d[k] = load<P>(dout + n * C + c);
            x[k] = load<P>(inp + n * C + c);
            o[k] = dresidual ? load<P>(dresidual + n * C + c) : Pack<T, P>{};
        };

        // Take the two row means of the gradient.
        float of_row[2] = {};
        strip.for_packs([&](int k, size_t c) {
            read(k, c);
            Pack<T, P> w = load<P>(weight + c);
            for (int i = 0; i < P; i++) {
                float g = to_float(d[k].v[i]) * to_float(w.v[i]);
                of_row[0] += g;
                of_row[1] += g * ((to_float(x[k].v[i]) - m) * r);
            }
        });
        // Every thread gets the same bits, so all threads use the same means.
        strip.sum(of_row);
        float mean_g = of_row[0] / float(C);
        float mean_gx = of_row[1] / float(C);

        // Add dx to the residual's gradient, and add this row to the strip's three sums.
        strip.for_packs([&](int k, size_t c) {
            if (PACKS == 0) {
                read(k, c);
                strip.take(n, c);
            }
            Pack<T, P> w = load<P>(weight + c);
            for (int i = 0; i < P; i++) {
                float dv = to_float(d[k].v[i]);
                float g = dv * to_float(w.v[i]);
                float xhat = (to_float(x[k].v[i]) - m) * r;
                float before = to_float(o[k].v[i]);
                o[k].v[i] = from_acc<T>(before + r * (g - mean_g - xhat * mean_gx));

                // Add to the sums for dweight, dbias, and the bias that joined the residual stream.
                strip.sums[k][0][i] += dv * xhat;
                strip.sums[k][1][i] += dv;
                strip.sums[k][2][i] += before;
            }
            if (PACKS == 0) strip.leave(0, c);
            store(dinp + n * C + c, o[k]);
        });
    }
    strip.write();
}

// ----------------------------------------------------------------------------
// launchers: any C and alignment

template <typename T>
void layernorm_forward(T* out, float* mean, float* rstd, const T* inp, const T* weight,
                       const T* bias, size_t N, size_t C, float eps, cudaStream_t stream) {
    bool vector = can_vectorize<T>(C, out, inp, weight, bias);
    pick_row_kernel<T>(C, vector, [&](auto P, auto WARPS) {
        launch(layernorm_forward_kernel<T, P, WARPS>,
               row_grid<WARPS>(N), row_block<WARPS>(), stream,
               out, mean, rstd, inp, weight, bias, N, C, eps);
    });
}

template <typename T>
void layernorm_backward(T* dinp, float* sums, const T* dresidual, const T* dout, const T* inp,
                        const T* weight, const float* mean, const float* rstd, size_t N, size_t C,
                        cudaStream_t stream) {
    size_t parts = strips_of(N, ROW_STRIPS, stream);
    bool vector = can_vectorize<T>(C, dinp, dresidual, dout, inp, weight);
    pick_strip_kernel<T, 3>(C, vector, [&](auto P, auto WARPS, auto PACKS) {
        launch(layernorm_backward_kernel<T, P, WARPS, PACKS>,
               unsigned(parts), row_block<WARPS>(), stream,
               dinp, sums, dresidual, dout, inp, weight, mean, rstd, N, C, ceil_div(N, parts));
    });
}
#endif

// ----------------------------------------------------------------------------
// anywhere

// The number of elements of `sums`: for each strip of rows, three vectors of C.
template <typename S>
size_t layernorm_sums(size_t N, size_t C, S where) {
    return strips_of(N, ROW_STRIPS, where) * 3 * C;
}

// The list of parts that add_parts adds up into dweight, dbias and the sum of dresidual's rows.
// A null output is not wanted.
template <typename A, typename S>
std::vector<PartialSums<A>> layernorm_parts(A* dweight, A* dbias, A* dresidual_bias, // (C) each
                                            const A* sums, size_t N, size_t C, S where) {
    size_t parts = strips_of(N, ROW_STRIPS, where);
    size_t stride = 3 * C;
    return {{dweight, sums, parts, stride, C},
            {dbias, sums + C, parts, stride, C},
            {dresidual_bias, sums + 2 * C, parts, stride, C}};
}

} // namespace llmc
