// kernels_elementwise.h - rows of the kernel table: GELU, SwiGLU, RoPE, column sums
#pragma once
#include "../llmc/gelu.cuh"
#include "../llmc/linear.cuh"
#include "../llmc/rope.cuh"
#include "../llmc/swiglu.cuh"
#include "kernels_norms.h"

// one element, less than a load, a block, several and a bit; not 16-byte aligned; and inputs so far
// left and right that exp overflows, or is 0
struct ElementCase {
    size_t n, shift;
    double scale = 2;
};
inline std::vector<ElementCase> element_cases() {
    if (SMALL) return {{3, 0}, {2051, 0}, {300, 1, 100}};
    return {{1, 0}, {7, 0}, {2048, 0}, {6005, 0}, {6005, 1}, {100, 0, 100}};
}

template <typename T> void gelu_kernels(Check& c) {
    for (ElementCase s : element_cases()) {
        size_t n = s.n;
        CASE(c, "gelu %s n=%zu shift=%zu", type_word(T()), n, s.shift);
        auto x = rounded<T>(normals(c, n, s.scale)), d = rounded<T>(normals(c, n));
        std::vector<double> out(n), dinp(n);
        gelu_forward(out.data(), x.data(), n, Cpu{});
        gelu_backward(dinp.data(), d.data(), x.data(), n, Cpu{});
        every_order(c, [&](Outputs& o) {
            cudaStream_t stream = {};
            Array<T> inp(x, s.shift), y(n, s.shift), dout(d, s.shift), dx(n, s.shift);
            gelu_forward(y.data, inp.data, n, stream);
            gelu_backward(dx.data, dout.data, inp.data, n, stream);
            gelu_backward(dout.data, dout.data, inp.data, n, stream);
            // 1 + tanh(u) has an error of a float's last places, whatever is left of it
            o.add("out", y, out, tolerance<T>(4), 1);
            o.add("dinp", dx, dinp, tolerance<T>(4), 4);
            o.add("dinp in place", dout, dinp, tolerance<T>(4), 4);
        });
    }
}

template <typename T> void swiglu_kernels(Check& c) {
    for (ElementCase s : element_cases()) {
        size_t n = s.n;
        CASE(c, "swiglu %s n=%zu shift=%zu", type_word(T()), n, s.shift);
        auto g = rounded<T>(normals(c, n, s.scale)), u = rounded<T>(normals(c, n)),
             d = rounded<T>(normals(c, n));
        std::vector<double> out(n), dgate(n), dup(n);
        swiglu_forward(out.data(), g.data(), u.data(), n, Cpu{});
        swiglu_backward(dgate.data(), dup.data(), d.data(), g.data(), u.data(), n, Cpu{});
        every_order(c, [&](Outputs& o) {
            cudaStream_t stream = {};
            Array<T> gate(g, s.shift), up(u, s.shift), dout(d, s.shift), y(n, s.shift),
                dg(n, s.shift), du(n, s.shift);
            swiglu_forward(y.data, gate.data, up.data, n, stream);
            swiglu_backward(dg.data, du.data, dout.data, gate.data, up.data, n, stream);
            swiglu_backward(dout.data, up.data, dout.data, gate.data, up.data, n, stream);
            o.add("out", y, out, tolerance<T>(4), 1);
            o.add("dgate", dg, dgate, tolerance<T>(8), 1);
            o.add("dup", du, dup, tolerance<T>(4), 1);
            o.add("dgate in place", dout, dgate, tolerance<T>(8), 1);
            o.add("dup in place", up, dup, tolerance<T>(4), 1);
        });
    }
}

// heads of 2 (one pair) to 128, rows with more in them than the heads, unaligned ones
template <typename T> void rope_kernels(Check& c) {
    struct Case {
        size_t N, NH, HS, stride, shift;
    };
    std::vector<Case> cases = {{3, 1, 2, 2, 0},    {5, 3, 10, 37, 0},     {4, 2, 64, 200, 0},
                               {4, 2, 64, 200, 1}, {3, 17, 128, 2176, 0}, {2, 4, 48, 208, 0}};
    if (SMALL) cases = {{3, 1, 2, 2, 0}, {2, 3, 64, 200, 0}};
    for (Case s : cases) {
        CASE(c, "rope %s N=%zu NH=%zu HS=%zu stride=%zu shift=%zu", type_word(T()), s.N, s.NH, s.HS,
             s.stride, s.shift);
        const size_t P = 40;
        std::vector<double> table(P * s.HS);
        rope_table(table.data(), P, s.HS, 10000, {});
        table = rounded<float>(table);
        std::vector<int> at = integers(c, s.N, 0, int(P) - 1);
        auto x = rounded<T>(normals(c, s.N * s.stride));
        std::vector<double> forward = x, backward = x;
        rope_forward(forward.data(), at.data(), table.data(), s.N, s.NH, s.HS, s.stride, Cpu{});
        rope_backward(backward.data(), at.data(), table.data(), s.N, s.NH, s.HS, s.stride, Cpu{});
        every_order(c, [&](Outputs& o) {
            cudaStream_t stream = {};
            Array<int> positions(at);
            Array<float> turn(table);
            Array<T> y(x, s.shift), dx(x, s.shift);
            rope_forward(y.data, positions.data, turn.data, s.N, s.NH, s.HS, s.stride, stream);
            rope_backward(dx.data, positions.data, turn.data, s.N, s.NH, s.HS, s.stride, stream);
            o.add("forward", y, forward, tolerance<T>(2), 1);
            o.add("backward", dx, backward, tolerance<T>(2), 1);
        });
    }
}

template <typename T> void column_sum_kernels(Check& c) {
    for (NormCase s : norm_cases())
        for (bool accumulate : {false, true}) {
            CASE(c, "column sums %s N=%zu C=%zu shift=%zu", type_word(T()), s.N, s.C, s.shift);
            auto x = rounded<T>(normals(c, s.N * s.C)), before = rounded<float>(normals(c, s.C));
            std::vector<double> sums = before;
            column_sums(sums.data(), x.data(), nullptr, s.N, s.C, accumulate, Cpu{});
            every_order(c, [&](Outputs& o) {
                cudaStream_t stream = {};
                Array<T> inp(x, s.shift);
                Array<float> out(before);
                Array<unsigned char> scratch(sum_columns_scratch_bytes(s.N, s.C, 1));
                column_sums(out.data, inp.data, scratch.data, s.N, s.C, accumulate, stream);
                o.add("sums", out, sums, tolerance<float>(s.N));
            });
        }
}

inline void add_elementwise_kernels(std::vector<KernelRow>& rows) {
    rows.push_back({"gelu float", gelu_kernels<float>});
    rows.push_back({"gelu bf16", gelu_kernels<bf16>});
    rows.push_back({"gelu fp16", gelu_kernels<fp16>});
    rows.push_back({"swiglu float", swiglu_kernels<float>});
    rows.push_back({"swiglu bf16", swiglu_kernels<bf16>});
    rows.push_back({"swiglu fp16", swiglu_kernels<fp16>});
    rows.push_back({"rope float", rope_kernels<float>});
    rows.push_back({"rope bf16", rope_kernels<bf16>});
    rows.push_back({"rope fp16", rope_kernels<fp16>});
    rows.push_back({"column sums float", column_sum_kernels<float>});
    rows.push_back({"column sums bf16", column_sum_kernels<bf16>});
    rows.push_back({"column sums fp16", column_sum_kernels<fp16>});
}
