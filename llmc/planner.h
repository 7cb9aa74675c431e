// planner.h - time and memory of any layout in closed form, thousands of them in a blink
//   t_r = F + B + R of a rank's layers, m micro-batches, v chunks, p stages of the pipeline
//     step     m max t_r + (sum t_r - max t_r) / v  + 2 v m messages  + data parallelism + update
//     chunks   m max t_r becomes the sum over a rank's turns, F of one chunk and B of another, of
//              the slowest rank's: a long stage holds up all ranks in its turn
//     ZB-H1    fills two thirds of that bubble with weight gradients
//     ZeRO     0, 1: a rank's sums hide behind its last backward pass; 2, 3: behind every one, and
//              ZB-H1's behind its weight halves; the last of a stage holds up the message behind it
//              3: a layer's weights come while the layer before it runs
//   bytes      lasting data of the rank's buckets + live micro-batches x kept activations + the
//              most that one layer needs while it runs
//   The prices of a layer are the simulator's (cost.h), its bytes are the arena's (sizes.h); both
//   are asked once for all layouts that share them. What is left out is how actions meet: so the
//   best few are simulated and placed before anybody believes them. test_planner says how far off
//   the closed form is.
//   Cost: a microsecond a layout, some milliseconds for each new size of tp, ep or pipeline.
#pragma once
#include <numeric>
#include "simulator.h"
#include "trainer.h"

namespace llmc {

// ----------------------------------------------------------------------------
// layers

// A layer for a micro-batch.
struct LayerEstimate {
    // Seconds.
    double forward = 0;
    double backward = 0;
    double redone = 0;
    double weights = 0; // the backward pass's weight half, where the two run apart

    // Bytes that wait for the input half of its backward pass, and for the weight half.
    double kept_b = 0;
    double kept_w = 0;
    // Bytes that the input half leaves to the weight half.
    double gradient_w = 0;
    // Bytes that it needs while it runs.
    double passing = 0;

    double seconds() const { return forward + backward + redone; }
};

// A layer's buckets.
struct BucketEstimate {
    // Bytes for the whole run, and while the layer runs.
    double lasting = 0;
    double passing = 0;

    // Seconds of a gradient's sum, of a gather of weights, and of the update.
    double reduce = 0;
    double gather = 0;
    double update = 0;
};

// Estimates that layouts share: those that agree in the numbers of a key.
template <typename T, typename S> struct Planner {
    Shape shape; // with_logits()
    CostModel cost;
    S where;
    std::map<std::vector<int>, Model> models;                        // by tp, ep
    std::map<std::vector<int>, std::vector<LayerEstimate>> layers;   // [layer]
    std::map<std::vector<int>, std::vector<BucketEstimate>> buckets; // [layer]
};

template <typename T, typename S>
const Model& model_of(Planner<T, S>& planner, const Layout& layout) {
    // Rank 0's pieces are as large as anybody's.
    std::vector<int> key = {layout.tp.size, layout.ep};
    auto found = planner.models.find(key);
    if (found == planner.models.end())
        found = planner.models.emplace(key, make_model(planner.shape, layout)).first;
    return found->second;
}

template <typename T, typename S>
LayerEstimate estimate_layer(const Planner<T, S>& planner, const Plan& p, const Model& model,
                             int layer) {
    // Time: a head runs in its backward pass alone.
    LayerEstimate e;
    const CostModel& c = planner.cost;
    auto seconds = [&](Op op) { return total_of(layer_seconds(c, p, model, {op, 0, layer})); };
    bool redoes = model.is_block(layer) && p.recompute.of(layer) != Recompute::NONE;
    e.forward = seconds(Op::F);
    e.backward = seconds(Op::B);
    e.redone = redoes ? seconds(Op::R) : 0;
    e.weights = model.is_block(layer) ? seconds(Op::W) : 0;

    // Memory: the stream into a layer stays until its backward pass.
    auto bytes = [&](Kind kind) {
        return double(data_bytes<T>(p, model, {kind, layer}, planner.where));
    };
    e.passing = bytes(Kind::SCRATCH) + 2 * bytes(Kind::DSTREAM);
    if (!model.is_block(layer)) return e;
    e.kept_b = bytes(Kind::KEPT_B);
    e.kept_w = bytes(Kind::KEPT_W) + bytes(Kind::STREAM);
    e.gradient_w = bytes(Kind::GRADIENT_W);
    for (Kind kind : {Kind::REDO_B, Kind::REDO_W, Kind::GRADIENT_B, Kind::GRADIENT_W})
        e.passing += bytes(kind);
    return e;
}

// All layers' estimates. Layers of one kind are alike: with or without experts, and by window.
template <typename T, typename S>
const std::vector<LayerEstimate>& layers_of(Planner<T, S>& planner, const Plan& p) {
    const Layout& l = p.layout;
    const Machine& machine = planner.cost.machine;
    // Sizes say the bytes and the work, neighbours in a node the messages.
    std::vector<int> key = {l.tp.size, l.cp.size, l.ep, l.sequence_parallel, int(p.B)};
    key.push_back(int(p.recompute.of(1)));
    for (auto axis : {&Layout::tp, &Layout::cp, &Layout::dp})
        key.push_back(axis_in_node(l, machine, axis));
    auto [entry, fresh] = planner.layers.insert({key, {}});
    if (!fresh) return entry->second;

    // Ask once for each kind of block, and for both ends.
    const Model& model = model_of(planner, l);
    std::map<std::pair<bool, size_t>, LayerEstimate> kinds;
    for (int layer = 0; layer < model.layers(); layer++) {
        if (!model.is_block(layer)) {
            entry->second.push_back(estimate_layer(planner, p, model, layer));
            continue;
        }
        std::pair<bool, size_t> kind = {is_sparse(model.shape, layer),
                                        window_of(model.shape, layer)};
        if (!kinds.count(kind)) kinds[kind] = estimate_layer(planner, p, model, layer);
        entry->second.push_back(kinds[kind]);
    }
    return entry->second;
}

// A layer's own buckets; a tied table counts to the embedding, and to a head on another stage.
template <typename T, typename S>
BucketEstimate estimate_buckets(const Planner<T, S>& planner, const Plan& p, const Model& model,
                                int layer) {
    // A frozen bucket has weights alone.
    BucketEstimate e;
    const CostModel& c = planner.cost;
    int states = int(optimizer_row(p.optimizer).states.size());
    for (int b : buckets_of(model, layer)) {
        auto bytes = [&](Kind kind) {
            return double(data_bytes<T>(p, model, {kind, b}, planner.where));
        };
        const Bucket& bucket = model.buckets[b];
        e.lasting += bytes(Kind::WEIGHT);
        if (p.layout.zero == 3) e.passing += bytes(Kind::GATHERED);
        BucketLinks links = bucket_links(p.layout, c.machine, bucket.group);
        e.gather += links.shard.all_gather(double(whole_elements(p.layout, bucket)) * c.element);
        if (!bucket.trainable) continue;

        // Frozen buckets have nothing of these.
        e.lasting += bytes(Kind::GRAD) + bytes(Kind::MASTER) + states * bytes(Kind::STATE);
        e.lasting += bucket.tied() ? bytes(Kind::GRAD_TIED) : 0;
        e.passing += p.layout.zero >= 2 ? bytes(Kind::PARTIAL) : 0;
        e.passing += bytes(Kind::SENT);
        e.reduce += reduce_seconds(c, p, model, b);
        e.update += update_seconds(c, p, model, b);
    }
    return e;
}

template <typename T, typename S>
const std::vector<BucketEstimate>& buckets_for(Planner<T, S>& planner, const Plan& p) {
    const Layout& l = p.layout;
    const Machine& machine = planner.cost.machine;
    // Buckets know nothing of micro-batches.
    std::vector<int> key = {l.tp.size, l.ep, l.zero, l.zero_group, l.dp.size * l.cp.size};
    for (auto axis : {&Layout::cp, &Layout::dp})
        key.push_back(axis_in_node(l, machine, axis));
    auto [entry, fresh] = planner.buckets.insert({key, {}});
    if (!fresh) return entry->second;

    // Blocks with experts differ from others in their buckets.
    const Model& model = model_of(planner, l);
    std::map<int, BucketEstimate> kinds; // 0: a block without experts
    for (int layer = 0; layer < model.layers(); layer++) {
        bool block = model.is_block(layer);
        int kind = block ? is_sparse(model.shape, layer) : 2 + layer;
        if (!kinds.count(kind)) kinds[kind] = estimate_buckets(planner, p, model, layer);
        entry->second.push_back(kinds[kind]);
    }
    return entry->second;
}

// ----------------------------------------------------------------------------
// a rank, a pipeline

struct Estimate {
    double seconds = 0; // of a step
    double bytes = 0;   // of the fullest rank
    int fullest = 0;    // its place in the pipeline
};

// Stages whose activations live at once on a pipeline rank, before the input half and before the
// weight half of their backward passes (pipeline.h's table).
struct LiveStages { double b, w; };
inline LiveStages live_stages(const Layout& layout, int micro_batches, int rank) {
    // A chunk is a stage: of 1F1B a rank has one.
    int pp = layout.pp.size;
    int v = layout.chunks;
    int m = micro_batches;
    double all = double(m) * v;
    double waits = std::min(m, pp - rank);
    if (layout.pipeline == Pipeline::GPIPE) return {all, all};
    if (layout.pipeline == Pipeline::INTERLEAVED)
        waits = std::min(all, 2.0 * (pp - rank - 1) + (v - 1) * pp + 1);
    if (layout.pipeline != Pipeline::ZERO_BUBBLE) return {waits, waits};
    return {v * waits, double(v * std::min(m, pp))};
}

// A rank's part of a micro-batch, and of a step's end.
struct RankEstimate {
    double bytes = 0;

    // Seconds of a micro-batch: all of it, its backward pass, and what ZeRO-2 and 3 do not hide.
    double seconds = 0;
    double backward = 0;
    double exposed = 0;
    // A stage's last sum, behind which messages wait.
    double delay = 0;
    // The same by chunk.
    std::vector<double> chunk_forward = {}, chunk_backward = {};

    // Seconds of the step's end.
    double reduce = 0;
    double gather = 0;
    double update = 0;
};

// Seconds that a layer adds to a micro-batch because its weights or its gradient's sum take longer
// than what they hide behind: weights come while the layer before runs, sums run beside the next
// backward pass, or where that is split beside the next weight half.
inline double exposed_seconds(const Layout& layout, const LayerEstimate& e,
                              const BucketEstimate& b) {
    double gather = layout.zero == 3 ? b.gather : 0;
    double reduce = layout.zero >= 2 ? b.reduce : 0;
    double backward = e.backward + e.redone;
    double forward = std::max(0.0, gather - e.forward);
    if (layout.pipeline != Pipeline::ZERO_BUBBLE)
        return forward + std::max(0.0, gather + reduce - backward);
    return forward + std::max(0.0, gather - (backward - e.weights)) +
           std::max(0.0, reduce - e.weights);
}

inline RankEstimate estimate_rank(const Plan& p, const Model& model,
                                  const std::vector<LayerEstimate>& layers,
                                  const std::vector<BucketEstimate>& buckets, int rank) {
    const Layout& layout = p.layout;
    LiveStages live = live_stages(layout, p.micro_batches, rank);
    RankEstimate r;
    double kept = 0;
    double passing = 0;
    double next = 0; // of another layer's buckets

    // Add up the layers of its stages.
    for (int stage = rank; stage < layout.stages(); stage += layout.pp.size) {
        int from = first_layer(layout, model, stage);
        int to = first_layer(layout, model, stage + 1);
        double forward_here = 0;
        double backward_here = 0;
        for (int l = from; l < to; l++) {
            const LayerEstimate& e = layers[size_t(l)];
            const BucketEstimate& b = buckets[size_t(l)];
            double backward = e.backward + e.redone;
            r.seconds += e.seconds();
            r.backward += backward;

            // A head on the embedding's rank has its table already.
            bool tied_here = l == model.head() && model.shape.tied && rank == 0;
            double once = tied_here ? 0 : 1;
            r.bytes += once * b.lasting;
            r.reduce += once * b.reduce;
            r.gather += once * b.gather;
            r.update += once * b.update;

            // Activations of all micro-batches in flight, and what this layer alone needs.
            kept += live.b * e.kept_b;
            kept += live.w * e.kept_w;
            kept += (live.w - live.b) * e.gradient_w;
            passing = std::max(passing, e.passing + b.passing);
            next = std::max(next, b.passing);
            r.exposed += exposed_seconds(layout, e, b);
            forward_here += e.forward;
            backward_here += backward;
        }

        // Backward passes end with the stage's first layer; behind weight halves no message waits.
        bool waits = layout.zero >= 2 && layout.pipeline != Pipeline::ZERO_BUBBLE;
        if (waits && from < to) r.delay = std::max(r.delay, buckets[size_t(from)].reduce);
        if (layout.chunks == 1) continue;
        r.chunk_forward.push_back(forward_here);
        r.chunk_backward.push_back(backward_here);
    }

    // In ZeRO-3 the next layer's weights are there as well, in ZeRO-2 the last one's gradients.
    r.bytes += kept / layout.chunks + passing;
    if (layout.zero >= 2) r.bytes += next;
    return r;
}

// A layout's step and its fullest rank. The layout has its stages.
template <typename T, typename S>
Estimate estimate_layout(Planner<T, S>& planner, const Layout& layout, const PlanOptions& options) {
    // A plan without actions, for the prices of layers and buckets.
    Plan p;
    static_cast<PlanOptions&>(p) = options;
    p.layout = layout;
    Estimate e;
    const Model& model = model_of(planner, layout);
    const std::vector<LayerEstimate>& layers = layers_of(planner, p);
    const std::vector<BucketEstimate>& buckets = buckets_for(planner, p);
    double sum = 0;
    double most = 0;
    double delay = 0;
    std::vector<double> turns(size_t(layout.chunks)); // the slowest rank's
    double tail = 0; // of the step, behind the last micro-batch
    int m = options.micro_batches;
    int pp = layout.pp.size;
    int v = layout.chunks;

    // The slowest rank sets the pace; what its sums do not hide behind comes on top.
    for (int rank = 0; rank < pp; rank++) {
        RankEstimate r = estimate_rank(p, model, layers, buckets, rank);
        double seconds = r.seconds + r.exposed;
        // Once a step, ZeRO 0 and 1 sum behind the last backward pass; a rest is always seen.
        double sums = std::max(r.reduce - r.backward, r.reduce / 32);
        if (layout.zero >= 2) sums = 0;
        double publish = layout.zero == 1 || layout.zero == 2 ? r.gather : 0;
        sum += seconds;
        most = std::max(most, seconds);
        delay = std::max(delay, pp > 1 ? r.delay : 0);
        for (int i = 0; v > 1 && i < v; i++) {
            double turn = r.chunk_forward[v - 1 - i] + r.chunk_backward[i] + r.exposed / v;
            turns[i] = std::max(turns[i], turn);
        }
        tail = std::max(tail, sums + publish + r.update);
        if (r.bytes > e.bytes) e.fullest = rank;
        e.bytes = std::max(e.bytes, r.bytes);
    }

    // Each stage waits for a message in and one back; every other one that goes back, about, is
    // late by the sum before it.
    Action exchange = {Op::SENDRECV};
    exchange.transfers.resize(1);
    double message = pp > 1 ? exchange_seconds(planner.cost, p, model, exchange) : 0;
    double bubble = (sum - most) / v;
    if (layout.pipeline == Pipeline::ZERO_BUBBLE) bubble *= 0.4;
    double messages = (2 * message + delay / 2) * (double(v) * m + pp - 1);
    double pace = v > 1 ? std::accumulate(turns.begin(), turns.end(), 0.0) : most;
    e.seconds = m * pace + bubble + messages + tail;
    return e;
}

} // namespace llmc
