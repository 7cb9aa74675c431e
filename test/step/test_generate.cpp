// test_generate.cpp - many texts at once: each has its tokens alone, in any slots and any layout
//   Runs $TRAIN_GPT (default build/train_gpt) where files and a terminal count.
#include "../../llmc/run/talk.h"
#include "../harness/testing.h"
#include "small_models.h"

using namespace llmc;

// ----------------------------------------------------------------------------
// texts in slots

constexpr size_t CACHE = 7, COUNT = 6;

// One prompt's sample.
struct Made {
    std::vector<int> tokens;
    Ended why = Ended::BY_STOP;
    bool operator==(const Made&) const = default;
};
typedef std::vector<Made> MadeTexts;

inline void PrintTo(const Made& m, std::ostream* out) {
    for (int token : m.tokens) *out << token << ' ';
    *out << "(" << int(m.why) << ")";
}

// Prompts of 1 to 5 tokens: some texts fill the cache, some have all their
// tokens, some meet the end.
static std::vector<std::vector<int>> some_prompts(const Shape& s) {
    std::vector<std::vector<int>> prompts;
    for (size_t p = 0; p < 4; p++) {
        prompts.emplace_back();
        for (size_t i = 0; i <= (p * 4) % 6; i++)
            prompts.back().push_back(int(random_block(3, fnv1a("prompt"), p * 8 + i)[0] % s.V));
    }
    return prompts;
}

// Two samples of each prompt, as rank 0 of a layout makes them.
template <typename T>
static MadeTexts make_texts(const Shape& s, size_t slots, const Layout& layout = {},
                            float temperature = 1) {
    std::vector<std::vector<int>> prompts = some_prompts(s);
    std::vector<Text> texts;
    for (size_t p = 0; p < prompts.size(); p++)
        for (size_t k = 0; k < 2; k++)
            texts.push_back({&prompts[p], fnv1a(concat("text.", p, ".", k))});
    Sampling how;
    how.temperature = temperature;
    for (int token = 0; token < int(s.V); token += 9) how.ends.insert(token);

    MadeTexts first(texts.size());
    auto body = [&](const Comm& world) {
        Plan p = small_plan(slots, 6, 1);
        p.mode = Mode::GENERATE, p.cache = CACHE;
        p.layout = layout_at(layout, world.rank);
        Fixture<T> f(s, {p});
        f.t.comms = make_comms(world, p.layout, ranks_of_kv_head(p.layout, f.t.model));
        MadeTexts made(texts.size());
        generate(
            f.t, 0, texts, COUNT, how,
            [&](int64_t i, int token) { made[i].tokens.push_back(token); },
            [&](int64_t i, Ended why) { made[i].why = why; });
        if (world.rank == 0) first = made;
    };
    EXPECT_EQ(run_local_ranks(layout.world(), {}, body), 0);
    return first;
}

TEST(Slots, EachTextIsWhatItIsAlone) {
    std::set<Ended> ways;
    for (const Shape& s : all_shapes()) {
        MadeTexts alone = make_texts<double>(s, 1);
        for (size_t slots : {3, 32}) EXPECT_EQ(make_texts<double>(s, slots), alone) << slots;

        for (const Made& m : alone) ways.insert(m.why);
    }

    // All ways to end occur; a float's rounding picks no other token.
    EXPECT_EQ(ways, (std::set<Ended>{Ended::BY_TOKEN, Ended::BY_COUNT, Ended::BY_CACHE}));
    EXPECT_EQ(make_texts<float>(small_gpt2(), 5), make_texts<float>(small_gpt2(), 1));
    EXPECT_EQ(make_texts<float>(small_gpt2(), 5, {}, 0), make_texts<float>(small_gpt2(), 1, {}, 0));
}

TEST(Slots, EveryLayoutMakesTheSameTexts) {
    auto with = [](Layout layout, int zero, bool rows = false) {
        layout.zero = zero;
        layout.sequence_parallel = rows;
        return layout;
    };
    Layout stages = small_layout(1, 1, 2);
    stages.first_layer = {0, 2, 4};
    for (const Shape& s :
         {gpt2_shape(2, 2, 16, 61, 32), llama_shape(2, 4, 2, 16, 24, 53, 64, 10000)}) {
        MadeTexts alone = make_texts<double>(s, 4);
        EXPECT_EQ(make_texts<double>(s, 4, small_layout(1, 2)), alone) << "tp";
        EXPECT_EQ(make_texts<double>(s, 4, with(small_layout(1, 2), 0, true)), alone) << "sp";
        EXPECT_EQ(make_texts<double>(s, 4, with(small_layout(2), 3)), alone) << "zero 3";
        EXPECT_EQ(make_texts<double>(s, 4, small_layout(1, 1, 1, 2)), alone) << "cp";
        EXPECT_EQ(make_texts<double>(s, 4, stages), alone) << "pp";
        Layout all = stages;
        all.tp.size = all.dp.size = 2;
        EXPECT_EQ(make_texts<double>(s, 4, with(all, 3)), alone) << "all";
    }
    Layout experts = small_layout(2);
    experts.ep = 2;
    EXPECT_EQ(make_texts<double>(small_mixtral(), 4, experts),
              make_texts<double>(small_mixtral(), 4))
        << "ep";
}

// A prompt is read once for its samples: two prompts with three samples each take two runs of rows,
// and each token but the first of each text one more.
TEST(Slots, APromptIsReadOnce) {
    Shape s = small_gpt2();
    Plan p = small_plan(3, 6, 1);
    p.mode = Mode::GENERATE, p.cache = 9;
    Fixture<double> f(s, {p});
    std::vector<std::vector<int>> prompts = {{1, 2, 3, 4}, {5, 6, 7, 8}};
    std::vector<Text> texts;
    for (uint64_t i = 0; i < 6; i++) texts.push_back({&prompts[i / 3], i});
    size_t rows = 0, runs = 0;
    f.t.after = [&](const Action& a) {
        if (a.op == Op::F && a.layer == 0) rows += f.t.ctx.batch.rows(), runs++;
    };
    generate(f.t, 0, texts, 5, {}, [](int64_t, int) {}, [](int64_t, Ended) {});
    EXPECT_EQ(rows, 2 * 4 + 6 * 4u);
    EXPECT_EQ(runs, 2 + 2 * 4u);
}

// A slot does not read again what its cache has, and the text stays the same.
TEST(Slots, AConversationGoesOnWhereItsCacheEnds) {
    for (const Shape& s : {small_gpt2(), small_llama()}) {
        Plan p = small_plan(1, 9, 1);
        p.mode = Mode::GENERATE, p.cache = 14;
        Fixture<double> f(s, {p});
        size_t rows = 0;
        f.t.after = [&](const Action& a) { rows += a.layer == 0 ? f.t.ctx.batch.rows() : 0; };
        auto made = [&](const std::vector<int>& prompt, size_t cached, Ended* why = nullptr) {
            std::vector<int> tokens;
            generate(
                f.t, 0, {{&prompt, 1, cached}}, 3, {},
                [&](int64_t, int token) { tokens.push_back(token); },
                [&](int64_t, Ended ended) {
                    if (why) *why = ended;
                });
            return tokens;
        };
        std::vector<int> first = {1, 2, 3, 4}, answer = made(first, 0), second = first;
        second.insert(second.end(), answer.begin(), answer.end());
        second.insert(second.end(), {5, 6});
        rows = 0;
        std::vector<int> on = made(second, 6);
        EXPECT_EQ(rows, 3 + 2u);
        EXPECT_EQ(on, made(second, 0));
    }
}

// A wish to stop is heard before each run.
TEST(Slots, AWishToStopEndsAllTexts) {
    Plan p = small_plan(2, 4, 1);
    p.mode = Mode::GENERATE, p.cache = 12;
    Fixture<double> f(small_gpt2(), {p});
    std::vector<int> prompt = {1, 2};
    Sampling how;
    int asked = 0, stopped = 0, tokens = 0;
    how.stops = [&] { return ++asked == 3; };
    generate(f.t, 0, {{&prompt, 1}, {&prompt, 2}}, 9, how, [&](int64_t, int) { tokens++; },
             [&](int64_t, Ended why) { stopped += why == Ended::BY_STOP; });
    EXPECT_EQ(tokens, 2 * 3);
    EXPECT_EQ(stopped, 2);
}

// A text of NaN leaves nothing to the next one in its slot, or beside it.
TEST(Slots, WhatASlotHeldBeforeIsNotSeen) {
    Shape s = small_llama();
    Plan p = small_plan(2, 6, 1);
    p.mode = Mode::GENERATE, p.cache = CACHE;
    auto greedy = [&](double dirt) {
        Fixture<double> f(s, {p});
        f.t.plan = f.t.at = 0;
        for (int l = 0; l < f.t.model.layers(); l++)
            if (double* cache = address<double>(f.t, {Kind::CACHE, l}))
                std::fill_n(cache, 2 * CACHE * 2 * s.NKV * s.HS, dirt);
        std::vector<int> one = {1}, two = {2, 3, 4, 5, 6}, tokens;
        generate(
            f.t, 0, {{&one, 1}, {&two, 2}}, 3, {},
            [&](int64_t, int token) { tokens.push_back(token); }, [](int64_t, Ended) {});
        return tokens;
    };
    EXPECT_EQ(greedy(NAN), greedy(0));
}

// ----------------------------------------------------------------------------
// the program

struct Prompts : Scratch {
    std::string small; // flags of a run of a second
    void SetUp() override {
        Scratch::SetUp();
        std::string text;
        for (int i = 0; i < 300; i++) text += "line " + std::to_string(i * 7919 % 1000) + "\n";
        small = " --layers 1 --heads 2 --channels 32 --seq 32 --steps 0 --sample-tokens 6 --data " +
                put("text.txt", text) + " ";
    }
    // Completions alone: what else is said goes to standard error.
    std::string completions(const std::string& flags) {
        Ran r = shell(program() + small + flags + " 2>" + path("said"));
        EXPECT_EQ(r.status, 0) << read_file(path("said"));
        return r.text;
    }
};

TEST_F(Prompts, CompletionsAreTheSameInEverySlotAndLayout) {
    std::string file = "--prompts " + put("p.jsonl",
                                          "{\"prompt\": \"line 1\", \"id\": 7}\n\n"
                                          "{\"prompt\": \"ab\xc3\xa9\"}\r\n{\"prompt\": \"of\"}\n");
    std::string made = completions(file + " --samples 2");
    EXPECT_HAS(made, "{\"prompt\":\"line 1\",\"id\":7,\"sample\":0,\"completion\":\"");
    EXPECT_HAS(made, "{\"prompt\":\"ab\xc3\xa9\",\"sample\":1,\"completion\":\"");
    EXPECT_HAS(made, "\"tokens\":6,\"end\":\"length\"}\n");
    EXPECT_EQ(std::count(made.begin(), made.end(), '\n'), 6);
    for (const char* flags : {"--slots 1", "--slots 4", "--local-ranks 2 --tp 2",
                              "--local-ranks 2 --pp 2", "--local-ranks 2 --zero 3"})
        EXPECT_EQ(completions(file + " --samples 2 " + flags), made) << flags;

    // A third sample changes nothing of the first two; a file gets what standard output got.
    std::string more = completions(file + " --samples 3"), into = path("made.jsonl");
    EXPECT_EQ(more.substr(0, more.find("\"sample\":2"))
                  .find(made.substr(0, made.find("\"id\":7,\"sample\":1"))),
              0u);
    EXPECT_HAS(more, made.substr(made.find("{\"prompt\":\"of\"")).substr(0, 60));
    EXPECT_HAS(completions(file + " --samples 2 --completions " + into),
               "6 completions, 36 tokens, ");
    EXPECT_EQ(read_file(into), made);
    EXPECT_HAS(completions("--prompts " + put("p.txt", "line 1\n\nof\n")),
               "{\"prompt\":\"of\",\"sample\":0,");
}

// One line for each fault, before anything is lost.
TEST_F(Prompts, BadOnesAreNamedByTheirLine) {
    auto refused = [&](const std::string& text) {
        Ran r = shell(program() + small + "--prompts " + put("p.jsonl", text) + " 2>&1");
        EXPECT_EQ(r.status, 1);
        EXPECT_EQ(std::count(r.text.begin(), r.text.end(), '\n'), 1) << r.text;
        return r.text;
    };
    EXPECT_HAS(refused("{\"prompt\": \"a\"}\n{\"prompt\":\n"),
               "p.jsonl:2: is no JSON object, or cut short\n");
    EXPECT_HAS(refused("[1]"), "p.jsonl:1: is no JSON object");
    EXPECT_HAS(refused("{\"text\": \"a\"}"), "p.jsonl:1: has no \"prompt\" that is a text\n");
    EXPECT_HAS(refused("\n{\"prompt\": \"\"}"), "p.jsonl:2: its prompt is empty\n");
    EXPECT_HAS(refused(""), "p.jsonl: holds no prompt\n");
    EXPECT_HAS(refused("{\"prompt\": \"" + std::string(33, 'a') + "\"}"),
               "p.jsonl:1: its prompt has 33 tokens, 1 more than the 32 positions\n");

    // Completions that are there stay; slots that do not fit say how many do.
    std::string one = put("p.jsonl", "{\"prompt\": \"a\"}\n"), into = put("made.jsonl", "{}\n");
    Ran r = shell(program() + small + "--prompts " + one + " --completions " + into);
    EXPECT_HAS(r.text, "made.jsonl is there, and would be lost: ");
    EXPECT_EQ(read_file(into), "{}\n");
    std::string many = small + "--prompts " + one + " --samples 65536 --slots 65536 ";
    EXPECT_HAS(shell(program() + many + "--memory 0.01").text, "these flags fit: --slots ");
    EXPECT_HAS(shell(program() + many + "--explain").text, "key/value cache");
}

// ----------------------------------------------------------------------------
// a talk

// Characters come whole, however their bytes arrive; what is none, or a terminal's order, is
// U+FFFD.
TEST(Talks, CharactersAreWhole) {
    auto shown = [](const std::string& bytes, size_t piece) {
        std::string waits, text;
        for (size_t at = 0; at < bytes.size(); at += piece) {
            waits += bytes.substr(at, piece);
            std::string come = take_characters(&waits, false);
            for (size_t i = 0; i < come.size(); i += utf8_length(come.substr(i)))
                if (utf8_length(come.substr(i)) == 0) return std::string("half a character");
            text += come;
        }
        return text + take_characters(&waits, true);
    };
    const std::string none = "\xef\xbf\xbd", good = "a\xc3\xa9\n\xe2\x82\xac\xf0\x9f\x98\x80z";
    for (size_t piece : {1, 2, 3, 99}) {
        EXPECT_EQ(shown(good, piece), good);
        EXPECT_EQ(shown("\xe2\x82" "a", piece), none + none + "a");
        EXPECT_EQ(shown("\xff\xc0\xed\xa0\x80\xf0\x9f", piece),
                  none + none + none + none + none + none + none);
        EXPECT_EQ(shown("\x1b[2J\t\x7f", piece), none + "[2J\t" + none);
    }
}

// Ctrl-C ends the wait for a question.
TEST(Talks, AnInterruptEndsTheWait) {
    std::string line;
    note_interrupt(SIGINT);
    EXPECT_FALSE(read_question(&line));
    interrupts = 0;
}

TEST_F(Prompts, ATalkRunsThroughAPipe) {
    std::string flags = small + "--chat --seq 64 --temperature 0.5 ";
    auto talk = [&](const std::string& lines, const std::string& more = "") {
        return shell("printf '" + lines + "' | " + program() + flags + more);
    };
    Ran r = talk("hi\\nyou\\n");
    EXPECT_EQ(r.status, 0) << r.text;
    EXPECT_HAS(r.text, "chat format: plain\n");
    for (size_t i = 0, n; i < r.text.size(); i += n)
        ASSERT_GT(n = utf8_length(r.text.substr(i)), 0u);
    EXPECT_EQ(talk("hi\\nyou", "--local-ranks 2 --tp 2").status, 0);

    // /reset forgets: the second answer is that of a first question with the second's numbers.
    EXPECT_HAS(talk("hi\\n/reset\\nyou\\n/quit\\nno\\n").text, "\n(forgotten)\n");
    EXPECT_EQ(talk("\\n/quit\\nno\\n").text.find("answer stops "), std::string::npos)
        << "nothing was asked";

    // Turns that have no room are named, and the talk goes on.
    std::string cut = talk("hi\\nhello there\\nand so on\\n").text;
    EXPECT_HAS(cut, "note: the talk is longer than the model's 64 positions: its first ");
    std::string longer = talk(std::string(60, 'a') + "\\nhi\\n").text;
    EXPECT_HAS(longer,
               " more than the model's 64 positions have room for, with 6 for an answer: ask a "
               "shorter one\n");
    EXPECT_HAS(longer, "note: the answer stops at --sample-tokens\n");
}
