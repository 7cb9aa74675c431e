// ops_oss.h - what gpt-oss adds: sinks, biases of experts, their clamped gate
#pragma once
#include "../../llmc/ops/grouped_bias.cuh"
#include "../../llmc/ops/moe.cuh"
#include "../../llmc/ops/attention_join.cuh"
#include "attention_inputs.h"

// Attention over a text in T, joined by sinks (NH).
template <typename T> struct SinksRun {
    AttentionRun<T> text;
    std::vector<T> logits;
    std::vector<acc_t<T>> sums;
    Sinks<T> sinks;

    SinksRun(const AttentionInputs& in, const std::vector<double>& s)
        : text(in), logits(as<T>(s)), sums(s.size(), 9) {
        sinks = {logits.data(), sums.data(), s.size()};
    }
    void forward() {
        attention_forward_reference(text.out.data(), text.lse.data(), text.x);
        join_keys(text.out.data(), text.lse.data(), text.x, {}, sinks, Cpu{});
    }
    // Both backward passes read the joined out and lse.
    void backward() {
        attention_backward_reference(text.dq.data(), text.dk.data(), text.dv.data(),
                                     text.out.data(), text.lse.data(), text.x);
        join_keys_backward(text.dq.data(), text.out.data(), text.lse.data(), text.x, {}, sinks,
                           Cpu{});
    }
};

// A text of any kind, and sinks about as large as scores; one of them takes all, one nothing.
struct SinksInputs {
    AttentionInputs text;
    std::vector<double> logits;
};
inline SinksInputs sinks_inputs(Check& c, int kind) {
    size_t NKV = odd(c, 1, 3), group = odd(c, 1, 3), HS = odd(c, 1, 9);
    SinksInputs x = {attention_inputs(c, 2, 5, 7, NKV * group, NKV, HS, kind, false), {}};
    x.text.d.window = kind == 0 ? 3 : INT_MAX;
    x.logits = rounded<bf16>(normals(c, NKV * group));
    if (kind == 1) x.logits[0] = 100;
    if (kind == 2) x.logits[0] = -100;
    return x;
}

// One row by the definition: a softmax over the keys that the row sees and the sink, which has no
// value. Returns its lse, and fills out (HS).
inline double sinks_row_by_definition(const SinksRun<double>& run, size_t b, size_t h, size_t i,
                                      std::vector<double>& out) {
    AttentionOperands<double> x = completed(run.text.x);
    const AttentionDims& d = x.d;
    double total = std::exp(run.logits[h]);
    for (size_t j = 0; j < d.Tk; j++) {
        int distance = 0;
        if (!x.visible(b, i, j, distance)) continue;
        size_t kh = h / (d.NH / d.NKV);
        double p = std::exp(x.capped(channel_dot(x.query(b, h, i), x.k + x.key_at(b, kh, j),
                                                 d.HS)));
        total += p;
        for (size_t e = 0; e < d.HS; e++) out[e] += p * x.v[x.value_at(b, kh, j) + e];
    }
    for (double& y : out) y /= total;
    return std::log(total);
}

// Rows that see nothing of the text see the sink alone (kind 3): their output is 0.
inline void sinks_test(Check& c) {
    for (int kind = 0; kind < 4; kind++) {
        SinksInputs in = sinks_inputs(c, kind);
        SinksRun<double> run(in.text, in.logits);
        SinksRun<float> single(in.text, in.logits);
        run.forward();
        single.forward();

        // Collect all rows by the definition. Exponentials of up to e^100 keep 1e-13.
        AllRows want = all_rows(in.text.d, [&](size_t b, size_t h, size_t i, auto& row) {
            return sinks_row_by_definition(run, b, h, i, row);
        });
        close(c, "out", run.text.out, want.out, 1e-13);
        close(c, "lse", run.text.lse, want.lse, 1e-13);
        close(c, "float out", single.text.out, want.out, 1e-5);

        run.backward();
        single.backward();
        close(c, "float ds", single.sums, run.sums, 1e-5);
    }
}

// Finite differences of out.dout, through the text and the sinks at once.
inline void sinks_grad(Check& c) {
    for (int kind = 0; kind < 4; kind++) {
        SinksInputs in = sinks_inputs(c, kind);
        SinksRun<double> run(in.text, in.logits);
        run.forward();
        run.backward();
        auto loss = [&] {
            SinksRun<double> moved(in.text, in.logits);
            moved.forward();
            return dot(moved.text.out, in.text.dout);
        };
        gradient(c, "sinks", loss, in.logits, run.sums);
        gradient(c, "q", loss, in.text.q, run.text.dq);
        gradient(c, "k", loss, in.text.k, run.text.dk);
        gradient(c, "v", loss, in.text.v, run.text.dv);
    }
}

// ----------------------------------------------------------------------------
// biases of experts

// Experts without a row, with one, with many; the gates of slots in another order than rows.
struct BiasInputs {
    std::vector<int> starts, slot_of;
    size_t C;
    std::vector<double> out, dout, bias, gates, dgates;
    Groups groups() const { return {starts.data(), starts.size() - 1, C, 1, slot_of.size()}; }
};
inline BiasInputs bias_inputs(Check& c, size_t C, int more_rows = 0) {
    BiasInputs x;
    x.starts = {0, 0, 1, 10, 10, 10 + int(odd(c, 1, 20)) + more_rows};
    size_t M = size_t(x.starts.back()), E = x.starts.size() - 1;
    for (size_t i = 0; i < M; i++) x.slot_of.push_back(int(M - 1 - i));
    x.C = C;
    x.out = rounded<bf16>(normals(c, M * C)), x.dout = rounded<bf16>(normals(c, M * C));
    x.bias = rounded<bf16>(normals(c, E * C)), x.gates = rounded<bf16>(normals(c, M));
    x.dgates = rounded<bf16>(normals(c, M));
    return x;
}

// All three by their definition, with gates and without; dbias = and +=.
inline void bias_test(Check& c) {
    for (bool gated : {false, true})
        for (bool accumulate : {false, true}) {
            BiasInputs x = bias_inputs(c, odd(c, 1, 50));
            GroupedBias<double> b = {x.groups(), gated ? x.gates.data() : nullptr,
                                     x.slot_of.data()};
            std::vector<double> out = x.out, dgates = x.dgates;
            std::vector<double> dbias(x.bias.size(), accumulate ? 3 : NAN);
            grouped_bias_forward(out.data(), x.bias.data(), b, Cpu{});
            grouped_bias_backward(dbias.data(), x.dout.data(), b, accumulate, Cpu{});
            if (gated)
                grouped_bias_backward_gates(dgates.data(), x.dout.data(), x.bias.data(), b, Cpu{});

            std::vector<double> want = x.out, want_g = x.dgates;
            std::vector<double> want_bias(dbias.size(), accumulate ? 3 : 0);
            for (size_t e = 0; e + 1 < x.starts.size(); e++)
                for (size_t m = size_t(x.starts[e]); m < size_t(x.starts[e + 1]); m++)
                    for (size_t i = 0; i < x.C; i++) {
                        size_t slot = size_t(x.slot_of[m]), at = m * x.C + i;
                        double g = gated ? x.gates[slot] : 1;
                        want[at] += g * x.bias[e * x.C + i];
                        want_bias[e * x.C + i] += g * x.dout[at];
                        if (gated) want_g[slot] += x.dout[at] * x.bias[e * x.C + i];
                    }
            close(c, "out", out, want, 1e-14, 1);
            close(c, "dbias", dbias, want_bias, 1e-14, 1);
            close(c, "dgates", dgates, want_g, 1e-14, 1);
        }
}

// ----------------------------------------------------------------------------
// the clamped gate

constexpr ExpertGate OSS_GATE = {1.702, 0.75, 1};

// The gate by gpt-oss' own text, and its gradients by finite differences. No number lies on a kink.
inline void clamped_gate_test(Check& c) {
    size_t M = 6, F = 40;
    std::vector<double> gate = normals(c, M * F), up = normals(c, M * F), g = normals(c, M);
    std::vector<double> h(M * F);
    for (std::vector<double>* x : {&gate, &up})
        for (double& y : *x)
            if (std::fabs(std::fabs(y) - 0.75) < 1e-3) y = 0.5;
    auto forward = [&] {
        gated_swiglu_forward(h.data(), gate.data(), up.data(), g.data(), nullptr, nullptr, M, F,
                             Cpu{}, OSS_GATE);
    };
    std::vector<double> want(M * F), dgate(M * F), dup(M * F), dg(M), dh = normals(c, M * F);
    size_t clamped = 0;
    for (size_t i = 0; i < M * F; i++) {
        double x = std::min(gate[i], 0.75), u = std::clamp(up[i], -0.75, 0.75);
        want[i] = g[i / F] * (u + 1) * x / (1 + std::exp(-1.702 * x));
        clamped += x != gate[i] || u != up[i];
    }
    forward();
    close(c, "h", h, want, 1e-14, 1);
    expect(c, clamped > M, "nothing is clamped");

    gated_swiglu_backward(dgate.data(), dup.data(), dg.data(), dh.data(), gate.data(), up.data(),
                          g.data(), nullptr, nullptr, M, F, Cpu{}, OSS_GATE);
    auto loss = [&] {
        forward();
        return dot(h, dh);
    };
    gradient(c, "gate", loss, gate, dgate);
    gradient(c, "up", loss, up, dup);
    gradient(c, "g", loss, g, dg);
}

inline void add_oss_rows(std::vector<Row>& rows) {
    rows.push_back({"sinks", sinks_test, sinks_grad, nullptr});
    rows.push_back({"experts' biases", bias_test, nullptr, nullptr});
    rows.push_back({"clamped gate", clamped_gate_test, nullptr, nullptr});
}
