// head.h - the two ends of a model: embedding, and logits with their loss over chunks of rows
//   x = wte[token] (+ wpe[position]); Gemma multiplies by the root of C
//   loss = sum over rows with a target of -log softmax(logits)[target],   logits = norm(x) W^T
//   All logits would take N V elements, so they never exist at once. The head walks chunks of rows.
//   For each chunk it makes the logits, the loss, the logits' gradient in their own place, and from
//   it the gradients of its input and weight (arXiv:2411.09009 reports how much that saves). The
//   head's forward pass therefore keeps nothing: training runs the whole head in the backward pass.
//   Tensor-parallel ranks have the logits of their own tokens (tensor_parallel.h, 4).
//   Objectives over whole sequences (objective.cuh) need the losses of all rows before the first
//   gradient, so the head walks its chunks twice.
//   Distillation (distill.cuh) makes the teacher's logits of the same chunk beside its own.
//   Contract: gradients are scaled by 1 / (valid targets of the global batch, or pairs); the loss
//             is not scaled.
//   Cost: 2 N V C FLOPs forward, 4 N V C more for the gradients. Memory: the shape's logits_bytes
//         for the logits, 2 N C elements for the norm and its gradient.
#pragma once
#include <algorithm>
#include "comm/comm.h"
#include "context.h"
#include "model.h"
#include "ops/crossentropy.cuh"
#include "ops/distill.cuh"
#include "ops/elementwise.cuh"
#include "ops/embedding.cuh"
#include "ops/linear.cuh"
#include "ops/matmul.cuh"
#include "ops/memory.h"
#include "ops/objective.cuh"
#include "ops/types.h"
#include "tensor_parallel.h"

namespace llmc {

// ----------------------------------------------------------------------------
// the embedding

// Return the factor of the token table's rows, rounded to their type.
template <typename T> acc_t<T> embedding_scale(const Shape& s) {
    return s.embedding.scaled ? to_acc(from_acc<T>(std::sqrt(acc_t<T>(s.C)))) : 1;
}

// out = wte[token] (+ wpe[position]); wpe is null without learned positions.
template <typename T, typename S>
void embedding_forward(Ctx<S>& ctx, T* out, const T* wte, const T* wpe) { // (R,C) (Vp,C) (P,C)
    const Batch& b = ctx.batch;
    const Shape& s = ctx.shape;
    T* partial = partial_rows(ctx, out); // (N,C) {+tp}

    // Look up the tokens in this rank's rows of wte. Only one rank adds positions. After a prefix
    // of n tokens the text begins in row n.
    const T* positions = wpe && ctx.tp.rank == 0 ? wpe + s.tuned.prefix * s.C : nullptr;
    embedding_forward(partial, b.tokens, b.positions, b.doc_start, wte, positions, b.rows(),
                      s.rank.vocab_start, s.Vp(), s.C, ctx.where, embedding_scale<T>(s));
    sum_rows(ctx, out, partial);
}

// Add the gradients of all ranks' rows to this rank's part of dwte, and the gradients of its own
// rows to dwpe.
template <typename T, typename S>
void embedding_backward_weight(Ctx<S>& ctx, acc_t<T>* dwte, acc_t<T>* dwpe, // (Vp,C) (P,C) or null
                               const T* dout, bool accumulate) {            // (R,C)
    const Batch& b = ctx.batch;
    const Shape& s = ctx.shape;
    auto add = [&](acc_t<T>* to_wte, acc_t<T>* to_wpe, const T* rows, size_t first, size_t count) {
        embedding_backward_weight(to_wte, to_wpe, rows, b.tokens + first, b.positions + first,
                                  b.doc_start + first, ctx.blas.scratch, count, s.rank.vocab_start,
                                  s.Vp(), s.P, s.C, accumulate, ctx.where, embedding_scale<T>(s));
    };

    // Positions take only this rank's rows: with sequence parallelism, REDUCE sums over ranks.
    acc_t<T>* none = nullptr;
    size_t R = stream_rows(ctx);
    size_t first = s.rank.rows > 1 ? size_t(ctx.tp.rank) * R : 0;
    add(dwte, none, gather_rows(ctx, dout), 0, b.rows());
    if (dwpe)
        add(none, dwpe, dout, first, R);
}

// ----------------------------------------------------------------------------
// the head's tables

// Fill in the size of a chunk of logits, if the shape names none. On a CPU a chunk should not
// exceed the caches by much. On a GPU each chunk reads and writes the float gradient of the whole
// table, and its products have to fill the device with tiles of 128 rows.
inline Shape with_logits(Shape s, size_t bytes, size_t rows) {
    if (s.loss.logits_bytes) return s;
    s.loss.logits_bytes = bytes;
    s.loss.logits_rows = rows;
    return s;
}
inline Shape with_gpu_logits(const Shape& s) { return with_logits(s, size_t(512) << 20, 128); }
inline Shape with_logits(const Shape& s, Cpu) {
    return sizes_of_gpu ? with_gpu_logits(s) : with_logits(s, size_t(64) << 20, 64);
}
#if LLMC_KERNELS
inline Shape with_logits(const Shape& s, cudaStream_t) { return with_gpu_logits(s); }
#endif

// Return the rows of a chunk: as many as logits_bytes holds, in steps of logits_rows, which let
// products run at full speed, and at least one step.
inline size_t head_chunk_rows(const Shape& s, size_t N, size_t element_bytes) {
    size_t fit = s.loss.logits_bytes / (s.Vp() * element_bytes);
    size_t whole_steps = fit / s.loss.logits_rows * s.loss.logits_rows;
    return std::min(N, std::max(whole_steps, s.loss.logits_rows));
}

// clang-format off
// Pointers into the head's scratch; a chunk has at most head_chunk_rows() rows.
template <typename T> struct HeadActs {
    T *norm, *dnorm;                              // (N,C) (N,C)
    T* logits;                                    // (chunk,Vp); later their gradient
    acc_t<T> *mean, *rstd;                        // (N) (N)    of the final norm
    acc_t<T>* losses;                             // (N)
    acc_t<T>* objective;                          // (outputs,N) as in objective.cuh
    acc_t<T>* whole;                              // (1+outputs,B,T) of whole sequences, or nothing
    acc_t<T> *row_max, *sum_exp, *target_logit;   // (chunk) each
    T* teacher_logits;                            // (chunk,Vp) or nothing
    acc_t<T>* distill;                            // (7,chunk) maxima and sums, or nothing
};

// List the head's activations, which live only while the head runs. N is the rows of a micro-batch,
// or in generation the rows with logits.
template <typename T, typename Row>
void head_activations(HeadActs<T>& a, const Shape& s, size_t N, Row row) {
    size_t chunk = head_chunk_rows(s, N, sizeof(T));
    size_t taught = s.loss.objective.distills() ? chunk : 0; // rows beside a teacher's
    size_t whole = s.loss.objective.joins() ? N * s.loss.objective.ranks : 0; // rows of all ranks
    using enum Keep;
    using enum Last;

    //  pointer          name            elements          dropped   last read
    row(a.norm,          "norm",         N * s.C,          GRADIENT, B);
    row(a.mean,          "norm.mean",    N,                GRADIENT, B);
    row(a.rstd,          "norm.rstd",    N,                GRADIENT, B);
    row(a.dnorm,         "d norm",       N * s.C,          GRADIENT, B);
    row(a.logits,        "logits",       chunk * s.Vp(),   GRADIENT, B);
    row(a.row_max,       "row max",      chunk,            GRADIENT, B);
    row(a.sum_exp,       "sum of exp",   chunk,            GRADIENT, B);
    row(a.target_logit,  "target logit", chunk,            GRADIENT, B);
    row(a.losses,        "losses",       N,                GRADIENT, B);
    row(a.objective,     "objective",    s.loss.objective.outputs() * N, GRADIENT, B);
    row(a.whole, "objective, all rows", (1 + s.loss.objective.outputs()) * whole, GRADIENT, B);
    row(a.teacher_logits, "teacher logits", taught * s.Vp(), GRADIENT, B);
    row(a.distill,       "teacher sums", (2 + DISTILL_SUMS) * taught, GRADIENT, B);
}
// clang-format on

// ----------------------------------------------------------------------------
// logits and loss

// The matrix of the head, and its bias; most heads have none.
struct LmHead : Weight {
    Weight bias = {}; // (Vp)
};

// Make the logits of rows from the last norm's outputs, capped if the model does so (softcap).
template <typename T, typename S>
void head_logits(Ctx<S>& ctx, T* logits, const T* norm, // (rows,Vp) (rows,C)
                 const LmHead& lm_head, size_t rows) {
    const T* no_residual = nullptr;
    linear_forward(logits, norm, lm_head, bias_of(lm_head.bias), no_residual, rows, ctx.blas,
                   ctx.where);
    softcap_forward(logits, rows * ctx.shape.Vp(), ctx.shape.loss.softcap, ctx.where,
                    ctx.shape.loss.root_softcap);
}

// Make the losses of rows [n, n + rows) from their logits.
template <typename T, typename S>
void head_chunk_loss(Ctx<S>& ctx, const HeadActs<T>& a, size_t n, size_t rows) {
    const Shape& s = ctx.shape;
    const int* targets = ctx.batch.targets + n; // (rows)

    // Reduce each row: its maximum, the sum of exp(logit - maximum), the target's logit.
    // Tensor-parallel ranks need the maximum over all of them before they sum.
    if (ctx.tp.size == 1) {
        crossentropy_max_sum(a.row_max, a.sum_exp, a.target_logit, a.logits, targets, rows, s.V,
                             s.Vp(), ctx.where);
    } else {
        crossentropy_max(a.row_max, a.logits, rows, s.V, s.Vp(), ctx.where);
        all_reduce_max(ctx.tp, a.row_max, rows, ctx.where);
        crossentropy_sum(a.sum_exp, a.target_logit, a.logits, targets, a.row_max, rows, s.V, s.Vp(),
                         s.rank.vocab_start, ctx.where);
        all_reduce_sum(ctx.tp, a.sum_exp, rows, ctx.where);
        all_reduce_sum(ctx.tp, a.target_logit, rows, ctx.where);
    }

    // Each row's loss follows from the three.
    crossentropy_loss(a.losses + n, a.row_max, a.sum_exp, a.target_logit, targets, rows, ctx.where);
}

// Sum the losses of all rows, and the numbers that the objective reports beside it.
template <typename T, typename S>
void total_loss(Ctx<S>& ctx, LossSums* sums, const HeadActs<T>& a) {
    // Without coefficients there is only the loss.
    size_t N = ctx.batch.rows();
    if (!ctx.shape.loss.objective.rows())
        return crossentropy_total(&sums->loss, a.losses, N, ctx.where);

    // The objective's numbers follow its coefficients.
    const acc_t<T>* row = a.objective;
    size_t outputs = ctx.shape.loss.objective.outputs();
    for (size_t i = 0; i + 1 < outputs; i++) {
        row += N;
        crossentropy_total(&sums->loss + i, row, N, ctx.where);
    }
}

// Compute the objective's numbers of pairs that lie over context-parallel ranks. A pair's sums need
// the losses of whole sequences, (B,T) floats, which the ranks exchange. Each rank makes the
// numbers of all rows, in the order of one rank, and keeps the numbers of its own rows.
template <typename T, typename S>
void head_objective_of_all(Ctx<S>& ctx, const HeadActs<T>& a) {
    const Objective& o = ctx.shape.loss.objective;
    const Batch& b = ctx.batch;
    size_t N = b.rows();
    size_t T_all = b.T * o.ranks;
    size_t all = N * o.ranks;

    // Put the losses at their places. A rank adds 0 for the rows of other ranks.
    acc_t<T>* losses = a.whole;
    device_zero(losses, all * sizeof(losses[0]), ctx.where);
    place_rows<true>(losses, a.losses, b.positions, b.B, b.T, T_all, ctx.where);
    all_reduce_sum(ctx.cp, losses, all, ctx.where);

    // Find what LOAD has put after the keys' documents: see read_micro_batch().
    const int* targets = b.key_documents + all;
    const float* numbers = reinterpret_cast<const float*>(targets + 2 * all);
    acc_t<T>* x = losses + all;
    ObjectiveRows<acc_t<T>> rows = {};
    rows.coefficient = x;
    rows.value = x + all;
    rows.margin = x + 2 * all;
    rows.correct = x + 3 * all;
    rows.losses = losses;
    rows.targets = targets;
    rows.doc_start = targets + all;
    rows.feedback = numbers;
    rows.reference = numbers + all;
    rows.T = T_all;
    objective(rows, o, all, ctx.where);

    // Keep this rank's rows.
    for (size_t i = 0; i < o.outputs(); i++) {
        acc_t<T>* mine = a.objective + i * N;
        place_rows<false>(mine, x + i * all, b.positions, b.B, b.T, T_all, ctx.where);
    }
}

// Compute the objective's numbers from the losses of all rows.
template <typename T, typename S>
void head_objective(Ctx<S>& ctx, const HeadActs<T>& a) {
    const Batch& b = ctx.batch;
    size_t N = b.rows();
    acc_t<T>* x = a.objective;
    if (!ctx.shape.loss.objective.rows()) return;
    if (ctx.shape.loss.objective.joins())
        return head_objective_of_all(ctx, a);
    ObjectiveRows<acc_t<T>> rows = {x,         x + N,       x + 2 * N,  x + 3 * N,   a.losses,
                                    b.targets, b.doc_start, b.feedback, b.reference, b.T};
    rows.old = b.old;
    rows.clipped = x + 4 * N;
    objective(rows, ctx.shape.loss.objective, N, ctx.where);
}

// Coefficients of rows, which take a walk of their own; null if each row's loss counts as it is.
template <typename T, typename S>
const acc_t<T>* row_coefficients(Ctx<S>& ctx, const HeadActs<T>& a, const LmHead& lm_head) { // (N)
    // Drop each chunk's logits, and make them again for the gradients: all would take N V elements.
    if (!ctx.shape.loss.objective.rows()) return nullptr;
    size_t N = ctx.batch.rows();
    size_t chunk = head_chunk_rows(ctx.shape, N, sizeof(T));
    for (size_t n = 0; n < N; n += chunk) {
        size_t rows = std::min(chunk, N - n);
        const T* norm = a.norm + n * ctx.shape.C; // (rows,C)
        head_logits(ctx, a.logits, norm, lm_head, rows);
        head_chunk_loss(ctx, a, n, rows);
    }
    head_objective(ctx, a);
    return a.objective;
}

// Evaluate: make the loss, and the numbers that are kept for each row.
template <typename T, typename S>
void head_loss(Ctx<S>& ctx, LossSums* loss, const RowLosses<T>& kept, HeadActs<T> a,
               const LmHead& lm_head) {
    size_t N = ctx.batch.rows();
    size_t chunk = head_chunk_rows(ctx.shape, N, sizeof(T));
    a.losses = kept.losses;
    for (size_t n = 0; n < N; n += chunk) {
        a.row_max = kept.row_max + n;
        a.target_logit = kept.target_logit + n;

        // The maxima and the targets' logits stay; the logits themselves do not.
        size_t rows = std::min(chunk, N - n);
        const T* norm = a.norm + n * ctx.shape.C; // (rows,C)
        head_logits(ctx, a.logits, norm, lm_head, rows);
        head_chunk_loss(ctx, a, n, rows);
    }
    head_objective(ctx, a);
    total_loss(ctx, loss, a);
}

// A teacher's head, with which the student's makes the teacher's logits (teacher.h).
struct TeacherHead {
    const void* norm = nullptr; // (micro-batches,N,C) outputs of the teacher's last norm
    LmHead lm_head = {};        // (Vp,C)
    Blas* blas = nullptr;       // the teacher's own, with scratch for its product
    size_t C = 0;
    float softcap = 0;
    bool root_softcap = false;
};

// Make the teacher's logits of rows [n, n + rows), from the outputs of its last norm.
template <typename T, typename S>
void teacher_chunk_logits(Ctx<S>& ctx, const HeadActs<T>& a, size_t n, size_t rows) {
    const TeacherHead& t = *ctx.teacher;
    size_t first = size_t(ctx.micro) * ctx.batch.rows() + n;
    const T* norm = static_cast<const T*>(t.norm) + first * t.C; // (rows,C)
    const T* no_residual = nullptr;
    linear_forward(a.teacher_logits, norm, t.lm_head, bias_of(t.lm_head.bias), no_residual, rows,
                   *t.blas, ctx.where);
    softcap_forward(a.teacher_logits, rows * ctx.shape.Vp(), t.softcap, ctx.where, t.root_softcap);
}

// Distillation: turn the logits of rows [n, n + rows) into losses and their own gradient. Both
// models' tables are cut in the same way over tensor-parallel ranks.
template <typename T, typename S>
void head_chunk_distill(Ctx<S>& ctx, const HeadActs<T>& a, GradientScale scale, size_t n,
                        size_t rows) {
    const Shape& s = ctx.shape;
    const int* targets = ctx.batch.targets + n; // (rows)
    Distillation d = {s.loss.objective.share, s.loss.objective.temperature};
    teacher_chunk_logits(ctx, a, n, rows);

    // Reduce both rows over all ranks' columns.
    DistillRows<T> x = {a.logits, a.teacher_logits,      targets, a.distill,
                        a.distill + 2 * rows, rows, s.V, s.Vp(), s.rank.vocab_start};
    distill_max(x, ctx.where);
    all_reduce_max(ctx.tp, x.maxima, 2 * rows, ctx.where);
    distill_sums(x, d, ctx.where);
    all_reduce_sum(ctx.tp, x.sums, DISTILL_SUMS * rows, ctx.where);

    // Losses and gradients follow from them.
    distill_loss(a.losses + n, x, d, ctx.where);
    distill_backward(x, d, scale, ctx.where);
}

// Train: make the loss, this rank's rows of a.dnorm, the weight's gradient. scale: one number.
template <typename T, typename S>
void head_loss_backward(Ctx<S>& ctx, LossSums* loss, const HeadActs<T>& a, const LmHead& lm_head,
                        const double* scale, bool accumulate) {
    const Shape& s = ctx.shape;
    size_t N = ctx.batch.rows();
    size_t chunk = head_chunk_rows(s, N, sizeof(T));
    const acc_t<T>* coefficients = row_coefficients(ctx, a, lm_head);
    for (size_t n = 0; n < N; n += chunk) {
        size_t rows = std::min(chunk, N - n);
        const T* norm = a.norm + n * s.C; // (rows,C)
        T* dnorm = a.dnorm + n * s.C;     // (rows,C) {+tp}
        head_logits(ctx, a.logits, norm, lm_head, rows);

        // Turn logits into losses and their own gradient; in one kernel if the vocabulary is whole.
        const int* targets = ctx.batch.targets + n; // (rows)
        GradientScale all_rows = {1,     ctx.loss_scale, s.loss.softcap,
                                  scale, coefficients,   s.loss.root_softcap};
        GradientScale gradient_scale = all_rows.from_row<acc_t<T>>(n);
        if (ctx.teacher) {
            head_chunk_distill(ctx, a, gradient_scale, n, rows);
        } else if (ctx.tp.size == 1) {
            crossentropy_forward_backward(a.losses + n, a.logits, targets, gradient_scale, rows,
                                          s.V, s.Vp(), ctx.where);
        } else {
            head_chunk_loss(ctx, a, n, rows);
            crossentropy_backward(a.logits, targets, a.row_max, a.sum_exp, gradient_scale, rows,
                                  s.V, s.Vp(), s.rank.vocab_start, ctx.where);
        }

        // Compute the gradients of the product's input, weight and bias.
        linear_backward_input(dnorm, a.logits, lm_head, rows, false, ctx.blas, ctx.where);
        linear_backward_weight(lm_head, bias_of(lm_head.bias), a.logits, norm, rows,
                               accumulate || n > 0, ctx.blas, ctx.where);
    }

    // Sum dnorm over ranks: each rank has the part that comes from its own tokens.
    sum_rows(ctx, my_rows(ctx, a.dnorm), a.dnorm);
    total_loss(ctx, loss, a);
}

// Normalise the rows that generation scores: the last `kept` rows of each sequence.
template <typename T, typename S, typename W>
void norm_last_rows(Ctx<S>& ctx, const T* inp, const W& w, HeadActs<T> acts, size_t kept) {
    const Batch& b = ctx.batch;
    if (kept == b.T)
        return head_norm(ctx, inp, w, acts, b.B * kept);
    for (size_t i = 0; i < b.B; i++) {
        // A shorter sequence is padded: its last row stands before the padding.
        size_t length = b.lengths ? b.lengths[i] : b.T;
        size_t from = i * b.T + length - kept;
        head_norm(ctx, inp + from * ctx.shape.C, w, acts, kept);
        acts.norm += kept * ctx.shape.C;
    }
}

} // namespace llmc
