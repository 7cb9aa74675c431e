// optimizer.h - an optimizer is a row: its state tensors; and the formats of what it updates
//   A state tensor has the parameter's elements as --states says (small_states.cuh). It is sharded,
//   saved and resharded with it: plan, arena, checkpoint and --explain read this table. Matrices
//   that Muon updates have no second moment. The update itself is the operator (adamw.cuh,
//   muon.cuh), called in run_update() of step.h.
#pragma once
#include "ops/small_states.cuh"
#include <cstdint>
#include <vector>

namespace llmc {

// Checkpoints store the name, so the order here is free.
enum class Optimizer : uint8_t { ADAMW, SGD, MUON, NORMUON };

// The facts that the rest of the program asks of an optimizer.
struct OptimizerRow {
    const char* name;                // of --optimizer
    std::vector<const char*> states; // names in a checkpoint: "m.wte.weight"
};

// Rows stand in the order of the enum.
inline const OptimizerRow& optimizer_row(Optimizer optimizer) {
    static const OptimizerRow rows[] = {
        {"adamw", {"m", "v"}}, // first and second moments
        {"sgd", {}},
        {"muon", {"m", "v"}},
        {"muon,normuon", {"m", "v"}}, // and a v for each row or column (Kind::NEURONS)
    };
    return rows[int(optimizer)];
}

// The names of a parameter's own state tensors. muon: Muon updates it.
inline std::vector<const char*> states_of(Optimizer optimizer, bool muon) {
    std::vector<const char*> states = optimizer_row(optimizer).states;
    if (muon) states.resize(1);
    return states;
}

// How the matrices of blocks are kept where no optimizer changes them (quantised.h).
enum class Stored : uint8_t { WIDE, NF4, INT8, INT4 };

// The format in which data-parallel ranks send the gradients that they sum (zero.h).
enum class Gradients : uint8_t { FLOAT, BF16, FP8 };

// The word of a format, in manifests and --explain.
inline const char* states_name(States states) {
    const char* names[] = {"float", "bf16", "8bit"};
    return names[int(states)];
}

} // namespace llmc
