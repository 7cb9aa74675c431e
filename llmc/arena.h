// arena.h - every byte has its place before the run: one allocation, offsets from lifetimes read off the plan
//   Persistent data (weights, gradients, moments, ...) lie first, each for the whole run.
//   Everything else lives from the action that writes it to the last action that reads what was
//   written, or to the finish of a collective that does; data that never live at the same time share
//   bytes. Placing is a malloc run ahead of time: walk the plan, put each newborn into the lowest gap
//   that fits, let go what nobody reads any more. Plans that take turns (train, evaluate, generate)
//   share the same bytes.
//   The memory table that --explain prints is this placement, so what it says is what the run uses.
#pragma once
#include <algorithm>
#include <functional>
#include "plan.h"

constexpr size_t ARENA_ALIGN = 256;

struct Place {
    int first, last; // actions between which the bytes belong to it
    size_t offset, bytes;
};

struct Arena {
    unsigned char* base = nullptr;
    size_t bytes = 0; // all of it
    size_t persistent_bytes = 0;
    std::map<Data, Place> lasting; // persistent data
    std::vector<std::map<Data, std::vector<Place>>>
        passing;                          // [plan]: each life of each datum, in order
    std::vector<std::vector<int>> finish; // [plan]: finish_before(), which these lives rely on
    std::vector<size_t> peak;             // [plan]: most bytes live at once, the least possible
};

typedef std::function<size_t(const Plan&, Data)> DataBytes;

// What the caller reads when a plan is over lives to its end.
inline bool outlives_plan(Kind k) {
    return k == Kind::VALID || k == Kind::LOSS || k == Kind::LOGITS;
}

inline std::map<Data, std::vector<Place>> lifetimes(const Plan& p, const Model& model,
                                                    const std::vector<int>& finish,
                                                    const DataBytes& bytes_of) {
    std::map<Data, std::vector<Place>> lives;
    int end = int(p.actions.size()) - 1;
    for (int i = 0; i <= end; i++) {
        Access x = access(p, model, p.actions[i]);
        int last = finish[i] - 1; // a collective has its data until it is finished
        for (Data d : x.reads) {
            if (persistent(d.kind)) continue;
            if (!lives.count(d))
                lives[d].push_back({0, i, 0, bytes_of(p, d)}); // given before the plan starts
            lives[d].back().last = std::max(lives[d].back().last, last);
        }
        for (Data d : x.writes) {
            if (persistent(d.kind)) continue;
            bool goes_on = std::count(x.reads.begin(), x.reads.end(), d);
            if (!goes_on) lives[d].push_back({i, last, 0, bytes_of(p, d)});
            if (outlives_plan(d.kind)) lives[d].back().last = end;
        }
    }
    return lives;
}

// Give each life an offset; returns {end of the highest, most bytes live at once}.
inline std::pair<size_t, size_t> place_lives(std::map<Data, std::vector<Place>>& lives,
                                             size_t start, int actions) {
    std::vector<std::vector<Place*>> born(actions);
    for (auto& entry : lives)
        for (Place& life : entry.second)
            if (life.bytes) born[life.first].push_back(&life);
    std::vector<Place*> live; // by offset
    size_t top = start, now = 0, peak = 0;
    for (int i = 0; i < actions; i++) {
        auto dead = [&](Place* l) { return l->last < i; };
        for (Place* l : live) now -= dead(l) ? round_up(l->bytes, ARENA_ALIGN) : 0;
        live.erase(std::remove_if(live.begin(), live.end(), dead), live.end());
        for (Place* newborn : born[i]) {
            size_t size = round_up(newborn->bytes, ARENA_ALIGN), offset = start, k = 0;
            while (k < live.size() && offset + size > live[k]->offset) {
                offset = std::max(offset, live[k]->offset + round_up(live[k]->bytes, ARENA_ALIGN));
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

// Place everything that the plans touch. Nothing is allocated yet.
inline Arena arena_place(const std::vector<Plan>& plans, const Model& model,
                         const DataBytes& bytes_of) {
    Arena arena;
    for (const Plan& p : plans)
        for (Action a : p.actions) {
            Access x = access(p, model, a);
            x.reads.insert(x.reads.end(), x.writes.begin(), x.writes.end());
            for (Data d : x.reads)
                if (persistent(d.kind))
                    arena.lasting[d].bytes = std::max(arena.lasting[d].bytes, bytes_of(p, d));
        }
    size_t offset = 0;
    for (auto& entry : arena.lasting) {
        entry.second.offset = offset;
        offset += round_up(entry.second.bytes, ARENA_ALIGN);
    }
    arena.persistent_bytes = arena.bytes = offset;
    for (const Plan& p : plans) {
        arena.finish.push_back(finish_before(p, model));
        arena.passing.push_back(lifetimes(p, model, arena.finish.back(), bytes_of));
        auto [top, peak] = place_lives(arena.passing.back(), offset, int(p.actions.size()));
        arena.bytes = std::max(arena.bytes, top);
        arena.peak.push_back(peak);
    }
    return arena;
}

// One allocation, zero-filled.
template <typename S> void arena_allocate(Arena& arena, S where) {
    arena.base = static_cast<unsigned char*>(device_memory(arena.bytes, where));
    USER_CHECK(arena.base,
               "this run needs %.1f MiB and the machine refuses them: try a smaller --micro-batch, "
               "--recompute full, or a smaller --model (--explain shows where they go)",
               arena.bytes / 1048576.0);
}

template <typename S> void arena_free(Arena& arena, S where) {
    if (arena.base) device_free(arena.base, arena.bytes, where);
    arena.base = nullptr;
}

// Where a datum lies while action `at` of a plan runs; null where the action has nothing of that
// name.
inline const Place* arena_find(const Arena& arena, int plan, int at, Data d) {
    if (persistent(d.kind)) {
        auto it = arena.lasting.find(d);
        return it == arena.lasting.end() || !it->second.bytes ? nullptr : &it->second;
    }
    auto it = arena.passing[plan].find(d);
    if (it == arena.passing[plan].end()) return nullptr;
    for (const Place& life : it->second)
        if (life.first <= at && at <= life.last && life.bytes) return &life;
    return nullptr;
}
