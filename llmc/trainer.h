// trainer.h - one rank's state: model, plans, the arena's bytes, and the pointers of a layer
//   To bind pointers, visit the rows of the tables that family.h makes. A parameter lies at its
//   offset in its bucket, an activation in the arena's place for its group, scratch at its row.
//   Nothing here knows how many ranks there are: only layout and plan do.
#pragma once
#include <functional>
#include <tuple>
#include "action.h"
#include "adapters.h"
#include "arena.h"
#include "context.h"
#include "family.h"
#include "fp8.h"
#include "head.h"
#include "layout.h"
#include "model.h"
#include "offload.h"
#include "ops/element_type.h"
#include "ops/fp8.cuh"
#include "ops/linear.cuh"
#include "ops/loss_scale.cuh"
#include "ops/matmul.cuh"
#include "ops/memory.h"
#include "ops/objective.cuh"
#include "ops/step_scale.h"
#include "ops/types.h"
#include "plan.h"
#include "plan_check.h"
#include "quantised.h"
#include "sharding.h"
#include "sizes.h"
#include "streams.h"

namespace llmc {

// The optimizer's numbers, in float as its kernels take them.
struct Hyper {
    float lr = 0; // this step's, set by the schedule
    float beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, weight_decay = 0, clip = 0;
    LossScaling loss_scaling = {}; // fp16
    uint64_t seed = 0;             // for stochastic rounding
    bool stochastic = true;        // false, in tests: round to nearest, which loses small steps
    double ema = 0;                // decay of the mean of weights (ema.cuh), if the plan keeps one
};

// The batch of the next step, read while a device works on this one.
struct PreparedBatch {
    int plan = -1;       // the plan that will use it; -1: no batch is prepared
    uint64_t cursor = 0; // the first sample
    int* staging = nullptr; // (micro-batches,4 to 7,N), keys; null on a CPU, which reads none ahead
    int64_t valid = 0;               // the Trainer's numbers below, for this batch
    std::vector<int64_t> pairs = {};
    std::string wrong = ""; // reported by the step that uses the batch, not by the one that read it
};

// The data: where LOAD reads samples, and how far it has read.
struct DataSource {
    Window window;
    References references;               // numbers for the objective; empty: it needs none
    uint64_t cursor = 0;                 // samples taken so far, over all ranks
    uint64_t samples_end = ~uint64_t(0); // targets of later samples are ignored
    int document_end = -1;      // the token that ends a document; -1: documents are not cut
    int64_t valid = 0;          // valid targets of this global batch
    std::vector<int64_t> pairs; // (cp) pairs of a query and a key it sees, by the query's rank
};

// Host memory for copies from and to a device; null on a CPU.
struct HostBuffers {
    int* staging = nullptr;         // the batch that LOAD copies to the device
    PreparedBatch next;             // the batch after it
    std::vector<int> sequence;      // (4 to 7,T) a whole sequence; LOAD takes this rank's rows
    LossSums* answers = nullptr;    // (micro-batches), then a StepScale
    StepNumbers* numbers = nullptr; // the next step's learning rate and others, to copy
};

// On NCCL: the streams of the queues COMM and MESSAGE.
template <typename S> struct CommStreams {
    S comm = {}, message = {};
};

// Moves between tiers of memory (offload.h).
template <typename S> struct OffloadMoves {
    S stream = {};      // for FETCH and PARK
    std::string folder; // holds the file of Tier::DISK
};

// RoPE's tables (P,rotary/2,2). Layers with a window may have their own.
struct RopeTables {
    const void *table = nullptr, *window = nullptr;
};

// Weights that are not stored as T.
struct StoredWeights {
    std::vector<Narrow> narrow; // frozen weights: where each parameter lies (quantised.h)
    std::vector<Fp8Cast> casts; // weights of fp8 products: where each matrix lies (fp8.h)
};

// --graphs: replay a plan's launches as one graph.
template <typename S> struct Graphs {
    bool on = false;
    std::vector<PlanGraph<S>> of; // [plan]
};

// Functions that the program gives; each may be empty.
struct Hooks {
    std::function<void()> before;             // called before each step of training
    std::function<void(const Action&)> after; // called after each action, to look at its results
    std::function<bool()> stopped; // whether the run should end: all ranks ask, and hear the same
};

// The state of one rank. T: type of weights and activations. S: a CPU or a CUDA stream.
template <typename T, typename S> struct Trainer {
    Ctx<S> ctx;
    Layout layout;
    Model model;
    std::vector<Plan> plans;
    Arena arena;
    std::vector<std::map<int, ScratchTable>> scratch; // [plan][layer]
    Hyper hyper;
    Comms comms;            // the groups of ranks that this one works with
    CommStreams<S> streams;
    OffloadMoves<S> offload;
    RopeTables rope;
    StoredWeights stored;
    HostBuffers host;
    DataSource data;

    // The running plan and action.
    int plan = 0, at = 0;
    Stopwatch<S> watch; // times actions while it is on
    Graphs<S> graphs;
    Hooks hooks;
    bool takes_average = false; // a checkpoint's mean of weights is loaded as the weights
};

// ----------------------------------------------------------------------------
// addresses

// The address of a datum while the current action runs, or null if it has none.
template <typename P, typename T, typename S>
P* address(const Trainer<T, S>& t, Data d) {
    const Place* place = arena_find(t.arena, t.plan, t.at, d);
    if (!place) return nullptr;
    return reinterpret_cast<P*>(t.arena.memory[int(place->tier)].base + place->offset);
}

// The part of a datum that this rank updates: its own range, within what it keeps of the datum.
template <typename P, typename T, typename S>
P* updated_part(const Trainer<T, S>& t, Data d, const Range& range) {
    P* x = address<P>(t, d);
    return x ? x + (range.first - kept_first(t.layout, t.model, d)) : x;
}

// The address of one row of a layer's scratch, or null if the layer has no such row.
template <typename T, typename S>
unsigned char* scratch_address(const Trainer<T, S>& t, int layer, ScratchKind name) {
    unsigned char* base = address<unsigned char>(t, {Kind::SCRATCH, layer});
    const ScratchRow* row = base ? t.scratch[t.plan].at(layer).find(name) : nullptr;
    return row ? base + row->offset : nullptr;
}

// Copy a datum's value to the host, and wait for it.
template <typename P, typename T, typename S>
P read_value(const Trainer<T, S>& t, Data d) {
    P value = {};
    copy_out(&value, address<P>(t, d), sizeof(P), t.ctx.where);
    return value;
}

// Start to copy a datum's value to the host. Returns where the value is after a wait: in `room`, or
// on a CPU in its own place. Null if there is no such datum.
template <typename P, typename T, typename S>
const P* ask_for(const Trainer<T, S>& t, Data d, P* room) {
    P* home = address<P>(t, d);
    P* here = host_side(home, room, t.ctx.where);
    if (home) copy_out_later(here, home, sizeof(P), t.ctx.where);
    return home ? here : nullptr;
}

// The numbers that evaluation keeps for each row, after the loss; empty on ranks without the head.
template <typename T, typename S>
RowLosses<T> row_losses(const Trainer<T, S>& t, int micro) {
    size_t N = t.plans[t.plan].rows();
    unsigned char* loss = address<unsigned char>(t, {Kind::LOSS, -1, micro});
    if (!loss) return {};
    acc_t<T>* rows = reinterpret_cast<acc_t<T>*>(loss + ARENA_ALIGN);
    return {rows, rows + N, rows + 2 * N};
}

// ----------------------------------------------------------------------------
// making a trainer: plans, a place for every byte, then the bytes

// Give each datum of the plans its place. Nothing is allocated.
template <typename T, typename S>
Arena place_plans(const std::vector<Plan>& plans, const Model& model, S where) {
    // A size does not depend on the micro-batch: compute it once.
    std::map<std::tuple<const Plan*, Kind, int, int>, size_t> known;
    return arena_place(plans, model, [&](const Plan& p, Data d) {
        auto [entry, fresh] = known.insert({{&p, d.kind, d.of, d.chunk}, 0});
        if (fresh)
            entry->second = data_bytes<T>(p, model, d, where);
        return entry->second;
    });
}

// The scratch table of every layer that a plan runs.
template <typename T, typename S>
std::map<int, ScratchTable> scratch_tables(const Plan& p, const Model& model, S where) {
    std::map<int, ScratchTable> tables;
    for (const Action& a : p.actions)
        if (!tables.count(a.layer))
            tables[a.layer] = scratch_table<T>(p, model, a.layer, where);
    return tables;
}

// Make, check and place one plan for each of `options`.
// A plan that fails its check is a bug of this program, not a mistake of its user.
template <typename T, typename S>
void trainer_place(Trainer<T, S>& t, const Shape& shape, const std::vector<PlanOptions>& options,
                   const Layout& layout = {}) {
    t.layout = with_tiers(layout, options[0].offload);
    t.model = make_model(with_logits(shape, t.ctx.where), layout);
    for (const PlanOptions& o : options) {
        t.plans.push_back(make_plan(layout, t.model, o));
        std::string wrong = plan_check(t.plans.back(), t.model);
        LLMC_CHECK(wrong.empty(), "the plan is wrong: %s", wrong.c_str());
        t.scratch.push_back(scratch_tables<T>(t.plans.back(), t.model, t.ctx.where));
    }
    t.ctx.shape = t.ctx.rank_shape = rank_shape(t.plans[0], t.model);
    t.arena = place_plans<T>(t.plans, t.model, t.ctx.where);
}

// Allocate the arena, and the host's staging memory for batches and results.
// Staging holds every micro-batch at once, because copies to a device may still be under way.
template <typename T, typename S>
void trainer_allocate(Trainer<T, S>& t) {
    // Allocate one block for all data, and host memory for the largest batch of any plan.
    arena_allocate(t.arena, t.ctx.where, t.offload.folder);
    size_t ints = 0, losses = 0;
    for (const Plan& p : t.plans) {
        ints = std::max(ints, size_t(p.micro_batches) * p.input_numbers());
        losses = std::max(losses, size_t(p.micro_batches));
    }
    t.host.staging = static_cast<int*>(staging_memory(ints * sizeof(int), t.ctx.where));
    t.host.next.staging = static_cast<int*>(staging_memory(ints * sizeof(int), t.ctx.where));
    size_t answers = losses * sizeof(LossSums) + sizeof(StepScale);
    t.host.answers = static_cast<LossSums*>(staging_memory(answers, t.ctx.where));
    t.host.numbers = static_cast<StepNumbers*>(staging_memory(sizeof(StepNumbers), t.ctx.where));

    // Bind frozen weights, and open the streams of the other queues and of a ring.
    t.graphs.of.resize(t.plans.size());
    t.stored.narrow = bind_frozen(t);
    t.streams.comm = open_stream(t.ctx.where);
    t.streams.message = open_stream(t.ctx.where);
    t.offload.stream = open_stream(t.ctx.where);
    t.ctx.beside = open_stream(t.ctx.where);
}

// Free everything, in the order of allocation. Nothing may still run.
template <typename T, typename S>
void trainer_free(Trainer<T, S>& t) {
    arena_free(t.arena, t.ctx.where);
    staging_free(t.host.staging, t.ctx.where);
    staging_free(t.host.next.staging, t.ctx.where);
    staging_free(t.host.answers, t.ctx.where);
    staging_free(t.host.numbers, t.ctx.where);
    const S streams[] = {t.streams.comm, t.streams.message, t.offload.stream, t.ctx.beside};
    for (S stream : streams)
        close_stream(stream);
    free_laps(t.watch);
    for (PlanGraph<S>& g : t.graphs.of)
        free_graph(g);
}

// ----------------------------------------------------------------------------
// binding: the pointers of one layer

// A visitor of parameter rows that points each Weight at its bytes.
template <typename T, typename S> struct BindWeights {
    const Parameter* p; // the next row
    const T* weights;   // the bucket's start
    acc_t<T>* grads;    // the gradients' start; null: frozen, or a plan without gradients
    Fp8 fp8;            // how products cast these weights
    const Narrow* narrow; // the next row's place, if frozen weights are narrow
    const LayerAdapters* adapters = nullptr;
    Fp8Matrices fp8s = {}; // scales and casts of all matrices
    size_t row = 0;        // rows seen so far

    void point(Weight& w) {
        acc_t<T>* grad = grads ? grads + p->offset : nullptr;
        T* data = const_cast<T*>(weights) + p->offset;
        w = {data, type_of<T>(), p->local_rows(), p->local_cols(), grad, nullptr, fp8};
        if (p->matrix >= 0) fp8s.point(w, size_t(p->matrix));
        point_at(w, narrow++);
        if (adapters) adapters->point(w, row);
        row++;
        p++;
    }

    // The table holds the row's other facts already.
    void operator()(Weight& w, const char*, std::initializer_list<size_t>, Init, bool, Shard,
                    bool) {
        point(w);
    }
};

// The start of a bucket's weights, where the running layer reads them.
template <typename T, typename S>
const T* weights_of(const Trainer<T, S>& t, int bucket) {
    return address<const T>(t, {weight_kind(t.layout, t.model, bucket), bucket});
}

// The start of the gradient that a layer adds to, or null if the plan makes none.
template <typename T, typename S>
acc_t<T>* gradients_of(const Trainer<T, S>& t, int bucket, int layer) {
    // Evaluation and generation share the weights of training, but make no gradients.
    bool trains = t.plans[t.plan].mode == Mode::TRAIN && t.model.buckets[bucket].trainable;
    if (!trains) return nullptr;
    return address<acc_t<T>>(t, {gradient_kind(t.layout, t.model, bucket, layer), bucket});
}

// A visitor for a bucket that a layer uses. It begins at the bucket's first parameter.
template <typename T, typename S>
BindWeights<T, S> bind_bucket(const Trainer<T, S>& t, Role role, int layer,
                              const LayerAdapters* adapters = nullptr) {
    // Find the bucket by its role: its number depends on the model's family.
    int bucket = find_bucket(t.model, role, layer);
    int row = t.model.buckets[bucket].first;
    Fp8 fp8 = role == Role::BLOCK ? t.model.shape.fp8.kind : Fp8::NONE; // the head stays wide
    return {&t.model.parameters[row], weights_of(t, bucket), gradients_of(t, bucket, layer), fp8,
            &t.stored.narrow[row], adapters, fp8_matrices(t)};
}

// A visitor of activation rows that points each at its bytes. The rows of a group follow each
// other, each at a multiple of 256 bytes.
template <typename T, typename S> struct BindActs {
    Recompute level;
    std::map<Kind, unsigned char*> next; // each group's next row; null: the action has none

    BindActs(const Trainer<T, S>& t, const Action& a)
        : level(t.plans[t.plan].recompute.of(a.layer)) {
        for (Kind group : ACTIVATION_KINDS)
            next[group] = address<unsigned char>(t, {group, a.layer, a.micro});
    }
    template <typename P>
    void operator()(P*& pointer, const char*, size_t n, Keep keep, Last last) {
        unsigned char*& at = next[activation_group(keep, last, level)];
        pointer = reinterpret_cast<P*>(at);
        if (at)
            at += round_up(n * sizeof(P), ARENA_ALIGN);
    }
};

// Call f(weights, activations) for the block that an action runs. Activations lie where the plan's
// sizes put them, even when a decoding step has fewer rows.
template <typename T, typename S, typename F>
void with_block(Trainer<T, S>& t, const Action& a, F f) {
    with_family(t.model.shape.family, [&](auto family) {
        typename decltype(family)::Block weights = {};
        Shape shape = layer_shape(t.model.shape, a.layer);
        bind_gathered(t, find_bucket(t.model, Role::BLOCK, a.layer));
        LayerAdapters adapters = layer_adapters(t, a, Role::BLOCK);
        LayerAdapters of_experts = layer_adapters(t, a, Role::EXPERTS);
        t.ctx.prefix = layer_prefix(t, a);
        block_parameters(weights, shape, bind_bucket(t, Role::BLOCK, a.layer, &adapters));
        if (shape.experts.E)
            expert_parameters(weights, shape, bind_bucket(t, Role::EXPERTS, a.layer, &of_experts));

        typename decltype(family)::template Acts<T> acts = {};
        block_activations(acts, t.ctx.shape, t.plans[t.plan].rows(), t.ctx.where,
                          BindActs<T, S>(t, a));
        f(weights, acts);
    });
}

// Call f(weights) for the head. A tied head is the token table, with a gradient buffer of its own.
template <typename T, typename S, typename F>
void with_head(const Trainer<T, S>& t, F f) {
    int head = t.model.head();
    with_family(t.model.shape.family, [&](auto family) {
        typename decltype(family)::Head weights = {};
        head_parameters(weights, t.model.shape, bind_bucket(t, Role::HEAD, head));
        if (t.model.shape.embedding.tied)
            bind_bucket(t, Role::TOKENS, head).point(weights.lm_head);
        f(weights);
    });
}

// The head's activations, which lie in a row of its scratch.
template <typename T, typename S>
HeadActs<T> head_acts(const Trainer<T, S>& t) {
    HeadActs<T> acts = {};
    unsigned char* next = scratch_address(t, t.model.head(), ScratchKind::HEAD);
    auto bind = [&](auto*& pointer, const char*, size_t n, Keep, Last) {
        pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(next);
        next += round_up(n * sizeof(*pointer), ARENA_ALIGN);
    };
    head_activations(acts, t.ctx.shape, head_rows(t.plans[t.plan]), bind);
    return acts;
}

} // namespace llmc
