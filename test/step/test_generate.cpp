// test_generate.cpp - many texts at once: each has its tokens alone, in any slots and any layout
//   Runs $TRAIN_GPT (default build/train_gpt) where files and a terminal count.
#include <mutex>
#include "../../llmc/tune/prompt_tuning.h"
#include "../../llmc/run/sample.h"
#include "../harness/runs.h"
#include "small_models.h"
#include <regex>
#include <span>

using namespace llmc;

// ----------------------------------------------------------------------------
// texts in slots

constexpr size_t CACHE = 7, COUNT = 6; // positions of a slot; tokens of a text, at most

// One text: its tokens, and why it ended.
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

static Plan generating(size_t slots, size_t T, size_t cache, size_t scored = 1) {
    Plan p = small_plan(slots, T, 1);
    p.mode = Mode::GENERATE, p.cache = cache, p.scored = scored;
    return p;
}

// The texts that a trainer makes with a plan.
template <typename T>
static MadeTexts generated(Trainer<T, Cpu>& t, int plan, const std::vector<Text>& texts,
                           size_t count, const Sampling& how = {}) {
    MadeTexts made(texts.size());
    generate(
        t, plan, texts, count, how,
        [&](int64_t i, int token) { made[size_t(i)].tokens.push_back(token); },
        [&](int64_t i, Ended why) { made[size_t(i)].why = why; });
    return made;
}

// The texts that rank 0 of a layout makes with a model that prepare() has changed.
template <typename T, typename F>
static MadeTexts generated_in(const Layout& layout, const Shape& s, size_t slots,
                              const std::vector<Text>& texts, const Sampling& how, F prepare) {
    MadeTexts first;
    auto body = [&](const Comm& world) {
        Plan p = generating(slots, 6, CACHE);
        p.layout = layout_at(layout, world.rank);
        Fixture<T> f(s, {p});
        prepare(f);
        f.t.comms = make_comms(world, p.layout, ranks_of_kv_head(p.layout, f.t.model));
        MadeTexts made = generated(f.t, 0, texts, COUNT, how);
        if (world.rank == 0) first = made;
    };
    EXPECT_EQ(run_local_ranks(layout.world(), {}, body), 0);
    return first;
}

// Prompts of 1 to 5 tokens. Of their texts, some fill the cache, some reach the wanted number of
// tokens, and some draw a token that ends them.
static std::vector<std::vector<int>> some_prompts(const Shape& s) {
    std::vector<std::vector<int>> prompts;
    for (size_t p = 0; p < 4; p++) {
        prompts.emplace_back();
        for (size_t i = 0; i <= (p * 4) % 6; i++)
            prompts.back().push_back(int(random_block(3, fnv1a("prompt"), p * 8 + i)[0] % s.V));
    }
    return prompts;
}

// Two samples of each prompt, as rank 0 of a layout makes them. The second sample of a prompt follows
// the first; `apart`: those of all prompts follow, and neighbours have prompts of other lengths.
template <typename T>
static MadeTexts make_texts(const Shape& s, size_t slots, const Layout& layout = {},
                            float temperature = 1, bool apart = false) {
    // List the texts. Every ninth token ends one.
    std::vector<std::vector<int>> prompts = some_prompts(s);
    std::vector<Text> texts;
    size_t count = prompts.size();
    for (size_t i = 0; i < 2 * count; i++) {
        size_t p = apart ? i % count : i / 2;
        size_t k = apart ? i / count : i % 2;
        texts.push_back({&prompts[p], fnv1a(concat("text.", p, ".", k))});
    }
    Sampling how;
    how.temperature = temperature;
    for (int token = 0; token < int(s.V); token += 9) how.ends.insert(token);
    return generated_in<T>(layout, s, slots, texts, how, [](auto&) {});
}

// A text is the same whether it is generated alone or beside others, in any number of slots.
TEST(Slots, EachTextIsWhatItIsAlone) {
    std::set<Ended> ways;
    for (const Shape& s : all_shapes()) {
        MadeTexts alone = make_texts<double>(s, 1);
        for (size_t slots : {3, 32}) EXPECT_EQ(make_texts<double>(s, slots), alone) << slots;

        // Prompts that are read together are padded to the longest.
        EXPECT_EQ(make_texts<double>(s, 5, {}, 1, true), make_texts<double>(s, 1, {}, 1, true));

        for (const Made& m : alone) ways.insert(m.why);
    }

    // All three ways to end have occurred. In float, too, rounding changes no token.
    EXPECT_EQ(ways, (std::set<Ended>{Ended::BY_TOKEN, Ended::BY_COUNT, Ended::BY_CACHE}));
    EXPECT_EQ(make_texts<float>(small_gpt2(), 5), make_texts<float>(small_gpt2(), 1));
    EXPECT_EQ(make_texts<float>(small_gpt2(), 5, {}, 0), make_texts<float>(small_gpt2(), 1, {}, 0));
}

// Behind a prefix and without one, and with a window, tokens that are generated one by one through
// the cache are those that evaluation of the whole text finds likeliest, and any number of slots
// makes the same texts.
TEST(Slots, APrefixIsBeforeEveryText) {
    Shape windows = small_llama(true, true), gpt2 = small_gpt2();
    windows.attention.window = 3;
    gpt2.tuned.prefix = 3;
    std::vector<Shape> shapes = {gpt2, windows};
    windows.tuned.prefix = 3;
    shapes.push_back(windows);
    for (const Shape& s : shapes) {
        EXPECT_EQ(make_texts<double>(s, 3), make_texts<double>(s, 1));

        // Continue a prompt greedily.
        const size_t asked = 3, T = 8;
        std::vector<int> text = {5, 17, 2};
        Plan generates = generating(1, 6, T), evaluates = small_plan(s.V, T, 1);
        evaluates.mode = Mode::EVALUATE;
        Fixture<double> f(s, {evaluates, generates});
        Sampling how;
        how.temperature = 0;
        std::vector<int> prompt = text;
        std::vector<int> made = generated(f.t, 1, {{&prompt, 1}}, T - asked, how)[0].tokens;
        text.insert(text.end(), made.begin(), made.end());
        ASSERT_EQ(text.size(), T);

        // Ask for the loss of every token of the vocabulary at every place.
        f.t.data.window = [&](uint64_t sample, int* tokens, int* targets) {
            std::copy(text.begin(), text.end(), tokens);
            std::fill_n(targets, T, int(sample));
            return std::string();
        };
        f.t.data.cursor = 0;
        run_plan(f.t, 0);
        const double* losses = row_losses(f.t, 0).losses; // (V,T)
        for (size_t i = asked; i < T; i++)
            for (size_t v = 0; v < s.V; v++)
                EXPECT_LE(losses[size_t(text[i]) * T + i - 1], losses[v * T + i - 1]) << i;
    }
}

// A prompt whose rows are tokens' own embeddings is these tokens: behind the prefix that is made of it
// a text has the losses that it has behind the tokens.
static void expect_prompt_as_prefix(const Shape& base, const Layout& layout) {
    const std::vector<int> asked = {5, 17, 2};
    const size_t n = asked.size(), T = 6;
    auto body = [&](const Comm& world) {
        // Make the base, and a model that has a prefix.
        Plan whole = small_plan(2, n + T, 1), behind = small_plan(2, T, 1);
        whole.mode = behind.mode = Mode::EVALUATE;
        whole.layout = behind.layout = layout_at(layout, world.rank);
        Plan prompt = small_plan(layout.sequence_parallel ? 2 : 1, n, 1);
        prompt.mode = Mode::EVALUATE, prompt.layout = behind.layout;
        Shape prefixed = base;
        prefixed.tuned.prefix = n;
        Fixture<double> tokens(base, {whole}), prefix(prefixed, {behind, prompt});
        for (Fixture<double>* f : {&tokens, &prefix})
            f->t.comms = make_comms(world, behind.layout, ranks_of_kv_head(behind.layout, f->t.model));

        // The rows of the prompt are those of the tokens.
        std::vector<float> table = get_weight(tokens.t, tokens.t.model.parameters[0]), rows;
        for (int token : asked)
            rows.insert(rows.end(), &table[size_t(token) * base.C], &table[size_t(token + 1) * base.C]);
        make_prefix(prefix.t, 1, rows);

        // Evaluate the same texts.
        Window text = random_window(base, T);
        prefix.t.data.window = text;
        tokens.t.data.window = [&](uint64_t sample, int* to, int* targets) {
            std::copy(asked.begin(), asked.end(), to);
            std::fill_n(targets, n, -1);
            return text(sample, to + n, targets + n);
        };
        run_plan(tokens.t, 0), run_plan(prefix.t, 0);
        Loss want = plan_loss(tokens.t), got = plan_loss(prefix.t);
        EXPECT_EQ(got.valid, want.valid);
        EXPECT_NEAR(got.sum, want.sum, 1e-6) << base.hf_type; // rows come as floats
        EXPECT_GT(want.sum, 1);
    };
    EXPECT_EQ(run_local_ranks(layout.world(), {.timeout_s = 20}, body), 0);
}

TEST(Slots, APromptIsReadAsAPrefix) {
    Shape scaled = small_llama(true, true), oss = small_oss();
    scaled.embedding.scaled = true;
    oss.attention.window = 0; // what lies before the text is behind no window
    for (const Shape& s : {small_gpt2(), scaled, small_qwen3(), small_mixtral(), oss})
        expect_prompt_as_prefix(s, {});

    // Ranks that share key heads, rows, stages and shards.
    Layout rows = small_layout(1, 2), shards = small_layout(2);
    rows.sequence_parallel = true, shards.zero = 3;
    Layout stages = small_layout(1, 1, 2);
    stages.first_layer = {0, 2, 5};
    for (const Layout& layout : {rows, small_layout(1, 4), shards, stages})
        expect_prompt_as_prefix(small_llama(), layout);
    expect_prompt_as_prefix(small_gpt2(), stages);
}

// Every layout generates the texts of one rank.
TEST(Slots, EveryLayoutMakesTheSameTexts) {
    // Each axis alone, then tp, pp, dp and ZeRO together.
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
        EXPECT_EQ(make_texts<double>(s, 4, with(all, 3), 1, true),
                  make_texts<double>(s, 4, {}, 1, true));
    }

    // Sinks are cut with their heads, and one rank adds the biases of experts' outputs.
    MadeTexts oss = make_texts<double>(small_oss(), 4);
    EXPECT_EQ(make_texts<double>(small_oss(), 4, with(small_layout(1, 2), 0, true)), oss);
    EXPECT_EQ(make_texts<double>(small_oss(), 4, with(small_layout(2, 2), 3)), oss);

    // Expert parallelism.
    Layout experts = small_layout(2);
    experts.ep = 2;
    EXPECT_EQ(make_texts<double>(small_mixtral(), 4, experts),
              make_texts<double>(small_mixtral(), 4))
        << "ep";

    // Whole experts beside tensor parallelism: then every rank has all rows.
    Layout whole = small_layout(2, 2);
    whole.experts.whole = whole.sequence_parallel = true, whole.zero = 3;
    for (int ep : {1, 2}) {
        whole.ep = ep;
        for (const Shape& s : {small_mixtral(), small_shared()})
            EXPECT_EQ(make_texts<double>(s, 4, whole), make_texts<double>(s, 4)) << "etp 1, ep " << ep;
    }
}

// Two sets of adapters beside a shape: of rank 2 beside all matrices, of rank 3 beside attention's.
static AdapterSets two_sets(const Shape& s) {
    return {{"wide", *with_lora(s, 2).tuned.adapters},
            {"high", *with_lora(s, 3, "attention", true).tuned.adapters}};
}

// Draw the weights of adapters by their names, which begin with `prefix` in a model of one set.
template <typename T> static void draw_adapters(Fixture<T>& f, const std::string& prefix) {
    for (const Parameter& p : f.t.model.parameters) {
        if (!is_adapter(f.t.model, p)) continue;
        std::vector<double> v(p.elements());
        for (size_t i = 0; i < v.size(); i++)
            v[i] = float(uniform(1, fnv1a(prefix + p.name), i) - 0.5);
        set_weight(f.t, p, v.data());
    }
}

// The set of each text: -1 is the base alone. Neighbours differ, or are the same.
constexpr int CHOSEN[] = {-1, 0, 1, 1, 0, -1, 0, 0, 1};

// Texts that choose a set each. only >= -1: the model has that set alone, as --adapter has it, or
// none, and only its texts are made.
template <typename T>
static MadeTexts adapted_texts(const Shape& base, size_t slots, const Layout& layout = {},
                               int only = -2) {
    // Give the shape its adapters.
    Shape s = base;
    AdapterSets sets = two_sets(base);
    if (only == -2) s.tuned.sets = std::make_shared<const AdapterSets>(sets);
    if (only >= 0) s.tuned.adapters = std::make_shared<const Adapters>(sets[size_t(only)].adapters);

    // List the texts. Those of other sets are left out where there is one set.
    std::vector<std::vector<int>> prompts = some_prompts(s);
    std::vector<Text> texts;
    for (size_t i = 0; i < std::size(CHOSEN); i++) {
        int set = CHOSEN[i];
        if (only != -2 && only != set) continue;
        texts.push_back({&prompts[i % prompts.size()], fnv1a(concat("text.", i))});
        if (only == -2) texts.back().adapter = set;
    }
    return generated_in<T>(layout, s, slots, texts, {}, [&](Fixture<T>& f) {
        draw_adapters(f, only >= 0 ? sets[size_t(only)].name + ":" : "");
    });
}

// The texts of each set alone, one at a time, in the order of all texts.
template <typename T> static MadeTexts texts_set_by_set(const Shape& s) {
    std::map<int, MadeTexts> each;
    for (int set : {-1, 0, 1}) each[set] = adapted_texts<T>(s, 1, {}, set);
    std::map<int, size_t> next;
    MadeTexts all;
    for (int set : CHOSEN)
        all.push_back(each[set][next[set]++]);
    return all;
}

// Texts with different adapters, in one batch, are what each is alone beside its adapter, in any
// number of slots and every layout.
TEST(Slots, EachTextHasItsOwnAdapter) {
    for (const Shape& s : {gpt2_shape(2, 2, 16, 61, 32),
                           llama_shape(2, 4, 2, 16, 24, 53, 64, 10000), small_mla(),
                           small_mixtral()}) {
        MadeTexts alone = texts_set_by_set<double>(s);
        for (size_t slots : {1, 3, 9}) EXPECT_EQ(adapted_texts<double>(s, slots), alone) << slots;
        EXPECT_EQ(adapted_texts<float>(s, 4), texts_set_by_set<float>(s));

        Layout shards = small_layout(2), stages = small_layout(1, 2, 2);
        shards.zero = 3;
        stages.first_layer = {0, 2, int(s.L) + 2};
        EXPECT_EQ(adapted_texts<double>(s, 4, small_layout(1, 2)), alone) << "tp";
        EXPECT_EQ(adapted_texts<double>(s, 4, shards), alone) << "zero 3";
        EXPECT_EQ(adapted_texts<double>(s, 4, stages), alone) << "tp, pp";

        // The adapters matter: without them most texts are others.
        EXPECT_NE(adapted_texts<double>(s, 1, {}, 0), adapted_texts<double>(s, 1, {}, 1));
    }
}

// Each place along dp may have texts of its own, of other lengths and in other numbers; under
// ZeRO-3 it still gathers shards in the runs of all. Here the places take 1, 5 and 2 of 8 texts.
void expect_texts_of_places(Layout layout) {
    Shape s = gpt2_shape(2, 2, 16, 61, 32);
    MadeTexts alone = make_texts<double>(s, 4);
    std::vector<std::vector<int>> prompts = some_prompts(s);
    layout.zero = 3;
    const size_t begin[] = {0, 1, 6, 8};
    MadeTexts all(8);
    std::mutex one_at_a_time;
    auto body = [&](const Comm& world) {
        Plan p = generating(3, 6, CACHE);
        p.layout = layout_at(layout, world.rank);
        Fixture<double> f(s, {p});
        f.t.comms = make_comms(world, p.layout, ranks_of_kv_head(p.layout, f.t.model));

        // Generate this place's share, with the streams of make_texts().
        Sampling how;
        how.own_texts = true;
        for (int token = 0; token < int(s.V); token += 9) how.ends.insert(token);
        size_t first = begin[p.layout.dp.rank], past = begin[p.layout.dp.rank + 1];
        std::vector<Text> texts;
        for (size_t i = first; i < past; i++)
            texts.push_back({&prompts[i / 2], fnv1a(concat("text.", i / 2, ".", i % 2))});
        MadeTexts made = generated(f.t, 0, texts, COUNT, how);
        std::lock_guard lock(one_at_a_time);
        for (size_t i = first; i < past; i++) {
            if (!all[i].tokens.empty()) {
                EXPECT_EQ(all[i], made[i - first]) << "ranks of one place";
            }
            all[i] = made[i - first];
        }
    };
    EXPECT_EQ(run_local_ranks(layout.world(), {.timeout_s = 20}, body), 0);
    EXPECT_EQ(all, alone);
}

TEST(Slots, PlacesAlongDpHaveTextsOfTheirOwn) {
    expect_texts_of_places(small_layout(3, 2));

    // The last stage's first rank has another number in the world than among its place's ranks.
    Layout stages = small_layout(3, 1, 2);
    stages.order = layout_order("dp-tp-pp");
    stages.first_layer = {0, 2, 4};
    expect_texts_of_places(stages);
}

// A wish to stop on one rank ends all texts of all places, also where a place has no text left.
TEST(Slots, AWishOfOnePlaceEndsAllTexts) {
    Shape s = gpt2_shape(2, 2, 16, 61, 32);
    std::vector<int> prompt = {1, 7, 3};
    std::mutex one_at_a_time;
    size_t ended = 0;
    auto body = [&](const Comm& world) {
        Plan p = generating(2, 3, 20);
        p.layout = layout_at(small_layout(3), world.rank);
        Fixture<double> f(s, {p});
        f.t.comms = make_comms(world, p.layout);

        // The third place has no text, and wishes to stop when the others have run four times.
        Sampling how;
        how.own_texts = true;
        int asked = 0;
        how.stops = [&] { return world.rank == 2 && ++asked > 4; };
        std::vector<Text> texts(world.rank == 2 ? 0 : 3, {&prompt, 1});
        MadeTexts made = generated(f.t, 0, texts, 12, how);
        std::lock_guard lock(one_at_a_time);
        for (const Made& m : made) {
            bool begun = !m.tokens.empty();
            ended += begun && m.why == Ended::BY_STOP;
            EXPECT_LT(m.tokens.size(), 6u);
        }
    };
    EXPECT_EQ(run_local_ranks(3, {.timeout_s = 20}, body), 0);
    EXPECT_EQ(ended, 4u); // two slots of two places
}

// One rank chooses. Data-parallel ranks may round a logit to other bits, and would then go on with
// other texts. Here they differ by more: the second rank's token table is another, and its own
// choices are others, yet it hears those of the first.
TEST(Slots, RanksWhoseLogitsDifferHearOneOfThem) {
    Shape s = gpt2_shape(2, 2, 16, 61, 32);
    std::vector<int> prompt = {1, 7, 3};
    auto made_by = [&](Fixture<double>& f, bool other) {
        for (double& w : std::span(f.weight(f.t.model.parameters[0]), other ? s.V * s.C : 0))
            w = -8 * w;
        return generated(f.t, 0, {{&prompt, 1}}, 4)[0].tokens;
    };
    Plan p = generating(1, 3, CACHE);
    Fixture<double> first(s, {p}), second(s, {p});
    std::vector<int> expected = made_by(first, false);
    EXPECT_NE(made_by(second, true), expected) << "it has a mind of its own";

    auto body = [&](const Comm& world) {
        Plan of_rank = p;
        of_rank.layout = layout_at(small_layout(2), world.rank);
        Fixture<double> f(s, {of_rank});
        f.t.comms = make_comms(world, of_rank.layout);
        EXPECT_EQ(made_by(f, world.rank == 1), expected) << world.rank;
    };
    EXPECT_EQ(run_local_ranks(2, {.timeout_s = 20}, body), 0);
}

// A prompt is read once for all its samples. Two prompts of four tokens with three samples
// each take two runs of four rows; each token but a text's first takes one row more, in runs
// of three slots.
TEST(Slots, APromptIsReadOnce) {
    Shape s = small_gpt2();
    Fixture<double> f(s, {generating(3, 6, 9)});
    std::vector<std::vector<int>> prompts = {{1, 2, 3, 4}, {5, 6, 7, 8}};
    std::vector<Text> texts;
    for (uint64_t i = 0; i < 6; i++) texts.push_back({&prompts[i / 3], i});

    // Count runs and their rows.
    size_t rows = 0, runs = 0;
    f.t.hooks.after = [&](const Action& a) {
        if (a.op == Op::F && a.layer == 0) rows += f.t.ctx.batch.rows(), runs++;
    };
    generated(f.t, 0, texts, 5);
    EXPECT_EQ(rows, 2 * 4 + 6 * 4u);
    EXPECT_EQ(runs, 2 + 2 * 4u);
}

// Prompts of adjacent slots are read together as far as the rows of the plan go: two of 128 tokens
// fill them, and of three with 86 the third waits.
TEST(Slots, PromptsAreReadTogether) {
    Shape s = gpt2_shape(1, 2, 16, 61, 130);
    Plan p = generating(4, 128, 130);
    ASSERT_EQ(p.rows(), PROMPT_ROWS);
    Fixture<double> f(s, {p});
    std::vector<size_t> read;
    f.t.hooks.after = [&](const Action& a) {
        if (a.op == Op::F && a.layer == 0) read.push_back(f.t.ctx.batch.B);
    };

    // The sequences of each run that reads prompts of these lengths, one token to each.
    auto together = [&](const std::vector<size_t>& lengths) {
        std::vector<std::vector<int>> prompts;
        std::vector<Text> texts;
        for (size_t n : lengths) prompts.emplace_back(n, 1);
        for (const auto& prompt : prompts) texts.push_back({&prompt, 1});
        read.clear();
        generated(f.t, 0, texts, 1);
        return read;
    };
    typedef std::vector<size_t> Runs;
    EXPECT_EQ(together({128, 128, 3, 4}), (Runs{2, 2}));
    EXPECT_EQ(together({86, 85, 1, 7}), (Runs{2, 2}));
    EXPECT_EQ(together({85, 1, 85, 2}), (Runs{3, 1}));
    EXPECT_EQ(together({1, 2, 64, 3}), (Runs{4}));
}

// A conversation goes on without reading again what the cache holds, and its text is the same as if
// everything were read.
TEST(Slots, AConversationGoesOnWhereItsCacheEnds) {
    for (const Shape& s : {small_gpt2(), small_llama(), small_mla()}) {
        Fixture<double> f(s, {generating(1, 9, 14)});
        size_t rows = 0;
        f.t.hooks.after = [&](const Action& a) { rows += a.layer == 0 ? f.t.ctx.batch.rows() : 0; };

        // Generate three tokens behind a prompt, of which the cache holds the first `cached`.
        auto made = [&](const std::vector<int>& prompt, size_t cached) {
            return generated(f.t, 0, {{&prompt, 1, cached}}, 3)[0].tokens;
        };

        // Go on behind a first answer. Its last token was picked, but not read.
        std::vector<int> first = {1, 2, 3, 4}, answer = made(first, 0), second = first;
        second.insert(second.end(), answer.begin(), answer.end());
        second.insert(second.end(), {5, 6});
        rows = 0;
        std::vector<int> on = made(second, 6);
        EXPECT_EQ(rows, 3 + 2u);
        EXPECT_EQ(on, made(second, 0));
    }
}

// The last logits of a text of seven tokens, read in runs of these lengths: the rank's own share.
template <typename T>
static std::vector<double> logits_in_runs(Fixture<T>& f, const std::vector<size_t>& runs) {
    const int tokens[] = {3, 50, 17, 8, 29, 41, 5};
    size_t past = 0;
    for (size_t n : runs) {
        // The text has the second slot: the first is another's.
        generate_batch(f.t, 0, tokens + past, 1, n, &past, 1);
        run_plan(f.t, 0);
        past += n;
    }

    // Read this rank's share of the vocabulary, from which nothing has been rounded.
    const T* home = address<const T>(f.t, {Kind::LOGITS, -1, 0});
    return std::vector<double>(home, home + f.t.ctx.shape.V / size_t(f.t.layout.tp.size));
}

// Latent attention's cache has latents, which queries and outputs absorb: logits are those of keys
// and values by heads, to which a text read at once attends. Adapters are absorbed too.
template <typename T> static void expect_absorbed(const Shape& s, Layout layout, double bound) {
    auto body = [&](const Comm& world) {
        Plan p = generating(2, 7, 9);
        p.layout = layout_at(layout, world.rank);
        Fixture<T> f(s, {p});
        f.t.comms = make_comms(world, p.layout, ranks_of_kv_head(p.layout, f.t.model));
        size_t bytes = 2 * 9 * (s.latent.kv + s.rope.rotary) * sizeof(T);
        EXPECT_EQ((data_bytes<T>(f.t.plans[0], f.t.model, {Kind::CACHE, 1}, f.t.ctx.where)), bytes);

        // Hold the runs against one that reads the whole text.
        std::vector<double> whole = logits_in_runs(f, {7});
        for (const auto& runs : {std::vector<size_t>{3, 1, 1, 1, 1}, {1, 4, 2}, {6, 1}}) {
            std::vector<double> got = logits_in_runs(f, runs);
            for (size_t v = 0; v < whole.size(); v++)
                EXPECT_NEAR(got[v], whole[v], bound) << s.hf_type << ' ' << runs.size();
        }
    };
    EXPECT_EQ(run_local_ranks(layout.world(), {.timeout_s = 20}, body), 0);
}

// Double agrees up to its rounding. Float has 2^29 times its unit; logits are of the order of 1.
TEST(Slots, LatentsAreAbsorbed) {
    Shape scaled = small_mla();
    scaled.attention.score_scalar = 20;
    Layout sequence = small_layout(1, 2);
    sequence.sequence_parallel = true;
    for (const Shape& s : {small_mla(), small_mla(true), scaled, with_lora(small_mla(), 3)}) {
        expect_absorbed<double>(s, {}, 1e-12);
        expect_absorbed<double>(s, small_layout(1, 2), 1e-12);
        expect_absorbed<double>(s, sequence, 1e-12);
    }
    expect_absorbed<float>(small_mla(), {}, 1e-12 * 0x1p29);
}

// Before each run `stops` is asked, and ends all texts.
TEST(Slots, AWishToStopEndsAllTexts) {
    Fixture<double> f(small_gpt2(), {generating(2, 4, 12)});
    std::vector<int> prompt = {1, 2};
    Sampling how;
    int asked = 0;
    how.stops = [&] { return ++asked == 3; };
    for (const Made& m : generated(f.t, 0, {{&prompt, 1}, {&prompt, 2}}, 9, how)) {
        EXPECT_EQ(m.tokens.size(), 3u);
        EXPECT_EQ(m.why, Ended::BY_STOP);
    }
    EXPECT_EQ(asked, 3);
}

// A text does not see what its slot held before, nor what other slots hold: a cache full of NaN
// gives the same tokens as one of zeros.
TEST(Slots, WhatASlotHeldBeforeIsNotSeen) {
    Shape s = small_llama();
    auto greedy = [&](double dirt) {
        Fixture<double> f(s, {generating(2, 6, CACHE)});
        f.t.plan = f.t.at = 0;
        for (int l = 0; l < f.t.model.layers(); l++)
            if (double* cache = address<double>(f.t, {Kind::CACHE, l}))
                std::fill_n(cache, 2 * CACHE * 2 * s.NKV * s.HS, dirt);
        std::vector<int> one = {1}, two = {2, 3, 4, 5, 6};
        return generated(f.t, 0, {{&one, 1}, {&two, 2}}, 3);
    };
    EXPECT_EQ(greedy(NAN), greedy(0));
}

// ----------------------------------------------------------------------------
// a draft

typedef std::vector<double> Shares;

// Two samples of each prompt, with a draft that guesses so many tokens ahead; 0: without one. own:
// the draft is the same model, else one whose vocabulary is three tokens smaller.
static MadeTexts drafted_texts(const Shape& s, size_t slots, size_t guesses, float temperature,
                               bool own = false, Draft* counts = nullptr) {
    // Make the model and the draft.
    Plan p = generating(slots, 6, CACHE, guesses + 1), of_draft = generating(slots, 6, CACHE, 2);
    Shape small = own ? s : gpt2_shape(1, 2, 16, s.V - 3, 32);
    Fixture<double> f(s, {p}), small_one(small, {of_draft}, own ? 5 : 6);
    std::shared_ptr<Trainer<double, Cpu>> model(&small_one.t, [](auto*) {});
    std::shared_ptr<Draft> draft = make_draft(model, guesses, s.V);

    // List the texts, from prompts that both know.
    Shape known = s;
    known.V -= 3;
    std::vector<std::vector<int>> prompts = some_prompts(known);
    std::vector<Text> texts;
    for (size_t i = 0; i < 2 * prompts.size(); i++)
        texts.push_back({&prompts[i / 2], fnv1a(concat("text.", i / 2, ".", i % 2))});
    Sampling how;
    how.temperature = temperature;
    for (int token = 0; token < int(s.V); token += 9) how.ends.insert(token);
    if (guesses) how.draft = draft.get();

    MadeTexts made = generated(f.t, 0, texts, COUNT, how);
    if (counts) *counts = *draft;
    return made;
}

// Greedy texts are the model's own, whatever the draft guesses, and however far ahead.
TEST(Drafts, GreedyTextsAreTheModelsOwn) {
    for (const Shape& s : all_shapes()) {
        MadeTexts alone = drafted_texts(s, 1, 0, 0);
        for (size_t slots : {1, 3, 8}) EXPECT_EQ(drafted_texts(s, slots, 4, 0), alone) << slots;
        EXPECT_EQ(drafted_texts(s, 3, 1, 0), alone);
        EXPECT_EQ(drafted_texts(s, 3, 9, 0), alone);
    }

    // A draft that is the model itself is always right: the model runs less often than it guesses.
    Draft counts;
    EXPECT_EQ(drafted_texts(small_gpt2(), 3, 4, 0, true, &counts),
              drafted_texts(small_gpt2(), 1, 0, 0));
    EXPECT_GT(counts.guesses, counts.steps);
}

// A text with a draft depends on both models, but not on the texts beside it.
TEST(Drafts, EachTextIsWhatItIsAlone) {
    for (const Shape& s : {small_gpt2(), small_llama(), small_mla()}) {
        MadeTexts alone = drafted_texts(s, 1, 3, 1);
        for (size_t slots : {3, 32}) EXPECT_EQ(drafted_texts(s, slots, 3, 1), alone) << slots;
    }

    Draft counts;
    drafted_texts(small_gpt2(), 3, 3, 1, true, &counts);
    EXPECT_GE(counts.stayed, counts.guesses - 2) << "a model agrees with itself";
}

// A distribution over three tokens for each beginning of a text; a token may be impossible.
static Shares some_shares(const char* name, const std::vector<int>& before) {
    std::string key = name;
    for (int token : before) key += concat(".", token);
    Shares shares(3);
    for (size_t v = 0; v < 3; v++) shares[v] = random_block(9, fnv1a(key), v)[0] % 5 + (v == 1);
    double sum = shares[0] + shares[1] + shares[2];
    for (double& x : shares) x /= sum;
    return shares;
}

// Add to `all` the probability of every text of `length` tokens that begins with `text`, which has
// been reached with probability `share`. The draft q guesses two tokens in each step, and p judges.
static void enumerate(std::map<std::vector<int>, double>* all, std::vector<int> text, double share,
                      size_t length, std::vector<int> guessed = {}) {
    if (text.size() >= length) {
        text.resize(length);
        (*all)[text] += share;
        return;
    }

    // Guess: follow each token that the draft may draw.
    std::vector<int> before = text;
    before.insert(before.end(), guessed.begin(), guessed.end());
    if (guessed.size() < 2) {
        Shares q = some_shares("q", before);
        for (int x = 0; x < 3; x++) {
            std::vector<int> more = guessed;
            more.push_back(x);
            if (q[x] > 0) enumerate(all, text, share * q[x], length, more);
        }
        return;
    }

    // Judge: a guess stays, or another token is drawn in its place and the step ends.
    for (int x : guessed) {
        Shares p = some_shares("p", text), q = some_shares("q", text), rest = rest_shares(p, q);
        double sum = rest[0] + rest[1] + rest[2], stays = stay_share(p, q, x);
        for (int v = 0; v < 3; v++) {
            std::vector<int> other = text;
            other.push_back(v);
            if (stays < 1) enumerate(all, other, share * (1 - stays) * rest[v] / sum, length);
        }
        share *= stays;
        text.push_back(x);
    }

    // All guesses have stayed: draw one token more.
    Shares p = some_shares("p", text);
    for (int v = 0; v < 3; v++) {
        std::vector<int> other = text;
        other.push_back(v);
        enumerate(all, other, share * p[v], length);
    }
}

// With a draft every text has the probability that the model alone gives it. The sums have some
// hundred products of doubles, so they are right to a few of their last bits.
TEST(Drafts, EveryTextHasTheModelsOwnProbability) {
    std::map<std::vector<int>, double> all;
    enumerate(&all, {}, 1, 4);
    ASSERT_EQ(all.size(), 81u);
    for (const auto& [text, share] : all) {
        double own = 1;
        std::vector<int> before;
        for (int token : text) {
            own *= some_shares("p", before)[size_t(token)];
            before.push_back(token);
        }
        EXPECT_NEAR(share, own, 1e-14);
    }

    // draw_share() draws each token as often as its share says. The shares need not add up to 1.
    std::vector<int> counts(4);
    for (int i = 0; i < 1000; i++) counts[size_t(draw_share({0.4, 0, 1, 0.6}, (i + 0.5) / 1000))]++;
    EXPECT_EQ(counts, (std::vector<int>{200, 0, 500, 300}));
    EXPECT_EQ(draw_share({1, 2, 0}, 1), 1);
}

// The shares (V) of the token that a model adds to a text, at temperature 1, computed by itself.
static std::vector<double> shares_after(Trainer<float, Cpu>& t, const std::vector<int>& text) {
    for (size_t i = 0; i < text.size(); i++) {
        generate_batch(t, 0, &text[i], 1, i);
        run_plan(t, 0);
    }
    LogitRows<float> rows = make_logit_rows(t, t.plans[0].scored);
    bring_logits(t, rows, 1);
    std::vector<double> shares(t.model.shape.V);
    double sum = 0;
    for (size_t v = 0; v < shares.size(); v++) sum += shares[v] = std::exp(double(rows.row(0)[v]));
    for (double& share : shares) share /= sum;
    return shares;
}

// Each of the first four tokens has the share that the model alone gives it: chi-square of 20000
// texts from a vocabulary of eight, position by position. If shares are right it has a mean of 7
// and a deviation of sqrt(14) = 3.7; five of them are allowed. The draft guesses far off, so that
// half of its guesses are drawn again: random numbers that are used twice would show.
TEST(Drafts, EachOfFourTokensHasTheModelsOwnShares) {
    constexpr size_t V = 8, TEXTS = 20000;
    Shape s = gpt2_shape(1, 1, 16, V, 16);
    Fixture<float> f(s, {generating(100, 2, 8, 4)}), other(s, {generating(100, 2, 8, 2)}, 6);
    for (Fixture<float>* one : {&f, &other})
        for (float& w : std::span(one->weight(one->t.model.parameters[0]), V * 16)) w *= 2;
    std::shared_ptr<Trainer<float, Cpu>> model(&other.t, [](auto*) {});
    std::shared_ptr<Draft> draft = make_draft(model, 3, V);

    // Sample, and count the tokens of each position.
    std::vector<int> prompt = {1, 2};
    std::vector<Text> texts;
    for (uint64_t i = 0; i < TEXTS; i++) texts.push_back({&prompt, fnv1a(concat("own.", i))});
    Sampling how;
    how.draft = draft.get();
    MadeTexts made = generated(f.t, 0, texts, 4, how);
    EXPECT_LT(draft->stayed, draft->guesses * 8 / 10);
    EXPECT_GT(draft->stayed, draft->guesses / 10);

    // Walk over all texts of up to three tokens, and add up what the next one may be.
    std::vector<std::vector<double>> wanted(4, std::vector<double>(V));
    std::function<void(std::vector<int>, double)> walk = [&](std::vector<int> text, double share) {
        std::vector<double> next = shares_after(f.t, text);
        size_t position = text.size() - prompt.size();
        text.push_back(0);
        for (size_t v = 0; v < V; v++) {
            wanted[position][v] += share * next[v];
            text.back() = int(v);
            if (position + 1 < 4) walk(text, share * next[v]);
        }
    };
    walk(prompt, 1);

    for (size_t position = 0; position < 4; position++) {
        std::vector<double> counts(V);
        for (const Made& text : made) counts[size_t(text.tokens.at(position))]++;
        double chi_square = 0;
        for (size_t v = 0; v < V; v++) {
            double expected = double(TEXTS) * wanted[position][v];
            chi_square += (counts[v] - expected) * (counts[v] - expected) / expected;
        }
        EXPECT_LT(chi_square, 7 + 5 * 3.7) << "token " << position + 1;
    }
}

// In a conversation the draft, too, does not read again what its cache holds.
TEST(Drafts, AConversationGoesOnWhereTheirCachesEnd) {
    Plan p = generating(1, 12, 20, 4);
    Fixture<double> f(small_gpt2(), {p}), own(small_gpt2(), {p});
    std::shared_ptr<Trainer<double, Cpu>> model(&own.t, [](auto*) {});
    std::shared_ptr<Draft> draft = make_draft(model, 3, small_gpt2().V);
    Sampling how;
    how.temperature = 0;
    how.draft = draft.get();

    // Generate six tokens behind a prompt, of which the caches hold the first `cached`.
    auto made = [&](const std::vector<int>& prompt, size_t cached) {
        return generated(f.t, 0, {{&prompt, 1, cached}}, 6, how)[0].tokens;
    };

    // Go on behind a first answer, and count the rows that the draft reads.
    std::vector<int> first = {1, 2, 3, 4}, answer = made(first, 0), second = first;
    second.insert(second.end(), answer.begin(), answer.end());
    second.insert(second.end(), {5, 6});
    size_t rows = 0;
    own.t.hooks.after = [&](const Action& a) { rows += a.layer == 0 ? own.t.ctx.batch.rows() : 0; };
    std::vector<int> on = made(second, 9);
    EXPECT_EQ(rows, 4 + (2 + 1 + 1u)) << "a prompt's end, three guesses";
    EXPECT_EQ(on, made(second, 0));
    EXPECT_EQ(draft->stayed, draft->guesses) << "keys and values are those of the text";
}

// ----------------------------------------------------------------------------
// the program

struct Prompts : Scratch {
    std::string small;   // flags of a run of a second
    std::string sampler; // a command that writes with a small model
    void SetUp() override {
        Scratch::SetUp();
        std::string text = numbered_lines(300, "");
        small = " --layers 1 --heads 2 --channels 32 --seq 32 --steps 0 --sample-tokens 6 --data " +
                put("text.txt", text) + " ";
        sampler = sampler_with("start", 1024);
    }

    // A command that writes with a new Llama of so many positions.
    std::string sampler_with(const std::string& name, int positions) {
        Ran r = shell(program() + " --model tiny-llama" + small + "--sample-tokens 0 --export " +
                      path(name));
        EXPECT_EQ(r.status, 0) << r.text;
        std::string config = read_file(path(name + "/config.json"));
        std::regex key("\"max_position_embeddings\": *[0-9]+");
        put(name + "/config.json",
            std::regex_replace(config, key, concat("\"max_position_embeddings\": ", positions)));
        return program("sample_gpt") + " --tokenizer byte --model " + path(name) +
               " --sample-tokens 6 ";
    }

    // The completions that a run prints: everything else goes to standard error.
    std::string completions(const std::string& flags) {
        Ran r = shell(sampler + flags + " 2>" + path("said"));
        EXPECT_EQ(r.status, 0) << read_file(path("said"));
        return r.text;
    }
};

// --prompts writes the same completions with any number of slots and in every layout.
TEST_F(Prompts, CompletionsAreTheSameInEverySlotAndLayout) {
    // Three prompts, between which lines are empty or end in CR LF.
    std::string file = "--prompts " + put("p.jsonl",
                                          "{\"prompt\": \"line 1\", \"id\": 7}\n\n"
                                          "{\"prompt\": \"ab\xc3\xa9\"}\r\n{\"prompt\": \"of\"}\n");
    std::string made = completions(file + " --samples 2");
    EXPECT_HAS(made, "{\"prompt\":\"line 1\",\"id\":7,\"sample\":0,\"completion\":\"");
    EXPECT_HAS(made, "{\"prompt\":\"ab\xc3\xa9\",\"sample\":1,\"completion\":\"");
    EXPECT_HAS(made, "\"tokens\":6,\"end\":\"length\"}\n");
    EXPECT_EQ(std::count(made.begin(), made.end(), '\n'), 6);
    for (const char* flags : {"--slots 1", "--slots 4", "--local-ranks 2 --tp 2",
                              "--local-ranks 2 --pp 2", "--local-ranks 2 --dp 2",
                              "--local-ranks 4 --slots 1", "--local-ranks 8 --tp 2"})
        EXPECT_EQ(completions(file + " --samples 2 " + flags), made) << flags;

    // A third sample changes nothing of the first two. A file gets the lines of standard output.
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

// Standard output has the completions' lines and no others, whatever else a run reports.
TEST_F(Prompts, StandardOutputHasJsonLinesAlone) {
    std::string file = "--prompts " + put("p.jsonl", "{\"prompt\": \"line 1\"}\n{\"prompt\": \"of\"}\n");
    for (std::string ranks : {"", " --local-ranks 2 --pp 2"}) {
        std::string made = completions(file + ranks);
        std::istringstream lines(made);
        size_t count = 0;
        for (std::string line; std::getline(lines, line); count++) {
            nlohmann::json j = nlohmann::json::parse(line, nullptr, false);
            ASSERT_TRUE(j.is_object()) << line;
            EXPECT_EQ(j.size(), 5u) << line; // prompt, sample, completion, tokens, end
        }
        EXPECT_EQ(count, 2u) << made;

        // The run reports on standard error.
        std::string said = read_file(path("said"));
        for (const char* part : {"sample_gpt: ", "parameters ", "weights: ", "2 completions, "})
            EXPECT_HAS(said, part);
    }
}

// Lines of --prompts choose adapters; each completion is the one that --adapter makes of it alone.
TEST_F(Prompts, EachLineHasItsAdapter) {
    // Make a base, and two adapters of different ranks.
    std::string base = path("base"), one = path("one"), two = path("two");
    ASSERT_EQ(shell(program() + small + "--sample-tokens 0 --export " + base).status, 0);
    std::string train = program() + " --model " + base + " --data " + path("text.txt") +
                        " --tokenizer byte --seq 32 --micro-batch 4 --batch-tokens 256 --steps 4"
                        " --warmup 0 --lr 0.3 --sample-tokens 0 --lora ";
    ASSERT_EQ(shell(train + "2 --export " + one).status, 0);
    ASSERT_EQ(shell(train + "5 --lora-targets attention --seed 9 --export " + two).status, 0);

    // Complete each line alone, without the key that chooses.
    std::string names[] = {"one", "two", "", "one", "two"}, expected, lines;
    std::string start = " --device cpu --tokenizer byte --steps 0 --sample-tokens 6 --temperature 0 "
                        "--model " + base + " --prompts ";
    auto made = [&](const std::string& flags, int status = 0) {
        Ran r = shell(program() + start + flags + " 2>" + path("said"));
        EXPECT_EQ(r.status, status) << read_file(path("said"));
        return r.text;
    };
    std::set<std::string> texts;
    for (size_t i = 0; i < 5; i++) {
        std::string prompt = "{\"prompt\":\"line " + std::to_string(i / 3) + "\"";
        std::string chosen = names[i].empty() ? "" : ",\"adapter\":\"" + names[i] + "\"";
        lines += prompt + chosen + "}\n";
        std::string flag = names[i].empty() ? "" : " --adapter " + path(names[i]);
        std::string alone = made(put("one.jsonl", prompt + "}\n") + flag);
        texts.insert(alone.substr(alone.find("\"completion\"")));
        expected += alone.insert(prompt.size(), chosen);
    }
    EXPECT_EQ(texts.size(), 5u) << "each adapter matters";

    // Complete all of them in one batch.
    std::string all = put("all.jsonl", lines) + " --adapters one=" + one + ",two=" + two;
    EXPECT_EQ(made(all), expected);
    EXPECT_EQ(made(all + " --slots 2"), expected);
    EXPECT_EQ(made(all + " --local-ranks 2 --tp 2"), expected);
    EXPECT_EQ(made(all + " --draft " + base), expected) << "a draft guesses for the base alone";

    // Names that mean nothing, and folders that do not fit, are refused in a line.
    auto refused = [&](const std::string& flags) {
        made(flags, 1);
        std::string said = read_file(path("said"));
        EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
        return said;
    };
    std::string file = put("all.jsonl", lines);
    EXPECT_HAS(refused(file + " --adapters one=" + one),
               "all.jsonl:2: its \"adapter\" is \"two\"; --adapters has one");
    EXPECT_HAS(refused(file), "all.jsonl:1: its \"adapter\" is \"one\", and the run has no "
                              "--adapters: give --adapters NAME=DIR, or leave the key out");
    EXPECT_HAS(refused(file + " --adapters one=" + one + ",one=" + two), "give one of them another");
    EXPECT_HAS(refused(file + " --adapters " + one), " is no NAME=DIR");
    EXPECT_HAS(refused(file + " --adapters a:b=" + one), "choose another one");
    std::string other = path("other");
    ASSERT_EQ(shell(program() + small + "--channels 64 --export " + other).status, 0);
    EXPECT_HAS(refused(file + " --model " + other + " --adapters one=" + one),
               "give the --model that it was trained on");
}

// A draft changes no greedy completion, and slots change no sampled one. The draft may be a folder,
// a run, the model itself, or a preset.
TEST_F(Prompts, ADraftChangesNoGreedyText) {
    // Train a model and a draft.
    std::string own = path("run"), model = path("model"), little = path("little");
    std::string train =
        program() + small + "--steps 8 --warmup 0 --micro-batch 4 --sample-tokens 0 --lr 1e-2 ";
    ASSERT_EQ(shell(train + "--layers 2 --export " + model).status, 0);
    ASSERT_EQ(shell(train + "--out " + own + " --export " + little).status, 0);
    std::string prompts = put("p.jsonl", "{\"prompt\": \"line 1\"}\n{\"prompt\": \"of\"}\n");
    auto made = [&](const std::string& flags, int status = 0) {
        Ran r = shell(program() + " --device cpu --steps 0 --sample-tokens 9 --model " + model +
                      " --prompts " + prompts + " --samples 2 " + flags + " 2>" + path("said"));
        EXPECT_EQ(r.status, status) << read_file(path("said"));
        return r.text;
    };

    // Complete with each draft.
    std::string greedy = made("--temperature 0");
    for (const std::string& draft : {little, own, model, std::string("tiny")})
        EXPECT_EQ(made("--temperature 0 --draft " + draft), greedy) << read_file(path("said"));
    EXPECT_EQ(made("--draft " + little + " --slots 1"), made("--draft " + little));
    EXPECT_HAS(read_file(path("said")), "draft: " + little + ", ");
    EXPECT_HAS(read_file(path("said")), " tokens a step of the model, ");

    // A run that trained in 8 bits guesses in the model's own type; one of adapters is no model.
    std::string narrow = path("narrow"), adapters = path("adapters");
    ASSERT_EQ(shell(train + "--precision bf16 --fp8 tensor --out " + narrow).status, 0);
    EXPECT_EQ(made("--temperature 0 --draft " + narrow), greedy) << read_file(path("said"));
    ASSERT_EQ(shell(train + "--lora 2 --out " + adapters).status, 0);
    made("--draft " + adapters, 1);
    EXPECT_HAS(read_file(path("said")), "its checkpoint has adapters alone");

    // A draft that does not exist, or has another vocabulary, is refused before anything runs.
    made("--draft " + path("none"), 1);
    EXPECT_HAS(read_file(path("said")), "none is neither a folder, a file nor a preset");
    ASSERT_EQ(shell(train + "--tokenizer byte --vocab 300 --export " + path("other")).status, 0);
    made("--draft " + path("other"), 1);
    EXPECT_HAS(read_file(path("said")),
               "other has 300 tokens, and " + model + " 256: give a draft that has");
    std::string letters = read_file(model + "/tokenizer.json");
    letters = std::regex_replace(letters, std::regex("\"A\": 65"), "\"A\": 66");
    put("little/tokenizer.json", std::regex_replace(letters, std::regex("\"B\": 66"), "\"B\": 65"));
    made("--draft " + little, 1);
    EXPECT_HAS(read_file(path("said")),
               "its tokens are those of " + little + "/tokenizer.json, and the model's are");
    EXPECT_HAS(
        shell(program() + " --model " + model + " --steps 0 --draft " + own + " --explain").text,
        "  draft ");
}

// A faulty prompt is refused in one line, which names its file and line.
TEST_F(Prompts, BadOnesAreNamedByTheirLine) {
    std::string narrow = sampler_with("narrow", 32);
    auto refused = [&](const std::string& text) {
        Ran r = shell(narrow + "--prompts " + put("p.jsonl", text) + " 2>&1");
        EXPECT_EQ(r.status, 1);
        EXPECT_EQ(std::count(r.text.begin(), r.text.end(), '\n'), 1) << r.text;
        return r.text;
    };
    EXPECT_HAS(refused("{\"prompt\": \"a\"}\n{\"prompt\":\n"),
               "p.jsonl:2: is no JSON object, or cut short: jq -c .");
    EXPECT_HAS(refused("[{\"prompt\": \"a\"}]"), "p.jsonl:1: is no JSON object but begins an array");
    EXPECT_HAS(refused("{\"data\": [{\"prompt\": \"a\"}]}"), "its \"data\" holds records: jq -c");
    EXPECT_HAS(refused("{\"text\": \"a\"}"), "p.jsonl:1: has no \"prompt\" that is a text\n");
    EXPECT_HAS(refused("\n{\"prompt\": \"\"}"), "p.jsonl:2: its prompt is empty\n");
    EXPECT_HAS(refused(""), "p.jsonl: holds no prompt\n");
    EXPECT_HAS(refused("{\"prompt\": \"" + std::string(33, 'a') + "\"}"),
               "p.jsonl:1: its prompt has 33 tokens, 1 more than the 32 positions\n");

    // A file of completions that exists is not overwritten. If slots do not fit, the error says
    // how many do.
    std::string one = put("p.jsonl", "{\"prompt\": \"a\"}\n"), into = put("made.jsonl", "{}\n");
    Ran r = shell(sampler + "--prompts " + one + " --completions " + into);
    EXPECT_HAS(r.text, "made.jsonl is there, and would be lost: ");
    EXPECT_EQ(read_file(into), "{}\n");
    std::string many = sampler + "--prompts " + one + " --samples 65536 --slots 65536 ";
    EXPECT_HAS(shell(many + "--memory 0.01").text, "these flags fit: --slots ");
    EXPECT_HAS(shell(many + "--explain").text, "key/value cache");
}

// ----------------------------------------------------------------------------
// a talk

// Characters are printed whole, in whatever pieces their bytes arrive. Bytes that are not UTF-8,
// and control characters, become U+FFFD.
TEST(Talks, CharactersAreWhole) {
    // Print text piece by piece.
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

    // A good text, one that is cut, one of wrong bytes, and one of control characters.
    const std::string none = "\xef\xbf\xbd", good = "a\xc3\xa9\n\xe2\x82\xac\xf0\x9f\x98\x80z";
    for (size_t piece : {1, 2, 3, 99}) {
        EXPECT_EQ(shown(good, piece), good);
        EXPECT_EQ(shown("\xe2\x82" "a", piece), none + none + "a");
        EXPECT_EQ(shown("\xff\xc0\xed\xa0\x80\xf0\x9f", piece),
                  none + none + none + none + none + none + none);
        EXPECT_EQ(shown("\x1b[2J\t\x7f", piece), none + "[2J\t" + none);
        EXPECT_EQ(shown("\xc2\x9b" "2J\xc2\xa0", piece), none + "2J\xc2\xa0") << "U+009B";
    }
    std::string megabyte(1 << 20, 'a');
    EXPECT_EQ(take_characters(&megabyte, false).size(), 1u << 20) << "in less than a minute";
}

// A sample is written to a terminal in characters that it does not obey, and to a file as it is.
TEST_F(Prompts, ASampleCommandsNoTerminal) {
    if (system("command -v script >/dev/null")) GTEST_SKIP() << "skipped: there is no script";
    std::string flags = "--steps 0 --layers 1 --heads 2 --channels 32 --seq 512 --prompt A";
    std::string command = program() + " " + flags + " --sample-tokens 400";
    auto controls = [](const std::string& text) {
        return std::count_if(text.begin(), text.end(), [](unsigned char c) {
            return (c < 32 && c != '\n' && c != '\t' && c != '\r') || c == 127;
        });
    };
    EXPECT_EQ(controls(shell("script -qec '" + command + "' /dev/null").text), 0);
    EXPECT_GT(controls(shell(command).text), 0);
}

// A prompt and its completion are the text: the blank that begins the completion belongs to it.
TEST(Completions, KeepTheBlankBetweenPromptAndCompletion) {
    llmc::Run run;
    run.tokenizer.kind = TokenizerKind::BPE;
    run.tokenizer.prefix = Prefix::SPACE;
    run.tokenizer.pieces = {" a", " time"};
    Prompt prompt = {"Once upon", {}, {{"prompt", "Once upon"}}};
    std::string line = completion_line(run, prompt, 0, {{0, 1}, Ended::BY_COUNT, true});
    EXPECT_EQ(nlohmann::json::parse(line)["completion"], " a time");
    run.chat.tokenizer = &run.tokenizer; // an answer stands alone
    line = completion_line(run, prompt, 0, {{0, 1}, Ended::BY_COUNT, true});
    EXPECT_EQ(nlohmann::json::parse(line)["completion"], "a time");
}

// Ctrl-C ends the wait for a question, and with it the talk.
TEST(Talks, AnInterruptEndsTheWait) {
    std::string line;
    note_interrupt(SIGINT);
    EXPECT_FALSE(read_question(&line));
    interrupts = 0;
}

// A folder with a chat template says how it is asked in its format; one that is unknown refuses.
TEST_F(Prompts, AFolderWithATemplateSaysHowItIsAsked) {
    std::string m = path("m"), ask = program() + " --model " + m + " --steps 0 --sample-tokens 2 ";
    ASSERT_EQ(shell(program() + " --model tiny-llama" + small + "--export " + m).status, 0);
    const std::string note = "note: " + m + " has a chat template, and prompts are continued as "
                             "plain text: --chat-format auto asks them as questions";
    EXPECT_EQ(shell(ask + "--prompt hi").text.find("chat template"), std::string::npos);
    put("m/chat_template.jinja", "{{ messages }}");
    EXPECT_HAS(shell(ask + "--prompt hi").text, note);
    EXPECT_HAS(shell(ask + "--prompts " + put("p.txt", "hi\n")).text, note);
    EXPECT_EQ(shell(ask).text.find("chat template"), std::string::npos);

    // The unknown template refuses questions, and training on conversations, by name.
    const std::string refused = "m: its chat template equals no format here";
    for (std::string more : {"--prompt hi --chat-format auto", "--chat </dev/null"}) {
        Ran r = shell(ask + more);
        EXPECT_NE(r.status, 0) << more;
        EXPECT_HAS(replace_all(r.text, "m/:", "m:"), refused);
    }
    EXPECT_EQ(shell(ask + "--prompt hi --chat-format plain").status, 0);
    std::string lines = put("c.jsonl", "{\"prompt\": \"u\", \"completion\": \"a\"}\n");
    Ran r = shell(program() + " --model " + m + " --steps 1 --seq 32 --loss sft --data " + lines);
    EXPECT_NE(r.status, 0);
    EXPECT_HAS(replace_all(r.text, "m/:", "m:"), refused);
}

// --chat reads questions from a pipe, and answers each.
TEST_F(Prompts, ATalkRunsThroughAPipe) {
    std::string command = sampler_with("narrow", 64) + "--chat --temperature 0.5 ";
    auto talk = [&](const std::string& lines, const std::string& more = "") {
        return shell("printf '" + lines + "' | " + command + more);
    };

    // Two questions: all that is printed is UTF-8.
    Ran r = talk("hi\\nyou\\n");
    EXPECT_EQ(r.status, 0) << r.text;
    EXPECT_HAS(r.text, "chat format: plain, by the special tokens, for there is no");
    for (size_t i = 0, n; i < r.text.size(); i += n)
        ASSERT_GT(n = utf8_length(r.text.substr(i)), 0u);
    EXPECT_EQ(talk("hi\\nyou", "--local-ranks 2 --tp 2").status, 0);

    // /help lists the commands. A command that there is not is no question; behind a space it is.
    r = talk("/help\\n");
    EXPECT_HAS(r.text, "\n/reset forgets, /quit ends, Ctrl-C stops");
    EXPECT_EQ(r.text.find("answer stops "), std::string::npos);
    r = talk("/exit\\n/\\033[2J\\n");
    EXPECT_HAS(r.text, "\nthere is no /exit: /reset forgets");
    EXPECT_HAS(r.text, "\nthere is no /\\x1b[2J: /reset forgets");
    EXPECT_EQ(r.text.find("answer stops "), std::string::npos);
    EXPECT_HAS(talk(" /exit\\n").text, "answer stops ");

    // /reset forgets the talk, and /quit ends it.
    EXPECT_HAS(talk("hi\\n/reset\\nyou\\n/quit\\nno\\n").text, "\n(forgotten)\n");
    EXPECT_EQ(talk("\\n/quit\\nno\\n").text.find("answer stops "), std::string::npos)
        << "nothing was asked";

    // If there is no room, a note says what is forgotten or refused, and the talk goes on.
    std::string cut = talk("hi\\nhello there\\nand so on\\n").text;
    EXPECT_HAS(cut, "note: the talk is longer than the model's 64 positions: its first ");
    std::string longer = talk(std::string(42, 'a') + "\\nhi\\n").text;
    EXPECT_HAS(longer,
               "has 59 tokens, 1 more than the model's 64 positions have room for, with 6 for an "
               "answer: ask a shorter one\n");
    EXPECT_HAS(longer, "note: the answer stops at --sample-tokens\n");
}
