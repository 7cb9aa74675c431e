// group.h - a group of ranks, a collective on it with its type erased, sums in rank order
//   A Comm is a group as one of its ranks sees it. A Call says which collective runs on which
//   buffers: comm.h makes it, and a backend (local.h, mpi.h, nccl.h) carries it out.
//   Lengths named n or count are in elements; lengths in bytes say so in their name.
//   Contract: reduce_ranks adds its inputs in order, bf16 and fp16 in float, rounded once.
//   To copy: this file, rank_status.h, elements.h, element_type.h, cuda_common.h and types.h.
#pragma once
#include <algorithm>
#include <map>
#include <memory>
#include <type_traits>
#include <vector>
#include "../ops/cuda_common.h"
#include "../ops/element_type.h"
#include "../ops/elements.h"
#include "../ops/types.h"
#include "rank_status.h"
#ifdef _OPENMP
#include <omp.h>
#endif

namespace llmc {

// ----------------------------------------------------------------------------
// a group of ranks as one of them sees it

struct MpiOp;
struct NcclGroup;
struct Placements;
struct Hotline;

// State that all groups of a rank share. Its owner keeps it as long as any group exists.
struct RankInfo {
    int rank = 0;                     // in the world
    std::string place;                // "dp 1, tp 0"
    std::string action;               // the current action, for the watchdog's message
    RankNotes notes;                  // what the ranks of this machine are doing
    std::shared_ptr<Hotline> hotline; // to other machines (hang_report.h); null: there are none
    int machine_ranks = 0; // tests: divide the machine into parts of so many ranks; 0: do not
    double timeout_s = 600;           // a longer wait ends the job; 0: wait for ever
    Placements* placements = nullptr; // null: buffers are not checked
    std::map<std::string, size_t>* sent = nullptr; // bytes by group; null: not counted
    std::vector<MpiOp*> outstanding;  // started and not finished, of all groups
    std::vector<NcclGroup*> communicators; // on this rank's GPU, in the order of their making
};

struct LocalGroup;
struct MpiGroup;

// A group, as one of its ranks sees it. The backend's part ends with the last copy of the group.
struct Comm {
    int rank = 0;               // in this group
    int size = 1;
    std::string name = "world"; // also the axis of placements
    bool fixed_order = true;    // sums in rank order, on MPI and NCCL too
    std::vector<int> members = {0}; // (size) ranks in the world
    RankInfo* info = nullptr;

    // The backends' own parts; null for those that the group lacks. With NCCL, Cpu buffers go over
    // MPI.
    std::shared_ptr<LocalGroup> local;
    std::shared_ptr<MpiGroup> mpi;
    std::shared_ptr<NcclGroup> nccl;
};

// One end of a message. Those of a pair with the same tag match in the order in which they start.
struct CommMessage {
    void* data; // (bytes)
    size_t bytes;
    int peer; // in the group
    bool send;
    int tag = 0; // 0 .. MESSAGE_TAGS - 1
};
// Collectives use the tags from here on.
constexpr int MESSAGE_TAGS = 1024;

// ----------------------------------------------------------------------------
// a collective, its element type erased

// Element types: the first four are those of Type, in its order; integers follow.
enum class Element { F32, BF16, F16, F64, I32, I64, U8 };
constexpr const char* ELEMENT_NAMES[] = {"float", "bf16", "fp16", "double", "int", "long", "byte"};
constexpr size_t ELEMENT_BYTES[] = {4, 2, 2, 8, 4, 8, 1};

// Return a type as backends know it: integers by their width, the rest by types.h.
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

// EXCHANGE is a set of messages that start together, or one of them.
// clang-format off
enum class Collective {
    ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, BROADCAST, BARRIER, EXCHANGE
};
// clang-format on
inline const char* collective_name(Collective kind) {
    constexpr const char* NAMES[] = {"all-reduce", "reduce-scatter", "all-gather", "all-to-all",
                                     "broadcast",  "barrier",        "exchange"};
    return NAMES[int(kind)];
}

// Reduce n_in buffers of `count` elements in order, and write the result to n_out buffers. Backends
// call this on erased bytes; typed_call() (comm.h) has chosen the type.
template <typename S>
using Reduce = void (*)(void* const* outs, int n_out, const void* const* ins, int n_in,
                        size_t count, S where);

// A collective, or one message, as a rank hands it to a backend.
template <typename S> struct Call {
    Collective kind;
    const char* in; // (in_bytes)
    char* out;      // (out_bytes)
    size_t n;       // elements of one rank's shard; all elements of an all-reduce or broadcast
    Element element = Element::U8;
    int root = 0;               // of a broadcast
    bool max = false;           // the maximum instead of the sum
    Reduce<S> reduce = nullptr; // for a sum in rank order
    size_t stride = 0; // in a part of a longer reduce-scatter: elements between two shards of in

    size_t unit() const { return ELEMENT_BYTES[int(element)]; } // bytes of an element
    size_t bytes() const { return n * unit(); }                 // of one rank's shard

    // Return the bytes of all of in and of all of out, in a group of `size` ranks.
    size_t in_bytes(int size) const {
        bool shards = kind == Collective::REDUCE_SCATTER || kind == Collective::ALL_TO_ALL;
        return bytes() * (shards ? size : 1);
    }
    size_t out_bytes(int size) const {
        bool shards = kind == Collective::ALL_GATHER || kind == Collective::ALL_TO_ALL;
        return bytes() * (shards ? size : 1);
    }
    // Return the bytes that this rank sends, if each element goes once to each rank that needs it.
    // An all-reduce is a reduce-scatter and an all-gather.
    size_t sent_bytes(int size) const {
        size_t peers = size_t(size) - 1;
        if (kind == Collective::ALL_REDUCE)
            return 2 * bytes() * peers / size_t(size);
        return in ? bytes() * peers : 0; // in a broadcast, only the root has `in`
    }
    // Whether in and out overlap.
    bool in_place(int size) const {
        return in && out && in < out + out_bytes(size) && out < in + in_bytes(size);
    }
};

// The range of n elements that rank r sums. Ranges are whole cache lines, and the last ones
// may be shorter.
struct ElementRange {
    size_t first, count;
};
inline ElementRange range_of(size_t n, int size, int r) {
    // Use multiples of 64 elements, which are whole cache lines for every type: two ranks never
    // write the same line.
    size_t most = round_up(ceil_div(n, size), 64);
    size_t first = std::min(n, r * most);
    return {first, std::min(n - first, most)};
}

// ----------------------------------------------------------------------------
// the texts of failures

// Return "rank 2" or "ranks 1, 2".
inline std::string ranks_text(const std::vector<int>& ranks) {
    std::string s = ranks.size() == 1 ? "rank " : "ranks ";
    for (size_t i = 0; i < ranks.size(); i++)
        s += (i ? ", " : "") + std::to_string(ranks[i]);
    return s;
}

// Return "rank 3 (dp 1, tp 1)".
inline std::string rank_text(const Comm& c) {
    std::string place = c.info->place.empty() ? "" : " (" + c.info->place + ")";
    return "rank " + std::to_string(c.info->rank) + place;
}

// Return "all-reduce on 'dp'".
inline std::string where_text(const Comm& c, Collective kind) {
    return std::string(collective_name(kind)) + " on '" + c.name + "'";
}

// Return the message of a wait that was too long:
// "rank 0 waited 600.0 s in all-reduce on 'dp' during action REDUCE(3): rank 2 has not arrived"
inline std::string overdue_text(const Comm& c, Collective kind, double seconds,
                                const std::vector<int>& missing) {
    char waited[64];
    snprintf(waited, sizeof(waited), " waited %.1f s in ", seconds);
    std::string action = c.info->action.empty() ? "" : " during action " + c.info->action;
    std::string who = missing.empty()       ? "some ranks have"
                      : missing.size() == 1 ? ranks_text(missing) + " has"
                                            : ranks_text(missing) + " have";
    return rank_text(c) + waited + where_text(c, kind) + action + ": " + who + " not arrived" +
           standing_text(c.info->notes, seconds);
}

// ----------------------------------------------------------------------------
// the cores of a rank

// Let this rank's OpenMP loops use this many threads, at least one.
#ifdef _OPENMP
inline int cores_here() { return omp_get_num_procs(); }
inline void use_threads(int threads) { omp_set_num_threads(std::max(1, threads)); }
#else
inline int cores_here() { return 1; }
inline void use_threads(int) {}
#endif

// ----------------------------------------------------------------------------
// sums in rank order: halves in float, other types in their own

// Widen an element to the type in which sums are made, and round the sum back.
template <typename T> LLMC_HD inline auto to_sum(T x) {
    if constexpr (std::is_integral_v<T>)
        return x;
    else
        return to_acc(x);
}
template <typename T, typename A>
LLMC_HD inline T from_sum(A x) {
    if constexpr (std::is_integral_v<T>)
        return x;
    else
        return from_acc<T>(x);
}

// Add two values, or take the larger one; a NaN always survives.
template <bool MAX, typename A>
LLMC_HD inline A combine(A a, A b) {
    if constexpr (MAX)
        return b > a || b != b ? b : a;
    else
        return A(a + b);
}

// Reduce ins (n_in) into outs (n_out), of `count` elements each; an output may be an input. Every
// thread has elements of its own, so the bits depend only on the order of the inputs.
template <typename T, bool MAX>
void reduce_ranks(void* const* outs, int n_out, const void* const* ins, int n_in, size_t count,
                  Cpu) {
    typedef decltype(to_sum(T())) A;
    constexpr size_t PART = 1024; // elements: their sums stay in L1

    #pragma omp parallel for if (count > size_t(1) << 18)
    for (size_t from = 0; from < count; from += PART) {
        size_t part = std::min(PART, count - from);
        A sum[PART];
        T rounded[PART];

        // Add the part of every input, in rank order.
        const T* first = static_cast<const T*>(ins[0]) + from;
        for (size_t i = 0; i < part; i++)
            sum[i] = to_sum(first[i]);
        for (int r = 1; r < n_in; r++) {
            const T* next = static_cast<const T*>(ins[r]) + from;
            for (size_t i = 0; i < part; i++)
                sum[i] = combine<MAX>(sum[i], to_sum(next[i]));
        }

        // Round once, and write the result to every output.
        for (size_t i = 0; i < part; i++)
            rounded[i] = from_sum<T>(sum[i]);
        for (int r = 0; r < n_out; r++)
            memcpy(static_cast<T*>(outs[r]) + from, rounded, part * sizeof(T));
    }
}

// Copy a rank's own contribution; in place there is nothing to do.
inline void copy_bytes(void* to, const void* from, size_t bytes, Cpu) {
    if (to != from && bytes)
        memcpy(to, from, bytes);
}

#if LLMC_KERNELS
constexpr int MAX_GPU_RANKS = 64; // so many addresses fit a launch

// Addresses that a launch passes by value.
struct RankPointers {
    void* p[MAX_GPU_RANKS];
};

// A thread reduces P elements of every buffer: 16 bytes if all buffers are aligned, else one.
template <typename T, bool MAX, int P>
__global__ void reduce_ranks_kernel(RankPointers outs, int n_out, RankPointers ins, int n_in,
                                    size_t count) {
    size_t i = first_element<P>();
    if (i >= count) return;

    // Add P elements of every input, in rank order.
    decltype(to_sum(T())) sum[P];
    Pack<T, P> x = load_some<P>(static_cast<const T*>(ins.p[0]) + i, count - i);
    for (int k = 0; k < P; k++)
        sum[k] = to_sum(x.v[k]);
    for (int r = 1; r < n_in; r++) {
        x = load_some<P>(static_cast<const T*>(ins.p[r]) + i, count - i);
        for (int k = 0; k < P; k++)
            sum[k] = combine<MAX>(sum[k], to_sum(x.v[k]));
    }

    // Round once, and write the result to every output.
    for (int k = 0; k < P; k++)
        x.v[k] = from_sum<T>(sum[k]);
    for (int r = 0; r < n_out; r++)
        store_some(static_cast<T*>(outs.p[r]) + i, x, count - i);
}

// The same on a GPU, in the stream's order.
template <typename T, bool MAX>
void reduce_ranks(void* const* outs, int n_out, const void* const* ins, int n_in, size_t count,
                  cudaStream_t stream) {
    LLMC_CHECK(n_in <= MAX_GPU_RANKS, "%d ranks: raise MAX_GPU_RANKS", n_in);
    RankPointers to = {};
    RankPointers from = {};
    bool vector = true; // every buffer begins at a multiple of 16 bytes
    for (int r = 0; r < n_out; r++) {
        to.p[r] = outs[r];
        vector &= uintptr_t(outs[r]) % 16 == 0;
    }
    for (int r = 0; r < n_in; r++) {
        from.p[r] = const_cast<void*>(ins[r]);
        vector &= uintptr_t(ins[r]) % 16 == 0;
    }

    // Launch packs of 16 bytes if all buffers allow it.
    pick_element_kernel<T>(count, vector, [&](auto P, unsigned blocks) {
        launch(reduce_ranks_kernel<T, MAX, P>, blocks, ELEMENT_THREADS, stream, to, n_out, from,
               n_in, count);
    });
}

// Turn floats into integers of the same order, with a NaN above all others; or back. A library's
// maximum of these integers is the maximum of the floats. It keeps a NaN, which the library's
// maximum of floats may lose.
template <bool BACK>
__global__ void order_floats_kernel(int32_t* x, size_t n) { // (n) bits of floats
    size_t i = first_element<1>();
    if (i >= n) return;
    // Flip the bits of negative floats: they order like integers in reverse, the others like them.
    int32_t bits = x[i];
    bool nan = (bits & 0x7fffffff) > 0x7f800000;
    int32_t turned = bits < 0 ? bits ^ 0x7fffffff : bits;
    x[i] = nan && !BACK ? 0x7fffffff : turned;
}
template <bool BACK> void order_floats(void* x, size_t n, cudaStream_t stream) {
    if (n == 0) return;
    unsigned blocks = unsigned(ceil_div(n, size_t(ELEMENT_THREADS)));
    launch(order_floats_kernel<BACK>, blocks, ELEMENT_THREADS, stream, static_cast<int32_t*>(x), n);
}

inline void copy_bytes(void* to, const void* from, size_t bytes, cudaStream_t stream) {
    if (to != from && bytes)
        LLMC_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
}
#endif

} // namespace llmc
