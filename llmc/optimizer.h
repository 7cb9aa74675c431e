// optimizer.h - an optimizer is a row: its state tensors, and what it needs of a parameter
//   A state tensor has the parameter's elements as --states says (small_states.cuh). It is sharded,
//   saved and resharded with it: plan, arena, checkpoint and --explain read this table. The update
//   itself is the operator (adamw.cuh), called in run_update() of step.h.
#pragma once
#include <cstdint>
#include <string>
#include <vector>
#include "small_states.cuh"

namespace llmc {

// Checkpoints store the name, so the order here is free.
enum class Optimizer : uint8_t { ADAMW, SGD };

// The facts that the rest of the program asks of an optimizer.
struct OptimizerRow {
    const char* name;                // of --optimizer
    std::vector<const char*> states; // names in a checkpoint: "m.wte.weight"
    bool whole_matrices;             // its update takes a block's matrices whole (buckets.h)
};

// How the matrices of blocks are kept where no optimizer changes them (frozen.h).
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

// config_check() has refused every name that has no row.
inline Optimizer optimizer_named(const std::string& name) {
    for (size_t i = 0; i < optimizer_rows().size(); i++)
        if (name == optimizer_rows()[i].name)
            return Optimizer(i);
    return Optimizer::ADAMW;
}

// The format in which data-parallel ranks send the gradients that they sum (zero.h).
enum class Gradients : uint8_t { FLOAT, BF16, FP8 };

// The values of --gradients.
inline Gradients gradients_named(const std::string& name) {
    if (name == "fp8") return Gradients::FP8;
    return name == "bf16" ? Gradients::BF16 : Gradients::FLOAT;
}

// The values of --masters; config_check() has refused every other word, and those that the weights'
// type cannot have.
inline Masters masters_named(const std::string& name) {
    if (name == "none") return Masters::NONE;
    return name == "remainder" ? Masters::REMAINDER : Masters::FLOAT;
}

// The values of --states.
inline States states_named(const std::string& name) {
    if (name == "8bit") return States::EIGHT_BIT;
    return name == "bf16" ? States::BF16 : States::FLOAT;
}
// The word of a format, in manifests and --explain.
inline const char* states_name(States states) {
    const char* names[] = {"float", "bf16", "8bit"};
    return names[int(states)];
}

} // namespace llmc
