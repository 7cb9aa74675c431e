// planner.h - time and memory of any layout in closed form, thousands of them in a blink
//   t_r = F + B + R of a rank's layers, m micro-batches, v chunks, p stages of the pipeline
//     step     m max t_r + (sum t_r - max t_r) / v  + 2 v m messages  + data parallelism + update
//     chunks   m max t_r becomes a sum over turns, each F of one chunk and B of another on the
//              slowest rank: a long stage holds up all ranks in its turn
//     ZB-H1    fills 60% of that bubble, the middle term, with weight gradients
//     ZeRO     0, 1: a rank's sums hide behind its last backward pass. 2, 3: sums hide behind every
//              backward pass, in ZB-H1 behind every weight half. 3: a layer's weights arrive while
//              the layer before it runs.
//     frozen   layers that no gradient reaches run forward alone, keep nothing and have no sums
//     offload  masters and moments come and go beside updates, gradients beside backward passes
//   bytes      lasting data of the rank's buckets + live micro-batches x kept activations + the
//              peak that one layer needs while it runs
//   The simulator prices layers (cost.h), and the arena says their bytes (sizes.h). Each is asked
//   once for all layouts that share the answer. The closed form leaves out how actions wait for
//   each other, so the best few layouts are simulated and placed before anybody believes them.
//   test_planner says how far off the closed form is.
//   Cost: a microsecond a layout, some milliseconds for each new size of tp, ep or pipeline.
#pragma once
#include <numeric>
#include <utility>
#include "simulator.h"
#include "trainer.h"

namespace llmc {

// ----------------------------------------------------------------------------
// layers

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

// One layer's time and bytes for one micro-batch.
struct LayerEstimate {
    int kind = 0; // layers of one kind have one number

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
    // Bytes needed only while the layer runs.
    double passing = 0;

    double seconds() const { return forward + backward + redone; }
};

// The sum over one layer's buckets.
struct BucketEstimate {
    // Bytes that last for the whole run, bytes needed while the layer runs, those of a chunk that
    // comes to its update from another tier, and a gradient that is here only meanwhile.
    double lasting = 0;
    double passing = 0;
    double chunk = 0;
    double gradient = 0;

    // Seconds to reduce the gradients, to gather the weights, to update, and to move the gradients
    // to another tier or back.
    double reduce = 0;
    double gather = 0;
    double update = 0;
    double move = 0;
};

// Estimates that layouts share: those with equal keys share an entry.
typedef std::array<int, 10> EstimateKey;
typedef std::pair<int, std::vector<int>> StageSplit; // pp, and the first layers of all stages
template <typename T, typename S> struct Planner {
    Shape shape; // as with_logits() returns it
    CostModel cost;
    S where;
    std::map<EstimateKey, Model> models = {};                        // by tp, ep
    std::map<EstimateKey, std::vector<LayerEstimate>> layers = {};   // [layer]
    std::map<EstimateKey, std::vector<BucketEstimate>> buckets = {}; // [layer]
    std::map<StageSplit, std::vector<size_t>> kinds = {}; // [rank]: kinds_of_ranks()
};

// Return the model of a layout, made at most once for each tp and ep.
template <typename T, typename S>
const Model& model_of(Planner<T, S>& planner, const Layout& layout) {
    // Take the pieces of the layout's rank for all: no rank has larger ones.
    EstimateKey key = {layout.tp.size, layout.ep};
    auto found = planner.models.find(key);
    if (found == planner.models.end())
        found = planner.models.emplace(key, make_model(planner.shape, layout)).first;
    return found->second;
}

// Estimate one layer for one micro-batch.
template <typename T, typename S>
LayerEstimate estimate_layer(const Planner<T, S>& planner, const Plan& p, const Model& model,
                             int layer) {
    // Time: the head runs entirely in its backward pass.
    LayerEstimate e;
    const CostModel& c = planner.cost;
    auto seconds = [&](Op op) { return total_of(layer_seconds(c, p, model, {op, 0, layer})); };
    bool backward = layer >= lowest_trained(model);
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
    if (!block) return e;
    e.kept_b = bytes(Kind::KEPT_B);
    e.kept_w = bytes(Kind::KEPT_W) + bytes(Kind::STREAM);

    // A layer that no gradient reaches needs its rows only while it runs.
    if (!backward) {
        e.passing += std::exchange(e.kept_b, 0) + std::exchange(e.kept_w, 0);
        return e;
    }
    e.gradient_w = bytes(Kind::GRADIENT_W);
    for (Kind kind : {Kind::REDO_B, Kind::REDO_W, Kind::GRADIENT_B, Kind::GRADIENT_W})
        e.passing += bytes(kind);
    return e;
}

// Return the estimates of all layers, made at most once for each key. Layers of one kind share one.
template <typename T, typename S>
const std::vector<LayerEstimate>& layers_of(Planner<T, S>& planner, const Plan& p) {
    const Layout& l = p.layout;
    const Machine& machine = planner.cost.machine;

    // The sizes decide the bytes and the work; ranks in the same node decide the speed of messages.
    auto near = [&](auto axis) { return axis_in_node(l, machine, axis); };
    EstimateKey key = {l.tp.size, l.cp.size, int(l.cp_method), l.ep, l.sequence_parallel, int(p.B),
                       int(p.recompute.of(1)), near(&Layout::tp), near(&Layout::cp),
                       near(&Layout::dp)};
    auto [entry, fresh] = planner.layers.try_emplace(key);
    if (!fresh) return entry->second;

    // Estimate each kind once.
    const Model& model = model_of(planner, l);
    std::map<LayerKind, LayerEstimate> kinds;
    for (int layer = 0; layer < model.layers(); layer++) {
        auto [kind, unknown] = kinds.try_emplace(kind_of_layer(model, layer));
        if (unknown) {
            kind->second = estimate_layer(planner, p, model, layer);
            kind->second.kind = int(kinds.size());
        }
        entry->second.push_back(kind->second);
    }
    return entry->second;
}

// Estimate one layer's own buckets.
// A tied table counts for the embedding, and again for a head on another stage.
template <typename T, typename S>
BucketEstimate estimate_buckets(const Planner<T, S>& planner, const Plan& p, const Model& model,
                                int layer) {
    BucketEstimate e;
    const CostModel& c = planner.cost;
    int states = int(optimizer_row(p.optimizer).states.size());
    for (int b : buckets_of(model, layer)) {
        auto bytes = [&](Kind kind) {
            return double(data_bytes<T>(p, model, {kind, b}, planner.where));
        };

        // Count the weights, which frozen buckets have too.
        const Bucket& bucket = model.buckets[b];
        e.lasting += bytes(Kind::WEIGHT);
        if (p.layout.zero == 3) e.passing += bytes(Kind::GATHERED);
        BucketLinks links = bucket_links(p.layout, c.machine, bucket.group);
        if (p.layout.zero == 3 || bucket.trainable)
            e.gather += links.shard.all_gather(gathered_bytes(c, p, model, b));
        if (!bucket.trainable) continue;

        // Count what only trainable buckets have. A gradient that lies in another tier comes for
        // each micro-batch, and leaves again.
        bool disk = std::max(p.offload.optimizer, p.offload.gradients) == Tier::DISK;
        double rate = disk ? c.machine.disk_rate() : c.machine.host_rate();
        double moved = 0;
        if (is_here(p.offload.gradients, planner.where)) {
            e.lasting += bytes(Kind::GRAD);
            e.lasting += bucket.tied() ? bytes(Kind::GRAD_TIED) : 0;
        } else {
            e.gradient += bytes(Kind::GRAD_HERE);
            e.move += bytes(Kind::GRAD_HERE) / rate;
            moved = bytes(Kind::GRAD);
        }
        e.passing += p.layout.zero >= 2 ? bytes(Kind::PARTIAL) : 0;
        e.passing += bytes(Kind::SENT);
        e.reduce += reduce_seconds(c, p, model, b);

        // Masters and moments may lie in another tier: their chunks come and go, one at a time,
        // beside the updates.
        double optimizer = bytes(Kind::MASTER) + states * bytes(Kind::STATE) + bytes(Kind::EMA);
        double update = update_seconds(c, p, model, b);
        e.lasting += is_here(p.offload.optimizer, planner.where) ? optimizer : 0;
        if (p.offload.optimizer != Tier::DEVICE) {
            Data first = {Kind::STAGED, b, -1, 0};
            e.chunk = std::max(e.chunk, double(data_bytes<T>(p, model, first, planner.where)));
            update = std::max(update, (2 * optimizer + moved) / rate);
        }
        e.update += update;
    }
    return e;
}

// Return the estimates of all layers' buckets, made at most once for each key.
template <typename T, typename S>
const std::vector<BucketEstimate>& buckets_for(Planner<T, S>& planner, const Plan& p) {
    const Layout& l = p.layout;
    const Machine& machine = planner.cost.machine;
    // Buckets do not depend on micro-batches.
    EstimateKey key = {l.tp.size, l.ep, l.zero, l.zero_group, l.dp.size * l.cp.size,
                       axis_in_node(l, machine, &Layout::cp),
                       axis_in_node(l, machine, &Layout::dp), int(p.masters),
                       int(p.offload.optimizer), int(p.offload.gradients)};
    auto [entry, fresh] = planner.buckets.try_emplace(key);
    if (!fresh) return entry->second;

    // Estimate each kind of layer once.
    const Model& model = model_of(planner, l);
    std::map<LayerKind, BucketEstimate> kinds;
    for (int layer = 0; layer < model.layers(); layer++) {
        auto [kind, unknown] = kinds.try_emplace(kind_of_layer(model, layer));
        if (unknown) kind->second = estimate_buckets(planner, p, model, layer);
        entry->second.push_back(kind->second);
    }
    return entry->second;
}

// ----------------------------------------------------------------------------
// a rank, a pipeline

// The result for one layout.
struct Estimate {
    double seconds = 0; // of a step
    double bytes = 0;   // of the fullest rank
    int fullest = 0;    // its place in the pipeline
};

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
    if (layout.pipeline == Pipeline::INTERLEAVED)
        waits = std::min(all, 2.0 * (pp - rank - 1) + (v - 1) * pp + 1);
    if (layout.pipeline != Pipeline::ZERO_BUBBLE)
        return {waits, waits};
    return {v * waits, double(v * std::min(m, pp))};
}

// One rank's share of a micro-batch, and of the end of the step.
struct RankEstimate {
    double bytes = 0;  // all but kept activations
    double staged = 0; // chunks at their updates, when no activation is left

    // Bytes that a micro-batch in flight keeps, as LayerEstimate has them.
    double kept_b = 0;
    double kept_w = 0;
    double gradient_w = 0;

    // Seconds of a micro-batch: in total, its backward pass,
    // and the part of ZeRO-2's and 3's collectives that nothing hides.
    double seconds = 0;
    double backward = 0;
    double exposed = 0;
    // Seconds by chunk; empty if there is only one.
    std::vector<double> chunk_forward = {}, chunk_backward = {};

    // Seconds at the end of the step.
    double reduce = 0;
    double gather = 0;
    double update = 0;
};

// Return the seconds that a layer adds to a micro-batch because its collectives and moves take
// longer than the compute that hides them. Its weights arrive while the layer before it runs. Its
// gradient is summed beside the next backward pass or, if that is split, beside the next weight
// half. One that lies in another tier comes and goes beside backward passes; for the first
// micro-batch it need not come. This layer's times stand for its neighbours'.
inline double exposed_seconds(const Plan& p, const LayerEstimate& e, const BucketEstimate& b) {
    const Layout& layout = p.layout;
    double gather = layout.zero == 3 ? b.gather : 0;
    double reduce = layout.zero >= 2 ? b.reduce : 0;
    double backward = e.backward + e.redone;
    double forward = std::max(0.0, gather - e.forward);
    if (backward == 0) return forward; // no gradient comes so low
    double moves = (2 - 1.0 / p.micro_batches) * b.move;
    forward += std::max(0.0, moves - backward);
    if (layout.pipeline != Pipeline::ZERO_BUBBLE)
        return forward + std::max(0.0, gather + reduce - backward);
    return forward + std::max(0.0, gather - (backward - e.weights)) +
           std::max(0.0, reduce - e.weights);
}

// Ranks whose stages have layers of the same kinds are of one kind: return each rank's.
// Kinds are numbered in the order of the ranks.
inline std::vector<size_t> kinds_of_ranks(const Layout& layout, const Model& model) {
    // Describe a rank by the kinds of its stages' layers.
    typedef std::vector<std::vector<LayerKind>> Stages;
    std::map<Stages, size_t> known;
    std::vector<size_t> kinds;
    for (int rank = 0; rank < layout.pp.size; rank++) {
        Stages stages;
        for (int stage = rank; stage < layout.stages(); stage += layout.pp.size) {
            std::vector<LayerKind>& layers = stages.emplace_back();
            int to = first_layer(layout, model, stage + 1);
            for (int l = first_layer(layout, model, stage); l < to; l++)
                layers.push_back(kind_of_layer(model, l));
        }

        // Number a kind that is new.
        auto entry = known.insert({stages, known.size()}).first;
        kinds.push_back(entry->second);
    }
    return kinds;
}

// Estimate a pipeline rank: its bytes, and its seconds.
inline RankEstimate estimate_rank(const Plan& p, const Model& model,
                                  const std::vector<LayerEstimate>& layers,
                                  const std::vector<BucketEstimate>& buckets, int rank) {
    const Layout& layout = p.layout;
    RankEstimate r;
    double passing = 0;
    double next = 0;     // bytes of another layer's buckets
    double gradient = 0; // of a block, if gradients come and go

    // Add up the layers of its stages.
    for (int stage = rank; stage < layout.stages(); stage += layout.pp.size) {
        int from = first_layer(layout, model, stage);
        int to = first_layer(layout, model, stage + 1);
        double forward_here = 0;
        double backward_here = 0;
        for (int l = from, n = 0; l < to; l += n) {
            // Take alike layers at once.
            const LayerEstimate& e = layers[size_t(l)];
            n = 1;
            while (l + n < to && layers[size_t(l + n)].kind == e.kind)
                n++;
            const BucketEstimate& b = buckets[size_t(l)];
            double backward = n * (e.backward + e.redone);
            r.seconds += n * e.seconds();
            r.backward += backward;

            // A tied head on the embedding's rank uses the table that is there already.
            bool tied_here = l == model.head() && model.shape.tied && rank == 0;
            double once = tied_here ? 0 : n;
            r.bytes += once * b.lasting;
            r.reduce += once * b.reduce;
            r.gather += once * b.gather;
            r.update += once * b.update;

            // Add what a micro-batch in flight keeps, and take the peak of what one layer needs.
            r.kept_b += n * e.kept_b;
            r.kept_w += n * e.kept_w;
            r.gradient_w += n * e.gradient_w;
            passing = std::max(passing, e.passing + b.passing + b.gradient);
            next = std::max(next, b.passing);
            if (model.is_block(l)) gradient = std::max(gradient, b.gradient);
            r.staged = std::max(r.staged, (layout.prefetch + 2) * b.chunk);
            r.exposed += n * exposed_seconds(p, e, b);
            forward_here += n * e.forward;
            backward_here += backward;
        }

        if (layout.chunks == 1) continue;
        r.chunk_forward.push_back(forward_here);
        r.chunk_backward.push_back(backward_here);
    }

    // Add the next layer's weights, which ZeRO-3 also holds, or the last one's gradient, in ZeRO-2.
    // Of gradients in another tier one arrives and one leaves meanwhile.
    if (layout.zero >= 2) passing += next;
    passing += 2 * gradient;
    r.bytes += passing;
    r.staged -= passing;
    return r;
}

// Estimate a layout's step, and its fullest rank, by a plan without actions. Its layout must have
// been split into stages.
template <typename T, typename S>
Estimate estimate_layout(Planner<T, S>& planner, const Plan& p) {
    // Look up the prices of layers and buckets.
    const Layout& layout = p.layout;
    Estimate e;
    const Model& model = model_of(planner, layout);
    const std::vector<LayerEstimate>& layers = layers_of(planner, p);
    const std::vector<BucketEstimate>& buckets = buckets_for(planner, p);

    // Seconds of a micro-batch over ranks: the sum, and the slowest.
    double sum = 0;
    double most = 0;
    std::vector<double> turns(size_t(layout.chunks)); // each turn's slowest rank
    double tail = 0; // seconds of the step behind the last micro-batch
    int m = p.micro_batches;
    int pp = layout.pp.size;
    int v = layout.chunks;

    // Estimate each kind of rank once.
    auto [kinds, fresh] = planner.kinds.try_emplace({pp, layout.first_layer});
    if (fresh) kinds->second = kinds_of_ranks(layout, model);
    std::vector<RankEstimate> known;

    // The slowest rank sets the pace. Collectives that nothing hides come on top.
    for (int rank = 0; rank < pp; rank++) {
        size_t kind = kinds->second[size_t(rank)];
        if (kind == known.size())
            known.push_back(estimate_rank(p, model, layers, buckets, rank));
        const RankEstimate& r = known[kind];
        double seconds = r.seconds + r.exposed;

        // ZeRO 0 and 1 sum once a step, behind the last backward pass;
        // at least 1/32 of it stays visible.
        double sums = std::max(r.reduce - r.backward, r.reduce / 32);
        if (layout.zero >= 2) sums = 0;
        double publish = layout.zero == 1 || layout.zero == 2 ? r.gather : 0;

        // Keep the slowest and the fullest rank.
        sum += seconds;
        most = std::max(most, seconds);
        for (int i = 0; v > 1 && i < v; i++) {
            double turn = r.chunk_forward[v - 1 - i] + r.chunk_backward[i] + r.exposed / v;
            turns[i] = std::max(turns[i], turn);
        }
        tail = std::max(tail, sums + publish + r.update);

        // Activations of all micro-batches in flight tell ranks of one kind apart.
        LiveStages live = live_stages(layout, m, rank);
        double kept = live.b * r.kept_b + live.w * r.kept_w + (live.w - live.b) * r.gradient_w;
        double bytes = r.bytes + std::max(kept / v, r.staged);
        if (bytes > e.bytes) e.fullest = rank;
        e.bytes = std::max(e.bytes, bytes);
    }

    // Each stage waits for one message in and one back.
    Action exchange = {Op::SENDRECV};
    exchange.transfers.resize(1);
    double message = pp > 1 ? exchange_seconds(planner.cost, p, model, exchange) : 0;
    double bubble = (sum - most) / v;
    if (layout.pipeline == Pipeline::ZERO_BUBBLE) bubble *= 0.4;
    double messages = 2 * message * (double(v) * m + pp - 1);
    double pace = v > 1 ? std::accumulate(turns.begin(), turns.end(), 0.0) : most;
    e.seconds = m * pace + bubble + messages + tail;
    return e;
}

} // namespace llmc
