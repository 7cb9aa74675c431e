// hf_config.h - config.json of Hugging Face's models and a Shape: a row a key, read and written
//   Rows     A key, the field that it is read into and written from, and what a file without the
//            key means: the default of each transformers class that has it. RoPE, windows and
//            experts have functions.
//   Refused  A key that changes what a model computes and is not built, unless it has the one value
//            that is (HF_FIXED).
//   Writing  Every size is written, for defaults differ between versions of transformers.
//   Every function that returns a text returns "" or one line that says what is wrong.
#pragma once
#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>
#include <variant>
#include <vector>
#include "../model.h"
#include "../ops/elementwise.cuh"
#include "../ops/moe.cuh"
#include "../ops/rope.cuh"
#include "../comm/text.h"
#include "files.h"
#include "json.h"

namespace llmc {

// ----------------------------------------------------------------------------
// a config.json, key by key

// A config.json that is read key by key. Reading continues after an error, which is
// reported at the end.
struct HfConfig {
    Json j;
    std::string path;
    std::string wrong; // the first thing that is wrong
    bool has(const char* key) const { return json_has(j, key); }
};

// Keep a message if it is the first. Later errors often follow from the first,
// and would only distract.
template <typename... Parts>
void hf_wrong(HfConfig& c, const Parts&... parts) {
    if (c.wrong.empty())
        c.wrong = concat(c.path, ": ", parts...);
}

// Read a size from 1 to 2^24. If the key is missing, return `otherwise`; 0: it must not be missing.
inline size_t hf_size(HfConfig& c, const char* key, size_t otherwise = 0) {
    if (!c.has(key) && otherwise) return otherwise;
    // Two such sizes multiply within 64 bits; hf_shape() limits what they make.
    Json j = c.j.value(key, Json());
    size_t found = j.is_number_unsigned() ? j.get<size_t>() : 0;
    if (found > 0 && found <= (1u << 24)) return found;
    hf_wrong(c, key, " is ", j.is_null() ? "missing" : json_word(j) + ", which is no size");
    return 1; // go on with a shape of ones; the error is reported later
}

// Read a number. Return `otherwise` if the key is missing or null.
inline double hf_number(HfConfig& c, const Json& j, const char* key, double otherwise) {
    if (!json_has(j, key))
        return otherwise;
    if (j[key].is_number())
        return j[key].get<double>();
    hf_wrong(c, key, " is ", json_word(j[key]), ", which is no number");
    return otherwise;
}

// Read a number above zero.
inline double hf_positive(HfConfig& c, const Json& j, const char* key, double otherwise) {
    double x = hf_number(c, j, key, otherwise);
    if (x > 0) return x;
    std::string found = j.contains(key) ? json_word(j[key]) : Json(x).dump();
    hf_wrong(c, key, " is ", found, ", not above zero");
    return otherwise;
}

// Read true or false. Return `otherwise` if the key is missing or null.
inline bool hf_flag(HfConfig& c, const Json& j, const char* key, bool otherwise) {
    if (!json_has(j, key)) return otherwise;
    if (j[key].is_boolean())
        return j[key].get<bool>();
    hf_wrong(c, key, " is ", json_word(j[key]), ", neither true nor false");
    return otherwise;
}

// Refuse a variant that is not built. The key may be missing, or have the value `only`, or its
// other name `alias`. A variant that went unnoticed would train with wrong numbers.
inline void hf_refuse_unless(HfConfig& c, const char* key, const Json& only,
                             const Json& alias = nullptr) {
    if (!c.has(key) || c.j[key] == only || c.j[key] == alias)
        return;
    hf_wrong(c, key, " ", json_word(c.j[key]), " is not built yet, only ", only.dump(), " is");
}

// ----------------------------------------------------------------------------
// classes

// The layers with a window where no list names them: all; those from max_window_layers on; every
// other one before it; those without RoPE; all but the last of each period.
enum class Windows { NONE, ALL, FROM, ALTERNATE, NO_ROPE, PERIOD };

// A class of transformers, and how it reads windows.
struct HfClass {
    const char *type, *architecture; // model_type, and what `architectures` lists
    Family family;
    Windows windows = Windows::NONE;
    size_t window = 0;     // a window's size without the key; 0: there is none
    bool lists = false;    // reads layer_types
    bool switched = false; // has windows only with use_sliding_window
};
// clang-format off
constexpr HfClass HF_CLASSES[] = {
    {"gpt2",        "GPT2LMHeadModel",       Family::GPT2},
    {"llama",       "LlamaForCausalLM",      Family::LLAMA},
    {"mistral",     "MistralForCausalLM",    Family::LLAMA, Windows::ALL, 4096, true},
    {"qwen2",       "Qwen2ForCausalLM",      Family::LLAMA, Windows::FROM, 4096, true, true},
    {"qwen3",       "Qwen3ForCausalLM",      Family::LLAMA, Windows::FROM, 4096, true, true},
    {"mixtral",     "MixtralForCausalLM",    Family::MIXTRAL, Windows::ALL},
    {"qwen2_moe",   "Qwen2MoeForCausalLM",   Family::MIXTRAL, Windows::ALTERNATE, 4096, true, true},
    {"qwen3_moe",   "Qwen3MoeForCausalLM",   Family::MIXTRAL, Windows::ALL, 4096, false, true},
    {"olmoe",       "OlmoeForCausalLM",      Family::MIXTRAL},
    {"gpt_oss",     "GptOssForCausalLM",     Family::GPT_OSS, Windows::PERIOD, 128, true},
    {"deepseek_v2", "DeepseekV2ForCausalLM", Family::DEEPSEEK},
    {"deepseek_v3", "DeepseekV3ForCausalLM", Family::DEEPSEEK},
    {"olmo2",       "Olmo2ForCausalLM",      Family::LLAMA},
    {"olmo3",       "Olmo3ForCausalLM",      Family::LLAMA, Windows::PERIOD, 4096, true},
    {"smollm3",     "SmolLM3ForCausalLM",    Family::LLAMA, Windows::NO_ROPE, 0, true, true},
    {"phi3",        "Phi3ForCausalLM",       Family::LLAMA, Windows::ALL},
    {"gemma2",      "Gemma2ForCausalLM",     Family::LLAMA, Windows::PERIOD, 4096, true},
    {"gemma3_text", "Gemma3ForCausalLM",     Family::LLAMA, Windows::PERIOD, 4096, true},
    {"nanochat",    "NanoChatForCausalLM",   Family::LLAMA},
    // Ours: transformers has no such classes.
    {"nanochat_values", "NanoChatValuesForCausalLM", Family::LLAMA},
    {"track3",      "Track3ForCausalLM",     Family::LLAMA},
    {"gpt_neox",    "GPTNeoXForCausalLM",    Family::NEOX},
};
// clang-format on

// Find a class, or return null.
inline const HfClass* hf_class(const std::string& type) {
    for (const HfClass& each : HF_CLASSES)
        if (type == each.type) return &each;
    return nullptr;
}

// Whether a model_type is among the words of a list. A word may end with a star; "llamas" are all
// but gpt2 and gpt_neox.
inline bool is_one_of(const std::string& type, const std::string& list) {
    std::istringstream words(list);
    bool llama = type != "gpt2" && type != "gpt_neox";
    for (std::string word; words >> word;) {
        bool star = word.back() == '*';
        bool found = star ? type.starts_with(word.substr(0, word.size() - 1)) : type == word;
        if (found || (llama && word == "llamas"))
            return true;
    }
    return false;
}

// ----------------------------------------------------------------------------
// rows

// The value of a missing key, for some classes. A class that no default names lacks the key.
struct HfDefault {
    const char* types;
    double value;                                        // unless `of` gives it
    size_t (*of)(HfConfig& c, const Shape& s) = nullptr; // from keys of earlier rows
};
constexpr double MUST = 0;  // the key must be there, if no earlier row has set the field
constexpr double ANY = -1;  // the field stays as it is
constexpr double NONE = -2; // the class does not have the key

// A key, and its field in a Shape.
enum class Write { ALWAYS, IF_SET, OR_NULL }; // OR_NULL: null is 0; else it is a missing key
typedef std::variant<size_t*, float*, double*, bool*> HfField;
struct HfRow {
    const char* key;
    HfField (*field)(Shape& s);
    std::vector<HfDefault> defaults; // the first one that names a class is the class's
    Write write = Write::ALWAYS;

    // The default of a class; null: it does not have the key.
    const HfDefault* default_of(const std::string& type) const {
        for (const HfDefault& d : defaults)
            if (is_one_of(type, d.types))
                return d.value == NONE ? nullptr : &d;
        return nullptr;
    }
};

// Defaults that other keys give.
inline size_t hf_heads(HfConfig&, const Shape& s) { return s.NH; }
inline size_t hf_four_channels(HfConfig&, const Shape& s) { return 4 * s.C; }
inline size_t hf_head_size(HfConfig& c, const Shape& s) {
    if (s.C % s.NH)
        hf_wrong(c, "num_attention_heads ", s.NH, " does not divide hidden_size ", s.C);
    return std::max(s.C / s.NH, size_t(1));
}

#define FIELD(member) [](Shape& s) -> HfField { return &s.member; }
// clang-format off
inline const std::vector<HfRow> HF_ROWS = {
    {"vocab_size",               FIELD(V), {{"*", MUST}}},
    {"n_ctx",                    FIELD(P), {{"gpt2", ANY}}}, // the older name
    {"n_positions",              FIELD(P), {{"gpt2", MUST}}},
    {"max_position_embeddings", FIELD(P),
     {{"mistral mixtral gpt_oss gemma3_text", 131072},
      {"qwen2 qwen3 qwen2_moe qwen3_moe smollm3", 32768},
      {"gemma2", 8192},
      {"olmoe deepseek_v3 phi3", 4096},
      {"llamas gpt_neox", 2048}}},
    {"n_embd",                   FIELD(C), {{"gpt2", MUST}}},
    {"hidden_size",              FIELD(C), {{"llamas gpt_neox", MUST}}},
    {"n_layer",                  FIELD(L), {{"gpt2", MUST}}},
    {"num_hidden_layers",        FIELD(L), {{"llamas gpt_neox", MUST}}},
    {"n_head",                   FIELD(NH), {{"gpt2", MUST}}},
    {"num_attention_heads",      FIELD(NH), {{"llamas gpt_neox", MUST}}},
    {"num_key_value_heads", FIELD(NKV),
     {{"mistral mixtral gpt_oss", 8},
      {"qwen2 qwen3", 32},
      {"qwen2_moe", 16},
      {"qwen3_moe smollm3 gemma*", 4},
      {"llamas", 0, hf_heads}}},
    {"head_dim", FIELD(HS),
     {{"qwen3", 128},
      {"gpt_oss", 64},
      {"gemma*", 256},
      {"deepseek*", 1},
      {"llamas", 0, hf_head_size}}},

    // The ffn. Where some blocks have experts, it is the one of the others.
    {"n_inner",                  FIELD(F), {{"gpt2", 0, hf_four_channels}}},
    {"intermediate_size", FIELD(experts.dense_F),
     {{"qwen2_moe qwen3_moe", ANY}}, Write::IF_SET},
    {"intermediate_size",        FIELD(experts.dense_F), {{"deepseek*", MUST}}},
    {"intermediate_size", FIELD(F),
     {{"qwen2_moe qwen3_moe deepseek*", NONE},
      {"llamas gpt_neox", MUST}}},

    // Norms, positions, biases.
    {"layer_norm_epsilon",       FIELD(block.norm_eps), {{"gpt2", 1e-5}}},
    {"layer_norm_eps",           FIELD(block.norm_eps), {{"gpt_neox", 1e-5}}},
    {"rms_norm_eps", FIELD(block.norm_eps),
     {{"mixtral olmo* gpt_oss phi3", 1e-5},
      {"llamas", 1e-6}}},
    {"rotary_emb_base",          FIELD(rope.theta), {{"gpt_neox", 1e4}}},
    {"rope_theta", FIELD(rope.theta),
     {{"mixtral gemma3_text", 1e6},
      {"smollm3", 2e6},
      {"gpt_oss", 1.5e5},
      {"olmo3", 5e5},
      {"llamas", 1e4}}},
    {"attention_bias",           FIELD(attention.o_bias), {{"gpt_oss", true}}},
    {"attention_bias", FIELD(attention.o_bias),
     {{"llama qwen3 olmo2 olmo3 smollm3 gemma* nanochat*", false}}, Write::IF_SET},
    {"mlp_bias", FIELD(block.mlp_bias),
     {{"llama smollm3", false}}, Write::IF_SET},
    {"qkv_bias",                 FIELD(attention.qkv_bias), {{"qwen2_moe", true}}},
    {"use_parallel_residual",    FIELD(block.parallel), {{"gpt_neox", true}}},
    {"tie_word_embeddings", FIELD(embedding.tied),
     {{"gpt2 smollm3 gemma*", true},
      {"*", false}}},

    // Gemma. A cap of null is none.
    {"attn_logit_softcapping", FIELD(attention.softcap),
     {{"gemma2", 50}}, Write::OR_NULL},
    {"final_logit_softcapping", FIELD(loss.softcap),
     {{"gemma2", 30},
      {"track3 nanochat*", 15},
      {"gemma3_text", 0}}, Write::OR_NULL},
    {"rope_local_base_freq",     FIELD(rope.window_theta), {{"gemma3_text", 1e4}}},

    // nanochat_values, with one of its two rows or both.
    {"residual_scalars",         FIELD(block.scalars), {{"nanochat_values", true}}},
    {"value_embeddings",         FIELD(attention.values), {{"nanochat_values", true}}},

    // Experts.
    {"num_local_experts", FIELD(experts.E),
     {{"mixtral", 8},
      {"gpt_oss", 128}}},
    {"num_experts", FIELD(experts.E),
     {{"qwen2_moe", 60},
      {"qwen3_moe", 128},
      {"olmoe", 64}}},
    {"n_routed_experts", FIELD(experts.E),
     {{"deepseek_v2", 64},
      {"deepseek_v3", 256}}, Write::IF_SET},
    {"num_experts_per_tok", FIELD(experts.K),
     {{"mixtral", 2},
      {"qwen2_moe gpt_oss", 4},
      {"qwen3_moe olmoe deepseek_v3", 8},
      {"deepseek_v2", ANY}}, Write::IF_SET},
    {"moe_intermediate_size", FIELD(F),
     {{"qwen2_moe", 1408},
      {"qwen3_moe", 768},
      {"deepseek_v2", 1407},
      {"deepseek_v3", 2048}}},
    {"routed_scaling_factor", FIELD(experts.gate_scale),
     {{"deepseek_v2", 1},
      {"deepseek_v3", 2.5}}},
    {"decoder_sparse_step",      FIELD(experts.sparse_every), {{"qwen2_moe qwen3_moe", 1}}},
    {"shared_expert_intermediate_size", FIELD(experts.shared_F), {{"qwen2_moe", 5632}}},
    {"swiglu_alpha",             FIELD(experts.gate_alpha), {{"gpt_oss", 1.702}}},
    {"swiglu_limit",             FIELD(experts.gate_limit), {{"gpt_oss", 7}}},

    // Latents. A null q_lora_rank is queries without one.
    {"q_lora_rank", FIELD(latent.q),
     {{"deepseek*", 1536}}, Write::OR_NULL},
    {"kv_lora_rank",             FIELD(latent.kv), {{"deepseek*", 512}}},
    {"qk_rope_head_dim",         FIELD(rope.rotary), {{"deepseek*", 64}}},
    {"v_head_dim",               FIELD(latent.HS_v), {{"deepseek*", 128}}},
};

// Keys of which one value is built, under either of two names; for classes that have no row of that
// key. A variant that went unnoticed would train with wrong numbers. `written`: exports name it.
struct HfFixed {
    const char *key, *types;
    Json only, alias = nullptr;
    bool written = false;
};
inline const std::vector<HfFixed> HF_FIXED = {
    {"is_causal",                      "*", true},
    {"per_layer_config",               "*", Json::object()},
    {"activation_function",            "gpt2", "gelu_new", "gelu_pytorch_tanh", true},
    {"scale_attn_weights",             "gpt2", true},
    {"scale_attn_by_inverse_layer_idx", "gpt2", false},
    {"attention_bias",                 "gpt_neox", true},
    {"attention_bias",                 "llamas", false},
    {"mlp_bias",                       "llamas", false},
    {"hidden_act", "llama mistral mixtral phi3 olmo* smollm3 qwen* gpt_oss deepseek*", "silu",
                                       "swish", true},
    {"hidden_activation",              "gemma*", "gelu_pytorch_tanh", "gelu_new", true},
    {"hidden_act",                     "track3 nanochat*", "relu2", nullptr, true},
    {"use_bidirectional_attention",    "gemma*", false},
    {"attn_logit_softcapping",         "gemma3_text", nullptr, nullptr, true}, // read, and not used
    {"router_jitter_noise",            "mixtral qwen2_moe qwen3_moe olmoe gpt_oss", 0.0},
    {"clip_qkv",                       "mixtral qwen2_moe qwen3_moe olmoe gpt_oss", nullptr},
    {"rope_interleave",                "deepseek*", true},
    {"moe_layer_freq",                 "deepseek*", 1},
};
// clang-format on

// Whether a class reads a key by a row.
inline bool hf_has_row(const std::string& key, const std::string& type) {
    return std::ranges::any_of(HF_ROWS, [&](const HfRow& row) {
        return row.key == key && row.default_of(type);
    });
}

// Read a row's key from an object j, if the class has it.
inline void hf_read_row(HfConfig& c, const Json& j, const HfRow& row, const std::string& type,
                        Shape& s) {
    const HfDefault* d = row.default_of(type);
    if (!d) return;
    bool has = json_has(j, row.key);
    bool zero = row.write == Write::OR_NULL && (j.contains(row.key) || d->value == 0);
    if (!has && (zero || d->value == ANY))
        return;
    double missing = d->value;
    if (!has && d->of)
        missing = double(d->of(c, s));

    // Read it as its field's type.
    std::visit([&](auto* x) {
        typedef std::remove_pointer_t<decltype(x)> Value;
        if constexpr (std::is_same_v<Value, bool>)
            *x = hf_flag(c, j, row.key, missing != 0);
        else if constexpr (std::is_same_v<Value, size_t>)
            *x = hf_size(c, row.key, missing > 0 ? size_t(missing) : *x);
        else
            *x = Value(hf_positive(c, j, row.key, missing));
    }, row.field(s));
}

// The shortest decimal that reads back as the same float: 1e-05, not 9.999999747378752e-06.
inline double decimal(float x) {
    // Nine digits distinguish any two floats, so the loop always finds the value.
    char text[32];
    for (int digits = 1; digits <= 9; digits++) {
        snprintf(text, sizeof(text), "%.*g", digits, double(x));
        if (strtof(text, nullptr) == x) break;
    }
    return strtod(text, nullptr);
}

// Write a row's key into an object j, if the class has it.
inline void hf_write_row(OrderedJson& j, const HfRow& row, const std::string& type, Shape& s) {
    std::visit([&](auto* x) {
        bool left_out = row.write == Write::IF_SET && !*x;
        if (!row.default_of(type) || left_out) return;
        if constexpr (std::is_same_v<decltype(x), float*>)
            j[row.key] = decimal(*x);
        else
            j[row.key] = *x;
        if (row.write == Write::OR_NULL && !*x)
            j[row.key] = nullptr;
    }, row.field(s));
}

// ----------------------------------------------------------------------------
// RoPE

// The object that scales RoPE: rope_scaling, or rope_parameters in newer files; an empty object if
// there is neither. If a file has both, the older name wins.
inline Json hf_rope_object(HfConfig& c) {
    for (const char* key : {"rope_scaling", "rope_parameters"}) {
        if (!c.has(key)) continue;
        if (!c.j[key].is_object()) {
            hf_wrong(c, key, " is no object");
            continue;
        }
        if (!c.j[key].empty())
            return c.j[key];
    }
    return Json::object();
}

// The keys of each kind of scaling.
// clang-format off
constexpr const char* HF_ROPE_KINDS[] = {"llama3", "linear", "yarn"}; // by RopeKind
inline const std::vector<HfRow> HF_ROPE_ROWS = {
    {"factor", FIELD(rope.scaling.factor),
     {{"linear", 1},
      {"llama3", 8},
      {"yarn", ANY}}},
    {"attention_factor", FIELD(rope.scaling.attention_factor), {{"yarn", ANY}}},
    {"beta_fast",        FIELD(rope.scaling.beta_fast), {{"yarn", 32}}},
    {"beta_slow",        FIELD(rope.scaling.beta_slow), {{"yarn", 1}}},
    {"truncate",         FIELD(rope.scaling.truncate), {{"yarn", true}}},
    {"low_freq_factor",  FIELD(rope.scaling.low_freq_factor), {{"llama3", 1}}},
    {"high_freq_factor", FIELD(rope.scaling.high_freq_factor), {{"llama3", 4}}},
};
// clang-format on
#undef FIELD

// Read the rest of YaRN. Cosines and sines grow with the logarithm of the factor, unless the file
// gives their factor. `positions` is the context now.
inline void hf_rope_yarn(HfConfig& c, const Json& r, size_t positions, RopeScaling& x) {
    double usual = double(positions) / x.original_positions;
    double factor = hf_number(c, r, "factor", usual);
    x.factor = float(factor);
    bool both = json_has(r, "mscale") && json_has(r, "mscale_all_dim");
    double scale = hf_positive(c, r, "mscale", 1);
    double all = hf_positive(c, r, "mscale_all_dim", 1);
    auto grown = [&](double m) { return factor <= 1 ? 1 : 0.1 * m * std::log(factor) + 1; };
    if (!json_has(r, "attention_factor"))
        x.attention_factor = float(both ? grown(scale) / grown(all) : grown(1));
}

// Refuse a second name for a number unless it says the same: versions of transformers differ in
// which of the two they read.
inline void hf_same(HfConfig& c, const char* key, const char* other, double value) {
    if (!c.has(key) || hf_number(c, c.j, key, value) == value)
        return;
    hf_wrong(c, key, " ", json_word(c.j[key]), " beside ", other, " ", Json(value).dump(),
             ": give both the same value");
}

// Read the part of a head that RoPE turns; only some classes turn less than all. r: the object of
// RoPE, whose value wins.
inline void hf_rotary(HfConfig& c, Shape& s, const Json& r) {
    bool neox = s.family == Family::NEOX;
    const char* own = neox ? "rotary_pct" : "partial_rotary_factor";
    bool named = r.contains("partial_rotary_factor");
    const char* key = named ? "partial_rotary_factor" : own;
    double usual = neox ? 0.25 : 1;
    double turned = hf_number(c, named ? r : c.j, key, usual);
    if (neox)
        hf_same(c, "partial_rotary_factor", own, hf_number(c, c.j, own, usual));

    // Latent attention has channels of its own for RoPE.
    if (turned == 1) {
        s.rope.rotary = s.latent.kv ? s.rope.rotary : 0;
        return;
    }
    if (!is_one_of(s.hf_type, "phi3 gpt_neox"))
        hf_wrong(c, key, " ", turned, " is not built yet, only 1.0 is");

    // Round the channels down, as transformers does.
    bool good = turned > 0 && turned < 1;
    size_t channels = good ? size_t(double(s.HS) * turned) : 0;
    if (channels == 0 || channels % 2)
        hf_wrong(c, key, " ", turned, " turns ", channels, " of ", s.HS,
                 " channels: RoPE turns pairs");
    s.rope.rotary = channels;
}

// Read GPT-NeoX's second name of RoPE's base, and its activation: both forms of GELU are built.
// Without the key it is the exact one, as in Pythia.
inline void hf_neox(HfConfig& c, Shape& s) {
    hf_same(c, "rope_theta", "rotary_emb_base", s.rope.theta);
    s.block.exact_gelu = !c.has("hidden_act") || c.j["hidden_act"] == "gelu";
    if (!s.block.exact_gelu)
        hf_refuse_unless(c, "hidden_act", "gelu_new", "gelu_pytorch_tanh");
}

// Read the two thetas of Gemma 3 or OLMo-3. Newer files have an object for each kind of layer.
// Returns the object for layers with full attention.
inline Json hf_rope_of_kinds(HfConfig& c, Shape& s, const Json& r) {
    // Without an object for its kind, a layer has the file's own keys.
    auto kind = [&](const char* name) {
        return r.contains(name) && r[name].is_object() ? r[name] : Json::object();
    };
    Json windows = kind("sliding_attention");
    s.rope.window_theta = hf_positive(c, windows, "rope_theta", s.rope.window_theta);
    Json type = windows.value("rope_type", Json("default"));
    if (type != "default")
        hf_wrong(c, "rope scaling ", json_word(type),
                 " of layers with a window is not built yet, only \"default\" is");

    // Angles of all layers mean nothing to its class.
    if (c.has("rope_parameters") && c.j["rope_parameters"].contains("rope_type"))
        hf_wrong(c, "rope_parameters of all layers is not built yet, only full_attention and "
                    "sliding_attention apart are");
    return r.contains("full_attention") ? kind("full_attention") : r;
}

// Read RoPE's base and its scaling.
inline void hf_rope(HfConfig& c, Shape& s) {
    // The object's theta wins over the one at the top level, which the field has already. Where
    // gpt-oss' file says nothing, its class has YaRN.
    Json r = hf_rope_object(c);
    if (s.hf_type == "gpt_oss" && r.empty())
        r = {{"rope_type", "yarn"},
             {"factor", 32.0},
             {"truncate", false},
             {"original_max_position_embeddings", 4096}};
    bool olmo = s.hf_type == "olmo3";
    if (olmo || s.hf_type == "gemma3_text")
        r = hf_rope_of_kinds(c, s, r);
    s.rope.theta = hf_positive(c, r, "rope_theta", s.rope.theta);
    if (olmo && s.rope.window_theta != 5e5)
        hf_wrong(c, "rope_theta of olmo3's windows is not built yet, only 500000 is");
    hf_rotary(c, s, r);

    // Read the kind of scaling: rope_type, or type in older files. In a broken file it
    // may be no text.
    Json named = r.value("rope_type", r.value("type", Json()));
    if (named.is_null() || named == "default") return;
    std::string type = named.is_string() ? printable(named.get<std::string>()) : json_word(named);
    if (s.rope.scaling.kind == RopeKind::HALF)
        return hf_wrong(c, "rope scaling ", type, " is not built for ", s.hf_type);

    // Read the context before scaling; the key at the top level wins.
    RopeScaling& x = s.rope.scaling;
    double original = hf_positive(c, r, "original_max_position_embeddings", double(s.P));
    original = hf_positive(c, c.j, "original_max_position_embeddings", original);
    x.original_positions = int(std::clamp(original, 1.0, double(1 << 24)));

    // Ignore dynamic NTK scaling: it changes only sequences longer than max_position_embeddings,
    // and this program has none.
    if (type == "dynamic") return;
    auto kind = std::ranges::find(HF_ROPE_KINDS, type);
    if (kind == std::end(HF_ROPE_KINDS))
        return hf_wrong(c, "rope scaling ", type,
                        " is not built yet: linear, dynamic, llama3 and yarn are");

    // Read the keys of this kind.
    x.kind = RopeKind(kind - std::begin(HF_ROPE_KINDS));
    for (const auto& row : HF_ROPE_ROWS)
        hf_read_row(c, r, row, type, s);
    if (x.kind == RopeKind::YARN)
        hf_rope_yarn(c, r, s.P, x);
    if (x.kind == RopeKind::LLAMA3 && x.low_freq_factor >= x.high_freq_factor)
        hf_wrong(c, "rope scaling has low_freq_factor ", Json(x.low_freq_factor).dump(),
                 ", not below high_freq_factor ", Json(x.high_freq_factor).dump());
}

// ----------------------------------------------------------------------------
// windows

// Read SmolLM3's list of layers that RoPE turns, all but every n-th. Returns n, or 0 if it turns
// all. Without the list, n is no_rope_layer_interval.
inline size_t hf_nope_every(HfConfig& c, size_t L) {
    // A model with fewer layers than that has no such layer.
    size_t interval = hf_size(c, "no_rope_layer_interval", 4);
    if (!c.has("no_rope_layers"))
        return interval > L ? 0 : interval;

    // Try every period, and return the smallest that fits.
    const Json& list = c.j["no_rope_layers"];
    bool whole = list.is_array() && list.size() == L;
    for (size_t every = 0; whole && every <= L; every++) {
        bool fits = true;
        for (size_t l = 0; l < L; l++)
            fits &= list[l] == int(!every || (l + 1) % every > 0);
        if (fits)
            return every;
    }
    hf_wrong(c, "no_rope_layers of this kind is not built yet, only 0 for every n-th of ", L,
             " layers and 1 for the others is");
    return 0;
}

// Read the window of attention, from the keys that the class reads.
inline void hf_window(HfConfig& c, Shape& s) {
    const HfClass& of = *hf_class(s.hf_type);
    if (of.windows == Windows::NONE) return;
    if (of.windows == Windows::NO_ROPE)
        s.rope.nope_every = hf_nope_every(c, s.L);

    // Read the size. Without the key some classes have a window of their own; null means none.
    bool on = !of.switched || hf_flag(c, c.j, "use_sliding_window", false);
    bool left_out = !c.j.contains("sliding_window");
    size_t size = on && left_out ? of.window : 0;
    if (on && c.has("sliding_window"))
        size = hf_size(c, "sliding_window");

    // Without a list the class decides which layers have it, counted from 0.
    size_t from = c.has("max_window_layers") && c.j["max_window_layers"] == 0
                      ? 0 : hf_size(c, "max_window_layers", 28);
    size_t period = s.hf_type == "olmo3" ? 4 : 2;
    if (s.hf_type == "gemma3_text")
        period = hf_size(c, "sliding_window_pattern", 6);
    auto usual = [&](size_t l) {
        if (of.windows == Windows::PERIOD)
            return (l + 1) % period > 0;
        if (of.windows == Windows::FROM)
            return size && l >= from;
        if (of.windows == Windows::ALTERNATE)
            return size && l % 2 == 0 && l < from;
        return size && !(of.windows == Windows::NO_ROPE && has_rope(s, int(l) + 1));
    };

    // Read the list. A broken file may ask for more layers than are built.
    bool listed = of.lists && c.has("layer_types");
    Json types = listed ? c.j["layer_types"] : Json();
    if (listed && (!types.is_array() || types.size() != s.L))
        return hf_wrong(c, "layer_types is no list of ", s.L, " words, one for each layer");
    auto& full = s.attention.full_layers;
    size_t L = std::min(s.L, full.size() - 2);
    for (size_t l = 0; l < L; l++) {
        bool window = listed ? types[l] == "sliding_attention" : usual(l);
        bool known = !listed || window || types[l] == "full_attention" || types[l] == "attention";
        if (!known)
            return hf_wrong(c, "layer_types ", json_word(types[l]),
                            " is not built yet: full_attention and sliding_attention are");
        full[l + 1] = !window;
    }

    // A window needs its size.
    if (full.count() == L)
        return;
    if (!size)
        return hf_wrong(c, "layer_types has windows, and ",
                        c.has("sliding_window") ? "use_sliding_window is not true"
                                                : "sliding_window is no size");
    s.attention.window = size;
}

// ----------------------------------------------------------------------------
// experts

// Read which of Qwen's blocks have a plain ffn instead of experts: the first ones, by a list, or
// all but every n-th.
inline void hf_dense_blocks(HfConfig& c, Shape& s) {
    ExpertShape& e = s.experts;
    // The list may be missing, or null.
    Json list = c.has("mlp_only_layers") ? c.j["mlp_only_layers"] : Json::array();
    // Turn any other list into null, which is refused below.
    for (size_t i = 0; list.is_array() && i < list.size(); i++)
        if (list[i] != i) list = nullptr;
    if (!list.is_array() || list.size() >= s.L)
        return hf_wrong(c, "mlp_only_layers of this kind is not built yet, only [0, 1, ...] of the "
                           "first layers is");
    e.dense_first = list.size();

    // Only a block with a plain ffn needs its width.
    bool dense = e.dense_first > 0 || e.sparse_every > 1;
    if (!dense) e.dense_F = 0;
    if (dense && !e.dense_F) hf_wrong(c, "intermediate_size is missing");
    if (e.sparse_every > s.L)
        hf_wrong(c, "decoder_sparse_step ", e.sparse_every, " leaves no layer with experts");
}

// Give the number of experts the class's own name: versions of transformers differ in it.
inline void hf_name_experts(HfConfig& c, const char* own) {
    const char* names[] = {own, "num_experts", "num_local_experts"};
    for (const char* name : names) {
        if (!c.has(name))
            continue;
        double E = hf_number(c, c.j, name, 0);
        for (const char* other : names)
            hf_same(c, other, name, E);
        c.j[own] = c.j[name];
        return;
    }
}

// Refuse more choices than there are experts.
inline void hf_check_choices(HfConfig& c, const Shape& s) {
    const ExpertShape& e = s.experts;
    if (e.K > e.E || e.K > MOST_CHOICES)
        hf_wrong(c, "num_experts_per_tok ", e.K, " of ", e.E, " experts: at most ",
                 std::min(e.E, MOST_CHOICES));
}

// Whether a model has experts as Mixtral has them.
inline bool hf_is_mixtral(const Shape& s) {
    return s.family == Family::MIXTRAL || s.family == Family::GPT_OSS;
}

// Read what rows of Mixtral's kind leave. Two classes always renormalise the gates of the chosen
// experts; the others do so only if the file says so.
inline void hf_experts(HfConfig& c, Shape& s) {
    ExpertShape& e = s.experts;
    bool always = is_one_of(s.hf_type, "mixtral gpt_oss");
    e.router = Router::RENORMALISED;
    if (!always && !hf_flag(c, c.j, "norm_topk_prob", false))
        e.router = Router::SOFTMAX;
    if (is_one_of(s.hf_type, "qwen2_moe qwen3_moe")) hf_dense_blocks(c, s);
    e.shared_gate = e.shared_F > 0; // Qwen2-MoE's shared expert
    hf_check_choices(c, s);
}

// Read the rest of DeepSeek's heads, and how YaRN scales their scores.
inline void hf_latents(HfConfig& c, Shape& s) {
    RopeShape& rope = s.rope;
    s.HS = hf_size(c, "qk_nope_head_dim", 128) + rope.rotary;

    // Check that RoPE has pairs, and that values are no wider than keys, whose rows they share.
    if (rope.rotary % 2)
        hf_wrong(c, "qk_rope_head_dim ", rope.rotary, " is odd: RoPE turns pairs");
    if (s.latent.HS_v > s.HS)
        hf_wrong(c, "v_head_dim ", s.latent.HS_v, " is not built yet: up to ", s.HS,
                 ", the size of keys, is");
    if (s.NKV != s.NH)
        hf_wrong(c, "num_key_value_heads ", s.NKV, " is not built with latent attention, only ",
                 s.NH, ", one for each head, is");

    // YaRN scales the scores by the square of `size`, which depends on mscale_all_dim.
    double all = hf_number(c, hf_rope_object(c), "mscale_all_dim", 0);
    double factor = rope.scaling.factor;
    bool yarn = rope.scaling.kind == RopeKind::YARN && factor > 1;
    if (all == 0 || !yarn) return;

    // Put that square into the scalar: scores are q.k / sqrt(score_scalar).
    double size = 0.1 * all * std::log(factor) + 1;
    s.attention.score_scalar = double(s.HS) / std::pow(size, 4);
}

// Read DeepSeek's router: V2's softmax, or V3's sigmoid with a bias on the choice.
inline void hf_deepseek_router(HfConfig& c, Shape& s) {
    ExpertShape& e = s.experts;
    // A missing key means the class's own method.
    bool v3 = s.hf_type == "deepseek_v3";
    Json usual = v3 ? "noaux_tc" : "greedy";
    Json method = c.has("topk_method") ? c.j["topk_method"] : usual;

    // Refuse any other scoring than the class's own.
    hf_refuse_unless(c, "scoring_func", v3 ? "sigmoid" : "softmax");
    hf_refuse_unless(c, "topk_method", usual, v3 ? usual : "group_limited_greedy");

    // V2's class ignores norm_topk_prob, so only false is accepted.
    e.choice_bias = v3;
    e.router = v3 ? Router::SIGMOID : Router::SOFTMAX;
    if (v3 && !hf_flag(c, c.j, "norm_topk_prob", true))
        e.router = Router::SIGMOID_ALONE;
    if (!v3) hf_refuse_unless(c, "norm_topk_prob", false);

    // Read the groups of experts from which a token's experts are chosen.
    if (method == "greedy") return;
    e.groups = hf_size(c, "n_group", v3 ? 8 : 0);
    e.kept_groups = hf_size(c, "topk_group", v3 ? 4 : 0);
    size_t each = e.E / e.groups;
    if (e.E % e.groups || e.groups > MOST_GROUPS || each < 2)
        hf_wrong(c, "n_group ", e.groups, " of ", e.E, " experts: up to ", MOST_GROUPS,
                 " equal groups of two and more are built");
    if (e.kept_groups > e.groups || e.K > e.kept_groups * each)
        hf_wrong(c, "topk_group ", e.kept_groups, " of ", e.groups, " groups has no ", e.K,
                 " experts to choose");
}

// Read DeepSeek's experts.
inline void hf_deepseek(HfConfig& c, Shape& s) {
    ExpertShape& e = s.experts;
    // Read the number of dense blocks, which may be 0: hf_size() would refuse that.
    const char* key = "first_k_dense_replace";
    bool v3 = s.hf_type == "deepseek_v3";
    bool none = c.has(key) ? c.j[key] == 0 : !v3;
    size_t dense = none ? 0 : hf_size(c, key, 3);
    if (dense >= s.L) {
        s.F = e.dense_F;
        e.E = e.K = 0;
        e.gate_scale = 1;
        return;
    }

    // Join the shared experts, which every token goes through, into one wider ffn.
    e.dense_first = dense;
    if (dense == 0) e.dense_F = 0;
    if (e.K == 0) hf_wrong(c, "num_experts_per_tok is missing");
    e.shared_F = s.F * hf_size(c, "n_shared_experts", v3 ? 1 : 2);
    hf_check_choices(c, s);
    hf_deepseek_router(c, s);
}

// ----------------------------------------------------------------------------
// config.json -> Shape

// Make the shape that a parsed config.json describes. Other formats pass their numbers under the
// same keys (model_files.h).
inline std::string hf_shape(Shape* shape, HfConfig& c) {
    // model_type decides which keys are read; `architectures` is ignored.
    bool named = c.has("model_type") && c.j["model_type"].is_string();
    std::string type = named ? c.j["model_type"].get<std::string>() : "";
    const HfClass* of = hf_class(type);
    if (!of) {
        std::vector<std::string> types;
        for (const HfClass& each : HF_CLASSES) types.push_back(each.type);
        return c.path + ": model_type '" + printable(type.substr(0, 80)) + "' is not supported: " +
               words_with_and(types) + " are";
    }

    // Begin with what the class has, whatever the sizes are.
    Shape& s = *shape = Shape();
    set_variant(s, type);
    s.family = of->family;
    s.hf_type = type;
    bool gpt = is_one_of(type, "gpt2 gpt_neox");
    if (type != "gpt2") s.embedding.position = Position::ROPE;

    // Read the rows. If the number of key/value heads is null, it equals the number of heads.
    const char* kv = "num_key_value_heads";
    if (c.j.contains(kv) && c.j[kv].is_null()) c.j[kv] = c.j.value("num_attention_heads", Json());
    for (const char* own : {"num_local_experts", "num_experts", "n_routed_experts"})
        if (hf_has_row(own, type)) hf_name_experts(c, own);
    s.attention.qkv_bias = is_one_of(type, "gpt2 gpt_neox qwen2 track3"); // always
    for (const auto& row : HF_ROWS)
        hf_read_row(c, c.j, row, type, s);
    for (const HfFixed& fixed : HF_FIXED)
        if (is_one_of(type, fixed.types) && !hf_has_row(fixed.key, type))
            hf_refuse_unless(c, fixed.key, fixed.only, fixed.alias);

    // Read what rows leave.
    s.attention.qkv_bias |= s.attention.o_bias;
    if (gpt) s.NKV = s.NH;
    if (gpt) s.HS = s.C / s.NH;
    if (s.family == Family::NEOX) hf_neox(c, s);
    if (type.starts_with("gemma"))
        s.attention.score_scalar = hf_positive(c, c.j, "query_pre_attn_scalar", 256);
    if (s.embedding.position == Position::ROPE)
        hf_rope(c, s);
    hf_window(c, s);
    if (hf_is_mixtral(s)) hf_experts(c, s);
    if (s.family == Family::DEEPSEEK) {
        hf_latents(c, s);
        hf_deepseek(c, s);
    }

    // Check what all classes have.
    if (gpt && s.C % s.NH)
        hf_wrong(c, type == "gpt2" ? "n_head " : "num_attention_heads ", s.NH, " does not divide ",
                 type == "gpt2" ? "n_embd " : "hidden_size ", s.C);
    if (s.NH % s.NKV)
        hf_wrong(c, kv, " ", s.NKV, " does not divide num_attention_heads ", s.NH);

    // Refuse sizes whose products overflow. The limits are far above any published model.
    size_t widest = std::max({s.C, s.F, s.NH * s.HS});
    if (s.L > 1024 || widest > (1u << 20))
        hf_wrong(c, s.L, " layers, up to ", widest,
                 " wide: models of up to 1024 layers and 1048576 channels can be read");
    return c.wrong;
}

// Read a folder's config.json.
inline std::string hf_read_config(Shape* shape, const std::string& folder) {
    HfConfig c;
    c.path = folder + "/config.json";
    if (!file_type(c.path))
        return folder +
               ": has no config.json: a Hugging Face folder holds config.json and *.safetensors";
    LLMC_TRY(read_json(c.path, &c.j));
    return hf_shape(shape, c);
}

// ----------------------------------------------------------------------------
// Shape -> config.json: first what Hugging Face's classes cannot describe, then what they can

// Whether gates can be written: some classes have only one kind.
inline bool hf_has_router(const Shape& s) {
    const ExpertShape& e = s.experts;
    bool v3 = s.hf_type == "deepseek_v3";
    if (s.family == Family::DEEPSEEK)
        return !e.E || (is_sigmoid(e.router) == v3 && e.router != Router::RENORMALISED);
    bool fixed = is_one_of(s.hf_type, "mixtral gpt_oss");
    return !is_sigmoid(e.router) && (!fixed || e.router == Router::RENORMALISED);
}

// Refuse to export what the model's class has no key for: the export would load, and compute
// something else. "" if nothing stands in the way.
inline std::string hf_refusal(const Shape& s) {
    const AttentionShape& attention = s.attention;
    const HfClass& of = *hf_class(s.hf_type);
    bool gpt = is_one_of(s.hf_type, "gpt2 gpt_neox");
    bool learned = s.hf_type == "gpt2";
    auto refuse = [&](const std::string& what, const std::string& fix = "") {
        return "--export: Hugging Face's " + s.hf_type + " has " + what + ": drop --export" + fix;
    };
    if (s.embedding.position != (learned ? Position::LEARNED : Position::ROPE))
        return refuse(learned ? "learned positions only" : "RoPE only",
                      learned ? ", or use --position learned" : ", or use --position rope");
    if (gpt && (s.NKV != s.NH || s.NH * s.HS != s.C))
        return refuse("as many key/value heads as heads, and heads as wide as channels together");
    if (hf_is_mixtral(s) && !hf_has_router(s))
        return refuse("no such router", ", or use --router renormalised");
    if (s.family == Family::DEEPSEEK && !hf_has_router(s))
        return refuse("no such router", ", or leave --router out");

    // Some classes have no window, and some give it to all layers.
    if (attention.window && of.windows == Windows::NONE)
        return refuse("no window");
    if (attention.window && attention.full_layers.any() && !of.lists)
        return refuse("its window in all layers");

    // Only Qwen2 has biases on q, k and v alone, and always; Qwen2-MoE has a key for them.
    bool qwen2 = s.hf_type == "qwen2";
    bool free = gpt || is_one_of(s.hf_type, "qwen2_moe deepseek*");
    if (!free && (attention.qkv_bias != (qwen2 || attention.o_bias) || (qwen2 && attention.o_bias)))
        return "--export: biases on q, k and v alone are Qwen2's, always: drop --export";
    return "";
}

// The object that scales RoPE. attention_factor is always written, and already includes mscale.
inline OrderedJson hf_rope_json(Shape s) {
    const RopeScaling& r = s.rope.scaling;
    std::string type = HF_ROPE_KINDS[int(r.kind)];
    OrderedJson j = {{"rope_type", type}};
    for (const auto& row : HF_ROPE_ROWS)
        hf_write_row(j, row, type, s);
    if (r.kind != RopeKind::LINEAR)
        j["original_max_position_embeddings"] = r.original_positions;
    return j;
}

// Write the keys of positions.
inline void hf_rope_keys(OrderedJson& j, const Shape& s) {
    double part = double(rotary_channels(s, s.HS)) / double(s.HS);
    if (s.hf_type == "gpt_neox") j["rotary_pct"] = part;
    if (s.hf_type == "phi3") j["partial_rotary_factor"] = part;
    if (scales(s.rope.scaling))
        j["rope_scaling"] = hf_rope_json(s);
    else if (s.hf_type == "gpt_oss") // whose class would have YaRN without the key
        j["rope_scaling"] = {{"rope_type", "default"}};
}

// Write which layers have a window, where the class reads that.
inline void hf_window_keys(OrderedJson& j, const Shape& s) {
    // A list has one entry a layer.
    const HfClass& of = *hf_class(s.hf_type);
    auto list = [&](auto of_layer) {
        OrderedJson all = OrderedJson::array();
        for (int layer = 1; layer <= int(s.L); layer++)
            all.push_back(of_layer(layer));
        return all;
    };
    if (of.windows == Windows::NO_ROPE)
        j["no_rope_layers"] = list([&](int layer) { return int(has_rope(s, layer)); });

    // A window is in all layers of Mistral unless there is a list.
    bool window = s.attention.window, partly = window && s.attention.full_layers.any();
    bool named = (of.switched && of.lists && window) || partly || of.windows == Windows::PERIOD;
    if (window && of.switched)
        j["use_sliding_window"] = true;
    if (named)
        j["layer_types"] = list([&](int layer) {
            return window_of(s, layer) ? "sliding_attention" : "full_attention";
        });

    // Write its size. Without the key Mistral's class would take 4096.
    if (window)
        j["sliding_window"] = s.attention.window;
    else if (s.hf_type == "mistral")
        j["sliding_window"] = nullptr;
    size_t before = 0; // layers before the first with a window
    while (window && before < s.L && !window_of(s, int(before) + 1)) before++;
    if (window && is_one_of(s.hf_type, "qwen2 qwen3 qwen3_moe"))
        j["max_window_layers"] = before;
}

// Write what rows leave of experts, in Mixtral's family.
inline void hf_expert_keys(OrderedJson& j, const Shape& s) {
    if (is_one_of(s.hf_type, "qwen2_moe qwen3_moe olmoe"))
        j["norm_topk_prob"] = s.experts.router == Router::RENORMALISED;
    if (!is_one_of(s.hf_type, "qwen2_moe qwen3_moe"))
        return;
    j["mlp_only_layers"] = OrderedJson::array();
    for (size_t layer = 0; layer < s.experts.dense_first; layer++)
        j["mlp_only_layers"].push_back(layer);
}

// Write what rows leave of DeepSeek's heads and experts. head_dim is a head's rotary part here.
inline void hf_deepseek_keys(OrderedJson& j, const Shape& s) {
    const ExpertShape& e = s.experts;
    bool v3 = s.hf_type == "deepseek_v3";
    j["head_dim"] = s.rope.rotary;
    j["qk_nope_head_dim"] = s.HS - s.rope.rotary;

    // Recover mscale_all_dim from the scale of the scores, which has its square (hf_latents()).
    if (s.attention.score_scalar) {
        double factor = s.rope.scaling.factor;
        double size = std::pow(double(s.HS) / s.attention.score_scalar, 0.25);
        double all = (size - 1) / (0.1 * std::log(factor));
        OrderedJson& rope = j["rope_scaling"];
        rope["mscale_all_dim"] = decimal(float(all));
        rope["mscale"] = decimal(float(all));
    }

    // Write the blocks and experts. If no block is dense, the dense width may be anything.
    j["intermediate_size"] = e.dense_F ? e.dense_F : s.F;
    j["first_k_dense_replace"] = e.E ? e.dense_first : s.L;
    if (e.E == 0) {
        j.erase("moe_intermediate_size");
        j.erase("routed_scaling_factor");
        return;
    }
    j["n_shared_experts"] = e.shared_F / s.F;
    j["norm_topk_prob"] = e.router == Router::SIGMOID;
    j["scoring_func"] = v3 ? "sigmoid" : "softmax";

    // V3 always has groups, even if it is only one; V2 only if the choice is limited to some.
    j["topk_method"] = e.groups > 1 ? "group_limited_greedy" : "greedy";
    if (v3) j["topk_method"] = "noaux_tc";
    j["n_group"] = e.groups;
    j["topk_group"] = e.kept_groups;
}

// Write the keys of a shape: rows, then what functions read.
inline OrderedJson hf_json(Shape s) {
    OrderedJson j = {{"architectures", {hf_class(s.hf_type)->architecture}},
                     {"model_type", s.hf_type}};
    for (const auto& row : HF_ROWS)
        hf_write_row(j, row, s.hf_type, s);
    for (const HfFixed& fixed : HF_FIXED)
        if (fixed.written && is_one_of(s.hf_type, fixed.types))
            j[fixed.key] = fixed.only;

    // Write Gemma's second name of the activation, and a whole number as an integer: transformers 5
    // accepts nothing else here.
    if (s.block.gate == Gate::GELU) {
        j["hidden_act"] = j["hidden_activation"];
        j["query_pre_attn_scalar"] = s.attention.score_scalar;
        if (s.attention.score_scalar == std::floor(s.attention.score_scalar))
            j["query_pre_attn_scalar"] = int64_t(s.attention.score_scalar);
    }

    // Write what the rows leave.
    if (s.family == Family::NEOX)
        j["hidden_act"] = s.block.exact_gelu ? "gelu" : "gelu_new";
    hf_rope_keys(j, s);
    hf_window_keys(j, s);
    if (hf_is_mixtral(s)) hf_expert_keys(j, s);
    if (s.family == Family::DEEPSEEK) hf_deepseek_keys(j, s);
    return j;
}

} // namespace llmc
