// hf_config.h - config.json of Hugging Face's models and a Shape: each family's keys and defaults
//   Reading  A key that changes what a model computes is read, or is refused by name unless it has
//            the one value that is built. A missing key has the default of transformers' class.
//   Writing  Every size is written, for defaults differ between versions of transformers.
//   Every function that returns a text returns "" or one line that says what is wrong.
#pragma once
#include "../gpt2.h"
#include "../llama.h"
#include "../mixtral.h"
#include "../mla.h"
#include "../model.h"
#include "../ops/elementwise.cuh"
#include "../ops/moe.cuh"
#include "../ops/rope.cuh"
#include "../family.h"
#include "../text.h"
#include "json.h"

namespace llmc {

// ----------------------------------------------------------------------------
// config.json -> Shape

// A config.json that is read key by key. Reading continues after an error, which is
// reported at the end.
struct HfConfig {
    nlohmann::json j;
    std::string path;
    std::string wrong; // the first thing that is wrong
    bool has(const char* key) const { return j.contains(key) && !j[key].is_null(); }
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
    // Two such sizes multiply within 64 bits; hf_check_sizes() limits what they make.
    bool good = c.has(key) && c.j[key].is_number_unsigned() && c.j[key].get<uint64_t>() > 0 &&
                c.j[key].get<uint64_t>() <= (1u << 24);
    if (good)
        return c.j[key].get<size_t>();
    if (c.has(key))
        hf_wrong(c, key, " is ", json_word(c.j[key]), ", which is no size");
    else
        hf_wrong(c, key, " is missing");
    return 1; // go on with a shape of ones; the error is reported later
}

// Read a number. Return `otherwise` if the key is missing or null.
inline double hf_number(HfConfig& c, const nlohmann::json& j, const char* key, double otherwise) {
    if (!j.contains(key) || j[key].is_null())
        return otherwise;
    if (j[key].is_number())
        return j[key].get<double>();
    hf_wrong(c, key, " is ", json_word(j[key]), ", which is no number");
    return otherwise;
}

// Read a number above zero.
inline double hf_positive(HfConfig& c, const nlohmann::json& j, const char* key, double otherwise) {
    double x = hf_number(c, j, key, otherwise);
    if (x > 0) return x;
    std::string found = j.contains(key) ? json_word(j[key]) : nlohmann::json(x).dump();
    hf_wrong(c, key, " is ", found, ", not above zero");
    return otherwise;
}

// Read true or false. Return `otherwise` if the key is missing or null.
inline bool hf_flag(HfConfig& c, const char* key, bool otherwise) {
    if (!c.has(key)) return otherwise;
    if (c.j[key].is_boolean())
        return c.j[key].get<bool>();
    hf_wrong(c, key, " is ", json_word(c.j[key]), ", neither true nor false");
    return otherwise;
}

// Refuse a variant that is not built. The key may be missing, or have the value `only`, or its
// other name `alias`. A variant that went unnoticed would train with wrong numbers.
inline void hf_refuse_unless(HfConfig& c, const char* key, const nlohmann::json& only,
                             const nlohmann::json& alias = nullptr) {
    if (!c.has(key) || c.j[key] == only || c.j[key] == alias)
        return;
    hf_wrong(c, key, " ", json_word(c.j[key]), " is not built yet, only ", only.dump(), " is");
}

// Read GPT-2's keys.
inline Shape hf_gpt2_shape(HfConfig& c) {
    // Read the sizes. n_ctx is the older name of n_positions; n_inner null means 4 n_embd.
    size_t C = hf_size(c, "n_embd");
    Shape s = gpt2_shape(hf_size(c, "n_layer"), hf_size(c, "n_head"), C, hf_size(c, "vocab_size"),
                         hf_size(c, "n_positions", c.has("n_ctx") ? hf_size(c, "n_ctx") : 0));
    s.F = hf_size(c, "n_inner", 4 * C);

    // A missing key has transformers' default.
    s.block.norm_eps = float(hf_positive(c, c.j, "layer_norm_epsilon", 1e-5));
    s.embedding.tied = hf_flag(c, "tie_word_embeddings", true);

    // Refuse other activations, and scores that are scaled differently.
    hf_refuse_unless(c, "activation_function", "gelu_new", "gelu_pytorch_tanh");
    hf_refuse_unless(c, "scale_attn_weights", true);
    hf_refuse_unless(c, "scale_attn_by_inverse_layer_idx", false);
    if (C % s.NH)
        hf_wrong(c, "n_head ", s.NH, " does not divide n_embd ", C);
    return s;
}

// The object that scales RoPE: rope_scaling, or rope_parameters in newer files; an empty object if
// there is neither. If a file has both, the older name wins.
inline nlohmann::json hf_rope_object(HfConfig& c) {
    for (const char* key : {"rope_scaling", "rope_parameters"}) {
        if (!c.has(key)) continue;
        if (!c.j[key].is_object()) {
            hf_wrong(c, key, " is no object");
            continue;
        }
        if (!c.j[key].empty())
            return c.j[key];
    }
    return nlohmann::json::object();
}

// Read the RoPE scaling of Llama 3.1.
inline void hf_rope_llama3(HfConfig& c, const nlohmann::json& r, RopeScaling& x) {
    x.kind = RopeKind::LLAMA3;
    x.factor = float(hf_positive(c, r, "factor", 8));
    x.low_freq_factor = float(hf_positive(c, r, "low_freq_factor", 1));
    x.high_freq_factor = float(hf_positive(c, r, "high_freq_factor", 4));
    if (x.low_freq_factor >= x.high_freq_factor)
        hf_wrong(c, "rope scaling has low_freq_factor ", nlohmann::json(x.low_freq_factor).dump(),
                 ", not below high_freq_factor ", nlohmann::json(x.high_freq_factor).dump());
}

// Read YaRN's scaling. `positions` is the context now; original_positions the one before scaling.
inline void hf_rope_yarn(HfConfig& c, const nlohmann::json& r, size_t positions, RopeScaling& x) {
    x.kind = RopeKind::YARN;
    double factor = hf_positive(c, r, "factor", double(positions) / x.original_positions);
    x.factor = float(factor);
    x.beta_fast = float(hf_positive(c, r, "beta_fast", 32));
    x.beta_slow = float(hf_positive(c, r, "beta_slow", 1));
    if (r.contains("truncate") && !r["truncate"].is_boolean())
        hf_wrong(c, "truncate is ", json_word(r["truncate"]), ", neither true nor false");
    else
        x.truncate = r.value("truncate", true);

    // Cosines and sines grow with the logarithm of the factor, unless the file gives their factor.
    auto names = [&](const char* key) { return r.contains(key) && !r[key].is_null(); };
    bool both = names("mscale") && names("mscale_all_dim");
    double scale = hf_positive(c, r, "mscale", 1);
    double all = hf_positive(c, r, "mscale_all_dim", 1);
    auto grown = [&](double m) { return factor <= 1 ? 1 : 0.1 * m * std::log(factor) + 1; };
    double otherwise = both ? grown(scale) / grown(all) : grown(1);
    x.attention_factor = float(hf_positive(c, r, "attention_factor", otherwise));
}

// Read the part of a head that RoPE turns; only some classes turn less than all.
inline void hf_rotary(HfConfig& c, Shape& s, const nlohmann::json& r) {
    for (const nlohmann::json& part : {c.j, r}) {
        // The object's value wins, 1 too.
        if (!part.contains("partial_rotary_factor")) continue;
        double turned = hf_number(c, part, "partial_rotary_factor", 1);
        if (turned == 1) {
            s.rope.rotary = 0;
            continue;
        }
        std::string found = json_word(part["partial_rotary_factor"]);
        if (s.hf_type != "phi3" && s.hf_type != "gpt_neox")
            hf_wrong(c, "partial_rotary_factor ", found, " is not built yet, only 1.0 is");

        // Round the channels down, as transformers does.
        bool good = turned > 0 && turned < 1;
        size_t channels = good ? size_t(double(s.HS) * turned) : 0;
        if (channels == 0 || channels % 2)
            hf_wrong(c, "partial_rotary_factor ", found, " turns ", channels, " of ", s.HS,
                     " channels: RoPE turns pairs");
        s.rope.rotary = channels;
    }
}

// Read Gemma 3's two thetas. Newer files have an object for each kind of layer. Returns the object
// for layers with full attention.
inline nlohmann::json hf_rope_of_kinds(HfConfig& c, Shape& s, const nlohmann::json& r) {
    s.rope.window_theta = hf_positive(c, c.j, "rope_local_base_freq", 10000);
    // Without an object for its kind, a layer has the file's own keys.
    auto kind = [&](const char* name) {
        return r.contains(name) && r[name].is_object() ? r[name] : nlohmann::json::object();
    };
    nlohmann::json windows = kind("sliding_attention");
    s.rope.window_theta = hf_positive(c, windows, "rope_theta", s.rope.window_theta);
    nlohmann::json type = windows.value("rope_type", nlohmann::json("default"));
    if (type != "default")
        hf_wrong(c, "rope scaling ", json_word(type),
                 " of layers with a window is not built yet, only \"default\" is");
    return r.contains("full_attention") ? kind("full_attention") : r;
}

// RoPE of gpt-oss where the file says nothing: YaRN, its class's default.
inline nlohmann::json hf_oss_rope() {
    return {
        {"rope_type", "yarn"},
        {"factor", 32.0},
        {"beta_fast", 32.0},
        {"beta_slow", 1.0},
        {"truncate", false},
        {"original_max_position_embeddings", 4096},
    };
}

// Read RoPE's base and its scaling.
inline void hf_rope(HfConfig& c, Shape& s, double theta) {
    RopeShape& rope = s.rope;
    // Read theta from the top level, then from the object, which wins.
    nlohmann::json r = hf_rope_object(c);
    if (s.hf_type == "gpt_oss" && r.empty()) r = hf_oss_rope();
    if (s.hf_type == "gemma3_text") r = hf_rope_of_kinds(c, s, r);
    rope.theta = hf_positive(c, c.j, "rope_theta", theta);
    rope.theta = hf_positive(c, r, "rope_theta", rope.theta);
    hf_rotary(c, s, r);

    // Read the kind of scaling: rope_type, or type in older files. In a broken file it
    // may be no text.
    nlohmann::json named = r.value("rope_type", r.value("type", nlohmann::json()));
    if (named.is_null() || named == "default") return;
    std::string type = named.is_string() ? printable(named.get<std::string>()) : json_word(named);

    // Read the context before scaling; the key at the top level wins.
    RopeScaling& x = rope.scaling;
    double original = hf_positive(c, r, "original_max_position_embeddings", double(s.P));
    original = hf_positive(c, c.j, "original_max_position_embeddings", original);
    x.original_positions = int(std::clamp(original, 1.0, double(1 << 24)));

    // Ignore dynamic NTK scaling: it changes only sequences longer than max_position_embeddings,
    // and this program has none.
    if (type == "dynamic") return;
    if (type == "llama3") return hf_rope_llama3(c, r, x);
    if (type == "yarn")
        return hf_rope_yarn(c, r, s.P, x);
    if (type != "linear")
        return hf_wrong(c, "rope scaling ", type,
                        " is not built yet: linear, dynamic, llama3 and yarn are");
    x.kind = RopeKind::LINEAR;
    x.factor = float(hf_positive(c, r, "factor", 1));
}

// Read SmolLM3's list of layers that RoPE turns, all but every n-th. Returns n, or 0 if it turns
// all. Without the list, n is no_rope_layer_interval.
inline size_t hf_nope_every(HfConfig& c, size_t L) {
    // A model with fewer layers than that has no such layer.
    size_t interval = hf_size(c, "no_rope_layer_interval", 4);
    if (!c.has("no_rope_layers"))
        return interval > L ? 0 : interval;

    // Try every period, and return the smallest that fits.
    const nlohmann::json& list = c.j["no_rope_layers"];
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

// Read which layers have a window of `size` keys: layer_types says so for each; without it they are
// those that `usual` names, counted from 0.
template <typename F>
void hf_windows(HfConfig& c, Shape& s, size_t size, bool listed, F usual) {
    AttentionShape& attention = s.attention;
    // Read the list. A broken file may ask for more layers than are built.
    nlohmann::json types = listed ? c.j["layer_types"] : nlohmann::json();
    if (listed && (!types.is_array() || types.size() != s.L))
        return hf_wrong(c, "layer_types is no list of ", s.L, " words, one for each layer");
    size_t L = std::min(s.L, attention.full_layers.size() - 2);
    std::bitset<1026> full; // [layer]
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
    attention.window = size;

    // Say it by one number where one is enough: the first layer with a window, or a period.
    auto fits = [&] {
        for (size_t layer = 1; layer <= L; layer++)
            if (full[layer] == (window_of(s, int(layer)) > 0))
                return false;
        return true;
    };
    for (size_t n = 0; n < L; n++) {
        attention.window_from = n;
        if (fits())
            return;
        attention.window_from = 0;
        attention.full_every = n + 1;
        if (fits())
            return;
        attention.full_every = 0;
    }
    attention.full_layers = full;
}

// Whether the blocks of a class have experts.
inline bool hf_has_experts(const std::string& type) {
    return type == "mixtral" || type == "qwen2_moe" || type == "qwen3_moe" || type == "olmoe" ||
           type == "gpt_oss";
}
// Whether a class is DeepSeek's, with latent attention.
inline bool hf_is_deepseek(const std::string& type) {
    return type == "deepseek_v2" || type == "deepseek_v3";
}

// Read the window of attention, from the keys that the family's class reads.
inline void hf_window(HfConfig& c, Shape& s) {
    // Some classes have no window, whatever the keys say.
    const std::string& type = s.hf_type;
    if (type == "llama" || type == "olmo2" || type == "olmoe" || hf_is_deepseek(type)) return;
    bool gemma = s.block.gate == Gate::GELU, smol = type == "smollm3";
    if (gemma) hf_refuse_unless(c, "use_bidirectional_attention", false);

    // SmolLM3 lists the layers that RoPE turns.
    if (smol) s.rope.nope_every = hf_nope_every(c, s.L);

    // Read the size. Qwen and SmolLM3 have a switch. Without the key some classes have a window of
    // their own; null means none.
    bool none = type == "mixtral" || type == "phi3" || smol;
    size_t otherwise = type == "gpt_oss" ? 128 : none ? 0 : 4096;
    bool on = !(type.starts_with("qwen") || smol) || hf_flag(c, "use_sliding_window", false);
    bool left_out = !c.j.contains("sliding_window");
    size_t size = on && left_out ? otherwise : 0;
    if (on && c.has("sliding_window"))
        size = hf_size(c, "sliding_window");

    // Read which layers have it. Three classes give it to all, and read no list. Qwen2-MoE's gives
    // it to every other layer before max_window_layers, Qwen's to those from there on.
    bool lists = type != "mixtral" && type != "phi3" && type != "qwen3_moe";
    size_t qwen = c.has("max_window_layers") && c.j["max_window_layers"] == 0
                      ? 0 : hf_size(c, "max_window_layers", 28);
    size_t period = type == "gemma3_text" ? hf_size(c, "sliding_window_pattern", 6) : 2;
    hf_windows(c, s, size, lists && c.has("layer_types"), [&](size_t l) {
        if (gemma || type == "gpt_oss")
            return (l + 1) % period > 0;
        if (type == "qwen2" || type == "qwen3")
            return size && l >= qwen;
        if (type == "qwen2_moe")
            return size && l % 2 == 0 && l < qwen;
        return size && !(smol && has_rope(s, int(l) + 1));
    });
}

// Read which matrix products have biases.
inline void hf_biases(HfConfig& c, Shape& s) {
    AttentionShape& attention = s.attention;
    // Qwen2 always has biases on q, k and v, without a key. Other blocks with experts than those of
    // gpt-oss are built without biases.
    bool oss = s.hf_type == "gpt_oss";
    bool fixed = s.hf_type == "mistral" || s.hf_type == "qwen2" || s.hf_type == "phi3" ||
                 (hf_has_experts(s.hf_type) && !oss) || hf_is_deepseek(s.hf_type);
    bool reads_attention = !fixed;
    bool reads_mlp = s.hf_type == "llama" || s.hf_type == "smollm3";

    if (reads_attention)
        attention.o_bias = hf_flag(c, "attention_bias", oss);
    else
        hf_refuse_unless(c, "attention_bias", false);
    if (reads_mlp)
        s.block.mlp_bias = hf_flag(c, "mlp_bias", false);
    else
        hf_refuse_unless(c, "mlp_bias", false);

    attention.qkv_bias = attention.o_bias || s.hf_type == "qwen2";
    if (s.hf_type == "qwen2_moe")
        attention.qkv_bias = hf_flag(c, "qkv_bias", true);
}

// Read which of Qwen's blocks have a plain ffn instead of experts: the first ones, by a list, or
// all but every n-th.
inline void hf_dense_blocks(HfConfig& c, Shape& s) {
    ExpertShape& e = s.experts;
    // The list may be missing, or null.
    e.sparse_every = hf_size(c, "decoder_sparse_step", 1);
    nlohmann::json list = c.has("mlp_only_layers") ? c.j["mlp_only_layers"]
                                                   : nlohmann::json::array();
    // Turn any other list into null, which is refused below.
    for (size_t i = 0; list.is_array() && i < list.size(); i++)
        if (list[i] != i) list = nullptr;
    if (!list.is_array() || list.size() >= s.L)
        return hf_wrong(c, "mlp_only_layers of this kind is not built yet, only [0, 1, ...] of the "
                           "first layers is");
    e.dense_first = list.size();

    // Read the width only if some block has a plain ffn.
    bool dense = e.dense_first > 0 || e.sparse_every > 1;
    e.dense_F = dense ? hf_size(c, "intermediate_size") : 0;
    if (e.sparse_every > s.L)
        hf_wrong(c, "decoder_sparse_step ", e.sparse_every, " leaves no layer with experts");
}

// Refuse a second name for a number unless it says the same: versions of transformers differ in
// which of the two they read.
inline void hf_same(HfConfig& c, const char* key, const char* other, double value) {
    if (!c.has(key) || hf_number(c, c.j, key, value) == value) return;
    hf_wrong(c, key, " ", json_word(c.j[key]), " beside ", other, " ",
             nlohmann::json(value).dump(), ": give both the same value");
}

// Read how many experts a block has: the class's own key, or another version's.
inline size_t hf_expert_count(HfConfig& c, const char* own, size_t otherwise) {
    const char* names[] = {own, "num_experts", "num_local_experts"};
    for (const char* name : names) {
        if (!c.has(name))
            continue;
        size_t E = hf_size(c, name);
        for (const char* other : names)
            hf_same(c, other, name, double(E));
        return E;
    }
    return otherwise;
}

// Read the experts of all blocks: Mixtral's keys, or those of Qwen and OLMoE.
inline void hf_experts(HfConfig& c, Shape& s) {
    ExpertShape& e = s.experts;
    // A missing key has the class's default.
    bool mixtral = s.hf_type == "mixtral";
    bool qwen3 = s.hf_type == "qwen3_moe";
    bool qwen2 = s.hf_type == "qwen2_moe";
    bool oss = s.hf_type == "gpt_oss";
    s.family = oss ? Family::GPT_OSS : Family::MIXTRAL;
    size_t usual = mixtral ? 8 : oss || qwen3 ? 128 : qwen2 ? 60 : 64;
    e.E = hf_expert_count(c, "num_local_experts", usual);
    e.K = hf_size(c, "num_experts_per_tok", mixtral ? 2 : qwen2 || oss ? 4 : 8);
    e.router = Router::RENORMALISED;
    // Mixtral and gpt-oss always renormalise the gates of the chosen experts; the other classes do
    // so only if the file says so.
    if (!mixtral && !oss && !hf_flag(c, "norm_topk_prob", false))
        e.router = Router::SOFTMAX;
    if (qwen2 || qwen3) hf_dense_blocks(c, s);
    if (qwen2 || qwen3) s.F = hf_size(c, "moe_intermediate_size", qwen2 ? 1408 : 768);

    // The clamp of gpt-oss' gate, and the slope of its sigmoid.
    if (oss) e.gate_limit = hf_positive(c, c.j, "swiglu_limit", 7);
    if (oss) e.gate_alpha = hf_positive(c, c.j, "swiglu_alpha", 1.702);

    // Qwen2-MoE has a shared expert, which every token goes through.
    e.shared_gate = qwen2;
    if (qwen2) e.shared_F = hf_size(c, "shared_expert_intermediate_size", 5632);

    // Refuse noise on the router's input, clipped q, k, v, and more choices than there are.
    hf_refuse_unless(c, "router_jitter_noise", 0.0);
    hf_refuse_unless(c, "clip_qkv", nullptr);
    if (e.K > e.E || e.K > MOST_CHOICES)
        hf_wrong(c, "num_experts_per_tok ", e.K, " of ", e.E, " experts: at most ",
                 std::min(e.E, MOST_CHOICES));
}

// Read the sizes of DeepSeek's latents and heads.
inline void hf_latents(HfConfig& c, Shape& s) {
    RopeShape& rope = s.rope;
    LatentShape& latent = s.latent;
    // A null q_lora_rank means queries without a latent; a missing key has the class's default.
    bool direct = c.j.contains("q_lora_rank") && c.j["q_lora_rank"].is_null();
    latent.q = direct ? 0 : hf_size(c, "q_lora_rank", 1536);
    latent.kv = hf_size(c, "kv_lora_rank", 512);
    rope.rotary = hf_size(c, "qk_rope_head_dim", 64);
    s.HS = hf_size(c, "qk_nope_head_dim", 128) + rope.rotary;
    latent.HS_v = hf_size(c, "v_head_dim", 128);
    hf_refuse_unless(c, "rope_interleave", true);

    // Check that RoPE has pairs, and that values are no wider than keys, whose rows they share.
    if (rope.rotary % 2)
        hf_wrong(c, "qk_rope_head_dim ", rope.rotary, " is odd: RoPE turns pairs");
    if (latent.HS_v > s.HS)
        hf_wrong(c, "v_head_dim ", latent.HS_v, " is not built yet: up to ", s.HS,
                 ", the size of keys, is");
    if (s.NKV != s.NH)
        hf_wrong(c, "num_key_value_heads ", s.NKV, " is not built with latent attention, only ",
                 s.NH, ", one for each head, is");

    // YaRN scales the scores by the square of `size`, which depends on mscale_all_dim.
    nlohmann::json r = hf_rope_object(c);
    double all = hf_number(c, r, "mscale_all_dim", 0);
    const RopeScaling& x = rope.scaling;
    bool yarn = x.kind == RopeKind::YARN && x.factor > 1;
    if (all == 0 || !yarn) return;

    // Put that square into the scalar: scores are q.k / sqrt(score_scalar).
    double factor = x.factor;
    double size = 0.1 * all * std::log(factor) + 1;
    s.attention.score_scalar = double(s.HS) / std::pow(size, 4);
}

// Read DeepSeek's router: V2's softmax, or V3's sigmoid with a bias on the choice.
inline void hf_deepseek_router(HfConfig& c, Shape& s) {
    ExpertShape& e = s.experts;
    // A missing key means the class's own method.
    bool v3 = s.hf_type == "deepseek_v3";
    nlohmann::json method = v3 ? "noaux_tc" : "greedy";
    if (c.has("topk_method")) method = c.j["topk_method"];

    // Refuse any other scoring than the class's own.
    hf_refuse_unless(c, "scoring_func", v3 ? "sigmoid" : "softmax");
    if (v3)
        hf_refuse_unless(c, "topk_method", "noaux_tc");
    else
        hf_refuse_unless(c, "topk_method", "greedy", "group_limited_greedy");

    // V2's class ignores norm_topk_prob, so only false is accepted.
    e.choice_bias = v3;
    e.router = v3 ? Router::SIGMOID : Router::SOFTMAX;
    if (v3 && !hf_flag(c, "norm_topk_prob", true)) e.router = Router::SIGMOID_ALONE;
    if (!v3) hf_refuse_unless(c, "norm_topk_prob", false);
    e.gate_scale = float(hf_positive(c, c.j, "routed_scaling_factor", v3 ? 2.5 : 1));

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

// Read DeepSeek's blocks.
inline void hf_deepseek(HfConfig& c, Shape& s) {
    ExpertShape& e = s.experts;
    // V2's class has other defaults than V3's.
    bool v3 = s.hf_type == "deepseek_v3";
    s.family = Family::DEEPSEEK;
    hf_latents(c, s);
    e.dense_F = s.F; // it holds intermediate_size so far

    // Read the number of dense blocks, which may be 0: hf_size() would refuse that.
    const char* key = "first_k_dense_replace";
    bool none = c.has(key) ? c.j[key] == 0 : !v3;
    size_t dense = none ? 0 : hf_size(c, key, 3);
    hf_refuse_unless(c, "moe_layer_freq", 1);
    if (dense >= s.L) return;

    // Read the experts' numbers and width.
    e.dense_first = dense;
    if (dense == 0) e.dense_F = 0;
    e.E = hf_expert_count(c, "n_routed_experts", v3 ? 256 : 64);
    e.K = hf_size(c, "num_experts_per_tok", v3 ? 8 : 0);
    s.F = hf_size(c, "moe_intermediate_size", v3 ? 2048 : 1407);

    // Join the shared experts, which every token goes through, into one wider ffn.
    size_t shared = hf_size(c, "n_shared_experts", v3 ? 1 : 2);
    e.shared_F = s.F * shared;
    if (e.K > e.E || e.K > MOST_CHOICES)
        hf_wrong(c, "num_experts_per_tok ", e.K, " of ", e.E, " experts: at most ",
                 std::min(e.E, MOST_CHOICES));
    hf_deepseek_router(c, s);
}

// A family, and the defaults of its transformers class for keys that config.json leaves out.
struct HfDefaults {
    const char *type, *architecture;
    size_t kv_heads; // 0: as many as heads
    size_t positions;
    size_t head_size; // 0: C / NH
    double norm_eps, theta;
    bool tied;
};
// clang-format off
constexpr HfDefaults HF_DEFAULTS[] = {
    {"llama",       "LlamaForCausalLM",    0,   2048,   0, 1e-6, 1e4, false},
    {"mistral",     "MistralForCausalLM",  8, 131072,   0, 1e-6, 1e4, false},
    {"qwen2",       "Qwen2ForCausalLM",   32,  32768,   0, 1e-6, 1e4, false},
    {"qwen3",       "Qwen3ForCausalLM",   32,  32768, 128, 1e-6, 1e4, false},
    {"mixtral",     "MixtralForCausalLM",  8, 131072,   0, 1e-5, 1e6, false},
    {"qwen2_moe",   "Qwen2MoeForCausalLM", 16, 32768,   0, 1e-6, 1e4, false},
    {"qwen3_moe",   "Qwen3MoeForCausalLM", 4,  32768,   0, 1e-6, 1e4, false},
    {"olmoe",       "OlmoeForCausalLM",    0,   4096,   0, 1e-5, 1e4, false},
    {"gpt_oss",     "GptOssForCausalLM",   8, 131072,  64, 1e-5, 1.5e5, false},
    {"deepseek_v2", "DeepseekV2ForCausalLM", 0, 2048,   0, 1e-6, 1e4, false},
    {"deepseek_v3", "DeepseekV3ForCausalLM", 0, 4096,   0, 1e-6, 1e4, false},
    {"olmo2",       "Olmo2ForCausalLM",    0,   2048,   0, 1e-5, 1e4, false},
    {"smollm3",     "SmolLM3ForCausalLM",  4,  32768,   0, 1e-6, 2e6, true},
    {"phi3",        "Phi3ForCausalLM",     0,   4096,   0, 1e-5, 1e4, false},
    {"gemma2",      "Gemma2ForCausalLM",   4,   8192, 256, 1e-6, 1e4, true},
    {"gemma3_text", "Gemma3ForCausalLM",   4, 131072, 256, 1e-6, 1e6, true},
};
// clang-format on

// The row of a family, or null if it has none.
inline const HfDefaults* hf_defaults(const std::string& type) {
    for (const HfDefaults& family : HF_DEFAULTS)
        if (type == family.type) return &family;
    return nullptr;
}

// Read Gemma's keys. A softcap of null means none.
inline void hf_gemma(HfConfig& c, Shape& s) {
    // Without the key, only Gemma 2's class has a cap.
    bool capped = s.hf_type == "gemma2";
    auto cap = [&](const char* key, double otherwise) {
        bool left_out = capped && !c.j.contains(key);
        return c.has(key) || left_out ? float(hf_positive(c, c.j, key, otherwise)) : 0;
    };

    // Read how scores and logits are scaled and capped.
    s.attention.score_scalar = hf_positive(c, c.j, "query_pre_attn_scalar", 256);
    s.attention.softcap = cap("attn_logit_softcapping", 50);
    s.loss.softcap = cap("final_logit_softcapping", 30);

    // Gemma 3's class reads a cap of scores but does not apply it. It takes RoPE's angles for each
    // kind of layer, and ignores angles for all layers.
    if (!capped) {
        hf_refuse_unless(c, "attn_logit_softcapping", nullptr);
        bool of_all = c.has("rope_parameters") && c.j["rope_parameters"].contains("rope_type");
        if (of_all)
            hf_wrong(c, "rope_parameters of all layers is not built yet, only full_attention and "
                        "sliding_attention apart are");
    }
    hf_refuse_unless(c, "hidden_activation", "gelu_pytorch_tanh", "gelu_new");
}

// Read a family of HF_DEFAULTS. The families differ in defaults, biases, windows and experts.
inline Shape hf_llama_shape(HfConfig& c, const HfDefaults& family) {
    // Read the sizes. If the number of key/value heads is null, it equals the number of heads.
    size_t C = hf_size(c, "hidden_size");
    size_t NH = hf_size(c, "num_attention_heads");
    bool all = family.kv_heads == 0 || c.j.contains("num_key_value_heads");
    size_t NKV = hf_size(c, "num_key_value_heads", all ? NH : family.kv_heads);
    std::string type = family.type;
    bool experts = hf_has_experts(type);
    bool qwen_moe = type == "qwen2_moe" || type == "qwen3_moe";
    size_t other_ffn = qwen_moe ? 1 : 0; // its blocks may have no plain ffn
    Shape s = llama_shape(hf_size(c, "num_hidden_layers"), NH, NKV, C,
                          hf_size(c, "intermediate_size", other_ffn), hf_size(c, "vocab_size"),
                          hf_size(c, "max_position_embeddings", family.positions), 10000);

    // Read what differs between the families. head_dim is not always C / NH.
    s.hf_type = family.type;
    set_variant(s, family.type);
    s.HS = hf_size(c, "head_dim",
                   family.head_size ? family.head_size : std::max(C / NH, size_t(1)));
    s.block.norm_eps = float(hf_positive(c, c.j, "rms_norm_eps", family.norm_eps));
    s.embedding.tied = hf_flag(c, "tie_word_embeddings", family.tied);
    s.block.gate == Gate::GELU ? hf_gemma(c, s)
                               : hf_refuse_unless(c, "hidden_act", "silu", "swish");

    // Read the parts: positions, biases, windows, experts, latents.
    hf_rope(c, s, family.theta);
    hf_biases(c, s);
    hf_window(c, s);
    if (experts) hf_experts(c, s);
    bool latents = hf_is_deepseek(type);
    if (latents) hf_deepseek(c, s);

    // Refuse head counts that do not divide.
    if (!family.head_size && !c.has("head_dim") && !latents && C % NH)
        hf_wrong(c, "num_attention_heads ", NH, " does not divide hidden_size ", C);
    if (NH % s.NKV)
        hf_wrong(c, "num_key_value_heads ", s.NKV, " does not divide num_attention_heads ", NH);
    return s;
}

// Read GPT-NeoX's keys.
inline Shape hf_neox_shape(HfConfig& c) {
    // Read the sizes, and whether both branches of a block read the same input.
    size_t C = hf_size(c, "hidden_size");
    Shape s = neox_shape(hf_size(c, "num_hidden_layers"), hf_size(c, "num_attention_heads"), C,
                         hf_size(c, "vocab_size"), hf_size(c, "max_position_embeddings", 2048));
    s.F = hf_size(c, "intermediate_size");
    s.block.norm_eps = float(hf_positive(c, c.j, "layer_norm_eps", 1e-5));
    s.embedding.tied = hf_flag(c, "tie_word_embeddings", false);
    s.block.parallel = hf_flag(c, "use_parallel_residual", true);

    // Read RoPE's base, and the part of a head that it turns. Newer files have these in an object.
    // The channels are rounded down, as transformers does.
    double part = hf_positive(c, c.j, "rotary_pct", 0.25);
    s.rope.rotary = part < 1 ? size_t(double(s.HS) * part) : 0;
    double theta = hf_positive(c, c.j, "rotary_emb_base", 10000);
    hf_same(c, "rope_theta", "rotary_emb_base", theta);
    hf_same(c, "partial_rotary_factor", "rotary_pct", part);
    hf_rope(c, s, theta);
    bool named = hf_rope_object(c).contains("partial_rotary_factor"); // then hf_rotary() looks
    if (!named && (part > 1 || (part < 1 && (s.rope.rotary == 0 || s.rope.rotary % 2))))
        hf_wrong(c, "rotary_pct ", json_word(c.j["rotary_pct"]), " of ", s.HS,
                 " channels is no even number of them: RoPE turns pairs");

    // Both forms of GELU are built. Without the key it is the exact one, as in Pythia.
    bool exact = !c.has("hidden_act") || c.j["hidden_act"] == "gelu";
    s.block.exact_gelu = exact;
    if (!exact)
        hf_refuse_unless(c, "hidden_act", "gelu_new", "gelu_pytorch_tanh");
    hf_refuse_unless(c, "attention_bias", true);
    if (C % s.NH)
        hf_wrong(c, "num_attention_heads ", s.NH, " does not divide hidden_size ", C);
    return s;
}

// Refuse sizes whose products overflow: the file is broken, or describes no model.
inline void hf_check_sizes(HfConfig& c, const Shape& s) {
    // The limits are far above any published model.
    size_t widest = std::max({s.C, s.F, s.NH * s.HS});
    if (s.L > 1024 || widest > (1u << 20))
        hf_wrong(c, s.L, " layers, up to ", widest,
                 " wide: models of up to 1024 layers and 1048576 channels can be read");
}

// Make the shape that a parsed config.json describes. Other formats pass their numbers under the
// same keys (model_files.h).
inline std::string hf_shape(Shape* shape, HfConfig& c) {
    // model_type decides which keys are read; `architectures` is ignored.
    bool named = c.has("model_type") && c.j["model_type"].is_string();
    std::string type = named ? c.j["model_type"].get<std::string>() : "";
    const HfDefaults* llama = hf_defaults(type);

    // Let the family read its keys.
    if (type == "gpt2")
        *shape = hf_gpt2_shape(c);
    else if (type == "gpt_neox")
        *shape = hf_neox_shape(c);
    else if (llama)
        *shape = hf_llama_shape(c, *llama);
    else
        return c.path + ": model_type '" + printable(type.substr(0, 80)) +
               "' is not supported: gpt2, llama, mistral, qwen2, qwen3, mixtral, qwen2_moe, "
               "qwen3_moe, olmoe, gpt_oss, deepseek_v2, deepseek_v3, olmo2, smollm3, phi3, "
               "gemma2, gemma3_text and gpt_neox are";

    // Check what all families have.
    hf_check_sizes(c, *shape);
    hf_refuse_unless(c, "is_causal", true);
    hf_refuse_unless(c, "per_layer_config", nlohmann::json::object());
    return c.wrong;
}

// Read a folder's config.json.
inline std::string hf_read_config(Shape* shape, const std::string& folder) {
    HfConfig c;
    c.path = folder + "/config.json";
    if (::access(c.path.c_str(), F_OK) != 0)
        return folder +
               ": has no config.json: a Hugging Face folder holds config.json and *.safetensors";
    std::string wrong = read_json(c.path, &c.j);
    return wrong.empty() ? hf_shape(shape, c) : wrong;
}

// ----------------------------------------------------------------------------
// Shape -> config.json: first what Hugging Face's classes cannot describe, then what they can

// Refuse to export what Hugging Face's GPT-2 class has no key for: the export would load, and
// compute something else. "" if nothing stands in the way.
inline std::string hf_refusal(Gpt2, const Shape& s) {
    if (s.embedding.position != Position::LEARNED)
        return "--export: Hugging Face's GPT-2 has learned positions only: drop --export, or use "
               "--position learned";
    if (s.NKV != s.NH || s.NH * s.HS != s.C)
        return "--export: Hugging Face's GPT-2 has as many key/value heads as heads, and heads as "
               "wide as its channels together: drop --export";
    return "";
}

// The same for the families of Llama's kind.
inline std::string hf_refusal(Llama, const Shape& s) {
    const AttentionShape& attention = s.attention;
    // Refuse a window, if the class has no key for it.
    bool no_windows = s.hf_type == "llama" || s.hf_type == "olmo2";
    if (no_windows && attention.window)
        return "--export: Hugging Face's Llama has no window: drop --export";

    // Three classes read no list: they give a window to all layers.
    bool all = s.hf_type == "mixtral" || s.hf_type == "phi3" || s.hf_type == "qwen3_moe";
    for (int layer = 1; all && layer <= int(s.L); layer++)
        if (window_of(s, layer) != attention.window)
            return "--export: Hugging Face's " + s.hf_type +
                   " has its window in all layers: drop --export";

    // Refuse biases on q, k and v alone. Only Qwen2 has those, and always.
    bool qwen2 = s.hf_type == "qwen2";
    if (attention.qkv_bias != (qwen2 || attention.o_bias) || (qwen2 && attention.o_bias))
        return "--export: biases on q, k and v alone are Qwen2's, always: drop --export";
    if (s.embedding.position != Position::ROPE)
        return "--export: Hugging Face's Llama has RoPE only: drop --export, or use --position "
               "rope";
    return "";
}

// GPT-NeoX's class has neither learned or ALiBi positions nor windows.
inline std::string hf_refusal(Neox, const Shape& s) {
    if (s.embedding.position != Position::ROPE)
        return "--export: Hugging Face's GPT-NeoX has RoPE only: drop --export, or use --position "
               "rope";
    if (s.NH * s.HS != s.C || s.attention.window)
        return "--export: Hugging Face's GPT-NeoX has heads as wide as its channels together, and "
               "no window: drop --export";
    return "";
}

// Mixtral's and gpt-oss' classes always renormalise the gates, and none here has sigmoids.
inline std::string hf_refusal(Mixtral, const Shape& s) {
    const ExpertShape& e = s.experts;
    bool fixed = s.hf_type == "mixtral" || s.hf_type == "gpt_oss";
    Router written = fixed ? Router::RENORMALISED : e.router;
    if (e.router != written || is_sigmoid(e.router))
        return "--export: Hugging Face's class has no such router: drop --export, or use --router "
               "renormalised";
    // Qwen2-MoE has a key for biases on q, k and v, which Llama lacks.
    if (s.hf_type == "qwen2_moe") return "";
    return hf_refusal(Llama{}, s);
}

// DeepSeek's two classes have one router each.
inline std::string hf_refusal(Deepseek, const Shape& s) {
    const ExpertShape& e = s.experts;
    // Compare the routers: V2 has a softmax, V3 has sigmoids.
    bool v3 = s.hf_type == "deepseek_v3";
    if (e.E && (is_sigmoid(e.router) != v3 || e.router == Router::RENORMALISED))
        return "--export: Hugging Face's class has no such router: leave --router out";
    return s.attention.window ? "--export: Hugging Face's DeepSeek has no window: drop --export"
                              : "";
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

// clang-format off
// GPT-2's keys. gelu_new is the tanh form, which this program computes; "gelu" would
// be the exact one.
inline nlohmann::ordered_json hf_json(Gpt2, const Shape& s) {
    return {
        {"architectures",       {"GPT2LMHeadModel"}},
        {"model_type",          "gpt2"},
        {"vocab_size",          s.V},
        {"n_positions",         s.P},
        {"n_ctx",               s.P},
        {"n_embd",              s.C},
        {"n_layer",             s.L},
        {"n_head",              s.NH},
        {"n_inner",             s.F},
        {"activation_function", "gelu_new"},
        {"layer_norm_epsilon",  decimal(s.block.norm_eps)},
    };
}

// The object that scales RoPE. Each kind of scaling has its own keys.
inline nlohmann::ordered_json hf_rope_json(const RopeScaling& r) {
    if (r.kind == RopeKind::LINEAR)
        return {{"rope_type", "linear"}, {"factor", decimal(r.factor)}};
    if (r.kind == RopeKind::LLAMA3)
        return {
            {"rope_type",                        "llama3"},
            {"factor",                           decimal(r.factor)},
            {"low_freq_factor",                  decimal(r.low_freq_factor)},
            {"high_freq_factor",                 decimal(r.high_freq_factor)},
            {"original_max_position_embeddings", r.original_positions},
        };

    // YaRN: attention_factor is always written, and already includes mscale.
    return {
        {"rope_type",                        "yarn"},
        {"factor",                           decimal(r.factor)},
        {"attention_factor",                 decimal(r.attention_factor)},
        {"beta_fast",                        decimal(r.beta_fast)},
        {"beta_slow",                        decimal(r.beta_slow)},
        {"truncate",                         r.truncate},
        {"original_max_position_embeddings", r.original_positions},
    };
}

// GPT-NeoX's keys. The part of a head that turns is written as a share, as in the files.
inline nlohmann::ordered_json hf_json(Neox, const Shape& s) {
    // Write every size here too: defaults differ between versions.
    nlohmann::ordered_json j = {
        {"architectures",           {"GPTNeoXForCausalLM"}},
        {"model_type",              "gpt_neox"},
        {"vocab_size",              s.V},
        {"max_position_embeddings", s.P},
        {"hidden_size",             s.C},
        {"intermediate_size",       s.F},
        {"num_hidden_layers",       s.L},
        {"num_attention_heads",     s.NH},
        {"hidden_act",              s.block.exact_gelu ? "gelu" : "gelu_new"},
        {"layer_norm_eps",          decimal(s.block.norm_eps)},
        {"rotary_pct",              double(rotary_channels(s, s.HS)) / double(s.HS)},
        {"rotary_emb_base",         s.rope.theta},
        {"use_parallel_residual",   s.block.parallel},
    };

    if (scales(s.rope.scaling))
        j["rope_scaling"] = hf_rope_json(s.rope.scaling);
    return j;
}

// Add the keys of families that have more than Llama's.
inline void hf_variant_json(nlohmann::ordered_json& j, const Shape& s) {
    const AttentionShape& attention = s.attention;
    // A list has one entry a layer. A softcap of 0 is written as null.
    auto lists = [&](auto of_layer) {
        nlohmann::ordered_json all = nlohmann::ordered_json::array();
        for (int layer = 1; layer <= int(s.L); layer++)
            all.push_back(of_layer(layer));
        return all;
    };
    auto cap = [](float x) {
        return x ? nlohmann::ordered_json(decimal(x)) : nlohmann::ordered_json();
    };

    // Add the keys that only one model_type has.
    if (s.hf_type == "smollm3")
        j["no_rope_layers"] = lists([&](int layer) { return int(has_rope(s, layer)); });
    if (s.hf_type == "phi3")
        j["partial_rotary_factor"] = double(rotary_channels(s, s.HS)) / double(s.HS);
    if (s.hf_type == "gemma3_text")
        j["rope_local_base_freq"] = s.rope.window_theta;

    // List the layers with a window, where a class reads that. Mistral's window is in all layers
    // unless there is a list.
    bool window = attention.window, partly = false;
    for (int layer = 1; window && layer <= int(s.L); layer++)
        partly |= window_of(s, layer) == 0;
    bool switched = s.hf_type.starts_with("qwen") || s.hf_type == "smollm3";
    bool named = (switched && s.hf_type != "qwen3_moe" && window) || partly ||
                 s.block.gate == Gate::GELU || s.hf_type == "gpt_oss";
    if (window && switched)
        j["use_sliding_window"] = true;
    if (named)
        j["layer_types"] = lists([&](int layer) {
            return window_of(s, layer) ? "sliding_attention" : "full_attention";
        });

    // Add gpt-oss' keys.
    if (s.hf_type == "gpt_oss") {
        j["swiglu_alpha"] = s.experts.gate_alpha;
        j["swiglu_limit"] = s.experts.gate_limit;
    }

    // Add Gemma's keys.
    if (s.block.gate != Gate::GELU) return;
    j["hidden_activation"] = j["hidden_act"];
    // Write a whole number as an integer: transformers 5 accepts nothing else here.
    bool whole = attention.score_scalar == std::floor(attention.score_scalar);
    nlohmann::ordered_json scalar = int64_t(attention.score_scalar);
    j["query_pre_attn_scalar"] = whole ? scalar : nlohmann::ordered_json(attention.score_scalar);
    j["attn_logit_softcapping"] = cap(attention.softcap);
    j["final_logit_softcapping"] = cap(s.loss.softcap);
}

// Llama's keys. Every size is written, because defaults differ between transformers' versions.
inline nlohmann::ordered_json hf_json(Llama, const Shape& s) {
    const AttentionShape& attention = s.attention;
    // Write the sizes, activation and base, which all families have.
    bool gelu = s.block.gate == Gate::GELU;
    nlohmann::ordered_json j = {
        {"architectures",           {hf_defaults(s.hf_type)->architecture}},
        {"model_type",              s.hf_type},
        {"vocab_size",              s.V},
        {"max_position_embeddings", s.P},
        {"hidden_size",             s.C},
        {"intermediate_size",       s.F},
        {"num_hidden_layers",       s.L},
        {"num_attention_heads",     s.NH},
        {"num_key_value_heads",     s.NKV},
        {"head_dim",                s.HS},
        {"hidden_act",              gelu ? "gelu_pytorch_tanh" : "silu"},
        {"rms_norm_eps",            decimal(s.block.norm_eps)},
        {"rope_theta",              s.rope.theta},
    };
    hf_variant_json(j, s);

    if (scales(s.rope.scaling))
        j["rope_scaling"] = hf_rope_json(s.rope.scaling);
    else if (s.hf_type == "gpt_oss") // whose class would have YaRN without the key
        j["rope_scaling"] = {{"rope_type", "default"}};
    if (attention.o_bias || s.hf_type == "gpt_oss") j["attention_bias"] = attention.o_bias;
    if (s.block.mlp_bias) j["mlp_bias"] = true;

    // Write the window. Without the key Mistral's class would take 4096. Qwen has a switch and a
    // first layer with a window.
    if (attention.window)
        j["sliding_window"] = attention.window;
    else if (s.hf_type == "mistral")
        j["sliding_window"] = nullptr;
    bool qwen = s.hf_type == "qwen2" || s.hf_type.starts_with("qwen3");
    if (attention.window && qwen)
        j["max_window_layers"] = attention.window_from;
    return j;
}

// The keys of models with experts: Llama's, and the experts' own.
inline nlohmann::ordered_json hf_json(Mixtral, const Shape& s) {
    const ExpertShape& e = s.experts;
    // Mixtral calls an expert's width intermediate_size, as Llama's keys do.
    nlohmann::ordered_json j = hf_json(Llama{}, s);
    j["num_experts_per_tok"] = e.K;
    if (s.hf_type == "mixtral" || s.hf_type == "gpt_oss") {
        j["num_local_experts"] = e.E;
        return j;
    }
    j["num_experts"] = e.E;
    j["norm_topk_prob"] = e.router == Router::RENORMALISED;
    if (s.hf_type == "olmoe") return j;

    // Qwen's intermediate_size is the width of blocks without experts.
    j.erase("intermediate_size");
    if (e.dense_F) j["intermediate_size"] = e.dense_F;
    j["moe_intermediate_size"] = s.F;
    j["decoder_sparse_step"] = e.sparse_every;
    j["mlp_only_layers"] = nlohmann::ordered_json::array();
    for (size_t layer = 0; layer < e.dense_first; layer++)
        j["mlp_only_layers"].push_back(layer);
    if (s.hf_type == "qwen3_moe") return j;

    // Qwen2-MoE has a shared expert, and biases on q, k and v.
    j["shared_expert_intermediate_size"] = e.shared_F;
    j["qkv_bias"] = s.attention.qkv_bias;
    return j;
}

// DeepSeek's keys: Llama's, and those of latents and experts. Its class calls the rotary part
// of a head head_dim.
inline nlohmann::ordered_json hf_json(Deepseek, const Shape& s) {
    const ExpertShape& e = s.experts;
    const LatentShape& latent = s.latent;
    // Write all sizes, also those that equal the class's defaults.
    nlohmann::ordered_json j = hf_json(Llama{}, s);
    bool v3 = s.hf_type == "deepseek_v3";
    j["head_dim"] = s.rope.rotary;
    j["q_lora_rank"] = nullptr;
    if (latent.q) j["q_lora_rank"] = latent.q;
    j["kv_lora_rank"] = latent.kv;
    j["qk_rope_head_dim"] = s.rope.rotary;
    j["qk_nope_head_dim"] = s.HS - s.rope.rotary;
    j["v_head_dim"] = latent.HS_v;

    // Recover mscale_all_dim from the scale of the scores, which has its square (hf_latents()).
    if (s.attention.score_scalar) {
        double factor = s.rope.scaling.factor;
        double size = std::pow(double(s.HS) / s.attention.score_scalar, 0.25);
        double all = (size - 1) / (0.1 * std::log(factor));
        nlohmann::ordered_json& rope = j["rope_scaling"];
        rope["mscale_all_dim"] = decimal(float(all));
        rope["mscale"] = decimal(float(all));
    }

    // Write the blocks and experts. If no block is dense, the dense width may be anything.
    j["intermediate_size"] = e.dense_F ? e.dense_F : s.F;
    j["first_k_dense_replace"] = e.E ? e.dense_first : s.L;
    if (e.E == 0) return j;
    j["n_routed_experts"] = e.E;
    j["num_experts_per_tok"] = e.K;
    j["moe_intermediate_size"] = s.F;
    j["n_shared_experts"] = e.shared_F / s.F;
    j["routed_scaling_factor"] = decimal(e.gate_scale);
    j["norm_topk_prob"] = e.router == Router::SIGMOID;
    j["scoring_func"] = v3 ? "sigmoid" : "softmax";

    // V3 always has groups, even if it is only one; V2 only if the choice is limited to some.
    bool limited = e.groups > 1;
    j["topk_method"] = limited ? "group_limited_greedy" : "greedy";
    if (v3) j["topk_method"] = "noaux_tc";
    j["n_group"] = e.groups;
    j["topk_group"] = e.kept_groups;
    return j;
}
// clang-format on

} // namespace llmc
