// adapters.h - LoRA's tables: which matrices have adapters, where A and B lie, how they are cut
//   1. which    the matrices of blocks that --lora-targets names, or those of a file; all else is
//               frozen: no gradient, no REDUCE, no optimizer's state
//   2. where    A (r,in) and B (out,r) of a block's matrices in a bucket beside it, "adapter.l",
//               which is sharded, reduced and updated as any other
//   3. cut      as its matrix over tp: of a column-parallel one B's rows, of a row-parallel one A's
//               columns. The other half is whole on every rank, and its gradient a part of a sum
//               over tp, with sequence parallelism or without: Partial::HEADS says so
//                 columns   dA = (s dy_p B_p)^T x       dx += s dy_p B_p A   joins f's sum
//                 rows      dB = s dy^T (x_p A_p^T)     y_p += s x_p A_p^T B^T   joins g's
//               So a micro-batch has no message more, and a step sends r in or r out floats.
//   4. begin    B is zero: the first step's loss is the base's. A is normal with the deviation of
//               PEFT's uniform numbers, 1 / sqrt(3 in).
#pragma once
#include <cmath>
#include "model.h"
#include "text.h"

namespace llmc {

// The matrix that adapters and files name: "h.0.attn.c_attn.weight" without its ending.
inline std::string module_of(const Parameter& p) {
    const std::string ending = ".weight";
    // Biases, and matrices of a stack, are named as they are.
    bool has = p.name.ends_with(ending);
    return has ? p.name.substr(0, p.name.size() - ending.size()) : p.name;
}

// Whether a parameter may have an adapter. Tables and the head may not: ranks look rows up in them,
// and a tied one would need its adapter in two places.
inline bool adaptable(const Model& m, const Parameter& p) {
    return m.buckets[p.bucket].role == Role::BLOCK && p.shape.size() == 2;
}

// Whether a parameter is a half of an adapter.
inline bool is_adapter(const Model& m, const Parameter& p) {
    return m.buckets[p.bucket].role == Role::ADAPTER;
}

// ----------------------------------------------------------------------------
// the tables

// Append the adapters of the block whose bucket is the last one.
inline void add_adapters(Model& m, const std::string& number) {
    if (!m.shape.adapters) return;
    Bucket block = m.buckets.back();
    int layer = block.layers.front();
    add_bucket(m, "adapter." + number, Role::ADAPTER, {layer});
    for (int i = block.first; i < block.first + block.count; i++) {
        const Parameter w = m.parameters[i];
        std::string module = module_of(w);
        auto found = m.shape.adapters->find(module);
        if (found == m.shape.adapters->end()) continue;

        // One half is cut as the matrix is, the other is whole. B's rows have the matrix's parts,
        // as q, k, v in one, and its key/value heads, which several ranks may share.
        size_t r = found->second.rank;
        Shard whole = {-1, 1, 0, Partial::HEADS}, columns = {1};
        Shard of_a = w.shard.axis == 1 ? columns : whole;
        Shard of_b = w.shard.axis == 0 ? w.shard : whole;
        Init normal = normal_init(1 / std::sqrt(3.0 * double(w.cols())));
        m.parameters[i].adapter = int(m.parameters.size());
        add_parameter(m, {module + ".lora_A.weight", {r, w.cols()}, r, false, of_a, normal, true,
                          layer});
        add_parameter(m, {module + ".lora_B.weight", {w.rows(), r}, w.rows(), false, of_b, ZEROS,
                          true, layer});
    }
}

// How fast a parameter learns, of the step's rate. B of an adapter may learn faster than A: the
// wider the model, the less a step of equal rates would change what it says (LoRA+, 2402.12354).
inline float learning_rate_of(const Model& m, const Parameter& p) {
    const std::string end = ".lora_B.weight";
    if (!m.shape.adapters || !p.name.ends_with(end)) return 1;
    return m.shape.adapters->at(p.name.substr(0, p.name.size() - end.size())).rate_of_b;
}

// Beside adapters nothing else is trained. A frozen bucket has no gradient, REDUCE, norm, update or
// moments: passes and arena ask `trainable`.
inline void freeze_base(Model& m) {
    for (Bucket& b : m.buckets)
        b.trainable = !m.shape.adapters || b.role == Role::ADAPTER;
}

// The largest rank of a layer's adapters; 0: it has none. One room of scratch serves all of them:
// a layer's products run one after another.
inline size_t largest_rank(const Model& m, int layer) {
    size_t most = 0;
    for (const Parameter& p : m.parameters)
        if (p.layer == layer && p.adapter >= 0)
            most = std::max(most, m.parameters[p.adapter].rows());
    return most;
}

// ----------------------------------------------------------------------------
// which matrices

// The flags --lora, --lora-alpha, --lora-rs and --lora-targets.
struct LoraOptions {
    size_t rank = 0;
    double alpha = 0;
    bool rank_stabilised = false; // s = alpha / sqrt(r)
    std::string targets = "all";  // attention, or names with commas
};
// The factor of what adapters add: more rank then changes how much they can say, not how loudly.
inline double lora_scale(const LoraOptions& o) {
    return o.alpha / (o.rank_stabilised ? std::sqrt(double(o.rank)) : double(o.rank));
}

// Whether a target means a module: its whole name, or what stands behind a dot of it, as PEFT has
// it: "c_proj" is attn.c_proj and mlp.c_proj.
inline bool targets_module(const std::string& target, const std::string& module) {
    if (target == "all") return true;
    if (target == "attention") return module.find("attn") != std::string::npos;
    // A part of a word is no name: "proj" means nothing.
    return module == target || module.ends_with("." + target);
}

// The last words of a model's modules, for messages: "c_attn, c_proj, c_fc".
inline std::string module_words(const Model& m) {
    std::string words;
    for (const Parameter& p : m.parameters) {
        std::string module = module_of(p);
        std::string word = module.substr(module.rfind('.') + 1);
        bool known = (", " + words + ",").find(", " + word + ",") != std::string::npos;
        if (adaptable(m, p) && !known)
            words += (words.empty() ? "" : ", ") + word;
    }
    return words;
}

// Choose the adapters of a model without any: "", or what is wrong with the flags.
inline std::string choose_adapters(const Model& base, const LoraOptions& o, Adapters* adapters) {
    std::string target;

    // Each target must find something: a misspelt one would train less than was meant.
    for (std::istringstream targets(o.targets); std::getline(targets, target, ',');) {
        bool any = false;
        for (const Parameter& p : base.parameters) {
            std::string module = module_of(p);
            if (!adaptable(base, p) || !targets_module(target, module)) continue;
            any = true;

            // Beyond the matrix's own rank there is nothing to add.
            size_t most = std::min(p.rows(), p.cols());
            if (o.rank > most)
                return concat("--lora ", o.rank, " is beyond ", p.name, ", which is ", p.rows(),
                              " x ", p.cols(), ": use --lora ", most, " or less");
            (*adapters)[module] = {o.rank, lora_scale(o)};
        }
        if (!any)
            return concat("--lora-targets ", target, ": no matrix of a block has this name: try "
                          "all, attention, or some of ", module_words(base));
    }
    return "";
}

} // namespace llmc
