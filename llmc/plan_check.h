// plan_check.h - the check of plans before anything runs: one rank's, a pipeline's together
//   check_order   each micro-batch passes a stage's layers in order, forward once and backward once
//   check_data    every datum that an action reads has been written before
//   check_sends   each datum that another stage needs is sent once
//   check_update  gradients are whole before NORM; each bucket is reduced, updated, published once
//   check_live    no more stages keep their activations at once than the schedule says
//   check_pipeline  messages between ranks pair in order, and none waits for ever
//   Each function returns "", or a sentence that says what is wrong in the plan's own words.
#pragma once
#include "access.h"
#include "action.h"
#include "comm/text.h"
#include "layout.h"
#include "model.h"
#include "offload.h"
#include "pipeline.h"
#include "plan.h"
#include "recompute.h"
#include "sharding.h"
#include <array>
#include <set>

namespace llmc {

// ----------------------------------------------------------------------------
// the check of one rank's plan

// Check that no action reads a datum before some action has written it, or after other data may
// have taken its bytes.
inline std::string check_data(const Plan& p, const Model& model) {
    using enum Kind;
    // Walk the plan with the set of data whose bytes hold, at this point, what an action wrote.
    std::set<Data> written;
    for (const Action& a : p.actions) {
        // Forget a released bucket: other data may use its bytes.
        if (a.op == Op::RELEASE) {
            written.erase({GATHERED, a.bucket});
            written.erase({STAGED, a.bucket});
        }
        Access x = access(p, model, a);

        // A read needs a write before it, unless the datum outlives steps or the caller gives it.
        for (Data d : x.reads) {
            bool given = p.mode == Mode::GENERATE && d.kind == TOKENS;
            bool gradient = d.kind == GRAD || d.kind == GRAD_TIED;
            bool lasts = persistent(d.kind) && !gradient; // each step makes new gradients
            if (!lasts && !given && !written.count(d))
                return action_text(a, model) + " reads " + data_text(d, model) +
                       ", which nothing before it wrote";
        }

        // Forget parked data: they have left the place where layers read them.
        if (a.op == Op::PARK && a.chunk < 0)
            for (Data d : moved_data(p, model, a))
                written.erase(d);

        // Forget the copy that a fetch has read: it must be parked again before the next fetch.
        if (a.op == Op::FETCH)
            for (Data d : tiered_data(p, model, a))
                if (d.kind == PARKED)
                    written.erase(d);

        // Refuse a write after SQUARE: the norm of a gradient that is not whole clips too little.
        for (Data d : x.writes)
            if (d.kind == GRAD_HERE && written.count({SQUARES, d.of}))
                return action_text(a, model) + " adds to a gradient after its SQUARE";

        // Forget an input that its segment does not keep.
        if (a.op == Op::F && place_in_segment(p, model, a.layer) > 0)
            written.erase({STREAM, a.layer, a.micro});

        // Note the writes, except for the activations that F drops because R makes them again.
        bool dropped = a.op == Op::F && p.recompute.of(a.layer) != Recompute::NONE;
        for (Data d : x.writes) {
            bool redone = d.kind == REDO_B || d.kind == REDO_W;
            if (!(redone && dropped))
                written.insert(d);
        }
    }
    return "";
}

// Check that one micro-batch passes a stage's layers in order: forward once, then backward once.
inline std::string check_stage_order(const Plan& p, const Model& model, int m, int stage) {
    // Follow the two fronts: forward moves up the layers, backward down.
    int first = first_layer_of(p.layout, model, stage);
    int end = first_layer_of(p.layout, model, stage + 1);
    int forward = first, backward = end - 1; // the layers that are next
    int lowest = std::clamp(lowest_trained(model), first, end); // where backward ends
    int weights = 0;
    auto out_of_order = [&](const Action& a, int next) {
        return action_text(a, model) + " is out of order: layer " + std::to_string(next) +
               " is next";
    };

    for (const Action& a : p.actions) {
        if (a.micro != m || a.layer < first || a.layer >= end)
            continue;

        // Forward meets each layer once, from the first one up.
        if (a.op == Op::F && a.layer != forward++)
            return out_of_order(a, forward - 1);

        // Backward meets each layer once, from the last one down, when forward is through.
        bool input = a.op == Op::B || a.op == Op::I;
        if (input && a.layer != backward--)
            return out_of_order(a, backward + 1);
        if (input && forward < end)
            return action_text(a, model) + " comes before the forward pass has ended";
        weights += reaches_weights(a.op);
    }

    // Check that both fronts have passed every layer.
    std::string at = "micro-batch " + std::to_string(m);
    if (forward != end)
        return at + " is not forward through every layer";
    if (p.mode != Mode::TRAIN) return "";
    bool embedding_left = backward == 0 && lowest == 0; // the embedding has no input half
    if (backward != lowest - 1 && !embedding_left)
        return at + " is not backward through every layer";
    if (weights != end - lowest)
        return at + " does not reach every layer's weights once";
    return "";
}

// Check that every stage of this rank is in order, and that no action runs another rank's layer.
inline std::string check_order(const Plan& p, const Model& model) {
    // Look at each micro-batch in each stage.
    const Axis& pp = p.layout.pp;
    for (int m = 0; m < p.micro_batches; m++)
        for (int s = pp.rank; s < p.layout.stages(); s += pp.size)
            LLMC_TRY(check_stage_order(p, model, m, s));

    // Look for layers that belong to other ranks.
    for (const Action& a : p.actions)
        if (a.layer >= 0 && !is_mine(p.layout, model, a.layer))
            return action_text(a, model) + " is another rank's";
    return "";
}

// The number of actions of each kind that the end of a step has for one bucket.
struct BucketUses {
    int ties = 0;
    int reductions = 0;
    int publications = 0;
    // An offloaded bucket has one of each for every chunk, and as many for Muon's momentum [1].
    std::array<int, 2> fetches = {}, updates = {}, parks = {};
};

// Check the order of the step's end: gradients are whole before NORM, updates come after NORM, and
// publications come after their update. Counts the actions into `uses`.
inline std::string check_end_order(const Plan& p, const Model& model,
                                   std::vector<BucketUses>& uses) {
    using enum Op;
    // Walk the plan once, and remember whether COUNT and NORM have run.
    bool counted = false, norm = false, muon = false;
    for (const Action& a : p.actions) {
        std::string text = action_text(a, model);
        bool weights = reaches_weights(a.op);
        if (a.op == B && !counted)
            return text + " needs the count of valid targets, and COUNT has not run";
        if (norm && (weights || a.op == TIE || a.op == REDUCE))
            return text + " comes after NORM";

        // Refuse a layer that adds to a gradient which is summed over ranks already.
        for (int b : weights ? buckets_of(model, a.layer) : std::vector<int>{})
            if (uses[b].reductions && !reduced_each(p.layout, model, b))
                return text + " adds to " + model.buckets[b].name + " after its REDUCE";

        // Count the action for its bucket; COUNT and NORM have none.
        BucketUses none;
        BucketUses& bucket = a.bucket >= 0 ? uses[a.bucket] : none;
        int of = a.kind == Kind::MOMENTUM;
        switch (a.op) {
        case COUNT: counted = true; break;
        case NORM: norm = true; break;
        case REDUCE: bucket.reductions++; break;

        // A tied gradient must be whole before other ranks add it to theirs.
        case TIE:
            bucket.ties++;
            if (bucket.reductions) return text + " comes after its REDUCE";
            break;

        // Updates need the norm, those of momentum come before MUON and the others after it.
        // Publications need the weights that an update has written.
        case MUON:
        case UPDATE:
            if (!norm) return text + " comes before NORM";
            if (a.op == MUON && muon) return text + " comes after MUON";
            if (a.op == UPDATE && model.muon && !muon) return text + " comes before MUON";
            if (bucket.updates[of]++ != std::max(a.chunk, 0))
                return text + " is out of order";
            muon |= a.op == MUON && a.chunk < 0;
            break;

        // State comes before its chunk's update, and leaves right after it.
        case FETCH: bucket.fetches[of] += a.chunk >= 0; break;
        case PARK:
            if (a.chunk >= 0 && bucket.updates[of] != a.chunk + 1)
                return text + " does not follow its UPDATE";
            bucket.parks[of] += a.chunk >= 0;
            break;
        case PUBLISH:
            if (!bucket.updates[0]) return text + " comes before its UPDATE";
            bucket.publications++;
            break;
        default: break;
        }
    }
    // A rank without trainable buckets has no UPDATE that would miss the norm; the others would.
    if (!counted) return "the valid targets are never counted";
    return norm ? "" : "the gradient norm is never computed";
}

// Check that the end of the step updates, reduces, ties and publishes each bucket as often as the
// layout asks for, no more and no less.
inline std::string check_update(const Plan& p, const Model& model) {
    if (p.mode != Mode::TRAIN) return "";

    // Check the order first: this counts the actions too.
    std::vector<BucketUses> uses(model.buckets.size());
    std::string wrong = check_end_order(p, model, uses);
    if (!wrong.empty()) return wrong;

    for (int b = 0; b < int(model.buckets.size()); b++) {
        const Bucket& bucket = model.buckets[b];

        // Check that this rank updates the buckets that it trains, and no others.
        bool mine = bucket.trainable && bucket_is_mine(p.layout, model, b);
        if (mine != bool(uses[b].updates[0]))
            return "bucket " + bucket.name +
                   (mine ? " is never updated" : " is updated, and is not trained here");

        // Compare the counts with the layout: a missing sum and a double one are both wrong.
        int reductions = reduced_each(p.layout, model, b) ? p.micro_batches : 1;
        if (!mine || !is_reduced(p.layout, model, b))
            reductions = 0;
        auto times = [&](int found, int wanted, const char* what) {
            if (found != wanted && wrong.empty())
                wrong = "bucket " + bucket.name + what + std::to_string(found) + " times, not " +
                        std::to_string(wanted);
        };

        // An offloaded bucket has one update, one fetch and one park for each of its chunks.
        int chunks = mine ? offload_chunks(p, model, b) : 0;
        times(uses[b].updates[0], mine ? std::max(chunks, 1) : 0, " is updated ");
        times(uses[b].fetches[0], chunks, " has its state fetched ");
        times(uses[b].parks[0], chunks, " has its state parked ");

        // Muon's momentum has as many.
        if (!has_muon_matrices(p.layout, model, b)) chunks = 0;
        times(uses[b].updates[1], chunks, " has its momentum updated ");
        times(uses[b].fetches[1], chunks, " has its momentum fetched ");
        times(uses[b].parks[1], chunks, " has its momentum parked ");
        times(uses[b].ties, mine && bucket.tied(), " has its two gradients added ");
        times(uses[b].reductions, reductions, " is reduced ");
        times(uses[b].publications, mine && is_published(p.layout, bucket), " is published ");
        if (!wrong.empty()) return wrong;
    }
    return "";
}

// Check that no more stages keep their activations at once than the schedule says. Without training
// only one stage may do so at a time.
inline std::string check_live(const Plan& p, const Model& model) {
    size_t peak = 0, allowed = 1;
    bool trains = p.mode == Mode::TRAIN;
    int trained = lowest_trained(model);
    if (trains) {
        std::vector<Schedule> all = schedules_of(p.layout, p.micro_batches);
        allowed = size_t(peak_live(all[p.layout.pp.rank]));
    }

    // Walk the plan. A stage lives from its first forward layer to its last backward layer, and
    // without a backward pass to its last forward layer.
    std::set<std::pair<int, int>> live; // (micro-batch, stage)
    for (const Action& a : p.actions) {
        if (a.layer < 0) continue;
        int stage = stage_of(p.layout, model, a.layer);

        // The first layer of a stage begins its life. In training its backward pass ends it.
        int first = first_layer_of(p.layout, model, stage);
        int last = first_layer_of(p.layout, model, stage + 1) - 1;
        if (a.op == Op::F && a.layer == first)
            live.insert({a.micro, stage});
        peak = std::max(peak, live.size());

        // Only stages that hold a trained layer, or stand above one, run backward.
        int lowest = std::max(first, trained);
        bool returns = trains && last >= trained;
        bool over = returns ? reaches_weights(a.op) && a.layer == lowest : a.layer == last;
        if (over)
            live.erase({a.micro, stage});
    }
    if (peak <= allowed) return "";
    return std::to_string(peak) + " stages hold their activations at once, not " +
           std::to_string(allowed);
}

// Check that each stage sends its outputs for other ranks once.
inline std::string check_sends(const Plan& p, const Model& model) {
    // Count the sends of each datum.
    std::map<Data, int> sent;
    for (const Action& a : p.actions)
        for (const Transfer& t : a.transfers)
            if (t.send)
                sent[data_of(p.layout, model, t)]++;
    auto once = [&](Data d) -> std::string {
        if (sent[d] == 1) return "";
        return data_text(d, model) + " is sent " + std::to_string(sent[d]) + " times, not once";
    };

    // Look for each datum that a stage of this rank must send.
    const Axis& pp = p.layout.pp;
    for (int m = 0; m < p.micro_batches && pp.size > 1; m++)
        for (int s = pp.rank; s < p.layout.stages(); s += pp.size) {
            // Forward sends the stage's output. Backward sends the gradient of its input, unless
            // nothing below trains.
            int begin = first_layer_of(p.layout, model, s);
            int end = first_layer_of(p.layout, model, s + 1);
            if (s + 1 < p.layout.stages())
                LLMC_TRY(once({Kind::STREAM, end, m}));
            bool needed = s > 0 && begin > lowest_trained(model);
            if (needed && p.mode == Mode::TRAIN)
                LLMC_TRY(once({Kind::DSTREAM, begin, m}));
        }
    return "";
}

// Run all checks of one rank's plan, and return the first sentence that is not empty.
inline std::string plan_check(const Plan& p, const Model& model) {
    for (auto check : {check_order, check_data, check_sends, check_update, check_live})
        LLMC_TRY(check(p, model));
    return "";
}

// ----------------------------------------------------------------------------
// the check of all plans of a pipeline together, for mistakes that no rank can see alone

// A plan in the form that the proof of pipeline.h takes: groups of messages, each with the slot of
// computation that follows it.
inline std::vector<ScheduleStep> message_steps(const Plan& p, const Model& model) {
    std::vector<ScheduleStep> steps;
    size_t named = 0; // steps whose slot is known
    for (const Action& a : p.actions) {
        if (a.op == Op::SENDRECV)
            steps.push_back({false, {}, a.transfers});
        if (!computes(a.op)) continue;

        // Name the slot as pipeline.h does. Recomputation counts as part of the backward pass.
        SlotOp op = a.op == Op::F   ? SlotOp::F
                    : a.op == Op::I ? SlotOp::I
                    : a.op == Op::W ? SlotOp::W
                                    : SlotOp::B;

        // Give the slot to all groups of messages that stand before it and have none yet.
        for (; named < steps.size(); named++) {
            steps[named].has_slot = true;
            steps[named].slot = {op, a.micro, stage_of(p.layout, model, a.layer)};
        }
    }
    return steps;
}

// Check that messages pair in order, and that all of them end even if each send waits for its
// receive. At NORM and TIE ranks of the pipeline meet, and no message may follow. Ranks of other
// pipelines have the same plans, so they meet this one's ranks at the same actions.
inline std::string check_pipeline(const std::vector<Plan>& ranks, const Model& model) {
    // Look at each rank's messages and norms, and at the order of its ties.
    PerRank<ScheduleStep> steps;
    std::vector<std::vector<int>> ties(ranks.size()); // the buckets, in order
    for (size_t r = 0; r < ranks.size(); r++) {
        std::string rank = "rank " + std::to_string(r);
        int norms = 0;
        for (const Action& a : ranks[r].actions) {
            norms += a.op == Op::NORM;
            if (a.op == Op::TIE)
                ties[r].push_back(a.bucket);
            if (a.op == Op::SENDRECV && (norms || !ties[r].empty()))
                return rank + ": " + action_text(a, model) + " comes after what ranks do together";
        }

        // A rank that takes part in fewer norms than the others would keep them waiting for ever.
        if (norms != (ranks[r].mode == Mode::TRAIN))
            return rank + " takes part in the gradient norm " + std::to_string(norms) + " times";
        steps.push_back(message_steps(ranks[r], model));
    }
    if (ties.front() != ties.back())
        return "the first and the last rank tie different tables";

    // Pair the messages, then run all ranks at once and see whether any waits for ever.
    PerRank<std::vector<Wait>> waits;
    LLMC_TRY(pair_transfers(steps, waits));
    return deadlock_in(steps, waits, run_steps(steps, waits));
}

// Check every rank's plan, then all of them together.
inline std::string plans_check(const std::vector<Plan>& ranks, const Model& model) {
    for (size_t r = 0; r < ranks.size(); r++) {
        std::string wrong = plan_check(ranks[r], model);
        if (!wrong.empty())
            return "rank " + std::to_string(r) + ": " + wrong;
    }
    return check_pipeline(ranks, model);
}

} // namespace llmc
