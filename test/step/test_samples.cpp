// test_samples.cpp - samples: where they start and end, prompts from a pipe, a run's last words
//   Runs $TRAIN_GPT (default build/train_gpt) where the program's output matters.
#include <regex>
#include "../../llmc/run/sample.h"
#include "../harness/runs.h"

using namespace llmc;

static Ran run_program(const std::string& arguments, const std::string& input = "") {
    return start(arguments, input.empty() ? "" : "printf '" + input + "' |");
}

struct Samples : Scratch {
    std::string small; // flags of a run of a second
    void SetUp() override {
        Scratch::SetUp();
        small = "--layers 1 --heads 2 --channels 32 --seq 32 --micro-batch 4 --eval-tokens 256 "
                "--data " + put("text.txt", numbered_lines(3000, "")) + " ";
    }
};

// ----------------------------------------------------------------------------
// choices

// A prompt that is too long keeps its end, behind its first token if that begins texts, and leaves
// room for the wanted tokens, but for at most half of the positions.
TEST(SampleChoices, KeepTheEndOfAPrompt) {
    auto kept = [](size_t tokens, int bos, size_t positions, size_t wanted) {
        std::vector<int> prompt(tokens);
        for (size_t i = 0; i < tokens; i++) prompt[i] = int(i);
        shorten_prompt(&prompt, bos, positions, wanted);
        return prompt;
    };
    EXPECT_EQ(kept(7, -1, 8, 100).size(), 7u);
    EXPECT_EQ(kept(8, -1, 8, 2), (std::vector<int>{2, 3, 4, 5, 6, 7}));
    EXPECT_EQ(kept(20, -1, 8, 100), (std::vector<int>{16, 17, 18, 19})) << "half is the sample's";
    EXPECT_EQ(kept(20, 1, 8, 2), (std::vector<int>{1, 15, 16, 17, 18, 19}));
    EXPECT_EQ(kept(5, -1, 1, 10).size(), 1u);
}

// The line above a sample names its step, and its number if there are several.
TEST(SampleChoices, TitlesSayStepAndNumber) {
    EXPECT_EQ(sample_title(0, 0, 1), "");
    EXPECT_EQ(sample_title(200, 0, 1), "step 200 | sample\n");
    EXPECT_EQ(sample_title(200, 1, 3), "step 200 | sample 2 of 3\n");
    EXPECT_EQ(sample_title(0, 2, 3), "sample 3 of 3\n");
}

// Each sample of a step has random numbers of its own. The first one's stream is that of older
// versions, which had a single sample.
TEST(SampleChoices, EachSampleHasItsOwnNumbers) {
    Sampling how;
    how.step = 7;
    EXPECT_EQ(sample_stream(how), fnv1a("sample.7"));
    how.number = 2;
    EXPECT_EQ(sample_stream(how), fnv1a("sample.7.2"));
}

// The tokens that begin and end texts are read from a model's files, in every form that they take.
TEST_F(Samples, TheModelsFilesNameTheTokens) {
    auto tokens = [&](const std::string& json) {
        Tokenizer t;
        t.vocab_size = 10;
        EXPECT_EQ(read_special_tokens(&t, fs::path(put("config.json", json)).parent_path()), "");
        return t;
    };
    EXPECT_EQ(tokens(R"({"bos_token_id": 1, "eos_token_id": [2, 4]})").ends,
              (std::set<int>{2, 4}));
    EXPECT_EQ(tokens(R"({"bos_token_id": 1, "eos_token_id": 2})").bos_token, 1);
    EXPECT_EQ(tokens(R"({"bos_token_id": null, "eos_token_id": "x"})").bos_token, -1);
    EXPECT_TRUE(tokens(R"({"eos_token_id": [null, "x", 10]})").ends.empty());
}

// ----------------------------------------------------------------------------
// the program

// A sample ends with its text. The model is a Llama that was trained on stories; with --ignore-eos
// it begins another one.
TEST_F(Samples, EndWithTheText) {
    NEEDS_FIXTURES();

    // Sample with and without the end.
    std::string model = "--model " + FIXTURES + "/checkpoints/stories260K/";
    std::string words = " --tokenizer " + FIXTURES + "/tokenizers/tinystories512/tok512.bin";
    std::string flags = " --steps 0 --temperature 0 --sample-tokens 400";
    Ran whole = run_program(model + "hf" + words + flags);
    Ran further = run_program(model + "hf" + words + flags + " --ignore-eos");
    EXPECT_EQ(whole.status, 0) << whole.text;
    auto story = [](const Ran& r) {
        size_t from = r.text.find("---\n") + 4;
        return r.text.substr(from, r.text.find("\n---", from) - from);
    };
    EXPECT_EQ(story(further).rfind(story(whole), 0), 0u);
    EXPECT_GT(story(further).size(), story(whole).size() + 100);
    EXPECT_HAS(story(whole), "You are a good friend.\"") << "its last words";

    // Without a tokenizer the sample is printed as numbers. The first one begins texts.
    for (const char* file : {"hf", "stories260K.bin"}) {
        Ran numbers = run_program(model + file + flags);
        EXPECT_HAS(numbers.text, "---\n1 403 407 261 ") << file;
        EXPECT_EQ(story(numbers).find(" 2 "), std::string::npos) << file;
    }

    // A prompt that is too long is cut; a sample with too little room is shorter: notes say so.
    std::string long_one = "One";
    for (int i = 0; i < 300; i++) long_one += " day a dog";
    Ran cut = run_program(model + "hf" + words + flags + " --prompt '" + long_one + "'");
    EXPECT_EQ(cut.status, 0) << cut.text;
    EXPECT_HAS(cut.text, "tokens: samples continue its last 256\n");
    EXPECT_HAS(cut.text,
               "note: samples end at 513 tokens with their prompt: the model has no more");
}

// Samples end where a learned table of positions is no longer trained: at --seq, for new weights.
// Rotary positions have no such end.
TEST_F(Samples, EndWhereNoPositionIsTrained) {
    Ran r = run_program(small + "--steps 1 --sample-tokens 100");
    EXPECT_HAS(r.text, "note: samples end at 33 tokens with their prompt: --seq 32 trains no more");
    r = run_program(small + "--steps 1 --sample-tokens 100 --position rope");
    EXPECT_EQ(r.text.find("note: samples end"), std::string::npos) << r.text;
}

// --prompt - reads a prompt from each line of standard input, on one rank and on several.
TEST_F(Samples, PromptsComeFromAPipe) {
    ASSERT_EQ(run_program(small + "--steps 1 --out " + path("made")).status, 0);
    std::string model = "--model " + path("made") + " --steps 0 ";
    std::string flags = model + "--sample-tokens 4 --temperature 0 --prompt ";
    for (std::string layout : {"", " --local-ranks 2 --tp 2"}) {
        Ran r = run_program(flags + "- --samples 2" + layout, "line 1\\r\\n\\nab");
        EXPECT_EQ(r.status, 0) << r.text;
        EXPECT_HAS(r.text, "sample 1 of 4\n---\nline 1");
        EXPECT_HAS(r.text, "sample 4 of 4\n---\nab");

        // At temperature 0 both samples of a prompt are the same.
        size_t one = r.text.find("sample 1 of 4\n"), second = r.text.find("sample 2 of 4\n"),
               third = r.text.find("sample 3 of 4\n");
        ASSERT_NE(third, std::string::npos);
        EXPECT_EQ(r.text.substr(one + 14, second - one - 14),
                  r.text.substr(second + 14, third - second - 14));
    }
    EXPECT_HAS(run_program(flags + "-").text, "standard input has no line that holds text");

    // Sampled at random they differ.
    Ran drawn = run_program(model + "--sample-tokens 20 --samples 2");
    size_t one = drawn.text.find("sample 1 of 2\n"), second = drawn.text.find("sample 2 of 2\n");
    EXPECT_NE(drawn.text.substr(one + 14, 20), drawn.text.substr(second + 14, 20));
}

// New weights have as many tokens as a tokenizer that is given, unless --vocab says otherwise;
// without one they have the preset's.
TEST_F(Samples, TheVocabularyFollowsTheTokenizer) {
    NEEDS_FIXTURES();
    std::string words = " --tokenizer " + FIXTURES + "/tokenizers/gpt2 ";
    auto parameters = [&](const std::string& flags) {
        std::smatch m;
        std::string text = run_program(small + flags + " --explain").text;
        EXPECT_TRUE(std::regex_search(text, m, std::regex("parameters ([0-9]+)"))) << text;
        return m.empty() ? 0 : std::stol(m[1]);
    };
    EXPECT_EQ(parameters(words) - parameters(""), (50257 - 256) * 32);
    EXPECT_EQ(parameters(words + "--vocab 60000") - parameters(""), (60000 - 256) * 32);
    EXPECT_EQ(parameters("--model gpt2 --tokenizer byte") - parameters(""), 0);
    EXPECT_EQ(parameters("--model gpt2") - parameters(""), (50257 - 256) * 32);
}

// ----------------------------------------------------------------------------
// the end of a run

// The last lines of a run name what it did and the files it has written; a run that does not train
// has no such lines.
TEST_F(Samples, TheLastLinesSayWhatIsThere) {
    std::string out = path("out"), exported = path("hf");
    Ran r = run_program(small +
                        "--steps 6 --lr 0.01 --warmup 1 --eval-every 3 --sample-tokens 2 --out " +
                        out + " --export " + exported);
    std::regex end("\ndone: 6 steps, 768 tokens in \\d+s \\| best val loss [0-9.]+ at step 6\n"
                   "  checkpoint  .*/step_00000006\n  log         .*/log.jsonl\n"
                   "  export      .*/hf\n  time        \\d+s: [0-9.]+% [a-z]+, .*\n$");
    EXPECT_TRUE(std::regex_search(r.text, end)) << r.text;
    r = run_program(small + "--steps 0 --sample-tokens 2");
    EXPECT_EQ(r.text.find("done:"), std::string::npos) << r.text;
}
