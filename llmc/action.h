// action.h - the vocabulary of a plan: actions, the data they touch, and which ranks do what
//   An optimizer step is a list of actions. m is a micro-batch, l a layer, b a bucket of
//   parameters; layer 0 embeds, the layers after it are blocks, the last one is the head.
//     LOAD            read the step's tokens            COUNT  sum valid targets over all ranks
//     F(m,l)          forward of layer l                R(m,l) recompute the activations F dropped
//     B(m,l)          backward: I(m,l) the input's gradient, then W(m,l) the weights' gradient
//     SENDRECV(...)   exchange activations and gradients with other pipeline stages
//     GATHER(b)       gather a bucket's weights from its shards      RELEASE(b) free those bytes
//     REDUCE(b)       sum the bucket's gradient over the ranks that hold parts of it
//     TIE(b)          add the two gradients of a tied table
//     NORM            compute the global gradient norm and the clipping factor, in device memory
//     UPDATE(b)       run the optimizer                 PUBLISH(b) all-gather the updated weights
//     FETCH(b.c)      bring a chunk of offloaded state to its update     PARK(b.c) put it back
//     PARK(m,l)       move a block's activations to another tier         FETCH(m,l) bring them back
//     FETCH(b)        bring a bucket's offloaded weights, or this rank's shard of them, to layers
//     PARK(grad b)    move the bucket's gradient to another tier      FETCH(grad b) bring it back
//     SQUARE(b)       sum the squares of a gradient before PARK takes it away; NORM adds them
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
#include "offloaded.h"
#include "optimizer.h"
#include "pipeline.h"

namespace llmc {

// clang-format off
enum class Op : uint8_t {
    LOAD, COUNT, SENDRECV, GATHER, RELEASE, F, B, I, W, R, REDUCE, TIE, SQUARE, NORM, FETCH, UPDATE,
    PARK, PUBLISH
};
// The names that --explain, timelines and the watchdog print.
inline const char* op_name(Op op) {
    static const char* names[] = {
        "LOAD", "COUNT", "SENDRECV", "GATHER", "RELEASE", "F", "B", "I", "W", "R", "REDUCE", "TIE",
        "SQUARE", "NORM", "FETCH", "UPDATE", "PARK", "PUBLISH"};
    return names[int(op)];
}

// The meaning of a piece of memory. The table below says how long each kind lives, and whether
// there is one for each bucket or for each layer.
enum class Kind : uint8_t {
    WEIGHT, MASTER, STATE, EMA, GRAD, GRAD_TIED, SCALE, AMAX, CAST, MAXIMA, CONSTANTS, CACHE,
    GATHERED, CODES, PARTIAL, SENT, GRAD_HERE, TIED_HERE, SQUARES, STAGED,
    VALID, TOKENS, STREAM, DSTREAM,
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
        {"weight",     true,  true},  // this rank's weights: the whole bucket, in ZeRO-3 its shard
        {"master",     true,  true},  // the bits that narrow weights lack (small_states.cuh)
        {"state",      true,  true},  // a state tensor of the optimizer; `micro` is its number
        {"ema",        true,  true},  // the running mean of weights (ema.cuh)
        {"grad",       true,  true},  // the step's gradient: whole, or its shard in ZeRO-2 and 3
        {"grad.tied",  true,  true},  // the head's gradient of a tied table
        {"scale",      true,  false}, // the gradient norm, the clipping factor, finiteness
        {"amax",       true,  false}, // fp8's delayed scaling: maxima and scales (fp8_delayed.cuh)
        {"cast",       true,  false}, // fp8: codes of the weights of this rank's blocks (casts.h)
        {"maxima",     true,  false}, // ZeRO-3: maxima of fp8 weights that are gathered as codes
        {"constants",  true,  false}, // RoPE's table or ALiBi's slopes
        {"cache",      true,  false}, // generation: keys and values of all tokens so far
        {"gathered",   false, true},  // a bucket's whole weights, gathered by ZeRO-3 or fetched
        {"codes",      false, true},  // fp8: the codes of all ranks' shards, while GATHER runs
        {"partial",    false, true},  // one micro-batch's gradient, whole, before REDUCE
        {"sent",       false, true},  // a 16-bit copy of a gradient, while REDUCE sums it
        {"grad.here",  false, true},  // offload: the step's gradient while layers add to it
        {"tied.here",  false, true},  // offload: the same for grad.tied
        {"squares",    false, true},  // offload: sums of a gradient's squares, which NORM adds
        {"staged",     false, true},  // offload: a chunk where UPDATE runs, or a shard of weights
        {"valid",      false, false}, // the number of valid targets
        {"tokens",     false, false}, // tokens, targets, positions, starts of documents
        {"stream",     false, false}, // stream(m,l): the input of layer l
        {"dstream",    false, false}, // dstream(m,l): the gradient of stream(m,l)
        {"kept.b",     false, false}, // activations kept from F to backward. The input half of B is
        {"kept.w",     false, false}, //   the last reader of a .b, the weight half of a .w
        {"redo.b",     false, false}, // activations that R recomputes
        {"redo.w",     false, false}, //   .b and .w mean the same
        {"gradient.b", false, false}, // gradients of activations
        {"gradient.w", false, false}, //   .b and .w mean the same
        {"parked",     false, false}, // offload: a datum in another tier; Data::chunk is its kind
        {"loss",       false, false}, // a micro-batch's loss; in evaluation also that of each row
        {"logits",     false, false}, // generation: the logits of each sequence's last rows
        {"loads",      false, false}, // (L,E) slots that this step gave to each block's experts
        {"scratch",    false, false}, // memory that a layer needs only while it runs
    };

    // Rows stand in the order of the enum, so the kind itself is the index.
    return rows[int(kind)];
}
// clang-format on

// Shorthands for the columns of kind_row()'s table.
inline const char* kind_name(Kind kind) { return kind_row(kind).name; }
inline bool persistent(Kind kind) { return kind_row(kind).persistent; }
inline bool of_bucket(Kind kind) { return kind_row(kind).of_bucket; }

// Each row of a family's activation table lies in one of these six groups.
constexpr Kind ACTIVATION_KINDS[] = {Kind::KEPT_B, Kind::KEPT_W,     Kind::REDO_B,
                                     Kind::REDO_W, Kind::GRADIENT_B, Kind::GRADIENT_W};

// The name of one datum: the key under which the arena (arena.h) finds where it lies.
struct Data {
    Kind kind;
    int of = -1;    // the number of a layer or a bucket
    int micro = -1; // a micro-batch; STATE: the number of the optimizer's tensor
    int chunk = -1; // a chunk of an offloaded bucket, -1: the whole bucket; PARKED: the kind of
                    //   the datum that is parked
    auto operator<=>(const Data&) const = default;
};

// One action of a plan. Each field lists the ops that set it; for all others it stays -1.
struct Action {
    Op op;
    int micro = -1;     // F B I W R; REDUCE where each micro-batch is reduced
    int layer = -1;     // F B I W R
    int bucket = -1;    // GATHER RELEASE REDUCE TIE UPDATE PUBLISH FETCH PARK
    bool first = false; // B W REDUCE: first to reach its gradients: it writes them, others add
    std::vector<Transfer> transfers = {}; // SENDRECV
    int chunk = -1; // FETCH UPDATE PARK: the chunk of an offloaded bucket
    // FETCH PARK of a whole bucket. WEIGHT: weights come for layers. GRAD: a complete gradient
    // leaves, until its update. Other kinds: a gradient leaves and comes back between two uses.
    Kind kind = Kind::WEIGHT;
};

// The purpose of a plan. Each mode has its own forward pass and its own end of the step.
enum class Mode { TRAIN, EVALUATE, GENERATE };

// The layout, which then says whether weights and gradients are offloaded to another tier.
inline Layout with_tiers(Layout layout, const Offload& offload) {
    layout.weights_away = offload.weights != Tier::DEVICE;
    layout.gradients_away = offload.gradients != Tier::DEVICE;
    return layout;
}

// Generation reads several prompts together, up to this many rows: enough that a product takes
// longer than the reading of its weights.
constexpr size_t PROMPT_ROWS = 256;

// The options of a plan. A plan is made from these, a layout and a model.
struct PlanOptions {
    Mode mode = Mode::TRAIN;
    size_t B = 1, T = 1; // a micro-batch: sequences, and the length of each
    int micro_batches = 1;
    size_t cache = 0, scored = 1; // GENERATE: a sequence's positions, its rows with logits
    RecomputeLevels recompute;
    bool split_backward = false; // run B as two actions, I and W
    Optimizer optimizer = Optimizer::ADAMW;
    Offload offload = {};
    Masters masters = Masters::FLOAT; // kept for weights that are narrower than float
    States states = States::FLOAT;    // the format of AdamW's moments
    bool ema = false;                 // a running mean of weights is kept (ema.cuh)
    Stored stored = Stored::WIDE;
    Gradients gradients = Gradients::FLOAT; // what data-parallel ranks send of their gradients
    Objective objective = {};               // the loss to train
    bool whole_sequences = false; // context-parallel ranks take sequences of their own
};

// One rank's plan: its options, its layout, and its actions in order.
struct Plan : PlanOptions {
    Layout layout;
    std::vector<Action> actions;

    Plan without_actions() const { return {*this, layout, {}}; } // what a pass begins with

    // The rows (tokens) of a micro-batch on this rank: context parallelism splits each sequence.
    // Generation runs one prompt of T rows, or several with PROMPT_ROWS rows together, or the last
    // `scored` rows of each of B sequences.
    size_t rows() const {
        if (mode != Mode::GENERATE) return B * T / size_t(layout.cp.size);
        return std::max({B * scored, T, std::min(B * T, PROMPT_ROWS)});
    }

    // The ints of a micro-batch's input. A row has a token, target, position, document's start, and
    // the objective's floats. Then come positions of cached keys, or numbers of all cp ranks' rows.
    size_t row_numbers() const { return 4 + objective.inputs(); }
    size_t input_numbers() const {
        size_t beside = layout.cp.size > 1 ? objective.shared_numbers() * T : cache;
        return row_numbers() * rows() + B * beside;
    }
};

// Whether an op makes gradients of weights; whether it runs a layer at all.
inline bool reaches_weights(Op op) { return op == Op::B || op == Op::W; }
inline bool computes(Op op) {
    return op == Op::F || op == Op::B || op == Op::I || op == Op::W || op == Op::R;
}

// ----------------------------------------------------------------------------
// which layers stand where

// The first layer of a stage. For the stage past the last one: the number of layers.
inline int first_layer(const Layout& layout, const Model& model, int stage) {
    if (layout.first_layer.empty())
        return stage == 0 ? 0 : model.layers();
    return layout.first_layer[stage];
}

// The stage that runs a layer. Stages are few, so a walk over them is fast enough.
inline int stage_of(const Layout& layout, const Model& model, int layer) {
    int stage = 0;
    while (first_layer(layout, model, stage + 1) <= layer)
        stage++;
    return stage;
}

// The datum that a transfer moves: the input of the later stage, or the gradient of that input.
inline Data data_of(const Layout& layout, const Model& model, const Transfer& t) {
    Kind kind = t.gradient ? Kind::DSTREAM : Kind::STREAM;
    return {kind, first_layer(layout, model, t.stage), t.micro};
}

// Whether this rank runs a layer. With chunks it has several stages, pp.size apart.
inline bool is_mine(const Layout& layout, const Model& model, int layer) {
    return stage_of(layout, model, layer) % layout.pp.size == layout.pp.rank;
}

// Whether this rank runs a layer of a bucket. A tied table has two layers: two ranks may keep it.
inline bool bucket_is_mine(const Layout& layout, const Model& model, int bucket) {
    for (int l : model.buckets[bucket].layers)
        if (is_mine(layout, model, l)) return true;
    return false;
}

// Whether a tied table's two layers run on different ranks: each then has one of its gradients.
inline bool tied_apart(const Layout& layout, const Model& model, int bucket) {
    const Bucket& b = model.buckets[bucket];
    return b.tied() &&
           is_mine(layout, model, b.layers.front()) != is_mine(layout, model, b.layers.back());
}

// ----------------------------------------------------------------------------
// which ranks sum a bucket's gradient, and what each keeps of it

// Whether a bucket is reduced after each micro-batch into a shard, as ZeRO-2 and 3 do. Not a tied
// table: its two gradients are added first, at the end of the step. Nor a bucket in the same layer
// as a tied table, because an action has one flag, `first`, for all gradients of its layer. For the
// same reason a rank's own experts go with their block, although they have nothing to sum.
inline bool reduced_each(const Layout& layout, const Model& model, int bucket) {
    int ranks = std::max(update_axis(layout, Group::DATA).size,
                         update_axis(layout, Group::EXPERTS).size);
    if (layout.zero < 2 || ranks == 1)
        return false;
    for (int l : model.buckets[bucket].layers)
        for (int other : buckets_of(model, l))
            if (model.buckets[other].tied()) return false;
    return true;
}

// The number of tensor-parallel ranks that hold the same key/value head.
inline int ranks_of_kv_head(const Layout& layout, const Model& model) {
    return std::max(1, layout.tp.size / int(model.shape.NKV));
}

// Elements [0, this) of a bucket have a partial gradient on every tensor-parallel rank; see Bucket.
inline size_t partial_over_tp(const Layout& layout, const Bucket& bucket) {
    return layout.sequence_parallel ? bucket.common : bucket.by_heads;
}

// Whether a bucket has replicated parameters or shared heads, whose gradients add over tp ranks.
inline bool adds_over_tp(const Layout& layout, const Model& model, int bucket) {
    const Bucket& b = model.buckets[bucket];
    bool shares_heads = ranks_of_kv_head(layout, model) > 1 && b.shared > b.common;
    return layout.tp.size > 1 && (partial_over_tp(layout, b) > 0 || shares_heads);
}

// Whether the plan gives a bucket a REDUCE. Without other ranks to sum with it needs none.
inline bool is_reduced(const Layout& layout, const Model& model, int bucket) {
    bool many = group_axis(layout, model.buckets[bucket].group).size > 1;
    bool collected = reduced_each(layout, model, bucket);
    return many || collected || adds_over_tp(layout, model, bucket);
}

// The ranks among which a bucket's datum is cut, if it is, and the number of this rank's part.
inline Axis cut_axis(const Layout& layout, const Model& model, Data d) {
    Group group = model.buckets[d.of].group;
    return d.kind == Kind::WEIGHT ? shard_axis(layout, group) : update_axis(layout, group);
}

// Whether this rank keeps only a shard of a bucket's datum. Each level of ZeRO shards one datum
// more: 1 the optimizer's, 2 the gradient, 3 the weights. Offloaded weights come for each use
// whatever the level is, so every level shards them.
inline bool is_sharded(const Layout& layout, const Model& model, Data d) {
    if (cut_axis(layout, model, d).size == 1) return false;
    switch (d.kind) {
    case Kind::WEIGHT: return layout.zero == 3 || (layout.zero && layout.weights_away);
    case Kind::MASTER:
    case Kind::STATE:
    case Kind::EMA: return layout.zero >= 1;
    // An offloaded gradient lies where its update runs: each rank keeps the range that it updates.
    case Kind::GRAD:
        if (layout.gradients_away) return layout.zero >= 1;
        return reduced_each(layout, model, d.of);
    case Kind::GRAD_HERE: return reduced_each(layout, model, d.of);
    default: return false;
    }
}

// The range of a bucket's datum that this rank keeps: its length and its start, in elements.
inline size_t kept_elements(const Layout& layout, const Model& model, Data d) {
    size_t whole = whole_elements(layout, model.buckets[d.of]);
    return is_sharded(layout, model, d) ? whole / size_t(cut_axis(layout, model, d).size) : whole;
}
inline size_t kept_first(const Layout& layout, const Model& model, Data d) {
    size_t part = size_t(cut_axis(layout, model, d).rank);
    return is_sharded(layout, model, d) ? kept_elements(layout, model, d) * part : 0;
}

// Whether the ranks that hold the same shard of weights share out a bucket's datum among them.
inline bool cut_over_replicas(const Layout& layout, const Model& model, Data d) {
    return layout.weights_near && d.kind != Kind::WEIGHT && is_sharded(layout, model, d);
}

// Whether a bucket needs PUBLISH, because a rank keeps more of its weights than it updates: ZeRO-1
// and 2 keep all of them, and weights that are near are shards of which it updates a part.
inline bool is_published(const Layout& layout, const Bucket& b) {
    bool some_whole = layout.zero == 1 || layout.zero == 2;
    if (layout.weights_near) return update_axis(layout, b.group).size > 1;
    return shard_axis(layout, b.group).size > 1 && some_whole && !layout.weights_away;
}

// The datum in which a layer finds its weights.
inline Kind weight_kind(const Layout& layout, const Model& model, int bucket) {
    bool cut = is_sharded(layout, model, {Kind::WEIGHT, bucket});
    return cut || layout.weights_away ? Kind::GATHERED : Kind::WEIGHT;
}
// The datum that FETCH(b) fills: STAGED with a shard that GATHER completes, or GATHERED at once.
inline Kind fetched_kind(const Layout& layout, const Model& model, int bucket) {
    bool cut = is_sharded(layout, model, {Kind::WEIGHT, bucket});
    return cut ? Kind::STAGED : Kind::GATHERED;
}
// The datum in which the step's gradient is summed: GRAD, or GRAD_HERE if gradients are offloaded.
inline Kind summed_kind(const Layout& layout) {
    return layout.gradients_away ? Kind::GRAD_HERE : Kind::GRAD;
}
inline Kind tied_kind(const Layout& layout) {
    return layout.gradients_away ? Kind::TIED_HERE : Kind::GRAD_TIED;
}
// The datum to which a layer adds its gradient.
inline Kind gradient_kind(const Layout& layout, const Model& model, int bucket, int layer) {
    if (reduced_each(layout, model, bucket)) return Kind::PARTIAL;
    bool head_of_tied = model.buckets[bucket].tied() && layer == model.head();
    return head_of_tied ? tied_kind(layout) : summed_kind(layout);
}

} // namespace llmc
