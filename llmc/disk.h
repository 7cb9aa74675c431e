// disk.h - a file in place of memory: blocks with checksums, moved by threads beside compute
//   The file has no name, so a kill leaves nothing behind. It takes its room at once, so a full
//   disk ends a run before its first step. Bytes move in blocks of 1 MiB, past the page cache
//   (O_DIRECT) where the file system allows it: the cache would hold in memory what was to leave
//   it. The checksum of each block stays in memory. A block that comes back changed is an error.
//     disk_read, disk_write   move any range now: initial weights, checkpoints
//     disk_start              starts to move a range by the file's threads; disk_finish() waits
//   Each thread owns memory for a block and, beside a device, a stream; that memory is pinned then.
//   So threads wait for no other thread, and the driver stages nothing.
//   Functions that return a text return "" or one line that says what is wrong.
#pragma once
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <zlib.h>
#ifdef __SSE4_2__
#include <nmmintrin.h>
#endif
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>
#include "ops/matmul.cuh"
#include "ops/memory.h"
#include "ops/types.h"
#include "text.h"

namespace llmc {

constexpr size_t DISK_BLOCK = size_t(1) << 20; // bytes that move at a time
constexpr size_t DISK_ALIGN = 4096;            // O_DIRECT: of addresses, offsets and lengths
constexpr int DISK_THREADS = 4;                // blocks in flight at once

// A thread's memory for one block, pinned beside a device and aligned for O_DIRECT, and its stream.
template <typename S> struct DiskLane {
    static constexpr size_t ROOM = DISK_BLOCK + DISK_ALIGN;
    S stream;
    void* room;
    unsigned char* bytes; // (DISK_BLOCK) in room
    explicit DiskLane(S where) : stream(open_stream(where)), room(host_memory(ROOM, where)) {
        LLMC_USER_CHECK(room, "--offload-to: no memory for a block of %zu bytes", DISK_BLOCK);
        bytes = reinterpret_cast<unsigned char*>(round_up(uintptr_t(room), uintptr_t(DISK_ALIGN)));
    }
    DiskLane(const DiskLane&) = delete;
    ~DiskLane() {
        host_free(room, ROOM, stream);
        close_stream(stream);
    }
};

// The file, and the threads that move its blocks.
struct Disk {
    int file = -1;
    bool direct = false;        // O_DIRECT: past the page cache
    std::string folder;
    std::vector<uint32_t> sums; // [block]
    std::vector<char> written;  // [block]; a block that was never written reads as zero

    typedef std::function<void(std::shared_ptr<void>& lane)> Job; // lane: the thread's DiskLane
    std::deque<Job> jobs;
    bool ends = false;
    std::mutex lock;
    std::condition_variable changed; // a job was added, a move is over, or the disk ends
    std::vector<std::thread> threads;

    // Drop the moves in flight: nobody waits for them.
    ~Disk() {
        {
            std::lock_guard hold(lock);
            ends = true;
        }
        changed.notify_all();
        for (std::thread& t : threads) t.join();
        if (file >= 0) close(file);
    }
};

// ----------------------------------------------------------------------------
// open

// One thread's life: take jobs until the disk ends.
inline void disk_thread(Disk& d) {
    std::shared_ptr<void> lane;
    for (std::unique_lock hold(d.lock);;) {
        // Sleep until there is something to do.
        d.changed.wait(hold, [&] { return d.ends || !d.jobs.empty(); });
        if (d.ends) return;
        Disk::Job job = std::move(d.jobs.front());
        d.jobs.pop_front();

        // Release the lock, so that others take jobs while this one runs.
        hold.unlock();
        job(lane);
        hold.lock();
    }
}

// Open a file without a name. Returns -1, with errno, if that fails.
inline int open_nameless(const std::string& folder, int flags) {
    int file = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
    if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL))
        return file;

    // Some file systems need a name until the file is open. Take it away at once, also if mkostemp
    // made the file and failed to open it.
    std::string name = folder + "/offload.XXXXXX";
    file = mkostemp(name.data(), O_CLOEXEC | flags);
    int why = errno;
    unlink(name.c_str());
    errno = why;
    return file;
}

// Make the file and take all of its room.
inline std::string disk_open(Disk& d, const std::string& folder, size_t bytes) {
    // Try O_DIRECT first; a file system without it says EINVAL.
    d.folder = folder;
    size_t blocks = ceil_div(bytes, DISK_BLOCK);
    d.file = open_nameless(folder, O_DIRECT);
    d.direct = d.file >= 0;
    if (!d.direct)
        d.file = open_nameless(folder, 0);
    if (d.file < 0)
        return folder + ": no file can be made there: " + strerror(errno);

    // Take the room ahead. Where the file system cannot do that, at least check that it is free.
    int refused;
    do refused = fallocate(d.file, 0, 0, off_t(blocks * DISK_BLOCK));
    while (refused && errno == EINTR);
    if (refused) {
        struct statvfs fs;
        bool known = errno == EOPNOTSUPP && fstatvfs(d.file, &fs) == 0;
        bool fits = known && size_t(fs.f_bavail) * fs.f_frsize >= blocks * DISK_BLOCK;
        if (!fits)
            return concat(folder, ": ", blocks, " MiB of state do not fit: ",
                          known ? "the disk is full" : strerror(errno), "; choose another folder");
    }

    // All blocks begin as zeros, and nothing is written for that.
    d.sums.resize(blocks);
    d.written.resize(blocks);
    for (int i = 0; i < DISK_THREADS; i++)
        d.threads.emplace_back([&d] { disk_thread(d); });
    return "";
}

// ----------------------------------------------------------------------------
// one block

// Move all of a block by `some`, which is pread or pwrite and may move less than it is asked for.
template <typename F>
std::string whole_block(const Disk& d, size_t block, const char* verb, F some) {
    for (size_t done = 0; done < DISK_BLOCK;) {
        ssize_t n = some(done, DISK_BLOCK - done, off_t(block * DISK_BLOCK + done));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
            return concat(d.folder, ": block ", block, " of the offloaded state cannot be ", verb,
                          ": ", n < 0 ? strerror(errno) : "the file ends before it");
        // Resume at a multiple of DISK_ALIGN, as O_DIRECT needs.
        done += size_t(n);
        if (done < DISK_BLOCK)
            done -= done % DISK_ALIGN;
    }
    return "";
}

// Return a block's checksum: CRC-32C by the processor's own instruction where it has one, else
// zlib's CRC-32. The file ends with its run, so the two never meet.
inline uint32_t block_sum(const unsigned char* bytes) {
#ifdef __SSE4_2__
    // An instruction waits three cycles for the one before it: keep three chains, a third each.
    constexpr size_t WORDS = DISK_BLOCK / sizeof(uint64_t), THIRD = WORDS / 3;
    auto next = [&](uint64_t sum, size_t i) {
        uint64_t word;
        memcpy(&word, bytes + i * sizeof(word), sizeof(word));
        return _mm_crc32_u64(sum, word);
    };
    uint64_t first = ~0u, second = ~0u, third = ~0u;
    for (size_t i = 0; i < THIRD; i++) {
        first = next(first, i);
        second = next(second, THIRD + i);
        third = next(third, 2 * THIRD + i);
    }

    // Add the words after the last third.
    for (size_t i = 3 * THIRD; i < WORDS; i++)
        third = next(third, i);

    // Join the chains. A sum enters a word's lower half, so the next chain takes the upper one.
    first = _mm_crc32_u64(first, second << 32);
    return uint32_t(_mm_crc32_u64(first, third << 32));
#else
    return uint32_t(crc32(0, bytes, uInt(DISK_BLOCK)));
#endif
}

// Read a block and compare it with its checksum.
inline std::string read_block(Disk& d, size_t block, unsigned char* to) {
    if (!d.written[block]) {
        memset(to, 0, DISK_BLOCK);
        return "";
    }
    std::string wrong = whole_block(d, block, "read", [&](size_t at, size_t n, off_t offset) {
        return pread(d.file, to + at, n, offset);
    });
    if (wrong.empty() && block_sum(to) != d.sums[block])
        wrong = concat(d.folder, ": block ", block, " of the offloaded state has changed since it "
                       "was written: the disk is at fault, or another program");
    return wrong;
}

// Write a block and keep its checksum.
inline std::string write_block(Disk& d, size_t block, const unsigned char* from) {
    d.sums[block] = block_sum(from);
    d.written[block] = 1;
    return whole_block(d, block, "written", [&](size_t at, size_t n, off_t offset) {
        return pwrite(d.file, from + at, n, offset);
    });
}

// ----------------------------------------------------------------------------
// ranges, from and to the memory of the host or a device

enum class Way { FROM_DISK, TO_DISK };

// The part of a range that lies in one block.
struct BlockPart {
    size_t block, within, bytes; // `within`: the part's offset in its block
};

// Call f(part, at) for each block of a range; `at` counts bytes from the start of the range.
template <typename F>
void for_each_block(size_t offset, size_t bytes, F f) {
    for (size_t at = 0; at < bytes;) {
        // The first and the last part may be less than a block.
        size_t within = (offset + at) % DISK_BLOCK;
        size_t n = std::min(bytes - at, DISK_BLOCK - within);
        f(BlockPart{(offset + at) / DISK_BLOCK, within, n}, at);
        at += n;
    }
}

// Move one part of a block; the rest of the block keeps its bytes. ready() waits until
// the copy may begin.
template <typename S, typename F>
std::string move_part(Disk& d, Way way, unsigned char* memory, BlockPart part, DiskLane<S>& lane,
                      F ready) {
    // To write part of a block, read the rest of it first.
    unsigned char* there = lane.bytes + part.within;
    std::string wrong;
    if (way == Way::FROM_DISK || part.bytes < DISK_BLOCK)
        wrong = read_block(d, part.block, lane.bytes);
    if (!wrong.empty()) return wrong;

    // The copy is over when this returns: the next part uses the same buffer.
    ready();
    if (way == Way::FROM_DISK) {
        copy_in(memory, there, part.bytes, lane.stream);
        wait_for(lane.stream);
        return "";
    }
    copy_out(there, memory, part.bytes, lane.stream);
    return write_block(d, part.block, lane.bytes);
}

// Move a range of the file now, to or from the host's memory.
inline std::string disk_read(Disk& d, void* to, size_t offset, size_t bytes) {
    DiskLane<Cpu> lane(Cpu{});
    std::string wrong;
    // Stop at the first faulty block.
    for_each_block(offset, bytes, [&](BlockPart part, size_t at) {
        unsigned char* memory = static_cast<unsigned char*>(to) + at;
        if (wrong.empty())
            wrong = move_part(d, Way::FROM_DISK, memory, part, lane, [] {});
    });
    return wrong;
}
inline std::string disk_write(Disk& d, const void* from, size_t offset, size_t bytes) {
    // move_part() moves both ways, so it takes a pointer to non-const, but here it only reads.
    DiskLane<Cpu> lane(Cpu{});
    std::string wrong;
    for_each_block(offset, bytes, [&](BlockPart part, size_t at) {
        auto* memory = const_cast<unsigned char*>(static_cast<const unsigned char*>(from)) + at;
        if (wrong.empty())
            wrong = move_part(d, Way::TO_DISK, memory, part, lane, [] {});
    });
    return wrong;
}

// ----------------------------------------------------------------------------
// moves beside compute

// Ranges that move together. The move ends when the last of their blocks has arrived.
struct DiskMove {
    size_t left = 0; // blocks in flight or waiting
    std::string wrong;
    std::function<void()> ready; // waits until copies may begin
    std::once_flag waited;       // one thread has waited for all
};

// Add a range to a move. Each block is a job. `memory` belongs to the move until the move is over.
// Copies begin once `where` has done what it was given before the move's first range.
template <typename S>
void disk_start(Disk& d, const std::shared_ptr<DiskMove>& move, Way way, void* memory,
                size_t offset, size_t bytes, S where) {
    // Tell the threads which device to use: a new thread uses the first one.
    int device = current_device(where);
    if (!move->ready)
        move->ready = [point = record_point(where)] { wait_here(point); };
    std::lock_guard hold(d.lock);
    for_each_block(offset, bytes, [&](BlockPart part, size_t at) {
        unsigned char* here = static_cast<unsigned char*>(memory) + at;
        move->left++;
        d.jobs.push_back([=, &d](std::shared_ptr<void>& lane) {
            // A copy must not begin before the work that used these bytes is over.
            use_device(device, where);
            if (!lane) lane = std::make_shared<DiskLane<S>>(where);
            auto ready = [&] { std::call_once(move->waited, move->ready); };
            auto& mine = *static_cast<DiskLane<S>*>(lane.get());
            std::string wrong = move_part(d, way, here, part, mine, ready);

            // The last block wakes the waiter.
            std::lock_guard hold(d.lock);
            if (!wrong.empty()) move->wrong = wrong;
            if (--move->left == 0)
                d.changed.notify_all();
        });
    });

    // Wake all threads: a range has many blocks.
    d.changed.notify_all();
}

// Wait until all blocks of a move have arrived.
inline std::string disk_finish(Disk& d, DiskMove& move) {
    // Threads and waiters share one condition: moves are long, so spurious wake-ups are rare.
    std::unique_lock hold(d.lock);
    d.changed.wait(hold, [&] { return move.left == 0; });
    return move.wrong;
}

} // namespace llmc
