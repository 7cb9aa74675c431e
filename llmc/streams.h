// streams.h - queues of actions, CUDA graphs, and the clock of each action
#pragma once
#include "access.h"
#include "action.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "comm/rank_status.h"
#include "model.h"
#include "ops/memory.h"
#include "ops/types.h"
#if defined(__CUDACC__) && __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define LLMC_NVTX 1
#else
#define LLMC_NVTX 0
#endif

namespace llmc {

// ----------------------------------------------------------------------------
// four queues of actions, and when one that was started must be finished
//   Collectives and moves run beside the computation of layers. finish_before() says how long each
//   action may stay in flight: the executor waits at that place, and the arena's lifetimes rely on
//   these waits.
//   Cost: quadratic in the number of actions, once for each plan.

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

// A collective or a move that was started and is not yet finished.
template <typename S> struct InFlight {
    Pending<S> pending = {};         // what it writes: an exchange's receives
    Pending<S> sent = {};            // an exchange's sends
    std::function<void()> rest = {}; // the work to do when `pending` has arrived
    int action = -1;                 // its place in the plan
    bool moves = false;              // it moves data between tiers: `rest` is its whole finish
    bool arrived_here = false, over = false; // finished: what it writes, and all of it
    decltype(record_point(S())) arrived = {}; // NCCL: the point after it in its stream
};

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

// ----------------------------------------------------------------------------
// a plan's launches, captured once and replayed as one call: CUDA graphs
//   A step of a small model is hundreds of launches of a few microseconds each, and the host cannot
//   issue them as fast as the GPU runs them. A graph holds the launches with their arguments. The
//   host launches the graph in one call, and the GPU goes from kernel to kernel by itself.
//     1. first time    run the plan as usual: kernels are loaded, products choose their algorithms
//     2. second time   capture: the streams record the calls and run none of them; then launch
//     3. from then on  launch
//   A replay has the arguments of the capture. Whatever differs from step to step is therefore read
//   from memory at a fixed address: the batch, the count of its targets and the learning rate
//   (StepNumbers), the step's number and fp16's loss scale (StepScale).
//   During a capture the host may not wait for anything or allocate anything: can_replay() says
//   which plans do neither. Contract: the bits are those of the calls one by one.

// ----------------------------------------------------------------------------
// what a graph can hold

// Which of a plan's actions to run.
// LOAD and COUNT belong to the host: it reads text, and waits for other hosts.
enum class Part { ALL, HOST, STREAMS };
inline bool is_part(Part part, Op op) {
    bool host = op == Op::LOAD || op == Op::COUNT;
    return part == Part::ALL || host == (part == Part::HOST);
}

// Whether every run of a plan issues the same calls to its streams, and the host waits for nothing
// meanwhile. This excludes threads that share a GPU, which meet on the host; moves between tiers,
// which the host starts; and generation, because the text grows.
template <typename S>
bool can_replay(const Plan& p, const Comm& world, S) {
    bool moves = std::any_of(p.actions.begin(), p.actions.end(),
                             [](const Action& a) { return queue_of(a.op) == Queue::MOVE; });
    bool on_gpu = !std::is_same_v<S, Cpu>;
    return on_gpu && p.mode != Mode::GENERATE && !moves && !world.local;
}

// ----------------------------------------------------------------------------
// graphs

// A plan's graph. On a CPU there is none: a call does its work at once.
template <typename S> struct PlanGraph {
    int runs = 0;
};
template <typename F> void replay_calls(PlanGraph<Cpu>&, Cpu, F run) { run(); }
inline void free_graph(PlanGraph<Cpu>&) {}

#if LLMC_KERNELS

// `captured` is null until the second run: the first one loads kernels and chooses algorithms.
template <> struct PlanGraph<cudaStream_t> {
    int runs = 0;
    cudaGraphExec_t captured = nullptr;
};

// Launch the calls that run() gives to the stream as one graph, by one call of the host.
template <typename F>
void replay_calls(PlanGraph<cudaStream_t>& g, cudaStream_t stream, F run) {
    // Capture them the first time. Other threads of this process may allocate meanwhile; this one
    // may not. Streams that wait for this one are captured with it; it must wait for them again.
    if (!g.captured) {
        cudaGraph_t calls = nullptr;
        LLMC_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        run();
        LLMC_CUDA_CHECK(cudaStreamEndCapture(stream, &calls));
        LLMC_CUDA_CHECK(cudaGraphInstantiate(&g.captured, calls, 0));
        LLMC_CUDA_CHECK(cudaGraphDestroy(calls));
    }
    LLMC_CUDA_CHECK(cudaGraphLaunch(g.captured, stream));
}

// Free a graph, which must not be running any more.
inline void free_graph(PlanGraph<cudaStream_t>& g) {
    if (g.captured) LLMC_CUDA_CHECK(cudaGraphExecDestroy(g.captured));
    g = {};
}
#endif

// ----------------------------------------------------------------------------
// when actions run: by the clock on a CPU, by events in its stream on a GPU
//   An action stands between two moments. A GPU passes its moments without the host, which reads
//   them when the step is over: nobody waits after an action.
//   Where CUDA's toolkit has NVTX each action is a range of its own name too, for Nsight Systems.

// A range while one of these lives.
struct NamedRange {
#if LLMC_NVTX
    explicit NamedRange(const char* name) { nvtxRangePushA(name); }
    ~NamedRange() { nvtxRangePop(); }
#else
    explicit NamedRange(const char*) {}
    ~NamedRange() {}
#endif
};

// ----------------------------------------------------------------------------
// moments

// The host's clock when `last` was passed; and the seconds between two moments.
inline double first_moment(Cpu) { return 0; }
inline void mark(double& moment, Cpu) { moment = clock_seconds(); }
inline double clock_at(double last) { return last; }
inline double seconds_between(double from, double to) { return to - from; }
inline void free_moment(double) {}

#if LLMC_KERNELS
inline cudaEvent_t first_moment(cudaStream_t) { return nullptr; }
// Made at its first use, an event is passed when the stream comes to it.
inline void mark(cudaEvent_t& moment, cudaStream_t stream) {
    if (!moment) LLMC_CUDA_CHECK(cudaEventCreate(&moment));
    LLMC_CUDA_CHECK(cudaEventRecord(moment, stream));
}
// An event has no clock: the host has just waited for the last one.
inline double clock_at(cudaEvent_t) { return clock_seconds(); }
inline double seconds_between(cudaEvent_t from, cudaEvent_t to) {
    float ms = 0;
    LLMC_CUDA_CHECK(cudaEventElapsedTime(&ms, from, to));
    return ms * 1e-3;
}
inline void free_moment(cudaEvent_t moment) {
    if (moment) LLMC_CUDA_CHECK(cudaEventDestroy(moment));
}
#endif

// ----------------------------------------------------------------------------
// laps

// An action and when it ran, in seconds. Its kind says no more than what its cost depends on.
struct TimedAction {
    std::string name;
    double start, end;
    std::string kind = "";
};

// A lap is an action, or the wait for one. Laps are made once: later steps take their moments.
template <typename S> struct Stopwatch {
    struct Lap {
        const char* what; // "", or "WAIT "
        const Action* action;
        decltype(first_moment(S())) from, to;
    };
    std::vector<Lap> laps;
    size_t used = 0; // laps of this step
    bool on = false;
};

// Begin a lap, in the place of the last step's where there was one.
template <typename S>
void start_lap(Stopwatch<S>& w, const char* what, const Action& a, S where) {
    if (!w.on) return;
    if (w.used == w.laps.size())
        w.laps.push_back({what, &a, first_moment(where), first_moment(where)});

    // Moments stay from step to step; the action may be another.
    auto& lap = w.laps[w.used];
    lap.what = what;
    lap.action = &a;
    mark(lap.from, where);
}
// Laps that nobody wants cost a test.
template <typename S>
void end_lap(Stopwatch<S>& w, S where) {
    if (w.on)
        mark(w.laps[w.used++].to, where);
}

// "F block", "UPDATE embedding", "SENDRECV": the op, and whose layer or bucket it runs.
inline std::string action_kind(const Action& a, const Model& model) {
    std::string kind = op_name(a.op);
    // A bucket's name says what it holds: "block.3" is one of the blocks.
    if (a.bucket >= 0) {
        const std::string& bucket = model.buckets[a.bucket].name;
        return kind + " " + bucket.substr(0, bucket.find('.'));
    }
    if (a.layer < 0) return kind;
    return kind + (a.layer == 0 ? " embedding" : a.layer == model.head() ? " head" : " block");
}

// The laps since the last reading, when all of them are over.
template <typename S>
std::vector<TimedAction> read_laps(Stopwatch<S>& w, const Model& model) {
    std::vector<TimedAction> actions;
    if (w.used == 0) return actions;

    // Count back from the last moment, whose time by the host's clock is known.
    auto last = w.laps[w.used - 1].to;
    double end = clock_at(last);
    for (size_t i = 0; i < w.used; i++) {
        const auto& lap = w.laps[i];
        std::string what = lap.what;
        actions.push_back({what + action_text(*lap.action, model),
                           end - seconds_between(lap.from, last),
                           end - seconds_between(lap.to, last),
                           what + action_kind(*lap.action, model)});
    }
    w.used = 0;
    return actions;
}

// The seconds of waits among the laps: what no computing has hidden.
inline double waiting_seconds(const std::vector<TimedAction>& actions) {
    double seconds = 0;
    for (const TimedAction& a : actions)
        if (a.name.starts_with("WAIT "))
            seconds += a.end - a.start;
    return seconds;
}

// Nothing may still pass a moment.
template <typename S> void free_laps(Stopwatch<S>& w) {
    for (auto& lap : w.laps) {
        free_moment(lap.from);
        free_moment(lap.to);
    }
    w.laps.clear();
}

} // namespace llmc
