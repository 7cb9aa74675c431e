// plan_gpt.cu - ask before you run: what fits, what is fastest, and why; measure this machine
//   plan_gpt FLAGS            the fastest layouts of the run that train_gpt's or tune_gpt's flags
//                             describe, on --machine and --gpus, by simulation
//   plan_gpt --fit CARD       which models train on one card, with which flags, how fast
//   plan_gpt --calibrate FILE measure this machine, and write what --machine FILE reads
//   No weights are read and nothing is trained.   Usage: plan_gpt --help
#include "llmc/extra/bitsandbytes.h"
#include "llmc/extra/gptq.h"
#include "llmc/extra/merged_adapters.h"
#include "llmc/extra/mxfp4.h"
#include "llmc/io/config.h"
#include "llmc/io/config_check.h"
#include "llmc/io/files.h"
#include "llmc/planner/calibrate.h"
#include "llmc/planner/fit.h"
#include "llmc/run/choose.h"
#include "llmc/run/folder.h"
#include "llmc/run/open.h"
#include "llmc/run/plan_run.h"
#include "llmc/run/run.h"
#include "llmc/run/start.h"
#include "llmc/tune/choose_adapters.h"
#include "llmc/tune/teacher.h"

using namespace llmc;

// Answer what the command line asks. Returns false if some of it could not be done.
static bool run_command(Run& run) {
    Config& c = run.config;
    run.dialects = {MXFP4, GPTQ_AND_AWQ, BITSANDBYTES, MERGED_ADAPTERS};
    or_die(take_run_model(c));
    take_teacher(run);

    // Print what fits on a card, or measure this machine: neither needs a model.
    if (was_given(c, "fit")) {
        if (is_first_rank(run))
            printf("%s", fit_text(run_facts(run), c).c_str());
        return true;
    }
    if (wants_calibration(c, run.world))
        return run_where_wanted(run, [](Run& rank, auto where) {
            run_calibration(rank.config, rank.world, where);
        });

    // Choose the model that is asked about, and simulate its layouts.
    c.plan = "auto";
    c.explain = true;
    choose_model(run);
    grow_vocabulary(run);
    take_adapters(run);
    if (!has_new_weights(c)) take_loss_defaults(c);
    plan_ahead(run);
    return true;
}

int main(int argc, char** argv) { return start_program("plan_gpt", run_command, argc, argv); }
