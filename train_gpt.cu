// train_gpt.cu - train, evaluate and sample GPT-2 and Llama: main reads as the life of a run
//   1. main           read the command line, the model's shape, tokenizer, prompt, data
//   2. run_ranks      one body for each rank of this process: itself, or --local-ranks threads
//   3. run_training   plan, place, allocate, load; then step, evaluate, sample, save; export
//   The step itself is a plan (llmc/plan.h) that one loop runs (llmc/step.h); what surrounds it is
//   in llmc/run: choices before the run, reports during it, the folder it can go on from.
//   Compiles as plain C++ too: g++ -x c++ train_gpt.cu.   Usage: train_gpt --help
#include <malloc.h>
#include "llmc/io/config_notes.h"
#include "llmc/io/help.h"
#include "llmc/io/lr_schedule.h"
#include "llmc/io/prepare.h"
#include "llmc/io/upcycle.h"
#include "llmc/run/auto_plan.h"
#include "llmc/run/folder.h"
#include "llmc/run/limits.h"
#include "llmc/run/on_policy.h"
#include "llmc/run/overflow.h"
#include "llmc/run/report.h"
#include "llmc/run/talk.h"

using namespace llmc;

// ----------------------------------------------------------------------------
// one rank's run

// End the run if a step diverged, and say where its first value that is not finite was made. All
// ranks agree, for loss and norm are the same on each.
template <typename T, typename S>
void check_step(Run& run, Trainer<T, S>& t, double loss, const StepScale& scale) {
    if (std::isfinite(loss) && scale.finite) return;
    std::string first = trace_bad_value(run, t);
    std::string where = first.empty()
                            ? "done again, the step has no such value: suspect the machine"
                            : "the first value that is not finite: " + first;
    or_die_on_all_ranks(
        run, concat("step ", run.step + 1, ": the loss is ", loss, " and the gradient norm ",
                    scale.norm, "; ", where, ". Lower --lr, lengthen --warmup or set --clip 1",
                    resume_hint(run)));
}

// One optimizer step: set its learning rate, run the plan, look at the loss and the norm.
template <typename T, typename S>
void train_step(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    if (has_rollouts(c)) sample_rollouts(run, t);
    Spend spend(run.account, Work::STEPS);
    t.watch.on = wants_times(run);
    t.hyper.lr = float(lr_at(run.step, c.steps, c.warmup, c.lr, c.min_lr, c.schedule));

    // Run the step and time it. A device is at work while the host reads the next step's batch, and
    // the host waits for it once.
    double start = clock_seconds();
    double waited = waited_for_others(run);
    uint64_t samples = uint64_t(c.batch_tokens / c.seq);
    take_reference_point(run, t);
    start_plan(t, run.train_plan);
    // The next answers are sampled from the weights that this step makes.
    bool ahead = run.step + 1 < c.steps && !has_rollouts(c);
    if (ahead) prepare_batch(t, run.train_plan, t.cursor + samples);
    PlanResult result = plan_result(t);
    run.account.recount(Work::STEPS, Work::WAIT, waited_for_others(run) - waited);
    std::vector<int64_t> loads = step_loads(t);
    double loss = result.loss.mean();
    double seconds = clock_seconds() - start;
    take_times(run, t, seconds);

    // Look at the result.
    const StepScale& scale = result.scale;
    bool skipped = is_skipped(run, scale);
    if (!skipped) check_step(run, t, loss, scale);
    if (!skipped && c.router_bias_rate > 0)
        move_choice_biases(t, run.choice_biases, loads, float(c.router_bias_rate));
    if (run.first_loss == 0 && !skipped) run.first_loss = loss;
    run.step++;
    run.tokens += c.batch_tokens;
    t.cursor += samples;
    if (!is_first(run)) return;

    // Log the step: speed is that of the step alone, without evaluation or saving.
    double flops = flops_per_token(t.model, size_t(c.seq)) * double(c.batch_tokens);
    double mfu = flops / seconds / run.peak;
    ExpertBalance experts = expert_balance(loads, t.model.shape.E);
    double imbalance = c.cp > 1 ? pairs_imbalance(t.layout, t.pairs) : 0;
    run.cp_imbalance += imbalance;
    run.max_vio += std::max(experts.max_vio, 0.0);
    double pairs = has_pairs(c) ? double(std::max<int64_t>(result.loss.valid, 1)) : -1;
    note(run, log_step(run.log, {run.step, c.steps, loss, scale.norm, t.hyper.lr, seconds,
                                 c.batch_tokens, run.tokens, mfu, scale.loss.now, imbalance,
                                 experts.max_vio, experts.least, result.loss.margin / pairs,
                                 pairs < 0 ? -1 : result.loss.correct / pairs,
                                 c.loss == "kto" ? run.reference_point : -1,
                                 rollout_numbers(run, result.loss)}));
    // A loss that advantages weigh has no level of its own.
    if (!skipped && !has_rollouts(c)) note(run, run.spikes.look(run.step, loss, scale.norm));
}

// Weights come from a checkpoint, from the model's files, or from --seed.
template <typename T, typename S>
void load_weights(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    Spend spend(run.account, Work::LOAD);
    init_constants(t);
    init_loss_scale(t);

    // A checkpoint counts more than the model's own files. One of adapters has no base, and is
    // read behind it.
    mode_t type = c.scratch ? 0 : file_type(c.model);
    run.weights = type ? c.model : concat("new, from --seed ", c.seed);
    bool adapters = run.shape.adapters != nullptr;
    bool behind = adapters || has_reference(c); // a resume comes below
    bool resumed = c.resume && !behind && resume(run, t);
    if (!resumed && c.upcycle)
        or_die(upcycle_weights(t, c.model, uint64_t(c.seed)));
    else if (!resumed && type == S_IFDIR)
        or_die(c.add_tokens.empty() ? hf_load_weights(t, c.model)
                                    : load_and_grow(t, c.model, uint64_t(c.seed)));
    else if (!resumed && type)
        or_die(model_file_load(t, c.model));
    if (!resumed)
        init_weights(t, uint64_t(c.seed), type != 0);
    if (!resumed && !c.adapter.empty())
        or_die(load_adapters(t, c.adapter));
    if (adapters && !c.out.empty())
        or_die_on_all_ranks(run, base_identity(run.world, type ? c.model : "", c.seed, &run.base));
    if (has_reference(c)) compute_references(run, t);
    if (c.loss == "kto") compute_mismatched(run, t);
    if (behind && c.resume) resume(run, t);
    if (c.router_bias_rate > 0) run.choice_biases = read_choice_biases(t);
    check_weights(run, t);

    // A run that only evaluates or samples says which weights those are.
    if (run.train_plan < 0 && is_first(run))
        printf("weights: %s\n", run.weights.c_str());
}

// Run each plan of whole sequences once on zeros, before there is anything to lose: on a GPU each
// product measures which algorithm is fastest.
template <typename T, typename S>
void autotune(Run& run, Trainer<T, S>& t) {
    // A replay compares bits, so its ranks keep to the library's first guess.
    if (run.config.verify_every && run.layout.dp.size > 1) return;
    if (!blas_rehearse(t.ctx.blas, true, t.ctx.where))
        return;

    // Put zeros in the place of data, and give the data back at the end.
    Window window = t.window;
    t.window = [&](uint64_t, int* tokens, int* targets) {
        size_t n = t.plans[t.plan].T;
        std::fill_n(tokens, n, 0);
        std::fill_n(targets, n, 0);
        return std::string();
    };

    // Run the step, the evaluation, and each length of a task's rows.
    init_constants(t);
    std::vector<int> plans = {run.train_plan, run.evaluate_plan};
    for (const ScoreGroup& group : run.score_groups)
        plans.push_back(group.plan);
    for (int plan : plans)
        if (plan >= 0) {
            run_plan(t, plan);
            wait_for(t.ctx.where); // the next plan's batch takes the place of this one's
        }

    // Forget what it computed.
    wait_for(t.ctx.where);
    blas_rehearse(t.ctx.blas, false, t.ctx.where);
    device_zero(t.arena.device().base, t.arena.device().bytes, t.ctx.where);
    t.window = window;
}

// Make the groups of ranks, and say where this one stands in the watchdog's words.
template <typename T, typename S>
void join_groups(Run& run, Trainer<T, S>& t) {
    const Layout& me = run.layout;
    t.comms = make_comms(run.world, me, ranks_of_kv_head(me, t.model));
    if (run.world.info)
        run.world.info->place =
            concat("dp ", me.dp.rank, ", tp ", me.tp.rank, ", pp ", me.pp.rank,
                   me.cp.size > 1 ? concat(", cp ", me.cp.rank) : "");
}

// Hand the trainer the numbers and the data of the command line.
template <typename T, typename S>
void set_training(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;

    // The learning rate is set step by step, in train_step().
    t.hyper.beta1 = float(c.beta1);
    t.hyper.beta2 = float(c.beta2);
    t.hyper.eps = float(c.eps);
    t.hyper.weight_decay = float(c.weight_decay);
    t.hyper.clip = float(c.clip);
    t.hyper.loss_scaling = run.loss_scaling;
    t.hyper.seed = uint64_t(c.seed);

    // Answers that are sampled take the place of text.
    if (has_rollouts(c)) return set_rollouts(run, t);

    // A window that cannot be read ends the run: its line says what is saved.
    t.window = [&run](uint64_t sample, int* tokens, int* targets) {
        std::string wrong = load_window(run.train, sample, tokens, targets);
        bool saves = !wrong.empty() && !run.config.out.empty();
        return saves ? wrong + "; what is saved is good: then --resume goes on" : wrong;
    };

    // Say what is read, and where documents end in it.
    if (run.train_plan >= 0 && is_first(run))
        printf("data: %s\n", data_text(run.train).c_str());
    if (run.document_end >= 0 && is_first(run))
        printf("documents: apart, each ends with token %d\n", run.document_end);
}

// Whether the step that has just ended is one of every `n`. At the last step `last` is the answer:
// sampling and saving have places of their own after the loop.
static bool is_time(const Run& run, int64_t n, bool last) {
    if (run.step == run.config.steps) return last;
    return n && run.step % n == 0;
}

// Train: one plan a step; evaluate, sample and save when it is time. A signal ends it between two
// steps, on all ranks after the same one.
template <typename T, typename S>
void train(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    measure_peak<T>(run, t.ctx.where);
    open_display(run.log, c.log_every, run.world.mpi != nullptr);
    run.saves = {};
    if (c.save_async) run.saves.async = make_async_save(t);
    CatchSignals catch_signals;

    // All ranks agree on a signal, for they must leave after the same step.
    t.stopped = [&] { // asked after each batch of an evaluation
        run.stopped = agree(run.world, {stop_signal, false}).stop;
        return run.stopped != 0;
    };
    while (run.step < c.steps) {
        train_step(run, t);

        // Hear what the other ranks have heard.
        Wishes wishes =
            agree(run.world, {stop_signal, clock_wants_save(run), is_writing(run.saves.async)});
        if (!wishes.writing) end_save(run);
        run.stopped = wishes.stop;
        if (run.stopped) break;
        if (is_time(run, c.verify_every, false))
            check_ranks(run, t);

        // Look, and save. An evaluation may take minutes: a signal ends it too.
        if (is_time(run, c.eval_every, true))
            report_evaluation(run, t);
        if (run.stopped) break;
        if (run.best_step == run.step)
            keep_best(run, t);
        if (is_time(run, c.sample_every, false))
            print_samples(run, t);
        if (run.buddies && is_time(run, c.buddy_every, false))
            save_in_memory(run, t);
        if (wishes.save || is_time(run, c.save_every, false))
            save(run, t);
    }
    t.stopped = nullptr;
    save_at_the_end(run, t);
    bool on_disk = run.saves.step == run.step;
    if (run.buddies && on_disk) remove_buddies(run.world, *run.buddies);

    // A signal in the last step or in its save still leaves out what comes after the loop.
    if (!run.stopped) run.stopped = agree(run.world, {stop_signal, false}).stop;
    if (!is_first(run)) return;

    // Close what the run has written, and say where it stands.
    report_profile(run);
    note(run, log_append(run.log, account_json(run.account, run.step, run.log.repeated)));
    report_failure(run, log_close(run.log));
    finish_line(run.log);
    if (run.stopped)
        printf("stopped by %s at step %lld%s\n", signal_name(run.stopped).c_str(),
               (long long)run.step, run.saves.step == run.step ? ": --resume goes on" : "");
}

// One rank's whole run.
template <typename T, typename S>
void run_training(Run& run, S where) {
    const Config& c = run.config;
    Trainer<T, S> t;
    t.ctx.where = where;
    t.offload_folder = c.offload_to;

    // Plan: the actions of a step, and a place for every byte. Nothing is allocated yet.
    run.layout = layout_at(choose_layout(c, run.shape), run.world.rank);
    std::vector<PlanOptions> plans = choose_plans(run);
    std::string levels = choose_recompute<T>(run, plans, where);
    trainer_place(t, run.shape, plans, run.layout);
    or_die(check_pieces(plans[0].stored, t.model, run.layout));

    // Print it, or end here: --explain has all that it says, and a plan may be beyond --memory.
    if (is_first(run))
        printf("%s%s", parameters_text(t.model).c_str(), levels.c_str());
    run.draft_bytes = draft_bytes<T>(run, plans, where);
    if (c.explain) print_plan(run, t, plans);
    check_bound<T>(run, where);
    if (c.explain) return;
    check_plans_of_all_ranks(run, plans, t.model);

    // Name the attention kernels: which ones run depends on the GPU and on the heads.
    std::string kernels = attention_backend<T>(attention_shape(run.shape, 1, 1, 1), where);
    if (!kernels.empty() && is_first(run))
        printf("attention: %s\n", kernels.c_str());

    // Start: join the other ranks, allocate, load or draw the weights.
    check_memory(run, t);
    size_t offloaded = check_offload(run, t);
    if (writes_folder(c)) check_disk(run, t, offloaded);
    join_groups(run, t);
    open_buddies(run);
    set_training(run, t);
    trainer_allocate(t);
    autotune(run, t);
    t.replays = c.graphs;
    t.document_end = run.document_end;
    load_weights(run, t);
    std::shared_ptr<Draft> draft = open_draft<T>(run, plans, where);
    run.draft = draft.get();
    open_log(run, t);
    run.first_step = run.step;
    run.started = clock_seconds();
    run.account.turn_to(Work::REST);

    // Evaluate alone, or train.
    if (c.eval) {
        report_evaluation(run, t);
        return trainer_free(t);
    }

    if (run.step < c.steps)
        train(run, t);

    // Who sends a signal does not wait for samples and exports.
    if (run.stopped) return trainer_free(t);

    // Leave what was asked for.
    leave_texts(run, t);
    bool exported = write_export(run, t);
    report_end(run, exported);
    trainer_free(t);
}

// ----------------------------------------------------------------------------
// where ranks run: threads or processes, on CPUs or GPUs

// For the CPU `make` compiles this file in three parts, side by side: training in bf16, in fp16,
// and all the rest. nvcc takes it whole.
#if defined(PART_BF16)
template void run_training<bf16>(Run&, Cpu);
#elif defined(PART_FP16)
template void run_training<fp16>(Run&, Cpu);
#else
#ifdef PART_REST
extern template void run_training<bf16>(Run&, Cpu);
extern template void run_training<fp16>(Run&, Cpu);
#endif

// The only place that turns --precision into a type.
template <typename S> void run_rank(Run& run, S where) {
    const std::string& precision = run.config.precision;
    if (precision == "bf16") return run_training<bf16>(run, where);
    if (precision == "fp16") return run_training<fp16>(run, where);
    run_training<float>(run, where);
}

// Run body(run) as each rank of this process: itself, or --local-ranks threads.
template <typename F> bool run_ranks(Run& run, F body) {
    const Config& c = run.config;
    bool threads = c.local_ranks > 1 && !c.explain;

    // Say how many ranks there are, and along which axes.
    if (is_first(run) && (threads || run.world.size > 1))
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
        // The first rank's end is the program's.
        if (is_first(mine)) {
            run.stopped = mine.stopped;
            run.failed = mine.failed;
        }
    };
    // A rank that hangs is named, and must not keep the process.
    LocalSettings settings;
    settings.timeout_s = c.watchdog;
    settings.leave_s = 10; // others have ended by then
    return run_local_ranks(c.local_ranks, settings, rank) == 0;
}

// Say where the run takes place, for its speed depends on it.
static bool run_on_cpu(Run& run) {
    const Config& c = run.config;
    LLMC_USER_CHECK(!c.graphs || c.explain,
                    "--graphs is for GPUs, and this run is on the CPU: leave it out");
    if (is_first(run))
        printf("train_gpt: %s, %s, on the CPU with %d threads, %s\n", printable(c.model).c_str(),
               c.precision.c_str(), threads_here(Cpu{}), matmul_backend());
    return run_ranks(run, [](Run& rank) { run_rank(rank, Cpu{}); });
}

#if LLMC_KERNELS
// A process of several has a GPU to itself, and NCCL; threads share the first one.
static void join_gpus(Run& run) {
    if (!HAS_NCCL || run.world.size == 1) return;
    or_die(take_gpu(run.world));
    or_die(no_gpu_because()); // of several GPUs the one taken may be older
    run.world.fixed_order = run.config.fixed_order;
    run.world = nccl_attach(run.world);
}

static bool run_on_gpu(Run& run) {
    const Config& c = run.config;

    // Ask for a GPU. Processes have one each, or none does; --explain needs none.
    std::string why = no_gpu_because();
    bool there = why.empty();
    bool plans_only = c.explain && c.device == "cuda";
    LLMC_USER_CHECK(there || plans_only || c.device == "auto",
                    "--device cuda: %s: use --device cpu", why.c_str());
    int64_t with_gpu = there;
    all_reduce_sum(run.world, &with_gpu, 1, Cpu{});
    there = with_gpu == run.world.size;

    // Without one, run on the CPU.
    if (!there && !plans_only) {
        if (is_first(run))
            printf("%s: on the CPU\n", why.empty() ? "another process has no GPU" : why.c_str());
        return run_on_cpu(run);
    }

    // Run on the GPU, each rank on a stream of its own.
    if (there && !c.explain) join_gpus(run);
    // --explain plans for a GPU that need not be there.
    std::string name = there ? device_name(cudaStream_t{}) : "a GPU that is not here";
    if (is_first(run))
        printf("train_gpt: %s, %s, on %s\n", printable(c.model).c_str(), c.precision.c_str(),
               name.c_str());
    return run_ranks(run, [&](Run& rank) {
        cudaStream_t stream = there ? open_stream(cudaStream_t{}) : nullptr;
        run_rank(rank, stream);
        if (there) close_stream(stream);
    });
}
#else
static bool run_on_gpu(Run& run) { return run_on_cpu(run); } // the program has no kernels
#endif

// Processes need NCCL to meet on GPUs.
static bool run_where_wanted(Run& run) {
    bool can = HAS_NCCL || run.world.size == 1;
    if (LLMC_KERNELS && !can && run.config.device == "auto" && is_first(run))
        printf("built without NCCL (install libnccl-dev): processes run on the CPU\n");
    return can && run.config.device != "cpu" ? run_on_gpu(run) : run_on_cpu(run);
}

// Under mpirun or srun the processes of the job are the ranks.
static void join_processes(Run& run, RankInfo* info, int* argc, char*** argv) {
    // Ask the launchers' variables, without MPI: a process alone does not start it.
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

// Communicators must be gone before MPI ends.
static void leave_processes(Run& run) {
    bool joined = run.world.mpi != nullptr;
    run.world = {}; // its group is freed before MPI ends
    if (joined) mpi_leave();
}

// --plan auto: choose the layout before anything else depends on it; false: it was only asked.
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

// Text to token shards; no model is needed, and one process does it.
static void prepare_data(Run& run) {
    if (!is_first(run)) return;
    open_tokenizer(run);
    or_die(prepare(run.config, run.tokenizer, program_folder()));
}

// OpenMP's threads spin while they wait, and take the cores from threads that work when another
// program wants some of them: a step of 13 ms had a mean of 557 (dev/LOG.md). How long they spin is
// read when the library is loaded, so the program starts once more. If exec fails, they spin on.
static void spin_briefly(char** argv) {
    (void)argv;
#ifdef _OPENMP
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY")) return;
    setenv("GOMP_SPINCOUNT", "1000", 1);
    execv(program_path().c_str(), argv);
#endif
}

// Do what the command line asks for; false: not all of it was done.
static bool run_command(Run& run) {
    Config& c = run.config;
    if (c.help || c.version) {
        if (is_first(run))
            fputs(c.help ? help_text(terminal_columns()).c_str() : version_text().c_str(), stdout);
        return true;
    }

    // Preparing data needs no model.
    if (!c.prepare.empty()) {
        prepare_data(run);
        return true;
    }

    // The tokenizer, for the vocabulary may follow it; the model; whether flags and ranks agree.
    take_ds_config(run);
    adopt_checkpoint(run);
    open_tokenizer(run);
    follow_tokenizer(run);
    run.shape = choose_shape(c);
    grow_vocabulary(run);
    bool goes_on = c.resume && !checkpoint_steps(c.out).empty(); // with what it took then
    std::string taken = goes_on || !file_type(c.model) ? "" : take_loss_defaults(c);
    if (is_first(run) && !taken.empty())
        printf("%s\n", taken.c_str());
    if (!plan_ahead(run)) return true;
    or_die(config_check(c, run.shape, run.world.size));
    add_adapters(c, run.shape);
    or_die(refuse_idle_flags(c));
    or_die(choose_loss_scaling(run));
    for (const std::string& text : config_notes(c))
        note(run, text);

    // Ranks with other flags, or of another program, would wait for each other for ever.
    check_same(run.world, "the command line", json_text(config_json(c)));
    if (run.world.size > 1)
        check_same(run.world, "the program", program_bytes());

    // Text in, and files out: whatever can fail at the end of a run fails here.
    if (!c.export_dir.empty()) prepare_export(run);
    if (!c.timeline.empty() && is_first(run)) or_die(try_file("timeline", c.timeline));
    if (!c.profile.empty() && is_first(run)) or_die(try_file("profile", c.profile));
    take_folder(run);
    open_tasks(run);
    open_chat(run);
    if (!c.explain && wants_validation(c)) open_data(run);
    if (!c.explain && has_rollouts(c)) open_exercises(run);
    choose_texts(run);

    return run_where_wanted(run);
}

int main(int argc, char** argv) {
    spin_briefly(argv);

    // Lines appear as they are written, also through a pipe.
    setvbuf(stdout, nullptr, _IOLBF, 0);

    // Large buffers go back to the system when they are freed: the peak is what the plan says.
    mallopt(M_MMAP_THRESHOLD, 1 << 20);

    // A file that reaches a limit of size is an error like a full disk's, and no signal.
    signal(SIGXFSZ, SIG_IGN);

    // Join the other processes first: a rank must know its number before it complains.
    RankInfo info;
    Run run;
    join_processes(run, &info, &argc, &argv);
    or_die(parse_arguments(run.config, argc, argv));
    info.timeout_s = run.config.watchdog;
    bool good = run_command(run);
    leave_processes(run);

    // A signal's status is a shell's: 128 and its number.
    if (run.stopped) return 128 + run.stopped;
    return good && !run.failed ? 0 : 1;
}
#endif
