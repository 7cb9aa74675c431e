// model_shape.h - the shape that --model names, and what other flags change of it
#pragma once
#include "../model.h"
#include "../ops/fp8.cuh"
#include "../family.h"
#include "config.h"
#include "config_check.h"
#include "files.h"
#include "hf_config.h"
#include "model_files.h"

namespace llmc {

// The shape that --model names, by a Hugging Face folder, a file or a preset; then other flags
// change it. flag: the flag that named the model, for messages.
inline Shape choose_shape(const Config& c, const char* flag = "--model") {
    Shape s;
    LLMC_USER_CHECK(!c.upcycle || file_type(c.model) == S_IFDIR,
                    "--upcycle %d copies the ffn of a dense model, and --model %s is no folder of "
                    "one: give a Hugging Face folder, or --experts for new weights",
                    c.upcycle, c.model.c_str());

    // A model on disk has its own shape, and its weights fit no other.
    if (mode_t type = file_type(c.model)) {
        or_die(type == S_IFDIR ? hf_read_config(&s, c.model) : model_file_shape(&s, c.model));
        bool reshaped = c.layers || c.heads || c.kv_heads || c.channels || c.ffn || c.vocab ||
                        c.position.size() || c.experts ||
                        (!c.upcycle && (c.experts_per_token || c.router.size()));
        LLMC_USER_CHECK(c.scratch || !reshaped,
                        "%s has weights of its own shape: to change the shape, start from new "
                        "weights with --scratch",
                        c.model.c_str());
    } else {
        // Look for a preset. If none has the name, suggest the nearest one.
        std::vector<std::string> names;
        for (const Preset& p : model_presets()) {
            names.push_back(p.name);
            if (c.model == p.name)
                s = p.shape;
        }
        std::string close = nearest(c.model, names);
        LLMC_USER_CHECK(s.L > 0,
                        "%s %s is neither a folder, a file nor a preset%s%s%s; presets: %s",
                        flag, c.model.c_str(), close.empty() ? "" : ": did you mean ",
                        close.c_str(), close.empty() ? "" : "?", preset_names().c_str());
    }
    or_die(override_shape(c, s));

    // Choose how products use fp8: it is a property of the model's shape here.
    if (c.fp8 == "block")
        s.fp8.kind = Fp8::BLOCK;
    if (c.fp8 == "tensor")
        s.fp8.kind = Fp8::TENSOR;
    if (c.fp8 == "delayed")
        s.fp8.kind = Fp8::DELAYED;
    s.fp8.kept = c.fp8_weights == "step";
    s.fp8.rule = {c.fp8_history, c.fp8_margin, c.fp8_amax == "most_recent"};
    return s;
}

} // namespace llmc
