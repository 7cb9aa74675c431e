// linear.cuh - the linear layer, forward and the two halves of backward; how weights are stored
//   out = inp W^T + bias (+ residual)
//   dinp = dout W,   dW = dout^T inp,   dbias = sum over rows of dout
//   inp, dinp (N,IC)   out, dout, residual (N,OC)   W (OC,IC)   bias (OC)   dW, dbias acc
//   Contract: out =   dinp, dW, dbias = or += (accumulate).  A Weight whose grad is null is frozen:
//             skipped.  Bitwise repeatable for equal threads.
//   Cost: 2 N OC IC FLOPs each; the bias gradient reads dout once more.
//   To copy: this file, column_sums.cuh, matmul.cuh, types.h and cuda_common.h.
#pragma once
#include "column_sums.cuh"
#include "matmul.cuh"

namespace llmc {

// A parameter as the layers see it. Only this file knows how it is stored: type, scales, adapters.
struct Weight {
    void* data = nullptr; // (rows, cols) of `type`
    Type type = Type::F32;
    size_t rows = 0, cols = 0;    // OC, IC
    void* grad = nullptr;         // (rows, cols) acc; null: frozen
    const void* extras = nullptr; // scales, adapters
    template <typename T>
    T* as() const { return static_cast<T*>(data); }
};

// ----------------------------------------------------------------------------
// the three products of a weight (OC, IC) with N rows

// Whether oneDNN copies W into its own layout before a product. It seldom pays: plain strides come
// within 8% of that layout. Two products repay a copy at every call (GPT-2's layers, AVX-512, one
// thread, copy included): dx in float, 270 GFLOP/s against 225; out and dx with thousands of rows,
// 2 to 5%. dW is never packed: += costs 1 to 4% against = (15% where OC is a vocabulary: there
// memory is the limit).
constexpr size_t LINEAR_PACK_ROWS = 2048, LINEAR_PACK_BYTES = size_t(32) << 20;

inline bool linear_packs(size_t N, size_t OC, size_t IC, Type t, bool input) {
    if (OC * IC * type_bytes(t) > LINEAR_PACK_BYTES) return false;
    return N >= LINEAR_PACK_ROWS || (input && t == Type::F32 && N >= 128);
}

// The transpose of W is W with its strides exchanged.
inline Product linear_forward_product(size_t N, size_t OC, size_t IC, Type t) {
    return {N, OC, IC, {IC, 1}, {1, IC}, OC, false, linear_packs(N, OC, IC, t, false)};
}
inline Product linear_input_product(size_t N, size_t OC, size_t IC, Type t, bool accumulate) {
    return {N, IC, OC, {OC, 1}, {IC, 1}, IC, accumulate, linear_packs(N, OC, IC, t, true)};
}
// The sum of dW runs over the N rows.
inline Product linear_weight_product(size_t N, size_t OC, size_t IC, bool accumulate) {
    return {OC, IC, N, {1, OC}, {IC, 1}, IC, accumulate};
}

// The largest scratch that any of them needs.
template <typename T>
size_t linear_scratch_bytes(size_t N, size_t OC, size_t IC, Cpu where) {
    Type t = type_of<T>();        // of W and activations
    Type a = type_of<acc_t<T>>(); // of gradients
    int threads = threads_here(where);
    size_t most = 0;
    auto need = [&](const Product& p, Type out, bool bias, bool residual) {
        most = std::max(most, matmul_scratch_bytes(p, t, out, bias, residual, threads));
    };

    // Ask for every form: with and without bias and residual, = and +=.
    for (int extra = 0; extra < 4; extra++)
        need(linear_forward_product(N, OC, IC, t), t, extra & 1, extra & 2);
    for (bool accumulate : {false, true}) {
        need(linear_input_product(N, OC, IC, t, accumulate), t, false, false);
        need(linear_weight_product(N, OC, IC, accumulate), a, false, false);
    }
    return most;
}

// ----------------------------------------------------------------------------
// CUDA: the scratch of the launchers below

#if LLMC_KERNELS
// cuBLASLt's workspace and the bias gradient's partial sums take turns in it.
template <typename T>
size_t linear_scratch_bytes(size_t N, size_t OC, size_t, cudaStream_t stream) {
    return std::max(PRODUCT_WORKSPACE, column_sums_scratch_bytes(N, OC, stream));
}
#endif

// ----------------------------------------------------------------------------
// anywhere

// out = inp W^T + bias + residual, in one product.
template <typename T, typename S>
void linear_forward(T* out, const T* inp,                  // (N,OC) (N,IC)
                    const Weight& w, const Weight* bias,   // (OC,IC) (OC) or null
                    const T* residual,                     // (N,OC) or null
                    size_t N, Blas& blas, S where) {
    const T* b = bias ? bias->as<const T>() : nullptr;
    Product p = linear_forward_product(N, w.rows, w.cols, type_of<T>());
    matmul(out, inp, w.as<const T>(), b, residual, p, blas, where);
}

// dinp = or += dout W
template <typename T, typename S>
void linear_backward_input(T* dinp, const T* dout, const Weight& w, // (N,IC) (N,OC) (OC,IC)
                           size_t N, bool accumulate, Blas& blas, S where) {
    const T* nothing = nullptr;
    Product p = linear_input_product(N, w.rows, w.cols, type_of<T>(), accumulate);
    matmul(dinp, dout, w.as<const T>(), nothing, nothing, p, blas, where);
}

// dW = or += dout^T inp, dbias = or += the sum of dout's rows; what is frozen is skipped.
template <typename T, typename S>
void linear_backward_weight(const Weight& w, const Weight* bias, // their grads: (OC,IC) (OC)
                            const T* dout, const T* inp,         // (N,OC) (N,IC)
                            size_t N, bool accumulate, Blas& blas, S where) {
    typedef acc_t<T> A;
    const T* no_bias = nullptr;
    const A* no_residual = nullptr;
    Product p = linear_weight_product(N, w.rows, w.cols, accumulate);
    if (w.grad)
        matmul(static_cast<A*>(w.grad), dout, inp, no_bias, no_residual, p, blas, where);
    // The bias gradient comes after the product: both use the one scratch.
    if (bias && bias->grad)
        column_sums(static_cast<A*>(bias->grad), dout, blas.scratch, N, w.rows, accumulate, where);
}

} // namespace llmc
