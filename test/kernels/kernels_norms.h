// kernels_norms.h - rows of the kernel table: LayerNorm, RMSNorm
#pragma once
#include "../../llmc/ops/layernorm.cuh"
#include "../../llmc/ops/rmsnorm.cuh"
#include "kernel_table.h"

using namespace llmc;

// Odd rows and channels, and one of each. Blocks of rows that end early. One, four and sixteen
// warps a row; rows that give a thread one pack, two packs, or so many that sums stay in memory.
// One strip of rows, several, and several and one row. Rows of one pack more than fits the kernels
// for shorter rows. shift: not 16-byte aligned.
struct NormCase {
    size_t N, C, shift;
};
inline std::vector<NormCase> norm_cases() {
    if (SMALL) return {{3, 33, 0}, {9, 96, 0}, {2, 4160, 0}};
    return {{1, 1, 0},   {3, 33, 0},   {37, 96, 0},   {5, 768, 0},   {6, 768, 1},
            {131, 8, 0}, {2, 4100, 1}, {33, 1600, 0}, {1, 2056, 0},  {1, 16384, 0},
            {993, 8, 0}, {1, 4104, 0}, {200, 264, 0}, {1, 8200, 0}};
}

template <typename T> void layernorm_kernels(Check& c) {
    const float eps = 1e-5f;
    for (NormCase s : norm_cases())
        for (bool accumulate : {false, true}) {
            size_t N = s.N, C = s.C;
            if (C > 2056 && accumulate != (s.shift == 1)) continue; // long: a thousand blocks
            CASE(c, "layernorm %s N=%zu C=%zu shift=%zu", type_word(T()), N, C, s.shift);
            auto x = rounded<T>(normals(c, N * C)), dout = rounded<T>(normals(c, N * C));
            auto w = rounded<T>(normals(c, C)), b = rounded<T>(normals(c, C));
            auto dres = rounded<T>(normals(c, N * C)), before = rounded<float>(normals(c, C));

            // Want: the CPU in double. The kernel's backward reads statistics in float, so the
            // CPU's reads them rounded to float.
            std::vector<double> out(N * C), mean(N), rstd(N), dinp(N * C), dw = before, db = before;
            layernorm_forward(out.data(), mean.data(), rstd.data(), x.data(), w.data(), b.data(), N,
                              C, eps, Cpu{});
            auto mean_f = rounded<float>(mean), rstd_f = rounded<float>(rstd);
            std::vector<double> dj = before, of_rows(layernorm_sums(N, C, Cpu{}));
            layernorm_backward(dinp.data(), of_rows.data(), accumulate ? dres.data() : nullptr,
                               dout.data(), x.data(), w.data(), mean_f.data(), rstd_f.data(), N, C,
                               Cpu{});
            add_parts(layernorm_parts(dw.data(), db.data(), dj.data(), of_rows.data(), N, C, Cpu{}),
                      accumulate, Cpu{});

            // A new gradient may cancel the one before it, and the input gradient's terms cancel
            // where C is small: errors are relative to the terms.
            double terms = 0, weight_terms = accumulate ? largest(before) : 0;
            for (size_t i = 0; i < N * C; i++)
                terms = std::max(terms, std::fabs(rstd[i / C] * dout[i] * w[i % C]));

            every_order(c, [&](Outputs& o) {
                cudaStream_t stream = {};
                Array<T> inp(x, s.shift), weight(w, s.shift), bias(b, s.shift);
                Array<T> y(N * C, s.shift), dx(N * C, s.shift);
                Array<T> d(dout, s.shift), residual(dres, s.shift);
                Array<float> m(N), r(N), m_in(mean_f), r_in(rstd_f), dweight(before), dbias(before);
                Array<float> joined(before);
                Array<float> sums(layernorm_sums(N, C, stream));

                // Forward, and backward with all three sums.
                layernorm_forward(y.data, m.data, r.data, inp.data, weight.data, bias.data, N, C,
                                  eps, stream);
                layernorm_backward(dx.data, sums.data, accumulate ? residual.data : nullptr, d.data,
                                   inp.data, weight.data, m_in.data, r_in.data, N, C, stream);
                add_parts(layernorm_parts<float>(dweight.data, dbias.data, joined.data, sums.data,
                                                 N, C, stream),
                          accumulate, stream);

                // Frozen weights, with dinp in the residual's place: the input
                // gradient stays the same.
                layernorm_backward(residual.data, (float*)nullptr,
                                   accumulate ? residual.data : nullptr, d.data, inp.data,
                                   weight.data, m_in.data, r_in.data, N, C, stream);

                o.add("out", y, out, tolerance<T>(C));
                o.add("mean", m, mean, tolerance<float>(C), 1);
                o.add("rstd", r, rstd, tolerance<float>(C));
                o.add("dinp", dx, dinp, tolerance<T>(C), terms);
                o.add("dinp in place", residual, dinp, tolerance<T>(C), terms);
                o.add("dweight", dweight, dw, tolerance<float>(N), weight_terms);
                o.add("dbias", dbias, db, tolerance<float>(N), weight_terms);
                o.add("sum of dresidual", joined, dj, tolerance<float>(N), weight_terms);
            });
        }
}

template <typename T> void rmsnorm_kernels(Check& c) {
    const float eps = 1e-5f;
    for (NormCase s : norm_cases())
        for (bool accumulate : {false, true}) {
            size_t N = s.N, C = s.C;
            if (C > 2056 && accumulate != (s.shift == 1)) continue; // long: a thousand blocks
            CASE(c, "rmsnorm %s N=%zu C=%zu shift=%zu", type_word(T()), N, C, s.shift);
            auto x = rounded<T>(normals(c, N * C)), w = rounded<T>(normals(c, C));
            auto dout = rounded<T>(normals(c, N * C)), dres = rounded<T>(normals(c, N * C));
            auto before = rounded<float>(normals(c, C));

            // Want: the CPU in double. The kernel's backward reads statistics in float, so the
            // CPU's reads them rounded to float.
            std::vector<double> out(N * C), rstd(N), dinp(N * C), dw = before;
            rmsnorm_forward(out.data(), rstd.data(), x.data(), w.data(), N, C, eps, Cpu{});
            auto rstd_f = rounded<float>(rstd);
            std::vector<double> of_rows(rmsnorm_sums(N, C, Cpu{}));
            rmsnorm_backward(dinp.data(), of_rows.data(), accumulate ? dres.data() : nullptr,
                             dout.data(), x.data(), w.data(), rstd_f.data(), N, C, Cpu{});
            add_parts<double>({rmsnorm_parts(dw.data(), of_rows.data(), N, C, Cpu{})}, accumulate,
                              Cpu{});

            // The size of the input gradient's terms, which cancel where C is small.
            double terms = 0, weight_terms = accumulate ? largest(before) : 0;
            for (size_t i = 0; i < N * C; i++)
                terms = std::max(terms, std::fabs(rstd[i / C] * dout[i] * w[i % C]));

            every_order(c, [&](Outputs& o) {
                cudaStream_t stream = {};
                Array<T> inp(x, s.shift), weight(w, s.shift), d(dout, s.shift);
                Array<T> y(N * C, s.shift), residual(dres, s.shift), dx(N * C, s.shift);
                Array<float> r(N), r_in(rstd_f), dweight(before);
                Array<float> sums(rmsnorm_sums(N, C, stream));

                // Forward, and backward with its weight gradient. A null in place of the weight
                // gradient asks for none.
                rmsnorm_forward(y.data, r.data, inp.data, weight.data, N, C, eps, stream);
                rmsnorm_backward(dx.data, sums.data, accumulate ? residual.data : nullptr, d.data,
                                 inp.data, weight.data, r_in.data, N, C, stream);
                add_parts<float>({rmsnorm_parts<float>(dweight.data, sums.data, N, C, stream)},
                                 accumulate, stream);
                add_parts<float>({rmsnorm_parts<float>(nullptr, sums.data, N, C, stream)},
                                 accumulate, stream);

                // Frozen weights, with dinp in the residual's place: the input
                // gradient stays the same.
                rmsnorm_backward(residual.data, (float*)nullptr,
                                 accumulate ? residual.data : nullptr, d.data, inp.data,
                                 weight.data, r_in.data, N, C, stream);

                o.add("out", y, out, tolerance<T>(C));
                o.add("rstd", r, rstd, tolerance<float>(C));
                o.add("dinp", dx, dinp, tolerance<T>(C), terms);
                o.add("dinp in place", residual, dinp, tolerance<T>(C), terms);
                o.add("dweight", dweight, dw, tolerance<float>(N), weight_terms);
            });
        }
}

inline void add_norm_kernels(std::vector<KernelRow>& rows) {
    rows.insert(rows.end(), {
        THREE_TYPES("layernorm", layernorm_kernels),
        THREE_TYPES("rmsnorm", rmsnorm_kernels)});
}
