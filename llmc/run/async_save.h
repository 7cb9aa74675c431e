// async_save.h - checkpoints that are written beside the steps: --save-async
//   1. async_begin  step 1 of a save (checkpoint.h); then each rank copies what its file is to hold
//                   into its snapshot in host memory. Training waits for this step alone
//   2. a thread     writes and syncs the rank's file from the snapshot, while training continues
//   3. async_name   when all ranks' threads are done: step 3 of the save, all ranks together; then
//                   a thread of the first rank takes steps 4 and 5, which sync and remove files
//   4. async_end    when that is done too: all ranks learn how the save ended
//   One save at a time is in flight: the next save ends it first, and so do a signal and the end of
//   a run. A thread sends no message and reads no weight, so training may change all that was
//   copied. The files are byte for byte those of a blocking save, and a kill costs no more: no
//   folder has its name before 3. Each training step looks whether all ranks' threads are done.
//   A blocking save tries its weights first (health.h). Here the next step's loss is that trial, at
//   no cost; where it is bad, async_drop() takes the save back before it has a name.
//   Memory: the snapshot lasts the whole run, is touched at its start, and --explain counts it. A
//   rank that owns everything needs 12 bytes a parameter under AdamW: a flag, not the default.
#pragma once
#include <atomic>
#include <span>
#include <thread>
#include "../comm/comm.h"
#include "../comm/group.h"
#include "../comm/text.h"
#include "../io/checkpoint.h"
#include "../io/files.h"
#include "../ops/types.h"
#include "../parameters.h"
#include "../trainer.h"

namespace llmc {

// The save in flight, and the snapshot that all saves share.
struct AsyncSave {
    std::vector<unsigned char> snapshot; // the file's tensors, one after the other
    Save save = {};
    std::string wrong = ""; // the thread's error; read it only when the thread has ended
    std::atomic<bool> writing = false; // the thread has not ended yet
    bool in_flight = false;
    bool naming = false;  // step 3 has begun
    bool untried = false; // the next step's loss tells whether the weights are good
    std::thread thread = {};

    explicit AsyncSave(size_t bytes) : snapshot(bytes) {}
    ~AsyncSave() {
        if (thread.joinable()) thread.join();
    }
};

// A save is in flight until async_end() or async_drop(). A null pointer means a run without
// --save-async.
inline bool is_on_its_way(const AsyncSave* a) { return a && a->in_flight; }
inline bool is_writing(const std::shared_ptr<AsyncSave>& a) { return a && a->writing; }

// Let the thread do some work; the one before has ended.
template <typename F> void async_work(AsyncSave& a, F work) {
    a.writing = true;
    a.thread = std::thread([&a, work] {
        a.wrong = work();
        a.writing = false;
    });
}

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
    LLMC_TRY(save_begin(t, a.save, t.comms.world.rank == 0));

    // Copy all that the file is to hold, because the next training step changes it.
    A* next = reinterpret_cast<A*>(a.snapshot.data());
    std::vector<std::span<const A>> tensors;
    for (auto& [s, range] : a.save.file.owned) {
        read_numbers(t, next, s.data, *s.p, range);
        tensors.push_back({next, range.count});
        next += range.count;
    }

    // Write the file from the copy alone.
    a.in_flight = true;
    a.naming = false;
    async_work(a, [&a, tensors] {
        return write_rank_file(a.save.file, a.save.temporary(),
                               [&](size_t i) { return tensors[i]; });
    });
    return "";
}

// Wait for this rank's file, exchange what all ranks wrote, and leave the rest to the first rank's
// thread. All ranks call: only the main threads may send messages.
inline void async_name(const Comm& world, AsyncSave& a) {
    a.thread.join();
    Written written = exchange_written(world, a.save, std::exchange(a.wrong, ""));
    a.naming = true;
    if (world.rank == 0)
        async_work(a, [&a, written] { return name_checkpoint(a.save, written); });
}

// Wait for the end of the save on all ranks. Returns "" or what is wrong.
inline std::string async_end(const Comm& world, AsyncSave& a) {
    if (!a.naming) async_name(world, a);
    if (a.thread.joinable())
        a.thread.join();
    a.in_flight = false;
    return agree_on_save(world, std::exchange(a.wrong, ""));
}

// Take back a save that has no name yet. All ranks call.
inline void async_drop(const Comm& world, AsyncSave& a) {
    a.thread.join();
    barrier(world, Cpu{}); // until no rank writes
    if (world.rank == 0)
        remove_folder(a.save.temporary());
    a.in_flight = a.untried = false;
    a.wrong = "";
}

} // namespace llmc
