// mla.h - DeepSeek-V2, V3: multi-head latent attention before Mixtral's experts - arXiv:2405.04434
//   q         = q_b(norm(q_a(x))), or q_proj(x)    (NH, plain + rotary)
//   c, k_rope = kv_a(x)                            DC channels, and a rotary part of all heads
//   k, v      = kv_b(norm(c))                      (NH, plain + HS_v); a head's key: [k, k_rope]
//   out       = stream + o_proj(attention(rope(q), rope(k), v)),  x = norm_1(stream)
//   The norms of latents have an eps of 1e-6, whatever the model's is. RoPE rotates the last
//   `rotary` channels of a head. The second branch is that of mixtral.h; embedding, head and the
//   rest are those of llama.h.
//   Tensor parallelism cuts the heads: q_b, kv_b, o_proj. Latents are whole on every rank, under
//   sequence parallelism too, and their gradients come from the rank's own heads {+tp}. All that
//   backward computes from these is linear in them, so the gradients of q_a, kv_a and the norms are
//   partial sums by heads, and norm_1's rows are summed as in Llama.
//   Attention's kernels need v as wide as q and k. So scratch holds k and v in their layout, with
//   zeros after the HS_v channels of v and out. This multiplies the work on v by HS / HS_v, 1.5 in
//   DeepSeek, and takes memory for one layer. What is kept is q, kv and out, at their own width;
//   backward lays k and v out again. So context parallelism is Llama's. Generation caches latents,
//   not heads.
//   Cost: the first branch takes 2 N FLOPs for each element of its matrices, and attention's.
#pragma once
#include "action.h"
#include "context.h"
#include "context_parallel.h"
#include "llama.h"
#include "mixtral.h"
#include "model.h"
#include "ops/attention_types.h"
#include "ops/column_sums.cuh"
#include "ops/latent.cuh"
#include "ops/linear.cuh"
#include "ops/lora.cuh"
#include "ops/memory.h"
#include "ops/rand.h"
#include "ops/rmsnorm.cuh"
#include "ops/rope.cuh"
#include "ops/types.h"
#include "tensor_parallel.h"

namespace llmc {

// ----------------------------------------------------------------------------
// generation with latent attention: the cache holds latents - arXiv:2405.04434
//   cache (slots,positions,DC+DR): a token's latent after its norm, and its rotated k_rope. All
//   heads read the same row, so all tensor-parallel ranks hold the same cache.
//   1. A prompt attends to itself by heads, as in training, and its latents are stored.
//   2. Tokens after others attend to the cache: q absorbs W_k, the output W_v (latent.cuh).
//      The same sums in another order: logits agree up to rounding. Products with kv_b are in
//      its own type then, under fp8 too.
//   Adapters of kv_b, one or one of each sequence, are absorbed as second matrices: W + s B A is
//   never made.
//   Cost: DC + DR elements a token and layer: 576 in DeepSeek-V3, whose heads would have 128 x 320.
//         Scratch has 2 DC + DR + r elements for each head of the rows that one run reads.

// Whether queries look at tokens of earlier runs. If not, each sequence begins in this run, and
// its own rows are all that it sees.
template <typename S>
bool reads_cache(const Ctx<S>& ctx, const void* cache) {
    return cache && ctx.batch.seen > ctx.batch.T;
}

// Store the batch's latents and rotated keys at their positions.
template <typename T, typename S>
void store_latents(const Ctx<S>& ctx,
                   T* cache, const T* latents, const T* down) { // (N,DC) (N,DC+DR)
    // Only generation has a cache.
    if (!cache) return;

    // A row of the cache has a latent, then a rotary part.
    const Shape& s = ctx.shape;
    const Batch& b = ctx.batch;
    size_t width = cached_elements(s);
    size_t latent = s.latent.kv * sizeof(T);
    size_t row_bytes = width * sizeof(T);
    size_t rope = row_bytes - latent;

    for (size_t i = 0; i < b.B; i++) {
        // A sequence's rows follow each other in its slot.
        size_t n = i * b.T;
        size_t place = (b.first_slot + i) * b.capacity + size_t(b.places[n]);
        T* row = cache + place * width;
        copy_rows(row, row_bytes, latents + n * s.latent.kv, latent, latent, b.T, ctx.where);
        T* key = row + s.latent.kv;
        copy_rows(key, row_bytes, down + n * width + s.latent.kv, row_bytes, rope, b.T, ctx.where);

        // Rotate each key once, where it lies.
        RopeHeads<T> keys = {key, 1, width, s.rope.rotary, true};
        rope_forward(keys, {}, b.positions + n, (const acc_t<T>*)ctx.rope, b.T, s.rope.rotary,
                     ctx.where);
    }
}

// One product of some rows with a head's matrix: to latents for queries, from them for outputs.
template <typename T, typename S>
void absorb_rows(bool query, T* out, const T* x, const HeadMatrix<T>& m, size_t rows, S where) {
    query ? heads_to_latents(out, x, m, rows, where) : latents_to_heads(out, x, m, rows, where);
}

// Add to n rows what an adapter s B A of the matrix says.
template <typename T, typename S>
void absorb_adapter(bool query, T* out, const T* x, const HeadMatrix<T>& base, const Lora& lora,
                    T* room, size_t n, S where) {
    // B has a head's rows as the base has them. A is one matrix for all heads.
    size_t r = lora.rank;
    size_t heads = n * base.NH;
    HeadMatrix<T> b = base;
    b.w = static_cast<const T*>(lora.b);
    b.K = b.wide = r;
    HeadMatrix<T> a = {static_cast<const T*>(lora.a), 1, r, 0, r, base.K, r, base.wide};
    (query ? a : b).accumulate = true;

    // Go through the r channels between them.
    // A query goes from a head's channels to latents, so through B first; an output goes back.
    absorb_rows(query, room, x, query ? b : a, query ? n : heads, where);
    lora_scale(room, heads * r, lora.scale, where);
    absorb_rows(query, out, room, query ? a : b, query ? heads : n, where);
}

// One step of absorption: all rows by kv_b's matrix, then each run of rows by its adapter.
template <typename T, typename S>
void absorb(Ctx<S>& ctx, bool query, T* out, const T* x, const HeadMatrix<T>& base,
            const Weight& kv_b, T* room) {
    size_t N = ctx.batch.rows();
    absorb_rows(query, out, x, base, N, ctx.where);
    if (!kv_b.lora) return;

    // Elements of a row on either side.
    size_t narrow = base.NH * base.narrow;
    size_t wide = base.NH * base.wide;
    size_t out_row = query ? wide : narrow;
    size_t x_row = query ? narrow : wide;

    // One adapter serves all rows, or each run of rows has its own.
    const LoraRuns all = {{0, N, 0}};
    for (const LoraRows& run : kv_b.runs ? *kv_b.runs : all) {
        const Lora& lora = kv_b.lora[run.adapter];
        if (!lora.rank) continue;
        T* to = out + run.first * out_row;
        const T* from = x + run.first * x_row;
        absorb_adapter(query, to, from, base, lora, room, run.rows, ctx.where);
    }
}

// attention = the heads' outputs over the cache. q is rotated in place.
template <typename T, typename S>
void absorbed_attention(Ctx<S>& ctx,
                        T* attention, T* q,              // (N,NH,HS_v) (N,NH,HS)
                        const Weight& kv_b, T* cache) {
    const Shape& s = ctx.shape;
    const LatentShape& latent = s.latent;
    const Batch& b = ctx.batch;
    size_t DC = latent.kv;
    size_t width = cached_elements(s);
    size_t heads = b.rows() * s.NH;
    size_t plain = s.HS - s.rope.rotary;

    // Divide the scratch: absorbed queries, attention's means of latents, and room between an
    // adapter's two products.
    T* queries = static_cast<T*>(ctx.heads); // (N,NH,DC+DR)
    T* means = queries + heads * width;      // (N,NH,DC)
    T* room = means + heads * DC;            // (N,NH,r)

    // Absorb W_k into the plain part of each query; the rotary part stands after it.
    rotate_forward<T>(ctx, {q, s.NH, s.NH * s.HS});
    const T* w = values_of<T>(kv_b, ctx.blas, ctx.where); // (NH,plain+HS_v,DC)
    size_t kv = plain + latent.HS_v;
    HeadMatrix<T> keys = {w, s.NH, kv, 0, plain, DC, s.HS, width};
    absorb(ctx, true, queries, q, keys, kv_b, room);
    size_t rope = s.rope.rotary * sizeof(T);
    copy_rows(queries + DC, width * sizeof(T), q + plain, s.HS * sizeof(T), rope, heads, ctx.where);

    // Attend to the slots' first `seen` rows. The scale is that of the heads' own keys.
    size_t slot = b.capacity * width;
    T* first = cache + b.first_slot * slot;
    Keys<T> seen = {first, first, b.key_positions, b.seen, width, slot};
    AttentionOperands<T> x = attention_operands(ctx, queries, s.NH * width, seen);
    x.d.NKV = 1;
    x.d.HS = width;
    x.d.HS_v = DC;
    if (x.scale == 0)
        x.scale = 1 / std::sqrt(acc_t<T>(s.HS));
    latent_attention_forward(means, x, ctx.where);

    // Absorb W_v into the output.
    HeadMatrix<T> values = {w, s.NH, kv, plain, latent.HS_v, DC, latent.HS_v, DC};
    absorb(ctx, false, attention, means, values, kv_b, room);
}

// ----------------------------------------------------------------------------
// the family: what it does not name is Mixtral's

// clang-format off
struct Deepseek : Mixtral {
    // q is q_proj, or q_b after a latent. Q = NH HS; DQ, DC: channels of the latents;
    // DR: rotary channels.
    struct Block : Mixtral::Block {
        Weight q_a, q_a_norm;                     // (DQ,C) (DQ)
        Weight kv_a, kv_a_norm;                   // (DC+DR,C) (DC)
        Weight kv_b;                              // (NH kv,DC)
    };

    // attention and d attention are (N,NH,HS_v) here.
    template <typename T> struct Acts : Mixtral::Acts<T> {
        T *q_down, *q_latent;                     // (N,DQ) (N,DQ)       before the norm, after it
        T *kv_down, *kv_latent;                   // (N,DC+DR) (N,DC)
        acc_t<T> *q_latent_rstd, *kv_latent_rstd; // (N) (N)
        T* kv;                                    // (N,NH,kv)

        T *dq_latent, *dq_down;                   // (N,DQ) (N,DQ) {+tp}
        T *dkv, *dkv_latent, *dkv_down;           // (N,NH,kv) (N,DC) {+tp} (N,DC+DR) {+tp}
        acc_t<T> *q_latent_sums, *kv_latent_sums; // parts of the norms' dweight
    };
};
// clang-format on

constexpr float LATENT_EPS = 1e-6f;

// The heads of this rank.
inline LatentHeads latent_heads(const Shape& s) {
    return {s.NH, s.HS, s.latent.HS_v, s.rope.rotary};
}

// The number of elements in the first branch's matrices, without its norms.
inline double latent_elements(const Shape& s) {
    const LatentShape& latent = s.latent;
    // Without a latent for queries, q reads the stream.
    size_t Q = s.NH * s.HS;
    size_t q = latent.q ? latent.q * (s.C + Q) : s.C * Q;

    // Count down to the latent, up to the heads, and back to the stream.
    size_t down = s.C * (latent.kv + s.rope.rotary);
    size_t up = latent.kv * s.NH * latent_heads(s).kv();
    size_t o = s.NH * latent.HS_v * s.C;
    return double(q + down + up + o);
}

// ----------------------------------------------------------------------------
// tables

// clang-format off
// The weights of latents are whole on every rank, which has a part of their gradients.
template <typename Row>
void block_parameters(Deepseek::Block& w, const Shape& s, Row row) {
    size_t C = s.C;
    // Sizes that no rank cuts.
    size_t DQ = s.latent.q;
    size_t DC = s.latent.kv;
    size_t down = DC + s.rope.rotary;

    // Rows of the heads, and columns of o.
    size_t Q = s.NH * s.HS;
    size_t KV = s.NH * latent_heads(s).kv();
    size_t V = s.NH * s.latent.HS_v;
    Shard whole = {};
    Shard columns = {0};
    Shard rows = {1};
    Shard latent = {-1, 1, 0, Partial::HEADS};
    Init normal = normal_init(0.02);
    Init small = normal_init(0.02 / std::sqrt(2.0 * s.L));

    //  weight    name                                  shape       start   decays cut   transposed
    row(w.norm_1, "input_layernorm.weight",             {C},        ONES,   false, whole,   false);
    if (DQ) {
        row(w.q_a, "self_attn.q_a_proj.weight",         {DQ, C},    normal, true,  latent,  false);
        const char* norm = "self_attn.q_a_layernorm.weight";
        row(w.q_a_norm, norm,                           {DQ},       ONES,   false, latent,  false);
        row(w.q, "self_attn.q_b_proj.weight",           {Q, DQ},    normal, true,  columns, false);
    } else {
        row(w.q, "self_attn.q_proj.weight",             {Q, C},     normal, true,  columns, false);
    }
    const char* kv_a = "self_attn.kv_a_proj_with_mqa.weight";
    row(w.kv_a, kv_a,                                   {down, C},  normal, true,  latent,  false);
    row(w.kv_a_norm, "self_attn.kv_a_layernorm.weight", {DC},       ONES,   false, latent,  false);
    row(w.kv_b, "self_attn.kv_b_proj.weight",           {KV, DC},   normal, true,  columns, false);
    row(w.o, "self_attn.o_proj.weight",                 {C, V},     small,  true,  rows,    false);
    second_branch_parameters(w, s, "mlp.shared_experts.", row);
}

// Latents have all N rows, under sequence parallelism too.
template <typename T, typename S, typename Row>
void block_activations(Deepseek::Acts<T>& a, const Shape& s, size_t N, S where, Row row) {
    size_t C = s.C;
    // Sizes that no rank cuts.
    size_t DQ = s.latent.q;
    size_t DC = s.latent.kv;
    size_t down = DC + s.rope.rotary; // k's rotary part lies after the latent

    // Channels of all heads, and rows of the stream.
    size_t Q = s.NH * s.HS;
    size_t KV = s.NH * latent_heads(s).kv();
    size_t V = s.NH * s.latent.HS_v;
    size_t R = N / s.rank.rows;
    using enum Keep;
    using enum Last;

    //  pointer           name                      elements   of        last read
    row(a.norm_1,         "norm_1",                 R * C,     CHEAP,    W);
    row(a.norm_1_rstd,    "norm_1.rstd",            R,         CHEAP,    B);
    if (DQ) {
        row(a.q_down,     "q's latent before norm", N * DQ,    ATTN,     B);
        row(a.q_latent,   "q's latent",             N * DQ,    CHEAP,    W);
        row(a.q_latent_rstd, "q's latent, rstd",    N,         CHEAP,    B);
    }
    row(a.q,              "q",                      N * Q,     ATTN,     B);
    row(a.kv_down,        "latent before norm, k's rope", N * down, ATTN, B);
    row(a.kv_latent,      "latent",                 N * DC,    CHEAP,    W);
    row(a.kv_latent_rstd, "latent, rstd",           N,         CHEAP,    B);
    row(a.kv,             "k, v",                   N * KV,    ATTN,     B);
    row(a.attention,      "attention",              N * V,     ATTN,     W);
    row(a.lse,            "log-sum-exp",            N * s.NH,  ATTN,     B);
    row(a.middle,         "middle",                 R * C,     ATTN,     B);

    // Gradients. The norms' sums run over all rows of the latents.
    row(a.dmiddle,        "d middle",               R * C,     GRADIENT, W);
    row(a.dattention,     "d attention",            N * V,     GRADIENT, B);
    row(a.dq,             "d q",                    N * Q,     GRADIENT, W);
    row(a.dkv,            "d k, d v",               N * KV,    GRADIENT, W);
    row(a.dkv_latent,     "d latent",               N * DC,    GRADIENT, B);
    row(a.dkv_down,       "d latent before norm, d k's rope", N * down, GRADIENT, W);
    size_t sums = rmsnorm_sums(N, DC, where);
    row(a.kv_latent_sums, "d latent, sums",         sums,      GRADIENT, W);
    if (DQ) {
        sums = rmsnorm_sums(N, DQ, where);
        row(a.dq_latent,  "d q's latent",           N * DQ,    GRADIENT, B);
        row(a.dq_down,    "d q's latent before norm", N * DQ,  GRADIENT, W);
        row(a.q_latent_sums, "d q's latent, sums",  sums,      GRADIENT, W);
    }
    row(a.dnorm_1,        "d norm_1",               R * C,     GRADIENT, B);
    sums = rmsnorm_sums(R, C, where);
    row(a.norm_1_sums,    "d norm_1, sums",         sums,      GRADIENT, W);
    if (s.rank.rows > 1)
        row(a.dmiddle_all, "d middle, all rows",    N * C,     GRADIENT, W);
    second_branch_activations(a, s, N, where, row);
}

// clang-format on

// ----------------------------------------------------------------------------
// scratch: heads as attention's kernels read them

// Scratch of one layer: heads in the layout of attention's kernels.
template <typename T> struct LatentRooms {
    // (N,NH,HS) each
    T* k;
    T* v;
    T* out;
    // the same, for training
    T* dout;
    T* dk;
    T* dv;
};

// Elements of one room: the heads of N rows, or their latent if that is larger.
inline size_t latent_room(const Shape& s, size_t N) {
    return round_up(N * std::max(s.NH * s.HS, s.latent.kv), 128); // 256 bytes of 16 bits
}

// Elements of all rooms. Generation uses the same memory for what it absorbs. r is the rank of an
// adapter beside kv_b, or 0.
inline size_t latent_rooms(const Shape& s, size_t N, Mode mode, size_t r) {
    size_t rooms = (mode == Mode::TRAIN ? 6 : 3) * latent_room(s, N);
    size_t absorbed = N * s.NH * (2 * s.latent.kv + s.rope.rotary + r);
    return mode == Mode::GENERATE ? std::max(rooms, absorbed) : rooms;
}

// Point at the rooms. Evaluation touches only the first three.
template <typename T, typename S>
LatentRooms<T> latent_rooms(const Ctx<S>& ctx) {
    // Every layer uses the same rooms.
    size_t room = latent_room(ctx.shape, ctx.batch.rows());
    T* base = static_cast<T*>(ctx.heads);
    // The rooms follow each other.
    auto next = [&] {
        T* at = base;
        base += room;
        return at;
    };
    return {next(), next(), next(), next(), next(), next()};
}

// wide (N,NH,HS) = narrow (N,NH,HS_v), padded with zeros.
template <typename T, typename S>
void pad_heads(Ctx<S>& ctx, T* wide, const T* narrow) {
    const Shape& s = ctx.shape;
    // Zero everything first, then copy each head's values.
    size_t heads = ctx.batch.rows() * s.NH;
    size_t bytes = s.latent.HS_v * sizeof(T);
    device_zero(wide, heads * s.HS * sizeof(T), ctx.where);
    copy_rows(wide, s.HS * sizeof(T), narrow, bytes, bytes, heads, ctx.where);
}

// Lay keys and values out in their rooms. The keys are not rotated yet.
template <typename T, typename S>
void expand_heads(Ctx<S>& ctx, const LatentRooms<T>& room, const Deepseek::Acts<T>& a) {
    // k's rotary part lies after each latent.
    const Shape& s = ctx.shape;
    size_t width = s.latent.kv + s.rope.rotary;
    latent_heads_forward(room.k, room.v, a.kv, a.kv_down + s.latent.kv, width, latent_heads(s),
                         ctx.batch.rows(), ctx.where);
}

// ----------------------------------------------------------------------------
// latents

// Normalise the latents, the first DC channels of rows of kv_down, copied to a room without gaps.
template <typename T, typename S>
void norm_latents(Ctx<S>& ctx, const Deepseek::Block& w, const Deepseek::Acts<T>& a) {
    const Shape& s = ctx.shape;
    const LatentShape& latent = s.latent;
    size_t N = ctx.batch.rows();
    // Queries may have no latent.
    if (latent.q)
        rmsnorm_forward(a.q_latent, a.q_latent_rstd, a.q_down, w.q_a_norm.as<T>(), N, latent.q,
                        LATENT_EPS, ctx.where);

    // k's rotary part lies between the latents of two rows.
    T* latents = latent_rooms<T>(ctx).k; // (N,DC)
    size_t bytes = latent.kv * sizeof(T);
    size_t stride = bytes + s.rope.rotary * sizeof(T);
    copy_rows(latents, bytes, a.kv_down, stride, bytes, N, ctx.where);
    rmsnorm_forward(a.kv_latent, a.kv_latent_rstd, latents, w.kv_a_norm.as<T>(), N, latent.kv,
                    LATENT_EPS, ctx.where);
}

// Go back through the norms of the latents, to dq_down and dkv_down.
template <typename T, typename S>
void norm_latents_backward(Ctx<S>& ctx,
                           const Deepseek::Block& w,
                           const Deepseek::Acts<T>& a) {
    const Shape& s = ctx.shape;
    const LatentShape& latent = s.latent;
    size_t N = ctx.batch.rows();
    const T* no_residual = nullptr;
    // Queries may have no latent.
    if (latent.q)
        rmsnorm_backward(a.dq_down, a.q_latent_sums, no_residual, a.dq_latent, a.q_down,
                         w.q_a_norm.as<T>(), a.q_latent_rstd, N, latent.q, ctx.where);

    // Copy the latents to a room without gaps, as in forward, and copy their gradients back.
    LatentRooms<T> room = latent_rooms<T>(ctx);
    size_t bytes = latent.kv * sizeof(T);
    size_t stride = bytes + s.rope.rotary * sizeof(T);
    copy_rows(room.k, bytes, a.kv_down, stride, bytes, N, ctx.where);
    rmsnorm_backward(room.v, a.kv_latent_sums, no_residual, a.dkv_latent,
                     static_cast<const T*>(room.k), w.kv_a_norm.as<T>(), a.kv_latent_rstd, N,
                     latent.kv, ctx.where);
    copy_rows(a.dkv_down, stride, room.v, bytes, bytes, N, ctx.where);
}

// ----------------------------------------------------------------------------
// the first branch: attention

// The product that reads the stream for queries: q_a, or q itself without a latent.
template <typename T>
ColumnProduct<T> first_of_q(const Shape& s,
                            const Deepseek::Block& w, T* q_down, T* q) {
    // Ask the shape, not the weights: under ZeRO the W half has none.
    if (s.latent.q) return {q_down, w.q_a};
    return {q, w.q};
}

// Attend by heads: widen the latents to keys and values, and drop the padding of each output.
template <typename T, typename S>
void head_attention(Ctx<S>& ctx,
                    const Deepseek::Block& w,
                    const Deepseek::Acts<T>& a) {
    const Shape& s = ctx.shape;
    size_t N = ctx.batch.rows();
    size_t Q = s.NH * s.HS;
    const T* no_residual = nullptr;
    T* no_cache = nullptr;

    // Widen the latents to this rank's heads, and attend.
    linear_forward(a.kv, a.kv_latent, w.kv_b, nullptr, no_residual, N, ctx.blas, ctx.where);
    LatentRooms<T> room = latent_rooms<T>(ctx);
    expand_heads(ctx, room, a);
    Qkv<T> x = {a.q, room.k, room.v, Q, Q};
    context_attention_forward(ctx, room.out, a.lse, x, no_cache);

    // Keep only the channels that a value has.
    size_t heads = N * s.NH;
    size_t from = s.HS * sizeof(T);
    size_t to = s.latent.HS_v * sizeof(T);
    copy_rows(a.attention, to, room.out, from, to, heads, ctx.where);
}

// The first branch: from the stream to the stream after attention.
template <typename T, typename S>
void first_branch_forward(Ctx<S>& ctx,
                          const T* inp,
                          const Deepseek::Block& w, // (R,C)
                          const Deepseek::Acts<T>& a, T* cache) {
    const Shape& s = ctx.shape;
    size_t N = ctx.batch.rows();
    const T* no_residual = nullptr;

    // Narrow the stream to the latents.
    rmsnorm_forward(ctx, a.norm_1, a.norm_1_rstd, inp, w.norm_1);
    column_parallel_forward(ctx, {first_of_q(s, w, a.q_down, a.q), {a.kv_down, w.kv_a}},
                            static_cast<const T*>(a.norm_1));
    norm_latents(ctx, w, a);
    store_latents(ctx, cache, a.kv_latent, a.kv_down);

    // Attend, over the cache or by heads, and add to the stream.
    if (s.latent.q)
        linear_forward(a.q, a.q_latent, w.q, nullptr, no_residual, N, ctx.blas, ctx.where);
    if (reads_cache(ctx, cache))
        absorbed_attention(ctx, a.attention, a.q, w.kv_b, cache);
    else
        head_attention(ctx, w, a);
    row_parallel_forward(ctx, a.middle, a.attention, w.o, w.o_bias, inp);
}

// Compute again what the level dropped. The norms are always computed again, the latents' too.
template <typename T, typename S>
void first_branch_recompute(Ctx<S>& ctx,
                            const T* inp,
                            const Deepseek::Block& w,
                            const Deepseek::Acts<T>& a, Recompute level) {
    // Attention rotates q in place only when it runs, so a q that was kept stays rotated.
    T* no_cache = nullptr;
    if (redoes_attn(level))
        return first_branch_forward(ctx, inp, w, a, no_cache);
    rmsnorm_forward(ctx, a.norm_1, a.norm_1_rstd, inp, w.norm_1);
    norm_latents(ctx, w, a);
}

// Go back through attention, to dq, dkv and the rotary part of dkv_down.
template <typename T, typename S>
void latent_attention_backward(Ctx<S>& ctx,
                               const Deepseek::Acts<T>& a) {
    // Heads in rooms are as wide as q.
    const Shape& s = ctx.shape;
    size_t Q = s.NH * s.HS;
    LatentRooms<T> room = latent_rooms<T>(ctx);

    // Restore what the forward pass read and wrote. Attention needs the keys rotated.
    expand_heads(ctx, room, a);
    rotate_forward<T>(ctx, {room.k, s.NH, Q});
    pad_heads(ctx, room.out, a.attention);
    pad_heads(ctx, room.dout, a.dattention);
    Qkv<T> x = {a.q, room.k, room.v, Q, Q};
    Qkv<T> dx = {a.dq, room.dk, room.dv, Q, Q};
    context_attention_backward(ctx, dx, room.dout, room.out, a.lse, x);

    // Join the gradients of k and v into dkv, and sum those of the rotary part.
    size_t width = s.latent.kv + s.rope.rotary;
    latent_heads_backward(a.dkv, a.dkv_down + s.latent.kv, width, room.dk, room.dv,
                          latent_heads(s), ctx.batch.rows(), ctx.where);
}

// dinp = dmiddle + the gradient through the branch.
template <typename T, typename S>
void first_branch_backward_input(Ctx<S>& ctx,
                                 T* dinp, const T* inp, // (R,C) (R,C)
                                 const Deepseek::Block& w,
                                 const Deepseek::Acts<T>& a) {
    // Start with attention, from the stream's own gradient.
    const Shape& s = ctx.shape;
    size_t N = ctx.batch.rows();
    row_parallel_backward_input(ctx, a.dattention, a.dmiddle_all, a.dmiddle, w.o);
    latent_attention_backward(ctx, a);

    // Go from the heads' gradients to those of the latents.
    if (s.latent.q)
        linear_backward_input(a.dq_latent, a.dq, w.q, N, false, ctx.blas, ctx.where);
    linear_backward_input(a.dkv_latent, a.dkv, w.kv_b, N, false, ctx.blas, ctx.where);
    norm_latents_backward(ctx, w, a);

    // Go back to the stream, where ranks add the parts of their heads. dinp is null in the lowest
    // trained block: nothing reads it.
    if (!dinp) return;
    column_parallel_backward_input(ctx, a.dnorm_1,
                                   {first_of_q(s, w, a.dq_down, a.dq), {a.dkv_down, w.kv_a}});
    rmsnorm_backward(ctx, dinp, a.norm_1_sums, a.dmiddle, a.dnorm_1, inp, w.norm_1, a.norm_1_rstd);
}

// The gradients of the first branch's matrices. The norms' partial sums are only listed.
template <typename T, typename S>
void first_branch_backward_weight(Ctx<S>& ctx,
                                  SumsOfRows<T>& sums,
                                  const Deepseek::Block& w,
                                  const Deepseek::Acts<T>& a, bool accumulate) {
    const Shape& s = ctx.shape;
    const LatentShape& latent = s.latent;
    size_t N = ctx.batch.rows();
    auto backward = [&](const Weight& weight, const T* dy, const T* x) {
        linear_backward_weight(weight, nullptr, dy, x, N, accumulate, ctx.blas, ctx.where);
    };

    // Matrices of the heads first, then those that read the stream: without a latent q is one.
    row_parallel_backward_weight(ctx, w.o, a.dmiddle, a.dmiddle_all, a.attention, accumulate);
    if (latent.q)
        backward(w.q, a.dq, a.q_latent);
    backward(w.kv_b, a.dkv, a.kv_latent);
    column_parallel_backward_weight(ctx, {first_of_q(s, w, a.dq_down, a.dq), {a.dkv_down, w.kv_a}},
                                    static_cast<const T*>(a.norm_1), accumulate);

    // A rank's sums for the latents' norms come from its own heads {+tp}.
    sums.ready.push_back(rmsnorm_parts<T>(ctx, w.norm_1, a.norm_1_sums));
    sums.ready.push_back(
        rmsnorm_parts(grad_of<T>(w.kv_a_norm), a.kv_latent_sums, N, latent.kv, ctx.where));
    if (latent.q)
        sums.ready.push_back(
            rmsnorm_parts(grad_of<T>(w.q_a_norm), a.q_latent_sums, N, latent.q, ctx.where));
}

} // namespace llmc
