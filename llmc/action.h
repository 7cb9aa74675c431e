// action.h - the vocabulary of a plan: actions, the data they touch, and access(), which says so
//   An optimizer step is a list of actions. m is a micro-batch, l a layer, b a bucket of
//   parameters; layer 0 embeds, the layers after it are blocks, the last one is the head.
//     LOAD            read the step's tokens            COUNT  sum valid targets over all ranks
//     F(m,l)          forward of layer l                R(m,l) recompute the activations F dropped
//     B(m,l)          backward: I(m,l) the input's gradient, then W(m,l) the weights' gradient
//     SENDRECV(...)   activations and gradients to and from other pipeline stages
//     GATHER(b)       a bucket's weights from all its shards         RELEASE(b)  its bytes are free
//     REDUCE(b)       its gradient, summed over the ranks that hold parts of it
//     TIE(b)          the two gradients of a tied table, added
//     NORM            the global gradient norm: scale and finiteness, in device memory
//     UPDATE(b)       the optimizer                     PUBLISH(b) updated weights to all shards
//     FETCH(b.c)      a chunk of offloaded state, for its update     PARK(b.c) the chunk back
//     PARK(m,l)       a block's activations to another tier          FETCH(m,l) and back
//     FETCH(b)        a bucket's offloaded weights, or this rank's shard, for layers
//   Words used throughout:
//     stage    consecutive layers on one pipeline rank   shard    this rank's part of a bucket
//     owner    the rank that contributes an element      range    {first, count} of elements
//     partial  a gradient still to be summed             in flight  started, not yet finished
//   access() states once what an action reads and writes. The plan's check, the arena's lifetimes,
//   the waits for collectives and the tests that poison all other bytes use it.
#pragma once
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>
#include "buckets.h"
#include "optimizer.h"
#include "pipeline.h"

namespace llmc {

// clang-format off
enum class Op : uint8_t {
    LOAD, COUNT, SENDRECV, GATHER, RELEASE, F, B, I, W, R, REDUCE, TIE, NORM, FETCH, UPDATE, PARK,
    PUBLISH
};
// The words of --explain, of timelines and of the watchdog.
inline const char* op_name(Op op) {
    static const char* names[] = {
        "LOAD", "COUNT", "SENDRECV", "GATHER", "RELEASE", "F", "B", "I", "W", "R", "REDUCE", "TIE",
        "NORM", "FETCH", "UPDATE", "PARK", "PUBLISH"};
    return names[int(op)];
}

// A piece of memory by its meaning. The table below says what `of` counts and how long it lives.
enum class Kind : uint8_t {
    WEIGHT, MASTER, STATE, GRAD, GRAD_TIED, SCALE, CONSTANTS, CACHE,
    GATHERED, PARTIAL, STAGED, VALID, TOKENS, STREAM, DSTREAM,
    KEPT_B, KEPT_W, REDO_B, REDO_W, GRADIENT_B, GRADIENT_W, PARKED,
    LOSS, LOGITS, SCRATCH
};
struct KindRow {
    const char* name;
    bool persistent; // lives for the whole run
    bool of_bucket;  // `of` is a bucket, else a layer
};
inline const KindRow& kind_row(Kind kind) {
    static const KindRow rows[] = {
        {"weight",     true,  true},  // what this rank keeps: the whole bucket, in ZeRO-3 its shard
        {"master",     true,  true},  // the bits that narrow weights lack (small_states.cuh)
        {"state",      true,  true},  // a state tensor of the optimizer; `micro` is its number
        {"grad",       true,  true},  // the step's gradient: whole, or its shard in ZeRO-2 and 3
        {"grad.tied",  true,  true},  // the head's gradient of a tied table
        {"scale",      true,  false}, // the norm, the clipping factor, finiteness
        {"constants",  true,  false}, // RoPE's table or ALiBi's slopes
        {"cache",      true,  false}, // keys and values of generated tokens
        {"gathered",   false, true},  // the bucket's weights, whole: ZeRO-3's, or fetched
        {"partial",    false, true},  // one micro-batch's gradient, whole, before REDUCE
        {"staged",     false, true},  // offload: a chunk, where UPDATE runs; a shard of weights
        {"valid",      false, false}, // the number of valid targets
        {"tokens",     false, false}, // tokens, targets, positions, starts of documents
        {"stream",     false, false}, // stream(m,l): the input of layer l
        {"dstream",    false, false}, // dstream(m,l): its gradient
        {"kept.b",     false, false}, // activations that last from F on; the input half of B is the
        {"kept.w",     false, false}, //   last to read a .b, the weight half a .w
        {"redo.b",     false, false}, // activations that R makes again
        {"redo.w",     false, false},
        {"gradient.b", false, false}, // gradients of activations
        {"gradient.w", false, false},
        {"parked",     false, false}, // offload: the datum of kind `chunk`, in another tier
        {"loss",       false, false},
        {"logits",     false, false},
        {"scratch",    false, false}, // what a layer needs only while it runs
    };

    // Rows stand in the order of the enum, so the kind itself is the index.
    return rows[int(kind)];
}
// clang-format on

// Shorthands for the table's columns.
inline const char* kind_name(Kind kind) { return kind_row(kind).name; }
inline bool persistent(Kind kind) { return kind_row(kind).persistent; }
inline bool of_bucket(Kind kind) { return kind_row(kind).of_bucket; }

// The rows of the activation table lie in these six groups.
constexpr Kind ACTIVATION_KINDS[] = {Kind::KEPT_B, Kind::KEPT_W,     Kind::REDO_B,
                                     Kind::REDO_W, Kind::GRADIENT_B, Kind::GRADIENT_W};

// One datum, by meaning and number: the key of every table of places. Where it lies is in arena.h.
struct Data {
    Kind kind;
    int of = -1;    // a layer or a bucket
    int micro = -1; // a micro-batch; of STATE: which tensor
    int chunk = -1; // of a bucket, where some of it is offloaded; -1: all of it; of PARKED: the
                    //   kind that it holds
    auto operator<=>(const Data&) const = default;
};

// One line of a plan. Only the fields that its op names have a value; the others stay -1.
struct Action {
    Op op;
    int micro = -1;     // F B I W R; REDUCE where each micro-batch is reduced
    int layer = -1;     // F B I W R
    int bucket = -1;    // GATHER RELEASE REDUCE TIE UPDATE PUBLISH FETCH PARK
    bool first = false; // B W REDUCE: its gradients hold nothing yet, so it writes; later ones add
    std::vector<Transfer> transfers = {}; // SENDRECV
    int chunk = -1; // FETCH UPDATE PARK of an offloaded bucket
};

// A plan serves one of these; each has its own forward and its own end.
enum class Mode { TRAIN, EVALUATE, GENERATE };

// Where bytes lie: where the step runs, the host's memory, or a file.
enum class Tier : uint8_t { DEVICE, HOST, DISK };
constexpr int TIERS = 3;

// Data in another tier, brought where the step runs while they are used (offload.h).
struct Offload {
    Tier optimizer = Tier::DEVICE;   // masters and state
    Tier activations = Tier::DEVICE; // blocks' inputs and kept activations, from F to backward
    Tier weights = Tier::DEVICE;
    size_t chunk = size_t(1) << 24;  // elements of state that move together: SHARD_ALIGN divides it

    // Updates go by chunks where they find some of their data elsewhere.
    bool cuts_updates() const { return optimizer != Tier::DEVICE || weights != Tier::DEVICE; }
};

// A layout whose layers find data where these tiers put them.
inline Layout with_tiers(Layout layout, const Offload& offload) {
    layout.weights_away = offload.weights != Tier::DEVICE;
    return layout;
}

// A plan is made for these, for a layout and for a model.
struct PlanOptions {
    Mode mode = Mode::TRAIN;
    size_t B = 1, T = 1; // a micro-batch: sequences, and the length of each
    int micro_batches = 1;
    size_t cache = 0; // GENERATE: positions that the key/value cache holds
    RecomputeLevels recompute;
    bool split_backward = false; // B as I and W
    Optimizer optimizer = Optimizer::ADAMW;
    Offload offload = {};
    Masters masters = Masters::FLOAT; // of weights that are narrower than float
    States states = States::FLOAT;    // AdamW's moments
    Stored stored = Stored::WIDE;
    bool whole_sequences = false; // context-parallel ranks take sequences of their own
};

struct Plan : PlanOptions {
    Layout layout;
    std::vector<Action> actions;

    // The rows of a micro-batch on this rank: context parallelism shares out the sequence.
    size_t rows() const { return B * T / size_t(layout.cp.size); }

    // The input of a micro-batch in numbers: four a row, then the positions of keys that are not
    // the rows' own, in a cache or on other ranks.
    size_t input_numbers() const { return 4 * rows() + (layout.cp.size > 1 ? B * T : cache); }
};

// Offloading a datum is a row here.
inline Tier tier_of(const Plan& p, Data d) {
    switch (d.kind) {
    case Kind::WEIGHT: return p.offload.weights;
    case Kind::MASTER:
    case Kind::STATE: return p.offload.optimizer;
    // Layers read activations under their own kinds, when FETCH has brought them.
    case Kind::PARKED: return p.offload.activations;
    default: return Tier::DEVICE;
    }
}

// Ops whose pass makes gradients of weights; ops that run a layer at all.
inline bool reaches_weights(Op op) { return op == Op::B || op == Op::W; }
inline bool computes(Op op) {
    return op == Op::F || op == Op::B || op == Op::I || op == Op::W || op == Op::R;
}

// ----------------------------------------------------------------------------
// which layers stand where

// The first layer of a stage; of the stage after the last one: the number of layers.
inline int first_layer(const Layout& layout, const Model& model, int stage) {
    if (layout.first_layer.empty())
        return stage == 0 ? 0 : model.layers();
    return layout.first_layer[stage];
}

// Stages are few, so a walk over them is fast enough.
inline int stage_of(const Layout& layout, const Model& model, int layer) {
    int stage = 0;
    while (first_layer(layout, model, stage + 1) <= layer)
        stage++;
    return stage;
}

// A transfer moves the stream between two stages: the later one's input, or its gradient.
inline Data data_of(const Layout& layout, const Model& model, const Transfer& t) {
    Kind kind = t.gradient ? Kind::DSTREAM : Kind::STREAM;
    return {kind, first_layer(layout, model, t.stage), t.micro};
}

// Stages go round the pipeline's ranks, so with chunks a rank has several, pp.size apart.
inline bool is_mine(const Layout& layout, const Model& model, int layer) {
    return stage_of(layout, model, layer) % layout.pp.size == layout.pp.rank;
}

// A tied table has two layers, and both ranks that run one of them keep it.
inline bool bucket_is_mine(const Layout& layout, const Model& model, int bucket) {
    for (int l : model.buckets[bucket].layers)
        if (is_mine(layout, model, l)) return true;
    return false;
}

// A tied table whose two layers stand on different ranks: each rank has one of the gradients.
inline bool tied_apart(const Layout& layout, const Model& model, int bucket) {
    const Bucket& b = model.buckets[bucket];
    return b.tied() &&
           is_mine(layout, model, b.layers.front()) != is_mine(layout, model, b.layers.back());
}

// ----------------------------------------------------------------------------
// which ranks sum a bucket's gradient, and what each keeps of it

// ZeRO-2 and 3 reduce a bucket after each micro-batch and keep a shard of its gradient. Not a tied
// table, whose two gradients are added first, at the end of the step; nor a bucket that shares a
// layer with one: an action has one flag, `first`, for all gradients of its layer.
inline bool reduced_each(const Layout& layout, const Model& model, int bucket) {
    const Bucket& mine = model.buckets[bucket];
    if (layout.zero < 2 || shard_axis(layout, mine.group).size == 1)
        return false;
    for (const Bucket& other : model.buckets)
        for (int l : mine.layers)
            if (other.tied() && uses(other, l))
                return false;
    return true;
}

// The tensor-parallel ranks that hold the same key/value head.
inline int ranks_of_kv_head(const Layout& layout, const Model& model) {
    return std::max(1, layout.tp.size / int(model.shape.NKV));
}

// Every tensor-parallel rank has a part of the gradient of elements [0, this); see Bucket.
inline size_t partial_over_tp(const Layout& layout, const Bucket& bucket) {
    return layout.sequence_parallel ? bucket.common : bucket.by_heads;
}

// Whether tensor-parallel ranks hold parts of a gradient: of whole parameters, of shared heads.
inline bool adds_over_tp(const Layout& layout, const Model& model, int bucket) {
    const Bucket& b = model.buckets[bucket];
    bool shares_heads = ranks_of_kv_head(layout, model) > 1 && b.shared > b.common;
    return layout.tp.size > 1 && (partial_over_tp(layout, b) > 0 || shares_heads);
}

// A bucket without partners has its sum already: the plan gives it no REDUCE.
inline bool is_reduced(const Layout& layout, const Model& model, int bucket) {
    bool many = group_axis(layout, model.buckets[bucket].group).size > 1;
    return many || adds_over_tp(layout, model, bucket);
}

// Each level of ZeRO cuts one datum more: 1 the optimizer's, 2 the gradient, 3 the weights. Weights
// in another tier come for each use whatever the level is: every level cuts them.
inline bool is_sharded(const Layout& layout, const Model& model, Data d) {
    if (shard_axis(layout, model.buckets[d.of].group).size == 1)
        return false;
    switch (d.kind) {
    case Kind::WEIGHT: return layout.zero == 3 || (layout.zero && layout.weights_away);
    case Kind::MASTER:
    case Kind::STATE: return layout.zero >= 1;
    case Kind::GRAD: return reduced_each(layout, model, d.of);
    default: return false;
    }
}

// The range of a bucket's datum that a rank keeps, in elements of the bucket.
inline size_t kept_elements(const Layout& layout, const Model& model, Data d) {
    const Bucket& b = model.buckets[d.of];
    return is_sharded(layout, model, d) ? shard_elements(layout, b) : whole_elements(layout, b);
}
inline size_t kept_first(const Layout& layout, const Model& model, Data d) {
    const Bucket& b = model.buckets[d.of];
    size_t shard = size_t(shard_axis(layout, b.group).rank);
    return is_sharded(layout, model, d) ? shard_elements(layout, b) * shard : 0;
}

// ZeRO-1 and 2 update a shard of weights that every rank keeps whole.
inline bool is_published(const Layout& layout, const Bucket& b) {
    bool some_whole = layout.zero == 1 || layout.zero == 2;
    return shard_axis(layout, b.group).size > 1 && some_whole && !layout.weights_away;
}

// The datum that a layer reads as its weights, and the one that it adds its gradient to.
inline Kind weight_kind(const Layout& layout, const Model& model, int bucket) {
    bool cut = is_sharded(layout, model, {Kind::WEIGHT, bucket});
    return cut || layout.weights_away ? Kind::GATHERED : Kind::WEIGHT;
}
// The datum that a fetch of weights fills: a shard is still to be gathered.
inline Kind fetched_kind(const Layout& layout, const Model& model, int bucket) {
    bool cut = is_sharded(layout, model, {Kind::WEIGHT, bucket});
    return cut ? Kind::STAGED : Kind::GATHERED;
}
inline Kind gradient_kind(const Layout& layout, const Model& model, int bucket, int layer) {
    if (reduced_each(layout, model, bucket)) return Kind::PARTIAL;
    bool head_of_tied = model.buckets[bucket].tied() && layer == model.head();
    return head_of_tied ? Kind::GRAD_TIED : Kind::GRAD;
}

// ----------------------------------------------------------------------------
// access: what an action reads and writes

// Data in the order of their use; a datum that is changed stands in both lists.
struct Access {
    std::vector<Data> reads, writes;

    void read(Data d) { reads.push_back(d); }
    void write(Data d) { writes.push_back(d); }
    void change(Data d) {
        read(d);
        write(d);
    }
};

// A forward pass reads the stream and weights, and leaves the stream for the next layer.
inline void access_forward(Access& x, const Plan& p, const Model& model, const Action& a) {
    int m = a.micro, l = a.layer;
    if (l > 0)
        x.read({Kind::STREAM, l, m});

    // In training the head keeps its input: the loss belongs to its backward.
    if (l == model.head() && p.mode == Mode::TRAIN)
        return;

    x.read({Kind::TOKENS, -1, m});
    x.write({Kind::SCRATCH, l});

    // Read the weights. Past the head there is no stream to leave, but a loss or logits.
    for (int b : buckets_of(model, l))
        x.read({weight_kind(p.layout, model, b), b});
    if (l < model.head()) {
        x.write({Kind::STREAM, l + 1, m});
    } else {
        x.write({p.mode == Mode::EVALUATE ? Kind::LOSS : Kind::LOGITS, -1, m});
    }

    // A block leaves its activations, and in generation its keys and values.
    if (!model.is_block(l)) return;
    x.read({Kind::CONSTANTS});
    for (Kind k : {Kind::KEPT_B, Kind::KEPT_W, Kind::REDO_B, Kind::REDO_W})
        x.write({k, l, m});
    if (p.mode == Mode::GENERATE)
        x.change({Kind::CACHE, l});
}

// Recomputation reads what the forward pass read, and what the layer's level has kept.
inline void access_recompute(Access& x, const Plan& p, const Model& model, const Action& a) {
    int m = a.micro, l = a.layer;
    x.read({Kind::STREAM, l, m});
    x.read({Kind::TOKENS, -1, m});
    x.read({Kind::CONSTANTS});
    for (int b : buckets_of(model, l))
        x.read({weight_kind(p.layout, model, b), b});
    if (p.recompute.of(l) != Recompute::FULL)
        for (Kind k : {Kind::KEPT_B, Kind::KEPT_W})
            x.read({k, l, m});

    for (Kind k : {Kind::REDO_B, Kind::REDO_W})
        x.write({k, l, m});
    x.write({Kind::SCRATCH, l});
}

// B does both halves at once, so what passes between them is written and never read.
inline void access_backward(Access& x, const Plan& p, const Model& model, const Action& a) {
    int m = a.micro, l = a.layer;
    bool input_half = a.op != Op::W, weight_half = a.op != Op::I;
    x.read({Kind::TOKENS, -1, m});
    x.write({Kind::SCRATCH, l});

    // The streams: what came in, the gradient of what went out, the gradient of what came in. The
    // weight half needs no input: the norms behind it have kept what its matrices multiply.
    if (l > 0 && input_half)
        x.read({Kind::STREAM, l, m});
    if (l < model.head())
        x.read({Kind::DSTREAM, l + 1, m});
    if (l > 0 && input_half)
        x.write({Kind::DSTREAM, l, m});
    if (l == model.head()) {
        x.read({Kind::VALID});
        x.write({Kind::LOSS, -1, m});
    }

    // Weights are read by the input half, their gradients made by the weight half.
    for (int b : buckets_of(model, l)) {
        if (input_half && l > 0)
            x.read({weight_kind(p.layout, model, b), b});
        if (!weight_half || !model.buckets[b].trainable) continue;
        Data grad = {gradient_kind(p.layout, model, b, l), b};
        a.first ? x.write(grad) : x.change(grad);
    }

    // A block's activations, and the gradients that its input half leaves to its weight half.
    if (!model.is_block(l)) return;
    x.read({Kind::CONSTANTS});
    bool redone = p.recompute.of(l) != Recompute::NONE;
    if (input_half)
        x.read({Kind::KEPT_B, l, m});
    if (input_half && redone)
        x.read({Kind::REDO_B, l, m});
    x.read({Kind::KEPT_W, l, m});
    if (redone)
        x.read({Kind::REDO_W, l, m});
    if (input_half)
        x.write({Kind::GRADIENT_B, l, m});
    input_half ? x.write({Kind::GRADIENT_W, l, m}) : x.read({Kind::GRADIENT_W, l, m});
}

// The sum arises in place; a micro-batch's is then added to the shard of the step's gradient.
inline void access_reduce(Access& x, const Plan& p, const Model& model, const Action& a) {
    Data grad = {Kind::GRAD, a.bucket};
    if (!reduced_each(p.layout, model, a.bucket))
        return x.change(grad);
    x.change({Kind::PARTIAL, a.bucket});
    a.first ? x.write(grad) : x.change(grad);
}

// Apart, each of two ranks has one of the gradients; the sum arises in its place, and becomes GRAD.
inline void access_tie(Access& x, const Plan& p, const Model& model, const Action& a) {
    Data grad = {Kind::GRAD, a.bucket}, tied = {Kind::GRAD_TIED, a.bucket};
    bool apart = tied_apart(p.layout, model, a.bucket);
    bool embeds = is_mine(p.layout, model, model.buckets[a.bucket].layers.front());
    if (!apart || embeds) x.read(grad);
    if (!apart || !embeds) x.read(tied);
    x.write(grad);
    if (apart) x.write(tied);
}

// The norm runs over this rank's trainable buckets; its chunk sums are scratch of no layer.
inline void access_norm(Access& x, const Plan& p, const Model& model) {
    for (int b = 0; b < int(model.buckets.size()); b++)
        if (model.buckets[b].trainable && bucket_is_mine(p.layout, model, b))
            x.read({Kind::GRAD, b});
    x.change({Kind::SCALE});
    x.write({Kind::SCRATCH, -1});
}

// The optimizer's own data of a bucket, or of a chunk of it.
inline std::vector<Data> optimizer_data(const Plan& p, int bucket, int chunk) {
    std::vector<Data> data = {{Kind::MASTER, bucket, -1, chunk}};
    int states = int(optimizer_row(p.optimizer).states.size());
    for (int s = 0; s < states; s++)
        data.push_back({Kind::STATE, bucket, s, chunk});
    return data;
}

// The data that an update of a chunk finds in STAGED, as they lie in their tiers.
inline std::vector<Data> staged_data(const Plan& p, int bucket, int chunk) {
    // Data of one update may lie in different tiers.
    std::vector<Data> data = optimizer_data(p, bucket, chunk);
    data.push_back({Kind::WEIGHT, bucket, -1, chunk});
    std::erase_if(data, [&](Data d) { return tier_of(p, d) == Tier::DEVICE; });
    return data;
}

// The update reads the scale, so no update may run before NORM has clipped.
inline void access_update(Access& x, const Plan& p, const Action& a) {
    x.read({Kind::GRAD, a.bucket});
    x.read({Kind::SCALE});
    // Data that stay are updated in place.
    if (p.offload.weights == Tier::DEVICE)
        x.change({Kind::WEIGHT, a.bucket});
    for (Data d : optimizer_data(p, a.bucket, a.chunk))
        if (tier_of(p, d) == Tier::DEVICE) x.change(d);
    if (a.chunk >= 0)
        x.change({Kind::STAGED, a.bucket, -1, a.chunk});
}

// The activations of a block that wait for its backward pass, and one of them in its other tier.
inline std::vector<Data> waiting_data(const Action& a) {
    return {{Kind::STREAM, a.layer, a.micro},
            {Kind::KEPT_B, a.layer, a.micro},
            {Kind::KEPT_W, a.layer, a.micro}};
}
inline Data parked(Data d) { return {Kind::PARKED, d.of, d.micro, int(d.kind)}; }

// Chunks of what this rank keeps of a bucket's datum. The last one may be shorter.
inline int kept_chunks(const Plan& p, const Model& model, Data d) {
    return int(ceil_div(kept_elements(p.layout, model, d), p.offload.chunk));
}

// The data of a move as they lie in their tiers.
inline std::vector<Data> tiered_data(const Plan& p, const Model& model, const Action& a) {
    std::vector<Data> data;
    if (a.bucket < 0) {
        for (Data d : waiting_data(a))
            data.push_back(parked(d));
        return data;
    }
    // A chunk's lie side by side in STAGED.
    if (a.chunk >= 0) return staged_data(p, a.bucket, a.chunk);

    // Weights come as a whole, and lie in chunks.
    for (int c = 0; c < kept_chunks(p, model, {Kind::WEIGHT, a.bucket}); c++)
        data.push_back({Kind::WEIGHT, a.bucket, -1, c});
    return data;
}

// The same data where the step runs. A chunk's lie together.
inline std::vector<Data> moved_data(const Plan& p, const Model& model, const Action& a) {
    // Activations have the names that layers know.
    if (a.bucket < 0) return waiting_data(a);
    Kind kind = a.chunk < 0 ? fetched_kind(p.layout, model, a.bucket) : Kind::STAGED;
    return {{kind, a.bucket, -1, a.chunk}};
}

// Data on their way from their tier to where the step runs, or back.
inline void access_move(Access& x, const Plan& p, const Model& model, const Action& a) {
    bool fetches = a.op == Op::FETCH;
    for (Data d : tiered_data(p, model, a))
        fetches ? x.read(d) : x.write(d);
    for (Data d : moved_data(p, model, a))
        fetches ? x.write(d) : x.read(d);
}

// The only statement of what depends on what.
inline Access access(const Plan& p, const Model& model, const Action& a) {
    Access x;
    switch (a.op) {
    // The input: all micro-batches at once, and the count of their targets.
    case Op::LOAD:
        for (int m = 0; m < p.micro_batches; m++)
            x.write({Kind::TOKENS, -1, m});
        x.write({Kind::VALID});
        break;
    case Op::COUNT: x.change({Kind::VALID}); break;

    // Collectives: between stages, and between the shards of a bucket.
    case Op::SENDRECV:
        for (const Transfer& t : a.transfers) {
            Data d = data_of(p.layout, model, t);
            t.send ? x.read(d) : x.write(d);
        }
        break;
    case Op::GATHER:
        x.read({p.layout.weights_away ? Kind::STAGED : Kind::WEIGHT, a.bucket});
        x.write({Kind::GATHERED, a.bucket});
        break;
    case Op::RELEASE: break; // marks where the last reader was

    // Layers.
    case Op::F: access_forward(x, p, model, a); break;
    case Op::R: access_recompute(x, p, model, a); break;
    case Op::B:
    case Op::I:
    case Op::W: access_backward(x, p, model, a); break;

    // The end of the step.
    case Op::REDUCE: access_reduce(x, p, model, a); break;
    case Op::TIE: access_tie(x, p, model, a); break;
    case Op::NORM: access_norm(x, p, model); break;
    case Op::UPDATE: access_update(x, p, a); break;
    case Op::FETCH:
    case Op::PARK: access_move(x, p, model, a); break;
    case Op::PUBLISH: x.change({Kind::WEIGHT, a.bucket}); break;
    }
    return x;
}

} // namespace llmc
