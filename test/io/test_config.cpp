// test_config.cpp - flags, files of flags, help, and the refusals: each names what is wrong and a fix
#include "../../llmc/io/config_notes.h"
#include "../../llmc/io/lr_schedule.h"
#include "../harness/testing.h"

using namespace llmc;

static std::string parse(Config& c, std::vector<std::string> words) {
    std::vector<char*> argv = {(char*)"train_gpt"};
    for (std::string& w : words) argv.push_back(w.data());
    return parse_arguments(c, int(argv.size()), argv.data());
}
static std::string parse(std::vector<std::string> words) {
    Config c;
    return parse(c, words);
}
static std::string check(std::vector<std::string> words,
                         Shape s = gpt2_shape(4, 4, 128, 256, 1024)) {
    Config c;
    std::string wrong = parse(c, words);
    if (wrong.empty()) wrong = override_shape(c, s);
    return wrong.empty() ? config_check(c, s) : wrong;
}

TEST(Config, EveryFlagRoundTripsThroughText) {
    for (const Flag& f : config_table()) {
        if (!*f.name) continue;
        Config c;
        std::string value = field_text(c, f.field);
        if (value.empty()) continue;
        EXPECT_EQ(set_flag(c, f.name, value), "") << f.name;
        EXPECT_EQ(field_text(c, f.field), value) << f.name;
    }
}

TEST(Config, ReadsFlagsAndSwitches) {
    Config c;
    EXPECT_EQ(parse(c, {"--steps", "7", "--lr", "3e-4", "--resume", "--explain", "false", "--model",
                        "gpt2"}),
              "");
    EXPECT_EQ(c.steps, 7);
    EXPECT_EQ(c.lr, 3e-4);
    EXPECT_TRUE(c.resume);
    EXPECT_FALSE(c.explain);
    EXPECT_EQ(c.model, "gpt2");
}

// `--name=value` is `--name value`, for a value that holds an equals sign too, and for switches.
TEST(Config, ReadsAValueBehindAnEqualsSign) {
    Config c;
    EXPECT_EQ(parse(c, {"--lr=3e-4", "--evaluate=piqa=a.jsonl", "--prompt=", "--resume=false",
                        "--steps", "7", "--explain"}),
              "");
    EXPECT_EQ(c.lr, 3e-4);
    EXPECT_EQ(c.evaluate, "piqa=a.jsonl");
    EXPECT_FALSE(c.resume);
    EXPECT_EQ(c.steps, 7);
    EXPECT_TRUE(c.explain);
    EXPECT_HAS(parse({"--stpes=3"}), "unknown flag --stpes: did you mean --steps?");
    EXPECT_HAS(parse({"--steps="}), "--steps wants a whole number");
    EXPECT_HAS(parse({"--resume=maybe"}), "--resume wants true or false, not 'maybe'");
}

// Defaults that follow from other flags must know what the user has set, even to the same value.
TEST(Config, RemembersWhatWasGiven) {
    std::string path = scratch("given.conf");
    std::ofstream(path) << "lr = 0.001\n";
    Config c;
    EXPECT_EQ(parse(c, {"--steps", "600", "--resume", "--config", path}), "");
    EXPECT_TRUE(given(c, "steps"));
    EXPECT_TRUE(given(c, "resume"));
    EXPECT_TRUE(given(c, "lr"));
    EXPECT_FALSE(given(c, "vocab"));
}

TEST(Config, FilesHoldTheSameNames) {
    std::string path = scratch("run.conf");
    std::ofstream(path)
        << "# a run\nsteps = 12   # few\n\n  lr=0.5\nmodel = gpt2-xl\nresume = true\n";
    Config c;
    EXPECT_EQ(parse(c, {"--config", path, "--steps", "13"}), "");
    EXPECT_EQ(c.steps, 13); // later flags win
    EXPECT_EQ(c.lr, 0.5);
    EXPECT_EQ(c.model, "gpt2-xl");
    EXPECT_TRUE(c.resume);
    std::ofstream(path) << "steps = 12\nstepz = 4\n";
    EXPECT_HAS(parse({"--config", path}), ":2: unknown flag --stepz: did you mean --steps?");
    std::ofstream(path) << "steps 12\n";
    EXPECT_HAS(parse({"--config", path}), "wants `name = value`");
    EXPECT_HAS(parse({"--config", "/no/such"}), "no such file");
}

TEST(Config, RefusesWhatItCannotRead) {
    EXPECT_HAS(parse({"--stpes", "3"}), "did you mean --steps?");
    for (const char* far : {"--completely-unknown", "--bogus", "--xy", "--foo"})
        EXPECT_EQ(parse({far, "3"}).find("did you mean"), std::string::npos) << far;
    EXPECT_HAS(parse({"--batch-token", "3"}), "did you mean --batch-tokens?");
    EXPECT_HAS(parse({"--led", "3"}), "unknown flag --led");
    EXPECT_HAS(parse({"--steps"}), "wants a value");
    EXPECT_HAS(parse({"steps"}), "is no flag");
    EXPECT_HAS(parse({"--steps", "ten"}), "wants a whole number from 0");
    EXPECT_HAS(parse({"--steps", "1.5"}), "wants a whole number");
    EXPECT_HAS(parse({"--steps", "-1"}), "wants a whole number from 0");
    EXPECT_HAS(parse({"--lr", "nan"}), "wants a number");
    EXPECT_HAS(parse({"--lr", "1e-3x"}), "wants a number");
    EXPECT_HAS(parse({"--optimizer", "adam"}), "adamw|sgd");
    EXPECT_HAS(parse({"--seq", "99999999999999"}), "wants a whole number from 0 to 16777216, not");
    EXPECT_HAS(parse({"--seed", "-1"}), "from 0 to 9007199254740991");
}

TEST(Config, RefusesWhatIsNotBuiltByName) {
    for (const char* flag : {"--cp", "--ep"}) {
        std::string wrong = check({flag, "2"});
        EXPECT_HAS(wrong, flag);
        EXPECT_HAS(wrong, "not built yet");
    }
    EXPECT_HAS(check({"--fp8"}), "--fp8 true: not built yet");
    EXPECT_HAS(check({"--offload", "optimizer"}), "not built yet");
    EXPECT_HAS(check({"--comm", "nccl"}), "not built yet");
    EXPECT_HAS(check({"--timeline", "x.png"}), "--timeline x.png: FILE.svg or FILE.json");
    EXPECT_HAS(check({"--device", "cuda"}), "--device cpu");
}

TEST(Config, TheLayoutMakesTheRanks) {
    EXPECT_EQ(check({"--local-ranks", "4", "--pp", "2", "--zero", "3"}), "");
    EXPECT_EQ(check({"--dp", "64", "--pp", "2", "--explain"}), "");
    EXPECT_HAS(check({"--dp", "2"}), "are 2 ranks, and there are 1: use --local-ranks 2");
    EXPECT_HAS(check({"--local-ranks", "3", "--pp", "2"}), "use --local-ranks 2");
    EXPECT_HAS(check({"--local-ranks", "8", "--pp", "8"}), "8 stages, and the model has 6 layers");
    EXPECT_HAS(check({"--local-ranks", "4", "--zero-group", "3"}), "does not divide --dp 4");
    EXPECT_HAS(check({"--local-ranks", "2", "--pp", "2", "--chunks", "2"}), "interleaved");
    EXPECT_HAS(parse({"--zero", "4"}), "from 0 to 3");
}

TEST(Config, TensorParallelRanksShareEqually) {
    Shape llama = llama_shape(2, 8, 2, 64, 132, 256, 128, 10000);
    EXPECT_EQ(check({"--local-ranks", "4", "--tp", "4"}, llama), ""); // two ranks a key/value head
    EXPECT_EQ(check({"--tp", "4", "--explain", "--sequence-parallel"}), "");
    EXPECT_HAS(check({"--tp", "3", "--explain"}), "--tp 3 does not divide 4 heads: try --tp 1, 2");
    EXPECT_HAS(check({"--tp", "8", "--explain"}, llama),
               "--tp 8 does not divide the ffn's 132 channels: try --tp 1, 2, 4");
    llama = llama_shape(2, 12, 4, 96, 192, 256, 128, 10000);
    EXPECT_HAS(check({"--tp", "6", "--explain"}, llama), "4 key/value heads do not divide each");
    Shape two = gpt2_shape(2, 2, 32, 256, 128); // what is offered works with the ranks that are there
    EXPECT_EQ(check({"--local-ranks", "4", "--tp", "3"}, two),
              "--tp 3 does not divide 2 heads: try --tp 1, 2");
    EXPECT_EQ(check({"--local-ranks", "3", "--tp", "2"}, two),
              "--dp 1 x --tp 2 x --pp 1 are 2 ranks, and there are 3: use --local-ranks 2 or "
              "mpirun -np 2");
    EXPECT_EQ(check({"--local-ranks", "6", "--tp", "6"}, gpt2_shape(2, 4, 32, 256, 128)),
              "--tp 6 does not divide 4 heads: try --tp 1, 2"); // 4 ranks do not make 6
    EXPECT_HAS(check({"--sequence-parallel"}), "give --tp");
    EXPECT_HAS(check({"--tp", "4", "--explain", "--sequence-parallel", "--seq", "9",
                      "--micro-batch", "1"}),
               "does not divide micro-batch x seq = 9 rows: try --seq 12");
    EXPECT_HAS(check({"--local-ranks", "4", "--tp", "2", "--dp", "4"}),
               "--dp 4 x --tp 2 x --pp 1 are 8 ranks, and there are 4");
}

TEST(Config, RefusesShapesThatDoNotFit) {
    EXPECT_HAS(check({"--heads", "3"}),
               "--heads 3 does not divide --channels 128: heads that do, near it: 1 2 4 8");
    EXPECT_HAS(check({"--seq", "2000"}),
               "beyond the model's 1024 positions: use --seq 1024 or less");
    EXPECT_HAS(check({"--batch-tokens", "3000"}), "8 x 256 x 1 = 2048: try 2048 or 4096");
    EXPECT_HAS(check({"--lr", "1e-4", "--min-lr", "1e-3"}), "--min-lr 0.001 is above --lr");
    EXPECT_HAS(check({"--resume"}), "--out DIR");
    EXPECT_HAS(check({"--document-end", "10"}), "--document-mask");
    EXPECT_HAS(check({"--save-every", "5"}), "--out DIR");
    Shape llama = llama_shape(2, 4, 2, 64, 128, 256, 128, 10000);
    EXPECT_HAS(check({"--kv-heads", "3"}, llama), "--kv-heads 3 does not divide --heads 4");
    EXPECT_HAS(check({"--position", "learned"}, llama), "Llama has no table of positions");
    EXPECT_HAS(check({"--heads", "64", "--kv-heads", "64", "--position", "rope"}, llama),
               "a head size of 1 is odd");
    EXPECT_HAS(check({"--kv-heads", "2"}), "leave --kv-heads out");
    llama.sliding_window = 64;
    EXPECT_EQ(check({"--seq", "100"}, llama), "");
    EXPECT_EQ(check({"--heads", "8", "--batch-tokens", "4096"}), "");
}

TEST(Config, RefusesWhatCannotWork) {
    auto check = [](std::vector<std::string> words) {
        Config c;
        std::string wrong = parse(c, words);
        return wrong.empty() ? refuse_idle_flags(c) : wrong;
    };
    EXPECT_HAS(check({"--beta1", "1"}), "--beta1 1 never forgets");
    EXPECT_HAS(check({"--beta2", "1"}), "use a number below 1");
    EXPECT_EQ(check({"--beta1", "0", "--beta2", "0.9999"}), "");
    EXPECT_HAS(check({"--threads", "4"}), "OMP_NUM_THREADS=4");
    EXPECT_HAS(check({"--layer", "0"}), "give --explain too");
    EXPECT_EQ(check({"--layer", "0", "--explain"}), "");
    EXPECT_HAS(check({"--steps", "0", "--sample-tokens", "0"}), "nothing to do");
    for (const char* use : {"--eval", "--explain", "--export=x"})
        EXPECT_EQ(check({"--steps", "0", "--sample-tokens", "0", use}), "") << use;
}

TEST(Config, NotesWhatDoesNothing) {
    auto notes = [](std::vector<std::string> words) {
        Config c;
        EXPECT_EQ(parse(c, words), "");
        EXPECT_EQ(config_check(c, gpt2_shape(4, 4, 128, 256, 1024)), "");
        std::string all;
        for (const std::string& note : config_notes(c)) all += note + "; ";
        return all;
    };
    EXPECT_EQ(notes({}), "");
    EXPECT_EQ(notes({"--steps", "2"}), "") << "the default warm-up is nobody's choice";
    EXPECT_EQ(notes({"--steps", "2", "--warmup", "2"}),
              "--warmup 2 is all of --steps 2: the learning rate never reaches --lr; ");
    EXPECT_EQ(notes({"--steps", "3", "--warmup", "2"}), "");
    EXPECT_EQ(notes({"--zero", "1"}), "--zero 1 shards nothing: there is one data-parallel rank; ");
    EXPECT_EQ(notes({"--zero", "1", "--local-ranks", "2"}), "");
    EXPECT_EQ(notes({"--keep", "3"}), "--keep does nothing without --out; ");
    EXPECT_EQ(notes({"--keep", "3", "--out", "x"}), "");
    EXPECT_EQ(notes({"--top-k", "3", "--temperature", "0"}),
              "--top-k does nothing without a --temperature above 0; ");
    EXPECT_EQ(notes({"--prefetch=2", "--zero=2", "--local-ranks=2"}),
              "--prefetch does nothing without --zero 3; ");
}

TEST(Config, TheCopyInTheLogHoldsEveryFlag) {
    Config c;
    c.lr = 0.25;
    nlohmann::json j = config_json(c);
    EXPECT_EQ(j["lr"], 0.25);
    for (const Flag& f : config_table()) EXPECT_TRUE(!*f.name || j.contains(f.name)) << f.name;
}

// ----------------------------------------------------------------------------

TEST(Schedule, FormulasAtTheirEdges) {
    for (const char* s : {"cosine", "linear", "wsd", "constant"}) {
        EXPECT_DOUBLE_EQ(lr_at(0, 100, 10, 1.0, 0.1, s), 0.1) << s; // first step of the warm-up
        EXPECT_DOUBLE_EQ(lr_at(9, 100, 10, 1.0, 0.1, s), 1.0) << s; // its last
        EXPECT_DOUBLE_EQ(lr_at(10, 100, 10, 1.0, 0.1, s), 1.0) << s;
        EXPECT_DOUBLE_EQ(lr_at(0, 1, 0, 1.0, 0.1, s), 1.0) << s;  // a run of one step
        EXPECT_DOUBLE_EQ(lr_at(4, 5, 10, 1.0, 0.1, s), 0.5) << s; // a run that is all warm-up
        double end = lr_at(100, 100, 10, 1.0, 0.1, s);
        EXPECT_DOUBLE_EQ(end, std::string(s) == "constant" ? 1.0 : 0.1) << s;
        for (int i = 11; i <= 100; i++)
            EXPECT_LE(lr_at(i, 100, 10, 1.0, 0.1, s), lr_at(i - 1, 100, 10, 1.0, 0.1, s)) << s;
    }
    EXPECT_DOUBLE_EQ(lr_at(55, 100, 10, 1.0, 0.1, "cosine"), 0.55); // half way
    EXPECT_DOUBLE_EQ(lr_at(55, 100, 10, 1.0, 0.1, "linear"), 0.55);
    EXPECT_DOUBLE_EQ(lr_at(80, 100, 10, 1.0, 0.1, "wsd"), 1.0);
    EXPECT_DOUBLE_EQ(lr_at(90, 100, 10, 1.0, 0.1, "wsd"), 0.55);
}
