// emulator.h - CUDA kernels on the CPU: the threads of a block are fibers of one OS thread
//   g++ compiles the kernels' own source with -DEMULATE; ops/memory.h then includes this file in
//   place of the CUDA headers. It finds these faults, each shown by a bug in test_emulator.cpp:
//     a race or a missing barrier   results differ between thread orders (forward, reverse,
//                                   shuffled, one warp behind all others); with -fsanitize=thread
//                                   the kernel's line
//     a divergent barrier           __syncthreads from two places; a deadlock: who waits where
//     an early return               before a barrier, or in a shuffle's mask
//     a wrong shuffle               lanes outside the mask, or read from outside it
//     out of bounds                 with -fsanitize=address, shared arrays included
//     memory nobody wrote           shared memory is NaN when a block starts
//     a missing wait of a stream    results differ between two orders of streams, or are NaN
//                                   (emulator_streams.h)
//   A fiber runs until it waits: at a barrier for the block, at a shuffle for the lanes in its
//   mask. All state of a launch is per OS thread, so rank threads may launch at the same time.
//   ThreadSanitizer sees each fiber as a thread. Only barriers and atomics order fibers: shuffles
//   exchange registers and order no memory.
//   It cannot show weak memory order, bank conflicts, register pressure or time.
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
void __tsan_destroy_fiber(void* fiber);
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
// A function that ThreadSanitizer does not look into.
#define EMULATOR_UNSEEN __attribute__((no_sanitize("thread"), noinline))

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
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
    // The order in which a block's threads, and a grid's blocks, take turns.
    Order order = Order::FORWARD;
    uint64_t seed = 1; // for SHUFFLED
    // Asynchronous copies and products happen as late as they may, where the program waits for
    // them. Otherwise they happen as soon as they are issued.
    bool latest = false;
    // A warp of each block that runs only while all other warps wait; -1: none. Code that relies on
    // a fast warp, instead of waiting for it, then gives wrong results.
    int last_warp = -1;
};
inline thread_local Settings settings;

// How often this OS thread has launched each kernel, by the kernel's address. Matrix products and
// memory sets count as well. A graph's launch counts once, however many kernels it holds.
inline thread_local std::map<const void*, size_t> launches;
template <typename F> void note_launch(F* kernel) {
    launches[reinterpret_cast<const void*>(kernel)]++;
}

// The mistakes found since the last take_messages(). The first twenty are kept.
inline std::mutex messages_lock;
inline std::vector<std::string> messages;

inline std::vector<std::string> take_messages() {
    std::lock_guard<std::mutex> lock(messages_lock);
    return std::move(messages);
}

// ----------------------------------------------------------------------------
// fibers

constexpr size_t STACK_BYTES = size_t(256) << 10, PAGE = 4096;

// A fiber's stack, with what the sanitizers store for it. It is made once and serves many blocks.
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
    unsigned index = 0; // the thread's number in its block

    // A waiting fiber: what it waits for, the line where it waits, and pending(), which is true as
    // long as it must go on waiting. The first two are for the message of a deadlock.
    const char* what = "";
    Site site;
    bool (*pending)(void*) = nullptr;
    void* pending_arg = nullptr;

    // A lane in a warp operation: the lanes that take part, the value that this lane brings, and
    // where its result is to be written.
    unsigned mask = 0;
    const void* in = nullptr;
    void* out = nullptr;
    bool in_operation = false;

    // The thread's own asynchronous work: copies (emulator_warp.h), bulk stores and products
    // (both in emulator_hopper.h).
    std::shared_ptr<void> async, stores, products;
    void (*at_return)(Fiber&) = nullptr;
};

// One of a block's 16 barriers. ThreadSanitizer sees a barrier as an object that threads release
// and acquire. Generations use two such objects in turn: a thread that has already reached the next
// generation must not look ordered before one that has yet to leave this generation.
struct Barrier {
    unsigned arrived = 0, expected = 0;
    uint64_t generation = 0;
    Site site;
    char order[2];
};

// A __shared__ array. The source line that declares it is its key.
struct SharedArray {
    const char* file;
    unsigned line;
    size_t offset, bytes;
};

constexpr size_t STATIC_SHARED_BYTES = size_t(48) << 10; // CUDA's limit for declared arrays
constexpr size_t ARENA_BYTES = size_t(384) << 10;        // beyond any limit: room for gaps

// The GPU that launchers ask about. By default it is the one with the least shared memory, so that
// a launch which fits here fits every GPU. Tests of Hopper's kernels choose HOPPER instead.
struct Gpu {
    int major, minor;
    size_t block_shared_bytes; // limit of a block, declared and dynamic arrays together
    int processors = 1;        // few, so that a persistent kernel's block gets several tiles
};
constexpr Gpu AMPERE = {8, 6, size_t(99) << 10}, HOPPER = {9, 0, size_t(227) << 10};
inline Gpu gpu = AMPERE;

struct Block {
    uint3 index = {0, 0, 0};
    std::vector<Fiber> fibers;
    unsigned returned = 0;
    Barrier barriers[16];
    char warp_order[32][2]; // a warp's objects for ThreadSanitizer, as in Barrier
    uint64_t warp_generation[32] = {};

    // Shared memory starts at `arena`, which is 1024-byte aligned.
    unsigned char* arena = nullptr;
    void* arena_start = nullptr;
    size_t arena_used = 0, static_bytes = 0, dynamic_bytes = 0;
    std::vector<SharedArray> arrays;

    // State of Hopper's models (emulator_hopper.h).
    std::map<const void*, std::shared_ptr<void>> objects; // mbarriers, by address
    std::vector<unsigned char> async_view; // shared memory as the asynchronous proxy sees it
    std::vector<uint64_t> wgmma_log[8];    // each warpgroup's products, in order of issue
    bool registers_set = false;
    int free_registers = 0;      // given back with setmaxnreg.dec, for others to take
    unsigned registers[32] = {}; // a thread's registers, for each warp
    void (*at_end)(Block&) = nullptr;
};

// One OS thread's GPU: the launch that is running, and the stack to which its fibers return.
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

    uint64_t random = 1;
    char launched = 0, done = 0; // ThreadSanitizer's objects for the launch's start and its end
};
inline constinit thread_local Machine machine; // constinit: no read asks whether it is made

// An OS thread's stacks, and the writes that only the end of its launch waits for. A thread that
// ends gives its stacks back: a process may map only so many.
struct Owned {
    std::vector<std::vector<Worker>> workers; // a set for each resident block
    std::vector<std::function<void()>> late;
    ~Owned() {
        for (std::vector<Worker>& set : workers)
            for (Worker& w : set) {
                munmap(w.stack, STACK_BYTES);
                EMULATOR_TSAN(__tsan_destroy_fiber(w.tsan);)
            }
    }
};
inline thread_local Owned owned;

// While an Unseen is alive ThreadSanitizer ignores this thread's reads and writes: the emulator's
// own state is not part of the kernel under test.
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

// The name of a line in the kernel's source, such as "layernorm.cuh:218".
inline std::string where(const Site& s) {
    const char* name = strrchr(s.file_name(), '/');
    return std::string(name ? name + 1 : s.file_name()) + ":" + std::to_string(s.line());
}

// Record a mistake: the line, the block and thread that ran it, and a text formatted as by printf.
inline void error(const Site& site, const char* format, ...) {
    Unseen unseen;
    char text[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof(text), format, list);
    va_end(list);

    // Name the thread, if a kernel is running.
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

// Switch stacks: push the callee-saved registers, store this stack's pointer in *save_sp, load the
// other stack's pointer and pop its registers. `ret` then continues where that stack left off.
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

// Leave the running fiber and continue in the scheduler. The sanitizers are told before and after,
// because otherwise they would take the new stack for a fault.
EMULATOR_UNSEEN inline void to_main() {
    Fiber& f = *machine.running;
    EMULATOR_ASAN(__sanitizer_start_switch_fiber(&f.worker->fake_stack, machine.main_stack,
                                                 machine.main_stack_bytes);)
    EMULATOR_TSAN(__tsan_switch_to_fiber(machine.main_tsan, 1);)
    emulator_switch(&f.sp, machine.main_sp);
    EMULATOR_ASAN(__sanitizer_finish_switch_fiber(f.worker->fake_stack, &machine.main_stack,
                                                  &machine.main_stack_bytes);)
}

// Run a fiber until it waits or returns.
EMULATOR_UNSEEN inline void to_fiber(Fiber& f) {
    machine.running = &f;
    EMULATOR_ASAN(__sanitizer_start_switch_fiber(&machine.main_fake_stack, f.worker->stack + PAGE,
                                                 STACK_BYTES - PAGE);)
    EMULATOR_TSAN(__tsan_switch_to_fiber(f.worker->tsan, 1);)
    emulator_switch(&machine.main_sp, f.sp);
    EMULATOR_ASAN(__sanitizer_finish_switch_fiber(machine.main_fake_stack, nullptr, nullptr);)
    machine.running = nullptr;
}

// The function in which every fiber begins: it runs the kernel once, as one thread.
EMULATOR_UNSEEN inline void fiber_entry() {
    EMULATOR_ASAN(
        __sanitizer_finish_switch_fiber(nullptr, &machine.main_stack, &machine.main_stack_bytes);)

    // Run the kernel, ordered after the launch and before its end for ThreadSanitizer.
    EMULATOR_TSAN(__tsan_acquire(&machine.launched);)
    machine.body(machine.body_arg);
    if (machine.running->at_return) machine.running->at_return(*machine.running);
    EMULATOR_TSAN(__tsan_release(&machine.done);)

    machine.running->state = State::RETURNED;
    machine.running->block->returned++;
    to_main();
    abort(); // nobody resumes a thread that has returned
}

// Suspend the running fiber while pending() is true. Other fibers run meanwhile.
template <typename F> void wait_while(F pending, const char* what, const Site& site) {
    Unseen unseen;
    if (!pending()) return;

    // Tell the scheduler what to test, and a deadlock's message what to name.
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

// Count one arrival. The last arrival opens the barrier and starts its next generation.
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

// Count one arrival, then wait until all `expected` threads have arrived.
inline void barrier_sync(Barrier& b, unsigned expected, const char* what, const Site& site) {
    Unseen unseen;
    uint64_t mine = b.generation;
    barrier_arrive(b, expected, site);
    wait_while([&b, mine] { return b.generation == mine; }, what, site);
    EMULATOR_TSAN(__tsan_acquire(&b.order[mine & 1]);)
}

// __syncthreads: barrier 0, with all threads of the block. Threads that wait at two different lines
// are reported as an error here, although a GPU may let them pass.
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

// The barrier of bar.sync and bar.arrive: ids 1 to 15, a multiple of 32 threads.
inline Barrier& named_barrier(int id, int threads, const Site& site) {
    Block& block = *self().block;
    if (id < 1 || id > 15 || threads % 32 || threads > int(block.fibers.size()))
        error(site, "named barrier %d of %d threads: ids are 1 to 15, threads a multiple of 32", id,
              threads);
    return block.barriers[id & 15];
}

// ----------------------------------------------------------------------------
// warp operations: each lane brings `in` and gets f(lane, ins), once the whole mask is there

// The values that the lanes brought, indexed by lane. Reading a lane outside the mask is reported.
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

// The lanes of a mask that have reached the same operation. `there` is their set; it can be used
// when `complete` says that none is missing.
struct Meeting {
    bool complete = true;
    unsigned there = 0;
};
inline Meeting lanes_that_meet(const Fiber* warp, unsigned present, unsigned mask,
                               const char* what, const Site& site) {
    Meeting m;
    for (unsigned l = 32; l-- > 0;) { // the last lane is the last to arrive, in FORWARD order
        if (!(mask >> l & 1)) continue;
        const Fiber& other = warp[l];

        // A lane that has returned will never come. Report it and go on without it.
        if (l >= present || other.state == State::RETURNED) {
            error(site, "%s: lane %u is in the mask %08x but has returned", what, l, mask);
            continue;
        }
        if (!other.in_operation) {
            m.complete = false;
            break; // whoever arrives last looks at all
        }

        // A lane in another operation, or with another mask, is a mistake in the kernel.
        bool same = other.mask == mask && (other.what == what || !strcmp(other.what, what));
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

// One lane's call of a warp operation: it waits for the other lanes of `mask` and returns f(lane,
// ins). `what` names the operation in messages.
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

    // Publish what this lane brings, and where its result goes.
    me.mask = mask;
    me.in = &in;
    me.out = &out;
    me.in_operation = true;
    me.what = what;
    me.site = site;

    // The last lane to arrive computes every lane's result and lets them all go on.
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

// __syncwarp: a warp operation without data. It orders memory; the other warp operations do not.
inline void syncwarp(unsigned mask, const Site& site) {
    Block& block = *self().block;
    unsigned warp = self().index / 32;
    uint64_t generation;
    {
        Unseen unseen;
        generation = block.warp_generation[warp];
    }
    (void)generation;

    // Release, meet, acquire. The first lane of the mask advances the warp's generation.
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
// shared memory: one arena a block, with gaps between arrays for AddressSanitizer

// Reserve `bytes` in the arena, all NaN, followed by a gap of 128 bytes.
inline void* take_shared(Block& b, size_t bytes, size_t align) {
    size_t at = (b.arena_used + align - 1) / align * align;
    if (at + bytes + 128 > ARENA_BYTES) {
        error(Site::current(), "%zu bytes of shared memory are more than a block has", bytes);
        at = 0, bytes = ARENA_BYTES - 128;
    }
    EMULATOR_ASAN(__asan_unpoison_memory_region(b.arena + at, bytes);)
    memset(b.arena + at, 0xff, bytes); // NaN in every floating-point type
    b.arena_used = at + bytes + 128;
    return b.arena + at;
}

// The array that a line declares. The first thread to reach the line creates it; the
// others find it.
template <typename T> T* shared_array(size_t count, const Site& site) {
    Unseen unseen;
    Block& b = *self().block;
    for (const SharedArray& a : b.arrays)
        if (a.line == site.line() && a.file == site.file_name())
            return reinterpret_cast<T*>(b.arena + a.offset);

    // Create it, and check the GPU's two limits: 48 KiB declared, and a block's total.
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

EMULATOR_UNSEEN inline unsigned char* dynamic_shared() { return self().block->arena; }

// ----------------------------------------------------------------------------
// the scheduler

// The next number of a linear congruential generator: a seed gives the same turns on every machine.
inline uint64_t next_random() {
    machine.random = machine.random * 6364136223846793005ull + 1442695040888963407ull;
    return machine.random >> 33;
}

// The numbers 0 to n-1 in the order that the settings ask for.
inline std::vector<unsigned> turns(size_t n) {
    std::vector<unsigned> order(n);
    for (size_t i = 0; i < n; i++)
        order[i] = unsigned(settings.order == Order::REVERSE ? n - 1 - i : i);
    if (settings.order != Order::SHUFFLED) return order;
    // Shuffle by Fisher and Yates's method.
    for (size_t i = n; i > 1; i--)
        std::swap(order[i - 1], order[next_random() % i]);
    return order;
}

// A new stack of whole pages. Its first page is protected, so that an overflow faults at once.
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

// Fill a stack as emulator_switch() leaves one, so that the first switch to it enters
// fiber_entry(). Returns its stack pointer.
inline void* first_stack_pointer(const Worker& w) {
    EMULATOR_ASAN(__asan_unpoison_memory_region(w.stack + PAGE, STACK_BYTES - PAGE);)
    void** sp = reinterpret_cast<void**>(w.stack + STACK_BYTES);
    *--sp = nullptr; // fiber_entry finds its stack aligned as after a call
    *--sp = reinterpret_cast<void*>(fiber_entry);
    for (int r = 0; r < 6; r++)
        *--sp = nullptr;
    return sp;
}

// Give a block its fibers and its shared memory. `slot` names the set of stacks that it uses.
inline void start_block(Block& b, size_t number, size_t slot, size_t shared_bytes) {
    // Make the stacks that this slot still lacks.
    dim3 size = machine.block;
    unsigned n = size.x * size.y * size.z;
    if (owned.workers.size() <= slot) owned.workers.resize(slot + 1);
    std::vector<Worker>& workers = owned.workers[slot];
    while (workers.size() < n)
        workers.push_back(make_worker());

    // Thread i gets a different stack in each block: on the same stack ThreadSanitizer would take
    // thread i of two blocks for one thread.
    b.fibers.assign(n, {});
    for (unsigned i = 0; i < n; i++) {
        Fiber& f = b.fibers[i];
        f.block = &b;
        f.index = i;
        f.thread = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
        f.worker = &workers[(i + number) % n];
        f.sp = first_stack_pointer(*f.worker);
    }

    // Fresh memory for each block: else ThreadSanitizer would see two blocks share it.
    b.arena_start = malloc(ARENA_BYTES + 1024);
    b.arena = reinterpret_cast<unsigned char*>((uintptr_t(b.arena_start) + 1023) / 1024 * 1024);
    EMULATOR_ASAN(__asan_poison_memory_region(b.arena, ARENA_BYTES);)
    b.dynamic_bytes = shared_bytes;
    take_shared(b, shared_bytes, 1024);
}

inline void end_block(Block& b) {
    if (b.at_end) b.at_end(b);
    EMULATOR_ASAN(__asan_unpoison_memory_region(b.arena, ARENA_BYTES);)
    free(b.arena_start);
}

// Run each fiber that can go on until it waits again. Returns false if none could.
inline bool run_turn(Block& b) {
    bool any = false;
    size_t warps = (b.fibers.size() + 31) / 32;
    auto run = [&](bool last) { // settings.last_warp, or all other warps
        for (unsigned i : turns(b.fibers.size())) {
            bool is_last = settings.last_warp >= 0 && i / 32 == size_t(settings.last_warp) % warps;
            if (is_last != last) continue;

            // A wait whose condition has come true is over.
            Fiber& f = b.fibers[i];
            if (f.state == State::WAITS && !f.pending(f.pending_arg)) f.state = State::READY;
            if (f.state != State::READY) continue;
            to_fiber(f);
            any = true;
        }
    };
    run(false);
    if (!any) run(true);
    return any;
}

// Report how many threads wait at which line, and how many have returned.
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

// The blocks that are on the GPU now, each with its own set of stacks.
struct Residents {
    struct Resident {
        Block* block;
        size_t slot;
    };
    std::vector<Resident> list;
    std::vector<bool> taken; // by slot

    // Take the first free set of stacks.
    void start(size_t number, size_t shared_bytes) {
        size_t slot = size_t(std::find(taken.begin(), taken.end(), false) - taken.begin());
        taken.resize(std::max(taken.size(), slot + 1));
        taken[slot] = true;

        // Turn the block's number into its index, x fastest.
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

    // Give each block a turn, and end those whose threads have all returned. Returns false if
    // no block could go on.
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

// Run all blocks of the grid. Blocks start in order, one at a time; when every resident block
// waits, the next block starts beside them. FORWARD order is the exception: there a block must be
// able to finish with only earlier blocks before it, as on a GPU that has no room for more. If no
// block can go on, report the deadlock of each resident block.
inline void run_blocks(size_t shared_bytes) {
    dim3 g = machine.grid;
    size_t count = size_t(g.x) * g.y * g.z, started = 0;
    std::vector<unsigned> order = turns(count);
    Residents residents;
    while (started < count || !residents.list.empty()) {
        if (residents.list.empty()) residents.start(order[started++], shared_bytes);
        if (residents.run()) continue;

        // Every block waits, perhaps for one that has not started: start another.
        if (started < count && settings.order != Order::FORWARD) {
            residents.start(order[started++], shared_bytes);
            continue;
        }

        // No block is left to start: this is a deadlock.
        while (!residents.list.empty()) {
            report_deadlock(*residents.list[0].block);
            residents.end(0);
        }
        return;
    }
}

// ----------------------------------------------------------------------------
// launches

// Whether a launch is within CUDA's limits and this GPU's shared memory; if not, reports it.
inline bool check_launch(dim3 grid, dim3 block, size_t shared_bytes) {
    size_t threads = size_t(block.x) * block.y * block.z;
    bool block_fits = threads > 0 && threads <= 1024 && block.z <= 64;
    bool some = grid.x > 0 && grid.y > 0 && grid.z > 0;
    bool grid_fits = grid.x <= 0x7fffffff && grid.y <= 65535 && grid.z <= 65535;
    if (block_fits && some && grid_fits && shared_bytes <= gpu.block_shared_bytes) return true;
    error(Site::current(),
          "invalid launch: grid (%u,%u,%u), block (%u,%u,%u), %zu bytes of shared memory", grid.x,
          grid.y, grid.z, block.x, block.y, block.z, shared_bytes);
    return false;
}

// Run a whole kernel. It has finished when this function returns.
template <typename F>
void run_grid(dim3 grid, dim3 block, size_t shared_bytes, F kernel) {
    Unseen unseen;

    // Describe the launch to the machine and run it. ThreadSanitizer sees every fiber between
    // the launch and its end.
    machine.grid = grid;
    machine.block = block;
    machine.random = settings.seed;
    machine.body = [](void* p) { (*static_cast<F*>(p))(); };
    machine.body_arg = &kernel;
    EMULATOR_TSAN(machine.main_tsan = __tsan_get_current_fiber();
                  __tsan_release(&machine.launched);)
    run_blocks(shared_bytes);
    EMULATOR_TSAN(__tsan_acquire(&machine.done);)

    // Run the writes that nothing has waited for, the last first.
    for (; !owned.late.empty(); owned.late.pop_back())
        owned.late.back()();
}

} // namespace emulator

#include "emulator_streams.h"

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
// The value that a lane brings to a shuffle, and the lane that it reads.
struct Exchange {
    uint64_t value;
    unsigned from; // the lane to read from; 32 means this lane's own value
};
// Every shuffle comes down to this one: lane `from` gives its value.
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
template <typename T>
unsigned __match_any_sync(unsigned mask, T x, emulator::Site site = emulator::Site::current()) {
    return emulator::warp_operation(
        mask, "a match", x,
        [](unsigned lane, const emulator::Lanes<T>& all) {
            unsigned same = 0;
            for (unsigned l = 0; l < 32; l++)
                if (all.mask >> l & 1 && all[l] == all[lane]) same |= 1u << l;
            return same;
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

// Atomics are relaxed, as on the GPU. A kernel puts a fence before and after, to order the data
// that they guard.
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

namespace emulator {

// Queue a launch on the stream, or say why it cannot be one.
template <typename... Params>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, std::type_identity_t<Params>... args) {
    if (!check_launch(grid, block, shared_bytes)) return;
    note_launch(kernel);
    auto threads = [=] { kernel(args...); };
    give(reinterpret_cast<const void*>(kernel), stream,
         [=] { run_grid(grid, block, shared_bytes, threads); }, grid, block, shared_bytes,
         args...);
}

} // namespace emulator

// A kernel's __shared__ array.
#define LLMC_SHARED(type, name, count) \
    type* name = emulator::shared_array<type>(count, emulator::Site::current())
