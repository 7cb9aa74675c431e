// comm.h - collectives and messages between ranks by threads or MPI or NCCL - arXiv:1909.08053
//   all_reduce_sum, _max (x, n)       x_r = x_0 + x_1 + ... on every rank     PARTIAL -> REPLICATED
//   reduce_scatter_sum (out, in, n)   out (n) = sum over ranks of in[rank]    PARTIAL -> SHARDED
//   all_gather (out, in, n)           out (size, n) = in_0, in_1, ...         SHARDED -> REPLICATED
//   all_to_all (out, in, n)           out[q] (n) = in_q[rank] (n)             SHARDED -> SHARDED
//   broadcast (x, n, root), barrier, exchange (messages, count)
//   n counts elements of float, double, bf16, fp16, int, long or unsigned char. In place means that
//   out is in + rank * n (reduce_scatter), or in is out + rank * n (all_gather).
//   1. start_X   hands over the buffers, which belong to the collective from here on
//   2. finish    waits for the result; the buffers are the caller's again
//   Any number of collectives may be outstanding, in several groups, and they may finish in any
//   order. Every rank of a group must start the same ones in the same order; on NCCL these include
//   its exchanges of messages.
//   Where it runs: Cpu buffers go over LOCAL or MPI. A stream's buffers go over NCCL, in the order
//   of the stream, or over LOCAL (ranks of one process that share a GPU), whose calls wait for it.
//   Contract: LOCAL, and MPI and NCCL with fixed_order, add in rank order, bf16 and fp16 in float,
//   rounded once: the bits depend on neither timing nor backend. Without fixed_order the library
//   sums in its own order, if it has the type. A NaN survives a maximum. A group of one returns on
//   its first line (out of place: a copy). No wait is for ever: see RankInfo::timeout_s.
//   Cost: LOCAL moves each byte of a buffer once in and once out, and the ranks share the work. On
//   MPI and NCCL a rank sends (size-1)/size of the buffer, twice for all_reduce. A sum in rank
//   order needs scratch: on MPI a few MiB, on NCCL the size of `in`. A rank sums whole cache lines,
//   so rank 0 adds a short sum alone.
//   To copy: this file, local.h, mpi.h, nccl.h, hang_report.h, placement.h, group.h,
//   rank_status.h, rand.h, memory.h, gpu.h, elements.h, element_type.h, cuda_common.h and types.h.
#pragma once
#include "../ops/memory.h"
#include "../ops/rand.h"
#include "group.h"
#include "local.h"
#include "mpi.h"
#include "nccl.h"
#include "placement.h"

namespace llmc {

// ----------------------------------------------------------------------------
// groups

// End the job with this message. Of the threads of one process only the first one prints it.
[[noreturn]] inline void comm_stop(const Comm& c, const std::string& message) {
    if (c.local) local_stop(c, message);
    if (c.mpi) mpi_stop(message);
    die("%s", message.c_str());
}

// Make the group of ranks `places` of c, in this order; only these ranks call. Ranks with GPUs also
// need a communicator for their streams: make_comms() (transfers.h) makes it.
inline Comm comm_split(const Comm& c, const std::string& name, const std::vector<int>& places) {
    Comm part = c;
    part.name = name;
    part.size = int(places.size());
    // Members are ranks in the world, so messages give a rank the same name in every group.
    part.rank = -1;
    part.members.clear();
    for (int i = 0; i < part.size; i++) {
        part.members.push_back(c.members[places[i]]);
        if (places[i] == c.rank)
            part.rank = i;
    }
    LLMC_CHECK(part.rank >= 0, "rank %d makes the group '%s' without itself", c.rank, name.c_str());

    // Give the group the backends that c has, except NCCL. A group of one needs none.
    part.nccl = nullptr;
    if (part.size == 1) return part;
    if (c.local)
        part.local = local_split(c, name, part.members);
    if (c.mpi)
        part.mpi = mpi_split(c, places);
    return part;
}

// ----------------------------------------------------------------------------
// start and finish: one core for all collectives

// A started collective. Dropping it unfinished ends the job. It can be moved and never copied: the
// buffers have one owner, who finishes once.
template <typename S> struct Pending {
    struct Part {
        std::shared_ptr<LocalOp> op;
        int party; // this rank's number in op
        Call<S> call;
    };
    const Comm* c = nullptr; // null: nothing is in flight
    Call<S> call = {};
    S where = {};
    std::vector<Part> parts;    // LOCAL: the collective, or each message
    std::unique_ptr<MpiOp> mpi; // MPI: the collective, or all messages

    Pending() = default;
    Pending(Pending&& other) { *this = std::move(other); }
    // Swap: the old collective ends with `other`, which reports it if it was unfinished.
    Pending& operator=(Pending&& other) {
        std::swap(c, other.c);
        std::swap(call, other.call);
        std::swap(where, other.where);
        parts.swap(other.parts);
        mpi.swap(other.mpi);
        return *this;
    }
    // End the job instead of waiting: after an error, a destructor that waits could hang for ever.
    ~Pending() {
        for (Part& p : parts)
            local_withdraw(*c, *p.op);
        if (mpi)
            mpi_stop(rank_text(*c) + " left " + where_text(*c, call.kind) + " unfinished");
    }
};

// Wait for the result. On NCCL the stream waits by itself. A second call does nothing.
template <typename S> void finish(Pending<S>& p) {
    if (!p.c) return;
    // Wait for each part, in the order in which the parts started.
    const Comm& c = *p.c;
    for (auto& part : p.parts)
        local_finish(c, *part.op, part.party, part.call, p.where);
    p.parts.clear();
    if (p.mpi) mpi_finish(*p.mpi);
    p.mpi.reset();

    // Record what the output holds now.
    if (p.call.kind != Collective::EXCHANGE)
        placement_note(c, p.call);
    p.c = nullptr;
}
template <typename S> void finish(Pending<S>&& p) { finish(p); }

// Add to the bytes that this rank has sent in a group, if they are counted.
inline void count_sent(const Comm& c, size_t bytes) {
    if (c.info && c.info->sent)
        (*c.info->sent)[c.name] += bytes;
}

// Finish at once, if a test asks that everything happens in the start. Code that is right only when
// data arrive late fails under this setting, and the reverse under Moment::LATEST.
template <typename S>
void finish_now_if_early(Pending<S>& p) {
    if (p.c && p.c->local && p.c->local->world->settings.moment == Moment::EARLIEST)
        finish(p);
}

// Stop unless the group has a communicator for GPUs.
inline void check_has_nccl(const Comm& c) {
    LLMC_CHECK(c.nccl, "the group '%s' has no NCCL, which a GPU sends with", c.name.c_str());
}

// Give a collective to the stream. NCCL has no barrier: wait for the stream, then meet over MPI.
template <typename S>
void give_to_stream(const Comm& c, const Call<S>& call, S where) {
    check_has_nccl(c);
    if (call.kind != Collective::BARRIER)
        return nccl_collective(c, call, where);
    // A barrier counts only once the stream's work is over.
    wait_for(where);
    std::unique_ptr<MpiOp> barrier = mpi_start(c, {call.kind, nullptr, nullptr, 0});
    mpi_finish(*barrier);
}

// Start a collective. In a group of one, copy the input; nothing is in flight.
template <typename S>
Pending<S> comm_start(const Comm& c, const Call<S>& call, S where) {
    Pending<S> p;

    // Return at once in the common case of one GPU.
    if (c.size == 1) {
        if (call.in && call.out)
            copy_bytes(call.out, call.in, call.bytes(), where);
        return p;
    }

    // Check the call, and count its bytes.
    LLMC_CHECK(c.local || c.mpi, "the group '%s' has nothing to send with", c.name.c_str());
    if (std::string wrong = placement_check(c, call); !wrong.empty())
        comm_stop(c, wrong);
    count_sent(c, call.sent_bytes(c.size));

    // Hand it to the backend.
    p.c = &c;
    p.call = call;
    p.where = where;
    if (c.local) {
        wait_for(where); // until the input is computed
        p.parts.push_back({local_start(c, call), c.rank, call});
    } else if constexpr (std::is_same_v<S, Cpu>) {
        p.mpi = mpi_start(c, call);
    } else {
        give_to_stream(c, call, where);
    }
    finish_now_if_early(p);
    return p;
}

// ----------------------------------------------------------------------------
// messages

// An exchange in two halves: received data may be used while sent data is still in flight.
template <typename S> struct PendingExchange {
    Pending<S> received;
    Pending<S> sent;
};

// Check that peers and tags exist. A group of one has no peer.
inline void check_messages(const Comm& c, const CommMessage* messages, int count) {
    // Messages carry their tag to the backend, where a wrong one would match another message.
    const char* name = c.name.c_str();
    LLMC_CHECK(c.size > 1 || count == 0, "a message in '%s', a group of one", name);
    LLMC_CHECK(c.local || c.mpi || count == 0, "the group '%s' has nothing to send with", name);
    for (int i = 0; i < count; i++) {
        int peer = messages[i].peer;
        int tag = messages[i].tag;
        bool fits = peer >= 0 && peer < c.size && tag >= 0 && tag < MESSAGE_TAGS;
        LLMC_CHECK(fits, "message %d of %d in '%s': peer %d, tag %d", i, count, name, peer, tag);
    }
}

// Begin an exchange. LOCAL waits for the data that a stream computes; NCCL sends all messages after
// that work, as one kernel.
template <typename S>
void begin_exchange(const Comm& c, const CommMessage* messages, int count, S where) {
    check_messages(c, messages, count);
    if (count == 0) return;
    for (int i = 0; i < count; i++)
        count_sent(c, messages[i].send ? messages[i].bytes : 0);
    if (c.local) return wait_for(where);
    // MPI's messages start in start_messages(), where the two halves may be separate.
    if constexpr (!std::is_same_v<S, Cpu>) {
        check_has_nccl(c);
        nccl_exchange(c, messages, count, where);
    }
}

// Start messages that finish together. On NCCL they have been sent already.
template <typename S>
Pending<S> start_messages(const Comm& c, const CommMessage* messages, int count, S where) {
    Pending<S> p;
    if (count == 0) return p;
    // Record the call for finish() and for error messages.
    p.c = &c;
    p.call.kind = Collective::EXCHANGE;
    p.where = where;

    // LOCAL: each message is an operation of two parties, 0 the sender and 1 the receiver.
    for (int i = 0; i < count && c.local; i++) {
        const CommMessage& m = messages[i];
        char* data = static_cast<char*>(m.data);
        Call<S> call = {p.call.kind, m.send ? data : nullptr, m.send ? nullptr : data, m.bytes};
        p.parts.push_back({local_start_message(c, m, call), m.send ? 0 : 1, call});
    }
    // MPI: all messages are one operation.
    if constexpr (std::is_same_v<S, Cpu>)
        if (!c.local)
            p.mpi = mpi_start_exchange(c, messages, count);
    return p;
}

// Start messages (count) to and from peers. Any number run at once, in any order: no rank has to
// receive before it sends.
template <typename S>
Pending<S> start_exchange(const Comm& c, const CommMessage* messages, int count, S where) {
    begin_exchange(c, messages, count, where);
    Pending<S> p = start_messages(c, messages, count, where);
    finish_now_if_early(p);
    return p;
}

// Start messages whose receives and sends finish separately, for a caller who uses what it receives
// before its peers take what it sends. NCCL makes one kernel of an exchange, so both halves end
// together, in the stream's order.
template <typename S>
PendingExchange<S> start_exchange_apart(const Comm& c, const CommMessage* messages, int count,
                                        S where) {
    begin_exchange(c, messages, count, where);
    std::vector<CommMessage> receives, sends;
    for (int i = 0; i < count; i++)
        (messages[i].send ? sends : receives).push_back(messages[i]);

    // Post both halves before either may wait: a peer may finish them in the reverse order.
    PendingExchange<S> p;
    p.received = start_messages(c, receives.data(), int(receives.size()), where);
    p.sent = start_messages(c, sends.data(), int(sends.size()), where);
    finish_now_if_early(p.received);
    finish_now_if_early(p.sent);
    return p;
}

// ----------------------------------------------------------------------------
// the collectives

// Erase the type: n elements of T become bytes, with the function that reduces T.
template <typename T, typename S>
Call<S> typed_call(Collective kind, T* out, const T* in, size_t n, bool max = false) {
    // Name the type of both functions: a conditional alone cannot choose the overload for S.
    Reduce<S> sum = reduce_ranks<T, false>;
    Reduce<S> maximum = reduce_ranks<T, true>;
    Call<S> call = {};
    call.kind = kind;
    call.in = reinterpret_cast<const char*>(in);
    call.out = reinterpret_cast<char*>(out);
    call.n = n;
    call.element = element_of<T>();
    call.max = max;
    call.reduce = max ? maximum : sum;
    return call;
}

// Start a collective: its buffers belong to it until finish(). n counts the elements of one rank.
template <typename T, typename S> // x (n)
Pending<S> start_all_reduce_sum(const Comm& c, T* x, size_t n, S where) {
    return comm_start(c, typed_call<T, S>(Collective::ALL_REDUCE, x, x, n), where);
}
template <typename T, typename S> // out (n), in (size, n)
Pending<S> start_reduce_scatter_sum(const Comm& c, T* out, const T* in, size_t n, S where) {
    return comm_start(c, typed_call<T, S>(Collective::REDUCE_SCATTER, out, in, n), where);
}
template <typename T, typename S> // out (size, n), in (n)
Pending<S> start_all_gather(const Comm& c, T* out, const T* in, size_t n, S where) {
    return comm_start(c, typed_call<T, S>(Collective::ALL_GATHER, out, in, n), where);
}
// Buffers must not overlap: in place, a rank would overwrite what a slower peer has yet to read.
template <typename T, typename S> // out, in (size, n), apart
Pending<S> start_all_to_all(const Comm& c, T* out, const T* in, size_t n, S where) {
    LLMC_CHECK(c.size == 1 || n == 0 || in + c.size * n <= out || out + c.size * n <= in,
          "all-to-all on '%s' in place", c.name.c_str());
    return comm_start(c, typed_call<T, S>(Collective::ALL_TO_ALL, out, in, n), where);
}
// The root only sends, and the others only receive.
template <typename T, typename S> // x (n)
Pending<S> start_broadcast(const Comm& c, T* x, size_t n, int root, S where) {
    Call<S> call = typed_call<T, S>(Collective::BROADCAST, x, x, n);
    call.root = root;
    if (c.rank == root)
        call.out = nullptr;
    else
        call.in = nullptr;
    return comm_start(c, call, where);
}

// Start and finish at once, for what is short or needed immediately.
template <typename T, typename S>
void all_reduce_sum(const Comm& c, T* x, size_t n, S where) {
    finish(start_all_reduce_sum(c, x, n, where));
}
template <typename T, typename S>
void all_reduce_max(const Comm& c, T* x, size_t n, S where) {
    finish(comm_start(c, typed_call<T, S>(Collective::ALL_REDUCE, x, x, n, true), where));
}
template <typename T, typename S>
void reduce_scatter_sum(const Comm& c, T* out, const T* in, size_t n, S where) {
    finish(start_reduce_scatter_sum(c, out, in, n, where));
}
template <typename T, typename S>
void all_gather(const Comm& c, T* out, const T* in, size_t n, S where) {
    finish(start_all_gather(c, out, in, n, where));
}
template <typename T, typename S>
void all_to_all(const Comm& c, T* out, const T* in, size_t n, S where) {
    finish(start_all_to_all(c, out, in, n, where));
}
template <typename T, typename S>
void broadcast(const Comm& c, T* x, size_t n, int root, S where) {
    finish(start_broadcast(c, x, n, root, where));
}
template <typename S>
void exchange(const Comm& c, const CommMessage* messages, int count, S where) {
    finish(start_exchange(c, messages, count, where));
}
// Wait until the last rank has arrived.
template <typename S> void barrier(const Comm& c, S where) {
    finish(comm_start<S>(c, {Collective::BARRIER, nullptr, nullptr, 0}, where));
}

// Wait for all work that `where` was given. On NCCL, end the job if a peer does not arrive: a
// kernel of NCCL has no time limit, so waiting for the stream alone could last for ever.
template <typename S>
void wait_for_peers(const Comm& c, S where) {
    if constexpr (!std::is_same_v<S, Cpu>)
        if (c.nccl) return nccl_wait(c, where);
    wait_for(where);
}

// Check that every rank has the same text: its options, or its program's bytes.
inline void check_same(const Comm& c, const char* what, const std::string& text) {
    // Compare hashes, because texts may be as long as the program.
    std::vector<int64_t> all(c.size);
    int64_t mine = int64_t(fnv1a(text));
    all_gather(c, all.data(), &mine, 1, Cpu());
    for (int r = 1; r < c.size; r++)
        if (all[r] != all[0]) {
            if (c.rank > 0) barrier(c, Cpu()); // the first rank reports it, and ends this wait
            comm_stop(c, std::string(what) + " of " + ranks_text({c.members[r]}) +
                             " is not that of " + ranks_text({c.members[0]}) +
                             ": start all ranks with the same program and options");
        }
}

} // namespace llmc
