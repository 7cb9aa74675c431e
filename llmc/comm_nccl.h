// comm_nccl.h - ranks are processes with a GPU each: NCCL, all in the stream's order
//   MPI carries NCCL's first message and what the host exchanges. Sums in rank order go as in
//   comm_mpi.h, added by our own kernel.
//   To copy: this file, comm_mpi.h, comm_group.h and common.h.
#pragma once
#include <nccl.h>
#include <set>
#include "comm_mpi.h"

#define NCCL_CHECK(call)                                                                     \
    do {                                                                                     \
        ncclResult_t nccl_error_ = (call);                                                   \
        CHECK(nccl_error_ == ncclSuccess, "NCCL says: %s", ncclGetErrorString(nccl_error_)); \
    } while (0)

struct NcclGroup {
    ncclComm_t comm;
    explicit NcclGroup(ncclComm_t comm) : comm(comm) {}
    ~NcclGroup() { ncclCommDestroy(comm); }
};

inline ncclDataType_t nccl_type(Element e) {
    constexpr ncclDataType_t TYPES[] = {ncclFloat32, ncclBfloat16, ncclFloat16, ncclFloat64,
                                        ncclInt32,   ncclInt64,    ncclUint8};
    return TYPES[int(e)];
}

inline void nccl_send_receive(const Comm& c, const CommMessage& m, cudaStream_t stream) {
    if (m.bytes == 0) return;
    if (m.send)
        NCCL_CHECK(ncclSend(m.data, m.bytes, ncclUint8, m.peer, c.nccl->comm, stream));
    else
        NCCL_CHECK(ncclRecv(m.data, m.bytes, ncclUint8, m.peer, c.nccl->comm, stream));
}

// NCCL has no tags: messages of a pair go in the order of their tags, equal ones as listed.
inline void nccl_exchange(const Comm& c, const CommMessage* messages, int count,
                          cudaStream_t stream) {
    std::vector<CommMessage> sorted(messages, messages + count);
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](const CommMessage& a, const CommMessage& b) { return a.tag < b.tag; });
    NCCL_CHECK(ncclGroupStart());
    for (const CommMessage& m : sorted) nccl_send_receive(c, m, stream);
    NCCL_CHECK(ncclGroupEnd());
}

inline void nccl_collective(const Comm& c, const Call<cudaStream_t>& call, cudaStream_t stream) {
    ncclComm_t comm = c.nccl->comm;
    ncclDataType_t type = nccl_type(call.element);
    if (call.kind == Collective::ALL_GATHER) {
        NCCL_CHECK(ncclAllGather(call.in, call.out, call.n, type, comm, stream));
        return;
    }
    if (call.kind == Collective::BROADCAST) {
        char* x = call.out ? call.out : const_cast<char*>(call.in);
        NCCL_CHECK(ncclBroadcast(x, x, call.n, type, call.root, comm, stream));
        return;
    }
    if (sums(call) && !c.fixed_order && !call.max) { // its maximum may lose a NaN
        if (call.kind == Collective::ALL_REDUCE)
            NCCL_CHECK(ncclAllReduce(call.in, call.out, call.n, type, ncclSum, comm, stream));
        else
            NCCL_CHECK(ncclReduceScatter(call.in, call.out, call.n, type, ncclSum, comm, stream));
        return;
    }
    char* scratch = nullptr;
    size_t bytes = scratch_bytes(call, c.size);
    if (bytes) CUDA_CHECK(cudaMallocAsync(&scratch, bytes, stream));
    for (int round = 0; round < (call.kind == Collective::ALL_REDUCE ? 2 : 1); round++) {
        NCCL_CHECK(ncclGroupStart());
        for (int peer = 0; peer < c.size; peer++) {
            if (peer == c.rank) continue;
            Share s = share_of(call, c.size, c.rank, peer, round, scratch);
            char* send = const_cast<char*>(s.send);
            nccl_send_receive(c, {send, s.send_bytes, peer, true}, stream);
            nccl_send_receive(c, {s.receive, s.receive_bytes, peer, false}, stream);
        }
        NCCL_CHECK(ncclGroupEnd());
        if (round == 0) share_finish(call, c.size, c.rank, scratch, stream);
    }
    if (bytes) CUDA_CHECK(cudaFreeAsync(scratch, stream));
}

// The same group for the current device's streams; all its ranks call.
inline Comm nccl_attach(const Comm& c) {
    Comm gpu = c;
    if (c.size == 1) return gpu;
    ncclUniqueId id;
    if (c.rank == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    MPI_CHECK(MPI_Bcast(&id, sizeof(id), MPI_BYTE, 0, c.mpi->comm));
    ncclComm_t comm;
    NCCL_CHECK(ncclCommInitRank(&comm, c.size, id, c.rank));
    gpu.backend = Backend::NCCL;
    gpu.nccl = std::make_shared<NcclGroup>(comm);
    return gpu;
}

// Each process takes a GPU of its machine, in turn; all ranks of the world call. A launcher may show
// each process another one. Returns "" or what is wrong: NCCL refuses two ranks on one GPU.
inline std::string take_gpu(const Comm& world, int gpus) {
    MPI_Comm machine;
    int place = 0, processes = 0;
    MPI_CHECK(MPI_Comm_split_type(world.mpi->comm, MPI_COMM_TYPE_SHARED, world.rank, MPI_INFO_NULL,
                                  &machine));
    MPI_CHECK(MPI_Comm_rank(machine, &place));
    MPI_CHECK(MPI_Comm_size(machine, &processes));
    int gpu = place % gpus;
    CUDA_CHECK(cudaSetDevice(gpu));
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, gpu));
    std::vector<cudaUUID_t> taken(processes);
    MPI_CHECK(MPI_Allgather(&properties.uuid, sizeof(cudaUUID_t), MPI_BYTE, taken.data(),
                            sizeof(cudaUUID_t), MPI_BYTE, machine));
    MPI_CHECK(MPI_Comm_free(&machine));
    std::set<std::string> apart;
    for (const cudaUUID_t& id : taken) apart.insert(std::string(id.bytes, sizeof(id.bytes)));
    int there = int(apart.size());
    if (there == processes) return "";
    return std::to_string(processes) + " ranks on a machine with " + std::to_string(there) +
           (there == 1 ? " GPU" : " GPUs") +
           ": start one rank a GPU (mpirun --map-by ppr:" + std::to_string(there) +
           ":node), or let threads share a GPU (--local-ranks " + std::to_string(processes) + ")";
}

// Wait for all that the stream has been given, and end the job where a peer does not come.
inline void nccl_wait(const Comm& c, cudaStream_t stream) {
    double start = clock_seconds(), limit = c.info->timeout_s;
    for (long polls = 0; cudaStreamQuery(stream) == cudaErrorNotReady; polls++) {
        cudaGetLastError(); // "not ready" is none
        ncclResult_t state = ncclSuccess;
        NCCL_CHECK(ncclCommGetAsyncError(c.nccl->comm, &state));
        if (state != ncclSuccess && state != ncclInProgress)
            mpi_stop(rank_text(c) + ": '" + c.name + "': NCCL says: " + ncclGetErrorString(state));
        if (polls > 1000) std::this_thread::sleep_for(std::chrono::microseconds(20));
        double waited = clock_seconds() - start;
        if (limit > 0 && waited > limit)
            mpi_stop(rank_text(c) + " waited " + std::to_string(int(waited)) +
                     " s for its stream, with collectives on '" + c.name + "', during action " +
                     c.info->action);
    }
    wait_for(stream); // it is done, or says why not
}
