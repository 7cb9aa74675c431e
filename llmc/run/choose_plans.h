// choose_plans.h - which plans a run has: to train, evaluate, score candidates, generate
#pragma once
#include "../action.h"
#include "../adapters.h"
#include "../io/config.h"
#include "../io/likelihood.h"
#include "../io/plan_flags.h"
#include "../model.h"
#include "../ops/types.h"
#include "../plan.h"
#include "../plan_check.h"
#include "../text.h"
#include "choose.h"
#include "run.h"

namespace llmc {

// The options of the plan that generates, one text in each slot. A slot of the cache holds the
// longest prompt and all tokens that follow it.
inline PlanOptions generate_options(const Run& run, PlanOptions generate) {
    const Config& c = run.config;
    generate.mode = Mode::GENERATE;
    size_t texts = run.prompts.size() * size_t(c.samples);
    if (answers_are_shared(c))
        texts = ceil_div(texts, size_t(c.dp));
    generate.B = generation_slots(c, texts);

    // Hold the longest text.
    generate.T = 1;
    for (const Prompt& p : run.prompts)
        generate.T = std::max(generate.T, p.tokens.size());
    if (c.chat) generate.T = run.context_length;
    generate.cache = std::min(run.context_length, generate.T + size_t(c.sample_tokens));
    if (!c.draft.empty())
        generate.scored = size_t(c.draft_tokens) + 1; // logits to judge each guess, and one beyond
    return generate;
}

// Choose the plans of this run: to train, evaluate, score candidates, generate, sample rollouts.
// Returns their options, and stores each plan's index in `run`.
inline std::vector<PlanOptions> choose_plans(Run& run) {
    const Config& c = run.config;
    std::vector<PlanOptions> plans;
    auto add = [&](const PlanOptions& p) {
        plans.push_back(p);
        return int(plans.size()) - 1;
    };

    // Train.
    PlanOptions train = train_options(c);
    bool trains = c.steps > 0 && !c.eval;
    if (trains) run.train_plan = add(train);

    // Evaluate.
    PlanOptions evaluate = evaluation_of(train);
    if (evaluate.objective.distills()) evaluate.objective = {}; // the text's own loss
    bool only_exports = c.steps == 0 && !c.eval && c.sample_tokens == 0;
    if (wants_validation(c) || evaluates_rollouts(c))
        run.evaluate_plan = add(evaluate);
    if (only_exports) add(evaluate); // it never runs: it gives the exported weights their place

    // Score the candidates of --evaluate: one plan for each group of about equal length. From here
    // on plans have the ordinary loss.
    evaluate.objective = {};
    size_t rows = evaluate.B * evaluate.T;
    run.score_groups = group_by_length(run.tasks.candidates, rows, text_positions(run.shape));
    for (ScoreGroup& group : run.score_groups)
        group.plan = add(score_plan(evaluate, group.T, run.layout));

    // Evaluate a prompt that becomes a prefix.
    if (run.prompt_rows) {
        run.prompt_plan = add(prompt_options(c, evaluate));
        if (trains)
            note(run, concat("--adapter ", c.adapter, ": a prompt's rows become keys and values of "
                             "each layer, and these are trained, as a prefix"));
    }

    // Generate texts, and sample answers to train on.
    if (c.sample_tokens > 0 && !c.eval)
        run.generate_plan = add(generate_options(run, evaluate));
    if (has_rollouts(c))
        run.rollout_plan = add(rollout_options(c, train));
    return plans;
}

// Check that the plans of all pipeline ranks fit together: each message that one sends, another one
// receives. This comes before anything runs.
inline void check_plans_of_all_ranks(const Run& run, const std::vector<PlanOptions>& options,
                                     const Model& model) {
    if (run.layout.pp.size == 1) return;
    for (const PlanOptions& o : options) {
        std::vector<Plan> plans = make_plans(run.layout, model, o);
        or_die_on_all_ranks(run, plans_check(plans, model));
    }
}

} // namespace llmc
