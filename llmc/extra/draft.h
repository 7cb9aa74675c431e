// draft.h - --draft: a small model that proposes tokens, for speculative decoding
//   A draft has its own shape, weights and memory, and a key/value cache as long as the model's. It
//   must have the model's vocabulary. ../io/sampler.h says how guesses are judged.
#pragma once
#include "../action.h"
#include "../optimizer.h"
#include "../arena.h"
#include "../io/config.h"
#include "../io/files.h"
#include "../io/generate.h"
#include "../io/sampler.h"
#include "../layers.h"
#include "../model.h"
#include "../ops/memory.h"
#include "../run/run.h"
#include "../step.h"
#include "../comm/text.h"
#include "../trainer.h"
#include "../tune/companion.h"

namespace llmc {

// Choose the draft's shape, and check that its vocabulary is the model's.
inline void choose_draft(Run& run) {
    const std::string& name = run.config.draft;
    if (name.empty()) return;
    run.companions.draft = choose_companion(run, "--draft", name);
    or_die(check_same_tokens(run, run.companions.draft, "--draft", name));
}

// Place the draft's only plan in memory. It has the slots, prompt length and cache length of
// the model's generation.
template <typename T, typename S>
void place_draft(const Run& run, const std::vector<PlanOptions>& plans, Trainer<T, S>& t) {
    PlanOptions o = plans[size_t(run.plans.generate)];
    size_t P = run.companions.draft.P;
    LLMC_USER_CHECK(o.cache <= P,
                    "--draft %s has %zu positions, and texts with their prompts may take %zu: give "
                    "a smaller --sample-tokens, shorter prompts, or another draft",
                    run.config.draft.c_str(), P, o.cache);
    // A draft begins a step by reading two tokens: its last guess of the step before, which it has
    // not read yet, and the model's token after it.
    o.scored = 2;
    o.stored = Stored::WIDE;
    o.offload = {};
    trainer_place(t, run.companions.draft, {o});
}

// Keep a draft in memory next to the run's plans.
template <typename T, typename S> void keep_draft(Run& run, S where) {
    auto bytes = [where](const Run& r, const std::vector<PlanOptions>& plans, int) {
        Trainer<T, S> t;
        t.ctx.where = where;
        place_draft(r, plans, t);
        return bytes_here(t.arena, where);
    };
    run.companions.all.push_back(
        {"draft", "its weights, and a cache beside the model's", Tier::DEVICE, bytes});
}

// Load the draft; null without --draft. Its trainer lives as long as the returned pointer.
template <typename T, typename S>
std::shared_ptr<Draft> open_draft(Run& run, const std::vector<PlanOptions>& plans, S where) {
    const Config& c = run.config;
    if (c.draft.empty())
        return nullptr;

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

    bool drawn = load_companion(run, *t, c.draft);
    printf("draft: %s%s, %zu parameters, guesses %d tokens ahead\n", printable(c.draft).c_str(),
           drawn ? " with new weights" : "", parameter_count(t->model), c.draft_tokens);
    return make_draft(t, size_t(c.draft_tokens), run.shape.V);
}

// Print how many tokens a step of the model gave, and how many guesses were right.
inline void report_draft(const Run& run) {
    if (!run.companions.guesses || !run.companions.guesses->steps)
        return;
    const Draft& d = *run.companions.guesses;
    printf("draft: %.2f tokens a step of the model, %zu of %zu guesses stayed\n",
           1 + double(d.stayed) / double(d.steps), d.stayed, d.guesses);
}

} // namespace llmc
