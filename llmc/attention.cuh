// attention.cuh - draft
#pragma once
#include <algorithm>
#include "matmul.cuh"
struct AttentionDims { size_t B, Tq, Tk, NH, NKV, HS, q_stride, kv_stride; };
inline void alibi_slopes(float* slopes, size_t NH) {
    size_t n = 1; while (n * 2 <= NH) n *= 2;
    for (size_t h = 0; h < NH; h++) slopes[h] = h < n ? std::pow(2.0f, -8.0f * float(h + 1) / float(n)) : std::pow(2.0f, -4.0f * float(2 * (h - n) + 1) / float(n));
}
template <typename T> size_t attention_scratch_bytes(AttentionDims, int, Cpu) { return 0; }
template <typename T> void attention_forward(T* out, acc_t<T>* lse, const T* q, const T* k, const T* v, const int* qp, const int* kp, const int* ds, const float* sl, AttentionDims d, Blas&, Cpu) {
    typedef acc_t<T> A; A scale = 1 / std::sqrt(A(d.HS));
    #pragma omp parallel for collapse(2)
    for (size_t b = 0; b < d.B; b++) for (size_t h = 0; h < d.NH; h++) {
        std::vector<A> s(d.Tk), o(d.HS); size_t kh = h / (d.NH / d.NKV);
        for (size_t i = 0; i < d.Tq; i++) {
            const T* qi = q + (b * d.Tq + i) * d.q_stride + h * d.HS; A m = -INFINITY, sum = 0;
            for (size_t j = 0; j < d.Tk; j++) { const T* kj = k + (b * d.Tk + j) * d.kv_stride + kh * d.HS; A x = 0; int pj = kp[b * d.Tk + j], pi = qp[b * d.Tq + i];
                if (pj > pi || pj < ds[b * d.Tq + i]) { s[j] = -INFINITY; continue; }
                for (size_t e = 0; e < d.HS; e++) x += to_acc(qi[e]) * to_acc(kj[e]);
                s[j] = x * scale - (sl ? A(sl[h]) * A(pi - pj) : A(0)); m = std::max(m, s[j]); }
            std::fill(o.begin(), o.end(), A(0));
            for (size_t j = 0; j < d.Tk; j++) if (s[j] > -INFINITY) { A p = std::exp(s[j] - m); sum += p; const T* vj = v + (b * d.Tk + j) * d.kv_stride + kh * d.HS; for (size_t e = 0; e < d.HS; e++) o[e] += p * to_acc(vj[e]); }
            for (size_t e = 0; e < d.HS; e++) out[((b * d.Tq + i) * d.NH + h) * d.HS + e] = from_acc<T>(sum > 0 ? o[e] / sum : 0);
            lse[(b * d.NH + h) * d.Tq + i] = sum > 0 ? m + std::log(sum) : -INFINITY;
        } } }
template <typename T> void attention_backward(T* dq, T* dk, T* dv, const T* dout, const T* out, const acc_t<T>* lse, const T* q, const T* k, const T* v, const int* qp, const int* kp, const int* ds, const float* sl, AttentionDims d, Blas&, Cpu) {
    typedef acc_t<T> A; A scale = 1 / std::sqrt(A(d.HS)); size_t G = d.NH / d.NKV;
    #pragma omp parallel for collapse(2)
    for (size_t b = 0; b < d.B; b++) for (size_t kh = 0; kh < d.NKV; kh++) {
        std::vector<A> ak(d.Tk * d.HS), av(d.Tk * d.HS), aq(d.HS);
        for (size_t h = kh * G; h < (kh + 1) * G; h++) for (size_t i = 0; i < d.Tq; i++) {
            const T* qi = q + (b * d.Tq + i) * d.q_stride + h * d.HS; const T* go = dout + ((b * d.Tq + i) * d.NH + h) * d.HS; const T* oo = out + ((b * d.Tq + i) * d.NH + h) * d.HS;
            A D = 0; for (size_t e = 0; e < d.HS; e++) D += to_acc(go[e]) * to_acc(oo[e]);
            std::fill(aq.begin(), aq.end(), A(0)); A L = lse[(b * d.NH + h) * d.Tq + i];
            for (size_t j = 0; j < d.Tk; j++) { int pj = kp[b * d.Tk + j], pi = qp[b * d.Tq + i]; if (pj > pi || pj < ds[b * d.Tq + i]) continue;
                const T* kj = k + (b * d.Tk + j) * d.kv_stride + kh * d.HS; const T* vj = v + (b * d.Tk + j) * d.kv_stride + kh * d.HS; A x = 0, dp = 0;
                for (size_t e = 0; e < d.HS; e++) x += to_acc(qi[e]) * to_acc(kj[e]), dp += to_acc(go[e]) * to_acc(vj[e]);
                A p = std::exp(x * scale - (sl ? A(sl[h]) * A(pi - pj) : A(0)) - L), dsv = p * (dp - D) * scale;
                for (size_t e = 0; e < d.HS; e++) av[j * d.HS + e] += p * to_acc(go[e]), ak[j * d.HS + e] += dsv * to_acc(qi[e]), aq[e] += dsv * to_acc(kj[e]); }
            for (size_t e = 0; e < d.HS; e++) dq[(b * d.Tq + i) * d.q_stride + h * d.HS + e] = from_acc<T>(aq[e]);
        }
        for (size_t j = 0; j < d.Tk; j++) for (size_t e = 0; e < d.HS; e++) dk[(b * d.Tk + j) * d.kv_stride + kh * d.HS + e] = from_acc<T>(ak[j * d.HS + e]), dv[(b * d.Tk + j) * d.kv_stride + kh * d.HS + e] = from_acc<T>(av[j * d.HS + e]);
    } }
