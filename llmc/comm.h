// comm.h - collectives and messages between ranks: threads, MPI, NCCL; started and finished apart - arXiv:1909.08053, arXiv:1910.02054
//   all_reduce_sum, _max (x, n)          x_r = x_0 + x_1 + ... on every rank        PARTIAL -> REPLICATED
//   reduce_scatter_sum (out, in, n)      out (n) = sum over ranks of in[rank] (n)   PARTIAL -> SHARDED
//   all_gather (out, in, n)              out (size, n) = in_0, in_1, ...            SHARDED -> REPLICATED
//   all_to_all (out, in, n)              out[q] (n) = in_q[rank] (n)                SHARDED -> SHARDED
//   broadcast (x, n, root), barrier, exchange (messages, count)
//   In place: out is in + rank * n (reduce_scatter), in is out + rank * n (all_gather). n counts
//   elements of float, double, bf16, fp16, int, long, unsigned char. Each has start_X and finish: the
//   buffers belong to the collective in between. Any number may be outstanding, finished in the order
//   they were started; every rank of a group starts the same ones in the same order.
//   Where it runs: Cpu buffers go over LOCAL or MPI; a stream's over NCCL, in the stream's order, or
//   over LOCAL, ranks of one process that share a GPU, whose calls wait for the stream.
//   Contract: LOCAL, and MPI and NCCL with fixed_order, add in rank order, float for bf16 and fp16,
//   rounded once: bits depend on neither timing nor backend. Else the library's order. A group of one
//   returns on the first line (out of place: a copy). Finishes of different groups may come in any
//   order on different ranks: a finish needs its peers' starts, and carries on all that its rank has
//   outstanding while it waits. No wait is for ever: see RankInfo::timeout_s.
//   Cost: LOCAL moves each byte of a buffer once in, once out, ranks work on slices of it; on MPI and
//   NCCL a rank sends (size-1)/size of the buffer, twice for all_reduce; sums in rank order need
//   scratch of the size of in.
//   To copy: this file and common.h.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include "common.h"
#ifdef WITH_MPI
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>
#endif
#ifdef WITH_NCCL
#include <nccl.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

enum class Backend { NONE, LOCAL, MPI, NCCL };

// ----------------------------------------------------------------------------
// what a buffer holds along an axis of the grid; where a rank keeps a table of its buffers, every
// collective checks what it is given and notes what it leaves

enum class Placement { REPLICATED, SHARDED, PARTIAL };
inline const char* placement_name(Placement p) {
    return p == Placement::REPLICATED ? "replicated" : p == Placement::SHARDED ? "sharded" : "partial";
}

struct Placements { // of one rank; a buffer without a row is not followed
    struct Row {
        const char *from, *to;
        std::string axis, label;
        Placement holds;
    };
    std::vector<Row> rows; // of one axis, no two overlap
};

// [p, p + bytes) holds this along the axis from now on; rows it cuts keep what is left of them.
inline void placement_set(Placements& table, const void* p, size_t bytes, const std::string& axis,
                          Placement holds, const std::string& label) {
    const char *from = static_cast<const char*>(p), *to = from + bytes;
    if (bytes == 0) return;
    std::vector<Placements::Row> kept;
    for (const Placements::Row& row : table.rows) {
        bool apart = row.axis != axis || row.to <= from || to <= row.from;
        if (apart || row.from < from)
            kept.push_back({row.from, apart ? row.to : from, row.axis, row.label, row.holds});
        if (!apart && to < row.to) kept.push_back({to, row.to, row.axis, row.label, row.holds});
    }
    kept.push_back({from, to, axis, label, holds});
    table.rows = kept;
}

// The first row that overlaps [p, p + bytes) and, where `needed` is given, holds something else.
inline const Placements::Row* placement_find(const Placements& table, const void* p, size_t bytes,
                                             const std::string& axis,
                                             const Placement* needed = nullptr) {
    const char* from = static_cast<const char*>(p);
    for (const Placements::Row& row : table.rows)
        if (row.axis == axis && row.from < from + bytes && from < row.to &&
            (!needed || row.holds != *needed))
            return &row;
    return nullptr;
}

// ----------------------------------------------------------------------------
// a group of ranks as one of them sees it

struct MpiOp;
struct RankInfo { // what the groups of a rank share; owned by the caller, who outlives them
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

struct Message { // tag: 0..1023; messages of one pair and tag match in order
    void* data;
    size_t bytes;
    int peer; // in the group
    bool send;
    int tag = 0;
};
constexpr int MESSAGE_TAGS = 1024;

enum class Element { F32, F64, BF16, F16, I32, I64, U8 };
constexpr const char* ELEMENT_NAMES[] = {"float", "double", "bf16", "fp16", "int", "long", "byte"};
constexpr size_t ELEMENT_BYTES[] = {4, 8, 2, 2, 4, 8, 1};
template <typename T> constexpr Element element_of() {
    if constexpr (std::is_integral_v<T>) {
        static_assert(sizeof(T) == 8 || sizeof(T) == 4 || std::is_same_v<T, unsigned char>);
        static_assert(std::is_signed_v<T> || sizeof(T) == 1, "int, long or unsigned char");
        return sizeof(T) == 8 ? Element::I64 : sizeof(T) == 4 ? Element::I32 : Element::U8;
    } else {
        constexpr Type t = type_of<T>();
        return t == Type::F64    ? Element::F64
               : t == Type::F32  ? Element::F32
               : t == Type::BF16 ? Element::BF16
                                 : Element::F16;
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
using Reduce = void (*)(void* const* outs, int n_out, const void* const* ins, int n_in, size_t count,
                        S where);

template <typename S> struct Call { // one collective or message, its element type erased
    Collective kind;
    const char* in;
    char* out;
    size_t n;
    Element element = Element::U8;
    int root = 0;
    bool max = false;
    Reduce<S> reduce = nullptr;
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

inline double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
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
void reduce_ranks(void* const* outs, int n_out, const void* const* ins, int n_in, size_t count, Cpu) {
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

// ----------------------------------------------------------------------------
// LOCAL: ranks are threads of one process and read each other's memory
//   A collective is cut into items (a slice's sum, a rank's copy). Whoever is in finish() once all
//   ranks have started takes the next item, so that nobody waits for a peer that computes meanwhile.

// When an outstanding collective happens, for tests of the waits around it: the bits must be equal.
//   LATEST: the result is NaN until finish(), and finish() refuses an input that has changed since
//   start. EARLIEST: all happens in start, which waits for the peers.
enum class Moment { ANY, EARLIEST, LATEST };

struct LocalSettings {
    Moment moment = Moment::ANY;
    double timeout_s = 600;
    bool placements = false;        // each rank has a table of what its buffers hold
    std::string* failure = nullptr; // where the message of a failure goes; null: to stderr
};

struct RankFailure {}; // thrown by every collective once a rank has failed; run_local_ranks catches

struct LocalWorld {
    int ranks;
    LocalSettings settings;
    std::mutex mutex;
    std::string message; // of the first failure
    std::atomic<bool> failed = false;
    std::vector<std::atomic<bool>> ended;
    struct Opening { // a group that not all of its ranks have joined
        std::shared_ptr<LocalGroup> group;
        std::vector<int> joined;
    };
    std::vector<Opening> openings;
    LocalWorld(int ranks, LocalSettings settings) : ranks(ranks), settings(settings), ended(ranks) {}
};

struct LocalOp { // a collective, or a message, that some of its parties have started
    Collective kind;
    std::string text; // all parties must ask for the same
    struct Party {
        int rank; // in the group
        bool posted = false;
        const char* in = nullptr;
        char* out = nullptr;
        std::vector<char> snapshot; // LATEST: of in, at start
    };
    std::vector<Party> parties; // the ranks; of a message: sender, receiver
    int items = 0, claimed = 0;
    std::atomic<int> arrived = 0, done = 0; // written under the group's mutex, read by those who spin
    bool broken = false;                    // a party has left: its memory may be gone
    LocalOp(Collective kind, std::string text, const std::vector<int>& ranks, int items)
        : kind(kind), text(text), items(items) {
        for (int r : ranks) parties.push_back({r, false, nullptr, nullptr, {}});
    }
    bool all_arrived() const { return arrived == int(parties.size()); }
};

struct LocalGroup {
    LocalWorld* world;
    std::string name;
    std::vector<int> members;
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<size_t> started;               // collectives that each rank has started
    std::deque<std::shared_ptr<LocalOp>> open; // not started by all
    size_t first_open = 0;
    std::map<std::array<int, 3>, std::deque<std::shared_ptr<LocalOp>>> mail; // (from, to, tag)
    LocalGroup(LocalWorld* world, std::string name, std::vector<int> members)
        : world(world), name(name), members(members), started(members.size()) {}
};

// The first failure is said once; every rank's next collective throws.
inline void local_fail(LocalWorld& world, const std::string& message) {
    std::lock_guard lock(world.mutex);
    if (world.failed) return;
    world.message = message;
    world.failed = true;
    if (world.settings.failure)
        *world.settings.failure = message;
    else
        fprintf(stderr, "train_gpt: error: %s\n", message.c_str());
}
[[noreturn]] inline void local_stop(const Comm& c, const std::string& message) {
    local_fail(*c.local->world, message);
    throw RankFailure();
}

// Wait for ready(), which the group's mutex guards. With `op`, leave when a rank fails, ends or takes
// too long; without it what is waited for is on its way.
template <typename F>
void local_wait(const Comm& c, std::unique_lock<std::mutex>& lock, LocalOp* op, F ready) {
    LocalGroup& g = *c.local;
    static const int cores = std::max(1u, std::thread::hardware_concurrency());
    if (!ready() && g.world->ranks <= cores) { // a core each: a short spin saves a sleep
        lock.unlock();
        for (int i = 0; i < 2000 && !ready(); i++) {}
        lock.lock();
    }
    double start = seconds_now(), limit = c.info->timeout_s;
    while (!ready()) {
        g.changed.wait_for(lock, std::chrono::milliseconds(20));
        if (!op || ready()) continue;
        std::vector<int> missing, ended;
        for (const LocalOp::Party& p : op->parties)
            if (!p.posted) missing.push_back(g.members[p.rank]);
        for (int r : missing)
            if (g.world->ended[r]) ended.push_back(r);
        double waited = seconds_now() - start;
        if (!ended.empty())
            local_fail(*g.world, rank_text(c) + " waits in " + where_text(c, op->kind) + " for " +
                                     ranks_text(ended) + ", which ended before");
        else if (limit > 0 && waited > limit)
            local_fail(*g.world, overdue_text(c, op->kind, waited, missing));
        if (g.world->failed) {
            op->broken = true; // I take my buffers with me
            throw RankFailure();
        }
    }
}

// The party's buffers are the collective's from here on. Under the group's mutex.
template <typename S>
void local_arrive(const Comm& c, LocalOp& op, int party, const Call<S>& call) {
    LocalGroup& g = *c.local;
    if (op.broken) throw RankFailure();
    LocalOp::Party& p = op.parties[party];
    p.in = call.in, p.out = call.out;
    if constexpr (std::is_same_v<S, Cpu>)
        if (g.world->settings.moment == Moment::LATEST) {
            if (call.in) p.snapshot.assign(call.in, call.in + call.in_bytes(c.size));
            p.in = p.snapshot.data();
            if (call.out) memset(call.out, 0xff, call.out_bytes(c.size)); // NaN in every type
        }
    p.posted = true;
    op.arrived++;
    if (op.all_arrived()) g.changed.notify_all();
}

template <typename S> std::string call_text(const Call<S>& call) {
    std::string s = collective_name(call.kind);
    if (call.kind == Collective::BARRIER) return s;
    if (call.kind == Collective::ALL_REDUCE) s += call.max ? " (max)" : " (sum)";
    s += " of " + std::to_string(call.n) + " " + ELEMENT_NAMES[int(call.element)];
    return call.kind == Collective::BROADCAST ? s + " from " + std::to_string(call.root) : s;
}

template <typename S> std::shared_ptr<LocalOp> local_start(const Comm& c, const Call<S>& call) {
    LocalGroup& g = *c.local;
    std::string text = call_text(call);
    std::lock_guard lock(g.mutex);
    if (g.world->failed) throw RankFailure();
    size_t index = g.started[c.rank] - g.first_open;
    if (index == g.open.size()) {
        std::vector<int> ranks;
        for (int r = 0; r < c.size; r++) ranks.push_back(r);
        int items = call.kind == Collective::BARRIER ? 0 : c.size;
        g.open.push_back(std::make_shared<LocalOp>(call.kind, text, ranks, items));
    }
    std::shared_ptr<LocalOp> op = g.open[index];
    if (op->text != text)
        local_stop(c, rank_text(c) + " starts " + text + " on '" + c.name +
                          "' where its peers start " + op->text);
    g.started[c.rank]++;
    local_arrive(c, *op, c.rank, call);
    for (; !g.open.empty() && g.open.front()->all_arrived(); g.first_open++) g.open.pop_front();
    return op;
}

template <typename S>
std::shared_ptr<LocalOp> local_start_message(const Comm& c, const Message& m, const Call<S>& call) {
    LocalGroup& g = *c.local;
    std::lock_guard lock(g.mutex);
    if (g.world->failed) throw RankFailure();
    int from = m.send ? c.rank : m.peer, to = m.send ? m.peer : c.rank, party = m.send ? 0 : 1;
    auto& queue = g.mail[{from, to, m.tag}];
    auto at = std::find_if(queue.begin(), queue.end(),
                           [&](auto& op) { return !op->parties[party].posted; });
    std::string text = std::to_string(m.bytes) + " bytes";
    if (at == queue.end())
        at = queue.insert(at, std::make_shared<LocalOp>(call.kind, text, std::vector{from, to}, 1));
    std::shared_ptr<LocalOp> op = *at;
    if (op->text != text)
        local_stop(c, rank_text(c) + (m.send ? " sends " : " receives ") + text + " on '" + c.name +
                          "' where " + ranks_text({g.members[m.peer]}) + " has " + op->text);
    local_arrive(c, *op, party, call);
    if (op->all_arrived()) queue.erase(at);
    return op;
}

// Item i of a collective that all have started: it writes what no other item reads or writes.
// Alone, where each party has a snapshot of what came in: all that party i gets.
template <typename S>
void local_item(const LocalOp& op, int i, const Call<S>& call, bool alone, S where) {
    int size = int(op.parties.size());
    size_t bytes = call.bytes();
    const LocalOp::Party& mine = op.parties[i];
    std::vector<const void*> ins(size);
    std::vector<void*> outs(size);
    switch (op.kind) {
    case Collective::ALL_REDUCE: {
        Slice s = alone ? Slice{0, call.n} : slice_of(call.n, size, i);
        for (int r = 0; r < size; r++) ins[r] = op.parties[r].in + s.from * call.unit();
        for (int r = 0; r < size; r++) outs[r] = op.parties[r].out + s.from * call.unit();
        if (alone) outs[0] = mine.out;
        call.reduce(outs.data(), alone ? 1 : size, ins.data(), size, s.count, where);
        break;
    }
    case Collective::REDUCE_SCATTER:
        for (int r = 0; r < size; r++) ins[r] = op.parties[r].in + i * bytes;
        outs[0] = mine.out;
        call.reduce(outs.data(), 1, ins.data(), size, call.n, where);
        break;
    case Collective::ALL_GATHER:
        for (int r = 0; r < size; r++)
            copy_bytes(mine.out + r * bytes, op.parties[r].in, bytes, where);
        break;
    case Collective::ALL_TO_ALL:
        for (int r = 0; r < size; r++)
            copy_bytes(mine.out + r * bytes, op.parties[r].in + i * bytes, bytes, where);
        break;
    case Collective::BROADCAST:
        if (i != call.root) copy_bytes(mine.out, op.parties[call.root].in, bytes, where);
        break;
    case Collective::EXCHANGE:
        copy_bytes(op.parties[1].out, op.parties[0].in, bytes, where);
        break;
    case Collective::BARRIER: break;
    }
}

template <typename S>
void local_finish(const Comm& c, LocalOp& op, int party, const Call<S>& call, S where) {
    LocalGroup& g = *c.local;
    std::unique_lock lock(g.mutex);
    local_wait(c, lock, &op, [&] { return op.all_arrived(); });
    if (g.world->settings.moment == Moment::LATEST && std::is_same_v<S, Cpu>) {
        lock.unlock();
        const std::vector<char>& was = op.parties[party].snapshot;
        if (!was.empty() && !call.in_place(c.size) && memcmp(was.data(), call.in, was.size()))
            local_stop(c, rank_text(c) + " changed the input of " + where_text(c, op.kind) +
                              " before it was finished");
        if (call.out) local_item(op, party, call, true, where);
        return;
    }
    while (op.claimed < op.items) {
        if (op.broken) throw RankFailure();
        int item = op.claimed++;
        lock.unlock();
        local_item(op, item, call, false, where);
        wait_for(where);
        lock.lock();
        if (++op.done == op.claimed) g.changed.notify_all();
    }
    local_wait(c, lock, nullptr, [&] { return op.done == op.items; });
}

// A rank leaves with a collective outstanding: nobody may touch its buffers afterwards.
inline void local_withdraw(const Comm& c, LocalOp& op) {
    LocalGroup& g = *c.local;
    std::unique_lock lock(g.mutex);
    if (!op.broken && op.done < std::max(op.items, 1)) {
        op.broken = true;
        if (!std::uncaught_exceptions())
            local_fail(*g.world, rank_text(c) + " left " + where_text(c, op.kind) + " unfinished");
    }
    local_wait(c, lock, nullptr, [&] { return op.done == op.claimed; });
}

// The group of these ranks of c, in this order; only they call, with the same list.
inline std::shared_ptr<LocalGroup> local_split(const Comm& c, const std::string& name,
                                               const std::vector<int>& members) {
    LocalWorld& world = *c.local->world;
    std::lock_guard lock(world.mutex);
    auto at = std::find_if(world.openings.begin(), world.openings.end(), [&](auto& o) {
        return o.group->name == name && o.group->members == members &&
               std::find(o.joined.begin(), o.joined.end(), c.info->rank) == o.joined.end();
    });
    if (at == world.openings.end())
        at = world.openings.insert(at, {std::make_shared<LocalGroup>(&world, name, members), {}});
    std::shared_ptr<LocalGroup> group = at->group;
    at->joined.push_back(c.info->rank);
    if (at->joined.size() == members.size()) world.openings.erase(at);
    return group;
}

// Run body(world) as `ranks` threads, each with its share of the cores. 0 once all have returned, or
// returned 0; else 1, and the first failure has been said.
template <typename F> int run_local_ranks(int ranks, LocalSettings settings, F body) {
    LocalWorld world(ranks, settings);
    std::vector<int> members(ranks);
    for (int r = 0; r < ranks; r++) members[r] = r;
    auto group = std::make_shared<LocalGroup>(&world, "world", members);
    auto run_rank = [&](int rank) {
        this_rank = rank;
#ifdef _OPENMP
        omp_set_num_threads(std::max(1, omp_get_num_procs() / ranks));
#endif
        Placements placements;
        RankInfo info;
        info.rank = rank, info.timeout_s = settings.timeout_s;
        if (settings.placements) info.placements = &placements;
        Comm c;
        c.rank = rank, c.size = ranks, c.members = members, c.info = &info;
        if (ranks > 1) c.backend = Backend::LOCAL, c.local = group;
        try {
            if constexpr (std::is_void_v<decltype(body(c))>)
                body(c);
            else if (int status = body(c))
                local_fail(world, rank_text(c) + " ended with status " + std::to_string(status));
        } catch (const RankFailure&) {
        } catch (const std::exception& e) {
            local_fail(world, rank_text(c) + " failed: " + e.what());
        } catch (...) {
            local_fail(world, rank_text(c) + " failed");
        }
        world.ended[rank] = true;
    };
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; r++) threads.emplace_back(run_rank, r);
    for (std::thread& t : threads) t.join();
    return world.failed;
}

// ----------------------------------------------------------------------------
// messages instead of memory: what MPI and NCCL do for sums in rank order
//   all_reduce: 1. everyone gets its slice from everyone, adds in rank order; 2. gives it to everyone.
//   The others need one round: reduce_scatter round 1 of this, all_gather and all_to_all no sum.

#if defined(WITH_MPI) || defined(WITH_NCCL)
struct Share { // what a rank and one peer give each other in a round
    const char* send;
    size_t send_bytes;
    char* receive;
    size_t receive_bytes;
};

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
        return {call.in + peer * bytes, bytes, scratch + peer * bytes, bytes};
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

// After the first round: what came in and my own part, summed in rank order; or my own part's copy.
template <typename S>
void share_finish(const Call<S>& call, int size, int rank, char* scratch, S where) {
    size_t bytes = call.bytes();
    if (sums(call)) {
        bool all = call.kind == Collective::ALL_REDUCE;
        Slice mine = all ? slice_of(call.n, size, rank) : Slice{rank * call.n, call.n};
        std::vector<const void*> ins(size);
        for (int r = 0; r < size; r++) ins[r] = scratch + r * mine.count * call.unit();
        ins[rank] = call.in + mine.from * call.unit();
        void* out = call.out + (all ? mine.from * call.unit() : 0);
        call.reduce(&out, 1, ins.data(), size, mine.count, where);
    } else if (call.kind == Collective::ALL_GATHER) {
        copy_bytes(call.out + rank * bytes, call.in, bytes, where);
    } else if (call.kind == Collective::ALL_TO_ALL) {
        copy_bytes(call.out + rank * bytes, call.in + rank * bytes, bytes, where);
    }
}
#endif

// ----------------------------------------------------------------------------
// MPI: one process a rank; only the thread that initialised MPI calls

#ifdef WITH_MPI
#define MPI_CHECK(call)                                                      \
    do {                                                                     \
        int mpi_error_ = (call);                                             \
        CHECK(mpi_error_ == MPI_SUCCESS, "MPI returns error %d", mpi_error_); \
    } while (0)

struct MpiGroup {
    MPI_Comm comm;
    int started = 0;                 // collectives
    size_t most = size_t(1) << 30;   // bytes of one MPI message: its counts are ints
    explicit MpiGroup(MPI_Comm comm) : comm(comm) {}
    ~MpiGroup() {
        int over = 0;
        MPI_Finalized(&over);
        if (!over) MPI_Comm_free(&comm);
    }
};

struct MpiOp { // a collective or an exchange on its way
    const Comm* c;
    Call<Cpu> call; // of an exchange: its kind alone
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
inline void mpi_post(MpiOp& op, const Message& m, int tag) {
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
            Share s = share_of(op.call, c.size, c.rank, peer, op.round, op.scratch.get());
            if (send)
                mpi_post(op, {const_cast<char*>(s.send), s.send_bytes, peer, true}, op.tag + op.round);
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
    if (op.c->fixed_order || !sums(call) || type == MPI_DATATYPE_NULL || call.n > INT32_MAX) return false;
    if (!all && call.in_place(op.c->size)) return false; // MPI's place for it is another
    op.requests.emplace_back();
    op.waits_for.push_back(-1);
    const void* in = all && call.in == call.out ? MPI_IN_PLACE : call.in;
    auto start = all ? MPI_Iallreduce : MPI_Ireduce_scatter_block;
    MPI_CHECK(start(in, call.out, int(call.n), type, call.max ? MPI_MAX : MPI_SUM, op.c->mpi->comm,
                    &op.requests[0]));
    op.round = 2;
    return true;
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
        op->scratch.reset(new char[scratch_bytes(call, c.size)]);
        mpi_post_round(*op);
    }
    c.info->outstanding.push_back(op.get());
    return op;
}

inline std::unique_ptr<MpiOp> mpi_start_exchange(const Comm& c, const Message* messages, int count) {
    auto op = std::make_unique<MpiOp>();
    op->c = &c, op->call.kind = Collective::EXCHANGE, op->round = 2;
    for (bool send : {false, true})
        for (int i = 0; i < count; i++)
            if (messages[i].send == send) mpi_post(*op, messages[i], messages[i].tag);
    c.info->outstanding.push_back(op.get());
    return op;
}

inline void mpi_advance(MpiOp& op) {
    int arrived = 0;
    if (op.done) return;
    MPI_CHECK(MPI_Testall(int(op.requests.size()), op.requests.data(), &arrived, MPI_STATUSES_IGNORE));
    if (!arrived) return;
    op.requests.clear(), op.waits_for.clear();
    if (op.round == 0) share_finish(op.call, op.c->size, op.c->rank, op.scratch.get(), Cpu());
    op.done = op.round > 0 || op.call.kind != Collective::ALL_REDUCE;
    if (op.done) return;
    op.round = 1;
    mpi_post_round(op);
}

// A peer may need the second round of one collective before it starts what I wait for: all that is
// outstanding goes on.
inline void mpi_finish(MpiOp& op) {
    const Comm& c = *op.c;
    double start = seconds_now(), limit = c.info->timeout_s;
    for (long polls = 0;; polls++) {
        for (MpiOp* other : std::vector<MpiOp*>(c.info->outstanding)) mpi_advance(*other);
        if (op.done) break;
        if (polls < 1000) continue;
        std::this_thread::sleep_for(std::chrono::microseconds(polls < 10000 ? 20 : 500));
        double waited = seconds_now() - start;
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

// Every process of the job calls; MPI_Init_thread has been called.
inline Comm mpi_world(RankInfo& info) {
    Comm c;
    MPI_Comm comm;
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
#endif

// ----------------------------------------------------------------------------
// NCCL: one process and one GPU a rank; everything happens in the stream's order

#ifdef WITH_NCCL
#ifndef WITH_MPI
#error "WITH_NCCL needs WITH_MPI, which carries NCCL's first message and what the host exchanges"
#endif
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
    constexpr ncclDataType_t TYPES[] = {ncclFloat32, ncclFloat64, ncclBfloat16, ncclFloat16,
                                        ncclInt32,   ncclInt64,   ncclUint8};
    return TYPES[int(e)];
}

inline void nccl_send_receive(const Comm& c, const Message& m, cudaStream_t stream) {
    if (m.bytes == 0) return;
    if (m.send)
        NCCL_CHECK(ncclSend(m.data, m.bytes, ncclUint8, m.peer, c.nccl->comm, stream));
    else
        NCCL_CHECK(ncclRecv(m.data, m.bytes, ncclUint8, m.peer, c.nccl->comm, stream));
}

// NCCL has no tags: messages of a pair go in the order of their tags, equal ones as listed.
inline void nccl_exchange(const Comm& c, const Message* messages, int count, cudaStream_t stream) {
    std::vector<Message> sorted(messages, messages + count);
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](const Message& a, const Message& b) { return a.tag < b.tag; });
    NCCL_CHECK(ncclGroupStart());
    for (const Message& m : sorted) nccl_send_receive(c, m, stream);
    NCCL_CHECK(ncclGroupEnd());
}

inline void nccl_collective(const Comm& c, const Call<cudaStream_t>& call, cudaStream_t stream) {
    ncclComm_t comm = c.nccl->comm;
    ncclRedOp_t op = call.max ? ncclMax : ncclSum;
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
    if (sums(call) && !c.fixed_order) {
        if (call.kind == Collective::ALL_REDUCE)
            NCCL_CHECK(ncclAllReduce(call.in, call.out, call.n, type, op, comm, stream));
        else
            NCCL_CHECK(ncclReduceScatter(call.in, call.out, call.n, type, op, comm, stream));
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

// What a collective needs its input to hold, and what it leaves in its output.
template <typename S> void placement_check(const Comm& c, const Call<S>& call) {
    if (!c.info->placements) return;
    bool sum = call.kind == Collective::ALL_REDUCE || call.kind == Collective::REDUCE_SCATTER;
    bool move = call.kind == Collective::ALL_GATHER || call.kind == Collective::ALL_TO_ALL;
    if (!sum && !move) return;
    Placement needed = sum ? Placement::PARTIAL : Placement::SHARDED;
    const Placements::Row* row =
        placement_find(*c.info->placements, call.in, call.in_bytes(c.size), c.name, &needed);
    if (row)
        comm_stop(c, rank_text(c) + ": " + where_text(c, call.kind) + ": " + row->label + " is " +
                         placement_name(row->holds) + ", it must be " + placement_name(needed));
}
template <typename S> void placement_note(const Comm& c, const Call<S>& call) {
    if (!c.info->placements || call.kind == Collective::BARRIER) return;
    const char* out = call.out ? call.out : call.in; // broadcast's root
    Placements& table = *c.info->placements;
    bool shards = call.kind == Collective::REDUCE_SCATTER || call.kind == Collective::ALL_TO_ALL;
    size_t out_bytes = call.out_bytes(c.size);
    const Placements::Row* row = placement_find(table, out, out_bytes, c.name);
    if (!row && call.in) row = placement_find(table, call.in, call.in_bytes(c.size), c.name);
    if (row)
        placement_set(table, out, out_bytes, c.name,
                      shards ? Placement::SHARDED : Placement::REPLICATED, std::string(row->label));
}

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
    placement_check(c, call);
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
Pending<S> start_exchange(const Comm& c, const Message* messages, int count, S where) {
    Pending<S> p;
    CHECK(c.size > 1 || count == 0, "a message in '%s', a group of one", c.name.c_str());
    if (count == 0) return p;
    p.c = &c, p.call.kind = Collective::EXCHANGE, p.where = where;
    for (int i = 0; i < count; i++)
        CHECK(messages[i].peer >= 0 && messages[i].peer < c.size && messages[i].tag >= 0 &&
                  messages[i].tag < MESSAGE_TAGS,
              "message %d of %d in '%s': peer %d, tag %d", i, count, c.name.c_str(),
              messages[i].peer, messages[i].tag);
    if (c.local) {
        wait_for(where);
        for (int i = 0; i < count; i++) {
            const Message& m = messages[i];
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
    return {kind, reinterpret_cast<const char*>(in), reinterpret_cast<char*>(out), n,
            element_of<T>(), 0, max, max ? maximum : sum};
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
template <typename T, typename S>
void broadcast(const Comm& c, T* x, size_t n, int root, S where) {
    Pending<S> p = start_broadcast(c, x, n, root, where);
    finish(p);
}
template <typename S>
void exchange(const Comm& c, const Message* messages, int count, S where) {
    Pending<S> p = start_exchange(c, messages, count, where);
    finish(p);
}
template <typename S> void barrier(const Comm& c, S where) {
    Pending<S> p = comm_start<S>(c, {Collective::BARRIER, nullptr, nullptr, 0}, where);
    finish(p);
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
