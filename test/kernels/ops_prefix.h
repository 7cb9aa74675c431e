// ops_prefix.h - a prefix of trained keys and values: its definition, its gradients
#pragma once
#include "../../llmc/ops/attention_join.cuh"
#include "attention_inputs.h"

// A prefix of n keys beside a text, in T. k and v hold (n,NKV,HS).
template <typename T> struct PrefixRun {
    AttentionRun<T> text;
    std::vector<T> k, v;
    std::vector<acc_t<T>> dk, dv;
    PrefixRows rows;

    PrefixRun(const AttentionInputs& in, const std::vector<double>& k, const std::vector<double>& v)
        : text(in), k(as<T>(k)), v(as<T>(v)), dk(k.size(), 9), dv(v.size(), 9) {
        rows = {this->k.data(), this->v.data(), dk.data(), dv.data()};
        rows.n = k.size() / (in.d.NKV * in.d.HS);
    }
    // Attention over the text, then the prefix. Both backward passes read the joined out and lse.
    void forward() {
        attention_forward_reference(text.out.data(), text.lse.data(), text.x);
        join_keys(text.out.data(), text.lse.data(), text.x, rows, {}, Cpu{});
    }
    void backward() {
        attention_backward_reference(text.dq.data(), text.dk.data(), text.dv.data(),
                                     text.out.data(), text.lse.data(), text.x);
        join_keys_backward(text.dq.data(), text.out.data(), text.lse.data(), text.x, rows, {},
                           Cpu{});
    }
};

// A text of any kind without gaps between values, and a prefix of n keys.
struct PrefixInputs {
    AttentionInputs text;
    std::vector<double> k, v;
};
inline PrefixInputs prefix_inputs(Check& c, size_t n, int kind) {
    size_t NKV = odd(c, 1, 3), group = odd(c, 1, 3), HS = odd(c, 1, 9);
    PrefixInputs x = {attention_inputs(c, 2, 5, 7, NKV * group, NKV, HS, kind, false), {}, {}};
    x.text.softcap = kind % 2 ? 1.5 : 0;
    x.text.d.window = kind == 0 ? 3 : INT_MAX;
    x.k = rounded<bf16>(normals(c, n * NKV * HS));
    x.v = rounded<bf16>(normals(c, n * NKV * HS));
    return x;
}

// One row by the definition: a softmax over all keys of the prefix and those of the text that the
// row sees. Returns its lse, and fills out (HS).
inline double prefix_row_by_definition(const PrefixRun<double>& run, size_t b, size_t h, size_t i,
                                       std::vector<double>& out) {
    AttentionOperands<double> x = completed(run.text.x);
    const AttentionDims& d = x.d;
    size_t kh = h / (d.NH / d.NKV);
    double total = 0;
    auto add = [&](const double* k, const double* v) {
        double p = std::exp(x.capped(channel_dot(x.query(b, h, i), k, d.HS)));
        total += p;
        for (size_t e = 0; e < d.HS; e++) out[e] += p * v[e];
    };

    for (size_t j = 0; j < run.rows.n; j++)
        add(&run.k[(j * d.NKV + kh) * d.HS], &run.v[(j * d.NKV + kh) * d.HS]);
    for (size_t j = 0; j < d.Tk; j++)
        if (int distance = 0; x.visible(b, i, j, distance))
            add(x.k + x.key_at(b, kh, j), x.v + x.value_at(b, kh, j));
    for (double& y : out) y /= total;
    return std::log(total);
}

// Rows that see nothing of the text see the prefix alone (kind 3). Sums of 16 terms in another
// order and exponentials of scores up to about 20 in size keep 1e-13 of the largest number.
inline void prefix_test(Check& c) {
    for (int kind = 0; kind < 4; kind++)
        for (size_t n : {1, 4}) {
            PrefixInputs in = prefix_inputs(c, n, kind);
            PrefixRun<double> run(in.text, in.k, in.v);
            PrefixRun<float> single(in.text, in.k, in.v);
            run.forward();
            single.forward();

            // Collect all rows by the definition.
            AllRows want = all_rows(in.text.d, [&](size_t b, size_t h, size_t i, auto& row) {
                return prefix_row_by_definition(run, b, h, i, row);
            });
            close(c, "out", run.text.out, want.out, 1e-13);
            close(c, "lse", run.text.lse, want.lse, 1e-13);
            close(c, "float out", single.text.out, want.out, 1e-5);

            // Float against double, and gradients that are added to those of earlier batches.
            run.backward();
            single.backward();
            close(c, "float dq", single.text.dq, run.text.dq, 1e-5);
            close(c, "float dk", single.dk, run.dk, 1e-5);
            close(c, "float dv", single.dv, run.dv, 1e-5);
            std::vector<double> twice_k = run.dk, twice_v = run.dv;
            run.rows.accumulate = true;
            run.backward();
            for (double& y : twice_k) y *= 2;
            for (double& y : twice_v) y *= 2;
            expect(c, run.dk == twice_k && run.dv == twice_v, "gradients are not added");
        }
}

// Finite differences of out.dout, through the text and the prefix at once.
inline void prefix_grad(Check& c) {
    for (int kind = 0; kind < 4; kind++) {
        PrefixInputs in = prefix_inputs(c, 3, kind);
        const AttentionDims& d = in.text.d;
        PrefixRun<double> run(in.text, in.k, in.v);
        run.forward();
        run.backward();
        auto loss = [&] {
            PrefixRun<double> moved(in.text, in.k, in.v);
            moved.forward();
            return dot(moved.text.out, in.text.dout);
        };
        gradient(c, "prefix k", loss, in.k, run.dk);
        gradient(c, "prefix v", loss, in.v, run.dv);

        // Gaps between the text's rows have no gradient, and none is written there.
        gradient(c, "q", loss, in.text.q, run.text.dq);
        gradient(c, "text k", loss, in.text.k, run.text.dk);
        gradient(c, "text v", loss, in.text.v, run.text.dv);
        expect(c, d.HS_v == d.HS, "values are as wide as keys");
    }
}

inline void add_prefix_rows(std::vector<Row>& rows) {
    rows.push_back({"prefix", prefix_test, prefix_grad, nullptr});
}
