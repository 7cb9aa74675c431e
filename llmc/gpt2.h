// gpt2.h - GPT-2: tables, block and head, both ways - openai.com/research/better-language-models
//   embedding   x = wte[token] + wpe[position]
//   block       x = x + attn_proj(attention(attn(ln_1(x))))
//               x = x + fc_proj(gelu(fc(ln_2(x))))
//   head        logits = ln_f(x) wte^T
//   GPT-NeoX (at the end) has the same block. Where its branches are parallel, both read inp:
//               x = x + attn_proj(...) + fc_proj(gelu(fc(ln_2(x))))
//   Names and order follow train_gpt_min.cpp. Products are column- or row-parallel (plain on one
//   rank); products of the same input come as one list {{result, weight, bias}, ...}.
//   The backward pass has two halves, which a schedule may place apart: block_backward_input makes
//   dinp and what the other half reads; block_backward_weight makes the gradients of weights.
//
//   N = B*T rows of a micro-batch. R rows of the residual stream: N, or this rank's share of them
//   with sequence parallelism. NH, NKV and F count this rank's own. QKV = (NH + 2 NKV) HS.
//   inp, out, dinp, dout (R,C)   cache (slots,positions,2,NKV*HS), or null: only generation has one
//   Contract: out, dinp, activations =   gradients of weights = or += (accumulate)
//   Cost: a block's forward pass takes 24 N C^2 FLOPs in products and 2 N T C in attention (half of
//         the square is masked). Its backward pass takes twice the former and 2.5 times the latter.
#pragma once
#include "context.h"
#include "context_parallel.h"
#include "head.h"
#include "model.h"
#include "ops/column_sums.cuh"
#include "ops/gelu.cuh"
#include "ops/layernorm.cuh"
#include "ops/linear.cuh"
#include "ops/objective.cuh"
#include "ops/partial_sums.cuh"
#include "ops/rand.h"
#include "ops/types.h"
#include "tensor_parallel.h"

namespace llmc {

// ----------------------------------------------------------------------------
// the family: weights [out, in], and the activations of a block

// clang-format off
struct Gpt2 {
    static constexpr const char* block_prefix = "h.";           // "h.0.ln_1.weight" is block 0's
    static constexpr const char* body_prefix = "transformer.";  // files: before all but lm_head
    static constexpr int widening_products = 1;                 // from C to F channels: fc

    struct Embedding {
        Weight wte, wpe;                          // (Vp,C) (P,C)
    };

    struct Block {
        Weight ln_1_weight, ln_1_bias;            // (C) (C)
        Weight attn_weight, attn_bias;            // (QKV,C) (QKV)
        Weight attn_proj_weight, attn_proj_bias;  // (C,NH*HS) (C)
        Weight ln_2_weight, ln_2_bias;            // (C) (C)
        Weight fc_weight, fc_bias;                // (F,C) (F)
        Weight fc_proj_weight, fc_proj_bias;      // (C,F) (C)
    };

    struct Head {
        Weight ln_f_weight, ln_f_bias;            // (C) (C)
        LmHead lm_head;                           // (Vp,C), if tied wte itself
    };

    template <typename T> struct Acts {
        T* ln_1;                                  // (R,C)
        acc_t<T> *ln_1_mean, *ln_1_rstd;          // (R) (R)
        T* qkv;                                   // (N,QKV)    queries, keys, values
        T* attention;                             // (N,NH*HS)
        acc_t<T>* lse;                            // (B,NH,T)   log of the sum of exp(scores)
        T* middle;                                // (R,C)      the residual stream after attention
        T* ln_2;                                  // (R,C)
        acc_t<T> *ln_2_mean, *ln_2_rstd;          // (R) (R)
        T *fc, *gelu;                             // (N,F) (N,F)

        T *dfc, *dln_2, *dmiddle;                 // (N,F) (R,C) (R,C)
        T *dattention, *dqkv, *dln_1;             // (N,NH*HS) (N,QKV) (R,C)
        acc_t<T> *ln_1_sums, *ln_2_sums;          // parts of gradients of weights and biases
        acc_t<T>* fc_sums;                        // parts of fc's dbias
        T *dout_all, *dmiddle_all;                // (N,C) (N,C)  the rows of all ranks, if R < N
    };
};

// ----------------------------------------------------------------------------
// tables: a function shows each row to a visitor, which adds it to a table or binds its pointer

// The parameters of a block. Tensor parallelism cuts columns [out/tp, in], cuts rows [out, in/tp],
// or leaves a parameter whole; in attn it cuts the columns of queries, keys and values one by one.
// Files hold a transposed parameter as [in, out].
template <typename Row>
void block_parameters(Gpt2::Block& w, const Shape& s, Row row) {
    size_t C = s.C, F = s.F, Q = s.NH * s.HS, QKV = (s.NH + 2 * s.NKV) * s.HS;
    Shard whole = {}, columns = {0}, rows = {1}, qkv = {0, 3};

    // 2L products add to the residual stream, so their weights start smaller by sqrt(2L).
    Init normal = normal_init(0.02);
    Init small = normal_init(0.02 / std::sqrt(2.0 * s.L));

    //  weight              name                  shape     start   decays cut      transposed
    row(w.ln_1_weight,      "ln_1.weight",        {C},      ONES,   false, whole,   false);
    row(w.ln_1_bias,        "ln_1.bias",          {C},      ZEROS,  false, whole,   false);
    row(w.attn_weight,      "attn.c_attn.weight", {QKV, C}, normal, true,  qkv,     true);
    row(w.attn_bias,        "attn.c_attn.bias",   {QKV},    ZEROS,  false, qkv,     false);
    row(w.attn_proj_weight, "attn.c_proj.weight", {C, Q},   small,  true,  rows,    true);
    row(w.attn_proj_bias,   "attn.c_proj.bias",   {C},      ZEROS,  false, whole,   false);
    row(w.ln_2_weight,      "ln_2.weight",        {C},      ONES,   false, whole,   false);
    row(w.ln_2_bias,        "ln_2.bias",          {C},      ZEROS,  false, whole,   false);
    row(w.fc_weight,        "mlp.c_fc.weight",    {F, C},   normal, true,  columns, true);
    row(w.fc_bias,          "mlp.c_fc.bias",      {F},      ZEROS,  false, columns, false);
    row(w.fc_proj_weight,   "mlp.c_proj.weight",  {C, F},   small,  true,  rows,    true);
    row(w.fc_proj_bias,     "mlp.c_proj.bias",    {C},      ZEROS,  false, whole,   false);
}

// The activations of a block. Levels of recomputation drop rows after the forward pass: all but
// `none` drop CHEAP rows, `attention` also ATTN rows, `ffn` also FFN rows, `full` all three. The
// backward pass makes GRADIENT rows. A row's last reader is the input half (B) or weight half (W).
template <typename T, typename S, typename Row>
void block_activations(Gpt2::Acts<T>& a, const Shape& s, size_t N, S where, Row row) {
    size_t C = s.C, F = s.F, Q = s.NH * s.HS, QKV = (s.NH + 2 * s.NKV) * s.HS;
    size_t R = N / s.rank.rows;
    using enum Keep;
    using enum Last;
    auto [attn, ffn, last, none] = inputs_kept(s); // PASSING if what reads these inputs is frozen

    //  pointer         name                    elements   of        last read
    row(a.ln_1,         "ln_1",                 R * C,     attn,     W);
    row(a.ln_1_mean,    "ln_1.mean",            R,         CHEAP,    B);
    row(a.ln_1_rstd,    "ln_1.rstd",            R,         CHEAP,    B);
    row(a.qkv,          "qkv",                  N * QKV,   ATTN,     B);
    row(a.attention,    "attention",            N * Q,     ATTN,     W);
    row(a.lse,          "log-sum-exp",          N * s.NH,  ATTN,     B);
    row(a.middle,       "middle",               R * C,     ATTN,     B);
    row(a.ln_2,         "ln_2",                 R * C,     ffn,      W);
    row(a.ln_2_mean,    "ln_2.mean",            R,         CHEAP,    B);
    row(a.ln_2_rstd,    "ln_2.rstd",            R,         CHEAP,    B);
    row(a.fc,           "fc",                   N * F,     FFN,      B);
    row(a.gelu,         "gelu",                 N * F,     last,     W);

    row(a.dfc,          "d fc",                 N * F,     GRADIENT, W);
    row(a.dln_2,        "d ln_2",               R * C,     GRADIENT, B);
    row(a.dmiddle,      "d middle",             R * C,     GRADIENT, W);
    row(a.dattention,   "d attention",          N * Q,     GRADIENT, B);
    row(a.dqkv,         "d qkv",                N * QKV,   GRADIENT, W);
    row(a.dln_1,        "d ln_1",               R * C,     GRADIENT, B);
    row(a.ln_1_sums,    "d ln_1, sums", layernorm_sums(R, C, where), GRADIENT, W);
    row(a.ln_2_sums,    "d ln_2, sums", layernorm_sums(R, C, where), GRADIENT, W);
    row(a.fc_sums,      "d fc, sums",        gelu_sums(N, F, where), GRADIENT, W);
    if (s.rank.rows == 1) return;
    row(a.dout_all,     "d out, all rows",      N * C,     GRADIENT, W);
    row(a.dmiddle_all,  "d middle, all rows",   N * C,     GRADIENT, W);
}

// Tensor parallelism cuts the token table by rows. Positions are few: every rank holds them all.
template <typename Row>
void embedding_parameters(Gpt2::Embedding& w, const Shape& s, Row row) {
    row(w.wte, "wte.weight", {s.Vp(), s.C}, normal_init(0.02), true, Shard{0}, false);
}
template <typename Row>
void position_parameters(Gpt2::Embedding& w, const Shape& s, Row row) {
    row(w.wpe, "wpe.weight", {s.P, s.C}, normal_init(0.02), true, Shard{}, false);
}

// A tied head has no row of its own: with_head() points lm_head at the token table.
template <typename Row>
void head_parameters(Gpt2::Head& w, const Shape& s, Row row) {
    row(w.ln_f_weight, "ln_f.weight", {s.C}, ONES, false, Shard{}, false);
    row(w.ln_f_bias, "ln_f.bias", {s.C}, ZEROS, false, Shard{}, false);
    if (s.embedding.tied) return;
    row(w.lm_head, "lm_head.weight", {s.Vp(), s.C}, normal_init(0.02), true, Shard{0}, false);
}
// clang-format on

// ----------------------------------------------------------------------------
// LayerNorm of this rank's rows of the residual stream

// out = the normed rows of inp; mean and rstd are kept for backward.
template <typename T, typename S>
void layernorm_forward(Ctx<S>& ctx, T* out, acc_t<T>* mean, acc_t<T>* rstd, // (R,C) (R) (R)
                       const T* inp, const Weight& weight, const Weight& bias) {
    layernorm_forward(out, mean, rstd, inp, weight.as<T>(), bias.as<T>(), stream_rows(ctx),
                      ctx.shape.C, ctx.shape.block.norm_eps, ctx.where);
}

// dinp = the gradient through the norm + dresidual (null: 0). sums = parts of dweight, dbias and of
// the sum of dresidual's rows, which is the gradient of a bias that joined the stream there.
template <typename T, typename S>
void layernorm_backward(Ctx<S>& ctx, T* dinp, acc_t<T>* sums, const T* dresidual, // (R,C) (R,C)
                        const T* dout, const T* inp,                              // (R,C) (R,C)
                        const Weight& weight, const acc_t<T>* mean, const acc_t<T>* rstd) {
    layernorm_backward(dinp, sums, dresidual, dout, inp, weight.as<T>(), mean, rstd,
                       stream_rows(ctx), ctx.shape.C, ctx.where);
}

// The parts in `sums`, listed for column_sums(), which adds them up into gradients.
template <typename T, typename S>
std::vector<PartialSums<acc_t<T>>> layernorm_parts(Ctx<S>& ctx, const Weight& weight,
                                                   const Weight& bias, const Weight& joined_bias,
                                                   const acc_t<T>* sums) {
    return layernorm_parts(grad_of<T>(weight), grad_of<T>(bias), grad_of<T>(joined_bias), sums,
                           stream_rows(ctx), ctx.shape.C, ctx.where);
}

// ----------------------------------------------------------------------------
// the block: two branches that read the residual stream and add to it

// Pointers to queries, keys and values, which lie side by side in each row of qkv (N,QKV).
template <typename T>
Qkv<T> split_qkv(const Shape& s, T* qkv) {
    size_t Q = s.NH * s.HS, KV = s.NKV * s.HS, QKV = Q + 2 * KV;
    return {qkv, qkv + Q, qkv + Q + KV, QKV, QKV};
}

// The stream that the second branch reads: after the first one, or `inp` if both are parallel.
template <typename T>
const T* second_input(const Shape& s, const T* inp, const Gpt2::Acts<T>& a) {
    return s.block.parallel ? inp : a.middle;
}

// The gradient of the first branch's result. Parallel branches join the stream at the block's end.
template <typename T>
const T* first_gradient(const Shape& s, const T* dout, const Gpt2::Acts<T>& a) {
    return s.block.parallel ? dout : a.dmiddle;
}

// out = the stream after the block. Activations go to `a`; cache is null except in generation.
template <typename T, typename S>
void block_forward(Ctx<S>& ctx, T* out, const T* inp, const Gpt2::Block& w,
                   const Gpt2::Acts<T>& a, T* cache) {
    const Shape& s = ctx.shape;
    size_t N = ctx.batch.rows();

    // Let each token look at itself and the tokens before it.
    layernorm_forward(ctx, a.ln_1, a.ln_1_mean, a.ln_1_rstd, inp, w.ln_1_weight, w.ln_1_bias);
    column_parallel_forward(ctx, {{a.qkv, w.attn_weight, w.attn_bias}}, a.ln_1);
    context_attention_forward(ctx, a.attention, a.lse, split_qkv(s, a.qkv), cache);
    row_parallel_forward(ctx, a.middle, a.attention, w.attn_proj_weight, w.attn_proj_bias, inp);

    // Let each token work on what it saw.
    layernorm_forward(ctx, a.ln_2, a.ln_2_mean, a.ln_2_rstd, second_input(s, inp, a),
                      w.ln_2_weight, w.ln_2_bias);
    column_parallel_forward(ctx, {{a.fc, w.fc_weight, w.fc_bias}}, a.ln_2);
    gelu_forward(a.gelu, a.fc, N * s.F, ctx.where, s.block.exact_gelu);
    row_parallel_forward(ctx, out, a.gelu, w.fc_proj_weight, w.fc_proj_bias, a.middle);
}

// Make again the activations that the level of recomputation dropped: always norms and GELU, at
// some levels products of a branch. Nothing reads the block's output, so its product is left out.
template <typename T, typename S>
void block_recompute(Ctx<S>& ctx, const T* inp, const Gpt2::Block& w, const Gpt2::Acts<T>& a,
                     Recompute level) {
    const Shape& s = ctx.shape;

    // Redo the first branch.
    layernorm_forward(ctx, a.ln_1, a.ln_1_mean, a.ln_1_rstd, inp, w.ln_1_weight, w.ln_1_bias);
    if (redoes_attn(level)) {
        column_parallel_forward(ctx, {{a.qkv, w.attn_weight, w.attn_bias}}, a.ln_1);
        context_attention_forward<T>(ctx, a.attention, a.lse, split_qkv(s, a.qkv), nullptr);
        row_parallel_forward(ctx, a.middle, a.attention, w.attn_proj_weight, w.attn_proj_bias, inp);
    }

    // Redo the second branch.
    layernorm_forward(ctx, a.ln_2, a.ln_2_mean, a.ln_2_rstd, second_input(s, inp, a),
                      w.ln_2_weight, w.ln_2_bias);
    if (redoes_ffn(level))
        column_parallel_forward(ctx, {{a.fc, w.fc_weight, w.fc_bias}}, a.ln_2);
    gelu_forward(a.gelu, a.fc, ctx.batch.rows() * s.F, ctx.where, s.block.exact_gelu);
}

// Write dinp and all that the weight half reads: gradients of activations, and the parts of sums
// over rows that become gradients of biases and norms.
template <typename T, typename S>
void block_backward_input(Ctx<S>& ctx, T* dinp, const T* dout, const T* inp,
                          const Gpt2::Block& w, const Gpt2::Acts<T>& a) {
    const Shape& s = ctx.shape;
    size_t N = ctx.batch.rows();

    // Walk back through the second branch. fc's gradient overwrites the gradient of GELU's output.
    T* dgelu = a.dfc; // (N,F)
    row_parallel_backward_input(ctx, dgelu, a.dout_all, dout, w.fc_proj_weight);
    gelu_backward(a.dfc, a.fc_sums, dgelu, a.fc, N, s.F, ctx.where, s.block.exact_gelu);
    column_parallel_backward_input(ctx, a.dln_2, {{a.dfc, w.fc_weight}});
    layernorm_backward(ctx, a.dmiddle, a.ln_2_sums, dout, a.dln_2, second_input(s, inp, a),
                       w.ln_2_weight, a.ln_2_mean, a.ln_2_rstd);

    // Walk back through the first branch, to the stream. In the lowest trained block dinp is null.
    row_parallel_backward_input(ctx, a.dattention, a.dmiddle_all, first_gradient(s, dout, a),
                                w.attn_proj_weight);
    context_attention_backward(ctx, split_qkv(s, a.dqkv), a.dattention, a.attention, a.lse,
                               split_qkv(s, a.qkv));
    if (!dinp) return;
    column_parallel_backward_input(ctx, a.dln_1, {{a.dqkv, w.attn_weight}});
    layernorm_backward(ctx, dinp, a.ln_1_sums, a.dmiddle, a.dln_1, inp, w.ln_1_weight,
                       a.ln_1_mean, a.ln_1_rstd);
}

// Make the gradients of weights, from what block_backward_input() left for the same dout and inp.
template <typename T, typename S>
void block_backward_weight(Ctx<S>& ctx, const T* dout, const Gpt2::Block& w,
                           const Gpt2::Acts<T>& a, bool accumulate) {
    const Shape& s = ctx.shape;
    size_t N = ctx.batch.rows();

    // Compute the gradients of the matrices of both branches.
    row_parallel_backward_weight(ctx, w.fc_proj_weight, dout, a.dout_all, a.gelu, accumulate);
    column_parallel_backward_weight(ctx, {{a.dfc, w.fc_weight}}, a.ln_2, accumulate);
    row_parallel_backward_weight(ctx, w.attn_proj_weight, first_gradient(s, dout, a),
                                 a.dmiddle_all, a.attention, accumulate);
    column_parallel_backward_weight(ctx, {{a.dqkv, w.attn_weight}}, a.ln_1, accumulate);

    // Sum rows for biases and norms, in one call. Norms and GELU have made parts of all but attn's.
    // ln_1 has the parts for attn_proj's bias, which joined the stream at `middle`. With parallel
    // branches that bias joined at the block's end: its gradient is the sum of dout.
    Weight joined = s.block.parallel ? Weight{} : w.attn_proj_bias;
    acc_t<T>* at_end = s.block.parallel ? grad_of<T>(w.attn_proj_bias) : nullptr;
    auto parts = layernorm_parts<T>(ctx, w.ln_1_weight, w.ln_1_bias, joined, a.ln_1_sums);
    auto ln_2 = layernorm_parts<T>(ctx, w.ln_2_weight, w.ln_2_bias, w.fc_proj_bias, a.ln_2_sums);
    parts.insert(parts.end(), ln_2.begin(), ln_2.end());
    parts.push_back(gelu_parts(grad_of<T>(w.fc_bias), a.fc_sums, N, s.F, ctx.where));
    column_sums<T>({{grad_of<T>(w.attn_bias), a.dqkv, N, w.attn_weight.rows},
                    {at_end, dout, stream_rows(ctx), s.C}},
                   parts, ctx.blas.scratch, accumulate, ctx.where);
}

// ----------------------------------------------------------------------------
// the head: the final norm here, logits and loss in head.h

// Normalise `rows` rows of inp, then gather the rows of all ranks into a.norm (N,C).
template <typename T, typename S>
void head_norm(Ctx<S>& ctx, const T* inp, const Gpt2::Head& w, const HeadActs<T>& a, size_t rows) {
    T* norm = my_rows(ctx, a.norm); // (rows,C)
    layernorm_forward(norm, a.mean, a.rstd, inp, w.ln_f_weight.as<T>(), w.ln_f_bias.as<T>(), rows,
                      ctx.shape.C, ctx.shape.block.norm_eps, ctx.where);
    gather_rows(ctx, a.norm, norm);
}

// Run the whole head in training, loss and gradients, because its forward pass keeps nothing.
template <typename T, typename S>
void head_backward(Ctx<S>& ctx, T* dinp, LossSums* loss, const T* inp, const Gpt2::Head& w,
                   const HeadActs<T>& a, const double* scale, bool accumulate) {
    head_norm(ctx, inp, w, a, stream_rows(ctx));
    head_loss_backward(ctx, loss, a, w.lm_head, scale, accumulate);

    // Walk back through the norm, where the residual stream's gradient begins.
    const T* dnorm = my_rows(ctx, a.dnorm); // (R,C)
    const T* dresidual = nullptr;
    acc_t<T>* sums = static_cast<acc_t<T>*>(ctx.blas.scratch);
    layernorm_backward(ctx, dinp, sums, dresidual, dnorm, inp, w.ln_f_weight, a.mean, a.rstd);
    column_sums<T>({}, layernorm_parts<T>(ctx, w.ln_f_weight, w.ln_f_bias, {}, sums), nullptr,
                   accumulate, ctx.where);
}

// ----------------------------------------------------------------------------
// GPT-NeoX, Pythia: GPT-2's block under other names - arXiv:2204.06745, arXiv:2304.01373
//   embedding   x = embed_in[token]
//   block       GPT-2's, parallel; RoPE turns a part of each head
//   head        logits = embed_out(final_layer_norm(x))
//   Files hold q, k and v head by head, this program one after the other (huggingface.h).

// ----------------------------------------------------------------------------
// the family: its types are GPT-2's, so that GPT-2's functions take them

struct Neox {
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

// The parameters of a block: GPT-2's, in its order. Files hold no matrix transposed.
template <typename Row>
void block_parameters(Neox::Block& w, const Shape& s, Row row) {
    static constexpr const char* names[] = {
        "input_layernorm.weight", "input_layernorm.bias",
        "attention.query_key_value.weight", "attention.query_key_value.bias",
        "attention.dense.weight", "attention.dense.bias",
        "post_attention_layernorm.weight", "post_attention_layernorm.bias",
        "mlp.dense_h_to_4h.weight", "mlp.dense_h_to_4h.bias",
        "mlp.dense_4h_to_h.weight", "mlp.dense_4h_to_h.bias"};
    const char* const* name = names;
    auto rename = [&](Weight& weight, const char*, std::initializer_list<size_t> shape, Init start,
                      bool decays, Shard cut, bool /*transposed*/) {
        row(weight, *name++, shape, start, decays, cut, false);
    };
    block_parameters(static_cast<Gpt2::Block&>(w), s, rename);
}

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
    if (s.embedding.tied) return;

    // An untied one is called embed_out, beside embed_in.
    row(w.lm_head, "embed_out.weight", {s.Vp(), s.C}, normal_init(0.02), true, Shard{0}, false);
}

} // namespace llmc
