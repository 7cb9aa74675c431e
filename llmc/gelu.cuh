// gelu.cuh - GELU in its tanh form, forward and backward - arXiv:1606.08415
//   gelu(x) = x/2 * (1 + tanh(u)),  u = sqrt(2/pi) * (x + 0.044715 x^3)
//   gelu'(x) = (1 + tanh(u))/2 + x/2 * (1 - tanh(u)^2) * u'
//   inp, out, dinp, dout (n)
//   Contract: out =, dinp = (dinp may be dout).  Bitwise repeatable.
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
