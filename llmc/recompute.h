// recompute.h - what a backward pass needs again: the lowest trained layer, segments of blocks
#pragma once
#include "action.h"
#include "layout.h"
#include "model.h"
#include "pipeline.h"

namespace llmc {

// The names that --recompute takes, in the order of the levels.
constexpr int RECOMPUTE_LEVELS = 5;
inline const char* recompute_name(Recompute r) {
    static const char* names[RECOMPUTE_LEVELS] = {"none", "selective", "attention", "ffn", "full"};
    return names[int(r)];
}

// ----------------------------------------------------------------------------
// backward passes end at the lowest layer that trains anything
//   Beside adapters the embedding is frozen, and adapters may stand in upper blocks alone
//   (--lora-layers; PEFT's layers_to_transform). Nothing below the lowest of them needs a gradient.
//     adapters in block 1 of 0, 1     F(0,0..3)  B(0,3..2)     instead of B(0,3..0)
//   Layers below it keep no activations and recompute nothing; ZeRO-3 gathers their weights once a
//   micro-batch instead of twice. Stages of a pipeline that lie below it run forward alone, and no
//   gradient is sent to them. The schedule of slots stays, so the other stages wait no longer.
//   Losses and gradients keep their bits, because nothing reads what is left out.
//   The lowest layer's pass ends where its attention's does: it makes no gradient of its input.
//   Saves in the layers below: 2 FLOPs a parameter and token, attention's backward pass, and what
//   they would keep for it.

// Find the lowest layer with something to train. Where nothing is frozen that is the embedding.
inline int lowest_trained(const Model& model) {
    int lowest = model.head();
    if (model.buckets[0].trainable) return 0; // the token table
    for (const Bucket& b : model.buckets)
        for (int l : b.layers)
            if (b.trainable)
                lowest = std::min(lowest, l);
    return lowest;
}

// Before: backward passes of all layers, and messages with gradients for all stages. After: none
// below the lowest layer that trains.
inline Plan drop_idle_backward(Plan p, const Model& model) {
    int lowest = lowest_trained(model);
    // A message carries the gradient of its stage's input to the layers below that stage.
    auto unread = [&](const Transfer& t) {
        return t.gradient && first_layer_of(p.layout, model, t.stage) <= lowest;
    };
    for (Action& a : p.actions)
        std::erase_if(a.transfers, unread);

    // Drop the passes, and exchanges that carry nothing any more.
    std::erase_if(p.actions, [&](const Action& a) {
        bool backward = reaches_weights(a.op) || a.op == Op::I;
        bool idle = backward && a.layer < lowest;
        return idle || (a.op == Op::SENDRECV && a.transfers.empty());
    });
    return p;
}

// Return the slots of all pipeline ranks that run anything, for bubbles; kept: those alone whose
// activations wait for a backward pass.
inline std::vector<Schedule> slots_that_run(std::vector<Schedule> all, const Layout& layout,
                                            const Model& model, bool kept = false) {
    // A stage runs backward if it, or a stage below, holds a layer that trains.
    int lowest = lowest_trained(model);
    for (Schedule& mine : all)
        std::erase_if(mine, [&](const Slot& s) {
            bool idle = first_layer_of(layout, model, s.stage + 1) <= lowest;
            return idle && (kept || s.op != SlotOp::F);
        });
    return all;
}

// ----------------------------------------------------------------------------
// blocks with residual scalars read the stream behind the embedding again, and add to its gradient

inline bool reads_embedding(const Model& m, const Action& a) {
    bool forward = a.op == Op::F || a.op == Op::R;
    bool backward = a.op == Op::B || a.op == Op::I;
    if (!m.shape.block.scalars || !m.is_block(a.layer)) return false;
    return forward || backward;
}
// begins: count the last block, too, which adds to nothing.
inline bool adds_to_embedding(const Model& m, const Action& a, bool begins = true) {
    bool backward = a.op == Op::B || a.op == Op::I;
    bool last = a.layer == m.head() - 1;
    if (!backward || !reads_embedding(m, a)) return false;
    return lowest_trained(m) == 0 && (begins || !last);
}

// ----------------------------------------------------------------------------
// several blocks that keep one input: sublinear memory - arXiv:1604.06174
//   FULL keeps the input of every block. A segment of s FULL blocks keeps its first input alone,
//   and R makes the others again, in order, before the segment's backward pass:
//     R(m,l) R(m,l+1) .. R(m,l+s-1) B(m,l+s-1) .. B(m,l+1) B(m,l)
//   All but the last R run the whole forward pass, because the next block needs the output.
//     memory of L blocks   L/s + s - 1 inputs, and the rows of s blocks instead of one
//     time                 the last product of (s-1)/s of the blocks, beyond FULL
//   A block's rows are some 17 times its input, so s = 2 pays from 35 blocks on, and s = sqrt(L/17)
//   takes the least. If a block keeps more than FULL, making it FULL first saves more for less.
//   A segment ends with its stage, and at the first block that is not FULL. Blocks without a
//   backward pass stand in none.

// The place of a block in its segment: 0 is the first one, whose input is kept.
inline int place_in_segment(const Plan& p, const Model& model, int layer) {
    int size = p.recompute.segment(layer);
    if (size == 1 || p.mode != Mode::TRAIN) return 0;

    // A block that is not FULL, and the two ends of the model, stand in no segment.
    auto full = [&](int l) {
        if (!model.is_block(l)) return false;
        return p.recompute.of(l) == Recompute::FULL;
    };
    int trained = lowest_trained(model);
    if (!full(layer) || layer < trained) return 0;

    // Count the FULL blocks of this stage that stand before it in a row.
    int stage = stage_of(p.layout, model, layer);
    int first = std::max(trained, first_layer_of(p.layout, model, stage));
    int before = 0;
    while (layer - before > first && full(layer - before - 1))
        before++;
    return before % size;
}

// Whether R leaves a block's output too, for the next block of its segment.
inline bool remakes_output(const Plan& p, const Model& model, int layer) {
    int next = layer + 1;
    if (next == model.layers()) return false;
    int here = stage_of(p.layout, model, layer);
    int there = stage_of(p.layout, model, next);
    return here == there && place_in_segment(p, model, next) > 0;
}

} // namespace llmc
