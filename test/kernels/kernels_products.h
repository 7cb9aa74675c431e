// kernels_products.h - rows of the kernel table: matrix products, the linear layer
//   On a GPU these rows run cuBLASLt. In the emulator they run the loops that stand in for it,
//   which shows that the rows themselves are right.
#pragma once
#include "../../llmc/ops/linear.cuh"
#include "kernel_table.h"

using namespace llmc;

// The scratch that suffices for every product of a row.
inline size_t product_scratch_bytes() {
    return std::max(PRODUCT_WORKSPACE, column_sums_scratch_bytes(300, 300, cudaStream_t{}));
}

// A row's products use the library's first guess, or the algorithm that it measures to be the
// fastest. A handle remembers its choices, so the second run of a case uses the same algorithm.
struct ProductHandles {
    Blas guessed, measured;
    Array<unsigned char> scratch{product_scratch_bytes()};
    ProductHandles() {
        blas_scratch(guessed, scratch.data, scratch.n);
        blas_scratch(measured, scratch.data, scratch.n);
#if defined(__CUDACC__)
        measured.rehearsing = true;
#endif
    }
};

// ----------------------------------------------------------------------------
// products

// Shapes: one element; odd sizes; sizes that suit tensor cores; a sum long enough to be cut into
// parts; one row, one column or one term, whose operands have two strides of 1 where nothing pads
// them. `pad` elements follow each row of every operand: 0 and 8 keep rows 16-byte aligned, 1
// leaves them aligned to 2 bytes. The shift moves every operand off its alignment.
struct ProductCase {
    size_t M, N, K, pad, shift;
};
inline std::vector<ProductCase> product_cases() {
    if (SMALL) return {{1, 1, 1, 0, 0}, {5, 7, 3, 1, 1}};
    return {{1, 1, 1, 0, 0},    {5, 7, 3, 1, 1},     {33, 17, 66, 0, 1}, {64, 128, 96, 8, 0},
            {57, 63, 65, 0, 0}, {8, 16, 2048, 0, 0}, {1, 96, 64, 8, 0},  {40, 16, 64, 1, 0},
            {1, 96, 64, 0, 0},  {40, 1, 64, 0, 0},   {40, 16, 1, 0, 0}};
}

// A matrix with `pad` elements after each row, or after each column where it is stored transposed.
// The padding is NaN, so a read of it shows.
struct PaddedMatrix {
    Strides strides;
    std::vector<double> x;
};
inline PaddedMatrix padded_matrix(const std::vector<double>& values, size_t rows, size_t cols,
                                  size_t pad, bool transposed) {
    size_t step = (transposed ? rows : cols) + pad;
    size_t lines = transposed ? cols : rows;
    PaddedMatrix m;
    m.strides = transposed ? Strides{1, step} : Strides{step, 1};
    m.x.assign(lines * step, NAN);
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < cols; j++)
            m.x[i * m.strides.row + j * m.strides.column] = values[i * cols + j];
    return m;
}

// A product's operands, and the result that it must give with the padding left as it was.
struct WantedProduct {
    Product p;
    PaddedMatrix a, b, residual;
    std::vector<double> bias, before, want; // (N) (M,N + pad) (M,N + pad)
    // The largest sum of magnitudes: an element may be the small remainder of such terms.
    double terms =
        0;
};

// Draw a product's values in T. `kind`: bit 0 adds a bias, bit 1 a residual, bit 2 the
// output's own value before.
template <typename T>
WantedProduct wanted_product(Check& c, const ProductCase& s, bool ta, bool tb, int kind) {
    auto a = rounded<T>(normals(c, s.M * s.K));
    auto b = rounded<T>(normals(c, s.K * s.N));
    auto r = rounded<T>(normals(c, s.M * s.N));
    WantedProduct w;
    w.a = padded_matrix(a, s.M, s.K, s.pad, ta);
    w.b = padded_matrix(b, s.K, s.N, s.pad, tb);
    w.residual = padded_matrix(r, s.M, s.N, s.pad, false);
    w.bias = rounded<T>(normals(c, s.N));
    w.p = {s.M, s.N, s.K, w.a.strides, w.b.strides, s.N + s.pad, bool(kind & 4)};

    // The output starts with numbers everywhere, in the padding too.
    w.before = rounded<T>(normals(c, s.M * w.p.out_row));
    w.want = w.before;

    // Want: the plain sum in double, then what is added to it.
    for (size_t i = 0; i < s.M; i++)
        for (size_t j = 0; j < s.N; j++) {
            double sum = 0;
            for (size_t k = 0; k < s.K; k++)
                sum += a[i * s.K + k] * b[k * s.N + j];
            double& out = w.want[i * w.p.out_row + j];
            double before = kind & 4 ? out : 0;
            double residual = kind & 2 ? r[i * s.N + j] : 0;
            double bias = kind & 1 ? w.bias[j] : 0;
            out = sum + before + residual + bias;
            w.terms = std::max(w.terms, std::fabs(sum) + std::fabs(before) + std::fabs(residual) +
                                            std::fabs(bias));
        }
    return w;
}

// Run one product. On a GPU the first run of a handle that measures overwrites its output many
// times, so that run writes to a buffer of its own.
template <typename T, typename O>
void product_output(Array<O>& out, const WantedProduct& w, int kind, size_t shift, Blas& blas) {
    cudaStream_t stream = {};
    Array<T> a(w.a.x, shift), b(w.b.x, shift), bias(w.bias, shift);
    Array<O> residual(w.residual.x, shift);
    const T* bias_or_null = kind & 1 ? bias.data : nullptr;
    const O* residual_or_null = kind & 2 ? residual.data : nullptr;
#if defined(__CUDACC__)
    Array<O> scrap(w.before, shift);
    if (blas.rehearsing)
        matmul(scrap.data, a.data, b.data, bias_or_null, residual_or_null, w.p, blas, stream);
#endif
    matmul(out.data, a.data, b.data, bias_or_null, residual_or_null, w.p, blas, stream);
}

// Products of operands in T with a result in O, which is T or float.
template <typename T, typename O> void product_kernels(Check& c) {
    ProductHandles handles;
    bool same_type = type_of<T>() == type_of<O>();
    for (const ProductCase& s : product_cases())
        for (int transposed = 0; transposed < 4; transposed++)
            for (int kind : {0, 1, 2, 3, 4, 5}) {
                if (!same_type && kind & 1) continue; // a bias has the output's type
                bool ta = transposed & 1, tb = transposed & 2;
                CASE(c, "product %s to %s M=%zu N=%zu K=%zu pad=%zu shift=%zu ta=%d tb=%d%s%s%s",
                     type_word(T()), type_word(O()), s.M, s.N, s.K, s.pad, s.shift, ta, tb,
                     kind & 1 ? " bias" : "", kind & 2 ? " residual" : "", kind & 4 ? " +=" : "");
                WantedProduct w = wanted_product<T>(c, s, ta, tb, kind);

                // The sum is rounded to O once, whatever is added to it.
                every_order(c, [&](Outputs& o) {
                    Array<O> guessed(w.before, s.shift), measured(w.before, s.shift);
                    product_output<T>(guessed, w, kind, s.shift, handles.guessed);
                    product_output<T>(measured, w, kind, s.shift, handles.measured);
                    o.add("out", guessed, w.want, tolerance<O>(s.K + 2), w.terms);
                    o.add("out, measured", measured, w.want, tolerance<O>(s.K + 2), w.terms);
                });
            }
}

// ----------------------------------------------------------------------------
// the linear layer, as blocks call it

// The sixth case is a gate of one output; in the seventh an adapter has rank 1 (lora_kernels).
struct LinearCase {
    size_t N, OC, IC, shift;
};
inline std::vector<LinearCase> linear_cases() {
    if (SMALL) return {{3, 5, 7, 1}};
    return {{1, 1, 1, 0},     {3, 5, 7, 1},    {96, 64, 128, 0}, {130, 96, 24, 0},
            {17, 33, 64, 0},  {40, 1, 64, 0},  {49, 40, 24, 0}};
}

// The three products of a linear layer, with a bias and a residual, against the CPU in double.
template <typename T> void linear_kernels(Check& c) {
    ProductHandles handles;
    Blas& blas = handles.guessed;
    for (const LinearCase& s : linear_cases())
        for (bool accumulate : {false, true}) {
            size_t N = s.N, OC = s.OC, IC = s.IC;
            CASE(c, "linear %s N=%zu OC=%zu IC=%zu shift=%zu accumulate=%d", type_word(T()), N, OC,
                 IC, s.shift, accumulate);
            auto inp = rounded<T>(normals(c, N * IC)), w = rounded<T>(normals(c, OC * IC));
            auto bias = rounded<T>(normals(c, OC)), dout = rounded<T>(normals(c, N * OC));
            auto residual = rounded<T>(normals(c, N * OC)), dx0 = rounded<T>(normals(c, N * IC));
            auto dw0 = rounded<float>(normals(c, OC * IC)), db0 = rounded<float>(normals(c, OC));

            // Want: the CPU in double.
            std::vector<double> out(N * OC), dinp = dx0, dw = dw0, db = db0;
            std::vector<unsigned char> memory(linear_scratch_bytes<double>(N, OC, IC, Cpu{}));
            Blas host;
            blas_scratch(host, memory.data(), memory.size());
            Weight W = {w.data(), Type::F64, OC, IC, dw.data()};
            Weight B = {bias.data(), Type::F64, OC, 1, db.data()};
            linear_forward(out.data(), inp.data(), W, &B, residual.data(), N, host, Cpu{});
            linear_backward_input(dinp.data(), dout.data(), W, N, accumulate, host, Cpu{});
            linear_backward_weight(W, &B, dout.data(), inp.data(), N, accumulate, host, Cpu{});

            every_order(c, [&](Outputs& o) {
                cudaStream_t stream = {};
                Array<T> x(inp, s.shift), weight(w, s.shift), b(bias, s.shift), d(dout, s.shift);
                Array<T> r(residual, s.shift), y(N * OC, s.shift), dx(dx0, s.shift);
                Array<float> dweight(dw0), dbias(db0);
                Weight gw = {weight.data, type_of<T>(), OC, IC, dweight.data};
                Weight gb = {b.data, type_of<T>(), OC, 1, dbias.data};
                linear_forward(y.data, x.data, gw, &gb, r.data, N, blas, stream);
                linear_backward_input(dx.data, d.data, gw, N, accumulate, blas, stream);
                linear_backward_weight(gw, &gb, d.data, x.data, N, accumulate, blas, stream);

                // The error is relative to the largest terms, which may cancel.
                o.add("out", y, out, tolerance<T>(IC + 2),
                      largest(inp) * largest(w) + largest(bias) + largest(residual));
                o.add("dinp", dx, dinp, tolerance<T>(OC + 1),
                      largest(dout) * largest(w) + largest(dx0));
                o.add("dw", dweight, dw, tolerance<float>(N + 1),
                      largest(dout) * largest(inp) + largest(dw0));
                o.add("dbias", dbias, db, tolerance<float>(N + 1), largest(dout) + largest(db0));
            });
        }
}

// An adapter alone: lora_scale(), then the adapter's products in both directions.
template <typename T> void lora_kernels(Check& c) {
    ProductHandles handles;
    Blas& blas = handles.guessed;
    for (const LinearCase& s : linear_cases())
        for (bool accumulate : {false, true}) {
            size_t N = s.N, OC = s.OC, IC = s.IC, r = N % 7 + 1;
            CASE(c, "lora %s N=%zu OC=%zu IC=%zu r=%zu shift=%zu accumulate=%d", type_word(T()), N,
                 OC, IC, r, s.shift, accumulate);
            auto inp = rounded<T>(normals(c, N * IC)), a = rounded<T>(normals(c, r * IC));
            auto b = rounded<T>(normals(c, OC * r)), dout = rounded<T>(normals(c, N * OC));
            auto y0 = rounded<T>(normals(c, N * OC)), dx0 = rounded<T>(normals(c, N * IC));
            auto da0 = rounded<float>(normals(c, r * IC)), db0 = rounded<float>(normals(c, OC * r));

            // Want: the CPU in double.
            const double scale = 0.75;
            std::vector<double> out = y0, dinp = dx0, da = da0, db = db0, room(N * r), scaled = y0;
            std::vector<unsigned char> memory(lora_scratch_bytes<double>(N, OC, IC, r, Cpu{}));
            Blas host;
            blas_scratch(host, memory.data(), memory.size());
            Lora l = {a.data(), b.data(), da.data(), db.data(), r, scale};
            lora_forward(out.data(), inp.data(), l, room.data(), N, OC, IC, host, Cpu{});
            lora_backward_input(dinp.data(), dout.data(), l, room.data(), N, OC, IC, host, Cpu{});
            lora_backward_weight(l, dout.data(), inp.data(), room.data(), N, OC, IC, accumulate,
                                 host, Cpu{});
            lora_scale(scaled.data(), N * OC, scale, Cpu{});

            // h and dh have r columns and are rounded to T twice, in their product and in their
            // scale, so dA and dB have two roundings; outputs in T are rounded once more. Errors
            // are relative to these sums of magnitudes, where a single row leaves no slack.
            auto size = [&](const auto& x, const auto& y, size_t rows, size_t cols, size_t n,
                            Strides sx, Strides sy) {
                return largest(product(magnitudes(x), magnitudes(y), rows, cols, n, sx, sy));
            };
            auto h = product(inp, a, N, r, IC, {IC, 1}, {1, IC});
            auto dh = product(dout, b, N, r, OC, {OC, 1}, {r, 1});
            double out_sum = size(h, b, N, OC, r, {r, 1}, {1, r}) + largest(y0);
            double dinp_sum = size(dh, a, N, IC, r, {r, 1}, {IC, 1}) + largest(dx0);
            double da_sum = size(dh, inp, r, IC, N, {1, r}, {IC, 1}) + largest(da0);
            double db_sum = size(dout, h, OC, r, N, {1, OC}, {r, 1}) + largest(db0);

            every_order(c, [&](Outputs& o) {
                cudaStream_t stream = {};
                Array<T> x(inp, s.shift), A(a, s.shift), B(b, s.shift), d(dout, s.shift);
                Array<T> y(y0, s.shift), dx(dx0, s.shift), mid(N * r, s.shift), z(y0, s.shift);
                Array<float> dA(da0), dB(db0);
                Lora g = {A.data, B.data, dA.data, dB.data, r, scale};
                lora_scale(z.data, N * OC, scale, stream);
                lora_forward(y.data, x.data, g, mid.data, N, OC, IC, blas, stream);
                lora_backward_input(dx.data, d.data, g, mid.data, N, OC, IC, blas, stream);
                lora_backward_weight(g, d.data, x.data, mid.data, N, OC, IC, accumulate, blas,
                                     stream);

                o.add("scaled", z, scaled, tolerance<T>(1));
                o.add("out", y, out, tolerance<T>(IC + r + 2, 3), out_sum);
                o.add("dinp", dx, dinp, tolerance<T>(OC + r + 2, 3), dinp_sum);
                o.add("dA", dA, da, tolerance<T>(N + OC, 2), da_sum);
                o.add("dB", dB, db, tolerance<T>(N + IC, 2), db_sum);
            });
        }
}

// Three adapters of different ranks in one batch, one of which leaves this matrix alone. Runs are
// short and long, neighbours differ, and some rows have no adapter: they must stay as they are.
// Ranks are small, or the largest that a launch for all rows takes and one more.
template <typename T> void lora_batch_kernels(Check& c) {
    ProductHandles handles;
    const std::vector<int> chosen = {0, 2, -1, 0, 0, 1, 2, 0, -1, 2};
    for (const LinearCase& s : linear_cases())
        for (size_t each : {size_t(1), LORA_FEW_ROWS, size_t(LORA_LAUNCH_ROWS) + 1}) {
            // Short runs fill more than one launch.
            size_t B = each > LORA_FEW_ROWS ? 4 : chosen.size(), N = B * each;
            size_t OC = s.OC, IC = s.IC;
            if (SMALL && each > LORA_FEW_ROWS) continue;
            const bool wide = OC == 5 && each == 1;
            const size_t most = wide ? LORA_MOST_RANK + 1 : 9; // the largest rank
            const size_t ranks[] = {wide ? LORA_MOST_RANK : N % 5 + 1, 0, most};
            CASE(c, "lora batch %s N=%zu OC=%zu IC=%zu each=%zu shift=%zu", type_word(T()), N, OC,
                 IC, each, s.shift);
            auto inp = rounded<T>(normals(c, N * IC)), y0 = rounded<T>(normals(c, N * OC));
            std::vector<double> a[3], b[3], out = y0, sums = magnitudes(y0);
            for (size_t k = 0; k < 3; k++) {
                a[k] = rounded<T>(normals(c, ranks[k] * IC));
                b[k] = rounded<T>(normals(c, OC * ranks[k]));
            }

            // Want: each row's own sum, in double. Errors are relative to its magnitudes.
            for (size_t n = 0; n < N; n++) {
                int k = chosen[n / each];
                for (size_t j = 0; k >= 0 && j < ranks[k]; j++) {
                    double h = 0, size = 0;
                    for (size_t i = 0; i < IC; i++) {
                        double term = 0.75 * inp[n * IC + i] * a[k][j * IC + i];
                        h += term;
                        size += std::abs(term);
                    }
                    for (size_t o = 0; o < OC; o++) {
                        out[n * OC + o] += h * b[k][o * ranks[k] + j];
                        sums[n * OC + o] += size * std::abs(b[k][o * ranks[k] + j]);
                    }
                }
            }

            every_order(c, [&](Outputs& o) {
                Array<T> x(inp, s.shift), y(y0, s.shift), mid(N * most, s.shift);
                Array<T> a0(a[0], s.shift), b0(b[0], s.shift), a2(a[2], s.shift), b2(b[2], s.shift);
                Lora all[3] = {{a0.data, b0.data, nullptr, nullptr, ranks[0], 0.75},
                               {},
                               {a2.data, b2.data, nullptr, nullptr, ranks[2], 0.75}};
                LoraRuns runs = lora_rows(chosen.data(), B, each);
                lora_batch_forward(y.data, x.data, all, runs, mid.data, OC, IC, handles.guessed,
                                   cudaStream_t{});
                o.add("out", y, out, tolerance<T>(IC + most + 2, 3), largest(sums));
            });
        }
}

// ----------------------------------------------------------------------------

inline void add_product_kernels(std::vector<KernelRow>& rows) {
    rows.insert(rows.end(), {
        {"product float", product_kernels<float, float>},
        {"product bf16", product_kernels<bf16, bf16>},
        {"product fp16", product_kernels<fp16, fp16>},
        {"product bf16 to float", product_kernels<bf16, float>},
        {"product fp16 to float", product_kernels<fp16, float>},
        THREE_TYPES("linear", linear_kernels),
        THREE_TYPES("lora", lora_kernels),
        THREE_TYPES("lora batch", lora_batch_kernels)});
}
