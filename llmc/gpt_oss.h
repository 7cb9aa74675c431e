// gpt_oss.h - gpt-oss: blocks whose experts have biases and a clamped gate - arXiv:2508.10925
//   block       x = x + o_proj(attention(rope(q), rope(k), v; sinks)),   q, k, v = proj(norm_1(x))
//               x = x + sum over the K chosen experts of g_e (down_e(act(gate_e, up_e)) + bias_e)
//               gate_e, up_e = proj_e(norm_2(x)) + biases,   act: moe.cuh
//               g_e: the router's gate, softmax over the logits + bias of those chosen
//   The first branch is llama.h's, with sinks (attention_join.cuh); router and products of the
//   experts are those of mixtral.h, whose N, E, K, M and F this file shares. Every block has
//   experts, and no other ffn.
//   A gate multiplies bias_e too, so gates get a second gradient. Ranks that cut an expert add
//   bias_e once: the first one does.
//   Cost: a block's forward pass takes 2 N C (2 Q + 2 KV + E + 3 K F) FLOPs in products.
#pragma once
#include "context.h"
#include "expert_parallel.h"
#include "llama.h"
#include "mixtral.h"
#include "model.h"
#include "ops/elementwise.cuh"
#include "ops/grouped_bias.cuh"
#include "ops/linear.cuh"
#include "ops/memory.h"
#include "ops/moe.cuh"
#include "ops/rand.h"
#include "ops/rmsnorm.cuh"
#include "ops/types.h"
#include "tensor_parallel.h"

namespace llmc {

// ----------------------------------------------------------------------------
// the family: what it does not name is Mixtral's

// clang-format off
struct GptOss : Mixtral {
    struct Block : AttentionWeights, ExpertWeights {
        Weight router_bias;                       // (E)
        Weight gate_bias, up_bias, down_bias;     // (E F) (E F) (E C)
    };

    template <typename T> struct Acts : AttentionActs<T>, ExpertActs<T> {};
};

// ----------------------------------------------------------------------------
// tables

// The weights of a block, but for its experts.
template <typename Row>
void block_parameters(GptOss::Block& w, const Shape& s, Row row) {
    Shard whole = {}, heads = {-1, 1, 0, Partial::HEADS};
    Init normal = normal_init(0.02);

    //  weight    name                               shape    start   decays cut      transposed
    attention_parameters(w, s, row);
    row(w.norm_2, "post_attention_layernorm.weight", {s.C},   ONES,   false, whole,   false);
    row(w.router, "mlp.router.weight", {s.experts.E, s.C}, normal, true, heads, false);
    row(w.router_bias, "mlp.router.bias", {s.experts.E}, ZEROS, false, heads, false);
}

// The experts' matrices and biases. The first tensor-parallel rank alone makes down_bias' gradient.
template <typename Row>
void expert_parameters(GptOss::Block& w, const Shape& s, Row row) {
    const ExpertShape& e = s.experts;
    Shard columns = {0, int(e.E)}, first = {-1, 1, 0, Partial::HEADS};
    size_t EF = e.E * s.F;
    size_t EC = e.E * s.C;
    stack_parameters(w, s, expert_names(s), row);

    //  weight       name                             shape start  decays cut      transposed
    row(w.gate_bias, "mlp.experts.{}.gate_proj.bias", {EF}, ZEROS, false, columns, false);
    row(w.up_bias,   "mlp.experts.{}.up_proj.bias",   {EF}, ZEROS, false, columns, false);
    row(w.down_bias, "mlp.experts.{}.down_proj.bias", {EC}, ZEROS, false, first,   false);
}

// All activations and gradients of a block. W reads the gates again, for the biases of outputs.
template <typename T, typename S, typename Row>
void block_activations(GptOss::Acts<T>& a, const Shape& s, size_t N, S where, Row row) {
    attention_activations(a, s, N, where, row);
    norm_2_activations(a, s, N, row);
    expert_activations(a, s, N, row, Last::W);
    norm_2_gradients(a, s, N, where, row);
}
// clang-format on

// ----------------------------------------------------------------------------
// biases and activation of the experts

// The activation of the experts, as kernels take it.
inline ExpertGate oss_gate(const Shape& s) {
    return {s.experts.gate_alpha, s.experts.gate_limit, 1};
}

// The experts' biases as operators take them. gates: null, or what multiplies them.
template <typename A, typename S>
GroupedBias<A> biases_of(const Ctx<S>& ctx, const Slots& slots, const Weight& bias,
                         const A* gates) { // (ep,N,K)
    // An expert has as many channels as its biases.
    ExpertCounts n = expert_counts(ctx);
    return {{slots.starts, n.experts, bias.rows / n.experts, 1, n.rows}, gates, slots.slot_of};
}

// rows += each expert's bias. Rows at the end of the room have no expert, and get nothing.
template <typename T, typename S>
void add_biases(Ctx<S>& ctx, T* rows, const Weight& bias, const Slots& slots, // (M,OC)
                const acc_t<T>* gates = nullptr) {
    const T* b = bias.as<const T>();
    grouped_bias_forward(rows, b, biases_of(ctx, slots, bias, gates), ctx.where);
}

// The gradient of the experts' biases, unless they are frozen.
template <typename T, typename S>
void biases_backward(Ctx<S>& ctx, const Weight& bias, const T* drows, const Slots& slots, // (M,OC)
                     bool accumulate, const acc_t<T>* gates = nullptr) {
    acc_t<T>* grad = grad_of<T>(bias);
    if (!grad) return;
    grouped_bias_backward(grad, drows, biases_of(ctx, slots, bias, gates), accumulate, ctx.where);
}

// Whether this rank adds the biases of the experts' outputs: ranks that cut them sum their outputs.
template <typename S>
bool adds_output_bias(const Ctx<S>& ctx) {
    // The residual, too, is added by one rank alone.
    return ctx.tp.rank == 0 || ctx.shape.experts.whole;
}

// The gradients of the outputs' biases. Ranks that do not add them have zeros.
template <typename T, typename S>
void output_biases_backward(Ctx<S>& ctx, const T* dys, const GptOss::Block& w, // (M,C)
                            const GptOss::Acts<T>& a, bool accumulate) {
    const Weight& bias = w.down_bias;
    const acc_t<T>* gates = a.gates;
    size_t bytes = bias.rows * sizeof(acc_t<T>);
    if (adds_output_bias(ctx))
        biases_backward(ctx, bias, dys, a.slots, accumulate, gates);
    else if (bias.grad && !accumulate)
        device_zero(bias.grad, bytes, ctx.where);
}

// gate and up of all slots.
template <typename T, typename S>
void widen(Ctx<S>& ctx, const T* x, const GptOss::Block& w, const GptOss::Acts<T>& a) { // (n,C)
    widen_slots(ctx, gather_tokens(ctx, x, a.ids), w, a);
    add_biases(ctx, a.gate, w.gate_bias, a.slots);
    add_biases(ctx, a.up, w.up_bias, a.slots);
}

// ----------------------------------------------------------------------------
// the second branch; the block around it is Mixtral's

// From the stream after attention to the block's output.
template <typename T, typename S>
void second_branch_forward(Ctx<S>& ctx, T* out, const GptOss::Block& w, // (R,C)
                           const GptOss::Acts<T>& a) {
    // Choose experts. Every row of logits begins as the router's bias.
    size_t n = routed_rows(ctx);
    size_t E = ctx.shape.experts.E;
    rmsnorm_forward(ctx, a.norm_2, a.norm_2_rstd, a.middle, w.norm_2);
    const T* x = gather_branch_rows(ctx, a.norm_2).routed; // (n,C)
    round_rows(a.logits, E, w.router_bias.as<const T>(), 0, n, E, ctx.where);
    router_logits(ctx, a.logits, x, n, w.router, true);
    choose_experts(ctx, a, routing_of(ctx.shape));

    // Run each token's experts.
    widen(ctx, x, w, a);
    gate_slots(ctx, a, oss_gate(ctx.shape));
    T* y = narrow_slots(ctx, w, a); // (M,C) {+tp}
    if (adds_output_bias(ctx))
        add_biases(ctx, y, w.down_bias, a.slots, a.gates);

    // Add them up, with the stream.
    const T* residual = a.middle; // (R,C)
    BranchSum<T> sum = begin_sum(ctx, out, residual);
    add_experts(ctx, sum, y, a.slots);
    finish_sum(ctx, sum, a.ids);
}

// Compute again what the level of recomputation dropped. The experts are those that F chose.
template <typename T, typename S>
void second_branch_recompute(Ctx<S>& ctx, const GptOss::Block& w, const GptOss::Acts<T>& a,
                             Recompute level) {
    rmsnorm_forward(ctx, a.norm_2, a.norm_2_rstd, a.middle, w.norm_2);
    if (redoes_ffn(level)) widen(ctx, gather_branch_rows(ctx, a.norm_2).routed, w, a);
    gate_slots(ctx, a, oss_gate(ctx.shape));
}

// Go back through the second branch, to the rows of norm_2.
template <typename T, typename S>
void second_branch_backward_input(Ctx<S>& ctx, const T* dout, const GptOss::Block& w, // (R,C)
                                  const GptOss::Acts<T>& a) {
    // Walk back through the experts.
    BranchRows<T> douts = gather_branch_rows(ctx, a.dout_all, dout);
    T* partial = partial_of_experts(ctx, a.dnorm_2); // (n,C) {+tp}
    const T* tokens = gather_tokens(ctx, douts.routed, a.ids);
    const T* dys = narrow_slots_backward(ctx, tokens, w, a, oss_gate(ctx.shape)); // (M,C)
    const T* bias = w.down_bias.as<const T>();
    if (adds_output_bias(ctx)) // their gates multiply the biases too
        grouped_bias_backward_gates(a.dgates, dys, bias,
                                    biases_of(ctx, a.slots, w.down_bias, a.gates), ctx.where);
    widen_slots_backward(ctx, partial, w, a);

    // Walk back through the router.
    router_backward_input(ctx, partial, w.router, a);
    sum_behind_experts(ctx, a.dnorm_2, partial);
}

// The gradients of the experts' matrices and biases.
template <typename T, typename S>
void experts_backward_weight(Ctx<S>& ctx, const T* dout, const T* x, // (n,C) (n,C)
                             const GptOss::Block& w, const GptOss::Acts<T>& a, bool accumulate) {
    const T* dgate = a.dswiglu;
    const T* dup = a.dup;
    if (!stacks_learn(w)) return;

    // Matrices and biases share the gradients of outputs, and of gate and up.
    const T* douts = gather_tokens(ctx, dout, a.ids); // (ep,n,C)
    auto outputs = [&](const T* dys) { output_biases_backward(ctx, dys, w, a, accumulate); };
    stacks_backward_weight(ctx, douts, x, w, a, accumulate, outputs);
    biases_backward(ctx, w.gate_bias, dgate, a.slots, accumulate);
    biases_backward(ctx, w.up_bias, dup, a.slots, accumulate);
}

// The gradients of all weights of the second branch: first the experts', then the router's.
template <typename T, typename S>
void second_branch_backward_weight(Ctx<S>& ctx, const T* dout, const GptOss::Block& w, // (R,C)
                                   const GptOss::Acts<T>& a, bool accumulate) {
    const T* room = a.dout_all;
    BranchRows<T> douts = gathered_branch_rows(ctx.shape, room, dout);
    const T* x = gather_branch_rows(ctx, a.norm_2).routed; // (n,C)
    experts_backward_weight(ctx, douts.routed, x, w, a, accumulate);
    linear_backward_weight(w.router, bias_of(w.router_bias), a.dlogits, x, routed_rows(ctx),
                           accumulate, ctx.blas, ctx.where);
}

} // namespace llmc
