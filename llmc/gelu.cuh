// gelu.cuh - GELU in its tanh form, forward and backward - arXiv:1606.08415
//   gelu(x) = x/2 * (1 + tanh(u)),  u = sqrt(2/pi) * (x + 0.044715 x^3)
//   gelu'(x) = (1 + tanh(u))/2 + x/2 * (1 - tanh(u)^2) * u'
//   inp, out, dinp, dout (n)
//   Contract: out =, dinp = (dinp may be dout).  Bitwise repeatable. tanh's error is absolute and
//             below 3e-7: what 1 + tanh needs.
//   Cost: memory-bound. forward reads inp, writes out; backward reads inp, dout, writes dinp.
//   To copy: this file and common.h.
#pragma once
#include "common.h"

// ----------------------------------------------------------------------------
// CPU

constexpr double GELU_SCALE = 0.7978845608028654; // sqrt(2 / pi)

template <typename T> void gelu_forward(T* out, const T* inp, size_t n, Cpu) {
    typedef acc_t<T> A;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) {
        A x = to_acc(inp[i]), u = A(GELU_SCALE) * (x + A(0.044715) * x * x * x);
        out[i] = from_acc<T>(A(0.5) * x * (1 + fast_tanh(u)));
    }
}

template <typename T> void gelu_backward(T* dinp, const T* dout, const T* inp, size_t n, Cpu) {
    typedef acc_t<T> A;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) {
        A x = to_acc(inp[i]), u = A(GELU_SCALE) * (x + A(0.044715) * x * x * x), t = fast_tanh(u);
        A du = A(GELU_SCALE) * (1 + 3 * A(0.044715) * x * x);
        dinp[i] = from_acc<T>(to_acc(dout[i]) * (A(0.5) * (1 + t) + A(0.5) * x * (1 - t * t) * du));
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if KERNELS

// tanh by one fast exponential: for large u it is infinity, or 0, and the quotient still right
__device__ inline float gelu_tanh(float u) { return 1 - __fdividef(2, __expf(2 * u) + 1); }

template <typename T, int P> __global__ void gelu_forward_kernel(T* out, const T* inp, size_t n) {
    size_t i = first_element<P>();
    if (i >= n) return;
    Pack<T, P> p = load_some<P>(inp + i, n - i);
    for (int k = 0; k < P; k++) {
        float x = to_float(p.v[k]), u = float(GELU_SCALE) * (x + 0.044715f * x * x * x);
        p.v[k] = from_acc<T>(0.5f * x * (1 + gelu_tanh(u)));
    }
    store_some(out + i, p, n - i);
}

template <typename T, int P>
__global__ void gelu_backward_kernel(T* dinp, const T* dout, const T* inp, size_t n) {
    size_t i = first_element<P>();
    if (i >= n) return;
    Pack<T, P> p = load_some<P>(inp + i, n - i), d = load_some<P>(dout + i, n - i);
    for (int k = 0; k < P; k++) {
        float x = to_float(p.v[k]), u = float(GELU_SCALE) * (x + 0.044715f * x * x * x);
        float t = gelu_tanh(u), du = float(GELU_SCALE) * (1 + 3 * 0.044715f * x * x);
        float slope = 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * du;
        d.v[k] = from_acc<T>(to_float(d.v[k]) * slope);
    }
    store_some(dinp + i, d, n - i);
}

// ----------------------------------------------------------------------------
// launchers

template <typename T> void gelu_forward(T* out, const T* inp, size_t n, cudaStream_t stream) {
    pick_element_kernel<T>(n, can_vectorize<T>(0, out, inp), [&](auto P, unsigned grid) {
        launch(gelu_forward_kernel<T, P>, grid, ELEMENT_THREADS, 0, stream, out, inp, n);
    });
}

template <typename T>
void gelu_backward(T* dinp, const T* dout, const T* inp, size_t n, cudaStream_t stream) {
    pick_element_kernel<T>(n, can_vectorize<T>(0, dinp, dout, inp), [&](auto P, unsigned grid) {
        launch(gelu_backward_kernel<T, P>, grid, ELEMENT_THREADS, 0, stream, dinp, dout, inp, n);
    });
}
#endif
