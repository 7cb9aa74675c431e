// config_notes.h - flags that cannot work are refused, and flags that change nothing are noted
//   Runs after config_check(), which fills in defaults. Only flags that the user gave are noted.
//   A refusal is a text; "" refuses nothing.
#pragma once
#include "../comm/text.h"
#include "config.h"
#include "machine.h"

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
    const std::string known = ",none,optimizer,update,activations,weights,gradients,";
    std::istringstream words(c.offload);
    for (std::string word; std::getline(words, word, ',');)
        if (known.find("," + word + ",") == known.npos)
            return concat("--offload ", printable(word),
                          ": give some of optimizer,activations,weights,gradients");
    if (offloads(c, "update") && !offloads(c, "optimizer"))
        return "--offload update: masters and moments lie on the device: give --offload "
               "optimizer,update";
    if (offloads(c, "optimizer") && c.optimizer == "sgd" && c.precision == "fp32")
        return "--offload optimizer: --optimizer sgd in fp32 has neither masters nor moments: "
               "leave it out";
    return "";
}

// Refuse flags that do nothing at all: a draft model on several ranks, a run without any work.
inline std::string refuse_idle_flags(const Config& c) {
    if (!c.draft.empty() && rank_count(c) > 1)
        return concat("--draft ", c.draft, " guesses in one process, and this run has ",
                      rank_count(c), " ranks: leave it out, or generate with one");
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
    bool trains = c.steps > 0 && !c.eval;
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
        {"ep-method",     c.ep > 1,                  "--ep"},
        {"gradients",     shares,                    "data-parallel ranks"},
        {"offload-to",    elsewhere,                 "--offload"},
        {"min-lr",        c.schedule != "constant",  "a schedule that falls"},
        {"top-k",         draws,                     "a --temperature above 0"},
        {"top-p",         draws,                     "a --temperature above 0"},
        {"completions",   !c.prompts.empty(),        "--prompts"},
        {"draft-tokens",  !c.draft.empty(),          "--draft"},
        {"slots",         texts,                     "--prompts or --loss grpo"},
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
