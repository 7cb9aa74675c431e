// comm.h - collectives and messages between ranks: threads, MPI, NCCL; started and finished apart - arXiv:1909.08053, arXiv:1910.02054
//   all_reduce_sum, _max (x, n)       x_r = x_0 + x_1 + ... on every rank     PARTIAL -> REPLICATED
//   reduce_scatter_sum (out, in, n)   out (n) = sum over ranks of in[rank]    PARTIAL -> SHARDED
//   all_gather (out, in, n)           out (size, n) = in_0, in_1, ...         SHARDED -> REPLICATED
//   all_to_all (out, in, n)           out[q] (n) = in_q[rank] (n)             SHARDED -> SHARDED
//   broadcast (x, n, root), barrier, exchange (messages, count)
//   n counts elements of float, double, bf16, fp16, int, long or unsigned char. In place: out is in
//   + rank * n (reduce_scatter), in is out + rank * n (all_gather). Each has start_X and finish: in
//   between the buffers belong to the collective. Any number may be outstanding, finished in any
//   order, of different groups too; every rank of a group starts the same ones in the same order
//   (on NCCL exchanges count too).
//   Where it runs: Cpu buffers go over LOCAL or MPI. A stream's go over NCCL, in the stream's
//   order, or over LOCAL, ranks of one process that share a GPU, whose calls wait for the stream.
//   Contract: LOCAL, and MPI and NCCL with fixed_order, add in rank order, float for bf16 and fp16,
//   rounded once: the bits depend on neither timing nor backend. Without fixed_order sums go in the
//   library's order where it has the type. A NaN survives a maximum. A group of one returns on the
//   first line (out of place: a copy). No wait is for ever: see RankInfo::timeout_s.
//   Cost: LOCAL moves each byte of a buffer once in and once out, and ranks work on slices of it.
//   On MPI and NCCL a rank sends (size-1)/size of the buffer, twice for all_reduce; a sum in rank
//   order needs scratch, on MPI a few MiB, on NCCL the size of `in`. Slices are whole cache lines:
//   rank 0 adds a short sum.
//   To copy: this file, comm_local.h, comm_placement.h, comm_group.h and common.h; comm_mpi.h for
//   WITH_MPI, comm_nccl.h for WITH_NCCL.
#pragma once
#include "comm_local.h"
#ifdef WITH_MPI
#include "comm_mpi.h"
#endif
#ifdef WITH_NCCL
#ifndef WITH_MPI
#error "WITH_NCCL needs WITH_MPI, which carries NCCL's first message and what the host exchanges"
#endif
#include "comm_nccl.h"
#endif

// ----------------------------------------------------------------------------
// one core for all collectives: check, start, finish

// End the job with this message, said once.
[[noreturn]] inline void comm_stop(const Comm& c, const std::string& message) {
    if (c.local) local_stop(c, message);
#ifdef WITH_MPI
    if (c.mpi) mpi_stop(message);
#endif
    die(message.c_str());
}

// The group of these members of c, given as ranks in c, in this order; only they call.
inline Comm comm_split(const Comm& c, const std::string& name, const std::vector<int>& places) {
    Comm part = c;
    part.name = name, part.size = int(places.size()), part.rank = -1;
    part.members.clear();
    for (int i = 0; i < part.size; i++) {
        part.members.push_back(c.members[places[i]]);
        if (places[i] == c.rank) part.rank = i;
    }
    CHECK(part.rank >= 0, "rank %d makes the group '%s' without itself", c.rank, name.c_str());
    if (part.size == 1) {
        part.backend = Backend::NONE;
        return part;
    }
    if (c.local) part.local = local_split(c, name, part.members);
#ifdef WITH_MPI
    if (c.mpi) part.mpi = mpi_split(c, places);
#endif
#ifdef WITH_NCCL
    if (c.nccl) part = nccl_attach(part);
#endif
    return part;
}

template <typename S> struct Pending { // a started collective; whoever drops it unfinished fails
    struct Part {
        std::shared_ptr<LocalOp> op;
        int party;
        Call<S> call;
    };
    const Comm* c = nullptr;
    Call<S> call = {};
    S where = {};
    std::vector<Part> parts; // LOCAL: the collective, or each message
#ifdef WITH_MPI
    std::unique_ptr<MpiOp> mpi;
#endif
    Pending() = default;
    Pending(Pending&& other) { *this = std::move(other); }
    Pending& operator=(Pending&& other) {
        std::swap(c, other.c), std::swap(call, other.call), std::swap(where, other.where);
        parts.swap(other.parts);
#ifdef WITH_MPI
        mpi.swap(other.mpi);
#endif
        return *this;
    }
    ~Pending() {
        for (Part& p : parts) local_withdraw(*c, *p.op);
#ifdef WITH_MPI
        if (mpi) mpi_stop(rank_text(*c) + " left " + where_text(*c, call.kind) + " unfinished");
#endif
    }
};

template <typename S> void finish(Pending<S>& p) {
    if (!p.c) return;
    const Comm& c = *p.c;
    for (auto& part : p.parts) local_finish(c, *part.op, part.party, part.call, p.where);
    p.parts.clear();
#ifdef WITH_MPI
    if (p.mpi) mpi_finish(*p.mpi);
    p.mpi.reset();
#endif
    if (p.call.kind != Collective::EXCHANGE) placement_note(c, p.call);
    p.c = nullptr;
}

template <typename S> void finish_now_if_early(Pending<S>& p) {
    if (p.c->local && p.c->local->world->settings.moment == Moment::EARLIEST) finish(p);
}

template <typename S> Pending<S> comm_start(const Comm& c, const Call<S>& call, S where) {
    Pending<S> p;
    if (c.size == 1) {
        if (call.in && call.out) copy_bytes(call.out, call.in, call.bytes(), where);
        return p;
    }
    CHECK(c.local || c.mpi, "the group '%s' has nothing to send with", c.name.c_str());
    if (std::string wrong = placement_check(c, call); !wrong.empty()) comm_stop(c, wrong);
    p.c = &c, p.call = call, p.where = where;
    if (c.local) {
        wait_for(where); // what is given is there
        p.parts.push_back({local_start(c, call), c.rank, call});
    } else if constexpr (std::is_same_v<S, Cpu>) {
#ifdef WITH_MPI
        p.mpi = mpi_start(c, call);
#endif
    } else {
#ifdef WITH_NCCL
        CHECK(c.nccl, "the group '%s' has no NCCL", c.name.c_str());
        if (call.kind == Collective::BARRIER) {
            wait_for(where);
            Pending<Cpu> host = comm_start<Cpu>(c, {call.kind, nullptr, nullptr, 0}, Cpu());
            finish(host);
        } else {
            nccl_collective(c, call, where);
        }
#else
        CHECK(false, "a program built without NCCL cannot send from a GPU");
#endif
    }
    finish_now_if_early(p);
    return p;
}

template <typename S>
Pending<S> start_exchange(const Comm& c, const CommMessage* messages, int count, S where) {
    Pending<S> p;
    CHECK(c.size > 1 || count == 0, "a message in '%s', a group of one", c.name.c_str());
    if (count == 0) return p;
    CHECK(c.local || c.mpi, "the group '%s' has nothing to send with", c.name.c_str());
    p.c = &c, p.call.kind = Collective::EXCHANGE, p.where = where;
    for (int i = 0; i < count; i++)
        CHECK(messages[i].peer >= 0 && messages[i].peer < c.size && messages[i].tag >= 0 &&
                  messages[i].tag < MESSAGE_TAGS,
              "message %d of %d in '%s': peer %d, tag %d", i, count, c.name.c_str(),
              messages[i].peer, messages[i].tag);
    if (c.local) {
        wait_for(where);
        for (int i = 0; i < count; i++) {
            const CommMessage& m = messages[i];
            char* data = static_cast<char*>(m.data);
            Call<S> call = {p.call.kind, m.send ? data : nullptr, m.send ? nullptr : data, m.bytes};
            p.parts.push_back({local_start_message(c, m, call), m.send ? 0 : 1, call});
        }
    } else if constexpr (std::is_same_v<S, Cpu>) {
#ifdef WITH_MPI
        p.mpi = mpi_start_exchange(c, messages, count);
#endif
    } else {
#ifdef WITH_NCCL
        CHECK(c.nccl, "the group '%s' has no NCCL", c.name.c_str());
        nccl_exchange(c, messages, count, where);
#else
        CHECK(false, "a program built without NCCL cannot send from a GPU");
#endif
    }
    finish_now_if_early(p);
    return p;
}

// ----------------------------------------------------------------------------
// the collectives

template <typename T, typename S>
Call<S> typed_call(Collective kind, T* out, const T* in, size_t n, bool max = false) {
    Reduce<S> sum = reduce_ranks<T, false>, maximum = reduce_ranks<T, true>;
    return {kind,
            reinterpret_cast<const char*>(in),
            reinterpret_cast<char*>(out),
            n,
            element_of<T>(),
            0,
            max,
            max ? maximum : sum};
}

template <typename T, typename S>
Pending<S> start_all_reduce_sum(const Comm& c, T* x, size_t n, S where) {
    return comm_start(c, typed_call<T, S>(Collective::ALL_REDUCE, x, x, n), where);
}
template <typename T, typename S>
Pending<S> start_all_reduce_max(const Comm& c, T* x, size_t n, S where) {
    return comm_start(c, typed_call<T, S>(Collective::ALL_REDUCE, x, x, n, true), where);
}
template <typename T, typename S> // out (n), in (size, n)
Pending<S> start_reduce_scatter_sum(const Comm& c, T* out, const T* in, size_t n, S where) {
    return comm_start(c, typed_call<T, S>(Collective::REDUCE_SCATTER, out, in, n), where);
}
template <typename T, typename S> // out (size, n), in (n)
Pending<S> start_all_gather(const Comm& c, T* out, const T* in, size_t n, S where) {
    return comm_start(c, typed_call<T, S>(Collective::ALL_GATHER, out, in, n), where);
}
template <typename T, typename S> // out, in (size, n), apart
Pending<S> start_all_to_all(const Comm& c, T* out, const T* in, size_t n, S where) {
    CHECK(c.size == 1 || n == 0 || in + c.size * n <= out || out + c.size * n <= in,
          "all-to-all on '%s' in place", c.name.c_str());
    return comm_start(c, typed_call<T, S>(Collective::ALL_TO_ALL, out, in, n), where);
}
template <typename T, typename S>
Pending<S> start_broadcast(const Comm& c, T* x, size_t n, int root, S where) {
    Call<S> call = typed_call<T, S>(Collective::BROADCAST, x, x, n);
    call.root = root;
    if (c.rank == root)
        call.out = nullptr;
    else
        call.in = nullptr;
    return comm_start(c, call, where);
}

template <typename T, typename S> void all_reduce_sum(const Comm& c, T* x, size_t n, S where) {
    Pending<S> p = start_all_reduce_sum(c, x, n, where);
    finish(p);
}
template <typename T, typename S> void all_reduce_max(const Comm& c, T* x, size_t n, S where) {
    Pending<S> p = start_all_reduce_max(c, x, n, where);
    finish(p);
}
template <typename T, typename S>
void reduce_scatter_sum(const Comm& c, T* out, const T* in, size_t n, S where) {
    Pending<S> p = start_reduce_scatter_sum(c, out, in, n, where);
    finish(p);
}
template <typename T, typename S>
void all_gather(const Comm& c, T* out, const T* in, size_t n, S where) {
    Pending<S> p = start_all_gather(c, out, in, n, where);
    finish(p);
}
template <typename T, typename S>
void all_to_all(const Comm& c, T* out, const T* in, size_t n, S where) {
    Pending<S> p = start_all_to_all(c, out, in, n, where);
    finish(p);
}
template <typename T, typename S> void broadcast(const Comm& c, T* x, size_t n, int root, S where) {
    Pending<S> p = start_broadcast(c, x, n, root, where);
    finish(p);
}
template <typename S>
void exchange(const Comm& c, const CommMessage* messages, int count, S where) {
    Pending<S> p = start_exchange(c, messages, count, where);
    finish(p);
}
template <typename S> void barrier(const Comm& c, S where) {
    Pending<S> p = comm_start<S>(c, {Collective::BARRIER, nullptr, nullptr, 0}, where);
    finish(p);
}

// Wait for all that `where` was given; on NCCL end the job where a peer does not come.
template <typename S> void wait_for_peers(const Comm& c, S where) {
#ifdef WITH_NCCL
    if constexpr (!std::is_same_v<S, Cpu>)
        if (c.nccl) return nccl_wait(c, where);
#endif
    (void)c;
    wait_for(where);
}

// Every rank must have been given the same text (its options, its binary's hash).
inline void check_same(const Comm& c, const char* what, const std::string& text) {
    uint64_t hash = 14695981039346656037u; // FNV-1a
    for (unsigned char byte : text) hash = (hash ^ byte) * 1099511628211u;
    std::vector<int64_t> all(c.size);
    int64_t mine = int64_t(hash);
    all_gather(c, all.data(), &mine, 1, Cpu());
    for (int r = 1; r < c.size; r++)
        if (all[r] != all[0]) {
            if (c.rank > 0) barrier(c, Cpu()); // the first rank speaks, and ends this wait
            comm_stop(c, std::string(what) + " of " + ranks_text({c.members[r]}) +
                             " is not that of " + ranks_text({c.members[0]}) +
                             ": start all ranks with the same program and options");
        }
}
