// draft.h - --draft: a small model beside the run's own, which guesses what texts go on with
//   A draft has its own shape, weights and memory, and a key/value cache as long as the model's. It
//   must have the model's vocabulary. ../io/speculate.h says how guesses are judged.
#pragma once
#include "choose.h"
#include "folder.h"

namespace llmc {

// The configuration of a run whose model is the draft. --draft takes whatever --model takes, and
// also the folder of a run, whose newest checkpoint is then the draft.
inline Config draft_config(const Run& run) {
    Config d;
    d.model = run.config.draft;
    if (!file_type(d.model))
        d.vocab = int(run.shape.V); // a preset's new weights take the model's vocabulary
    if (checkpoint_steps(d.model).empty())
        return d;

    // Take the model's flags from the checkpoint of that run.
    d.out = d.model;
    d.model = Config().model;
    nlohmann::json manifest = newest_manifest(d);
    if (!manifest.is_object() || !manifest.contains("config"))
        return d;
    adopt_flags(d, manifest["config"]);
    d.fp8 = "none"; // it computes in the model's type
    return d;
}

// Check that the draft has the model's vocabulary: "" or what differs. If both have a tokenizer,
// compare the text of each token; else compare the sizes of the tables, which may differ by padding
// rows although the tokens are the same.
inline std::string check_draft_tokens(const Run& run, const Config& d) {
    const Config& c = run.config;
    std::string file = file_type(d.model) == S_IFDIR ? tokenizer_in(d.model) : d.tokenizer;
    bool compares = !file.empty() && vocab_matches(run);
    if (!compares && run.draft_shape.V != run.shape.V)
        return concat("--draft ", c.draft, " has ", run.draft_shape.V, " tokens, and ", c.model,
                      " ", run.shape.V, ": give a draft that has the model's tokenizer");
    if (!compares)
        return "";

    // Each token must stand for the same text, special tokens included.
    Tokenizer own;
    std::string wrong = tokenizer_open(&own, file);
    const Tokenizer& t = run.tokenizer;
    bool same = own.vocab_size == t.vocab_size && own.special == t.special;
    for (int token = 0; same && token < t.vocab_size; token++)
        same = decode(own, token) == decode(t, token);
    if (wrong.empty() && !same)
        wrong = concat("--draft ", c.draft, ": its tokens are those of ", file,
                       ", and the model's are those of ", c.tokenizer,
                       ": give a draft that has the model's tokenizer");
    return wrong;
}

// Choose the draft's shape, and check that its vocabulary is the model's.
inline void choose_draft(Run& run) {
    if (run.config.draft.empty())
        return;
    Config d = draft_config(run);
    LLMC_USER_CHECK(!has_adapters(d),
                    "--draft %s: its checkpoint has adapters alone: --merge and --export it, and "
                    "give the folder", run.config.draft.c_str());
    LLMC_USER_CHECK(d.add_tokens.empty(),
                    "--draft %s: has tokens of --add-tokens: --export it, and give the folder",
                    run.config.draft.c_str());
    run.draft_shape = choose_shape(d, "--draft");
    or_die(check_draft_tokens(run, d));
}

// Place the draft's only plan in memory. It has the slots, prompt length and cache length of
// the model's generation.
template <typename T, typename S>
void place_draft(const Run& run, const std::vector<PlanOptions>& plans, Trainer<T, S>& t) {
    PlanOptions o = plans[size_t(run.generate_plan)];
    size_t P = run.draft_shape.P;
    LLMC_USER_CHECK(o.cache <= P,
                    "--draft %s has %zu positions, and texts with their prompts may take %zu: give "
                    "a smaller --sample-tokens, shorter prompts, or another draft",
                    run.config.draft.c_str(), P, o.cache);
    // A draft begins a step by reading two tokens: its last guess of the step before, which it has
    // not read yet, and the model's token behind it.
    o.scored = 2;
    o.stored = Stored::WIDE;
    o.offload = {};
    trainer_place(t, run.draft_shape, {o});
}

// Bytes that the draft takes of the memory that holds the model; 0 without a draft.
template <typename T, typename S>
size_t draft_bytes(const Run& run, const std::vector<PlanOptions>& plans, S where) {
    if (run.config.draft.empty())
        return 0;
    Trainer<T, S> t;
    t.ctx.where = where;
    place_draft(run, plans, t);
    return bytes_here(t.arena, where);
}

// Load the draft; null without --draft. Its trainer lives as long as the returned pointer.
template <typename T, typename S>
std::shared_ptr<Draft> open_draft(Run& run, const std::vector<PlanOptions>& plans, S where) {
    const Config &c = run.config, d = draft_config(run);
    if (c.draft.empty())
        return nullptr;
    Spend spend(run.account, Work::LOAD);

    // Place and allocate it.
    auto drop = [](Trainer<T, S>* t) {
        trainer_free(*t);
        delete t;
    };
    std::shared_ptr<Trainer<T, S>> t(new Trainer<T, S>, drop);
    t->ctx.where = where;
    place_draft(run, plans, *t);
    trainer_allocate(*t);

    // Clear the cache. Attention multiplies positions that no text has written by 0, which must not
    // be 0 times NaN.
    device_zero(t->arena.device().base, t->arena.device().bytes, where);
    init_constants(*t);

    // Read its weights from a checkpoint or from model files, or draw those of a preset.
    mode_t type = file_type(d.model);
    CheckpointInfo info;
    std::vector<std::string> notes;
    if (!d.out.empty())
        or_die(checkpoint_load(*t, &info, d.out, &notes));
    else if (type)
        or_die(type == S_IFDIR ? hf_load_weights(*t, d.model) : model_file_load(*t, d.model));
    for (const std::string& text : notes)
        note(run, text);
    if (d.out.empty())
        init_weights(*t, uint64_t(c.seed), type != 0);
    bool drawn = d.out.empty() && !type;
    printf("draft: %s%s, %zu parameters, guesses %d tokens ahead\n", printable(c.draft).c_str(),
           drawn ? " with new weights" : "", parameter_count(t->model), c.draft_tokens);
    return make_draft(t, size_t(c.draft_tokens), run.shape.V);
}

// Print how many tokens a step of the model gave, and how many guesses were right.
inline void report_draft(const Run& run) {
    if (!run.draft || !run.draft->steps)
        return;
    const Draft& d = *run.draft;
    printf("draft: %.2f tokens a step of the model, %zu of %zu guesses stayed\n",
           1 + double(d.stayed) / double(d.steps), d.stayed, d.guesses);
}

} // namespace llmc
