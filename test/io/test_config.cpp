// test_config.cpp - flags, files of flags, help, and refusals: each names the fault and a fix
#include "../../llmc/io/config_check.h"
#include "../../llmc/io/config_notes.h"
#include "../../llmc/extra/ds_config.h"
#include "../../llmc/io/hf_config.h"
#include "../../llmc/optimizer.h"
#include "../harness/testing.h"

using namespace llmc;

// Read the words of a command line. Returns "" or what is wrong.
static std::string parse(Config& c, std::vector<std::string> words) {
    std::vector<char*> argv = {(char*)"train_gpt"};
    for (std::string& w : words) argv.push_back(w.data());
    return parse_arguments(c, int(argv.size()), argv.data());
}
static std::string parse(std::vector<std::string> words) {
    Config c;
    return parse(c, words);
}
// Read the words and check them against a model's shape, GPT-2's by default.
static std::string check(std::vector<std::string> words,
                         Shape s = gpt2_shape(4, 4, 128, 256, 1024)) {
    Config c;
    std::string wrong = parse(c, words);
    if (wrong.empty()) wrong = override_shape(c, s);
    return wrong.empty() ? config_check(c, s) : wrong;
}

// A flag of another program is refused with its name; tune_gpt takes all that train_gpt takes.
TEST(Config, AFlagOfAnotherProgramIsRefusedWithItsName) {
    auto says = [](const char* program, std::vector<std::string> words) {
        Config c;
        c.program = &program_named(program);
        return parse(c, words);
    };
    EXPECT_EQ(says("train_gpt", {"--lora", "8"}), "--lora is a flag of tune_gpt");
    EXPECT_EQ(says("tune_gpt", {"--lora", "8", "--lr", "1e-3"}), "");
    EXPECT_EQ(says("tune_gpt", {"--prompts", "p.jsonl"}), "--prompts is a flag of sample_gpt");
    EXPECT_EQ(says("sample_gpt", {"--lr", "1e-3"}), "--lr is a flag of train_gpt");
    EXPECT_EQ(says("sample_gpt", {"--chat", "--adapter", "a"}), "");
    EXPECT_EQ(says("train_gpt", {"--fit", "24"}), "--fit is a flag of plan_gpt");
    EXPECT_EQ(says("plan_gpt", {"--gpus", "8", "--tp", "2", "--lora", "8"}), "");
    EXPECT_EQ(says("convert_gpt", {"a", "b", "--merge"}), "");
    EXPECT_HAS(says("train_gpt", {"a"}), "'a' is no flag");
    EXPECT_HAS(says("prepare_gpt", {"--shard-tokns", "9"}), "did you mean --shard-tokens?");

    // Each flag has a program.
    for (const Flag& f : config_table()) {
        bool taken = std::ranges::any_of(programs(), [&](const Program& p) {
            return takes_flag(&p, f.name);
        });
        EXPECT_TRUE(taken || !*f.name) << f.name;
    }
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

// `--name=value` means `--name value`, for a value that holds an equals sign too, and for switches.
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
    EXPECT_HAS(parse({"--resume=maybe"}), "--resume wants true or false, not 'maybe'");
}

// A default that follows from other flags must know whether the user has set the flag,
// even to the same value.
TEST(Config, RemembersWhatWasGiven) {
    std::string path = scratch("given.conf");
    std::ofstream(path) << "lr = 0.001\n";
    Config c;
    EXPECT_EQ(parse(c, {"--steps", "600", "--resume", "--config", path}), "");
    EXPECT_TRUE(was_given(c, "steps"));
    EXPECT_TRUE(was_given(c, "resume"));
    EXPECT_TRUE(was_given(c, "lr"));
    EXPECT_FALSE(was_given(c, "vocab"));
}

TEST(Config, FilesHoldTheSameNames) {
    std::string path = scratch("run.conf");
    std::ofstream(path)
        << "# a run\nsteps = 12   # few\n\n  lr=0.5\nmodel = gpt2-xl\nresume = true\n";
    Config c;
    EXPECT_EQ(parse(c, {"--config", path, "--steps", "13"}), "");
    EXPECT_EQ(c.steps, 13); // a later flag wins
    EXPECT_EQ(c.lr, 0.5);
    EXPECT_EQ(c.model, "gpt2-xl");
    EXPECT_TRUE(c.resume);

    std::ofstream(path) << "steps = 12\nstepz = 4\n";
    EXPECT_HAS(parse({"--config", path}), ":2: unknown flag --stepz: did you mean --steps?");
    std::ofstream(path) << "steps 12\n";
    EXPECT_HAS(parse({"--config", path}), "wants `name = value`");
    EXPECT_HAS(parse({"--config", "/no/such"}), "--config /no/such: No such file");
}

// An unset variable of a shell is an empty word. Only a prompt may be empty: then there is none.
TEST(Config, AnEmptyValueOfAnyFlagIsRefused) {
    std::string path = scratch("empty.conf");
    for (const Flag& f : config_table()) {
        if (!*f.name || f.name == std::string("prompt")) continue;
        std::string flag = std::string("--") + f.name, wants = flag + " wants a value";
        bool is_switch = std::holds_alternative<bool Config::*>(f.field);
        EXPECT_HAS(is_switch ? wants : parse({flag, ""}), wants);
        EXPECT_HAS(parse({flag + "="}), wants);
        std::ofstream(path) << "steps = 3\n" << f.name << " =  # nothing\n";
        EXPECT_HAS(parse({"--config", path}), path + ":2: " + wants);
    }
    Config c;
    EXPECT_EQ(parse(c, {"--prompt", ""}), "");
}

// A folder, a pipe and a device are no files, and nothing waits for them.
TEST(Config, AFileThatIsNoneIsRefusedAtOnce) {
    std::string pipe = scratch("pipe"), folder = fs::path(pipe).parent_path();
    ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
    EXPECT_HAS(parse({"--config", folder}), "--config " + folder + ": is no file but a folder");
    EXPECT_HAS(parse({"--config", pipe}), "is no file but a pipe");
    EXPECT_HAS(parse({"--config", "/dev/zero"}), "is no file but a device");
    Machine m;
    for (std::string path : {pipe, folder, std::string("/dev/zero")})
        EXPECT_HAS(machine_named(&m, path), "is neither a machine nor a file");
    Config c;
    c.machine = pipe;
    EXPECT_HAS(check_machine(c), "is neither a machine nor a file");

    std::string path = scratch("none.conf");
    for (const char* text : {"", " \n\n"}) {
        std::ofstream(path) << text;
        EXPECT_HAS(parse({"--config", path}), "none.conf: is empty");
    }
    std::ofstream(path) << "\xef\xbb\xbfsteps = 3\n";
    EXPECT_EQ(parse(c, {"--config", path}), "");
    EXPECT_EQ(c.steps, 3) << "a byte order mark belongs to no name";
}

// Names and values that cannot be read.
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

// Refusals of techniques that cannot be combined, or that this program lacks.
TEST(Config, RefusesWhatIsNotBuiltByName) {
    EXPECT_HAS(check({"--ep", "2"}), "--ep 2 shares out experts, and the model has none: leave it");

    EXPECT_HAS(check({"--recompute", "full", "--recompute-segment", "99"}),
               " blocks: give at most");

    // fp8 and its options.
    EXPECT_HAS(parse({"--fp8", "row"}), "none|block|tensor|delayed");
    EXPECT_HAS(parse({"--fp8-weights", "layer"}), "step|product");
    EXPECT_HAS(parse({"--fp8-margin", "7"}), "from 0 to 6, not");
    EXPECT_HAS(check({"--fp8", "delayed"}), "--precision is fp32: give --precision bf16");
    EXPECT_HAS(check({"--fp8", "block"}), "--precision is fp32: give --precision bf16");
    EXPECT_HAS(check({"--fp8", "tensor", "--precision", "fp16"}), "give --precision bf16");
    EXPECT_EQ(check({"--fp8", "tensor", "--precision", "bf16"}), "");

    // Machines whose time is simulated.
    EXPECT_EQ(check({"--machine", "h100"}), "");
    EXPECT_HAS(check({"--machine", "h1000", "--explain"}),
               "neither a machine nor a file; machines:");
    EXPECT_HAS(check({"--machine", "H100"}), "; did you mean h100?");
    EXPECT_HAS(check({"--machine", "a100"}), "; did you mean a100-40 or a100-80?");
    EXPECT_HAS(check({"--machine", "rtx4091"}), "; did you mean rtx4090?");
    EXPECT_FALSE(has(check({"--machine", "abacus"}), "did you mean"));
    EXPECT_HAS(check({"--machine", "h100", "--explain", "--steps", "0"}),
               "times steps of training");
    EXPECT_EQ(check({"--machine", "h100", "--explain", "--offload", "optimizer"}), "");
    EXPECT_EQ(check({"--machine", "h100", "--explain", "--offload", "optimizer,gradients",
                     "--offload-update", "host"}), "");
    EXPECT_EQ(check({"--machine", "h100", "--explain", "--lora", "8"}), "");
    EXPECT_EQ(check({"--machine", "h100", "--explain"}), "");
    EXPECT_EQ(check({"--machine", "h100", "--plan", "auto"}), "");

    // Plans that the program chooses.
    EXPECT_HAS(check({"--gpus", "8"}), "--gpus 8 is what --plan plans for: give --plan auto");
    EXPECT_HAS(check({"--gpus", "8", "--plan", "auto"}), "need not be there: give --explain");
    EXPECT_HAS(check({"--plan", "auto", "--recompute", "full"}), "chooses --recompute: leave one");
    EXPECT_EQ(check({"--plan", "auto", "--recompute", "full", "--explain"}), "");
    EXPECT_HAS(check({"--plan", "auto", "--steps", "0"}),
               "is for training, and there are no steps");
    EXPECT_HAS(check({"--plan", "auto", "--micro-batch", "2", "--batch-tokens", "4096"}),
               "chooses --micro-batch where --batch-tokens says the batch");
    for (const char* known : {"optimizer", "gradients", "optimizer,weights", "activations"})
        EXPECT_EQ(check({"--plan", "auto", "--offload", known}), "");
    EXPECT_EQ(check({"--plan", "auto", "--offload", "optimizer", "--offload-update", "host"}), "");
    EXPECT_EQ(check({"--plan", "auto", "--lora", "8"}), "");
    EXPECT_EQ(check({"--plan", "auto", "--fp8", "block", "--precision", "bf16"}), "");
    EXPECT_EQ(check({"--machine", "h100", "--fp8", "delayed", "--precision", "bf16"}), "");

    // Losses that walk logits twice, or ask a teacher, have a time; sampled answers have one where
    // their length is known.
    for (const char* loss : {"dpo", "ipo", "simpo", "orpo", "kto"})
        EXPECT_EQ(check({"--plan", "auto", "--loss", loss, "--data", "a.jsonl"}), "");
    for (const char* flag : {"--plan", "--machine"}) {
        const char* value = flag[2] == 'p' ? "auto" : "h100";
        EXPECT_EQ(check({flag, value, "--loss", "distill", "--teacher", "x"}), "");
    }
    std::vector<std::string> grpo = {"--loss", "grpo", "--data", "a.jsonl", "--reward", "exact"};
    auto sampled = [&](std::vector<std::string> more) {
        more.insert(more.end(), grpo.begin(), grpo.end());
        return check(more);
    };
    EXPECT_HAS(sampled({"--plan", "auto"}), "--loss grpo without --answer-tokens is not known");
    EXPECT_HAS(sampled({"--machine", "h100"}), "--loss grpo without --answer-tokens is not known");
    for (const char* flag : {"--plan", "--machine"})
        EXPECT_EQ(sampled({flag, flag[2] == 'p' ? "auto" : "h100", "--answer-tokens", "8"}), "");

    // The layouts that it looks at have the ZeRO-3 that this wants.
    Config planned;
    EXPECT_EQ(parse(planned, {"--plan", "auto", "--hpz", "2"}), "");
    EXPECT_EQ(check_planning(planned), "");

    EXPECT_HAS(check({"--timeline", "x.png"}), "--timeline x.png: FILE.svg or FILE.json");
    EXPECT_HAS(check({"--plan", "auto", "--gpus", "2", "--explain", "--timeline", "plan.svg"}),
               "--timeline draws the step of one layout: give it with the command that");
    EXPECT_HAS(check({"--device", "cuda"}), "--device cpu");
}

// Frozen weights may be narrow where they are only read.
TEST(Config, FrozenWeightsAreRead) {
    for (const char* use : {"--steps=0", "--eval"}) EXPECT_EQ(check({"--weights", "nf4", use}), "");
    EXPECT_HAS(check({"--weights", "nf4"}),
               "--weights nf4 does not train: give --steps 0 or --eval, or --lora RANK");
    EXPECT_HAS(check({"--weights", "int8", "--eval", "--export", "x"}), "--weights float");
    EXPECT_HAS(check({"--weights", "nf4", "--steps", "0", "--zero", "3"}),
               "--weights nf4 without adapters has nothing that --zero 3 cuts: leave it out");
    EXPECT_HAS(check({"--weights", "int3"}), "float|nf4|int8|int4");
}

// Adapters: the defaults that follow from the rank, and the flags that they exclude.
TEST(Config, AdaptersHaveARank) {
    Config few, more;
    Shape s = gpt2_shape(4, 4, 128, 256, 1024);
    EXPECT_EQ(parse(few, {"--lora", "8"}), "");
    EXPECT_EQ(config_check(few, s), "");
    EXPECT_EQ(few.lora_alpha, 16);
    EXPECT_EQ(few.weight_decay, 0);

    EXPECT_EQ(parse(more, {"--lora", "8", "--lora-alpha", "4", "--weight-decay", "0.2"}), "");
    EXPECT_EQ(config_check(more, s), "");
    EXPECT_EQ(more.lora_alpha, 4);
    EXPECT_EQ(more.weight_decay, 0.2);

    // Flags that are for adapters, and those that adapters exclude.
    EXPECT_HAS(check({"--lora-rs"}), "--lora-rs is for adapters: give --lora RANK");
    EXPECT_HAS(check({"--lora-plus", "16"}), "--lora-plus is for adapters");
    EXPECT_HAS(check({"--lora-layers", "2"}), "--lora-layers is for adapters: give --lora RANK");
    EXPECT_EQ(check({"--lora", "2", "--experts", "4"}, llama_shape(2, 4, 2, 32, 32, 256, 512, 1e4)),
              "");
    EXPECT_HAS(check({"--lora", "2"}, neox_shape(2, 4, 64, 256)), "not for gpt_neox: leave it out");
    EXPECT_HAS(check({"--lora", "2", "--fp8", "block", "--precision", "bf16"}), "give --fp8 none");
    EXPECT_EQ(check({"--lora", "2", "--offload", "optimizer,activations,weights"}), "");
    EXPECT_EQ(check({"--lora", "2", "--offload", "optimizer", "--weights", "nf4"}), "");
    EXPECT_HAS(check({"--lora", "2", "--offload", "weights", "--weights", "nf4"}),
               "moves no codes of --weights nf4: leave one of them out");
    EXPECT_HAS(check({"--lora", "2", "--precision", "bf16", "--masters", "remainder"}),
               "give --masters float");
    EXPECT_HAS(check({"--lora", "2", "--export", "x.bin"}), "give a folder");
    EXPECT_HAS(check({"--lora", "2", "--export", "x.gguf"}), "give a folder, or --merge");
    EXPECT_EQ(check({"--lora", "2", "--export", "x.gguf", "--merge", "--export-dtype", "q8_0"}),
              "");

    EXPECT_HAS(check({"--export", "x", "--export-dtype", "q8_0"}), "convert_gpt IN FILE.gguf writes it");
    EXPECT_HAS(check({"--lora", "2", "--adapter", "x"}), "leave one of them out");
    EXPECT_HAS(check({"--merge", "--export", "x"}), "give --export DIR, and --adapter DIR");

    // Frozen weights may be narrow where no rank cuts them and no file holds them.
    for (const char* zero : {"2", "3"})
        EXPECT_EQ(check({"--lora", "2", "--weights", "nf4", "--zero", zero, "--export", "x"}), "");
    EXPECT_EQ(check({"--lora", "2", "--weights", "nf4", "--out", "x", "--verify-every", "1"}), "");
    EXPECT_HAS(check({"--lora", "2", "--weights", "nf4", "--export", "x", "--merge"}),
               "give --weights float");
}

// A prefix: what it excludes, and the positions that it takes from the text.
TEST(Config, APrefixIsTrainedAlone) {
    EXPECT_EQ(check({"--prefix", "8"}), "");
    EXPECT_EQ(check({"--prefix", "8", "--zero", "3", "--local-ranks", "2", "--dp", "2"}), "");
    for (const char* other : {"lora", "adapter", "lora-plus"})
        EXPECT_HAS(check({"--prefix", "8", std::string("--") + other, "2"}),
                   concat("--prefix 8 is prefix tuning, and --", other, " is for other adapters"));
    EXPECT_HAS(check({"--prefix", "1024"}), "leaves none of the model's 1024 positions for text");
    EXPECT_HAS(check({"--prefix", "24", "--seq", "1001"}),
               "--seq 1001 is beyond the model's 1000 positions behind the prefix: use --seq 1000");
    Shape sloped = gpt2_shape(4, 4, 128, 256, 1024);
    sloped.embedding.position = Position::ALIBI;
    EXPECT_HAS(check({"--prefix", "8"}, sloped), "trained keys have no position");

    // Exports, and what is not built.
    EXPECT_HAS(check({"--prefix", "8", "--export", "x", "--merge"}), "without --merge");
    EXPECT_HAS(check({"--prefix", "8", "--export", "x.gguf"}), "give --export a folder");
    EXPECT_HAS(check({"--prefix", "8", "--export", "x.bin"}), "give a folder");
    EXPECT_EQ(check({"--prefix", "8", "--cp", "2", "--local-ranks", "2"}), "");
    EXPECT_HAS(check({"--prefix", "8", "--pipeline", "zero-bubble"}),
               "is not built with --pipeline zero-bubble: give gpipe, 1f1b or interleaved");
    EXPECT_EQ(check({"--prefix", "8", "--offload", "optimizer"}), "");
    EXPECT_HAS(check({"--prefix", "8", "--fp8", "block", "--precision", "bf16"}), "--fp8 none");
    EXPECT_HAS(check({"--prefix", "8", "--loss", "dpo"}), "compares with the base");
    EXPECT_EQ(check({"--prefix", "2", "--experts", "4"},
                    llama_shape(2, 4, 2, 32, 32, 256, 512, 1e4)), "");
}

TEST(Config, ContextParallelRanksShareSequencesEqually) {
    for (const char* order : {"zigzag", "contiguous", "striped"})
        EXPECT_EQ(check({"--cp", "2", "--local-ranks", "4", "--seq", "64", "--cp-order", order}),
                  "");

    EXPECT_HAS(check({"--cp", "3", "--local-ranks", "3", "--seq", "64"}),
               "2 x --cp 3 does not divide --seq 64: try --seq 60 or 66");
    EXPECT_HAS(check({"--cp", "3", "--local-ranks", "3", "--seq", "64", "--cp-order", "striped"}),
               "--cp 3 does not divide --seq 64: try --seq 63 or 66");
    EXPECT_HAS(check({"--cp", "2", "--tp", "2", "--pp", "2", "--local-ranks", "6"}),
               "x --cp 2 are 8 ranks, and there are 6: use --local-ranks 8");
    EXPECT_HAS(check({"--cp", "2", "--local-ranks", "2", "--zero", "1", "--zero-group", "4"}),
               "--zero-group 4 does not divide --dp 1 x --cp 2");
    EXPECT_HAS(check({"--cp", "2", "--local-ranks", "2", "--precision", "bf16", "--fp8", "block"}),
               "--fp8 block is not built with --cp: leave one of them out");

    // The methods.
    EXPECT_HAS(check({"--cp-method", "any"}), "gather|ulysses|ring");
    EXPECT_EQ(check({"--cp", "2", "--local-ranks", "2", "--cp-method", "ulysses"}), "");
    EXPECT_EQ(check({"--cp", "2", "--local-ranks", "2", "--cp-method", "ring"}), "");
    EXPECT_HAS(check({"--cp", "8", "--local-ranks", "8", "--cp-method", "ulysses"}),
               "does not share 4 heads and 4 key/value heads: try --cp 2, 4 or --cp-method gather");

    // Hybrid methods, for 4 heads.
    auto hybrid = [&](const char* cp, const char* method) {
        return check({"--cp", cp, "--local-ranks", cp, "--cp-method", method});
    };
    EXPECT_EQ(hybrid("4", "ulysses:2,ring:2"), "");
    EXPECT_EQ(hybrid("8", "ulysses:4,gather:2"), "");
    EXPECT_EQ(hybrid("4", "ulysses:2,ring:3"),
              "--cp-method ulysses:2,ring:3 is of 6 ranks, and --cp is 4: try ulysses:2,ring:2");
    EXPECT_HAS(hybrid("1", "ulysses:2,ring:2"),
               "is of 4 ranks, and --cp is 1: try --cp-method ring");
    EXPECT_EQ(
        hybrid("8", "ulysses:8,gather:1"),
        "--cp-method ulysses:8,gather:1: 8 ranks do not share 4 heads and 4 key/value heads: try "
        "ulysses:2,gather:4, ulysses:4,gather:2");

    for (const char* wrong :
         {"ulysses:2", "ulysses:2,ring", "ulysses:2,ulysses:2", "ring:2,ulysses:2",
          "ulysses:2,ring:2x", "ulysses:0,ring:4", "ulysses:-2,ring:-2"})
        EXPECT_HAS(hybrid("4", wrong),
                   "--cp-method wants one of gather|ulysses|ring, ulysses:U,ring:R");
}

// The product of the axes is the number of ranks.
TEST(Config, TheLayoutMakesTheRanks) {
    EXPECT_EQ(check({"--local-ranks", "4", "--pp", "2", "--zero", "3"}), "");
    EXPECT_EQ(check({"--dp", "64", "--pp", "2", "--explain"}), "");
    EXPECT_HAS(check({"--local-ranks", "3", "--tp", "2", "--explain"}),
               "are 2 ranks, and there are 3");
    EXPECT_HAS(check({"--local-ranks", "1", "--tp", "2", "--explain"}),
               "are 2 ranks, and there are 1");
    EXPECT_HAS(check({"--dp", "2"}), "are 2 ranks, and there are 1: use --local-ranks 2");
    EXPECT_HAS(check({"--local-ranks", "3", "--pp", "2"}), "use --local-ranks 2");

    // A stage needs a layer, and more stages on a rank need a schedule that knows of them.
    EXPECT_HAS(check({"--local-ranks", "8", "--pp", "8"}), "8 stages, and the model has 6 layers");
    EXPECT_HAS(check({"--local-ranks", "2", "--pp", "2", "--chunks", "2"}), "interleaved");

    // ZeRO has four stages, and its groups divide the data-parallel ranks. --hpz makes groups
    // itself, so it takes no others.
    EXPECT_HAS(parse({"--zero", "4"}), "from 0 to 3");
    EXPECT_HAS(check({"--local-ranks", "4", "--zero-group", "3"}), "does not divide --dp 4");
    EXPECT_EQ(check({"--local-ranks", "4", "--zero", "3", "--hpz", "2"}), "");
    EXPECT_EQ(check({"--local-ranks", "4", "--zero", "2", "--hpz", "1"}), "");
    EXPECT_HAS(check({"--local-ranks", "4", "--zero", "3", "--hpz", "3"}), "not divide --dp 4");
    EXPECT_HAS(check({"--local-ranks", "4", "--zero", "2", "--hpz", "2"}), "add --zero 3");
    EXPECT_HAS(check({"--local-ranks", "4", "--zero", "3", "--hpz", "2", "--zero-group", "2"}),
               "leave --zero-group out");
    EXPECT_HAS(check({"--local-ranks", "4", "--zero", "3", "--hpz", "2", "--offload", "weights"}),
               "--offload weights does not");
}

TEST(Config, TensorParallelRanksShareEqually) {
    Shape llama = llama_shape(2, 8, 2, 64, 132, 256, 128, 10000);
    EXPECT_EQ(check({"--local-ranks", "4", "--tp", "4"}, llama), ""); // 2 ranks to a key/value head

    EXPECT_EQ(check({"--tp", "4", "--explain", "--sequence-parallel"}), "");
    EXPECT_HAS(check({"--tp", "3", "--explain"}), "--tp 3 does not divide 4 heads: try --tp 1, 2");
    EXPECT_HAS(check({"--tp", "8", "--explain"}, llama),
               "--tp 8 does not divide the ffn's 132 channels: try --tp 1, 2, 4");
    llama = llama_shape(2, 12, 4, 96, 192, 256, 128, 10000);
    EXPECT_HAS(check({"--tp", "6", "--explain"}, llama), "4 key/value heads do not divide each");

    // A size is offered only if it works with the ranks that are there.
    Shape two =
        gpt2_shape(2, 2, 32, 256, 128);
    EXPECT_EQ(check({"--local-ranks", "4", "--tp", "3"}, two),
              "--tp 3 does not divide 2 heads: try --tp 1, 2");
    EXPECT_EQ(check({"--local-ranks", "3", "--tp", "2"}, two),
              "--dp 1 x --tp 2 x --pp 1 are 2 ranks, and there are 3: use --local-ranks 2 or "
              "mpirun -np 2");
    EXPECT_EQ(check({"--local-ranks", "6", "--tp", "6"}, gpt2_shape(2, 4, 32, 256, 128)),
              "--tp 6 does not divide 4 heads: try --tp 1, 2"); // 6 ranks are no multiple of 4

    // Sequence parallelism.
    EXPECT_HAS(check({"--sequence-parallel"}), "give --tp");
    EXPECT_HAS(check({"--tp", "4", "--explain", "--sequence-parallel", "--seq", "9",
                      "--micro-batch", "1"}),
               "does not divide micro-batch x seq = 9 rows: try --seq 12");
    EXPECT_HAS(check({"--local-ranks", "4", "--tp", "2", "--dp", "4"}),
               "--dp 4 x --tp 2 x --pp 1 are 8 ranks, and there are 4");
}

// Numbers that do not fit each other, or the loss. Each message offers a fix.
TEST(Config, RefusesShapesThatDoNotFit) {
    // Sizes that do not divide.
    EXPECT_HAS(check({"--heads", "3"}),
               "--heads 3 does not divide --channels 128: heads that do, near it: 1 2 4 8");
    EXPECT_HAS(check({"--seq", "2000"}),
               "beyond the model's 1024 positions: use --seq 1024 or less");
    EXPECT_HAS(check({"--batch-tokens", "3000"}), "8 x 256 x 1 = 2048: try 2048 or 4096");
    EXPECT_HAS(check({"--lr", "1e-4", "--min-lr", "1e-3"}), "--min-lr 0.001 is above --lr");

    EXPECT_HAS(check({"--resume"}), "--out DIR");
    EXPECT_HAS(check({"--document-end", "10"}), "--document-mask");

    // Losses that need their data.
    EXPECT_HAS(check({"--loss", "sft"}), "give --data FILE.jsonl");
    EXPECT_HAS(check({"--loss", "sft", "--data", "a.jsonl", "--document-mask"}),
               "leave --document-mask out");
    EXPECT_HAS(check({"--loss", "dpo"}), "give --data FILE.jsonl");
    EXPECT_HAS(check({"--beta", "1"}), "give --loss dpo, ipo, simpo, orpo, kto or grpo");
    EXPECT_HAS(check({"--loss", "dpo", "--undesirable-weight", "2"}),
               "--undesirable-weight is for --loss kto: leave it out");
    EXPECT_HAS(check({"--loss", "ipo", "--label-smoothing", "0.1"}), "is for --loss dpo");
    EXPECT_HAS(check({"--loss", "dpo", "--label-smoothing", "0.5"}), "give less than 0.5");
    EXPECT_EQ(check({"--loss", "dpo", "--data", "a.jsonl", "--explain", "--machine", "h100"}), "");
    EXPECT_HAS(check({"--loss", "dpo", "--gamma", "1"}), "--gamma 1 is for --loss simpo");
    EXPECT_EQ(check({"--loss", "dpo", "--data", "a.jsonl", "--cp", "2", "--local-ranks", "2"}), "");

    // Answers that are sampled.
    const std::vector<std::string> grpo = {"--loss", "grpo", "--data", "a.jsonl"};
    auto sampled = [&](std::vector<std::string> more) {
        more.insert(more.begin(), grpo.begin(), grpo.end());
        return check(more);
    };

    EXPECT_EQ(sampled({"--reward", "exact"}), "");
    EXPECT_EQ(sampled({"--steps", "0"}), "");

    EXPECT_HAS(check({"--loss", "grpo", "--reward", "exact"}), "give --data FILE.jsonl");
    EXPECT_HAS(check({"--group", "4"}), "--group is of answers that are sampled: give --loss grpo");
    EXPECT_EQ(sampled({"--reward", "command:sh a.sh", "--updates", "4", "--clip-high", "0.28",
                       "--beta", "0.1", "--kl", "k2", "--reward-seconds", "5"}), "");
    EXPECT_HAS(sampled({}), "learns from rewards: give --reward exact, number, regex or command:");
    EXPECT_HAS(sampled({"--reward", "right"}), "--reward right names no verifier: give exact");
    EXPECT_HAS(sampled({"--reward", "command: "}), "names no verifier");
    EXPECT_HAS(sampled({"--reward", "exact", "--reward-seconds", "5"}), "give --reward command:");
    EXPECT_HAS(sampled({"--reward", "command:a", "--reward-seconds", "600", "--local-ranks", "2"}),
               "--reward-seconds 600 is not below --watchdog 600");
    EXPECT_HAS(sampled({"--reward", "exact", "--clip-low", "0.1"}), "give --updates 2 or more");
    EXPECT_HAS(sampled({"--reward", "exact", "--kl", "k2"}), "estimates what --beta weighs");
    EXPECT_HAS(sampled({"--reward", "exact", "--beta", "0.1", "--precision", "bf16",
                        "--fp8", "block"}),
               "--beta 0.1 is not built with --fp8");
    EXPECT_HAS(check({"--updates", "2"}), "--updates is of answers that are sampled");
    EXPECT_HAS(sampled({"--reward", "exact", "--group", "12", "--micro-batch", "8"}),
               "--group 12 does not divide the 8 sequences of a step: try --batch-tokens 6144");
    EXPECT_HAS(sampled({"--reward", "exact", "--temperature", "0.5"}), "own distribution");
    EXPECT_HAS(sampled({"--reward", "exact", "--top-k", "5"}), "own distribution");
    EXPECT_HAS(sampled({"--reward", "exact", "--ignore-eos"}), "teach nothing of ends");
    EXPECT_HAS(sampled({"--reward", "exact", "--val", "b"}), "rewards of validation are not built");
    EXPECT_HAS(sampled({"--reward", "exact", "--machine", "h100", "--explain"}),
               "the time of --loss grpo without --answer-tokens is not known: give that too");

    // Saves.
    EXPECT_HAS(check({"--save-every", "5"}), "--out DIR");
    EXPECT_HAS(check({"--save-async"}), "--save-async wants a folder: give --out DIR");
    EXPECT_HAS(check({"--buddy", "/dev/shm/x", "--out", "x"}),
               "give --out DIR and --buddy-every N");
    EXPECT_HAS(check({"--buddy-every", "5", "--out", "x"}), "give --buddy /dev/shm/NAME");
    EXPECT_HAS(check({"--save-minutes", "auto"}),
               "--save-minutes auto wants a folder: give --out DIR");
    EXPECT_HAS(check({"--failure-hours", "9", "--out", "x"}), "give that too");

    for (const char* minutes : {"often", "-1", "1e7", "5m", "nan"})
        EXPECT_HAS(check({"--save-minutes", minutes, "--out", "x"}), "neither auto nor a number");

    // A Llama's shape.
    Shape llama = llama_shape(2, 4, 2, 64, 128, 256, 128, 10000);
    EXPECT_HAS(check({"--kv-heads", "3"}, llama), "--kv-heads 3 does not divide --heads 4");
    EXPECT_HAS(check({"--position", "learned"}, llama), "Llama has no table of positions");
    EXPECT_HAS(check({"--heads", "64", "--kv-heads", "64", "--position", "rope"}, llama),
               "a head size of 1 is odd");
    EXPECT_HAS(check({"--kv-heads", "2"}), "leave --kv-heads out");
    llama.attention.window = 64;
    EXPECT_EQ(check({"--seq", "100"}, llama), "");

    EXPECT_EQ(check({"--heads", "8", "--batch-tokens", "4096"}), "");
}

TEST(Config, RoPEKeepsItsPartOfANewHeadSize) {
    // Half of 16 channels turn. With a head size of 4 half of them turn as well. With 2
    // that half is no pair.
    Config c;
    Shape part = llama_shape(2, 4, 4, 64, 128, 256, 128, 10000);
    part.rope.rotary = 8;
    Shape s = part;
    ASSERT_EQ(parse(c, {"--heads", "16"}), "");
    EXPECT_EQ(override_shape(c, s), "");
    EXPECT_EQ(s.HS, 4u);
    EXPECT_EQ(s.rope.rotary, 2u);
    EXPECT_HAS(check({"--heads", "32"}, part), "of a head size of 2 that part is 1");

    // A part that would round down to nothing is refused, since 0 stands for the whole.
    part.rope.rotary = 2;
    EXPECT_HAS(check({"--heads", "16"}, part), "of a head size of 4 that part is 0");
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

    EXPECT_HAS(check({"--offload", "optimizer,wigths"}),
               "--offload wigths: give some of optimizer,");
    EXPECT_EQ(check({"--offload", "optimizer,activations,weights,gradients"}), "");
    EXPECT_HAS(check({"--offload", "weights", "--weights", "nf4", "--steps", "0"}),
               "--offload weights: those of --weights nf4 stay on the device");

    // Graphs.
    EXPECT_HAS(check({"--graphs", "--device", "cpu"}), "--graphs is for GPUs");
    EXPECT_HAS(check({"--graphs", "--local-ranks", "2"}),
               "--graphs: the threads of --local-ranks 2");
    EXPECT_HAS(check({"--graphs", "--offload", "optimizer"}), "--graphs: the host moves what");
    EXPECT_HAS(check({"--graphs", "--dp", "2", "--ep", "2", "--ep-method", "exchange"}),
               "give --ep-method gather");
    EXPECT_HAS(check({"--graphs", "--profile", "x"}), "--profile x times actions one by one");
    EXPECT_EQ(check({"--graphs", "--tp", "2"}), "");

    // Prompts.
    EXPECT_HAS(check({"--prompts", "p", "--prompt", "x"}), "--prompts and --prompt both say");
    EXPECT_HAS(check({"--chat", "--prompts", "x"}), "--chat and --prompts both say");
    EXPECT_HAS(check({"--prompts", "p", "--sample-every", "9"}),
               "and --sample-every 9 samples during");
    EXPECT_HAS(check({"--prompts", "p", "--eval"}), "--prompts: --eval continues nothing");
    EXPECT_HAS(check({"--prompts", "p", "--sample-tokens", "0"}),
               "--prompts: --sample-tokens 0 continues nothing");
    EXPECT_EQ(check({"--prompts", "p", "--slots", "4"}), "");

    // Drafts.
    EXPECT_HAS(check({"--draft", "d", "--eval"}), "--draft d: --eval continues nothing");
    EXPECT_HAS(check({"--draft", "d", "--sample-tokens", "0"}),
               "--draft d: --sample-tokens 0 continues");
    EXPECT_HAS(check({"--draft", "d", "--dp", "1", "--tp", "2"}),
               "--draft d guesses in one process, and this run has 2 ranks");
    EXPECT_EQ(check({"--draft", "d", "--draft-tokens", "8"}), "");

    EXPECT_HAS(check({"--layer", "0"}), "give --explain too");
    EXPECT_EQ(check({"--layer", "0", "--explain"}), "");
    EXPECT_HAS(check({"--steps", "0", "--sample-tokens", "0"}), "nothing to do");
    for (const char* use : {"--eval", "--explain", "--export=x"})
        EXPECT_EQ(check({"--steps", "0", "--sample-tokens", "0", use}), "") << use;
}

// Experts, routers, upcycling and expert-parallel ranks, each for a model that
// can have them or not.
TEST(Config, ExpertsReplaceALlamasFfnOrAreRefused) {
    Shape s;
    auto check = [&](std::vector<std::string> words, const char* model = "tiny-llama") {
        Config c;
        for (const Preset& p : model_presets())
            if (p.name == std::string(model)) s = p.shape;
        std::string wrong = parse(c, words);
        if (wrong.empty()) wrong = override_shape(c, s);
        return wrong.empty() ? config_check(c, s) : wrong;
    };

    EXPECT_EQ(check({"--experts", "8"}), "");
    EXPECT_TRUE(s.family == Family::MIXTRAL && s.experts.E == 8 && s.experts.K == 2 && s.experts.balance == 0.01);
    EXPECT_EQ(check({"--experts", "4"}, "qwen3-0.6b"), "");
    EXPECT_EQ(s.hf_type, "qwen3_moe");
    EXPECT_EQ(check({"--router", "sigmoid", "--balance", "0", "--z-loss", "1e-3"}, "tiny-moe"), "");
    EXPECT_TRUE(s.experts.router == Router::SIGMOID && s.experts.balance == 0 && s.experts.z_loss == 1e-3);
    EXPECT_EQ(check({"--experts-per-token", "1", "--router", "softmax"}, "tiny-moe"), "");

    EXPECT_HAS(check({"--experts-per-token", "1"}, "tiny-moe"), "give --router softmax");
    EXPECT_HAS(check({"--experts-per-token", "9"}, "tiny-moe"), "of --experts 8: at most 8");
    EXPECT_HAS(check({"--experts", "8"}, "tiny"), "built for Llama");
    EXPECT_HAS(check({"--experts", "8"}, "qwen2.5-0.5b"), "built for Llama");
    EXPECT_HAS(check({"--balance", "1"}), "--balance is for models with experts");
    EXPECT_HAS(check({"--precision", "bf16", "--fp8", "block"}, "tiny-moe"), "--fp8 block is not");
    EXPECT_HAS(check({"--weights", "nf4", "--eval"}, "tiny-moe"),
               "--weights nf4 is not built with");

    // A capacity counts whole sequences, and generation drops nothing.
    EXPECT_EQ(check({"--expert-capacity", "1.25"}, "tiny-moe"), "");
    EXPECT_TRUE(s.experts.capacity.factor == 1.25);
    EXPECT_HAS(check({"--expert-capacity", "1.25"}), "is for models with experts");
    EXPECT_HAS(check({"--expert-capacity", "1.25", "--cp", "2", "--explain"}, "tiny-moe"),
               "which --cp 2 cuts: leave one of them out");
    EXPECT_HAS(check({"--expert-capacity", "1.25", "--loss", "grpo", "--steps", "1"}, "tiny-moe"),
               "drops choices that generation keeps");

    // Latents that are too wide for a GPU's registers train there, and are decoded on a CPU.
    Shape wide = s;
    wide.latent.kv = 1025;
    EXPECT_HAS(check_latents(wide, true, true), "latents of 1025 channels: generation on a GPU");
    EXPECT_EQ(check_latents(wide, true, false) + check_latents(wide, false, true), "");
    wide.latent.kv = 1024;
    EXPECT_EQ(check_latents(wide, true, true), "");

    // The bias of DeepSeek-V3's router.
    EXPECT_EQ(check({"--router-bias-rate", "0.001"}, "deepseek-v3"), "");
    EXPECT_HAS(check({"--router-bias-rate", "0.001"}, "tiny-moe"), "DeepSeek-V3's: leave it out");
    EXPECT_HAS(check({"--router-bias-rate", "0.001"}, "tiny"), "is for models with experts");
    EXPECT_HAS(check({"--router-bias-rate", "0.001", "--masters", "none"}, "deepseek-v3"),
               "give --masters float");
    EXPECT_HAS(check({"--router", "softmax"}, "deepseek-v3"), "for sigmoids: leave it out");

    EXPECT_HAS(check({"--add-tokens", "<a>", "--lora", "2"}), "new rows would not learn");
    EXPECT_HAS(check({"--add-tokens", "<a>", "--weights", "nf4"}), "give --weights float");
    EXPECT_HAS(check({"--add-tokens", "<a>", "--upcycle", "4"}), "--export the tokens with");

    // Upcycling.
    EXPECT_EQ(check({"--upcycle", "4", "--experts-per-token", "3"}), "");
    EXPECT_TRUE(s.family == Family::MIXTRAL && s.experts.E == 4 && s.experts.K == 3);
    EXPECT_HAS(check({"--upcycle", "4", "--router", "softmax"}),
               "--upcycle 4: gates of --router softmax");
    EXPECT_HAS(check({"--upcycle", "4", "--scratch"}), "leave --experts and --scratch out");
    EXPECT_HAS(check({"--upcycle", "4"}, "tiny"), "--upcycle 4: built for Llama");
    EXPECT_HAS(check({"--upcycle", "4"}, "tiny-moe"), "has experts already");
    EXPECT_HAS(check({"--upcycle", "1"}), "--experts-per-token 2 of --upcycle 1: at most 1");

    // Expert-parallel ranks.
    auto ranks = [&](const char* ep, std::vector<std::string> more = {}) {
        std::vector<std::string> words = {"--explain", "--dp", "6", "--ep", ep, "--batch-tokens",
                                          "6144", "--seq", "256", "--micro-batch", "4"};
        words.insert(words.end(), more.begin(), more.end());
        return check(words, "tiny-moe");
    };
    EXPECT_EQ(ranks("2"), "");
    EXPECT_EQ(ranks("3"), "--ep 3 does not divide 8 experts: try --ep 1, 2");
    EXPECT_EQ(ranks("4"), "--ep 4 does not divide the 6 ranks of --dp: try --ep 1, 2");
    EXPECT_EQ(ranks("6", {"--experts", "6"}), "");
    EXPECT_EQ(ranks("2", {"--ep-method", "exchange"}), "");
    EXPECT_HAS(ranks("2", {"--ep-method", "ring"}), "wants one of gather|exchange, not 'ring'");
    EXPECT_HAS(ranks("2", {"--zero", "1", "--zero-group", "2"}),
               "--zero-group 2 is not built with --ep: leave one of them out");

    // Whole experts beside tensor parallelism.
    auto whole = [&](const char* ep, std::vector<std::string> more = {}) {
        more.insert(more.end(), {"--tp", "2", "--sequence-parallel", "--etp", "1"});
        return ranks(ep, more);
    };
    EXPECT_EQ(whole("4"), "");
    EXPECT_EQ(whole("1", {"--ffn", "129"}), "");
    EXPECT_TRUE(s.experts.whole);
    EXPECT_EQ(whole("8"), "--ep 8 does not divide the 12 ranks of --dp x --tp: try --ep 1, 2, 4");
    EXPECT_HAS(whole("1", {"--zero", "1", "--zero-group", "2"}),
               "--zero-group 2 is not built with --etp 1: leave one of them out");
    EXPECT_EQ(ranks("2", {"--etp", "1"}), "") << "one rank cuts nothing";
    EXPECT_EQ(ranks("2", {"--tp", "2", "--etp", "2"}), "");
    EXPECT_FALSE(s.experts.whole);
    EXPECT_HAS(ranks("2", {"--tp", "2", "--ffn", "129"}), "does not divide the ffn's 129 channels");
    EXPECT_HAS(ranks("2", {"--tp", "4", "--etp", "2"}),
               "--etp 2: experts are cut by all ranks of --tp 4 or by none: leave it out");
    EXPECT_HAS(ranks("2", {"--tp", "2", "--etp", "1"}), "--etp 1: ranks that hold whole experts "
                                                        "route rows of their own: give "
                                                        "--sequence-parallel");
    EXPECT_HAS(check({"--etp", "1"}), "--etp is for models with experts");
    EXPECT_EQ(check({"--etp", "0"}), "");
    EXPECT_EQ(check({"--plan", "auto", "--explain", "--etp", "1"}, "tiny-moe"), "");
    EXPECT_HAS(check({"--loss", "distill", "--teacher", "x", "--tp", "2", "--sequence-parallel",
                      "--etp", "1"}, "tiny-moe"),
               "a teacher beside --etp 1 is not built: leave --etp out");

    EXPECT_EQ(check({}), "");
    EXPECT_EQ(s.experts.balance, 0);
}

TEST(Config, RefusesSmallMastersThatCannotBe) {
    auto check = [](std::vector<std::string> words) {
        Config c;
        std::string wrong = parse(c, words);
        return wrong.empty() ? config_check(c, gpt2_shape(4, 4, 128, 256, 1024)) : wrong;
    };

    // Narrow masters.
    for (const char* masters : {"remainder", "none"}) {
        EXPECT_EQ(check({"--precision", "bf16", "--masters", masters}), "");
        EXPECT_HAS(check({"--masters", masters}), "these are fp32: give --precision bf16");
        EXPECT_HAS(check({"--precision", "fp16", "--masters", masters}), "these are fp16");
        EXPECT_HAS(check({"--precision", "bf16", "--optimizer", "sgd", "--masters", masters}),
                   "is for --optimizer adamw");
    }

    EXPECT_EQ(check({"--masters", "float"}), "");
    EXPECT_HAS(check({"--masters", "half"}), "float|remainder|none");

    // Narrow moments.
    for (const char* precision : {"fp32", "bf16", "fp16"})
        EXPECT_EQ(check({"--precision", precision, "--states", "bf16"}), "");
    EXPECT_HAS(check({"--optimizer", "sgd", "--states", "bf16"}), "--states bf16 is for");
    EXPECT_EQ(check({"--optimizer", "sgd"}), "");
}

// Flags that change nothing are noted, unless the user has not set them.
TEST(Config, NotesWhatDoesNothing) {
    auto notes = [](std::vector<std::string> words) {
        Config c;
        EXPECT_EQ(parse(c, words), "");
        EXPECT_EQ(config_check(c, gpt2_shape(4, 4, 128, 256, 1024)), "");
        std::string all;
        for (const std::string& note : config_notes(c))
            if (!note.starts_with("no --out: nothing is saved")) all += note + "; ";
        return all;
    };
    EXPECT_EQ(notes({}), "");
    EXPECT_EQ(notes({"--steps", "2"}), "") << "the default warm-up is nobody's choice";

    EXPECT_EQ(notes({"--steps", "2", "--warmup", "2"}),
              "--warmup 2 is all of --steps 2: the learning rate never reaches --lr; ");
    EXPECT_EQ(notes({"--steps", "3", "--warmup", "2"}), "");

    EXPECT_EQ(notes({"--zero", "1"}), "--zero 1 shards nothing: there is one data-parallel rank; ");
    EXPECT_EQ(notes({"--zero", "1", "--local-ranks", "2"}), "");

    // Two tensor-parallel ranks both have all experts, whole, or one half of them each.
    Config whole;
    whole.out = "run"; // without it another note says what is lost
    whole.zero = whole.dp = whole.etp = 1, whole.tp = 2;
    EXPECT_EQ(config_notes(whole).size(), 0u);
    whole.ep = 2;
    EXPECT_EQ(config_notes(whole).size(), 1u) << "--zero 1 shards nothing";
    EXPECT_EQ(notes({"--keep", "3"}), "--keep does nothing without --out; ");
    EXPECT_EQ(notes({"--keep", "3", "--out", "x"}), "");

    EXPECT_EQ(notes({"--top-k", "3", "--temperature", "0"}),
              "--top-k does nothing without a --temperature above 0; ");
    EXPECT_EQ(notes({"--prefetch=2", "--zero=2", "--local-ranks=2"}),
              "--prefetch does nothing without --zero 3 or --offload; ");
}

TEST(Config, TheCopyInTheLogHoldsEveryFlag) {
    Config c;
    c.lr = 0.25;
    nlohmann::json j = config_json(c);
    EXPECT_EQ(j["lr"], 0.25);
    for (const Flag& f : config_table()) EXPECT_TRUE(!*f.name || j.contains(f.name)) << f.name;
}

// ----------------------------------------------------------------------------
// DeepSpeed's and Accelerate's configuration files, in the form that their documentation shows

// Read flags, then a file. Returns a line for each of the file's keys, or what is wrong.
static std::string translate(Config& c, std::vector<std::string> words, const std::string& text,
                             int processes = 1) {
    std::string path = scratch("ds.json"), all;
    std::ofstream(path) << text;
    EXPECT_EQ(parse(c, words), "");
    std::vector<std::string> lines;
    std::string wrong = read_ds_config(c, path, processes, &lines);
    for (const std::string& line : lines) all += line + "\n";
    return wrong.empty() ? all : wrong;
}
static std::string translate(const std::string& text, std::vector<std::string> words = {}) {
    Config c;
    return translate(c, words, text);
}

// A file with a value for most of the keys that become flags.
static const char* DS_ZERO3 = R"({
    "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 15,
             "hysteresis": 3, "min_loss_scale": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-7,
                                              "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 4e-5,
                                                     "warmup_num_steps": 50,
                                                     "total_num_steps": 900}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none", "pin_memory": true},
                          "overlap_comm": true, "contiguous_gradients": true,
                          "reduce_bucket_size": 5e8, "stage3_prefetch_bucket_size": "auto",
                          "sub_group_size": 1e9},
    "gradient_clipping": 0.5, "steps_per_print": 2000, "wall_clock_breakdown": false,
    "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4
})";

TEST(DsConfig, BecomesFlags) {
    Config c;
    std::string lines = translate(c, {"--local-ranks", "2", "--seq", "128"}, DS_ZERO3);

    // The loss scale.
    EXPECT_EQ(c.precision, "fp16");
    EXPECT_EQ(c.loss_scale, "dynamic");
    EXPECT_EQ(c.loss_scale_rule, "deepspeed");
    EXPECT_EQ(c.loss_scale_start, 32768);
    EXPECT_EQ(c.loss_scale_window, 500);
    EXPECT_EQ(c.loss_scale_hysteresis, 3);
    EXPECT_EQ(c.loss_scale_min, 2);

    // The optimizer and the schedule.
    EXPECT_EQ(c.optimizer, "adamw");
    EXPECT_EQ(c.beta1, 0.8);
    EXPECT_EQ(c.beta2, 0.999);
    EXPECT_EQ(c.eps, 1e-7);
    EXPECT_EQ(c.weight_decay, 3e-7);
    EXPECT_EQ(c.schedule, "linear");
    EXPECT_EQ(c.lr, 4e-5); // the schedule's peak, not the optimizer's rate
    EXPECT_EQ(c.min_lr, 0);
    EXPECT_EQ(c.warmup, 50);
    EXPECT_EQ(c.steps, 900);

    // ZeRO and the batch.
    EXPECT_EQ(c.zero, 3);
    EXPECT_EQ(c.clip, 0.5);
    EXPECT_EQ(c.log_every, 2000);
    EXPECT_EQ(c.micro_batch, 4);
    EXPECT_EQ(c.batch_tokens, 32 * 128);
    EXPECT_TRUE(was_given(c, "zero") && was_given(c, "batch-tokens")); // as the user's: --resume keeps them

    // The lines say what became of each key.
    EXPECT_HAS(lines, "fp16.enabled true -> --precision fp16\n");
    EXPECT_HAS(lines,
               "zero_optimization.offload_optimizer.device \"none\" -> --offload stays none");
    EXPECT_HAS(lines,
               "zero_optimization.overlap_comm true: no counterpart here, changes no result");
    EXPECT_HAS(lines,
               "scheduler.params.warmup_type left out, \"log\" -> --warmup stays 50, straight");
    EXPECT_HAS(lines, "train_batch_size 32 = 4 a micro-batch x 4 accumulated x dp 2 -> --batch");
}

// "auto" takes the command line's value or our default, where Hugging Face's
// Trainer would fill it in.
TEST(DsConfig, AutoIsTheCommandLines) {
    std::string text = R"({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0,
        "initial_scale_power": 32}, "zero_optimization": {"stage": 2}, "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
                                                  "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto",
                      "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto"})";
    Config c, plain;
    std::string lines = translate(c, {"--lr", "2e-4"}, text);

    EXPECT_EQ(c.zero, 2);
    EXPECT_EQ(c.schedule, "constant");
    EXPECT_EQ(c.lr, 2e-4);
    for (const char* name : {"precision", "clip", "beta1", "beta2", "eps", "weight-decay", "warmup",
                             "micro-batch", "batch-tokens", "loss-scale-start"}) {
        Field field = find_flag(name)->field;
        EXPECT_EQ(field_text(c, field), field_text(plain, field)) << name;
        EXPECT_FALSE(was_given(c, name)) << name;
    }

    EXPECT_HAS(lines, "gradient_clipping \"auto\" -> --clip stays 1\n");
    EXPECT_HAS(lines, "fp16.initial_scale_power 32: for fp16's dynamic loss scale: left out");
}

// A key that a block leaves out has DeepSpeed's default.
TEST(DsConfig, LeftOutIsDeepSpeedsDefault) {
    Config c;
    std::string lines = translate(c, {}, R"({"optimizer": {"type": "Adam"}})");

    EXPECT_EQ(c.clip, 0);
    EXPECT_EQ(c.beta1, 0.9);
    EXPECT_EQ(c.beta2, 0.999);
    EXPECT_EQ(c.weight_decay, 0);
    EXPECT_EQ(c.warmup, Config().warmup);
    EXPECT_HAS(lines, "gradient_clipping left out, 0 -> --clip 0\n");

    EXPECT_HAS(translate(R"({"optimizer": {"params": {"lr": 1}}})"), "optimizer.type: is left out");
    EXPECT_HAS(translate(R"({"scheduler": {"type": "WarmupLR"}})"), "warmup_max_lr: is left out");

    Config fixed;
    translate(fixed, {}, R"({"fp16": {"enabled": true, "loss_scale": 1024, "hysteresis": 2}})");
    EXPECT_EQ(fixed.loss_scale, "1024");
    EXPECT_FALSE(was_given(fixed, "loss-scale-hysteresis") || was_given(fixed, "loss-scale-rule"));
}

TEST(DsConfig, TheCommandLineWins) {
    Config c;
    std::string lines = translate(c, {"--zero", "1", "--precision", "bf16", "--micro-batch", "8",
                                      "--seq", "64"}, DS_ZERO3);
    EXPECT_EQ(c.zero, 1);
    EXPECT_EQ(c.precision, "bf16");
    EXPECT_EQ(c.batch_tokens, 32 * 64); // the batch stays, so accumulation changes
    EXPECT_FALSE(was_given(c, "loss-scale-window"));
    EXPECT_HAS(lines, "zero_optimization.stage 3 -> --zero stays 1: the command line wins\n");
    EXPECT_HAS(lines, "32 = 8 a micro-batch x 4 accumulated x dp 1 -> --micro-batch stays 8");

    Config all;
    lines = translate(all, {"--micro-batch", "8", "--seq", "4"}, R"({"train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8})");
    EXPECT_HAS(lines, "32 = 8 a micro-batch x 4 accumulated x dp 1");
}

// Two of a batch's three sizes give the third. All three must agree.
TEST(DsConfig, BatchesAreCheckedAsDeepSpeedDoes) {
    auto sizes = [](const std::string& text, int processes) {
        Config c;
        std::string wrong = translate(c, {"--tp", "2", "--seq", "16"}, "{" + text + "}", processes);
        return has(wrong, "wants") || has(wrong, "is not") ? wrong
                   : concat(c.micro_batch, " ", c.batch_tokens / 16);
    };

    EXPECT_EQ(sizes(R"("train_batch_size": 24, "gradient_accumulation_steps": 3)", 8), "2 24");
    EXPECT_EQ(sizes(R"("train_batch_size": 24)", 8), "6 24");
    EXPECT_EQ(sizes(R"("train_micro_batch_size_per_gpu": 3)", 8), "3 12");
    EXPECT_EQ(sizes(R"("train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2)", 8),
              "3 24");
    EXPECT_EQ(sizes(R"("gradient_accumulation_steps": 2)", 4), "8 32"); // --micro-batch's default

    // Sizes that disagree, or that cannot be.
    EXPECT_HAS(sizes(R"("train_batch_size": 24, "train_micro_batch_size_per_gpu": 3,
                        "gradient_accumulation_steps": 4)", 8),
               "train_batch_size 24 is not train_micro_batch_size_per_gpu 3 x "
               "gradient_accumulation_steps 4 x dp 4 = 48");
    EXPECT_HAS(sizes(R"("train_batch_size": 3)", 8), "train_batch_size 3 is not");
    EXPECT_HAS(sizes(R"("train_batch_size": 4, "train_micro_batch_size_per_gpu": 9)", 2), "is not");
    EXPECT_HAS(sizes(R"("train_batch_size": 2.5)", 2),
               "train_batch_size 2.5: wants a whole number");
    EXPECT_HAS(sizes(R"("gradient_accumulation_steps": 0)", 2), "wants a whole number from 1");

    EXPECT_HAS(translate(R"({"gradient_accumulation_steps": 2})"), "counts tokens: give --seq");
}

TEST(DsConfig, AcceleratesOwnFile) {
    Config c;
    std::string lines = translate(c, {"--pp", "2", "--seq", "32"}, R"({
        "compute_environment": "LOCAL_MACHINE", "debug": false, "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"gradient_accumulation_steps": 4, "gradient_clipping": 2.0,
            "offload_optimizer_device": "none", "offload_param_device": "none",
            "zero3_init_flag": true, "zero_stage": 2},
        "downcast_bf16": "no", "machine_rank": 0, "main_training_function": "main",
        "mixed_precision": "bf16", "num_machines": 1, "num_processes": 8, "use_cpu": false})");

    EXPECT_EQ(c.precision, "bf16");
    EXPECT_EQ(c.zero, 2);
    EXPECT_EQ(c.clip, 2);
    EXPECT_EQ(c.dp, 4);
    EXPECT_EQ(c.batch_tokens, 4 * 8 * 4 * 32);

    EXPECT_HAS(translate(R"({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}})"),
               "fsdp_config.fsdp_version: is not known here");
    EXPECT_HAS(translate(R"({"num_processes": 3})", {"--tp", "2"}),
               "a multiple of tp x pp x cp = 2");
    EXPECT_HAS(translate(R"({"sequence_parallel_size": 2})"),
               "sequence_parallel_size 2 -> --cp 2, by");
}

// Files that are refused, each with part of the line that says why.
TEST(DsConfig, RefusesByName) {
    const std::pair<const char*, const char*> rows[] = {
        {"[1, 2]", "ds.json: is no JSON object"},
        {"{\"fp16\": ", "ds.json: is no JSON object, or cut short"},
        {R"({"zero_optimisation": {"stage": 2}})", "did you mean zero_optimization.stage"},
        {R"({"zero_optimization": {"stage": 4}})", "stage 4: --zero wants a whole number from 0"},
        {R"({"zero_optimization": {"stage": "2"}})", "stage \"2\": wants a number"},
        {R"({"zero_optimization": true})", "zero_optimization: is not known here"},
        {R"({"fp16": {"enabled": 1}})", "fp16.enabled 1: not built here, which has: true, false"},
        {R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})", "wants --precision bf16"},
        {R"({"fp16": {"enabled": true, "initial_scale_power": 33}})", "whole number up to 32"},
        {R"({"optimizer": {"type": "Lamb"}})", "optimizer.type \"Lamb\": not built here"},
        {R"({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}})", "wants two numbers"},
        {R"({"optimizer": {"type": "Adam", "params": {"betas": [0.9, "b"]}}})", "wants a number"},
        {R"({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}})",
         "momentum 0.9: not built"},
        {R"({"optimizer": {"type": "Adam", "params": {"adam_w_mode": false}}})",
         "adam_w_mode false"},
        {R"({"scheduler": {"type": "OneCycle", "params": {}}})", "scheduler.type \"OneCycle\""},
        {R"({"scheduler": {"type": "WarmupLR",
            "params": {"warmup_max_lr": 1, "warmup_min_lr": 0.5}}})",
         "warmup_min_lr 0.5: not built here"},
        {R"({"zero_optimization": {"zero_quantized_weights": true}})",
         "quantized_weights true: not"},
        {R"({"\u001b[31m": 1})", "\\x1b[31m: is not known here"},
    };
    for (auto& [text, says] : rows) EXPECT_HAS(translate(text), says);

    Config c;
    std::vector<std::string> lines;
    EXPECT_HAS(read_ds_config(c, "/no/such.json", 1, &lines), "--ds-config /no/such.json");

    // Offload becomes a flag, which checks the value under the flag's own name.
    translate(c, {}, R"({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})");
    EXPECT_EQ(c.offload, "optimizer");
    EXPECT_EQ(c.offload_to, "cpu");
    Config disk;
    translate(disk, {}, R"({"zero_optimization": {"offload_optimizer": {
        "device": "nvme", "nvme_path": "/fast"}}})");
    EXPECT_EQ(disk.offload_to, "/fast");
    Config usual;
    translate(usual, {}, R"({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}})");
    EXPECT_EQ(usual.offload_to, "/local_nvme") << "DeepSpeed's default";

    // Parameters as well. Both keys set the same flag, and there is one place for everything.
    Config both;
    translate(both, {}, R"({"zero_optimization": {"offload_optimizer": {"device": "nvme"},
        "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"}}})");
    EXPECT_EQ(both.offload, "optimizer,weights");
    EXPECT_EQ(both.offload_to, "/local_nvme");

    Config alone;
    translate(alone, {}, R"({"deepspeed_config": {"offload_param_device": "cpu"}})");
    EXPECT_EQ(alone.offload, "weights");

    EXPECT_HAS(translate(R"({"zero_optimization": {"offload_optimizer": {"device": "cpu"},
                                                   "offload_param": {"device": "nvme"}}})"),
               "is another place: --offload-to is one for all");
    EXPECT_HAS(translate(R"({"zero_optimization": {"offload_param": {"device": "tape"}}})"),
               "zero_optimization.offload_param.device \"tape\": not built here");
}

// ----------------------------------------------------------------------------
// the schedule of the learning rate

TEST(Schedule, FormulasAtTheirEdges) {
    for (const char* s : {"cosine", "linear", "wsd", "constant"}) {
        EXPECT_DOUBLE_EQ(lr_at(0, 100, 10, 1.0, 0.1, s), 0.1) << s; // first step of the warm-up
        EXPECT_DOUBLE_EQ(lr_at(9, 100, 10, 1.0, 0.1, s), 1.0) << s; // the last step of the warm-up
        EXPECT_DOUBLE_EQ(lr_at(10, 100, 10, 1.0, 0.1, s), 1.0) << s;
        EXPECT_DOUBLE_EQ(lr_at(0, 1, 0, 1.0, 0.1, s), 1.0) << s;  // a run of one step
        EXPECT_DOUBLE_EQ(lr_at(4, 5, 10, 1.0, 0.1, s), 0.5) << s; // a run that is all warm-up

        double end = lr_at(100, 100, 10, 1.0, 0.1, s);
        EXPECT_DOUBLE_EQ(end, std::string(s) == "constant" ? 1.0 : 0.1) << s;
        for (int i = 11; i <= 100; i++)
            EXPECT_LE(lr_at(i, 100, 10, 1.0, 0.1, s), lr_at(i - 1, 100, 10, 1.0, 0.1, s)) << s;
    }

    // Half way.
    EXPECT_DOUBLE_EQ(lr_at(55, 100, 10, 1.0, 0.1, "cosine"), 0.55);
    EXPECT_DOUBLE_EQ(lr_at(55, 100, 10, 1.0, 0.1, "linear"), 0.55);
    EXPECT_DOUBLE_EQ(lr_at(80, 100, 10, 1.0, 0.1, "wsd"), 1.0);
    EXPECT_DOUBLE_EQ(lr_at(90, 100, 10, 1.0, 0.1, "wsd"), 0.55);
}

// ----------------------------------------------------------------------------
// presets

// A preset beside the file that its makers published, or its paper's row: the parameters in all,
// where they are published, and each key that an export writes.
struct Published {
    const char* preset;
    const char* source;
    size_t parameters; // 0: not published, or counted otherwise
    const char* config;
};

static const Published PUBLISHED[] = {
    // GPT-2: n_inner is null there, which is 4 n_embd.
    {"gpt2", "openai-community/gpt2", 124439808,
     R"({"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12})"},
    {"gpt2-medium", "openai-community/gpt2-medium", 354823168,
     R"({"vocab_size": 50257, "n_positions": 1024, "n_embd": 1024, "n_layer": 24, "n_head": 16})"},
    {"gpt2-large", "openai-community/gpt2-large", 774030080,
     R"({"vocab_size": 50257, "n_positions": 1024, "n_embd": 1280, "n_layer": 36, "n_head": 20})"},
    {"gpt2-xl", "openai-community/gpt2-xl", 1557611200,
     R"({"vocab_size": 50257, "n_positions": 1024, "n_embd": 1600, "n_layer": 48, "n_head": 25})"},

    // GPT-3's rows of table 2.1, but for XL's heads and 13B's channels (presets.h says why).
    {"gpt3-small", "arXiv:2005.14165", 0, R"({"n_embd": 768, "n_layer": 12, "n_head": 12})"},
    {"gpt3-medium", "arXiv:2005.14165", 0, R"({"n_embd": 1024, "n_layer": 24, "n_head": 16})"},
    {"gpt3-large", "arXiv:2005.14165", 0, R"({"n_embd": 1536, "n_layer": 24, "n_head": 16})"},
    {"gpt3-xl", "arXiv:2005.14165", 0, R"({"n_embd": 2048, "n_layer": 24, "n_head": 16})"},
    {"gpt3-2.7b", "arXiv:2005.14165", 0, R"({"n_embd": 2560, "n_layer": 32, "n_head": 32})"},
    {"gpt3-6.7b", "arXiv:2005.14165", 0, R"({"n_embd": 4096, "n_layer": 32, "n_head": 32})"},
    {"gpt3-13b", "arXiv:2005.14165", 0, R"({"n_embd": 5120, "n_layer": 40, "n_head": 40})"},
    {"gpt3-175b", "arXiv:2005.14165", 0, R"({"n_embd": 12288, "n_layer": 96, "n_head": 96})"},

    // Llama.
    {"tinyllama-1.1b", "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T", 1100048384,
     R"({"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
         "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000,
         "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0})"},
    {"llama2-7b", "meta-llama/Llama-2-7b-hf", 6738415616,
     R"({"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
         "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0})"},
    {"llama3-8b", "meta-llama/Meta-Llama-3-8B", 8030261248,
     R"({"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
         "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0})"},
    {"llama3-70b", "meta-llama/Meta-Llama-3-70B", 70553706496,
     R"({"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
         "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
         "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0})"},
    {"llama3.1-8b", "meta-llama/Llama-3.1-8B", 8030261248,
     R"({"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
         "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
         "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192, "rope_type": "llama3"}})"},
    {"llama3.1-70b", "meta-llama/Llama-3.1-70B", 70553706496,
     R"({"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
         "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
         "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
         "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192, "rope_type": "llama3"}})"},
    {"llama3-405b", "meta-llama/Llama-3.1-405B", 405853388800,
     R"({"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
         "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256,
         "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
         "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192, "rope_type": "llama3"}})"},

    // Qwen and OLMo.
    {"qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B", 494032768,
     R"({"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
         "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
         "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
         "tie_word_embeddings": true})"},
    {"qwen3-0.6b", "Qwen/Qwen3-0.6B", 596049920,
     R"({"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
         "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936,
         "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
         "rope_theta": 1000000, "tie_word_embeddings": true})"},
    {"qwen3-1.7b", "Qwen/Qwen3-1.7B", 1720574976,
     R"({"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
         "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936,
         "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
         "rope_theta": 1000000, "tie_word_embeddings": true})"},
    {"olmo-2-7b", "allenai/OLMo-2-1124-7B", 7298617344,
     R"({"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100352,
         "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 500000})"},

    // Pythia: all have use_parallel_residual, rotary_pct 0.25 and the exact GELU.
    {"pythia-70m", "EleutherAI/pythia-70m", 70426624,
     R"({"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "vocab_size": 50304,
         "intermediate_size": 2048})"},
    {"pythia-160m", "EleutherAI/pythia-160m", 162322944,
     R"({"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
         "vocab_size": 50304, "intermediate_size": 3072})"},
    {"pythia-410m", "EleutherAI/pythia-410m", 405334016,
     R"({"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
         "vocab_size": 50304, "intermediate_size": 4096})"},
    {"pythia-1b", "EleutherAI/pythia-1b", 1011781632,
     R"({"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 8,
         "vocab_size": 50304, "intermediate_size": 8192})"},
    {"pythia-1.4b", "EleutherAI/pythia-1.4b", 1414647808,
     R"({"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
         "vocab_size": 50304, "intermediate_size": 8192})"},
    {"pythia-2.8b", "EleutherAI/pythia-2.8b", 2775208960,
     R"({"hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32,
         "vocab_size": 50304, "intermediate_size": 10240})"},
    {"pythia-6.9b", "EleutherAI/pythia-6.9b", 6857302016,
     R"({"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
         "vocab_size": 50432, "intermediate_size": 16384})"},
    {"pythia-12b", "EleutherAI/pythia-12b", 11846072320,
     R"({"hidden_size": 5120, "num_hidden_layers": 36, "num_attention_heads": 40,
         "vocab_size": 50688, "intermediate_size": 20480})"},

    // Further variants.
    {"smollm3-3b", "HuggingFaceTB/SmolLM3-3B", 3075098624,
     R"({"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
         "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128256,
         "max_position_embeddings": 65536, "rms_norm_eps": 1e-6, "rope_theta": 5000000.0,
         "no_rope_layers": [1,1,1,0,1,1,1,0,1,1,1,0,1,1,1,0,1,1,1,0,1,1,1,0,1,1,1,0,1,1,1,0,1,1,1,0],
         "tie_word_embeddings": true})"},
    {"phi-3-mini", "microsoft/Phi-3-mini-4k-instruct", 3821079552,
     R"({"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064,
         "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
         "sliding_window": 2047, "partial_rotary_factor": 1.0})"},
    {"gemma-2-2b", "google/gemma-2-2b", 2614341888,
     R"({"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
         "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
         "vocab_size": 256000, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
         "rope_theta": 10000.0, "sliding_window": 4096, "query_pre_attn_scalar": 256,
         "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "full_every": 2,
         "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
         "tie_word_embeddings": true})"},
    {"gemma-3-1b", "google/gemma-3-1b-pt", 999885952,
     R"({"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
         "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
         "vocab_size": 262144, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
         "rope_theta": 1000000, "rope_local_base_freq": 10000, "sliding_window": 512,
         "query_pre_attn_scalar": 256, "attn_logit_softcapping": null,
         "final_logit_softcapping": null, "full_every": 6, "hidden_act": "gelu_pytorch_tanh",
         "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": true})"},

    // Experts.
    {"mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1", 46702792704,
     R"({"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
         "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
         "num_local_experts": 8, "num_experts_per_tok": 2})"},
    {"olmoe-1b-7b", "allenai/OLMoE-1B-7B-0924", 6919161856,
     R"({"hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
         "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 50304,
         "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
         "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": false})"},
    {"qwen1.5-moe-a2.7b", "Qwen/Qwen1.5-MoE-A2.7B", 14315784192,
     R"({"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
         "num_key_value_heads": 16, "vocab_size": 151936, "max_position_embeddings": 8192,
         "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "num_experts": 60,
         "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "decoder_sparse_step": 1,
         "shared_expert_intermediate_size": 5632, "norm_topk_prob": false, "qkv_bias": true})"},
    {"gpt-oss-20b", "openai/gpt-oss-20b", 20914757184,
     R"({"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
         "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
         "vocab_size": 201088, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
         "rope_theta": 150000, "sliding_window": 128, "full_every": 2, "swiglu_limit": 7.0,
         "swiglu_alpha": 1.702, "attention_bias": true, "num_local_experts": 32,
         "num_experts_per_tok": 4,
         "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                          "truncate": false, "original_max_position_embeddings": 4096}})"},
    {"gpt-oss-120b", "openai/gpt-oss-120b", 116829156672,
     R"({"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
         "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
         "vocab_size": 201088, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
         "rope_theta": 150000, "sliding_window": 128, "full_every": 2, "swiglu_limit": 7.0,
         "swiglu_alpha": 1.702, "attention_bias": true, "num_local_experts": 128,
         "num_experts_per_tok": 4,
         "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                          "truncate": false, "original_max_position_embeddings": 4096}})"},
    {"qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 30532122624,
     R"({"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
         "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
         "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
         "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
         "decoder_sparse_step": 1, "norm_topk_prob": true})"},

    // DeepSeek. V3's count is without the layer that predicts further.
    {"deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite", 15706484224,
     R"({"hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
         "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400,
         "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000,
         "q_lora_rank": null, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
         "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 1,
         "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
         "n_shared_experts": 2, "routed_scaling_factor": 1.0, "norm_topk_prob": false,
         "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1, "topk_group": 1,
         "rope_scaling": {"factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
                          "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}})"},
    {"deepseek-v2", "deepseek-ai/DeepSeek-V2", 235741434880,
     R"({"hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 60,
         "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 102400,
         "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000,
         "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
         "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 1,
         "n_routed_experts": 160, "num_experts_per_tok": 6, "moe_intermediate_size": 1536,
         "n_shared_experts": 2, "routed_scaling_factor": 16.0, "norm_topk_prob": false,
         "scoring_func": "softmax", "topk_method": "group_limited_greedy", "n_group": 8,
         "topk_group": 3,
         "rope_scaling": {"factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
                          "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}})"},
    {"deepseek-v3", "deepseek-ai/DeepSeek-V3", 671026419200,
     R"({"hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
         "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280,
         "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000,
         "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
         "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 3,
         "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
         "n_shared_experts": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": true,
         "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4,
         "rope_scaling": {"factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                          "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}})"},
};

// The keys that files of a family have in every size, or its class where they are silent.
static nlohmann::json of_every_size(const std::string& type) {
    if (type == "gpt2") return {{"layer_norm_epsilon", 1e-5}, {"activation_function", "gelu_new"}};
    if (type == "gpt_neox")
        return {{"max_position_embeddings", 2048}, {"hidden_act", "gelu"}, {"rotary_pct", 0.25},
                {"layer_norm_eps", 1e-5}, {"rotary_emb_base", 10000},
                {"use_parallel_residual", true}};
    nlohmann::json silu = {{"hidden_act", "silu"}};
    if (type.starts_with("qwen") && type.ends_with("moe"))
        silu["mlp_only_layers"] = nlohmann::json::array();
    return silu;
}

// Expect each key of `wanted` in `found`, and no key in `found` that is not wanted.
static void expect_keys(nlohmann::json wanted, nlohmann::json found, const std::string& of) {
    for (auto& [key, value] : wanted.items()) {
        bool both = value.is_object() && found.contains(key) && found[key].is_object();
        if (both)
            expect_keys(value, found[key], of + ": " + key);
        else
            EXPECT_EQ(found.contains(key) ? found[key] : "not there", value) << of << ": " << key;
        found.erase(key);
    }
    EXPECT_EQ(found.dump(), "{}") << of << " says nothing of these";
}

// Each preset has every number of the published file, and its parameters in all.
TEST(Presets, AreThePublishedConfigs) {
    std::set<std::string> seen;
    for (const Published& row : PUBLISHED) {
        // Find the preset, and write what an export of it would.
        seen.insert(row.preset);
        Shape shape;
        for (const Preset& p : model_presets())
            if (p.name == std::string(row.preset)) shape = p.shape;
        ASSERT_GT(shape.L, 0u) << row.preset;
        nlohmann::json found = hf_json(shape);

        // Fill in what files leave to their class: the positions of GPT-3, sizes that follow.
        nlohmann::json wanted = of_every_size(shape.hf_type);
        wanted.update(nlohmann::json::parse(row.config));
        bool gpt = shape.hf_type == "gpt2";
        if (gpt && !wanted.contains("vocab_size")) {
            wanted["vocab_size"] = 50257;
            wanted["n_positions"] = 2048;
        }
        if (gpt) {
            wanted["n_ctx"] = wanted["n_positions"];
            wanted["n_inner"] = 4 * wanted["n_embd"].get<int>();
        }
        bool llama = wanted.contains("num_key_value_heads");
        if (llama && !wanted.contains("head_dim"))
            wanted["head_dim"] = wanted["hidden_size"].get<int>() /
                                 wanted["num_attention_heads"].get<int>();
        if (wanted.contains("qk_rope_head_dim")) wanted["head_dim"] = wanted["qk_rope_head_dim"];
        if (!wanted.contains("tie_word_embeddings")) wanted["tie_word_embeddings"] = gpt;

        // Which layers see all keys is a list in newer files, and a period in the older ones.
        if (wanted.contains("full_every")) {
            for (int layer = 1; layer <= wanted["num_hidden_layers"]; layer++) {
                bool full = layer % wanted["full_every"].get<int>() == 0;
                wanted["layer_types"].push_back(full ? "full_attention" : "sliding_attention");
            }
            wanted.erase("full_every");
        }

        // YaRN's size of cosines and sines follows from the factor; DeepSeek's mscale cancels it.
        if (wanted.contains("rope_scaling") && wanted["rope_scaling"].contains("beta_fast")) {
            nlohmann::json& rope = wanted["rope_scaling"];
            bool mscale = rope.contains("mscale");
            double size = mscale ? 1 : 0.1 * std::log(rope["factor"].get<double>()) + 1;
            EXPECT_NEAR(found["rope_scaling"]["attention_factor"].get<double>(), size, 1e-6);
            found["rope_scaling"].erase("attention_factor");
            rope["rope_type"] = "yarn";
            if (mscale) rope["truncate"] = true;
        }

        // Compare, key by key, and count the parameters.
        found.erase("architectures");
        EXPECT_EQ(found["model_type"], shape.hf_type);
        found.erase("model_type");
        expect_keys(wanted, found, concat(row.preset, " is ", row.source));
        size_t parameters = 0;
        for (const Parameter& p : make_model(shape).parameters)
            parameters += p.file_elements();
        if (row.parameters) {
            EXPECT_EQ(parameters, row.parameters) << row.preset;
        }
    }
    for (const Preset& p : model_presets())
        if (!has(p.name, "tiny") || has(p.name, "tinyllama"))
            EXPECT_TRUE(seen.count(p.name)) << p.name << " stands beside no published file";
}

// ----------------------------------------------------------------------------
// defaults

// The learning rate and decay of each loss on loaded weights, full and with adapters: TRL's
// (SFTConfig 2e-5, DPOConfig and its kin 1e-6, no decay; ten times the rate with LoRA).
TEST(Defaults, OfEachLossWithAndWithoutAdapters) {
    struct Row {
        const char* loss;
        const char* lr;
        const char* of_adapters;
    };
    const Row rows[] = {{"sft", "2e-05", "2e-04"},   {"dpo", "1e-06", "1e-05"},
                        {"ipo", "1e-06", "1e-05"},   {"simpo", "1e-06", "1e-05"},
                        {"orpo", "1e-06", "1e-05"},  {"kto", "1e-06", "1e-05"},
                        {"grpo", "1e-06", "1e-05"}};
    for (const Row& row : rows)
        for (const char* adapters : {"", "--lora", "--prefix", "--adapter"}) {
            // The line that a run prints, and the numbers that it takes.
            Config c;
            ASSERT_EQ(parse(c, {"--loss", row.loss}), "");
            if (*adapters) {
                ASSERT_EQ(parse(c, {adapters, "4"}), "");
            }
            std::string lr = *adapters ? row.of_adapters : row.lr;
            EXPECT_EQ(take_loss_defaults(c), std::string("--loss ") + row.loss +
                                                 " takes TRL's defaults: --lr " + lr +
                                                 " --weight-decay 0");
            EXPECT_DOUBLE_EQ(c.lr, atof(lr.c_str())) << row.loss << adapters;
            EXPECT_EQ(c.weight_decay, 0);

            // Flags that are given stay.
            Config mine;
            ASSERT_EQ(parse(mine, {"--loss", row.loss, "--lr", "3e-4", "--weight-decay", "0.2"}), "");
            EXPECT_EQ(take_loss_defaults(mine), "");
            EXPECT_EQ(mine.lr, 3e-4);
            EXPECT_EQ(mine.weight_decay, 0.2);
        }

    // Text, and a teacher's, keep those of training from scratch.
    for (const char* loss : {"lm", "distill"}) {
        Config c;
        ASSERT_EQ(parse(c, {"--loss", loss}), "");
        EXPECT_EQ(take_loss_defaults(c), "");
        EXPECT_EQ(c.lr, 1e-3);
    }
}

// The weights of each preference: beta 0.1 as in TRL; SimPO's are its authors' SimPOConfig, beta 2
// and gamma a quarter of it, which is TRL's simpo_gamma. GRPO has no reference unless it is asked.
TEST(Defaults, OfEachPreference) {
    for (auto [loss, beta] : std::map<std::string, double>{
             {"dpo", 0.1}, {"ipo", 0.1}, {"orpo", 0.1}, {"kto", 0.1}, {"simpo", 2}, {"grpo", 0}}) {
        Config c;
        std::vector<std::string> words = {"--loss", loss, "--data", "x.jsonl"};
        if (loss == "grpo") words.insert(words.end(), {"--reward", "exact"});
        ASSERT_EQ(parse(c, words), "");
        ASSERT_EQ(check_loss(c), "") << loss;
        EXPECT_EQ(c.beta, beta) << loss;
        EXPECT_EQ(c.gamma, 0.5) << loss;
        EXPECT_EQ(objective_of(c).beta, beta) << loss;
    }
}

// Flags that nobody gives have the values of published trainers and papers.
TEST(Defaults, OfFlagsAreWhatOthersPublished) {
    struct Row {
        const char* flag;
        const char* value;
        const char* whose;
    };
    const Row rows[] = {
        {"beta1", "0.9", "GPT-3, appendix B"},
        {"beta2", "0.95", "GPT-3, appendix B"},
        {"eps", "1e-08", "GPT-3, appendix B"},
        {"weight-decay", "0.1", "GPT-3, appendix B"},
        {"clip", "1", "GPT-3, appendix B"},
        {"schedule", "cosine", "GPT-3, appendix B"},
        {"balance", "0.01", "Switch Transformer, 2.2"},
        {"z-loss", "0", "none, as in Mixtral"},
        {"clip-low", "0.2", "PPO, 6.1; TRL's epsilon"},
        {"clip-high", "0.2", "PPO, 6.1; TRL's epsilon_high follows epsilon"},
        {"kl", "k3", "GRPO's paper, equation 4"},
        {"updates", "1", "TRL's num_iterations"},
        {"group", "8", "TRL's num_generations"},
        {"label-smoothing", "0", "TRL's DPOConfig"},
        {"desirable-weight", "1", "TRL's KTOConfig"},
        {"undesirable-weight", "1", "TRL's KTOConfig"},
        {"distill-share", "0.5", "torchtune's kd_ratio"},
        {"distill-temperature", "1", "no softening"},
        {"fp8-history", "1024", "Transformer Engine's DelayedScaling"},
        {"fp8-amax", "max", "Transformer Engine's DelayedScaling"},
        {"fp8-margin", "0", "Transformer Engine's DelayedScaling"},
        {"loss-scale", "dynamic", "Megatron-LM"},
        {"loss-scale-rule", "megatron", "Megatron-LM"},
        {"lora-plus", "1", "PEFT: one rate for both"},
        {"lora-targets", "all", "PEFT's all-linear"},
        {"temperature", "1", "transformers' GenerationConfig"},
        {"top-p", "1", "transformers' GenerationConfig"},
        {"top-k", "0", "the whole distribution"},
        {"cp-order", "zigzag", "Llama 3, 3.3.2"},
        {"pipeline", "1f1b", "Megatron-LM"},
        {"zero", "0", "plain data parallelism"},
        {"masters", "float", "mixed precision, arXiv:1710.03740"},
        {"states", "float", "AdamW"},
        {"failure-hours", "50700", "Llama 3: 16384 GPUs, 419 failures in 54 days"},
        {"draft-tokens", "4", "arXiv:2302.01318, K = 4"},
    };
    Config defaults;
    for (const Row& row : rows) {
        const Flag* flag = find_flag(row.flag);
        ASSERT_TRUE(flag) << row.flag;
        EXPECT_EQ(field_text(defaults, flag->field), row.value) << row.flag << ": " << row.whose;
    }

    // Two follow from other flags: alpha is twice the rank, the last rate a tenth of the peak.
    Config c;
    Shape s = gpt2_shape(4, 4, 128, 256, 1024);
    ASSERT_EQ(parse(c, {"--lora", "6", "--lr", "0.5"}), "");
    ASSERT_EQ(config_check(c, s), "");
    EXPECT_EQ(c.lora_alpha, 12);
    EXPECT_EQ(c.min_lr, 0.05);
}
