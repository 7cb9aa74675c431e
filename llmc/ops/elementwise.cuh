// elementwise.cuh - the sum of two tensors; softcaps, as Gemma 2 has - arXiv:2408.00118
//   add       out = a + b
//   softcap   x = cap tanh(x / cap), in place: large values level off at cap
//   out, a, b, x (n)
//   Contract: out = (out may be a or b); a cap of 0 changes nothing. Bitwise repeatable.
//   Cost: memory-bound.
//   To copy: this file, elements.h, types.h and cuda_common.h.
#pragma once
#include "cuda_common.h"
#include "elements.h"

namespace llmc {

// The activation of a gated unit (swiglu.cuh): SiLU for SwiGLU, GELU for GeGLU.
enum class Gate : uint8_t { SILU, GELU };

// ----------------------------------------------------------------------------
// CPU

template <typename T>
void add_forward(T* out, const T* a, const T* b, size_t n, Cpu) { // (n) (n) (n)
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++)
        out[i] = from_acc<T>(to_acc(a[i]) + to_acc(b[i]));
}

template <typename T>
void softcap_forward(T* x, size_t n, float cap, Cpu) { // (n)
    typedef acc_t<T> A;
    // Most models have none.
    if (cap == 0) return;
    #pragma omp parallel for
    for (size_t i = 0; i < n; i++)
        x[i] = from_acc<T>(A(cap) * std::tanh(to_acc(x[i]) / A(cap)));
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

// P elements a thread, the last one fewer.
template <typename T, int P>
__global__ void add_kernel(T* out, const T* a, const T* b, size_t n) {
    size_t i = first_element<P>();
    if (i >= n) return;
    // Each thread has read both before it writes: out may be either.
    Pack<T, P> x = load_some<P>(a + i, n - i), y = load_some<P>(b + i, n - i);
    for (int k = 0; k < P; k++)
        x.v[k] = from_acc<T>(to_float(x.v[k]) + to_float(y.v[k]));
    store_some(out + i, x, n - i);
}

template <typename T, int P>
__global__ void softcap_kernel(T* x, size_t n, float cap) {
    size_t i = first_element<P>();
    if (i >= n) return;
    // In registers, then back to where it came from.
    Pack<T, P> p = load_some<P>(x + i, n - i);
    for (int k = 0; k < P; k++)
        p.v[k] = from_acc<T>(cap * tanhf(to_float(p.v[k]) / cap));
    store_some(x + i, p, n - i);
}

// ----------------------------------------------------------------------------
// launchers

// Any n and alignment.
template <typename T>
void add_forward(T* out, const T* a, const T* b, size_t n, cudaStream_t stream) {
    pick_element_kernel<T>(n, can_vectorize<T>(0, out, a, b), [&](auto P, unsigned grid) {
        launch(add_kernel<T, P>, grid, ELEMENT_THREADS, 0, stream, out, a, b, n);
    });
}

template <typename T>
void softcap_forward(T* x, size_t n, float cap, cudaStream_t stream) {
    // No launch where there is none.
    if (cap == 0) return;
    pick_element_kernel<T>(n, can_vectorize<T>(0, x), [&](auto P, unsigned grid) {
        launch(softcap_kernel<T, P>, grid, ELEMENT_THREADS, 0, stream, x, n, cap);
    });
}
#endif

} // namespace llmc
