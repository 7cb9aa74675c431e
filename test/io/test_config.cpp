// test_config.cpp - flags, files of flags, help, and refusals: each names the fault and a fix
#include "../../llmc/io/config_check.h"
#include "../../llmc/io/hf_config.h"
#include "../../llmc/io/model_shape.h"
#include "../../llmc/action.h"
#include "../harness/testing.h"

using namespace llmc;

// The words of a command line.
static std::vector<std::string> operator""_flags(const char* line, size_t) {
    std::istringstream in(line);
    return {std::istream_iterator<std::string>(in), {}};
}

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
    EXPECT_EQ(says("train_gpt", "--lora 8"_flags), "--lora is a flag of tune_gpt");
    EXPECT_EQ(says("tune_gpt", "--lora 8 --lr 1e-3"_flags), "");
    EXPECT_EQ(says("tune_gpt", "--prompts p.jsonl"_flags), "--prompts is a flag of sample_gpt");
    EXPECT_EQ(says("sample_gpt", "--lr 1e-3"_flags), "--lr is a flag of train_gpt");
    EXPECT_EQ(says("sample_gpt", "--chat --adapter a"_flags), "");
    EXPECT_EQ(says("train_gpt", "--fit 24"_flags), "--fit is a flag of plan_gpt");
    EXPECT_EQ(says("plan_gpt", "--gpus 8 --tp 2 --lora 8"_flags), "");
    EXPECT_EQ(says("convert_gpt", "a b --merge"_flags), "");
    EXPECT_EQ(says("train_gpt", "--top-k 5"_flags), "--top-k is a flag of sample_gpt");
    EXPECT_EQ(says("train_gpt", "--save-minutes 5"_flags),
              "--save-minutes is gone: --save-every 10m says minutes");
    EXPECT_EQ(says("train_gpt", {"--keep-best"}), "--keep-best is gone: --keep 2,best keeps it");
    EXPECT_EQ(says("train_gpt", {"--prepare"}),
              "--prepare is gone: prepare_gpt --data FILES OUT writes shards of tokens");
    EXPECT_EQ(says("train_gpt", {"--document-mask"}),
              "--document-mask is gone: --documents mask is its name");
    EXPECT_HAS(says("train_gpt", "a"_flags), "'a' is no flag");
    EXPECT_HAS(says("prepare_gpt", "--shard-tokns 9"_flags), "did you mean --shard-tokens?");

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

// `--name=value` means `--name value`, for a value that holds an equals sign too, and for switches.
TEST(Config, ReadsFlagsAndSwitches) {
    Config c;
    EXPECT_EQ(parse(c, "--lr=3e-4 --eval=piqa=a.jsonl --prompt= --resume=false"_flags), "");
    EXPECT_EQ(parse(c, "--steps 7 --explain"_flags), "");
    EXPECT_EQ(c.lr, 3e-4);
    EXPECT_EQ(c.tasks, "piqa=a.jsonl");
    EXPECT_FALSE(c.eval);
    EXPECT_EQ(parse(c, "--eval --val=b.txt --eval piqa=c.jsonl"_flags), "");
    EXPECT_TRUE(c.eval && c.tasks == "piqa=c.jsonl" && c.val == "b.txt");
    EXPECT_EQ(config_json(c)["eval"], "piqa=c.jsonl");
    EXPECT_EQ(parse("--evaluate=piqa=a.jsonl"_flags),
              "--evaluate is gone: --eval TASK=FILE scores tasks at each evaluation");
    EXPECT_FALSE(c.resume);
    EXPECT_EQ(c.steps, 7);
    EXPECT_TRUE(c.explain);
    EXPECT_EQ(parse(c, "--explain false --model gpt2"_flags), "");
    EXPECT_TRUE(!c.explain && c.model == "gpt2");
    EXPECT_HAS(parse("--stpes=3"_flags), "unknown flag --stpes: did you mean --steps?");
    EXPECT_HAS(parse("--resume=maybe"_flags), "--resume wants true or false, not 'maybe'");

    // A switch may take a number, which turns it on.
    Config at;
    EXPECT_EQ(parse(at, "--resume 40 --explain=3 --save-async --steps 7"_flags), "");
    EXPECT_TRUE(at.resume && at.explain && at.save_async);
    EXPECT_EQ(at.resume_step, 40);
    EXPECT_EQ(at.layer, 3);
    EXPECT_EQ(config_json(at)["resume"], 40);
    EXPECT_HAS(parse("--save-async 7"_flags), "'7' is no flag");
}

// A default that follows from other flags must know whether the user set the flag, to whatever.
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
    EXPECT_HAS(parse("--config /no/such"_flags), "--config /no/such: No such file");
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
    EXPECT_HAS(parse("--config /dev/zero"_flags), "is no file but a device");
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
    for (const char* far : {"--completely-unknown", "--bogus", "--xy", "--foo"})
        EXPECT_EQ(parse({far, "3"}).find("did you mean"), std::string::npos) << far;

    EXPECT_HAS(parse("--batch-token 3"_flags), "did you mean --batch-tokens?");
    EXPECT_HAS(parse("--led 3"_flags), "unknown flag --led");
    EXPECT_HAS(parse("--steps"_flags), "wants a value");
    EXPECT_HAS(parse("steps"_flags), "is no flag");

    EXPECT_HAS(parse("--steps ten"_flags), "wants a whole number from 0");
    EXPECT_HAS(parse("--steps 1.5"_flags), "wants a whole number");
    EXPECT_HAS(parse("--steps -1"_flags), "wants a whole number from 0");
    EXPECT_HAS(parse("--lr nan"_flags), "wants a number");
    EXPECT_HAS(parse("--lr 1e-3x"_flags), "wants a number");
    EXPECT_HAS(parse("--states half"_flags), "float|bf16|8bit");
    EXPECT_HAS(parse("--seq 99999999999999"_flags), "wants a whole number from 0 to 16777216, not");
    EXPECT_HAS(parse("--seed -1"_flags), "from 0 to 9007199254740991");
}

// The words that turn a flag on, behind others.
static std::vector<std::string> words_of(std::vector<std::string> words, const On& on) {
    std::vector<std::string> values = {"true", "x", "1", "2", "0.25"};
    std::string choice, value = on.value;
    for (std::istringstream in(on.flag->accepts); std::getline(in, choice, '|');)
        values.push_back(choice);
    for (const std::string& each : values) {
        Config c;
        if (value.empty() && set_flag(c, on.flag->name, each).empty() && first_on(c, {on}))
            value = each;
    }
    words.push_back(concat("--", on.flag->name, "=", value));
    return words;
}

// Each row of both tables refuses what it names. A flag that it needs takes the refusal away.
TEST(Config, PairsOfFlagsAreRefused) {
    auto says = [](const std::vector<std::string>& words) {
        Config c;
        EXPECT_EQ(parse(c, words), "");
        return check_pairs(c);
    };
    typedef std::vector<std::string> Words;
    EXPECT_EQ(says({}), "");
    for (const Pair& pair : NEEDED_FLAGS) {
        bool reached = false;
        for (const Words& base : {Words{}, {"--loss", "grpo", "--export", "x"}})
            for (const On& on : flags_in(pair.flags)) {
                std::string wrong = says(words_of(base, on));
                bool mine = wrong.starts_with("--") && wrong.ends_with(pair.says);
                reached |= mine;
                std::string mended = says(words_of(words_of(base, on), flags_in(pair.others)[0]));
                EXPECT_FALSE(mine && mended == wrong) << wrong;
            }
        EXPECT_TRUE(reached) << pair.says;
    }

    // The other flag is named with its value where the message has a place for it.
    const Words base = {"--precision", "bf16", "--zero", "3", "--steps", "0", "--prompts", "p",
                        "--out", "x"};
    for (const Pair& pair : EXCLUDED_FLAGS) {
        bool reached = false;
        for (const On& on : flags_in(pair.flags))
            for (const On& other : flags_in(pair.others)) {
                Config c;
                Words words = words_of(words_of(base, on), other);
                EXPECT_EQ(parse(c, words), "");
                std::string wrong = check_pairs(c), expected = pair.says;
                EXPECT_NE(wrong, "") << words[words.size() - 2] << " " << words.back();
                if (size_t at = expected.find('%'); at != expected.npos)
                    expected.replace(at, 1, flag_text(c, *other.flag));
                reached |= wrong == flag_text(c, *on.flag) + expected;
            }
        EXPECT_TRUE(reached) << pair.says;
    }

    // A checkpoint's flags do no harm where they do nothing.
    Config adopted;
    adopted.gamma = 0.5;
    adopted.adopted = {"gamma"};
    EXPECT_EQ(check_pairs(adopted), "");
}

// Refusals of techniques that cannot be combined, or that this program lacks.
TEST(Config, RefusesWhatIsNotBuiltByName) {
    EXPECT_HAS(check("--ep 2"_flags),
               "--ep 2 shares out experts, and the model has none: leave it");

    // fp8 and its options.
    EXPECT_HAS(parse("--fp8 row"_flags), "none|block|tensor|delayed|mx|nvfp4");
    EXPECT_EQ(check("--fp8 block"_flags), "--fp8 block quantises what is bf16, and not what is of "
                                         "--precision fp32: give --precision bf16");
    EXPECT_HAS(check("--fp8 tensor --precision fp16"_flags), "give --precision bf16");
    EXPECT_EQ(check("--fp8 tensor --precision bf16"_flags), "");

    // Machines whose time is simulated.
    EXPECT_EQ(check("--machine h100"_flags), "");
    EXPECT_HAS(check("--machine h1000 --explain"_flags), "neither a machine nor a file; machines:");
    EXPECT_HAS(check("--machine H100"_flags), "; did you mean h100?");
    EXPECT_HAS(check("--machine a100"_flags), "; did you mean a100-40 or a100-80?");
    EXPECT_HAS(check("--machine rtx4091"_flags), "; did you mean rtx4090?");
    EXPECT_FALSE(has(check("--machine abacus"_flags), "did you mean"));
    EXPECT_HAS(check("--machine h100 --explain --steps 0"_flags), "there are no steps");
    EXPECT_EQ(check("--machine h100 --explain --offload optimizer"_flags), "");
    EXPECT_EQ(check("--machine h100 --explain --offload optimizer,update,gradients"_flags), "");
    EXPECT_EQ(check("--optimizer muon --offload optimizer,update,weights,activations"_flags), "");
    EXPECT_EQ(check("--machine h100 --explain --lora 8"_flags), "");
    EXPECT_EQ(check("--machine h100 --plan auto"_flags), "");

    // Plans that the program chooses.
    EXPECT_HAS(check("--plan auto --recompute full"_flags), "chooses --recompute: leave one");
    EXPECT_EQ(check("--plan auto --recompute full --explain"_flags), "");
    EXPECT_HAS(check("--plan auto --steps 0"_flags), "is for training, and there are no steps");
    EXPECT_HAS(check("--plan auto --micro-batch 2 --batch-tokens 4096"_flags),
               "chooses --micro-batch where --batch-tokens says the batch");
    for (const char* known : {"optimizer", "gradients", "optimizer,weights", "activations"})
        EXPECT_EQ(check({"--plan", "auto", "--offload", known}), "");
    EXPECT_EQ(check("--plan auto --offload optimizer,update"_flags), "");
    EXPECT_EQ(check("--plan auto --lora 8"_flags), "");
    EXPECT_EQ(check("--plan auto --fp8 block --precision bf16"_flags), "");
    EXPECT_EQ(check("--machine h100 --fp8 delayed --precision bf16"_flags), "");

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
    EXPECT_HAS(sampled("--plan auto"_flags), "--loss grpo without --answer-tokens is not known");
    EXPECT_HAS(sampled("--machine h100"_flags), "--loss grpo without --answer-tokens is not known");
    for (const char* flag : {"--plan", "--machine"})
        EXPECT_EQ(sampled({flag, flag[2] == 'p' ? "auto" : "h100", "--answer-tokens", "8"}), "");

    // The layouts that it looks at have the ZeRO-3 that this wants.
    Config planned;
    EXPECT_EQ(parse(planned, "--plan auto --hpz 2"_flags), "");
    EXPECT_EQ(check_planning(planned), "");

    EXPECT_HAS(check("--timeline x.png"_flags),
               "--timeline x.png: FILE.svg, FILE.json or FILE.txt");
    EXPECT_HAS(check("--timeline .txt"_flags), "FILE.svg, FILE.json or FILE.txt");
    EXPECT_EQ(check("--timeline x.txt"_flags), "");
    EXPECT_HAS(check("--timeline x.txt --explain"_flags), "times the actions of steps");
    EXPECT_HAS(check("--plan auto --gpus 2 --explain --timeline plan.svg"_flags),
               "--timeline draws the step of one layout: give it with the command that");
    EXPECT_HAS(check("--device cuda"_flags), "--device cpu");
}

// Frozen weights may be narrow where they are only read.
TEST(Config, FrozenWeightsAreRead) {
    for (const char* use : {"--steps=0", "--eval"}) EXPECT_EQ(check({"--weights", "nf4", use}), "");
    EXPECT_HAS(check("--weights nf4"_flags),
               "--weights nf4 does not train: give --steps 0 or --eval, or --lora RANK");
    EXPECT_HAS(check("--weights int8 --eval --export x"_flags), "--weights float");
    EXPECT_HAS(check("--weights nf4 --steps 0 --zero 3"_flags),
               "--weights nf4 without adapters has nothing that --zero 3 cuts: leave it out");
    EXPECT_HAS(check("--weights int3"_flags), "float|nf4|int8|int4");
}

// Adapters: the defaults that follow from the rank, and the flags that they exclude.
TEST(Config, AdaptersHaveARank) {
    Config few, more;
    Shape s = gpt2_shape(4, 4, 128, 256, 1024);
    EXPECT_EQ(parse(few, "--lora 8"_flags), "");
    EXPECT_EQ(config_check(few, s), "");
    EXPECT_EQ(few.lora_alpha, 16);
    EXPECT_EQ(few.weight_decay, 0);

    EXPECT_EQ(parse(more, "--lora 8 --lora-alpha 4 --weight-decay 0.2"_flags), "");
    EXPECT_EQ(config_check(more, s), "");
    EXPECT_EQ(more.lora_alpha, 4);
    EXPECT_EQ(more.weight_decay, 0.2);

    // Flags that are for adapters, and those that adapters exclude.
    EXPECT_EQ(check("--lora 2 --experts 4"_flags, llama_shape(2, 4, 2, 32, 32, 256, 512, 1e4)), "");
    EXPECT_HAS(check("--lora 2"_flags, neox_shape(2, 4, 64, 256)), "not for gpt_neox: leave it");
    EXPECT_EQ(check("--lora 2 --offload optimizer,activations,weights"_flags), "");
    EXPECT_EQ(check("--lora 2 --offload optimizer --weights nf4"_flags), "");
    EXPECT_HAS(check("--lora 2 --export x.bin"_flags), "give a folder");
    EXPECT_HAS(check("--lora 2 --export x.gguf"_flags), "give a folder, or --merge");
    EXPECT_EQ(check("--lora 2 --export x.gguf --merge --export-dtype q8_0"_flags), "");

    EXPECT_HAS(check("--export x --export-dtype q8_0"_flags), "convert_gpt IN FILE.gguf writes it");

    // Frozen weights may be narrow where no rank cuts them and no file holds them.
    for (const char* zero : {"2", "3"})
        EXPECT_EQ(check({"--lora", "2", "--weights", "nf4", "--zero", zero, "--export", "x"}), "");
    EXPECT_EQ(check("--lora 2 --weights nf4 --out x --verify-every 1"_flags), "");
    EXPECT_HAS(check("--lora 2 --weights nf4 --export x --merge"_flags), "give --weights float");
}

// A prefix: what it excludes, and the positions that it takes from the text.
TEST(Config, APrefixIsTrainedAlone) {
    EXPECT_EQ(check("--prefix 8"_flags), "");
    EXPECT_EQ(check("--prefix 8 --zero 3 --local-ranks 2 --dp 2"_flags), "");
    for (const char* other : {"--lora", "--adapter", "--lora-plus"})
        EXPECT_HAS(check({"--prefix", "8", other, "2"}),
                   concat("--prefix 8 is prefix tuning, and ", other, " 2 is for other adapters"));
    EXPECT_HAS(check("--prefix 1024"_flags), "leaves none of the model's 1024 positions for text");
    EXPECT_HAS(check("--prefix 24 --seq 1001"_flags),
               "--seq 1001 is beyond the model's 1000 positions behind the prefix: use --seq 1000");
    Shape sloped = gpt2_shape(4, 4, 128, 256, 1024);
    sloped.embedding.position = Position::ALIBI;
    EXPECT_HAS(check("--prefix 8"_flags, sloped), "trained keys have no position");

    // Exports, and what is not built.
    EXPECT_HAS(check("--prefix 8 --export x --merge"_flags), "without --merge");
    EXPECT_HAS(check("--prefix 8 --export x.gguf"_flags), "give --export a folder");
    EXPECT_HAS(check("--prefix 8 --export x.bin"_flags), "give a folder");
    EXPECT_EQ(check("--prefix 8 --cp 2 --local-ranks 2"_flags), "");
    EXPECT_HAS(check("--prefix 8 --pipeline zero-bubble"_flags),
               "is not built with --pipeline zero-bubble: give gpipe, 1f1b or interleaved");
    EXPECT_EQ(check("--prefix 8 --offload optimizer"_flags), "");
    EXPECT_EQ(check("--prefix 2 --experts 4"_flags,
                    llama_shape(2, 4, 2, 32, 32, 256, 512, 1e4)), "");
}

TEST(Config, ContextParallelRanksShareSequencesEqually) {
    EXPECT_EQ(check("--cp 2 --local-ranks 4 --seq 64"_flags), "");

    EXPECT_HAS(check("--cp 3 --local-ranks 3 --seq 64"_flags),
               "2 x --cp 3 does not divide --seq 64: try --seq 60 or 66");
    EXPECT_HAS(check("--cp 2 --tp 2 --pp 2 --local-ranks 6"_flags),
               "x --cp 2 are 8 ranks, and there are 6: use --local-ranks 8");
    EXPECT_HAS(check("--cp 2 --local-ranks 2 --zero 1 --zero-group 4"_flags),
               "--zero-group 4 does not divide --dp 1 x --cp 2");

    // The methods.
    EXPECT_HAS(check("--cp-method any"_flags), "gather|ulysses|ring");
    EXPECT_EQ(check("--cp 2 --local-ranks 2 --cp-method ulysses"_flags), "");
    EXPECT_EQ(check("--cp 2 --local-ranks 2 --cp-method ring"_flags), "");
    EXPECT_HAS(check("--cp 8 --local-ranks 8 --cp-method ulysses"_flags),
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
    EXPECT_EQ(check("--local-ranks 4 --pp 2 --zero 3"_flags), "");
    EXPECT_EQ(check("--dp 64 --pp 2 --explain"_flags), "");
    EXPECT_HAS(check("--local-ranks 3 --tp 2 --explain"_flags), "are 2 ranks, and there are 3");
    EXPECT_HAS(check("--local-ranks 1 --tp 2 --explain"_flags), "are 2 ranks, and there are 1");
    EXPECT_HAS(check("--dp 2"_flags), "are 2 ranks, and there are 1: use --local-ranks 2");
    EXPECT_HAS(check("--local-ranks 3 --pp 2"_flags), "use --local-ranks 2");

    // A stage needs a layer, and more stages on a rank need a schedule that knows of them.
    EXPECT_HAS(check("--local-ranks 8 --pp 8"_flags), "8 stages, and the model has 6 layers");
    Shape scalars = nanochat("nanochat_values");
    EXPECT_HAS(check("--local-ranks 2 --pp 2"_flags, scalars), "give --pp 1, and --tp or --zero 3");
    EXPECT_HAS(check("--offload activations"_flags, scalars), "give --recompute full instead");
    EXPECT_EQ(check("--offload optimizer"_flags, scalars), "");

    // ZeRO has four stages, and its groups divide the data-parallel ranks. --hpz makes groups
    // itself, so it takes no others.
    EXPECT_HAS(parse("--zero 4"_flags), "from 0 to 3");
    EXPECT_HAS(check("--local-ranks 4 --zero-group 3"_flags), "does not divide --dp 4");
    EXPECT_EQ(check("--local-ranks 4 --zero 3 --hpz 2"_flags), "");
    EXPECT_EQ(check("--local-ranks 4 --zero 2 --hpz 1"_flags), "");
    EXPECT_HAS(check("--local-ranks 4 --zero 3 --hpz 3"_flags), "not divide --dp 4");
}

TEST(Config, TensorParallelRanksShareEqually) {
    Shape llama = llama_shape(2, 8, 2, 64, 132, 256, 128, 10000);
    EXPECT_EQ(check("--local-ranks 4 --tp 4"_flags, llama), ""); // 2 ranks to a key/value head

    EXPECT_EQ(check("--tp 4 --explain --sequence-parallel"_flags), "");
    EXPECT_HAS(check("--tp 3 --explain"_flags), "--tp 3 does not divide 4 heads: try --tp 1, 2");
    EXPECT_HAS(check("--tp 8 --explain"_flags, llama),
               "--tp 8 does not divide the ffn's 132 channels: try --tp 1, 2, 4");
    llama = llama_shape(2, 12, 4, 96, 192, 256, 128, 10000);
    EXPECT_HAS(check("--tp 6 --explain"_flags, llama), "4 key/value heads do not divide each");

    // A size is offered only if it works with the ranks that are there.
    Shape two = gpt2_shape(2, 2, 32, 256, 128);
    EXPECT_EQ(check("--local-ranks 4 --tp 3"_flags, two),
              "--tp 3 does not divide 2 heads: try --tp 1, 2");
    EXPECT_EQ(check("--local-ranks 3 --tp 2"_flags, two),
              "--dp 1 x --tp 2 x --pp 1 are 2 ranks, and there are 3: use --local-ranks 2 or "
              "mpirun -np 2");
    EXPECT_EQ(check("--local-ranks 6 --tp 6"_flags, gpt2_shape(2, 4, 32, 256, 128)),
              "--tp 6 does not divide 4 heads: try --tp 1, 2"); // 6 ranks are no multiple of 4

    // Sequence parallelism.
    EXPECT_HAS(check("--tp 4 --explain --sequence-parallel --seq 9 --micro-batch 1"_flags),
               "does not divide micro-batch x seq = 9 rows: try --seq 12");
    EXPECT_HAS(check("--local-ranks 4 --tp 2 --dp 4"_flags),
               "--dp 4 x --tp 2 x --pp 1 are 8 ranks, and there are 4");
}

// Numbers that do not fit each other, or the loss. Each message offers a fix.
TEST(Config, RefusesShapesThatDoNotFit) {
    // Sizes that do not divide.
    EXPECT_HAS(check("--heads 3"_flags),
               "--heads 3 does not divide --channels 128: heads that do, near it: 1, 2, 4, 8");
    EXPECT_HAS(check("--seq 2000"_flags),
               "beyond the model's 1024 positions: use --seq 1024 or less");
    EXPECT_HAS(check("--batch-tokens 3584"_flags), "= 2048: try 2048 or 4096, or --micro-batch 2");
    EXPECT_HAS(check("--lr 1e-4 --min-lr 1e-3"_flags), "--min-lr 0.001 is above --lr");

    // Losses that need their data.
    EXPECT_HAS(check("--loss sft"_flags), "give --data FILE.jsonl");
    EXPECT_HAS(check("--loss sft --data a.jsonl --documents best-fit"_flags),
               "leave --documents out");
    EXPECT_HAS(check("--loss dpo"_flags), "give --data FILE.jsonl");
    EXPECT_HAS(parse("--label-smoothing 0.5"_flags), "from 0 to 0.49999, not '0.5'");
    EXPECT_EQ(check("--loss dpo --data a.jsonl --explain --machine h100"_flags), "");
    EXPECT_EQ(check("--loss dpo --data a.jsonl --cp 2 --local-ranks 2"_flags), "");

    // Answers that are sampled.
    const std::vector<std::string> grpo = {"--loss", "grpo", "--data", "a.jsonl"};
    auto sampled = [&](std::vector<std::string> more) {
        more.insert(more.begin(), grpo.begin(), grpo.end());
        return check(more);
    };

    EXPECT_EQ(sampled("--reward exact"_flags), "");
    EXPECT_EQ(sampled("--steps 0"_flags), "");

    EXPECT_HAS(check("--loss grpo --reward exact"_flags), "give --data FILE.jsonl");
    EXPECT_EQ(sampled({"--reward", "command:sh a.sh", "--updates", "4", "--clip-high", "0.28",
                       "--beta", "0.1", "--reward-seconds", "5"}), "");
    EXPECT_HAS(sampled({}), "learns from rewards: give --reward exact, number, regex or command:");
    EXPECT_HAS(sampled("--reward right"_flags), "--reward right names no verifier: give exact");
    EXPECT_HAS(sampled({"--reward", "command: "}), "names no verifier");
    EXPECT_HAS(sampled("--reward exact --reward-seconds 5"_flags), "give --reward command:");
    EXPECT_HAS(sampled("--reward command:a --reward-seconds 600 --local-ranks 2"_flags),
               "--reward-seconds 600 is not below --watchdog 600");
    EXPECT_HAS(sampled("--reward exact --beta 0.1 --precision bf16 --fp8 block"_flags),
               "--beta 0.1 is not built with --fp8");
    EXPECT_HAS(sampled("--reward exact --group 12 --micro-batch 8"_flags),
               "--group 12 does not divide the 8 sequences of a step: try --batch-tokens 6144");
    EXPECT_HAS(sampled("--reward exact --machine h100 --explain"_flags),
               "the time of --loss grpo without --answer-tokens is not known: give that too");

    // Saves.
    EXPECT_HAS(check("--buddy /dev/shm/x --out x"_flags),
               "wants the steps between saves in memory: give FOLDER:STEPS");
    for (const char* every : {"often", "-1", "1e7m", "5k", "nan", "auto:0", "auto5", "2.5"})
        EXPECT_HAS(check({"--save-every", every, "--out", "x"}), "nor minutes, as 10m, nor auto");

    // A Llama's shape.
    Shape llama = llama_shape(2, 4, 2, 64, 128, 256, 128, 10000);
    EXPECT_HAS(check("--kv-heads 3"_flags, llama), "--kv-heads 3 does not divide --heads 4");
    EXPECT_HAS(check("--position learned"_flags, llama), "Llama has no table of positions");
    EXPECT_HAS(check("--heads 64 --kv-heads 64 --position rope"_flags, llama),
               "a head size of 1 is odd");
    EXPECT_HAS(check("--kv-heads 2"_flags), "leave --kv-heads out");
    llama.attention.window = 64;
    EXPECT_EQ(check("--seq 100"_flags, llama), "");

    EXPECT_EQ(check("--heads 8 --batch-tokens 4096"_flags), "");
}

TEST(Config, RoPEKeepsItsPartOfANewHeadSize) {
    // Half of 16 channels turn. Of a head of 4 channels half turn too. Of 2 that half is no pair.
    Config c;
    Shape part = llama_shape(2, 4, 4, 64, 128, 256, 128, 10000);
    part.rope.rotary = 8;
    Shape s = part;
    ASSERT_EQ(parse(c, "--heads 16"_flags), "");
    EXPECT_EQ(override_shape(c, s), "");
    EXPECT_EQ(s.HS, 4u);
    EXPECT_EQ(s.rope.rotary, 2u);
    EXPECT_HAS(check("--heads 32"_flags, part), "of a head size of 2 that part is 1");

    // A part that would round down to nothing is refused, since 0 stands for the whole.
    part.rope.rotary = 2;
    EXPECT_HAS(check("--heads 16"_flags, part), "of a head size of 4 that part is 0");
}

TEST(Config, RefusesWhatCannotWork) {
    auto check = [](std::vector<std::string> words) {
        Config c;
        std::string wrong = parse(c, words);
        return wrong.empty() ? refuse_idle_flags(c) : wrong;
    };

    EXPECT_HAS(check("--beta1 1"_flags), "from 0 to 0.99999, not '1'");
    EXPECT_EQ(check("--beta1 0 --beta2 0.9999"_flags), "");

    EXPECT_HAS(check("--offload optimizer,wigths"_flags),
               "--offload wigths: give some of optimizer,");
    EXPECT_EQ(check("--offload optimizer,activations,weights,gradients"_flags), "");
    EXPECT_HAS(check("--offload update"_flags), "give --offload optimizer,update");
    EXPECT_HAS(check("--optimizer muon --offload optimizer,gradients"_flags),
               "leave gradients out of --offload");

    EXPECT_HAS(check("--draft d --dp 1 --tp 2"_flags),
               "--draft d guesses in one process, and this run has 2 ranks");
    EXPECT_EQ(check("--draft d --draft-tokens 8"_flags), "");

    EXPECT_HAS(check("--steps 0 --sample-tokens 0"_flags), "nothing to do");
    for (const char* use : {"--eval", "--explain", "--export=x"})
        EXPECT_EQ(check({"--steps", "0", "--sample-tokens", "0", use}), "") << use;
}

// Experts, routers, upcycling, expert-parallel ranks, each for a model that can have them or not.
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

    EXPECT_EQ(check("--experts 8"_flags), "");
    EXPECT_TRUE(s.family == Family::MIXTRAL && s.experts.E == 8 && s.experts.K == 2 && s.experts.balance == 0.01);
    EXPECT_EQ(check("--experts 4"_flags, "qwen3-0.6b"), "");
    EXPECT_EQ(s.hf_type, "qwen3_moe");
    EXPECT_EQ(check("--router sigmoid --balance 0 --z-loss 1e-3"_flags, "tiny-moe"), "");
    EXPECT_TRUE(s.experts.router == Router::SIGMOID && s.experts.balance == 0 && s.experts.z_loss == 1e-3);
    EXPECT_EQ(check("--experts-per-token 1 --router softmax"_flags, "tiny-moe"), "");

    EXPECT_HAS(check("--experts-per-token 1"_flags, "tiny-moe"), "give --router softmax");
    EXPECT_HAS(check("--experts-per-token 9"_flags, "tiny-moe"), "of --experts 8: at most 8");
    EXPECT_HAS(check("--experts 8"_flags, "tiny"), "built for Llama");
    EXPECT_HAS(check("--experts 8"_flags, "qwen2.5-0.5b"), "built for Llama");
    EXPECT_HAS(check("--balance 1"_flags), "--balance 1 is for models with experts");
    EXPECT_HAS(check("--precision bf16 --fp8 block"_flags, "tiny-moe"), "--fp8 block is not");
    EXPECT_HAS(check("--weights nf4 --eval"_flags, "tiny-moe"), "--weights nf4 is not built with");

    // A capacity counts whole sequences, and generation drops nothing.
    EXPECT_EQ(check("--expert-capacity 1.25"_flags, "tiny-moe"), "");
    EXPECT_TRUE(s.experts.capacity.factor == 1.25);
    EXPECT_HAS(check("--expert-capacity 1.25"_flags), "is for models with experts");

    // Latents that are too wide for a GPU's registers train there, and are decoded on a CPU.
    Shape wide = s;
    wide.latent.kv = 1025;
    EXPECT_HAS(check_latents(wide, true, true), "latents of 1025 channels: generation on a GPU");
    EXPECT_EQ(check_latents(wide, true, false) + check_latents(wide, false, true), "");
    wide.latent.kv = 1024;
    EXPECT_EQ(check_latents(wide, true, true), "");

    // The bias of DeepSeek-V3's router.
    EXPECT_EQ(check("--router-bias-rate 0.001"_flags, "deepseek-v3"), "");
    EXPECT_HAS(check("--router-bias-rate 0.001"_flags, "tiny-moe"), "DeepSeek-V3's: leave it out");
    EXPECT_HAS(check("--router-bias-rate 0.001"_flags, "tiny"), "is for models with experts");
    EXPECT_HAS(check("--router softmax"_flags, "deepseek-v3"), "for sigmoids: leave it out");

    // Upcycling.
    EXPECT_EQ(check("--upcycle 4 --experts-per-token 3"_flags), "");
    EXPECT_TRUE(s.family == Family::MIXTRAL && s.experts.E == 4 && s.experts.K == 3);
    EXPECT_HAS(check("--upcycle 4 --router softmax"_flags),
               "--upcycle 4: gates of --router softmax");
    EXPECT_HAS(check("--upcycle 4"_flags, "tiny"), "--upcycle 4: built for Llama");
    EXPECT_HAS(check("--upcycle 4"_flags, "tiny-moe"), "has experts already");
    EXPECT_HAS(check("--upcycle 1"_flags), "--experts-per-token 2 of --upcycle 1: at most 1");

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
    EXPECT_EQ(ranks("6", "--experts 6"_flags), "");
    EXPECT_EQ(ranks("2", "--ep-method exchange"_flags), "");
    EXPECT_HAS(ranks("2", "--ep-method ring"_flags), "wants one of gather|exchange, not 'ring'");

    // Whole experts beside tensor parallelism.
    auto whole = [&](const char* ep, std::vector<std::string> more = {}) {
        more.insert(more.end(), {"--tp", "2", "--sequence-parallel", "--etp", "1"});
        return ranks(ep, more);
    };
    EXPECT_EQ(whole("4"), "");
    EXPECT_EQ(whole("1", "--ffn 129"_flags), "");
    EXPECT_TRUE(s.experts.whole);
    EXPECT_EQ(whole("8"), "--ep 8 does not divide the 12 ranks of --dp x --tp: try --ep 1, 2, 4");
    EXPECT_EQ(ranks("2", "--etp 1"_flags), "") << "one rank cuts nothing";
    EXPECT_EQ(ranks("2", "--tp 2 --etp 2"_flags), "");
    EXPECT_FALSE(s.experts.whole);
    EXPECT_HAS(ranks("2", "--tp 2 --ffn 129"_flags), "does not divide the ffn's 129 channels");
    EXPECT_HAS(ranks("2", "--tp 4 --etp 2"_flags),
               "--etp 2: experts are cut by all ranks of --tp 4 or by none: leave it out");
    EXPECT_HAS(ranks("2", "--tp 2 --etp 1"_flags), "--etp 1: ranks that hold whole experts "
                                                        "route rows of their own: give "
                                                        "--sequence-parallel");
    EXPECT_HAS(check("--etp 1"_flags), "--etp 1 is for models with experts");
    EXPECT_EQ(check("--etp 0"_flags), "");
    EXPECT_EQ(check("--plan auto --explain --etp 1"_flags, "tiny-moe"), "");

    EXPECT_EQ(check({}), "");
    EXPECT_EQ(s.experts.balance, 0);
}

TEST(Config, SmallMastersAreBf16s) {
    EXPECT_HAS(check("--masters none"_flags), "of --precision fp32: give --precision bf16");
    EXPECT_HAS(check("--masters none --precision fp16"_flags), "those of --precision fp16");
    EXPECT_HAS(check("--optimizer sgd --states bf16"_flags), "is not for --optimizer sgd");
    for (const char* masters : {"remainder", "none", "float"})
        EXPECT_EQ(check({"--precision", "bf16", "--masters", masters}), "");
    EXPECT_HAS(parse("--masters half"_flags), "float|remainder|none");
    for (const char* precision : {"fp32", "bf16", "fp16"})
        EXPECT_EQ(check({"--precision", precision, "--states", "bf16"}), "");
    EXPECT_EQ(check("--optimizer sgd"_flags), "");
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
    EXPECT_EQ(notes("--steps 2"_flags), "") << "the default warm-up is nobody's choice";

    EXPECT_EQ(notes("--steps 2 --warmup 2"_flags),
              "--warmup 2 is all of --steps 2: the learning rate never reaches --lr; ");
    EXPECT_EQ(notes("--steps 3 --warmup 2"_flags), "");

    EXPECT_EQ(notes("--zero 1"_flags), "--zero 1 shards nothing: there is one data-parallel rank; ");
    EXPECT_EQ(notes("--zero 1 --local-ranks 2"_flags), "");
    for (auto [fp8, block] : {std::pair("block", 128), {"mx", 32}, {"nvfp4", 16}})
        for (int seq : {block / 2, block})
            EXPECT_EQ(notes({"--precision=bf16", concat("--fp8=", fp8), concat("--seq=", seq)}) == "",
                      seq == block);

    // Two tensor-parallel ranks both have all experts, whole, or one half of them each.
    Config whole;
    whole.out = "run"; // without it another note says what is lost
    whole.zero = whole.dp = whole.etp = 1, whole.tp = 2;
    EXPECT_EQ(config_notes(whole).size(), 0u);
    whole.ep = 2;
    EXPECT_EQ(config_notes(whole).size(), 1u) << "--zero 1 shards nothing";
    EXPECT_EQ(notes("--keep 3"_flags), "--keep does nothing without --out; ");
    EXPECT_EQ(notes("--keep 3 --out x"_flags), "");
    for (const char* keep : {"0", "best", "3,", "3,last", "1.5", "-2,best"})
        EXPECT_HAS(check({"--out", "x", "--keep", keep}), concat(keep, " is neither a number"));
    EXPECT_HAS(check("--keep 3,best"_flags), "--keep 3,best wants a folder: give --out DIR");

    EXPECT_EQ(notes("--top-k 3 --temperature 0"_flags),
              "--top-k does nothing without a --temperature above 0; ");
}

TEST(Config, TheCopyInTheLogHoldsEveryFlag) {
    Config c;
    c.lr = 0.25;
    nlohmann::json j = config_json(c);
    EXPECT_EQ(j["lr"], 0.25);
    for (const Flag& f : config_table()) EXPECT_TRUE(!*f.name || j.contains(f.name)) << f.name;
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
// where they are published, the numbers of its size, and the other keys that an export writes.
struct Published {
    const char* preset;
    const char* source;
    size_t parameters;           // 0: not published, or counted otherwise
    std::vector<double> numbers; // of sizes_named(); 0: the file has no such key
    const char* more = "{}";
};

// The keys of `numbers` in files of a family.
static std::vector<std::string> sizes_named(const std::string& type) {
    if (type == "gpt2") return {"n_embd", "n_layer", "n_head", "vocab_size", "n_positions"};
    if (type == "gpt_neox")
        return {"hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
                "intermediate_size"};
    return {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "vocab_size", "max_position_embeddings", "rms_norm_eps",
            "rope_theta"};
}

static const Published PUBLISHED[] = {
    // GPT-2: n_inner is null there, which is 4 n_embd.
    {"gpt2", "openai-community/gpt2", 124439808, {768, 12, 12, 50257, 1024}},
    {"gpt2-medium", "openai-community/gpt2-medium", 354823168, {1024, 24, 16, 50257, 1024}},
    {"gpt2-large", "openai-community/gpt2-large", 774030080, {1280, 36, 20, 50257, 1024}},
    {"gpt2-xl", "openai-community/gpt2-xl", 1557611200, {1600, 48, 25, 50257, 1024}},

    // GPT-3's rows of table 2.1, but for XL's heads and 13B's channels (family.h says why).
    {"gpt3-small", "arXiv:2005.14165", 0, {768, 12, 12}},
    {"gpt3-medium", "arXiv:2005.14165", 0, {1024, 24, 16}},
    {"gpt3-large", "arXiv:2005.14165", 0, {1536, 24, 16}},
    {"gpt3-xl", "arXiv:2005.14165", 0, {2048, 24, 16}},
    {"gpt3-2.7b", "arXiv:2005.14165", 0, {2560, 32, 32}},
    {"gpt3-6.7b", "arXiv:2005.14165", 0, {4096, 32, 32}},
    {"gpt3-13b", "arXiv:2005.14165", 0, {5120, 40, 40}},
    {"gpt3-175b", "arXiv:2005.14165", 0, {12288, 96, 96}},

    // Llama.
    {"tinyllama-1.1b", "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T", 1100048384,
     {2048, 5632, 22, 32, 4, 32000, 2048, 1e-5, 1e4}},
    {"llama2-7b", "meta-llama/Llama-2-7b-hf", 6738415616,
     {4096, 11008, 32, 32, 32, 32000, 4096, 1e-5, 1e4}},
    {"llama3-8b", "meta-llama/Meta-Llama-3-8B", 8030261248,
     {4096, 14336, 32, 32, 8, 128256, 8192, 1e-5, 5e5}},
    {"llama3-70b", "meta-llama/Meta-Llama-3-70B", 70553706496,
     {8192, 28672, 80, 64, 8, 128256, 8192, 1e-5, 5e5}},
    {"llama3.1-8b", "meta-llama/Llama-3.1-8B", 8030261248,
     {4096, 14336, 32, 32, 8, 128256, 131072, 1e-5, 5e5},
     R"({"rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192, "rope_type": "llama3"}})"},
    {"llama3.1-70b", "meta-llama/Llama-3.1-70B", 70553706496,
     {8192, 28672, 80, 64, 8, 128256, 131072, 1e-5, 5e5},
     R"({"rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192, "rope_type": "llama3"}})"},
    {"llama3-405b", "meta-llama/Llama-3.1-405B", 405853388800,
     {16384, 53248, 126, 128, 8, 128256, 131072, 1e-5, 5e5},
     R"({"rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192, "rope_type": "llama3"}})"},

    // Qwen and OLMo.
    {"qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B", 494032768,
     {896, 4864, 24, 14, 2, 151936, 32768, 1e-6, 1e6},
     R"({"tie_word_embeddings": true})"},
    {"qwen3-0.6b", "Qwen/Qwen3-0.6B", 596049920, {1024, 3072, 28, 16, 8, 151936, 40960, 1e-6, 1e6},
     R"({"head_dim": 128, "tie_word_embeddings": true})"},
    {"qwen3-1.7b", "Qwen/Qwen3-1.7B", 1720574976, {2048, 6144, 28, 16, 8, 151936, 40960, 1e-6, 1e6},
     R"({"head_dim": 128, "tie_word_embeddings": true})"},
    {"olmo-2-7b", "allenai/OLMo-2-1124-7B", 7298617344,
     {4096, 11008, 32, 32, 32, 100352, 4096, 1e-6, 5e5}},

    // Pythia: all have use_parallel_residual, rotary_pct 0.25 and the exact GELU.
    {"pythia-70m", "EleutherAI/pythia-70m", 70426624, {512, 6, 8, 50304, 2048}},
    {"pythia-160m", "EleutherAI/pythia-160m", 162322944, {768, 12, 12, 50304, 3072}},
    {"pythia-410m", "EleutherAI/pythia-410m", 405334016, {1024, 24, 16, 50304, 4096}},
    {"pythia-1b", "EleutherAI/pythia-1b", 1011781632, {2048, 16, 8, 50304, 8192}},
    {"pythia-1.4b", "EleutherAI/pythia-1.4b", 1414647808, {2048, 24, 16, 50304, 8192}},
    {"pythia-2.8b", "EleutherAI/pythia-2.8b", 2775208960, {2560, 32, 32, 50304, 10240}},
    {"pythia-6.9b", "EleutherAI/pythia-6.9b", 6857302016, {4096, 32, 32, 50432, 16384}},
    {"pythia-12b", "EleutherAI/pythia-12b", 11846072320, {5120, 36, 40, 50688, 20480}},

    // Further variants.
    {"smollm3-3b", "HuggingFaceTB/SmolLM3-3B", 3075098624,
     {2048, 11008, 36, 16, 4, 128256, 65536, 1e-6, 5e6},
     R"({"tie_word_embeddings": true, "no_rope_layers":
         [1,1,1,0,1,1,1,0,1,1,1,0,1,1,1,0,1,1,1,0,1,1,1,0,1,1,1,0,1,1,1,0,1,1,1,0]})"},
    {"phi-3-mini", "microsoft/Phi-3-mini-4k-instruct", 3821079552,
     {3072, 8192, 32, 32, 32, 32064, 4096, 1e-5, 1e4},
     R"({"sliding_window": 2047, "partial_rotary_factor": 1.0})"},
    {"gemma-2-2b", "google/gemma-2-2b", 2614341888, {2304, 9216, 26, 8, 4, 256000, 8192, 1e-6, 1e4},
     R"({"head_dim": 256, "sliding_window": 4096, "query_pre_attn_scalar": 256,
         "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "full_every": 2,
         "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
         "tie_word_embeddings": true})"},
    {"gemma-3-1b", "google/gemma-3-1b-pt", 999885952,
     {1152, 6912, 26, 4, 1, 262144, 32768, 1e-6, 1e6},
     R"({"head_dim": 256, "rope_local_base_freq": 10000, "sliding_window": 512,
         "query_pre_attn_scalar": 256, "attn_logit_softcapping": null,
         "final_logit_softcapping": null, "full_every": 6, "hidden_act": "gelu_pytorch_tanh",
         "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": true})"},

    // No file of transformers: the published text's sizes, and its count of parameters by hand.
    {"track3", "modded-nanogpt, records/track_3_optimization", 162354816,
     {768, 3072, 12, 6, 6, 50304, 1024, 1.1920929e-7, 1024},
     R"({"final_logit_softcapping": 15.0, "hidden_act": "relu2"})"},
    {"nanochat", "karpathy/nanochat, depth 12", 135266304,
     {768, 3072, 12, 6, 6, 32768, 2048, 1.1920929e-7, 1e5},
     R"({"final_logit_softcapping": 15.0, "hidden_act": "relu2"})"},
    // The same, six tables, six gates of 72 numbers, 24 scalars.
    {"nanochat-values", "karpathy/nanochat, depth 12", 135266304 + 6 * 32768 * 768 + 6 * 72 + 24,
     {768, 3072, 12, 6, 6, 32768, 2048, 1.1920929e-7, 1e5},
     R"({"final_logit_softcapping": 15.0, "hidden_act": "relu2", "residual_scalars": true,
         "value_embeddings": true})"},

    // Experts.
    {"mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1", 46702792704,
     {4096, 14336, 32, 32, 8, 32000, 32768, 1e-5, 1e6},
     R"({"num_local_experts": 8, "num_experts_per_tok": 2})"},
    {"olmoe-1b-7b", "allenai/OLMoE-1B-7B-0924", 6919161856,
     {2048, 1024, 16, 16, 16, 50304, 4096, 1e-5, 1e4},
     R"({"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": false})"},
    {"qwen1.5-moe-a2.7b", "Qwen/Qwen1.5-MoE-A2.7B", 14315784192,
     {2048, 0, 24, 16, 16, 151936, 8192, 1e-6, 1e6},
     R"({"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
         "decoder_sparse_step": 1, "shared_expert_intermediate_size": 5632,
         "norm_topk_prob": false, "qkv_bias": true})"},
    {"gpt-oss-20b", "openai/gpt-oss-20b", 20914757184,
     {2880, 2880, 24, 64, 8, 201088, 131072, 1e-5, 150000},
     R"({"head_dim": 64, "sliding_window": 128, "full_every": 2, "swiglu_limit": 7.0,
         "swiglu_alpha": 1.702, "attention_bias": true, "num_local_experts": 32,
         "num_experts_per_tok": 4, "rope_scaling": {"rope_type": "yarn", "factor": 32.0,
         "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
         "original_max_position_embeddings": 4096}})"},
    {"gpt-oss-120b", "openai/gpt-oss-120b", 116829156672,
     {2880, 2880, 36, 64, 8, 201088, 131072, 1e-5, 150000},
     R"({"head_dim": 64, "sliding_window": 128, "full_every": 2, "swiglu_limit": 7.0,
         "swiglu_alpha": 1.702, "attention_bias": true, "num_local_experts": 128,
         "num_experts_per_tok": 4, "rope_scaling": {"rope_type": "yarn", "factor": 32.0,
         "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
         "original_max_position_embeddings": 4096}})"},
    {"qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 30532122624,
     {2048, 0, 48, 32, 4, 151936, 40960, 1e-6, 1e6},
     R"({"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
         "moe_intermediate_size": 768, "decoder_sparse_step": 1, "norm_topk_prob": true})"},

    // DeepSeek. V3's count is without the layer that predicts further.
    {"deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite", 15706484224,
     {2048, 10944, 27, 16, 16, 102400, 163840, 1e-6, 1e4},
     R"({"q_lora_rank": null, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
         "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 1,
         "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
         "n_shared_experts": 2, "routed_scaling_factor": 1.0, "norm_topk_prob": false,
         "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1, "topk_group": 1,
         "rope_scaling": {"factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
         "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}})"},
    {"deepseek-v2", "deepseek-ai/DeepSeek-V2", 235741434880,
     {5120, 12288, 60, 128, 128, 102400, 163840, 1e-6, 1e4},
     R"({"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
         "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 1,
         "n_routed_experts": 160, "num_experts_per_tok": 6, "moe_intermediate_size": 1536,
         "n_shared_experts": 2, "routed_scaling_factor": 16.0, "norm_topk_prob": false,
         "scoring_func": "softmax", "topk_method": "group_limited_greedy", "n_group": 8,
         "topk_group": 3, "rope_scaling": {"factor": 40, "beta_fast": 32, "beta_slow": 1,
         "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}})"},
    {"deepseek-v3", "deepseek-ai/DeepSeek-V3", 671026419200,
     {7168, 18432, 61, 128, 128, 129280, 163840, 1e-6, 1e4},
     R"({"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
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
        wanted.update(nlohmann::json::parse(row.more));
        std::vector<std::string> keys = sizes_named(shape.hf_type);
        for (size_t i = 0; i < row.numbers.size(); i++)
            if (row.numbers[i]) wanted[keys[i]] = row.numbers[i];
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
        if (!has(p.name, "tiny") || has(p.name, "tinyllama")) {
            EXPECT_TRUE(seen.count(p.name)) << p.name << " stands beside no published file";
        }
}

// ----------------------------------------------------------------------------
// the depth dial

// The batches, weights and steps of nanochat's models, as its pages and its program print them.
TEST(Dial, SetsWhatNanochatSets) {
    auto dialled = [](std::vector<std::string> words, std::string* says) {
        Config c;
        EXPECT_EQ(parse(c, words), "");
        EXPECT_EQ(take_depth(c, says), "");
        return c;
    };
    std::string says;
    for (auto [depth, log_batch] : {std::pair(8, 18), {10, 19}, {12, 19}, {16, 19}, {18, 20},
                                    {24, 20}, {26, 20}, {32, 21}, {50, 21}})
        EXPECT_EQ(dialled({"--depth", std::to_string(depth)}, &says).batch_tokens, 1 << log_batch)
            << depth;
    EXPECT_NEAR(dial_weights(12, 768, 32768), 110.1e6, 5e4);
    EXPECT_NEAR(dial_weights(24, 1536, 32768), 729.8e6, 5e4);
    says = "";
    Config c = dialled("--depth 24:8"_flags, &says);
    EXPECT_EQ(c.steps, 5568);
    EXPECT_EQ(std::count(says.begin(), says.end(), '\n'), 6);

    // Rates are multiplied by the roots of 2^20 / 2^19 and, of AdamW's groups, of 768 / 1536.
    EXPECT_NEAR(c.lr, 0.0282843, 1e-7);
    EXPECT_HAS(c.optimizer, "table=0.3,head=0.008,");
    EXPECT_NEAR(c.min_lr, c.lr / 20, 1e-7);
    EXPECT_HAS(says, "momentum=0.85:0.97:400,cautious,normuon=0.9,muoneq,muon+,");
    EXPECT_NEAR(c.weight_decay, 0.28 * std::sqrt(2) * 110.1 / 729.8, 1e-5);
    EXPECT_EQ(config_check(c, gpt2_shape(4, 4, 128, 256, 2048)), "");
    c = dialled("--depth 24:8 --model nanochat-values"_flags, &says);
    EXPECT_HAS(c.optimizer, "decay=0.01,values=0.15,resid=0.00707107,x0=0.707107");
    EXPECT_HAS(says, ": --model nanochat-values --layers 24 --channels 1536 --heads 12, without "
                     "smear and backout\n");
    c = dialled("--depth 24:8"_flags, &says);

    // The model: with the vocabulary of the published ones it has the weights that they have but for
    // the gates, and a table.
    for (const Preset& p : model_presets())
        if (p.name == c.model) {
            Shape s = p.shape;
            ASSERT_EQ(override_shape(c, s), "");
            EXPECT_TRUE(s.L == 24 && s.C == 1536 && s.NH == 12 && s.NKV == 12 && s.HS == 128);
            EXPECT_EQ(double(parameter_count(make_model(s))),
                      dial_weights(24, 1536, 32768) - 12 * 12 * 12 + 32768 * 1536);
        }

    // Flags win, and what follows from them follows.
    c = dialled("--depth 12 --batch-tokens 131072 --channels 384 --lr 0.01"_flags, &says);
    EXPECT_TRUE(c.channels == 384 && c.lr == 0.01 && c.batch_tokens == 131072 && c.steps == 10080);
    EXPECT_HAS(c.optimizer, "table=0.15,head=0.004,");
    auto refusal = [](std::vector<std::string> words) {
        Config c;
        std::string says, wrong = parse(c, words);
        return wrong + take_depth(c, &says) + says;
    };
    for (const char* depth : {"0", "x", "12:", "12:0", "12:8:1", "1.5"})
        EXPECT_HAS(refusal({"--depth", depth}), ": give D or D:RATIO, as 12:8");
    EXPECT_HAS(refusal("--depth 12 --model gpt2"_flags), "is a nanochat's: leave --model out");
    EXPECT_HAS(refusal("--depth 12 --optimizer adamw"_flags), "give --lr too");
    EXPECT_EQ(refusal({}), "");
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
        {"updates", "1", "TRL's num_iterations"},
        {"group", "8", "TRL's num_generations"},
        {"label-smoothing", "0", "TRL's DPOConfig"},
        {"desirable-weight", "1", "TRL's KTOConfig"},
        {"undesirable-weight", "1", "TRL's KTOConfig"},
        {"distill-share", "0.5", "torchtune's kd_ratio"},
        {"distill-temperature", "1", "no softening"},
        {"loss-scale", "dynamic", "Megatron-LM"},
        {"lora-plus", "1", "PEFT: one rate for both"},
        {"lora-targets", "all", "PEFT's all-linear"},
        {"temperature", "1", "transformers' GenerationConfig"},
        {"top-p", "1", "transformers' GenerationConfig"},
        {"top-k", "0", "the whole distribution"},
        {"pipeline", "1f1b", "Megatron-LM"},
        {"zero", "0", "plain data parallelism"},
        {"masters", "float", "mixed precision, arXiv:1710.03740"},
        {"states", "float", "AdamW"},
        {"draft-tokens", "4", "arXiv:2302.01318, K = 4"},
    };
    Config defaults;
    for (const Row& row : rows) {
        const Flag* flag = find_flag(row.flag);
        ASSERT_TRUE(flag) << row.flag;
        EXPECT_EQ(field_text(defaults, flag->field), row.value) << row.flag << ": " << row.whose;
    }

    // So have numbers without a flag: Transformer Engine's DelayedScaling, Llama 3's order.
    Fp8Rule rule;
    EXPECT_TRUE(rule.length == 1024 && rule.margin == 0 && !rule.recent);
    EXPECT_EQ(Layout().context.order, ContextOrder::ZIGZAG);
    EXPECT_EQ(Objective().kl, KlEstimate::K3) << "GRPO's paper, equation 4";
    SaveRule saves;
    defaults.save_every = "auto";
    EXPECT_EQ(read_save_rule(defaults, &saves), "");
    EXPECT_EQ(saves.failure_hours, 50700) << "Llama 3: 16384 GPUs, 419 failures in 54 days";

    // Two follow from other flags: alpha is twice the rank, the last rate a tenth of the peak.
    Config c;
    Shape s = gpt2_shape(4, 4, 128, 256, 1024);
    ASSERT_EQ(parse(c, "--lora 6 --lr 0.5"_flags), "");
    ASSERT_EQ(config_check(c, s), "");
    EXPECT_EQ(c.lora_alpha, 12);
    EXPECT_EQ(c.min_lr, 0.05);
}
