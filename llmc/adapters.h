// adapters.h - LoRA's tables: which matrices have adapters, where A and B lie, how they are cut
//   1. which    The matrices of blocks that --lora-targets names, or those of a file. All else is
//               frozen: no gradient, no REDUCE, no optimizer state.
//   2. where    A (r,in) and B (out,r) of a block's matrices lie in a bucket beside the block's,
//               "adapter.l", which is sharded, reduced and updated like any other.
//   3. cut      Over tp, an adapter is cut as its matrix is: B's rows with a column-parallel
//               matrix, A's columns with a row-parallel one. The other half is whole on every rank;
//               its gradient is a partial sum over tp, with sequence parallelism or without:
//               Partial::HEADS says so.
//                 columns   dA = (s dy_p B_p)^T x       dx += s dy_p B_p A   joins f's sum
//                 rows      dB = s dy^T (x_p A_p^T)     y_p += s x_p A_p^T B^T   joins g's
//               A micro-batch thus has no more messages than without adapters, and a step sends
//               r in or r out floats.
//               Beside a stack of experts both halves are stacks, cut and shared out as it is, in
//               a bucket of their own: "adapter.l.experts".
//   4. begin    B is zero, so the first step's loss is the base model's. A is normal, with the
//               deviation of PEFT's uniform numbers, 1 / sqrt(3 in).
#pragma once
#include "model.h"
#include "ops/rand.h"
#include <cmath>

namespace llmc {

// The name that adapters and files give a matrix: "h.0.attn.c_attn.weight" without ".weight".
inline std::string module_of(const Parameter& p) {
    const std::string ending = ".weight";
    // Keep the names of biases, and of matrices in a stack, as they are.
    bool has = p.name.ends_with(ending);
    return has ? p.name.substr(0, p.name.size() - ending.size()) : p.name;
}

// Whether a matrix chooses experts, or weighs a shared one. Such a matrix has no adapter: its
// product has a form of its own, and its choices stay the base model's.
inline bool is_router(const Model& m, const Parameter& p) {
    bool experts = p.name.ends_with(".gate.weight") || p.name.ends_with(".router.weight");
    bool shared = p.name.ends_with(".shared_expert_gate.weight");
    return m.shape.experts.E && (experts || shared);
}

// Whether a parameter may have an adapter. Tables and the head may not: ranks look up rows in them,
// and a tied table would need its adapter in two places.
inline bool adaptable(const Model& m, const Parameter& p) {
    Role role = m.buckets[p.bucket].role;
    // Files join the experts of gpt-oss in one tensor, and PEFT has another form for that.
    bool block = role == Role::BLOCK || (role == Role::EXPERTS && !m.shape.experts.bias);
    return block && p.shape.size() == 2 && !is_router(m, p);
}

// Whether a run of this shape trains adapters, and keeps the base as it is.
inline bool trains_adapters(const Shape& s) { return s.tuned.adapters || s.tuned.prefix; }

// The positions that are left for text: a prefix takes the first ones.
inline size_t text_positions(const Shape& s) { return s.P - s.tuned.prefix; }

// The deviation of a prefix's first values, equal to a token table's. Rows of deviation 1, as in
// PEFT, would draw most of the attention away from the text at once.
constexpr double PREFIX_STD = 0.02;

// Whether a parameter is one half of an adapter.
inline bool is_adapter(const Model& m, const Parameter& p) {
    return m.buckets[p.bucket].role == Role::ADAPTER;
}

// ----------------------------------------------------------------------------
// the tables

// A shape's sets of adapters, each with what its parameters' names begin with: those that texts
// choose from, or the single one.
typedef std::vector<std::pair<std::string, const Adapters*>> SetViews;
inline SetViews adapter_sets(const Shape& s) {
    SetViews views;
    if (s.tuned.adapters)
        views.push_back({"", s.tuned.adapters.get()});
    if (!s.tuned.sets) return views;
    for (const AdapterSet& set : *s.tuned.sets)
        views.push_back({set.name + ":", &set.adapters});
    return views;
}

// Append both halves of an adapter of rank r beside a matrix w, or beside each matrix of a stack.
inline void add_halves(Model& m, const Parameter& w, const std::string& name, size_t r) {
    // Cut one half as the matrix is cut, and keep the other whole. B's rows have the matrix's
    // parts: q, k, v in one, and key/value heads that several ranks may share.
    Shard whole = {-1, 1, 0, Partial::HEADS}, columns = {1};
    bool of_experts = w.shard.partial == Partial::EXPERTS; // which are whole, as their adapters are
    Shard of_a = of_experts ? w.shard : w.shard.axis == 1 ? columns : whole;
    Shard of_b = of_experts || w.shard.axis == 0 ? w.shard : whole;
    Init normal = normal_init(1 / std::sqrt(3.0 * double(w.cols())));
    size_t rows_of_a = w.stack * r;
    std::string name_a = name + ".lora_A.weight";
    std::string name_b = name + ".lora_B.weight";
    Parameter a = {name_a, {rows_of_a, w.cols()}, rows_of_a, false, of_a, normal, true, w.layer};
    Parameter b = {name_b, {w.rows(), r}, w.rows(), false, of_b, ZEROS, true, w.layer};
    for (Parameter half : {a, b}) {
        half.stack = w.stack;
        half.experts = w.experts;
        add_parameter(m, half);
    }
}

// Append the adapters of a block, or of its experts, whose bucket must be the last one. `number` is
// the number of the block.
inline void add_adapters(Model& m, const std::string& number) {
    SetViews sets = adapter_sets(m.shape);
    if (sets.empty()) return;

    // Copy the bucket: adding one moves the others in memory.
    Bucket block = m.buckets.back();
    std::string whose = block.role == Role::EXPERTS ? ".experts" : "";
    for (int i = block.first; i < block.first + block.count; i++) {
        const Parameter w = m.parameters[i];
        std::string module = module_of(w);

        // A matrix points at its first adapter; those of further sets follow in the sets' order.
        for (auto& [prefix, adapters] : sets) {
            auto found = adapters->find(module);
            if (found == adapters->end()) continue;
            if (m.buckets.back().role != Role::ADAPTER) // a block without adapters has no bucket
                add_bucket(m, "adapter." + number + whose, Role::ADAPTER, block.layers,
                           block.group);
            int& first = m.parameters[i].adapter;
            if (first < 0)
                first = int(m.parameters.size());
            add_halves(m, w, prefix + module, found->second.rank);
        }
    }
}

// Append a block's prefix (attention_join.cuh): n keys and n values, a row for each token. Like the
// projection of keys, they are cut by key/value heads.
inline void add_prefix(Model& m, const std::string& number) {
    const Shape& s = m.shape;
    if (!s.tuned.prefix) return;
    int layer = m.buckets.back().layers.front();
    Shard by_heads = {1, 1, int(s.NKV)};
    add_bucket(m, "adapter." + number, Role::ADAPTER, {layer});
    for (const char* half : {".k", ".v"})
        add_parameter(m, {"prefix." + number + half, {s.tuned.prefix, s.NKV * s.HS},
                          s.tuned.prefix, false, by_heads, normal_init(PREFIX_STD), true, layer});
}

// Freeze the base: beside adapters nothing else is trained. A frozen bucket has no gradient,
// REDUCE, norm, update or moments: the passes and the arena ask `trainable`.
inline void freeze_base(Model& m) {
    bool all = adapter_sets(m.shape).empty() && !m.shape.tuned.prefix;
    for (Bucket& b : m.buckets)
        b.trainable = all || b.role == Role::ADAPTER;
}

// Return the ranks of a matrix's adapters, in the order of their rows.
inline std::vector<size_t> ranks_of(const Model& m, const Parameter& w) {
    std::vector<size_t> ranks;
    for (auto& [prefix, adapters] : adapter_sets(m.shape))
        if (auto found = adapters->find(module_of(w)); w.adapter >= 0 && found != adapters->end())
            ranks.push_back(found->second.rank);
    return ranks;
}

// Return the largest rank of a layer's adapters, or of those of its experts; 0 if it has none. One
// buffer of that rank serves all of them, because a layer's products run one after another.
inline size_t largest_rank(const Model& m, int layer, bool experts = false) {
    size_t most = 0;
    for (const Parameter& p : m.parameters) {
        if (p.layer != layer || (p.stack > 1) != experts) continue;
        for (size_t rank : ranks_of(m, p))
            most = std::max(most, rank);
    }
    return most;
}

// ----------------------------------------------------------------------------
// which matrices

// The options of LoRA, from --lora, --lora-alpha, --lora-rs, --lora-targets and --lora-layers.
struct LoraOptions {
    size_t rank = 0;
    double alpha = 0;
    bool rank_stabilised = false; // s = alpha / sqrt(r)
    std::string targets = "all";  // or "attention", "experts", or names with commas
    std::string layers = "all";   // or blocks counted from 0, as "8-11" or "0,4,8-11"
};
// Return the factor s of what adapters add. It falls with the rank, so that a higher rank can
// express more without changing the output by more.
inline double lora_scale(const LoraOptions& o) {
    return o.alpha / (o.rank_stabilised ? std::sqrt(double(o.rank)) : double(o.rank));
}

// Whether a target means a module: "all", "attention", the module's whole name, or its end after a
// dot, as in PEFT: "c_proj" is both attn.c_proj and mlp.c_proj.
inline bool targets_module(const std::string& target, const std::string& module) {
    if (target == "all") return true;
    if (target == "attention")
        return module.find("attn") != std::string::npos;
    // Match whole words only: "proj" matches nothing.
    return module == target || module.ends_with("." + target);
}

} // namespace llmc
