// async_save.h - checkpoints that are written beside the steps: --save-async
//   1. async_begin  step 1 of a save (checkpoint.h); then each rank copies what its file is to hold
//                   into its snapshot, memory of the host. Steps wait for this alone
//   2. a thread     writes and syncs the rank's file from the snapshot, while steps go on
//   3. async_end    once no rank's thread is at work: steps 3 to 5 of the save, all ranks together
//   One save at a time is on its way: the next one ends it first, so do a signal and a run's end.
//   A thread sends no message and reads no weight, so training may change all that was copied.
//   Its files have the bytes of a save that steps wait for. A kill costs what it costs there, for
//   no folder has a name before 3. The step after it hears how a save has ended.
//   Memory: the snapshot lasts the whole run, is touched at its start, and --explain counts it. A
//   rank that owns all takes 12 bytes a parameter under AdamW, so this is a flag and no default.
#pragma once
#include <atomic>
#include <span>
#include <thread>
#include "checkpoint.h"

namespace llmc {

// The save that is on its way, and what lasts from one to the next.
struct AsyncSave {
    std::vector<unsigned char> snapshot; // the file's tensors, one behind the other
    Save save = {};
    std::string wrong = ""; // what the thread has met; only while it does not run
    std::atomic<bool> writing = false;
    std::thread thread = {}; // joinable: a save is on its way

    explicit AsyncSave(size_t bytes) : snapshot(bytes) {}
    ~AsyncSave() {
        if (thread.joinable()) thread.join();
    }
};

// A save is on its way until async_end(), its thread at work until it has written. Null: never.
inline bool is_on_its_way(const AsyncSave* a) { return a && a->thread.joinable(); }
inline bool is_writing(const std::shared_ptr<AsyncSave>& a) { return a && a->writing; }

// Bytes of this rank's snapshot.
template <typename T, typename S>
size_t snapshot_bytes(const Trainer<T, S>& t) {
    // Files hold floats, whatever a rank keeps: masters joined, small moments widened.
    size_t elements = 0;
    for (auto& [tensor, range] : rank_file_of(t).owned)
        elements += range.count;
    return elements * sizeof(acc_t<T>);
}

// Take the memory now: a run that has begun never lacks it.
template <typename T, typename S>
std::shared_ptr<AsyncSave> make_async_save(const Trainer<T, S>& t) {
    return std::make_shared<AsyncSave>(snapshot_bytes(t));
}

// Begin a save and leave the writing to a thread; "" or what is wrong, and then none is on its way.
template <typename T, typename S>
std::string async_begin(const Trainer<T, S>& t, AsyncSave& a, const Save& save) {
    typedef acc_t<T> A;
    // Sums of weights are made here too: they are of this step.
    a.save = save;
    std::string wrong = save_begin(t, a.save);
    if (!wrong.empty()) return wrong;

    // Copy all that the file is to hold: the next step changes it.
    A* next = reinterpret_cast<A*>(a.snapshot.data());
    std::vector<std::span<const A>> tensors;
    for (auto& [s, range] : a.save.file.owned) {
        read_numbers(t, next, s.data, *s.p, range);
        tensors.push_back({next, range.count});
        next += range.count;
    }

    // Write it, from the copy alone.
    a.writing = true;
    a.thread = std::thread([&a, tensors] {
        a.wrong = write_rank_file(a.save.file, a.save.temporary(),
                                  [&](size_t i) { return tensors[i]; });
        a.writing = false;
    });
    return "";
}

// Wait for this rank's thread, then end the save on all ranks.
inline std::string async_end(const Comm& world, AsyncSave& a) {
    // The main thread alone may call the ranks together.
    a.thread.join();
    return save_end(world, a.save, a.wrong);
}

} // namespace llmc
