// transfers.h - transfers in flight: between tiers of memory, and collectives
#pragma once
#include "action.h"
#include "arena.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "comm/placement.h"
#include "disk.h"
#include "fp8.h"
#include "layout.h"
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
// what FETCH and PARK do; and lasting data read and written wherever they lie
//   A move to or from the host's memory is a copy in a stream of its own; on a CPU it is over when
//   it starts. A move to or from a file is done in blocks by the file's threads, and its finish
//   waits for them. Checkpoints and initial weights need not know of chunks: read_kept() and
//   fill_kept() walk them.

// ----------------------------------------------------------------------------
// FETCH and PARK

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
    Data staged = {Kind::STAGED, a.bucket, -1, a.chunk};
    unsigned char* at = address<unsigned char>(t, staged);
    for (Data d : staged_data(t.plans[t.plan], a.bucket, a.chunk)) {
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

// Call f(place, here) for each datum of a move:
// `place` is where it lies, `here` where the step uses it.
template <typename T, typename S, typename F>
void for_each_moved(const Trainer<T, S>& t, const Action& a, F f) {
    // A chunk moves by its staged parts. PARK leaves out the gradient, which UPDATE has used up.
    if (a.chunk >= 0)
        return for_each_staged(t, a, [&](Data d, const Place& place, unsigned char* staged) {
            bool used_up = a.op == Op::PARK && d.kind == Kind::GRAD;
            if (!used_up) f(place, staged);
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
// lasting data, wherever they lie

// Return where a datum lies, or its first chunk; null if this rank has none.
template <typename T, typename S>
const Place* kept_place(const Trainer<T, S>& t, Data d) {
    const Place* place = arena_find(t.arena, t.plan, t.at, d);
    if (place) return place;

    // Look for the first chunk of an offloaded bucket.
    d.chunk = 0;
    return arena_find(t.arena, t.plan, t.at, d);
}

// Call f(place, byte, from, count) for each contiguous piece of elements [at, at+count) of type V:
// `byte` is its offset in its tier, `from` its first element, counted from `at`.
template <typename V, typename T, typename S, typename F>
void for_each_piece(const Trainer<T, S>& t, Data d, size_t at, size_t count, F f) {
    // A datum that is not in chunks is one piece.
    const Place* whole = arena_find(t.arena, t.plan, t.at, d);
    if (whole)
        return f(*whole, whole->offset + at * sizeof(V), size_t(0), count);

    // Take from each chunk its share of the range.
    size_t chunk = t.plans[t.plan].offload.chunk;
    for (size_t from = 0; from < count;) {
        d.chunk = int((at + from) / chunk);
        size_t within = (at + from) % chunk, n = std::min(count - from, chunk - within);
        // Chunks of a bucket are not neighbours in their tier.
        const Place* place = arena_find(t.arena, t.plan, t.at, d);
        f(*place, place->offset + within * sizeof(V), from, n);
        from += n;
    }
}

// Copy elements [at, at+count) of a datum to the host.
template <typename V, typename T, typename S>
void read_kept(const Trainer<T, S>& t, V* to, Data d, size_t at, size_t count) {
    // The pieces may lie in several chunks, all in one tier.
    for_each_piece<V>(t, d, at, count, [&](const Place& p, size_t byte, size_t from, size_t n) {
        const Memory& m = t.arena.memory[int(p.tier)];
        size_t bytes = n * sizeof(V);
        switch (p.tier) {
        case Tier::DEVICE: return copy_out(to + from, m.base + byte, bytes, t.ctx.where);
        case Tier::HOST: memcpy(to + from, m.base + byte, bytes); return;
        case Tier::DISK: {
            std::string wrong = disk_read(*m.disk, to + from, byte, bytes);
            LLMC_USER_CHECK(wrong.empty(), "--offload-to %s", wrong.c_str());
        }
        }
    });
}

// Set elements [at, at+count) to value(i), where i counts from 0; done on return.
template <typename V, typename T, typename S, typename F>
void fill_kept(Trainer<T, S>& t, Data d, size_t at, size_t count, F value) {
    for_each_piece<V>(t, d, at, count, [&](const Place& p, size_t byte, size_t from, size_t n) {
        const Memory& m = t.arena.memory[int(p.tier)];
        // Fill in place, except in a file, which has no address.
        V* home = reinterpret_cast<V*>(m.base + byte);
        auto here = [&](size_t i) { return value(from + i); };
        switch (p.tier) {
        case Tier::DEVICE: return fill_memory(home, n, here, t.ctx.where);
        case Tier::HOST: return fill_memory(home, n, here, Cpu{});
        case Tier::DISK: {
            std::vector<V> values(n); // a chunk at most
            fill_memory(values.data(), n, here, Cpu{});
            std::string wrong = disk_write(*m.disk, values.data(), byte, n * sizeof(V));
            LLMC_USER_CHECK(wrong.empty(), "--offload-to %s", wrong.c_str());
        }
        }
    });
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
    bool each = reduced_each(t.layout, t.model, a.bucket);
    A* shard = each ? grad : nullptr;

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
    S where = comm_where(t, a.op);

    // Gather a narrow frozen bucket as bytes.
    Stored stored = t.plans[t.plan].stored;
    if (is_narrow(stored, t.model, a.bucket)) {
        const Comm& ranks = t.comms.data(t.model.buckets[a.bucket].group).shard;
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
    return zero_gather(t.comms, t.layout, t.model, a.bucket, whole, shard, where);
}

// ZeRO-1 and 2: every rank gets the shards that the others have updated.
template <typename T, typename S>
InFlight<S> start_publish(Trainer<T, S>& t, const Action& a) {
    T* weight = address<T>(t, {Kind::WEIGHT, a.bucket});
    return zero_publish(t.comms, t.layout, t.model, a.bucket, weight, comm_where(t, a.op));
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
    if (queue_of(a.op) == Queue::MOVE)
        return start_move(t, a);

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
    if (in_stream_order(t) && !f.moves) {
        wait_point(f.arrived, t.ctx.where);
    } else if (f.rest) {
        f.rest();
    }
}
template <typename T, typename S>
void finish_flight(Trainer<T, S>& t, InFlight<S>& f) {
    finish_writes(t, f);
    finish(f.sent);
}

} // namespace llmc
