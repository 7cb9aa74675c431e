// test_device.cpp - the whole step by the CUDA kernels against the whole step on the CPU
//   With g++ -DEMULATE the kernels run in the emulator, with nvcc -x cu on a GPU.
#include <barrier>
#include <cxxabi.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include "../../llmc/io/likelihood.h"
#include "../../llmc/io/generate.h"
#include "../../llmc/parameters.h"
#include "../../llmc/family.h"
#include "../../llmc/layers.h"

using namespace llmc;

static Shape tiny_gpt2() { return gpt2_shape(2, 2, 32, 61, 32); }
static Shape least_gpt2() { return gpt2_shape(1, 1, 16, 29, 32); }
static Shape tiny_llama() {
    Shape s = llama_shape(2, 4, 2, 64, 44, 53, 64, 10000);
    s.attention.qkv_bias = true, s.rope.scaling = {8, 1, 4, 16};
    return s;
}
static Shape tiny_alibi() {
    Shape s = tiny_llama();
    s.embedding.position = Position::ALIBI, s.embedding.tied = true;
    return s;
}

// Latent attention: generation decodes from a cache of latents.
static Shape tiny_mla() {
    Shape s = llama_shape(2, 4, 4, 32, 0, 53, 64, 10000);
    return deepseek_shape("deepseek_v2", s, {12, 10, 8, 4, 6}, 20);
}

static Shape tiny_moe() {
    Shape s = tiny_llama();
    s.family = Family::MIXTRAL, s.hf_type = "mixtral", s.attention.qkv_bias = false;
    s.F = 16, s.experts.E = 4, s.experts.K = 2, s.experts.balance = 0.05, s.experts.z_loss = 0.01;
    return s;
}

static Window random_window(const Shape& s, size_t T) {
    return [V = s.V, T](uint64_t sample, int* tokens, int* targets) {
        for (size_t i = 0; i < T; i++) {
            tokens[i] = int(random_block(7, fnv1a("tokens"), sample * T + i)[0] % V);
            targets[i] = int(random_block(7, fnv1a("tokens"), sample * T + i + 1)[0] % V);
            if (i % 5 == sample % 5) targets[i] = -1;
        }
        return std::string();
    };
}

static Plan train_plan(Recompute recompute, bool split) {
    Plan p;
    p.B = 2, p.T = 17, p.micro_batches = 2, p.recompute = recompute, p.split_backward = split;
    return p;
}

// Run body() in both orders that the emulator has for streams beside the one that the host waits
// for. The first shows work that begins too early, the second what does not wait for it to end.
template <typename F> void in_both_orders(F body) {
#ifdef EMULATE
    for (auto beside : {emulator::Beside::FIRST, emulator::Beside::LAST}) {
        SCOPED_TRACE(beside == emulator::Beside::FIRST ? "others first" : "others last");
        emulator::beside = beside;
        body();
    }
#else
    body();
#endif
}

// A trainer on the CPU or on a device, with the same random weights and samples on both.
template <typename T, typename S> struct Small {
    Trainer<T, S> t;
    Small(const Shape& s, const std::vector<Plan>& plans) {
        t.ctx.where = open_stream(S());
        t.offload.folder = "/tmp";
        trainer_place(t, s, {plans.begin(), plans.end()}, plans[0].layout);
        trainer_allocate(t);
        init_constants(t);
        // Draw weights that are larger than at the start of a run.
        for (const Parameter& p : t.model.parameters) {
            std::vector<float> v(p.elements());
            for (size_t i = 0; i < p.file_elements(); i++)
                v[i] = p.init.value + float(0.2 * normal(5, fnv1a(p.name), i));
            set_weight(t, p, v.data());
        }
        t.hyper = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.5f};
        t.data.window = random_window(s, plans[0].T);
    }
    ~Small() { trainer_free(t), close_stream(t.ctx.where); }

    // Run a step as train_step() does: the next step's batch is read while the device computes.
    PlanResult full_step() {
        uint64_t samples = t.plans[0].B * size_t(t.plans[0].micro_batches);
        start_plan(t, 0);
        prepare_batch(t, 0, t.data.cursor + samples);
        t.data.cursor += samples;
        return plan_result(t);
    }
    double step() {
        run_plan(t, 0);
        t.data.cursor += t.plans[0].B * size_t(t.plans[0].micro_batches);
        return plan_loss(t).mean();
    }
    template <typename P> std::vector<double> values(Kind kind, const Parameter& p) {
        std::vector<P> x(p.elements());
        copy_out(x.data(), address<P>(t, {kind, p.bucket}) + p.offset, x.size() * sizeof(P),
                 t.ctx.where);
        std::vector<double> y(x.size());
        for (size_t i = 0; i < x.size(); i++) y[i] = double(to_acc(x[i]));
        return y;
    }

    // The weights of each parameter, from the tier that keeps them.
    std::vector<std::vector<double>> weights() {
        std::vector<std::vector<double>> all;
        for (const Parameter& p : t.model.parameters) {
            auto numbers = fetch_numbers(t, {Kind::WEIGHT, p.bucket}, p);
            all.emplace_back(numbers.begin(), numbers.end());
        }
        return all;
    }
};

// ||a - b|| / ||b||
static double distance(const std::vector<double>& a, const std::vector<double>& b) {
    double d = 0, n = 1e-30;
    for (size_t i = 0; i < a.size(); i++) d += (a[i] - b[i]) * (a[i] - b[i]), n += b[i] * b[i];
    return std::sqrt(d / n);
}

// A chunk of logits on a GPU has as many rows as 512 MiB hold, in multiples of 128, and never more
// rows than the batch. The plan's scratch has room for it.
TEST(Device, LogitsComeInLargeChunks) {
    for (size_t V : {size_t(50257), size_t(151936)})
        for (size_t B : {size_t(64), size_t(1)}) {
            Plan p;
            p.B = B, p.T = 1024;
            Trainer<bf16, cudaStream_t> t;
            trainer_place(t, gpt2_shape(2, 12, 768, V), {p});

            // Compare the rows of a chunk with the limit.
            const Shape& s = t.model.shape;
            size_t rows = head_chunk_rows(s, p.rows(), sizeof(bf16)), row = s.Vp() * sizeof(bf16);
            if (B == 1) {
                EXPECT_EQ(rows, 1024u);
            } else {
                EXPECT_EQ(rows % 128, 0u);
                EXPECT_LE(rows * row, size_t(512) << 20);
                EXPECT_GT((rows + 128) * row, size_t(512) << 20);
            }

            // The scratch of the head holds one chunk.
            const ScratchTable& scratch = t.scratch[0].at(t.model.head());
            EXPECT_GE(scratch.find(ScratchKind::HEAD)->bytes, rows * row);
        }
}

// Constants on the device are what the host computed. A copy to the device reads its source late,
// so the host must not have freed it by then.
TEST(Device, ConstantsAreWhatTheHostComputed) {
    Shape s = tiny_llama();
    Small<float, cudaStream_t> gpu(s, {train_plan(Recompute::NONE, false)});
    std::vector<float> want(17 * s.HS), got(want.size());
    rope_table(want.data(), 17, s.HS, s.rope.theta, s.rope.scaling);
    copy_out(got.data(), gpu.t.rope.table, got.size() * sizeof(float), gpu.t.ctx.where);
    EXPECT_EQ(got, want);

    Small<float, cudaStream_t> alibi(tiny_alibi(), {train_plan(Recompute::NONE, false)});
    std::vector<float> slopes(4), here(4);
    alibi_slopes(slopes.data(), 4);
    copy_out(here.data(), alibi.t.ctx.slopes, 16, alibi.t.ctx.where);
    EXPECT_EQ(here, slopes);

    // The first loss scale of fp16.
    Small<fp16, cudaStream_t> half(least_gpt2(), {train_plan(Recompute::NONE, false)});
    half.t.hyper.loss_scaling = {true, true, false, 256, 1, 2};
    init_loss_scale(half.t);
    EXPECT_EQ(read_value<StepScale>(half.t, {Kind::SCALE}).loss.now, 256);
}

// Compare the device with the CPU: the gradients of the first step, and the losses and norms of
// three. `bound` limits the relative error of losses; norms and each parameter's gradient may be
// off by three times as much. The bias of keys is left out: softmax does not see it, so its
// gradient is nothing but rounding.
template <typename T>
void compare(const Shape& shape, double bound, Recompute r, bool split, bool muon = false) {
    // Use AdamW in float only: its first steps are the signs of the gradient, and for the smallest
    // elements bf16 decides them by chance.
    Plan plan = train_plan(r, split);
    plan.optimizer = sizeof(T) == 4 ? Optimizer::ADAMW : Optimizer::SGD;
    if (muon) plan.optimizer = Optimizer::MUON;
    plan.layout.muon = muon;
    Small<T, Cpu> cpu(shape, {plan});
    Small<T, cudaStream_t> gpu(shape, {plan});

    // Run three steps of both.
    for (int step = 0; step < 3; step++) {
        double a = cpu.step(), b = gpu.step();
        EXPECT_NEAR(a, b, bound * a) << "step " << step;
        StepScale x = read_value<StepScale>(cpu.t, {Kind::SCALE}),
                  y = read_value<StepScale>(gpu.t, {Kind::SCALE});
        EXPECT_NEAR(x.norm, y.norm, 3 * bound * x.norm);
        EXPECT_EQ(y.finite, 1);
        EXPECT_EQ(y.step, step + 1);

        // Gradients, after the first step.
        for (const Parameter& p : cpu.t.model.parameters) {
            if (step > 0 || p.name.find("k_proj.bias") != std::string::npos) continue;
            EXPECT_LT(distance(gpu.template values<acc_t<T>>(Kind::GRAD, p),
                               cpu.template values<acc_t<T>>(Kind::GRAD, p)),
                      3 * bound)
                << p.name;
        }
    }
}

// In float, sums in another order err by a few 1e-7 each, through two blocks. In bf16, each stored
// value may round another way, by 2^-8, and does so at random.
TEST(Device, StepInFloat) {
    // Experts that take half an even share drop about half of the choices, or more.
    Shape capped = tiny_moe();
    capped.experts.capacity.factor = 0.5;
    for (const Shape& s : {tiny_gpt2(), tiny_llama(), tiny_alibi(), capped})
        compare<float>(s, 1e-5, Recompute::NONE, false);
}
// Muon multiplies the smallest singular values, and with them rounding, by up to 500.
TEST(Device, StepOfMuon) {
    for (const Shape& s : {tiny_gpt2(), tiny_moe()})
        compare<float>(s, 1e-3, Recompute::NONE, false, true);
}
TEST(Device, StepInBf16) {
    // Give each token all experts: otherwise rounding alone could change its choice.
    Shape experts = tiny_moe();
    experts.experts.K = experts.experts.E;
    for (const Shape& s : {tiny_gpt2(), tiny_llama(), tiny_alibi(), experts})
        compare<bf16>(s, 1e-2, Recompute::NONE, false);
}

// In fp8, a value near the middle between two codes may round another way by 2^-3 of itself, not
// 2^-8, but few values are so near.
TEST(Device, StepInFp8) {
    Shape blocks = tiny_gpt2(), tensors = tiny_llama();
    blocks.fp8.kind = Fp8::BLOCK, tensors.fp8.kind = Fp8::TENSOR;
    compare<bf16>(blocks, 2e-2, Recompute::NONE, false);
    compare<bf16>(tensors, 2e-2, Recompute::NONE, false);
}

// Recomputation and split backward passes.
TEST(Device, RecomputedAndSplit) {
    compare<float>(tiny_gpt2(), 1e-5, Recompute::FULL, true);
    compare<float>(tiny_llama(), 1e-5, Recompute::SELECTIVE, true);
}

// Two runs on the device have the same bits.
TEST(Device, RunsAreBitwiseEqual) {
    for (const Shape& s : {tiny_gpt2(), tiny_llama()}) {
        std::vector<std::vector<double>> all[2];
        for (auto& run : all) {
            Small<bf16, cudaStream_t> gpu(s, {train_plan(Recompute::NONE, false)});
            gpu.step(), gpu.step();
            run = gpu.weights();
        }
        EXPECT_EQ(all[0], all[1]);
    }
}

// Offloading to the host's memory or to a file changes no bit of the weights.
static void compare_offloaded() {
    // Offload everything to each tier.
    std::vector<std::vector<double>> all[TIERS];
    for (Tier tier : {Tier::DEVICE, Tier::HOST, Tier::DISK}) {
        Plan plan = train_plan(Recompute::NONE, false);
        plan.offload = {tier, tier, tier, tier, 4096};
        Small<bf16, cudaStream_t> gpu(tiny_gpt2(), {plan});
        gpu.step(), gpu.step();
        all[int(tier)] = gpu.weights();
    }
    EXPECT_EQ(all[int(Tier::HOST)], all[int(Tier::DEVICE)]);

    // Update on the CPU, beside masters and moments in the host's memory, with gradients and
    // weights there or on the device.
    for (Tier tier : {Tier::DEVICE, Tier::HOST}) {
        Plan plan = train_plan(Recompute::NONE, false);
        plan.offload = {Tier::HOST, Tier::DEVICE, tier, tier, 4096, Tier::HOST};
        Small<bf16, cudaStream_t> gpu(tiny_gpt2(), {plan});
        gpu.step(), gpu.step();
        EXPECT_EQ(gpu.weights(), all[int(Tier::DEVICE)]);
    }
    EXPECT_EQ(all[int(Tier::DISK)], all[int(Tier::DEVICE)]);
}
TEST(Device, OffloadChangesNoBit) { in_both_orders(compare_offloaded); }

#ifdef EMULATE
// A file's threads copy from and to pinned memory, each in a stream of its own: a block costs one
// wait, and a copy none.
TEST(Device, AFilesThreadsWaitOnceABlock) {
    typedef DiskLane<cudaStream_t> Lane;
    constexpr size_t BLOCKS = 8;
    std::mutex lock;
    std::set<cudaStream_t> streams;
    std::barrier all(DISK_THREADS + 1);
    Disk d; // its threads end before what their jobs use
    ASSERT_EQ(disk_open(d, "/tmp", BLOCKS * DISK_BLOCK), "");
    cudaStream_t stream = open_stream(cudaStream_t());

    // Let each thread make its lane: no thread goes on before all have one.
    {
        std::lock_guard hold(d.lock);
        for (int i = 0; i < DISK_THREADS; i++)
            d.jobs.push_back([&](std::shared_ptr<void>& lane) {
                auto mine = std::make_shared<Lane>(stream);
                lane = mine;
                EXPECT_TRUE(emulator::is_pinned(mine->bytes));
                EXPECT_EQ(uintptr_t(mine->bytes) % DISK_ALIGN, 0u);
                {
                    std::lock_guard hold(lock);
                    streams.insert(mine->stream);
                }
                all.arrive_and_wait();
            });
        d.changed.notify_all();
    }
    all.arrive_and_wait();
    EXPECT_EQ(streams.size(), size_t(DISK_THREADS));
    EXPECT_EQ(streams.count(stream), 0u);

    // Move all blocks there and back.
    std::vector<unsigned char> bytes(BLOCKS * DISK_BLOCK, 5), back(bytes.size());
    for (Way way : {Way::TO_DISK, Way::FROM_DISK}) {
        unsigned char* memory = way == Way::TO_DISK ? bytes.data() : back.data();
        long before = emulator::blocking;
        auto move = std::make_shared<DiskMove>();
        disk_start(d, move, way, memory, 0, bytes.size(), stream);
        ASSERT_EQ(disk_finish(d, *move), "");
        EXPECT_EQ(emulator::blocking - before, long(BLOCKS)) << int(way);
    }
    EXPECT_EQ(back, bytes);
    close_stream(stream);
}
#endif

// After a step whose gradient is not finite the weights are as before, and the step does not count.
TEST(Device, NothingIsWrittenWhenTheGradientIsNotFinite) {
    Small<float, cudaStream_t> gpu(tiny_gpt2(), {train_plan(Recompute::NONE, false)});
    const Parameter& p = gpu.t.model.parameters.back();
    std::vector<float> nan(p.elements(), NAN);
    set_weight(gpu.t, p, nan.data());
    std::vector<std::vector<double>> before, after;
    auto read = [&](auto& to) {
        for (const Parameter& q : gpu.t.model.parameters)
            if (&q != &p) to.push_back(gpu.template values<float>(Kind::WEIGHT, q));
    };
    read(before);
    gpu.step();
    read(after);
    EXPECT_EQ(read_value<StepScale>(gpu.t, {Kind::SCALE}).finite, 0);
    EXPECT_EQ(read_value<StepScale>(gpu.t, {Kind::SCALE}).step, 0);
    EXPECT_EQ(before, after);
}

// A rehearsal runs on random numbers in all of the arena: no kernel takes one for an index, and
// losses are finite, so that products see what they see in training.
TEST(Device, AStepRunsOnNoise) {
    Plan narrow = train_plan(Recompute::FULL, false);
    narrow.masters = Masters::REMAINDER, narrow.states = States::BF16;
    Plan wide = train_plan(Recompute::NONE, false);
    for (auto& [shape, plan] : {std::pair{tiny_gpt2(), narrow}, {tiny_alibi(), wide},
                                {tiny_moe(), wide}, {tiny_mla(), narrow}}) {
        Small<bf16, cudaStream_t> gpu(shape, {plan});
        const Memory& arena = gpu.t.arena.device();
        fill_noise(reinterpret_cast<bf16*>(arena.base), arena.bytes / 2, gpu.t.ctx.where);
        init_constants(gpu.t);
        EXPECT_TRUE(std::isfinite(gpu.step()));
    }
}

#ifdef EMULATE
// The host waits for the device once a step, from its first action to its loss and norm, also if
// the actions are timed.
TEST(Device, TheHostWaitsOnceAStep) {
    Small<float, cudaStream_t> gpu(least_gpt2(), {train_plan(Recompute::NONE, false)});
    for (int step = 0; step < 3; step++) {
        long before = emulator::blocking;
        gpu.t.watch.on = step > 0;
        PlanResult r = gpu.full_step();
        EXPECT_EQ(emulator::blocking - before, 1);
        EXPECT_EQ(r.scale.step, step + 1);
        EXPECT_EQ(r.scale.norm, read_value<StepScale>(gpu.t, {Kind::SCALE}).norm);
        gpu.t.watch.used = step == 1 ? 0 : gpu.t.watch.used; // drop the laps that nobody reads
    }
}

static __global__ void nothing_kernel() {}

// A launch asks CUDA no questions: facts about a GPU are asked for once, and shared memory only for
// a kernel's first launch with more than before.
TEST(Device, QuestionsAreAskedOnce) {
    cudaStream_t stream = nullptr;
    is_hopper(stream);
    long before = emulator::questions;
    auto asked = [&] { return emulator::questions - before; };
    EXPECT_FALSE(is_hopper(stream));
    EXPECT_EQ(asked(), 0);

    // Launch with more shared memory than before, and with less.
    int expected = 0;
    for (auto [kilobytes, asks] : {std::pair(48, 0), {64, 1}, {64, 0}, {80, 1}, {72, 0}}) {
        launch_shared(nothing_kernel, 1, 32, size_t(kilobytes) << 10, stream);
        EXPECT_EQ(asked(), expected += asks) << kilobytes;
    }

    // On another GPU ask again: for the two numbers of its version, and for its shared memory.
    emulator::gpu = emulator::HOPPER;
    EXPECT_TRUE(is_hopper(stream));
    launch_shared(nothing_kernel, 1, 32, size_t(64) << 10, stream);
    emulator::gpu = emulator::AMPERE;
    EXPECT_EQ(asked(), expected + 3);
}
#endif

// A stopwatch gives each action its time: they follow each other, and take no longer than the step.
TEST(Device, EventsTimeTheActions) {
    Small<float, cudaStream_t> gpu(least_gpt2(), {train_plan(Recompute::NONE, false)});
    EXPECT_TRUE(read_laps(gpu.t.watch, gpu.t.model).empty());
    for (int step = 0; step < 2; step++) {
        double start = clock_seconds();
        gpu.t.watch.on = true;
        gpu.full_step();
        double seconds = clock_seconds() - start, sum = 0;

        // Check names and order.
        std::vector<TimedAction> actions = read_laps(gpu.t.watch, gpu.t.model);
        ASSERT_EQ(actions.size(), gpu.t.plans[0].actions.size());
        for (size_t i = 0; i < actions.size(); i++) {
            EXPECT_EQ(actions[i].name, action_text(gpu.t.plans[0].actions[i], gpu.t.model));
            EXPECT_GE(actions[i].end, actions[i].start);
            double before = i ? actions[i - 1].end : 0;
            EXPECT_GE(actions[i].start, before - 1e-6); // CUDA gives milliseconds as floats
            sum += actions[i].end - actions[i].start;
        }

        // Nearly all of the time is in actions: kernels are slow in the emulator.
        EXPECT_LE(sum, seconds);
        EXPECT_GE(sum, 0.5 * seconds);
    }
    EXPECT_EQ(action_kind({Op::F, 1, 0}, gpu.t.model), "F embedding");
    EXPECT_EQ(action_kind({Op::B, 0, 2}, gpu.t.model), "B head");
    EXPECT_EQ(action_kind({Op::UPDATE, -1, -1, 2}, gpu.t.model), "UPDATE block");
}

// A batch that is read during the step before is the one that LOAD would read, and each sample is
// read once. An evaluation between two steps, and a step that is repeated, read batches of their
// own. An error in reading is reported at the batch's own step.
TEST(Device, BatchesArePreparedAhead) {
    // Count the reads of each sample; the text ends after 12.
    Plan evaluate = train_plan(Recompute::NONE, false);
    evaluate.mode = Mode::EVALUATE, evaluate.micro_batches = 1;
    std::vector<Plan> plans = {train_plan(Recompute::NONE, false), evaluate};
    Small<float, cudaStream_t> ahead(least_gpt2(), plans), plain(least_gpt2(), plans);
    std::map<uint64_t, int> reads;
    Window window = ahead.t.data.window, other = random_window(gpt2_shape(1, 1, 16, 23), 17);
    ahead.t.data.window = [&](uint64_t sample, int* tokens, int* targets) {
        reads[sample]++;
        return sample < 12 ? window(sample, tokens, targets) : "no text";
    };

    // Run steps with and without reading ahead.
    for (int step = 0; step < 3; step++) {
        EXPECT_EQ(ahead.full_step().loss.mean(), plain.step());
        EXPECT_EQ(ahead.t.host.next.wrong, step < 2 ? "" : "no text");
        for (auto* small : {&ahead, &plain})
            run_samples(small->t, 1, 4, other, [&] { EXPECT_GT(plan_loss(small->t).sum, 0); });

        // Repeat a step, as after a value that is not finite: the batch that was read ahead stays.
        if (step == 1) {
            ahead.t.data.cursor -= 4;
            EXPECT_NE(ahead.t.host.next.cursor, ahead.t.data.cursor);
            plain.t.data.cursor -= 4;
            EXPECT_EQ(ahead.step(), plain.step());
        }
    }
    for (uint64_t sample = 0; sample < 12; sample++)
        EXPECT_EQ(reads[sample], sample / 4 == 1 ? 2 : 1) << sample;
}

// The losses and norms of two steps, with threads as ranks: on a GPU that they share, each with a
// stream, or on the CPU.
template <typename S>
std::vector<double> losses_of_ranks(int dp, int pp, int cp, int zero, ContextMethod method,
                                    int ep = 1, bool exchange = false) {
    std::vector<double> seen;
    int status = run_local_ranks(dp * pp * cp, {}, [&](const Comm& world) {
        Plan p = train_plan(Recompute::FULL, false);
        if (cp > 1) p.T = 16; // each rank has two chunks
        Layout sizes;
        sizes.dp.size = dp;
        sizes.pp.size = pp;
        sizes.cp.size = cp;
        sizes.context.method = method;
        sizes.zero = zero;
        sizes.ep = ep;
        sizes.experts.exchange = exchange;
        sizes.first_layer = split_layers(std::vector<double>(4, 1.0), pp);
        p.layout = layout_at(sizes, world.rank);

        // Train.
        Small<float, S> rank(ep > 1 ? tiny_moe() : tiny_gpt2(), {p});
        rank.t.comms = make_comms(world, p.layout);
        for (int step = 0; step < 2; step++) {
            double loss = rank.step();
            double norm = read_value<StepScale>(rank.t, {Kind::SCALE}).norm;
            if (world.rank == 0) seen.push_back(loss), seen.push_back(norm);
        }
    });
    EXPECT_EQ(status, 0);
    return seen;
}

// Ranks on a GPU compute what they compute on the CPU, to float's rounding. The host waits for the
// stream of each collective, and nothing else runs then: one order of streams shows all waits.
TEST(Device, ThreadsShareAGpu) {
    using enum ContextMethod;
    for (auto [dp, pp, cp, zero, method, ep, exchange] :
         {std::tuple{2, 1, 1, 3, GATHER, 1, false}, {2, 2, 1, 1, GATHER, 1, false},
          {1, 2, 1, 0, GATHER, 1, false}, {1, 1, 2, 0, GATHER, 1, false},
          {1, 1, 2, 0, ULYSSES, 1, false}, {1, 1, 2, 0, RING, 1, false},
          {2, 1, 1, 2, GATHER, 2, false}, {2, 1, 1, 2, GATHER, 2, true}}) {
        std::vector<double> gpu =
            losses_of_ranks<cudaStream_t>(dp, pp, cp, zero, method, ep, exchange);
        std::vector<double> cpu = losses_of_ranks<Cpu>(dp, pp, cp, zero, method, ep, exchange);
        ASSERT_EQ(gpu.size(), 4u);
        for (size_t i = 0; i < gpu.size(); i++)
            EXPECT_NEAR(gpu[i], cpu[i], 3e-5 * cpu[i]) << cp << " by " << int(method);
    }
}

// The likeliest tokens behind two prompts.
template <typename S> std::vector<int> greedy(const Shape& shape) {
    Plan p;
    p.mode = Mode::GENERATE, p.B = 2, p.T = 5, p.cache = 20;
    Small<float, S> small(shape, {p});
    std::vector<int> ids, one = {1, 2, 3, 4, 5}, two = {6, 7};
    generate(small.t, 0, {{&one, 1}, {&two, 2}}, 15, Sampling{0},
             [&](int64_t, int id) { ids.push_back(id); }, [](int64_t, Ended) {});
    return ids;
}

// Greedy generation picks the same tokens as the CPU.
TEST(Device, GreedyTokensAreTheCpus) {
    for (const Shape& s : {tiny_gpt2(), tiny_llama(), tiny_alibi(), tiny_mla()}) {
        std::vector<int> ids = greedy<cudaStream_t>(s);
        EXPECT_EQ(ids.size(), 30u);
        EXPECT_EQ(ids, greedy<Cpu>(s));
    }
}

// Evaluation and the scores of candidates are the CPU's, to float's rounding.
TEST(Device, EvaluationIsTheCpus) {
    Plan p = train_plan(Recompute::NONE, false);
    p.mode = Mode::EVALUATE, p.micro_batches = 1;
    for (const Shape& s : {tiny_gpt2(), tiny_llama()}) {
        Small<float, Cpu> cpu(s, {p});
        Small<float, cudaStream_t> gpu(s, {p});
        double a = cpu.step();
        EXPECT_NEAR(gpu.step(), a, 1e-5 * a);

        // Score five random candidates of different lengths.
        std::vector<Candidate> want(5);
        for (size_t i = 0; i < want.size(); i++) {
            for (size_t k = 0; k <= p.T - i; k++)
                want[i].tokens.push_back(int(random_block(9, i, k)[0] % s.V));
            want[i].scored = 1 + i;
        }
        std::vector<Candidate> got = want;
        ScoreGroup group = {p.T, {0, 1, 2, 3, 4}, 0};
        score_group(cpu.t, group, want);
        score_group(gpu.t, group, got);
        for (size_t i = 0; i < want.size(); i++) {
            EXPECT_LT(want[i].log_likelihood, 0);
            EXPECT_NEAR(got[i].log_likelihood, want[i].log_likelihood,
                        -1e-5 * want[i].log_likelihood);
            EXPECT_EQ(got[i].greedy, want[i].greedy);
        }
    }
}

// ----------------------------------------------------------------------------
// graphs

// A trainer whose steps differ as those of a run do: in learning rate, and in how
// many targets count.
template <typename T> struct Stepper {
    std::unique_ptr<Small<T, cudaStream_t>> small;
    Stepper(const Shape& s, const Plan& plan) {
        Plan evaluate = plan;
        evaluate.mode = Mode::EVALUATE, evaluate.micro_batches = 1;
        small.reset(new Small<T, cudaStream_t>(s, {plan, evaluate}));
        auto& t = small->t;
        t.data.window = [window = t.data.window](uint64_t sample, int* tokens, int* targets) {
            for (size_t i = 0; i < sample % 11; i++) targets[i] = -1;
            std::string wrong = window(sample, tokens, targets);
            for (size_t i = 0; i < sample % 11; i++) targets[i] = -1;
            return wrong;
        };
        if (sizeof(T) != 2 || type_of<T>() != Type::F16) return;
        t.hyper.loss_scaling = {true, true, false, 256, 1, 2}; // the scale grows every second step
        init_loss_scale(t);
    }

    // Run a step and an evaluation: loss, norm and loss scale of the step, loss of the evaluation.
    std::vector<double> step(int number) {
        auto& t = small->t;
        t.hyper.lr = 1e-2f / float(1 + number);
        PlanResult result = small->full_step();
        run_plan(t, 1);
        return {result.loss.mean(), result.scale.norm, double(result.scale.loss.now),
                plan_loss(t).mean()};
    }
};

// Two steps that together have all that a step on one GPU may have: several micro-batches,
// recomputation, split backward passes, clipped gradients, weights and moments rounded at random.
static std::vector<std::pair<Shape, Plan>> steps_to_replay() {
    Shape small_llama = llama_shape(1, 2, 1, 16, 24, 29, 16, 10000);
    Plan gpt2 = train_plan(Recompute::SELECTIVE, false), llama = train_plan(Recompute::NONE, true);
    gpt2.T = llama.T = 9, gpt2.B = llama.B = 1;
    llama.masters = Masters::NONE, llama.states = States::BF16;
    return {{least_gpt2(), gpt2}, {small_llama, llama}};
}

// Replaying a captured graph makes the same bits as running the actions, in each step that follows.
template <typename T> void compare_replays() {
    for (auto [shape, plan] : steps_to_replay()) {
        if (sizeof(T) == 4) plan.masters = Masters::FLOAT;
        Stepper<T> plain(shape, plan), graph(shape, plan);
        graph.small->t.graphs.on = true;
        for (int step = 0; step < 4; step++)
            EXPECT_EQ(plain.step(step), graph.step(step)) << "step " << step;
        EXPECT_EQ(plain.small->weights(), graph.small->weights());
        for (auto& g : graph.small->t.graphs.of) EXPECT_TRUE(g.captured);
    }
}
TEST(Graphs, ReplaysAreStepsInFloat) { compare_replays<float>(); }
TEST(Graphs, ReplaysAreStepsInBf16) { compare_replays<bf16>(); }
TEST(Graphs, ReplaysAreStepsInFp16) { compare_replays<fp16>(); }

// A plan in which the host takes part, by offloading, generating or meeting other ranks,
// is not captured.
TEST(Graphs, WhatTheHostDoesIsNotCaptured) {
    auto [shape, plan] = steps_to_replay()[0];
    auto replays = [shape = shape](const Plan& p, const Comm& world, auto where) {
        Trainer<float, decltype(where)> t;
        trainer_place(t, shape, {p});
        return can_replay(t.plans[0], world, where);
    };
    const cudaStream_t gpu = {};
    Plan offloads = plan, generates = plan;
    offloads.offload.optimizer = Tier::HOST;
    generates.mode = Mode::GENERATE, generates.cache = generates.T;
    EXPECT_TRUE(replays(plan, {}, gpu));
    EXPECT_FALSE(replays(plan, {}, Cpu{}));
    EXPECT_FALSE(replays(offloads, {}, gpu));
    EXPECT_FALSE(replays(generates, {}, gpu));
    auto body = [&](const Comm& world) { EXPECT_FALSE(replays(plan, world, gpu)); };
    EXPECT_EQ(run_local_ranks(2, {}, body), 0);
}

// If somebody looks at actions or times them, they run one by one, without a graph.
TEST(Graphs, ActionsThatAreLookedAtRunOneByOne) {
    auto [shape, plan] = steps_to_replay()[0];
    Stepper<float> graph(shape, plan);
    auto& t = graph.small->t;
    t.graphs.on = true;
    for (int step = 0; step < 3; step++) graph.step(step);
    size_t seen = 0;
    t.hooks.after = [&](const Action&) { seen++; };
    graph.step(3);
    EXPECT_EQ(seen, t.plans[0].actions.size() + t.plans[1].actions.size());
    t.hooks.after = nullptr;
    t.watch.on = true;
    graph.small->full_step();
    EXPECT_EQ(read_laps(t.watch, t.model).size(), t.plans[0].actions.size());
}

#if defined(EMULATE)
// ----------------------------------------------------------------------------
// launches

// A kernel's name without its namespace, template arguments and parameters.
static std::string kernel_name(const void* kernel) {
    Dl_info info = {};
    if (!dladdr(kernel, &info) || !info.dli_sname) return "static kernels";
    char* text = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, nullptr);
    std::string name = text ? text : info.dli_sname;
    free(text);
    name = name.substr(0, name.find_first_of("<("));
    return name.substr(name.find_last_of(" :") + 1);
}

// How often each kernel is launched in a layer's forward and backward pass for one micro-batch.
static std::map<std::string, size_t> launches_of(const Shape& shape, int layer) {
    Plan plan = train_plan(Recompute::NONE, false);
    plan.micro_batches = 1;
    Small<bf16, cudaStream_t> small(shape, {plan});

    // After each action, count the launches since the action before.
    std::map<std::string, size_t> counts;
    small.t.hooks.after = [&](const Action& a) {
        for (auto& [kernel, count] : emulator::launches)
            if (a.layer == layer) counts[kernel_name(kernel)] += count;
        emulator::launches.clear();
    };
    emulator::launches.clear();
    small.step();
    return counts;
}
static size_t all_launches(const std::map<std::string, size_t>& counts) {
    size_t sum = 0;
    for (auto& [name, count] : counts) {
        printf("%4zu %s\n", count, name.c_str());
        sum += count;
    }
    printf("%4zu in all\n", sum);
    return sum;
}

// A block takes few launches. The emulator's GPU is an Ampere, so attention is that of mma.sync.
// The head has three products and a kernel for its chunk of logits, three for the norm, and a sum.
TEST(Launches, OfABlockAndOfTheHead) {
    Shape gpt2 = gpt2_shape(1, 2, 32, 61, 32);
    Shape llama = llama_shape(1, 4, 2, 64, 44, 53, 64, 10000);
    EXPECT_LE(all_launches(launches_of(gpt2, 1)), 25u);
    EXPECT_LE(all_launches(launches_of(llama, 1)), 35u);
    EXPECT_LE(all_launches(launches_of(gpt2, 2)), 8u);
}

// Ranks that share the keys of a sequence add up their gradients in float, by the same kernels as
// ranks that exchange heads, and the log names them.
TEST(Launches, OfSharedKeysAreTheKernelsThatTheLogNames) {
    using enum ContextMethod;
    for (ContextMethod method : {GATHER, ULYSSES, RING}) {
        int status = run_local_ranks(2, {}, [&](const Comm& world) {
            Plan p = train_plan(Recompute::NONE, false);
            p.T = 16;
            Layout sizes;
            sizes.cp.size = 2, sizes.context.method = method;
            p.layout = layout_at(sizes, world.rank);
            Small<bf16, cudaStream_t> rank(tiny_gpt2(), {p});
            rank.t.comms = make_comms(world, p.layout);

            // Count a step's launches.
            std::map<std::string, size_t> counts;
            emulator::launches.clear();
            rank.step();
            for (auto& [kernel, count] : emulator::launches) counts[kernel_name(kernel)] += count;

            // Hold them against the log's words.
            std::string text = context_attention_backend(rank.t.ctx.rank_shape, p.layout, 2,
                                                         rank.t.ctx.where);
            EXPECT_TRUE(text.starts_with("flash attention by mma.sync")) << text;
            EXPECT_EQ(text.find("plain"), std::string::npos) << text;
            for (std::string pass : {"forward", "backward_q"}) {
                EXPECT_GT(counts["attention_mma_" + pass + "_kernel"], 0u) << pass;
                EXPECT_EQ(counts.count("attention_" + pass + "_kernel"), 0u) << pass;
            }
        });
        EXPECT_EQ(status, 0);
    }
}

// Count the launches and copies of an exchange of N tokens between two ranks. Every other token
// goes to the other rank.
static size_t given_for_exchange(size_t N) {
    std::atomic<size_t> total = 0;
    EXPECT_EQ(run_local_ranks(2, {}, [&](const Comm& world) {
        cudaStream_t stream = open_stream(cudaStream_t());
        Ctx<cudaStream_t> ctx;
        ctx.where = stream, ctx.beside = open_stream(stream), ctx.ep = world;
        ctx.shape.C = 8, ctx.shape.experts.K = 1, ctx.shape.experts.E = ctx.shape.experts.ranks = 2;
        ctx.batch.B = 1, ctx.batch.T = N;
        std::vector<float> rows(N * 8, 1), all(2 * N * 8), packed(4 * N * 8), out(N * 8);
        std::vector<int> ids(2 * N);
        for (size_t i = 0; i < ids.size(); i++) ids[i] = int(i % 2);
        std::vector<char> lists(travel_bytes(2, N));
        ctx.experts.exchange_rows = packed.data();
        blas_scratch(ctx.blas, lists.data(), lists.size());

        // Send the tokens and return them.
        std::vector<emulator::Note> given;
        emulator::notes = &given;
        auto coming = send_tokens(ctx, all.data(), rows.data(), ids.data());
        finish_tokens(ctx, coming);
        return_tokens(ctx, out.data(), all.data(), ids.data());
        emulator::notes = nullptr;
        wait_for(stream);
        total += given.size();
        close_stream(ctx.beside);
        close_stream(stream);
    }), 0);
    return total;
}

// Rows of tokens are packed and put back by one launch each, however many runs of tokens travel.
TEST(Launches, OfAnExchangeDoNotDependOnTokens) {
    size_t few = given_for_exchange(6), many = given_for_exchange(96);
    EXPECT_GT(few, 8u);
    EXPECT_EQ(few, many);
}

// One launch computes a product of all experts, however many there are.
TEST(Launches, OfExperts) {
    auto launches = [](size_t E) {
        Shape s = tiny_moe();
        s.experts.E = E;
        return launches_of(s, 1);
    };
    auto four = launches(4), sixteen = launches(16);
    EXPECT_EQ(four["expert_rows_kernel"], 6u);
    EXPECT_EQ(four["expert_weight_kernel"], 3u);
    EXPECT_EQ(four, sixteen);
}

// A step in fp8: the launches that quantise, and the weights after it.
struct Fp8Step {
    size_t casts = 0;
    std::vector<std::vector<double>> weights;
};

// Run a step in fp8. gpu: the version of the GPU. kept: cast weights once a step, and keep them.
static Fp8Step fp8_step(Shape shape, Fp8 recipe, Recompute recompute, int gpu, bool kept) {
    shape.fp8.kind = recipe, shape.fp8.kept = kept, shape.fp8.rule = {3, 0, false};
    Plan plan = train_plan(recompute, false);
    plan.T = 16; // rows that MX's products take
    Small<bf16, cudaStream_t> small(shape, {plan});
    small.t.ctx.blas.emulates = gpu;
    small.step();

    // Count in the second step, whose weights the first has changed.
    Fp8Step found;
    emulator::launches.clear();
    small.step();
    for (auto& [kernel, count] : emulator::launches)
        if (kernel_name(kernel).ends_with("_quantise_kernel")) found.casts += count;
    found.weights = small.weights();
    return found;
}

// Keeping cast weights saves casts and changes no bit. Two micro-batches read each of a block's
// four matrices twice, and three of them once more with recomputation. If they are kept, each is
// cast once a step, or twice, with its transpose, for tensor cores that multiply codes. MX keeps no
// values of the transpose, which differ.
TEST(Launches, WeightsOfFp8AreCastOnceAStep) {
    struct Case {
        Fp8 recipe;
        Recompute recompute;
        int gpu; // 86 multiplies the codes' values, others the codes themselves
        size_t reads, casts;
    };
    for (Case c : {Case{Fp8::BLOCK, Recompute::NONE, 86, 16, 4},
                   Case{Fp8::TENSOR, Recompute::FULL, 90, 22, 8},
                   Case{Fp8::DELAYED, Recompute::FULL, 90, 22, 8},
                   Case{Fp8::MX, Recompute::NONE, 86, 16, 4 + 8},
                   Case{Fp8::MX, Recompute::FULL, 100, 22, 8},
                   Case{Fp8::NVFP4, Recompute::NONE, 86, 16, 4},
                   Case{Fp8::NVFP4, Recompute::FULL, 100, 22, 8}}) {
        Shape shape = gpt2_shape(1, 2, 32, 61, 32);
        Fp8Step once = fp8_step(shape, c.recipe, c.recompute, c.gpu, true);
        Fp8Step each = fp8_step(shape, c.recipe, c.recompute, c.gpu, false);
        EXPECT_EQ(each.casts - once.casts, c.reads - c.casts) << int(c.recipe);
        EXPECT_EQ(once.weights, each.weights) << int(c.recipe);
    }
}

// A Llama block has seven matrices and four inputs: q, k and v share one, gate and up another. Two
// micro-batches cast inputs in F and in W, dout in B and in W, and each weight is cast once a step,
// or twice for tensor cores. Under delayed scaling each matrix casts its own.
TEST(Launches, AnInputOfFp8IsCastOnceForAllItsProducts) {
    Shape llama = llama_shape(1, 2, 1, 32, 48, 29, 32, 10000);
    auto casts = [&](Fp8 recipe, int gpu) {
        return fp8_step(llama, recipe, Recompute::NONE, gpu, true).casts;
    };
    EXPECT_EQ(casts(Fp8::BLOCK, 86), 2 * (4u + 7 + 4 + 7) + 7);
    EXPECT_EQ(casts(Fp8::TENSOR, 90), 2 * (4u + 7 + 4 + 7) + 14);
    EXPECT_EQ(casts(Fp8::DELAYED, 90), 2 * (7u + 7 + 7 + 7) + 14);
}

// Two steps launch the same kernels with the same sizes and the same bytes of arguments, once the
// host's part (up to COUNT) is over. A graph of one step can therefore replace the next.
template <typename T> void compare_launches() {
    for (auto [shape, plan] : steps_to_replay()) {
        if (sizeof(T) == 4) plan.masters = Masters::FLOAT;
        Stepper<T> run(shape, plan);
        std::vector<emulator::Note> given[2];
        run.step(0);

        // Record the launches of two steps.
        run.small->t.hooks.after = [&](const Action& a) {
            if (a.op == Op::COUNT) emulator::notes->clear();
        };
        for (int step = 0; step < 2; step++) {
            emulator::notes = &given[step];
            run.small->t.hyper.lr = 1e-3f * float(step + 1);
            run.small->full_step();
            emulator::notes = nullptr;
        }

        // Compare them.
        ASSERT_EQ(given[0].size(), given[1].size());
        EXPECT_GT(given[0].size(), 50u);
        for (size_t i = 0; i < given[0].size(); i++)
            EXPECT_TRUE(given[0][i] == given[1][i])
                << "launch " << i << ", " << kernel_name(given[0][i].what) << " at byte "
                << std::mismatch(given[0][i].arguments.begin(), given[0][i].arguments.end(),
                                 given[1][i].arguments.begin())
                           .first -
                       given[0][i].arguments.begin();
    }
}
TEST(Graphs, StepsLaunchTheSame) {
    compare_launches<float>();
    compare_launches<bf16>();
    compare_launches<fp16>();
}

// With a graph a step costs the host the copies of its batch, one launch and one wait.
TEST(Graphs, AStepIsOneLaunch) {
    auto [shape, plan] = steps_to_replay()[0];
    Stepper<float> graph(shape, plan);
    graph.small->t.graphs.on = true;
    graph.step(0);
    long before = emulator::blocking;
    graph.small->full_step();
    EXPECT_EQ(emulator::blocking - before, 1); // capturing needs no wait of its own
    emulator::launches.clear();
    graph.small->full_step();
    EXPECT_EQ(emulator::blocking - before, 2);
    EXPECT_EQ(emulator::launches.size(), 1u);
    EXPECT_EQ(emulator::launches.begin()->second, 1u);
    EXPECT_TRUE(emulator::take_messages().empty());
}

// ----------------------------------------------------------------------------
// real sizes: a dry run, in which everything is launched and nothing runs

// A dry run of this thread's launches, which are recorded; what was found stays an error.
struct DryRun {
    std::vector<emulator::Note> given;
    DryRun() {
        emulator::dry = true;
        emulator::notes = &given;
    }
    ~DryRun() {
        emulator::notes = nullptr;
        emulator::dry = false;
        for (const std::string& message : emulator::take_messages())
            ADD_FAILURE() << message;
    }
};

// The sums of each kernel's blocks and whole arguments over all launches of a step.
typedef std::map<const void*, std::vector<int64_t>> Totals;
static Totals launched_totals(const Shape& shape, const Plan& plan, const emulator::Gpu& gpu) {
    DryRun run;
    emulator::gpu = gpu;
    {
        Trainer<bf16, cudaStream_t> t;
        t.ctx.where = open_stream(cudaStream_t{});
        trainer_place(t, shape, {plan}, plan.layout);
        trainer_allocate(t);
        t.data.window = random_window(shape, plan.T);
        run_plan(t, 0);
        trainer_free(t);
        close_stream(t.ctx.where);
    }
    emulator::gpu = emulator::AMPERE;

    // Add them up.
    Totals totals;
    for (const emulator::Note& g : run.given) {
        std::vector<int64_t>& sums = totals[g.what];
        sums.resize(std::max(sums.size(), g.numbers.size()));
        for (size_t i = 0; i < g.numbers.size(); i++) {
            EXPECT_GE(g.numbers[i], 0) << kernel_name(g.what) << ", number " << i;
            sums[i] += g.numbers[i];
        }
    }
    return totals;
}

// A product in 32 bits that overflows makes a number smaller when a sequence doubles: what was
// below 2^32 becomes 2^32 less than twice itself. Blocks of a grid, lengths of copies and of zeros,
// and whole numbers among arguments stay the same or grow, up to the longest sequences and
// vocabularies in use. Sums over a kernel's launches are compared, and no members of arguments.
TEST(RealSizes, NumbersOfLaunchesGrowWithTheSequence) {
    struct Case {
        const char* preset;
        size_t T, B;
    };
    for (Case c : {Case{"llama3-405b", 131072, 2}, {"gemma-2-2b", 131072, 1},
                   {"deepseek-v3", 65536, 1}, {"gpt-oss-120b", 131072, 1}})
        for (const emulator::Gpu& gpu : {emulator::AMPERE, emulator::HOPPER}) {
            Shape shape;
            for (const Preset& p : model_presets())
                if (c.preset == std::string(p.name)) shape = p.shape;
            shape.L = 2, shape.P = c.T;

            // Double the sequence, up to the real one.
            Totals before;
            for (size_t T = c.T / 4; T <= c.T; T *= 2) {
                Plan plan;
                plan.B = c.B, plan.T = T;
                Totals now = launched_totals(shape, plan, gpu);
                for (auto& [what, numbers] : now)
                    for (size_t i = 0; i < numbers.size() && before.count(what); i++)
                        EXPECT_GE(numbers[i], before[what][i])
                            << c.preset << ", T " << T << ": " << kernel_name(what) << ", " << i;
                before = now;
            }
        }
}

// Rows of 2 GiB and more are copied, though CUDA copies no matrix with such strides.
TEST(RealSizes, LongRowsAreCopied) {
    DryRun run;
    char* from = nullptr;
    size_t bytes = size_t(256000) * 4608 * 4; // Gemma 2 27B's table in float
    LLMC_CUDA_CHECK(cudaMalloc(&from, 2 * bytes));
    copy_rows(from + bytes, bytes, from, bytes, bytes, 1, cudaStream_t{});
    copy_rows(from + bytes, bytes / 2, from, bytes / 2, bytes / 2, 2, cudaStream_t{});
    ASSERT_EQ(run.given.size(), 2u);
    for (const emulator::Note& g : run.given) EXPECT_EQ(size_t(g.numbers[0]), bytes);
}

// A device that has too little room leaves no error behind for the next launch.
TEST(Device, TooLittleRoomIsForgotten) {
    EXPECT_EQ(device_memory(size_t(1) << 50, cudaStream_t{}), nullptr);
    launch(nothing_kernel, 1, 32, cudaStream_t{});
    EXPECT_EQ(host_memory(size_t(1) << 50, cudaStream_t{}), nullptr);
    launch(nothing_kernel, 1, 32, cudaStream_t{});
}
#endif
