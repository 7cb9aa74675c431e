// overflow.h - fp16: the loss scale that the command line wants, and steps that overflow
//   A step whose gradients overflow is skipped: no weight changes, Adam does not count it, and the
//   next has a smaller scale (loss_scale.cuh). The schedule of the learning rate and the data go
//   on: the step counts as one of --steps.
#pragma once
#include "run.h"

namespace llmc {

// Skipped steps in a row that end a run: the forward pass itself overflows, and no scale helps.
constexpr int MOST_SKIPPED = 64;

// The rules of three trainers, with their own defaults.
struct LossScalingRow {
    const char* name;
    LossScaling numbers;
};
inline const LossScalingRow LOSS_SCALINGS[] = {
    {"megatron", {.on = true, .least = 1, .window = 1000, .hysteresis = 2}},
    {"pytorch", {.on = true, .least = 0, .window = 2000, .hysteresis = 1}},
    {"deepspeed", {.on = true, .late = true, .least = 1, .window = 1000, .hysteresis = 2}},
};

// Return "" or why a scale cannot be `value`: only a power of two changes no bit.
inline std::string check_power_of_two(const char* flag, double value) {
    int exponent = std::ilogb(value);
    if (value == std::ldexp(1, exponent))
        return "";
    return concat(flag, " ", value, " is no power of two: try ", std::ldexp(1, exponent), " or ",
                  std::ldexp(2, exponent));
}

// Take a fixed --loss-scale: "" or what is wrong with it.
inline std::string fix_loss_scale(const std::string& text, LossScaling* scaling) {
    double value = 0;
    std::string wrong = parse_number(text, 1, 1 << 30, true, &value);
    if (!wrong.empty())
        return "--loss-scale " + wrong + ", or dynamic";
    scaling->dynamic = false;
    scaling->start = float(value);
    return check_power_of_two("--loss-scale", value);
}

// Take the least scale, which the scale may fall to and never rises to.
inline std::string choose_least(double least, LossScaling* scaling) {
    if (least < 0) return "";
    if (least > scaling->start)
        return concat("--loss-scale-min ", least, " is above the first scale, ", scaling->start);
    scaling->least = float(least);
    return least == 0 ? "" : check_power_of_two("--loss-scale-min", least);
}

// Choose the run's loss scaling: "" or what is wrong.
inline std::string choose_loss_scaling(Run& run) {
    const Config& c = run.config;
    const char* numbers[] = {"loss-scale-rule", "loss-scale-start", "loss-scale-window",
                             "loss-scale-hysteresis", "loss-scale-min"};
    bool fp16 = c.precision == "fp16", dynamic = c.loss_scale == "dynamic";
    if (!fp16 && given(c, "loss-scale"))
        return "--loss-scale is for fp16 alone: give --precision fp16";
    for (const char* name : numbers)
        if (given(c, name) && (!fp16 || !dynamic))
            return concat("--", name, " moves fp16's loss scale: give --precision fp16 and ",
                          "--loss-scale dynamic");
    if (!fp16) return "";

    // A rule brings its numbers; flags change them.
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

// Whether a step overflowed and the run goes on. It says so, and ends a run that never gets out of
// overflow. All ranks have the same scale, so all of them do the same.
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
