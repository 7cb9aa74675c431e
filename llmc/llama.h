// llama.h - Llama, Mistral, Qwen2, Qwen3: tables, block, head - arXiv:2302.13971, arXiv:2505.09388
//   embedding   x = embed_tokens[token]
//   block       x = x + o_proj(attention(rope(q), rope(k), v)),  q, k, v = proj(norm_1(x))
//               x = x + down_proj(silu(gate) * up),              gate, up = proj(norm_2(x))
//   head        logits = lm_head(norm(x))
//   The text is gpt2.h's, step for step: so are N, R, the contract and the two halves of the
//   backward pass. Q = NH HS, KV = NKV HS: fewer key/value heads than heads may serve (GQA).
//   Qwen2 has biases on q, k and v, a Llama may have them on all products; a bias that a model
//   does not have is a Weight without data. Qwen3 norms each head of q and k before RoPE; without
//   such norms the rows that hold q and k before them are null.
//   Cost: a block's forward pass takes 2 N C (2 Q + 2 KV + 3 F) FLOPs in products and 2 N T Q in
//         attention; its backward pass twice the products, 2.5 times the attention.
#pragma once
#include "head.h"
#include "rmsnorm.cuh"
#include "swiglu.cuh"

namespace llmc {

// ----------------------------------------------------------------------------
// the family: weights [out, in], and what a block makes

// clang-format off
struct Llama {
    static constexpr const char* model_types[] = {"llama", "mistral", "qwen2", "qwen3"};
    static constexpr const char* block_prefix = "model.layers.";
    static constexpr const char* body_prefix = "";              // names begin with "model." already
    static constexpr int widening_products = 2;                 // from C to F channels: gate, up

    struct Embedding {
        Weight wte;                               // (Vp,C)
    };

    struct Block {
        Weight norm_1;                            // (C)
        Weight q, q_bias;                         // (Q,C) (Q)
        Weight k, k_bias;                         // (KV,C) (KV)
        Weight v, v_bias;                         // (KV,C) (KV)
        Weight q_norm, k_norm;                    // (HS) (HS)
        Weight o, o_bias;                         // (C,Q) (C)
        Weight norm_2;                            // (C)
        Weight gate, gate_bias;                   // (F,C) (F)
        Weight up, up_bias;                       // (F,C) (F)
        Weight down, down_bias;                   // (C,F) (C)
    };

    struct Head {
        Weight norm;                              // (C)
        Weight lm_head;                           // (Vp,C), where tied wte itself
    };

    template <typename T> struct Acts {
        T* norm_1;                                // (R,C)
        acc_t<T>* norm_1_rstd;                    // (R)
        T *q_raw, *k_raw;                         // (N,Q) (N,KV)  before their norms, or null
        acc_t<T> *q_rstd, *k_rstd;                // (N,NH) (N,NKV)
        T *q, *k, *v;                             // (N,Q) (N,KV) (N,KV)
        T* attention;                             // (N,Q)
        acc_t<T>* lse;                            // (B,NH,T)   log of the sum of exp(scores)
        T* middle;                                // (R,C)      the residual stream after attention
        T* norm_2;                                // (R,C)
        acc_t<T>* norm_2_rstd;                    // (R)
        T *gate, *up, *swiglu;                    // (N,F) (N,F) (N,F)

        T *dswiglu, *dup, *dnorm_2, *dmiddle;     // (N,F) (N,F) (R,C) (R,C)
        T *dattention, *dq, *dk, *dv, *dnorm_1;   // (N,Q) (N,Q) (N,KV) (N,KV) (R,C)
        T *dq_raw, *dk_raw;                       // (N,Q) (N,KV)  before their norms, or null
        acc_t<T> *norm_1_sums, *norm_2_sums;      // parts of the norms' dweight
        acc_t<T> *q_norm_sums, *k_norm_sums;      // parts of theirs
        T *dout_all, *dmiddle_all;                // (N,C) (N,C)  rows of all ranks, where R < N
    };
};
// clang-format on

// ----------------------------------------------------------------------------
// tables: each function shows its rows to a visitor, which makes the table or binds pointers

// clang-format off
// Tensor parallelism cuts columns [out/tp, in] or rows [out, in/tp], or leaves a parameter whole.
// It never cuts a key/value head: ranks share one where there are more ranks than such heads.
template <typename Row>
void block_parameters(Llama::Block& w, const Shape& s, Row row) {
    size_t C = s.C, F = s.F, Q = s.NH * s.HS, KV = s.NKV * s.HS;
    Shard whole = {}, columns = {0}, rows = {1}, kv = {0, 1, int(s.NKV)};
    Shard heads = {-1, 1, 0, Partial::HEADS}; // one norm for the heads of all ranks

    // 2L products add to the residual stream: they start smaller by sqrt(2L).
    Init normal = normal_init(0.02);
    Init small = normal_init(0.02 / std::sqrt(2.0 * s.L));

    //  weight    name                               shape    start   decays cut      transposed
    row(w.norm_1, "input_layernorm.weight",          {C},     ONES,   false, whole,   false);
    row(w.q,      "self_attn.q_proj.weight",         {Q, C},  normal, true,  columns, false);
    row(w.k,      "self_attn.k_proj.weight",         {KV, C}, normal, true,  kv,      false);
    row(w.v,      "self_attn.v_proj.weight",         {KV, C}, normal, true,  kv,      false);
    if (s.qkv_bias) {
        row(w.q_bias, "self_attn.q_proj.bias",       {Q},     ZEROS,  false, columns, false);
        row(w.k_bias, "self_attn.k_proj.bias",       {KV},    ZEROS,  false, kv,      false);
        row(w.v_bias, "self_attn.v_proj.bias",       {KV},    ZEROS,  false, kv,      false);
    }
    if (s.qk_norm) {
        row(w.q_norm, "self_attn.q_norm.weight",     {s.HS},  ONES,   false, heads,   false);
        row(w.k_norm, "self_attn.k_norm.weight",     {s.HS},  ONES,   false, heads,   false);
    }
    row(w.o,      "self_attn.o_proj.weight",         {C, Q},  small,  true,  rows,    false);
    if (s.o_bias)
        row(w.o_bias, "self_attn.o_proj.bias",       {C},     ZEROS,  false, whole,   false);
    row(w.norm_2, "post_attention_layernorm.weight", {C},     ONES,   false, whole,   false);
    row(w.gate,   "mlp.gate_proj.weight",            {F, C},  normal, true,  columns, false);
    row(w.up,     "mlp.up_proj.weight",              {F, C},  normal, true,  columns, false);
    row(w.down,   "mlp.down_proj.weight",            {C, F},  small,  true,  rows,    false);
    if (s.mlp_bias) {
        row(w.gate_bias, "mlp.gate_proj.bias",       {F},     ZEROS,  false, columns, false);
        row(w.up_bias,   "mlp.up_proj.bias",         {F},     ZEROS,  false, columns, false);
        row(w.down_bias, "mlp.down_proj.bias",       {C},     ZEROS,  false, whole,   false);
    }
}

// Recomputation drops rows after the forward pass: every level the CHEAP, two levels those of a
// branch (ATTN, FFN), full both. GRADIENT rows are born in the backward pass. Its half B or W
// is the last to read a row.
template <typename T, typename S, typename Row>
void block_activations(Llama::Acts<T>& a, const Shape& s, size_t N, S where, Row row) {
    size_t C = s.C, F = s.F, Q = s.NH * s.HS, KV = s.NKV * s.HS;
    size_t R = N / s.row_ranks;
    using enum Keep;
    using enum Last;
    Keep product = s.qk_norm ? CHEAP : ATTN; // a norm makes them again
    Last normed = s.qk_norm ? B : W;         // products read what is before the norm

    //  pointer         name                    elements   of        last read
    row(a.norm_1,       "norm_1",               R * C,     CHEAP,    W);
    row(a.norm_1_rstd,  "norm_1.rstd",          R,         CHEAP,    B);
    if (s.qk_norm) {
        row(a.q_raw,    "q before norm",        N * Q,     ATTN,     B);
        row(a.k_raw,    "k before norm",        N * KV,    ATTN,     B);
        row(a.q_rstd,   "q.rstd",               N * s.NH,  CHEAP,    B);
        row(a.k_rstd,   "k.rstd",               N * s.NKV, CHEAP,    B);
    }
    row(a.q,            "q",                    N * Q,     product,  B);
    row(a.k,            "k",                    N * KV,    product,  B);
    row(a.v,            "v",                    N * KV,    ATTN,     B);
    row(a.attention,    "attention",            N * Q,     ATTN,     W);
    row(a.lse,          "log-sum-exp",          N * s.NH,  ATTN,     B);
    row(a.middle,       "middle",               R * C,     ATTN,     B);
    row(a.norm_2,       "norm_2",               R * C,     CHEAP,    W);
    row(a.norm_2_rstd,  "norm_2.rstd",          R,         CHEAP,    B);
    row(a.gate,         "gate",                 N * F,     FFN,      B);
    row(a.up,           "up",                   N * F,     FFN,      B);
    row(a.swiglu,       "swiglu",               N * F,     CHEAP,    W);

    row(a.dswiglu,      "d swiglu, d gate",     N * F,     GRADIENT, W);
    row(a.dup,          "d up",                 N * F,     GRADIENT, W);
    row(a.dnorm_2,      "d norm_2",             R * C,     GRADIENT, B);
    row(a.dmiddle,      "d middle",             R * C,     GRADIENT, W);
    row(a.dattention,   "d attention",          N * Q,     GRADIENT, B);
    row(a.dq,           "d q",                  N * Q,     GRADIENT, normed);
    row(a.dk,           "d k",                  N * KV,    GRADIENT, normed);
    row(a.dv,           "d v",                  N * KV,    GRADIENT, W);
    row(a.dnorm_1,      "d norm_1",             R * C,     GRADIENT, B);
    row(a.norm_1_sums,  "d norm_1, sums", rmsnorm_sums(R, C, where), GRADIENT, W);
    row(a.norm_2_sums,  "d norm_2, sums", rmsnorm_sums(R, C, where), GRADIENT, W);
    if (s.qk_norm) {
        row(a.dq_raw,   "d q before norm",      N * Q,     GRADIENT, W);
        row(a.dk_raw,   "d k before norm",      N * KV,    GRADIENT, W);
        row(a.q_norm_sums, "d q norm, sums", rmsnorm_sums(N * s.NH, s.HS, where), GRADIENT, W);
        row(a.k_norm_sums, "d k norm, sums", rmsnorm_sums(N * s.NKV, s.HS, where), GRADIENT, W);
    }
    if (s.row_ranks == 1) return;
    row(a.dout_all,     "d out, all rows",      N * C,     GRADIENT, W);
    row(a.dmiddle_all,  "d middle, all rows",   N * C,     GRADIENT, W);
}

// RoPE turns queries and keys inside attention, so there is no table of positions.
template <typename Row>
void embedding_parameters(Llama::Embedding& w, const Shape& s, Row row) {
    const char* name = "model.embed_tokens.weight";
    row(w.wte, name, {s.Vp(), s.C}, normal_init(0.02), true, Shard{0}, false);
}
template <typename Row>
void position_parameters(Llama::Embedding&, const Shape&, Row) {} // none

// A tied head has no row of its own: with_head() points lm_head at the token table.
template <typename Row>
void head_parameters(Llama::Head& w, const Shape& s, Row row) {
    row(w.norm, "model.norm.weight", {s.C}, ONES, false, Shard{}, false);
    if (s.tied) return;
    row(w.lm_head, "lm_head.weight", {s.Vp(), s.C}, normal_init(0.02), true, Shard{0}, false);
}
// clang-format on

// ----------------------------------------------------------------------------
// RMSNorm of this rank's rows of the residual stream

// RMSNorm takes no mean and no bias: one number a row, rstd, is all that backward needs.
template <typename T, typename S>
void rmsnorm_forward(Ctx<S>& ctx, T* out, acc_t<T>* rstd, // (R,C) (R)
                     const T* inp, const Weight& weight) {
    rmsnorm_forward(out, rstd, inp, weight.as<T>(), stream_rows(ctx), ctx.shape.C,
                    ctx.shape.norm_eps, ctx.where);
}

// dinp = dresidual (or null: 0) + the norm's own part; sums = parts of dweight
template <typename T, typename S>
void rmsnorm_backward(Ctx<S>& ctx, T* dinp, acc_t<T>* sums, const T* dresidual, // (R,C) (R,C)
                      const T* dout, const T* inp,                              // (R,C) (R,C)
                      const Weight& weight, const acc_t<T>* rstd) {
    rmsnorm_backward(dinp, sums, dresidual, dout, inp, weight.as<T>(), rstd, stream_rows(ctx),
                     ctx.shape.C, ctx.where);
}

// List the parts for column_sums.
template <typename T, typename S>
PartialSums<acc_t<T>> rmsnorm_parts(Ctx<S>& ctx, const Weight& weight, const acc_t<T>* sums) {
    return rmsnorm_parts(grad_of<T>(weight), sums, stream_rows(ctx), ctx.shape.C, ctx.where);
}

// ----------------------------------------------------------------------------
// Qwen3's norms of q and k: a row is a head of a token. Without them `raw` is null.

// The rows that a projection writes: those before the norm, or without one those behind it.
template <typename T>
T* projected(T* raw, T* normed) { return raw ? raw : normed; }

// out = RMSNorm(raw), each head for itself
template <typename T, typename S>
void qk_norm_forward(Ctx<S>& ctx, T* out, acc_t<T>* rstd, const T* raw, // (N,heads,HS) (N,heads)
                     const Weight& weight, size_t heads) {
    if (!raw) return;
    rmsnorm_forward(out, rstd, raw, weight.as<T>(), ctx.batch.rows() * heads, ctx.shape.HS,
                    ctx.shape.norm_eps, ctx.where);
}

// Make the normed heads again as attention left them: rotated.
template <typename T, typename S>
void qk_norm_recompute(Ctx<S>& ctx, T* out, acc_t<T>* rstd, const T* raw, // (N,heads,HS) (N,heads)
                       const Weight& weight, size_t heads) {
    if (!raw) return;
    qk_norm_forward(ctx, out, rstd, raw, weight, heads);
    rotate_forward<T>(ctx, {out, heads, heads * ctx.shape.HS});
}

// draw = the gradient of dout through the norm; sums = parts of dweight
template <typename T, typename S>
void qk_norm_backward(Ctx<S>& ctx, T* draw, acc_t<T>* sums, const T* dout, // (N,heads,HS) each
                      const T* raw, const Weight& weight, const acc_t<T>* rstd, size_t heads) {
    if (!raw) return;
    const T* no_residual = nullptr;
    rmsnorm_backward(draw, sums, no_residual, dout, raw, weight.as<T>(), rstd,
                     ctx.batch.rows() * heads, ctx.shape.HS, ctx.where);
}

// All heads share a weight; this rank's gradient is of its own heads {+tp}.
template <typename T, typename S>
PartialSums<acc_t<T>> qk_norm_parts(Ctx<S>& ctx, const Weight& weight, const acc_t<T>* sums,
                                    size_t heads) {
    return rmsnorm_parts(grad_of<T>(weight), sums, ctx.batch.rows() * heads, ctx.shape.HS,
                         ctx.where);
}

// ----------------------------------------------------------------------------
// the block: two branches that read the residual stream and add to it

template <typename T, typename S>
void block_forward(Ctx<S>& ctx, T* out, const T* inp, const Llama::Block& w,
                   const Llama::Acts<T>& a, T* cache) {
    size_t N = ctx.batch.rows(), F = ctx.shape.F;
    size_t Q = w.q.rows, KV = w.k.rows;

    // Let tokens look at those before them.
    rmsnorm_forward(ctx, a.norm_1, a.norm_1_rstd, inp, w.norm_1);
    T *q = projected(a.q_raw, a.q), *k = projected(a.k_raw, a.k);
    column_parallel_forward(
        ctx, {{q, w.q, w.q_bias}, {k, w.k, w.k_bias}, {a.v, w.v, w.v_bias}}, a.norm_1);
    qk_norm_forward(ctx, a.q, a.q_rstd, a.q_raw, w.q_norm, ctx.shape.NH);
    qk_norm_forward(ctx, a.k, a.k_rstd, a.k_raw, w.k_norm, ctx.shape.NKV);
    attention_forward(ctx, a.attention, a.lse, {a.q, a.k, a.v, Q, KV}, cache);
    row_parallel_forward(ctx, a.middle, a.attention, w.o, w.o_bias, inp);

    // Let each token work on what it saw.
    rmsnorm_forward(ctx, a.norm_2, a.norm_2_rstd, a.middle, w.norm_2);
    column_parallel_forward(ctx, {{a.gate, w.gate, w.gate_bias}, {a.up, w.up, w.up_bias}},
                            a.norm_2);
    swiglu_forward(a.swiglu, a.gate, a.up, N * F, ctx.where);
    row_parallel_forward(ctx, out, a.swiglu, w.down, w.down_bias, a.middle);
}

// Make again what the level of recomputation dropped: norms and SwiGLU always, the products of a
// branch at some levels. Nothing reads the block's output again, so `down` is left out.
template <typename T, typename S>
void block_recompute(Ctx<S>& ctx, const T* inp, const Llama::Block& w, const Llama::Acts<T>& a,
                     Recompute level) {
    size_t Q = w.q.rows, KV = w.k.rows;
    T* no_cache = nullptr;

    // The first branch: attention turns q and k itself, or they are made again as it left them.
    rmsnorm_forward(ctx, a.norm_1, a.norm_1_rstd, inp, w.norm_1);
    if (redoes_attn(level)) {
        T *q = projected(a.q_raw, a.q), *k = projected(a.k_raw, a.k);
        column_parallel_forward(
            ctx, {{q, w.q, w.q_bias}, {k, w.k, w.k_bias}, {a.v, w.v, w.v_bias}}, a.norm_1);
        qk_norm_forward(ctx, a.q, a.q_rstd, a.q_raw, w.q_norm, ctx.shape.NH);
        qk_norm_forward(ctx, a.k, a.k_rstd, a.k_raw, w.k_norm, ctx.shape.NKV);
        attention_forward(ctx, a.attention, a.lse, {a.q, a.k, a.v, Q, KV}, no_cache);
        row_parallel_forward(ctx, a.middle, a.attention, w.o, w.o_bias, inp);
    } else {
        qk_norm_recompute(ctx, a.q, a.q_rstd, a.q_raw, w.q_norm, ctx.shape.NH);
        qk_norm_recompute(ctx, a.k, a.k_rstd, a.k_raw, w.k_norm, ctx.shape.NKV);
    }

    // The second.
    rmsnorm_forward(ctx, a.norm_2, a.norm_2_rstd, a.middle, w.norm_2);
    if (redoes_ffn(level))
        column_parallel_forward(ctx, {{a.gate, w.gate, w.gate_bias}, {a.up, w.up, w.up_bias}},
                                a.norm_2);
    swiglu_forward(a.swiglu, a.gate, a.up, ctx.batch.rows() * ctx.shape.F, ctx.where);
}

// Everything but the gradients of weights, of which it makes what is at hand: parts of sums.
template <typename T, typename S>
void block_backward_input(Ctx<S>& ctx, T* dinp, const T* dout, const T* inp,
                          const Llama::Block& w, const Llama::Acts<T>& a) {
    size_t N = ctx.batch.rows(), F = ctx.shape.F;
    size_t Q = w.q.rows, KV = w.k.rows;

    // Walk back through the second branch; SwiGLU turns its gradient into gate's in place.
    T* dgate = a.dswiglu; // (N,F)
    row_parallel_backward_input(ctx, a.dswiglu, a.dout_all, dout, w.down);
    swiglu_backward(dgate, a.dup, a.dswiglu, a.gate, a.up, N * F, ctx.where);
    column_parallel_backward_input(ctx, a.dnorm_2, {{dgate, w.gate}, {a.dup, w.up}});
    rmsnorm_backward(ctx, a.dmiddle, a.norm_2_sums, dout, a.dnorm_2, a.middle, w.norm_2,
                     a.norm_2_rstd);

    // Walk back through the first.
    row_parallel_backward_input(ctx, a.dattention, a.dmiddle_all, a.dmiddle, w.o);
    attention_backward(ctx, {a.dq, a.dk, a.dv, Q, KV}, a.dattention, a.attention, a.lse,
                       {a.q, a.k, a.v, Q, KV});
    T *dq = projected(a.dq_raw, a.dq), *dk = projected(a.dk_raw, a.dk);
    qk_norm_backward(ctx, dq, a.q_norm_sums, a.dq, a.q_raw, w.q_norm, a.q_rstd, ctx.shape.NH);
    qk_norm_backward(ctx, dk, a.k_norm_sums, a.dk, a.k_raw, w.k_norm, a.k_rstd, ctx.shape.NKV);
    column_parallel_backward_input(ctx, a.dnorm_1, {{dq, w.q}, {dk, w.k}, {a.dv, w.v}});
    rmsnorm_backward(ctx, dinp, a.norm_1_sums, a.dmiddle, a.dnorm_1, inp, w.norm_1,
                     a.norm_1_rstd);
}

// The gradients of weights, from what block_backward_input has made of the same dout and inp.
template <typename T, typename S>
void block_backward_weight(Ctx<S>& ctx, const T* dout, const Llama::Block& w,
                           const Llama::Acts<T>& a, bool accumulate) {
    const Shape& s = ctx.shape;
    size_t N = ctx.batch.rows(), R = stream_rows(ctx), Q = w.q.rows, KV = w.k.rows;

    // Give the second branch's matrices their gradients.
    T* dgate = a.dswiglu; // (N,F)
    row_parallel_backward_weight(ctx, w.down, dout, a.dout_all, a.swiglu, accumulate);
    column_parallel_backward_weight(ctx, {{dgate, w.gate}, {a.dup, w.up}}, a.norm_2, accumulate);

    // And the first's.
    T *dq = projected(a.dq_raw, a.dq), *dk = projected(a.dk_raw, a.dk);
    row_parallel_backward_weight(ctx, w.o, a.dmiddle, a.dmiddle_all, a.attention, accumulate);
    column_parallel_backward_weight(ctx, {{dq, w.q}, {dk, w.k}, {a.dv, w.v}}, a.norm_1,
                                    accumulate);

    // Norms have parts of theirs already; add up all sums over rows together.
    column_sums<T>({{grad_of<T>(w.down_bias), dout, R, s.C},
                    {grad_of<T>(w.gate_bias), dgate, N, s.F},
                    {grad_of<T>(w.up_bias), a.dup, N, s.F},
                    {grad_of<T>(w.o_bias), a.dmiddle, R, s.C},
                    {grad_of<T>(w.q_bias), dq, N, Q},
                    {grad_of<T>(w.k_bias), dk, N, KV},
                    {grad_of<T>(w.v_bias), a.dv, N, KV}},
                   {rmsnorm_parts<T>(ctx, w.norm_1, a.norm_1_sums),
                    rmsnorm_parts<T>(ctx, w.norm_2, a.norm_2_sums),
                    qk_norm_parts<T>(ctx, w.q_norm, a.q_norm_sums, s.NH),
                    qk_norm_parts<T>(ctx, w.k_norm, a.k_norm_sums, s.NKV)},
                   ctx.blas.scratch, accumulate, ctx.where);
}

// ----------------------------------------------------------------------------
// the head: the final norm here, logits and loss in head.h

// Norm `rows` rows of inp, then gather those of all ranks into a.norm (N,C).
template <typename T, typename S>
void head_norm(Ctx<S>& ctx, const T* inp, const Llama::Head& w, const HeadActs<T>& a, size_t rows) {
    T* norm = my_rows(ctx, a.norm); // (rows,C)
    rmsnorm_forward(norm, a.rstd, inp, w.norm.as<T>(), rows, ctx.shape.C, ctx.shape.norm_eps,
                    ctx.where);
    gather_rows(ctx, a.norm, norm);
}

// The head's forward pass keeps nothing, so this is all of it: loss and gradients.
template <typename T, typename S>
void head_backward(Ctx<S>& ctx, T* dinp, double* loss, const T* inp, const Llama::Head& w,
                   const HeadActs<T>& a, acc_t<T> scale, bool accumulate) {
    head_norm(ctx, inp, w, a, stream_rows(ctx));
    head_loss_backward(ctx, loss, a, w.lm_head, scale, accumulate);

    // Walk back through the norm, where the residual stream's gradient begins.
    const T* dnorm = my_rows(ctx, a.dnorm); // (R,C)
    const T* dresidual = nullptr;
    acc_t<T>* sums = static_cast<acc_t<T>*>(ctx.blas.scratch);
    rmsnorm_backward(ctx, dinp, sums, dresidual, dnorm, inp, w.norm, a.rstd);
    column_sums<T>({}, {rmsnorm_parts<T>(ctx, w.norm, sums)}, nullptr, accumulate, ctx.where);
}

} // namespace llmc
