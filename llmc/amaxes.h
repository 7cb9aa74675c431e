// amaxes.h - delayed scaling of a run: where maxima and scales lie, and how ranks share them
//   AMAX has three slots for each matrix of each block (fp8_delayed.cuh), of the whole model on
//   every rank: a rank fills those of its layers and pieces, and the others stay 0. After the last
//   backward pass one all-reduce brings the largest together, over tp, dp and stages alike. So
//   every rank has the same scales, whatever the layout, and a checkpoint needs them once.
//   That message has 4 bytes a slot; it is on the critical path, after the norm's.
#pragma once
#include "action.h"
#include "model.h"

namespace llmc {

template <typename T, typename S> struct Trainer;

// Slots: the same on all ranks; none where products scale otherwise.
inline size_t fp8_slots(const Model& m) {
    return m.shape.fp8 == Fp8::DELAYED ? FP8_OPERANDS * size_t(m.matrices) : 0;
}

// A block's products have their scales, and in training leave their maxima. X is an Access.
template <typename X>
void access_amaxes(X& x, const Plan& p, const Model& model) {
    if (model.shape.fp8 != Fp8::DELAYED) return;
    Data amaxes = {Kind::AMAX};
    p.mode == Mode::TRAIN ? x.change(amaxes) : x.read(amaxes);
}

// The state of all matrices.
template <typename T, typename S>
Fp8History fp8_history(const Trainer<T, S>& t) {
    void* home = address<unsigned char>(t, {Kind::AMAX});
    if (!home) return {}; // products scale otherwise, or the plan has no blocks here
    return fp8_history_at(home, fp8_slots(t.model), t.model.shape.fp8_rule);
}

// The slots that products read and fill. An evaluation leaves no maxima.
template <typename T, typename S>
Fp8Late late_scales(const Trainer<T, S>& t) {
    if (t.model.shape.fp8 != Fp8::DELAYED)
        return {};
    // Training notes what it sees; the scales are those of the last step.
    Fp8History h = fp8_history(t);
    bool trains = t.plans[t.plan].mode == Mode::TRAIN;
    return {h.scale, trains ? h.amax : nullptr};
}

// After the last backward pass: the maxima of all ranks, and the next step's scales.
template <typename T, typename S>
void take_amaxes(Trainer<T, S>& t) {
    Fp8History h = fp8_history(t);
    if (!h.slots) return;
    // Words are in the order of magnitudes, a NaN above all.
    int* words = reinterpret_cast<int*>(h.amax);
    all_reduce_max(t.comms.world, words, h.slots, t.ctx.where);
    fp8_next_scales(h, t.model.shape.fp8_rule, t.ctx.where);
}

} // namespace llmc
