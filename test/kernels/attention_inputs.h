// attention_inputs.h - random operands of attention under every mask, and the CPU versions' results
#pragma once
#include "../../llmc/ops/attention.cuh"
#include "../../llmc/ops/attention_join.cuh"
#include "../../llmc/ops/attention_tiled.cuh"
#include "../harness/op_table.h"

using namespace llmc;

// A handle with as much scratch as the planner would give it, aligned to 256 bytes.
struct Workspace {
    Blas blas;
    std::vector<unsigned char> bytes;
    explicit Workspace(size_t n) : bytes(n + 512) {
        size_t aligned = (256 - uintptr_t(bytes.data()) % 256) % 256;
        blas_scratch(blas, bytes.data() + aligned, n);
    }
};

// The operands of one layer of attention. q, k, v and dout are in double.
struct AttentionInputs {
    AttentionDims d;                   // complete: strides and head sizes are filled in
    std::vector<double> q, k, v, dout; // q, k and v have d's strides, dout has no gaps
    std::vector<int> q_positions, k_positions, doc_start;
    std::vector<float> slopes;     // ALiBi's, or empty
    double scale = 0, softcap = 0; // 0: 1 / sqrt(HS), and no cap
};

// The heads of an operand without the gaps between rows and between sequences: (B, n, width).
template <typename T>
std::vector<double> heads_of(const std::vector<T>& x, size_t B, size_t n, size_t batch,
                             size_t stride, size_t width) {
    std::vector<double> y;
    for (size_t b = 0; b < B; b++)
        for (size_t i = 0; i < n; i++)
            for (size_t e = 0; e < width; e++)
                y.push_back(double(to_acc(x[b * batch + i * stride + e])));
    return y;
}
template <typename T>
std::vector<double> query_heads(const std::vector<T>& x, const AttentionDims& d) {
    return heads_of(x, d.B, d.Tq, d.q_batch, d.q_stride, d.NH * d.HS);
}
template <typename T>
std::vector<double> key_heads(const std::vector<T>& x, const AttentionDims& d) {
    return heads_of(x, d.B, d.Tk, d.k_batch, d.k_stride, d.NKV * d.HS);
}
template <typename T>
std::vector<double> value_heads(const std::vector<T>& x, const AttentionDims& d) {
    return heads_of(x, d.B, d.Tk, d.v_batch, d.v_stride, d.NKV * d.HS_v);
}

// Operands in T with room for a CPU version's results: out in O, gradients in G. A caller that
// tests accumulation fills the gradients before it runs.
template <typename T, typename O = T, typename G = T> struct AttentionRun {
    std::vector<T> q, k, v, dout;
    std::vector<O> out;
    std::vector<G> dq, dk, dv;
    std::vector<acc_t<T>> lse;
    AttentionOperands<T> x;

    explicit AttentionRun(const AttentionInputs& in)
        : q(as<T>(in.q)), k(as<T>(in.k)), v(as<T>(in.v)), dout(as<T>(in.dout)) {
        const AttentionDims& d = in.d;
        out.resize(d.B * d.Tq * d.NH * d.HS_v);
        lse.resize(d.B * d.NH * d.Tq);
        dq.resize(q.size());
        dk.resize(k.size());
        dv.resize(v.size());
        x = {q.data(), k.data(), v.data(), dout.data(), in.q_positions.data(),
             in.k_positions.data(), in.doc_start.data(), nullptr, d};
        if (!in.slopes.empty()) x.slopes = in.slopes.data();
        x.scale = acc_t<T>(in.scale);
        x.softcap = acc_t<T>(in.softcap);
    }
};

// The definition (attention_cpu.cuh), forward and backward.
template <typename T> AttentionRun<T> attention_reference(const AttentionInputs& in) {
    AttentionRun<T> run(in);
    attention_forward_reference(run.out.data(), run.lse.data(), run.x);
    attention_backward_reference(run.dq.data(), run.dk.data(), run.dv.data(), run.out.data(),
                                 run.lse.data(), run.x);
    return run;
}
// The tiled version (attention_tiled.cuh), forward and backward, as training runs it.
template <typename T> AttentionRun<T> attention_in_tiles(const AttentionInputs& in) {
    AttentionRun<T> run(in);
    Workspace work(attention_scratch_bytes<T>(in.d, threads_here(Cpu{}), Cpu{}));
    attention_forward(run.out.data(), run.lse.data(), run.x, work.blas, Cpu{});
    attention_backward(run.dq.data(), run.dk.data(), run.dv.data(), run.out.data(), run.lse.data(),
                       run.x, work.blas, Cpu{});
    return run;
}

// Random inputs. kind 0: one sequence. 1: documents. 2: new queries after cached keys. 3: keys
// in any order, and rows that see nothing. 4: as 2, with every score so far below zero that
// exp(0 - lse) is infinite. 5: keys that begin in the middle of their sequence, as ranks of a
// context may hold them, and queries around it.
inline AttentionInputs attention_inputs(Check& c, size_t B, size_t Tq, size_t Tk, size_t NH,
                                        size_t NKV, size_t HS, int kind, bool alibi,
                                        size_t HS_v = 0) {
    AttentionInputs x;
    if (kind < 2) Tk = Tq;
    if (!HS_v) HS_v = HS;

    // Leave random gaps between rows and between sequences.
    x.d = {B, Tq, Tk, NH, NKV, HS, NH * HS + odd(c, 0, 5), NKV * HS + odd(c, 0, 5)};
    x.d.HS_v = HS_v;
    x.d.v_stride = NKV * HS_v + odd(c, 0, 5);
    x.d = completed(x.d);
    x.d.q_batch += odd(c, 0, 7);
    x.d.k_batch += odd(c, 0, 7);
    x.d.v_batch += odd(c, 0, 7);

    // Draw numbers that bf16 holds exactly. In kind 4 queries are near 5 and keys near -5.
    const AttentionDims& d = x.d;
    x.q = rounded<bf16>(normals(c, B * d.q_batch));
    x.k = rounded<bf16>(normals(c, B * d.k_batch));
    x.v = rounded<bf16>(normals(c, B * d.v_batch));
    x.dout = rounded<bf16>(normals(c, B * Tq * NH * HS_v));
    if (kind == 4) {
        for (double& y : x.q) y = std::abs(y) / 4 + 5;
        for (double& y : x.k) y = -std::abs(y) / 4 - 5;
        x.q = rounded<bf16>(x.q);
        x.k = rounded<bf16>(x.k);
    }

    // Give queries, documents and keys their positions. A document that starts at 1000000 hides
    // every key from its query.
    for (size_t b = 0; b < B; b++) {
        int start = 0;
        for (size_t i = 0; i < Tq; i++) {
            int behind = kind == 2 || kind == 4 || kind == 5 ? int(Tk) - int(Tq) : 0;
            int position = int(i) + (kind == 5 ? behind / 2 : behind);
            if (kind == 1 && c.random() % 5 == 0) start = position;
            x.q_positions.push_back(kind == 3 ? int(c.random() % Tk) : position);
            x.doc_start.push_back(kind == 3 && c.random() % 3 == 0 ? 1000000 : start);
        }
        for (size_t j = 0; j < Tk; j++)
            x.k_positions.push_back(int(kind == 5 ? (j + Tk / 2) % Tk : j));
        if (kind == 3) std::shuffle(x.k_positions.end() - long(Tk), x.k_positions.end(), c.random);
    }
    if (alibi) {
        x.slopes.resize(NH);
        alibi_slopes(x.slopes.data(), NH);
    }
    return x;
}

// All rows of attention by a definition: row_of(b, h, i, row) fills in a row (HS) that is 0 and
// returns its lse. out (B,Tq,NH,HS), lse (B,NH,Tq).
struct AllRows {
    std::vector<double> out, lse;
};
template <typename F> AllRows all_rows(const AttentionDims& d, F row_of) {
    AllRows all;
    all.lse.resize(d.B * d.NH * d.Tq);
    for (size_t b = 0; b < d.B; b++)
        for (size_t i = 0; i < d.Tq; i++)
            for (size_t h = 0; h < d.NH; h++) {
                std::vector<double> row(d.HS);
                all.lse[(b * d.NH + h) * d.Tq + i] = row_of(b, h, i, row);
                all.out.insert(all.out.end(), row.begin(), row.end());
            }
    return all;
}
