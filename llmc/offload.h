// offload.h - offload: state, gradients, weights elsewhere - arXiv:2101.06840, arXiv:2104.07857
//   Float masters and moments are 12 of AdamW's 18 bytes per parameter, and a step touches them
//   once. They lie in the host's memory or in a file and pass through the device in chunks of 2^24:
//     FETCH(b.c)   masters and moments of chunk c of bucket b -> STAGED   `prefetch` chunks ahead
//     UPDATE(b.c)  the optimizer, on STAGED and the device's gradients
//     PARK(b.c)    STAGED -> where they lie                               one chunk behind
//   The CPU can update them where they lie instead, as ZeRO-Offload does: FETCH brings a chunk's
//   gradient and weights, PARK takes the weights back: 8 bytes per parameter instead of 24.
//   Such updates may run a step late, beside the next step's layers (--update-delay 1), as in
//   ZeRO-Offload. Step t computes g(t) with weights w(t) and applies the gradient before it, with
//   the rate, clipping and bias correction of that step; nothing waits at the first step:
//     w(t+1) = update(w(t), g(t-1))       w(2) = w(1)
//   The host updates copies of the weights, 2 bytes an element in bf16, while layers read the old:
//     FETCH(b.c)   weights -> a copy          after COUNT
//     UPDATE(b.c)  on the copy                spread over the layers' actions, each before
//                                             PARK(grad b) overwrites the gradient
//     PARK(b.c)    the copy -> weights        after NORM
//   The last gradient of a run stays unapplied: it waits in the checkpoint.
//   Activations: what a block keeps for its backward pass leaves the device until then. With
//   `--recompute full` that is the block's input alone, and the device's memory does not grow with
//   the number of layers:
//     PARK(m,l)    input and kept activations -> where they lie           after F(m,l)
//     FETCH(m,l)   back                                  `prefetch` actions before R, B or I (m,l)
//   Weights: a bucket's weights arrive for each use, as ZeRO-3's do. RELEASE drops them, and UPDATE
//   finds a chunk of them in STAGED. Every level of ZeRO then keeps them in shards (zero.h):
//     FETCH(b)     weights, or a shard -> the device       `prefetch` actions before F, R, B; of a
//                                                          shard, before its GATHER
//   Gradients: a bucket's gradient leaves when no layer adds to it for long. The sums of its
//   squares stay for NORM, and UPDATE finds a chunk of it in STAGED:
//     PARK(grad b)   after the last B of a micro-batch, or its REDUCE or TIE
//     FETCH(grad b)  back        `prefetch` actions before the next one, of another micro-batch
//     SQUARE(b)      sums of squares of a complete gradient, before it leaves
//   The update is the same kernel on the same numbers: no bit depends on the tier. ZeRO-1 to 3
//   shard the state first, so each rank moves its own shard (ZeRO-Offload, ZeRO-Infinity).
//   Memory of P parameters in bf16 on one rank, in bytes, with prefetch 1:
//     device 6 P + 3 chunks of 12 bytes an element (604 MB whatever P is)      host or file 12 P
//     with weights: 4 P + 3 chunks of 14, and the weights of 2 or 3 layers                 14 P
//     with gradients too: 3 chunks of 18, and gradients of as many layers                  18 P
//   Time: a step moves 24 P bytes while it computes 6 P N floating-point operations for N tokens.
//   The moves are hidden for N > 4 F/w tokens, at F operations and w bytes a second.
#pragma once
#include "access.h"
#include "action.h"
#include "model.h"
#include "recompute.h"
#include "sharding.h"
#include "zero.h"

namespace llmc {

// Return the number of chunks by which this rank updates a bucket; 0 means all at once, because
// nothing of the bucket is offloaded.
inline int offload_chunks(const Plan& p, const Model& model, int bucket) {
    return p.offload.cuts_updates() ? updated_chunks(p, model, bucket) : 0;
}

// The updates of a step that run late, in the order in which gradients leave the device.
struct LateUpdates {
    std::vector<Action> all;
    std::vector<size_t> elements;  // updated when each is over
    std::map<int, size_t> over_by; // [bucket]: how many are over before its gradient leaves
};
inline LateUpdates late_updates(const Plan& p, const Model& model) {
    LateUpdates late;
    size_t updated = 0;
    for (const Action& a : p.actions) {
        if (a.op != Op::PARK || a.kind != Kind::GRAD)
            continue;
        size_t elements = kept_elements(p.layout, model, {Kind::MASTER, a.bucket});
        for (int c = 0; c < offload_chunks(p, model, a.bucket); c++) {
            updated += chunk_elements(p.offload, elements, c);
            late.all.push_back({Op::UPDATE, -1, -1, a.bucket, false, {}, c});
            late.elements.push_back(updated);
        }
        late.over_by[a.bucket] = late.all.size();
    }
    return late;
}

// Before: UPDATE(b) after NORM. After: UPDATE(b.c) among the layers, with the gradient of the step
// before. FETCH stands after COUNT, and PARK where UPDATE was.
inline Plan add_late_updates(const Plan& in, const Model& model) {
    LateUpdates late = late_updates(in, model);
    size_t layers = 0; // actions of layers, in all
    size_t run = 0;    // those that have run
    size_t next = 0;   // of all updates
    for (const Action& a : in.actions)
        layers += computes(a.op);

    Plan p = in.without_actions();
    for (const Action& a : in.actions) {
        // Update what the gradient of this step is about to overwrite.
        bool leaves = a.op == Op::PARK && a.kind == Kind::GRAD;
        while (leaves && next < late.over_by[a.bucket])
            p.actions.push_back(late.all[next++]);

        // Copy the action, but bring back weights in the place of their update.
        int chunks = a.op == Op::UPDATE ? offload_chunks(in, model, a.bucket) : 0;
        for (int c = 0; c < chunks; c++)
            p.actions.push_back({Op::PARK, -1, -1, a.bucket, false, {}, c});
        if (a.op != Op::UPDATE)
            p.actions.push_back(a);

        // Copy all weights to the host before layers begin.
        for (Action fetch : a.op == Op::COUNT ? late.all : std::vector<Action>()) {
            fetch.op = Op::FETCH;
            p.actions.push_back(fetch);
        }

        // Share out the host's work: after each layer, as large a part of it as of the layers.
        run += computes(a.op);
        while (computes(a.op) && next < late.all.size() &&
               late.elements[next] * layers <= late.elements.back() * run)
            p.actions.push_back(late.all[next++]);
    }
    return p;
}

// Before: UPDATE(b). After: UPDATE(b.c) for each chunk, with FETCH before it and PARK after it.
// The first chunks set out before NORM, which waits for all ranks.
inline Plan add_offload(Plan in, const Model& model) {
    if (in.offload.late && in.mode == Mode::TRAIN)
        return add_late_updates(in, model);

    // List the fetches of all updates, in their order.
    std::vector<Action> fetches;
    for (const Action& a : in.actions)
        for (int c = 0; a.op == Op::UPDATE && c < offload_chunks(in, model, a.bucket); c++)
            fetches.push_back({Op::FETCH, -1, -1, a.bucket, false, {}, c});
    if (fetches.empty()) return in;

    // Insert the fetches ahead of their updates.
    Plan p = in.without_actions();
    size_t fetched = 0;
    size_t updated = 0;
    size_t ahead = size_t(p.layout.prefetch);
    auto fetch_until = [&](size_t end) {
        for (; fetched < std::min(end, fetches.size()); fetched++)
            p.actions.push_back(fetches[fetched]);
    };
    for (const Action& a : in.actions) {
        if (a.op == Op::NORM)
            fetch_until(ahead);

        // Copy all other actions unchanged.
        if (a.op != Op::UPDATE) {
            p.actions.push_back(a);
            continue;
        }

        // Make each chunk of a bucket an update of its own.
        for (int c = 0; c < offload_chunks(p, model, a.bucket); c++) {
            fetch_until(++updated + ahead);
            p.actions.push_back({Op::UPDATE, -1, -1, a.bucket, false, {}, c});
            p.actions.push_back({Op::PARK, -1, -1, a.bucket, false, {}, c});
        }
    }
    return p;
}

// One run of actions that use a gradient without a long gap, by their places in the list. The
// gradient stays on the device from the first to the last.
struct GradientUse {
    int first, last;
    bool writes; // the first action writes the gradient, so nothing needs to be fetched
};

// All gradients' uses in a list of actions, and where the compute actions stand among them.
struct GradientUses {
    std::map<Data, std::vector<GradientUse>> of;
    std::vector<int> places;         // of the compute actions
    std::vector<int> computed = {0}; // [action]: compute actions ahead of it
};

// Note that action i uses a gradient: extend the last use if it was not long ago, else begin one.
inline void note_use(GradientUses& uses, Data d, int i, bool writes, int prefetch) {
    std::vector<GradientUse>& all = uses.of[d];
    int gap = all.empty() ? 0 : uses.computed[i] - uses.computed[all.back().last];
    if (all.empty() || gap > 2 * prefetch + 1)
        all.push_back({i, i, writes});
    all.back().last = i;
}

inline GradientUses gradient_uses(const Plan& in, const Model& model) {
    GradientUses uses;
    for (int i = 0; i < int(in.actions.size()); i++) {
        Access x = access(in, model, in.actions[i]);
        for (const std::vector<Data>* all : {&x.reads, &x.writes})
            for (Data d : *all) {
                bool moves = d.kind == Kind::GRAD_HERE || d.kind == Kind::TIED_HERE;
                if (!moves) continue;
                bool writes = !std::count(x.reads.begin(), x.reads.end(), d);
                note_use(uses, d, i, writes, in.layout.prefetch);
            }

        // Count after the action: a compute action is not ahead of itself.
        if (computes(in.actions[i].op))
            uses.places.push_back(i);
        uses.computed.push_back(int(uses.places.size()));
    }
    return uses;
}

// The place ahead of which FETCH stands: `prefetch` compute actions before the use.
inline int place_to_fetch(const GradientUses& uses, const GradientUse& use, int prefetch) {
    int computed = uses.computed[use.first];
    int from = std::max(0, computed - prefetch);
    return from < computed ? uses.places[from] : use.first;
}

// The place ahead of which PARK stands. A sum over ranks goes on beside the next layers, so its
// gradient leaves only after them.
inline int place_to_park(const Plan& in, const GradientUses& uses, const GradientUse& use) {
    int behind = use.last + 1;
    int until = uses.computed[use.last] + in.layout.prefetch;
    until = std::min(until, int(uses.places.size()));
    bool sums = in.actions[use.last].op == Op::REDUCE;
    if (!sums || until == 0) return behind;
    return std::max(behind, uses.places[until - 1] + 1);
}

// Before: the plan up to UPDATE. After: a gradient leaves the device after a layer, sum or tie if
// the next one comes only long after, and returns ahead of that. After the very last one, SQUARE
// sums its squares, and the gradient goes to where UPDATE finds it in chunks.
inline Plan add_gradient_moves(Plan in, const Model& model) {
    if (!in.layout.gradients_away || in.mode != Mode::TRAIN)
        return in;

    // Decide what to insert ahead of each place; the one past the last action comes at the end.
    size_t end = in.actions.size();
    std::vector<std::vector<Action>> ahead(end + 1);
    GradientUses uses = gradient_uses(in, model);
    for (auto& [d, all] : uses.of)
        for (GradientUse& use : all) {
            // Fetch what an earlier micro-batch has left.
            int at = place_to_fetch(uses, use, in.layout.prefetch);
            if (!use.writes)
                ahead[at].push_back({Op::FETCH, -1, -1, d.of, false, {}, -1, d.kind});

            // TIE has added the tied head's gradient to the other one: it is over.
            int behind = place_to_park(in, uses, use);
            bool over = &use == &all.back();
            if (over && d.kind == Kind::TIED_HERE) continue;

            // Sum the squares while the whole gradient is on the device.
            if (over && is_squared(in.layout, model, d.of))
                ahead[behind].push_back({Op::SQUARE, -1, -1, d.of});
            Kind kind = over ? Kind::GRAD : d.kind;
            ahead[behind].push_back({Op::PARK, -1, -1, d.of, false, {}, -1, kind});
        }

    // Write the list again, with these insertions.
    Plan p = in.without_actions();
    for (size_t i = 0; i <= end; i++) {
        p.actions.insert(p.actions.end(), ahead[i].begin(), ahead[i].end());
        if (i < end) p.actions.push_back(in.actions[i]);
    }
    return p;
}

// Before: F(m,l) and, later, R, B or I (m,l). After: PARK(m,l) after the first and FETCH(m,l)
// ahead of the second, for a block that is parked, if enough compute actions stand between them.
inline Plan add_parking(Plan in, const Model& model) {
    if (in.offload.activations == Tier::DEVICE || in.mode != Mode::TRAIN)
        return in;

    // Find both actions for each block, by their numbers among the compute actions.
    std::map<std::pair<int, int>, std::pair<int, int>> uses; // [micro-batch, layer]
    int count = 0;
    for (const Action& a : in.actions) {
        if (!computes(a.op)) continue;
        // The forward pass comes first; the next action needs the activations again.
        auto [use, fresh] = uses.insert({{a.micro, a.layer}, {count, count}});
        bool second = !fresh && use->second.first == use->second.second;
        if (second) use->second.second = count;
        count++;
    }

    // Decide what to insert before and behind each compute action.
    Insertions before, behind;
    for (auto& [of, use] : uses) {
        // Skip blocks near the head, which need their activations again at once, and those that
        // keep nothing, inside a segment.
        int fetch = use.second - in.layout.prefetch;
        bool near = fetch - use.first <= in.layout.prefetch + 1;
        bool stays = near || !in.offload.parks(of.second);
        if (stays || !model.is_block(of.second) || place_in_segment(in, model, of.second) > 0)
            continue;
        behind[use.first].push_back({Op::PARK, of.first, of.second});
        before[fetch].push_back({Op::FETCH, of.first, of.second});
    }
    return add_around(std::move(in), before, behind);
}

} // namespace llmc
