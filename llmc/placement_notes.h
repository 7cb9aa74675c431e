// placement_notes.h - what an action leaves along each axis of ranks: whole, shards, parts of a sum
//   Only tests use this (comm/placement.h). Every collective is then checked against the placement
//   of its data, so a sum that is left out or made twice gives an error message.
#pragma once
#include "trainer.h"

namespace llmc {

// Record what a range of memory holds along one axis of ranks.
template <typename T, typename S>
void note_placement(Trainer<T, S>& t, Data d, auto* from, size_t count, const std::string& axis,
                    Placement holds) {
    size_t bytes = count * sizeof(*from);
    placement_set(*t.comms.placements(), from, bytes, axis, holds, data_text(d, t.model));
}

// Record a gradient as a partial sum over each axis that will reduce it, range by range.
template <typename T, typename S>
void note_partial(Trainer<T, S>& t, Data d, std::initializer_list<const char*> axes) {
    const Bucket& b = t.model.buckets[d.of];
    acc_t<T>* grad = address<acc_t<T>>(t, d);

    // Data-parallel ranks have seen other samples: all of the gradient is partial.
    size_t whole = whole_elements(t.layout, b);
    for (const char* axis : axes)
        note_placement(t, d, grad, whole, axis, Placement::PARTIAL);
    const std::string& shards = t.comms.data(b.group).shard.name;
    note_placement(t, d, grad, whole, shards, Placement::PARTIAL);

    // Tensor-parallel ranks share only the first ranges of a bucket.
    size_t over_tp = partial_over_tp(t.layout, b);
    size_t of_heads = b.shared - b.common;
    note_placement(t, d, grad, over_tp, "tp", Placement::PARTIAL);
    note_placement(t, d, grad + b.common, of_heads, "kv", Placement::PARTIAL);
}

// Backward passes, and TIE, leave partial gradients.
template <typename T, typename S>
void note_gradients(Trainer<T, S>& t, const Action& a) {
    if (a.op == Op::TIE)
        note_partial(t, {summed_kind(t.layout), a.bucket}, {"replica"});
    if (!reaches_weights(a.op)) return;
    for (int b : buckets_of(t.model, a.layer)) {
        if (!t.model.buckets[b].trainable) continue;
        Kind kind = gradient_kind(t.layout, t.model, b, a.layer);
        note_partial(t, {kind, b}, {"replica", "tie"});
    }
}

// RELEASE gives bytes to any other data. Find where they lay in the last action that read them.
template <typename T, typename S>
void forget_released(Trainer<T, S>& t, const Action& a) {
    if (a.op != Op::RELEASE) return;
    const Place* gathered = nullptr;
    for (int at = t.at; at >= 0 && !gathered; at--)
        gathered = arena_find(t.arena, t.plan, at, {Kind::GATHERED, a.bucket});
    if (!gathered) return;

    unsigned char* base = t.arena.device().base;
    placement_forget(*t.comms.placements(), base + gathered->offset, gathered->bytes);
}

// UPDATE leaves shards of weights. A late one changes a copy of them, which goes back behind NORM,
// when no layer reads the old ones any more.
template <typename T, typename S>
void note_updated(Trainer<T, S>& t, const Action& a) {
    bool late = t.plans[t.plan].offload.late;
    for (int b = 0; b < int(t.model.buckets.size()); b++) {
        bool updates = a.op == Op::UPDATE && b == a.bucket;
        bool changes = late ? a.op == Op::NORM : updates;
        const Bucket& bucket = t.model.buckets[b];
        if (!changes || !bucket.trainable) continue;

        // Without ZeRO nothing is in shards, and a rank may have no part of a bucket.
        Data weight = {Kind::WEIGHT, b};
        Range range = updated_range(t.layout, t.model, b);
        T* mine = updated_part<T>(t, weight, range);
        if (!range.sharded || !mine) continue;

        // Name the ranks over which PUBLISH will bring these shards together.
        const DataComms& data = t.comms.data(bucket.group);
        const Comm& published = t.layout.weights_near ? data.replica : data.shard;
        note_placement(t, weight, mine, range.count, published.name, Placement::SHARDED);
    }
}

// Record the placement that an action leaves behind, if placements are being checked.
template <typename T, typename S>
void note_placements(Trainer<T, S>& t, const Action& a) {
    if (!t.comms.placements()) return;
    note_gradients(t, a);
    forget_released(t, a);
    note_updated(t, a);
}

} // namespace llmc
