// layout.h - how a run is spread over ranks - arXiv:2104.04473, arXiv:2407.21783
//   world = dp * pp * cp * tp. The first axis of the order has its ranks side by side: by default
//   tp, so that it stays inside a machine, then cp, pp, and dp last. No result depends on the
//   order. Expert parallelism adds no ranks: it divides the ranks of dp * cp once more, or beside
//   whole experts those of dp * cp * tp.
//   The flags make one layout, and layout_at() places a rank in it. Plan, model, shapes and groups
//   of ranks all read that layout. One rank alone is the layout 1x1x1x1, and runs the same code.
#pragma once
#include "comm/group.h"
#include "pipeline.h"
#include <array>
#include <string>
#include <vector>

namespace llmc {

// One dimension of the grid of ranks.
struct Axis {
    int size = 1;
    int rank = 0; // this rank's coordinate
};

// The group of ranks over which a bucket's gradient is summed and its state is sharded.
enum class Group : uint8_t {
    DATA,   // dp * cp: the ranks that see different tokens
    EXPERTS // the ranks of a stage that hold the same experts, or the same parts of them
};

// The way in which attention reaches the keys of other context-parallel ranks, and the order that
// decides which rows of a sequence a rank has (context_parallel.h).
enum class ContextMethod : uint8_t { GATHER, ULYSSES, RING };
enum class ContextOrder : uint8_t { ZIGZAG, CONTIGUOUS, STRIPED };

// How context-parallel ranks share out a sequence.
struct ContextLayout {
    ContextMethod method = ContextMethod::GATHER;
    ContextOrder order = ContextOrder::ZIGZAG;
    int heads = 1; // hybrids: neighbours along cp that exchange heads; `method` joins them
};

// How ranks share out experts, beside their number, Layout::ep.
struct ExpertLayout {
    bool whole = false;    // tp ranks cut no expert, and count as ep ranks (--etp 1)
    bool exchange = false; // send a token only to the ranks that have its experts
};

// Buckets that lie in another tier of memory while no layer uses them (offload.h).
struct OffloadLayout {
    bool weights = false;   // layers find weights where FETCH brings them
    bool gradients = false; // gradients are here only while layers add to them
};

struct Layout {
    // The axes, and the order in which ranks are dealt to them.
    Axis tp, cp, pp, dp;
    std::array<Axis Layout::*, 4> order = {&Layout::tp, &Layout::cp, &Layout::pp, &Layout::dp};
    bool sequence_parallel = false; // tp ranks share out the rows of norms and residual stream
    ContextLayout context;
    int ep = 1; // neighbours that share out each block's experts (routing_axis)
    ExpertLayout experts;

    // ZeRO.
    int zero = 0;       // stage 0 to 3
    int zero_group = 0; // ranks that share out a bucket; 0: all ranks of the bucket's group
    bool weights_near = false; // they share out weights alone, and all ranks the rest (--hpz)
    int prefetch = 1;   // gather a bucket this many layers ahead of its use
    int muon = 0;                // Muon's iterations on matrices of blocks (muon.h); 0: none
    size_t tensor_align = 128;   // elements: tensors start at multiples; 8-bit moments: 256
    OffloadLayout offload;

    // The pipeline. Stage s stands on rank s % pp; its layers end where those of s + 1 begin.
    Pipeline pipeline = Pipeline::ONE_F_ONE_B;
    int chunks = 1;               // stages on each rank
    std::vector<int> first_layer; // each stage's, then the end; empty: one stage holds every layer
    std::vector<Schedule> given;  // Pipeline::GIVEN: every rank's schedule

    int world() const { return dp.size * pp.size * cp.size * tp.size; }
    int stages() const { return pp.size * chunks; }
};

// The same layout, with the coordinates of rank `rank` of the world.
inline Layout layout_at(Layout layout, int rank) {
    for (auto name : layout.order) {
        Axis& axis = layout.*name;
        axis.rank = rank % axis.size;
        rank /= axis.size;
    }
    return layout;
}

// The order that a text like "tp-pp-dp" names, nearest axis first. cp follows tp, or goes in front
// of dp if dp comes before tp.
inline std::array<Axis Layout::*, 4> layout_order(const std::string& text) {
    std::array<Axis Layout::*, 4> order;
    size_t count = 0;
    bool placed = false;
    auto place_cp = [&] {
        if (!placed) order[count++] = &Layout::cp;
        placed = true;
    };

    // Keep cp nearer than dp: groups list their ranks in the world's order, in which group_axis()
    // counts along cp first.
    for (size_t at = 0; at < text.size(); at += 3) {
        char first = text[at];
        if (first == 'd') place_cp();
        order[count++] = first == 't' ? &Layout::tp : first == 'p' ? &Layout::pp : &Layout::dp;
        if (first == 't') place_cp();
    }
    return order;
}

// ----------------------------------------------------------------------------
// a group's ranks: neighbours share out a bucket, and equal places hold the same shard

// The ranks that see different tokens, and this rank's place among them.
inline Axis data_axis(const Layout& layout) {
    const Axis &dp = layout.dp, &cp = layout.cp;
    return {dp.size * cp.size, dp.rank * cp.size + cp.rank};
}

// The ranks that route different tokens. Beside whole experts these are tensor-parallel ranks too,
// which have rows of their own then; they are the nearest neighbours.
inline Axis routing_axis(const Layout& layout) {
    Axis data = data_axis(layout), tp = layout.tp;
    if (!layout.experts.whole) return data;
    return {data.size * tp.size, data.rank * tp.size + tp.rank};
}

// The ranks of a group, and this rank's place among them.
inline Axis group_axis(const Layout& layout, Group group) {
    if (group == Group::DATA) return data_axis(layout);

    // Each of ep neighbours holds different experts; the next ep ranks hold the same ones again.
    Axis all = routing_axis(layout);
    return {all.size / layout.ep, all.rank / layout.ep};
}

// The ranks that share out the experts, and the number of this rank's part.
inline Axis expert_axis(const Layout& layout) {
    return {layout.ep, routing_axis(layout).rank % layout.ep};
}

// The same layout for a plan that cuts no sequence: context-parallel ranks become data-parallel
// ranks. The groups of buckets, and the ranks in them, stay as they were.
inline Layout whole_sequences(Layout layout) {
    // Let neighbours along cp stay neighbours, so that shards keep their owners.
    layout.dp = data_axis(layout);
    layout.cp = {};
    layout.context.heads = 1;
    return layout;
}

// Two axes along cp: the ranks that exchange heads (Ulysses), and the ranks that then share keys.
inline Axis heads_axis(const Layout& layout) {
    // Neighbours exchange heads, so that they stay inside a machine.
    bool all = layout.context.method == ContextMethod::ULYSSES;
    int size = all ? layout.cp.size : layout.context.heads;
    return {size, layout.cp.rank % size};
}
inline Axis keys_axis(const Layout& layout) {
    int heads = heads_axis(layout).size;
    return {layout.cp.size / heads, layout.cp.rank / heads};
}

// Return where in a sequence of T tokens row i of a rank lies.
inline size_t context_row(ContextOrder order, Axis cp, size_t T, size_t i) {
    // Every order is a permutation of the sequence, with the ranks' rows side by side.
    size_t size = size_t(cp.size);
    size_t rank = size_t(cp.rank);
    size_t t = T / size;
    switch (order) {
    case ContextOrder::CONTIGUOUS: return rank * t + i;
    case ContextOrder::STRIPED: return i * size + rank;
    case ContextOrder::ZIGZAG: break;
    }
    // Zigzag: one early and one late chunk. The fewer keys the early one sees, the more
    // the late one.
    size_t half = T / (2 * size);
    size_t late = 2 * size - 1 - rank;
    if (i < half) return rank * half + i;
    return late * half + i - half;
}

// The ranks that share out a bucket, and the number of this rank's shard.
inline Axis shard_axis(const Layout& layout, Group group) {
    Axis all = group_axis(layout, group);
    int shards = layout.zero_group ? layout.zero_group : all.size;
    return {shards, all.rank % shards};
}

// The ranks that hold the same shard, and this rank's place among them.
inline Axis replica_axis(const Layout& layout, Group group) {
    Axis all = group_axis(layout, group);
    int shards = shard_axis(layout, group).size;
    return {all.size / shards, all.rank / shards};
}

// The ranks that share out what an update needs, and the number of this rank's part. With weights
// near, the replicas of a shard of weights share out the update of that shard.
inline Axis update_axis(const Layout& layout, Group group) {
    Axis shard = shard_axis(layout, group);
    if (!layout.weights_near) return shard;
    Axis replica = replica_axis(layout, group);
    return {shard.size * replica.size, shard.rank * replica.size + replica.rank};
}

// ----------------------------------------------------------------------------
// the groups of ranks that a rank works with, made from the layout - arXiv:2104.04473
//   world     all ranks: checkpoints and exports
//   data(g)   a bucket's group: shard, the ranks that share the bucket;
//             replica, the ranks that hold the same shard
//   samples   the ranks that see other tokens of the batch: counts and losses are summed over these
//   pp        this pipeline: activations and their gradients
//   tie       the pipeline's first and last rank, where a tied table has its two gradients
//   tp        the ranks that share each layer; kv: those of them that share a key/value head
//   model     the ranks at one place along dp, which together hold the whole model
//   cp        the ranks that share each sequence; cp_heads: those of them that exchange heads,
//             cp_keys: those that then share keys
//   ep        the ranks that share out each block's experts; edp: those that hold the same ones
//   Each collective returns on its first line in a group of one, so the same code runs on one rank.

// The groups of a bucket. Without hybrid sharding `shard` is the group and `replica` one rank.
struct DataComms {
    Comm shard, replica;
};

// All groups of a rank. A Comm that make_comms() leaves empty is a group of one.
struct Comms {
    Comm world, model, samples, pp, tie, tp, kv, cp, cp_heads, cp_keys, ep;
    DataComms of_group[2]; // by Group

    const DataComms& data(Group group) const { return of_group[int(group)]; }
    DataComms& data(Group group) { return of_group[int(group)]; }

    // Return what buffers hold along each axis; null unless the run checks it (placement.h).
    auto* placements() const { return world.info ? world.info->placements : nullptr; }
};

// Return the ranks whose place in the layout satisfies f, in the world's order.
template <typename F>
std::vector<int> ranks_where(const Layout& layout, F f) {
    std::vector<int> ranks;
    for (int r = 0; r < layout.world(); r++)
        if (f(layout_at(layout, r)))
            ranks.push_back(r);
    return ranks;
}

} // namespace llmc
