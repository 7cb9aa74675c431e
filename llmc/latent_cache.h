// latent_cache.h - generation with latent attention: the cache holds latents - arXiv:2405.04434
//   cache (slots,positions,DC+DR): a token's latent after its norm, and its rotated k_rope. All
//   heads read the same row, so all tensor-parallel ranks hold the same cache.
//   1. A prompt attends to itself by heads, as in training, and its latents are stored.
//   2. Tokens after others attend to the cache: q absorbs W_k, the output W_v (latent_decode.cuh).
//      The same sums in another order: logits agree up to rounding. Products with kv_b are in
//      its own type then, under fp8 too.
//   Adapters of kv_b, one or one of each sequence, are absorbed as second matrices: W + s B A is
//   never made.
//   Cost: DC + DR elements a token and layer: 576 in DeepSeek-V3, whose heads would have 128 x 320.
//         Scratch has 2 DC + DR + r elements for each head of the rows that one run reads.
#pragma once
#include "context.h"
#include "latent_decode.cuh"

namespace llmc {

// Elements of scratch for `rows` rows. r is the rank of an adapter beside kv_b, or 0.
inline size_t absorbed_elements(const Shape& s, size_t rows, size_t r) {
    return rows * s.NH * (2 * s.kv_latent + s.rotary + r);
}

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
    size_t latent = s.kv_latent * sizeof(T);
    size_t row_bytes = width * sizeof(T);
    size_t rope = row_bytes - latent;

    for (size_t i = 0; i < b.B; i++) {
        // A sequence's rows follow each other in its slot.
        size_t n = i * b.T;
        size_t place = (b.first_slot + i) * b.capacity + size_t(b.places[n]);
        T* row = cache + place * width;
        copy_rows(row, row_bytes, latents + n * s.kv_latent, latent, latent, b.T, ctx.where);
        T* key = row + s.kv_latent;
        copy_rows(key, row_bytes, down + n * width + s.kv_latent, row_bytes, rope, b.T, ctx.where);

        // Rotate each key once, where it lies.
        RopeHeads<T> keys = {key, 1, width, s.rotary, true};
        rope_forward(keys, {}, b.positions + n, (const acc_t<T>*)ctx.rope, b.T, s.rotary,
                     ctx.where);
    }
}

// The queries absorbed, and the means that attention makes of latents.
template <typename T> struct AbsorbedRooms {
    T* q;    // (N,NH,DC+DR)
    T* mean; // (N,NH,DC)
    T* room; // (N,NH,r) between an adapter's two products
};

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
    if (query) {
        absorb_rows(query, room, x, b, n, where);
        lora_scale(room, heads * r, lora.scale, where);
        absorb_rows(query, out, room, a, heads, where);
    } else {
        absorb_rows(query, room, x, a, heads, where);
        lora_scale(room, heads * r, lora.scale, where);
        absorb_rows(query, out, room, b, n, where);
    }
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
    const Batch& b = ctx.batch;
    size_t DC = s.kv_latent;
    size_t width = cached_elements(s);
    size_t heads = b.rows() * s.NH;
    size_t plain = s.HS - s.rotary;

    // Divide the scratch: absorbed queries, means of latents, room for an adapter.
    T* base = static_cast<T*>(ctx.heads);
    T* means = base + heads * width;
    T* room = means + heads * DC;
    AbsorbedRooms<T> rooms = {base, means, room};

    // Absorb W_k into the plain part of each query; the rotary part stands after it.
    rotate_forward<T>(ctx, {q, s.NH, s.NH * s.HS});
    const T* w = values_of<T>(kv_b, ctx.blas, ctx.where); // (NH,plain+HS_v,DC)
    size_t kv = plain + s.HS_v;
    HeadMatrix<T> keys = {w, s.NH, kv, 0, plain, DC, s.HS, width};
    absorb(ctx, true, rooms.q, q, keys, kv_b, rooms.room);
    size_t rope = s.rotary * sizeof(T);
    copy_rows(rooms.q + DC, width * sizeof(T), q + plain, s.HS * sizeof(T), rope, heads, ctx.where);

    // Attend to the slots' first `seen` rows. The scale is that of the heads' own keys.
    size_t slot = b.capacity * width;
    T* first = cache + b.first_slot * slot;
    Keys<T> seen = {first, first, b.key_positions, b.seen, width, slot};
    AttentionOperands<T> x = attention_operands(ctx, rooms.q, s.NH * width, seen);
    x.d.NKV = 1;
    x.d.HS = width;
    x.d.HS_v = DC;
    if (x.scale == 0)
        x.scale = 1 / std::sqrt(acc_t<T>(s.HS));
    latent_attention_forward(rooms.mean, x, ctx.where);

    // Absorb W_v into the output.
    HeadMatrix<T> values = {w, s.NH, kv, plain, s.HS_v, DC, s.HS_v, DC};
    absorb(ctx, false, attention, rooms.mean, values, kv_b, rooms.room);
}

} // namespace llmc
