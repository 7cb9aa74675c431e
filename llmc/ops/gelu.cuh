// gelu.cuh - GELU in its tanh form or exact, forward and backward - arXiv:1606.08415
//   gelu(x) = x/2 * (1 + tanh(u)),  u = sqrt(2/pi) * (x + 0.044715 x^3)
//   gelu'(x) = (1 + tanh(u))/2 + x/2 * (1 - tanh(u)^2) * u'
//   exact: gelu(x) = x P(x), P(x) = (1 + erf(x / sqrt(2))) / 2, gelu'(x) = P(x) + x P'(x)
//   inp, out, dinp, dout (n); backward also takes rows (N,C), to sum them
//   Contract: out =, dinp = (dinp may be dout)
//             sums = partial sums of dinp's rows, which is the gradient of the bias added to inp;
//             null: not wanted. column_sums adds up the parts that gelu_parts lists.
//             Bitwise repeatable. The fast tanh has an absolute error below 3e-7, which is enough
//             because only 1 + tanh is used.
//   Cost: memory-bound. forward reads inp, writes out; backward reads inp, dout, writes dinp.
//   To copy: this file, column_sums.cuh, types.h and cuda_common.h.
#pragma once
#include "column_sums.cuh"

namespace llmc {

// ----------------------------------------------------------------------------
// CPU

constexpr double GELU_SCALE = 0.7978845608028654; // sqrt(2 / pi)

// GELU's value and slope at one x. A gated unit needs both (swiglu.cuh).
template <typename A> struct GeluAt {
    A value, slope;
};
template <typename A>
GeluAt<A> gelu_at(A x) {
    // Value and slope share the tanh, which is the most expensive part of both.
    A u = A(GELU_SCALE) * (x + A(0.044715) * x * x * x);
    A t = fast_tanh(u);
    A du = A(GELU_SCALE) * (1 + 3 * A(0.044715) * x * x);
    A half = A(0.5) * (1 + t);
    return {x * half, half + A(0.5) * x * (1 - t * t) * du};
}

// The exact form. std::erf is computed in A: erff for float.
template <typename A>
LLMC_HD GeluAt<A> exact_gelu_at(A x) {
    // The normal distribution's cumulative probability up to x, and its density there.
    A half = A(0.5) * (1 + std::erf(x * A(0.7071067811865476)));
    A density = A(0.3989422804014327) * std::exp(A(-0.5) * x * x);
    return {x * half, half + x * density};
}

// The CPU's tanh is a polynomial, which g++ vectorises; the exact form is slower.
template <typename T>
void gelu_forward(T* out, const T* inp, size_t n, Cpu, bool exact = false) { // (n) (n)
    typedef acc_t<T> A;
    // erf is a library call, which does not vectorise.
    if (exact) {
        #pragma omp parallel for
        for (size_t i = 0; i < n; i++)
            out[i] = from_acc<T>(exact_gelu_at(to_acc(inp[i])).value);
        return;
    }
    // The tanh form, in vectors.
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) {
        A x = to_acc(inp[i]);
        // The cube is written as products: a call of pow would not vectorise.
        A u = A(GELU_SCALE) * (x + A(0.044715) * x * x * x);
        out[i] = from_acc<T>(A(0.5) * x * (1 + fast_tanh(u)));
    }
}

// tanh is computed again, which is cheaper than storing it in forward and reading it here.
template <typename T>
void gelu_backward(T* dinp, const T* dout, const T* inp, size_t n, Cpu, // (n) (n) (n)
                   bool exact = false) {
    typedef acc_t<T> A;
    // The exact form, one element at a time.
    if (exact) {
        #pragma omp parallel for
        for (size_t i = 0; i < n; i++)
            dinp[i] = from_acc<T>(to_acc(dout[i]) * exact_gelu_at(to_acc(inp[i])).slope);
        return;
    }

    // The tanh form, in vectors.
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) {
        A x = to_acc(inp[i]);
        A u = A(GELU_SCALE) * (x + A(0.044715) * x * x * x);
        A t = fast_tanh(u);
        // du is u', slope is gelu'(x); both as in the header.
        A du = A(GELU_SCALE) * (1 + 3 * A(0.044715) * x * x);
        A slope = A(0.5) * (1 + t) + A(0.5) * x * (1 - t * t) * du;
        dinp[i] = from_acc<T>(to_acc(dout[i]) * slope);
    }
}

// The same for rows, with the sum of dinp's rows. On the CPU there is one part: the sum itself.
template <typename T>
void gelu_backward(T* dinp, acc_t<T>* sums, const T* dout, const T* inp, // (N,C) (1,C) (N,C) (N,C)
                   size_t N, size_t C, Cpu where, bool exact = false) {
    void* no_scratch = nullptr;
    gelu_backward(dinp, dout, inp, N * C, where, exact);
    if (sums)
        column_sums(sums, dinp, no_scratch, N, C, false, where);
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

// tanh by one fast exponential. For large |u| the exponential is infinity or 0, and the quotient
// is still correct.
__device__ inline float gelu_tanh(float u) { return 1 - __fdividef(2, __expf(2 * u) + 1); }

__device__ inline GeluAt<float> fast_gelu_at(float x) {
    // The same as gelu_at, with the fast tanh.
    float u = float(GELU_SCALE) * (x + 0.044715f * x * x * x);
    float t = gelu_tanh(u);
    float du = float(GELU_SCALE) * (1 + 3 * 0.044715f * x * x);
    float half = 0.5f * (1 + t);
    return {x * half, half + 0.5f * x * (1 - t * t) * du};
}

// A thread takes P elements; the last thread may have fewer.
template <typename T, int P>
__global__ void gelu_forward_kernel(T* out, const T* inp, size_t n, bool exact) {
    size_t i = first_element<P>();
    if (i >= n) return;
    // One pack holds the inputs, then the results.
    Pack<T, P> p = load_some<P>(inp + i, n - i);
    for (int k = 0; k < P; k++) {
        float x = to_float(p.v[k]);
        float u = float(GELU_SCALE) * (x + 0.044715f * x * x * x);
        float y = exact ? exact_gelu_at(x).value : 0.5f * x * (1 + gelu_tanh(u));
        p.v[k] = from_acc<T>(y);
    }
    store_some(out + i, p, n - i);
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

    // Write the gradients of the strip, and sum the rows that the lambda returns.
    sum_strip<P>(part, from, to, blockIdx.x * size_t(32 * P), C, [&](size_t n, size_t c) {
        Pack<T, P> p = load<P>(inp + n * C + c), d = load<P>(dout + n * C + c);
        for (int k = 0; k < P; k++) {
            float x = to_float(p.v[k]);

            // GELU is x (1 + tanh(u)) / 2: the slope has a term of each factor.
            float u = float(GELU_SCALE) * (x + 0.044715f * x * x * x);
            float t = gelu_tanh(u);
            float du = float(GELU_SCALE) * (1 + 3 * 0.044715f * x * x);
            float slope = 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * du;
            if (exact) slope = exact_gelu_at(x).slope;
            d.v[k] = from_acc<T>(to_float(d.v[k]) * slope);
        }
        store(dinp + n * C + c, d);
        return d;
    });
}

// ----------------------------------------------------------------------------
// launchers

// Any n and any alignment.
template <typename T>
void gelu_forward(T* out, const T* inp, size_t n, cudaStream_t stream, bool exact = false) {
    pick_element_kernel<T>(n, can_vectorize<T>(0, out, inp), [&](auto P, unsigned grid) {
        launch(gelu_forward_kernel<T, P>, grid, ELEMENT_THREADS, 0, stream, out, inp, n, exact);
    });
}

// Any shape and any alignment.
template <typename T>
void gelu_backward(T* dinp, float* sums, const T* dout, const T* inp, size_t N, size_t C,
                   cudaStream_t stream, bool exact = false) {
    size_t parts = column_parts(N, stream);
    size_t rows = ceil_div(N, parts);
    // One unaligned pointer sends all three to loads of single elements.
    bool vector = can_vectorize<T>(C, dinp, dout, inp);
    auto run = [&](auto P) {
        dim3 grid(unsigned(ceil_div(C, 32 * P)), unsigned(parts));
        launch(gelu_backward_kernel<T, P>, grid, COLUMN_WARPS * 32, 0, stream, dinp, sums, dout,
               inp, N, C, rows, exact);
    };
    vector ? run(Int<VECTOR<T>>()) : run(Int<1>());
}
#endif

// ----------------------------------------------------------------------------
// anywhere

// The number of elements of `sums`: C for each strip of rows.
template <typename S>
size_t gelu_sums(size_t N, size_t C, S where) { return column_parts(N, where) * C; }

// The list of parts that column_sums adds up into the bias's gradient. A null dbias is frozen.
template <typename A, typename S>
PartialSums<A> gelu_parts(A* dbias, const A* sums, size_t N, size_t C, S where) {
    return {dbias, sums, column_parts(N, where), C, C};
}

} // namespace llmc
