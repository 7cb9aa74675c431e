// async_save.h - checkpoints that are written beside the steps: --save-async
//   1. async_begin  step 1 of a save (checkpoint.h); then each rank copies what its file is to hold
//                   into its snapshot in host memory. Training waits for this step alone
//   2. a thread     writes and syncs the rank's file from the snapshot, while training continues
//   3. async_end    when all ranks' threads are done: steps 3 to 5 of the save, all ranks together
//   One save at a time is in flight: the next save ends it first, and so do a signal and the end of
//   a run. The thread sends no message and reads no weight, so training may change all that was
//   copied. The files are byte for byte those of a blocking save, and a kill costs no more: no
//   folder has its name before 3. The training step after the writing learns how the save ended.
//   Memory: the snapshot lasts the whole run, is touched at its start, and --explain counts it. A
//   rank that owns everything needs 12 bytes a parameter under AdamW: a flag, not the default.
#pragma once
#include <atomic>
#include <span>
#include <thread>
#include "checkpoint.h"

namespace llmc {

// The save in flight, and the snapshot that all saves share.
struct AsyncSave {
    std::vector<unsigned char> snapshot; // the file's tensors, one behind the other
    Save save = {};
    std::string wrong = ""; // the thread's error; read it only when the thread has ended
    std::atomic<bool> writing = false;
    std::thread thread = {}; // joinable: a save is in flight

    explicit AsyncSave(size_t bytes) : snapshot(bytes) {}
    ~AsyncSave() {
        if (thread.joinable()) thread.join();
    }
};

// A save is in flight until async_end(); its thread is writing until the file is synced. A null
// pointer means a run without --save-async.
inline bool is_on_its_way(const AsyncSave* a) { return a && a->thread.joinable(); }
inline bool is_writing(const std::shared_ptr<AsyncSave>& a) { return a && a->writing; }

// Size of this rank's snapshot in bytes.
template <typename T, typename S>
size_t snapshot_bytes(const Trainer<T, S>& t) {
    // Files hold floats, whatever a rank keeps: split masters are joined, small moments widened.
    size_t elements = 0;
    for (auto& [tensor, range] : rank_file_of(t).owned)
        elements += range.count;
    return elements * sizeof(acc_t<T>);
}

// Allocate the snapshot at the start, so that a run never fails for lack of memory later.
template <typename T, typename S>
std::shared_ptr<AsyncSave> make_async_save(const Trainer<T, S>& t) {
    return std::make_shared<AsyncSave>(snapshot_bytes(t));
}

// Begin a save and leave the writing to a thread. Returns "" or what is wrong; after an error no
// save is in flight.
template <typename T, typename S>
std::string async_begin(const Trainer<T, S>& t, AsyncSave& a, const Save& save) {
    typedef acc_t<T> A;
    // Make the weights' sums now too: they belong to this step.
    a.save = save;
    std::string wrong = save_begin(t, a.save);
    if (!wrong.empty()) return wrong;

    // Copy all that the file is to hold, because the next training step changes it.
    A* next = reinterpret_cast<A*>(a.snapshot.data());
    std::vector<std::span<const A>> tensors;
    for (auto& [s, range] : a.save.file.owned) {
        read_numbers(t, next, s.data, *s.p, range);
        tensors.push_back({next, range.count});
        next += range.count;
    }

    // Write the file from the copy alone.
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
    // Only the main thread may communicate with other ranks, so it joins here.
    a.thread.join();
    return save_end(world, a.save, a.wrong);
}

} // namespace llmc
