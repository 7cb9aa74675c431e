// lowest_trained.h - backward passes end at the lowest layer that trains anything
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
#pragma once
#include "action.h"

namespace llmc {

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
        return t.gradient && first_layer(p.layout, model, t.stage) <= lowest;
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
            bool idle = first_layer(layout, model, s.stage + 1) <= lowest;
            return idle && (kept || s.op != SlotOp::F);
        });
    return all;
}

} // namespace llmc
