// tensor_parallel.h - heads, ffn channels and vocabulary cut over ranks, and the rows between them - arXiv:1909.08053, arXiv:2205.05198
//   tp ranks share every layer. Of a matrix [out, in] a rank has a piece:
//     column-parallel  q, k, v, fc, gate, up, logits   [out/tp, in]   from x its own columns of y
//     row-parallel     attention's and the ffn's last  [out, in/tp]   from its columns a part of y
//   1. enter: each rank has the whole norm(x); column-parallel products, attention, activation
//      function need no message. Backward, the ranks' gradients of norm(x) are parts of a sum.
//   2. leave: y = sum over ranks of the row-parallel parts; the first adds bias and residual.
//   3. embedding: a rank knows the rows of its tokens; y = sum over ranks.
//   4. head: logits (rows, V/tp); their maximum, sum of exponentials and the target's logit are
//      each reduced over ranks, so that no rank ever has all logits of a row.
//   Without sequence parallelism each sum is an all-reduce and x is the same on all ranks. With it
//   rank r has rows [r N/tp, (r+1) N/tp) of x: 1. gathers rows, 2. and 3. reduce-scatter them, and
//   norms, residuals and what is kept of them are divided by tp. Gradients of what all ranks have
//   (norms, biases after a sum, positions) are then sums over ranks, as are those of key/value heads
//   that several ranks share, all added in one place (start_reduce in step.h).
//   Cost of a block and micro-batch, in (tp-1)/tp N C elements that a rank sends: four all-reduces
//   are 8; with sequence parallelism 10, since backward gathers the rows of both norms again.
#pragma once
#include "context.h"

// The shape as rank `rank` of tp computes with it.
inline Shape rank_shape(Shape s, int tp, int rank, bool sequence_parallel) {
    size_t n = size_t(tp), rows = s.Vp() / n;
    s.vocab_start = size_t(rank) * rows, s.padded = rows;
    s.V = s.V > s.vocab_start ? std::min(s.V - s.vocab_start, rows) : 0;
    s.NH /= n, s.F /= n, s.NKV = std::max(s.NKV / n, size_t(1));
    s.row_ranks = sequence_parallel ? n : 1;
    return s;
}

// ----------------------------------------------------------------------------
// the rows of the stream: (N,C), or this rank's part of them

template <typename S> size_t stream_rows(const Ctx<S>& ctx) {
    return ctx.batch.rows() / ctx.shape.row_ranks;
}
// Mine of all rows.
template <typename T, typename S> T* my_rows(const Ctx<S>& ctx, T* all) {
    bool cut = ctx.shape.row_ranks > 1;
    return cut ? all + size_t(ctx.tp.rank) * stream_rows(ctx) * ctx.shape.C : all;
}
// All rows, gathered into `all` (where `rows` may stand already) unless every rank has them.
template <typename T, typename S> const T* all_rows(Ctx<S>& ctx, T* all, const T* rows) {
    if (ctx.shape.row_ranks == 1) return rows;
    all_gather(ctx.tp, all, rows, stream_rows(ctx) * ctx.shape.C, ctx.where);
    return all;
}
template <typename T, typename S> const T* all_rows(Ctx<S>& ctx, const T* rows) {
    return all_rows(ctx, static_cast<T*>(ctx.all_rows), rows);
}
// A sum over ranks: its parts (N,C) are made where partial_rows says, then sum_rows gives out.
template <typename T, typename S> T* partial_rows(Ctx<S>& ctx, T* out) {
    return ctx.shape.row_ranks == 1 ? out : static_cast<T*>(ctx.all_rows);
}
template <typename T, typename S> void sum_rows(Ctx<S>& ctx, T* out, const T* partial) {
    size_t n = stream_rows(ctx) * ctx.shape.C;
    if (ctx.shape.row_ranks == 1)
        all_reduce_sum(ctx.tp, out, n, ctx.where);
    else
        reduce_scatter_sum(ctx.tp, out, partial, n, ctx.where);
}

// ----------------------------------------------------------------------------
// row-parallel products; column-parallel ones are linear.cuh's, on all rows

// out = sum over ranks of inp w^T, + bias + residual (or null) once
template <typename T, typename S>
void row_parallel_forward(Ctx<S>& ctx, T* out, const T* inp, const Weight& w, const Weight* bias,
                          const T* residual) {
    size_t parts = ctx.shape.row_ranks, R = stream_rows(ctx);
    T* partial = partial_rows(ctx, out);
    for (size_t i = 0; i < parts; i++) { // bias and residual: to my rows, or by the first rank
        bool adds = parts > 1 ? i == size_t(ctx.tp.rank) : ctx.tp.rank == 0;
        linear_forward(partial + i * R * w.rows, inp + i * R * w.cols, w, adds ? bias : nullptr,
                       adds ? residual : (const T*)nullptr, R, ctx.blas, ctx.where);
    }
    sum_rows(ctx, out, partial);
}

// dout: my rows, of which the bias has its gradient; all: those of all ranks
template <typename T, typename S>
void row_parallel_backward_weight(Ctx<S>& ctx, const Weight& w, const Weight* bias, const T* dout,
                                  const T* all, const T* inp, bool accumulate) {
    linear_backward_weight(w, nullptr, all, inp, ctx.batch.rows(), accumulate, ctx.blas, ctx.where);
    if (bias && bias->grad)
        column_sums(static_cast<acc_t<T>*>(bias->grad), dout, ctx.blas.scratch, stream_rows(ctx),
                    w.rows, accumulate, ctx.where);
}
