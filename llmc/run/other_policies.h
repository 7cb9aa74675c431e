// other_policies.h - what the policy that sampled, and the first one, say of sampled answers
//   old         log p under the weights that sampled, with --updates 2 or more: evaluated before
//               the first update, kept for those after it
//   reference   log p under the weights that the run began from, with --beta: these are exchanged
//               for the run's, and back (start_weights.h)
//   Both run the evaluation plan on the micro-batches of training, by the same kernels. So the
//   ratio of a policy to itself is 1 to the bit, in every layout.
//   Cost: a forward pass over the answers for each. Memory: 4 bytes a token of the batch for each,
//         in the host's memory.
#pragma once
#include "references.h"

namespace llmc {

// Log p of the answers' tokens under the weights as they are. All ranks call, and get the same.
template <typename T, typename S>
std::vector<float> rollout_logp(Run& run, Trainer<T, S>& t, const Rollouts& r) { // (answers,T)
    size_t length = size_t(run.config.seq);
    size_t answers = r.tokens.size();
    std::vector<float> rows(answers * length);
    auto window = [&](uint64_t sample, int* tokens, int* targets) {
        rollout_window(r, r.first + sample, length, tokens, targets);
        return std::string();
    };
    auto first_row = [&](uint64_t sample) {
        return sample * length;
    };
    evaluate_logp(run, t, answers, window, rows, first_row);
    return rows;
}

// Let the policies that the objective compares with evaluate the answers.
template <typename T, typename S>
void ask_other_policies(Run& run, Trainer<T, S>& t, Rollouts* r) {
    if (run.config.updates > 1)
        r->old = rollout_logp(run, t, *r);
    if (!keeps_start(run.config)) return;
    exchange_weights(t, run.start_weights);
    r->reference = rollout_logp(run, t, *r);
    exchange_weights(t, run.start_weights);
}

} // namespace llmc
