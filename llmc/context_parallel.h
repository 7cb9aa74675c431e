// context_parallel.h - context parallelism: cut sequences - arXiv:2407.21783, arXiv:2309.14509
//   cp ranks share every sequence: each has t = T/cp rows of it, N = B t rows of a micro-batch. In
//   everything but attention they are data-parallel ranks: the count of targets, losses, REDUCE and
//   ZeRO's shards include all dp x cp ranks.
//   1. LOAD       reads whole sequences, targets and documents; then each rank keeps its rows:
//                   zigzag      chunks r and 2cp-1-r of 2cp; each rank has the same causal work
//                   contiguous  [r t, (r+1) t); the last rank has nearly twice the mean
//                   striped     r, r+cp, ...; nearly the same work, even with many documents
//   2. gather     k, v [t] -> [T]   all-gather; then this rank's t queries meet all T keys
//      backward   k, v [t] -> [T]   all-gather again: nothing of other ranks was kept
//                 dk, dv [T]{partial} -> [t]   reduce-scatter in float, rounded once
//   3. Ulysses    q, k, v [t, heads] -> [T, heads/cp]   all-to-all; whole attention of some heads
//                 out [T, heads/cp] -> [t, heads]       all-to-all
//      backward   q, k, v, out, dout the same way; dq, dk, dv back; its sums need no message
//   4. ring       k, v [t] go from rank to rank beside attention (below)
//   5. hybrids    u neighbours of the cp ranks do as Ulysses and have [u t, heads/u]; then cp/u
//                 ranks share these keys by gather or in a ring (arXiv:2405.07719)
//   Positions and documents' starts travel with the rows, so no other code asks which rows a rank
//   has. Every message is on the critical path, except the ring's.
//   Cost of a block and micro-batch; Q and KV are the channels of a token's queries and keys.
//     gather   A rank sends 2 (cp-1) N KV elements forward; backward as many elements again and as
//              many floats. Scratch: 2 B T KV elements, and in training as many floats. The floats
//              keep 16-bit runs off the tensor cores in attention's backward pass.
//     Ulysses  A rank sends (cp-1)/cp N (2 Q + 2 KV) elements forward and (cp-1)/cp N (4 Q + 4 KV)
//              backward, since it exchanges its inputs again. Scratch: at most about twice that. cp
//              must divide the heads. With fewer key/value heads than ranks, several ranks take the
//              same head, KV counts cp of them, and the head's owner adds up the gradients in
//              rank order, in float.
//     hybrid   A rank sends what both send, each at its own size; its scratch holds both.
#pragma once
#include "comm/comm.h"
#include "comm/group.h"
#include "context.h"
#include "layout.h"
#include "model.h"
#include "ops/attention.cuh"
#include "ops/attention_join.cuh"
#include "ops/attention_tiled.cuh"
#include "ops/attention_types.h"
#include "ops/elementwise.cuh"
#include "ops/matmul.cuh"
#include "ops/memory.h"
#include "ops/rope.cuh"
#include "ops/types.h"

namespace llmc {

// ----------------------------------------------------------------------------
// the keys that the batch's queries see

// Keys and values. Each token has a row in k and one in v; rows are `stride` elements apart.
template <typename T> struct Keys {
    const T *k, *v;       // (B,Tk,NKV,HS)
    const int* positions; // (B,Tk)
    size_t Tk, stride;
    size_t batch = 0; // elements between sequences; 0: one directly follows the other
};

// Lay the keys and values of `rows` tokens side by side.
template <typename T, typename S>
void pack_keys(const Ctx<S>& ctx, T* keys, const T* k, const T* v, // (rows,2,KV)
               size_t stride, size_t rows) {
    // Strides count bytes here.
    size_t KV = ctx.shape.NKV * ctx.shape.HS;
    size_t bytes = KV * sizeof(T);
    size_t from = stride * sizeof(T);
    copy_rows(keys, 2 * bytes, k, from, bytes, rows, ctx.where);
    copy_rows(keys + KV, 2 * bytes, v, from, bytes, rows, ctx.where);
}

// Round the sums of keys' and values' gradients, each once, to `rows` rows of both.
template <typename T, typename S>
void round_keys(const Ctx<S>& ctx, T* dk, T* dv, size_t stride, const acc_t<T>* sums, // (rows,2,KV)
                size_t rows) {
    size_t KV = ctx.shape.NKV * ctx.shape.HS;
    round_rows(dk, stride, sums, 2 * KV, rows, KV, ctx.where);
    round_rows(dv, stride, sums + KV, 2 * KV, rows, KV, ctx.where);
}

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
    size_t slot = b.capacity * 2 * KV;
    T* first = cache + b.first_slot * slot;
    for (size_t i = 0; i < b.B; i++) {
        T* row = first + i * slot + size_t(b.places[i * b.T]) * 2 * KV;
        size_t from = i * b.T * stride; // the sequence's first row
        pack_keys(ctx, row, k + from, v + from, stride, b.T);
    }
    return {first, first + KV, b.key_positions, b.seen, 2 * KV, slot};
}

// ----------------------------------------------------------------------------
// attention on one rank

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
    int window = s.attention.window ? int(std::min(s.attention.window, size_t(INT_MAX))) : INT_MAX;
    AttentionDims d = {b.B, b.T, keys.Tk, s.NH, s.NKV, s.HS, q_stride, keys.stride, window};
    d.k_batch = d.v_batch = keys.batch;
    acc_t<T> scale =
        s.attention.score_scalar ? 1 / std::sqrt(acc_t<T>(s.attention.score_scalar)) : 0;
    return {q,           keys.k,     keys.v, nullptr, b.positions,           keys.positions,
            b.doc_start, ctx.slopes, d,      scale,   acc_t<T>(s.attention.softcap)};
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
void attention_forward(O* out, acc_t<T>* lse, const AttentionOperands<T>& x, Blas& blas, S stream) {
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
    x.neighbours = ctx.shape.latent.kv > 0;
    x.doc_start = ctx.prefix.k ? ctx.batch.doc_start : nullptr; // each starts after the prefix
    return x;
}

// Rotate the first heads of each row in place (RoPE). Without a table (learned positions, ALiBi)
// there is nothing to do.
template <typename T, typename S>
void rotate_forward(const Ctx<S>& ctx, RopeHeads<T> q, RopeHeads<T> k = {}) {
    if (!ctx.rope) return;
    rope_forward(turning(ctx, q), turning(ctx, k), ctx.batch.positions, (const acc_t<T>*)ctx.rope,
                 ctx.batch.rows(), rotary_channels(ctx.shape, ctx.shape.HS), ctx.where);
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

// ----------------------------------------------------------------------------
// context parallelism in a ring: keys go from rank to rank - arXiv:2310.01889
//   Rank r of cp has t rows of every sequence. In step s = 0 .. cp-1 it holds the keys and values
//   of rank r-s, modulo cp.
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

// ----------------------------------------------------------------------------
// scratch

// The buffers of a layer. A row of keys holds a token's key and value, of all key/value heads.
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
        next += round_up(count * sizeof(*room), 256);
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

// Attention's operands: this rank's queries, and the keys that have arrived after `step` hops.
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
    RingRooms<T> room = ring_rooms<T>(s, N, false, ctx.context.scratch);
    pack_keys(ctx, room.keys, x.k, x.v, x.kv_stride, N); // they go as one message

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
    RingRooms<T> room = ring_rooms<T>(s, N, true, ctx.context.scratch);
    pack_keys(ctx, room.keys, x.k, x.v, x.kv_stride, N);

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

        // 2. Make gradients for the keys at hand. dq adds up over steps; dk, dv are this step's.
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

    round_keys(ctx, dx.k, dx.v, dx.kv_stride, room.arriving, N);
}

// Return how many of Ulysses' ranks take the same key/value head; more than 1 if heads are fewer
// than ranks. These ranks are neighbours.
inline size_t key_copies(const Shape& s, size_t ranks) {
    return std::max(ranks / s.NKV, size_t(1));
}

// Return the shape after Ulysses' exchange among `ranks`: a share of the heads.
inline Shape share_of_heads(Shape s, size_t ranks) {
    // If key/value heads are fewer than ranks, each rank has one, a copy of its neighbours'.
    s.NKV = s.NKV * key_copies(s, ranks) / ranks;
    s.NH /= ranks;
    return s;
}

// Whether Ulysses can give each of cp ranks an equal share of a tp rank's heads.
inline bool cp_divides(const Shape& s, size_t tp, size_t cp) {
    // Where tp ranks share a key/value head, each of them has one.
    size_t key_heads = std::max(s.NKV / tp, size_t(1));
    bool shares_keys = key_heads % cp == 0 || cp % key_heads == 0;
    return s.NH % (tp * cp) == 0 && shares_keys;
}

// Return the sizes of attention on a rank, which decide its workspace.
inline AttentionDims context_attention_shape(Shape s, const Layout& layout, size_t B, size_t T) {
    // Ulysses divides the heads; gather divides the queries; a ring divides the keys too.
    size_t heads = size_t(heads_axis(layout).size);
    size_t queries = T / size_t(keys_axis(layout).size);
    bool ring = layout.context.method == ContextMethod::RING;
    size_t keys = ring ? queries : T;
    return attention_shape(share_of_heads(s, heads), B, queries, keys);
}

// Return what a rank's calls of attention ask of their kernels.
inline AttentionCall attention_call(const Shape& s, size_t element) {
    return {element, s.attention.softcap != 0, s.embedding.position == Position::ALIBI};
}
// Return the kernels of a rank's attention for the log; "" on a CPU.
template <typename S>
std::string context_attention_backend(const Shape& s, const Layout& layout, size_t element,
                                      S where) {
    // The number of tokens decides nothing.
    AttentionDims d = context_attention_shape(s, layout, 1, size_t(layout.cp.size));
    return attention_backend(d, attention_call(s, element), where);
}

// Ulysses' scratch: offsets in elements from its start.
// Backward reads dout from it and leaves dq, dk and dv in it.
struct HeadRooms {
    size_t q, k, v, out, dout, dq, dk, dv, sent, end;
    size_t ranks; // the ranks that exchange heads
};
inline HeadRooms head_rooms(const Shape& s, size_t ranks, size_t N, size_t t, bool trains) {
    size_t Q = s.NH * s.HS;
    size_t KV = s.NKV * s.HS * key_copies(s, ranks);
    size_t next = 0;
    auto take = [&](size_t n) {
        size_t at = next;
        next += round_up(n, 128); // 256 bytes of the narrowest type
        return at;
    };

    // Some heads of all rows are as many elements as all heads of this rank's rows.
    HeadRooms r = {};
    r.ranks = ranks;
    r.q = take(N * Q);
    r.k = take(N * KV);
    r.v = take(N * KV);
    r.out = take(N * Q);
    r.sent = take(t * Q); // one sequence's rows in flight

    // Only the backward pass has gradients.
    if (trains) {
        r.dout = take(N * Q);
        r.dq = take(N * Q);
        r.dk = take(N * KV);
        r.dv = take(N * KV);
    }
    r.end = next;
    return r;
}

// Return the bytes of Ulysses' rooms, and of the rows' positions and documents after them.
template <typename T>
size_t head_bytes(const HeadRooms& room, size_t N) {
    // Round up, because kernels want what follows at a multiple of 256 bytes.
    size_t rooms = room.end * sizeof(T);
    size_t rows = 2 * N * room.ranks * sizeof(int);
    return round_up(rooms, 256) + round_up(rows, 256);
}

// Return the bytes of scratch of a layer: Ulysses' rooms, then the keys and values of other ranks
// and, in training, their gradients.
template <typename T>
size_t context_scratch_bytes(const Shape& s, const Layout& layout, size_t B, size_t tokens,
                             bool trains) {
    // Count the exchange of heads, which comes first.
    size_t ranks = size_t(heads_axis(layout).size);
    size_t t = tokens / size_t(layout.cp.size);
    size_t N = B * t;
    size_t bytes = 0;
    if (ranks > 1) {
        bytes = head_bytes<T>(head_rooms(s, ranks, N, t, trains), N);
    }
    if (keys_axis(layout).size == 1) return bytes;

    // Count the keys of other ranks, for this rank's share of the heads.
    Shape mine = share_of_heads(s, ranks);
    if (layout.context.method == ContextMethod::RING)
        return bytes + ring_rooms<T>(mine, N * ranks, trains, nullptr).bytes;
    size_t n = B * tokens * 2 * mine.NKV * s.HS;
    size_t keys = round_up(n * sizeof(T), 256);
    size_t gradients = n * sizeof(acc_t<T>);
    return bytes + (trains ? keys + gradients : keys);
}

// The bytes that a rank sends for one block's attention, in the forward and the backward pass.
struct ContextMessages {
    size_t forward, backward;
};
// Return the bytes of Ulysses' exchanges, for N rows of a micro-batch.
template <typename T>
ContextMessages heads_messages(const Shape& s, const Layout& layout, size_t N) {
    // Each rank exchanges q and out, k and v or their copies, and keeps its own share of them.
    size_t ranks = size_t(heads_axis(layout).size);
    size_t copies = key_copies(s, ranks);
    size_t channels = (2 * s.NH + 2 * s.NKV * copies) * s.HS;
    size_t share = N * channels / ranks;
    size_t bytes = (ranks - 1) * share * sizeof(T);

    // Backward exchanges the inputs again, then the gradients.
    return {bytes, 2 * bytes};
}
// Return the bytes of gather's or the ring's messages.
template <typename T>
ContextMessages keys_messages(const Shape& s, const Layout& layout, size_t N) {
    // Send this rank's keys to all others; gradients come back, and in a ring go all the way round.
    size_t heads = size_t(heads_axis(layout).size);
    size_t ranks = size_t(keys_axis(layout).size);
    if (ranks == 1) return {0, 0};

    // After Ulysses a rank has a share of the heads, for the rows of all ranks that exchanged them.
    size_t rows = N * heads;
    size_t elements = rows * 2 * share_of_heads(s, heads).NKV * s.HS;
    size_t keys = (ranks - 1) * elements * sizeof(T);
    bool ring = layout.context.method == ContextMethod::RING;
    size_t hops = ring ? ranks : ranks - 1;
    size_t gradients = hops * elements * sizeof(acc_t<T>);
    return {keys, keys + gradients};
}
// Return the bytes of both.
template <typename T>
ContextMessages context_messages(const Shape& s, const Layout& layout, size_t N) {
    ContextMessages heads = heads_messages<T>(s, layout, N);
    ContextMessages keys = keys_messages<T>(s, layout, N);
    return {heads.forward + keys.forward, heads.backward + keys.backward};
}

// ----------------------------------------------------------------------------
// gather: the keys and values of all ranks, (B,cp,t); a token's row has 2 KV elements, k and then v

// One sequence's rows of all ranks. This rank's rows lie among them, so it is gathered in place.
template <typename E> struct SequenceRows {
    E *all, *mine; // (cp,t,2,KV) (t,2,KV)
    size_t count;  // elements of `mine`
};
// Return sequence b's rows in `rows`, which holds all sequences of the micro-batch.
template <typename E, typename S>
SequenceRows<E> sequence_rows(const Ctx<S>& ctx, E* rows, size_t b) {
    // A row holds a token's key and its value, of all key/value heads.
    size_t count = ctx.batch.T * 2 * ctx.shape.NKV * ctx.shape.HS;
    E* all = rows + b * count * size_t(ctx.cp.size);
    return {all, all + count * size_t(ctx.cp.rank), count};
}

// Gather keys and values sequence by sequence, so that the keys of one sequence lie side by side.
template <typename T, typename S>
Keys<T> gather_keys(Ctx<S>& ctx, const Qkv<T>& x) {
    const Batch& b = ctx.batch;
    size_t KV = ctx.shape.NKV * ctx.shape.HS;
    T* keys = static_cast<T*>(ctx.context.scratch);

    for (size_t i = 0; i < b.B; i++) {
        // Copy this rank's rows to their place in the gathered sequence.
        SequenceRows<T> rows = sequence_rows(ctx, keys, i);
        size_t first = i * b.T * x.kv_stride;
        pack_keys(ctx, rows.mine, x.k + first, x.v + first, x.kv_stride, b.T);
        all_gather(ctx.cp, rows.all, rows.mine, rows.count, ctx.where);
    }

    // Return them as attention reads them: each row is a key and its value.
    size_t Tk = b.T * size_t(ctx.cp.size);
    return {keys, keys + KV, b.key_positions, Tk, 2 * KV};
}

// Return the room for the gradients of all ranks' keys and values: it follows them in the scratch.
template <typename T, typename S>
acc_t<T>* key_gradients(const Ctx<S>& ctx, const Keys<T>& keys) { // (B,cp,t,2,KV) {+cp}
    size_t bytes = ctx.batch.B * keys.Tk * keys.stride * sizeof(T);
    char* scratch = static_cast<char*>(ctx.context.scratch);
    return reinterpret_cast<acc_t<T>*>(scratch + round_up(bytes, 256));
}

// Sum the partial gradients of all ranks; the sums for this rank's rows become dk and dv.
template <typename T, typename S>
void scatter_key_gradients(Ctx<S>& ctx, const Qkv<T>& dx, acc_t<T>* gradients) {
    size_t t = ctx.batch.T;
    for (size_t i = 0; i < ctx.batch.B; i++) {
        SequenceRows<acc_t<T>> rows = sequence_rows(ctx, gradients, i);
        size_t first = i * t * dx.kv_stride;

        // Sum in place, in float, then round once.
        reduce_scatter_sum(ctx.cp, rows.mine, rows.all, rows.count, ctx.where);
        round_keys(ctx, dx.k + first, dx.v + first, dx.kv_stride, rows.mine, t);
    }
}

// Attention of this rank's queries with all keys, by gather or in a ring. Queries and keys come
// rotated. Positions decide what a query sees, wherever its keys come from. A rank that shares no
// keys, as one rank alone or with Ulysses, has all keys of its heads.
template <typename T, typename S>
void text_forward(Ctx<S>& ctx, T* out, acc_t<T>* lse, const Qkv<T>& x, // (B,t,NH,HS) (B,NH,t)
                  T* cache) {
    bool alone = ctx.cp.size == 1;
    bool ring = !alone && ctx.context.method == ContextMethod::RING;
    if (ring) return ring_forward(ctx, out, lse, x);
    Keys<T> keys = alone ? keys_seen(ctx, cache, x.k, x.v, x.kv_stride) : gather_keys(ctx, x);
    AttentionOperands<T> operands = attention_operands(ctx, x.q, x.q_stride, keys);
    attention_forward(out, lse, operands, ctx.blas, ctx.where);
}
template <typename T, typename S>
void text_backward(Ctx<S>& ctx, const Qkv<T>& dx, const T* dout, const T* out, // (B,t,NH,HS)
                   const acc_t<T>* lse, const Qkv<T>& x) {
    bool alone = ctx.cp.size == 1;
    bool ring = !alone && ctx.context.method == ContextMethod::RING;
    if (ring) return ring_backward(ctx, dx, dout, out, lse, x);

    // The forward pass has kept this rank's keys alone: gather all keys again.
    Keys<T> keys =
        alone ? keys_seen<T>(ctx, nullptr, x.k, x.v, x.kv_stride) : gather_keys(ctx, x);
    AttentionOperands<T> operands = attention_operands(ctx, x.q, x.q_stride, keys);
    operands.dout = dout;

    // A rank with all queries makes whole gradients, any other a part of each.
    if (alone)
        return attention_backward(dx.q, dx.k, dx.v, out, lse, operands, ctx.blas, ctx.where);
    acc_t<T>* dk = key_gradients(ctx, keys);
    acc_t<T>* dv = dk + ctx.shape.NKV * ctx.shape.HS;
    attention_backward(dx.q, dk, dv, out, lse, operands, ctx.blas, ctx.where);
    scatter_key_gradients(ctx, dx, dk);
}

// The same with prefix and sinks, if there are any. Every rank has all of these, and joins them to
// its own queries. The gradients of its rows are partial sums {+cp}, as those of weights are.
template <typename T, typename S>
void keys_forward(Ctx<S>& ctx, T* out, acc_t<T>* lse, const Qkv<T>& x, // (B,t,NH,HS) (B,NH,t)
                  const Sinks<T>& sinks, T* cache = nullptr) {
    text_forward(ctx, out, lse, x, cache);
    AttentionOperands<T> operands = attention_operands<T>(ctx, x.q, x.q_stride, {});
    join_keys(out, lse, operands, ctx.prefix, sinks, ctx.where);
}
template <typename T, typename S>
void keys_backward(Ctx<S>& ctx, const Qkv<T>& dx, const T* dout, const T* out, // (B,t,NH,HS)
                   const acc_t<T>* lse, const Qkv<T>& x, const Sinks<T>& sinks) {
    text_backward(ctx, dx, dout, out, lse, x);
    AttentionOperands<T> operands = attention_operands<T>(ctx, x.q, x.q_stride, {});
    operands.dout = dout;
    join_keys_backward(dx.q, out, lse, operands, ctx.prefix, sinks, ctx.where);
}

// ----------------------------------------------------------------------------
// Ulysses: all heads of this rank's rows become some heads of all rows, and later return

// Send the rows of each sequence to the ranks that attend with their heads. Part h of the columns
// goes to rank h; with `copies`, the same part goes to ranks h * copies to (h + 1) * copies - 1. to
// (B,T,part) is dense; rows (B,t,width) lie `stride` elements apart.
template <typename T, typename S>
void rows_to_heads(Ctx<S>& ctx, T* to, T* sent, const T* rows, size_t stride, size_t width,
                   size_t copies = 1) {
    size_t cp = size_t(ctx.context.heads.size);
    size_t t = ctx.batch.T;
    size_t part = width * copies / cp;
    size_t bytes = part * sizeof(T);
    for (size_t b = 0; b < ctx.batch.B; b++) {
        // Lay each rank's columns side by side, so that a message is one piece.
        const T* from = rows + b * t * stride;
        for (size_t h = 0; h < cp; h++) {
            T* block = sent + h * t * part;
            const T* columns = from + h / copies * part;
            copy_rows(block, bytes, columns, stride * sizeof(T), bytes, t, ctx.where);
        }
        all_to_all(ctx.context.heads, to + b * t * part * cp, sent, t * part, ctx.where);
    }
}

// Add the gradients that several ranks made for the same part, in rank order, into the first one.
template <typename T, typename S>
void add_copies(T* parts, size_t count, size_t copies, S where) { // (copies,count)
    std::vector<const void*> ins;
    for (size_t i = 0; i < copies; i++)
        ins.push_back(parts + i * count);
    void* sum = parts;
    reduce_ranks<T, false>(&sum, 1, ins.data(), int(copies), count, where);
}

// The reverse of rows_to_heads(): fill rows (B,t,width) from `from` (B,T,part). With `copies`,
// these are gradients that several ranks made for one part: their sum returns.
template <typename T, typename S>
void heads_to_rows(Ctx<S>& ctx, T* rows, size_t stride, T* received, const T* from, size_t width,
                   size_t copies = 1) {
    size_t cp = size_t(ctx.context.heads.size);
    size_t t = ctx.batch.T;
    size_t part = width * copies / cp;
    size_t bytes = part * sizeof(T);
    for (size_t b = 0; b < ctx.batch.B; b++) {
        // Bring back what every rank has made of this rank's rows.
        all_to_all(ctx.context.heads, received, from + b * t * part * cp, t * part, ctx.where);

        // Put each rank's columns at their place in a row.
        T* to = rows + b * t * stride;
        for (size_t h = 0; h < cp; h += copies) {
            T* block = received + h * t * part;
            T* columns = to + h / copies * part;
            if (copies > 1)
                add_copies(block, t * part, copies, ctx.where);
            copy_rows(columns, stride * sizeof(T), block, bytes, bytes, t, ctx.where);
        }
    }
}

// Exchange queries, keys and values. Returns dense rows of this rank's share of the heads.
template <typename T, typename S>
Qkv<T> exchange_heads(Ctx<S>& ctx, const HeadRooms& room, const Qkv<T>& x) {
    // Use one send buffer for all three: each exchange is over before the next one packs.
    size_t Q = ctx.shape.NH * ctx.shape.HS;
    size_t KV = ctx.shape.NKV * ctx.shape.HS;
    size_t copies = key_copies(ctx.shape, room.ranks);
    T* base = static_cast<T*>(ctx.context.scratch);
    T* sent = base + room.sent;
    rows_to_heads(ctx, base + room.q, sent, x.q, x.q_stride, Q);
    rows_to_heads(ctx, base + room.k, sent, x.k, x.kv_stride, KV, copies);
    rows_to_heads(ctx, base + room.v, sent, x.v, x.kv_stride, KV, copies);
    // Rows now lie in the order of the ranks.
    size_t width = KV * copies / room.ranks;
    return {base + room.q, base + room.k, base + room.v, Q / room.ranks, width};
}

// The parts of a context that differ between the two exchanges: some heads, rows of several ranks.
struct SharedHeads {
    Shape shape;
    Batch batch;
    Comm cp; // the ranks that share the keys of these heads
    void* context;
    const float* slopes;
    PrefixRows prefix;
};

// Exchange these parts with the context's. A second call restores the context.
template <typename S>
void swap_heads(Ctx<S>& ctx, SharedHeads& heads) {
    // Swap field by field: a whole context has handles, which cannot be copied.
    std::swap(ctx.shape, heads.shape);
    std::swap(ctx.batch, heads.batch);
    std::swap(ctx.cp, heads.cp);
    std::swap(ctx.context.scratch, heads.context);
    std::swap(ctx.slopes, heads.slopes);
    std::swap(ctx.prefix, heads.prefix);
}

// Return the rows of a prefix with this rank's share of the heads alone. Their gradients add to
// what clear_prefix() has left.
template <typename T, typename S>
PrefixRows share_of_prefix(const Ctx<S>& ctx, size_t ranks, size_t key_heads) {
    PrefixRows p = ctx.prefix;
    if (!p.k) return p;
    typedef acc_t<T> A;

    // Skip the heads of the ranks before. Ranks with copies of a head share its part.
    size_t part = size_t(ctx.context.heads.rank) / key_copies(ctx.shape, ranks);
    size_t first = part * key_heads * ctx.shape.HS;
    p.stride = ctx.shape.NKV * ctx.shape.HS;
    p.accumulate = true;
    p.k = static_cast<const T*>(p.k) + first;
    p.v = static_cast<const T*>(p.v) + first;
    if (!p.dk) return p;
    p.dk = static_cast<A*>(p.dk) + first;
    p.dv = static_cast<A*>(p.dv) + first;
    return p;
}

// Clear the prefix's gradients before the first micro-batch adds to them: this rank adds only for
// its own heads, and the other heads must hold 0.
template <typename T, typename S>
void clear_prefix(const Ctx<S>& ctx) {
    const PrefixRows& p = ctx.prefix;
    if (!p.dk || p.accumulate) return;
    size_t bytes = p.n * ctx.shape.NKV * ctx.shape.HS * sizeof(acc_t<T>);
    device_zero(p.dk, bytes, ctx.where);
    device_zero(p.dv, bytes, ctx.where);
}

// The sinks of this rank's share of the heads, where the shape is that of the share. It makes the
// gradients of these heads; the others' stay 0.
template <typename T, typename S>
Sinks<T> share_of_sinks(const Ctx<S>& ctx, Sinks<T> sinks) {
    // Ranks have equal shares, in order.
    size_t first = ctx.shape.NH * size_t(ctx.context.heads.rank);
    if (sinks.logits) sinks.logits += first;
    if (sinks.sums) sinks.sums += first;
    return sinks;
}
template <typename T, typename S>
void clear_sinks(const Ctx<S>& ctx, const Sinks<T>& sinks) {
    if (!sinks.sums) return;
    // Other ranks fill in the columns of their own heads.
    size_t bytes = sink_parts(ctx.where) * sinks.stride * sizeof(acc_t<T>);
    device_zero(sinks.sums, bytes, ctx.where);
}

// Return this rank's share of the heads, and the rows of all ranks that exchange heads.
template <typename T, typename S>
SharedHeads share_heads(Ctx<S>& ctx, const HeadRooms& room) {
    SharedHeads h = {share_of_heads(ctx.shape, room.ranks), ctx.batch, ctx.context.keys,
                     ctx.context.scratch, ctx.slopes, {}};
    h.prefix = share_of_prefix<T>(ctx, room.ranks, h.shape.NKV);
    // Take the ALiBi slopes of these heads: a slope belongs to its head.
    if (h.slopes)
        h.slopes += h.shape.NH * size_t(ctx.context.heads.rank);
    h.batch.T *= room.ranks;

    // Find these rows' positions among the positions of all keys: in a ring they are adjacent; with
    // gather, each sequence has its own.
    bool ring = ctx.context.method == ContextMethod::RING;
    size_t bytes = h.batch.T * sizeof(int);
    size_t stride = ring ? bytes : bytes * size_t(ctx.context.keys.size);
    size_t first = size_t(ctx.context.keys.rank) * (ring ? h.batch.rows() : h.batch.T);
    const int* key_positions = ctx.batch.key_positions + first;
    const int* key_documents = ctx.batch.key_documents + first;

    // Copy positions and documents after the rooms; scratch for other ranks' keys comes next.
    size_t used = round_up(room.end * sizeof(T), 256);
    char* free = static_cast<char*>(ctx.context.scratch) + used;
    int* positions = reinterpret_cast<int*>(free); // (B,u,t)
    int* documents = positions + h.batch.rows();   // (B,u,t)
    copy_rows(positions, bytes, key_positions, stride, bytes, h.batch.B, ctx.where);
    copy_rows(documents, bytes, key_documents, stride, bytes, h.batch.B, ctx.where);
    h.batch.positions = positions;
    h.batch.doc_start = documents;
    h.context = static_cast<char*>(ctx.context.scratch) + head_bytes<T>(room, ctx.batch.rows());
    return h;
}

// Attention by Ulysses' exchange.
// lse (B,NH/u,u t) belongs to this rank's share of the heads; it is as many numbers as (B,NH,t).
template <typename T, typename S>
void ulysses_forward(Ctx<S>& ctx, T* out, acc_t<T>* lse, const Qkv<T>& x, // (B,t,NH,HS)
                     const Sinks<T>& sinks) {
    size_t ranks = size_t(ctx.context.heads.size);
    HeadRooms room = head_rooms(ctx.shape, ranks, ctx.batch.rows(), ctx.batch.T, false);
    Qkv<T> mine = exchange_heads(ctx, room, x);
    T* base = static_cast<T*>(ctx.context.scratch);

    // Attend with these heads, over the keys of the other ranks too.
    SharedHeads heads = share_heads<T>(ctx, room);
    swap_heads(ctx, heads);
    keys_forward(ctx, base + room.out, lse, mine, share_of_sinks(ctx, sinks));
    swap_heads(ctx, heads);

    // Return to all heads of this rank's own rows.
    size_t Q = ctx.shape.NH * ctx.shape.HS;
    heads_to_rows(ctx, out, Q, base + room.sent, base + room.out, Q);
}

// Backward of Ulysses. Gradients return rotated, as the inputs came.
template <typename T, typename S>
void ulysses_backward(Ctx<S>& ctx, const Qkv<T>& dx, const T* dout, const T* out, // (B,t,NH,HS)
                      const acc_t<T>* lse, const Qkv<T>& x, const Sinks<T>& sinks) {
    size_t Q = ctx.shape.NH * ctx.shape.HS;
    size_t KV = ctx.shape.NKV * ctx.shape.HS;
    size_t ranks = size_t(ctx.context.heads.size);
    HeadRooms room = head_rooms(ctx.shape, ranks, ctx.batch.rows(), ctx.batch.T, true);
    Qkv<T> mine = exchange_heads(ctx, room, x);

    // Exchange the output and its gradient as well.
    T* base = static_cast<T*>(ctx.context.scratch);
    T* sent = base + room.sent;
    rows_to_heads(ctx, base + room.out, sent, out, Q, Q);
    rows_to_heads(ctx, base + room.dout, sent, dout, Q, Q);

    // Compute the gradients of these heads, over the keys of the other ranks too.
    Qkv<T> made = {base + room.dq, base + room.dk, base + room.dv, mine.q_stride, mine.kv_stride};
    const T* all_dout = base + room.dout;
    const T* all_out = base + room.out;
    clear_prefix<T>(ctx);
    clear_sinks(ctx, sinks);
    SharedHeads heads = share_heads<T>(ctx, room);
    swap_heads(ctx, heads);
    keys_backward(ctx, made, all_dout, all_out, lse, mine, share_of_sinks(ctx, sinks));
    swap_heads(ctx, heads);

    // Send each row's gradients back. A key/value head has met all queries of its heads here, so
    // only the copies are left to sum.
    size_t copies = key_copies(ctx.shape, ranks);
    heads_to_rows(ctx, dx.q, dx.q_stride, sent, made.q, Q);
    heads_to_rows(ctx, dx.k, dx.kv_stride, sent, made.k, KV, copies);
    heads_to_rows(ctx, dx.v, dx.kv_stride, sent, made.v, KV, copies);
}

// ----------------------------------------------------------------------------
// attention as blocks call it

// Rotate q and k in place, then attend: Ulysses where heads are exchanged, else gather or ring.
template <typename T, typename S>
void context_attention_forward(Ctx<S>& ctx, T* out, acc_t<T>* lse, // (B,t,NH,HS) (B,NH,t)
                               const Qkv<T>& x, T* cache, const Sinks<T>& sinks = {}) {
    RopeHeads<T> q = {x.q, ctx.shape.NH, x.q_stride};
    RopeHeads<T> k = {x.k, ctx.shape.NKV, x.kv_stride};
    rotate_forward(ctx, q, k);
    if (ctx.context.heads.size > 1)
        return ulysses_forward(ctx, out, lse, x, sinks);
    keys_forward(ctx, out, lse, x, sinks, cache);
}

// x is rotated, as the forward pass left it; dx is the gradient of x before its rotation.
template <typename T, typename S>
void context_attention_backward(Ctx<S>& ctx, const Qkv<T>& dx, const T* dout, // (B,t,NH,HS)
                                const T* out, const acc_t<T>* lse, // (B,t,NH,HS) (B,NH,t)
                                const Qkv<T>& x, const Sinks<T>& sinks = {}) {
    if (ctx.context.heads.size > 1)
        ulysses_backward(ctx, dx, dout, out, lse, x, sinks);
    else
        keys_backward(ctx, dx, dout, out, lse, x, sinks);

    RopeHeads<T> dq = {dx.q, ctx.shape.NH, dx.q_stride};
    RopeHeads<T> dk = {dx.k, ctx.shape.NKV, dx.kv_stride};
    rotate_backward(ctx, dq, dk);
}

} // namespace llmc
