// dialect_merged.h - DoRA and (IA)3 adapters of PEFT, merged as they are read
//   dev/golden/peft_merged_golden.py makes them.
#include "../../llmc/extra/merged_adapters.h"
#include "saved_models.h"

struct MergedFolders : Scratch {};

// The logits of a model with merged adapters behind its base's first golden row, for norms of `eps`.
static std::vector<double> merged_logits(Shape s, const std::string& base,
                                         const std::string& adapter, float eps) {
    const size_t N = 24;
    s.block.norm_eps = eps;
    Small<double> m(s, {plan_of(Mode::GENERATE, 1, N, N)});
    EXPECT_EQ(hf_load_weights(m.t, base, {MERGED_ADAPTERS}, adapter), "");
    std::vector<int> tokens = TensorFile(base + "/golden.safetensors").ints("tokens");
    generate_batch(m.t, 0, tokens.data(), N, 0);
    run_plan(m.t, 0);
    const double* logits = address<const double>(m.t, {Kind::LOGITS, -1, 0});
    return {logits, logits + s.V};
}

// DoRA and (IA)3, merged as they are read: the logits of PEFT's own merge in double, whose weights
// are rounded to float once as ours are. Two things remain:
//   eps      A norm's eps is a float here: 1e-5 is off by 2.5e-13. The slope of the logits in eps,
//            from a second eps that is 2^-10 larger, takes this to first order; the slope is off
//            by 2^-10 of itself.
//   sums     Each rounds by 2^-53 of its terms, which have at most the size of logits, 4. A logit
//            depends on sums of at most 96 terms (F of GPT-2), in 2 blocks of 4 products with 2
//            norms and a softmax, and the head: 15 in a row. 96 * 15 * 4 * 2^-53 = 6.4e-13.
// The model with the adapter beside it has weights that are not rounded to float, 6e-8 of each.
static void compare_with_merged(const std::string& name, const std::string& base) {
    std::string folder = ROOT + "/dev/golden/" + name, weights = ROOT + "/dev/golden/" + base;
    json golden = read_json(folder + "/golden.json");
    Shape s;
    ASSERT_EQ(hf_read_config(&s, weights), "");
    const double eps = 1e-5; // of both configs
    ASSERT_EQ(s.block.norm_eps, float(eps));
    const float larger = float(eps * (1 + std::ldexp(1, -10)));
    std::vector<double> got = merged_logits(s, weights, folder, s.block.norm_eps);
    std::vector<double> moved = merged_logits(s, weights, folder, larger);

    // Compare, and see that the correction is no larger than what it corrects.
    ASSERT_EQ(golden["merged"].size(), s.V);
    const double sums = 96 * 15 * 4 * std::ldexp(1, -53);
    for (size_t v = 0; v < s.V; v++) {
        double want = golden["merged"][v].get<double>();
        double slope = (moved[v] - got[v]) / (double(larger) - double(s.block.norm_eps));
        double of_eps = slope * (eps - double(s.block.norm_eps));
        ASSERT_NEAR(got[v] + of_eps, want, sums + std::ldexp(std::fabs(of_eps), -10));
        ASSERT_NEAR(got[v], golden["beside"][v].get<double>(), 1e-6);
    }
}

TEST(Merged, DoraOfGpt2) { compare_with_merged("dora-gpt2-tiny", "gpt2-tiny"); }
TEST(Merged, DoraOfLlama) { compare_with_merged("dora-llama-tiny", "llama-tiny"); }
TEST(Merged, Ia3OfGpt2) { compare_with_merged("ia3-gpt2-tiny", "gpt2-tiny"); }
TEST(Merged, Ia3OfLlama) { compare_with_merged("ia3-llama-tiny", "llama-tiny"); }

// A row of W + s B A that is zero has no direction for DoRA's length. Every rank refuses it.
TEST_F(MergedFolders, ARowWithoutDirectionIsRefused) {
    std::string golden = ROOT + "/dev/golden/", base = dir + "/base", adapter = dir + "/adapter";
    std::filesystem::copy(golden + "llama-tiny", base);
    std::filesystem::copy(golden + "dora-llama-tiny", adapter);
    auto zero_row = [](const std::string& path, const std::string& name, size_t row) {
        std::string bytes = read_file(path);
        size_t header = 0;
        memcpy(&header, bytes.data(), 8);
        json tensor = json::parse(bytes.substr(8, header))[name];
        size_t length = tensor["shape"][1].get<size_t>() * sizeof(float);
        size_t at = 8 + header + tensor["data_offsets"][0].get<size_t>() + row * length;
        put_file(path, bytes.replace(at, length, std::string(length, 0)));
    };

    // A row of W alone may be zero: B A gives it a direction.
    std::string module = "model.layers.1.mlp.up_proj";
    Shape s;
    ASSERT_EQ(hf_read_config(&s, base), "");
    Small<double> m(s, {plan_of(Mode::GENERATE, 1, 24, 24)});
    zero_row(base + "/model.safetensors", module + ".weight", 2);
    EXPECT_EQ(hf_load_weights(m.t, base, {MERGED_ADAPTERS}, adapter), "");
    zero_row(adapter + "/adapter_model.safetensors",
             "base_model.model." + module + ".lora_B.weight", 2);
    EXPECT_HAS(hf_load_weights(m.t, base, {MERGED_ADAPTERS}, adapter), "1 rows of " + module + ".weight with its adapter");
}

// Write a folder like a golden one, but for one key of its config and one tensor's name or shape,
// and return the refusal.
static std::string refused(const std::string& name, const std::string& base, const std::string& dir,
                           json keys, const std::string& from = "", const std::string& to = "") {
    std::string golden = ROOT + "/dev/golden/";
    json config = read_json(golden + name + "/adapter_config.json");
    config.update(keys);
    put_file(dir + "/adapter_config.json", config.dump());
    std::string bytes = read_file(golden + name + "/adapter_model.safetensors");
    size_t at = from.empty() ? 0 : bytes.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    EXPECT_EQ(from.size(), to.size());
    put_file(dir + "/adapter_model.safetensors", bytes.replace(at, to.size(), to));
    Shape s;
    EXPECT_EQ(hf_read_config(&s, golden + base), "");
    return check_merges(make_model(s), dir);
}

// A missing tensor, another shape and a name without a place are each refused with one line.
TEST_F(MergedFolders, WhatCannotBeMergedIsRefused) {
    const std::string dora = "dora-llama-tiny", ia3 = "ia3-llama-tiny", base = "llama-tiny";
    EXPECT_EQ(refused(dora, base, dir, {{"lora_alpha", 3}}), "");
    EXPECT_HAS(refused(dora, base, dir, {{"lora_alpha", 3}}, "lora_magnitude_", "lora_magnitudX_"),
               "no lora_magnitude_vector");
    EXPECT_HAS(refused(dora, "gpt2-tiny", dir, {{"lora_alpha", 3}}), "belongs to no matrix");
    EXPECT_HAS(refused(dora, base, dir, {{"bias", "all"}}), "only none can be read");
    EXPECT_HAS(refused(dora, base, dir, {{"init_lora_weights", "pissa"}}), "has changed the base");

    // (IA)3: what its lists name, and what they leave out.
    json none = json::array();
    EXPECT_EQ(refused(ia3, base, dir, {{"target_modules", none}}), "");
    EXPECT_HAS(refused(ia3, base, dir, {{"target_modules", {"c_attn"}}}), "does not name");
    json targets = {"k_proj", "v_proj", "down_proj", "self_attn.q_proj"};
    const char* absent = "target_modules names model.layers.0.self_attn.q_proj, which has no tensors";
    EXPECT_HAS(refused(ia3, base, dir, {{"target_modules", targets}}), absent);
    EXPECT_HAS(refused(dora, base, dir, {{"target_modules", "all-linear"}}), absent);

    // Two keys leave out some of the named modules.
    for (json exclude : {json({"q_proj"}), json(".*\\.q_proj"), json("(?P<name>.*)")})
        EXPECT_EQ(refused(ia3, base, dir, {{"target_modules", targets}, {"exclude_modules", exclude}}), "");
    EXPECT_HAS(refused(dora, base, dir, {{"exclude_modules", {"k_proj"}}}),
               "exclude_modules names model.layers.0.self_attn.k_proj, which has tensors");
    EXPECT_EQ(refused(ia3, base, dir, {{"target_modules", targets}, {"layers_to_transform", 7}}), "");
    EXPECT_HAS(refused(ia3, base, dir, {{"target_modules", targets}, {"layers_to_transform", {0, 1}}}),
               absent);
    json expression = {{"target_modules", ".*\\.([kv]|down)_proj"}};
    EXPECT_EQ(refused(ia3, base, dir, expression), "");
    EXPECT_HAS(refused(ia3, base, dir, {{"feedforward_modules", none}}), "none of feedforward");
    EXPECT_HAS(refused(ia3, base, dir, {{"feedforward_modules", {"v_proj"}}}), "one of feedforward");
    EXPECT_HAS(refused(ia3, base, dir, {{"feedforward_modules", ".*down"}}), "a list of modules");
    EXPECT_HAS(refused(ia3, base, dir, {{"modules_to_save", {"lm_head"}}}), "modules_to_save is");
    EXPECT_HAS(refused(ia3, "gpt2-tiny", dir, {{"target_modules", none}}), "lists down_proj");
}

// DoRA beside an expert is refused.
TEST_F(MergedFolders, ExpertsAreRefused) {
    std::string adapter = ROOT + "/dev/golden/lora-mixtral-tiny/";
    change_file(TensorFile(adapter + "adapter_model.safetensors"),
                dir + "/adapter_model.safetensors",
                [](SafeTensor& t) { return !has(t.name, "q_proj"); });
    json config = read_json(adapter + "adapter_config.json");
    config["use_dora"] = true;
    put_file(dir + "/adapter_config.json", config.dump());
    Shape s;
    ASSERT_EQ(hf_read_config(&s, ROOT + "/dev/golden/mixtral-tiny"), "");
    EXPECT_HAS(check_merges(make_model(s), dir), "experts.0.w1 is an expert's, beside which plain "
                                                 "LoRA alone is read");
}
