// test_files.cpp - models and checkpoints in files: golden numbers from PyTorch, trained
// checkpoints, round trips to the bit, and every malformed input with its one line
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <csignal>
#include <filesystem>
#include <fstream>
#include "../llmc/checkpoint.h"
#include "../llmc/generate.h"
#include "../llmc/tokenizer_files.h"

namespace fs = std::filesystem;
using nlohmann::json;
static const std::string ROOT = REPO_ROOT, FIXTURES = ROOT + "/../shared/fixtures";
#define NEEDS_FIXTURES() \
    if (!std::ifstream(FIXTURES + "/README.md")) GTEST_SKIP() << "skipped: no fixtures"
#define EXPECT_HAS(text, part) EXPECT_PRED2(has, text, part)
static bool has(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

// The models are tiny: a team of threads would only wait, and a forked child has none.
static const int one_thread = (omp_set_num_threads(1), 1);

static std::string read_file(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}
static void put_file(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
}
static json read_json(const std::string& path) { return json::parse(read_file(path)); }

struct Files : testing::Test {
    std::string dir;
    void SetUp() override {
        std::string test = testing::UnitTest::GetInstance()->current_test_info()->name();
        dir = testing::TempDir() + "/files_" + std::to_string(getpid()) + test;
        fs::remove_all(dir);
        fs::create_directories(dir);
    }
    void TearDown() override { fs::remove_all(dir); }
};

// A trainer with memory, ready for weights.
template <typename T> struct Small {
    Trainer<T, Cpu> t;
    Small(const Shape& s, const std::vector<Plan>& plans) {
        trainer_place(t, s, plans);
        trainer_allocate(t);
        init_constants(t);
        t.hyper = {true, 1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.5f};
    }
    ~Small() { trainer_free(t); }
};

static Plan plan_of(Mode mode, size_t B, size_t T, size_t cache = 0) {
    Plan p;
    p.mode = mode, p.B = B, p.T = T, p.cache = cache;
    return p;
}

// The logits behind a prompt.
template <typename T>
std::vector<float> logits_after(Trainer<T, Cpu>& t, int plan, const std::vector<int>& prompt) {
    generate_batch(t, plan, prompt.data(), prompt.size(), 0);
    run_plan(t, plan);
    const T* logits = address<const T>(t, {Kind::LOGITS, -1, 0});
    return std::vector<float>(logits, logits + t.model.shape.V);
}

template <typename T>
std::vector<int> greedy(Trainer<T, Cpu>& t, int plan, std::vector<int> prompt, size_t count) {
    std::vector<int> ids = prompt;
    generate(t, plan, prompt, count, Sampling{0}, [&](int token) { ids.push_back(token); });
    return ids;
}

// ----------------------------------------------------------------------------
// golden numbers from PyTorch, in float and in double

struct Golden {
    SafeTensors file;
    Golden(const std::string& path) { EXPECT_EQ(safetensors_open(&file, path), ""); }
    ~Golden() { safetensors_close(&file); }
    std::vector<float> floats(const std::string& name) const {
        const SafeTensor* t = safetensors_find(file, name);
        EXPECT_TRUE(t) << name;
        std::vector<float> x(t ? t->elements() : 0);
        if (t) tensor_to_float(x.data(), *t, 0, x.size());
        return x;
    }
    std::vector<int> ints(const std::string& name) const {
        const SafeTensor* t = safetensors_find(file, name);
        EXPECT_TRUE(t && t->dtype == "I32") << name;
        std::vector<int> x(t ? t->elements() : 0);
        if (t) memcpy(x.data(), t->data, t->bytes);
        return x;
    }
    // a tensor of this parameter as the trainer holds it, [out, in]
    std::vector<float> of(const std::string& kind, const Parameter& p, const Shape& s) const {
        std::string name = kind + p.name;
        if (!safetensors_find(file, name)) name = kind + export_name(p, s);
        std::vector<float> x = floats(name);
        EXPECT_EQ(x.size(), p.file_elements()) << name;
        return p.transposed ? turned(x, p.cols(), p.rows()) : x;
    }
};

static double largest(const std::vector<float>& x) {
    double most = 0;
    for (float f : x) most = std::max(most, double(std::fabs(f)));
    return most;
}

// The bounds. In double only the golden files' own rounding to float is left, 6e-8 of a value.
struct Bounds {
    double loss;      // absolute
    double logits;    // of the largest
    double gradients; // of the tensor's largest, and of the norm
    double weights;   // absolute, after three steps
    // Adam divides a gradient by its size. Where it is smaller than this, relative to its tensor's
    // largest, rounding in float may turn its sign: such a weight may be off by `steps`, lr.
    double near_zero;
    double steps;
};
static const Bounds IN_FLOAT = {1e-5, 1e-4, 1e-4, 1e-5, 1e-3, 1e-3},
                    IN_DOUBLE = {1e-6, 1e-6, 1e-6, 1e-6, 0, 0};

template <typename T> void compare_with_golden(const std::string& name, Bounds bounds) {
    std::string folder = ROOT + "/dev/golden/" + name;
    Shape s;
    ASSERT_EQ(hf_read_config(&s, folder), "");
    Golden golden(folder + "/golden.safetensors");
    std::vector<int> golden_tokens = golden.ints("tokens"), golden_targets = golden.ints("targets");
    const size_t B = 3, N = 24;
    ASSERT_EQ(golden_tokens.size(), B * N);
    ASSERT_EQ(golden_targets.size(), B * N);
    Small<T> m(s, {plan_of(Mode::TRAIN, B, N), plan_of(Mode::GENERATE, 1, N, N)});
    ASSERT_EQ(hf_load_weights(m.t, folder), "");

    std::vector<float> logits = golden.floats("logits");
    ASSERT_EQ(logits.size(), B * N * s.V);
    const double bound = bounds.logits * largest(logits);
    for (size_t b = 0; b < B; b++)
        for (size_t length = 1; length <= N; length++) {
            const int* row = golden_tokens.data() + b * N;
            const float* want = logits.data() + (b * N + length - 1) * s.V;
            std::vector<float> got = logits_after(m.t, 1, {row, row + length});
            for (size_t v = 0; v < s.V; v++) ASSERT_NEAR(got[v], want[v], bound) << "logits";
        }

    m.t.window = [&](uint64_t sample, int* tokens, int* targets) {
        memcpy(tokens, golden_tokens.data() + sample * N, N * sizeof(int));
        memcpy(targets, golden_targets.data() + sample * N, N * sizeof(int));
        return std::string();
    };
    std::vector<float> losses = golden.floats("step_losses");
    ASSERT_EQ(losses.size(), 3u);
    EXPECT_EQ(losses[0], golden.floats("loss")[0]);
    for (size_t step = 0; step < 3; step++) {
        run_plan(m.t, 0);
        EXPECT_NEAR(plan_loss(m.t).mean(), losses[step], bounds.loss) << "step " << step;
        if (step > 0) continue;
        double norm = golden.floats("grad_norm")[0];
        EXPECT_GT(norm, 0.5) << "nothing would be clipped";
        EXPECT_NEAR(address<const StepScale>(m.t, {Kind::SCALE})->norm, norm,
                    bounds.gradients * norm);
        for (const Parameter& p : m.t.model.parameters) {
            const acc_t<T>* got = address<const acc_t<T>>(m.t, {Kind::GRAD, p.bucket}) + p.offset;
            std::vector<float> want = golden.of("grad.", p, s);
            const double gradient_bound = bounds.gradients * largest(want);
            for (size_t i = 0; i < want.size(); i++)
                ASSERT_NEAR(got[i], want[i], gradient_bound) << p.name;
        }
    }
    for (const Parameter& p : m.t.model.parameters) {
        std::vector<float> want = golden.of("after.", p, s), grad = golden.of("grad.", p, s),
                           got = get_weight(m.t, p);
        size_t excused = 0;
        for (size_t i = 0; i < want.size(); i++) {
            double miss = std::fabs(double(got[i]) - want[i]);
            bool excuse = std::fabs(grad[i]) < bounds.near_zero * largest(grad);
            EXPECT_LE(miss, excuse ? bounds.steps : bounds.weights)
                << p.name << "[" << i << "], gradient " << grad[i];
            excused += excuse && miss > bounds.weights;
        }
        // GPT-2's key biases, a third of c_attn's, have no gradient at all: softmax does not see
        // them
        bool key_bias = has(p.name, "c_attn.bias");
        EXPECT_LE(excused, want.size() / (key_bias ? 3 : 50)) << p.name;
    }
}

TEST(Golden, Gpt2InFloat) { compare_with_golden<float>("gpt2-tiny", IN_FLOAT); }
TEST(Golden, Gpt2InDouble) { compare_with_golden<double>("gpt2-tiny", IN_DOUBLE); }
TEST(Golden, LlamaInFloat) { compare_with_golden<float>("llama-tiny", IN_FLOAT); }
TEST(Golden, LlamaInDouble) { compare_with_golden<double>("llama-tiny", IN_DOUBLE); }
TEST(Golden, Qwen2InFloat) { compare_with_golden<float>("qwen2-tiny", IN_FLOAT); }
TEST(Golden, Qwen2InDouble) { compare_with_golden<double>("qwen2-tiny", IN_DOUBLE); }

// ----------------------------------------------------------------------------
// trained checkpoints of others

TEST(Fixtures, Stories260kSpeaksItsExpectedText) {
    NEEDS_FIXTURES();
    std::string folder = FIXTURES + "/checkpoints/stories260K";
    Shape s;
    ASSERT_EQ(hf_read_config(&s, folder + "/hf"), "");
    Small<float> m(s, {plan_of(Mode::GENERATE, 1, 1, 256)});
    ASSERT_EQ(hf_load_weights(m.t, folder + "/hf"), "");
    std::vector<int> expected =
        read_json(folder + "/expected_greedy_ids.json")["ids"].get<std::vector<int>>();
    EXPECT_EQ(greedy(m.t, 0, {1}, expected.size() - 1), expected);
    EXPECT_GE(expected.size(), 200u);
}

TEST(Fixtures, Stories260kHasItsExpectedLoss) {
    NEEDS_FIXTURES();
    json reference =
        read_json(FIXTURES + "/checkpoints/stories260K/helper_reference/tinystories_loss.json");
    ASSERT_EQ(reference["per_story"].size(), 40u);
    Tokenizer tokenizer;
    ASSERT_EQ(tokenizer_open(&tokenizer, FIXTURES + "/tokenizers/tinystories512/tok512.bin"), "");
    std::string text = read_file(FIXTURES + "/text/tinystories_v2_gpt4_sample_2MiB.txt"),
                mark = "<|endoftext|>";
    const char* blank = " \n\r\t";
    Shape s;
    ASSERT_EQ(hf_read_config(&s, FIXTURES + "/checkpoints/stories260K/hf"), "");
    Small<float> m(s, {plan_of(Mode::EVALUATE, 1, 512)});
    ASSERT_EQ(hf_load_weights(m.t, FIXTURES + "/checkpoints/stories260K/hf"), "");
    double sum = 0;
    int64_t count = 0;
    size_t at = 0;
    for (size_t story = 0; story < reference["per_story"].size(); story++) {
        size_t end = text.find(mark, at), a = text.find_first_not_of(blank, at);
        size_t b = text.find_last_not_of(blank, end - 1);
        std::vector<int> ids = encode(tokenizer, text.substr(a, b + 1 - a));
        ids.insert(ids.begin(), tokenizer.bos);
        EXPECT_TRUE(story > 0 || ids == reference["ids_of_story_0"].get<std::vector<int>>());
        at = end + mark.size();
        m.t.window = [&](uint64_t, int* tokens, int* targets) {
            for (size_t i = 0; i < 512; i++) {
                tokens[i] = i < ids.size() ? ids[i] : 0;
                targets[i] = i + 1 < ids.size() ? ids[i + 1] : -1;
            }
            return std::string();
        };
        run_plan(m.t, 0);
        Loss loss = plan_loss(m.t);
        EXPECT_NEAR(loss.mean(), reference["per_story"][story]["mean_nll"].get<double>(), 1e-5)
            << "story " << story;
        sum += loss.sum, count += loss.valid;
    }
    EXPECT_EQ(count, reference["total_predictions"].get<int64_t>());
    EXPECT_NEAR(sum / double(count), reference["mean_nll"].get<double>(), 1e-5);
}

TEST_F(Files, TinyRandomGpt2GivesItsExpectedLogits) {
    NEEDS_FIXTURES();
    std::string folder = FIXTURES + "/checkpoints/tiny-random-gpt2";
    json e = read_json(folder + "/expected.json");
    put_file(dir + "/config.json", e["config"].dump());
    fs::copy(folder + "/model.safetensors", dir + "/model.safetensors");
    Shape s;
    ASSERT_EQ(hf_read_config(&s, dir), "");
    Small<float> m(s, {plan_of(Mode::GENERATE, 1, 4, 16)});
    ASSERT_EQ(hf_load_weights(m.t, dir), "");
    std::vector<float> all;
    for (int b = 0; b < 2; b++) {
        std::vector<int> ids = e["input_ids"][size_t(b)].get<std::vector<int>>();
        for (size_t length = 1; length <= 4; length++) {
            std::vector<float> logits =
                logits_after(m.t, 0, {ids.begin(), ids.begin() + long(length)});
            all.insert(all.end(), logits.begin(), logits.end());
        }
        EXPECT_EQ(greedy(m.t, 0, ids, 6),
                  e["greedy_sequences_len10"][size_t(b)].get<std::vector<int>>());
    }
    std::vector<float> sampled = e["sampled_logits_prompt"].get<std::vector<float>>();
    ASSERT_EQ(sampled.size() * 200, all.size());
    for (size_t i = 0; i < sampled.size(); i++) EXPECT_NEAR(all[i * 200], sampled[i], 1e-5) << i;
}

// Through L layers a token reaches L (window - 1) positions ahead, and no further; also where the
// keys come from the cache.
TEST(Windows, WhatIsFurtherBackHasNoInfluence) {
    Shape s = llama_shape(2, 4, 2, 32, 48, 61, 64, 10000);
    s.sliding_window = 5;
    Small<float> m(s, {plan_of(Mode::GENERATE, 1, 16, 32)});
    init_weights(m.t, 3);
    auto changed = [&](size_t length, size_t cached) { // how far the first token's influence goes
        std::vector<float> logits[2];
        for (int which = 0; which < 2; which++) {
            std::vector<int> ids(length, 11);
            ids[0] = which;
            logits[which] = logits_after(m.t, 0, {ids.begin(), ids.end() - long(cached)});
            for (size_t past = length - cached; past < length; past++) {
                generate_batch(m.t, 0, &ids[past], 1, past);
                run_plan(m.t, 0);
                const float* x = address<const float>(m.t, {Kind::LOGITS, -1, 0});
                logits[which].assign(x, x + s.V);
            }
        }
        return logits[0] != logits[1];
    };
    for (size_t cached : {0, 3}) {
        EXPECT_TRUE(changed(9, cached)) << cached;   // position 8 = 2 (5 - 1)
        EXPECT_FALSE(changed(10, cached)) << cached; // position 9
    }
}

// ----------------------------------------------------------------------------
// config.json

static json gpt2_json() {
    return {{"model_type", "gpt2"}, {"n_embd", 12},     {"n_head", 3},
            {"n_layer", 2},         {"vocab_size", 61}, {"n_positions", 16}};
}
static json llama_json(const char* type = "llama") {
    return {{"model_type", type},     {"hidden_size", 16},       {"num_attention_heads", 4},
            {"num_hidden_layers", 2}, {"intermediate_size", 20}, {"vocab_size", 61}};
}
static json llama3_scaling() {
    return {{"rope_type", "llama3"},
            {"factor", 4.0},
            {"low_freq_factor", 2.0},
            {"high_freq_factor", 8.0},
            {"original_max_position_embeddings", 64}};
}

// What config.json says of a shape, or what is wrong with it; `more` replaces and adds keys.
static std::string config_error(const std::string& dir, json config,
                                const json& more = json::object(), Shape* s = nullptr) {
    config.update(more);
    put_file(dir + "/config.json", config.dump());
    Shape unused;
    return hf_read_config(s ? s : &unused, dir);
}
static Shape config_shape(const std::string& dir, const json& config,
                          const json& more = json::object()) {
    Shape s;
    EXPECT_EQ(config_error(dir, config, more, &s), "");
    return s;
}

TEST_F(Files, ConfigOfGpt2) {
    Shape s = config_shape(dir, gpt2_json());
    EXPECT_EQ(s.family, Family::GPT2);
    EXPECT_EQ(s.position, Position::LEARNED);
    EXPECT_EQ((std::vector<size_t>{s.L, s.NH, s.NKV, s.HS, s.C, s.F, s.V, s.P}),
              (std::vector<size_t>{2, 3, 3, 4, 12, 48, 61, 16}));
    EXPECT_TRUE(s.tied && s.qkv_bias);
    EXPECT_EQ(s.norm_eps, 1e-5f);
    s = config_shape(dir, gpt2_json(),
                     {{"n_inner", 20},
                      {"layer_norm_epsilon", 1e-3},
                      {"tie_word_embeddings", false},
                      {"activation_function", "gelu_new"},
                      {"scale_attn_weights", true}});
    EXPECT_EQ(s.F, 20u);
    EXPECT_EQ(s.norm_eps, 1e-3f);
    EXPECT_FALSE(s.tied);
    EXPECT_EQ(config_shape(dir, gpt2_json(), {{"n_inner", nullptr}}).F, 48u);
    json older = gpt2_json();
    older.erase("n_positions");
    EXPECT_EQ(config_shape(dir, older, {{"n_ctx", 24}}).P, 24u);
}

TEST_F(Files, ConfigOfLlama) {
    Shape s = config_shape(dir, llama_json());
    EXPECT_EQ(s.family, Family::LLAMA);
    EXPECT_EQ(s.position, Position::ROPE);
    EXPECT_EQ((std::vector<size_t>{s.L, s.NH, s.NKV, s.HS, s.C, s.F, s.V, s.P}),
              (std::vector<size_t>{2, 4, 4, 4, 16, 20, 61, 2048}));
    EXPECT_EQ(s.rope_theta, 10000);
    EXPECT_EQ(s.rope_scaling.factor, 1);
    EXPECT_EQ(s.norm_eps, 1e-6f);
    EXPECT_FALSE(s.tied || s.qkv_bias);
    s = config_shape(dir, llama_json(),
                     {{"num_key_value_heads", 2},
                      {"head_dim", 6},
                      {"max_position_embeddings", 99},
                      {"rms_norm_eps", 1e-3},
                      {"rope_theta", 7},
                      {"tie_word_embeddings", true}});
    EXPECT_EQ((std::vector<size_t>{s.NKV, s.HS, s.P}), (std::vector<size_t>{2, 6, 99}));
    EXPECT_EQ(s.norm_eps, 1e-3f);
    EXPECT_EQ(s.rope_theta, 7);
    EXPECT_TRUE(s.tied);
    EXPECT_EQ(config_shape(dir, llama_json(), {{"hidden_size", 18}, {"head_dim", 4}}).HS,
              4u); // heads need not divide
    EXPECT_EQ(config_shape(dir, llama_json(), {{"sliding_window", 9}}).sliding_window,
              0u); // Llama has none
}

TEST_F(Files, ConfigOfRope) {
    auto expect_scaled = [](const Shape& s) {
        EXPECT_EQ(s.rope_scaling.factor, 4);
        EXPECT_EQ(s.rope_scaling.low_freq_factor, 2);
        EXPECT_EQ(s.rope_scaling.high_freq_factor, 8);
        EXPECT_EQ(s.rope_scaling.original_positions, 64);
    };
    Shape s = config_shape(dir, llama_json(),
                           {{"rope_theta", 500000.0}, {"rope_scaling", llama3_scaling()}});
    expect_scaled(s);
    EXPECT_EQ(s.rope_theta, 500000);
    json parameters = llama3_scaling(), older = llama3_scaling();
    parameters["rope_theta"] = 3.5;
    s = config_shape(dir, llama_json(), {{"rope_parameters", parameters}}); // of newer files
    expect_scaled(s);
    EXPECT_EQ(s.rope_theta, 3.5);
    older.erase("rope_type");
    older["type"] = "llama3";
    expect_scaled(config_shape(dir, llama_json(), {{"rope_scaling", older}}));
    for (json none : {json(nullptr), json::object(), json{{"rope_type", "default"}},
                      json{{"rope_type", nullptr}}})
        EXPECT_EQ(config_shape(dir, llama_json(), {{"rope_scaling", none}}).rope_scaling.factor, 1)
            << none;
    auto wrong = [&](const json& scaling) {
        return config_error(dir, llama_json(), {{"rope_scaling", scaling}});
    };
    for (const char* key : {"rope_type", "type"})
        for (const char* kind : {"yarn", "linear", "dynamic", "longrope"})
            EXPECT_HAS(wrong({{key, kind}}),
                       std::string("rope scaling ") + kind + " is not built yet, only llama3 is");
    EXPECT_HAS(wrong({{"rope_type", 3}}), "rope scaling 3 is not built yet");
    EXPECT_HAS(wrong({{"rope_type", {1}}}), "rope scaling");
    EXPECT_HAS(wrong("llama3"), "rope_scaling is no object");
    EXPECT_HAS(wrong({{"rope_type", "llama3"}, {"factor", "x"}}),
               "factor is \"x\", which is no number");
}

TEST_F(Files, ConfigOfMistralAndQwen2) {
    Shape s = config_shape(dir, llama_json("mistral"),
                           {{"sliding_window", 32}, {"num_key_value_heads", 2}});
    EXPECT_EQ(s.hf_type, "mistral");
    EXPECT_EQ(s.sliding_window, 32u);
    EXPECT_EQ(s.NKV, 2u);
    EXPECT_FALSE(s.qkv_bias || s.tied);
    EXPECT_EQ(
        config_shape(dir, llama_json("mistral"), {{"sliding_window", nullptr}}).sliding_window, 0u);
    EXPECT_EQ(config_shape(dir, llama_json("mistral")).sliding_window, 0u);
    EXPECT_HAS(config_error(dir, llama_json("mistral"), {{"sliding_window", 0}}),
               "sliding_window is 0, which is no");
    s = config_shape(
        dir, llama_json("qwen2"),
        {{"sliding_window", 32}, {"use_sliding_window", false}, {"tie_word_embeddings", true}});
    EXPECT_EQ(s.hf_type, "qwen2");
    EXPECT_EQ(s.sliding_window, 0u);
    EXPECT_TRUE(s.qkv_bias && s.tied);
    EXPECT_EQ(config_shape(dir, llama_json("qwen2"), {{"sliding_window", 32}}).sliding_window, 0u);
    // its window begins at layer max_window_layers, ours at the first
    EXPECT_HAS(config_error(dir, llama_json("qwen2"),
                            {{"sliding_window", 32}, {"use_sliding_window", true}}),
               "use_sliding_window true is not built yet");
}

TEST_F(Files, ConfigErrorsAreNamed) {
    Shape s;
    EXPECT_HAS(hf_read_config(&s, dir), "has no config.json");
    EXPECT_HAS(hf_read_config(&s, dir + "/nowhere"), "has no config.json");
    for (const char* text :
         {"", "{", "no", "[1,2]", "3", "\"gpt2\"", "{\"model_type\":\"gpt2\",}", "\xff\xfe{}"}) {
        put_file(dir + "/config.json", text);
        EXPECT_HAS(hf_read_config(&s, dir), "config.json: is no JSON object") << text;
    }
    for (json type : {json("bert"), json(""), json(3), json(nullptr), json("GPT2")})
        EXPECT_HAS(config_error(dir, llama_json(), {{"model_type", type}}),
                   "is not supported: gpt2, llama, mistral");
    EXPECT_HAS(config_error(dir, llama_json(), {{"model_type", "bert"}}), "model_type 'bert'");

    for (const json& whole :
         {gpt2_json(), llama_json(), llama_json("mistral"), llama_json("qwen2")})
        for (auto& [key, value] : whole.items()) {
            if (key == "model_type") continue;
            json lacking = whole;
            lacking.erase(key);
            EXPECT_HAS(config_error(dir, lacking), ": " + key + " is missing");
            EXPECT_HAS(config_error(dir, whole, {{key, nullptr}}), ": " + key + " is missing");
            for (json bad : {json("12"), json(0), json(-12), json(12.5), json(true), json({12}),
                             json(1u << 30)})
                EXPECT_TRUE(has(config_error(dir, whole, {{key, bad}}), ": " + key + " is ") &&
                            has(config_error(dir, whole, {{key, bad}}), ", which is no size"))
                    << key << bad;
        }
    for (const char* key : {"num_key_value_heads", "head_dim", "max_position_embeddings"})
        EXPECT_HAS(config_error(dir, llama_json(), {{key, 0}}),
                   std::string(key) + " is 0, which is no size");
    for (const char* key : {"rope_theta", "rms_norm_eps"})
        EXPECT_HAS(config_error(dir, llama_json(), {{key, "x"}}),
                   std::string(key) + " is \"x\", which is no number");
    EXPECT_HAS(config_error(dir, gpt2_json(), {{"n_inner", "x"}}),
               "n_inner is \"x\", which is no size");
    EXPECT_HAS(config_error(dir, gpt2_json(), {{"layer_norm_epsilon", "x"}}), "which is no number");

    EXPECT_HAS(config_error(dir, gpt2_json(), {{"n_head", 5}}),
               "n_head 5 does not divide n_embd 12");
    EXPECT_HAS(config_error(dir, llama_json(), {{"num_attention_heads", 3}}),
               "num_attention_heads 3 does not divide");
    EXPECT_HAS(config_error(dir, llama_json(), {{"num_attention_heads", 32}}),
               "num_attention_heads 32 does not");
    EXPECT_HAS(config_error(dir, llama_json(), {{"num_key_value_heads", 3}}),
               "num_key_value_heads 3 does not divide");
    EXPECT_HAS(config_error(dir, llama_json(), {{"num_key_value_heads", 8}}),
               "num_key_value_heads 8 does not divide");

    auto refused = [&](const json& whole, const char* key, const json& value) {
        std::string expected = std::string(key) + " " + value.dump() + " is not built yet";
        EXPECT_HAS(config_error(dir, whole, {{key, value}}), expected);
    };
    refused(gpt2_json(), "activation_function", "relu");
    refused(gpt2_json(), "activation_function", "gelu");
    refused(gpt2_json(), "scale_attn_weights", false);
    refused(gpt2_json(), "scale_attn_by_inverse_layer_idx", true);
    for (const char* type : {"llama", "mistral", "qwen2"}) {
        refused(llama_json(type), "hidden_act", "gelu");
        refused(llama_json(type), "attention_bias", true);
        refused(llama_json(type), "mlp_bias", true);
    }
    // brackets in brackets: printing them would end the stack
    std::string deep(1 << 20, '['), config = gpt2_json().dump();
    for (const char* key : {"\"n_embd\":12", "\"n_layer\":2"}) {
        std::string text = config,
                    nested = std::string(key).substr(0, std::string(key).find(':') + 1) + deep;
        text.replace(text.find(key), strlen(key), nested + std::string(deep.size(), ']'));
        put_file(dir + "/config.json", text);
        EXPECT_HAS(hf_read_config(&s, dir), " is array, which is no size");
    }
    std::string text = config;
    text.insert(1, "\"activation_function\":" + deep + std::string(deep.size(), ']') + ",");
    put_file(dir + "/config.json", text);
    EXPECT_HAS(hf_read_config(&s, dir), "activation_function array is not built yet");
}

// ----------------------------------------------------------------------------
// exports

// Every family, tied and not; 61 words, which the trainer pads to 128.
static std::vector<Shape> all_shapes() {
    Shape gpt2 = gpt2_shape(2, 3, 12, 61, 16), gpt2_untied = gpt2;
    Shape llama = llama_shape(2, 4, 2, 16, 20, 61, 32, 10000), llama_tied = llama, mistral = llama,
          qwen2 = llama;
    gpt2_untied.tied = false;
    llama.rope_scaling = {8, 1, 4, 16}, llama_tied.tied = true, llama_tied.HS = 6,
    llama_tied.norm_eps = 1e-3f;
    mistral.hf_type = "mistral", mistral.sliding_window = 7;
    qwen2.hf_type = "qwen2", qwen2.qkv_bias = true, qwen2.rope_theta = 1e6;
    Shape mistral_endless = mistral, qwen2_tied = qwen2;
    mistral_endless.sliding_window = 0, qwen2_tied.tied = true;
    return {gpt2, gpt2_untied, llama, llama_tied, mistral, mistral_endless, qwen2, qwen2_tied};
}

static std::string shape_name(const Shape& s) {
    return s.hf_type + (s.tied ? ", tied" : ", untied");
}

template <typename T>
static void fill_weights(Trainer<T, Cpu>& t, uint64_t seed) { // norms and biases too
    for (const Parameter& p : t.model.parameters) {
        std::vector<float> v(p.elements());
        for (size_t i = 0; i < p.file_elements(); i++)
            v[i] = float(normal(seed, fnv1a(p.name), i)) * 0.2f;
        set_weight(t, p, v.data());
    }
}

static Window squares_window(size_t V) {
    return [V](uint64_t sample, int* tokens, int* targets) {
        for (uint64_t i = 0; i < 16; i++) {
            tokens[i] = int((sample * 5 + i * i) % V);
            targets[i] = int((sample * 5 + (i + 1) * (i + 1)) % V);
        }
        return std::string();
    };
}

template <typename T>
std::unique_ptr<Small<T>> random_model(const Shape& s, uint64_t seed = 3, bool adamw = true) {
    Plan plan = plan_of(Mode::TRAIN, 2, 16);
    plan.adamw = adamw;
    auto m = std::make_unique<Small<T>>(s, std::vector<Plan>{plan});
    m->t.hyper.adamw = adamw;
    fill_weights(m->t, seed);
    m->t.window = squares_window(s.V);
    return m;
}

template <typename A, typename B>
static void expect_same_weights(const Small<A>& a, const Small<B>& b) {
    for (const Parameter& p : a.t.model.parameters)
        EXPECT_EQ(get_weight(a.t, p), get_weight(b.t, p))
            << p.name << " of " << shape_name(a.t.model.shape);
}

// All bytes of a folder's files.
static std::map<std::string, std::string> folder_bytes(const std::string& folder) {
    std::map<std::string, std::string> files;
    for (const fs::directory_entry& e : fs::directory_iterator(folder))
        files[e.path().filename().string()] = read_file(e.path().string());
    return files;
}

static void expect_same_shape(const Shape& a, const Shape& b) {
    EXPECT_EQ(model_identity(a), model_identity(b));
    EXPECT_EQ(a.norm_eps, b.norm_eps);
    EXPECT_EQ(a.sliding_window, b.sliding_window);
    EXPECT_EQ(a.rope_scaling.low_freq_factor, b.rope_scaling.low_freq_factor);
    EXPECT_EQ(a.rope_scaling.high_freq_factor, b.rope_scaling.high_freq_factor);
    EXPECT_EQ(a.rope_scaling.original_positions, b.rope_scaling.original_positions);
}

template <typename T> static void export_round_trip(const std::string& dir) {
    for (const Shape& s : all_shapes())
        for (size_t shard_bytes : {size_t(5) << 30, size_t(3000), size_t(1)}) {
            // a file a tensor, each synced, takes its time
            if (shard_bytes == 1 && s.family == Family::LLAMA && !s.qkv_bias) continue;
            std::string folder = dir + "/export"; // over the one before
            auto a = random_model<T>(s), b = random_model<T>(s, 4);
            ASSERT_EQ(hf_export(a->t, folder, Type::F32, shard_bytes), "");
            auto files = folder_bytes(folder);
            size_t shards = files.size() - 1 - files.count("model.safetensors.index.json");
            EXPECT_EQ(files.count("config.json"), 1u);
            EXPECT_EQ(files.count("model.safetensors.index.json"), shards > 1);
            if (shard_bytes > 3000)
                EXPECT_EQ(shards, 1u);
            else if (shard_bytes == 1)
                EXPECT_EQ(shards, a->t.model.parameters.size());
            else
                EXPECT_GT(shards, 2u);
            EXPECT_FALSE(fs::exists(folder + ".tmp") || fs::exists(folder + ".old"));
            Shape read;
            ASSERT_EQ(hf_read_config(&read, folder), "");
            expect_same_shape(read, s);
            ASSERT_EQ(hf_load_weights(b->t, folder), "") << shape_name(s);
            expect_same_weights(*a, *b);
        }
}
TEST_F(Files, ExportsLoadToTheSameBits) {
    export_round_trip<float>(dir);
    export_round_trip<bf16>(dir); // of its masters
}

// Half of the last place at most; and what has been rounded once stays as it is.
TEST_F(Files, NarrowExportsRoundToNearestOnce) {
    for (const Shape& s : all_shapes())
        for (Type type : {Type::BF16, Type::F16}) {
            auto a = random_model<float>(s), b = random_model<float>(s, 4),
                 c = random_model<float>(s, 5);
            ASSERT_EQ(hf_export(a->t, dir + "/once", type), "");
            ASSERT_EQ(hf_load_weights(b->t, dir + "/once"), "");
            for (const Parameter& p : a->t.model.parameters) {
                std::vector<float> x = get_weight(a->t, p), y = get_weight(b->t, p);
                for (size_t i = 0; i < x.size(); i++) {
                    double half = type == Type::BF16 ? std::fabs(x[i]) * 0x1p-8
                                                     : std::fabs(x[i]) * 0x1p-11 + 0x1p-25;
                    ASSERT_NEAR(x[i], y[i], half) << p.name;
                }
            }
            ASSERT_EQ(hf_export(b->t, dir + "/twice", type, 2000), "");
            ASSERT_EQ(hf_load_weights(c->t, dir + "/twice"), "");
            expect_same_weights(*b, *c);
            ASSERT_EQ(hf_export(c->t, dir + "/thrice", type), "");
            EXPECT_TRUE(folder_bytes(dir + "/once") == folder_bytes(dir + "/thrice"));
        }
}

// Names, shapes and order of elements as Hugging Face has them, and no row of padding.
TEST_F(Files, ExportsHoldWhatHuggingFaceExpects) {
    typedef std::map<std::string, std::vector<size_t>> Table;
    Table gpt2 = {{"transformer.wte.weight", {61, 12}},
                  {"transformer.wpe.weight", {16, 12}},
                  {"transformer.ln_f.weight", {12}},
                  {"transformer.ln_f.bias", {12}}};
    Table llama = {{"model.embed_tokens.weight", {61, 16}},
                   {"model.norm.weight", {16}},
                   {"lm_head.weight", {61, 16}}};
    Table gpt2_block = {{"ln_1.weight", {12}},
                        {"ln_1.bias", {12}},
                        {"attn.c_attn.weight", {12, 36}},
                        {"attn.c_attn.bias", {36}},
                        {"attn.c_proj.weight", {12, 12}},
                        {"attn.c_proj.bias", {12}},
                        {"ln_2.weight", {12}},
                        {"ln_2.bias", {12}},
                        {"mlp.c_fc.weight", {12, 48}},
                        {"mlp.c_fc.bias", {48}},
                        {"mlp.c_proj.weight", {48, 12}},
                        {"mlp.c_proj.bias", {12}}};
    Table llama_block = {
        {"input_layernorm.weight", {16}},      {"self_attn.q_proj.weight", {16, 16}},
        {"self_attn.k_proj.weight", {8, 16}},  {"self_attn.v_proj.weight", {8, 16}},
        {"self_attn.o_proj.weight", {16, 16}}, {"post_attention_layernorm.weight", {16}},
        {"mlp.gate_proj.weight", {20, 16}},    {"mlp.up_proj.weight", {20, 16}},
        {"mlp.down_proj.weight", {16, 20}}};
    for (std::string l : {"0.", "1."}) {
        for (auto& [name, shape] : gpt2_block) gpt2["transformer.h." + l + name] = shape;
        for (auto& [name, shape] : llama_block) llama["model.layers." + l + name] = shape;
    }
    Table gpt2_untied = gpt2, qwen2 = llama;
    gpt2_untied["lm_head.weight"] = {61, 12};
    for (std::string l : {"0.", "1."})
        for (std::string n : {"q", "k", "v"})
            qwen2["model.layers." + l + "self_attn." + n + "_proj.bias"] = {n == "q" ? 16u : 8u};
    Table qwen2_tied = qwen2;
    qwen2_tied.erase("lm_head.weight");

    std::vector<Shape> shapes = all_shapes();
    std::map<size_t, Table> tables = {{0, gpt2},  {1, gpt2_untied}, {2, llama},
                                      {4, llama}, {6, qwen2},       {7, qwen2_tied}};
    for (auto& [i, table] : tables) {
        auto m = random_model<float>(shapes[i]);
        ASSERT_EQ(hf_export(m->t, dir + "/export", Type::F32), "");
        Golden file(dir + "/export/model.safetensors");
        Table found;
        for (const SafeTensor& t : file.file.tensors) found[t.name] = t.shape;
        EXPECT_EQ(found, table) << shape_name(shapes[i]);
        EXPECT_EQ(file.file.metadata["format"], "pt");
        if (i > 0) continue;
        for (const Parameter& p : m->t.model.parameters) { // Conv1D's are [in, out]
            std::vector<float> in_file = file.floats("transformer." + p.name),
                               own = get_weight(m->t, p);
            bool conv = p.name.rfind("h.", 0) == 0 && p.shape.size() == 2;
            for (size_t i = 0; i < in_file.size(); i++) {
                size_t row = i / p.rows(), col = i % p.rows();
                ASSERT_EQ(in_file[i], own[conv ? col * p.cols() + row : i]) << p.name;
            }
        }
    }
    json config = read_json(dir + "/export/config.json");
    EXPECT_EQ(config["architectures"][0], "Qwen2ForCausalLM");
    EXPECT_EQ(config["torch_dtype"], "float32");
}

// A folder is replaced whole or not at all; nothing of others' is replaced.
TEST_F(Files, ExportsThatFailLeaveTheOlderOne) {
    std::vector<Shape> shapes = all_shapes();
    auto a = random_model<float>(shapes[2]), b = random_model<float>(shapes[2], 4);
    std::string folder = dir + "/export";
    ASSERT_EQ(hf_export(a->t, folder, Type::F32), "");
    auto before = folder_bytes(folder);
    EXPECT_HAS(hf_export(a->t, dir + "/no/such/export", Type::F32), "No such file or directory");
    rlimit saved, small;
    getrlimit(RLIMIT_FSIZE, &saved);
    small = saved, small.rlim_cur = before["model.safetensors"].size() / 2; // a full disk
    auto handler = signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &small);
    std::string wrong = hf_export(b->t, folder, Type::F32);
    setrlimit(RLIMIT_FSIZE, &saved);
    signal(SIGXFSZ, handler);
    EXPECT_HAS(wrong, "cannot be written: File too large");
    EXPECT_TRUE(folder_bytes(folder) == before);
    EXPECT_FALSE(fs::exists(folder + ".tmp"));

    EXPECT_EQ(hf_export_check(shapes[2], folder), "");
    EXPECT_EQ(hf_export_check(shapes[2], dir + "/new"), "");
    put_file(folder + "/thesis.txt", "");
    EXPECT_HAS(hf_export_check(shapes[2], folder), "holds thesis.txt, which is no export of ours");
    Shape alibi = shapes[0], learned = shapes[2];
    alibi.position = Position::ALIBI, learned.position = Position::LEARNED;
    EXPECT_HAS(hf_export_check(alibi, dir + "/new"), "learned positions only");
    EXPECT_HAS(hf_export_check(learned, dir + "/new"), "RoPE only");
}

// ----------------------------------------------------------------------------
// weights of others

// Write a file of these tensors, all of different floats.
static void write_tensors(const std::string& path, const std::vector<TensorSpec>& specs) {
    FileWriter w;
    ASSERT_EQ(writer_open(&w, path, specs, {}), "");
    float next = 0;
    for (const TensorSpec& s : specs) {
        std::vector<float> numbers(s.bytes() / 4);
        for (float& x : numbers) x = ++next;
        writer_put(w, numbers.data(), s.bytes());
    }
    ASSERT_EQ(writer_close(&w), "");
}

static std::vector<TensorSpec> specs_of(const Model& model, const std::string& prefix = "") {
    std::vector<TensorSpec> specs;
    for (const Parameter& p : model.parameters)
        specs.push_back(
            {p.name == "lm_head.weight" ? p.name : prefix + p.name, Type::F32, file_shape(p)});
    return specs;
}

// GPT2Model's names, GPT2LMHeadModel's names, and tensors that older files carry beside the
// parameters.
TEST_F(Files, Gpt2LoadsWithAndWithoutItsPrefix) {
    for (size_t i : {0, 1}) {
        auto a = random_model<float>(all_shapes()[i]), b = random_model<float>(all_shapes()[i], 4);
        write_tensors(dir + "/model.safetensors", specs_of(a->t.model));
        ASSERT_EQ(hf_load_weights(a->t, dir), "");
        auto specs = specs_of(b->t.model, "transformer.");
        specs.push_back({"transformer.h.0.attn.bias", Type::F32, {1, 1, 4, 4}});
        specs.push_back({"transformer.h.1.attn.masked_bias", Type::F32, {1}});
        if (i == 0)
            specs.push_back({"lm_head.weight", Type::F32, {61, 12}}); // tied: the table again
        write_tensors(dir + "/model.safetensors", specs);
        ASSERT_EQ(hf_load_weights(b->t, dir), "");
        expect_same_weights(*a, *b);
        EXPECT_EQ(get_weight(a->t, a->t.model.parameters[0])[13], 14);
    }
}

TEST_F(Files, WrongTensorsAreNamed) {
    std::string file = dir + "/model.safetensors";
    for (size_t which : {0, 1, 2, 7}) {
        Shape s = all_shapes()[which];
        auto m = random_model<float>(s);
        const Model& model = m->t.model;
        auto load = [&](const std::vector<TensorSpec>& specs) {
            write_tensors(file, specs);
            return hf_load_weights(m->t, dir);
        };
        const std::vector<TensorSpec> good = specs_of(model);
        EXPECT_EQ(load(good), "");
        for (const Parameter& p : model.parameters) { // the padding stays zero
            std::vector<float> x = get_weight(m->t, p);
            EXPECT_EQ(std::count(x.begin() + long(p.file_elements()), x.end(), 0.0f),
                      long(p.elements() - p.file_elements()))
                << p.name;
        }
        for (size_t i = 0; i < good.size(); i += i < 4 || i + 3 > good.size() ? 1 : 5) {
            auto specs = good;
            specs.erase(specs.begin() + long(i));
            EXPECT_HAS(load(specs), "tensor " + good[i].name + " is missing");
            specs = good, specs[i].shape.back()++;
            EXPECT_HAS(load(specs), "tensor " + good[i].name + " has the shape " +
                                        shape_text(specs[i].shape) + ", config.json asks for " +
                                        shape_text(good[i].shape));
            specs = good, specs[i].shape.push_back(1);
            EXPECT_HAS(load(specs),
                       " has the shape " + shape_text(specs[i].shape) + ", config.json asks for ");
            write_tensors(file, good);
            std::string bytes = read_file(file), entry = "\"" + good[i].name + "\":{\"dtype\":\"";
            put_file(file, bytes.replace(bytes.find(entry) + entry.size(), 3, "I32"));
            EXPECT_HAS(hf_load_weights(m->t, dir),
                       "tensor " + good[i].name + " is I32; F32, F16, BF16 and F64 can");
        }
        auto specs = good;
        specs[0].shape[0] = 128; // our padding in their file
        EXPECT_HAS(load(specs), "has the shape (128, ");
        specs = good, specs.push_back({"h.7.ln_1.weight", Type::F32, {12}});
        EXPECT_HAS(load(specs), "tensor h.7.ln_1.weight belongs to nothing in this model");
        specs = good, specs.push_back({"transformer." + good[0].name, Type::F32, good[0].shape});
        EXPECT_HAS(load(specs), "belongs to nothing");
        specs = good,
        specs.push_back({"model.layers.0.self_attn.rotary_emb.inv_freq", Type::F32, {2}});
        EXPECT_EQ(load(specs), "");
        if (s.tied) {
            specs.push_back({"lm_head.weight", Type::F32, good[0].shape});
            EXPECT_EQ(load(specs), "");
        }
    }
    Shape turned_shape = gpt2_shape(2, 3, 12, 61, 16); // [out, in] where [in, out] is asked for
    auto m = random_model<float>(turned_shape);
    auto specs = specs_of(m->t.model);
    for (TensorSpec& s : specs)
        if (s.name == "h.0.mlp.c_fc.weight") std::swap(s.shape[0], s.shape[1]);
    write_tensors(file, specs);
    EXPECT_HAS(hf_load_weights(m->t, dir),
               "h.0.mlp.c_fc.weight has the shape (48, 12), config.json asks for (12, 48)");
    fs::resize_file(file, 999);
    EXPECT_HAS(hf_load_weights(m->t, dir), "model.safetensors: ");
    fs::remove(file);
    EXPECT_HAS(hf_load_weights(m->t, dir), "model.safetensors: No such file");
}

TEST_F(Files, WrongShardsAreNamed) {
    auto m = random_model<float>(all_shapes()[0]);
    const std::vector<TensorSpec> all = specs_of(m->t.model);
    std::vector<TensorSpec> first(all.begin(), all.begin() + 5), rest(all.begin() + 5, all.end());
    json map;
    auto index = [&](const json& map) {
        put_file(dir + "/model.safetensors.index.json", json{{"weight_map", map}}.dump());
        return hf_load_weights(m->t, dir);
    };
    auto with = [&](const char* tensor, const json& file) {
        json changed = map;
        changed[tensor] = file;
        return index(changed);
    };
    for (const TensorSpec& t : first) map[t.name] = "a.safetensors";
    for (const TensorSpec& t : rest) map[t.name] = "b.safetensors";
    write_tensors(dir + "/a.safetensors", first);
    write_tensors(dir + "/b.safetensors", rest);
    EXPECT_EQ(index(map), "");
    EXPECT_HAS(with("ln_f.bias", "c.safetensors"), "c.safetensors: No such file");
    EXPECT_HAS(with("ln_f.bias", "a.safetensors"), "ln_f.bias is not in a.safetensors");
    EXPECT_HAS(with("nothing", "a.safetensors"), "nothing is not in a.safetensors");
    for (json file : {json("../a.safetensors"), json("/a.safetensors"), json(3), json(),
                      json({"a.safetensors"})})
        EXPECT_HAS(with("ln_f.bias", file), "ln_f.bias is in no file of this folder");
    for (const char* text : {"", "{", "[]", "{}", "{\"weight_map\":[]}", "{\"weight_map\":null}"}) {
        put_file(dir + "/model.safetensors.index.json", text);
        EXPECT_HAS(hf_load_weights(m->t, dir), "model.safetensors.index.json: has no weight_map");
    }
    rest.push_back(first[0]); // twice
    write_tensors(dir + "/b.safetensors", rest);
    EXPECT_HAS(index(map), "tensor wte.weight is in a.safetensors and again in b.safetensors");
    rest.pop_back(), rest.pop_back();
    write_tensors(dir + "/b.safetensors", rest);
    EXPECT_HAS(index(map), "ln_f.bias is not in b.safetensors");
    map.erase("ln_f.bias");
    EXPECT_HAS(index(map), "tensor ln_f.bias is missing");
    fs::resize_file(dir + "/b.safetensors", 500);
    EXPECT_HAS(index(map), "b.safetensors: ");
    fs::remove(dir + "/a.safetensors");
    EXPECT_HAS(index(map), "a.safetensors: No such file");
}

// ----------------------------------------------------------------------------
// checkpoints

// Weights, masters, moments, and the optimizer's count of steps, whole on every rank.
template <typename T> std::string state_of(const Small<T>& m) {
    std::string state;
    auto append = [&](auto values, const Parameter& p) { // layouts pad the vocabulary as they need
        auto words = values.begin() + long(p.file_elements());
        EXPECT_TRUE(std::all_of(words, values.end(), [](auto x) { return to_acc(x) == 0; }));
        state.append((const char*)values.data(), p.file_elements() * sizeof(values[0]));
    };
    for (const StateTensor& s : state_tensors(m.t, m.t.hyper.adamw))
        append(fetch<acc_t<T>>(m.t, s.data(), *s.p, s.second), *s.p);
    for (const Parameter& p : m.t.model.parameters)
        append(fetch<T>(m.t, {Kind::WEIGHT, p.bucket}, p), p);
    return state + std::to_string(address<const StepScale>(m.t, {Kind::SCALE})->step);
}

struct Loaded {
    std::string wrong;
    CheckpointInfo info;
    std::vector<std::string> notes;
};
template <typename T> Loaded load_checkpoint(Small<T>& m, const std::string& out) {
    Loaded l;
    l.wrong = checkpoint_load(m.t, &l.info, out, &l.notes);
    return l;
}

template <typename T>
void checkpoint_round_trip(const std::string& dir, const Shape& s, bool adamw) {
    SCOPED_TRACE(shape_name(s) + (adamw ? ", adamw" : ", sgd"));
    auto a = random_model<T>(s, 3, adamw), b = random_model<T>(s, 4, adamw);
    auto step = [](Small<T>& m) { run_plan(m.t, 0), m.t.cursor += 2; };
    std::string out = dir + "/out", stale = out + "/step_00000001.tmp";
    fs::remove_all(out);
    fs::create_directories(stale); // what a crash left
    put_file(stale + "/rank_00000.safetensors", "half");
    for (int i = 0; i < 3; i++) step(*a);
    if (adamw) step(*b); // its own moments and count of steps are to go
    ASSERT_TRUE(state_of(*a) != state_of(*b));
    ASSERT_EQ(checkpoint_save(a->t, {3, a->t.cursor, ~0ull, {{"lr", 1}}}, out, 2), "");
    EXPECT_FALSE(fs::exists(stale));
    Loaded l = load_checkpoint(*b, out);
    ASSERT_EQ(l.wrong, "");
    EXPECT_EQ(l.notes, std::vector<std::string>());
    EXPECT_EQ(l.info.step, 3);
    EXPECT_EQ(l.info.cursor, 6u);
    EXPECT_EQ(l.info.seed, ~0ull);
    EXPECT_EQ(l.info.config, (json{{"lr", 1}}));
    EXPECT_TRUE(state_of(*a) == state_of(*b));
    Golden g(out + "/step_00000003/rank_00000.safetensors");
    for (const StateTensor& x : state_tensors(a->t, adamw)) // no padding
        EXPECT_EQ(safetensors_find(g.file, x.name)->elements(), x.p->file_elements()) << x.name;
    EXPECT_EQ(g.file.tensors.size(), a->t.model.parameters.size() * (adamw ? 3 : 1));
    b->t.cursor = l.info.cursor; // and both go on alike
    step(*a), step(*b);
    EXPECT_TRUE(state_of(*a) == state_of(*b));
}

TEST_F(Files, CheckpointsLoadToTheSameBits) {
    for (const Shape& s : all_shapes())
        for (bool adamw : {true, false}) {
            checkpoint_round_trip<float>(dir, s, adamw);
            checkpoint_round_trip<bf16>(dir, s, adamw);
        }
    checkpoint_round_trip<double>(dir, all_shapes()[0], true);
}

TEST_F(Files, CheckpointsOfOtherPrecisionAreNoted) {
    auto a = random_model<bf16>(all_shapes()[0]);
    auto b = random_model<float>(all_shapes()[0], 4);
    ASSERT_EQ(checkpoint_save(a->t, {1, 0, 0, {}}, dir, 1), "");
    Loaded l = load_checkpoint(*b, dir);
    EXPECT_EQ(l.wrong, "");
    EXPECT_EQ(l.notes, (std::vector<std::string>{"the checkpoint was trained in BF16"}));
    expect_same_weights(*a, *b); // float takes the masters
    auto c = random_model<double>(all_shapes()[0]);
    EXPECT_HAS(load_checkpoint(*c, dir).wrong, "param.wte.weight is F32(732), not F64(732)");
    std::string manifest = dir + "/step_00000001/manifest.json";
    json m = read_json(manifest);
    m["threads"] = 99, m["cpu"] = "Another";
    m["crc32"] = manifest_crc(m);
    put_file(manifest, m.dump());
    l = load_checkpoint(*a, dir);
    EXPECT_EQ(l.wrong, "");
    ASSERT_EQ(l.notes.size(), 1u);
    EXPECT_HAS(l.notes[0], "99 threads on Another");
}

TEST_F(Files, KeepRemovesOlderCheckpoints) {
    auto m = random_model<float>(all_shapes()[0]);
    for (int64_t step : {1, 2, 3, 4}) {
        m->t.cursor = uint64_t(step);
        ASSERT_EQ(checkpoint_save(m->t, {step, uint64_t(step), 0, {}}, dir, 2), "");
    }
    EXPECT_EQ(checkpoint_steps(dir), (std::vector<int64_t>{4, 3}));
    for (const char* other :
         {"/step_1", "/step_00000009x", "/step_00000007.tmp.tmp", "/notes"}) // no checkpoints
        fs::create_directories(dir + other);
    EXPECT_EQ(load_checkpoint(*m, dir).info.step, 4);
    ASSERT_EQ(checkpoint_save(m->t, {4, 44, 0, {}}, dir, 2), ""); // again
    EXPECT_EQ(checkpoint_steps(dir), (std::vector<int64_t>{4, 3}));
    EXPECT_EQ(load_checkpoint(*m, dir).info.cursor, 44u);
    ASSERT_EQ(checkpoint_save(m->t, {3, 33, 0, {}}, dir, 1),
              ""); // a run that went back: what is newer stays
    EXPECT_EQ(checkpoint_steps(dir), (std::vector<int64_t>{4, 3}));
    ASSERT_EQ(checkpoint_save(m->t, {10, 10, 0, {}}, dir, 1), "");
    EXPECT_EQ(checkpoint_steps(dir), (std::vector<int64_t>{10}));
    EXPECT_TRUE(fs::exists(dir + "/notes") && fs::exists(dir + "/step_1"));
    EXPECT_HAS(checkpoint_save(m->t, {11, 0, 0, {}}, dir + "/nowhere", 1),
               "cannot be made: No such file");
}

TEST_F(Files, BrokenCheckpointsAreSkippedAndNamed) {
    auto m = random_model<float>(all_shapes()[0]), saved = random_model<float>(all_shapes()[0], 4);
    run_plan(saved->t, 0);
    ASSERT_EQ(checkpoint_save(saved->t, {1, 1, 0, {}}, dir, 5), "");
    std::string older = state_of(*saved);
    run_plan(saved->t, 0);
    ASSERT_EQ(checkpoint_save(saved->t, {2, 2, 0, {}}, dir, 5), "");
    std::string newest = dir + "/step_00000002", file = newest + "/rank_00000.safetensors";
    std::string manifest = newest + "/manifest.json", whole = read_file(file),
                list = read_file(manifest);
    auto falls_back = [&](const std::string& part) {
        SCOPED_TRACE("manifest " + read_file(manifest).substr(0, 2000));
        fill_weights(m->t, 9);
        Loaded l = load_checkpoint(*m, dir);
        EXPECT_EQ(l.wrong, "");
        EXPECT_EQ(l.info.step, 1);
        EXPECT_TRUE(state_of(*m) == older);
        ASSERT_EQ(l.notes.size(), 1u);
        EXPECT_HAS(l.notes[0], newest);
        EXPECT_HAS(l.notes[0], part);
        EXPECT_HAS(l.notes[0], ": skipped");
    };
    for (size_t size : {size_t(0), size_t(7), size_t(1000), whole.size() - 1}) {
        put_file(file, whole.substr(0, size));
        falls_back("is " + std::to_string(size) + " bytes, the manifest says " +
                   std::to_string(whole.size()));
    }
    put_file(file, whole + "x");
    falls_back("is " + std::to_string(whole.size() + 1) + " bytes, the manifest says");
    for (size_t at = 0; at < whole.size(); at += at < 16 ? 1 : whole.size() / 9) {
        std::string flipped = whole;
        flipped[at] ^= char(1 << at % 8);
        put_file(file, flipped), falls_back("its checksum is");
    }
    fs::remove(file), falls_back("rank_00000.safetensors: No such file");
    put_file(file, whole);
    fs::remove(manifest), falls_back("has no manifest.json");
    for (size_t size : {size_t(0), size_t(1), list.size() / 2, list.size() - 3})
        put_file(manifest, list.substr(0, size)), falls_back("manifest.json is broken");
    for (const char* text : {"{}", "[]", "3", "null"})
        put_file(manifest, text), falls_back("manifest.json is broken");
    for (const char* key : {"step", "cursor", "seed", "model", "optimizer", "optimizer_step",
                            "precision", "threads", "cpu", "files"})
        for (json bad : {json(), json(2.5), json({1}), json({{"file", 1}}), json(true)}) {
            json changed = json::parse(list);
            changed[key] = bad;
            if (key == std::string("model") && bad.is_object()) continue; // of another model
            put_file(manifest, changed.dump()), falls_back("manifest.json is broken");
            changed.erase(key);
            put_file(manifest, changed.dump()), falls_back("manifest.json is broken");
        }
    json changed = json::parse(list);
    changed["files"] = json::array(); // nothing to check is nothing whole
    put_file(manifest, changed.dump()), falls_back("manifest.json is broken");
    put_file(manifest, list);
    EXPECT_EQ(load_checkpoint(*m, dir).info.step, 2);
    EXPECT_TRUE(state_of(*m) == state_of(*saved));

    fs::resize_file(file, 10); // all of them
    fs::resize_file(dir + "/step_00000001/rank_00000.safetensors", 10);
    Loaded l = load_checkpoint(*m, dir);
    EXPECT_HAS(l.wrong, dir + ": holds no whole checkpoint (the broken ones are named above)");
    EXPECT_EQ(l.notes.size(), 2u);
    fs::remove_all(newest), fs::remove_all(dir + "/step_00000001");
    EXPECT_HAS(load_checkpoint(*m, dir).wrong, "holds no whole checkpoint: start without --resume");
    EXPECT_HAS(load_checkpoint(*m, dir + "/nowhere").wrong, "holds no whole checkpoint");
}

TEST_F(Files, ACheckpointOfAnotherModelIsRefusedByName) {
    Shape base = all_shapes()[2];
    auto a = random_model<float>(base);
    ASSERT_EQ(checkpoint_save(a->t, {1, 0, 0, {}}, dir, 2), "");
    auto refused = [&](const char* key, const char* theirs, const char* ours, auto change) {
        Shape other = base;
        change(other);
        auto b = random_model<float>(other);
        Loaded l = load_checkpoint(*b, dir);
        EXPECT_HAS(l.wrong, "step_00000001: is of another model");
        EXPECT_HAS(l.wrong, std::string("its ") + key + " is " + theirs + ", this run's " + ours);
        EXPECT_EQ(l.notes.size(), 0u);
    };
    refused("layers", "2", "1", [](Shape& s) { s.L = 1; });
    refused("heads", "4", "2", [](Shape& s) { s.NH = 2; });
    refused("kv_heads", "2", "1", [](Shape& s) { s.NKV = 1; });
    refused("head_size", "4", "6", [](Shape& s) { s.HS = 6; });
    refused("channels", "16", "24", [](Shape& s) { s.C = 24; });
    refused("ffn", "20", "24", [](Shape& s) { s.F = 24; });
    refused("vocab", "61", "62", [](Shape& s) { s.V = 62; });
    refused("positions", "32", "64", [](Shape& s) { s.P = 64; });
    refused("tied", "false", "true", [](Shape& s) { s.tied = true; });
    refused("family", "\"llama\"", "\"mistral\"", [](Shape& s) { s.hf_type = "mistral"; });
    refused("qkv_bias", "false", "true", [](Shape& s) { s.qkv_bias = true; });
    refused("rope_theta", "10000.0", "20000.0", [](Shape& s) { s.rope_theta = 20000; });
    refused("rope_factor", "8.0", "2.0", [](Shape& s) { s.rope_scaling.factor = 2; });
    refused("position", "\"rope\"", "\"alibi\"", [](Shape& s) { s.position = Position::ALIBI; });

    auto sgd = random_model<float>(base, 3, false);
    EXPECT_EQ(load_checkpoint(*sgd, dir).wrong, ""); // leaves the moments
    expect_same_weights(*a, *sgd);
    ASSERT_EQ(checkpoint_save(sgd->t, {2, 0, 0, {}}, dir, 2), "");
    EXPECT_HAS(load_checkpoint(*a, dir).wrong,
               "was trained with sgd and has no moments: go on with --optimizer sgd");
}

// An evaluation has no moments, and takes the weights alone.
TEST_F(Files, AnEvaluationLoadsACheckpointOfTraining) {
    for (bool adamw : {true, false}) {
        auto a = random_model<bf16>(all_shapes()[7], 3, adamw);
        run_plan(a->t, 0);
        ASSERT_EQ(checkpoint_save(a->t, {1, 2, 0, {}}, dir, 2), "");
        Small<bf16> e(all_shapes()[7], {plan_of(Mode::EVALUATE, 1, 16)});
        ASSERT_EQ(address<float>(e.t, {Kind::MOMENTS, 0}), nullptr);
        Loaded l = load_checkpoint(e, dir);
        EXPECT_EQ(l.wrong, "");
        EXPECT_EQ(l.info.cursor, 2u);
        for (const Parameter& p : a->t.model.parameters) {
            const bf16* x = address<bf16>(a->t, {Kind::WEIGHT, p.bucket}) + p.offset;
            const bf16* y = address<bf16>(e.t, {Kind::WEIGHT, p.bucket}) + p.offset;
            EXPECT_EQ(memcmp(x, y, p.elements() * sizeof(bf16)), 0) << p.name;
        }
    }
}

// ----------------------------------------------------------------------------
// checkpoints of many ranks

struct Layout {
    int dp, pp, zero, shards;
    int files; // that a checkpoint has
    int tp = 1;
    int ranks() const { return dp * pp * tp; }
};
static const std::vector<Layout> layouts = {
    {1, 1, 0, 1, 1}, {2, 1, 0, 2, 1},    {2, 1, 1, 2, 2},    {2, 1, 3, 2, 2}, {1, 2, 0, 1, 2},
    {2, 2, 2, 2, 4}, {1, 1, 0, 1, 4, 4}, {2, 1, 3, 2, 4, 2}, {4, 2, 2, 2, 4}}; // groups of two

static std::string layout_name(const Layout& l) {
    return "dp " + std::to_string(l.dp) + " tp " + std::to_string(l.tp) + " pp " +
           std::to_string(l.pp) + " zero " + std::to_string(l.zero) + " groups of " +
           std::to_string(l.shards);
}

// Ranks as threads, each with its part of the same random model: body(model).
template <typename T, typename F>
void on_ranks(const Layout& l, const Shape& s, uint64_t seed, F body) {
    int status = run_local_ranks(l.ranks(), {}, [&](const Comm& world) {
        omp_set_num_threads(1);
        Grid sizes;
        sizes.dp = l.dp, sizes.pp = l.pp, sizes.tp = l.tp;
        Grid me = grid_at(sizes, world.rank);
        Plan p = plan_of(Mode::TRAIN, 1, 16);
        p.micro_batches = 8 / l.dp, p.pp = l.pp, p.pp_rank = me.pp_rank;
        p.shards = l.shards, p.replicas = l.dp / l.shards, p.shard = me.dp_rank % l.shards;
        p.zero = l.zero, p.tp = l.tp, p.tp_rank = me.tp_rank;
        p.first_layer = split_layers(std::vector<double>(s.L + 2, 1.0), p.stages());
        Small<T> m(s, {p});
        m.t.grid = me, m.t.comms = make_comms(world, me, p.shards, ranks_of_kv_head(p, m.t.model));
        fill_weights(m.t, seed);
        m.t.window = squares_window(s.V);
        body(m);
    });
    EXPECT_EQ(status, 0) << layout_name(l);
}

// Parameters are cut by shards, and the vocabulary's padding is.
static std::vector<Shape> shapes_to_cut() {
    Shape llama = llama_shape(2, 4, 2, 64, 64, 61, 32, 10000); // a shard of nothing but padding
    return {gpt2_shape(2, 4, 48, 100, 16), llama};
}

// Load on one rank, two shards, two stages: all say the same, and what is refused changes nothing.
static Loaded load_everywhere(const std::string& out, const Shape& s, bool changes) {
    std::vector<Loaded> said;
    std::mutex mutex;
    for (const Layout& l : {layouts[0], layouts[3], layouts[4]})
        on_ranks<float>(l, s, 4, [&](Small<float>& m) {
            std::string before = state_of(m);
            Loaded now = load_checkpoint(m, out);
            EXPECT_EQ(state_of(m) != before, changes);
            std::lock_guard<std::mutex> lock(mutex);
            said.push_back(now);
        });
    for (const Loaded& l : said) {
        EXPECT_EQ(l.wrong, said[0].wrong);
        if (changes) {
            EXPECT_EQ(l.info.step, said[0].info.step);
            EXPECT_EQ(l.notes.at(0), said[0].notes.at(0));
        }
    }
    return said[0];
}

template <typename T> void save_and_load_in_all_layouts(const std::string& dir, const Shape& s) {
    auto step = [](Small<T>& m) { run_plan(m.t, 0), m.t.cursor += 8; };
    for (const Layout& from : layouts) {
        std::string saved, next, out = dir + "/out";
        fs::remove_all(out), fs::create_directories(out);
        on_ranks<T>(from, s, 3, [&](Small<T>& m) {
            step(m), step(m);
            EXPECT_EQ(checkpoint_save(m.t, {2, m.t.cursor, 7, {}}, out, 1), "");
            std::string state = state_of(m);
            step(m);
            std::string later = state_of(m);
            if (m.t.comms.world.rank == 0) saved = state, next = later;
        });
        EXPECT_EQ(int(folder_bytes(out + "/step_00000002").size()), from.files + 1)
            << layout_name(from);
        for (const Layout& to : layouts)
            on_ranks<T>(to, s, 4, [&](Small<T>& m) {
                SCOPED_TRACE(layout_name(from) + " read by " + layout_name(to));
                Loaded l = load_checkpoint(m, out);
                EXPECT_EQ(l.wrong, "");
                EXPECT_TRUE(l.info.step == 2 && l.info.cursor == 16 && l.info.seed == 7);
                EXPECT_TRUE(state_of(m) == saved);
                if (&from != &to) return;
                m.t.cursor = l.info.cursor;
                step(m);
                EXPECT_TRUE(state_of(m) == next);
            });
    }
}

TEST_F(Files, CheckpointsOfAnyLayoutLoadInAnyOther) {
    save_and_load_in_all_layouts<float>(dir, shapes_to_cut()[0]);
    save_and_load_in_all_layouts<bf16>(dir, shapes_to_cut()[1]);
}

// Shares as two ranks of tensor parallelism would write them, each cut once more at a third.
TEST_F(Files, SharesOfTensorParallelRanksAreReadWhole) {
    Shape s = gpt2_shape(2, 4, 64, 200, 256); // ffn and positions are as many as padded words
    auto a = random_model<float>(s);
    for (const Parameter& p : a->t.model.parameters)
        EXPECT_EQ(p.file_rows, p.name == "wte.weight" ? 200 : p.rows()) << p.name;
    run_plan(a->t, 0);
    ASSERT_EQ(checkpoint_save(a->t, {1, 0, 0, {}}, dir, 1), "");
    std::string folder = dir + "/step_00000001", manifest = folder + "/manifest.json";
    json m = read_json(manifest);
    m["files"] = json::array();
    Model cut_in_two = make_model(s, 2);
    Golden whole(folder + "/rank_00000.safetensors");
    for (int rank = 0; rank < 4; rank++) {
        int tp_rank = rank % 2, third = rank / 2;
        std::vector<TensorSpec> specs;
        std::vector<float> data;
        json ranges;
        for (const StateTensor& x : state_tensors(a->t, true)) {
            std::vector<float> values = whole.floats(x.name), local;
            const Parameter& p = cut_in_two.parameters[size_t(x.p - &a->t.model.parameters[0])];
            bool mine = p.shard.axis >= 0 || tp_rank == 0; // of what both have one writes
            for_each_run(p, tp_rank, 2, [&](size_t, size_t global, size_t n) {
                for (size_t i = global; mine && i < std::min(global + n, values.size()); i++)
                    local.push_back(values[i]);
            });
            size_t cut = local.size() / 3, first = third ? cut : 0,
                   count = third ? local.size() - cut : cut;
            if (count == 0) continue;
            specs.push_back({x.name, Type::F32, {count}});
            ranges[x.name] = {first, count};
            data.insert(data.end(), local.begin() + long(first),
                        local.begin() + long(first + count));
        }
        FileWriter w;
        writer_open(&w, folder + "/" + rank_file(rank), specs, {});
        writer_put(w, data.data(), data.size() * sizeof(float));
        ASSERT_EQ(writer_close(&w), "");
        m["files"].push_back({{"file", rank_file(rank)},
                              {"bytes", w.bytes},
                              {"crc32", w.crc},
                              {"tp", 2},
                              {"tp_rank", tp_rank},
                              {"tensors", ranges}});
    }
    m["crc32"] = manifest_crc(m);
    put_file(manifest, manifest_text(m));
    std::string saved = state_of(*a);
    for (const Layout& l : {layouts[0], layouts[5]})
        on_ranks<float>(l, s, 4, [&](Small<float>& b) {
            EXPECT_EQ(load_checkpoint(b, dir).wrong, "");
            EXPECT_TRUE(state_of(b) == saved) << layout_name(l);
        });
}

TEST_F(Files, ARanksFileThatIsBrokenIsNoticedByAll) {
    Shape s = shapes_to_cut()[0];
    for (int64_t step : {1, 2})
        on_ranks<float>(layouts[3], s, uint64_t(step), [&](Small<float>& m) {
            run_plan(m.t, 0);
            EXPECT_EQ(checkpoint_save(m.t, {step, uint64_t(step), 0, {}}, dir, 5), "");
        });
    std::string folder = dir + "/step_00000002", manifest = folder + "/manifest.json",
                list = read_file(manifest);
    auto falls_back = [&](const std::string& part) {
        Loaded l = load_everywhere(dir, s, true);
        EXPECT_EQ(l.wrong, "");
        EXPECT_EQ(l.info.step, 1);
        EXPECT_HAS(l.notes.at(0), part);
        EXPECT_HAS(l.notes.at(0), ": skipped");
    };
    for (const char* name : {"rank_00000.safetensors", "rank_00001.safetensors"}) {
        std::string file = folder + "/" + name, whole = read_file(file), flipped = whole;
        fs::remove(file), falls_back(std::string(name) + ": No such file");
        put_file(file, whole.substr(0, whole.size() - 1));
        falls_back(std::string(name) + ": is " + std::to_string(whole.size() - 1) + " bytes");
        flipped[flipped.size() - 9] ^= 4;
        put_file(file, flipped), falls_back(std::string(name) + ": its checksum is");
        put_file(file, whole);
    }
    // manifests that are whole and wrong: refused
    auto change_manifest = [&](auto change) {
        json m = json::parse(list);
        change(m["files"]);
        m["crc32"] = manifest_crc(m);
        put_file(manifest, manifest_text(m));
    };
    auto refused = [&](const std::string& part, auto change) {
        change_manifest(change);
        Loaded l = load_everywhere(dir, s, false);
        EXPECT_HAS(l.wrong, folder);
        EXPECT_HAS(l.wrong, part);
        EXPECT_EQ(l.notes.size(), 0u);
    };
    const std::string cut = "m.h.0.mlp.c_fc.weight"; // [0, 6528) is the first rank's, of 9216
    auto range = [&](json& files, int rank) -> json& { return files[rank]["tensors"][cut]; };
    json files = json::parse(list)["files"];
    size_t at = range(files, 1)[0].get<size_t>();
    ASSERT_TRUE(at > 0 && at < 9216);
    ASSERT_EQ(range(files, 0), json({0, at}));
    ASSERT_EQ(range(files, 1), json({at, 9216 - at}));
    std::string where = "tensor " + cut + ": elements ", edge = std::to_string(at);
    refused("are there twice", [&](json& f) { f.push_back(f[1]); });
    refused("are in no file", [&](json& f) { f.erase(1); });
    refused(where + edge + " to 9216 of 9216 are in no file",
            [&](json& f) { f[1]["tensors"].erase(cut); });
    refused(where + "0 to " + edge + " of 9216 are in no file",
            [&](json& f) { f[0]["tensors"].erase(cut); });
    refused(where + std::to_string(at - 1) + " to " + edge + " of 9216 are there twice",
            [&](json& f) { range(f, 1)[0] = at - 1; });
    refused("tensor " + cut + " reaches beyond its parameter",
            [&](json& f) { range(f, 1)[0] = at + 1; });
    refused("tensor " + cut + " reaches beyond its parameter",
            [&](json& f) { range(f, 1)[0] = ~size_t(0); });
    const std::string table = "param.wte.weight"; // 100 of 128 rows are words
    FileWriter w;
    writer_open(&w, folder + "/rank_00002.safetensors", {{table, Type::F32, {10}}}, {});
    writer_put(w, std::vector<float>(10).data(), 40);
    ASSERT_EQ(writer_close(&w), "");
    refused(
        "elements 4800 to 4810 of 4800 are vocabulary padding; to go on from the checkpoint "
        "before, remove " +
            folder,
        [&](json& f) {
            f.push_back({{"file", "rank_00002.safetensors"},
                         {"bytes", w.bytes},
                         {"crc32", w.crc},
                         {"tp", 1},
                         {"tp_rank", 0},
                         {"tensors", {{table, {4800, 10}}}}});
        });
    refused("tensor " + cut + " is F32(" + edge + "), not F32(" + std::to_string(at - 1) + ")",
            [&](json& f) { range(f, 0)[1] = at - 1; });
    const std::string lost = "m.h.1.ln_1.bias";
    refused("rank_00001.safetensors: tensor " + lost + " is missing", [&](json& f) {
        f[1]["tensors"][lost] = f[0]["tensors"][lost], f[0]["tensors"].erase(lost);
    });
    for (json bad : {json(3), json({0}), json({0, -1}), json({0, 1.5}), json({0, 1, 2}), json()}) {
        change_manifest([&](json& f) { range(f, 1) = bad; });
        falls_back("manifest.json is broken");
    }
    for (const char* key : {"file", "bytes", "crc32", "tp", "tp_rank", "tensors"}) {
        change_manifest([&](json& f) { f[1].erase(key); }), falls_back("manifest.json is broken");
        change_manifest([&](json& f) { f[1][key] = -1; }), falls_back("manifest.json is broken");
    }
    change_manifest([&](json& f) { f[1]["tp_rank"] = 1; }), falls_back("manifest.json is broken");
    EXPECT_HAS(load_everywhere(dir + "/nowhere", s, false).wrong, "holds no whole checkpoint");
}

// A full disk: one line, and the checkpoints before it are as they were.
TEST_F(Files, ASaveThatFailsLosesNothing) {
    auto m = random_model<float>(all_shapes()[0]);
    ASSERT_EQ(checkpoint_save(m->t, {1, 1, 0, {}}, dir, 1), "");
    auto before = folder_bytes(dir + "/step_00000001");
    rlimit saved, small;
    getrlimit(RLIMIT_FSIZE, &saved);
    auto handler = signal(SIGXFSZ, SIG_IGN);
    for (size_t bytes : {size_t(0), size_t(100), size_t(20000)}) {
        small = saved, small.rlim_cur = bytes;
        setrlimit(RLIMIT_FSIZE, &small);
        std::string wrong = checkpoint_save(m->t, {2, 2, 0, {}}, dir, 1);
        setrlimit(RLIMIT_FSIZE, &saved);
        EXPECT_HAS(wrong,
                   "cannot be written: File too large; the checkpoints before it are as they were");
        EXPECT_EQ(checkpoint_steps(dir), (std::vector<int64_t>{1}));
        EXPECT_EQ(checkpoint_steps(dir, ".tmp"), std::vector<int64_t>());
        EXPECT_TRUE(folder_bytes(dir + "/step_00000001") == before);
    }
    signal(SIGXFSZ, handler);
}

// A child is killed at each of its writes in turn: what is there afterwards loads to an older or
// the new state.
TEST_F(Files, KilledAtAnyWriteNothingIsLost) {
    Shape s = all_shapes()[0];
    for (const Layout& layout : {layouts[0], layouts[5]}) {
        auto save = [&](int64_t step) {
            on_ranks<float>(layout, s, uint64_t(step), [&](Small<float>& m) {
                EXPECT_EQ(checkpoint_save(m.t, {step, 0, 0, {}}, dir, 5), "");
            });
        };
        save(1);
        size_t largest_file = 0;
        for (const auto& [name, bytes] : folder_bytes(dir + "/step_00000001"))
            largest_file = std::max(largest_file, bytes.size());
        int killed = 0, whole = 0;
        for (size_t limit = 0; limit < largest_file * 11 / 10; limit += largest_file / 23) {
            pid_t child = fork();
            if (child == 0) {
                rlimit r = {limit, limit}; // SIGXFSZ kills the writer at this byte of a file
                setrlimit(RLIMIT_FSIZE, &r);
                save(2);
                _exit(0);
            }
            int status;
            waitpid(child, &status, 0);
            Loaded l = load_checkpoint(*random_model<float>(s), dir);
            ASSERT_EQ(l.wrong, "") << limit;
            EXPECT_EQ(l.info.step, WIFEXITED(status) ? 2 : 1) << limit;
            (WIFEXITED(status) ? whole : killed)++;
            fs::remove_all(dir + "/step_00000002");
        }
        EXPECT_GT(killed, 15);
        EXPECT_GT(whole, 0);
    }
}
