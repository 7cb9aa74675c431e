// llama.h - Llama and its variants: tables, block, head - arXiv:2302.13971, arXiv:2501.00656
//   embedding   x = embed_tokens[token]
//   block       x = x + o_proj(attention(rope(q), rope(k), v)),  q, k, v = proj(norm_1(x))
//               x = x + down_proj(silu(gate) * up),              gate, up = proj(norm_2(x))
//   head        logits = lm_head(norm(x))
//   This file follows gpt2.h step for step, with the same N, R, contract and two halves of the
//   backward pass. Q = NH HS, KV = NKV HS: there may be fewer key/value heads than heads (GQA).
//   Variants:
//     biases   Qwen2 has them on q, k and v, a Llama may have them on all products. A bias that a
//              model does not have is a Weight without data.
//     q, k     Qwen3 norms each head of q and k before RoPE, OLMo-2 all heads of a token together.
//              Without these norms the pointers to q and k before the norm (q_raw, k_raw) are null.
//     post     OLMo-2 has its norms behind the branches, Gemma has them before and behind:
//              x = x + post_1(o_proj(...)),  x = x + post_2(down_proj(...))
//     Gemma    The gate is GELU (swiglu.cuh), and norms multiply by 1 + weight.
//     track 3  modded-nanogpt's baseline (github.com/KellerJordan/modded-nanogpt). The ffn is
//              fc2(relu(fc1(x))^2), norms of q and k have no weight, every product has a bias, and
//              the first block begins with x = norm(x). RoPE turns half of the pairs (rope.cuh).
//     nanochat transformers' class of that name: the same without biases and without any weights of
//              norms, and RoPE turns all pairs.
//     nanochat_values  nanochat with more of what github.com/karpathy/nanochat has. A block begins
//              with x = r x + z x0, where x0 = norm(embed_tokens[token]). In the last block and
//              every other one before it each head has v = v + 3 sigmoid(W y) E[token], where y is
//              the first 12 channels of norm_1(x).
//   Cost: a block's forward pass takes 2 N C (2 Q + 2 KV + 3 F) FLOPs in products and 2 N T Q in
//         attention. Its backward pass takes twice the former and 2.5 times the latter.
#pragma once
#include "comm/comm.h"
#include "context.h"
#include "context_parallel.h"
#include "head.h"
#include "model.h"
#include "ops/attention_join.cuh"
#include "ops/column_sums.cuh"
#include "ops/elementwise.cuh"
#include "ops/embedding.cuh"
#include "ops/linear.cuh"
#include "ops/memory.h"
#include "ops/objective.cuh"
#include "ops/partial_sums.cuh"
#include "ops/rand.h"
#include "ops/rmsnorm.cuh"
#include "ops/swiglu.cuh"
#include "ops/types.h"
#include "tensor_parallel.h"

namespace llmc {

// ----------------------------------------------------------------------------
// the family: weights [out, in], and the activations of a block

// clang-format off
// The weights of the first branch (attention). Families with other second branches share them.
struct AttentionWeights {
    Weight norm_1;                                // (C)
    Weight q, q_bias;                             // (Q,C) (Q)
    Weight k, k_bias;                             // (KV,C) (KV)
    Weight v, v_bias;                             // (KV,C) (KV)
    Weight q_norm, k_norm;                        // (HS) (HS), whole_qk_norm: (Q) (KV)
    Weight o, o_bias;                             // (C,Q) (C)
    Weight post_1;                                // (C)        the norm of the branch's result
    Weight sinks;                                 // (NH)       gpt-oss
    Weight value_gate;                            // (NKV,W)    W: value_channels()
    Weight values;                                // (V,KV)     embeddings
};

// The activations of the first branch. Below, "whole" means Shape::whole_qk_norm.
template <typename T> struct AttentionActs {
    T* norm_1;                                    // (R,C)
    acc_t<T>* norm_1_rstd;                        // (R)
    T *q_raw, *k_raw;                             // (N,Q) (N,KV)  q, k before their norms, or null
    acc_t<T> *q_rstd, *k_rstd;                    // (N,NH) (N,NKV), whole: (N) (N)
    acc_t<T> *q_squares, *k_squares;              // (N) (N)    whole: sums of squares over tp
    T *q, *k, *v;                                 // (N,Q) (N,KV) (N,KV)
    T* attention;                                 // (N,Q)
    acc_t<T>* lse;                                // (B,NH,T)   log of the sum of exp(scores)
    T* o_out;                                     // (R,C)      the result before post_1, or null
    acc_t<T>* post_1_rstd;                        // (R)
    T* middle;                                    // (R,C)      the residual stream after attention

    T *dmiddle, *dattention;                      // (R,C) (N,Q)
    T *dq, *dk, *dv, *dnorm_1;                    // (N,Q) (N,KV) (N,KV) (R,C)
    T *dq_raw, *dk_raw;                           // (N,Q) (N,KV)  of q_raw and k_raw, or null
    acc_t<T> *q_dots, *k_dots;                    // (N) (N)    whole: backward's row sums over tp
    T* do_out;                                    // (R,C)      the gradient of o_out, or null
    acc_t<T>* norm_1_sums;                        // parts of norm_1's dweight
    acc_t<T> *q_norm_sums, *k_norm_sums;          // parts of q_norm's and k_norm's dweight
    acc_t<T>* post_1_sums;                        // parts of post_1's dweight
    acc_t<T>* sink_sums;                          // parts of the sinks' gradient
    T* dmiddle_all;                               // (N,C)      the rows of all ranks, if R < N

    T *gate_rows, *dgate_rows;                    // (N,W)      norm_1's first channels
    T *gate_logits, *dgate_logits;                // (N,NKV)
    T *values, *dvalues;                          // (N,KV)     the tokens' rows
    acc_t<T>* gate_dots;                          // (N,NKV)    values . dv of each head
};

struct Llama {
    static constexpr const char* block_prefix = "model.layers.";
    static constexpr const char* body_prefix = "";              // names begin with "model." already
    static constexpr int widening_products = 2;                 // from C to F channels: gate, up

    struct Embedding {
        Weight wte;                               // (Vp,C)
    };

    struct Block : AttentionWeights {
        Weight embed_norm;                        // (C)        the norm of the embedding, or none
        Weight resid_lambda;                      // (1)        r
        Weight x0_lambda;                         // (1)        z
        Weight norm_2;                            // (C)
        Weight gate, gate_bias;                   // (F,C) (F)  ReLU^2: fc1
        Weight up, up_bias;                       // (F,C) (F)  ReLU^2: none
        Weight down, down_bias;                   // (C,F) (C)
        Weight post_2;                            // (C)        the norm of the branch's result
    };

    struct Head {
        Weight norm;                              // (C)
        LmHead lm_head;                           // (Vp,C), if tied wte itself; its bias (Vp)
    };

    template <typename T> struct Acts : AttentionActs<T> {
        T *embed, *dembed;                        // (R,C) (R,C)  the normed embedding, or null
        acc_t<T> *embed_rstd, *embed_sums;        // (R), parts of embed_norm's dweight
        struct {
            T* out;                               // (R,C)      the first block's inp
            T* dout;                              // (R,C)      and dinp, which may be null
        } embedding;
        T* mixed;                                 // (R,C)      r x + z x0
        acc_t<T>* resid_dots;                     // (R)        x . dmixed
        acc_t<T>* x0_dots;                        // (R)        x0 . dmixed
        T* norm_2;                                // (R,C)
        acc_t<T>* norm_2_rstd;                    // (R)
        T *gate, *up, *swiglu;                    // (N,F) (N,F) (N,F)
        T* down_out;                              // (R,C)      the result before post_2, or null
        acc_t<T>* post_2_rstd;                    // (R)

        T *dswiglu, *dup, *dnorm_2;               // (N,F) (N,F) (R,C)
        T* ddown_out;                             // (R,C)      the gradient of down_out, or null
        acc_t<T>* norm_2_sums;                    // parts of norm_2's dweight
        acc_t<T>* post_2_sums;                    // parts of post_2's dweight
        T* dout_all;                              // (N,C)      the rows of all ranks, if R < N
    };
};
// clang-format on

// ----------------------------------------------------------------------------
// tables: a function shows each row to a visitor, which adds it to a table or binds its pointer

// The first values of matrices: attention's and the ffn's that read the stream, those that add to
// it, the token table, and the head.
struct Inits {
    Init read, widen, add, table, head;
};
inline Inits inits_of(const Shape& s) {
    // 2L products add to the residual stream, so their weights start smaller by sqrt(2L).
    Init normal = normal_init(0.02);
    if (!s.block.zero_start)
        return {normal, normal, normal_init(0.02 / std::sqrt(2.0 * s.L)), normal, normal};

    // modded-nanogpt, nanochat: at first nothing is added, and tokens are about equally likely.
    Init read = normal_init(std::sqrt((s.block.gains ? 0.33 : 1) / double(s.C)));
    if (s.block.gains) return {read, read, ZEROS, normal_init(1), ZEROS};
    Init widen = {0, 0.4f * read.std};
    return {read, widen, ZEROS, normal_init(0.8), normal_init(0.001)};
}

// The channels that a gate of value embeddings reads.
inline size_t value_channels(const Shape& s) {
    size_t most = 12;
    return std::min(s.C, most);
}

// Whether the ffn has a gate, and so the product `up`.
inline bool is_gated(const Shape& s) { return s.block.gate != Gate::RELU2; }

// clang-format off
// The parameters of the first branch. Tensor parallelism cuts columns [out/tp, in], cuts rows
// [out, in/tp], or leaves a parameter whole. It never cuts a key/value head: if there are more
// ranks than such heads, several ranks hold the same one.
template <typename Row>
void attention_parameters(AttentionWeights& w, const Shape& s, Row& row) {
    size_t C = s.C, Q = s.NH * s.HS, KV = s.NKV * s.HS;
    Shard whole = {}, columns = {0}, rows = {1}, kv = {0, 1, int(s.NKV)};
    Shard heads = {-1, 1, 0, Partial::HEADS}; // every rank holds the one norm of all heads
    bool all = s.block.whole_qk_norm;         // true: a longer norm, of which a rank holds a part

    auto [normal, widen, small, table, head] = inits_of(s);
    Init one = {1 - s.block.norm_plus, 0}; // norms begin with a scale of 1

    //  weight    name                               shape    start   decays cut      transposed
    if (s.block.pre_norm && s.block.gains)
        row(w.norm_1, "input_layernorm.weight",      {C},     one,    false, whole,   false);
    row(w.q,      "self_attn.q_proj.weight",         {Q, C},  normal, true,  columns, false);
    row(w.k,      "self_attn.k_proj.weight",         {KV, C}, normal, true,  kv,      false);
    row(w.v,      "self_attn.v_proj.weight",         {KV, C}, normal, true,  kv,      false);
    if (s.attention.qkv_bias) {
        row(w.q_bias, "self_attn.q_proj.bias",       {Q},     ZEROS,  false, columns, false);
        row(w.k_bias, "self_attn.k_proj.bias",       {KV},    ZEROS,  false, kv,      false);
        row(w.v_bias, "self_attn.v_proj.bias",       {KV},    ZEROS,  false, kv,      false);
    }
    if (s.block.qk_norm && s.block.qk_gains) {
        size_t q_rows = all ? Q : s.HS;
        size_t k_rows = all ? KV : s.HS;
        Shard q_cut = all ? columns : heads;
        Shard k_cut = all ? kv : heads;
        row(w.q_norm, "self_attn.q_norm.weight",     {q_rows}, one,   false, q_cut,   false);
        row(w.k_norm, "self_attn.k_norm.weight",     {k_rows}, one,   false, k_cut,   false);
    }
    row(w.o,      "self_attn.o_proj.weight",         {C, Q},  small,  true,  rows,    false);
    if (s.attention.o_bias)
        row(w.o_bias, "self_attn.o_proj.bias",       {C},     ZEROS,  false, whole,   false);
    if (s.block.post_norm)
        row(w.post_1, "post_attention_layernorm.weight", {C}, one,    false, whole,   false);
    if (s.attention.sinks)
        row(w.sinks, "self_attn.sinks",              {s.NH},  normal, false, columns, false);
}

// The parameters of a block: the first branch, then the ffn.
template <typename Row>
void block_parameters(Llama::Block& w, const Shape& s, Row row) {
    const BlockShape& block = s.block;
    size_t C = s.C, F = s.F;
    Shard whole = {}, columns = {0}, rows = {1};
    auto [normal, widen, small, table, head] = inits_of(s);
    Init one = {1 - block.norm_plus, 0};
    bool gated = is_gated(s);
    std::string gate = gated ? "mlp.gate_proj." : "mlp.fc1.";
    std::string down = gated ? "mlp.down_proj." : "mlp.fc2.";
    const char* second = block.post_norm ? "pre_feedforward_layernorm.weight"
                                     : "post_attention_layernorm.weight";

    //  weight    name                               shape    start   decays cut      transposed
    if (s.embedding.normed && block.gains)
        row(w.embed_norm, "embed_norm.weight",       {C},     one,    false, whole,   false);
    if (block.scalars) {
        Init r = {1.15f - 0.1f * block.place, 0};
        Init z = {0.2f - 0.15f * block.place, 0};
        row(w.resid_lambda, "resid_lambda",          {1},     r,      false, whole,   false);
        row(w.x0_lambda, "x0_lambda",                {1},     z,      false, whole,   false);
    }
    attention_parameters(w, s, row);
    if (block.pre_norm && block.gains)
        row(w.norm_2, second,                        {C},     one,    false, whole,   false);
    row(w.gate,   (gate + "weight").c_str(),         {F, C},  widen,  true,  columns, false);
    if (gated)
        row(w.up, "mlp.up_proj.weight",              {F, C},  widen,  true,  columns, false);
    row(w.down,   (down + "weight").c_str(),         {C, F},  small,  true,  rows,    false);
    if (block.mlp_bias)
        row(w.gate_bias, (gate + "bias").c_str(),    {F},     ZEROS,  false, columns, false);
    if (block.mlp_bias && gated)
        row(w.up_bias,   "mlp.up_proj.bias",         {F},     ZEROS,  false, columns, false);
    if (block.mlp_bias)
        row(w.down_bias, (down + "bias").c_str(),    {C},     ZEROS,  false, whole,   false);
    if (block.post_norm)
        row(w.post_2, "post_feedforward_layernorm.weight", {C}, one,  false, whole,   false);
}

// The table of value embeddings, and its gate, in a bucket of their own. Heads are cut as those of
// keys. nanochat draws the gate from 0 to 0.02; here it is normal, of the same mean and deviation.
template <typename Row>
void value_parameters(Llama::Block& w, const Shape& s, Row row) {
    if (!s.attention.values) return;
    size_t KV = s.NKV * s.HS;
    size_t W = value_channels(s);
    Init gate = {0.01f, 0.02f / std::sqrt(12.0f)};
    Init read = inits_of(s).read;
    int units = int(s.NKV);

    //  weight         name                        shape     start  decays cut            transposed
    row(w.value_gate, "self_attn.ve_gate.weight",  {s.NKV, W}, gate,  true,  {0, 1, units}, false);
    row(w.values, "value_embed.weight",            {s.V, KV},  read,  true,  {1, 1, units}, false);
}

// The rows on which the norm of q or k works: each is one head of a token, or with whole_qk_norm
// all heads of a token on this rank.
struct NormRows {
    size_t count, C;
};
inline NormRows norm_rows(const Shape& s, size_t N, size_t heads) {
    return s.block.whole_qk_norm ? NormRows{N, heads * s.HS} : NormRows{N * heads, s.HS};
}

// The activations of the first branch. Levels of recomputation drop rows after the forward pass:
// all but `none` drop CHEAP rows, `attention` also ATTN, `ffn` also FFN, `full` all three. The
// backward pass makes GRADIENT rows; its input half (B) or weight half (W) reads a row last.
template <typename T, typename S, typename Row>
void attention_activations(AttentionActs<T>& a, const Shape& s, size_t N, S where, Row& row) {
    const BlockShape& block = s.block;
    size_t C = s.C, Q = s.NH * s.HS, KV = s.NKV * s.HS;
    size_t R = N / s.rank.rows;
    using enum Keep;
    using enum Last;
    Keep product = block.qk_norm ? CHEAP : ATTN; // q and k are outputs of norms, or of products
    Last normed = block.qk_norm ? B : W;         // with a norm W reads dq_raw and dk_raw instead
    Last middle = block.pre_norm ? B : W;        // without a norm the second branch reads it
    bool all = block.whole_qk_norm;
    Keep qkv = inputs_kept(s).attention;

    //  pointer         name                    elements   of        last read
    row(a.norm_1,       "norm_1",               R * C,     qkv,      W); // no norm: a copy
    if (block.pre_norm)
        row(a.norm_1_rstd, "norm_1.rstd",       R,         CHEAP,    B);
    if (block.qk_norm) {
        row(a.q_raw,    "q before norm",        N * Q,     ATTN,     B);
        row(a.k_raw,    "k before norm",        N * KV,    ATTN,     B);
        row(a.q_rstd,   "q.rstd",     all ? N : N * s.NH,  CHEAP,    B);
        row(a.k_rstd,   "k.rstd",     all ? N : N * s.NKV, CHEAP,    B);
    }
    if (all) {
        row(a.q_squares, "q, squares",          N,         CHEAP,    B);
        row(a.k_squares, "k, squares",          N,         CHEAP,    B);
    }
    row(a.q,            "q",                    N * Q,     product,  B);
    row(a.k,            "k",                    N * KV,    product,  B);
    row(a.v,            "v",                    N * KV,    ATTN,     B);
    if (s.attention.values) {
        size_t channels = N * value_channels(s);
        size_t heads = N * s.NKV;
        row(a.gate_rows,    "value gate, rows",    channels,  ATTN,     W);
        row(a.gate_logits,  "value gate, logits",  heads,     ATTN,     B);
        row(a.values,       "value embeddings",    N * KV,    ATTN,     B);
        row(a.dgate_rows,   "d value gate, rows",  channels,  GRADIENT, B);
        row(a.dgate_logits, "d value gate, logits", heads,    GRADIENT, W);
        row(a.gate_dots,    "d value gate, dots",  heads,     GRADIENT, B);
        row(a.dvalues,      "d value embeddings",  N * KV,    GRADIENT, W);
    }
    row(a.attention,    "attention",            N * Q,     ATTN,     W);
    row(a.lse,          "log-sum-exp",          N * s.NH,  ATTN,     B);
    row(a.middle,       "middle",               R * C,     ATTN,     middle);
    if (block.post_norm) {
        row(a.o_out,       "o before norm",     R * C,     ATTN,     B);
        row(a.post_1_rstd, "post_1.rstd",       R,         ATTN,     B);
    }

    row(a.dmiddle,      "d middle",             R * C,     GRADIENT, W);
    row(a.dattention,   "d attention",          N * Q,     GRADIENT, B);
    row(a.dq,           "d q",                  N * Q,     GRADIENT, normed);
    row(a.dk,           "d k",                  N * KV,    GRADIENT, normed);
    row(a.dv,           "d v",                  N * KV,    GRADIENT, W);
    row(a.dnorm_1,      "d norm_1",             R * C,     GRADIENT, B);
    size_t sums = rmsnorm_sums(R, C, where);
    if (block.pre_norm)
        row(a.norm_1_sums, "d norm_1, sums",     sums,     GRADIENT, W);
    if (block.post_norm) {
        row(a.do_out,      "d o before norm",    R * C,    GRADIENT, W);
        row(a.post_1_sums, "d post_1, sums",     sums,     GRADIENT, W);
    }
    if (block.qk_norm) {
        row(a.dq_raw,   "d q before norm",      N * Q,     GRADIENT, W);
        row(a.dk_raw,   "d k before norm",      N * KV,    GRADIENT, W);
    }
    if (block.qk_norm && block.qk_gains) {
        NormRows q = norm_rows(s, N, s.NH);
        NormRows k = norm_rows(s, N, s.NKV);
        size_t q_sums = rmsnorm_sums(q.count, q.C, where);
        size_t k_sums = rmsnorm_sums(k.count, k.C, where);
        row(a.q_norm_sums, "d q norm, sums",    q_sums,    GRADIENT, W);
        row(a.k_norm_sums, "d k norm, sums",    k_sums,    GRADIENT, W);
    }
    if (all) {
        row(a.q_dots,   "d q, dots",            N,         GRADIENT, B);
        row(a.k_dots,   "d k, dots",            N,         GRADIENT, B);
    }
    if (s.attention.sinks)
        row(a.sink_sums, "d sinks, sums",  sink_parts(where) * s.NH, GRADIENT, W);
    if (s.rank.rows > 1)
        row(a.dmiddle_all, "d middle, all rows", N * C,    GRADIENT, W);
}

// The activations of a block: the first branch, then the ffn.
template <typename T, typename S, typename Row>
void block_activations(Llama::Acts<T>& a, const Shape& s, size_t N, S where, Row row) {
    const BlockShape& block = s.block;
    size_t C = s.C, F = s.F;
    size_t R = N / s.rank.rows;
    using enum Keep;
    using enum Last;
    auto [first, ffn, last, none] = inputs_kept(s);

    //  pointer         name                    elements   of        last read
    if (s.embedding.normed) {
        row(a.embed,       "embedding, normed", R * C,     CHEAP,    B);
        row(a.embed_rstd,  "embedding.rstd",    R,         CHEAP,    B);
    }
    if (block.scalars) {
        row(a.mixed,       "stream, mixed",     R * C,     CHEAP,    B);
        row(a.resid_dots,  "d resid_lambda, dots", R,      GRADIENT, W);
        row(a.x0_dots,     "d x0_lambda, dots", R,         GRADIENT, W);
    }
    attention_activations(a, s, N, where, row);
    if (block.pre_norm) {
        row(a.norm_2,      "norm_2",            R * C,     ffn,      W);
        row(a.norm_2_rstd, "norm_2.rstd",       R,         CHEAP,    B);
    }
    row(a.gate,         "gate",                 N * F,     FFN,      B);
    if (is_gated(s))
        row(a.up,       "up",                   N * F,     FFN,      B);
    row(a.swiglu,       "swiglu",               N * F,     last,     W);
    if (block.post_norm) {
        row(a.down_out,    "down before norm",  R * C,     FFN,      B);
        row(a.post_2_rstd, "post_2.rstd",       R,         FFN,      B);
    }

    row(a.dswiglu,      "d swiglu, d gate",     N * F,     GRADIENT, W);
    if (is_gated(s))
        row(a.dup,      "d up",                 N * F,     GRADIENT, W);
    row(a.dnorm_2,      "d norm_2",             R * C,     GRADIENT, B);
    size_t sums = rmsnorm_sums(R, C, where);
    if (s.embedding.normed) {
        row(a.dembed,      "d embedding, normed", R * C,   GRADIENT, B);
        row(a.embed_sums,  "d embed_norm, sums", sums,     GRADIENT, W);
    }
    if (block.pre_norm)
        row(a.norm_2_sums, "d norm_2, sums",     sums,     GRADIENT, W);
    if (block.post_norm) {
        row(a.ddown_out,   "d down before norm", R * C,    GRADIENT, W);
        row(a.post_2_sums, "d post_2, sums",     sums,     GRADIENT, W);
    }
    if (s.rank.rows > 1)
        row(a.dout_all, "d out, all rows",      N * C,     GRADIENT, W);
}

// The token table. RoPE rotates queries and keys inside attention, so positions have no table.
template <typename Row>
void embedding_parameters(Llama::Embedding& w, const Shape& s, Row row) {
    const char* name = "model.embed_tokens.weight";
    row(w.wte, name, {s.Vp(), s.C}, inits_of(s).table, true, Shard{0}, false);
}
template <typename Row>
void position_parameters(Llama::Embedding&, const Shape&, Row) {} // none

// A tied head has no row of its own: with_head() points lm_head at the token table.
template <typename Row>
void head_parameters(Llama::Head& w, const Shape& s, Row row) {
    Init one = {1 - s.block.norm_plus, 0};
    if (s.block.gains)
        row(w.norm, "model.norm.weight", {s.C}, one, false, Shard{}, false);
    if (!s.embedding.tied)
        row(w.lm_head, "lm_head.weight", {s.Vp(), s.C}, inits_of(s).head, true, Shard{0}, false);
    if (s.embedding.head_bias)
        row(w.lm_head.bias, "lm_head.bias", {s.Vp()}, ZEROS, false, Shard{0}, false);
}
// clang-format on

// ----------------------------------------------------------------------------
// RMSNorm of this rank's rows of the residual stream

// out = RMSNorm(inp) + residual (null: 0). There is no mean and no bias, so backward needs a single
// number for each row: rstd.
template <typename T, typename S>
void rmsnorm_forward(Ctx<S>& ctx, T* out, acc_t<T>* rstd, // (R,C) (R)
                     const T* inp, const Weight& weight, const T* residual = nullptr) {
    rmsnorm_forward(out, rstd, inp, weight.as<T>(), stream_rows(ctx), ctx.shape.C,
                    ctx.shape.block.norm_eps, ctx.where, {residual, ctx.shape.block.norm_plus});
}

// dinp = the gradient through the norm + dresidual (null: 0). sums = parts of dweight.
template <typename T, typename S>
void rmsnorm_backward(Ctx<S>& ctx, T* dinp, acc_t<T>* sums, const T* dresidual, // (R,C) (R,C)
                      const T* dout, const T* inp,                              // (R,C) (R,C)
                      const Weight& weight, const acc_t<T>* rstd) {
    rmsnorm_backward(dinp, sums, dresidual, dout, inp, weight.as<T>(), rstd, stream_rows(ctx),
                     ctx.shape.C, ctx.where, {nullptr, ctx.shape.block.norm_plus});
}

// The parts in `sums`, listed for column_sums(), which adds them up into dweight.
template <typename T, typename S>
PartialSums<acc_t<T>> rmsnorm_parts(Ctx<S>& ctx, const Weight& weight, const acc_t<T>* sums) {
    return rmsnorm_parts(grad_of<T>(weight), sums, stream_rows(ctx), ctx.shape.C, ctx.where);
}

// ----------------------------------------------------------------------------
// norms at the two ends of a branch; a family may lack one or the other

// Return the rows that the first branch's products read: the norm of inp, or without a norm a copy
// of inp, for the weight half W of the backward pass needs them when inp is gone.
template <typename T, typename S>
const T* first_rows(Ctx<S>& ctx, const AttentionActs<T>& a, const T* inp, const Weight& norm) {
    size_t row = ctx.shape.C * sizeof(T);
    if (ctx.shape.block.pre_norm)
        rmsnorm_forward(ctx, a.norm_1, a.norm_1_rstd, inp, norm);
    else
        copy_rows(a.norm_1, row, inp, row, row, stream_rows(ctx), ctx.where);
    return a.norm_1;
}

// The rows that the second branch's products read: the norm of the stream, or the stream itself.
template <typename T>
const T* second_rows(const Shape& s, const Llama::Acts<T>& a) {
    return s.block.pre_norm ? a.norm_2 : a.middle;
}

// dinp = dresidual + the gradient of a branch's input. drows is the gradient of the rows that its
// products read: it goes back through the branch's first norm, or is added as it is without one.
template <typename T, typename S>
void branch_backward(Ctx<S>& ctx, T* dinp, acc_t<T>* sums, const T* dresidual, // (R,C) (R,C)
                     const T* drows, const T* inp,                             // (R,C) (R,C)
                     const Weight& norm, const acc_t<T>* rstd) {
    if (ctx.shape.block.pre_norm)
        return rmsnorm_backward(ctx, dinp, sums, dresidual, drows, inp, norm, rstd);
    add_forward(dinp, dresidual, drows, stream_rows(ctx) * ctx.shape.C, ctx.where);
}

// out = residual + the result of a branch, its last product. If the family norms that result, `raw`
// keeps the product before the norm; without a norm raw is null.
template <typename T, typename S>
void branch_end(Ctx<S>& ctx, T* out, T* raw, acc_t<T>* rstd, const T* inp, // (R,C) (R,C) (R) (N,IC)
                const Weight& w, const Weight& bias, const Weight& norm,
                const T* residual) { // (R,C)
    // Without a norm the product itself joins the stream.
    const T* no_residual = nullptr;
    if (!raw)
        return row_parallel_forward(ctx, out, inp, w, bias, residual);
    row_parallel_forward(ctx, raw, inp, w, bias, no_residual);
    rmsnorm_forward(ctx, out, rstd, raw, norm, residual);
}

// Return the gradient of a branch's last product: dout itself, or draw, which is dout gone back
// through the norm of the result.
template <typename T, typename S>
const T* branch_end_backward(Ctx<S>& ctx, T* draw, acc_t<T>* sums, const T* dout, // (R,C) (R,C)
                             const T* raw, const Weight& norm, const acc_t<T>* rstd) {
    const T* no_residual = nullptr;
    if (!draw) return dout;
    rmsnorm_backward(ctx, draw, sums, no_residual, dout, raw, norm, rstd);
    return draw;
}

// ----------------------------------------------------------------------------
// norms of q and k: a row is one head of a token (Qwen3, Gemma 3), or all heads of a token
// (OLMo-2), of which a tensor-parallel rank has some. Without such norms `raw` is null.
//   A key head that r ranks share counts r times in a sum over ranks. So do the channels by which
//   the sum is divided: the mean is right. In backward each of these ranks has a part of the head's
//   gradient and subtracts 1/r of the mean: together they subtract all of it.

// The rows that a projection writes: before the norm if there is one, else q or k itself.
template <typename T>
T* projected(T* raw, T* normed) { return raw ? raw : normed; }

// The options of a norm of q or k: where a row lies over several ranks, its sum over all of them.
template <typename T, typename S>
RmsnormMore<T> qk_norm_more(const Ctx<S>& ctx, const acc_t<T>* row_sums, size_t C) {
    // A norm without weights scales by 1. A row that is whole on this rank needs no other's sums.
    const BlockShape& block = ctx.shape.block;
    RmsnormMore<T> more = {nullptr, block.qk_gains ? block.norm_plus : 1};
    if (!ctx.shape.block.whole_qk_norm || ctx.tp.size == 1)
        return more;
    more.row_sums = row_sums;
    more.C_all = C * size_t(ctx.tp.size);
    return more;
}

// Where rows lie over several ranks, sum each row's squares (dout null), or its products with dout
// that backward needs, over all of these ranks.
template <typename T, typename S>
void sum_over_heads(Ctx<S>& ctx, acc_t<T>* row_sums, const T* raw, const T* dout, // (N) (N,C) (N,C)
                    const Weight& weight, NormRows rows) {
    if (!ctx.shape.block.whole_qk_norm || ctx.tp.size == 1) return;
    rmsnorm_row_sums(row_sums, raw, dout, weight.as<T>(), rows.count, rows.C,
                     ctx.shape.block.norm_plus, ctx.where);
    all_reduce_sum(ctx.tp, row_sums, rows.count, ctx.where);
}

// out = RMSNorm(raw). Does nothing if the model has no such norm.
template <typename T, typename S>
void qk_norm_forward(Ctx<S>& ctx, T* out, acc_t<T>* rstd, acc_t<T>* squares,
                     const T* raw, // (N,heads,HS); rows of rstd and squares
                     const Weight& weight, size_t heads) {
    if (!raw) return;
    const T* no_gradient = nullptr;

    // Rows that lie over several ranks need the squares of all these ranks first.
    NormRows rows = norm_rows(ctx.shape, ctx.batch.rows(), heads);
    sum_over_heads(ctx, squares, raw, no_gradient, weight, rows);
    rmsnorm_forward(out, rstd, raw, weight.as<T>(), rows.count, rows.C, ctx.shape.block.norm_eps,
                    ctx.where, qk_norm_more<T>(ctx, squares, rows.C));
}

// Make the normed heads again, rotated as attention left them.
template <typename T, typename S>
void qk_norm_recompute(Ctx<S>& ctx, T* out, acc_t<T>* rstd, acc_t<T>* squares,
                       const T* raw, // (N,heads,HS); rows of rstd and squares
                       const Weight& weight, size_t heads) {
    if (!raw) return;
    qk_norm_forward(ctx, out, rstd, squares, raw, weight, heads);
    rotate_forward<T>(ctx, {out, heads, heads * ctx.shape.HS});
}

// draw = the gradient of raw, from dout back through the norm. sums = parts of dweight.
template <typename T, typename S>
void qk_norm_backward(Ctx<S>& ctx, T* draw, acc_t<T>* sums, acc_t<T>* dots,
                      const T* dout, const T* raw, // (N,heads,HS) each
                      const Weight& weight, const acc_t<T>* rstd, size_t heads) {
    if (!raw) return;
    const T* no_residual = nullptr;

    // The mean of dout * scale * inp runs over the whole row, as the mean in rstd did.
    NormRows rows = norm_rows(ctx.shape, ctx.batch.rows(), heads);
    sum_over_heads(ctx, dots, raw, dout, weight, rows);
    rmsnorm_backward(draw, sums, no_residual, dout, raw, weight.as<T>(), rstd, rows.count, rows.C,
                     ctx.where, qk_norm_more<T>(ctx, dots, rows.C));
}

// The parts of dweight, listed for column_sums(). A weight that all heads share gets a partial
// gradient, from this rank's heads alone {+tp}. A weight with channels for every head is cut: each
// rank has the whole gradient of its own channels.
template <typename T, typename S>
PartialSums<acc_t<T>> qk_norm_parts(Ctx<S>& ctx, const Weight& weight, const acc_t<T>* sums,
                                    size_t heads) {
    NormRows rows = norm_rows(ctx.shape, ctx.batch.rows(), heads);
    return rmsnorm_parts(grad_of<T>(weight), sums, rows.count, rows.C, ctx.where);
}

// ----------------------------------------------------------------------------
// the first branch: each token looks at itself and those before it

// The sums over rows that a block's gradients need. Branches list theirs here, and one call of
// column_sums() adds up all of them.
template <typename T> struct SumsOfRows {
    std::vector<ColumnSum<T>> columns;        // rows still to be summed
    std::vector<PartialSums<acc_t<T>>> ready; // norms have made parts of their sums already
};

// The sinks of this rank's heads, as attention takes them; null without any.
template <typename T, typename S>
Sinks<T> sinks_of(const Ctx<S>& ctx, const AttentionWeights& w, acc_t<T>* sums) {
    // A Weight without data has a null pointer.
    const T* logits = w.sinks.as<const T>();
    return {logits, sums, ctx.shape.NH};
}

// ----------------------------------------------------------------------------
// value embeddings: a row of each token, times a gate of each head, joins v

constexpr float VALUE_SCALE = 3; // of the gates

// v += 3 sigmoid(logits) values
template <typename T, typename S>
void add_values(Ctx<S>& ctx, const T* rows, const AttentionWeights& w, // (R,C)
                const AttentionActs<T>& a) {
    if (!w.values.data) return;
    const Batch& b = ctx.batch;
    size_t N = b.rows();
    size_t R = stream_rows(ctx);

    // Gather the few channels that the gates of all heads read.
    size_t W = w.value_gate.cols;
    T* mine = my_rows(ctx, a.gate_rows, W); // (R,W)
    round_rows(mine, W, rows, ctx.shape.C,
               R, W, ctx.where);
    gather_rows(ctx, a.gate_rows, mine, W);
    const T* no_residual = nullptr;
    linear_forward(a.gate_logits, a.gate_rows, w.value_gate, nullptr,
                   no_residual, N, ctx.blas, ctx.where);

    // Look up this rank's heads of the tokens' rows.
    const T* no_positions = nullptr;
    embedding_forward(a.values, b.tokens, b.positions, b.doc_start,
                      w.values.as<T>(), no_positions,
                      N, 0, w.values.rows, w.values.cols, ctx.where);

    // Add them to v.
    size_t HS = ctx.shape.HS;
    size_t heads = N * w.value_gate.rows;
    RowGate<T, true> gate = {a.gate_logits, VALUE_SCALE};
    round_rows(a.v, HS, a.values, HS,
               heads, HS, ctx.where, gate);
}

// Walk back from dv to the table's rows and to the logits.
template <typename T, typename S>
void values_backward(Ctx<S>& ctx, const AttentionWeights& w, const AttentionActs<T>& a) {
    if (!w.values.data) return;
    size_t HS = ctx.shape.HS;
    size_t heads = ctx.batch.rows() * w.value_gate.rows;

    // Scale dv by the gates.
    RowGate<T, false> gate = {a.gate_logits, VALUE_SCALE};
    round_rows(a.dvalues, HS, a.dv, HS,
               heads, HS, ctx.where, gate);

    // Scale the products with dv by the gates' slopes.
    const T* no_weight = nullptr;
    rmsnorm_row_sums(a.gate_dots, a.values, a.dv, no_weight,
                     heads, HS, 1, ctx.where);
    gate.by = Gated::SLOPE;
    round_rows(a.dgate_logits, 1, a.gate_dots, 1,
               heads, 1, ctx.where, gate);
}

// dnorm_1 += what goes back through the gates of all ranks' heads.
template <typename T, typename S>
void values_backward_input(Ctx<S>& ctx, const AttentionWeights& w, const AttentionActs<T>& a) {
    if (!w.values.data) return;
    size_t N = ctx.batch.rows();
    size_t R = stream_rows(ctx);
    linear_backward_input(a.dgate_rows, a.dgate_logits, w.value_gate,
                          N, false, ctx.blas, ctx.where);

    // Sum over ranks, and add to the first channels.
    size_t W = w.value_gate.cols;
    T* mine = my_rows(ctx, a.dgate_rows, W); // (R,W)
    sum_rows(ctx, mine, a.dgate_rows, W);
    RowGate<T, true> sum;
    round_rows(a.dnorm_1, ctx.shape.C, mine, W,
               R, W, ctx.where, sum);
}

// The gradients of the table and of its gate.
template <typename T, typename S>
void values_backward_weight(Ctx<S>& ctx, const AttentionWeights& w, const AttentionActs<T>& a,
                            bool accumulate) {
    acc_t<T>* dvalues = grad_of<T>(w.values);
    acc_t<T>* no_positions = nullptr;
    if (!dvalues) return;
    const Batch& b = ctx.batch;
    size_t N = b.rows();
    linear_backward_weight(w.value_gate, nullptr, a.dgate_logits, a.gate_rows,
                           N, accumulate, ctx.blas, ctx.where);
    embedding_backward_weight(dvalues, no_positions, a.dvalues,
                              b.tokens, b.positions, b.doc_start,
                              ctx.blas.scratch, N, 0, w.values.rows, 0, w.values.cols,
                              accumulate, ctx.where);
}

// The first branch from its rows (normed, or the stream itself) to a.middle, the stream behind it.
template <typename T, typename S>
void attention_branch(Ctx<S>& ctx, const T* rows, const T* inp, // (R,C) (R,C)
                      const AttentionWeights& w, const AttentionActs<T>& a, T* cache) {
    // Make q, k and v of all heads of this rank.
    size_t Q = w.q.rows, KV = w.k.rows;
    T *q = projected(a.q_raw, a.q), *k = projected(a.k_raw, a.k);
    column_parallel_forward(
        ctx, {{q, w.q, w.q_bias}, {k, w.k, w.k_bias}, {a.v, w.v, w.v_bias}}, rows);
    add_values(ctx, rows, w, a);
    qk_norm_forward(ctx, a.q, a.q_rstd, a.q_squares, a.q_raw, w.q_norm, ctx.shape.NH);
    qk_norm_forward(ctx, a.k, a.k_rstd, a.k_squares, a.k_raw, w.k_norm, ctx.shape.NKV);

    // Attend, and join the stream.
    acc_t<T>* no_sums = nullptr;
    Sinks<T> sinks = sinks_of<T>(ctx, w, no_sums);
    context_attention_forward(ctx, a.attention, a.lse, {a.q, a.k, a.v, Q, KV}, cache, sinks);
    branch_end(ctx, a.middle, a.o_out, a.post_1_rstd, a.attention, w.o, w.o_bias, w.post_1, inp);
}

// The first branch, forward: from inp to a.middle.
template <typename T, typename S>
void first_branch_forward(Ctx<S>& ctx, const T* inp, // (R,C)
                          const AttentionWeights& w, const AttentionActs<T>& a, T* cache) {
    const T* rows = first_rows(ctx, a, inp, w.norm_1); // (R,C)
    attention_branch(ctx, rows, inp, w, a, cache);
}

// Make again what the level of recomputation dropped: all of the branch, or only the outputs of its
// norms. Attention rotates q and k in place, so without it they are rotated here.
template <typename T, typename S>
void first_branch_recompute(Ctx<S>& ctx, const T* inp, // (R,C)
                            const AttentionWeights& w, const AttentionActs<T>& a,
                            Recompute level) {
    const Shape& s = ctx.shape;
    T* no_cache = nullptr;
    const T* rows = first_rows(ctx, a, inp, w.norm_1); // (R,C)
    if (redoes_attn(level)) {
        attention_branch(ctx, rows, inp, w, a, no_cache);
    } else {
        qk_norm_recompute(ctx, a.q, a.q_rstd, a.q_squares, a.q_raw, w.q_norm, s.NH);
        qk_norm_recompute(ctx, a.k, a.k_rstd, a.k_squares, a.k_raw, w.k_norm, s.NKV);
    }
}

// dinp = dmiddle + the gradient through the branch
template <typename T, typename S>
void first_branch_backward_input(Ctx<S>& ctx, T* dinp, const T* inp, // (R,C) (R,C)
                                 const AttentionWeights& w, const AttentionActs<T>& a) {
    size_t Q = w.q.rows, KV = w.k.rows;

    // Walk back to q, k and v.
    const T* d_o = branch_end_backward(ctx, a.do_out, a.post_1_sums, a.dmiddle, a.o_out, w.post_1,
                                       a.post_1_rstd); // (R,C)
    row_parallel_backward_input(ctx, a.dattention, a.dmiddle_all, d_o, w.o);
    Sinks<T> sinks = sinks_of<T>(ctx, w, a.sink_sums);
    context_attention_backward(ctx, {a.dq, a.dk, a.dv, Q, KV}, a.dattention, a.attention, a.lse,
                               {a.q, a.k, a.v, Q, KV}, sinks);

    // Walk back through their norms, to the stream. Nothing reads its gradient below the lowest
    // trained block: dinp is null there.
    T *dq = projected(a.dq_raw, a.dq), *dk = projected(a.dk_raw, a.dk);
    qk_norm_backward(ctx, dq, a.q_norm_sums, a.q_dots, a.dq, a.q_raw, w.q_norm, a.q_rstd,
                     ctx.shape.NH);
    qk_norm_backward(ctx, dk, a.k_norm_sums, a.k_dots, a.dk, a.k_raw, w.k_norm, a.k_rstd,
                     ctx.shape.NKV);
    values_backward(ctx, w, a);
    if (!dinp) return;
    column_parallel_backward_input(ctx, a.dnorm_1, {{dq, w.q}, {dk, w.k}, {a.dv, w.v}});
    values_backward_input(ctx, w, a);
    branch_backward(ctx, dinp, a.norm_1_sums, a.dmiddle, a.dnorm_1, inp, w.norm_1, a.norm_1_rstd);
}

// Compute the gradients of the first branch's matrices, and list the sums of its biases and norms.
template <typename T, typename S>
void first_branch_backward_weight(Ctx<S>& ctx, SumsOfRows<T>& sums, const AttentionWeights& w,
                                  const AttentionActs<T>& a, bool accumulate) {
    const Shape& s = ctx.shape;
    size_t N = ctx.batch.rows(), R = stream_rows(ctx), Q = w.q.rows, KV = w.k.rows;
    T *dq = projected(a.dq_raw, a.dq), *dk = projected(a.dk_raw, a.dk);
    const T* d_o = a.do_out ? a.do_out : a.dmiddle;

    // Compute the gradients of the matrices.
    row_parallel_backward_weight(ctx, w.o, d_o, a.dmiddle_all, a.attention, accumulate);
    column_parallel_backward_weight(ctx, {{dq, w.q}, {dk, w.k}, {a.dv, w.v}},
                                    static_cast<const T*>(a.norm_1), accumulate);
    values_backward_weight(ctx, w, a, accumulate);

    // List the sums. Biases sum all rows; a bias or norm that the model does not have is null.
    sums.columns.insert(sums.columns.end(), {{grad_of<T>(w.o_bias), d_o, R, s.C},
                                             {grad_of<T>(w.q_bias), dq, N, Q},
                                             {grad_of<T>(w.k_bias), dk, N, KV},
                                             {grad_of<T>(w.v_bias), a.dv, N, KV}});
    size_t parts = sink_parts(ctx.where);
    PartialSums<acc_t<T>> sinks = {grad_of<T>(w.sinks), a.sink_sums, parts, s.NH, s.NH};
    sums.ready.insert(sums.ready.end(), {rmsnorm_parts<T>(ctx, w.norm_1, a.norm_1_sums),
                                         rmsnorm_parts<T>(ctx, w.post_1, a.post_1_sums),
                                         qk_norm_parts<T>(ctx, w.q_norm, a.q_norm_sums, s.NH),
                                         qk_norm_parts<T>(ctx, w.k_norm, a.k_norm_sums, s.NKV),
                                         sinks});
}

// ----------------------------------------------------------------------------
// the block: two branches that read the residual stream and add to it

// Return the stream that a block begins with: inp, or in the first block the norm of it. With
// residual scalars every block norms the embedding, and mixes it in.
template <typename T, typename S>
const T* block_stream(Ctx<S>& ctx, const T* inp, const Llama::Block& w, const Llama::Acts<T>& a) {
    if (!ctx.shape.embedding.normed) return inp;
    const T* embedding = a.embedding.out;
    const T* x0 = a.embed;
    rmsnorm_forward(ctx, a.embed, a.embed_rstd, embedding, w.embed_norm);
    if (!ctx.shape.block.scalars) return x0;

    // In the first block x is x0.
    size_t n = stream_rows(ctx) * ctx.shape.C;
    ScalarMix<T> mix;
    mix.a = w.resid_lambda.as<T>();
    mix.b = w.x0_lambda.as<T>();
    map_elements(a.mixed, n, mix, ctx.where, inp == embedding ? x0 : inp, x0);
    return a.mixed;
}

// Walk back through the scalars, from a.dembed, the gradient of the mixed stream.
template <typename T, typename S>
void scalars_backward_input(Ctx<S>& ctx, T* dinp, const T* inp, const Llama::Block& w, // (R,C)
                            const Llama::Acts<T>& a) {
    const T* no_weight = nullptr;
    const T* x0 = a.embed;
    const T* dmixed = a.dembed;
    size_t R = stream_rows(ctx);
    size_t C = ctx.shape.C;
    size_t n = R * C;

    // Multiply by what the scalars multiplied.
    bool first = inp == a.embedding.out;
    const T* x = first ? x0 : inp;
    rmsnorm_row_sums(a.resid_dots, x, dmixed, no_weight, R, C, 1, ctx.where);
    rmsnorm_row_sums(a.x0_dots, x0, dmixed, no_weight, R, C, 1, ctx.where);

    // Add to x0's gradient, which begins in the last block. It is null where nothing below learns.
    T* dx0 = a.embedding.dout;
    const T* sum = dx0;
    ScalarMix<T> z = {w.x0_lambda.as<T>()};
    bool last = ctx.shape.block.place == 1;
    if (dx0 && last)
        map_elements(dx0, n, z, ctx.where, dmixed);
    if (dx0 && !last)
        map_elements(dx0, n, z, ctx.where, dmixed, sum);

    // In the first block x is x0 too: leave the whole gradient of x0.
    ScalarMix<T> r = {w.resid_lambda.as<T>()};
    if (dinp && first)
        map_elements(a.dembed, n, r, ctx.where, dmixed, sum);
    if (dinp && !first)
        map_elements(dinp, n, r, ctx.where, dmixed);
}

// The activation between the products of the ffn, both ways. Backward turns dswiglu into gate's.
template <typename T, typename S>
void activate(Ctx<S>& ctx, const Llama::Acts<T>& a) {
    const Shape& s = ctx.shape;
    size_t n = ctx.batch.rows() * s.F;
    if (!is_gated(s)) return relu2_forward(a.swiglu, a.gate, n, ctx.where);
    swiglu_forward(a.swiglu, a.gate, a.up, n, ctx.where, s.block.gate);
}
template <typename T, typename S>
void activate_backward(Ctx<S>& ctx, const Llama::Acts<T>& a) {
    const Shape& s = ctx.shape;
    size_t n = ctx.batch.rows() * s.F;
    if (!is_gated(s)) return relu2_backward(a.dswiglu, a.dswiglu, a.gate, n, ctx.where);
    swiglu_backward(a.dswiglu, a.dup, a.dswiglu, a.gate, a.up, n, ctx.where, s.block.gate);
}

// out = the stream behind the block. Activations go to `a`; cache is null except in generation.
template <typename T, typename S>
void block_forward(Ctx<S>& ctx, T* out, const T* inp, const Llama::Block& w,
                   const Llama::Acts<T>& a, T* cache) {
    // Let each token look at itself and those before it.
    first_branch_forward(ctx, block_stream(ctx, inp, w, a), w, a, cache);

    // Let each token work on what it saw.
    if (ctx.shape.block.pre_norm) rmsnorm_forward(ctx, a.norm_2, a.norm_2_rstd, a.middle, w.norm_2);
    column_parallel_forward(ctx, {{a.gate, w.gate, w.gate_bias}, {a.up, w.up, w.up_bias}},
                            second_rows(ctx.shape, a));
    activate(ctx, a);
    branch_end(ctx, out, a.down_out, a.post_2_rstd, a.swiglu, w.down, w.down_bias, w.post_2,
               static_cast<const T*>(a.middle));
}

// Make the activations that the level of recomputation dropped: always norms and SwiGLU, at some
// levels the products of a branch. Nothing reads the block's output again, so the product `down` is
// left out, unless a norm behind it needs its result.
template <typename T, typename S>
void block_recompute(Ctx<S>& ctx, const T* inp, const Llama::Block& w, const Llama::Acts<T>& a,
                     Recompute level) {
    const Shape& s = ctx.shape;
    first_branch_recompute(ctx, block_stream(ctx, inp, w, a), w, a, level);

    // Redo the second branch.
    if (s.block.pre_norm) rmsnorm_forward(ctx, a.norm_2, a.norm_2_rstd, a.middle, w.norm_2);
    if (redoes_ffn(level))
        column_parallel_forward(ctx, {{a.gate, w.gate, w.gate_bias}, {a.up, w.up, w.up_bias}},
                                second_rows(s, a));
    activate(ctx, a);

    // Redo the product before the norm, and the norm's rstd. Its output has joined the stream, so
    // it is not needed again.
    const T* no_residual = nullptr;
    T* no_output = nullptr;
    if (!redoes_ffn(level) || !s.block.post_norm) return;
    row_parallel_forward(ctx, a.down_out, a.swiglu, w.down, w.down_bias, no_residual);
    rmsnorm_forward(ctx, no_output, a.post_2_rstd, a.down_out, w.post_2);
}

// dinp, and all that the weight half reads: gradients of activations, and parts of the sums over
// rows that become gradients of norms.
template <typename T, typename S>
void block_backward_input(Ctx<S>& ctx, T* dinp, const T* dout, const T* inp,
                          const Llama::Block& w, const Llama::Acts<T>& a) {
    // Walk back through the second branch. The activation turns its gradient into gate's in place.
    T* dgate = a.dswiglu; // (N,F)
    const T* ddown = branch_end_backward(ctx, a.ddown_out, a.post_2_sums, dout, a.down_out,
                                         w.post_2, a.post_2_rstd); // (R,C)
    row_parallel_backward_input(ctx, a.dswiglu, a.dout_all, ddown, w.down);
    activate_backward(ctx, a);
    column_parallel_backward_input(ctx, a.dnorm_2, {{dgate, w.gate}, {a.dup, w.up}});
    branch_backward(ctx, a.dmiddle, a.norm_2_sums, dout, a.dnorm_2, a.middle, w.norm_2,
                    a.norm_2_rstd);

    // Walk back through the first branch.
    const T* no_residual = nullptr;
    if (!ctx.shape.embedding.normed)
        return first_branch_backward_input(ctx, dinp, inp, w, a);
    const T* stream = a.mixed ? a.mixed : a.embed;
    first_branch_backward_input(ctx, a.dembed, stream, w, a);

    // Walk back through the scalars, and in the first block through the norm of the embedding.
    if (a.mixed)
        scalars_backward_input(ctx, dinp, inp, w, a);
    bool first = inp == a.embedding.out;
    if (!dinp || !first) return;
    rmsnorm_backward(ctx, dinp, a.embed_sums, no_residual, static_cast<const T*>(a.dembed), inp,
                     w.embed_norm, a.embed_rstd);
}

// The gradients of weights, from what block_backward_input() made of the same dout and inp.
template <typename T, typename S>
void block_backward_weight(Ctx<S>& ctx, const T* dout, const Llama::Block& w,
                           const Llama::Acts<T>& a, bool accumulate) {
    const Shape& s = ctx.shape;
    size_t N = ctx.batch.rows(), R = stream_rows(ctx);

    // Compute the gradients of the second branch's matrices.
    T* dgate = a.dswiglu; // (N,F)
    const T* ddown = a.ddown_out ? a.ddown_out : dout;
    row_parallel_backward_weight(ctx, w.down, ddown, a.dout_all, a.swiglu, accumulate);
    column_parallel_backward_weight(ctx, {{dgate, w.gate}, {a.dup, w.up}}, second_rows(s, a),
                                    accumulate);

    // Compute those of the first branch, then add up all sums over rows of both in one call.
    SumsOfRows<T> sums = {{{grad_of<T>(w.down_bias), ddown, R, s.C},
                           {grad_of<T>(w.gate_bias), dgate, N, s.F},
                           {grad_of<T>(w.up_bias), a.dup, N, s.F}},
                          {rmsnorm_parts<T>(ctx, w.embed_norm, a.embed_sums),
                           rmsnorm_parts<T>(ctx, w.norm_2, a.norm_2_sums),
                           rmsnorm_parts<T>(ctx, w.post_2, a.post_2_sums),
                           {grad_of<T>(w.resid_lambda), a.resid_dots, R, 1, 1},
                           {grad_of<T>(w.x0_lambda), a.x0_dots, R, 1, 1}}};
    first_branch_backward_weight(ctx, sums, w, a, accumulate);
    column_sums<T>(sums.columns, sums.ready, ctx.blas.scratch, accumulate, ctx.where);
}

// ----------------------------------------------------------------------------
// the head: the final norm here, logits and loss in head.h

// Norm `rows` rows of inp, then gather the rows of all ranks into a.norm (N,C).
template <typename T, typename S>
void head_norm(Ctx<S>& ctx, const T* inp, const Llama::Head& w, const HeadActs<T>& a, size_t rows) {
    T* norm = my_rows(ctx, a.norm); // (rows,C)
    rmsnorm_forward(norm, a.rstd, inp, w.norm.as<T>(), rows, ctx.shape.C, ctx.shape.block.norm_eps,
                    ctx.where, {nullptr, ctx.shape.block.norm_plus});
    gather_rows(ctx, a.norm, norm);
}

// All of the head in training, loss and gradients, for its forward pass keeps nothing.
template <typename T, typename S>
void head_backward(Ctx<S>& ctx, T* dinp, LossSums* loss, const T* inp, const Llama::Head& w,
                   const HeadActs<T>& a, const double* scale, bool accumulate) {
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
