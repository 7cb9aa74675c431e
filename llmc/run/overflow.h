// overflow.h - fp16: the loss scale that the command line wants, and steps that overflow
//   A step whose gradients overflow is skipped: no weight changes, Adam does not count the step,
//   and the next one has a smaller scale (loss_scale.cuh). The data and the schedule of the
//   learning rate go on: a skipped step counts as one of --steps.
#pragma once
#include "../io/config.h"
#include "../ops/loss_scale.cuh"
#include "../ops/step_scale.h"
#include "../ops/types.h"
#include "../text.h"
#include "run.h"

namespace llmc {

// The number of skipped steps in a row that ends a run: by then the forward pass itself overflows,
// and no scale of the loss helps.
constexpr int MOST_SKIPPED = 64;

// The rules by which three trainers move the scale, each with its own defaults.
struct LossScalingRow {
    const char* name;
    LossScaling numbers;
};
inline const LossScalingRow LOSS_SCALINGS[] = {
    {"megatron", {.on = true, .least = 1, .window = 1000, .hysteresis = 2}},
    {"pytorch", {.on = true, .least = 0, .window = 2000, .hysteresis = 1}},
    {"deepspeed", {.on = true, .late = true, .least = 1, .window = 1000, .hysteresis = 2}},
};

// Check that a scale is a power of two: "" or what to try. Multiplying by a power of two changes
// exponents only, so it rounds nothing.
inline std::string check_power_of_two(const char* flag, double value) {
    int exponent = std::ilogb(value);
    if (value == std::ldexp(1, exponent))
        return "";
    return concat(flag, " ", value, " is no power of two: try ", std::ldexp(1, exponent), " or ",
                  std::ldexp(2, exponent));
}

// Set a fixed scale from the text of --loss-scale: "" or what is wrong with it.
inline std::string fix_loss_scale(const std::string& text, LossScaling* scaling) {
    double value = 0;
    std::string wrong = parse_number(text, 1, 1 << 30, true, &value);
    if (!wrong.empty())
        return "--loss-scale " + wrong + ", or dynamic";
    scaling->dynamic = false;
    scaling->start = float(value);
    return check_power_of_two("--loss-scale", value);
}

// Set the lowest scale: "" or what is wrong. The scale may fall to it, so it must not be above the
// first scale; 0 sets no bound.
inline std::string choose_least(double least, LossScaling* scaling) {
    if (least < 0) return "";
    if (least > scaling->start)
        return concat("--loss-scale-min ", least, " is above the first scale, ", scaling->start);
    scaling->least = float(least);
    return least == 0 ? "" : check_power_of_two("--loss-scale-min", least);
}

// Choose the run's loss scaling: "" or what is wrong. Only fp16 has one.
inline std::string choose_loss_scaling(Run& run) {
    // Refuse flags that would have no effect.
    const Config& c = run.config;
    const char* numbers[] = {"loss-scale-rule", "loss-scale-start", "loss-scale-window",
                             "loss-scale-hysteresis", "loss-scale-min"};
    bool fp16 = c.precision == "fp16";
    bool dynamic = c.loss_scale == "dynamic";
    if (!fp16 && was_given(c, "loss-scale"))
        return "--loss-scale is for fp16 alone: give --precision fp16";
    for (const char* name : numbers)
        if (was_given(c, name) && (!fp16 || !dynamic))
            return concat("--", name, " moves fp16's loss scale: give --precision fp16 and ",
                          "--loss-scale dynamic");
    if (!fp16) return "";

    // Take the rule's numbers, then those of other flags.
    for (const LossScalingRow& row : LOSS_SCALINGS)
        if (c.loss_scale_rule == row.name)
            run.loss_scaling = row.numbers;
    LossScaling& s = run.loss_scaling;
    if (c.loss_scale_window)
        s.window = c.loss_scale_window;
    if (c.loss_scale_hysteresis)
        s.hysteresis = c.loss_scale_hysteresis;
    if (!dynamic)
        return fix_loss_scale(c.loss_scale, &s);
    if (c.loss_scale_start)
        s.start = float(c.loss_scale_start);
    std::string wrong = check_power_of_two("--loss-scale-start", s.start);
    return wrong.empty() ? choose_least(c.loss_scale_min, &s) : wrong;
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
