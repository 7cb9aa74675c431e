// test_golden.cpp - golden numbers from PyTorch: logits, losses, gradients, from their own files
#include "../../llmc/tune/adapter_files.h"
#include "../../llmc/tune/prefix_files.h"
#include "saved_models.h"

// ----------------------------------------------------------------------------
// golden numbers from PyTorch, in float and in double

// The bounds. In double nothing remains but the golden files' own rounding to float,
// which is 6e-8 of a value.
struct Bounds {
    double loss;      // absolute
    double logits;    // relative to the largest
    double gradients; // relative to the tensor's largest, and to the norm
    double weights;   // absolute, after three steps
    // Adam divides a gradient by its size. Where a gradient is smaller than this, relative to its
    // tensor's largest, rounding in float may turn its sign. Such a weight may be off by `steps`,
    // which is the learning rate.
    double near_zero;
    double steps;
};
static const Bounds IN_FLOAT = {1e-5, 1e-4, 1e-4, 1e-5, 1e-3, 1e-3},
                    IN_DOUBLE = {1e-6, 1e-6, 1e-6, 1e-6, 0, 0};

// The text of a folder of golden numbers: samples of N tokens, one after the other.
static Window text_window(const std::string& folder, size_t N) {
    TensorFile text(folder + "/golden.safetensors");
    return [tokens = text.ints("tokens"), targets = text.ints("targets"),
            N](uint64_t sample, int* to, int* goal) {
        memcpy(to, tokens.data() + sample * N, N * sizeof(int));
        memcpy(goal, targets.data() + sample * N, N * sizeof(int));
        return std::string();
    };
}

// Hold a model against PyTorch's numbers: logits of each prefix, the losses of three steps, the
// first gradients, and the weights after the steps.
template <typename T> void compare_with_golden(const std::string& name, Bounds bounds) {
    std::string folder = ROOT + "/dev/golden/" + name;
    Shape s;
    ASSERT_EQ(hf_read_config(&s, folder), "");
    TensorFile golden(folder + "/golden.safetensors");
    std::vector<int> golden_tokens = golden.ints("tokens");
    const size_t B = 3, N = 24;
    ASSERT_EQ(golden_tokens.size(), B * N);
    ASSERT_EQ(golden.ints("targets").size(), B * N);
    Small<T> m(s, {plan_of(Mode::TRAIN, B, N), plan_of(Mode::GENERATE, 1, N, N)});
    ASSERT_EQ(hf_load_weights(m.t, folder), "");

    // The logits after each prefix of each row.
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

    // Three steps, the first of which also has its norm and gradients compared.
    m.t.data.window = text_window(folder, N);
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

    // The weights. Few may need the excuse of a gradient near zero.
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

        // GPT-2's key biases, a third of c_attn's, have no gradient at all: they change all scores
        // of a query by the same amount, which softmax does not see.
        bool key_bias = has(p.name, "c_attn.bias") || has(p.name, "query_key_value.bias");
        EXPECT_LE(excused, want.size() / (key_bias ? 3 : 50)) << p.name;
    }
}

TEST(Golden, Gpt2InFloat) { compare_with_golden<float>("gpt2-tiny", IN_FLOAT); }
TEST(Golden, Gpt2InDouble) { compare_with_golden<double>("gpt2-tiny", IN_DOUBLE); }
TEST(Golden, LlamaInFloat) { compare_with_golden<float>("llama-tiny", IN_FLOAT); }
TEST(Golden, LlamaInDouble) { compare_with_golden<double>("llama-tiny", IN_DOUBLE); }
TEST(Golden, Qwen2InDouble) { compare_with_golden<double>("qwen2-tiny", IN_DOUBLE); }
TEST(Golden, Qwen3InDouble) { compare_with_golden<double>("qwen3-tiny", IN_DOUBLE); }
TEST(Golden, Olmo2InDouble) { compare_with_golden<double>("olmo2-tiny", IN_DOUBLE); }
TEST(Golden, Olmo3InDouble) { compare_with_golden<double>("olmo3-tiny", IN_DOUBLE); }
TEST(Golden, SmolLm3InDouble) { compare_with_golden<double>("smollm3-tiny", IN_DOUBLE); }
TEST(Golden, Phi3InDouble) { compare_with_golden<double>("phi3-tiny", IN_DOUBLE); }
TEST(Golden, Gemma2InDouble) { compare_with_golden<double>("gemma2-tiny", IN_DOUBLE); }
TEST(Golden, Track3InFloat) { compare_with_golden<float>("track3-tiny", IN_FLOAT); }
TEST(Golden, Track3InDouble) { compare_with_golden<double>("track3-tiny", IN_DOUBLE); }
TEST(Golden, NanochatInFloat) { compare_with_golden<float>("nanochat-tiny", IN_FLOAT); }
TEST(Golden, NanochatInDouble) { compare_with_golden<double>("nanochat-tiny", IN_DOUBLE); }
TEST(Golden, ValuesInFloat) { compare_with_golden<float>("nanochat_values-tiny", IN_FLOAT); }
TEST(Golden, ValuesInDouble) { compare_with_golden<double>("nanochat_values-tiny", IN_DOUBLE); }

// These have no class of transformers to compare with: their loss and the norm of their gradient in
// all digits that track3_golden.py prints. Sums of a thousand terms leave 1e-13.
TEST(Golden, Track3AndNanochatToTheLastDigits) {
    struct Row {
        const char* name;
        double loss, norm;
    };
    for (const Row& row : {Row{"track3-tiny", 4.300939669894535, 1.239744686890151},
                           Row{"nanochat-tiny", 4.281393454286309, 1.187026157089887},
                           Row{"nanochat_values-tiny", 4.186722268118541, 1.706709292122921}}) {
        std::string folder = ROOT + "/dev/golden/" + row.name;
        Shape s;
        ASSERT_EQ(hf_read_config(&s, folder), "");

        // Run one step.
        Small<double> m(s, {plan_of(Mode::TRAIN, 3, 24)});
        ASSERT_EQ(hf_load_weights(m.t, folder), "");
        m.t.data.window = text_window(folder, 24);
        run_plan(m.t, 0);
        EXPECT_NEAR(plan_loss(m.t).mean(), row.loss, 1e-11) << row.name;
        EXPECT_NEAR(address<const StepScale>(m.t, {Kind::SCALE})->norm, row.norm, 1e-11);
    }
}

TEST(Golden, NeoxInFloat) { compare_with_golden<float>("gpt-neox-tiny", IN_FLOAT); }
TEST(Golden, NeoxInDouble) { compare_with_golden<double>("gpt-neox-tiny", IN_DOUBLE); }
TEST(Golden, Gemma3InDouble) { compare_with_golden<double>("gemma3-tiny", IN_DOUBLE); }
TEST(Golden, MixtralInFloat) { compare_with_golden<float>("mixtral-tiny", IN_FLOAT); }
TEST(Golden, MixtralInDouble) { compare_with_golden<double>("mixtral-tiny", IN_DOUBLE); }
TEST(Golden, Qwen3MoeInDouble) { compare_with_golden<double>("qwen3-moe-tiny", IN_DOUBLE); }
TEST(Golden, OlmoeInDouble) { compare_with_golden<double>("olmoe-tiny", IN_DOUBLE); }
TEST(Golden, DeepseekV2InDouble) { compare_with_golden<double>("deepseek-v2-tiny", IN_DOUBLE); }
TEST(Golden, DeepseekV3InDouble) { compare_with_golden<double>("deepseek-v3-tiny", IN_DOUBLE); }
TEST(Golden, DeepseekV3InFloat) { compare_with_golden<float>("deepseek-v3-tiny", IN_FLOAT); }
TEST(Golden, GptOssInFloat) { compare_with_golden<float>("gpt-oss-tiny", IN_FLOAT); }
TEST(Golden, GptOssInDouble) { compare_with_golden<double>("gpt-oss-tiny", IN_DOUBLE); }
TEST(Golden, Qwen2MoeInDouble) { compare_with_golden<double>("qwen2-moe-tiny", IN_DOUBLE); }

// Experts with a capacity: loss, dropped share and gradients are those of transformers' models, in
// which every expert computes every token and a table of gates is zero where a choice is dropped.
// Both sides compute in double: 1e-10 is far above their rounding, and far below one choice.
TEST(Golden, ExpertCapacityInDouble) {
    json golden = read_json(ROOT + "/dev/golden/capacity.json");
    ASSERT_EQ(golden.size(), 2u);
    for (const auto& [name, want] : golden.items()) {
        // Read the model and its text.
        std::string folder = ROOT + "/dev/golden/" + name;
        Shape s;
        ASSERT_EQ(hf_read_config(&s, folder), "");
        s.experts.capacity.factor = want["factor"].get<double>();
        const size_t B = 3, N = 24;
        Small<double> m(s, {plan_of(Mode::TRAIN, B, N)});
        ASSERT_EQ(hf_load_weights(m.t, folder), "");
        m.t.data.window = text_window(folder, N);

        // Take a step, and compare.
        run_plan(m.t, 0);
        EXPECT_NEAR(plan_loss(m.t).mean(), want["loss"].get<double>(), 1e-10);
        EXPECT_NEAR(dropped_share(m.t, step_loads(m.t)), want["dropped"].get<double>(), 1e-15);
        for (const Parameter& p : m.t.model.parameters) {
            const double* grad = address<double>(m.t, {Kind::GRAD, p.bucket}) + p.offset;
            double squares = std::inner_product(grad, grad + p.elements(), grad, 0.0);
            double there = want["squares"][p.name].get<double>();
            EXPECT_NEAR(squares, there, 1e-10 * std::max(there, 1e-6)) << p.name;
        }
    }
}

// ----------------------------------------------------------------------------
// losses of preferences and rewards, by TRL's own trainers in double

// The answers of dev/golden/trl.json as rows: a window holds two answers, and before each of them a
// question of one row.
struct TrlRows {
    static const size_t T = 16, N = 3 * T;
    std::vector<double> losses = std::vector<double>(N);
    std::vector<int> targets = std::vector<int>(N, -1), starts = targets;
    std::vector<float> feedback = std::vector<float>(N), reference = feedback, old = feedback;
    std::vector<size_t> rows; // of the answers' tokens, in the file's order
    std::vector<double> out = std::vector<double>(5 * N, 7);

    // Place the answers. An advantage stands in place of the mark of a rejected answer.
    TrlRows(const json& golden, bool advantages) {
        for (size_t a = 0; a < 6; a++) {
            size_t own = a % 2 ? rows.back() + 1 : a / 2 * T;
            size_t length = golden["lengths"][a].get<size_t>();
            float mark = advantages ? golden["advantages"][a].get<float>() : float(a % 2);
            for (size_t i = own; i <= own + length; i++) {
                starts[i] = int(own % T);
                feedback[i] = mark;
                if (i > own) rows.push_back(i);
            }
            // Padding behind the second answer is a document of its own.
            for (size_t i = rows.back() + 1; i < (a / 2 + 1) * T; i++)
                starts[i] = int(rows.back() + 1 - a / 2 * T);
        }

        // Give each token its numbers.
        for (size_t i = 0; i < rows.size(); i++) {
            targets[rows[i]] = 3;
            losses[rows[i]] = -golden["policy"][i].get<double>();
            reference[rows[i]] = golden["reference"][i].get<float>();
            old[rows[i]] = golden["old"][i].get<float>();
        }
    }

    // Compute the objective of all rows. Returns the number that its loss is a mean over.
    double run(Objective o) {
        ObjectiveRows<double> x = {&out[0], &out[N], &out[2 * N], &out[3 * N], &losses[0],
                                   &targets[0], &starts[0], &feedback[0], &reference[0], T};
        x.old = &old[0];
        x.clipped = &out[4 * N];
        objective<double>(x, o, N, Cpu{});

        // Count tokens for sampled answers, else pairs or answers.
        if (!o.pairs()) return double(rows.size());
        int64_t pairs = 0;
        for (size_t n = 0; n < N; n += T)
            pairs += count_pairs(&targets[n], &starts[n], &feedback[n], T, o.kind);
        return double(pairs);
    }

    // The sum of one output. which: 1 the value, 2 the margin.
    double sum(size_t which) const {
        return std::accumulate(&out[which * N], &out[(which + 1) * N], 0.0);
    }
};

// Losses and their derivatives by each token's log p. Both sides compute in double, numbers up to
// some 30 from two dozen terms; 1e-12 is a hundred times their rounding.
TEST(Trl, LossesAndGradientsOfTheSameLogProbabilities) {
    json golden = read_json(ROOT + "/dev/golden/trl.json");
    Objective with_kl = {LossKind::GRPO, 0.3}, without = {LossKind::GRPO, 0};
    Objective clipped = without, clipped_with_kl = with_kl;
    for (Objective* o : {&clipped, &clipped_with_kl}) {
        o->old_policy = true;
        o->clip_high = 0.28;
    }
    const std::vector<std::pair<const char*, Objective>> cases = {
        {"dpo", {LossKind::DPO, 0.1}}, {"cdpo", {LossKind::DPO, 0.1, 0.1}},
        {"ipo", {LossKind::IPO, 0.1}}, {"simpo", {LossKind::SIMPO, 2, 0, 0.5}},
        {"orpo", {LossKind::ORPO, 0.3}}, {"kto", {LossKind::KTO, 0.1, 0, 0, 1.25, 0.5}},
        {"kto at 0", {LossKind::KTO, 0.1, 0, 0, 1.25, 0.5}}, {"grpo", without},
        {"grpo with kl", with_kl}, {"grpo clipped", clipped},
        {"grpo clipped with kl", clipped_with_kl}};
    ASSERT_EQ(golden["cases"].size(), cases.size());
    for (const auto& [name, o] : cases) {
        SCOPED_TRACE(name);
        const json& want = golden["cases"][name];
        TrlRows x(golden, o.kind == LossKind::GRPO);
        // KTO's reference point stands in the last row of each window.
        if (o.kind == LossKind::KTO)
            for (size_t n = x.T - 1; n < x.N; n += x.T)
                x.reference[n] = golden["kto"][std::string(name) == "kto at 0"].get<float>();
        double count = x.run(o);

        // The first update of a rollout has TRL's gradient and another value: -a log p, where TRL
        // has -a. TRL's two cases differ by the KL alone.
        if (o.kind != LossKind::GRPO || o.old_policy)
            EXPECT_NEAR(x.sum(1) / count, want["loss"].get<double>(), 1e-12);
        else
            EXPECT_NEAR(o.beta * x.sum(2) / count,
                        want["loss"].get<double>() - golden["cases"]["grpo"]["loss"].get<double>(),
                        1e-12);
        for (size_t i = 0; i < x.rows.size(); i++)
            EXPECT_NEAR(-x.out[x.rows[i]] / count, want["gradient"][i].get<double>(), 1e-12) << i;
    }
}

// ----------------------------------------------------------------------------
// adapters as PEFT saves them, and PEFT's own numbers in double

// The shape of a base with a folder's adapters. Returns "" or the reader's refusal.
static std::string adapted(Shape* s, const std::string& base, const std::string& folder) {
    Adapters adapters;
    EXPECT_EQ(hf_read_config(s, base), "");
    std::string wrong = read_adapters(make_model(*s), folder, &adapters);
    s->tuned.adapters = std::make_shared<const Adapters>(adapters);
    return wrong;
}

// Hold the norms of the gradients of all A and of all B against golden ones.
static void expect_norms(Small<double>& m, const nlohmann::json& golden, double bound) {
    double squares[2] = {};
    for (const Parameter& p : m.t.model.parameters) {
        if (!is_adapter(m.t.model, p)) continue;
        const double* grad = address<double>(m.t, {Kind::GRAD, p.bucket}) + p.offset;
        for (size_t i = 0; i < p.elements(); i++)
            squares[p.name.ends_with("B.weight")] += grad[i] * grad[i];
    }
    EXPECT_NEAR(std::sqrt(squares[0]), golden["norm_A"].get<double>(), bound);
    EXPECT_NEAR(std::sqrt(squares[1]), golden["norm_B"].get<double>(), bound);
}

// Loss and gradients agree to 1e-10. Our folder of adapters holds the same tensors and means the
// same. The merged model has the same loss without adapters.
static void compare_with_peft(const std::string& name, const std::string& dir,
                              const std::string& kind = "lora-") {
    std::string base = ROOT + "/dev/golden/" + name, folder = ROOT + "/dev/golden/" + kind + name;
    nlohmann::json golden;
    ASSERT_EQ(read_json(folder + "/golden.json", &golden), "");
    Shape s, plain;
    ASSERT_EQ(adapted(&s, base, folder), "");
    ASSERT_EQ(hf_read_config(&plain, base), "");
    const size_t N = 24;
    auto loss_of = [&](Small<double>& m) {
        m.t.data.window = text_window(base, N);
        run_plan(m.t, 0);
        return plan_loss(m.t).mean();
    };

    // Load the base and the adapters, and take one step at a rate of 0.
    Small<double> m(s, {plan_of(Mode::TRAIN, 3, N)});
    m.t.hyper.lr = 0;
    ASSERT_EQ(hf_load_weights(m.t, base), "");
    ASSERT_EQ(load_adapters(m.t, folder), "");
    double loss = loss_of(m);
    EXPECT_NEAR(loss, golden["loss"].get<double>(), 1e-10);

    // The gradients: norms, and each matrix's first element; a stack has one for each expert.
    for (const Parameter& p : m.t.model.parameters) {
        if (!is_adapter(m.t.model, p)) continue;
        const double* grad = address<double>(m.t, {Kind::GRAD, p.bucket}) + p.offset;
        for (size_t e = 0; e < p.stack; e++) {
            double first = golden["first"][peft_name(m.t.model, p.name, e)].get<double>();
            EXPECT_NEAR(grad[e * (p.elements() / p.stack)], first, 1e-10) << p.name << e;
        }
    }
    expect_norms(m, golden, 1e-10);

    // Our folder holds PEFT's tensors, and is read as the same adapters.
    ASSERT_EQ(hf_export_check(s, dir + "/ours"), "");
    ASSERT_EQ(export_adapters(m.t, dir + "/ours", Type::F32, base), "");
    ASSERT_EQ(hf_export_check(s, dir + "/ours"), ""); // the folder is ours, so it may be replaced
    TensorFile ours(dir + "/ours/adapter_model.safetensors"),
        theirs(folder + "/adapter_model.safetensors");
    ASSERT_EQ(ours.file.tensors.size(), theirs.file.tensors.size());
    for (const SafeTensor& x : theirs.file.tensors)
        EXPECT_EQ(ours.floats(x.name), theirs.floats(x.name));
    Shape again;
    ASSERT_EQ(adapted(&again, base, dir + "/ours"), "");
    for (const auto& [module, adapter] : *s.tuned.adapters) {
        EXPECT_EQ(again.tuned.adapters->at(module).rank, adapter.rank) << module;
        EXPECT_NEAR(again.tuned.adapters->at(module).scale, adapter.scale, 1e-15) << module;
    }

    // The merged model, in float and in bf16, which may keep less of the adapters.
    MergeSums merged, narrow;
    ASSERT_EQ(hf_export(m.t, dir + "/merged", Type::F32, 1 << 30, {}, &merged), "");
    Small<double> one(plain, {plan_of(Mode::TRAIN, 3, N)});
    ASSERT_EQ(hf_load_weights(one.t, dir + "/merged"), "");
    EXPECT_NEAR(loss_of(one), loss, 2e-6); // the file's weights are floats
    EXPECT_NEAR(merged.coefficient(), 1, 1e-5);
    ASSERT_EQ(hf_export(m.t, dir + "/narrow", Type::BF16, 1 << 30, {}, &narrow), "");
    EXPECT_LT(std::abs(narrow.coefficient() - 1), 0.2);
    EXPECT_NE(narrow.coefficient(), 1);
}

struct Adapted : Scratch {};
TEST_F(Adapted, Gpt2IsPefts) { compare_with_peft("gpt2-tiny", dir); }
TEST_F(Adapted, LlamaIsPefts) { compare_with_peft("llama-tiny", dir); }
TEST_F(Adapted, ExpertsArePefts) { compare_with_peft("mixtral-tiny", dir); }
TEST_F(Adapted, SharedExpertsArePefts) { compare_with_peft("qwen2-moe-tiny", dir); }

// Adapters in the second block alone: PEFT names it in layers_to_transform, and so do we.
TEST_F(Adapted, UpperBlocksArePefts) {
    compare_with_peft("llama-tiny", dir, "lora-upper-");
    std::string theirs = ROOT + "/dev/golden/lora-upper-llama-tiny";
    nlohmann::json config, ours;
    ASSERT_EQ(read_json(theirs + "/adapter_config.json", &config), "");
    ASSERT_EQ(read_json(dir + "/ours/adapter_config.json", &ours), "");
    EXPECT_EQ(ours["layers_to_transform"], config["layers_to_transform"]);
    std::set<std::string> names = ours["target_modules"];
    EXPECT_EQ(names, (std::set<std::string>{"q_proj", "down_proj"}));

    // One number is a list of one. A list without the block would make another function; without a
    // list, target_modules names the first block's matrices too.
    Shape s;
    fs::copy(theirs, dir + "/other");
    for (auto [layers, wrong] : {std::pair<nlohmann::json, const char*>{1, ""},
                                 {nullptr, "target_modules names model.layers.0."},
                                 {{0, 2}, "leaves out block 1, and model.layers.1."}}) {
        config["layers_to_transform"] = layers;
        std::ofstream(dir + "/other/adapter_config.json") << config;
        std::string text = adapted(&s, ROOT + "/dev/golden/llama-tiny", dir + "/other");
        EXPECT_EQ(text.empty(), !*wrong) << text;
        EXPECT_HAS(text, wrong);
    }
}

// Another base, half an adapter, and functions that are not built are each refused with one line.
TEST_F(Adapted, WhatDoesNotFitIsRefused) {
    std::string golden = ROOT + "/dev/golden/", folder = golden + "lora-llama-tiny";
    Shape s;
    EXPECT_HAS(adapted(&s, golden + "gpt2-tiny", folder), "belongs to no matrix of a block");
    EXPECT_HAS(adapted(&s, golden + "qwen3-tiny", folder),
               "give the --model that it was trained on");
    EXPECT_HAS(adapted(&s, golden + "llama-tiny", dir), "adapter_config.json");

    nlohmann::json config;
    ASSERT_EQ(read_json(folder + "/adapter_config.json", &config), "");
    std::filesystem::copy(folder + "/adapter_model.safetensors",
                          dir + "/adapter_model.safetensors");
    auto with = [&](const char* key, nlohmann::json value) {
        nlohmann::json j = config;
        j[key] = value;
        std::ofstream(dir + "/adapter_config.json") << j;
        return adapted(&s, golden + "llama-tiny", dir);
    };

    EXPECT_EQ(with("lora_alpha", 3), "");
    EXPECT_HAS(with("use_dora", true), "use_dora is true, which is not built");
    EXPECT_HAS(with("modules_to_save", {"lm_head"}), "modules_to_save is");
    EXPECT_HAS(with("bias", "lora_only"), "only none can be read");
    EXPECT_HAS(with("peft_type", "IA3"), "LORA can be read");
    EXPECT_HAS(with("init_lora_weights", "pissa"), "has changed the base");
    EXPECT_HAS(with("alpha_pattern", {{"layers.*", 3}}), "is a regular expression");
    EXPECT_HAS(with("lora_alpha", "x"), "and no number");

    // The rank must be the tensors', and the factor one that floats can compute with.
    EXPECT_HAS(with("r", 999), "is 999, and its tensors have rank 4: get both files again");
    EXPECT_HAS(with("rank_pattern", {{"k_proj", 5}}), "k_proj is 5, and its tensors have rank");
    for (double alpha : {1e308, -1e8})
        EXPECT_HAS(with("lora_alpha", alpha), "makes the factor");
    EXPECT_HAS(with("alpha_pattern", json{1}), "alpha_pattern is [1], and no object");

    // The first pattern in the file counts, and a dot in it is any character.
    auto first = [&](const std::string& patterns) {
        json j = config;
        j.erase("alpha_pattern");
        std::string text = j.dump();
        text.pop_back();
        std::ofstream(dir + "/adapter_config.json")
            << text << ", \"alpha_pattern\": {" << patterns << "}}";
        EXPECT_EQ(adapted(&s, golden + "llama-tiny", dir), "") << patterns;
        const Adapter& a = s.tuned.adapters->at("model.layers.0.self_attn.q_proj");
        return a.scale * std::sqrt(double(a.rank)); // the file is rank-stabilised
    };
    EXPECT_EQ(first(R"("self_attn.q_proj": 8, "q_proj": 16)"), 8);
    EXPECT_EQ(first(R"("q_proj": 16, "self_attn.q_proj": 8)"), 16);
    EXPECT_EQ(first(R"("z_proj": 2, "q.proj": 24, "q_proj": 16)"), 24);
    EXPECT_EQ(first(R"("proj": 24, "ttn.q_proj": 3)"), config["lora_alpha"]);

    // target_modules names what the file has, here all matrices of the blocks: by a list, by the
    // word for all, or by an expression, of which Python's own are not read.
    json targets = config["target_modules"];
    targets.push_back("query_key_value"); // the model has none
    for (json good : {targets, json("all-linear"), json(), json(".*\\.(q|k|v|o|gate|up|down)_proj"),
                      json("(?P<name>.*)"), json("(.?){50000}"), json(std::string(999, '(')),
                      json(std::string(100000, '('))})
        EXPECT_EQ(with("target_modules", good), "") << good;
    const char* unnamed = "target_modules does not name model.layers.0.self_attn.q_proj";
    for (json bad : {json("q_proj"), json("k.*"), json({"k_proj", "q"}), json({{"q_proj", 1}})})
        EXPECT_HAS(with("target_modules", bad), bad.is_object() ? "neither a list" : unnamed) << bad;
    EXPECT_HAS(with("target_modules", json({"model.layers.0.self_attn.q_proj", "k_proj", 7})),
               "does not name model.layers.0.self_attn.v_proj");

    std::filesystem::remove(dir + "/adapter_model.safetensors");
    std::ofstream(dir + "/adapter_model.bin") << "x";
    EXPECT_HAS(with("lora_alpha", 3), "is a pickle");
}

// Experts of one stack have one rank and one factor, and all of them an adapter or none; routers,
// and DoRA, are refused beside experts.
TEST_F(Adapted, ExpertsThatDifferAreRefused) {
    std::string base = ROOT + "/dev/golden/mixtral-tiny";
    std::string theirs = ROOT + "/dev/golden/lora-mixtral-tiny";
    TensorFile file(theirs + "/adapter_model.safetensors");
    json config = read_json(theirs + "/adapter_config.json");
    Shape s;
    auto read = [&](const std::function<bool(SafeTensor&)>& keep, const json& j) {
        change_file(file, dir + "/adapter_model.safetensors", keep);
        std::ofstream(dir + "/adapter_config.json") << j;
        return adapted(&s, base, dir);
    };
    auto has = [](const SafeTensor& t, const char* part) {
        return t.name.find(part) != std::string::npos;
    };
    auto all = [](SafeTensor&) { return true; };
    EXPECT_EQ(read(all, config), "");
    EXPECT_HAS(read([&](SafeTensor& t) { return !has(t, "experts.3.w1."); }, config),
               "layers.0.block_sparse_moe.experts.3.w1 has no adapter, unlike the first expert");
    EXPECT_HAS(read([&](SafeTensor& t) { return !has(t, "experts.0.w3."); }, config),
               "layers.0.block_sparse_moe.experts.1.w3 has an adapter, unlike the first expert");

    // Another rank, another alpha, a half that is missing, another matrix.
    auto narrower = [&](SafeTensor& t) {
        if (has(t, "1.block_sparse_moe.experts.2.w2."))
            t.shape[has(t, "lora_A") ? 0 : 1] = 1;
        return true;
    };
    json of_one = config;
    EXPECT_HAS(read(narrower, config), "its tensors have rank 1: get both files again");
    of_one["rank_pattern"]["1.block_sparse_moe.experts.2.w2"] = 1;
    EXPECT_HAS(read(narrower, of_one), "experts.2.w2 has rank 1, factor 5, and that of the first "
                                       "expert rank 3, factor 1.66667: equal ones can be read");
    json alpha = config;
    alpha["alpha_pattern"] = {{"experts.4.w1", 8}};
    EXPECT_HAS(read(all, alpha), "experts.4.w1 has rank 2, factor 4, and that of the first");
    EXPECT_HAS(read([&](SafeTensor& t) { return !has(t, "experts.1.w1.lora_B"); }, config),
               "experts.1.w1 has lora_A and no lora_B");
    auto longer = [&](SafeTensor& t) {
        if (has(t, "experts.1.w1.lora_B")) t.shape[0] = 11;
        return true;
    };
    EXPECT_HAS(read(longer, config), "experts.1.w1 is for a matrix of 11 x 16, and the model's is "
                                     "12 x 16");

    // Routers are refused. A list may name experts that have no tensors, for these are no modules in
    // newer versions of transformers.
    auto routed = [&](SafeTensor& t) {
        size_t at = t.name.find("self_attn.q_proj");
        if (at != std::string::npos) t.name.replace(at, 16, "block_sparse_moe.gate");
        return true;
    };
    EXPECT_HAS(read(routed, config), "adapts a router, which stays the base's here");
    auto attention = [&](SafeTensor& t) { return has(t, "q_proj"); };
    EXPECT_EQ(read(attention, config), "");
    json merged = config;
    merged["use_dora"] = true;
    auto experts = [&](SafeTensor& t) { return !has(t, "q_proj"); };
    EXPECT_HAS(read(experts, merged), "use_dora is true");
    s.tuned.adapters = nullptr;
    AdapterSets sets;
    EXPECT_HAS(read_adapter_sets(make_model(s), "one=" + theirs, &sets),
               "--adapters one: adapts experts (model.layers.0.block_sparse_moe.experts.0.w1)");
}

// The shape of a base behind a folder's prefix. Returns "" or the reader's refusal.
static std::string prefixed(Shape* s, const std::string& base, const std::string& folder) {
    EXPECT_EQ(hf_read_config(s, base), "");
    return read_prefix(*s, folder, &s->tuned.prefix);
}

// Prefix tuning as PEFT computes it: loss and gradients to 1e-10, and the same folder back. The
// loss says where the text begins: behind the prefix, in learned positions and in RoPE.
static void compare_with_prefix(const std::string& name, const std::string& dir) {
    std::string base = ROOT + "/dev/golden/" + name, folder = ROOT + "/dev/golden/prefix-" + name;
    json golden = read_json(folder + "/golden.json");
    EXPECT_EQ(before_text(folder), BeforeText::PREFIX);
    EXPECT_EQ(before_text(ROOT + "/dev/golden/lora-" + name), BeforeText::NOTHING);
    Shape s;
    ASSERT_EQ(prefixed(&s, base, folder), "");
    const size_t N = 24;

    // Take one step at a rate of 0.
    Small<double> m(s, {plan_of(Mode::TRAIN, 3, N)});
    m.t.hyper.lr = 0;
    m.t.data.window = text_window(base, N);
    ASSERT_EQ(hf_load_weights(m.t, base), "");
    ASSERT_EQ(load_trained_adapters(m.t, folder), "");
    run_plan(m.t, 0);
    EXPECT_NEAR(plan_loss(m.t).mean(), golden["loss"].get<double>(), 1e-10);

    // The gradients: the norm, and PEFT's single elements, which are [token, column].
    double squares = 0;
    size_t KV = s.NKV * s.HS, found = 0;
    for (const Parameter& p : m.t.model.parameters) {
        if (!is_adapter(m.t.model, p)) continue;
        const double* grad = address<double>(m.t, {Kind::GRAD, p.bucket}) + p.offset;
        for (size_t i = 0; i < p.elements(); i++) squares += grad[i] * grad[i];
        for (const json& one : golden["gradients"]) {
            size_t row = one[0], column = one[1], first = prefix_column(m.t.model, p);
            if (column < first || column >= first + KV) continue;
            EXPECT_NEAR(grad[row * KV + column - first], one[2].get<double>(), 1e-10) << p.name;
            found++;
        }
    }
    EXPECT_NEAR(std::sqrt(squares), golden["norm"].get<double>(), 1e-10);
    EXPECT_EQ(found, 2 * s.L);

    // Our folder has PEFT's tensor and the keys of its config that say what the tensor means.
    ASSERT_EQ(hf_export_check(s, dir + "/ours"), "");
    ASSERT_EQ(export_trained_adapters(m.t, dir + "/ours", Type::F32, name), "");
    ASSERT_EQ(hf_export_check(s, dir + "/ours"), ""); // the folder is ours, so it may be replaced
    TensorFile ours(dir + "/ours/adapter_model.safetensors"),
        theirs(folder + "/adapter_model.safetensors");
    ASSERT_EQ(ours.file.tensors.size(), 1u);
    EXPECT_EQ(ours.file.tensors[0].shape, theirs.file.tensors[0].shape);
    EXPECT_EQ(ours.floats(PREFIX_TENSOR), theirs.floats(PREFIX_TENSOR));
    json written = read_json(dir + "/ours/adapter_config.json");
    json config = read_json(folder + "/adapter_config.json");
    for (const auto& [key, value] : written.items()) EXPECT_EQ(value, config[key]) << key;
}

struct Prefixed : Scratch {};
TEST_F(Prefixed, Gpt2IsPefts) { compare_with_prefix("gpt2-tiny", dir); }
TEST_F(Prefixed, LlamaIsPefts) { compare_with_prefix("llama-tiny", dir); }

// Another base, other tensors, and a folder without one are each refused with one line.
TEST_F(Prefixed, WhatDoesNotFitIsRefused) {
    std::string golden = ROOT + "/dev/golden/", folder = golden + "prefix-llama-tiny";
    Shape s;
    EXPECT_HAS(prefixed(&s, golden + "gpt2-tiny", folder),
               "prompt_embeddings is (3, 64), and a prefix of this model has rows of 96: give the "
               "--model that it was trained on");
    EXPECT_HAS(prefixed(&s, golden + "llama-tiny", golden + "lora-llama-tiny"),
               "has no matrix of floats called prompt_embeddings");
    EXPECT_NE(prefixed(&s, golden + "llama-tiny", dir), "");
    EXPECT_EQ(before_text(dir), BeforeText::NOTHING);
}

// A sample of two conversations: the chosen answer's and behind it the rejected one's, as
// dev/golden/trl.json has their tokens.
static void pair_sample(const json& pair, int* tokens, int* targets) {
    size_t at = 0;
    for (const char* answer : {"chosen_ids", "rejected_ids"}) {
        std::vector<int> ids = pair["prompt_ids"].get<std::vector<int>>();
        size_t question = ids.size();
        for (int id : pair[answer]) ids.push_back(id);

        // The last token of the question is the first row that predicts one of the answer.
        int mark = at ? BEGINS | REJECTED : BEGINS;
        for (size_t i = 0; i < ids.size(); i++, at++) {
            tokens[at] = ids[i] | (i ? 0 : mark);
            bool answers = i + 1 >= question && i + 1 < ids.size();
            targets[at] = answers ? ids[i + 1] : -1;
        }
    }
}

// DPO of a model with adapters, whose reference is its base: loss, margin, gradient norms. References
// are kept in float: log p of -5 is off by at most 2.4e-7, so a pair's lead in u by 0.1 * 17 times
// that, 4e-7; the loss has half of it, and a gradient no more relative to itself.
TEST(Trl, AModelWithAdaptersThatPrefersAnswers) {
    std::string base = ROOT + "/dev/golden/llama-tiny";
    json golden = read_json(ROOT + "/dev/golden/trl.json")["model"];
    const size_t N = 24;
    auto window = [&](uint64_t sample, int* tokens, int* targets) {
        pair_sample(golden["pairs"][sample], tokens, targets);
        return std::string();
    };

    // Ask the base for log p of each target.
    Shape plain, s;
    Plan evaluate = plan_of(Mode::EVALUATE, 2, N), train = plan_of(Mode::TRAIN, 2, N);
    evaluate.objective = train.objective = {LossKind::DPO, 0.1};
    ASSERT_EQ(hf_read_config(&plain, base), "");
    Small<double> reference(plain, {evaluate});
    ASSERT_EQ(hf_load_weights(reference.t, base), "");
    reference.t.data.window = window;
    run_plan(reference.t, 0);
    const double* losses = row_losses(reference.t, 0).losses;

    // Take one step with the adapters, at a rate of 0.
    ASSERT_EQ(adapted(&s, base, ROOT + "/dev/golden/lora-llama-tiny"), "");
    Small<double> m(s, {train});
    m.t.hyper.lr = 0;
    ASSERT_EQ(hf_load_weights(m.t, base), "");
    ASSERT_EQ(load_adapters(m.t, ROOT + "/dev/golden/lora-llama-tiny"), "");
    m.t.data.window = window;
    m.t.data.references = [&](uint64_t sample, RowNumbers to) {
        for (size_t i = 0; i < N; i++) to.reference[i] = -float(losses[sample * N + i]);
    };
    run_plan(m.t, 0);
    Loss loss = plan_loss(m.t);
    EXPECT_NEAR(loss.mean(), golden["loss"].get<double>(), 4e-7);
    EXPECT_NEAR(loss.margin / 2, golden["margin"].get<double>(), 4e-7);

    expect_norms(m, golden, 1e-6);
}

// ----------------------------------------------------------------------------
// windows

// Through L layers a token's influence reaches L (window - 1) positions ahead and no further, also
// where the keys come from the cache.
TEST(Windows, WhatIsFurtherBackHasNoInfluence) {
    Shape s = llama_shape(2, 4, 2, 32, 48, 61, 64, 10000);
    s.attention.window = 5;
    Small<float> m(s, {plan_of(Mode::GENERATE, 1, 16, 32)});
    init_weights(m.t, 3);
    auto changed = [&](size_t length, size_t cached) { // does the first token reach the last place?
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

// A window from block 1 on: block 0 sees everything, and block 1 sees five tokens. With one block's
// attention switched off, the other's reach remains.
TEST(Windows, BeginAtABlock) {
    Shape s = llama_shape(2, 4, 2, 32, 48, 61, 64, 10000);
    s.attention.window = 5, s.attention.full_layers[1] = true;
    for (int off : {0, 1}) {
        Small<float> m(s, {plan_of(Mode::GENERATE, 1, 16, 32)});
        init_weights(m.t, 3);
        for (const Parameter& p : m.t.model.parameters)
            if (p.name == "model.layers." + std::to_string(off) + ".self_attn.o_proj.weight")
                set_weight(m.t, p, std::vector<float>(p.elements()).data());

        auto changed = [&](size_t length) { // does the first token reach the last place?
            std::vector<int> ids(length, 11), other = ids;
            other[0] = 12;
            return logits_after(m.t, 0, ids) != logits_after(m.t, 0, other);
        };
        EXPECT_TRUE(changed(5)) << off;
        EXPECT_EQ(changed(6), off == 1) << off;
    }
}
