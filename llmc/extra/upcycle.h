// upcycle.h - a dense model's ffn becomes experts, all copies of it at first - arXiv:2212.05055
//   1. Every expert of a block is a copy of the folder's ffn. All other weights are the folder's.
//   2. Routers are new: a dense folder has none. They are drawn like any new weight: by --seed,
//      the parameter's name and the global element.
//   A token's gates sum to 1 and the experts are equal, so the first loss is the dense model's; a
//   router whose gates do not sum to 1 is refused. At first only the gates differ between experts;
//   training then makes the experts differ too.
//   Cost: the ffn is read and sent once; each expert then takes its copy.
#pragma once
#include "../io/huggingface.h"
#include "../io/tensor_source.h"
#include "../model.h"
#include "../parameters.h"
#include "../trainer.h"

namespace llmc {

// The name of a parameter in a dense folder, or "" if it has none there.
inline std::string dense_name(const Parameter& p) {
    // Attention, norms and tables have the same names everywhere. Files with experts use two sets
    // of names; cut both where the block's own part of the name ends.
    size_t block = std::min(p.name.find("block_sparse_moe."), p.name.find("mlp."));
    if (block == std::string::npos)
        return p.name;
    if (p.stack == 1) return ""; // a router: it is new
    const char* names[][2] = {{"gate_proj", "w1."}, {"up_proj", "w3."}, {"down_proj", "w2."}};
    for (auto [dense, mixtral] : names)
        for (const char* name : {dense, mixtral})
            if (p.name.find(name) != std::string::npos)
                return p.name.substr(0, block) + "mlp." + dense + ".weight";
    return "";
}

// Load the model's parameters from a dense folder, and draw the new ones. *bytes: tensor bytes that
// this rank read.
template <typename T, typename S>
std::string upcycle_weights(Trainer<T, S>& t, const std::string& folder, uint64_t seed,
                            const Dialects& dialects = {}, size_t* bytes = nullptr) {
    // Separate the parameters that the folder has from the new ones.
    std::vector<Parameter> dense;
    for (Parameter p : t.model.parameters) {
        std::string name = dense_name(p);
        if (name.empty()) {
            draw_weight(t, p, seed);
            continue;
        }

        // Rename an expert's stack to the ffn. Without a {} in the name, every matrix of the stack
        // reads the same tensor.
        p.name = name;
        dense.push_back(p);
    }
    return hf_load_parameters(t, folder, dense, dialects, "", bytes);
}

} // namespace llmc
