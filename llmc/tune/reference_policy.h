// reference_policy.h - the reference policy: what a run's starting weights say of each answer
//   window_logp   log p of each target of any windows, under the weights as they are
//   DPO, IPO and KTO have their windows before the first step:
//     1. the starting weights (a folder's, with its adapters) evaluate the windows that the run
//        will read, in the same micro-batches as training
//     2. every rank keeps log p = -loss of each target: 4 bytes a token, instead of a second model
//     3. LOAD hands the log p out with the windows
//   GRPO samples its windows, so the starting weights are asked again:
//     1. before the first step, each rank copies the trained weights that it keeps: with adapters
//        their thin matrices alone, under ZeRO-3 its own shard
//     2. exchange_weights() swaps weights and copy, and the evaluation plan runs the reference
//     3. a second exchange puts every bit back; masters and moments have not moved
//   New adapters change no output before the first step, so the reference is the model without
//   them. A resumed run reads the starting weights again, evaluates or copies them again, and then
//   loads its checkpoint.
//   Contract: an exchange is bitwise, and sends no message.
//   Cost: a forward pass over the windows, at most one epoch, once. With GRPO the trained weights
//         once more, in the host's memory, and four copies of them a rollout.
#pragma once
#include "../action.h"
#include "../arena.h"
#include "../comm/comm.h"
#include "../context.h"
#include "../io/config.h"
#include "../io/dataloader.h"
#include "../io/likelihood.h"
#include "../layers.h"
#include "../layout.h"
#include "../ops/memory.h"
#include "../ops/types.h"
#include "../run/run.h"
#include "../trainer.h"
#include <utility>
#include <vector>

namespace llmc {

// Whether the loss compares with a reference.
inline bool has_reference(const Config& c) {
    return c.loss == "dpo" || c.loss == "ipo" || c.loss == "kto" || keeps_start(c);
}

// ----------------------------------------------------------------------------
// log p of windows

// Log p of the targets of a window's samples [0, count), 0 where there is no target: (count,T), or
// (windows,T) in the order of a loader's windows. All ranks call, and get the same.
template <typename T, typename S>
std::vector<float> window_logp(Run& run, Trainer<T, S>& t, uint64_t count, const Window& window,
                               const DataLoader* order = nullptr) {
    // A signal must wait: a part of the samples would give another loss. Samples of this window
    // have no numbers yet.
    auto stopped = std::exchange(t.hooks.stopped, nullptr);
    References references = std::exchange(t.data.references, nullptr);
    const Plan& p = t.plans[run.plans.evaluate];
    std::vector<float> rows((order ? order->windows : count) * p.T);
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
            float* row = &rows[(order ? window_of(*order, sample) : sample) * p.T];
            for (size_t i = 0; i < T_cp; i++) {
                size_t at = context_row(t.layout.context.order, t.layout.cp, p.T, i);
                row[at] = -float(losses[b * T_cp + i]);
            }
        }
    });
    t.hooks.stopped = stopped;
    t.data.references = references;

    // Share the rows. All ranks but the owner add 0, so nothing is rounded.
    all_reduce_sum(t.comms.world, rows.data(), rows.size(), Cpu{});
    return rows;
}

// ----------------------------------------------------------------------------
// a copy of the weights that a run starts from, exchanged with those it trains

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

// ----------------------------------------------------------------------------
// the references of a run

// A function that copies the log p (T) of a sample's window, for LOAD. The last token of a window
// predicts nothing: its row holds KTO's reference point (objective.cuh), 0 for other losses.
inline References references_of(const Run& run, const DataLoader& d,
                                const std::vector<float>& rows) { // (windows,T)
    return [&run, &d, &rows](uint64_t sample, RowNumbers to) {
        std::copy_n(rows.data() + window_of(d, sample) * d.T, d.T, to.reference);
        to.reference[d.T - 1] = float(run.reference.point);
    };
}

// How many samples from the first on cover all windows that the run reads. A run that ends within
// its first epoch reads only some. A resumed run counts all: with larger batches before, it may
// have come further than its steps say.
inline uint64_t samples_of_run(const Run& run) {
    const Config& c = run.config;
    uint64_t samples = uint64_t(c.steps) * uint64_t(c.batch_tokens / c.seq);
    return c.resume ? run.data.train.windows : std::min<uint64_t>(samples, run.data.train.windows);
}

// Ask the starting weights about training and validation, and hand the answers to LOAD; or copy
// these weights, where samples are not known yet. All ranks call.
template <typename T, typename S>
void compute_references(Run& run, Trainer<T, S>& t) {
    if (keeps_start(run.config)) {
        run.reference.start_weights = copy_weights(t);
        return;
    }
    auto logp = [&](const DataLoader& d, uint64_t count) {
        auto window = [&](uint64_t sample, int* tokens, int* targets) {
            return load_window(d, sample, tokens, targets);
        };
        return window_logp(run, t, count, window, &d);
    };

    // Let a validation have references of its own, and training have its own again after it.
    if (run.data.val.windows) {
        run.reference.val = logp(run.data.val, run.data.val_samples);
        References of_val = references_of(run, run.data.val, run.reference.val);
        run.reference.around_validation = [&t, other = of_val](bool) mutable {
            std::swap(t.data.references, other);
        };
    }

    // Evaluate the windows of training.
    if (run.plans.train < 0) return;
    uint64_t samples = samples_of_run(run);
    say(run, "reference: the starting weights, on ", samples, " windows\n");
    run.reference.train = logp(run.data.train, samples);
    t.data.references = references_of(run, run.data.train, run.reference.train);
}

} // namespace llmc
