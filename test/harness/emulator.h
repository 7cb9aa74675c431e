// emulator.h - CUDA kernels on the CPU: the threads of a block are fibers of one OS thread
//   The kernels' own source is compiled by g++ with -DEMULATE; llmc/memory.h includes this file in
//   place of the CUDA headers. What it finds, each shown by a planted bug in test_emulator.cpp:
//     a race or a missing barrier   results differ between thread orders (forward, reverse,
//                                   shuffled); with -fsanitize=thread the kernel's line
//     a divergent barrier           __syncthreads from two places; a deadlock: who waits where
//     an early return               before a barrier, or in a shuffle's mask
//     a wrong shuffle               lanes outside the mask, or read from outside it
//     out of bounds                 with -fsanitize=address, shared arrays included
//     memory nobody wrote           shared memory is NaN when a block starts
//   A fiber runs until it waits: at a barrier for the block, at a shuffle for the lanes in its
//   mask. All state is per OS thread, so rank threads may launch at the same time. Kernels of a
//   stream run when they are launched. Under ThreadSanitizer a fiber is a thread of its own, and
//   barriers and atomics alone order fibers: shuffles exchange registers and order no memory.
//   What it cannot show: weak memory order, bank conflicts, register pressure, time.
#pragma once
#include <sys/mman.h>
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <source_location>
#include <string>
#include <type_traits>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define EMULATOR_ASAN(x) x
#else
#define EMULATOR_ASAN(x)
#endif

#if defined(__SANITIZE_THREAD__)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags); // flags 1: the switch orders nothing
void __tsan_acquire(void* object);
void __tsan_release(void* object);
void __tsan_read_range(void* from, unsigned long bytes);
void __tsan_write_range(void* to, unsigned long bytes);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#define EMULATOR_TSAN(x) x
#else
#define EMULATOR_TSAN(x)
#endif
#define EMULATOR_UNSEEN __attribute__((no_sanitize("thread"), noinline)) // by ThreadSanitizer

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct uint3 {
    unsigned x, y, z;
};
typedef struct EmulatedStream* cudaStream_t;

namespace emulator {

typedef std::source_location Site;

// ----------------------------------------------------------------------------
// settings and errors

enum class Order { FORWARD, REVERSE, SHUFFLED };

struct Settings {
    // Threads of a block, and blocks of a grid, take turns in this order.
    Order order = Order::FORWARD;
    uint64_t seed = 1; // of SHUFFLED
    // Asynchronous copies and products happen at their wait, else at their issue.
    bool latest = false;
};
inline thread_local Settings settings;

// How often this thread has launched each kernel, by address; products and memory sets count too,
// and a graph of them counts once.
inline thread_local std::map<const void*, size_t> launches;
template <typename F> void note_launch(F* kernel) {
    launches[reinterpret_cast<const void*>(kernel)]++;
}

// Mistakes found since the last take_messages(): the first twenty.
inline std::mutex messages_lock;
inline std::vector<std::string> messages;

inline std::vector<std::string> take_messages() {
    std::lock_guard<std::mutex> lock(messages_lock);
    return std::move(messages);
}

// ----------------------------------------------------------------------------
// fibers

constexpr size_t STACK_BYTES = size_t(256) << 10, PAGE = 4096;

// A fiber's stack, and what sanitizers keep of it; made once, used by many blocks.
struct Worker {
    unsigned char* stack = nullptr;
    void* tsan = nullptr;
    void* fake_stack = nullptr;
};

struct Block;

enum class State { READY, WAITS, RETURNED };

struct Fiber {
    void* sp = nullptr;
    Worker* worker = nullptr;
    Block* block = nullptr;
    State state = State::READY;
    uint3 thread = {0, 0, 0};
    unsigned index = 0; // in its block

    // While it waits: for what, where, and whether it still has to.
    const char* what = "";
    Site site;
    bool (*pending)(void*) = nullptr;
    void* pending_arg = nullptr;

    // While it waits for the lanes of a warp operation: what it brings and where its result goes.
    unsigned mask = 0;
    const void* in = nullptr;
    void* out = nullptr;
    bool in_operation = false;

    // This thread's asynchronous copies (emulator_warp.h), stores and products (emulator_hopper.h).
    std::shared_ptr<void> async, stores, products;
    void (*at_return)(Fiber&) = nullptr;
};

// Arrivals at one of a block's 16 barriers. Two objects for ThreadSanitizer, by turns: a thread
// that is already at the next barrier must not seem ordered before one that has not left this one.
struct Barrier {
    unsigned arrived = 0, expected = 0;
    uint64_t generation = 0;
    Site site;
    char order[2];
};

// A __shared__ array, known by the line that declares it.
struct SharedArray {
    const char* file;
    unsigned line;
    size_t offset, bytes;
};

constexpr size_t STATIC_SHARED_BYTES = size_t(48) << 10; // CUDA's limit for declared arrays
constexpr size_t ARENA_BYTES = size_t(384) << 10;        // room for the gaps between arrays

// The GPU that launchers meet: the one with the least shared memory, so that what runs here runs on
// all. Tests of Hopper's kernels set theirs.
struct Gpu {
    int major, minor;
    size_t block_shared_bytes; // declared and dynamic
    int processors = 1;        // blocks that stay have more than one tile each
};
constexpr Gpu AMPERE = {8, 6, size_t(99) << 10}, HOPPER = {9, 0, size_t(227) << 10};
inline Gpu gpu = AMPERE;

struct Block {
    uint3 index = {0, 0, 0};
    std::vector<Fiber> fibers;
    unsigned returned = 0;
    Barrier barriers[16];
    char warp_order[32][2]; // for ThreadSanitizer, as in Barrier
    uint64_t warp_generation[32] = {};

    // Shared memory, 1024-byte aligned.
    unsigned char* arena = nullptr;
    void* arena_start = nullptr;
    size_t arena_used = 0, static_bytes = 0, dynamic_bytes = 0;
    std::vector<SharedArray> arrays;

    // Hopper's (emulator_hopper.h).
    std::map<const void*, std::shared_ptr<void>> objects; // mbarriers, by address
    std::vector<unsigned char> async_view;                // shared memory, as that proxy sees it
    std::vector<uint64_t> wgmma_log[8];                   // of each warpgroup
    bool registers_set = false;
    int free_registers = 0;
    unsigned registers[32] = {}; // of each warp's threads
    void (*at_end)(Block&) = nullptr;
};

// One OS thread's GPU: the launch that runs, and the stack that its fibers return to.
struct Machine {
    dim3 grid, block;
    void (*body)(void*) = nullptr;
    void* body_arg = nullptr;
    Fiber* running = nullptr;

    // The OS thread's own stack, where the scheduler runs.
    void* main_sp = nullptr;
    void* main_tsan = nullptr;
    void* main_fake_stack = nullptr;
    const void* main_stack = nullptr;
    size_t main_stack_bytes = 0;

    std::vector<std::vector<Worker>> workers; // one set for each block that is resident
    uint64_t random = 1;
    std::vector<std::function<void()>> late; // writes that nothing waits for but the launch's end
    char launched, done;                     // objects for ThreadSanitizer
};
inline thread_local Machine machine;

// Inside, ThreadSanitizer looks away: the emulator's own state is no part of the kernel.
struct Unseen {
    Unseen() { EMULATOR_TSAN(AnnotateIgnoreReadsBegin("", 0); AnnotateIgnoreWritesBegin("", 0);) }
    ~Unseen() { EMULATOR_TSAN(AnnotateIgnoreWritesEnd("", 0); AnnotateIgnoreReadsEnd("", 0);) }
};

EMULATOR_UNSEEN inline Fiber& self() { return *machine.running; }
EMULATOR_UNSEEN inline uint3 thread_index() { return machine.running->thread; }
EMULATOR_UNSEEN inline uint3 block_index() { return machine.running->block->index; }
EMULATOR_UNSEEN inline unsigned thread_number() { return machine.running->index; }
EMULATOR_UNSEEN inline dim3 block_size() { return machine.block; }
EMULATOR_UNSEEN inline dim3 grid_size() { return machine.grid; }

// A line of the kernel's source: "layernorm.cuh:218".
inline std::string where(const Site& s) {
    const char* name = strrchr(s.file_name(), '/');
    return std::string(name ? name + 1 : s.file_name()) + ":" + std::to_string(s.line());
}

// Note what is wrong: the line, the block and the thread, and a text as printf has it.
inline void error(const Site& site, const char* format, ...) {
    Unseen unseen;
    char text[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof(text), format, list);
    va_end(list);

    // Say which thread ran, if a kernel runs.
    std::string line = where(site) + ": ";
    if (machine.running) {
        const Fiber& f = *machine.running;
        char place[128];
        snprintf(place, sizeof(place), "block (%u,%u,%u) thread %u: ", f.block->index.x,
                 f.block->index.y, f.block->index.z, f.index);
        line += place;
    }

    std::lock_guard<std::mutex> lock(messages_lock);
    if (messages.size() < 20) messages.push_back(line + text);
}

// Save the registers that a call must keep and this stack's pointer; load those of another stack.
#if defined(__x86_64__)
extern "C" void emulator_switch(void** save_sp, void* load_sp);
asm(R"(.text
.weak emulator_switch
.type emulator_switch, @function
emulator_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
.size emulator_switch, .-emulator_switch
)");
#else
#error "the emulator's fiber switch is written for x86-64; add one for this machine here"
#endif

// Leave the running fiber for the scheduler. Sanitizers are told before and after.
EMULATOR_UNSEEN inline void to_main() {
    Fiber& f = *machine.running;
    EMULATOR_ASAN(__sanitizer_start_switch_fiber(&f.worker->fake_stack, machine.main_stack,
                                                 machine.main_stack_bytes);)
    EMULATOR_TSAN(__tsan_switch_to_fiber(machine.main_tsan, 1);)
    emulator_switch(&f.sp, machine.main_sp);
    EMULATOR_ASAN(__sanitizer_finish_switch_fiber(f.worker->fake_stack, &machine.main_stack,
                                                  &machine.main_stack_bytes);)
}

// Let a fiber run until it waits or returns.
EMULATOR_UNSEEN inline void to_fiber(Fiber& f) {
    machine.running = &f;
    EMULATOR_ASAN(__sanitizer_start_switch_fiber(&machine.main_fake_stack, f.worker->stack + PAGE,
                                                 STACK_BYTES - PAGE);)
    EMULATOR_TSAN(__tsan_switch_to_fiber(f.worker->tsan, 1);)
    emulator_switch(&machine.main_sp, f.sp);
    EMULATOR_ASAN(__sanitizer_finish_switch_fiber(machine.main_fake_stack, nullptr, nullptr);)
    machine.running = nullptr;
}

// Where each fiber begins: the kernel, once, for one thread.
EMULATOR_UNSEEN inline void fiber_entry() {
    EMULATOR_ASAN(
        __sanitizer_finish_switch_fiber(nullptr, &machine.main_stack, &machine.main_stack_bytes);)

    // Stand behind the launch and before its end, and run.
    EMULATOR_TSAN(__tsan_acquire(&machine.launched);)
    machine.body(machine.body_arg);
    if (machine.running->at_return) machine.running->at_return(*machine.running);
    EMULATOR_TSAN(__tsan_release(&machine.done);)

    machine.running->state = State::RETURNED;
    machine.running->block->returned++;
    to_main();
    abort(); // nobody resumes a thread that has returned
}

// The running fiber waits while pending() is true; others run meanwhile.
template <typename F> void wait_while(F pending, const char* what, const Site& site) {
    Unseen unseen;
    if (!pending()) return;

    // Leave word for the scheduler, and for the message of a deadlock.
    Fiber& f = self();
    f.what = what;
    f.site = site;
    f.pending = [](void* p) { return (*static_cast<F*>(p))(); };
    f.pending_arg = &pending;
    f.state = State::WAITS;
    to_main();
}

// ----------------------------------------------------------------------------
// barriers

// Count a thread in. The last one opens the barrier and begins its next generation.
inline void barrier_arrive(Barrier& b, unsigned expected, const Site& site) {
    if (b.arrived == 0) {
        b.expected = expected;
        b.site = site;
    }
    if (b.expected != expected)
        error(site, "barrier for %u threads, but %s said %u", expected, where(b.site).c_str(),
              b.expected);
    EMULATOR_TSAN(__tsan_release(&b.order[b.generation & 1]);)

    b.arrived++;
    if (b.arrived < b.expected) return;
    b.arrived = 0;
    b.generation++;
}

// Count a thread in and wait for the others.
inline void barrier_sync(Barrier& b, unsigned expected, const char* what, const Site& site) {
    Unseen unseen;
    uint64_t mine = b.generation;
    barrier_arrive(b, expected, site);
    wait_while([&b, mine] { return b.generation == mine; }, what, site);
    EMULATOR_TSAN(__tsan_acquire(&b.order[mine & 1]);)
}

// Barrier 0, of all threads of the block. From two places it is an error, though a GPU may pass it.
inline void syncthreads(const Site& site) {
    Unseen unseen;
    Block& block = *self().block;
    Barrier& b = block.barriers[0];
    bool elsewhere = b.site.line() != site.line() || b.site.file_name() != site.file_name();
    if (b.arrived > 0 && elsewhere)
        error(site, "a divergent barrier: other threads of the block wait at %s",
              where(b.site).c_str());
    if (block.returned)
        error(site, "__syncthreads after %u threads of the block have returned", block.returned);
    barrier_sync(b, unsigned(block.fibers.size()), "__syncthreads", site);
}

// bar.sync and bar.arrive on barriers 1 to 15, of `threads` threads
inline Barrier& named_barrier(int id, int threads, const Site& site) {
    Block& block = *self().block;
    if (id < 1 || id > 15 || threads % 32 || threads > int(block.fibers.size()))
        error(site, "named barrier %d of %d threads: ids are 1 to 15, threads a multiple of 32", id,
              threads);
    return block.barriers[id & 15];
}

// ----------------------------------------------------------------------------
// warp operations: each lane brings `in` and gets f(lane, ins), once all of the mask are there

// Lets a lane read what the lanes of its mask bring, and no others.
template <typename In> struct Lanes {
    const Fiber* warp;
    unsigned mask;
    Site site;
    const In& operator[](unsigned lane) const {
        if (lane > 31 || !(mask >> lane & 1)) {
            error(site, "lane %u is read, but is not in the mask %08x", lane, mask);
            return *static_cast<const In*>(warp[__builtin_ctz(mask)].in);
        }
        return *static_cast<const In*>(warp[lane].in);
    }
};

// The lanes of a mask that stand in the same operation: `there`, once none is missing.
struct Meeting {
    bool complete = true;
    unsigned there = 0;
};
inline Meeting lanes_that_meet(const Fiber* warp, unsigned present, unsigned mask,
                               const char* what, const Site& site) {
    Meeting m;
    for (unsigned l = 0; l < 32; l++) {
        if (!(mask >> l & 1)) continue;
        const Fiber& other = warp[l];

        // A lane that is gone will never come: go on without it.
        if (l >= present || other.state == State::RETURNED) {
            error(site, "%s: lane %u is in the mask %08x but has returned", what, l, mask);
            continue;
        }
        if (!other.in_operation) {
            m.complete = false;
            continue;
        }

        // A lane in another operation, or with another mask, is a mistake of the kernel.
        bool same = other.mask == mask && !strcmp(other.what, what);
        if (!same || other.site.line() != site.line()) {
            error(site, "%s: lane %u is in %s at %s with mask %08x", what, l, other.what,
                  where(other.site).c_str(), other.mask);
            m.complete = false;
            continue;
        }
        m.there |= 1u << l;
    }
    return m;
}

template <typename In, typename F>
auto warp_operation(unsigned mask, const char* what, const In& in, F f, const Site& site) {
    typedef decltype(f(0u, std::declval<Lanes<In>>())) Out;
    Unseen unseen;
    Fiber& me = self();
    Block& block = *me.block;
    unsigned lane = me.index % 32;
    unsigned first = me.index - lane;
    Fiber* warp = &block.fibers[first];
    unsigned present = std::min<unsigned>(32, unsigned(block.fibers.size()) - first);
    Out out{};
    if (!(mask >> lane & 1)) {
        error(site, "lane %u calls %s with mask %08x, which it is not in", lane, what, mask);
        return out;
    }

    // Bring what this lane has, and say where its result goes.
    me.mask = mask;
    me.in = &in;
    me.out = &out;
    me.in_operation = true;
    me.what = what;
    me.site = site;

    // The last lane to come computes for all, and lets them go.
    Meeting m = lanes_that_meet(warp, present, mask, what, site);
    if (m.complete) {
        Lanes<In> lanes = {warp, m.there, site};
        for (unsigned l = 0; l < 32; l++)
            if (m.there >> l & 1) *static_cast<Out*>(warp[l].out) = f(l, lanes);
        for (unsigned l = 0; l < 32; l++)
            if (m.there >> l & 1) warp[l].in_operation = false;
    }
    wait_while([&me] { return me.in_operation; }, what, site);
    return out;
}

// A warp operation that brings nothing; it orders memory, which the others do not.
inline void syncwarp(unsigned mask, const Site& site) {
    Block& block = *self().block;
    unsigned warp = self().index / 32;
    uint64_t generation;
    {
        Unseen unseen;
        generation = block.warp_generation[warp];
    }
    (void)generation;

    // Release, meet, acquire: the first lane of the mask turns the generation.
    EMULATOR_TSAN(__tsan_release(&block.warp_order[warp][generation & 1]);)
    warp_operation(
        mask, "__syncwarp", 0,
        [&](unsigned lane, const Lanes<int>&) {
            if (lane == unsigned(__builtin_ctz(mask))) block.warp_generation[warp]++;
            return 0;
        },
        site);
    EMULATOR_TSAN(__tsan_acquire(&block.warp_order[warp][generation & 1]);)
}

// ----------------------------------------------------------------------------
// shared memory: one arena a block, NaN when it starts; gaps between arrays for AddressSanitizer

// Take room in the arena, with a gap of 128 bytes behind it.
inline void* take_shared(Block& b, size_t bytes, size_t align) {
    size_t at = (b.arena_used + align - 1) / align * align;
    if (at + bytes + 128 > ARENA_BYTES) {
        error(Site::current(), "%zu bytes of shared memory are more than a block has", bytes);
        at = 0;
    }
    b.arena_used = at + bytes + 128;
    EMULATOR_ASAN(__asan_unpoison_memory_region(b.arena + at, bytes);)
    return b.arena + at;
}

// The array that a line declares: the first thread to come there makes it, the others find it.
template <typename T> T* shared_array(size_t count, const Site& site) {
    Unseen unseen;
    Block& b = *self().block;
    for (const SharedArray& a : b.arrays)
        if (a.line == site.line() && a.file == site.file_name())
            return reinterpret_cast<T*>(b.arena + a.offset);

    // Count it against the GPU's two limits.
    size_t bytes = count * sizeof(T);
    unsigned char* p = static_cast<unsigned char*>(take_shared(b, bytes, 128));
    b.static_bytes += bytes;
    if (b.static_bytes > STATIC_SHARED_BYTES)
        error(site, "%zu bytes of declared shared memory: CUDA allows 48 KiB, the rest is dynamic",
              b.static_bytes);
    if (b.static_bytes + b.dynamic_bytes > gpu.block_shared_bytes)
        error(site, "%zu bytes of shared memory: a block has %zu",
              b.static_bytes + b.dynamic_bytes, gpu.block_shared_bytes);
    b.arrays.push_back({site.file_name(), site.line(), size_t(p - b.arena), bytes});
    return reinterpret_cast<T*>(p);
}

EMULATOR_UNSEEN inline unsigned char* dynamic_shared_memory() { return self().block->arena; }

// ----------------------------------------------------------------------------
// the scheduler

// A linear congruential generator: the same seed gives the same turns on every machine.
inline uint64_t next_random() {
    machine.random = machine.random * 6364136223846793005ull + 1442695040888963407ull;
    return machine.random >> 33;
}

// The numbers below n, in the order of the settings.
inline std::vector<unsigned> turns(size_t n) {
    std::vector<unsigned> order(n);
    for (size_t i = 0; i < n; i++)
        order[i] = unsigned(settings.order == Order::REVERSE ? n - 1 - i : i);
    if (settings.order != Order::SHUFFLED) return order;
    for (size_t i = n; i > 1; i--)
        std::swap(order[i - 1], order[next_random() % i]);
    return order;
}

// A stack of its own pages; an overflow stops at the first, which nobody may touch.
inline Worker make_worker() {
    Worker w;
    void* p = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        perror("emulator: a fiber's stack");
        exit(1);
    }
    mprotect(p, PAGE, PROT_NONE);
    w.stack = static_cast<unsigned char*>(p);
    EMULATOR_TSAN(w.tsan = __tsan_create_fiber(0);)
    return w;
}

// Lay the stack as emulator_switch() leaves one, so that the switch to it enters fiber_entry().
inline void* first_stack_pointer(const Worker& w) {
    EMULATOR_ASAN(__asan_unpoison_memory_region(w.stack + PAGE, STACK_BYTES - PAGE);)
    void** sp = reinterpret_cast<void**>(w.stack + STACK_BYTES);
    *--sp = nullptr; // the entry finds its stack aligned as after a call
    *--sp = reinterpret_cast<void*>(fiber_entry);
    for (int r = 0; r < 6; r++)
        *--sp = nullptr;
    return sp;
}

// Give a block its fibers and its shared memory. slot: the set of stacks that it takes
inline void start_block(Block& b, size_t number, size_t slot, size_t shared_bytes) {
    dim3 size = machine.block;
    unsigned n = size.x * size.y * size.z;
    if (machine.workers.size() <= slot) machine.workers.resize(slot + 1);
    std::vector<Worker>& workers = machine.workers[slot];
    while (workers.size() < n)
        workers.push_back(make_worker());

    // Thread i takes another stack in each block: ThreadSanitizer must not think it the same one.
    b.fibers.assign(n, {});
    for (unsigned i = 0; i < n; i++) {
        Fiber& f = b.fibers[i];
        f.block = &b;
        f.index = i;
        f.thread = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
        f.worker = &workers[(i + number) % n];
        f.sp = first_stack_pointer(*f.worker);
    }

    // Take fresh memory, so that ThreadSanitizer does not see two blocks share it; all NaN.
    b.arena_start = malloc(ARENA_BYTES + 1024);
    b.arena = reinterpret_cast<unsigned char*>((uintptr_t(b.arena_start) + 1023) / 1024 * 1024);
    memset(b.arena, 0xff, ARENA_BYTES);
    EMULATOR_ASAN(__asan_poison_memory_region(b.arena, ARENA_BYTES);)
    b.dynamic_bytes = shared_bytes;
    take_shared(b, shared_bytes, 1024);
}

inline void end_block(Block& b) {
    if (b.at_end) b.at_end(b);
    EMULATOR_ASAN(__asan_unpoison_memory_region(b.arena, ARENA_BYTES);)
    free(b.arena_start);
}

// Threads that can go on do so, each until it waits again; false: none could.
inline bool run_turn(Block& b) {
    bool any = false;
    for (unsigned i : turns(b.fibers.size())) {
        Fiber& f = b.fibers[i];
        if (f.state == State::WAITS && !f.pending(f.pending_arg)) f.state = State::READY;
        if (f.state != State::READY) continue;
        to_fiber(f);
        any = true;
    }
    return any;
}

// Say how many threads wait where, and how many have returned.
inline void report_deadlock(const Block& b) {
    std::map<std::string, std::vector<unsigned>> places;
    for (const Fiber& f : b.fibers) {
        std::string waits = std::string(f.what) + " at " + where(f.site);
        places[f.state == State::RETURNED ? "has returned" : waits].push_back(f.index);
    }

    std::string text;
    for (const auto& [place, threads] : places)
        text += "; " + std::to_string(threads.size()) + " threads from " +
                std::to_string(threads[0]) + " on: " + place;
    error(Site::current(), "deadlock in block (%u,%u,%u)%s", b.index.x, b.index.y, b.index.z,
          text.c_str());
}

// The blocks that are on the GPU now, each with a set of stacks.
struct Residents {
    struct Resident {
        Block* block;
        size_t slot;
    };
    std::vector<Resident> list;
    std::vector<bool> taken; // slots

    void start(size_t number, size_t shared_bytes) {
        size_t slot = size_t(std::find(taken.begin(), taken.end(), false) - taken.begin());
        taken.resize(std::max(taken.size(), slot + 1));
        taken[slot] = true;

        // A block's index, x first.
        dim3 g = machine.grid;
        Block* b = new Block;
        b->index = {unsigned(number % g.x), unsigned(number / g.x % g.y),
                    unsigned(number / (size_t(g.x) * g.y))};
        start_block(*b, number, slot, shared_bytes);
        list.push_back({b, slot});
    }
    void end(size_t r) {
        end_block(*list[r].block);
        delete list[r].block;
        taken[list[r].slot] = false;
        list.erase(list.begin() + ptrdiff_t(r));
    }

    // Let each block take a turn; false: none could go on.
    bool run() {
        bool any = false;
        for (size_t r = 0; r < list.size();) {
            Block& b = *list[r].block;
            any |= run_turn(b);
            if (b.returned < b.fibers.size()) {
                r++;
            } else {
                end(r);
                any = true;
            }
        }
        return any;
    }
};

// Blocks start in order, one at a time; when all resident blocks wait, the next is started beside
// them. In FORWARD order a block must be able to end with only earlier ones before it, as on a GPU
// that is full.
inline void run_blocks(size_t shared_bytes) {
    dim3 g = machine.grid;
    size_t count = size_t(g.x) * g.y * g.z, started = 0;
    std::vector<unsigned> order = turns(count);
    Residents residents;
    while (started < count || !residents.list.empty()) {
        if (residents.list.empty()) residents.start(order[started++], shared_bytes);
        if (residents.run()) continue;

        // All wait. Another block may be what they wait for.
        if (started < count && settings.order != Order::FORWARD) {
            residents.start(order[started++], shared_bytes);
            continue;
        }
        while (!residents.list.empty()) {
            report_deadlock(*residents.list[0].block);
            residents.end(0);
        }
        return;
    }
}

// ----------------------------------------------------------------------------
// streams: what the host has given them, and graphs of it

// Copies from the host that a stream was given. They happen as late as they may: before the
// stream's next work, or when somebody waits. A host that has changed or freed what they read
// learns of it.
inline thread_local std::vector<std::function<void()>> given;
inline void catch_up() {
    for (auto& copy : given) copy();
    given.clear();
}

// A stream's work: a launch, a product, a copy; with its arguments' bytes, padding zeroed.
struct Given {
    const void* what = nullptr;
    std::string arguments = {};
    std::function<void()> work = {};
    bool operator==(const Given& other) const {
        return what == other.what && arguments == other.arguments;
    }
};
// While a stream is captured its work goes into a graph, and nothing happens. `notes` only listens.
struct Graph {
    std::vector<Given> given;
    std::vector<void*> kept;           // memory of cudaMallocAsync
    std::map<cudaStream_t, size_t> of; // work of each stream that is captured,
    std::map<cudaStream_t, size_t> joined; // and how much of it the first stream has waited for
    cudaStream_t first = nullptr;
};
inline thread_local Graph* capture = nullptr;
inline thread_local std::vector<Given>* notes = nullptr;

// The bytes of a launch's arguments, one behind the other.
template <typename... A> std::string bytes_of(A... arguments) {
    std::string bytes;
    [[maybe_unused]] auto add = [&](auto x) {
        if constexpr (!std::is_scalar_v<decltype(x)>) __builtin_clear_padding(&x);
        bytes.append(reinterpret_cast<const char*>(&x), sizeof(x));
    };
    (add(arguments), ...);
    return bytes;
}
// Do the work, or keep it for the graph. A captured stream's work alone can be a graph's.
template <typename W, typename... A>
void give(const void* what, cudaStream_t stream, W work, const A&... arguments) {
    if (!capture && !notes) return work();
    Given given = {what, bytes_of(arguments...), work};
    if (notes) notes->push_back({what, given.arguments});
    if (!capture) return work();

    // Keep it for the graph.
    auto at = capture->of.find(stream);
    if (at == capture->of.end())
        return error(Site::current(), "work for a stream that is not captured, beside one that is");
    at->second++;
    capture->given.push_back(std::move(given));
}
// A call that CUDA does not allow while this thread captures a stream; true: it was one.
inline bool not_captured(const char* call) {
    if (capture) error(Site::current(), "%s while a stream is captured", call);
    return capture;
}

// CUDA's limits on a launch, and this GPU's.
inline bool launch_fits(dim3 grid, dim3 block, size_t shared_bytes) {
    size_t threads = size_t(block.x) * block.y * block.z;
    bool block_fits = threads > 0 && threads <= 1024 && block.z <= 64;
    bool some = grid.x > 0 && grid.y > 0 && grid.z > 0;
    bool grid_fits = grid.x <= 0x7fffffff && grid.y <= 65535 && grid.z <= 65535;
    return block_fits && some && grid_fits && shared_bytes <= gpu.block_shared_bytes;
}

// Run a kernel, all of it: it is over on return.
template <typename F>
void run_grid(dim3 grid, dim3 block, size_t shared_bytes, F kernel) {
    catch_up();
    Unseen unseen;
    if (!launch_fits(grid, block, shared_bytes)) {
        error(Site::current(),
              "invalid launch: grid (%u,%u,%u), block (%u,%u,%u), %zu bytes of shared memory",
              grid.x, grid.y, grid.z, block.x, block.y, block.z, shared_bytes);
        return;
    }

    // Set the machine, and run between the launch and its end as ThreadSanitizer sees them.
    machine.grid = grid;
    machine.block = block;
    machine.random = settings.seed;
    machine.body = [](void* p) { (*static_cast<F*>(p))(); };
    machine.body_arg = &kernel;
    EMULATOR_TSAN(machine.main_tsan = __tsan_get_current_fiber();
                  __tsan_release(&machine.launched);)
    run_blocks(shared_bytes);
    EMULATOR_TSAN(__tsan_acquire(&machine.done);)

    // Do what nothing has waited for.
    for (; !machine.late.empty(); machine.late.pop_back())
        machine.late.back()();
}

} // namespace emulator

// ----------------------------------------------------------------------------
// CUDA's own names

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__
#define threadIdx (emulator::thread_index())
#define blockIdx (emulator::block_index())
#define blockDim (emulator::block_size())
#define gridDim (emulator::grid_size())

using std::max;
using std::min;

inline void __syncthreads(emulator::Site site = emulator::Site::current()) {
    emulator::syncthreads(site);
}
inline void __syncwarp(unsigned mask = 0xffffffffu,
                       emulator::Site site = emulator::Site::current()) {
    emulator::syncwarp(mask, site);
}

// ----------------------------------------------------------------------------
// shuffles and votes

namespace emulator {
// A lane's part of a shuffle.
struct Exchange {
    uint64_t value;
    unsigned from; // lane to read from; 32: my own
};
template <typename T> T shuffle(unsigned mask, const char* what, T x, unsigned from, Site site) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "shuffles move 4 or 8 bytes");
    Exchange in = {0, from};
    memcpy(&in.value, &x, sizeof(T));
    uint64_t got = warp_operation(
        mask, what, in,
        [](unsigned lane, const Lanes<Exchange>& all) {
            unsigned from = all[lane].from;
            return all[from == 32 ? lane : from].value;
        },
        site);
    T y;
    memcpy(&y, &got, sizeof(T));
    return y;
}
inline unsigned lane_here() { return thread_number() % 32; }
} // namespace emulator

template <typename T>
T __shfl_sync(unsigned mask, T x, int from, int width = 32,
              emulator::Site site = emulator::Site::current()) {
    unsigned lane = emulator::lane_here(), first = lane / unsigned(width) * unsigned(width);
    return emulator::shuffle(mask, "__shfl_sync", x, first + unsigned(from) % unsigned(width),
                             site);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T x, int lane_mask, int width = 32,
                  emulator::Site site = emulator::Site::current()) {
    unsigned lane = emulator::lane_here(), from = lane ^ unsigned(lane_mask);
    bool own = from / unsigned(width) > lane / unsigned(width);
    return emulator::shuffle(mask, "__shfl_xor_sync", x, own ? 32 : from, site);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T x, unsigned delta, int width = 32,
                 emulator::Site site = emulator::Site::current()) {
    unsigned lane = emulator::lane_here();
    bool own = lane % unsigned(width) < delta;
    return emulator::shuffle(mask, "__shfl_up_sync", x, own ? 32 : lane - delta, site);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T x, unsigned delta, int width = 32,
                   emulator::Site site = emulator::Site::current()) {
    unsigned lane = emulator::lane_here();
    bool own = lane % unsigned(width) + delta >= unsigned(width);
    return emulator::shuffle(mask, "__shfl_down_sync", x, own ? 32 : lane + delta, site);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              emulator::Site site = emulator::Site::current()) {
    return emulator::warp_operation(
        mask, "a vote", predicate != 0,
        [](unsigned, const emulator::Lanes<bool>& all) {
            unsigned votes = 0;
            for (unsigned l = 0; l < 32; l++)
                if (all.mask >> l & 1 && all[l]) votes |= 1u << l;
            return votes;
        },
        site);
}
inline int __any_sync(unsigned mask, int predicate,
                      emulator::Site site = emulator::Site::current()) {
    return __ballot_sync(mask, predicate, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate,
                      emulator::Site site = emulator::Site::current()) {
    return __ballot_sync(mask, !predicate, site) == 0;
}

// ----------------------------------------------------------------------------
// atomics, and CUDA's functions of numbers

// Atomics are relaxed, as on the GPU; a fence before and after orders what they guard.
template <typename T> T atomicAdd(T* p, T x) {
    if constexpr (std::is_floating_point_v<T>) {
        std::atomic_ref<T> a(*p);
        return a.fetch_add(x, std::memory_order_relaxed);
    } else {
        return __atomic_fetch_add(p, x, __ATOMIC_RELAXED);
    }
}
template <typename T> T atomicMax(T* p, T x) {
    T old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (old < x &&
           !__atomic_compare_exchange_n(p, &old, x, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return old;
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
template <typename T> T __ldg(const T* p) { return *p; }
template <typename T> T __ldcs(const T* p) { return *p; }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }

#include "emulator_runtime.h"
