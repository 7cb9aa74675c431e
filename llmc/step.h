// step.h - the executor: what each action of a plan does, and the one loop that runs them
#pragma once
#include "trainer.h"

// ----------------------------------------------------------------------------
// the input of a step

// Samples of one global batch go round the data-parallel ranks: micro-batch m of rank r takes the
// samples from
// cursor + (m * dp + r) * B on. Changing dp, B or the accumulation keeps the sequence of samples.
template <typename T, typename S> void run_load(Trainer<T, S>& t) {
    const Plan& p = t.plans[t.plan];
    size_t N = p.B * p.T;
    t.valid = 0;
    for (int m = 0; m < p.micro_batches; m++) {
        int* home = address<int>(t, {Kind::TOKENS, -1, m});
        int *tokens = host_side(home, t.staging + size_t(m) * 4 * N, t.ctx.where),
            *targets = tokens + N, *positions = targets + N, *doc_start = positions + N;
        for (size_t b = 0; b < p.B; b++) {
            uint64_t sample = t.cursor + (uint64_t(m) * t.grid.dp + t.grid.dp_rank) * p.B + b;
            bool beyond = sample >= t.samples_end;
            std::string wrong =
                t.window(beyond ? t.samples_end - 1 : sample, tokens + b * p.T, targets + b * p.T);
            USER_CHECK(wrong.empty(), "%s", wrong.c_str());
            for (size_t i = b * p.T; i < (b + 1) * p.T; i++) {
                if (beyond) targets[i] = -1;
                positions[i] = int(i - b * p.T), doc_start[i] = 0;
                t.valid += targets[i] >= 0;
            }
        }
        copy_in(home, tokens, 4 * N * sizeof(int), t.ctx.where);
    }
}

// The micro-batch as the blocks see it.
template <typename T, typename S> void bind_batch(Trainer<T, S>& t, int micro) {
    const Plan& p = t.plans[t.plan];
    Batch& b = t.ctx.batch;
    if (p.mode == Mode::GENERATE) return; // the sampler has set it
    const int* tokens = address<int>(t, {Kind::TOKENS, -1, micro});
    size_t N = p.B * p.T;
    b = {p.B, p.T, tokens, tokens + N, tokens + 2 * N, tokens + 3 * N};
}

// ----------------------------------------------------------------------------
// embedding and head, by family

template <typename T, typename S> void run_embedding_forward(Trainer<T, S>& t, Action a) {
    const Batch& b = t.ctx.batch;
    const T* wpe =
        t.model.shape.position == Position::LEARNED ? address<T>(t, {Kind::WEIGHT, 1}) : nullptr;
    embedding_forward(address<T>(t, {Kind::STREAM, 1, a.micro}), b.tokens, b.positions, b.doc_start,
                      address<const T>(t, {Kind::WEIGHT, 0}), wpe, b.rows(), t.model.shape.C,
                      t.ctx.where);
}

template <typename T, typename S> void run_embedding_backward(Trainer<T, S>& t, Action a) {
    const Batch& b = t.ctx.batch;
    const Shape& s = t.model.shape;
    acc_t<T>* dwpe =
        s.position == Position::LEARNED ? address<acc_t<T>>(t, {Kind::GRAD, 1}) : nullptr;
    embedding_backward_weight(address<acc_t<T>>(t, {Kind::GRAD, 0}), dwpe,
                              address<const T>(t, {Kind::DSTREAM, 1, a.micro}), b.tokens,
                              b.positions, b.doc_start, t.ctx.blas.scratch, b.rows(), s.Vp(), s.P,
                              s.C, !a.first, t.ctx.where);
}

// Training: nothing, the head keeps its input and its backward makes the loss. Evaluation: the
// loss. Generation: the
// logits of the last row.
template <typename T, typename S> void run_head_forward(Trainer<T, S>& t, Action a) {
    const Plan& p = t.plans[t.plan];
    const Shape& s = t.model.shape;
    if (p.mode == Mode::TRAIN) return;
    HeadActs<T> acts = head_acts(t, a.layer);
    const T* inp = address<const T>(t, {Kind::STREAM, a.layer, a.micro});
    size_t rows = t.ctx.batch.rows();
    if (p.mode == Mode::GENERATE) inp += (rows - 1) * s.C, rows = 1;
    const Weight lm_head = s.family == Family::GPT2 ? gpt2_head(t).lm_head : llama_head(t).lm_head;
    if (s.family == Family::GPT2)
        gpt2_head_norm(t.ctx, inp, gpt2_head(t), acts, rows);
    else
        llama_head_norm(t.ctx, inp, llama_head(t), acts, rows);
    if (p.mode == Mode::EVALUATE)
        return head_loss(t.ctx, address<double>(t, {Kind::LOSS, -1, a.micro}), acts, lm_head);
    linear_forward(address<T>(t, {Kind::LOGITS, -1, a.micro}), acts.norm, lm_head, nullptr,
                   (const T*)nullptr, 1, t.ctx.blas, t.ctx.where);
}

template <typename T, typename S> void run_head_backward(Trainer<T, S>& t, Action a) {
    T* dinp = address<T>(t, {Kind::DSTREAM, a.layer, a.micro});
    const T* inp = address<const T>(t, {Kind::STREAM, a.layer, a.micro});
    double* loss = address<double>(t, {Kind::LOSS, -1, a.micro});
    acc_t<T> scale = t.valid ? acc_t<T>(1) / acc_t<T>(t.valid) : 0;
    HeadActs<T> acts = head_acts(t, a.layer);
    if (t.model.shape.family == Family::GPT2)
        gpt2_head_backward(t.ctx, dinp, loss, inp, gpt2_head(t), acts, scale, !a.first);
    else
        llama_head_backward(t.ctx, dinp, loss, inp, llama_head(t), acts, scale, !a.first);
}

// ----------------------------------------------------------------------------
// blocks, by family

template <typename T, typename S> void run_forward(Trainer<T, S>& t, Action a) {
    if (a.layer == 0) return run_embedding_forward(t, a);
    if (a.layer == t.model.head()) return run_head_forward(t, a);
    bool generates = t.plans[t.plan].mode == Mode::GENERATE;
    T* cache = generates ? address<T>(t, {Kind::CACHE, a.layer}) : nullptr;
    T* out = address<T>(t, {Kind::STREAM, a.layer + 1, a.micro});
    const T* inp = address<const T>(t, {Kind::STREAM, a.layer, a.micro});
    switch (t.model.shape.family) {
    case Family::GPT2:
        return gpt2_block_forward(t.ctx, out, inp, gpt2_block(t, a.layer), gpt2_acts(t, a), cache);
    case Family::LLAMA:
        return llama_block_forward(t.ctx, out, inp, llama_block(t, a.layer), llama_acts(t, a),
                                   cache);
    }
}

template <typename T, typename S> void run_recompute(Trainer<T, S>& t, Action a) {
    const T* inp = address<const T>(t, {Kind::STREAM, a.layer, a.micro});
    T* no_cache = nullptr;
    bool full = t.plans[t.plan].recompute == Recompute::FULL;
    if (t.model.shape.family == Family::GPT2) {
        Gpt2Block w = gpt2_block(t, a.layer);
        full ? gpt2_block_activate(t.ctx, inp, w, gpt2_acts(t, a), no_cache)
             : gpt2_block_activate_cheap(t.ctx, inp, w, gpt2_acts(t, a));
    } else {
        LlamaBlock w = llama_block(t, a.layer);
        full ? llama_block_activate(t.ctx, inp, w, llama_acts(t, a), no_cache)
             : llama_block_activate_cheap(t.ctx, inp, w, llama_acts(t, a));
    }
}

template <typename T, typename S> void run_backward_input(Trainer<T, S>& t, Action a) {
    T* dinp = address<T>(t, {Kind::DSTREAM, a.layer, a.micro});
    const T* dout = address<const T>(t, {Kind::DSTREAM, a.layer + 1, a.micro});
    const T* inp = address<const T>(t, {Kind::STREAM, a.layer, a.micro});
    switch (t.model.shape.family) {
    case Family::GPT2:
        return gpt2_block_backward_input(t.ctx, dinp, dout, inp, gpt2_block(t, a.layer),
                                         gpt2_acts(t, a));
    case Family::LLAMA:
        return llama_block_backward_input(t.ctx, dinp, dout, inp, llama_block(t, a.layer),
                                          llama_acts(t, a));
    }
}

template <typename T, typename S> void run_backward_weight(Trainer<T, S>& t, Action a) {
    if (a.layer == 0) return run_embedding_backward(t, a);
    const T* dout = address<const T>(t, {Kind::DSTREAM, a.layer + 1, a.micro});
    const T* inp = address<const T>(t, {Kind::STREAM, a.layer, a.micro});
    switch (t.model.shape.family) {
    case Family::GPT2:
        return gpt2_block_backward_weight(t.ctx, dout, inp, gpt2_block(t, a.layer), gpt2_acts(t, a),
                                          !a.first);
    case Family::LLAMA:
        return llama_block_backward_weight(t.ctx, dout, inp, llama_block(t, a.layer),
                                           llama_acts(t, a), !a.first);
    }
}

template <typename T, typename S> void run_backward(Trainer<T, S>& t, Action a) {
    if (a.layer == t.model.head()) return run_head_backward(t, a);
    if (a.layer > 0) run_backward_input(t, a);
    run_backward_weight(t, a);
}

// ----------------------------------------------------------------------------
// the end of a step

template <typename T, typename S> void run_tie(Trainer<T, S>& t, Action a) {
    add_gradients(address<acc_t<T>>(t, {Kind::GRAD, a.bucket}),
                  address<const acc_t<T>>(t, {Kind::GRAD_TIED, a.bucket}),
                  t.model.buckets[a.bucket].elements, t.ctx.where);
}

// The parameters of a bucket, as the norm and the optimizer walk them.
inline std::vector<TensorRow> tensor_rows(const Model& model, const Bucket& bucket) {
    std::vector<TensorRow> rows;
    for (int i = bucket.first; i < bucket.first + bucket.count; i++) {
        const Parameter& p = model.parameters[i];
        rows.push_back({p.offset, p.elements(), p.decay, fnv1a(p.name)});
    }
    return rows;
}

// Squares over fixed chunks of each parameter's global elements, added in the table's order
// whatever the layout.
template <typename T, typename S> void run_norm(Trainer<T, S>& t) {
    double* sums = address<double>(t, {Kind::SCRATCH, -1});
    size_t chunks = 0;
    for (size_t b = 0; b < t.model.buckets.size(); b++) {
        if (!t.model.buckets[b].trainable) continue;
        std::vector<TensorRow> rows = tensor_rows(t.model, t.model.buckets[b]);
        chunks += grad_squares(sums + chunks, address<const acc_t<T>>(t, {Kind::GRAD, int(b)}),
                               rows.data(), rows.size(), t.ctx.where);
    }
    grad_norm_finish(address<StepScale>(t, {Kind::SCALE}), sums, chunks, t.hyper.clip, t.ctx.where);
}

template <typename T, typename S> void run_update(Trainer<T, S>& t, Action a) {
    typedef acc_t<T> A;
    const Bucket& bucket = t.model.buckets[a.bucket];
    const Hyper& h = t.hyper;
    T* weight = address<T>(t, {Kind::WEIGHT, a.bucket});
    float* master = address<float>(t, {Kind::MASTER, a.bucket});
    const A* grad = address<const A>(t, {Kind::GRAD, a.bucket});
    A* m = address<A>(t, {Kind::MOMENTS, a.bucket}); // first moments, then second moments
    const StepScale* scale = address<const StepScale>(t, {Kind::SCALE});
    std::vector<TensorRow> rows = tensor_rows(t.model, bucket);
    if (h.adamw)
        adamw_update(weight, master, grad, m, m + bucket.elements, rows.data(), rows.size(),
                     {h.lr, h.beta1, h.beta2, h.eps, h.weight_decay}, scale, t.ctx.where);
    else
        sgd_update(weight, master, grad, rows.data(), rows.size(), h.lr, h.weight_decay, scale,
                   t.ctx.where);
}

// ----------------------------------------------------------------------------
// the loop

template <typename T, typename S> void run_action(Trainer<T, S>& t, Action a) {
    if (a.micro >= 0) bind_batch(t, a.micro);
    const Place* scratch = arena_find(t.arena, t.plan, t.at, {Kind::SCRATCH, a.layer});
    blas_scratch(t.ctx.blas, scratch ? t.arena.base + scratch->offset : nullptr,
                 scratch ? scratch->bytes : 0);
    switch (a.kind) {
    case Do::LOAD: return run_load(t);
    case Do::COUNT: return; // one data-parallel rank: its count is the sum
    case Do::F: return run_forward(t, a);
    case Do::B: return run_backward(t, a);
    case Do::I: return run_backward_input(t, a);
    case Do::W: return run_backward_weight(t, a);
    case Do::R: return run_recompute(t, a);
    case Do::TIE: return run_tie(t, a);
    case Do::NORM: return run_norm(t);
    case Do::UPDATE: return run_update(t, a);
    }
}

template <typename T, typename S> void run_plan(Trainer<T, S>& t, int plan) {
    t.plan = plan;
    const std::vector<Action>& actions = t.plans[plan].actions;
    for (t.at = 0; t.at < int(actions.size()); t.at++) run_action(t, actions[t.at]);
    t.at = int(actions.size()) - 1; // what outlives the plan is read from here
}

// The loss of the plan that has just run: the mean over its valid targets.
struct Loss {
    double sum = 0;
    int64_t valid = 0;
    double mean() const { return valid ? sum / double(valid) : 0; }
};

template <typename T, typename S> Loss plan_loss(const Trainer<T, S>& t) {
    Loss loss = {0, t.valid};
    for (int m = 0; m < t.plans[t.plan].micro_batches; m++)
        loss.sum += read_value<double>(t, {Kind::LOSS, -1, m});
    return loss;
}
