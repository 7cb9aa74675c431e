// expert_exchange.h - expert parallelism that sends a token only where it goes - arXiv:2101.03961
//   A token's row travels once to each rank that has an expert the token chose, however many of
//   that rank's experts want it. Counts are whatever the router makes them, zero included.
//   1. LISTS    every rank has all ranks' choices (expert_parallel.h, 2), so each one lists what
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
//   form. On a GPU the host reads the counts before it sends, and waits for them. One launch packs
//   a message's rows, and one puts them in their places.
#pragma once
#include <algorithm>
#include <vector>
#include "moe.cuh"
#include "tensor_parallel.h"

namespace llmc {

// The tokens that travel between this rank and the others, on the device.
struct TravelLists {
    int* leaving;  // (ep,N) this rank's tokens that rank r wants
    int* arriving; // (ep,N) rank r's tokens that this rank wants
    int* counts;   // (2,ep) how many of each list
};
// Return the bytes of the workspace that they take.
inline size_t travel_bytes(size_t ranks, size_t N) { return 2 * ranks * (N + 1) * sizeof(int); }

// List the tokens. The lists are good until the workspace's next use.
template <typename S>
TravelLists list_tokens(Ctx<S>& ctx, const int* ids) { // (ep,N,K)
    size_t ranks = size_t(ctx.ep.size);
    size_t N = routed_rows(ctx);
    size_t K = ctx.shape.K;
    LLMC_CHECK(travel_bytes(ranks, N) <= ctx.blas.scratch_bytes,
               "lists of %zu tokens on %zu ranks do not fit the %zu bytes that the plan gave them",
               N, ranks, ctx.blas.scratch_bytes);
    int* leaving = static_cast<int*>(ctx.blas.scratch);
    int* arriving = leaving + ranks * N;
    int* counts = arriving + ranks * N;

    // Both ends of a message walk over the same choices, so they agree.
    TokenLists of = {ranks, N, K, ctx.shape.E / ranks, 0};
    const int* mine = ids + size_t(ctx.ep.rank) * N * K;
    list_tokens(leaving, counts, mine, of, ctx.where);
    of.stride = N * K;
    of.only = ctx.ep.rank;
    list_tokens(arriving, counts + ranks, ids, of, ctx.where);
    return {leaving, arriving, counts};
}

// How many rows go to each rank and come from it.
struct TravelCounts {
    std::vector<int> leaving, arriving; // [rank]
};
// Return the counts; on a GPU the host waits for them.
template <typename S>
TravelCounts read_counts(Ctx<S>& ctx, const TravelLists& lists) {
    size_t ranks = size_t(ctx.ep.size);
    std::vector<int> all(2 * ranks);
    copy_out(all.data(), lists.counts, all.size() * sizeof(int), ctx.where);
    auto second = all.begin() + long(ranks);
    return {{all.begin(), second}, {second, all.end()}};
}

// Pack the rows of listed tokens side by side, and put them back at their tokens' places.
template <typename T, typename S>
void pack_rows(Ctx<S>& ctx, T* packed, const T* rows, const int* tokens, const int* count, // (n,C)
               int n) {
    size_t C = ctx.shape.C;
    if (n) gather_slots(packed, rows, tokens, count, size_t(n), 1, C, ctx.where);
}
template <typename T, typename S>
void place_rows(Ctx<S>& ctx, T* rows, const T* packed, const int* tokens, const int* count, // (N,C)
                int n) {
    size_t C = ctx.shape.C;
    if (n) scatter_slots(rows, packed, tokens, count, size_t(n), 1, C, ctx.where);
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
    const int* ids = nullptr; // (ep,N,K) the choices that say where packed rows belong
    std::vector<int> counts = {}; // [rank] packed rows
};

// Start to send this rank's rows to the ranks that want them, and to receive those that it wants.
template <typename T, typename S>
TokensComing<T, S> send_tokens(Ctx<S>& ctx, T* all, const T* rows, // (ep,N,C) (N,C)
                               const int* ids) {                   // (ep,N,K)
    // Copy this rank's own rows: they need no message.
    size_t me = size_t(ctx.ep.rank);
    size_t N = routed_rows(ctx);
    size_t C = ctx.shape.C;
    size_t part = N * C;
    copy_rows(all + me * part, C * sizeof(T), rows, C * sizeof(T), C * sizeof(T), N, ctx.where);

    // Pack the rows to send.
    TravelLists lists = list_tokens(ctx, ids);
    TravelCounts n = read_counts(ctx, lists);
    std::vector<CommMessage> messages;
    for (size_t r = 0; r < size_t(ctx.ep.size); r++) {
        if (r == me) continue;
        T* sent = sent_rows<T>(ctx) + r * part;
        T* received = received_rows<T>(ctx) + r * part;
        pack_rows(ctx, sent, rows, lists.leaving + r * N, lists.counts + r, n.leaving[r]);
        add_rows(messages, sent, size_t(n.leaving[r]), C, r, true);
        add_rows(messages, received, size_t(n.arriving[r]), C, r, false);
    }

    // Leave once the rows are packed, on the stream beside.
    wait_point(record_point(ctx.where), ctx.beside);
    int count = int(messages.size());
    Pending<S> pending = start_exchange(ctx.ep, messages.data(), count, ctx.beside);
    return {all, true, std::move(pending), all, ids, std::move(n.arriving)};
}

// Put the received rows at their tokens' places.
template <typename T, typename S>
void place_tokens(Ctx<S>& ctx, const TokensComing<T, S>& coming) {
    // List the tokens again: the workspace has served others since they left.
    TravelLists lists = list_tokens(ctx, coming.ids);
    size_t ranks = size_t(ctx.ep.size);
    size_t N = routed_rows(ctx);
    size_t part = N * ctx.shape.C;
    for (size_t r = 0; r < ranks; r++) {
        if (r == size_t(ctx.ep.rank)) continue;
        place_rows(ctx, coming.places + r * part, received_rows<T>(ctx) + r * part,
                   lists.arriving + r * N, lists.counts + ranks + r, coming.counts[r]);
    }
}

// Send the partial outputs of other ranks' rows to their owners,
// and add up those of this rank's rows. `partial` is overwritten.
template <typename T, typename S>
void return_tokens(Ctx<S>& ctx, T* out, T* partial, const int* ids) { // (N,C) (ep,N,C) (ep,N,K)
    TravelLists lists = list_tokens(ctx, ids);
    TravelCounts n = read_counts(ctx, lists);
    size_t ranks = size_t(ctx.ep.size);
    size_t me = size_t(ctx.ep.rank);
    size_t N = routed_rows(ctx);
    size_t C = ctx.shape.C;
    size_t part = N * C;

    // Pack the rows of each owner. Each server returns the rows that it was sent.
    std::vector<CommMessage> messages;
    for (size_t r = 0; r < ranks; r++) {
        if (r == me) continue;
        T* sent = sent_rows<T>(ctx) + r * part;
        T* received = received_rows<T>(ctx) + r * part;
        pack_rows(ctx, sent, partial + r * part, lists.arriving + r * N, lists.counts + ranks + r,
                  n.arriving[r]);
        add_rows(messages, sent, size_t(n.arriving[r]), C, r, true);
        add_rows(messages, received, size_t(n.leaving[r]), C, r, false);
    }
    int count = int(messages.size());
    send_beside(ctx, [&](S beside) { exchange(ctx.ep, messages.data(), count, beside); });

    // Overwrite the other ranks' rows, which are sent, with what came back for this rank's rows. A
    // rank that was sent nothing adds zero.
    std::vector<const void*> parts;
    for (size_t r = 0; r < ranks; r++) {
        T* rows = partial + r * part;
        parts.push_back(rows);
        if (r == me) continue;
        device_zero(rows, part * sizeof(T), ctx.where);
        place_rows(ctx, rows, received_rows<T>(ctx) + r * part, lists.leaving + r * N,
                   lists.counts + r, n.leaving[r]);
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
