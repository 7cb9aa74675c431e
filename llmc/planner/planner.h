// planner.h - time and memory of any layout in closed form, thousands of them in a blink
//   m micro-batches, v chunks, p stages of the pipeline; t_r = F + B + R of a rank's layers, with
//   the collectives and moves that nothing hides
//     step     m max t_r + bubble + 2 (v m + p - 1) messages + data parallelism + update
//     bubble   (sum t_r - max t_r) s, with s = 1 / v. In ZB-H1 weight gradients fill 60% of the
//              bubble: s = 0.4
//     m < p    nothing fills a part of the bubble: s = max(s, idle), idle = (p - m) / (p - 1), or
//              two thirds of that in ZB-H1
//     chunks   m max t_r becomes a sum over turns, each F of one chunk and B of another on the
//              slowest rank: a long stage holds up all ranks in its turn
//     ZeRO     0, 1: a rank's sums hide behind its last backward pass. 2, 3: sums hide behind every
//              backward pass, in ZB-H1 behind every weight half. 3: a layer's weights arrive while
//              the layer before it runs.
//     frozen   layers that no gradient reaches run forward alone, keep nothing and have no sums
//     offload  masters and moments come and go beside updates, or weights and gradients do where
//              the host updates; gradients beside backward passes; weights arrive beside the layer
//              before theirs, and activations leave beside the next forward pass and are back
//              before their backward pass. Late updates hide behind the first forward passes
//     before   an evaluation of m micro-batches: (m - 1) turns of the slowest rank + all stages. A
//              turn ends where a rank has run the last of its chunks, and then the next one begins.
//              Sampling: the same, of one row of each slot
//   bytes      lasting data of the rank's buckets + live micro-batches x kept activations + the
//              peak that one layer needs while it runs
//   Layers have estimates that many layouts share (layer_estimates.h). The closed form leaves out
//   how actions wait for each other, so the best few layouts are simulated and placed before they
//   are believed.
//   test_planner says how far off the closed form is.
//   Cost: a microsecond a layout, some milliseconds for each new size of tp, ep or pipeline.
#pragma once
#include <numeric>
#include "../action.h"
#include "../arena.h"
#include "../layout.h"
#include "../model.h"
#include "../ops/types.h"
#include "../pipeline.h"
#include "../sharding.h"
#include "cost.h"
#include "layer_cost.h"
#include "layer_estimates.h"
#include "../io/machine.h"

namespace llmc {

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
    if (layout.pipeline == Pipeline::INTERLEAVED) {
        // Groups are larger where pp does not divide the micro-batches, as in schedule_of().
        int largest = int(ceil_div(m, std::max(1, m / pp)));
        waits = std::min(all, 2.0 * (pp - rank - 1) + (v - 1) * largest + 1);
    }
    if (layout.pipeline != Pipeline::ZERO_BUBBLE)
        return {waits, waits};
    return {v * waits, double(v * std::min(m, pp))};
}

// The planner tries no more stages on a rank.
constexpr int MOST_CHUNKS = 8;

// One rank's share of a micro-batch, and of the end of the step.
struct RankEstimate {
    double bytes = 0;  // all but kept activations
    double passing = 0; // part of `bytes`: what comes and goes
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
    // Seconds by chunk.
    std::array<double, MOST_CHUNKS> chunk_forward = {}, chunk_backward = {};

    // Seconds at the end of the step.
    double reduce = 0;
    double publish = 0;
    double update = 0;
    double late = 0; // of the host, beside the first forward passes
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
    if (stay) return share;
    int each = p.recompute.of(std::max(from, 1)) == Recompute::NONE ? 2 : 3;

    // A gradient stays if few actions stand between two backward passes of its stage.
    int cycle = each * blocks + 2 * (head + embedding);
    bool stays = cycle <= 2 * layout.prefetch + 1;
    if (stays) share.gradients = layout.chunks > 1 ? 1.0 / layout.pp.size : 0;
    if (blocks == 0) return share;

    // Return how many blocks have `ahead` actions or fewer, and those of an end, between two uses.
    auto near = [&](int ahead, bool end) {
        int n = ahead < 2 * end ? 0 : (ahead - 2 * end) / each + 1;
        return double(std::min(n, blocks)) / blocks;
    };
    int bucket = buckets_of(model, std::max(from, 1))[0];
    bool cut = is_sharded(layout, model, {Kind::WEIGHT, bucket});
    int lead = layout.prefetch * (cut + layout.weights_away);

    // The passes of a rank's only stage follow each other, at both ends of it. With chunks those of
    // other stages come between; pp micro-batches in a row pass through one.
    if (layout.chunks == 1) {
        share.forward -= near(lead, embedding);
        share.backward -= near(lead, head);
    } else if (cycle <= lead + 1) {
        share.forward = share.backward = 1.0 / layout.pp.size;
    }
    if (head) share.activations -= near(2 * layout.prefetch, true);
    return share;
}

// Return the seconds by which what takes `seconds` outlasts what hides it.
inline double time_beyond(double seconds, double hides) {
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
        double some = of * time_beyond(x + all, hides);
        double rest = (1 - of) * time_beyond(all, hides);
        return some + rest;
    };
    bool parks = p.offload.activations != Tier::DEVICE;
    double kept = e.block && parks ? share.activations * (e.kept_b + e.kept_w) : 0;
    double reduce = p.layout.zero >= 2 ? b.reduce : 0;
    if (b.gather + b.fetch + b.move + reduce + kept == 0) return 0; // all stays and is whole
    double park = kept / tier_rate(machine, p.offload.activations);
    double come = e.block ? share.forward : 1;
    double forward = std::max(mixed(b.gather, come, 0, e.forward),
                              mixed(b.fetch, come, park, e.forward));
    if (e.backward == 0) return forward; // no gradient comes so low

    // An end uses its weights in one of the passes alone. The head's forward pass takes no time in
    // which a gradient could come; the embedding's gradient leaves beside the next forward pass,
    // unless other moves wait there or none follows.
    double later = 1 - 1.0 / p.micro_batches;
    if (!e.block) {
        double next = time_beyond(b.move, block.backward);
        double leaves = parks || p.layout.weights_away ? 1 : 1 - later;
        double moved = later * next + leaves * b.move;
        if (e.forward == 0) moved = later * b.move + next;
        return forward + std::max(time_beyond(reduce, e.backward), share.gradients * moved);
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
        double summed = mixed(b.gather, come, 0, input) + time_beyond(reduce, e.weights);
        double moved = mixed(b.fetch, come, park, input) +
                       average([&](double moves) { return time_beyond(moves, e.weights); });
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
            later * (moved + time_beyond(2 * move, e.redone));
    return forward + std::max(summed, moved);
}

// Neighbouring layers of one kind, which are counted at once.
struct AlikeLayers {
    size_t kind;
    int first, count;
};

// The layers of a stage, from `from` to the one before `to`.
struct StageLayers {
    int from, to;
    std::vector<AlikeLayers> alike;
};

// Ranks of a pipeline whose stages have layers of the same kinds, and the stages of the first one.
struct AlikeRanks {
    std::vector<int> ranks;
    std::vector<StageLayers> stages;
};

// Return the stages of a pipeline rank.
inline std::vector<StageLayers> stages_of(const Layout& layout, const Model& model,
                                          const LayerKinds& kinds, int rank) {
    std::vector<StageLayers> stages;
    for (int s = rank; s < layout.stages(); s += layout.pp.size) {
        StageLayers stage = {first_layer_of(layout, model, s),
                             first_layer_of(layout, model, s + 1), {}};
        for (int l = stage.from; l < stage.to; l++) {
            size_t kind = kinds.of[size_t(l)];
            bool alike = l > stage.from && stage.alike.back().kind == kind;
            if (!alike) stage.alike.push_back({kind, l, 0});
            stage.alike.back().count++;
        }
        stages.push_back(stage);
    }
    return stages;
}

// Divide the ranks of a pipeline into those that are alike, in the order of their first ones.
inline std::vector<AlikeRanks> alike_ranks(const Layout& layout, const Model& model,
                                           const LayerKinds& kinds) {
    std::map<std::vector<std::pair<size_t, int>>, size_t> known; // by kinds and counts of layers
    std::vector<AlikeRanks> all;
    for (int rank = 0; rank < layout.pp.size; rank++) {
        std::vector<StageLayers> stages = stages_of(layout, model, kinds, rank);
        std::vector<std::pair<size_t, int>> layers;
        for (const StageLayers& stage : stages) {
            for (const AlikeLayers& alike : stage.alike)
                layers.push_back({alike.kind, alike.count});
            layers.push_back({kinds.first.size(), 0}); // the end of a stage
        }

        // Add the rank to its like, or begin with a kind that is new.
        auto [entry, fresh] = known.insert({layers, all.size()});
        if (fresh) all.push_back({{}, stages});
        all[entry->second].ranks.push_back(rank);
    }
    return all;
}

// Estimate a pipeline rank: its bytes, and its seconds.
template <typename T, typename S>
RankEstimate estimate_rank(const Planner<T, S>& planner, const Plan& p, const Model& model,
                           const std::vector<LayerEstimate>& layers,
                           const std::vector<BucketEstimate>& buckets,
                           const std::vector<StageLayers>& stages) {
    const Layout& layout = p.layout;
    const Machine& machine = planner.cost.machine;
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
    const LayerEstimate& block = layers[planner.kinds.of[size_t(model.head() - 1)]];
    for (size_t chunk = 0; chunk < stages.size(); chunk++) {
        const StageLayers& stage = stages[chunk];
        MovingShares share = moving_shares(p, model, stage.from, stage.to);
        double summed = 0; // bytes of gradients that REDUCE sums behind the stage's message
        for (auto [kind, first, n] : stage.alike) {
            const LayerEstimate& e = layers[kind];
            const BucketEstimate& b = buckets[kind];
            double backward = n * (e.backward + e.redone);
            r.seconds += n * e.seconds();
            r.backward += backward;
            r.chunk_forward[chunk] += n * e.forward;
            r.chunk_backward[chunk] += backward;

            // A tied head on the embedding's rank uses the table that is there already.
            bool embeds = stages[0].from == 0;
            bool tied_here = first == model.head() && model.shape.tied && embeds;
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
        }
        if (stage.from > 0 && layout.zero < 2) held = std::max(held, summed);
    }

    // Add the next block's weights, where they come for each use, and the last layer's gradient in
    // ZeRO-2 and 3. Of gradients in another tier one arrives and one leaves meanwhile; at the end
    // of a step those of a stage wait until its message has left.
    passing += weights + std::max(2 * gradient, held);
    if (layout.zero >= 2) passing += partial;
    double waiting = (layout.prefetch + 2) * chunk_apart;
    if (!p.offload.late) r.staged_apart = std::min(r.staged_apart, waiting);
    r.bytes += passing;
    r.passing = passing;
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

// The seconds of what ranks run before a step; and for each rank of the pipeline, bytes that stay
// beside the step's, and bytes that take the place of its activations. Empty: nothing runs before.
struct BeforeEstimate {
    double seconds = 0;
    std::vector<double> beside, instead;
};

// Keep what a rank takes, of the card and of the host, if it is the most of all ranks so far.
// here: what leaves the card stays in the memory in which the step runs.
inline void keep_fullest(Estimate& e, const Plan& p, const RankEstimate& r, int rank, bool here,
                         const BeforeEstimate& before) {
    LiveStages live = live_stages(p.layout, p.micro_batches, rank);
    double all = kept_bytes(p, r, live);
    double kept = p.offload.activations == Tier::DEVICE ? all : passing_bytes(p, r, live, all);
    if (p.offload.activations != Tier::DEVICE && here) kept += all;
    double bytes = r.bytes + std::max(kept, r.staged);
    double holes = holes_between(p, r, kept, bytes);
    if (!before.beside.empty()) {
        bytes = std::max(bytes, r.bytes - r.passing + before.instead[size_t(rank)]);
        bytes += before.beside[size_t(rank)];
    }
    bytes += holes;

    // Add what waits on the host.
    double parked = live.b * (r.kept_b + r.kept_w) / p.layout.chunks;
    bool away = p.offload.activations == Tier::HOST && !here;
    parked = r.waiting + (away ? parked : 0);
    double host = p.offload.late ? parked + r.staged_apart : std::max(parked, r.staged_apart);
    e.host = std::max(e.host, r.host + host);
    if (bytes <= e.bytes) return;
    e.bytes = bytes;
    e.holes = holes;
    e.fullest = rank;
    e.movable = r.movable;
    if (p.offload.activations == Tier::DEVICE) e.movable.of[ACTIVATIONS] = kept;
}

// An evaluation, or a run of a generation: its seconds, and bytes by pipeline rank.
struct EvaluationEstimate {
    double seconds = 0;
    std::vector<double> weights, cache, passing; // what a model of its own has; keys and values;
                                                 // and what comes and goes
};

// Estimate an evaluation, by a plan without actions.
template <typename T, typename S>
EvaluationEstimate estimate_evaluation(Planner<T, S>& planner, const Plan& p) {
    // Look up the prices of layers and buckets.
    const Layout& layout = p.layout;
    const Model& model = model_of(planner, layout);
    const std::vector<LayerEstimate>& layers = layers_of(planner, p);
    const std::vector<BucketEstimate>& buckets = buckets_for(planner, p);
    int pp = layout.pp.size;
    double message = pp > 1 ? stage_seconds(planner.cost, p, model, 1) : 0;

    // Add up each stage, which waits for its input, and what the layers of each rank keep and need.
    std::vector<double> seconds; // [stage]
    std::vector<double> none(size_t(pp), 0.0);
    EvaluationEstimate e = {0, none, none, none};
    for (int stage = 0; stage < layout.stages(); stage++) {
        size_t rank = size_t(stage % pp);
        seconds.push_back(stage > 0 ? message : 0);
        int end = first_layer_of(layout, model, stage + 1);
        for (int l = first_layer_of(layout, model, stage); l < end; l++) {
            size_t kind = planner.kinds.of[size_t(l)];
            const LayerEstimate& layer = layers[kind];
            const BucketEstimate& b = buckets[kind];
            seconds.back() += std::max({layer.forward, b.gather, b.fetch});
            bool tied_here = l == model.head() && model.shape.tied && rank == 0;
            e.weights[rank] += tied_here ? 0 : b.lasting;
            e.cache[rank] += layer.cache;
            e.passing[rank] = std::max(e.passing[rank], layer.passing + b.weights);
        }
    }

    // The slowest rank sets the pace of micro-batches, and the last one passes through all stages.
    double turn = 0;
    int last = layout.stages() - pp; // stages between a rank's first and its last
    for (int rank = 0; rank < pp; rank++) {
        auto from = seconds.begin() + rank;
        turn = std::max(turn, std::accumulate(from, from + last + 1, 0.0));
    }
    double all = std::accumulate(seconds.begin(), seconds.end(), 0.0);
    e.seconds = (p.micro_batches - 1) * turn + all;
    return e;
}

// Return the share of a round trip's waiting that a schedule leaves: chunks divide it, and weight
// gradients fill a part. Fewer micro-batches than ranks cannot fill the pipeline in any schedule.
inline double bubble_share(const Layout& layout, int micro_batches) {
    bool halves = layout.pipeline == Pipeline::ZERO_BUBBLE;
    double full = halves ? 0.4 : 1.0 / layout.chunks;
    int pp = layout.pp.size;
    if (micro_batches >= pp) return full;
    double idle = double(pp - micro_batches) / (pp - 1);
    return std::max(full, halves ? idle * 2 / 3 : idle);
}

// Estimate a layout's step, and its fullest rank, by a plan without actions. kinds: alike_ranks().
// before: what ranks evaluate first.
template <typename T, typename S>
Estimate estimate_layout(Planner<T, S>& planner, const Plan& p,
                         const std::vector<AlikeRanks>& kinds,
                         const BeforeEstimate& before = {}) {
    // Look up the prices of layers and buckets.
    const Layout& layout = p.layout;
    const CostModel& cost = planner.cost;
    const Model& model = model_of(planner, layout);
    const std::vector<LayerEstimate>& layers = layers_of(planner, p);
    const std::vector<BucketEstimate>& buckets = buckets_for(planner, p);

    // Seconds of a micro-batch over ranks: the sum, and the slowest.
    Estimate e;
    double sum = 0;
    double most = 0;
    std::array<double, MOST_CHUNKS> turns = {}; // each turn's slowest rank
    double tail = 0; // seconds of the step behind the last micro-batch
    int m = p.micro_batches;
    int pp = layout.pp.size;
    int v = layout.chunks;

    // The slowest rank sets the pace. Collectives that nothing hides come on top.
    for (const AlikeRanks& alike : kinds) {
        RankEstimate r = estimate_rank(planner, p, model, layers, buckets, alike.stages);
        double seconds = r.seconds + r.exposed;

        // ZeRO 0 and 1 sum once a step, behind the last backward pass;
        // at least 1/32 of it stays visible.
        double sums = std::max(r.reduce - r.backward, r.reduce / 32);
        if (layout.zero >= 2) sums = 0;

        // Keep the slowest.
        sum += double(alike.ranks.size()) * seconds;
        most = std::max(most, seconds);
        for (int i = 0; v > 1 && i < v; i++) {
            double turn = r.chunk_forward[v - 1 - i] + r.chunk_backward[i] + r.exposed / v;
            turns[i] = std::max(turns[i], turn);
        }

        // Late updates have one queue with the moves of gradients, ahead of them. The first of
        // these is in the first backward pass: late updates hide behind forward passes alone.
        double first = pp * (r.seconds - r.backward);
        tail = std::max(tail, sums + r.publish + r.update + time_beyond(r.late, first));

        // Keep the fullest: the first of its kind, which has most in flight. A later one may have
        // more weight halves that wait for their turn, or more of a teacher.
        bool here = is_here(p.offload.activations, planner.where);
        bool alike_in_bytes = layout.pipeline != Pipeline::ZERO_BUBBLE && before.beside.empty();
        for (int rank : alike.ranks) {
            keep_fullest(e, p, r, rank, here, before);
            if (alike_in_bytes) break;
        }
    }

    // Each stage waits for one message in and one back.
    double message = pp > 1 ? stage_seconds(cost, p, model, 1) : 0;
    double bubble = (sum - most) * bubble_share(layout, m);
    double messages = 2 * message * (double(v) * m + pp - 1);
    double pace = v > 1 ? std::accumulate(turns.begin(), turns.end(), 0.0) : most;
    e.seconds = m * pace + bubble + messages + tail;
    e.seconds += before.seconds;
    return e;
}

} // namespace llmc
