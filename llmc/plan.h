// plan.h - one optimizer step as a list of actions: generators and passes
//   A generator turns layout and options into a list of actions; a pass turns one list into
//   another; the executor (step.h) is one loop over the result. action.h explains the words, and
//   `train_gpt --explain` prints the plan of your run.
//   Below is the plan of 2 pipeline stages, 2 blocks and 2 micro-batches, with ZeRO-2 over 2 data-
//   parallel ranks and a tied head (layer 0 embeds, 1 and 2 are blocks, 3 is the head). Activation
//   0.1 is micro-batch 0's input to stage 1, gradient 0.1 is the gradient of that input, and B(0,1)
//   is the backward pass of layer 1 for micro-batch 0:
//
//     rank 0
//       LOAD COUNT
//       F(0,0..1)
//       SENDRECV(to 1: activation 0.1)
//       F(1,0..1)
//       SENDRECV(from 1: gradient 0.1, to 1: activation 1.1)
//       B(0,1) REDUCE(block.0) B(0,0)
//       SENDRECV(from 1: gradient 1.1)
//       B(1,1) REDUCE(block.0) B(1,0) REDUCE(positions)
//       TIE(embedding) REDUCE(embedding) NORM UPDATE(embedding) PUBLISH(embedding)
//         UPDATE(positions) PUBLISH(positions) UPDATE(block.0) PUBLISH(block.0)
//     rank 1
//       LOAD COUNT SENDRECV(from 0: activation 0.1)
//       F(0,2..3)
//       SENDRECV(from 0: activation 1.1)
//       B(0,3..2)
//       SENDRECV(to 0: gradient 0.1) REDUCE(block.1)
//       F(1,2..3)
//       B(1,3..2)
//       SENDRECV(to 0: gradient 1.1) REDUCE(head) REDUCE(block.1)
//       TIE(embedding) REDUCE(embedding) NORM UPDATE(embedding) PUBLISH(embedding)
//         UPDATE(block.1) PUBLISH(block.1) UPDATE(head) PUBLISH(head)
//
//   A block's gradient is reduced into shards after each micro-batch, while the next layer runs.
//   Both ranks hold the token table, so TIE adds its two gradients before REDUCE sums them over
//   ranks. Positions and head share a layer with the table, so they too are reduced only once. The
//   messages of one SENDRECV (from and to) are posted together.
#pragma once
#include "access.h"
#include "action.h"
#include "layout.h"
#include "model.h"
#include "offload.h"
#include "pipeline.h"
#include "recompute.h"
#include "sharding.h"
#include "zero.h"
#include <set>

namespace llmc {

// ----------------------------------------------------------------------------
// generators

// One rank's steps for evaluation and generation: forward alone. A stage receives, runs, sends.
inline std::vector<ScheduleStep> forward_schedule(const Layout& layout, int micro_batches) {
    // Walk over this rank's stages, pp apart, for each micro-batch: chunks go round the ranks.
    int pp = layout.pp.size, stages = layout.stages();
    std::vector<ScheduleStep> steps;
    for (int m = 0; m < micro_batches; m++)
        for (int s = layout.pp.rank; s < stages; s += pp) {
            // Put the receive before the slot, and the send into a step of its own after it.
            ScheduleStep run = {true, {SlotOp::F, m, s}, {}}, send;
            if (pp > 1 && s > 0)
                run.transfers = {{false, (s - 1) % pp, false, m, s}};
            if (pp > 1 && s + 1 < stages)
                send.transfers = {{true, (s + 1) % pp, false, m, s + 1}};
            steps.push_back(run);
            steps.push_back(send);
        }
    return steps;
}

// Every pipeline rank's schedule of F and B, or of F, I and W.
// A schedule that the user gave is taken as it is; all others are generated.
inline std::vector<Schedule> schedules_of(const Layout& layout, int micro_batches) {
    if (layout.pipeline == Pipeline::GIVEN) return layout.given;
    return schedules_of(layout.pipeline, layout.pp.size, layout.chunks, micro_batches);
}

// The steps of every pipeline rank, with the transfers between them.
inline PerRank<ScheduleStep> schedule_of(Layout layout, const PlanOptions& options) {
    int m = options.micro_batches;
    if (options.mode == Mode::TRAIN)
        return add_transfers(schedules_of(layout, m), layout.pp.size);
    PerRank<ScheduleStep> all;
    for (layout.pp.rank = 0; layout.pp.rank < layout.pp.size; layout.pp.rank++)
        all.push_back(forward_schedule(layout, m));
    return all;
}

// ----------------------------------------------------------------------------
// passes

// Before: slots of stages. After: layers, F(m,l) in order and B(m,l) in reverse. With the backward
// split, all input halves I of a slot run before its weight halves W. Two exceptions: the embedding
// has no input half, and the head stays whole, because its logits are gone once it has run.
inline Plan add_layers(const Plan& in, const Model& model, const std::vector<ScheduleStep>& steps) {
    Plan p = in;

    // The first action that reaches a gradient writes it, so no step begins by zeroing gradients.
    std::set<int> reached; // layers that have written to their gradients
    auto each_micro_batch = [&](int bucket) { return reduced_each(p.layout, model, bucket); };

    // Append an action. Where each micro-batch is reduced, each one writes its gradients first.
    auto add = [&](Op op, int m, int l) {
        const std::vector<int>& used = buckets_of(model, l);
        bool each = std::any_of(used.begin(), used.end(), each_micro_batch);
        bool first = reaches_weights(op) && (each || reached.insert(l).second);
        p.actions.push_back({op, m, l, -1, first});
    };

    for (const ScheduleStep& step : steps) {
        // Put transfers before their slot, because a receive brings its input.
        if (!step.transfers.empty())
            p.actions.push_back({Op::SENDRECV, -1, -1, -1, false, step.transfers});
        if (!step.has_slot) continue;

        // Run the layers [from, to) of the slot's stage.
        int m = step.slot.micro, head = model.head();
        int from = first_layer_of(p.layout, model, step.slot.stage);
        int to = first_layer_of(p.layout, model, step.slot.stage + 1);
        SlotOp op = step.slot.op;

        if (op == SlotOp::F) {
            for (int l = from; l < to; l++)
                add(Op::F, m, l);
        } else if (op == SlotOp::B && !p.split_backward) {
            for (int l = to - 1; l >= from; l--)
                add(Op::B, m, l);
        } else {
            // Split the backward: the input halves come first, since another stage waits for them.
            if (is_backward(op))
                for (int l = to - 1; l >= std::max(from, 1); l--)
                    add(l == head ? Op::B : Op::I, m, l);
            if (op == SlotOp::B || op == SlotOp::W)
                for (int l = std::min(to, head) - 1; l >= from; l--)
                    add(Op::W, m, l);
        }
    }
    return p;
}

// Before: actions of layers. After: LOAD reads the step's tokens first, and COUNT its targets.
inline Plan add_load(Plan p) {
    if (p.mode == Mode::GENERATE) return p; // the caller gives the prompt
    p.actions.insert(p.actions.begin(), {{Op::LOAD}, {Op::COUNT}});
    return p;
}

// Recomputation (arXiv:1604.06174, arXiv:2205.05198). Before: F(m,l), and B(m,l) or I(m,l). After:
// R(m,l) stands before the backward pass of each block whose level is not NONE; those of a segment
// stand before the backward pass of its last block.
inline Plan add_recompute(Plan in, const Model& model) {
    Plan p = in.without_actions();
    for (Action& a : in.actions) {
        bool backward = a.op == Op::B || a.op == Op::I;
        bool redoes = model.is_block(a.layer) && p.recompute.of(a.layer) != Recompute::NONE;
        if (backward && redoes && !remakes_output(in, model, a.layer))
            for (int l = a.layer - place_in_segment(in, model, a.layer); l <= a.layer; l++)
                p.actions.push_back({Op::R, a.micro, l});
        p.actions.push_back(std::move(a));
    }
    return p;
}

// Before: all backward passes. After: tied gradients are added, then reduced; NORM; each trainable
// bucket of this rank is updated, and published if other ranks need the result.
inline Plan add_update(Plan p, const Model& model) {
    using enum Op;
    if (p.mode != Mode::TRAIN) return p;
    std::vector<int> mine;
    for (int b = 0; b < int(model.buckets.size()); b++)
        if (model.buckets[b].trainable && bucket_is_mine(p.layout, model, b))
            mine.push_back(b);
    auto add = [&](Op op, int bucket) { p.actions.push_back({op, -1, -1, bucket}); };

    // Tied tables wait for both of their gradients, so add_reduce() left them to this place.
    for (int b : mine) {
        if (!model.buckets[b].tied()) continue;
        add(TIE, b);
        if (is_reduced(p.layout, model, b))
            add(REDUCE, b);
    }

    // One norm over all gradients decides the clipping, so no update may run before it.
    add(NORM, -1);
    if (model.muon) add(MUON, -1);

    for (int b : mine) {
        add(UPDATE, b);
        if (is_published(p.layout, model.buckets[b]))
            add(PUBLISH, b);
    }
    return p;
}

// Make one rank's plan from its steps, pass by pass.
inline Plan make_plan(const Layout& layout, const Model& model, const PlanOptions& options,
                      const std::vector<ScheduleStep>& steps) {
    bool whole = options.whole_sequences || options.mode == Mode::GENERATE;
    Layout cut = whole ? whole_sequences(layout) : layout;
    Plan p = {options, with_tiers(cut, options.offload), {}};

    // The order matters: add_reduce() looks at layers, and add_gather() at all other actions.
    p = add_layers(p, model, steps);
    p = drop_idle_backward(std::move(p), model);
    p = add_load(std::move(p));
    p = add_recompute(std::move(p), model);
    p = add_reduce(std::move(p), model);
    p = add_update(std::move(p), model);
    p = add_gradient_moves(std::move(p), model, access);
    p = add_offload(std::move(p), model);
    p = add_parking(std::move(p), model);
    return add_gather(std::move(p), model);
}

// The same for a rank that knows only its layout: make the steps of all ranks, and take its own.
inline Plan make_plan(const Layout& layout, const Model& model, const PlanOptions& options) {
    PerRank<ScheduleStep> steps = schedule_of(layout, options);
    return make_plan(layout, model, options, steps[layout.pp.rank]);
}

// Make the plans of all ranks of the pipeline.
inline std::vector<Plan> make_plans(Layout layout, const Model& model, const PlanOptions& options) {
    PerRank<ScheduleStep> steps = schedule_of(layout, options);
    std::vector<Plan> all;
    for (layout.pp.rank = 0; layout.pp.rank < layout.pp.size; layout.pp.rank++)
        all.push_back(make_plan(layout, model, options, steps[layout.pp.rank]));
    return all;
}

} // namespace llmc
