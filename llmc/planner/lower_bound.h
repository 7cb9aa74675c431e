// lower_bound.h - the least time and memory of a layout, by sums: the order of the search
//   m micro-batches; F, B, R of a rank's layers, with the messages inside them. A rank's layers,
//   its collectives and its moves between tiers each have a queue, and the queues run at once:
//     busy   max(m (F + B + R), m (gathers + reduces), m moves), and the contention of both
//     step   max over ranks of (F of the stages before its first one + busy + their B) + update;
//            the same of its last chunks alone; ZB-H1 hides their B behind weight halves
//     bytes  lasting data + micro-batches in flight x kept activations + what the first backward
//            pass needs while it runs
//   All seconds are those of actions (cost.h), all bytes those of data (sizes.h). How actions wait
//   for each other, and the holes between data, are left out: only the simulator and the arena know
//   them. test_planner says how far below these the sums are.
//   Cost: a microsecond a layout; prices are asked once for all layouts that share them.
#pragma once
#include <map>
#include "../action.h"
#include "../ops/types.h"
#include "../optimizer.h"
#include "../arena.h"
#include "../family.h"
#include "../io/machine.h"
#include "../io/plan_flags.h"
#include "../layout.h"
#include "../model.h"
#include "../offload.h"
#include "../ops/linear.cuh"
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
    return {end,
            is_sparse(model.shape, layer),
            end ? 0 : window_of(model.shape, layer),
            trains,
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

// The price of a layer, of its buckets, or of all layers of a rank.
struct Price {
    // Seconds of a micro-batch: both passes; collectives of weights and gradients, and their moves
    // from and to another tier.
    double forward = 0, backward = 0;
    double gather = 0, reduce = 0;
    double fetch = 0, move = 0;
    // Seconds at the end of a step: the update, its moves, and publishing.
    double update = 0, staged = 0, publish = 0;
    // Bytes for the whole run, where the step runs and in the host's memory; bytes kept until the
    // input half of the backward pass, and until its weight half.
    double lasting = 0, host = 0, kept_b = 0, kept_w = 0;
    // Bytes while a layer runs; of one block's kept activations; of an update's chunk.
    double passing = 0, block = 0, chunk = 0;

    void add(const Price& x) {
        for (double Price::*sum :
             {&Price::forward, &Price::backward, &Price::gather, &Price::reduce,
              &Price::fetch, &Price::move, &Price::update, &Price::staged, &Price::publish,
              &Price::lasting, &Price::host, &Price::kept_b, &Price::kept_w, &Price::passing})
            this->*sum += x.*sum;
        block = std::max(block, x.block);
        chunk = std::max(chunk, x.chunk);
    }
};

// The prices of a model on a machine, of each kind of layer. Layouts with equal keys share them.
typedef std::array<int, 13> PriceKey;
template <typename T, typename S> struct Prices {
    Shape shape; // as with_logits() returns it
    CostModel cost;
    S where;
    LayerKinds kinds = kinds_of_layers(make_model(shape));
    std::map<PriceKey, Model> models = {};               // by tp, ep, whole experts
    std::map<PriceKey, std::vector<Price>> layers = {};  // [kind]
    std::map<PriceKey, std::vector<Price>> buckets = {}; // [kind]
    std::map<int, std::vector<int>> stages = {};         // [stages]: first layers
};

// Return the model of a layout. Its pieces are those of the layout's rank: none has larger ones.
template <typename T, typename S>
const Model& model_of(Prices<T, S>& prices, const Layout& layout) {
    PriceKey key = {layout.tp.size, layout.ep, layout.experts.whole};
    auto [entry, fresh] = prices.models.try_emplace(key);
    if (fresh) entry->second = make_model(prices.shape, layout);
    return entry->second;
}

// Split the layers of a layout into its stages, at most once for each number of them.
template <typename T, typename S>
void split_stages(Prices<T, S>& prices, Layout& layout) {
    int count = layout.stages();
    auto [stages, fresh] = prices.stages.try_emplace(count);
    if (fresh && count > 1)
        stages->second = choose_stages(prices.shape, count);
    layout.first_layer = stages->second;
}

// Return the price of a layer's passes. The head runs entirely in its backward pass.
template <typename T, typename S>
Price price_layer(const Prices<T, S>& prices, const Plan& p, const Model& model, int layer) {
    using enum Kind;
    auto seconds = [&](Op op) {
        return total_of(layer_seconds(prices.cost, p, model, {op, 0, layer}));
    };
    auto bytes = [&](Kind kind) {
        return double(data_bytes<T>(p, model, {kind, layer}, prices.where));
    };
    bool trains = p.mode == Mode::TRAIN;
    bool backward = trains && layer >= lowest_trained(model);
    bool block = model.is_block(layer);
    Price e;
    e.forward = seconds(Op::F);
    e.backward = backward ? seconds(Op::B) : 0;
    e.passing = bytes(SCRATCH) + 2 * bytes(DSTREAM);
    if (!block || !backward) return e;

    // A block's input stays until its backward pass.
    if (p.recompute.of(layer) != Recompute::NONE)
        e.backward += seconds(Op::R);
    e.kept_b = bytes(KEPT_B);
    e.kept_w = bytes(KEPT_W) + bytes(STREAM);
    e.block = e.kept_b + e.kept_w;
    for (Kind kind : {REDO_B, REDO_W, GRADIENT_B, GRADIENT_W})
        e.passing += bytes(kind);
    return e;
}

// Return the price of one layer's own buckets. A tied table counts for the embedding, and again for
// a head on another stage.
template <typename T, typename S>
Price price_buckets(const Prices<T, S>& prices, const Plan& p, const Model& model, int layer) {
    using enum Op;
    using enum Kind;
    Price e;
    CostModel c = prices.cost;
    c.bytes = [&](const Plan& p, Data d) {
        return data_bytes<T>(p, model, d, prices.where);
    };
    bool trains = p.mode == Mode::TRAIN;
    bool backward = trains && layer >= lowest_trained(model);
    bool twice = backward && model.is_block(layer);
    double uses = twice ? 2 : 1; // of its weights, by a micro-batch
    for (int b : buckets_of(model, layer)) {
        auto bytes = [&](Kind kind, int chunk = -1) {
            return double(c.bytes(p, {kind, b, -1, chunk}));
        };
        auto seconds = [&](Op op, int chunk = -1, Kind kind = WEIGHT) {
            Action a = {op, -1, -1, b, false, {}, chunk};
            a.kind = kind;
            return total_of(action_seconds(c, p, model, a));
        };
        auto keep = [&](Kind kind, double times = 1) {
            Tier tier = tier_of(p, {kind, b});
            if (is_here(tier, prices.where))
                e.lasting += times * bytes(kind);
            else if (tier == Tier::HOST)
                e.host += times * bytes(kind);
        };

        // Weights, of frozen buckets too. Those that are cut or lie in another tier come for a use.
        const Bucket& bucket = model.buckets[b];
        bool away = p.layout.offload.weights;
        bool cut = is_sharded(p.layout, model, {WEIGHT, b});
        keep(WEIGHT);
        if (cut) e.gather += uses * seconds(GATHER);
        if (away) e.fetch += uses * seconds(FETCH);
        if (cut || away) e.passing += bytes(GATHERED);
        bool casts = keeps_casts(p, model);
        int end = bucket.first + bucket.count;
        for (int i = bucket.first; casts && i < end; i++) {
            const Parameter& w = model.parameters[i];
            if (w.matrix >= 0)
                e.lasting += fp8_cast_bytes(w.local_rows(), w.local_cols(), model.shape.fp8.kind);
        }
        if (!bucket.trainable || !trains) continue;

        // Gradients. One in another tier comes for each micro-batch, and leaves again.
        keep(GRAD);
        if (bucket.tied()) keep(GRAD_TIED);
        bool leaves = p.layout.offload.gradients;
        e.move += leaves ? seconds(PARK, -1, GRAD) : 0;
        e.passing += leaves ? bytes(GRAD) : 0;
        if (p.layout.zero >= 2)
            e.passing += bytes(PARTIAL);
        e.reduce += seconds(REDUCE);

        // The optimizer, and its update: data of another tier than its own come and go by chunks.
        keep(MASTER);
        size_t states = optimizer_row(p.optimizer).states.size();
        keep(STATE, model.muon ? 1 : double(states));
        keep(EMA);
        if (is_published(p.layout, bucket))
            e.publish += seconds(PUBLISH);
        e.update += seconds(UPDATE);
        double elements = double(updated_range(p.layout, model, b).count);
        if (!p.offload.cuts_updates() || elements == 0) continue;
        double of_chunk = std::min(elements, double(p.offload.chunk));
        double chunks = elements / of_chunk;
        double both_ways = seconds(FETCH, 0) + seconds(PARK, 0);
        if (has_muon_matrices(p.layout, model, b))
            for (Op op : {FETCH, PARK})
                both_ways += seconds(op, 0, MOMENTUM);
        e.staged += chunks * both_ways;
        if (is_here(p.offload.update, prices.where))
            e.chunk = std::max(e.chunk, bytes(STAGED, 0));
    }
    return e;
}

// Return the prices of all kinds of layers, made at most once for each key.
template <typename T, typename S>
const std::vector<Price>& layer_prices(Prices<T, S>& prices, const Plan& p) {
    const Layout& l = p.layout;
    const Model& model = model_of(prices, l);
    const Machine& machine = prices.cost.machine;

    // The sizes decide the bytes and the work; ranks in the same node decide the speed of messages.
    // Micro-batches share the casts of weights that are kept.
    auto near = [&](auto axis) { return axis_in_node(l, machine, axis); };
    int kept = keeps_casts(p, model) ? p.micro_batches : 0;
    int peers = machine.jitter > 0 ? l.world() / l.pp.size : 0; // they wait for the slowest
    PriceKey key = {l.tp.size, l.cp.size, int(l.context.method),
                    l.ep, l.experts.whole, l.sequence_parallel,
                    int(p.B), int(p.recompute.of(1)),
                    near(&Layout::tp), near(&Layout::cp), near(&Layout::dp),
                    kept, peers};
    auto [entry, fresh] = prices.layers.try_emplace(key);
    if (!fresh) return entry->second;
    for (int layer : prices.kinds.first)
        entry->second.push_back(price_layer(prices, p, model, layer));
    return entry->second;
}

// Return the prices of all kinds of layers' buckets. They do not depend on micro-batches.
template <typename T, typename S>
const std::vector<Price>& bucket_prices(Prices<T, S>& prices, const Plan& p) {
    const Layout& l = p.layout;
    const Model& model = model_of(prices, l);
    const Machine& machine = prices.cost.machine;
    PriceKey key = {l.tp.size, l.ep, l.experts.whole,
                    l.zero, l.zero_group, l.weights_near,
                    l.dp.size * l.cp.size,
                    ranks_in_node(l, machine, Group::DATA),
                    ranks_in_node(l, machine, Group::EXPERTS),
                    int(p.masters),
                    int(p.offload.optimizer),
                    int(p.offload.gradients),
                    int(p.offload.weights)};
    auto [entry, fresh] = prices.buckets.try_emplace(key);
    if (!fresh) return entry->second;
    for (int layer : prices.kinds.first)
        entry->second.push_back(price_buckets(prices, p, model, layer));
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
};

// How many stages have live activations on a pipeline rank, waiting for the input half (b) and for
// the weight half (w) of their backward passes: the table in pipeline.h. A chunk is a stage.
struct LiveStages { double b, w; };
inline LiveStages live_stages(const Layout& layout, int micro_batches, int rank) {
    int pp = layout.pp.size;
    int v = layout.chunks;
    int m = micro_batches;
    double waits = std::min(m, pp - rank);
    if (layout.pipeline == Pipeline::ZERO_BUBBLE)
        return {waits, double(std::min(m, pp))};
    if (layout.pipeline == Pipeline::INTERLEAVED) {
        // Groups are larger where pp does not divide the micro-batches, as in schedule_of().
        int groups = std::max(1, m / pp);
        int largest = int(ceil_div(m, groups));
        double warmup = 2.0 * (pp - rank - 1) + (v - 1) * largest + 1;
        waits = std::min(double(m) * v, warmup);
    }
    return {waits, waits};
}

// A rank's sums, and the seconds of both passes of the stages before its first one; the most of its
// last chunks and the stages before these.
struct RankSums {
    Price all;
    double fill = 0, drain = 0, chunks = 0;
    double gradients = 0; // seconds of their moves in all micro-batches
    double leaving = 0;   // bytes of a micro-batch's activations that may leave
};

// Add up each rank's layers.
template <typename T, typename S>
std::vector<RankSums> rank_sums(Prices<T, S>& prices, const Plan& p) {
    const Layout& layout = p.layout;
    const Model& model = model_of(prices, layout);
    const std::vector<Price>& layers = layer_prices(prices, p);
    const std::vector<Price>& buckets = bucket_prices(prices, p);
    int pp = layout.pp.size;
    bool halves = layout.pipeline == Pipeline::ZERO_BUBBLE;
    double message = pp > 1 ? stage_seconds(prices.cost, p, model, 1) : 0;
    double fill = 0, drain = 0;
    std::vector<RankSums> ranks;
    ranks.resize(size_t(pp));
    std::vector<std::array<double, 2>> stages; // seconds before it; its own
    for (int stage = 0; stage < layout.stages(); stage++) {
        RankSums& r = ranks[size_t(stage % pp)];
        if (stage < pp) r.fill = fill;
        if (stage < pp) r.drain = halves ? 0 : drain;
        Price block;
        stages.push_back({fill + drain, -r.all.forward - r.all.backward});
        fill += message;
        drain += p.mode == Mode::TRAIN ? message : 0;
        int begin = first_layer_of(layout, model, stage);
        int end = first_layer_of(layout, model, stage + 1);

        // A chunk of few layers keeps its gradients from one micro-batch to the next (offload.h),
        // in an interleaved pipeline as long as a group of them lasts.
        int groups = layout.pipeline == Pipeline::INTERLEAVED ? p.micro_batches / pp : 1;
        bool stay = end - begin <= 2 * layout.prefetch + 1;
        int uses = stay ? std::max(1, groups) : p.micro_batches;
        for (int l = begin; l < end; l++) {
            // A tied head on the embedding's rank uses the table that is there already.
            size_t kind = prices.kinds.of[size_t(l)];
            Price one = layers[kind];
            bool tied = l == model.head() && model.shape.embedding.tied;
            bool tied_here = tied && stage % pp == 0;
            if (!tied_here) one.add(buckets[kind]);
            r.all.add(one);
            r.gradients += (2 * uses - 1) * one.move;
            // Blocks next to the head need their activations again at once.
            if (l + layout.prefetch < model.head())
                r.leaving += one.kept_b + one.kept_w;
            r.all.passing = one.passing; // the last layer's
            fill += one.forward;
            drain += one.backward;
            if (model.is_block(l)) block = one;
        }

        // The last block's passes follow each other: it keeps its weights.
        stages.back()[1] += r.all.forward + r.all.backward;
        r.all.gather -= block.gather;
        r.all.fetch -= block.fetch;
    }

    // Few micro-batches leave a rank idle between its chunks: go back from the last stage. Without
    // backward passes a micro-batch leaves the last chunk before the next one comes.
    std::vector<double> later(size_t(pp), 0.0), ends(size_t(pp), 0.0);
    for (int stage = layout.stages() - 1; layout.chunks > 1 && stage >= 0; stage--) {
        size_t rank = size_t(stage % pp);
        auto [before, own] = stages[size_t(stage)];
        ends[rank] = std::max(ends[rank], before + own);
        later[rank] += p.micro_batches * own;
        double turns = p.micro_batches * (ends[rank] - before);
        double passes = p.mode == Mode::TRAIN ? later[rank] : turns;
        ranks[rank].chunks = std::max(ranks[rank].chunks, before + passes);
    }
    return ranks;
}

// Return the least time and memory of a plan without actions.
template <typename T, typename S>
Bound bound_of_plan(Prices<T, S>& prices, const Plan& p) {
    const Layout& layout = p.layout;
    const Machine& machine = prices.cost.machine;
    bool leave = p.offload.activations != Tier::DEVICE;
    bool away = leave && !is_here(p.offload.activations, prices.where);
    bool each = layout.zero >= 2; // sums of every micro-batch, else of the last one
    double m = p.micro_batches;
    std::vector<RankSums> ranks = rank_sums(prices, p);
    Bound bound;
    double tail = 0;
    for (int rank = 0; rank < layout.pp.size; rank++) {
        // Find the longest of the queues.
        const auto& [r, fill, drain, chunks, gradients, leaving] = ranks[size_t(rank)];
        double rate = tier_rate(machine, p.offload.activations);
        double kept = leave ? 2 * leaving / rate : 0; // out and back
        double computing = m * (r.forward + r.backward);
        double reduce = each ? r.reduce : 0;
        double collectives = m * (r.gather + reduce);
        double moves = m * (r.fetch + kept) + gradients;
        double busy = std::max({computing, collectives, moves});
        busy += machine.contention * std::min(computing, collectives);

        // Sums once a step hide behind the last gradient on its way down. Updates run behind the
        // last sum of all ranks.
        double sums = each ? 0 : std::max(0.0, r.reduce - r.backward);
        double queues = fill + busy + std::max(drain, sums);
        double seconds = std::max(chunks, queues);
        bound.seconds = std::max(bound.seconds, seconds);
        double end = std::max(r.update, r.staged) + r.publish;
        tail = std::max(tail, end);

        // Count memory at the first backward pass.
        LiveStages live = live_stages(layout, p.micro_batches, rank);
        double of_chunks = live.b * r.kept_b + live.w * r.kept_w;
        double flying = of_chunks / layout.chunks;
        double stay = away ? std::min(flying, r.block) : flying;
        double passing = std::max(stay + r.passing, r.chunk);
        double bytes = r.lasting + passing;
        bound.host = std::max(bound.host, r.host + flying - stay);
        if (bytes <= bound.bytes) continue;
        bound.bytes = bytes;
        bound.fullest = rank;
    }
    bound.seconds += tail;
    return bound;
}

} // namespace llmc
