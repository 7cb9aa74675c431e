// convert_gpt.cu - from model files to model files
//   convert_gpt IN... OUT     IN: a Hugging Face folder, a .bin of llm.c or llama2.c, a run or one
//                             of its checkpoints; several: their mean
//                             OUT: a Hugging Face folder, FILE.bin (llm.c's GPT-2), FILE.gguf
//   --adapter DIR --merge     with what the adapters change
//   --add-tokens, --upcycle   with new special tokens; with copies of each ffn as experts
//   Weights pass through a trainer's arena in float, so they are those that a run would read.
//   Usage: convert_gpt --help
#include "llmc/action.h"
#include "llmc/extra/average.h"
#include "llmc/extra/bitsandbytes.h"
#include "llmc/extra/gguf.h"
#include "llmc/extra/gptq.h"
#include "llmc/extra/merged_adapters.h"
#include "llmc/extra/mxfp4.h"
#include "llmc/extra/upcycle.h"
#include "llmc/io/config.h"
#include "llmc/io/files.h"
#include "llmc/io/huggingface.h"
#include "llmc/run/choose.h"
#include "llmc/run/folder.h"
#include "llmc/run/health.h"
#include "llmc/run/open.h"
#include "llmc/run/report.h"
#include "llmc/run/run.h"
#include "llmc/run/start.h"
#include "llmc/trainer.h"
#include "llmc/tune/choose_adapters.h"

using namespace llmc;

// Read the weights: a mean, an upcycled or a grown folder, one with adapters, or a model's own.
template <typename T, typename S>
void load_weights(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    if (!c.average.empty()) return average_weights(run, t);

    load_base(run, t, [&] {
        return upcycle_weights(t, c.model, uint64_t(c.seed), run.dialects);
    });
}

// Place, load and export: one rank's whole life.
template <typename T, typename S>
void convert(Run& run, S where) {
    const Config& c = run.config;
    Trainer<T, S> t;
    if (!c.average.empty()) keep_sums<T>(run, where);
    if (is_gguf(c.export_dir))
        run.exports.file = [&](MergeSums* merged) { return export_gguf(run, t, merged); };
    std::vector<PlanOptions> plans = place_rank(run, t, where);
    open_rank(run, t, plans);
    load_weights(run, t);
    check_weights(run, t);
    report_end(run, t, write_export(run, t));
    trainer_free(t);
}

// The last word is what is written, and those before it are what is read.
static std::string take_paths(Config& c) {
    if (c.paths.size() < 2)
        return "what is converted to what? convert_gpt IN OUT, or several IN for their mean";
    c.export_dir = c.paths.back();
    c.paths.pop_back();
    c.model = c.paths[0];
    if (c.paths.size() > 1)
        for (const std::string& path : c.paths)
            c.average += (c.average.empty() ? "" : ",") + path;
    for (const std::string& path : c.paths)
        if (!file_type(path))
            return path + ": is neither a folder nor a file";
    return "";
}

// Do what the command line asks for. Returns false if some of it could not be done.
static bool run_command(Run& run) {
    // Choose what is read.
    Config& c = run.config;
    run.dialects = {MXFP4, GPTQ_AND_AWQ, BITSANDBYTES, MERGED_ADAPTERS};
    or_die(take_paths(c));
    if (c.average.empty()) or_die(take_run_model(c));
    choose_average(run);
    c.steps = c.sample_tokens = 0; // whatever the run did
    choose_model(run);
    grow_vocabulary(run);
    take_adapters(run);

    // Check that it can be written.
    check_run(run);
    LLMC_USER_CHECK(!exports_adapters(run),
                    "--adapter %s: give --merge, to write the model with what it changes",
                    c.adapter.c_str());
    if (is_gguf(c.export_dir)) {
        run.exports.file = [](MergeSums*) { return ""; };
        prepare_gguf(run);
    }
    try_outputs(run);
    return run_where_wanted(run, [](Run& rank, auto where) { convert<float>(rank, where); });
}

int main(int argc, char** argv) { return start_program("convert_gpt", run_command, argc, argv); }
