// test_plan.cpp - plans without running them: generators, passes, check, print, lifetimes, places
#include <fstream>
#include <map>
#include "../../llmc/layout.h"
#include "../../llmc/optimizer.h"
#include "../../llmc/io/config.h"
#include "../../llmc/io/explain.h"
#include "../harness/testing.h"
#include "../../llmc/family.h"
#include "small_models.h"

// Make plans from one value that holds both options and layout, so that a test can vary either.
static Plan make_plan(const Plan& p, const Model& model) {
    return make_plan(p.layout, model, p);
}
static std::vector<Plan> make_plans(const Plan& p, const Model& model) {
    return make_plans(p.layout, model, p);
}

static Model small_model(size_t L, bool tied = true, bool llama = false) {
    Shape s = llama ? llama_shape(L, 2, 1, 8, 12, 50, 32, 10000) : gpt2_shape(L, 2, 8, 50, 32);
    s.embedding.tied = tied;
    return make_model(s);
}

static Plan options(int micro_batches, RecomputeLevels levels = {}, bool split = false) {
    return small_plan(2, 16, micro_batches, levels, split);
}

static size_t bytes_of(const Plan& p, const Model& m, Data d) {
    return data_bytes<float>(p, m, d, Cpu{});
}

// The plan of one rank is legal for every size, level of recomputation and kind of head.
TEST(Plan, EveryPlanIsLegal) {
    for (size_t L : {1, 2, 5})
        for (int m : {1, 2, 3, 8})
            for (Recompute level : ALL_LEVELS)
                for (bool split : {false, true})
                    for (bool tied : {false, true}) {
                        Model model = small_model(L, tied, L == 2);
                        Plan p = make_plan(options(m, level, split), model);
                        EXPECT_EQ(plan_check(p, model), "");
                    }
}

// ----------------------------------------------------------------------------
// the order in which ranks call their communicators

// One rank's call of a communicator: "tie of 0 4" for a collective, "0 to 4" for a message.
struct GroupCall {
    std::vector<int> members; // ranks in the world
    std::string text;
    bool message = false;
};

// The calls of a plan, in the order in which the host starts them. An action of a layer counts as
// one call of each of its groups.
static std::vector<GroupCall> calls_of(const Plan& p, const Model& model, const Comms& c) {
    std::vector<GroupCall> calls;
    auto meet = [&](const Comm& group) {
        std::string text = group.name + " of";
        for (int member : group.members) text += " " + std::to_string(member);
        if (group.size > 1) calls.push_back({group.members, text});
    };

    // List the messages of an action, then its collectives.
    const DataComms& data = c.data(Group::DATA);
    for (const Action& a : p.actions) {
        for (const Transfer& x : a.transfers) {
            int me = c.pp.members[size_t(c.pp.rank)], peer = c.pp.members[size_t(x.peer)];
            std::string way = x.send ? concat(me, " to ", peer) : concat(peer, " to ", me);
            calls.push_back({{me, peer}, way, true});
        }

        switch (a.op) {
        case Op::F: case Op::B: case Op::I: case Op::W: case Op::R:
            meet(c.tp), meet(c.cp);
            break;
        case Op::GATHER: case Op::PUBLISH: meet(data.shard); break;
        case Op::REDUCE: meet(c.tp), meet(c.kv), meet(data.shard), meet(data.replica); break;
        case Op::TIE:
            if (tied_apart(p.layout, model, a.bucket)) meet(c.tie);
            break;
        case Op::NORM: meet(data.shard), meet(c.tp), meet(c.pp); break;
        default: break;
        }
    }
    return calls;
}

// The calls that two ranks make together. Messages between two collectives are sorted, because
// their order is free.
static std::string calls_of_both(const std::vector<GroupCall>& calls, int a, int b) {
    std::string text;
    std::vector<std::string> messages;
    auto flush = [&] {
        std::sort(messages.begin(), messages.end());
        for (const std::string& m : messages) text += m + "; ";
        messages.clear();
    };

    // Collect messages until the next collective.
    for (const GroupCall& call : calls) {
        auto has = [&](int r) {
            return std::count(call.members.begin(), call.members.end(), r) > 0;
        };
        if (!has(a) || !has(b)) continue;
        if (!call.message) flush();
        messages.push_back(call.text);
        if (!call.message) flush();
    }
    flush();
    return text;
}

// Any two ranks start the calls that they share in the same order, in every layout. So streams that
// run several groups side by side cannot wait for each other in a circle.
TEST(Plan, RanksCallTheirGroupsInOneOrder) {
    Model model = small_model(4, true, true);
    const Pipeline pipelines[] = {Pipeline::GPIPE, Pipeline::ONE_F_ONE_B, Pipeline::ZERO_BUBBLE};
    for (int sizes = 0; sizes < 24; sizes++)
        for (int zero = 0; zero < 4; zero++)
            for (Pipeline pipeline : pipelines) {
                Layout layout = small_layout(1 + sizes % 2, 1 + sizes / 2 % 2, 1 + sizes / 8,
                                             1 + sizes / 4 % 2);
                layout.zero = zero;
                layout.pipeline = pipeline;
                layout.zero_group = layout.dp.size;
                layout.first_layer = split_layers(std::vector<double>(6, 1.0), layout.stages());
                if (layout.pp.size == 1 && pipeline != Pipeline::ONE_F_ONE_B) continue;

                // List the calls of each rank.
                std::vector<std::vector<GroupCall>> calls; // [rank]
                for (int r = 0; r < layout.world(); r++) {
                    Layout me = layout_at(layout, r);
                    Comm world;
                    world.rank = r, world.size = layout.world();
                    world.members.clear();
                    for (int i = 0; i < world.size; i++) world.members.push_back(i);
                    Plan p = options(4, Recompute::FULL, pipeline == Pipeline::ZERO_BUBBLE);
                    p = make_plan(me, make_model(model.shape, me), p);
                    calls.push_back(calls_of(p, model, make_comms(world, me)));
                }

                // Compare each pair.
                for (int a = 0; a < layout.world(); a++)
                    for (int b = a + 1; b < layout.world(); b++)
                        ASSERT_EQ(calls_of_both(calls[size_t(a)], a, b),
                                  calls_of_both(calls[size_t(b)], a, b))
                            << "ranks " << a << " and " << b << " of dp " << layout.dp.size
                            << " tp " << layout.tp.size << " pp " << layout.pp.size << " cp "
                            << layout.cp.size << " zero " << zero;
            }
}

// Sums in rank order need scratch: for the largest bucket, or for a layer's rows under tensor
// parallelism, and none on one rank.
TEST(Plan, SumsInRankOrderHaveScratch) {
    Model model = small_model(2);
    Plan p = options(1);
    size_t largest = 0;
    for (const Bucket& b : model.buckets)
        largest = std::max(largest, whole_elements(small_layout(2), b) * sizeof(float));
    EXPECT_EQ(fixed_order_scratch<bf16>(small_layout(1), p, model), 0u);
    EXPECT_EQ(fixed_order_scratch<bf16>(small_layout(2), p, model), largest);
    EXPECT_EQ(fixed_order_scratch<bf16>(small_layout(1, 2), p, model), p.B * p.T * 8 * 2);
}

// Each block has the recomputation level that it was given; the last level also counts for the
// blocks behind it.
TEST(Plan, BlocksHaveLevelsOfTheirOwn) {
    Model model = small_model(4);
    std::vector<Recompute> levels = {Recompute::NONE, Recompute::FULL, Recompute::NONE,
                                     Recompute::FFN};
    Plan p = make_plan(options(1, levels), model);
    EXPECT_EQ(
        plan_text(p, model),
        "LOAD COUNT\n"
        "F(0,0..5)\n"
        "B(0,5) R(0,4) B(0,4) R(0,3) B(0,3..2) R(0,1) B(0,1..0)\n"
        "TIE(embedding) NORM UPDATE(embedding) UPDATE(positions) UPDATE(block.0) UPDATE(block.1)\n"
        "  UPDATE(block.2) UPDATE(block.3) UPDATE(head)\n");

    // A row of activations is either kept or recomputed.
    for (int layer = 1; layer <= 4; layer++) {
        Plan alone = options(1, levels[size_t(std::min(layer, 3))]);
        size_t kept = 0, all = 0;
        for (Kind k : {Kind::KEPT_B, Kind::KEPT_W, Kind::REDO_B, Kind::REDO_W}) {
            EXPECT_EQ(bytes_of(p, model, {k, layer}), bytes_of(alone, model, {k, layer}));
            all += bytes_of(p, model, {k, layer});
            kept += k == Kind::KEPT_B || k == Kind::KEPT_W ? bytes_of(p, model, {k, layer}) : 0;
        }
        EXPECT_EQ(kept == all, layer == 2);
        EXPECT_EQ(kept == 0, layer == 1);
        EXPECT_EQ(all, bytes_of(options(1), model, {Kind::KEPT_B, 1}) +
                           bytes_of(options(1), model, {Kind::KEPT_W, 1}));
    }
}

// Below the lowest adapter there is no backward pass: no segment begins there, and a stage that
// lies there receives no gradient.
TEST(Plan, BackwardPassesEndAtTheLowestAdapter) {
    Model model = make_model(upper_lora(small_model(4).shape, 2, 2, true));
    EXPECT_EQ(lowest_trained(small_model(4)), 0);
    EXPECT_EQ(lowest_trained(model), 3);
    Plan p = options(1, Recompute::FULL);
    p.recompute.segments = {3}; // the first one would hold blocks 0 to 2
    EXPECT_EQ(plan_text(make_plan(p, model), model),
              "LOAD COUNT\n"
              "F(0,0..5)\n"
              "B(0,5) R(0,3..4) B(0,4..3)\n"
              "NORM UPDATE(adapter.2) UPDATE(adapter.3)\n");

    // Two stages: the embedding and two blocks, then two blocks and the head.
    p = options(2);
    p.layout = small_layout(1, 1, 2);
    p.layout.first_layer = {0, 3, 6};
    std::vector<Plan> ranks = make_plans(p, model);
    EXPECT_EQ(plans_check(ranks, model), "");
    EXPECT_EQ(plan_text(ranks[0], model),
              "LOAD COUNT\n"
              "F(0,0..2)\n"
              "SENDRECV(to 1: activation 0.1)\n"
              "F(1,0..2)\n"
              "SENDRECV(to 1: activation 1.1)\n"
              "NORM\n");
    EXPECT_EQ(plan_text(ranks[1], model),
              "LOAD COUNT SENDRECV(from 0: activation 0.1)\n"
              "F(0,3..5)\n"
              "SENDRECV(from 0: activation 1.1)\n"
              "B(0,5..3)\n"
              "F(1,3..5)\n"
              "B(1,5..3)\n"
              "NORM UPDATE(adapter.2) UPDATE(adapter.3)\n");

    // --explain counts the slots that run, and those whose activations wait.
    std::vector<Schedule> all = schedules_of(p.layout, 2);
    EXPECT_EQ(all[0].size(), 4u);
    EXPECT_EQ(slots_that_run(all, p.layout, model)[0].size(), 2u);
    EXPECT_EQ(slots_that_run(all, p.layout, model, true)[0].size(), 0u);
    EXPECT_EQ(slots_that_run(all, p.layout, model, true)[1].size(), 4u);

    // A pass below the lowest adapter, or none above it, is found.
    Plan alone = make_plan(options(1), model);
    ASSERT_EQ(plan_check(alone, model), "");
    auto last = std::find_if(alone.actions.begin(), alone.actions.end(),
                             [](const Action& a) { return a.op == Op::B && a.layer == 3; });
    auto gradients = [&](const Action& a) {
        std::vector<Data> writes = access(alone, model, a).writes;
        return std::count(writes.begin(), writes.end(), Data{Kind::DSTREAM, a.layer, a.micro});
    };
    EXPECT_EQ(gradients(*last), 0); // nobody would read the gradient of its input
    EXPECT_EQ(gradients(*(last - 1)), 1);
    Plan further = alone, shorter = alone;
    further.actions.insert(further.actions.begin() + (last - alone.actions.begin()) + 1,
                           {Op::B, 0, 2, -1, true});
    EXPECT_HAS(plan_check(further, model), "is not backward");
    shorter.actions.erase(shorter.actions.begin() + (last - alone.actions.begin()));
    EXPECT_HAS(plan_check(shorter, model), "is not backward");
}

// ----------------------------------------------------------------------------
// plans of many ranks

// A layout of many ranks.
struct Ranks {
    int dp, zero, pp, chunks, micro_batches;
    Pipeline pipeline;
    RecomputeLevels recompute;
};
static std::vector<Ranks> many_ranks() {
    std::vector<Ranks> all;
    for (int zero : {0, 1, 2, 3})
        for (int pp : {1, 2, 3})
            for (auto [pipeline, chunks] :
                 {std::pair{Pipeline::GPIPE, 1}, std::pair{Pipeline::ONE_F_ONE_B, 1},
                  std::pair{Pipeline::ZERO_BUBBLE, 1}, std::pair{Pipeline::INTERLEAVED, 2}})
                for (int m : {1, 4})
                    all.push_back({zero ? 2 : 1 + pp % 2, zero, pp, chunks, m, pipeline,
                                   three_levels(37 * int(all.size()) % 125)});
    return all;
}
static Plan options_of(const Ranks& r, const Model& model, Mode mode = Mode::TRAIN) {
    Plan p = options(r.micro_batches, mode == Mode::TRAIN ? r.recompute : RecomputeLevels());
    p.mode = mode;
    p.layout = small_layout(r.dp, 1, r.pp);
    p.layout.zero = r.zero;
    p.layout.chunks = r.chunks;
    p.layout.pipeline = r.pipeline;
    p.layout.prefetch = 1 + r.micro_batches % 2;
    p.layout.first_layer =
        split_layers(std::vector<double>(size_t(model.layers()), 1), p.layout.stages());
    return p;
}

// Models of five blocks: a GPT-2 with a tied table, a Llama without, and one that has adapters from
// block 2 on.
static std::vector<Model> models_of_ranks() {
    Model tied = small_model(5), llama = small_model(5, false, true);
    return {tied, llama, make_model(upper_lora(llama.shape, 2, 2, true))};
}

// The plans of all ranks are legal, and fit together.
TEST(Plan, EveryRanksPlanIsLegal) {
    for (const Model& model : models_of_ranks()) {
        for (const Ranks& r : many_ranks()) {
            EXPECT_EQ(plans_check(make_plans(options_of(r, model), model), model), "");
            Plan forward = options_of(r, model, Mode::EVALUATE);
            forward.micro_batches = 1;
            EXPECT_EQ(plans_check(make_plans(forward, model), model), "");
        }
    }
}

// Another stage waits for a slot's message: the slot's reductions follow it.
TEST(Plan, MessagesGoBeforeReductions) {
    Plan p = options(2);
    p.layout = small_layout(2, 1, 2);
    p.layout.first_layer = {0, 3, 6};
    Model model = small_model(4, false);
    int reductions = 0;
    for (const Plan& rank : make_plans(p, model))
        for (size_t i = 1; i < rank.actions.size(); i++) {
            bool reduced = rank.actions[i - 1].op == Op::REDUCE;
            reductions += reduced;
            EXPECT_FALSE(reduced && rank.actions[i].op == Op::SENDRECV) << i;
        }
    EXPECT_GT(reductions, 0);
}

static std::string check_without(Plan p, const Model& model, size_t drop) {
    p.actions.erase(p.actions.begin() + long(drop));
    return plan_check(p, model);
}

// No action of any rank's plan can be left out, except RELEASE, which only says from when on
// bytes are free.
TEST(Plan, DroppingAnyActionOfARankIsFound) {
    for (const Model& model : models_of_ranks()) {
        for (const Ranks& r : many_ranks())
            for (const Plan& p : make_plans(options_of(r, model), model))
                for (size_t i = 0; i < p.actions.size(); i++) {
                    if (p.actions[i].op == Op::RELEASE) continue;
                    EXPECT_NE(check_without(p, model, i), "")
                        << action_text(p.actions[i], model) << " dropped; zero " << r.zero << " pp "
                        << r.pp << " rank " << p.layout.pp.rank;
                }
    }
}

// check_pipeline() finds faults that one rank's plan does not show: a message that is left out or
// comes too late, and actions that all ranks must do together.
TEST(Plan, FaultsBetweenRanksAreFound) {
    Model model = small_model(5);
    Ranks r = {1, 0, 3, 1, 4, Pipeline::ONE_F_ONE_B, Recompute::NONE};
    const std::vector<Plan> good = make_plans(options_of(r, model), model);
    ASSERT_EQ(check_pipeline(good, model), "");

    // Leave out each message, then swap it with each later one on the same way.
    for (size_t rank = 0; rank < good.size(); rank++) {
        std::vector<std::pair<size_t, size_t>> all; // (action, message)
        for (size_t i = 0; i < good[rank].actions.size(); i++)
            for (size_t k = 0; k < good[rank].actions[i].transfers.size(); k++)
                all.push_back({i, k});
        ASSERT_GE(all.size(), 8u);
        for (auto [i, k] : all) {
            std::vector<Plan> bad = good;
            std::vector<Transfer>& group = bad[rank].actions[i].transfers;
            std::string text = name_of(group[k]);
            group.erase(group.begin() + long(k));
            EXPECT_NE(check_pipeline(bad, model), "") << text << " dropped";
            for (auto [j, l] : all) {
                bad = good;
                Transfer &x = bad[rank].actions[i].transfers[k],
                         &y = bad[rank].actions[j].transfers[l];
                if (x.micro >= y.micro || x.peer != y.peer || x.send != y.send) continue;
                std::swap(x, y);
                EXPECT_NE(check_pipeline(bad, model), "") << text << " too late";
            }
        }
    }

    // Add an action at the end of one rank.
    auto with = [&](size_t rank, Action a) {
        std::vector<Plan> bad = good;
        bad[rank].actions.push_back(a);
        return check_pipeline(bad, model);
    };
    EXPECT_EQ(with(2, {Op::TIE, -1, -1, 0}), "the first and the last rank tie different tables");
    EXPECT_EQ(with(1, {Op::NORM}), "rank 1 takes part in the gradient norm 2 times");
    EXPECT_EQ(with(0, {Op::SENDRECV}), "rank 0: SENDRECV() comes after what ranks do together");
}

// The check counts the activations that live at once: GPipe's order under the name of 1F1B holds
// more than 1F1B promises.
TEST(Plan, MoreActivationsThanTheScheduleHoldsAreFound) {
    Model model = small_model(5);
    for (auto [pp, text] :
         {std::pair{1, "4 stages hold their activations at once, not 1"},
          std::pair{3, "rank 0: 4 stages hold their activations at once, not 3"}}) {
        Ranks r = {1, 0, pp, 1, 4, Pipeline::GPIPE, Recompute::NONE};
        std::vector<Plan> plans = make_plans(options_of(r, model), model);
        for (Plan& p : plans) p.layout.pipeline = Pipeline::ONE_F_ONE_B;
        EXPECT_EQ(pp == 1 ? plan_check(plans[0], model) : plans_check(plans, model), text);
    }
}

// The check finds deadlocks. Split each group of messages into single ones, receives first: every
// message still has its partner in the right order, and each rank's plan is legal, but each rank
// waits for a message that the other one sends next.
TEST(Plan, DeadlocksBetweenRanksAreFound) {
    // Split the groups.
    Model model = small_model(5);
    Ranks r = {1, 0, 2, 1, 2, Pipeline::ONE_F_ONE_B, Recompute::NONE};
    std::vector<Plan> plans = make_plans(options_of(r, model), model);
    for (Plan& p : plans)
        for (size_t i = 0; i < p.actions.size(); i++) {
            std::vector<Transfer> group = p.actions[i].transfers;
            if (group.size() < 2) continue;
            std::stable_sort(group.begin(), group.end(),
                             [](const Transfer& a, const Transfer& b) { return a.send < b.send; });
            p.actions[i].transfers = {group[0]};
            for (size_t k = 1; k < group.size(); k++)
                p.actions.insert(p.actions.begin() + long(i + k),
                                 Action{Op::SENDRECV, -1, -1, -1, false, {group[k]}});
            i += group.size() - 1;
        }

    // Only all plans together are wrong.
    for (const Plan& p : plans) EXPECT_EQ(plan_check(p, model), "");
    EXPECT_EQ(plans_check(plans, model),
              "deadlock: rank 0 in step 1 before B0.0 waits to receive gradient 0.1 from rank 1; "
              "rank 1 in step 1 before B0.1 waits to receive activation 1.1 from rank 0");
}

// Activations that live at once are those of the schedules' papers, counted in the lifetimes of the
// plans' data: GPipe v m, 1F1B min(m, pp - r) on rank r, interleaved 1F1B 2 (pp - r - 1) + (v - 1)
// pp + 1, and zero-bubble as 1F1B, with inputs of weight gradients of up to pp micro-batches.
TEST(Plan, KeptActivationsAreThePapers) {
    for (int pp : {1, 2, 4})
        for (int chunks : {1, 2})
            for (int m : {1, 2, 4, 8, 12})
                for (Pipeline kind : {Pipeline::GPIPE, Pipeline::ONE_F_ONE_B, Pipeline::INTERLEAVED,
                                      Pipeline::ZERO_BUBBLE}) {
                    bool one = kind == Pipeline::ONE_F_ONE_B || kind == Pipeline::ZERO_BUBBLE;
                    if (chunks > 1 && one) continue;
                    if (kind == Pipeline::INTERLEAVED && m % pp) continue;

                    // Plan one block a stage; the embedding and the head lie beside the outer ones.
                    Model model = small_model(size_t(pp * chunks));
                    Plan o = options(m);
                    o.layout.pp.size = pp;
                    o.layout.chunks = chunks;
                    o.layout.pipeline = kind;
                    for (int s = 0; s <= o.layout.stages(); s++)
                        o.layout.first_layer.push_back(s + (s > 0) + (s == o.layout.stages()));
                    for (const Plan& p : make_plans(o, model)) {
                        int r = p.layout.pp.rank, v = chunks, last = pp - r - 1;
                        auto lives =
                            lifetimes(p, model, finish_before(p, model),
                                      [&](const Plan& q, Data d) { return bytes_of(q, model, d); });
                        auto most = [&](Kind kept) {
                            std::map<int, int> change; // +1 where a life begins, -1 where it ends
                            for (auto& [d, all] : lives)
                                if (d.kind == kept)
                                    for (const Place& l : all) change[l.first]++, change[l.last]--;
                            int now = 0, peak = 0;
                            for (auto [at, n] : change) peak = std::max(peak, now += n);
                            return peak;
                        };

                        // Compare with the formulas.
                        bool interleaved = kind == Pipeline::INTERLEAVED && pp * v > 1;
                        int want = kind == Pipeline::GPIPE ? v * m
                                   : interleaved ? std::min(v * m, 2 * last + (v - 1) * pp + 1)
                                                 : std::min(m, pp - r);
                        bool zero = kind == Pipeline::ZERO_BUBBLE;
                        std::string text = concat("pp ", pp, " x ", v, ", m ", m, ", kind ",
                                                  int(kind), ", rank ", r);
                        EXPECT_EQ(most(Kind::KEPT_B), want) << text;
                        EXPECT_EQ(most(Kind::KEPT_W), zero ? std::min(m, pp) : want) << text;
                    }
                }
}

// ----------------------------------------------------------------------------
// published figures

// The bytes of a model in each ZeRO stage are those of the paper's figures, in GB. The paper cuts
// some digits instead of rounding them.
TEST(Zero, PublishedBytesOfAModel) {
    struct {
        double parameters;
        int ranks;
        double gb[4];
    } paper[] = {{7.5e9, 1, {120, 120, 120, 120}},    {7.5e9, 4, {120, 52.5, 41.3, 30}},
                 {7.5e9, 16, {120, 35.6, 21.6, 7.5}}, {7.5e9, 64, {120, 31.4, 16.6, 1.88}},
                 {128e9, 64, {2048, 536, 284, 32}},   {1e12, 1024, {16000, 4011, 2013, 15.6}}};
    for (auto& row : paper)
        for (int zero : {0, 1, 2, 3}) {
            double gb = zero_bytes({2, 2, 12}, zero, row.ranks) * row.parameters / 1e9;
            EXPECT_NEAR(gb, row.gb[zero],
                        row.gb[zero] < 100 ? 0.1 : 1);
        }

    // With float gradients, 7.5B parameters over 64 ranks.
    double float_gradients[] = {135, 46.4, 16.9, 2.1};
    for (int zero : {0, 1, 2, 3})
        EXPECT_NEAR(zero_bytes({2, 4, 12}, zero, 64) * 7.5, float_gradients[zero], 0.051);
}

// A plan of one of 64 ranks keeps as many bytes as the formula says for its parameters, and at most
// those for their padding: 128 elements a parameter, a vocabulary in multiples of 128, and shards
// in whole chunks of the norm.
TEST(Zero, APlanKeepsTheFormulasBytes) {
    for (const char* name : {"llama2-7b", "llama3-70b"}) {
        Shape shape;
        for (const Preset& p : model_presets())
            if (p.name == std::string(name)) shape = p.shape;
        for (int zero : {0, 1, 2, 3}) {
            Plan p = options(2, Recompute::FULL);
            p.layout.dp.size = 64;
            p.layout.zero = zero;
            Trainer<bf16, Cpu> t;
            trainer_place(t, shape, {p}, p.layout);

            // Count the padding, and the bytes that last.
            double N = double(parameter_count(t.model)), padding = 0, kept = 0;
            for (const Bucket& b : t.model.buckets) padding += 128.0 * b.count + 64.0 * SHARD_ALIGN;
            padding += 2.0 * double((shape.Vp() - shape.V) * shape.C);
            for (auto& [d, place] : t.arena.lasting)
                if (of_bucket(d.kind)) kept += double(place.bytes);
            double formula = zero_bytes({2, 4, 12}, zero, 64);
            EXPECT_GE(kept, N * formula) << name << " zero " << zero;
            EXPECT_LE(kept, (N + padding) * formula) << name << " zero " << zero;
            EXPECT_LT(padding, 0.01 * N);
        }
    }
}

// The bytes of a layer's activations in 16 bits by arXiv:2205.05198, table 2: s tokens, b samples,
// h channels, a heads, over t tensor-parallel ranks. They include dropout's masks and the scores.
enum class Kept { ALL, SELECTIVE, INPUT };
static double paper_activations(double s, double b, double h, double a, double t, bool sequence,
                                Kept kept) {
    double scores = kept == Kept::ALL ? 5 * a * s / h : 0, whole = sequence ? 0 : 10;
    if (kept == Kept::INPUT) return s * b * h * 2;
    return s * b * h * (whole + (34 - whole) / t + scores / t);
}

// The formula gives the paper's figures, and a block's plan keeps what the formula says.
TEST(Zero, PublishedActivationsOfALayer) {
    auto per_sbh = [](double s, double h, double a, double t, bool sequence, Kept kept) {
        return paper_activations(s, 1, h, a, t, sequence, kept) / (s * h);
    };

    // 175B has 34 + 80 bytes, 530B 34 + 64; without the scores 70% and 65% less.
    EXPECT_EQ(per_sbh(2048, 12288, 96, 1, false, Kept::ALL), 34 + 80);
    EXPECT_EQ(per_sbh(2048, 20480, 128, 1, false, Kept::ALL), 34 + 64);
    EXPECT_NEAR(80.0 / (34 + 80), 0.70, 0.005);
    EXPECT_NEAR(64.0 / (34 + 64), 0.65, 0.005);

    // Over 8 ranks: tensor parallelism leaves 10 of the 34 whole, sequence parallelism none.
    EXPECT_EQ(per_sbh(2048, 12288, 96, 8, false, Kept::SELECTIVE), 10 + 3);
    EXPECT_EQ(per_sbh(2048, 12288, 96, 8, true, Kept::ALL), (34 + 80) / 8.0);
    EXPECT_EQ(per_sbh(2048, 12288, 96, 8, true, Kept::SELECTIVE), 34 / 8.0);
    EXPECT_EQ(per_sbh(2048, 12288, 96, 8, true, Kept::INPUT), 2);

    // Our blocks keep the paper's bytes without two masks of dropout, and with float statistics.
    // With 64 tokens no row is rounded up.
    Model model = make_model(gpt2_shape(2, 12, 768));
    Plan p = options(1);
    p.T = 64;
    double N = double(p.B * p.T), ours = 0;
    for (Kind k : {Kind::STREAM, Kind::KEPT_B, Kind::KEPT_W})
        ours += double(data_bytes<bf16>(p, model, {k, 1}, Cpu{}));
    double paper = paper_activations(double(p.T), double(p.B), 768, 12, 1, false, Kept::SELECTIVE),
           masks = 2 * N * 768, statistics = 4 * N * (4 + 12);
    EXPECT_EQ(ours, paper - masks + statistics);
}

// Evaluation and generation consist of LOAD, COUNT and forward passes.
TEST(Plan, ModesWithoutTrainingHaveNoBackward) {
    Model model = small_model(2);
    for (Mode mode : {Mode::EVALUATE, Mode::GENERATE}) {
        Plan o = options(1);
        o.mode = mode, o.cache = 32;
        Plan p = make_plan(o, model);
        EXPECT_EQ(plan_check(p, model), "");
        for (Action a : p.actions)
            EXPECT_TRUE(a.op == Op::LOAD || a.op == Op::COUNT || a.op == Op::F);
    }
}

// The opening comment of plan.h shows the plan of two stages as the program prints it.
TEST(Plan, TheCommentInPlanHIsTheProgramsPrint) {
    std::ifstream in(std::string(REPO_ROOT) + "/llmc/plan.h");
    ASSERT_TRUE(in.good());
    std::string line, comment;
    while (std::getline(in, line) && line.rfind("#pragma", 0) != 0)
        if (line.rfind("//     ", 0) == 0) comment += line.substr(7) + "\n";

    Model model = small_model(2);
    Plan p = options(2);
    p.layout = small_layout(2, 1, 2);
    p.layout.zero = 2;
    p.layout.first_layer = {0, 2, 4};
    std::string printed;
    for (const Plan& rank : make_plans(p, model)) {
        printed += concat("rank ", rank.layout.pp.rank, "\n");
        std::istringstream lines(plan_text(rank, model));
        while (std::getline(lines, line)) printed += "  " + line + "\n";
    }
    EXPECT_EQ(comment, printed);
}

// ----------------------------------------------------------------------------
// the check finds what is wrong

// No action of a plan can be left out.
TEST(Plan, DroppingAnyActionIsFound) {
    for (bool split : {false, true})
        for (Recompute level : ALL_LEVELS) {
            Model model = small_model(2);
            Plan p = make_plan(options(2, level, split), model);
            for (size_t i = 0; i < p.actions.size(); i++)
                EXPECT_NE(check_without(p, model, i), "")
                    << action_text(p.actions[i], model) << " dropped";
        }
}

// Two neighbours of which the second reads what the first writes cannot change places.
TEST(Plan, SwappingNeighboursIsFoundWhereTheyDepend) {
    Model model = small_model(2);
    Plan p = make_plan(options(2, Recompute::FULL), model);
    for (size_t i = 0; i + 1 < p.actions.size(); i++) {
        Access x = access(p, model, p.actions[i]), y = access(p, model, p.actions[i + 1]);
        bool depends = false;
        for (Data d : x.writes) {
            bool gives = !persistent(d.kind) && d.kind != Kind::VALID && d.kind != Kind::SCRATCH;
            depends |= gives && std::count(y.reads.begin(), y.reads.end(), d);
        }
        if (!depends) continue;
        Plan q = p;
        std::swap(q.actions[i], q.actions[i + 1]);
        EXPECT_NE(plan_check(q, model), "") << action_text(p.actions[i], model) << " swapped with "
                                            << action_text(p.actions[i + 1], model);
    }
}

// The error names the action and the data that it lacks.
TEST(Plan, MessagesNameActionAndDatum) {
    Model model = small_model(2);
    Plan p = make_plan(options(1, Recompute::FULL), model);
    for (size_t i = 0; i < p.actions.size(); i++)
        if (p.actions[i].op == Op::R && p.actions[i].layer == 1) {
            EXPECT_EQ(check_without(p, model, i),
                      "B(0,1) reads redo.b(0,1), which nothing before it wrote");
        }
}

// ----------------------------------------------------------------------------
// when a started collective is finished

// A line for each collective of a plan: before which action it is finished.
static std::string finishes(const Plan& p, const Model& model) {
    std::vector<Finish> before = finish_before(p, model);
    std::string text;
    for (size_t i = 0; i < before.size(); i++) {
        size_t j = size_t(before[i].first());
        if (queue_of(p.actions[i].op) == Queue::COMPUTE)
            EXPECT_EQ(j, i + 1);
        else
            text += action_text(p.actions[i], model) + " before " +
                    (j < before.size() ? action_text(p.actions[j], model) : "the end") + "\n";
    }
    return text;
}

// A collective is finished before the first action that reads what it writes or writes what it
// reads, and before the next one of its queue that uses the same bytes.
TEST(Finish, BeforeTheFirstActionThatConflicts) {
    Model model = small_model(3, false); // buckets: embedding, positions, block.0 to 2, head
    Plan p = options(2);
    p.layout.dp.size = 2;
    p.layout.zero = 3;

    // Gathers: for a use, for none, and of weights that an update then changes.
    p.actions = {{Op::GATHER, -1, -1, 2}, {Op::GATHER, -1, -1, 3},  {Op::GATHER, -1, -1, 4},
                 {Op::F, 0, 1},           {Op::RELEASE, -1, -1, 3}, {Op::UPDATE, -1, -1, 4}};
    EXPECT_EQ(finishes(p, model),
              "GATHER(block.0) before F(0,1)\n"
              "GATHER(block.1) before RELEASE(block.1)\n"
              "GATHER(block.2) before UPDATE(block.2)\n");
    p.actions = {{Op::GATHER, -1, -1, 2},
                 {Op::NORM},
                 {Op::GATHER, -1, -1, 3}, // into the same bytes
                 {Op::GATHER, -1, -1, 3}};
    EXPECT_EQ(finishes(p, model),
              "GATHER(block.0) before NORM\n"
              "GATHER(block.1) before GATHER(block.1)\n"
              "GATHER(block.1) before the end\n");

    // Reductions after each micro-batch: one ends before the next, the last before the norm.
    // Without prefetch each ends at once.
    p.actions = {{Op::B, 0, 3}, {Op::REDUCE, 0, -1, 4, true}, {Op::B, 0, 2},
                 {Op::B, 0, 1}, {Op::REDUCE, 0, -1, 2, true}, {Op::B, 1, 3},
                 {Op::NORM}};
    EXPECT_EQ(finishes(p, model),
              "REDUCE(block.2) before REDUCE(block.0)\n"
              "REDUCE(block.0) before NORM\n");
    p.layout.prefetch = 0;
    EXPECT_EQ(finishes(p, model),
              "REDUCE(block.2) before B(0,2)\n"
              "REDUCE(block.0) before B(1,3)\n");
    p.layout.prefetch = 1;

    // The next micro-batch writes the gradient that is being reduced.
    p.actions = {{Op::B, 0, 3}, {Op::REDUCE, 0, -1, 4, true}, {Op::B, 1, 3}};
    EXPECT_EQ(finishes(p, model), "REDUCE(block.2) before B(1,3)\n");

    // Gradients that are kept whole are all reduced side by side.
    p.layout.zero = 1;
    p.actions = {{Op::REDUCE, -1, -1, 4}, {Op::REDUCE, -1, -1, 2},  {Op::NORM},
                 {Op::UPDATE, -1, -1, 2}, {Op::PUBLISH, -1, -1, 2}, {Op::UPDATE, -1, -1, 4},
                 {Op::PUBLISH, -1, -1, 4}};
    EXPECT_EQ(finishes(p, model),
              "REDUCE(block.2) before NORM\n"
              "REDUCE(block.0) before NORM\n"
              "PUBLISH(block.0) before the end\n"
              "PUBLISH(block.2) before the end\n");

    // Messages: a receive is finished before its use, a send before the next message, so that sends
    // do not pile up.
    p.layout = small_layout(1, 1, 2);
    p.layout.pp.rank = 1;
    p.layout.first_layer = {0, 2, 5};
    auto message = [](bool send, bool gradient, int micro) {
        return Action{Op::SENDRECV, -1, -1, -1, false, {{send, 0, gradient, micro, 1}}};
    };
    p.actions = {message(false, false, 0),
                 message(false, false, 1),
                 {Op::F, 0, 2},
                 {Op::F, 1, 2},
                 message(true, true, 0),
                 {Op::B, 1, 3},
                 message(true, true, 1),
                 {Op::F, 0, 4},
                 {Op::NORM},
                 {Op::UPDATE, -1, -1, 2}};
    std::vector<int> before;
    for (const Finish& f : finish_before(p, model)) before.push_back(f.first());
    EXPECT_EQ(before, (std::vector<int>{2, 3, 3, 4, 6, 6, 8, 8, 9, 10}));
}

// While a collective is in flight, no action of any rank's plan touches what it writes, or writes
// what it reads; and its buffers keep their places until it is finished.
TEST(Finish, NothingTouchesWhatIsUnderWay) {
    for (bool tied : {false, true}) {
        Model model = small_model(5, tied, !tied);
        for (const Ranks& r : many_ranks())
            for (const Plan& p : make_plans(options_of(r, model), model)) {
                Arena arena = arena_place(
                    {p}, model, [&](const Plan& q, Data d) { return bytes_of(q, model, d); });

                // Look at all actions between the start and the end of each.
                for (size_t i = 0; i < p.actions.size(); i++) {
                    Access x = access(p, model, p.actions[i]);
                    std::set<Data> written(x.writes.begin(), x.writes.end());
                    std::set<Data> read(x.reads.begin(), x.reads.end()), all = written;
                    all.insert(read.begin(), read.end());
                    const Finish& f = arena.finish[0][i];
                    for (int j = int(i) + 1; j < std::max(f.writes, f.reads); j++) {
                        // Its reads and its writes may end at different actions.
                        const std::set<Data>& busy = j >= f.writes  ? read
                                                     : j >= f.reads ? written
                                                                    : all;
                        Access y = access(p, model, p.actions[size_t(j)]);
                        for (Data d : y.writes) EXPECT_FALSE(busy.count(d));
                        for (Data d : y.reads) EXPECT_FALSE(j < f.writes && written.count(d));
                        for (Data d : busy)
                            EXPECT_EQ(arena_find(arena, 0, j, d), arena_find(arena, 0, int(i), d))
                                << data_text(d, model);
                    }
                }
            }
    }
}

// ----------------------------------------------------------------------------
// places

// Data that live at the same time have no bytes in common, and the arena wastes little: first fit
// stays within 15% of the peak, the least that any placement needs.
TEST(Arena, LivingDataNeverShareBytes) {
    for (size_t L : {1, 3})
        for (int m : {1, 3})
            for (Recompute level : ALL_LEVELS)
                for (bool split : {false, true}) {
                    Model model = small_model(L);
                    Plan p = make_plan(options(m, level, split), model);
                    Arena arena = arena_place(
                        {p}, model, [&](const Plan& q, Data d) { return bytes_of(q, model, d); });

                    // Compare each pair of places.
                    std::vector<Place> all;
                    for (auto& [d, lives] : arena.passing[0])
                        all.insert(all.end(), lives.begin(), lives.end());
                    for (size_t i = 0; i < all.size(); i++)
                        for (size_t j = i + 1; j < all.size(); j++) {
                            const Place &a = all[i], &b = all[j];
                            if (!a.bytes || !b.bytes || a.last < b.first || b.last < a.first)
                                continue;
                            EXPECT_TRUE(a.offset + a.bytes <= b.offset ||
                                        b.offset + b.bytes <= a.offset);
                        }

                    // All lie in the arena, and it is not much larger than the peak.
                    for (const Place& a : all) EXPECT_LE(a.offset + a.bytes, arena.device().bytes);
                    EXPECT_LE(double(arena.device().bytes - arena.device().persistent_bytes),
                              1.15 * double(arena.peak[0]));
                }
}

// The bytes of a plan are the papers': bf16 with float gradients, masters and moments takes 18
// bytes a parameter. Selective recomputation keeps neither a block's two norms nor its activation
// function, and full recomputation keeps only the block's input.
TEST(Arena, MemoryIsTheTextbooks) {
    // Add up the bytes of all parameters.
    Shape s = gpt2_shape(12, 12, 768);
    Model model = make_model(s);
    Plan p = options(1);
    p.B = 4, p.T = 1024;
    size_t P = 0, bytes = 0;
    for (const Bucket& b : model.buckets) P += b.elements;
    for (size_t b = 0; b < model.buckets.size(); b++)
        for (Data d : {Data{Kind::WEIGHT}, Data{Kind::GRAD}, Data{Kind::MASTER},
                       Data{Kind::STATE, -1, 0}, Data{Kind::STATE, -1, 1}})
            bytes += data_bytes<bf16>(p, model, {d.kind, int(b), d.micro}, Cpu{});
    EXPECT_EQ(bytes, 18 * P);

    // Small masters and moments.
    for (auto [masters, each] : {std::pair(Masters::REMAINDER, 2), {Masters::NONE, 0}}) {
        Plan small = p;
        small.masters = masters;
        EXPECT_EQ(data_bytes<bf16>(small, model, {Kind::MASTER, 1}, Cpu{}),
                  size_t(each) * model.buckets[1].elements);
    }
    Plan narrow = p;
    narrow.states = States::BF16;
    EXPECT_EQ(data_bytes<bf16>(narrow, model, {Kind::STATE, 1, 0}, Cpu{}),
              2 * model.buckets[1].elements);
    EXPECT_EQ(parameter_count(model), 124439808u); // GPT-2 124M

    // Activations that a block keeps, by level.
    size_t N = p.B * p.T, C = s.C;
    auto kept = [&](Recompute level) {
        p.recompute = level;
        return data_bytes<bf16>(p, model, {Kind::KEPT_B, 1}, Cpu{}) +
               data_bytes<bf16>(p, model, {Kind::KEPT_W, 1}, Cpu{});
    };
    size_t statistics = 4 * 4 * N, lse = 4 * N * s.NH;
    EXPECT_EQ(kept(Recompute::NONE), 2 * N * C * (1 + 3 + 1 + 1 + 1 + 4 + 4) + statistics + lse);
    EXPECT_EQ(kept(Recompute::SELECTIVE), 2 * N * C * (3 + 1 + 1 + 4) + lse);
    EXPECT_EQ(kept(Recompute::ATTN), 2 * N * C * 4);
    EXPECT_EQ(kept(Recompute::FFN), 2 * N * C * (3 + 1 + 1) + lse);
    EXPECT_EQ(kept(Recompute::FULL), 0u);
}

// tensor_rows() covers a bucket's parameters: each element once, with its index in the whole
// parameter, by which stochastic rounding draws its random numbers.
TEST(Model, RowsOfShardsKnowTheirPlace) {
    Model model = small_model(3);
    for (int b = 0; b < int(model.buckets.size()); b++) {
        const Bucket& bucket = model.buckets[size_t(b)];
        std::map<uint64_t, std::vector<int>> seen; // by the hash of the name
        for (size_t from = 0; from < bucket.elements; from += 100)
            for (const TensorRow& row : tensor_rows(model, b, from, from + 100))
                for (size_t i = 0; i < row.n; i++) {
                    std::vector<int>& mine = seen[row.hash];
                    mine.resize(std::max(mine.size(), row.first + i + 1));
                    mine[row.first + i] += int(from + row.offset + i); // its place in the bucket
                }

        // Each element was seen once, at its place.
        for (int k = bucket.first; k < bucket.first + bucket.count; k++) {
            const Parameter& p = model.parameters[size_t(k)];
            std::vector<int> places(p.elements());
            for (size_t i = 0; i < places.size(); i++) places[i] = int(p.offset + i);
            EXPECT_EQ(seen[fnv1a(p.name)], places) << p.name;
        }
    }
}

// Groups list their ranks in the order of the world, for every order of the axes: group_axis()
// gives a rank its place among those that share its layers and its piece of them.
TEST(Model, ShardsLieAsTheWorldCountsThem) {
    for (const char* order :
         {"tp-pp-dp", "tp-dp-pp", "pp-tp-dp", "pp-dp-tp", "dp-tp-pp", "dp-pp-tp"}) {
        Layout sizes;
        sizes.order = layout_order(order);
        sizes.dp.size = sizes.tp.size = sizes.pp.size = 2;
        sizes.cp.size = 3;
        std::map<std::pair<int, int>, int> next; // of a stage and a piece of its layers
        for (int r = 0; r < sizes.world(); r++) {
            Layout at = layout_at(sizes, r);
            int place = next[{at.pp.rank, at.tp.rank}]++;
            EXPECT_EQ(group_axis(at, Group::DATA).rank, place) << order << ", rank " << r;

            // With ep = 3, groups of three neighbours share the experts.
            at.ep = 3;
            EXPECT_EQ(expert_axis(at).rank, place % 3) << order << ", rank " << r;
            EXPECT_EQ(group_axis(at, Group::EXPERTS).rank, place / 3) << order << ", rank " << r;
            EXPECT_EQ(group_axis(at, Group::EXPERTS).size, 2);
        }
    }
}

// Beside whole experts tp ranks are the nearest neighbours of a stage, then those of cp and dp,
// whatever the grid's order; a stack is then cut by ep alone, and lies behind what tp ranks share.
TEST(Model, WholeExpertsCountTensorParallelRanks) {
    for (const char* order : {"tp-pp-dp", "pp-dp-tp", "dp-tp-pp"}) {
        Layout sizes = small_layout(2, 2, 2, 3);
        sizes.order = layout_order(order), sizes.ep = 4, sizes.experts.whole = true;
        for (int r = 0; r < sizes.world(); r++) {
            Layout at = layout_at(sizes, r);
            int place = (at.dp.rank * 3 + at.cp.rank) * 2 + at.tp.rank;
            EXPECT_EQ(expert_axis(at).rank, place % 4) << order << ", rank " << r;
            EXPECT_EQ(group_axis(at, Group::EXPERTS).rank, place / 4) << order << ", rank " << r;
            EXPECT_EQ(group_axis(at, Group::EXPERTS).size, 3);
            EXPECT_EQ(group_axis(at, Group::DATA).size, 6);

            // The same ranks hold the same experts where sequences are whole.
            EXPECT_EQ(expert_axis(whole_sequences(at)).rank, place % 4);
        }
    }

    Layout l = small_layout(1, 2);
    l.ep = 2, l.tp.rank = 1, l.experts.whole = true, l.zero = 2;
    Model m = make_model(small_mixtral(), l);
    for (const Bucket& b : m.buckets) EXPECT_TRUE(b.role != Role::EXPERTS || b.shared == 0);
    for (const Parameter& p : m.parameters) {
        if (p.stack == 1) continue;
        PieceRuns runs = piece_runs(p, 1, 2);
        EXPECT_EQ(runs.start, p.elements() / 2) << p.name;
        EXPECT_EQ(runs.run, p.elements() / 2);
        EXPECT_EQ(replication(p.shard, 2), 1);
    }

    // Two ranks that hold the same experts share out these experts' gradients, though each is the
    // only one that has its data.
    int experts = find_bucket(m, Role::EXPERTS, 1);
    EXPECT_FALSE(reduced_each(l, m, experts));
    l.ep = 1;
    EXPECT_TRUE(reduced_each(l, m, experts));
    EXPECT_TRUE(is_sharded(l, m, {Kind::GRAD, experts}));
}

// Every optimizer is found by its name, and Muon's settings by theirs.
TEST(Model, OptimizersAreFoundByName) {
    for (Optimizer o : {Optimizer::ADAMW, Optimizer::SGD, Optimizer::MUON, Optimizer::NORMUON}) {
        Config c;
        c.optimizer = optimizer_row(o).name;
        EXPECT_EQ(choose_optimizer(c), o);
    }
    Config c;
    c.lr = 0.02, c.seq = 8, c.dp = 1;
    c.optimizer = "muon,scale=shape,ns=polar,momentum=0.9,heavy-ball,cautious,table=0.3,decay=0.001,"
                  "values=0.1,resid=0.005,x0=0.5";
    Optimizer optimizer;
    Muon muon;
    ASSERT_EQ(read_optimizer(c, &optimizer, &muon), "");
    EXPECT_TRUE(muon.scale == shape_scale);
    EXPECT_STREQ(muon.table->name, "polar");
    EXPECT_FLOAT_EQ(muon.momentum, 0.9f);
    EXPECT_FALSE(muon.nesterov);
    EXPECT_TRUE(muon.cautious);
    EXPECT_FLOAT_EQ(muon.rates[size_t(MuonGroup::TABLE)], 15);
    EXPECT_FLOAT_EQ(muon.rates[size_t(MuonGroup::HEAD)], 1);
    EXPECT_FLOAT_EQ(muon.others_decay, 0.001f);

    // Value embeddings and scalars have rates of their own. Of the former Muon updates the gates.
    Layout layout;
    layout.muon = 4;
    Model model = make_model(small_variant(small_llama(), "nanochat_values"), layout);
    std::map<MuonGroup, int> groups;
    for (const Parameter& p : model.parameters) {
        MuonGroup group = muon_group(model, p);
        groups[group]++;
        EXPECT_EQ(has(p.name, "value_embed"), muon.rates[size_t(group)] == 5) << p.name;
        EXPECT_EQ(has(p.name, "resid_lambda"), muon.rates[size_t(group)] == 0.25f) << p.name;
        EXPECT_EQ(has(p.name, "x0_lambda"), muon.rates[size_t(group)] == 25) << p.name;
        EXPECT_TRUE(!has(p.name, "ve_gate") || group == MuonGroup::MATRIX);
    }
    EXPECT_TRUE(groups[MuonGroup::VALUES] == 2 && groups[MuonGroup::RESID] == 3);
    EXPECT_FLOAT_EQ(muon.decay, float(c.weight_decay));

    // NorMuon, and a momentum that grows.
    c.optimizer = "muon,ns=aol,normuon=0.9,momentum=0.85:0.95:300";
    ASSERT_EQ(read_optimizer(c, &optimizer, &muon), "");
    EXPECT_EQ(optimizer, Optimizer::NORMUON);
    EXPECT_EQ(choose_optimizer(c), Optimizer::NORMUON);
    EXPECT_STREQ(muon.table->name, "aol");
    EXPECT_FLOAT_EQ(muon.beta2, 0.9f);
    EXPECT_FLOAT_EQ(muon.first_momentum, 0.85f);
    EXPECT_FLOAT_EQ(muon.momentum, 0.95f);
    EXPECT_EQ(muon.momentum_steps, 300);
    EXPECT_FALSE(muon.muoneq || muon.plus);
    EXPECT_EQ(choose_layout(c, small_gpt2()).muon, 4);
    c.optimizer = "muon,normuon,muoneq";
    ASSERT_EQ(read_optimizer(c, &optimizer, &muon), "");
    EXPECT_TRUE(muon.muoneq && !muon.plus);
    c.optimizer = "muon,normuon,muon+";
    ASSERT_EQ(read_optimizer(c, &optimizer, &muon), "");
    EXPECT_TRUE(muon.plus && !muon.muoneq);
    EXPECT_FLOAT_EQ(muon.beta2, 0.95f);

    // AdamW has those of Muon that are its own.
    c.optimizer = "adamw,head=0.01,decay=0,decay-vectors,beta1=0.8";
    ASSERT_EQ(read_optimizer(c, &optimizer, &muon), "");
    EXPECT_EQ(optimizer, Optimizer::ADAMW);
    EXPECT_TRUE(muon.apart && muon.decays_vectors);
    EXPECT_FLOAT_EQ(muon.rates[size_t(MuonGroup::HEAD)], 0.5f);
    EXPECT_EQ(muon.others_decay, 0);
    EXPECT_FLOAT_EQ(muon.others_beta1, 0.8f);
    EXPECT_EQ(choose_layout(c, small_gpt2()).muon, 0);
    c.lora = 4;
    EXPECT_HAS(check_optimizer(c), "adapters have none that learn: give --optimizer adamw");
    c.lora = 0;

    // A setting that is not understood is named.
    for (auto [text, wrong] : {std::pair{"lion", "give adamw, sgd or muon"},
                               {"adamw,ns=polar", "no setting 'ns': give some of table="},
                               {"sgd,table=1", "sgd has no settings"},
                               {"adamw,beta1=1", "beta1 wants a number from 0 to 0.99999"},
                               {"muon,ns=cubic", "ns is simple"},
                               {"muon,scale=big", "scale is shape"},
                               {"muon,momentum=1", "momentum wants a number"},
                               {"muon,momentum=0.8:0.9", "momentum wants a number"},
                               {"muon,momentum=0.8:0.9:0", "momentum wants a number"},
                               {"muon,normuon=1", "normuon wants a number"},
                               {"adamw,muon+", "no setting 'muon+'"},
                               {"muon,muoneq=1", "no setting 'muoneq'"},
                               {"muon,warp=9", "no setting 'warp'"}}) {
        c.optimizer = text;
        EXPECT_HAS(read_optimizer(c, &optimizer, &muon), wrong);
    }
}

// Presets have the parameters that their authors publish.
TEST(Model, PublishedParameterCounts) {
    std::map<std::string, size_t> published = {
        {"gpt2", 124439808},         {"gpt2-medium", 354823168},    {"gpt2-large", 774030080},
        {"gpt2-xl", 1557611200},     {"llama2-7b", 6738415616},     {"llama3-8b", 8030261248},
        {"llama3-70b", 70553706496}, {"llama3-405b", 405853388800}, {"tinyllama-1.1b", 1100048384},
        {"qwen2.5-0.5b", 494032768},
        {"qwen3-0.6b", 596049920}, {"qwen3-1.7b", 1720574976}, {"llama3.1-8b", 8030261248},
        {"llama3.1-70b", 70553706496}, {"smollm3-3b", 3075098624}, {"phi-3-mini", 3821079552},
        {"gemma-2-2b", 2614341888}, {"gemma-3-1b", 999885952}, {"olmo-2-7b", 7298617344},
        {"pythia-70m", 70426624}, {"pythia-160m", 162322944}, {"pythia-410m", 405334016},
        {"pythia-1b", 1011781632}, {"pythia-1.4b", 1414647808}, {"pythia-2.8b", 2775208960},
        {"pythia-6.9b", 6857302016}, {"pythia-12b", 11846072320},
        {"mixtral-8x7b", 46702792704}, {"qwen3-30b-a3b", 30532122624},
        {"olmoe-1b-7b", 6919161856}, {"qwen1.5-moe-a2.7b", 14315784192},
        {"deepseek-v2-lite", 15706484224}, {"deepseek-v2", 235741434880},
        {"deepseek-v3", 671026419200}, {"gpt-oss-20b", 20914757184},
        {"gpt-oss-120b", 116829156672}};

    // Active parameters, those that a token meets, in 1e9. Without experts all are active.
    std::map<std::string, double> active = {{"mixtral-8x7b", 12.880}, {"qwen3-30b-a3b", 3.353},
                                            {"olmoe-1b-7b", 1.282},
                                            {"qwen1.5-moe-a2.7b", 2.689},
                                            {"deepseek-v2-lite", 2.661}, {"deepseek-v2", 21.376},
                                            {"deepseek-v3", 37.552}, {"gpt-oss-20b", 4.187},
                                            {"gpt-oss-120b", 5.712}};
    for (const Preset& p : model_presets())
        if (published.count(p.name)) {
            Model model = make_model(p.shape);
            EXPECT_EQ(parameter_count(model), published[p.name]) << p.name;
            double of_token = double(active_parameters(model)) / 1e9;
            double want = active.count(p.name) ? active[p.name] : double(published[p.name]) / 1e9;
            EXPECT_NEAR(of_token, want, 0.0005) << p.name;
        }
}

// GPT-3's presets have the sizes of table 2.1 of arXiv:2005.14165, within 2%: it rounds to two
// digits, and the second may be one off. Its 1.3B has heads that do not fill its channels, and its
// 13B other channels.
TEST(Model, GPT3CountsAreThoseOfItsTable) {
    std::map<std::string, double> published = {
        {"gpt3-small", 125e6}, {"gpt3-medium", 350e6}, {"gpt3-large", 760e6}, {"gpt3-xl", 1.3e9},
        {"gpt3-2.7b", 2.7e9},  {"gpt3-6.7b", 6.7e9},   {"gpt3-13b", 13e9},    {"gpt3-175b", 175e9}};
    size_t seen = 0;
    for (const Preset& p : model_presets()) {
        if (!published.count(p.name)) continue;
        seen++;

        // A block has 12 C^2 elements in matrices, and 13 C in biases and norms.
        size_t L = p.shape.L, C = p.shape.C, tables = (50257 + 2048) * C;
        EXPECT_EQ(parameter_count(make_model(p.shape)), tables + L * (12 * C * C + 13 * C) + 2 * C);
        double count = double(parameter_count(make_model(p.shape)));
        EXPECT_NEAR(count / published[p.name], 1, 0.02) << p.name;
    }
    EXPECT_EQ(seen, published.size());
}

// ----------------------------------------------------------------------------
// the map from local to global elements, for any number of tensor-parallel ranks

// for_each_run() maps a rank's elements to those of the whole parameter: in local order, and all
// ranks together reach each element once.
TEST(Model, RunsCoverEachGlobalElementOnce) {
    Parameter columns, rows, fused;
    columns.shape = {12, 5}, columns.shard = {0};
    rows.shape = {7, 12}, rows.shard = {1};
    fused.shape = {24, 3}, fused.shard = {0, 3};
    for (const Parameter& p : {columns, rows, fused})
        for (int tp : {1, 2, 4}) {
            std::vector<int> seen(p.elements());
            for (int r = 0; r < tp; r++) {
                size_t expect = 0;
                for_each_run(p, r, tp, [&](size_t local, size_t global, size_t count) {
                    EXPECT_EQ(local, expect);
                    expect += count;
                    for (size_t i = 0; i < count; i++) seen[global + i]++;
                });
                EXPECT_EQ(expect, p.elements() / size_t(tp));
            }
            for (int n : seen) EXPECT_EQ(n, 1);
        }

    // Experts of shapes (E F,C) and (E C,F): distributed over ranks, and each cut
    // by tensor parallelism.
    Parameter widen, narrow;
    widen.shape = {24, 3}, widen.shard = {0, 6};
    narrow.shape = {18, 4}, narrow.shard = {1};
    for (Parameter p : {widen, narrow})
        for (auto [ep, tp] : {std::pair{2, 1}, {3, 2}, {6, 4}, {6, 1}}) {
            std::vector<int> owner(p.elements(), -1);
            p.pieces = tp, p.stack = 6;
            for (int r = 0; r < ep * tp; r++) {
                size_t expect = 0;
                p.experts = {ep, r / tp};
                for_each_run(p, r % tp, tp, [&](size_t local, size_t global, size_t count) {
                    EXPECT_EQ(local, expect);
                    expect += count;
                    for (size_t i = 0; i < count; i++) owner[global + i] = r;
                });
                EXPECT_EQ(expect, p.local_elements());
                EXPECT_EQ(p.local_rows() * p.local_cols(), expect);
            }

            // The first rank has the first experts.
            for (size_t i = 0; i < owner.size(); i++)
                EXPECT_EQ(owner[i] / tp, int(i / (p.elements() / size_t(ep))));
        }

    // A fused weight: rank 1 of 2 holds the second half of q, of k and of v.
    std::vector<size_t> starts;
    for_each_run(fused, 1, 2, [&](size_t, size_t global, size_t) { starts.push_back(global / 3); });
    EXPECT_EQ(starts, (std::vector<size_t>{4, 12, 20}));
}

// Casts of weights to fp8 that are kept for a step: two bytes an element (the matrix and its
// transpose), two words and two rows of scales. With ZeRO-3, or if each product casts its own,
// nothing is kept.
TEST(Memory, CastsOfFp8WeightsAreCounted) {
    Shape shape = llama_shape(2, 2, 2, 256, 512, 50, 32, 10000);
    shape.fp8.kind = Fp8::BLOCK;
    auto bytes = [&](Layout layout) {
        Model model = make_model(shape, layout);
        return data_bytes<bf16>(make_plan(layout, model, options(1)), model, {Kind::CAST}, Cpu{});
    };

    // q, k, v and o; gate, up and down: 2 x 2 or 4 x 2 blocks, whose scales go in rows of four.
    size_t four = 2 * (256 + 256 * 256 + 256), three = 2 * (256 + 256 * 512 + 256);
    EXPECT_EQ(bytes({}), 2 * (4 * four + 3 * three));
    Layout shards;
    shards.dp = {2, 0}, shards.zero = 3;
    EXPECT_EQ(bytes(shards), 0u);
    shape.fp8.kept = false;
    EXPECT_EQ(bytes({}), 0u);
}

// The workspace of a layer has room for the fp8 operands of each product, beside the
// product's own scratch.
TEST(Memory, Fp8OperandsHaveRoom) {
    Shape shape = llama_shape(1, 2, 2, 256, 1024, 50, 32, 10000);
    shape.fp8.kind = Fp8::TENSOR;
    Model model = make_model(shape);
    Plan p = make_plan(options(1), model);
    size_t N = p.rows(),
           workspace = block_workspace<bf16>(p, model, rank_shape(p, model), 1, Cpu{});
    for (const Parameter& w : model.parameters) {
        if (w.layer != 1 || w.shape.size() == 1) continue;
        size_t product = linear_scratch_bytes<bf16>(N, w.rows(), w.cols(), Cpu{});
        size_t operands = linear_fp8_bytes(N, w.rows(), w.cols(), shape.fp8.kind);
        EXPECT_GT(operands, 2 * w.rows() * w.cols()) << w.name;
        EXPECT_GE(workspace, product + operands) << w.name;
    }
}
