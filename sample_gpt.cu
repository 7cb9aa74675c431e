// sample_gpt.cu - write and talk with GPT-2 and Llama: prompts, conversations, adapters by name
//   --prompt     continue a text, or each line of standard input
//   --prompts    continue each line of a file, --slots at a time, to JSON lines
//   --chat       talk: a line is a question
//   --draft      a small model guesses tokens ahead, and the model judges them
//   The weights are a folder's, a file's, a run's newest checkpoint, or a folder's with adapters.
//   Usage: sample_gpt --help
#include "llmc/action.h"
#include "llmc/adapters.h"
#include "llmc/extra/bitsandbytes.h"
#include "llmc/extra/draft.h"
#include "llmc/extra/gptq.h"
#include "llmc/extra/merged_adapters.h"
#include "llmc/extra/mxfp4.h"
#include "llmc/io/config.h"
#include "llmc/io/config_check.h"
#include "llmc/io/files.h"
#include "llmc/io/huggingface.h"
#include "llmc/io/speculate.h"
#include "llmc/ops/types.h"
#include "llmc/parameters.h"
#include "llmc/run/account.h"
#include "llmc/run/choose.h"
#include "llmc/run/folder.h"
#include "llmc/run/health.h"
#include "llmc/run/open.h"
#include "llmc/run/prompts.h"
#include "llmc/run/run.h"
#include "llmc/run/start.h"
#include "llmc/run/talk.h"
#include "llmc/trainer.h"
#include "llmc/tune/choose_adapters.h"
#include "llmc/tune/named_adapters.h"
#include "llmc/tune/prefix_files.h"

using namespace llmc;

// Load the weights, and the adapters beside them or merged into them.
template <typename T, typename S>
void load_weights(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    Spend spend(run.account, Work::LOAD);
    bool folder = c.start.empty() && !has_new_weights(c) && file_type(c.model) == S_IFDIR;
    bool beside = trains_adapters(run.shape);
    if (folder)
        or_die_on_all_ranks(run, hf_load_weights(t, c.model, run.dialects,
                                                 beside ? "" : c.adapter));
    else
        load_model(run, t);
    if (folder) init_weights(t, uint64_t(c.seed), true);

    // Read adapters, one set or several.
    if (beside && !c.adapter.empty())
        or_die_on_all_ranks(run, load_trained_adapters(t, c.adapter, run.prompt_plan));
    or_die_on_all_ranks(run, load_adapter_sets(t, c.adapters));
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
    run.draft = draft.get();
    leave_texts(run, t);
    report_draft(run);
    trainer_free(t);
}

// Run a rank with the element type that --precision names.
template <typename S> void run_rank(Run& run, S where) {
    const std::string& precision = run.config.precision;
    if (precision == "bf16") return run_sampling<bf16>(run, where);
    if (precision == "fp16") return run_sampling<fp16>(run, where);
    run_sampling<float>(run, where);
}

#if defined(__CUDA_ARCH__)
// nvcc's passes for GPUs look for kernels: spare them the ranks on the CPU.
extern template void run_rank(Run&, Cpu);
#endif

// Do what the command line asks for. Returns false if some of it could not be done.
static bool run_command(Run& run) {
    // Choose the model and its adapters.
    Config& c = run.config;
    run.dialects = {MXFP4, GPTQ_AND_AWQ, BITSANDBYTES, MERGED_ADAPTERS};
    or_die(take_run_model(c));
    reserve_output(run);
    choose_model(run);
    take_prefix(run);

    // Check that all flags fit together, on all ranks.
    or_die(whose_flag(c, config_check(c, run.shape, run.world.size)));
    add_run_adapters(c, run.shape, run.dialects);
    agree_on_flags(run);
    open_chat(run);
    choose_draft(run);
    choose_texts(run);
    return run_where_wanted(run, [](Run& rank, auto where) { run_rank(rank, where); });
}

int main(int argc, char** argv) { return start_program("sample_gpt", run_command, argc, argv); }
