// optimizer.h - an optimizer is a row: its state tensors, and what it needs of a parameter
//   A state tensor has the parameter's elements as --states says (small_states.cuh). It is sharded,
//   saved and resharded with it: plan, arena, checkpoint and --explain read this table. The update
//   itself is the operator (adamw.cuh), called in run_update() of step.h.
#pragma once
#include "ops/small_states.cuh"
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace llmc {

// Checkpoints store the name, so the order here is free.
enum class Optimizer : uint8_t { ADAMW, SGD };

// The facts that the rest of the program asks of an optimizer.
struct OptimizerRow {
    const char* name;                // of --optimizer
    std::vector<const char*> states; // names in a checkpoint: "m.wte.weight"
    bool whole_matrices;             // its update takes a block's matrices whole (model.h)
};

// How the matrices of blocks are kept where no optimizer changes them (quantised.h).
enum class Stored : uint8_t { WIDE, NF4, INT8, INT4 };

// Rows stand in the order of the enum.
inline const std::vector<OptimizerRow>& optimizer_rows() {
    static const std::vector<OptimizerRow> rows = {
        {"adamw", {"m", "v"}, false}, // first and second moments
        {"sgd", {}, false},
    };
    return rows;
}
inline const OptimizerRow& optimizer_row(Optimizer optimizer) {
    return optimizer_rows()[int(optimizer)];
}

// The format in which data-parallel ranks send the gradients that they sum (zero.h).
enum class Gradients : uint8_t { FLOAT, BF16, FP8 };

// The word of a format, in manifests and --explain.
inline const char* states_name(States states) {
    const char* names[] = {"float", "bf16", "8bit"};
    return names[int(states)];
}

// ----------------------------------------------------------------------------
// the learning rate of a step
//   warm-up:  lr (step + 1) / warmup                                    for step < warmup
//   then, with t = (step - warmup) / (total - warmup) running from 0 to 1:
//   cosine    min_lr + (lr - min_lr) (1 + cos(pi t)) / 2                - arXiv:1608.03983
//   linear    lr + (min_lr - lr) t
//   wsd       lr until the last fifth of the run, then linear to min_lr - arXiv:2404.06395
//   constant  lr in every step after the warm-up

// The learning rate of step 0 .. total - 1. schedule: one of the names of --schedule.
inline double lr_at(int64_t step, int64_t total, int64_t warmup, double lr, double min_lr,
                    const std::string& schedule) {
    // Warm up. Step 0 already learns: it has lr / warmup, not 0.
    if (step < warmup)
        return lr * double(step + 1) / double(warmup);

    // Fall from here on. In a run that is all warm-up nothing follows, and t stays 0.
    double after = double(step - warmup), length = double(total - warmup);
    double t = total > warmup ? std::clamp(after / length, 0.0, 1.0) : 0;
    if (schedule == "cosine")
        return min_lr + (lr - min_lr) * 0.5 * (1 + std::cos(M_PI * t));
    if (schedule == "linear")
        return lr + (min_lr - lr) * t;

    // wsd falls after a fixed share of the whole run, warm-up included.
    if (schedule == "wsd") {
        double decay_from = 0.8 * double(total);
        double decayed = double(step) - decay_from;
        if (decayed <= 0) return lr;
        return lr + (min_lr - lr) * std::min(1.0, decayed / (double(total) - decay_from));
    }
    return lr; // constant
}

} // namespace llmc
