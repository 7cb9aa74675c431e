// step.h - the executor: what each action of a plan does, and the one loop that runs them
//   Collectives of the plan are started where they stand and finished as late as their data allow:
//   finish_before() in action.h says where, and the arena keeps their bytes until then. On NCCL they
//   run on a stream of their own, behind what compute had been given at their start; their finish
//   lets compute wait for them, not the host. On LOCAL and MPI the host finishes them.
//   Contract: the bits do not depend on when a collective happens between its start and its finish.
#pragma once
#include "dataloader.h"
#include "trainer.h"

// ----------------------------------------------------------------------------
// the input of a step

// Samples of one global batch go round the data-parallel ranks: micro-batch m of rank r takes the
// samples from cursor + (m * dp + r) * B on. Changing dp, B or the accumulation keeps the sequence
// of samples.
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
            size_t row = b * p.T;
            std::string wrong =
                t.window(beyond ? t.samples_end - 1 : sample, tokens + row, targets + row);
            USER_CHECK(wrong.empty(), "%s", wrong.c_str());
            split_documents(doc_start + row, targets + row, tokens + row, p.T, t.document_end);
            for (size_t i = row; i < row + p.T; i++) {
                if (beyond) targets[i] = -1;
                positions[i] = int(i - row);
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

template <typename T, typename S> void bind_scratch(Trainer<T, S>& t, int layer) {
    const Place* scratch = arena_find(t.arena, t.plan, t.at, {Kind::SCRATCH, layer});
    unsigned char* base = scratch ? t.arena.base + scratch->offset : nullptr;
    size_t tail = scratch ? tail_bytes<T>(t.plans[t.plan], t.model, layer) : 0,
           front = scratch ? scratch->bytes - tail : 0;
    blas_scratch(t.ctx.blas, base, front);
    t.ctx.all_rows = base + front;
}

// ----------------------------------------------------------------------------
// embedding and head, by family

template <typename T, typename S> void run_embedding_forward(Trainer<T, S>& t, Action a) {
    const Batch& b = t.ctx.batch;
    const Shape& s = t.ctx.shape;
    bool adds = s.position == Position::LEARNED && t.ctx.tp.rank == 0;
    T *out = address<T>(t, {Kind::STREAM, 1, a.micro}), *part = partial_rows(t.ctx, out);
    embedding_forward(part, b.tokens, b.positions, b.doc_start, weights_of(t, 0),
                      adds ? weights_of(t, 1) : nullptr, b.rows(), s.vocab_start, s.Vp(), s.C,
                      t.ctx.where);
    sum_rows(t.ctx, out, part);
}

// The table of tokens has its gradient of all rows, that of positions of mine.
template <typename T, typename S> void run_embedding_backward(Trainer<T, S>& t, Action a) {
    const Batch& b = t.ctx.batch;
    const Shape& s = t.ctx.shape;
    const T* dout = address<const T>(t, {Kind::DSTREAM, 1, a.micro});
    acc_t<T>* none = nullptr;
    auto backward = [&](acc_t<T>* dwte, acc_t<T>* dwpe, const T* rows, size_t first, size_t count) {
        embedding_backward_weight(dwte, dwpe, rows, b.tokens + first, b.positions + first,
                                  b.doc_start + first, t.ctx.blas.scratch, count, s.vocab_start,
                                  s.Vp(), s.P, s.C, !a.first, t.ctx.where);
    };
    backward(gradients_of(t, 0, 0), none, all_rows(t.ctx, dout), 0, b.rows());
    if (s.position != Position::LEARNED) return;
    size_t R = stream_rows(t.ctx), first = s.row_ranks > 1 ? size_t(t.ctx.tp.rank) * R : 0;
    backward(none, gradients_of(t, 1, 0), dout, first, R);
}

// Training: nothing, the head keeps its input and its backward makes the loss. Evaluation: the
// loss, and each row's. Generation: the logits of the last row.
template <typename T, typename S> void run_head_forward(Trainer<T, S>& t, Action a) {
    const Plan& p = t.plans[t.plan];
    const Shape& s = t.model.shape;
    if (p.mode == Mode::TRAIN) return;
    HeadActs<T> acts = head_acts(t, a.layer);
    const T* inp = address<const T>(t, {Kind::STREAM, a.layer, a.micro});
    size_t rows = stream_rows(t.ctx);
    if (p.mode == Mode::GENERATE) inp += (rows - 1) * s.C, rows = 1;
    const Weight lm_head = s.family == Family::GPT2 ? gpt2_head(t).lm_head : llama_head(t).lm_head;
    if (s.family == Family::GPT2)
        gpt2_head_norm(t.ctx, inp, gpt2_head(t), acts, rows);
    else
        llama_head_norm(t.ctx, inp, llama_head(t), acts, rows);
    if (p.mode == Mode::EVALUATE)
        return head_loss(t.ctx, address<double>(t, {Kind::LOSS, -1, a.micro}),
                         row_losses(t, a.micro), acts, lm_head);
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

// Both gradients of a tied table, the embedding's and then the head's, into one; with the head on
// another stage each of the two ranks gets the sum.
template <typename T, typename S> void run_tie(Trainer<T, S>& t, const Action& a) {
    typedef acc_t<T> A;
    const Plan& p = t.plans[t.plan];
    size_t n = t.model.buckets[size_t(a.bucket)].elements;
    A *grad = address<A>(t, {Kind::GRAD, a.bucket}),
      *tied = address<A>(t, {Kind::GRAD_TIED, a.bucket});
    if (!tied_apart(p, t.model, a.bucket)) return add_gradients(grad, tied, n, t.ctx.where);
    bool embeds = is_mine(p, t.model, 0);
    all_reduce_sum(t.comms.tie, embeds ? grad : tied, n, t.ctx.where);
    if (!embeds) copy_rows(grad, n * sizeof(A), tied, n * sizeof(A), n * sizeof(A), 1, t.ctx.where);
}

// What this rank reduces, updates and publishes of a bucket.
struct Portion {
    size_t first, count; // elements of the bucket, padding included
    bool sharded;
};
template <typename T, typename S> Portion my_part(const Trainer<T, S>& t, int bucket) {
    const Plan& p = t.plans[t.plan];
    const Bucket& b = t.model.buckets[size_t(bucket)];
    bool sharded = is_sharded(p, t.model, {Kind::MASTER, bucket});
    size_t shard = shard_elements(p, b);
    return sharded ? Portion{shard * size_t(p.shard), shard, true}
                   : Portion{0, whole_elements(p, b), false};
}
// My part of a datum: of one that is kept whole, within it.
template <typename P, typename T, typename S>
P* part_of(const Trainer<T, S>& t, Data d, const Portion& part) {
    P* x = address<P>(t, d);
    return x && part.sharded && !is_sharded(t.plans[t.plan], t.model, d) ? x + part.first : x;
}

// The end of what another tensor-parallel rank counts of a bucket.
template <typename T, typename S>
size_t others_count(const Trainer<T, S>& t, const Bucket& bucket) {
    const Plan& p = t.plans[t.plan];
    if (p.tp_rank == 0) return 0;
    return p.tp_rank % ranks_of_kv_head(p, t.model) ? bucket.shared : bucket.common;
}

// Squares over fixed chunks of each bucket, added in the buckets' order whatever the layout: each
// rank fills in the chunks that it has, the others' are zero in its table. What tensor-parallel
// ranks share, the first of them counts.
template <typename T, typename S> void run_norm(Trainer<T, S>& t) {
    const Plan& p = t.plans[t.plan];
    double* sums = address<double>(t, {Kind::SCRATCH, -1});
    size_t chunks = norm_chunks(t.model), at = 0;
    device_zero(sums, chunks * sizeof(double), t.ctx.where);
    for (int b = 0; b < int(t.model.buckets.size()); b++) {
        const Bucket& bucket = t.model.buckets[size_t(b)];
        // of a table on two stages the first one counts
        if (bucket.trainable && is_mine(p, t.model, bucket.layers.front())) {
            Portion part = my_part(t, b);
            std::vector<TensorRow> rows =
                tensor_rows(t.model, b, part.first, part.first + part.count);
            const acc_t<T>* grad = part_of<const acc_t<T>>(t, {Kind::GRAD, b}, part);
            size_t first = norm_chunks(t.model, b, part.first);
            grad_squares(sums + at + first, grad, rows.data(), rows.size(), t.ctx.where);
            size_t others = norm_chunks(t.model, b, others_count(t, bucket));
            if (others > first)
                device_zero(sums + at + first, (others - first) * sizeof(double), t.ctx.where);
        }
        at += norm_chunks(t.model, b, bucket.elements);
    }
    if (p.zero > 0) all_reduce_sum(t.comms.shard, sums, chunks, t.ctx.where);
    all_reduce_sum(t.comms.tp, sums, chunks, t.ctx.where);
    all_reduce_sum(t.comms.pp, sums, chunks, t.ctx.where);
    grad_norm_finish(address<StepScale>(t, {Kind::SCALE}), sums, chunks, t.hyper.clip, t.ctx.where);
}

template <typename T, typename S> void run_update(Trainer<T, S>& t, const Action& a) {
    typedef acc_t<T> A;
    const Hyper& h = t.hyper;
    Portion part = my_part(t, a.bucket);
    T* weight = part_of<T>(t, {Kind::WEIGHT, a.bucket}, part);
    float* master = part_of<float>(t, {Kind::MASTER, a.bucket}, part);
    const A* grad = part_of<const A>(t, {Kind::GRAD, a.bucket}, part);
    A* m = address<A>(t, {Kind::MOMENTS, a.bucket}); // first moments, then second moments
    const StepScale* scale = address<const StepScale>(t, {Kind::SCALE});
    std::vector<TensorRow> rows =
        tensor_rows(t.model, a.bucket, part.first, part.first + part.count);
    if (h.adamw)
        adamw_update(weight, master, grad, m, m + part.count, rows.data(), rows.size(),
                     {h.lr, h.beta1, h.beta2, h.eps, h.weight_decay}, scale, t.ctx.where);
    else
        sgd_update(weight, master, grad, rows.data(), rows.size(), h.lr, h.weight_decay, scale,
                   t.ctx.where);
}

// ----------------------------------------------------------------------------
// collectives: an action starts one, the loop finishes it where finish_before() says

template <typename S> struct Flight { // a collective on its way
    Pending<S> pending = {};
    std::function<void()> rest = {}; // what follows its arrival
    int action = -1;
    decltype(record_point(S())) arrived = {}; // NCCL: behind all of it in the comm stream
};
// On NCCL collectives have a stream of their own, and all of one is given to it at the start.
template <typename T, typename S> bool in_stream_order(const Trainer<T, S>& t) {
    return t.comms.world.nccl != nullptr;
}
template <typename T, typename S> S comm_where(const Trainer<T, S>& t) {
    return in_stream_order(t) ? t.comm_stream : t.ctx.where;
}

// Sums over the ranks that have parts of what tensor parallelism shares, at once: they compute in
// step. Then over the data-parallel ranks, all of the gradient, or my shard of it: over those that
// share the bucket, and at the finish over those that have the same shard; a micro-batch's is added.
template <typename T, typename S> Flight<S> start_reduce(Trainer<T, S>& t, const Action& a) {
    typedef acc_t<T> A;
    S where = comm_where(t);
    Portion part = my_part(t, a.bucket);
    bool each = reduced_each(t.plans[t.plan], t.model, a.bucket), first = a.first;
    A *grad = address<A>(t, {Kind::GRAD, a.bucket}),
      *whole = each ? address<A>(t, {Kind::PARTIAL, a.bucket}) : grad, *mine = whole + part.first;
    const Comms& comms = t.comms;
    const Bucket& bucket = t.model.buckets[size_t(a.bucket)];
    if (t.plans[t.plan].sequence_parallel) all_reduce_sum(comms.tp, whole, bucket.common, where);
    all_reduce_sum(comms.kv, whole + bucket.common, bucket.shared - bucket.common, where);
    size_t whole_bytes = whole_elements(t.plans[t.plan], bucket) * sizeof(A);
    Flight<S> f;
    f.pending = part.sharded ? start_reduce_scatter_sum(comms.shard, mine, whole, part.count, where)
                             : start_all_reduce_sum(comms.shard, whole, part.count, where);
    f.rest = [=, &comms] {
        all_reduce_sum(comms.replica, mine, part.count, where);
        size_t bytes = part.count * sizeof(A);
        if (each && first) copy_rows(grad, bytes, mine, bytes, bytes, 1, where);
        if (each && !first) add_gradients(grad, mine, part.count, where);
        Placements* checked = comms.world.info ? comms.world.info->placements : nullptr;
        if (each && checked) placement_forget(*checked, whole, whole_bytes);
    };
    return f;
}

// Every rank's shard of the weights to all: updated ones, or for a use.
template <typename T, typename S> Flight<S> start_publish(Trainer<T, S>& t, const Action& a) {
    Portion part = my_part(t, a.bucket);
    T* weight = address<T>(t, {Kind::WEIGHT, a.bucket});
    return {
        start_all_gather(t.comms.shard, weight, weight + part.first, part.count, comm_where(t))};
}
template <typename T, typename S> Flight<S> start_gather(Trainer<T, S>& t, const Action& a) {
    return {start_all_gather(t.comms.shard, address<T>(t, {Kind::GATHERED, a.bucket}),
                             address<const T>(t, {Kind::WEIGHT, a.bucket}),
                             my_part(t, a.bucket).count, comm_where(t))};
}

template <typename T, typename S> Flight<S> start_sendrecv(Trainer<T, S>& t, const Action& a) {
    const Plan& p = t.plans[t.plan];
    size_t rows = p.mode == Mode::GENERATE ? t.ctx.batch.rows() : p.B * p.T / t.ctx.shape.row_ranks;
    size_t bytes = rows * t.model.shape.C * sizeof(T);
    std::vector<CommMessage> messages;
    for (const Transfer& x : a.transfers)
        messages.push_back(
            {address<T>(t, data_of(p, t.model, x)), bytes, x.peer, x.send, x.gradient});
    return {start_exchange(t.comms.pp, messages.data(), int(messages.size()), comm_where(t))};
}

template <typename T, typename S> Flight<S> start_collective(Trainer<T, S>& t, const Action& a) {
    bool apart = in_stream_order(t);
    if (apart) wait_point(record_point(t.ctx.where), t.comm_stream); // what it reads is there
    Flight<S> f = a.kind == Do::SENDRECV ? start_sendrecv(t, a)
                  : a.kind == Do::GATHER ? start_gather(t, a)
                  : a.kind == Do::REDUCE ? start_reduce(t, a)
                                         : start_publish(t, a);
    f.action = t.at;
    if (apart && f.rest) f.rest();
    if (apart) f.arrived = record_point(t.comm_stream);
    return f;
}
template <typename T, typename S> void finish_collective(Trainer<T, S>& t, Flight<S>& f) {
    finish(f.pending);
    if (in_stream_order(t))
        wait_point(f.arrived, t.ctx.where);
    else if (f.rest)
        f.rest();
}

// ----------------------------------------------------------------------------
// the loop

// One action, all of it.
template <typename T, typename S> void run_action(Trainer<T, S>& t, const Action& a) {
    if (a.micro >= 0) bind_batch(t, a.micro);
    bind_scratch(t, a.layer);
    switch (a.kind) {
    case Do::LOAD: return run_load(t);
    case Do::COUNT: return all_reduce_sum(t.comms.dp, &t.valid, 1, Cpu{});
    case Do::RELEASE: return; // its bytes are others' from here on
    case Do::F: return run_forward(t, a);
    case Do::B: return run_backward(t, a);
    case Do::I: return run_backward_input(t, a);
    case Do::W: return run_backward_weight(t, a);
    case Do::R: return run_recompute(t, a);
    case Do::TIE: return run_tie(t, a);
    case Do::NORM: return run_norm(t);
    case Do::UPDATE: return run_update(t, a);
    case Do::SENDRECV:
    case Do::GATHER:
    case Do::REDUCE:
    case Do::PUBLISH: {
        Flight<S> f = start_collective(t, a);
        return finish_collective(t, f);
    }
    }
}

// What an action has left along the axes of the plan's collectives, where ranks are checked
// (comm_placement.h): a sum that is left out or made twice is then a message.
template <typename T, typename S> void note_placements(Trainer<T, S>& t, const Action& a) {
    RankInfo* info = t.comms.world.info;
    if (!info || !info->placements) return;
    const Plan& p = t.plans[size_t(t.plan)];
    auto note = [&](Data d, auto* from, size_t count, const char* axis, Placement holds) {
        placement_set(*info->placements, from, count * sizeof(*from), axis, holds,
                      data_text(d, t.model));
    };
    auto partial = [&](Data d, std::initializer_list<const char*> axes) {
        const Bucket& b = t.model.buckets[size_t(d.of)];
        acc_t<T>* grad = address<acc_t<T>>(t, d);
        for (const char* axis : axes) note(d, grad, whole_elements(p, b), axis, Placement::PARTIAL);
        if (p.sequence_parallel) note(d, grad, b.common, "tp", Placement::PARTIAL);
        note(d, grad + b.common, b.shared - b.common, "kv", Placement::PARTIAL);
    };
    if (reaches_weights(a.kind))
        for (int b : buckets_of(t.model, a.layer))
            if (t.model.buckets[size_t(b)].trainable)
                partial({gradient_kind(p, t.model, b, a.layer), b}, {"shard", "replica", "tie"});
    if (a.kind == Do::TIE) partial({Kind::GRAD, a.bucket}, {"shard", "replica"});
    if (a.kind != Do::UPDATE) return;
    Data weight = {Kind::WEIGHT, a.bucket};
    Portion mine = my_part(t, a.bucket);
    if (mine.sharded)
        note(weight, part_of<T>(t, weight, mine), mine.count, "shard", Placement::SHARDED);
}

// f under the name that the watchdog says of a wait, and as a box of the timeline.
template <typename T, typename S, typename F>
void run_named(Trainer<T, S>& t, const std::string& name, F f) {
    if (RankInfo* info = t.comms.world.info) info->action = name;
    double start = t.trace ? clock_seconds() : 0;
    f();
    if (!t.trace) return;
    wait_for(t.ctx.where);
    t.trace->push_back({name, start, clock_seconds()});
}

// Collectives are started where they stand, and go on beside the actions that follow.
template <typename T, typename S> void run_plan(Trainer<T, S>& t, int plan) {
    t.plan = plan;
    const Plan& p = t.plans[size_t(plan)];
    t.ctx.shape = rank_shape(p, t.model), t.ctx.tp = t.comms.tp;
    const std::vector<int>& finish = t.arena.finish[size_t(plan)];
    std::vector<Flight<S>> flights;
    int end = int(p.actions.size());
    auto due = [&](const Flight<S>& f) { return finish[size_t(f.action)] <= t.at; };
    for (t.at = 0; t.at <= end; t.at++) {
        for (Flight<S>& f : flights)
            if (due(f))
                run_named(t, "WAIT " + action_text(p.actions[size_t(f.action)], t.model),
                          [&] { finish_collective(t, f); });
        std::erase_if(flights, due);
        if (t.at == end) break;
        const Action& a = p.actions[size_t(t.at)];
        run_named(t, action_text(a, t.model), [&] {
            if (queue_of(a.kind) == Queue::COMM)
                flights.push_back(start_collective(t, a));
            else
                run_action(t, a), note_placements(t, a);
        });
    }
    if (in_stream_order(t)) wait_for_peers(t.comms.world, t.ctx.where);
    t.at = end - 1; // what outlives the plan is read from here
}

// The loss of the plan that has just run: the mean over its valid targets.
struct Loss {
    double sum = 0;
    int64_t valid = 0;
    double mean() const { return valid ? sum / double(valid) : 0; }
};

// All ranks call it.
template <typename T, typename S> Loss plan_loss(const Trainer<T, S>& t) {
    Loss loss = {0, t.valid};
    const Plan& p = t.plans[t.plan];
    for (int m = 0; m < p.micro_batches && is_mine(p, t.model, t.model.head()); m++)
        loss.sum += read_value<double>(t, {Kind::LOSS, -1, m});
    all_reduce_sum(t.comms.dp, &loss.sum, 1, Cpu{});
    all_reduce_sum(t.comms.pp, &loss.sum, 1, Cpu{}); // the last stage has it
    return loss;
}
