// stop.h - signals end a run between two steps, and all ranks end it after the same one
//   SIGINT, SIGTERM, SIGHUP, SIGUSR1   the step under way ends, a checkpoint is saved, and the
//                                      program leaves with 128 + the signal's number
//   a second one, a second later       leaves at once, by the signal's default action
//   Shells and timeout(1) send one signal twice at once: that counts as one.
//   A signal that was ignored at the start (nohup, a shell's &) stays ignored.
//   Ranks are told at different moments, or only one of them is. agree() adds up what each has
//   heard, once a step, so that no rank stops while its peers wait for it.
#pragma once
#include <ctime>
#include <csignal>
#include <array>
#include <atomic>
#include "../comm/comm.h"

namespace llmc {

constexpr std::array<int, 4> STOP_SIGNALS = {SIGINT, SIGTERM, SIGHUP, SIGUSR1};

// The signal that this process has got, 0 for none, and when. Threads as ranks share them.
inline std::atomic<int> stop_signal = 0;
inline std::atomic<int64_t> stop_time = 0; // milliseconds

// The second signal of any kind ends the process: whoever sends two does not want to wait. A
// handler may call nothing but what is safe in one, as clock_gettime is.
inline void note_signal(int number) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t milliseconds = int64_t(now.tv_sec) * 1000 + now.tv_nsec / 1000000;
    if (stop_signal && milliseconds - stop_time < 1000)
        return;
    if (stop_signal) {
        signal(number, SIG_DFL);
        raise(number);
    }
    stop_time = milliseconds;
    stop_signal = number;
}

// Take a signal's action over, or give its default back; one that is ignored stays so.
inline void handle_signal(int number, void (*handler)(int)) {
    struct sigaction was;
    sigaction(number, nullptr, &was);
    if (was.sa_handler == SIG_IGN) return;

    // A system call goes on where it was: nobody looks at the signal before the step's end.
    struct sigaction action = {};
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;
    sigaction(number, &action, nullptr);
}

// Signals wait for the end of a step while one of these lives. Threads as ranks have one each, and
// the last that goes gives the signals their defaults back.
struct CatchSignals {
    static inline std::atomic<int> alive = 0;
    CatchSignals() {
        if (alive++ > 0) return;
        for (int number : STOP_SIGNALS)
            handle_signal(number, note_signal);
    }
    ~CatchSignals() {
        if (--alive > 0) return;
        for (int number : STOP_SIGNALS)
            handle_signal(number, SIG_DFL);
    }
};

// "SIGTERM"
inline std::string signal_name(int number) {
    const char* name = sigabbrev_np(number);
    return name ? concat("SIG", name) : concat("signal ", number);
}

// The wishes of a rank at the end of a step; after agree(), those of all ranks.
struct Wishes {
    int stop = 0;      // the signal that ends the run; 0: it goes on
    bool save = false; // it is time for a checkpoint
    bool writing = false; // the thread of a save beside the steps is at work (async_save.h)
};

// Add up the wishes of all ranks: one wish is enough. Ranks that got different signals name the
// first of STOP_SIGNALS that any has got.
inline Wishes agree(const Comm& world, Wishes mine) {
    std::array<int64_t, STOP_SIGNALS.size() + 2> votes = {};
    for (size_t i = 0; i < STOP_SIGNALS.size(); i++)
        votes[i] = mine.stop == STOP_SIGNALS[i];
    votes[STOP_SIGNALS.size()] = mine.save;
    votes.back() = mine.writing;
    all_reduce_sum(world, votes.data(), votes.size(), Cpu{});

    Wishes all;
    for (size_t i = STOP_SIGNALS.size(); i-- > 0;)
        if (votes[i]) all.stop = STOP_SIGNALS[i];
    all.save = votes[STOP_SIGNALS.size()] > 0;
    all.writing = votes.back() > 0;
    return all;
}

} // namespace llmc
