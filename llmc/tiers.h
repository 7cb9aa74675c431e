// tiers.h - data in another tier of memory: what lies where, and what moves
//   Offloading a datum is a row of tier_of(). FETCH and PARK move three things:
//     a chunk (b.c)   the update's data that lie in another tier than it runs in -> side by side in
//                     STAGED, and back
//     activations     of a block (m,l), under their own kinds; in their tier they are PARKED
//     a bucket (b)    WEIGHT comes, from its chunks; GRAD goes to its chunks once it is whole;
//                     a gradient that is not whole yet goes and comes back as activations do
#pragma once
#include "segments.h"

namespace llmc {

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
