// comm_placement.h - what a buffer holds along an axis: replicated, sharded or partial; a checker
//   A rank that is to be checked keeps a table of its buffers. A collective looks up what it is
//   given (all_reduce and reduce_scatter: partial; all_gather, all_to_all: sharded) and notes what
//   it leaves, so that a sum left out or made twice is a message, not a wrong gradient. Buffers
//   without a row are not followed; a group of one neither looks nor notes.
//   To copy: this file, comm_group.h and common.h.
#pragma once
#include "comm_group.h"

enum class Placement { REPLICATED, SHARDED, PARTIAL };
inline const char* placement_name(Placement p) {
    return p == Placement::REPLICATED ? "replicated"
           : p == Placement::SHARDED  ? "sharded"
                                      : "partial";
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

// [p, p + bytes) becomes another buffer's.
inline void placement_forget(Placements& table, const void* p, size_t bytes) {
    const char *from = static_cast<const char*>(p), *to = from + bytes;
    std::erase_if(table.rows, [&](auto& row) { return row.from < to && from < row.to; });
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

// What is wrong with the input of a collective about to start; empty: nothing.
template <typename S> std::string placement_check(const Comm& c, const Call<S>& call) {
    if (!c.info->placements) return "";
    bool sum = call.kind == Collective::ALL_REDUCE || call.kind == Collective::REDUCE_SCATTER;
    bool move = call.kind == Collective::ALL_GATHER || call.kind == Collective::ALL_TO_ALL;
    if (!sum && !move) return "";
    Placement needed = sum ? Placement::PARTIAL : Placement::SHARDED;
    const Placements::Row* row =
        placement_find(*c.info->placements, call.in, call.in_bytes(c.size), c.name, &needed);
    if (!row) return "";
    return rank_text(c) + ": " + where_text(c, call.kind) + ": " + row->label + " is " +
           placement_name(row->holds) + ", it must be " + placement_name(needed);
}

// A finished collective has left this in its output.
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
