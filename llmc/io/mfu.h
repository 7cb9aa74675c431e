// mfu.h - model FLOPs utilisation: the share of the machine's rate that the model's arithmetic uses
//   FLOPs a token = 6 * parameters + 6 * L * NH*HS * T        (arXiv:2204.02311)
//     6 a parameter that the token meets, of experts those that it goes through: a product takes 2
//     forward and 4 backward, of which a frozen matrix beside adapters needs 2: nobody asks for its
//     gradient. Attention's two products see T/2 keys on average.
//   mfu = tokens a second * FLOPs a token / peak.  Recomputation does not count.
//   A GPU's peak is its data sheet's, dense. A CPU has none that its libraries reach: there, and on
//   a GPU that the table does not know, the peak is one square product in the training precision,
//   measured at the start of the run.
//   --explain turns the formula round: how long a run takes at an assumed utilisation.
#pragma once
#include <string>
#include "../comm/group.h"
#include "../linear.cuh"
#include "../buckets.h"
#include "../machine.h"
#include "../text.h"

namespace llmc {

// Parameters without a gradient: the base of adapters.
inline size_t frozen_parameters(const Model& model) {
    size_t n = 0;
    for (const Parameter& p : model.parameters)
        n += model.buckets[p.bucket].trainable ? 0 : p.file_elements();
    return n;
}

// FLOPs of training on one token, forward and backward.
// Six a parameter: two forward, four backward. Attention adds 6 L C T with a causal mask.
inline double flops_per_token(const Model& model, size_t T) {
    const Shape& s = model.shape;
    double attention = 6.0 * double(s.L) * attention_channels(s) * double(T);
    double unasked = 2.0 * double(frozen_parameters(model));
    return 6.0 * double(active_parameters(model)) - unasked + attention;
}

// Hours of so many FLOPs on GPUs of this peak.
// flops: of the whole run; peak: FLOP/s of one GPU; utilisation: 0 to 1.
inline double run_hours(double flops, double peak, double utilisation, int gpus) {
    return flops / (peak * utilisation * gpus) / 3600;
}

// The rate that mfu is a share of.
struct Peak {
    double flops;     // a second
    std::string says; // where the number is from
};

// Measure a product of n x n matrices: the best of five, after one that warms up.
template <typename T, typename S>
Peak measure_peak(size_t n, S where) {
    // Take memory of its own: the run's one allocation is planned to the byte.
    size_t bytes = n * n * sizeof(T);
    size_t scratch_bytes = linear_scratch_bytes<T>(n, n, n, where);

    auto take = [&](size_t size) {
        void* p = device_memory(size, where);
        LLMC_USER_CHECK(p, "no memory to measure a product of %zu: the model leaves none", n);
        return static_cast<T*>(p);
    };
    T* out = take(bytes);    // (n,n)
    T* weight = take(bytes); // (n,n)
    T* inp = take(bytes);    // (n,n)
    T* scratch = take(scratch_bytes);

    // Time the trainer's own product, so that the rate is one that training can reach.
    Blas blas;
    blas_scratch(blas, scratch, scratch_bytes);
    Weight w = {weight, type_of<T>(), n, n, nullptr, nullptr};
    double best = 1e9; // seconds
    for (int i = 0; i < 6; i++) {
        wait_for(where);
        double start = clock_seconds();
        linear_forward(out, inp, w, nullptr, (const T*)nullptr, n, blas, where);
        wait_for(where);
        if (i > 0)
            best = std::min(best, clock_seconds() - start);
    }

    // Give the memory back before training begins.
    for (T* p : {out, weight, inp})
        device_free(p, bytes, where);
    device_free(scratch, scratch_bytes, where);
    return {2.0 * double(n * n * n) / best, concat("a ", n, "^3 product measured now")};
}

// The rate of a GPU comes from its data sheet; everything else is measured.
template <typename T>
Peak machine_peak(Cpu where) { return measure_peak<T>(1024, where); }

#if LLMC_KERNELS
template <typename T>
Peak machine_peak(cudaStream_t stream) {
    std::string device = device_name(stream);
    if (const Machine* m = machine_of_device(device))
        return {m->peak(sizeof(T)), device + "'s data sheet"};
    return measure_peak<T>(1024, stream);
}
#endif

} // namespace llmc
