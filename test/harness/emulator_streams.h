// emulator_streams.h - the emulator's streams: queues of work that runs when somebody asks for it
//   Nothing runs when it is issued. A host that waits for a stream or an event runs its work, with
//   the work of other streams that it waits for by events. Streams beside the one that is asked
//   for take one of two extremes (emulator::beside), both legal, each of which shows what the
//   other hides:
//     LAST    run no sooner than an event asks for them: work that should have waited for them
//             reads what is not there yet, or overwrites what they are yet to read
//     FIRST   run as far as their own waits allow, before each piece of the stream that is asked
//             for: they read what is not there yet, or overwrite what it is yet to read
//   Until work has run its result is NaN: fresh device memory, and the place of a copy to the host,
//   unless a queued copy still reads it. A copy from the host reads its source when it runs, pinned
//   or not: stricter than CUDA, which may stage pageable memory before the call returns.
//   The null stream, one a thread, runs its work when it is issued, except for copies from the
//   host. Streams beside a stream are those of the thread that made it. A host that frees memory
//   runs all of its own streams. Any thread may wait for any stream; a piece runs in the thread
//   that asks, under the settings of the thread that issued it.
#pragma once
#include <chrono>
#include <condition_variable>
#include <deque>
#include <thread>

struct EmulatedStream;

namespace emulator {

// When streams beside the one that is asked for run. Tests set it while no work is queued.
enum class Beside { LAST, FIRST };
inline Beside beside = Beside::LAST;

// A place in a stream's work, and the time when the stream came to it.
struct Mark {
    EmulatedStream* stream = nullptr;
    bool passed = false;
    std::chrono::steady_clock::time_point time = {};
};
typedef std::shared_ptr<Mark> MarkPointer;

// One piece of a stream's work: something to run, a mark to wait for, or a mark to pass. run()
// returns false as long as other ranks have not done their part; it is called again then.
struct Piece {
    std::function<bool()> run = {};
    MarkPointer waits = {}, passes = {};
    Settings settings = emulator::settings;
    const char* from = nullptr; // a copy from the host: what it reads
    size_t bytes = 0;
};

} // namespace emulator

// One lock guards all streams. A piece runs without it.
struct EmulatedStream {
    std::deque<emulator::Piece> pieces = {};
    std::thread::id owner = std::this_thread::get_id();
    bool running = false; // a thread runs the first piece
    int refused = 0;      // how often work has waited for other ranks
};

namespace emulator {

typedef std::unique_lock<std::mutex> StreamsLock;
inline std::mutex streams_mutex;
inline std::condition_variable piece_ended;
inline std::vector<EmulatedStream*> streams; // all, except for null streams

// ----------------------------------------------------------------------------
// running what was issued

// Run a stream's first piece. If it waits for a mark, `follow` runs the mark's stream instead.
// Returns false if nothing could go on.
inline bool step(EmulatedStream& s, bool follow, StreamsLock& lock) {
    if (s.running) {
        if (follow) piece_ended.wait(lock);
        return follow;
    }
    if (s.pieces.empty()) return false;
    Piece& piece = s.pieces.front();
    if (piece.waits && !piece.waits->passed)
        return follow && step(*piece.waits->stream, true, lock);

    // Run it under its own settings, while other threads see that it runs.
    s.running = true;
    lock.unlock();
    std::swap(settings, piece.settings);
    bool over = !piece.run || piece.run();
    std::swap(settings, piece.settings);
    lock.lock();
    s.running = false;
    piece_ended.notify_all();
    if (!over) return false;

    // Pass its mark, which lets other streams go on.
    if (piece.passes) {
        piece.passes->passed = true;
        piece.passes->time = std::chrono::steady_clock::now();
    }
    s.pieces.pop_front();
    return true;
}

// Run a piece that `asked` needs, in the order that `beside` says. Returns false if the stream must
// wait for other ranks.
inline bool advance(EmulatedStream& asked, const std::vector<EmulatedStream*>& all,
                    StreamsLock& lock) {
    auto others = [&] {
        bool any = false;
        for (EmulatedStream* s : all)
            if (s != &asked) any |= step(*s, false, lock);
        return any;
    };
    if (beside == Beside::FIRST)
        while (others()) {}
    if (step(asked, true, lock)) return true;

    // Other ranks may wait for work of this rank's other streams: let that go on after a while.
    constexpr int PATIENCE = 20;
    return ++asked.refused % PATIENCE == 0 && others();
}

// The streams that run beside one: those of the same thread.
inline std::vector<EmulatedStream*> streams_beside(const EmulatedStream& asked) {
    std::vector<EmulatedStream*> all;
    for (EmulatedStream* s : streams)
        if (s->owner == asked.owner) all.push_back(s);
    return all;
}

// Wait a moment for other ranks.
inline void nap(StreamsLock& lock) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    lock.lock();
}

// Run a stream up to a mark, or all of it. Behind a mark that has passed the stream may be gone.
inline void run_stream(EmulatedStream& asked, const Mark* mark = nullptr) {
    StreamsLock lock(streams_mutex);
    if (mark && mark->passed) return;
    std::vector<EmulatedStream*> all = streams_beside(asked);
    while (mark ? !mark->passed : !asked.pieces.empty())
        if (!advance(asked, all, lock)) nap(lock);
}

// Run a stream as far as other ranks allow. Returns whether all of it is over.
inline bool is_over(EmulatedStream& asked) {
    StreamsLock lock(streams_mutex);
    std::vector<EmulatedStream*> all = streams_beside(asked);
    while (!asked.pieces.empty())
        if (!advance(asked, all, lock)) return nap(lock), false;
    return true;
}

// Run one piece of each of this thread's streams, while the host waits for other ranks by itself.
inline void run_beside_host() {
    StreamsLock lock(streams_mutex);
    for (EmulatedStream* s : streams_beside({}))
        step(*s, false, lock);
}

// The null stream's copies from the host that have not run yet.
inline thread_local std::vector<Piece> late_copies;
inline void run_late_copies() {
    for (Piece& copy : late_copies)
        copy.run();
    late_copies.clear();
}

// Run all of this thread's streams.
inline void run_own_streams() {
    run_late_copies();
    StreamsLock lock(streams_mutex);
    std::vector<EmulatedStream*> own = streams_beside({});
    lock.unlock();
    for (EmulatedStream* s : own)
        run_stream(*s);
}

// ----------------------------------------------------------------------------
// issuing

// The work captured into a graph. While a stream is captured nothing of it runs.
struct Graph {
    std::map<cudaStream_t, std::vector<Piece>> of; // by captured stream
    std::map<cudaStream_t, size_t> joined; // the pieces of each that `first` has waited for
    std::vector<void*> kept;               // memory from cudaMallocAsync, freed with the graph
    cudaStream_t first = nullptr;          // the stream with which the capture began
};
inline thread_local Graph* capture = nullptr;
inline bool is_captured(cudaStream_t stream) { return capture && capture->of.count(stream); }

// Report a call that CUDA does not allow while this thread captures a stream. Returns true if
// the thread was capturing.
inline bool not_captured(const char* call) {
    if (capture) error(Site::current(), "%s while a stream is captured", call);
    return capture;
}

// A dry run issues everything and runs nothing. Device memory is then addresses without memory
// behind them, so that a step of any size can be issued.
inline thread_local bool dry = false;

// Put a piece behind the stream's work, or into the graph that is being captured.
inline void push(cudaStream_t stream, Piece piece) {
    if (dry) piece = {.waits = piece.waits, .passes = piece.passes};
    if (is_captured(stream)) return capture->of[stream].push_back(std::move(piece));
    if (capture && piece.run)
        return error(Site::current(), "work for a stream that is not captured, beside one that is");
    if (stream) {
        StreamsLock lock(streams_mutex);
        return stream->pieces.push_back(std::move(piece));
    }

    // The null stream runs it now.
    if (piece.from) return late_copies.push_back(std::move(piece));
    run_late_copies();
    EmulatedStream now;
    now.pieces.push_back(std::move(piece));
    run_stream(now);
}

// Issue a mark, and a wait for it.
inline MarkPointer push_mark(cudaStream_t stream) {
    auto mark = std::make_shared<Mark>();
    mark->stream = stream;
    Piece piece;
    piece.passes = mark;
    push(stream, std::move(piece));
    return mark;
}
inline void push_wait(cudaStream_t stream, MarkPointer mark) {
    Piece piece;
    piece.waits = std::move(mark);
    push(stream, std::move(piece));
}

// A record of all launches, products and copies. `arguments` are the arguments' bytes with padding
// zeroed, so that two pieces can be compared. The work happens as it would without the record.
struct Note {
    const void* what = nullptr;
    std::string arguments = {};
    std::vector<int64_t> numbers = {}; // whole numbers among the arguments; blocks of a grid
    bool operator==(const Note& other) const {
        return what == other.what && arguments == other.arguments;
    }
};
inline thread_local std::vector<Note>* notes = nullptr;

// The bytes of a launch's arguments, one after the other.
template <typename... A> std::string bytes_of(A... arguments) {
    std::string bytes;
    [[maybe_unused]] auto add = [&](auto x) {
        if constexpr (!std::is_scalar_v<decltype(x)>) __builtin_clear_padding(&x);
        bytes.append(reinterpret_cast<const char*>(&x), sizeof(x));
    };
    (add(arguments), ...);
    return bytes;
}

// The whole numbers among a launch's arguments, and the number of blocks of its grid.
template <typename... A> std::vector<int64_t> numbers_of(const A&... arguments) {
    std::vector<int64_t> numbers;
    [[maybe_unused]] auto add = [&](const auto& x) {
        typedef std::decay_t<decltype(x)> X;
        if constexpr (std::is_same_v<X, dim3>)
            numbers.push_back(int64_t(x.x) * x.y * x.z);
        else if constexpr (std::is_integral_v<X>)
            numbers.push_back(int64_t(x));
    };
    (add(arguments), ...);
    return numbers;
}

template <typename... A> void note(const void* what, const A&... arguments) {
    if (notes) notes->push_back({what, bytes_of(arguments...), numbers_of(arguments...)});
}

// Give a stream work that needs no other rank.
template <typename W, typename... A>
void give(const void* what, cudaStream_t stream, W work, const A&... arguments) {
    note(what, arguments...);
    Piece piece;
    piece.run = [work] { return work(), true; };
    push(stream, std::move(piece));
}

// ----------------------------------------------------------------------------
// graphs

// A launch of a graph: its streams' work once more, with marks of its own.
struct Replay {
    std::map<cudaStream_t, EmulatedStream> of;
    cudaStream_t first;
};
inline std::shared_ptr<Replay> make_replay(const Graph& graph) {
    auto replay = std::make_shared<Replay>();
    replay->first = graph.first;
    std::map<MarkPointer, MarkPointer> marks;
    auto renewed = [&](const MarkPointer& mark) {
        MarkPointer& mine = marks[mark];
        if (mark && !mine) mine = std::make_shared<Mark>();
        if (mark) mine->stream = &replay->of[mark->stream];
        return mine;
    };

    // Copy the pieces, and point them at the new marks.
    for (auto& [stream, pieces] : graph.of)
        for (Piece piece : pieces) {
            piece.waits = renewed(piece.waits);
            piece.passes = renewed(piece.passes);
            replay->of[stream].pieces.push_back(std::move(piece));
        }
    return replay;
}

// Go on with a launch. Its first stream has waited for all the others.
inline bool run_replay(Replay& replay) {
    StreamsLock lock(streams_mutex);
    std::vector<EmulatedStream*> all;
    for (auto& [stream, copy] : replay.of)
        all.push_back(&copy);
    EmulatedStream& first = replay.of[replay.first];
    while (!first.pieces.empty())
        if (!advance(first, all, lock)) return false;
    return true;
}

} // namespace emulator
