// before_step.h - the time of what ranks evaluate before each step: a teacher, KTO's own policy
//   distill  the teacher evaluates the step's batch, all micro-batches in one plan (../teacher.h).
//            Its second product, in the student's head, is the student's time (cost.h)
//   kto      the weights as they are evaluate a mismatched window for each window of the batch, a
//            run of the evaluation plan for each micro-batch (reference_point.h)
//   Both are plans, so the simulator times them as it times a step. Other preferences compare with
//   log p that was evaluated before the first step (references.h).
//   The step begins when all ranks are through: a stage that is done early does not start ahead.
#pragma once
#include "../io/predict.h"
#include "teach.h"

namespace llmc {

// An evaluation before each step, or a run that samples: of which model, by which plan, how often.
struct BeforeStep {
    Shape shape;
    PlanOptions options;
    bool teacher = false;
    double times = 0; // 0: nothing is evaluated
};

// Return the options of a run's own evaluation, of one micro-batch.
inline PlanOptions evaluation_of(const PlanOptions& train) {
    PlanOptions evaluate = train;
    evaluate.mode = Mode::EVALUATE;
    evaluate.recompute = Recompute::NONE;
    evaluate.micro_batches = 1;
    return evaluate;
}

// Return what comes before the steps of a training plan.
inline BeforeStep before_step(const PlanOptions& train, const Shape& model, const Shape& teacher) {
    LossKind kind = train.objective.kind;
    if (kind == LossKind::DISTILL) return {teacher, teacher_options(train), true, 1};
    if (kind != LossKind::KTO) return {};
    return {model, evaluation_of(train), false, double(train.micro_batches)};
}

// Return the layout of the evaluations, given the step's.
inline Layout before_layout(const BeforeStep& before, const Layout& layout) {
    Layout own = layout;
    if (before.options.mode == Mode::GENERATE) own.sequence_parallel = false; // it cuts no rows
    if (!before.teacher) return own;
    own = teacher_layout(own);
    if (own.stages() > 1) own.first_layer = choose_stages(before.shape, own.stages());
    return own;
}

// The evaluations as plans, which machines of any speed share.
struct BeforeRuns {
    Model model;
    LayoutRuns runs;
    double times = 0;
};
inline BeforeRuns before_runs(const BeforeStep& before, const Layout& layout, KnownSteps& known) {
    if (before.times == 0) return {};
    Layout own = before_layout(before, layout);
    BeforeRuns r = {make_model(before.shape, own), {}, before.times};
    r.runs = layout_runs(own, r.model, before.options, known);
    return r;
}

// Return the seconds that they take before each step.
template <typename T>
double before_seconds(const Machine& machine, const BeforeRuns& before) {
    if (before.times == 0) return 0;
    CostModel cost = run_costs<T>(machine, before.model, Cpu{});
    ActionCost prices = action_cost(cost, before.model);
    return before.times * simulate_runs(before.runs, before.model, prices).seconds;
}

} // namespace llmc
