// test_memory.cpp - what the plan says is what the run uses: GPT-2 124M, B 4, T 1024, bf16, on one
//   rank (B 1 where oneDNN does not multiply bf16), and a smaller model on ranks as threads and as
//   processes
//   After the first step nothing allocates more than 64 KiB; the process grows by the arena, within
//   5%; every planned page is written in a step; a step works at this size.
#include <gtest/gtest.h>
#include <atomic>
#include <filesystem>
#include <fstream>
#include "../../llmc/family.h"
#include "small_models.h"

using namespace llmc;

// ----------------------------------------------------------------------------
// the malloc hook: this program's malloc, also for the libraries it loads

// Count allocations, and keep the largest one's size.
static std::atomic<size_t> largest{0}, allocations{0};
static void note(size_t bytes) {
    allocations++;
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

// A number of /proc/self/status, which is in kB there, in bytes.
static size_t status_bytes(const char* key) {
    std::ifstream in("/proc/self/status");
    for (std::string line; std::getline(in, line);)
        if (line.rfind(key, 0) == 0)
            return strtoul(line.c_str() + strlen(key) + 1, nullptr, 10) * 1024;
    return 0;
}

// Allocate a placed trainer, draw its weights, and give it windows of numbers that repeat.
static void begin(Trainer<bf16, Cpu>& t) {
    trainer_allocate(t);
    init_constants(t);
    init_weights(t, 1);
    t.hyper = {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f};
    t.data.window = [V = t.model.shape.V, T = t.plans[0].T](uint64_t sample, int* tokens,
                                                            int* targets) {
        for (size_t i = 0; i < T; i++) {
            tokens[i] = int((sample * 31 + i * 7) % V);
            targets[i] = int((sample * 31 + (i + 1) * 7) % V);
        }
        return std::string();
    };
}

// GPT-2 124M: the process grows by the arena's size, and all of the arena is used.
TEST(Memory, TheRunUsesWhatThePlanSays) {
    // Make the trainer.
    Shape s = gpt2_shape(12, 12, 768);
    Plan p;
    p.B = onednn_takes_bf16() ? 4 : 1, p.T = 1024; // our own loops would take minutes for 4
    Trainer<bf16, Cpu> t;
    trainer_place(t, s, {p});
    size_t before = status_bytes("VmRSS:");
    begin(t);

    // First fit stays within 5% of the least that any placement needs.
    EXPECT_LE(double(t.arena.device().bytes - t.arena.device().persistent_bytes),
              1.05 * double(t.arena.peak[0]));

    // Fill the passing memory with a pattern: the first step overwrites nearly all pages.
    const unsigned char pattern = 0xa7;
    unsigned char *passing = t.arena.device().base + t.arena.device().persistent_bytes,
                  *end = t.arena.device().base + t.arena.device().bytes;
    memset(passing, pattern, size_t(end - passing));
    run_plan(t, 0);
    double first = plan_loss(t).mean();
    size_t pages = 0, untouched = 0;
    for (unsigned char* page = passing; page + 4096 <= end; page += 4096, pages++)
        untouched += std::all_of(page, page + 4096, [](unsigned char c) { return c == pattern; });
    EXPECT_LE(double(untouched), 0.02 * double(pages))
        << "pages that were planned and never written";
    EXPECT_NEAR(first, std::log(50257.0), 0.3);

    // A later step, on the same samples, allocates nothing large.
    largest = 0;
    run_plan(t, 0);
    EXPECT_LE(largest.load(), 65536u) << "allocated after the first step";
    EXPECT_LT(plan_loss(t).mean(), first);

    // The process has grown by as much as was planned.
    size_t grown = status_bytes("VmHWM:") - before;
    printf("B %zu: planned %.1f MiB, resident peak less the start %.1f MiB (%.2f%%)\n", p.B,
           double(t.arena.device().bytes) / 1048576, double(grown) / 1048576,
           100.0 * double(grown) / double(t.arena.device().bytes));
    EXPECT_NEAR(double(grown), double(t.arena.device().bytes),
                0.05 * double(t.arena.device().bytes));
    trainer_free(t);
}

// ----------------------------------------------------------------------------
// many ranks

static Layout layout_of(int dp, int pp, int zero) {
    Layout layout = small_layout(dp, 1, pp);
    layout.zero = zero;
    return layout;
}

// Run two steps on a rank. Returns the bytes of its plan, and the largest allocation after
// the first step.
struct Use {
    size_t planned, largest;
};
static Use run_rank(const Comm& world, const Shape& s, Layout layout) {
    layout.first_layer = split_layers(std::vector<double>(s.L + 2, 1), layout.stages());
    PlanOptions p;
    p.B = 4, p.T = 256, p.micro_batches = 2;
    Trainer<bf16, Cpu> t;
    trainer_place(t, s, {p}, layout_at(layout, world.rank));
    t.comms = make_comms(world, t.layout);
    begin(t);

    // Forget the first step's allocations on all ranks, then measure the second's.
    run_plan(t, 0);
    barrier(world, Cpu{});
    largest = 0;
    barrier(world, Cpu{});
    run_plan(t, 0);
    Use use = {t.arena.device().bytes, largest.load()};
    barrier(world, Cpu{}); // nobody frees before all have looked
    trainer_free(t);
    return use;
}

// Run this process's ranks. lora: the lowest block with adapters; 0: none has any. Returns 0 if the
// process grows by as much as their plans say, and allocates nothing large after a step.
static int run_ranks(const Layout& l, int lora, bool threads) {
    size_t planned = 0, largest_after = 0, before = 0;
    std::mutex mutex;
    auto body = [&](const Comm& world) {
        // Run a small model first, so that threads and the buffers of libraries are there before.
        run_rank(world, gpt2_shape(4, 2, 16, 64, 256), layout_of(2, 1, 3));
        barrier(world, Cpu{});
        if (!threads || world.rank == 0) before = status_bytes("VmRSS:");
        barrier(world, Cpu{});

        // Measure the model.
        Shape s = gpt2_shape(6, 6, 384, 4096, 256);
        Use use = run_rank(world, lora ? upper_lora(s, 8, lora, true) : s, l);
        std::lock_guard lock(mutex);
        planned += use.planned, largest_after = std::max(largest_after, use.largest);
    };
    if (threads) run_local_ranks(2, {}, body);
#ifdef WITH_MPI
    RankInfo info;
    if (!threads) body(mpi_world(info));
#endif

    // Allow for code: oneDNN compiles some for each product, 4 to 6 MiB here, and no plan knows it.
#ifdef WITH_ONEDNN
    const double code = 8 << 20;
#else
    const double code = 0;
#endif

    // Compare.
    size_t grown = status_bytes("VmHWM:") - before;
    double share = double(grown) / double(planned);
    bool as_planned = share > 0.95 && double(grown) < 1.05 * double(planned) + code;
    printf(
        "dp %d pp %d zero %d: planned %.1f MiB, resident peak less the start %.1f MiB (%.2f%%), "
        "largest allocation after a step %zu\n",
        l.dp.size, l.pp.size, l.zero, double(planned) / 1048576, double(grown) / 1048576,
        100 * share, largest_after);
    return !as_planned || largest_after > 65536;
}

// Run this program again for each layout: `test_memory --ranks threads|processes dp pp zero lora`.
static void expect_as_planned(const std::string& mpirun, const std::string& how) {
    std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
    for (const char* layout : {"2 1 0 0", "2 1 3 0", "1 2 0 0", "1 2 0 3"}) {
        std::string command =
            "timeout 300 " + mpirun + self + " --ranks " + how + " " + layout + " 2>&1";
        EXPECT_EQ(system(command.c_str()), 0) << command;
    }
}
TEST(Memory, RanksAsThreadsUseWhatTheirPlansSay) { expect_as_planned("", "threads"); }
#ifdef WITH_MPI
TEST(Memory, RanksAsProcessesUseWhatTheirPlansSay) {
    expect_as_planned("mpirun --allow-run-as-root --oversubscribe --bind-to none -np 2 ",
                      "processes");
}
#endif

// A collective of one rank, alone in the world or beside others, touches no byte, allocates
// nothing, and waits for no lock.
TEST(Memory, CollectivesOfOneRankCostNothing) {
    // Run all collectives on memory that may be neither read nor written.
    void* page = mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    float* x = static_cast<float*>(page);
    auto everything = [&](const Comm& alone) {
        size_t before = allocations;
        all_reduce_sum(alone, x, 1024, Cpu{});
        all_reduce_max(alone, x, 1024, Cpu{});
        reduce_scatter_sum(alone, x, x, 1024, Cpu{});
        all_gather(alone, x, x, 1024, Cpu{});
        broadcast(alone, x, 1024, 0, Cpu{});
        exchange(alone, nullptr, 0, Cpu{});
        barrier(alone, Cpu{});
        return allocations - before;
    };
    EXPECT_EQ(everything(Comm()), 0u);

    // Beside another rank, while this one holds all locks.
    LocalSettings settings;
    settings.timeout_s = 5;
    auto body = [&](const Comm& world) {
        if (world.rank > 0) return barrier(world, Cpu{});
        Comm alone = comm_split(world, "alone", {0});
        {
            std::lock_guard<std::mutex> a(world.local->mutex), b(world.local->world->mutex);
            everything(alone); // the other rank allocates meanwhile, so no count
        }
        barrier(world, Cpu{});
    };
    EXPECT_EQ(run_local_ranks(2, settings, body), 0);
    munmap(page, 4096);
}

// The presets that fit a laptop run a step, whose loss is that of guessing.
TEST(Memory, SmallPresetsRunAStep) {
    for (const Preset& preset : model_presets()) {
        if (std::string(preset.name).rfind("tiny", 0) != 0 || preset.shape.L > 4) continue;

        // Make a trainer that counts upwards.
        Plan p;
        p.B = 2, p.T = 64;
        Trainer<float, Cpu> t;
        trainer_place(t, preset.shape, {p});
        trainer_allocate(t);
        init_constants(t);
        init_weights(t, 1);
        t.hyper.lr = 1e-3f;
        t.data.window = [&](uint64_t sample, int* tokens, int* targets) {
            for (size_t i = 0; i < 64; i++)
                tokens[i] = int((sample + i) % 256), targets[i] = int((sample + i + 1) % 256);
            return std::string();
        };

        // Run a step.
        run_plan(t, 0);
        EXPECT_NEAR(plan_loss(t).mean(), std::log(256.0), 0.3) << preset.name;
        trainer_free(t);
    }
}

int main(int argc, char** argv) {
    if (argc == 7 && std::string(argv[1]) == "--ranks") {
        bool threads = std::string(argv[2]) == "threads";
        Layout l = layout_of(atoi(argv[3]), atoi(argv[4]), atoi(argv[5]));
        int lora = atoi(argv[6]);
        if (threads) return run_ranks(l, lora, true);
#ifdef WITH_MPI
        int given;
        LLMC_MPI_CHECK(MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &given));
        int status = run_ranks(l, lora, false);
        LLMC_MPI_CHECK(MPI_Finalize());
        return status;
#endif
    }
    testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}
