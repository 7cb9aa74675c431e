// neox.h - GPT-NeoX, Pythia: GPT-2's block under other names - arXiv:2204.06745, arXiv:2304.01373
//   embedding   x = embed_in[token]
//   block       gpt2.h's, parallel; RoPE turns a part of each head
//   head        logits = embed_out(final_layer_norm(x))
//   Files hold q, k and v head by head, this program one after the other (huggingface.h).
#pragma once
#include "gpt2.h"

namespace llmc {

// ----------------------------------------------------------------------------
// the family: its types are GPT-2's, so that GPT-2's functions take them

struct Neox {
    static constexpr const char* model_types[] = {"gpt_neox"};
    static constexpr const char* block_prefix = "gpt_neox.layers.";
    static constexpr const char* body_prefix = ""; // names begin with "gpt_neox." already
    static constexpr int widening_products = 1;

    // A derived type finds its own tables, and GPT-2's blocks.
    struct Embedding : Gpt2::Embedding {};
    struct Block : Gpt2::Block {};
    struct Head : Gpt2::Head {};
    template <typename T> struct Acts : Gpt2::Acts<T> {};
};

// ----------------------------------------------------------------------------
// tables

// clang-format off
template <typename Row>
void block_parameters(Neox::Block& w, const Shape& s, Row row) {
    size_t C = s.C;
    size_t F = s.F;
    size_t Q = s.NH * s.HS;
    size_t QKV = 3 * Q; // each rank has the same heads of q, of k and of v
    Shard whole = {};
    Shard columns = {0};
    Shard rows = {1};
    Shard qkv = {0, 3};

    // 2L products add to the residual stream: they start smaller by sqrt(2L).
    Init normal = normal_init(0.02);
    Init small = normal_init(0.02 / std::sqrt(2.0 * s.L));

    // Its files hold no matrix transposed.
    auto add = [&](Weight& weight, const char* name, std::initializer_list<size_t> shape,
                   Init start, bool decays, Shard cut) {
        row(weight, name, shape, start, decays, cut, false);
    };

    // The first branch: its norm, the products of q, k, v, and the one after attention.
    //  weight              name                                shape     start   decays cut
    add(w.ln_1_weight,      "input_layernorm.weight",           {C},      ONES,   false, whole);
    add(w.ln_1_bias,        "input_layernorm.bias",             {C},      ZEROS,  false, whole);
    add(w.attn_weight,      "attention.query_key_value.weight", {QKV, C}, normal, true,  qkv);
    add(w.attn_bias,        "attention.query_key_value.bias",   {QKV},    ZEROS,  false, qkv);
    add(w.attn_proj_weight, "attention.dense.weight",           {C, Q},   small,  true,  rows);
    add(w.attn_proj_bias,   "attention.dense.bias",             {C},      ZEROS,  false, whole);

    // The second: its norm, the widening product and the narrowing one.
    add(w.ln_2_weight,      "post_attention_layernorm.weight",  {C},      ONES,   false, whole);
    add(w.ln_2_bias,        "post_attention_layernorm.bias",    {C},      ZEROS,  false, whole);
    add(w.fc_weight,        "mlp.dense_h_to_4h.weight",         {F, C},   normal, true,  columns);
    add(w.fc_bias,          "mlp.dense_h_to_4h.bias",           {F},      ZEROS,  false, columns);
    add(w.fc_proj_weight,   "mlp.dense_4h_to_h.weight",         {C, F},   small,  true,  rows);
    add(w.fc_proj_bias,     "mlp.dense_4h_to_h.bias",           {C},      ZEROS,  false, whole);
}
// clang-format on

// RoPE turns queries and keys inside attention, so there is no table of positions.
template <typename Row>
void embedding_parameters(Neox::Embedding& w, const Shape& s, Row row) {
    const char* name = "gpt_neox.embed_in.weight";
    row(w.wte, name, {s.Vp(), s.C}, normal_init(0.02), true, Shard{0}, false);
}
template <typename Row>
void position_parameters(Neox::Embedding&, const Shape&, Row) {} // none

// A tied head has no row of its own: with_head() points lm_head at the token table.
template <typename Row>
void head_parameters(Neox::Head& w, const Shape& s, Row row) {
    row(w.ln_f_weight, "gpt_neox.final_layer_norm.weight", {s.C}, ONES, false, Shard{}, false);
    row(w.ln_f_bias, "gpt_neox.final_layer_norm.bias", {s.C}, ZEROS, false, Shard{}, false);
    if (s.tied) return;

    // An untied one is called embed_out, beside embed_in.
    row(w.lm_head, "embed_out.weight", {s.Vp(), s.C}, normal_init(0.02), true, Shard{0}, false);
}

} // namespace llmc
