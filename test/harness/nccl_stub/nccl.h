// nccl.h - stands for NCCL where there is no GPU: the same calls carried by MPI, and a list of them
//   A call ends when its peers have come, in the caller's order, as on one stream that everything
//   shares: ranks that would wait for each other on a GPU's streams wait for ever here.
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
    MPI_Comm mpi;
    cudaStream_t stream;
};
inline std::vector<Message> messages; // of the group of calls that is open

inline void note(const std::string& what, ncclComm_t comm, cudaStream_t stream) {
    emulator::catch_up(); // what the host has copied in is there
    streams[size_t(comm->number)].insert(stream);
    calls.push_back(what + " on " + std::to_string(comm->number));
}
// What a stream that is captured is given happens when its graph is launched.
template <typename W> ncclResult_t give(cudaStream_t stream, W work) {
    auto late = [=] {
        emulator::catch_up();
        work();
    };
    return emulator::give("a collective", stream, late), ncclSuccess;
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
    nccl_stub::messages.push_back({const_cast<void*>(data), n, peer, true, comm->mpi, stream});
    return ncclSuccess;
}
inline ncclResult_t ncclRecv(void* data, size_t n, ncclDataType_t, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    nccl_stub::note("receive from " + std::to_string(peer), comm, stream);
    nccl_stub::messages.push_back({data, n, peer, false, comm->mpi, stream});
    return ncclSuccess;
}
inline ncclResult_t ncclGroupEnd() {
    std::vector<nccl_stub::Message> messages = std::move(nccl_stub::messages);
    nccl_stub::messages.clear();
    if (messages.empty()) return ncclSuccess;
    return nccl_stub::give(messages[0].stream, [=] {
        std::vector<MPI_Request> requests;
        for (const nccl_stub::Message& m : messages) {
            requests.emplace_back();
            MPI_Request* r = &requests.back();
            if (m.send)
                MPI_Isend(m.data, int(m.bytes), MPI_BYTE, m.peer, 0, m.mpi, r);
            else
                MPI_Irecv(m.data, int(m.bytes), MPI_BYTE, m.peer, 0, m.mpi, r);
        }
        MPI_Waitall(int(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
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
    return nccl_stub::give(stream, [=] {
        MPI_Allgather(in_place ? MPI_IN_PLACE : in, int(n), t, out, int(n), t, comm->mpi);
    });
}
inline ncclResult_t ncclBroadcast(const void*, void* out, size_t n, ncclDataType_t type, int root,
                                  ncclComm_t comm, cudaStream_t stream) {
    nccl_stub::note("broadcast", comm, stream);
    return nccl_stub::give(
        stream, [=] { MPI_Bcast(out, int(n), nccl_stub::mpi_type(type), root, comm->mpi); });
}
// Floats of 16 bits have no sum in MPI: the project sums them in rank order under this stub.
inline ncclResult_t ncclAllReduce(const void*, void* out, size_t n, ncclDataType_t type,
                                  ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    nccl_stub::note(op == ncclMax ? "maximum" : "all-reduce", comm, stream);
    return nccl_stub::give(stream, [=] {
        MPI_Allreduce(MPI_IN_PLACE, out, int(n), nccl_stub::mpi_type(type),
                      op == ncclMax ? MPI_MAX : MPI_SUM, comm->mpi);
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
    return nccl_stub::give(stream, [=] {
        size_t bytes = n * size_t(unit);
        const char* from = static_cast<const char*>(in);
        std::vector<char> all(from, from + bytes * size_t(size));
        MPI_Allreduce(MPI_IN_PLACE, all.data(), int(n) * size, t, MPI_SUM, comm->mpi);
        if (bytes) memcpy(out, all.data() + bytes * size_t(rank), bytes); // memcpy takes no null
    });
}
