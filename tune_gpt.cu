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
#include "llmc/comm/record.h"
#include "llmc/extra/bitsandbytes.h"
#include "llmc/extra/ds_config.h"
#include "llmc/extra/gptq.h"
#include "llmc/extra/kto.h"
#include "llmc/extra/merged_adapters.h"
#include "llmc/extra/mxfp4.h"
#include "llmc/extra/replay.h"
#include "llmc/extra/upcycle.h"
#include "llmc/io/checkpoint.h"
#include "llmc/io/checkpoint_load.h"
#include "llmc/io/config.h"
#include "llmc/io/config_check.h"
#include "llmc/io/config_notes.h"
#include "llmc/io/files.h"
#include "llmc/io/huggingface.h"
#include "llmc/io/logger.h"
#include "llmc/io/new_tokens.h"
#include "llmc/load.h"
#include "llmc/model.h"
#include "llmc/ops/types.h"
#include "llmc/optimizer.h"
#include "llmc/parameters.h"
#include "llmc/run/account.h"
#include "llmc/run/choose.h"
#include "llmc/run/folder.h"
#include "llmc/run/health.h"
#include "llmc/run/open.h"
#include "llmc/run/overflow.h"
#include "llmc/run/report.h"
#include "llmc/run/run.h"
#include "llmc/run/sample.h"
#include "llmc/run/start.h"
#include "llmc/run/step_report.h"
#include "llmc/run/stop.h"
#include "llmc/run/training.h"
#include "llmc/step.h"
#include "llmc/trainer.h"
#include "llmc/tune/base_identity.h"
#include "llmc/tune/choose_adapters.h"
#include "llmc/tune/conversations.h"
#include "llmc/tune/on_policy.h"
#include "llmc/tune/prefix_files.h"
#include "llmc/tune/references.h"
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
    run.rollout_seconds += clock_seconds() - begin;
    if (wrong.empty()) return;
    if (run.step > run.first_step) save(run, t);
    end_save(run, t);
    or_die_on_all_ranks(run, wrong + resume_hint(run));
}

// Do one optimizer step: sample or evaluate what it compares with, run the plan, check and log.
template <typename T, typename S>
void tune_step(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    if (has_rollouts(c)) sample_step(run, t);
    Spend spend(run.account, Work::STEPS);
    t.watch.on = wants_times(run);
    t.hyper.lr = float(lr_at(run.step, c.steps, c.warmup, c.lr, c.min_lr, c.schedule));

    // Run the step and time it. A sampled batch cannot be read ahead: the new weights sample it.
    double start = clock_seconds();
    double waited = waited_for_others(run);
    uint64_t samples = uint64_t(c.batch_tokens / c.seq);
    if (t.hooks.before) t.hooks.before();
    start_plan(t, run.train_plan);
    if (run.step + 1 < c.steps && !has_rollouts(c))
        prepare_batch(t, run.train_plan, t.data.cursor + samples);
    PlanResult result = plan_result(t);
    run.account.recount(Work::STEPS, Work::WAIT, waited_for_others(run) - waited);
    StepMeasures measures = measure_step(t);
    measures.seconds = clock_seconds() - start;
    take_times(run, t, measures.seconds);

    // Check the result. An fp16 step that overflowed is skipped and does not count as divergence.
    double loss = result.loss.mean();
    bool skipped = is_skipped(run, result.scale);
    if (!skipped) {
        check_step(run, t, loss, result.scale);
        if (c.router_bias_rate > 0)
            move_choice_biases(t, run.choice_biases, measures.loads, float(c.router_bias_rate));
        if (run.first_loss == 0) run.first_loss = loss;
    }
    run.step_loss = skipped ? NAN : loss;

    // Count the step on all ranks; only the first one logs. GRPO's loss is weighted by advantages,
    // so it has no usual level.
    run.step++;
    run.tokens += c.batch_tokens;
    t.data.cursor += samples;
    if (!is_first_rank(run)) return;
    StepReport report = step_report(run, t, result, measures);
    report_rollouts(report, run, result.loss);
    sum_imbalances(run, report);
    note(run, log_step(run.log, report));
    if (!skipped && !has_rollouts(c))
        note(run, run.spikes.look(run.step, loss, result.scale.norm));
}

// ----------------------------------------------------------------------------
// a rank's run

// Train: run one plan a step; evaluate, sample and save when it is time. A signal ends training
// between two steps, on all ranks after the same step.
template <typename T, typename S>
void tune(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    CatchSignals catch_signals;
    begin_training(run, t);
    while (run.step < c.steps) {
        tune_step(run, t);
        Wishes wishes = heed_wishes(run, t);
        if (run.stopped) break;
        if (is_time(run, c.verify_every, false))
            check_ranks(run, t);

        // Evaluate. This may take minutes, so a signal ends an evaluation too.
        if (is_time(run, c.eval_every, true))
            report_evaluation(run, t);
        if (run.stopped) break;

        // Keep the best checkpoint, sample, and save.
        if (run.best_step == run.step)
            keep_best_checkpoint(run, t);
        if (is_time(run, c.sample_every, false))
            print_samples(run, t);
        if (run.buddies && is_time(run, c.buddy_every, false))
            save_in_memory(run, t);
        if (wishes.save || is_time(run, c.save_every, false))
            save(run, t);
    }
    end_training(run, t);
}

// Read the base: a folder's weights with added tokens, upcycled, with adapters merged, or plain.
template <typename T, typename S>
void load_base(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    bool folder = c.start.empty() && !has_new_weights(c) && file_type(c.model) == S_IFDIR;
    bool trained = trains_adapters(run.shape);
    if (!folder)
        load_model(run, t);
    else if (c.upcycle)
        or_die_on_all_ranks(run, upcycle_weights(t, c.model, uint64_t(c.seed), run.dialects));
    else if (!c.add_tokens.empty())
        or_die_on_all_ranks(run, load_and_grow(t, c.model, uint64_t(c.seed), run.dialects));
    else
        or_die_on_all_ranks(run, hf_load_weights(t, c.model, run.dialects,
                                                 trained ? "" : c.adapter));
    if (folder) init_weights(t, uint64_t(c.seed), true);

    // Read adapters to go on from.
    if (trained && !c.adapter.empty())
        or_die_on_all_ranks(run, load_trained_adapters(t, c.adapter, run.prompt_plan));
    start_average(t);
}

// Load the weights. Two kinds of run load their checkpoint after the model's files: a checkpoint of
// adapters does not hold the base, and a reference is computed with the weights from which the
// first run started.
template <typename T, typename S>
void load_weights(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    Spend spend(run.account, Work::LOAD);
    bool adapters = trains_adapters(run.shape);
    bool behind = adapters || has_reference(c);
    bool resumed = c.resume && !behind && resume(run, t);
    if (!resumed) load_base(run, t);

    // Finish what needs the starting weights, then load the checkpoint over them.
    if (adapters && !c.out.empty())
        or_die_on_all_ranks(run, base_identity(run.world, has_new_weights(c) ? "" : base_name(c),
                                               c.seed, &run.base));
    if (has_reference(c)) compute_references(run, t);
    if (c.loss == "kto") start_kto(run, t);
    if (behind && c.resume) resume(run, t);
    if (c.router_bias_rate > 0) run.choice_biases = read_choice_biases(t);
    check_weights(run, t);
}

// Give the run what fine-tuning adds to it: companions in memory, a replay of a step, and an export
// of adapters alone.
template <typename T, typename S>
void set_tuning(Run& run, Trainer<T, S>& t, S where) {
    // A copy of the starting weights, and a replay that finds a rank that computes wrong.
    const Config& c = run.config;
    if (keeps_start(c)) keep_start<T>(run, where);
    run.replay = [&](bool equal) {
        if (equal) even_weights(t);
        return replay_step(t, run.train_plan);
    };

    // An export of adapters alone.
    if (exports_adapters(run))
        run.export_file = [&](MergeSums*) {
            return export_trained_adapters(t, c.export_dir, export_type(c), base_name(c),
                                           run.exported);
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
    open_log(run, t);
    run.first_step = run.step;
    run.started = clock_seconds();
    run.account.turn_to(Work::REST);

    // Evaluate and end, or train.
    if (c.eval) {
        report_evaluation(run, t);
        return trainer_free(t);
    }
    if (run.step < c.steps)
        tune(run, t);

    // After a signal end at once: its sender does not want to wait for samples and exports.
    if (run.stopped) return trainer_free(t);

    // Write the samples and the export that the flags ask for.
    print_samples(run, t);
    bool exported = write_export(run, t);
    report_end(run, t, exported);
    trainer_free(t);
}

// Run a rank with the element type that --precision names.
template <typename S> void run_rank(Run& run, S where) {
    const std::string& precision = run.config.precision;
    if (precision == "bf16") return run_tuning<bf16>(run, where);
    if (precision == "fp16") return run_tuning<fp16>(run, where);
    run_tuning<float>(run, where);
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
    // Choose the model, its adapters and its teacher. Another trainer's file completes the flags.
    Config& c = run.config;
    run.dialects = {MXFP4, GPTQ_AND_AWQ, BITSANDBYTES, MERGED_ADAPTERS};
    or_die(take_run_model(c));
    take_ds_config(run);
    choose_model(run);
    grow_vocabulary(run);
    take_prefix(run);
    run.complete_shape = [&run](const Config& asked, Shape& s) {
        add_run_adapters(asked, s, run.dialects);
    };
    take_teacher(run);

    // Take the usual defaults of the loss (TRL's). A resumed run has them from its checkpoint.
    bool goes_on = c.resume && !checkpoint_steps(c.out).empty();
    std::string taken = goes_on || has_new_weights(c) ? "" : take_loss_defaults(c);
    if (is_first_rank(run) && !taken.empty())
        printf("%s\n", taken.c_str());

    // Choose the layout if the program is to choose it; then check that all flags fit together.
    if (!plan_ahead(run)) return true;
    or_die(whose_flag(c, config_check(c, run.shape, run.world.size)));
    add_run_adapters(c, run.shape, run.dialects);
    agree_on_flags(run);
    open_chat(run);
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
