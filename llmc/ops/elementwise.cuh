// elementwise.cuh - a function of each element: sums, softcaps, ReLU^2 - arXiv:2408.00118
//   map       out = f(a, b, ...), rounded once
//   add       out = a + b
//   mix       out = a x + b y, a and b scalars in memory
//   round     out = in of another type, such as sums in float, or f(row, in, out); rows may lie
//             inside wider ones
//   gate      out = s x, or out += s x, s = scale sigmoid(logits[row])
//             dlogits = scale s' (x . dout), s' the slope of the sigmoid
//   softcap   x = cap tanh(x / cap), in place: large values level off at cap. With `root`
//             x = x / sqrt(1 + (x / cap)^2), which levels off later (modded-nanogpt)
//   relu2     out = max(inp, 0)^2,   dinp = 2 max(inp, 0) dout       arXiv:2109.08668
//   out, a, b, x, inp, dout, dinp (n)
//   Contract: out = (out may be an input); a cap of 0 changes nothing. Bitwise repeatable.
//   Cost: memory-bound.
//   To copy: this file, elements.h, types.h and cuda_common.h.
#pragma once
#include "cuda_common.h"
#include "elements.h"
#include "types.h"

namespace llmc {

// The activation of a gated unit (swiglu.cuh): SiLU for SwiGLU, GELU for GeGLU. RELU2 stands alone:
// there is no second product that it multiplies.
enum class Gate : uint8_t { SILU, GELU, RELU2 };

// ----------------------------------------------------------------------------
// map: f is a struct whose operator() takes and returns acc_t, on the CPU and on a GPU

template <typename T, typename F, typename... In>
void map_elements(T* out, size_t n, const F& f, Cpu, const In*... in) { // (n) each
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++)
        out[i] = from_acc<T>(f(to_acc(in[i])...));
}

// The result of round_rows: x itself, or x times the gate of its row, or the slope of that gate;
// with `adds` it joins what is there.
enum class Gated { GATE, SLOPE };
template <typename T, bool adds> struct RowGate {
    const T* logits = nullptr; // (rows), or null: no gate
    acc_t<T> scale = 1;
    Gated by = Gated::GATE;

    LLMC_HD acc_t<T> gate(size_t row) const {
        if (!logits) return scale;
        acc_t<T> s = 1 / (1 + std::exp(-to_acc(logits[row])));
        if (by == Gated::SLOPE)
            s *= 1 - s;
        return scale * s;
    }
    LLMC_HD acc_t<T> operator()(size_t row, acc_t<T> x, const T& before) const {
        acc_t<T> y = gate(row) * x;
        return adds ? y + to_acc(before) : y;
    }
};

// out = in or f(row, in, out), n elements a row: both may lie inside wider rows
template <typename T, typename In, typename F = RowGate<T, false>>
void round_rows(T* out, size_t out_stride, const In* in, size_t in_stride, size_t rows, size_t n,
                Cpu, const F& f = {}) {
    #pragma omp parallel for
    for (size_t i = 0; i < rows; i++) {
        T* to = out + i * out_stride;
        const In* from = in + i * in_stride;
        for (size_t c = 0; c < n; c++) {
            auto x = to_acc(from[c]);
            to[c] = from_acc<T>(f(i, x, to[c]));
        }
    }
}

#if LLMC_KERNELS

// A thread takes P elements, the last one fewer. It has read all inputs before it writes: out may
// be one of them.
template <typename T, int P, typename F, typename... In>
__global__ void map_elements_kernel(T* out, size_t n, F f, const In*... in) {
    size_t i = first_element<P>();
    if (i >= n) return;
    auto mapped = [&](auto... x) {
        Pack<T, P> y;
        for (int k = 0; k < P; k++)
            y.v[k] = from_acc<T>(f(to_float(x.v[k])...));
        return y;
    };
    store_some(out + i, mapped(load_some<P>(in + i, n - i)...), n - i);
}

template <typename T, typename F, typename... In>
void map_elements(T* out, size_t n, const F& f, cudaStream_t stream, const In*... in) {
    bool vector = can_vectorize<T>(0, out) && (can_vectorize<In>(0, in) && ...);
    pick_element_kernel<T>(n, vector, [&](auto P, unsigned grid) {
        launch(map_elements_kernel<T, P, F, In...>, grid, ELEMENT_THREADS, stream, out, n, f,
               in...);
    });
}

template <typename T, typename In, typename F>
__global__ void round_rows_kernel(T* out, size_t out_stride, const In* in, size_t in_stride,
                                  size_t rows, size_t n, F f) {
    size_t i = first_element<1>();
    if (i >= rows * n) return;
    size_t row = i / n;
    size_t c = i % n;
    float x = to_float(in[row * in_stride + c]);
    T* to = out + row * out_stride + c;
    *to = from_acc<T>(f(row, x, *to));
}

template <typename T, typename In, typename F = RowGate<T, false>>
void round_rows(T* out, size_t out_stride, const In* in, size_t in_stride, size_t rows, size_t n,
                cudaStream_t stream, const F& f = {}) {
    pick_element_kernel<T>(rows * n, false, [&](auto, unsigned grid) {
        launch(round_rows_kernel<T, In, F>, grid, ELEMENT_THREADS, stream, out, out_stride, in,
               in_stride, rows, n, f);
    });
}
#endif

// ----------------------------------------------------------------------------
// anywhere

// Without y: a x. A null b is 1.
template <typename T> struct ScalarMix {
    typedef acc_t<T> A;
    const T* a;
    const T* b = nullptr;

    LLMC_HD A operator()(A x) const {
        return to_acc(*a) * x;
    }
    LLMC_HD A operator()(A x, A y) const {
        if (b) y *= to_acc(*b);
        return to_acc(*a) * x + y;
    }
};

template <typename A> struct ElementTimes {
    A factor;
    LLMC_HD A operator()(A x) const { return factor * x; }
};
struct ElementSum {
    template <typename A> LLMC_HD A operator()(A a, A b) const { return a + b; }
};
template <typename T, typename S>
void add_forward(T* out, const T* a, const T* b, size_t n, S where) { // (n) (n) (n)
    map_elements(out, n, ElementSum(), where, a, b);
}

template <typename A> struct ElementCap {
    A cap;
    LLMC_HD A operator()(A x) const { return cap * std::tanh(x / cap); }
};
template <typename A> struct ElementRootCap {
    A cap;
    LLMC_HD A operator()(A x) const { return x / std::sqrt(1 + x / cap * (x / cap)); }
};
template <typename T, typename S>
void softcap_forward(T* x, size_t n, float cap, S where, bool root = false) { // (n)
    typedef acc_t<T> A;
    // Most models have none.
    if (cap == 0) return;
    if (root) return map_elements(x, n, ElementRootCap<A>{A(cap)}, where, x);
    map_elements(x, n, ElementCap<A>{A(cap)}, where, x);
}

struct ElementRelu2 {
    template <typename A> LLMC_HD A operator()(A x) const { return x > 0 ? x * x : 0; }
};
struct ElementRelu2Gradient {
    template <typename A> LLMC_HD A operator()(A d, A x) const { return x > 0 ? 2 * x * d : 0; }
};
template <typename T, typename S>
void relu2_forward(T* out, const T* inp, size_t n, S where) { // (n) (n)
    map_elements(out, n, ElementRelu2(), where, inp);
}
template <typename T, typename S>
void relu2_backward(T* dinp, const T* dout, const T* inp, size_t n, S where) { // (n) (n) (n)
    map_elements(dinp, n, ElementRelu2Gradient(), where, dout, inp);
}

} // namespace llmc
