// step_report.h - the numbers of a finished step, for its line and for the log
#pragma once
#include "../io/config.h"
#include "../io/logger.h"
#include "../io/mfu.h"
#include "../load.h"
#include "../step.h"
#include "../trainer.h"
#include "run.h"

namespace llmc {

// Measured beside a step's loss and scale: its time, and how all ranks' tokens chose experts.
struct StepMeasures {
    double seconds = 0;
    std::vector<int64_t> loads; // (L,E) slots of each expert; empty: nothing counts them
    double dropped = -1;        // the share of slots that a capacity dropped; -1: no capacity
};

// Measure the experts of the step that has just run. All ranks must call: they add up their counts.
template <typename T, typename S>
StepMeasures measure_step(const Trainer<T, S>& t) {
    StepMeasures m;
    m.loads = step_loads(t);
    m.dropped = dropped_share(t, m.loads);
    return m;
}

// Fill in the numbers of pairs: how far the better answers lead, and how often they do.
inline void report_pairs(StepReport& r, const Run& run, const Loss& loss) {
    if (!has_pairs(run.config)) return;
    double pairs = double(std::max<int64_t>(loss.valid, 1));
    r.more.push_back({"margin", loss.margin / pairs, "%.4f"});
    r.more.push_back({"accuracy", loss.correct / pairs, "%.3f"});
    if (run.config.loss == "kto")
        r.more.push_back({"kl", run.reference_policy.point});
}

// Fill in the report of the step that run.step has just counted. Evaluation and saving are no part
// of the step's speed.
template <typename T, typename S>
StepReport step_report(const Run& run, const Trainer<T, S>& t, const PlanResult& result,
                       const StepMeasures& m) {
    const Config& c = run.config;
    StepReport r;
    r.step = run.step;
    r.steps = c.steps;
    r.loss = result.loss.mean();
    r.norm = result.scale.norm;
    r.lr = t.hyper.lr;
    r.seconds = m.seconds;

    // Speed.
    r.step_tokens = c.batch_tokens;
    r.tokens = run.tokens;
    double flops = flops_per_token(t.model, size_t(c.seq)) * double(c.batch_tokens);
    r.mfu = flops / m.seconds / run.peak;

    // Techniques.
    ExpertBalance experts = expert_balance(m.loads, t.model.shape.experts.E);
    if (experts.max_vio >= 0)
        r.more = {{"max_vio", experts.max_vio}, {"least_load", experts.least}};
    if (m.dropped >= 0)
        r.more.push_back({"dropped_share", m.dropped});
    if (result.scale.loss.now > 0)
        r.more.push_back({"loss_scale", result.scale.loss.now});
    if (c.cp > 1)
        r.more.push_back({"cp_imbalance", pairs_imbalance(t.layout, t.data.pairs)});
    report_pairs(r, run, result.loss);
    return r;
}

// Add a step's imbalances to the run's sums. Their means are printed at the end.
inline void sum_imbalances(Run& run, const StepReport& r) {
    run.cp_imbalance += r.number("cp_imbalance");
    run.max_vio += r.number("max_vio");
    run.dropped += r.number("dropped_share");
}

} // namespace llmc
