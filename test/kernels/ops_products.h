// ops_products.h - rows of the op table: matrix products, the linear layer, attention
//   The reference is written here, naively, in double. oneDNN and our own loops must both agree.
#pragma once
#include "../../llmc/ops/linear.cuh"
#include "attention_inputs.h"

using namespace llmc;

// ----------------------------------------------------------------------------
// products: oneDNN, and our loops

// Every transposition, with and without a bias, a residual, and the output's old value.
template <typename T> void matmul_type_test(Check& c, size_t M, size_t K) {
    size_t N = odd(c, 1, 150);
    std::vector<double> a = rounded<T>(normals(c, M * K)), b = rounded<T>(normals(c, K * N));
    std::vector<double> bias = rounded<T>(normals(c, N)), r = rounded<T>(normals(c, M * N));
    std::vector<T> A = as<T>(a), B = as<T>(b), Bias = as<T>(bias), R = as<T>(r);
    for (bool ta : {false, true})
        for (bool tb : {false, true})
            for (int extra = 0; extra < 8; extra++) {
                bool with_bias = extra & 1, with_residual = extra & 2, accumulate = extra & 4;
                Strides sa = ta ? Strides{1, M} : Strides{K, 1};
                Strides sb = tb ? Strides{1, K} : Strides{N, 1};
                Product p = {M, N, K, sa, sb, N, accumulate};

                // Want: product() plus what is added. `out` starts as 2.
                std::vector<double> want = product(a, b, M, N, K, sa, sb);
                for (size_t i = 0; i < M; i++)
                    for (size_t j = 0; j < N; j++)
                        want[i * N + j] += (with_bias ? bias[j] : 0) +
                                           (with_residual ? r[i * N + j] : 0) +
                                           (accumulate ? 2 : 0);

                int threads = threads_here(Cpu{});
                Workspace w(matmul_scratch_bytes(p, type_of<T>(), type_of<T>(), with_bias,
                                                 with_residual, threads) +
                            matmul_plain_scratch_bytes(M, sizeof(acc_t<T>), threads));
                const T* bias_or_null = with_bias ? Bias.data() : nullptr;
                const T* residual_or_null = with_residual ? R.data() : nullptr;
                std::vector<T> out(M * N, from_acc<T>(2)), own(M * N, from_acc<T>(2));
                matmul(out.data(), A.data(), B.data(), bias_or_null, residual_or_null, p, w.blas,
                       Cpu{});
                matmul_plain(own.data(), A.data(), B.data(), bias_or_null, residual_or_null, p,
                             w.blas.scratch);

                // oneDNN's sum post-op may round the product to bf16 before it adds. Errors
                // are relative to terms of size 1, since one element may be the small
                // remainder of such terms.
                close(c, "product", out, want, tolerance<T>(K, 3), 1);
                close(c, "own loops", own, want, tolerance<T>(K), 1);
            }
}

// The same product, with b copied to the scratch in another layout first.
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
            close(c, "packed", out, want, tolerance<T>(K, 3), 1);
        }
}

// The scratch that a plan counts for a product is what oneDNN takes, whatever number of threads it
// was asked for before.
inline void matmul_scratch_test(Check& c) {
#if defined(_OPENMP) && defined(WITH_ONEDNN)
    size_t M = 128, N = 24, K = 128;
    Product p = {M, N, K, {1, M}, {N, 1}, N, true};
    int threads = omp_get_max_threads();
    Type in = onednn_takes(Type::BF16, K) ? Type::BF16 : Type::F32;
    for (int n : {1, 3, threads}) {
        omp_set_num_threads(n);
        size_t counted = matmul_scratch_bytes(p, in, Type::F32, false, false, 1);
        Blas blas;
        const MadeProduct& made = find_product(blas, 0, p, in, Type::F32, false, false);
        size_t taken = made.scratch_bytes + made.packed_bytes;
        omp_set_num_threads(threads);
        expect(c, counted == taken, "the scratch of another number of threads");
    }
#else
    (void)c;
#endif
}

// Our own loops give the same bits with any number of threads.
template <typename T> void matmul_bits(Check& c) {
#ifdef _OPENMP
    size_t M = odd(c, 1, 70), N = odd(c, 200, 400), K = odd(c, 1, 90);
    std::vector<T> a = as<T>(normals(c, M * K)), b = as<T>(normals(c, K * N));
    std::vector<T> first(M * N), again(M * N);
    Product p = {M, N, K, {K, 1}, {N, 1}, N};
    Workspace w(matmul_plain_scratch_bytes(M, sizeof(acc_t<T>), std::max(3, threads_here(Cpu{}))));
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
    for (int i = 0; i < 3; i++) {
        matmul_type_test<float>(c, odd(c, 1, 70), odd(c, 1, 90));
        matmul_type_test<bf16>(c, odd(c, 1, 70), odd(c, 1, 90));
        matmul_type_test<bf16>(c, 57, 63); // oneDNN's own bug on AMX: onednn_takes()
        matmul_type_test<double>(c, odd(c, 1, 70), odd(c, 1, 90));
        matmul_packed_test<float>(c);
        matmul_packed_test<bf16>(c);
    }
    matmul_type_test<bf16>(c, BLOCK_M + odd(c, 1, 40), BLOCK_K + odd(c, 1, 40));
    matmul_scratch_test(c);
    matmul_bits<float>(c);
    matmul_bits<bf16>(c);
    matmul_bits<double>(c);
}

// ----------------------------------------------------------------------------
// linear

// One linear layer, and which of its options are in use.
struct LinearInputs {
    size_t N, OC, IC;
    std::vector<double> inp, w, bias, residual, dout;
    bool with_bias, with_residual, accumulate;
};

// The layer forward and backward in T; gradients start as 1. A frozen matrix gets no gradient.
template <typename T> struct LinearRun {
    std::vector<T> out, dinp;
    std::vector<acc_t<T>> dw, dbias;
    explicit LinearRun(const LinearInputs& x)
        : out(x.N * x.OC), dinp(x.N * x.IC, from_acc<T>(1)), dw(x.OC * x.IC, 1), dbias(x.OC, 1) {
        std::vector<T> inp = as<T>(x.inp), w = as<T>(x.w), bias = as<T>(x.bias);
        std::vector<T> residual = as<T>(x.residual), dout = as<T>(x.dout);
        Workspace work(linear_scratch_bytes<T>(x.N, x.OC, x.IC, Cpu{}));
        Weight W = {w.data(), type_of<T>(), x.OC, x.IC, dw.data(), nullptr};
        Weight B = {bias.data(), type_of<T>(), x.OC, 1, dbias.data(), nullptr};
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
    return {N, OC, IC, some(N * IC), some(OC * IC), some(OC), some(N * OC), some(N * OC),
            bool(variant & 1), bool(variant & 2), bool(variant & 4)};
}

inline void linear_test(Check& c) {
    for (int variant = 0; variant < 10; variant++) {
        // Variants 8 and 9 have enough rows that W is packed: for dx in float, then for everything.
        size_t N = odd(c, 1, 60);
        if (variant == 8) N = odd(c, 128, 150);
        if (variant == 9) N = LINEAR_PACK_ROWS + odd(c, 0, 9);
        LinearInputs x = linear_inputs(c, N, odd(c, 1, 100), odd(c, 1, 100), variant);
        LinearRun<double> d(x);
        LinearRun<float> f(x);
        LinearRun<bf16> b(x);

        // Want: product() plus what is added. Gradients start as 1.
        double add = x.accumulate ? 1 : 0;
        std::vector<double> out, dinp, dw, dbias(x.OC);
        out = product(x.inp, x.w, x.N, x.OC, x.IC, {x.IC, 1}, {1, x.IC});
        dinp = product(x.dout, x.w, x.N, x.IC, x.OC, {x.OC, 1}, {x.IC, 1});
        dw = product(x.dout, x.inp, x.OC, x.IC, x.N, {1, x.OC}, {x.IC, 1});
        for (size_t i = 0; i < out.size(); i++) {
            out[i] += (x.with_bias ? x.bias[i % x.OC] : 0) + (x.with_residual ? x.residual[i] : 0);
            dbias[i % x.OC] += x.dout[i];
        }
        for (double& v : dinp) v += add;
        for (double& v : dw) v += add;
        for (double& v : dbias) v += add;

        close(c, "out double", d.out, out, 1e-13);
        close(c, "dinp double", d.dinp, dinp, 1e-13);
        close(c, "dw double", d.dw, dw, 1e-13);
        close(c, "out float", f.out, out, tolerance<float>(x.IC), 1);
        close(c, "out bf16", b.out, out, tolerance<bf16>(x.IC, 3), 1);
        close(c, "dinp float", f.dinp, dinp, tolerance<float>(x.OC), 1);
        close(c, "dinp bf16", b.dinp, dinp, tolerance<bf16>(x.OC, 3), 1);
        close(c, "dw float", f.dw, dw, tolerance<float>(x.N), 1);
        close(c, "dw bf16", b.dw, dw, tolerance<float>(x.N), 1);
        if (!x.with_bias) dbias.assign(x.OC, 1); // untouched

        close(c, "dbias float", f.dbias, dbias, tolerance<float>(x.N), 1);
        close(c, "dbias bf16", b.dbias, dbias, tolerance<float>(x.N), 1);
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

// GPT-2's layers at 4096 rows, its head at 1024, and one layer at 256.
template <typename T> void linear_rates(const Perf&, const char* type, double ceiling) {
    for (auto [N, OC, IC] : {std::tuple<size_t, size_t, size_t>{4096, 2304, 768},
                             {4096, 768, 768},
                             {4096, 3072, 768},
                             {4096, 768, 3072},
                             {1024, 50304, 768},
                             {256, 3072, 768}}) {
        T one = from_acc<T>(1);
        std::vector<T> inp(N * IC, one), w(OC * IC, one), out(N * OC, one), bias(OC);
        std::vector<float> dw(OC * IC), dbias(OC);
        Workspace work(linear_scratch_bytes<T>(N, OC, IC, Cpu{}));
        Weight W = {w.data(), type_of<T>(), OC, IC, dw.data(), nullptr};
        Weight B = {bias.data(), type_of<T>(), OC, 1, dbias.data(), nullptr};

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
    linear_rates<float>(p, "f32", p.product_f32);
    linear_rates<bf16>(p, "bf16", p.product_bf16);
}

// ----------------------------------------------------------------------------
// lora: a frozen matrix and an adapter are one matrix, W + s B A

// A frozen layer with an adapter of some rank.
struct LoraInputs {
    size_t N, OC, IC, rank;
    std::vector<double> inp, w, a, b, dout;
    double scale;
    bool accumulate;
};

// The layer forward and backward in T; the adapter's gradients start as 1.
template <typename T> struct LoraRun {
    std::vector<T> out, dinp;
    std::vector<acc_t<T>> da, db;
    explicit LoraRun(const LoraInputs& x)
        : out(x.N * x.OC), dinp(x.N * x.IC), da(x.rank * x.IC, 1), db(x.OC * x.rank, 1) {
        std::vector<T> inp = as<T>(x.inp), w = as<T>(x.w), a = as<T>(x.a), b = as<T>(x.b);
        std::vector<T> dout = as<T>(x.dout), room(x.N * x.rank);
        Workspace work(std::max(linear_scratch_bytes<T>(x.N, x.OC, x.IC, Cpu{}),
                                lora_scratch_bytes<T>(x.N, x.OC, x.IC, x.rank, Cpu{})));
        work.blas.room = room.data();

        Lora lora = {a.data(), b.data(), da.data(), db.data(), x.rank, x.scale};
        Weight W = {w.data(), type_of<T>(), x.OC, x.IC};
        W.lora = &lora;
        const T* no_residual = nullptr;
        linear_forward(out.data(), inp.data(), W, nullptr, no_residual, x.N, work.blas, Cpu{});
        linear_backward_input(dinp.data(), dout.data(), W, x.N, false, work.blas, Cpu{});
        linear_backward_weight(W, nullptr, dout.data(), inp.data(), x.N, x.accumulate, work.blas,
                               Cpu{});
    }
};

inline LoraInputs lora_inputs(Check& c, size_t N, size_t OC, size_t IC, size_t rank, int variant) {
    auto some = [&](size_t n) { return rounded<bf16>(normals(c, n)); };
    const double scales[] = {1, 2, 0.75};
    return {N, OC, IC, rank, some(N * IC), some(OC * IC), some(rank * IC), some(OC * rank),
            some(N * OC), scales[variant % 3], bool(variant & 1)};
}

inline void lora_test(Check& c) {
    for (int variant = 0; variant < 6; variant++) {
        LoraInputs x = lora_inputs(c, odd(c, 1, 60), odd(c, 1, 70), odd(c, 1, 70), odd(c, 1, 20),
                                   variant);
        LoraRun<double> d(x);
        LoraRun<float> f(x);
        LoraRun<bf16> b(x);

        // Want: the one matrix W + s B A, and from its gradient those of the
        // parts, which start as 1.
        std::vector<double> w = product(x.b, x.a, x.OC, x.IC, x.rank, {x.rank, 1}, {x.IC, 1});
        for (size_t i = 0; i < w.size(); i++) w[i] = x.w[i] + x.scale * w[i];
        auto out = product(x.inp, w, x.N, x.OC, x.IC, {x.IC, 1}, {1, x.IC});
        auto dinp = product(x.dout, w, x.N, x.IC, x.OC, {x.OC, 1}, {x.IC, 1});
        auto dw = product(x.dout, x.inp, x.OC, x.IC, x.N, {1, x.OC}, {x.IC, 1});
        auto da = product(x.b, dw, x.rank, x.IC, x.OC, {1, x.rank}, {x.IC, 1});
        auto db = product(dw, x.a, x.OC, x.rank, x.IC, {x.IC, 1}, {1, x.IC});
        for (auto* g : {&da, &db})
            for (double& v : *g) v = x.scale * v + (x.accumulate ? 1 : 0);

        close(c, "out double", d.out, out, 1e-12);
        close(c, "dinp double", d.dinp, dinp, 1e-12);
        close(c, "dA double", d.da, da, 1e-12);
        close(c, "dB double", d.db, db, 1e-12);

        // In bf16 the matrices of r columns are rounded as well, twice where they are
        // scaled. Their numbers have the size sqrt(IC), and an output sums r of them: errors
        // are relative to that.
        double r = double(x.rank), terms = r * std::sqrt(double(std::max(x.IC, x.OC)));
        close(c, "out float", f.out, out, tolerance<float>(x.IC + x.rank), terms);
        close(c, "out bf16", b.out, out, tolerance<bf16>(x.IC + x.rank, 3), terms);
        close(c, "dinp bf16", b.dinp, dinp, tolerance<bf16>(x.OC + x.rank, 3), terms);
        close(c, "dA float", f.da, da, tolerance<float>(x.N + x.OC), terms);
        close(c, "dA bf16", b.da, da, tolerance<bf16>(x.N + x.OC, 3), terms);
        close(c, "dB bf16", b.db, db, tolerance<bf16>(x.N + x.IC, 3), terms);
    }
}

inline void lora_grad(Check& c) {
    LoraInputs x = lora_inputs(c, 5, 7, 6, 3, 2);
    auto loss = [&] { return dot(LoraRun<double>(x).out, x.dout); };
    LoraRun<double> run(x);
    gradient(c, "inp", loss, x.inp, run.dinp);
    gradient(c, "A", loss, x.a, run.da);
    gradient(c, "B", loss, x.b, run.db);
}

// An adapter of rank 16 beside GPT-2's feed-forward layer.
inline void lora_perf(Perf& p) {
    size_t N = 4096, OC = 3072, IC = 768, r = 16;
    std::vector<float> inp(N * IC, 1), out(N * OC, 1), a(r * IC, 1), b(OC * r, 1), room(N * r);
    Workspace work(lora_scratch_bytes<float>(N, OC, IC, r, Cpu{}));
    Lora lora = {a.data(), b.data(), nullptr, nullptr, r, 2};
    double flops = 2.0 * double(N * r * (IC + OC));
    product_rate("forward f32, rank 16", p.product_f32, flops, [&] {
        lora_forward(out.data(), inp.data(), lora, room.data(), N, OC, IC, work.blas, Cpu{});
    });
}

// ----------------------------------------------------------------------------
// attention

// The tiled version in double, float and bf16 against the definition in double.
inline void attention_compare(Check& c, const AttentionInputs& x) {
    const AttentionDims& d = x.d;
    auto want = attention_reference<double>(x), a = attention_in_tiles<double>(x);
    auto f = attention_in_tiles<float>(x);
    auto b = attention_in_tiles<bf16>(x);

    // An output is two sums, one after the other. Their operands p and ds are rounded to T, which
    // adds two roundings. The terms have size 1; one query or one key may leave next to nothing of
    // them, so errors are relative to 1.
    size_t length = d.HS + d.Tk;
    close(c, "out double", a.out, want.out, 1e-12);
    close(c, "lse double", a.lse, want.lse, 1e-12);
    close(c, "out float", f.out, want.out, tolerance<float>(length), 1);
    close(c, "lse float", f.lse, want.lse, tolerance<float>(length), 1);
    close(c, "out bf16", b.out, want.out, tolerance<bf16>(length, 2), 1);
    close(c, "lse bf16", b.lse, want.lse, tolerance<float>(length), 1);

    // dS = P (dP - D) cancels where a query sees one key: roundings of its terms remain.
    double in_float = 8 * tolerance<float>(length), in_bf16 = tolerance<bf16>(length, 6);
    auto dq = query_heads(want.dq, d), dk = key_heads(want.dk, d), dv = value_heads(want.dv, d);
    close(c, "dq double", query_heads(a.dq, d), dq, 1e-12, 1);
    close(c, "dk double", key_heads(a.dk, d), dk, 1e-12, 1);
    close(c, "dv double", value_heads(a.dv, d), dv, 1e-12, 1);
    close(c, "dq float", query_heads(f.dq, d), dq, in_float, 1);
    close(c, "dk float", key_heads(f.dk, d), dk, in_float, 1);
    close(c, "dv float", value_heads(f.dv, d), dv, in_float, 1);
    close(c, "dq bf16", query_heads(b.dq, d), dq, in_bf16, 1);
    close(c, "dk bf16", key_heads(b.dk, d), dk, in_bf16, 1);
    close(c, "dv bf16", value_heads(b.dv, d), dv, in_bf16, 1);
}

// The same bits when run again, and with any number of threads.
template <typename T> void attention_bits(Check& c, const AttentionInputs& x) {
    auto same = [](const auto& a, const auto& b) {
        return !memcmp(a.data(), b.data(), a.size() * sizeof(a[0]));
    };
    auto all = [&](const AttentionRun<T>& a, const AttentionRun<T>& b) {
        return same(a.out, b.out) && same(a.lse, b.lse) && same(a.dq, b.dq) && same(a.dk, b.dk) &&
               same(a.dv, b.dv);
    };

    AttentionRun<T> first = attention_in_tiles<T>(x);
    expect(c, all(first, attention_in_tiles<T>(x)), "bits differ from run to run");
#ifdef _OPENMP
    int threads = omp_get_max_threads();
    for (int n : {1, 3}) {
        omp_set_num_threads(n);
        AttentionRun<T> again = attention_in_tiles<T>(x);
        omp_set_num_threads(threads);
        expect(c, all(first, again), "bits differ with other threads");
    }
#endif
}

// A NaN in an operand must reach the loss. It must not vanish as a row that sees nothing does.
inline void attention_nan(Check& c) {
    AttentionInputs x = attention_inputs(c, 1, 9, 9, 1, 1, 16, 0, false);
    x.q[3 * x.d.q_stride] = NAN;
    AttentionRun<float> run = attention_in_tiles<float>(x);
    for (size_t i = 0; i < 9; i++)
        expect(c, std::isnan(run.out[i * 16]) == (i == 3), "a NaN's row");
    expect(c, std::isnan(run.dq[3 * x.d.q_stride]), "a NaN's gradient");
}

// ----------------------------------------------------------------------------
// attention: layers that are not the usual

// Inputs with a soft cap, a scale, values of another width than keys, and a window.
inline AttentionInputs unusual_inputs(Check& c, size_t Tq, size_t Tk, int kind, bool alibi) {
    AttentionInputs x = attention_inputs(c, 2, Tq, Tk, 4, 2, 6, kind, alibi, 10);
    x.softcap = 3;
    x.scale = 0.7;
    x.d.window = 7;
    return x;
}

// Two keys by hand: s = 3 tanh(0.7 q.k / 3) - distance / 2.
inline void attention_known(Check& c) {
    AttentionInputs x;
    x.d = completed({1, 1, 2, 1, 1, 1, 1, 1});
    x.q = {2};
    x.k = {1.5, -1};
    x.v = {10, 20};
    x.dout = {1};
    x.q_positions = {1};
    x.k_positions = {0, 1};
    x.doc_start = {0};
    x.slopes = {0.5};
    x.scale = 0.7;
    x.softcap = 3;

    double s0 = 3 * std::tanh(0.7 * 3 / 3) - 0.5, s1 = 3 * std::tanh(0.7 * -2 / 3);
    double p0 = 1 / (1 + std::exp(s1 - s0));
    AttentionRun<double> run = attention_reference<double>(x);
    close(c, "known out", run.out, {10 * p0 + 20 * (1 - p0)}, 1e-14);
    close(c, "known lse", run.lse, {std::log(std::exp(s0) + std::exp(s1))}, 1e-14);
}

// Results in float from a bf16 layer, and gradients that are added to what was there.
inline void attention_into_float(Check& c, const AttentionInputs& in) {
    const AttentionDims& d = in.d;
    auto want = attention_reference<double>(in);
    AttentionRun<bf16, float, float> run(in);
    AttentionRun<bf16> narrow(in);
    Workspace work(attention_scratch_bytes<bf16>(d, threads_here(Cpu{}), Cpu{}));
    attention_forward(run.out.data(), run.lse.data(), run.x, work.blas, Cpu{});
    attention_forward(narrow.out.data(), narrow.lse.data(), narrow.x, work.blas, Cpu{});
    close(c, "out in float", run.out, want.out, tolerance<bf16>(d.HS + d.Tk, 1), 1);

    // Gradients start at 3. Subtract it again before the comparison.
    run.x.accumulate = true;
    for (auto* gradient : {&run.dq, &run.dk, &run.dv})
        std::fill(gradient->begin(), gradient->end(), 3.0f);
    attention_backward(run.dq.data(), run.dk.data(), run.dv.data(), narrow.out.data(),
                       run.lse.data(), run.x, work.blas, Cpu{});
    auto close_to_sum = [&](const char* what, std::vector<double> got,
                            const std::vector<double>& gradient) {
        for (double& g : got) g -= 3;
        close(c, what, got, gradient, tolerance<bf16>(d.HS + d.Tk, 6), 1);
    };
    close_to_sum("dq += in float", query_heads(run.dq, d), query_heads(want.dq, d));
    close_to_sum("dk += in float", key_heads(run.dk, d), key_heads(want.dk, d));
    close_to_sum("dv += in float", value_heads(run.dv, d), value_heads(want.dv, d));
}

// ----------------------------------------------------------------------------
// attention: partial results over blocks of keys

// The same operands with the keys [from, to) only. `positions` receives those keys' positions, with
// shape (B, to - from).
inline AttentionOperands<double> keys_between(AttentionOperands<double> x, size_t from, size_t to,
                                              std::vector<int>& positions) {
    size_t Tk = x.d.Tk;
    for (size_t b = 0; b < x.d.B; b++)
        positions.insert(positions.end(), x.k_positions + b * Tk + from,
                         x.k_positions + b * Tk + to);
    x.d.Tk = to - from; // the strides between sequences stay
    x.k += from * x.d.k_stride;
    x.v += from * x.d.v_stride;
    x.k_positions = positions.data();
    return x;
}

// Two or three blocks merged are the whole, up to rounding: a sum of Tk terms in another order,
// about 16 operations for each block merged, and exponentials whose arguments are off by |s| units.
inline void attention_merge_test(Check& c, const AttentionInputs& in, size_t blocks) {
    auto whole = attention_reference<double>(in);
    const AttentionDims& d = in.d;
    std::vector<double> out(whole.out.size()), lse(whole.lse.size(), -INFINITY);
    for (size_t block = 0; block < blocks; block++) {
        std::vector<int> positions;
        AttentionOperands<double> x = keys_between(whole.x, d.Tk * block / blocks,
                                                   d.Tk * (block + 1) / blocks, positions);
        std::vector<double> part(out.size()), part_lse(lse.size());
        attention_forward_reference(part.data(), part_lse.data(), x);

        // A row that saw nothing in this block may hold anything. Here it holds NaN.
        for (size_t row = 0; row < d.B * d.Tq * d.NH; row++) {
            size_t h = row % d.NH, t = row / d.NH;
            if (part_lse[(t / d.Tq * d.NH + h) * d.Tq + t % d.Tq] == -INFINITY)
                std::fill_n(part.begin() + long(row * d.HS_v), d.HS_v, NAN);
        }
        attention_merge(out.data(), lse.data(), part.data(), part_lse.data(), d.B, d.Tq, d.NH,
                        d.HS_v, Cpu{});
    }

    double most = 1;
    for (double y : whole.lse) most = std::max(most, std::isfinite(y) ? std::fabs(y) : 0);
    double rounding = (double(d.Tk) + 16 * double(blocks) + 4 * most) * 1.2e-16;
    close(c, "merged out", out, whole.out, rounding);
    close(c, "merged lse", lse, whole.lse, rounding);
}

// A part that saw nothing changes no bit. A part that is merged into nothing is
// taken over bit for bit.
inline void attention_merge_bits(Check& c) {
    std::vector<double> out = normals(c, 8), other = normals(c, 8), unseen(8);
    std::vector<double> lse = {0.3, -2}, none = {-INFINITY, -INFINITY};
    std::vector<double> a = out, a_lse = lse, b = unseen, b_lse = none;
    attention_merge(a.data(), a_lse.data(), other.data(), none.data(), 1, 2, 1, 4, Cpu{});
    attention_merge(b.data(), b_lse.data(), out.data(), lse.data(), 1, 2, 1, 4, Cpu{});
    expect(c, a == out && a_lse == lse, "a part that saw nothing changes the result");
    expect(c, b == out && b_lse == lse, "a first part is not taken over");
    attention_merge(unseen.data(), none.data(), unseen.data(), none.data(), 1, 2, 1, 4, Cpu{});
    expect(c, unseen == std::vector<double>(8) && none[0] == -INFINITY, "nothing and nothing");
}

inline void attention_test(Check& c) {
    // Small shapes under every mask.
    for (int kind = 0; kind < 4; kind++)
        for (bool alibi : {false, true}) {
            size_t NKV = odd(c, 1, 3), group = odd(c, 1, 3), Tq = odd(c, 1, 40);
            attention_compare(c, attention_inputs(c, odd(c, 1, 3), Tq, Tq + odd(c, 0, 30),
                                                  NKV * group, NKV, odd(c, 1, 40), kind, alibi));
        }

    // Several blocks; a window skips blocks on the left.
    for (int kind = 0; kind < 4; kind++)
        for (int window : {INT_MAX, 150, 7}) {
            AttentionInputs x =
                attention_inputs(c, 1, odd(c, 129, 300), 520, 2, 1, 16, kind, false);
            x.d.window = window;
            attention_compare(c, x);
        }

    // One query: a first token, and decoding.
    attention_compare(c, attention_inputs(c, 1, 1, 1, 1, 1, 64, 0, false));
    attention_compare(c, attention_inputs(c, 1, 1, 300, 4, 2, 64, 2, false));

    // Bits, and NaN.
    AttentionInputs blocks = attention_inputs(c, 2, 150, 300, 4, 2, 24, 2, true);
    attention_bits<float>(c, blocks);
    attention_bits<bf16>(c, blocks);
    attention_bits<double>(c, blocks);
    attention_nan(c);

    // Shapes that tiles do not take, and partial results as other techniques ask for them.
    attention_known(c);
    for (int kind = 0; kind < 4; kind++) {
        AttentionInputs x = unusual_inputs(c, 9, 30, kind, kind % 2);
        attention_compare(c, x);
        attention_into_float(c, x);
        attention_into_float(c, attention_inputs(c, 2, 140, 150, 2, 1, 24, kind, false));
        for (size_t parts : {2, 3}) {
            attention_merge_test(c, x, parts);
            attention_merge_test(c, attention_inputs(c, 2, 20, 41, 4, 2, 8, kind, true), parts);
        }
    }
    attention_merge_bits(c);

    // The slopes of 8 heads are 2^-1 .. 2^-8, as in the paper. 12 heads add every
    // second slope of 16 heads.
    float s[12];
    alibi_slopes(s, 8);
    for (int h = 0; h < 8; h++)
        expect(c, s[h] == std::pow(2.0f, -float(h + 1)), "slopes of 8 heads");
    alibi_slopes(s, 12);
    for (int h = 0; h < 4; h++)
        expect(c, std::fabs(s[8 + h] - std::pow(2.0, -0.5 * (2 * h + 1))) < 1e-6,
               "slopes of 12 heads");
}

// Check dq, dk and dv of a version against finite differences of its output. The gaps between rows
// have no gradient, so only the heads are moved.
inline void attention_gradients(Check& c, AttentionInputs& x,
                                AttentionRun<double> (*version)(const AttentionInputs&)) {
    const AttentionDims& d = x.d;
    AttentionRun<double> run = version(x);

    // Move the heads of one operand, and put the operand back.
    auto check = [&](const char* what, std::vector<double>& operand, const std::vector<double>& dx,
                     size_t n, size_t batch, size_t stride, size_t width) {
        std::vector<double> heads = heads_of(operand, d.B, n, batch, stride, width), all = operand;
        auto loss = [&] {
            for (size_t row = 0; row < d.B * n; row++)
                std::copy_n(heads.begin() + long(row * width), width,
                            operand.begin() + long(row / n * batch + row % n * stride));
            return dot(version(x).out, x.dout);
        };
        gradient(c, what, loss, heads, heads_of(dx, d.B, n, batch, stride, width));
        operand = all;
    };

    check("q", x.q, run.dq, d.Tq, d.q_batch, d.q_stride, d.NH * d.HS);
    check("k", x.k, run.dk, d.Tk, d.k_batch, d.k_stride, d.NKV * d.HS);
    check("v", x.v, run.dv, d.Tk, d.v_batch, d.v_stride, d.NKV * d.HS_v);
}

inline void attention_grad(Check& c) {
    for (int kind = 0; kind < 4; kind++)
        for (bool alibi : {false, true}) {
            AttentionInputs x = attention_inputs(c, 2, 5, 8, 4, kind % 2 ? 2 : 1, 3, kind, alibi);
            if (!alibi) x.d.window = 3;
            attention_gradients(c, x, attention_in_tiles<double>);
            AttentionInputs unusual = unusual_inputs(c, 5, 8, kind, alibi);
            attention_gradients(c, unusual, attention_reference<double>);
        }
}

// GPT-2's layer at B = 4, T = 1024. A causal mask halves the FLOPs.
template <typename T> void attention_rates(const char* type, double ceiling) {
    // GPT-2's q, k and v side by side in a row.
    size_t B = 4, seq = 1024, NH = 12, HS = 64, stride = 3 * NH * HS;
    std::vector<T> qkv(B * seq * stride, from_acc<T>(0.1f)), dqkv(qkv.size());
    std::vector<T> out(B * seq * NH * HS), dout(out.size(), from_acc<T>(0.1f));
    std::vector<float> lse(B * NH * seq);
    std::vector<int> positions(B * seq), starts(B * seq);
    for (size_t i = 0; i < B * seq; i++) positions[i] = int(i % seq);
    AttentionOperands<T> x;
    x.d = {B, seq, seq, NH, NH, HS, stride, stride};
    x.q = qkv.data();
    x.k = x.q + NH * HS;
    x.v = x.k + NH * HS;
    x.dout = dout.data();
    x.q_positions = x.k_positions = positions.data();
    x.doc_start = starts.data();

    Workspace work(attention_scratch_bytes<T>(x.d, threads_here(Cpu{}), Cpu{}));
    double flops = 4.0 * double(B * NH * HS) * double(seq) * double(seq) / 2;
    std::string name = type;
    product_rate((name + " forward (4,1024,12,64), causal").c_str(), ceiling, flops,
                 [&] { attention_forward(out.data(), lse.data(), x, work.blas, Cpu{}); });
    product_rate((name + " backward").c_str(), ceiling, 2.5 * flops, [&] {
        attention_backward(dqkv.data(), dqkv.data() + NH * HS, dqkv.data() + 2 * NH * HS,
                           out.data(), lse.data(), x, work.blas, Cpu{});
    });
}
inline void attention_perf(Perf& p) {
    attention_rates<float>("f32", p.product_f32);
    attention_rates<bf16>("bf16", p.product_bf16);
}

// ----------------------------------------------------------------------------

inline void add_product_rows(std::vector<Row>& rows) {
    rows.push_back({"matmul", matmul_test, nullptr, nullptr});
    rows.push_back({"linear", linear_test, linear_grad, linear_perf});
    rows.push_back({"lora", lora_test, lora_grad, lora_perf});
    rows.push_back({"attention", attention_test, attention_grad, attention_perf});
}
