// kernels_prefix.h - the kernels of a trained prefix against the CPU version in double
#pragma once
#include "kernel_table.h"
#include "ops_prefix.h"

// Heads of few channels, of all 32 lanes, and of several packs; queries that share a key head.
template <typename T> void prefix_kernels(Check& c) {
    struct Case {
        size_t B, Tq, NH, NKV, HS, n;
    };
    for (Case s : {Case{2, 5, 4, 2, 8, 3}, {1, 3, 3, 1, 40, 5}, {3, 9, 2, 2, 64, 1},
                   {1, 2, 2, 1, 256, 2}}) {
        CASE(c, "prefix of %zu, %s (%zu,%zu,%zu/%zu,%zu)", s.n, type_word(T()), s.B, s.Tq, s.NH,
             s.NKV, s.HS);
        AttentionInputs text =
            attention_inputs(c, s.B, s.Tq, s.Tq, s.NH, s.NKV, s.HS, 0, false);
        text.softcap = s.HS == 64 ? 2 : 0;
        size_t numbers = s.n * s.NKV * s.HS;
        auto k = rounded<T>(normals(c, numbers)), v = rounded<T>(normals(c, numbers));

        // Want: the CPU's result in double. The text's part is rounded to T, as training has it.
        PrefixRun<double> want(text, k, v);
        AttentionRun<double>& run = want.text;
        attention_forward_reference(run.out.data(), run.lse.data(), run.x);
        auto text_out = rounded<T>(run.out), text_lse = rounded<float>(run.lse);
        run.out = text_out, run.lse = text_lse;
        join_keys(run.out.data(), run.lse.data(), run.x, want.rows, {}, Cpu{});
        auto out = rounded<T>(run.out), lse = rounded<float>(run.lse);
        auto forward_out = run.out, forward_lse = run.lse;
        run.out = out, run.lse = lse;

        // dq is added to threes, dk to sevens; dv is written anew by a second call.
        std::fill(run.dq.begin(), run.dq.end(), 3.0);
        std::fill(want.dk.begin(), want.dk.end(), 7.0);
        std::fill(want.dv.begin(), want.dv.end(), 7.0);
        want.rows.accumulate = true;
        join_keys_backward(run.dq.data(), run.out.data(), run.lse.data(), run.x, want.rows, {},
                           Cpu{});

        // Run the kernels.
        every_order(c, [&](Outputs& o) {
            Array<T> q(text.q), dout(text.dout), keys(k), values(v), got(text_out), joined(out);
            Array<T> dq(std::vector<double>(text.q.size(), 3));
            Array<float> got_lse(text_lse), joined_lse(lse);
            Array<float> dk(std::vector<double>(numbers, 7)), dv(std::vector<double>(numbers, 7));
            AttentionOperands<T> x;
            x.q = q.data, x.dout = dout.data, x.d = text.d, x.softcap = float(text.softcap);
            PrefixRows rows = {keys.data, values.data, dk.data, dv.data};
            rows.n = s.n, rows.accumulate = true;

            // A sum of HS and of Tq products in float.
            double sums = double(s.HS + s.B * s.Tq);
            join_keys(got.data, got_lse.data, x, rows, {}, cudaStream_t{});
            o.add("out", got, forward_out, tolerance<T>(sums));
            o.add("lse", got_lse, forward_lse, tolerance<float>(sums));
            join_keys_backward(dq.data, joined.data, joined_lse.data, x, rows, {}, cudaStream_t{});
            o.add("dq +=", dq, run.dq, tolerance<T>(sums));
            o.add("dk +=", dk, want.dk, tolerance<float>(sums));
            o.add("dv +=", dv, want.dv, tolerance<float>(sums));

            // Written anew, into poison: the same gradients without the sevens.
            Array<float> new_k(numbers), new_v(numbers);
            rows.dk = new_k.data, rows.dv = new_v.data, rows.accumulate = false;
            join_keys_backward(dq.data, joined.data, joined_lse.data, x, rows, {}, cudaStream_t{});
            auto less = [](std::vector<double> y) {
                for (double& z : y) z -= 7;
                return y;
            };
            o.add("dk =", new_k, less(want.dk), tolerance<float>(sums), 7);
            o.add("dv =", new_v, less(want.dv), tolerance<float>(sums), 7);
        });
    }
}

inline void add_prefix_kernels(std::vector<KernelRow>& rows) {
    rows.insert(rows.end(), {
        THREE_TYPES("prefix,", prefix_kernels)});
}
