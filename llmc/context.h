// context.h - what a block is handed besides its pointers: where it runs, the batch, the shape
//   Passed as the first argument everywhere; there is no global state.
#pragma once
#include "attention.cuh"
#include "comm.h"
#include "linear.cuh"
#include "model.h"
#include "rope.cuh"

// One micro-batch. A position is the place in the whole sequence; doc_start is the place where the
// token's document starts: keys before it are not seen, and learned positions count from it.
struct Batch {
    size_t B = 0, T = 0;
    const int* tokens = nullptr;    // (B,T)
    const int* targets = nullptr;   // (B,T), negative: ignored
    const int* positions = nullptr; // (B,T)
    const int* doc_start = nullptr; // (B,T)
    // Generation only: the keys and values of what was read before, one sequence.
    size_t past = 0;                    // tokens in the cache
    const int* key_positions = nullptr; // (past + T)
    size_t rows() const { return B * T; }
};

template <typename S> struct Ctx {
    S where;
    Shape shape; // as this rank has it
    Batch batch;
    Blas blas;
    Comm tp;                    // the ranks that share heads, channels and vocabulary
    void* all_rows = nullptr;   // (N,C) room for the rows of all of them; sequence parallelism only
    const void* rope = nullptr; // acc_t<T> (P, HS/2, 2): cos, sin
    const float* slopes = nullptr; // (NH) ALiBi, or null
};

// ----------------------------------------------------------------------------
// the key/value cache: (positions, 2, NKV*HS), a row holds a token's key and value

template <typename T> struct Keys {
    const T *k, *v;
    const int* positions;
    size_t Tk, stride;
};

// The keys that the batch's queries see: its own, or with a cache all that came before as well.
template <typename T, typename S>
Keys<T> keys_seen(const Ctx<S>& ctx, T* cache, const T* k, const T* v, size_t stride) {
    const Batch& b = ctx.batch;
    if (!cache) return {k, v, b.positions, b.T, stride};
    size_t width = ctx.shape.NKV * ctx.shape.HS, from = stride * sizeof(T),
           to = 2 * width * sizeof(T);
    T* row = cache + b.past * 2 * width;
    copy_rows(row, to, k, from, width * sizeof(T), b.T, ctx.where);
    copy_rows(row + width, to, v, from, width * sizeof(T), b.T, ctx.where);
    return {cache, cache + width, b.key_positions, b.past + b.T, 2 * width};
}

// a bias that a model does not have is a Weight without data
inline const Weight* bias_of(const Weight& w) { return w.data ? &w : nullptr; }

// as blocks lay q, k and v out: side by side
inline AttentionDims attention_shape(const Shape& s, size_t B, size_t Tq, size_t Tk) {
    size_t QKV = (s.NH + 2 * s.NKV) * s.HS;
    return {B, Tq, Tk, s.NH, s.NKV, s.HS, QKV, QKV};
}
template <typename S>
AttentionDims attention_dims(const Ctx<S>& ctx, size_t Tk, size_t q_stride, size_t kv_stride) {
    const Shape& s = ctx.shape;
    int window = s.sliding_window ? int(std::min(s.sliding_window, size_t(INT_MAX))) : INT_MAX;
    return {ctx.batch.B, ctx.batch.T, Tk, s.NH, s.NKV, s.HS, q_stride, kv_stride, window};
}

// RoPE on the first `heads` heads of each row, in place; without a table (learned positions, ALiBi)
// nothing to do.
template <typename T, typename S>
void rotate_forward(const Ctx<S>& ctx, T* x, size_t heads, size_t stride) {
    if (!ctx.rope) return;
    rope_forward(x, ctx.batch.positions, (const acc_t<T>*)ctx.rope, ctx.batch.rows(), heads,
                 ctx.shape.HS, stride, ctx.where);
}

template <typename T, typename S>
void rotate_backward(const Ctx<S>& ctx, T* dx, size_t heads, size_t stride) {
    if (!ctx.rope) return;
    rope_backward(dx, ctx.batch.positions, (const acc_t<T>*)ctx.rope, ctx.batch.rows(), heads,
                  ctx.shape.HS, stride, ctx.where);
}
