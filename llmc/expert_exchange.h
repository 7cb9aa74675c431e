// expert_exchange.h - expert parallelism that sends a token only where it goes - arXiv:2101.03961
//   A token's row travels once to each rank that has an expert the token chose, however many of
//   that rank's experts want it. Counts are whatever the router makes them, zero included.
//   1. LISTS    every rank has all ranks' choices (expert_parallel.h, 2), so each one knows what
//               the others send: no message carries counts
//   2. SEND     this rank's rows to each rank that wants them              all-to-all, unequal
//               beside the ffn for all tokens, if the block has one (expert_parallel.h)
//   3. EXPERTS  as with gather: rows lie at their tokens' places; the other places are not read
//   4. RETURN   the partial outputs of those rows to their owner           all-to-all, unequal
//               which adds them in the order of ranks
//      backward  gradients travel the same two ways; W sends x and dout again
//   Sums have the terms of the gathered form in the same order, without the zeros: the same bits.
//   A token's K experts among E lie on D(K) ranks. A rank sends N (D(K) - own) rows where gather
//   sends (ep-1) N: with even loads, the share 1 - (E-E/ep choose K) / (E choose K) of them.
//   Room is planned for all rows, so no routing can fail: 2 ep N C elements more than the gathered
//   form. On a GPU the host reads the choices before it sends, and waits for them.
#pragma once
#include <algorithm>
#include <vector>
#include "tensor_parallel.h"

namespace llmc {

// The choices of all ranks, where the host can read them.
struct HostChoices {
    const int* ids;         // (ep,N,K)
    std::vector<int> copy;  // on a GPU: what `ids` points to
    size_t N, K, experts;   // tokens of a rank, experts of a token and of a rank
};
// Return the choices; on a GPU the host waits for them.
template <typename S>
HostChoices host_choices(Ctx<S>& ctx, const int* ids) { // (ep,N,K)
    // On the CPU, use the choices in place; from a GPU, copy them and wait.
    size_t N = routed_rows(ctx);
    size_t K = ctx.shape.K;
    HostChoices c = {ids, {}, N, K, ctx.shape.E / ctx.shape.expert_ranks};
    if constexpr (!std::is_same_v<S, Cpu>) {
        c.copy.resize(size_t(ctx.ep.size) * N * K);
        copy_out(c.copy.data(), ids, c.copy.size() * sizeof(int), ctx.where);
        wait_for(ctx.where);
        c.ids = c.copy.data();
    }
    return c;
}

// Whether a token chose an expert of rank `server`; rank `owner` has the token.
inline bool is_wanted(const HostChoices& c, size_t owner, size_t token, size_t server) {
    const int* chosen = c.ids + (owner * c.N + token) * c.K;
    // Rank r has `experts` experts, from r * experts on.
    auto lies_there = [&](int e) { return size_t(e) / c.experts == server; };
    return std::any_of(chosen, chosen + c.K, lies_there);
}

// Call f(first, count, before) for each run of neighbouring tokens of `owner` that `server` wants;
// `before` counts the wanted tokens ahead of the run. Returns the number of wanted tokens.
template <typename F>
size_t for_each_wanted(const HostChoices& c, size_t owner, size_t server, F f) {
    // Both ends of a message walk over the same choices, so they agree.
    size_t wanted = 0;
    for (size_t n = 0; n < c.N;) {
        // Extend the run as far as it goes: neighbours are copied together.
        size_t first = n;
        while (n < c.N && is_wanted(c, owner, n, server)) n++;
        size_t count = n - first;
        if (count) f(first, count, wanted);
        wanted += count;
        n += count == 0;
    }
    return wanted;
}

// Pack the wanted rows side by side; or, with `back`, put them at their tokens' places.
// Returns their number.
template <typename T, typename S>
size_t pack_wanted(Ctx<S>& ctx, T* packed, T* rows, const HostChoices& c, // (n,C) (N,C)
                   size_t owner, size_t server, bool back) {
    // Each run of neighbours is one copy.
    size_t C = ctx.shape.C;
    size_t bytes = C * sizeof(T);
    return for_each_wanted(c, owner, server, [&](size_t first, size_t count, size_t before) {
        // The packed side has no gaps.
        T* there = packed + before * C;
        T* here = rows + first * C;
        copy_rows(back ? here : there, bytes, back ? there : here, bytes, bytes, count, ctx.where);
    });
}

// The two halves of the exchange's scratch.
template <typename T, typename S>
T* sent_rows(Ctx<S>& ctx) { // (ep,N,C)
    return static_cast<T*>(ctx.exchange_rows);
}
template <typename T, typename S>
T* received_rows(Ctx<S>& ctx) { // (ep,N,C)
    return sent_rows<T>(ctx) + size_t(ctx.ep.size) * routed_rows(ctx) * ctx.shape.C;
}

// Add the message between a pair of ranks, unless it is empty: both ends know its size.
template <typename T>
void add_rows(std::vector<CommMessage>& messages, T* rows, size_t count, size_t C, size_t peer,
              bool send) {
    // A pair has one message each way, so it needs no tag.
    if (count) messages.push_back({rows, count * C * sizeof(T), int(peer), send});
}

// Send a message of the experts' ranks that the layer waits for. All of them go by the stream
// beside: a communicator whose calls come from two streams has no order of its own.
template <typename S, typename F>
void send_beside(Ctx<S>& ctx, F message) { // message(stream)
    if (ctx.ep.size == 1) return message(ctx.where);
    wait_point(record_point(ctx.where), ctx.beside);
    message(ctx.beside);
    wait_point(record_point(ctx.beside), ctx.where);
}

// The rows of all ranks' tokens, on their way.
template <typename T, typename S> struct TokensComing {
    const T* all = nullptr;   // (ep,N,C) good once they have arrived
    bool travel = false;      // false: they are there
    Pending<S> pending = {};
    T* places = nullptr;      // (ep,N,C) `all`, if the rows arrive packed
    HostChoices choices = {}; // that say where packed rows belong
};

// Start to send this rank's rows to the ranks that want them, and to receive those that it wants.
template <typename T, typename S>
TokensComing<T, S> send_tokens(Ctx<S>& ctx, T* all, const T* rows, // (ep,N,C) (N,C)
                               const int* ids) {                   // (ep,N,K)
    // Copy this rank's own rows: they need no message.
    HostChoices c = host_choices(ctx, ids);
    size_t me = size_t(ctx.ep.rank);
    size_t C = ctx.shape.C;
    size_t part = c.N * C;
    T* mine = all + me * part;
    copy_rows(mine, C * sizeof(T), rows, C * sizeof(T), C * sizeof(T), c.N, ctx.where);

    // Pack the rows to send, and count the rows to receive.
    std::vector<CommMessage> messages;
    auto no_copy = [](size_t, size_t, size_t) {};
    for (size_t r = 0; r < size_t(ctx.ep.size); r++) {
        if (r == me) continue;
        T* sent = sent_rows<T>(ctx) + r * part;
        T* received = received_rows<T>(ctx) + r * part;
        add_rows(messages, sent, pack_wanted(ctx, sent, mine, c, me, r, false), C, r, true);
        add_rows(messages, received, for_each_wanted(c, r, me, no_copy), C, r, false);
    }

    // Leave once the rows are packed, on the stream beside.
    wait_point(record_point(ctx.where), ctx.beside);
    int count = int(messages.size());
    Pending<S> pending = start_exchange(ctx.ep, messages.data(), count, ctx.beside);
    return {all, true, std::move(pending), all, std::move(c)};
}

// Put the received rows at their tokens' places.
template <typename T, typename S>
void place_tokens(Ctx<S>& ctx, const TokensComing<T, S>& coming) {
    size_t part = coming.choices.N * ctx.shape.C;
    size_t me = size_t(ctx.ep.rank);
    for (size_t r = 0; r < size_t(ctx.ep.size); r++) {
        if (r == me) continue;
        T* received = received_rows<T>(ctx) + r * part;
        pack_wanted(ctx, received, coming.places + r * part, coming.choices, r, me, true);
    }
}

// Send the partial outputs of other ranks' rows to their owners,
// and add up those of this rank's rows. `partial` is overwritten.
template <typename T, typename S>
void return_tokens(Ctx<S>& ctx, T* out, T* partial, const int* ids) { // (N,C) (ep,N,C) (ep,N,K)
    HostChoices c = host_choices(ctx, ids);
    size_t me = size_t(ctx.ep.rank);
    size_t C = ctx.shape.C;
    size_t part = c.N * C;

    // Pack the rows of each owner. Each server returns the rows that it was sent.
    std::vector<CommMessage> messages;
    auto no_copy = [](size_t, size_t, size_t) {};
    for (size_t r = 0; r < size_t(ctx.ep.size); r++) {
        if (r == me) continue;
        T* sent = sent_rows<T>(ctx) + r * part;
        T* received = received_rows<T>(ctx) + r * part;
        size_t leaving = pack_wanted(ctx, sent, partial + r * part, c, r, me, false);
        add_rows(messages, sent, leaving, C, r, true);
        add_rows(messages, received, for_each_wanted(c, me, r, no_copy), C, r, false);
    }
    int count = int(messages.size());
    send_beside(ctx, [&](S beside) { exchange(ctx.ep, messages.data(), count, beside); });

    // Overwrite the other ranks' rows, which are sent, with what came back for this rank's rows. A
    // rank that was sent nothing adds zero.
    std::vector<const void*> parts;
    for (size_t r = 0; r < size_t(ctx.ep.size); r++) {
        T* rows = partial + r * part;
        parts.push_back(rows);
        if (r == me) continue;
        device_zero(rows, part * sizeof(T), ctx.where);
        pack_wanted(ctx, received_rows<T>(ctx) + r * part, rows, c, me, r, true);
    }
    void* sum = out;
    reduce_ranks<T, false>(&sum, 1, parts.data(), ctx.ep.size, part, ctx.where);
}

// Return the share of gather's rows that is sent when loads are even.
inline double exchanged_share(const Shape& s, size_t ranks) {
    // Multiply the chances that each of a token's K experts,
    // drawn one after the other, lies elsewhere.
    double none = 1;
    double others = double(s.E - s.E / ranks);
    for (size_t i = 0; i < s.K; i++)
        none *= std::max(others - double(i), 0.0) / double(s.E - i);
    return 1 - none;
}

} // namespace llmc
