// swiglu.cuh - SwiGLU's gate, forward and backward - arXiv:2002.05202
//   out = silu(gate) * up,   silu(x) = x * s,   s = 1 / (1 + exp(-x))
//   silu'(x) = s * (1 + x * (1 - s))
//   out, gate, up, dout, dgate, dup (n)
//   Contract: out =, dgate =, dup =; dgate may be dout or gate, dup may be up.  Bitwise repeatable.
//   Cost: memory-bound. forward reads gate, up, writes out; backward reads dout, gate, up, writes
//         dgate, dup.
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

// ----------------------------------------------------------------------------
// CUDA kernels

#if KERNELS

__device__ inline float fast_sigmoid(float x) { return __fdividef(1, 1 + __expf(-x)); }

template <typename T, int P>
__global__ void swiglu_forward_kernel(T* out, const T* gate, const T* up, size_t n) {
    size_t i = first_element<P>();
    if (i >= n) return;
    Pack<T, P> pg = load_some<P>(gate + i, n - i), pu = load_some<P>(up + i, n - i);
    for (int k = 0; k < P; k++) {
        float g = to_float(pg.v[k]);
        pu.v[k] = from_acc<T>(g * fast_sigmoid(g) * to_float(pu.v[k]));
    }
    store_some(out + i, pu, n - i);
}

// Each thread has read its elements before it writes them: outputs may be inputs.
template <typename T, int P>
__global__ void swiglu_backward_kernel(T* dgate, T* dup, const T* dout, const T* gate, const T* up,
                                       size_t n) {
    size_t i = first_element<P>();
    if (i >= n) return;
    Pack<T, P> pd = load_some<P>(dout + i, n - i), pg = load_some<P>(gate + i, n - i),
               pu = load_some<P>(up + i, n - i);
    for (int k = 0; k < P; k++) {
        float d = to_float(pd.v[k]), g = to_float(pg.v[k]), u = to_float(pu.v[k]),
              s = fast_sigmoid(g);
        pg.v[k] = from_acc<T>(d * u * s * (1 + g * (1 - s)));
        pu.v[k] = from_acc<T>(d * g * s);
    }
    store_some(dgate + i, pg, n - i);
    store_some(dup + i, pu, n - i);
}

// ----------------------------------------------------------------------------
// launchers

template <typename T>
void swiglu_forward(T* out, const T* gate, const T* up, size_t n, cudaStream_t stream) {
    pick_element_kernel<T>(n, can_vectorize<T>(0, out, gate, up), [&](auto P, unsigned grid) {
        launch(swiglu_forward_kernel<T, P>, grid, ELEMENT_THREADS, 0, stream, out, gate, up, n);
    });
}

template <typename T>
void swiglu_backward(T* dgate, T* dup, const T* dout, const T* gate, const T* up, size_t n,
                     cudaStream_t stream) {
    bool vector = can_vectorize<T>(0, dgate, dup, dout, gate, up);
    pick_element_kernel<T>(n, vector, [&](auto P, unsigned grid) {
        launch(swiglu_backward_kernel<T, P>, grid, ELEMENT_THREADS, 0, stream, dgate, dup, dout,
               gate, up, n);
    });
}
#endif
