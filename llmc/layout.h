// layout.h - how a run is spread over ranks - arXiv:2104.04473, arXiv:2407.21783
//   world = dp * pp * cp * tp. The first axis of the order has its ranks side by side: by default
//   tp, so that it stays inside a machine, then cp, pp, and dp last. No result depends on the
//   order. Expert parallelism makes no ranks: it shares out those of dp * cp once more.
//   A layout is made from the flags once, and layout_at() places a rank in it. Plan, model, shapes
//   and groups of ranks read it from there; a layout of 1x1x1x1 is the same code.
#pragma once
#include <array>
#include <string>
#include <vector>
#include "pipeline.h"

namespace llmc {

struct Axis {
    int size = 1;
    int rank = 0; // this rank's coordinate
};

// The ranks over which a bucket's gradient is summed and its state is sharded.
enum class Group : uint8_t {
    DATA,   // dp * cp: every rank that sees other tokens
    EXPERTS // those of them that hold the same experts
};

// How attention reaches the keys of other context-parallel ranks, and which rows of a sequence a
// rank has (context_parallel.h).
enum class ContextMethod : uint8_t { GATHER, ULYSSES, RING };
enum class ContextOrder : uint8_t { ZIGZAG, CONTIGUOUS, STRIPED };

struct Layout {
    // Axes, and the order in which ranks are dealt to them.
    Axis tp, cp, pp, dp;
    std::array<Axis Layout::*, 4> order = {&Layout::tp, &Layout::cp, &Layout::pp, &Layout::dp};
    bool sequence_parallel = false; // tp ranks share the rows of norms and residual stream
    ContextMethod cp_method = ContextMethod::GATHER;
    ContextOrder cp_order = ContextOrder::ZIGZAG;
    int cp_heads = 1; // hybrids: neighbours along cp that exchange heads, the method joins them
    int ep = 1; // neighbours in Group::DATA that share out each block's experts
    bool ep_exchange = false; // tokens go where their experts are, and no further

    // ZeRO.
    int zero = 0;       // stage 0 to 3
    int zero_group = 0; // ranks that share a bucket; 0: all of the bucket's group
    int prefetch = 1;   // layers ahead of its use that a bucket is gathered
    bool whole_matrices = false; // shards cut no matrix of a block, as the optimizer's row asks
    size_t tensor_align = 128;   // elements: where tensors start; 256 for blocks of 8-bit moments
    bool weights_away = false;   // offload: layers find weights where FETCH brings them,
    bool gradients_away = false; //   and gradients only while they add to them

    // The pipeline. Stage s stands on rank s % pp; its layers end where those of s + 1 begin.
    Pipeline pipeline = Pipeline::ONE_F_ONE_B;
    int chunks = 1;               // stages a rank
    std::vector<int> first_layer; // empty: one stage holds every layer
    std::vector<Schedule> given;  // Pipeline::GIVEN: every rank's schedule

    int world() const { return dp.size * pp.size * cp.size * tp.size; }
    int stages() const { return pp.size * chunks; }
};

// The same layout, as rank `rank` of the world stands in it.
inline Layout layout_at(Layout layout, int rank) {
    for (auto name : layout.order) {
        Axis& axis = layout.*name;
        axis.rank = rank % axis.size;
        rank /= axis.size;
    }
    return layout;
}

// "tp-pp-dp", nearest first; cp stands behind tp, or in front of dp where dp comes before.
inline std::array<Axis Layout::*, 4> layout_order(const std::string& text) {
    std::array<Axis Layout::*, 4> order;
    size_t count = 0;
    bool placed = false;
    auto place_cp = [&] {
        if (!placed) order[count++] = &Layout::cp;
        placed = true;
    };

    // Groups list their ranks in the world's order, and group_axis() counts along cp first: so cp
    // is always nearer than dp.
    for (size_t at = 0; at < text.size(); at += 3) {
        char first = text[at];
        if (first == 'd') place_cp();
        order[count++] = first == 't' ? &Layout::tp : first == 'p' ? &Layout::pp : &Layout::dp;
        if (first == 't') place_cp();
    }
    return order;
}

// ----------------------------------------------------------------------------
// a group of ranks, cut in shards: neighbours share a bucket, equal places hold the same shard

inline Axis group_axis(const Layout& layout, Group group) {
    const Axis &dp = layout.dp, &cp = layout.cp;
    int size = dp.size * cp.size;
    int rank = dp.rank * cp.size + cp.rank;
    if (group == Group::DATA) return {size, rank};

    // Each of ep neighbours holds other experts; the next ep ranks hold them again.
    return {size / layout.ep, rank / layout.ep};
}

// The ranks that share out the experts, and which part of them this rank holds.
inline Axis expert_axis(const Layout& layout) {
    int rank = group_axis(layout, Group::DATA).rank;
    return {layout.ep, rank % layout.ep};
}

// The same layout for a plan that cuts no sequence: context-parallel ranks are data-parallel ones.
// Groups of buckets, and the ranks in them, stay as they were.
inline Layout whole_sequences(Layout layout) {
    // Neighbours along cp stay neighbours, so that shards keep their owners.
    layout.dp = group_axis(layout, Group::DATA);
    layout.cp = {};
    layout.cp_heads = 1;
    return layout;
}

// Along cp: the ranks that exchange heads, as Ulysses has it, and those that then share the keys.
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

// The ranks that share a bucket, and which shard this rank holds.
inline Axis shard_axis(const Layout& layout, Group group) {
    Axis all = group_axis(layout, group);
    int shards = layout.zero_group ? layout.zero_group : all.size;
    return {shards, all.rank % shards};
}

// The ranks that hold the same shard.
inline Axis replica_axis(const Layout& layout, Group group) {
    Axis all = group_axis(layout, group);
    int shards = shard_axis(layout, group).size;
    return {all.size / shards, all.rank / shards};
}

} // namespace llmc
