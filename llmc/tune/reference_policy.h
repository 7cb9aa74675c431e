// reference_policy.h - log-probabilities under the reference policy, for DPO, KTO and GRPO
//   evaluate_logp   log p of each target of any windows, under the weights as they are
//   1. before the first step, the starting weights (a folder's, with its adapters) evaluate the
//      windows that the run will read, in the same micro-batches as training
//   2. every rank keeps log p = -loss of each target: 4 bytes a token, instead of a second model
//   3. LOAD hands the log p out with the windows
//   New adapters change no output before the first step, so the reference is the model without
//   them. A resumed run reads the starting weights again, evaluates them again, and then loads its
//   checkpoint.
//   Cost: a forward pass over the windows, at most one epoch, once.
//   GRPO samples its windows, so it keeps the starting weights instead (below).
#pragma once
#include "../action.h"
#include "../arena.h"
#include "../comm/comm.h"
#include "../context.h"
#include "../io/config.h"
#include "../io/dataloader.h"
#include "../io/likelihood.h"
#include "../io/rollout_state.h"
#include "../layout.h"
#include "../ops/memory.h"
#include "../ops/types.h"
#include "../run/run.h"
#include "../trainer.h"
#include "rollouts.h"
#include <utility>
#include <vector>

namespace llmc {

// ----------------------------------------------------------------------------
// a copy of the weights that a run starts from, exchanged with those it trains
//   The reference of GRPO's KL (objective.cuh) is the policy before the first step. Each step
//   samples new answers, so what the reference says of them cannot be kept ready, as DPO's is
//   (reference_policy.h): the starting weights are asked again.
//   1. before the first step, each rank copies the trained weights that it keeps: with adapters
//      their thin matrices alone, under ZeRO-3 its own shard
//   2. exchange_weights() swaps weights and copy, and the evaluation plan runs the reference
//   3. a second exchange puts every bit back; masters and moments have not moved
//   A resumed run copies the starting weights before it loads its checkpoint over them.
//   Contract: bitwise; no message. Cost: the trained weights once more, in the host's memory, and
//             four copies of them a rollout.

// The places of the trained weights that this rank keeps.
template <typename T, typename S>
std::vector<Place> trained_weights(const Trainer<T, S>& t) {
    std::vector<Place> places;
    for (const auto& [d, place] : t.arena.lasting) {
        bool weight = d.kind == Kind::WEIGHT && place.bytes > 0;
        if (weight && t.model.buckets[d.of].trainable)
            places.push_back(place);
    }
    return places;
}

// The bytes of a copy of them.
template <typename T, typename S>
size_t start_weights_bytes(const Trainer<T, S>& t) {
    size_t bytes = 0;
    for (const Place& place : trained_weights(t))
        bytes += place.bytes;
    return bytes;
}

// Keep a copy of them in the host's memory, for GRPO.
template <typename T, typename S> void keep_start(Run& run, S where) {
    auto bytes = [where](const Run& r, const std::vector<PlanOptions>& plans, int rank) {
        Trainer<T, S> t;
        t.ctx.where = where;
        trainer_place(t, r.shape, plans, layout_at(r.layout, rank));
        return start_weights_bytes(t);
    };
    run.companions.all.push_back({"starting weights", "GRPO's reference, in the host's memory",
                              Tier::HOST, bytes});
}

// Copy the trained weights to the host.
template <typename T, typename S>
std::vector<unsigned char> copy_weights(const Trainer<T, S>& t) {
    std::vector<unsigned char> copy(start_weights_bytes(t));
    unsigned char* to = copy.data();
    for (const Place& place : trained_weights(t)) {
        const unsigned char* home = t.arena.device().base + place.offset;
        copy_out(to, home, place.bytes, t.ctx.where);
        to += place.bytes;
    }
    return copy;
}

// Exchange the trained weights and a copy, block by block, so that no third copy is needed.
template <typename T, typename S>
void exchange_weights(Trainer<T, S>& t, std::vector<unsigned char>& copy) {
    const size_t block = size_t(1) << 20;
    std::vector<unsigned char> room(block);
    unsigned char* other = copy.data();
    for (const Place& place : trained_weights(t))
        for (size_t at = 0; at < place.bytes; at += block) {
            // Copies on a device are asynchronous: wait before the host reads or writes.
            unsigned char* home = t.arena.device().base + place.offset + at;
            size_t bytes = std::min(block, place.bytes - at);
            copy_out(room.data(), home, bytes, t.ctx.where);
            copy_in(home, other, bytes, t.ctx.where);
            wait_for(t.ctx.where);
            std::copy_n(room.data(), bytes, other);
            other += bytes;
        }
}

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
    auto stopped = std::exchange(t.hooks.stopped, nullptr);
    References references = std::exchange(t.data.references, nullptr);
    const Plan& p = t.plans[run.plans.evaluate];
    std::vector<acc_t<T>> losses(p.rows());
    size_t T_cp = p.rows() / p.B; // rows of a sequence on this rank
    run_samples(t, run.plans.evaluate, count, window, [&] {
        // Take the losses from the owner: among the ranks that hold a sample's losses, the one of
        // tp rank 0.
        RowLosses<T> kept = row_losses(t, 0);
        if (!kept.losses || t.layout.tp.rank > 0)
            return;
        copy_out(losses.data(), kept.losses, losses.size() * sizeof(losses[0]), t.ctx.where);
        for (size_t b = 0; b < p.B; b++) {
            uint64_t sample = t.data.cursor + size_t(t.layout.dp.rank) * p.B + b;
            if (sample >= count) break;
            // Context-parallel ranks have their own rows of each sequence.
            for (size_t i = 0; i < T_cp; i++) {
                size_t at = context_row(t.layout.context.order, t.layout.cp, p.T, i);
                rows[first_row(sample) + at] = -float(losses[b * T_cp + i]);
            }
        }
    });
    t.hooks.stopped = stopped;
    t.data.references = references;

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
    return c.resume ? run.data.train.windows : std::min<uint64_t>(samples, run.data.train.windows);
}

// Compute the references of training and validation, and let the trainer use those of training.
template <typename T, typename S>
void compute_references(Run& run, Trainer<T, S>& t) {
    if (keeps_start(run.config)) {
        run.reference.start_weights = copy_weights(t);
        return;
    }
    if (run.data.val.windows)
        run.reference.val = evaluate_references(run, t, run.data.val, run.data.val_samples);
    if (run.plans.train < 0) return;
    uint64_t samples = samples_of_run(run);
    if (is_first_rank(run))
        printf("reference: the starting weights, on %llu windows\n", (unsigned long long)samples);
    run.reference.train = evaluate_references(run, t, run.data.train, samples);
    t.data.references = references_of(run.data.train, run.reference.train);
}

// Let the trainer use validation's references.
template <typename T, typename S>
void take_validation_references(Run& run, Trainer<T, S>& t) {
    if (has_reference(run.config))
        t.data.references = references_of(run.data.val, run.reference.val);
    if (run.reference.before_validation) run.reference.before_validation();
}

// ----------------------------------------------------------------------------
// what the policy that sampled, and the first one, say of sampled answers
//   old         log p under the weights that sampled, with --updates 2 or more: evaluated before
//               the first update, kept for those after it
//   reference   log p under the weights that the run began from, with --beta: these are exchanged
//               for the run's, and back (reference_policy.h)
//   Both run the evaluation plan on the micro-batches of training, by the same kernels. So the
//   ratio of a policy to itself is 1 to the bit, in every layout.
//   Cost: a forward pass over the answers for each. Memory: 4 bytes a token of the batch for each,
//         in the host's memory.

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
    exchange_weights(t, run.reference.start_weights);
    r->reference = rollout_logp(run, t, *r);
    exchange_weights(t, run.reference.start_weights);
}

} // namespace llmc
