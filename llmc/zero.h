// zero.h - ZeRO-1, 2, 3: state, gradients, weights in shards - arXiv:1910.02054, arXiv:2304.11277
//   A bucket holds P parameters, padded; the d ranks of its group hold shards of P/d of them.
//   w is the weights and dw their gradient. --zero-group d makes groups smaller than all data-
//   parallel ranks: then several groups hold the same shards, as replicas (hybrid sharding). --hpz
//   d makes them for weights alone: replicas share out the rest (hpZ, arXiv:2306.10209).
//     stage 0   nothing is cut                 dw all-reduced once a step
//     stage 1   masters, optimizer state       dw reduce-scattered once a step; w published
//     stage 2   ... and gradients              dw reduce-scattered after each micro-batch
//     stage 3   ... and weights                w gathered for each use, then released
//   Collectives, and what runs beside them until finish_before() (streams.h):
//     GATHER(b)   w[P/d] -> w[P]                    the `prefetch` layers before its use; of fp8
//                                                   products as codes (fp8.h)
//     REDUCE(b)   dw[P]{partial} -> dw[P/d]         stages 2, 3: the next layer's backward
//                                                   stages 0, 1: all backward that is left
//     PUBLISH(b)  w[P/d] -> w[P]                    the updates of later buckets; with --hpz
//                                                   replicas complete their w[P/d]
//     NORM        each rank's sums -> one norm      nothing: it is on the critical path
//   A slot's SENDRECV starts before the slot's last REDUCE: collectives start in order, and another
//   stage waits for the message.
//   A tied table's two gradients are added at the end of the step. Its bucket is therefore reduced
//   once a step in every stage, like the buckets that share a layer with it (positions, the head's
//   final norm).
//   Memory of P parameters in bf16 over d ranks, with float gradients, masters, moments, in bytes:
//     stage 0: 18 P   1: 6 P + 12 P/d   2: 2 P + 16 P/d   3: 18 P/d and the buckets in use
//     stages 2 and 3 also hold one micro-batch's gradient of one layer, or of two while two overlap
//   The file has two halves: passes that insert these actions into a plan, and what REDUCE runs.
//   GATHER and PUBLISH are one all-gather each (transfers.h).
#pragma once
#include "access.h"
#include "action.h"
#include "optimizer.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "comm/placement.h"
#include "layout.h"
#include "model.h"
#include "ops/fp8_sent.cuh"
#include "ops/grad_norm.cuh"
#include "ops/memory.h"
#include "ops/types.h"
#include "sharding.h"
#include "streams.h"
#include <set>

namespace llmc {

// Bytes of memory for one parameter: (2, 2, 12) in the paper's table, (2, 4, 12) in our bf16.
struct ParameterBytes {
    double weight, gradient, optimizer; // optimizer: master and state
};

// Return the bytes for one parameter that remain on each of d ranks at ZeRO stage `zero`. near: how
// many of them share out the weights, if not all do.
inline double zero_bytes(const ParameterBytes& whole, int zero, int d, int near = 0) {
    auto cut = [&](double bytes, int since, int ranks) {
        return zero >= since ? bytes / ranks : bytes;
    };
    return cut(whole.weight, 3, near ? near : d) + cut(whole.gradient, 2, d) +
           cut(whole.optimizer, 1, d);
}

// ----------------------------------------------------------------------------
// passes

// Return the index of the SENDRECV that ends pass i's slot, or i if the slot sends nothing.
inline int message_behind(const Plan& p, int i) {
    for (int j = i + 1; j < int(p.actions.size()); j++) {
        if (p.actions[j].op == Op::SENDRECV) return j;
        if (p.actions[j].micro != p.actions[i].micro)
            break;
    }
    return i;
}

// Before: backward passes. After: REDUCE follows the backward pass that completes a bucket's
// gradient, in each micro-batch (stages 2 and 3) or in the last one only. The message that a slot
// ends in goes first: collectives begin in order, and other stages wait for it. Tied tables are
// left to the end of the step.
inline Plan add_reduce(Plan in, const Model& model) {
    Plan p = in.without_actions();

    // Find each layer's last backward pass: its gradient is complete there.
    std::map<int, int> last_micro; // of a layer
    for (const Action& a : in.actions)
        if (reaches_weights(a.op))
            last_micro[a.layer] = a.micro;

    // Insert REDUCE behind each backward pass that completes a bucket's gradient.
    std::set<int> begun; // buckets whose gradient has its first part
    std::vector<std::vector<Action>> behind(in.actions.size()); // [place]: what follows it
    const std::vector<int> none;
    for (int i = 0; i < int(in.actions.size()); i++) {
        Action& a = in.actions[i];
        const std::vector<int>& used = reaches_weights(a.op) ? buckets_of(model, a.layer) : none;
        int message = used.empty() ? i : message_behind(in, i);
        for (int b : used) {
            const Bucket& bucket = model.buckets[b];
            if (!bucket.trainable || bucket.tied() || !is_reduced(p.layout, model, b))
                continue;

            // ZeRO-2 and 3 reduce each micro-batch's part, before the next block needs its bytes;
            // the other stages wait for the last micro-batch.
            if (reduced_each(p.layout, model, b)) {
                bool first = begun.insert(b).second;
                int place = message == i + 1 ? message : i;
                behind[place].push_back({Op::REDUCE, a.micro, -1, b, first});
            } else if (a.micro == last_micro[a.layer]) {
                behind[message].push_back({Op::REDUCE, -1, -1, b});
            }
        }
        p.actions.push_back(std::move(a));
        p.actions.insert(p.actions.end(), behind[i].begin(), behind[i].end());
    }
    return p;
}

// One use of a gathered bucket: the first and the last compute action that read it. Both are
// indices among the plan's compute actions.
struct BucketUse {
    int first, last;
};

// Return how many compute actions before its use a bucket's weights start to move: `prefetch` for a
// gather, `prefetch` for a fetch from another tier. A shard in another tier needs both: it is
// fetched on the first half of the way and gathered on the second.
inline int weights_lead(const Layout& layout, const Model& model, int bucket) {
    bool cut = is_sharded(layout, model, {Kind::WEIGHT, bucket});
    return layout.prefetch * (int(cut) + int(layout.offload.weights));
}

// List the uses of each gathered bucket. Two uses within the prefetch distance become one, and the
// bucket stays in memory between them.
inline std::map<int, std::vector<BucketUse>> uses_of_gathered(const Plan& p, const Model& model) {
    std::map<int, std::vector<BucketUse>> uses; // of a bucket
    if (p.layout.zero < 3 && !p.layout.offload.weights) return uses; // weights stay where they are
    int count = 0;
    for (const Action& a : p.actions) {
        if (!computes(a.op)) continue;
        for (Data d : access(p, model, a).reads) {
            if (d.kind != Kind::GATHERED) continue;
            std::vector<BucketUse>& all = uses[d.of];
            // Extend the last use if the bucket would not be gone for long, else begin a new one.
            int lead = weights_lead(p.layout, model, d.of);
            bool stays = !all.empty() && count - all.back().last <= lead + 1;
            if (!stays) all.push_back({count, count});
            all.back().last = count;
        }
        count++;
    }
    return uses;
}

// Before: actions that read buckets. After, in stage 3: GATHER stands `prefetch` compute actions
// before a bucket's use, and RELEASE behind it. Weights that lie in another tier also get a FETCH,
// which stands `prefetch` compute actions earlier still when a GATHER follows it.
inline Plan add_gather(Plan in, const Model& model) {
    // Decide what stands before and behind each compute action.
    Insertions before, behind;
    for (auto& [bucket, uses] : uses_of_gathered(in, model))
        for (BucketUse use : uses) {
            int lead = weights_lead(in.layout, model, bucket);
            int from = std::max(0, use.first - lead);
            int at = std::max(0, use.first - in.layout.prefetch);
            // Fetch a shard from another tier first; gather it when its use is near.
            if (in.layout.offload.weights)
                before[from].push_back({Op::FETCH, -1, -1, bucket});
            if (is_sharded(in.layout, model, {Kind::WEIGHT, bucket}))
                before[at].push_back({Op::GATHER, -1, -1, bucket});
            behind[use.last].push_back({Op::RELEASE, -1, -1, bucket});
        }

    return add_around(std::move(in), before, behind);
}

// ----------------------------------------------------------------------------
// REDUCE: it starts here, and the executor finishes it where finish_before() says

// Return the bytes of room for what REDUCE sends of a bucket's gradient: a copy in 16 bits, or
// packets of codes and as many that are received. 0: it sends the gradient itself, or nothing.
inline size_t sent_gradient_bytes(Gradients format, const Layout& layout, const Bucket& b) {
    size_t shards = size_t(shard_axis(layout, b.group).size);
    if (format == Gradients::FP8)
        return shards == 1 ? 0 : 2 * shards * fp8_packet_bytes(shard_elements(layout, b));
    bool alone = group_axis(layout, b.group).size == 1;
    return format == Gradients::FLOAT || alone ? 0 : whole_elements(layout, b) * sizeof(bf16);
}

// REDUCE sums a bucket's gradient over every rank that holds a part of it.
//   1. tp       parameters that tensor-parallel ranks share; blocking: these ranks run in step
//   2. shard    reduce-scatter under ZeRO, all-reduce without; in flight until finish_before()
//   3. replica  hybrid sharding only: over the groups that hold the same shard; reduce-scatter if
//               these share out its update (--hpz), else all-reduce
//   4. ZeRO-2, 3: add this micro-batch's shard to the step's gradient
// --gradients says what ranks send in steps 2 and 3 of their parts p:
//   bf16  Half the bytes. Each rank rounds its part to 16 bits. The sum is made in float wherever
//         ranks add in rank order, and is rounded once more. An element is off by at most
//         2^-8 sum |p|.
//   fp8   A quarter of step 2's bytes: codes go to the rank that has the shard, and it adds their
//         values in float (fp8_sent.cuh). Step 3 sends floats, and so does the gather behind
//         it that ZeRO-0 needs. An element is off by at most 2^-4 sum |p|, where |p| is not far
//         below its block's largest.

// Step 1: sum the shared parameters of `whole` (P) over tensor-parallel ranks. `where` must be the
// layers' stream, because layers use the same communicators: in the stream of the collectives this
// sum would queue behind other buckets in flight, and layers would wait for those.
template <typename A, typename S>
void zero_reduce_shared(const Comms& comms, const Layout& layout, const Model& model, int b,
                        A* whole, S where) {
    const Bucket& bucket = model.buckets[b];
    size_t partial = partial_over_tp(layout, bucket), shared = bucket.shared - bucket.common;
    if (partial) all_reduce_sum(comms.tp, whole, partial, where);
    if (shared)
        all_reduce_sum(comms.kv, whole + bucket.common, shared, where);
}

// Step 3: sum this rank's shard over its replicas, into the range that it updates.
template <typename X, typename S>
void zero_sum_replicas(const DataComms& data, Range range, X* whole, size_t shard, S where) {
    X* first = whole + shard * size_t(data.shard.rank);
    if (range.count < shard) {
        reduce_scatter_sum(data.replica, whole + range.first, first, range.count, where);
    } else {
        all_reduce_sum(data.replica, range.sharded ? first : whole, range.count, where);
    }
}

// Steps 2 and 3 start a sum over the ranks that see other tokens, and end it over replicas. `whole`
// (P) has the partial gradient, and then the sum in `range`. shard: the elements of one shard.
template <typename X, typename S>
InFlight<S> zero_sum(const DataComms& data, Range range, X* whole, size_t shard, S where) {
    X* first = whole + shard * size_t(data.shard.rank);
    InFlight<S> f;
    f.pending = range.sharded ? start_reduce_scatter_sum(data.shard, first, whole, shard, where)
                              : start_all_reduce_sum(data.shard, whole, range.count, where);
    f.rest = [=, &data] { zero_sum_replicas(data, range, whole, shard, where); };
    return f;
}

// The same sum over copies in 16 bits: sent (P).
template <typename A, typename S>
InFlight<S> zero_sum_bf16(const DataComms& data, Range range, A* whole, bf16* sent, size_t shard,
                          S where) {
    narrow_gradients(sent, whole, shard * size_t(data.shard.size), where);
    InFlight<S> f = zero_sum(data, range, sent, shard, where);
    f.rest = [=, replicas = std::move(f.rest)] {
        replicas();
        widen_gradients(whole + range.first, sent + range.first, range.count, where);
    };
    return f;
}

// Zero what lies between a bucket's tensors, and behind the last one. No backward pass writes it,
// and a block of codes takes its scale from all its elements.
template <typename A, typename S>
void zero_gaps(const Model& model, const Bucket& bucket, A* whole, size_t elements, S where) {
    auto zero = [&](size_t from, size_t to) {
        if (from < to) device_zero(whole + from, (to - from) * sizeof(A), where);
    };
    size_t end = 0; // of the tensor before
    for (int i : bucket.in_order) {
        const Parameter& p = model.parameters[i];
        zero(end, p.offset);
        end = p.offset + p.local_elements();
    }
    zero(end, elements);
}

// The same sum of codes. sent: room for the packets to send, then for those received. A rank adds
// one shard of the d, even where no datum is cut.
template <typename A, typename S>
InFlight<S> zero_sum_fp8(const DataComms& data, Range range, A* whole, uint8_t* sent, size_t shard,
                         S where) {
    size_t d = size_t(data.shard.size), bytes = fp8_packet_bytes(shard);
    uint8_t* received = sent + d * bytes;
    A* mine = whole + shard * size_t(data.shard.rank);
    fp8_pack_gradients(sent, whole, d, shard, where);
    InFlight<S> f;
    f.pending = start_all_to_all(data.shard, received, sent, bytes, where);

    // Add what has come, also over replicas. Without ZeRO every rank wants all shards.
    f.rest = [=, &data] {
        fp8_sum_gradients(mine, received, d, shard, where);
        if (Placements* checked = data.shard.info->placements)
            placement_set(*checked, mine, shard * sizeof(A), data.shard.name, Placement::SHARDED,
                          "a sum of codes");
        if (range.sharded)
            return zero_sum_replicas(data, range, whole, shard, where);
        all_reduce_sum(data.replica, mine, shard, where);
        all_gather(data.shard, whole, mine, shard, where);
    };
    return f;
}

// Steps 2 to 4. `whole` (P) is the partial gradient and becomes the sum. `sent` is room for what is
// sent of it (sent_gradient_bytes), or null where that is `whole` itself. `grad` (P/d) is the
// step's gradient if each micro-batch is reduced, else null; `first` says that it is written rather
// than added to.
template <typename A, typename S>
InFlight<S> zero_reduce(const Comms& comms, const Layout& layout, const Model& model, int b,
                        A* whole, void* sent, Gradients format, A* grad, bool first, S where) {
    const Bucket& bucket = model.buckets[b];
    const DataComms& data = comms.data(bucket.group);
    Range range = updated_range(layout, model, b);
    A* mine = whole + range.first;
    size_t shard = shard_elements(layout, bucket);
    size_t elements = whole_elements(layout, bucket);

    // The placement check forgets what the bytes to send held before.
    Placements* checked = comms.placements();
    if (sent && checked)
        placement_forget(*checked, sent, sent_gradient_bytes(format, layout, bucket));

    // 2 and 3. Sum over the ranks that see other tokens, and over replicas.
    if (sent && format == Gradients::FP8)
        zero_gaps(model, bucket, whole, elements, where);
    InFlight<S> f =
        !sent ? zero_sum(data, range, whole, shard, where)
        : format == Gradients::BF16
            ? zero_sum_bf16(data, range, whole, static_cast<bf16*>(sent), shard, where)
            : zero_sum_fp8(data, range, whole, static_cast<uint8_t*>(sent), shard, where);

    // 4. Write or add this micro-batch's shard to the step's gradient. Like step 3 it runs when the
    // executor finishes the collective.
    if (!grad) return f;
    size_t whole_bytes = elements * sizeof(A);
    f.rest = [=, sum = std::move(f.rest)] {
        sum();
        size_t bytes = range.count * sizeof(A);
        if (first) {
            copy_rows(grad, bytes, mine, bytes, bytes, 1, where);
        } else {
            add_gradients(grad, mine, range.count, where);
        }
        if (checked) placement_forget(*checked, whole, whole_bytes);
    };
    return f;
}

} // namespace llmc
