// arena.h - every byte has its place before the run, by the lifetimes that the plan gives
//   Persistent data (weights, gradients, optimizer state, ...) come first; each keeps its bytes for
//   the whole run. All other data are passing: a datum lives from the action that writes it to the
//   last action that reads it, or until a collective that uses it is finished. Data that never live
//   at the same time share bytes.
//   Placing is a malloc run ahead of time: walk the plan, put each new datum into the lowest gap
//   that fits, free each after its last reader. Plans that take turns (train, evaluate, generate)
//   share the bytes of passing data. Each tier of memory is placed by itself; tier_of() says in
//   which one a datum lies. --explain prints this placement as its memory table, so a run uses
//   what it says.
#pragma once
#include <algorithm>
#include <functional>
#include "access.h"
#include "action.h"
#include "comm/comm.h"
#include "model.h"
#include "offload.h"
#include "ops/memory.h"
#include "ops/types.h"
#include "streams.h"

namespace llmc {

// The alignment of data in a tier: a file moves whole blocks.
inline size_t align_of(Tier tier) { return tier == Tier::DISK ? DISK_BLOCK : ARENA_ALIGN; }

enum class ScratchKind : uint8_t {
    WORKSPACE, // working memory of products, norms, attention and embedding
    ALL_ROWS,  // (N,C) the rows of all tensor-parallel ranks
    SLOT_ROWS, // (M,C) rows sorted by expert, on their way into a product or out of it
    TOKEN_ROWS, // (ep,N,C) the rows of all expert-parallel ranks
    EXCHANGE_ROWS, // (2,ep,N,C) rows sent and received, where tokens go only to their experts
    HEADS,     // (rooms,N,NH,HS) keys and values as latent attention expands them
    HEAD,      // the head's own activations (head.h)
    WIDE,      // a frozen matrix, dequantised
    ROOM,      // (N,r) the result of an adapter's first product, which its second one reads
    CONTEXT,   // keys and values of all context-parallel ranks, and their gradients
    NORM_SUMS, // the sum of squares of each chunk
    MUON       // room for a matrix that is orthogonalised, and for its parts
};

// A row of scratch. Its offset counts bytes from the start of the layer's scratch.
struct ScratchRow {
    ScratchKind name;
    size_t offset, bytes;
};

// The scratch of one layer. Rows never share bytes: all of them live while the layer runs.
struct ScratchTable {
    std::vector<ScratchRow> rows;
    size_t bytes = 0;

    void add(ScratchKind name, size_t size) {
        if (!size) return;
        rows.push_back({name, bytes, size});
        bytes += round_up(size, ARENA_ALIGN);
    }
    const ScratchRow* find(ScratchKind name) const {
        for (const ScratchRow& row : rows)
            if (row.name == name) return &row;
        return nullptr;
    }
};

// One life of a datum, and the bytes that belong to it during that life.
struct Place {
    int first, last; // the life's first and last action, by their numbers in the plan
    size_t offset, bytes;
    Tier tier = Tier::DEVICE;
};

// The single allocation of a tier. Passing data begin where the persistent bytes end.
struct Memory {
    unsigned char* base = nullptr;
    std::shared_ptr<Disk> disk;  // Tier::DISK has this in place of a base
    size_t bytes = 0;            // the size of the allocation
    size_t persistent_bytes = 0; // its first part, for persistent data
};

// The places of all data of all plans: made before anything is allocated, never changed by a run.
struct Arena {
    Memory memory[TIERS];
    std::map<Data, Place> lasting;                           // persistent data
    std::vector<std::map<Data, std::vector<Place>>> passing; // [plan]: all lives of each datum
    std::vector<std::vector<Finish>> finish; // [plan]: finish_before(), on which these lives rely
    std::vector<size_t> peak; // [plan]: most bytes live at once on DEVICE, the least possible need

    Memory& device() { return memory[int(Tier::DEVICE)]; }
    const Memory& device() const { return memory[int(Tier::DEVICE)]; }
};

// A function that gives sizes. The caller passes it (sizes.h), so tests can make sizes up.
typedef std::function<size_t(const Plan&, Data)> DataBytes;

// Whether a kind of passing data lives to the end of its plan: its caller reads it afterwards.
inline bool outlives_plan(Kind k) {
    return k == Kind::VALID || k == Kind::LOSS || k == Kind::LOGITS || k == Kind::LOADS;
}

// All lives of every passing datum of a plan, each from its writer to its last reader.
inline std::map<Data, std::vector<Place>> lifetimes(const Plan& p, const Model& model,
                                                    const std::vector<Finish>& finish,
                                                    const DataBytes& bytes_of) {
    std::map<Data, std::vector<Place>> lives;
    int end = int(p.actions.size()) - 1;

    // A life begins without an offset; place_lives() gives it one.
    auto born = [&](std::vector<Place>& all, Data d, int first, int last) {
        all.push_back({first, last, 0, bytes_of(p, d), tier_of(p, d)});
    };

    for (int i = 0; i <= end; i++) {
        Access x = access(p, model, p.actions[i]);

        // A reader prolongs the life. A datum that nobody wrote was given before the plan started.
        for (Data d : x.reads) {
            if (persistent(d.kind)) continue;
            std::vector<Place>& all = lives[d];
            if (all.empty())
                born(all, d, 0, i);
            int& last = all.back().last;
            last = std::max(last, finish[i].reads - 1);
        }

        // A writer begins a new life, unless it changes what is there.
        for (Data d : x.writes) {
            if (persistent(d.kind)) continue;
            std::vector<Place>& all = lives[d];
            bool goes_on = std::count(x.reads.begin(), x.reads.end(), d);
            if (!goes_on)
                born(all, d, i, finish[i].writes - 1);
            if (outlives_plan(d.kind))
                all.back().last = end;
        }
    }
    return lives;
}

// Give each life in one tier an offset, from `start` on. Returns {the end of the highest life, the
// most bytes that live at once}.
inline std::pair<size_t, size_t> place_lives(std::map<Data, std::vector<Place>>& lives, Tier tier,
                                             size_t start, int actions) {
    // Sort the lives by the action that begins them.
    std::vector<std::vector<Place*>> born(actions);
    for (auto& entry : lives)
        for (Place& life : entry.second)
            if (life.bytes && life.tier == tier)
                born[life.first].push_back(&life);

    // Walk the plan as malloc and free would; `now` counts bytes that are live.
    std::vector<Place*> live; // by offset
    size_t top = start, now = 0, peak = 0;
    for (int i = 0; i < actions; i++) {
        // Free the bytes of lives that are over.
        auto dead = [&](Place* l) { return l->last < i; };
        for (Place* l : live)
            now -= dead(l) ? round_up(l->bytes, align_of(tier)) : 0;
        std::erase_if(live, dead);

        // Put each newborn into the lowest gap that fits.
        for (Place* newborn : born[i]) {
            size_t size = round_up(newborn->bytes, align_of(tier));
            size_t offset = start;
            size_t k = 0;

            // `live` is sorted by offset, so the first gap that is wide enough is the lowest.
            while (k < live.size() && offset + size > live[k]->offset) {
                offset = std::max(offset,
                                  live[k]->offset + round_up(live[k]->bytes, align_of(tier)));
                k++;
            }
            newborn->offset = offset;
            live.insert(live.begin() + k, newborn);
            top = std::max(top, offset + size);
            now += size;
        }
        peak = std::max(peak, now);
    }
    return {top, peak};
}

// Place persistent data one after the other, each with the most bytes that any plan needs for it.
// Plans agree on the sizes of most data; only the cache and constants grow with a plan's length.
inline void place_lasting(Arena& arena, const std::vector<Plan>& plans, const Model& model,
                          const DataBytes& bytes_of) {
    // Find the most bytes that any plan needs for each datum.
    for (const Plan& p : plans)
        for (const Action& a : p.actions) {
            Access x = access(p, model, a);
            x.reads.insert(x.reads.end(), x.writes.begin(), x.writes.end());
            for (Data d : x.reads) {
                if (!persistent(d.kind)) continue;
                Place& place = arena.lasting[d];
                place.bytes = std::max(place.bytes, bytes_of(p, d));
                place.tier = tier_of(p, d);
            }
        }

    // Give each its offset in its tier.
    for (auto& entry : arena.lasting) {
        Place& place = entry.second;
        size_t& end = arena.memory[int(place.tier)].persistent_bytes;
        place.offset = end;
        end += round_up(place.bytes, align_of(place.tier));
    }
}

// Give a place to every datum that the plans touch. Nothing is allocated yet.
inline Arena arena_place(const std::vector<Plan>& plans, const Model& model,
                         const DataBytes& bytes_of) {
    Arena arena;
    place_lasting(arena, plans, model, bytes_of);
    for (Memory& m : arena.memory)
        m.bytes = m.persistent_bytes;

    // Place the passing data of each plan from the same start: two plans never run at once.
    for (const Plan& p : plans) {
        arena.finish.push_back(finish_before(p, model));
        auto lives = lifetimes(p, model, arena.finish.back(), bytes_of);

        // Place tier by tier; a tier must hold the largest plan.
        arena.peak.push_back(0);
        for (Tier tier : {Tier::DEVICE, Tier::HOST, Tier::DISK}) {
            Memory& m = arena.memory[int(tier)];
            auto [top, peak] = place_lives(lives, tier, m.persistent_bytes, int(p.actions.size()));
            m.bytes = std::max(m.bytes, top);
            if (tier == Tier::DEVICE)
                arena.peak.back() = peak;
        }
        arena.passing.push_back(std::move(lives));
    }
    return arena;
}

// Whether a tier lies in the memory where a rank's step runs. On a CPU that is the host's memory,
// which offloaded data take too.
template <typename S> bool is_here(Tier tier, S) {
    bool one_memory = std::is_same_v<S, Cpu> && !sizes_of_gpu;
    return tier == Tier::DEVICE || (tier == Tier::HOST && one_memory);
}
// The bytes that a rank takes of the memory where its step runs.
template <typename S> size_t bytes_here(const Arena& arena, S where) {
    size_t host = arena.memory[int(Tier::HOST)].bytes;
    return arena.device().bytes + (is_here(Tier::HOST, where) ? host : 0);
}

// Allocate each tier's memory, zero-filled. folder: where the file of Tier::DISK is made.
template <typename S>
void arena_allocate(Arena& arena, S where, const std::string& folder = "") {
    Memory& m = arena.device();
    m.base = static_cast<unsigned char*>(device_memory(m.bytes, where));
    LLMC_USER_CHECK(
        m.base,
        "this run needs %.1f MiB and the machine refuses them: try a smaller --micro-batch, "
        "--recompute full, or a smaller --model (--explain shows where they go)",
        m.bytes / 1048576.0);

    // Allocate the host's memory for data that are offloaded to it.
    Memory& host = arena.memory[int(Tier::HOST)];
    if (host.bytes)
        host.base = static_cast<unsigned char*>(host_memory(host.bytes, where));
    LLMC_USER_CHECK(!host.bytes || host.base,
                    "--offload-to cpu needs %.1f MiB of the host and the machine refuses them: try "
                    "--offload-to with a folder",
                    host.bytes / 1048576.0);

    // Make the file for data that are offloaded to disk.
    Memory& file = arena.memory[int(Tier::DISK)];
    if (file.bytes) {
        file.disk = std::make_shared<Disk>();
        std::string wrong = disk_open(*file.disk, folder, file.bytes);
        LLMC_USER_CHECK(wrong.empty(), "--offload-to %s", wrong.c_str());
    }
}

// Free each tier's memory by one call: a tier's passing and persistent data are one block.
template <typename S>
void arena_free(Arena& arena, S where) {
    // End the file's threads before the memory that they move goes.
    arena.memory[int(Tier::DISK)].disk.reset();
    Memory& m = arena.device();
    if (m.base)
        device_free(m.base, m.bytes, where);
    m.base = nullptr;

    // Free the host's memory by a call of its own: beside a device it is pinned.
    Memory& host = arena.memory[int(Tier::HOST)];
    if (host.base)
        host_free(host.base, host.bytes, where);
    host.base = nullptr;
}

// The place of a datum while action `at` of a plan runs, or null: the datum does not live then.
inline const Place* arena_find(const Arena& arena, int plan, int at, Data d) {
    if (persistent(d.kind)) {
        auto it = arena.lasting.find(d);
        return it == arena.lasting.end() || !it->second.bytes ? nullptr : &it->second;
    }

    // Find the life that includes this action. A datum may have several in a plan, one at a time.
    auto it = arena.passing[plan].find(d);
    if (it == arena.passing[plan].end()) return nullptr;
    for (const Place& life : it->second)
        if (life.first <= at && at <= life.last && life.bytes)
            return &life;
    return nullptr;
}

} // namespace llmc
