// layout.h - how a run is spread over ranks - arXiv:2104.04473, arXiv:2407.21783
//   world = dp * pp * cp * tp. The first axis of the order has its ranks side by side: by default
//   tp, so that it stays inside a machine, then cp, pp, and dp last. No result depends on the
//   order. Expert parallelism adds no ranks: it divides the ranks of dp * cp once more, or beside
//   whole experts those of dp * cp * tp.
//   The flags make one layout, and layout_at() places a rank in it. Plan, model, shapes and groups
//   of ranks all read that layout. One rank alone is the layout 1x1x1x1, and runs the same code.
#pragma once
#include <array>
#include <string>
#include <vector>
#include "pipeline.h"

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

struct Layout {
    // The axes, and the order in which ranks are dealt to them.
    Axis tp, cp, pp, dp;
    std::array<Axis Layout::*, 4> order = {&Layout::tp, &Layout::cp, &Layout::pp, &Layout::dp};
    bool sequence_parallel = false; // tp ranks share out the rows of norms and residual stream
    ContextMethod cp_method = ContextMethod::GATHER;
    ContextOrder cp_order = ContextOrder::ZIGZAG;
    int cp_heads = 1; // hybrids: neighbours along cp that exchange heads; cp_method joins them
    int ep = 1; // neighbours that share out each block's experts (routing_axis)
    bool whole_experts = false; // tp ranks cut no expert, and count as ep ranks (--etp 1)
    bool ep_exchange = false; // send a token only to the ranks that have its experts

    // ZeRO.
    int zero = 0;       // stage 0 to 3
    int zero_group = 0; // ranks that share out a bucket; 0: all ranks of the bucket's group
    bool weights_near = false; // they share out weights alone, and all ranks the rest (--hpz)
    int prefetch = 1;   // gather a bucket this many layers ahead of its use
    bool whole_matrices = false; // shards cut no matrix of a block, as the optimizer's row asks
    size_t tensor_align = 128;   // elements: tensors start at multiples; 8-bit moments: 256
    bool weights_away = false;   // offload: layers find weights where FETCH brings them
    bool gradients_away = false; // offload: gradients are here only while layers add to them

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
    if (!layout.whole_experts) return data;
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
    layout.cp_heads = 1;
    return layout;
}

// Two axes along cp: the ranks that exchange heads (Ulysses), and the ranks that then share keys.
inline Axis heads_axis(const Layout& layout) {
    // Neighbours exchange heads, so that they stay inside a machine.
    bool all = layout.cp_method == ContextMethod::ULYSSES;
    int size = all ? layout.cp.size : layout.cp_heads;
    return {size, layout.cp.rank % size};
}
inline Axis keys_axis(const Layout& layout) {
    int heads = heads_axis(layout).size;
    return {layout.cp.size / heads, layout.cp.rank / heads};
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

} // namespace llmc
