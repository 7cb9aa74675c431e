// layers.h - how an action runs a layer: its pointers are bound, then its family's block is called
//   To bind pointers, visit the rows of the tables that family.h makes. A parameter lies at its
//   offset in its bucket, an activation in the arena's place for its group, scratch at its row.
//   Nothing here knows how many ranks there are: only layout and plan do.
//   The rest of the trainer sees run_layer() and trainer_place() alone. A program that links the
//   step's objects does not compile this file's templates again (step.h).
#pragma once
#include "action.h"
#include "adapters.h"
#include "arena.h"
#include "context.h"
#include "family.h"
#include "fp8.h"
#include "head.h"
#include "layout.h"
#include "model.h"
#include "offload.h"
#include "ops/attention_types.h"
#include "ops/element_type.h"
#include "ops/fp8.cuh"
#include "ops/linear.cuh"
#include "ops/lora.cuh"
#include "ops/matmul.cuh"
#include "ops/objective.cuh"
#include "ops/step_scale.h"
#include "ops/types.h"
#include "plan.h"
#include "plan_check.h"
#include "quantised.h"
#include "recompute.h"
#include "sharding.h"
#include "sizes.h"
#include "step.h"
#include "tensor_parallel.h"
#include "trainer.h"

namespace llmc {

// ----------------------------------------------------------------------------
// making a trainer: plans, and a place for every byte

// Make, check and place one plan for each of `options`.
// A plan that fails its check is a bug of this program, not a mistake of its user.
template <typename T, typename S>
void trainer_place(Trainer<T, S>& t, const Shape& shape, const std::vector<PlanOptions>& options,
                   const Layout& layout) {
    t.layout = with_tiers(layout, options[0].offload);
    t.model = make_model(with_logits(shape, t.ctx.where), layout);
    for (const PlanOptions& o : options) {
        t.plans.push_back(make_plan(layout, t.model, o));
        std::string wrong = plan_check(t.plans.back(), t.model);
        LLMC_CHECK(wrong.empty(), "the plan is wrong: %s", wrong.c_str());
        t.scratch.push_back(scratch_tables<T>(t.plans.back(), t.model, t.ctx.where));
    }
    t.ctx.shape = t.ctx.rank_shape = rank_shape(t.plans[0], t.model);
    t.arena = place_plans<T>(t.plans, t.model, t.ctx.where);
}

// ----------------------------------------------------------------------------
// the adapters beside a layer's matrices: one of all rows, or one of each sequence
//   1. one    --lora, --adapter: every matrix has at most one adapter, which serves all rows
//   2. many   --adapters: sets of adapters of one base, each with a name. Their parameters lie in
//             the bucket "adapter.l" beside each other, called NAME:MODULE.lora_A.weight, and are
//             cut, sharded and gathered like the single one's. A text of generation names its set;
//             ctx.batch.adapters says it of each sequence, and lora.cuh multiplies.
//   Cost: sets * r (in + out) elements a matrix; the base lies in memory once.

// The adapters of one layer, bound to their weights.
struct LayerAdapters {
    size_t sets = 0;        // adapters of a matrix; 0: the layer has none
    bool by_rows = false;   // sequences choose among them
    std::vector<Lora> all = {}; // (rows of the block's table, sets); rank 0: no adapter
    LoraRuns rows = {};     // which rows use which set

    // Give a weight its adapters; `row` is its place in the block's table.
    void point(Weight& w, size_t row) const {
        if (!sets) return;
        const Lora* first = &all[row * sets];
        if (by_rows) w.runs = &rows;
        if (by_rows || first->rank)
            w.lora = first;
    }
};

// Bind the prefix of a layer: keys and values are two rows of the table. Without training their
// gradients are null.
template <typename T, typename S>
PrefixRows layer_prefix(const Trainer<T, S>& t, const Action& a) {
    const Model& m = t.model;
    if (!m.shape.tuned.prefix) return {};
    int bucket = find_bucket(m, Role::ADAPTER, a.layer);
    const Parameter *k = &m.parameters[m.buckets[bucket].first], *v = k + 1;
    const T* weights = weights_of(t, bucket);
    acc_t<T>* grads = gradients_of(t, bucket, a.layer);
    PrefixRows bound = {weights + k->offset, weights + v->offset};
    bound.n = m.shape.tuned.prefix;
    bound.accumulate = !a.first;
    if (!grads) return bound;
    bound.dk = grads + k->offset;
    bound.dv = grads + v->offset;
    return bound;
}

// Bind the adapters of a layer's block, or of its experts; `of` is that bucket's role. Each lies at
// its A, with B in the row after it. Gradients are null unless the plan trains.
template <typename T, typename S>
LayerAdapters layer_adapters(const Trainer<T, S>& t, const Action& a, Role of) {
    const Model& m = t.model;
    // Sets leave experts alone (tune/adapter_files.h).
    int base = find_bucket(m, of, a.layer);
    bool any = m.shape.tuned.adapters || (m.shape.tuned.sets && of == Role::BLOCK);
    if (base < 0 || !any)
        return {};

    // Sequences choose between sets.
    const Batch& batch = t.ctx.batch;
    SetViews sets = adapter_sets(m.shape);
    LayerAdapters bound = {sets.size(), m.shape.tuned.sets != nullptr};
    if (bound.by_rows && batch.adapters)
        bound.rows = lora_rows(batch.adapters, batch.B, batch.T);

    // Walk through the table; a set that leaves a matrix alone has no rows there.
    const Bucket& block = m.buckets[base];
    for (int i = 0; i < block.count; i++) {
        const Parameter& w = m.parameters[block.first + i];
        int row = w.adapter;
        for (auto& [prefix, adapters] : sets) {
            Lora& l = bound.all.emplace_back();
            auto found = adapters->find(module_of(w));
            if (w.adapter < 0 || found == adapters->end())
                continue;

            // Point at both halves.
            const Parameter *half = &m.parameters[row], *other = half + 1;
            row += 2;
            const T* weights = weights_of(t, half->bucket);
            acc_t<T>* grads = gradients_of(t, half->bucket, a.layer);
            l = {weights + half->offset, weights + other->offset, nullptr, nullptr,
                 found->second.rank, found->second.scale};
            if (!grads) continue;
            l.da = grads + half->offset;
            l.db = grads + other->offset;
        }
    }
    return bound;
}

// ----------------------------------------------------------------------------
// binding: the pointers of one layer

// A visitor of parameter rows that points each Weight at its bytes.
template <typename T, typename S> struct BindWeights {
    const Parameter* p; // the next row
    const T* weights;   // the bucket's start
    acc_t<T>* grads;    // the gradients' start; null: frozen, or a plan without gradients
    Fp8 fp8;            // how products cast these weights
    const Narrow* narrow; // the next row's place, if frozen weights are narrow
    const LayerAdapters* adapters = nullptr;
    Fp8Matrices fp8s = {}; // scales and casts of all matrices
    size_t row = 0;        // rows seen so far

    void point(Weight& w) {
        acc_t<T>* grad = grads ? grads + p->offset : nullptr;
        T* data = const_cast<T*>(weights) + p->offset;
        w = {data, type_of<T>(), p->local_rows(), p->local_cols(), grad, nullptr, fp8};
        if (p->matrix >= 0) fp8s.point(w, size_t(p->matrix));
        point_at(w, narrow++);
        if (adapters) adapters->point(w, row);
        row++;
        p++;
    }

    // The table holds the row's other facts already.
    void operator()(Weight& w, const char*, std::initializer_list<size_t>, Init, bool, Shard,
                    bool) {
        point(w);
    }
};

// A visitor for a bucket that a layer uses. It begins at the bucket's first parameter.
template <typename T, typename S>
BindWeights<T, S> bind_bucket(const Trainer<T, S>& t, Role role, int layer,
                              const LayerAdapters* adapters = nullptr) {
    // Find the bucket by its role: its number depends on the model's family.
    int bucket = find_bucket(t.model, role, layer);
    int row = t.model.buckets[bucket].first;
    Fp8 fp8 = role == Role::BLOCK ? t.model.shape.fp8.kind : Fp8::NONE; // the head stays wide
    return {&t.model.parameters[row], weights_of(t, bucket), gradients_of(t, bucket, layer), fp8,
            &t.stored.narrow[row], adapters, fp8_matrices(t)};
}

// A visitor of activation rows that points each at its bytes. The rows of a group follow each
// other, each at a multiple of 256 bytes.
template <typename T, typename S> struct BindActs {
    Recompute level;
    std::map<Kind, unsigned char*> next; // each group's next row; null: the action has none

    BindActs(const Trainer<T, S>& t, const Action& a)
        : level(t.plans[t.plan].recompute.of(a.layer)) {
        for (Kind group : ACTIVATION_KINDS)
            next[group] = address<unsigned char>(t, {group, a.layer, a.micro});
    }
    template <typename P>
    void operator()(P*& pointer, const char*, size_t n, Keep keep, Last last) {
        unsigned char*& at = next[activation_group(keep, last, level)];
        pointer = reinterpret_cast<P*>(at);
        if (at)
            at += round_up(n * sizeof(P), ARENA_ALIGN);
    }
};

// Call f(weights, activations) for the block that an action runs. Activations lie where the plan's
// sizes put them, even when a decoding step has fewer rows.
template <typename T, typename S, typename F>
void with_block(Trainer<T, S>& t, const Action& a, F f) {
    with_family(t.model.shape.family, [&](auto family) {
        typename decltype(family)::Block weights = {};
        Shape shape = layer_shape(t.model.shape, a.layer);
        bind_gathered(t, find_bucket(t.model, Role::BLOCK, a.layer));
        LayerAdapters adapters = layer_adapters(t, a, Role::BLOCK);
        LayerAdapters of_experts = layer_adapters(t, a, Role::EXPERTS);
        t.ctx.prefix = layer_prefix(t, a);
        block_parameters(weights, shape, bind_bucket(t, Role::BLOCK, a.layer, &adapters));
        if (shape.attention.values)
            value_parameters(weights, shape, bind_bucket(t, Role::VALUES, a.layer));
        if (shape.experts.E)
            expert_parameters(weights, shape, bind_bucket(t, Role::EXPERTS, a.layer, &of_experts));

        typename decltype(family)::template Acts<T> acts = {};
        block_activations(acts, t.ctx.shape, t.plans[t.plan].rows(), t.ctx.where,
                          BindActs<T, S>(t, a));
        if constexpr (requires { acts.embedding; })
            acts.embedding = {address<T>(t, {Kind::STREAM, 1, a.micro}),
                              address<T>(t, {Kind::DSTREAM, 1, a.micro})};
        f(weights, acts);
    });
}

// Call f(weights) for the head. A tied head is the token table, with a gradient buffer of its own.
template <typename T, typename S, typename F>
void with_head(const Trainer<T, S>& t, F f) {
    int head = t.model.head();
    with_family(t.model.shape.family, [&](auto family) {
        typename decltype(family)::Head weights = {};
        head_parameters(weights, t.model.shape, bind_bucket(t, Role::HEAD, head));
        if (t.model.shape.embedding.tied)
            bind_bucket(t, Role::TOKENS, head).point(weights.lm_head);
        f(weights);
    });
}

// The head's activations, which lie in a row of its scratch.
template <typename T, typename S>
HeadActs<T> head_acts(const Trainer<T, S>& t) {
    HeadActs<T> acts = {};
    unsigned char* next = scratch_address(t, t.model.head(), ScratchKind::HEAD);
    auto bind = [&](auto*& pointer, const char*, size_t n, Keep, Last) {
        pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(next);
        next += round_up(n * sizeof(*pointer), ARENA_ALIGN);
    };
    head_activations(acts, t.ctx.shape, head_rows(t.plans[t.plan]), bind);
    return acts;
}

// ----------------------------------------------------------------------------
// streams (R,C): a layer's input and output, and the gradients of both

template <typename T, typename S>
T* input_of(const Trainer<T, S>& t, const Action& a) {
    return address<T>(t, {Kind::STREAM, a.layer, a.micro});
}
template <typename T, typename S>
T* output_of(const Trainer<T, S>& t, const Action& a) {
    return address<T>(t, {Kind::STREAM, a.layer + 1, a.micro});
}
template <typename T, typename S>
T* input_gradient(const Trainer<T, S>& t, const Action& a) {
    return address<T>(t, {Kind::DSTREAM, a.layer, a.micro});
}
template <typename T, typename S>
const T* output_gradient(const Trainer<T, S>& t, const Action& a) {
    return address<const T>(t, {Kind::DSTREAM, a.layer + 1, a.micro});
}

// ----------------------------------------------------------------------------
// embedding and head

// Embed the tokens. Models with RoPE or ALiBi have no table of positions: wpe is null.
template <typename T, typename S>
void run_embedding_forward(Trainer<T, S>& t, const Action& a) {
    int positions = find_bucket(t.model, Role::POSITIONS, a.layer);
    const T* wte = weights_of(t, find_bucket(t.model, Role::TOKENS, a.layer)); // (Vp,C)
    const T* wpe = positions >= 0 ? weights_of(t, positions) : nullptr;        // (P,C)
    embedding_forward(t.ctx, output_of(t, a), wte, wpe);
}

// Compute the gradients of the tables. A frozen table has none: its pointer is null.
template <typename T, typename S>
void run_embedding_backward(Trainer<T, S>& t, const Action& a) {
    int positions = find_bucket(t.model, Role::POSITIONS, a.layer);
    acc_t<T>* dwte = gradients_of(t, find_bucket(t.model, Role::TOKENS, a.layer), a.layer);
    acc_t<T>* dwpe = positions >= 0 ? gradients_of(t, positions, a.layer) : nullptr;
    embedding_backward_weight(t.ctx, dwte, dwpe, output_gradient(t, a), !a.first);
}

// The head's forward pass. Training: nothing, for the head's backward pass makes the loss.
// Evaluation: the loss, and each row's. Generation: the logits of each sequence's last rows.
template <typename T, typename S>
void run_head_forward(Trainer<T, S>& t, const Action& a) {
    const Plan& p = t.plans[t.plan];
    if (p.mode == Mode::TRAIN) return;

    HeadActs<T> acts = head_acts(t);
    const T* inp = input_of(t, a);
    with_head(t, [&](const auto& w) {
        if (p.mode == Mode::EVALUATE) {
            head_norm(t.ctx, inp, w, acts, stream_rows(t.ctx));
            LossSums* loss = address<LossSums>(t, {Kind::LOSS, -1, a.micro});
            head_loss(t.ctx, loss, row_losses(t, a.micro), acts, w.lm_head);
        } else { // generation: the norm and the logits of the last rows of each sequence
            size_t kept = std::min(t.ctx.batch.T, p.scored);
            size_t rows = t.ctx.batch.B * kept;
            norm_last_rows(t.ctx, inp, w, acts, kept);
            T* logits = address<T>(t, {Kind::LOGITS, -1, a.micro});
            head_logits(t.ctx, logits, acts.norm, w.lm_head, rows);
        }
    });
}

// Compute the head's loss and gradients. scale: 1 / (valid targets of the global batch).
template <typename T, typename S>
void run_head_backward(Trainer<T, S>& t, const Action& a) {
    LossSums* loss = address<LossSums>(t, {Kind::LOSS, -1, a.micro});
    const double* scale = &address<const StepScale>(t, {Kind::SCALE})->given.target_weight;
    with_head(t, [&](const auto& w) {
        const T* inp = input_of(t, a);
        head_backward(t.ctx, input_gradient(t, a), loss, inp, w, head_acts(t), scale, !a.first);
    });
}

// ----------------------------------------------------------------------------
// layers

// F: run the layer forward. Only generation has a cache; blocks take null for none.
template <typename T, typename S>
void run_forward(Trainer<T, S>& t, const Action& a) {
    if (a.layer == 0) return run_embedding_forward(t, a);
    if (a.layer == t.model.head())
        return run_head_forward(t, a);
    bool generates = t.plans[t.plan].mode == Mode::GENERATE;
    T* cache = generates ? address<T>(t, {Kind::CACHE, a.layer}) : nullptr;
    const T* inp = input_of(t, a);
    with_block(t, a, [&](const auto& w, const auto& acts) {
        block_forward(t.ctx, output_of(t, a), inp, w, acts, cache);
    });
}

// R: fill the rows that F has dropped, or, inside a segment (recompute.h), run the whole forward
// pass. F has counted the experts' tokens already, so R counts none.
template <typename T, typename S>
void run_recompute(Trainer<T, S>& t, const Action& a) {
    const T* inp = input_of(t, a);
    t.ctx.experts.loads = nullptr;
    if (remakes_output(t.plans[t.plan], t.model, a.layer))
        return run_forward(t, a);
    with_block(t, a, [&](const auto& w, const auto& acts) {
        block_recompute(t.ctx, inp, w, acts, t.plans[t.plan].recompute.of(a.layer));
    });
}

// I: the input half of a block's backward pass. W reads the gradients that it leaves in GRADIENT_W.
template <typename T, typename S>
void run_backward_input(Trainer<T, S>& t, const Action& a) {
    const T* inp = input_of(t, a);
    with_block(t, a, [&](const auto& w, const auto& acts) {
        block_backward_input(t.ctx, input_gradient(t, a), output_gradient(t, a), inp, w, acts);
    });
}

// W: the weight half of a backward pass. The embedding has no input half, so it has only this one.
template <typename T, typename S>
void run_backward_weight(Trainer<T, S>& t, const Action& a) {
    if (a.layer == 0) return run_embedding_backward(t, a);
    with_block(t, a, [&](const auto& w, const auto& acts) {
        block_backward_weight(t.ctx, output_gradient(t, a), w, acts, !a.first);
    });
}

// B: the whole backward pass, one half after the other. The head's pass has no halves.
template <typename T, typename S>
void run_backward(Trainer<T, S>& t, const Action& a) {
    if (a.layer == t.model.head())
        return run_head_backward(t, a);
    if (a.layer > 0) run_backward_input(t, a);
    run_backward_weight(t, a);
}

// Run the action's layer.
template <typename T, typename S>
void run_layer(Trainer<T, S>& t, const Action& a) {
    switch (a.op) {
    case Op::F: return run_forward(t, a);
    case Op::B: return run_backward(t, a);
    case Op::I: return run_backward_input(t, a);
    case Op::W: return run_backward_weight(t, a);
    default: return run_recompute(t, a);
    }
}

#ifdef STEP_OF
LLMC_STEP(, STEP_OF)
#endif

} // namespace llmc
