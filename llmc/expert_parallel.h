// expert_parallel.h - experts shared out over data-parallel ranks - arXiv:2006.16668
//   ep neighbouring ranks, which see different tokens, share out each block's E experts. Rank r
//   has experts [r E/ep, (r+1) E/ep), each whole or, under tensor parallelism, its part of F. For
//   all but the experts' rows these are data-parallel ranks. A rank has N tokens, each K experts.
//   With whole experts (--etp 1) tensor-parallel ranks are in these groups too: each of them routes
//   the rows that it has of the residual stream, and N counts these.
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
//   A block's ffn for all tokens, its shared expert, needs no other rank. Its products run while
//   tokens travel: forward gate and up, backward what leads to their gradients, in W all three.
//   All else is on the critical path. With --ep-method exchange, steps 2 and 4 move only rows that
//   some expert wants.
//   Blocks call these functions whatever the layout is: in a group of size 1 they send nothing. The
//   same holds for capacity, whole experts and adapters, which blocks do not name either.
//   Cost of a block and micro-batch: a rank sends (ep-1) N C elements twice forward, four times
//   backward, and (ep-1) N K ids and gates.
#pragma once
#include "comm/comm.h"
#include "comm/group.h"
#include "context.h"
#include "model.h"
#include "ops/elementwise.cuh"
#include "ops/expert_capacity.cuh"
#include "ops/grouped_matmul.cuh"
#include "ops/grouped_mma.cuh"
#include "ops/linear.cuh"
#include "ops/lora_grouped.cuh"
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
//   1. LISTS    every rank has all ranks' choices (2 above), so each one lists what the others
//               send: no message carries counts
//   2. SEND     this rank's rows to each rank that wants them              all-to-all, unequal
//               while the ffn for all tokens runs, if the block has one
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
    size_t K = ctx.shape.experts.K;
    LLMC_CHECK(travel_bytes(ranks, N) <= ctx.blas.scratch_bytes,
               "lists of %zu tokens on %zu ranks do not fit the %zu bytes that the plan gave them",
               N, ranks, ctx.blas.scratch_bytes);
    int* leaving = static_cast<int*>(ctx.blas.scratch);
    int* arriving = leaving + ranks * N;
    int* counts = arriving + ranks * N;

    // Both ends of a message walk over the same choices, so they agree.
    TokenLists of = {ranks, N, K, ctx.shape.experts.E / ranks, 0};
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
    if (n)
        gather_slots(packed, rows, tokens, count, size_t(n), 1, ctx.shape.C, ctx.where);
}
template <typename T, typename S>
void place_rows(Ctx<S>& ctx, T* rows, const T* packed, const int* tokens, const int* count, // (N,C)
                int n) {
    if (n)
        scatter_slots(rows, packed, tokens, count, size_t(n), 1, ctx.shape.C, ctx.where);
}

// The two halves of the exchange's scratch.
template <typename T, typename S>
T* sent_rows(Ctx<S>& ctx) { // (ep,N,C)
    return static_cast<T*>(ctx.experts.exchange_rows);
}
template <typename T, typename S>
T* received_rows(Ctx<S>& ctx) { // (ep,N,C)
    return sent_rows<T>(ctx) + size_t(ctx.ep.size) * routed_rows(ctx) * ctx.shape.C;
}

// Add the message between a pair of ranks, unless it is empty: both ends know its size.
template <typename T>
void add_row_message(std::vector<CommMessage>& messages, T* rows, size_t count, size_t C,
                     size_t peer, bool send) {
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
        add_row_message(messages, sent, size_t(n.leaving[r]), C, r, true);
        add_row_message(messages, received, size_t(n.arriving[r]), C, r, false);
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
        add_row_message(messages, sent, size_t(n.arriving[r]), C, r, true);
        add_row_message(messages, received, size_t(n.leaving[r]), C, r, false);
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
    const ExpertShape& e = s.experts;
    // Multiply the chances that each of a token's K experts, drawn in turn, lies elsewhere.
    double none = 1;
    double others = double(e.E - e.E / ranks);
    for (size_t i = 0; i < e.K; i++)
        none *= std::max(others - double(i), 0.0) / double(e.E - i);
    return 1 - none;
}

// How much of everything a rank has room for. A slot is one token's choice of one expert.
// On one rank, groups are experts and rows are slots.
struct ExpertCounts {
    size_t experts; // of this rank
    size_t groups;  // of the sort: one for each own expert, and one for all slots without a row
    size_t tokens;  // of all ranks that share out the experts
    size_t slots;   // of those tokens: K each
    size_t rows;    // at most: a token chooses an expert once
};
// The most sequences that a group of `tokens` neighbours meets. Groups follow each other, and
// those of whole experts may begin and end within a sequence.
inline size_t sequences_met(const Shape& s, size_t tokens) {
    size_t T = s.experts.capacity.T;
    size_t step = std::gcd(tokens, T); // places within a sequence at which groups begin
    return 1 + ceil_div(tokens - step, T);
}
inline ExpertCounts expert_counts(const Shape& s, size_t rows_of_batch) {
    const ExpertShape& e = s.experts;
    size_t N = routed_rows(s, rows_of_batch);
    size_t experts = e.E / e.ranks;
    bool limited = e.capacity.slots > 0;
    size_t groups = experts + (e.ranks > 1 || limited);
    size_t tokens = N * e.ranks;
    size_t rows = tokens * std::min(e.K, experts);
    // Each sequence fills each of the experts up to its capacity.
    if (limited) rows = std::min(rows, sequences_met(s, tokens) * experts * e.capacity.slots);
    return {experts, groups, tokens, tokens * e.K, rows};
}

// The counts of this rank's layer.
template <typename S>
ExpertCounts expert_counts(const Ctx<S>& ctx) {
    return expert_counts(ctx.shape, ctx.batch.rows());
}

// How many rows this rank's experts have: 1 int on the device, where the last expert ends.
template <typename S>
const int* rows_here(const Ctx<S>& ctx, const Slots& slots) {
    return slots.starts + expert_counts(ctx).experts;
}

// Start to gather the rows of all ranks' tokens into the layer's scratch. What the caller runs
// until finish_tokens() runs beside that; one gather at a time is under way.
// On one rank nothing is copied: the rows stay where they are.
template <typename T, typename S>
TokensComing<T, S> start_tokens(Ctx<S>& ctx, const T* rows, const int* ids) { // (N,C) (ep,N,K)
    T* all = static_cast<T*>(ctx.experts.token_rows); // (ep,N,C)
    if (ctx.ep.size == 1)
        return {rows};

    // With --ep-method exchange, rows that no expert here wants are never sent nor read.
    if (ctx.experts.exchange_rows)
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
const T* gather_tokens(Ctx<S>& ctx, const T* rows, const int* ids) {
    TokensComing<T, S> coming = start_tokens(ctx, rows, ids);
    return finish_tokens(ctx, coming);
}

// Sum over ranks in two calls: write your partial result for all tokens to partial_tokens(), then
// sum_tokens() reduces it into `out`. On one rank the two are one buffer.
template <typename T, typename S>
T* partial_tokens(Ctx<S>& ctx, T* out) { // (ep,N,C) for (N,C)
    return ctx.ep.size == 1 ? out : static_cast<T*>(ctx.experts.token_rows);
}
template <typename T, typename S>
void sum_tokens(Ctx<S>& ctx, T* out, T* partial, const int* ids) { // (N,C) of (ep,N,C) {+ep}
    // Return the partial rows the way their tokens came.
    bool exchanges = ctx.ep.size > 1 && ctx.experts.exchange_rows;
    if (exchanges) return return_tokens(ctx, out, partial, ids);
    size_t count = routed_rows(ctx) * ctx.shape.C;
    send_beside(ctx, [&](S beside) { reduce_scatter_sum(ctx.ep, out, partial, count, beside); });
}

// Return this rank's part of a table that holds all ranks' slots side by side.
template <typename A, typename S>
A* my_slots(const Ctx<S>& ctx, A* all) { // (N,K) of (ep,N,K)
    return all + size_t(ctx.ep.rank) * routed_rows(ctx) * ctx.shape.experts.K;
}

// All-gather the routers' choices and gates of all ranks, in place.
template <typename A, typename S>
void gather_choices(Ctx<S>& ctx, int* ids, A* gates) { // (ep,N,K) each
    size_t n = routed_rows(ctx) * ctx.shape.experts.K;
    send_beside(ctx, [&](S beside) {
        all_gather(ctx.ep, ids, my_slots(ctx, ids), n, beside);
        all_gather(ctx.ep, gates, my_slots(ctx, gates), n, beside);
    });
}

// Sum the gates' gradients in place: the rank of a slot's expert has its gradient, others 0.
template <typename A, typename S>
void sum_gates(Ctx<S>& ctx, A* dgates) { // (ep,N,K) {+ep}
    size_t n = routed_rows(ctx) * ctx.shape.experts.K;
    A* mine = my_slots(ctx, dgates);
    send_beside(ctx, [&](S beside) { reduce_scatter_sum(ctx.ep, mine, dgates, n, beside); });
}

// Sort all slots by this rank's experts; slots of other ranks' experts come last. starts[e] is
// where expert e begins, and this rank's experts have starts[experts] rows in all.
template <typename S>
void sort_own_slots(Ctx<S>& ctx, const Slots& slots, const int* ids) { // (ep,N,K)
    ExpertCounts n = expert_counts(ctx);
    if (ctx.ep.size == 1)
        return sort_slots(slots, ids, n.slots, n.groups, ctx.where);

    // Give this rank's experts numbers from 0.
    int* own = static_cast<int*>(ctx.blas.scratch); // (ep,N,K)
    own_experts(own, ids, n.slots, size_t(ctx.ep.rank) * n.experts, n.experts, ctx.where);
    sort_slots(slots, own, n.slots, n.groups, ctx.where);
}

// ----------------------------------------------------------------------------
// the rows of a block's second branch

// Whether the second branch reads all N rows: whole experts alone read those of this rank.
inline bool reads_all_rows(const Shape& s) { return s.experts.ffn_beside || !s.experts.whole; }

// The rows as the branch's parts read them.
template <typename T> struct BranchRows {
    const T* routed; // (n,C) for the experts
    const T* all;    // (N,C) for the ffn
};
template <typename T>
BranchRows<T> branch_rows(const Shape& s, const T* own, const T* all) { // (R,C) (N,C)
    return {s.experts.whole ? own : all, all};
}

// Gather the rows into `room`.
template <typename T, typename S>
BranchRows<T> gather_branch_rows(Ctx<S>& ctx, T* room, const T* own) { // (N,C) (R,C)
    const T* all = reads_all_rows(ctx.shape) ? gather_rows(ctx, room, own) : nullptr;
    return branch_rows(ctx.shape, own, all);
}
// The same, into the layer's scratch.
template <typename T, typename S>
BranchRows<T> gather_branch_rows(Ctx<S>& ctx, T* own) { // (R,C)
    T* room = static_cast<T*>(ctx.all_rows);
    const T* rows = own;
    return gather_branch_rows(ctx, room, rows);
}
// The same rows again: the first call's room still holds them.
template <typename T>
BranchRows<T> gathered_branch_rows(const Shape& s, const T* room, const T* own) { // (N,C) (R,C)
    return branch_rows(s, own, s.rank.rows == 1 ? own : room);
}

// ----------------------------------------------------------------------------
// choices of experts

// Whether choices are kept apart from the slots that experts take: a capacity drops some, and whole
// experts know those of all rows, as what counts a sequence's choices must.
inline bool keeps_choices(const Shape& s) { return s.experts.capacity.slots || s.experts.whole; }

// The choices of all N rows, whether or not the experts have room for them. kept: null, or where
// they are kept apart.
template <typename S>
int* all_choices(const Ctx<S>& ctx, int* ids, int* kept) { // (N,K) of (ep,N,K)
    return kept ? kept : my_slots(ctx, ids);
}

// The choices of the rows that this rank routes.
template <typename S>
int* my_choices(const Ctx<S>& ctx, int* all) { // (n,K) of (N,K)
    return all + first_routed(ctx) * ctx.shape.experts.K;
}

// With whole experts each tensor-parallel rank routes its own rows: all-gather the choices.
template <typename S>
void share_choices(Ctx<S>& ctx, int* all, const int* own) { // (N,K) (n,K)
    size_t n = routed_rows(ctx);
    if (n < ctx.batch.rows())
        all_gather(ctx.tp, all, own, n * ctx.shape.experts.K, ctx.where);
}

// Count the choices of all rows, where the step counts loads.
template <typename S>
void count_loads(Ctx<S>& ctx, const int* choices) { // (N,K)
    const Shape& s = ctx.shape;
    if (ctx.experts.loads)
        count_slots(ctx.experts.loads, choices, 1, ctx.batch.rows() * s.experts.K, s.experts.E,
                    true, ctx.where);
}

// Leave what experts have room for in the ids of this rank's rows, and add the rest of all rows to
// the step's count.
template <typename S>
void take_choices(Ctx<S>& ctx, int* ids, const int* choices) { // (n,K) (N,K)
    const Shape& s = ctx.shape;
    size_t M = ctx.batch.rows() * s.experts.K;
    size_t length = ctx.batch.T * s.experts.K; // slots of a sequence
    if (s.experts.capacity.slots) {
        // The loads of all blocks come first.
        int* dropped = ctx.experts.loads ? ctx.experts.loads + s.L * s.experts.E : nullptr; // (E)
        int* room = static_cast<int*>(ctx.blas.scratch);            // (N,K)
        int* taken = s.experts.whole ? room : ids;
        drop_over_capacity(taken, dropped, choices, M, length, s.experts.E,
                           s.experts.capacity.slots, ctx.where);
        choices = taken;
    }

    // Whole experts have decided on all rows: keep this rank's.
    if (!s.experts.whole) return;
    const int* own = choices + first_routed(ctx) * s.experts.K; // (n,K)
    size_t bytes = routed_rows(ctx) * s.experts.K * sizeof(int);
    copy_rows(ids, bytes, own, bytes, bytes, 1, ctx.where);
}

// Widen the choice's bias to float, whatever the type of the weights; null without one.
template <typename T, typename S>
const float* widen_choice_bias(Ctx<S>& ctx, const Weight& choice_bias) { // (E)
    size_t E = ctx.shape.experts.E;
    float* bias = static_cast<float*>(ctx.blas.scratch);
    if (!choice_bias.data) return nullptr;
    round_rows(bias, E, choice_bias.as<const T>(), E, 1, E, ctx.where);
    return bias;
}

// Nothing trains the choice's bias, so its gradient is zero.
template <typename T, typename S>
void zero_choice_bias_gradient(Ctx<S>& ctx, const Weight& choice_bias, bool accumulate) {
    size_t bytes = ctx.shape.experts.E * sizeof(acc_t<T>);
    if (choice_bias.grad && !accumulate) device_zero(choice_bias.grad, bytes, ctx.where);
}

// Count each sequence's choices of each expert, on all context-parallel ranks that share it.
template <typename S>
const int* sequence_counts(Ctx<S>& ctx, const int* choices) { // (B,E) of (N,K)
    const Shape& s = ctx.shape;
    int* counts = static_cast<int*>(ctx.blas.scratch);
    if (s.experts.balance <= 0) return counts; // nobody reads them
    count_slots(counts, choices, ctx.batch.B, ctx.batch.T * s.experts.K, s.experts.E, false,
                ctx.where);
    all_reduce_sum(ctx.cp, counts, ctx.batch.B * s.experts.E, ctx.where);
    return counts;
}

// The balance terms that this rank adds. Of the tensor-parallel ranks that route the same rows only
// the first adds them.
template <typename S>
BalanceTerms balance_terms(const Ctx<S>& ctx, const int* counts) { // (B,E)
    // A term is a mean over the sequences of the step, and over the tokens of each.
    const Shape& s = ctx.shape;
    size_t ranks = size_t(ctx.cp.size);
    size_t T = ctx.batch.T * ranks;
    double tokens = double(ctx.sequences) * double(T);
    if (ctx.tp.rank > 0 && !s.experts.whole)
        return {};
    return {
        s.experts.balance / tokens, 2 * s.experts.z_loss / tokens, counts, T, ctx.loss_scale, ranks,
        first_routed(ctx)};
}

// ----------------------------------------------------------------------------
// products of this rank's experts, each followed by those of its adapters

// Gather the rows of the slots' tokens into the buffer of slots, ctx.experts.slot_rows.
template <typename T, typename S>
T* gather_slots(Ctx<S>& ctx, const Slots& slots, const T* tokens) { // (M,C) of (ep,N,C)
    // The token of a slot is its number over K.
    const Shape& s = ctx.shape;
    T* rows = static_cast<T*>(ctx.experts.slot_rows);
    gather_slots(rows, tokens, slots.slot_of, rows_here(ctx, slots), expert_counts(ctx).slots,
                 s.experts.K, s.C, ctx.where);
    return rows;
}

// A stack of this rank's experts, as the grouped products take it.
template <typename S>
Groups groups_of(const Ctx<S>& ctx, const Slots& slots, const Weight& stack) {
    ExpertCounts n = expert_counts(ctx);
    return {slots.starts, n.experts, stack.rows / n.experts, stack.cols, n.rows};
}

// out = inp W^T
template <typename T, typename S>
void stack_forward(Ctx<S>& ctx, T* out, const T* inp, const Weight& stack, // (M,OC) (M,IC)
                   const Slots& slots) {
    Groups g = groups_of(ctx, slots, stack);
    const T* w = stack.as<const T>();
    T* room = lora_room<T>(ctx.blas);
    grouped_forward(out, inp, w, g, false, ctx.blas, ctx.where);
    if (stack.lora)
        lora_grouped_forward(out, inp, *stack.lora, room, g, ctx.blas, ctx.where);
}

// dinp = or += dout W
template <typename T, typename S>
void stack_backward_input(Ctx<S>& ctx, T* dinp, const T* dout, const Weight& stack, // (M,IC) (M,OC)
                          const Slots& slots, bool accumulate) {
    Groups g = groups_of(ctx, slots, stack);
    const T* w = stack.as<const T>();
    T* room = lora_room<T>(ctx.blas);
    grouped_backward_input(dinp, dout, w, g, accumulate, ctx.blas, ctx.where);
    if (stack.lora)
        lora_grouped_backward_input(dinp, dout, *stack.lora, room, g, ctx.blas, ctx.where);
}

// dW = or += dout^T inp
template <typename T, typename S>
void stack_backward_weight(Ctx<S>& ctx, const Weight& stack, const T* dout, const T* inp,
                           const Slots& slots, bool accumulate) { // (M,OC) (M,IC)
    Groups g = groups_of(ctx, slots, stack);
    acc_t<T>* dw = grad_of<T>(stack);
    T* room = lora_room<T>(ctx.blas);
    if (dw)
        grouped_backward_weight(dw, dout, inp, g, accumulate, ctx.blas, ctx.where);
    if (stack.lora)
        lora_grouped_backward_weight(*stack.lora, dout, inp, room, g, accumulate, ctx.blas,
                                     ctx.where);
}

// ----------------------------------------------------------------------------
// the sum of a block's second branch: residual + the ffn for all tokens + each token's experts
//   BranchSum<T> sum = begin_sum(ctx, out, residual);
//   T* place = first_place(ctx, sum); ...; fill_place(ctx, sum, place);     an ffn, if there is one
//   add_experts(ctx, sum, y, slots);
//   finish_sum(ctx, sum, ids);

template <typename T> struct BranchSum {
    T* out;            // (R,C)
    T* partial;        // (n,C) {+tp}
    T* all;            // (ep,n,C) {+ep} {+tp}
    const T* residual; // (R,C) what one rank adds to each row
    bool begun;        // `all` holds an ffn and the residual for this rank's own tokens
};

// The place for what experts add to the rows that this rank routes, before tensor-parallel ranks
// sum it. Whole experts leave them nothing to sum.
template <typename T, typename S>
T* partial_of_experts(Ctx<S>& ctx, T* out) { // (n,C) for (R,C)
    return ctx.shape.experts.whole ? out : partial_rows(ctx, out);
}
template <typename T, typename S>
BranchSum<T> begin_sum(Ctx<S>& ctx, T* out, const T* residual) { // (R,C) (R,C)
    T* partial = partial_of_experts(ctx, out);
    return {out, partial, partial_tokens(ctx, partial), residual, false};
}

// The place (N,C) {+tp} where an ffn and the residual begin the sum: this rank's own tokens.
template <typename T, typename S>
T* first_place(Ctx<S>& ctx, const BranchSum<T>& sum) {
    if (ctx.shape.experts.whole) return partial_rows(ctx, sum.out);
    return sum.all + size_t(ctx.ep.rank) * ctx.batch.rows() * ctx.shape.C;
}
// Whole experts wait for the ffn's sum over ranks, and add to that.
template <typename T, typename S>
void fill_place(Ctx<S>& ctx, BranchSum<T>& sum, const T* place) {
    sum.begun = !ctx.shape.experts.whole;
    if (sum.begun) return;
    sum_rows(ctx, sum.out, place);
    sum.residual = sum.out;
}

// Add the experts' outputs to the rows of their tokens. A token's own rank begins with the
// residual, as in row_parallel_forward, or with the ffn that has it.
template <typename T, typename S>
void add_experts(Ctx<S>& ctx, const BranchSum<T>& sum, const T* y, const Slots& slots) { // (M,C)
    const Shape& s = ctx.shape;
    size_t parts = s.experts.whole ? 1 : s.rank.rows;
    size_t R = stream_rows(ctx);
    for (size_t i = 0; i < s.experts.ranks * parts; i++) {
        // The residual of a token is added by its own rank. Among tensor-parallel ranks that is the
        // row's owner under sequence parallelism, otherwise the first rank.
        bool own_tokens = i / parts == size_t(ctx.ep.rank);
        bool own_rows = parts > 1 ? i % parts == size_t(ctx.tp.rank)
                                  : ctx.tp.rank == 0 || s.experts.whole;
        bool adds = own_tokens && own_rows;
        const int* row_of = slots.row_of + i * R * s.experts.K;
        T* to = sum.all + i * R * s.C;
        const T* before = adds ? sum.residual : nullptr;

        // The experts add to the ffn in place.
        if (own_tokens && sum.begun) before = to;
        combine_slots(to, before, y, row_of, rows_here(ctx, slots), R, s.experts.K, s.C, ctx.where);
    }
}

// Sum over the ranks that share out experts, then over those that cut them.
template <typename T, typename S>
void finish_sum(Ctx<S>& ctx, const BranchSum<T>& sum, const int* ids) { // (ep,n,K)
    const Shape& s = ctx.shape;
    sum_tokens(ctx, sum.partial, sum.all, ids);
    if (!s.experts.whole) return sum_rows(ctx, sum.out, sum.partial);

    // Whole experts have the sum. Where all ranks have all rows, the first one's bits are theirs.
    if (s.rank.rows > 1) return;
    size_t bytes = ctx.batch.rows() * s.C * sizeof(T);
    if (ctx.tp.rank > 0)
        device_zero(sum.out, bytes, ctx.where);
    sum_rows(ctx, sum.out, sum.out);
}

// Backward: the partial sum over tensor-parallel ranks to which the ffn's parts are added, after
// experts have written theirs to `own`. Whole experts have written sums, which a row's owner adds.
template <typename T, typename S>
T* partial_behind_experts(Ctx<S>& ctx, T* own) { // (N,C) {+tp} for (R,C)
    size_t C = ctx.shape.C;
    size_t bytes = stream_rows(ctx) * C * sizeof(T);
    T* partial = partial_rows(ctx, own);
    if (!ctx.shape.experts.whole || !ctx.shape.experts.ffn_beside) return partial;
    device_zero(partial, ctx.batch.rows() * C * sizeof(T), ctx.where);
    copy_rows(my_rows(ctx, partial), bytes, own, bytes, bytes, 1, ctx.where);
    return partial;
}
template <typename T, typename S>
void sum_behind_experts(Ctx<S>& ctx, T* own, const T* partial) { // (R,C) of (N,C) {+tp}
    if (reads_all_rows(ctx.shape)) sum_rows(ctx, own, partial);
}

} // namespace llmc
