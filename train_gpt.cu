// train_gpt.cu - train GPT-2 and Llama, from new weights or on: main reads as the life of a run
//   1. main           join the other processes, read the flags (llmc/run/start.h)
//   2. run_command    do what the flags ask: choose shape, tokenizer and layout, check, open data
//   3. run_training   plan, place, allocate, load; train_steps() of llmc/run/training.h; export
//   Functions stand in the opposite order: each stands before its caller.
//   The step itself is a plan (llmc/plan.h) that one loop runs (llmc/step.h). llmc/run has the rest
//   of a run: choices before the steps, reports, and the folder from which a run resumes.
//   Fine-tuning, talks, questions of planning, other formats and text have programs of their own.
//   Compiles as plain C++ too: make DEVICE=cpu.   Usage: train_gpt --help
#include "llmc/action.h"
#include "llmc/extra/silent_corruption.h"
#include "llmc/io/checkpoint_load.h"
#include "llmc/io/config.h"
#include "llmc/io/files.h"
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

using namespace llmc;

// ----------------------------------------------------------------------------
// a rank's run

// Load the weights from the run's checkpoint, or from what --model names, and check each value.
template <typename T, typename S>
void load_weights(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    Spend spend(run.clock.account, Work::LOAD);
    if (!c.resume || !resume(run, t)) {
        load_model(run, t);
        start_average(t);
    }
    if (c.router_bias_rate > 0) run.balance.biases = read_choice_biases(t);
    check_weights(run, t);
}

// One rank's whole run.
template <typename T, typename S>
void run_training(Run& run, S where) {
    const Config& c = run.config;
    Trainer<T, S> t;
    std::vector<PlanOptions> plans = place_rank(run, t, where);
    run.health.replay = [&](bool equal) {
        if (equal) even_weights(t);
        return replay_step(t, run.plans.train);
    };
    if (!open_rank(run, t, plans)) return;

    // Open the data and the log, and load or draw the weights.
    read_data(run, t);
    load_weights(run, t);
    start_counting(run, t);

    // Evaluate alone, or train and leave samples and an export.
    if (c.eval)
        report_evaluation(run, t);
    else if (run.step < c.steps)
        train_steps(run, t, [] {});
    if (!c.eval) leave_results(run, t);
    trainer_free(t);
}

// Run a rank with the element type that --precision names.
template <typename S> void run_rank(Run& run, S where) {
    with_precision(run.config, [&](auto type) {
        run_training<typename decltype(type)::type>(run, where);
    });
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
    check_run(run);
    try_outputs(run);

    // Open everything that is read: tasks, data, prompts.
    open_tasks(run);
    if (!c.explain && wants_validation(c))
        open_data(run, {});
    choose_prompts(run);
    return run_where_wanted(run, [](Run& rank, auto where) { run_rank(rank, where); });
}

int main(int argc, char** argv) { return start_program("train_gpt", run_command, argc, argv); }
