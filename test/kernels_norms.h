// kernels_norms.h - rows of the kernel table: LayerNorm, RMSNorm
#pragma once
#include "../llmc/layernorm.cuh"
#include "../llmc/rmsnorm.cuh"
#include "kernel_table.h"

// odd rows and channels, one of each, blocks of rows that end early, one, four and sixteen warps a
// row, and a row longer than a block reads at once; shift: not 16-byte aligned
struct NormCase {
    size_t N, C, shift;
};
inline std::vector<NormCase> norm_cases() {
    if (SMALL) return {{3, 33, 0}, {9, 96, 0}, {2, 4160, 0}};
    return {{1, 1, 0},   {3, 33, 0},   {37, 96, 0},  {5, 768, 0},   {6, 768, 1},
            {131, 8, 0}, {2, 4100, 1}, {2, 8192, 0}, {1, 16384, 0}, {200, 264, 0}};
}

template <typename T> void layernorm_kernels(Check& c) {
    const float eps = 1e-5f;
    for (NormCase s : norm_cases())
        for (bool accumulate : {false, true}) {
            size_t N = s.N, C = s.C;
            CASE(c, "layernorm %s N=%zu C=%zu shift=%zu", type_word(T()), N, C, s.shift);
            auto x = rounded<T>(normals(c, N * C)), w = rounded<T>(normals(c, C)),
                 b = rounded<T>(normals(c, C)), dout = rounded<T>(normals(c, N * C)),
                 dres = rounded<T>(normals(c, N * C)), before = rounded<float>(normals(c, C));
            std::vector<double> out(N * C), mean(N), rstd(N), dinp(N * C), dw = before, db = before;
            layernorm_forward(out.data(), mean.data(), rstd.data(), x.data(), w.data(), b.data(), N,
                              C, eps, Cpu{});
            // backward in float reads float statistics: so does the reference
            auto mean_f = rounded<float>(mean), rstd_f = rounded<float>(rstd);
            layernorm_backward_input(dinp.data(), accumulate ? dres.data() : nullptr, dout.data(),
                                     x.data(), w.data(), mean_f.data(), rstd_f.data(), N, C, Cpu{});
            layernorm_backward_weight(dw.data(), db.data(), dout.data(), x.data(), mean_f.data(),
                                      rstd_f.data(), nullptr, N, C, accumulate, Cpu{});
            every_order(c, [&](Outputs& o) {
                cudaStream_t stream = {};
                Array<T> inp(x, s.shift), weight(w, s.shift), bias(b, s.shift), y(N * C, s.shift),
                    d(dout, s.shift), residual(dres, s.shift), dx(N * C, s.shift);
                Array<float> m(N), r(N), m_in(mean_f), r_in(rstd_f), dweight(before), dbias(before);
                Array<unsigned char> scratch(layernorm_scratch_bytes(N, C, stream));
                layernorm_forward(y.data, m.data, r.data, inp.data, weight.data, bias.data, N, C,
                                  eps, stream);
                layernorm_backward_input(dx.data, accumulate ? residual.data : nullptr, d.data,
                                         inp.data, weight.data, m_in.data, r_in.data, N, C, stream);
                layernorm_backward_weight(dweight.data, dbias.data, d.data, inp.data, m_in.data,
                                          r_in.data, scratch.data, N, C, accumulate, stream);
                o.add("out", y, out, tolerance<T>(C));
                o.add("mean", m, mean, tolerance<float>(C), 1);
                o.add("rstd", r, rstd, tolerance<float>(C));
                o.add("dinp", dx, dinp, tolerance<T>(C));
                o.add("dweight", dweight, dw, tolerance<float>(N));
                o.add("dbias", dbias, db, tolerance<float>(N));
            });
        }
}

template <typename T> void rmsnorm_kernels(Check& c) {
    const float eps = 1e-5f;
    for (NormCase s : norm_cases())
        for (bool accumulate : {false, true}) {
            size_t N = s.N, C = s.C;
            CASE(c, "rmsnorm %s N=%zu C=%zu shift=%zu", type_word(T()), N, C, s.shift);
            auto x = rounded<T>(normals(c, N * C)), w = rounded<T>(normals(c, C)),
                 dout = rounded<T>(normals(c, N * C)), dres = rounded<T>(normals(c, N * C)),
                 before = rounded<float>(normals(c, C));
            std::vector<double> out(N * C), rstd(N), dinp(N * C), dw = before;
            rmsnorm_forward(out.data(), rstd.data(), x.data(), w.data(), N, C, eps, Cpu{});
            auto rstd_f = rounded<float>(rstd);
            double terms = 0; // of the input's gradient, which cancel where C is small
            for (size_t i = 0; i < N * C; i++)
                terms = std::max(terms, std::fabs(rstd[i / C] * dout[i] * w[i % C]));
            rmsnorm_backward_input(dinp.data(), accumulate ? dres.data() : nullptr, dout.data(),
                                   x.data(), w.data(), rstd_f.data(), N, C, Cpu{});
            rmsnorm_backward_weight(dw.data(), dout.data(), x.data(), rstd_f.data(), nullptr, N, C,
                                    accumulate, Cpu{});
            every_order(c, [&](Outputs& o) {
                cudaStream_t stream = {};
                Array<T> inp(x, s.shift), weight(w, s.shift), y(N * C, s.shift), d(dout, s.shift),
                    residual(dres, s.shift), dx(N * C, s.shift);
                Array<float> r(N), r_in(rstd_f), dweight(before);
                Array<unsigned char> scratch(rmsnorm_scratch_bytes(N, C, stream));
                rmsnorm_forward(y.data, r.data, inp.data, weight.data, N, C, eps, stream);
                rmsnorm_backward_input(dx.data, accumulate ? residual.data : nullptr, d.data,
                                       inp.data, weight.data, r_in.data, N, C, stream);
                rmsnorm_backward_weight(dweight.data, d.data, inp.data, r_in.data, scratch.data, N,
                                        C, accumulate, stream);
                rmsnorm_backward_weight((float*)nullptr, d.data, inp.data, r_in.data, scratch.data,
                                        N, C, accumulate, stream);
                o.add("out", y, out, tolerance<T>(C));
                o.add("rstd", r, rstd, tolerance<float>(C));
                o.add("dinp", dx, dinp, tolerance<T>(C), terms);
                o.add("dweight", dweight, dw, tolerance<float>(N));
            });
        }
}

inline void add_norm_kernels(std::vector<KernelRow>& rows) {
    rows.push_back({"layernorm float", layernorm_kernels<float>});
    rows.push_back({"layernorm bf16", layernorm_kernels<bf16>});
    rows.push_back({"layernorm fp16", layernorm_kernels<fp16>});
    rows.push_back({"rmsnorm float", rmsnorm_kernels<float>});
    rows.push_back({"rmsnorm bf16", rmsnorm_kernels<bf16>});
    rows.push_back({"rmsnorm fp16", rmsnorm_kernels<fp16>});
}
