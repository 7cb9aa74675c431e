// tensor_parallel.h - tensor parallelism: layers in pieces - arXiv:1909.08053, arXiv:2205.05198
//   tp ranks share every layer; each has one piece of every large matrix [out, in]:
//     column-parallel  q, k, v, fc, gate, up, logits    [out/tp, in]   x -> its columns of y
//     row-parallel     attention's and the ffn's last   [out, in/tp]   its columns of x -> {+tp} y
//   1. column-parallel   f, then the product. f passes x on; backward it sums dx over ranks.
//                        What follows, attention or an activation function, needs no message.
//   2. row-parallel      the product, then g. g sums y over ranks; backward it passes dy on.
//                        Bias and residual are added once.
//   3. embedding         each rank looks up the tokens in its rows of the table: {+tp} y, then g.
//   4. head              f, then logits (rows, V/tp). Ranks reduce a row's maximum, its sum of
//                        exponentials and its target's logit; no rank ever has all logits of a row.
//
//   Without sequence parallelism every rank has all N rows of the residual stream, and each sum is
//   an all-reduce. With it, rank r has the R = N/tp rows [r R, (r+1) R), norms and residuals take
//   1/tp of the memory, and each message splits in two:
//     f   all-gather rows; backward reduce-scatter        g   reduce-scatter; backward all-gather
//   With sequence parallelism, the gradients of weights that all ranks have (norms, biases after a
//   sum, positions) are {+tp}. Gradients of key/value heads that several ranks share always are.
//   zero_reduce_shared() sums both.
//   Every message here is on the critical path.
//   Cost of a block and micro-batch, in units of (tp-1)/tp N C elements sent by a rank: 8 for four
//   all-reduces; 10 with sequence parallelism, as backward gathers the rows of both norms again.
#pragma once
#include "comm/comm.h"
#include "context.h"
#include "model.h"
#include "ops/linear.cuh"
#include "ops/types.h"

namespace llmc {

// ----------------------------------------------------------------------------
// weights as blocks pass them

// A bias, or null. If the model has no such bias, its Weight has no data.
inline const Weight* bias_of(const Weight& w) { return w.data ? &w : nullptr; }

// A weight's gradient in its type, or null: the weight is frozen.
template <typename T> acc_t<T>* grad_of(const Weight& w) { return static_cast<acc_t<T>*>(w.grad); }

// ----------------------------------------------------------------------------
// rows of the residual stream: all N of them, or R = N / row_ranks with sequence parallelism

// Return the number of rows of the residual stream on this rank.
template <typename S>
size_t stream_rows(const Ctx<S>& ctx) { // R
    return ctx.batch.rows() / ctx.shape.rank.rows;
}

// The number of rows that this rank routes: all N, or beside whole experts its own R.
inline size_t routed_rows(const Shape& s, size_t N) {
    return s.experts.whole ? N / s.rank.rows : N;
}
template <typename S>
size_t routed_rows(const Ctx<S>& ctx) { // n
    return routed_rows(ctx.shape, ctx.batch.rows());
}

// The first of them.
template <typename S>
size_t first_routed(const Ctx<S>& ctx) {
    bool own = ctx.shape.experts.whole && ctx.shape.rank.rows > 1;
    return own ? size_t(ctx.tp.rank) * stream_rows(ctx) : 0;
}

// The slice of `all` that belongs to this rank. Rows may be narrower than C.
template <typename T, typename S>
T* my_rows(const Ctx<S>& ctx, T* all, size_t C = 0) { // (N,C) -> (R,C)
    bool whole = ctx.shape.rank.rows == 1;
    return whole ? all : all + size_t(ctx.tp.rank) * stream_rows(ctx) * (C ? C : ctx.shape.C);
}

// Gather every rank's rows into `all`, where this rank's rows may lie already. If each rank has all
// rows, nothing is copied: `rows` itself is returned.
template <typename T, typename S>
const T* gather_rows(Ctx<S>& ctx, T* all, const T* rows, size_t C = 0) { // (N,C) from (R,C)
    if (ctx.shape.rank.rows == 1) return rows;
    all_gather(ctx.tp, all, rows, stream_rows(ctx) * (C ? C : ctx.shape.C), ctx.where);
    return all;
}
// The same, into the layer's scratch; the result is good until the scratch is used again.
template <typename T, typename S>
const T* gather_rows(Ctx<S>& ctx, const T* rows) {
    return gather_rows(ctx, static_cast<T*>(ctx.all_rows), rows);
}

// Sum over ranks in two calls: write your partial result for all N rows to partial_rows(), then
// sum_rows() reduces it into `out`. The two are one buffer unless rows are scattered.
template <typename T, typename S>
T* partial_rows(Ctx<S>& ctx, T* out) { // (N,C) for (R,C)
    return ctx.shape.rank.rows == 1 ? out : static_cast<T*>(ctx.all_rows);
}
template <typename T, typename S>
void sum_rows(Ctx<S>& ctx, T* out, const T* partial, size_t C = 0) { // (R,C) of (N,C) {+tp}
    size_t n = stream_rows(ctx) * (C ? C : ctx.shape.C);
    if (ctx.shape.rank.rows == 1)
        all_reduce_sum(ctx.tp, out, n, ctx.where);
    else
        reduce_scatter_sum(ctx.tp, out, partial, n, ctx.where);
}

// ----------------------------------------------------------------------------
// column-parallel products of one input: f, then this rank's columns of each result
//   column_parallel_forward(ctx, {{q, w.q, w.q_bias}, {k, w.k, w.k_bias}}, x)

// One of several products that share an input. A model that lacks it has a weight without rows.
template <typename T> struct ColumnProduct {
    T* y;             // (N,OC); dy in the backward pass
    Weight weight;    // (OC,C)
    Weight bias = {}; // (OC), or without data if there is none
};

// y = inp W^T + bias, for each product
template <typename T, typename S>
void column_parallel_forward(Ctx<S>& ctx, std::initializer_list<ColumnProduct<T>> products,
                             const T* inp) { // (R,C)
    const T* rows = gather_rows(ctx, inp);   // (N,C)
    const T* no_residual = nullptr;
    Fp8Holds shared = Fp8Holds::NOTHING;
    for (const ColumnProduct<T>& p : products)
        if (p.weight.rows)
            linear_forward(p.y, rows, p.weight, bias_of(p.bias), no_residual, ctx.batch.rows(),
                           ctx.blas, ctx.where, &shared);
}

// dinp = sum over products and ranks of dy W
template <typename T, typename S>
void column_parallel_backward_input(Ctx<S>& ctx, T* dinp, // (R,C)
                                    std::initializer_list<ColumnProduct<T>> products) {
    T* partial = partial_rows(ctx, dinp); // (N,C) {+tp}
    bool accumulate = false;
    for (const ColumnProduct<T>& p : products) {
        if (!p.weight.rows) continue;
        linear_backward_input(partial, p.y, p.weight, ctx.batch.rows(), accumulate, ctx.blas,
                              ctx.where);
        accumulate = true;
    }
    sum_rows(ctx, dinp, partial);
}

// How long a block keeps the inputs of its products: of attention's first, of the ffn's first and
// last, and of its experts' last. In a backward pass only the gradients of weights and of
// adapters read these inputs. So if its matrices are frozen in every block, an input goes after
// the forward pass.
struct InputsKept {
    Keep attention;
    Keep ffn;
    Keep last;
    Keep experts;
};
inline InputsKept inputs_kept(const Shape& s) {
    bool all = !s.tuned.adapters && s.tuned.prefix == 0;
    auto kept = [&](std::initializer_list<const char*> modules) {
        bool read = all;
        for (size_t i = 0; !all && s.tuned.adapters && i < modules.size(); i++)
            for (const auto& [module, adapter] : *s.tuned.adapters)
                read |= module.ends_with(modules.begin()[i]);
        return read ? Keep::CHEAP : Keep::PASSING;
    };

    // List the matrices by the ends of their names, in every family that may have adapters: F drops
    // the input of a matrix that is missing here. {} is an expert's number.
    return {kept({"attn.c_attn", ".q_proj", ".k_proj", ".v_proj"}),
            kept({"mlp.c_fc", ".gate_proj", ".up_proj", "mlp.fc1"}),
            kept({"mlp.c_proj", "mlp.down_proj", "expert.down_proj", "experts.down_proj",
                  "mlp.fc2"}),
            kept({"{}.down_proj", "{}.w2"})};
}

// dW = or += dy^T inp, for each product; the caller does the biases. Rows of inp are gathered
// again: one more message, instead of keeping all of them since the forward pass.
template <typename T, typename S>
void column_parallel_backward_weight(Ctx<S>& ctx, std::initializer_list<ColumnProduct<T>> products,
                                     const T* inp, bool accumulate) { // (R,C)
    // If all are frozen, return: F has dropped inp.
    bool any = false;
    for (const ColumnProduct<T>& p : products)
        any |= learns(p.weight);
    if (!any) return;

    const T* rows = gather_rows(ctx, inp); // (N,C)
    Fp8Holds shared = Fp8Holds::NOTHING;
    for (const ColumnProduct<T>& p : products)
        linear_backward_weight(p.weight, nullptr, p.y, rows, ctx.batch.rows(), accumulate,
                               ctx.blas, ctx.where, &shared);
}

// ----------------------------------------------------------------------------
// row-parallel products: each rank multiplies its columns of the input, then g sums

// This rank's part of a sum over ranks: inp W^T, + bias (if it has data) + residual
template <typename T, typename S>
void row_parallel_partial(Ctx<S>& ctx, T* partial, const T* inp, // (N,C) {+tp} (N,IC)
                          const Weight& w, const Weight& bias, const T* residual) { // (R,C)
    size_t parts = ctx.shape.rank.rows, R = stream_rows(ctx);
    for (size_t i = 0; i < parts; i++) { // rows of rank i
        // Add bias and residual once: the owner of scattered rows does, else the first rank.
        bool adds = parts > 1 ? i == size_t(ctx.tp.rank) : ctx.tp.rank == 0;
        linear_forward(partial + i * R * w.rows, inp + i * R * w.cols, w,
                       adds ? bias_of(bias) : nullptr, adds ? residual : (const T*)nullptr, R,
                       ctx.blas, ctx.where);
    }
}

// out = the sum over ranks
template <typename T, typename S>
void row_parallel_forward(Ctx<S>& ctx, T* out, const T* inp, // (R,C) (N,IC)
                          const Weight& w, const Weight& bias, const T* residual) { // (R,C)
    T* partial = partial_rows(ctx, out); // (N,C) {+tp}
    row_parallel_partial(ctx, partial, inp, w, bias, residual);
    sum_rows(ctx, out, partial);
}

// dinp = dout W. With sequence parallelism, `all` keeps the gathered dout,
// which row_parallel_backward_weight reads.
template <typename T, typename S>
void row_parallel_backward_input(Ctx<S>& ctx, T* dinp, T* all, // (N,IC) (N,C)
                                 const T* dout, const Weight& w) { // (R,C)
    const T* rows = gather_rows(ctx, all, dout); // (N,C)
    linear_backward_input(dinp, rows, w, ctx.batch.rows(), false, ctx.blas, ctx.where);
}

// dW = or += dout^T inp over all rows. The caller does the bias's gradient, over this rank's rows.
template <typename T, typename S>
void row_parallel_backward_weight(Ctx<S>& ctx, const Weight& w,
                                  const T* dout, const T* all, // (R,C) (N,C)
                                  const T* inp, bool accumulate) { // (N,IC)
    const T* rows = ctx.shape.rank.rows == 1 ? dout : all; // (N,C)
    linear_backward_weight(w, nullptr, rows, inp, ctx.batch.rows(), accumulate, ctx.blas,
                           ctx.where);
}

} // namespace llmc
