// adapter_sets.h - the adapters beside a layer's matrices: one of all rows, or one of each sequence
//   1. one    --lora, --adapter: every matrix has at most one adapter, which serves all rows
//   2. many   --adapters: sets of adapters of one base, each with a name. Their parameters lie in
//             the bucket "adapter.l" beside each other, called NAME:MODULE.lora_A.weight, and are
//             cut, sharded and gathered like the single one's. A text of generation names its set;
//             ctx.batch.adapters says it of each sequence, and lora_batch.cuh multiplies.
//   Cost: sets * r (in + out) elements a matrix; the base lies in memory once.
#pragma once
#include "action.h"
#include "adapters.h"
#include "context.h"
#include "linear.cuh"

namespace llmc {

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
    // Sets leave experts alone (io/named_adapters.h).
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
