// context_parallel.h - sequences cut over ranks, keys and values gathered - arXiv:2407.21783
//   cp ranks share every sequence: each has t = T/cp rows of it, N = B t of a micro-batch. In all
//   but attention they are data-parallel ranks: the count of targets, losses, REDUCE and ZeRO's
//   shards go over dp x cp ranks, as sums.
//   1. LOAD       reads whole sequences, targets and documents too, then keeps a rank's rows:
//                   zigzag      chunks r and 2cp-1-r of 2cp; each rank has the same causal work
//                   contiguous  [r t, (r+1) t); the last rank has nearly twice the mean
//                   striped     r, r+cp, ...; nearly the same work, of many documents too
//   2. forward    k, v [t] -> [T]   all-gather; then this rank's t queries meet all T keys
//   3. backward   k, v [t] -> [T]   all-gather again, so that nothing is kept of other ranks
//                 dk, dv [T]{partial} -> [t]   reduce-scatter in float, rounded once
//   Positions and documents' starts go with the rows, so nothing else asks which rows a rank has.
//   Every message is on the critical path.
//   Cost of a block and micro-batch: a rank sends 2 (cp-1) N KV elements forward, and backward as
//   many again and as many floats. Scratch: 2 B T KV elements, and as many floats in training.
//   Float dk and dv keep 16-bit runs off the tensor-core kernels of attention's backward pass.
#pragma once
#include "attention_merge.cuh"
#include "context.h"
#include "layout.h"

namespace llmc {

// The place in a sequence of T tokens of row i of a rank.
inline size_t context_row(ContextOrder order, Axis cp, size_t T, size_t i) {
    // Every order is a permutation of the sequence, the ranks' rows side by side.
    size_t size = size_t(cp.size);
    size_t rank = size_t(cp.rank);
    size_t t = T / size;
    switch (order) {
    case ContextOrder::CONTIGUOUS: return rank * t + i;
    case ContextOrder::STRIPED: return i * size + rank;
    case ContextOrder::ZIGZAG: break;
    }
    // An early chunk and a late one: what one sees less of the sequence the other sees more.
    size_t half = T / (2 * size);
    size_t late = 2 * size - 1 - rank;
    if (i < half) return rank * half + i;
    return late * half + i - half;
}

// Bytes of the gathered keys and values, and of their gradients behind them.
template <typename T>
size_t context_scratch_bytes(const Shape& s, size_t B, size_t tokens, bool trains) {
    size_t n = B * tokens * 2 * s.NKV * s.HS;
    size_t keys = round_up(n * sizeof(T), size_t(256));
    size_t gradients = n * sizeof(acc_t<T>);
    return trains ? keys + gradients : keys;
}

// ----------------------------------------------------------------------------
// all ranks' keys and values: (B,cp,t), a row of 2 KV elements for each token, k and then v

// A sequence's rows: those of this rank lie among those of all, so it is gathered in place.
template <typename E> struct SequenceRows {
    E *all, *mine; // (cp,t,2,KV) (t,2,KV)
    size_t count;  // elements of `mine`
};
template <typename E, typename S>
SequenceRows<E> sequence_rows(const Ctx<S>& ctx, E* rows, size_t b) {
    // A row holds a token's key and its value, of all key/value heads.
    size_t count = ctx.batch.T * 2 * ctx.shape.NKV * ctx.shape.HS;
    E* all = rows + b * count * size_t(ctx.cp.size);
    return {all, all + count * size_t(ctx.cp.rank), count};
}

// Gather sequence by sequence: keys of one sequence then lie side by side.
template <typename T, typename S>
Keys<T> gather_keys(Ctx<S>& ctx, const Qkv<T>& x) {
    const Batch& b = ctx.batch;
    size_t KV = ctx.shape.NKV * ctx.shape.HS;
    size_t from = x.kv_stride * sizeof(T); // bytes between rows
    size_t bytes = KV * sizeof(T);
    size_t to = 2 * bytes;
    T* keys = static_cast<T*>(ctx.context);
    for (size_t i = 0; i < b.B; i++) {
        // Lay this rank's rows where the gather leaves them.
        SequenceRows<T> rows = sequence_rows(ctx, keys, i);
        const T* k = x.k + i * b.T * x.kv_stride;
        const T* v = x.v + i * b.T * x.kv_stride;
        copy_rows(rows.mine, to, k, from, bytes, b.T, ctx.where);
        copy_rows(rows.mine + KV, to, v, from, bytes, b.T, ctx.where);
        all_gather(ctx.cp, rows.all, rows.mine, rows.count, ctx.where);
    }
    size_t Tk = b.T * size_t(ctx.cp.size);
    return {keys, keys + KV, b.key_positions, Tk, 2 * KV};
}

// The gradients of all ranks' keys and values, behind those in the scratch.
template <typename T, typename S>
acc_t<T>* key_gradients(const Ctx<S>& ctx, const Keys<T>& keys) { // (B,cp,t,2,KV) {+cp}
    size_t bytes = ctx.batch.B * keys.Tk * keys.stride * sizeof(T);
    char* scratch = static_cast<char*>(ctx.context);
    return reinterpret_cast<acc_t<T>*>(scratch + round_up(bytes, size_t(256)));
}

// Sum each rank's part of them; this rank's rows become dk and dv.
template <typename T, typename S>
void scatter_key_gradients(Ctx<S>& ctx, const Qkv<T>& dx, acc_t<T>* gradients) {
    size_t KV = ctx.shape.NKV * ctx.shape.HS;
    size_t t = ctx.batch.T;
    for (size_t i = 0; i < ctx.batch.B; i++) {
        SequenceRows<acc_t<T>> rows = sequence_rows(ctx, gradients, i);
        size_t first = i * t * dx.kv_stride;

        // Sum in place, in float, then round once.
        reduce_scatter_sum(ctx.cp, rows.mine, rows.all, rows.count, ctx.where);
        acc_t<T>* k = rows.mine;
        acc_t<T>* v = k + KV;
        T* dk = dx.k + first;
        T* dv = dx.v + first;
        round_rows(dk, dx.kv_stride, k, 2 * KV, t, KV, ctx.where);
        round_rows(dv, dx.kv_stride, v, 2 * KV, t, KV, ctx.where);
    }
}

// ----------------------------------------------------------------------------
// attention as blocks call it; on one rank it is context.h's

template <typename T, typename S>
void context_attention_forward(Ctx<S>& ctx, T* out, acc_t<T>* lse, // (B,t,NH,HS) (B,NH,t)
                               const Qkv<T>& x, T* cache) {
    if (ctx.cp.size == 1) return attention_forward(ctx, out, lse, x, cache);
    RopeHeads<T> q = {x.q, ctx.shape.NH, x.q_stride};
    RopeHeads<T> k = {x.k, ctx.shape.NKV, x.kv_stride};
    rotate_forward(ctx, q, k);

    // Positions decide what a query sees, wherever its keys come from.
    Keys<T> keys = gather_keys(ctx, x);
    AttentionOperands<T> operands = attention_operands(ctx, x.q, x.q_stride, keys);
    attention_forward(out, lse, operands, ctx.blas, ctx.where);
}

// x is as the forward pass left it, rotated; dx is the gradient of what it was before.
template <typename T, typename S>
void context_attention_backward(Ctx<S>& ctx, const Qkv<T>& dx, const T* dout, // (B,t,NH,HS)
                                const T* out, const acc_t<T>* lse, // (B,t,NH,HS) (B,NH,t)
                                const Qkv<T>& x) {
    if (ctx.cp.size == 1) return attention_backward(ctx, dx, dout, out, lse, x);

    // The forward pass has kept this rank's keys alone.
    Keys<T> keys = gather_keys(ctx, x);
    AttentionOperands<T> operands = attention_operands(ctx, x.q, x.q_stride, keys);
    operands.dout = dout;

    // Every rank's queries have met all keys: their gradients are sums over ranks.
    acc_t<T>* gradients = key_gradients(ctx, keys);
    size_t KV = ctx.shape.NKV * ctx.shape.HS;
    acc_t<T>* dv = gradients + KV;
    attention_backward(dx.q, gradients, dv, out, lse, operands, ctx.blas, ctx.where);
    scatter_key_gradients(ctx, dx, gradients);

    RopeHeads<T> dq = {dx.q, ctx.shape.NH, dx.q_stride};
    RopeHeads<T> dk = {dx.k, ctx.shape.NKV, dx.kv_stride};
    rotate_backward(ctx, dq, dk);
}

} // namespace llmc
