// mfu.h - model FLOPs utilisation: the share of the machine's matrix rate that the model's own
// arithmetic uses
//   FLOPs a token = 6 * parameters + 6 * L * NH*HS * T        (arXiv:2204.02311, with causal
//   attention counted once:
//   6 a parameter for forward and backward; attention's two products of T/2 keys on average,
//   forward and backward)
//   mfu = tokens a second * FLOPs a token / peak.  Recomputation does not count.
//   A CPU has no peak on its data sheet that its libraries reach: there it is the rate of one
//   1024^3 product in the
//   training precision, measured at the start of the run.
#pragma once
#include <chrono>
#include <vector>
#include "linear.cuh"
#include "model.h"

inline double flops_per_token(const Model& model, size_t T) {
    const Shape& s = model.shape;
    return 6.0 * double(parameter_count(model)) + 6.0 * double(s.L * s.NH * s.HS) * double(T);
}

inline double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// FLOP/s of a square product, the best of several
template <typename T> double measure_peak(Cpu where) {
    const size_t n = 1024;
    std::vector<T> a(n * n, from_acc<T>(1)), b(n * n, from_acc<T>(1)), c(n * n);
    Blas blas;
    std::vector<unsigned char> scratch(linear_scratch_bytes<T>(n, n, n, where));
    blas_scratch(blas, scratch.data(), scratch.size());
    Weight w = {b.data(), type_of<T>(), n, n, nullptr, nullptr};
    double best = 1e9;
    for (int i = 0; i < 6; i++) {
        double start = seconds_now();
        linear_forward(c.data(), a.data(), w, nullptr, (const T*)nullptr, n, blas, where);
        if (i > 0) best = std::min(best, seconds_now() - start);
    }
    return 2.0 * double(n * n * n) / best;
}
