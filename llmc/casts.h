// casts.h - weights of fp8 products, cast once a step: where codes lie, and when they are old
//   A product casts W, or W^T, from bf16 (linear.cuh). Without this file each micro-batch,
//   recomputation and backward pass would cast the same numbers again.
//   1. which   the matrices of this rank's blocks. ZeRO-3 and offloaded weights keep no casts: a
//              copy that stays would take the memory that they save, so each product casts again
//   2. where   in CAST, one after the other, for the whole run: 2 bytes an element, and scales
//   3. made    by the first product of a plan that reads a form: W, W^T, or the values of both
//   4. old     when a plan begins: an update, another recipe's scale or a file came between
//   A code depends only on W and its scale, so the bits are those of a cast at each product. The
//   maximum that delayed scaling asks for is the same too: it counts nothing twice.
//   Cost: GPT-2's block, 4 micro-batches, each recomputed: 44 casts a step become 8 (4 of values).
#pragma once
#include "amaxes.h"
#include "linear.cuh"

namespace llmc {

// Whether the plan's blocks keep their casts. Generation does not: it reads weights once a plan.
inline bool keeps_casts(const Plan& p, const Model& m) {
    bool whole = p.layout.zero < 3 && !p.layout.weights_away;
    return m.shape.fp8 != Fp8::NONE && m.shape.fp8_kept && whole && p.mode != Mode::GENERATE;
}

// Call f(parameter, at) for each matrix of this rank's blocks, with the byte at which its casts
// begin. Returns the end of the last one.
template <typename F>
size_t for_each_cast(const Plan& p, const Model& m, F f) {
    size_t at = 0;
    for (const Parameter& w : m.parameters) {
        if (w.matrix < 0 || !bucket_is_mine(p.layout, m, w.bucket))
            continue;
        f(w, at);
        at += fp8_cast_bytes(w.local_rows(), w.local_cols());
    }
    return at;
}
inline size_t cast_bytes(const Plan& p, const Model& m) {
    return keeps_casts(p, m) ? for_each_cast(p, m, [](const Parameter&, size_t) {}) : 0;
}

// Add the data that fp8 products touch: scales that they read, maxima that they leave, and the
// casts of weights, which they make or find made.
template <typename X>
void access_fp8(X& x, const Plan& p, const Model& model) {
    access_amaxes(x, p, model);
    if (keeps_casts(p, model))
        x.change({Kind::CAST});
}

// The places of a plan's casts, as the plan begins: nothing is cast yet. Empty: it keeps no casts.
template <typename T, typename S>
std::vector<Fp8Cast> bind_casts(const Trainer<T, S>& t) {
    const Plan& p = t.plans[t.plan];
    auto* base = address<unsigned char>(t, {Kind::CAST});
    if (!base || !keeps_casts(p, t.model))
        return {};
    std::vector<Fp8Cast> casts(size_t(t.model.matrices));
    for_each_cast(p, t.model, [&](const Parameter& w, size_t at) {
        casts[size_t(w.matrix)].home = base + at;
    });
    return casts;
}

// The scales and casts of all blocks' matrices, by the matrix's number.
struct Fp8Matrices {
    Fp8Late late = {};
    const Fp8Cast* casts = nullptr; // null: no casts are kept

    // Point a weight at the scales and the cast of its matrix.
    void point(Weight& w, size_t matrix) const {
        w.late = late.at(FP8_OPERANDS * matrix);
        w.cast = casts ? casts + matrix : nullptr;
    }
};
template <typename T, typename S>
Fp8Matrices fp8_matrices(const Trainer<T, S>& t) {
    return {late_scales(t), t.casts.empty() ? nullptr : t.casts.data()};
}

} // namespace llmc
