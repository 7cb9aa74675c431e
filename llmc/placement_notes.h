// placement_notes.h - what an action leaves along each axis of ranks: whole, shards, parts of a sum
//   Only tests use this (comm/placement.h). Every collective is then checked against the placement
//   of its data, so a sum that is left out or made twice gives an error message.
#pragma once
#include "trainer.h"

namespace llmc {

// Record the placement that an action leaves behind, if placements are being checked.
template <typename T, typename S>
void note_placements(Trainer<T, S>& t, const Action& a) {
    Placements* placements = t.comms.placements();
    if (!placements) return;

    // note() records one range of memory; partial() records a gradient, range by range, as a
    // partial sum over the axes that will reduce it.
    auto note = [&](Data d, auto* from, size_t count, const char* axis, Placement holds) {
        size_t bytes = count * sizeof(*from);
        placement_set(*placements, from, bytes, axis, holds, data_text(d, t.model));
    };
    auto partial = [&](Data d, std::initializer_list<const char*> axes) {
        const Bucket& b = t.model.buckets[d.of];
        acc_t<T>* grad = address<acc_t<T>>(t, d);
        size_t whole = whole_elements(t.layout, b);
        for (const char* axis : axes)
            note(d, grad, whole, axis, Placement::PARTIAL);
        note(d, grad, whole, t.comms.data(b.group).shard.name.c_str(), Placement::PARTIAL);
        note(d, grad, partial_over_tp(t.layout, b), "tp", Placement::PARTIAL);
        note(d, grad + b.common, b.shared - b.common, "kv", Placement::PARTIAL);
    };

    // Backward passes, and TIE, leave partial gradients.
    if (reaches_weights(a.op))
        for (int b : buckets_of(t.model, a.layer))
            if (t.model.buckets[b].trainable)
                partial({gradient_kind(t.layout, t.model, b, a.layer), b},
                        {"replica", "tie"});
    if (a.op == Op::TIE)
        partial({summed_kind(t.layout), a.bucket}, {"replica"});

    // RELEASE gives bytes to any other data. Find where they lay in the last action that read them.
    const Place* gathered = nullptr;
    for (int at = t.at; a.op == Op::RELEASE && at >= 0 && !gathered; at--)
        gathered = arena_find(t.arena, t.plan, at, {Kind::GATHERED, a.bucket});
    if (gathered)
        placement_forget(*placements, t.arena.device().base + gathered->offset, gathered->bytes);

    // UPDATE leaves shards of weights. A late one changes a copy of them, which goes back behind
    // NORM, when no layer reads the old ones any more.
    bool late = t.plans[t.plan].offload.late;
    for (int b = 0; b < int(t.model.buckets.size()); b++) {
        bool changes = late ? a.op == Op::NORM : a.op == Op::UPDATE && b == a.bucket;
        if (!changes || !t.model.buckets[b].trainable) continue;
        Data weight = {Kind::WEIGHT, b};
        Range range = updated_range(t.layout, t.model, b);
        T* mine = updated_part<T>(t, weight, range);
        Group group = t.model.buckets[b].group;
        if (!range.sharded || !mine) continue;
        const DataComms& data = t.comms.data(group);
        const Comm& published = t.layout.weights_near ? data.replica : data.shard;
        note(weight, mine, range.count, published.name.c_str(), Placement::SHARDED);
    }
}

} // namespace llmc
