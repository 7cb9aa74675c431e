// nccl.h - ranks are processes with a GPU each: NCCL, all in the stream's order
//   MPI carries NCCL's first message and what hosts exchange. For sums in rank order, GPUs exchange
//   the rounds of mpi.h, and our own kernel adds.
//   A communicator takes memory of the GPU. Groups of the same ranks therefore share one, and a
//   group of fewer ranks is split from a larger one, whose buffers it shares. NCCL runs
//   communicators that share buffers one after the other; those that must run side by side are
//   made apart (transfers.h).
//   All communicators are made before the first collective: making one may wait for the device, on
//   which a collective may wait for a peer that has not arrived.
//   Host order: the ranks of a communicator give it the same calls in the same order, and two
//   communicators that share ranks are called in the same order on each of these ranks.
//   Without WITH_NCCL the same names exist, but nothing calls them: no group has GPUs.
//   To copy: this file, mpi.h, hang_report.h, group.h, rank_status.h, memory.h, gpu.h,
//   elements.h, element_type.h, cuda_common.h and types.h.
#pragma once
#include "../ops/memory.h"
#include "group.h"
#include "hang_report.h"
#include "mpi.h"
#include "rank_status.h"
#ifdef WITH_NCCL
#ifndef WITH_MPI
#error "WITH_NCCL needs WITH_MPI, which carries NCCL's first message and what the host exchanges"
#endif
#include <nccl.h>
#include <set>
#endif

namespace llmc {

#ifdef WITH_NCCL

constexpr bool HAS_NCCL = true;

// Check a call of NCCL. Its calls only queue work; an error of a kernel appears in nccl_wait().
#define LLMC_NCCL_CHECK(call)                                   \
    do {                                                        \
        ncclResult_t nccl_error_ = (call);                      \
        LLMC_CHECK(nccl_error_ == ncclSuccess, "NCCL says: %s", \
                   ncclGetErrorString(nccl_error_));            \
    } while (0)

// A communicator on the current device, for one group or for several with the same ranks.
struct NcclGroup {
    ncclComm_t comm;
    std::string names; // of the groups: "'world', 'shard'"
    RankInfo* info;
    NcclGroup(ncclComm_t comm, const Comm& c)
        : comm(comm), names("'" + c.name + "'"), info(c.info) {
        info->communicators.push_back(this);
    }
    NcclGroup(const NcclGroup&) = delete;
    ~NcclGroup() {
        std::erase(info->communicators, this);
        ncclCommDestroy(comm);
    }
};

// Return NCCL's type of an element. NCCL has all types.
inline ncclDataType_t nccl_type(Element e) {
    // Types stand in the order of Element.
    constexpr ncclDataType_t TYPES[] = {ncclFloat32, ncclBfloat16, ncclFloat16, ncclFloat64,
                                        ncclInt32,   ncclInt64,    ncclUint8};
    return TYPES[int(e)];
}

// ----------------------------------------------------------------------------
// messages and collectives, given to the stream

// Queue one message, between ncclGroupStart and ncclGroupEnd. Both ends leave out an empty one.
inline void nccl_send_receive(const Comm& c, const CommMessage& m, cudaStream_t stream) {
    if (m.bytes == 0) return;
    if (m.send)
        LLMC_NCCL_CHECK(ncclSend(m.data, m.bytes, ncclUint8, m.peer, c.nccl->comm, stream));
    else
        LLMC_NCCL_CHECK(ncclRecv(m.data, m.bytes, ncclUint8, m.peer, c.nccl->comm, stream));
}

// Send and receive messages (count) as one kernel. NCCL has no tags, so the messages of a pair go
// in the order of their tags, and equal tags in the order given.
inline void nccl_exchange(const Comm& c, const CommMessage* messages, int count,
                          cudaStream_t stream) {
    // Sort by tag: both ends of a pair then have the same messages in the same order.
    std::vector<CommMessage> sorted(messages, messages + count);
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](const CommMessage& a, const CommMessage& b) { return a.tag < b.tag; });
    LLMC_NCCL_CHECK(ncclGroupStart());
    for (const CommMessage& m : sorted)
        nccl_send_receive(c, m, stream);
    LLMC_NCCL_CHECK(ncclGroupEnd());
}

// Let the library take a maximum of integers, or of floats as integers in the same order: its own
// maximum of floats may lose a NaN. Returns whether it can for this type.
inline bool nccl_max(const Comm& c, const Call<cudaStream_t>& call, cudaStream_t stream) {
    ncclComm_t comm = c.nccl->comm;
    bool floats = call.element == Element::F32;
    bool integers = call.element >= Element::I32;
    if (!floats && !integers) return false;

    // Turn floats into integers, take the maximum in place, and turn them back.
    ncclDataType_t type = floats ? ncclInt32 : nccl_type(call.element);
    if (floats)
        order_floats<false>(call.out, call.n, stream);
    LLMC_NCCL_CHECK(ncclAllReduce(call.out, call.out, call.n, type, ncclMax, comm, stream));
    if (floats)
        order_floats<true>(call.out, call.n, stream);
    return true;
}

// Let the library do this collective, if it can and may: its sums go in an order of its own.
// Returns whether it does.
inline bool nccl_library(const Comm& c, const Call<cudaStream_t>& call, cudaStream_t stream) {
    ncclComm_t comm = c.nccl->comm;
    ncclDataType_t type = nccl_type(call.element);
    char* x = call.out ? call.out : const_cast<char*>(call.in); // of a broadcast's root

    switch (call.kind) {
    // The library gathers and broadcasts: these move data without arithmetic.
    case Collective::ALL_GATHER:
        LLMC_NCCL_CHECK(ncclAllGather(call.in, call.out, call.n, type, comm, stream));
        return true;
    case Collective::BROADCAST:
        LLMC_NCCL_CHECK(ncclBroadcast(x, x, call.n, type, call.root, comm, stream));
        return true;

    // The library sums in its own order, and may only where any order will do.
    case Collective::ALL_REDUCE:
        if (call.max) return nccl_max(c, call, stream);
        if (c.fixed_order) return false;
        LLMC_NCCL_CHECK(ncclAllReduce(call.in, call.out, call.n, type, ncclSum, comm, stream));
        return true;
    case Collective::REDUCE_SCATTER:
        if (c.fixed_order) return false;
        LLMC_NCCL_CHECK(ncclReduceScatter(call.in, call.out, call.n, type, ncclSum, comm, stream));
        return true;
    default: return false;
    }
}

// Give a collective to the stream: the library's own, or rounds of messages and our sum.
inline void nccl_collective(const Comm& c, const Call<cudaStream_t>& call, cudaStream_t stream) {
    if (nccl_library(c, call, stream)) return;

    // Allocate scratch for what a sum receives: (size, bytes of this rank's range or shard).
    char* scratch = nullptr;
    size_t bytes = scratch_bytes(call, c.size);
    if (bytes)
        LLMC_CUDA_CHECK(cudaMallocAsync(&scratch, bytes, stream));

    // Send and receive in one kernel for each round, and sum between the rounds.
    int rounds = call.kind == Collective::ALL_REDUCE ? 2 : 1;
    for (int round = 0; round < rounds; round++) {
        LLMC_NCCL_CHECK(ncclGroupStart());
        for (int peer = 0; peer < c.size; peer++) {
            if (peer == c.rank) continue;
            PeerBuffers b = peer_buffers(call, c.size, c.rank, peer, round, scratch);
            char* send = const_cast<char*>(b.send);
            nccl_send_receive(c, {send, b.send_bytes, peer, true}, stream);
            nccl_send_receive(c, {b.receive, b.receive_bytes, peer, false}, stream);
        }
        LLMC_NCCL_CHECK(ncclGroupEnd());

        // Sum after the first round; a second round sends the sums to all.
        if (round == 0)
            finish_round(call, c.size, c.rank, scratch, stream);
    }
    if (bytes)
        LLMC_CUDA_CHECK(cudaFreeAsync(scratch, stream));
}

// End the job if a communicator of this rank reports an error, which may be a peer's.
inline void nccl_check_errors(const Comm& c) {
    for (const NcclGroup* group : c.info->communicators) {
        ncclResult_t state = ncclSuccess;
        LLMC_NCCL_CHECK(ncclCommGetAsyncError(group->comm, &state));
        if (state != ncclSuccess && state != ncclInProgress)
            mpi_stop(rank_text(c) + ": NCCL says of " + group->names + ": " +
                     ncclGetErrorString(state) + ", during action " + c.info->action);
    }
}

// Return the groups that streams send with: "'world', 'shard'; 'tp'".
inline std::string nccl_names(const RankInfo& info) {
    std::string text;
    for (const NcclGroup* group : info.communicators)
        text += (text.empty() ? "" : "; ") + group->names;
    return text;
}

// Wait for all work that the stream has been given, and end the job if a peer does not arrive.
inline void nccl_wait(const Comm& c, cudaStream_t stream) {
    NoteWait note(c.info->notes, false);
    LateWait late = {*c.info};
    double start = clock_seconds();
    double limit = c.info->timeout_s;
    for (long polls = 0; cudaStreamQuery(stream) == cudaErrorNotReady; polls++) {
        cudaGetLastError(); // clear "not ready", which is not an error
        nccl_check_errors(c);

        // Sleep between polls after a while, and end the job after the limit.
        if (polls > 1000)
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        double waited = clock_seconds() - start;
        note.sign();
        auto text = [&] {
            return rank_text(c) + " waited " + std::to_string(int(waited)) +
                   " s for its stream, with collectives on " + nccl_names(*c.info) +
                   ", during action " + c.info->action + standing_text(c.info->notes, waited);
        };
        // Only the kernels know which ranks are missing, so the inquiry goes to all machines.
        if (polls > 1000)
            late.look(waited, [] { return std::vector<int>(); }, text);
        if (limit > 0 && waited > limit)
            mpi_stop(text() + late.inquiry.found);
    }
    wait_for(stream); // it is done, or failed: this reports why
}

// ----------------------------------------------------------------------------
// processes and groups

// Return the group with a communicator, its own or a shared one.
inline Comm nccl_group(const Comm& c, std::shared_ptr<NcclGroup> communicator) {
    Comm gpu = c;
    gpu.nccl = std::move(communicator);
    return gpu;
}

// Return the same group with a new communicator, so that streams of the current device can send
// with it, in buffers of its own. All ranks of the group must call together.
inline Comm nccl_attach(const Comm& c) {
    if (c.size == 1) return c;
    // The first rank draws an id, MPI carries it to the others, and all ranks join under it.
    ncclUniqueId id;
    if (c.rank == 0)
        LLMC_NCCL_CHECK(ncclGetUniqueId(&id));
    LLMC_MPI_CHECK(MPI_Bcast(&id, sizeof(id), MPI_BYTE, 0, c.mpi->comm));

    // Let communicators that are split from this one share its buffers.
    ncclComm_t comm;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.splitShare = 1;
    LLMC_NCCL_CHECK(ncclCommInitRankConfig(&comm, c.size, id, c.rank, &config));
    return nccl_group(c, std::make_shared<NcclGroup>(comm, c));
}

// Return the same group with a communicator that shares the buffers of `parent`: the parent's own,
// if both have the same ranks. All ranks of the parent must call, even those outside of the group.
inline Comm nccl_split(const Comm& c, const Comm& parent) {
    if (c.members == parent.members) {
        parent.nccl->names += ", '" + c.name + "'";
        return nccl_group(c, parent.nccl);
    }

    // Ranks with the same color, their first member, form one group.
    ncclComm_t comm = nullptr;
    int color = c.size > 1 ? c.members[0] : NCCL_SPLIT_NOCOLOR;
    LLMC_NCCL_CHECK(ncclCommSplit(parent.nccl->comm, color, c.rank, &comm, nullptr));
    if (c.size == 1) return c;
    return nccl_group(c, std::make_shared<NcclGroup>(comm, c));
}

// Make settings that must come before the first communicator. Collectives of several communicators
// then start in the order in which the host calls them, on every rank, and memory that
// cudaFreeAsync returns stays for the next caller.
inline void nccl_settings(int gpu) {
    // This needs NCCL 2.26 or later. The user's own setting takes precedence.
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
    cudaMemPool_t pool;
    uint64_t all = UINT64_MAX;
    LLMC_CUDA_CHECK(cudaDeviceGetDefaultMemPool(&pool, gpu));
    LLMC_CUDA_CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all));
}

// Return "", or why this version of NCCL is too old for communicators that run side by side, in
// streams of their own. Before 2.26 no setting orders their launches, and ranks may wait for each
// other for ever.
inline std::string launch_order_missing(int version) {
    constexpr int ORDERS_LAUNCHES = 22600; // NCCL_LAUNCH_ORDER_IMPLICIT
    if (version >= ORDERS_LAUNCHES) return "";

    // The library encodes 2.26.1 as 22601.
    auto text = [](int v) {
        return std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100);
    };
    return "NCCL " + text(version) + " is loaded, and --tp, --pp, --cp or --ep beside other axes " +
           "needs " + text(ORDERS_LAUNCHES) + ", which starts communicators in the host's order: " +
           "install a newer libnccl2, or name its folder in LD_LIBRARY_PATH";
}
// Check the library of this rank's machine.
inline void check_launch_order(const Comm& world) {
    int version = 0;
    LLMC_NCCL_CHECK(ncclGetVersion(&version));
    std::string missing = launch_order_missing(version);
    if (!missing.empty())
        mpi_stop(rank_text(world) + ": " + missing);
}

// Take a GPU of this machine for this process, a different one for each process; all ranks of the
// world must call. A launcher may show each process a single GPU, and number 0 then differs between
// processes. Returns "" or what is wrong: NCCL refuses two ranks on one GPU.
inline std::string take_gpu(const Comm& world) {
    // Find this process's place among the processes of its machine.
    MPI_Comm all = world.mpi->comm;
    MPI_Comm machine;
    int place = 0;
    int processes = 0;
    LLMC_MPI_CHECK(
        MPI_Comm_split_type(all, MPI_COMM_TYPE_SHARED, world.rank, MPI_INFO_NULL, &machine));
    LLMC_MPI_CHECK(MPI_Comm_rank(machine, &place));
    LLMC_MPI_CHECK(MPI_Comm_size(machine, &processes));

    // Choose a GPU, and tell the machine's other processes which one it is.
    int gpus = 0;
    LLMC_CUDA_CHECK(cudaGetDeviceCount(&gpus));
    int gpu = place % gpus;
    cudaDeviceProp properties;
    std::vector<cudaUUID_t> taken(processes);
    int id_bytes = sizeof(cudaUUID_t);
    LLMC_CUDA_CHECK(cudaSetDevice(gpu));
    nccl_settings(gpu);
    LLMC_CUDA_CHECK(cudaGetDeviceProperties(&properties, gpu));
    LLMC_MPI_CHECK(MPI_Allgather(&properties.uuid, id_bytes, MPI_BYTE, taken.data(), id_bytes,
                                 MPI_BYTE, machine));
    LLMC_MPI_CHECK(MPI_Comm_free(&machine));

    // Count the GPUs in use: if there are fewer than processes, some share one.
    std::set<std::string> apart;
    for (const cudaUUID_t& id : taken)
        apart.insert(std::string(id.bytes, sizeof(id.bytes)));
    int there = int(apart.size());
    if (there == processes) return "";
    return std::to_string(processes) + " ranks on a machine with " + std::to_string(there) +
           (there == 1 ? " GPU" : " GPUs") +
           ": start one rank a GPU (mpirun --map-by ppr:" + std::to_string(there) +
           ":node), or let threads share a GPU (--local-ranks " + std::to_string(processes) + ")";
}

#else

// ----------------------------------------------------------------------------
// the same names without NCCL

constexpr bool HAS_NCCL = false;
struct NcclGroup {};
template <typename S>
void nccl_collective(const Comm&, const Call<S>&, S) {}
template <typename S>
void nccl_exchange(const Comm&, const CommMessage*, int, S) {}
template <typename S> void nccl_wait(const Comm&, S) {}
inline Comm nccl_attach(const Comm& c) { return c; }
inline Comm nccl_split(const Comm& c, const Comm&) { return c; }
inline void check_launch_order(const Comm&) {}
inline std::string take_gpu(const Comm&) { return ""; }

#endif

} // namespace llmc
