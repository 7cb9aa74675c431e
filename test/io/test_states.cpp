// test_states.cpp - small masters and moments: exact, or unbiased where they round at random
//   Every layout has the same numbers, checkpoints keep them to the bit, and training is as good.
#include "../../llmc/io/explain.h"
#include "../../llmc/optimizer.h"
#include "saved_models.h"

struct Saved : Scratch {};

namespace {

float float_of(uint32_t bits) { return bits_as<float>(bits); }
uint32_t bits_of(float x) { return bits_as<uint32_t>(x); }

std::vector<float> drawn(size_t n, const char* name, uint64_t seed = 1, float std = 1) {
    std::vector<float> x(n);
    fill_normal(x.data(), seed, fnv1a(name), 0, n, std);
    return x;
}

// ----------------------------------------------------------------------------
// remainders

// A float comes back from its two parts. Its weight is the nearest bf16; only at exact ties it may
// differ from rounding to even.
void expect_exact(uint32_t u) {
    SplitFloat parts = split_float(float_of(u));
    float weight = to_float(bf16{parts.weight}), joined = join_float(parts);
    if ((u & 0x7fffffff) > 0x7f800000) {
        ASSERT_TRUE(weight != weight && joined != joined) << std::hex << u;
        return;
    }
    ASSERT_EQ(bits_of(joined), u);
    bool tie = uint16_t(u) == 0x8000;
    uint16_t even = from_acc<bf16>(float_of(u)).bits;
    ASSERT_EQ(parts.weight, tie ? uint16_t((u >> 16) + 1) : even) << std::hex << u;
}

TEST(Remainders, JoinToTheSameBits) {
    for (uint32_t upper = 0; upper < 65536; upper++)
        for (uint32_t lower : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
            expect_exact(upper << 16 | lower);
    for (uint64_t i = 0; i < 1000000; i++) expect_exact(random_block(3, 4, i)[0]);
}

// A hundred steps with the same gradients: after each step the remainders have the
// bits of float masters.
TEST(Remainders, AreFloatMasters) {
    const size_t n = 3001;
    std::vector<float> master = drawn(n, "w", 1, 0.02f), m(n), v(n), m2(n), v2(n);
    std::vector<bf16> weight(n), upper(n);
    std::vector<uint16_t> lower(n);
    for (size_t i = 0; i < n; i++) {
        SplitFloat parts = split_float(master[i]);
        upper[i] = {parts.weight}, lower[i] = parts.remainder;
    }

    AdamW h = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f};
    int ties = 0, moved = 0;
    for (h.step = 1; h.step <= 100; h.step++) {
        std::vector<float> g = drawn(n, "g", uint64_t(h.step)), before = master;
        adamw_update(weight.data(), master.data(), g.data(), m.data(), v.data(), n, h, nullptr,
                     Cpu{});
        TensorRow row = {0, n};
        AdamWMemory<bf16> memory = {upper.data(),     lower.data(), g.data(), m2.data(),
                                    v2.data(), Masters::REMAINDER};
        adamw_update(memory, &row, 1, h, nullptr, Cpu{});
        ASSERT_TRUE(m == m2 && v == v2);

        // At a tie the weight may be the other neighbour.
        for (size_t i = 0; i < n; i++) {
            ASSERT_EQ(join_float({upper[i].bits, lower[i]}), master[i]);
            bool tie = uint16_t(bits_of(master[i])) == 0x8000;
            ties += tie, moved += master[i] != before[i];
            if (!tie) {
                ASSERT_EQ(upper[i].bits, weight[i].bits) << master[i];
            }
        }
    }
    EXPECT_GT(moved, int(99 * n));
    EXPECT_GT(ties, 0) << "of 300,000 numbers about 5";
}

// ----------------------------------------------------------------------------
// rounding at random

// Only the two neighbours are taken, and on average the number itself: within 4 standard
// errors of 2^20 draws.
TEST(Rounding, IsUnbiased) {
    constexpr size_t N = size_t(1) << 20;
    for (float x : {1.001f, -3.0007f, 7.77e-5f}) {
        double low = to_float(bf16{uint16_t(bits_of(x) >> 16)});
        double high = to_float(bf16{uint16_t((bits_of(x) >> 16) + 1)}), sum = 0;
        RoundingBits random(5, 1, fnv1a("x"));
        for (size_t i = 0; i < N; i++) {
            double y = to_float(round_stochastic<bf16>(x, random(i)));
            ASSERT_TRUE(y == low || y == high);
            sum += y - x;
        }
        double up = (x - low) / (high - low);
        double sigma = std::fabs(high - low) * std::sqrt(up * (1 - up) / N);
        EXPECT_LT(std::fabs(sum / N), 4 * sigma) << x;

        // A piece of a tensor draws by the index in the whole.
        TensorRow row = {.offset = 0, .n = 64, .start = 2, .run = 4, .gap = 3};
        for (size_t i = 0; i < row.n; i++)
            EXPECT_EQ(to_float(Bf16Moment<ROUND_M>{nullptr, true, 5}.rounded(x, random, row, i)),
                      to_float(round_stochastic<bf16>(x, random(2 + i + i / 4 * 3))));
    }
}

// Both moments hold the same number, yet they are rounded independently.
TEST(Rounding, HasAStreamForEachMoment) {
    const size_t n = 1000;
    std::vector<float> g(n), w(n);
    std::vector<bf16> m(n, bf16{0x3f81}), v = m;
    AdamWMemory<float> memory = {w.data(), nullptr,         g.data(),    m.data(),
                                 v.data(), Masters::FLOAT, States::BF16};
    TensorRow row = {0, n, false, 77};
    AdamW h = {0, 0.9f, 0.9f, 1e-8f, 0, true, 5};
    adamw_update(memory, &row, 1, h, nullptr, Cpu{});

    size_t same = 0;
    for (size_t i = 0; i < n; i++) same += m[i].bits == v[i].bits;
    EXPECT_LT(same, n);
    EXPECT_GT(same, n / 8);
    EXPECT_FLOAT_EQ(to_float(m[0]) + to_float(v[0]) > 1.8f, true);
}

// A piece of a tensor rounds as it does within the whole tensor, wherever ranks cut it: the same
// gradients give the same weights.
TEST(Rounding, IsTheSameForAnyTensorParallelism) {
    Shape gpt2 = gpt2_shape(1, 4, 24, 61, 32), llama = llama_shape(1, 8, 2, 32, 48, 53, 64, 1e4);
    llama.block.qk_norm = llama.attention.qkv_bias = true;
    AdamW h = {0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, true, 11, 3};
    auto update = [&](std::vector<bf16>& w, const std::vector<float>& g, const TensorRow& row) {
        std::vector<float> m(w.size()), v(w.size());
        AdamWMemory<bf16> memory = {w.data(), nullptr, g.data(), m.data(), v.data()};
        adamw_update(memory, &row, 1, h, nullptr, Cpu{});
    };
    for (const Shape& shape : {gpt2, llama})
        for (int tp : {1, 2, 4})
            for (int rank = 0; rank < tp; rank++) {
                Layout layout = small_layout(1, tp);
                layout.tp.rank = rank;
                Model whole = make_model(shape), model = make_model(shape, layout);
                int block = find_bucket(model, Role::BLOCK, 1);
                for (const TensorRow& row : tensor_rows(model, block, 0, ~size_t(0))) {
                    // Find the parameter, and take its elements as the whole and
                    // as this rank's piece.
                    size_t i = 0;
                    while (fnv1a(model.parameters[i].name) != row.hash) i++;
                    const Parameter& p = whole.parameters[i];
                    size_t n = p.elements();
                    std::vector<float> g = drawn(n, "g"), w = drawn(n, "w");
                    std::vector<bf16> all(n), piece;
                    std::vector<float> part;
                    for (size_t k = 0; k < n; k++) all[k] = from_acc<bf16>(w[k]);
                    for_each_run(model.parameters[i], rank, tp,
                                 [&](size_t, size_t global, size_t count) {
                                     for (size_t k = global; k < global + count; k++)
                                         piece.push_back(all[k]), part.push_back(g[k]);
                                 });
                    ASSERT_EQ(piece.size(), row.n);

                    // Update both, and compare.
                    TensorRow alone = {0, n, row.decay, row.hash}, mine = row;
                    mine.offset = mine.second = 0;
                    update(all, g, alone);
                    update(piece, part, mine);

                    for_each_run(model.parameters[i], rank, tp,
                                 [&](size_t local, size_t global, size_t count) {
                                     for (size_t k = 0; k < count; k++)
                                         ASSERT_EQ(piece[local + k].bits, all[global + k].bits)
                                             << p.name << " tp " << tp << " rank " << rank;
                                 });
                }
            }
}

// ----------------------------------------------------------------------------
// 8 bits

// The lengths, the order and the ends of bitsandbytes' maps (functional.py, create_dynamic_map).
TEST(EightBits, HaveTheMapsOfThePaper) {
    for (bool is_signed : {false, true}) {
        for (int k = 1; k < 256; k++)
            ASSERT_LT(dynamic_value(is_signed, k - 1), dynamic_value(is_signed, k)) << k;
        EXPECT_EQ(dynamic_value(is_signed, 255), 1);
        EXPECT_EQ(dynamic_value(is_signed, is_signed ? 127 : 0), 0);

        // Each decade has twice as many values as the one below it, at the middles of equal parts.
        int code = is_signed ? 128 : 1;
        for (int decade = 0, n = is_signed ? 1 : 2; decade < 7; decade++, n *= 2)
            for (int k = 0; k < n; k++, code++) {
                double want = (0.1 + 0.9 * (k + 0.5) / n) * std::pow(10.0, decade - 6);
                EXPECT_NEAR(dynamic_value(is_signed, code), want, want * 0x1p-23);
                if (is_signed) {
                    EXPECT_EQ(dynamic_value(true, 254 - code), -dynamic_value(true, code));
                }
            }
        EXPECT_EQ(code, 255);
    }
    EXPECT_FLOAT_EQ(dynamic_value(true, 0), -0.99296875f);
    EXPECT_FLOAT_EQ(dynamic_value(true, 128), 5.5e-7f);
    EXPECT_FLOAT_EQ(dynamic_value(false, 1), 3.25e-7f);
    EXPECT_FLOAT_EQ(dynamic_value(false, 254), 0.99648437f);
}

// No other code is nearer, over seven decades and at the middles between codes. Of two equally near
// codes the lower is taken.
TEST(EightBits, TakeTheNearestCode) {
    for (bool is_signed : {false, true}) {
        DynamicMap map = dynamic_map(is_signed);
        auto expect_nearest = [&](float x) {
            int code = dynamic_code(map, x);
            auto away = [&](int k) { return std::fabs(double(x) - map.value[k]); };
            ASSERT_TRUE(code == 0 || away(code) < away(code - 1)) << x;
            ASSERT_TRUE(code == 255 || away(code) <= away(code + 1)) << x;
        };

        for (uint64_t i = 0; i < 100000; i++) {
            double z = normal(1, 2, i);
            float x = float(z * std::pow(10.0, -7.0 * uniform(1, 3, i)));
            if (std::fabs(x) <= 1) expect_nearest(is_signed ? x : std::fabs(x));
        }

        for (int k = 0; k < 255; k++) {
            float middle = (map.value[k] + map.value[k + 1]) / 2;
            for (float x : {map.value[k], middle, std::nextafter(middle, -2.0f),
                            std::nextafter(middle, 2.0f)})
                if (is_signed || x >= 0) expect_nearest(x);
        }
    }
}

// Numbers from a file make the same codes and absmaxes again: blocks of any magnitude, of zeros, of
// one sign, and a last block that is shorter.
TEST(EightBits, ComeBackFromNumbers) {
    const size_t n = 60 * STATE_BLOCK + 77;
    TensorRow row = {0, n};
    row.small = true;
    for (bool is_signed : {false, true}) {
        std::vector<float> x(n), read(n);
        for (size_t i = 0; i < n; i++) {
            size_t block = i / STATE_BLOCK;
            double size = std::pow(10.0, -double(block)) * std::pow(10.0, -7 * uniform(5, 1, i));
            x[i] = float(block == 7 ? 0 : normal(5, 2, i) * size);
            if (!is_signed || block == 8) x[i] = std::fabs(x[i]);
            if (is_signed && block == 9) x[i] = -std::fabs(x[i]);
        }

        // Go to codes and back twice.
        std::vector<unsigned char> bytes(state_bytes(n, true)), again = bytes;
        bytes_of_numbers(bytes.data(), x.data(), row, is_signed);
        numbers_of_bytes(read.data(), bytes.data(), row, is_signed);
        bytes_of_numbers(again.data(), read.data(), row, is_signed);
        EXPECT_TRUE(bytes == again) << is_signed;

        // The error is at most half of the widest step, 0.9 / 64, of the block's largest number.
        float most = *std::max_element(x.begin(), x.begin() + STATE_BLOCK);
        for (size_t i = 0; i < STATE_BLOCK; i++)
            EXPECT_NEAR(
                read[i], x[i],
                0.008 * std::fmax(most, -*std::min_element(x.begin(), x.begin() + STATE_BLOCK)));
    }
}

// ----------------------------------------------------------------------------
// runs

struct Formats {
    Masters masters = Masters::FLOAT;
    States states = States::FLOAT;
    bool muon = false, normuon = false;
    std::string text() const {
        const char* names[] = {"float", "remainder", "none"};
        return concat("masters ", names[int(masters)], ", states ", states_name(states));
    }
};

template <typename T>
std::unique_ptr<Small<T>> model_of(const Shape& s, Formats f, uint64_t seed = 3) {
    Plan plan = plan_of(Mode::TRAIN, 2, 16);
    if (f.states == States::EIGHT_BIT) plan.layout.tensor_align = STATE_BLOCK;
    plan.masters = f.masters;
    plan.states = f.states;
    plan.layout.muon = f.muon;
    if (f.muon) plan.optimizer = f.normuon ? Optimizer::NORMUON : Optimizer::MUON;
    auto m = std::make_unique<Small<T>>(s, std::vector<Plan>{plan});
    fill_weights(m->t, seed);
    m->t.data.window = squares_window(s.V);
    m->t.hyper.seed = 5;
    return m;
}
template <typename T> void step(Small<T>& m) {
    run_plan(m.t, 0);
    m.t.data.cursor += 2;
}

// All numbers that a checkpoint must bring back.
template <typename T> std::vector<float> numbers_of(const Small<T>& m) {
    std::vector<float> all;
    for (const StateTensor& s : state_tensors(m.t))
        for (acc_t<T> x : fetch_numbers(m.t, s.data, *s.p)) all.push_back(float(x));
    for (const Parameter& p : m.t.model.parameters)
        for (T x : fetch<T>(m.t, {Kind::WEIGHT, p.bucket}, p)) all.push_back(to_float(x));
    return all;
}

// Training with remainders has the bits of training with float masters, from the first weights on.
TEST(Runs, WithRemaindersAreThoseWithFloatMasters) {
    for (bool muon : {false, true}) {
        Formats wide = {Masters::FLOAT, States::FLOAT, muon}, split = wide;
        split.masters = Masters::REMAINDER;
        auto a = model_of<bf16>(saved_shapes()[0], wide), b = model_of<bf16>(saved_shapes()[0], split);
        for (int i = 0; i < 5; i++) {
            EXPECT_TRUE(numbers_of(*a) == numbers_of(*b)) << "step " << i;
            step(*a), step(*b);
        }
        for (const Parameter& p : a->t.model.parameters)
            EXPECT_EQ(get_weight(a->t, p), get_weight(b->t, p)) << p.name;

        // Second moments of eight vectors, each in 128 floats: Muon's matrices take no room.
        int block = find_bucket(a->t.model, Role::BLOCK, 1);
        auto bytes = [&](int s) { return a->t.arena.lasting[{Kind::STATE, block, s}].bytes; };
        EXPECT_EQ(bytes(1), muon ? 8 * 128 * sizeof(float) : bytes(0));
    }
}

// A weight that lies exactly between two bf16 numbers stands for itself, not for a neighbour.
TEST(Runs, TakeWeightsThatAreTies) {
    auto m = model_of<bf16>(saved_shapes()[0], {Masters::REMAINDER});
    const Parameter& p = m->t.model.parameters[2];
    std::vector<float> ties(p.elements());
    for (size_t i = 0; i < ties.size(); i++) ties[i] = float_of(0x3f808000u + uint32_t(i << 16));
    set_weight(m->t, p, ties.data());
    EXPECT_EQ(get_weight(m->t, p), ties);
    EXPECT_EQ(parameter_bytes<bf16>(m->t.plans[0], m->t.model).optimizer, 2 + 8);
}

// Without masters small steps count only if weights round at random. Rounded to nearest they would
// be lost, and the weights would stand still.
TEST(Runs, WithoutMastersMoveBySmallSteps) {
    auto moved = [](bool stochastic, bool muon = false) {
        auto m = model_of<bf16>(saved_shapes()[0], {Masters::NONE, States::FLOAT, muon});
        m->t.hyper.lr = 1e-6f, m->t.hyper.weight_decay = 0, m->t.hyper.stochastic = stochastic;
        const std::vector<Parameter>& all = m->t.model.parameters;
        const Parameter& p = *std::find_if(all.begin(), all.end(),
                                           [&](const Parameter& x) { return x.muon == muon; });
        std::vector<float> before = get_weight(m->t, p);
        for (int i = 0; i < 4; i++) step(*m);
        std::vector<float> after = get_weight(m->t, p);
        size_t count = 0;
        for (size_t i = 0; i < after.size(); i++)
            count += after[i] != before[i] && std::fabs(before[i]) > 0.01f;
        return count;
    };
    EXPECT_EQ(moved(false), 0u);
    EXPECT_GT(moved(true), 0u);
    EXPECT_EQ(moved(false, true), 0u);
    EXPECT_GT(moved(true, true), 0u);

    auto a = model_of<bf16>(saved_shapes()[0], {Masters::NONE});
    auto b = model_of<bf16>(saved_shapes()[0], {Masters::NONE});
    b->t.hyper.seed++;
    step(*a), step(*b);
    EXPECT_FALSE(numbers_of(*a) == numbers_of(*b)) << "--seed says how they are rounded";
}

// A checkpoint keeps small masters and moments to the bit, and a run goes on from it as
// it would have gone on.
TEST_F(Saved, ToTheBit) {
    for (const Shape& shape : {saved_shapes()[0], gpt2_shape(2, 4, 64, 61, 16)})
        for (Formats f : {Formats{Masters::REMAINDER}, Formats{Masters::NONE, States::BF16},
                          Formats{Masters::FLOAT, States::EIGHT_BIT},
                          Formats{Masters::REMAINDER, States::BF16, true, true}}) {
            SCOPED_TRACE(f.text());
            auto a = model_of<bf16>(shape, f), b = model_of<bf16>(shape, f, 4);
            for (int i = 0; i < 3; i++) step(*a);
            step(*b);

            ASSERT_EQ(checkpoint_save(a->t, {3, a->t.data.cursor, 5, {}}, dir, 1), "");
            CheckpointInfo info;
            std::vector<std::string> notes;
            ASSERT_EQ(checkpoint_load(b->t, &info, dir, &notes), "");
            EXPECT_TRUE(numbers_of(*a) == numbers_of(*b));
            b->t.data.cursor = info.cursor;
            step(*a), step(*b);
            EXPECT_TRUE(numbers_of(*a) == numbers_of(*b)) << "and both go on alike";

            // Masters of another kind take the same numbers.
            if (f.muon) continue;
            auto floats = model_of<bf16>(shape, {}, 6);
            ASSERT_EQ(checkpoint_load(floats->t, &info, dir, &notes), "");
            ASSERT_EQ(checkpoint_load(b->t, &info, dir, &notes), "");
            for (size_t i = 0; i < b->t.model.parameters.size(); i++)
                EXPECT_EQ(get_weight(floats->t, floats->t.model.parameters[i]),
                          get_weight(b->t, b->t.model.parameters[i]));
        }
}

// Each layout reads what another one has written: the same numbers, and so the same weights.
TEST_F(Saved, FromAnyLayoutToAnyOther) {
    struct Case {
        int dp, tp, pp, zero;
    };
    const Case cases[] = {{1, 1, 1, 0}, {2, 1, 1, 1}, {2, 1, 1, 3}, {1, 2, 1, 0}, {2, 1, 2, 2}};
    Shape shape = gpt2_shape(2, 4, 64, 100, 16);

    auto on_ranks = [&](const Case& c, Formats f, auto body) {
        Layout sizes = small_layout(c.dp, c.tp, c.pp);
        sizes.zero = c.zero;
        if (f.states == States::EIGHT_BIT) sizes.tensor_align = STATE_BLOCK;
        sizes.first_layer = split_layers(std::vector<double>(shape.L + 2, 1.0), c.pp);
        EXPECT_EQ(run_local_ranks(c.dp * c.tp * c.pp, {}, [&](const Comm& world) {
            omp_set_num_threads(1);
            Plan p = plan_of(Mode::TRAIN, 1, 16);
            p.micro_batches = 4 / c.dp;
            p.layout = layout_at(sizes, world.rank);
            p.masters = f.masters;
            p.states = f.states;
            Small<bf16> m(shape, {p});
            m.t.comms = make_comms(world, p.layout, ranks_of_kv_head(p.layout, m.t.model));
            fill_weights(m.t, 3);
            m.t.data.window = squares_window(shape.V);
            body(m);
        }), 0);
    };

    auto words = [](const Small<bf16>& m) { // without padding, which depends on the layout
        std::vector<float> all;
        for (const StateTensor& s : state_tensors(m.t)) {
            std::vector<float> x = fetch_numbers(m.t, s.data, *s.p);
            all.insert(all.end(), x.begin(), x.begin() + long(s.p->file_elements()));
        }
        return all;
    };

    // Save one step in each layout, and load it in each.
    for (Formats f : {Formats{Masters::REMAINDER}, Formats{Masters::NONE, States::BF16},
                      Formats{Masters::REMAINDER, States::EIGHT_BIT}})
        for (const Case& from : cases) {
            std::vector<float> saved;
            fs::remove_all(dir + "/out"), fs::create_directories(dir + "/out");
            on_ranks(from, f, [&](Small<bf16>& m) {
                run_plan(m.t, 0);
                EXPECT_EQ(checkpoint_save(m.t, {1, 4, 0, {}}, dir + "/out", 1), "");
                std::vector<float> mine = words(m);
                if (m.t.comms.world.rank == 0) saved = mine;
            });

            for (const Case& to : cases)
                on_ranks(to, f, [&](Small<bf16>& m) {
                    CheckpointInfo info;
                    std::vector<std::string> notes;
                    EXPECT_EQ(checkpoint_load(m.t, &info, dir + "/out", &notes), "");
                    bool anew = f.states == States::EIGHT_BIT && from.tp != to.tp;
                    EXPECT_EQ(notes.size(), anew ? 1u : 0u) << "other pieces have other blocks";
                    EXPECT_TRUE(anew || words(m) == saved)
                        << f.text() << " from dp " << from.dp << " tp " << from.tp << " pp "
                        << from.pp << " to dp " << to.dp << " tp " << to.tp << " pp " << to.pp;
                    run_plan(m.t, 0);
                });
        }
}

// ----------------------------------------------------------------------------
// training

// The mean loss of the last 100 of 300 steps on a chain of tokens, where three in four tokens
// follow from the one before. The weights are float, so runs differ only in their moments. The loss
// comes near the chain's entropy, so differences between runs are not chaos.
double loss_after_training(States states, float beta2, bool stochastic = true) {
    Shape shape = gpt2_shape(1, 2, 64, 61, 16);
    Plan plan = plan_of(Mode::TRAIN, 4, 16);
    plan.states = states;
    if (states == States::EIGHT_BIT) plan.layout.tensor_align = STATE_BLOCK;
    Small<float> m(shape, {plan});
    init_weights(m.t, 1);
    m.t.data.window = [](uint64_t sample, int* tokens, int* targets) {
        uint32_t token = random_block(7, 1, sample * 64)[0] % 61;
        for (uint64_t i = 0; i < 16; i++) {
            RandomWords random = random_block(7, 2, sample * 64 + i);
            tokens[i] = int(token);
            token = random[0] % 4 ? (token * 7 + 3) % 61 : random[1] % 61;
            targets[i] = int(token);
        }
        return std::string();
    };

    m.t.hyper = {1e-3f, 0.9f, beta2, 1e-8f, 0.1f, 1, {}, 5, stochastic};
    double sum = 0;
    for (int i = 0; i < 300; i++) {
        run_plan(m.t, 0);
        m.t.data.cursor += 4;
        if (i >= 200) sum += plan_loss(m.t).mean();
    }
    return sum / 100;
}

constexpr double BF16_GAP = 0.0005, EIGHT_BIT_GAP = 0.002; // relative to the loss of float moments

TEST(Training, WithSmallMomentsIsAsGood) {
    for (float beta2 : {0.95f, 0.999f}) {
        double want = loss_after_training(States::FLOAT, beta2);
        double gap = std::fabs(loss_after_training(States::BF16, beta2) / want - 1);
        printf("beta2 %g: float %.6f, bf16 off by %.4f%%\n", double(beta2), want, 100 * gap);
        EXPECT_LT(gap, BF16_GAP) << beta2;
        gap = std::fabs(loss_after_training(States::EIGHT_BIT, beta2) / want - 1);
        printf("beta2 %g: 8 bits off by %.4f%%\n", double(beta2), 100 * gap);
        EXPECT_LT(gap, EIGHT_BIT_GAP) << beta2;
    }
}

// The mean loss (w - noise)^2 / 2 over the last third of many steps: w hovers about 0, as close as
// the moments let it. A second moment that rounds to nearest stands still once a step adds less
// than half a unit in its last place, which is after 1 / (256 (1 - beta2)) of what it forgets.
double loss_of_hovering(States states, bool stochastic) {
    const size_t n = 2048;
    const int64_t steps = 3000;
    std::vector<float> w(n, 1.0f), g(n);
    std::vector<unsigned char> m(4 * n), v(4 * n);
    AdamWMemory<float> memory = {w.data(), nullptr,         g.data(), m.data(),
                                 v.data(), Masters::FLOAT, states};
    TensorRow row = {0, n, false, 5};
    AdamW h = {0.05f, 0.9f, 0.999f, 1e-8f, 0, stochastic, 3};

    double sum = 0;
    for (h.step = 1; h.step <= steps; h.step++) {
        fill_normal(g.data(), uint64_t(h.step), 9, 0, n,
                    h.step < 100 ? 3 : 1); // minus the noise
        for (size_t i = 0; i < n; i++) {
            g[i] += w[i];
            if (h.step > 2 * steps / 3) sum += double(g[i]) * g[i] / 2;
        }
        adamw_update(memory, &row, 1, h, nullptr, Cpu{});
    }
    return sum / double(n) / double(steps / 3);
}

TEST(Training, WithBf16MomentsNeedsRoundingAtRandom) {
    double want = loss_of_hovering(States::FLOAT, true);
    double random = std::fabs(loss_of_hovering(States::BF16, true) / want - 1);
    double nearest = std::fabs(loss_of_hovering(States::BF16, false) / want - 1);
    printf("beta2 0.999: float %.6f, bf16 off by %.4f%%, to nearest by %.4f%%\n", want,
           100 * random, 100 * nearest);
    EXPECT_LT(random, BF16_GAP);
    EXPECT_GT(nearest, 2 * BF16_GAP);
}

} // namespace
