// ring_attention.h - context parallelism in a ring: keys go from rank to rank - arXiv:2310.01889
//   Rank r of cp has t rows of every sequence (context_parallel.h). In step s = 0 .. cp-1 it holds
//   the keys and values of rank r-s, modulo cp.
//   1. HOP        send k, v to rank r+1, receive the next step's from r-1        beside 2
//   2. FORWARD    this rank's queries attend to these t keys: part, part_lse
//   3. MERGE      add the part to the sum, in float; the first part is the sum
//   Backward uses the final out and lse, so each pair of ranks' rows is independent of the others:
//   1. HOP        k, v as above; the gradients so far follow one hop later       beside 2
//   2. BACKWARD   dq += in float; dk, dv of these keys from this rank's queries
//   3. ADD        dk, dv to what has arrived for the same keys; after cp hops they are home
//   A key's gradient is summed over the ranks in order, from its owner on, in float, and rounded
//   once: bitwise repeatable. Attention skips tiles that no query sees; all messages are sent
//   anyway. Messages run beside attention, except the gradients' last hop. On NCCL they run in a
//   stream of their own; between threads that share a GPU they wait.
//   Cost of a block and micro-batch: a rank sends 2 (cp-1) N KV elements forward; backward as many
//   again and 2 cp N KV floats. Scratch: 4 N KV elements, N Q and N Q floats. Training adds 6 N KV
//   floats, which keep 16-bit runs off the tensor cores in attention's backward pass.
#pragma once
#include "attention_merge.cuh"
#include "context.h"
#include "elementwise.cuh"

namespace llmc {

// ----------------------------------------------------------------------------
// scratch

// The buffers of a layer.
// A row of keys holds one token's key and its value, of all key/value heads.
template <typename T> struct RingRooms {
    // Both ways.
    T* keys = nullptr;        // (N,2,KV) attended now, while they are sent to the next rank
    T* next_keys = nullptr;   // (N,2,KV) being received
    T* rows = nullptr;        // (N,Q) the current part of out; backward: q
    acc_t<T>* sum = nullptr;  // (N,Q) out summed so far; backward: dq
    acc_t<T>* lse = nullptr;  // (B,NH,t) of the part

    // Backward only.
    acc_t<T>* made = nullptr;     // (N,2,KV) gradients of `keys` from this rank's queries
    acc_t<T>* leaving = nullptr;  // (N,2,KV) gradients of the keys one step before, being sent
    acc_t<T>* arriving = nullptr; // (N,2,KV) gradients of `keys` from the ranks before

    size_t bytes = 0;
};
// Lay the rooms out in `scratch`. With null the pointers are meaningless; only `bytes` counts.
template <typename T>
RingRooms<T> ring_rooms(const Shape& s, size_t N, bool trains, void* scratch) {
    // Count from the start of the scratch.
    uintptr_t first = uintptr_t(scratch);
    uintptr_t next = first;
    auto take = [&](auto*& room, size_t count) {
        room = reinterpret_cast<std::decay_t<decltype(room)>>(next);
        next += round_up(count * sizeof(*room), size_t(256));
    };

    // Forward and backward never run at once, so they share rooms of equal size.
    RingRooms<T> r;
    size_t Q = s.NH * s.HS;
    size_t KV = s.NKV * s.HS;
    take(r.keys, N * 2 * KV);
    take(r.next_keys, N * 2 * KV);
    take(r.rows, N * Q);
    take(r.sum, N * Q);
    take(r.lse, N * s.NH);

    // Evaluation has no backward pass.
    if (trains) {
        take(r.made, N * 2 * KV);
        take(r.leaving, N * 2 * KV);
        take(r.arriving, N * 2 * KV);
    }
    r.bytes = next - first;
    return r;
}

// ----------------------------------------------------------------------------
// hops

// The messages of one hop: for each buffer that goes to the next rank, another one arrives from
// the rank before.
template <typename S> struct Hop {
    std::vector<CommMessage> messages;
    Pending<S> pending;
};
// Add one buffer to a hop: send `out` to the next rank, receive `in` from the rank before.
template <typename S>
void add_message(Hop<S>& hop, const Comm& cp, void* out, void* in, size_t bytes) {
    // The tag tells keys, which are listed first, from gradients.
    int tag = int(hop.messages.size() / 2);
    int next = (cp.rank + 1) % cp.size;
    int before = (cp.rank + cp.size - 1) % cp.size;
    hop.messages.push_back({out, bytes, next, true, tag});
    hop.messages.push_back({in, bytes, before, false, tag});
}

// Start a hop after the work so far. Whatever the caller runs until finish_hop() runs beside it.
template <typename S>
void start_hop(Ctx<S>& ctx, Hop<S>& hop) {
    // Wait for the kernels that wrote these buffers, and for those that read the ones to overwrite.
    wait_point(record_point(ctx.where), ctx.beside);
    int count = int(hop.messages.size());
    hop.pending = start_exchange(ctx.cp, hop.messages.data(), count, ctx.beside);
}
template <typename S>
void finish_hop(Ctx<S>& ctx, Hop<S>& hop) {
    finish(hop.pending);
    // Make the stream of compute wait for what has arrived.
    wait_point(record_point(ctx.beside), ctx.where);
}

// Lay this rank's keys and values side by side, so that they go as one message.
template <typename T, typename S>
void pack_keys(Ctx<S>& ctx, T* keys, const Qkv<T>& x) { // keys (N,2,KV)
    size_t N = ctx.batch.rows();
    size_t KV = ctx.shape.NKV * ctx.shape.HS;
    T* values = keys + KV;
    // Strides count bytes here.
    size_t from = x.kv_stride * sizeof(T);
    size_t bytes = KV * sizeof(T);
    copy_rows(keys, 2 * bytes, x.k, from, bytes, N, ctx.where);
    copy_rows(values, 2 * bytes, x.v, from, bytes, N, ctx.where);
}

// Return attention's operands: this rank's queries, and the keys that have arrived
// after `step` hops.
template <typename T, typename S>
AttentionOperands<T> ring_operands(const Ctx<S>& ctx, const T* q, size_t q_stride, const T* keys,
                                   int step) {
    // Find the rank that owns these keys.
    int owner = (ctx.cp.rank - step + ctx.cp.size) % ctx.cp.size;
    const Batch& b = ctx.batch;

    // Take its positions, which lie rank by rank, (cp,B,t). They decide what a query sees.
    const int* positions = b.key_positions + size_t(owner) * b.rows();
    size_t KV = ctx.shape.NKV * ctx.shape.HS;
    Keys<T> seen = {keys, keys + KV, positions, b.T, 2 * KV};
    return attention_operands(ctx, q, q_stride, seen);
}

// ----------------------------------------------------------------------------
// attention

// Return the hop that brings the next step's keys, empty in the last step.
template <typename T, typename S>
Hop<S> keys_hop(Ctx<S>& ctx, const RingRooms<T>& room, int step) {
    Hop<S> hop;
    size_t KV = ctx.shape.NKV * ctx.shape.HS;
    size_t bytes = ctx.batch.rows() * 2 * KV * sizeof(T);
    if (step + 1 < ctx.cp.size)
        add_message(hop, ctx.cp, room.keys, room.next_keys, bytes);
    return hop;
}

// Attention's forward pass: queries stay, keys and values travel once around the ring.
template <typename T, typename S>
void ring_forward(Ctx<S>& ctx, T* out, acc_t<T>* lse, const Qkv<T>& x) { // (B,t,NH,HS) (B,NH,t)
    const Batch& b = ctx.batch;
    const Shape& s = ctx.shape;
    size_t N = b.rows();
    size_t Q = s.NH * s.HS;
    RingRooms<T> room = ring_rooms<T>(s, N, false, ctx.context);
    pack_keys(ctx, room.keys, x);

    for (int step = 0; step < ctx.cp.size; step++) {
        // 1. Pass the keys on, and receive the next ones.
        Hop<S> hop = keys_hop(ctx, room, step);
        start_hop(ctx, hop);

        // 2. Attend to the keys at hand.
        acc_t<T>* part_lse = step ? room.lse : lse;
        AttentionOperands<T> operands = ring_operands(ctx, x.q, x.q_stride, room.keys, step);
        attention_forward(room.rows, part_lse, operands, ctx.blas, ctx.where);

        // 3. Merge this part into the sum. In the first part each query has seen at least itself.
        if (step == 0)
            round_rows(room.sum, Q, room.rows, Q, N, Q, ctx.where);
        else
            attention_merge(room.sum, lse, room.rows, part_lse, b.B, b.T, s.NH, s.HS, ctx.where);
        finish_hop(ctx, hop);
        std::swap(room.keys, room.next_keys);
    }

    // Round the sum of all parts, once.
    round_rows(out, Q, room.sum, Q, N, Q, ctx.where);
}

// Attention's backward pass. x is rotated, and so is dx on return.
template <typename T, typename S>
void ring_backward(Ctx<S>& ctx, const Qkv<T>& dx, const T* dout, const T* out, // (B,t,NH,HS)
                   const acc_t<T>* lse, const Qkv<T>& x) {
    const Shape& s = ctx.shape;
    size_t N = ctx.batch.rows();
    size_t Q = s.NH * s.HS;
    size_t KV = s.NKV * s.HS;
    size_t numbers = N * 2 * KV;
    size_t bytes = numbers * sizeof(acc_t<T>);
    RingRooms<T> room = ring_rooms<T>(s, N, true, ctx.context);
    pack_keys(ctx, room.keys, x);

    // Copy the queries to dense rows, the layout that the sum of their gradients has.
    size_t width = Q * sizeof(T);
    copy_rows(room.rows, width, x.q, x.q_stride * sizeof(T), width, N, ctx.where);
    device_zero(room.sum, N * Q * sizeof(acc_t<T>), ctx.where);

    for (int step = 0; step < ctx.cp.size; step++) {
        // 1. Pass the keys on, and with them the gradients of the keys that left one hop before.
        Hop<S> hop = keys_hop(ctx, room, step);
        if (step > 0)
            add_message(hop, ctx.cp, room.leaving, room.arriving, bytes);
        start_hop(ctx, hop);

        // 2. Compute gradients for the keys at hand. dq adds up over the steps; dk and dv belong
        // to this step.
        AttentionOperands<T> operands = ring_operands(ctx, room.rows, Q, room.keys, step);
        operands.dout = dout;
        operands.accumulate = true;
        device_zero(room.made, bytes, ctx.where);
        acc_t<T>* dv = room.made + KV;
        attention_backward(room.sum, room.made, dv, out, lse, operands, ctx.blas, ctx.where);
        finish_hop(ctx, hop);
        std::swap(room.keys, room.next_keys);

        // 3. Add what earlier ranks, the keys' owner first, have computed for these keys.
        if (step > 0)
            add_forward(room.made, room.arriving, room.made, numbers, ctx.where);
        std::swap(room.made, room.leaving);
    }

    // Take the last hop: it brings the gradients of this rank's keys home.
    Hop<S> hop;
    add_message(hop, ctx.cp, room.leaving, room.arriving, bytes);
    start_hop(ctx, hop);
    round_rows(dx.q, dx.q_stride, room.sum, Q, N, Q, ctx.where);
    finish_hop(ctx, hop);

    // Round each gradient once.
    const acc_t<T>* dk = room.arriving;
    const acc_t<T>* dv = dk + KV;
    round_rows(dx.k, dx.kv_stride, dk, 2 * KV, N, KV, ctx.where);
    round_rows(dx.v, dx.kv_stride, dv, 2 * KV, N, KV, ctx.where);
}

} // namespace llmc
