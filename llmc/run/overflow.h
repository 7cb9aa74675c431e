// overflow.h - fp16: the loss scale that the command line wants, and steps that overflow
//   A step whose gradients overflow is skipped: no weight changes, Adam does not count the step,
//   and the next one has a smaller scale (loss_scale.cuh). The data and the schedule of the
//   learning rate go on: a skipped step counts as one of --steps.
#pragma once
#include "../io/config.h"
#include "../ops/grad_norm.cuh"
#include "../ops/loss_scale.cuh"
#include "../ops/types.h"
#include "../text.h"
#include "run.h"

namespace llmc {

// The number of skipped steps in a row that ends a run: by then the forward pass itself overflows,
// and no scale of the loss helps.
constexpr int MOST_SKIPPED = 64;

// Check that a scale is a power of two: "" or what to try. Multiplying by a power of two changes
// exponents only, so it rounds nothing.
inline std::string check_power_of_two(double value) {
    int exponent = std::ilogb(value);
    if (value == std::ldexp(1, exponent))
        return "";
    return concat("--loss-scale ", value, " is no power of two: try ", std::ldexp(1, exponent),
                  " or ", std::ldexp(2, exponent));
}

// Set a fixed scale from the text of --loss-scale: "" or what is wrong with it.
inline std::string fix_loss_scale(const std::string& text, LossScaling* scaling) {
    double value = 0;
    std::string wrong = parse_number(text, 1, 1 << 30, true, &value);
    if (!wrong.empty())
        return "--loss-scale " + wrong + ", or dynamic";
    scaling->dynamic = false;
    scaling->start = float(value);
    return check_power_of_two(value);
}

// Choose the run's loss scaling, Megatron-LM's where --loss-scale does not fix it: "" or what is
// wrong. Only fp16 has one.
inline std::string choose_loss_scaling(Run& run) {
    const Config& c = run.config;
    run.loss_scaling.on = c.precision == "fp16";
    if (!run.loss_scaling.on && was_given(c, "loss-scale"))
        return "--loss-scale is for fp16 alone: give --precision fp16";
    bool fixed = run.loss_scaling.on && c.loss_scale != "dynamic";
    return fixed ? fix_loss_scale(c.loss_scale, &run.loss_scaling) : "";
}

// Whether a step was skipped because it overflowed; the user gets a note. Too many skipped steps in
// a row end the run. All ranks have the same scale, so all of them decide the same.
inline bool is_skipped(Run& run, const StepScale& scale) {
    if (!run.loss_scaling.on || scale.finite)
        return false;
    if (scale.loss.skipped >= MOST_SKIPPED)
        or_die_on_all_ranks(
            run, concat("step ", run.step + 1, ": ", MOST_SKIPPED,
                        " steps in a row overflow fp16, the last at a loss scale of ",
                        scale.loss.now, run.loss_scaling.dynamic ? "" : ", which is fixed",
                        ": take --precision bf16, or a smaller --lr or --loss-scale"));
    note(run, concat("step ", run.step + 1, ": gradients overflow fp16: the step is skipped, the ",
                     "next has a loss scale of ", scale.loss.now));
    return true;
}

} // namespace llmc
