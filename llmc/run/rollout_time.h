// rollout_time.h - the time of what GRPO does before a step: sampling, and other policies' log p
//   1. read      each prompt of the step, once for all answers to it: T rows of a generation's plan
//   2. sample    --slots answers at once, a run for each further token: a row of each slot. A run
//                reads all weights, and each slot's cached keys and values
//   3. evaluate  the answers by the policy that sampled and by the first one, where --updates and
//                --beta want them (other_policies.h): an evaluation's plan for each micro-batch
//   A rollout serves --updates steps, so a step has its share of it.
//   Bounds: an answer has --answer-tokens tokens and a prompt the rest of --seq. Answers that end
//   earlier, and shorter prompts, take less.
//   Left out: the host's picks from a row of logits, rewards, and the exchange of starting weights.
#pragma once
#include "before_step.h"

namespace llmc {

// The runs of a rollout as plans, each with how often it runs for a step. generate: the options of
// the plan that samples.
struct RolloutRuns {
    std::vector<BeforeStep> samples, evaluates;
};
inline RolloutRuns rollout_runs(const Config& c, const PlanOptions& train,
                                const PlanOptions& generate, const Shape& model) {
    // Share out the prompts among data-parallel ranks, as sample_answers() does.
    RolloutRuns r;
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
    r.samples.push_back({model, o, false, share * double(prompts)});

    // Sample. The prompt's last row gives the first token. A row sees the prompt, and half of its
    // answer on average.
    o.B = generate.B;
    o.T = 1;
    o.cache = size_t(c.seq - most / 2);
    r.samples.push_back({model, o, false, share * rounds * (most - 1)});

    // Evaluate.
    double policies = int(c.updates > 1) + int(keeps_start(c));
    PlanOptions e = evaluation_of(train);
    if (policies > 0)
        r.evaluates.push_back({model, e, false, share * policies * train.micro_batches});
    return r;
}

} // namespace llmc
