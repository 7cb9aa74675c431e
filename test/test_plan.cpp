// test_plan.cpp - plans without running them: generators, passes, the check, the print, lifetimes
// and places
#include <gtest/gtest.h>
#include <filesystem>
#include <fstream>
#include <regex>
#include "../llmc/trainer.h"

static Model small_model(size_t L, bool tied = true, bool llama = false) {
    Shape s = llama ? llama_shape(L, 2, 1, 8, 12, 50, 32, 10000) : gpt2_shape(L, 2, 8, 50, 32);
    s.tied = tied;
    return make_model(s);
}

static Plan options(int micro_batches, Recompute level = Recompute::NONE, bool split = false) {
    Plan p;
    p.B = 2, p.T = 16, p.micro_batches = micro_batches, p.recompute = level,
    p.split_backward = split;
    return p;
}

static size_t bytes_of(const Plan& p, const Model& m, Data d) {
    return data_bytes<float>(p, m, d, Cpu{});
}

// Every schedule x pass x size: legal, and its places do not overlap while both live.
TEST(Plan, EveryPlanIsLegal) {
    for (size_t L : {1, 2, 5})
        for (int m : {1, 2, 3, 8})
            for (Recompute level : {Recompute::NONE, Recompute::SELECTIVE, Recompute::FULL})
                for (bool split : {false, true})
                    for (bool tied : {false, true}) {
                        Model model = small_model(L, tied, L == 2);
                        Plan p = make_plan(options(m, level, split), model);
                        EXPECT_EQ(plan_check(p, model), "");
                    }
}

// ----------------------------------------------------------------------------
// plans of many ranks

struct Ranks {
    int dp, zero, pp, chunks, micro_batches;
    Pipeline pipeline;
    Recompute recompute;
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
                                   Recompute((zero + m) % 3)});
    return all;
}
static Plan plan_of_rank(const Ranks& r, const Model& model, int pp_rank, Mode mode = Mode::TRAIN) {
    Plan p = options(r.micro_batches, mode == Mode::TRAIN ? r.recompute : Recompute::NONE);
    p.mode = mode, p.shards = r.dp, p.zero = r.zero, p.pp = r.pp, p.pp_rank = pp_rank;
    p.chunks = r.chunks, p.pipeline = r.pipeline, p.prefetch = 1 + r.micro_batches % 2;
    p.first_layer = split_layers(std::vector<double>(size_t(model.layers()), 1), p.stages());
    return make_plan(p, model);
}

TEST(Plan, EveryRanksPlanIsLegal) {
    for (bool tied : {false, true}) {
        Model model = small_model(5, tied, !tied);
        for (const Ranks& r : many_ranks())
            for (int rank = 0; rank < r.pp; rank++) {
                EXPECT_EQ(plan_check(plan_of_rank(r, model, rank), model), "");
                Ranks forward = r;
                forward.micro_batches = 1;
                EXPECT_EQ(plan_check(plan_of_rank(forward, model, rank, Mode::EVALUATE), model),
                          "");
            }
    }
}

// RELEASE only says where the bytes are free; all else is needed.
TEST(Plan, DroppingAnyActionOfARankIsFound) {
    for (bool tied : {false, true}) {
        Model model = small_model(5, tied, !tied);
        for (const Ranks& r : many_ranks())
            for (int rank = 0; rank < r.pp; rank++) {
                Plan p = plan_of_rank(r, model, rank);
                for (size_t i = 0; i < p.actions.size(); i++) {
                    if (p.actions[i].kind == Do::RELEASE) continue;
                    Plan q = p;
                    q.actions.erase(q.actions.begin() + long(i));
                    EXPECT_NE(plan_check(q, model), "")
                        << action_text(p.actions[i], model) << " dropped; zero " << r.zero << " pp "
                        << r.pp << " rank " << rank;
                }
            }
    }
}

// Whole plans of a step over a pipeline: every send has its receive in the peer's plan, in order.
TEST(Plan, SendsMeetTheirReceives) {
    Model model = small_model(5);
    for (const Ranks& r : many_ranks()) {
        std::map<std::pair<int, int>, std::vector<std::string>> sent, received;
        for (int rank = 0; rank < r.pp; rank++)
            for (const Action& a : plan_of_rank(r, model, rank).actions)
                for (const Transfer& t : a.transfers)
                    t.send ? sent[{rank, t.peer}].push_back(name_of(t))
                           : received[{t.peer, rank}].push_back(name_of(t));
        EXPECT_EQ(sent, received);
    }
}

// ZeRO keeps a stage's share of the bytes: 18 N, 6 N + 12 N/d, 2 N + 16 N/d and 18 N/d in bf16.
TEST(Arena, ShardsAreTheTextbooks) {
    Model model = make_model(llama_shape(4, 8, 8, 512, 1408, 32000, 64, 10000)); // untied
    for (int zero : {0, 1, 2, 3}) {
        Plan p = options(1);
        p.shards = 8, p.zero = zero;
        double N = 0, kept = 0;
        for (size_t b = 0; b < model.buckets.size(); b++) {
            N += double(whole_elements(p, model.buckets[b]));
            for (Kind k : {Kind::WEIGHT, Kind::GRAD, Kind::MASTER, Kind::MOMENTS})
                kept += double(data_bytes<bf16>(p, model, {k, int(b)}, Cpu{}));
        }
        double textbook[] = {18, 6 + 12.0 / 8, 2 + 16.0 / 8, 18.0 / 8};
        EXPECT_EQ(kept, N * textbook[zero]) << zero;
    }
}

TEST(Plan, ModesWithoutTrainingHaveNoBackward) {
    Model model = small_model(2);
    for (Mode mode : {Mode::EVALUATE, Mode::GENERATE}) {
        Plan o = options(1);
        o.mode = mode, o.cache = 32;
        Plan p = make_plan(o, model);
        EXPECT_EQ(plan_check(p, model), "");
        for (Action a : p.actions)
            EXPECT_TRUE(a.kind == Do::LOAD || a.kind == Do::COUNT || a.kind == Do::F);
    }
}

// What plan.h's opening comment shows is what the program prints.
TEST(Plan, TheCommentInPlanHIsTheProgramsPrint) {
    std::ifstream in(std::string(REPO_ROOT) + "/llmc/plan.h");
    ASSERT_TRUE(in.good());
    std::string line, comment;
    while (std::getline(in, line) && line.rfind("#pragma", 0) != 0)
        if (line.rfind("//     ", 0) == 0) comment += line.substr(7) + "\n";
    Model model = small_model(2);
    EXPECT_EQ(comment, plan_text(make_plan(options(2, Recompute::SELECTIVE), model), model));
}

// ----------------------------------------------------------------------------
// the tree

// Operators include common.h, rand.h and operators; what stands above them never reaches down the
// other way. hopper.cuh has its models in test/.
TEST(Tree, WhoMayIncludeWhom) {
    namespace fs = std::filesystem;
    int files = 0;
    for (const fs::directory_entry& e : fs::directory_iterator(std::string(REPO_ROOT) + "/llmc")) {
        std::string file = e.path().filename().string(), line;
        bool op = e.path().extension() == ".cuh", host = file == "plan.h" || file == "arena.h" ||
                                                         file == "model.h" || file == "config.h" ||
                                                         file == "grid.h";
        std::ifstream in(e.path());
        std::getline(in, line);
        EXPECT_EQ(line.rfind("// " + file + " - ", 0), 0u)
            << file << " does not open with its name and what it is";
        for (files++; std::getline(in, line);) {
            std::smatch m;
            if (!std::regex_search(line, m, std::regex("^#include \"([^\"]+)\""))) continue;
            std::string target = m[1];
            bool target_op = target.size() > 4 && target.substr(target.size() - 4) == ".cuh";
            bool low = target == "common.h" || target == "rand.h" ||
                       (file == "hopper.cuh" && target.rfind("../test/emulator_", 0) == 0);
            EXPECT_TRUE(!op || target_op || low) << file << " includes " << target;
            EXPECT_FALSE(host && target_op) << file << " includes " << target;
        }
    }
    EXPECT_GT(files, 20);
}

// ----------------------------------------------------------------------------
// the check finds what is wrong

static std::string check_without(Plan p, const Model& model, size_t drop) {
    p.actions.erase(p.actions.begin() + long(drop));
    return plan_check(p, model);
}

// No action of a plan can be left out.
TEST(Plan, DroppingAnyActionIsFound) {
    for (bool split : {false, true})
        for (Recompute level : {Recompute::NONE, Recompute::SELECTIVE, Recompute::FULL}) {
            Model model = small_model(2);
            Plan p = make_plan(options(2, level, split), model);
            for (size_t i = 0; i < p.actions.size(); i++)
                EXPECT_NE(check_without(p, model, i), "")
                    << action_text(p.actions[i], model) << " dropped";
        }
}

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

TEST(Plan, MessagesNameActionAndDatum) {
    Model model = small_model(2);
    Plan p = make_plan(options(1, Recompute::FULL), model);
    for (size_t i = 0; i < p.actions.size(); i++)
        if (p.actions[i].kind == Do::R && p.actions[i].layer == 1) {
            EXPECT_EQ(check_without(p, model, i),
                      "B(0,1) reads redo.b(0,1), which nothing before it wrote");
        }
}

// ----------------------------------------------------------------------------
// places

TEST(Arena, LivingDataNeverShareBytes) {
    for (size_t L : {1, 3})
        for (int m : {1, 3})
            for (Recompute level : {Recompute::NONE, Recompute::SELECTIVE, Recompute::FULL})
                for (bool split : {false, true}) {
                    Model model = small_model(L);
                    Plan p = make_plan(options(m, level, split), model);
                    Arena arena = arena_place(
                        {p}, model, [&](const Plan& q, Data d) { return bytes_of(q, model, d); });
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
                    for (const Place& a : all) EXPECT_LE(a.offset + a.bytes, arena.bytes);
                    // first fit stays close to the least that any placement needs
                    EXPECT_LE(double(arena.bytes - arena.persistent_bytes),
                              1.15 * double(arena.peak[0]));
                }
}

// Papers' byte counts: bf16 with float gradients, masters and moments is 18 bytes a parameter;
// selective
// recomputation drops a block's two norms and its activation function, full recomputation all but
// its input.
TEST(Arena, MemoryIsTheTextbooks) {
    Shape s = gpt2_shape(12, 12, 768);
    Model model = make_model(s);
    Plan p = options(1);
    p.B = 4, p.T = 1024;
    size_t P = 0, bytes = 0;
    for (const Bucket& b : model.buckets) P += b.elements;
    for (size_t b = 0; b < model.buckets.size(); b++)
        for (Kind k : {Kind::WEIGHT, Kind::GRAD, Kind::MASTER, Kind::MOMENTS})
            bytes += data_bytes<bf16>(p, model, {k, int(b)}, Cpu{});
    EXPECT_EQ(bytes, 18 * P);
    EXPECT_EQ(parameter_count(model), 124439808u); // GPT-2 124M
    size_t N = p.B * p.T, C = s.C;
    auto kept = [&](Recompute level) {
        p.recompute = level;
        return data_bytes<bf16>(p, model, {Kind::KEPT_B, 1}, Cpu{}) +
               data_bytes<bf16>(p, model, {Kind::KEPT_W, 1}, Cpu{});
    };
    size_t statistics = 4 * 4 * N, lse = 4 * N * s.NH;
    EXPECT_EQ(kept(Recompute::NONE), 2 * N * C * (1 + 3 + 1 + 1 + 1 + 4 + 4) + statistics + lse);
    EXPECT_EQ(kept(Recompute::SELECTIVE), 2 * N * C * (3 + 1 + 1 + 4) + lse);
    EXPECT_EQ(kept(Recompute::FULL), 0u);
}

// The rows of a bucket's shards are its parameters, each element once, with its place in the whole
// parameter, which stochastic rounding takes its random numbers from.
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
                    mine[row.first + i] += int(from + row.offset + i); // where it lies
                }
        for (int k = bucket.first; k < bucket.first + bucket.count; k++) {
            const Parameter& p = model.parameters[size_t(k)];
            std::vector<int> places(p.elements());
            for (size_t i = 0; i < places.size(); i++) places[i] = int(p.offset + i);
            EXPECT_EQ(seen[fnv1a(p.name)], places) << p.name;
        }
    }
}

TEST(Model, PublishedParameterCounts) {
    std::map<std::string, size_t> published = {
        {"gpt2", 124439808},         {"gpt2-medium", 354823168},    {"gpt2-large", 774030080},
        {"gpt2-xl", 1557611200},     {"llama2-7b", 6738415616},     {"llama3-8b", 8030261248},
        {"llama3-70b", 70553706496}, {"llama3-405b", 405853388800}, {"tinyllama-1.1b", 1100048384},
        {"qwen2.5-0.5b", 494032768}};
    for (const Preset& p : model_presets())
        if (published.count(p.name)) {
            EXPECT_EQ(parameter_count(make_model(p.shape)), published[p.name]) << p.name;
        }
}

// ----------------------------------------------------------------------------
// the map from local to global elements, for any number of tensor-parallel ranks

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
    // rank 1 of 2 holds the second half of q, of k and of v
    std::vector<size_t> starts;
    for_each_run(fused, 1, 2, [&](size_t, size_t global, size_t) { starts.push_back(global / 3); });
    EXPECT_EQ(starts, (std::vector<size_t>{4, 12, 20}));
}
