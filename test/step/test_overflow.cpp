// test_overflow.cpp - fp16's loss scale: other trainers' traces, exactness, steps that overflow in
// every layout, and a run that goes on between them
#ifdef _OPENMP
#include <omp.h>
#endif
#include "../../llmc/run/choose.h"
#include "../../llmc/run/training.h"
#include "../harness/testing.h"
#include "small_models.h"

namespace {

// ----------------------------------------------------------------------------
// the rule

// The rule of a trainer, with another window and hysteresis.
LossScaling rule_of(const char* name, int window, int hysteresis) {
    bool torch = std::string(name) == "pytorch";
    LossScaling rule = {.on = true, .window = window, .hysteresis = torch ? 1 : hysteresis};
    rule.late = std::string(name) == "deepspeed";
    rule.least = torch ? 0 : 1;
    return rule;
}

// log2 of the scale after each step. F is a finite step, X one that overflows.
std::vector<int> trace(const LossScaling& rule, const std::string& events) {
    LossScale s = begin_loss_scale(rule);
    std::vector<int> logs;
    for (char event : events) {
        next_loss_scale(&s, rule, event == 'F');
        logs.push_back(std::ilogb(s.now));
        EXPECT_EQ(s.now, std::ldexp(1.0f, logs.back()));
    }
    return logs;
}

// The scale moves as in three trainers. The traces were worked out by hand from
//   PyTorch      GradScaler (torch/amp/grad_scaler.py)
//   Megatron-LM  DynamicGradScaler (core/optimizer/grad_scaler.py)
//   DeepSpeed    DynamicLossScaler (runtime/fp16/loss_scaler.py)
TEST(LossScale, FollowsEachTrainersTrace) {
    const std::string events = "FFFFFXFXFFFFFXXFFFF";
    typedef std::vector<int> Logs;
    EXPECT_EQ(trace(rule_of("pytorch", 4, 2), events),
              (Logs{16, 16, 16, 17, 17, 16, 16, 15, 15, 15, 15, 16, 16, 15, 14, 14, 14, 14, 15}));
    EXPECT_EQ(trace(rule_of("megatron", 4, 2), events),
              (Logs{16, 16, 16, 17, 17, 17, 17, 16, 16, 16, 16, 17, 17, 17, 16, 16, 16, 16, 17}));
    EXPECT_EQ(trace(rule_of("deepspeed", 4, 2), events),
              (Logs{16, 16, 16, 16, 17, 17, 17, 16, 16, 16, 16, 16, 17, 17, 16, 16, 16, 16, 16}));
}

// The scale never rises to infinity, nor falls below the least one; a fixed scale does not move.
// The count of skipped steps starts again after a finite one.
TEST(LossScale, HasALeastAndALargest) {
    LossScaling rule = rule_of("pytorch", 1, 1);
    EXPECT_EQ(trace(rule, std::string(200, 'F')).back(), 127) << "never infinity";
    rule.least = 8;
    EXPECT_EQ(trace(rule, std::string(40, 'X')).back(), 3);
    rule.dynamic = false;
    EXPECT_EQ(trace(rule, "FFFFXXXX").back(), 16);
    LossScale s = begin_loss_scale(rule);
    for (bool finite : {false, false, true, false}) next_loss_scale(&s, rule, finite);
    EXPECT_EQ(s.skipped, 1) << "in a row";
}

// ----------------------------------------------------------------------------
// steps

// A rank's trainer, with a loss scale that halves at each overflow.
struct Rank : Fixture<fp16> {
    Rank(const Shape& shape, const Plan& plan, float start) : Fixture<fp16>(shape, {plan}) {
        t.hyper.loss_scaling = {.on = true, .start = start, .window = 3, .hysteresis = 1};
        init_loss_scale(t);
    }
    StepScale scale() const { return read_value<StepScale>(t, {Kind::SCALE}); }
};

// The bytes of weights, masters and moments of a rank.
std::vector<unsigned char> numbers(Rank& rank) {
    std::vector<unsigned char> all;
    const Trainer<fp16, Cpu>& t = rank.t;
    for (int b = 0; b < int(t.model.buckets.size()); b++)
        for (Data d : {Data{Kind::WEIGHT, b}, Data{Kind::MASTER, b}, Data{Kind::STATE, b, 0},
                       Data{Kind::STATE, b, 1}, Data{Kind::EMA, b}})
            if (const Place* place = arena_find(t.arena, t.plan, t.at, d)) {
                const unsigned char* from = t.arena.device().base + place->offset;
                all.insert(all.end(), from, from + place->bytes);
            }
    return all;
}

// The scale changes no bit of a step, because it is a power of two, as long as gradients neither
// overflow nor are subnormal.
TEST(LossScale, ChangesNoBit) {
    for (const Shape& shape : {small_gpt2(), small_llama()}) {
        std::vector<std::vector<unsigned char>> all;
        std::vector<double> norms;
        for (float start : {0x1p13f, 0x1p14f, 0x1p15f}) {
            Rank rank(shape, small_plan(3, 8, 2), start);
            for (int i = 0; i < 2; i++) rank.step();
            ASSERT_TRUE(rank.scale().finite);
            all.push_back(numbers(rank));
            norms.push_back(rank.scale().norm);
        }
        EXPECT_TRUE(all[1] == all[2]);
        EXPECT_EQ(norms[1], norms[2]);
        EXPECT_TRUE(all[0] == all[1]);
    }
}

// With a scale that is too large, steps are skipped until it fits. Then the run equals one that
// began with this scale, and with the data behind the skipped steps.
TEST(LossScale, FallsUntilGradientsFit) {
    // Skip steps. A mean of weights stays, too.
    Plan plan = small_plan(3, 8, 2);
    plan.ema = true;
    Rank rank(small_gpt2(), plan, 0x1p30f);
    rank.t.hyper.ema = 0.5;
    int skipped = 0;
    while (skipped < 40) {
        auto before = numbers(rank);
        rank.step();
        if (rank.scale().finite) break;
        skipped++;
        EXPECT_TRUE(numbers(rank) == before) << "a skipped step changes no weight";
        EXPECT_EQ(rank.scale().loss.now, std::ldexp(0x1p30f, -skipped));
        EXPECT_EQ(rank.scale().loss.skipped, skipped);
        EXPECT_EQ(rank.scale().step, 0) << "Adam does not count it";
    }
    EXPECT_GT(skipped, 2);
    EXPECT_LT(skipped, 20);
    EXPECT_EQ(rank.scale().step, 1);

    // Begin with the scale that fits.
    Rank other(small_gpt2(), plan, std::ldexp(0x1p30f, -skipped));
    other.t.hyper.ema = 0.5;
    other.t.data.cursor = uint64_t(skipped) * 6;
    other.step();
    EXPECT_TRUE(numbers(rank) == numbers(other));
}

// Training in fp16 follows training in float: losses within 1% and norms within 2%, over five
// steps. fp16 has 11 significant bits, and sums of squares hardly depend on the last one.
TEST(LossScale, TrainsAsFloatDoes) {
    for (const Shape& shape : {small_gpt2(), small_llama()}) {
        Rank half(shape, small_plan(3, 8, 2), 0x1p12f);
        Fixture<float> single(shape, {small_plan(3, 8, 2)});
        single.t.hyper.lr = half.t.hyper.lr = 1e-3f;
        for (int i = 0; i < 5; i++) {
            double a = half.step(), b = single.step();
            EXPECT_NEAR(a, b, 0.01 * b) << i;
            double norm = read_value<StepScale>(single.t, {Kind::SCALE}).norm;
            EXPECT_NEAR(half.scale().norm, norm, 0.02 * norm) << i;
        }
    }
}

// ----------------------------------------------------------------------------
// layouts

struct Case {
    int dp, tp, pp, zero;
    bool sequence_parallel;
};

// Plant infinities in a gradient of one rank: all ranks must skip the step, and have
// the same scale.
void overflow_on_one_rank(const Case& c, int culprit) {
    Layout sizes = small_layout(c.dp, c.tp, c.pp);
    sizes.zero = c.zero;
    sizes.sequence_parallel = c.sequence_parallel;
    std::mutex mutex;
    std::vector<std::string> wrong;
    int ranks = c.dp * c.tp * c.pp;
    EXPECT_EQ(run_local_ranks(ranks, {}, [&](const Comm& world) {
#ifdef _OPENMP
        omp_set_num_threads(1);
#endif
        Shape shape = small_llama();
        Plan plan = small_plan(2, 8, 2);
        plan.layout = layout_at(sizes, world.rank);
        plan.layout.first_layer =
            split_layers(std::vector<double>(shape.L + 2, 1.0), plan.layout.stages());

        // Run a step that is finite.
        Rank rank(shape, plan, 0x1p12f);
        auto& t = rank.t;
        t.comms = make_comms(world, plan.layout, ranks_of_kv_head(plan.layout, t.model));
        auto says = [&](bool good, const char* what) {
            std::lock_guard<std::mutex> lock(mutex);
            if (!good) wrong.push_back(concat("rank ", world.rank, ": ", what));
        };
        rank.step();
        says(rank.scale().finite && rank.scale().step == 1, "the first step");
        auto before = numbers(rank);

        // Fill a gradient with infinity after the first backward pass of a layer of the culprit's.
        bool planted = false;
        t.hooks.after = [&](const Action& a) {
            if (world.rank != culprit || planted || !reaches_weights(a.op)) return;
            for (int b : buckets_of(t.model, a.layer)) {
                Data d = {gradient_kind(t.layout, t.model, b, a.layer), b};
                float* grad = address<float>(t, d);
                if (!grad) continue;
                std::fill_n(grad, t.model.buckets[size_t(b)].elements, INFINITY);
                planted = true;
            }
        };

        // The step is skipped.
        rank.step();
        t.hooks.after = nullptr;
        says(world.rank != culprit || planted, "nothing was planted");
        says(!rank.scale().finite, "the step is not skipped");
        says(rank.scale().step == 1, "the step counts");
        says(rank.scale().loss.now == 0x1p11f, "another scale");
        says(numbers(rank) == before, "weights have changed");

        // The next step is finite again, and changes weights. Shards are whole chunks, and in a
        // model this small the first rank has all of them.
        rank.step();
        says(rank.scale().finite && rank.scale().step == 2, "the next step");
        says(numbers(rank) != before || plan.layout.dp.rank > 0, "it changes nothing");
    }), 0);
    EXPECT_EQ(wrong, std::vector<std::string>())
        << "dp " << c.dp << " tp " << c.tp << " pp " << c.pp << " zero " << c.zero;
}

// In every kind of layout an overflow on the first or on the last rank is skipped by all.
TEST(LossScale, AllRanksSkipWhatOneRankOverflows) {
    for (const Case& c : std::vector<Case>{{2, 1, 1, 0, false},
                                           {2, 1, 1, 1, false},
                                           {2, 1, 1, 2, false},
                                           {2, 1, 1, 3, false},
                                           {1, 2, 1, 0, false},
                                           {1, 2, 1, 0, true},
                                           {1, 1, 3, 0, false},
                                           {2, 2, 2, 3, true}})
        for (int culprit : {0, c.dp * c.tp * c.pp - 1}) overflow_on_one_rank(c, culprit);
}

// ----------------------------------------------------------------------------
// the command line

// Parse these flags, and choose the loss scaling: "" or what is wrong.
std::string chosen(LossScaling* scaling, const std::vector<std::string>& flags) {
    Config c;
    std::vector<const char*> words = {"train_gpt"};
    for (const std::string& f : flags) words.push_back(f.c_str());
    std::string wrong = parse_arguments(c, int(words.size()), (char**)words.data());
    return wrong.empty() ? choose_loss_scaling(c, scaling) : wrong;
}

// Only fp16 has a loss scale. Its numbers are Megatron-LM's, but the first scale is PyTorch's:
// 2^16 and not 2^32.
TEST(LossScale, IsChosenByFlags) {
    LossScaling none;
    EXPECT_EQ(chosen(&none, {}), "");
    EXPECT_FALSE(none.on);

    LossScaling plain;
    EXPECT_EQ(chosen(&plain, {"--precision", "fp16"}), "");
    EXPECT_TRUE(plain.on && plain.dynamic);
    EXPECT_EQ(plain.start, 65536);
    EXPECT_EQ(plain.window, 1000);
    EXPECT_EQ(plain.hysteresis, 2);
    EXPECT_EQ(plain.least, 1);

    LossScaling fixed;
    EXPECT_EQ(chosen(&fixed, {"--precision", "fp16", "--loss-scale", "1024"}), "");
    EXPECT_EQ(fixed.start, 1024);
    EXPECT_FALSE(fixed.dynamic);
}

// Flags that would do nothing, or numbers that are no power of two, are refused.
TEST(LossScale, BadFlagsAreNamed) {
    auto wrong = [](const std::vector<std::string>& flags) {
        LossScaling scaling;
        return chosen(&scaling, flags);
    };
    EXPECT_HAS(wrong({"--loss-scale", "1024"}), "give --precision fp16");
    EXPECT_HAS(wrong({"--precision", "fp16", "--loss-scale", "1000"}), "try 512 or 1024");
    EXPECT_HAS(wrong({"--precision", "fp16", "--loss-scale", "big"}), "or dynamic");
    EXPECT_HAS(wrong({"--precision", "fp16", "--loss-scale", "0"}), "from 1");
    EXPECT_HAS(wrong({"--loss-scale-rule", "apex"}), "--loss-scale-rule is gone: the rule is");
}

// A step counts as skipped only if fp16's loss scaling is on and its gradient is not finite.
TEST(LossScale, ARunOfSkippedStepsEnds) {
    llmc::Run run;
    LossScaling scaling;
    StepScale scale = {INFINITY, 1, 0, 0, {1, 0, 0, MOST_SKIPPED - 1}};
    EXPECT_FALSE(is_skipped(run, scaling, scale)) << "without fp16 it is a step that diverged";
    scaling.on = true;
    EXPECT_TRUE(is_skipped(run, scaling, scale));
    EXPECT_FALSE(is_skipped(run, scaling, {1, 1, 1, 5, {1, 0, 0, 0}}));
}

} // namespace
