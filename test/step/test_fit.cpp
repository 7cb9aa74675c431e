// test_fit.cpp - --fit: what fits one card, by the run's own arena; --calibrate: machines' numbers
#include "../../llmc/planner/calibrate.h"
#include "../../llmc/planner/fit.h"
#include "../../llmc/planner/predict.h"
#include "../../llmc/run/plan_run.h"
#include "../../llmc/tune/teacher.h"
#include "../harness/testing.h"
#include "small_models.h"

using namespace llmc;

// ----------------------------------------------------------------------------
// --fit

namespace {

RunFacts facts() {
    Run run;
    take_teacher(run);
    return run_facts(run);
}

// The question of a card with so many GB, for a small model.
PlanQuestion small_fit(double gb, Shape* shape) {
    Config user;
    EXPECT_EQ(set_flag(user, "seq", "256"), "");
    EXPECT_EQ(set_flag(user, "batch-tokens", "8192"), "");
    PlanQuestion q = fit_question(facts(), user, concat(gb));
    take_model(q, user, "pythia-70m");
    *shape = q.shape;
    return q;
}

const FitWay& way_named(const std::string& name) {
    for (const FitWay& way : fit_ways())
        if (name == way.name) return way;
    return fit_ways()[0];
}

} // namespace

// Adapters of a large model fit the card by recomputation, where all rungs that move more lack the
// host's memory, or keep more on the card.
TEST(Fit, ARungThatFitsIsFoundAmongOthersThatDoNot) {
    Config user;
    EXPECT_EQ(set_flag(user, "seq", "8192"), "");
    EXPECT_EQ(set_flag(user, "machine", "rtx4090"), "");
    PlanQuestion q = fit_question(facts(), user, "180");
    EXPECT_LT(q.host_room, 64 * GIB);
    take_model(q, user, "llama3-70b");
    FitCell cell = fit_cell(q, way_named("lora"));
    EXPECT_EQ(cell.flags, "--lora 16 --recompute full");
    EXPECT_GT(cell.B, 0);
}

// The flags that --fit prints are the largest micro-batch of their rung: the run fits by the
// arena of every micro-batch, and with twice the micro-batch it does not.
TEST(Fit, FlagsFitAndTheNextMicroBatchDoesNot) {
    Shape shape;
    PlanQuestion q = small_fit(1.6, &shape);
    for (const char* name : {"full", "offload"}) {
        FitCell cell = fit_cell(q, way_named(name));
        ASSERT_GT(cell.B, 0) << name;

        // Place the run with all of its micro-batches, as the program on a GPU would.
        Config c = fit_config(q, cell.flags, cell.B);
        EXPECT_EQ(config_check(c, shape), "");
        Trainer<bf16, Cpu> t;
        sizes_of_gpu = true;
        trainer_place(t, shape, plans_of(c, shape), choose_layout(c, shape));
        sizes_of_gpu = false;
        double whole = double(t.arena.device().bytes);
        EXPECT_LE(whole, q.room) << name;
        EXPECT_NEAR(cell.bytes / whole, 1, 0.005) << name;

        // Twice the micro-batch is too much.
        Config more = fit_config(q, cell.flags, 2 * cell.B);
        EXPECT_GT(try_fit(q, more, Depth::PLACED).bytes, q.room) << name;
    }
}

// Offloaded masters and moments move 24 bytes a parameter: 12 come and 12 go, one move at a time. A
// step takes as long as they do at least. Every update but the last one runs beside the moves of
// another bucket, so that more than half of all updates hide where no bucket has half of the model.
TEST(Fit, MovesRunBesideTheStep) {
    Shape shape;
    PlanQuestion q = small_fit(8, &shape);
    auto seconds = [&](const char* flags) {
        const Trial& t = try_fit(q, fit_config(q, flags, 8), Depth::TIMED);
        EXPECT_EQ(t.wrong, "");
        return t.seconds;
    };
    double elements = 0, largest = 0;
    for (const Bucket& b : make_model(shape).buckets) {
        elements += double(b.elements);
        largest = std::max(largest, double(b.elements));
    }
    ASSERT_LT(largest, elements / 2);
    double moves = 24 * elements / q.machine.host_rate();

    // An update reads a gradient of 4 bytes, reads and writes 12 of masters and moments, and writes
    // a weight of 2.
    double updates = (4 + 2 * 12 + 2) * elements / q.machine.memory_rate();
    ASSERT_LT(updates, moves);

    double with = seconds("--offload optimizer"), without = seconds("");
    EXPECT_GT(moves, 0.01 * without);
    EXPECT_GT(with, without);
    EXPECT_GE(with, 0.99 * moves);
    EXPECT_LT(with, without + moves - 0.5 * updates);
}

// Frozen matrices have no weight gradient: a block's backward pass has the products of its forward
// pass, and those of the adapters again. With all weights trained it has twice the products.
TEST(Fit, FrozenProductsRunOnceBackward) {
    CostModel cost;
    EXPECT_EQ(machine_named(&cost.machine, "rtx3090"), "");
    Shape shape = gpt2_shape(2, 8, 512, 1000, 256);
    Adapters adapters;
    Model whole = make_model(shape);
    EXPECT_EQ(choose_adapters(whole, {16, 32, false, "all"}, &adapters), "");
    shape.tuned.adapters = std::make_shared<const Adapters>(adapters);
    Model frozen = make_model(shape);
    Plan p;
    p.B = 4, p.T = 256;

    // Compare both models' products.
    auto products = [&](const Model& m, bool backward) {
        return block_seconds(cost, p, m, 1, backward).products;
    };
    double thin = block_products(cost, p, frozen, 1, true);
    EXPECT_DOUBLE_EQ(products(whole, true), 2 * products(whole, false));
    EXPECT_GT(thin, 0);
    EXPECT_DOUBLE_EQ(products(frozen, false), products(whole, false) + thin);
    EXPECT_DOUBLE_EQ(products(frozen, true), products(frozen, false) + thin);

    // Codes are dequantised once a pass: a byte and a half read and written more for an element.
    double wide = block_seconds(cost, p, frozen, 1, false).memory;
    p.stored = Stored::NF4;
    double codes = block_seconds(cost, p, frozen, 1, false).memory - wide;
    EXPECT_NEAR(codes * cost.machine.memory_rate() / (12.0 * 512 * 512 * 2.5), 1, 1e-9);
}

// A larger card never trains a model more slowly at the same rates, and needs leaner ways less.
TEST(Fit, MoreMemoryIsNeverWorse) {
    for (const FitWay& way : fit_ways()) {
        double before = 0;
        for (double gb : {1.0, 2.0, 4.0}) {
            Shape shape;
            PlanQuestion q = small_fit(gb, &shape);
            EXPECT_EQ(machine_named(&q.machine, "rtx3090"), "");
            FitCell cell = fit_cell(q, way);
            EXPECT_GE(cell.rate, 0.999 * before) << way.name << " " << gb << " GB " << cell.flags;
            before = cell.rate;
        }
    }

    // Where data leave, a rung that keeps more on the card is not always the faster one.
    double before = 0;
    for (double gb : {16.0, 24.0}) {
        Config user;
        PlanQuestion q = fit_question(facts(), user, concat(gb));
        EXPECT_EQ(machine_named(&q.machine, "rtx4090"), "");
        take_model(q, user, "gpt3-13b");
        FitCell cell = fit_cell(q, way_named("lora"));
        EXPECT_GE(cell.rate, 0.999 * before) << gb << " GB " << cell.flags;
        before = cell.rate;
    }
}

// A rung that the run would refuse is left out, and if all are, the answer says why. The flags go
// with the heading's sequence and batch, or name a batch of whole micro-batches.
TEST(Fit, RefusedRungsAreLeftOut) {
    Shape shape;
    PlanQuestion q = small_fit(2, &shape);
    EXPECT_EQ(set_flag(q.config, "optimizer", "sgd"), ""); // it has no small states
    FitCell cell = fit_cell(q, way_named("full"));
    EXPECT_GT(cell.B, 0) << cell.refusal;

    // 1000 tokens divide no batch of 65536.
    q.config.seq = 1000;
    cell = fit_cell(q, way_named("full"));
    ASSERT_GT(cell.B, 0) << cell.refusal;
    EXPECT_HAS(cell.flags, "--batch-tokens ");
    Config c = q.config;
    c.micro_batch = cell.B;
    set_flags(c, cell.flags);
    EXPECT_EQ(config_check(c, shape), "");

    q.config.seq = int(shape.P) + 1;
    cell = fit_cell(q, way_named("full"));
    EXPECT_EQ(cell.B, 0);
    EXPECT_HAS(fit_line("m", cell, 0), "refused: --seq");
}

// A refusal of every model and way is an error of the command line. One of some models stands below
// the table of cards; a dash says that memory lacks.
TEST(Fit, RefusalsAreNoLackOfMemory) {
    for (const char* cards : {"24", "8,24"}) {
        Ran ran = shell(concat(program(), " --fit ", cards, " --loss kto"));
        EXPECT_EQ(ran.status, 1);
        EXPECT_HAS(ran.text, "error: --loss kto learns from answers with a label: give --data");
    }
    Ran ran = shell(program() + " --fit 1,24 --seq 2048");
    EXPECT_EQ(ran.status, 0);
    EXPECT_HAS(ran.text, "\n| gpt2 | refused | refused |\n");
    EXPECT_HAS(ran.text, "\n| llama3-70b | - |");
    EXPECT_HAS(ran.text, "\ngpt2 is refused: --seq 2048 is beyond the model's 1024 positions");
    EXPECT_FALSE(has(ran.text, "llama3-70b is refused"));
}

// A line that --fit or --plan auto prints passes --explain with its card and --memory, and takes
// the bytes that stand there: the card's alone, with a GPU's chunks of logits.
TEST(Fit, PrintedFlagsPassAsTheyStand) {
    // Ask --fit for every way of a card that holds little.
    std::string card = put_file(scratch("card.txt"), "base = rtx3060\nmemory_gb = 2.4\n");
    std::string flags = " --model qwen3-0.6b --seq 512 --batch-tokens 8192";
    Config user;
    for (auto [name, value] : {std::pair("model", "qwen3-0.6b"), std::pair("seq", "512"),
                               std::pair("batch-tokens", "8192")})
        EXPECT_EQ(set_flag(user, name, value), "");
    PlanQuestion q = fit_question(facts(), user, card);
    take_model(q, user, "qwen3-0.6b");
    auto explain = [&](const std::string& machine, const std::string& more) {
        return shell(concat(program(), flags, " --precision bf16 --explain --machine ", machine,
                            " --memory ", q.room / GIB, " ", more));
    };

    auto total_of_arena = [](const Ran& ran) {
        size_t at = ran.text.find("\n  total ");
        EXPECT_NE(at, ran.text.npos) << ran.text;
        return strtod(ran.text.c_str() + at + strlen("\n  total "), nullptr);
    };

    // Paste each line that there is.
    int lines = 0;
    for (const FitWay& way : fit_ways()) {
        FitCell cell = fit_cell(q, way);
        if (cell.B == 0) continue;
        Ran ran = explain(card, concat("--micro-batch ", cell.B, " ", cell.flags));
        ASSERT_EQ(ran.status, 0) << cell.flags << "\n" << ran.text;
        EXPECT_NEAR(cell.bytes / total_of_arena(ran), 1, 0.001) << cell.flags;
        lines++;
    }
    EXPECT_GE(lines, 3);

    // Paste the planner's answers, which move data to the host. All of their micro-batches were
    // placed: they take the bytes that their lines have, though longer plans have other holes.
    std::string answer;
    std::string large = concat(program(), " --model qwen3-1.7b --seq 2048 --batch-tokens 65536",
                               " --precision bf16 --explain --machine rtx3060 ");
    for (bool small : {false, true}) {
        auto ask = [&](const std::string& more) {
            return small ? explain(card, more) : shell(large + more);
        };
        Ran plan = ask("--plan auto --gpus 1");
        ASSERT_EQ(plan.status, 0) << plan.text;
        size_t at = plan.text.find("--dp 1 --"), end = plan.text.find('\n', at);
        ASSERT_NE(at, plan.text.npos);
        answer = plan.text.substr(at, end - at);
        answer = answer.substr(0, answer.find("  ("));
        EXPECT_HAS(answer, "--offload ");
        Ran pasted = ask(answer);
        EXPECT_EQ(pasted.status, 0) << answer << "\n" << pasted.text;
        EXPECT_HAS(plan.text.substr(0, at), bytes_text(total_of_arena(pasted)));
    }

    // A processor has one memory for both, so the same flags are refused there.
    EXPECT_HAS(explain("cpu", answer).text, " with what it offloads, and --memory ");
}

// Frozen weights may wait in the host's memory, whose time beside adapters is short, and codes of
// weights stay on the card while activations leave it.
TEST(Fit, AdaptersTrainBesideWeightsInTheHost) {
    Config user;
    PlanQuestion q = fit_question(facts(), user, "12");
    take_model(q, user, "llama3-8b");
    FitCell lora = fit_cell(q, way_named("lora"));
    ASSERT_GT(lora.B, 0);
    EXPECT_HAS(lora.flags, "--offload weights");
    EXPECT_GT(lora.host, 14 * GIB); // of 16 bits a frozen weight
    EXPECT_GT(lora.rate, 450);      // 527 by --plan auto

    // Ways without the card alone are named up to the first that needs nothing else.
    std::string word = fit_word(fit_cells(q, false));
    EXPECT_EQ(word.find("lora 5"), 0u) << word;
    EXPECT_HAS(word, ", qlora ");
    q = fit_question(facts(), user, "7.5");
    take_model(q, user, "llama3-8b");
    EXPECT_HAS(fit_cell(q, way_named("qlora")).flags, "--offload activations");
}

// A way through the host's memory takes no more of it than the machine has, less a twentieth. Where
// the leanest rung takes too much, one that moves less may still do.
TEST(Fit, AHostHasTheRoomThatAMachineSays) {
    std::string path = put_file(scratch("ram.txt"), "base = rtx3090\nhost_ram_gb = 32\n");
    EXPECT_DOUBLE_EQ(fit_question(facts(), {}, path).host_room, 0.95 * 32 * GIB);
    EXPECT_DOUBLE_EQ(fit_question(facts(), {}, "24").host_room, 0.95 * 64 * GIB); // a desktop's
    EXPECT_DOUBLE_EQ(fit_question(facts(), {}, "h100").host_room, 0.95 * 256 * GIB);

    // Optimizer state alone leaves the card, or all of it.
    FitWay way = {"offload", {"--offload optimizer",
                              "--offload optimizer,activations,gradients,weights"}};
    Shape shape;
    PlanQuestion q = small_fit(8, &shape);
    auto least = [&](const std::string& rung) {
        const Trial& t = try_fit(q, fit_config(q, rung, 1), Depth::PLACED);
        EXPECT_EQ(t.wrong, "");
        return t.host;
    };
    double some = least(way.rungs[0]), all = least(way.rungs[1]);
    EXPECT_LT(some, all);
    q.host_room = (some + all) / 2;
    FitCell cell = fit_cell(q, way);
    EXPECT_GT(cell.B, 0);
    EXPECT_FALSE(has(cell.flags, "weights"));
    EXPECT_EQ(cell.leanest, way.rungs[0]);
    q.host_room = 0.99 * some;
    EXPECT_EQ(fit_cell(q, way).B, 0);
}

// Cards are numbers or machines; flags that --fit chooses are refused by name.
TEST(Fit, ReadsCardsAndRefusesWhatItChooses) {
    Machine m;
    EXPECT_EQ(read_card({}, "12", &m), "");
    EXPECT_EQ(m.name, "rtx3060");
    EXPECT_EQ(read_card({}, "24", &m), ""); // three rows have it: the last one counts
    EXPECT_EQ(m.name, "rtx4090");
    EXPECT_EQ(read_card({}, "100", &m), ""); // no row has 100
    EXPECT_EQ(m.memory_gb, 100);
    EXPECT_EQ(read_card({}, "h200", &m), "");
    EXPECT_EQ(m.memory_gb, 141);
    EXPECT_HAS(read_card({}, "12GB", &m), "--fit 12GB: give the GB of a card, or a machine: h200");
    EXPECT_HAS(read_card({}, "-1", &m), "--fit -1: give the GB");

    // Refused are flags that it chooses, and answers whose time has no bound.
    Config c;
    EXPECT_HAS(check_fit(c), "--fit wants a card");
    EXPECT_EQ(set_flag(c, "fit", "24"), "");
    EXPECT_EQ(check_fit(c), "");
    EXPECT_EQ(set_flag(c, "tp", "2"), "");
    EXPECT_HAS(check_fit(c), "--fit chooses flags for one card, --tp among them: leave --tp out");
    for (const char* precision : {"bf16", "fp32", "fp16"}) {
        Config asks;
        EXPECT_EQ(set_flag(asks, "fit", "24"), "");
        EXPECT_EQ(set_flag(asks, "precision", precision), "");
        bool other = strcmp(precision, "bf16") != 0;
        EXPECT_EQ(has(check_fit(asks), concat("leave --precision ", precision, " out")), other);
    }
    for (const char* loss : {"dpo", "kto", "distill", "grpo"}) {
        Config asks;
        EXPECT_EQ(set_flag(asks, "fit", "24"), "");
        EXPECT_EQ(set_flag(asks, "loss", loss), "");
        bool samples = !strcmp(loss, "grpo");
        EXPECT_EQ(has(check_fit(asks), "--loss grpo without --answer-tokens"), samples);
        EXPECT_EQ(set_flag(asks, "answer-tokens", "64"), "");
        EXPECT_EQ(check_fit(asks), "");
    }
}

// ----------------------------------------------------------------------------
// --calibrate

// A share is fitted in logs: without rows it is the prior; two rows that are off by equal factors
// up and down cancel; and of n equal rows the share comes as near as their weight says.
TEST(Calibrate, AShareIsARidgeRegressionTowardsItsPrior) {
    EXPECT_DOUBLE_EQ(fit_share(0.6, {}), 0.6);
    EXPECT_NEAR(fit_share(0.5, {{"slow", 4, 1}, {"fast", 1, 1}}), 0.5, 1e-12);

    // One row of a tenth, and a hundred: log share = (w n log 0.1 + p log 0.6) / (w n + p).
    double w = 1 / (0.15 * 0.15), p = 1 / (0.5 * 0.5);
    for (int n : {1, 100}) {
        double expected = (n * w * std::log(0.1) + p * std::log(0.6)) / (n * w + p);
        std::vector<Measured> rows(size_t(n), {"row", 10, 1});
        EXPECT_NEAR(fit_share(0.6, rows), std::exp(expected), 1e-12) << n;
    }

    // No share leaves the range that a machine file may have.
    EXPECT_EQ(fit_share(0.6, std::vector<Measured>(100, {"row", 1, 10})), 1);
    EXPECT_EQ(fit_share(0.6, std::vector<Measured>(100, {"row", 1e9, 1})), 0.02);
}

// A machine file of measurements is read back with the numbers that went in: rates of all threads
// that share the card, shares by the fit. Nonsense is clamped into the ranges of a file.
TEST(Calibrate, TheFileOfMeasurementsIsReadBack) {
    Measurements m;
    EXPECT_EQ(machine_named(&m.machine, "cpu"), "");
    m.precision = "fp32";
    m.machine.single_tf = 0.25;
    m.machine.launch_us = 1e9;
    m.products = std::vector<Measured>(1000, {"a product", 2, 1});
    m.plain = std::vector<Measured>(1000, {"attention in float", 4, 1});
    std::string path = put_file(scratch("measured.txt"), machine_text(m, "cpu", 2));
    Machine back;
    ASSERT_EQ(machine_named(&back, path), "");
    EXPECT_NEAR(back.single_tf, 0.5, 1e-6);
    EXPECT_NEAR(back.gemm, 0.5, 1e-3);
    EXPECT_NEAR(back.attention, m.machine.attention, 1e-6);
    EXPECT_NEAR(back.plain, 0.25, 1e-3);
    EXPECT_EQ(back.launch_us, 1e5);

    // It says in which precision, and a run in another one notes it.
    EXPECT_EQ(back.precision, "fp32");
    Config c;
    c.machine = path;
    c.out = "run"; // without it another note says what is lost
    for (std::string precision : {"fp32", "bf16", "fp16"}) {
        c.precision = precision;
        std::vector<std::string> notes = config_notes(c);
        ASSERT_EQ(notes.size(), precision == "fp32" ? 0u : 1u);
        for (const std::string& note : notes)
            EXPECT_HAS(note, " was measured in fp32, and this run computes in " + precision +
                                 ": measure with --calibrate FILE --precision bf16");
    }
    EXPECT_HAS(read_file(path), "a product ");
}

// Four ranks that take 9, 10, 10 and 11 seconds differ by sqrt(2/3) of a tenth.
TEST(Calibrate, JitterIsTheSpreadOverRanks) {
    run_local_ranks(4, {}, [](const Comm& world) {
        double seconds[] = {9, 10, 10, 11};
        EXPECT_NEAR(spread_over_ranks(world, seconds[world.rank]), 0.1 * std::sqrt(2 / 3.0), 1e-12);
    });
}

// Two ranks as threads measure this machine in either precision: every number of the file is finite
// and positive, and --machine reads it. Other flags, and places where no file can be, are refused.
TEST(Calibrate, MeasuresThisMachineAndRefusesOtherFlags) {
    for (std::string precision : {"fp32", "bf16"}) {
        std::string path = scratch("machine_" + precision + ".txt");
        std::string ranks = precision == "fp32" ? " --local-ranks 2" : "";
        Ran ran = shell(program() + " --calibrate " + path + " --precision " + precision + ranks);
        ASSERT_EQ(ran.status, 0) << ran.text;
        EXPECT_HAS(ran.text, "written: " + path);
        Machine back;
        ASSERT_EQ(machine_named(&back, path), "");
        for (const MachineField& f : machine_fields()) {
            EXPECT_TRUE(std::isfinite(back.*f.field)) << f.name;
            EXPECT_GE(back.*f.field, f.least) << f.name;
        }
        EXPECT_EQ(back.cards, precision == "fp32" ? 2 : 1);
    }

    // Refusals come before the measurements.
    Ran flags = shell(program() + " --calibrate " + scratch("no.txt") + " --tp 2");
    EXPECT_NE(flags.status, 0);
    EXPECT_HAS(flags.text, "--calibrate measures the machine, and no run: leave --tp out");
    EXPECT_HAS(shell(program() + " --calibrate /nowhere/x").text, "cannot be written");
    EXPECT_HAS(shell(program() + " --calibrate x --precision fp16").text, "give bf16");
}

// Two machines of two ranks, numbered side by side or in turn: their ranks, those at the same place
// of each, and how many ranks of an axis one of them has, counted by hand.
TEST(Machines, AreFoundByTheirNamesAndAxesLieAcrossThem) {
    Machines near = machines_of({"a", "a", "b", "b"}), turned = machines_of({"a", "b", "a", "b"});
    EXPECT_EQ(near.count, 2);
    EXPECT_EQ(ranks_on(near, 1), (std::vector<int>{2, 3}));
    EXPECT_EQ(ranks_across(near, 1), (std::vector<int>{1, 3}));
    EXPECT_EQ(ranks_across(turned, 1), (std::vector<int>{0, 1}));
    EXPECT_EQ(ranks_of_each(near), 2);
    EXPECT_EQ(ranks_of_each(machines_of({"a", "a", "b"})), 0);
    EXPECT_FALSE(side_by_side(turned));

    // tp is nearest: it fits a machine if ranks are side by side, and dp crosses.
    Layout layout;
    layout.tp.size = layout.dp.size = 2;
    EXPECT_EQ(machines_text(layout, near),
              "machines: 2, 2 ranks each; on one of them: tp 2 of 2, dp 1 of 2\n");
    EXPECT_HAS(machines_text(layout, turned), "tp 1 of 2, dp 2 of 2\nnote: ranks of a machine are "
                                              "not numbered side by side: start them with mpirun");
    layout.tp.size = 4;
    layout.dp.size = 1;
    EXPECT_HAS(machines_text(layout, near), "tp 2 of 4\nnote: tensor-parallel ranks stand on");
    EXPECT_EQ(machines_text(layout, machines_of({"a", "a", "a", "a"})), "");

    // In each order of the grid, the cost model finds as many of an axis in a node.
    Machine machine = machines()[0];
    machine.cards = 4;
    Machines eight = machines_of({"a", "a", "a", "a", "b", "b", "b", "b"});
    for (const char* order : {"tp-pp-dp", "tp-dp-pp", "pp-tp-dp", "dp-pp-tp"}) {
        Layout all;
        all.order = layout_order(order);
        all.tp.size = all.dp.size = all.pp.size = 2;
        for (auto axis : {&Layout::tp, &Layout::cp, &Layout::pp, &Layout::dp})
            EXPECT_EQ(axis_on_machine(all, eight, axis), axis_in_node(all, machine, axis)) << order;
    }
}

// NCCL's settings are those of the environment, in its order, and nothing else of it.
TEST(Machines, NamesNcclsSettings) {
    const char* some[] = {"PATH=/bin", "NCCL_ALGO=Ring", "XNCCL_A=1", "NCCL_PROTO=\x1b", nullptr};
    EXPECT_HAS(nccl_settings_text(some), "NCCL's settings: NCCL_ALGO=Ring, NCCL_PROTO=");
    EXPECT_EQ(nccl_settings_text(some).find('\x1b'), std::string::npos);
    EXPECT_EQ(nccl_settings_text(some + 4), "");
}

// Links inside and between two machines are measured among their own ranks. A rank sends
// 2 (n-1)/n of each all-reduce, and all of a message. Of each there are 22: one warms up, 21 count.
TEST(Calibrate, LinksInsideAndBetweenMachinesAreMeasuredApart) {
    run_local_ranks(6, {}, [&](const Comm& world) {
        // Let six threads be two machines of three.
        std::map<std::string, size_t> sent;
        world.info->sent = &sent;
        Measurements m;
        EXPECT_EQ(machine_named(&m.machine, "cpu"), "");
        m.machine.latency_us = m.machine.message_us = 1e6;
        Machines machines = machines_of({"a", "a", "a", "b", "b", "b"});
        measure_links(m, world, machines, Cpu{});

        // Count the bytes of all sizes, without those of the mean over ranks.
        double floats = 16 + (1 << 18) + (1 << 20) + (1 << 22);
        double messages = 22 * 16 * 4;
        EXPECT_NEAR(double(sent["machine"]), 22 * 4 * floats * 2 * 2 / 3 + messages, 64);
        EXPECT_NEAR(double(sent["machines"]), 22 * 4 * floats * 2 * 1 / 2 + messages, 64);

        // The file has both links, and no longer the base row's.
        EXPECT_EQ(m.link.size(), 3u);
        EXPECT_EQ(m.nic.size(), 3u);
        EXPECT_LT(m.machine.latency_us, 1e6);
        EXPECT_LT(m.machine.message_us, 1e6);
        EXPECT_GT(m.machine.message_us, 0);
        std::string text = machine_text(m, "cpu", 1);
        EXPECT_HAS(text, "# all-reduces inside a machine");
        EXPECT_HAS(text, "KiB on 'machines'");
        EXPECT_EQ(text.find("\nnic_gb = 12.5\n"), std::string::npos);
        world.info->sent = nullptr;
    });
}

// The end of a run compares the median step with the simulator's. Half of the time is -50%.
TEST(Calibrate, TheErrorIsThatOfThePredictionForTheMedianStep) {
    EXPECT_EQ(predicted_text("box", 0.1, {9, 0.2, 0.1}),
              "predicted on box: 100.00 ms a step | measured 200.00 ms, the median of 3 steps | "
              "error -50.0%\n");
}

// A real run prints it with --machine, and not without.
TEST(Calibrate, ARunWithAMachinePrintsIt) {
    std::string run = program() + " --channels 32 --layers 1 --heads 2 --seq 128 --steps 3"
                      " --sample-tokens 0";
    EXPECT_HAS(shell(run + " --machine cpu").text, "predicted on cpu: ");
    EXPECT_HAS(shell(run + " --machine cpu --offload optimizer").text, "predicted on cpu: ");
    EXPECT_FALSE(has(shell(run).text, "predicted on"));

    // The peak of a slow processor is no zero.
    std::string slow = put_file(scratch("slow.txt"), "base = cpu\nsingle_tf = 0.25\n");
    EXPECT_HAS(shell(run + " --explain --machine " + slow).text, "% of 250 GFLOP/s\n");
    EXPECT_HAS(shell(run + " --explain --machine rtx3060").text, "% of 12.7 TFLOP/s\n");

    // Moves to the host and to a disk take the machine's rates.
    std::string moves = run + " --offload optimizer --explain";
    EXPECT_HAS(shell(moves).text, " of each step both ways at 25 GB/s\n");
    EXPECT_HAS(shell(moves + " --machine h100").text, " of each step both ways at 50 GB/s\n");
    std::string disk = put_file(scratch("disk.txt"), "base = h100\ndisk_gb = 7\n");
    EXPECT_HAS(shell(moves + " --offload-to /tmp --machine " + disk).text, "both ways at 7 GB/s\n");

    // --explain predicts the same time, of threads that share a card too.
    auto predicted = [](const std::string& text) {
        const char* words = "predicted on cpu: ";
        size_t at = text.find(words);
        return at == text.npos ? 0 : strtod(text.c_str() + at + strlen(words), nullptr);
    };
    std::string shared = run + " --machine cpu --local-ranks 2 --dp 2";
    double explained = predicted(shell(shared + " --explain").text);
    EXPECT_GT(explained, 0);
    EXPECT_EQ(predicted(shell(shared).text), explained);

    // Preferences have a time too, and KTO evaluates its own policy first.
    std::string pairs, answers;
    for (int i = 0; i < 8; i++) {
        pairs += R"({"prompt": "a", "chosen": "b", "rejected": "c"})" "\n";
        answers += R"({"prompt": "a", "completion": "b", "label": true})" "\n";
        answers += R"({"prompt": "b", "completion": "c", "label": false})" "\n";
    }
    std::string dpo = " --loss dpo --data " + put_file(scratch("few.jsonl"), pairs);
    std::string kto = " --loss kto --data " + put_file(scratch("labels.jsonl"), answers);
    for (const std::string& loss : {dpo, kto}) {
        EXPECT_HAS(shell(run + loss + " --machine cpu").text, "predicted on cpu: ");
        std::string text = shell(run + loss + " --machine cpu --explain").text;
        EXPECT_EQ(has(text, "\n  evaluations before it "), loss == kto) << text;
        Ran plan = shell(run + loss + " --plan auto --gpus 2 --explain");
        EXPECT_EQ(plan.status, 0) << plan.text;
    }

    // Sampled answers have one where their length has a limit; two steps share a rollout.
    std::string prompts;
    for (int i = 0; i < 4; i++)
        prompts += R"({"prompt": "a", "answer": "b"})" "\n";
    std::string grpo = " --loss grpo --reward exact --group 2 --answer-tokens 8 --updates 2"
                       " --data " +
                       put_file(scratch("asked.jsonl"), prompts);
    EXPECT_HAS(shell(run + grpo + " --machine cpu").text, "predicted on cpu: ");
    std::string text = shell(run + grpo + " --machine cpu --explain").text;
    EXPECT_HAS(text, "\n  sampling before it ");
    EXPECT_HAS(text, "\n  evaluations before it ");
}
