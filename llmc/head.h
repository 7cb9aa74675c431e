// head.h - the language-model head: logits, loss and their gradients over chunks of rows
//   Logits would take B*T*V. They never do: the head walks chunks of rows, and for each makes
//   logits, loss, the gradient of the logits in their own place, and the gradients of its input and
//   weight (arXiv:2411.09009 reports how much that saves). So the head's forward pass keeps
//   nothing, and training runs all of it in the backward pass.
//   Tensor-parallel ranks have the logits of their own tokens, and reduce a row's maximum, sum and
//   target.
//   Evaluating, each row's loss is kept, and what says whether its target is the likeliest.
//   loss = sum over valid rows; gradients are scaled by 1 / (valid targets of the global batch).
#pragma once
#include <algorithm>
#include "crossentropy.cuh"
#include "tensor_parallel.h"

// Rows a chunk: as many as the shape's logits_bytes hold, and enough for products at full speed.
inline size_t head_chunk_rows(const Shape& s, size_t N, size_t element_bytes) {
    size_t fit = s.logits_bytes / (s.Vp() * element_bytes);
    return std::min(N, std::max(fit / 64 * 64, size_t(64)));
}

template <typename T> struct HeadActs {
    T *norm, *dnorm, *logits;                                         // (N,C) (N,C) (chunk,Vp)
    acc_t<T>*mean, *rstd, *losses, *row_max, *sum_exp, *target_logit; // (N) (N) (N) (chunk) ..
};

template <typename T> struct RowLosses {
    acc_t<T>*losses, *row_max, *target_logit; // (N) each
};

// All of it lives only while the head runs; rows: the head's, all of a micro-batch, or one when
// generating.
template <typename T, typename Row>
void head_activations(HeadActs<T>& a, const Shape& s, size_t N, Row row) {
    size_t chunk = head_chunk_rows(s, N, sizeof(T));
    row(a.norm, "norm", N * s.C, Keep::GRADIENT, Last::B);
    row(a.mean, "norm.mean", N, Keep::GRADIENT, Last::B);
    row(a.rstd, "norm.rstd", N, Keep::GRADIENT, Last::B);
    row(a.dnorm, "d norm", N * s.C, Keep::GRADIENT, Last::B);
    row(a.logits, "logits", chunk * s.Vp(), Keep::GRADIENT, Last::B);
    row(a.row_max, "row max", chunk, Keep::GRADIENT, Last::B);
    row(a.sum_exp, "sum of exp", chunk, Keep::GRADIENT, Last::B);
    row(a.target_logit, "target logit", chunk, Keep::GRADIENT, Last::B);
    row(a.losses, "losses", N, Keep::GRADIENT, Last::B);
}

// Logits and losses of rows [n, n + rows).
template <typename T, typename S>
void head_chunk_loss(Ctx<S>& ctx, const HeadActs<T>& a, const Weight& lm_head, size_t n,
                     size_t rows) {
    const Shape& s = ctx.shape;
    const int* targets = ctx.batch.targets + n;
    linear_forward(a.logits, a.norm + n * s.C, lm_head, nullptr, (const T*)nullptr, rows, ctx.blas,
                   ctx.where);
    if (ctx.tp.size == 1) {
        crossentropy_max_sum(a.row_max, a.sum_exp, a.target_logit, a.logits, targets, rows, s.V,
                             s.Vp(), ctx.where);
    } else {
        crossentropy_max(a.row_max, a.logits, rows, s.V, s.Vp(), ctx.where);
        all_reduce_max(ctx.tp, a.row_max, rows, ctx.where);
        crossentropy_sum(a.sum_exp, a.target_logit, a.logits, targets, a.row_max, rows, s.V, s.Vp(),
                         s.vocab_start, ctx.where);
        all_reduce_sum(ctx.tp, a.sum_exp, rows, ctx.where);
        all_reduce_sum(ctx.tp, a.target_logit, rows, ctx.where);
    }
    crossentropy_loss(a.losses + n, a.row_max, a.sum_exp, a.target_logit, targets, rows, ctx.where);
}

// The loss, and what an evaluation keeps of each row: its loss, its largest logit and its target's.
template <typename T, typename S>
void head_loss(Ctx<S>& ctx, double* loss, const RowLosses<T>& rows, HeadActs<T> a,
               const Weight& lm_head) {
    size_t N = ctx.batch.rows(), chunk = head_chunk_rows(ctx.shape, N, sizeof(T));
    a.losses = rows.losses;
    for (size_t n = 0; n < N; n += chunk) {
        a.row_max = rows.row_max + n, a.target_logit = rows.target_logit + n;
        head_chunk_loss(ctx, a, lm_head, n, std::min(chunk, N - n));
    }
    crossentropy_total(loss, a.losses, N, ctx.where);
}

// loss, my rows of dnorm and the weight's gradient; scale = 1 / valid targets of the global batch
template <typename T, typename S>
void head_loss_backward(Ctx<S>& ctx, double* loss, const HeadActs<T>& a, const Weight& lm_head,
                        acc_t<T> scale, bool accumulate) {
    const Shape& s = ctx.shape;
    size_t N = ctx.batch.rows(), chunk = head_chunk_rows(s, N, sizeof(T));
    for (size_t n = 0; n < N; n += chunk) {
        size_t rows = std::min(chunk, N - n);
        const T* norm = a.norm + n * s.C;
        head_chunk_loss(ctx, a, lm_head, n, rows);
        crossentropy_backward(a.logits, ctx.batch.targets + n, a.row_max, a.sum_exp, scale, rows,
                              s.V, s.Vp(), s.vocab_start, ctx.where);
        linear_backward_input(a.dnorm + n * s.C, a.logits, lm_head, rows, false, ctx.blas,
                              ctx.where);
        linear_backward_weight(lm_head, nullptr, a.logits, norm, rows, accumulate || n > 0,
                               ctx.blas, ctx.where);
    }
    sum_rows(ctx, my_rows(ctx, a.dnorm), a.dnorm);
    crossentropy_total(loss, a.losses, N, ctx.where);
}
