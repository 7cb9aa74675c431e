// references.h - what the weights that a run starts from say of each answer: the reference of DPO
//   evaluate_logp   log p of each target of any windows, under the weights as they are
//   1. before the first step, the starting weights (a folder's, with its adapters) evaluate the
//      windows that the run will read, in the same micro-batches as training
//   2. every rank keeps log p = -loss of each target: 4 bytes a token, instead of a second model
//   3. LOAD hands the log p out with the windows
//   New adapters change no output before the first step, so the reference is the model without
//   them. A resumed run reads the starting weights again, evaluates them again, and then loads its
//   checkpoint.
//   Cost: a forward pass over the windows, at most one epoch, once.
//   GRPO samples its windows, so it keeps the starting weights instead (start_weights.h).
#pragma once
#include <utility>
#include "health.h"
#include "start_weights.h"

namespace llmc {

// Whether the loss compares with a reference.
inline bool has_reference(const Config& c) {
    return c.loss == "dpo" || c.loss == "ipo" || c.loss == "kto" || keeps_start(c);
}

// A function that copies the log p (T) of a sample's window, for LOAD.
inline References references_of(const DataLoader& d,
                                const std::vector<float>& rows) { // (windows,T)
    return [&d, &rows](uint64_t sample, RowNumbers to) {
        std::copy_n(rows.data() + window_of(d, sample) * d.T, d.T, to.reference);
    };
}

// Evaluate samples [0, count) of a window, and write log p of their targets (T) where
// first_row(sample) says, counted in rows; 0 where there is no target. All ranks call, and they
// get the same rows.
template <typename T, typename S, typename F>
void evaluate_logp(Run& run, Trainer<T, S>& t, uint64_t count, const Window& window,
                   std::vector<float>& rows, F first_row) {
    // A signal must wait: a part of the samples would give another loss. Samples of this window
    // have no numbers yet.
    auto stopped = std::exchange(t.stopped, nullptr);
    References references = std::exchange(t.references, nullptr);
    const Plan& p = t.plans[run.evaluate_plan];
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
            uint64_t sample = t.cursor + size_t(t.layout.dp.rank) * p.B + b;
            if (sample >= count) break;
            // Context-parallel ranks have their own rows of each sequence.
            for (size_t i = 0; i < T_cp; i++) {
                size_t at = context_row(t.layout.cp_order, t.layout.cp, p.T, i);
                rows[first_row(sample) + at] = -float(losses[b * T_cp + i]);
            }
        }
    });
    t.stopped = stopped;
    t.references = references;

    // Share the rows. All ranks but the owner add 0, so nothing is rounded.
    all_reduce_sum(t.comms.world, rows.data(), rows.size(), Cpu{});
}

// Evaluate samples [0, count) of the data, and return log p of each target by window. All ranks
// call, and get the same.
template <typename T, typename S>
std::vector<float> evaluate_references(Run& run, Trainer<T, S>& t, const DataLoader& d,
                                       uint64_t count) { // (windows,T)
    // Windows that the run does not read keep 0.
    std::vector<float> rows(d.windows * d.T);
    auto window = [&](uint64_t sample, int* tokens, int* targets) {
        return load_window(d, sample, tokens, targets);
    };
    auto first_row = [&](uint64_t sample) {
        return window_of(d, sample) * d.T;
    };
    evaluate_logp(run, t, count, window, rows, first_row);
    return rows;
}

// How many samples from the first on cover all windows that the run reads. A run that ends within
// its first epoch reads only some. A resumed run counts all: with larger batches before, it may
// have come further than its steps say.
inline uint64_t samples_of_run(const Run& run) {
    const Config& c = run.config;
    uint64_t samples = uint64_t(c.steps) * uint64_t(c.batch_tokens / c.seq);
    return c.resume ? run.train.windows : std::min<uint64_t>(samples, run.train.windows);
}

// Compute the references of training and validation, and let the trainer use those of training.
template <typename T, typename S>
void compute_references(Run& run, Trainer<T, S>& t) {
    if (keeps_start(run.config)) {
        run.start_weights = copy_weights(t);
        return;
    }
    if (run.val.windows)
        run.val_references = evaluate_references(run, t, run.val, run.val_samples);
    if (run.train_plan < 0) return;
    uint64_t samples = samples_of_run(run);
    if (is_first(run))
        printf("reference: the starting weights, on %llu windows\n", (unsigned long long)samples);
    run.references = evaluate_references(run, t, run.train, samples);
    t.references = references_of(run.train, run.references);
}

} // namespace llmc
