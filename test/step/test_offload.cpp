// test_offload.cpp - state, activations, weights in the host's memory or in a file: the same bits
#ifdef _OPENMP
#include <omp.h>
#endif
#include <sys/resource.h>
#include <csignal>
#include <random>
#include "../../llmc/io/explain.h"
#include "../../llmc/optimizer.h"
#include "../harness/runs.h"
#include "small_models.h"

namespace {

// ----------------------------------------------------------------------------
// the file

std::vector<unsigned char> random_bytes(std::mt19937& random, size_t n) {
    std::vector<unsigned char> bytes(n);
    for (unsigned char& b : bytes) b = (unsigned char)random();
    return bytes;
}

// Write and read ranges of any place and length, at once or by the threads, and compare with a
// copy in memory.
TEST(Disk, HoldsWhatWasWritten) {
    std::mt19937 random(3);
    size_t size = 5 * DISK_BLOCK;
    Disk d;
    ASSERT_EQ(disk_open(d, "/tmp", size), "");
    std::vector<unsigned char> like(size, 0); // the copy; bytes that were never written are zero
    for (int i = 0; i < 60; i++) {
        // Draw a range; now and then it is exactly a block.
        size_t at = random() % size, n = std::min(size - at, size_t(random()) % (2 * DISK_BLOCK));
        if (i % 8 == 0) at = at / DISK_BLOCK * DISK_BLOCK, n = DISK_BLOCK;
        std::vector<unsigned char> bytes = random_bytes(random, n), back(n);

        // Write it twice out of three times, else read it.
        bool by_threads = i % 2;
        auto move = std::make_shared<DiskMove>();
        if (i % 3) {
            std::copy(bytes.begin(), bytes.end(), like.begin() + at);
            if (by_threads) {
                disk_start(d, move, Way::TO_DISK, bytes.data(), at, n, Cpu{});
            } else {
                ASSERT_EQ(disk_move(d, Way::TO_DISK, bytes.data(), at, n), "");
            }
        } else if (by_threads) {
            disk_start(d, move, Way::FROM_DISK, back.data(), at, n, Cpu{});
        } else {
            ASSERT_EQ(disk_move(d, Way::FROM_DISK, back.data(), at, n), "");
        }
        ASSERT_EQ(disk_finish(d, *move), "");
        if (i % 3 == 0) {
            ASSERT_TRUE(std::equal(back.begin(), back.end(), like.begin() + at)) << i;
        }
    }

    // Read everything.
    std::vector<unsigned char> all(size);
    ASSERT_EQ(disk_move(d, Way::FROM_DISK, all.data(), 0, size), "");
    EXPECT_TRUE(all == like);
}

// No byte of memory is read or written before a move's memory is ready, which is asked once.
TEST(Disk, CopiesBeginWhenTheMemoryIsReady) {
    Disk d;
    size_t size = 6 * DISK_BLOCK;
    ASSERT_EQ(disk_open(d, "/tmp", size), "");
    std::vector<unsigned char> memory(size, 1), late(size, 2), other(size, 3);
    for (Way way : {Way::TO_DISK, Way::FROM_DISK}) {
        // Others use the memory until then.
        std::atomic<int> asked = 0;
        auto move = std::make_shared<DiskMove>();
        move->ready = [&] {
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            memory = way == Way::TO_DISK ? late : other;
            asked++;
        };

        // Move all blocks.
        disk_start(d, move, way, memory.data(), 0, size, Cpu{});
        ASSERT_EQ(disk_finish(d, *move), "");
        EXPECT_EQ(asked, 1);
        EXPECT_TRUE(memory == late) << int(way);
    }
}

// A block that has changed on the disk is an error when it is read, and names the block.
TEST(Disk, ABlockThatChangedIsAnError) {
    std::mt19937 random(4);
    Disk d;
    ASSERT_EQ(disk_open(d, "/tmp", 3 * DISK_BLOCK), "");
    std::vector<unsigned char> bytes = random_bytes(random, 3 * DISK_BLOCK), back(bytes.size());
    ASSERT_EQ(disk_move(d, Way::TO_DISK, bytes.data(), 0, bytes.size()), "");

    // Flip one bit of the second block in the file itself.
    alignas(DISK_ALIGN) static unsigned char page[DISK_ALIGN];
    off_t at = off_t(DISK_BLOCK + 8 * DISK_ALIGN);
    ASSERT_EQ(pread(d.file, page, DISK_ALIGN, at), ssize_t(DISK_ALIGN));
    page[77] ^= 16;
    ASSERT_EQ(pwrite(d.file, page, DISK_ALIGN, at), ssize_t(DISK_ALIGN));

    // The other blocks can be read.
    EXPECT_EQ(disk_move(d, Way::FROM_DISK, back.data(), 0, DISK_BLOCK), "");
    EXPECT_EQ(disk_move(d, Way::FROM_DISK, back.data(), 2 * DISK_BLOCK, DISK_BLOCK), "");
    EXPECT_HAS(disk_move(d, Way::FROM_DISK, back.data(), 0, 3 * DISK_BLOCK),
               "block 1 of the offloaded state has changed");
    auto move = std::make_shared<DiskMove>();
    disk_start(d, move, Way::FROM_DISK, back.data(), 0, 3 * DISK_BLOCK, Cpu{});
    EXPECT_HAS(disk_finish(d, *move), "block 1 ");
}

// A checksum has a chain for each third of a block, and joins them: a word that changed must change
// it in any third, at both ends too, and so must two words that changed places, or a whole third.
TEST(Disk, AChecksumSeesEveryPartOfABlock) {
    std::mt19937 random(5);
    std::vector<unsigned char> block = random_bytes(random, DISK_BLOCK);
    uint32_t sum = block_sum(block.data());
    size_t words = DISK_BLOCK / 8, third = words / 3;
    std::vector<size_t> places = {0, third - 1, third, 2 * third, 3 * third, words - 1};
    for (int i = 0; i < 40; i++) places.push_back(random() % words);

    // Flip a bit of each word, in its lower half or its upper one, and flip it back.
    for (size_t word : places) {
        unsigned char& byte = block[word * 8 + random() % 8];
        unsigned char flip = (unsigned char)(1 << random() % 8);
        byte ^= flip;
        EXPECT_NE(block_sum(block.data()), sum) << "word " << word;
        byte ^= flip;
    }
    EXPECT_EQ(block_sum(block.data()), sum);

    // Exchange the thirds, and two neighbours.
    auto at = [&](size_t word) { return block.begin() + ptrdiff_t(word * 8); };
    auto exchanged = [&](size_t from, size_t to, size_t count) {
        std::swap_ranges(at(from), at(from + count), at(to));
        uint32_t other = block_sum(block.data());
        std::swap_ranges(at(from), at(from + count), at(to));
        return other;
    };
    EXPECT_NE(exchanged(0, third, third), sum);
    EXPECT_NE(exchanged(0, 2 * third, third), sum);
    EXPECT_NE(exchanged(third, 2 * third, third), sum);
    EXPECT_NE(exchanged(words - 2, words - 1, 1), sum);
}

// A file takes all its room at the start, so a disk without it is refused. The file has no name, so
// that none can stay behind.
TEST(Disk, RefusesWhatDoesNotFit) {
    // Limit files to two blocks.
    std::string folder = scratch("offload");
    fs::create_directories(folder);
    signal(SIGXFSZ, SIG_IGN);
    rlimit saved, small = {2 * DISK_BLOCK, RLIM_INFINITY};
    getrlimit(RLIMIT_FSIZE, &saved);
    small.rlim_max = saved.rlim_max;
    setrlimit(RLIMIT_FSIZE, &small);

    // Three blocks do not fit, two do.
    Disk large, fits;
    std::string wrong = disk_open(large, folder, 3 * DISK_BLOCK);
    std::string good = disk_open(fits, folder, 2 * DISK_BLOCK);
    setrlimit(RLIMIT_FSIZE, &saved);
    EXPECT_HAS(wrong, "3 MiB of state do not fit: File too large; choose another folder");
    EXPECT_EQ(good, "");
    EXPECT_TRUE(fs::is_empty(folder));

    Disk nowhere;
    EXPECT_HAS(disk_open(nowhere, folder + "/none", DISK_BLOCK), "No such file or directory");
}

// ----------------------------------------------------------------------------
// the same bits

struct Case {
    int dp, tp, pp, zero;
    Tier tier;
    int prefetch = 1;
    Optimizer optimizer = Optimizer::ADAMW;
    RecomputeLevels level = Recompute::NONE;
    bool split = false; // backward passes in two halves
    Masters masters = Masters::FLOAT;
    States states = States::FLOAT;
    bool weights = true, gradients = true; // offload these beside activations
    bool optimizer_too = true;             // and masters and moments
    int micro_batches = 2;
    Tier update = Tier::DEVICE;
    std::vector<bool> parked = {}; // [layer]: whose activations are offloaded; empty: all
    Stored stored = Stored::WIDE;  // of frozen matrices
};

// Make every move of a file late, by letting its threads sleep first.
void make_late(Disk* disk) {
    if (!disk) return;
    std::lock_guard hold(disk->lock);
    for (int i = 0; i < DISK_THREADS; i++)
        disk->jobs.push_front([](std::shared_ptr<void>&) {
            std::this_thread::sleep_for(std::chrono::milliseconds(3));
        });
    disk->changed.notify_all();
}

// All weights and optimizer states after three steps, whole, one after the other. late: moves to
// and from the disk take longer than the actions beside them.
template <typename T>
std::vector<float> trained(const Shape& shape, const Case& c, bool late = false) {
    // Choose the layout.
    Layout sizes = small_layout(c.dp, c.tp, c.pp);
    sizes.zero = c.zero;
    sizes.prefetch = c.prefetch;
    if (c.states == States::EIGHT_BIT) sizes.tensor_align = STATE_BLOCK;
    sizes.muon = c.optimizer == Optimizer::MUON || c.optimizer == Optimizer::NORMUON;
    std::vector<float> all;
    EXPECT_EQ(run_local_ranks(c.dp * c.tp * c.pp, {}, [&](const Comm& world) {
#ifdef _OPENMP
        omp_set_num_threads(1);
#endif
        // Make the rank's plan.
        Plan plan = small_plan(2, 8, c.micro_batches, c.level, c.split);
        plan.optimizer = c.optimizer, plan.masters = c.masters, plan.states = c.states;
        plan.offload = {c.tier, c.tier, c.weights ? c.tier : Tier::DEVICE,
                        c.gradients ? c.tier : Tier::DEVICE, 4096};
        if (!c.optimizer_too) plan.offload.optimizer = Tier::DEVICE;
        plan.offload.update = c.update;
        plan.offload.parked = c.parked;
        plan.stored = c.stored;
        plan.layout = layout_at(sizes, world.rank);
        plan.layout.first_layer =
            split_layers(std::vector<double>(shape.L + 2, 1.0), plan.layout.stages());

        // Train. There is a file only if something lies in it.
        Fixture<T> rank(shape, {plan});
        auto& t = rank.t;
        t.comms = make_comms(world, plan.layout, ranks_of_kv_head(plan.layout, t.model));
        Disk* disk = t.arena.memory[int(Tier::DISK)].disk.get();
        EXPECT_EQ(disk != nullptr, t.arena.memory[int(Tier::DISK)].bytes > 0);
        bool frozen = trains_adapters(shape); // a stage may have nothing to update
        EXPECT_TRUE(disk || c.tier != Tier::DISK || c.optimizer == Optimizer::SGD || frozen);
        if (late)
            t.hooks.after = [&](const Action& a) {
                if (a.op != Op::LOAD) make_late(disk);
            };
        // In fp16 begin at a scale that overflows twice.
        bool half = type_of<T>() == Type::F16;
        if (half)
            t.hyper.loss_scaling = {.on = true, .start = 0x1p22f, .window = 9, .hysteresis = 1};
        init_loss_scale(t);

        for (int i = 0; i < (half ? 10 : 3); i++)
            rank.step();
        StepScale last = read_value<StepScale>(t, {Kind::SCALE});
        if (half) {
            EXPECT_LT(last.loss.now, 0x1p22f) << "a step overflows";
            EXPECT_EQ(last.finite, 1) << "another one does not";
        }

        // Gather each parameter: only some ranks have its bucket, but all must call.
        std::vector<float> mine;
        auto numbers = [](const auto& x) { return std::vector<float>(x.begin(), x.end()); };
        auto add = [&](const std::vector<float>& values) {
            mine.insert(mine.end(), values.begin(), values.end());
        };
        for (const Parameter& p : t.model.parameters) {
            bool trains = t.model.buckets[p.bucket].trainable;
            if (trains || c.stored == Stored::WIDE) add(get_weight(t, p));
            if (!trains) continue;
            for (int s = 0; s < int(states_of(c.optimizer, p.muon).size()); s++)
                add(numbers(fetch_numbers(t, {Kind::STATE, p.bucket, s}, p)));
        }
        if (world.rank == 0) all = mine;
    }), 0);
    return all;
}

// Train with all data on the device, then with what the case offloads in each tier: the same bits.
// late: moves of a file take longer than the actions beside them.
template <typename T>
void expect_same_bits(const Shape& shape, Case c, const std::string& what, bool late = false) {
    c.tier = Tier::DEVICE;
    std::vector<float> there = trained<T>(shape, c);
    ASSERT_GT(there.size(), 1000u);
    for (Tier tier : {Tier::HOST, Tier::DISK}) {
        c.tier = tier;
        EXPECT_TRUE(trained<T>(shape, c, late && tier == Tier::DISK) == there)
            << what << ": dp " << c.dp << " tp " << c.tp << " pp " << c.pp << " zero " << c.zero
            << " prefetch " << c.prefetch << " tier " << int(tier);
    }
}

// Offloading everything, to the host's memory or to a file, changes no bit, in any layout.
TEST(Offload, ChangesNoBitInAnyLayout) {
    const std::vector<Case> layouts = {
        {1, 1, 1, 0, Tier::DEVICE}, {2, 1, 1, 1, Tier::DEVICE}, {2, 1, 1, 2, Tier::DEVICE},
        {2, 1, 1, 3, Tier::DEVICE}, {1, 2, 1, 0, Tier::DEVICE}, {1, 1, 2, 0, Tier::DEVICE},
        {2, 2, 1, 1, Tier::DEVICE}, {2, 1, 2, 3, Tier::DEVICE}};
    for (const Shape& shape : {small_gpt2(true, 4), small_llama()})
        for (const Case& c : layouts)
            expect_same_bits<bf16>(shape, c, "all");
}

// Offloading changes no bit with or without moments, with any prefetch, and if moves are late.
TEST(Offload, ChangesNoBitWhateverMovesAndWhen) {
    Case c = {2, 1, 1, 1, Tier::DEVICE};
    for (Optimizer optimizer : {Optimizer::ADAMW, Optimizer::SGD})
        for (int prefetch : {0, 1, 3}) {
            c.optimizer = optimizer, c.prefetch = prefetch;
            expect_same_bits<bf16>(small_gpt2(), c, "bf16", true);
            expect_same_bits<float>(small_gpt2(), c, "float", true);
        }
}

// Offloading changes no bit of small masters and states: chunks of remainders, and of moments in 16
// and 8 bits.
TEST(Offload, ChangesNoBitOfSmallMastersAndStates) {
    Shape wide = gpt2_shape(2, 4, 64, 256, 16); // 8-bit moments need matrices of 4096 elements
    Case c = {2, 1, 1, 1, Tier::DEVICE};
    for (Masters masters : {Masters::FLOAT, Masters::REMAINDER, Masters::NONE})
        for (States states : {States::FLOAT, States::BF16, States::EIGHT_BIT}) {
            c.masters = masters, c.states = states;
            expect_same_bits<bf16>(wide, c, concat("masters ", int(masters), ", states ",
                                                   int(states)));
        }
}

// Weights can be offloaded alone, in each stage of ZeRO. Masters and moments stay on the device,
// and are updated chunk by chunk all the same.
TEST(Offload, ChangesNoBitOfWeightsAlone) {
    Shape wide = gpt2_shape(2, 4, 64, 256, 16);
    Case c = {2, 1, 1, 0, Tier::DEVICE};
    c.optimizer_too = false, c.micro_batches = 3;
    for (int zero : {0, 1, 2, 3})
        for (int prefetch : {0, 2}) {
            c.zero = zero, c.prefetch = prefetch;
            c.states = prefetch ? States::EIGHT_BIT : States::FLOAT;
            c.masters = prefetch ? Masters::REMAINDER : Masters::FLOAT;
            expect_same_bits<bf16>(wide, c, "weights", true);
        }
}

// Muon's momentum comes ahead of MUON, wherever its update runs, and second moments of what is no
// matrix lie close together in chunks. Weights may lie elsewhere too, or alone.
TEST(Offload, ChangesNoBitOfMuon) {
    const Shape shapes[] = {gpt2_shape(2, 4, 64, 256, 16), small_llama(), small_mixtral()};
    int turn = 0; // shapes take turns
    for (Case c : {Case{1, 1, 1, 0, Tier::DEVICE}, Case{2, 1, 1, 1, Tier::DEVICE},
                   Case{2, 1, 1, 3, Tier::DEVICE}, Case{1, 2, 1, 0, Tier::DEVICE},
                   Case{2, 2, 1, 2, Tier::DEVICE}, Case{1, 1, 2, 0, Tier::DEVICE}})
        for (bool rows : {false, true}) {
            const Shape& shape = shapes[turn++ % 3];
            c.optimizer = rows ? Optimizer::NORMUON : Optimizer::MUON;
            c.states = rows ? States::BF16 : States::FLOAT;
            c.prefetch = rows ? 30 : c.dp - 1; // 30: more than there are chunks of momentum
            c.gradients = false, c.weights = rows;
            expect_same_bits<bf16>(shape, c, "muon", true);

            // The host updates what lies there; or weights are offloaded alone.
            std::vector<float> there = trained<bf16>(shape, c);
            c.tier = c.update = Tier::HOST;
            EXPECT_TRUE(trained<bf16>(shape, c) == there) << c.dp << c.tp << c.pp << rows;
            c.update = Tier::DEVICE, c.weights = true, c.optimizer_too = false;
            EXPECT_TRUE(trained<bf16>(shape, c) == there) << c.dp << c.tp << c.pp << rows;
            c.tier = Tier::DEVICE, c.optimizer_too = true;
        }
}

// Beside adapters, and behind a prefix, no bit changes either. Frozen weights come for each use and
// never go back; codes of four bits stay on the device.
TEST(Offload, ChangesNoBitBesideAdapters) {
    Shape prefixed = small_llama();
    prefixed.tuned.prefix = 3;
    int turn = 0; // tiers and codes take turns
    for (const Shape& shape : {with_lora(small_gpt2(true, 4), 3),
                               with_late_lora(small_llama(), 2), prefixed})
        for (Case c : {Case{1, 1, 1, 0, Tier::DEVICE}, Case{2, 1, 1, 1, Tier::DEVICE},
                       Case{2, 1, 1, 3, Tier::DEVICE}, Case{1, 2, 1, 0, Tier::DEVICE},
                       Case{1, 1, 2, 2, Tier::DEVICE}}) {
            bool narrow = turn % 2 && c.tp == 1 && c.zero < 3;
            c.stored = narrow ? Stored::NF4 : Stored::WIDE;
            c.weights = !narrow, c.level = three_levels(44);
            std::vector<float> there = trained<bf16>(shape, c);
            ASSERT_GT(there.size(), 500u);

            // The host updates what lies there.
            c.tier = turn++ % 3 ? Tier::HOST : Tier::DISK;
            c.update = c.tier == Tier::HOST ? c.tier : Tier::DEVICE;
            EXPECT_TRUE(trained<bf16>(shape, c) == there)
                << "dp " << c.dp << " tp " << c.tp << " pp " << c.pp << " zero " << c.zero
                << " tier " << int(c.tier) << " stored " << int(c.stored);
        }
}

// Gradients can be offloaded alone: they leave after each micro-batch and come back for the next,
// those of tied tables too.
TEST(Offload, ChangesNoBitOfGradientsAlone) {
    Shape deep = gpt2_shape(5, 4, 64, 256, 16), tall = small_llama();
    tall.L = 5;
    for (const Shape& shape : {deep, tall})
        for (Case c : {Case{1, 1, 1, 0, Tier::DEVICE}, Case{2, 1, 1, 1, Tier::DEVICE},
                       Case{2, 1, 1, 2, Tier::DEVICE}, Case{1, 1, 2, 0, Tier::DEVICE}})
            for (int prefetch : {0, 1}) {
                c.weights = false, c.optimizer_too = false, c.micro_batches = 3;
                c.split = prefetch, c.prefetch = prefetch;
                expect_same_bits<bf16>(shape, c, "gradients", true);
            }
}

// The CPU can update beside masters and moments in the host's memory: gradients come to it and
// weights go back, or lie there too.
TEST(Offload, ChangesNoBitWhereItsDataLie) {
    Shape wide = gpt2_shape(2, 4, 64, 256, 16);
    for (Case c : {Case{1, 1, 1, 0, Tier::DEVICE}, Case{2, 1, 1, 1, Tier::DEVICE},
                   Case{2, 1, 1, 2, Tier::DEVICE}, Case{2, 1, 1, 3, Tier::DEVICE},
                   Case{1, 2, 1, 0, Tier::DEVICE}, Case{1, 1, 2, 0, Tier::DEVICE}})
        for (bool small : {false, true}) {
            c.masters = small ? Masters::REMAINDER : Masters::FLOAT;
            c.states = small ? States::EIGHT_BIT : States::FLOAT;

            // Update on the device, then on the host.
            c.tier = c.update = Tier::DEVICE;
            std::vector<float> half = trained<bf16>(wide, c), single = trained<float>(wide, c);
            c.tier = c.update = Tier::HOST;
            for (bool all : {false, true}) {
                c.weights = c.gradients = all;
                EXPECT_TRUE(trained<bf16>(wide, c) == half) << c.zero << small << all;
                EXPECT_TRUE(trained<float>(wide, c) == single) << c.zero << small << all;
            }
        }

    // SGD has masters, but no moments.
    Case sgd = {2, 1, 1, 1, Tier::DEVICE};
    sgd.optimizer = Optimizer::SGD;
    std::vector<float> there = trained<bf16>(wide, sgd);
    sgd.tier = sgd.update = Tier::HOST, sgd.weights = sgd.gradients = false;
    EXPECT_TRUE(trained<bf16>(wide, sgd) == there);
}

// fp16: the host skips a gradient that overflows, as a device does.
TEST(Offload, SkipsAGradientThatOverflows) {
    Case c = {2, 1, 1, 2, Tier::DEVICE};
    c.weights = false;
    std::vector<float> plain = trained<fp16>(small_gpt2(), c);
    c.tier = c.update = Tier::HOST;
    EXPECT_TRUE(trained<fp16>(small_gpt2(), c) == plain);
}

// At each level of recomputation the activations that are kept leave and come back, and both halves
// of a split backward pass find them.
TEST(Offload, ChangesNoBitAtAnyLevelOfRecomputation) {
    Case c = {1, 1, 1, 0, Tier::DEVICE};
    for (Recompute level : {Recompute::SELECTIVE, Recompute::ATTN, Recompute::FULL})
        for (bool split : {false, true}) {
            c.level = level, c.split = split;
            expect_same_bits<bf16>(small_llama(), c, recompute_name(level), true);
        }
}

// Segments that keep one input, parked or not, and some parked blocks beside others that stay,
// change no bit in any layout.
TEST(Offload, ChangesNoBitOfSegmentsAndSomeBlocks) {
    Shape deep = gpt2_shape(5, 4, 32, 53, 16), tall = small_llama(), experts = small_mixtral();
    tall.L = experts.L = 5;
    Recompute N = Recompute::NONE, A = Recompute::ATTN, F = Recompute::FULL;
    RecomputeLevels mixed = std::vector<Recompute>{N, F, F, A, F, F, N};

    for (const Shape& shape : {deep, tall, experts})
        for (Case c : {Case{1, 1, 1, 0, Tier::DEVICE}, Case{2, 1, 1, 3, Tier::DEVICE},
                       Case{1, 2, 1, 0, Tier::DEVICE}, Case{1, 1, 2, 0, Tier::DEVICE},
                       Case{2, 1, 2, 2, Tier::DEVICE}}) {
            // Train once without recomputation, then with each segment and tier.
            c.weights = c.gradients = c.optimizer_too = false;
            c.split = c.pp == 2;
            std::vector<float> there = trained<float>(shape, c);
            for (Tier tier : {Tier::DEVICE, Tier::HOST})
                for (int size : {1, 2, 3, 5}) {
                    c.tier = tier;
                    c.level = size == 3 ? mixed : RecomputeLevels(F);
                    c.level.segments = {size};
                    c.parked = {false, true, size > 1, true, false, true, false};
                    EXPECT_TRUE(trained<float>(shape, c) == there)
                        << "segments of " << size << " dp " << c.dp << " tp " << c.tp << " pp "
                        << c.pp << " tier " << int(tier);
                }
        }
}

// ----------------------------------------------------------------------------
// the plan

Plan offloaded_plan(const Model& model, size_t chunk, int prefetch = 1) {
    PlanOptions o = small_plan(2, 8, 2);
    if (model.muon) o.optimizer = Optimizer::MUON;
    o.offload = {.optimizer = Tier::HOST, .chunk = chunk};
    Layout layout;
    layout.prefetch = prefetch;
    return make_plan(layout, model, o);
}

// Leave out each action that `chosen` selects, one at a time: the check must refuse what is left.
// Returns how many there are.
template <typename F> int refused_without(const Plan& good, const Model& model, F chosen) {
    EXPECT_EQ(plan_check(good, model), "");
    int count = 0;
    for (size_t i = 0; i < good.actions.size(); i++) {
        if (!chosen(good.actions[i])) continue;
        count++;
        Plan without = good;
        without.actions.erase(without.actions.begin() + long(i));
        EXPECT_NE(plan_check(without, model), "") << action_text(good.actions[i], model);
    }
    return count;
}

// The check refuses a plan that lacks any move of activations: a layer would read what has left, or
// what has never come.
TEST(Offload, APlanThatLosesActivationsIsRefused) {
    Model model = make_model(small_gpt2(), {});
    PlanOptions o = small_plan(2, 8, 2, Recompute::FULL);
    o.offload.activations = Tier::HOST;
    auto moves = [](const Action& a) { return queue_of(a.op) == Queue::MOVE; };
    EXPECT_EQ(refused_without(make_plan({}, model, o), model, moves), 2 * 2 * 2)
        << "the last block's backward pass comes too soon";
}

// The check refuses a plan that lacks a move of weights: a layer would read weights that were never
// fetched, or a shard in place of all of them.
TEST(Offload, APlanThatLosesWeightsIsRefused) {
    Layout two;
    two.dp.size = 2, two.zero = 3, two.prefetch = 1;
    for (const Layout& layout : {Layout{}, two}) {
        Model model = make_model(small_gpt2(), layout);
        PlanOptions o = small_plan(2, 8, 2);
        o.offload.weights = Tier::HOST;
        o.offload.chunk = 4096;
        auto brings = [](const Action& a) {
            return a.op == Op::FETCH || a.op == Op::PARK || a.op == Op::GATHER;
        };
        EXPECT_GT(refused_without(make_plan(layout, model, o), model, brings), 20);
    }
}

// The check refuses a plan that lacks a move of gradients or a sum of squares, since the gradient,
// or its norm, would be wrong.
TEST(Offload, APlanThatLosesGradientsIsRefused) {
    Layout two;
    two.dp.size = 2, two.zero = 2;
    for (const Layout& layout : {Layout{}, two}) {
        Model model = make_model(gpt2_shape(6, 4, 64, 256, 16), layout);
        PlanOptions o = small_plan(2, 8, 2);
        o.offload.gradients = Tier::HOST;
        o.offload.chunk = 4096;
        Plan good = make_plan(layout, model, o);
        auto moves = [](const Action& a) {
            return a.op == Op::FETCH || a.op == Op::PARK || a.op == Op::SQUARE;
        };
        EXPECT_GT(refused_without(good, model, moves), 30);

        // Add a sum of squares too early, before the last micro-batch has added its gradient.
        int back = 0, early = 0;
        for (size_t i = 0; i < good.actions.size(); i++) {
            const Action& a = good.actions[i];
            back += a.op == Op::FETCH && a.chunk < 0;
            if (a.op != Op::PARK || a.kind != Kind::GRAD_HERE) continue;
            early++;
            Plan soon = good;
            soon.actions.insert(soon.actions.begin() + long(i), {Op::SQUARE, -1, -1, a.bucket});
            EXPECT_HAS(plan_check(soon, model), "adds to a gradient after its SQUARE");
        }
        EXPECT_GE(back, 4);
        EXPECT_GE(early, 4);
    }
}

// With ZeRO-1 a gradient is summed whole on the device, and only the shard that this rank
// updates is offloaded.
TEST(Offload, OnlyShardsOfGradientsLieElsewhere) {
    Layout two;
    two.dp.size = 2, two.dp.rank = 1, two.zero = 1;
    PlanOptions o = small_plan(1, 16, 1);
    o.offload.gradients = Tier::HOST;
    o.offload.chunk = 8192;
    Trainer<bf16, Cpu> t;
    trainer_place(t, gpt2_shape(3, 4, 64, 256, 16), {o}, two);
    size_t found = 0, wanted = 0;
    for (auto& [d, place] : t.arena.lasting)
        if (d.kind == Kind::GRAD) found += place.bytes;
    for (int b = 0; b < int(t.model.buckets.size()); b++)
        wanted += updated_range(t.layout, t.model, b).count * sizeof(float);
    EXPECT_EQ(found, wanted);
}

// With everything offloaded the device holds a few layers, whatever the depth of the model.
TEST(Offload, NothingGrowsWithDepth) {
    auto place = [&](int layers) {
        PlanOptions o = small_plan(1, 16, 2, Recompute::FULL);
        o.offload = {Tier::HOST, Tier::HOST, Tier::HOST, Tier::HOST, 8192};
        Trainer<bf16, Cpu> t;
        trainer_place(t, gpt2_shape(layers, 4, 64, 256, 16), {o});
        return t.arena;
    };

    // Only sums of squares and the norm's table grow: each has a double for 4096 elements.
    Arena flat = place(8), deep = place(32);
    size_t squares = 24 * 2 * ARENA_ALIGN + 24 * 2 * 64 * sizeof(double);
    EXPECT_LE(deep.device().bytes, flat.device().bytes + squares);
}

// With offloaded weights the device holds those of three layers at most, whatever the depth: the
// one that runs, the next one, and one that is being released.
TEST(Offload, WeightsDoNotGrowWithDepth) {
    auto place = [&](int layers, Tier tier) {
        PlanOptions o = small_plan(1, 16, 1, Recompute::FULL);
        o.offload = {
            .optimizer = Tier::HOST, .activations = Tier::HOST, .weights = tier, .chunk = 8192};
        Trainer<bf16, Cpu> t;
        trainer_place(t, gpt2_shape(layers, 4, 64, 256, 16), {o});
        return t;
    };
    auto deep = place(24, Tier::HOST), flat = place(6, Tier::HOST), here = place(24, Tier::DEVICE);
    EXPECT_EQ(deep.arena.peak[0], flat.arena.peak[0]);

    // All weights have left the device's lasting memory.
    size_t all = 0, block = 0;
    for (auto& [d, p] : here.arena.lasting)
        if (d.kind == Kind::WEIGHT) {
            all += round_up(p.bytes, ARENA_ALIGN);
            block = std::max(block, p.bytes);
        }
    size_t left = here.arena.device().persistent_bytes - deep.arena.device().persistent_bytes;
    EXPECT_EQ(left, all);

    // Count the bytes of gathered weights at each action.
    size_t most = 0;
    for (int at = 0; at < int(deep.arena.finish[0].size()); at++) {
        size_t now = 0;
        for (auto& [d, lives] : deep.arena.passing[0])
            for (const Place& l : lives)
                if (d.kind == Kind::GATHERED && l.first <= at && at <= l.last) now += l.bytes;
        most = std::max(most, now);
    }
    EXPECT_GE(most, 2 * block);
    EXPECT_LE(most, 3 * block);
}

// A fetch may run until its use, beside all actions in between: the norm, and other fetches.
TEST(Offload, FetchesGoOnUntilTheirUse) {
    Model model = make_model(gpt2_shape(8, 3, 24, 61, 32), {});
    PlanOptions o = small_plan(2, 8, 1, Recompute::FULL);
    o.offload = {Tier::HOST, Tier::HOST, Tier::DEVICE, Tier::DEVICE, 4096};
    Layout layout;
    layout.prefetch = 2;
    Plan p = make_plan(layout, model, o);
    std::vector<Finish> finish = finish_before(p, model);

    // Find the use of each: a chunk's update, or a layer's recomputation.
    int fetches = 0;
    for (int i = 0; i < int(p.actions.size()); i++) {
        const Action& a = p.actions[i];
        if (a.op != Op::FETCH) continue;
        fetches++;
        auto uses = [&](const Action& b) {
            return a.bucket >= 0 ? b.op == Op::UPDATE && b.bucket == a.bucket && b.chunk == a.chunk
                                 : b.op == Op::R && b.layer == a.layer;
        };
        auto use = std::find_if(p.actions.begin() + i, p.actions.end(), uses);
        EXPECT_EQ(finish[i].first(), use - p.actions.begin()) << action_text(a, model);
    }
    EXPECT_GT(fetches, 16);
}

// A shard of weights that lie elsewhere is fetched two compute actions before it is gathered.
TEST(Offload, AShardIsFetchedBeforeItIsGathered) {
    Layout layout = small_layout(2);
    layout.zero = 3;
    layout.prefetch = 2;
    PlanOptions o = small_plan(2, 8, 1);
    o.offload.weights = Tier::HOST;
    layout = with_tiers(layout, o.offload);
    Model model = make_model(gpt2_shape(8, 3, 24, 61, 32), layout);
    int computed = 0, gathers = 0;
    std::map<int, int> fetched;
    for (const Action& a : make_plan(layout, model, o).actions) {
        computed += computes(a.op);
        if (a.op == Op::FETCH) fetched[a.bucket] = computed;
        if (a.op != Op::GATHER) continue;
        gathers++;
        EXPECT_EQ(computed - fetched.at(a.bucket), std::min(computed, 2)) << action_text(a, model);
    }
    EXPECT_GT(gathers, 16);
}

// With offloaded activations and full recomputation the device holds the residual streams of a few
// layers, whatever the depth.
TEST(Offload, ActivationsDoNotGrowWithDepth) {
    auto place = [&](int layers, Tier tier) {
        PlanOptions o = small_plan(4, 64, 1, Recompute::FULL);
        o.offload.activations = tier;
        Trainer<bf16, Cpu> t;
        trainer_place(t, gpt2_shape(layers, 4, 64, 256, 64), {o});
        return t.arena;
    };
    size_t stream = 4 * 64 * 64 * sizeof(bf16);
    EXPECT_EQ(place(32, Tier::HOST).peak[0], place(8, Tier::HOST).peak[0]);
    EXPECT_EQ(place(32, Tier::DEVICE).peak[0] - place(8, Tier::DEVICE).peak[0], 24 * stream);
    Arena deep = place(32, Tier::HOST);
    EXPECT_EQ(deep.memory[int(Tier::HOST)].bytes % stream, 0u);
    EXPECT_GE(deep.memory[int(Tier::HOST)].bytes, 29 * stream);
    EXPECT_LE(deep.memory[int(Tier::HOST)].bytes, 32 * stream);
}

// The check refuses a plan that lacks an action of a chunk, has one twice, or has two in
// the wrong order.
static void expect_chunks_checked(bool muon) {
    Layout layout;
    layout.muon = muon;
    Model model = make_model(small_gpt2(), layout);
    Plan good = offloaded_plan(model, 4096);
    EXPECT_EQ(plan_check(good, model), "");
    int moves = 0;
    for (size_t i = 0; i < good.actions.size(); i++) {
        const Action& a = good.actions[i];
        if (a.chunk < 0) continue;
        moves++;

        // Leave it out, or do it twice.
        Plan without = good, twice = good;
        without.actions.erase(without.actions.begin() + long(i));
        twice.actions.insert(twice.actions.begin() + long(i), a);
        EXPECT_NE(plan_check(without, model), "") << action_text(a, model);
        EXPECT_NE(plan_check(twice, model), "") << action_text(a, model);

        // Swap it with the next one of its bucket; a fetch with its update.
        for (size_t k = i + 1; k < good.actions.size(); k++) {
            const Action& b = good.actions[k];
            bool next = a.op == Op::FETCH ? b.chunk == a.chunk : b.op != Op::FETCH;
            if (b.bucket != a.bucket || !next) continue;
            Plan swapped = good;
            std::swap(swapped.actions[i], swapped.actions[k]);
            EXPECT_NE(plan_check(swapped, model), "") << action_text(a, model);
            break;
        }
    }
    EXPECT_GT(moves, 3 * int(model.buckets.size())) << "some bucket has two chunks";
}
TEST(Offload, APlanThatLosesAChunkIsRefused) {
    expect_chunks_checked(false);
    expect_chunks_checked(true);
}

// With offloaded masters and moments the device holds three chunks of them, whatever the model.
TEST(Offload, TheDeviceHoldsThreeChunks) {
    for (int layers : {2, 6, 24}) {
        // Place the model with its state on the device, in the host's memory, and in a file.
        Shape shape = gpt2_shape(layers, 4, 64, 256, 16);
        auto place = [&](Tier tier) {
            PlanOptions o = small_plan(1, 16, 1);
            o.offload = {.optimizer = tier, .chunk = 8192};
            Trainer<bf16, Cpu> t;
            trainer_place(t, shape, {o});
            return t.arena;
        };
        Arena here = place(Tier::DEVICE), there = place(Tier::HOST), file = place(Tier::DISK);
        size_t moved = 0;
        for (auto& [d, p] : here.lasting)
            if (d.kind == Kind::MASTER || d.kind == Kind::STATE) moved += p.bytes;
        EXPECT_EQ(there.memory[int(Tier::HOST)].bytes, moved);
        EXPECT_GE(file.memory[int(Tier::DISK)].bytes, moved);
        EXPECT_EQ(here.device().persistent_bytes - there.device().persistent_bytes, moved);

        // No action has more than three chunks staged, and nothing else has grown.
        const size_t chunk = 8192 * 12;
        size_t most = 0, beside = 0;
        for (int at = 0; at < int(there.finish[0].size()); at++) {
            size_t staged = 0, others = 0;
            for (auto& [d, lives] : there.passing[0])
                for (const Place& l : lives) {
                    bool now = l.tier == Tier::DEVICE && l.first <= at && at <= l.last;
                    if (now)
                        (d.kind == Kind::STAGED ? staged : others) +=
                            round_up(l.bytes, ARENA_ALIGN);
                }
            most = std::max(most, staged);
            beside = std::max(beside, staged ? others : 0);
        }
        EXPECT_EQ(most, 3 * chunk) << layers;
        EXPECT_LE(there.peak[0], std::max(here.peak[0], 3 * chunk + beside)) << layers;
        EXPECT_LE(beside, here.peak[0]);
        EXPECT_EQ(there.device().bytes, file.device().bytes);
    }
}

// If the CPU updates, no byte of masters and moments is on the device, and the host has three
// chunks of gradients and weights beside them. A chunk is at most what this rank updates.
TEST(Offload, OnTheHostOnlyGradientsAndWeightsTravel) {
    Shape shape = gpt2_shape(6, 4, 64, 256, 16);
    auto place = [&](Tier tier, int ranks = 1, size_t chunk = 8192) {
        PlanOptions o = small_plan(1, 16, 1);
        o.offload = {.optimizer = tier, .chunk = chunk, .update = tier};
        Layout layout = small_layout(ranks);
        layout.zero = ranks > 1;
        Trainer<bf16, Cpu> t;
        trainer_place(t, shape, {o}, layout);
        return t;
    };
    auto halves = place(Tier::HOST, 2, 1 << 20).arena.memory[int(Tier::HOST)];
    auto here = place(Tier::DEVICE), there = place(Tier::HOST);
    size_t lasting = there.arena.memory[int(Tier::HOST)].persistent_bytes;
    EXPECT_EQ(here.arena.device().persistent_bytes - there.arena.device().persistent_bytes,
              lasting);
    EXPECT_EQ(there.arena.memory[int(Tier::HOST)].bytes, lasting + 3 * 8192 * 6);
    EXPECT_EQ(here.arena.peak[0], there.arena.peak[0]);
    size_t largest = 0;
    for (const Bucket& b : there.model.buckets) largest = std::max(largest, b.elements);
    EXPECT_LE(halves.bytes - halves.persistent_bytes, 3 * largest / 2 * 6 + 6 * ARENA_ALIGN);

    // Per parameter a float gradient moves in, and a bf16 weight both ways.
    const Plan& p = there.plans[0];
    size_t updated = 0;
    for (const Bucket& b : there.model.buckets) updated += b.elements;
    double moved = moved_bytes(there.arena, p, there.model, 0, Tier::HOST);
    EXPECT_NEAR(moved, double(updated) * (4 + 2 + 2), 1e-6 * moved)
        << "gradients in, weights both ways";
    EXPECT_EQ(moved_bytes(there.arena, p, there.model, 0, Tier::DISK), 0);
}

// ----------------------------------------------------------------------------
// the program

struct OffloadRun : Scratch {
    std::string flags, folder;
    void SetUp() override {
        Scratch::SetUp();
        std::string text = numbered_lines(3000, " of a text");
        folder = path("disk");
        fs::create_directories(folder);
        flags = " --layers 2 --heads 2 --channels 32 --seq 32 --micro-batch 4 --precision bf16 "
                "--sample-tokens 0 --log-every 1 --data " + put("text.txt", text) + " ";
    }
    Ran run(const std::string& more) const { return shell(program() + flags + more); }
    auto last_state(const std::string& out) const { return state_in(path(out) + "/step_00000006"); }
    std::string to_disk() const { return " --offload optimizer --offload-to " + folder; }
};

// A checkpoint does not depend on where the state lay: a run with any offload resumes it, to
// the same bits.
TEST_F(OffloadRun, GoesOnInAnotherTier) {
    std::string ranks = "--local-ranks 2 --zero 2 ";
    Ran whole = run(ranks + "--steps 6 --out " + path("whole"));
    ASSERT_EQ(whole.status, 0) << whole.text;

    // Train three steps one way, and three another way.
    std::string weights = " --offload weights", host = " --offload optimizer,update";
    std::string all = " --offload optimizer,weights,gradients,activations --offload-to " + folder;
    for (std::string first : {to_disk(), weights, all, host, std::string()})
        for (std::string then : {std::string(), all, host}) {
            fs::remove_all(path("parts"));
            Ran a = run(ranks + "--steps 3 --out " + path("parts") + first);
            Ran b = run(ranks + "--steps 6 --resume --out " + path("parts") + then);
            ASSERT_EQ(a.status + b.status, 0) << a.text << b.text;
            EXPECT_TRUE(last_state("parts") == last_state("whole")) << first << " then" << then;
        }
    EXPECT_TRUE(fs::is_empty(folder)) << "the file has no name";
}

// Moments in 8 bits resume to the same bits: a checkpoint has the numbers that codes stand for.
TEST_F(OffloadRun, GoesOnWithMomentsInEightBits) {
    for (std::string layout :
         {"", "--local-ranks 2 --tp 2", "--local-ranks 2 --zero 2 --masters remainder",
          "--local-ranks 2 --pp 2 --offload optimizer,update"}) {
        std::string all = "--channels 64 --states 8bit " + layout + " --out ";
        fs::remove_all(path("whole")), fs::remove_all(path("parts"));
        Ran whole = run(all + path("whole") + " --steps 6");
        Ran a = run(all + path("parts") + " --steps 3");
        Ran b = run(all + path("parts") + " --steps 6 --resume");
        ASSERT_EQ(whole.status + a.status + b.status, 0) << whole.text << a.text << b.text;
        EXPECT_TRUE(last_state("parts") == last_state("whole")) << layout;
    }
}

// The peak memory of a process, in bytes.
size_t peak_of(const std::string& command) {
    pid_t pid = fork();
    if (pid == 0) {
        execl("/bin/bash", "bash", "-c", ("exec " + command + " >/dev/null 2>&1").c_str(), nullptr);
        _exit(127);
    }
    int status = 0;
    rusage use = {};
    wait4(pid, &status, 0, &use);
    EXPECT_EQ(status, 0) << command;
    return size_t(use.ru_maxrss) * 1024;
}

// Offloading to a disk makes the process smaller by as much as the plan says, within 5%.
TEST_F(OffloadRun, LeavesTheMemoryToOthers) {
    std::string large = flags + "--layers 8 --channels 512 --heads 8 --micro-batch 1 --steps 2 ";
    auto planned = [&](const std::string& more) {
        std::string text = shell(program() + large + more + " --explain").text;
        return size_t(number_behind(text, "\n  total "));
    };
    size_t here = planned(""), there = planned(to_disk());
    ASSERT_GT(here, there + (size_t(150) << 20)) << "12 bytes of 18 leave";
    size_t shrunk = peak_of(program() + large) - peak_of(program() + large + to_disk());
    EXPECT_NEAR(double(shrunk), double(here - there), 0.05 * double(here - there));
}

// Offloads that cannot work are refused with what would help.
TEST_F(OffloadRun, SaysWhatCannotWork) {
    EXPECT_HAS(run("--steps 1 --offload optimizer --offload-to " + path("none")).text,
               "there is no such folder: make it, or give cpu");
    EXPECT_HAS(run("--steps 1 --offload optimizer,wigths").text, "--offload wigths: give some of");
    EXPECT_HAS(run("--steps 1 --offload optimizer --optimizer sgd --precision fp32").text,
               "neither masters nor moments");
    EXPECT_HAS(run("--steps 1 --offload-to " + folder).text, "--offload-to does nothing without");
    EXPECT_HAS(run("--steps 1 --offload weights,update").text,
               "--offload update: masters and moments lie on the device");
    EXPECT_HAS(run("--steps 1 --offload optimizer,update --offload-to " + folder).text,
               "is a folder: leave");

    // A folder without room.
    Ran full = shell("trap '' XFSZ; ulimit -f 400;" + program() + flags + "--steps 1" + to_disk());
    EXPECT_HAS(full.text, "of state do not fit: File too large");
    EXPECT_EQ(full.status, 1);
    EXPECT_TRUE(fs::is_empty(folder));
}

} // namespace
