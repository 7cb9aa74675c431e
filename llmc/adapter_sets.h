// adapter_sets.h - the adapters beside a layer's matrices: one of all rows, or one of each sequence
//   1. one    --lora, --adapter: every matrix has at most one adapter, which serves all rows
//   2. many   --adapters: sets of adapters of one base, each with a name. Their parameters lie in
//             the bucket "adapter.l" beside each other, called NAME:MODULE.lora_A.weight, and are
//             cut, sharded and gathered like the single one's. A text of generation names its set;
//             ctx.batch.adapters says it of each sequence, and lora_batch.cuh multiplies.
//   Cost: sets * r (in + out) elements a matrix; the base lies in memory once.
#pragma once
#include "adapters.h"
#include "context.h"
#include "linear.cuh"

namespace llmc {

// The adapters of one layer, bound to their weights.
struct LayerAdapters {
    size_t sets = 0;        // adapters of a matrix; 0: the layer has none
    bool by_rows = false;   // sequences choose among them
    std::vector<Lora> all = {}; // (rows of the block's table, sets); rank 0: no adapter
    LoraRuns rows = {};     // which rows use which set
    PrefixRows prefix = {}; // instead of adapters

    // Give a weight its adapters; `row` is its place in the block's table.
    void point(Weight& w, size_t row) const {
        if (!sets) return;
        const Lora* first = &all[row * sets];
        if (by_rows) w.runs = &rows;
        if (by_rows || first->rank) w.lora = first;
    }
};

// Bind the prefix of a layer: keys and values are two rows of the table. Without training their
// gradients are null.
template <typename T>
PrefixRows layer_prefix(const Model& m, int layer, const T* weights, acc_t<T>* grads, bool first) {
    if (!m.shape.prefix) return {};
    const Bucket& bucket = m.buckets[find_bucket(m, Role::ADAPTER, layer)];
    const Parameter *k = &m.parameters[bucket.first], *v = k + 1;
    PrefixRows bound = {weights + k->offset, weights + v->offset};
    bound.n = m.shape.prefix;
    bound.accumulate = !first;
    if (!grads) return bound;
    bound.dk = grads + k->offset;
    bound.dv = grads + v->offset;
    return bound;
}

// Bind the adapters of a layer. Each lies at its A, with B in the row behind it. Gradients are null
// unless the plan trains.
template <typename T>
LayerAdapters layer_adapters(const Model& m, int layer, const Batch& batch, const T* weights,
                             acc_t<T>* grads, bool first) {
    SetViews sets = adapter_sets(m.shape);
    LayerAdapters bound = {sets.size(), m.shape.sets != nullptr};
    bound.prefix = layer_prefix(m, layer, weights, grads, first);
    if (bound.by_rows && batch.adapters)
        bound.rows = lora_rows(batch.adapters, batch.B, batch.T);

    // Walk through the table; a set that leaves a matrix alone has no rows there.
    const Bucket& block = m.buckets[find_bucket(m, Role::BLOCK, layer)];
    for (int i = 0; i < block.count; i++) {
        const Parameter& w = m.parameters[block.first + i];
        int row = w.adapter;
        for (auto& [prefix, adapters] : sets) {
            Lora& l = bound.all.emplace_back();
            auto found = adapters->find(module_of(w));
            if (w.adapter < 0 || found == adapters->end()) continue;

            // Point at both halves.
            const Parameter *a = &m.parameters[row], *b = a + 1;
            row += 2;
            l = {weights + a->offset, weights + b->offset, nullptr, nullptr, a->rows(),
                 found->second.scale};
            if (!grads) continue;
            l.da = grads + a->offset;
            l.db = grads + b->offset;
        }
    }
    return bound;
}

} // namespace llmc
