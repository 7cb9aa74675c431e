// gpt2.h - GPT-2: its tables and its layers, forward and backward - openai.com/research/better-language-models
//   embedding   x = wte[token] + wpe[position]
//   block       x = x + proj(attention(qkv(ln_1(x))));  x = x + proj(gelu(fc(ln_2(x))))
//   head        logits = ln_f(x) wte^T
//   A block's backward comes in two halves: _backward_input makes the gradient of its input and
//   every gradient that
//   its weights need; _backward_weight makes the weights' gradients. A pipeline schedule may place
//   them apart.
#pragma once
#include "embedding.cuh"
#include "gelu.cuh"
#include "head.h"
#include "layernorm.cuh"

// ----------------------------------------------------------------------------
// tables

// clang-format off
struct Gpt2Block { // [out, in]
    Weight ln_1, ln_1_bias, c_attn, c_attn_bias, c_proj, c_proj_bias;          // (C) (C) (3C,C) (3C) (C,C) (C)
    Weight ln_2, ln_2_bias, fc, fc_bias, fc_proj, fc_proj_bias;                // (C) (C) (F,C) (F) (C,F) (C)
};
struct Gpt2Embedding { Weight wte, wpe; };                                     // (Vp,C) (P,C)
struct Gpt2Head { Weight ln_f, ln_f_bias, lm_head; };                          // (C) (C) (Vp,C)
// clang-format on

// row(where, name, shape, init, decay, shard, transposed)
template <typename Row> void gpt2_block_parameters(Gpt2Block& w, const Shape& s, Row row) {
    Init normal = normal_init(0.02), residual = normal_init(0.02 / std::sqrt(2.0 * s.L));
    size_t QKV = (s.NH + 2 * s.NKV) * s.HS;
    row(w.ln_1, "ln_1.weight", {s.C}, ONES, false, Shard{}, false);
    row(w.ln_1_bias, "ln_1.bias", {s.C}, ZEROS, false, Shard{}, false);
    row(w.c_attn, "attn.c_attn.weight", {QKV, s.C}, normal, true, Shard{0, 3}, true);
    row(w.c_attn_bias, "attn.c_attn.bias", {QKV}, ZEROS, false, Shard{0, 3}, false);
    row(w.c_proj, "attn.c_proj.weight", {s.C, s.NH * s.HS}, residual, true, Shard{1}, true);
    row(w.c_proj_bias, "attn.c_proj.bias", {s.C}, ZEROS, false, Shard{}, false);
    row(w.ln_2, "ln_2.weight", {s.C}, ONES, false, Shard{}, false);
    row(w.ln_2_bias, "ln_2.bias", {s.C}, ZEROS, false, Shard{}, false);
    row(w.fc, "mlp.c_fc.weight", {s.F, s.C}, normal, true, Shard{0}, true);
    row(w.fc_bias, "mlp.c_fc.bias", {s.F}, ZEROS, false, Shard{0}, false);
    row(w.fc_proj, "mlp.c_proj.weight", {s.C, s.F}, residual, true, Shard{1}, true);
    row(w.fc_proj_bias, "mlp.c_proj.bias", {s.C}, ZEROS, false, Shard{}, false);
}

// what a block makes: kept or made again, and who reads it last
template <typename T> struct Gpt2Acts {
    T *ln_1, *qkv, *att, *resid, *ln_2, *fc, *gelu; // forward
    acc_t<T>*ln_1_mean, *ln_1_rstd, *lse, *ln_2_mean, *ln_2_rstd;
    T *dfc, *dln_2, *dresid, *datt, *dqkv, *dln_1; // backward
    T *dout_all, *dresid_all; // sequence parallelism: dout and dresid with the rows of all ranks
};

template <typename T, typename Row>
void gpt2_block_activations(Gpt2Acts<T>& a, const Shape& s, size_t N, Row row) {
    size_t QKV = (s.NH + 2 * s.NKV) * s.HS, Q = s.NH * s.HS, R = N / s.row_ranks;
    row(a.ln_1, "ln_1", R * s.C, Keep::CHEAP, Last::W);            // (B,T,C)
    row(a.ln_1_mean, "ln_1.mean", R, Keep::CHEAP, Last::W);        // (B,T)
    row(a.ln_1_rstd, "ln_1.rstd", R, Keep::CHEAP, Last::W);        // (B,T)
    row(a.qkv, "qkv", N * QKV, Keep::KEPT, Last::B);               // (B,T,3,NH,HS)
    row(a.att, "attention", N * Q, Keep::KEPT, Last::W);           // (B,T,NH,HS)
    row(a.lse, "log-sum-exp", N * s.NH, Keep::KEPT, Last::B);      // (B,NH,T)
    row(a.resid, "residual", R * s.C, Keep::KEPT, Last::W);        // (B,T,C)
    row(a.ln_2, "ln_2", R * s.C, Keep::CHEAP, Last::W);            // (B,T,C)
    row(a.ln_2_mean, "ln_2.mean", R, Keep::CHEAP, Last::W);        // (B,T)
    row(a.ln_2_rstd, "ln_2.rstd", R, Keep::CHEAP, Last::W);        // (B,T)
    row(a.fc, "fc", N * s.F, Keep::KEPT, Last::B);                 // (B,T,F)
    row(a.gelu, "gelu", N * s.F, Keep::CHEAP, Last::W);            // (B,T,F)
    row(a.dfc, "d fc", N * s.F, Keep::GRADIENT, Last::W);          // (B,T,F)
    row(a.dln_2, "d ln_2", R * s.C, Keep::GRADIENT, Last::W);      // (B,T,C)
    row(a.dresid, "d residual", R * s.C, Keep::GRADIENT, Last::W); // (B,T,C)
    row(a.datt, "d attention", N * Q, Keep::GRADIENT, Last::B);    // (B,T,NH,HS)
    row(a.dqkv, "d qkv", N * QKV, Keep::GRADIENT, Last::W);        // (B,T,3,NH,HS)
    row(a.dln_1, "d ln_1", R * s.C, Keep::GRADIENT, Last::W);      // (B,T,C)
    if (s.row_ranks == 1) return;
    row(a.dout_all, "d out, all rows", N * s.C, Keep::GRADIENT, Last::W);        // (B,T,C)
    row(a.dresid_all, "d residual, all rows", N * s.C, Keep::GRADIENT, Last::W); // (B,T,C)
}

// ----------------------------------------------------------------------------
// the block

// q, k and v lie side by side in a row of qkv.
template <typename T, typename S>
void gpt2_attention_forward(Ctx<S>& ctx, const Gpt2Acts<T>& a, T* cache) {
    const Shape& s = ctx.shape;
    size_t width = s.NH * s.HS, kv = s.NKV * s.HS, stride = width + 2 * kv;
    Keys<T> keys = keys_seen(ctx, cache, a.qkv + width, a.qkv + width + kv, stride);
    attention_forward(a.att, a.lse, a.qkv, keys.k, keys.v, ctx.batch.positions, keys.positions,
                      ctx.batch.doc_start, ctx.slopes,
                      attention_dims(ctx, keys.Tk, stride, keys.stride), ctx.blas, ctx.where);
}

// Everything that the backward pass reads: the forward pass but its last product, and what full
// recomputation runs.
template <typename T, typename S>
void gpt2_block_activate(Ctx<S>& ctx, const T* inp, const Gpt2Block& w, const Gpt2Acts<T>& a,
                         T* cache) {
    const Shape& s = ctx.shape;
    const T* nothing = nullptr;
    size_t N = ctx.batch.rows(), R = stream_rows(ctx);
    layernorm_forward(a.ln_1, a.ln_1_mean, a.ln_1_rstd, inp, w.ln_1.as<T>(), w.ln_1_bias.as<T>(), R,
                      s.C, s.norm_eps, ctx.where);
    linear_forward(a.qkv, all_rows(ctx, a.ln_1), w.c_attn, &w.c_attn_bias, nothing, N, ctx.blas,
                   ctx.where);
    rotate_forward(ctx, a.qkv, s.NH + s.NKV, (s.NH + 2 * s.NKV) * s.HS);
    gpt2_attention_forward(ctx, a, cache);
    row_parallel_forward(ctx, a.resid, a.att, w.c_proj, &w.c_proj_bias, inp);
    layernorm_forward(a.ln_2, a.ln_2_mean, a.ln_2_rstd, a.resid, w.ln_2.as<T>(),
                      w.ln_2_bias.as<T>(), R, s.C, s.norm_eps, ctx.where);
    linear_forward(a.fc, all_rows(ctx, a.ln_2), w.fc, &w.fc_bias, nothing, N, ctx.blas, ctx.where);
    gelu_forward(a.gelu, a.fc, N * s.F, ctx.where);
}

template <typename T, typename S>
void gpt2_block_forward(Ctx<S>& ctx, T* out, const T* inp, const Gpt2Block& w, const Gpt2Acts<T>& a,
                        T* cache) {
    gpt2_block_activate(ctx, inp, w, a, cache);
    row_parallel_forward(ctx, out, a.gelu, w.fc_proj, &w.fc_proj_bias, a.resid);
}

// Selective recomputation: the norms and the activation function again, no product.
template <typename T, typename S>
void gpt2_block_activate_cheap(Ctx<S>& ctx, const T* inp, const Gpt2Block& w,
                               const Gpt2Acts<T>& a) {
    const Shape& s = ctx.shape;
    size_t R = stream_rows(ctx);
    layernorm_forward(a.ln_1, a.ln_1_mean, a.ln_1_rstd, inp, w.ln_1.as<T>(), w.ln_1_bias.as<T>(), R,
                      s.C, s.norm_eps, ctx.where);
    layernorm_forward(a.ln_2, a.ln_2_mean, a.ln_2_rstd, a.resid, w.ln_2.as<T>(),
                      w.ln_2_bias.as<T>(), R, s.C, s.norm_eps, ctx.where);
    gelu_forward(a.gelu, a.fc, ctx.batch.rows() * s.F, ctx.where);
}

template <typename T, typename S>
void gpt2_block_backward_input(Ctx<S>& ctx, T* dinp, const T* dout, const T* inp,
                               const Gpt2Block& w, const Gpt2Acts<T>& a) {
    const Shape& s = ctx.shape;
    size_t N = ctx.batch.rows(), R = stream_rows(ctx);
    size_t width = s.NH * s.HS, kv = s.NKV * s.HS, stride = width + 2 * kv;
    linear_backward_input(a.dfc, all_rows(ctx, a.dout_all, dout), w.fc_proj, N, false, ctx.blas,
                          ctx.where);
    gelu_backward(a.dfc, a.dfc, a.fc, N * s.F, ctx.where);
    T* dln_2 = partial_rows(ctx, a.dln_2);
    linear_backward_input(dln_2, a.dfc, w.fc, N, false, ctx.blas, ctx.where);
    sum_rows(ctx, a.dln_2, dln_2);
    layernorm_backward_input(a.dresid, dout, a.dln_2, a.resid, w.ln_2.as<T>(), a.ln_2_mean,
                             a.ln_2_rstd, R, s.C, ctx.where);
    linear_backward_input(a.datt, all_rows(ctx, a.dresid_all, a.dresid), w.c_proj, N, false,
                          ctx.blas, ctx.where);
    attention_backward(a.dqkv, a.dqkv + width, a.dqkv + width + kv, a.datt, a.att, a.lse, a.qkv,
                       a.qkv + width, a.qkv + width + kv, ctx.batch.positions, ctx.batch.positions,
                       ctx.batch.doc_start, ctx.slopes,
                       attention_dims(ctx, ctx.batch.T, stride, stride), ctx.blas, ctx.where);
    rotate_backward(ctx, a.dqkv, s.NH + s.NKV, stride);
    T* dln_1 = partial_rows(ctx, a.dln_1);
    linear_backward_input(dln_1, a.dqkv, w.c_attn, N, false, ctx.blas, ctx.where);
    sum_rows(ctx, a.dln_1, dln_1);
    layernorm_backward_input(dinp, a.dresid, a.dln_1, inp, w.ln_1.as<T>(), a.ln_1_mean, a.ln_1_rstd,
                             R, s.C, ctx.where);
}

template <typename T, typename S>
void gpt2_block_backward_weight(Ctx<S>& ctx, const T* dout, const T* inp, const Gpt2Block& w,
                                const Gpt2Acts<T>& a, bool accumulate) {
    typedef acc_t<T> A;
    size_t N = ctx.batch.rows(), R = stream_rows(ctx), C = ctx.shape.C;
    bool cut = ctx.shape.row_ranks > 1;
    row_parallel_backward_weight(ctx, w.fc_proj, &w.fc_proj_bias, dout, cut ? a.dout_all : dout,
                                 a.gelu, accumulate);
    linear_backward_weight(w.fc, &w.fc_bias, a.dfc, all_rows(ctx, a.ln_2), N, accumulate, ctx.blas,
                           ctx.where);
    layernorm_backward_weight((A*)w.ln_2.grad, (A*)w.ln_2_bias.grad, a.dln_2, a.resid, a.ln_2_mean,
                              a.ln_2_rstd, ctx.blas.scratch, R, C, accumulate, ctx.where);
    row_parallel_backward_weight(ctx, w.c_proj, &w.c_proj_bias, a.dresid,
                                 cut ? a.dresid_all : a.dresid, a.att, accumulate);
    linear_backward_weight(w.c_attn, &w.c_attn_bias, a.dqkv, all_rows(ctx, a.ln_1), N, accumulate,
                           ctx.blas, ctx.where);
    layernorm_backward_weight((A*)w.ln_1.grad, (A*)w.ln_1_bias.grad, a.dln_1, inp, a.ln_1_mean,
                              a.ln_1_rstd, ctx.blas.scratch, R, C, accumulate, ctx.where);
}

// ----------------------------------------------------------------------------
// embedding and head

template <typename Row> void gpt2_embedding_parameters(Gpt2Embedding& w, const Shape& s, Row row) {
    row(w.wte, "wte.weight", {s.Vp(), s.C}, normal_init(0.02), true, Shard{0}, false);
}
template <typename Row> void gpt2_position_parameters(Gpt2Embedding& w, const Shape& s, Row row) {
    row(w.wpe, "wpe.weight", {s.P, s.C}, normal_init(0.02), true, Shard{}, false);
}
template <typename Row> void gpt2_head_parameters(Gpt2Head& w, const Shape& s, Row row) {
    row(w.ln_f, "ln_f.weight", {s.C}, ONES, false, Shard{}, false);
    row(w.ln_f_bias, "ln_f.bias", {s.C}, ZEROS, false, Shard{}, false);
    if (!s.tied)
        row(w.lm_head, "lm_head.weight", {s.Vp(), s.C}, normal_init(0.02), true, Shard{0}, false);
}

// inp: my rows; a.norm: all
template <typename T, typename S>
void gpt2_head_norm(Ctx<S>& ctx, const T* inp, const Gpt2Head& w, const HeadActs<T>& a, size_t R) {
    T* norm = my_rows(ctx, a.norm);
    layernorm_forward(norm, a.mean, a.rstd, inp, w.ln_f.as<T>(), w.ln_f_bias.as<T>(), R,
                      ctx.shape.C, ctx.shape.norm_eps, ctx.where);
    all_rows(ctx, a.norm, norm);
}

template <typename T, typename S>
void gpt2_head_backward(Ctx<S>& ctx, T* dinp, double* loss, const T* inp, const Gpt2Head& w,
                        const HeadActs<T>& a, acc_t<T> scale, bool accumulate) {
    typedef acc_t<T> A;
    size_t R = stream_rows(ctx), C = ctx.shape.C;
    gpt2_head_norm(ctx, inp, w, a, R);
    head_loss_backward(ctx, loss, a, w.lm_head, scale, accumulate);
    const T* dnorm = my_rows(ctx, a.dnorm);
    layernorm_backward_weight((A*)w.ln_f.grad, (A*)w.ln_f_bias.grad, dnorm, inp, a.mean, a.rstd,
                              ctx.blas.scratch, R, C, accumulate, ctx.where);
    layernorm_backward_input(dinp, (const T*)nullptr, dnorm, inp, w.ln_f.as<T>(), a.mean, a.rstd, R,
                             C, ctx.where);
}
