// graph.h - a plan's launches, captured once and replayed as one call: CUDA graphs
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
#pragma once
#include "comm/comm.h"
#include "queues.h"

namespace llmc {

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
inline bool is_captured(const PlanGraph<Cpu>&) { return false; }
inline void begin_capture(Cpu) {}
inline void end_capture(PlanGraph<Cpu>&, Cpu) {}
inline void replay(const PlanGraph<Cpu>&, Cpu) {}
inline void free_graph(PlanGraph<Cpu>&) {}

#if LLMC_KERNELS

// `captured` is null until the second run: the first one loads kernels and chooses algorithms.
template <> struct PlanGraph<cudaStream_t> {
    int runs = 0;
    cudaGraphExec_t captured = nullptr;
};
inline bool is_captured(const PlanGraph<cudaStream_t>& g) { return g.captured; }

// Start recording the stream's calls.
// Other threads of this process may allocate meanwhile; this one may not.
inline void begin_capture(cudaStream_t stream) {
    LLMC_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
}

// Stop recording, and make the graph. Streams that waited for this one were captured with it, and
// this one must have waited for them again.
inline void end_capture(PlanGraph<cudaStream_t>& g, cudaStream_t stream) {
    cudaGraph_t calls = nullptr;
    LLMC_CUDA_CHECK(cudaStreamEndCapture(stream, &calls));
    LLMC_CUDA_CHECK(cudaGraphInstantiate(&g.captured, calls, 0));
    LLMC_CUDA_CHECK(cudaGraphDestroy(calls));
}

// Launch the graph: one call of the host, whatever the number of kernels.
inline void replay(const PlanGraph<cudaStream_t>& g, cudaStream_t stream) {
    LLMC_CUDA_CHECK(cudaGraphLaunch(g.captured, stream));
}
// Free a graph, which must not be running any more.
inline void free_graph(PlanGraph<cudaStream_t>& g) {
    if (g.captured) LLMC_CUDA_CHECK(cudaGraphExecDestroy(g.captured));
    g = {};
}
#endif

// Launch the calls that run() gives to the stream as one graph; the first time, capture them.
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
