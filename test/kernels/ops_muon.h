// ops_muon.h - rows of the op table: Muon
#pragma once
#include "../../llmc/ops/muon.cuh"
#include "../harness/op_table.h"
#include "ops_simple.h"

// One matrix by Muon's iterations, in N with scratch of its own. Returns f x.
template <typename N> Doubles orthogonalised(const Doubles& g, size_t r, size_t c, const Muon& h) {
    typedef acc_t<N> A;
    std::vector<A> u = as<A>(g);
    MuonRoom<N> room;
    std::vector<unsigned char> memory(room.bind(nullptr, r, c) + 256);
    unsigned char* base = memory.data() + 256 - reinterpret_cast<uintptr_t>(memory.data()) % 256;
    room.bind(base, r, c);
    std::vector<unsigned char> scratch(muon_scratch_bytes<N>(r, c, CPU) + 64);
    Blas blas;
    blas_scratch(blas, scratch.data(), scratch.size());
    muon_orthogonalise(u.data(), r, c, h, room, blas, CPU);
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
    // The values as they are published, to their four digits.
    const double at[] = {1e-4, 1e-3, 0.01, 0.1, 0.3, 0.5};
    const double published[][6] = {{.0485, .4705, .6989, .7121, 1.0796, .7654},
                                   {.0493, .4750, 1.0180, 1.0190, .9962, .9859},
                                   {.0988, .8589, 1.0271, 1.0592, .9831, .9106},
                                   {.3930, 1, 1, 1, 1, 1}};
    Muon h;
    h.scale = MuonScale::UNIT;
    for (h.table = 0; h.table < 4; h.table++) {
        const NewtonSchulz& table = newton_schulz_tables()[size_t(h.table)];
        for (int i = 0; i < 6; i++) {
            double s = singular_value(table, at[i] * table.safety);
            expect(c, std::fabs(s - published[h.table][i]) < 6e-5, table.name);
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

            // eps is not part of the table, so its share of the norm is the error in double.
            Doubles got = orthogonalised<double>(x, r, n, h);
            close(c, "double", got, want, 2e-5);
            close(c, "float", orthogonalised<float>(x, r, n, h), want, 2e-4);

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
    h.table = 0;
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
    h.table = 1;
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

inline void add_muon_rows(std::vector<Row>& rows) {
    rows.push_back({"muon's matrices", muon_matrix_test, nullptr, nullptr});
    rows.push_back({"muon's update", muon_update_test, nullptr, nullptr});
}
