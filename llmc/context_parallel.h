// context_parallel.h - context parallelism: cut sequences - arXiv:2407.21783, arXiv:2309.14509
//   cp ranks share every sequence: each has t = T/cp rows of it, N = B t of a micro-batch. In all
//   but attention they are data-parallel ranks: the count of targets, losses, REDUCE and ZeRO's
//   shards go over dp x cp ranks, as sums.
//   1. LOAD       reads whole sequences, targets and documents too, then keeps a rank's rows:
//                   zigzag      chunks r and 2cp-1-r of 2cp; each rank has the same causal work
//                   contiguous  [r t, (r+1) t); the last rank has nearly twice the mean
//                   striped     r, r+cp, ...; nearly the same work, of many documents too
//   2. gather     k, v [t] -> [T]   all-gather; then this rank's t queries meet all T keys
//      backward   k, v [t] -> [T]   all-gather again, so that nothing is kept of other ranks
//                 dk, dv [T]{partial} -> [t]   reduce-scatter in float, rounded once
//   3. Ulysses    q, k, v [t, heads] -> [T, heads/cp]   all-to-all; attention of some heads, whole
//                 out [T, heads/cp] -> [t, heads]       all-to-all
//      backward   q, k, v, out, dout the one way, dq, dk, dv the other; its sums need no message
//   4. ring       k, v [t] go from rank to rank beside attention (ring_attention.h)
//   5. hybrids    u neighbours of cp do as Ulysses and have [u t, heads/u]; cp/u ranks then share
//                 these keys by gather or in a ring (arXiv:2405.07719)
//   Positions and documents' starts go with the rows, so nothing else asks which rows a rank has.
//   Every message is on the critical path, but for the ring's.
//   Cost of a block and micro-batch. Gather: a rank sends 2 (cp-1) N KV elements forward, and
//   backward as many again and as many floats; scratch: 2 B T KV elements, and in training as many
//   floats, which keep 16-bit runs off the tensor cores in attention's backward pass. Ulysses: a
//   rank sends (cp-1)/cp N (2 Q + 2 KV) elements forward, (cp-1)/cp N (4 Q + 4 KV) backward, for it
//   exchanges its inputs anew; scratch: about twice that, at most. cp must divide the heads. Where
//   key/value heads are fewer, several ranks take the same one, KV counts for cp of them, and their
//   owner adds up the gradients in rank order, in float. A hybrid sends the sum of its two, each at
//   its own size; its scratch has both.
#pragma once
#include "attention_merge.cuh"
#include "context.h"
#include "layout.h"
#include "ring_attention.h"

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

// Ulysses' ranks that take the same key/value head, neighbours where these are fewer than ranks.
inline size_t key_copies(const Shape& s, size_t ranks) {
    return std::max(ranks / s.NKV, size_t(1));
}

// The shape behind Ulysses' exchange among `ranks`: a share of the heads.
inline Shape share_of_heads(Shape s, size_t ranks) {
    // Key/value heads may be fewer than ranks: some then have the same one.
    size_t copies = key_copies(s, ranks);
    s.NKV = s.NKV * copies / ranks;
    s.NH /= ranks;
    return s;
}

// Whether Ulysses can give each of cp ranks an equal share of a model's heads, tp having its own.
inline bool cp_divides(const Shape& s, size_t tp, size_t cp) {
    // Where tp ranks share a key/value head, each has one.
    size_t key_heads = std::max(s.NKV / tp, size_t(1));
    bool shares_keys = key_heads % cp == 0 || cp % key_heads == 0;
    return s.NH % (tp * cp) == 0 && shares_keys;
}

// The sizes of attention on a rank, for its workspace.
inline AttentionDims context_attention_shape(Shape s, const Layout& layout, size_t B, size_t T) {
    // Ulysses cuts the heads, gather the queries, a ring the keys too.
    size_t heads = size_t(heads_axis(layout).size);
    size_t queries = T / size_t(keys_axis(layout).size);
    bool ring = layout.cp_method == ContextMethod::RING;
    size_t keys = ring ? queries : T;
    return attention_shape(share_of_heads(s, heads), B, queries, keys);
}

// Ulysses' scratch, in elements from its start. Backward reads dout, and leaves dq, dk and dv.
struct HeadRooms {
    size_t q, k, v, out, dout, dq, dk, dv, sent, end;
    size_t ranks; // that exchange heads
};
inline HeadRooms head_rooms(const Shape& s, size_t ranks, size_t N, size_t t, bool trains) {
    size_t Q = s.NH * s.HS;
    size_t KV = s.NKV * s.HS * key_copies(s, ranks);
    size_t next = 0;
    auto take = [&](size_t n) {
        size_t at = next;
        next += round_up(n, size_t(128)); // 256 bytes of the narrowest type
        return at;
    };

    // Each rank's heads of all rows are as many as all heads of its rows.
    HeadRooms r = {};
    r.ranks = ranks;
    r.q = take(N * Q);
    r.k = take(N * KV);
    r.v = take(N * KV);
    r.out = take(N * Q);
    r.sent = take(t * Q); // one sequence's rows on their way
    if (trains) {
        r.dout = take(N * Q);
        r.dq = take(N * Q);
        r.dk = take(N * KV);
        r.dv = take(N * KV);
    }
    r.end = next;
    return r;
}

// Bytes of Ulysses' rooms, and behind them of its rows' positions and documents.
template <typename T>
size_t head_bytes(const HeadRooms& room, size_t N) {
    // Kernels want what lies behind at a multiple of 256 bytes.
    size_t rooms = room.end * sizeof(T);
    size_t rows = 2 * N * room.ranks * sizeof(int);
    return round_up(rooms, size_t(256)) + round_up(rows, size_t(256));
}

// Bytes of the gathered keys and values, and of their gradients behind them; or Ulysses', a ring's.
template <typename T>
size_t context_scratch_bytes(const Shape& s, const Layout& layout, size_t B, size_t tokens,
                             bool trains) {
    // Heads are exchanged first, where they are.
    size_t ranks = size_t(heads_axis(layout).size);
    size_t t = tokens / size_t(layout.cp.size);
    size_t N = B * t;
    size_t bytes = 0;
    if (ranks > 1) {
        HeadRooms room = head_rooms(s, ranks, N, t, trains);
        bytes = head_bytes<T>(room, N);
    }
    if (keys_axis(layout).size == 1) return bytes;

    // The keys of other ranks, of this rank's heads.
    Shape mine = share_of_heads(s, ranks);
    if (layout.cp_method == ContextMethod::RING)
        return bytes + ring_rooms<T>(mine, N * ranks, trains, nullptr).bytes;
    size_t n = B * tokens * 2 * mine.NKV * s.HS;
    size_t keys = round_up(n * sizeof(T), size_t(256));
    size_t gradients = n * sizeof(acc_t<T>);
    return bytes + (trains ? keys + gradients : keys);
}

// Bytes that a rank sends for attention in a block, N rows of a micro-batch each way.
struct ContextMessages {
    size_t forward, backward;
};
template <typename T>
ContextMessages heads_messages(const Shape& s, const Layout& layout, size_t N) {
    // A rank keeps its share of what it exchanges: q and out; k and v, or their copies.
    size_t ranks = size_t(heads_axis(layout).size);
    size_t copies = key_copies(s, ranks);
    size_t channels = (2 * s.NH + 2 * s.NKV * copies) * s.HS;
    size_t share = N * channels / ranks;
    size_t bytes = (ranks - 1) * share * sizeof(T);

    // Backward exchanges inputs anew, then gradients.
    return {bytes, 2 * bytes};
}
template <typename T>
ContextMessages keys_messages(const Shape& s, const Layout& layout, size_t N) {
    // Each rank's keys go to all others, and gradients come back; in a ring all the way round.
    size_t heads = size_t(heads_axis(layout).size);
    size_t ranks = size_t(keys_axis(layout).size);
    if (ranks == 1) return {0, 0};

    // A rank has a share of the heads, of all rows of those that exchanged them.
    size_t rows = N * heads;
    size_t elements = rows * 2 * share_of_heads(s, heads).NKV * s.HS;
    size_t keys = (ranks - 1) * elements * sizeof(T);
    bool ring = layout.cp_method == ContextMethod::RING;
    size_t hops = ring ? ranks : ranks - 1;
    size_t gradients = hops * elements * sizeof(acc_t<T>);
    return {keys, keys + gradients};
}
template <typename T>
ContextMessages context_messages(const Shape& s, const Layout& layout, size_t N) {
    ContextMessages heads = heads_messages<T>(s, layout, N);
    ContextMessages keys = keys_messages<T>(s, layout, N);
    return {heads.forward + keys.forward, heads.backward + keys.backward};
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

// Sum all ranks' parts of these gradients; the sums of this rank's rows become dk and dv.
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

// The forward pass has kept this rank's keys alone: gather those of all again.
template <typename T, typename S>
void gather_backward(Ctx<S>& ctx, const Qkv<T>& dx, const T* dout, const T* out, // (B,t,NH,HS)
                     const acc_t<T>* lse, const Qkv<T>& x) {
    Keys<T> keys = gather_keys(ctx, x);
    AttentionOperands<T> operands = attention_operands(ctx, x.q, x.q_stride, keys);
    operands.dout = dout;

    // Every rank's queries have met all keys: their gradients are sums over ranks.
    acc_t<T>* gradients = key_gradients(ctx, keys);
    size_t KV = ctx.shape.NKV * ctx.shape.HS;
    acc_t<T>* dv = gradients + KV;
    attention_backward(dx.q, gradients, dv, out, lse, operands, ctx.blas, ctx.where);
    scatter_key_gradients(ctx, dx, gradients);
}

// Queries and keys are rotated, and have the heads that they keep. Positions decide what a query
// sees, wherever its keys come from.
template <typename T, typename S>
void keys_forward(Ctx<S>& ctx, T* out, acc_t<T>* lse, const Qkv<T>& x) { // (B,t,NH,HS) (B,NH,t)
    // Behind Ulysses alone a rank has all keys of its heads.
    bool alone = ctx.cp.size == 1;
    bool ring = !alone && ctx.cp_method == ContextMethod::RING;
    if (ring) return ring_forward(ctx, out, lse, x);
    Keys<T> own = {x.k, x.v, ctx.batch.positions, ctx.batch.T, x.kv_stride};
    // Gathered keys lie in the scratch.
    Keys<T> keys = alone ? own : gather_keys(ctx, x);
    AttentionOperands<T> operands = attention_operands(ctx, x.q, x.q_stride, keys);
    attention_forward(out, lse, operands, ctx.blas, ctx.where);
}
template <typename T, typename S>
void keys_backward(Ctx<S>& ctx, const Qkv<T>& dx, const T* dout, const T* out, // (B,t,NH,HS)
                   const acc_t<T>* lse, const Qkv<T>& x) {
    bool alone = ctx.cp.size == 1;
    bool ring = !alone && ctx.cp_method == ContextMethod::RING;
    if (ring) return ring_backward(ctx, dx, dout, out, lse, x);
    if (!alone) return gather_backward(ctx, dx, dout, out, lse, x);

    // Its gradients are whole, too.
    Keys<T> own = {x.k, x.v, ctx.batch.positions, ctx.batch.T, x.kv_stride};
    AttentionOperands<T> operands = attention_operands(ctx, x.q, x.q_stride, own);
    operands.dout = dout;
    attention_backward(dx.q, dx.k, dx.v, out, lse, operands, ctx.blas, ctx.where);
}

// ----------------------------------------------------------------------------
// Ulysses: all heads of this rank's rows become some heads of all rows, and back

// Exchange the rows of each sequence: part h of their columns goes to rank h, or to the `copies`
// ranks from h * copies on, which have it from all ranks. to (B,T,part), dense; rows (B,t,width),
// `stride` elements apart.
template <typename T, typename S>
void rows_to_heads(Ctx<S>& ctx, T* to, T* sent, const T* rows, size_t stride, size_t width,
                   size_t copies = 1) {
    size_t cp = size_t(ctx.cp_heads.size);
    size_t t = ctx.batch.T;
    size_t part = width * copies / cp;
    size_t bytes = part * sizeof(T);
    for (size_t b = 0; b < ctx.batch.B; b++) {
        // Lay each rank's columns side by side: a message is one piece.
        const T* from = rows + b * t * stride;
        for (size_t h = 0; h < cp; h++) {
            T* block = sent + h * t * part;
            const T* columns = from + h / copies * part;
            copy_rows(block, bytes, columns, stride * sizeof(T), bytes, t, ctx.where);
        }
        all_to_all(ctx.cp_heads, to + b * t * part * cp, sent, t * part, ctx.where);
    }
}

// Add up what several ranks have made of the same part, in rank order, into the first one's.
template <typename T, typename S>
void add_copies(T* parts, size_t count, size_t copies, S where) { // (copies,count)
    std::vector<const void*> ins;
    for (size_t i = 0; i < copies; i++)
        ins.push_back(parts + i * count);
    void* sum = parts;
    reduce_ranks<T, false>(&sum, 1, ins.data(), int(copies), count, where);
}

// The way back: rows (B,t,width) of from (B,T,part). Copies are gradients: their sum comes home.
template <typename T, typename S>
void heads_to_rows(Ctx<S>& ctx, T* rows, size_t stride, T* received, const T* from, size_t width,
                   size_t copies = 1) {
    size_t cp = size_t(ctx.cp_heads.size);
    size_t t = ctx.batch.T;
    size_t part = width * copies / cp;
    size_t bytes = part * sizeof(T);
    for (size_t b = 0; b < ctx.batch.B; b++) {
        all_to_all(ctx.cp_heads, received, from + b * t * part * cp, t * part, ctx.where);

        // Put each rank's columns where they stand in a row.
        T* to = rows + b * t * stride;
        for (size_t h = 0; h < cp; h += copies) {
            T* block = received + h * t * part;
            T* columns = to + h / copies * part;
            if (copies > 1) add_copies(block, t * part, copies, ctx.where);
            copy_rows(columns, stride * sizeof(T), block, bytes, bytes, t, ctx.where);
        }
    }
}

// Bring queries, keys and values together: dense rows of this rank's heads.
template <typename T, typename S>
Qkv<T> exchange_heads(Ctx<S>& ctx, const HeadRooms& room, const Qkv<T>& x) {
    // One buffer sends all three: each has come before the next goes.
    size_t Q = ctx.shape.NH * ctx.shape.HS;
    size_t KV = ctx.shape.NKV * ctx.shape.HS;
    size_t copies = key_copies(ctx.shape, room.ranks);
    T* base = static_cast<T*>(ctx.context);
    T* sent = base + room.sent;
    rows_to_heads(ctx, base + room.q, sent, x.q, x.q_stride, Q);
    rows_to_heads(ctx, base + room.k, sent, x.k, x.kv_stride, KV, copies);
    rows_to_heads(ctx, base + room.v, sent, x.v, x.kv_stride, KV, copies);
    // Rows now lie as the ranks do, one behind the other.
    size_t width = KV * copies / room.ranks;
    return {base + room.q, base + room.k, base + room.v, Q / room.ranks, width};
}

// Attention between the two exchanges works with some heads, of the rows of several ranks.
struct SharedHeads {
    Shape shape;
    Batch batch;
    Comm cp; // the ranks that share its keys
    void* context;
    const float* slopes;
};

// Put it in the context's place; the same call puts the context back.
template <typename S>
void swap_heads(Ctx<S>& ctx, SharedHeads& heads) {
    // Field by field: a whole context has handles, which are no values.
    std::swap(ctx.shape, heads.shape);
    std::swap(ctx.batch, heads.batch);
    std::swap(ctx.cp, heads.cp);
    std::swap(ctx.context, heads.context);
    std::swap(ctx.slopes, heads.slopes);
}

// Bring together where the rows of all ranks that exchange heads stand.
template <typename T, typename S>
SharedHeads share_heads(Ctx<S>& ctx, const HeadRooms& room) {
    SharedHeads h = {share_of_heads(ctx.shape, room.ranks), ctx.batch, ctx.cp_keys, ctx.context,
                     ctx.slopes};
    // A slope belongs to its head.
    if (h.slopes)
        h.slopes += h.shape.NH * size_t(ctx.cp_heads.rank);
    h.batch.T *= room.ranks;

    // Positions of all keys hold those of these rows: in a ring side by side, gathered apart.
    bool ring = ctx.cp_method == ContextMethod::RING;
    size_t bytes = h.batch.T * sizeof(int);
    size_t stride = ring ? bytes : bytes * size_t(ctx.cp_keys.size);
    size_t first = size_t(ctx.cp_keys.rank) * (ring ? h.batch.rows() : h.batch.T);
    const int* key_positions = ctx.batch.key_positions + first;
    const int* key_documents = ctx.batch.key_documents + first;

    // They lie behind the rooms, and behind them is scratch for the keys of other ranks.
    size_t used = round_up(room.end * sizeof(T), size_t(256));
    int* positions = reinterpret_cast<int*>(static_cast<char*>(ctx.context) + used); // (B,u,t)
    int* documents = positions + h.batch.rows();                                     // (B,u,t)
    copy_rows(positions, bytes, key_positions, stride, bytes, h.batch.B, ctx.where);
    copy_rows(documents, bytes, key_documents, stride, bytes, h.batch.B, ctx.where);
    h.batch.positions = positions;
    h.batch.doc_start = documents;
    h.context = static_cast<char*>(ctx.context) + head_bytes<T>(room, ctx.batch.rows());
    return h;
}

// lse is of this rank's heads, (B,NH/u,u t): as many numbers as of its rows.
template <typename T, typename S>
void ulysses_forward(Ctx<S>& ctx, T* out, acc_t<T>* lse, const Qkv<T>& x) { // (B,t,NH,HS)
    size_t ranks = size_t(ctx.cp_heads.size);
    HeadRooms room = head_rooms(ctx.shape, ranks, ctx.batch.rows(), ctx.batch.T, false);
    Qkv<T> mine = exchange_heads(ctx, room, x);
    T* base = static_cast<T*>(ctx.context);

    // Attend with these heads, and with the keys of the other ranks.
    SharedHeads heads = share_heads<T>(ctx, room);
    swap_heads(ctx, heads);
    keys_forward(ctx, base + room.out, lse, mine);
    swap_heads(ctx, heads);

    // The block goes on with all heads of its own rows.
    size_t Q = ctx.shape.NH * ctx.shape.HS;
    heads_to_rows(ctx, out, Q, base + room.sent, base + room.out, Q);
}

// Gradients come home rotated, as the inputs left.
template <typename T, typename S>
void ulysses_backward(Ctx<S>& ctx, const Qkv<T>& dx, const T* dout, const T* out, // (B,t,NH,HS)
                      const acc_t<T>* lse, const Qkv<T>& x) {
    size_t Q = ctx.shape.NH * ctx.shape.HS;
    size_t KV = ctx.shape.NKV * ctx.shape.HS;
    size_t ranks = size_t(ctx.cp_heads.size);
    HeadRooms room = head_rooms(ctx.shape, ranks, ctx.batch.rows(), ctx.batch.T, true);
    Qkv<T> mine = exchange_heads(ctx, room, x);

    // Bring the output and its gradient to the heads.
    T* base = static_cast<T*>(ctx.context);
    T* sent = base + room.sent;
    rows_to_heads(ctx, base + room.out, sent, out, Q, Q);
    rows_to_heads(ctx, base + room.dout, sent, dout, Q, Q);

    // Walk back over the keys of all ranks.
    Qkv<T> made = {base + room.dq, base + room.dk, base + room.dv, mine.q_stride, mine.kv_stride};
    const T* all_dout = base + room.dout;
    const T* all_out = base + room.out;
    SharedHeads heads = share_heads<T>(ctx, room);
    swap_heads(ctx, heads);
    keys_backward(ctx, made, all_dout, all_out, lse, mine);
    swap_heads(ctx, heads);

    // Send each row's gradients home. A key/value head has met all queries of its heads: only
    // copies are left to sum.
    size_t copies = key_copies(ctx.shape, ranks);
    heads_to_rows(ctx, dx.q, dx.q_stride, sent, made.q, Q);
    heads_to_rows(ctx, dx.k, dx.kv_stride, sent, made.k, KV, copies);
    heads_to_rows(ctx, dx.v, dx.kv_stride, sent, made.v, KV, copies);
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
    if (ctx.cp_heads.size > 1) return ulysses_forward(ctx, out, lse, x);
    keys_forward(ctx, out, lse, x);
}

// x is as the forward pass left it, rotated; dx is the gradient of what it was before.
template <typename T, typename S>
void context_attention_backward(Ctx<S>& ctx, const Qkv<T>& dx, const T* dout, // (B,t,NH,HS)
                                const T* out, const acc_t<T>* lse, // (B,t,NH,HS) (B,NH,t)
                                const Qkv<T>& x) {
    if (ctx.cp.size == 1) return attention_backward(ctx, dx, dout, out, lse, x);
    if (ctx.cp_heads.size > 1)
        ulysses_backward(ctx, dx, dout, out, lse, x);
    else
        keys_backward(ctx, dx, dout, out, lse, x);

    RopeHeads<T> dq = {dx.q, ctx.shape.NH, dx.q_stride};
    RopeHeads<T> dk = {dx.k, ctx.shape.NKV, dx.kv_stride};
    rotate_backward(ctx, dq, dk);
}

} // namespace llmc
