// rank_status.h - each rank's current action, in memory shared by the ranks of a machine
//   A rank notes each action as it begins it, and whether it waits for other ranks. A rank that has
//   waited too long reads the notes. Ranks wait for each other in chains, and the culprit is the
//   one that does not wait: "rank 2 has been in B(0,3) for 31.0 s, and waits for nobody". A waiting
//   rank signs its note again from time to time; one that does not is stopped.
//   Threads keep their notes in an array of the process, processes in shared memory of the machine
//   (mpi.h). A rank on another machine is asked (hang_report.h).
//   Cost: ten stores an action. A reader may see half of a changing name: it is only printed.
//   To copy: this file.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>

namespace llmc {

// Return seconds on a clock that never goes back, and that all processes of a machine share.
inline double clock_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// The note of one rank, in cache lines of its own.
struct alignas(64) RankNote {
    std::atomic<int> rank = -1; // in the world; -1: it has not started yet
    std::atomic<bool> waits = false;
    std::atomic<double> since = 0; // when the action began, or when a wait in it last looked around
    std::atomic<double> waited = 0; // seconds in all waits that are over
    std::atomic<double> longest = 0; // of these waits, seconds
    std::atomic<double> silent_until = 0; // in a machine's first note: when a rank may tell again
    std::array<std::atomic<uint64_t>, 13> name = {}; // of the action, cut to fit
};

// All notes of a machine, and this rank's own; null if nobody takes notes.
struct RankNotes {
    RankNote* all = nullptr; // (count)
    int count = 0;
    RankNote* own = nullptr;
};

// Note that this rank begins an action.
inline void note_action(const RankNotes& notes, const std::string& action) {
    if (!notes.own) return;
    // The last letter stays 0. Words are stored whole, because a reader may come at any moment.
    char letters[sizeof(RankNote::name)] = {};
    memcpy(letters, action.data(), std::min(action.size(), sizeof(letters) - 1));
    for (size_t i = 0; i < notes.own->name.size(); i++) {
        uint64_t word;
        memcpy(&word, letters + 8 * i, 8);
        notes.own->name[i].store(word, std::memory_order_relaxed);
    }
    notes.own->since = clock_seconds();
}

// A wait for others: it lasts as long as this object. A host that waits for its own device too does
// not know how long it was for others, and counts nothing.
struct NoteWait {
    // This rank's note; null if nobody takes notes.
    RankNote* own;
    bool counts;
    double begin = clock_seconds();
    explicit NoteWait(const RankNotes& notes, bool counts = true)
        : own(notes.own), counts(counts) {
        sign();
        if (own) own->waits = true;
    }
    // Note that this rank still looks around.
    void sign() const {
        if (own) own->since = clock_seconds();
    }
    ~NoteWait() {
        sign();
        if (!own) return;
        own->waits = false;
        double seconds = clock_seconds() - begin;
        if (counts) own->waited = own->waited + seconds;
        own->longest = std::max(own->longest.load(), seconds);
    }
    NoteWait(const NoteWait&) = delete;
};

// Return the seconds that this rank has spent waiting for others so far.
inline double seconds_waited(const RankNotes& notes) {
    return notes.own ? notes.own->waited.load() : 0;
}

// Name the ranks whose note is at least half as old as this rank's wait.
inline std::string standing_text(const RankNotes& notes, double waited) {
    std::string text;
    for (int i = 0; i < notes.count; i++) {
        // Skip a recent note: its rank works, or waits as this one does.
        const RankNote& note = notes.all[i];
        double seconds = clock_seconds() - note.since;
        if (note.rank < 0 || seconds < waited / 2) continue;

        // Read the name, word by word.
        char name[sizeof(RankNote::name) + 1] = {};
        for (size_t k = 0; k < note.name.size(); k++) {
            uint64_t word = note.name[k];
            memcpy(name + 8 * k, &word, 8);
        }
        // Say whether the rank computes, or is stopped in the middle of a wait.
        char line[256];
        snprintf(line, sizeof(line), "; rank %d has been in %s for %.1f s, and %s", int(note.rank),
                 *name ? name : "its start", seconds,
                 note.waits ? "no longer looks around" : "waits for nobody");
        text += line;
    }
    return text;
}

} // namespace llmc
