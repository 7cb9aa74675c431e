// train_gpt.cu - train, evaluate and sample GPT-2 and Llama: main reads as the life of a run
//   1. main           join the other processes, read the flags
//   2. run_command    do what the flags ask: choose shape, tokenizer and layout, check, open data
//   3. run_ranks      one body for each rank of this process: itself, or --local-ranks threads
//   4. run_training   plan, place, allocate, load; then step, evaluate, sample, save; export
//   Functions stand in the opposite order: each stands before its caller.
//   The step itself is a plan (llmc/plan.h) that one loop runs (llmc/step.h). llmc/run has the rest
//   of a run: choices before the steps, reports, and the folder from which a run resumes.
//   Compiles as plain C++ too: make DEVICE=cpu.   Usage: train_gpt --help
#include <malloc.h>
#include "llmc/action.h"
#include "llmc/adapters.h"
#include "llmc/arena.h"
#include "llmc/comm/comm.h"
#include "llmc/comm/group.h"
#include "llmc/comm/local.h"
#include "llmc/comm/mpi.h"
#include "llmc/comm/nccl.h"
#include "llmc/comm/record.h"
#include "llmc/context.h"
#include "llmc/context_parallel.h"
#include "llmc/extra/average.h"
#include "llmc/extra/draft.h"
#include "llmc/extra/speculate.h"
#include "llmc/extra/upcycle.h"
#include "llmc/io/checkpoint.h"
#include "llmc/io/checkpoint_load.h"
#include "llmc/io/config.h"
#include "llmc/io/config_check.h"
#include "llmc/io/config_notes.h"
#include "llmc/io/dataloader.h"
#include "llmc/io/explain.h"
#include "llmc/io/files.h"
#include "llmc/io/help.h"
#include "llmc/io/likelihood.h"
#include "llmc/io/logger.h"
#include "llmc/io/machines.h"
#include "llmc/io/model_files.h"
#include "llmc/io/new_tokens.h"
#include "llmc/io/plan_flags.h"
#include "llmc/io/prepare.h"
#include "llmc/io/shared_files.h"
#include "llmc/layout.h"
#include "llmc/load.h"
#include "llmc/ops/cuda_common.h"
#include "llmc/ops/grad_norm.cuh"
#include "llmc/ops/matmul.cuh"
#include "llmc/ops/memory.h"
#include "llmc/ops/rand.h"
#include "llmc/optimizer.h"
#include "llmc/parameters.h"
#include "llmc/planner/auto_plan.h"
#include "llmc/planner/calibrate.h"
#include "llmc/planner/fit.h"
#include "llmc/planner/machine_here.h"
#include "llmc/quantised.h"
#include "llmc/run/account.h"
#include "llmc/run/async_save.h"
#include "llmc/run/buddy.h"
#include "llmc/run/choose.h"
#include "llmc/run/choose_plans.h"
#include "llmc/run/folder.h"
#include "llmc/run/health.h"
#include "llmc/run/limits.h"
#include "llmc/run/overflow.h"
#include "llmc/run/prompts.h"
#include "llmc/run/report.h"
#include "llmc/run/run.h"
#include "llmc/run/sample.h"
#include "llmc/run/step_report.h"
#include "llmc/run/stop.h"
#include "llmc/run/talk.h"
#include "llmc/sharding.h"
#include "llmc/step.h"
#include "llmc/text.h"
#include "llmc/trainer.h"
#include "llmc/tune/base_identity.h"
#include "llmc/tune/merged_adapters.h"
#include "llmc/tune/named_adapters.h"
#include "llmc/tune/on_policy.h"
#include "llmc/tune/prefix_files.h"
#include "llmc/tune/reference_point.h"
#include "llmc/tune/references.h"
#include "llmc/tune/teach.h"

using namespace llmc;

// ----------------------------------------------------------------------------
// one rank's run

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

// Do one optimizer step: set its learning rate, run the plan, check and log the loss and the norm.
template <typename T, typename S>
void train_step(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    double begin = clock_seconds();
    std::string wrong = has_rollouts(c) ? sample_rollouts(run, t) : "";
    run.rollout_seconds += clock_seconds() - begin;

    // A reward program that fails ends the run: save first what the steps before have trained.
    if (!wrong.empty()) {
        if (run.step > run.first_step) save(run, t);
        end_save(run, t);
        or_die_on_all_ranks(run, wrong + resume_hint(run));
    }
    Spend spend(run.account, Work::STEPS);
    t.watch.on = wants_times(run);
    t.hyper.lr = float(lr_at(run.step, c.steps, c.warmup, c.lr, c.min_lr, c.schedule));

    // Run the step and time it. While the device computes, the host reads the next step's batch;
    // plan_result() then waits for the device, once.
    double start = clock_seconds();
    double waited = waited_for_others(run);
    uint64_t samples = uint64_t(c.batch_tokens / c.seq);
    take_reference_point(run, t);
    if (t.before) t.before();
    start_plan(t, run.train_plan);

    // With --loss grpo the next batch cannot be read ahead: it is sampled from the new weights.
    bool ahead = run.step + 1 < c.steps && !has_rollouts(c);
    if (ahead)
        prepare_batch(t, run.train_plan, t.cursor + samples);
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

    // Count the step on all ranks; only the first one logs.
    run.step++;
    run.tokens += c.batch_tokens;
    t.cursor += samples;
    if (!is_first_rank(run)) return;

    // Log the step, and look for a spike of the loss. GRPO's loss is weighted by advantages, so it
    // has no usual level.
    StepReport report = step_report(run, t, result, measures);
    sum_imbalances(run, report);
    note(run, log_step(run.log, report));
    if (!skipped && !has_rollouts(c))
        note(run, run.spikes.look(run.step, loss, result.scale.norm));
}

// Load the weights from a checkpoint or from the model's files, or draw them from --seed. Then
// compute the references of a preference loss, and check each value.
template <typename T, typename S>
void load_weights(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    Spend spend(run.account, Work::LOAD);
    init_constants(t);
    init_loss_scale(t);

    // A checkpoint takes precedence over the model's own files. Two kinds of run load it later,
    // after the model's files: a checkpoint of adapters does not hold the base weights, and a
    // reference is computed with the weights from which the first run started.
    bool drawn = has_new_weights(c);
    mode_t type = drawn ? 0 : file_type(c.start.empty() ? c.model : c.start);
    run.weights = drawn ? concat("new, from --seed ", c.seed) : base_name(c);
    bool adapters = trains_adapters(run.shape);
    bool behind = adapters || has_reference(c); // load the checkpoint after the starting weights
    bool resumed = c.resume && !behind && resume(run, t);
    if (!c.average.empty()) {
        average_weights(run, t);
        resumed = true; // nothing is left to read or to draw
    }

    // Without a checkpoint, read the model's files, and draw the weights that they lack.
    if (!resumed && !c.start.empty())
        or_die_on_all_ranks(run, checkpoint_load_weights(t, c.start));
    else if (!resumed && c.upcycle)
        or_die_on_all_ranks(run, upcycle_weights(t, c.model, uint64_t(c.seed)));
    else if (!resumed && type == S_IFDIR)
        or_die_on_all_ranks(run, c.add_tokens.empty()
                                     ? load_folder(t, c.model, adapters ? "" : c.adapter)
                                     : load_and_grow(t, c.model, uint64_t(c.seed)));
    else if (!resumed && type)
        or_die(model_file_load(t, c.model));
    if (!resumed)
        init_weights(t, uint64_t(c.seed), !drawn);
    if (!resumed && adapters && !c.adapter.empty())
        or_die_on_all_ranks(run, load_trained_adapters(t, c.adapter, run.prompt_plan));
    or_die_on_all_ranks(run, load_adapter_sets(t, c.adapters));
    if (!resumed) start_average(t);

    // Finish what needs the starting weights, then load the checkpoint over them.
    if (adapters && !c.out.empty())
        or_die_on_all_ranks(
            run, base_identity(run.world, drawn ? "" : base_name(c), c.seed, &run.base));
    if (has_reference(c)) compute_references(run, t);
    if (c.loss == "kto") compute_mismatched(run, t);
    if (behind && c.resume) resume(run, t);
    if (c.router_bias_rate > 0) run.choice_biases = read_choice_biases(t);
    check_weights(run, t);

    // A run that only evaluates or samples prints where its weights come from.
    if (run.train_plan < 0 && is_first_rank(run))
        printf("weights: %s\n", run.weights.c_str());
}

// Run each plan of whole sequences once on random numbers, so that each matrix product on a GPU
// measures which algorithm is fastest: on zeros a GPU's clock is higher. This overwrites all state,
// so it comes before the weights are loaded.
template <typename T, typename S>
void autotune(Run& run, Trainer<T, S>& t) {
    // --verify-every compares the bits of ranks, so all of them must use one algorithm: keep the
    // library's first guess, which does not depend on timing.
    if (run.config.verify_every && run.layout.dp.size > 1)
        return;
    if (!blas_rehearse(t.ctx.blas, true, t.ctx.where))
        return;

    // Read random tokens in place of data until the end of this function.
    Window window = t.window;
    t.window = [&](uint64_t sample, int* tokens, int* targets) {
        for (size_t i = 0; i < t.plans[t.plan].T; i++)
            tokens[i] = targets[i] = int(random_block(0, sample, i)[0] % t.model.shape.V);
        return std::string();
    };

    // Run the training step, the evaluation, and one plan for each length of a task's rows.
    const Memory& device = t.arena.device();
    std::vector<int> plans = {run.train_plan, run.evaluate_plan};
    for (const ScoreGroup& group : run.score_groups)
        plans.push_back(group.plan);
    for (int plan : plans)
        if (plan >= 0) {
            // The plan before has left what its update made of such weights.
            T* memory = reinterpret_cast<T*>(device.base);
            fill_noise(memory, device.bytes / sizeof(T), t.ctx.where);
            init_constants(t);
            run_plan(t, plan);
            wait_for(t.ctx.where); // the next plan's batch overwrites this one's
        }

    // Zero the arena, so that no result of these runs stays.
    wait_for(t.ctx.where);
    blas_rehearse(t.ctx.blas, false, t.ctx.where);
    device_zero(device.base, device.bytes, t.ctx.where);
    t.window = window;
}

// Make the communicators of this rank's groups, and give the watchdog this rank's place in the
// grid, so that its report of a hang can name it.
template <typename T, typename S>
void join_groups(Run& run, Trainer<T, S>& t) {
    const Layout& me = run.layout;
    t.comms = make_comms(run.world, me, ranks_of_kv_head(me, t.model));
    if (run.world.info)
        run.world.info->place =
            concat("dp ", me.dp.rank, ", tp ", me.tp.rank, ", pp ", me.pp.rank,
                   me.cp.size > 1 ? concat(", cp ", me.cp.rank) : "");
}

// Give the trainer the command line's hyperparameters, and a function that reads its data.
template <typename T, typename S>
void set_training(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;

    // The learning rate is set step by step, in train_step().
    t.hyper.beta1 = float(c.beta1);
    t.hyper.beta2 = float(c.beta2);
    t.hyper.eps = float(c.eps);
    t.hyper.weight_decay = float(c.weight_decay);
    t.hyper.clip = float(c.clip);
    t.hyper.ema = c.ema;
    t.takes_average = c.use_ema;
    t.hyper.loss_scaling = run.loss_scaling;
    t.hyper.seed = uint64_t(c.seed);

    // With --loss grpo the windows hold sampled answers, not text from files.
    if (has_rollouts(c)) return set_rollouts(run, t);

    // A window that cannot be read ends the run. If the run saves, the message adds that its
    // checkpoints are good.
    t.window = [&run](uint64_t sample, int* tokens, int* targets) {
        std::string wrong = load_window(run.train, sample, tokens, targets);
        bool saves = !wrong.empty() && !run.config.out.empty();
        return saves ? wrong + "; what is saved is good: then --resume goes on" : wrong;
    };

    // Print what data is read, and which token ends a document.
    if (run.train_plan >= 0 && is_first_rank(run))
        printf("data: %s\n", data_text(run.train).c_str());
    if (run.document_end >= 0 && is_first_rank(run))
        printf("documents: apart, each ends with token %d\n", run.document_end);
}

// Whether it is time for something that is done every `n` steps; n = 0 means never. After the last
// step the answer is `last`: false for checks, samples and saves, which the end of the run does.
static bool is_time(const Run& run, int64_t n, bool last) {
    if (run.step == run.config.steps) return last;
    return n && run.step % n == 0;
}

// Train: run one plan a step; evaluate, sample and save when it is time. A signal ends training
// between two steps, on all ranks after the same step.
template <typename T, typename S>
void train(Run& run, Trainer<T, S>& t) {
    // Prepare: measure the peak that MFU is a share of, open the display, and catch signals.
    const Config& c = run.config;
    measure_peak<T>(run, t.ctx.where);
    open_display(run.log, c.log_every, run.world.mpi != nullptr);
    run.saves = {};
    if (c.save_async)
        run.saves.async = make_async_save(t);
    CatchSignals catch_signals;

    // All ranks agree on a signal, because they must leave at the same place: a rank that stopped
    // alone would leave its peers waiting. An evaluation asks after each of its batches.
    t.stopped = [&] {
        run.stopped = agree(run.world, {stop_signal, false}).stop;
        return run.stopped != 0;
    };
    while (run.step < c.steps) {
        train_step(run, t);

        // Share signals and wishes with all ranks. Continue an asynchronous save once no rank
        // writes, or replace it if this step has shown that its weights are bad.
        Wishes wishes = agree(run.world, {stop_signal, clock_wants_save(run),
                                          is_writing(run.saves.async), doubts_save(run)});
        if (wishes.doubt)
            replace_save(run, t);
        else if (!wishes.writing)
            advance_save(run, t);
        run.stopped = wishes.stop;
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
    t.stopped = nullptr;

    // Save the last step. A copy in memory (--buddy) is not needed once it is on disk.
    save_at_the_end(run, t);
    bool on_disk = run.saves.step == run.step;
    if (run.buddies && on_disk)
        remove_buddies(run.world, *run.buddies);

    // A signal during the last step or its save also ends the run here, without
    // samples and exports.
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

// One rank's whole run.
template <typename T, typename S>
void run_training(Run& run, S where) {
    const Config& c = run.config;
    Trainer<T, S> t;
    t.ctx.where = where;
    t.offload_folder = c.offload_to;
    sizes_of_gpu = explains_gpu(c);

    // Plan: the actions of a step, and a place for every byte. Nothing is allocated yet.
    run.layout = layout_at(choose_layout(c, run.shape), run.world.rank);
    std::vector<PlanOptions> plans = choose_plans(run);
    std::string levels = choose_recompute<T>(run, plans, where);
    trainer_place(t, run.shape, plans, run.layout);
    or_die(check_pieces(plans[0].stored, t.model, run.layout));
    bool generates = run.generate_plan >= 0 || run.rollout_plan >= 0;
    or_die(check_latents(run.shape, !std::is_same_v<S, Cpu>, generates));

    // Print the model and its levels of recomputation.
    if (is_first_rank(run))
        printf("%s%s", parameters_text(t.model).c_str(), levels.c_str());

    // Count the memory of a draft and of a teacher too.
    run.draft_bytes = bytes_of_draft<T>(run, plans, where);
    run.teacher_bytes = bytes_of_teacher<T>(run, plans, run.world.rank, where);

    // --explain prints the plan and ends here, after the check of --memory: then a plan that is
    // refused is on the screen too.
    if (c.explain) print_plan(run, t, plans);
    check_bound<T>(run, plans, where);
    if (c.explain) return;
    check_plans_of_all_ranks(run, plans, t.model);

    // Name the kernels of attention, and the machines.
    std::string kernels = context_attention_backend(t.rank_shape, run.layout, sizeof(T), where);
    std::string machines = machines_text(run.layout, find_machines(run.world));
    if (!kernels.empty() && is_first_rank(run))
        printf("attention: %s\n", kernels.c_str());
    if (is_first_rank(run))
        printf("%s", machines.c_str());
    if (is_first_rank(run) && run.world.nccl)
        printf("%s", nccl_settings_text(environ).c_str());

    // Start: check that there is room, join the other ranks, and allocate.
    check_memory(run, t);
    size_t offloaded = check_offload(run, t);
    if (writes_folder(c)) check_disk(run, t, offloaded);
    join_groups(run, t);
    open_buddies(run);
    set_training(run, t);
    trainer_allocate(t);
    autotune(run, t);

    // From here on plans are replayed as graphs (--graphs), and documents are cut.
    t.replays = c.graphs;
    t.document_end = run.document_end;

    // Load or draw the weights, also of a teacher and a draft, and open the log.
    load_weights(run, t);
    open_teacher(run, t, plans);
    std::shared_ptr<Draft> draft = open_draft<T>(run, plans, where);
    run.draft = draft.get();
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
    leave_texts(run, t);
    bool exported = write_export(run, t);
    report_end(run, t, exported);
    trainer_free(t);
}

// ----------------------------------------------------------------------------
// where ranks run: threads or processes, on CPUs or GPUs

// Run a rank with the element type that --precision names. Only this function and plan_run_as()
// (auto_plan.h), which plans before there is a run, turn the name into a type.
template <typename S> void run_rank(Run& run, S where) {
    const std::string& precision = run.config.precision;
    if (!run.config.calibrate.empty())
        return run_calibration(run, where);
    if (precision == "bf16")
        return run_training<bf16>(run, where);
    if (precision == "fp16")
        return run_training<fp16>(run, where);
    run_training<float>(run, where);
}

#if defined(__CUDA_ARCH__)
// nvcc's passes for GPUs look for kernels: spare them the ranks on the CPU.
extern template void run_rank(Run&, Cpu);
#endif

// Call body(run) once for each rank of this process: the process is a rank itself, or it starts
// --local-ranks threads. Returns whether all threads ended well.
template <typename F> bool run_ranks(Run& run, F body) {
    const Config& c = run.config;
    bool threads = c.local_ranks > 1 && !c.explain;

    // Print how many ranks there are, and along which axes.
    if (is_first_rank(run) && (threads || run.world.size > 1))
        printf("ranks: %d %s, %s\n", rank_count(c), threads ? "threads" : "processes",
               axes_text(c).c_str());

    // A process is its own rank.
    if (!threads) {
        body(run);
        return true;
    }

    // Each thread has a copy of the run, and with it its own tokenizer, data and log.
    auto rank = [&](const Comm& world) {
        Run mine = run;
        mine.world = world;
        body(mine);
        // The first rank decides the exit status of the program.
        if (is_first_rank(mine)) {
            run.stopped = mine.stopped;
            run.failed = mine.failed;
        }
    };

    // The watchdog names a rank that hangs. Once a rank has failed, the process leaves after 10
    // seconds, whether the others have ended or not.
    LocalSettings settings;
    settings.timeout_s = c.watchdog;
    settings.leave_s = 10;
    return run_local_ranks(c.local_ranks, settings, rank) == 0;
}

// Run on the CPU, and print with how many threads and which library, because the speed
// depends on both.
static bool run_on_cpu(Run& run) {
    const Config& c = run.config;
    LLMC_USER_CHECK(!c.graphs || c.explain,
                    "--graphs is for GPUs, and this run is on the CPU: leave it out");
    if (is_first_rank(run))
        printf("train_gpt: %s, %s, on the CPU with %d threads, %s\n", printable(c.model).c_str(),
               c.precision.c_str(), threads_here(Cpu{}), matmul_backend());
    return run_ranks(run, [](Run& rank) { run_rank(rank, Cpu{}); });
}

#if LLMC_KERNELS
// Give each of several processes a GPU of its own, and connect them by NCCL. Threads as ranks share
// the first GPU.
static void join_gpus(Run& run) {
    if (!HAS_NCCL || run.world.size == 1)
        return;
    or_die(take_gpu(run.world));
    or_die(no_gpu_because()); // ask again: this GPU may be older than the machine's first
    run.world.fixed_order = run.config.fixed_order;
    run.world = nccl_attach(run.world);
}

// Run on GPUs, or on the CPU where a process has none and --device auto permits it.
static bool run_on_gpu(Run& run) {
    const Config& c = run.config;

    // Ask for a GPU. All processes use GPUs, or none does. --explain needs none.
    std::string why = no_gpu_because();
    bool there = why.empty();
    bool plans_only = c.explain && c.device == "cuda";
    LLMC_USER_CHECK(there || plans_only || c.device == "auto",
                    "--device cuda: %s: use --device cpu", why.c_str());
    int64_t with_gpu = there;
    all_reduce_sum(run.world, &with_gpu, 1, Cpu{});
    there = with_gpu == run.world.size;

    // If any process lacks a GPU, all run on the CPU.
    if (!there && !plans_only) {
        if (is_first_rank(run))
            printf("%s: on the CPU\n", why.empty() ? "another process has no GPU" : why.c_str());
        return run_on_cpu(run);
    }

    // Print the device. --explain plans for a GPU that need not be there.
    if (there && !c.explain) join_gpus(run);
    std::string name = there ? device_name(cudaStream_t{}) : "a GPU that is not here";
    if (is_first_rank(run))
        printf("train_gpt: %s, %s, on %s\n", printable(c.model).c_str(), c.precision.c_str(),
               name.c_str());

    // Run each rank on a stream of its own.
    return run_ranks(run, [&](Run& rank) {
        cudaStream_t stream = there ? open_stream(cudaStream_t{}) : nullptr;
        run_rank(rank, stream);
        if (there) close_stream(stream);
    });
}
#else
static bool run_on_gpu(Run& run) { return run_on_cpu(run); } // the program has no kernels
#endif

// Run on GPUs where the flags and the build permit it, else on the CPU. Several processes need NCCL
// to communicate between GPUs.
static bool run_where_wanted(Run& run) {
    bool can = HAS_NCCL || run.world.size == 1;
    if (LLMC_KERNELS && !can && run.config.device == "auto" && is_first_rank(run))
        printf("built without NCCL (install libnccl-dev): processes run on the CPU\n");
    return can && run.config.device != "cpu" ? run_on_gpu(run) : run_on_cpu(run);
}

// Join the other processes of a job. Under mpirun or srun each process is a rank.
static void join_processes(Run& run, RankInfo* info, int* argc, char*** argv) {
    // Recognize a launcher by its environment variables: a process that was started alone must
    // not start MPI.
    const char* size = getenv("OMPI_COMM_WORLD_SIZE");
    bool started = size || getenv("PMIX_RANK") || getenv("PMI_RANK");
    if (const char* rank = getenv("OMPI_COMM_WORLD_RANK"))
        this_rank = atoi(rank);
    LLMC_USER_CHECK(HAS_MPI || !started || (size && atoi(size) == 1),
                    "started as one of several processes, and built without MPI: install "
                    "libopenmpi-dev and openmpi-bin and make again, or use --local-ranks");
    if (HAS_MPI && started)
        run.world = mpi_join(*info, argc, argv);
}

// Leave the other processes. Communicators must be freed before MPI ends.
static void leave_processes(Run& run) {
    bool joined = run.world.mpi != nullptr;
    run.world = {}; // frees its group
    if (joined) mpi_leave();
}

// With --plan auto, choose the layout before anything else depends on it. Returns false if the user
// only asked for the plan (--explain), and nothing is to run.
static bool plan_ahead(Run& run) {
    or_die(check_planning(run.config));
    if (run.config.plan == "none") return true;
#if LLMC_KERNELS
    bool there = no_gpu_because().empty();
    if (run.config.device == "cuda" || (run.config.device == "auto" && there))
        return plan_run_as(run, cudaStream_t{});
#endif
    return plan_run_as(run, Cpu{});
}

// Turn text into shards of tokens (--prepare). One process does it, and no model is needed.
static void prepare_data(Run& run) {
    if (!is_first_rank(run)) return;
    open_tokenizer(run);
    or_die(prepare_shards(run.config, run.tokenizer, program_folder()));
}

// Make OpenMP's threads spin only briefly. Threads spin while they wait, and when another program
// needs cores too, the spinning ones take them from those that work: a step of 13 ms then took 557
// on average (dev/LOG.md). OpenMP reads the limit when its library is loaded, so the program sets
// the variable and starts itself again. If exec fails, the run continues with threads that spin.
static void spin_briefly(char** argv) {
    (void)argv;
#ifdef _OPENMP
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY")) return;
    setenv("GOMP_SPINCOUNT", "1000", 1);
    execv(program_path().c_str(), argv);
#endif
}

// Do what the command line asks for. Returns false if some of it could not be done.
static bool run_command(Run& run) {
    Config& c = run.config;
    if (c.help || c.version) {
        if (is_first_rank(run))
            fputs(c.help ? help_text(terminal_columns()).c_str() : version_text().c_str(), stdout);
        return true;
    }

    // Let --model name a run. Then prepare data: that needs the model's text alone.
    or_die(take_run_model(c));
    if (!c.prepare.empty()) {
        prepare_data(run);
        return true;
    }

    // Print what fits on a card: that needs no run.
    if (was_given(c, "fit")) {
        if (is_first_rank(run))
            printf("%s", fit_text(c).c_str());
        return true;
    }

    // Measure this machine: that needs no model.
    if (wants_calibration(run)) return run_where_wanted(run);

    // Complete the flags from another trainer's file and from the checkpoint; the command line
    // takes precedence. Then read the model's small files once for all processes, open the
    // tokenizer, whose size may set the vocabulary, and choose the model's shape.
    reserve_output(run);
    take_ds_config(run);
    adopt_checkpoint(run);
    choose_average(run);
    share_small_files(run.world, c);
    open_tokenizer(run);
    follow_tokenizer(run);
    run.shape = choose_shape(c);
    grow_vocabulary(run);
    take_prefix(c, run.shape);

    // Fine-tuning takes the usual defaults of its loss (TRL's). A resumed run has them from its
    // checkpoint, and a mean of models trains nothing.
    bool goes_on = c.resume && !checkpoint_steps(c.out).empty();
    goes_on |= !c.average.empty();
    std::string taken = goes_on || has_new_weights(c) ? "" : take_loss_defaults(c);
    if (is_first_rank(run) && !taken.empty())
        printf("%s\n", taken.c_str());

    // Choose the layout if the program is to choose it; then check that all flags fit together.
    if (!plan_ahead(run)) return true;
    or_die(whose_flag(c, config_check(c, run.shape, run.world.size)));
    add_adapters(c, run.shape);
    or_die(refuse_idle_flags(c));
    or_die(choose_loss_scaling(run));
    for (const std::string& text : config_notes(c))
        note(run, text);

    // Check that all ranks have the same flags and the same program, or they would deadlock.
    check_same(run.world, "the command line", json_text(config_json(c)));
    if (run.world.size > 1)
        check_same(run.world, "the program", program_bytes());

    // Choose how conversations are written, which an export says. Then try every file that will be
    // written: an error at the end of the run would come too late.
    open_chat(run);
    if (!c.export_dir.empty()) prepare_export(run);
    if (!c.timeline.empty() && is_first_rank(run)) or_die(try_file("timeline", c.timeline));
    if (!c.profile.empty() && is_first_rank(run)) or_die(try_file("profile", c.profile));
    take_folder(run);

    // Open everything that is read: tasks, data, prompts.
    open_tasks(run);
    if (!c.explain && wants_validation(c))
        open_data(run);
    if (!c.explain && has_rollouts(c))
        open_exercises(run);
    choose_teacher(run);
    choose_texts(run);

    return run_where_wanted(run);
}

int main(int argc, char** argv) {
    spin_briefly(argv);

    // Flush standard output after each line, even into a pipe.
    setvbuf(stdout, nullptr, _IOLBF, 0);

    // Return large buffers to the system when they are freed, so that the peak memory is what
    // the plan says.
    mallopt(M_MMAP_THRESHOLD, 1 << 20);

    // Let a write beyond the file size limit fail like one on a full disk, instead of by a signal.
    signal(SIGXFSZ, SIG_IGN);

    // Join the other processes first: a rank must know its number before it complains.
    RankInfo info;
    Run run;
    join_processes(run, &info, &argc, &argv);
    or_die(parse_arguments(run.config, argc, argv));
    info.timeout_s = run.config.watchdog;

    // Let training outlive who reads its lines, as in `| head` or a tee that Ctrl-C has ended.
    if (has_training(run.config)) signal(SIGPIPE, SIG_IGN);
    bool good = run_command(run);
    leave_processes(run);

    // After a signal, exit as shells report it: 128 plus the signal's number.
    if (run.stopped) return 128 + run.stopped;
    return good && !run.failed ? 0 : 1;
}
