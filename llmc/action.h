// action.h - the vocabulary of a plan: actions, the data they touch, and access(), which says so
//   F(m,l)  forward of layer l on micro-batch m          R(m,l)  its dropped activations again
//   B(m,l)  backward, both halves; or apart: I(m,l) the input half, W(m,l) the weight half
//   LOAD    the step's tokens, once     COUNT  its valid targets, over all ranks, before the first B
//   SENDRECV(...)  residual streams (>) and their gradients (<) to and from other pipeline stages
//   GATHER(b) RELEASE(b)  bucket b's weights from all shards, and gone again
//   REDUCE(b)  gradients summed over the ranks that have parts     PUBLISH(b)  updated weights to all
//   TIE(b)  the two gradients of a tied table added     NORM  the global gradient norm
//   UPDATE(b)  the optimizer
//
//   What an action reads and writes is stated once, in access(). The checks, the arena's lifetimes,
//   and the tests that poison everything else all use it.
#pragma once
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>
#include "model.h"
#include "pipeline.h"

enum class Do : uint8_t {
    LOAD,
    COUNT,
    SENDRECV,
    GATHER,
    RELEASE,
    F,
    B,
    I,
    W,
    R,
    REDUCE,
    TIE,
    NORM,
    UPDATE,
    PUBLISH
};
inline const char* do_name(Do kind) {
    const char* names[] = {"LOAD",   "COUNT", "SENDRECV", "GATHER", "RELEASE",
                           "F",      "B",     "I",        "W",      "R",
                           "REDUCE", "TIE",   "NORM",     "UPDATE", "PUBLISH"};
    return names[int(kind)];
}

// A piece of memory by its meaning. `of` is a layer or a bucket.
enum class Kind : uint8_t {
    WEIGHT, // what this rank keeps of a bucket: all of it, in ZeRO-3 its shard
    MASTER,
    MOMENTS,
    GRAD,      // all of it, or its shard where every micro-batch's gradient is reduced
    GRAD_TIED, // the head's gradient of a tied table
    SCALE,
    CONSTANTS,
    CACHE,    // persistent up to here
    GATHERED, // ZeRO-3: a bucket's weights, whole
    PARTIAL,  // one micro-batch's gradient of a bucket, whole, before REDUCE
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
    const char* names[] = {"weight",     "master",     "moments",  "grad",    "grad.tied", "scale",
                           "constants",  "cache",      "gathered", "partial", "valid",     "tokens",
                           "stream",     "dstream",    "kept.b",   "kept.w",  "redo.b",    "redo.w",
                           "gradient.b", "gradient.w", "loss",     "logits",  "scratch"};
    return names[int(k)];
}
inline bool persistent(Kind k) { return k <= Kind::CACHE; }
inline bool of_bucket(Kind k) {
    return k <= Kind::GRAD_TIED || k == Kind::GATHERED || k == Kind::PARTIAL;
}

struct Data {
    Kind kind;
    int of = -1;
    int micro = -1;
    auto operator<=>(const Data&) const = default;
};

struct Action {
    Do kind;
    int micro = -1;
    int layer = -1;     // F B I W R
    int bucket = -1;    // GATHER RELEASE REDUCE TIE UPDATE PUBLISH
    bool first = false; // the first to reach its layer's gradients: it writes them, later ones add
    std::vector<Transfer> transfers = {}; // SENDRECV
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
    // the layout; the stages are dealt to the pp ranks in turn, stage s has layers [first_layer[s],
    // first_layer[s + 1]); empty: one stage
    int pp = 1, pp_rank = 0, chunks = 1;
    Pipeline pipeline = Pipeline::ONE_F_ONE_B;
    std::vector<int> first_layer;
    std::vector<Schedule> given;  // Pipeline::GIVEN: of every rank
    int shards = 1, replicas = 1; // data-parallel ranks that share a bucket; such groups
    int shard = 0;                // mine of the shards
    int zero = 0, prefetch = 1;
    int tp = 1, tp_rank = 0;
    bool sequence_parallel = false;
    std::vector<Action> actions;
    int dp() const { return shards * replicas; }
    int stages() const { return pp * chunks; }
};

// the first layer of a stage; of the stage after the last: the number of layers
inline int first_layer(const Plan& p, const Model& model, int stage) {
    if (p.first_layer.empty()) return stage == 0 ? 0 : model.layers();
    return p.first_layer[size_t(stage)];
}
inline int stage_of(const Plan& p, const Model& model, int layer) {
    int stage = 0;
    while (first_layer(p, model, stage + 1) <= layer) stage++;
    return stage;
}
inline Data data_of(const Plan& p, const Model& model, const Transfer& t) {
    return {t.gradient ? Kind::DSTREAM : Kind::STREAM, first_layer(p, model, t.stage), t.micro};
}
inline bool is_mine(const Plan& p, const Model& model, int layer) {
    return stage_of(p, model, layer) % p.pp == p.pp_rank;
}
inline bool bucket_is_mine(const Plan& p, const Model& model, int bucket) {
    for (int l : model.buckets[size_t(bucket)].layers)
        if (is_mine(p, model, l)) return true;
    return false;
}
// A tied table whose two layers stand on different ranks: each has one of the gradients.
inline bool tied_apart(const Plan& p, const Model& model, int bucket) {
    const Bucket& b = model.buckets[size_t(bucket)];
    return b.tied() && is_mine(p, model, b.layers.front()) != is_mine(p, model, b.layers.back());
}

// ZeRO-2 and 3 reduce a bucket after each micro-batch, and keep a shard of its gradient. Not those
// of the layers of a tied table: its two gradients are added first, at the end of the step.
inline bool reduced_each(const Plan& p, const Model& model, int bucket) {
    if (p.zero < 2 || p.shards == 1) return false;
    for (int l : model.buckets[size_t(bucket)].layers)
        for (int b : buckets_of(model, l))
            if (model.buckets[size_t(b)].tied()) return false;
    return true;
}

// Tensor-parallel ranks have parts of the gradients of what they all hold: of their rows, of their
// query heads where they share a key/value head.
inline int ranks_of_kv_head(const Plan& p, const Model& model) {
    return std::max(1, p.tp / int(model.shape.NKV));
}
inline bool adds_over_tp(const Plan& p, const Model& model, int bucket) {
    const Bucket& b = model.buckets[size_t(bucket)];
    return p.tp > 1 && ((p.sequence_parallel && b.common > 0) ||
                        (ranks_of_kv_head(p, model) > 1 && b.shared > b.common));
}
inline bool is_reduced(const Plan& p, const Model& model, int bucket) {
    return p.dp() > 1 || adds_over_tp(p, model, bucket);
}

// A bucket's elements; where shards are cut they are padded, so that shards are equal, and whole in
// chunks of the norm.
constexpr size_t SHARD_ALIGN = 4096;
inline size_t shard_elements(const Plan& p, const Bucket& b) {
    return p.shards == 1 ? b.elements
                         : round_up(ceil_div(b.elements, size_t(p.shards)), SHARD_ALIGN);
}
inline size_t whole_elements(const Plan& p, const Bucket& b) {
    return shard_elements(p, b) * size_t(p.shards);
}
inline bool is_sharded(const Plan& p, const Model& model, Data d) {
    if (p.shards == 1) return false;
    if (d.kind == Kind::WEIGHT) return p.zero == 3;
    if (d.kind == Kind::MASTER || d.kind == Kind::MOMENTS) return p.zero >= 1;
    return d.kind == Kind::GRAD && reduced_each(p, model, d.of);
}
// What a rank keeps of a bucket's datum: how many elements, and the first of them in the bucket.
inline size_t kept_elements(const Plan& p, const Model& model, Data d) {
    const Bucket& b = model.buckets[size_t(d.of)];
    return is_sharded(p, model, d) ? shard_elements(p, b) : whole_elements(p, b);
}
inline size_t kept_first(const Plan& p, const Model& model, Data d) {
    const Bucket& b = model.buckets[size_t(d.of)];
    return is_sharded(p, model, d) ? shard_elements(p, b) * size_t(p.shard) : 0;
}
inline Kind weight_kind(const Plan& p) {
    return p.zero == 3 && p.shards > 1 ? Kind::GATHERED : Kind::WEIGHT;
}
inline Kind gradient_kind(const Plan& p, const Model& model, int bucket, int layer) {
    if (reduced_each(p, model, bucket)) return Kind::PARTIAL;
    return model.buckets[size_t(bucket)].tied() && layer == model.head() ? Kind::GRAD_TIED
                                                                         : Kind::GRAD;
}

// ----------------------------------------------------------------------------
// what an action touches

struct Access {
    std::vector<Data> reads, writes;
};

// Collectives of the plan are started, and go on beside the actions that follow.
enum class Queue : uint8_t { COMPUTE, COMM };
inline Queue queue_of(Do kind) {
    bool comm =
        kind == Do::SENDRECV || kind == Do::GATHER || kind == Do::REDUCE || kind == Do::PUBLISH;
    return comm ? Queue::COMM : Queue::COMPUTE;
}

inline void access_forward(Access& x, const Plan& p, const Model& model, Action a) {
    int m = a.micro, l = a.layer;
    if (l > 0) x.reads.push_back({Kind::STREAM, l, m});
    if (l == model.head() && p.mode == Mode::TRAIN)
        return; // it keeps its input: the loss belongs to its backward
    x.reads.push_back({Kind::TOKENS, -1, m});
    x.writes.push_back({Kind::SCRATCH, l});
    for (int b : buckets_of(model, l)) x.reads.push_back({weight_kind(p), b});
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
    for (int b : buckets_of(model, l)) x.reads.push_back({weight_kind(p), b});
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
        if (input_half && l > 0) x.reads.push_back({weight_kind(p), b});
        if (!weight_half || !model.buckets[size_t(b)].trainable) continue;
        x.writes.push_back({gradient_kind(p, model, b, l), b});
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

inline void access_end_of_step(Access& x, const Plan& p, const Model& model, Action a) {
    Data grad = {Kind::GRAD, a.bucket}, tied = {Kind::GRAD_TIED, a.bucket},
         weight = {Kind::WEIGHT, a.bucket};
    auto mine = [&](int b) {
        return model.buckets[size_t(b)].trainable && bucket_is_mine(p, model, b);
    };
    if (a.kind == Do::REDUCE) {
        bool each = reduced_each(p, model, a.bucket);
        Data from = each ? Data{Kind::PARTIAL, a.bucket} : grad;
        x.reads = {from}, x.writes = {from}; // the sum arises in place
        if (each) x.writes.push_back(grad);
        if (each && !a.first) x.reads.push_back(grad);
    } else if (a.kind == Do::TIE) {
        // apart, the other stage has the one that is not here
        bool embeds = is_mine(p, model, 0), apart = tied_apart(p, model, a.bucket);
        if (!apart || embeds) x.reads.push_back(grad);
        if (!apart || !embeds) x.reads.push_back(tied);
        x.writes = {grad};
        if (apart) x.writes.push_back(tied);
    } else if (a.kind == Do::NORM) {
        for (size_t b = 0; b < model.buckets.size(); b++)
            if (mine(int(b))) x.reads.push_back({Kind::GRAD, int(b)});
        x.reads.push_back({Kind::SCALE});
        x.writes = {{Kind::SCALE}, {Kind::SCRATCH, -1}};
    } else if (a.kind == Do::UPDATE) {
        x.reads = {grad, {Kind::SCALE}};
        for (Kind k : {Kind::WEIGHT, Kind::MASTER, Kind::MOMENTS})
            if (p.adamw || k != Kind::MOMENTS)
                x.reads.push_back({k, a.bucket}), x.writes.push_back({k, a.bucket});
    } else {
        x.reads = {weight}, x.writes = {weight}; // PUBLISH
    }
}

// The only statement of what depends on what.
inline Access access(const Plan& p, const Model& model, const Action& a) {
    Access x;
    switch (a.kind) {
    case Do::LOAD:
        for (int m = 0; m < p.micro_batches; m++) x.writes.push_back({Kind::TOKENS, -1, m});
        x.writes.push_back({Kind::VALID});
        break;
    case Do::COUNT: x.reads = {{Kind::VALID}}, x.writes = {{Kind::VALID}}; break;
    case Do::SENDRECV:
        for (const Transfer& t : a.transfers)
            (t.send ? x.reads : x.writes).push_back(data_of(p, model, t));
        break;
    case Do::GATHER:
        x.reads = {{Kind::WEIGHT, a.bucket}}, x.writes = {{Kind::GATHERED, a.bucket}};
        break;
    case Do::RELEASE: break; // says where the last reader was
    case Do::F: access_forward(x, p, model, a); break;
    case Do::R: access_recompute(x, p, model, a); break;
    case Do::B:
    case Do::I:
    case Do::W: access_backward(x, p, model, a); break;
    case Do::REDUCE:
    case Do::PUBLISH:
    case Do::TIE:
    case Do::NORM:
    case Do::UPDATE: access_end_of_step(x, p, model, a); break;
    }
    return x;
}

// ----------------------------------------------------------------------------
// when a collective that has been started must be finished

// For each action the one before which it must be over. Compute is over when it returns. A
// collective goes on beside what follows, until an action touches what it writes, writes what it
// reads or lets its bytes go; at the latest to the end of the plan. One that reads what only it
// still needs (a stream to send, a micro-batch's gradient) is over before the next of its kind
// starts: else those bytes would add up. With prefetch 0 it does not go on at all. NORM, and TIE
// across ranks, come when all is over; the sums of tensor parallelism inside a layer do not wait.
inline std::vector<int> finish_before(const Plan& p, const Model& model) {
    std::vector<Access> touched;
    for (const Action& a : p.actions) touched.push_back(access(p, model, a));
    auto meet = [](const std::vector<Data>& x, const std::vector<Data>& y) {
        return std::find_first_of(x.begin(), x.end(), y.begin(), y.end()) != x.end();
    };
    auto speaks = [&](const Action& a) {
        return a.kind == Do::NORM || (a.kind == Do::TIE && tied_apart(p, model, a.bucket));
    };
    auto conflict = [&](size_t i, size_t j) {
        const Access &x = touched[i], &y = touched[j];
        const Action &a = p.actions[i], &b = p.actions[j];
        bool holds =
            !std::all_of(x.reads.begin(), x.reads.end(), [](Data d) { return persistent(d.kind); });
        return meet(x.writes, y.reads) || meet(x.writes, y.writes) || meet(x.reads, y.writes) ||
               (b.kind == Do::RELEASE && a.bucket == b.bucket) || speaks(b) ||
               (holds && (a.kind == b.kind || p.prefetch == 0));
    };
    std::vector<int> before;
    for (size_t i = 0, j; i < touched.size(); i++) {
        for (j = i + 1; queue_of(p.actions[i].kind) == Queue::COMM && j < touched.size(); j++)
            if (conflict(i, j)) break;
        before.push_back(int(j));
    }
    return before;
}

// ----------------------------------------------------------------------------
// print

inline std::string action_text(const Action& a, const Model& model) {
    std::string s = do_name(a.kind);
    if (a.kind == Do::SENDRECV) {
        for (const Transfer& t : a.transfers)
            s += (s.size() == 8 ? "(" : ", ") + std::string(t.send ? "to " : "from ") +
                 std::to_string(t.peer) + ": " + name_of(t);
        return s + ")";
    }
    if (a.bucket >= 0) return s + "(" + model.buckets[size_t(a.bucket)].name + ")";
    if (a.layer < 0) return s;
    return s + "(" + std::to_string(a.micro) + "," + std::to_string(a.layer) + ")";
}

inline std::string data_text(Data d, const Model& model) {
    std::string s = kind_name(d.kind);
    if (d.of < 0 && d.micro < 0) return s;
    std::string of = d.of < 0            ? ""
                     : of_bucket(d.kind) ? model.buckets[size_t(d.of)].name
                                         : std::to_string(d.of);
    return s + "(" + (d.micro < 0 ? of : std::to_string(d.micro) + (of.empty() ? "" : "," + of)) +
           ")";
}

// Runs of layers fold into one word, F(0,0..13). A line for each micro-batch's forward and backward;
// on one stage, of more than four micro-batches the middle ones, which are like their neighbours,
// are only counted.
inline std::string plan_text(const Plan& p, const Model& model) {
    std::string text, line;
    auto flush = [&] {
        if (!line.empty()) text += line.substr(1) + "\n";
        line.clear();
    };
    Action previous = {Do::LOAD};
    for (size_t i = 0; i < p.actions.size(); i++) {
        Action a = p.actions[i];
        if (p.pp == 1 && p.micro_batches > 4 && a.micro > 1 && a.micro < p.micro_batches - 1) {
            if (previous.micro < 2)
                flush(), text += "... micro-batches 2 to " + std::to_string(p.micro_batches - 2) +
                                 " like the first\n";
            previous = a;
            continue;
        }
        bool stays =
            a.kind == Do::GATHER || a.kind == Do::RELEASE || (a.kind == Do::REDUCE && a.micro >= 0);
        if (!stays && (a.micro != previous.micro || (a.kind == Do::F) != (previous.kind == Do::F)))
            flush();
        size_t end = i;
        int way = 0;
        while (end + 1 < p.actions.size()) {
            const Action& n = p.actions[end + 1];
            int step = n.layer - p.actions[end].layer;
            if (n.kind != a.kind || n.micro != a.micro || n.layer < 0 ||
                (step != 1 && step != -1) || (way && step != way))
                break;
            way = step, end++;
        }
        std::string word = action_text(a, model);
        if (end > i) word.insert(word.size() - 1, ".." + std::to_string(p.actions[end].layer));
        line += " " + word;
        if (!stays) previous = p.actions[end];
        i = end;
    }
    flush();
    return text;
}
