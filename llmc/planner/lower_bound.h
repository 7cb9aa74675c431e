// lower_bound.h - the least time and memory of a layout, by sums: what the search asks before it
//   simulates
//   m micro-batches; F, B, R of a rank's layers, with the messages inside them. A rank's layers,
//   its collectives and its moves between tiers each have a queue, and the queues run at once:
//     busy   max(m (F + B + R), m (gathers + reduces), m moves), and the contention of both
//     step   max over ranks of (F of the stages before its first one + busy + their B) + update
//            The same of its last chunks alone, behind the stages before these: few micro-batches
//            leave a rank idle between its chunks. In ZB-H1 weight halves wait until a rank has
//            sent its last gradient
//     bytes  lasting data + micro-batches in flight x kept activations + what the first backward
//            pass needs while it runs
//   How actions wait for each other, and the holes between data, are left out: only the simulator
//   and the arena know them. test_planner says how far below these the sums are.
//   Cost: a microsecond a layout; prices are asked once for all layouts that share them.
#pragma once
#include <map>
#include <utility>
#include "../action.h"
#include "../arena.h"
#include "../family.h"
#include "../io/machine.h"
#include "../io/plan_flags.h"
#include "../layout.h"
#include "../model.h"
#include "../ops/linear.cuh"
#include "../ops/types.h"
#include "../optimizer.h"
#include "../pipeline.h"
#include "../recompute.h"
#include "../sharding.h"
#include "../sizes.h"
#include "cost.h"
#include "layer_cost.h"
#include "links.h"

namespace llmc {

// ----------------------------------------------------------------------------
// prices

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

// The price of a layer, for one micro-batch.
struct LayerPrice {
    // Seconds. Weights: the weight half of `backward`.
    double forward = 0, backward = 0, redone = 0, weights = 0;
    // Bytes kept until the input half of the backward pass, and until its weight half; bytes that
    // the first half hands to the second; bytes needed only while the layer runs.
    double kept_b = 0, kept_w = 0, gradient_w = 0, passing = 0;
    bool block = false; // else an end of the model
};

// The price of a layer's buckets.
struct BucketPrice {
    // Bytes for the whole run, where the step runs and in the host's memory; bytes of an update's
    // chunk; bytes of weights that come for a use, and of a gradient that is here meanwhile.
    double lasting = 0, host = 0, chunk = 0, weights = 0, partial = 0;
    // Seconds: of collectives, of the update, and of moves of weights, gradients and the update's
    // data, one way each.
    double gather = 0, reduce = 0, publish = 0, update = 0;
    double fetch = 0, move = 0, staged = 0;
};

// The prices of a model on a machine.
typedef std::array<int, 14> PriceKey; // layouts with equal keys share a price
template <typename T, typename S> struct Prices {
    Shape shape; // as with_logits() returns it
    CostModel cost;
    S where;
    std::map<PriceKey, Model> models = {};                     // by tp, ep, whole experts
    LayerKinds kinds = {};                                     // of every model: layers are alike
    std::map<PriceKey, std::vector<LayerPrice>> layers = {};   // [kind]
    std::map<PriceKey, std::vector<BucketPrice>> buckets = {}; // [kind]
    std::map<int, std::vector<int>> stages = {};               // [stages]: first layers
};

// Return the model of a layout, made at most once for each way to cut it.
template <typename T, typename S>
const Model& model_of(Prices<T, S>& prices, const Layout& layout) {
    // Take the pieces of the layout's rank for all: no rank has larger ones.
    PriceKey key = {layout.tp.size, layout.ep, layout.experts.whole};
    auto [entry, fresh] = prices.models.try_emplace(key);
    if (fresh) entry->second = make_model(prices.shape, layout);
    if (prices.kinds.of.empty()) prices.kinds = kinds_of_layers(entry->second);
    return entry->second;
}

// Split the layers of a layout into its stages, at most once for each number of them.
template <typename T, typename S> void split_stages(Prices<T, S>& prices, Layout& layout) {
    int count = layout.stages();
    auto [stages, fresh] = prices.stages.try_emplace(count);
    if (fresh && count > 1) stages->second = choose_stages(prices.shape, count);
    layout.first_layer = stages->second;
}

// Return the price of a layer.
template <typename T, typename S>
LayerPrice price_layer(const Prices<T, S>& prices, const Plan& p, const Model& model, int layer) {
    // Time: the head runs entirely in its backward pass.
    LayerPrice e;
    const CostModel& c = prices.cost;
    auto seconds = [&](Op op) { return total_of(layer_seconds(c, p, model, {op, 0, layer})); };
    bool backward = p.mode == Mode::TRAIN && layer >= lowest_trained(model);
    bool block = model.is_block(layer);
    bool recomputes = p.recompute.of(layer) != Recompute::NONE;
    bool redoes = block && backward && recomputes;
    e.forward = seconds(Op::F);
    e.backward = backward ? seconds(Op::B) : 0;
    e.redone = redoes ? seconds(Op::R) : 0;
    e.weights = block && backward ? seconds(Op::W) : 0;

    // Memory: a layer's input stays until its backward pass, if there is one.
    auto bytes = [&](Kind kind) {
        return double(data_bytes<T>(p, model, {kind, layer}, prices.where));
    };
    e.passing = bytes(Kind::SCRATCH) + 2 * bytes(Kind::DSTREAM);
    e.block = block;
    if (!block || !backward) return e;
    e.kept_b = bytes(Kind::KEPT_B);
    e.kept_w = bytes(Kind::KEPT_W) + bytes(Kind::STREAM);
    e.gradient_w = bytes(Kind::GRADIENT_W) + bytes(Kind::REDO_W);
    for (Kind kind : {Kind::REDO_B, Kind::REDO_W, Kind::GRADIENT_B, Kind::GRADIENT_W})
        e.passing += bytes(kind);
    return e;
}

// Return the prices of all kinds of layers, made at most once for each key.
template <typename T, typename S>
const std::vector<LayerPrice>& layer_prices(Prices<T, S>& prices, const Plan& p) {
    const Layout& l = p.layout;
    const Model& model = model_of(prices, l);
    const Machine& machine = prices.cost.machine;

    // The sizes decide the bytes and the work; ranks in the same node decide the speed of messages.
    // Micro-batches share the casts of weights that are kept.
    auto near = [&](auto axis) { return axis_in_node(l, machine, axis); };
    int kept = keeps_casts(p, model) ? p.micro_batches : 0;
    int peers = machine.jitter > 0 ? l.world() / l.pp.size : 0; // they wait for the slowest
    PriceKey key = {l.tp.size, l.cp.size, int(l.context.method), l.ep, l.experts.whole,
                    l.sequence_parallel, int(p.B), int(p.recompute.of(1)), near(&Layout::tp),
                    near(&Layout::cp), near(&Layout::dp), kept, peers};
    auto [entry, fresh] = prices.layers.try_emplace(key);
    for (size_t i = 0; fresh && i < prices.kinds.first.size(); i++)
        entry->second.push_back(price_layer(prices, p, model, prices.kinds.first[i]));
    return entry->second;
}

// Add the update of a bucket, whose optimizer keeps so many bytes. Of what lies in another tier
// than the update's, chunks come and go; its gradient has been used up, and does not go back.
template <typename T, typename S>
void add_update_price(BucketPrice& e, const Prices<T, S>& prices, const Plan& p,
                      const Model& model, int bucket, double optimizer) {
    const Offload& away = p.offload;
    e.update += update_seconds(prices.cost, p, model, bucket);
    if (!away.cuts_updates()) return;
    Data first = {Kind::STAGED, bucket, -1, 0};
    double chunk = double(data_bytes<T>(p, model, first, prices.where));
    if (is_here(away.update, prices.where)) e.chunk = std::max(e.chunk, chunk);

    // Count what comes, and what goes.
    double n = double(updated_range(p.layout, model, bucket).count);
    double weights = away.weights != away.update ? n * sizeof(T) : 0;
    double gradients = away.gradients != away.update ? n * sizeof(acc_t<T>) : 0;
    double states = away.optimizer != away.update ? optimizer : 0;
    Tier slowest = std::max({away.optimizer, away.gradients, away.weights});
    double both = 2 * (weights + states) + gradients;
    e.staged += both / tier_rate(prices.cost.machine, slowest);
}

// Return the price of one layer's own buckets. A tied table counts for the embedding, and again for
// a head on another stage.
template <typename T, typename S>
BucketPrice price_buckets(const Prices<T, S>& prices, const Plan& p, const Model& model,
                          int layer) {
    BucketPrice e;
    const CostModel& c = prices.cost;
    const Offload& away = p.offload;
    for (int b : buckets_of(model, layer)) {
        auto bytes = [&](Kind kind) {
            return double(data_bytes<T>(p, model, {kind, b}, prices.where));
        };
        auto keep = [&](Tier tier, double kept) {
            if (is_here(tier, prices.where)) e.lasting += kept;
            else if (tier == Tier::HOST) e.host += kept;
        };

        // Weights, of frozen buckets too. Those that are cut or lie in another tier come for a use.
        const Bucket& bucket = model.buckets[b];
        bool cut = is_sharded(p.layout, model, {Kind::WEIGHT, b});
        keep(away.weights, bytes(Kind::WEIGHT));
        if (cut) e.gather += gather_seconds(c, p, model, b);
        if (cut || p.layout.offload.weights) e.weights += bytes(Kind::GATHERED);
        for (int i = bucket.first; keeps_casts(p, model) && i < bucket.first + bucket.count; i++) {
            const Parameter& w = model.parameters[i];
            if (w.matrix >= 0) e.lasting += fp8_cast_bytes(w.local_rows(), w.local_cols());
        }
        Kind fetched = fetched_kind(p.layout, model, b);
        if (p.layout.offload.weights)
            e.fetch += bytes(fetched) / tier_rate(c.machine, away.weights);
        if (!bucket.trainable || p.mode != Mode::TRAIN)
            continue;

        // Gradients. One in another tier comes for each micro-batch, and leaves again.
        keep(away.gradients, bytes(Kind::GRAD));
        if (bucket.tied()) keep(away.gradients, bytes(Kind::GRAD_TIED));
        if (p.layout.offload.gradients)
            e.move += bytes(Kind::GRAD_HERE) / tier_rate(c.machine, away.gradients);
        e.partial += p.layout.zero >= 2 ? bytes(Kind::PARTIAL) : 0;
        e.reduce += reduce_seconds(c, p, model, b);

        // The optimizer, and its update.
        size_t states = optimizer_row(p.optimizer).states.size();
        double optimizer = bytes(Kind::MASTER) + double(states) * bytes(Kind::STATE) +
                           bytes(Kind::EMA);
        keep(away.optimizer, optimizer);
        if (is_published(p.layout, bucket)) e.publish += publish_seconds(c, p, model, b);
        add_update_price(e, prices, p, model, b, optimizer);
    }
    return e;
}

// Return the prices of all kinds of layers' buckets, made at most once for each key.
template <typename T, typename S>
const std::vector<BucketPrice>& bucket_prices(Prices<T, S>& prices, const Plan& p) {
    // Buckets do not depend on micro-batches.
    const Layout& l = p.layout;
    const Machine& machine = prices.cost.machine;
    const Model& model = model_of(prices, l);
    PriceKey key = {l.tp.size, l.ep, l.experts.whole, l.zero, l.zero_group, l.weights_near,
                    l.dp.size * l.cp.size, ranks_in_node(l, machine, Group::DATA),
                    ranks_in_node(l, machine, Group::EXPERTS), int(p.masters),
                    int(p.offload.optimizer), int(p.offload.gradients),
                    int(p.offload.weights)};
    auto [entry, fresh] = prices.buckets.try_emplace(key);
    for (size_t i = 0; fresh && i < prices.kinds.first.size(); i++)
        entry->second.push_back(price_buckets(prices, p, model, prices.kinds.first[i]));
    return entry->second;
}

// ----------------------------------------------------------------------------
// the bound

// The least time and memory of a layout.
struct Bound {
    double seconds = 0; // of a step
    double bytes = 0;   // of the fullest rank, where the step runs
    double host = 0;    // of the fullest rank in the host's memory, if that is apart
    int fullest = 0;    // that rank's place in the pipeline
    std::vector<double> of_rank = {}; // bytes of each
};

// Add the bytes of another model beside each rank's.
inline void add_beside(Bound& bound, const Bound& other) {
    for (size_t rank = 0; rank < bound.of_rank.size(); rank++)
        bound.of_rank[rank] += other.of_rank[rank];
    auto most = std::max_element(bound.of_rank.begin(), bound.of_rank.end());
    bound.fullest = int(most - bound.of_rank.begin());
    bound.bytes = *most;
}

// How many stages have live activations on a pipeline rank, waiting for the input half (b) and for
// the weight half (w) of their backward passes: the table in pipeline.h.
struct LiveStages { double b, w; };
inline LiveStages live_stages(const Layout& layout, int micro_batches, int rank) {
    // Each chunk is a stage; in 1F1B a rank has one.
    int pp = layout.pp.size;
    int v = layout.chunks;
    int m = micro_batches;
    double all = double(m) * v;
    double waits = std::min(m, pp - rank);
    if (layout.pipeline == Pipeline::GPIPE)
        return {all, all};
    if (layout.pipeline == Pipeline::INTERLEAVED) {
        // Groups are larger where pp does not divide the micro-batches, as in schedule_of().
        int largest = int(ceil_div(m, std::max(1, m / pp)));
        waits = std::min(all, 2.0 * (pp - rank - 1) + (v - 1) * largest + 1);
    }
    if (layout.pipeline != Pipeline::ZERO_BUBBLE)
        return {waits, waits};
    return {v * waits, double(v * std::min(m, pp))};
}

// One rank's sums.
struct RankSums {
    double fill = 0, drain = 0; // seconds of the stages before its first one
    double chunks = 0;          // the longest of its last chunks and the stages before them
    double forward = 0, backward = 0, weights = 0; // of a micro-batch
    double gather = 0, reduce = 0, fetch = 0, move = 0;
    double update = 0, publish = 0, staged = 0; // of a step
    double lasting = 0, host = 0, chunk = 0;    // bytes
    double kept_b = 0, kept_w = 0, gradient_w = 0, block = 0, passing = 0;
};

// Add up each rank's layers.
template <typename T, typename S>
std::vector<RankSums> rank_sums(Prices<T, S>& prices, const Plan& p) {
    const Layout& layout = p.layout;
    const Model& model = model_of(prices, layout);
    const std::vector<LayerPrice>& layers = layer_prices(prices, p);
    const std::vector<BucketPrice>& buckets = bucket_prices(prices, p);
    int pp = layout.pp.size;
    bool halves = layout.pipeline == Pipeline::ZERO_BUBBLE;
    double message = pp > 1 ? stage_seconds(prices.cost, p, model, 1) : 0;
    double fill = 0;
    double drain = 0;
    std::vector<RankSums> ranks;
    ranks.resize(size_t(pp));
    std::vector<std::array<double, 2>> stages; // seconds before it, of both passes; its own
    for (int stage = 0; stage < layout.stages(); stage++) {
        RankSums& r = ranks[size_t(stage % pp)];
        if (stage < pp) r.fill = fill;
        if (stage < pp) r.drain = drain;
        double before = fill + drain;
        double own = r.forward + r.backward;
        fill += message;
        drain += p.mode == Mode::TRAIN ? message : 0;
        double near_gather = 0;
        double near_fetch = 0;
        int end = first_layer_of(layout, model, stage + 1);
        for (int l = first_layer_of(layout, model, stage); l < end; l++) {
            // Seconds.
            const LayerPrice& e = layers[prices.kinds.of[size_t(l)]];
            const BucketPrice& b = buckets[prices.kinds.of[size_t(l)]];
            double backward = e.backward + e.redone;
            fill += e.forward;
            drain += backward - (halves ? e.weights : 0);
            r.forward += e.forward;
            r.backward += backward;
            r.weights += e.weights;
            double uses = e.block && e.backward > 0 ? 2 : 1;
            double gather = uses * b.gather;
            double fetch = uses * b.fetch;
            r.gather += gather;
            r.fetch += fetch;
            if (e.block) near_gather = gather;
            if (e.block) near_fetch = fetch;

            // A tied head on the embedding's rank uses the table that is there already.
            r.kept_b += e.kept_b;
            r.kept_w += e.kept_w;
            r.gradient_w += e.gradient_w;
            r.block = std::max(r.block, e.kept_b + e.kept_w);
            r.passing = e.passing + b.weights + b.partial; // the last layer's
            bool tied_here = l == model.head() && model.shape.embedding.tied && stage % pp == 0;
            if (tied_here) continue;
            r.reduce += b.reduce;
            r.move += b.move;
            r.update += b.update;
            r.publish += b.publish;
            r.staged += b.staged;
            r.lasting += b.lasting;
            r.host += b.host;
            r.chunk = std::max(r.chunk, b.chunk);
        }

        // A block whose passes follow each other keeps its weights.
        stages.push_back({before, r.forward + r.backward - own});
        if (pp == 1) continue;
        r.gather -= near_gather;
        r.fetch -= near_fetch;
    }

    // Go back from the last stage: its rank runs it and its later ones once they are reached.
    std::vector<double> later(size_t(pp), 0.0);
    for (int stage = layout.stages() - 1; layout.chunks > 1 && stage >= 0; stage--) {
        size_t rank = size_t(stage % pp);
        later[rank] += p.micro_batches * stages[size_t(stage)][1];
        double seconds = stages[size_t(stage)][0] + later[rank];
        ranks[rank].chunks = std::max(ranks[rank].chunks, seconds);
    }
    return ranks;
}

// Return the least seconds of a rank, to the end of its last backward pass and its sums.
inline double least_seconds(const Plan& p, const Machine& machine, const RankSums& r,
                            double kept) {
    // The longest of the queues.
    const Layout& layout = p.layout;
    double m = p.micro_batches;
    bool each = layout.zero >= 2; // sums of every micro-batch, else of the last one
    double computing = m * (r.forward + r.backward);
    double collectives = m * (r.gather + (each ? r.reduce : 0));
    double moves = m * (r.fetch + 2 * kept) + (2 * m - 1) * r.move;
    double both = std::min(computing, collectives);
    double busy = std::max({computing, collectives, moves});
    busy += machine.contention * both;

    // Weight halves fill the time in which the stages before this one send the last gradient down;
    // so do sums once a step.
    bool halves = layout.pipeline == Pipeline::ZERO_BUBBLE;
    double late = halves ? std::min(m * r.weights, r.drain) : 0;
    double sums = each ? 0 : std::max(0.0, r.reduce - r.backward);
    double last = std::max(r.drain - late, sums);
    return std::max(r.chunks, r.fill + busy + last);
}

// Return the least time and memory of a plan without actions.
template <typename T, typename S> Bound bound_of_plan(Prices<T, S>& prices, const Plan& p) {
    const Layout& layout = p.layout;
    const Machine& machine = prices.cost.machine;
    bool leave = p.offload.activations != Tier::DEVICE;
    bool here = is_here(p.offload.activations, prices.where);
    std::vector<RankSums> ranks = rank_sums(prices, p);
    Bound bound;
    double tail = 0;
    for (int rank = 0; rank < layout.pp.size; rank++) {
        // Time. Updates run behind the last sum of all ranks, beside their moves.
        const RankSums& r = ranks[size_t(rank)];
        double rate = tier_rate(machine, p.offload.activations);
        double kept = leave ? (r.kept_b + r.kept_w) / rate : 0;
        double seconds = least_seconds(p, machine, r, kept);
        bound.seconds = std::max(bound.seconds, seconds);
        double update = std::max(r.update, r.staged);
        tail = std::max(tail, update + r.publish);

        // Memory, at the first backward pass.
        LiveStages live = live_stages(layout, p.micro_batches, rank);
        bool halves = layout.pipeline == Pipeline::ZERO_BUBBLE;
        double later = (live.w - live.b + halves) * r.gradient_w;
        double flying = live.b * r.kept_b + live.w * r.kept_w + later;
        flying /= layout.chunks;
        bool away = leave && !here;
        double stay = away ? std::min(flying, r.block) : flying;
        double most = std::max(stay + r.passing, r.chunk);
        double bytes = r.lasting + most;
        double host = r.host + flying - stay;
        bound.host = std::max(bound.host, host);
        bound.of_rank.push_back(bytes);
        if (bytes <= bound.bytes) continue;
        bound.bytes = bytes;
        bound.fullest = rank;
    }
    bound.seconds += tail;
    return bound;
}

} // namespace llmc
