// ops_simple.h - rows of the op table: embedding, norms, RoPE, activations, loss, optimizer
#pragma once
#include "../../llmc/ops/adamw_formats.cuh"
#include "../../llmc/ops/crossentropy.cuh"
#include "../../llmc/ops/ema.cuh"
#include "../../llmc/ops/embedding.cuh"
#include "../../llmc/ops/fp8_sent.cuh"
#include "../../llmc/ops/gelu.cuh"
#include "../../llmc/ops/grad_norm.cuh"
#include "../../llmc/ops/layernorm.cuh"
#include "../../llmc/ops/linear.cuh"
#include "../../llmc/ops/objective.cuh"
#include "../../llmc/ops/rmsnorm.cuh"
#include "../../llmc/ops/rope.cuh"
#include "../../llmc/ops/swiglu.cuh"
#include "../harness/op_table.h"

using namespace llmc;

constexpr Cpu CPU = {};
typedef std::vector<double> Doubles;

// ----------------------------------------------------------------------------
// embedding

// Forward and backward in T. The gradients' tables start as 3.
template <typename T> struct EmbeddingRun {
    std::vector<T> out;
    std::vector<acc_t<T>> dwte, dwpe;
    EmbeddingRun(const Doubles& wte, const Doubles& wpe, const Doubles& dout,
                 const std::vector<int>& tokens, const std::vector<int>& positions,
                 const std::vector<int>& starts, size_t C, bool accumulate,
                 size_t vocab_start = 0) {
        size_t N = tokens.size(), V = wte.size() / C, P = wpe.size() / C;
        out.resize(N * C);
        dwte.assign(V * C, 3);
        dwpe.assign(P * C, 3);
        std::vector<T> a = as<T>(wte), b = as<T>(wpe), d = as<T>(dout);
        embedding_forward(out.data(), tokens.data(), positions.data(), starts.data(), a.data(),
                          P ? b.data() : nullptr, N, vocab_start, V, C, CPU);
        embedding_backward_weight(dwte.data(), P ? dwpe.data() : nullptr, d.data(), tokens.data(),
                                  positions.data(), starts.data(), nullptr, N, vocab_start, V, P, C,
                                  accumulate, CPU);
    }
};

inline void embedding_test(Check& c) {
    for (size_t C : {size_t(1), odd(c, 2, 300)}) {
        size_t N = odd(c, 1, 40), V = odd(c, 2, 30), P = odd(c, 5, 20);
        std::vector<int> tokens = integers(c, N, 0, int(V) - 1);
        std::vector<int> positions = integers(c, N, 3, int(P) - 1), starts = integers(c, N, 0, 3);
        Doubles wte = rounded<bf16>(normals(c, V * C)), wpe = rounded<bf16>(normals(c, P * C));
        Doubles dout = rounded<bf16>(normals(c, N * C));

        // Float and bf16 against double.
        for (bool accumulate : {false, true}) {
            EmbeddingRun<double> d(wte, wpe, dout, tokens, positions, starts, C, accumulate);
            EmbeddingRun<float> f(wte, wpe, dout, tokens, positions, starts, C, accumulate);
            EmbeddingRun<bf16> b(wte, wpe, dout, tokens, positions, starts, C, accumulate);
            close(c, "out float", f.out, d.out, tolerance<float>(1));
            close(c, "out bf16", b.out, d.out, tolerance<bf16>(1));
            close(c, "dwte float", f.dwte, d.dwte, tolerance<float>(N));
            close(c, "dwte bf16", b.dwte, d.dwte, tolerance<float>(N));
            close(c, "dwpe bf16", b.dwpe, d.dwpe, tolerance<float>(N));
        }

        // Each row of dout is added to the table exactly once.
        Doubles sum(C), all(C);
        EmbeddingRun<double> d(wte, {}, dout, tokens, positions, starts, C, false);
        for (size_t i = 0; i < dout.size(); i++) sum[i % C] += dout[i];
        for (size_t i = 0; i < d.dwte.size(); i++) all[i % C] += d.dwte[i];
        close(c, "sum of dwte", all, sum, 1e-12);

        // The table in two halves: the halves' outputs add up to the whole's, and their
        // gradients stand side by side.
        long cut = long(V / 2 * C);
        Doubles low(wte.begin(), wte.begin() + cut), high(wte.begin() + cut, wte.end());
        EmbeddingRun<double> a(low, {}, dout, tokens, positions, starts, C, false),
            b(high, wpe, dout, tokens, positions, starts, C, false, V / 2),
            whole(wte, wpe, dout, tokens, positions, starts, C, false);
        close(c, "out of two", plus(a.out, b.out), whole.out, 1e-14);
        a.dwte.insert(a.dwte.end(), b.dwte.begin(), b.dwte.end());
        close(c, "dwte of two", a.dwte, whole.dwte, 0);
        close(c, "dwpe of two", b.dwpe, whole.dwpe, 0);
    }
}

inline void embedding_grad(Check& c) {
    size_t N = 7, V = 5, P = 9, C = 6;
    std::vector<int> tokens = integers(c, N, 0, 4);
    std::vector<int> positions = integers(c, N, 2, 8), starts = integers(c, N, 0, 2);
    Doubles wte = normals(c, V * C), wpe = normals(c, P * C), dout = normals(c, N * C);
    auto loss = [&] {
        return dot(EmbeddingRun<double>(wte, wpe, dout, tokens, positions, starts, C, false).out,
                   dout);
    };
    EmbeddingRun<double> run(wte, wpe, dout, tokens, positions, starts, C, false),
        again(wte, wpe, dout, tokens, positions, starts, C, true);
    gradient(c, "wte", loss, wte, run.dwte);
    gradient(c, "wpe", loss, wpe, run.dwpe);
    close(c, "accumulated", again.dwte, plus(run.dwte, Doubles(V * C, 3)), 1e-14);
}

inline void embedding_perf(Perf& p) {
    size_t N = 4096, V = 50304, C = 768;
    std::vector<float> wte(V * C), wpe(1024 * C), out(N * C), dwte(V * C), dwpe(1024 * C);
    std::vector<int> tokens(N), positions(N), starts(N);
    for (size_t n = 0; n < N; n++) {
        tokens[n] = int(n * 7919 % V);
        positions[n] = int(n % 1024);
    }

    memory_rate(p, "forward float (4096,768) of 50304", 12.0 * N * C, [&] {
        embedding_forward(out.data(), tokens.data(), positions.data(), starts.data(), wte.data(),
                          wpe.data(), N, 0, V, C, CPU);
    });
    memory_rate(p, "backward float, writing the table", 4.0 * (V + 5 * N) * C, [&] {
        embedding_backward_weight(dwte.data(), dwpe.data(), out.data(), tokens.data(),
                                  positions.data(), starts.data(), nullptr, N, 0, V, 1024, C, false,
                                  CPU);
    });
}

// ----------------------------------------------------------------------------
// norms: one driver for both, since RMSNorm is LayerNorm without mean and bias

// A norm's operands, and how backward is called: with a residual's gradient, in its place, or +=.

struct NormInputs {
    size_t N, C;
    Doubles inp, weight, bias, dout, dresidual;
    bool rms, residual, in_place, accumulate;
};

// Forward and backward in T; the gradients of weight and bias start as 2.
template <typename T> struct NormRun {
    typedef acc_t<T> A;
    std::vector<T> out, dinp, frozen; // frozen: dinp where no weight is trained
    std::vector<A> mean, rstd, dweight, dbias;
    explicit NormRun(const NormInputs& x)
        : out(x.N * x.C), dinp(x.N * x.C), frozen(x.N * x.C), mean(x.N), rstd(x.N),
          dweight(x.C, A(2)), dbias(x.C, A(2)) {
        std::vector<T> inp = as<T>(x.inp), weight = as<T>(x.weight), bias = as<T>(x.bias);
        std::vector<T> dout = as<T>(x.dout), dresidual = as<T>(x.dresidual);
        if (x.in_place) dinp = dresidual;
        const T* r = x.in_place ? dinp.data() : x.residual ? dresidual.data() : nullptr;
        const T* kept = x.residual || x.in_place ? dresidual.data() : nullptr;

        // Run forward, backward with frozen weights, and backward.
        std::vector<A> sums(3 * x.C);
        A* none = nullptr;
        if (x.rms) {
            rmsnorm_forward(out.data(), rstd.data(), inp.data(), weight.data(), x.N, x.C, 1e-5f,
                            CPU);
            rmsnorm_backward(frozen.data(), none, kept, dout.data(), inp.data(), weight.data(),
                             rstd.data(), x.N, x.C, CPU);
            rmsnorm_backward(dinp.data(), sums.data(), r, dout.data(), inp.data(), weight.data(),
                             rstd.data(), x.N, x.C, CPU);
            add_parts<A>({rmsnorm_parts(dweight.data(), sums.data(), x.N, x.C, CPU)}, x.accumulate,
                         CPU);
        } else {
            layernorm_forward(out.data(), mean.data(), rstd.data(), inp.data(), weight.data(),
                              bias.data(), x.N, x.C, 1e-5f, CPU);
            layernorm_backward(frozen.data(), none, kept, dout.data(), inp.data(), weight.data(),
                               mean.data(), rstd.data(), x.N, x.C, CPU);
            layernorm_backward(dinp.data(), sums.data(), r, dout.data(), inp.data(), weight.data(),
                               mean.data(), rstd.data(), x.N, x.C, CPU);
            add_parts(layernorm_parts(dweight.data(), dbias.data(), none, sums.data(), x.N, x.C,
                                      CPU),
                      x.accumulate, CPU);
        }
    }
};

inline NormInputs norm_inputs(Check& c, size_t N, size_t C, bool rms) {
    NormInputs x = {N, C, normals(c, N * C), normals(c, C), normals(c, C), normals(c, N * C),
                    normals(c, N * C), rms, true, false, false};
    for (size_t i = 0; i < N * C; i++) x.inp[i] += 1.5; // a mean that must be taken out
    for (Doubles* d : {&x.inp, &x.weight, &x.bias, &x.dout, &x.dresidual}) *d = rounded<bf16>(*d);
    return x;
}

inline void norm_test(Check& c, bool rms) {
    for (size_t C : {size_t(2), size_t(33), odd(c, 3, 900), size_t(768)})
        for (int variant = 0; variant < 4; variant++) {
            NormInputs x = norm_inputs(c, odd(c, 1, 20), C, rms);
            x.residual = variant & 1;
            x.in_place = variant == 3;
            x.accumulate = variant & 2;
            NormRun<double> d(x);
            NormRun<float> f(x);
            NormRun<bf16> b(x);
            // The error of an output is relative to 1, since the bias may cancel it.
            close(c, "out float", f.out, d.out, tolerance<float>(C), 1);
            close(c, "out bf16", b.out, d.out, tolerance<bf16>(C), 1);
            close(c, "rstd", f.rstd, d.rstd, tolerance<float>(C));

            // The size of the input gradient's terms. For C = 2 nothing is left of them.
            double terms = 0;
            for (size_t i = 0; i < x.N * C; i++)
                terms = std::max(terms, std::fabs(x.dout[i] * x.weight[i % C] * d.rstd[i / C]));
            close(c, "dinp float", f.dinp, d.dinp, 4 * tolerance<float>(C), terms);
            close(c, "dinp bf16", b.dinp, d.dinp, tolerance<bf16>(C), terms);
            close(c, "dinp of frozen weights", d.frozen, d.dinp, 0);
            close(c, "dweight float", f.dweight, d.dweight, 4 * tolerance<float>(x.N), 1);
            close(c, "dbias float", f.dbias, d.dbias, tolerance<float>(x.N), 1);
        }

    // A known answer: the row (1, 3) has mean 2 and deviation 1.
    NormInputs x = {1, 2, {1, 3}, {1, 1}, {0, 0}, {0, 0}, {0, 0}, rms, false, false, false};
    double r = rms ? 1 / std::sqrt(5.0 + double(1e-5f)) : 1 / std::sqrt(1.0 + double(1e-5f));
    close(c, "known row", NormRun<double>(x).out, rms ? Doubles{r, 3 * r} : Doubles{-r, r}, 1e-12);
}

inline void norm_grad(Check& c, bool rms) {
    for (size_t C : {size_t(5), size_t(17)})
        for (int variant = 0; variant < 4; variant++) {
            NormInputs x = norm_inputs(c, 3, C, rms);
            x.residual = variant & 1;
            x.in_place = variant == 3;
            x.accumulate = variant & 2;

            // The loss includes the residual stream, and accumulated gradients their 2.
            auto loss = [&] {
                return dot(NormRun<double>(x).out, x.dout) +
                       (x.residual ? dot(x.inp, x.dresidual) : 0);
            };
            NormRun<double> run(x);
            Doubles dweight = run.dweight, dbias = run.dbias;
            if (x.accumulate)
                for (size_t i = 0; i < C; i++) {
                    dweight[i] -= 2;
                    dbias[i] -= 2;
                }
            gradient(c, "inp", loss, x.inp, run.dinp);
            gradient(c, "weight", loss, x.weight, dweight);
            if (!rms) gradient(c, "bias", loss, x.bias, dbias);
        }
}

template <typename T> void norm_rates(Perf& p, bool rms, const char* type) {
    size_t N = 4096 * 4, C = 768, s = sizeof(T);
    std::vector<T> inp(N * C, from_acc<T>(1)), out(N * C), weight(C), bias(C),
        dout(N * C, from_acc<T>(1)), dinp(N * C);
    std::vector<float> mean(N), rstd(N), sums(3 * C);
    double bytes = double(N * C * s);
    std::string name = type;

    memory_rate(p, (name + " forward (16384,768)").c_str(), 2 * bytes, [&] {
        rms ? rmsnorm_forward(out.data(), rstd.data(), inp.data(), weight.data(), N, C, 1e-5f, CPU)
            : layernorm_forward(out.data(), mean.data(), rstd.data(), inp.data(), weight.data(),
                                bias.data(), N, C, 1e-5f, CPU);
    });
    memory_rate(p, (name + " backward, with residual").c_str(), (rms ? 6 : 7) * bytes, [&] {
        rms ? rmsnorm_backward(dinp.data(), sums.data(), out.data(), dout.data(), inp.data(),
                               weight.data(), rstd.data(), N, C, CPU)
            : layernorm_backward(dinp.data(), sums.data(), out.data(), dout.data(), inp.data(),
                                 weight.data(), mean.data(), rstd.data(), N, C, CPU);
    });
}
inline void norm_perf(Perf& p, bool rms) {
    norm_rates<float>(p, rms, "float");
    norm_rates<bf16>(p, rms, "bf16");
}

// ----------------------------------------------------------------------------
// RoPE

// Turn the heads of x forward or back, with a table of 64 positions that Llama 3 scales.
template <typename T>
std::vector<T> rope_run(const Doubles& x, const std::vector<int>& positions, size_t NH, size_t HS,
                        size_t stride, bool backward) {
    std::vector<T> y = as<T>(x);
    std::vector<acc_t<T>> table(64 * HS);
    rope_table(table.data(), 64, HS, 10000.0, {8, 1, 4, 16});
    auto* rotate = backward ? &rope_backward<T, Cpu> : &rope_forward<T, Cpu>;
    rotate({y.data(), NH, stride}, {}, positions.data(), table.data(), positions.size(), HS, CPU);
    return y;
}

inline void rope_test(Check& c) {
    for (size_t HS : {size_t(2), size_t(10), size_t(64)}) {
        size_t N = odd(c, 1, 30), NH = odd(c, 1, 5), stride = NH * HS + odd(c, 0, 7);
        std::vector<int> positions = integers(c, N, 0, 63);
        Doubles x = rounded<bf16>(normals(c, N * stride));
        Doubles d = rope_run<double>(x, positions, NH, HS, stride, false);
        close(c, "float", rope_run<float>(x, positions, NH, HS, stride, false), d,
              tolerance<float>(1));
        close(c, "bf16", rope_run<bf16>(x, positions, NH, HS, stride, false), d,
              tolerance<bf16>(1));
        close(c, "turned back", rope_run<double>(d, positions, NH, HS, stride, true), x, 1e-13);

        // A pair (i, i + HS/2) turns by the angle position * theta^(-2i/HS). This
        // table has no scaling.
        size_t i = odd(c, 0, HS / 2 - 1);
        Doubles table(64 * HS);
        rope_table(table.data(), 64, HS, 500.0, {});
        close(c, "angle", Doubles{table[(5 * (HS / 2) + i) * 2 + 1]},
              Doubles{std::sin(5 * std::pow(500.0, -2.0 * double(i) / double(HS)))}, 1e-12);
    }

    // Position 1, HS 4, theta 10000: channels (0, 2) turn by 1 radian and (1, 3) by 0.01, from the
    // first of the pair towards the second.
    const double cos1 = 0.5403023058681398, sin1 = 0.8414709848078965;
    const double cos01 = 0.9999500004166653, sin01 = 0.009999833334166664;
    Doubles turn(2 * 4), units = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1};
    rope_table(turn.data(), 2, 4, 10000, {});
    std::vector<int> ones(4, 1);
    rope_forward<double>({units.data(), 1, 4}, {}, ones.data(), turn.data(), 4, 4, CPU);
    close(c, "unit vectors", units,
          Doubles{cos1, 0, sin1, 0, 0, cos01, 0, sin01, -sin1, 0, cos1, 0, 0, -sin01, 0, cos01},
          1e-15);

    // Llama 3.1: factor 8, low 1, high 4, original 8192, theta 500000, HS 128. A wavelength of 379
    // stays as it is, those of 2948 and 5454 lie on the slope, and one of 63866 is stretched by 8.
    RopeScaling s = {8, 1, 4, 8192};
    const int channels[] = {20, 30, 33, 45};
    const double frequencies[] = {0.016560440080994446, 0.0013718935677611381,
                                  0.00031269375038406517, 1.2297638677963614e-05};
    for (int k = 0; k < 4; k++)
        close(c, "Llama 3.1's frequency", Doubles{rope_frequency(channels[k], 128, 500000, s)},
              Doubles{frequencies[k]}, 1e-14);

    // Linear scaling, and YaRN from 64 positions, as transformers computes them in
    // float: HS 32, theta 10000.
    RopeScaling linear = {4, 1, 4, 64, RopeKind::LINEAR}, yarn = {4, 1, 4, 64, RopeKind::YARN};
    RopeScaling whole = yarn;
    whole.truncate = false, whole.beta_fast = 8, whole.beta_slow = 2;
    struct Known {
        RopeScaling scaling;
        double frequencies[6];
    };
    for (const Known& k : {
             Known{linear, {0.25, 0.140585333, 0.079056941, 0.0444569848, 0.025, 0.0140585322}},
             Known{yarn, {1, 0.477990121, 0.221359432, 0.0978053659, 0.04, 0.0140585322}},
             Known{whole, {1, 0.460702717, 0.160589159, 0.0444569848, 0.025, 0.0140585322}}})
        for (size_t j = 0; j < 6; j++)
            close(c, "scaled frequency", Doubles{rope_frequency(j, 32, 10000, k.scaling)},
                  Doubles{k.frequencies[j]}, 1e-6);

    // Half of the pairs, HS 128, theta 1024: pair 31 turns by 1/1024 a position, pair 32 not at all.
    RopeScaling half = {};
    half.kind = RopeKind::HALF;
    Doubles of_pairs;
    for (size_t j : {0, 1, 31, 32, 63}) of_pairs.push_back(rope_frequency(j, 128, 1024, half));
    close(c, "half", of_pairs, Doubles{1, 0.799638231116584, 1.0 / 1024, 0, 0}, 1e-14);

    // Transposed: the first channel of the pair turns away from the second.
    half.transposed = true;
    rope_table(turn.data(), 2, 4, 10000, half);
    close(c, "transposed", turn, Doubles{1, 0, 1, 0, cos1, -sin1, 1, 0}, 1e-15);

    // YaRN's attention factor lengthens what it turns.
    yarn.attention_factor = 1.5f;
    rope_table(turn.data(), 2, 4, 10000, yarn);
    close(c, "attention factor", Doubles{turn[0], std::hypot(turn[4], turn[5])},
          Doubles{1.5, 1.5}, 1e-15);
}

inline void rope_grad(Check& c) {
    size_t N = 4, NH = 3, HS = 6, stride = 20;
    std::vector<int> positions = integers(c, N, 0, 63);
    Doubles x = normals(c, N * stride), dout = normals(c, N * stride);
    auto loss = [&] { return dot(rope_run<double>(x, positions, NH, HS, stride, false), dout); };
    gradient(c, "x", loss, x, rope_run<double>(dout, positions, NH, HS, stride, true));
}

inline void rope_perf(Perf& p) {
    size_t N = 4096, NH = 24, HS = 64;
    std::vector<bf16> x(N * NH * HS);
    std::vector<float> table(1024 * HS);
    std::vector<int> positions(N);
    for (size_t n = 0; n < N; n++) positions[n] = int(n % 1024);
    memory_rate(p, "bf16 (4096,24,64)", 4.0 * double(x.size()), [&] {
        rope_forward<bf16>({x.data(), NH, NH * HS}, {}, positions.data(), table.data(), N, HS, CPU);
    });
}

// ----------------------------------------------------------------------------
// activations

// GELU and SwiGLU in T against double.
template <typename T>
void activation_type_test(Check& c, const Doubles& x, const Doubles& u, const Doubles& dout) {
    // The size of the terms that cancel. gelu = x/2 * (1 + tanh) leaves next to nothing for a
    // negative x, and silu' = s * (1 + x * (1 - s)) leaves nothing at x = -1.28.
    size_t n = x.size();
    double terms = 0, gate_terms = 0;
    for (size_t i = 0; i < n; i++) {
        double s = 1 / (1 + std::exp(-x[i]));
        terms = std::max(terms, std::fabs(x[i]) * std::max(1.0, std::fabs(dout[i])) * 0.5);
        gate_terms = std::max(gate_terms, std::fabs(dout[i] * u[i]) * s *
                                              (1 + std::fabs(x[i]) * (1 - s)));
    }

    std::vector<T> X = as<T>(x), U = as<T>(u), D = as<T>(dout), y(n), dx(n), dg(n), du(n);
    Doubles y0(n), dx0(n), dg0(n), du0(n);

    // GELU, and its backward in place.
    gelu_forward(y0.data(), x.data(), n, CPU);
    gelu_forward(y.data(), X.data(), n, CPU);
    close(c, "gelu", y, y0, tolerance<T>(1), terms);
    gelu_backward(dx0.data(), dout.data(), x.data(), n, CPU);
    dx = D;
    gelu_backward(dx.data(), dx.data(), X.data(), n, CPU);
    close(c, "gelu backward", dx, dx0, tolerance<T>(4), terms);

    // SwiGLU, and its backward in place.
    swiglu_forward(y0.data(), x.data(), u.data(), n, CPU);
    swiglu_forward(y.data(), X.data(), U.data(), n, CPU);
    close(c, "swiglu", y, y0, tolerance<T>(1));
    swiglu_backward(dg0.data(), du0.data(), dout.data(), x.data(), u.data(), n, CPU);
    dg = D;
    du = U;
    swiglu_backward(dg.data(), du.data(), dg.data(), X.data(), du.data(), n, CPU);
    close(c, "swiglu dgate", dg, dg0, tolerance<T>(4), gate_terms);
    close(c, "swiglu dup", du, du0, tolerance<T>(4));

    // ReLU^2, and its backward in place.
    relu2_forward(y0.data(), x.data(), n, CPU);
    relu2_forward(y.data(), X.data(), n, CPU);
    close(c, "relu2", y, y0, tolerance<T>(1));
    relu2_backward(dx0.data(), dout.data(), x.data(), n, CPU);
    dx = D;
    relu2_backward(dx.data(), dx.data(), X.data(), n, CPU);
    close(c, "relu2 backward", dx, dx0, tolerance<T>(2));
}

inline void activation_test(Check& c) {
    for (size_t n : {size_t(1), odd(c, 2, 5000)}) {
        Doubles x = rounded<bf16>(normals(c, n, 3)), u = rounded<bf16>(normals(c, n));
        Doubles dout = rounded<bf16>(normals(c, n));
        const double edges[] = {0, 40, -40, 100}; // where tanh and exp reach their limits
        if (n > 4) std::copy_n(edges, 4, x.begin());
        activation_type_test<float>(c, x, u, dout);
        activation_type_test<bf16>(c, x, u, dout);
    }

    // Known answers: gelu(1) = 0.5 (1 + tanh(sqrt(2/pi) 1.044715)).
    double one = 1, y;
    gelu_forward(&y, &one, 1, CPU);
    close(c, "gelu(1)", Doubles{y}, Doubles{0.8411919906082768}, 1e-14);
    swiglu_forward(&y, &one, &one, 1, CPU);
    close(c, "silu(1)", Doubles{y}, Doubles{0.7310585786300049}, 1e-14);

    // ReLU^2 of -2, 0, 3 is 0, 0, 9; the cap of 15 in the root's form takes 20 to 12: a triangle of
    // sides 3, 4, 5.
    Doubles three = {-2, 0, 3}, squares(3), capped = {20, -20, 0};
    relu2_forward(squares.data(), three.data(), 3, CPU);
    close(c, "relu2 of -2, 0, 3", squares, Doubles{0, 0, 9}, 0);
    softcap_forward(capped.data(), 3, 15, CPU, true);
    close(c, "cap of 20", capped, Doubles{12, -12, 0}, 1e-15);
}

inline void activation_grad(Check& c) {
    size_t n = 20;
    Doubles x = normals(c, n), u = normals(c, n), dout = normals(c, n), dx(n), du(n);

    // The loss whose gradient by an operator's result is dout. Operators write over y, which is x.
    auto loss_of = [&](auto forward) {
        return [&, forward] {
            Doubles y = x;
            forward(y.data());
            return dot(y, dout);
        };
    };
    auto gelu = loss_of([&](double* y) { gelu_forward(y, x.data(), n, CPU); });
    auto swiglu = loss_of([&](double* y) { swiglu_forward(y, x.data(), u.data(), n, CPU); });
    auto relu2 = loss_of([&](double* y) { relu2_forward(y, x.data(), n, CPU); });
    auto cap = loss_of([&](double* y) { softcap_forward(y, n, 1.5f, CPU, true); });

    // Compare each with its backward pass.
    gelu_backward(dx.data(), dout.data(), x.data(), n, CPU);
    gradient(c, "gelu x", gelu, x, dx);
    swiglu_backward(dx.data(), du.data(), dout.data(), x.data(), u.data(), n, CPU);
    gradient(c, "swiglu gate", swiglu, x, dx);
    gradient(c, "swiglu up", swiglu, u, du);
    relu2_backward(dx.data(), dout.data(), x.data(), n, CPU);
    gradient(c, "relu2", relu2, x, dx);

    // The cap in the root's form, whose slope is taken from its result.
    Doubles y = x;
    softcap_forward(y.data(), n, 1.5f, CPU, true);
    GradientScale scale = {1, nullptr, 1.5f, nullptr, nullptr, true};
    for (size_t i = 0; i < n; i++) dx[i] = dout[i] * scale.cap_slope(y[i]);
    gradient(c, "cap of the root's form", cap, x, dx);
}

template <typename T> void activation_rates(Perf& p, const char* type) {
    size_t n = 4096 * 3072;
    std::vector<T> x(n, from_acc<T>(1)), u(n, from_acc<T>(1)), y(n), d(n);
    std::string name = type;
    double bytes = double(n * sizeof(T));
    memory_rate(p, (name + " gelu forward (4096,3072)").c_str(), 2 * bytes,
                [&] { gelu_forward(y.data(), x.data(), n, CPU); });
    memory_rate(p, (name + " gelu backward").c_str(), 3 * bytes,
                [&] { gelu_backward(d.data(), y.data(), x.data(), n, CPU); });
    memory_rate(p, (name + " swiglu forward").c_str(), 3 * bytes,
                [&] { swiglu_forward(y.data(), x.data(), u.data(), n, CPU); });
    memory_rate(p, (name + " swiglu backward, in place").c_str(), 5 * bytes,
                [&] { swiglu_backward(d.data(), u.data(), y.data(), x.data(), u.data(), n, CPU); });
}
inline void activation_perf(Perf& p) {
    activation_rates<float>(p, "float");
    activation_rates<bf16>(p, "bf16");
}

// ----------------------------------------------------------------------------
// cross-entropy

// The loss and its gradient in T, step by step.
template <typename T> struct CrossentropyRun {
    typedef acc_t<T> A;
    std::vector<A> row_max, sum_exp, target_logit, losses;
    std::vector<T> dlogits;
    double total = 0;
    CrossentropyRun(const Doubles& logits, const std::vector<int>& targets, size_t V, size_t Vp,
                    double scale)
        : row_max(targets.size()), sum_exp(targets.size()), target_logit(targets.size()),
          losses(targets.size()), dlogits(as<T>(logits)) {
        size_t N = targets.size();
        crossentropy_max(row_max.data(), dlogits.data(), N, V, Vp, CPU);
        crossentropy_sum(sum_exp.data(), target_logit.data(), dlogits.data(), targets.data(),
                         row_max.data(), N, V, Vp, 0, CPU);
        crossentropy_loss(losses.data(), row_max.data(), sum_exp.data(), target_logit.data(),
                          targets.data(), N, CPU);
        crossentropy_backward(dlogits.data(), targets.data(), row_max.data(), sum_exp.data(),
                              A(scale), N, V, Vp, 0, CPU);
        crossentropy_total(&total, losses.data(), N, CPU);
    }
};

// Three uneven shards of the vocabulary, combined as ranks combine them, give the whole, `d`.
inline void crossentropy_shards_test(Check& c, const Doubles& logits,
                                     const std::vector<int>& targets,
                                     const CrossentropyRun<double>& d, size_t V, size_t Vp) {
    size_t N = targets.size();
    const size_t starts[] = {0, V / 4, V / 2, V};
    Doubles row_max(N, -INFINITY), sum_exp(N), target_logit(N), losses(N);

    // 1. Each shard's maximum, and the maximum of the three.
    Doubles shards[3], m(N), s(N), t(N);
    for (int k = 0; k < 3; k++) {
        for (size_t n = 0; n < N; n++)
            shards[k].insert(shards[k].end(), logits.begin() + long(n * Vp + starts[k]),
                             logits.begin() + long(n * Vp + starts[k + 1]));
        size_t width = starts[k + 1] - starts[k];
        crossentropy_max(m.data(), shards[k].data(), N, width, width, CPU);
        for (size_t n = 0; n < N; n++) row_max[n] = std::max(row_max[n], m[n]);
    }

    // 2. Each shard's sum and target logit, and their totals. A shard without the target
    // gives 0 for its logit.
    for (int k = 0; k < 3; k++) {
        size_t width = starts[k + 1] - starts[k];
        crossentropy_sum(s.data(), t.data(), shards[k].data(), targets.data(), row_max.data(), N,
                         width, width, starts[k], CPU);
        sum_exp = plus(sum_exp, s);
        target_logit = plus(target_logit, t);
        for (size_t n = 0; n < N; n++) {
            bool own = targets[n] >= int(starts[k]) && targets[n] < int(starts[k + 1]);
            expect(c, t[n] == (own ? logits[n * Vp + size_t(targets[n])] : 0),
                   "a shard's target logit");
        }
    }
    crossentropy_loss(losses.data(), row_max.data(), sum_exp.data(), target_logit.data(),
                      targets.data(), N, CPU);
    close(c, "losses of three shards", losses, d.losses, 1e-12);

    // 3. Each shard's gradient, side by side. The padding's gradient is 0.
    Doubles whole(N * Vp);
    for (int k = 0; k < 3; k++) {
        size_t width = starts[k + 1] - starts[k];
        crossentropy_backward(shards[k].data(), targets.data(), row_max.data(), sum_exp.data(), 0.1,
                              N, width, width, starts[k], CPU);
        for (size_t n = 0; n < N; n++) {
            bool own = targets[n] >= int(starts[k]) && targets[n] < int(starts[k + 1]);
            double left = 0; // the smallest element: a probability, unless the target is here
            for (size_t v = 0; v < width; v++) {
                whole[n * Vp + starts[k] + v] = shards[k][n * width + v];
                left = std::min(left, shards[k][n * width + v]);
            }
            expect(c, own || left == 0, "a target outside the shard is subtracted in it");
        }
    }
    close(c, "dlogits of three shards", whole, d.dlogits, 1e-12);
}

// Rows that are negative throughout, rows with -inf (probability 0), and rows with a NaN of either
// sign (the loss is NaN).
template <typename T> void crossentropy_edges_test(Check& c) {
    size_t V = 70;
    for (size_t at : {size_t(0), size_t(33), V - 1}) {
        Doubles x(V, -1000);
        x[at] = -500;
        x[(at + 1) % V] = -INFINITY;
        CrossentropyRun<T> run(x, {int(at)}, V, V, 1);
        expect(c, run.row_max[0] == to_acc(from_acc<T>(-500)), "the maximum of negative logits");
        expect(c, run.losses[0] == 0, "the loss of a certain row");
        expect(c, to_acc(run.dlogits[(at + 1) % V]) == 0, "a gradient at -inf");

        for (float nan : {NAN, -NAN}) {
            x[(at + 1) % V] = double(nan);
            CrossentropyRun<T> none(x, {int(at)}, V, V, 1);
            expect(c, std::isnan(none.losses[0]), "the loss of a row with a NaN");
        }
    }

    Doubles nothing(V, -INFINITY);
    expect(c, std::isnan(CrossentropyRun<T>(nothing, {0}, V, V, 1).losses[0]),
           "the loss of a row of -inf");
}

inline void crossentropy_test(Check& c) {
    for (size_t V : {size_t(1), size_t(2), odd(c, 3, 300), size_t(5000)}) {
        size_t N = odd(c, 1, 20), Vp = V + odd(c, 0, 9);
        Doubles logits = rounded<bf16>(normals(c, N * Vp, 4));
        for (size_t n = 0; n < N; n++)
            for (size_t v = V; v < Vp; v++)
                logits[n * Vp + v] = 1000; // padding must not be looked at
        std::vector<int> targets = integers(c, N, -1, int(V) - 1);
        CrossentropyRun<double> d(logits, targets, V, Vp, 0.1);
        CrossentropyRun<float> f(logits, targets, V, Vp, 0.1);
        CrossentropyRun<bf16> b(logits, targets, V, Vp, 0.1);

        // Float and bf16 against double. A loss is the difference of a logit and the maximum, so
        // its error is relative to the maximum (terms).
        double terms = 0;
        for (double m : d.row_max) terms = std::max(terms, std::fabs(m));
        close(c, "losses float", f.losses, d.losses, tolerance<float>(V), terms);
        close(c, "losses bf16", b.losses, d.losses, tolerance<float>(V), terms);
        close(c, "dlogits float", f.dlogits, d.dlogits, tolerance<float>(V), 0.1);
        close(c, "dlogits bf16", b.dlogits, d.dlogits, tolerance<bf16>(V), 0.1);

        // A row's gradient adds up to 0. It is 0 in the padding, and everywhere
        // if the row is ignored.
        for (size_t n = 0; n < N; n++) {
            double sum = 0, size = 0;
            for (size_t v = 0; v < Vp; v++) {
                double g = d.dlogits[n * Vp + v];
                sum += g;
                if (v >= V || targets[n] < 0) size += std::fabs(g);
            }
            expect(c, std::fabs(sum) < 1e-12 && size == 0, "a row's gradient does not add up to 0");
        }
        if (V >= 4) crossentropy_shards_test(c, logits, targets, d, V, Vp);
    }

    // Known answers: equal logits have the loss log V; large ones do not overflow.
    CrossentropyRun<double> uniform(Doubles(10, 3.0), {4}, 10, 10, 1);
    close(c, "uniform", uniform.losses, Doubles{std::log(10.0)}, 1e-14);
    CrossentropyRun<float> large({1e4, -1e4, 0}, {0}, 3, 3, 1);
    close(c, "large logits", large.losses, Doubles{0}, 1e-6);
    crossentropy_edges_test<float>(c);
    crossentropy_edges_test<bf16>(c);
    crossentropy_edges_test<fp16>(c);
}

// The launcher for a whole vocabulary has the bits of the separate steps that it replaces.
template <typename T> void crossentropy_one_call_type_test(Check& c) {
    for (size_t V : {size_t(1), odd(c, 2, 300), size_t(5000)}) {
        size_t N = odd(c, 1, 20), Vp = V + odd(c, 0, 9);
        Doubles logits = rounded<T>(normals(c, N * Vp, 4));
        std::vector<int> targets = integers(c, N, -1, int(V) - 1);
        CrossentropyRun<T> steps(logits, targets, V, Vp, 0.1);

        std::vector<T> dlogits = as<T>(logits);
        std::vector<acc_t<T>> losses(N);
        crossentropy_forward_backward(losses.data(), dlogits.data(), targets.data(),
                                      acc_t<T>(0.1), N, V, Vp, CPU);
        expect(c, losses == steps.losses, "the losses of one call");
        close(c, "dlogits of one call", dlogits, as_double(steps.dlogits), 0);
    }
}
inline void crossentropy_one_call_test(Check& c) {
    crossentropy_one_call_type_test<double>(c);
    crossentropy_one_call_type_test<float>(c);
    crossentropy_one_call_type_test<bf16>(c);
    crossentropy_one_call_type_test<fp16>(c);
}

inline void crossentropy_grad(Check& c) {
    size_t N = 4, V = 7, Vp = 9;
    Doubles logits = normals(c, N * Vp);
    std::vector<int> targets = {3, -1, 0, 6};
    auto loss = [&] { return 0.3 * CrossentropyRun<double>(logits, targets, V, Vp, 0.3).total; };
    gradient(c, "logits", loss, logits,
             CrossentropyRun<double>(logits, targets, V, Vp, 0.3).dlogits);
}

template <typename T> void crossentropy_rates(Perf& p, const char* type) {
    size_t N = 1024, V = 50257, Vp = 50304;
    std::vector<T> logits(N * Vp, from_acc<T>(0.5f));
    std::vector<float> m(N), s(N), t(N), l(N);
    std::vector<int> targets(N, 5);
    double bytes = double(N * Vp * sizeof(T));
    memory_rate(p, (std::string(type) + " max, sum, loss and backward (1024,50257)").c_str(),
                4 * bytes, [&] {
                    crossentropy_max(m.data(), logits.data(), N, V, Vp, CPU);
                    crossentropy_sum(s.data(), t.data(), logits.data(), targets.data(), m.data(), N,
                                     V, Vp, 0, CPU);
                    crossentropy_loss(l.data(), m.data(), s.data(), t.data(), targets.data(), N,
                                      CPU);
                    crossentropy_backward(logits.data(), targets.data(), m.data(), s.data(), 1e-3f,
                                          N, V, Vp, 0, CPU);
                });
}
inline void crossentropy_perf(Perf& p) {
    crossentropy_rates<float>(p, "float");
    crossentropy_rates<bf16>(p, "bf16");
}

// ----------------------------------------------------------------------------
// objectives over pairs

// Windows of 16 rows: an answer of 5 targets and one of 8, each after a row
// of question, then padding.
template <typename A> struct ObjectiveRun {
    size_t T = 16, N = 0;
    std::vector<A> losses, out;
    std::vector<int> targets, doc_start;
    std::vector<float> feedback, reference;

    ObjectiveRun(Objective o, const Doubles& row_losses, const Doubles& reference_losses)
        : N(row_losses.size()), losses(as<A>(row_losses)), out(4 * N, A(7)) {
        for (size_t i = 0; i < N; i++) {
            size_t at = i % T;
            bool worse = at >= 6 && at < 15;
            doc_start.push_back(at < 6 ? 0 : worse ? 6 : 15);
            targets.push_back(at == 0 || at == 6 || at == 15 ? -1 : int(at));
            feedback.push_back(o.pairs() ? worse : float(at) / 4 - 1); // else an advantage
            reference.push_back(float(-reference_losses[i]));
        }
        objective<A>({&out[0], &out[N], &out[2 * N], &out[3 * N], losses.data(), targets.data(),
                      doc_start.data(), feedback.data(), reference.data(), T}, o, N, CPU);
    }
    // The sum of one output. which: 1 the value, 2 the margin, 3 the correct ones.
    double total(size_t which) const {
        double sum = 0;
        for (size_t i = 0; i < N; i++) sum += double(out[which * N + i]);
        return sum;
    }
};

inline std::vector<Objective> all_objectives() {
    return {{LossKind::DPO, 0.1}, {LossKind::DPO, 0.1, 0.1}, {LossKind::IPO, 0.1},
            {LossKind::SIMPO, 2, 0, 0.5}, {LossKind::ORPO, 1},
            {LossKind::KTO, 0.1, 0, 0, 1, 0.5}, {LossKind::GRPO, 0.3}};
}

// GRPO's rows against central differences in double: the surrogate on both sides of the clip, each
// estimate of KL, and both together.
inline void rollout_rows_test(Check& c) {
    for (KlEstimate kl : {KlEstimate::K2, KlEstimate::K3})
        for (double beta : {0.0, 0.3})
            for (double advantage : {-1.5, 0.0, 0.75})
                for (double moved : {-0.5, -0.3, -0.1, 0.0, 0.1, 0.25, 0.5}) {
                    // The old policy's log p is -2; the policy's lies `moved` above it.
                    Objective o = {LossKind::GRPO, beta};
                    o.kl = kl, o.old_policy = true, o.clip_low = 0.2, o.clip_high = 0.28;
                    float old = -2, reference = -1.75, feedback = float(advantage);
                    int target = 3, start = 0;
                    auto row = [&](double x) {
                        std::array<double, 5> out = {};
                        double loss = 2 - x;
                        ObjectiveRows<double> rows = {&out[0], &out[1], &out[2], &out[3], &loss,
                                                      &target, &start, &feedback, &reference, 1};
                        rows.old = &old, rows.clipped = &out[4];
                        objective<double>(rows, o, 1, CPU);
                        return out;
                    };
                    auto at = row(moved), above = row(moved + 1e-5), below = row(moved - 1e-5);
                    double slope = (above[1] - below[1]) / 2e-5;

                    // The bounds are 0.8 and 1.28. A central difference is off by h^2 and by
                    // rounding over h, some 1e-10 each.
                    double ratio = std::exp(moved);
                    bool out = advantage > 0 ? ratio > 1.28 : advantage < 0 && ratio < 0.8;
                    expect(c, std::fabs(at[0] + slope) < 1e-9, "coefficient");
                    expect(c, at[4] == out, "clipped");
                    double x = moved - 0.25;
                    double estimate = kl == KlEstimate::K2 ? x * x / 2 : std::exp(-x) - 1 + x;
                    close(c, "kl", Doubles{at[2]}, Doubles{beta > 0 ? estimate : 0}, 1e-12);
                    double gain = std::min(ratio * advantage,
                                           std::clamp(ratio, 0.8, 1.28) * advantage);
                    close(c, "value", Doubles{at[1]}, Doubles{-gain + beta * at[2]}, 1e-12);
                }
}

inline void objective_test(Check& c) {
    rollout_rows_test(c);

    // The sums of dev/golden/make_preferences.py, spread over rows in quarters,
    // which floats hold exactly.
    Doubles policy(16), reference(16);
    for (size_t i = 1; i < 6; i++) policy[i] = 2, reference[i] = 2.25;
    for (size_t i = 7; i < 15; i++) policy[i] = 1.5, reference[i] = 1.5;
    reference[1] = 2, reference[7] = 1, reference[15] = -0.25; // the last: KTO's point, negated

    // Each objective's value as that program prints it.
    const Doubles values = {0.6209570478, 0.6359570478, 22.44390625, 1.7014132780, 3.0420578079,
                            0.7218881762};
    const Doubles at_first = {std::log(2.0), std::log(2.0), 25};
    for (size_t k = 0; k < 6; k++) {
        ObjectiveRun<double> run(all_objectives()[k], policy, reference);
        close(c, "the worked value", Doubles{run.total(1)}, Doubles{values[k]}, 1e-9);
        close(c, "in float", Doubles{ObjectiveRun<float>(all_objectives()[k], policy,
                                                         reference).total(1)},
              Doubles{values[k]}, 1e-6);
        expect(c, run.total(3) == (k == 3 || k == 4 ? 0 : k == 5 ? 2 : 1), "who wins");

        // A policy that equals its reference draws, to the bit. A draw is no win.
        if (k > 2) continue;
        ObjectiveRun<float> same(all_objectives()[k], policy, policy);
        close(c, "the first loss", Doubles{same.total(1)}, Doubles{double(float(at_first[k]))}, 0);
        expect(c, same.total(2) == 0 && same.total(3) == 0, "a draw");
    }

    // A sampled answer has an advantage and the penalty k3 = exp(-x) - 1 + x, which
    // is 0.106531 at x = 0.5.
    policy.assign(16, 2), reference.assign(16, 2.5);
    ObjectiveRun<double> sampled(all_objectives()[6], policy, reference);
    for (size_t i : {1, 5, 12}) {
        double a = double(i) / 4 - 1, k3 = 0.1065306597;
        close(c, "a row's loss", Doubles{sampled.out[16 + i]}, Doubles{2 * a + 0.3 * k3}, 1e-9);
        close(c, "its coefficient", Doubles{sampled.out[i]},
              Doubles{a - 0.3 * (1 - std::exp(-0.5))}, 1e-9);
    }
    close(c, "sums beside it", Doubles{sampled.total(2), sampled.total(3)},
          Doubles{13 * 0.1065306597, 26}, 1e-8);
    for (size_t i : {0, 6, 15}) expect(c, sampled.out[i] == 0, "questions have no coefficient");

    // Questions and padding have no coefficient. A window without a rejected answer counts no pair.
    ObjectiveRun<double> two(all_objectives()[0], normals(c, 32), normals(c, 32));
    for (size_t i : {0, 6, 15, 16, 31}) expect(c, two.out[i] == 0, "coefficients of questions");
    expect(c, count_pairs(&two.targets[0], &two.doc_start[0], &two.feedback[0], 16) == 1, "pairs");
    std::vector<int> targets = {-1, 1, -1, 1, 1, -1, 1, 1}, starts = {0, 0, 2, 2, 2, 5, 5, 5};
    std::vector<float> worse = {0, 0, 1, 1, 1, 1, 1, 1}; // the rejected answers of two pairs
    expect(c, count_pairs(&targets[0], &starts[0], &worse[0], 8) == 2, "each counts once");
    LossKind kto = LossKind::KTO;
    expect(c, count_pairs(&two.targets[0], &two.doc_start[0], &two.feedback[0], 16, kto) == 2,
           "answers, and no padding");
    std::fill(two.feedback.begin(), two.feedback.end(), 0.0f);
    expect(c, count_pairs(&two.targets[0], &two.doc_start[0], &two.feedback[0], 16) == 0, "none");
}

// The coefficient of a row is the derivative by the row's loss, which is -log p.
inline void objective_grad(Check& c) {
    Doubles policy = normals(c, 32), reference = normals(c, 32);
    for (double& x : policy) x = std::fabs(x) + 0.1;
    for (Objective o : all_objectives()) {
        auto loss = [&] { return ObjectiveRun<double>(o, policy, reference).total(1); };
        ObjectiveRun<double> run(o, policy, reference);
        gradient(c, "losses", loss, policy, Doubles(run.out.begin(), run.out.begin() + 32));
    }
}

// ----------------------------------------------------------------------------
// optimizer and gradient norm

// AdamW and SGD against their formulas in double.
inline void adamw_test(Check& c) {
    size_t n = odd(c, 1, 3000);
    Doubles w = rounded<bf16>(normals(c, n)), m(n), v(n), reference = w;
    std::vector<float> wf = as<float>(w), mf(n), vf(n), master = wf, mb(n), vb(n), sgd = wf;
    std::vector<bf16> wb = as<bf16>(w);
    AdamW h = {0.01f, 0.9f, 0.95f, 1e-8f, 0.1f};
    TensorRow row = {.offset = 0, .n = n, .rate = 4};

    // Three steps, with the paper's formulas in double beside them.
    for (int64_t step = 1; step <= 3; step++) {
        Doubles g = rounded<float>(normals(c, n));
        std::vector<float> gf = as<float>(g);
        StepScale scale = {0, 0.5f, 1, step};
        adamw_update(wf.data(), nullptr, gf.data(), mf.data(), vf.data(), n, h, &scale, CPU);
        adamw_update(wb.data(), master.data(), gf.data(), mb.data(), vb.data(), n, h, &scale, CPU);
        for (size_t i = 0; i < n; i++) {
            double x = g[i] * 0.5;
            m[i] = double(h.beta1) * m[i] + (1 - double(h.beta1)) * x;
            v[i] = double(h.beta2) * v[i] + (1 - double(h.beta2)) * x * x;
            double mhat = m[i] / (1 - std::pow(double(h.beta1), double(step)));
            double vhat = v[i] / (1 - std::pow(double(h.beta2), double(step)));
            reference[i] -= double(h.lr) * (mhat / (std::sqrt(vhat) + double(h.eps)) +
                                            double(h.decay) * reference[i]);
        }
    }

    close(c, "float", wf, reference, tolerance<float>(9), 0.1); // relative to steps of 0.01
    close(c, "master", master, reference, tolerance<float>(9), 0.1);
    close(c, "bf16", wb, reference, tolerance<bf16>(1));
    close(c, "second moments", vf, v, tolerance<float>(9));
    std::vector<bf16> of_master = as<bf16>(as_double(master));
    expect(c, !memcmp(of_master.data(), wb.data(), n * 2),
           "the weight is not the master rounded to nearest");

    // A step that is not finite changes nothing.
    StepScale broken = {0, 1, 0, 4};
    std::vector<float> before = wf, g(n, 1.0f);
    adamw_update(wf.data(), nullptr, g.data(), mf.data(), vf.data(), n, h, &broken, CPU);
    sgd_update(wf.data(), nullptr, g.data(), &row, 1, 0.1f, 0.1f, &broken, CPU);
    expect(c, wf == before, "a step that is not finite wrote something");

    // SGD with weight decay, at four times the step's rate.
    StepScale scale = {0, 0.5f, 1, 1};
    sgd_update(sgd.data(), nullptr, g.data(), &row, 1, 0.1f, 0.2f, &scale, CPU);
    Doubles expected = w;
    for (double& x : expected) x -= 4 * double(0.1f) * (0.5 + double(0.2f) * x);
    close(c, "sgd", sgd, expected, tolerance<float>(1), 0.4); // the step is 0.2
}

// An update without a StepScale equals an update with {scale 1, finite, step}.
inline void adamw_without_scale_test(Check& c) {
    size_t n = odd(c, 1, 3000);
    Doubles w = rounded<bf16>(normals(c, n));
    std::vector<float> g = as<float>(normals(c, n)), m(n), v(n), m2(n), v2(n);
    std::vector<bf16> with = as<bf16>(w), without = with;
    AdamW h = {0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, true, 7};
    TensorRow row = {0, n};
    AdamWMemory<bf16> x = {with.data(), nullptr, g.data(), m.data(), v.data()};
    AdamWMemory<bf16> y = {without.data(), nullptr, g.data(), m2.data(), v2.data()};
    for (h.step = 1; h.step <= 3; h.step++) {
        StepScale scale = {0, 1, 1, h.step};
        adamw_update(x, &row, 1, h, &scale, CPU);
        adamw_update(y, &row, 1, h, nullptr, CPU);
    }
    close(c, "adamw", without, as_double(with), 0);
    expect(c, m == m2 && v == v2, "moments without a scale");

    StepScale scale = {0, 1, 1, 1};
    sgd_update(with.data(), nullptr, g.data(), &row, 1, 0.1f, 0.2f, &scale, CPU);
    sgd_update(without.data(), nullptr, g.data(), &row, 1, 0.1f, 0.2f, nullptr, CPU);
    close(c, "sgd", without, as_double(with), 0);
}

// The mean of weights against its formula in double, over the bend of min(decay, (1+s)/(10+s)),
// which for a decay of 0.5 lies between the 8th and the 9th step.
template <typename T> void ema_type_test(Check& c, Masters masters, bool exact) {
    size_t n = odd(c, 1, 3000);
    Doubles want(n);
    std::vector<acc_t<T>> mean(n);
    for (int64_t step = 1; step <= 12; step++) {
        // Draw weights, and split them as `masters` says.
        Doubles w = rounded<float>(normals(c, n));
        std::vector<T> weight = as<T>(w);
        std::vector<float> master = as<float>(w);
        std::vector<uint16_t> rest(n);
        if constexpr (type_of<T>() == Type::BF16)
            for (size_t i = 0; masters == Masters::REMAINDER && i < n; i++) {
                SplitFloat parts = split_float(master[i]);
                weight[i] = {parts.weight};
                rest[i] = parts.remainder;
            }
        if (!exact) w = as_double(weight); // what was rounded away is not kept

        // Move the mean, and its formula.
        const void* kept = masters == Masters::REMAINDER ? (void*)rest.data() : master.data();
        WeightMemory<T> x = {weight.data(), exact && sizeof(T) == 2 ? kept : nullptr, masters};
        StepScale scale = {0, 1, 1, step};
        ema_update(mean.data(), x, n, 0.5, &scale, CPU);
        double b = std::min(0.5, double(step) / double(9 + step));
        for (size_t i = 0; i < n; i++)
            want[i] = b * want[i] + (1 - b) * w[i];
    }
    close(c, "mean", mean, want, tolerance<acc_t<T>>(12));

    // A step that is not finite changes nothing.
    std::vector<acc_t<T>> before = mean;
    std::vector<T> ones = as<T>(Doubles(n, 1));
    StepScale broken = {0, 1, 0, 13};
    WeightMemory<T> others = {ones.data(), nullptr};
    ema_update(mean.data(), others, n, 0.5, &broken, CPU);
    expect(c, mean == before, "a step that is not finite moved the mean");
}

inline void ema_test(Check& c) {
    ema_type_test<double>(c, Masters::NONE, true);
    ema_type_test<float>(c, Masters::FLOAT, true);
    ema_type_test<bf16>(c, Masters::FLOAT, true);
    ema_type_test<bf16>(c, Masters::REMAINDER, true);
    ema_type_test<bf16>(c, Masters::NONE, false);
    ema_type_test<fp16>(c, Masters::FLOAT, true);
}

inline void ema_perf(Perf& p) {
    size_t n = size_t(32) << 20;
    std::vector<float> mean(n), master(n, 1e-3f);
    std::vector<bf16> w(n);
    StepScale scale = {0, 1, 1, 3};
    WeightMemory<bf16> x = {w.data(), master.data()};
    memory_rate(p, "32M parameters, from float masters", 12.0 * double(n),
                [&] { ema_update(mean.data(), x, n, 0.999, &scale, CPU); });
}

inline void adamw_perf(Perf& p) {
    size_t n = size_t(32) << 20;
    std::vector<float> master(n), g(n, 1e-3f), m(n), v(n);
    std::vector<bf16> w(n);
    StepScale scale = {0, 1, 1, 3};
    memory_rate(p, "bf16 with masters, 32M parameters", 30.0 * double(n), [&] {
        adamw_update(w.data(), master.data(), g.data(), m.data(), v.data(), n,
                     {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f}, &scale, CPU);
    });

    // One chunk of an offloaded optimizer (--offload optimizer,update): copy its gradient in, update,
    // and copy its weights out.
    size_t chunk = n / 2;
    std::vector<float> device_g(chunk, 1e-3f);
    std::vector<bf16> device_w(chunk);
    memory_rate(p, "bf16 where an offloaded chunk lies, with its copies", 42.0 * double(chunk),
                [&] {
                    memcpy(g.data(), device_g.data(), chunk * sizeof(float));
                    adamw_update(w.data(), master.data(), g.data(), m.data(), v.data(), chunk,
                                 {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f}, &scale, CPU);
                    memcpy(device_w.data(), w.data(), chunk * sizeof(bf16));
                });

    memory_rate(p, "float, 32M parameters", 28.0 * double(n), [&] {
        adamw_update(master.data(), nullptr, g.data(), m.data(), v.data(), n,
                     {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f}, &scale, CPU);
    });
}

// The norm, the scale that follows from it, and the kernels that move gradients.
inline void norm_of_gradients_test(Check& c) {
    size_t n = odd(c, 1, 20000), chunks = ceil_div(n, GRAD_NORM_CHUNK);
    Doubles g = rounded<float>(normals(c, n)), sums(chunks);
    std::vector<float> gf = as<float>(g);

    // A norm above the limit is clipped.
    StepScale scale = {0, 0, 0, 4};
    grad_squares(sums.data(), gf.data(), n, CPU);
    grad_norm_finish(&scale, sums.data(), chunks, 0.5f, CPU);
    double norm = std::sqrt(dot(g, g));
    close(c, "norm", Doubles{scale.norm}, Doubles{norm}, 1e-12);
    close(c, "scale", Doubles{scale.scale}, Doubles{std::min(1.0, 0.5 / norm)}, 1e-6);
    expect(c, scale.finite == 1 && scale.step == 5, "a finite step does not count");

    // No limit, and a norm below the limit.
    grad_norm_finish(&scale, sums.data(), chunks, 0.0f, CPU);
    expect(c, scale.scale == 1.0f, "clip 0 clips");
    grad_norm_finish(&scale, sums.data(), chunks, float(2 * norm), CPU);
    expect(c, scale.scale == 1.0f, "a small norm is clipped");

    // Gradients that carry a loss scale: the norm is the true one, and the scale
    // undoes the loss scale.
    StepScale scaled = {0, 0, 0, 4, {256, 0, 0, 0}};
    grad_norm_finish(&scaled, sums.data(), chunks, 0.5f, CPU, {.on = true});
    close(c, "norm", Doubles{scaled.norm}, Doubles{norm / 256}, 1e-12);
    close(c, "scale", Doubles{scaled.scale}, Doubles{std::min(1.0, 128 / norm) / 256}, 1e-6);

    // A gradient that is not finite ends the step.
    gf[n / 2] = c.random() % 2 ? NAN : INFINITY;
    int64_t steps = scale.step;
    grad_squares(sums.data(), gf.data(), n, CPU);
    grad_norm_finish(&scale, sums.data(), chunks, 0.5f, CPU);
    expect(c, scale.finite == 0 && scale.step == steps,
           "a gradient that is not finite goes unnoticed");

    // The sum of two gradients.
    std::vector<float> a = as<float>(g), b = a;
    add_gradients(a.data(), b.data(), n, CPU);
    close(c, "sum of two gradients", a, plus(g, g), 1e-7);

    // Gradients to 16 bits and back: rounded to nearest, and unchanged if they were bf16.
    std::vector<bf16> narrow(n);
    std::vector<float> wide(n);
    narrow_gradients(narrow.data(), b.data(), n, CPU);
    expect(c, as_double(narrow) == as_double(as<bf16>(g)), "gradients are not the nearest bf16");
    widen_gradients(wide.data(), narrow.data(), n, CPU);
    expect(c, as_double(wide) == as_double(narrow), "a widened gradient is another number");
}

// Gradients in packets of codes. Each rank's part is what a row of 128 elements in fp8 stands for,
// and the sum adds these in float, rank by rank.
inline void fp8_gradients_test(Check& c) {
    size_t d = odd(c, 2, 5), n = FP8_PACKET_ALIGN * odd(c, 1, 4), bytes = fp8_packet_bytes(n);
    std::vector<std::vector<float>> parts;
    for (size_t rank = 0; rank < d; rank++) {
        // Blocks have any magnitude, one is zero, and one has small elements beside a large one.
        parts.push_back(as<float>(normals(c, d * n)));
        for (size_t i = 0; i < d * n; i++)
            parts[rank][i] *= std::ldexp(1.0f, int(i / FP8_BLOCK * 37 % 200) - 100);
        std::fill_n(parts[rank].begin(), FP8_BLOCK, 0.0f);
        parts[rank][FP8_BLOCK] *= 0x1p15f;
    }

    // Every rank packs its part; rank q receives the q-th packet of each, and adds.
    std::vector<std::vector<uint8_t>> sent;
    for (auto& part : parts) {
        sent.emplace_back(d * bytes);
        fp8_pack_gradients(sent.back().data(), part.data(), d, n, CPU);
    }
    for (size_t q = 0; q < d; q++) {
        std::vector<uint8_t> received;
        for (auto& packets : sent)
            received.insert(received.end(), packets.begin() + q * bytes,
                            packets.begin() + (q + 1) * bytes);
        std::vector<float> got(n), want(n), value(n);
        fp8_sum_gradients(got.data(), received.data(), d, n, CPU);
        for (auto& part : parts) {
            fp8_quantise<e4m3>(value.data(), (float*)nullptr, nullptr, part.data() + q * n,
                               nullptr, n / FP8_BLOCK, FP8_BLOCK, Fp8Blocks::ROWS, CPU);
            for (size_t i = 0; i < n; i++)
                want[i] += value[i];
        }
        expect(c, got == want, "a sum of packets is not the sum of their values");
    }

    // A part that is not finite must not become a number.
    size_t at = c.random() % (d * n);
    parts[0][at] = c.random() % 2 ? NAN : INFINITY;
    fp8_pack_gradients(sent[0].data(), parts[0].data(), d, n, CPU);
    std::vector<float> sum(n);
    fp8_sum_gradients(sum.data(), sent[0].data() + at / n * bytes, 1, n, CPU);
    expect(c, std::isnan(sum[at % n]), "a gradient that is not finite becomes a number");
}

inline void norm_of_gradients_perf(Perf& p) {
    size_t n = size_t(32) << 20;
    std::vector<float> g(n, 1e-3f);
    std::vector<double> sums(ceil_div(n, GRAD_NORM_CHUNK));
    memory_rate(p, "32M gradients", 4.0 * double(n),
                [&] { grad_squares(sums.data(), g.data(), n, CPU); });
}

// ----------------------------------------------------------------------------

inline void add_simple_rows(std::vector<Row>& rows) {
    rows.push_back({"embedding", embedding_test, embedding_grad, embedding_perf});
    rows.push_back({"layernorm", [](Check& c) { norm_test(c, false); },
                    [](Check& c) { norm_grad(c, false); }, [](Perf& p) { norm_perf(p, false); }});
    rows.push_back({"rmsnorm", [](Check& c) { norm_test(c, true); },
                    [](Check& c) { norm_grad(c, true); }, [](Perf& p) { norm_perf(p, true); }});
    rows.push_back({"rope", rope_test, rope_grad, rope_perf});
    rows.push_back({"gelu, swiglu", activation_test, activation_grad, activation_perf});
    rows.push_back({"crossentropy", crossentropy_test, crossentropy_grad, crossentropy_perf});
    rows.push_back({"crossentropy in one call", crossentropy_one_call_test, nullptr, nullptr});
    rows.push_back({"objective", objective_test, objective_grad, nullptr});
    rows.push_back({"adamw, sgd", adamw_test, nullptr, adamw_perf});
    rows.push_back({"adamw, sgd without a scale", adamw_without_scale_test, nullptr, nullptr});
    rows.push_back({"ema", ema_test, nullptr, ema_perf});
    rows.push_back({"fp8 gradients", fp8_gradients_test, nullptr, nullptr});
    rows.push_back({"grad_norm", norm_of_gradients_test, nullptr, norm_of_gradients_perf});
}
