// model_shape.h - the shape that --model names, and what other flags change of it
#pragma once
#include "../comm/text.h"
#include "../family.h"
#include "../model.h"
#include "../ops/fp8.cuh"
#include "../ops/moe.cuh"
#include "config.h"
#include "config_check.h"
#include "files.h"
#include "hf_config.h"
#include "model_files.h"

namespace llmc {

// Change the shape of a preset or a folder as the flags say.
inline std::string override_shape(const Config& c, Shape& s) {
    ExpertShape& e = s.experts;
    RopeShape& rope = s.rope;
    // Refuse sizes that latent attention derives from others, for which there are no flags.
    if (s.latent.kv && (c.heads || c.channels || c.kv_heads))
        return "--heads, --kv-heads and --channels are not built with latent attention: leave them "
               "out, or give a folder with --scratch";

    // Without --kv-heads, a model with one key/value head per head keeps that.
    if (c.heads && !c.kv_heads && s.NKV == s.NH)
        s.NKV = c.heads;
    if (c.kv_heads) s.NKV = c.kv_heads;
    if (c.heads) s.NH = c.heads;

    // Without --ffn, the feed-forward layer keeps its ratio to the channels.
    if (c.channels && !c.ffn)
        s.F = s.F * c.channels / s.C;
    if (c.channels) s.C = c.channels;
    if (c.ffn) s.F = c.ffn;
    if (s.latent.kv && e.E == 0) e.dense_F = s.F; // blocks without experts

    // Put experts in the place of the ffn. This works for the Llamas whose blocks equal Mixtral's
    // in all but the ffn.
    const char* plain[] = {"llama", "mistral", "qwen3"};
    bool can = std::ranges::count(plain, s.hf_type) > 0;
    // --upcycle counts the experts that a dense folder's ffn is copied into, --experts new ones.
    size_t experts = size_t(c.experts + c.upcycle);
    if (c.upcycle && e.E)
        return concat("--upcycle ", c.upcycle, ": the model has experts already: leave it out");
    if (experts && can && !s.attention.qkv_bias && !s.attention.o_bias && !s.block.mlp_bias) {
        s.family = Family::MIXTRAL;
        s.hf_type = s.block.qk_norm ? "qwen3_moe" : "mixtral";
        e.K = 2;
    }

    // Let the flags choose experts and router.
    if (experts) e.E = experts;
    if (c.experts_per_token) e.K = c.experts_per_token;
    if (!c.router.empty())
        e.router = choice_of<Router>(c, &Config::router);

    // Balance the router only if there is one.
    e.balance = e.E ? c.balance : 0;
    e.z_loss = e.E ? c.z_loss : 0;
    e.capacity.factor = e.E ? c.expert_capacity : 0;
    e.whole = e.E && has_whole_experts(c);

    // Take the remaining flags as they are.
    if (c.layers) s.L = c.layers;
    if (c.vocab) s.V = c.vocab;
    if (!c.position.empty())
        s.embedding.position = choice_of<Position>(c, &Config::position);

    // The head size follows from heads and channels if either has changed.
    if (!c.heads && !c.channels) return "";
    if (s.C % s.NH) {
        // Offer the divisors of the channels that lie within 8 of the wanted number of heads.
        auto near = [&](size_t d) { return s.C % d == 0 && d + 8 > s.NH && d < s.NH + 8; };
        return concat("--heads ", s.NH, " does not divide --channels ", s.C,
                      numbers_that(near, s.C, ": heads that do, near it: "));
    }
    size_t before = s.HS;
    s.HS = s.C / s.NH;

    // RoPE may turn only a part of each head; keep its share. 0 means the whole head.
    if (rope.rotary == 0) return "";
    rope.rotary = rope.rotary * s.HS / before;
    if (rope.rotary > 0 && rope.rotary % 2 == 0)
        return "";
    return concat("RoPE turns pairs of a part of each head, and of a head size of ", s.HS,
                  " that part is ", rope.rotary, ": change --heads or --channels");
}

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
        std::string all; // "tiny, tiny-llama, gpt2, ..."
        for (const Preset& p : model_presets()) {
            names.push_back(p.name);
            all += concat(all.empty() ? "" : ", ", p.name);
            if (c.model == p.name)
                s = p.shape;
        }
        std::string close = nearest(c.model, names);
        LLMC_USER_CHECK(s.L > 0,
                        "%s %s is neither a folder, a file nor a preset%s%s%s; presets: %s",
                        flag, c.model.c_str(), close.empty() ? "" : ": did you mean ",
                        close.c_str(), close.empty() ? "" : "?", all.c_str());
    }
    or_die(override_shape(c, s));

    // Choose how products use fp8: it is a property of the model's shape here.
    s.fp8.kind = choice_of<Fp8>(c, &Config::fp8);
    return s;
}

} // namespace llmc
