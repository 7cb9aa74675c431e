// sharding.h - each rank's share of a bucket's data
//   The passes of zero.h and offload.h follow these rules, and access.h states what they touch.
#pragma once
#include "action.h"
#include "layout.h"
#include "model.h"

namespace llmc {

// ----------------------------------------------------------------------------
// which ranks sum a bucket's gradient, and what each keeps of it

// Whether a bucket is reduced after each micro-batch into a shard, as ZeRO-2 and 3 do. Not a tied
// table: its two gradients are added first, at the end of the step. Nor a bucket in the same layer
// as a tied table, because an action has one flag, `first`, for all gradients of its layer. For the
// same reason a rank's own experts go with their block, although they have nothing to sum.
inline bool reduced_each(const Layout& layout, const Model& model, int bucket) {
    int ranks = std::max(update_axis(layout, Group::DATA).size,
                         update_axis(layout, Group::EXPERTS).size);
    if (layout.zero < 2 || ranks == 1)
        return false;
    for (int l : model.buckets[bucket].layers)
        for (int other : buckets_of(model, l))
            if (model.buckets[other].tied()) return false;
    return true;
}

// The number of tensor-parallel ranks that hold the same key/value head.
inline int ranks_of_kv_head(const Layout& layout, const Model& model) {
    return std::max(1, layout.tp.size / int(model.shape.NKV));
}

// Elements [0, this) of a bucket have a partial gradient on every tensor-parallel rank; see Bucket.
inline size_t partial_over_tp(const Layout& layout, const Bucket& bucket) {
    return layout.sequence_parallel ? bucket.common : bucket.by_heads;
}

// Whether a bucket has replicated parameters or shared heads, whose gradients add over tp ranks.
inline bool adds_over_tp(const Layout& layout, const Model& model, int bucket) {
    const Bucket& b = model.buckets[bucket];
    bool shares_heads = ranks_of_kv_head(layout, model) > 1 && b.shared > b.common;
    return layout.tp.size > 1 && (partial_over_tp(layout, b) > 0 || shares_heads);
}

// Whether the plan gives a bucket a REDUCE. Without other ranks to sum with it needs none.
inline bool is_reduced(const Layout& layout, const Model& model, int bucket) {
    bool many = group_axis(layout, model.buckets[bucket].group).size > 1;
    bool collected = reduced_each(layout, model, bucket);
    return many || collected || adds_over_tp(layout, model, bucket);
}

// The ranks among which a bucket's datum is cut, if it is, and the number of this rank's part.
inline Axis cut_axis(const Layout& layout, const Model& model, Data d) {
    Group group = model.buckets[d.of].group;
    return d.kind == Kind::WEIGHT ? shard_axis(layout, group) : update_axis(layout, group);
}

// Whether this rank keeps only a shard of a bucket's datum. Each level of ZeRO shards one datum
// more: 1 the optimizer's, 2 the gradient, 3 the weights. Offloaded weights come for each use
// whatever the level is, so every level shards them.
inline bool is_sharded(const Layout& layout, const Model& model, Data d) {
    if (cut_axis(layout, model, d).size == 1)
        return false;
    switch (d.kind) {
    case Kind::WEIGHT: return layout.zero == 3 || (layout.zero && layout.offload.weights);
    case Kind::MASTER:
    case Kind::STATE:
    case Kind::EMA: return layout.zero >= 1;
    // An offloaded gradient lies where its update runs: each rank keeps the range that it updates.
    case Kind::GRAD:
        if (layout.offload.gradients) return layout.zero >= 1;
        return reduced_each(layout, model, d.of);
    case Kind::GRAD_HERE: return reduced_each(layout, model, d.of);
    default: return false;
    }
}

// The range of a bucket's datum that this rank keeps: its length and its start, in elements.
inline size_t kept_elements(const Layout& layout, const Model& model, Data d) {
    size_t whole = whole_elements(layout, model.buckets[d.of]);
    return is_sharded(layout, model, d) ? whole / size_t(cut_axis(layout, model, d).size) : whole;
}
inline size_t kept_first(const Layout& layout, const Model& model, Data d) {
    size_t part = size_t(cut_axis(layout, model, d).rank);
    return is_sharded(layout, model, d) ? kept_elements(layout, model, d) * part : 0;
}

// The range of a bucket that this rank reduces, updates and publishes, counted in elements.
struct Range {
    size_t first, count;
    bool sharded; // ZeRO: others have the rest
};
// Return that range: the whole bucket, or this rank's shard of it under ZeRO.
inline Range updated_range(const Layout& layout, const Model& model, int bucket) {
    const Bucket& b = model.buckets[bucket];
    bool sharded = is_sharded(layout, model, {Kind::MASTER, bucket});
    size_t part = update_elements(layout, b);
    if (!sharded)
        return {0, whole_elements(layout, b), false};
    return {part * size_t(update_axis(layout, b.group).rank), part, true};
}

// Whether this rank contributes its range to a norm. Ranks of a group that update the same range,
// because the bucket is not sharded, hold equal numbers, and only the first of them counts.
inline bool is_first_of_equals(const Layout& layout, const Model& model, int bucket) {
    Axis parts = update_axis(layout, model.buckets[bucket].group);
    return updated_range(layout, model, bucket).sharded || parts.rank == 0;
}

// Whether the ranks that hold the same shard of weights share out a bucket's datum among them.
inline bool cut_over_replicas(const Layout& layout, const Model& model, Data d) {
    return layout.weights_near && d.kind != Kind::WEIGHT && is_sharded(layout, model, d);
}

// Whether this rank's norm counts a bucket. A tied table lives on two stages: the first counts it.
inline bool is_squared(const Layout& layout, const Model& model, int bucket) {
    const Bucket& b = model.buckets[bucket];
    return b.trainable && is_mine(layout, model, b.layers.front());
}

// Whether a bucket needs PUBLISH, because a rank keeps more of its weights than it updates: ZeRO-1
// and 2 keep all of them, and weights that are near are shards of which it updates a part.
inline bool is_published(const Layout& layout, const Bucket& b) {
    bool some_whole = layout.zero == 1 || layout.zero == 2;
    if (layout.weights_near)
        return update_axis(layout, b.group).size > 1;
    return shard_axis(layout, b.group).size > 1 && some_whole && !layout.offload.weights;
}

// The datum in which a layer finds its weights.
inline Kind weight_kind(const Layout& layout, const Model& model, int bucket) {
    bool cut = is_sharded(layout, model, {Kind::WEIGHT, bucket});
    return cut || layout.offload.weights ? Kind::GATHERED : Kind::WEIGHT;
}
// The datum that FETCH(b) fills: STAGED with a shard that GATHER completes, or GATHERED at once.
inline Kind fetched_kind(const Layout& layout, const Model& model, int bucket) {
    bool cut = is_sharded(layout, model, {Kind::WEIGHT, bucket});
    return cut ? Kind::STAGED : Kind::GATHERED;
}
// The datum in which the step's gradient is summed: GRAD, or GRAD_HERE if gradients are offloaded.
inline Kind summed_kind(const Layout& layout) {
    return layout.offload.gradients ? Kind::GRAD_HERE : Kind::GRAD;
}
inline Kind tied_kind(const Layout& layout) {
    return layout.offload.gradients ? Kind::TIED_HERE : Kind::GRAD_TIED;
}
// The datum to which a layer adds its gradient.
inline Kind gradient_kind(const Layout& layout, const Model& model, int bucket, int layer) {
    if (reduced_each(layout, model, bucket)) return Kind::PARTIAL;
    bool head_of_tied = model.buckets[bucket].tied() && layer == model.head();
    return head_of_tied ? tied_kind(layout) : summed_kind(layout);
}

} // namespace llmc
