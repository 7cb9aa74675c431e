// likelihood.h - log-likelihoods of completions: candidates of about one length run in one plan
//   Candidates of about one length are the samples of one evaluation plan, padded to the longest of
//   them. Attention is causal, so padding at the end changes no scored row. With six lengths
//   HellaSwag's candidates are padded to 1.15 times their tokens; with one length, to twice.
//   Contract: all layouts give the same sums, apart from the rounding of their reductions.
#pragma once
#include <numeric>
#include "../action.h"
#include "../comm/comm.h"
#include "../context.h"
#include "../layout.h"
#include "../ops/memory.h"
#include "../ops/types.h"
#include "../step.h"
#include "../trainer.h"
#include "evaluate.h"

namespace llmc {

// Candidates of about one length, which run in a plan of their own.
struct ScoreGroup {
    size_t T = 1;                     // input tokens a row of the plan
    std::vector<size_t> members = {}; // indices of Evaluation::candidates, shorter first
    int plan = -1;
};

// Run samples 0 .. count - 1 of a window through an evaluation's plan, and call each() after every
// batch. A run that is stopped leaves the rest out. Afterwards the trainer has its own window and
// cursor again. All ranks call it.
template <typename T, typename S, typename F>
void run_samples(Trainer<T, S>& t, int plan, uint64_t count, const Window& window, F each) {
    // Do not mask documents: losses with and without --documents mask are to be compared.
    const Plan& p = t.plans[plan];
    DataSource before = t.data;
    t.data.window = window;
    t.data.samples_end = count;
    t.data.document_end = -1;
    // Each turn takes B samples on each data-parallel rank; rows after the last sample are blank.
    uint64_t turn = p.B * uint64_t(p.layout.dp.size);
    for (t.data.cursor = 0; t.data.cursor < count; t.data.cursor += turn) {
        run_plan(t, plan);
        each();
        if (t.hooks.stopped && t.hooks.stopped()) break;
    }

    // Restore training's place: an evaluation must not change which samples come next.
    t.data = before;
}

// The input tokens of a candidate's row: all but the last, padded to a multiple of 8,
// which matrix products like.
inline size_t padded_inputs(const Candidate& c, size_t P) {
    size_t inputs = std::max(c.tokens.size() - 1, size_t(1));
    return std::min(P, round_up(inputs, 8));
}

// How many candidates of T tokens fit into `rows` rows; at least one.
inline size_t candidates_at_once(size_t rows, size_t T) { return std::max(size_t(1), rows / T); }

// Divide the candidates, sorted by length, into at most `most` groups, so that plans of `rows` rows
// compute the fewest tokens. Padding counts, and what a group's last turn leaves blank. The cuts do
// not depend on the layout, because a sum's rounding may depend on the shapes of its products.
inline std::vector<ScoreGroup> group_by_length(const std::vector<Candidate>& candidates,
                                               size_t rows, size_t P, size_t most = 6) {
    std::vector<size_t> order(candidates.size());
    std::iota(order.begin(), order.end(), size_t(0));
    auto T_of = [&](size_t i) { return padded_inputs(candidates[i], P); };
    std::ranges::stable_sort(order, {}, T_of);

    // List the lengths, and how many candidates are no longer than each.
    std::vector<size_t> lengths, count = {0};
    for (size_t i = 0; i < order.size(); i++) {
        if (lengths.empty() || lengths.back() != T_of(order[i])) {
            lengths.push_back(T_of(order[i]));
            count.push_back(0);
        }
        count.back() = i + 1;
    }

    // Dynamic programming. fewest[g][j]: the lowest cost of the j shortest lengths in g groups.
    // begin[g][j]: the first length of the last of these groups.
    size_t n = lengths.size();
    size_t never = ~size_t(0) / 2;
    std::vector<std::vector<size_t>> fewest(most + 1, std::vector<size_t>(n + 1, never));
    std::vector<std::vector<size_t>> begin(most + 1, std::vector<size_t>(n + 1, 0));
    fewest[0][0] = 0;
    for (size_t g = 1; g <= most; g++)
        for (size_t j = 1; j <= n; j++)
            for (size_t i = 0; i < j; i++) {
                size_t T = lengths[j - 1];
                size_t turn = candidates_at_once(rows, T);
                size_t tokens = fewest[g - 1][i] + round_up(count[j] - count[i], turn) * T;
                if (tokens >= fewest[g][j]) continue;
                fewest[g][j] = tokens;
                begin[g][j] = i;
            }

    // Walk back from the best number of groups, the smallest among equals.
    size_t best = 1;
    for (size_t g = 2; g <= most; g++)
        if (fewest[g][n] < fewest[best][n])
            best = g;
    std::vector<ScoreGroup> groups;
    for (size_t j = n; j > 0; j = begin[best--][j]) {
        ScoreGroup group = {lengths[j - 1]};
        group.members.assign(order.begin() + long(count[begin[best][j]]),
                             order.begin() + long(count[j]));
        groups.insert(groups.begin(), group);
    }
    return groups;
}

// The options of a group's plan: as many candidates as fit into the rows of `like`.
inline PlanOptions score_plan(const PlanOptions& like, size_t T, const Layout& layout = {}) {
    PlanOptions p = like;
    p.T = T;
    p.whole_sequences = true; // the caller reads its rows in order
    p.B = candidates_at_once(like.B * like.T, T);
    if (layout.sequence_parallel) // ranks share the rows equally
        p.B = round_up(p.B, size_t(layout.tp.size));
    return p;
}

// Fill tokens and targets, both (T): only the completion is predicted.
inline void candidate_window(const Candidate& c, size_t T, int* tokens, int* targets) {
    // Row i predicts token i + 1. Target -1 has no loss. Token 0 pads, and no scored row sees it.
    size_t n = c.tokens.size() - 1;
    for (size_t i = 0; i < T; i++) {
        tokens[i] = i < n ? c.tokens[i] : 0;
        targets[i] = i < n && i + c.scored >= n ? c.tokens[i + 1] : -1;
    }
}

// Score the candidates of a group: the log-likelihood of each, and whether greedy decoding would
// give it. All ranks call it, and all get the scores.
template <typename T, typename S>
void score_group(Trainer<T, S>& t, const ScoreGroup& group, std::vector<Candidate>& candidates) {
    const Plan& p = t.plans[group.plan];
    size_t N = p.B * p.T;
    size_t n = group.members.size();
    auto window = [&](uint64_t sample, int* tokens, int* targets) {
        candidate_window(candidates[group.members[sample]], p.T, tokens, targets);
        return std::string();
    };

    // One rank computes each candidate; on all others its values stay 0.
    std::vector<double> sums(n, 0), greedy(n, 0);
    std::vector<acc_t<T>> rows(3 * N); // losses (N), largest logits (N), the targets' logits (N)
    run_samples(t, group.plan, n, window, [&] {
        RowLosses<T> kept = row_losses(t, 0);
        if (!kept.losses || t.layout.tp.rank > 0) return; // other tp ranks have the same values
        copy_out(rows.data(), kept.losses, rows.size() * sizeof(rows[0]), t.ctx.where);

        for (size_t b = 0; b < p.B; b++) {
            // Add up the completion's rows, which end where the candidate ends.
            size_t sample = t.data.cursor + p.layout.dp.rank * p.B + b;
            if (sample >= n) break;
            const Candidate& c = candidates[group.members[sample]];
            size_t end = b * p.T + c.tokens.size() - 1;
            greedy[sample] = 1;
            for (size_t i = end - c.scored; i < end; i++) {
                sums[sample] -= double(rows[i]);
                if (rows[2 * N + i] < rows[N + i])
                    greedy[sample] = 0;
            }
        }
    });

    // Sum over all ranks. Only one has a value and the others add 0, so nothing is rounded.
    all_reduce_sum(t.comms.world, sums.data(), n, Cpu{});
    all_reduce_sum(t.comms.world, greedy.data(), n, Cpu{});
    for (size_t i = 0; i < n; i++) {
        Candidate& c = candidates[group.members[i]];
        c.log_likelihood = sums[i];
        c.greedy = greedy[i] > 0;
    }
}

} // namespace llmc
