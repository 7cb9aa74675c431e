// cost.h - seconds of each action of a plan on a machine - arXiv:2104.04473
//     layers      by the model's tables (layer_cost.h)
//     collectives and messages by the links of their groups (links.h)
//     updates     bytes of weight, gradient, master and moments / the rate of the memory in which
//                 they run, the card's or the host's
//     moves       bytes / the rate between card and host, or of the disk
//   No formula is fitted to a published step time; only numbers of a machine are. Those of a100-80
//   are four shares (gemm, elementwise, link, nic) and a time (latency_us); hop_us is fitted to
//   SimAI's rings. All others are a data sheet's, guesses, or what --calibrate measures.
//   Not counted: casts of weights that ZeRO-3 sends as codes.
#pragma once
#include <map>
#include <memory>
#include "../action.h"
#include "../optimizer.h"
#include "../io/machine.h"
#include "../layout.h"
#include "../model.h"
#include "../muon.h"
#include "../offload.h"
#include "../ops/fp8_sent.cuh"
#include "../ops/small_states.cuh"
#include "../ops/tensor_table.cuh"
#include "../pipeline.h"
#include "../sharding.h"
#include "../sizes.h"
#include "../streams.h"
#include "layer_cost.h"
#include "links.h"

namespace llmc {

// ----------------------------------------------------------------------------
// buckets and messages between stages

// Return the bytes that REDUCE sends for each element of a gradient, over the shard's ranks.
inline double gradient_bytes(const Plan& p) {
    return p.gradients == Gradients::FLOAT ? 4
           : p.gradients == Gradients::BF16 ? 2 : fp8_packet_bytes(FP8_BLOCK) / double(FP8_BLOCK);
}

// Return the seconds of REDUCE: over the shard's ranks, then over those that hold the same shard.
inline double reduce_seconds(const CostModel& c, const Plan& p, const Model& model, int bucket) {
    // Ignore the sum of norms and biases over tensor-parallel ranks: it is small.
    const Bucket& b = model.buckets[bucket];
    BucketLinks links = bucket_links(p.layout, c.machine, b.group);
    double elements = whole_elements(p.layout, b);
    double bytes = elements * gradient_bytes(p);
    Range range = updated_range(p.layout, model, bucket);

    // Replicas share out the update of their shard, or all of them have it.
    auto sum_replicas = [&](double shard) {
        return p.layout.weights_near ? links.replica.all_gather(shard)
                                     : links.replica.all_reduce(shard);
    };

    // Codes meet where their shard is; floats go on from there.
    if (p.gradients == Gradients::FP8 && links.shard.n > 1) {
        double shard = 4 * double(shard_elements(p.layout, b));
        double back = range.sharded ? 0 : links.shard.all_gather(4 * elements);
        return links.shard.all_to_all(bytes) + sum_replicas(shard) + back;
    }

    // Without ZeRO every rank gets the whole sum.
    if (!range.sharded)
        return links.shard.all_reduce(bytes) + links.replica.all_reduce(bytes);
    return links.shard.all_gather(bytes) + sum_replicas(bytes / links.shard.n);
}

// Return the seconds of GATHER: the shard's ranks bring a bucket's weights together.
inline double gather_seconds(const CostModel& c, const Plan& p, const Model& model, int bucket) {
    double bytes = gathered_bytes(c, p, model, bucket);
    Group group = model.buckets[bucket].group;
    return bucket_links(p.layout, c.machine, group).shard.all_gather(bytes);
}

// Return the seconds of PUBLISH. Of weights that are near, replicas bring a shard together.
inline double publish_seconds(const CostModel& c, const Plan& p, const Model& model, int bucket) {
    if (!p.layout.weights_near)
        return gather_seconds(c, p, model, bucket);
    const Bucket& b = model.buckets[bucket];
    double bytes = c.element * double(shard_elements(p.layout, b));
    return bucket_links(p.layout, c.machine, b.group).replica.all_gather(bytes);
}

// Return the seconds of UPDATE, where it runs. In this rank's range it reads gradients, reads and
// writes masters and moments, and writes weights. Nothing but memory holds it up: on the host, too.
inline double update_seconds(const CostModel& c, const Plan& p, const Model& model, int bucket,
                             int chunk = -1) {
    // Ignore the scales of 8-bit moments: one for each block of them is too small to count.
    bool whole_masters = c.element == 2 && p.masters == Masters::FLOAT; // then no weight is read
    double each = (whole_masters ? 1 : 2) * c.element + 4;
    if (c.element == 2) each += 2 * master_bytes(p.masters);
    double moment = p.states == States::EIGHT_BIT ? 1 : p.states == States::BF16 ? 2 : 4;
    // Muon reads one moment of nearly all elements.
    size_t states = optimizer_row(p.optimizer).states.size();
    each += 2 * moment * double(model.muon ? 1 : states);
    // The mean of weights is read and written, and weights or masters are read again.
    if (p.ema) each += 12;
    Range range = chunk_of(updated_range(p.layout, model, bucket), p.offload, chunk);
    bool host = p.offload.update == Tier::HOST;
    double rate = host ? c.machine.host_memory_rate() : c.machine.memory_rate();
    return each * double(range.count) / rate;
}

// Return the seconds of NORM: it reads the gradients that this rank updates.
inline double norm_seconds(const CostModel& c, const Plan& p, const Model& model) {
    // Count a tied table on the stage that squares it.
    double elements = 0;
    for (int b = 0; b < int(model.buckets.size()); b++)
        if (is_squared(p.layout, model, b))
            elements += updated_range(p.layout, model, b).count;
    return 4 * elements / c.machine.memory_rate();
}

// Return the seconds of MUON: all ranks wait for the owner with the most to compute, and parts of
// the momentum go to owners and back.
inline double muon_seconds(const CostModel& c, const Plan& p, const Model& model) {
    std::map<int, double> load; // [rank]
    double most = 0, elements = 0;
    for (const MuonMatrix& m : muon_matrices(p.layout, model)) {
        double& flops = load[m.owner] += m.flops();
        most = std::max(most, flops);
        elements += double(muon_part(p.layout, model, m).count);
    }
    double bytes = load.size() > 1 ? 2 * 4 * elements : 0;
    double messages = axis_link(p.layout, c.machine, &Layout::dp).message(bytes);
    return p.layout.muon * most / c.machine.gemm_rate(c.element) + (bytes ? messages : 0);
}

// Return the seconds of `count` messages to another stage at once.
inline double stage_seconds(const CostModel& c, const Plan& p, const Model& model, int count) {
    bool cut = p.layout.sequence_parallel || c.cuts_messages;
    double rows = double(p.rows()) / (cut ? p.layout.tp.size : 1);
    double bytes = rows * model.shape.C * c.element;
    return axis_link(p.layout, c.machine, &Layout::pp).message(count * bytes);
}

// Return the seconds of an exchange with other stages.
inline double exchange_seconds(const CostModel& c, const Plan& p, const Model& model,
                               const Action& a) {
    // Both ways run at once, so the fuller one counts.
    int sent = 0;
    int received = 0;
    for (const Transfer& t : a.transfers)
        (t.send ? sent : received)++;
    return stage_seconds(c, p, model, std::max(sent, received));
}

// Return the parts of TIE: a tied table's two gradients are added here,
// or summed with another stage's.
inline Times tie_seconds(const CostModel& c, const Plan& p, const Model& model, int bucket) {
    // Adding reads two gradients and writes one, in float.
    Times t;
    double bytes = 4 * model.buckets[bucket].elements;
    int ranks = tied_apart(p.layout, model, bucket) ? 2 : 1;
    bool near = axis_in_node(p.layout, c.machine, &Layout::pp) == p.layout.pp.size;
    Link ends = link_of(c.machine, ranks, near ? ranks : 1);
    t.update = 3 * bytes / c.machine.memory_rate();
    t.pipeline = ends.all_reduce(bytes);
    return t;
}

// Return the rate of moves to and from a tier, in bytes per second.
inline double tier_rate(const Machine& machine, Tier tier) {
    return tier == Tier::DISK ? machine.disk_rate() : machine.host_rate();
}

// Return the seconds of a move between tiers, one way.
inline double move_seconds(const CostModel& c, const Plan& p, const Model& model, const Action& a) {
    if (!c.bytes) return 0;

    // Add up the bytes. The rate is that of the tier that they leave the device for, or come from.
    double bytes = 0;
    for (Data d : moved_data(p, model, a))
        bytes += double(c.bytes(p, d));

    // The update has used up a chunk's gradient: it does not go back.
    if (a.chunk >= 0)
        for (Data d : staged_data(p, staged_of(a)))
            if (is_used_up(a, d)) bytes -= double(c.bytes(p, d));
    std::vector<Data> lie = tiered_data(p, model, a);
    return lie.empty() ? 0 : bytes / tier_rate(c.machine, tier_of(p, lie.front()));
}

// ----------------------------------------------------------------------------
// every action

// Return the parts of an action, once all of its ranks have arrived.
inline Times action_seconds(const CostModel& c, const Plan& p, const Model& model,
                            const Action& a) {
    using enum Op;
    Times t;
    double latency = p.layout.world() > 1 ? c.machine.latency_us * 1e-6 : 0;
    switch (a.op) {
    // Layers, including the messages inside them.
    case F:
    case B:
    case I:
    case W:
    case R: return layer_seconds(c, p, model, a);
    case TIE: return tie_seconds(c, p, model, a.bucket);

    // Agreement of all ranks on a few numbers: latency alone.
    case COUNT: t.data = latency; break;
    case NORM:
        t.update = norm_seconds(c, p, model);
        t.data = 2 * latency;
        break;
    // UPDATE counts the bytes of momentum.
    case MUON:
        if (a.chunk < 0) t.update = muon_seconds(c, p, model);
        break;
    case UPDATE: t.update = update_seconds(c, p, model, a.bucket, a.chunk); break;

    // Collectives in the plan's own queue.
    case SENDRECV: t.pipeline = exchange_seconds(c, p, model, a); break;
    case REDUCE: t.data = reduce_seconds(c, p, model, a.bucket); break;
    case GATHER: t.data = gather_seconds(c, p, model, a.bucket); break;
    case PUBLISH: t.data = publish_seconds(c, p, model, a.bucket); break;

    case FETCH:
    case PARK: t.moves = move_seconds(c, p, model, a); break;

    // The host's part takes no time here.
    case LOAD:
    case RELEASE:
    case SQUARE: break;
    }
    return t;
}

// The cost of an action, as the simulator asks for it.
struct ActionCost {
    std::function<Times(const Plan&, const Action&)> of;
    double contention = 0; // what a message takes from layers beside it (machine.h)
};

// Return action_seconds() with a memory: micro-batches repeat each other, in plans of as many.
inline ActionCost action_cost(const CostModel& c, const Model& model) {
    auto known = std::make_shared<std::map<std::array<int, 6>, Times>>();
    auto of = [=](const Plan& p, const Action& a) {
        // Do not remember exchanges and moves: they differ by what they carry.
        bool moves = queue_of(a.op) == Queue::MOVE;
        if (moves || a.op == Op::SENDRECV)
            return action_seconds(c, p, model, a);
        std::array<int, 6> key = {p.layout.pp.rank, int(a.op), a.layer, a.bucket, a.chunk,
                                  p.micro_batches};
        auto found = known->find(key);
        if (found == known->end())
            found = known->emplace(key, action_seconds(c, p, model, a)).first;
        return found->second;
    };
    return {of, c.machine.contention};
}

// Return the costs of this program's own plans on a machine. What moves between tiers of memory has
// the bytes of the arena; `model` must outlive them.
template <typename T, typename S>
CostModel run_costs(const Machine& machine, const Model& model, S where) {
    CostModel cost = {machine, sizeof(T)};
    cost.bytes = [&model, where](const Plan& p, Data d) {
        return data_bytes<T>(p, model, d, where);
    };
    return cost;
}

} // namespace llmc
