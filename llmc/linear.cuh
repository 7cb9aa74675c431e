// linear.cuh - the linear layer, forward and the two halves of backward; how weights are stored
//   out = inp W^T + bias (+ residual)
//   dinp = dout W,   dW = dout^T inp,   dbias = sum over rows of dout
//   inp, dinp (N,IC)   out, dout, residual (N,OC)   W (OC,IC)   bias (OC)   dW, dbias acc
//   Contract: out =   dinp, dW, dbias = or += (accumulate).  A Weight whose grad is null is frozen:
//             skipped.  Bitwise repeatable for equal threads.
//   Cost: 2 N OC IC FLOPs each; the bias gradient reads dout once more.
//   To copy: this file, matmul.cuh and common.h.
#pragma once
#include "matmul.cuh"

// A parameter as the layers see it. How it is stored (type, scales, adapters) concerns this file
// alone.
struct Weight {
    void* data = nullptr;
    Type type = Type::F32;
    size_t rows = 0, cols = 0;    // (OC, IC)
    void* grad = nullptr;         // acc; null: frozen
    const void* extras = nullptr; // scales, adapters
    template <typename T> T* as() const { return static_cast<T*>(data); }
};

// ----------------------------------------------------------------------------
// the three products of a weight (OC, IC) with N rows

// Plain strides come within 8% of oneDNN's fastest layout, accumulating in dW costs 1 to 4% against
// writing it (15% where OC is a vocabulary: there memory is the limit), with two exceptions that pay
// for a copy of W at every call (GPT-2's layers, AVX-512, one thread, copy included): dx in float,
// 270 GFLOP/s against 225, and out and dx with thousands of rows, 2 to 5% faster.
constexpr size_t LINEAR_PACK_ROWS = 2048, LINEAR_PACK_BYTES = size_t(32) << 20;

inline bool linear_packs(size_t N, size_t OC, size_t IC, Type t, bool input) {
    if (OC * IC * type_bytes(t) > LINEAR_PACK_BYTES) return false;
    return N >= LINEAR_PACK_ROWS || (input && t == Type::F32 && N >= 128);
}

inline Product linear_forward_product(size_t N, size_t OC, size_t IC, Type t) {
    return {N, OC, IC, {IC, 1}, {1, IC}, OC, false, linear_packs(N, OC, IC, t, false)};
}
inline Product linear_input_product(size_t N, size_t OC, size_t IC, Type t, bool accumulate) {
    return {N, IC, OC, {OC, 1}, {IC, 1}, IC, accumulate, linear_packs(N, OC, IC, t, true)};
}
inline Product linear_weight_product(size_t N, size_t OC, size_t IC, bool accumulate) {
    return {OC, IC, N, {1, OC}, {IC, 1}, IC, accumulate};
}

// The largest scratch that any of them needs.
template <typename T> size_t linear_scratch_bytes(size_t N, size_t OC, size_t IC, Cpu where) {
    Type t = type_of<T>(), a = type_of<acc_t<T>>();
    int threads = threads_here(where);
    size_t most = 0;
    auto need = [&](const Product& p, Type out, bool bias, bool residual) {
        most = std::max(most, matmul_scratch_bytes(p, t, out, bias, residual, threads));
    };
    for (int extra = 0; extra < 4; extra++)
        need(linear_forward_product(N, OC, IC, t), t, extra & 1, extra & 2);
    for (bool accumulate : {false, true}) {
        need(linear_input_product(N, OC, IC, t, accumulate), t, false, false);
        need(linear_weight_product(N, OC, IC, accumulate), a, false, false);
    }
    return most;
}

// ----------------------------------------------------------------------------
// CPU

// out (C) = or += the sum of x's rows; a thread owns columns, so the order of its sums is the rows'
template <typename T>
void column_sums(acc_t<T>* out, const T* x, void* /*scratch*/, size_t N, size_t C, bool accumulate,
                 Cpu) {
    constexpr size_t COLUMNS = 128;
    #pragma omp parallel for
    for (size_t c0 = 0; c0 < C; c0 += COLUMNS) {
        size_t count = std::min(COLUMNS, C - c0);
        acc_t<T> sum[COLUMNS] = {};
        for (size_t n = 0; n < N; n++) {
            const T* row = x + n * C + c0;
            #pragma omp simd
            for (size_t c = 0; c < count; c++) sum[c] += to_acc(row[c]);
        }
        for (size_t c = 0; c < count; c++) out[c0 + c] = accumulate ? out[c0 + c] + sum[c] : sum[c];
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels and launchers

#if KERNELS

template <typename T> struct RowTerm {
    const T* x;
    size_t C;
    template <int P> __device__ void add(float (&sum)[1][P], size_t n, size_t c) const {
        Pack<T, P> p = load<P>(x + n * C + c);
        for (int i = 0; i < P; i++) sum[0][i] += to_float(p.v[i]);
    }
};

template <typename T>
void column_sums(float* out, const T* x, void* scratch, size_t N, size_t C, bool accumulate,
                 cudaStream_t stream) {
    sum_columns<T>({out}, RowTerm<T>{x, C}, scratch, N, C, accumulate, can_vectorize<T>(C, x),
                   stream);
}

template <typename T> size_t linear_scratch_bytes(size_t N, size_t OC, size_t, cudaStream_t) {
    return std::max(PRODUCT_WORKSPACE, sum_columns_scratch_bytes(N, OC, 1));
}
#endif

// ----------------------------------------------------------------------------
// anywhere

template <typename T, typename S>
void linear_forward(T* out, const T* inp, const Weight& w, const Weight* bias, const T* residual,
                    size_t N, Blas& blas, S where) {
    const T* b = bias ? bias->as<const T>() : nullptr;
    Product p = linear_forward_product(N, w.rows, w.cols, type_of<T>());
    matmul(out, inp, w.as<const T>(), b, residual, p, blas, where);
}

template <typename T, typename S>
void linear_backward_input(T* dinp, const T* dout, const Weight& w, size_t N, bool accumulate,
                           Blas& blas, S where) {
    const T* nothing = nullptr;
    Product p = linear_input_product(N, w.rows, w.cols, type_of<T>(), accumulate);
    matmul(dinp, dout, w.as<const T>(), nothing, nothing, p, blas, where);
}

template <typename T, typename S>
void linear_backward_weight(const Weight& w, const Weight* bias, const T* dout, const T* inp,
                            size_t N, bool accumulate, Blas& blas, S where) {
    typedef acc_t<T> A;
    const T* no_bias = nullptr;
    const A* no_residual = nullptr;
    Product p = linear_weight_product(N, w.rows, w.cols, accumulate);
    if (w.grad) matmul(static_cast<A*>(w.grad), dout, inp, no_bias, no_residual, p, blas, where);
    if (bias && bias->grad)
        column_sums(static_cast<A*>(bias->grad), dout, blas.scratch, N, w.rows, accumulate, where);
}
