// predict.h - what --machine adds to --explain: a step's time there, its parts, tokens/s, mfu
//   The simulator computes the time, for the plans that would run. test_simulator says how far it
//   is from published step times, and docs/planning.md has its table. Ratios between layouts are
//   closer than the times themselves.
//   A part is the mean over pipeline ranks, so the parts add up to the step.
//   The end of a run compares this time with its own steps' median, so that a few slow steps do not
//   count; the first step is left out, because it does some work once for all.
#pragma once
#include "../action.h"
#include "../io/explain.h"
#include "../io/mfu.h"
#include "../io/timeline.h"
#include "../layout.h"
#include "../model.h"
#include "../plan.h"
#include "../streams.h"
#include "../text.h"
#include "cost.h"
#include "layer_cost.h"
#include "../io/machine.h"
#include "simulator.h"

namespace llmc {

// A predicted step: the printed text, and a trace to draw.
struct Prediction {
    std::string text;
    Trace trace; // [pipeline rank]
    double seconds;
};

// The times of layers and updates as a trace. The gaps are messages and waiting.
inline Trace trace_of(const StepTime& step, const std::vector<Plan>& plans, const Model& model) {
    Trace trace(plans.size());
    // Leave collectives out: they run beside layers, and their boxes would hide the layers'.
    for (size_t r = 0; r < plans.size(); r++)
        for (size_t i = 0; i < plans[r].actions.size(); i++) {
            const Action& a = plans[r].actions[i];
            const ActionTimes& t = step.ranks[r].of[i];
            if (queue_of(a.op) == Queue::COMPUTE && t.end > t.met)
                trace[r].push_back({action_text(a, model), t.met, t.end});
        }
    return trace;
}

// Write a line for each part that takes time, with its share as a bar.
inline std::string parts_text(const StepTime& step) {
    std::string text;
    for (const TimePart& p : time_parts()) {
        double seconds = step.parts.*p.part;
        double share = seconds / step.seconds;
        // Leave out a part that this layout does not have.
        if (seconds <= 0) continue;
        char line[96];
        snprintf(line, sizeof(line), "  %-24s %10.2f ms %5.1f%%", p.name,
                 seconds * 1e3, 100 * share);
        std::string bar = bar_text(share);
        text += line + (bar.empty() ? "" : "  " + bar) + "\n";
    }
    return text;
}

// Predict a step. tokens: of a step, over all ranks. before: time before it, not in the trace.
inline Prediction predict_step(const Layout& layout, const Model& model,
                               const PlanOptions& options, const CostModel& cost, double tokens,
                               const Times& before = {}) {
    // Time the plans that a run with these flags would execute.
    std::vector<Plan> plans = make_plans(layout, model, options);
    StepTime step = simulate_step(plans, model, action_cost(cost, model));
    check_ends(step);
    add_before(step, before);

    // Compute mfu as a run prints it, against the data sheet.
    double cards = layout.world();
    double rate = tokens / step.seconds;
    double flops = flops_per_token(model, options.T) * rate;
    double peak = cost.machine.peak(cost.element), mfu = flops / (peak * cards);
    bool slow = peak < 1e12; // a processor's
    char line[160];
    snprintf(line, sizeof(line),
             "predicted on %s: %.2f ms a step | %s tok/s, %s a card | mfu %.1f%% of %.4g %s\n",
             cost.machine.name.c_str(), step.seconds * 1e3, count_text(rate).c_str(),
             count_text(rate / cards).c_str(), 100 * mfu, peak / (slow ? 1e9 : 1e12),
             slow ? "GFLOP/s" : "TFLOP/s");
    return {line + parts_text(step), trace_of(step, plans, model), step.seconds};
}

// The middle one of some numbers, of which there is at least one.
inline double median_of(std::vector<double> numbers) {
    auto middle = numbers.begin() + numbers.size() / 2;
    std::nth_element(numbers.begin(), middle, numbers.end());
    return *middle;
}

// "predicted on FILE: 79.0 ms a step | measured 81.2 ms, the median of 9 steps | error -2.7%".
inline std::string predicted_text(const std::string& machine, double seconds,
                                  const std::vector<double>& steps) {
    double measured = median_of(steps);
    double error = 100 * (seconds / measured - 1); // percent of the measured time
    const char* words = steps.size() > 1 ? "steps" : "step";

    char line[160];
    snprintf(line, sizeof(line),
             ": %.2f ms a step | measured %.2f ms, the median of %zu %s | error %+.1f%%\n",
             1e3 * seconds, 1e3 * measured, steps.size(), words, error);
    return "predicted on " + machine + line;
}

} // namespace llmc
