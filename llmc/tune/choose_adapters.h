// choose_adapters.h - before a run with adapters: which matrices have them, or what merges them
#pragma once
#include "../adapters.h"
#include "../family.h"
#include "../io/config.h"
#include "../io/files.h"
#include "../io/huggingface.h"
#include "../io/new_tokens.h"
#include "../io/plan_flags.h"
#include "../io/tensor_source.h"
#include "../model.h"
#include "../parameters.h"
#include "../run/open.h"
#include "../run/run.h"
#include "../comm/text.h"
#include "../trainer.h"
#include "adapter_files.h"
#include "prefix_files.h"

namespace llmc {

// Refuse runs that would need the adapter beside the weights, or weights of another origin.
inline std::string check_merged_run(const Config& c, Merging merging) {
    std::string flag = concat("--adapter ", c.adapter, ": is ",
                              merging == Merging::DORA ? "DoRA" : "(IA)3",
                              ", which is merged as it is read");
    bool folder = file_type(c.model) == S_IFDIR && !c.scratch && c.start.empty();
    if (has_steps(c))
        return flag + " and not trained: give --steps 0 or --eval, or --export the merged model "
                      "and train that";

    // Only a folder's weights pass by whole; a checkpoint's are what a run has made of them.
    if (!folder)
        return flag + ": give --model the Hugging Face folder that it was trained on";
    if (c.resume)
        return flag + ", and --resume reads a checkpoint instead: leave one of them out";
    if (c.weights != "float" && !c.export_dir.empty())
        return flag + ", and --weights " + c.weights +
               " has lost what --export writes: give --weights float";
    return "";
}

// Take the number of trained keys from the folder --adapter, if it holds a prefix: from here on the
// run is one of --prefix.
inline void take_prefix(Run& run) {
    Config& c = run.config;
    bool made = c.adapter.empty() || was_given(c, "prefix");
    if (made || before_text(c.adapter) == BeforeText::NOTHING)
        return;
    size_t n = 0;
    or_die(read_prefix(run.shape, c.adapter, &n));
    c.prefix = int(n);
    run.plans.prompt_rows = before_text(c.adapter) == BeforeText::PROMPT;
}

// Add LoRA adapters to the shape: new ones, or those of folders. DoRA and (IA)3 add nothing: they
// are merged into the weights, by one of the dialects. Call it after config_check(), which fills in
// what flags leave out.
inline void add_run_adapters(const Config& c, Shape& s, const Dialects& dialects) {
    if (!has_adapters(c)) return;
    s.tuned.prefix = size_t(c.prefix);
    if (s.tuned.prefix) return;

    // Named adapters serve texts side by side.
    if (!c.adapters.empty()) {
        AdapterSets sets;
        or_die(read_adapter_sets(make_model(s), c.adapters, &sets));
        s.tuned.sets = std::make_shared<const AdapterSets>(sets);
        return;
    }

    // Merged adapters leave no trace in the shape.
    Merging merging = Merging::NONE;
    if (!c.lora)
        or_die(merging_of(c.adapter, &merging));
    if (merging != Merging::NONE) {
        or_die(check_merged_run(c, merging));
        for (const Dialect& d : dialects)
            if (d.check_adapter) or_die(d.check_adapter(make_model(s), c.adapter));
        return;
    }

    // The other adapters stay beside their matrices.
    Adapters adapters;
    if (c.lora)
        or_die(choose_adapters(make_model(s), lora_options(c), &adapters));
    else
        or_die(read_adapters(make_model(s), c.adapter, &adapters));
    for (auto& [module, adapter] : adapters)
        adapter.rate_of_b = float(c.lora_plus);
    s.tuned.adapters = std::make_shared<const Adapters>(adapters);
}

// Let the shape of a run have adapters: a prefix's from here on, others once its flags are checked.
inline void take_adapters(Run& run) {
    take_prefix(run);
    run.complete_shape = [&run](const Config& asked, Shape& s) {
        add_run_adapters(asked, s, run.dialects);
    };
}

// Load the weights: a folder's, with new tokens or with adapters merged into them, or as
// load_model() does; then the adapters that stay beside them. upcycle() reads a folder's.
template <typename T, typename S>
void load_base(Run& run, Trainer<T, S>& t, const std::function<std::string()>& upcycle = nullptr) {
    const Config& c = run.config;
    bool folder = c.start.empty() && !has_new_weights(c) && file_type(c.model) == S_IFDIR;
    bool beside = trains_adapters(run.shape);
    uint64_t seed = uint64_t(c.seed);
    if (!folder)
        load_model(run, t);
    else if (c.upcycle)
        or_die_on_all_ranks(run, upcycle());
    else if (!c.add_tokens.empty())
        or_die_on_all_ranks(run, load_and_grow(t, c.model, seed, run.dialects));
    else
        or_die_on_all_ranks(run, hf_load_weights(t, c.model, run.dialects,
                                                 beside ? "" : c.adapter));
    if (folder) init_weights(t, seed, true);
    if (beside && !c.adapter.empty())
        or_die_on_all_ranks(run, load_trained_adapters(t, c.adapter, run.plans.prompt));
}

// Say at the start what PEFT will not load of an export.
inline void note_peft(Run& run) {
    const Config& c = run.config;
    std::string lost = run.shape.tuned.adapters && !c.merge ? peft_loses(run.shape) : "";
    if (!c.export_dir.empty() && !lost.empty() && is_first_rank(run))
        note(run, "--export " + c.export_dir + ": " + lost);
}

} // namespace llmc
