// training.h - a step of training with its checks and its report, and what stands around the steps
//   begin_training   measure the peak that MFU is a share of, open the display
//   train_step       set the learning rate, run the plan, check the result, count it, log it
//   heed_wishes      between two steps: signals and saves, on all ranks alike
//   end_training     save the last step, close the log
//   train_steps      all of these: the loop over a run's steps
#pragma once
#include "../comm/rank_status.h"
#include "../io/config.h"
#include "../io/logger.h"
#include "../io/mfu.h"
#include "../io/plan_flags.h"
#include "../load.h"
#include "../ops/loss_scale.cuh"
#include "../ops/step_scale.h"
#include "../step.h"
#include "../comm/text.h"
#include "../trainer.h"
#include "account.h"
#include "async_save.h"
#include "folder.h"
#include "health.h"
#include "memory_checkpoint.h"
#include "report.h"
#include "run.h"
#include "sample.h"
#include "stop.h"

namespace llmc {

// ----------------------------------------------------------------------------
// checks of a step

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

// The number of skipped steps in a row that ends a run: by then the forward pass itself overflows,
// and no scale of the loss helps.
constexpr int MOST_SKIPPED = 64;

// Whether a step was skipped because it overflowed fp16; the user gets a note. No weight changes,
// Adam does not count the step, and the next one has a smaller scale (loss_scale.cuh); data and
// learning rate go on. Too many skipped steps in a row end the run. All ranks have the same scale,
// so all of them decide the same.
inline bool is_skipped(Run& run, const LossScaling& scaling, const StepScale& scale) {
    if (!scaling.on || scale.finite)
        return false;
    if (scale.loss.skipped >= MOST_SKIPPED)
        or_die_on_all_ranks(
            run, concat("step ", run.step + 1, ": ", MOST_SKIPPED,
                        " steps in a row overflow fp16, the last at a loss scale of ",
                        scale.loss.now, scaling.dynamic ? "" : ", which is fixed",
                        ": take --precision bf16, or a smaller --lr or --loss-scale"));
    note(run, concat("step ", run.step + 1, ": gradients overflow fp16: the step is skipped, the ",
                     "next has a loss scale of ", scale.loss.now));
    return true;
}

// ----------------------------------------------------------------------------
// the report of a step

// Fill in the numbers of pairs: how far the better answers lead, and how often they do.
inline void report_pairs(StepReport& r, const Run& run, const Loss& loss) {
    if (!has_pairs(run.config)) return;
    double pairs = double(std::max<int64_t>(loss.valid, 1));
    r.more.push_back({"margin", loss.margin / pairs, "%.4f"});
    r.more.push_back({"accuracy", loss.correct / pairs, "%.3f"});
    if (run.config.loss == "kto")
        r.more.push_back({"kl", run.reference.point});
}

// Fill in the report of the step that run.step has just counted, which took `seconds`; evaluation
// and saving are no part of its speed. loads (L,E): slots of each expert. dropped: their share that
// a capacity dropped.
template <typename T, typename S>
StepReport step_report(const Run& run, const Trainer<T, S>& t, const PlanResult& result,
                       double seconds, const std::vector<int64_t>& loads, double dropped) {
    const Config& c = run.config;
    StepReport r;
    r.step = run.step;
    r.steps = c.steps;
    r.loss = result.loss.mean();
    r.norm = result.scale.norm;
    r.lr = t.hyper.lr;
    r.seconds = seconds;

    // Speed.
    r.step_tokens = c.batch_tokens;
    r.tokens = run.progress.tokens;
    double flops = flops_per_token(t.model, size_t(c.seq)) * double(c.batch_tokens);
    r.mfu = flops / seconds / run.clock.peak;

    // Techniques.
    ExpertBalance experts = expert_balance(loads, t.model.shape.experts.E);
    if (experts.max_vio >= 0)
        r.more = {{"max_vio", experts.max_vio}, {"least_load", experts.least}};
    if (dropped >= 0)
        r.more.push_back({"dropped_share", dropped});
    if (result.scale.loss.now > 0)
        r.more.push_back({"loss_scale", result.scale.loss.now});
    if (c.cp > 1)
        r.more.push_back({"cp_imbalance", pairs_imbalance(t.layout, t.data.pairs)});
    report_pairs(r, run, result.loss);
    if (run.rollouts.report)
        run.rollouts.report(r, result.loss);
    return r;
}

// ----------------------------------------------------------------------------
// a step

// Do one optimizer step: set its learning rate, run the plan, check and log the loss and the norm.
template <typename T, typename S>
void train_step(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    Spend spend(run.clock.account, Work::STEPS);
    t.watch.on = wants_times(run);
    t.hyper.lr = float(lr_at(run.step, c.steps, c.warmup, c.lr, c.min_lr, c.schedule));

    // Run the step and time it. While the device computes, the host reads the next step's batch;
    // plan_result() then waits for the device, once. Sampled answers cannot be read ahead.
    double start = clock_seconds();
    double waited = waited_for_others(run);
    uint64_t samples = uint64_t(c.batch_tokens / c.seq);
    if (t.hooks.before) t.hooks.before();
    start_plan(t, run.plans.train);
    if (run.step + 1 < c.steps && !has_rollouts(c))
        prepare_batch(t, run.plans.train, t.data.cursor + samples);
    PlanResult result = plan_result(t);
    run.clock.account.recount(Work::STEPS, Work::WAIT, waited_for_others(run) - waited);

    // Count the slots of experts, on all ranks together.
    std::vector<int64_t> loads = step_loads(t);
    double dropped = dropped_share(t, loads);
    double seconds = clock_seconds() - start;
    take_times(run, t, seconds);

    // Check the result. An fp16 step that overflowed is skipped and does not count as divergence.
    double loss = result.loss.mean();
    bool skipped = is_skipped(run, t.hyper.loss_scaling, result.scale);
    if (!skipped) {
        check_step(run, t, loss, result.scale);
        if (c.router_bias_rate > 0)
            move_choice_biases(t, run.balance.biases, loads, float(c.router_bias_rate));
        if (run.progress.first_loss == 0) run.progress.first_loss = loss;
    }
    run.progress.step_loss = skipped ? NAN : loss;

    // Count the step on all ranks; only the first one logs.
    run.step++;
    run.progress.tokens += c.batch_tokens;
    t.data.cursor += samples;
    if (!is_first_rank(run)) return;
    StepReport report = step_report(run, t, result, seconds, loads, dropped);
    run.balance.add(report);
    note(run, log_step(run.log, report));

    // Look for a spike. GRPO's loss is weighted by advantages, so it has no usual level.
    if (!skipped && !has_rollouts(c))
        note(run, run.health.spikes.look(run.step, loss, result.scale.norm));
}

// ----------------------------------------------------------------------------
// around the steps

// Open the log of a run whose weights are loaded, and count from here on.
template <typename T, typename S>
void start_counting(Run& run, Trainer<T, S>& t) {
    open_log(run, t);
    run.progress.first_step = run.step;
    run.progress.started = clock_seconds();
    run.clock.account.turn_to(Work::REST);
}

// Begin: measure the peak that MFU is a share of, and open the display. Between the steps all ranks
// agree on a signal, because they must leave at the same place: a rank that stopped alone would
// leave its peers waiting. An evaluation asks after each of its batches.
template <typename T, typename S>
void begin_training(Run& run, Trainer<T, S>& t) {
    measure_peak<T>(run, t.ctx.where);
    open_display(run.log, run.config.log_every, run.world.mpi != nullptr);
    run.saves.last = clock_seconds();
    if (run.config.save_async)
        run.saves.async = make_async_save(t);
    t.hooks.stopped = [&run] {
        run.end.stopped = agree(run.world, {stop_signal, false}).stop;
        return run.end.stopped != 0;
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
    run.end.stopped = wishes.stop;
    return wishes;
}

// End: save the last step. A copy in memory (--buddy) is not needed once it is on disk. A signal
// during the last step or its save also ends the run here, without samples and exports.
template <typename T, typename S>
void end_training(Run& run, Trainer<T, S>& t) {
    t.hooks.stopped = nullptr;
    save_at_the_end(run, t);
    if (run.saves.buddies && run.saves.step == run.step)
        remove_buddies(run.world, *run.saves.buddies);
    if (!run.end.stopped)
        run.end.stopped = agree(run.world, {stop_signal, false}).stop;
    if (!is_first_rank(run)) return;

    // Close the log and the profile, and print where a stopped run stands.
    report_profile(run);
    note(run, log_append(run.log, account_json(run.clock.account, run.step, run.log.repeated)));
    report_failure(run, log_close(run.log));
    finish_line(run.log);
    if (run.end.stopped)
        printf("stopped by %s at step %lld%s\n", signal_name(run.end.stopped).c_str(),
               (long long)run.step,
               run.saves.step == run.step ? ": --resume goes on" : ", which is not saved");
}

// Whether it is time for something that is done every `n` steps; n = 0 means never. After the last
// step the answer is `last`: false for checks, samples and saves, which the end of the run does.
inline bool is_time(const Run& run, int64_t n, bool last) {
    if (run.step == run.config.steps) return last;
    return n && run.step % n == 0;
}

// Train: before() and one plan a step; evaluate, sample and save when it is time. A signal ends
// training between two steps, on all ranks after the same step.
template <typename T, typename S, typename F>
void train_steps(Run& run, Trainer<T, S>& t, F before) {
    const Config& c = run.config;
    CatchSignals catch_signals;
    begin_training(run, t);
    while (run.step < c.steps) {
        before();
        train_step(run, t);
        Wishes wishes = heed_wishes(run, t);
        if (run.end.stopped) break;
        if (is_time(run, c.verify_every, false))
            check_ranks(run, t);

        // Evaluate. This may take minutes, so a signal ends an evaluation too.
        if (is_time(run, c.eval_every, true))
            report_evaluation(run, t);
        if (run.end.stopped) break;

        // Keep the best checkpoint, sample, and save.
        if (run.best.step == run.step)
            keep_best_checkpoint(run, t);
        if (is_time(run, c.sample_every, false))
            print_samples(run, t);
        if (run.saves.buddies && is_time(run, c.buddy_every, false))
            save_in_memory(run, t);
        if (wishes.save || is_time(run, save_rule(c).steps, false))
            save(run, t);
    }
    end_training(run, t);
}

// Leave the samples and the export that the flags ask for. After a signal do neither: its sender
// does not want to wait.
template <typename T, typename S>
void leave_results(Run& run, Trainer<T, S>& t) {
    if (run.end.stopped) return;
    print_samples(run, t);
    bool exported = write_export(run, t);
    report_end(run, t, exported);
}

} // namespace llmc
