// upcycle.h - a dense model's ffn becomes experts, all copies of it at first - arXiv:2212.05055
//   1. Every expert of a block is the folder's ffn, and all else is as the folder has it.
//   2. Routers are new: a dense folder has none. They are drawn as any new weight is, by --seed,
//      the parameter's name and the global element.
//   A token's gates sum to 1 and the experts are equal, so the first loss is the dense model's; a
//   choice that weighs its gates otherwise is refused. Only gates tell the experts apart, and what
//   these learn follows from them.
//   Cost: every expert reads the ffn again, from the page cache.
#pragma once
#include "huggingface.h"

namespace llmc {

// The name under which a dense folder has a parameter; "": it has none.
inline std::string dense_name(const Parameter& p) {
    // Files of experts have two sets of names; a block's place in them ends before both.
    // Attention, norms and tables are called the same in all.
    size_t block = std::min(p.name.find("block_sparse_moe."), p.name.find("mlp."));
    if (block == std::string::npos) return p.name;
    if (p.stack == 1) return ""; // a router
    const char* names[][2] = {{"gate_proj", "w1."}, {"up_proj", "w3."}, {"down_proj", "w2."}};
    for (auto [dense, mixtral] : names)
        for (const char* name : {dense, mixtral})
            if (p.name.find(name) != std::string::npos)
                return p.name.substr(0, block) + "mlp." + dense + ".weight";
    return "";
}

// The model's parameters as a dense folder has them. New ones are left out, and drawn.
template <typename T, typename S>
std::string upcycle_weights(Trainer<T, S>& t, const std::string& folder, uint64_t seed) {
    // Sort out what the folder has.
    std::vector<Parameter> dense;
    for (Parameter p : t.model.parameters) {
        std::string name = dense_name(p);
        if (name.empty()) {
            draw_weight(t, p, seed);
            continue;
        }

        // A stack without a number in its name reads the same tensor for each of its matrices.
        p.name = name;
        dense.push_back(p);
    }
    return hf_load_parameters(t, folder, dense);
}

} // namespace llmc
