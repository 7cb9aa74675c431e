// trainer.h - one rank's state: model, plans, the arena's bytes, and its groups of ranks
#pragma once
#include "action.h"
#include "arena.h"
#include "context.h"
#include "layout.h"
#include "model.h"
#include "ops/linear.cuh"
#include "ops/loss_scale.cuh"
#include "ops/memory.h"
#include "ops/muon.cuh"
#include "ops/objective.cuh"
#include "ops/step_scale.h"
#include "ops/types.h"
#include "quantised.h"
#include "sharding.h"
#include "streams.h"
#include <functional>

namespace llmc {

// The optimizer's numbers, in float as its kernels take them.
struct Hyper {
    float lr = 0; // this step's, set by the schedule
    float beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, weight_decay = 0, clip = 0;
    LossScaling loss_scaling = {}; // fp16
    uint64_t seed = 0;             // for stochastic rounding
    bool stochastic = true;        // false, in tests: round to nearest, which loses small steps
    Muon muon = {};                // where it is the optimizer
    double ema = 0;                // decay of the mean of weights (ema.cuh), if the plan keeps one
};

// Muon's settings: it rounds at random where AdamW does, by the same seed.
inline Muon muon_of(const Hyper& h) {
    Muon muon = h.muon;
    muon.stochastic = h.stochastic;
    muon.seed = h.seed;
    return muon;
}

// The batch of the next step, read while a device works on this one.
struct PreparedBatch {
    int plan = -1;       // the plan that will use it; -1: no batch is prepared
    uint64_t cursor = 0; // the first sample
    // (micro-batches, row_numbers(), N), then keys; null on a CPU, which reads none ahead
    int* staging = nullptr;
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

// ----------------------------------------------------------------------------
// making a trainer: plans and places, then the bytes

// Make, check and place one plan for each of `options` (layers.h).
template <typename T, typename S>
void trainer_place(Trainer<T, S>& t, const Shape& shape, const std::vector<PlanOptions>& options,
                   const Layout& layout = {});

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

} // namespace llmc
