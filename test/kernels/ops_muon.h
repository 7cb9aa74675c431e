// ops_muon.h - rows of the op table: Muon
#pragma once
#include <fstream>
#include <nlohmann/json.hpp>
#include "../../llmc/io/plan_flags.h"
#include "../../llmc/ops/muon.cuh"
#include "../harness/op_table.h"
#include "ops_simple.h"

// One matrix by Muon's iterations, in N with scratch of its own. Returns f x. v: NorMuon's.
template <typename N>
Doubles orthogonalised(const Doubles& g, size_t r, size_t c, const Muon& h,
                       acc_t<N>* v = nullptr, const StepScale* scale = nullptr) {
    typedef acc_t<N> A;
    std::vector<A> u = as<A>(g);
    MuonRoom<N> room;
    std::vector<unsigned char> memory(room.bind(nullptr, r, c) + 256);
    unsigned char* base = memory.data() + 256 - reinterpret_cast<uintptr_t>(memory.data()) % 256;
    room.bind(base, r, c);
    std::vector<unsigned char> scratch(muon_scratch_bytes<N>(r, c, CPU) + 64);
    Blas blas;
    blas_scratch(blas, scratch.data(), scratch.size());
    muon_orthogonalise(u.data(), r, c, h, room, blas, CPU, v, scale);
    return as_double(u);
}

// A singular value after a table's iterations.
inline double singular_value(const NewtonSchulz& table, double s) {
    s /= table.safety;
    for (auto [a, b, c] : table.steps) s = a * s + b * s * s * s + c * std::pow(s, 5);
    return s;
}

// Reflect x (r,c) along both sides: its singular values stay.
inline void reflect(Check& c, Doubles& x, size_t rows, size_t cols) {
    // Draw two unit vectors.
    auto unit = [&](size_t n) {
        Doubles v = normals(c, n);
        double norm = 0;
        for (double a : v) norm += a * a;
        for (double& a : v) a /= std::sqrt(norm);
        return v;
    };
    Doubles left = unit(rows), right = unit(cols);

    // Reflect columns, then rows.
    for (size_t j = 0; j < cols; j++) {
        double dot = 0;
        for (size_t i = 0; i < rows; i++) dot += left[i] * x[i * cols + j];
        for (size_t i = 0; i < rows; i++) x[i * cols + j] -= 2 * dot * left[i];
    }
    for (size_t i = 0; i < rows; i++) {
        double dot = 0;
        for (size_t j = 0; j < cols; j++) dot += right[j] * x[i * cols + j];
        for (size_t j = 0; j < cols; j++) x[i * cols + j] -= 2 * dot * right[j];
    }
}

// Singular values become what the published tables give them, in any basis, for matrices and their
// transposes; a factor of the gradient changes nothing.
inline void muon_matrix_test(Check& c) {
    // The values as they are published, to their four digits; aol's are computed from its table as
    // it is published.
    const double at[] = {1e-4, 1e-3, 0.01, 0.1, 0.3, 0.5};
    const double published[][6] = {{.0485, .4705, .6989, .7121, 1.0796, .7654},
                                   {.0493, .4750, 1.0180, 1.0190, .9962, .9859},
                                   {.0988, .8589, 1.0271, 1.0592, .9831, .9106},
                                   {.5747, 1, 1, 1, 1, 1},
                                   {.01041, .10387, .86588, 1.00388, .99252, 1.00749},
                                   {.3930, 1, 1, 1, 1, 1}};
    Muon h;
    h.scale = unit_scale;
    for (size_t number = 0; number < 6; number++) {
        const NewtonSchulz& table = newton_schulz_tables()[number];
        h.table = &table;
        for (int i = 0; i < 6; i++) {
            double s = singular_value(table, at[i] * table.safety);
            expect(c, std::fabs(s - published[number][i]) < 6e-5, table.name);
        }

        // A matrix of these values and one more, which makes the norm 1: diagonal, then reflected.
        for (auto [rows, cols] : {std::pair{7, 7}, {9, 7}, {7, 12}}) {
            size_t r = size_t(rows), n = size_t(cols);
            Doubles x(r * n), want(r * n);
            double left = 1;
            for (size_t i = 0; i < 7; i++) {
                double s = i < 6 ? at[i] : std::sqrt(left);
                left -= s * s;
                x[i * n + i] = s;
                want[i * n + i] = std::sqrt(double(r) / double(n)) * singular_value(table, s);
            }
            auto seed = c.random;
            reflect(c, x, r, n);
            c.random = seed;
            reflect(c, want, r, n);

            // eps is not part of the table, so its share of the norm is the error in double. Small
            // values grow up to 6000 times, and with them float's rounding.
            Doubles got = orthogonalised<double>(x, r, n, h);
            close(c, "double", got, want, 2e-5);
            double grows = std::max(1e3, published[number][0] / at[0]);
            close(c, "float", orthogonalised<float>(x, r, n, h), want, 2e-7 * grows);

            // A factor, and the transpose.
            Doubles larger = x, turned(r * n), back(r * n);
            for (double& a : larger) a *= 1024;
            close(c, "a factor", orthogonalised<double>(larger, r, n, h), got, 2e-5);
            for (size_t i = 0; i < r * n; i++) turned[i % n * r + i / n] = x[i];
            turned = orthogonalised<double>(turned, n, r, h);
            for (size_t i = 0; i < r * n; i++)
                back[i] = turned[i % n * r + i / n] * double(r) / double(n);
            close(c, "the transpose", back, got, 1e-9);
        }
    }

    // A zero gradient stays zero, and a matrix of rank 1 keeps its rank.
    h.table = &SIMPLE;
    for (double a : orthogonalised<float>(Doubles(15), 3, 5, h)) expect(c, a == 0, "zero");
    Doubles u = normals(c, 5), v = normals(c, 4), one(20);
    for (size_t i = 0; i < 20; i++) one[i] = u[i / 4] * v[i % 4];
    Doubles x = orthogonalised<double>(one, 5, 4, h);
    for (size_t i = 0; i < 4; i++)
        for (size_t j = 0; j < 3; j++)
        {
            const double* a = &x[i * 4 + j];
            expect(c, std::fabs(a[0] * a[5] - a[1] * a[4]) < 1e-9, "rank 1");
        }

    // bf16: the same to its few digits.
    h.table = &newton_schulz_tables()[1];
    Doubles g = normals(c, 48 * 32);
    Doubles wide = orthogonalised<double>(g, 48, 32, h);
    close(c, "bf16", orthogonalised<bf16>(g, 48, 32, h), wide, 0.1);
}

// Momentum and update against their formulas in double.
inline void muon_update_test(Check& c) {
    for (bool nesterov : {true, false})
        for (bool cautious : {false, true}) {
            size_t n = odd(c, 1, 1500);
            Muon h;
            h.nesterov = nesterov, h.cautious = cautious;
            h.first_momentum = 0.85f, h.momentum = 0.95f, h.momentum_steps = 4, h.decay = 0.2f;
            Doubles w = normals(c, n), m(n), expected = w;
            std::vector<float> wf = as<float>(w), mf(n);
            TensorRow row = {0, n};
            for (int64_t step = 1; step <= 6; step++) {
                Doubles g = rounded<float>(normals(c, n)), u(n);
                std::vector<float> gf = as<float>(g);
                StepScale scale = {0, 0.5f, 1, step};
                scale.given.lr = 0.1f;
                muon_momentum<float>(gf.data(), mf.data(), States::FLOAT, &row, 1, h, &scale, CPU);

                // Warm-up of the momentum: 0.85, 0.875, ... 0.95.
                double mu = 0.85 + 0.1 * std::min(1.0, double(step - 1) / 4);
                for (size_t i = 0; i < n; i++) {
                    m[i] = mu * m[i] + (1 - mu) * g[i] * 0.5;
                    u[i] = nesterov ? mu * m[i] + (1 - mu) * g[i] * 0.5 : m[i];
                    bool decays = !cautious || u[i] * expected[i] >= 0;
                    expected[i] -= 0.1 * (u[i] + (decays ? 0.2 : 0) * expected[i]);
                }
                close(c, "u", gf, u, tolerance<float>(9), 0.1);
                AdamWMemory<float> x = {wf.data(), nullptr, gf.data(), nullptr, nullptr};
                muon_update(x, &row, 1, h, &scale, CPU);
            }
            close(c, "weights", wf, expected, tolerance<float>(30));
            close(c, "momentum", mf, m, tolerance<float>(9), 0.1);
        }
}

// The matrices that muon_golden.py gives to torch.optim.Muon.
inline Doubles golden_numbers(size_t n, size_t step) {
    Doubles x(n);
    for (size_t i = 0; i < n; i++)
        x[i] = (double((i * i * 37 + i * 101 + step * 7919) % 2039) - 1019) / 1024;
    return x;
}

// Three steps of one case, in T. Returns the weights.
template <typename T> Doubles golden_steps(const nlohmann::json& golden, float eps) {
    // Read the settings.
    size_t r = golden["rows"].get<size_t>(), n = golden["cols"].get<size_t>();
    std::string scaled = golden["scale"].get<std::string>();
    Muon h;
    h.momentum = h.first_momentum = golden["momentum"].get<float>();
    h.decay = golden["decay"].get<float>(), h.beta2 = golden["normuon"].get<float>();
    h.nesterov = golden["nesterov"].get<bool>();
    h.scale = scaled == "shape" ? shape_scale : scaled == "rms" ? rms_scale : unit_scale;
    h.eps = eps;
    h.muoneq = golden.value("muoneq", false), h.plus = golden.value("muon+", false);

    // Step.
    std::vector<T> w = as<T>(golden_numbers(r * n, 0)), m(r * n), v(std::max(r, n));
    TensorRow row = {0, r * n};
    for (size_t step = 1; step <= 3; step++) {
        std::vector<T> g = as<T>(golden_numbers(r * n, step));
        for (size_t i = 0; i < n; i++) g[i] *= golden.value("first row", T(1));
        StepScale scale = {0, 1, 1, int64_t(step)};
        scale.given.lr = golden["lr"].get<float>();
        muon_momentum<T>(g.data(), m.data(), States::FLOAT, &row, 1, h, &scale, CPU);
        T* second = h.beta2 > 0 ? v.data() : nullptr;
        g = as<T>(orthogonalised<T>(as_double(g), r, n, h, second, &scale));
        AdamWMemory<T> x = {w.data(), nullptr, g.data(), nullptr, nullptr};
        muon_update(x, &row, 1, h, &scale, CPU);
    }
    return as_double(w);
}

// torch.optim.Muon's own steps in float64, and NorMuon's by its paper's formula. Rounding grows
// at most as 3.4445^5 = 485, the slope of five iterations at 0, and a step is 1/32 of it; in
// float there is eps too, 1e-7 of a norm of about 3.
inline void muon_golden_test(Check& c) {
    std::ifstream file(std::string(REPO_ROOT) + "/dev/golden/muon.json");
    nlohmann::json golden = nlohmann::json::parse(file);
    expect(c, golden["cases"].size() == 13, "cases");
    for (const nlohmann::json& one : golden["cases"]) {
        std::string text = one.dump().substr(0, 150);
        Doubles want = one["weights"].get<Doubles>();
        close(c, text.c_str(), golden_steps<double>(one, 0), want, 485 * 1.1e-16 * 3);
        close(c, text.c_str(), golden_steps<float>(one, 1e-7f), want, 485 * 6e-8 * 3 / 8);
    }
}

// NorMuon skips a step that is not finite, and keeps a zero.
inline void normuon_test(Check& c) {
    Muon h;
    Doubles g = normals(c, 12 * 5);
    std::vector<float> v(12, 0.25f), before = v;
    StepScale scale = {0, 1, 0, 1};
    orthogonalised<float>(g, 12, 5, h, v.data(), &scale);
    expect(c, v == before, "a step that is not finite");
    scale.finite = 1;
    for (double x : orthogonalised<float>(Doubles(60), 12, 5, h, v.data(), &scale))
        expect(c, x == 0, "zero");
    close(c, "v decays", v, Doubles(12, 0.25 * 0.95), 1e-6);

    // Then a mean square joins it: of f x, which it does not change.
    Doubles x = orthogonalised<float>(g, 12, 5, h), want(12, 0.25 * 0.95 * 0.95);
    orthogonalised<float>(g, 12, 5, h, v.data(), &scale);
    for (size_t i = 0; i < 60; i++) want[i / 5] += 0.05 * x[i] * x[i] / 5;
    close(c, "v", v, want, 1e-6);
}

inline void add_muon_rows(std::vector<Row>& rows) {
    rows.push_back({"muon's matrices", muon_matrix_test, nullptr, nullptr});
    rows.push_back({"muon's update", muon_update_test, nullptr, nullptr});
    rows.push_back({"muon's golden steps", muon_golden_test, nullptr, nullptr});
    rows.push_back({"muon's second moments", normuon_test, nullptr, nullptr});
}
