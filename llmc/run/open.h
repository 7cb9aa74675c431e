// open.h - opening a model: flags, shape and text are chosen, a plan is placed, weights are read
//   choose_model()   the checkpoint's flags, the tokenizer, the shape
//   check_run()      what flags only get wrong together, and whether all ranks have the same
//   place_rank()     the plans of a rank, and a place for every byte; nothing is allocated
//   open_rank()      is there room? join the other ranks, and allocate
//   load_model()     the weights that --model names
#pragma once
#include "../action.h"
#include "../arena.h"
#include "../comm/comm.h"
#include "../context.h"
#include "../context_parallel.h"
#include "../io/checkpoint_load.h"
#include "../io/config.h"
#include "../io/config_check.h"
#include "../io/dataloader.h"
#include "../io/explain.h"
#include "../io/files.h"
#include "../io/huggingface.h"
#include "../io/likelihood.h"
#include "../io/machines.h"
#include "../io/model_files.h"
#include "../io/model_shape.h"
#include "../io/one_reader.h"
#include "../io/plan_flags.h"
#include "../layers.h"
#include "../layout.h"
#include "../ops/loss_scale.cuh"
#include "../ops/matmul.cuh"
#include "../ops/memory.h"
#include "../ops/rand.h"
#include "../ops/types.h"
#include "../optimizer.h"
#include "../parameters.h"
#include "../planner/machine_here.h"
#include "../sharding.h"
#include "../step.h"
#include "../comm/text.h"
#include "../trainer.h"
#include "../transfers.h"
#include "choose.h"
#include "folder.h"
#include "limits.h"
#include "report.h"
#include "run.h"

namespace llmc {

// ----------------------------------------------------------------------------
// before there is a trainer

// Complete the flags from the checkpoint; the command line takes precedence. Then read the model's
// small files once for all processes, open the tokenizer, whose size sets the vocabulary of new
// weights without --vocab, and choose the model's shape.
inline void choose_model(Run& run) {
    Config& c = run.config;
    adopt_checkpoint(run);
    share_small_files(run.world, c);
    open_tokenizer(run);
    if (has_new_weights(c) && was_given(c, "tokenizer") && !was_given(c, "vocab"))
        c.vocab = run.tokenizer.vocab_size;
    run.shape = choose_shape(c);
}

// Refuse flags that cannot work together, after config_check(), and note those that do nothing.
// Ranks with other flags, or of another program, would wait for each other.
inline void agree_on_flags(Run& run) {
    const Config& c = run.config;
    or_die(refuse_idle_flags(c));
    LossScaling scaling;
    or_die(choose_loss_scaling(c, &scaling));
    for (const std::string& text : config_notes(c))
        note(run, text);
    check_same(run.world, "the command line", json_text(config_json(c)));
    if (run.world.size > 1)
        check_same(run.world, "the program", program_bytes());
}

// Check that all flags fit together, on all ranks, and complete the shape.
inline void check_run(Run& run) {
    Config& c = run.config;
    or_die(whose_flag(c, config_check(c, run.shape, run.world.size)));
    if (run.complete_shape) run.complete_shape(c, run.shape);
    agree_on_flags(run);
    open_chat(run);
}

// Try every file that will be written: an error at the end of the run would come too late.
inline void try_outputs(Run& run) {
    const Config& c = run.config;
    if (!c.export_dir.empty()) prepare_export(run);
    if (!c.timeline.empty() && is_first_rank(run)) or_die(try_file("timeline", c.timeline));
    take_folder(run);
}

// ----------------------------------------------------------------------------
// a rank's trainer

// Plan: the actions of a step, and a place for every byte. Returns the options of the plans.
template <typename T, typename S>
std::vector<PlanOptions> place_rank(Run& run, Trainer<T, S>& t, S where) {
    const Config& c = run.config;
    t.ctx.where = where;
    t.offload.folder = c.offload_to;
    sizes_of_gpu = explains_gpu(c);

    run.layout = layout_at(choose_layout(c, run.shape), run.world.rank);
    std::vector<PlanOptions> plans = choose_plans(run);
    std::string levels = choose_recompute<T>(run, plans, where);
    trainer_place(t, run.shape, plans, run.layout);
    or_die(check_pieces(plans[0].stored, t.model, run.layout));
    bool generates = run.plans.generate >= 0 || run.plans.rollout >= 0;
    or_die(check_latents(run.shape, !std::is_same_v<S, Cpu>, generates));

    // Print the model and its levels of recomputation.
    say(run, parameters_text(t.model), levels);
    return plans;
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
    Window window = t.data.window;
    t.data.window = [&](uint64_t sample, int* tokens, int* targets) {
        for (size_t i = 0; i < t.plans[t.plan].T; i++)
            tokens[i] = targets[i] = int(random_block(0, sample, i)[0] % t.model.shape.V);
        return std::string();
    };

    // Run the training step, the evaluation, and one plan for each length of a task's rows.
    const Memory& device = t.arena.device();
    std::vector<int> plans = {run.plans.train, run.plans.evaluate};
    for (const ScoreGroup& group : run.questions.groups)
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
    t.data.window = window;
}

// Give the trainer the command line's hyperparameters. The learning rate is set step by step.
template <typename T, typename S>
void set_hyper(const Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    t.hyper.beta1 = float(c.beta1);
    t.hyper.beta2 = float(c.beta2);
    t.hyper.eps = float(c.eps);
    t.hyper.weight_decay = float(c.weight_decay);
    t.hyper.clip = float(c.clip);
    t.hyper.ema = c.ema;
    Optimizer optimizer;
    or_die(read_optimizer(c, &optimizer, &t.hyper.muon));
    t.takes_average = c.use_ema;
    or_die(choose_loss_scaling(c, &t.hyper.loss_scaling));
    t.hyper.seed = uint64_t(c.seed);
}

// Print the plan (--explain), or check that there is room, join the other ranks and allocate.
// Returns whether there is something to run.
template <typename T, typename S>
bool open_rank(Run& run, Trainer<T, S>& t, const std::vector<PlanOptions>& plans) {
    // Print before the check of --memory: then a plan that is refused is on the screen too.
    const Config& c = run.config;
    if (c.explain) print_plan(run, t, plans);
    check_bound<T>(run, plans, t.ctx.where);
    if (c.explain) return false;
    check_plans_of_all_ranks(run, plans, t.model);

    // Name the kernels of attention, and the machines.
    std::string kernels =
        context_attention_backend(t.ctx.rank_shape, run.layout, sizeof(T), t.ctx.where);
    std::string machines = machines_text(run.layout, find_machines(run.world));
    if (!kernels.empty())
        say(run, "attention: ", kernels, "\n");
    say(run, machines);
    if (run.world.nccl)
        say(run, nccl_settings_text(environ));

    // Check that there is room, join the other ranks, and allocate.
    check_memory(run, plans, t);
    size_t offloaded = check_offload(run, t);
    if (writes_folder(c)) check_disk(run, t, offloaded);
    join_groups(run, t);
    open_buddies(run);
    set_hyper(run, t);
    trainer_allocate(t);
    autotune(run, t);

    // From here on plans are replayed as graphs (--graphs), and documents are cut.
    run.health.weights = has_new_weights(c) ? concat("new, from --seed ", c.seed) : base_name(c);
    t.graphs.on = c.graphs;
    t.data.document_end = run.data.document_end;
    init_constants(t);
    init_loss_scale(t);
    return true;
}

// Let the trainer read its data. A window that cannot be read ends the run. If the run saves, the
// message adds that its checkpoints are good.
template <typename T, typename S>
void read_data(Run& run, Trainer<T, S>& t) {
    t.data.window = [&run](uint64_t sample, int* tokens, int* targets) {
        std::string wrong = load_window(run.data.train, sample, tokens, targets);
        bool saves = !wrong.empty() && !run.config.out.empty();
        return saves ? wrong + "; what is saved is good: then --resume goes on" : wrong;
    };

    // Print what data is read, and which token ends a document.
    if (run.plans.train >= 0)
        say(run, "data: ", data_text(run.data.train), "\n");
    if (run.data.document_end >= 0)
        say(run, "documents: apart, each ends with token ", run.data.document_end, "\n");
}

// Read the weights that --model names, and draw those that no file holds.
template <typename T, typename S>
void load_model(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    bool drawn = has_new_weights(c);
    mode_t type = drawn ? 0 : file_type(base_name(c));
    if (!c.start.empty())
        or_die_on_all_ranks(run, checkpoint_load_weights(t, c.start));
    else if (type == S_IFDIR)
        or_die_on_all_ranks(run, hf_load_weights(t, c.model, run.dialects));
    else if (type)
        or_die(model_file_load(t, c.model));
    init_weights(t, uint64_t(c.seed), !drawn);
}

} // namespace llmc
