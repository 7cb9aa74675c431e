// loss_scale.cuh - dynamic loss scaling: small gradients must not vanish in fp16 - arXiv:1710.03740
//   fp16 ends at 65504 and loses what lies below 6e-8, and most gradients of activations are small.
//   The head multiplies its gradient by a scale, every other gradient comes out that much larger,
//   and the norm divides by it again. A step whose gradients overflow is skipped, and the scale
//   falls; after a while without overflow it grows. It is a power of two: no bit of a gradient
//   changes by it, but where fp16 overflows or underflows.
//
//   rule        grows after (clean steps)      falls at an overflow
//   megatron    window, and so again           the hysteresis-th, and each until it grows
//   pytorch     window, and so again           each
//   deepspeed   window + 1, then each window   the hysteresis-th, and each until it grows
//
//   The state lies on the device, in StepScale: no step waits for the host, and as all ranks have
//   the same norm, all have the same scale.
//   To copy: this file, step_scale.h and types.h.
#pragma once
#include "step_scale.h"

namespace llmc {

// The numbers of a run; on = false: gradients are as they are.
struct LossScaling {
    bool on = false;
    bool dynamic = true;   // false: the scale stays, and overflows are skipped
    bool late = false;     // deepspeed: the first growth takes a step more
    float start = 65536;
    float least = 1;       // the scale falls no lower
    int window = 1000;     // steps without overflow
    int hysteresis = 2;    // overflows that are allowed before it falls
};

inline LossScale begin_loss_scale(const LossScaling& rule) { return {rule.start, 0, 0, 0}; }

LLMC_HD inline void grow_loss_scale(LossScale* s, const LossScaling& rule) {
    // DeepSpeed's count goes on over growth, and looks before it adds this step.
    bool full = rule.late ? s->clean > 0 && s->clean % rule.window == 0
                          : s->clean + 1 >= rule.window;
    s->clean = full && !rule.late ? 0 : s->clean + 1;
    if (!full) return;
    // Never to infinity: a scale of 2^127 stays.
    if (s->now < 1.7e38f)
        s->now *= 2;
    s->spent = 0;
}

LLMC_HD inline void lower_loss_scale(LossScale* s, const LossScaling& rule) {
    s->clean = 0;
    if (s->spent + 1 < rule.hysteresis) {
        s->spent++;
        return;
    }
    float half = s->now / 2;
    s->now = half > rule.least ? half : rule.least;
}

// After a step: the scale of the next.
LLMC_HD inline void next_loss_scale(LossScale* s, const LossScaling& rule, bool finite) {
    s->skipped = finite ? 0 : s->skipped + 1;
    if (!rule.dynamic) return;
    finite ? grow_loss_scale(s, rule) : lower_loss_scale(s, rule);
}

} // namespace llmc
