// comm_mpi.h - ranks are processes that send each other messages by MPI; sums in rank order
//   all_reduce: 1. a rank gets its slice from everyone, adds in rank order; 2. gives it to
//   everyone. The others need one round: reduce_scatter the first of these, all_gather and
//   all_to_all no sum. A long sum goes part by part: its scratch is MpiGroup::scratch bytes, and
//   kept. Only the thread that initialised MPI calls. While a rank waits for one
//   collective it carries on all that it has outstanding: a peer may need their second round first.
//   To copy: this file, comm_group.h and common.h.
#pragma once
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>
#include <unistd.h>
#include <thread>
#include "comm_group.h"
#ifdef _OPENMP
#include <omp.h>
#endif

// ----------------------------------------------------------------------------
// what a rank and a peer give each other, for MPI and for NCCL

struct Share { // what a rank and one peer give each other in a round
    const char* send;
    size_t send_bytes;
    char* receive;
    size_t receive_bytes;
};

template <typename S> const char* share_in(const Call<S>& call, int rank) {
    return call.in + rank * (call.stride ? call.stride : call.n) * call.unit();
}

template <typename S>
Share share_of(const Call<S>& call, int size, int rank, int peer, int round, char* scratch) {
    size_t bytes = call.bytes(), unit = call.unit();
    Slice mine = slice_of(call.n, size, rank), theirs = slice_of(call.n, size, peer);
    size_t from = mine.from * unit, count = mine.count * unit;
    size_t their_from = theirs.from * unit, their_count = theirs.count * unit;
    switch (call.kind) {
    case Collective::ALL_REDUCE:
        if (round == 0) return {call.in + their_from, their_count, scratch + peer * count, count};
        return {call.out + from, count, call.out + their_from, their_count};
    case Collective::REDUCE_SCATTER:
        return {share_in(call, peer), bytes, scratch + peer * bytes, bytes};
    case Collective::ALL_TO_ALL:
        return {call.in + peer * bytes, bytes, call.out + peer * bytes, bytes};
    case Collective::BROADCAST:
        if (rank == call.root) return {call.in, bytes, nullptr, 0};
        return {nullptr, 0, call.out, peer == call.root ? bytes : 0};
    case Collective::ALL_GATHER:
    case Collective::BARRIER: return {call.in, bytes, call.out + peer * bytes, bytes};
    case Collective::EXCHANGE: break;
    }
    return {nullptr, 0, nullptr, 0};
}

template <typename S> bool sums(const Call<S>& call) {
    return call.kind == Collective::ALL_REDUCE || call.kind == Collective::REDUCE_SCATTER;
}
template <typename S> size_t scratch_bytes(const Call<S>& call, int size) {
    if (!sums(call)) return 0;
    if (call.kind == Collective::REDUCE_SCATTER) return call.in_bytes(size);
    return slice_of(call.n, size, 0).count * size * call.unit();
}

// The part of a collective that begins with element `at`: of a sum, as much as `scratch` bytes hold.
template <typename S> Call<S> sum_part(const Call<S>& call, int size, size_t at, size_t scratch) {
    if (!sums(call)) return call;
    bool all = call.kind == Collective::ALL_REDUCE;
    size_t fits = scratch / (size * call.unit()), most = fits / 64 * 64; // of one rank's slice
    if (all) most *= size;
    Call<S> part = call;
    part.in += at * call.unit(), part.out += at * call.unit();
    part.n = std::min(call.n - at, std::max(most, size_t(64))), part.stride = call.n;
    return part;
}

// After the first round: what came in and my own part, summed in rank order; or my own part's copy.
template <typename S>
void share_finish(const Call<S>& call, int size, int rank, char* scratch, S where) {
    size_t bytes = call.bytes();
    if (sums(call)) {
        bool all = call.kind == Collective::ALL_REDUCE;
        Slice mine = all ? slice_of(call.n, size, rank) : Slice{0, call.n};
        std::vector<const void*> ins(size);
        for (int r = 0; r < size; r++) ins[r] = scratch + r * mine.count * call.unit();
        ins[rank] = all ? call.in + mine.from * call.unit() : share_in(call, rank);
        void* out = call.out + (all ? mine.from * call.unit() : 0);
        call.reduce(&out, 1, ins.data(), size, mine.count, where);
    } else if (call.kind == Collective::ALL_GATHER) {
        copy_bytes(call.out + rank * bytes, call.in, bytes, where);
    } else if (call.kind == Collective::ALL_TO_ALL) {
        copy_bytes(call.out + rank * bytes, call.in + rank * bytes, bytes, where);
    }
}

// ----------------------------------------------------------------------------
// MPI

#define MPI_CHECK(call)                                                       \
    do {                                                                      \
        int mpi_error_ = (call);                                              \
        CHECK(mpi_error_ == MPI_SUCCESS, "MPI returns error %d", mpi_error_); \
    } while (0)

struct MpiGroup {
    MPI_Comm comm;
    int started = 0;                            // collectives
    size_t most = size_t(1) << 30;              // bytes of one MPI message: its counts are ints
    size_t scratch = size_t(1) << 20;           // bytes of a sum that are on their way at once
    std::vector<std::unique_ptr<char[]>> spare; // such scratch, of sums that are over
    explicit MpiGroup(MPI_Comm comm) : comm(comm) {}
    ~MpiGroup() {
        int over = 0;
        MPI_Finalized(&over);
        if (!over) MPI_Comm_free(&comm);
    }
};

struct MpiOp { // a collective or an exchange on its way
    const Comm* c;
    Call<Cpu> call;        // of an exchange: its kind alone
    Call<Cpu> part = {};   // that is on its way
    size_t parts_done = 0; // in elements
    int tag, round = 0;
    bool done = false;
    std::vector<MPI_Request> requests;
    std::vector<int> waits_for; // the rank in the world whose data a request awaits; -1: it sends
    std::unique_ptr<char[]> scratch;
    std::vector<char> barrier; // a byte to and from everyone
};

[[noreturn]] inline void mpi_stop(const std::string& message) {
    fprintf(stderr, "train_gpt: error: %s\n", message.c_str());
    fflush(stderr);
    MPI_Abort(MPI_COMM_WORLD, 1);
    abort();
}

// One message, in parts.
inline void mpi_post(MpiOp& op, const CommMessage& m, int tag) {
    size_t most = op.c->mpi->most;
    for (size_t at = 0; at < m.bytes; at += most) {
        char* part = static_cast<char*>(m.data) + at;
        int count = int(std::min(most, m.bytes - at));
        MPI_Request request;
        MPI_Comm comm = op.c->mpi->comm;
        if (m.send)
            MPI_CHECK(MPI_Isend(part, count, MPI_BYTE, m.peer, tag, comm, &request));
        else
            MPI_CHECK(MPI_Irecv(part, count, MPI_BYTE, m.peer, tag, comm, &request));
        op.requests.push_back(request);
        op.waits_for.push_back(m.send ? -1 : op.c->members[m.peer]);
    }
}

inline void mpi_post_round(MpiOp& op) { // receives first: what comes has a place
    const Comm& c = *op.c;
    for (bool send : {false, true})
        for (int step = 1; step < c.size; step++) {
            int peer = (c.rank + (send ? step : c.size - step)) % c.size;
            Share s = share_of(op.part, c.size, c.rank, peer, op.round, op.scratch.get());
            if (send)
                mpi_post(op, {const_cast<char*>(s.send), s.send_bytes, peer, true},
                         op.tag + op.round);
            else
                mpi_post(op, {s.receive, s.receive_bytes, peer, false}, op.tag + op.round);
        }
}

inline MPI_Datatype mpi_type(Element e) { // of those that MPI can add
    switch (e) {
    case Element::F32: return MPI_FLOAT;
    case Element::F64: return MPI_DOUBLE;
    case Element::I32: return MPI_INT32_T;
    case Element::I64: return MPI_INT64_T;
    default: return MPI_DATATYPE_NULL; // bytes too: Open MPI's vectorised sum stops at 255
    }
}

// Whether the library can and may do this sum by itself, in its own order.
inline bool mpi_sum(MpiOp& op) {
    const Call<Cpu>& call = op.call;
    MPI_Datatype type = mpi_type(call.element);
    bool all = call.kind == Collective::ALL_REDUCE;
    if (op.c->fixed_order || !sums(call) || type == MPI_DATATYPE_NULL || call.n > INT32_MAX)
        return false;
    if (call.max) return false;                          // the library's may lose a NaN
    if (!all && call.in_place(op.c->size)) return false; // MPI's place for it is another
    op.requests.emplace_back();
    op.waits_for.push_back(-1);
    const void* in = all && call.in == call.out ? MPI_IN_PLACE : call.in;
    auto start = all ? MPI_Iallreduce : MPI_Ireduce_scatter_block;
    MPI_CHECK(start(in, call.out, int(call.n), type, MPI_SUM, op.c->mpi->comm, &op.requests[0]));
    op.round = 2;
    return true;
}

// For a sum, of any kind and length; given back when it is over.
inline std::unique_ptr<char[]> mpi_scratch(MpiGroup& g, int size) {
    if (g.spare.empty())
        return std::unique_ptr<char[]>(new char[std::max(g.scratch, size_t(64 * 8) * size)]);
    std::unique_ptr<char[]> scratch = std::move(g.spare.back());
    g.spare.pop_back();
    return scratch;
}

inline std::unique_ptr<MpiOp> mpi_start(const Comm& c, const Call<Cpu>& call) {
    int tag = MESSAGE_TAGS + 2 * (c.mpi->started++ % 8192);
    auto op = std::make_unique<MpiOp>();
    op->c = &c, op->call = call, op->tag = tag;
    if (call.kind == Collective::BARRIER) {
        op->barrier.resize(1 + c.size);
        op->call.n = 1;
        op->call.in = op->barrier.data();
        op->call.out = op->barrier.data() + 1;
    }
    if (!mpi_sum(*op)) {
        if (sums(call)) op->scratch = mpi_scratch(*c.mpi, c.size);
        op->part = sum_part(op->call, c.size, 0, c.mpi->scratch);
        mpi_post_round(*op);
    }
    c.info->outstanding.push_back(op.get());
    return op;
}

inline std::unique_ptr<MpiOp> mpi_start_exchange(const Comm& c, const CommMessage* messages,
                                                 int count) {
    auto op = std::make_unique<MpiOp>();
    op->c = &c, op->call.kind = Collective::EXCHANGE, op->round = 2;
    for (bool send : {false, true})
        for (int i = 0; i < count; i++)
            if (messages[i].send == send) mpi_post(*op, messages[i], messages[i].tag);
    c.info->outstanding.push_back(op.get());
    return op;
}

// Whether something has come to its end.
inline bool mpi_advance(MpiOp& op) {
    int arrived = 0;
    if (op.done) return false;
    MPI_CHECK(
        MPI_Testall(int(op.requests.size()), op.requests.data(), &arrived, MPI_STATUSES_IGNORE));
    if (!arrived) return false;
    op.requests.clear(), op.waits_for.clear();
    const Comm& c = *op.c;
    if (op.round == 0) share_finish(op.part, c.size, c.rank, op.scratch.get(), Cpu());
    op.round++;
    bool more = op.round == 1 && op.call.kind == Collective::ALL_REDUCE;
    if (!more) {
        op.parts_done += op.part.n, op.round = 0;
        op.done = !op.scratch || op.parts_done == op.call.n;
        op.part = op.done ? op.part : sum_part(op.call, c.size, op.parts_done, c.mpi->scratch);
    }
    if (!op.done)
        mpi_post_round(op);
    else if (op.scratch)
        c.mpi->spare.push_back(std::move(op.scratch));
    return true;
}

// A peer may need the second round of one collective before it starts what I wait for: all that is
// outstanding goes on.
inline void mpi_finish(MpiOp& op) {
    const Comm& c = *op.c;
    double start = clock_seconds(), limit = c.info->timeout_s;
    for (long polls = 0;; polls++) {
        for (MpiOp* other : c.info->outstanding)
            if (mpi_advance(*other)) polls = 0, start = clock_seconds();
        if (op.done) break;
        if (polls < 1000) continue;
        std::this_thread::sleep_for(std::chrono::microseconds(polls < 10000 ? 20 : 500));
        double waited = clock_seconds() - start;
        if (limit <= 0 || waited < limit) continue;
        std::vector<int> missing;
        for (size_t i = 0; i < op.requests.size(); i++) {
            int here = 1;
            if (op.waits_for[i] >= 0)
                MPI_CHECK(MPI_Request_get_status(op.requests[i], &here, MPI_STATUS_IGNORE));
            bool listed = std::count(missing.begin(), missing.end(), op.waits_for[i]);
            if (!here && !listed) missing.push_back(op.waits_for[i]);
        }
        std::sort(missing.begin(), missing.end());
        mpi_stop(overdue_text(c, op.call.kind, waited, missing));
    }
    std::erase(c.info->outstanding, &op);
}

// A process takes its share of the machine's cores, or fewer where it is bound to fewer.
inline void mpi_share_cores(MPI_Comm world) {
#ifdef _OPENMP
    if (getenv("OMP_NUM_THREADS")) return;
    MPI_Comm machine;
    int ranks = 1;
    MPI_CHECK(MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine));
    MPI_CHECK(MPI_Comm_size(machine, &ranks));
    MPI_CHECK(MPI_Comm_free(&machine));
    int share = int(sysconf(_SC_NPROCESSORS_ONLN)) / ranks;
    omp_set_num_threads(std::max(1, std::min(omp_get_num_procs(), share)));
#else
    (void)world;
#endif
}

// Every process of the job calls; MPI_Init_thread has been called.
inline Comm mpi_world(RankInfo& info) {
    Comm c;
    MPI_Comm comm;
    mpi_share_cores(MPI_COMM_WORLD);
    MPI_CHECK(MPI_Comm_dup(MPI_COMM_WORLD, &comm));
    MPI_CHECK(MPI_Comm_rank(comm, &c.rank));
    MPI_CHECK(MPI_Comm_size(comm, &c.size));
    c.mpi = std::make_shared<MpiGroup>(comm);
    c.backend = c.size > 1 ? Backend::MPI : Backend::NONE;
    c.members.resize(c.size);
    for (int r = 0; r < c.size; r++) c.members[r] = r;
    c.info = &info;
    this_rank = info.rank = c.rank;
    return c;
}

inline std::shared_ptr<MpiGroup> mpi_split(const Comm& c, const std::vector<int>& places) {
    MPI_Group all, part;
    MPI_Comm comm;
    MPI_CHECK(MPI_Comm_group(c.mpi->comm, &all));
    MPI_CHECK(MPI_Group_incl(all, int(places.size()), places.data(), &part));
    MPI_CHECK(MPI_Comm_create_group(c.mpi->comm, part, 0, &comm));
    MPI_CHECK(MPI_Group_free(&all));
    MPI_CHECK(MPI_Group_free(&part));
    return std::make_shared<MpiGroup>(comm);
}
