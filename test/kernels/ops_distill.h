// ops_distill.h - rows of the op table: distillation against its definition
#pragma once
#include "../../llmc/ops/distill.cuh"
#include "../harness/op_table.h"

using namespace llmc;

// A batch of both models' logits.
struct DistillInputs {
    size_t N, V, Vp;
    std::vector<double> student, teacher; // (N,Vp)
    std::vector<int> targets;             // (N)
};
inline DistillInputs distill_inputs(Check& c, size_t N, size_t V, size_t Vp, double size) {
    DistillInputs x = {N, V, Vp, rounded<bf16>(normals(c, N * Vp, size)),
                       rounded<bf16>(normals(c, N * Vp, size)), integers(c, N, -1, int(V) - 1)};
    x.targets[0] = int(V) - 1;

    // Padding must not be looked at.
    for (size_t n = 0; n < N; n++)
        for (size_t v = V; v < Vp; v++)
            x.student[n * Vp + v] = x.teacher[n * Vp + v] = 1000;
    return x;
}

// The operator in T: the vocabulary whole, or columns [starts[k], starts[k + 1]) as ranks hold them.
template <typename T> struct DistillRun {
    std::vector<acc_t<T>> losses;
    std::vector<T> dlogits; // (N,Vp)
    DistillRun(const DistillInputs& x, Distillation d, double scale, std::vector<size_t> starts = {},
               float softcap = 0)
        : losses(x.N), dlogits(x.N * x.Vp) {
        if (starts.empty()) starts = {0, x.V};
        size_t shards = starts.size() - 1;
        std::vector<std::vector<T>> students(shards), teachers(shards);
        std::vector<std::vector<acc_t<T>>> maxima(shards), sums(shards);
        std::vector<DistillRows<T>> rows(shards);

        // Cut the columns; a whole vocabulary keeps its padding.
        for (size_t k = 0; k < shards; k++) {
            size_t V = starts[k + 1] - starts[k], width = shards > 1 ? V : x.Vp;
            for (size_t n = 0; n < x.N; n++)
                for (size_t v = 0; v < width; v++) {
                    size_t i = n * x.Vp + starts[k] + v;
                    students[k].push_back(from_acc<T>(acc_t<T>(x.student[i])));
                    teachers[k].push_back(from_acc<T>(acc_t<T>(x.teacher[i])));
                }
            maxima[k].resize(2 * x.N);
            sums[k].resize(DISTILL_SUMS * x.N);
            rows[k] = {students[k].data(), teachers[k].data(), x.targets.data(), maxima[k].data(),
                       sums[k].data(), x.N, V, width, starts[k]};
        }

        // Reduce over the shards, as ranks do.
        auto reduce = [&](auto& all, auto join) {
            for (size_t k = 1; k < shards; k++)
                for (size_t i = 0; i < all[0].size(); i++)
                    all[0][i] = join(all[0][i], all[k][i]);
            for (size_t k = 1; k < shards; k++)
                std::copy(all[0].begin(), all[0].end(), all[k].begin());
        };
        for (auto& r : rows) distill_max(r, Cpu{});
        reduce(maxima, [](auto a, auto b) { return std::max(a, b); });
        for (auto& r : rows) distill_sums(r, d, Cpu{});
        reduce(sums, [](auto a, auto b) { return a + b; });

        // Losses and gradients.
        distill_loss(losses.data(), rows[0], d, Cpu{});
        for (size_t k = 0; k < shards; k++) {
            distill_backward(rows[k], d, {scale, nullptr, softcap}, Cpu{});
            for (size_t n = 0; n < x.N; n++)
                for (size_t v = 0; v < rows[k].Vp; v++)
                    dlogits[n * x.Vp + starts[k] + v] = students[k][n * rows[k].Vp + v];
        }
    }
};

// The loss by its definition: both distributions written out, in double.
inline std::vector<double> distill_definition(const DistillInputs& x, Distillation d) {
    std::vector<double> losses(x.N);
    auto softmax = [&](const std::vector<double>& logits, size_t n, double tau) {
        const double* l = logits.data() + n * x.Vp;
        double most = *std::max_element(l, l + x.V), sum = 0;
        std::vector<double> p(x.V);
        for (size_t v = 0; v < x.V; v++) sum += p[v] = std::exp((l[v] - most) / tau);
        for (double& y : p) y /= sum;
        return p;
    };

    // Sum over the vocabulary.
    for (size_t n = 0; n < x.N; n++) {
        if (x.targets[n] < 0) continue;
        double tau = d.temperature, divergence = 0;
        std::vector<double> plain = softmax(x.student, n, 1), q = softmax(x.student, n, tau);
        std::vector<double> p = softmax(x.teacher, n, tau);
        for (size_t v = 0; v < x.V; v++)
            if (p[v] > 0) divergence += p[v] * std::log(p[v] / q[v]);
        losses[n] = (1 - d.share) * -std::log(plain[size_t(x.targets[n])]) +
                    d.share * tau * tau * divergence;
    }
    return losses;
}

inline void distill_test(Check& c) {
    for (size_t V : {size_t(1), size_t(2), odd(c, 3, 300), size_t(2000)})
        for (Distillation d : {Distillation{0.5, 1}, {1, 2}, {0.3, 4}, {0.9, 0.5}, {0, 1}}) {
            DistillInputs x = distill_inputs(c, odd(c, 1, 9), V, V + odd(c, 0, 9), 2);
            DistillRun<double> run(x, d, 0.1);
            DistillRun<float> f(x, d, 0.1);
            DistillRun<bf16> b(x, d, 0.1);

            // The definition takes logarithms of quotients, which are exact to 1e-12 of tau^2
            // times differences of logits.
            double terms = 20 * (1 + d.temperature);
            close(c, "losses", run.losses, distill_definition(x, d), 1e-12, terms);
            close(c, "losses float", f.losses, run.losses, tolerance<float>(V), terms);
            close(c, "losses bf16", b.losses, run.losses, tolerance<float>(V), terms);
            double most = 0.1 * (1 - d.share + d.share * d.temperature);
            close(c, "dlogits float", f.dlogits, run.dlogits, tolerance<float>(V), most);
            close(c, "dlogits bf16", b.dlogits, run.dlogits, tolerance<bf16>(V), most);

            // Padding and ignored rows have no gradient.
            for (size_t n = 0; n < x.N; n++)
                for (size_t v = x.targets[n] < 0 ? 0 : V; v < x.Vp; v++)
                    expect(c, run.dlogits[n * x.Vp + v] == 0, "padding has a gradient");

            // Three uneven shards are the whole.
            if (V < 4) continue;
            DistillRun<double> cut(x, d, 0.1, {0, V / 4, V / 2, V});
            close(c, "losses of shards", cut.losses, run.losses, 1e-12, terms);
            close(c, "dlogits of shards", cut.dlogits, run.dlogits, 1e-12, most);
        }

    // A teacher that says what the student says: no divergence and no gradient, exactly.
    DistillInputs same = distill_inputs(c, 7, 301, 310, 3);
    same.teacher = same.student;
    DistillRun<float> none(same, {1, 2}, 0.1);
    for (float x : none.losses) expect(c, x == 0, "a student that agrees has a loss");
    for (float x : none.dlogits) expect(c, x == 0, "a student that agrees has a gradient");

    // Tokens that the teacher rules out count nothing, also where the student does.
    DistillInputs out = distill_inputs(c, 3, 40, 40, 2);
    for (size_t n = 0; n < 3; n++) out.teacher[n * 40 + 5] = -INFINITY;
    DistillRun<double> ruled(out, {1, 2}, 0.1);
    close(c, "ruled out", ruled.losses, distill_definition(out, {1, 2}), 1e-12, 60);
}

// Finite differences of the loss in double, with and without a softcap.
inline void distill_grad(Check& c) {
    for (Distillation d : {Distillation{0.5, 1}, {1, 3}, {0.25, 0.7}}) {
        DistillInputs x = distill_inputs(c, 4, 7, 9, 1);
        x.targets = {3, -1, 0, 6};
        auto total = [&](const DistillInputs& at) {
            double sum = 0;
            for (double loss : DistillRun<double>(at, d, 0.3).losses) sum += 0.3 * loss;
            return sum;
        };
        gradient(c, "logits", [&] { return total(x); }, x.student,
                 DistillRun<double>(x, d, 0.3).dlogits);

        // A softcap: y = cap tanh(raw / cap), and the gradient is to raw.
        const float cap = 2;
        std::vector<double> raw = x.student;
        auto capped = [&] {
            DistillInputs y = x;
            for (size_t i = 0; i < raw.size(); i++) y.student[i] = cap * std::tanh(raw[i] / cap);
            return y;
        };
        std::vector<double> d_raw = DistillRun<double>(capped(), d, 0.3, {}, cap).dlogits;
        gradient(c, "logits before a cap", [&] { return total(capped()); }, raw, d_raw);
    }
}

inline void distill_perf(Perf& p) {
    size_t N = 64, V = 50257, Vp = 50304;
    std::vector<float> student(N * Vp, 0.5f), teacher(N * Vp, 0.25f), maxima(2 * N);
    std::vector<float> sums(DISTILL_SUMS * N), losses(N);
    std::vector<int> targets(N, 3);
    DistillRows<float> x = {student.data(), teacher.data(), targets.data(), maxima.data(),
                            sums.data(), N, V, Vp, 0};
    memory_rate(p, "float (64,50257)", 7.0 * 4 * double(N * V), [&] {
        distill_max(x, Cpu{});
        distill_sums(x, {}, Cpu{});
        distill_loss(losses.data(), x, {}, Cpu{});
        distill_backward(x, {}, 0.1, Cpu{});
    });
}

inline void add_distill_rows(std::vector<Row>& rows) {
    rows.push_back({"distill", distill_test, distill_grad, distill_perf});
}
