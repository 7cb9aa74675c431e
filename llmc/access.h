// access.h - what each action reads and writes: the only statement of what depends on what
//   access() answers for one action. Four users rely on it: the plan's check, the arena's
//   lifetimes, the waits for collectives, and the tests that poison all other bytes.
//   In which datum a bucket's weights and gradients lie: weight_kind, gradient_kind, summed_kind,
//   tied_kind (sharding.h). What is in another tier: tier_of, home_of, update_data, tiered_data,
//   moved_data (offload.h). On one rank without offload these are WEIGHT and GRAD, and GRAD_TIED.
#pragma once
#include "action.h"
#include "optimizer.h"
#include "layout.h"
#include "model.h"
#include "offload.h"
#include "ops/fp8.cuh"
#include "pipeline.h"
#include "recompute.h"
#include "sharding.h"

namespace llmc {

// The data that an action touches, in the order of their use. A changed datum is in both lists.
struct Access {
    std::vector<Data> reads, writes;

    void read(Data d) { reads.push_back(d); }
    void write(Data d) { writes.push_back(d); }
    void change(Data d) {
        read(d);
        write(d);
    }
};

// Whether a plan counts the tokens that experts get: training does.
inline bool counts_loads(const Plan& p, const Model& model) {
    return p.mode == Mode::TRAIN && model.shape.experts.E > 0;
}

// Add the data of delayed scaling: a block's products read scales, and in training leave maxima.
inline void access_amaxes(Access& x, const Plan& p, const Model& model) {
    if (model.shape.fp8.kind != Fp8::DELAYED) return;
    Data amaxes = {Kind::AMAX};
    p.mode == Mode::TRAIN ? x.change(amaxes) : x.read(amaxes);
}

// Add the data that fp8 products touch: scales that they read, maxima that they leave, and the
// casts of weights, which they make or find made.
inline void access_fp8(Access& x, const Plan& p, const Model& model) {
    access_amaxes(x, p, model);
    if (keeps_casts(p, model))
        x.change({Kind::CAST});
}

// Add what COUNT does: it reads the shards that are gathered as codes, and writes their maxima.
inline void access_maxima(Access& x, const Plan& p, const Model& m) {
    for (int b = 0; b < int(m.buckets.size()); b++) {
        if (!gathers_codes(p, m, b)) continue;
        x.read({Kind::WEIGHT, b});
        x.write({Kind::MAXIMA});
    }
}

// F reads the stream and the weights, and leaves the stream for the next layer.
inline void access_forward(Access& x, const Plan& p, const Model& model, const Action& a) {
    using enum Kind;
    int m = a.micro, l = a.layer;
    if (l > 0)
        x.read({STREAM, l, m});

    // In training the head's F computes nothing: B reads the same input and computes the loss.
    if (l == model.head() && p.mode == Mode::TRAIN) return;

    x.read({TOKENS, -1, m});
    x.write({SCRATCH, l});

    // Read the weights. Write the next layer's stream; the head writes the loss or the logits.
    for (int b : buckets_of(model, l))
        x.read({weight_kind(p.layout, model, b), b});
    Kind result = p.mode == Mode::EVALUATE ? LOSS : LOGITS;
    x.write(l < model.head() ? Data{STREAM, l + 1, m} : Data{result, -1, m});

    // A block leaves its activations, and in generation its keys and values.
    if (!model.is_block(l)) return;
    x.read({CONSTANTS});
    access_fp8(x, p, model);
    for (Kind k : {KEPT_B, KEPT_W, REDO_B, REDO_W})
        x.write({k, l, m});
    if (p.mode == Mode::GENERATE)
        x.change({CACHE, l});
    // Add to this block's row of the table of loads.
    if (counts_loads(p, model))
        x.change({LOADS});
}

// R reads what F read, and the activations that the layer's level of recomputation has kept.
inline void access_recompute(Access& x, const Plan& p, const Model& model, const Action& a) {
    using enum Kind;
    int m = a.micro, l = a.layer;
    x.read({STREAM, l, m});
    x.read({TOKENS, -1, m});
    x.read({CONSTANTS});
    access_fp8(x, p, model);
    for (int b : buckets_of(model, l))
        x.read({weight_kind(p.layout, model, b), b});
    bool routes = layer_shape(model.shape, l).experts.E > 0; // the choice of experts is always kept
    if (p.recompute.of(l) != Recompute::FULL || routes)
        for (Kind k : {KEPT_B, KEPT_W})
            x.read({k, l, m});

    for (Kind k : {REDO_B, REDO_W})
        x.write({k, l, m});
    x.write({SCRATCH, l});

    // Inside a segment R is a forward pass once more: it chooses experts again, from the same bits.
    if (!remakes_output(p, model, l)) return;
    x.write({STREAM, l + 1, m});
    if (routes)
        for (Kind k : {KEPT_B, KEPT_W})
            x.write({k, l, m});
}

// A backward pass reads its layer's input and its output's gradient, and writes its input's. The
// weight half needs no input: the norms kept their outputs, which its matrices multiply.
inline void access_streams(Access& x, const Model& model, const Action& a) {
    int m = a.micro, l = a.layer;
    bool input_half = a.op != Op::W;
    if (l > 0 && input_half)
        x.read({Kind::STREAM, l, m});
    if (l < model.head())
        x.read({Kind::DSTREAM, l + 1, m});
    if (l > lowest_trained(model) && input_half)
        x.write({Kind::DSTREAM, l, m});
    if (l < model.head()) return;
    x.read({Kind::VALID});
    x.read({Kind::SCALE}); // the weight of one target, and fp16's loss scale
    x.write({Kind::LOSS, -1, m});
}

// The input half reads the weights, and the weight half makes their gradients. Both halves read
// adapters, since A's gradient needs B and B's needs A.
inline void access_weights(Access& x, const Plan& p, const Model& model, const Action& a) {
    int l = a.layer;
    bool input_half = a.op != Op::W, weight_half = a.op != Op::I;
    for (int b : buckets_of(model, l)) {
        bool multiplies = input_half || model.buckets[b].role == Role::ADAPTER;
        if (multiplies && l > 0)
            x.read({weight_kind(p.layout, model, b), b});
        if (!weight_half || !model.buckets[b].trainable) continue;
        Data grad = {gradient_kind(p.layout, model, b, l), b};
        a.first ? x.write(grad) : x.change(grad);
    }
}

// I and W are the two halves of a backward pass; B runs both at once. The gradients that one half
// of a B makes for the other are then written, and no other action reads them.
inline void access_backward(Access& x, const Plan& p, const Model& model, const Action& a) {
    using enum Kind;
    int m = a.micro, l = a.layer;
    bool input_half = a.op != Op::W;
    x.read({TOKENS, -1, m});
    x.write({SCRATCH, l});
    access_streams(x, model, a);
    access_weights(x, p, model, a);

    // Read the block's activations, and hand gradients from the input half to the weight half.
    if (!model.is_block(l)) return;
    x.read({CONSTANTS});
    access_fp8(x, p, model);
    bool redone = p.recompute.of(l) != Recompute::NONE;
    if (input_half) x.read({KEPT_B, l, m});
    if (input_half && redone)
        x.read({REDO_B, l, m});
    x.read({KEPT_W, l, m});
    if (redone) x.read({REDO_W, l, m});
    if (!input_half) return x.read({GRADIENT_W, l, m});
    x.write({GRADIENT_B, l, m});
    x.write({GRADIENT_W, l, m});
}

// REDUCE sums in place. Where it runs after each micro-batch, it then adds this rank's part of the
// sum to the shard of the step's gradient.
inline void access_reduce(Access& x, const Plan& p, const Model& model, const Action& a) {
    Data grad = {summed_kind(p.layout), a.bucket};
    if (p.gradients != Gradients::FLOAT) x.write({Kind::SENT, a.bucket});
    if (!reduced_each(p.layout, model, a.bucket)) return x.change(grad);
    x.change({Kind::PARTIAL, a.bucket});
    a.first ? x.write(grad) : x.change(grad);
}

// TIE adds a tied table's two gradients into GRAD. If they are apart, each of two ranks has one of
// them, sums in its place and copies the sum to GRAD.
inline void access_tie(Access& x, const Plan& p, const Model& model, const Action& a) {
    Data grad = {summed_kind(p.layout), a.bucket}, tied = {tied_kind(p.layout), a.bucket};
    bool apart = tied_apart(p.layout, model, a.bucket);
    bool embeds = is_mine(p.layout, model, model.buckets[a.bucket].layers.front());
    if (!apart || embeds) x.read(grad);
    if (!apart || !embeds) x.read(tied);
    x.write(grad);
    if (apart) x.write(tied);
}

// NORM reads the gradients of this rank's trainable buckets. Its sums are scratch of no layer.
inline void access_norm(Access& x, const Plan& p, const Model& model) {
    for (int b = 0; b < int(model.buckets.size()); b++) {
        // An offloaded gradient has left the sums of its squares here.
        if (p.layout.offload.gradients && is_squared(p.layout, model, b))
            x.read({Kind::SQUARES, b});
        bool mine = model.buckets[b].trainable && bucket_is_mine(p.layout, model, b);
        if (!p.layout.offload.gradients && mine)
            x.read({Kind::GRAD, b});
    }
    x.change({Kind::SCALE});
    access_amaxes(x, p, model);
    x.write({Kind::SCRATCH, -1});
}

// MUON changes the momentum of this rank's matrices, unless chunks of it have been updated before,
// and puts their update in the gradient's place.
inline void access_muon(Access& x, const Plan& p, const Model& model) {
    x.read({Kind::SCALE});
    for (int b : muon_buckets(p.layout, model)) {
        if (!p.offload.cuts_updates())
            x.change({Kind::STATE, b, 0});
        x.change({Kind::GRAD, b});
        for (int i : model.buckets[b].in_order)
            if (p.optimizer == Optimizer::NORMUON) x.change({Kind::NEURONS, b, i});
    }
    x.write({Kind::SCRATCH, -1});
}

// UPDATE reads the clipping factor, so it runs after NORM; MUON of a chunk's momentum does too.
inline void access_update(Access& x, const Plan& p, const Action& a) {
    x.read({Kind::SCALE});
    // Update in place the data that lie where the update runs; the others come in STAGED.
    for (Data d : update_data(p, staged_of(a))) {
        if (tier_of(p, d) != p.offload.update) continue;
        Data home = home_of(p, d);
        bool reads = d.kind == Kind::GRAD && a.op == Op::UPDATE;
        reads ? x.read(home) : x.change(home);
    }
    if (a.chunk >= 0)
        x.change(staged_of(a));
}

// FETCH moves data from their tier to where the step runs, PARK moves them back.
inline void access_move(Access& x, const Plan& p, const Model& model, const Action& a) {
    bool fetches = a.op == Op::FETCH;
    for (Data d : tiered_data(p, model, a)) {
        // A chunk goes back into weights that lie in one piece: the rest of them must stay.
        bool part = a.chunk >= 0 && d.chunk < 0;
        if (fetches || part) x.read(d);
        if (!fetches) x.write(d);
    }
    for (Data d : moved_data(p, model, a))
        fetches ? x.write(d) : x.read(d);
}

// The data that one action reads and writes.
inline Access access(const Plan& p, const Model& model, const Action& a) {
    using enum Op;
    using enum Kind;
    Access x;
    x.reads.reserve(16); // most actions have fewer
    if (reads_embedding(model, a)) x.read({STREAM, 1, a.micro});
    if (adds_to_embedding(model, a)) x.write({DSTREAM, 1, a.micro});
    if (adds_to_embedding(model, a, false)) x.read({DSTREAM, 1, a.micro});
    switch (a.op) {
    // The input of all micro-batches at once, and the count of their targets.
    case LOAD:
        for (int m = 0; m < p.micro_batches; m++)
            x.write({TOKENS, -1, m});
        x.write({VALID});
        if (counts_loads(p, model)) x.write({LOADS});
        break;
    case COUNT:
        x.change({VALID});
        if (p.mode == Mode::TRAIN) x.change({SCALE});
        access_maxima(x, p, model);
        break;

    // Collectives: between stages, and between the shards of a bucket.
    case SENDRECV:
        for (const Transfer& t : a.transfers) {
            Data d = data_of(p.layout, model, t);
            t.send ? x.read(d) : x.write(d);
        }
        break;
    case GATHER:
        x.read({p.layout.offload.weights ? STAGED : WEIGHT, a.bucket});
        x.write({GATHERED, a.bucket});
        if (!gathers_codes(p, model, a.bucket)) break;
        x.read({MAXIMA});
        x.write({CODES, a.bucket});
        break;
    case RELEASE: break; // only marks the place after the last reader

    // Layers.
    case F: access_forward(x, p, model, a); break;
    case R: access_recompute(x, p, model, a); break;
    case B:
    case I:
    case W: access_backward(x, p, model, a); break;

    // The end of the step.
    case REDUCE: access_reduce(x, p, model, a); break;
    case TIE: access_tie(x, p, model, a); break;
    case SQUARE:
        x.read({GRAD_HERE, a.bucket});
        x.write({SQUARES, a.bucket});
        break;
    case NORM: access_norm(x, p, model); break;
    case MUON: a.chunk < 0 ? access_muon(x, p, model) : access_update(x, p, a); break;
    case UPDATE: access_update(x, p, a); break;
    case FETCH:
    case PARK: access_move(x, p, model, a); break;
    case PUBLISH: x.change({WEIGHT, a.bucket}); break;
    }
    return x;
}

} // namespace llmc
