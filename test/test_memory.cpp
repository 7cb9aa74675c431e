// test_memory.cpp - what the plan says is what the run uses, on GPT-2 124M, B 4, T 1024, bf16
//   After the first step nothing allocates more than 64 KiB; the process grows by the arena and no
//   more than 5%;
//   every planned page is written in a step; a step works at this size.
#include <gtest/gtest.h>
#include <atomic>
#include <fstream>
#include "../llmc/step.h"

// ----------------------------------------------------------------------------
// the malloc hook: this program's malloc, also for the libraries it loads

static std::atomic<size_t> largest{0};
static void note(size_t bytes) {
    size_t seen = largest.load();
    while (bytes > seen && !largest.compare_exchange_weak(seen, bytes)) {}
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void* malloc(size_t n) { return note(n), __libc_malloc(n); }
void* calloc(size_t n, size_t m) { return note(n * m), __libc_calloc(n, m); }
void* realloc(void* p, size_t n) { return note(n), __libc_realloc(p, n); }
void* memalign(size_t a, size_t n) { return note(n), __libc_memalign(a, n); }
void* aligned_alloc(size_t a, size_t n) { return note(n), __libc_memalign(a, n); }
int posix_memalign(void** p, size_t a, size_t n) {
    note(n);
    *p = __libc_memalign(a, n);
    return *p ? 0 : ENOMEM;
}
}
#endif

static size_t status_bytes(const char* key) { // of /proc/self/status, in kB there
    std::ifstream in("/proc/self/status");
    for (std::string line; std::getline(in, line);)
        if (line.rfind(key, 0) == 0)
            return strtoul(line.c_str() + strlen(key) + 1, nullptr, 10) * 1024;
    return 0;
}

TEST(Memory, TheRunUsesWhatThePlanSays) {
    Shape s = gpt2_shape(12, 12, 768);
    Plan p;
    p.B = 4, p.T = 1024;
    Trainer<bf16, Cpu> t;
    trainer_place(t, s, {p});
    size_t before = status_bytes("VmRSS:");
    trainer_allocate(t);
    init_constants(t);
    init_weights(t, 1);
    t.hyper = {true, 1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f};
    t.window = [&](uint64_t sample, int* tokens, int* targets) {
        for (size_t i = 0; i < 1024; i++)
            tokens[i] = int((sample * 31 + i * 7) % s.V),
            targets[i] = int((sample * 31 + (i + 1) * 7) % s.V);
        return std::string();
    };
    // first fit stays close to the least that any placement of these lives needs
    EXPECT_LE(double(t.arena.bytes - t.arena.persistent_bytes), 1.05 * double(t.arena.peak[0]));

    const unsigned char pattern = 0xa7;
    unsigned char *passing = t.arena.base + t.arena.persistent_bytes,
                  *end = t.arena.base + t.arena.bytes;
    memset(passing, pattern, size_t(end - passing));
    run_plan(t, 0);
    double first = plan_loss(t).mean();
    size_t pages = 0, untouched = 0;
    for (unsigned char* page = passing; page + 4096 <= end; page += 4096, pages++)
        untouched += std::all_of(page, page + 4096, [](unsigned char c) { return c == pattern; });
    EXPECT_LE(double(untouched), 0.02 * double(pages))
        << "pages that were planned and never written";
    EXPECT_NEAR(first, std::log(50257.0), 0.3);

    largest = 0;
    for (int i = 0; i < 2; i++) t.cursor += 4, run_plan(t, 0);
    EXPECT_LE(largest.load(), 65536u) << "allocated after the first step";
    EXPECT_LT(plan_loss(t).mean(), first);

    size_t grown = status_bytes("VmHWM:") - before;
    printf("planned %.1f MiB, resident peak less the start %.1f MiB (%.2f%%)\n",
           double(t.arena.bytes) / 1048576, double(grown) / 1048576,
           100.0 * double(grown) / double(t.arena.bytes));
    EXPECT_NEAR(double(grown), double(t.arena.bytes), 0.05 * double(t.arena.bytes));
    trainer_free(t);
}

// The other presets that fit a laptop run a step as well.
TEST(Memory, SmallPresetsRunAStep) {
    for (const Preset& preset : model_presets()) {
        if (std::string(preset.name).rfind("tiny", 0) != 0 || preset.shape.L > 4) continue;
        Plan p;
        p.B = 2, p.T = 64;
        Trainer<float, Cpu> t;
        trainer_place(t, preset.shape, {p});
        trainer_allocate(t);
        init_constants(t);
        init_weights(t, 1);
        t.hyper.lr = 1e-3f;
        t.window = [&](uint64_t sample, int* tokens, int* targets) {
            for (size_t i = 0; i < 64; i++)
                tokens[i] = int((sample + i) % 256), targets[i] = int((sample + i + 1) % 256);
            return std::string();
        };
        run_plan(t, 0);
        EXPECT_NEAR(plan_loss(t).mean(), std::log(256.0), 0.3) << preset.name;
        trainer_free(t);
    }
}
