// stopwatch.h - when actions run: by the clock on a CPU, by events in its stream on a GPU
//   An action stands between two moments. A GPU passes its moments without the host, which reads
//   them when the step is over: nobody waits after an action.
//   Where CUDA's toolkit has NVTX each action is a range of its own name too, for Nsight Systems.
#pragma once
#include "action.h"
#include "comm/group.h"
#include "memory.h"
#if defined(__CUDACC__) && __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define LLMC_NVTX 1
#else
#define LLMC_NVTX 0
#endif

namespace llmc {

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
