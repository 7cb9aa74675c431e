// mixtral.h - Mixtral, Qwen3-MoE, OLMoE: Llama's block with experts for an ffn - arXiv:2401.04088
//   block       x = x + o_proj(attention(rope(q), rope(k), v)),   q, k, v = proj(norm_1(x))
//               x = x + sum over the K chosen experts of down_e(g_e silu(gate_e) up_e)
//               gate_e, up_e = proj_e(norm_2(x)),   g_e: the router's gate for norm_2(x), moe.cuh
//   The first branch, embedding, head and norms are llama.h's. N: rows, E, K: experts,
//   those of a token; M = N K slots, F: the width of one expert.
//   Experts' matrices are stacks of E in a bucket of their own. Tensor parallelism cuts each
//   expert's F, as it cuts an ffn's. Every rank routes all N rows, with the same bits, and has a
//   part of the gates' gradients; so the router's gradient is a sum over ranks, and the first one
//   adds the balance terms.
//   Choice, gates and order of slots are kept at every level of recomputation: R asks no router.
//   Expert parallelism gives each rank some experts, and the rows that chose them of all tokens of
//   ep ranks (expert_parallel.h): N, M below are then those of ep ranks, where a shape says all N.
//   Rows of slots (M,C) are never kept. One buffer in scratch takes turns: an expert's input and
//   its output, then backward the gradient of the output, of the input, and both inputs of W
//   again. No token is dropped and M is known, so all of this has its place before the run.
//   Cost: a block's forward pass takes 2 N C (2 Q + 2 KV + E + 3 K F) FLOPs in products.
#pragma once
#include "expert_parallel.h"
#include "grouped_matmul.cuh"
#include "llama.h"

namespace llmc {

// ----------------------------------------------------------------------------
// the family

// clang-format off
struct Mixtral {
    static constexpr const char* model_types[] = {"mixtral", "qwen3_moe", "olmoe"};
    static constexpr const char* block_prefix = "model.layers.";
    static constexpr const char* body_prefix = "";              // names begin with "model." already
    static constexpr int widening_products = 2;                 // from C to F channels: gate, up

    typedef Llama::Embedding Embedding;
    typedef Llama::Head Head;

    struct Block : AttentionWeights {
        Weight norm_2;                            // (C)
        Weight router;                            // (E,C)
        Weight gate, up, down;                    // (E F,C) (E F,C) (E C,F)
    };

    template <typename T> struct Acts : AttentionActs<T> {
        T* norm_2;                                // (R,C)
        acc_t<T>* norm_2_rstd;                    // (R)
        acc_t<T> *logits, *gates;                 // (N,E) (ep,N,K)
        int* ids;                                 // (ep,N,K)
        Slots slots;                              // (groups) (groups+1) (ep,N,K) (ep N K)
        T *gate, *up, *swiglu;                    // (M,F) (M,F) (M,F)

        T *dswiglu, *dup, *dlogits;               // (M,F) (M,F) (N,E)
        acc_t<T>* dgates;                         // (ep,N,K)
        T* dnorm_2;                               // (R,C)
        acc_t<T>* norm_2_sums;                    // parts of the norm's dweight
        T* dout_all;                              // (N,C)      rows of all ranks, where R < N
    };
};
// clang-format on

// ----------------------------------------------------------------------------
// tables

// clang-format off
// The router is whole on every rank, and its gradient is of the rank's part of each expert.
template <typename Row>
void block_parameters(Mixtral::Block& w, const Shape& s, Row row) {
    size_t C = s.C;
    Shard whole = {};
    Shard heads = {-1, 1, 0, Partial::HEADS};
    Init normal = normal_init(0.02);
    const char* router = s.hf_type == "mixtral" ? "block_sparse_moe.gate.weight"
                                                : "mlp.gate.weight";

    //  weight    name                               shape    start   decays cut      transposed
    attention_parameters(w, s, row);
    row(w.norm_2, "post_attention_layernorm.weight", {C},     ONES,   false, whole,   false);
    row(w.router, router,                            {s.E, C}, normal, true, heads,   false);
}

// A stack has E matrices, one below the other: {} stands for an expert's number in the files.
template <typename Row>
void expert_parameters(Mixtral::Block& w, const Shape& s, Row row) {
    // Each expert is cut for itself.
    size_t C = s.C;
    size_t F = s.F;
    size_t E = s.E;
    Shard columns = {0, int(E)}, rows = {1};
    Init normal = normal_init(0.02);
    Init small = normal_init(0.02 / std::sqrt(2.0 * s.L));

    // Mixtral has names of its own.
    bool mixtral = s.hf_type == "mixtral";
    const char* gate = mixtral ? "block_sparse_moe.experts.{}.w1.weight"
                               : "mlp.experts.{}.gate_proj.weight";
    const char* up = mixtral ? "block_sparse_moe.experts.{}.w3.weight"
                             : "mlp.experts.{}.up_proj.weight";
    const char* down = mixtral ? "block_sparse_moe.experts.{}.w2.weight"
                               : "mlp.experts.{}.down_proj.weight";

    // Two of them widen, one comes back to the stream.
    //  weight    name  shape       start   decays cut      transposed
    row(w.gate,   gate, {E * F, C}, normal, true,  columns, false);
    row(w.up,     up,   {E * F, C}, normal, true,  columns, false);
    row(w.down,   down, {E * C, F}, small,  true,  rows,    false);
}

// Rows of slots are M = N K, whoever is chosen, or with expert parallelism at most M: an arena that
// fits once fits always.
template <typename T, typename S, typename Row>
void block_activations(Mixtral::Acts<T>& a, const Shape& s, size_t N, S where, Row row) {
    size_t C = s.C;
    size_t F = s.F;
    size_t R = N / s.row_ranks; // of the residual stream
    ExpertCounts n = expert_counts(s, N);
    size_t M = n.rows;
    using enum Keep;
    using enum Last;

    //  pointer         name                    elements   of        last read
    attention_activations(a, s, N, where, row);
    row(a.norm_2,       "norm_2",               R * C,     CHEAP,    W);
    row(a.norm_2_rstd,  "norm_2.rstd",          R,         CHEAP,    B);
    row(a.logits,       "router's logits",      N * s.E,   ROUTING,  B);
    row(a.gates,        "gates",                n.slots,   ROUTING,  B);
    row(a.ids,          "chosen experts",       n.slots,   ROUTING,  B);
    row(a.slots.row_of, "rows of slots",        n.slots,   ROUTING,  B);
    row(a.slots.slot_of, "slots of rows",       n.slots,   ROUTING,  W);
    row(a.slots.counts, "experts' loads",       n.groups,  ROUTING,  W);
    row(a.slots.starts, "experts' first rows",  n.groups + 1, ROUTING,  W);
    row(a.gate,         "gate",                 M * F,     FFN,      B);
    row(a.up,           "up",                   M * F,     FFN,      B);
    row(a.swiglu,       "swiglu",               M * F,     CHEAP,    W);

    row(a.dswiglu,      "d swiglu, d gate",     M * F,     GRADIENT, W);
    row(a.dup,          "d up",                 M * F,     GRADIENT, W);
    row(a.dgates,       "d gates",              n.slots,   GRADIENT, B);
    row(a.dlogits,      "d router's logits",    N * s.E,   GRADIENT, W);
    row(a.dnorm_2,      "d norm_2",             R * C,     GRADIENT, B);
    row(a.norm_2_sums,  "d norm_2, sums", rmsnorm_sums(R, C, where), GRADIENT, W);
    if (s.row_ranks > 1)
        row(a.dout_all, "d out, all rows",      N * C,     GRADIENT, W);
}
// clang-format on

// ----------------------------------------------------------------------------
// experts

// The router as kernels take it.
inline Routing routing_of(const Shape& s) { return {s.router, s.E, s.K}; }

// A stack of this rank's experts as the grouped products take it.
template <typename T, typename S>
Groups groups_of(const Ctx<S>& ctx, const Mixtral::Acts<T>& a, const Weight& stack) {
    ExpertCounts n = expert_counts(ctx.shape, ctx.batch.rows());
    return {a.slots.starts, n.experts, stack.rows / n.experts, stack.cols, n.rows};
}

// The number of its rows, where kernels run: where the last expert's end.
template <typename T, typename S>
const int* rows_of(const Ctx<S>& ctx, const Mixtral::Acts<T>& a) {
    return a.slots.starts + expert_counts(ctx.shape, ctx.batch.rows()).experts;
}

// The balance terms of this rank; of tensor-parallel ranks one adds them for all.
template <typename S>
BalanceTerms balance_terms(const Ctx<S>& ctx, const int* counts) {
    // A term is a mean over the sequences of the step, and over the tokens of each.
    const Shape& s = ctx.shape;
    size_t ranks = size_t(ctx.cp.size);
    size_t T = ctx.batch.T * ranks;
    double tokens = double(ctx.sequences) * double(T);
    if (ctx.tp.rank > 0) return {};
    return {s.balance / tokens, 2 * s.z_loss / tokens, counts, T, ctx.loss_scale, ranks};
}

// The choice of experts: logits in acc, whatever the weights are, then slots by expert.
template <typename T, typename S>
void choose_experts(Ctx<S>& ctx, const Mixtral::Acts<T>& a, const T* x, // (N,C)
                    const Weight& router) {
    const Shape& s = ctx.shape;
    size_t N = ctx.batch.rows();
    const T* no_bias = nullptr;
    const acc_t<T>* no_residual = nullptr;

    // A product whose output is wider than its operands.
    Product p = linear_forward_product(N, s.E, s.C, type_of<T>());
    p.pack_b = false;
    matmul(a.logits, x, router.as<const T>(), no_bias, no_residual, p, ctx.blas, ctx.where);

    // Choose for this rank's tokens.
    int* ids = my_slots(ctx, a.ids);
    acc_t<T>* gates = my_slots(ctx, a.gates);
    route_forward(ids, gates, a.logits, routing_of(s), N, ctx.where);

    // Hear what others have chosen, then lay the slots of each expert together.
    gather_choices(ctx, a.ids, a.gates);
    sort_own_slots(ctx, a.slots, a.ids);
}

// The rows of slots, in the buffer that they share.
template <typename T, typename S>
T* gather_slots(Ctx<S>& ctx, const Mixtral::Acts<T>& a, const T* x) { // (M,C) of (N,C)
    // A slot's token is its number over K.
    const Shape& s = ctx.shape;
    T* rows = static_cast<T*>(ctx.slot_rows);
    size_t slots = expert_counts(s, ctx.batch.rows()).slots;
    const T* tokens = gather_tokens(ctx, x); // (ep,N,C)
    gather_slots(rows, tokens, a.slots.slot_of, rows_of(ctx, a), slots, s.K, s.C, ctx.where);
    return rows;
}

// gate and up of each slot, and swiglu; all of it where products are made again, or swiglu alone.
template <typename T, typename S>
void widen_slots(Ctx<S>& ctx, const Mixtral::Acts<T>& a, const T* x, // (N,C)
                 const Mixtral::Block& w, bool products) {
    const Shape& s = ctx.shape;
    size_t slots = expert_counts(s, ctx.batch.rows()).slots;

    // Each expert's rows by its own matrices.
    if (products) {
        const T* xs = gather_slots(ctx, a, x);
        Groups g = groups_of(ctx, a, w.gate);
        grouped_forward(a.gate, xs, w.gate.as<const T>(), g, ctx.blas, ctx.where);
        grouped_forward(a.up, xs, w.up.as<const T>(), g, ctx.blas, ctx.where);
    }
    gated_swiglu_forward(a.swiglu, a.gate, a.up, a.gates, a.slots.slot_of, rows_of(ctx, a), slots,
                         s.F, ctx.where);
}

// out = residual + each token's sum over its slots; residual and sum as row_parallel_forward has
// them, so that ranks add one residual.
template <typename T, typename S>
void combine_experts(Ctx<S>& ctx, T* out, const T* residual, // (R,C) (R,C)
                     const Mixtral::Acts<T>& a, const Mixtral::Block& w) {
    // The experts' inputs are over: their outputs take the buffer.
    const Shape& s = ctx.shape;
    T* y = static_cast<T*>(ctx.slot_rows); // (M,C) {+tp}
    grouped_forward(y, a.swiglu, w.down.as<const T>(), groups_of(ctx, a, w.down), ctx.blas,
                    ctx.where);

    // Sum what this rank's experts give to the tokens of all ranks.
    size_t parts = s.row_ranks;
    size_t R = stream_rows(ctx);
    T* partial = partial_rows(ctx, out);   // (N,C) {+tp}
    T* all = partial_tokens(ctx, partial); // (ep,N,C) {+ep} {+tp}
    for (size_t i = 0; i < s.expert_ranks * parts; i++) {
        // Tokens get their residual from their own rank; of tensor-parallel ranks scattered rows
        // get it from their owner, and whole ones from the first.
        bool own_tokens = i / parts == size_t(ctx.ep.rank);
        bool own_rows = parts > 1 ? i % parts == size_t(ctx.tp.rank) : ctx.tp.rank == 0;
        bool adds = own_tokens && own_rows;
        const int* row_of = a.slots.row_of + i * R * s.K;
        T* to = all + i * R * s.C;
        combine_slots(to, adds ? residual : nullptr, y, row_of, rows_of(ctx, a), R, s.K, s.C,
                      ctx.where);
    }
    sum_tokens(ctx, partial, all);
    sum_rows(ctx, out, partial);
}

// The input half: leaves gradients of gate, up and the router's logits for W, and dnorm_2.
template <typename T, typename S>
void experts_backward_input(Ctx<S>& ctx, const T* dout, const Mixtral::Block& w, // (R,C)
                            const Mixtral::Acts<T>& a) {
    const Shape& s = ctx.shape;
    size_t N = ctx.batch.rows();
    ExpertCounts n = expert_counts(s, N);

    // Walk back to gate and up, in place, and to the gates.
    T* dgate = a.dswiglu; // (M,F)
    const T* dys = gather_slots(ctx, a, gather_rows(ctx, a.dout_all, dout));
    Groups narrow = groups_of(ctx, a, w.down);
    grouped_backward_input(a.dswiglu, dys, w.down.as<const T>(), narrow, false, ctx.blas,
                           ctx.where);
    gated_swiglu_backward(dgate, a.dup, a.dgates, a.dswiglu, a.gate, a.up, a.gates,
                          a.slots.slot_of, rows_of(ctx, a), n.slots, s.F, ctx.where);
    sum_gates(ctx, a.dgates);

    // To the experts' inputs, and a token's sum of them.
    T* dxs = static_cast<T*>(ctx.slot_rows); // (M,C): dys is over
    Groups wide = groups_of(ctx, a, w.gate);
    grouped_backward_input(dxs, dgate, w.gate.as<const T>(), wide, false, ctx.blas, ctx.where);
    grouped_backward_input(dxs, a.dup, w.up.as<const T>(), wide, true, ctx.blas, ctx.where);
    const T* no_residual = nullptr;
    T* partial = partial_rows(ctx, a.dnorm_2); // (N,C) {+tp}
    T* all = partial_tokens(ctx, partial);     // (ep,N,C) {+ep} {+tp}
    combine_slots(all, no_residual, dxs, a.slots.row_of, rows_of(ctx, a), n.tokens, s.K, s.C,
                  ctx.where);
    sum_tokens(ctx, partial, all);

    // Through the router, with the balance of each sequence.
    int* counts = static_cast<int*>(ctx.blas.scratch); // (B,E)
    const int* ids = my_slots(ctx, a.ids);             // (N,K)
    if (s.balance > 0) {
        count_slots(counts, ids, ctx.batch.B, ctx.batch.T * s.K, s.E, ctx.where);
        // A sequence's slots are those of all ranks that share it.
        all_reduce_sum(ctx.cp, counts, ctx.batch.B * s.E, ctx.where);
    }
    route_backward(a.dlogits, my_slots(ctx, a.dgates), a.logits, ids, routing_of(s),
                   balance_terms(ctx, counts), N, ctx.where);
    linear_backward_input(partial, a.dlogits, w.router, N, true, ctx.blas, ctx.where);
    sum_rows(ctx, a.dnorm_2, partial);
}

// The weight half gathers rows again that the input half had: they are not worth keeping.
template <typename T, typename S>
void experts_backward_weight(Ctx<S>& ctx, const T* dout, const Mixtral::Block& w, // (R,C)
                             const Mixtral::Acts<T>& a, bool accumulate) {
    const Shape& s = ctx.shape;
    size_t N = ctx.batch.rows();
    auto backward = [&](const Weight& stack, const T* dy, const T* x) {
        // A frozen stack has no gradient.
        if (!stack.grad) return;
        grouped_backward_weight(grad_of<T>(stack), dy, x, groups_of(ctx, a, stack), accumulate,
                                ctx.blas, ctx.where);
    };

    // Gather the gradient of the experts' outputs, then their inputs.
    backward(w.down, gather_slots(ctx, a, s.row_ranks == 1 ? dout : a.dout_all), a.swiglu);

    // The router reads what the experts read.
    const T* x = gather_rows(ctx, a.norm_2); // (N,C)
    const T* xs = gather_slots(ctx, a, x);
    backward(w.gate, a.dswiglu, xs);
    backward(w.up, a.dup, xs);
    linear_backward_weight(w.router, nullptr, a.dlogits, x, N, accumulate, ctx.blas, ctx.where);
}

// ----------------------------------------------------------------------------
// the block: its first branch is llama.h's

template <typename T, typename S>
void block_forward(Ctx<S>& ctx, T* out, const T* inp, const Mixtral::Block& w,
                   const Mixtral::Acts<T>& a, T* cache) {
    // Let tokens look at those before them.
    first_branch_forward(ctx, inp, w, a, cache);

    // Let each token's experts work on what it saw.
    rmsnorm_forward(ctx, a.norm_2, a.norm_2_rstd, a.middle, w.norm_2);
    const T* x = gather_rows(ctx, a.norm_2); // (N,C)
    choose_experts(ctx, a, x, w.router);
    widen_slots(ctx, a, x, w, true);
    combine_experts(ctx, out, a.middle, a, w);
}

// Make again what the level of recomputation dropped. Experts were chosen by F.
template <typename T, typename S>
void block_recompute(Ctx<S>& ctx, const T* inp, const Mixtral::Block& w, const Mixtral::Acts<T>& a,
                     Recompute level) {
    first_branch_recompute(ctx, inp, w, a, level);

    // The second.
    rmsnorm_forward(ctx, a.norm_2, a.norm_2_rstd, a.middle, w.norm_2);
    const T* x = redoes_ffn(level) ? gather_rows(ctx, a.norm_2) : nullptr; // (N,C)
    widen_slots(ctx, a, x, w, redoes_ffn(level));
}

// Everything but the gradients of weights.
template <typename T, typename S>
void block_backward_input(Ctx<S>& ctx, T* dinp, const T* dout, const T* inp,
                          const Mixtral::Block& w, const Mixtral::Acts<T>& a) {
    // Walk back through the second branch, which leaves its own gradients for the weights.
    experts_backward_input(ctx, dout, w, a);
    rmsnorm_backward(ctx, a.dmiddle, a.norm_2_sums, dout, a.dnorm_2, a.middle, w.norm_2,
                     a.norm_2_rstd);

    // Walk back through the first.
    first_branch_backward_input(ctx, dinp, inp, w, a);
}

// The gradients of weights, from what the input half has made.
template <typename T, typename S>
void block_backward_weight(Ctx<S>& ctx, const T* dout, const Mixtral::Block& w,
                           const Mixtral::Acts<T>& a, bool accumulate) {
    // Give the experts' matrices and the router theirs, then the first branch's.
    experts_backward_weight(ctx, dout, w, a, accumulate);
    SumsOfRows<T> sums = {{}, {rmsnorm_parts<T>(ctx, w.norm_2, a.norm_2_sums)}};
    first_branch_backward_weight(ctx, sums, w, a, accumulate);

    // Add up the norms' parts together.
    column_sums<T>(sums.columns, sums.ready, ctx.blas.scratch, accumulate, ctx.where);
}

} // namespace llmc
