// before_step.h - the time of what ranks run before each step: a teacher, other policies, sampling
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
#include "../io/machine.h"
#include "../io/plan_flags.h"
#include "../layout.h"
#include "../model.h"
#include "../ops/objective.cuh"
#include "../ops/types.h"
#include "cost.h"
#include "layer_cost.h"
#include "simulator.h"

namespace llmc {

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
    size_t prompts = size_t(c.batch_tokens / c.seq) / size_t(c.group);
    if (answers_are_shared(c)) prompts = ceil_div(prompts, size_t(c.dp));
    double rounds = double(ceil_div(prompts * size_t(c.group), generate.B));
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

// Such runs as plans, which machines of any speed share.
struct BeforeRuns {
    Model model;
    LayoutRuns runs;
    double times = 0;
    bool samples = false;
};
inline std::vector<BeforeRuns> before_runs(const std::vector<BeforeStep>& all,
                                           const Layout& layout, KnownSteps& known) {
    std::vector<BeforeRuns> runs;
    for (const BeforeStep& before : all) {
        // A teacher has stages of its own.
        Layout own = before_layout(before, layout);
        if (before.teacher && own.stages() > 1)
            own.first_layer = choose_stages(before.shape, own.stages());
        Model model = make_model(before.shape, own);
        LayoutRuns plans = layout_runs(own, model, before.options, known);
        runs.push_back({model, plans, before.times, before.samples()});
    }
    return runs;
}

// Return their time before each step, by parts.
template <typename T>
Times before_times(const Machine& machine, const std::vector<BeforeRuns>& all) {
    Times t;
    for (const BeforeRuns& before : all) {
        CostModel cost = run_costs<T>(machine, before.model, Cpu{});
        ActionCost prices = action_cost(cost, before.model);
        StepTime step = simulate_runs(before.runs, before.model, prices);
        check_ends(step);
        (before.samples ? t.sampling : t.evaluations) += before.times * step.seconds;
    }
    return t;
}

} // namespace llmc
