// predict.h - what --machine adds to --explain: a step's time there, its parts, tokens/s, mfu
//   The simulator computes the time, for the plans that would run. test_simulator says how far it
//   is from published step times, and docs/planning.md has its table. Ratios between layouts are
//   closer than the times themselves.
//   A part is the mean over pipeline ranks, so the parts add up to the step.
//   The end of a run compares this time with its own steps' median, so that a few slow steps do not
//   count; the first step is left out, because it does some work once for all.
//   What runs before each step:
//   distill  the teacher evaluates the step's batch, all micro-batches in one plan (../teacher.h).
//            Its second product, in the student's head, is the student's time (layer_cost.h)
//   kto      the weights as they are evaluate a mismatched window for each window of the batch, a
//            run of the evaluation plan for each micro-batch (extra/kto.h)
//   grpo     a rollout (on_policy.h), which serves --updates steps: a step has its share of it
//     read      each prompt, once for all answers to it: T rows of a generation's plan
//     sample    --slots answers at once, a run for each further token: a row of each slot. A run
//               reads all weights, and each slot's cached keys and values
//     evaluate  the answers by the policy that sampled and by the first one, where --updates and
//               --beta want them (reference_policy.h): an evaluation's plan for each micro-batch
//   All are plans, so the simulator times them as it times a step. Other preferences compare with
//   log p that was evaluated before the first step (reference_policy.h).
//   The step begins when all ranks are through: a stage that is done early does not start ahead.
//   Sampling has a bound: an answer has --answer-tokens tokens and a prompt the rest of --seq.
//   Answers that end earlier, and shorter prompts, take less. Left out are the host's picks from a
//   row of logits, rewards, and the exchange of starting weights.
#pragma once
#include "../action.h"
#include "../family.h"
#include "../io/config.h"
#include "../io/explain.h"
#include "../io/machine.h"
#include "../io/mfu.h"
#include "../io/plan_flags.h"
#include "../io/timeline.h"
#include "../layout.h"
#include "../model.h"
#include "../ops/objective.cuh"
#include "../ops/types.h"
#include "../plan.h"
#include "../streams.h"
#include "../comm/text.h"
#include "cost.h"
#include "layer_cost.h"
#include "simulator.h"

namespace llmc {

// ----------------------------------------------------------------------------
// what runs before a step

// Runs before each step: of which model, by which plan, how often.
struct BeforeStep {
    Shape shape;
    PlanOptions options;
    bool teacher = false;
    double times = 1;

    bool samples() const { return options.mode == Mode::GENERATE; }
};

// Return a rollout's runs for a step: its prompts and its answers, then what is evaluated.
inline std::vector<BeforeStep> rollout_runs(const Config& c, const PlanOptions& train,
                                            const Shape& model) {
    // Share out the prompts among data-parallel ranks, as sample_answers() does.
    std::vector<BeforeStep> runs;
    PlanOptions generate = rollout_options(c, train);
    double share = 1.0 / c.updates; // of a rollout
    size_t group = size_t(c.group);
    size_t prompts = size_t(c.batch_tokens / c.seq) / group;
    if (answers_are_shared(c))
        prompts = ceil_div(prompts, size_t(c.dp));
    double rounds = double(ceil_div(prompts * group, generate.B));
    int most = std::min(c.answer_tokens, c.seq); // a window ends longer answers

    // Read the prompts, one at a time: their answers stand together.
    PlanOptions o = generate;
    o.B = 1;
    o.T = size_t(std::max(1, c.seq - most));
    o.cache = 0;
    runs.push_back({model, o, false, share * double(prompts)});

    // Sample. The prompt's last row gives the first token. A row sees the prompt, and half of its
    // answer on average.
    o.B = generate.B;
    o.T = 1;
    o.cache = size_t(c.seq - most / 2);
    runs.push_back({model, o, false, share * rounds * (most - 1)});

    // Evaluate.
    double policies = int(c.updates > 1) + int(keeps_start(c));
    if (policies > 0)
        runs.push_back({model, evaluation_of(train), false,
                        share * policies * train.micro_batches});
    return runs;
}

// Return all that comes before the steps of a training plan.
inline std::vector<BeforeStep> before_steps(const Config& c, const PlanOptions& train,
                                            const Shape& model, const Shape& teacher) {
    if (has_rollouts(c)) return rollout_runs(c, train, model);
    LossKind kind = train.objective.kind;
    if (kind == LossKind::DISTILL)
        return {{teacher, teacher_options(train), true}};
    if (kind != LossKind::KTO) return {};
    return {{model, evaluation_of(train), false, double(train.micro_batches)}};
}

// Return the layout of such runs, given the step's, but for a teacher's stages.
inline Layout before_layout(const BeforeStep& before, const Layout& layout) {
    if (before.teacher) return teacher_layout(layout);
    if (!before.samples()) return layout;

    // Generation cuts neither sequences nor rows.
    Layout own = whole_sequences(layout);
    own.sequence_parallel = false;
    return own;
}

// Return their time before each step of a layout, by parts.
template <typename T>
Times before_times(const Machine& machine, const std::vector<BeforeStep>& all,
                   const Layout& layout, KnownSteps& known) {
    Times t;
    for (const BeforeStep& before : all) {
        // A teacher has stages of its own.
        Layout own = before_layout(before, layout);
        if (before.teacher && own.stages() > 1)
            own.first_layer = choose_stages(before.shape, own.stages());

        // Simulate the runs.
        Model model = make_model(before.shape, own);
        CostModel cost = run_costs<T>(machine, model, Cpu{});
        ActionCost prices = action_cost(cost, model);
        StepTime step = simulate_layout(own, model, before.options, prices, known);
        check_ends(step);
        (before.samples() ? t.sampling : t.evaluations) += before.times * step.seconds;
    }
    return t;
}

// ----------------------------------------------------------------------------
// what is printed

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
    for (size_t r = 0; r < plans.size(); r++) {
        const std::vector<Action>& actions = plans[r].actions;
        for (size_t i = 0; i < actions.size(); i++) {
            const Action& a = actions[i];
            const ActionTimes& t = step.ranks[r].of[i];
            bool computed = queue_of(a.op) == Queue::COMPUTE;
            if (!computed || t.end <= t.met) continue;
            trace[r].push_back({action_text(a, model), t.met, t.end});
        }
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
        std::string bar = bar_text(share);
        text += formatted("  %-24s %10.2f ms %5.1f%%", p.name, seconds * 1e3, 100 * share);
        text += (bar.empty() ? "" : "  " + bar) + "\n";
    }
    return text;
}

// Predict a step. tokens: of a step, over all ranks. before: time before it, not in the trace.
inline Prediction predict_step(const Layout& layout, const Model& model, const PlanOptions& options,
                               const CostModel& cost, double tokens, const Times& before = {}) {
    // Time the plans that a run with these flags would execute.
    std::vector<Plan> plans = make_plans(layout, model, options);
    StepTime step = simulate_step(plans, model, action_cost(cost, model));
    check_ends(step);
    add_before(step, before);

    // Compute mfu as a run prints it, against the data sheet.
    double cards = layout.world();
    double rate = tokens / step.seconds;
    double flops = flops_per_token(model, options.T) * rate;
    double peak = cost.machine.peak(cost.element);
    double mfu = flops / (peak * cards);
    bool slow = peak < 1e12; // a processor's
    std::string line = formatted(
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
    return formatted("predicted on %s: %.2f ms a step | measured %.2f ms, the median of %zu %s | "
                     "error %+.1f%%\n", machine.c_str(), 1e3 * seconds, 1e3 * measured,
                     steps.size(), words, error);
}

} // namespace llmc
