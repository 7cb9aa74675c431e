// queues.h - four queues of actions, and when one that was started must be finished
//   Collectives and moves run beside the computation of layers. finish_before() says how long each
//   action may stay in flight: the executor waits at that place, and the arena's lifetimes rely on
//   these waits.
//   Cost: quadratic in the number of actions, once for each plan.
#pragma once
#include "access.h"

namespace llmc {

// The queue that runs an action. Actions of one queue run in order; queues run beside each other.
//   COMPUTE  layers and the end of the step: an action is over when it returns
//   COMM     the plan's collectives
//   MESSAGE  messages between stages: after a sum of gradients they would hold up every stage
//   MOVE     moves between tiers of memory
enum class Queue : uint8_t { COMPUTE, COMM, MESSAGE, MOVE };

inline Queue queue_of(Op op) {
    switch (op) {
    case Op::GATHER:
    case Op::REDUCE:
    case Op::PUBLISH: return Queue::COMM;
    case Op::SENDRECV: return Queue::MESSAGE;
    case Op::FETCH:
    case Op::PARK: return Queue::MOVE;
    default: return Queue::COMPUTE;
    }
}

// Whether an action in flight needs other ranks: a move concerns its own rank alone.
inline bool needs_others(Op op) {
    return queue_of(op) == Queue::COMM || queue_of(op) == Queue::MESSAGE;
}

// The numbers of the actions before which a started action must have finished with its data.
struct Finish {
    int writes; // from here on its results are there: an exchange has received
    int reads;  // from here on its operands are free: an exchange has sent
    int first() const { return std::min(writes, reads); }
};

// Whether two lists have a datum in common.
inline bool meet(const std::vector<Data>& x, const std::vector<Data>& y) {
    return std::find_first_of(x.begin(), x.end(), y.begin(), y.end()) != x.end();
}

// Whether an action in flight keeps bytes of the arena from other data: it reads data that are not
// persistent (a stream to send, a micro-batch's gradient), or sends its own copy of a gradient.
inline bool holds_bytes(const Access& x) {
    auto passing = [](Data d) { return !persistent(d.kind); };
    auto copied = [](Data d) { return d.kind == Kind::SENT; };
    return std::any_of(x.reads.begin(), x.reads.end(), passing) ||
           std::any_of(x.writes.begin(), x.writes.end(), copied);
}

// Whether all ranks meet at an action: at NORM, and at TIE across stages.
inline bool all_ranks_meet(const Plan& p, const Model& model, const Action& a) {
    bool tie = a.op == Op::TIE && tied_apart(p.layout, model, a.bucket);
    return tie || a.op == Op::NORM;
}

// For each action, the place in the plan where it must be finished. Compute finishes at once. A
// collective or a move finishes at the end of the plan, or earlier, at the first action that
//   - touches what it writes, or releases those bytes
//   - overwrites what it reads
//   - makes all ranks meet (a move concerns one rank, and goes on)
//   - if the action in flight holds bytes: has the same op, or with prefetch 0 comes next. Else
//     the bytes of several actions in flight would add up
// An exchange's two halves, its receives and its sends, finish separately. The sums of tensor
// parallelism are not actions of the plan, so none of this holds for them.
inline std::vector<Finish> finish_before(const Plan& p, const Model& model) {
    int end = int(p.actions.size());
    std::vector<Access> touched;
    for (const Action& a : p.actions)
        touched.push_back(access(p, model, a));

    std::vector<Finish> finish;
    for (int i = 0; i < end; i++) {
        const Action& a = p.actions[i];
        const Access& x = touched[i];
        if (queue_of(a.op) == Queue::COMPUTE) {
            finish.push_back({i + 1, i + 1});
            continue;
        }

        // A fetch reads another tier, and takes room only where it writes: several do not add up.
        bool holds = holds_bytes(x);
        bool adds_up = holds && a.op != Op::FETCH;
        bool apart = a.op == Op::SENDRECV && !x.reads.empty() && !x.writes.empty();

        // Begin with the latest place, the plan's end. Actions after a may ask for an earlier one.
        Finish f = {end, end};
        auto open_until = [&] { return apart ? std::max(f.writes, f.reads) : f.first(); };
        for (int j = i + 1; j < open_until(); j++) {
            const Action& b = p.actions[j];
            const Access& y = touched[j];
            bool meets = needs_others(a.op) && all_ranks_meet(p, model, b);
            bool both = meets || (holds && p.layout.prefetch == 0);

            // Look at the data that a writes, then at the data that it reads.
            bool released = b.op == Op::RELEASE && a.bucket == b.bucket;
            bool used = meet(x.writes, y.reads) || meet(x.writes, y.writes);
            bool same_kind = adds_up && a.op == b.op;
            if (both || released || used)
                f.writes = std::min(f.writes, j);
            if (both || same_kind || meet(x.reads, y.writes))
                f.reads = std::min(f.reads, j);
        }

        // Finish both halves together, unless the action is an exchange.
        if (!apart)
            f = {f.first(), f.first()};
        finish.push_back(f);
    }
    return finish;
}

} // namespace llmc
