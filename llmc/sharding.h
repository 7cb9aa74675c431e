// sharding.h - where a bucket's data lie: each rank's share, and the tier of memory
//   The passes of zero.h and offload.h follow these rules, and access.h states what they touch.
#pragma once
#include "action.h"
#include "layout.h"
#include "model.h"
#include "ops/types.h"
#include "optimizer.h"

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
    case Kind::WEIGHT: return layout.zero == 3 || (layout.zero && layout.weights_away);
    case Kind::MASTER:
    case Kind::STATE:
    case Kind::EMA: return layout.zero >= 1;
    // An offloaded gradient lies where its update runs: each rank keeps the range that it updates.
    case Kind::GRAD:
        if (layout.gradients_away) return layout.zero >= 1;
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

// Whether the ranks that hold the same shard of weights share out a bucket's datum among them.
inline bool cut_over_replicas(const Layout& layout, const Model& model, Data d) {
    return layout.weights_near && d.kind != Kind::WEIGHT && is_sharded(layout, model, d);
}

// Whether a bucket needs PUBLISH, because a rank keeps more of its weights than it updates: ZeRO-1
// and 2 keep all of them, and weights that are near are shards of which it updates a part.
inline bool is_published(const Layout& layout, const Bucket& b) {
    bool some_whole = layout.zero == 1 || layout.zero == 2;
    if (layout.weights_near)
        return update_axis(layout, b.group).size > 1;
    return shard_axis(layout, b.group).size > 1 && some_whole && !layout.weights_away;
}

// The datum in which a layer finds its weights.
inline Kind weight_kind(const Layout& layout, const Model& model, int bucket) {
    bool cut = is_sharded(layout, model, {Kind::WEIGHT, bucket});
    return cut || layout.weights_away ? Kind::GATHERED : Kind::WEIGHT;
}
// The datum that FETCH(b) fills: STAGED with a shard that GATHER completes, or GATHERED at once.
inline Kind fetched_kind(const Layout& layout, const Model& model, int bucket) {
    bool cut = is_sharded(layout, model, {Kind::WEIGHT, bucket});
    return cut ? Kind::STAGED : Kind::GATHERED;
}
// The datum in which the step's gradient is summed: GRAD, or GRAD_HERE if gradients are offloaded.
inline Kind summed_kind(const Layout& layout) {
    return layout.gradients_away ? Kind::GRAD_HERE : Kind::GRAD;
}
inline Kind tied_kind(const Layout& layout) {
    return layout.gradients_away ? Kind::TIED_HERE : Kind::GRAD_TIED;
}
// The datum to which a layer adds its gradient.
inline Kind gradient_kind(const Layout& layout, const Model& model, int bucket, int layer) {
    if (reduced_each(layout, model, bucket)) return Kind::PARTIAL;
    bool head_of_tied = model.buckets[bucket].tied() && layer == model.head();
    return head_of_tied ? tied_kind(layout) : summed_kind(layout);
}

// ----------------------------------------------------------------------------
// data in another tier of memory: what lies where, and what moves
//   Offloading a datum is a row of tier_of(). FETCH and PARK move three things:
//     a chunk (b.c)   the update's data that lie in another tier than it runs in -> side by side in
//                     STAGED, and back
//     activations     of a block (m,l), under their own kinds; in their tier they are PARKED
//     a bucket (b)    WEIGHT comes, from its chunks; GRAD goes to its chunks once it is whole;
//                     a gradient that is not whole yet goes and comes back as activations do

// The scale of the step before. Updates that run a step late read it.
constexpr Data LATE_SCALE = {Kind::SCALE, -1, 0};

// Offloading a datum is a row here.
inline Tier tier_of(const Plan& p, Data d) {
    switch (d.kind) {
    case Kind::WEIGHT: return p.offload.weights;
    case Kind::MASTER:
    case Kind::STATE:
    case Kind::EMA: return p.offload.optimizer;
    case Kind::GRAD:
    case Kind::GRAD_TIED: return p.offload.gradients;
    case Kind::SCALE: return d == LATE_SCALE ? p.offload.update : Tier::DEVICE;
    // A chunk is staged where its update runs; a shard of weights, where it is gathered.
    case Kind::STAGED: return d.chunk >= 0 ? p.offload.update : Tier::DEVICE;
    // Layers know parked data under their own kinds, when FETCH has brought them.
    case Kind::PARKED:
        return of_bucket(Kind(d.chunk)) ? p.offload.gradients : p.offload.activations;
    default: return Tier::DEVICE;
    }
}

// The optimizer's own data of a bucket, or of a chunk of it.
inline std::vector<Data> optimizer_data(const Plan& p, int bucket, int chunk) {
    std::vector<Data> data = {{Kind::MASTER, bucket, -1, chunk}};
    int states = int(optimizer_row(p.optimizer).states.size());
    for (int s = 0; s < states; s++)
        data.push_back({Kind::STATE, bucket, s, chunk});
    if (p.ema)
        data.push_back({Kind::EMA, bucket, -1, chunk});
    return data;
}

// All data of an update of a chunk.
inline std::vector<Data> update_data(const Plan& p, int bucket, int chunk) {
    std::vector<Data> data = optimizer_data(p, bucket, chunk);
    data.push_back({Kind::WEIGHT, bucket, -1, chunk});
    data.push_back({Kind::GRAD, bucket, -1, chunk});
    return data;
}

// The data of an update that lie in another tier than it runs in: it finds these in STAGED.
inline std::vector<Data> staged_data(const Plan& p, int bucket, int chunk) {
    std::vector<Data> data = update_data(p, bucket, chunk);
    std::erase_if(data, [&](Data d) { return tier_of(p, d) == p.offload.update; });
    return data;
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

    // An update has its chunk's data side by side in STAGED. All but the gradient go back: no one
    // reads the gradient again.
    if (a.chunk >= 0) {
        data = staged_data(p, a.bucket, a.chunk);
        if (a.op == Op::PARK)
            std::erase_if(data, [](Data d) { return d.kind == Kind::GRAD; });
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
    if (a.chunk >= 0)
        return {{Kind::STAGED, a.bucket, -1, a.chunk}};

    // A whole bucket has the name under which layers reach it.
    switch (a.kind) {
    case Kind::WEIGHT: return {{fetched_kind(p.layout, model, a.bucket), a.bucket}};
    case Kind::GRAD: return {{Kind::GRAD_HERE, a.bucket}};
    // A gradient that is not whole yet has one name where it goes and where it comes.
    default: return {{a.kind, a.bucket}};
    }
}

} // namespace llmc
