// transfers.h - what is in flight: moves between tiers, collectives; and the groups of ranks
//   1. FETCH and PARK   start_move(), and where an update finds its chunk
//   2. collectives      start_flight() and finish_flight(), which step.h's loop calls
//   3. placements       what tests check of each buffer
//   4. groups           make_comms()
#pragma once
#include "action.h"
#include "arena.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "comm/nccl.h"
#include "comm/placement.h"
#include "fp8.h"
#include "layout.h"
#include "model.h"
#include "offload.h"
#include "ops/element_type.h"
#include "ops/ema.cuh"
#include "ops/matmul.cuh"
#include "ops/memory.h"
#include "ops/step_scale.h"
#include "ops/tensor_table.cuh"
#include "ops/types.h"
#include "optimizer.h"
#include "pipeline.h"
#include "quantised.h"
#include "sharding.h"
#include "streams.h"
#include "trainer.h"
#include "zero.h"

namespace llmc {

// ----------------------------------------------------------------------------
// FETCH and PARK
//   A move to or from the host's memory is a copy in a stream of its own; on a CPU it is over when
//   it starts. A move to or from a file is done in blocks by the file's threads, and its finish
//   waits for them.

// Return where a chunk's part of a datum lies; a place of 0 bytes means that there is none.
template <typename T, typename S>
Place part_place(const Trainer<T, S>& t, Data d) {
    const Plan& p = t.plans[t.plan];
    Data home = home_of(p, d);
    const Place* found = arena_find(t.arena, t.plan, t.at, home);
    Place part = found ? *found : Place{};
    if (!found || home == d) return part;

    // Add the chunk's offset, from the start of what this rank keeps of the datum.
    Range range = updated_range(t.layout, t.model, d.of);
    Range chunk = chunk_of(range, p.offload, d.chunk);
    size_t size = d.kind == Kind::WEIGHT ? sizeof(T) : sizeof(acc_t<T>);
    part.offset += (chunk.first - kept_first(t.layout, t.model, home)) * size;
    part.bytes = chunk.count * size;
    return part;
}

// Call f(data, place, staged) for each part of a chunk that has bytes:
// `place` is where it lies, `staged` where FETCH brings it.
template <typename T, typename S, typename F>
void for_each_staged(const Trainer<T, S>& t, const Action& a, F f) {
    // Walk the parts in the order in which sizes.h counts them.
    Data staged = staged_of(a);
    unsigned char* at = address<unsigned char>(t, staged);
    for (Data d : staged_data(t.plans[t.plan], staged)) {
        Place place = part_place(t, d);
        if (!place.bytes) continue; // no master beside wide weights
        f(d, place, at);
        at += round_up(place.bytes, ARENA_ALIGN);
    }
}

// Return an update's operand: this rank's range of it,
// or the chunk in place, or the staged chunk; null if there is none.
template <typename P, typename T, typename S>
P* update_part(const Trainer<T, S>& t, const Action& a, Data wanted) {
    // Without chunks, the whole range is on the device.
    const Plan& p = t.plans[t.plan];
    if (a.chunk < 0)
        return updated_part<P>(t, wanted, updated_range(t.layout, t.model, a.bucket));

    // A chunk lies where the update runs, or in STAGED.
    wanted.chunk = a.chunk;
    if (tier_of(p, wanted) == p.offload.update) {
        Place part = part_place(t, wanted);
        unsigned char* base = t.arena.memory[int(part.tier)].base;
        return part.bytes ? reinterpret_cast<P*>(base + part.offset) : nullptr;
    }
    unsigned char* found = nullptr;
    for_each_staged(t, a, [&](Data d, const Place&, unsigned char* staged) {
        if (d == wanted) found = staged;
    });
    return reinterpret_cast<P*>(found);
}

// Let the mean of `count` updated weights follow them, if the plan keeps one.
template <typename T, typename S, typename W>
void update_mean(const Trainer<T, S>& t, const Action& a, const WeightMemory<T>& weights,
                 size_t count, const StepScale* scale, W where) {
    acc_t<T>* mean = update_part<acc_t<T>>(t, a, {Kind::EMA, a.bucket});
    if (mean)
        ema_update(mean, weights, count, t.hyper.ema, scale, where);
}

// Call f(place, here) for each datum of a move: where it lies, and where the step uses it.
template <typename T, typename S, typename F>
void for_each_moved(const Trainer<T, S>& t, const Action& a, F f) {
    // A chunk moves by its staged parts.
    if (a.chunk >= 0)
        return for_each_staged(t, a, [&](Data d, const Place& place, unsigned char* staged) {
            if (!is_used_up(a, d)) f(place, staged);
        });

    // Move weights and gradients chunk by chunk; of a gradient, the range that this rank updates.
    const Plan& p = t.plans[t.plan];
    if (a.bucket >= 0 && lies_in_chunks(a.kind)) {
        Data whole = moved_data(p, t.model, a)[0];
        unsigned char* here = address<unsigned char>(t, whole);
        Range range = updated_range(t.layout, t.model, a.bucket);
        if (a.kind == Kind::GRAD)
            here = reinterpret_cast<unsigned char*>(updated_part<acc_t<T>>(t, whole, range));
        for (Data d : tiered_data(p, t.model, a)) {
            const Place* place = arena_find(t.arena, t.plan, t.at, d);
            // Padding is in the tier alone, so chunks are dense here.
            f(*place, here);
            here += place->bytes;
        }
        return;
    }

    // Move the activations that are kept: some levels of recomputation keep none of a kind.
    for (Data d : moved_data(p, t.model, a))
        if (const Place* place = arena_find(t.arena, t.plan, t.at, parked(d)))
            f(*place, address<unsigned char>(t, d));
}

// Start a move. The bytes that it touches are free again when its flight is finished.
template <typename T, typename S>
InFlight<S> start_move(Trainer<T, S>& t, const Action& a) {
    // All blocks of an action are one move.
    bool fetches = a.op == Op::FETCH;
    Memory* memory = t.arena.memory;
    auto move = std::make_shared<DiskMove>();

    // Wait for the work that compute has been given: it may still use these bytes.
    S stream = t.offload.stream, compute = t.ctx.where;
    wait_point(record_point(compute), stream);

    // Move each datum, from or to the place where it lies.
    Placements* checked = t.comms.placements();
    for_each_moved(t, a, [&](const Place& place, unsigned char* here) {
        // Make the placement check forget what these bytes held.
        if (checked) placement_forget(*checked, here, place.bytes);

        // A file has no address: its threads take an offset in it.
        Memory& m = memory[int(place.tier)];
        unsigned char* home = m.base + place.offset;
        if (place.tier == Tier::DISK) {
            Way way = fetches ? Way::FROM_DISK : Way::TO_DISK;
            disk_start(*m.disk, move, way, here, place.offset, place.bytes, stream);
            return;
        }

        // Copy towards the device, or away from it.
        // FETCH copies away if the update runs on the host.
        unsigned char* to = fetches ? here : home;
        unsigned char* from = fetches ? home : here;
        bool leaves = fetches == (place.tier == Tier::DEVICE);
        leaves ? copy_out_later(to, from, place.bytes, stream)
               : copy_in(to, from, place.bytes, stream);
    });

    // At the finish, the host waits for a file's blocks, and the stream of compute for all copies.
    InFlight<S> f;
    f.moves = true;
    f.action = t.at;
    if (Disk* disk = memory[int(Tier::DISK)].disk.get()) {
        f.rest = [=] {
            std::string wrong = disk_finish(*disk, *move);
            LLMC_USER_CHECK(wrong.empty(), "--offload-to %s", wrong.c_str());
        };
    } else {
        f.rest = [=, point = record_point(stream)] { wait_point(point, compute); };
    }
    return f;
}

// ----------------------------------------------------------------------------
// collectives of the plan: an action starts one, the loop finishes it when it is due
//   start_flight() begins REDUCE, GATHER, PUBLISH, SENDRECV, or a move between tiers, and
//   finish_before() says where step.h's loop must finish it. One rank alone has none of this.
//   On NCCL each queue has a stream of its own. A flight runs there after all work that compute had
//   been given before its start; its finish makes compute wait. On LOCAL and MPI the host waits.

// On NCCL each queue has a stream, and all of a collective is given to it at the start.
template <typename T, typename S>
bool in_stream_order(const Trainer<T, S>& t) {
    return t.comms.world.nccl != nullptr;
}
template <typename T, typename S>
S comm_where(const Trainer<T, S>& t, Op op) {
    if (!in_stream_order(t)) return t.ctx.where;
    return queue_of(op) == Queue::MESSAGE ? t.streams.message : t.streams.comm;
}

// The gradient of a bucket that REDUCE sums: a micro-batch's, or the step's.
template <typename T, typename S>
acc_t<T>* whole_gradient(const Trainer<T, S>& t, int bucket) {
    bool each = reduced_each(t.layout, t.model, bucket);
    Kind kind = each ? Kind::PARTIAL : summed_kind(t.layout);
    return address<acc_t<T>>(t, {kind, bucket});
}

// ZeRO-2 and 3 reduce a micro-batch's gradient into the step's shard; otherwise REDUCE is in place.
template <typename T, typename S>
InFlight<S> start_reduce(Trainer<T, S>& t, const Action& a) {
    typedef acc_t<T> A;
    A* grad = address<A>(t, {summed_kind(t.layout), a.bucket});
    A* whole = whole_gradient(t, a.bucket);

    // Only the sum of a micro-batch is added to a shard.
    A* shard = reduced_each(t.layout, t.model, a.bucket) ? grad : nullptr;

    // A narrow gradient travels through a buffer of its own.
    void* sent = address<unsigned char>(t, {Kind::SENT, a.bucket});
    Gradients format = t.plans[t.plan].gradients;
    return zero_reduce(t.comms, t.layout, t.model, a.bucket, whole, sent, format, shard, a.first,
                       comm_where(t, a.op));
}

// Bring together the weights that layers are about to read: shards that lie here, or were fetched.
template <typename T, typename S>
InFlight<S> start_gather(Trainer<T, S>& t, const Action& a) {
    T* whole = address<T>(t, {Kind::GATHERED, a.bucket});
    Kind from = t.layout.offload.weights ? Kind::STAGED : Kind::WEIGHT;
    const T* shard = address<const T>(t, {from, a.bucket});
    const Comm& ranks = t.comms.data(t.model.buckets[a.bucket].group).shard;
    S where = comm_where(t, a.op);

    // Gather a narrow frozen bucket as bytes.
    Stored stored = t.plans[t.plan].stored;
    if (is_narrow(stored, t.model, a.bucket)) {
        size_t bytes = stored_range<T>(stored, t.layout, t.model, a.bucket).count;
        auto* all = reinterpret_cast<unsigned char*>(whole);
        auto* own = reinterpret_cast<const unsigned char*>(shard);
        return {start_all_gather(ranks, all, own, bytes, where)};
    }

    // Gather others as codes, if the plan has room for them, or as they are.
    unsigned char* codes = address<unsigned char>(t, {Kind::CODES, a.bucket});
    if constexpr (type_of<T>() == Type::BF16)
        if (codes)
            return gather_codes(t, a.bucket, whole, shard, codes, where);
    size_t count = shard_elements(t.layout, t.model.buckets[a.bucket]);
    return {start_all_gather(ranks, whole, shard, count, where)};
}

// ZeRO-1 and 2: every rank gets the shards that the others have updated. If weights are near, the
// replicas of a shard have updated parts of it, which they gather.
template <typename T, typename S>
InFlight<S> start_publish(Trainer<T, S>& t, const Action& a) {
    Data weight = {Kind::WEIGHT, a.bucket};
    Range range = updated_range(t.layout, t.model, a.bucket);
    T* mine = updated_part<T>(t, weight, range);
    const DataComms& data = t.comms.data(t.model.buckets[a.bucket].group);
    const Comm& ranks = t.layout.weights_near ? data.replica : data.shard;
    return {start_all_gather(ranks, address<T>(t, weight), mine, range.count,
                             comm_where(t, a.op))};
}

// Post all messages of an exchange together, so that no send waits for a receive after it.
template <typename T, typename S>
InFlight<S> start_sendrecv(Trainer<T, S>& t, const Action& a) {
    // A stream has the rows of a micro-batch, or this rank's share of them.
    const Plan& p = t.plans[t.plan];
    bool generates = p.mode == Mode::GENERATE;
    size_t rows = generates ? t.ctx.batch.rows() : p.rows() / t.ctx.shape.rank.rows;
    size_t bytes = rows * t.model.shape.C * sizeof(T);

    std::vector<CommMessage> messages;
    for (const Transfer& x : a.transfers) {
        T* stream = address<T>(t, data_of(t.layout, t.model, x));
        messages.push_back({stream, bytes, x.peer, x.send, x.gradient});
    }

    // Receives and sends end apart: data that arrive are needed first.
    int count = int(messages.size());
    S where = comm_where(t, a.op);
    auto exchange = start_exchange_apart(t.comms.pp, messages.data(), count, where);
    InFlight<S> f;
    f.pending = std::move(exchange.received);
    f.sent = std::move(exchange.sent);
    return f;
}

template <typename T, typename S>
InFlight<S> start_collective(Trainer<T, S>& t, const Action& a) {
    switch (a.op) {
    case Op::SENDRECV: return start_sendrecv(t, a);
    case Op::GATHER: return start_gather(t, a);
    case Op::REDUCE: return start_reduce(t, a);
    default: return start_publish(t, a);
    }
}

// Start a collective or a move; the caller keeps it until finish_before() says that it is needed.
template <typename T, typename S>
InFlight<S> start_flight(Trainer<T, S>& t, const Action& a) {
    if (queue_of(a.op) == Queue::MOVE) return start_move(t, a);

    // Sum what tp ranks share on the compute stream, since layers use the communicator of tp there.
    if (a.op == Op::REDUCE)
        zero_reduce_shared(t.comms, t.layout, t.model, a.bucket, whole_gradient(t, a.bucket),
                           t.ctx.where);

    // A stream of its own must wait for the data that the collective reads.
    bool apart = in_stream_order(t);
    S where = comm_where(t, a.op);
    if (apart)
        wait_point(record_point(t.ctx.where), where);

    // Give such a stream all of the collective now, the rest too, and mark its end.
    InFlight<S> f = start_collective(t, a);
    f.action = t.at;
    if (apart && f.rest) f.rest();
    if (apart) f.arrived = record_point(where);
    return f;
}

// Finish what a collective writes, then what it reads: of an exchange, what it receives and what it
// sends. On NCCL both end at one point: only the compute stream waits there, and `rest` has been
// given to the other stream already.
template <typename T, typename S>
void finish_writes(Trainer<T, S>& t, InFlight<S>& f) {
    finish(f.pending);
    if (in_stream_order(t) && !f.moves)
        wait_point(f.arrived, t.ctx.where);
    else if (f.rest)
        f.rest();
}
template <typename T, typename S>
void finish_flight(Trainer<T, S>& t, InFlight<S>& f) {
    finish_writes(t, f);
    finish(f.sent);
}

// ----------------------------------------------------------------------------
// what an action leaves along each axis of ranks: whole, shards, parts of a sum
//   Only tests use this (comm/placement.h). Every collective is then checked against the placement
//   of its data, so a sum that is left out or made twice gives an error message.

// Record what a range of memory holds along one axis of ranks.
template <typename T, typename S>
void note_placement(Trainer<T, S>& t, Data d, auto* from, size_t count, const std::string& axis,
                    Placement holds) {
    size_t bytes = count * sizeof(*from);
    placement_set(*t.comms.placements(), from, bytes, axis, holds, data_text(d, t.model));
}

// Record a gradient as a partial sum over each axis that will reduce it, range by range.
template <typename T, typename S>
void note_partial(Trainer<T, S>& t, Data d, std::initializer_list<const char*> axes) {
    const Bucket& b = t.model.buckets[d.of];
    acc_t<T>* grad = address<acc_t<T>>(t, d);

    // Data-parallel ranks have seen other samples: all of the gradient is partial.
    size_t whole = whole_elements(t.layout, b);
    for (const char* axis : axes)
        note_placement(t, d, grad, whole, axis, Placement::PARTIAL);
    const std::string& shards = t.comms.data(b.group).shard.name;
    note_placement(t, d, grad, whole, shards, Placement::PARTIAL);

    // Tensor-parallel ranks share only the first ranges of a bucket.
    size_t over_tp = partial_over_tp(t.layout, b);
    size_t of_heads = b.shared - b.common;
    note_placement(t, d, grad, over_tp, "tp", Placement::PARTIAL);
    note_placement(t, d, grad + b.common, of_heads, "kv", Placement::PARTIAL);
}

// Backward passes, and TIE, leave partial gradients.
template <typename T, typename S>
void note_gradients(Trainer<T, S>& t, const Action& a) {
    if (a.op == Op::TIE)
        note_partial(t, {summed_kind(t.layout), a.bucket}, {"replica"});
    if (!reaches_weights(a.op)) return;
    for (int b : buckets_of(t.model, a.layer)) {
        if (!t.model.buckets[b].trainable) continue;
        Kind kind = gradient_kind(t.layout, t.model, b, a.layer);
        note_partial(t, {kind, b}, {"replica", "tie"});
    }
}

// RELEASE gives bytes to any other data. Find where they lay in the last action that read them.
template <typename T, typename S>
void forget_released(Trainer<T, S>& t, const Action& a) {
    if (a.op != Op::RELEASE) return;
    const Place* gathered = nullptr;
    for (int at = t.at; at >= 0 && !gathered; at--)
        gathered = arena_find(t.arena, t.plan, at, {Kind::GATHERED, a.bucket});
    if (!gathered) return;

    unsigned char* base = t.arena.device().base;
    placement_forget(*t.comms.placements(), base + gathered->offset, gathered->bytes);
}

// UPDATE leaves shards of weights.
template <typename T, typename S>
void note_updated(Trainer<T, S>& t, const Action& a) {
    if (a.op != Op::UPDATE) return;

    // Without ZeRO nothing is in shards, and a rank may have no part of a bucket.
    Data weight = {Kind::WEIGHT, a.bucket};
    Range range = updated_range(t.layout, t.model, a.bucket);
    T* mine = updated_part<T>(t, weight, range);
    if (!range.sharded || !mine) return;

    // Name the ranks over which PUBLISH will bring these shards together.
    const DataComms& data = t.comms.data(t.model.buckets[a.bucket].group);
    const Comm& published = t.layout.weights_near ? data.replica : data.shard;
    note_placement(t, weight, mine, range.count, published.name, Placement::SHARDED);
}

// Record the placement that an action leaves behind, if placements are being checked.
template <typename T, typename S>
void note_placements(Trainer<T, S>& t, const Action& a) {
    if (!t.comms.placements()) return;
    note_gradients(t, a);
    forget_released(t, a);
    note_updated(t, a);
}

// ----------------------------------------------------------------------------
// the groups of ranks that a rank works with, made from the layout (layout.h lists them)

// Give the groups that streams send with their communicators; counts and losses go over MPI. All
// ranks of the world must call.
//   world, shard, replica, edp   the plan's collectives: one stream, one after the other
//   pp, tie                      messages of stages, beside those: separate
//   tp, kv; cp; ep               between a layer's products, beside all of the plan's: separate
inline void attach_gpus(Comms& c) {
    // Refuse a library that cannot start communicators side by side in the host's order.
    auto beside = [&](const Comm& part) { return part.size > 1 && part.size < c.world.size; };
    if (beside(c.tp) || beside(c.pp) || c.cp.size > 1 || c.ep.size > 1)
        check_launch_order(c.world);

    // Split the plan's groups from the world: a kind of group has the same size on all ranks.
    auto split = [](Comm& part, const Comm& parent) {
        if (part.size > 1)
            part = nccl_split(part, parent);
    };
    split(c.data(Group::DATA).shard, c.world);
    split(c.data(Group::DATA).replica, c.world);

    // Split an axis that is the only one from the world too, because nothing runs beside it then.
    auto attach = [&](Comm& part) {
        if (part.size == c.world.size)
            split(part, c.world);
        else
            part = nccl_attach(part);
    };
    attach(c.pp);
    if (c.pp.size > 1)
        c.tie = nccl_split(c.tie, c.pp);
    attach(c.tp);
    split(c.kv, c.tp);
    c.cp = nccl_attach(c.cp);
    c.cp_heads = nccl_attach(c.cp_heads);
    c.cp_keys = nccl_attach(c.cp_keys);

    // Sum experts' gradients like others; exchange their rows inside a layer.
    split(c.data(Group::EXPERTS).shard, c.world);
    c.ep = nccl_attach(c.ep);
}

// Make a group of ranks with experts: of a stage's ranks that have the same pieces of experts, or
// whole ones, those of which f is true. Their order is that of routing_axis(), not the grid's.
template <typename F>
Comm split_experts(const Comm& world, const char* name, const Layout& me, F f) {
    std::vector<int> ranks = ranks_where(me, [&](const Layout& o) {
        bool same_stage = o.pp.rank == me.pp.rank;
        bool same_pieces = me.experts.whole || o.tp.rank == me.tp.rank;
        return same_stage && same_pieces && f(o);
    });

    // Neighbours share out the experts.
    auto place = [&](int rank) {
        return routing_axis(layout_at(me, rank)).rank;
    };
    std::ranges::sort(ranks, {}, place);
    return comm_split(world, name, ranks);
}

// Make all groups of this rank. `kv_ranks` divides tp: so many neighbours share a key/value head.
// All ranks of the world must call.
inline Comms make_comms(const Comm& world, const Layout& me, int kv_ranks = 1) {
    using enum Group;
    // A group is a condition on places in the layout: it holds the ranks that satisfy it.
    auto same = [&](Axis Layout::*axis, const Layout& other) {
        return (me.*axis).rank == (other.*axis).rank;
    };
    auto split = [&](const char* name, auto f) {
        return comm_split(world, name, ranks_where(me, f));
    };

    // Ranks of one stage that hold the same pieces of its layers.
    auto stage = [&](const Layout& o) { return same(&Layout::pp, o) && same(&Layout::tp, o); };

    // Ranks of one stage and one piece, which see different tokens.
    Comms c;
    c.world = world;
    c.samples = split("dp", stage);
    c.model = split("model", [&](const Layout& o) {
        return same(&Layout::dp, o);
    });
    Axis replica = replica_axis(me, DATA), shard = shard_axis(me, DATA);
    c.data(DATA).shard = split("shard", [&](const Layout& o) {
        return stage(o) && replica_axis(o, DATA).rank == replica.rank;
    });
    c.data(DATA).replica = split("replica", [&](const Layout& o) {
        return stage(o) && shard_axis(o, DATA).rank == shard.rank;
    });

    // The pipeline, and its two ends.
    auto line = [&](const Layout& o) {
        return same(&Layout::dp, o) && same(&Layout::cp, o) && same(&Layout::tp, o);
    };
    auto is_end = [](const Layout& o) { return o.pp.rank == 0 || o.pp.rank == o.pp.size - 1; };
    c.pp = split("pp", line);
    if (me.pp.size > 1 && is_end(me))
        c.tie = split("tie", [&](const Layout& o) { return line(o) && is_end(o); });

    // Ranks that share each layer.
    auto layer = [&](const Layout& o) {
        return same(&Layout::pp, o) && same(&Layout::dp, o) && same(&Layout::cp, o);
    };
    c.tp = split("tp", layer);
    c.kv = split("kv", [&](const Layout& o) {
        return layer(o) && o.tp.rank / kv_ranks == me.tp.rank / kv_ranks;
    });

    // Ranks that share each sequence. A hybrid divides them twice.
    auto sequence = [&](const Layout& o) { return stage(o) && same(&Layout::dp, o); };
    c.cp = split("cp", sequence);
    Axis heads = heads_axis(me), keys = keys_axis(me);
    if (heads.size > 1 && keys.size > 1) {
        c.cp_heads = split("cp heads", [&](const Layout& o) {
            return sequence(o) && keys_axis(o).rank == keys.rank;
        });
        c.cp_keys = split("cp keys", [&](const Layout& o) {
            return sequence(o) && heads_axis(o).rank == heads.rank;
        });
    }

    // Ranks that hold the same experts, and ranks that together hold all of them.
    Axis experts = expert_axis(me);
    int neighbours = group_axis(me, EXPERTS).rank;
    bool apart = experts.size > 1 || me.experts.whole; // from the groups of other parameters
    if (apart) {
        c.data(EXPERTS).shard = split_experts(world, "edp", me, [&](const Layout& o) {
            return expert_axis(o).rank == experts.rank;
        });
        c.ep = split_experts(world, "ep", me, [&](const Layout& o) {
            return group_axis(o, EXPERTS).rank == neighbours;
        });
    }
    if (world.nccl) attach_gpus(c);

    // Without a hybrid, all of cp exchange heads or share keys.
    if (keys.size == 1) c.cp_heads = c.cp;
    if (heads.size == 1) c.cp_keys = c.cp;

    // Cut experts that are not shared out have the group of all other parameters.
    if (!apart)
        c.data(EXPERTS) = c.data(DATA);
    return c;
}

} // namespace llmc
