// gelu.cuh - GELU in its tanh form or exact, forward and backward - arXiv:1606.08415
//   gelu(x) = x/2 * (1 + tanh(u)),  u = sqrt(2/pi) * (x + 0.044715 x^3)
//   gelu'(x) = (1 + tanh(u))/2 + x/2 * (1 - tanh(u)^2) * u'
//   exact: gelu(x) = x P(x), P(x) = (1 + erf(x / sqrt(2))) / 2, gelu'(x) = P(x) + x P'(x)
//   inp, out, dinp, dout (n); backward also takes rows (N,C), to sum them
//   Contract: out =, dinp = (dinp may be dout)
//             sums = partial sums of dinp's rows, which is the gradient of the bias added to inp;
//             null: not wanted. add_parts adds up the parts that gelu_parts lists.
//             Bitwise repeatable. The fast tanh has an absolute error below 3e-7, which is enough
//             because only 1 + tanh is used.
//   Cost: memory-bound. forward reads inp, writes out; backward reads inp, dout, writes dinp.
//   To copy: this file, fast_math.h, partial_sums.cuh, types.h and cuda_common.h.
#pragma once
#include "cuda_common.h"
#include "fast_math.h"
#include "partial_sums.cuh"
#include "types.h"

namespace llmc {

// ----------------------------------------------------------------------------
// one element

// GELU's value and slope at one x. A gated unit needs both (swiglu.cuh).
template <typename A> struct GeluAt {
    A value, slope;
};

// The tanh form: u, and what follows from its tanh. Value and slope share the tanh, which is the
// most expensive part of both.
constexpr double GELU_SCALE = 0.7978845608028654; // sqrt(2 / pi)
template <typename A> LLMC_HD A gelu_u(A x) {
    // The cube is written as products: a call of pow would not vectorise.
    return A(GELU_SCALE) * (x + A(0.044715) * x * x * x);
}
template <typename A> LLMC_HD GeluAt<A> gelu_at(A x, A tanh_u) {
    A du = A(GELU_SCALE) * (1 + 3 * A(0.044715) * x * x);
    A half = A(0.5) * (1 + tanh_u);
    return {A(0.5) * x * (1 + tanh_u), half + A(0.5) * x * (1 - tanh_u * tanh_u) * du};
}
template <typename A>
GeluAt<A> gelu_at(A x) { return gelu_at(x, fast_tanh(gelu_u(x))); }

// The exact form. std::erf is computed in A: erff for float.
template <typename A>
LLMC_HD GeluAt<A> exact_gelu_at(A x) {
    // The normal distribution's cumulative probability up to x, and its density there.
    A half = A(0.5) * (1 + std::erf(x * A(0.7071067811865476)));
    A density = A(0.3989422804014327) * std::exp(A(-0.5) * x * x);
    return {x * half, half + x * density};
}

// ----------------------------------------------------------------------------
// CPU

// Call f with the form as a function. The CPU's tanh is a polynomial, which g++ vectorises; erf is
// a library call, which does not.
template <typename A, typename F>
void pick_gelu(bool exact, F f) {
    exact ? f([](A x) { return exact_gelu_at(x); }) : f([](A x) { return gelu_at(x); });
}

template <typename T>
void gelu_forward(T* out, const T* inp, size_t n, Cpu, bool exact = false) { // (n) (n)
    pick_gelu<acc_t<T>>(exact, [&](auto gelu) {
        #pragma omp parallel for simd
        for (size_t i = 0; i < n; i++)
            out[i] = from_acc<T>(gelu(to_acc(inp[i])).value);
    });
}

// tanh is computed again, which is cheaper than storing it in forward and reading it here.
template <typename T>
void gelu_backward(T* dinp, const T* dout, const T* inp, size_t n, Cpu, // (n) (n) (n)
                   bool exact = false) {
    pick_gelu<acc_t<T>>(exact, [&](auto gelu) {
        #pragma omp parallel for simd
        for (size_t i = 0; i < n; i++)
            dinp[i] = from_acc<T>(to_acc(dout[i]) * gelu(to_acc(inp[i])).slope);
    });
}

// The same for rows, with the sum of dinp's rows. On the CPU there is one part: the sum itself.
template <typename T>
void gelu_backward(T* dinp, acc_t<T>* sums, const T* dout, const T* inp, // (N,C) (1,C) (N,C) (N,C)
                   size_t N, size_t C, Cpu where, bool exact = false) {
    gelu_backward(dinp, dout, inp, N * C, where, exact);
    if (!sums) return;
    sum_columns<1>({sums}, N, C, false, [&](auto& sum, size_t n, size_t c0, auto columns) {
        #pragma omp simd
        for (size_t c = 0; c < columns; c++)
            sum[0][c] += to_acc(dinp[n * C + c0 + c]);
    });
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

// The same with a tanh by one fast exponential. For large |u| the exponential is infinity or 0, and
// the quotient is still correct.
__device__ inline GeluAt<float> fast_gelu_at(float x) {
    return gelu_at(x, 1 - __fdividef(2, __expf(2 * gelu_u(x)) + 1));
}

constexpr unsigned GELU_THREADS = 256;

template <typename T, int P>
__global__ void gelu_forward_kernel(T* out, const T* inp, size_t n, bool exact) {
    size_t i = (size_t(blockIdx.x) * GELU_THREADS + threadIdx.x) * P;
    if (i >= n) return;
    // One pack holds the inputs, then the results.
    Pack<T, P> p = load<P>(inp + i);
    for (int k = 0; k < P; k++) {
        float x = to_float(p.v[k]);
        p.v[k] = from_acc<T>(exact ? exact_gelu_at(x).value : fast_gelu_at(x).value);
    }
    store(out + i, p);
}

// The grid is (blocks of columns, strips of rows). dinp may be dout: a thread reads its elements
// before it writes them. The sums add the rounded values that are written to dinp, so that they are
// exactly the sums of dinp's rows.
//   dinp, dout, inp (N,C)   sums (parts,C) or null
template <typename T, int P>
__global__ void gelu_backward_kernel(T* dinp, float* sums, const T* dout, const T* inp, size_t N,
                                     size_t C, size_t rows, bool exact) {
    size_t from = blockIdx.y * rows;
    size_t to = from + rows < N ? from + rows : N;
    float* part = sums ? sums + blockIdx.y * C : nullptr;

    // Write the gradients of the strip, and sum the rows that the first lambda returns.
    auto gradients = [&](size_t n, size_t c) {
        Pack<T, P> p = load<P>(inp + n * C + c), d = load<P>(dout + n * C + c);
        for (int k = 0; k < P; k++) {
            float x = to_float(p.v[k]);
            float slope = exact ? exact_gelu_at(x).slope : fast_gelu_at(x).slope;
            d.v[k] = from_acc<T>(to_float(d.v[k]) * slope);
        }
        store(dinp + n * C + c, d);
        return d;
    };
    sum_strip<COLUMN_WARPS, P>(from, to, blockIdx.x * size_t(32 * P), C, gradients,
                               [&](size_t c, float sum) { if (part) part[c] = sum; });
}

// ----------------------------------------------------------------------------
// launchers: any size and alignment

template <typename T>
void gelu_forward(T* out, const T* inp, size_t n, cudaStream_t stream, bool exact = false) {
    if (n == 0) return;
    bool vector = can_vectorize<T>(n, out, inp);
    size_t threads = vector ? n / VECTOR<T> : n;
    launch(vector ? gelu_forward_kernel<T, VECTOR<T>> : gelu_forward_kernel<T, 1>,
           unsigned(ceil_div(threads, GELU_THREADS)), GELU_THREADS, stream,
           out, inp, n, exact);
}

template <typename T>
void gelu_backward(T* dinp, float* sums, const T* dout, const T* inp, size_t N, size_t C,
                   cudaStream_t stream, bool exact = false) {
    size_t parts = strips_of(N, COLUMN_STRIPS, stream);
    bool vector = can_vectorize<T>(C, dinp, dout, inp);
    dim3 grid(unsigned(ceil_div(C, 32 * (vector ? VECTOR<T> : 1))), unsigned(parts));
    launch(vector ? gelu_backward_kernel<T, VECTOR<T>> : gelu_backward_kernel<T, 1>,
           grid, COLUMN_WARPS * 32, stream,
           dinp, sums, dout, inp, N, C, ceil_div(N, parts), exact);
}
#endif

// ----------------------------------------------------------------------------
// anywhere

// The number of elements of `sums`: C for each strip of rows.
template <typename S>
size_t gelu_sums(size_t N, size_t C, S where) { return strips_of(N, COLUMN_STRIPS, where) * C; }

// The parts that add_parts adds up into the bias's gradient. A null dbias is frozen.
template <typename A, typename S>
PartialSums<A> gelu_parts(A* dbias, const A* sums, size_t N, size_t C, S where) {
    return {dbias, sums, strips_of(N, COLUMN_STRIPS, where), C, C};
}

} // namespace llmc
