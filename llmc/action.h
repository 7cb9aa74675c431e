// action.h - the vocabulary of a plan: actions, the data they touch, and which ranks do what
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
//     PARK(grad b)    its gradient to another tier, FETCH(grad b) back    SQUARE(b) its squares
//   Words used throughout:
//     stage    consecutive layers on one pipeline rank   shard    this rank's part of a bucket
//     owner    the rank that contributes an element      range    {first, count} of elements
//     partial  a gradient still to be summed             in flight  started, not yet finished
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
    LOAD, COUNT, SENDRECV, GATHER, RELEASE, F, B, I, W, R, REDUCE, TIE, SQUARE, NORM, FETCH, UPDATE,
    PARK, PUBLISH
};
// The words of --explain, of timelines and of the watchdog.
inline const char* op_name(Op op) {
    static const char* names[] = {
        "LOAD", "COUNT", "SENDRECV", "GATHER", "RELEASE", "F", "B", "I", "W", "R", "REDUCE", "TIE",
        "SQUARE", "NORM", "FETCH", "UPDATE", "PARK", "PUBLISH"};
    return names[int(op)];
}

// A piece of memory by its meaning. The table below says what `of` counts and how long it lives.
enum class Kind : uint8_t {
    WEIGHT, MASTER, STATE, GRAD, GRAD_TIED, SCALE, AMAX, CAST, CONSTANTS, CACHE,
    GATHERED, PARTIAL, SENT, GRAD_HERE, TIED_HERE, SQUARES, STAGED, VALID, TOKENS, STREAM, DSTREAM,
    KEPT_B, KEPT_W, REDO_B, REDO_W, GRADIENT_B, GRADIENT_W, PARKED,
    LOSS, LOGITS, LOADS, SCRATCH
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
        {"amax",       true,  false}, // fp8's delayed scaling: maxima and scales (fp8_delayed.cuh)
        {"cast",       true,  false}, // fp8: codes of the weights of this rank's blocks (casts.h)
        {"constants",  true,  false}, // RoPE's table or ALiBi's slopes
        {"cache",      true,  false}, // keys and values of generated tokens
        {"gathered",   false, true},  // the bucket's weights, whole: ZeRO-3's, or fetched
        {"partial",    false, true},  // one micro-batch's gradient, whole, before REDUCE
        {"sent",       false, true},  // a gradient in 16 bits, while REDUCE sums it
        {"grad.here",  false, true},  // offload: the step's gradient while layers add to it
        {"tied.here",  false, true},
        {"squares",    false, true},  // offload: sums of its squares, which NORM adds
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
        {"loads",      false, false}, // (L,E) slots that each block's experts have got in this step
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
    // FETCH PARK of a whole bucket: WEIGHT comes; GRAD, which is whole, goes for its update; others
    // go and come back in between.
    Kind kind = Kind::WEIGHT;
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
    Tier weights = Tier::DEVICE, gradients = Tier::DEVICE;
    size_t chunk = size_t(1) << 24;  // elements of state that move together: SHARD_ALIGN divides it
    Tier update = Tier::DEVICE;      // where UPDATE runs: HOST, and masters and moments stay there

    // Updates go by chunks where they find some of their data elsewhere.
    bool cuts_updates() const {
        Tier here = Tier::DEVICE;
        return optimizer != here || weights != here || gradients != here;
    }
};

// A layout whose layers find data where these tiers put them.
inline Layout with_tiers(Layout layout, const Offload& offload) {
    layout.weights_away = offload.weights != Tier::DEVICE;
    layout.gradients_away = offload.gradients != Tier::DEVICE;
    return layout;
}

// A plan is made for these, for a layout and for a model.
struct PlanOptions {
    Mode mode = Mode::TRAIN;
    size_t B = 1, T = 1; // a micro-batch: sequences, and the length of each
    int micro_batches = 1;
    size_t cache = 0, scored = 1; // GENERATE: positions of each sequence, and rows with logits
    RecomputeLevels recompute;
    bool split_backward = false; // B as I and W
    Optimizer optimizer = Optimizer::ADAMW;
    Offload offload = {};
    Masters masters = Masters::FLOAT; // of weights that are narrower than float
    States states = States::FLOAT;    // AdamW's moments
    Stored stored = Stored::WIDE;
    bool narrow_gradients = false; // data-parallel ranks sum them as bf16
    Objective objective = {};     // what the loss is
    bool whole_sequences = false; // context-parallel ranks take sequences of their own
};

struct Plan : PlanOptions {
    Layout layout;
    std::vector<Action> actions;

    // The rows of a micro-batch on this rank: context parallelism shares out the sequence.
    // Generation has those of one prompt, or the last ones of each sequence.
    size_t rows() const {
        return mode == Mode::GENERATE ? std::max(B * scored, T) : B * T / size_t(layout.cp.size);
    }

    // The input of a micro-batch in numbers: four a row, of pairs two floats more, then positions
    // of keys in a cache, or positions and documents' starts of all context-parallel ranks' keys.
    size_t row_numbers() const { return objective.rows() ? 6 : 4; }
    size_t input_numbers() const {
        return row_numbers() * rows() + (layout.cp.size > 1 ? 2 * B * T : B * cache);
    }
};

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
// layer with one: an action has one flag, `first`, for all gradients of its layer. For the same
// reason experts that only this rank holds go with their block, though nothing is to be summed.
inline bool reduced_each(const Layout& layout, const Model& model, int bucket) {
    const Bucket& mine = model.buckets[bucket];
    if (layout.zero < 2 || shard_axis(layout, Group::DATA).size == 1)
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
    bool collected = reduced_each(layout, model, bucket);
    return many || collected || adds_over_tp(layout, model, bucket);
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
    case Kind::GRAD:
    case Kind::GRAD_HERE: return reduced_each(layout, model, d.of);
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
// The step's gradient where it is summed: at home, or while it is here.
inline Kind summed_kind(const Layout& layout) {
    return layout.gradients_away ? Kind::GRAD_HERE : Kind::GRAD;
}
inline Kind tied_kind(const Layout& layout) {
    return layout.gradients_away ? Kind::TIED_HERE : Kind::GRAD_TIED;
}
inline Kind gradient_kind(const Layout& layout, const Model& model, int bucket, int layer) {
    if (reduced_each(layout, model, bucket)) return Kind::PARTIAL;
    bool head_of_tied = model.buckets[bucket].tied() && layer == model.head();
    return head_of_tied ? tied_kind(layout) : summed_kind(layout);
}

} // namespace llmc
