// casts.h - weights of fp8 products, cast once a step: where codes lie, and when they are old
//   A product casts W, or W^T, from bf16 (linear.cuh): micro-batches, recomputation and the pass
//   back would cast the same numbers again.
//   1. which   matrices of this rank's blocks. ZeRO-3 and offloaded weights have none: a copy that
//              stays would be what they save, so each of their products casts its own
//   2. where   CAST: one behind the other, for the whole run; 2 bytes an element, and scales
//   3. made    by the first product of a plan that reads a form: W, W^T, or the values of both
//   4. old     when a plan begins: an update, another recipe's scale or a file came between
//   A code depends on W and its scale alone, so the bits are those of a cast at each product; a
//   maximum that delayed scaling asks for counts nothing twice.
//   Cost: GPT-2's block, 4 micro-batches, each recomputed: 44 casts a step become 8 (4 of values).
#pragma once
#include "amaxes.h"
#include "linear.cuh"

namespace llmc {

// Whether the plan's blocks keep what they cast. Generation reads weights once a plan.
inline bool keeps_casts(const Plan& p, const Model& m) {
    bool whole = p.layout.zero < 3 && !p.layout.weights_away;
    return m.shape.fp8 != Fp8::NONE && m.shape.fp8_kept && whole && p.mode != Mode::GENERATE;
}

// f(parameter, at) for each matrix of this rank's blocks; returns the end of the last.
template <typename F>
size_t for_each_cast(const Plan& p, const Model& m, F f) {
    size_t at = 0;
    for (const Parameter& w : m.parameters) {
        if (w.matrix < 0 || !bucket_is_mine(p.layout, m, w.bucket)) continue;
        f(w, at);
        at += fp8_cast_bytes(w.local_rows(), w.local_cols());
    }
    return at;
}
inline size_t cast_bytes(const Plan& p, const Model& m) {
    return keeps_casts(p, m) ? for_each_cast(p, m, [](const Parameter&, size_t) {}) : 0;
}

// A block's products read scales and leave maxima; they cast weights, or find them cast.
template <typename X>
void access_fp8(X& x, const Plan& p, const Model& model) {
    access_amaxes(x, p, model);
    if (keeps_casts(p, model)) x.change({Kind::CAST});
}

// The places of a plan that begins, where nothing is cast yet; empty: nothing stays.
template <typename T, typename S>
std::vector<Fp8Cast> bind_casts(const Trainer<T, S>& t) {
    const Plan& p = t.plans[t.plan];
    auto* base = address<unsigned char>(t, {Kind::CAST});
    if (!base || !keeps_casts(p, t.model)) return {};
    std::vector<Fp8Cast> casts(size_t(t.model.matrices));
    for_each_cast(p, t.model, [&](const Parameter& w, size_t at) {
        casts[size_t(w.matrix)].home = base + at;
    });
    return casts;
}

// The matrices of all blocks as products of 8 bits see them.
struct Fp8Matrices {
    Fp8Late late = {};
    const Fp8Cast* casts = nullptr; // null: nothing stays
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
