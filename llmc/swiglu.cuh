// swiglu.cuh - SwiGLU's gate, forward and backward - arXiv:2002.05202
//   out = silu(gate) * up,  silu(x) = x * s,  s = 1 / (1 + exp(-x)),  silu'(x) = s * (1 + x * (1 -
//   s))
//   out, gate, up, dout, dgate, dup (n)
//   Contract: out =, dgate =, dup =; dgate may be dout or gate, dup may be up.  Bitwise repeatable.
//   Cost: memory-bound. forward reads gate, up, writes out; backward reads dout, gate, up, writes
//   dgate, dup.
//   To copy: this file and common.h.
#pragma once
#include "common.h"

// ----------------------------------------------------------------------------
// CPU

template <typename T> void swiglu_forward(T* out, const T* gate, const T* up, size_t n, Cpu) {
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) {
        acc_t<T> g = to_acc(gate[i]), s = 1 / (1 + fast_exp(-g));
        out[i] = from_acc<T>(g * s * to_acc(up[i]));
    }
}

template <typename T>
void swiglu_backward(T* dgate, T* dup, const T* dout, const T* gate, const T* up, size_t n, Cpu) {
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) {
        acc_t<T> d = to_acc(dout[i]), g = to_acc(gate[i]), u = to_acc(up[i]),
                 s = 1 / (1 + fast_exp(-g));
        dgate[i] = from_acc<T>(d * u * s * (1 + g * (1 - s)));
        dup[i] = from_acc<T>(d * g * s);
    }
}
