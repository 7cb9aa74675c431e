// test_huggingface.cpp - Hugging Face folders: config.json, weights of others, exports
//   Exports load to the same bits, and each malformed folder is answered with one line.
#include <sys/resource.h>
#include <csignal>
#include "../../llmc/layout.h"
#include "../../llmc/io/model_shape.h"
#include "../../llmc/io/new_tokens.h"
#include "../../llmc/extra/upcycle.h"
#include "saved_models.h"

struct HuggingFace : Scratch {};

// ----------------------------------------------------------------------------
// config.json

// The keys that a GPT-2 needs; everything else has a default.
static json gpt2_json() {
    return {{"model_type", "gpt2"}, {"n_embd", 12},     {"n_head", 3},
            {"n_layer", 2},         {"vocab_size", 61}, {"n_positions", 16}};
}
static json llama_json(const char* type = "llama") {
    json j = {{"model_type", type},     {"hidden_size", 16},       {"num_attention_heads", 4},
              {"num_hidden_layers", 2}, {"intermediate_size", 20}, {"vocab_size", 61}};
    if (type != std::string("llama")) j["num_key_value_heads"] = 2; // else their default, 8 or 32
    return j;
}
static json llama3_scaling() {
    return {{"rope_type", "llama3"},
            {"factor", 4.0},
            {"low_freq_factor", 2.0},
            {"high_freq_factor", 8.0},
            {"original_max_position_embeddings", 64}};
}

// The error of a config.json, or "". `more` replaces and adds keys.
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

// Files, and fields of what is read under the names that checkpoints give them. The defaults are
// those of transformers' classes (4.57).
TEST_F(HuggingFace, ConfigsAreReadAsTheirClassesReadThem) {
    json gpt2 = gpt2_json(), older = gpt2_json(), llama = llama_json(), qwen2 = llama_json("qwen2"),
         qwen3 = llama_json("qwen3"), mistral = llama_json("mistral"), olmo2 = llama_json("olmo2"),
         smollm3 = llama_json("smollm3"), phi3 = llama_json("phi3"),
         nanochat = llama_json("nanochat"), track3 = llama_json("track3");
    older.erase("n_positions");
    json newer = llama3_scaling(), type = llama3_scaling();
    newer["rope_theta"] = 3.5;
    type.erase("rope_type"), type["type"] = "llama3";
    json scaled = {{"rope_kind", "llama3"}, {"rope_factor", 4}, {"rope_low_freq_factor", 2},
                   {"rope_high_freq_factor", 8}, {"rope_original_positions", 64}};

    struct Row {
        json file, fields, more = json::object();
    };
    const Row rows[] = {
        // Given keys win over defaults. A width of null is 4 n_embd; older files say n_ctx.
        {gpt2, {{"family", "gpt2"}, {"layers", 2}, {"heads", 3}, {"kv_heads", 3}, {"head_size", 4},
                {"channels", 12}, {"ffn", 48}, {"vocab", 61}, {"positions", 16}, {"tied", true},
                {"position", "learned"}, {"qkv_bias", true}, {"norm_eps", 1e-5f}}},
        {gpt2, {{"ffn", 20}, {"norm_eps", 1e-3f}, {"tied", false}},
         {{"n_inner", 20}, {"layer_norm_epsilon", 1e-3}, {"tie_word_embeddings", false},
          {"activation_function", "gelu_pytorch_tanh"}, {"scale_attn_weights", true}}},
        {gpt2, {{"ffn", 48}}, {{"n_inner", nullptr}}},
        {older, {{"positions", 24}}, {{"n_ctx", 24}}},

        // A head's size need not be hidden_size / heads, and Llama has no window.
        {llama, {{"family", "llama"}, {"layers", 2}, {"heads", 4}, {"kv_heads", 4}, {"vocab", 61},
                 {"head_size", 4}, {"channels", 16}, {"ffn", 20}, {"positions", 2048},
                 {"position", "rope"}, {"rope_theta", 10000}, {"rope_factor", 1}, {"tied", false},
                 {"qkv_bias", false}, {"norm_eps", 1e-6f}}},
        {llama, {{"kv_heads", 2}, {"head_size", 6}, {"positions", 99}, {"norm_eps", 1e-3f},
                 {"rope_theta", 7}, {"tied", true}},
         {{"num_key_value_heads", 2}, {"head_dim", 6}, {"max_position_embeddings", 99},
          {"rms_norm_eps", 1e-3}, {"rope_theta", 7}, {"tie_word_embeddings", true},
          {"hidden_act", "swish"}}},
        {llama, {{"head_size", 4}}, {{"hidden_size", 18}, {"head_dim", 4}}},
        {llama, {{"sliding_window", 0}},
         {{"sliding_window", 8}, {"use_sliding_window", true}, {"max_window_layers", 0}}},
        {llama, {{"qkv_bias", true}, {"o_bias", true}, {"mlp_bias", false}},
         {{"attention_bias", true}}},
        {llama, {{"qkv_bias", false}, {"o_bias", false}, {"mlp_bias", true}}, {{"mlp_bias", true}}},

        // RoPE's scaling in rope_scaling, in newer files' rope_parameters, in older files' words.
        {llama, scaled, {{"rope_scaling", llama3_scaling()}}},
        {llama, {{"rope_theta", 500000}},
         {{"rope_theta", 500000.0}, {"rope_scaling", llama3_scaling()}}},
        {llama, scaled, {{"rope_parameters", newer}}},
        {llama, {{"rope_theta", 3.5}}, {{"rope_parameters", newer}}},
        {llama, scaled, {{"rope_scaling", type}}},

        // Only Qwen's class has a switch for its window.
        {mistral, {{"family", "mistral"}, {"sliding_window", 32}, {"kv_heads", 2},
                   {"qkv_bias", false}, {"tied", false}},
         {{"sliding_window", 32}, {"use_sliding_window", false}}},
        {mistral, {{"sliding_window", 0}}, {{"sliding_window", nullptr}}},
        {mistral, {{"sliding_window", 4096}}},
        {qwen2, {{"family", "qwen2"}, {"sliding_window", 0}, {"qkv_bias", true}, {"o_bias", false},
                 {"mlp_bias", false}, {"tied", true}, {"qk_norm", false}},
         {{"sliding_window", 32}, {"use_sliding_window", false}, {"tie_word_embeddings", true}}},
        {qwen2, {{"sliding_window", 0}}, {{"sliding_window", 32}}},
        {qwen3, {{"qk_norm", true}, {"qkv_bias", false}, {"o_bias", false}, {"tied", false},
                 {"head_size", 128}, {"kv_heads", 2}, {"positions", 32768}}},
        {qwen3, {{"head_size", 6}, {"qkv_bias", true}, {"o_bias", true}},
         {{"head_dim", 6}, {"attention_bias", true}}},

        // Norms behind the branches, layers without RoPE, and heads that turn in part.
        {olmo2, {{"qk_norm", true}, {"whole_qk_norm", true}, {"post_norm", true},
                 {"pre_norm", false}, {"tied", false}, {"norm_eps", 1e-5f}, {"norm_plus", 0}}},
        {smollm3, {{"tied", true}, {"rope_theta", 2e6}, {"positions", 32768}, {"nope_every", 4}},
         {{"num_hidden_layers", 9}}},
        {smollm3, {{"nope_every", 2}}, {{"no_rope_layers", {1, 0}}}},
        {smollm3, {{"nope_every", 0}}, {{"no_rope_layers", {1, 1}}}},
        {phi3, {{"rotary", 6}, {"sliding_window", 0}, {"tied", false}},
         {{"head_dim", 8}, {"partial_rotary_factor", 0.75}}},
        {phi3, {{"sliding_window", 9}}, {{"sliding_window", 9}}},

        // Norms without weights, and caps of either form.
        {nanochat, {{"gains", false}, {"qk_gains", false}, {"norm_plus", 1}, {"gate", "relu2"},
                    {"normed_embedding", true}, {"rope_transposed", true}, {"rope_kind", "llama3"},
                    {"logit_softcap", 15}, {"root_softcap", false}, {"head_bias", false},
                    {"qkv_bias", false}, {"o_bias", false}, {"norm_eps", 1e-6f}, {"tied", false}}},
        {nanochat, {{"qkv_bias", true}, {"o_bias", true}, {"mlp_bias", false}},
         {{"attention_bias", true}}},
        {nanochat, {{"logit_softcap", 0}}, {{"final_logit_softcapping", nullptr}}},
        {llama_json("nanochat_values"), {{"residual_scalars", true}, {"value_embeddings", false},
                                         {"gains", false}, {"logit_softcap", 15}},
         {{"value_embeddings", false}}},
        {llama_json("nanochat_values"), {{"residual_scalars", false}, {"value_embeddings", true}},
         {{"residual_scalars", false}}},
        {track3, {{"gains", true}, {"qk_gains", false}, {"norm_plus", 0}, {"gate", "relu2"},
                  {"rope_kind", "half"}, {"logit_softcap", 15}, {"root_softcap", true},
                  {"head_bias", true}, {"qkv_bias", true}, {"o_bias", true}, {"mlp_bias", true}}},
    };
    for (const Row& row : rows) {
        json read = model_identity(config_shape(dir, row.file, row.more));
        for (const auto& [name, value] : row.fields.items())
            EXPECT_EQ(read[name], value) << row.file["model_type"] << " " << name << row.more;
    }
}

TEST_F(HuggingFace, ScalingsOfRopeThatAreNotBuiltAreNamed) {
    for (json none : {json(nullptr), json::object(), json{{"rope_type", "default"}},
                      json{{"rope_type", nullptr}}})
        EXPECT_EQ(config_shape(dir, llama_json(), {{"rope_scaling", none}}).rope.scaling.factor, 1)
            << none;

    // Kinds that are not built, and numbers that cannot be.
    auto wrong = [&](const json& scaling) {
        return config_error(dir, llama_json(), {{"rope_scaling", scaling}});
    };

    for (const char* key : {"rope_type", "type"})
        for (const char* kind : {"longrope", "su", "proportional"})
            EXPECT_HAS(wrong({{key, kind}}), std::string("rope scaling ") + kind +
                                                 " is not built yet: linear, dynamic, llama3 and "
                                                 "yarn are");
    EXPECT_HAS(wrong({{"rope_type", 3}}), "rope scaling 3 is not built yet");
    EXPECT_HAS(wrong({{"rope_type", {1}}}), "rope scaling");
    EXPECT_HAS(wrong("llama3"), "rope_scaling is no object");
    EXPECT_HAS(wrong({{"rope_type", "llama3"}, {"factor", "x"}}),
               "factor is \"x\", which is no number");
    EXPECT_HAS(wrong({{"rope_type", "linear"}, {"factor", -2}}), "factor is -2, not above zero");

    for (bool inside : {false, true}) {
        json more = {{"rope_scaling", {{"rope_type", "linear"}, {"factor", 2}}}};
        (inside ? more["rope_scaling"] : more)["partial_rotary_factor"] = 0.5;
        EXPECT_HAS(config_error(dir, llama_json(), more), "partial_rotary_factor 0.5 is not built");
    }
}

// The numbers are those that transformers computes (5.23).
TEST_F(HuggingFace, ConfigOfOtherRopeScalings) {
    auto scaling = [&](const json& r, const json& more = json::object()) {
        json all = {{"rope_scaling", r}, {"max_position_embeddings", 256}};
        all.update(more);
        return config_shape(dir, llama_json(), all).rope.scaling;
    };
    RopeScaling s = scaling({{"type", "linear"}, {"factor", 2.5}});
    EXPECT_EQ(s.kind, RopeKind::LINEAR);
    EXPECT_EQ(s.factor, 2.5f);
    EXPECT_FALSE(scales(scaling({{"type", "dynamic"}, {"factor", 2.0}}))); // none up to 256 tokens

    json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 64}};
    s = scaling(yarn);
    EXPECT_EQ(s.kind, RopeKind::YARN);
    EXPECT_EQ((std::vector<float>{s.factor, s.beta_fast, s.beta_slow, float(s.original_positions)}),
              (std::vector<float>{4, 32, 1, 64}));
    EXPECT_TRUE(s.truncate);
    EXPECT_NEAR(s.attention_factor, 1.138629436111989, 1e-7);
    yarn.update({{"mscale", 0.7}, {"mscale_all_dim", 0.5}, {"beta_fast", 8}, {"truncate", false}});
    s = scaling(yarn);
    EXPECT_NEAR(s.attention_factor, 1.0259286501478284, 1e-7);
    EXPECT_EQ(s.beta_fast, 8);
    EXPECT_FALSE(s.truncate);

    yarn["attention_factor"] = 1.25;
    EXPECT_EQ(scaling(yarn).attention_factor, 1.25f);

    // The original number of positions is the object's; a number at the file's top wins over it;
    // without either it is the model's positions. A factor of null is the model's positions divided
    // by the original ones.
    EXPECT_EQ(scaling(yarn, {{"original_max_position_embeddings", 32}}).original_positions, 32);
    yarn["factor"] = nullptr;
    EXPECT_EQ(scaling(yarn).factor, 4);
    yarn.erase("original_max_position_embeddings");
    EXPECT_EQ(scaling(yarn).original_positions, 256);

    // A negative scale would turn cosines and sines over.
    yarn.erase("attention_factor");
    for (const char* key : {"mscale", "mscale_all_dim"}) {
        json broken = yarn;
        broken[key] = -30;
        EXPECT_HAS(config_error(dir, llama_json(), {{"rope_scaling", broken}}),
                   std::string(key) + " is -30, not above zero");
    }

    // A missing key's number may be computed, and then be wrong.
    HfConfig c;
    hf_positive(c, json::object(), "attention_factor", -2);
    EXPECT_EQ(c.wrong, ": attention_factor is -2.0, not above zero");

    // rope_scaling wins over rope_parameters.
    json older = {{"type", "linear"}, {"factor", 2.0}},
         newer = {{"type", "linear"}, {"factor", 3.0}};
    EXPECT_EQ(scaling(older, {{"rope_parameters", newer}}).factor, 2);
    EXPECT_EQ(scaling(json::object(), {{"rope_parameters", newer}}).factor, 3);
}

TEST_F(HuggingFace, WhatAFileLeavesOutIsTheClasssDefault) {
    for (auto [type, heads, positions] : {std::tuple{"llama", 32, 2048}, {"mistral", 8, 131072},
                                          {"qwen2", 32, 32768}, {"qwen3", 32, 32768}}) {
        json j = llama_json(type);
        j.erase("num_key_value_heads");
        Shape s = config_shape(dir, j, {{"num_attention_heads", 32}, {"hidden_size", 64}});
        EXPECT_EQ(s.NKV, size_t(heads));
        EXPECT_EQ(s.P, size_t(positions));
        EXPECT_EQ(config_shape(dir, j, {{"num_key_value_heads", nullptr}}).NKV, 4u);
    }
}

// Values that a class has no layer for, or none that is built.
TEST_F(HuggingFace, OtherLayersOfVariantsAreRefused) {
    for (json list : {json{0, 1}, json{1}, json("x"), json{true, false}})
        EXPECT_HAS(config_error(dir, llama_json("smollm3"), {{"no_rope_layers", list}}),
                   "no_rope_layers of this kind is not built yet");
    EXPECT_HAS(config_error(dir, llama_json("track3"), {{"rope_scaling", llama3_scaling()}}),
               "rope scaling llama3 is not built for track3");
    EXPECT_HAS(config_error(dir, llama_json("nanochat"), {{"hidden_act", "silu"}}),
               "hidden_act \"silu\" is not built yet, only \"relu2\" is");
    EXPECT_HAS(config_error(dir, llama_json("smollm3"),
                            {{"layer_types", {"full_attention", "sliding_attention"}}}),
               "layer_types has windows, and sliding_window is no size");
    EXPECT_HAS(config_error(dir, llama_json("mistral"), {{"sliding_window", 0}}),
               "sliding_window is 0, which is no");
    EXPECT_HAS(
        config_error(dir, llama_json("phi3"), {{"head_dim", 8}, {"partial_rotary_factor", 0.4}}),
        "partial_rotary_factor 0.4 turns 3 of 8 channels: RoPE turns pairs");
}

TEST_F(HuggingFace, ConfigOfGemma) {
    json file = llama_json("gemma2");
    file["num_hidden_layers"] = 4;
    Shape s = config_shape(dir, file);
    EXPECT_TRUE(s.block.pre_norm && s.block.post_norm && !s.block.qk_norm && s.embedding.tied && s.embedding.scaled);
    EXPECT_TRUE(s.block.gate == Gate::GELU && s.block.norm_plus == 1 && s.HS == 256 && s.attention.score_scalar == 256);
    EXPECT_TRUE(s.attention.softcap == 50 && s.loss.softcap == 30);

    // Every second layer slides.
    auto windows = [](const Shape& s) {
        std::vector<size_t> all;
        for (int layer = 1; layer <= int(s.L); layer++) all.push_back(window_of(s, layer));
        return all;
    };
    typedef std::vector<size_t> Sizes;
    EXPECT_EQ(windows(s), (Sizes{4096, 0, 4096, 0})); // the first layer has a window

    s = config_shape(dir, file,
                     {{"attn_logit_softcapping", nullptr}, {"final_logit_softcapping", 5}});
    EXPECT_TRUE(s.attention.softcap == 0 && s.loss.softcap == 5);

    EXPECT_HAS(config_error(dir, file, {{"sliding_window", nullptr}}),
               "layer_types has windows, and sliding_window is no size");
    EXPECT_HAS(config_error(dir, file, {{"hidden_activation", "gelu"}}),
               "hidden_activation \"gelu\" is not built yet");

    // The scalar is written as transformers 5 reads it: as an integer if it is one.
    auto written = [&] { return hf_json(s)["query_pre_attn_scalar"]; };
    EXPECT_TRUE(written().is_number_integer() && written() == 256);
    s.attention.score_scalar = 10.5;
    EXPECT_EQ(written(), 10.5);

    // Gemma 3: norms of queries and keys, no caps, and two thetas.
    file["model_type"] = "gemma3_text", file["num_hidden_layers"] = 7;
    s = config_shape(dir, file);
    EXPECT_TRUE(s.block.qk_norm && !s.block.whole_qk_norm && s.attention.softcap == 0 && s.loss.softcap == 0);
    EXPECT_TRUE(s.rope.theta == 1e6 && s.rope.window_theta == 1e4);
    EXPECT_EQ(windows(s), (Sizes{4096, 4096, 4096, 4096, 4096, 0, 4096}));

    s = config_shape(
        dir, file,
        {{"rope_parameters",
          {{"full_attention", {{"rope_type", "linear"}, {"factor", 8}, {"rope_theta", 5}}},
           {"sliding_attention", {{"rope_theta", 7}}}}}});
    EXPECT_TRUE(s.rope.theta == 5 && s.rope.window_theta == 7 && s.rope.scaling.factor == 8);

    EXPECT_HAS(config_error(dir, file, {{"rope_parameters",
                                         {{"sliding_attention", {{"rope_type", "yarn"}}}}}}),
               "of layers with a window is not built yet");
    EXPECT_HAS(config_error(dir, file, {{"use_bidirectional_attention", true}}),
               "use_bidirectional_attention true is not built yet");
    EXPECT_HAS(config_error(dir, file, {{"attn_logit_softcapping", 3.0}}),
               "attn_logit_softcapping 3.0 is not built yet, only null is");
    EXPECT_HAS(
        config_error(dir, file, {{"rope_parameters", {{"rope_type", "linear"}, {"factor", 3}}}}),
        "rope_parameters of all layers is not built yet");
}

// The experts' keys of both classes, and variants that are not built.
TEST_F(HuggingFace, ConfigOfExperts) {
    Shape s = config_shape(dir, llama_json("mixtral"), {{"num_local_experts", 6}});
    EXPECT_TRUE(s.family == Family::MIXTRAL && s.experts.router == Router::RENORMALISED && !s.block.qk_norm);
    EXPECT_EQ((std::vector<size_t>{s.experts.E, s.experts.K, s.attention.window}), (std::vector<size_t>{6, 2, 0}));

    json qwen = llama_json("qwen3_moe");
    qwen.erase("intermediate_size");
    s = config_shape(dir, qwen, {{"moe_intermediate_size", 12}, {"norm_topk_prob", true}});
    EXPECT_TRUE(s.block.qk_norm && s.experts.router == Router::RENORMALISED);
    EXPECT_EQ((std::vector<size_t>{s.experts.E, s.experts.K, s.F}), (std::vector<size_t>{128, 8, 12}));
    EXPECT_EQ(config_shape(dir, qwen).experts.router, Router::SOFTMAX); // the class's default

    // Blocks with a dense ffn in place of experts, and Qwen2-MoE's shared expert.
    s = config_shape(dir, qwen, {{"decoder_sparse_step", 2}, {"mlp_only_layers", {0}},
                                 {"intermediate_size", 20}});
    EXPECT_TRUE(s.experts.dense_F == 20 && !is_sparse(s, 1) && is_sparse(s, 2) && s.experts.shared_F == 0);
    EXPECT_HAS(config_error(dir, qwen, {{"decoder_sparse_step", 2}}),
               "intermediate_size is missing");
    EXPECT_HAS(config_error(dir, qwen, {{"decoder_sparse_step", 99}, {"intermediate_size", 20}}),
               "decoder_sparse_step 99 leaves no layer with experts");
    EXPECT_HAS(config_error(dir, qwen, {{"mlp_only_layers", {1}}}), "mlp_only_layers of this kind");

    // Qwen3-MoE's class gives its window to all layers, and OLMoE's to none.
    json windows = {{"use_sliding_window", true}, {"sliding_window", 8}, {"max_window_layers", 1}};
    s = config_shape(dir, qwen, windows);
    EXPECT_TRUE(s.attention.window == 8 && s.attention.full_layers.none());
    EXPECT_EQ(config_shape(dir, llama_json("olmoe"), windows).attention.window, 0u);
    s.attention.full_layers[1] = true;
    EXPECT_HAS(hf_refusal(s), "qwen3_moe has its window in all layers");

    // Versions of transformers call the number of experts by two names; both must agree.
    for (auto [type, own] : {std::pair("mixtral", "num_local_experts"), {"olmoe", "num_experts"},
                             {"gpt_oss", "num_local_experts"}, {"qwen2_moe", "num_experts"},
                             {"qwen3_moe", "num_experts"}, {"deepseek_v3", "n_routed_experts"}})
        for (const char* name : {own, "num_experts", "num_local_experts"}) {
            json keys = {{"num_key_value_heads", nullptr}, {"num_hidden_layers", 4}, {name, 16}};
            EXPECT_EQ(config_shape(dir, llama_json(type), keys).experts.E, 16u) << type << " " << name;
            if (name == own) continue;
            keys[own] = 8;
            EXPECT_HAS(config_error(dir, llama_json(type), keys), ": give both the same value");
        }
    EXPECT_HAS(config_error(dir, qwen, {{"per_layer_config", {{"0", {{"head_dim", 8}}}}}}),
               "per_layer_config {\"0\":{\"head_dim\":8}} is not built yet");
    EXPECT_HAS(config_error(dir, qwen, {{"is_causal", false}}), "is_causal false is not built yet");

    s = config_shape(dir, llama_json("qwen2_moe"), {{"shared_expert_intermediate_size", 24}});
    EXPECT_TRUE(s.experts.shared_F == 24 && s.experts.shared_gate && s.attention.qkv_bias && s.experts.dense_F == 0 && !s.block.qk_norm);
    EXPECT_FALSE(config_shape(dir, llama_json("qwen2_moe"), {{"qkv_bias", false}}).attention.qkv_bias);

    EXPECT_HAS(config_error(dir, llama_json("mixtral"), {{"router_jitter_noise", 0.1}}),
               "router_jitter_noise 0.1 is not built yet");
    EXPECT_HAS(config_error(dir, llama_json("mixtral"), {{"num_experts_per_tok", 9}}),
               "num_experts_per_tok 9 of 8 experts: at most 8");
}

// GPT-NeoX has its own names for RoPE's numbers. Another name must say the same.
TEST_F(HuggingFace, ConfigOfNeoxNamesEachNumberOnce) {
    json neox = {{"model_type", "gpt_neox"}, {"vocab_size", 61}, {"hidden_size", 32},
                 {"num_hidden_layers", 2}, {"num_attention_heads", 4}, {"intermediate_size", 40},
                 {"rotary_pct", 0.5}, {"rotary_emb_base", 50}};
    EXPECT_EQ(config_shape(dir, neox).rope.rotary, 4u);
    EXPECT_EQ(config_shape(dir, neox, {{"rope_theta", 50.0}}).rope.theta, 50);
    EXPECT_HAS(config_error(dir, neox, {{"rope_theta", 60.0}}),
               "rope_theta 60.0 beside rotary_emb_base 50.0: give both the same value");
    EXPECT_HAS(config_error(dir, neox, {{"partial_rotary_factor", 0.25}}),
               "partial_rotary_factor 0.25 beside rotary_pct 0.5");

    // The object's value wins, also where it turns whole heads.
    json whole = {{"rope_type", "default"}, {"partial_rotary_factor", 1.0}};
    EXPECT_EQ(config_shape(dir, neox, {{"rope_parameters", whole}}).rope.rotary, 0u);
}

// DeepSeek's keys. A key that would make another model is refused by name.
TEST_F(HuggingFace, ConfigOfDeepseek) {
    json v3 = llama_json("deepseek_v3");
    v3["num_key_value_heads"] = v3["num_attention_heads"], v3["num_hidden_layers"] = 5;
    v3.erase("head_dim");
    Shape s = config_shape(dir, v3), published = deepseek_v3();
    EXPECT_EQ((std::vector<size_t>{s.latent.q, s.latent.kv, s.HS, s.rope.rotary, s.latent.HS_v}),
              (std::vector<size_t>{1536, 512, 192, 64, 128}));
    EXPECT_EQ((std::vector<size_t>{s.experts.E, s.experts.K, s.F, s.experts.shared_F, s.experts.groups, s.experts.kept_groups,
                                   s.experts.dense_first}),
              (std::vector<size_t>{256, 8, 2048, 2048, 8, 4, 3}));
    EXPECT_TRUE(s.experts.router == published.experts.router && s.experts.choice_bias && s.experts.gate_scale == 2.5f &&
                s.family == Family::DEEPSEEK);
    EXPECT_EQ(config_shape(dir, v3, {{"q_lora_rank", nullptr}}).latent.q, 0u);
    EXPECT_EQ(config_shape(dir, v3, {{"norm_topk_prob", false}}).experts.router, Router::SIGMOID_ALONE);

    // The published models' scores grow by the square of 0.1 ln(40) + 1 = 1.873854.
    json yarn = {{"type", "yarn"}, {"factor", 40}, {"original_max_position_embeddings", 4096},
                 {"mscale", 1.0}, {"mscale_all_dim", 1.0}};
    s = config_shape(dir, v3, {{"rope_scaling", yarn}});
    EXPECT_NEAR(std::sqrt(192 / s.attention.score_scalar), 1.873854, 1e-6);
    EXPECT_EQ(s.rope.scaling.attention_factor, 1);
    EXPECT_DOUBLE_EQ(s.attention.score_scalar, published.attention.score_scalar);
    EXPECT_NEAR(std::sqrt(192 / deepseek_v2_lite().attention.score_scalar), 1.589626, 1e-6);

    // V2's router has defaults of its own.
    json v2 = v3;
    v2["model_type"] = "deepseek_v2", v2["num_experts_per_tok"] = 6;
    s = config_shape(dir, v2);
    EXPECT_TRUE(s.experts.router == Router::SOFTMAX && s.experts.groups == 1 && !s.experts.choice_bias &&
                s.experts.dense_first == 0);

    for (auto [key, value, words] :
         {std::tuple<const char*, json, const char*>{"rope_interleave", false,
                                                     "rope_interleave false is not built"},
          {"v_head_dim", 200, "v_head_dim 200 is not built yet: up to 192"},
          {"num_key_value_heads", 2, "num_key_value_heads 2 is not built with latent attention"},
          {"topk_method", "greedy", "topk_method \"greedy\" is not built yet"},
          {"scoring_func", "softmax", "scoring_func \"softmax\" is not built yet"},
          {"moe_layer_freq", 2, "moe_layer_freq 2 is not built yet"},
          {"attention_bias", true, "attention_bias true is not built yet"},
          {"n_group", 7, "n_group 7 of 256 experts"},
          {"topk_group", 9, "topk_group 9 of 8 groups"}})
        EXPECT_HAS(config_error(dir, v3, {{key, value}}), words);
    EXPECT_HAS(config_error(dir, v2, {{"norm_topk_prob", true}}),
               "norm_topk_prob true is not built yet");
}

// Files hold each expert as a tensor of its own, and a missing expert is named.
TEST_F(HuggingFace, ExpertsAreTensorsOfTheirOwn) {
    for (Shape s : saved_shapes()) {
        if (s.experts.E == 0 || s.experts.bias) continue; // or joined
        auto m = random_model<float>(s);
        std::string folder = dir + "/experts";
        ASSERT_EQ(hf_export(m->t, folder, Type::F32), "");
        SafeTensors f;
        ASSERT_EQ(safetensors_open(&f, folder + "/model.safetensors"), "");

        bool mixtral = s.hf_type == "mixtral";
        std::string up = mixtral ? "model.layers.1.block_sparse_moe.experts.2.w3.weight"
                                 : "model.layers.1.mlp.experts.2.up_proj.weight";
        const SafeTensor* tensor = safetensors_find(f, up);
        ASSERT_TRUE(tensor);
        EXPECT_EQ(tensor->shape, (std::vector<size_t>{s.F, s.C}));

        for (const Parameter& p : m->t.model.parameters) {
            if (stack_name(p.name, 2) != up) continue;
            std::vector<float> all = get_weight(m->t, p);
            auto third = all.begin() + long(2 * s.F * s.C);
            std::vector<float> found(tensor->elements());
            tensor_to_float(found.data(), *tensor, 0, found.size());
            EXPECT_EQ(found, std::vector<float>(third, third + long(s.F * s.C)));
        }
        safetensors_close(&f);

        // The model asks for one expert more than the files have.
        s.experts.E++;
        auto more = random_model<float>(s);
        std::string wrong = hf_load_weights(more->t, folder);
        EXPECT_HAS(wrong, "gate.weight has the shape");
    }
}

// gpt-oss' class has defaults for its windows, its clamp, its biases and YaRN.
TEST_F(HuggingFace, ConfigOfGptOssHasItsClassesDefaults) {
    json oss = llama_json("gpt_oss");
    Shape s = config_shape(dir, oss);
    EXPECT_TRUE(s.attention.sinks && s.experts.bias && s.attention.qkv_bias && s.attention.o_bias && !s.embedding.tied);
    EXPECT_EQ((std::vector<size_t>{s.experts.E, s.experts.K, s.F, s.HS, s.NKV}),
              (std::vector<size_t>{128, 4, 20, 64, 2}));
    EXPECT_TRUE(s.experts.gate_alpha == 1.702 && s.experts.gate_limit == 7 && s.rope.theta == 150000);
    EXPECT_TRUE(window_of(s, 1) == 128 && window_of(s, 2) == 0);
    const RopeScaling& r = s.rope.scaling;
    EXPECT_TRUE(r.kind == RopeKind::YARN && r.factor == 32 && !r.truncate);
    EXPECT_EQ(r.original_positions, 4096);
    EXPECT_NEAR(r.attention_factor, 1.346574, 1e-6); // 0.1 ln 32 + 1

    // Keys that say otherwise.
    s = config_shape(dir, oss, {{"attention_bias", false}, {"swiglu_limit", 3.5},
                                {"layer_types", {"full_attention", "full_attention"}},
                                {"rope_parameters", {{"rope_type", "default"}}}});
    EXPECT_TRUE(!s.attention.qkv_bias && s.attention.sinks && s.experts.gate_limit == 3.5 && s.attention.window == 0);
    EXPECT_FALSE(scales(s.rope.scaling));
    json written = hf_json(s);
    EXPECT_EQ(written["rope_scaling"], (json{{"rope_type", "default"}}));
    EXPECT_EQ(written["attention_bias"], false);
    EXPECT_HAS(config_error(dir, oss, {{"swiglu_limit", 0}}), "swiglu_limit is 0, not above zero");
    s = config_shape(dir, oss, {{"layer_types", {"full_attention", "sliding_attention"}}});
    EXPECT_TRUE(window_of(s, 1) == 0 && window_of(s, 2) == 128);
    s.experts.router = Router::SOFTMAX;
    EXPECT_HAS(hf_refusal(s), "has no such router");
}

// gpt-oss' files join all experts, gate and up side by side; codes must have their shapes.
TEST_F(HuggingFace, GptOssJoinsItsExperts) {
    std::vector<Shape> shapes = saved_shapes();
    Shape s = *std::find_if(shapes.begin(), shapes.end(), [](auto& x) { return x.experts.bias; });
    auto m = random_model<float>(s);
    ASSERT_EQ(hf_export(m->t, dir + "/oss", Type::F32), "");
    TensorFile file(dir + "/oss/model.safetensors");
    for (const Parameter& p : m->t.model.parameters) {
        std::vector<float> want = get_weight(m->t, p);
        want.resize(p.file_elements()); // without the vocabulary's padding
        EXPECT_EQ(file.of("", p, s), want) << p.name;
    }
    std::string experts = "model.layers.1.mlp.experts.";
    const SafeTensor* joined = safetensors_find(file.file, experts + "gate_up_proj");
    ASSERT_TRUE(joined);
    EXPECT_EQ(joined->shape, (std::vector<size_t>{s.experts.E, s.C, 2 * s.F}));

    // One expert more than the files have.
    Shape more = s;
    more.experts.E++;
    EXPECT_HAS(hf_load_weights(random_model<float>(more)->t, dir + "/oss"), "has the shape");
}

// Load on four ranks, which share out the weights: each has its part of the whole ones.
template <typename T, typename F>
static void expect_parts(const Shape& s, Layout sizes,
                         const std::map<std::string, std::vector<float>>& whole, F load) {
    sizes.zero = 3;
    EXPECT_EQ(run_local_ranks(4, {}, [&](const Comm& world) {
        Plan plan = plan_of(Mode::TRAIN, 2, 16);
        plan.layout = layout_at(sizes, world.rank);
        Small<T> part(s, {plan});
        part.t.comms = make_comms(world, plan.layout, ranks_of_kv_head(plan.layout, part.t.model));
        EXPECT_EQ(load(part.t), "");
        for (const Parameter& p : part.t.model.parameters) {
            std::vector<float> same = get_weight(part.t, p);
            same.resize(p.file_elements());
            EXPECT_EQ(same, whole.at(p.name)) << p.name;
        }
    }), 0);
}

// The shape that --upcycle makes of a dense model.
static Shape upcycled(const Shape& dense, int experts) {
    Shape s = dense;
    Config c;
    c.upcycle = experts, c.balance = 0;
    EXPECT_EQ(override_shape(c, s), "");
    EXPECT_EQ(s.experts.E, size_t(experts));
    return s;
}

// Equal experts compute what the ffn computes that they copy, whatever a new router
// chooses: in double the loss is the dense model's. A seed draws the same router in every
// layout, and changes nothing else.
TEST_F(HuggingFace, UpcycledFoldersAreTheDenseModel) {
    for (const Shape& s : saved_shapes()) {
        bool can = s.hf_type == "llama" || s.hf_type == "mistral" || s.hf_type == "qwen3";
        if (!can || s.attention.qkv_bias || s.embedding.tied) continue;
        std::string folder = dir + "/dense";

        // The dense model's loss.
        ASSERT_EQ(hf_export(random_model<float>(s)->t, folder, Type::F32), "");
        auto dense = random_model<double>(s, 4);
        size_t once = 0, bytes = 0;
        ASSERT_EQ(hf_load_weights(dense->t, folder, {}, "", &once), "");
        run_plan(dense->t, 0);
        Shape moe = upcycled(s, 4);

        std::set<std::vector<float>> routers;
        for (uint64_t seed : {1, 2}) {
            auto m = random_model<double>(moe, 5);
            ASSERT_EQ(upcycle_weights(m->t, folder, seed, {}, &bytes), "");
            EXPECT_EQ(bytes, once); // four experts read the ffn once

            // The experts' model has it too, and its routers are the seed's.
            std::map<std::string, std::vector<float>> whole;
            for (const Parameter& p : m->t.model.parameters) {
                whole[p.name] = get_weight(m->t, p);
                if (!dense_name(p).empty()) continue;
                routers.insert(whole[p.name]);
                for (size_t i = 0; i < p.elements(); i++)
                    EXPECT_EQ(whole[p.name][i], float(p.init.std * normal(seed, fnv1a(p.name), i)));
            }
            run_plan(m->t, 0);
            double loss = plan_loss(dense->t).mean();
            EXPECT_NEAR(plan_loss(m->t).mean(), loss, 1e-14 * loss) << shape_name(s);

            // Four ranks draw the same.
            for (const Parameter& p : m->t.model.parameters) whole[p.name].resize(p.file_elements());
            Layout sizes = small_layout(2, 2);
            sizes.ep = 2;
            expect_parts<double>(moe, sizes, whole, [&](auto& t) {
                return upcycle_weights(t, folder, seed);
            });
        }
        EXPECT_EQ(routers.size(), 2 * s.L); // each block has its own, for each seed
    }
}

// A missing tensor has the name that the folder would give it. A folder with experts is refused.
TEST_F(HuggingFace, FoldersThatAreNotDenseAreNotUpcycled) {
    Shape s = llama_shape(2, 4, 2, 16, 20, 61, 32, 10000);
    Shape moe = upcycled(s, 3);
    auto m = random_model<float>(moe);
    ASSERT_EQ(hf_export(m->t, dir + "/moe", Type::F32), "");
    EXPECT_HAS(upcycle_weights(m->t, dir + "/moe", 1),
               "tensor model.layers.0.mlp.gate_proj.weight is missing");

    Config c;
    c.upcycle = 3;
    EXPECT_HAS(override_shape(c, moe), "--upcycle 3: the model has experts already: leave it out");
}

// The folder's rows stay, and new rows begin near their mean, each at its own place, the same in
// all layouts. A model's spare rows are its own.
TEST_F(HuggingFace, NewTokensBeginAsTheMeanOfTheOthers) {
    for (Shape s : saved_shapes()) {
        bool usual = is_one_of(s.hf_type, "gpt2 llama gpt_neox track3"); // whose head has a bias
        if (!usual || s.experts.E) continue;
        std::string folder = dir + "/before";
        auto old = random_model<float>(s);
        ASSERT_EQ(hf_export(old->t, folder, Type::F32), "");
        size_t before = s.V;
        s.V += 3;
        auto grown = random_model<float>(s, 5);
        ASSERT_EQ(load_and_grow(grown->t, folder, 7), "");

        // Compare the old rows with the folder's, and the new ones with the mean of the old.
        std::map<std::string, std::vector<float>> whole;
        for (size_t k = 0; k < old->t.model.parameters.size(); k++) {
            const Parameter &p = grown->t.model.parameters[k], &q = old->t.model.parameters[k];
            std::vector<float> &x = whole[p.name], was = get_weight(old->t, q);
            x = get_weight(grown->t, p);
            x.resize(p.file_elements()), was.resize(q.file_elements());
            EXPECT_TRUE(std::equal(was.begin(), was.end(), x.begin())) << p.name;
            if (p.file_rows == q.file_rows) continue;
            EXPECT_TRUE(is_token_table(grown->t.model, p)) << p.name;

            std::set<float> drawn;
            for (size_t c = 0, C = p.cols(); c < C; c++) {
                double mean = 0, most = 0;
                for (size_t i = 0; i < before; i++) {
                    mean += double(was[i * C + c]) / double(before);
                    most = std::max(most, std::fabs(double(was[i * C + c])));
                }
                for (size_t i = before; i < s.V; i++) {
                    EXPECT_NEAR(x[i * C + c], mean, 6e-3 * most) << p.name;
                    drawn.insert(x[i * C + c]);
                }
            }
            EXPECT_EQ(drawn.size(), 3 * p.cols()) << "no two elements are the same";
        }

        // Four ranks draw the same.
        int tp = tp_divides(s, 2) ? 2 : 1;
        expect_parts<float>(s, small_layout(4 / tp, tp), whole, [&](auto& t) {
            return load_and_grow(t, folder, 7);
        });
    }
}

// New tokens come after the tokenizer's own, and the tokenizer finds their texts.
// A tokenizer.json learns them.
TEST_F(HuggingFace, TokenizersLearnNewTokens) {
    Tokenizer t;
    EXPECT_HAS(add_tokens(&t, "x"), "--tokenizer byte has bytes alone");
    t.kind = TokenizerKind::BPE;
    for (int b = 0; b < 256; b++) set_piece(&t, b, std::string(1, char(b)));
    t.vocab_size = 256;

    ASSERT_EQ(add_tokens(&t, "<a>,<b>"), "");
    EXPECT_EQ(t.vocab_size, 258);
    EXPECT_EQ(find_token(t.special, "<b>"), 257);
    EXPECT_EQ(t.pieces[257], "<b>");

    EXPECT_HAS(add_tokens(&t, "<c>,<a>"), "--add-tokens <a>: is token 256 already");
    EXPECT_HAS(add_tokens(&t, "<d>,"), "a text between two commas is empty");

    // A tokenizer.json that knows one token gets the others, in the order of their numbers, which
    // the tokenizers library gives out itself. A list in the config is what some classes read.
    ASSERT_EQ(add_tokens(&t, "<0>"), "");
    ExportTokenizer e;
    e.files = {
        {"tokenizer.json", R"({"added_tokens": [{"id": 256, "content": "<a>"}], "model": 1})"},
        {"tokenizer_config.json", R"({"added_tokens_decoder": {"256": {"content": "<a>"}}})"},
        {"tokenizer.model", "x"}};
    ASSERT_EQ(add_tokens_to_files(&e, t, "<a>,<b>,<0>"), "");
    json now = json::parse(e.files["tokenizer.json"]);
    ASSERT_EQ(now["added_tokens"].size(), 3u);
    EXPECT_EQ(now["added_tokens"][1]["id"], 257);
    EXPECT_EQ(now["added_tokens"][2]["id"], 260);
    EXPECT_EQ(now["added_tokens"][2]["content"], "<0>");
    EXPECT_EQ(now["added_tokens"][1]["special"], true);
    EXPECT_EQ(now["model"], 1);
    json listed = json::parse(e.files["tokenizer_config.json"])["added_tokens_decoder"];
    EXPECT_EQ(listed["260"]["content"], "<0>");
    EXPECT_FALSE(listed["260"].contains("id"));
    EXPECT_EQ(e.files["tokenizer.model"], "x"); // llama.cpp's converter reads both

    // Without a tokenizer.json, a SentencePiece model would lack them: it is left out.
    e.files["tokenizer.json"] = "[]";
    EXPECT_HAS(add_tokens_to_files(&e, t, "<a>"), "is no JSON object");
    e.files.erase("tokenizer.json");
    EXPECT_EQ(add_tokens_to_files(&e, t, "<a>"), "");
    EXPECT_EQ(e.files.count("tokenizer.model"), 0u);
}

// DeepSeek-V3's files have layers after the last one, which predict further tokens. They are left
// out, and one line says so. In another family such layers mean another model.
TEST_F(HuggingFace, LayersThatPredictFurtherAreLeftOutAloud) {
    for (Shape s : saved_shapes()) {
        if (s.hf_type != "deepseek_v3" && s.hf_type != "llama") continue;
        std::string folder = dir + "/further";
        s.L++;
        auto longer = random_model<float>(s);
        ASSERT_EQ(hf_export(longer->t, folder, Type::F32), "");
        s.L--;
        auto m = random_model<float>(s, 4);

        testing::internal::CaptureStdout();
        std::string wrong = hf_load_weights(m->t, folder);
        std::string said = testing::internal::GetCapturedStdout();

        if (s.hf_type == "llama") {
            EXPECT_HAS(wrong, "model.layers.2.");
            EXPECT_HAS(wrong, "belongs to nothing in this model");
            continue;
        }

        EXPECT_EQ(wrong, "");
        size_t further = 0;
        for (const Parameter& p : longer->t.model.parameters)
            further += p.layer == int(s.L) + 1 ? p.stack : 0;
        EXPECT_EQ(said, concat(folder, ": left out ", further,
                               " tensors behind the last layer, which predict further tokens\n"));
        for (const Parameter& p : m->t.model.parameters)
            for (const Parameter& same : longer->t.model.parameters)
                if (same.name == p.name) {
                    EXPECT_EQ(get_weight(m->t, p), get_weight(longer->t, same));
                }
    }
}

// A list of layers' kinds decides in every family whose class of transformers reads it, whatever
// the list; three classes read none, and four have no window. An export says the same again.
TEST_F(HuggingFace, AnyListOfLayersWithAWindowIsRead) {
    json full = "full_attention", window = "sliding_attention";
    json list = {window, full, full, window, window, full, window};
    json keys = {{"sliding_window", 8}, {"use_sliding_window", true}, {"num_hidden_layers", 7},
                 {"max_window_layers", 2}, {"layer_types", list}};
    auto kinds = [&](const Shape& s) {
        json all;
        for (int layer = 1; layer <= int(s.L); layer++)
            all.push_back(window_of(s, layer) == 8 ? window : full);
        return all;
    };
    for (const char* type : {"mistral", "qwen2", "qwen3", "qwen2_moe", "gpt_oss", "smollm3",
                             "gemma2", "gemma3_text", "olmo3"}) {
        Shape s = config_shape(dir, llama_json(type), keys);
        EXPECT_EQ(kinds(s), list) << type;
        EXPECT_NE(model_identity(s), model_identity(config_shape(dir, llama_json(type),
                                                                 {{"num_hidden_layers", 7}})));
        EXPECT_EQ(hf_refusal(s), "") << type;
        Shape again = config_shape(dir, hf_json(s));
        EXPECT_EQ(model_identity(again), model_identity(s)) << type;
    }
    for (const char* type : {"mixtral", "qwen3_moe", "phi3"}) {
        Shape s = config_shape(dir, llama_json(type), keys);
        EXPECT_EQ(kinds(s), json(std::vector<json>(7, window))) << type;
        s.attention.full_layers[3] = true;
        EXPECT_HAS(hf_refusal(s), concat(type, " has its window in all layers"));
    }
    for (const char* type : {"llama", "olmo2", "olmoe", "deepseek_v3"}) {
        keys["num_key_value_heads"] = nullptr;
        EXPECT_EQ(config_shape(dir, llama_json(type), keys).attention.window, 0u) << type;
    }

    // Without a list the class decides: Qwen2-MoE's window is in every other layer before one.
    keys.erase("layer_types");
    EXPECT_EQ(kinds(config_shape(dir, llama_json("qwen2_moe"), keys)),
              (json{window, full, full, full, full, full, full}));
    EXPECT_EQ(kinds(config_shape(dir, llama_json("smollm3"), keys)),
              (json{full, full, full, window, full, full, full}));
    EXPECT_EQ(kinds(config_shape(dir, llama_json("olmo3"), keys)),
              (json{window, window, window, full, window, window, window}));
    keys["rope_parameters"] = {{"sliding_attention", {{"rope_theta", 5}}}};
    EXPECT_HAS(config_error(dir, llama_json("olmo3"), keys), "olmo3's windows is not built yet");
    keys["sliding_window"] = 0, keys["use_sliding_window"] = false; // as transformers saves it
    EXPECT_EQ(config_shape(dir, llama_json("qwen2_moe"), keys).attention.window, 0u);
}

// A layer's window, by the layer's number: block b is layer b + 1.
TEST_F(HuggingFace, ConfigOfQwensWindows) {
    auto windows = [&](const json& more) {
        json all = {{"use_sliding_window", true}, {"sliding_window", 32}, {"num_hidden_layers", 4}};
        all.update(more);
        Shape s = config_shape(dir, llama_json("qwen2"), all);
        return std::vector<size_t>{window_of(s, 1), window_of(s, 2), window_of(s, 3),
                                   window_of(s, 4)};
    };
    typedef std::vector<size_t> Sizes;
    EXPECT_EQ(windows(json::object()), (Sizes{0, 0, 0, 0})); // by default from layer 28 on
    EXPECT_EQ(windows({{"max_window_layers", 0}}), (Sizes{32, 32, 32, 32}));
    EXPECT_EQ(windows({{"max_window_layers", 3}}), (Sizes{0, 0, 0, 32}));
    EXPECT_EQ(windows({{"max_window_layers", 0}, {"sliding_window", nullptr}}),
              (Sizes{0, 0, 0, 0}));
    EXPECT_EQ(windows({{"max_window_layers", 0}, {"use_sliding_window", false}}),
              (Sizes{0, 0, 0, 0}));

    json full = "full_attention", window = "sliding_attention";
    EXPECT_EQ(windows({{"layer_types", {full, full, full, full}}}), (Sizes{0, 0, 0, 0}));
    EXPECT_EQ(windows({{"layer_types", {window, "attention", full, window}}}),
              (Sizes{32, 0, 0, 32}));
    for (const auto& [types, wrong] :
         {std::pair<json, const char*>{{window, window}, "layer_types is no list of 4 words"},
          {{full, full, full, "x"}, "layer_types \"x\" is not built yet: full_attention and"},
          {"x", "layer_types is no list of 4 words"}})
        EXPECT_HAS(config_error(dir, llama_json("qwen2"),
                                {{"use_sliding_window", true},
                                 {"num_hidden_layers", 4},
                                 {"layer_types", types}}),
                   wrong);
    EXPECT_HAS(config_error(dir, llama_json("qwen2"), {{"layer_types", {full, window}}}),
               "layer_types has windows, and sliding_window is no size");
    EXPECT_HAS(config_error(dir, llama_json("qwen2"),
                            {{"layer_types", {full, window}}, {"sliding_window", 8}}),
               "layer_types has windows, and use_sliding_window is not true");
}

TEST_F(HuggingFace, ConfigErrorsAreNamed) {
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

    // Each size that is missing or no size.
    for (const json& whole :
         {gpt2_json(), llama_json(), llama_json("mistral"), llama_json("qwen2")})
        for (auto& [key, value] : whole.items()) {
            if (key == "model_type" || key == "num_key_value_heads") continue;
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

    // Values of the right type that make no model.
    json crossed = {{"rope_type", "llama3"}, {"high_freq_factor", 0.5}};
    for (const auto& [key, value, words] : std::vector<std::tuple<const char*, json, const char*>>{
             {"tie_word_embeddings", "yes", "is \"yes\", neither true nor false"},
             {"mlp_bias", 1, "mlp_bias is 1, neither true nor false"},
             {"rope_theta", 0, "rope_theta is 0, not above zero"},
             {"rms_norm_eps", -1e-5, "rms_norm_eps is -1e-05, not above zero"},
             {"num_hidden_layers", 1 << 24, "16777216 layers"},
             {"rope_scaling", crossed, "low_freq_factor 1.0, not below high_freq_factor 0.5"},
             {"model_type", "bloom",
              "'bloom' is not supported: gpt2, llama, mistral, qwen2, qwen3, mixtral, qwen2_moe, "
              "qwen3_moe, olmoe, gpt_oss, deepseek_v2, deepseek_v3, olmo2, olmo3, smollm3, phi3, "
              "gemma2, gemma3_text, nanochat, nanochat_values, track3 and gpt_neox are"}})
        EXPECT_HAS(config_error(dir, llama_json(), {{key, value}}), words);

    // Sizes that do not divide.
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

    // Variants that are not built.
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
        if (type == std::string("llama")) continue;
        refused(llama_json(type), "attention_bias", true);
        refused(llama_json(type), "mlp_bias", true);
    }
    refused(llama_json("qwen3"), "mlp_bias", true);
    refused(llama_json("phi3"), "attention_bias", true);

    // Deeply nested brackets: a reader that prints them would end its stack.
    std::string deep(1 << 20, '['), config = gpt2_json().dump();
    for (const char* key : {"\"n_embd\":12", "\"n_layer\":2"}) {
        std::string text = config,
                    nested = std::string(key).substr(0, std::string(key).find(':') + 1) + deep;
        text.replace(text.find(key), strlen(key), nested + std::string(deep.size(), ']'));
        put_file(dir + "/config.json", text);
        EXPECT_HAS(hf_read_config(&s, dir), "config.json: is nested more than 100 brackets deep");
    }

    std::string text = config;
    text.insert(1, "\"activation_function\":" + deep + std::string(deep.size(), ']') + ",");
    put_file(dir + "/config.json", text);
    EXPECT_HAS(hf_read_config(&s, dir), "config.json: is nested more than 100 brackets deep");

    EXPECT_HAS(config_error(dir, gpt2_json(), {{"n_embd", {1}}}), "n_embd is [1]");
    EXPECT_HAS(config_error(dir, gpt2_json(), {{"activation_function", {1}}}),
               "activation_function [1] is not built yet");
}

// Whatever a field holds, the answer is a shape that can be built or a line that names the file. It
// is never an exception.
TEST_F(HuggingFace, AnyMistypedFieldOfAConfigIsAnswered) {
    auto check = [&](const json& j) {
        Shape s;
        std::string wrong = config_error(dir, j, json::object(), &s);
        EXPECT_TRUE(wrong.empty() || wrong.find(dir) == 0) << wrong;
        if (!wrong.empty()) return;
        EXPECT_TRUE(s.L && s.NH && s.NKV && s.HS && s.C && s.F && s.V && s.P &&
                    s.block.norm_eps > 0 && s.rope.theta > 0)
            << j;
        EXPECT_LT(double(s.L) * double(s.C) * double(s.F + 4 * s.NH * s.HS), 1e17) << j;
    };

    // Each value for a key of the file, or of an object in it; then the file without the key.
    auto check_key = [&](json j, const std::string& key, const char* object = nullptr) {
        json& to = object ? j[object] : j;
        for (const json& value :
             {json(), json("x"), json(""), json(-1), json(0), json(1.5), json(1e300),
              json(4294967296), json(UINT64_MAX), json(true), json(false), json::object(),
              json::array()}) {
            to[key] = value;
            check(j);
        }
        to.erase(key);
        check(j);
    };

    // Every field that a GPT-2 and a Llama have.
    json gpt2 = gpt2_json(), llama = llama_json();
    gpt2.update({{"n_ctx", 9}, {"n_inner", 20}, {"layer_norm_epsilon", 1e-5},
                 {"tie_word_embeddings", true}, {"activation_function", "gelu_new"},
                 {"scale_attn_weights", true}});
    llama.update({{"num_key_value_heads", 2}, {"max_position_embeddings", 64}, {"head_dim", 4},
                  {"rms_norm_eps", 1e-5}, {"rope_theta", 1e4}, {"hidden_act", "silu"},
                  {"attention_bias", false}, {"mlp_bias", false}, {"tie_word_embeddings", false},
                  {"rope_scaling", llama3_scaling()}});
    for (const json& good : {gpt2, llama}) {
        EXPECT_EQ(config_error(dir, good), "");
        for (const auto& [key, value] : good.items())
            check_key(good, key);
    }

    // Each field of RoPE's scaling, and fields that other families read.
    for (const char* type : {"llama3", "linear", "dynamic", "yarn"})
        for (const char* key : {"rope_type", "factor", "low_freq_factor", "high_freq_factor",
                                "original_max_position_embeddings", "rope_theta", "beta_fast",
                                "beta_slow", "truncate", "mscale", "mscale_all_dim",
                                "attention_factor", "partial_rotary_factor"}) {
            llama["rope_scaling"]["rope_type"] = type;
            check_key(llama, key, "rope_scaling");
        }
    llama["rope_scaling"].erase("rope_type");
    check_key(llama, "type", "rope_scaling");
    for (const char* key : {"layer_types", "max_window_layers", "sliding_window",
                            "use_sliding_window", "attention_bias", "num_key_value_heads"})
        for (json j : {llama_json("mistral"), llama_json("qwen2")}) {
            j["use_sliding_window"] = true;
            check_key(j, key);
        }
}

// ----------------------------------------------------------------------------
// exports

// Export each family in one file, in several, and with one tensor a file. The folder is read as the
// same shape and the same weights.
template <typename T> static void export_round_trip(const std::string& dir) {
    for (const Shape& s : saved_shapes())
        for (size_t shard_bytes : {size_t(5) << 30, size_t(3000), size_t(1)}) {
            // One file a tensor takes its time, since each file is synced: fewer shapes do. In
            // Phi-3's files and gpt-oss' several parameters are one tensor.
            bool joins = s.hf_type == "phi3", joined = s.hf_type == "gpt_oss";
            if (shard_bytes == 1 && s.family == Family::LLAMA && (!s.attention.qkv_bias || joins)) continue;
            std::string folder = dir + "/export"; // replaces the one before
            auto a = random_model<T>(s), b = random_model<T>(s, 4);
            ASSERT_EQ(hf_export(a->t, folder, Type::F32, shard_bytes), "");

            // Count the files.
            auto files = folder_bytes(folder);
            size_t shards = files.size() - 1 - files.count("model.safetensors.index.json");
            EXPECT_EQ(files.count("config.json"), 1u);
            EXPECT_EQ(files.count("model.safetensors.index.json"), shards > 1);
            if (shard_bytes > 3000)
                EXPECT_EQ(shards, 1u);
            else if (shard_bytes == 1)
                EXPECT_EQ(shards, size_t(std::count_if(
                                      a->t.model.parameters.begin(), a->t.model.parameters.end(),
                                      [&](auto& p) {
                                          return !has(p.name, "up_proj") || !joined;
                                      })));
            else
                EXPECT_GT(shards, 2u);

            EXPECT_FALSE(fs::exists(folder + ".tmp") || fs::exists(folder + ".old"));
            Shape read;
            ASSERT_EQ(hf_read_config(&read, folder), "");
            EXPECT_EQ(model_identity(read), model_identity(s));
            ASSERT_EQ(hf_load_weights(b->t, folder), "") << shape_name(s);
            expect_same_weights(*a, *b);
        }
}
TEST_F(HuggingFace, ExportsLoadToTheSameBits) {
    export_round_trip<float>(dir);
    export_round_trip<bf16>(dir); // exports its masters
    EXPECT_EQ(json(decimal(1e-5f)).dump(), "1e-05");
    EXPECT_EQ(float(decimal(0.1f / 3)), 0.1f / 3); // which needs all nine digits
}

// Rounding is off by at most half of the last place, and a number that was
// rounded once stays as it is.
TEST_F(HuggingFace, NarrowExportsRoundToNearestOnce) {
    for (const Shape& s : saved_shapes())
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

// Tensors have Hugging Face's names, shapes and order of elements, without rows of padding.
TEST_F(HuggingFace, ExportsHoldWhatHuggingFaceExpects) {
    // The tensors of GPT-2 and Llama, outside the blocks and in one block.
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

    // Both blocks, and what the variants add or leave out.
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

    std::vector<Shape> shapes = saved_shapes();
    std::map<size_t, Table> tables = {{0, gpt2},  {1, gpt2_untied}, {2, llama},
                                      {4, llama}, {6, qwen2},       {7, qwen2_tied}};

    // Export each, and compare the tables.
    for (auto& [i, table] : tables) {
        auto m = random_model<float>(shapes[i]);
        ASSERT_EQ(hf_export(m->t, dir + "/export", Type::F32), "");
        TensorFile file(dir + "/export/model.safetensors");
        Table found;
        for (const SafeTensor& t : file.file.tensors) found[t.name] = t.shape;
        EXPECT_EQ(found, table) << shape_name(shapes[i]);
        EXPECT_EQ(file.file.metadata["format"], "pt");
        if (i > 0) continue;
        // GPT-2's Conv1D matrices are stored as [in, out].
        for (const Parameter& p : m->t.model.parameters) {
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

// Two ranks. If the first one cannot write, both report it, and neither waits for the other.
TEST_F(HuggingFace, ExportsThatFailOnTheFirstRankFailOnAll) {
    Shape s = saved_shapes()[2];
    std::string wrong[2];
    auto export_on_both = [&](const std::string& folder, size_t shard_bytes) {
        LocalSettings settings;
        settings.timeout_s = 10;
        int status = run_local_ranks(2, settings, [&](const Comm& world) {
            omp_set_num_threads(1);
            Trainer<float, Cpu> t;
            Plan plan = plan_of(Mode::TRAIN, 1, 4);
            trainer_place(t, s, {plan}, layout_at(small_layout(2, 1, 1), world.rank));
            t.comms = make_comms(world, t.layout, ranks_of_kv_head(t.layout, t.model));
            trainer_allocate(t);
            fill_weights(t, 3);
            wrong[world.rank] = hf_export(t, folder, Type::F32, shard_bytes);
            trainer_free(t);
        });
        EXPECT_EQ(status, 0);
        EXPECT_EQ(wrong[0], wrong[1]);
        return wrong[1];
    };

    // A folder that cannot be made; a disk that fills up in the only file, and in one of several.
    EXPECT_EQ(export_on_both(dir + "/good", 1 << 30), "");
    EXPECT_HAS(export_on_both(dir + "/no/such", 1 << 30), "cannot be made: No such file");

    size_t whole = fs::file_size(dir + "/good/model.safetensors");
    rlimit saved, small;
    getrlimit(RLIMIT_FSIZE, &saved);
    auto handler = signal(SIGXFSZ, SIG_IGN);
    for (size_t shard_bytes : {size_t(1) << 30, whole / 3}) {
        small = saved, small.rlim_cur = whole / 4;
        setrlimit(RLIMIT_FSIZE, &small);
        std::string full = export_on_both(dir + "/full", shard_bytes);
        setrlimit(RLIMIT_FSIZE, &saved);
        EXPECT_HAS(full, "cannot be written: File too large");
        EXPECT_FALSE(fs::exists(dir + "/full") || fs::exists(dir + "/full.exporting"));
    }
    signal(SIGXFSZ, handler);
}

// ----------------------------------------------------------------------------
// weights that others wrote

// Write a file with these tensors. All floats differ, but for those of a copy of the first one.
static void write_tensors(const std::string& path, const std::vector<TensorSpec>& specs,
                          const std::string& copy = "") {
    FileWriter w;
    ASSERT_EQ(writer_open(&w, path, specs, {}), "");
    float next = 0;
    for (const TensorSpec& s : specs) {
        std::vector<float> numbers(s.bytes() / 4);
        if (s.name == copy) next = 0;
        for (float& x : numbers) x = ++next;
        writer_put(w, numbers.data(), s.bytes());
    }
    ASSERT_EQ(writer_close(&w), "");
}

// The tensors of a model's file, with a prefix before all names but the head's.
static std::vector<TensorSpec> specs_of(const Model& model, const std::string& prefix = "") {
    std::vector<TensorSpec> specs;
    for (const Parameter& p : model.parameters)
        specs.push_back({p.name == "lm_head.weight" ? p.name : prefix + p.name, Type::F32,
                         file_shape(p, p.file_rows)});
    return specs;
}

// Names with GPT2LMHeadModel's prefix and without it load alike. Tensors that older files have
// besides the parameters are ignored.
TEST_F(HuggingFace, Gpt2LoadsWithAndWithoutItsPrefix) {
    for (size_t i : {0, 1}) {
        auto a = random_model<float>(saved_shapes()[i]),
             b = random_model<float>(saved_shapes()[i], 4);
        write_tensors(dir + "/model.safetensors", specs_of(a->t.model));
        ASSERT_EQ(hf_load_weights(a->t, dir), "");

        auto specs = specs_of(b->t.model, "transformer.");
        specs.push_back({"transformer.h.0.attn.bias", Type::F32, {1, 1, 4, 4}});
        specs.push_back({"transformer.h.1.attn.masked_bias", Type::F32, {1}});
        if (i == 0)
            specs.push_back({"lm_head.weight", Type::F32, {61, 12}}); // tied: a copy of the table
        write_tensors(dir + "/model.safetensors", specs, i == 0 ? "lm_head.weight" : "");
        ASSERT_EQ(hf_load_weights(b->t, dir), "");
        expect_same_weights(*a, *b);
        EXPECT_EQ(get_weight(a->t, a->t.model.parameters[0])[13], 14);
    }
}

// Tensors that are missing, of another shape or type, or of no use.
TEST_F(HuggingFace, WrongTensorsAreNamed) {
    std::string file = dir + "/model.safetensors";
    for (size_t which : {0, 1, 2, 7}) {
        Shape s = saved_shapes()[which];
        auto m = random_model<float>(s);
        const Model& model = m->t.model;
        auto load = [&](const std::vector<TensorSpec>& specs) {
            write_tensors(file, specs);
            return hf_load_weights(m->t, dir);
        };
        const std::vector<TensorSpec> good = specs_of(model);
        EXPECT_EQ(load(good), "");

        // The padding stays zero.
        for (const Parameter& p : model.parameters) {
            std::vector<float> x = get_weight(m->t, p);
            EXPECT_EQ(std::count(x.begin() + long(p.file_elements()), x.end(), 0.0f),
                      long(p.elements() - p.file_elements()))
                << p.name;
        }

        // Each tensor missing, with other shapes, and with a type that is not read.
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

        // Tensors that belong to nothing, and older files' buffers, which are ignored.
        auto specs = good;
        specs[0].shape[0] = 128; // the file has our padding
        EXPECT_HAS(load(specs), "has the shape (128, ");

        specs = good, specs.push_back({"h.7.ln_1.weight", Type::F32, {12}});
        EXPECT_HAS(load(specs), "tensor h.7.ln_1.weight belongs to nothing in this model");
        specs = good, specs.push_back({"transformer." + good[0].name, Type::F32, good[0].shape});
        EXPECT_HAS(load(specs), "belongs to nothing");
        specs = good,
        specs.push_back({"model.layers.0.self_attn.rotary_emb.inv_freq", Type::F32, {2}});
        EXPECT_EQ(load(specs), "");

        if (s.embedding.tied) {
            specs.push_back({"lm_head.weight", Type::F32, good[0].shape});
            EXPECT_HAS(load(specs), "lm_head.weight is another matrix than " + good[0].name);
            write_tensors(file, specs, "lm_head.weight");
            EXPECT_EQ(hf_load_weights(m->t, dir), "");
            specs.back().shape[0]++;
            EXPECT_HAS(load(specs), "lm_head.weight is another matrix than " + good[0].name);
        }
    }

    // A matrix as [out, in] where the file should have [in, out], a file that is cut, and none.
    Shape turned_shape = gpt2_shape(2, 3, 12, 61, 16);
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

// Indexes that are wrong, and shards that do not hold what their index says.
TEST_F(HuggingFace, WrongShardsAreNamed) {
    auto m = random_model<float>(saved_shapes()[0]);
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

    // Two shards and their index.
    for (const TensorSpec& t : first) map[t.name] = "a.safetensors";
    for (const TensorSpec& t : rest) map[t.name] = "b.safetensors";
    write_tensors(dir + "/a.safetensors", first);
    write_tensors(dir + "/b.safetensors", rest);
    EXPECT_EQ(index(map), "");

    // Files that the index names and that are not there.
    EXPECT_HAS(with("ln_f.bias", "c.safetensors"), "c.safetensors: No such file");
    EXPECT_HAS(with("ln_f.bias", "a.safetensors"), "ln_f.bias is not in a.safetensors");
    EXPECT_HAS(with("nothing", "a.safetensors"), "nothing is not in a.safetensors");
    for (json file : {json("../a.safetensors"), json("/a.safetensors"), json(3), json(),
                      json({"a.safetensors"})})
        EXPECT_HAS(with("ln_f.bias", file), "ln_f.bias is in no file of this folder");

    for (const char* text : {"", "{", "[]", "{}", "{\"weight_map\":[]}", "{\"weight_map\":null}"}) {
        put_file(dir + "/model.safetensors.index.json", text);
        bool object = strchr(text, '}');
        EXPECT_HAS(hf_load_weights(m->t, dir),
                   std::string("model.safetensors.index.json: ") +
                       (object ? "has no weight_map" : "is no JSON object"));
    }

    // A tensor in both files, tensors in neither, and files that are cut or missing.
    rest.push_back(first[0]);
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
