// planner.h - time and memory of any layout in closed form, thousands of them in a blink
//   t_r = F + B + R of a rank's layers, m micro-batches, v chunks, p stages of the pipeline
//     step     m max t_r + (sum t_r - max t_r) / v + 2 (v m + p - 1) messages + data parallelism
//              + update
//     chunks   m max t_r becomes a sum over turns, each F of one chunk and B of another on the
//              slowest rank: a long stage holds up all ranks in its turn
//     ZB-H1    fills 60% of that bubble, the middle term, with weight gradients
//     ZeRO     0, 1: a rank's sums hide behind its last backward pass. 2, 3: sums hide behind every
//              backward pass, in ZB-H1 behind every weight half. 3: a layer's weights arrive while
//              the layer before it runs.
//     frozen   layers that no gradient reaches run forward alone, keep nothing and have no sums
//     offload  masters and moments come and go beside updates, or weights and gradients do where
//              the host updates; gradients beside backward passes; weights arrive beside the layer
//              before theirs, and activations leave beside the next forward pass and are back
//              before their backward pass. Late updates hide behind all passes of a step
//     before   an evaluation of m micro-batches: (m - 1) turns of the slowest rank + all stages. A
//              turn ends where a rank has run the last of its chunks, and then the next one begins
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
typedef std::pair<int, std::vector<int>> StageSplit; // pp, and the first layers of all stages
template <typename T, typename S> struct Planner {
    Shape shape; // as with_logits() returns it
    CostModel cost;
    S where;
    std::map<EstimateKey, Model> models = {}; // by tp, ep, whole experts
    std::map<EstimateKey, std::vector<LayerEstimate>> layers = {};   // [layer]
    std::map<EstimateKey, std::vector<BucketEstimate>> buckets = {}; // [layer]
    std::map<StageSplit, std::vector<size_t>> kinds = {}; // [rank]: kinds_of_ranks()
};

// Return the model of a layout, made at most once for each way to cut it.
template <typename T, typename S>
const Model& model_of(Planner<T, S>& planner, const Layout& layout) {
    // Take the pieces of the layout's rank for all: no rank has larger ones.
    EstimateKey key = {layout.tp.size, layout.ep, layout.whole_experts};
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

// Return the estimates of all layers, made at most once for each key. Layers of one kind share one.
template <typename T, typename S>
const std::vector<LayerEstimate>& layers_of(Planner<T, S>& planner, const Plan& p) {
    const Layout& l = p.layout;
    const Machine& machine = planner.cost.machine;

    // The sizes decide the bytes and the work; ranks in the same node decide the speed of messages.
    auto near = [&](auto axis) { return axis_in_node(l, machine, axis); };
    // Micro-batches share the casts of weights that are kept.
    int kept = keeps_casts(p, model_of(planner, l)) ? p.micro_batches : 0;
    EstimateKey key = {l.tp.size, l.cp.size, int(l.cp_method), l.ep, l.whole_experts,
                       l.sequence_parallel, int(p.B), int(p.recompute.of(1)), near(&Layout::tp),
                       near(&Layout::cp), near(&Layout::dp), kept};
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
    const Offload& away = p.offload;
    int states = int(optimizer_row(p.optimizer).states.size());
    double rate = tier_rate(c.machine, std::max({away.optimizer, away.gradients, away.weights}));
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
        for (int i = bucket.first; keeps_casts(p, model) && i < bucket.first + bucket.count; i++) {
            const Parameter& w = model.parameters[i];
            if (w.matrix >= 0) e.lasting += fp8_cast_bytes(w.local_rows(), w.local_cols());
        }
        if (p.layout.weights_away) {
            e.weights += cut ? bytes(Kind::STAGED) : 0;
            e.fetch += bytes(fetched_kind(p.layout, model, b)) / rate;
        }
        if (!bucket.trainable || p.mode != Mode::TRAIN) continue;
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

        // Chunks of what lies in another tier than the update's come and go, one at a time, beside
        // the updates. The update has used up their gradients, which do not go back.
        double optimizer = bytes(Kind::MASTER) + states * bytes(Kind::STATE) + bytes(Kind::EMA);
        double update = update_seconds(c, p, model, b);
        keep(away.optimizer, OPTIMIZER, optimizer);
        e.movable.masters += away.optimizer == Tier::DEVICE ? bytes(Kind::MASTER) : 0;
        if (away.cuts_updates()) {
            Data first = {Kind::STAGED, b, -1, 0};
            double& chunk = is_here(away.update, planner.where) ? e.chunk : e.chunk_apart;
            chunk = std::max(chunk, double(data_bytes<T>(p, model, first, planner.where)));
            double n = double(updated_range(p.layout, model, b).count);
            double weights = away.weights != away.update ? n * sizeof(T) : 0;
            double gradients = away.gradients != away.update ? n * sizeof(acc_t<T>) : 0;
            double states = away.optimizer != away.update ? optimizer : 0;
            double come = weights + gradients + states, go = weights + states;
            if (!is_here(away.update, planner.where)) e.staged_apart += come;

            // Late updates leave the end of a step nothing but weights that come back.
            if (away.late) {
                e.late += update + come / rate;
                update = 0;
            }
            update = std::max(update, (away.late ? go : come + go) / rate);
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
    EstimateKey key = {l.tp.size, l.ep, l.whole_experts, l.zero, l.zero_group, l.weights_near,
                       l.dp.size * l.cp.size, ranks_in_node(l, machine, Group::DATA),
                       ranks_in_node(l, machine, Group::EXPERTS), int(p.masters),
                       int(p.offload.optimizer), int(p.offload.gradients),
                       int(p.offload.weights)};
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
    double holes = 0;   // part of `bytes`: what placing may lose between data that come and go
    int fullest = 0;    // its place in the pipeline
    Movable movable;    // of the fullest rank
    double host = 0;    // the most bytes of a rank in the host's memory, if that is apart

    double least() const {
        return bytes - holes;
    }
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
    double staged_apart = 0; // the same in the host's memory, apart; of late updates all chunks

    // Bytes that a micro-batch in flight keeps, as LayerEstimate has them.
    double kept_b = 0;
    double kept_w = 0;
    double gradient_w = 0;
    double parked = 0;    // the most that one block keeps
    double holes = 0;     // as Estimate has them, beside activations
    Movable movable = {}; // but activations
    double host = 0;      // bytes in the host's memory, apart, but activations
    double waiting = 0;   // of gradients there, between micro-batches

    // Seconds of a micro-batch: in total, its backward pass,
    // and the part of collectives and moves that nothing hides.
    double seconds = 0;
    double backward = 0;
    double exposed = 0;
    // Seconds by chunk; empty if there is only one.
    std::vector<double> chunk_forward = {}, chunk_backward = {};

    // Seconds at the end of the step.
    double reduce = 0;
    double publish = 0;
    double update = 0;
    double late = 0; // of the host, beside the layers of the whole step
};

// The shares of a stage's blocks that move: weights that come for the forward pass, and for the
// backward one; activations; gradients. Others stay, because their next use is near.
struct MovingShares {
    double forward = 1;
    double backward = 1;
    double activations = 1;
    double gradients = 1;
};
inline MovingShares moving_shares(const Plan& p, const Model& model, int from, int to) {
    // Count the blocks, the compute actions that one of them adds to both passes of a micro-batch,
    // and those between a block's two passes that the model's ends add.
    const Layout& layout = p.layout;
    MovingShares share;
    bool head = to > model.head();
    bool embedding = from == 0;
    int blocks = to - from - head - embedding;
    bool stay = layout.zero < 3 && !p.offload.moves();
    if (blocks == 0 || stay) return share;
    int each = p.recompute.of(std::max(from, 1)) == Recompute::NONE ? 2 : 3;

    // Return how many blocks have `ahead` actions or fewer, and those of an end, between two uses.
    auto near = [&](int ahead, bool end) {
        int n = ahead < 2 * end ? 0 : (ahead - 2 * end) / each + 1;
        return double(std::min(n, blocks)) / blocks;
    };
    bool cut = is_sharded(layout, model, {Kind::WEIGHT, buckets_of(model, std::max(from, 1))[0]});
    int lead = layout.prefetch * (cut + layout.weights_away);
    int cycle = each * blocks + 2 * (head + embedding);

    // The passes of a rank's only stage follow each other, at both ends of it. With chunks those of
    // other stages come between; pp micro-batches in a row pass through one.
    if (layout.chunks == 1) {
        share.forward -= near(lead, embedding);
        share.backward -= near(lead, head);
    } else if (cycle <= lead + 1) {
        share.forward = share.backward = 1.0 / layout.pp.size;
    }
    if (head) share.activations -= near(2 * layout.prefetch, true);
    bool stays = cycle <= 2 * layout.prefetch + 1;
    if (stays) share.gradients = layout.chunks > 1 ? 1.0 / layout.pp.size : 0;
    return share;
}

// Return the seconds by which what takes `seconds` outlasts what hides it.
inline double beyond(double seconds, double hides) {
    return std::max(0.0, seconds - hides);
}

// Return the seconds that a layer adds to a micro-batch because its collectives and moves take
// longer than the compute that hides them. Its weights arrive while the layer before it runs, and
// its activations leave beside the next forward pass. Its gradient is summed beside the next
// backward pass or, if that is split, beside the next weight half. One that lies in another tier
// comes and goes beside backward passes; for the first micro-batch it need not come. This layer's
// times stand for its neighbours', but those of an end of the model: there `block` stands for them.
inline double exposed_seconds(const Plan& p, const Machine& machine, const LayerEstimate& e,
                              const BucketEstimate& b, const LayerEstimate& block,
                              const MovingShares& share) {
    // Collectives run in one queue and moves in another, so the longer one counts. x: what a share
    // of the layers waits for, beside what all of them wait for.
    auto mixed = [](double x, double of, double all, double hides) {
        double some = of * beyond(x + all, hides);
        double rest = (1 - of) * beyond(all, hides);
        return some + rest;
    };
    bool parks = p.offload.activations != Tier::DEVICE;
    double kept = e.block && parks ? share.activations * (e.kept_b + e.kept_w) : 0;
    double park = kept / tier_rate(machine, p.offload.activations);
    double come = e.block ? share.forward : 1;
    double forward = std::max(mixed(b.gather, come, 0, e.forward),
                              mixed(b.fetch, come, park, e.forward));
    if (e.backward == 0) return forward; // no gradient comes so low

    // An end uses its weights in one of the passes alone. The head's forward pass takes no time in
    // which a gradient could come; the embedding's gradient leaves beside the next forward pass,
    // unless other moves wait there or none follows.
    double reduce = p.layout.zero >= 2 ? b.reduce : 0;
    double later = 1 - 1.0 / p.micro_batches;
    if (!e.block) {
        double next = beyond(b.move, block.backward);
        double leaves = parks || p.layout.weights_away ? 1 : 1 - later;
        double moved = later * next + leaves * b.move;
        if (e.forward == 0) moved = later * b.move + next;
        return forward + std::max(beyond(reduce, e.backward), moved);
    }

    // Average over the first micro-batch, whose gradients only leave, and later ones.
    come = share.backward;
    double move = share.gradients * b.move;
    auto average = [&](auto seconds) {
        double first = (1 - later) * seconds(move);
        double others = later * seconds(2 * move);
        return first + others;
    };
    if (p.layout.pipeline == Pipeline::ZERO_BUBBLE) {
        double input = e.backward - e.weights;
        double summed = mixed(b.gather, come, 0, input) + beyond(reduce, e.weights);
        double moved = mixed(b.fetch, come, park, input) +
                       average([&](double moves) { return beyond(moves, e.weights); });
        return forward + std::max(summed, moved);
    }
    if (e.redone == 0) {
        double moved = average([&](double moves) {
            return mixed(b.fetch, come, park + moves, e.backward);
        });
        return forward + std::max(mixed(b.gather, come, reduce, e.backward), moved);
    }

    // The data of a recomputed pass can only come beside the backward pass before it; a gradient
    // comes beside the recomputed pass.
    double both = e.backward + e.redone;
    double summed = std::max(mixed(b.gather, come, reduce, both),
                             mixed(b.gather, come, 0, e.backward));
    double moved = mixed(b.fetch, come, park, e.backward);
    moved = (1 - later) * std::max(moved, mixed(b.fetch, come, park + move, both)) +
            later * (moved + beyond(2 * move, e.redone));
    return forward + std::max(summed, moved);
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
inline RankEstimate estimate_rank(const Plan& p, const Machine& machine, const Model& model,
                                  const std::vector<LayerEstimate>& layers,
                                  const std::vector<BucketEstimate>& buckets, int rank) {
    const Layout& layout = p.layout;
    RankEstimate r;
    double passing = 0;
    // Bytes of other layers' buckets: weights that arrive; gradients that come and go, that are
    // summed, and that wait for a stage's message.
    double weights = 0;
    double gradient = 0;
    double partial = 0;
    double held = 0;
    double chunk_apart = 0;

    // Add up the layers of its stages.
    const LayerEstimate& block = layers[size_t(model.head() - 1)];
    for (int stage = rank; stage < layout.stages(); stage += layout.pp.size) {
        int from = first_layer(layout, model, stage);
        int to = first_layer(layout, model, stage + 1);
        MovingShares share = moving_shares(p, model, from, to);
        double forward_here = 0;
        double backward_here = 0;
        double summed = 0; // bytes of gradients that REDUCE sums behind the stage's message
        for (int l = from, n = 0; l < to; l += n) {
            // Take neighbours of one kind at once.
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
            r.publish += once * b.publish;
            r.update += once * b.update;
            r.late += once * b.late;
            r.movable.add(b.movable, once);
            bool wait = b.host > 0 && p.micro_batches > 1;
            r.host += once * b.host;
            r.waiting += wait ? once * b.gradient : 0;

            // Add what a micro-batch in flight keeps, and take the peak of what one layer needs.
            r.kept_b += n * e.kept_b;
            r.kept_w += n * e.kept_w;
            r.gradient_w += n * e.gradient_w;
            r.parked = std::max(r.parked, e.kept_b + e.kept_w);
            passing = std::max(passing, e.passing + b.weights + b.partial + b.gradient);
            partial = std::max(partial, b.partial);
            if (e.block) weights = std::max(weights, b.weights);
            if (e.block) gradient = std::max(gradient, b.gradient);
            r.staged = std::max(r.staged, (layout.prefetch + 2) * b.chunk);
            r.staged_apart += once * b.staged_apart;
            chunk_apart = std::max(chunk_apart, b.chunk_apart);
            r.holes = std::max({r.holes, b.chunk, 2.1 * b.gradient});
            if (p.offload.moves()) r.holes = std::max({r.holes, 1.25 * b.weights, b.partial});
            summed += n * b.summed;
            r.exposed += n * exposed_seconds(p, machine, e, b, block, share);
            forward_here += n * e.forward;
            backward_here += backward;
        }

        if (stage > 0 && layout.zero < 2) held = std::max(held, summed);
        if (layout.chunks == 1) continue;
        r.chunk_forward.push_back(forward_here);
        r.chunk_backward.push_back(backward_here);
    }

    // Add the next block's weights, where they come for each use, and the last layer's gradient in
    // ZeRO-2 and 3. Of gradients in another tier one arrives and one leaves meanwhile; at the end
    // of a step those of a stage wait until its message has left.
    passing += weights + std::max(2 * gradient, held);
    if (layout.zero >= 2) passing += partial;
    double waiting = (layout.prefetch + 2) * chunk_apart;
    if (!p.offload.late) r.staged_apart = std::min(r.staged_apart, waiting);
    r.bytes += passing;
    r.staged -= passing;
    return r;
}

// Return the bytes that input halves leave on a rank to weight halves.
inline double later_bytes(const Plan& p, const RankEstimate& r, LiveStages live) {
    bool halves = p.layout.pipeline == Pipeline::ZERO_BUBBLE;
    return (live.w - live.b + halves) * r.gradient_w;
}

// Return the bytes of the activations that wait on a rank for their backward passes.
inline double kept_bytes(const Plan& p, const RankEstimate& r, LiveStages live) {
    double later = later_bytes(p, r, live);
    return (live.b * r.kept_b + live.w * r.kept_w + later) / p.layout.chunks;
}

// Return how many of the `kept` bytes are on the device if activations leave: those of a block in
// use, and of others that come and go. They stay between the two halves of a backward pass.
inline double passing_bytes(const Plan& p, const RankEstimate& r, LiveStages live, double kept) {
    const Layout& layout = p.layout;
    double some = (layout.prefetch + 1 + (layout.pp.size > 1)) * r.parked;
    if (layout.pipeline == Pipeline::ZERO_BUBBLE) {
        double waiting = (live.w - live.b + 1) * r.kept_w;
        some += (later_bytes(p, r, live) + waiting) / layout.chunks;
    }
    return std::min(kept, some);
}

// Return the bytes that placing may lose between data that come and go, which have unlike sizes. A
// rule of thumb: test_planner says how seldom it is too low.
inline double holes_between(const Plan& p, const RankEstimate& r, double kept, double bytes) {
    if (!p.offload.moves()) return 0;
    double holes = r.holes;
    holes += 0.015 * bytes;
    if (p.layout.chunks > 1) holes += 0.2 * kept;
    bool leave = p.offload.activations != Tier::DEVICE;
    bool selective = p.recompute.of(1) == Recompute::SELECTIVE; // rows of unlike sizes stay
    if (leave && selective) holes += 0.25 * kept;
    bool both = p.offload.cuts_updates() && leave;
    if (both) holes += r.parked;
    return holes;
}

// An evaluation before a step: its seconds, and the bytes that it keeps beside the step's.
struct EvaluationEstimate {
    double seconds = 0;
    std::vector<double> bytes = {}; // [pipeline rank]; empty: none
};

// Estimate an evaluation, by a plan without actions. Bytes are those of a model of its own.
template <typename T, typename S>
EvaluationEstimate estimate_evaluation(Planner<T, S>& planner, const Plan& p) {
    // Look up the prices of layers and buckets.
    const Layout& layout = p.layout;
    const Model& model = model_of(planner, layout);
    const std::vector<LayerEstimate>& layers = layers_of(planner, p);
    const std::vector<BucketEstimate>& buckets = buckets_for(planner, p);
    int pp = layout.pp.size;
    Action exchange = {Op::SENDRECV};
    exchange.transfers.resize(1);
    double message = pp > 1 ? exchange_seconds(planner.cost, p, model, exchange) : 0;

    // Add up each stage, which waits for its input, and what the layers of each rank keep and need.
    std::vector<double> seconds; // [stage]
    std::vector<double> kept(size_t(pp), 0.0);
    std::vector<double> passing(size_t(pp), 0.0);
    for (int stage = 0; stage < layout.stages(); stage++) {
        size_t rank = size_t(stage % pp);
        seconds.push_back(stage > 0 ? message : 0);
        for (int l = first_layer(layout, model, stage); l < first_layer(layout, model, stage + 1);
             l++) {
            const LayerEstimate& e = layers[size_t(l)];
            const BucketEstimate& b = buckets[size_t(l)];
            seconds.back() += std::max({e.forward, b.gather, b.fetch});
            bool tied_here = l == model.head() && model.shape.tied && rank == 0;
            kept[rank] += tied_here ? 0 : b.lasting;
            passing[rank] = std::max(passing[rank], e.passing + b.weights);
        }
    }

    // The slowest rank sets the pace of micro-batches, and the last one passes through all stages.
    EvaluationEstimate e;
    double turn = 0;
    int last = layout.stages() - pp; // stages between a rank's first and its last
    for (int rank = 0; rank < pp; rank++) {
        auto from = seconds.begin() + rank;
        turn = std::max(turn, std::accumulate(from, from + last + 1, 0.0));
        e.bytes.push_back(kept[size_t(rank)] + passing[size_t(rank)]);
    }
    double all = std::accumulate(seconds.begin(), seconds.end(), 0.0);
    e.seconds = (p.micro_batches - 1) * turn + all;
    return e;
}

// Estimate a layout's step, and its fullest rank, by a plan without actions. Its layout must have
// been split into stages. before: what ranks evaluate first.
template <typename T, typename S>
Estimate estimate_layout(Planner<T, S>& planner, const Plan& p,
                         const EvaluationEstimate& before = {}) {
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
            known.push_back(estimate_rank(p, planner.cost.machine, model, layers, buckets, rank));
        const RankEstimate& r = known[kind];
        double seconds = r.seconds + r.exposed;

        // ZeRO 0 and 1 sum once a step, behind the last backward pass;
        // at least 1/32 of it stays visible.
        double sums = std::max(r.reduce - r.backward, r.reduce / 32);
        if (layout.zero >= 2) sums = 0;

        // Keep the slowest and the fullest rank.
        sum += seconds;
        most = std::max(most, seconds);
        for (int i = 0; v > 1 && i < v; i++) {
            double turn = r.chunk_forward[v - 1 - i] + r.chunk_backward[i] + r.exposed / v;
            turns[i] = std::max(turns[i], turn);
        }

        // Late updates have one queue with the moves of gradients, ahead of them: they hide behind
        // what the first micro-batch and the pipeline before it take.
        double first = pp * (r.seconds - r.backward) + r.backward;
        tail = std::max(tail, sums + r.publish + r.update + beyond(r.late, first));

        // Activations of all micro-batches in flight tell ranks of one kind apart.
        bool here = is_here(p.offload.activations, planner.where);
        LiveStages live = live_stages(layout, m, rank);
        double all = kept_bytes(p, r, live);
        double kept = p.offload.activations == Tier::DEVICE ? all : passing_bytes(p, r, live, all);
        if (p.offload.activations != Tier::DEVICE && here) kept += all;
        double bytes = r.bytes + std::max(kept, r.staged);
        double holes = holes_between(p, r, kept, bytes);
        bytes += holes;
        if (!before.bytes.empty()) bytes += before.bytes[size_t(rank)];
        double parked = live.b * (r.kept_b + r.kept_w) / v;
        bool away = p.offload.activations == Tier::HOST && !here;
        parked = r.waiting + (away ? parked : 0);
        double host = p.offload.late ? parked + r.staged_apart : std::max(parked, r.staged_apart);
        e.host = std::max(e.host, r.host + host);
        if (bytes <= e.bytes) continue;
        e.bytes = bytes;
        e.holes = holes;
        e.fullest = rank;
        e.movable = r.movable;
        if (p.offload.activations == Tier::DEVICE) e.movable.of[ACTIVATIONS] = kept;
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
    e.seconds += before.seconds;
    return e;
}

} // namespace llmc
