// plan.h - one optimizer step as a list of actions: generators, passes, the check, the print
//   A generator turns a configuration into a list of actions; a pass turns a list into a list; the
//   executor (step.h)
//   is one loop over the result. This is the plan of 2 blocks, 2 micro-batches, selective
//   recomputation, tied head
//   (layer 0 embeds, 1 and 2 are blocks, 3 is the head); `train_gpt --explain` prints yours:
//
//     LOAD COUNT
//     F(0,0..3)
//     B(0,3) R(0,2) B(0,2) R(0,1) B(0,1..0)
//     F(1,0..3)
//     B(1,3) R(1,2) B(1,2) R(1,1) B(1,1..0)
//     TIE(embedding) NORM UPDATE(embedding) UPDATE(positions) UPDATE(block.0) UPDATE(block.1) UPDATE(head)
//
//   F(m,l)  forward of layer l on micro-batch m          R(m,l)  its dropped activations again
//   B(m,l)  backward, both halves; or apart: I(m,l) the input half, W(m,l) the weight half
//   LOAD    the step's tokens, once     COUNT  its valid targets, over all ranks, before the first
//   B
//   TIE(b)  the two gradients of a tied table added     NORM  the global gradient norm
//   UPDATE(b)  the optimizer
//
//   What an action reads and writes is stated once, in access(). The check below, the arena's
//   lifetimes, and the
//   tests that poison everything else all use it.
#pragma once
#include <map>
#include <set>
#include <string>
#include <vector>
#include "model.h"

enum class Do : uint8_t { LOAD, COUNT, F, B, I, W, R, TIE, NORM, UPDATE };
inline const char* do_name(Do kind) {
    const char* names[] = {"LOAD", "COUNT", "F", "B", "I", "W", "R", "TIE", "NORM", "UPDATE"};
    return names[int(kind)];
}

struct Action {
    Do kind;
    int micro = -1;
    int layer = -1;     // F B I W R
    int bucket = -1;    // TIE UPDATE
    bool first = false; // the first to reach its layer's gradients: it writes them, later ones add
};

enum class Mode { TRAIN, EVALUATE, GENERATE };

struct Plan {
    Mode mode = Mode::TRAIN;
    size_t B = 1, T = 1; // a micro-batch
    int micro_batches = 1;
    size_t cache = 0; // GENERATE: positions that the key/value cache holds
    Recompute recompute = Recompute::NONE;
    bool split_backward = false; // B as I and W
    bool adamw = true;           // moments exist
    std::vector<Action> actions;
};

// ----------------------------------------------------------------------------
// generators and passes

// Before: nothing. After: F(m) B(m) for each micro-batch, one after the other: gradient
// accumulation.
// Evaluation and generation: F(m) alone.
inline Plan schedule(Plan p) {
    for (int m = 0; m < p.micro_batches; m++) {
        p.actions.push_back({Do::F, m});
        if (p.mode == Mode::TRAIN) p.actions.push_back({Do::B, m});
    }
    return p;
}

// Before: F(m) B(m). After: the step begins with its tokens and the count of its valid targets.
inline Plan add_load(Plan p) {
    if (p.mode == Mode::GENERATE) return p; // the prompt is given
    p.actions.insert(p.actions.begin(), {{Do::LOAD}, {Do::COUNT}});
    return p;
}

// Before: F(m) B(m). After: F(m,l) in order, B(m,l) in reverse. Apart, every I comes before the
// first W; the embedding
// has no input half, and the head's halves cannot part, since its logits are gone.
inline Plan add_layers(const Plan& in, const Model& model) {
    Plan p = in;
    p.actions.clear();
    std::set<int> reached;
    auto add = [&](Do kind, int m, int l) {
        bool first = (kind == Do::B || kind == Do::W) && reached.insert(l).second;
        p.actions.push_back({kind, m, l, -1, first});
    };
    for (Action a : in.actions) {
        int head = model.head();
        if (a.kind == Do::F)
            for (int l = 0; l <= head; l++) add(Do::F, a.micro, l);
        else if (a.kind == Do::B && !p.split_backward)
            for (int l = head; l >= 0; l--) add(Do::B, a.micro, l);
        else if (a.kind == Do::B) {
            add(Do::B, a.micro, head);
            for (int l = head - 1; l >= 1; l--) add(Do::I, a.micro, l);
            for (int l = head - 1; l >= 0; l--) add(Do::W, a.micro, l);
        } else
            p.actions.push_back(a);
    }
    return p;
}

// Before: F(m,l), B or I (m,l). After: R(m,l) stands before each block's backward
// (arXiv:1604.06174, arXiv:2205.05198).
inline Plan add_recompute(const Plan& in, const Model& model) {
    if (in.recompute == Recompute::NONE) return in;
    Plan p = in;
    p.actions.clear();
    for (Action a : in.actions) {
        bool block = a.layer > 0 && a.layer < model.head();
        if (block && (a.kind == Do::B || a.kind == Do::I))
            p.actions.push_back({Do::R, a.micro, a.layer});
        p.actions.push_back(a);
    }
    return p;
}

// Before: all backward passes. After: tied gradients summed, the norm, every trainable bucket
// updated.
inline Plan add_update(Plan p, const Model& model) {
    if (p.mode != Mode::TRAIN) return p;
    for (size_t b = 0; b < model.buckets.size(); b++)
        if (model.buckets[b].tied() && model.buckets[b].trainable)
            p.actions.push_back({Do::TIE, -1, -1, int(b)});
    p.actions.push_back({Do::NORM});
    for (size_t b = 0; b < model.buckets.size(); b++)
        if (model.buckets[b].trainable) p.actions.push_back({Do::UPDATE, -1, -1, int(b)});
    return p;
}

inline Plan make_plan(const Plan& options, const Model& model) {
    Plan p = schedule(options);
    p = add_load(p);
    p = add_layers(p, model);
    p = add_recompute(p, model);
    return add_update(p, model);
}

// ----------------------------------------------------------------------------
// what an action touches

// A piece of memory by its meaning. `of` is a layer or a bucket.
enum class Kind : uint8_t {
    WEIGHT,
    MASTER,
    MOMENTS,
    GRAD,
    GRAD_TIED,
    SCALE,
    CONSTANTS,
    CACHE, // persistent
    VALID,
    TOKENS,
    STREAM,
    DSTREAM, // stream (m,l): what layer l reads; dstream (m,l): its gradient
    KEPT_B,
    KEPT_W,
    REDO_B,
    REDO_W, // rows of the activation table: kept or made again, read last by B or W
    GRADIENT_B,
    GRADIENT_W,
    LOSS,
    LOGITS,
    SCRATCH
};
inline const char* kind_name(Kind k) {
    const char* names[] = {"weight",    "master", "moments", "grad",   "grad.tied",  "scale",
                           "constants", "cache",  "valid",   "tokens", "stream",     "dstream",
                           "kept.b",    "kept.w", "redo.b",  "redo.w", "gradient.b", "gradient.w",
                           "loss",      "logits", "scratch"};
    return names[int(k)];
}
inline bool persistent(Kind k) { return k <= Kind::CACHE; }

struct Data {
    Kind kind;
    int of = -1;
    int micro = -1;
    auto operator<=>(const Data&) const = default;
};

enum class Queue : uint8_t { COMPUTE, COMM };

struct Access {
    std::vector<Data> reads, writes;
    Queue queue = Queue::COMPUTE;
};

inline void access_forward(Access& x, const Plan& p, const Model& model, Action a) {
    int m = a.micro, l = a.layer;
    if (l > 0) x.reads.push_back({Kind::STREAM, l, m});
    if (l == model.head() && p.mode == Mode::TRAIN)
        return; // it keeps its input: the loss belongs to its backward
    x.reads.push_back({Kind::TOKENS, -1, m});
    x.writes.push_back({Kind::SCRATCH, l});
    for (int b : buckets_of(model, l)) x.reads.push_back({Kind::WEIGHT, b});
    if (l < model.head()) x.writes.push_back({Kind::STREAM, l + 1, m});
    if (l == model.head())
        x.writes.push_back({p.mode == Mode::EVALUATE ? Kind::LOSS : Kind::LOGITS, -1, m});
    if (l == 0 || l == model.head()) return;
    x.reads.push_back({Kind::CONSTANTS});
    for (Kind k : {Kind::KEPT_B, Kind::KEPT_W, Kind::REDO_B, Kind::REDO_W})
        x.writes.push_back({k, l, m});
    if (p.mode == Mode::GENERATE) {
        x.reads.push_back({Kind::CACHE, l});
        x.writes.push_back({Kind::CACHE, l});
    }
}

inline void access_recompute(Access& x, const Plan& p, const Model& model, Action a) {
    int m = a.micro, l = a.layer;
    x.reads = {{Kind::STREAM, l, m}, {Kind::TOKENS, -1, m}, {Kind::CONSTANTS}};
    for (int b : buckets_of(model, l)) x.reads.push_back({Kind::WEIGHT, b});
    if (p.recompute == Recompute::SELECTIVE)
        for (Kind k : {Kind::KEPT_B, Kind::KEPT_W}) x.reads.push_back({k, l, m});
    for (Kind k : {Kind::REDO_B, Kind::REDO_W}) x.writes.push_back({k, l, m});
    x.writes.push_back({Kind::SCRATCH, l});
}

inline void access_backward(Access& x, const Plan& p, const Model& model, Action a) {
    int m = a.micro, l = a.layer;
    bool input_half = a.kind != Do::W, weight_half = a.kind != Do::I;
    bool block = l > 0 && l < model.head(), level_none = p.recompute == Recompute::NONE;
    x.reads.push_back({Kind::TOKENS, -1, m});
    x.writes.push_back({Kind::SCRATCH, l});
    if (l > 0) x.reads.push_back({Kind::STREAM, l, m});
    if (l < model.head()) x.reads.push_back({Kind::DSTREAM, l + 1, m});
    if (l > 0 && input_half) x.writes.push_back({Kind::DSTREAM, l, m});
    if (l == model.head())
        x.reads.push_back({Kind::VALID}), x.writes.push_back({Kind::LOSS, -1, m});
    for (int b : buckets_of(model, l)) {
        if (input_half && l > 0) x.reads.push_back({Kind::WEIGHT, b});
        if (!weight_half || !model.buckets[b].trainable) continue;
        bool tied = model.buckets[b].tied() && l == model.head();
        x.writes.push_back({tied ? Kind::GRAD_TIED : Kind::GRAD, b});
        if (!a.first) x.reads.push_back(x.writes.back());
    }
    if (!block) return;
    x.reads.push_back({Kind::CONSTANTS});
    for (Kind k : {Kind::KEPT_B, Kind::REDO_B, Kind::KEPT_W, Kind::REDO_W}) {
        bool redo = k == Kind::REDO_B || k == Kind::REDO_W,
             of_b = k == Kind::KEPT_B || k == Kind::REDO_B;
        if ((input_half || !of_b) && !(redo && level_none)) x.reads.push_back({k, l, m});
    }
    if (input_half) x.writes.push_back({Kind::GRADIENT_B, l, m});
    (input_half ? x.writes : x.reads).push_back({Kind::GRADIENT_W, l, m});
}

// The only statement of what depends on what.
inline Access access(const Plan& p, const Model& model, Action a) {
    Access x;
    switch (a.kind) {
    case Do::LOAD:
        for (int m = 0; m < p.micro_batches; m++) x.writes.push_back({Kind::TOKENS, -1, m});
        x.writes.push_back({Kind::VALID});
        break;
    case Do::COUNT: x.reads = {{Kind::VALID}}, x.writes = {{Kind::VALID}}; break;
    case Do::F: access_forward(x, p, model, a); break;
    case Do::R: access_recompute(x, p, model, a); break;
    case Do::B:
    case Do::I:
    case Do::W: access_backward(x, p, model, a); break;
    case Do::TIE:
        x.reads = {{Kind::GRAD, a.bucket}, {Kind::GRAD_TIED, a.bucket}};
        x.writes = {{Kind::GRAD, a.bucket}};
        break;
    case Do::NORM:
        for (size_t b = 0; b < model.buckets.size(); b++)
            if (model.buckets[b].trainable) x.reads.push_back({Kind::GRAD, int(b)});
        x.reads.push_back({Kind::SCALE});
        x.writes = {{Kind::SCALE}, {Kind::SCRATCH, -1}};
        break;
    case Do::UPDATE:
        x.reads = {{Kind::GRAD, a.bucket}, {Kind::SCALE}};
        for (Kind k : {Kind::WEIGHT, Kind::MASTER, Kind::MOMENTS})
            if (p.adamw || k != Kind::MOMENTS)
                x.reads.push_back({k, a.bucket}), x.writes.push_back({k, a.bucket});
        break;
    }
    return x;
}

// ----------------------------------------------------------------------------
// print

inline std::string action_text(Action a, const Model& model) {
    std::string s = do_name(a.kind);
    if (a.bucket >= 0) return s + "(" + model.buckets[a.bucket].name + ")";
    if (a.layer < 0) return s;
    return s + "(" + std::to_string(a.micro) + "," + std::to_string(a.layer) + ")";
}

inline std::string data_text(Data d, const Model& model) {
    std::string s = kind_name(d.kind);
    if (d.of < 0 && d.micro < 0) return s;
    bool bucket = d.kind <= Kind::GRAD_TIED;
    std::string of = d.of < 0 ? "" : bucket ? model.buckets[d.of].name : std::to_string(d.of);
    return s + "(" + (d.micro < 0 ? of : std::to_string(d.micro) + (of.empty() ? "" : "," + of)) +
           ")";
}

// Runs of layers fold into one word, F(0,0..13). A line for each micro-batch's forward and
// backward; of more than
// four micro-batches the middle ones, which are like their neighbours, are only counted.
inline std::string plan_text(const Plan& p, const Model& model) {
    std::string text, line;
    auto flush = [&] {
        if (!line.empty()) text += line.substr(1) + "\n";
        line.clear();
    };
    Action previous = {Do::LOAD};
    for (size_t i = 0; i < p.actions.size(); i++) {
        Action a = p.actions[i];
        if (p.micro_batches > 4 && a.micro > 1 && a.micro < p.micro_batches - 1) {
            if (previous.micro < 2)
                flush(), text += "... micro-batches 2 to " + std::to_string(p.micro_batches - 2) +
                                 " like the first\n";
            previous = a;
            continue;
        }
        if (a.micro != previous.micro || (a.kind == Do::F) != (previous.kind == Do::F)) flush();
        size_t end = i;
        int way = 0;
        while (end + 1 < p.actions.size()) {
            Action n = p.actions[end + 1];
            int step = n.layer - p.actions[end].layer;
            if (n.kind != a.kind || n.micro != a.micro || n.layer < 0 ||
                (step != 1 && step != -1) || (way && step != way))
                break;
            way = step, end++;
        }
        std::string word = action_text(a, model);
        if (end > i) word.insert(word.size() - 1, ".." + std::to_string(p.actions[end].layer));
        line += " " + word;
        i = end, previous = p.actions[end];
    }
    flush();
    return text;
}

// ----------------------------------------------------------------------------
// check: an empty text, or what is wrong with the plan

inline std::string check_data(const Plan& p, const Model& model) {
    std::set<Data> written;
    for (Action a : p.actions) {
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

// Every layer of every micro-batch forward once and backward once, in the order of the layers.
inline std::string check_order(const Plan& p, const Model& model) {
    int last = model.layers() - 1;
    for (int m = 0; m < p.micro_batches; m++) {
        int forward = 0, backward = last, weights = 0;
        for (Action a : p.actions) {
            if (a.micro != m) continue;
            std::string text = action_text(a, model);
            if (a.kind == Do::F && a.layer != forward++)
                return text + " is out of order: layer " + std::to_string(forward - 1) + " is next";
            bool input = a.kind == Do::B || a.kind == Do::I;
            if (input && a.layer != backward--)
                return text + " is out of order: layer " + std::to_string(backward + 1) +
                       " is next";
            if (input && forward <= last) return text + " comes before the forward pass has ended";
            weights += a.kind == Do::B || a.kind == Do::W;
        }
        std::string at = "micro-batch " + std::to_string(m);
        if (forward != last + 1) return at + " is not forward through every layer";
        if (p.mode != Mode::TRAIN) continue;
        if (backward > (p.split_backward ? 0 : -1))
            return at + " is not backward through every layer";
        if (weights != last + 1) return at + " does not reach every layer's weights once";
    }
    return "";
}

inline std::string check_update(const Plan& p, const Model& model) {
    if (p.mode != Mode::TRAIN) return "";
    std::map<int, int> updates, ties;
    bool norm = false, counted = false;
    for (Action a : p.actions) {
        std::string text = action_text(a, model);
        if (a.kind == Do::COUNT) counted = true;
        if (a.kind == Do::B && !counted)
            return text + " needs the count of valid targets, and COUNT has not run";
        if (a.kind == Do::TIE) ties[a.bucket]++;
        if (a.kind == Do::NORM) norm = true;
        if ((a.kind == Do::B || a.kind == Do::W || a.kind == Do::TIE) && norm)
            return text + " comes after NORM";
        if (a.kind == Do::UPDATE && !norm) return text + " comes before NORM";
        if (a.kind == Do::UPDATE && updates[a.bucket]++) return text + " comes twice";
    }
    for (size_t b = 0; b < model.buckets.size(); b++) {
        const Bucket& bucket = model.buckets[b];
        if (bucket.trainable && !updates.count(int(b)))
            return "bucket " + bucket.name + " is never updated";
        if (ties[int(b)] != int(bucket.trainable && bucket.tied()))
            return "bucket " + bucket.name + " has its two gradients added " +
                   std::to_string(ties[int(b)]) + " times";
    }
    return "";
}

// Kept activations of one micro-batch at a time is what accumulation on one stage may hold.
inline std::string check_live(const Plan& p, const Model& model) {
    std::set<int> live;
    size_t peak = 0;
    for (Action a : p.actions) {
        if (a.kind == Do::F) live.insert(a.micro);
        peak = std::max(peak, live.size());
        bool done = (a.kind == Do::B || a.kind == Do::W) && a.layer == 0;
        if (done || (p.mode != Mode::TRAIN && a.layer == model.head())) live.erase(a.micro);
    }
    if (peak > 1)
        return std::to_string(peak) + " micro-batches hold their activations at once; 1 is enough";
    return live.empty() ? "" : "activations are never let go";
}

inline std::string plan_check(const Plan& p, const Model& model) {
    for (auto check : {check_order, check_data, check_update, check_live}) {
        std::string wrong = check(p, model);
        if (!wrong.empty()) return wrong;
    }
    return "";
}
