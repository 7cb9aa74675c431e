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

// For each action, when it must be finished: compute at once, others at the first action that
//   - touches what it writes, or releases its bytes
//   - overwrites what it reads
//   - makes all ranks meet: NORM, and TIE across stages; moves are one rank's, and go on
//   - is of its own kind, or with prefetch 0 any action, if it reads data that pass with the plan
//     (a stream to send, a micro-batch's gradient) or sends its own copy of a gradient: else the
//     bytes of several would add up
// and at the latest at the end of the plan. An exchange's halves, what it receives and what it
// sends, finish apart. Tensor parallelism's sums are no actions: they wait for none of this.
inline std::vector<Finish> finish_before(const Plan& p, const Model& model) {
    int end = int(p.actions.size());
    std::vector<Access> touched;
    for (const Action& a : p.actions)
        touched.push_back(access(p, model, a));

    // Say when two actions touch the same datum, and which data pass away with the plan.
    auto meet = [](const std::vector<Data>& x, const std::vector<Data>& y) {
        return std::find_first_of(x.begin(), x.end(), y.begin(), y.end()) != x.end();
    };
    auto passing = [](Data d) { return !persistent(d.kind); };
    auto all_ranks_meet = [&](const Action& a) {
        return a.op == Op::NORM || (a.op == Op::TIE && tied_apart(p.layout, model, a.bucket));
    };

    std::vector<Finish> finish;
    for (int i = 0; i < end; i++) {
        const Action& a = p.actions[i];
        const Access& x = touched[i];
        auto copied = [](Data d) { return d.kind == Kind::SENT; };
        bool holds = std::any_of(x.reads.begin(), x.reads.end(), passing) ||
                     std::any_of(x.writes.begin(), x.writes.end(), copied);
        bool adds_up = a.op != Op::FETCH; // it reads another tier, and takes room where it writes

        // Begin with the latest moment, the plan's end; later actions may ask for an earlier one.
        Finish f = {end, end};
        if (queue_of(a.op) == Queue::COMPUTE)
            f = {i + 1, i + 1};
        bool apart = a.op == Op::SENDRECV && !x.reads.empty() && !x.writes.empty();
        auto open_until = [&] { return apart ? std::max(f.writes, f.reads) : f.first(); };
        for (int j = i + 1; j < open_until(); j++) {
            const Action& b = p.actions[j];
            const Access& y = touched[j];
            bool meets = queue_of(a.op) == Queue::COMM && all_ranks_meet(b);
            bool both = meets || (holds && p.layout.prefetch == 0);
            bool released = b.op == Op::RELEASE && a.bucket == b.bucket;
            if (both || released || meet(x.writes, y.reads) || meet(x.writes, y.writes))
                f.writes = std::min(f.writes, j);
            if (both || meet(x.reads, y.writes) || (holds && adds_up && a.op == b.op))
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
