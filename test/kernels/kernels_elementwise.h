// kernels_elementwise.h - rows of the kernel table: GELU, SwiGLU, RoPE, column sums
#pragma once
#include "../../llmc/ops/column_sums.cuh"
#include "../../llmc/ops/gelu.cuh"
#include "../../llmc/ops/rope.cuh"
#include "../../llmc/ops/swiglu.cuh"
#include "kernels_norms.h"

using namespace llmc;

// Sizes: one element, less than a load, a block, several blocks and a rest. shift: not 16-byte
// aligned. scale: inputs so far from 0 that exp overflows, or is 0.
struct ElementCase {
    size_t n, shift;
    double scale = 2;
};
inline std::vector<ElementCase> element_cases() {
    if (SMALL) return {{3, 0}, {2051, 0}, {300, 1, 100}};
    return {{1, 0}, {7, 0}, {2048, 0}, {6005, 0}, {6005, 1}, {100, 0, 100}};
}

// Rows to sum: one, less than a strip, several strips and a rest, more than there are parts, and
// whole strips and one row.
// Columns as norms have them.
inline std::vector<NormCase> column_cases() {
    if (SMALL) return {{3, 33, 0}, {40, 96, 0}};
    return {{1, 1, 0}, {3, 33, 0}, {37, 96, 0}, {5, 768, 1}, {200, 264, 0}, {4200, 8, 0},
            {993, 8, 0}};
}

template <typename T> void gelu_kernels(Check& c) {
    for (ElementCase s : element_cases()) {
        size_t n = s.n;
        CASE(c, "gelu %s n=%zu shift=%zu", type_word(T()), n, s.shift);
        auto x = rounded<T>(normals(c, n, s.scale)), d = rounded<T>(normals(c, n));

        // Want: the CPU in double.
        std::vector<double> out(n), dinp(n);
        gelu_forward(out.data(), x.data(), n, Cpu{});
        gelu_backward(dinp.data(), d.data(), x.data(), n, Cpu{});
        every_order(c, [&](Outputs& o) {
            cudaStream_t stream = {};
            Array<T> inp(x, s.shift), y(n, s.shift), dout(d, s.shift), dx(n, s.shift);

            // Forward, backward, and backward in place.
            float* no_sums = nullptr;
            gelu_forward(y.data, inp.data, n, stream);
            gelu_backward(dx.data, no_sums, dout.data, inp.data, 1, n, stream);
            gelu_backward(dout.data, no_sums, dout.data, inp.data, 1, n, stream);

            // 1 + tanh(u) has the error of a float's last places, however little is left of it: the
            // error is relative to a term of size 1, and in backward to a few of them.
            o.add("out", y, out, tolerance<T>(4), 1);
            o.add("dinp", dx, dinp, tolerance<T>(4), 4);
            o.add("dinp in place", dout, dinp, tolerance<T>(4), 4);
        });
    }
}

// GELU's backward, with the gradient of the bias: the sum of what backward writes, after rounding.
template <typename T> void gelu_sum_kernels(Check& c) {
    for (NormCase s : column_cases())
        for (bool accumulate : {false, true}) {
            size_t N = s.N, C = s.C;
            CASE(c, "gelu and sums %s N=%zu C=%zu shift=%zu", type_word(T()), N, C, s.shift);
            auto x = rounded<T>(normals(c, N * C)), d = rounded<T>(normals(c, N * C));
            auto before = rounded<float>(normals(c, C));

            std::vector<double> dinp(N * C), sums = before;
            gelu_backward(dinp.data(), d.data(), x.data(), N * C, Cpu{});
            every_order(c, [&](Outputs& o) {
                cudaStream_t stream = {};
                Array<T> inp(x, s.shift), dout(d, s.shift), dx(N * C, s.shift);
                Array<float> parts(gelu_sums(N, C, stream)), dbias(before);
                gelu_backward(dx.data, parts.data, dout.data, inp.data, N, C, stream);
                column_sums<T>({}, {gelu_parts<float>(dbias.data, parts.data, N, C, stream)},
                               nullptr, accumulate, stream);

                // Want the sum of the kernel's own elements, so that another rounding of one of
                // them is no error of the sum.
                std::vector<double> rows;
                for (T y : dx.host()) rows.push_back(to_acc(y));
                std::vector<double> want = before;
                column_sums(want.data(), rows.data(), nullptr, N, C, accumulate, Cpu{});
                o.add("dinp", dx, dinp, tolerance<T>(4), 4);
                o.add("dbias", dbias, want, tolerance<float>(N));
            });
        }
}

template <typename T> void swiglu_kernels(Check& c) {
    for (ElementCase s : element_cases()) {
        size_t n = s.n;
        CASE(c, "swiglu %s n=%zu shift=%zu", type_word(T()), n, s.shift);
        auto g = rounded<T>(normals(c, n, s.scale)), u = rounded<T>(normals(c, n));
        auto d = rounded<T>(normals(c, n));

        // Want: the CPU in double.
        std::vector<double> out(n), dgate(n), dup(n);
        swiglu_forward(out.data(), g.data(), u.data(), n, Cpu{});
        swiglu_backward(dgate.data(), dup.data(), d.data(), g.data(), u.data(), n, Cpu{});
        every_order(c, [&](Outputs& o) {
            cudaStream_t stream = {};
            Array<T> gate(g, s.shift), up(u, s.shift), dout(d, s.shift);
            Array<T> y(n, s.shift), dg(n, s.shift), du(n, s.shift);

            // Forward, backward, and backward in place.
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

// Heads of 2 (one pair) to 128, rows that are wider than their heads, unaligned rows.
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

        // Want: the CPU in double, with the rounded table that the kernels read.
        const size_t P = 40;
        std::vector<double> table(P * s.HS);
        rope_table(table.data(), P, s.HS, 10000, {});
        table = rounded<float>(table);
        std::vector<int> at = integers(c, s.N, 0, int(P) - 1);
        auto x = rounded<T>(normals(c, s.N * s.stride));
        std::vector<double> forward = x, backward = x, first_head = x;
        RopeHeads<double> all = {forward.data(), s.NH, s.stride};
        RopeHeads<double> one = {first_head.data(), 1, s.stride};
        rope_forward(all, one, at.data(), table.data(), s.N, s.HS, Cpu{});
        all.rows = backward.data();
        rope_backward(all, {}, at.data(), table.data(), s.N, s.HS, Cpu{});
        every_order(c, [&](Outputs& o) {
            cudaStream_t stream = {};
            Array<int> positions(at);
            Array<float> turn(table);
            Array<T> y(x, s.shift), dx(x, s.shift);

            // Forward and backward, one tensor a launch.
            RopeHeads<T> of_y = {y.data, s.NH, s.stride}, of_dx = {dx.data, s.NH, s.stride};
            rope_forward(of_y, {}, positions.data, turn.data, s.N, s.HS, stream);
            rope_backward(of_dx, {}, positions.data, turn.data, s.N, s.HS, stream);
            o.add("forward", y, forward, tolerance<T>(2), 1);
            o.add("backward", dx, backward, tolerance<T>(2), 1);

            // q and k in one launch, where k has only the first head of each row.
            Array<T> q(x, s.shift), k(x, s.shift);
            RopeHeads<T> of_q = {q.data, s.NH, s.stride}, of_k = {k.data, 1, s.stride};
            rope_forward(of_q, of_k, positions.data, turn.data, s.N, s.HS, stream);
            o.add("q of both", q, forward, tolerance<T>(2), 1);
            o.add("k of both", k, first_head, tolerance<T>(2), 1);
        });
    }
}

// Three sums in one launch, of matrices with different rows and columns. The second is unwanted.
template <typename T> void column_sum_kernels(Check& c) {
    for (NormCase s : column_cases())
        for (bool accumulate : {false, true}) {
            size_t N = s.N, C = s.C, M = N / 3 + 1, D = C + 40;
            CASE(c, "column sums %s N=%zu C=%zu shift=%zu", type_word(T()), N, C, s.shift);
            auto x = rounded<T>(normals(c, N * C)), z = rounded<T>(normals(c, M * D));
            auto before = rounded<float>(normals(c, C)), behind = rounded<float>(normals(c, D));

            // Want: the CPU in double, each matrix alone.
            std::vector<double> sums = before, sums_z = behind;
            column_sums(sums.data(), x.data(), nullptr, N, C, accumulate, Cpu{});
            column_sums(sums_z.data(), z.data(), nullptr, M, D, accumulate, Cpu{});
            every_order(c, [&](Outputs& o) {
                cudaStream_t stream = {};
                Array<T> inp(x, s.shift), other(z);
                Array<float> out(before), out_z(behind), alone(before);
                Array<unsigned char> scratch(column_sums_scratch_bytes(N, C, stream) +
                                             column_sums_scratch_bytes(M, D, stream));

                // All three in one launch, then the first matrix alone.
                column_sums<T>({{out.data, inp.data, N, C},
                                {nullptr, inp.data, N, C},
                                {out_z.data, other.data, M, D}},
                               {}, scratch.data, accumulate, stream);
                column_sums(alone.data, inp.data, scratch.data, N, C, accumulate, stream);
                o.add("sums", out, sums, tolerance<float>(N));
                o.add("sums of the other", out_z, sums_z, tolerance<float>(M));
                o.add("sums alone", alone, sums, tolerance<float>(N));
            });
        }
}

inline void add_elementwise_kernels(std::vector<KernelRow>& rows) {
    rows.insert(rows.end(), {
        THREE_TYPES("gelu", gelu_kernels),
        THREE_TYPES("gelu and sums", gelu_sum_kernels),
        THREE_TYPES("swiglu", swiglu_kernels),
        THREE_TYPES("rope", rope_kernels),
        THREE_TYPES("column sums", column_sum_kernels)});
}
