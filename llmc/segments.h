// segments.h - several blocks that keep one input: sublinear memory - arXiv:1604.06174
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
#pragma once
#include "action.h"
#include "lowest_trained.h"

namespace llmc {

// The place of a block in its segment: 0 is the first one, whose input is kept.
inline int place_in_segment(const Plan& p, const Model& model, int layer) {
    int size = p.recompute.segment(layer);
    if (size == 1 || p.mode != Mode::TRAIN)
        return 0;

    // A block that is not FULL, and the two ends of the model, stand in no segment.
    auto full = [&](int l) {
        if (!model.is_block(l)) return false;
        return p.recompute.of(l) == Recompute::FULL;
    };
    int trained = lowest_trained(model);
    if (!full(layer) || layer < trained) return 0;

    // Count the FULL blocks of this stage that stand before it in a row.
    int stage = stage_of(p.layout, model, layer);
    int first = std::max(trained, first_layer(p.layout, model, stage));
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
