// placement.h - what a buffer holds along an axis: replicated, sharded or partial; a checker
//   A rank that is to be checked keeps a table of its buffers. A collective looks up its input
//   (all-reduce and reduce-scatter need partial, all-gather and all-to-all sharded) and records
//   what its output holds. A sum that is left out or made twice then gives an error message
//   instead of a wrong gradient. Buffers without a row are not checked; a group of one neither
//   looks nor records.
//   To copy: this file, group.h, rank_status.h, elements.h, element_type.h, cuda_common.h, types.h.
#pragma once
#include "group.h"

namespace llmc {

// The state of a buffer over an axis of ranks. Replicated: the same on all ranks. Sharded: each
// rank has a part. Partial: each rank has a term of a sum.
enum class Placement { REPLICATED, SHARDED, PARTIAL };
inline const char* placement_name(Placement p) {
    const char* names[] = {"replicated", "sharded", "partial"};
    return names[int(p)];
}

// The table of one rank.
struct Placements {
    // The label names the buffer in a message.
    struct Row {
        const char* from; // the bytes [from, to)
        const char* to;
        std::string axis, label;
        Placement holds;
    };
    std::vector<Row> rows; // rows of one axis never overlap
};

// ----------------------------------------------------------------------------
// the table

// Record what [p, p + bytes) holds along an axis. Rows that overlap it keep their other bytes.
inline void placement_set(Placements& table, const void* p, size_t bytes, const std::string& axis,
                          Placement holds, const std::string& label) {
    // Skip an empty buffer: its address may lie in another one.
    if (bytes == 0) return;
    const char* from = static_cast<const char*>(p);
    const char* to = from + bytes;

    // Keep the parts of old rows that lie before and after the new row.
    std::vector<Placements::Row> kept;
    for (const Placements::Row& row : table.rows) {
        bool apart = row.axis != axis || row.to <= from || to <= row.from;
        if (apart || row.from < from)
            kept.push_back({row.from, apart ? row.to : from, row.axis, row.label, row.holds});
        if (!apart && to < row.to)
            kept.push_back({to, row.to, row.axis, row.label, row.holds});
    }

    // Add the new row.
    kept.push_back({from, to, axis, label, holds});
    table.rows = kept;
}

// Forget [p, p + bytes) along every axis, because another buffer will use the bytes.
inline void placement_forget(Placements& table, const void* p, size_t bytes) {
    const char* from = static_cast<const char*>(p);
    const char* to = from + bytes;
    std::erase_if(table.rows, [&](auto& row) { return row.from < to && from < row.to; });
}

// Return the first row that overlaps [p, p + bytes) and, if `needed` is given, holds something
// else; null if there is none.
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
// the checker

// Return "" or what is wrong with the input of a collective that is about to start.
template <typename S>
std::string placement_check(const Comm& c, const Call<S>& call) {
    if (!c.info->placements) return "";
    bool sum = call.kind == Collective::ALL_REDUCE || call.kind == Collective::REDUCE_SCATTER;
    bool move = call.kind == Collective::ALL_GATHER || call.kind == Collective::ALL_TO_ALL;
    if (!sum && !move) return "";

    // Find a buffer in the table that holds something else.
    Placement needed = sum ? Placement::PARTIAL : Placement::SHARDED;
    const Placements::Row* row =
        placement_find(*c.info->placements, call.in, call.in_bytes(c.size), c.name, &needed);
    if (!row) return "";
    return rank_text(c) + ": " + where_text(c, call.kind) + ": " + row->label + " is " +
           placement_name(row->holds) + ", it must be " + placement_name(needed);
}

// Record what a finished collective has left in its output, if its input or output is in the table.
template <typename S>
void placement_note(const Comm& c, const Call<S>& call) {
    if (!c.info->placements || call.kind == Collective::BARRIER) return;
    Placements& table = *c.info->placements;
    const char* out = call.out ? call.out : call.in; // a broadcast's root has no output
    size_t out_bytes = call.out_bytes(c.size);
    // An all-to-all leaves different data on each rank, as a reduce-scatter does.
    bool shards = call.kind == Collective::REDUCE_SCATTER || call.kind == Collective::ALL_TO_ALL;
    Placement holds = shards ? Placement::SHARDED : Placement::REPLICATED;

    // Keep the label of the output, or else of the input.
    const Placements::Row* row = placement_find(table, out, out_bytes, c.name);
    if (!row && call.in)
        row = placement_find(table, call.in, call.in_bytes(c.size), c.name);
    if (row)
        placement_set(table, out, out_bytes, c.name, holds, std::string(row->label));
}

} // namespace llmc
