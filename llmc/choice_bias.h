// choice_bias.h - experts kept even without a loss: a bias of the choice - arXiv:2408.15664
//   after a step   b_e += rate sign(mean load - load of e),   sign(0) = 0,   of all its tokens
//   b takes part in the choice alone (moe.cuh), so no gradient tells it anything, and gates stay
//   what the scores say. A step that is skipped leaves it as it is.
//   Every rank knows all loads, which are whole numbers, and so all have the same biases here, on
//   the host: no message carries one. Each rank stores what it keeps of them: the float master,
//   and the weight that kernels read, which is rounded in bf16.
#pragma once
#include "expert_loads.h"
#include "parameters.h"

namespace llmc {

// Biases by block; empty where a block has none.
typedef std::vector<std::vector<float>> ChoiceBiases; // (L)(E)

inline bool is_choice_bias(const Parameter& p) {
    return p.name.ends_with(".e_score_correction_bias");
}

// Read them as they were loaded. All ranks call this.
template <typename T, typename S>
ChoiceBiases read_choice_biases(const Trainer<T, S>& t) {
    ChoiceBiases biases(t.model.shape.L);
    for (const Parameter& p : t.model.parameters)
        if (is_choice_bias(p))
            biases[size_t(p.layer) - 1] = get_weight(t, p);
    return biases;
}

// Move them by a step's loads (L,E), which step_loads() has brought together.
template <typename T, typename S>
void move_choice_biases(Trainer<T, S>& t, ChoiceBiases& biases, const std::vector<int64_t>& loads,
                        float rate) {
    int64_t E = int64_t(t.model.shape.E);
    for (const Parameter& p : t.model.parameters) {
        if (!is_choice_bias(p)) continue;
        std::vector<float>& bias = biases[size_t(p.layer) - 1];
        const int64_t* load = loads.data() + (p.layer - 1) * E;
        int64_t all = std::accumulate(load, load + E, int64_t(0));

        // Compare E times a load with the sum: a mean may be no whole number.
        for (int64_t e = 0; e < E; e++) {
            bool below = load[e] * E < all, above = load[e] * E > all;
            bias[size_t(e)] += rate * float(below - above);
        }
        set_weight(t, p, bias.data());
    }
}

} // namespace llmc
