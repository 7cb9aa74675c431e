// zero.h - sharded data parallelism as passes over a plan - arXiv:1910.02054, arXiv:2304.11277
//   Data-parallel ranks share a bucket in equal shards. What is cut, beside the work of the update:
//     stage 0   nothing       gradients are all-reduced once a step
//     stage 1   masters and moments   gradients reduce-scattered once a step; weights published
//     stage 2   and gradients         reduce-scattered after each micro-batch, added in a shard
//     stage 3   and weights           gathered for each use, let go after it; nothing to publish
//   What is on the critical path, and what goes on beside it (finish_before() in action.h):
//     GATHER(l)   w[P/d] -> w[P]                    beside the `prefetch` layers before l
//     REDUCE(l)   dw[P]{partial} -> dw[P/d], added  stages 2, 3: beside the next layer's backward;
//                                                   stages 0, 1: beside all backward that is left
//     PUBLISH(l)  w[P/d] -> w[P]                    beside the updates of the buckets after l
//     NORM        d partial sums, one for all       on it
//   A tied table's two gradients are added at the end of the step, so its bucket, and those of the
//   same layers, reduce there, in every stage.
//   Memory of N elements in bf16 over d ranks, with float gradients, masters and moments:
//     stage 0: 18 N   1: 6 N + 12 N/d   2: 2 N + 16 N/d   3: 18 N/d and the buckets in use
//     and in stages 2 and 3 the gradients of a micro-batch: of one layer, of two while they overlap
#pragma once
#include "action.h"

// Bytes that one parameter takes: (2, 2, 12) in the paper's table, (2, 4, 12) in our bf16.
struct ParameterBytes {
    double weight, gradient, optimizer; // optimizer: master and moments
};
// What of them is left on one of d ranks.
inline double zero_bytes(const ParameterBytes& whole, int zero, int d) {
    auto cut = [&](double bytes, int since) { return zero >= since ? bytes / d : bytes; };
    return cut(whole.weight, 3) + cut(whole.gradient, 2) + cut(whole.optimizer, 1);
}

inline bool reaches_weights(Do kind) { return kind == Do::B || kind == Do::W; }
inline bool computes(Do kind) {
    return kind == Do::F || kind == Do::B || kind == Do::I || kind == Do::W || kind == Do::R;
}

// Before: backward passes. After: each bucket is reduced as soon as its gradient is whole: after
// each micro-batch, or after the last; those of tied tables are left to the end of the step.
inline Plan add_reduce(const Plan& in, const Model& model) {
    Plan p = in;
    p.actions.clear();
    std::map<int, int> last_micro, reduced; // of a layer; of a bucket
    for (const Action& a : in.actions)
        if (reaches_weights(a.kind)) last_micro[a.layer] = a.micro;
    for (const Action& a : in.actions) {
        p.actions.push_back(a);
        if (!reaches_weights(a.kind)) continue;
        for (int b : buckets_of(model, a.layer)) {
            const Bucket& bucket = model.buckets[size_t(b)];
            bool each = reduced_each(p, model, b);
            if (!bucket.trainable || bucket.tied() || !is_reduced(p, model, b)) continue;
            if (each)
                p.actions.push_back({Do::REDUCE, a.micro, -1, b, reduced[b]++ == 0});
            else if (a.micro == last_micro[a.layer])
                p.actions.push_back({Do::REDUCE, -1, -1, b});
        }
    }
    return p;
}

// Before: actions that read buckets. After, in stage 3: GATHER stands `prefetch` layers before a
// bucket's use, RELEASE behind it; a bucket that is used again sooner than that stays.
inline Plan add_gather(const Plan& in, const Model& model) {
    if (in.zero < 3 || in.shards == 1) return in;
    struct Use {
        int first, last; // compute actions, counted
    };
    std::map<int, std::vector<Use>> uses; // of a bucket
    int count = 0;
    for (const Action& a : in.actions) {
        if (!computes(a.kind)) continue;
        for (Data d : access(in, model, a).reads) {
            if (d.kind != Kind::GATHERED) continue;
            std::vector<Use>& all = uses[d.of];
            if (!all.empty() && count - all.back().last <= in.prefetch + 1)
                all.back().last = count;
            else
                all.push_back({count, count});
        }
        count++;
    }
    std::map<int, std::vector<Action>> before, behind;
    for (auto& [bucket, all] : uses)
        for (Use u : all) {
            before[std::max(0, u.first - in.prefetch)].push_back({Do::GATHER, -1, -1, bucket});
            behind[u.last].push_back({Do::RELEASE, -1, -1, bucket});
        }
    Plan p = in;
    p.actions.clear();
    count = 0;
    for (const Action& a : in.actions) {
        bool counts = computes(a.kind);
        if (counts) p.actions.insert(p.actions.end(), before[count].begin(), before[count].end());
        p.actions.push_back(a);
        if (counts) {
            p.actions.insert(p.actions.end(), behind[count].begin(), behind[count].end());
            count++;
        }
    }
    return p;
}
