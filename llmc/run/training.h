// training.h - what stands around the steps: begin, look at each step, heed wishes, end
#pragma once
#include "../io/logger.h"
#include "../ops/step_scale.h"
#include "../text.h"
#include "../trainer.h"
#include "account.h"
#include "async_save.h"
#include "buddy.h"
#include "folder.h"
#include "health.h"
#include "report.h"
#include "run.h"
#include "stop.h"

namespace llmc {

// End the run if a step diverged, and name the action that made the first value that is not finite.
// All ranks end together, because loss and norm are the same on each.
template <typename T, typename S>
void check_step(Run& run, Trainer<T, S>& t, double loss, const StepScale& scale) {
    if (std::isfinite(loss) && scale.finite)
        return;
    std::string first = trace_bad_value(run, t);
    std::string where = first.empty()
                            ? "done again, the step has no such value: suspect the machine"
                            : "the first value that is not finite: " + first;
    or_die_on_all_ranks(
        run, concat("step ", run.step + 1, ": the loss is ", loss, " and the gradient norm ",
                    scale.norm, "; ", where, ". Lower --lr, lengthen --warmup or set --clip 1",
                    resume_hint(run)));
}

// Begin: measure the peak that MFU is a share of, and open the display. Between the steps all ranks
// agree on a signal, because they must leave at the same place: a rank that stopped alone would
// leave its peers waiting. An evaluation asks after each of its batches.
template <typename T, typename S>
void begin_training(Run& run, Trainer<T, S>& t) {
    measure_peak<T>(run, t.ctx.where);
    open_display(run.log, run.config.log_every, run.world.mpi != nullptr);
    run.saves = {};
    if (run.config.save_async)
        run.saves.async = make_async_save(t);
    t.hooks.stopped = [&run] {
        run.stopped = agree(run.world, {stop_signal, false}).stop;
        return run.stopped != 0;
    };
}

// Share signals and wishes with all ranks. Continue an asynchronous save once no rank writes, or
// replace it if this step has shown that its weights are bad.
template <typename T, typename S>
Wishes heed_wishes(Run& run, Trainer<T, S>& t) {
    Wishes wishes = agree(run.world, {stop_signal, clock_wants_save(run),
                                      is_writing(run.saves.async), doubts_save(run)});
    if (wishes.doubt)
        replace_save(run, t);
    else if (!wishes.writing)
        advance_save(run, t);
    run.stopped = wishes.stop;
    return wishes;
}

// End: save the last step. A copy in memory (--buddy) is not needed once it is on disk. A signal
// during the last step or its save also ends the run here, without samples and exports.
template <typename T, typename S>
void end_training(Run& run, Trainer<T, S>& t) {
    t.hooks.stopped = nullptr;
    save_at_the_end(run, t);
    bool on_disk = run.saves.step == run.step;
    if (run.buddies && on_disk)
        remove_buddies(run.world, *run.buddies);
    if (!run.stopped)
        run.stopped = agree(run.world, {stop_signal, false}).stop;
    if (!is_first_rank(run)) return;

    // Close the log and the profile, and print where a stopped run stands.
    report_profile(run);
    note(run, log_append(run.log, account_json(run.account, run.step, run.log.repeated)));
    report_failure(run, log_close(run.log));
    finish_line(run.log);
    if (run.stopped)
        printf("stopped by %s at step %lld%s\n", signal_name(run.stopped).c_str(),
               (long long)run.step,
               run.saves.step == run.step ? ": --resume goes on" : ", which is not saved");
}

} // namespace llmc
