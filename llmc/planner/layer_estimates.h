// layer_estimates.h - time and bytes of one layer and of its buckets, for the planner
//   The simulator prices layers (cost.h), and the arena says their bytes (sizes.h). Each is asked
//   once for all layouts that share the answer.
#pragma once
#include <unordered_map>
#include <utility>
#include "../action.h"
#include "../arena.h"
#include "../comm/comm.h"
#include "../family.h"
#include "../fp8.h"
#include "../layout.h"
#include "../model.h"
#include "../ops/linear.cuh"
#include "../ops/types.h"
#include "../optimizer.h"
#include "../recompute.h"
#include "../sharding.h"
#include "../sizes.h"
#include "../zero.h"
#include "cost.h"
#include "layer_cost.h"
#include "links.h"
#include "../io/machine.h"
#include "simulator.h"

namespace llmc {

// A layer's kind: which end of the model it is, its experts, its window, whether it trains
// anything, and whether backward passes come down to it.
typedef std::array<size_t, 5> LayerKind;
inline LayerKind kind_of_layer(const Model& model, int layer) {
    bool trains = false;
    for (int b : buckets_of(model, layer))
        trains |= model.buckets[b].trainable;
    size_t end = model.is_block(layer) ? 0 : 1 + size_t(layer);
    return {end, is_sparse(model.shape, layer), end ? 0 : window_of(model.shape, layer), trains,
            layer >= lowest_trained(model)};
}

// A model's layers by kind. Kinds are numbered in the order of their first layers.
struct LayerKinds {
    std::vector<size_t> of; // [layer]: its kind
    std::vector<int> first; // [kind]: its first layer, which stands for all
};
inline LayerKinds kinds_of_layers(const Model& model) {
    LayerKinds kinds;
    std::map<LayerKind, size_t> known;
    for (int layer = 0; layer < model.layers(); layer++) {
        auto [kind, fresh] = known.insert({kind_of_layer(model, layer), known.size()});
        if (fresh) kinds.first.push_back(layer);
        kinds.of.push_back(kind->second);
    }
    return kinds;
}

// One layer's time and bytes for one micro-batch.
struct LayerEstimate {
    // Seconds.
    double forward = 0;
    double backward = 0;
    double redone = 0;
    double weights = 0; // the weight half of `backward`, for schedules that run it apart

    // Bytes kept until the input half of the backward pass, and until its weight half.
    double kept_b = 0;
    double kept_w = 0;
    // Bytes that the input half hands to the weight half.
    double gradient_w = 0;
    // Bytes needed only while the layer runs, and those of keys and values in generation.
    double passing = 0;
    double cache = 0;
    bool block = false; // else an end of the model

    double seconds() const { return forward + backward + redone; }
};

// Bytes that lie where the step runs and could lie in another tier.
struct Movable {
    double of[OFFLOAD_ROWS] = {}; // by the rows of OFFLOAD_TABLE
    double masters = 0;           // part of the optimizer's row

    void add(const Movable& m, double times) {
        for (int row = 0; row < OFFLOAD_ROWS; row++)
            of[row] += times * m.of[row];
        masters += times * m.masters;
    }
};

// The sum over one layer's buckets.
struct BucketEstimate {
    // Bytes that last for the whole run, and what of them could lie in another tier.
    // And what lies in the host's memory, apart.
    double lasting = 0;
    Movable movable = {};
    double host = 0;
    // Bytes needed while the layer runs: of weights that come for it, of a micro-batch's gradient,
    // and of a gradient that is here only meanwhile; and bytes of an update's chunk, if it moves,
    // here or in the host's memory, apart.
    double weights = 0;
    double partial = 0;
    double gradient = 0;
    double summed = 0; // those of `gradient` that REDUCE sums
    double chunk = 0;
    double chunk_apart = 0;
    double staged_apart = 0; // bytes of all chunks, of which some are there at a time

    // Seconds to reduce the gradients, to gather the weights for a use, to publish them, to update,
    // of which `late` run beside layers; to fetch the weights from another tier, and to move the
    // gradients there or back.
    double reduce = 0;
    double gather = 0;
    double publish = 0;
    double update = 0;
    double late = 0;
    double fetch = 0;
    double move = 0;
};

// Estimates that layouts share: those with equal keys share an entry.
typedef std::array<int, 14> EstimateKey; // those that say less end in zeros
struct EstimateHash {
    size_t operator()(const EstimateKey& key) const {
        size_t sum = 0;
        for (int x : key)
            sum = 31 * sum + size_t(x);
        return sum;
    }
};
template <typename V> using Estimates = std::unordered_map<EstimateKey, V, EstimateHash>;
template <typename T, typename S> struct Planner {
    Shape shape; // as with_logits() returns it
    CostModel cost;
    S where;
    Estimates<Model> models = {};                        // by tp, ep, whole experts
    LayerKinds kinds = {};                               // of every model: layers are alike
    Estimates<std::vector<LayerEstimate>> layers = {};   // [kind]
    Estimates<std::vector<BucketEstimate>> buckets = {}; // [kind]
};

// Return the model of a layout, made at most once for each way to cut it.
template <typename T, typename S>
const Model& model_of(Planner<T, S>& planner, const Layout& layout) {
    // Take the pieces of the layout's rank for all: no rank has larger ones.
    EstimateKey key = {layout.tp.size, layout.ep, layout.whole_experts};
    auto [entry, fresh] = planner.models.try_emplace(key);
    if (fresh) entry->second = make_model(planner.shape, layout);
    if (planner.kinds.of.empty()) planner.kinds = kinds_of_layers(entry->second);
    return entry->second;
}

// Estimate one layer for one micro-batch.
template <typename T, typename S>
LayerEstimate estimate_layer(const Planner<T, S>& planner, const Plan& p, const Model& model,
                             int layer) {
    // Time: the head runs entirely in its backward pass.
    LayerEstimate e;
    const CostModel& c = planner.cost;
    auto seconds = [&](Op op) { return total_of(layer_seconds(c, p, model, {op, 0, layer})); };
    bool backward = p.mode == Mode::TRAIN && layer >= lowest_trained(model);
    bool block = model.is_block(layer);
    bool redoes = block && backward && p.recompute.of(layer) != Recompute::NONE;
    e.forward = seconds(Op::F);
    e.backward = backward ? seconds(Op::B) : 0;
    e.redone = redoes ? seconds(Op::R) : 0;
    e.weights = block && backward ? seconds(Op::W) : 0;

    // Memory: a layer's input stays until its backward pass, if there is one.
    auto bytes = [&](Kind kind) {
        return double(data_bytes<T>(p, model, {kind, layer}, planner.where));
    };
    e.passing = bytes(Kind::SCRATCH) + 2 * bytes(Kind::DSTREAM);
    e.block = block;
    if (!block) return e;
    e.cache = p.mode == Mode::GENERATE ? bytes(Kind::CACHE) : 0;
    e.kept_b = bytes(Kind::KEPT_B);
    e.kept_w = bytes(Kind::KEPT_W) + bytes(Kind::STREAM);

    // A layer that no gradient reaches needs its rows only while it runs.
    if (!backward) {
        e.passing += std::exchange(e.kept_b, 0) + std::exchange(e.kept_w, 0);
        return e;
    }
    e.gradient_w = bytes(Kind::GRADIENT_W) + bytes(Kind::REDO_W);
    for (Kind kind : {Kind::REDO_B, Kind::REDO_W, Kind::GRADIENT_B, Kind::GRADIENT_W})
        e.passing += bytes(kind);
    return e;
}

// Return the estimates of all kinds of layers, made at most once for each key.
template <typename T, typename S>
const std::vector<LayerEstimate>& layers_of(Planner<T, S>& planner, const Plan& p) {
    const Layout& l = p.layout;
    const Machine& machine = planner.cost.machine;

    // The sizes decide the bytes and the work; ranks in the same node decide the speed of messages.
    auto near = [&](auto axis) { return axis_in_node(l, machine, axis); };
    // Micro-batches share the casts of weights that are kept.
    bool casts = planner.shape.fp8 != Fp8::NONE && keeps_casts(p, model_of(planner, l));
    int kept = casts ? p.micro_batches : 0;
    int peers = machine.jitter > 0 ? l.world() / l.pp.size : 0; // they wait for the slowest
    EstimateKey key = {l.tp.size, l.cp.size, int(l.cp_method), l.ep, l.whole_experts,
                       l.sequence_parallel, int(p.B), int(p.recompute.of(1)), near(&Layout::tp),
                       near(&Layout::cp), near(&Layout::dp), kept, peers};
    auto [entry, fresh] = planner.layers.try_emplace(key);
    if (!fresh) return entry->second;

    const Model& model = model_of(planner, l);
    for (int layer : planner.kinds.first)
        entry->second.push_back(estimate_layer(planner, p, model, layer));
    return entry->second;
}

// Return the rate of moves, which is that of the slowest tier.
inline double moving_rate(const CostModel& c, const Offload& away) {
    return tier_rate(c.machine, std::max({away.optimizer, away.gradients, away.weights}));
}

// Add a bucket's update, whose optimizer keeps so many bytes. Chunks of what lies in another tier
// than the update's come and go, one at a time, beside the updates. The update has used up their
// gradients, which do not go back.
template <typename T, typename S>
void add_update(BucketEstimate& e, const Planner<T, S>& planner, const Plan& p, const Model& model,
                int bucket, double optimizer) {
    const CostModel& c = planner.cost;
    const Offload& away = p.offload;
    double update = update_seconds(c, p, model, bucket);
    if (!away.cuts_updates()) {
        e.update += update;
        return;
    }

    // Make room for a chunk, and for all of them where they wait on the host.
    Data first = {Kind::STAGED, bucket, -1, 0};
    double& chunk = is_here(away.update, planner.where) ? e.chunk : e.chunk_apart;
    chunk = std::max(chunk, double(data_bytes<T>(p, model, first, planner.where)));
    double n = double(updated_range(p.layout, model, bucket).count);
    double weights = away.weights != away.update ? n * sizeof(T) : 0;
    double gradients = away.gradients != away.update ? n * sizeof(acc_t<T>) : 0;
    double states = away.optimizer != away.update ? optimizer : 0;
    double come = weights + gradients + states;
    double go = weights + states;
    if (!is_here(away.update, planner.where)) e.staged_apart += come;

    // Late updates leave the end of a step nothing but weights that come back.
    double rate = moving_rate(c, away);
    if (away.late) e.late += update + come / rate;
    e.update += away.late ? go / rate : std::max(update, (come + go) / rate);
}

// Estimate one layer's own buckets.
// A tied table counts for the embedding, and again for a head on another stage.
template <typename T, typename S>
BucketEstimate estimate_buckets(const Planner<T, S>& planner, const Plan& p, const Model& model,
                                int layer) {
    BucketEstimate e;
    const CostModel& c = planner.cost;
    const Offload& away = p.offload;
    int states = int(optimizer_row(p.optimizer).states.size());
    double rate = moving_rate(c, away);
    for (int b : buckets_of(model, layer)) {
        auto bytes = [&](Kind kind) {
            return double(data_bytes<T>(p, model, {kind, b}, planner.where));
        };
        // Count what lasts where the step runs. What lies there and could leave is movable.
        auto keep = [&](Tier tier, int row, double kept) {
            if (is_here(tier, planner.where)) e.lasting += kept;
            if (tier == Tier::DEVICE) e.movable.of[row] += kept;
            if (tier == Tier::HOST && !is_here(tier, planner.where)) e.host += kept;
        };

        // Count the weights, which frozen buckets have too. Those that are cut or lie in another
        // tier come for each use; a shard comes to STAGED first.
        const Bucket& bucket = model.buckets[b];
        bool cut = is_sharded(p.layout, model, {Kind::WEIGHT, b});
        keep(away.weights, WEIGHTS, bytes(Kind::WEIGHT));
        if (cut) e.gather += gather_seconds(c, p, model, b);
        if (cut || p.layout.weights_away) e.weights += bytes(Kind::GATHERED);
        if (sends_codes(p, model, b)) e.weights += bytes(Kind::CODES);
        int last = bucket.first + (keeps_casts(p, model) ? bucket.count : 0);
        for (int i = bucket.first; i < last; i++) {
            // Only matrices have casts.
            const Parameter& w = model.parameters[i];
            if (w.matrix >= 0) e.lasting += fp8_cast_bytes(w.local_rows(), w.local_cols());
        }
        if (p.layout.weights_away) {
            e.weights += cut ? bytes(Kind::STAGED) : 0;
            e.fetch += bytes(fetched_kind(p.layout, model, b)) / rate;
        }
        if (!bucket.trainable || p.mode != Mode::TRAIN)
            continue;
        if (is_published(p.layout, bucket)) e.publish += publish_seconds(c, p, model, b);

        // Count what only trainable buckets have. A gradient that lies in another tier comes for
        // each micro-batch, and leaves again.
        keep(away.gradients, GRADIENTS, bytes(Kind::GRAD));
        if (bucket.tied()) keep(away.gradients, GRADIENTS, bytes(Kind::GRAD_TIED));
        if (p.layout.gradients_away) {
            e.gradient += bytes(Kind::GRAD_HERE);
            e.summed += is_reduced(p.layout, model, b) ? bytes(Kind::GRAD_HERE) : 0;
            e.move += bytes(Kind::GRAD_HERE) / rate;
        }
        e.partial += p.layout.zero >= 2 ? bytes(Kind::PARTIAL) : 0;
        e.partial += bytes(Kind::SENT);
        e.reduce += reduce_seconds(c, p, model, b);

        // Count what the optimizer keeps, and the update.
        double optimizer = bytes(Kind::MASTER) + states * bytes(Kind::STATE) + bytes(Kind::EMA);
        keep(away.optimizer, OPTIMIZER, optimizer);
        e.movable.masters += away.optimizer == Tier::DEVICE ? bytes(Kind::MASTER) : 0;
        add_update(e, planner, p, model, b, optimizer);
    }
    return e;
}

// Return the estimates of all kinds of layers' buckets, made at most once for each key.
template <typename T, typename S>
const std::vector<BucketEstimate>& buckets_for(Planner<T, S>& planner, const Plan& p) {
    const Layout& l = p.layout;
    const Machine& machine = planner.cost.machine;
    // Buckets do not depend on micro-batches.
    EstimateKey key = {l.tp.size, l.ep, l.whole_experts, l.zero, l.zero_group, l.weights_near,
                       l.dp.size * l.cp.size, ranks_in_node(l, machine, Group::DATA),
                       ranks_in_node(l, machine, Group::EXPERTS), int(p.masters),
                       int(p.offload.optimizer), int(p.offload.gradients),
                       int(p.offload.weights)};
    auto [entry, fresh] = planner.buckets.try_emplace(key);
    if (!fresh) return entry->second;

    const Model& model = model_of(planner, l);
    for (int layer : planner.kinds.first)
        entry->second.push_back(estimate_buckets(planner, p, model, layer));
    return entry->second;
}

} // namespace llmc
