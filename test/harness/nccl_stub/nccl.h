// nccl.h - stands for NCCL where there is no GPU: the same calls carried by MPI, and a list of them
//   A call is a piece of its stream's work (emulator_streams.h). It ends when its peers have come;
//   until then streams that do not wait for it go on, and so do all of them while the host waits
//   for other ranks by itself. Calls on one communicator run in the order of their issue, whatever
//   their streams, as in NCCL; calls on two communicators have no order but that of their streams.
//   Only the thread that initialised MPI may wait for streams with calls.
//   To build with it: -DWITH_NCCL -DWITH_MPI -DEMULATE -Itest/harness/nccl_stub.
#pragma once
#include <climits>
#include <cstring>
#include <mpi.h>
#include <set>
#include <string>
#include <vector>

// ----------------------------------------------------------------------------
// the names of the library's header that the project uses

// clang-format off
enum ncclResult_t { ncclSuccess, ncclUnhandledCudaError, ncclRemoteError = 6, ncclInProgress };
enum ncclDataType_t {
    ncclUint8, ncclInt32, ncclInt64, ncclFloat16, ncclFloat32, ncclFloat64, ncclBfloat16
};
// clang-format on
enum ncclRedOp_t { ncclSum, ncclMax };
struct ncclUniqueId {
    char internal[128];
};
struct ncclConfig_t {
    int splitShare;
};
#define NCCL_CONFIG_INITIALIZER {INT_MIN}
#define NCCL_SPLIT_NOCOLOR (-1)

// A communicator, numbered in the order of this rank's making.
struct ncclComm {
    MPI_Comm mpi;
    int number;
    bool shares; // its parts share its buffers
    ncclResult_t error = ncclSuccess;
    emulator::MarkPointer last = nullptr;        // behind its last call
    const emulator::Graph* captured = nullptr; // the graph that has the last call, if one has
};
typedef ncclComm* ncclComm_t;

namespace nccl_stub {
inline std::vector<std::string> calls; // of this process: "init 4", "split 0: 2", "all-reduce on 1"
inline std::vector<ncclComm_t> made;   // null: destroyed
inline std::vector<std::vector<int>> members; // of each made: ranks in the world
inline std::vector<std::set<cudaStream_t>> streams; // of each made: where it was used
struct Message {
    void* data;
    size_t bytes;
    int peer;
    bool send;
    ncclComm_t comm;
    cudaStream_t stream;
};
inline std::vector<Message> messages; // of the group of calls that is open

inline void note(const std::string& what, ncclComm_t comm, cudaStream_t stream) {
    streams[size_t(comm->number)].insert(stream);
    calls.push_back(what + " on " + std::to_string(comm->number));
}

// Queue a call. post() starts it over MPI, and finish() runs when it has ended.
typedef std::vector<MPI_Request> Requests;
template <typename P, typename F>
ncclResult_t give(ncclComm_t comm, cudaStream_t stream, P post, F finish) {
    auto requests = std::make_shared<Requests>(); // empty: not posted
    emulator::Piece call;
    call.run = [=] {
        if (requests->empty()) *requests = post();
        int over = 0;
        PMPI_Testall(int(requests->size()), requests->data(), &over, MPI_STATUSES_IGNORE);
        if (!over) return false;
        requests->clear(); // a graph may run it again
        return finish(), true;
    };

    // Keep it behind the communicator's last call. A graph has only its own calls to wait for.
    if (comm->last && comm->captured == emulator::capture) emulator::push_wait(stream, comm->last);
    emulator::push(stream, std::move(call));
    comm->last = emulator::push_mark(stream);
    comm->captured = emulator::capture;
    return ncclSuccess;
}
template <typename P> ncclResult_t give(ncclComm_t comm, cudaStream_t stream, P post) {
    return give(comm, stream, post, [] {});
}
inline ncclResult_t made_of(MPI_Comm mpi, bool shares, ncclComm_t* comm) {
    *comm = new ncclComm{mpi, int(made.size()), shares};
    made.push_back(*comm);

    // Note the members by their numbers in the world.
    MPI_Group some, all;
    int size;
    MPI_Comm_group(mpi, &some);
    MPI_Comm_group(MPI_COMM_WORLD, &all);
    MPI_Group_size(some, &size);
    std::vector<int> here(size_t(size), 0), there(here);
    for (int i = 0; i < size; i++) here[size_t(i)] = i;
    MPI_Group_translate_ranks(some, size, here.data(), all, there.data());
    MPI_Group_free(&some);
    MPI_Group_free(&all);
    members.push_back(there);
    streams.emplace_back();
    return ncclSuccess;
}
inline MPI_Datatype mpi_type(ncclDataType_t t) {
    const MPI_Datatype types[] = {MPI_UINT8_T, MPI_INT32_T, MPI_INT64_T, MPI_UINT16_T,
                                  MPI_FLOAT,   MPI_DOUBLE,  MPI_UINT16_T};
    return types[t];
}
} // namespace nccl_stub

inline const char* ncclGetErrorString(ncclResult_t r) {
    return r == ncclSuccess ? "no error" : r == ncclRemoteError ? "remote process exited" : "error";
}
namespace nccl_stub {
inline int version = 22600; // the first that orders launches
}
inline ncclResult_t ncclGetVersion(int* version) {
    return *version = nccl_stub::version, ncclSuccess;
}
inline ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
    return *error = comm->error, ncclSuccess;
}

// ----------------------------------------------------------------------------
// communicators

// The id names the rank that drew it: there the others meet.
inline ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    memcpy(id->internal, &rank, sizeof(rank));
    return ncclSuccess;
}

inline ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                           ncclConfig_t* config) {
    // Tell the one who drew the id who this is, and hear who all are.
    int root, self;
    constexpr int TAG = 7;
    memcpy(&root, id.internal, sizeof(root));
    MPI_Comm_rank(MPI_COMM_WORLD, &self);
    std::vector<int> members(size_t(ranks), self);
    if (self == root) {
        for (int i = 1; i < ranks; i++) {
            int place[2];
            MPI_Recv(place, 2, MPI_INT, MPI_ANY_SOURCE, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            members[size_t(place[0])] = place[1];
        }
        for (int i = 1; i < ranks; i++)
            MPI_Send(members.data(), ranks, MPI_INT, members[size_t(i)], TAG + 1, MPI_COMM_WORLD);
    } else {
        int place[2] = {rank, self};
        MPI_Send(place, 2, MPI_INT, root, TAG, MPI_COMM_WORLD);
        MPI_Recv(members.data(), ranks, MPI_INT, root, TAG + 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }

    // Make the group; only its members call.
    MPI_Group all, some;
    MPI_Comm mpi;
    MPI_Comm_group(MPI_COMM_WORLD, &all);
    MPI_Group_incl(all, ranks, members.data(), &some);
    MPI_Comm_create_group(MPI_COMM_WORLD, some, TAG, &mpi);
    MPI_Group_free(&all);
    MPI_Group_free(&some);
    nccl_stub::calls.push_back("init " + std::to_string(ranks));
    return nccl_stub::made_of(mpi, config->splitShare == 1, comm);
}

// A null configuration is the parent's: parts share what the parent shares.
inline ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* comm,
                                  ncclConfig_t*) {
    MPI_Comm mpi;
    int size = 0;
    MPI_Comm_split(parent->mpi, color == NCCL_SPLIT_NOCOLOR ? MPI_UNDEFINED : color, key, &mpi);
    if (mpi != MPI_COMM_NULL) MPI_Comm_size(mpi, &size);
    std::string what = parent->shares ? "split " : "split without sharing ";
    nccl_stub::calls.push_back(what + std::to_string(parent->number) + ": " + std::to_string(size));
    if (mpi == MPI_COMM_NULL) return *comm = nullptr, ncclSuccess;
    return nccl_stub::made_of(mpi, parent->shares, comm);
}

inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    emulator::run_own_streams();
    nccl_stub::made[size_t(comm->number)] = nullptr;
    MPI_Comm_free(&comm->mpi);
    delete comm;
    return ncclSuccess;
}

// ----------------------------------------------------------------------------
// messages and collectives

inline ncclResult_t ncclGroupStart() { return ncclSuccess; }
inline ncclResult_t ncclSend(const void* data, size_t n, ncclDataType_t, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    nccl_stub::note("send to " + std::to_string(peer), comm, stream);
    nccl_stub::messages.push_back({const_cast<void*>(data), n, peer, true, comm, stream});
    return ncclSuccess;
}
inline ncclResult_t ncclRecv(void* data, size_t n, ncclDataType_t, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    nccl_stub::note("receive from " + std::to_string(peer), comm, stream);
    nccl_stub::messages.push_back({data, n, peer, false, comm, stream});
    return ncclSuccess;
}
inline ncclResult_t ncclGroupEnd() {
    std::vector<nccl_stub::Message> messages = std::move(nccl_stub::messages);
    nccl_stub::messages.clear();
    if (messages.empty()) return ncclSuccess;
    return nccl_stub::give(messages[0].comm, messages[0].stream, [=] {
        nccl_stub::Requests requests(messages.size());
        for (size_t i = 0; i < messages.size(); i++) {
            const nccl_stub::Message& m = messages[i];
            int n = int(m.bytes);
            if (m.send)
                MPI_Isend(m.data, n, MPI_BYTE, m.peer, 0, m.comm->mpi, &requests[i]);
            else
                MPI_Irecv(m.data, n, MPI_BYTE, m.peer, 0, m.comm->mpi, &requests[i]);
        }
        return requests;
    });
}

inline ncclResult_t ncclAllGather(const void* in, void* out, size_t n, ncclDataType_t type,
                                  ncclComm_t comm, cudaStream_t stream) {
    nccl_stub::note("all-gather", comm, stream);
    MPI_Datatype t = nccl_stub::mpi_type(type);
    int rank, unit;
    MPI_Comm_rank(comm->mpi, &rank);
    MPI_Type_size(t, &unit);
    bool in_place = in == static_cast<char*>(out) + size_t(rank) * n * size_t(unit);
    return nccl_stub::give(comm, stream, [=] {
        nccl_stub::Requests all(1);
        const void* from = in_place ? MPI_IN_PLACE : in;
        MPI_Iallgather(from, int(n), t, out, int(n), t, comm->mpi, &all[0]);
        return all;
    });
}
inline ncclResult_t ncclBroadcast(const void*, void* out, size_t n, ncclDataType_t type, int root,
                                  ncclComm_t comm, cudaStream_t stream) {
    nccl_stub::note("broadcast", comm, stream);
    return nccl_stub::give(comm, stream, [=] {
        nccl_stub::Requests all(1);
        MPI_Ibcast(out, int(n), nccl_stub::mpi_type(type), root, comm->mpi, &all[0]);
        return all;
    });
}
// Floats of 16 bits have no sum in MPI: the project sums them in rank order under this stub.
inline ncclResult_t ncclAllReduce(const void*, void* out, size_t n, ncclDataType_t type,
                                  ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    nccl_stub::note(op == ncclMax ? "maximum" : "all-reduce", comm, stream);
    return nccl_stub::give(comm, stream, [=] {
        nccl_stub::Requests all(1);
        MPI_Iallreduce(MPI_IN_PLACE, out, int(n), nccl_stub::mpi_type(type),
                       op == ncclMax ? MPI_MAX : MPI_SUM, comm->mpi, &all[0]);
        return all;
    });
}
inline ncclResult_t ncclReduceScatter(const void* in, void* out, size_t n, ncclDataType_t type,
                                      ncclRedOp_t, ncclComm_t comm, cudaStream_t stream) {
    nccl_stub::note("reduce-scatter", comm, stream);
    int rank, size, unit;
    MPI_Datatype t = nccl_stub::mpi_type(type);
    MPI_Comm_rank(comm->mpi, &rank);
    MPI_Comm_size(comm->mpi, &size);
    MPI_Type_size(t, &unit);

    // Sum a copy: the shard of an input in place is written while others still read theirs.
    size_t bytes = n * size_t(unit);
    auto sum = std::make_shared<std::vector<char>>(bytes * size_t(size));
    auto post = [=] {
        nccl_stub::Requests all(1);
        if (bytes) memcpy(sum->data(), in, sum->size()); // memcpy takes no null
        MPI_Iallreduce(MPI_IN_PLACE, sum->data(), int(n) * size, t, MPI_SUM, comm->mpi, &all[0]);
        return all;
    };
    return nccl_stub::give(comm, stream, post, [=] {
        if (bytes) memcpy(out, sum->data() + bytes * size_t(rank), bytes);
    });
}

// The host polls this while it waits for other ranks by itself. They may wait for its streams.
extern "C" inline int MPI_Testall(int n, MPI_Request* requests, int* over, MPI_Status* statuses) {
    static int refused = 0;
    int error = PMPI_Testall(n, requests, over, statuses);
    if (!*over && ++refused % 100 == 0) emulator::run_beside_host();
    return error;
}
