// expert_parallel.h - experts shared out over data-parallel ranks - arXiv:2006.16668
//   ep neighbours among the ranks that see other tokens share out each block's E experts: rank r
//   has [r E/ep, (r+1) E/ep), whole or, under tensor parallelism, its part of each one's F. In all
//   but the experts' rows they stay data-parallel ranks. N tokens of a rank, K experts a token.
//   1. ROUTE     each rank chooses for its own tokens
//   2. GATHER    ids, gates [N] -> [ep N], x [N] -> [ep N]     all-gather
//   3. EXPERTS   this rank's own, of all tokens: rows sorted by expert, and within one by rank and
//                token, as one rank would have them
//   4. SUM       out [ep N]{partial} -> [N]                    reduce-scatter
//      backward  dout gathered, dx and the gates' gradients summed; W gathers dout and x again
//   Gradients of experts are then those of ep ranks' tokens, and are summed over the ranks that
//   hold the same experts: dp cp / ep of them. ZeRO shards over these, too. No factor is anywhere:
//   a loss is a sum over tokens, scaled once at the head.
//   No token is dropped. A rank may get min(K, E/ep) rows of each of ep N tokens, and has its place
//   for so many: on average it gets N K, so activations are planned ep min(K, E/ep) / K times as
//   large. Unequal loads cost time, never memory; --recompute ffn keeps them for one layer alone.
//   Every message is on the critical path. With --ep-method exchange 2 and 4 move the rows alone
//   that some expert wants (expert_exchange.h).
//   Cost of a block and micro-batch: a rank sends (ep-1) N C elements twice forward, four times
//   backward, and (ep-1) N K ids and gates.
#pragma once
#include "expert_exchange.h"

namespace llmc {

// How many of everything a rank has room for; on one rank groups are experts, and rows slots.
struct ExpertCounts {
    size_t experts; // of this rank
    size_t groups;  // of the sort: its experts, and all others as one
    size_t tokens;  // of all ranks that share out the experts
    size_t slots;   // of those tokens
    size_t rows;    // at most: a token chooses an expert once
};
inline ExpertCounts expert_counts(const Shape& s, size_t N) {
    size_t experts = s.E / s.expert_ranks;
    size_t groups = experts + (s.expert_ranks > 1);
    size_t tokens = N * s.expert_ranks;
    return {experts, groups, tokens, tokens * s.K, tokens * std::min(s.K, experts)};
}

// Gather the tokens' rows of all ranks into the layer's scratch, good until its next use. On one
// rank nothing is copied: `rows` itself comes back.
template <typename T, typename S>
const T* gather_tokens(Ctx<S>& ctx, const T* rows, const int* ids) { // (ep,N,C) of (N,C) (ep,N,K)
    if (ctx.ep.size == 1) return rows;
    T* all = static_cast<T*>(ctx.token_rows);
    // Rows that nobody here wants may stay away: they are never read.
    if (ctx.exchange_rows)
        send_tokens(ctx, all, rows, ids);
    else
        all_gather(ctx.ep, all, rows, ctx.batch.rows() * ctx.shape.C, ctx.where);
    return all;
}

// A sum over ranks: write your part of it, of all tokens, to partial_tokens(); sum_tokens() reduces
// the parts into `out`. On one rank the two are one buffer.
template <typename T, typename S>
T* partial_tokens(Ctx<S>& ctx, T* out) { // (ep,N,C) for (N,C)
    return ctx.ep.size == 1 ? out : static_cast<T*>(ctx.token_rows);
}
template <typename T, typename S>
void sum_tokens(Ctx<S>& ctx, T* out, T* partial, const int* ids) { // (N,C) of (ep,N,C) {+ep}
    // Their parts come as they went.
    bool exchanges = ctx.ep.size > 1 && ctx.exchange_rows;
    if (exchanges) return return_tokens(ctx, out, partial, ids);
    reduce_scatter_sum(ctx.ep, out, partial, ctx.batch.rows() * ctx.shape.C, ctx.where);
}

// This rank's numbers of a table that has all ranks' slots side by side.
template <typename A, typename S>
A* my_slots(const Ctx<S>& ctx, A* all) { // (N,K) of (ep,N,K)
    return all + size_t(ctx.ep.rank) * ctx.batch.rows() * ctx.shape.K;
}

// Bring the choices of all ranks together, in place.
template <typename A, typename S>
void gather_choices(Ctx<S>& ctx, int* ids, A* gates) { // (ep,N,K) each
    size_t n = ctx.batch.rows() * ctx.shape.K;
    all_gather(ctx.ep, ids, my_slots(ctx, ids), n, ctx.where);
    all_gather(ctx.ep, gates, my_slots(ctx, gates), n, ctx.where);
}

// Sum the gates' gradients in place: each expert's rank has those of its slots, others have zeros.
template <typename A, typename S>
void sum_gates(Ctx<S>& ctx, A* dgates) { // (ep,N,K) {+ep}
    size_t n = ctx.batch.rows() * ctx.shape.K;
    reduce_scatter_sum(ctx.ep, my_slots(ctx, dgates), dgates, n, ctx.where);
}

// Sort all slots by this rank's experts; the others' come last. Groups of the products begin where
// these do, and starts[experts] rows are its own.
template <typename S>
void sort_own_slots(Ctx<S>& ctx, const Slots& slots, const int* ids) { // (ep,N,K)
    const Shape& s = ctx.shape;
    ExpertCounts n = expert_counts(s, ctx.batch.rows());
    if (ctx.ep.size == 1)
        return sort_slots(slots, ids, n.slots, n.groups, ctx.where);
    int* own = static_cast<int*>(ctx.blas.scratch); // (ep,N,K)
    own_experts(own, ids, n.slots, size_t(ctx.ep.rank) * n.experts, n.experts, ctx.where);
    sort_slots(slots, own, n.slots, n.groups, ctx.where);
}

} // namespace llmc
