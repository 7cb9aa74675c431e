// step.h - the executor: what each action of a plan does, and the one loop that runs them
//   run_actions() is the loop: finish what finish_before() says is due, then run the action, or
//   start it if it is a collective or a move.
//     input     run_load (load.h): tokens, targets, positions, starts of documents
//     layers    run_layer (layers.h): the family's blocks (gpt2.h, llama.h)
//     the end   run_tie, run_norm, run_update
//     between   collectives, and moves between tiers (transfers.h): each starts at its place in the
//               plan and finishes just before the first action that needs it
//   Contract: no bit depends on when a collective runs between its start and its finish.
#pragma once
#include "action.h"
#include "optimizer.h"
#include "arena.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "comm/rank_status.h"
#include "fp8.h"
#include "layout.h"
#include "load.h"
#include "model.h"
#include "muon.h"
#include "ops/adamw.cuh"
#include "ops/adamw_formats.cuh"
#include "ops/attention_cpu.cuh"
#include "ops/ema.cuh"
#include "ops/grad_norm.cuh"
#include "ops/linear.cuh"
#include "ops/loss_scale.cuh"
#include "ops/matmul.cuh"
#include "ops/memory.h"
#include "ops/muon.cuh"
#include "ops/objective.cuh"
#include "ops/rope.cuh"
#include "ops/step_scale.h"
#include "ops/tensor_table.cuh"
#include "ops/types.h"
#include "sharding.h"
#include "streams.h"
#include "trainer.h"
#include "transfers.h"

namespace llmc {

// ----------------------------------------------------------------------------
// what a rank adds to the gradient norm, and what it keeps of the result
//   NORM adds a sum of squares for each chunk of each bucket, over all ranks. An element that
//   several ranks hold counts once. Offloaded gradients leave their sums before NORM (SQUARE).

// The first element of a bucket that this rank counts in the norm. The elements before it are
// replicated over tp: another tensor-parallel rank counts them.
template <typename T, typename S>
size_t own_count(const Trainer<T, S>& t, const Bucket& bucket) {
    if (t.layout.tp.rank == 0) return 0;
    bool first_of_head = t.layout.tp.rank % ranks_of_kv_head(t.layout, t.model) == 0;
    return first_of_head ? bucket.common : bucket.shared;
}

// Sum the squares of this rank's range of a gradient, one sum for each chunk.
template <typename T, typename S>
void square_gradient(const Trainer<T, S>& t, int bucket, Kind kind, double* sums) {
    Range range = updated_range(t.layout, t.model, bucket);
    auto rows = tensor_rows(t.model, bucket, range.first, range.first + range.count);
    const acc_t<T>* grad = updated_part<const acc_t<T>>(t, {kind, bucket}, range);
    grad_squares(sums, grad, rows.data(), rows.size(), t.ctx.where);
}

// ----------------------------------------------------------------------------
// what a run begins with besides weights: tables that blocks only read, fp16's scale
//   init_constants() fills in RoPE's table (P,rotary/2,2), one more for layers with a window, or
//   ALiBi's slopes (NH). init_loss_scale() sets fp16's first loss scale.

template <typename T, typename S>
void init_constants(Trainer<T, S>& t) {
    const Shape& s = t.model.shape;
    const RopeShape& rope = s.rope;
    unsigned char* base = address<unsigned char>(t, {Kind::CONSTANTS});
    if (!base) return; // this rank has no blocks

    // Make the tables long enough for every plan.
    size_t rows = 0;
    for (const Plan& p : t.plans)
        rows = std::max({rows, p.T + s.tuned.prefix, p.cache + s.tuned.prefix});

    // Fill RoPE's table, which serves every head. Layers with a window may have one after it. The
    // text begins after a prefix of n tokens, in row n.
    size_t channels = rotary_channels(s, s.HS);
    auto fill = [&](unsigned char* to, double theta, const RopeScaling& scaling) {
        std::vector<acc_t<T>> table(rows * channels);
        rope_table(table.data(), rows, channels, theta, scaling);
        copy_in(to, table.data(), table.size() * sizeof(table[0]), t.ctx.where);
        wait_for(t.ctx.where); // the copy reads `table`, which ends here
        return to + s.tuned.prefix * channels * sizeof(table[0]);
    };
    size_t behind = round_up(rows * channels * sizeof(acc_t<T>), ARENA_ALIGN);
    if (s.embedding.position == Position::ROPE)
        t.rope.table = fill(base, rope.theta, rope.scaling);
    if (t.rope.table && rope.window_theta)
        t.rope.window = fill(base + behind, rope.window_theta, {});

    // Fill ALiBi's slopes, one for each head. A rank points at the slopes of its own heads.
    if (s.embedding.position == Position::ALIBI) {
        std::vector<float> slopes(s.NH);
        alibi_slopes(slopes.data(), s.NH);
        copy_in(base, slopes.data(), s.NH * sizeof(float), t.ctx.where);
        wait_for(t.ctx.where);
        size_t heads = s.NH / size_t(t.layout.tp.size); // on each rank
        t.ctx.slopes = reinterpret_cast<const float*>(base) + heads * size_t(t.layout.tp.rank);
    }
}

// Set fp16's first loss scale, which lies beside the norm, and point ctx at it for the head.
template <typename T, typename S>
void init_loss_scale(Trainer<T, S>& t) {
    StepScale* home = address<StepScale>(t, {Kind::SCALE});
    if (!home || !t.hyper.loss_scaling.on) return;
    StepScale begin = {};
    begin.loss = begin_loss_scale(t.hyper.loss_scaling);
    copy_in(home, &begin, sizeof(begin), t.ctx.where);
    wait_for(t.ctx.where);
    t.ctx.loss_scale = &home->loss.now;
}

// ----------------------------------------------------------------------------
// how blocks and operators get their scratch

// Point ctx at a layer's scratch: each row of its table, or null where the layer has none.
template <typename T, typename S>
void bind_scratch(Trainer<T, S>& t, int layer) {
    using enum ScratchKind;
    unsigned char* workspace = scratch_address(t, layer, WORKSPACE);
    size_t bytes = workspace ? t.scratch[t.plan].at(layer).find(WORKSPACE)->bytes : 0;
    blas_scratch(t.ctx.blas, workspace, bytes);
    t.ctx.blas.wide = scratch_address(t, layer, WIDE);
    t.ctx.blas.room = scratch_address(t, layer, ROOM);
    t.ctx.all_rows = scratch_address(t, layer, ALL_ROWS);
    t.ctx.context.scratch = scratch_address(t, layer, CONTEXT);
    t.ctx.experts.slot_rows = scratch_address(t, layer, SLOT_ROWS);
    t.ctx.experts.token_rows = scratch_address(t, layer, TOKEN_ROWS);
    t.ctx.experts.exchange_rows = scratch_address(t, layer, EXCHANGE_ROWS);
    t.ctx.heads = scratch_address(t, layer, HEADS);
}

// ----------------------------------------------------------------------------
// the end of a step

// TIE: add the head's gradient of a tied table to the embedding's. If these layers are on different
// stages, each of the two ranks gets the sum.
template <typename T, typename S>
void run_tie(Trainer<T, S>& t, const Action& a) {
    typedef acc_t<T> A;
    const Bucket& bucket = t.model.buckets[a.bucket];
    size_t n = bucket.elements, bytes = n * sizeof(A);
    A* grad = address<A>(t, {summed_kind(t.layout), a.bucket});
    A* tied = address<A>(t, {tied_kind(t.layout), a.bucket});
    if (!tied_apart(t.layout, t.model, a.bucket))
        return add_gradients(grad, tied, n, t.ctx.where);

    // Sum over the pair of ranks, each with its own gradient, and keep the sum as GRAD.
    bool embeds = is_mine(t.layout, t.model, bucket.layers.front());
    all_reduce_sum(t.comms.tie, embeds ? grad : tied, n, t.ctx.where);
    if (!embeds)
        copy_rows(grad, bytes, tied, bytes, bytes, 1, t.ctx.where);
}

// NORM: sum squares over fixed chunks of each bucket, in one order for every layout. A rank fills
// in its chunks and leaves the others zero, so adding the tables of shards and stages changes no
// bit. Only tensor- and expert-parallel ranks add to the same chunk, with pieces of a parameter or
// different experts: these sums may round differently.
template <typename T, typename S>
void run_norm(Trainer<T, S>& t) {
    S where = t.ctx.where;
    unsigned char* scratch = scratch_address(t, -1, ScratchKind::NORM_SUMS);
    double* sums = reinterpret_cast<double*>(scratch); // (chunks)
    size_t chunks = norm_chunks(t.model), start = 0;   // start: this bucket's first chunk
    device_zero(sums, chunks * sizeof(double), where);

    // Data-parallel ranks have different parts, or only one of equal parts counts.
    bool adds = t.layout.zero > 0 || t.layout.ep > 1 || t.layout.experts.whole;
    for (int b = 0; b < int(t.model.buckets.size()); b++) {
        const Bucket& bucket = t.model.buckets[b];
        double* mine = sums + start;
        start += norm_chunks(t.model, b, 0, bucket.elements);

        // Let one rank count each element: one stage of a bucket, one rank of equal ranges.
        if (!is_squared(t.layout, t.model, b)) continue;
        if (adds && !is_first_of_equals(t.layout, t.model, b))
            continue;

        // Square this rank's range, or copy the squares that an offloaded gradient has left.
        Range range = updated_range(t.layout, t.model, b);
        size_t first = norm_chunks(t.model, b, 0, range.first);
        const double* squares = address<const double>(t, {Kind::SQUARES, b});
        size_t bytes = updated_norm_chunks(t.layout, t.model, b) * sizeof(double);
        if (squares) {
            copy_rows(mine + first, bytes, squares, bytes, bytes, 1, where);
        } else {
            square_gradient(t, b, Kind::GRAD, mine + first);
        }

        // Leave out the elements that another tensor-parallel rank counts.
        size_t own = norm_chunks(t.model, b, 0, own_count(t, bucket));
        if (own > first) device_zero(mine + first, (own - first) * sizeof(double), where);
    }

    // Add the tables of all ranks, so that every rank computes the same norm.
    if (adds)
        all_reduce_sum(t.comms.data(Group::DATA).shard, sums, chunks, where);
    if (t.layout.weights_near)
        all_reduce_sum(t.comms.data(Group::DATA).replica, sums, chunks, where);
    all_reduce_sum(t.comms.tp, sums, chunks, where);
    all_reduce_sum(t.comms.pp, sums, chunks, where);

    // Compute the norm, then fp8's scales, which need it. A second beta1 has its own correction.
    Betas betas = {t.hyper.beta1, t.hyper.beta2};
    if (t.hyper.muon.others_beta1 >= 0) betas = {};
    grad_norm_finish(address<StepScale>(t, {Kind::SCALE}), sums, chunks, t.hyper.clip,
                     where, t.hyper.loss_scaling, betas);
    take_amaxes(t);
}

// Update this rank's range of a bucket, or an offloaded chunk of it; for MUON only the momentum of
// its matrices. scale: the step's clipping factor and learning rate. where: the device's stream, or
// the CPU of the host.
template <typename T, typename S, typename W>
void run_update(Trainer<T, S>& t, const Action& a, const StepScale* scale, W where) {
    const Hyper& h = t.hyper;
    Range range = updated_range(t.layout, t.model, a.bucket);
    range = chunk_of(range, t.plans[t.plan].offload, a.chunk);

    // Find the data in the arena, or in the chunk that FETCH has brought. The master is null if
    // weights are as wide as float, or rounded stochastically.
    T* weight = update_part<T>(t, a, {Kind::WEIGHT, a.bucket});
    acc_t<T>* grad = update_part<acc_t<T>>(t, a, {Kind::GRAD, a.bucket});
    void* master = update_part<unsigned char>(t, a, {Kind::MASTER, a.bucket});
    auto state = [&](int s) {
        return update_part<unsigned char>(t, a, {Kind::STATE, a.bucket, s});
    };
    const float no_rate = 0; // StepScale brings the step's learning rate
    auto rows = tensor_rows(t.model, a.bucket, range.first, range.first + range.count);

    // Run the optimizer. Stochastic rounding draws from --seed.
    const Plan& p = t.plans[t.plan];
    AdamWMemory<T> memory = {weight, master, grad, state(0), state(1), p.masters, p.states};
    AdamW numbers = {no_rate, h.beta1, h.beta2, h.eps, h.weight_decay, h.stochastic, h.seed};
    if (t.model.muon || h.muon.apart) {
        auto matrices = rows_of_rule(t.model, a.bucket, range, true);
        if (a.op == Op::MUON)
            return muon_momentum<T>(grad, state(0), p.states, matrices.data(), matrices.size(),
                                    muon_of(h), scale, where);
        if (t.model.muon)
            muon_update(memory, matrices.data(), matrices.size(), muon_of(h), scale, where);
        else
            adamw_update(memory, matrices.data(), matrices.size(), numbers, scale, where);
        rows = rows_of_rule(t.model, a.bucket, range, false);
        numbers = numbers_of_others(h, numbers, &rows);
    }
    if (p.optimizer == Optimizer::SGD)
        sgd_update(weight, static_cast<float*>(master), grad, rows.data(), rows.size(),
                   no_rate, h.weight_decay, scale, where);
    else
        adamw_update(memory, rows.data(), rows.size(), numbers, scale, where);

    // The mean of weights follows them, if there is one.
    update_mean(t, a, WeightMemory<T>{weight, master, p.masters}, range.count, scale, where);
}

// UPDATE: a device reads StepScale from its own memory, so the host need not know the norm. A host
// that runs the update itself waits for the norm.
template <typename T, typename S>
void run_update(Trainer<T, S>& t, const Action& a) {
    if (t.plans[t.plan].offload.update == Tier::DEVICE) {
        const StepScale* scale = address<const StepScale>(t, {Kind::SCALE});
        return run_update(t, a, scale, t.ctx.where);
    }
    StepScale scale = read_value<StepScale>(t, {Kind::SCALE});
    run_update(t, a, &scale, Cpu{});
}

// MUON: a chunk of the momentum; or all matrices, with the momentum that no chunks have updated.
template <typename T, typename S>
void run_muon(Trainer<T, S>& t, const Action& a) {
    if (a.chunk >= 0) return run_update(t, a);
    if (!t.plans[t.plan].offload.cuts_updates())
        for (int b : muon_buckets(t.layout, t.model))
            run_update(t, {Op::MUON, -1, -1, b});
    orthogonalise_all(t);
}

// ----------------------------------------------------------------------------
// the loop, and what a plan leaves: its loss, and the scale of its step

// Run a layer, forward or backward, or one half of its backward pass (layers.h).
template <typename T, typename S>
void run_layer(Trainer<T, S>& t, const Action& a);

// Set the parts of ctx that differ from layer to layer: experts, a window, and RoPE's table.
template <typename T, typename S>
void bind_layer(Trainer<T, S>& t, int layer) {
    size_t window = window_of(t.model.shape, layer);
    t.ctx.shape = layer_shape(t.ctx.rank_shape, layer);
    t.ctx.shape.attention.window = window;
    t.ctx.rope = window && t.rope.window ? t.rope.window : t.rope.table;
    if (!has_rope(t.model.shape, layer)) t.ctx.rope = nullptr;
    t.ctx.experts.loads = t.ctx.shape.experts.E ? expert_loads(t, layer) : nullptr;
}

// Run one action from start to end.
template <typename T, typename S>
void run_action(Trainer<T, S>& t, const Action& a) {
    using enum Op;
    // Fill ctx with the action's micro-batch, scratch and layer.
    if (a.micro >= 0) bind_batch(t, a.micro);
    bind_scratch(t, a.layer);
    bind_layer(t, a.layer);
    switch (a.op) {
    // The input. RELEASE only marks a place in the plan.
    case LOAD: return run_load(t);
    case COUNT: return run_count(t);
    case RELEASE: return; // from here on other data may use the bucket's bytes

    // Layers.
    case F:
    case B:
    case I:
    case W:
    case R: return run_layer(t, a);

    // The end of the step.
    case TIE: return run_tie(t, a);
    case SQUARE:
        return square_gradient(t, a.bucket, Kind::GRAD_HERE,
                               address<double>(t, {Kind::SQUARES, a.bucket}));
    case NORM: return run_norm(t);
    case MUON: return run_muon(t, a);
    case UPDATE: return run_update(t, a);

    // Collectives and moves: start and finish at once, for callers that run a single action.
    case SENDRECV:
    case GATHER:
    case REDUCE:
    case PUBLISH:
    case FETCH:
    case PARK: {
        InFlight<S> f = start_flight(t, a);
        return finish_flight(t, f);
    }
    }
}

// Run f under the action's name, which the watchdog, a profiler and the stopwatch show. `what` is
// put before the name: "", "WAIT " or "WAIT sends of ".
template <typename T, typename S, typename F>
void run_named(Trainer<T, S>& t, const char* what, const Action& a, F f) {
    std::string name = what + action_text(a, t.model);
    if (RankInfo* info = t.comms.world.info) {
        info->action = name;
        note_action(info->notes, name);
    }
    NamedRange range(name.c_str());
    start_lap(t.watch, what, a, t.ctx.where);
    f();
    end_lap(t.watch, t.ctx.where);
}

// Finish what is due before action t.at, and drop the flights that are over. A flight has two
// halves, writes and reads; an exchange that only sends has one half, its sends.
template <typename T, typename S>
void finish_due(Trainer<T, S>& t, std::vector<InFlight<S>>& flights, const Plan& p,
                const std::vector<Finish>& finish_at) {
    for (InFlight<S>& f : flights) {
        const Finish& due = finish_at[f.action];
        bool together = in_stream_order(t) && due.first() <= t.at; // NCCL: both halves end at once
        bool writes = together || due.writes <= t.at;
        bool reads = together || due.reads <= t.at;
        const Action& a = p.actions[f.action];
        bool only_sends = f.sent.c && !f.pending.c && !f.arrived_here && !together;

        // Wait for its writes, then for its reads: an exchange's receives, then its sends.
        if (writes && !f.arrived_here && !only_sends) {
            run_named(t, "WAIT ", a, [&] { finish_writes(t, f); });
            f.arrived_here = true;
        }
        if (reads && f.sent.c) {
            const char* what = f.arrived_here ? "WAIT sends of " : "WAIT ";
            run_named(t, what, a, [&] { finish(f.sent); });
        }
        f.over = writes && reads;
    }
    std::erase_if(flights, [](const InFlight<S>& f) { return f.over; });
}

// Give ctx the shape and the groups of ranks that the plan works with.
template <typename T, typename S>
void enter_plan(Trainer<T, S>& t) {
    const Plan& p = t.plans[t.plan];
    t.ctx.shape = t.ctx.rank_shape = rank_shape(p, t.model);
    t.ctx.tp = t.comms.tp;
    bool shares = p.layout.cp.size > 1;
    t.ctx.cp = shares ? t.comms.cp : Comm();
    t.ctx.context.heads = shares ? t.comms.cp_heads : Comm();
    t.ctx.context.keys = shares ? t.comms.cp_keys : Comm();
    t.ctx.context.method = p.layout.context.method;
    t.ctx.ep = t.comms.ep;
    t.stored.casts = bind_casts(t);
}

// Run the plan's actions (or one part of them) in order, and finish all that they start.
template <typename T, typename S>
void run_actions(Trainer<T, S>& t, Part part) {
    const Plan& p = t.plans[t.plan];
    const std::vector<Finish>& finish = t.arena.finish[t.plan];

    // One round past the last action finishes everything that is still in flight.
    std::vector<InFlight<S>> flights;
    int end = int(p.actions.size());
    for (t.at = 0; t.at <= end; t.at++) {
        finish_due(t, flights, p, finish);
        if (t.at == end) break;
        if (!is_part(part, p.actions[t.at].op)) continue;

        // Run the action, or start it.
        const Action& a = p.actions[t.at];
        run_named(t, "", a, [&] {
            if (queue_of(a.op) == Queue::COMPUTE) {
                run_action(t, a);
                note_placements(t, a);
                if (t.hooks.after) t.hooks.after(a);
            } else {
                flights.push_back(start_flight(t, a));
            }
        });
    }

    t.at = end - 1; // the caller reads data that outlive the plan, as the last action would
}

// Start a plan. A device may still be at work on return. --graphs replays it as one graph, except
// when something looks at each action, and in the first run, which loads kernels.
template <typename T, typename S>
void start_plan(Trainer<T, S>& t, int plan) {
    t.plan = plan;
    enter_plan(t);
    bool looks = t.watch.on || t.hooks.after;
    bool replays = t.graphs.on && !looks && can_replay(t.plans[plan], t.comms.world, t.ctx.where);
    if (!replays || t.graphs.of[plan].runs++ == 0)
        return run_actions(t, Part::ALL);

    // Run the host's part, then replay the streams' part. The watchdog has one name for the graph.
    run_actions(t, Part::HOST);
    if (RankInfo* info = t.comms.world.info)
        info->action = "the plan's graph";
    replay_calls(t.graphs.of[plan], t.ctx.where, [&] { run_actions(t, Part::STREAMS); });
}

// Run a plan. On NCCL wait for it here, with a time limit: plain waits have none, and would not
// notice a peer that never comes.
template <typename T, typename S>
void run_plan(Trainer<T, S>& t, int plan) {
    start_plan(t, plan);
    if (in_stream_order(t))
        wait_for_peers(t.comms.world, t.ctx.where);
}

// The loss of a plan: a sum over its valid targets, and their mean.
struct Loss {
    double sum = 0;
    int64_t valid = 0;              // targets; pairs, if the objective is over pairs
    double margin = 0, correct = 0, clipped = 0; // sums over pairs, or GRPO's (objective.cuh)
    double mean() const { return valid ? sum / double(valid) : 0; }
};

// The results that the host reads when a plan is over.
struct PlanResult {
    Loss loss;
    StepScale scale; // training: the norm, the clipping factor, the learning rate
};

// Wait for the plan, once, and read all its results. All ranks must call: only the last stage has
// the loss, and each data-parallel rank has a part of it.
template <typename T, typename S>
PlanResult plan_result(const Trainer<T, S>& t) {
    // Queue copies of the results after the plan's work, then wait for all of them at once.
    bool has_head = is_mine(t.layout, t.model, t.model.head());
    int micro_batches = t.plans[t.plan].micro_batches;
    std::vector<const LossSums*> losses;
    for (int m = 0; has_head && m < micro_batches; m++)
        losses.push_back(ask_for(t, {Kind::LOSS, -1, m}, t.host.answers + m));
    StepScale* room = reinterpret_cast<StepScale*>(t.host.answers + micro_batches);
    const StepScale* scale = ask_for(t, {Kind::SCALE}, room);
    wait_for_peers(t.comms.world, t.ctx.where);

    // Add up the micro-batches, then the ranks.
    LossSums sum;
    for (const LossSums* of_micro_batch : losses)
        sum.add(*of_micro_batch, t.plans[t.plan].objective);
    all_reduce_sum(t.comms.samples, &sum.loss, 4, Cpu{});
    all_reduce_sum(t.comms.pp, &sum.loss, 4, Cpu{});
    return {{sum.loss, t.data.valid, sum.margin, sum.correct, sum.clipped},
            scale ? *scale : StepScale()};
}
template <typename T, typename S>
Loss plan_loss(const Trainer<T, S>& t) { return plan_result(t).loss; }

// ----------------------------------------------------------------------------
// the step, compiled once per element type for all programs that train
//   make compiles layers.h into build/step_float.o, step_double.o and so on; STEP_OF is the type,
//   and nvcc adds the step on GPUs. Programs that link these objects are compiled with STEP_BUILT,
//   which only declares the step's templates. `make STEPS=` compiles each program whole.

#define LLMC_STEP_ON(EXTERN, T, S)                                                                 \
    EXTERN template void trainer_place(Trainer<T, S>&, const Shape&,                               \
                                       const std::vector<PlanOptions>&, const Layout&);            \
    EXTERN template void run_layer(Trainer<T, S>&, const Action&);                                 \
    EXTERN template void run_action(Trainer<T, S>&, const Action&);                                \
    EXTERN template void run_actions(Trainer<T, S>&, Part);                                        \
    EXTERN template void linear_forward(T*, const T*, const Weight&, const Weight*, const T*,      \
                                        size_t, Blas&, S, Fp8Holds*);
#ifdef __CUDACC__
#define LLMC_STEP(EXTERN, T) LLMC_STEP_ON(EXTERN, T, Cpu) LLMC_STEP_ON(EXTERN, T, cudaStream_t)
#else
#define LLMC_STEP(EXTERN, T) LLMC_STEP_ON(EXTERN, T, Cpu)
#endif

#ifdef STEP_BUILT
LLMC_STEP(extern, float)
LLMC_STEP(extern, double)
LLMC_STEP(extern, bf16)
LLMC_STEP(extern, fp16)
#endif

} // namespace llmc
