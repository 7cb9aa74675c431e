// swiglu.cuh - SwiGLU's and GeGLU's gate, forward and backward - arXiv:2002.05202
//   out = silu(gate) * up,   silu(x) = x * s,   s = 1 / (1 + exp(-x))
//   silu'(x) = s * (1 + x * (1 - s))
//   or gelu(gate) * up, GELU in its tanh form (gelu.cuh)
//   out, gate, up, dout, dgate, dup (n)
//   Contract: out =, dgate =, dup =; dgate may be dout or gate, dup may be up.  Bitwise repeatable.
//   Cost: memory-bound. forward reads gate, up, writes out; backward reads dout, gate, up, writes
//         dgate, dup.
//   To copy: this file, elements.h, elementwise.cuh, fast_math.h, gelu.cuh, partial_sums.cuh,
//            types.h and cuda_common.h.
#pragma once
#include "cuda_common.h"
#include "elements.h"
#include "elementwise.cuh"
#include "fast_math.h"
#include "gelu.cuh"
#include "types.h"

namespace llmc {

// ----------------------------------------------------------------------------
// CPU

// The CPU's exp is a polynomial, which g++ vectorises.
template <typename T>
void swiglu_forward(T* out, const T* gate, const T* up, size_t n, Cpu, // (n) (n) (n)
                    Gate kind = Gate::SILU) {
    typedef acc_t<T> A;
    auto multiply = [&](auto activation) {
        #pragma omp parallel for simd
        for (size_t i = 0; i < n; i++)
            out[i] = from_acc<T>(activation(to_acc(gate[i])) * to_acc(up[i]));
    };

    // GeGLU: gelu_at also returns the slope, which the compiler drops here. SwiGLU: the gate times
    // its sigmoid, which lies in (0, 1).
    if (kind == Gate::GELU)
        multiply([](A g) { return gelu_at(g).value; });
    else
        multiply([](A g) { return g * (1 / (1 + fast_exp(-g))); });
}

// Outputs may overwrite inputs: every input of an element is read before any output is written.
template <typename T>
void swiglu_backward(T* dgate, T* dup,                          // (n) (n)
                     const T* dout, const T* gate, const T* up, // (n) (n) (n)
                     size_t n, Cpu, Gate kind = Gate::SILU) {
    typedef acc_t<T> A;

    // GeGLU: GELU's value and slope from one tanh.
    if (kind == Gate::GELU) {
        #pragma omp parallel for simd
        for (size_t i = 0; i < n; i++) {
            A d = to_acc(dout[i]);
            A u = to_acc(up[i]);
            GeluAt<A> gelu = gelu_at(to_acc(gate[i]));
            dgate[i] = from_acc<T>(d * u * gelu.slope);
            dup[i] = from_acc<T>(d * gelu.value);
        }
        return;
    }

    // SwiGLU.
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) {
        A d = to_acc(dout[i]);
        A g = to_acc(gate[i]);
        A u = to_acc(up[i]);
        // Compute s again: keeping it would cost a write and a read of memory.
        A s = 1 / (1 + fast_exp(-g));
        // out = silu(gate) * up, so dgate = dout * up * silu'(gate) and dup = dout * silu(gate).
        dgate[i] = from_acc<T>(d * u * s * (1 + g * (1 - s)));
        dup[i] = from_acc<T>(d * g * s);
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

// The sigmoid. Its fast exponential and division each err by a few units in the last place.
__device__ inline float fast_sigmoid(float x) { return __fdividef(1, 1 + __expf(-x)); }

// A thread takes P elements; the last thread may have fewer.
template <typename T, int P>
__global__ void swiglu_forward_kernel(T* out, const T* gate, const T* up, size_t n, Gate kind) {
    size_t i = first_element<P>();
    if (i >= n) return;
    Pack<T, P> pg = load_some<P>(gate + i, n - i);
    Pack<T, P> pu = load_some<P>(up + i, n - i);
    for (int k = 0; k < P; k++) {
        float g = to_float(pg.v[k]);
        // The result goes into up's pack: both packs are in registers.
        float gated = kind == Gate::GELU ? fast_gelu_at(g).value : g * fast_sigmoid(g);
        pu.v[k] = from_acc<T>(gated * to_float(pu.v[k]));
    }
    store_some(out + i, pu, n - i);
}

// Outputs may overwrite inputs: each thread reads all its elements before it writes them.
template <typename T, int P>
__global__ void swiglu_backward_kernel(T* dgate, T* dup, const T* dout, const T* gate, const T* up,
                                       size_t n, Gate kind) {
    size_t i = first_element<P>();
    if (i >= n) return;
    Pack<T, P> pd = load_some<P>(dout + i, n - i);
    Pack<T, P> pg = load_some<P>(gate + i, n - i);
    Pack<T, P> pu = load_some<P>(up + i, n - i);
    for (int k = 0; k < P; k++) {
        float d = to_float(pd.v[k]);
        float g = to_float(pg.v[k]);
        float u = to_float(pu.v[k]);

        // The packs of gate and up become their gradients.
        if (kind == Gate::GELU) {
            GeluAt<float> gelu = fast_gelu_at(g);
            pg.v[k] = from_acc<T>(d * u * gelu.slope);
            pu.v[k] = from_acc<T>(d * gelu.value);
            continue;
        }

        // SiLU is g times its sigmoid.
        float s = fast_sigmoid(g);
        pg.v[k] = from_acc<T>(d * u * s * (1 + g * (1 - s)));
        pu.v[k] = from_acc<T>(d * g * s);
    }
    store_some(dgate + i, pg, n - i);
    store_some(dup + i, pu, n - i);
}

// ----------------------------------------------------------------------------
// launchers: any n and alignment

template <typename T>
void swiglu_forward(T* out, const T* gate, const T* up, size_t n, cudaStream_t stream,
                    Gate kind = Gate::SILU) {
    pick_element_kernel<T>(n, can_vectorize<T>(0, out, gate, up), [&](auto P, unsigned grid) {
        launch(swiglu_forward_kernel<T, P>, grid, ELEMENT_THREADS, stream, out, gate, up, n, kind);
    });
}

template <typename T>
void swiglu_backward(T* dgate, T* dup, const T* dout, const T* gate, const T* up, size_t n,
                     cudaStream_t stream, Gate kind = Gate::SILU) {
    bool vector = can_vectorize<T>(0, dgate, dup, dout, gate, up);
    pick_element_kernel<T>(n, vector, [&](auto P, unsigned grid) {
        launch(swiglu_backward_kernel<T, P>, grid, ELEMENT_THREADS, stream, dgate, dup, dout, gate,
               up, n, kind);
    });
}
#endif

} // namespace llmc
