// config_notes.h - flags that cannot work are refused, and flags that change nothing are noted
//   Runs after config_check(), which fills in defaults. Only flags that the user gave are noted.
//   A refusal is a text; "" refuses nothing.
#pragma once
#include "machine.h"
#include "../text.h"
#include "config.h"

namespace llmc {

// Take TRL's defaults for flags that were not given: fine-tuning wants smaller steps than training
// from scratch. Returns a line that names them, or "" if none is taken.
inline std::string take_loss_defaults(Config& c) {
    std::string taken;
    if (c.loss == "lm" || c.loss == "distill")
        return taken;
    // Adapters take ten times the learning rate of full fine-tuning, as TRL's pages on LoRA advise.
    if (!was_given(c, "lr")) {
        bool gentle = objective_of(c).rows();
        c.lr = (gentle ? 1e-6 : 2e-5) * (has_adapters(c) ? 10 : 1);
        taken += concat(" --lr ", gentle ? "1e-0" : "2e-0", (gentle ? 6 : 5) - has_adapters(c));
    }
    if (!was_given(c, "weight-decay")) {
        c.weight_decay = 0;
        taken += " --weight-decay 0";
    }
    return taken.empty() ? "" : "--loss " + c.loss + " takes TRL's defaults:" + taken;
}

// Refuse an offload that is not built, or has nothing to move.
inline std::string refuse_idle_offload(const Config& c) {
    // Name the unknown word, not the whole list.
    std::istringstream words(c.offload);
    for (std::string word; std::getline(words, word, ',');)
        if (c.offload != "none" && word != "optimizer" && word != "activations" &&
            word != "weights" && word != "gradients")
            return concat("--offload ", printable(word),
                          ": give some of optimizer,activations,weights,gradients");
    if (offloads(c, "weights") && c.weights != "float")
        return concat("--offload weights: those of --weights ", c.weights,
                      " stay on the device: leave one of the two out");
    if (offloads(c, "optimizer") && c.optimizer == "sgd" && c.precision == "fp32")
        return "--offload optimizer: --optimizer sgd in fp32 has neither masters nor moments: "
               "leave it out";

    // The host can update only what lies in its memory.
    bool at_host = c.offload_update == "host";
    if (at_host && !offloads(c, "optimizer"))
        return "--offload-update host: masters and moments lie on the device: give --offload "
               "optimizer";
    if (at_host && c.offload_to != "cpu")
        return concat("--offload-update host: the CPU updates in memory, and ",
                      printable(c.offload_to), " is a folder: leave --offload-to out");
    return "";
}

// Refuse CUDA graphs if the host has a part in the middle of a step.
inline std::string refuse_graphs(const Config& c) {
    if (!c.graphs) return "";

    // During a graph the host neither waits for a result nor moves data.
    if (c.ep > 1 && c.ep_method == "exchange")
        return "--graphs: with --ep-method exchange the host reads what routers chose, and a "
               "graph does not wait: give --ep-method gather";
    if (c.offload != "none")
        return concat("--graphs: the host moves what --offload ", c.offload,
                      " names: leave one of the two out");

    // A graph holds the work of GPU streams; nothing outside may act while it runs.
    if (c.device == "cpu")
        return "--graphs is for GPUs, and --device cpu launches nothing: leave one of the two out";
    if (c.local_ranks > 1)
        return concat("--graphs: the threads of --local-ranks ", c.local_ranks,
                      " wait for each other on the host: start processes with mpirun, a GPU each");

    // A profile times single actions, and a graph launches all of them at once.
    if (!c.profile.empty())
        return concat("--graphs: --profile ", c.profile,
                      " times actions one by one: leave one of the two out");
    return "";
}

// Refuse two sources of texts to continue: --prompt, --prompts and --chat exclude each other.
inline std::string refuse_prompts(const Config& c) {
    if (c.prompts.empty() && !c.chat)
        return "";
    std::string flag = c.chat ? "--chat" : "--prompts";
    if (!c.prompt.empty() || (c.chat && !c.prompts.empty()))
        return concat(flag, " and --prompt", c.prompt.empty() ? "s" : "",
                      " both say what the model continues: give one of them");
    if (c.sample_every)
        return concat(flag, " comes at the end of a run, and --sample-every ", c.sample_every,
                      " samples during it: leave one of them out");
    // Refuse flags under which no text is continued.
    if (!c.eval && c.sample_tokens > 0) return "";
    return concat(flag, ": ", c.eval ? "--eval" : "--sample-tokens 0",
                  " continues nothing: leave it out");
}

// Refuse --draft on several ranks: one process draws guesses and judges them.
inline std::string refuse_draft(const Config& c) {
    if (c.draft.empty())
        return "";
    if (rank_count(c) > 1)
        return concat("--draft ", c.draft, " guesses in one process, and this run has ",
                      rank_count(c), " ranks: leave it out, or generate with one");
    if (!c.eval && c.sample_tokens > 0) return "";
    return concat("--draft ", c.draft, ": ", c.eval ? "--eval" : "--sample-tokens 0",
                  " continues nothing: leave it out");
}

// Refuse flags that cannot work, or that do nothing at all.
inline std::string refuse_idle_flags(const Config& c) {
    // Check numbers that no training can use.
    for (auto& [name, beta] : {std::pair("beta1", c.beta1), std::pair("beta2", c.beta2)})
        if (beta >= 1)
            return concat("--", name, " 1 never forgets: the first step divides by 1 - ", name,
                          " = 0; use a number below 1");

    // Refuse flags that need another one.
    if (c.layer >= 0 && !c.explain)
        return concat("--layer ", c.layer, " is printed by --explain: give --explain too");
    if (!c.profile.empty() && (c.explain || c.eval || c.steps == 0))
        return concat("--profile ", c.profile, " times the actions of steps, and ",
                      c.explain ? "--explain" : c.eval ? "--eval" : "--steps 0", " runs none");
    if (std::string wrong = refuse_graphs(c); !wrong.empty())
        return wrong;
    if (std::string wrong = refuse_prompts(c); !wrong.empty())
        return wrong;
    if (std::string wrong = refuse_draft(c); !wrong.empty())
        return wrong;

    // Refuse a run without any work.
    bool idle = c.steps == 0 && !c.eval && c.sample_tokens == 0 && c.export_dir.empty();
    if (idle && !c.explain)
        return "--steps 0 and --sample-tokens 0 leave nothing to do: give --steps, --eval or "
               "--export";
    return refuse_idle_offload(c);
}

// Note the flags that were given and change nothing, one line each.
inline std::vector<std::string> config_notes(const Config& c) {
    // A flag, whether it can work in this run, and the flag or condition it needs.
    struct Pair {
        const char* name;
        bool works;
        const char* wants;
    };
    bool elsewhere = c.offload != "none", away = offloads(c, "weights");
    bool trains = c.steps > 0 && !c.eval, late = c.fp8 == "delayed";
    bool stays = c.fp8 != "none" && c.zero < 3 && !away;
    bool texts = !c.prompts.empty() || has_rollouts(c);
    bool shards = c.zero > 0, draws = c.temperature > 0, samples = c.sample_tokens > 0;
    // Ranks share parameters: data-parallel ones do, and tensor-parallel ones whole experts.
    bool shares = data_ranks(c) > 1 || routing_ranks(c) > c.ep;
    // clang-format off
    const Pair pairs[] = {
        {"offload",       trains || away,            "steps of training"},
        {"ema",           !c.out.empty(),            "--out, where checkpoints hold the mean"},
        {"keep",          !c.out.empty(),            "--out"},
        {"export-dtype",  !c.export_dir.empty(),     "--export"},
        {"zero-group",    shards,                    "--zero"},
        {"hpz",           shards,                    "--zero 3"},
        {"cp-method",     c.cp > 1,                  "--cp"},
        {"cp-order",      c.cp > 1,                  "--cp"},
        {"ep-method",     c.ep > 1,                  "--ep"},
        {"gradients",     shares,                    "data-parallel ranks"},
        {"prefetch",      c.zero == 3 || elsewhere,  "--zero 3 or --offload"},
        {"offload-to",    elsewhere,                 "--offload"},
        {"min-lr",        c.schedule != "constant",  "a schedule that falls"},
        {"top-k",         draws,                     "a --temperature above 0"},
        {"top-p",         draws,                     "a --temperature above 0"},
        {"completions",   !c.prompts.empty(),        "--prompts"},
        {"draft-tokens",  !c.draft.empty(),          "--draft"},
        {"slots",         texts,                     "--prompts or --loss grpo"},
        {"fp8-history",   late,                      "--fp8 delayed"},
        {"fp8-amax",      late,                      "--fp8 delayed"},
        {"fp8-margin",    late,                      "--fp8 delayed"},
        {"fp8-weights",   stays,                     "--fp8 and weights that stay whole"},
        {"prompt",        samples,                   "--sample-tokens"},
        {"sample-every",  samples,                   "--sample-tokens"},
        {"loss",          trains || c.eval,          "steps of training"},
        {"graphs",        trains || c.eval,          "steps of training"},
    };
    // clang-format on
    std::vector<std::string> notes;
    for (const Pair& p : pairs)
        if (was_given(c, p.name) && !p.works)
            notes.push_back(concat("--", p.name, " does nothing without ", p.wants));

    // Note what a signal would lose.
    if (trains && c.out.empty() && !c.explain)
        notes.push_back(concat("no --out: nothing is saved",
                               c.export_dir.empty() ? "" : " before --export at the end",
                               ", and a signal or a crash loses every step"));

    // Note numbers that fit their own ranges but not each other.
    if (c.fp8 == "block" && c.seq % FP8_BLOCK)
        notes.push_back(concat("--fp8 block: blocks of 128 tokens hold several sequences of --seq ",
                               c.seq, ": results depend on --micro-batch a little"));
    if (shards && !shares)
        notes.push_back(
            concat("--zero ", c.zero, " shards nothing: there is one data-parallel rank"));
    if (was_given(c, "warmup") && c.steps > 0 && c.warmup >= c.steps)
        notes.push_back(concat("--warmup ", c.warmup, " is all of --steps ", c.steps,
                               ": the learning rate never reaches --lr"));

    // Rates are those of the precision in which they were measured; bf16 stands for fp16.
    Machine machine;
    bool named = !c.machine.empty() && machine_named(&machine, c.machine).empty();
    std::string measured = named ? machine.precision : "";
    std::string wanted = c.precision == "fp16" ? "bf16" : c.precision;
    if (!measured.empty() && measured != wanted)
        notes.push_back(concat("--machine ", c.machine, " was measured in ", measured,
                               ", and this run computes in ", c.precision,
                               ": measure with --calibrate FILE --precision ", wanted));
    return notes;
}

} // namespace llmc
