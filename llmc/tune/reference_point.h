// reference_point.h - KTO's reference point: how far the policy has drifted from the reference
//   z = max(0, mean over the batch's questions of  log p(y') - log p_reference(y')),
//   y' the answer to another question (arXiv:2402.01306, 4.1; TRL's estimate of the KL divergence).
//   1. before the first step, the starting weights evaluate each mismatched window (labels.h)
//   2. before each step, its weights evaluate the mismatched windows of the whole global batch,
//      without a gradient
//   3. ranks share the log p of each sample, then each adds up the samples in the same order, so
//      that all ranks have the same z
//   4. LOAD hands z out in the last row of a window's reference (objective.cuh)
//   Which answer follows which question depends on the data alone, not on layout or batch.
//   Cost: a forward pass over the batch, each step. Memory: 8 bytes a window.
#pragma once
#include <utility>
#include "../comm/comm.h"
#include "../context.h"
#include "../head.h"
#include "../io/dataloader.h"
#include "../io/likelihood.h"
#include "../ops/memory.h"
#include "../ops/types.h"
#include "../trainer.h"
#include "labels.h"
#include "references.h"

namespace llmc {

// The mismatched answers of one sample: the sum of their log p, and how many there are.
struct MismatchedSum {
    double logp = 0;
    double answers = 0;
};

// Evaluate the mismatched answers of samples [first, first + count). All ranks call, and get
// the same sums.
template <typename T, typename S>
std::vector<MismatchedSum> mismatched_sums(Run& run, Trainer<T, S>& t, const DataLoader& d,
                                           uint64_t first, uint64_t count) {
    // Make each window mismatched. The window before it in the files gives the first answer,
    // whatever sample came before.
    const Plan& p = t.plans[run.evaluate_plan];
    std::vector<MismatchedSum> sums(count);
    std::vector<double> answers(count);
    std::vector<int> tokens_before(d.T);
    std::vector<int> targets_before(d.T);
    auto window = [&](uint64_t i, int* tokens, int* targets) {
        // Windows form a ring: before the first one comes the last.
        uint64_t own = window_of(d, first + i);
        uint64_t before = (own + d.windows - 1) % d.windows;
        std::string wrong = read_window(d, before, tokens_before.data(), targets_before.data());
        if (wrong.empty())
            wrong = read_window(d, own, tokens, targets);
        if (!wrong.empty()) return wrong;
        auto questions = questions_of(tokens_before.data(), targets_before.data(), d.T);
        int padding = run.chat.end;
        answers[i] = double(mismatched_window(questions, tokens, targets, d.T, padding));
        return std::string();
    };

    // Evaluate. A signal must wait: a part of the samples would give another reference point.
    auto stopped = std::exchange(t.stopped, nullptr);
    std::vector<acc_t<T>> losses(p.rows());
    size_t T_cp = p.rows() / p.B; // rows of a sequence on this rank
    run_samples(t, run.evaluate_plan, count, window, [&] {
        // Take the losses from the owner: among the ranks that hold a sample's losses, the one of
        // tp rank 0.
        RowLosses<T> kept = row_losses(t, 0);
        if (!kept.losses || t.layout.tp.rank > 0)
            return;
        copy_out(losses.data(), kept.losses, losses.size() * sizeof(losses[0]), t.ctx.where);
        for (size_t b = 0; b < p.B; b++) {
            uint64_t i = t.cursor + size_t(t.layout.dp.rank) * p.B + b;
            if (i >= count) break;
            // Sum over all rows: those without a target have a loss of 0. Context-parallel ranks
            // have some rows each, and the first of them counts the answers.
            if (t.layout.cp.rank == 0)
                sums[i].answers = answers[i];
            for (size_t at = 0; at < T_cp; at++)
                sums[i].logp -= double(losses[b * T_cp + at]);
        }
    });
    t.stopped = stopped;

    // Share the sums. All ranks but the owners add 0.
    all_reduce_sum(t.comms.world, &sums[0].logp, 2 * count, Cpu{});
    return sums;
}

// The log p of each window's mismatched answers under the starting weights. All ranks call.
template <typename T, typename S>
std::vector<double> mismatched_references(Run& run, Trainer<T, S>& t, const DataLoader& d,
                                          uint64_t count) { // (windows)
    // Order the sums by window. Windows that the run does not read keep 0.
    std::vector<double> windows(d.windows);
    std::vector<MismatchedSum> sums = mismatched_sums(run, t, d, 0, count);
    for (uint64_t i = 0; i < count; i++)
        windows[window_of(d, i)] = sums[i].logp;
    return windows;
}

// The reference point of a batch under the current weights. references: those of the starting
// weights. All ranks call.
template <typename T, typename S>
double reference_point(Run& run, Trainer<T, S>& t, const DataLoader& d, uint64_t first,
                       uint64_t count, const std::vector<double>& references) { // (windows)
    double drift = 0;
    double answers = 0;
    std::vector<MismatchedSum> sums = mismatched_sums(run, t, d, first, count);
    // Add up in the order of samples, so that the sum does not depend on how ranks share them.
    for (uint64_t i = 0; i < count; i++) {
        drift += sums[i].logp - references[window_of(d, first + i)];
        answers += sums[i].answers;
    }

    // Clamp at 0: the estimate may be negative, but a divergence is not.
    return answers > 0 ? std::max(0.0, drift / answers) : 0;
}

// References that also hold the run's current reference point, in the last row of each window.
inline References with_reference_point(const Run& run, References references, size_t T) {
    return [&run, references, T](uint64_t sample, RowNumbers to) {
        references(sample, to);
        to.reference[T - 1] = float(run.reference_point);
    };
}

// Compute the starting weights' values that the reference points of training and
// validation compare with.
template <typename T, typename S>
void compute_mismatched(Run& run, Trainer<T, S>& t) {
    if (run.val.windows)
        run.val_mismatched = mismatched_references(run, t, run.val, run.val_samples);
    if (run.train_plan < 0) return;
    run.mismatched = mismatched_references(run, t, run.train, samples_of_run(run));
    t.references = with_reference_point(run, t.references, run.train.T);
}

// Set the reference point of the step to come, from the samples that it will train on.
template <typename T, typename S>
void take_reference_point(Run& run, Trainer<T, S>& t) {
    if (run.config.loss != "kto") return;
    uint64_t samples = uint64_t(run.config.batch_tokens / run.config.seq);
    run.reference_point =
        reference_point(run, t, run.train, t.cursor, samples, run.mismatched);
}

// Let the trainer use validation's references, and its reference point.
template <typename T, typename S>
void take_validation_references(Run& run, Trainer<T, S>& t) {
    if (!has_reference(run.config)) return;
    t.references = references_of(run.val, run.val_references);
    if (run.config.loss != "kto") return;
    t.references = with_reference_point(run, t.references, run.val.T);
    run.reference_point =
        reference_point(run, t, run.val, 0, run.val_samples, run.val_mismatched);
}

} // namespace llmc
