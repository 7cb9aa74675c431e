// lora.cuh - low-rank adapters beside a frozen matrix, in thin products - arXiv:2106.09685
//   out  += s (inp A^T) B^T                   s = alpha / r, or alpha / sqrt(r): arXiv:2312.03732
//   dinp += s (dout B) A,   dB = s dout^T (inp A^T),   dA = s (dout B)^T inp
//   inp, dinp (N,IC)   out, dout (N,OC)   A (r,IC)   B (OC,r)   dA, dB acc   room (N,r)
//   s multiplies the product with r columns, never a weight: AdamW sees A and B as they are.
//   Contract: out, dinp +=   dA, dB = or += (accumulate).  Where B is zero, out and dinp stay what
//             they were, and dA is zero. Bitwise repeatable for equal threads.
//   Cost: 2 N r (IC + OC) FLOPs forward and 8 N r (IC + OC) backward. The gradients of the weights
//         compute inp A^T and dout B again, so that nothing of N rows is kept. The products are
//         thin: each reads or writes N IC or N OC elements and waits for memory.
//   To copy: this file, element_type.h, elements.h, gpu.h, matmul.cuh, types.h and cuda_common.h.
#pragma once
#include "element_type.h"
#include "elements.h"
#include "matmul.cuh"

namespace llmc {

// The adapter of a matrix (OC,IC). A Weight points at it (linear.cuh), so its owner must keep it
// alive while products run.
struct Lora {
    const void *a = nullptr, *b = nullptr; // (r,IC) (OC,r)
    void *da = nullptr, *db = nullptr;     // (r,IC) (OC,r) acc; null: not training
    size_t rank = 0;                       // r
    double scale = 1;                      // s
};

// ----------------------------------------------------------------------------
// CPU

// x *= s. It applies the adapter's scale to a matrix of r columns.
template <typename T>
void lora_scale(T* x, size_t n, double s, Cpu) { // (n)
    typedef acc_t<T> A;
    // An alpha equal to the rank gives s = 1 and needs no pass.
    if (s == 1) return;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++)
        x[i] = from_acc<T>(A(s) * to_acc(x[i]));
}

// ----------------------------------------------------------------------------
// CUDA kernel and its launcher

#if LLMC_KERNELS

// A thread takes P elements; the last thread may have fewer.
template <typename T, int P>
__global__ void lora_scale_kernel(T* x, size_t n, float s) {
    size_t i = first_element<P>();
    if (i >= n) return;

    // Scale in registers, then write back in place.
    Pack<T, P> p = load_some<P>(x + i, n - i);
    for (int k = 0; k < P; k++)
        p.v[k] = from_acc<T>(s * to_float(p.v[k]));
    store_some(x + i, p, n - i);
}

// Any n and any alignment.
template <typename T>
void lora_scale(T* x, size_t n, double s, cudaStream_t stream) {
    // s = 1 needs no launch.
    if (s == 1) return;
    pick_element_kernel<T>(n, can_vectorize<T>(0, x), [&](auto P, unsigned grid) {
        launch(lora_scale_kernel<T, P>, grid, ELEMENT_THREADS, 0, stream, x, n, float(s));
    });
}
#endif

// ----------------------------------------------------------------------------
// anywhere: the products

// The six products for N rows: two into r columns and out of them each way, then those of the
// gradients of the weights.
struct LoraProducts {
    Product x_a, h_b;   // inp A^T, and that times B^T
    Product dy_b, dh_a; // dout B, and that times A
    Product db, da;     // dout^T (inp A^T), (dout B)^T inp
};
// Describe the six products. `accumulate` is for the gradients of the weights; out and
// dinp always accumulate.
inline LoraProducts lora_products(size_t N, size_t OC, size_t IC, size_t r, bool accumulate) {
    // Each line: rows, columns, length of the sum; strides of both operands; row stride of the
    // output; whether it accumulates.
    return {{N, r, IC, {IC, 1}, {1, IC}, r},
            // From r columns to OC, added to what the base weight's product has written.
            {N, OC, r, {r, 1}, {1, r}, OC, true},
            // The same two in backward: through B, then through A.
            {N, r, OC, {OC, 1}, {r, 1}, r},
            {N, IC, r, {r, 1}, {IC, 1}, IC, true},
            // The gradients sum over the N rows, so their first operand is read transposed.
            {OC, r, N, {1, OC}, {r, 1}, r, accumulate},
            {r, IC, N, {1, r}, {IC, 1}, IC, accumulate}};
}

// The largest scratch that any of the six products needs.
template <typename T>
size_t lora_scratch_bytes(size_t N, size_t OC, size_t IC, size_t r, Cpu where) {
    Type t = type_of<T>();        // of weights and activations
    Type a = type_of<acc_t<T>>(); // of gradients of weights
    size_t most = 0;
    // The first micro-batch writes the gradients, later ones add to them: ask for both.
    for (bool accumulate : {false, true}) {
        LoraProducts p = lora_products(N, OC, IC, r, accumulate);
        auto need = [&](const Product& q, Type out) {
            size_t bytes = matmul_scratch_bytes(q, t, out, false, false, threads_here(where));
            most = std::max(most, bytes);
        };
        for (const Product& q : {p.x_a, p.h_b, p.dy_b, p.dh_a})
            need(q, t);
        need(p.db, a);
        need(p.da, a);
    }
    return most;
}
#if LLMC_KERNELS
// cuBLASLt's workspace serves products of any size.
template <typename T>
size_t lora_scratch_bytes(size_t, size_t, size_t, size_t, cudaStream_t) {
    return PRODUCT_WORKSPACE;
}
#endif

// out += s (inp A^T) B^T, as two thin products. One product with the matrix B A would be as large
// as the base weight's own.
template <typename T, typename S>
void lora_forward(T* out, const T* inp, const Lora& l, T* room, // (N,OC) (N,IC)  room (N,r)
                  size_t N, size_t OC, size_t IC, Blas& blas, S where) {
    const T *a = static_cast<const T*>(l.a), *b = static_cast<const T*>(l.b), *nothing = nullptr;
    LoraProducts p = lora_products(N, OC, IC, l.rank, false);
    matmul(room, inp, a, nothing, nothing, p.x_a, blas, where);
    lora_scale(room, N * l.rank, l.scale, where);
    matmul(out, room, b, nothing, nothing, p.h_b, blas, where);
}

// dinp += s (dout B) A. The base weight's product comes first: it writes dinp or adds to it.
template <typename T, typename S>
void lora_backward_input(T* dinp, const T* dout, const Lora& l, T* room, // (N,IC) (N,OC)
                         size_t N, size_t OC, size_t IC, Blas& blas, S where) {
    const T *a = static_cast<const T*>(l.a), *b = static_cast<const T*>(l.b), *nothing = nullptr;
    LoraProducts p = lora_products(N, OC, IC, l.rank, false);
    matmul(room, dout, b, nothing, nothing, p.dy_b, blas, where);
    lora_scale(room, N * l.rank, l.scale, where);
    matmul(dinp, room, a, nothing, nothing, p.dh_a, blas, where);
}

// dB = or += s dout^T (inp A^T),  dA = or += s (dout B)^T inp
template <typename T, typename S>
void lora_backward_weight(const Lora& l, const T* dout, const T* inp, T* room, // (N,OC) (N,IC)
                          size_t N, size_t OC, size_t IC, bool accumulate, Blas& blas, S where) {
    typedef acc_t<T> A;
    const T *a = static_cast<const T*>(l.a), *b = static_cast<const T*>(l.b), *nothing = nullptr;
    const A* no_residual = nullptr;
    LoraProducts p = lora_products(N, OC, IC, l.rank, accumulate);
    // dB. The room serves both gradients, one after the other.
    matmul(room, inp, a, nothing, nothing, p.x_a, blas, where);
    lora_scale(room, N * l.rank, l.scale, where);
    matmul(static_cast<A*>(l.db), dout, room, nothing, no_residual, p.db, blas, where);

    // dA, a sum over the same rows.
    matmul(room, dout, b, nothing, nothing, p.dy_b, blas, where);
    lora_scale(room, N * l.rank, l.scale, where);
    matmul(static_cast<A*>(l.da), room, inp, nothing, no_residual, p.da, blas, where);
}

} // namespace llmc
