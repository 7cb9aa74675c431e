// ops_products.h - rows of the op table: matrix products, the linear layer, attention
//   The reference is written here, naively, in double; oneDNN and our own loops are both compared
//   with it.
#pragma once
#include "../llmc/linear.cuh"
#include "attention_inputs.h"

inline std::vector<double> product(const std::vector<double>& a, const std::vector<double>& b,
                                   size_t M, size_t N, size_t K, Strides sa, Strides sb) {
    std::vector<double> out(M * N);
    for (size_t i = 0; i < M; i++)
        for (size_t k = 0; k < K; k++)
            for (size_t j = 0; j < N; j++)
                out[i * N + j] += a[i * sa.row + k * sa.column] * b[k * sb.row + j * sb.column];
    return out;
}

// ----------------------------------------------------------------------------
// products: oneDNN, and our loops

template <typename T> void matmul_type_test(Check& c) {
    size_t M = odd(c, 1, 70), N = odd(c, 1, 150), K = odd(c, 1, 90);
    std::vector<double> a = rounded<T>(normals(c, M * K)), b = rounded<T>(normals(c, K * N)),
                        bias = rounded<T>(normals(c, N)), r = rounded<T>(normals(c, M * N));
    std::vector<T> A = as<T>(a), B = as<T>(b), Bias = as<T>(bias), R = as<T>(r);
    for (bool ta : {false, true})
        for (bool tb : {false, true})
            for (int extra = 0; extra < 8; extra++) {
                Product p = {M,
                             N,
                             K,
                             ta ? Strides{1, M} : Strides{K, 1},
                             tb ? Strides{1, K} : Strides{N, 1},
                             N,
                             bool(extra & 4)};
                std::vector<double> want = product(a, b, M, N, K, p.a, p.b);
                for (size_t i = 0; i < M; i++)
                    for (size_t j = 0; j < N; j++)
                        want[i * N + j] += (extra & 1 ? bias[j] : 0) +
                                           (extra & 2 ? r[i * N + j] : 0) + (extra & 4 ? 2 : 0);
                Workspace w(matmul_scratch_bytes(p, type_of<T>(), type_of<T>(), extra & 1,
                                                 extra & 2, threads_here(Cpu{})) +
                            matmul_plain_scratch_bytes(K, sizeof(acc_t<T>), threads_here(Cpu{})));
                std::vector<T> out(M * N, from_acc<T>(2)), own(M * N, from_acc<T>(2));
                matmul(out.data(), A.data(), B.data(), extra & 1 ? Bias.data() : nullptr,
                       extra & 2 ? R.data() : nullptr, p, w.blas, Cpu{});
                matmul_plain(own.data(), A.data(), B.data(), extra & 1 ? Bias.data() : nullptr,
                             extra & 2 ? R.data() : nullptr, p, w.blas.scratch);
                // the sum post-op may round the product to bf16 before it adds
                close(c, "product", out, want, tolerance<T>(K, 3)),
                    close(c, "own loops", own, want, tolerance<T>(K));
            }
}

// b copied to the scratch in another layout first: the same product
template <typename T> void matmul_packed_test(Check& c) {
    size_t M = odd(c, 1, 70), N = odd(c, 1, 150), K = odd(c, 1, 90);
    std::vector<double> a = rounded<T>(normals(c, M * K)), b = rounded<T>(normals(c, K * N));
    std::vector<double> bias = rounded<T>(normals(c, N)), r = rounded<T>(normals(c, M * N));
    std::vector<T> A = as<T>(a), B = as<T>(b), Bias = as<T>(bias), R = as<T>(r);
    for (bool tb : {false, true})
        for (bool accumulate : {false, true}) {
            Product p = {M, N, K, {K, 1}, tb ? Strides{1, K} : Strides{N, 1}, N, accumulate, true};
            std::vector<double> want = product(a, b, M, N, K, p.a, p.b);
            for (size_t i = 0; i < M * N; i++) want[i] += bias[i % N] + r[i] + (accumulate ? 2 : 0);
            Workspace w(matmul_scratch_bytes(p, type_of<T>(), type_of<T>(), true, true,
                                             threads_here(Cpu{})));
            std::vector<T> out(M * N, from_acc<T>(2));
            matmul(out.data(), A.data(), B.data(), Bias.data(), R.data(), p, w.blas, Cpu{});
            close(c, "packed", out, want, tolerance<T>(K, 3));
        }
}

template <typename T> void matmul_bits(Check& c) {
#ifdef _OPENMP
    size_t M = odd(c, 1, 70), N = odd(c, 200, 400), K = odd(c, 1, 90);
    std::vector<T> a = as<T>(normals(c, M * K)), b = as<T>(normals(c, K * N)), first(M * N),
                   again(M * N);
    Product p = {M, N, K, {K, 1}, {N, 1}, N};
    Workspace w(matmul_plain_scratch_bytes(K, sizeof(acc_t<T>), std::max(3, threads_here(Cpu{}))));
    const T* nothing = nullptr;
    int threads = omp_get_max_threads();
    matmul_plain(first.data(), a.data(), b.data(), nothing, nothing, p, w.blas.scratch);
    for (int n : {1, 3, threads}) {
        omp_set_num_threads(n);
        matmul_plain(again.data(), a.data(), b.data(), nothing, nothing, p, w.blas.scratch);
        omp_set_num_threads(threads);
        expect(c, !memcmp(first.data(), again.data(), M * N * sizeof(T)),
               "own loops: bits differ with threads");
    }
#else
    (void)c;
#endif
}

inline void matmul_test(Check& c) {
    for (int i = 0; i < 3; i++)
        matmul_type_test<float>(c), matmul_type_test<bf16>(c), matmul_type_test<double>(c);
    for (int i = 0; i < 3; i++) matmul_packed_test<float>(c), matmul_packed_test<bf16>(c);
    matmul_bits<float>(c), matmul_bits<bf16>(c), matmul_bits<double>(c);
}

// ----------------------------------------------------------------------------
// linear

struct LinearInputs {
    size_t N, OC, IC;
    std::vector<double> inp, w, bias, residual, dout;
    bool with_bias, with_residual, accumulate;
};

template <typename T> struct LinearRun {
    std::vector<T> out, dinp;
    std::vector<acc_t<T>> dw, dbias;
    explicit LinearRun(const LinearInputs& x)
        : out(x.N * x.OC), dinp(x.N * x.IC, from_acc<T>(1)), dw(x.OC * x.IC, 1), dbias(x.OC, 1) {
        std::vector<T> inp = as<T>(x.inp), w = as<T>(x.w), bias = as<T>(x.bias),
                       residual = as<T>(x.residual), dout = as<T>(x.dout);
        Workspace work(linear_scratch_bytes<T>(x.N, x.OC, x.IC, Cpu{}));
        Weight W = {w.data(), type_of<T>(), x.OC, x.IC, dw.data(), nullptr},
               B = {bias.data(), type_of<T>(), x.OC, 1, dbias.data(), nullptr};
        Weight frozen = W;
        frozen.grad = nullptr;
        linear_forward(out.data(), inp.data(), W, x.with_bias ? &B : nullptr,
                       x.with_residual ? residual.data() : nullptr, x.N, work.blas, Cpu{});
        linear_backward_input(dinp.data(), dout.data(), W, x.N, x.accumulate, work.blas, Cpu{});
        linear_backward_weight(W, x.with_bias ? &B : nullptr, dout.data(), inp.data(), x.N,
                               x.accumulate, work.blas, Cpu{});
        linear_backward_weight(frozen, nullptr, dout.data(), inp.data(), x.N, x.accumulate,
                               work.blas, Cpu{});
    }
};

inline LinearInputs linear_inputs(Check& c, size_t N, size_t OC, size_t IC, int variant) {
    auto some = [&](size_t n) { return rounded<bf16>(normals(c, n)); };
    return {N,
            OC,
            IC,
            some(N * IC),
            some(OC * IC),
            some(OC),
            some(N * OC),
            some(N * OC),
            bool(variant & 1),
            bool(variant & 2),
            bool(variant & 4)};
}

inline void linear_test(Check& c) {
    for (int variant = 0; variant < 10; variant++) {
        // the last two have rows enough that W is packed: for dx in float, then for all
        size_t N = variant == 8   ? odd(c, 128, 150)
                   : variant == 9 ? LINEAR_PACK_ROWS + odd(c, 0, 9)
                                  : odd(c, 1, 60);
        LinearInputs x = linear_inputs(c, N, odd(c, 1, 100), odd(c, 1, 100), variant);
        LinearRun<double> d(x);
        LinearRun<float> f(x);
        LinearRun<bf16> b(x);
        double add = x.accumulate ? 1 : 0;
        std::vector<double> out = product(x.inp, x.w, x.N, x.OC, x.IC, {x.IC, 1}, {1, x.IC}),
                            dinp = product(x.dout, x.w, x.N, x.IC, x.OC, {x.OC, 1}, {x.IC, 1}),
                            dw = product(x.dout, x.inp, x.OC, x.IC, x.N, {1, x.OC}, {x.IC, 1}),
                            dbias(x.OC);
        for (size_t i = 0; i < out.size(); i++) {
            out[i] += (x.with_bias ? x.bias[i % x.OC] : 0) + (x.with_residual ? x.residual[i] : 0);
            dbias[i % x.OC] += x.dout[i];
        }
        for (double& v : dinp) v += add;
        for (double& v : dw) v += add;
        for (double& v : dbias) v += add;
        close(c, "out double", d.out, out, 1e-13), close(c, "dinp double", d.dinp, dinp, 1e-13),
            close(c, "dw double", d.dw, dw, 1e-13);
        close(c, "out float", f.out, out, tolerance<float>(x.IC)),
            close(c, "out bf16", b.out, out, tolerance<bf16>(x.IC, 3));
        close(c, "dinp float", f.dinp, dinp, tolerance<float>(x.OC)),
            close(c, "dinp bf16", b.dinp, dinp, tolerance<bf16>(x.OC, 3));
        close(c, "dw float", f.dw, dw, tolerance<float>(x.N)),
            close(c, "dw bf16", b.dw, dw, tolerance<float>(x.N));
        if (!x.with_bias) dbias.assign(x.OC, 1); // nobody touched it
        close(c, "dbias float", f.dbias, dbias, tolerance<float>(x.N)),
            close(c, "dbias bf16", b.dbias, dbias, tolerance<float>(x.N));
    }
}

inline void linear_grad(Check& c) {
    for (int variant = 0; variant < 4; variant++) {
        LinearInputs x = linear_inputs(c, 5, 7, 6, variant);
        auto loss = [&] { return dot(LinearRun<double>(x).out, x.dout); };
        LinearRun<double> run(x);
        gradient(c, "inp", loss, x.inp, run.dinp);
        gradient(c, "weight", loss, x.w, run.dw);
        if (x.with_bias) gradient(c, "bias", loss, x.bias, run.dbias);
    }
}

template <typename T> void linear_rates(const Perf&, const char* type, double ceiling) {
    for (auto [N, OC, IC] : {std::tuple<size_t, size_t, size_t>{4096, 2304, 768},
                             {4096, 768, 768},
                             {4096, 3072, 768},
                             {4096, 768, 3072},
                             {1024, 50304, 768},
                             {256, 3072, 768}}) {
        std::vector<T> inp(N * IC, from_acc<T>(1)), w(OC * IC, from_acc<T>(1)),
            out(N * OC, from_acc<T>(1)), bias(OC);
        std::vector<float> dw(OC * IC), dbias(OC);
        Workspace work(linear_scratch_bytes<T>(N, OC, IC, Cpu{}));
        Weight W = {w.data(), type_of<T>(), OC, IC, dw.data(), nullptr},
               B = {bias.data(), type_of<T>(), OC, 1, dbias.data(), nullptr};
        char what[100];
        double flops = 2.0 * double(N * OC * IC);
        auto name = [&](const char* form) {
            snprintf(what, sizeof(what), "%s N %zu OC %zu IC %zu %s", type, N, OC, IC, form);
            return what;
        };
        product_rate(name("forward"), ceiling, flops, [&] {
            linear_forward(out.data(), inp.data(), W, &B, (const T*)nullptr, N, work.blas, Cpu{});
        });
        product_rate(name("backward_input"), ceiling, flops, [&] {
            linear_backward_input(inp.data(), out.data(), W, N, false, work.blas, Cpu{});
        });
        product_rate(name("backward_weight ="), ceiling, flops, [&] {
            linear_backward_weight(W, &B, out.data(), inp.data(), N, false, work.blas, Cpu{});
        });
        product_rate(name("backward_weight +="), ceiling, flops, [&] {
            linear_backward_weight(W, &B, out.data(), inp.data(), N, true, work.blas, Cpu{});
        });
    }
}
inline void linear_perf(Perf& p) {
    linear_rates<float>(p, "f32", p.product_f32), linear_rates<bf16>(p, "bf16", p.product_bf16);
}

// ----------------------------------------------------------------------------
// attention

// only what belongs to heads: the gaps between rows are nobody's
template <typename T>
std::vector<T> heads_of(const std::vector<T>& x, size_t rows, size_t stride, size_t width) {
    std::vector<T> y;
    for (size_t r = 0; r < rows; r++)
        y.insert(y.end(), x.begin() + long(r * stride), x.begin() + long(r * stride + width));
    return y;
}

inline void attention_compare(Check& c, const AttentionInputs& x) {
    const AttentionDims& d = x.d;
    AttentionRun<double> a(x);
    AttentionRun<float> f(x);
    AttentionRun<bf16> b(x);
    std::vector<double> lse, out = attention_naive(x, &lse);
    auto queries = [&](const auto& y) { return heads_of(y, d.B * d.Tq, d.q_stride, d.NH * d.HS); };
    auto keys = [&](const auto& y) { return heads_of(y, d.B * d.Tk, d.kv_stride, d.NKV * d.HS); };
    close(c, "out double", a.out, out, 1e-12), close(c, "lse double", a.lse, lse, 1e-12);
    size_t length =
        d.HS + d.Tk; // two sums after each other; p and ds are operands in T: two more roundings
    close(c, "out float", f.out, out, tolerance<float>(length)),
        close(c, "lse float", f.lse, lse, tolerance<float>(length));
    close(c, "out bf16", b.out, out, tolerance<bf16>(length, 2)),
        close(c, "lse bf16", b.lse, lse, tolerance<float>(length));
    // dS = P (dP - D) cancels where one key is seen: float's roundings of terms of size 1 stay
    double in_float = 8 * tolerance<float>(length), in_bf16 = tolerance<bf16>(length, 6);
    close(c, "dq float", queries(f.dq), queries(a.dq), in_float, 1);
    close(c, "dk float", keys(f.dk), keys(a.dk), in_float, 1);
    close(c, "dv float", keys(f.dv), keys(a.dv), in_float, 1);
    close(c, "dq bf16", queries(b.dq), queries(a.dq), in_bf16, 0.01);
    close(c, "dk bf16", keys(b.dk), keys(a.dk), in_bf16, 0.01);
    close(c, "dv bf16", keys(b.dv), keys(a.dv), in_bf16, 0.01);
}

// Bitwise: the same again, and the same by any number of threads.
template <typename T> void attention_bits(Check& c, const AttentionInputs& x) {
    auto same = [](const auto& a, const auto& b) {
        return !memcmp(a.data(), b.data(), a.size() * sizeof(a[0]));
    };
    auto all = [&](const AttentionRun<T>& a, const AttentionRun<T>& b) {
        return same(a.out, b.out) && same(a.lse, b.lse) && same(a.dq, b.dq) && same(a.dk, b.dk) &&
               same(a.dv, b.dv);
    };
    AttentionRun<T> first(x);
    expect(c, all(first, AttentionRun<T>(x)), "bits differ from run to run");
#ifdef _OPENMP
    int threads = omp_get_max_threads();
    for (int n : {1, 3}) {
        omp_set_num_threads(n);
        AttentionRun<T> again(x);
        omp_set_num_threads(threads);
        expect(c, all(first, again), "bits differ with other threads");
    }
#endif
}

// A NaN among the operands must reach the loss, not vanish as a row that sees nothing.
inline void attention_nan(Check& c) {
    AttentionInputs x = attention_inputs(c, 1, 9, 9, 1, 1, 16, 0, false);
    x.q[3 * x.d.q_stride] = NAN;
    AttentionRun<float> run(x);
    for (size_t i = 0; i < 9; i++)
        expect(c, std::isnan(run.out[i * 16]) == (i == 3), "a NaN's row");
    expect(c, std::isnan(run.dq[3 * x.d.q_stride]), "a NaN's gradient");
}

inline void attention_test(Check& c) {
    for (int kind = 0; kind < 4; kind++)
        for (bool alibi : {false, true}) {
            size_t NKV = odd(c, 1, 3), group = odd(c, 1, 3), Tq = odd(c, 1, 40);
            attention_compare(c, attention_inputs(c, odd(c, 1, 3), Tq, Tq + odd(c, 0, 30),
                                                  NKV * group, NKV, odd(c, 1, 40), kind, alibi));
        }
    for (int kind = 0; kind < 4; kind++)
        for (int window : {INT_MAX, 150, 7}) { // several blocks; a window skips blocks on the left
            AttentionInputs x =
                attention_inputs(c, 1, odd(c, 129, 300), 520, 2, 1, 16, kind, false);
            x.d.window = window;
            attention_compare(c, x);
        }
    attention_compare(c, attention_inputs(c, 1, 1, 1, 1, 1, 64, 0, false));
    attention_compare(c, attention_inputs(c, 1, 1, 300, 4, 2, 64, 2, false)); // decoding
    AttentionInputs blocks = attention_inputs(c, 2, 150, 300, 4, 2, 24, 2, true);
    attention_bits<float>(c, blocks), attention_bits<bf16>(c, blocks),
        attention_bits<double>(c, blocks);
    attention_nan(c);
    // slopes of 8 heads are 2^-1 .. 2^-8 (the paper), of 12 the same and then every second of 16
    // heads
    float s[12];
    alibi_slopes(s, 8);
    for (int h = 0; h < 8; h++)
        expect(c, s[h] == std::pow(2.0f, -float(h + 1)), "slopes of 8 heads");
    alibi_slopes(s, 12);
    for (int h = 0; h < 4; h++)
        expect(c, std::fabs(s[8 + h] - std::pow(2.0, -0.5 * (2 * h + 1))) < 1e-6,
               "slopes of 12 heads");
}

inline void attention_grad(Check& c) {
    for (int kind = 0; kind < 4; kind++)
        for (bool alibi : {false, true}) {
            AttentionInputs x = attention_inputs(c, 2, 5, 8, 4, kind % 2 ? 2 : 1, 3, kind, alibi);
            if (!alibi) x.d.window = 3;
            AttentionRun<double> run(x);
            auto loss = [&] { return dot(AttentionRun<double>(x).out, x.dout); };
            // the gaps between rows have no gradient: look at the heads
            auto check = [&](const char* what, std::vector<double>& operand,
                             const std::vector<double>& d, size_t rows, size_t stride,
                             size_t width) {
                std::vector<double> sub = heads_of(operand, rows, stride, width), gap = operand;
                auto spread = [&] {
                    for (size_t r = 0; r < rows; r++)
                        std::copy_n(sub.begin() + long(r * width), width,
                                    operand.begin() + long(r * stride));
                    return loss();
                };
                gradient(c, what, spread, sub, heads_of(d, rows, stride, width));
                operand = gap;
            };
            check("q", x.q, run.dq, x.d.B * x.d.Tq, x.d.q_stride, x.d.NH * x.d.HS);
            check("k", x.k, run.dk, x.d.B * x.d.Tk, x.d.kv_stride, x.d.NKV * x.d.HS);
            check("v", x.v, run.dv, x.d.B * x.d.Tk, x.d.kv_stride, x.d.NKV * x.d.HS);
        }
}

template <typename T> void attention_rates(const char* type, double ceiling) {
    size_t B = 4, T_ = 1024, NH = 12, HS = 64, stride = 3 * NH * HS;
    AttentionDims d = {B, T_, T_, NH, NH, HS, stride, stride};
    std::vector<T> qkv(B * T_ * stride, from_acc<T>(0.1f)), dqkv(qkv.size()), out(B * T_ * NH * HS),
        dout(out.size(), from_acc<T>(0.1f));
    std::vector<float> lse(B * NH * T_);
    std::vector<int> positions(B * T_), starts(B * T_);
    for (size_t i = 0; i < B * T_; i++) positions[i] = int(i % T_);
    Workspace work(attention_scratch_bytes<T>(d, threads_here(Cpu{}), Cpu{}));
    const T *q = qkv.data(), *k = q + NH * HS, *v = k + NH * HS;
    double flops = 4.0 * double(B * NH * HS) * double(T_) * double(T_) / 2;
    std::string name = type;
    product_rate((name + " forward (4,1024,12,64), causal").c_str(), ceiling, flops, [&] {
        attention_forward(out.data(), lse.data(), q, k, v, positions.data(), positions.data(),
                          starts.data(), nullptr, d, work.blas, Cpu{});
    });
    product_rate((name + " backward").c_str(), ceiling, 2.5 * flops, [&] {
        attention_backward(dqkv.data(), dqkv.data() + NH * HS, dqkv.data() + 2 * NH * HS,
                           dout.data(), out.data(), lse.data(), q, k, v, positions.data(),
                           positions.data(), starts.data(), nullptr, d, work.blas, Cpu{});
    });
}
inline void attention_perf(Perf& p) {
    attention_rates<float>("f32", p.product_f32), attention_rates<bf16>("bf16", p.product_bf16);
}

// ----------------------------------------------------------------------------

inline void add_product_rows(std::vector<Row>& rows) {
    rows.push_back({"matmul", matmul_test, nullptr, nullptr});
    rows.push_back({"linear", linear_test, linear_grad, linear_perf});
    rows.push_back({"attention", attention_test, attention_grad, attention_perf});
}
