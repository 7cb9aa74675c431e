// offload.h - offload: state, gradients, weights elsewhere - arXiv:2101.06840, arXiv:2104.07857
//   Float masters and moments are 12 of AdamW's 18 bytes per parameter, and a step touches them
//   once. They lie in the host's memory or in a file and pass through the device in chunks of 2^24:
//     FETCH(b.c)   masters and moments of chunk c of bucket b -> STAGED   `prefetch` chunks ahead
//     UPDATE(b.c)  the optimizer, on STAGED and the device's gradients
//     PARK(b.c)    STAGED -> where they lie                               one chunk behind
//   The CPU can update them where they lie instead, as ZeRO-Offload does: FETCH brings a chunk's
//   gradient and weights, PARK takes the weights back: 8 bytes per parameter instead of 24.
//   Activations: what a block keeps for its backward pass leaves the device until then. With
//   `--recompute full` that is the block's input alone, and the device's memory does not grow with
//   the number of layers:
//     PARK(m,l)    input and kept activations -> where they lie           after F(m,l)
//     FETCH(m,l)   back                                  `prefetch` actions before R, B or I (m,l)
//   Weights: a bucket's weights arrive for each use, as ZeRO-3's do. RELEASE drops them, and UPDATE
//   finds a chunk of them in STAGED. Every level of ZeRO then keeps them in shards (zero.h):
//     FETCH(b)     weights, or a shard -> the device       `prefetch` actions before F, R, B; of a
//                                                          shard, before its GATHER
//   Gradients: a bucket's gradient leaves when no layer adds to it for long. The sums of its
//   squares stay for NORM, and UPDATE finds a chunk of it in STAGED:
//     PARK(grad b)   after the last B of a micro-batch, or its REDUCE or TIE
//     FETCH(grad b)  back        `prefetch` actions before the next one, of another micro-batch
//     SQUARE(b)      sums of squares of a complete gradient, before it leaves
//   The update is the same kernel on the same numbers: no bit depends on the tier. ZeRO-1 to 3
//   shard the state first, so each rank moves its own shard (ZeRO-Offload, ZeRO-Infinity).
//   Muon: MUON(momentum b.c) puts u in the gradient's place, between FETCH and PARK of its own.
//   MUON then has all gradients on the device, where they stay, as NorMuon's few moments do.
//   Memory of P parameters in bf16 on one rank, in bytes, with prefetch 1:
//     device 6 P + 3 chunks of 12 bytes an element (604 MB whatever P is)      host or file 12 P
//     with weights: 4 P + 3 chunks of 14, and the weights of 2 or 3 layers                 14 P
//     with gradients too: 3 chunks of 18, and gradients of as many layers                  18 P
//   Time: a step moves 24 P bytes while it computes 6 P N floating-point operations for N tokens.
//   The moves are hidden for N > 4 F/w tokens, at F operations and w bytes a second.
//   This file has the tables of what lies where and what moves, then the passes that insert moves.
//   transfers.h carries them out.
#pragma once
#include "action.h"
#include "optimizer.h"
#include "layout.h"
#include "model.h"
#include "ops/matmul.cuh"
#include "ops/memory.h"
#include "ops/types.h"
#include "recompute.h"
#include "sharding.h"
#include "comm/text.h"
#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <zlib.h>
#ifdef __SSE4_2__
#include <nmmintrin.h>
#endif
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace llmc {

// ----------------------------------------------------------------------------
// the data that may lie in another tier, by the words of --offload

typedef Tier Offload::*OffloadTier; // nvcc's own spelling of a member like this one gives a warning
struct OffloadRow {
    const char* name;
    OffloadTier tier;
};
constexpr OffloadRow OFFLOAD_TABLE[] = {
    {"optimizer", &Offload::optimizer},
    {"gradients", &Offload::gradients},
    {"weights", &Offload::weights},
    {"activations", &Offload::activations},
};
// Its rows by number.
enum OffloadRows {
    OPTIMIZER,
    GRADIENTS,
    WEIGHTS,
    ACTIVATIONS,
    OFFLOAD_ROWS,
};

// The layout, which then says whether weights and gradients are offloaded to another tier.
inline Layout with_tiers(Layout layout, const Offload& offload) {
    layout.offload.weights = offload.weights != Tier::DEVICE;
    layout.offload.gradients = offload.gradients != Tier::DEVICE;
    return layout;
}

// ----------------------------------------------------------------------------
// data in another tier of memory: what lies where, and what moves
//   Offloading a datum is a row of tier_of(). FETCH and PARK move three things:
//     a chunk (b.c)   the update's data that lie in another tier than it runs in -> side by side in
//                     STAGED, and back
//     activations     of a block (m,l), under their own kinds; in their tier they are PARKED
//     a bucket (b)    WEIGHT comes, from its chunks; GRAD goes to its chunks once it is whole;
//                     a gradient that is not whole yet goes and comes back as activations do

// Offloading a datum is a row here.
inline Tier tier_of(const Plan& p, Data d) {
    using enum Kind;
    switch (d.kind) {
    case WEIGHT: return p.offload.weights;
    case MASTER:
    case STATE:
    case EMA: return p.offload.optimizer;
    case GRAD:
    case GRAD_TIED: return p.offload.gradients;
    // A chunk is staged where its update runs; a shard of weights, where it is gathered.
    case STAGED: return d.chunk >= 0 ? p.offload.update : Tier::DEVICE;
    case MOMENTUM: return p.offload.update;
    // Layers know parked data under their own kinds, when FETCH has brought them.
    case PARKED:
        return of_bucket(Kind(d.chunk)) ? p.offload.gradients : p.offload.activations;
    default: return Tier::DEVICE;
    }
}

// The datum in which an update, or MUON for its momentum, finds what comes to it.
inline Data staged_of(const Action& a) {
    Kind kind = a.kind == Kind::MOMENTUM ? a.kind : Kind::STAGED;
    return {kind, a.bucket, -1, a.chunk};
}

// All data of an update of a bucket, or of a chunk of it, or of its momentum's update.
// staged: what staged_of() gives.
inline std::vector<Data> update_data(const Plan& p, Data staged) {
    int bucket = staged.of;
    int chunk = staged.chunk;
    if (staged.kind == Kind::MOMENTUM)
        return {{Kind::STATE, bucket, 0, chunk}, {Kind::GRAD, bucket, -1, chunk}};
    std::vector<Data> data = {{Kind::MASTER, bucket, -1, chunk}};
    int states = int(optimizer_row(p.optimizer).states.size());
    for (int s = 0; s < states; s++)
        data.push_back({Kind::STATE, bucket, s, chunk});
    if (p.ema)
        data.push_back({Kind::EMA, bucket, -1, chunk});
    data.push_back({Kind::WEIGHT, bucket, -1, chunk});
    data.push_back({Kind::GRAD, bucket, -1, chunk});
    return data;
}

// The data of an update that lie in another tier than it runs in: it finds these in `staged`.
inline std::vector<Data> staged_data(const Plan& p, Data staged) {
    std::vector<Data> data = update_data(p, staged);
    std::erase_if(data, [&](Data d) { return tier_of(p, d) == p.offload.update; });
    return data;
}

// Whether PARK leaves a chunk's datum behind: no one reads a gradient after UPDATE. MUON's goes
// back, since u is in its place.
inline bool is_used_up(const Action& a, Data d) {
    return a.op == Op::PARK && a.kind != Kind::MOMENTUM && d.kind == Kind::GRAD;
}

// The datum that holds a chunk's part: weights and gradients on the device are one piece.
inline Data home_of(const Plan& p, Data d) {
    bool whole = d.kind == Kind::WEIGHT || d.kind == Kind::GRAD;
    if (whole && tier_of(p, d) == Tier::DEVICE)
        d.chunk = -1;
    return d;
}

// The activations of a block that wait for its backward pass, and one of them in its other tier.
inline std::vector<Data> waiting_data(const Action& a) {
    return {{Kind::STREAM, a.layer, a.micro},
            {Kind::KEPT_B, a.layer, a.micro},
            {Kind::KEPT_W, a.layer, a.micro}};
}
inline Data parked(Data d) { return {Kind::PARKED, d.of, d.micro, int(d.kind)}; }

// Chunks of what this rank updates of a bucket. The last one may be shorter.
inline int updated_chunks(const Plan& p, const Model& model, int bucket) {
    size_t elements = kept_elements(p.layout, model, {Kind::MASTER, bucket});
    return int(ceil_div(elements, p.offload.chunk));
}

// Return the number of chunks by which this rank updates a bucket; 0 means all at once, because
// nothing of the bucket is offloaded.
inline int offload_chunks(const Plan& p, const Model& model, int bucket) {
    return p.offload.cuts_updates() ? updated_chunks(p, model, bucket) : 0;
}

// Return how many elements chunk `chunk` of `elements` has; chunk -1 is all of them.
inline size_t chunk_elements(const Offload& offload, size_t elements, int chunk) {
    if (chunk < 0) return elements;
    size_t from = std::min(elements, offload.chunk * size_t(chunk));
    return std::min(offload.chunk, elements - from);
}

// Return the part of a range that is chunk `chunk`; chunk -1 is all of it.
inline Range chunk_of(Range range, const Offload& offload, int chunk) {
    size_t count = chunk_elements(offload, range.count, chunk);
    size_t skip = chunk < 0 ? 0 : offload.chunk * size_t(chunk);
    return {range.first + skip, count, range.sharded};
}

// Weights and whole gradients of a bucket lie in the chunks that updates stage.
inline bool lies_in_chunks(Kind kind) { return kind == Kind::WEIGHT || kind == Kind::GRAD; }

// The data of a move as they lie in their tiers.
inline std::vector<Data> tiered_data(const Plan& p, const Model& model, const Action& a) {
    std::vector<Data> data;

    // The activations of a block lie apart, each under its own kind.
    if (a.bucket < 0) {
        for (Data d : waiting_data(a))
            data.push_back(parked(d));
        return data;
    }

    // An update has its chunk's data side by side in STAGED.
    if (a.chunk >= 0) {
        data = staged_data(p, staged_of(a));
        std::erase_if(data, [&](Data d) { return is_used_up(a, d); });
        for (Data& d : data)
            d = home_of(p, d);
        return data;
    }

    // Weights come, and gradients go, as a whole bucket; both lie in the chunks of updates.
    if (lies_in_chunks(a.kind)) {
        for (int c = 0; c < updated_chunks(p, model, a.bucket); c++)
            data.push_back({a.kind, a.bucket, -1, c});
        return data;
    }

    // A gradient between two micro-batches is one piece, and parked as activations are.
    return {parked({a.kind, a.bucket})};
}

// The same data where the step runs. STAGED holds all of a chunk.
inline std::vector<Data> moved_data(const Plan& p, const Model& model, const Action& a) {
    // Activations have the names that layers know.
    if (a.bucket < 0) return waiting_data(a);
    if (a.chunk >= 0) return {staged_of(a)};

    // A whole bucket has the name under which layers reach it.
    switch (a.kind) {
    case Kind::WEIGHT: return {{fetched_kind(p.layout, model, a.bucket), a.bucket}};
    case Kind::GRAD: return {{Kind::GRAD_HERE, a.bucket}};
    // A gradient that is not whole yet has one name where it goes and where it comes.
    default: return {{a.kind, a.bucket}};
    }
}

// ----------------------------------------------------------------------------
// passes that insert FETCH, PARK and SQUARE; add_gather() (zero.h) inserts the FETCH of weights

// Before: UPDATE(b). After: UPDATE(b.c) for each chunk; the same for the momentum, ahead of MUON.
inline std::vector<Action> cut_updates(const Plan& in, const Model& model) {
    std::vector<Action> all;
    auto cut = [&](Op op, int bucket, Kind kind) {
        int chunks = offload_chunks(in, model, bucket);
        for (int c = 0; c < chunks; c++)
            all.push_back({op, -1, -1, bucket, false, {}, c, kind});
    };

    for (const Action& a : in.actions) {
        if (a.op == Op::UPDATE) {
            cut(Op::UPDATE, a.bucket, a.kind);
            continue;
        }
        if (a.op == Op::MUON)
            for (int b : muon_buckets(in.layout, model))
                cut(Op::MUON, b, Kind::MOMENTUM);
        all.push_back(a);
    }
    return all;
}

// Before: UPDATE(b). After: UPDATE(b.c) for each chunk, with FETCH before it and PARK after it; the
// same for the momentum. The first chunks set out before NORM, which waits for all ranks; those of
// updates after MUON only behind it, since it changes gradients, and its momentum must be parked.
inline Plan add_offload(Plan in, const Model& model) {
    if (!in.offload.cuts_updates()) return in;
    std::vector<Action> all = cut_updates(in, model);

    // List the fetches of all updates, in their order.
    std::vector<Action> fetches;
    size_t of_momentum = 0;
    for (Action a : all) {
        if (a.chunk < 0) continue;
        of_momentum += a.op == Op::MUON;
        a.op = Op::FETCH;
        fetches.push_back(a);
    }

    // Insert the fetches ahead of their updates.
    Plan p = in.without_actions();
    size_t fetched = 0;
    size_t updated = 0;
    size_t ahead = size_t(p.layout.prefetch);
    size_t last = of_momentum ? of_momentum : fetches.size();
    auto fetch_until = [&](size_t end) {
        for (; fetched < std::min(end, last); fetched++)
            p.actions.push_back(fetches[fetched]);
    };
    for (Action& a : all) {
        if (a.op == Op::NORM)
            fetch_until(ahead);
        if (a.op == Op::MUON && a.chunk < 0)
            last = fetches.size();

        // Park what an update has changed behind it.
        bool moved = a.chunk >= 0;
        if (moved)
            fetch_until(++updated + ahead);
        p.actions.push_back(a);
        a.op = Op::PARK;
        if (moved)
            p.actions.push_back(a);
    }
    return p;
}

// One run of actions that use a gradient without a long gap, by their places in the list. The
// gradient stays on the device from the first to the last.
struct GradientUse {
    int first, last;
    bool writes; // the first action writes the gradient, so nothing needs to be fetched
};

// All gradients' uses in a list of actions, and where the compute actions stand among them.
struct GradientUses {
    std::map<Data, std::vector<GradientUse>> of;
    std::vector<int> places;         // of the compute actions
    std::vector<int> computed = {0}; // [action]: compute actions ahead of it
};

// Note that action i uses a gradient: extend the last use if it was not long ago, else begin one.
inline void note_use(GradientUses& uses, Data d, int i, bool writes, int prefetch) {
    std::vector<GradientUse>& all = uses.of[d];
    int gap = all.empty() ? 0 : uses.computed[i] - uses.computed[all.back().last];
    if (all.empty() || gap > 2 * prefetch + 1)
        all.push_back({i, i, writes});
    all.back().last = i;
}

// List the uses of gradients that move. access: the function of access.h, which includes this file.
template <typename F>
GradientUses gradient_uses(const Plan& in, const Model& model, F access) {
    GradientUses uses;
    for (int i = 0; i < int(in.actions.size()); i++) {
        auto x = access(in, model, in.actions[i]);
        for (const std::vector<Data>* all : {&x.reads, &x.writes})
            for (Data d : *all) {
                bool moves = d.kind == Kind::GRAD_HERE || d.kind == Kind::TIED_HERE;
                if (!moves) continue;
                bool writes = !std::count(x.reads.begin(), x.reads.end(), d);
                note_use(uses, d, i, writes, in.layout.prefetch);
            }

        // Count after the action: a compute action is not ahead of itself.
        if (computes(in.actions[i].op))
            uses.places.push_back(i);
        uses.computed.push_back(int(uses.places.size()));
    }
    return uses;
}

// The place ahead of which FETCH stands: `prefetch` compute actions before the use.
inline int place_to_fetch(const GradientUses& uses, const GradientUse& use, int prefetch) {
    int computed = uses.computed[use.first];
    int from = std::max(0, computed - prefetch);
    return from < computed ? uses.places[from] : use.first;
}

// The place ahead of which PARK stands. A sum over ranks goes on beside the next layers, so its
// gradient leaves only after them.
inline int place_to_park(const Plan& in, const GradientUses& uses, const GradientUse& use) {
    int behind = use.last + 1;
    int until = uses.computed[use.last] + in.layout.prefetch;
    until = std::min(until, int(uses.places.size()));
    bool sums = in.actions[use.last].op == Op::REDUCE;
    if (!sums || until == 0) return behind;
    return std::max(behind, uses.places[until - 1] + 1);
}

// Before: the plan up to UPDATE. After: a gradient leaves the device after a layer, sum or tie if
// the next one comes only long after, and returns ahead of that. After the very last one, SQUARE
// sums its squares, and the gradient goes to where UPDATE finds it in chunks.
template <typename F>
Plan add_gradient_moves(Plan in, const Model& model, F access) {
    if (!in.layout.offload.gradients || in.mode != Mode::TRAIN) return in;

    // Decide what to insert ahead of each place; the one past the last action comes at the end.
    size_t end = in.actions.size();
    std::vector<std::vector<Action>> ahead(end + 1);
    GradientUses uses = gradient_uses(in, model, access);
    for (auto& [d, all] : uses.of)
        for (GradientUse& use : all) {
            // Fetch what an earlier micro-batch has left.
            int at = place_to_fetch(uses, use, in.layout.prefetch);
            if (!use.writes)
                ahead[at].push_back({Op::FETCH, -1, -1, d.of, false, {}, -1, d.kind});

            // TIE has added the tied head's gradient to the other one: it is over.
            int behind = place_to_park(in, uses, use);
            bool over = &use == &all.back();
            if (over && d.kind == Kind::TIED_HERE) continue;

            // Sum the squares while the whole gradient is on the device.
            if (over && is_squared(in.layout, model, d.of))
                ahead[behind].push_back({Op::SQUARE, -1, -1, d.of});
            Kind kind = over ? Kind::GRAD : d.kind;
            ahead[behind].push_back({Op::PARK, -1, -1, d.of, false, {}, -1, kind});
        }

    // Write the list again, with these insertions.
    Plan p = in.without_actions();
    for (size_t i = 0; i <= end; i++) {
        p.actions.insert(p.actions.end(), ahead[i].begin(), ahead[i].end());
        if (i < end) p.actions.push_back(in.actions[i]);
    }
    return p;
}

// Before: F(m,l) and, later, R, B or I (m,l). After: PARK(m,l) after the first and FETCH(m,l)
// ahead of the second, for a block that is parked, if enough compute actions stand between them.
inline Plan add_parking(Plan in, const Model& model) {
    if (in.offload.activations == Tier::DEVICE || in.mode != Mode::TRAIN)
        return in;

    // Find both actions for each block, by their numbers among the compute actions.
    std::map<std::pair<int, int>, std::pair<int, int>> uses; // [micro-batch, layer]
    int count = 0;
    for (const Action& a : in.actions) {
        if (!computes(a.op)) continue;
        // The forward pass comes first; the next action needs the activations again.
        auto [use, fresh] = uses.insert({{a.micro, a.layer}, {count, count}});
        bool second = !fresh && use->second.first == use->second.second;
        if (second) use->second.second = count;
        count++;
    }

    // Decide what to insert before and behind each compute action.
    Insertions before, behind;
    for (auto& [of, use] : uses) {
        // Skip blocks near the head, which need their activations again at once, and those that
        // keep nothing, inside a segment.
        int fetch = use.second - in.layout.prefetch;
        bool near = fetch - use.first <= in.layout.prefetch + 1;
        bool stays = near || !in.offload.parks(of.second);
        if (stays || !model.is_block(of.second) || place_in_segment(in, model, of.second) > 0)
            continue;
        behind[use.first].push_back({Op::PARK, of.first, of.second});
        before[fetch].push_back({Op::FETCH, of.first, of.second});
    }
    return add_around(std::move(in), before, behind);
}

// ----------------------------------------------------------------------------
// the disk: a file in place of memory, moved in blocks with checksums by threads beside compute
//   The file has no name, so a kill leaves nothing behind. It takes its room at once, so a full
//   disk ends a run before its first step. Bytes move in blocks of 1 MiB, past the page cache
//   (O_DIRECT) where the file system allows it: the cache would hold in memory what was to leave
//   it. The checksum of each block stays in memory. A block that comes back changed is an error.
//     disk_move    moves any range now: initial weights, checkpoints
//     disk_start   starts to move a range by the file's threads; disk_finish() waits
//   Each thread owns memory for a block and, beside a device, a stream; that memory is pinned then.
//   So threads wait for no other thread, and the driver stages nothing.
//   Functions that return a text return "" or one line that says what is wrong.

constexpr size_t DISK_BLOCK = size_t(1) << 20; // bytes that move at a time
constexpr size_t DISK_ALIGN = 4096;            // O_DIRECT: of addresses, offsets and lengths
constexpr int DISK_THREADS = 4;                // blocks in flight at once

// A thread's memory for one block, pinned beside a device and aligned for O_DIRECT, and its stream.
template <typename S> struct DiskLane {
    static constexpr size_t ROOM = DISK_BLOCK + DISK_ALIGN;
    S stream;
    void* room;
    unsigned char* bytes; // (DISK_BLOCK) in room
    explicit DiskLane(S where) : stream(open_stream(where)), room(host_memory(ROOM, where)) {
        LLMC_USER_CHECK(room, "--offload-to: no memory for a block of %zu bytes", DISK_BLOCK);
        bytes = reinterpret_cast<unsigned char*>(round_up(uintptr_t(room), uintptr_t(DISK_ALIGN)));
    }
    DiskLane(const DiskLane&) = delete;
    ~DiskLane() {
        host_free(room, ROOM, stream);
        close_stream(stream);
    }
};

// The file, and the threads that move its blocks.
struct Disk {
    int file = -1;
    bool direct = false;        // O_DIRECT: past the page cache
    std::string folder;
    std::vector<uint32_t> sums; // [block]
    std::vector<char> written;  // [block]; a block that was never written reads as zero

    typedef std::function<void(std::shared_ptr<void>& lane)> Job; // lane: the thread's DiskLane
    std::deque<Job> jobs;
    bool ends = false;
    std::mutex lock;
    std::condition_variable changed; // a job was added, a move is over, or the disk ends
    std::vector<std::thread> threads;

    // Drop the moves in flight: nobody waits for them.
    ~Disk() {
        {
            std::lock_guard hold(lock);
            ends = true;
        }
        changed.notify_all();
        for (std::thread& t : threads) t.join();
        if (file >= 0) close(file);
    }
};

// ----------------------------------------------------------------------------
// disk: open

// One thread's life: take jobs until the disk ends.
inline void disk_thread(Disk& d) {
    std::shared_ptr<void> lane;
    for (std::unique_lock hold(d.lock);;) {
        // Sleep until there is something to do.
        d.changed.wait(hold, [&] { return d.ends || !d.jobs.empty(); });
        if (d.ends) return;
        Disk::Job job = std::move(d.jobs.front());
        d.jobs.pop_front();

        // Release the lock, so that others take jobs while this one runs.
        hold.unlock();
        job(lane);
        hold.lock();
    }
}

// Open a file without a name. Returns -1, with errno, if that fails.
inline int open_nameless(const std::string& folder, int flags) {
    int file = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
    if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL))
        return file;

    // Some file systems need a name until the file is open. Take it away at once, also if mkostemp
    // made the file and failed to open it.
    std::string name = folder + "/offload.XXXXXX";
    file = mkostemp(name.data(), O_CLOEXEC | flags);
    int why = errno;
    unlink(name.c_str());
    errno = why;
    return file;
}

// Make the file and take all of its room.
inline std::string disk_open(Disk& d, const std::string& folder, size_t bytes) {
    // Try O_DIRECT first; a file system without it says EINVAL.
    d.folder = folder;
    size_t blocks = ceil_div(bytes, DISK_BLOCK);
    d.file = open_nameless(folder, O_DIRECT);
    d.direct = d.file >= 0;
    if (!d.direct)
        d.file = open_nameless(folder, 0);
    if (d.file < 0)
        return folder + ": no file can be made there: " + strerror(errno);

    // Take the room ahead. Where the file system cannot do that, at least check that it is free.
    int refused;
    do refused = fallocate(d.file, 0, 0, off_t(blocks * DISK_BLOCK));
    while (refused && errno == EINTR);
    if (refused) {
        struct statvfs fs;
        bool known = errno == EOPNOTSUPP && fstatvfs(d.file, &fs) == 0;
        bool fits = known && size_t(fs.f_bavail) * fs.f_frsize >= blocks * DISK_BLOCK;
        if (!fits)
            return concat(folder, ": ", blocks, " MiB of state do not fit: ",
                          known ? "the disk is full" : strerror(errno), "; choose another folder");
    }

    // All blocks begin as zeros, and nothing is written for that.
    d.sums.resize(blocks);
    d.written.resize(blocks);
    for (int i = 0; i < DISK_THREADS; i++)
        d.threads.emplace_back([&d] { disk_thread(d); });
    return "";
}

// ----------------------------------------------------------------------------
// disk: one block

// Move all of a block by `some`, which is pread or pwrite and may move less than it is asked for.
template <typename F>
std::string whole_block(const Disk& d, size_t block, const char* verb, F some) {
    for (size_t done = 0; done < DISK_BLOCK;) {
        ssize_t n = some(done, DISK_BLOCK - done, off_t(block * DISK_BLOCK + done));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
            return concat(d.folder, ": block ", block, " of the offloaded state cannot be ", verb,
                          ": ", n < 0 ? strerror(errno) : "the file ends before it");
        // Resume at a multiple of DISK_ALIGN, as O_DIRECT needs.
        done += size_t(n);
        if (done < DISK_BLOCK)
            done -= done % DISK_ALIGN;
    }
    return "";
}

// Return a block's checksum: CRC-32C by the processor's own instruction where it has one, else
// zlib's CRC-32. The file ends with its run, so the two never meet.
inline uint32_t block_sum(const unsigned char* bytes) {
#ifdef __SSE4_2__
    // An instruction waits three cycles for the one before it: keep three chains, a third each.
    constexpr size_t WORDS = DISK_BLOCK / sizeof(uint64_t), THIRD = WORDS / 3;
    auto next = [&](uint64_t sum, size_t i) {
        uint64_t word;
        memcpy(&word, bytes + i * sizeof(word), sizeof(word));
        return _mm_crc32_u64(sum, word);
    };
    uint64_t first = ~0u, second = ~0u, third = ~0u;
    for (size_t i = 0; i < THIRD; i++) {
        first = next(first, i);
        second = next(second, THIRD + i);
        third = next(third, 2 * THIRD + i);
    }

    // Add the words after the last third.
    for (size_t i = 3 * THIRD; i < WORDS; i++)
        third = next(third, i);

    // Join the chains. A sum enters a word's lower half, so the next chain takes the upper one.
    first = _mm_crc32_u64(first, second << 32);
    return uint32_t(_mm_crc32_u64(first, third << 32));
#else
    return uint32_t(crc32(0, bytes, uInt(DISK_BLOCK)));
#endif
}

// Read a block and compare it with its checksum.
inline std::string read_block(Disk& d, size_t block, unsigned char* to) {
    if (!d.written[block]) {
        memset(to, 0, DISK_BLOCK);
        return "";
    }
    std::string wrong = whole_block(d, block, "read", [&](size_t at, size_t n, off_t offset) {
        return pread(d.file, to + at, n, offset);
    });
    if (wrong.empty() && block_sum(to) != d.sums[block])
        wrong = concat(d.folder, ": block ", block, " of the offloaded state has changed since it "
                       "was written: the disk is at fault, or another program");
    return wrong;
}

// Write a block and keep its checksum.
inline std::string write_block(Disk& d, size_t block, const unsigned char* from) {
    d.sums[block] = block_sum(from);
    d.written[block] = 1;
    return whole_block(d, block, "written", [&](size_t at, size_t n, off_t offset) {
        return pwrite(d.file, from + at, n, offset);
    });
}

// ----------------------------------------------------------------------------
// disk: ranges, from and to the memory of the host or a device

enum class Way { FROM_DISK, TO_DISK };

// The part of a range that lies in one block.
struct BlockPart {
    size_t block, within, bytes; // `within`: the part's offset in its block
};

// Call f(part, at) for each block of a range; `at` counts bytes from the start of the range.
template <typename F>
void for_each_block(size_t offset, size_t bytes, F f) {
    for (size_t at = 0; at < bytes;) {
        // The first and the last part may be less than a block.
        size_t within = (offset + at) % DISK_BLOCK;
        size_t n = std::min(bytes - at, DISK_BLOCK - within);
        f(BlockPart{(offset + at) / DISK_BLOCK, within, n}, at);
        at += n;
    }
}

// Move one part of a block; its other bytes stay. ready() waits until the copy may begin.
template <typename S, typename F>
std::string move_part(Disk& d, Way way, unsigned char* memory, BlockPart part, DiskLane<S>& lane,
                      F ready) {
    // To write part of a block, read the rest of it first.
    unsigned char* there = lane.bytes + part.within;
    std::string wrong;
    if (way == Way::FROM_DISK || part.bytes < DISK_BLOCK)
        wrong = read_block(d, part.block, lane.bytes);
    if (!wrong.empty()) return wrong;

    // The copy is over when this returns: the next part uses the same buffer.
    ready();
    if (way == Way::FROM_DISK) {
        copy_in(memory, there, part.bytes, lane.stream);
        wait_for(lane.stream);
        return "";
    }
    copy_out(there, memory, part.bytes, lane.stream);
    return write_block(d, part.block, lane.bytes);
}

// Move a range of the file now, to or from the host's memory. Stops at the first faulty block.
inline std::string disk_move(Disk& d, Way way, void* memory, size_t offset, size_t bytes) {
    DiskLane<Cpu> lane(Cpu{});
    std::string wrong;
    for_each_block(offset, bytes, [&](BlockPart part, size_t at) {
        unsigned char* here = static_cast<unsigned char*>(memory) + at;
        if (wrong.empty())
            wrong = move_part(d, way, here, part, lane, [] {});
    });
    return wrong;
}

// ----------------------------------------------------------------------------
// disk: moves beside compute

// Ranges that move together. The move ends when the last of their blocks has arrived.
struct DiskMove {
    size_t left = 0; // blocks in flight or waiting
    std::string wrong;
    std::function<void()> ready; // waits until copies may begin
    std::once_flag waited;       // one thread has waited for all
};

// Add a range to a move. Each block is a job. `memory` belongs to the move until the move is over.
// Copies begin once `where` has done what it was given before the move's first range.
template <typename S>
void disk_start(Disk& d, const std::shared_ptr<DiskMove>& move, Way way, void* memory,
                size_t offset, size_t bytes, S where) {
    // Tell the threads which device to use: a new thread uses the first one.
    int device = current_device(where);
    if (!move->ready)
        move->ready = [point = record_point(where)] { wait_here(point); };
    std::lock_guard hold(d.lock);
    for_each_block(offset, bytes, [&](BlockPart part, size_t at) {
        unsigned char* here = static_cast<unsigned char*>(memory) + at;
        move->left++;
        d.jobs.push_back([=, &d](std::shared_ptr<void>& lane) {
            // A copy must not begin before the work that used these bytes is over.
            use_device(device, where);
            if (!lane) lane = std::make_shared<DiskLane<S>>(where);
            auto ready = [&] { std::call_once(move->waited, move->ready); };
            auto& mine = *static_cast<DiskLane<S>*>(lane.get());
            std::string wrong = move_part(d, way, here, part, mine, ready);

            // The last block wakes the waiter.
            std::lock_guard hold(d.lock);
            if (!wrong.empty()) move->wrong = wrong;
            if (--move->left == 0)
                d.changed.notify_all();
        });
    });

    // Wake all threads: a range has many blocks.
    d.changed.notify_all();
}

// Wait until all blocks of a move have arrived.
inline std::string disk_finish(Disk& d, DiskMove& move) {
    // Threads and waiters share one condition: moves are long, so spurious wake-ups are rare.
    std::unique_lock hold(d.lock);
    d.changed.wait(hold, [&] { return move.left == 0; });
    return move.wrong;
}

} // namespace llmc
