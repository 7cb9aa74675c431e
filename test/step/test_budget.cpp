// test_budget.cpp - recomputation under a budget: the choice against all that there are
//   Live bytes by a sum against the arena's, the order of levels, FLOPs; offloaded activations.
#include "../../llmc/io/mfu.h"
#include "../../llmc/family.h"
#include "../../llmc/planner/activations.h"
#include "../harness/testing.h"
#include "small_models.h"

using namespace llmc;

namespace {

// Draws random numbers below `n`, the same in each run of the test.
struct Draw {
    uint64_t seed, at = 0;
    int operator()(int n) {
        return int(random_block(seed, fnv1a("test.budget"), at++)[0] % uint32_t(n));
    }
};

// A training plan of a random small model, with a random layout. The test sets the pipeline rank.
struct Case {
    Shape shape;
    Layout layout;
    Model model;
    PlanOptions options;
    Case(Draw& draw, int L, int pp) {
        // Draw the model.
        size_t C = size_t(16 + 8 * draw(4));
        if (draw(2)) {
            shape = gpt2_shape(size_t(L), 4, C, 40 + size_t(draw(300)), 64);
        } else {
            shape = llama_shape(size_t(L), 4, size_t(1) << draw(3), C, size_t(20 + draw(100)), 53,
                                64, 1e4);
            shape.block.qk_norm = draw(2);
        }
        shape.embedding.tied = draw(2);

        // Draw the layout and its schedule.
        layout = small_layout(1 + draw(2), 1, pp);
        layout.zero = draw(4);
        const Pipeline pipelines[] = {Pipeline::GPIPE, Pipeline::ONE_F_ONE_B, Pipeline::ZERO_BUBBLE,
                                      Pipeline::INTERLEAVED};
        layout.pipeline = pipelines[draw(4)];
        layout.chunks = layout.pipeline == Pipeline::INTERLEAVED && pp == 2 && L > 1 ? 2 : 1;
        layout.first_layer = split_layers(std::vector<double>(size_t(L) + 2, 1.0), layout.stages());
        model = make_model(shape, layout);

        // Draw the batch.
        options.B = size_t(1 + draw(2)), options.T = size_t(8 + draw(24));
        options.micro_batches = 2 * (1 + draw(2)), options.split_backward = draw(3) == 0;
    }
    Arena place(const RecomputeLevels& levels) {
        options.recompute = levels;
        return place_plans<bf16>({make_plan(layout, model, options)}, model, Cpu{});
    }
    std::vector<Instant> instants() {
        Arena full = place(Recompute::FULL);
        return instants_of(full, make_plan(layout, model, options), model);
    }
    BlockCosts costs() {
        return block_costs<bf16>(make_plan(layout, model, options), model, Cpu{});
    }
    Choices choose(size_t room, const CostModel& cost = {}) {
        return choose_activations<bf16>(layout, model, {options}, room, cost, Cpu{});
    }
    std::vector<Recompute> random_levels(Draw& draw) {
        std::vector<Recompute> levels(size_t(model.layers()), Recompute::NONE);
        for (int l = 1; l < model.head(); l++)
            levels[size_t(l)] = Recompute(draw(RECOMPUTE_LEVELS));
        return levels;
    }
    std::vector<int> blocks() {
        std::vector<int> mine;
        for (int l = 1; l < model.head(); l++)
            if (is_mine(layout, model, l)) mine.push_back(l);
        return mine;
    }
};

} // namespace

// live_bytes(), a sum over blocks, equals the arena's peak: for any levels in any order, on every
// rank. The list of choices can then be searched without placing each.
TEST(Budget, LiveBytesAreTheArenasPeak) {
    Draw draw = {3};
    for (int trial = 0; trial < 40; trial++) {
        Case c(draw, 1 + draw(6), 1 + draw(2));
        for (int rank = 0; rank < c.layout.pp.size; rank++) {
            c.layout.pp.rank = rank;
            std::vector<Instant> instants = c.instants();
            for (int i = 0; i < 6; i++) {
                std::vector<Recompute> levels = c.random_levels(draw);
                Arena arena = c.place(levels);
                EXPECT_EQ(live_bytes(instants, c.costs(), levels), arena.peak[0])
                    << "trial " << trial << " rank " << rank;
            }
        }
    }
}

// The list of choices leaves out nothing useful: at any room its cheapest choice costs as little as
// the cheapest of all levels in all orders.
TEST(Budget, TheListHasTheCheapestOfAll) {
    Draw draw = {5};
    for (int trial = 0; trial < 12; trial++) {
        Case c(draw, 2 + trial % 4, 1 + trial % 2);
        if (c.layout.chunks > 1) continue; // the blocks of two stages wait in another order
        std::vector<Instant> instants = c.instants();
        BlockCosts costs = c.costs();
        std::vector<int> blocks = c.blocks();

        // Compute the costs and memory of each of the 5^L choices, and of the list's.
        typedef std::tuple<double, size_t, size_t> Costs; // FLOPs, bytes redone, live bytes
        auto costs_of = [&](auto level_of) {
            std::vector<Recompute> levels(size_t(c.model.layers()), Recompute::NONE);
            Costs sum;
            for (size_t i = 0; i < blocks.size(); i++) {
                const LevelCost& one = costs.levels[size_t(levels[size_t(blocks[i])] = level_of(int(i)))];
                std::get<0>(sum) += one.flops, std::get<1>(sum) += one.redone;
            }
            std::get<2>(sum) = live_bytes(instants, costs, levels);
            return sum;
        };
        std::set<Costs> all, list;
        for (int number = 0; number < std::pow(RECOMPUTE_LEVELS, blocks.size()); number++)
            all.insert(costs_of([&](int i) {
                return Recompute(number / int(std::pow(RECOMPUTE_LEVELS, i)) % RECOMPUTE_LEVELS);
            }));
        for (const LevelCounts& counts : list_choices(int(blocks.size()), costs)) {
            list.insert(costs_of([&](int i) { return counts.of(i); }));
            EXPECT_EQ(std::get<0>(costs_of([&](int i) { return counts.of(i); })), counts.flops);
            EXPECT_EQ(std::get<1>(costs_of([&](int i) { return counts.of(i); })), counts.redone);
        }

        // Compare the cheapest choice that fits. Sets are sorted by cost, so it is the first one.
        for (auto [flops, redone, room] : all) {
            auto cheapest = [room = room](const std::set<Costs>& choices) {
                for (auto [flops, redone, bytes] : choices)
                    if (bytes <= room) return std::pair(flops, redone);
                return std::pair(-1.0, size_t(0));
            };
            ASSERT_EQ(cheapest(list), cheapest(all)) << "trial " << trial << " room " << room;
        }
    }
}

// choose_activations() chooses the first of the list whose arena fits, at any room.
TEST(Budget, TheFirstThatFitsIsChosen) {
    Draw draw = {9};
    for (int trial = 0; trial < 6; trial++) {
        int L = 2 + trial % 3, pp = 1 + trial % 2;
        Case c(draw, L, pp);
        for (c.layout.pp.rank = 0; c.layout.pp.rank < pp; c.layout.pp.rank++) {
            // Place every choice of the list.
            std::vector<int> blocks = c.blocks();
            std::vector<LevelCounts> list = list_choices(int(blocks.size()), c.costs());
            std::vector<size_t> bytes;
            for (const LevelCounts& counts : list) {
                std::vector<Recompute> levels(size_t(c.model.layers()), Recompute::NONE);
                for (size_t i = 0; i < blocks.size(); i++)
                    levels[size_t(blocks[i])] = counts.of(int(i));
                bytes.push_back(c.place(levels).device().bytes);
            }
            size_t low = *std::min_element(bytes.begin(), bytes.end());
            size_t high = *std::max_element(bytes.begin(), bytes.end());

            // Try rooms from too little for any to enough for all.
            for (int i = -1; i <= 12; i++) {
                size_t room = size_t(double(low) + double(high - low) * i / 12);
                Choices found = c.choose(room);
                std::string at = "trial " + std::to_string(trial) + " room " + std::to_string(i);
                if (!found.best.bytes) {
                    EXPECT_GT(c.place(Recompute::FULL).device().bytes, room) << at;
                    continue;
                }

                // The choice is the list's first that fits.
                size_t k = 0;
                while (bytes[k] > room) k++;
                EXPECT_EQ(found.best.flops, list[k].flops) << at;
                EXPECT_EQ(found.best.bytes, bytes[k]) << at;
                EXPECT_EQ(c.place(found.best.levels).device().bytes, bytes[k]) << at;

                // Its neighbours: the cheaper one does not fit, the dearer one takes fewer bytes.
                if (found.cheaper.bytes) {
                    EXPECT_GT(found.cheaper.bytes, room);
                    EXPECT_LE(found.cheaper.flops, found.best.flops);
                }
                if (found.dearer.bytes) {
                    EXPECT_LT(found.dearer.bytes, found.best.bytes);
                    EXPECT_GE(found.dearer.flops, found.best.flops);
                }
            }
        }
    }
}

// Blocks below the lowest adapter run no backward pass: they keep nothing, so no level is chosen for
// them, and the sum over blocks is still the arena's peak.
TEST(Budget, BlocksBelowTheLowestAdapterKeepNothing) {
    Draw draw = {11};
    for (int trial = 0; trial < 8; trial++) {
        Case c(draw, 6, 1 + trial % 2);
        Model whole = make_model(upper_lora(c.shape, 4, 3, false), c.layout);
        Model ends = make_model(upper_lora(c.shape, 4, 3, true), c.layout);
        for (c.layout.pp.rank = 0; c.layout.pp.rank < c.layout.pp.size; c.layout.pp.rank++) {
            SCOPED_TRACE(concat("trial ", trial, " rank ", c.layout.pp.rank));
            c.model = whole;
            size_t before = c.place(Recompute::NONE).peak[0];
            size_t leanest = c.place(Recompute::FULL).peak[0];

            // Sum over blocks, at random levels.
            c.model = ends;
            std::vector<Instant> instants = c.instants();
            for (int i = 0; i < 4; i++) {
                std::vector<Recompute> levels = c.random_levels(draw);
                EXPECT_EQ(live_bytes(instants, c.costs(), levels), c.place(levels).peak[0]);
            }

            // Give the room that plans without recomputation take: no level is needed.
            Arena full = c.place(Recompute::FULL), none = c.place(Recompute::NONE);
            size_t room = std::max(full.device().bytes, none.device().bytes);
            Choices found = c.choose(room);
            EXPECT_EQ(found.best.flops, 0);

            // The first rank has a stage below the lowest adapter, or a part of one.
            EXPECT_LE(none.peak[0], before);
            if (c.layout.pp.rank == 0) {
                EXPECT_LT(none.peak[0], before);
            }
            std::vector<int> blocks = blocks_of(c.layout, ends);
            for (int l : blocks) EXPECT_GE(l, 4);

            // A stage without backward passes takes the same at every level, less than before.
            if (!blocks.empty()) continue;
            EXPECT_EQ(full.peak[0], none.peak[0]);
            EXPECT_LT(none.peak[0], leanest);
        }
    }
}

// A frozen matrix beside adapters has a forward pass and its input's gradient, but no gradient of
// its own: 4 FLOPs a parameter and token instead of 6.
TEST(Budget, FrozenMatricesHaveNoGradientOfTheirOwn) {
    Model base = make_model(small_llama()), both = make_model(with_lora(small_llama(), 2));
    double frozen = double(active_parameters(base)), all = double(active_parameters(both));
    double attention = flops_per_token(base, 64) - 6 * frozen;
    EXPECT_GT(all, frozen);
    EXPECT_EQ(flops_per_token(both, 64), 4 * frozen + 6 * (all - frozen) + attention);

    // Beside experts, a token meets the K experts that it chooses, and their adapters.
    Shape s = small_mixtral();
    Model experts = make_model(s), adapted = make_model(with_lora(s, 2, "experts"));
    double met = double(active_parameters(experts)), shares = double(s.experts.K) / double(s.experts.E);
    double halves = 0;
    for (const Parameter& p : adapted.parameters)
        halves += is_adapter(adapted, p) ? shares * double(p.elements()) : 0;
    EXPECT_GT(halves, 0);
    EXPECT_DOUBLE_EQ(flops_per_token(adapted, 64),
                     flops_per_token(experts, 64) - 2 * met + 6 * halves);

    // A block below the lowest adapter has its forward pass alone: a third of attention's, and two
    // for each parameter.
    Model late = make_model(with_late_lora(small_llama(), 2));
    double block = 0, adapters = double(active_parameters(late)) - frozen;
    for (const Parameter& p : base.parameters) block += p.layer == 1 ? double(p.elements()) : 0;
    double others = attention - attention * 2 / 3 / double(base.shape.L);
    EXPECT_DOUBLE_EQ(flops_per_token(late, 64), 4 * frozen - 2 * block + 6 * adapters + others);
}

// recompute_flops() counts as mfu.h does: a block redoes at most its forward pass without the last
// product, whose result nothing reads again.
TEST(Budget, RedoneFlopsAreMfusOwn) {
    for (const Preset& preset : model_presets()) {
        Model model = make_model(preset.shape);
        size_t T = 512, others = 0;
        for (const Parameter& p : model.parameters) {
            // A token takes the biases of the experts that it chooses. Gates of value embeddings
            // are too small to count.
            bool values = model.buckets[p.bucket].role == Role::VALUES;
            bool block = model.is_block(p.layer) && p.shape.size() == 2 && !values;
            others += block ? 0 : active_elements(model, p);
        }
        const Shape& s = preset.shape;
        double blocks = flops_per_token(model, T) - 6 * double(others);

        // Subtract what is never redone: the last product, unless a norm behind it reads its result
        // again, and the router, whose choice is kept.
        double last = 0, router = 0, redone = 0;
        for (int layer = 1; layer <= int(s.L); layer++) {
            Shape here = layer_shape(s, layer);
            double F = s.experts.E ? double(s.F * here.experts.K + here.experts.ffn_beside) : double(s.F);
            last += s.block.post_norm ? 0 : 6 * double(s.C) * F;
            router += 6 * double((here.experts.E + (here.experts.E && s.experts.shared_gate)) * s.C);
            redone += 3 * recompute_flops(here, T, Recompute::FULL);
            EXPECT_EQ(recompute_flops(here, T, Recompute::ATTN) +
                          recompute_flops(here, T, Recompute::FFN),
                      recompute_flops(here, T, Recompute::FULL));
            EXPECT_EQ(recompute_flops(here, T, Recompute::SELECTIVE), 0);
        }
        EXPECT_EQ(redone, blocks - last - router) << preset.name;
    }
}

// ----------------------------------------------------------------------------
// offloaded activations

namespace {

// A machine whose link to other tiers is `speed` times as fast as small blocks compute. A disk is
// used, for on a CPU the host's memory is the step's own.
CostModel link_of(double speed) {
    CostModel cost;
    EXPECT_EQ(machine_named(&cost.machine, "cpu"), "");
    cost.machine.half_tf = 1e-3, cost.machine.memory_tb = 1e-3, cost.machine.launch_us = 0;
    cost.machine.disk_gb = speed;
    return cost;
}

// Every level of every block, offloaded or not, for a rank: its seconds and bytes.
typedef std::vector<std::pair<double, size_t>> Tried;
Tried try_all(Case& c, const CostModel& cost) {
    std::vector<int> blocks = c.blocks();
    Tried all;
    int each = 2 * RECOMPUTE_LEVELS;

    // Number the choices: a digit for each block says its level, and whether it is offloaded.
    CostModel with_moves = cost;
    std::map<std::tuple<Recompute, Kind, int>, size_t> known;
    with_moves.bytes = [&](const Plan& p, Data d) {
        auto [entry, fresh] = known.insert({{p.recompute.of(d.of), d.kind, d.of}, 0});
        if (fresh) entry->second = data_bytes<bf16>(p, c.model, d, Cpu{});
        return entry->second;
    };
    for (int number = 0; number < std::pow(each, blocks.size()); number++) {
        std::vector<Recompute> levels(size_t(c.model.layers()), Recompute::NONE);
        c.options.offload.parked.assign(size_t(c.model.layers()), false);
        for (size_t i = 0; i < blocks.size(); i++) {
            int one = number / int(std::pow(each, i)) % each;
            levels[size_t(blocks[i])] = Recompute(one / 2);
            c.options.offload.parked[size_t(blocks[i])] = one % 2;
        }
        size_t bytes = c.place(levels).device().bytes;
        Plan p = make_plan(c.layout, c.model, c.options);
        all.push_back({seconds_alone(p, c.model, with_moves).first, bytes});
    }
    c.options.offload.parked.clear();
    return all;
}

} // namespace

// Where offloaded blocks have a level of their own, those of the others begin behind them.
TEST(Offloaded, LevelsOfBlocksThatStayBeginBehindTheOthers) {
    LevelCounts c = {0, 1, 1, Recompute::FFN, 2, true, Recompute::FULL};
    std::vector<Recompute> levels;
    for (int block = 0; block < 5; block++) levels.push_back(c.of(block));
    EXPECT_EQ(levels, (std::vector<Recompute>{Recompute::FULL, Recompute::FULL, Recompute::FFN,
                                              Recompute::SELECTIVE, Recompute::NONE}));
}

// The choice that is found fits and is within a tenth of the fastest of all 10^L choices of levels
// and offloaded blocks; over all cases and rooms, within a hundredth. Links go from one that hides
// nothing to one that hides all. (Beyond the list: blocks that leave behind others that stay.)
TEST(Offloaded, HardlyAnyOfAllChoicesIsFaster) {
    Draw draw = {13};
    int left = 0, stayed = 0;
    double ours = 0, theirs = 0;
    for (int trial = 0; trial < 6; trial++) {
        int pp = 1 + trial % 2;
        Case c(draw, (trial == 2 ? 3 : 2) * pp, pp);
        if (c.layout.chunks > 1) continue;
        c.layout.pp.rank = draw(pp);
        c.options.micro_batches = 2;
        c.options.offload.activations = Tier::DISK;
        const double speeds[] = {1e-3, 0.03, 0.3, 100};
        CostModel cost = link_of(speeds[draw(4)]);
        Tried all = try_all(c, cost);
        size_t low = SIZE_MAX, high = 0;
        for (auto [seconds, bytes] : all) {
            low = std::min(low, bytes);
            high = std::max(high, bytes);
        }

        // Choose at rooms from too little to enough for all.
        for (int i = -1; i <= 4; i++) {
            size_t room = size_t(double(low) + double(high - low) * i / 4);
            double fastest = 1e30;
            for (auto [seconds, bytes] : all)
                if (bytes <= room) fastest = std::min(fastest, seconds);
            Choices found = c.choose(room, cost);
            std::string at = "trial " + std::to_string(trial) + " room " + std::to_string(i);
            if (!found.best.bytes) {
                EXPECT_LE(i, 0) << at;
                continue;
            }
            EXPECT_LE(found.best.bytes, room) << at;
            EXPECT_LE(found.best.seconds, 1.1 * fastest) << at;
            EXPECT_GE(found.best.seconds, (1 - 1e-9) * fastest) << at;
            ours += found.best.seconds;
            theirs += fastest;
            bool any = std::count(found.best.offloaded.begin(), found.best.offloaded.end(), true);
            (any ? left : stayed)++;

            // Its neighbours: the cheaper one does not fit, the dearer one takes fewer bytes.
            if (found.cheaper.bytes) {
                EXPECT_GT(found.cheaper.bytes, room) << at;
                EXPECT_LT(found.cheaper.seconds, found.best.seconds) << at;
            }
            if (found.dearer.bytes) {
                EXPECT_LT(found.dearer.bytes, found.best.bytes) << at;
                EXPECT_GE(found.dearer.seconds, found.best.seconds) << at;
            }
        }
    }
    EXPECT_LE(ours, 1.01 * theirs) << ours / theirs;
    EXPECT_GT(left, 3);
    EXPECT_GT(stayed, 3);
}

// The walk finds the fastest of its whole list, and a choice's least bytes and seconds are never
// above those of its plan.
TEST(Offloaded, TheFastestOfTheListIsFound) {
    Draw draw = {17};
    for (int trial = 0; trial < 3; trial++) {
        // List the choices of a case, with a slow, a middling or a fast disk.
        Case c(draw, 2, 1);
        c.options.offload.activations = Tier::DISK;
        const double speeds[] = {0.01, 0.1, 1};
        auto s = activation_search<bf16>(c.layout, c.model, {c.options}, link_of(speeds[trial]),
                                         Cpu{});

        // Try all of them: bounds hold, and the walk's answer is the fastest.
        std::vector<Choice> all;
        for (int i = 0; i < int(s.list.size()); i++) {
            all.push_back(try_choice(s, i));
            EXPECT_LE(least_bytes(s, i, SIZE_MAX), all.back().bytes) << trial << " choice " << i;
            EXPECT_LE(s.list[size_t(i)].least, all.back().seconds * (1 + 1e-9)) << trial;
        }
        for (const Choice& like : all) {
            double fastest = 1e30;
            for (const Choice& x : all)
                if (x.bytes <= like.bytes) fastest = std::min(fastest, x.seconds);
            EXPECT_EQ(cheapest_within(s, like.bytes).seconds, fastest) << trial;
        }
    }
}

// ----------------------------------------------------------------------------
// segments

// With L FULL blocks in segments of s the peak holds L/s + s - 1 inputs and the rows of s blocks.
TEST(Segments, HoldTheInputsAndRowsThatTheyShould) {
    for (const Shape& shape : {gpt2_shape(12, 4, 32, 53, 64), llama_shape(12, 4, 2, 32, 40, 53, 64,
                                                                          1e4)}) {
        Layout layout;
        Model model = make_model(shape, layout);
        PlanOptions o = small_plan(2, 32, 1, Recompute::FULL);

        // Place the plan, and measure what it holds.
        auto peak = [&](int size) {
            o.recompute.segments = {size};
            return place_plans<bf16>({make_plan(layout, model, o)}, model, Cpu{}).peak[0];
        };
        Plan p = make_plan(layout, model, o);
        size_t input = round_up(data_bytes<bf16>(p, model, {Kind::STREAM, 1}, Cpu{}), ARENA_ALIGN);
        size_t rows = data_bytes<bf16>(p, model, {Kind::REDO_B, 1}, Cpu{}) +
                      data_bytes<bf16>(p, model, {Kind::REDO_W, 1}, Cpu{});
        for (size_t s : {2, 3, 4, 6})
            EXPECT_EQ(peak(int(s)) + 12 * input, peak(1) + (12 / s + s - 1) * input + (s - 1) * rows)
                << s;
    }
}

// Where blocks that all keep one input do not fit, the smallest segments that do are chosen.
TEST(Segments, AreChosenWhereNothingElseFits) {
    Layout layout;
    Model model = make_model(gpt2_shape(48, 4, 32, 53, 64), layout);
    PlanOptions o = small_plan(2, 32, 1, Recompute::FULL);
    auto bytes = [&](int size) {
        o.recompute.segments = {size};
        return place_plans<bf16>({make_plan(layout, model, o)}, model, Cpu{}).device().bytes;
    };
    size_t one = bytes(1), two = bytes(2), three = bytes(3);
    ASSERT_LT(two, one);

    // Ask for room for segments of two, then for less than any takes.
    Choices found = choose_activations<bf16>(layout, model, {o}, two, {}, Cpu{});
    ASSERT_EQ(found.best.bytes, two);
    EXPECT_EQ(found.best.segment, 2);
    EXPECT_EQ(found.cheaper.bytes, one);
    EXPECT_GT(found.best.flops, found.cheaper.flops);
    EXPECT_EQ(found.dearer.bytes, three < two ? three : 0);
    found = choose_activations<bf16>(layout, model, {o}, two / 2, {}, Cpu{});
    EXPECT_EQ(found.best.bytes, 0u);
}
