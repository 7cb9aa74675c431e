// step_scale.h - the state of an optimizer's step: written by the norm, read by the optimizer
//   To copy: this file and types.h.
#pragma once
#include "types.h"

namespace llmc {

// The state of fp16's loss scale. Zeros are no state: begin_loss_scale() makes the first.
struct LossScale {
    float now;   // of the step that comes
    int clean;   // steps without overflow since the last one, or since it grew
    int spent;   // of the hysteresis
    int skipped; // steps in a row
};

// The host's numbers for a step. They lie in memory, beside the norm, and are no arguments of a
// launch, because a CUDA graph replays its launches with the same arguments.
struct StepNumbers {
    double target_weight = 0; // 1 / valid targets: the loss is their mean
    float lr = -1;            // below 0: use the optimizer's own settings
};

// The state of a step: written by the norm, read by the optimizer. It stays on the gradients'
// device, so that no step waits for the host.
struct StepScale {
    double norm;
    float scale;  // gradients are multiplied by it
    int finite;   // 0: the optimizer writes nothing
    int64_t step; // optimizer steps done, this one included
    LossScale loss = {}; // fp16: the scale of the next step
    // AdamW's 1 / (1 - beta^step), or 0: each thread of AdamW computes its own.
    double correct1 = 0, correct2 = 0;
    StepNumbers given = {}; // written by the host before the step
};

// base^n by repeated squaring, with the same bits on CPU and GPU.
LLMC_HD inline double power(double base, int64_t n) {
    double x = 1;
    for (; n > 0; n /= 2, base *= base)
        if (n % 2) x *= base;
    return x;
}

// AdamW's factor 1 / (1 - beta^step) that corrects a moment's bias.
LLMC_HD inline double bias_correction(float beta, int64_t step) {
    return 1 / (1 - power(double(beta), step));
}

} // namespace llmc
