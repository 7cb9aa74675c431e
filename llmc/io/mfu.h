// mfu.h - model FLOPs utilisation: the share of the machine's rate that the model's arithmetic uses
//   FLOPs a token = 6 * parameters + 6 * L * NH*HS * T        (arXiv:2204.02311)
//     6 for each parameter that the token meets; of the experts, those that it goes through. A
//     product takes 2 forward and 4 backward. A frozen matrix beside adapters takes 2 backward: its
//     own gradient is not computed; in blocks below the lowest adapter none (recompute.h).
//     Attention's two products see T/2 keys on average.
//   mfu = tokens a second * FLOPs a token / peak.  Recomputation does not count.
//   A GPU's peak is its data sheet's, dense. A CPU's data sheet names a peak that its libraries do
//   not reach; there, and on a GPU that is not in the table, the peak is one square product in the
//   training precision, measured at the start of the run.
//   --explain inverts the formula: how long a run takes at an assumed utilisation.
#pragma once
#include <string>
#include "../comm/rank_status.h"
#include "../model.h"
#include "../ops/cuda_common.h"
#include "../ops/element_type.h"
#include "../ops/gpu.h"
#include "../ops/linear.cuh"
#include "../ops/matmul.cuh"
#include "../ops/memory.h"
#include "../ops/types.h"
#include "../recompute.h"
#include "../comm/text.h"
#include "machine.h"

namespace llmc {

// The number of a parameter's elements that one token goes through: in a stack of E experts K of E.
inline size_t active_elements(const Model& m, const Parameter& p) {
    if (p.is_value_table()) return p.cols();
    return p.stack > 1 ? p.file_elements() / p.stack * m.shape.experts.K : p.file_elements();
}
inline size_t active_parameters(const Model& m) {
    size_t n = 0;
    for (const Parameter& p : m.parameters)
        n += active_elements(m, p);
    return n;
}

// Channels of all heads in one of attention's two products. Values may be narrower than keys, so
// this is the mean of both products.
inline double attention_channels(const Shape& s) {
    size_t values = s.latent.HS_v ? s.latent.HS_v : s.HS;
    return double(s.NH * (s.HS + values)) / 2;
}

// FLOPs of training on one token, forward and backward. Each active parameter takes six: two
// forward, four backward. A frozen one takes two less. Attention adds 6 L C T with a causal mask.
// Blocks below the lowest adapter have no backward pass, so two thirds of theirs are left out.
inline double flops_per_token(const Model& model, size_t T) {
    const Shape& s = model.shape;
    int lowest = lowest_trained(model);
    double idle = std::clamp(lowest - 1, 0, int(s.L)); // blocks
    double passes = 6.0 * double(s.L) - 4 * idle;
    double attention = passes * attention_channels(s) * double(T);

    // Frozen elements, the base of adapters, have no gradient. In blocks below the lowest adapter
    // none is passed on either.
    size_t unasked = 0;
    for (const Parameter& p : model.parameters) {
        bool frozen = !model.buckets[p.bucket].trainable;
        bool below = model.is_block(p.layer) && p.layer < lowest;
        unasked += (size_t(frozen) + size_t(below)) * active_elements(model, p);
    }
    return 6.0 * double(active_parameters(model)) - 2.0 * double(unasked) + attention;
}

// Hours that a run takes on GPUs. flops: of the whole run; peak: FLOP/s of one GPU; utilisation:
// from 0 to 1.
inline double run_hours(double flops, double peak, double utilisation, int gpus) {
    return flops / (peak * utilisation * gpus) / 3600;
}

// The rate of which mfu is a share.
struct Peak {
    double flops;     // FLOP/s
    std::string says; // the source of the number
};

// Measure the product of n x n matrices, of fewer where memory is short: the best of the runs that
// fit into 50 ms, five at most, after one to warm up.
template <typename T, typename S>
Peak measure_peak(size_t n, S where) {
    // Allocate separately: the run's one allocation is planned to the byte.
    size_t matrix = 0, scratch_bytes = 0;
    auto room_bytes = [&] {
        matrix = round_up(n * n * sizeof(T), 256);
        scratch_bytes = linear_scratch_bytes<T>(n, n, n, where);
        return 3 * matrix + scratch_bytes;
    };
    void* room = device_memory(room_bytes(), where);
    for (; !room && n > 1024; room = device_memory(room_bytes(), where))
        n /= 2;
    LLMC_USER_CHECK(room, "no memory to measure a product of %zu: the model leaves none", n);

    // Lay out the matrices.
    unsigned char* bytes = static_cast<unsigned char*>(room);
    T* out = reinterpret_cast<T*>(bytes);              // (n,n)
    T* weight = reinterpret_cast<T*>(bytes + matrix);  // (n,n)
    T* inp = reinterpret_cast<T*>(bytes + 2 * matrix); // (n,n)
    void* scratch = bytes + 3 * matrix;
    fill_noise(weight, n * n, where);
    fill_noise(inp, n * n, where);

    // Time the trainer's own product, so that training can reach the rate.
    Blas blas;
    blas_scratch(blas, scratch, scratch_bytes);
    Weight w = {weight, type_of<T>(), n, n, nullptr, nullptr};
    double best = 1e9, spent = 0; // seconds
    for (int i = 0; i < 2 || (i < 6 && spent < 0.05); i++) {
        wait_for(where);
        double start = clock_seconds();
        linear_forward(out, inp, w, nullptr, (const T*)nullptr, n, blas, where);
        wait_for(where);
        double seconds = clock_seconds() - start;
        spent += seconds;
        if (i > 0)
            best = std::min(best, seconds);
    }

    // Free the memory before training begins.
    device_free(room, 3 * matrix + scratch_bytes, where);
    return {2.0 * double(n * n * n) / best, concat("a ", n, "^3 product measured now")};
}

// The peak of this machine. A known GPU's is its data sheet's; any other is measured. A slow CPU
// takes a small product, which is as fast, so that no run waits long for its first step.
template <typename T>
Peak machine_peak(Cpu where) {
    Peak small = measure_peak<T>(512, where);
    return small.flops < 4e11 ? small : measure_peak<T>(1024, where);
}

#if LLMC_KERNELS
template <typename T>
Peak machine_peak(cudaStream_t stream) {
    std::string device = device_name(stream);
    if (const Machine* m = machine_of_device(device))
        return {m->peak(sizeof(T)), device + "'s data sheet"};
    return measure_peak<T>(8192, stream); // the host cannot time a smaller one
}
#endif

} // namespace llmc
