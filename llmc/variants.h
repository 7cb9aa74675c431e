// variants.h - what differs between variants of one family, and between layers of one model
//   A variant is a model_type whose blocks are Llama's but for facts of its Shape:
//     norms       before a branch, after it (OLMo-2) or both (Gemma); of q and k
//     attention   windows in some layers, no RoPE in some (SmolLM3), softcaps
//     the ffn     its gate is SiLU or GELU, or gpt-oss' own
//   Blocks read the facts; nothing else asks for a name.
#pragma once
#include <bitset>
#include <string>
#include "swiglu.cuh"

namespace llmc {

// A part of a model's shape; as it stands, Llama's.
struct Variant {
    // Norms.
    bool qk_norm = false;       // Qwen3: each head's q and k are normed before RoPE
    bool whole_qk_norm = false; // with qk_norm, OLMo-2: all heads of a token are one row
    bool pre_norm = true;       // a branch reads a norm of the stream; OLMo-2's the stream itself
    bool post_norm = false;     // OLMo-2, Gemma: a branch's result is normed before it joins
    float norm_plus = 0;        // Gemma: RMSNorm multiplies by this + weight

    // Attention. A count of 0: there is nothing of the kind.
    size_t sliding_window = 0;  // keys further back are not seen
    size_t window_from = 0;     // Qwen: the first block that has the window
    size_t full_every = 0;      // Gemma: every so many blocks one has no window
    std::bitset<1026> full_layers; // [layer]: has no window, where neither number says so
    size_t nope_every = 0;      // SmolLM3: every so many blocks one has no RoPE
    size_t rotary = 0;          // channels of a head that RoPE turns; 0: all
    double window_theta = 0;    // Gemma 3: RoPE's base where a window is; 0: the others'
    double score_scalar = 0;    // scores are q.k over the root of this; 0: of HS
    float score_softcap = 0;    // Gemma 2

    // DeepSeek: latent attention (mla.h). The last channels of a head turn, pairs of neighbours.
    size_t kv_latent = 0;       // channels of the latent of keys and values; 0: there is none
    size_t q_latent = 0;        // of queries
    size_t HS_v = 0;            // channels of a head of values; 0: HS

    // Experts: some blocks have an ffn in their place, or beside them experts of every token.
    size_t dense_first = 0;   // DeepSeek: the first so many blocks have an ffn
    size_t sparse_every = 1;  // Qwen: every so many blocks one has experts
    size_t dense_F = 0;       // the width of that ffn
    size_t shared_F = 0;      // of the shared experts together; 0: there are none
    bool shared_gate = false; // Qwen2-MoE: each token weighs them by a sigmoid of its own
    size_t expert_groups = 1; // DeepSeek: equal groups of experts
    size_t kept_groups = 1;   // of which a token may choose from so many
    bool choice_bias = false; // DeepSeek-V3: numbers that the choice adds to scores

    // gpt-oss.
    bool sinks = false;       // a logit of each head joins its softmax (sinks.cuh)
    bool expert_bias = false; // router and experts have biases
    double gate_alpha = 1;    // experts' gates are x sigmoid(alpha x)
    double gate_limit = 0;    // they and up are clamped, and up + 1 multiplies; 0: neither

    // GPT-NeoX.
    bool parallel = false;   // both branches read the block's input
    bool exact_gelu = false; // by erf, in place of the tanh form

    // The rest.
    Gate gate = Gate::SILU;        // of the ffn; Gemma: GELU
    bool scaled_embedding = false; // Gemma: times the root of C
    float logit_softcap = 0;       // Gemma 2
};

// ----------------------------------------------------------------------------
// what a layer has: block b is layer b + 1

// The window; 0: queries see all keys before them.
inline size_t window_of(const Variant& v, int layer) {
    bool full = v.full_every && layer % int(v.full_every) == 0;
    bool begun = layer > int(v.window_from) && !v.full_layers[size_t(layer)];
    return begun && !full ? v.sliding_window : 0;
}

// The channels of a head that RoPE turns.
inline size_t rotary_channels(const Variant& v, size_t HS) { return v.rotary ? v.rotary : HS; }

// The first of them.
inline size_t first_rotary(const Variant& v, size_t HS) {
    return v.kv_latent ? HS - rotary_channels(v, HS) : 0;
}

// Whether RoPE turns the heads of a layer.
inline bool turns(const Variant& v, int layer) {
    return !v.nope_every || layer % int(v.nope_every) != 0;
}

// Whether a layer has experts, in a model that has them.
inline bool is_sparse(const Variant& v, int layer) {
    return layer > int(v.dense_first) && layer % int(v.sparse_every) == 0;
}

// ----------------------------------------------------------------------------
// what a model_type has, whatever the sizes are

inline void set_variant(Variant& v, const std::string& type) {
    // Norms of q and k, and of branches.
    bool gemma = type == "gemma2" || type == "gemma3_text";
    bool olmo = type == "olmo2";
    v.whole_qk_norm = olmo || type == "olmoe";
    v.qk_norm = v.whole_qk_norm || type == "qwen3" || type == "qwen3_moe" || type == "gemma3_text";
    v.pre_norm = !olmo;
    v.post_norm = olmo || gemma;

    // Gemma's norms, gate and embedding.
    v.norm_plus = gemma ? 1 : 0;
    v.gate = gemma ? Gate::GELU : Gate::SILU;
    v.scaled_embedding = gemma;

    // gpt-oss.
    bool oss = type == "gpt_oss";
    v.sinks = oss;
    v.expert_bias = oss;
    v.gate_alpha = oss ? 1.702 : 1;
    v.gate_limit = oss ? 7 : 0;
}

} // namespace llmc
