// context.h - what a block receives besides its pointers: the batch, the shape, where it runs
//   Ctx is the first argument of every function that a block calls; there is no global state.
//   A block computes rows, one for each token. It never asks how long a sequence is: `positions`
//   says where a row stands, and only keys_seen() knows where the keys of a query lie.
#pragma once
#include "comm/group.h"
#include "layout.h"
#include "model.h"
#include "ops/attention.cuh"
#include "ops/attention_join.cuh"
#include "ops/attention_tiled.cuh"
#include "ops/attention_types.h"
#include "ops/linear.cuh"
#include "ops/matmul.cuh"
#include "ops/memory.h"
#include "ops/rope.cuh"
#include "ops/types.h"
#include <cstdint>
#include <functional>
#include <string>

namespace llmc {

// ----------------------------------------------------------------------------
// where the documents of a window of tokens begin, so that each sees itself alone
//   split_documents   tokens (T), targets (T), `end` -> doc_start (T), targets (T)
//   doc_start[i] is the position where the document of position i begins; attention looks no
//   further back. `end` is the token that ends a document; with -1 the window is one document.
//   The end belongs to the document before it, so the model learns that a text ends. The token that
//   follows an end cannot be told from it, so the target there is ignored (-1).
//   Of a document that began before the window, only the part inside the window is seen.
//   Windows of whole conversations need no `end`: a bit of a token says that one begins.

// Reads tokens (T) and targets (T) of sample number `sample`; returns "" or what is wrong.
typedef std::function<std::string(uint64_t sample, int* tokens, int* targets)> Window;

// The objective's numbers of a window's rows, (T) each (objective.cuh). `old` is null unless the
// objective compares with the policy that sampled.
struct RowNumbers {
    float *feedback, *reference, *old;
};

// Fills in what the tokens of a sample do not say of its rows: log p, and advantages.
typedef std::function<void(uint64_t sample, RowNumbers to)> References;

// Bits of a token in such windows (tune/conversations.h): an answer's; the first of a conversation.
constexpr int TRAINED = int(1u << 31);
constexpr int BEGINS = 1 << 30;
constexpr int REJECTED = 1 << 29; // beside BEGINS: the worse answer, after the better one

// Which rows (T) are of a rejected answer's conversation; REJECTED leaves the tokens.
inline void split_pairs(float* feedback, int* tokens, size_t T) {
    // A conversation's first token says whose it is.
    float now = 0;
    for (size_t i = 0; i < T; i++) {
        if (tokens[i] & BEGINS)
            now = tokens[i] & REJECTED ? 1 : 0;
        tokens[i] &= ~REJECTED;
        feedback[i] = now;
    }
}

// All arrays are the host's; `targets` is changed in place, and BEGINS leaves the tokens.
inline void split_documents(int* doc_start, int* targets, int* tokens, size_t T, int end) {
    int start = 0;
    for (size_t i = 0; i < T; i++) {
        if (tokens[i] & BEGINS) start = int(i);
        tokens[i] &= ~BEGINS;
        doc_start[i] = start;
        // The next position begins another document.
        if (tokens[i] != end) continue;
        start = int(i) + 1;
        targets[i] = -1;
    }
}

// This rank's rows of one micro-batch.
struct Batch {
    size_t B = 0, T = 0;            // sequences, and tokens of each on this rank
    const int* tokens = nullptr;    // (B,T)
    const int* targets = nullptr;   // (B,T) negative: ignored
    const int* positions = nullptr; // (B,T) places in the whole sequence
    // (B,T) the position where the token's document starts. The token sees no key before it, and
    // its learned position counts from there.
    const int* doc_start = nullptr;
    const float *feedback = nullptr, *reference = nullptr, *old = nullptr; // (B,T) objective.cuh

    // Generation only. Sequence b uses slot first_slot + b of the cache. A slot has room for
    // `capacity` positions; queries look at the first `seen`. A token is stored at its position.
    size_t first_slot = 0, capacity = 0, seen = 0;
    const int* places = nullptr; // (B,T) the same positions, in the host's memory
    const size_t* lengths = nullptr; // (B) tokens of sequences that are padded to T; null: T each
    const int* adapters = nullptr; // (B) each sequence's set, -1: the base; in the host's memory
    // The positions of keys that are not from these rows: (B,seen) from a cache; with context
    // parallelism (B, T of all ranks), in a ring (ranks,B,T).
    const int* key_positions = nullptr;
    const int* key_documents = nullptr; // (B, T of all ranks) where those keys' documents start

    size_t rows() const { return B * T; } // N
};

// Context parallelism as attention needs it (context_parallel.h).
struct ContextRanks {
    Comm heads, keys; // ranks of cp that exchange heads; that share keys
    ContextMethod method = ContextMethod::GATHER; // how ranks of cp share attention
    void* scratch = nullptr;
};

// Rows of tokens as a router and its experts need them (mixtral.h, expert_parallel.h).
struct ExpertRows {
    void* slot_rows = nullptr;     // rows sorted by expert
    void* token_rows = nullptr;    // (ep,N,C) rows of all tokens that experts may see
    void* exchange_rows = nullptr; // (2,ep,N,C) rows on their way to experts
    int* loads = nullptr;          // (E) slots given to this layer's experts so far
};

// The context of a block. Pointers are null where the running layer has no use for them.
template <typename S> struct Ctx {
    S where;     // the CPU, or a CUDA stream
    Shape rank_shape; // this rank's part of the model's: its heads, channels and vocabulary
    Shape shape;      // the same, as the running layer has it
    Batch batch;
    Blas blas;   // handles and scratch of products
    Comm tp;                           // the ranks that share the shape
    Comm cp;                           // the ranks that share each sequence
    ContextRanks context;
    S beside = {};                     // the stream of messages that run beside a layer's work
    Comm ep;                           // the ranks that share out the experts
    ExpertRows experts;
    void* all_rows = nullptr;          // (N,C) rows of all ranks, for sequence parallelism
    void* heads = nullptr;             // (rooms,N,NH,HS) expanded heads of latent attention
    size_t sequences = 0;              // in the global batch
    const void* rope = nullptr;        // (P,rotary/2,2) acc: cos and sin of this layer's RoPE
    const float* slopes = nullptr;     // (NH) ALiBi
    PrefixRows prefix;                 // this layer's trained keys and values before the text
    const float* loss_scale = nullptr; // fp16: the head multiplies its gradient by it
    const struct TeacherHead* teacher = nullptr; // distillation (head.h)
    int micro = 0;                     // the number of the micro-batch
};

// ----------------------------------------------------------------------------
// weights as blocks pass them

// A bias, or null. If the model has no such bias, its Weight has no data.
inline const Weight* bias_of(const Weight& w) { return w.data ? &w : nullptr; }

// A weight's gradient in its type, or null: the weight is frozen.
template <typename T> acc_t<T>* grad_of(const Weight& w) { return static_cast<acc_t<T>*>(w.grad); }

// ----------------------------------------------------------------------------
// the keys that the batch's queries see

// Keys and values. Each token has a row in k and one in v; rows are `stride` elements apart.
template <typename T> struct Keys {
    const T *k, *v;       // (B,Tk,NKV,HS)
    const int* positions; // (B,Tk)
    size_t Tk, stride;
    size_t batch = 0; // elements between sequences; 0: one directly follows the other
};

// The keys that the batch's queries look at. Without a cache they are the batch's own. With a cache
// (slots,capacity,2,NKV*HS), store the batch's keys at their positions; the queries then look at
// the first `seen` of each slot. Where a slot has fewer, positions mask the rest.
template <typename T, typename S>
Keys<T> keys_seen(const Ctx<S>& ctx, T* cache, const T* k, const T* v, size_t stride) {
    const Batch& b = ctx.batch;
    if (!cache)
        return {k, v, b.positions, b.T, stride};

    // Store one row in the cache for each token: its key, then its value.
    size_t KV = ctx.shape.NKV * ctx.shape.HS;
    size_t from = stride * sizeof(T), to = 2 * KV * sizeof(T), slot = b.capacity * 2 * KV;
    T* first = cache + b.first_slot * slot;
    for (size_t i = 0; i < b.B; i++) {
        T* row = first + i * slot + size_t(b.places[i * b.T]) * 2 * KV;
        copy_rows(row, to, k + i * b.T * stride, from, KV * sizeof(T), b.T, ctx.where);
        copy_rows(row + KV, to, v + i * b.T * stride, from, KV * sizeof(T), b.T, ctx.where);
    }
    return {first, first + KV, b.key_positions, b.seen, 2 * KV, slot};
}

// ----------------------------------------------------------------------------
// attention as blocks call it

// Sizes with q, k and v side by side in a row. Scratch and the choice of a kernel depend on them.
inline AttentionDims attention_shape(const Shape& s, size_t B, size_t Tq, size_t Tk) {
    size_t QKV = (s.NH + 2 * s.NKV) * s.HS;
    return {B, Tq, Tk, s.NH, s.NKV, s.HS, QKV, QKV};
}

// The operands of attention: the batch's queries, rows q_stride apart, and the keys that they see.
template <typename T, typename S>
AttentionOperands<T> attention_operands(const Ctx<S>& ctx, const T* q, size_t q_stride,
                                        const Keys<T>& keys) { // q (B,T,NH,HS)
    const Shape& s = ctx.shape;
    const Batch& b = ctx.batch;
    int window = s.sliding_window ? int(std::min(s.sliding_window, size_t(INT_MAX))) : INT_MAX;
    AttentionDims d = {b.B, b.T, keys.Tk, s.NH, s.NKV, s.HS, q_stride, keys.stride, window};
    d.k_batch = d.v_batch = keys.batch;
    acc_t<T> scale = s.score_scalar ? 1 / std::sqrt(acc_t<T>(s.score_scalar)) : 0;
    return {q,           keys.k,     keys.v, nullptr, b.positions,           keys.positions,
            b.doc_start, ctx.slopes, d,      scale,   acc_t<T>(s.score_softcap)};
}

// The CPU's attention takes a Blas, and kernels take plain memory. Give kernels the Blas's scratch.
template <typename T>
void* attention_scratch(const AttentionDims& d, Blas& blas, auto stream) {
    size_t need = attention_scratch_bytes<T>(d, 1, stream);
    LLMC_CHECK(need <= blas.scratch_bytes,
               "attention needs %zu bytes of scratch, the plan gave %zu", need, blas.scratch_bytes);
    return blas.scratch;
}
template <typename T, typename O, typename S>
void attention_forward(O* out, acc_t<T>* lse, const AttentionOperands<T>& x, Blas& blas,
                       S stream) {
    attention_forward(out, lse, x, attention_scratch<T>(x.d, blas, stream), stream);
}
template <typename T, typename Q, typename K, typename S>
void attention_backward(Q* dq, K* dk, K* dv, const T* out, const acc_t<T>* lse,
                        const AttentionOperands<T>& x, Blas& blas, S stream) {
    attention_backward(dq, dk, dv, out, lse, x, attention_scratch<T>(x.d, blas, stream), stream);
}

// Describe to rope.cuh which channels of each head rotate.
template <typename T, typename S>
RopeHeads<T> turning(const Ctx<S>& ctx, RopeHeads<T> x) { // (B,T,heads,HS)
    if (x.NH) x.rows += first_rotary(ctx.shape, ctx.shape.HS);
    x.head_stride = ctx.shape.HS;
    x.neighbours = ctx.shape.kv_latent > 0;
    x.doc_start = ctx.prefix.k ? ctx.batch.doc_start : nullptr; // each starts after the prefix
    return x;
}

// Rotate the first heads of each row in place (RoPE). Without a table (learned positions, ALiBi)
// there is nothing to do.
template <typename T, typename S>
void rotate_forward(const Ctx<S>& ctx, RopeHeads<T> q, RopeHeads<T> k = {}) {
    if (!ctx.rope) return;
    rope_forward(turning(ctx, q), turning(ctx, k), ctx.batch.positions,
                 (const acc_t<T>*)ctx.rope, ctx.batch.rows(),
                 rotary_channels(ctx.shape, ctx.shape.HS), ctx.where);
}
template <typename T, typename S>
void rotate_backward(const Ctx<S>& ctx, RopeHeads<T> dq, RopeHeads<T> dk = {}) {
    if (!ctx.rope) return;
    rope_backward(turning(ctx, dq), turning(ctx, dk), ctx.batch.positions,
                  (const acc_t<T>*)ctx.rope, ctx.batch.rows(),
                  rotary_channels(ctx.shape, ctx.shape.HS), ctx.where);
}

// A block's queries, keys and values, or the gradients of all three.
template <typename T> struct Qkv {
    T *q, *k, *v;               // (B,T,NH,HS) (B,T,NKV,HS) (B,T,NKV,HS)
    size_t q_stride, kv_stride; // elements between rows
};

// Rotate q and k in place, then let each query attend to the keys that it sees.
template <typename T, typename S>
void attention_forward(Ctx<S>& ctx, T* out, acc_t<T>* lse, // (B,T,NH,HS) (B,NH,T)
                       const Qkv<T>& x, T* cache, const Sinks<T>& sinks = {}) {
    rotate_forward<T>(ctx, {x.q, ctx.shape.NH, x.q_stride}, {x.k, ctx.shape.NKV, x.kv_stride});
    Keys<T> keys = keys_seen(ctx, cache, x.k, x.v, x.kv_stride);
    AttentionOperands<T> operands = attention_operands(ctx, x.q, x.q_stride, keys);
    attention_forward(out, lse, operands, ctx.blas, ctx.where);
    join_keys(out, lse, operands, ctx.prefix, sinks, ctx.where);
}

// dx = the gradient of q, k and v before they were rotated. Forward has left x rotated.
template <typename T, typename S>
void attention_backward(Ctx<S>& ctx, const Qkv<T>& dx, const T* dout, // (B,T,NH,HS)
                        const T* out, const acc_t<T>* lse,            // (B,T,NH,HS) (B,NH,T)
                        const Qkv<T>& x, const Sinks<T>& sinks = {}) {
    Keys<T> keys = keys_seen<T>(ctx, nullptr, x.k, x.v, x.kv_stride);
    AttentionOperands<T> operands = attention_operands(ctx, x.q, x.q_stride, keys);
    operands.dout = dout;
    attention_backward(dx.q, dx.k, dx.v, out, lse, operands, ctx.blas, ctx.where);
    join_keys_backward(dx.q, out, lse, operands, ctx.prefix, sinks, ctx.where);
    rotate_backward<T>(ctx, {dx.q, ctx.shape.NH, dx.q_stride},
                       {dx.k, ctx.shape.NKV, dx.kv_stride});
}

} // namespace llmc
