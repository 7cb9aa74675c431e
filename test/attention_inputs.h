// attention_inputs.h - random operands of attention under every mask, the definition in double, and the CPU version's results
#pragma once
#include "../llmc/attention.cuh"
#include "op_table.h"

// A handle with scratch of the size that the planner would give.
struct Workspace {
    Blas blas;
    std::vector<unsigned char> bytes;
    explicit Workspace(size_t n) : bytes(n + 512) {
        size_t aligned = (256 - uintptr_t(bytes.data()) % 256) % 256;
        blas_scratch(blas, bytes.data() + aligned, n);
    }
};

struct AttentionInputs {
    AttentionDims d;
    std::vector<double> q, k, v, dout; // with the strides of d
    std::vector<int> q_positions, k_positions, doc_start;
    std::vector<float> slopes; // empty: none
};

template <typename T> struct AttentionRun {
    std::vector<T> out, dq, dk, dv;
    std::vector<acc_t<T>> lse;
    explicit AttentionRun(const AttentionInputs& x) {
        const AttentionDims& d = x.d;
        std::vector<T> q = as<T>(x.q), k = as<T>(x.k), v = as<T>(x.v), dout = as<T>(x.dout);
        out.resize(d.B * d.Tq * d.NH * d.HS), lse.resize(d.B * d.NH * d.Tq), dq.resize(q.size()),
            dk.resize(k.size()), dv.resize(v.size());
        const float* slopes = x.slopes.empty() ? nullptr : x.slopes.data();
        Workspace work(attention_scratch_bytes<T>(d, threads_here(Cpu{}), Cpu{}));
        attention_forward(out.data(), lse.data(), q.data(), k.data(), v.data(),
                          x.q_positions.data(), x.k_positions.data(), x.doc_start.data(), slopes, d,
                          work.blas, Cpu{});
        attention_backward(dq.data(), dk.data(), dv.data(), dout.data(), out.data(), lse.data(),
                           q.data(), k.data(), v.data(), x.q_positions.data(), x.k_positions.data(),
                           x.doc_start.data(), slopes, d, work.blas, Cpu{});
    }
};

// The definition, with the whole row of scores at hand.
inline std::vector<double> attention_naive(const AttentionInputs& x, std::vector<double>* lse) {
    const AttentionDims& d = x.d;
    std::vector<double> out(d.B * d.Tq * d.NH * d.HS);
    lse->assign(d.B * d.NH * d.Tq, -INFINITY);
    for (size_t b = 0; b < d.B; b++)
        for (size_t h = 0; h < d.NH; h++)
            for (size_t i = 0; i < d.Tq; i++) {
                std::vector<double> s(d.Tk, -INFINITY);
                size_t kh = h * d.NKV / d.NH;
                double sum = 0, most = -INFINITY;
                int position = x.q_positions[b * d.Tq + i];
                for (size_t j = 0; j < d.Tk; j++) {
                    int key = x.k_positions[b * d.Tk + j];
                    if (key > position || key < x.doc_start[b * d.Tq + i] ||
                        position - key >= d.window)
                        continue;
                    s[j] = 0;
                    for (size_t e = 0; e < d.HS; e++)
                        s[j] += x.q[(b * d.Tq + i) * d.q_stride + h * d.HS + e] *
                                x.k[(b * d.Tk + j) * d.kv_stride + kh * d.HS + e];
                    s[j] = s[j] / std::sqrt(double(d.HS)) -
                           (x.slopes.empty() ? 0 : double(x.slopes[h]) * (position - key));
                    most = std::max(most, s[j]);
                }
                if (most == -INFINITY) continue;
                for (double y : s) sum += std::exp(y - most);
                (*lse)[(b * d.NH + h) * d.Tq + i] = most + std::log(sum);
                for (size_t j = 0; j < d.Tk; j++)
                    for (size_t e = 0; e < d.HS; e++)
                        out[((b * d.Tq + i) * d.NH + h) * d.HS + e] +=
                            std::exp(s[j] - most) / sum *
                            x.v[(b * d.Tk + j) * d.kv_stride + kh * d.HS + e];
            }
    return out;
}

// kind 0: a sequence; 1: documents; 2: new queries behind cached keys; 3: rows that see nothing,
// keys in any order; 4: as 2, and all scores are far below zero: exp(0 - lse) is infinite
inline AttentionInputs attention_inputs(Check& c, size_t B, size_t Tq, size_t Tk, size_t NH,
                                        size_t NKV, size_t HS, int kind, bool alibi) {
    AttentionInputs x;
    x.d = {B,   Tq, kind >= 2 ? Tk : Tq,    NH,
           NKV, HS, NH * HS + odd(c, 0, 5), NKV * HS + odd(c, 0, 5)};
    const AttentionDims& d = x.d;
    x.q = rounded<bf16>(normals(c, B * d.Tq * d.q_stride)),
    x.k = rounded<bf16>(normals(c, B * d.Tk * d.kv_stride)),
    x.v = rounded<bf16>(normals(c, B * d.Tk * d.kv_stride));
    x.dout = rounded<bf16>(normals(c, B * d.Tq * NH * HS));
    if (kind == 4) {
        for (double& y : x.q) y = std::abs(y) / 4 + 5;
        for (double& y : x.k) y = -std::abs(y) / 4 - 5;
        x.q = rounded<bf16>(x.q), x.k = rounded<bf16>(x.k);
    }
    for (size_t b = 0; b < B; b++) {
        int start = 0;
        for (size_t i = 0; i < d.Tq; i++) {
            int position = int(i) + (kind == 2 || kind == 4 ? int(d.Tk) - int(d.Tq) : 0);
            if (kind == 1 && c.random() % 5 == 0) start = position;
            x.q_positions.push_back(kind == 3 ? int(c.random() % d.Tk) : position);
            x.doc_start.push_back(kind == 3 && c.random() % 3 == 0 ? 1000000 : start);
        }
        for (size_t j = 0; j < d.Tk; j++) x.k_positions.push_back(int(j));
        if (kind == 3)
            std::shuffle(x.k_positions.end() - long(d.Tk), x.k_positions.end(), c.random);
    }
    if (alibi) x.slopes.resize(NH), alibi_slopes(x.slopes.data(), NH);
    return x;
}
