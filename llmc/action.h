// action.h - the vocabulary of a plan: actions, and the data they touch
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
//     MUON            orthogonalise the momentum of matrices, in place of their gradients (muon.h)
//     UPDATE(b)       run the optimizer                 PUBLISH(b) all-gather the updated weights
//     FETCH(b.c)      bring a chunk of offloaded state to its update     PARK(b.c) put it back
//     MUON(momentum b.c)  update a chunk's momentum ahead of MUON, which has FETCH and PARK too
//     PARK(m,l)       move a block's activations to another tier         FETCH(m,l) bring them back
//     FETCH(b)        bring a bucket's offloaded weights, or this rank's shard of them, to layers
//     PARK(grad b)    move the bucket's gradient to another tier      FETCH(grad b) bring it back
//     SQUARE(b)       sum the squares of a gradient before PARK takes it away; NORM adds them
//   Words used throughout:
//     stage    consecutive layers on one pipeline rank   shard    this rank's part of a bucket
//     owner    the rank that contributes an element      range    {first, count} of elements
//     partial  a gradient still to be summed             in flight  started, not yet finished
//   Layout is how ranks are arranged (layout.h), Transfer one end of a message (pipeline.h); Keep,
//   Last and Recompute are columns of the activation table (model.h).
#pragma once
#include "layout.h"
#include "model.h"
#include "ops/objective.cuh"
#include "ops/small_states.cuh"
#include "optimizer.h"
#include "pipeline.h"
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace llmc {

// ----------------------------------------------------------------------------
// the tiers of memory, and in which of them a run keeps each kind of data

// A tier of memory: DEVICE is where the step runs, HOST the host's memory, DISK a file.
enum class Tier : uint8_t { DEVICE, HOST, DISK };
constexpr int TIERS = 3;

// The tier of each kind of data. Offloaded data come to the device while they are used (offload.h).
struct Offload {
    Tier optimizer = Tier::DEVICE;   // masters and state
    Tier activations = Tier::DEVICE; // blocks' inputs and kept activations, from F to backward
    Tier weights = Tier::DEVICE, gradients = Tier::DEVICE;
    size_t chunk = size_t(1) << 24;  // elements of state that move together: SHARD_ALIGN divides it
    Tier update = Tier::DEVICE;      // where UPDATE runs; on HOST, masters and moments stay there
    std::vector<bool> parked = {};   // [layer]: whose activations leave; empty: those of all blocks

    // Whether updates go chunk by chunk: they do when any of their data is offloaded.
    bool cuts_updates() const {
        Tier here = Tier::DEVICE;
        return optimizer != here || weights != here || gradients != here;
    }
    // Whether anything is offloaded.
    bool moves() const { return cuts_updates() || activations != Tier::DEVICE; }
    // Whether a block's activations leave the device between its two passes.
    bool parks(int layer) const {
        bool chosen = parked.empty() || parked[size_t(layer)];
        return activations != Tier::DEVICE && chosen;
    }
};

// ----------------------------------------------------------------------------
// actions, and the data they touch

// The alignment of data, in bytes. Vector loads need 16, tensor cores need 128, and cudaMalloc
// itself aligns to 256.
constexpr size_t ARENA_ALIGN = 256;

// clang-format off
enum class Op : uint8_t {
    LOAD, COUNT, SENDRECV, GATHER, RELEASE, F, B, I, W, R, REDUCE, TIE, SQUARE, NORM, MUON, FETCH,
    UPDATE, PARK, PUBLISH
};
// The names that --explain, timelines and the watchdog print.
inline const char* op_name(Op op) {
    static const char* names[] = {
        "LOAD", "COUNT", "SENDRECV", "GATHER", "RELEASE", "F", "B", "I", "W", "R", "REDUCE", "TIE",
        "SQUARE", "NORM", "MUON", "FETCH", "UPDATE", "PARK", "PUBLISH"};
    return names[int(op)];
}

// The meaning of a piece of memory. The table below says how long each kind lives, and whether
// there is one for each bucket or for each layer.
enum class Kind : uint8_t {
    WEIGHT, MASTER, STATE, NEURONS, EMA, GRAD, GRAD_TIED, SCALE, AMAX, CAST, MAXIMA, CONSTANTS,
    CACHE, GATHERED, CODES, PARTIAL, SENT, GRAD_HERE, TIED_HERE, SQUARES, STAGED, MOMENTUM,
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
        {"neurons",    true,  true},  // NorMuon's second moments of rows or columns (muon.cuh)
        {"ema",        true,  true},  // the running mean of weights (ema.cuh)
        {"grad",       true,  true},  // the step's gradient: whole, or its shard in ZeRO-2 and 3
        {"grad.tied",  true,  true},  // the head's gradient of a tied table
        {"scale",      true,  false}, // the gradient norm, the clipping factor, finiteness
        {"amax",       true,  false}, // fp8's delayed scaling: maxima and scales (fp8_delayed.cuh)
        {"cast",       true,  false}, // fp8: codes of the weights of this rank's blocks (fp8.h)
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
        {"momentum",   false, true},  // offload: a chunk where MUON updates the momentum
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

// The group of activations in which a row of the activation table lies.
inline Kind activation_group(Keep keep, Last last, Recompute level) {
    bool w = last == Last::W;
    if (keep == Keep::GRADIENT)
        return w ? Kind::GRADIENT_W : Kind::GRADIENT_B;
    if (recomputed(keep, level)) return w ? Kind::REDO_W : Kind::REDO_B;
    return w ? Kind::KEPT_W : Kind::KEPT_B;
}

// The name of one datum: the key under which the arena (arena.h) finds where it lies.
struct Data {
    Kind kind;
    int of = -1;    // the number of a layer or a bucket
    int micro = -1; // a micro-batch; STATE: the optimizer's tensor; NEURONS: a parameter
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
    int chunk = -1; // FETCH MUON UPDATE PARK: the chunk of an offloaded bucket
    // FETCH PARK of a whole bucket. WEIGHT: weights come for layers. GRAD: a complete gradient
    // leaves, until its update. Other kinds: a gradient leaves and comes back between two uses.
    // FETCH MUON PARK of a chunk. MOMENTUM: it is MUON's, else UPDATE's.
    Kind kind = Kind::WEIGHT;
};

// The purpose of a plan. Each mode has its own forward pass and its own end of the step.
enum class Mode { TRAIN, EVALUATE, GENERATE };

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

    // The ints of a micro-batch's input: for each row its token, target, position, document's start
    // and the objective's floats; behind all rows the positions of cached keys, or with cp what the
    // keys of all cp ranks need.
    size_t row_numbers() const { return 4 + objective.inputs(); }
    size_t input_numbers() const {
        size_t beside = layout.cp.size > 1 ? objective.shared_numbers() * T : cache;
        return row_numbers() * rows() + B * beside;
    }
};

// The number of rows on which the head works: all rows of a micro-batch, or in generation the last
// `scored` ones of each sequence.
inline size_t head_rows(const Plan& p) {
    return p.mode == Mode::GENERATE ? p.B * p.scored : p.rows();
}

// Whether an op makes gradients of weights; whether it runs a layer at all.
inline bool reaches_weights(Op op) { return op == Op::B || op == Op::W; }
inline bool computes(Op op) {
    return op == Op::F || op == Op::B || op == Op::I || op == Op::W || op == Op::R;
}

// Actions to insert, by the number of a compute action among the compute actions of the plan.
typedef std::map<int, std::vector<Action>> Insertions;

// Insert actions before and behind compute actions.
inline Plan add_around(Plan in, const Insertions& before, const Insertions& behind) {
    if (before.empty() && behind.empty()) return in;
    Plan p = in.without_actions();
    auto append = [&](const Insertions& all, int place) {
        auto found = all.find(place);
        if (found == all.end()) return;
        const std::vector<Action>& some = found->second;
        p.actions.insert(p.actions.end(), some.begin(), some.end());
    };

    // Keep all other actions where they are.
    int count = 0;
    for (Action& a : in.actions) {
        bool runs = computes(a.op);
        if (runs) append(before, count);
        p.actions.push_back(std::move(a));
        if (runs) append(behind, count++);
    }
    return p;
}

// ----------------------------------------------------------------------------
// which layers stand where

// The first layer of a stage. For the stage past the last one: the number of layers.
inline int first_layer_of(const Layout& layout, const Model& model, int stage) {
    if (layout.first_layer.empty())
        return stage == 0 ? 0 : model.layers();
    return layout.first_layer[stage];
}

// The stage that runs a layer. Stages are few, so a walk over them is fast enough.
inline int stage_of(const Layout& layout, const Model& model, int layer) {
    int stage = 0;
    while (first_layer_of(layout, model, stage + 1) <= layer)
        stage++;
    return stage;
}

// The datum that a transfer moves: the input of the later stage, or the gradient of that input.
inline Data data_of(const Layout& layout, const Model& model, const Transfer& t) {
    Kind kind = t.gradient ? Kind::DSTREAM : Kind::STREAM;
    return {kind, first_layer_of(layout, model, t.stage), t.micro};
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
// the words of actions and data, as --explain, timelines and errors print them

// The words of a bucket's chunk, after its name.
inline std::string chunk_text(int chunk) {
    if (chunk < 0) return "";
    std::string text = "."; // g++ 12 warns of "." + a text
    return text + std::to_string(chunk);
}

// The word that tells moves of gradients and of momentum from those of weights and updates.
inline std::string gradient_text(const Action& a) {
    switch (a.kind) {
    case Kind::GRAD:
    case Kind::GRAD_HERE: return "grad ";
    case Kind::TIED_HERE: return "grad.tied ";
    case Kind::MOMENTUM: return "momentum ";
    default: return "";
    }
}

// The words of one action: F(0,3), REDUCE(block.0), SENDRECV(to 1: activation 0.1).
inline std::string action_text(const Action& a, const Model& model) {
    // List the messages of an exchange.
    std::string s = op_name(a.op);
    if (a.op == Op::SENDRECV) {
        std::string list;
        for (const Transfer& t : a.transfers)
            list += (list.empty() ? "" : ", ") + std::string(t.send ? "to " : "from ") +
                    std::to_string(t.peer) + ": " + name_of(t);
        return s + "(" + list + ")";
    }
    // A bucket has a name; layers have numbers.
    if (a.bucket >= 0)
        return s + "(" + gradient_text(a) + model.buckets[a.bucket].name +
               chunk_text(a.chunk) + ")";
    if (a.layer < 0) return s;
    return s + "(" + std::to_string(a.micro) + "," + std::to_string(a.layer) + ")";
}

// The words of a datum, in the same form: stream(0,3), weight(block.0).
inline std::string data_text(Data d, const Model& model) {
    std::string micro = d.micro < 0 ? "" : std::to_string(d.micro), of;
    if (d.of >= 0)
        of = of_bucket(d.kind) ? model.buckets[d.of].name + chunk_text(d.chunk)
                               : std::to_string(d.of);
    std::string comma = micro.empty() || of.empty() ? "" : ",";
    std::string name = kind_name(d.kind);
    return micro.empty() && of.empty() ? name : name + "(" + micro + comma + of + ")";
}

} // namespace llmc
