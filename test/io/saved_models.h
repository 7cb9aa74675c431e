// saved_models.h - small models whose files are written and read: shapes of every family, random
// weights, and ways to compare them; for tests of exports, checkpoints and golden files
#pragma once
#include <omp.h>
#include "../../llmc/io/checkpoint_load.h"
#include "../../llmc/io/generate.h"
#include "../../llmc/io/huggingface.h"
#include "../harness/testing.h"
#include "../step/small_models.h"

using namespace llmc;
using nlohmann::json;

// The models are tiny. A team of threads would only wait, and a forked child has no threads.
inline const int one_thread = (omp_set_num_threads(1), 1);

inline json read_json(const std::string& path) { return json::parse(read_file(path)); }

inline Plan plan_of(Mode mode, size_t B, size_t T, size_t cache = 0) {
    Plan p;
    p.mode = mode;
    p.B = B;
    p.T = T;
    p.cache = cache;
    return p;
}

// The logits for the token after a prompt.
template <typename T>
std::vector<float> logits_after(Trainer<T, Cpu>& t, int plan, const std::vector<int>& prompt) {
    generate_batch(t, plan, prompt.data(), prompt.size(), 0);
    run_plan(t, plan);
    const T* logits = address<const T>(t, {Kind::LOGITS, -1, 0});
    return std::vector<float>(logits, logits + t.model.shape.V);
}

// ----------------------------------------------------------------------------
// a safetensors file, open

// Transpose x (rows,cols) into (cols,rows).
inline std::vector<float> transpose(const std::vector<float>& x, size_t rows, size_t cols) {
    std::vector<float> y(rows * cols); // (cols,rows)
    for (size_t i = 0; i < y.size(); i++)
        y[i % cols * rows + i / cols] = x[i];
    return y;
}

struct TensorFile {
    SafeTensors file;
    TensorFile(const std::string& path) { EXPECT_EQ(safetensors_open(&file, path), ""); }
    ~TensorFile() { safetensors_close(&file); }
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
    // gpt-oss' experts: a tensor (E,in,out), whose even outputs are gate's and odd ones up's.
    std::vector<float> of_joined(const std::string& kind, const Parameter& p) const {
        bool gate = has(p.name, "gate_proj"), up = has(p.name, "up_proj");
        std::string name = p.name.substr(0, p.name.find("{}")) +
                           (gate || up ? "gate_up_proj" : "down_proj") +
                           (has(p.name, "bias") ? "_bias" : "");
        std::vector<float> x = floats(kind + name), y;
        size_t in = p.cols(), out = x.size() / p.stack / in;
        for (size_t e = 0; e < p.stack; e++)
            for (size_t o = up; o < out; o += gate || up ? 2 : 1)
                for (size_t i = 0; i < in; i++)
                    y.push_back(x[(e * in + i) * out + o]);
        return y;
    }
    // A tensor that belongs to this parameter, as the trainer holds it: [out, in].
    std::vector<float> of(const std::string& kind, const Parameter& p, const Shape& s) const {
        if (s.hf_type == "gpt_oss" && p.stack > 1) return of_joined(kind, p);

        // Join the matrices of a stack: in the file each is a tensor.
        if (p.stack > 1) {
            std::vector<float> all;
            for (size_t k = 0; k < p.stack; k++) {
                std::vector<float> one = floats(kind + stack_name(p.name, k));
                all.insert(all.end(), one.begin(), one.end());
            }
            return all;
        }

        // Find the tensor, under the family's name or an exported name, and
        // take the parameter's rows.
        HfPlace place = hf_place(s, p);
        std::string name = kind + place.tensor;
        if (!safetensors_find(file, name)) name = kind + hf_name(s, place.tensor);
        std::vector<float> x = floats(name);
        x.erase(x.begin(), x.begin() + long(place.begin));
        x.resize(p.file_elements());

        // Turn it as the trainer holds it.
        if (ordered_by_heads(p)) x = swap_outer(x, s.NH, 3);
        return p.transposed ? transpose(x, p.cols(), p.rows()) : x;
    }
};

// Write a file of another one's tensors, some left out, others cut to fewer rows or columns.
inline void change_file(const TensorFile& from, const std::string& path,
                        const std::function<bool(SafeTensor&)>& keep) {
    std::vector<TensorSpec> specs;
    std::vector<std::vector<float>> values;
    for (SafeTensor t : from.file.tensors) {
        std::vector<float> x = from.floats(t.name);
        if (!keep(t)) continue;
        specs.push_back({t.name, Type::F32, t.shape});
        x.resize(specs.back().bytes() / sizeof(float));
        values.push_back(x);
    }
    FileWriter w;
    writer_open(&w, path, specs, {});
    for (const auto& x : values) writer_put(w, x, Type::F32);
    EXPECT_EQ(writer_close(&w), "");
}

inline double largest(const std::vector<float>& x) {
    double most = 0;
    for (float f : x) most = std::max(most, double(std::fabs(f)));
    return most;
}

// ----------------------------------------------------------------------------
// models

// Every family, tied and untied, with 61 words, which the trainer pads to 128.
inline std::vector<Shape> saved_shapes() {
    Shape gpt2 = gpt2_shape(2, 3, 12, 61, 16), gpt2_untied = gpt2;
    Shape llama = llama_shape(2, 4, 2, 16, 20, 61, 32, 10000), llama_tied = llama, mistral = llama,
          qwen2 = llama;
    gpt2_untied.embedding.tied = false;
    llama.rope.scaling = {8, 1, 4, 16}, llama_tied.embedding.tied = true, llama_tied.HS = 6,
    llama_tied.block.norm_eps = 1e-3f;
    mistral.hf_type = "mistral", mistral.attention.window = 7;
    qwen2.hf_type = "qwen2", qwen2.attention.qkv_bias = true, qwen2.rope.theta = 1e6;

    // Windows, biases, and norms of queries and keys.
    Shape mistral_endless = mistral, qwen2_tied = qwen2, biased = llama, yarn = llama,
          qwen3 = qwen2;
    mistral_endless.attention.window = 0, qwen2_tied.embedding.tied = true;
    qwen2.attention.window = 5, qwen2.attention.full_layers[1] = true;
    qwen3.hf_type = "qwen3", qwen3.block.qk_norm = true, qwen3.attention.qkv_bias = false, qwen3.HS = 6;

    // Experts.
    Shape mixtral = mistral_endless, qwen3_moe = qwen3, olmoe = mistral_endless;
    set_variant(olmoe, "olmoe");
    olmoe.family = Family::MIXTRAL, olmoe.hf_type = "olmoe", olmoe.experts.E = 4, olmoe.experts.K = 2;
    olmoe.experts.router = Router::SOFTMAX;
    mixtral.family = qwen3_moe.family = Family::MIXTRAL;
    mixtral.hf_type = "mixtral", mixtral.experts.E = 3, mixtral.experts.K = 2;
    qwen3_moe.hf_type = "qwen3_moe", qwen3_moe.experts.E = 11, qwen3_moe.experts.K = 3;
    qwen3_moe.experts.router = Router::SOFTMAX;
    Shape qwen2_moe = qwen3_moe; // a dense layer first, then experts beside a shared one
    qwen2_moe.hf_type = "qwen2_moe", qwen2_moe.block.qk_norm = false, qwen2_moe.attention.qkv_bias = true;
    qwen2_moe.attention.window = 0, qwen2_moe.experts.dense_first = 1;
    qwen2_moe.experts.dense_F = 14, qwen2_moe.experts.shared_F = 9, qwen2_moe.experts.shared_gate = true;

    // Biases everywhere, and scalings of RoPE.
    biased.attention.qkv_bias = biased.attention.o_bias = biased.block.mlp_bias = true;
    biased.rope.scaling = {2.5f, 1, 4, 32, RopeKind::LINEAR};
    yarn.rope.scaling = {4, 1, 4, 8, RopeKind::YARN, 8, 0.7f, false, 1.25f};

    // Latent attention, with experts and without.
    LatentSizes sizes = {5, 6, 4, 2, 3};
    Shape latents = llama_shape(2, 4, 4, 16, 0, 61, 32, 10000);
    Shape deepseek = deepseek_shape("deepseek_v2", latents, sizes, 14);
    Shape deepseek_v3 = deepseek_shape("deepseek_v3", latents, {0, 6, 4, 2, 3}, 14);
    deepseek_v3 = with_experts(deepseek_v3, 1, 8, 2, 10, 2);
    deepseek_v3.experts.router = Router::SIGMOID, deepseek_v3.experts.choice_bias = true,
    deepseek_v3.experts.gate_scale = 2.5f;
    deepseek_v3.experts.groups = 4, deepseek_v3.experts.kept_groups = 2;
    Shape deepseek_v2 = with_experts(deepseek, 1, 6, 2, 10, 1);

    // gpt-oss: sinks, biases, a gate of its own, a window in every other block.
    Shape oss = mixtral;
    set_variant(oss, "gpt_oss");
    oss.family = Family::GPT_OSS;
    oss.hf_type = "gpt_oss", oss.attention.qkv_bias = oss.attention.o_bias = true, oss.HS = 6;
    oss.attention.window = 7, see_all_every(oss, 2);
    oss.rope.scaling = yarn.rope.scaling;

    // Collect them, then add the variants of Llama and GPT-NeoX.
    std::vector<Shape> all = {gpt2, gpt2_untied, llama, llama_tied, mistral, mistral_endless,
                              qwen2, qwen2_tied, biased, yarn, qwen3,
                              mixtral, qwen3_moe, olmoe, qwen2_moe,
                              deepseek, deepseek_v2, deepseek_v3, oss};
    for (const char* type : VARIANTS) {
        Shape s = small_variant(mistral_endless, type);
        s.L = 3; // at least one layer of each kind
        all.push_back(s);
    }
    all.push_back(small_neox(2, 3, 24));
    return all;
}

inline std::string shape_name(const Shape& s) {
    return s.hf_type + (s.embedding.tied ? ", tied" : ", untied");
}

// Random weights everywhere: init_weights() leaves norms and biases constant.
template <typename T> void fill_weights(Trainer<T, Cpu>& t, uint64_t seed) {
    for (const Parameter& p : t.model.parameters) {
        std::vector<float> v(p.elements());
        for (size_t i = 0; i < p.file_elements(); i++)
            v[i] = float(normal(seed, fnv1a(p.name), i)) * 0.2f;
        set_weight(t, p, v.data());
    }
}

// Windows of 16 tokens that follow the squares, starting elsewhere in each sample.
inline Window squares_window(size_t V) {
    return [V](uint64_t sample, int* tokens, int* targets) {
        for (uint64_t i = 0; i < 16; i++) {
            tokens[i] = int((sample * 5 + i * i) % V);
            targets[i] = int((sample * 5 + (i + 1) * (i + 1)) % V);
        }
        return std::string();
    };
}

// A model with random weights and a plan to train it.
template <typename T>
std::unique_ptr<Small<T>> random_model(const Shape& s, uint64_t seed = 3, bool adamw = true) {
    Plan plan = plan_of(Mode::TRAIN, 2, 16);
    plan.optimizer = adamw ? Optimizer::ADAMW : Optimizer::SGD;
    auto m = std::make_unique<Small<T>>(s, std::vector<Plan>{plan});
    fill_weights(m->t, seed);
    m->t.data.window = squares_window(s.V);
    return m;
}

template <typename A, typename B> void expect_same_weights(const Small<A>& a, const Small<B>& b) {
    for (const Parameter& p : a.t.model.parameters)
        EXPECT_EQ(get_weight(a.t, p), get_weight(b.t, p))
            << p.name << " of " << shape_name(a.t.model.shape);
}

// A model's whole state, the same on every rank: masters, moments, weights, the loss scale and the
// optimizer's count of steps. Layouts pad the vocabulary differently, so padding is left out.
template <typename T> std::string state_of(const Small<T>& m) {
    std::string state;
    auto append = [&](auto values, const Parameter& p) {
        auto words = values.begin() + long(p.file_elements());
        EXPECT_TRUE(std::all_of(words, values.end(), [](auto x) { return to_acc(x) == 0; }));
        state.append((const char*)values.data(), p.file_elements() * sizeof(values[0]));
    };

    for (const StateTensor& s : state_tensors(m.t))
        append(fetch<acc_t<T>>(m.t, s.data, *s.p), *s.p);
    for (const Parameter& p : m.t.model.parameters)
        append(fetch<T>(m.t, {Kind::WEIGHT, p.bucket}, p), p);

    const StepScale& scale = *address<const StepScale>(m.t, {Kind::SCALE});
    const LossScale& loss = scale.loss;
    std::vector<unsigned char> bytes;
    json late = fp8_history_json(fp8_on_host(m.t, &bytes), m.t.model.shape.fp8.rule);
    return concat(state, late.dump(), scale.step, " ", loss.now, " ", loss.clean, " ", loss.spent,
                  " ", loss.skipped);
}

struct Loaded {
    std::string wrong;
    CheckpointInfo info;
    std::vector<std::string> notes;
};

// Load the newest whole checkpoint of a run's folder.
template <typename T> Loaded load_checkpoint(Small<T>& m, const std::string& out) {
    Loaded l;
    l.wrong = checkpoint_load(m.t, &l.info, out, &l.notes);
    return l;
}
