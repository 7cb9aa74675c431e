// mixtral.h - Mixtral, Qwen-MoE, OLMoE: blocks with experts for an ffn - arXiv:2401.04088
//   block       x = x + o_proj(attention(rope(q), rope(k), v)),   q, k, v = proj(norm_1(x))
//               x = x + sum over the K chosen experts of down_e(g_e silu(gate_e) up_e)
//               gate_e, up_e = proj_e(norm_2(x)),   g_e: the router's gate for norm_2(x), moe.cuh
//   A block may also have an ffn for all tokens, in addition to its experts (shared) or instead of
//   them (dense). Both have width W and are cut like Llama's; a dense block is Llama's:
//               x = x + sum of the experts + [sigmoid(shared_router(norm_2(x)))] ffn(norm_2(x))
//   Qwen2-MoE multiplies the shared one by a gate, which is that of a router with one expert.
//   The first branch, embedding, head and norms are those of llama.h. N: rows; E, K: experts in
//   all, and of a token; M = N K slots; F: the width of one expert.
//   The experts' matrices are stacks of E, in a bucket of their own; so are their adapters. Tensor
//   parallelism cuts each expert's F, as it cuts an ffn's. Every rank routes all N rows, with the
//   same bits, and has a part of the gates' gradients. So the router's gradient is a sum over
//   ranks, and only the first rank adds the balance terms.
//   With whole experts (--etp 1) these ranks route n = N / tp rows each, their own. The router is
//   then trained by rows, and only the ffn for all tokens still has parts to sum over these ranks.
//   Choices, gates and order of slots are kept at every level of recomputation: R runs no router.
//   With expert parallelism a rank has some of the experts, and those rows of the tokens of ep
//   ranks that chose them (expert_parallel.h). Choices are then (ep,N,K), and M is the most rows
//   that a rank may get.
//   Rows of slots (M,C) are never kept. One scratch buffer is reused: 1. the experts' inputs
//   2. their outputs  3. d outputs  4. d inputs  5. again for the weight gradients. M is known, so
//   all of this has its place before the run. No token is dropped, unless experts have a capacity
//   (expert_capacity.cuh), which then limits M too.
//   Cost: a block's forward pass takes 2 N C (2 Q + 2 KV + E + 3 K F) FLOPs in products.
#pragma once
#include <concepts>
#include "context.h"
#include "expert_parallel.h"
#include "llama.h"
#include "model.h"
#include "ops/column_sums.cuh"
#include "ops/element_type.h"
#include "ops/linear.cuh"
#include "ops/matmul.cuh"
#include "ops/moe.cuh"
#include "ops/rand.h"
#include "ops/rmsnorm.cuh"
#include "ops/swiglu.cuh"
#include "ops/types.h"
#include "tensor_parallel.h"

namespace llmc {

// ----------------------------------------------------------------------------
// the family: what it does not name is Llama's

// clang-format off
// The weights of a second branch with experts. Families whose experts differ share them.
struct ExpertWeights {
    Weight norm_2;                                // (C)
    Weight router;                                // (E,C)
    Weight gate, up, down;                        // (E F,C) (E F,C) (E C,F)
};

// The activations and gradients of a second branch with experts.
template <typename T> struct ExpertActs {
    T* norm_2;                                    // (R,C)
    acc_t<T>* norm_2_rstd;                        // (R)
    acc_t<T> *logits, *gates;                     // (N,E) (ep,N,K)
    int* ids;                                     // (ep,N,K)   E: dropped
    int* choices;                                 // (N,K)      before the drops, or null: ids
    Slots slots;                                  // (groups) (groups+1) (ep,N,K) (ep N K)
    T *gate, *up, *swiglu;                        // (M,F) (M,F) (M,F)

    T *dswiglu, *dup, *dlogits;                   // (M,F) (M,F) (N,E)
    acc_t<T>* dgates;                             // (ep,N,K)
    T* dnorm_2;                                   // (R,C)
    acc_t<T>* norm_2_sums;                        // parts of the norm's dweight
    T* dout_all;                                  // (N,C)      rows of all ranks, where R < N
};

struct Mixtral : Llama {
    struct Block : AttentionWeights, ExpertWeights {
        Weight choice_bias;                       // (E)        read by the choice, never trained
        // An ffn instead of the experts, or one for all tokens in addition; W channels.
        Weight shared_router;                     // (1,C)
        Weight ffn_gate, ffn_up, ffn_down;        // (W,C) (W,C) (C,W)
    };

    template <typename T> struct Acts : AttentionActs<T>, ExpertActs<T> {
        acc_t<T> *shared_logits, *shared_gates;   // (N) (N)
        int* shared_ids;                          // (N)        zeros: a choice of one
        T *ffn_gate, *ffn_up, *ffn_swiglu;        // (N,W) (N,W) (N,W)

        T *dffn_swiglu, *dffn_up, *dshared_logits; // (N,W) (N,W) (N)
        acc_t<T>* dshared_gates;                  // (N)
    };
};
// clang-format on

// ----------------------------------------------------------------------------
// tables

// clang-format off
// The names of router and experts in the files; {} is an expert's number.
struct ExpertNames {
    const char *router, *gate, *up, *down;
};
inline ExpertNames expert_names(const Shape& s) {
    if (s.hf_type == "mixtral")
        return {"block_sparse_moe.gate.weight", "block_sparse_moe.experts.{}.w1.weight",
                "block_sparse_moe.experts.{}.w3.weight", "block_sparse_moe.experts.{}.w2.weight"};
    return {"mlp.gate.weight", "mlp.experts.{}.gate_proj.weight",
            "mlp.experts.{}.up_proj.weight", "mlp.experts.{}.down_proj.weight"};
}

// The router and the gate of the shared expert are whole on every rank. The router's gradient comes
// from the rank's part of each expert.
template <typename Row>
void router_parameters(Mixtral::Block& w, const Shape& s, Row& row) {
    const ExpertShape& e = s.experts;
    Shard heads = {-1, 1, 0, Partial::HEADS};
    Init normal = normal_init(0.02);
    const char* choice_bias = "mlp.gate.e_score_correction_bias";
    const char* shared = "mlp.shared_expert_gate.weight";

    //  weight    name                               shape    start   decays cut      transposed
    row(w.router, expert_names(s).router,            {e.E, s.C}, normal, true, heads, false);
    if (e.choice_bias)
        row(w.choice_bias, choice_bias,              {e.E},   ZEROS,  false, heads,   false);
    if (e.shared_gate)
        row(w.shared_router, shared,                 {1, s.C}, normal, true, heads,   false);
}

// The weights of the second branch, but for its experts. shared: the ffn's name where it is for all
// tokens; one instead of the experts has the names of Llama's.
template <typename Row>
void second_branch_parameters(Mixtral::Block& w, const Shape& s, const char* shared, Row& row) {
    const ExpertShape& e = s.experts;
    size_t C = s.C;
    size_t W = e.ffn_beside;
    Shard whole = {}, columns = {0}, rows = {1};
    Init normal = normal_init(0.02);
    Init small = normal_init(0.02 / std::sqrt(2.0 * s.L));
    std::string mlp = e.E ? shared : "mlp.";
    std::string gate = mlp + "gate_proj.weight";
    std::string up = mlp + "up_proj.weight";
    std::string down = mlp + "down_proj.weight";

    //  weight    name                               shape    start   decays cut      transposed
    row(w.norm_2, "post_attention_layernorm.weight", {C},     ONES,   false, whole,   false);
    if (e.E) router_parameters(w, s, row);
    if (W) {
        row(w.ffn_gate, gate.c_str(),                {W, C},  normal, true,  columns, false);
        row(w.ffn_up,   up.c_str(),                  {W, C},  normal, true,  columns, false);
        row(w.ffn_down, down.c_str(),                {C, W},  small,  true,  rows,    false);
    }
}

// The weights of a block, but for its experts.
template <typename Row>
void block_parameters(Mixtral::Block& w, const Shape& s, Row row) {
    attention_parameters(w, s, row);
    second_branch_parameters(w, s, "mlp.shared_expert.", row);
}

// The experts' matrices: two widen, one returns to the stream. A stack has E matrices, one below
// the other. Tensor parallelism cuts each expert for itself.
template <typename Row>
void stack_parameters(ExpertWeights& w, const Shape& s, const ExpertNames& names, Row& row) {
    size_t C = s.C;
    size_t F = s.F;
    size_t E = s.experts.E;
    Shard columns = {0, int(E)}, rows = {1};
    Init normal = normal_init(0.02);
    Init small = normal_init(0.02 / std::sqrt(2.0 * s.L));

    //  weight    name        shape       start   decays cut      transposed
    row(w.gate,   names.gate, {E * F, C}, normal, true,  columns, false);
    row(w.up,     names.up,   {E * F, C}, normal, true,  columns, false);
    row(w.down,   names.down, {E * C, F}, small,  true,  rows,    false);
}
template <std::derived_from<Mixtral::Block> Block, typename Row>
void expert_parameters(Block& w, const Shape& s, Row row) {
    stack_parameters(w, s, expert_names(s), row);
}

// The activations of experts. Slots have M = N K rows, whoever is chosen, or with expert
// parallelism at most M. So an arena that fits once always fits.
template <typename T, typename Row>
void expert_activations(ExpertActs<T>& a, const Shape& s, size_t N, Row& row, Last gates) {
    const ExpertShape& e = s.experts;
    // Experts have a row for each slot.
    size_t routed = routed_rows(s, N);
    ExpertCounts n = expert_counts(s, N);
    size_t MF = n.rows * s.F;
    using enum Keep;
    using enum Last;
    Keep down = inputs_kept(s).experts;

    //  pointer             name                    elements   of        last read
    row(a.logits,           "router's logits",      routed * e.E, ROUTING, B);
    row(a.gates,            "gates",                n.slots,  ROUTING, gates);
    row(a.ids,              "chosen experts",       n.slots,  ROUTING, W);
    if (keeps_choices(s))
        row(a.choices,      "router's choices",     N * e.K,  ROUTING, B);
    row(a.slots.row_of,     "rows of slots",        n.slots,  ROUTING, B);
    row(a.slots.slot_of,    "slots of rows",        n.slots,  ROUTING, W);
    row(a.slots.counts,     "experts' loads",       n.groups, ROUTING, W);
    row(a.slots.starts,     "experts' first rows",  n.groups + 1, ROUTING, W);
    row(a.dgates,           "d gates",              n.slots,  GRADIENT, B);
    row(a.dlogits,          "d router's logits",    routed * e.E, GRADIENT, W);
    row(a.gate,             "gate",                 MF,       FFN,     B);
    row(a.up,               "up",                   MF,       FFN,     B);
    row(a.swiglu,           "swiglu",               MF,       down,    W);
    row(a.dswiglu,          "d swiglu, d gate",     MF,       GRADIENT, W);
    row(a.dup,              "d up",                 MF,       GRADIENT, W);
}

// The activations of an ffn, and of the gate of a shared expert: a row for each token.
template <typename T, typename Row>
void ffn_activations(Mixtral::Acts<T>& a, const Shape& s, size_t N, Row& row) {
    const ExpertShape& e = s.experts;
    size_t NW = N * e.ffn_beside;
    using enum Keep;
    using enum Last;
    Keep down = inputs_kept(s).last;

    //  pointer         name                    elements   of        last read
    if (e.E && e.shared_gate) {
        row(a.shared_logits, "shared gate's logits", N,      ROUTING, B);
        row(a.shared_gates,  "shared gates",         N,      ROUTING, B);
        row(a.shared_ids,    "shared experts",       N,      ROUTING, B);
        row(a.dshared_gates, "d shared gates",       N,      GRADIENT, B);
        row(a.dshared_logits, "d shared gate's logits", N,   GRADIENT, W);
    }
    if (NW) {
        row(a.ffn_gate,     "ffn's gate",           NW,       FFN,     B);
        row(a.ffn_up,       "ffn's up",             NW,       FFN,     B);
        row(a.ffn_swiglu,   "ffn's swiglu",         NW,       down,    W);
        row(a.dffn_swiglu,  "d ffn's swiglu, d gate", NW,     GRADIENT, W);
        row(a.dffn_up,      "d ffn's up",           NW,       GRADIENT, W);
    }
}

// The norm of the second branch, before and behind the rows of what it feeds.
template <typename T, typename Row>
void norm_2_activations(ExpertActs<T>& a, const Shape& s, size_t N, Row& row) {
    size_t R = N / s.rank.rows; // of the residual stream
    row(a.norm_2,       "norm_2",               R * s.C,   Keep::CHEAP, Last::W);
    row(a.norm_2_rstd,  "norm_2.rstd",          R,         Keep::CHEAP, Last::B);
}
template <typename T, typename S, typename Row>
void norm_2_gradients(ExpertActs<T>& a, const Shape& s, size_t N, S where, Row& row) {
    size_t C = s.C;
    size_t R = N / s.rank.rows;
    using enum Keep;
    using enum Last;

    //  pointer         name                    elements   of        last read
    row(a.dnorm_2,      "d norm_2",             R * C,     GRADIENT, B);
    row(a.norm_2_sums,  "d norm_2, sums", rmsnorm_sums(R, C, where), GRADIENT, W);
    if (s.rank.rows > 1 && reads_all_rows(s))
        row(a.dout_all, "d out, all rows",      N * C,     GRADIENT, W);
}

// The activations and gradients of the second branch.
template <typename T, typename S, typename Row>
void second_branch_activations(Mixtral::Acts<T>& a, const Shape& s, size_t N, S where, Row& row) {
    norm_2_activations(a, s, N, row);
    if (s.experts.E) expert_activations(a, s, N, row, Last::B);
    ffn_activations(a, s, N, row);
    norm_2_gradients(a, s, N, where, row);
}

// All activations and gradients of a block.
template <typename T, typename S, typename Row>
void block_activations(Mixtral::Acts<T>& a, const Shape& s, size_t N, S where, Row row) {
    attention_activations(a, s, N, where, row);
    second_branch_activations(a, s, N, where, row);
}

// clang-format on

// ----------------------------------------------------------------------------
// the router

// The settings of the router, as kernels take them.
inline Routing routing_of(const Shape& s) {
    const ExpertShape& e = s.experts;
    return {e.router, e.E, e.K, e.gate_scale, nullptr, e.groups, e.kept_groups};
}

// logits = x router^T for N rows, with the output in acc whatever the type of the weights.
template <typename T, typename S>
void router_logits(Ctx<S>& ctx, acc_t<T>* logits, const T* x, size_t N, // (N,E) (N,C)
                   const Weight& router, bool accumulate = false) {
    const T* no_bias = nullptr;
    const acc_t<T>* no_residual = nullptr;
    Product p = linear_forward_product(N, router.rows, ctx.shape.C, type_of<T>());
    p.pack_b = false;
    p.accumulate = accumulate;
    matmul(logits, x, router.as<const T>(), no_bias, no_residual, p, ctx.blas, ctx.where);
}

// From logits to slots: choose experts, compute gates, and sort slots by expert.
template <typename T, typename S>
void choose_experts(Ctx<S>& ctx, const ExpertActs<T>& a, const Routing& routing) {
    // Choose for this rank's tokens.
    int* choices = all_choices(ctx, a.ids, a.choices); // (N,K)
    int* own = my_choices(ctx, choices);               // (n,K)
    route_forward(own, my_slots(ctx, a.gates), a.logits, routing, routed_rows(ctx), ctx.where);

    // Know the choices of all rows, and drop those for which an expert has no room.
    share_choices(ctx, choices, own);
    count_loads(ctx, choices);
    take_choices(ctx, my_slots(ctx, a.ids), choices);

    // Gather the choices of other expert-parallel ranks, then sort all slots by expert.
    gather_choices(ctx, a.ids, a.gates);
    sort_own_slots(ctx, a.slots, a.ids);
}

// Go back through the router into `partial`, and add the balance terms of each sequence. Leaves the
// gradients of logits for W.
template <typename T, typename S>
void router_backward_input(Ctx<S>& ctx, T* partial, const Weight& router, // (n,C) {+tp}
                           const ExpertActs<T>& a) {
    size_t n = routed_rows(ctx);
    int* choices = all_choices(ctx, a.ids, a.choices); // (N,K)
    const int* counts = sequence_counts(ctx, choices); // (B,E)
    const int* ids = my_choices(ctx, choices);         // (n,K)
    acc_t<T>* dgates = my_slots(ctx, a.dgates);        // (n,K)
    route_backward(a.dlogits, dgates, a.logits, ids, routing_of(ctx.shape),
                   balance_terms(ctx, counts), n, ctx.where);
    linear_backward_input(partial, a.dlogits, router, n, true, ctx.blas, ctx.where);
}

// ----------------------------------------------------------------------------
// the experts, as every family with experts has them

// Whether the weights of experts, or adapters on them, have gradients. Nothing else in W reads the
// rows of slots.
inline bool stacks_learn(const ExpertWeights& w) {
    return learns(w.gate) || learns(w.up) || learns(w.down);
}

// gate and up of all slots: each expert's rows times its own matrices.
template <typename T, typename S>
void widen_slots(Ctx<S>& ctx, const T* tokens, // (ep,N,C)
                 const ExpertWeights& w, const ExpertActs<T>& a) {
    const T* xs = gather_slots(ctx, a.slots, tokens); // (M,C)
    stack_forward(ctx, a.gate, xs, w.gate, a.slots);
    stack_forward(ctx, a.up, xs, w.up, a.slots);
}

// swiglu of all slots, times each slot's gate.
template <typename T, typename S>
void gate_slots(Ctx<S>& ctx, const ExpertActs<T>& a, const ExpertGate& kind = {}) {
    gated_swiglu_forward(a.swiglu, a.gate, a.up, a.gates, a.slots.slot_of, rows_here(ctx, a.slots),
                         expert_counts(ctx).slots, ctx.shape.F, ctx.where, kind);
}

// The experts' outputs overwrite their inputs, which are no longer needed.
template <typename T, typename S>
T* narrow_slots(Ctx<S>& ctx, const ExpertWeights& w, const ExpertActs<T>& a) { // (M,C) {+tp}
    T* y = static_cast<T*>(ctx.experts.slot_rows);
    stack_forward(ctx, y, (const T*)a.swiglu, w.down, a.slots);
    return y;
}

// Go back from the experts' outputs to gate and up, in place, and to the gates. Returns the
// gradients of the outputs.
template <typename T, typename S>
const T* narrow_slots_backward(Ctx<S>& ctx, const T* douts, // (M,C) from (ep,N,C)
                               const ExpertWeights& w, const ExpertActs<T>& a,
                               const ExpertGate& kind = {}) {
    const T* dys = gather_slots(ctx, a.slots, douts); // (M,C)
    T* dgate = a.dswiglu;                             // (M,F)
    stack_backward_input(ctx, a.dswiglu, dys, w.down, a.slots, false);
    gated_swiglu_backward(dgate, a.dup, a.dgates, a.dswiglu, a.gate, a.up, a.gates,
                          a.slots.slot_of, rows_here(ctx, a.slots), expert_counts(ctx).slots,
                          ctx.shape.F, ctx.where, kind);
    return dys;
}

// Go back from gate and up to the experts' inputs, and sum those of each token over all ranks.
template <typename T, typename S>
void widen_slots_backward(Ctx<S>& ctx, T* partial, // (n,C) {+tp}
                          const ExpertWeights& w, const ExpertActs<T>& a) {
    const Shape& s = ctx.shape;
    const T* no_residual = nullptr;
    T* all = partial_tokens(ctx, partial);   // (ep,n,C) {+ep} {+tp}
    T* dxs = static_cast<T*>(ctx.experts.slot_rows); // (M,C): in place of the outputs' gradients
    stack_backward_input(ctx, dxs, (const T*)a.dswiglu, w.gate, a.slots, false);
    stack_backward_input(ctx, dxs, (const T*)a.dup, w.up, a.slots, true);
    combine_slots(all, no_residual, dxs, a.slots.row_of, rows_here(ctx, a.slots),
                  expert_counts(ctx).tokens, s.experts.K, s.C, ctx.where);
    sum_gates(ctx, a.dgates);
    sum_tokens(ctx, partial, all, a.ids);
}

// ----------------------------------------------------------------------------
// the ffn for all tokens, which a block may have in addition to its experts

// The gate of the shared expert: a router with one expert to choose from.
inline Routing shared_routing() { return {Router::SIGMOID_ALONE, 1, 1}; }

// The gates of the shared expert: the sigmoid of each token's logit.
template <typename T, typename S>
void gate_shared_expert(Ctx<S>& ctx, const T* x, const Mixtral::Block& w, // (N,C)
                        const Mixtral::Acts<T>& a) {
    size_t N = ctx.batch.rows();
    if (!w.shared_router.data) return;
    router_logits(ctx, a.shared_logits, x, N, w.shared_router);
    route_forward(a.shared_ids, a.shared_gates, a.shared_logits, shared_routing(), N, ctx.where);
}

// gate and up read the same rows as the experts do.
template <typename T, typename S>
void widen_ffn(Ctx<S>& ctx, const T* x, const Mixtral::Block& w, // (N,C)
               const Mixtral::Acts<T>& a) {
    size_t N = ctx.batch.rows();
    const T* no_residual = nullptr;
    if (!ctx.shape.experts.ffn_beside) return;
    linear_forward(a.ffn_gate, x, w.ffn_gate, nullptr, no_residual, N, ctx.blas, ctx.where);
    linear_forward(a.ffn_up, x, w.ffn_up, nullptr, no_residual, N, ctx.blas, ctx.where);
}

// swiglu of the ffn, times each token's gate if the shared expert has one.
template <typename T, typename S>
void gate_ffn(Ctx<S>& ctx, const Mixtral::Block& w, const Mixtral::Acts<T>& a) {
    size_t N = ctx.batch.rows();
    size_t W = ctx.shape.experts.ffn_beside;
    // Null: a slot for each token, in a row of its own.
    const int *every_row = nullptr, *all_rows = nullptr;
    if (!W) return;
    if (w.shared_router.data)
        gated_swiglu_forward(a.ffn_swiglu, a.ffn_gate, a.ffn_up, a.shared_gates, every_row,
                             all_rows, N, W, ctx.where);
    else
        swiglu_forward(a.ffn_swiglu, a.ffn_gate, a.ffn_up, N * W, ctx.where, ctx.shape.block.gate);
}

// Begin the branch's sum with the residual + the ffn of this rank's tokens.
template <typename T, typename S>
void begin_with_ffn(Ctx<S>& ctx, BranchSum<T>& sum, const Mixtral::Block& w,
                    const Mixtral::Acts<T>& a) {
    const Weight no_bias = {};
    if (!ctx.shape.experts.ffn_beside) return;
    T* place = first_place(ctx, sum); // (N,C) {+tp}
    row_parallel_partial(ctx, place, a.ffn_swiglu, w.ffn_down, no_bias, sum.residual);
    fill_place(ctx, sum, place);
}

// Go back from the ffn's output to gate and up, in place.
template <typename T, typename S>
void narrow_ffn_backward(Ctx<S>& ctx, const T* dout, const Mixtral::Block& w, // (N,C)
                         const Mixtral::Acts<T>& a) {
    size_t N = ctx.batch.rows();
    size_t W = ctx.shape.experts.ffn_beside;
    T* dgate = a.dffn_swiglu; // (N,W)
    // Null: a slot for each token, in a row of its own.
    const int *every_row = nullptr, *all_rows = nullptr;
    if (!W) return;
    linear_backward_input(a.dffn_swiglu, dout, w.ffn_down, N, false, ctx.blas, ctx.where);
    if (w.shared_router.data)
        gated_swiglu_backward(dgate, a.dffn_up, a.dshared_gates, a.dffn_swiglu, a.ffn_gate,
                              a.ffn_up, a.shared_gates, every_row, all_rows, N, W, ctx.where);
    else
        swiglu_backward(dgate, a.dffn_up, a.dffn_swiglu, a.ffn_gate, a.ffn_up, N * W, ctx.where,
                        ctx.shape.block.gate);
}

// Go back from gate and up of the ffn, and from the shared expert's gate, to their inputs.
template <typename T, typename S>
void widen_ffn_backward(Ctx<S>& ctx, T* partial, const Mixtral::Block& w, // (N,C) {+tp}
                        const Mixtral::Acts<T>& a) {
    size_t N = ctx.batch.rows();
    T* dgate = a.dffn_swiglu; // (N,W)
    if (!ctx.shape.experts.ffn_beside) return;
    linear_backward_input(partial, dgate, w.ffn_gate, N, true, ctx.blas, ctx.where);
    linear_backward_input(partial, a.dffn_up, w.ffn_up, N, true, ctx.blas, ctx.where);

    // Go back through the shared expert's gate.
    if (!w.shared_router.data) return;
    route_backward(a.dshared_logits, a.dshared_gates, a.shared_logits, a.shared_ids,
                   shared_routing(), {}, N, ctx.where);
    linear_backward_input(partial, a.dshared_logits, w.shared_router, N, true, ctx.blas, ctx.where);
}

// The gradients of the ffn's matrices, and of the shared expert's gate.
template <typename T, typename S>
void ffn_backward_weight(Ctx<S>& ctx, const T* dout, const T* x, // (N,C) (N,C)
                         const Mixtral::Block& w, const Mixtral::Acts<T>& a, bool accumulate) {
    size_t N = ctx.batch.rows();
    auto backward = [&](const Weight& weight, const T* dy, const T* inp) {
        linear_backward_weight(weight, nullptr, dy, inp, N, accumulate, ctx.blas, ctx.where);
    };
    if (!ctx.shape.experts.ffn_beside) return;
    backward(w.ffn_down, dout, a.ffn_swiglu);
    backward(w.ffn_gate, a.dffn_swiglu, x);
    backward(w.ffn_up, a.dffn_up, x);
    if (w.shared_router.data) backward(w.shared_router, a.dshared_logits, x);
}

// ----------------------------------------------------------------------------
// a dense second branch: Llama's, in the place of experts

// out = the stream after attention + the ffn
template <typename T, typename S>
void dense_branch_forward(Ctx<S>& ctx, T* out, const Mixtral::Block& w, // (R,C)
                          const Mixtral::Acts<T>& a) {
    const Weight no_bias = {};
    const T* residual = a.middle; // (R,C)
    const T* x = a.norm_2;        // (R,C)
    column_parallel_forward(ctx, {{a.ffn_gate, w.ffn_gate}, {a.ffn_up, w.ffn_up}}, x);
    gate_ffn(ctx, w, a);
    row_parallel_forward(ctx, out, a.ffn_swiglu, w.ffn_down, no_bias, residual);
}

// Compute again what the level of recomputation dropped.
template <typename T, typename S>
void dense_branch_recompute(Ctx<S>& ctx, const Mixtral::Block& w, const Mixtral::Acts<T>& a,
                            Recompute level) {
    const T* x = a.norm_2; // (R,C)
    if (redoes_ffn(level))
        column_parallel_forward(ctx, {{a.ffn_gate, w.ffn_gate}, {a.ffn_up, w.ffn_up}}, x);
    gate_ffn(ctx, w, a);
}

// Everything in backward but the gradients of weights.
template <typename T, typename S>
void dense_branch_backward_input(Ctx<S>& ctx, const T* dout, const Mixtral::Block& w, // (R,C)
                                 const Mixtral::Acts<T>& a) {
    size_t NW = ctx.batch.rows() * ctx.shape.experts.ffn_beside;
    T* dgate = a.dffn_swiglu; // (N,W)
    row_parallel_backward_input(ctx, a.dffn_swiglu, a.dout_all, dout, w.ffn_down);
    swiglu_backward(dgate, a.dffn_up, a.dffn_swiglu, a.ffn_gate, a.ffn_up, NW, ctx.where,
                    ctx.shape.block.gate);
    column_parallel_backward_input(ctx, a.dnorm_2, {{dgate, w.ffn_gate}, {a.dffn_up, w.ffn_up}});
}

// The gradients of the ffn's matrices.
template <typename T, typename S>
void dense_branch_backward_weight(Ctx<S>& ctx, const T* dout, const Mixtral::Block& w, // (R,C)
                                  const Mixtral::Acts<T>& a, bool accumulate) {
    const T* x = a.norm_2;    // (R,C)
    T* dgate = a.dffn_swiglu; // (N,W)
    row_parallel_backward_weight(ctx, w.ffn_down, dout, a.dout_all, a.ffn_swiglu, accumulate);
    column_parallel_backward_weight(ctx, {{dgate, w.ffn_gate}, {a.dffn_up, w.ffn_up}}, x,
                                    accumulate);
}

// ----------------------------------------------------------------------------
// the second branch: each token's experts, and what all tokens go through

// gate and up of the ffn and of all slots. Tokens travel to their experts while the ffn's run.
template <typename T, typename S>
void widen(Ctx<S>& ctx, const BranchRows<T>& x, const Mixtral::Block& w,
           const Mixtral::Acts<T>& a) {
    TokensComing<T, S> tokens = start_tokens(ctx, x.routed, a.ids);
    widen_ffn(ctx, x.all, w, a);
    widen_slots(ctx, finish_tokens(ctx, tokens), w, a);
}

// From the stream after attention to the block's output.
template <typename T, typename S>
void second_branch_forward(Ctx<S>& ctx, T* out, const Mixtral::Block& w, // (R,C)
                           const Mixtral::Acts<T>& a) {
    rmsnorm_forward(ctx, a.norm_2, a.norm_2_rstd, a.middle, w.norm_2);
    if (!ctx.shape.experts.E) return dense_branch_forward(ctx, out, w, a);

    // Choose experts.
    BranchRows<T> x = gather_branch_rows(ctx, a.norm_2);
    Routing routing = routing_of(ctx.shape);
    router_logits(ctx, a.logits, x.routed, routed_rows(ctx), w.router);
    routing.bias = widen_choice_bias<T>(ctx, w.choice_bias);
    choose_experts(ctx, a, routing);
    gate_shared_expert(ctx, x.all, w, a);

    // Run the ffn and the experts up to their last products.
    widen(ctx, x, w, a);
    gate_ffn(ctx, w, a);
    gate_slots(ctx, a);

    // Add up the residual, the ffn and each token's experts.
    const T* residual = a.middle; // (R,C)
    BranchSum<T> sum = begin_sum(ctx, out, residual);
    begin_with_ffn(ctx, sum, w, a);
    add_experts(ctx, sum, narrow_slots(ctx, w, a), a.slots);
    finish_sum(ctx, sum, a.ids);
}

// Compute again what the level of recomputation dropped. The router does not run again.
template <typename T, typename S>
void second_branch_recompute(Ctx<S>& ctx, const Mixtral::Block& w, const Mixtral::Acts<T>& a,
                             Recompute level) {
    rmsnorm_forward(ctx, a.norm_2, a.norm_2_rstd, a.middle, w.norm_2);
    if (!ctx.shape.experts.E) return dense_branch_recompute(ctx, w, a, level);
    if (redoes_ffn(level)) widen(ctx, gather_branch_rows(ctx, a.norm_2), w, a);
    gate_ffn(ctx, w, a);
    gate_slots(ctx, a);
}

// Go back through the second branch, to the rows of norm_2.
template <typename T, typename S>
void second_branch_backward_input(Ctx<S>& ctx, const T* dout, const Mixtral::Block& w, // (R,C)
                                  const Mixtral::Acts<T>& a) {
    if (!ctx.shape.experts.E) return dense_branch_backward_input(ctx, dout, w, a);

    // Walk back through the ffn's last product while the outputs' gradients travel.
    BranchRows<T> douts = gather_branch_rows(ctx, a.dout_all, dout);
    TokensComing<T, S> coming = start_tokens(ctx, douts.routed, a.ids);
    narrow_ffn_backward(ctx, douts.all, w, a);

    // Walk back through the experts and the router.
    T* partial = partial_of_experts(ctx, a.dnorm_2); // (n,C) {+tp}
    narrow_slots_backward(ctx, finish_tokens(ctx, coming), w, a);
    widen_slots_backward(ctx, partial, w, a);
    router_backward_input(ctx, partial, w.router, a);

    // Add the ffn's part, then sum over tensor-parallel ranks.
    T* all = partial_behind_experts(ctx, a.dnorm_2); // (N,C) {+tp}
    widen_ffn_backward(ctx, all, w, a);
    sum_behind_experts(ctx, a.dnorm_2, all);
}

// The gradients of the experts' matrices. The rows of slots are gathered again. outputs(dys) takes
// those of the experts' outputs (M,C), before the inputs' take their place.
template <typename T, typename S, typename F>
void stacks_backward_weight(Ctx<S>& ctx, const T* douts, const T* x, // (ep,n,C) (n,C)
                            const ExpertWeights& w, const ExpertActs<T>& a, bool accumulate,
                            F outputs) {
    const T* dys = gather_slots(ctx, a.slots, douts);
    stack_backward_weight(ctx, w.down, dys, (const T*)a.swiglu, a.slots, accumulate);
    outputs(dys);

    // Take the experts' inputs.
    const T* xs = gather_slots(ctx, a.slots, gather_tokens(ctx, x, a.ids)); // (M,C)
    stack_backward_weight(ctx, w.gate, (const T*)a.dswiglu, xs, a.slots, accumulate);
    stack_backward_weight(ctx, w.up, (const T*)a.dup, xs, a.slots, accumulate);
}

// The gradients of all matrices of the second branch.
template <typename T, typename S>
void second_branch_backward_weight(Ctx<S>& ctx, const T* dout, const Mixtral::Block& w, // (R,C)
                                   const Mixtral::Acts<T>& a, bool accumulate) {
    if (!ctx.shape.experts.E) return dense_branch_backward_weight(ctx, dout, w, a, accumulate);

    // Let the outputs' gradients travel while the ffn's products run.
    const T* room = a.dout_all;
    BranchRows<T> douts = gathered_branch_rows(ctx.shape, room, dout);
    BranchRows<T> x = gather_branch_rows(ctx, a.norm_2);
    bool learns = stacks_learn(w);
    TokensComing<T, S> coming;
    if (learns) coming = start_tokens(ctx, douts.routed, a.ids);
    ffn_backward_weight(ctx, douts.all, x.all, w, a, accumulate);

    // Take the experts, then the router.
    auto no_biases = [](const T*) {};
    if (learns)
        stacks_backward_weight(ctx, finish_tokens(ctx, coming), x.routed, w, a, accumulate,
                               no_biases);
    linear_backward_weight(w.router, nullptr, a.dlogits, x.routed, routed_rows(ctx), accumulate,
                           ctx.blas, ctx.where);
    zero_choice_bias_gradient<T>(ctx, w.choice_bias, accumulate);
}

// ----------------------------------------------------------------------------
// the block, whichever branches a family has: Deepseek's first is another (mla.h), gpt-oss's second

// The forward pass of a block.
template <typename T, typename S, std::derived_from<ExpertWeights> Block, typename Acts>
void block_forward(Ctx<S>& ctx, T* out, const T* inp, const Block& w, const Acts& a,
                   T* cache) {
    // Attend to earlier tokens.
    first_branch_forward(ctx, inp, w, a, cache);

    // Run each token's experts on the result.
    second_branch_forward(ctx, out, w, a);
}

// Compute again what the level of recomputation dropped. The experts are those that F chose.
template <typename T, typename S, std::derived_from<ExpertWeights> Block, typename Acts>
void block_recompute(Ctx<S>& ctx, const T* inp, const Block& w, const Acts& a,
                     Recompute level) {
    first_branch_recompute(ctx, inp, w, a, level);

    second_branch_recompute(ctx, w, a, level);
}

// Everything in backward but the gradients of weights.
template <typename T, typename S, std::derived_from<ExpertWeights> Block, typename Acts>
void block_backward_input(Ctx<S>& ctx, T* dinp, const T* dout, const T* inp, const Block& w,
                          const Acts& a) {
    // Go back through the second branch, which leaves the gradients that W needs.
    second_branch_backward_input(ctx, dout, w, a);
    rmsnorm_backward(ctx, a.dmiddle, a.norm_2_sums, dout, a.dnorm_2, a.middle, w.norm_2,
                     a.norm_2_rstd);

    // Go back through the first branch.
    first_branch_backward_input(ctx, dinp, inp, w, a);
}

// The gradients of weights, from what the input half has left.
template <typename T, typename S, std::derived_from<ExpertWeights> Block, typename Acts>
void block_backward_weight(Ctx<S>& ctx, const T* dout, const Block& w, const Acts& a,
                           bool accumulate) {
    // Start with the experts' matrices and the router, then take the first branch.
    second_branch_backward_weight(ctx, dout, w, a, accumulate);
    SumsOfRows<T> sums = {{}, {rmsnorm_parts<T>(ctx, w.norm_2, a.norm_2_sums)}};
    first_branch_backward_weight(ctx, sums, w, a, accumulate);

    // Add up the partial sums of all norms together.
    column_sums<T>(sums.columns, sums.ready, ctx.blas.scratch, accumulate, ctx.where);
}

} // namespace llmc
