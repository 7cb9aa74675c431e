// test_device.cpp - the whole step by the CUDA kernels against the whole step on the CPU
//   g++ -DEMULATE: the kernels run in the emulator; nvcc -x cu: on a GPU
#include <gtest/gtest.h>
#include "../llmc/evaluate.h"
#include "../llmc/generate.h"

static Shape tiny_gpt2() { return gpt2_shape(2, 2, 32, 61, 32); }
static Shape tiny_llama() {
    Shape s = llama_shape(2, 4, 2, 64, 44, 53, 64, 10000);
    s.qkv_bias = true, s.rope_scaling = {8, 1, 4, 16};
    return s;
}
static Shape tiny_alibi() {
    Shape s = tiny_llama();
    s.position = Position::ALIBI, s.tied = true;
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

template <typename T, typename S> struct Small {
    Trainer<T, S> t;
    Small(const Shape& s, const std::vector<Plan>& plans, S where = {}) {
        t.ctx.where = where;
        trainer_place(t, s, plans);
        trainer_allocate(t);
        init_constants(t);
        for (const Parameter& p : t.model.parameters) { // larger than at the start of a run
            std::vector<float> v(p.elements());
            for (size_t i = 0; i < p.file_elements(); i++)
                v[i] = p.init.value + float(0.2 * normal(5, fnv1a(p.name), i));
            set_weight(t, p, v.data());
        }
        t.hyper = {true, 1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.5f};
        t.window = random_window(s, plans[0].T);
    }
    ~Small() { trainer_free(t); }
    double step() {
        run_plan(t, 0);
        t.cursor += t.plans[0].B * size_t(t.plans[0].micro_batches);
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
};

static Plan train_plan(Recompute recompute, bool split) {
    Plan p;
    p.B = 2, p.T = 17, p.micro_batches = 2, p.recompute = recompute, p.split_backward = split;
    return p;
}

static double distance(const std::vector<double>& a, const std::vector<double>& b) {
    double d = 0, n = 1e-30;
    for (size_t i = 0; i < a.size(); i++) d += (a[i] - b[i]) * (a[i] - b[i]), n += b[i] * b[i];
    return std::sqrt(d / n);
}

// Gradients of the first step, and losses, norms and weights of three. `bound` is on gradients, in
// the norm of each parameter's; a key's bias has none but rounding (softmax does not see it) and is
// left out.
template <typename T> void compare(const Shape& shape, double bound, Recompute r, bool split) {
    Small<T, Cpu> cpu(shape, {train_plan(r, split)});
    Small<T, cudaStream_t> gpu(shape, {train_plan(r, split)});
    // AdamW's first steps are the signs of the gradient, whose smallest elements bf16 decides by chance
    cpu.t.hyper.adamw = gpu.t.hyper.adamw = sizeof(T) == 4;
    for (int step = 0; step < 3; step++) {
        double a = cpu.step(), b = gpu.step();
        EXPECT_NEAR(a, b, bound * a) << "step " << step;
        StepScale x = read_value<StepScale>(cpu.t, {Kind::SCALE}),
                  y = read_value<StepScale>(gpu.t, {Kind::SCALE});
        EXPECT_NEAR(x.norm, y.norm, 3 * bound * x.norm);
        EXPECT_EQ(y.finite, 1);
        EXPECT_EQ(y.step, step + 1);
        for (const Parameter& p : cpu.t.model.parameters) {
            if (step > 0 || p.name.find("k_proj.bias") != std::string::npos) continue;
            EXPECT_LT(distance(gpu.template values<acc_t<T>>(Kind::GRAD, p),
                               cpu.template values<acc_t<T>>(Kind::GRAD, p)),
                      3 * bound)
                << p.name;
        }
    }
}

// float: sums of other orders, a few 1e-7 each, through two blocks; bf16: each stored value may
// round another way by 2^-8, and does so at random
TEST(Device, StepInFloat) {
    for (const Shape& s : {tiny_gpt2(), tiny_llama(), tiny_alibi()})
        compare<float>(s, 1e-5, Recompute::NONE, false);
}
TEST(Device, StepInBf16) {
    for (const Shape& s : {tiny_gpt2(), tiny_llama(), tiny_alibi()})
        compare<bf16>(s, 1e-2, Recompute::NONE, false);
}
TEST(Device, RecomputedAndSplit) {
    compare<float>(tiny_gpt2(), 1e-5, Recompute::FULL, true);
    compare<float>(tiny_llama(), 1e-5, Recompute::SELECTIVE, true);
}

TEST(Device, RunsAreBitwiseEqual) {
    for (const Shape& s : {tiny_gpt2(), tiny_llama()}) {
        std::vector<std::vector<double>> all[2];
        for (auto& run : all) {
            Small<bf16, cudaStream_t> gpu(s, {train_plan(Recompute::NONE, false)});
            gpu.step(), gpu.step();
            for (const Parameter& p : gpu.t.model.parameters)
                run.push_back(gpu.template values<bf16>(Kind::WEIGHT, p));
        }
        EXPECT_EQ(all[0], all[1]);
    }
}

// A gradient that is not finite: the weights stay as they were, the step does not count.
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

// Threads that share a GPU, each with a stream: the losses and norms of threads on the CPU.
template <typename S> std::vector<double> losses_of_ranks(int dp, int pp, int zero) {
    std::vector<double> seen;
    int status = run_local_ranks(dp * pp, {}, [&](const Comm& world) {
        Plan p = train_plan(Recompute::FULL, false);
        Grid sizes;
        sizes.dp = dp, sizes.pp = pp;
        Grid me = grid_at(sizes, world.rank);
        p.pp = pp, p.pp_rank = me.pp_rank, p.shards = dp, p.shard = me.dp_rank, p.zero = zero;
        p.first_layer = split_layers(std::vector<double>(4, 1.0), pp);
        S stream = open_stream(S());
        {
            Small<float, S> rank(tiny_gpt2(), {p}, stream);
            rank.t.grid = me, rank.t.comms = make_comms(world, me, dp);
            for (int step = 0; step < 2; step++) {
                double loss = rank.step();
                double norm = read_value<StepScale>(rank.t, {Kind::SCALE}).norm;
                if (world.rank == 0) seen.push_back(loss), seen.push_back(norm);
            }
        }
        close_stream(stream);
    });
    EXPECT_EQ(status, 0);
    return seen;
}
TEST(Device, ThreadsShareAGpu) {
    for (auto [dp, pp, zero] : {std::tuple{2, 1, 3}, std::tuple{2, 2, 1}, std::tuple{1, 2, 0}}) {
        std::vector<double> gpu = losses_of_ranks<cudaStream_t>(dp, pp, zero),
                            cpu = losses_of_ranks<Cpu>(dp, pp, zero);
        ASSERT_EQ(gpu.size(), 4u);
        for (size_t i = 0; i < gpu.size(); i++) EXPECT_NEAR(gpu[i], cpu[i], 3e-5 * cpu[i]);
    }
}

template <typename S> std::vector<int> greedy(const Shape& shape) {
    Plan p;
    p.mode = Mode::GENERATE, p.B = 1, p.T = 5, p.cache = 20;
    Small<float, S> small(shape, {p});
    std::vector<int> ids;
    generate(small.t, 0, {1, 2, 3, 4, 5}, 15, Sampling{0}, [&](int id) { ids.push_back(id); });
    return ids;
}
TEST(Device, GreedyTokensAreTheCpus) {
    for (const Shape& s : {tiny_gpt2(), tiny_llama(), tiny_alibi()}) {
        std::vector<int> ids = greedy<cudaStream_t>(s);
        EXPECT_EQ(ids.size(), 15u);
        EXPECT_EQ(ids, greedy<Cpu>(s));
    }
}

TEST(Device, EvaluationIsTheCpus) {
    Plan p = train_plan(Recompute::NONE, false);
    p.mode = Mode::EVALUATE, p.micro_batches = 1;
    for (const Shape& s : {tiny_gpt2(), tiny_llama()}) {
        Small<float, Cpu> cpu(s, {p});
        Small<float, cudaStream_t> gpu(s, {p});
        double a = cpu.step();
        EXPECT_NEAR(gpu.step(), a, 1e-5 * a);
        std::vector<Candidate> want(5);
        for (size_t i = 0; i < want.size(); i++) {
            for (size_t k = 0; k <= p.T - i; k++)
                want[i].tokens.push_back(int(random_block(9, i, k)[0] % s.V));
            want[i].scored = 1 + i;
        }
        std::vector<Candidate> got = want;
        score_candidates(cpu.t, 0, want);
        score_candidates(gpu.t, 0, got);
        for (size_t i = 0; i < want.size(); i++) {
            EXPECT_LT(want[i].log_likelihood, 0);
            EXPECT_NEAR(got[i].log_likelihood, want[i].log_likelihood,
                        -1e-5 * want[i].log_likelihood);
            EXPECT_EQ(got[i].greedy, want[i].greedy);
        }
    }
}
