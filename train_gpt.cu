// train_gpt.cu - train GPT-2 and Llama, from new weights or on: main reads as the life of a run
//   1. main           join the other processes, read the flags (llmc/run/start.h)
//   2. run_command    do what the flags ask: choose shape, tokenizer and layout, check, open data
//   3. run_training   plan, place, allocate, load; then step, evaluate, sample, save; export
//   Functions stand in the opposite order: each stands before its caller.
//   The step itself is a plan (llmc/plan.h) that one loop runs (llmc/step.h). llmc/run has the rest
//   of a run: choices before the steps, reports, and the folder from which a run resumes.
//   Fine-tuning, talks, questions of planning, other formats and text have programs of their own.
//   Compiles as plain C++ too: make DEVICE=cpu.   Usage: train_gpt --help
#include "llmc/action.h"
#include "llmc/comm/record.h"
#include "llmc/extra/replay.h"
#include "llmc/io/checkpoint_load.h"
#include "llmc/io/config.h"
#include "llmc/io/config_check.h"
#include "llmc/io/files.h"
#include "llmc/io/logger.h"
#include "llmc/load.h"
#include "llmc/ops/types.h"
#include "llmc/optimizer.h"
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

using namespace llmc;

// ----------------------------------------------------------------------------
// a step

// Do one optimizer step: set its learning rate, run the plan, check and log the loss and the norm.
template <typename T, typename S>
void train_step(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    Spend spend(run.account, Work::STEPS);
    t.watch.on = wants_times(run);
    t.hyper.lr = float(lr_at(run.step, c.steps, c.warmup, c.lr, c.min_lr, c.schedule));

    // Run the step and time it. While the device computes, the host reads the next step's batch;
    // plan_result() then waits for the device, once.
    double start = clock_seconds();
    double waited = waited_for_others(run);
    uint64_t samples = uint64_t(c.batch_tokens / c.seq);
    start_plan(t, run.train_plan);
    if (run.step + 1 < c.steps)
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

    // Count the step on all ranks; only the first one logs, and looks for a spike of the loss.
    run.step++;
    run.tokens += c.batch_tokens;
    t.data.cursor += samples;
    if (!is_first_rank(run)) return;
    StepReport report = step_report(run, t, result, measures);
    sum_imbalances(run, report);
    note(run, log_step(run.log, report));
    if (!skipped)
        note(run, run.spikes.look(run.step, loss, result.scale.norm));
}

// ----------------------------------------------------------------------------
// a rank's run

// Train: run one plan a step; evaluate, sample and save when it is time. A signal ends training
// between two steps, on all ranks after the same step.
template <typename T, typename S>
void train(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    CatchSignals catch_signals;
    begin_training(run, t);
    while (run.step < c.steps) {
        train_step(run, t);
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
        if (wishes.save || is_time(run, save_rule(c).steps, false))
            save(run, t);
    }
    end_training(run, t);
}

// Load the weights from the run's checkpoint, or from what --model names, and check each value.
template <typename T, typename S>
void load_weights(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    Spend spend(run.account, Work::LOAD);
    if (!c.resume || !resume(run, t)) {
        load_model(run, t);
        start_average(t);
    }
    if (c.router_bias_rate > 0) run.choice_biases = read_choice_biases(t);
    check_weights(run, t);
}

// One rank's whole run.
template <typename T, typename S>
void run_training(Run& run, S where) {
    const Config& c = run.config;
    Trainer<T, S> t;
    std::vector<PlanOptions> plans = place_rank(run, t, where);
    run.replay = [&](bool equal) {
        if (equal) even_weights(t);
        return replay_step(t, run.train_plan);
    };
    if (!open_rank(run, t, plans)) return;

    // Open the data and the log, and load or draw the weights.
    read_data(run, t);
    load_weights(run, t);
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
        train(run, t);

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
    if (precision == "bf16") return run_training<bf16>(run, where);
    if (precision == "fp16") return run_training<fp16>(run, where);
    run_training<float>(run, where);
}

#if defined(__CUDA_ARCH__)
// nvcc's passes for GPUs look for kernels: spare them the ranks on the CPU.
extern template void run_rank(Run&, Cpu);
#endif

// ----------------------------------------------------------------------------
// the command line

// Do what the command line asks for. Returns false if some of it could not be done.
static bool run_command(Run& run) {
    // Let --model name a run. Choose the model, and the layout if the program is to choose it.
    Config& c = run.config;
    or_die(take_run_model(c));
    choose_model(run);
    if (!plan_ahead(run)) return true;

    // Check that all flags fit together, on all ranks, and that every output can be written.
    or_die(whose_flag(c, config_check(c, run.shape, run.world.size)));
    agree_on_flags(run);
    open_chat(run);
    try_outputs(run);

    // Open everything that is read: tasks, data, prompts.
    open_tasks(run);
    if (!c.explain && wants_validation(c))
        open_data(run, {});
    choose_prompts(run);
    return run_where_wanted(run, [](Run& rank, auto where) { run_rank(rank, where); });
}

int main(int argc, char** argv) { return start_program("train_gpt", run_command, argc, argv); }
