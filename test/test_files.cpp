// test_files.cpp - models and checkpoints in files: golden numbers from PyTorch, trained checkpoints, round trips to the
// bit, and every malformed input with its one line
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <filesystem>
#include <fstream>
#include "../llmc/checkpoint.h"
#include "../llmc/generate.h"

namespace fs = std::filesystem;
static const std::string ROOT = REPO_ROOT, FIXTURES = ROOT + "/../shared/fixtures";
#define NEEDS_FIXTURES() \
    if (!std::ifstream(FIXTURES + "/README.md")) GTEST_SKIP() << "skipped: no fixtures"
#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << "'" << (text) << "'"

static std::string read_file(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}
static nlohmann::json read_json(const std::string& path) { return nlohmann::json::parse(read_file(path)); }

struct Files : testing::Test {
    std::string dir;
    void SetUp() override {
        dir = testing::TempDir() + "/files_" + std::to_string(getpid()) + testing::UnitTest::GetInstance()->current_test_info()->name();
        fs::remove_all(dir);
        fs::create_directories(dir);
    }
    void TearDown() override { fs::remove_all(dir); }
    std::string write(const std::string& name, const std::string& bytes) {
        fs::create_directories(fs::path(dir + "/" + name).parent_path());
        std::ofstream(dir + "/" + name, std::ios::binary) << bytes;
        return dir + "/" + name;
    }
};

// A trainer with memory, ready for weights.
template <typename T> struct Small {
    Trainer<T, Cpu> t;
    Small(const Shape& s, const std::vector<Plan>& plans) {
        trainer_place(t, s, plans);
        arena_allocate(t.arena);
        init_constants(t);
        t.hyper = {true, 1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.5f};
    }
    ~Small() { arena_free(t.arena); }
    std::vector<float> weight(const std::string& name) {
        for (const Parameter& p : t.model.parameters)
            if (p.name == name) return get_weight(t, p);
        return {};
    }
};

static Plan plan_of(Mode mode, size_t B, size_t T, size_t cache = 0) {
    Plan p;
    p.mode = mode, p.B = B, p.T = T, p.cache = cache;
    return p;
}

// The logits behind a prompt.
template <typename T> std::vector<float> logits_after(Trainer<T, Cpu>& t, int plan, const std::vector<int>& prompt) {
    generate_batch(t, plan, prompt.data(), prompt.size(), 0);
    run_plan(t, plan);
    const float* logits = address<const float>(t, {Kind::LOGITS, -1, 0});
    return {logits, logits + t.model.shape.V};
}

template <typename T> std::vector<int> greedy(Trainer<T, Cpu>& t, int plan, std::vector<int> prompt, size_t count) {
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
    const int* ints(const std::string& name) const { return reinterpret_cast<const int*>(safetensors_find(file, name)->data); }
};

// got (as the trainer holds it, padded) against want (as the file does); relative to the largest
template <typename A> double worst_error(const A* got, std::vector<float> want, const Parameter& p) {
    if (p.transposed) want = turned(want, p.cols(), p.rows());
    double most = 1e-12, worst = 0;
    for (float w : want) most = std::max(most, double(std::fabs(w)));
    for (size_t i = 0; i < want.size(); i++) worst = std::max(worst, std::fabs(double(got[i]) - want[i]) / most);
    return worst;
}

// `eps`: what the arithmetic is off by, relative: 2e-5 for float sums of a few hundred terms through two blocks; in double
// the golden files' own rounding to float, 6e-8
template <typename T> void compare_with_golden(const std::string& name, double eps) {
    std::string folder = ROOT + "/dev/golden/" + name;
    Shape s;
    ASSERT_EQ(hf_read_config(&s, folder), "");
    Golden golden(folder + "/golden.safetensors");
    const size_t B = 3, T_ = 24;
    Small<T> m(s, {plan_of(Mode::TRAIN, B, T_), plan_of(Mode::GENERATE, 1, T_, T_)});
    ASSERT_EQ(hf_load_weights(m.t, folder), "");

    std::vector<float> logits = golden.floats("logits");
    double largest = 0, worst = 0;
    for (float x : logits) largest = std::max(largest, double(std::fabs(x)));
    for (size_t b = 0; b < B; b++)
        for (size_t length : {size_t(1), size_t(7), T_}) {
            std::vector<int> prompt(golden.ints("tokens") + b * T_, golden.ints("tokens") + b * T_ + length);
            std::vector<float> got = logits_after(m.t, 1, prompt);
            for (size_t v = 0; v < s.V; v++) worst = std::max(worst, std::fabs(double(got[v]) - logits[(b * T_ + length - 1) * s.V + v]) / largest);
        }
    EXPECT_LE(worst, eps) << "logits";

    m.t.window = [&](uint64_t sample, int* tokens, int* targets) {
        memcpy(tokens, golden.ints("tokens") + sample * T_, T_ * sizeof(int));
        memcpy(targets, golden.ints("targets") + sample * T_, T_ * sizeof(int));
        return std::string();
    };
    std::vector<float> losses = golden.floats("step_losses");
    for (size_t step = 0; step < 3; step++) {
        run_plan(m.t, 0);
        EXPECT_NEAR(plan_loss(m.t).mean(), losses[step], eps * losses[step]) << "step " << step;
        if (step > 0) continue;
        EXPECT_NEAR(address<const StepScale>(m.t, {Kind::SCALE})->norm, golden.floats("grad_norm")[0], 2 * eps * golden.floats("grad_norm")[0]);
        for (const Parameter& p : m.t.model.parameters) {
            const acc_t<T>* grad = address<const acc_t<T>>(m.t, {Kind::GRAD, p.bucket}) + p.offset;
            EXPECT_LE(worst_error(grad, golden.floats("grad." + export_name(p, s)), p), 5 * eps) << p.name;
        }
    }
    // A step moves a weight by about lr = 1e-3 whatever the size of its gradient: Adam divides by it. Where the
    // gradient is as small as its rounding (GPT-2's key biases have none at all) the sign is chance: those may differ
    // by the three steps, 3e-3; nearly all must not.
    for (const Parameter& p : m.t.model.parameters) {
        std::vector<float> want = golden.floats("after." + export_name(p, s)), got = get_weight(m.t, p);
        if (p.transposed) want = turned(want, p.cols(), p.rows());
        size_t off = 0;
        for (size_t i = 0; i < want.size(); i++) {
            EXPECT_NEAR(got[i], want[i], 6.1e-3) << p.name;
            off += std::fabs(got[i] - want[i]) > 1e-5;
        }
        bool key_bias = p.name.find("c_attn.bias") != std::string::npos || p.name.find("k_proj.bias") != std::string::npos;
        EXPECT_LE(off, key_bias ? want.size() / 2 : want.size() / 50) << p.name;
    }
}

TEST(Golden, Gpt2InFloat) { compare_with_golden<float>("gpt2-tiny", 2e-5); }
TEST(Golden, Gpt2InDouble) { compare_with_golden<double>("gpt2-tiny", 3e-7); }
TEST(Golden, LlamaInFloat) { compare_with_golden<float>("llama-tiny", 2e-5); }
TEST(Golden, LlamaInDouble) { compare_with_golden<double>("llama-tiny", 3e-7); }
TEST(Golden, Qwen2InFloat) { compare_with_golden<float>("qwen2-tiny", 2e-5); }
TEST(Golden, Qwen2InDouble) { compare_with_golden<double>("qwen2-tiny", 3e-7); }

// ----------------------------------------------------------------------------
// trained checkpoints of others

TEST(Fixtures, Stories260kSpeaksItsExpectedText) {
    NEEDS_FIXTURES();
    std::string folder = FIXTURES + "/checkpoints/stories260K";
    Shape s;
    ASSERT_EQ(hf_read_config(&s, folder + "/hf"), "");
    Small<float> m(s, {plan_of(Mode::GENERATE, 1, 1, 256)});
    ASSERT_EQ(hf_load_weights(m.t, folder + "/hf"), "");
    std::vector<int> expected = read_json(folder + "/expected_greedy_ids.json")["ids"].get<std::vector<int>>();
    EXPECT_EQ(greedy(m.t, 0, {1}, expected.size() - 1), expected);
    EXPECT_GE(expected.size(), 200u);
}

// llama2.c's tokenizer: a score a token; the best-scoring neighbours merge until none do.
struct Llama2Tokens {
    std::map<std::string, int> ids;
    std::vector<std::string> pieces;
    std::vector<float> scores;
    explicit Llama2Tokens(const std::string& path) {
        std::string bytes = read_file(path);
        for (size_t at = 4; at + 8 <= bytes.size();) {
            float score;
            int length;
            memcpy(&score, &bytes[at], 4), memcpy(&length, &bytes[at + 4], 4);
            pieces.push_back(bytes.substr(at + 8, size_t(length))), scores.push_back(score);
            ids.insert({pieces.back(), int(pieces.size()) - 1});
            at += 8 + size_t(length);
        }
    }
    std::vector<int> encode(const std::string& text) const {
        std::vector<int> t = {1};
        std::string all = " " + text;
        for (size_t i = 0; i < all.size();) { // characters, or their bytes
            size_t n = 1;
            while (i + n < all.size() && (all[i + n] & 0xc0) == 0x80) n++;
            auto it = ids.find(all.substr(i, n));
            if (it != ids.end()) t.push_back(it->second);
            else
                for (size_t k = 0; k < n; k++) t.push_back(int((unsigned char)all[i + k]) + 3);
            i += n;
        }
        for (;;) {
            float best = -1e10f;
            size_t at = 0;
            int merged = -1;
            for (size_t i = 0; i + 1 < t.size(); i++) {
                auto it = ids.find(pieces[size_t(t[i])] + pieces[size_t(t[i + 1])]);
                if (it != ids.end() && scores[size_t(it->second)] > best) best = scores[size_t(it->second)], at = i, merged = it->second;
            }
            if (merged < 0) return t;
            t[at] = merged;
            t.erase(t.begin() + long(at) + 1);
        }
    }
};

TEST(Fixtures, Stories260kHasItsExpectedLoss) {
    NEEDS_FIXTURES();
    nlohmann::json reference = read_json(FIXTURES + "/checkpoints/stories260K/helper_reference/tinystories_loss.json");
    Llama2Tokens tokenizer(FIXTURES + "/tokenizers/tinystories512/tok512.bin");
    std::string text = read_file(FIXTURES + "/text/tinystories_v2_gpt4_sample_2MiB.txt"), mark = "<|endoftext|>";
    Shape s;
    ASSERT_EQ(hf_read_config(&s, FIXTURES + "/checkpoints/stories260K/hf"), "");
    Small<float> m(s, {plan_of(Mode::EVALUATE, 1, 512)});
    ASSERT_EQ(hf_load_weights(m.t, FIXTURES + "/checkpoints/stories260K/hf"), "");
    double sum = 0;
    int64_t count = 0;
    size_t at = 0;
    for (size_t story = 0; story < reference["per_story"].size(); story++) {
        size_t end = text.find(mark, at), a = text.find_first_not_of(" \n\r\t", at), b = text.find_last_not_of(" \n\r\t", end - 1);
        std::vector<int> ids = tokenizer.encode(text.substr(a, b + 1 - a));
        EXPECT_TRUE(story > 0 || ids == reference["ids_of_story_0"].get<std::vector<int>>());
        at = end + mark.size();
        m.t.window = [&](uint64_t, int* tokens, int* targets) {
            for (size_t i = 0; i < 512; i++) tokens[i] = i < ids.size() ? ids[i] : 0, targets[i] = i + 1 < ids.size() ? ids[i + 1] : -1;
            return std::string();
        };
        run_plan(m.t, 0);
        Loss loss = plan_loss(m.t);
        EXPECT_NEAR(loss.mean(), reference["per_story"][story]["mean_nll"].get<double>(), 1e-5) << "story " << story;
        sum += loss.sum, count += loss.valid;
    }
    EXPECT_EQ(count, reference["total_predictions"].get<int64_t>());
    EXPECT_NEAR(sum / double(count), reference["mean_nll"].get<double>(), 1e-5);
}

TEST_F(Files, TinyRandomGpt2GivesItsExpectedLogits) {
    NEEDS_FIXTURES();
    std::string folder = FIXTURES + "/checkpoints/tiny-random-gpt2";
    nlohmann::json e = read_json(folder + "/expected.json");
    write("config.json", e["config"].dump());
    fs::copy(folder + "/model.safetensors", dir + "/model.safetensors");
    Shape s;
    ASSERT_EQ(hf_read_config(&s, dir), "");
    Small<float> m(s, {plan_of(Mode::GENERATE, 1, 4, 16)});
    ASSERT_EQ(hf_load_weights(m.t, dir), "");
    std::vector<float> all;
    for (int b = 0; b < 2; b++) {
        std::vector<int> ids = e["input_ids"][size_t(b)].get<std::vector<int>>();
        for (size_t length = 1; length <= 4; length++) {
            std::vector<float> logits = logits_after(m.t, 0, {ids.begin(), ids.begin() + long(length)});
            all.insert(all.end(), logits.begin(), logits.end());
        }
        EXPECT_EQ(greedy(m.t, 0, ids, 6), e["greedy_sequences_len10"][size_t(b)].get<std::vector<int>>());
    }
    std::vector<float> sampled = e["sampled_logits_prompt"].get<std::vector<float>>();
    for (size_t i = 0; i < sampled.size(); i++) EXPECT_NEAR(all[i * 200], sampled[i], 1e-5);
}

// ----------------------------------------------------------------------------
// config.json

static std::string config_error(const std::string& dir, const std::string& json) {
    std::ofstream(dir + "/config.json") << json;
    Shape s;
    return hf_read_config(&s, dir);
}

TEST_F(Files, ConfigsOfAllFamiliesAreRead) {
    Shape s;
    EXPECT_EQ(config_error(dir, R"({"model_type":"gpt2","n_embd":12,"n_head":3,"n_layer":2,"vocab_size":7,"n_positions":9,"n_inner":null})"), "");
    hf_read_config(&s, dir);
    EXPECT_EQ(s.F, 48u); EXPECT_EQ(s.P, 9u); EXPECT_TRUE(s.tied);
    std::string llama = R"("hidden_size":16,"num_attention_heads":4,"num_hidden_layers":2,"intermediate_size":20,"vocab_size":9)";
    EXPECT_EQ(config_error(dir, "{\"model_type\":\"llama\"," + llama + R"(,"head_dim":6,"num_key_value_heads":2,"rope_parameters":{"rope_theta":7.0,"rope_type":"default"}})"), "");
    hf_read_config(&s, dir);
    EXPECT_EQ(s.HS, 6u); EXPECT_EQ(s.NKV, 2u); EXPECT_EQ(s.rope_theta, 7.0); EXPECT_FALSE(s.tied);
    EXPECT_EQ(config_error(dir, "{\"model_type\":\"mistral\"," + llama + ",\"sliding_window\":32}"), "");
    hf_read_config(&s, dir);
    EXPECT_EQ(s.sliding_window, 32u); EXPECT_EQ(s.NKV, 4u);
    EXPECT_EQ(config_error(dir, "{\"model_type\":\"qwen2\"," + llama + ",\"sliding_window\":32,\"use_sliding_window\":false}"), "");
    hf_read_config(&s, dir);
    EXPECT_EQ(s.sliding_window, 0u); EXPECT_TRUE(s.qkv_bias);
    auto wrong = [&](const std::string& more) { return config_error(dir, "{\"model_type\":\"llama\"," + llama + more + "}"); };
    EXPECT_HAS(wrong(R"(,"rope_scaling":{"rope_type":"yarn"})"), "rope scaling yarn is not built yet");
    EXPECT_HAS(wrong(R"(,"hidden_act":"gelu")"), "hidden_act \"gelu\" is not built yet");
    EXPECT_HAS(wrong(R"(,"attention_bias":true)"), "attention_bias");
    EXPECT_HAS(wrong(R"(,"num_key_value_heads":3)"), "num_key_value_heads 3 does not divide");
    EXPECT_HAS(wrong(R"(,"num_key_value_heads":0)"), "is 0, which is no size");
    EXPECT_HAS(wrong(R"(,"vocab_size":"many")"), "vocab_size");
    EXPECT_HAS(wrong(R"(,"rope_theta":"x")"), "which is no number");
    EXPECT_HAS(config_error(dir, R"({"model_type":"gpt2","n_embd":10,"n_head":3,"n_layer":2,"vocab_size":7,"n_positions":9})"), "n_head 3 does not divide n_embd 10");
    EXPECT_HAS(config_error(dir, R"({"model_type":"gpt2"})"), "n_embd is missing");
    EXPECT_HAS(config_error(dir, R"({"model_type":"gpt2","n_embd":12,"n_head":3,"n_layer":2,"vocab_size":7,"n_positions":9,"activation_function":"relu"})"), "activation_function");
    EXPECT_HAS(config_error(dir, "[1,2]"), "is no JSON object");
}

// ----------------------------------------------------------------------------
// exports

static Shape shape_of(int i) {
    Shape gpt2 = gpt2_shape(2, 3, 12, 61, 16), llama = llama_shape(2, 4, 2, 16, 20, 61, 32, 10000), qwen = llama;
    qwen.hf_type = "qwen2", qwen.qkv_bias = true, qwen.tied = true, llama.rope_scaling = {8, 1, 4, 16};
    Shape untied = gpt2;
    untied.tied = false;
    return std::vector<Shape>{gpt2, untied, llama, qwen}[size_t(i)];
}

template <typename T> std::unique_ptr<Small<T>> random_model(const Shape& s, uint64_t seed = 3, bool adamw = true) {
    Plan p = plan_of(Mode::TRAIN, 2, 16);
    p.adamw = adamw;
    auto m = std::make_unique<Small<T>>(s, std::vector<Plan>{p});
    m->t.hyper.adamw = adamw;
    init_weights(m->t, seed);
    for (const Parameter& p : m->t.model.parameters) { // vectors too
        std::vector<float> v(p.elements());
        for (size_t i = 0; i < p.file_elements(); i++) v[i] = float(normal(seed, fnv1a(p.name), i));
        set_weight(m->t, p, v.data());
    }
    m->t.window = [V = s.V](uint64_t sample, int* tokens, int* targets) {
        for (int i = 0; i < 16; i++) tokens[i] = int((sample * 5 + uint64_t(i)) % V), targets[i] = int((sample * 5 + uint64_t(i) + 1) % V);
        return std::string();
    };
    return m;
}

TEST_F(Files, ExportsLoadToTheSameBits) {
    for (int i = 0; i < 4; i++)
        for (size_t shard_bytes : {size_t(5) << 30, size_t(3000)}) {
            std::string folder = dir + "/export" + std::to_string(i);
            auto a = random_model<bf16>(shape_of(i)), b = random_model<bf16>(shape_of(i), 4);
            ASSERT_EQ(hf_export(a->t, folder, Type::F32, shard_bytes), "");
            EXPECT_EQ(fs::exists(folder + "/model.safetensors.index.json"), shard_bytes == 3000);
            Shape s;
            ASSERT_EQ(hf_read_config(&s, folder), "");
            EXPECT_EQ(model_identity(s), model_identity(shape_of(i)));
            ASSERT_EQ(hf_load_weights(b->t, folder), "");
            for (const Parameter& p : a->t.model.parameters) EXPECT_EQ(get_weight(a->t, p), get_weight(b->t, p)) << p.name;
            HfFiles files; // the vocabulary's padding is not in the file
            ASSERT_EQ(hf_open_files(&files, folder), "");
            for (const SafeTensors& f : files.files)
                for (const SafeTensor& t : f.tensors) EXPECT_NE(t.shape[0], 128u) << t.name;
        }
}

TEST_F(Files, NarrowExportsRoundToNearest) {
    auto a = random_model<float>(shape_of(0)), b = random_model<float>(shape_of(0), 4);
    for (Type type : {Type::BF16, Type::F16}) {
        ASSERT_EQ(hf_export(a->t, dir + "/narrow", type), "");
        ASSERT_EQ(hf_load_weights(b->t, dir + "/narrow"), "");
        for (const Parameter& p : a->t.model.parameters) {
            std::vector<float> x = get_weight(a->t, p), y = get_weight(b->t, p);
            for (size_t i = 0; i < x.size(); i++) EXPECT_NEAR(x[i], y[i], std::fabs(x[i]) * (type == Type::BF16 ? 0x1p-8 : 0x1p-11) + 1e-7);
        }
    }
}

// Write a file of zeros with these tensors.
static void write_tensors(const std::string& path, const std::vector<TensorSpec>& specs) {
    SafeTensorsWriter w;
    ASSERT_EQ(writer_open(&w, path, specs, {}), "");
    for (const TensorSpec& s : specs) {
        std::vector<char> zeros(s.bytes());
        writer_put(w, zeros.data(), zeros.size());
    }
    ASSERT_EQ(writer_close(&w), "");
}

TEST_F(Files, WrongTensorsAreNamed) {
    auto m = random_model<float>(shape_of(0));
    std::vector<TensorSpec> good;
    for (const Parameter& p : m->t.model.parameters) good.push_back({p.name, Type::F32, file_shape(p)});
    std::string file = dir + "/model.safetensors";
    auto load = [&](std::vector<TensorSpec> specs) {
        write_tensors(file, specs);
        return hf_load_weights(m->t, dir);
    };
    EXPECT_EQ(load(good), ""); // names without "transformer." as well
    auto specs = good;
    specs.pop_back();
    EXPECT_HAS(load(specs), "tensor ln_f.bias is missing");
    specs = good, specs[0].shape = {61, 13};
    EXPECT_HAS(load(specs), "tensor wte.weight has the shape (61, 13), config.json asks for (61, 12)");
    specs = good, specs.push_back({"h.7.ln_1.weight", Type::F32, {12}});
    EXPECT_HAS(load(specs), "tensor h.7.ln_1.weight belongs to nothing");
    specs = good, specs.push_back({"h.0.attn.bias", Type::F32, {4}}), specs.push_back({"lm_head.weight", Type::F32, {61, 12}});
    EXPECT_EQ(load(specs), "");
    load(good);
    std::string bytes = read_file(file);
    for (size_t at; (at = bytes.find("\"F32\"")) != std::string::npos;) bytes.replace(at, 5, "\"I32\"");
    std::ofstream(file, std::ios::binary) << bytes;
    EXPECT_HAS(hf_load_weights(m->t, dir), "is I32; F32, F16, BF16 and F64 can be read");

    fs::remove(file); // shards
    EXPECT_HAS(hf_load_weights(m->t, dir), "model.safetensors: No such file");
    write_tensors(dir + "/a.safetensors", good);
    write_tensors(dir + "/b.safetensors", {good[0]});
    nlohmann::json map;
    for (const TensorSpec& t : good) map[t.name] = "a.safetensors";
    auto index = [&] {
        std::ofstream(dir + "/model.safetensors.index.json") << nlohmann::json{{"weight_map", map}};
        return hf_load_weights(m->t, dir);
    };
    EXPECT_EQ(index(), "");
    map["ln_f.bias"] = "b.safetensors";
    EXPECT_HAS(index(), "is in a.safetensors and again in b.safetensors");
    map["ln_f.bias"] = "c.safetensors";
    EXPECT_HAS(index(), "c.safetensors: No such file");
    map["ln_f.bias"] = "../a.safetensors";
    EXPECT_HAS(index(), "is in no file of this folder");
    map["ln_f.bias"] = "a.safetensors", map["nothing"] = "a.safetensors";
    EXPECT_HAS(index(), "nothing is not in a.safetensors");
}

// ----------------------------------------------------------------------------
// checkpoints

template <typename T> std::string state_of(Small<T>& m) {
    std::string state;
    for (const StateTensor& s : state_tensors(m.t, m.t.hyper.adamw)) state.append((const char*)state_address(m.t, s), s.p->elements() * sizeof(acc_t<T>));
    for (const Parameter& p : m.t.model.parameters) state.append((const char*)(address<T>(m.t, {Kind::WEIGHT, p.bucket}) + p.offset), p.elements() * sizeof(T));
    return state;
}

template <typename T> void checkpoint_round_trip(const std::string& dir, int shape, bool adamw) {
    auto a = random_model<T>(shape_of(shape), 3, adamw), b = random_model<T>(shape_of(shape), 4, adamw);
    for (int i = 0; i < 3; i++) run_plan(a->t, 0), a->t.cursor += 2;
    std::string out = dir + "/" + std::to_string(sizeof(T)) + std::to_string(shape) + std::to_string(adamw);
    fs::create_directories(out + "/step_00000001.tmp"); // what a crash left
    ASSERT_EQ(checkpoint_save(a->t, {3, 6, 77, {{"lr", 1}}}, out, 2), "");
    EXPECT_FALSE(fs::exists(out + "/step_00000001.tmp"));
    CheckpointInfo info;
    std::vector<std::string> notes;
    ASSERT_EQ(checkpoint_load(b->t, &info, out, &notes), "");
    EXPECT_EQ(notes.size(), 0u);
    EXPECT_EQ(info.step, 3); EXPECT_EQ(info.cursor, 6u); EXPECT_EQ(info.seed, 77u); EXPECT_EQ(info.config["lr"], 1);
    EXPECT_EQ(state_of(*a), state_of(*b));
    b->t.cursor = info.cursor; // and both go on alike
    run_plan(a->t, 0), run_plan(b->t, 0);
    EXPECT_EQ(state_of(*a), state_of(*b));
}

TEST_F(Files, CheckpointsLoadToTheSameBits) {
    for (int shape = 0; shape < 4; shape++) checkpoint_round_trip<float>(dir, shape, true), checkpoint_round_trip<bf16>(dir, shape, true);
    checkpoint_round_trip<bf16>(dir, 2, false);
}

TEST_F(Files, KeepRemovesOlderCheckpoints) {
    auto m = random_model<float>(shape_of(0));
    for (int64_t step : {1, 2, 3, 4}) ASSERT_EQ(checkpoint_save(m->t, {step, 0, 0, {}}, dir, 2), "");
    EXPECT_EQ(checkpoint_steps(dir), (std::vector<int64_t>{4, 3}));
}

TEST_F(Files, BrokenCheckpointsAreSkippedAndNamed) {
    auto m = random_model<float>(shape_of(0));
    for (int64_t step : {1, 2}) ASSERT_EQ(checkpoint_save(m->t, {step, uint64_t(step), 0, {}}, dir, 5), "");
    std::string file = dir + "/step_00000002/rank_00000.safetensors", manifest = dir + "/step_00000002/manifest.json", whole = read_file(file), list = read_file(manifest);
    auto load = [&](const char* part) {
        CheckpointInfo info;
        std::vector<std::string> notes;
        EXPECT_EQ(checkpoint_load(m->t, &info, dir, &notes), "");
        EXPECT_EQ(info.step, 1);
        EXPECT_HAS(notes.empty() ? std::string() : notes[0], part);
    };
    auto put = [](const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; };
    put(file, whole.substr(0, 1000)), load("is 1000 bytes, the manifest says");
    for (size_t at : {size_t(3), whole.size() / 2, whole.size() - 1}) {
        std::string flipped = whole;
        flipped[at] ^= 4;
        put(file, flipped), load("its checksum is");
    }
    fs::remove(file), load("rank_00000.safetensors: No such file");
    put(file, whole), put(manifest, list.substr(0, list.size() / 2)), load("manifest.json is broken");
    put(manifest, "{}"), load("manifest.json is broken");
    fs::remove(manifest), load("has no manifest.json");
    fs::remove_all(dir + "/step_00000001");
    CheckpointInfo info;
    std::vector<std::string> notes;
    EXPECT_HAS(checkpoint_load(m->t, &info, dir, &notes), "holds no whole checkpoint");
}

TEST_F(Files, ACheckpointOfAnotherModelIsRefusedByName) {
    auto a = random_model<float>(shape_of(0));
    ASSERT_EQ(checkpoint_save(a->t, {1, 0, 0, {}}, dir, 2), "");
    Shape other = shape_of(0);
    other.L = 1;
    auto b = random_model<float>(other);
    CheckpointInfo info;
    std::vector<std::string> notes;
    EXPECT_HAS(checkpoint_load(b->t, &info, dir, &notes), "its layers is 2, this run's 1");
    a->t.hyper.adamw = false;
    ASSERT_EQ(checkpoint_save(a->t, {2, 0, 0, {}}, dir, 2), "");
    EXPECT_HAS(checkpoint_load(a->t, &info, dir, &notes), "go on with --optimizer sgd");
    // an evaluation has no moments, and takes the weights alone
    Small<float> e(shape_of(0), {plan_of(Mode::EVALUATE, 1, 16)});
    ASSERT_EQ(checkpoint_load(e.t, &info, dir, &notes), "");
    EXPECT_EQ(e.weight("wte.weight"), a->weight("wte.weight"));
}

// A child is killed at each of its writes in turn: what is there afterwards loads to an older or the new state.
TEST_F(Files, KilledAtAnyWriteNothingIsLost) {
    auto m = random_model<float>(shape_of(0));
    ASSERT_EQ(checkpoint_save(m->t, {1, 1, 0, {}}, dir, 5), "");
    size_t total = 0;
    for (const fs::directory_entry& e : fs::directory_iterator(dir + "/step_00000001")) total += e.file_size();
    omp_set_num_threads(1); // a forked child has no OpenMP team
    for (size_t limit = 0; limit <= total; limit += total / 23) {
        pid_t child = fork();
        if (child == 0) {
            rlimit r = {limit, limit}; // SIGXFSZ kills the writer at this byte of a file
            setrlimit(RLIMIT_FSIZE, &r);
            checkpoint_save(m->t, {2, 2, 0, {}}, dir, 5);
            _exit(0);
        }
        int status;
        waitpid(child, &status, 0);
        CheckpointInfo info;
        std::vector<std::string> notes;
        ASSERT_EQ(checkpoint_load(m->t, &info, dir, &notes), "") << limit;
        EXPECT_EQ(info.step, WIFEXITED(status) ? 2 : 1) << limit;
        fs::remove_all(dir + "/step_00000002");
    }
}
