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
#include "action.h"
#include "context.h"
#include "model.h"
#include "ops/linear.cuh"
#include "ops/lora.cuh"
#include "ops/attention_join.cuh"
#include "ops/rand.h"
#include "ops/types.h"
#include "text.h"
#include <cmath>

namespace llmc {

// Return the name that adapters and files give a matrix: "h.0.attn.c_attn.weight" without
// ".weight".
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
    return m.shape.E && (experts || shared);
}

// Whether a parameter may have an adapter. Tables and the head may not: ranks look up rows in them,
// and a tied table would need its adapter in two places.
inline bool adaptable(const Model& m, const Parameter& p) {
    Role role = m.buckets[p.bucket].role;
    // Files join the experts of gpt-oss in one tensor, and PEFT has another form for that.
    bool block = role == Role::BLOCK || (role == Role::EXPERTS && !m.shape.expert_bias);
    return block && p.shape.size() == 2 && !is_router(m, p);
}

// Whether a run of this shape trains adapters, and keeps the base as it is.
inline bool trains_adapters(const Shape& s) { return s.adapters || s.prefix; }

// The positions that are left for text: a prefix takes the first ones.
inline size_t text_positions(const Shape& s) { return s.P - s.prefix; }

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
    if (s.adapters)
        views.push_back({"", s.adapters.get()});
    if (!s.sets) return views;
    for (const AdapterSet& set : *s.sets)
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
            if (found == adapters->end())
                continue;
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
    if (!s.prefix) return;
    int layer = m.buckets.back().layers.front();
    Shard by_heads = {1, 1, int(s.NKV)};
    add_bucket(m, "adapter." + number, Role::ADAPTER, {layer});
    for (const char* half : {".k", ".v"})
        add_parameter(m, {"prefix." + number + half, {s.prefix, s.NKV * s.HS}, s.prefix, false,
                          by_heads, normal_init(PREFIX_STD), true, layer});
}

// Return a parameter's learning rate as a factor of the step's. B of an adapter may learn faster
// than A: the wider the model, the less a step of equal rates would change its output.
// This is LoRA+, arXiv:2402.12354.
inline float learning_rate_of(const Model& m, const Parameter& p) {
    const std::string end = ".lora_B.weight";
    if (!m.shape.adapters || !p.name.ends_with(end))
        return 1;
    return m.shape.adapters->at(p.name.substr(0, p.name.size() - end.size())).rate_of_b;
}

// Freeze the base: beside adapters nothing else is trained. A frozen bucket has no gradient,
// REDUCE, norm, update or moments: the passes and the arena ask `trainable`.
inline void freeze_base(Model& m) {
    bool all = adapter_sets(m.shape).empty() && !m.shape.prefix;
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
        if (p.layer != layer || (p.stack > 1) != experts)
            continue;
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

// Return the last words of a model's modules, for messages: "c_attn, c_proj, c_fc".
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

// Read which of L blocks a list names: "all", or numbers and ranges as in "0,4,8-11".
// Returns "" or what is wrong with it.
inline std::string blocks_named(const std::string& list, size_t L, std::vector<bool>* blocks) {
    blocks->assign(L, list == "all");
    if (list == "all") return "";
    std::string flag = "--lora-layers " + list;
    auto number = [](const std::string& s) {
        bool digits = s.find_first_not_of("0123456789") == std::string::npos;
        return digits && !s.empty() && s.size() < 7;
    };

    // A comma after the last range lets an empty one be seen.
    std::string range;
    for (std::istringstream ranges(list + ","); std::getline(ranges, range, ',');) {
        size_t dash = range.find('-');
        std::string low = range.substr(0, dash);
        std::string high = dash == std::string::npos ? low : range.substr(dash + 1);
        if (!number(low) || !number(high))
            return concat(flag, ": \"", range, "\" is no block and no range: write 3 or 8-11");

        // Refuse ranges that run down, and blocks that the model does not have.
        size_t from = std::stoul(low), to = std::stoul(high);
        if (from > to)
            return concat(flag, ": ", range, " runs down: write ", to, "-", from);
        if (to >= L)
            return concat(flag, ": the last block is ", L - 1, ": use that or less");
        std::fill(blocks->begin() + long(from), blocks->begin() + long(to) + 1, true);
    }
    return "";
}

// Whether --lora-targets means a matrix. "all" are those that every token meets: adapters of all
// experts would be most of what is trained, so they are asked for by name.
inline bool flag_targets(const std::string& target, const Parameter& p) {
    if (target == "experts") return p.stack > 1;
    bool word = target == "all" || target == "attention";
    return !(word && p.stack > 1) && targets_module(target, module_of(p));
}

// Choose the adapters of a model without any. Returns "" or what is wrong with the flags.
inline std::string choose_adapters(const Model& base, const LoraOptions& o, Adapters* adapters) {
    std::string target;
    std::vector<bool> blocks;
    bool stacks = base.shape.E && !base.shape.expert_bias;
    std::string wrong = blocks_named(o.layers, base.shape.L, &blocks);
    if (!wrong.empty()) return wrong;

    // Insist that each target finds something: a misspelt one would silently train less.
    for (std::istringstream targets(o.targets + ","); std::getline(targets, target, ',');) {
        bool any = false;
        if (target == "experts" && base.shape.expert_bias)
            return "--lora-targets experts: not built for " + base.shape.hf_type +
                   ", whose files join all experts: give all or attention";
        for (const Parameter& p : base.parameters) {
            std::string module = module_of(p);
            if (!adaptable(base, p) || !flag_targets(target, p))
                continue;
            if (!blocks[size_t(p.layer - 1)]) continue; // layer 1 is block 0
            any = true;

            // Refuse a rank beyond the matrix's own: it adds nothing.
            size_t rows = p.rows() / p.stack; // of one expert's
            size_t most = std::min(rows, p.cols());
            if (o.rank > most)
                return concat("--lora ", o.rank, " is beyond ", p.name, ", which is ", rows, " x ",
                              p.cols(), ": use --lora ", most, " or less");
            (*adapters)[module] = {o.rank, lora_scale(o)};
        }
        if (!any)
            return concat("--lora-targets ", target, ": no matrix of a block ",
                          o.layers == "all" ? "" : "of --lora-layers ", "has this name: try all, "
                          "attention, ", stacks ? "experts, " : "", "or some of ",
                          module_words(base));
    }
    return "";
}

// ----------------------------------------------------------------------------
// the adapters beside a layer's matrices: one of all rows, or one of each sequence
//   1. one    --lora, --adapter: every matrix has at most one adapter, which serves all rows
//   2. many   --adapters: sets of adapters of one base, each with a name. Their parameters lie in
//             the bucket "adapter.l" beside each other, called NAME:MODULE.lora_A.weight, and are
//             cut, sharded and gathered like the single one's. A text of generation names its set;
//             ctx.batch.adapters says it of each sequence, and lora.cuh multiplies.
//   Cost: sets * r (in + out) elements a matrix; the base lies in memory once.

template <typename T, typename S> struct Trainer;

// The adapters of one layer, bound to their weights.
struct LayerAdapters {
    size_t sets = 0;        // adapters of a matrix; 0: the layer has none
    bool by_rows = false;   // sequences choose among them
    std::vector<Lora> all = {}; // (rows of the block's table, sets); rank 0: no adapter
    LoraRuns rows = {};     // which rows use which set

    // Give a weight its adapters; `row` is its place in the block's table.
    void point(Weight& w, size_t row) const {
        if (!sets) return;
        const Lora* first = &all[row * sets];
        if (by_rows) w.runs = &rows;
        if (by_rows || first->rank)
            w.lora = first;
    }
};

// Bind the prefix of a layer: keys and values are two rows of the table. Without training their
// gradients are null.
template <typename T, typename S>
PrefixRows layer_prefix(const Trainer<T, S>& t, const Action& a) {
    const Model& m = t.model;
    if (!m.shape.prefix) return {};
    int bucket = find_bucket(m, Role::ADAPTER, a.layer);
    const Parameter *k = &m.parameters[m.buckets[bucket].first], *v = k + 1;
    const T* weights = weights_of(t, bucket);
    acc_t<T>* grads = gradients_of(t, bucket, a.layer);
    PrefixRows bound = {weights + k->offset, weights + v->offset};
    bound.n = m.shape.prefix;
    bound.accumulate = !a.first;
    if (!grads) return bound;
    bound.dk = grads + k->offset;
    bound.dv = grads + v->offset;
    return bound;
}

// Bind the adapters of a layer's block, or of its experts; `of` is that bucket's role. Each lies at
// its A, with B in the row after it. Gradients are null unless the plan trains.
template <typename T, typename S>
LayerAdapters layer_adapters(const Trainer<T, S>& t, const Action& a, Role of) {
    const Model& m = t.model;
    // Sets leave experts alone (tune/named_adapters.h).
    int base = find_bucket(m, of, a.layer);
    bool any = m.shape.adapters || (m.shape.sets && of == Role::BLOCK);
    if (base < 0 || !any)
        return {};

    // Sequences choose between sets.
    const Batch& batch = t.ctx.batch;
    SetViews sets = adapter_sets(m.shape);
    LayerAdapters bound = {sets.size(), m.shape.sets != nullptr};
    if (bound.by_rows && batch.adapters)
        bound.rows = lora_rows(batch.adapters, batch.B, batch.T);

    // Walk through the table; a set that leaves a matrix alone has no rows there.
    const Bucket& block = m.buckets[base];
    for (int i = 0; i < block.count; i++) {
        const Parameter& w = m.parameters[block.first + i];
        int row = w.adapter;
        for (auto& [prefix, adapters] : sets) {
            Lora& l = bound.all.emplace_back();
            auto found = adapters->find(module_of(w));
            if (w.adapter < 0 || found == adapters->end())
                continue;

            // Point at both halves.
            const Parameter *half = &m.parameters[row], *other = half + 1;
            row += 2;
            const T* weights = weights_of(t, half->bucket);
            acc_t<T>* grads = gradients_of(t, half->bucket, a.layer);
            l = {weights + half->offset, weights + other->offset, nullptr, nullptr,
                 found->second.rank, found->second.scale};
            if (!grads) continue;
            l.da = grads + half->offset;
            l.db = grads + other->offset;
        }
    }
    return bound;
}

} // namespace llmc
