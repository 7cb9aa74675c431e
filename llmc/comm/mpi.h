// mpi.h - ranks are processes that send each other messages by MPI; sums in rank order
//   all-reduce        round 0  send each rank its range of the input; sum this rank's own range
//                              over all ranks, in rank order
//                     round 1  send the sum to all
//   reduce-scatter    round 0 alone
//   all-gather, all-to-all, broadcast, barrier: one round without a sum
//   A long sum runs part by part, in MpiGroup::scratch bytes of scratch, kept for the next sum.
//   Only the thread that initialised MPI may call. A rank that waits for one collective also
//   advances its other outstanding ones, because a peer may need their second round first.
//   Without WITH_MPI the same names exist, but nothing calls them: no group has processes.
//   To copy: this file, hang_report.h, group.h, rank_status.h, elements.h, element_type.h,
//   cuda_common.h and types.h.
#pragma once
#ifdef WITH_MPI
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>
#include <unistd.h>
#endif
#include <thread>
#include "group.h"
#include "hang_report.h"
#include "rank_status.h"

namespace llmc {

// ----------------------------------------------------------------------------
// the messages of a round between a rank and a peer, for MPI and for NCCL

// The buffers of one pair of ranks; null with 0 bytes if nothing goes that way.
struct PeerBuffers {
    const char* send; // (send_bytes)
    size_t send_bytes;
    char* receive; // (receive_bytes)
    size_t receive_bytes;
};

// Return where rank's shard begins in the input of a reduce-scatter. If the call is a part of a
// longer one, shards are `stride` elements apart; with stride 0 they touch.
template <typename S>
const char* shard_in(const Call<S>& call, int rank) {
    return call.in + rank * (call.stride ? call.stride : call.n) * call.unit();
}

// Return what a rank and a peer send each other in a round. `scratch` (size, bytes of this rank's
// range or shard) receives the inputs of a sum, by the rank they come from.
template <typename S>
PeerBuffers peer_buffers(const Call<S>& call, int size, int rank, int peer, int round,
                         char* scratch) {
    using enum Collective;
    // Find both ranks' ranges of the elements, in bytes.
    size_t bytes = call.bytes();
    size_t unit = call.unit();
    ElementRange mine = range_of(call.n, size, rank);
    ElementRange theirs = range_of(call.n, size, peer);
    size_t my_first = mine.first * unit;
    size_t my_bytes = mine.count * unit;
    size_t their_first = theirs.first * unit;
    size_t their_bytes = theirs.count * unit;

    // Choose the buffers by what the collective moves.
    switch (call.kind) {
    case ALL_REDUCE: // round 0: inputs to the rank that sums them; round 1: the sums
        if (round == 0)
            return {call.in + their_first, their_bytes, scratch + peer * my_bytes, my_bytes};
        return {call.out + my_first, my_bytes, call.out + their_first, their_bytes};
    case REDUCE_SCATTER:
        return {shard_in(call, peer), bytes, scratch + peer * bytes, bytes};

    // Copies go straight to their place in the output.
    case ALL_TO_ALL:
        return {call.in + peer * bytes, bytes, call.out + peer * bytes, bytes};
    case BROADCAST:
        if (rank == call.root) return {call.in, bytes, nullptr, 0};
        return {nullptr, 0, call.out, peer == call.root ? bytes : 0};
    case ALL_GATHER:
    case BARRIER: return {call.in, bytes, call.out + peer * bytes, bytes};
    case EXCHANGE: break;
    }
    return {nullptr, 0, nullptr, 0};
}

// Whether a collective adds. Only such a call needs scratch, and only such a call runs in parts.
template <typename S> bool sums(const Call<S>& call) {
    return call.kind == Collective::ALL_REDUCE || call.kind == Collective::REDUCE_SCATTER;
}

// Return the bytes of scratch that a sum of the whole length would take.
template <typename S>
size_t scratch_bytes(const Call<S>& call, int size) {
    if (!sums(call)) return 0;
    // Take rank 0's range: it is the largest if the ranges are not equal.
    if (call.kind == Collective::REDUCE_SCATTER)
        return call.in_bytes(size);
    return range_of(call.n, size, 0).count * size * call.unit();
}

// Return the part of a collective that begins with element `at`. A sum takes as many elements as
// fit `scratch` bytes; anything else runs whole.
template <typename S>
Call<S> sum_part(const Call<S>& call, int size, size_t at, size_t scratch) {
    if (!sums(call)) return call;
    // Cut at multiples of 64 elements, so that ranges are whole cache lines.
    size_t fits = scratch / (size * call.unit()); // elements of one rank's range or shard
    size_t most = fits / 64 * 64;
    if (call.kind == Collective::ALL_REDUCE)
        most *= size;

    // Move in and out to the part; shards keep the distance that they have in the whole call.
    Call<S> part = call;
    part.in += at * call.unit();
    part.out += at * call.unit();
    part.n = std::min(call.n - at, std::max(most, size_t(64)));
    part.stride = call.n;
    return part;
}

// Finish the first round: add this rank's own input and those that have arrived, in rank order, or
// copy this rank's own input to its place.
template <typename S>
void finish_round(const Call<S>& call, int size, int rank, char* scratch, S where) {
    size_t bytes = call.bytes();
    if (sums(call)) {
        // Point at each rank's contribution; this rank's own is still in its input.
        bool all = call.kind == Collective::ALL_REDUCE;
        ElementRange mine = all ? range_of(call.n, size, rank) : ElementRange{0, call.n};
        size_t first = mine.first * call.unit();
        std::vector<const void*> ins(size); // (size) of mine.count elements
        for (int r = 0; r < size; r++)
            ins[r] = scratch + r * mine.count * call.unit();
        ins[rank] = all ? call.in + first : shard_in(call, rank);

        // Sum them into this rank's range or shard.
        void* out = call.out + first;
        call.reduce(&out, 1, ins.data(), size, mine.count, where);
    } else if (call.kind == Collective::ALL_GATHER) {
        copy_bytes(call.out + rank * bytes, call.in, bytes, where);
    } else if (call.kind == Collective::ALL_TO_ALL) {
        copy_bytes(call.out + rank * bytes, call.in + rank * bytes, bytes, where);
    }
}

#ifdef WITH_MPI

// ----------------------------------------------------------------------------
// a collective in flight over MPI

constexpr bool HAS_MPI = true;

// Check a call of MPI. By default MPI itself aborts on an error; this is for a program that has
// told it not to.
#define LLMC_MPI_CHECK(call)                                                       \
    do {                                                                           \
        int mpi_error_ = (call);                                                   \
        LLMC_CHECK(mpi_error_ == MPI_SUCCESS, "MPI returns error %d", mpi_error_); \
    } while (0)

// A group's own communicator, so that its messages never meet another group's. It must not be freed
// after MPI_Finalize, so the destructor asks.
struct MpiGroup {
    MPI_Comm comm;
    int started = 0;                            // collectives
    size_t most = size_t(1) << 30;              // bytes of one MPI message: its counts are ints
    size_t scratch = size_t(1) << 20;           // bytes of a sum that are in flight at once
    std::vector<std::unique_ptr<char[]>> spare; // (scratch) each, kept from finished sums

    explicit MpiGroup(MPI_Comm comm) : comm(comm) {}
    ~MpiGroup() {
        int over = 0;
        MPI_Finalized(&over);
        if (!over) MPI_Comm_free(&comm);
    }
};

// A collective or an exchange that has started and is not finished.
struct MpiOp {
    const Comm* c;
    Call<Cpu> call;        // for an exchange, only its kind
    Call<Cpu> part = {};   // the part that is in flight
    size_t parts_done = 0; // elements
    int tag;
    int round = 0;
    bool done = false;
    std::vector<MPI_Request> requests;
    std::vector<int> waits_for; // by request: the rank in the world that sends; -1: it is a send
    std::unique_ptr<char[]> scratch;
    std::vector<char> barrier; // (1 + size): a byte to everyone, a byte from each
};

// End all processes of the job with this message. Peers are killed where they wait, so the message
// must be out before the abort.
[[noreturn]] inline void mpi_stop(const std::string& message) {
    fprintf(stderr, "%s: error: %s\n", program_invocation_short_name, message.c_str());
    fflush(stderr);
    MPI_Abort(MPI_COMM_WORLD, 1);
    abort();
}

// Post one message, in pieces if it is longer than MPI's counts.
inline void mpi_post(MpiOp& op, const CommMessage& m, int tag) {
    // The pieces share a tag: MPI keeps the order of a pair's messages.
    MPI_Comm comm = op.c->mpi->comm;
    size_t most = op.c->mpi->most;
    for (size_t at = 0; at < m.bytes; at += most) {
        char* part = static_cast<char*>(m.data) + at;
        int count = int(std::min(most, m.bytes - at));

        // Keep the request, and whom it waits for.
        MPI_Request request;
        if (m.send)
            LLMC_MPI_CHECK(MPI_Isend(part, count, MPI_BYTE, m.peer, tag, comm, &request));
        else
            LLMC_MPI_CHECK(MPI_Irecv(part, count, MPI_BYTE, m.peer, tag, comm, &request));
        op.requests.push_back(request);
        op.waits_for.push_back(m.send ? -1 : op.c->members[m.peer]);
    }
}

// Post a round. Receives come first, so that messages that arrive have a place.
inline void mpi_post_round(MpiOp& op) {
    const Comm& c = *op.c;
    int tag = op.tag + op.round;
    char* scratch = op.scratch.get();

    // Begin with a different peer on each rank: rank r receives from r - 1 while it sends to r + 1,
    // so no rank is the first peer of all others.
    for (int step = 1; step < c.size; step++) {
        int peer = (c.rank + c.size - step) % c.size;
        PeerBuffers b = peer_buffers(op.part, c.size, c.rank, peer, op.round, scratch);
        mpi_post(op, {b.receive, b.receive_bytes, peer, false}, tag);
    }
    for (int step = 1; step < c.size; step++) {
        int peer = (c.rank + step) % c.size;
        PeerBuffers b = peer_buffers(op.part, c.size, c.rank, peer, op.round, scratch);
        mpi_post(op, {const_cast<char*>(b.send), b.send_bytes, peer, true}, tag);
    }
}

// ----------------------------------------------------------------------------
// start

// Return the type in which MPI may add, or null. bf16 and fp16 have none, because MPI would round
// after each addition, and our own sum rounds once. Bytes have none, because Open MPI's vectorised
// sum of bytes stops at 255.
inline MPI_Datatype mpi_type(Element e) {
    switch (e) {
    case Element::F32: return MPI_FLOAT;
    case Element::F64: return MPI_DOUBLE;
    case Element::I32: return MPI_INT32_T;
    case Element::I64: return MPI_INT64_T;
    default: return MPI_DATATYPE_NULL;
    }
}

// Let the library do this sum in its own order, if it can and may. Returns whether it does.
inline bool mpi_sum(MpiOp& op) {
    // Refuse what the library cannot do, or does in a way that breaks the contract.
    const Call<Cpu>& call = op.call;
    MPI_Datatype type = mpi_type(call.element);
    bool all = call.kind == Collective::ALL_REDUCE;
    if (op.c->fixed_order || !sums(call) || type == MPI_DATATYPE_NULL || call.n > INT32_MAX)
        return false;
    if (call.max) return false;                          // the library's may lose a NaN
    if (!all && call.in_place(op.c->size)) return false; // MPI wants the output elsewhere

    // Post it as one request, marked as the last round.
    op.requests.emplace_back();
    op.waits_for.push_back(-1);
    op.round = 2;
    int n = int(call.n);
    const void* in = all && call.in == call.out ? MPI_IN_PLACE : call.in;
    auto start = all ? MPI_Iallreduce : MPI_Ireduce_scatter_block;
    LLMC_MPI_CHECK(start(in, call.out, n, type, MPI_SUM, op.c->mpi->comm, &op.requests[0]));
    return true;
}

// Return scratch for a part of any sum; it goes to `spare` when the sum is over. The minimum is one
// step of sum_part(): 64 elements of at most 8 bytes from each rank.
inline std::unique_ptr<char[]> mpi_scratch(MpiGroup& g, int size) {
    if (g.spare.empty())
        return std::unique_ptr<char[]>(new char[std::max(g.scratch, size_t(64 * 8) * size)]);
    std::unique_ptr<char[]> scratch = std::move(g.spare.back());
    g.spare.pop_back();
    return scratch;
}

// Start a collective, as one request of the library or as rounds of messages.
inline std::unique_ptr<MpiOp> mpi_start(const Comm& c, const Call<Cpu>& call) {
    // Tags repeat after 8192 collectives, far more than are outstanding at once.
    auto op = std::make_unique<MpiOp>();
    op->c = &c;
    op->call = call;
    op->tag = MESSAGE_TAGS + 2 * (c.mpi->started++ % 8192); // a tag a round, beyond messages' tags

    // Turn a barrier into a gather of one byte from everyone.
    if (call.kind == Collective::BARRIER) {
        op->barrier.resize(1 + c.size);
        op->call.n = 1;
        op->call.in = op->barrier.data();
        op->call.out = op->barrier.data() + 1;
    }

    // Post the first round of the first part.
    if (!mpi_sum(*op)) {
        if (sums(call))
            op->scratch = mpi_scratch(*c.mpi, c.size);
        op->part = sum_part(op->call, c.size, 0, c.mpi->scratch);
        mpi_post_round(*op);
    }
    c.info->outstanding.push_back(op.get());
    return op;
}

// Start messages (count), receives first. They have no rounds: the operation is over when
// all messages are.
inline std::unique_ptr<MpiOp> mpi_start_exchange(const Comm& c, const CommMessage* messages,
                                                 int count) {
    // Mark it as past the rounds of a sum (2), so that mpi_advance() only waits.
    auto op = std::make_unique<MpiOp>();
    op->c = &c;
    op->call.kind = Collective::EXCHANGE;
    op->round = 2;
    for (bool send : {false, true})
        for (int i = 0; i < count; i++)
            if (messages[i].send == send)
                mpi_post(*op, messages[i], messages[i].tag);
    c.info->outstanding.push_back(op.get());
    return op;
}

// ----------------------------------------------------------------------------
// finish

// Advance a collective that is in flight: a round, then the next round, then the next part.
// Returns whether a round has ended.
inline bool mpi_advance(MpiOp& op) {
    // Test all requests at once: MPI moves messages only while it is called.
    if (op.done) return false;
    int arrived = 0;
    int n = int(op.requests.size());
    LLMC_MPI_CHECK(MPI_Testall(n, op.requests.data(), &arrived, MPI_STATUSES_IGNORE));
    if (!arrived) return false;
    op.requests.clear();
    op.waits_for.clear();

    // Sum what the first round brought.
    const Comm& c = *op.c;
    if (op.round == 0)
        finish_round(op.part, c.size, c.rank, op.scratch.get(), Cpu());
    op.round++;

    // After the last round, begin the next part.
    bool more = op.round == 1 && op.call.kind == Collective::ALL_REDUCE;
    if (!more) {
        op.parts_done += op.part.n;
        op.round = 0;
        op.done = !op.scratch || op.parts_done == op.call.n;
        if (!op.done)
            op.part = sum_part(op.call, c.size, op.parts_done, c.mpi->scratch);
    }

    // Post the next round, or keep the scratch for the next sum.
    if (!op.done)
        mpi_post_round(op);
    else if (op.scratch)
        c.mpi->spare.push_back(std::move(op.scratch));
    return true;
}

// Return the ranks in the world whose messages have not arrived, in order.
inline std::vector<int> mpi_missing(const MpiOp& op) {
    // Look at receives only: a late peer shows in what it owes this rank.
    std::vector<int> missing;
    for (size_t i = 0; i < op.requests.size(); i++) {
        int here = 1;
        if (op.waits_for[i] >= 0)
            LLMC_MPI_CHECK(MPI_Request_get_status(op.requests[i], &here, MPI_STATUS_IGNORE));
        bool listed = std::count(missing.begin(), missing.end(), op.waits_for[i]);
        if (!here && !listed)
            missing.push_back(op.waits_for[i]);
    }
    std::sort(missing.begin(), missing.end());
    return missing;
}

// Seconds for which a rank that waits polls before it sleeps, and then sleeps briefly.
constexpr double MPI_POLL_S = 3e-4, MPI_NAP_S = 0.5;

// Finish one collective, and advance all others: a peer may need their second round before it
// starts this one.
inline void mpi_finish(MpiOp& op) {
    const Comm& c = *op.c;
    NoteWait note(c.info->notes);
    LateWait late = {*c.info};
    double start = clock_seconds();
    double limit = c.info->timeout_s;
    while (true) {
        // Poll everything. Reset the clock whenever a round ends: the job is alive.
        for (MpiOp* other : c.info->outstanding)
            if (mpi_advance(*other)) start = clock_seconds();
        if (op.done) break;

        // A sleep takes longer than many polls, so that two ranks that sleep early keep each other
        // waiting. A yield would leave the core to another program for as long as that likes.
        double waited = clock_seconds() - start;
        if (waited < MPI_POLL_S) continue;

        // Sleep, and end the job after the limit.
        std::this_thread::sleep_for(std::chrono::microseconds(waited < MPI_NAP_S ? 20 : 500));
        note.sign();
        auto missing = [&] { return mpi_missing(op); };
        auto text = [&] { return overdue_text(c, op.call.kind, waited, missing()); };
        late.look(waited, missing, text);
        if (limit > 0 && waited >= limit)
            mpi_stop(text() + late.inquiry.found);
    }
    std::erase(c.info->outstanding, &op);
}

// ----------------------------------------------------------------------------
// processes and groups

// Use this process's share of its machine's cores, or fewer if it is bound to fewer.
inline void mpi_share_cores(MPI_Comm world) {
    if (getenv("OMP_NUM_THREADS")) return;
    // Count the ranks that share this machine's memory.
    MPI_Comm machine;
    int ranks = 1;
    LLMC_MPI_CHECK(MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine));
    LLMC_MPI_CHECK(MPI_Comm_size(machine, &ranks));
    LLMC_MPI_CHECK(MPI_Comm_free(&machine));
    int cores = int(sysconf(_SC_NPROCESSORS_ONLN));
    use_threads(std::min(cores_here(), cores / ranks));
}

// Share notes with the ranks of this machine. MPI_Finalize frees the memory.
inline void mpi_share_notes(MPI_Comm world, RankInfo& info) {
    // Find the ranks of this machine. A test may divide it into several.
    MPI_Comm machine;
    MPI_Win window;
    int rank = 0, ranks = 1, unit = 0;
    LLMC_MPI_CHECK(MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine));
    if (info.machine_ranks) {
        int part = info.rank / info.machine_ranks;
        LLMC_MPI_CHECK(MPI_Comm_split(MPI_COMM_WORLD, part, info.rank, &machine));
    }

    // Let the first rank of the machine allocate the memory for all.
    LLMC_MPI_CHECK(MPI_Comm_rank(machine, &rank));
    LLMC_MPI_CHECK(MPI_Comm_size(machine, &ranks));
    // Ask where it lies in this rank's addresses. All ranks see it at the same offset in a page,
    // but a note may not be able to begin there. Room for one more note lets all ranks move on to
    // an aligned address.
    size_t notes = size_t(ranks) * sizeof(RankNote), room = notes + sizeof(RankNote);
    MPI_Aint bytes = rank == 0 ? MPI_Aint(room) : 0;
    void* memory = nullptr;
    LLMC_MPI_CHECK(
        MPI_Win_allocate_shared(bytes, 1, MPI_INFO_NULL, machine, &memory, &window));
    LLMC_MPI_CHECK(MPI_Win_shared_query(window, 0, &bytes, &unit, &memory));

    // Make this rank's note, and wait until all notes are made.
    RankNote* all = static_cast<RankNote*>(std::align(alignof(RankNote), notes, memory, room));
    info.notes = {all, ranks, new (all + rank) RankNote()};
    info.notes.own->since = clock_seconds();
    info.notes.own->rank = info.rank;
    LLMC_MPI_CHECK(MPI_Barrier(machine));
    open_hotline(world, machine, info);
}

// Return the job's processes as a group. All processes must call, after MPI_Init_thread.
inline Comm mpi_world(RankInfo& info) {
    Comm c;
    // Duplicate the world's communicator: other libraries may use the original.
    MPI_Comm comm;
    mpi_share_cores(MPI_COMM_WORLD);
    LLMC_MPI_CHECK(MPI_Comm_dup(MPI_COMM_WORLD, &comm));
    LLMC_MPI_CHECK(MPI_Comm_rank(comm, &c.rank));
    LLMC_MPI_CHECK(MPI_Comm_size(comm, &c.size));

    c.mpi = std::make_shared<MpiGroup>(comm);
    c.members.resize(c.size);
    for (int r = 0; r < c.size; r++)
        c.members[r] = r;
    c.info = &info;
    this_rank = info.rank = c.rank;
    mpi_share_notes(comm, info);
    return c;
}

// Make the group of these ranks of c, in this order; only these ranks call.
inline std::shared_ptr<MpiGroup> mpi_split(const Comm& c, const std::vector<int>& places) {
    // Use MPI_Comm_create_group, which only the members call; MPI_Comm_split would need all
    // ranks of c.
    MPI_Group all, part;
    MPI_Comm comm;
    LLMC_MPI_CHECK(MPI_Comm_group(c.mpi->comm, &all));
    LLMC_MPI_CHECK(MPI_Group_incl(all, int(places.size()), places.data(), &part));
    LLMC_MPI_CHECK(MPI_Comm_create_group(c.mpi->comm, part, 0, &comm));
    LLMC_MPI_CHECK(MPI_Group_free(&all));
    LLMC_MPI_CHECK(MPI_Group_free(&part));
    return std::make_shared<MpiGroup>(comm);
}

// Initialise MPI, which may take options of its own from the program's. FUNNELED: threads of this
// process compute, and one of them calls MPI. mpi_leave() comes last, when no group is left.
inline Comm mpi_join(RankInfo& info, int* argc, char*** argv) {
    int given = 0;
    LLMC_MPI_CHECK(MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &given));
    return mpi_world(info);
}
inline void mpi_leave() { LLMC_MPI_CHECK(MPI_Finalize()); }

#else

// ----------------------------------------------------------------------------
// the same names without MPI

constexpr bool HAS_MPI = false;
struct MpiGroup {};
struct MpiOp {};
[[noreturn]] inline void mpi_stop(const std::string& message) { die("%s", message.c_str()); }
inline std::unique_ptr<MpiOp> mpi_start(const Comm&, const Call<Cpu>&) { return nullptr; }
inline std::unique_ptr<MpiOp> mpi_start_exchange(const Comm&, const CommMessage*, int) {
    return nullptr;
}
inline void mpi_finish(MpiOp&) {}
inline std::shared_ptr<MpiGroup> mpi_split(const Comm&, const std::vector<int>&) { return nullptr; }
inline Comm mpi_join(RankInfo&, int*, char***) { return {}; }
inline void mpi_leave() {}

#endif

} // namespace llmc
