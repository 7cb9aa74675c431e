// mixtral.h - Mixtral, Qwen-MoE, OLMoE, gpt-oss: blocks with experts for an ffn - arXiv:2401.04088
//   block       x = x + o_proj(attention(rope(q), rope(k), v)),   q, k, v = proj(norm_1(x))
//               x = x + sum over the K chosen experts of down_e(g_e silu(gate_e) up_e)
//               gate_e, up_e = proj_e(norm_2(x)),   g_e: the router's gate for norm_2(x), moe.cuh
//   A block may also have an ffn for all tokens, beside its experts (shared) or instead (dense):
//               x = x + sum of the experts + [sigmoid(shared_router(norm_2(x)))] ffn(norm_2(x))
//   Both are one ffn here, of width W and cut like Llama's. Qwen2-MoE multiplies the shared one by
//   a gate, which is that of a router with one expert.
//   gpt-oss has biases in its router and experts, sinks (sinks.cuh), and a gate of its own:
//               + sum of g_e (down_e(act(gate_e, up_e)) + bias_e),   gate_e, up_e with biases
//   Ranks that cut an expert add bias_e once: the first one does.
//   The first branch, embedding, head and norms are those of llama.h. N: rows; E, K: experts in
//   all, and of a token; M = N K slots; F: the width of one expert.
//   The experts' matrices are stacks of E, in a bucket of their own; so are their adapters. Tensor
//   parallelism cuts each expert's F, as it cuts an ffn's. Every rank routes all N rows, with the
//   same bits, and has a part of the gates' gradients. So the router's gradient is a sum over
//   ranks, and only the first rank adds the balance terms.
//   Whole experts (--etp 1) make these ranks route n = N / tp rows each, their own. The router is
//   then trained by rows, and only the ffn for all tokens still has parts to sum over these ranks.
//   Choices, gates and order of slots are kept at every level of recomputation: R runs no router.
//   Expert parallelism gives each rank some of the experts, and those rows of the tokens of ep
//   ranks that chose them (expert_parallel.h). Choices are then (ep,N,K), and M is the most rows
//   that a rank may get.
//   Rows of slots (M,C) are never kept. One buffer in scratch serves in turn as the experts'
//   input and output; then, in backward, as the gradient of the output, that of the input, and
//   both inputs of W again. M is known, so all of this has its place before the run. No token is
//   dropped, unless experts have a capacity (expert_capacity.cuh), which then limits M too.
//   With --expert-rounds, M is the rows of one round, inner rows lie in scratch, and backward makes
//   them again (expert_parallel.h). Outputs and the inputs' gradients are the same sums in the same
//   order; between rounds they are rounded to the type of activations.
//   Cost: a block's forward pass takes 2 N C (2 Q + 2 KV + E + 3 K F) FLOPs in products.
#pragma once
#include "comm/comm.h"
#include "context.h"
#include "expert_parallel.h"
#include "llama.h"
#include "model.h"
#include "ops/attention_merge.cuh"
#include "ops/column_sums.cuh"
#include "ops/expert_capacity.cuh"
#include "ops/grouped_bias.cuh"
#include "ops/grouped_matmul.cuh"
#include "ops/grouped_mma.cuh"
#include "ops/linear.cuh"
#include "ops/lora_grouped.cuh"
#include "ops/matmul.cuh"
#include "ops/memory.h"
#include "ops/moe.cuh"
#include "ops/rand.h"
#include "ops/rmsnorm.cuh"
#include "ops/swiglu.cuh"
#include "ops/types.h"
#include "tensor_parallel.h"

namespace llmc {

// ----------------------------------------------------------------------------
// the family

// clang-format off
struct Mixtral {
    static constexpr const char* model_types[] = {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe",
                                                  "gpt_oss"};
    static constexpr const char* block_prefix = "model.layers.";
    static constexpr const char* body_prefix = "";              // names begin with "model." already
    static constexpr int widening_products = 2;                 // from C to F channels: gate, up

    typedef Llama::Embedding Embedding;
    typedef Llama::Head Head;

    // The weights of a block: those of attention, then these.
    struct Block : AttentionWeights {
        Weight norm_2;                            // (C)
        Weight router;                            // (E,C)
        Weight router_bias;                       // (E)
        Weight choice_bias;                       // (E)        read by the choice, never trained
        Weight gate, up, down;                    // (E F,C) (E F,C) (E C,F)
        // Biases of the experts; the last one joins an expert's output.
        Weight gate_bias;                         // (E F)
        Weight up_bias;                           // (E F)
        Weight down_bias;                         // (E C)
        // An ffn instead of the experts, or one for all tokens beside them; W channels.
        Weight shared_router;                     // (1,C)
        Weight ffn_gate, ffn_up, ffn_down;        // (W,C) (W,C) (C,W)
    };

    // The activations and gradients of a block: those of attention, then these.
    template <typename T> struct Acts : AttentionActs<T> {
        T* norm_2;                                // (R,C)
        acc_t<T>* norm_2_rstd;                    // (R)
        acc_t<T> *logits, *gates;                 // (N,E) (ep,N,K)
        int* ids;                                 // (ep,N,K)   E: dropped
        int* choices;                             // (N,K)      with a capacity: before the drops
        Slots slots;                              // (groups) (groups+1) (ep,N,K) (ep N K)
        int* round_starts;                        // (rounds,experts+1)
        T *gate, *up, *swiglu;                    // (M,F) (M,F) (M,F)
        acc_t<T> *shared_logits, *shared_gates;   // (N) (N)
        int* shared_ids;                          // (N)        zeros: a choice of one
        T *ffn_gate, *ffn_up, *ffn_swiglu;        // (N,W) (N,W) (N,W)

        T *dswiglu, *dup, *dlogits;               // (M,F) (M,F) (N,E)
        acc_t<T>* dgates;                         // (ep,N,K)
        T *dffn_swiglu, *dffn_up, *dshared_logits; // (N,W) (N,W) (N)
        acc_t<T>* dshared_gates;                  // (N)
        T* dnorm_2;                               // (R,C)
        acc_t<T>* norm_2_sums;                    // parts of the norm's dweight
        T* dout_all;                              // (N,C)      rows of all ranks, where R < N
    };
};
// clang-format on

// ----------------------------------------------------------------------------
// tables

// clang-format off
// The router is whole on every rank. Its gradient comes from the rank's part of each expert.
template <typename Row>
void second_branch_parameters(Mixtral::Block& w, const Shape& s, Row& row) {
    size_t C = s.C;
    Shard whole = {}, columns = {0}, rows = {1};
    Shard heads = {-1, 1, 0, Partial::HEADS};
    Init normal = normal_init(0.02);
    Init small = normal_init(0.02 / std::sqrt(2.0 * s.L));
    const char* router = s.hf_type == "mixtral" ? "block_sparse_moe.gate.weight"
                         : s.expert_bias        ? "mlp.router.weight"
                                                : "mlp.gate.weight";

    //  weight    name                               shape    start   decays cut      transposed
    row(w.norm_2, "post_attention_layernorm.weight", {C},     ONES,   false, whole,   false);
    if (s.E)
        row(w.router, router,                        {s.E, C}, normal, true, heads,   false);
    if (s.E && s.expert_bias)
        row(w.router_bias, "mlp.router.bias",        {s.E},   ZEROS,  false, heads,   false);
    if (s.E && s.choice_bias)
        row(w.choice_bias, "mlp.gate.e_score_correction_bias", {s.E}, ZEROS, false, heads, false);
    if (s.E && s.shared_gate)
        row(w.shared_router, "mlp.shared_expert_gate.weight", {1, C}, normal, true, heads, false);
    if (size_t W = s.ffn_beside) {
        // An ffn instead of the experts has the names of Llama's.
        std::string mlp = s.E == 0 ? "mlp." : s.kv_latent ? "mlp.shared_experts."
                                                          : "mlp.shared_expert.";
        std::string gate = mlp + "gate_proj.weight";
        std::string up = mlp + "up_proj.weight";
        std::string down = mlp + "down_proj.weight";
        row(w.ffn_gate, gate.c_str(),                {W, C},   normal, true, columns, false);
        row(w.ffn_up,   up.c_str(),                  {W, C},   normal, true, columns, false);
        row(w.ffn_down, down.c_str(),                {C, W},   small,  true, rows,    false);
    }
}

// The weights of a block, but for its experts.
template <typename Row>
void block_parameters(Mixtral::Block& w, const Shape& s, Row row) {
    attention_parameters(w, s, row);
    second_branch_parameters(w, s, row);
}

// The experts' matrices. A stack has E matrices, one below the other; {} is an expert's number
// in the files.
template <typename Row>
void expert_parameters(Mixtral::Block& w, const Shape& s, Row row) {
    // Tensor parallelism cuts each expert for itself.
    size_t C = s.C;
    size_t F = s.F;
    size_t E = s.E;
    Shard columns = {0, int(E)}, rows = {1};
    Shard first = {-1, 1, 0, Partial::HEADS}; // its gradient is made by the first rank alone
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

    // Two matrices widen, one returns to the stream.
    //  weight    name  shape       start   decays cut      transposed
    row(w.gate,   gate, {E * F, C}, normal, true,  columns, false);
    row(w.up,     up,   {E * F, C}, normal, true,  columns, false);
    row(w.down,   down, {E * C, F}, small,  true,  rows,    false);
    if (!s.expert_bias) return;
    row(w.gate_bias, "mlp.experts.{}.gate_proj.bias", {E * F}, ZEROS, false, columns, false);
    row(w.up_bias,   "mlp.experts.{}.up_proj.bias",   {E * F}, ZEROS, false, columns, false);
    row(w.down_bias, "mlp.experts.{}.down_proj.bias", {E * C}, ZEROS, false, first,   false);
}

// Whether choices are kept apart from the slots that experts take: a capacity drops some, and whole
// experts know those of all rows, as what counts a sequence's choices must.
inline bool keeps_choices(const Shape& s) { return s.capacity.slots || s.whole_experts; }

// Whether the second branch reads all N rows: whole experts alone read those of this rank.
inline bool reads_all_rows(const Shape& s) { return s.ffn_beside || !s.whole_experts; }

// The activations of experts and ffn. Slots have M = N K rows, whoever is chosen, or with expert
// parallelism at most M. So an arena that fits once always fits.
template <typename T, typename Row>
void ffn_activations(Mixtral::Acts<T>& a, const Shape& s, size_t N, Row& row) {
    // The ffn has a row for each token, the experts one for each slot.
    size_t F = s.F;
    size_t width = s.ffn_beside;
    size_t routed = routed_rows(s, N);
    ExpertCounts n = s.E ? expert_counts(s, N) : ExpertCounts();
    size_t M = n.rows;
    bool rounds = n.rounds > 1;
    bool gates_in_w = rounds || s.expert_bias; // W reads them for the biases of outputs
    using enum Keep;
    using enum Last;
    auto [attention, wide, down, experts_down] = inputs_kept(s);

    //  pointer         name                    elements   of        last read
    if (s.E) {
        row(a.logits,       "router's logits",      routed * s.E, ROUTING, B);
        row(a.gates,        "gates",                n.slots,  ROUTING, gates_in_w ? W : B);
        row(a.ids,          "chosen experts",       n.slots,  ROUTING, W);
        if (keeps_choices(s))
            row(a.choices,  "router's choices",     N * s.K,  ROUTING, B);
        row(a.slots.row_of, "rows of slots",        n.slots,  ROUTING, B);
        row(a.slots.slot_of, "slots of rows",       n.slots,  ROUTING, W);
        row(a.slots.counts, "experts' loads",       n.groups, ROUTING, W);
        row(a.slots.starts, "experts' first rows",  n.groups + 1, ROUTING, W);
        row(a.dgates,       "d gates",              n.slots,  GRADIENT, B);
        row(a.dlogits,      "d router's logits",    routed * s.E, GRADIENT, W);
    }
    if (s.E && rounds)
        row(a.round_starts, "first rows in rounds", n.rounds * (n.experts + 1), ROUTING, W);
    if (s.E && !rounds) {
        row(a.gate,         "gate",                 M * F,    FFN,     B);
        row(a.up,           "up",                   M * F,    FFN,     B);
        row(a.swiglu,       "swiglu",               M * F,    experts_down, W);
        row(a.dswiglu,      "d swiglu, d gate",     M * F,    GRADIENT, W);
        row(a.dup,          "d up",                 M * F,    GRADIENT, W);
    }
    if (s.E && s.shared_gate) {
        row(a.shared_logits, "shared gate's logits", N,      ROUTING, B);
        row(a.shared_gates,  "shared gates",         N,      ROUTING, B);
        row(a.shared_ids,    "shared experts",       N,      ROUTING, B);
        row(a.dshared_gates, "d shared gates",       N,      GRADIENT, B);
        row(a.dshared_logits, "d shared gate's logits", N,   GRADIENT, W);
    }
    if (width) {
        row(a.ffn_gate,     "ffn's gate",           N * width,   FFN,     B);
        row(a.ffn_up,       "ffn's up",             N * width,   FFN,     B);
        row(a.ffn_swiglu,   "ffn's swiglu",         N * width,   down,    W);
        row(a.dffn_swiglu,  "d ffn's swiglu, d gate", N * width, GRADIENT, W);
        row(a.dffn_up,      "d ffn's up",           N * width,   GRADIENT, W);
    }
}

// The activations and gradients of the second branch.
template <typename T, typename S, typename Row>
void second_branch_activations(Mixtral::Acts<T>& a, const Shape& s, size_t N, S where, Row& row) {
    size_t C = s.C;
    size_t R = N / s.row_ranks; // of the residual stream
    using enum Keep;
    using enum Last;

    //  pointer         name                    elements   of        last read
    row(a.norm_2,       "norm_2",               R * C,     CHEAP,    W);
    row(a.norm_2_rstd,  "norm_2.rstd",          R,         CHEAP,    B);
    ffn_activations(a, s, N, row);
    row(a.dnorm_2,      "d norm_2",             R * C,     GRADIENT, B);
    row(a.norm_2_sums,  "d norm_2, sums", rmsnorm_sums(R, C, where), GRADIENT, W);
    if (s.row_ranks > 1 && reads_all_rows(s))
        row(a.dout_all, "d out, all rows",      N * C,     GRADIENT, W);
}

// All activations and gradients of a block.
template <typename T, typename S, typename Row>
void block_activations(Mixtral::Acts<T>& a, const Shape& s, size_t N, S where, Row row) {
    attention_activations(a, s, N, where, row);
    second_branch_activations(a, s, N, where, row);
}

// clang-format on

// ----------------------------------------------------------------------------
// experts

// The settings of the router, as kernels take them.
inline Routing routing_of(const Shape& s) {
    return {s.router, s.E, s.K, s.gate_scale, nullptr, s.expert_groups, s.kept_groups};
}

// The activation of the experts, as kernels take it.
inline ExpertGate gate_of(const Shape& s) {
    // Without a limit it is SwiGLU's.
    if (s.gate_limit == 0) return {};
    return {s.gate_alpha, s.gate_limit, 1};
}

// The gate of the shared expert: a router with one expert to choose from.
inline Routing shared_routing() { return {Router::SIGMOID_ALONE, 1, 1}; }

// A round of the rows of this rank's experts, and its inner rows.
template <typename T> struct Round {
    size_t first;       // its first row
    size_t slots;       // that it may have
    const int* starts;  // (experts+1) where each expert begins, counted from `first`
    const int* rows;    // 1 int on the device: how many rows it has, where the last expert ends
    const int* slot_of; // (slots) the slot of each row
    T *gate, *up, *swiglu, *dswiglu, *dup; // (M,F) each
};
template <typename S>
size_t rounds_of(const Ctx<S>& ctx) {
    return expert_counts(ctx.shape, ctx.batch.rows()).rounds;
}
template <typename T, typename S>
Round<T> round_of(const Ctx<S>& ctx, const Mixtral::Acts<T>& a, size_t i) {
    // A single round has all rows, and its inner rows are activations.
    ExpertCounts n = expert_counts(ctx.shape, ctx.batch.rows());
    const int* starts = a.slots.starts;
    if (n.rounds == 1)
        return {0, n.slots, starts, starts + n.experts, a.slots.slot_of,
                a.gate, a.up, a.swiglu, a.dswiglu, a.dup};

    // Rounds share three buffers in scratch. Gradients overwrite what they are made from.
    size_t first = i * n.rows;
    starts = a.round_starts + i * (n.experts + 1);
    T* rows = static_cast<T*>(ctx.slot_rows);
    T* gate = rows + inner_rows(ctx.shape, n, 0);
    T* up = rows + inner_rows(ctx.shape, n, 1);
    T* swiglu = rows + inner_rows(ctx.shape, n, 2);
    return {first, std::min(n.rows, n.slots - first), starts, starts + n.experts,
            a.slots.slot_of + first, gate, up, swiglu, swiglu, up};
}

// A stack of this rank's experts, as the grouped products take it.
template <typename T, typename S>
Groups groups_of(const Ctx<S>& ctx, const Round<T>& r, const Weight& stack) {
    ExpertCounts n = expert_counts(ctx.shape, ctx.batch.rows());
    return {r.starts, n.experts, stack.rows / n.experts, stack.cols, n.rows};
}

// The three products of a stack with a round's rows, each followed by those of its adapters.
template <typename T, typename S>
void stack_forward(Ctx<S>& ctx, T* out, const T* inp, const Weight& stack, // (M,OC) (M,IC)
                   const Round<T>& r) {
    Groups g = groups_of(ctx, r, stack);
    const T* w = stack.as<const T>();
    T* room = lora_room<T>(ctx.blas);
    grouped_forward(out, inp, w, g, false, ctx.blas, ctx.where);
    if (stack.lora)
        lora_grouped_forward(out, inp, *stack.lora, room, g, ctx.blas, ctx.where);
}
template <typename T, typename S>
void stack_backward_input(Ctx<S>& ctx, T* dinp, const T* dout, const Weight& stack, // (M,IC) (M,OC)
                          const Round<T>& r, bool accumulate) {
    Groups g = groups_of(ctx, r, stack);
    const T* w = stack.as<const T>();
    T* room = lora_room<T>(ctx.blas);
    grouped_backward_input(dinp, dout, w, g, accumulate, ctx.blas, ctx.where);
    if (stack.lora)
        lora_grouped_backward_input(dinp, dout, *stack.lora, room, g, ctx.blas, ctx.where);
}
template <typename T, typename S>
void stack_backward_weight(Ctx<S>& ctx, const Weight& stack, const T* dout, const T* inp,
                           const Round<T>& r, bool accumulate) { // (M,OC) (M,IC)
    Groups g = groups_of(ctx, r, stack);
    acc_t<T>* dw = grad_of<T>(stack);
    T* room = lora_room<T>(ctx.blas);
    if (dw)
        grouped_backward_weight(dw, dout, inp, g, accumulate, ctx.blas, ctx.where);
    if (stack.lora)
        lora_grouped_backward_weight(*stack.lora, dout, inp, room, g, accumulate, ctx.blas,
                                     ctx.where);
}

// The experts' biases beside a round's rows of C channels. gates: null, or what multiplies them.
template <typename T, typename S>
GroupedBias<acc_t<T>> biases_of(const Ctx<S>& ctx, const Round<T>& r,
                                const Weight& bias,
                                const acc_t<T>* gates) {
    // An expert has as many channels as its biases.
    ExpertCounts n = expert_counts(ctx.shape, ctx.batch.rows());
    size_t channels = bias.rows / n.experts;
    return {{r.starts, n.experts, channels, 1, n.rows}, gates, r.slot_of};
}

// rows += each expert's bias, if the model has any.
template <typename T, typename S>
void add_biases(Ctx<S>& ctx, T* rows, // (M,OC)
                const Weight& bias, const Round<T>& r,
                const acc_t<T>* gates = nullptr) {
    if (!bias.data) return;
    // Rows that end a round's room have no expert, and get nothing.
    const T* b = bias.as<const T>();
    GroupedBias<acc_t<T>> biases = biases_of(ctx, r, bias, gates);
    grouped_bias_forward(rows, b, biases, ctx.where);
}

// The gradient of the experts' biases. Ranks that make none of it have zeros.
template <typename T, typename S>
void biases_backward(Ctx<S>& ctx, const Weight& bias,
                     const T* drows, // (M,OC)
                     const Round<T>& r, bool accumulate,
                     const acc_t<T>* gates = nullptr,
                     bool mine = true) {
    // A frozen bias, or one that the model does not have, has no gradient.
    acc_t<T>* grad = grad_of<T>(bias);
    if (!grad) return;

    // Sum over each expert's rows.
    size_t bytes = bias.rows * sizeof(acc_t<T>);
    GroupedBias<acc_t<T>> biases = biases_of(ctx, r, bias, gates);
    if (mine)
        grouped_bias_backward(grad, drows, biases, accumulate, ctx.where);
    else if (!accumulate)
        device_zero(grad, bytes, ctx.where);
}

// Whether this rank adds the biases of the experts' outputs: ranks that cut them sum their outputs.
template <typename S>
bool adds_output_bias(const Ctx<S>& ctx) {
    // The residual, too, is added by one rank alone.
    return ctx.tp.rank == 0 || ctx.shape.whole_experts;
}

// Whether the weights of experts, or adapters beside them, have gradients. Nothing else in W reads
// the rows of slots.
inline bool stacks_learn(const Mixtral::Block& w) {
    return learns(w.gate) || learns(w.up) || learns(w.down);
}

// The balance terms that this rank adds. Of the tensor-parallel ranks that route the same rows only
// the first adds them.
template <typename S>
BalanceTerms balance_terms(const Ctx<S>& ctx, const int* counts) {
    // A term is a mean over the sequences of the step, and over the tokens of each.
    const Shape& s = ctx.shape;
    size_t ranks = size_t(ctx.cp.size);
    size_t T = ctx.batch.T * ranks;
    double tokens = double(ctx.sequences) * double(T);
    if (ctx.tp.rank > 0 && !s.whole_experts)
        return {};
    return {s.balance / tokens, 2 * s.z_loss / tokens, counts, T, ctx.loss_scale, ranks,
            first_routed(ctx)};
}

// logits = x router^T + bias for N rows, with the output in acc whatever the type of the weights.
template <typename T, typename S>
void router_logits(Ctx<S>& ctx, acc_t<T>* logits, const T* x, size_t N, // (N,E) (N,C)
                   const Weight& router, const Weight& bias = {}) {
    // The product has no bias in acc: it adds to rows that begin as the bias.
    size_t E = router.rows;
    const T* no_bias = nullptr;
    const acc_t<T>* no_residual = nullptr;
    Product p = linear_forward_product(N, E, ctx.shape.C, type_of<T>());
    p.pack_b = false;
    p.accumulate = bias.data;

    // Every row begins as the same one, widened to acc.
    if (bias.data) {
        const T* b = bias.as<const T>();
        round_rows(logits, E, b, 0, N, E, ctx.where);
    }
    matmul(logits, x, router.as<const T>(), no_bias, no_residual, p, ctx.blas, ctx.where);
}

// The choices of all N rows, whether or not the experts have room for them.
template <typename T, typename S>
int* all_choices(const Ctx<S>& ctx, const Mixtral::Acts<T>& a) { // (N,K)
    return keeps_choices(ctx.shape) ? a.choices : my_slots(ctx, a.ids);
}

// The choices of the rows that this rank routes.
template <typename T, typename S>
int* choices_of(const Ctx<S>& ctx, const Mixtral::Acts<T>& a) { // (n,K)
    return all_choices(ctx, a) + first_routed(ctx) * ctx.shape.K;
}

// Know the choices of all rows: beside whole experts each tensor-parallel rank routes some of them.
template <typename S>
void share_choices(Ctx<S>& ctx, int* all, const int* own) { // (N,K) (n,K)
    size_t n = routed_rows(ctx);
    bool shared = n < ctx.batch.rows();
    if (shared)
        all_gather(ctx.tp, all, own, n * ctx.shape.K, ctx.where);
}

// Leave what experts have room for in the ids of this rank's rows, and add the rest of all rows to
// the step's count.
template <typename S>
void take_choices(Ctx<S>& ctx, int* ids, const int* choices) { // (n,K) (N,K)
    const Shape& s = ctx.shape;
    size_t M = ctx.batch.rows() * s.K;
    size_t length = ctx.batch.T * s.K; // slots of a sequence
    if (s.capacity.slots) {
        // The loads of all blocks come first.
        int* dropped = ctx.loads ? ctx.loads + s.L * s.E : nullptr; // (E)
        int* room = static_cast<int*>(ctx.blas.scratch);            // (N,K)
        int* taken = s.whole_experts ? room : ids;
        drop_over_capacity(taken, dropped, choices, M, length, s.E, s.capacity.slots, ctx.where);
        choices = taken;
    }

    // Whole experts have decided on all rows: keep this rank's.
    if (!s.whole_experts) return;
    const int* own = choices + first_routed(ctx) * s.K; // (n,K)
    size_t bytes = routed_rows(ctx) * s.K * sizeof(int);
    copy_rows(ids, bytes, own, bytes, bytes, 1, ctx.where);
}

// Run the router: choose experts, compute gates, and sort slots by expert.
template <typename T, typename S>
void choose_experts(Ctx<S>& ctx, const Mixtral::Acts<T>& a, const T* x, // (n,C)
                    const Mixtral::Block& w) {
    const Shape& s = ctx.shape;
    size_t N = ctx.batch.rows();
    size_t n = routed_rows(ctx);
    router_logits(ctx, a.logits, x, n, w.router, w.router_bias);

    // Widen the choice's bias to float, whatever the type of the weights.
    Routing routing = routing_of(s);
    if (s.choice_bias) {
        float* bias = static_cast<float*>(ctx.blas.scratch); // (E)
        round_rows(bias, s.E, w.choice_bias.as<const T>(), s.E, 1, s.E, ctx.where);
        routing.bias = bias;
    }

    // Choose for this rank's tokens.
    int* choices = all_choices(ctx, a); // (N,K)
    int* own = choices_of(ctx, a);      // (n,K)
    route_forward(own, my_slots(ctx, a.gates), a.logits, routing, n, ctx.where);
    share_choices(ctx, choices, own);
    if (ctx.loads)
        count_slots(ctx.loads, choices, 1, N * s.K, s.E, true, ctx.where);
    take_choices(ctx, my_slots(ctx, a.ids), choices);

    // Gather the choices of other expert-parallel ranks, then sort all slots by expert.
    gather_choices(ctx, a.ids, a.gates);
    sort_own_slots(ctx, a.slots, a.ids);
    ExpertCounts room = expert_counts(s, N);
    if (room.rounds > 1)
        round_starts(a.round_starts, a.slots.starts, room.rounds, room.rows, room.experts,
                     ctx.where);
}

// The gates of the shared expert. Every token is a slot, in a row of its own.
template <typename T, typename S>
void gate_shared_experts(Ctx<S>& ctx, const Mixtral::Acts<T>& a, const T* x, // (N,C)
                         const Weight& router) {
    size_t N = ctx.batch.rows();
    if (!router.data) return;
    // There is one expert to choose from, whose gate is the sigmoid of its logit.
    router_logits(ctx, a.shared_logits, x, N, router);
    route_forward(a.shared_ids, a.shared_gates, a.shared_logits, shared_routing(), N, ctx.where);
}

// swiglu of the ffn, times each token's gate if the shared expert has one.
template <typename T, typename S>
void ffn_swiglu(Ctx<S>& ctx, const Mixtral::Acts<T>& a, const Mixtral::Block& w) {
    size_t N = ctx.batch.rows();
    size_t W = ctx.shape.ffn_beside;
    // Null: a slot for each token, in a row of its own.
    const int *every_row = nullptr, *all_rows = nullptr;
    if (w.shared_router.data)
        gated_swiglu_forward(a.ffn_swiglu, a.ffn_gate, a.ffn_up, a.shared_gates, every_row,
                             all_rows, N, W, ctx.where);
    else
        swiglu_forward(a.ffn_swiglu, a.ffn_gate, a.ffn_up, N * W, ctx.where, ctx.shape.gate);
}

// The ffn for all tokens, up to its last product. With `products` false only swiglu
// is computed again.
template <typename T, typename S>
void widen_ffn(Ctx<S>& ctx, const Mixtral::Acts<T>& a, const T* x, // (N,C)
               const Mixtral::Block& w, bool products) {
    if (!ctx.shape.ffn_beside) return;
    size_t N = ctx.batch.rows();
    const T* no_residual = nullptr;
    // gate and up read the same rows as the experts do.
    if (products) {
        linear_forward(a.ffn_gate, x, w.ffn_gate, nullptr, no_residual, N, ctx.blas, ctx.where);
        linear_forward(a.ffn_up, x, w.ffn_up, nullptr, no_residual, N, ctx.blas, ctx.where);
    }
    ffn_swiglu(ctx, a, w);
}

// rows = residual + the ffn of this rank's tokens. Ranks add the residual
// as in row_parallel_forward.
template <typename T, typename S>
void ffn_forward(Ctx<S>& ctx, T* rows, const T* residual, // (N,C) {+tp} (R,C)
                 const Mixtral::Acts<T>& a, const Mixtral::Block& w) {
    const Shape& s = ctx.shape;
    size_t parts = s.row_ranks;
    size_t R = stream_rows(ctx);
    for (size_t i = 0; i < parts; i++) {
        // With sequence parallelism the owner of a row adds its residual; without it the
        // first rank does.
        bool adds = parts > 1 ? i == size_t(ctx.tp.rank) : ctx.tp.rank == 0;
        linear_forward(rows + i * R * s.C, a.ffn_swiglu + i * R * s.ffn_beside, w.ffn_down, nullptr,
                       adds ? residual : (const T*)nullptr, R, ctx.blas, ctx.where);
    }
}

// Gather the rows of a round's tokens into the buffer of slots, ctx.slot_rows.
template <typename T, typename S>
T* gather_slots(Ctx<S>& ctx, const Round<T>& r, const T* tokens) { // (M,C) of (ep,N,C)
    // The token of a slot is its number over K.
    const Shape& s = ctx.shape;
    T* rows = static_cast<T*>(ctx.slot_rows);
    gather_slots(rows, tokens, r.slot_of, r.rows, r.slots, s.K, s.C, ctx.where);
    return rows;
}

// gate and up of a round's slots: each expert's rows times its own matrices.
template <typename T, typename S>
void multiply_slots(Ctx<S>& ctx, const Round<T>& r, const T* tokens, // (ep,N,C)
                    const Mixtral::Block& w) {
    const T* xs = gather_slots(ctx, r, tokens);
    stack_forward(ctx, r.gate, xs, w.gate, r);
    stack_forward(ctx, r.up, xs, w.up, r);
    add_biases(ctx, r.gate, w.gate_bias, r);
    add_biases(ctx, r.up, w.up_bias, r);
}

// swiglu of a round's slots.
template <typename T, typename S>
void swiglu_slots(Ctx<S>& ctx, const Mixtral::Acts<T>& a, const Round<T>& r) {
    gated_swiglu_forward(r.swiglu, r.gate, r.up, a.gates, r.slot_of, r.rows, r.slots, ctx.shape.F,
                         ctx.where, gate_of(ctx.shape));
}

// gate, up and swiglu of each slot, which are kept. With `products` false only swiglu is computed
// again. Rounds keep nothing: each makes its own.
template <typename T, typename S>
void widen_slots(Ctx<S>& ctx, const Mixtral::Acts<T>& a, TokensComing<T, S>& tokens,
                 const Mixtral::Block& w, bool products) {
    if (rounds_of(ctx) > 1) return;
    Round<T> all = round_of(ctx, a, 0);
    if (products) multiply_slots(ctx, all, finish_tokens(ctx, tokens), w);
    swiglu_slots(ctx, a, all);
}

// Add the outputs of a round's experts to the rows of their tokens. In the first round a token's
// own rank begins with the residual, as in row_parallel_forward, or with the ffn that has it.
template <typename T, typename S>
void add_experts(Ctx<S>& ctx, T* all, const T* residual, const T* y, // (ep,N,C) (R,C) (M,C)
                 const Mixtral::Acts<T>& a, const Round<T>& r) {
    const Shape& s = ctx.shape;
    size_t parts = s.whole_experts ? 1 : s.row_ranks;
    size_t R = stream_rows(ctx);
    for (size_t i = 0; i < s.expert_ranks * parts; i++) {
        // The residual of a token is added by its own rank. Among tensor-parallel ranks that is the
        // row's owner under sequence parallelism, otherwise the first rank.
        bool own_tokens = i / parts == size_t(ctx.ep.rank);
        bool own_rows = parts > 1 ? i % parts == size_t(ctx.tp.rank)
                                  : ctx.tp.rank == 0 || s.whole_experts;
        bool adds = own_tokens && own_rows;
        const int* row_of = a.slots.row_of + i * R * s.K;
        T* to = all + i * R * s.C;
        const T* before = adds ? residual : nullptr;

        // The experts add to the ffn, and to the rounds before, in place.
        bool begun = own_tokens && s.ffn_beside && !s.whole_experts;
        if (begun || r.first) before = to;
        combine_slots(to, before, y, row_of, r.first, r.rows, R, s.K, s.C, ctx.where);
    }
}

// out = residual + the ffn, where no experts add to it before ranks sum their parts.
template <typename T, typename S>
void sum_ffn(Ctx<S>& ctx, T* out, const T* residual, // (R,C) (R,C)
             const Mixtral::Acts<T>& a, const Mixtral::Block& w) {
    T* partial = partial_rows(ctx, out); // (N,C) {+tp}
    ffn_forward(ctx, partial, residual, a, w);
    sum_rows(ctx, out, partial);
}

// The place for what experts add to the rows that this rank routes, before tensor-parallel ranks
// sum it. Whole experts leave them nothing to sum.
template <typename T, typename S>
T* partial_of_experts(Ctx<S>& ctx, T* out) { // (n,C) for (R,C)
    return ctx.shape.whole_experts ? out : partial_rows(ctx, out);
}

// The rows of a block's second branch as its parts read them.
template <typename T> struct BranchRows {
    const T* routed; // (n,C) for the experts
    const T* all;    // (N,C) for the ffn
};
template <typename T>
BranchRows<T> branch_rows(const Shape& s, const T* own, const T* all) { // (R,C) (N,C)
    return {s.whole_experts ? own : all, all};
}
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

// out = residual + the ffn + each token's sum over its slots. As in row_parallel_forward, only one
// rank adds the residual of a row, and the ranks' results are summed.
template <typename T, typename S>
void combine_experts(Ctx<S>& ctx, T* out, const T* residual, TokensComing<T, S>& tokens, // (R,C)
                     const Mixtral::Acts<T>& a, const Mixtral::Block& w) {
    const Shape& s = ctx.shape;
    size_t rounds = rounds_of(ctx);

    // Sum what this rank's experts contribute to the tokens of all expert-parallel ranks. Whole
    // experts begin with the ffn's sum.
    T* y = static_cast<T*>(ctx.slot_rows);     // (M,C) {+tp}
    T* partial = partial_of_experts(ctx, out); // (n,C) {+tp}
    T* all = partial_tokens(ctx, partial);     // (ep,n,C) {+ep} {+tp}
    if (s.ffn_beside && s.whole_experts) {
        sum_ffn(ctx, out, residual, a, w);
        residual = out;
    } else if (s.ffn_beside) {
        T* own = all + size_t(ctx.ep.rank) * ctx.batch.rows() * s.C;
        ffn_forward(ctx, own, residual, a, w);
    }
    for (size_t i = 0; i < rounds; i++) {
        Round<T> r = round_of(ctx, a, i);
        // Rounds read the inputs while sums grow.
        if (rounds > 1) {
            multiply_slots(ctx, r, finish_tokens(ctx, tokens), w);
            swiglu_slots(ctx, a, r);
        }

        // The experts' outputs overwrite their inputs, which are no longer needed.
        stack_forward(ctx, y, (const T*)r.swiglu, w.down, r);
        if (adds_output_bias(ctx)) add_biases(ctx, y, w.down_bias, r, a.gates);
        add_experts(ctx, all, residual, y, a, r);
    }
    sum_tokens(ctx, partial, all, a.ids);
    if (!s.whole_experts) return sum_rows(ctx, out, partial);

    // Whole experts have the sum. Where all ranks have all rows, the first one's bits are theirs.
    if (s.row_ranks > 1) return;
    size_t bytes = ctx.batch.rows() * s.C * sizeof(T);
    if (ctx.tp.rank > 0)
        device_zero(out, bytes, ctx.where);
    sum_rows(ctx, out, out);
}

// Go back from the ffn's output to gate and up, in place.
template <typename T, typename S>
void ffn_narrow_backward(Ctx<S>& ctx, const T* dout, // (N,C)
                         const Mixtral::Block& w, const Mixtral::Acts<T>& a) {
    size_t N = ctx.batch.rows();
    size_t W = ctx.shape.ffn_beside;
    T* dgate = a.dffn_swiglu; // (N,W)
    // Null: a slot for each token, in a row of its own.
    const int *every_row = nullptr, *all_rows = nullptr;
    linear_backward_input(a.dffn_swiglu, dout, w.ffn_down, N, false, ctx.blas, ctx.where);
    if (w.shared_router.data)
        gated_swiglu_backward(dgate, a.dffn_up, a.dshared_gates, a.dffn_swiglu, a.ffn_gate,
                              a.ffn_up, a.shared_gates, every_row, all_rows, N, W, ctx.where);
    else
        swiglu_backward(dgate, a.dffn_up, a.dffn_swiglu, a.ffn_gate, a.ffn_up, N * W, ctx.where,
                        ctx.shape.gate);
}

// Go back from the experts' outputs to gate and up, in place, and to the gates.
template <typename T, typename S>
void narrow_backward(Ctx<S>& ctx, const T* douts, acc_t<T>* dgates, // (ep,N,C) (ep,N,K) or null
                     const Mixtral::Block& w, const Mixtral::Acts<T>& a, const Round<T>& r) {
    const T* dys = gather_slots(ctx, r, douts); // (M,C)
    T* dgate = r.dswiglu;                       // (M,F)
    stack_backward_input(ctx, r.dswiglu, dys, w.down, r, false);
    gated_swiglu_backward(dgate, r.dup, dgates, r.dswiglu, r.gate, r.up, a.gates, r.slot_of, r.rows,
                          r.slots, ctx.shape.F, ctx.where, gate_of(ctx.shape));

    // A gate multiplies the output's bias too, on the rank that adds it.
    bool adds = w.down_bias.data && adds_output_bias(ctx);
    if (!dgates || !adds) return;
    const acc_t<T>* gates = a.gates;
    const T* bias = w.down_bias.as<const T>();
    GroupedBias<acc_t<T>> biases = biases_of(ctx, r, w.down_bias, gates);
    grouped_bias_backward_gates(dgates, dys, bias, biases, ctx.where);
}

// Go back from gate and up to a round's inputs, and add them to `all`; the first round overwrites.
template <typename T, typename S>
void wide_backward(Ctx<S>& ctx, T* all, const Mixtral::Block& w, // (ep,N,C)
                   const Mixtral::Acts<T>& a, const Round<T>& r) {
    const Shape& s = ctx.shape;
    ExpertCounts n = expert_counts(s, ctx.batch.rows());
    T* dxs = static_cast<T*>(ctx.slot_rows); // (M,C): dys is no longer needed
    stack_backward_input(ctx, dxs, (const T*)r.dswiglu, w.gate, r, false);
    stack_backward_input(ctx, dxs, (const T*)r.dup, w.up, r, true);
    const T* before = r.first ? all : nullptr;
    combine_slots(all, before, dxs, a.slots.row_of, r.first, r.rows, n.tokens, s.K, s.C,
                  ctx.where);
}

// Go back through all rounds of the experts, to their inputs and to the gates. The first half of
// the ffn's way back runs while the outputs' gradients travel.
template <typename T, typename S>
void rounds_backward_input(Ctx<S>& ctx, T* partial, const BranchRows<T>& dout, // (n,C) {+tp}
                           const Mixtral::Block& w, const Mixtral::Acts<T>& a) {
    size_t rounds = rounds_of(ctx);
    const T* tokens = nullptr; // (ep,n,C)
    if (rounds > 1) {
        const T* own = a.norm_2; // (R,C)
        const T* x = ctx.shape.whole_experts ? own : gather_rows(ctx, own); // (n,C)
        tokens = gather_tokens(ctx, x, a.ids, Tokens::INPUT);

        // Slots without a row get no gradient from any round.
        size_t slots = expert_counts(ctx.shape, ctx.batch.rows()).slots;
        device_zero(a.dgates, slots * sizeof(acc_t<T>), ctx.where);
    }

    TokensComing<T, S> coming = start_tokens(ctx, dout.routed, a.ids, Tokens::GRADIENT);
    if (ctx.shape.ffn_beside) ffn_narrow_backward(ctx, dout.all, w, a);
    const T* douts = finish_tokens(ctx, coming); // (ep,n,C)

    // Make each round's inner rows again, if it kept none.
    T* all = partial_tokens(ctx, partial); // (ep,n,C) {+ep} {+tp}
    for (size_t i = 0; i < rounds; i++) {
        Round<T> r = round_of(ctx, a, i);
        if (rounds > 1) multiply_slots(ctx, r, tokens, w);
        narrow_backward(ctx, douts, a.dgates, w, a, r);
        wide_backward(ctx, all, w, a, r);
    }
    sum_gates(ctx, a.dgates);
    sum_tokens(ctx, partial, all, a.ids);
}

// Go back through the experts into `partial`. Leaves the gradients of gate, up and logits for W,
// but rounds leave those of logits alone.
template <typename T, typename S>
void experts_backward_input(Ctx<S>& ctx, T* partial, const BranchRows<T>& dout, // (n,C) {+tp}
                            const Mixtral::Block& w, const Mixtral::Acts<T>& a) {
    const Shape& s = ctx.shape;
    size_t n = routed_rows(ctx);
    rounds_backward_input(ctx, partial, dout, w, a);

    // Go back through the router, and add the balance terms of each sequence.
    int* counts = static_cast<int*>(ctx.blas.scratch); // (B,E)
    if (s.balance > 0) {
        const int* all = all_choices(ctx, a); // (N,K)
        count_slots(counts, all, ctx.batch.B, ctx.batch.T * s.K, s.E, false, ctx.where);
        // Count a sequence's slots on all context-parallel ranks that share it.
        all_reduce_sum(ctx.cp, counts, ctx.batch.B * s.E, ctx.where);
    }
    const int* ids = choices_of(ctx, a);               // (n,K)
    acc_t<T>* dgates = my_slots(ctx, a.dgates);        // (n,K)
    route_backward(a.dlogits, dgates, a.logits, ids, routing_of(s), balance_terms(ctx, counts), n,
                   ctx.where);
    linear_backward_input(partial, a.dlogits, w.router, n, true, ctx.blas, ctx.where);
}

// Go back from gate and up of the ffn, and from the shared expert's gate, to their inputs.
// first: `partial` holds nothing yet.
template <typename T, typename S>
void ffn_wide_backward(Ctx<S>& ctx, T* partial, // (N,C) {+tp}
                       const Mixtral::Block& w, const Mixtral::Acts<T>& a, bool first) {
    size_t N = ctx.batch.rows();
    T* dgate = a.dffn_swiglu; // (N,W)
    linear_backward_input(partial, dgate, w.ffn_gate, N, !first, ctx.blas, ctx.where);
    linear_backward_input(partial, a.dffn_up, w.ffn_up, N, true, ctx.blas, ctx.where);

    // Go back through the shared expert's gate.
    if (!w.shared_router.data) return;
    route_backward(a.dshared_logits, a.dshared_gates, a.shared_logits, a.shared_ids,
                   shared_routing(), {}, N, ctx.where);
    linear_backward_input(partial, a.dshared_logits, w.shared_router, N, true, ctx.blas, ctx.where);
}

// Begin a sum over tensor-parallel ranks with rows that only their owner adds.
template <typename T, typename S>
void begin_with_own_rows(Ctx<S>& ctx, T* partial, const T* own) { // (N,C) {+tp} (R,C)
    size_t C = ctx.shape.C;
    size_t bytes = stream_rows(ctx) * C * sizeof(T);
    device_zero(partial, ctx.batch.rows() * C * sizeof(T), ctx.where);
    copy_rows(my_rows(ctx, partial), bytes, own, bytes, bytes, 1, ctx.where);
}

// Go back through the second branch, to the rows of norm_2.
template <typename T, typename S>
void second_branch_backward_input(Ctx<S>& ctx, const T* dout, const Mixtral::Block& w, // (R,C)
                                  const Mixtral::Acts<T>& a) {
    // Experts and ffn add to one buffer; the first of them overwrites it.
    const Shape& s = ctx.shape;
    BranchRows<T> rows = gather_branch_rows(ctx, a.dout_all, dout);
    T* partial = partial_rows(ctx, a.dnorm_2); // (N,C) {+tp}
    bool routes = s.E > 0;
    if (routes)
        experts_backward_input(ctx, partial_of_experts(ctx, a.dnorm_2), rows, w, a);
    else if (s.ffn_beside)
        ffn_narrow_backward(ctx, rows.all, w, a);

    // Whole experts have written the sum for this rank's rows, to which the ffn's parts are added.
    bool own = routes && s.whole_experts;
    if (own && !s.ffn_beside) return;
    if (own) begin_with_own_rows(ctx, partial, a.dnorm_2);
    if (s.ffn_beside) ffn_wide_backward(ctx, partial, w, a, !routes);
    sum_rows(ctx, a.dnorm_2, partial);
}

// The gradients of the experts' matrices. The rows of slots are gathered again: they are not worth
// keeping. Rounds add up, and make their inner rows and the gradients of these again.
template <typename T, typename S>
void stacks_backward_weight(Ctx<S>& ctx, TokensComing<T, S>& coming, const T* x, // (n,C)
                            const Mixtral::Block& w, const Mixtral::Acts<T>& a, bool accumulate) {
    size_t rounds = rounds_of(ctx);
    const T* douts = finish_tokens(ctx, coming); // (ep,n,C)
    const T* tokens = nullptr;                   // (ep,n,C)
    if (rounds > 1) tokens = gather_tokens(ctx, x, a.ids, Tokens::INPUT);

    for (size_t i = 0; i < rounds; i++) {
        Round<T> r = round_of(ctx, a, i);
        auto backward = [&](const Weight& stack, const T* dy, const T* rows) {
            stack_backward_weight(ctx, stack, dy, rows, r, accumulate || i > 0);
        };
        if (rounds > 1) {
            multiply_slots(ctx, r, tokens, w);
            swiglu_slots(ctx, a, r);
        }

        // Take the gradients of the experts' outputs, then the experts' inputs. swiglu is read
        // before a round's gradients overwrite it.
        acc_t<T>* no_gates = nullptr; // the input half has their gradients
        const T* dys = gather_slots(ctx, r, douts);
        const acc_t<T>* gates = a.gates;
        bool adds = adds_output_bias(ctx);
        backward(w.down, dys, r.swiglu);
        biases_backward(ctx, w.down_bias, dys, r, accumulate || i > 0, gates, adds);
        if (rounds > 1)
            narrow_backward(ctx, douts, no_gates, w, a, r);
        else
            tokens = gather_tokens(ctx, x, a.ids, Tokens::INPUT);
        const T* xs = gather_slots(ctx, r, tokens);
        backward(w.gate, r.dswiglu, xs);
        backward(w.up, r.dup, xs);

        // gate and up share the gradients of their rows with their biases.
        const T* dgate = r.dswiglu;
        const T* dup = r.dup;
        biases_backward(ctx, w.gate_bias, dgate, r, accumulate || i > 0);
        biases_backward(ctx, w.up_bias, dup, r, accumulate || i > 0);
    }
}

// The gradients of the experts' matrices and of the router.
template <typename T, typename S>
void experts_backward_weight(Ctx<S>& ctx, TokensComing<T, S>& douts, const T* x, // (n,C)
                             const Mixtral::Block& w, const Mixtral::Acts<T>& a, bool accumulate) {
    size_t n = routed_rows(ctx);
    if (stacks_learn(w)) stacks_backward_weight(ctx, douts, x, w, a, accumulate);
    linear_backward_weight(w.router, bias_of(w.router_bias), a.dlogits, x, n, accumulate, ctx.blas,
                           ctx.where);

    // Nothing trains the choice's bias, so its gradient is zero.
    size_t bytes = ctx.shape.E * sizeof(acc_t<T>);
    if (w.choice_bias.grad && !accumulate) device_zero(w.choice_bias.grad, bytes, ctx.where);
}

// The gradients of the matrices of the ffn for all tokens, and of its gate.
template <typename T, typename S>
void ffn_backward_weight(Ctx<S>& ctx, const T* dout, const T* x, // (N,C) (N,C)
                         const Mixtral::Block& w, const Mixtral::Acts<T>& a, bool accumulate) {
    size_t N = ctx.batch.rows();
    auto backward = [&](const Weight& weight, const T* dy, const T* inp) {
        linear_backward_weight(weight, nullptr, dy, inp, N, accumulate, ctx.blas, ctx.where);
    };
    backward(w.ffn_down, dout, a.ffn_swiglu);
    backward(w.ffn_gate, a.dffn_swiglu, x);
    backward(w.ffn_up, a.dffn_up, x);
    if (w.shared_router.data) backward(w.shared_router, a.dshared_logits, x);
}

// The gradients of all matrices of the second branch.
template <typename T, typename S>
void second_branch_backward_weight(Ctx<S>& ctx, const T* dout, const Mixtral::Block& w, // (R,C)
                                   const Mixtral::Acts<T>& a, bool accumulate) {
    // Router and experts read the same rows, the ffn all of them.
    const Shape& s = ctx.shape;
    const T* all = s.row_ranks == 1 ? dout : a.dout_all; // (N,C)
    BranchRows<T> rows = branch_rows(s, dout, all);
    BranchRows<T> x = gather_branch_rows(ctx, a.norm_2);

    // Let the outputs' gradients travel beside the ffn.
    TokensComing<T, S> douts;
    if (s.E && stacks_learn(w)) douts = start_tokens(ctx, rows.routed, a.ids, Tokens::GRADIENT);
    if (s.ffn_beside) ffn_backward_weight(ctx, rows.all, x.all, w, a, accumulate);
    if (s.E) experts_backward_weight(ctx, douts, x.routed, w, a, accumulate);
}

// The second branch: from the stream after attention to the block's output.
template <typename T, typename S>
void second_branch_forward(Ctx<S>& ctx, T* out, const Mixtral::Block& w, // (R,C)
                           const Mixtral::Acts<T>& a) {
    rmsnorm_forward(ctx, a.norm_2, a.norm_2_rstd, a.middle, w.norm_2);
    BranchRows<T> x = gather_branch_rows(ctx, a.norm_2);
    // A block has experts, an ffn, or both. Tokens travel to their experts beside the ffn.
    TokensComing<T, S> tokens;
    if (ctx.shape.E) {
        choose_experts(ctx, a, x.routed, w);
        tokens = start_tokens(ctx, x.routed, a.ids, Tokens::INPUT);
    }
    gate_shared_experts(ctx, a, x.all, w.shared_router);
    widen_ffn(ctx, a, x.all, w, true);
    if (!ctx.shape.E) return sum_ffn(ctx, out, a.middle, a, w); // a block with the ffn alone
    widen_slots(ctx, a, tokens, w, true);
    combine_experts(ctx, out, a.middle, tokens, a, w);
}

// Compute again what the level of recomputation dropped. The router does not run again.
template <typename T, typename S>
void second_branch_recompute(Ctx<S>& ctx, const Mixtral::Block& w, const Mixtral::Acts<T>& a,
                             Recompute level) {
    rmsnorm_forward(ctx, a.norm_2, a.norm_2_rstd, a.middle, w.norm_2);
    bool products = redoes_ffn(level);
    BranchRows<T> x = {};
    if (products)
        x = gather_branch_rows(ctx, a.norm_2);
    TokensComing<T, S> tokens;
    if (ctx.shape.E && products && rounds_of(ctx) == 1)
        tokens = start_tokens(ctx, x.routed, a.ids, Tokens::INPUT);
    widen_ffn(ctx, a, x.all, w, products);
    if (ctx.shape.E) widen_slots(ctx, a, tokens, w, products);
}

// ----------------------------------------------------------------------------
// the block: its first branch is llama.h's

// The forward pass of a block.
template <typename T, typename S>
void block_forward(Ctx<S>& ctx, T* out, const T* inp, const Mixtral::Block& w,
                   const Mixtral::Acts<T>& a, T* cache) {
    // Attend to earlier tokens.
    first_branch_forward(ctx, inp, w, a, cache);

    // Run each token's experts on the result.
    second_branch_forward(ctx, out, w, a);
}

// Compute again what the level of recomputation dropped. The experts are those that F chose.
template <typename T, typename S>
void block_recompute(Ctx<S>& ctx, const T* inp, const Mixtral::Block& w, const Mixtral::Acts<T>& a,
                     Recompute level) {
    first_branch_recompute(ctx, inp, w, a, level);

    second_branch_recompute(ctx, w, a, level);
}

// Everything in backward but the gradients of weights.
template <typename T, typename S>
void block_backward_input(Ctx<S>& ctx, T* dinp, const T* dout, const T* inp,
                          const Mixtral::Block& w, const Mixtral::Acts<T>& a) {
    // Go back through the second branch, which leaves the gradients that W needs.
    second_branch_backward_input(ctx, dout, w, a);
    rmsnorm_backward(ctx, a.dmiddle, a.norm_2_sums, dout, a.dnorm_2, a.middle, w.norm_2,
                     a.norm_2_rstd);

    // Go back through the first branch.
    first_branch_backward_input(ctx, dinp, inp, w, a);
}

// The gradients of weights, from what the input half has left.
template <typename T, typename S>
void block_backward_weight(Ctx<S>& ctx, const T* dout, const Mixtral::Block& w,
                           const Mixtral::Acts<T>& a, bool accumulate) {
    // Start with the experts' matrices and the router, then take the first branch.
    second_branch_backward_weight(ctx, dout, w, a, accumulate);
    SumsOfRows<T> sums = {{}, {rmsnorm_parts<T>(ctx, w.norm_2, a.norm_2_sums)}};
    first_branch_backward_weight(ctx, sums, w, a, accumulate);

    // Add up the partial sums of all norms together.
    column_sums<T>(sums.columns, sums.ready, ctx.blas.scratch, accumulate, ctx.where);
}

} // namespace llmc
