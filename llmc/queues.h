// queues.h - three queues of actions, and when one that was started must be finished
//   Collectives and moves run beside what layers compute. finish_before() says for each action how
//   long it may take; the executor waits there, and the arena's lives rely on it.
//   Cost: actions squared, once for each plan.
#pragma once
#include "access.h"

namespace llmc {

// Actions of one queue run in order; queues run beside each other.
//   COMPUTE  over when the action returns     COMM  the plan's collectives
//   MOVE     between tiers of memory
enum class Queue : uint8_t { COMPUTE, COMM, MOVE };

inline Queue queue_of(Op op) {
    switch (op) {
    case Op::SENDRECV:
    case Op::GATHER:
    case Op::REDUCE:
    case Op::PUBLISH: return Queue::COMM;
    case Op::FETCH:
    case Op::PARK: return Queue::MOVE;
    default: return Queue::COMPUTE;
    }
}

// The actions before which a started one must have finished with its data.
struct Finish {
    int writes; // what it writes is there: an exchange has received
    int reads;  // what it reads is free: an exchange has sent
    int first() const { return std::min(writes, reads); }
};

// Whether two actions touch a common datum.
inline bool meet(const std::vector<Data>& x, const std::vector<Data>& y) {
    return std::find_first_of(x.begin(), x.end(), y.begin(), y.end()) != x.end();
}

// Whether an action holds bytes until it is finished: it reads data that pass with the plan (a
// stream to send, a micro-batch's gradient), or sends its own copy of a gradient.
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

// For each action, when it must be finished: compute at once, others at the first action that
//   - touches what it writes, or releases its bytes
//   - overwrites what it reads
//   - makes all ranks meet; moves are one rank's, and go on
//   - is of its own kind, or with prefetch 0 any action, if it holds bytes: else the bytes of
//     several would add up
// and at the latest at the end of the plan. An exchange's halves, what it receives and what it
// sends, finish apart. Tensor parallelism's sums are no actions: they wait for none of this.
inline std::vector<Finish> finish_before(const Plan& p, const Model& model) {
    int end = int(p.actions.size());
    std::vector<Access> touched;
    for (const Action& a : p.actions)
        touched.push_back(access(p, model, a));

    std::vector<Finish> finish;
    for (int i = 0; i < end; i++) {
        const Action& a = p.actions[i];
        const Access& x = touched[i];
        Queue queue = queue_of(a.op);
        if (queue == Queue::COMPUTE) {
            finish.push_back({i + 1, i + 1});
            continue;
        }

        // A fetch reads another tier, and takes its room where it writes: several do not add up.
        bool holds = holds_bytes(x);
        bool adds_up = holds && a.op != Op::FETCH;
        bool apart = a.op == Op::SENDRECV && !x.reads.empty() && !x.writes.empty();

        // Begin with the latest moment, the plan's end; later actions may ask for an earlier one.
        Finish f = {end, end};
        auto open_until = [&] { return apart ? std::max(f.writes, f.reads) : f.first(); };
        for (int j = i + 1; j < open_until(); j++) {
            const Action& b = p.actions[j];
            const Access& y = touched[j];
            bool meets = queue == Queue::COMM && all_ranks_meet(p, model, b);
            bool both = meets || (holds && p.layout.prefetch == 0);

            // Look at what a writes, then at what it reads.
            bool released = b.op == Op::RELEASE && a.bucket == b.bucket;
            bool used = meet(x.writes, y.reads) || meet(x.writes, y.writes);
            bool same_kind = adds_up && a.op == b.op;
            if (both || released || used)
                f.writes = std::min(f.writes, j);
            if (both || same_kind || meet(x.reads, y.writes))
                f.reads = std::min(f.reads, j);
        }

        // Only an exchange has halves that finish apart.
        if (!apart)
            f = {f.first(), f.first()};
        finish.push_back(f);
    }
    return finish;
}

} // namespace llmc
