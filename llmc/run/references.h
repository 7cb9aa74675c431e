// references.h - what the weights that a run starts from say of each answer: the reference of DPO
//   1. before the first step, the starting weights (a folder's, with its adapters) evaluate the
//      windows that the run will read, in the same micro-batches as training
//   2. every rank keeps log p = -loss of each target: 4 bytes a token, instead of a second model
//   3. LOAD hands the log p out with the windows
//   New adapters change no output before the first step, so the reference is the model without
//   them. A resumed run reads the starting weights again, evaluates them again, and then loads its
//   checkpoint.
//   Cost: a forward pass over the windows, at most one epoch, once.
#pragma once
#include "health.h"

namespace llmc {

// Whether the loss compares with a reference.
inline bool has_reference(const Config& c) {
    return c.loss == "dpo" || c.loss == "ipo" || c.loss == "kto";
}

// A function that copies the log p (T) of a sample's window, for LOAD.
inline References references_of(const DataLoader& d,
                                const std::vector<float>& rows) { // (windows,T)
    return [&d, &rows](uint64_t sample, float*, float* reference) {
        std::copy_n(rows.data() + window_of(d, sample) * d.T, d.T, reference);
    };
}

// Evaluate samples [0, count), and return the log p of each target by window. All ranks call, and
// get the same.
template <typename T, typename S>
std::vector<float> evaluate_references(Run& run, Trainer<T, S>& t, const DataLoader& d,
                                       uint64_t count) { // (windows,T)
    // Evaluate. Windows that the run does not read keep 0.
    const Plan& p = t.plans[run.evaluate_plan];
    std::vector<float> rows(d.windows * d.T);
    std::vector<acc_t<T>> losses(p.rows());
    auto window = [&](uint64_t sample, int* tokens, int* targets) {
        return load_window(d, sample, tokens, targets);
    };
    run_samples(t, run.evaluate_plan, count, window, [&] {
        // Take the losses from the owner: among the ranks that hold a sample's losses, the one of
        // tp rank 0.
        RowLosses<T> kept = row_losses(t, 0);
        if (!kept.losses || t.layout.tp.rank > 0) return;
        copy_out(losses.data(), kept.losses, losses.size() * sizeof(losses[0]), t.ctx.where);
        for (size_t b = 0; b < p.B; b++) {
            uint64_t sample = t.cursor + size_t(t.layout.dp.rank) * p.B + b;
            if (sample >= count) break;
            for (size_t i = 0; i < p.T; i++)
                rows[window_of(d, sample) * p.T + i] = -float(losses[b * p.T + i]);
        }
    });

    // Share the rows. All ranks but the owner add 0, so nothing is rounded.
    all_reduce_sum(t.comms.world, rows.data(), rows.size(), Cpu{});
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
