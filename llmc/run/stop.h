// stop.h - signals end a run between two steps, and all ranks end it after the same one
//   SIGINT, SIGTERM, SIGHUP, SIGUSR1   the current step ends, a checkpoint is saved, and the
//   SIGUSR2, SIGXCPU                   program exits with status 128 + the signal's number
//   a second signal, a second later    ends the program at once, by the signal's default action;
//                                      SIGXCPU does not: the system repeats it each second
//   SIGPIPE                            is ignored by a run that trains: a reader of its output that
//                                      has gone costs lines, and no step
//   Shells and timeout(1) may send a signal twice at once: within a second, two count as one.
//   A signal that was ignored at the start (nohup, a shell's &) stays ignored.
//   Signals reach ranks at different moments, or reach only one of them. Once a step, agree() adds
//   up what each rank has received, so that no rank stops while its peers wait for it.
#pragma once
#include <unistd.h>
#include <cerrno>
#include <csignal>
#include <array>
#include <atomic>
#include "../comm/comm.h"
#include "../comm/group.h"
#include "../ops/types.h"
#include "../comm/text.h"

namespace llmc {

constexpr std::array<int, 6> STOP_SIGNALS = {SIGINT,  SIGTERM, SIGHUP,
                                             SIGUSR1, SIGUSR2, SIGXCPU};

// The signal that this process received, 0 for none, and when. Threads as ranks share both.
inline std::atomic<int> stop_signal = 0;
inline std::atomic<int64_t> stop_time = 0; // milliseconds

// Handle a signal: remember the first one; let the second, of any kind, end the process, since
// whoever sends two does not want to wait. A signal handler may call only async-signal-safe
// functions, such as clock_gettime.
inline void note_signal(int number) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t milliseconds = int64_t(now.tv_sec) * 1000 + now.tv_nsec / 1000000;
    if (stop_signal && (milliseconds - stop_time < 1000 || number == SIGXCPU))
        return;
    if (stop_signal) {
        signal(number, SIG_DFL);
        raise(number);
    }
    stop_time = milliseconds;
    stop_signal = number;

    // Answer at once: a step may take minutes, and whoever sees nothing sends a second signal,
    // which would lose what is about to be saved. Of several processes the first one answers.
    constexpr char SAYS[] = "\nstopping: this step ends, then it is saved if there is --out; "
                            "another signal ends the program at once, and saves nothing\n";
    if (this_rank > 0) return;
    int before = errno; // of the call that the signal interrupted
    if (write(STDERR_FILENO, SAYS, sizeof(SAYS) - 1) < 0)
        errno = before; // nobody is listening
}

// Give this thread and its OpenMP workers a stack for signal handlers. oneDNN's products on AVX and
// AVX2 use the stack pointer as one more register: a handler there would write into the heap.
inline void give_signal_stacks() {
#pragma omp parallel
    {
        thread_local std::array<char, 65536> room; // AMX's registers take 11 KB of it
        stack_t was, stack = {};
        stack.ss_sp = room.data();
        stack.ss_size = room.size();
        sigaltstack(nullptr, &was);
        if (was.ss_flags & SS_DISABLE) sigaltstack(&stack, nullptr);
    }
}

// Set a signal's handler, or its default action; a signal that is ignored stays ignored.
inline void handle_signal(int number, void (*handler)(int)) {
    struct sigaction was;
    sigaction(number, nullptr, &was);
    if (was.sa_handler == SIG_IGN) return;

    // Restart system calls that a signal interrupts: the signal is not looked at before the step
    // ends, so no call needs to fail.
    struct sigaction action = {};
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART | SA_ONSTACK;
    sigaction(number, &action, nullptr);
}

// Lets signals wait for a step's end. Each rank has one: the first sets handlers, the last ends it.
struct CatchSignals {
    static inline std::atomic<int> alive = 0;
    CatchSignals() {
        give_signal_stacks();
        if (alive++ > 0) return;
        for (int number : STOP_SIGNALS)
            handle_signal(number, note_signal);
    }
    ~CatchSignals() {
        if (--alive > 0) return;
        for (int number : STOP_SIGNALS)
            if (number != SIGXCPU || !stop_signal) // the system repeats it until the exit
                handle_signal(number, SIG_DFL);
    }
};

// "SIGTERM"
inline std::string signal_name(int number) {
    const char* name = sigabbrev_np(number);
    return name ? concat("SIG", name) : concat("signal ", number);
}

// The wishes of one rank at the end of a step; after agree(), those of any rank.
struct Wishes {
    int stop = 0;         // the signal that ends the run; 0: none
    bool save = false;    // it is time for a checkpoint
    bool writing = false; // an asynchronous save is still writing (async_save.h)
    bool doubt = false;   // this step's loss says that the save in flight has ruined weights
};

// Combine the wishes of all ranks: one rank's wish is enough. If ranks received different signals,
// all return the first one in the order of STOP_SIGNALS.
inline Wishes agree(const Comm& world, Wishes mine) {
    constexpr size_t SIGNALS = STOP_SIGNALS.size();
    std::array<int64_t, SIGNALS + 3> votes = {};
    for (size_t i = 0; i < SIGNALS; i++)
        votes[i] = mine.stop == STOP_SIGNALS[i];
    votes[SIGNALS] = mine.save;
    votes[SIGNALS + 1] = mine.writing;
    votes[SIGNALS + 2] = mine.doubt;
    all_reduce_sum(world, votes.data(), votes.size(), Cpu{});

    Wishes all;
    for (size_t i = SIGNALS; i-- > 0;)
        if (votes[i]) all.stop = STOP_SIGNALS[i];
    all.save = votes[SIGNALS] > 0;
    all.writing = votes[SIGNALS + 1] > 0;
    all.doubt = votes[SIGNALS + 2] > 0;
    return all;
}

} // namespace llmc
