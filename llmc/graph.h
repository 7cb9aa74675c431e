// graph.h - a plan's launches, captured once and replayed as one call: CUDA graphs
//   A step of a small model is hundreds of launches of a few microseconds, which the host cannot
//   issue as fast as the GPU runs them. A graph holds them with their arguments: its launch is one
//   call, and the GPU goes from kernel to kernel by itself.
//     1. first time    run the plan as ever: kernels are loaded, products have their algorithms
//     2. second time   capture: the streams take the calls down and run none of them; then launch
//     3. from then on  launch
//   A replay has the arguments of the capture. What differs from step to step lies in memory, so
//   that the addresses are the same: the batch, the count of its targets and the learning rate
//   (StepNumbers), the step's number and fp16's loss scale (StepScale).
//   While it captures the host may wait for nothing and allocate nothing: can_replay() says which
//   plans do neither. Contract: the bits are those of the calls one by one.
#pragma once
#include "comm/comm.h"
#include "queues.h"

namespace llmc {

// ----------------------------------------------------------------------------
// what a graph can hold

// Which of a plan's actions to run. The host has a part in LOAD and COUNT: it reads text, and waits
// for other hosts.
enum class Part { ALL, HOST, STREAMS };
inline bool is_part(Part part, Op op) {
    bool host = op == Op::LOAD || op == Op::COUNT;
    return part == Part::ALL || host == (part == Part::HOST);
}

// Whether a plan gives its streams the same in each run, and the host waits for nothing meanwhile.
// Threads that share a GPU meet on the host, moves between tiers are the host's, and a text grows
// while it is generated.
template <typename S>
bool can_replay(const Plan& p, const Comm& world, S) {
    bool moves = std::any_of(p.actions.begin(), p.actions.end(),
                             [](const Action& a) { return queue_of(a.op) == Queue::MOVE; });
    bool on_gpu = !std::is_same_v<S, Cpu>;
    return on_gpu && p.mode != Mode::GENERATE && !moves && !world.local;
}

// ----------------------------------------------------------------------------
// graphs

// A plan's graph. On a CPU there is none: calls are work.
template <typename S> struct PlanGraph {
    int runs = 0;
};
inline bool is_captured(const PlanGraph<Cpu>&) { return false; }
inline void begin_capture(Cpu) {}
inline void end_capture(PlanGraph<Cpu>&, Cpu) {}
inline void replay(const PlanGraph<Cpu>&, Cpu) {}
inline void free_graph(PlanGraph<Cpu>&) {}

#if LLMC_KERNELS

// Null until the second run: the first one loads kernels and chooses algorithms.
template <> struct PlanGraph<cudaStream_t> {
    int runs = 0;
    cudaGraphExec_t captured = nullptr;
};
inline bool is_captured(const PlanGraph<cudaStream_t>& g) { return g.captured; }

// Other threads of this process may allocate meanwhile; this one may not.
inline void begin_capture(cudaStream_t stream) {
    LLMC_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
}

// Streams that waited for this one are captured with it; it has waited for them again.
inline void end_capture(PlanGraph<cudaStream_t>& g, cudaStream_t stream) {
    cudaGraph_t calls = nullptr;
    LLMC_CUDA_CHECK(cudaStreamEndCapture(stream, &calls));
    LLMC_CUDA_CHECK(cudaGraphInstantiate(&g.captured, calls, 0));
    LLMC_CUDA_CHECK(cudaGraphDestroy(calls));
}

// One call of the host, whatever the number of launches.
inline void replay(const PlanGraph<cudaStream_t>& g, cudaStream_t stream) {
    LLMC_CUDA_CHECK(cudaGraphLaunch(g.captured, stream));
}
// It must not run any more.
inline void free_graph(PlanGraph<cudaStream_t>& g) {
    if (g.captured) LLMC_CUDA_CHECK(cudaGraphExecDestroy(g.captured));
    g = {};
}
#endif

// Launch as one what run() gives to the stream; the first time take it down.
template <typename S, typename F>
void replay_calls(PlanGraph<S>& g, S where, F run) {
    if (!is_captured(g)) {
        begin_capture(where);
        run();
        end_capture(g, where);
    }
    replay(g, where);
}

} // namespace llmc
