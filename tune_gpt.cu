// tune_gpt.cu - fine-tune GPT-2 and Llama: adapters, conversations, preferences, distillation
//   A run is train_gpt's, with what these ask for around its steps:
//     --lora, --prefix   the base is frozen, and adapters beside its matrices are trained
//     --loss sft         answers of conversations; dpo, ipo, simpo, orpo, kto: preferences
//     --loss grpo        each step first samples answers, and a reward judges them
//     --loss distill     a teacher evaluates each step's batch first
//   It takes all flags of train_gpt. Functions stand before their callers: main is at the end.
//   Usage: tune_gpt --help
#include "llmc/action.h"
#include "llmc/adapters.h"
#include "llmc/comm/rank_status.h"
#include "llmc/extra/bitsandbytes.h"
#include "llmc/extra/gptq.h"
#include "llmc/extra/kto.h"
#include "llmc/extra/merged_adapters.h"
#include "llmc/extra/mxfp4.h"
#include "llmc/extra/silent_corruption.h"
#include "llmc/extra/upcycle.h"
#include "llmc/io/checkpoint.h"
#include "llmc/io/checkpoint_load.h"
#include "llmc/io/config.h"
#include "llmc/io/config_check.h"
#include "llmc/io/files.h"
#include "llmc/io/huggingface.h"
#include "llmc/load.h"
#include "llmc/ops/types.h"
#include "llmc/run/account.h"
#include "llmc/run/choose.h"
#include "llmc/run/folder.h"
#include "llmc/run/health.h"
#include "llmc/run/open.h"
#include "llmc/run/plan_run.h"
#include "llmc/run/report.h"
#include "llmc/run/run.h"
#include "llmc/run/sample.h"
#include "llmc/run/start.h"
#include "llmc/run/training.h"
#include "llmc/trainer.h"
#include "llmc/tune/base_identity.h"
#include "llmc/tune/choose_adapters.h"
#include "llmc/tune/conversations.h"
#include "llmc/tune/on_policy.h"
#include "llmc/tune/prefix_files.h"
#include "llmc/tune/reference_policy.h"
#include "llmc/tune/teacher.h"

using namespace llmc;

// ----------------------------------------------------------------------------
// a step

// Sample the answers that the next step trains on. A reward program that fails ends the run: save
// first what the steps before have trained.
template <typename T, typename S>
void sample_step(Run& run, Trainer<T, S>& t) {
    double begin = clock_seconds();
    std::string wrong = sample_rollouts(run, t);
    run.rollouts.seconds += clock_seconds() - begin;
    if (wrong.empty()) return;
    if (run.step > run.progress.first_step) save(run, t);
    end_save(run, t);
    or_die_on_all_ranks(run, wrong + resume_hint(run));
}

// ----------------------------------------------------------------------------
// a rank's run

// Load the weights. Two kinds of run load their checkpoint after the model's files: a checkpoint of
// adapters does not hold the base, and a reference is computed with the weights from which the
// first run started.
template <typename T, typename S>
void load_weights(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    Spend spend(run.clock.account, Work::LOAD);
    bool adapters = trains_adapters(run.shape);
    bool behind = adapters || has_reference(c);
    bool resumed = c.resume && !behind && resume(run, t);
    if (!resumed) {
        load_base(run, t, [&] {
            return upcycle_weights(t, c.model, uint64_t(c.seed), run.dialects);
        });
        start_average(t);
    }

    // Finish what needs the starting weights, then load the checkpoint over them.
    if (adapters && !c.out.empty())
        or_die_on_all_ranks(run, base_identity(run.world, has_new_weights(c) ? "" : base_name(c),
                                               c.seed, &run.saves.base));
    if (has_reference(c)) compute_references(run, t);
    if (c.loss == "kto") start_kto(run, t);
    if (behind && c.resume) resume(run, t);
    if (c.router_bias_rate > 0) run.balance.biases = read_choice_biases(t);
    check_weights(run, t);
}

// Give the run what fine-tuning adds to it: companions in memory, a replay of a step, and an export
// of adapters alone.
template <typename T, typename S>
void set_tuning(Run& run, Trainer<T, S>& t, S where) {
    // A copy of the starting weights, and a replay that finds a rank that computes wrong.
    const Config& c = run.config;
    if (keeps_start(c)) keep_start<T>(run, where);
    run.health.replay = [&](bool equal) {
        if (equal) even_weights(t);
        return replay_step(t, run.plans.train);
    };

    // An export of adapters alone.
    if (exports_adapters(run))
        run.exports.file = [&](MergeSums*) {
            return export_trained_adapters(t, c.export_dir, export_type(c), base_name(c),
                                           run.exports.tokenizer);
        };
}

// One rank's whole run.
template <typename T, typename S>
void run_tuning(Run& run, S where) {
    const Config& c = run.config;
    Trainer<T, S> t;
    set_tuning(run, t, where);
    std::vector<PlanOptions> plans = place_rank(run, t, where);
    if (!open_rank(run, t, plans)) return;

    // Open the data and the log, and load or draw the weights, a teacher's too.
    has_rollouts(c) ? set_rollouts(run, t) : read_data(run, t);
    load_weights(run, t);
    open_teacher(run, t, plans);
    start_counting(run, t);

    // Evaluate alone, or train and leave samples and an export.
    if (c.eval)
        report_evaluation(run, t);
    else if (run.step < c.steps)
        train_steps(run, t, [&] {
            if (has_rollouts(c)) sample_step(run, t);
        });
    if (!c.eval) leave_results(run, t);
    trainer_free(t);
}

// Run a rank with the element type that --precision names.
template <typename S> void run_rank(Run& run, S where) {
    with_precision(run.config, [&](auto type) {
        run_tuning<typename decltype(type)::type>(run, where);
    });
}

#if defined(__CUDA_ARCH__)
// nvcc's passes for GPUs look for kernels: spare them the ranks on the CPU.
extern template void run_rank(Run&, Cpu);
#endif

// ----------------------------------------------------------------------------
// the command line

// The kinds of JSON lines that --data may hold, each read by its losses.
static std::vector<DataKind> data_kinds() {
    return {conversations(), answer_pairs(), labelled_answers()};
}

// Do what the command line asks for. Returns false if some of it could not be done.
static bool run_command(Run& run) {
    // Choose the model, its adapters and its teacher.
    Config& c = run.config;
    run.dialects = {MXFP4, GPTQ_AND_AWQ, BITSANDBYTES, MERGED_ADAPTERS};
    or_die(take_run_model(c));
    choose_model(run);
    grow_vocabulary(run);
    take_adapters(run);
    take_teacher(run);

    // Take the usual defaults of the loss (TRL's). A resumed run has them from its checkpoint.
    bool goes_on = c.resume && !checkpoint_steps(c.out).empty();
    std::string taken = goes_on || has_new_weights(c) ? "" : take_loss_defaults(c);
    if (!taken.empty()) say(run, taken, "\n");

    // Choose the layout if the program is to choose it; then check that all flags fit together.
    if (!plan_ahead(run)) return true;
    check_run(run);
    try_outputs(run);
    note_peft(run);

    // Open everything that is read: tasks, data, prompts.
    open_tasks(run);
    if (!c.explain && wants_validation(c))
        open_data(run, line_source(run.chat, c.loss, data_kinds()));
    if (!c.explain && has_rollouts(c))
        open_exercises(run);
    choose_teacher(run);
    choose_prompts(run);
    return run_where_wanted(run, [](Run& rank, auto where) { run_rank(rank, where); });
}

int main(int argc, char** argv) { return start_program("tune_gpt", run_command, argc, argv); }
