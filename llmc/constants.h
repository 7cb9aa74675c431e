// constants.h - what a run begins with besides weights: tables that blocks only read, fp16's scale
//   init_constants() fills in RoPE's table (P,rotary/2,2), one more for layers with a window, or
//   ALiBi's slopes (NH). init_loss_scale() sets fp16's first loss scale.
#pragma once
#include "trainer.h"

namespace llmc {

// Fill in RoPE's table or ALiBi's slopes, which blocks only read.
template <typename T, typename S>
void init_constants(Trainer<T, S>& t) {
    const Shape& s = t.model.shape;
    unsigned char* base = address<unsigned char>(t, {Kind::CONSTANTS});
    if (!base) return; // this rank has no blocks

    // Make the tables long enough for every plan.
    size_t rows = 0;
    for (const Plan& p : t.plans)
        rows = std::max({rows, p.T + s.prefix, p.cache + s.prefix});

    // Fill RoPE's table, which serves every head. Layers with a window may have one after it. The
    // text begins after a prefix of n tokens, in row n.
    size_t channels = rotary_channels(s, s.HS);
    auto fill = [&](unsigned char* to, double theta, const RopeScaling& scaling) {
        std::vector<acc_t<T>> table(rows * channels);
        rope_table(table.data(), rows, channels, theta, scaling);
        copy_in(to, table.data(), table.size() * sizeof(table[0]), t.ctx.where);
        wait_for(t.ctx.where); // the copy reads `table`, which ends here
        return to + s.prefix * channels * sizeof(table[0]);
    };
    size_t behind = round_up(rows * channels * sizeof(acc_t<T>), ARENA_ALIGN);
    if (s.position == Position::ROPE)
        t.rope = fill(base, s.rope_theta, s.rope_scaling);
    if (t.rope && s.window_theta)
        t.window_rope = fill(base + behind, s.window_theta, {});

    // Fill ALiBi's slopes, one for each head. A rank points at the slopes of its own heads.
    if (s.position == Position::ALIBI) {
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
    if (!home || !t.hyper.loss_scaling.on)
        return;
    StepScale begin = {};
    begin.loss = begin_loss_scale(t.hyper.loss_scaling);
    copy_in(home, &begin, sizeof(begin), t.ctx.where);
    wait_for(t.ctx.where);
    t.ctx.loss_scale = &home->loss.now;
}

} // namespace llmc
