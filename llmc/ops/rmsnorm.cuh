// rmsnorm.cuh - RMSNorm, forward and backward - arXiv:1910.07467
//   out = x * rstd * weight,   rstd = 1 / sqrt(mean(x * x) + eps)      per row of C
//   dx  = rstd * (g - xhat * mean(g * xhat)),   g = dout * weight,  xhat = x * rstd
//   inp, out, dinp, dout (N,C)   weight (C)   dweight (C) acc   rstd (N) acc, kept for backward
//   weight null: zeros, so that a norm without gains has a `plus` of 1
//   RmsnormMore holds the options: a residual added to out, a constant `plus` added to each weight
//   (Gemma: 1), and rows cut over several ranks. For cut rows call rmsnorm_row_sums first and
//   all-reduce its results.
//   Contract: out, rstd =    dinp = dresidual + dx (dresidual may be dinp, or null)
//             out null: rstd alone.
//             sums = partial sums of dweight, rmsnorm_sums elements; null: the weight is frozen.
//             add_parts adds up the parts that rmsnorm_parts lists, = or += (accumulate).
//             Bitwise repeatable, on the CPU for any number of threads: parts are added in a fixed
//             order, no atomics.
//   Cost: memory-bound. forward reads inp and writes out; backward reads inp, dout and dresidual
//         and writes dinp. On the GPU backward also writes one row of sums for about 32 rows.
//   To copy: this file, partial_sums.cuh, rows.cuh, types.h and cuda_common.h.
#pragma once
#include "cuda_common.h"
#include "partial_sums.cuh"
#include "rows.cuh"
#include "types.h"

namespace llmc {

// Options of the norm. The defaults give the plain RMSNorm of the paper.
template <typename T> struct RmsnormMore {
    const T* residual = nullptr; // (N,C) forward: out += it
    float plus = 0;              // each channel is scaled by plus + weight
    // (N) for rows cut over ranks: the sums of rmsnorm_row_sums, all-reduced. Forward they are sums
    // of squares, backward sums of dout * scale * inp. C_all is the row's length over all ranks.
    const acc_t<T>* row_sums = nullptr;
    size_t C_all = 0;

    LLMC_HD acc_t<T> scale(T weight) const { return to_acc(weight) + acc_t<T>(plus); }
    acc_t<T> scale(const T* weight, size_t c) const {
        return weight ? scale(weight[c]) : acc_t<T>(plus);
    }
    // The mean over a whole row. `sum` is the local sum, used when the row is not cut.
    LLMC_HD acc_t<T> mean(size_t n, acc_t<T> sum, size_t C) const {
        return row_sums ? row_sums[n] / acc_t<T>(C_all) : sum / acc_t<T>(C);
    }
};

// ----------------------------------------------------------------------------
// CPU

// This rank's share of the sums over rows that are cut over several ranks. With dout null it sums
// squares, for forward; with dout it sums dout * scale * inp, for backward.
template <typename T>
void rmsnorm_row_sums(acc_t<T>* row_sums,                            // (N)
                      const T* inp, const T* dout, const T* weight, // (N,C) (N,C) or null (C)
                      size_t N, size_t C, float plus, Cpu) {
    typedef acc_t<T> A;
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const T* x = inp + n * C;                     // (C)
        const T* d = dout ? dout + n * C : nullptr; // (C)

        // Sum this rank's channels in their order. The caller adds the ranks' sums.
        A sum = 0;
        for (size_t c = 0; c < C; c++) {
            A other = to_acc(x[c]);
            // In backward the second factor is the gradient of the normalised channel.
            if (d)
                other = to_acc(d[c]) * (weight ? to_acc(weight[c]) + A(plus) : A(plus));
            sum += to_acc(x[c]) * other;
        }
        row_sums[n] = sum;
    }
}

// Channel c of row n becomes f(c), or residual + f(c), in plain loops that vectorise.
template <typename T, typename F>
void write_row(T* out, const T* residual, size_t n, size_t C, F f) { // (N,C) (N,C) or null
    auto write = [&](auto value) {
        #pragma omp simd
        for (size_t c = 0; c < C; c++)
            out[n * C + c] = from_acc<T>(value(c));
    };
    if (residual)
        write([&](size_t c) { return to_acc(residual[n * C + c]) + f(c); });
    else
        write(f);
}

// Each row is a task. rstd is kept for backward.
template <typename T>
void rmsnorm_forward(T* out, acc_t<T>* rstd,        // (N,C) (N)
                     const T* inp, const T* weight, // (N,C) (C)
                     size_t N, size_t C, float eps, Cpu, const RmsnormMore<T>& more = {}) {
    typedef acc_t<T> A;
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const T* x = inp + n * C; // (C)

        // Take the root mean square.
        A square = 0;
        #pragma omp simd reduction(+ : square)
        for (size_t c = 0; c < C; c++)
            square += to_acc(x[c]) * to_acc(x[c]);
        A r = 1 / std::sqrt(more.mean(n, square, C) + A(eps));
        // Keep rstd unrounded: backward must use the same value.
        rstd[n] = r;
        if (!out) continue;

        // Normalise and scale.
        auto normed = [&](size_t c) { return to_acc(x[c]) * r * more.scale(weight, c); };
        write_row(out, more.residual, n, C, normed);
    }
}

// Both gradients. On the CPU there is one part, so `sums` is dweight itself.
template <typename T>
void rmsnorm_backward(T* dinp, acc_t<T>* sums, const T* dresidual,  // (N,C) (1,C) (N,C) or null
                      const T* dout, const T* inp, const T* weight, // (N,C) (N,C) (C)
                      const acc_t<T>* rstd,                         // (N)
                      size_t N, size_t C, Cpu, const RmsnormMore<T>& more = {}) {
    typedef acc_t<T> A;
    // Take the gradient of the input, one task a row.
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const T* d = dout + n * C; // (C)
        const T* x = inp + n * C;  // (C)

        // Take the row mean of g * xhat, the part that passes through rstd.
        A r = rstd[n], sum = 0;
        #pragma omp simd reduction(+ : sum)
        for (size_t c = 0; c < C; c++)
            sum += to_acc(d[c]) * more.scale(weight, c) * (to_acc(x[c]) * r);
        // row_sums were taken over x, not over xhat: multiply by rstd here.
        A mean_gx = more.mean(n, sum, C) * (more.row_sums ? r : 1);

        // Add the norm's own gradient to the residual's.
        auto gradient = [&](size_t c) {
            return r * (to_acc(d[c]) * more.scale(weight, c) - to_acc(x[c]) * r * mean_gx);
        };
        write_row(dinp, dresidual, n, C, gradient);
    }

    // Sum dout * xhat over the rows.
    if (!sums) return;
    sum_columns<1>({sums}, N, C, false, [&](auto& sum, size_t n, size_t c0, auto columns) {
        const T* d = dout + n * C + c0; // (columns)
        const T* x = inp + n * C + c0;  // (columns)
        A r = rstd[n];
        #pragma omp simd
        for (size_t c = 0; c < columns; c++)
            sum[0][c] += to_acc(d[c]) * (to_acc(x[c]) * r);
    });
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

// A pack of the weight; zeros where there is none.
template <int P, typename T> __device__ Pack<T, P> load_or_zero(const T* weight, size_t c) {
    return weight ? load<P>(weight + c) : Pack<T, P>{};
}

// WARPS warps share a row; a load takes P elements. The second reading of the row hits L1.
//   out, inp (N,C)   weight (C)   rstd (N)
template <typename T, int P, int WARPS>
__global__ void rmsnorm_forward_kernel(T* out, float* rstd, const T* inp, const T* weight, size_t N,
                                       size_t C, float eps, RmsnormMore<T> more) {
    RowOfBlock<WARPS> row;
    if (row.n >= N) return; // all threads of a row leave together
    const T* x = inp + row.n * C; // (C)

    // Take the root mean square.
    float square = 0;
    for (size_t c = row.thread * P; c < C; c += row.threads * P) {
        Pack<T, P> p = load<P>(x + c);
        for (int i = 0; i < P; i++)
            square += to_float(p.v[i]) * to_float(p.v[i]);
    }
    float r = 1 / sqrtf(more.mean(row.n, row.sum(square), C) + eps);

    // Normalise, scale, and add the residual if there is one.
    for (size_t c = row.thread * P; out && c < C; c += row.threads * P) {
        Pack<T, P> p = load<P>(x + c),
                   w = load_or_zero<P>(weight, c);
        Pack<T, P> o = more.residual ? load<P>(more.residual + row.n * C + c) : Pack<T, P>{};
        for (int i = 0; i < P; i++) {
            float y = to_float(p.v[i]) * r * more.scale(w.v[i]);
            p.v[i] = from_acc<T>(more.residual ? to_float(o.v[i]) + y : y);
        }
        store(out + row.n * C + c, p);
    }
    if (row.thread == 0)
        rstd[row.n] = r;
}

// This rank's share of the sums over rows that are cut over several ranks (see the CPU version).
//   row_sums (N)   inp, dout (N,C), dout may be null   weight (C)
template <typename T, int P, int WARPS>
__global__ void rmsnorm_row_sums_kernel(float* row_sums, const T* inp, const T* dout,
                                        const T* weight, size_t N, size_t C, float plus) {
    RowOfBlock<WARPS> row;
    if (row.n >= N) return; // all threads of a row leave together

    // Add up this thread's channels.
    float sum = 0;
    for (size_t c = row.thread * P; c < C; c += row.threads * P) {
        // Forward multiplies a channel by itself, backward by the gradient of its normalised value.
        Pack<T, P> x = load<P>(inp + row.n * C + c);
        Pack<T, P> d = x;
        Pack<T, P> w = {};
        if (dout) {
            d = load<P>(dout + row.n * C + c);
            if (weight) w = load<P>(weight + c);
        }
        for (int i = 0; i < P; i++) {
            float scale = dout ? to_float(w.v[i]) + plus : 1;
            sum += to_float(x.v[i]) * to_float(d.v[i]) * scale;
        }
    }

    sum = row.sum(sum);
    if (row.thread == 0)
        row_sums[row.n] = sum;
}

// A block owns a strip of rows. One reading of the strip gives both the rows' input gradients and
// the strip's part of dweight. dresidual may be dinp: a thread reads its elements before it writes.
//   dinp, dresidual, dout, inp (N,C)   sums (parts,C)   weight (C)   rstd (N)
template <typename T, int P, int WARPS, int PACKS>
__global__ void rmsnorm_backward_kernel(T* dinp, float* sums, const T* dresidual, const T* dout,
                                        const T* inp, const T* weight, const float* rstd, size_t N,
                                        size_t C, size_t rows, RmsnormMore<T> more) {
    StripOfRows<1, P, WARPS, PACKS> strip(sums, N, C, rows);
    for (size_t n = strip.first; n < strip.end; n += strip.rows) {
        float r = rstd[n];
        Pack<T, P> d[strip.HELD], x[strip.HELD], o[strip.HELD];

        // Load a pack of dout and inp, and the residual's gradient (zero where there is none).
        auto read = [&](int k, size_t c) {
            d[k] = load<P>(dout + n * C + c);
            x[k] = load<P>(inp + n * C + c);
            o[k] = dresidual ? load<P>(dresidual + n * C + c) : Pack<T, P>{};
        };

        // Take the row mean of g * xhat.
        float of_row[1] = {};
        strip.for_packs([&](int k, size_t c) {
            read(k, c);
            Pack<T, P> w = load_or_zero<P>(weight, c);
            for (int i = 0; i < P; i++)
                of_row[0] +=
                    to_float(d[k].v[i]) * more.scale(w.v[i]) * (to_float(x[k].v[i]) * r);
        });
        strip.sum(of_row);
        float mean_gx = more.mean(n, of_row[0], C) * (more.row_sums ? r : 1);

        // Add dx to the residual's gradient, and dout * xhat to the strip's sum.
        strip.for_packs([&](int k, size_t c) {
            if (PACKS == 0) {
                read(k, c);
                strip.take(n, c);
            }
            Pack<T, P> w = load_or_zero<P>(weight, c);
            for (int i = 0; i < P; i++) {
                float dv = to_float(d[k].v[i]);
                float g = dv * more.scale(w.v[i]);
                float xhat = to_float(x[k].v[i]) * r;
                o[k].v[i] = from_acc<T>(to_float(o[k].v[i]) + r * (g - xhat * mean_gx));
                strip.sums[k][0][i] += dv * xhat;
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
void rmsnorm_forward(T* out, float* rstd, const T* inp, const T* weight, size_t N, size_t C,
                     float eps, cudaStream_t stream, const RmsnormMore<T>& more = {}) {
    bool vector = can_vectorize<T>(C, out, inp, weight, more.residual);
    pick_row_kernel<T>(C, vector, [&](auto P, auto WARPS) {
        launch(rmsnorm_forward_kernel<T, P, WARPS>,
               row_grid<WARPS>(N), row_block<WARPS>(), stream,
               out, rstd, inp, weight, N, C, eps, more);
    });
}

// Two calls a pass for rows cut over ranks: before forward (dout null) and before backward.
template <typename T>
void rmsnorm_row_sums(float* row_sums, const T* inp, const T* dout, const T* weight, size_t N,
                      size_t C, float plus, cudaStream_t stream) {
    pick_row_kernel<T>(C, can_vectorize<T>(C, inp, dout, weight), [&](auto P, auto WARPS) {
        launch(rmsnorm_row_sums_kernel<T, P, WARPS>,
               row_grid<WARPS>(N), row_block<WARPS>(), stream,
               row_sums, inp, dout, weight, N, C, plus);
    });
}

template <typename T>
void rmsnorm_backward(T* dinp, float* sums, const T* dresidual, const T* dout, const T* inp,
                      const T* weight, const float* rstd, size_t N, size_t C,
                      cudaStream_t stream, const RmsnormMore<T>& more = {}) {
    size_t parts = strips_of(N, ROW_STRIPS, stream);
    bool vector = can_vectorize<T>(C, dinp, dresidual, dout, inp, weight);
    pick_strip_kernel<T, 1>(C, vector, [&](auto P, auto WARPS, auto PACKS) {
        launch(rmsnorm_backward_kernel<T, P, WARPS, PACKS>,
               unsigned(parts), row_block<WARPS>(), stream,
               dinp, sums, dresidual, dout, inp, weight, rstd, N, C, ceil_div(N, parts), more);
    });
}
#endif

// ----------------------------------------------------------------------------
// anywhere

// The number of elements of `sums`: C for each strip of rows.
template <typename S>
size_t rmsnorm_sums(size_t N, size_t C, S where) { return strips_of(N, ROW_STRIPS, where) * C; }

// The list of parts that add_parts adds up into dweight. A null dweight is frozen.
template <typename A, typename S>
PartialSums<A> rmsnorm_parts(A* dweight, const A* sums, size_t N, size_t C, S where) {
    return {dweight, sums, strips_of(N, ROW_STRIPS, where), C, C};
}

} // namespace llmc
