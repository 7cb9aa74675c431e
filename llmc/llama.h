// llama.h - Llama, Mistral, Qwen2: tables and layers, forward and backward - arXiv:2302.13971, arXiv:2407.21783
//   embedding   x = embed_tokens[token]
//   block       x = x + o_proj(attention(rope(q), rope(k), v)),  q, k, v = proj(norm(x))
//               x = x + down_proj(silu(gate) * up),              gate, up = proj(norm(x))
//   head        logits = lm_head(norm(x))
//   Qwen2 has biases on q, k and v; elsewhere they do not exist and their Weight is null.
#pragma once
#include "embedding.cuh"
#include "head.h"
#include "rmsnorm.cuh"
#include "swiglu.cuh"

// ----------------------------------------------------------------------------
// tables

// clang-format off
struct LlamaBlock { // [out, in]
    Weight norm_1, q, q_bias, k, k_bias, v, v_bias, o;                         // (C) (NH*HS,C) (NKV*HS,C) (C,NH*HS)
    Weight norm_2, gate, up, down;                                             // (C) (F,C) (F,C) (C,F)
};
struct LlamaEmbedding { Weight table; };                                       // (Vp,C)
struct LlamaHead { Weight norm, lm_head; };                                    // (C) (Vp,C)
// clang-format on

template <typename Row> void llama_block_parameters(LlamaBlock& w, const Shape& s, Row row) {
    Init normal = normal_init(0.02), residual = normal_init(0.02 / std::sqrt(2.0 * s.L));
    size_t Q = s.NH * s.HS, KV = s.NKV * s.HS;
    Shard heads = {0}, kv_heads = {0, 1, int(s.NKV)};
    row(w.norm_1, "input_layernorm.weight", {s.C}, ONES, false, Shard{}, false);
    row(w.q, "self_attn.q_proj.weight", {Q, s.C}, normal, true, heads, false);
    row(w.k, "self_attn.k_proj.weight", {KV, s.C}, normal, true, kv_heads, false);
    row(w.v, "self_attn.v_proj.weight", {KV, s.C}, normal, true, kv_heads, false);
    if (s.qkv_bias) {
        row(w.q_bias, "self_attn.q_proj.bias", {Q}, ZEROS, false, heads, false);
        row(w.k_bias, "self_attn.k_proj.bias", {KV}, ZEROS, false, kv_heads, false);
        row(w.v_bias, "self_attn.v_proj.bias", {KV}, ZEROS, false, kv_heads, false);
    }
    row(w.o, "self_attn.o_proj.weight", {s.C, Q}, residual, true, Shard{1}, false);
    row(w.norm_2, "post_attention_layernorm.weight", {s.C}, ONES, false, Shard{}, false);
    row(w.gate, "mlp.gate_proj.weight", {s.F, s.C}, normal, true, Shard{0}, false);
    row(w.up, "mlp.up_proj.weight", {s.F, s.C}, normal, true, Shard{0}, false);
    row(w.down, "mlp.down_proj.weight", {s.C, s.F}, residual, true, Shard{1}, false);
}

template <typename T> struct LlamaActs {
    T *norm_1, *q, *k, *v, *att, *resid, *norm_2, *gate, *up, *swiglu; // forward
    acc_t<T>*rstd_1, *lse, *rstd_2;
    T *dswiglu, *dup, *dnorm_2, *dresid, *datt, *dq, *dk, *dv, *dnorm_1; // backward
    T *dout_all, *dresid_all; // sequence parallelism: dout and dresid with the rows of all ranks
};

template <typename T, typename Row>
void llama_block_activations(LlamaActs<T>& a, const Shape& s, size_t N, Row row) {
    size_t Q = s.NH * s.HS, KV = s.NKV * s.HS, R = N / s.row_ranks;
    row(a.norm_1, "norm_1", R * s.C, Keep::CHEAP, Last::W);               // (B,T,C)
    row(a.rstd_1, "norm_1.rstd", R, Keep::CHEAP, Last::W);                // (B,T)
    row(a.q, "q", N * Q, Keep::KEPT, Last::B);                            // (B,T,NH,HS)
    row(a.k, "k", N * KV, Keep::KEPT, Last::B);                           // (B,T,NKV,HS)
    row(a.v, "v", N * KV, Keep::KEPT, Last::B);                           // (B,T,NKV,HS)
    row(a.att, "attention", N * Q, Keep::KEPT, Last::W);                  // (B,T,NH,HS)
    row(a.lse, "log-sum-exp", N * s.NH, Keep::KEPT, Last::B);             // (B,NH,T)
    row(a.resid, "residual", R * s.C, Keep::KEPT, Last::W);               // (B,T,C)
    row(a.norm_2, "norm_2", R * s.C, Keep::CHEAP, Last::W);               // (B,T,C)
    row(a.rstd_2, "norm_2.rstd", R, Keep::CHEAP, Last::W);                // (B,T)
    row(a.gate, "gate", N * s.F, Keep::KEPT, Last::B);                    // (B,T,F)
    row(a.up, "up", N * s.F, Keep::KEPT, Last::B);                        // (B,T,F)
    row(a.swiglu, "swiglu", N * s.F, Keep::CHEAP, Last::W);               // (B,T,F)
    row(a.dswiglu, "d swiglu, d gate", N * s.F, Keep::GRADIENT, Last::W); // (B,T,F)
    row(a.dup, "d up", N * s.F, Keep::GRADIENT, Last::W);                 // (B,T,F)
    row(a.dnorm_2, "d norm_2", R * s.C, Keep::GRADIENT, Last::W);         // (B,T,C)
    row(a.dresid, "d residual", R * s.C, Keep::GRADIENT, Last::W);        // (B,T,C)
    row(a.datt, "d attention", N * Q, Keep::GRADIENT, Last::B);           // (B,T,NH,HS)
    row(a.dq, "d q", N * Q, Keep::GRADIENT, Last::W);                     // (B,T,NH,HS)
    row(a.dk, "d k", N * KV, Keep::GRADIENT, Last::W);                    // (B,T,NKV,HS)
    row(a.dv, "d v", N * KV, Keep::GRADIENT, Last::W);                    // (B,T,NKV,HS)
    row(a.dnorm_1, "d norm_1", R * s.C, Keep::GRADIENT, Last::W);         // (B,T,C)
    if (s.row_ranks == 1) return;
    row(a.dout_all, "d out, all rows", N * s.C, Keep::GRADIENT, Last::W);        // (B,T,C)
    row(a.dresid_all, "d residual, all rows", N * s.C, Keep::GRADIENT, Last::W); // (B,T,C)
}

// ----------------------------------------------------------------------------
// the block

template <typename T, typename S>
void llama_attention_forward(Ctx<S>& ctx, const LlamaActs<T>& a, T* cache) {
    const Shape& s = ctx.shape;
    size_t Q = s.NH * s.HS, KV = s.NKV * s.HS;
    rotate_forward(ctx, a.q, s.NH, Q);
    rotate_forward(ctx, a.k, s.NKV, KV);
    Keys<T> keys = keys_seen(ctx, cache, a.k, a.v, KV);
    attention_forward(a.att, a.lse, a.q, keys.k, keys.v, ctx.batch.positions, keys.positions,
                      ctx.batch.doc_start, ctx.slopes, attention_dims(ctx, keys.Tk, Q, keys.stride),
                      ctx.blas, ctx.where);
}

// Everything that the backward pass reads: the forward pass but its last product, and what full
// recomputation runs.
template <typename T, typename S>
void llama_block_activate(Ctx<S>& ctx, const T* inp, const LlamaBlock& w, const LlamaActs<T>& a,
                          T* cache) {
    const Shape& s = ctx.shape;
    const T* nothing = nullptr;
    size_t N = ctx.batch.rows(), R = stream_rows(ctx);
    rmsnorm_forward(a.norm_1, a.rstd_1, inp, w.norm_1.as<T>(), R, s.C, s.norm_eps, ctx.where);
    const T* norm = all_rows(ctx, a.norm_1);
    linear_forward(a.q, norm, w.q, bias_of(w.q_bias), nothing, N, ctx.blas, ctx.where);
    linear_forward(a.k, norm, w.k, bias_of(w.k_bias), nothing, N, ctx.blas, ctx.where);
    linear_forward(a.v, norm, w.v, bias_of(w.v_bias), nothing, N, ctx.blas, ctx.where);
    llama_attention_forward(ctx, a, cache);
    row_parallel_forward(ctx, a.resid, a.att, w.o, nullptr, inp);
    rmsnorm_forward(a.norm_2, a.rstd_2, a.resid, w.norm_2.as<T>(), R, s.C, s.norm_eps, ctx.where);
    norm = all_rows(ctx, a.norm_2);
    linear_forward(a.gate, norm, w.gate, nullptr, nothing, N, ctx.blas, ctx.where);
    linear_forward(a.up, norm, w.up, nullptr, nothing, N, ctx.blas, ctx.where);
    swiglu_forward(a.swiglu, a.gate, a.up, N * s.F, ctx.where);
}

template <typename T, typename S>
void llama_block_forward(Ctx<S>& ctx, T* out, const T* inp, const LlamaBlock& w,
                         const LlamaActs<T>& a, T* cache) {
    llama_block_activate(ctx, inp, w, a, cache);
    row_parallel_forward(ctx, out, a.swiglu, w.down, nullptr, a.resid);
}

// Selective recomputation: the norms and the activation function again, no product.
template <typename T, typename S>
void llama_block_activate_cheap(Ctx<S>& ctx, const T* inp, const LlamaBlock& w,
                                const LlamaActs<T>& a) {
    const Shape& s = ctx.shape;
    size_t R = stream_rows(ctx);
    rmsnorm_forward(a.norm_1, a.rstd_1, inp, w.norm_1.as<T>(), R, s.C, s.norm_eps, ctx.where);
    rmsnorm_forward(a.norm_2, a.rstd_2, a.resid, w.norm_2.as<T>(), R, s.C, s.norm_eps, ctx.where);
    swiglu_forward(a.swiglu, a.gate, a.up, ctx.batch.rows() * s.F, ctx.where);
}

template <typename T, typename S>
void llama_block_backward_input(Ctx<S>& ctx, T* dinp, const T* dout, const T* inp,
                                const LlamaBlock& w, const LlamaActs<T>& a) {
    const Shape& s = ctx.shape;
    size_t N = ctx.batch.rows(), R = stream_rows(ctx), Q = s.NH * s.HS, KV = s.NKV * s.HS;
    linear_backward_input(a.dswiglu, all_rows(ctx, a.dout_all, dout), w.down, N, false, ctx.blas,
                          ctx.where);
    swiglu_backward(a.dswiglu, a.dup, a.dswiglu, a.gate, a.up, N * s.F,
                    ctx.where); // dswiglu becomes dgate
    T* dnorm = partial_rows(ctx, a.dnorm_2);
    linear_backward_input(dnorm, a.dswiglu, w.gate, N, false, ctx.blas, ctx.where);
    linear_backward_input(dnorm, a.dup, w.up, N, true, ctx.blas, ctx.where);
    sum_rows(ctx, a.dnorm_2, dnorm);
    rmsnorm_backward_input(a.dresid, dout, a.dnorm_2, a.resid, w.norm_2.as<T>(), a.rstd_2, R, s.C,
                           ctx.where);
    linear_backward_input(a.datt, all_rows(ctx, a.dresid_all, a.dresid), w.o, N, false, ctx.blas,
                          ctx.where);
    attention_backward(a.dq, a.dk, a.dv, a.datt, a.att, a.lse, a.q, a.k, a.v, ctx.batch.positions,
                       ctx.batch.positions, ctx.batch.doc_start, ctx.slopes,
                       attention_dims(ctx, ctx.batch.T, Q, KV), ctx.blas, ctx.where);
    rotate_backward(ctx, a.dq, s.NH, Q);
    rotate_backward(ctx, a.dk, s.NKV, KV);
    dnorm = partial_rows(ctx, a.dnorm_1);
    linear_backward_input(dnorm, a.dq, w.q, N, false, ctx.blas, ctx.where);
    linear_backward_input(dnorm, a.dk, w.k, N, true, ctx.blas, ctx.where);
    linear_backward_input(dnorm, a.dv, w.v, N, true, ctx.blas, ctx.where);
    sum_rows(ctx, a.dnorm_1, dnorm);
    rmsnorm_backward_input(dinp, a.dresid, a.dnorm_1, inp, w.norm_1.as<T>(), a.rstd_1, R, s.C,
                           ctx.where);
}

template <typename T, typename S>
void llama_block_backward_weight(Ctx<S>& ctx, const T* dout, const T* inp, const LlamaBlock& w,
                                 const LlamaActs<T>& a, bool accumulate) {
    typedef acc_t<T> A;
    size_t N = ctx.batch.rows(), R = stream_rows(ctx), C = ctx.shape.C;
    bool cut = ctx.shape.row_ranks > 1;
    row_parallel_backward_weight(ctx, w.down, nullptr, dout, cut ? a.dout_all : dout, a.swiglu,
                                 accumulate);
    const T* norm = all_rows(ctx, a.norm_2);
    linear_backward_weight(w.gate, nullptr, a.dswiglu, norm, N, accumulate, ctx.blas, ctx.where);
    linear_backward_weight(w.up, nullptr, a.dup, norm, N, accumulate, ctx.blas, ctx.where);
    rmsnorm_backward_weight((A*)w.norm_2.grad, a.dnorm_2, a.resid, a.rstd_2, ctx.blas.scratch, R, C,
                            accumulate, ctx.where);
    row_parallel_backward_weight(ctx, w.o, nullptr, a.dresid, cut ? a.dresid_all : a.dresid, a.att,
                                 accumulate);
    norm = all_rows(ctx, a.norm_1);
    linear_backward_weight(w.q, bias_of(w.q_bias), a.dq, norm, N, accumulate, ctx.blas, ctx.where);
    linear_backward_weight(w.k, bias_of(w.k_bias), a.dk, norm, N, accumulate, ctx.blas, ctx.where);
    linear_backward_weight(w.v, bias_of(w.v_bias), a.dv, norm, N, accumulate, ctx.blas, ctx.where);
    rmsnorm_backward_weight((A*)w.norm_1.grad, a.dnorm_1, inp, a.rstd_1, ctx.blas.scratch, R, C,
                            accumulate, ctx.where);
}

// ----------------------------------------------------------------------------
// embedding and head

template <typename Row>
void llama_embedding_parameters(LlamaEmbedding& w, const Shape& s, Row row) {
    row(w.table, "model.embed_tokens.weight", {s.Vp(), s.C}, normal_init(0.02), true, Shard{0},
        false);
}
template <typename Row> void llama_head_parameters(LlamaHead& w, const Shape& s, Row row) {
    row(w.norm, "model.norm.weight", {s.C}, ONES, false, Shard{}, false);
    if (!s.tied)
        row(w.lm_head, "lm_head.weight", {s.Vp(), s.C}, normal_init(0.02), true, Shard{0}, false);
}

// inp: my rows; a.norm: all
template <typename T, typename S>
void llama_head_norm(Ctx<S>& ctx, const T* inp, const LlamaHead& w, const HeadActs<T>& a,
                     size_t R) {
    T* norm = my_rows(ctx, a.norm);
    rmsnorm_forward(norm, a.rstd, inp, w.norm.as<T>(), R, ctx.shape.C, ctx.shape.norm_eps,
                    ctx.where);
    all_rows(ctx, a.norm, norm);
}

template <typename T, typename S>
void llama_head_backward(Ctx<S>& ctx, T* dinp, double* loss, const T* inp, const LlamaHead& w,
                         const HeadActs<T>& a, acc_t<T> scale, bool accumulate) {
    typedef acc_t<T> A;
    size_t R = stream_rows(ctx), C = ctx.shape.C;
    llama_head_norm(ctx, inp, w, a, R);
    head_loss_backward(ctx, loss, a, w.lm_head, scale, accumulate);
    const T* dnorm = my_rows(ctx, a.dnorm);
    rmsnorm_backward_weight((A*)w.norm.grad, dnorm, inp, a.rstd, ctx.blas.scratch, R, C, accumulate,
                            ctx.where);
    rmsnorm_backward_input(dinp, (const T*)nullptr, dnorm, inp, w.norm.as<T>(), a.rstd, R, C,
                           ctx.where);
}
