// comm_group.h - a group of ranks, a collective on it with its type erased, sums in rank order
//   A Comm is a group as one of its ranks sees it. A Call says which collective, of what: comm.h
//   makes it, a backend (comm_local.h, comm_mpi.h, comm_nccl.h) carries it out.
//   Contract: reduce_ranks adds its inputs in their order, bf16 and fp16 in float, rounded once.
//   To copy: this file and common.h.
#pragma once
#include <algorithm>
#include <chrono>
#include <memory>
#include <type_traits>
#include "common.h"

enum class Backend { NONE, LOCAL, MPI, NCCL };

// ----------------------------------------------------------------------------
// a group of ranks as one of them sees it

struct MpiOp;
struct Placements;
// What the groups of a rank share; owned by the caller, whom they do not outlive.
struct RankInfo {
    int rank = 0;                     // in the world
    std::string place;                // "dp 1, tp 0"
    std::string action;               // what the rank does now, for the watchdog's line
    double timeout_s = 600;           // of a wait, then the job ends; 0: for ever
    Placements* placements = nullptr; // null: off
    std::vector<MpiOp*> outstanding;  // started and not finished, of all groups
};

struct LocalGroup;
struct MpiGroup;
struct NcclGroup;
struct Comm {
    Backend backend = Backend::NONE; // NCCL: for streams; Cpu buffers go over MPI
    int rank = 0, size = 1;
    std::string name = "world"; // also the axis of placements
    bool fixed_order = true;
    std::vector<int> members = {0}; // ranks in the world
    RankInfo* info = nullptr;
    std::shared_ptr<LocalGroup> local;
    std::shared_ptr<MpiGroup> mpi;
    std::shared_ptr<NcclGroup> nccl;
};

struct CommMessage { // tag: 0..1023; messages of one pair and tag match in order
    void* data;
    size_t bytes;
    int peer; // in the group
    bool send;
    int tag = 0;
};
constexpr int MESSAGE_TAGS = 1024;

enum class Element { F32, BF16, F16, F64, I32, I64, U8 }; // Type, and integers
constexpr const char* ELEMENT_NAMES[] = {"float", "bf16", "fp16", "double", "int", "long", "byte"};
constexpr size_t ELEMENT_BYTES[] = {4, 2, 2, 8, 4, 8, 1};
template <typename T> constexpr Element element_of() {
    if constexpr (std::is_integral_v<T>) {
        constexpr bool byte = sizeof(T) == 1;
        static_assert(byte != std::is_signed_v<T> && sizeof(T) != 2, "int, long or unsigned char");
        return byte ? Element::U8 : sizeof(T) == 8 ? Element::I64 : Element::I32;
    } else {
        static_assert(int(Type::F64) == int(Element::F64) && int(Type::F16) == int(Element::F16));
        return Element(int(type_of<T>()));
    }
}

enum class Collective {
    ALL_REDUCE,
    REDUCE_SCATTER,
    ALL_GATHER,
    ALL_TO_ALL,
    BROADCAST,
    BARRIER,
    EXCHANGE
};
inline const char* collective_name(Collective kind) {
    constexpr const char* NAMES[] = {"all-reduce", "reduce-scatter", "all-gather", "all-to-all",
                                     "broadcast",  "barrier",        "exchange"};
    return NAMES[int(kind)];
}

// Reduction of `count` elements over n_in buffers in their order, the result to n_out buffers.
template <typename S>
using Reduce = void (*)(void* const* outs, int n_out, const void* const* ins, int n_in,
                        size_t count, S where);

template <typename S> struct Call { // one collective or message, its element type erased
    Collective kind;
    const char* in;
    char* out;
    size_t n;
    Element element = Element::U8;
    int root = 0;
    bool max = false;
    Reduce<S> reduce = nullptr;
    size_t stride =
        0; // a part of a longer reduce-scatter: elements from a rank's share to the next
    size_t unit() const { return ELEMENT_BYTES[int(element)]; }
    // bytes of one rank's share, of the whole of in and out
    size_t bytes() const { return n * unit(); }
    size_t in_bytes(int size) const {
        bool shares = kind == Collective::REDUCE_SCATTER || kind == Collective::ALL_TO_ALL;
        return bytes() * (shares ? size : 1);
    }
    size_t out_bytes(int size) const {
        bool shares = kind == Collective::ALL_GATHER || kind == Collective::ALL_TO_ALL;
        return bytes() * (shares ? size : 1);
    }
    bool in_place(int size) const {
        return in && out && in < out + out_bytes(size) && out < in + in_bytes(size);
    }
};

// Rank r's slice of n elements that are summed in parts: whole cache lines, the last ones shorter.
struct Slice {
    size_t from, count;
};
inline Slice slice_of(size_t n, int size, int r) {
    size_t most = round_up(ceil_div(n, size), 64), from = std::min(n, r * most);
    return {from, std::min(n - from, most)};
}

// ----------------------------------------------------------------------------
// what a failure says

inline std::string ranks_text(const std::vector<int>& ranks) {
    std::string s = ranks.size() == 1 ? "rank " : "ranks ";
    for (size_t i = 0; i < ranks.size(); i++) s += (i ? ", " : "") + std::to_string(ranks[i]);
    return s;
}

// "rank 3 (dp 1, tp 1)"
inline std::string rank_text(const Comm& c) {
    std::string place = c.info->place.empty() ? "" : " (" + c.info->place + ")";
    return "rank " + std::to_string(c.info->rank) + place;
}

// "all-reduce on 'dp'"
inline std::string where_text(const Comm& c, Collective kind) {
    return std::string(collective_name(kind)) + " on '" + c.name + "'";
}

inline std::string overdue_text(const Comm& c, Collective kind, double seconds,
                                const std::vector<int>& missing) {
    char waited[64];
    snprintf(waited, sizeof(waited), " waited %.1f s in ", seconds);
    std::string action = c.info->action.empty() ? "" : " during action " + c.info->action;
    std::string who = missing.empty()       ? "some ranks have"
                      : missing.size() == 1 ? ranks_text(missing) + " has"
                                            : ranks_text(missing) + " have";
    return rank_text(c) + waited + where_text(c, kind) + action + ": " + who + " not arrived";
}

inline double clock_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// ----------------------------------------------------------------------------
// sums in rank order, in float or wider; integers in themselves

template <typename T> HD inline auto to_sum(T x) {
    if constexpr (std::is_integral_v<T>)
        return x;
    else
        return to_acc(x);
}
template <typename T, typename A> HD inline T from_sum(A x) {
    if constexpr (std::is_integral_v<T>)
        return x;
    else
        return from_acc<T>(x);
}
template <bool MAX, typename A> HD inline A combine(A a, A b) {
    if constexpr (MAX)
        return b > a || b != b ? b : a; // a NaN stays
    else
        return A(a + b);
}

template <typename T, bool MAX>
void reduce_ranks(void* const* outs, int n_out, const void* const* ins, int n_in, size_t count,
                  Cpu) {
    typedef decltype(to_sum(T())) A;
    constexpr size_t PART = 1024; // sums of a part stay in L1
    #pragma omp parallel for if (count > size_t(1) << 18)
    for (size_t from = 0; from < count; from += PART) {
        size_t part = std::min(PART, count - from);
        A sum[PART];
        T rounded[PART];
        const T* first = static_cast<const T*>(ins[0]) + from;
        for (size_t i = 0; i < part; i++) sum[i] = to_sum(first[i]);
        for (int r = 1; r < n_in; r++) {
            const T* next = static_cast<const T*>(ins[r]) + from;
            for (size_t i = 0; i < part; i++) sum[i] = combine<MAX>(sum[i], to_sum(next[i]));
        }
        for (size_t i = 0; i < part; i++) rounded[i] = from_sum<T>(sum[i]);
        for (int r = 0; r < n_out; r++)
            memcpy(static_cast<T*>(outs[r]) + from, rounded, part * sizeof(T));
    }
}

inline void copy_bytes(void* to, const void* from, size_t bytes, Cpu) {
    if (to != from && bytes) memcpy(to, from, bytes);
}

#if KERNELS
constexpr int MAX_GPU_RANKS = 64; // whose addresses fit a launch
struct RankPointers {
    void* p[MAX_GPU_RANKS];
};

template <typename T, bool MAX, int P>
__global__ void reduce_ranks_kernel(RankPointers outs, int n_out, RankPointers ins, int n_in,
                                    size_t count) {
    size_t i = first_element<P>();
    if (i >= count) return;
    decltype(to_sum(T())) sum[P];
    Pack<T, P> x = load_some<P>(static_cast<const T*>(ins.p[0]) + i, count - i);
    for (int k = 0; k < P; k++) sum[k] = to_sum(x.v[k]);
    for (int r = 1; r < n_in; r++) {
        x = load_some<P>(static_cast<const T*>(ins.p[r]) + i, count - i);
        for (int k = 0; k < P; k++) sum[k] = combine<MAX>(sum[k], to_sum(x.v[k]));
    }
    for (int k = 0; k < P; k++) x.v[k] = from_sum<T>(sum[k]);
    for (int r = 0; r < n_out; r++) store_some(static_cast<T*>(outs.p[r]) + i, x, count - i);
}

template <typename T, bool MAX>
void reduce_ranks(void* const* outs, int n_out, const void* const* ins, int n_in, size_t count,
                  cudaStream_t stream) {
    CHECK(n_in <= MAX_GPU_RANKS, "%d ranks: raise MAX_GPU_RANKS", n_in);
    RankPointers to = {}, from = {};
    bool vector = true;
    for (int r = 0; r < n_out; r++) vector &= uintptr_t(to.p[r] = outs[r]) % 16 == 0;
    for (int r = 0; r < n_in; r++)
        vector &= uintptr_t(from.p[r] = const_cast<void*>(ins[r])) % 16 == 0;
    pick_element_kernel<T>(count, vector, [&](auto P, unsigned blocks) {
        launch(reduce_ranks_kernel<T, MAX, P>, blocks, ELEMENT_THREADS, 0, stream, to, n_out, from,
               n_in, count);
    });
}

inline void copy_bytes(void* to, const void* from, size_t bytes, cudaStream_t stream) {
    if (to != from && bytes)
        CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
}
#endif
