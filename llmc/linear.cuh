// linear.cuh - the linear layer, forward and its two backward halves; the one place that knows how weights are stored
//   out = inp W^T + bias (+ residual),   dinp = dout W,   dW = dout^T inp,   dbias = sum over rows of dout
//   inp, dinp (N,IC)   out, dout, residual (N,OC)   W (OC,IC)   bias (OC)   dW, dbias acc
//   Contract: out =   dinp, dW, dbias = or += (accumulate).  A Weight whose grad is null is frozen: skipped.
//   Cost: 2 N OC IC FLOPs each.
//   To copy: this file, matmul.cuh and common.h.
#pragma once
#include "matmul.cuh"

struct Weight {
    void* data = nullptr;
    Type type = Type::F32;
    size_t rows = 0, cols = 0; // (OC, IC)
    void* grad = nullptr;      // acc_t; null: frozen
    const void* extras = nullptr; // scales, adapters
    template <typename T> T* as() const { return static_cast<T*>(data); }
};

template <typename T>
void linear_forward(T* out, const T* inp, const Weight& w, const Weight* bias, const T* residual, size_t N, Blas& blas, Cpu where) {
    MatmulKey k = {N, w.rows, w.cols, {w.cols, 1}, {1, w.cols}, {w.rows, 1}, {}, {}, false, false, false};
    matmul(out, inp, (const T*)w.as<T>(), bias ? (const T*)bias->as<T>() : nullptr, residual, k, blas, where);
}

template <typename T>
void linear_backward_input(T* dinp, const T* dout, const Weight& w, size_t N, bool accumulate, Blas& blas, Cpu where) {
    MatmulKey k = {N, w.cols, w.rows, {w.rows, 1}, {w.cols, 1}, {w.cols, 1}, {}, {}, accumulate, false, false};
    matmul(dinp, dout, (const T*)w.as<T>(), (const T*)nullptr, (const T*)nullptr, k, blas, where);
}

template <typename T> void column_sums(acc_t<T>* out, const T* x, size_t N, size_t C, bool accumulate) {
    typedef acc_t<T> A;
    constexpr size_t COLUMNS = 64;
    #pragma omp parallel for
    for (size_t c0 = 0; c0 < C; c0 += COLUMNS) {
        size_t count = C - c0 < COLUMNS ? C - c0 : COLUMNS;
        A sum[COLUMNS] = {};
        for (size_t n = 0; n < N; n++)
            for (size_t c = 0; c < count; c++) sum[c] += to_acc(x[n * C + c0 + c]);
        for (size_t c = 0; c < count; c++) out[c0 + c] = accumulate ? out[c0 + c] + sum[c] : sum[c];
    }
}

template <typename T>
void linear_backward_weight(const Weight& w, const Weight* bias, const T* dout, const T* inp, size_t N, bool accumulate, Blas& blas, Cpu where) {
    typedef acc_t<T> A;
    MatmulKey k = {w.rows, w.cols, N, {1, w.rows}, {w.cols, 1}, {w.cols, 1}, {}, {}, accumulate, false, false};
    if (w.grad) matmul((A*)w.grad, dout, inp, (const T*)nullptr, (const A*)nullptr, k, blas, where);
    if (bias && bias->grad) column_sums((A*)bias->grad, dout, N, w.rows, accumulate);
}

template <typename T> size_t linear_scratch_bytes(size_t N, size_t OC, size_t IC, Cpu where) {
    Type t = type_of<T>(), a = type_of<acc_t<T>>();
    size_t most = 0;
    for (int extra = 0; extra < 4; extra++) {
        MatmulKey f = {N, OC, IC, {IC, 1}, {1, IC}, {OC, 1}, t, t, false, bool(extra & 1), bool(extra & 2)};
        most = std::max(most, matmul_scratch_bytes(f, where));
    }
    for (bool accumulate : {false, true}) {
        MatmulKey i = {N, IC, OC, {OC, 1}, {IC, 1}, {IC, 1}, t, t, accumulate, false, false};
        MatmulKey w = {OC, IC, N, {1, OC}, {IC, 1}, {IC, 1}, t, a, accumulate, false, false};
        most = std::max({most, matmul_scratch_bytes(i, where), matmul_scratch_bytes(w, where)});
    }
    return most;
}
