// mfu.h - model FLOPs utilisation: the share of the machine's rate that the model's arithmetic uses
//   FLOPs a token = 6 * parameters + 6 * L * NH*HS * T        (arXiv:2204.02311, with causal attention
//   counted once: 6 a parameter for forward and backward; attention's two products of T/2 keys on
//   average, forward and backward)
//   mfu = tokens a second * FLOPs a token / peak.  Recomputation does not count.
//   A GPU's peak is its data sheet's, dense. A CPU has none that its libraries reach: there, and for
//   a GPU that the table does not know, it is the rate of one square product in the training
//   precision, measured at the start of the run.
//   The other way round, --explain says how long a run would take at a utilisation that is assumed.
#pragma once
#include <chrono>
#include <string>
#include "linear.cuh"
#include "model.h"

inline double flops_per_token(const Model& model, size_t T) {
    const Shape& s = model.shape;
    return 6.0 * double(parameter_count(model)) + 6.0 * double(s.L * s.NH * s.HS) * double(T);
}

// TFLOP/s of dense products, from NVIDIA's data sheets: 16-bit on tensor cores, float outside them
struct DataSheet {
    const char* name;
    double half, single;
};
inline const DataSheet* data_sheet(const std::string& device) {
    static const DataSheet known[] = {{"H200", 989, 67},       {"H100 PCIe", 756, 51},
                                      {"H100 NVL", 835, 60},   {"H100", 989, 67},
                                      {"A100", 312, 19.5},     {"L40S", 362, 91.6},
                                      {"RTX 4090", 165, 82.6}, {"RTX 3090", 71, 35.6}};
    for (const DataSheet& k : known)
        if (device.find(k.name) != std::string::npos) return &k;
    return nullptr;
}

inline double run_hours(double flops, double peak, double utilisation, int gpus) {
    return flops / (peak * utilisation * gpus) / 3600;
}

inline double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

struct Peak {
    double flops;     // a second
    std::string says; // where the number is from
};

// A square product, the best of several.
template <typename T, typename S> Peak measure_peak(size_t n, S where) {
    Blas blas;
    size_t bytes = n * n * sizeof(T), scratch = linear_scratch_bytes<T>(n, n, n, where);
    auto take = [&](size_t size) {
        void* p = device_memory(size, where);
        USER_CHECK(p, "no memory to measure a product of %zu: the model leaves none", n);
        return static_cast<T*>(p);
    };
    T *a = take(bytes), *b = take(bytes), *c = take(bytes), *room = take(scratch);
    blas_scratch(blas, room, scratch);
    Weight w = {b, type_of<T>(), n, n, nullptr, nullptr};
    double best = 1e9;
    for (int i = 0; i < 6; i++) {
        wait_for(where);
        double start = seconds_now();
        linear_forward(c, a, w, nullptr, (const T*)nullptr, n, blas, where);
        wait_for(where);
        if (i > 0) best = std::min(best, seconds_now() - start);
    }
    for (T* p : {a, b, c}) device_free(p, bytes, where);
    device_free(room, scratch, where);
    std::string size = std::to_string(n);
    return {2.0 * double(n * n * n) / best, "a " + size + "^3 product measured now"};
}

template <typename T> Peak machine_peak(Cpu where) { return measure_peak<T>(1024, where); }

#if KERNELS
template <typename T> Peak machine_peak(cudaStream_t stream) {
    std::string device = device_name(stream);
    if (const DataSheet* k = data_sheet(device))
        return {(sizeof(T) == 2 ? k->half : k->single) * 1e12, device + "'s data sheet"};
    return measure_peak<T>(1024, stream);
}
#endif
