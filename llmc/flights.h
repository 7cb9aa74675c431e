// flights.h - collectives of the plan: an action starts one, the loop finishes it when it is due
//   start_flight() begins REDUCE, GATHER, PUBLISH, SENDRECV, or a move between tiers (moves.h), and
//   finish_before() says where step.h's loop must finish it. One rank alone has none of this.
//   On NCCL each queue has a stream of its own. A flight runs there after all work that compute had
//   been given before its start; its finish makes compute wait. On LOCAL and MPI the host waits.
#pragma once
#include "moves.h"

namespace llmc {

// On NCCL each queue has a stream, and all of a collective is given to it at the start.
template <typename T, typename S>
bool in_stream_order(const Trainer<T, S>& t) {
    return t.comms.world.nccl != nullptr;
}
template <typename T, typename S>
S comm_where(const Trainer<T, S>& t, Op op) {
    if (!in_stream_order(t)) return t.ctx.where;
    return queue_of(op) == Queue::MESSAGE ? t.message_stream : t.comm_stream;
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
    Kind from = t.layout.weights_away ? Kind::STAGED : Kind::WEIGHT;
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
    size_t rows = generates ? t.ctx.batch.rows() : p.rows() / t.ctx.shape.row_ranks;
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
