// op_table.h - the harness of the op table: random inputs, comparisons, finite differences, rates
//   A row of the table is an operator. test: float and bf16 against the same operator in double,
//   and known answers. grad: backward against central finite differences in double. perf: share
//   of the ceiling that was measured in the same run.
#pragma once
#include <chrono>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>
#include "../../llmc/ops/matmul.cuh"

using namespace llmc;

// One row's run: its random numbers, and how many of its checks failed.
struct Check {
    std::mt19937_64 random;
    const char* row = "";
    int failures = 0, checks = 0;
};

// The machine's ceilings.
struct Perf {
    double copy_bytes = 0;                    // a second, read plus written by a large copy
    double product_f32 = 0, product_bf16 = 0; // FLOP/s of a 1024^3 product
};

struct Row {
    const char* name;
    void (*test)(Check&);
    void (*grad)(Check&);
    void (*perf)(Perf&);
};

// ----------------------------------------------------------------------------
// inputs

// A random size between low and high, inclusive: mostly one that no tile divides.
inline size_t odd(Check& c, size_t low, size_t high) { return low + c.random() % (high - low + 1); }

// n normally distributed numbers.
inline std::vector<double> normals(Check& c, size_t n, double scale = 1) {
    std::normal_distribution<double> normal(0, scale);
    std::vector<double> x(n);
    for (double& v : x) v = normal(c.random);
    return x;
}

// n integers, uniform between low and high, inclusive.
inline std::vector<int> integers(Check& c, size_t n, int low, int high) {
    std::vector<int> x(n);
    for (int& v : x) v = low + int(c.random() % uint64_t(high - low + 1));
    return x;
}

template <typename T> std::vector<T> as(const std::vector<double>& x) {
    std::vector<T> y(x.size());
    for (size_t i = 0; i < x.size(); i++) y[i] = from_acc<T>(acc_t<T>(x[i]));
    return y;
}
template <typename T> std::vector<double> as_double(const std::vector<T>& x) {
    std::vector<double> y(x.size());
    for (size_t i = 0; i < x.size(); i++) y[i] = double(to_acc(x[i]));
    return y;
}
// Numbers that T holds exactly. Both sides of a comparison then read the same inputs.
template <typename T> std::vector<double> rounded(const std::vector<double>& x) {
    return as_double(as<T>(x));
}

// ----------------------------------------------------------------------------
// comparisons

// Count one check. The first five failures of a row are printed.
inline void expect(Check& c, bool good, const std::string& what) {
    c.checks++;
    if (good) return;
    c.failures++;
    if (c.failures <= 5) printf("  %s: %s\n", c.row, what.c_str());
}

inline double largest(const std::vector<double>& x) {
    double most = 0;
    for (double v : x) most = std::max(most, std::fabs(v));
    return most;
}

inline std::vector<double> magnitudes(std::vector<double> x) {
    for (double& v : x) v = std::fabs(v);
    return x;
}

// The product a b (M,N) in double, by definition.
inline std::vector<double> product(const std::vector<double>& a, const std::vector<double>& b,
                                   size_t M, size_t N, size_t K, Strides sa, Strides sb) {
    std::vector<double> out(M * N);
    for (size_t i = 0; i < M; i++)
        for (size_t k = 0; k < K; k++)
            for (size_t j = 0; j < N; j++)
                out[i * N + j] += a[i * sa.row + k * sa.column] * b[k * sb.row + j * sb.column];
    return out;
}

// The largest |got - want|, relative to max|want|, and its index in *at. Where large terms cancel,
// `terms` is their size and the error is relative to it. NaN counts as larger than any error.
template <typename T>
double largest_error(const std::vector<T>& got, const std::vector<double>& want, double terms,
                     size_t* at) {
    double most = std::max(terms, 1e-30);
    for (double w : want) most = std::max(most, std::isfinite(w) ? std::fabs(w) : 0);

    double worst = 0;
    for (size_t i = 0; i < want.size(); i++) {
        double g = double(to_acc(got[i]));
        double error = g == want[i] ? 0 : std::fabs(g - want[i]) / most;
        if (error <= worst) continue;
        worst = error;
        *at = i;
        if (std::isnan(error)) break;
    }
    return worst;
}

// Check that the largest error is within the tolerance.
template <typename T>
void close(Check& c, const char* what, const std::vector<T>& got, const std::vector<double>& want,
           double tolerance, double terms = 0) {
    if (got.size() != want.size()) return expect(c, false, std::string(what) + ": other lengths");
    size_t at = 0;
    double worst = largest_error(got, want, terms, &at);
    if (worst <= tolerance) return expect(c, true, what);
    char text[200];
    snprintf(text, sizeof(text),
             "%s[%zu] is %g, should be %g: off by %.1e of the largest, %.1e allowed", what, at,
             double(to_acc(got[at])), want[at], worst, tolerance);
    expect(c, false, text);
}

// The error allowed to a sum of `length` terms in float that is stored as T. Roundings of 2^-24
// each walk at random, so they grow with sqrt(length); 8 is a margin. exp and tanh are good to
// 3e-7. Each of `roundings` roundings to T adds 2^-8 for bf16, which has 8 significant bits, or
// 2^-11 for fp16, which has 11.
template <typename T> double tolerance(size_t length, int roundings = 1) {
    double f = 8 * 5.96e-8 * std::sqrt(double(length)) + 6e-7;
    switch (type_of<T>()) {
    case Type::BF16: return f + roundings * 1.01 / 256;
    case Type::F16: return f + roundings * 1.01 / 2048;
    case Type::F32:
    case Type::F64: break;
    }
    return f;
}

// Check dx against central differences of `loss` at up to 24 elements of x. Truncation is h^2/6
// times the third derivative, and rounding is eps |f| / h. The two balance near h = 1e-5, where
// both stay below 1e-7 of the loss and of the largest gradient.
inline void gradient(Check& c, const char* what, const std::function<double()>& loss,
                     std::vector<double>& x, const std::vector<double>& dx) {
    const double h = 1e-5;
    double most = 1e-30, size = std::fabs(loss());
    for (double d : dx) most = std::max(most, std::fabs(d));
    for (int k = 0; k < 24; k++) {
        size_t i = x.size() <= 24 ? size_t(k) : c.random() % x.size();
        if (i >= x.size()) break;

        // Move one element both ways, and put it back.
        double keep = x[i];
        x[i] = keep + h;
        double up = loss();
        x[i] = keep - h;
        double down = loss();
        x[i] = keep;

        // Hold the difference quotient against dx[i].
        double numeric = (up - down) / (2 * h);
        double error = std::fabs(numeric - dx[i]);
        char text[200];
        snprintf(text, sizeof(text), "d %s[%zu] is %.10g, finite differences say %.10g", what, i,
                 dx[i], numeric);
        expect(c, error <= 1e-6 * most + 1e-9 * std::max(size, 1.0), text);
    }
}

inline double dot(const std::vector<double>& a, const std::vector<double>& b) {
    double s = 0;
    for (size_t i = 0; i < a.size(); i++) s += a[i] * b[i];
    return s;
}
inline std::vector<double> plus(std::vector<double> a, const std::vector<double>& b) {
    for (size_t i = 0; i < a.size(); i++) a[i] += b[i];
    return a;
}

// ----------------------------------------------------------------------------
// rates

// The shortest of `runs` runs, in seconds.
inline double seconds_of(const std::function<void()>& f, int runs = 7) {
    double best = 1e30;
    for (int i = 0; i <= runs; i++) { // the first warms up
        auto start = std::chrono::steady_clock::now();
        f();
        double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        if (i > 0) best = std::min(best, s);
    }
    return best;
}

// Print an operator's bytes a second, and its share of a copy's.
inline void memory_rate(const Perf& p, const char* what, double bytes,
                        const std::function<void()>& f) {
    double rate = bytes / seconds_of(f);
    printf("  %-58s %8.1f GB/s  %5.1f%% of copy\n", what, rate / 1e9, 100 * rate / p.copy_bytes);
}

// Print a product's FLOP/s, and its share of a large product's.
inline void product_rate(const char* what, double ceiling, double flops,
                         const std::function<void()>& f) {
    double rate = flops / seconds_of(f, 4);
    printf("  %-58s %8.1f GFLOP/s  %5.1f%% of a 1024^3 product\n", what, rate / 1e9,
           100 * rate / ceiling);
}

// The bytes a second of a copy of 256 MiB by all threads: the ceiling for what only moves memory.
inline double copy_rate() {
    size_t n = size_t(32) << 20;
    std::vector<double> a(n, 1.0), b(n, 2.0);
    return 16.0 * double(n) / seconds_of([&] {
               #pragma omp parallel for simd
               for (size_t i = 0; i < n; i++) b[i] = a[i];
           });
}
