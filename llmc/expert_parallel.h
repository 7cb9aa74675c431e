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
//   some expert wants (expert_exchange.h).
//   Cost of a block and micro-batch: a rank sends (ep-1) N C elements twice forward, four times
//   backward, and (ep-1) N K ids and gates.
#pragma once
#include <numeric>
#include "expert_exchange.h"

namespace llmc {

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
    if (ctx.ep.size == 1 && !overwritten) return {rows};
    T* all = token_part<T>(ctx, part);
    if (ctx.ep.size == 1) {
        size_t bytes = ctx.shape.C * sizeof(T);
        copy_rows(all, bytes, rows, bytes, bytes, routed_rows(ctx), ctx.where);
        return {all};
    }

    // With --ep-method exchange, rows that no expert here wants are never sent nor read.
    if (ctx.exchange_rows) return send_tokens(ctx, all, rows, ids);
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
