// plan.h - one optimizer step as a list of actions: generators, passes, the check, the print
//   A generator turns a configuration into a list of actions; a pass turns a list into a list; the
//   executor (step.h) is one loop over the result. This is the plan of 2 blocks, 2 micro-batches,
//   selective recomputation, tied head (layer 0 embeds, 1 and 2 are blocks, 3 is the head);
//   `train_gpt --explain` prints yours; action.h says what the words mean:
//
//     LOAD COUNT
//     F(0,0..3)
//     B(0,3) R(0,2) B(0,2) R(0,1) B(0,1..0)
//     F(1,0..3)
//     B(1,3) R(1,2) B(1,2) R(1,1) B(1,1..0)
//     TIE(embedding) NORM UPDATE(embedding) UPDATE(positions) UPDATE(block.0) UPDATE(block.1) UPDATE(head)
//
#pragma once
#include "action.h"
#include "zero.h"

// ----------------------------------------------------------------------------
// generators and passes

// Evaluation and generation: forward alone; a stage receives, runs, sends.
inline std::vector<Step> forward_schedule(const Plan& p) {
    std::vector<Step> steps;
    for (int m = 0; m < p.micro_batches; m++)
        for (int s = p.pp_rank; s < p.stages(); s += p.pp) {
            Step run = {true, {Pass::F, m, s}, {}}, send;
            if (p.pp > 1 && s > 0) run.transfers = {{false, (s - 1) % p.pp, false, m, s}};
            if (p.pp > 1 && s + 1 < p.stages())
                send.transfers = {{true, (s + 1) % p.pp, false, m, s + 1}};
            steps.push_back(run), steps.push_back(send);
        }
    return steps;
}
inline std::vector<Schedule> schedules_of(const Plan& p) {
    return p.pipeline == Pipeline::GIVEN
               ? p.given
               : schedules_of(p.pipeline, p.pp, p.chunks, p.micro_batches);
}
// Training: F and B (or I and W) of a rank's stages, with what crosses to and from other ranks;
// every rank's, for what crosses depends on all of them.
inline PerStep<Step> schedule(Plan p) {
    if (p.mode == Mode::TRAIN) return add_transfers(schedules_of(p), p.pp);
    PerStep<Step> all;
    for (p.pp_rank = 0; p.pp_rank < p.pp; p.pp_rank++) all.push_back(forward_schedule(p));
    return all;
}

// Before: slots of stages. After: F(m,l) in order, B(m,l) in reverse. Apart, every I comes before
// the first W; the embedding has no input half, and the head's halves cannot part, since its logits
// are gone.
inline Plan add_layers(const Plan& in, const Model& model, const std::vector<Step>& steps) {
    Plan p = in;
    std::set<int> reached;
    auto add = [&](Do kind, int m, int l) {
        bool each = reduced_each(p, model, buckets_of(model, l)[0]);
        bool first = reaches_weights(kind) && (each || reached.insert(l).second);
        p.actions.push_back({kind, m, l, -1, first});
    };
    for (const Step& step : steps) {
        if (!step.transfers.empty())
            p.actions.push_back({Do::SENDRECV, -1, -1, -1, false, step.transfers});
        if (!step.has_slot) continue;
        int m = step.slot.micro, from = first_layer(p, model, step.slot.stage),
            to = first_layer(p, model, step.slot.stage + 1), head = model.head();
        Pass pass = step.slot.pass;
        bool split = p.split_backward || pass != Pass::B;
        if (pass == Pass::F)
            for (int l = from; l < to; l++) add(Do::F, m, l);
        if (pass == Pass::B && !split)
            for (int l = to - 1; l >= from; l--) add(Do::B, m, l);
        if (split && is_backward(pass))
            for (int l = to - 1; l >= std::max(from, 1); l--) add(l == head ? Do::B : Do::I, m, l);
        if (split && (pass == Pass::B || pass == Pass::W))
            for (int l = std::min(to, head) - 1; l >= from; l--) add(Do::W, m, l);
    }
    return p;
}

// Before: actions of layers. After: the step begins with its tokens and the count of its valid
// targets.
inline Plan add_load(Plan p) {
    if (p.mode == Mode::GENERATE) return p; // the prompt is given
    p.actions.insert(p.actions.begin(), {{Do::LOAD}, {Do::COUNT}});
    return p;
}

// Before: F(m,l), B or I (m,l). After: R(m,l) stands before each block's backward
// (arXiv:1604.06174, arXiv:2205.05198).
inline Plan add_recompute(const Plan& in, const Model& model) {
    if (in.recompute == Recompute::NONE) return in;
    Plan p = in;
    p.actions.clear();
    for (const Action& a : in.actions) {
        bool block = a.layer > 0 && a.layer < model.head();
        if (block && (a.kind == Do::B || a.kind == Do::I))
            p.actions.push_back({Do::R, a.micro, a.layer});
        p.actions.push_back(a);
    }
    return p;
}

// Before: all backward passes. After: tied gradients added, then reduced; the norm; every trainable
// bucket of mine updated, and published where others need what I have updated.
inline Plan add_update(Plan p, const Model& model) {
    if (p.mode != Mode::TRAIN) return p;
    std::vector<int> mine;
    for (size_t b = 0; b < model.buckets.size(); b++)
        if (model.buckets[b].trainable && bucket_is_mine(p, model, int(b))) mine.push_back(int(b));
    auto add = [&](Do kind, int bucket) { p.actions.push_back({kind, -1, -1, bucket}); };
    for (int b : mine)
        if (model.buckets[size_t(b)].tied()) {
            add(Do::TIE, b);
            if (is_reduced(p, model, b)) add(Do::REDUCE, b);
        }
    add(Do::NORM, -1);
    bool publish = p.shards > 1 && (p.zero == 1 || p.zero == 2);
    for (int b : mine) {
        add(Do::UPDATE, b);
        if (publish) add(Do::PUBLISH, b);
    }
    return p;
}

inline Plan make_plan(const Plan& options, const Model& model, const std::vector<Step>& steps) {
    Plan p = add_layers(options, model, steps);
    p = add_load(p);
    p = add_recompute(p, model);
    p = add_reduce(p, model);
    p = add_update(p, model);
    return add_gather(p, model);
}
inline Plan make_plan(const Plan& options, const Model& model) {
    return make_plan(options, model, schedule(options)[size_t(options.pp_rank)]);
}
// Of every rank of the pipeline.
inline std::vector<Plan> make_plans(Plan options, const Model& model) {
    PerStep<Step> steps = schedule(options);
    std::vector<Plan> all;
    for (options.pp_rank = 0; options.pp_rank < options.pp; options.pp_rank++)
        all.push_back(make_plan(options, model, steps[size_t(options.pp_rank)]));
    return all;
}

// ----------------------------------------------------------------------------
// check: an empty text, or what is wrong with the plan

inline std::string check_data(const Plan& p, const Model& model) {
    std::set<Data> written;
    for (const Action& a : p.actions) {
        if (a.kind == Do::RELEASE) written.erase({Kind::GATHERED, a.bucket});
        Access x = access(p, model, a);
        for (Data d : x.reads) {
            bool given = p.mode == Mode::GENERATE && (d.kind == Kind::TOKENS);
            bool fresh =
                d.kind == Kind::GRAD || d.kind == Kind::GRAD_TIED; // persistent, but of this step
            if ((!persistent(d.kind) || fresh) && !given && !written.count(d))
                return action_text(a, model) + " reads " + data_text(d, model) +
                       ", which nothing before it wrote";
        }
        for (Data d : x.writes) {
            bool redo = d.kind == Kind::REDO_B || d.kind == Kind::REDO_W;
            if (redo && a.kind == Do::F && p.recompute != Recompute::NONE)
                continue; // dropped when F ends
            written.insert(d);
        }
    }
    return "";
}

// Every layer of mine, of every micro-batch, forward once and backward once; a stage's in the order
// of its layers, and backward when it has been forward.
inline std::string check_order(const Plan& p, const Model& model) {
    for (int m = 0; m < p.micro_batches; m++)
        for (int s = p.pp_rank; s < p.stages(); s += p.pp) {
            int first = first_layer(p, model, s), end = first_layer(p, model, s + 1);
            int forward = first, backward = end - 1, weights = 0;
            for (const Action& a : p.actions) {
                if (a.micro != m || a.layer < first || a.layer >= end) continue;
                std::string text = action_text(a, model);
                if (a.kind == Do::F && a.layer != forward++)
                    return text + " is out of order: layer " + std::to_string(forward - 1) +
                           " is next";
                bool input = a.kind == Do::B || a.kind == Do::I;
                if (input && a.layer != backward--)
                    return text + " is out of order: layer " + std::to_string(backward + 1) +
                           " is next";
                if (input && forward < end)
                    return text + " comes before the forward pass has ended";
                weights += reaches_weights(a.kind);
            }
            std::string at = "micro-batch " + std::to_string(m);
            if (forward != end) return at + " is not forward through every layer";
            if (p.mode != Mode::TRAIN) continue;
            bool parted = backward == 0 && first == 0; // the embedding has no input half
            if (backward >= first && !parted) return at + " is not backward through every layer";
            if (weights != end - first) return at + " does not reach every layer's weights once";
        }
    for (const Action& a : p.actions)
        if (a.layer >= 0 && !is_mine(p, model, a.layer))
            return action_text(a, model) + " is another rank's";
    return "";
}

inline std::string check_update(const Plan& p, const Model& model) {
    if (p.mode != Mode::TRAIN) return "";
    std::map<int, int> updates, ties, reduced, published;
    bool norm = false, counted = false;
    for (const Action& a : p.actions) {
        std::string text = action_text(a, model);
        if (a.kind == Do::COUNT) counted = true;
        if (a.kind == Do::B && !counted)
            return text + " needs the count of valid targets, and COUNT has not run";
        if (a.kind == Do::TIE) ties[a.bucket]++;
        if (a.kind == Do::NORM) norm = true;
        bool reduce = a.kind == Do::REDUCE;
        if ((reaches_weights(a.kind) || a.kind == Do::TIE || reduce) && norm)
            return text + " comes after NORM";
        if (reduce) reduced[a.bucket]++;
        if (a.kind == Do::TIE && reduced[a.bucket]) return text + " comes after its REDUCE";
        if (reaches_weights(a.kind))
            for (int b : buckets_of(model, a.layer))
                if (reduced[b] && !reduced_each(p, model, b))
                    return text + " adds to " + model.buckets[size_t(b)].name + " after its REDUCE";
        if (a.kind == Do::PUBLISH && !updates.count(a.bucket))
            return text + " comes before its UPDATE";
        if (a.kind == Do::PUBLISH) published[a.bucket]++;
        if (a.kind == Do::UPDATE && !norm) return text + " comes before NORM";
        if (a.kind == Do::UPDATE && updates[a.bucket]++) return text + " comes twice";
    }
    if (!counted) return "the valid targets are never counted";
    for (size_t b = 0; b < model.buckets.size(); b++) {
        const Bucket& bucket = model.buckets[b];
        bool mine = bucket.trainable && bucket_is_mine(p, model, int(b));
        if (mine != bool(updates.count(int(b))))
            return "bucket " + bucket.name +
                   (mine ? " is never updated" : " is updated, and is not trained here");
        auto times = [&](int found, int wanted, const char* what) {
            return found == wanted ? ""
                                   : "bucket " + bucket.name + what + std::to_string(found) +
                                         " times, not " + std::to_string(wanted);
        };
        bool cut = p.shards > 1 && (p.zero == 1 || p.zero == 2);
        int reductions = !mine || !is_reduced(p, model, int(b)) ? 0
                         : reduced_each(p, model, int(b))       ? p.micro_batches
                                                                : 1;
        for (const std::string& wrong :
             {times(ties[int(b)], mine && bucket.tied(), " has its two gradients added "),
              times(reduced[int(b)], reductions, " is reduced "),
              times(published[int(b)], mine && cut, " is published ")})
            if (!wrong.empty()) return wrong;
    }
    return "";
}

// Stages whose activations are kept at once: as many as the schedule says; one where nothing is
// trained.
inline std::string check_live(const Plan& p, const Model& model) {
    std::set<std::pair<int, int>> live; // (micro-batch, stage)
    size_t peak = 0, allowed = 1;
    if (p.mode == Mode::TRAIN) allowed = size_t(peak_live(schedules_of(p)[size_t(p.pp_rank)]));
    for (const Action& a : p.actions) {
        if (a.layer < 0) continue;
        int stage = stage_of(p, model, a.layer);
        bool last = a.layer + 1 == first_layer(p, model, stage + 1),
             first = a.layer == first_layer(p, model, stage);
        if (a.kind == Do::F && first) live.insert({a.micro, stage});
        peak = std::max(peak, live.size());
        if (p.mode == Mode::TRAIN ? reaches_weights(a.kind) && first : last)
            live.erase({a.micro, stage});
    }
    return peak <= allowed ? ""
                           : std::to_string(peak) + " stages hold their activations at once, not " +
                                 std::to_string(allowed);
}

// What my stages make for others is sent, once.
inline std::string check_sends(const Plan& p, const Model& model) {
    std::map<Data, int> sent;
    for (const Action& a : p.actions)
        for (const Transfer& t : a.transfers)
            if (t.send) sent[data_of(p, model, t)]++;
    auto once = [&](Data d) {
        return sent[d] == 1 ? ""
                            : data_text(d, model) + " is sent " + std::to_string(sent[d]) +
                                  " times, not once";
    };
    for (int m = 0; m < p.micro_batches && p.pp > 1; m++)
        for (int s = p.pp_rank; s < p.stages(); s += p.pp) {
            std::string wrong;
            if (s + 1 < p.stages()) wrong = once({Kind::STREAM, first_layer(p, model, s + 1), m});
            if (wrong.empty() && s > 0 && p.mode == Mode::TRAIN)
                wrong = once({Kind::DSTREAM, first_layer(p, model, s), m});
            if (!wrong.empty()) return wrong;
        }
    return "";
}

inline std::string plan_check(const Plan& p, const Model& model) {
    for (auto check : {check_order, check_data, check_sends, check_update, check_live}) {
        std::string wrong = check(p, model);
        if (!wrong.empty()) return wrong;
    }
    return "";
}

// ----------------------------------------------------------------------------
// what no rank can see alone: "" or what is wrong between the plans of a pipeline's ranks

// A step is a group of messages, and the pass that comes after it.
inline std::vector<Step> message_steps(const Plan& p, const Model& model) {
    std::vector<Step> steps;
    size_t named = 0;
    for (const Action& a : p.actions) {
        if (a.kind == Do::SENDRECV) steps.push_back({false, {}, a.transfers});
        if (!computes(a.kind)) continue;
        Pass pass = a.kind == Do::F   ? Pass::F
                    : a.kind == Do::I ? Pass::I
                    : a.kind == Do::W ? Pass::W
                                      : Pass::B;
        for (; named < steps.size(); named++)
            steps[named].has_slot = true,
            steps[named].slot = {pass, a.micro, stage_of(p, model, a.layer)};
    }
    return steps;
}

// Messages pair in order, and all end although sends wait for receives. What the whole pipeline
// does together, the gradient norm, comes behind them, and so do a tied table's two gradients.
// Ranks of other pipelines have the same plans: with them a rank meets at the same actions.
inline std::string check_pipeline(const std::vector<Plan>& ranks, const Model& model) {
    PerStep<Step> steps;
    std::vector<std::vector<int>> ties(ranks.size()); // the buckets, in order
    for (size_t r = 0; r < ranks.size(); r++) {
        std::string rank = "rank " + std::to_string(r);
        int norms = 0;
        for (const Action& a : ranks[r].actions) {
            norms += a.kind == Do::NORM;
            if (a.kind == Do::TIE) ties[r].push_back(a.bucket);
            if (a.kind == Do::SENDRECV && (norms || !ties[r].empty()))
                return rank + ": " + action_text(a, model) + " comes after what ranks do together";
        }
        if (norms != (ranks[r].mode == Mode::TRAIN))
            return rank + " takes part in the gradient norm " + std::to_string(norms) + " times";
        steps.push_back(message_steps(ranks[r], model));
    }
    if (ties.front() != ties.back()) return "the first and the last rank tie different tables";
    PerStep<std::vector<Wait>> waits;
    std::string wrong = pair_transfers(steps, waits);
    return wrong.empty() ? deadlock_in(steps, waits, run_steps(steps, waits)) : wrong;
}

// The check of every rank's plan, and of them together.
inline std::string plans_check(const std::vector<Plan>& ranks, const Model& model) {
    for (size_t r = 0; r < ranks.size(); r++) {
        std::string wrong = plan_check(ranks[r], model);
        if (!wrong.empty()) return "rank " + std::to_string(r) + ": " + wrong;
    }
    return check_pipeline(ranks, model);
}
