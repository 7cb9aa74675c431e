// sample_gpt.cu - write and talk with GPT-2 and Llama: prompts, conversations, adapters by name
//   --prompt     continue a text, or each line of standard input
//   --prompts    continue each line of a file, --slots at a time, to JSON lines
//   --chat       talk: a line is a question
//   --draft      a small model guesses tokens ahead, and the model judges them
//   The weights are a folder's, a file's, a run's newest checkpoint, or a folder's with adapters.
//   Usage: sample_gpt --help
#include "llmc/action.h"
#include "llmc/extra/bitsandbytes.h"
#include "llmc/extra/draft.h"
#include "llmc/extra/gptq.h"
#include "llmc/extra/merged_adapters.h"
#include "llmc/extra/mxfp4.h"
#include "llmc/io/config.h"
#include "llmc/io/files.h"
#include "llmc/io/sampler.h"
#include "llmc/ops/types.h"
#include "llmc/run/account.h"
#include "llmc/run/folder.h"
#include "llmc/run/health.h"
#include "llmc/run/open.h"
#include "llmc/run/run.h"
#include "llmc/run/sample.h"
#include "llmc/run/start.h"
#include "llmc/trainer.h"
#include "llmc/tune/adapter_files.h"
#include "llmc/tune/choose_adapters.h"

using namespace llmc;

// Load the weights, and the adapters beside them or merged into them.
template <typename T, typename S>
void load_weights(Run& run, Trainer<T, S>& t) {
    Spend spend(run.clock.account, Work::LOAD);
    load_base(run, t);
    or_die_on_all_ranks(run, load_adapter_sets(t, run.config.adapters));
    check_weights(run, t);
}

// Plan, load and write: one rank's whole life.
template <typename T, typename S>
void run_sampling(Run& run, S where) {
    Trainer<T, S> t;
    if (!run.config.draft.empty()) keep_draft<T>(run, where);
    std::vector<PlanOptions> plans = place_rank(run, t, where);
    if (!open_rank(run, t, plans)) return;
    load_weights(run, t);
    std::shared_ptr<Draft> draft = open_draft<T>(run, plans, where);
    run.companions.guesses = draft.get();
    leave_texts(run, t);
    report_draft(run);
    trainer_free(t);
}

// Run a rank with the element type that --precision names.
template <typename S> void run_rank(Run& run, S where) {
    with_precision(run.config, [&](auto type) {
        run_sampling<typename decltype(type)::type>(run, where);
    });
}

#if defined(__CUDA_ARCH__)
// nvcc's passes for GPUs look for kernels: spare them the ranks on the CPU.
extern template void run_rank(Run&, Cpu);
#endif

// Do what the command line asks for. Returns false if some of it could not be done.
static bool run_command(Run& run) {
    // Choose the model and its adapters.
    run.dialects = {MXFP4, GPTQ_AND_AWQ, BITSANDBYTES, MERGED_ADAPTERS};
    or_die(take_run_model(run.config));
    reserve_output(run);
    choose_model(run);
    take_adapters(run);

    // Check that all flags fit together, on all ranks.
    check_run(run);
    choose_draft(run);
    choose_texts(run);
    return run_where_wanted(run, [](Run& rank, auto where) { run_rank(rank, where); });
}

int main(int argc, char** argv) { return start_program("sample_gpt", run_command, argc, argv); }
