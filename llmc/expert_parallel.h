// expert_parallel.h - experts shared out over data-parallel ranks - arXiv:2006.16668
//   ep neighbouring ranks, which see different tokens, share out each block's E experts. Rank r
//   has experts [r E/ep, (r+1) E/ep), each whole or, under tensor parallelism, its part of F. For
//   all but the experts' rows these are data-parallel ranks. A rank has N tokens, each K experts.
//   Whole experts beside tensor parallelism (--etp 1) have its ranks in these groups too: each of
//   them routes the rows that it has of the residual stream, and N counts these.
//   1. ROUTE     each rank chooses for its own tokens
//   2. GATHER    ids, gates [N] -> [ep N], x [N] -> [ep N]     all-gather
//   3. EXPERTS   this rank's own, on all tokens; rows are sorted by expert, then by rank and token,
//                as one rank would have them
//   4. SUM       out [ep N]{partial} -> [N]                    reduce-scatter
//      backward  dout gathered, dx and the gates' gradients summed; W gathers dout and x again
//   An expert's gradient then already covers the tokens of ep ranks. It is summed over the
//   dp cp / ep ranks that hold the same experts, and ZeRO's shards lie on these, too. No factor is
//   needed: a loss is a sum over tokens, scaled once at the head.
//   A rank may receive min(K, E/ep) rows of each of ep N tokens and has room for all of them. On
//   average it receives N K, so activations are planned ep min(K, E/ep) / K times as large. Unequal
//   loads cost time, never memory; --recompute ffn keeps the rows of one layer only. With a
//   capacity a rank receives at most about factor N K rows, and has room for these
//   (expert_capacity.cuh).
//   Rounds bring the room down without a drop: the worst case is worked off in --expert-rounds
//   equal parts, one after the other, and only one part has room. Inner rows are never kept:
//   backward makes each round's again, once for its input half and once for W, 5/3 of the experts'
//   forward products more. The number of rounds is fixed, so no host waits for counts; a round
//   that finds no rows ends at once. Tokens are gathered once a pass, for all rounds.
//   A block's ffn for all tokens, its shared expert, needs no other rank. Its products run while
//   tokens travel: forward gate and up, backward what leads to their gradients, in W all three.
//   All else is on the critical path. With --ep-method exchange, steps 2 and 4 move only rows that
//   some expert wants (expert_parallel.h).
//   Cost of a block and micro-batch: a rank sends (ep-1) N C elements twice forward, four times
//   backward, and (ep-1) N K ids and gates.
#pragma once
#include "comm/comm.h"
#include "comm/group.h"
#include "model.h"
#include "ops/memory.h"
#include "ops/moe.cuh"
#include "ops/types.h"
#include "tensor_parallel.h"
#include <algorithm>
#include <numeric>
#include <vector>

namespace llmc {

// ----------------------------------------------------------------------------
// expert parallelism that sends a token only where it goes - arXiv:2101.03961
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
    if (ctx.ep.size == 1)
        return message(ctx.where);
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

// How much of everything a rank has room for. A slot is one token's choice of one expert.
// On one rank, groups are experts and rows are slots.
struct ExpertCounts {
    size_t experts; // of this rank
    size_t groups;  // of the sort: one for each own expert, and one for all slots without a row
    size_t tokens;  // of all ranks that share out the experts
    size_t slots;   // of those tokens: K each
    size_t rows;    // at most, in a round: a token chooses an expert once
    size_t rounds;  // that have room for all rows
};
// The most sequences that a group of `tokens` neighbours meets. Groups follow each other, and
// those of whole experts may begin and end within a sequence.
inline size_t sequences_met(const Shape& s, size_t tokens) {
    size_t T = s.capacity.T;
    size_t step = std::gcd(tokens, T); // places within a sequence at which groups begin
    return 1 + ceil_div(tokens - step, T);
}
inline ExpertCounts expert_counts(const Shape& s, size_t rows_of_batch) {
    size_t N = routed_rows(s, rows_of_batch);
    size_t experts = s.E / s.expert_ranks;
    bool limited = s.capacity.slots > 0;
    size_t groups = experts + (s.expert_ranks > 1 || limited);
    size_t tokens = N * s.expert_ranks;
    size_t rows = tokens * std::min(s.K, experts);
    // Each sequence fills each of the experts up to its capacity.
    if (limited) rows = std::min(rows, sequences_met(s, tokens) * experts * s.capacity.slots);

    // Rounds are equal. With more rounds than rows, each has one row.
    size_t all = rows;
    rows = ceil_div(all, s.expert_rounds);
    return {experts, groups, tokens, tokens * s.K, rows, ceil_div(all, rows)};
}

// The elements of the buffer of slots' rows, and where a round's inner rows begin in it. Buffers
// 0, 1 and 2 are those of gate, up and swiglu.
inline size_t inner_rows(const Shape& s, const ExpertCounts& n, size_t buffer) {
    constexpr size_t ALIGNED = 128; // 256 bytes of the narrowest type
    size_t outer = round_up(n.rows * s.C, ALIGNED);
    return outer + buffer * round_up(n.rows * s.F, ALIGNED);
}
inline size_t slot_room(const Shape& s, const ExpertCounts& n) {
    return n.rounds == 1 ? n.rows * s.C : inner_rows(s, n, 3);
}

// The parts of the buffer of tokens. Without rounds one part serves in turn for all; rounds need
// inputs, sums and the outputs' gradients side by side.
enum class Tokens : uint8_t { INPUT, SUM, GRADIENT };
inline size_t token_parts(const Shape& s, const ExpertCounts& n, bool trains) {
    if (n.rounds == 1) return s.expert_ranks > 1;
    if (s.expert_ranks > 1) return trains ? 3 : 2;
    // The input: where it was gathered over tp, the sums will lie.
    return s.row_ranks > 1 && !s.whole_experts;
}
template <typename T, typename S>
T* token_part(Ctx<S>& ctx, Tokens part) { // (ep,N,C)
    const Shape& s = ctx.shape;
    ExpertCounts n = expert_counts(s, ctx.batch.rows());
    size_t before = n.rounds == 1 ? 0 : size_t(part) * n.tokens * s.C;
    return static_cast<T*>(ctx.token_rows) + before;
}

// Start to gather the rows of all ranks' tokens into the layer's scratch. What the caller runs
// until finish_tokens() runs beside that; one gather at a time is under way.
// On one rank nothing is copied: the rows stay where they are, unless rounds overwrite them.
template <typename T, typename S>
TokensComing<T, S> start_tokens(Ctx<S>& ctx, const T* rows, const int* ids, // (N,C) (ep,N,K)
                                Tokens part) {
    bool overwritten = part == Tokens::INPUT && ctx.token_rows;
    if (ctx.ep.size == 1 && !overwritten)
        return {rows};
    T* all = token_part<T>(ctx, part);
    if (ctx.ep.size == 1) {
        size_t bytes = ctx.shape.C * sizeof(T);
        copy_rows(all, bytes, rows, bytes, bytes, routed_rows(ctx), ctx.where);
        return {all};
    }

    // With --ep-method exchange, rows that no expert here wants are never sent nor read.
    if (ctx.exchange_rows)
        return send_tokens(ctx, all, rows, ids);
    size_t part_size = routed_rows(ctx) * ctx.shape.C;
    wait_point(record_point(ctx.where), ctx.beside);
    return {all, true, start_all_gather(ctx.ep, all, rows, part_size, ctx.beside)};
}

// Wait for the rows; they are good until the scratch's next use. A second call waits for nothing.
template <typename T, typename S>
const T* finish_tokens(Ctx<S>& ctx, TokensComing<T, S>& coming) { // (ep,N,C)
    if (!coming.travel) return coming.all;
    finish(coming.pending);
    coming.travel = false;
    // Make the stream of compute wait for what has arrived.
    wait_point(record_point(ctx.beside), ctx.where);
    if (coming.places) place_tokens(ctx, coming);
    return coming.all;
}
template <typename T, typename S>
const T* gather_tokens(Ctx<S>& ctx, const T* rows, const int* ids, Tokens part) {
    TokensComing<T, S> coming = start_tokens(ctx, rows, ids, part);
    return finish_tokens(ctx, coming);
}

// Sum over ranks in two calls: write your partial result for all tokens to partial_tokens(), then
// sum_tokens() reduces it into `out`. On one rank the two are one buffer.
template <typename T, typename S>
T* partial_tokens(Ctx<S>& ctx, T* out) { // (ep,N,C) for (N,C)
    return ctx.ep.size == 1 ? out : token_part<T>(ctx, Tokens::SUM);
}
template <typename T, typename S>
void sum_tokens(Ctx<S>& ctx, T* out, T* partial, const int* ids) { // (N,C) of (ep,N,C) {+ep}
    // Return the partial rows the way their tokens came.
    bool exchanges = ctx.ep.size > 1 && ctx.exchange_rows;
    if (exchanges) return return_tokens(ctx, out, partial, ids);
    size_t count = routed_rows(ctx) * ctx.shape.C;
    send_beside(ctx, [&](S beside) { reduce_scatter_sum(ctx.ep, out, partial, count, beside); });
}

// Return this rank's part of a table that holds all ranks' slots side by side.
template <typename A, typename S>
A* my_slots(const Ctx<S>& ctx, A* all) { // (N,K) of (ep,N,K)
    return all + size_t(ctx.ep.rank) * routed_rows(ctx) * ctx.shape.K;
}

// All-gather the routers' choices and gates of all ranks, in place.
template <typename A, typename S>
void gather_choices(Ctx<S>& ctx, int* ids, A* gates) { // (ep,N,K) each
    size_t n = routed_rows(ctx) * ctx.shape.K;
    send_beside(ctx, [&](S beside) {
        all_gather(ctx.ep, ids, my_slots(ctx, ids), n, beside);
        all_gather(ctx.ep, gates, my_slots(ctx, gates), n, beside);
    });
}

// Sum the gates' gradients in place:
// the rank of a slot's expert has its gradient, other ranks have zero.
template <typename A, typename S>
void sum_gates(Ctx<S>& ctx, A* dgates) { // (ep,N,K) {+ep}
    size_t n = routed_rows(ctx) * ctx.shape.K;
    A* mine = my_slots(ctx, dgates);
    send_beside(ctx, [&](S beside) { reduce_scatter_sum(ctx.ep, mine, dgates, n, beside); });
}

// Sort all slots by this rank's experts; slots of other ranks' experts come last. starts[e] is
// where expert e begins, and this rank's experts have starts[experts] rows in all.
template <typename S>
void sort_own_slots(Ctx<S>& ctx, const Slots& slots, const int* ids) { // (ep,N,K)
    const Shape& s = ctx.shape;
    ExpertCounts n = expert_counts(s, ctx.batch.rows());
    if (ctx.ep.size == 1)
        return sort_slots(slots, ids, n.slots, n.groups, ctx.where);

    // Give this rank's experts numbers from 0.
    int* own = static_cast<int*>(ctx.blas.scratch); // (ep,N,K)
    own_experts(own, ids, n.slots, size_t(ctx.ep.rank) * n.experts, n.experts, ctx.where);
    sort_slots(slots, own, n.slots, n.groups, ctx.where);
}

} // namespace llmc
