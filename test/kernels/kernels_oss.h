// kernels_oss.h - the kernels of what gpt-oss adds, against the CPU version in double
#pragma once
#include "../../llmc/ops/partial_sums.cuh"
#include "kernel_table.h"
#include "ops_oss.h"

// Heads of few channels, of all 32 lanes, and of more; fewer rows than parts, and more.
template <typename T> void sinks_kernels(Check& c) {
    struct Case {
        size_t B, rows, NH, HS;
    };
    for (auto [B, rows, NH, HS] :
         {Case{2, 5, 3, 8}, {1, 3, 1, 40}, {3, 50, 9, 64}, {1, 130, 2, 33}}) {
        CASE(c, "sinks, %s (%zu,%zu,%zu,%zu)", type_word(T()), B, rows, NH, HS);
        AttentionDims d = {B, rows, rows, NH, NH, HS};
        size_t n = B * rows * NH;
        auto out = rounded<T>(normals(c, n * HS)), dout = rounded<T>(normals(c, n * HS));
        auto lse = rounded<float>(normals(c, n)), s = rounded<T>(normals(c, NH));
        lse[0] = -INFINITY; // a row that saw no key
        std::fill_n(out.begin(), HS, 0.0);

        // Want: the CPU in double. Backward reads what forward has rounded. On the device the parts
        // lie side by side with those of two heads of another rank.
        std::vector<double> joined = out, all = lse, want(NH);
        AttentionOperands<double> x;
        x.d = d;
        x.dout = dout.data();
        sinks_forward(joined.data(), all.data(), s.data(), x, Cpu{});
        auto read_out = rounded<T>(joined), read_lse = rounded<float>(all);
        sinks_backward(want.data(), NH, read_out.data(), read_lse.data(), s.data(), x, Cpu{});
        every_order(c, [&](Outputs& o) {
            cudaStream_t stream = {};
            size_t stride = NH + 2;
            Array<T> got(out), in(read_out), dy(dout), sinks(s);
            Array<float> got_lse(lse), in_lse(read_lse);
            Array<float> parts(std::vector<double>(SINK_PARTS * stride, 5)), sums(NH);
            AttentionOperands<T> y;
            y.d = d;
            y.dout = dy.data;
            sinks_forward(got.data, got_lse.data, sinks.data, y, stream);
            sinks_backward(parts.data, stride, in.data, in_lse.data, sinks.data, y, stream);
            add_parts<float>({{sums.data, parts.data, SINK_PARTS, stride, NH}}, false, stream);
            o.add("out", got, joined, tolerance<T>(4));
            o.add("lse", got_lse, all, tolerance<float>(4));
            double terms = double(B * rows * HS);
            o.add("ds", sums, want, tolerance<float>(terms), std::sqrt(terms));
        });
    }
}

// Biases of fewer channels than a block has threads, and of more.
template <typename T> void bias_kernels(Check& c) {
    for (size_t C : {1, 37, 300})
        for (bool gated : {false, true}) {
            CASE(c, "experts' biases, %s C=%zu", type_word(T()), C);
            // An expert may have more rows than its blocks have warps, 512.
            BiasInputs x = bias_inputs(c, C, C == 37 ? 600 : 0);
            GroupedBias<double> b = {x.groups(), gated ? x.gates.data() : nullptr,
                                     x.slot_of.data()};
            std::vector<double> out = x.out, added(x.bias.size(), 3), dgates = x.dgates;
            grouped_bias_forward(out.data(), x.bias.data(), b, Cpu{});
            grouped_bias_backward(added.data(), x.dout.data(), b, true, Cpu{});
            if (gated)
                grouped_bias_backward_gates(dgates.data(), x.dout.data(), x.bias.data(), b, Cpu{});
            std::vector<double> anew = added;
            for (double& y : anew) y -= 3;

            every_order(c, [&](Outputs& o) {
                cudaStream_t stream = {};
                Array<int> starts(x.starts), slot_of(x.slot_of);
                Array<T> rows(x.out), dout(x.dout), bias(x.bias);
                Array<float> gates(x.gates), dg(x.dgates), fresh(x.bias.size());
                Array<float> sum(std::vector<double>(x.bias.size(), 3));
                GroupedBias<float> here = {x.groups(), gated ? gates.data : nullptr, slot_of.data};
                here.g.starts = starts.data;
                grouped_bias_forward(rows.data, bias.data, here, stream);
                grouped_bias_backward(sum.data, dout.data, here, true, stream);
                grouped_bias_backward(fresh.data, dout.data, here, false, stream);
                if (gated) grouped_bias_backward_gates(dg.data, dout.data, bias.data, here, stream);
                size_t M = x.slot_of.size();
                o.add("out", rows, out, tolerance<T>(2), 1);
                o.add("dbias +=", sum, added, tolerance<float>(M + 1), std::sqrt(double(M)));
                o.add("dbias =", fresh, anew, tolerance<float>(M), std::sqrt(double(M)));
                o.add("dgates", dg, dgates, tolerance<float>(C + 1), std::sqrt(double(C)));
            });
        }
}

// The clamped gate: rows of one element and of several warps. Both sides read the same numbers, so
// they clamp the same ones.
template <typename T> void clamped_gate_kernels(Check& c) {
    for (size_t F : {1, 37, 256}) {
        CASE(c, "clamped gate, %s F=%zu", type_word(T()), F);
        size_t M = 5;
        auto gate = rounded<T>(normals(c, M * F)), up = rounded<T>(normals(c, M * F));
        auto dh = rounded<T>(normals(c, M * F)), g = rounded<float>(normals(c, M));

        // Want: the CPU in double. Each row is a slot.
        std::vector<double> h(M * F), dgate = dh, dup = up, dg(M);
        gated_swiglu_forward(h.data(), gate.data(), up.data(), g.data(), nullptr, nullptr, M, F,
                             Cpu{}, OSS_GATE);
        gated_swiglu_backward(dgate.data(), dup.data(), dg.data(), dh.data(), gate.data(),
                              up.data(), g.data(), nullptr, nullptr, M, F, Cpu{}, OSS_GATE);

        // The device, in place.
        every_order(c, [&](Outputs& o) {
            cudaStream_t stream = {};
            Array<T> gates_of(gate), ups(up), d(dh), made(M * F);
            Array<float> weights(g), dweights(M);
            gated_swiglu_forward(made.data, gates_of.data, ups.data, weights.data, nullptr, nullptr,
                                 M, F, stream, OSS_GATE);
            gated_swiglu_backward(d.data, ups.data, dweights.data, d.data, gates_of.data, ups.data,
                                  weights.data, nullptr, nullptr, M, F, stream, OSS_GATE);
            o.add("h", made, h, tolerance<T>(6), 1);
            o.add("dgate", d, dgate, tolerance<T>(10), 1);
            o.add("dup", ups, dup, tolerance<T>(6), 1);
            o.add("dg", dweights, dg, tolerance<float>(F), std::sqrt(double(F)));
        });
    }
}

inline void add_oss_kernels(std::vector<KernelRow>& rows) {
    rows.insert(rows.end(), {
        THREE_TYPES("sinks,", sinks_kernels),
        THREE_TYPES("experts' biases,", bias_kernels),
        THREE_TYPES("clamped gate,", clamped_gate_kernels)});
}
