// report.h - what a run tells: validation, tasks, samples, exports, timelines, the plan
#pragma once
#include "../action.h"
#include "../comm/comm.h"
#include "../comm/rank_status.h"
#include "../io/checkpoint.h"
#include "../io/config.h"
#include "../io/core.h"
#include "../io/dataloader.h"
#include "../io/evaluate.h"
#include "../io/explain.h"
#include "../io/files.h"
#include "../io/huggingface.h"
#include "../io/likelihood.h"
#include "../io/logger.h"
#include "../io/machine.h"
#include "../io/mfu.h"
#include "../io/model_files.h"
#include "../io/one_reader.h"
#include "../io/plan_flags.h"
#include "../io/timeline.h"
#include "../model.h"
#include "../ops/matmul.cuh"
#include "../ops/types.h"
#include "../pipeline.h"
#include "../planner/cost.h"
#include "../planner/layer_cost.h"
#include "../planner/machine_here.h"
#include "../planner/predict.h"
#include "../planner/simulator.h"
#include "../recompute.h"
#include "../step.h"
#include "../streams.h"
#include "../comm/text.h"
#include "../trainer.h"
#include "../transfers.h"
#include "../zero.h"
#include "account.h"
#include "async_save.h"
#include "health.h"
#include "run.h"

namespace llmc {

// ----------------------------------------------------------------------------
// validation, tasks, samples, exports

// The loss over the validation samples. All ranks call, and get the sum.
template <typename T, typename S>
Loss evaluate(Run& run, Trainer<T, S>& t) {
    Loss total;
    auto window = [&](uint64_t sample, int* tokens, int* targets) {
        return load_window(run.data.val, sample, tokens, targets);
    };

    if (run.reference.around_validation) run.reference.around_validation(true);
    run_samples(t, run.plans.evaluate, run.data.val_samples, window, [&] {
        Loss loss = plan_loss(t);
        total.sum += loss.sum;
        total.valid += loss.valid;
        total.margin += loss.margin;
        total.correct += loss.correct;
    });

    if (run.reference.around_validation) run.reference.around_validation(false);
    return total;
}

// Compute, print and log the validation loss, and its bits per byte: only these can be compared
// between tokenizers. The line has no step number before the first step.
template <typename T, typename S>
void report_validation(Run& run, Trainer<T, S>& t) {
    if (run.data.val.windows == 0) return;
    Loss loss = evaluate(run, t);
    if (run.end.stopped) return; // a signal has left samples out
    broadcast(run.world, &loss.sum, 1, 0, Cpu{}); // ranks decide by it: give all the same bits

    // Remember the best loss and its step: --keep N,best keeps its weights.
    run.best.last_loss = loss.mean();
    if (loss.mean() < run.best.loss) {
        run.best.loss = loss.mean();
        run.best.step = run.step;
    }
    if (!is_first_rank(run)) return;

    // Print and log the loss, with bits per byte if the text's length is known.
    finish_line(run.log);
    Json line = {{"step", run.step}, {"val_loss", loss.mean()}};
    line["val_tokens"] = loss.valid;
    if (run.step > 0)
        printf("step %lld | ", (long long)run.step);
    printf("val loss %.4f", loss.mean());
    if (run.data.val_bytes) {
        double bits = bits_per_byte(loss.sum, run.data.val_bytes);
        line["bits_per_byte"] = bits;
        printf(" | %.4f bits per byte", bits);
    }

    // Say whether the loss is within four deviations of where others had it.
    if (run.data.expected.count(run.step)) {
        auto [mean, deviation] = run.data.expected.at(run.step);
        double off = (loss.mean() - mean) / deviation;
        line["expected"] = mean;
        printf(" | expected %.4f, %+.1f deviations off: %s", mean, off,
               std::fabs(off) <= 4 ? "inside" : "outside");
    }

    // Preference pairs: add by how much, and how often, the better answer wins.
    if (has_pairs(run.config)) {
        double n = double(std::max<int64_t>(loss.valid, 1));
        line["margin"] = loss.margin / n;
        line["accuracy"] = loss.correct / n;
        printf(" | margin %.4f | accuracy %.3f", loss.margin / n, loss.correct / n);
    }

    // End with what was counted.
    const char* what = has_pairs(run.config) ? "pairs" : "tokens";
    if (run.config.loss == "kto") what = "answers";
    printf(" | %lld %s\n", (long long)loss.valid, what);
    fflush(stdout);
    note(run, log_append(run.log, line));
}

// Score the tasks of --eval: all ranks compute, the first one prints and logs.
template <typename T, typename S>
void report_tasks(Run& run, Trainer<T, S>& t) {
    if (run.questions.groups.empty()) return;
    // Score the candidates group by group: those of about one length share a plan.
    for (const ScoreGroup& group : run.questions.groups)
        score_group(t, group, run.questions.asked.candidates);
    if (!is_first_rank(run) || run.end.stopped) return;

    // Print a table for each task, and log one line for all.
    finish_line(run.log);
    Json line = {{"step", run.step}};
    for (const Task& task : run.questions.asked.tasks) {
        if (task.shots >= 0) continue; // CORE's tasks have one table
        Score score = score_task(task, run.questions.asked.candidates);
        printf("%s", score_text(task, score).c_str());
        score_log(line, task, score);
    }
    printf("%s", core_table(run.questions.asked, &line).c_str());
    fflush(stdout);
    note(run, log_append(run.log, line));
}

// Report all that --eval and --eval-every ask for: the validation loss, and the tasks.
template <typename T, typename S>
void report_evaluation(Run& run, Trainer<T, S>& t) {
    Spend spend(run.clock.account, Work::EVALUATE);
    report_validation(run, t);
    report_tasks(run, t);
}

// Write the export: weights in the format of other programs, Hugging Face folders in files of
// up to 5 GiB. Weights that the run has ruined do not replace an older export. Returns whether
// it was written.
template <typename T, typename S>
bool write_export(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    if (c.export_dir.empty()) return false;
    Spend spend(run.clock.account, Work::EXPORT);
    constexpr size_t FILE_BYTES = size_t(5) << 30;
    std::string wrong = run.plans.train >= 0 ? ruined_weights(run, t) : "";

    // Write it. A merge rounds the sum of weights and adapters: print how much of them is kept.
    MergeSums merged;
    if (wrong.empty())
        wrong = run.exports.file ? run.exports.file(&merged)
                : is_model_file(c.export_dir)
                    ? model_file_export(t, c.export_dir, export_type(c))
                    : hf_export(t, c.export_dir, export_type(c), FILE_BYTES,
                                run.exports.tokenizer, &merged);
    if (c.merge && run.shape.tuned.adapters && is_first_rank(run))
        printf("merged: the file keeps %.3f of what the adapters change%s\n", merged.coefficient(),
               merged.coefficient() < 0.98 ? ": --export-dtype fp32 keeps all" : "");

    // A failure on any rank fails the export: a model that lacks a part is useless.
    wrong = first_error(run.world, wrong);
    if (is_first_rank(run) && !wrong.empty())
        report_failure(run, "--export " + c.export_dir + ": " + wrong);
    return wrong.empty();
}

// The cost model of a run's steps, with its teacher.
template <typename T, typename S>
CostModel costs_of(const Run& run, const Machine& machine, const Model& model, S where) {
    CostModel cost = run_costs<T>(machine, model, where);
    cost.teacher_C = double(run.companions.teacher.C);
    return cost;
}

// The time before each step of a run, by parts, given the options of its training plan.
template <typename T>
Times times_before_step(const Run& run, const PlanOptions& train, const Machine& machine) {
    KnownSteps steps;
    auto all = before_steps(run.config, train, run.shape, run.companions.teacher);
    return before_times<T>(machine, all, run.layout, steps);
}

// The line of a run; "" without --machine, without a second step, or where sampling has no bound.
template <typename T, typename S>
std::string compare_prediction(const Run& run, const Trainer<T, S>& t) {
    const Config& c = run.config;
    bool asked = !c.machine.empty() && !has_open_answers(c);
    if (!asked || run.log.times.empty())
        return "";

    // Simulate the plan that the steps ran.
    Machine machine = machine_asked(c, "--machine", t.ctx.where);
    CostModel cost = costs_of<T>(run, machine, t.model, t.ctx.where);
    const PlanOptions& options = t.plans[size_t(run.plans.train)];
    StepTime step = simulate_layout(run.layout, t.model, options, action_cost(cost, t.model));
    check_ends(step);
    add_before(step, times_before_step<T>(run, options, machine));

    // Each step has its share of the rollouts, which the log leaves out.
    double rollout = run.rollouts.seconds / double(run.step - run.progress.first_step);
    std::vector<double> times = run.log.times;
    for (double& seconds : times)
        seconds += rollout;
    return predicted_text(c.machine, step.seconds, times);
}

// Print the end of a run: what it did, its best validation loss, and where its files are.
template <typename T, typename S>
void report_end(Run& run, const Trainer<T, S>& t, bool exported) {
    const Config& c = run.config;
    if (!is_first_rank(run)) return;
    finish_line(run.log);

    // Sum up the training, where there was any.
    int64_t steps = run.step - run.progress.first_step;
    if (steps > 0) {
        printf("done: %lld steps, %s tokens in %s", (long long)steps,
               count_text(double(steps) * double(c.batch_tokens)).c_str(),
               duration_text(clock_seconds() - run.progress.started).c_str());
        if (std::isfinite(run.best.loss))
            printf(" | best val loss %.4f at step %lld", run.best.loss, (long long)run.best.step);
        printf("\n%s", compare_prediction(run, t).c_str());
    }

    // Context parallelism: with documents apart, one rank's queries may attend to more keys than
    // another's, and the others wait.
    double imbalance = steps > 0 ? run.balance.cp / double(steps) : 0;
    if (imbalance > 1.005)
        printf("cp: attention waits for a rank with %.2f times the mean's pairs of tokens\n",
               imbalance);

    // Experts: a busy one slows the step, and one that no token chooses learns nothing.
    double max_vio = steps > 0 ? run.balance.max_vio / double(steps) : 0;
    if (max_vio > 0)
        printf("experts: the busiest of a block got %.2f times an even share of the tokens\n",
               1 + max_vio);
    if (run.balance.dropped > 0)
        printf("experts: %.1f%% of the choices were dropped: --expert-capacity %g was full\n",
               100 * run.balance.dropped / double(steps), c.expert_capacity);

    // Name the files that exist: without --out there is at most an export.
    std::string saved = c.out + "/" + step_folder(run.step);
    if (steps > 0 && !c.out.empty()) {
        if (file_type(saved))
            printf("  checkpoint  %s\n", saved.c_str());
        printf("  log         %s/log.jsonl\n", c.out.c_str());
    }
    if (exported)
        printf("  export      %s\n", c.export_dir.c_str());
    if (steps > 0)
        printf("  time        %s\n", account_text(run.clock.account).c_str());
}

// ----------------------------------------------------------------------------
// pictures and plans

// The timed actions of all ranks, with times relative to the earliest start. All ranks call.
inline Trace gather_trace(const Run& run) {
    Json mine = Json::array();
    for (const TimedAction& a : run.clock.trace)
        mine.push_back({a.name, a.start, a.end});

    // Find the earliest start of any rank.
    std::vector<Json> ranks;
    double first = INFINITY;
    for (const std::string& text : gather_texts(run.world, mine.dump()))
        for (const Json& a : ranks.emplace_back(Json::parse(text)))
            first = std::min(first, a[1].get<double>());

    // Subtract it.
    Trace all;
    for (const Json& rank : ranks) {
        std::vector<TimedAction>& actions = all.emplace_back();
        for (const Json& a : rank)
            actions.push_back({a[0], a[1].get<double>() - first, a[2].get<double>() - first});
    }
    return all;
}

// Write --timeline: all ranks send their times, and the first one writes the file.
inline void draw_timeline(Run& run) {
    Trace trace = gather_trace(run);
    if (!is_first_rank(run)) return;
    std::string title = layout_text(run.config) + ": the last step";
    report_failure(run, write_timeline(run.config.timeline, trace, title, "rank", "ms"));
}

// Whether to time the next step action by action: --timeline FILE.txt sums up every step, a drawing
// shows the last.
inline bool wants_times(const Run& run) {
    const Config& c = run.config;
    return writes_profile(c) || (!c.timeline.empty() && run.step + 1 == c.steps);
}

// Read the times of the step's actions, after a step of so many seconds: draw the last step, and
// add every step to the profile. The first step does some work once for all, so the profile drops
// it as soon as there is a second one.
template <typename T, typename S>
void take_times(Run& run, Trainer<T, S>& t, double seconds) {
    const Config& c = run.config;
    // Read the laps. On a GPU they are events, all of them past: the step has waited for its loss.
    run.clock.trace = read_laps(t.watch, t.model);
    if (in_stream_order(t))
        run.clock.account.recount(Work::STEPS, Work::WAIT, waiting_seconds(run.clock.trace));
    t.watch.on = false;
    if (run.step == run.progress.first_step + 1)
        run.clock.profile = {};
    if (writes_profile(c))
        profile_add(run.clock.profile, run.clock.trace, seconds);
    else if (!c.timeline.empty() && run.step + 1 == c.steps)
        draw_timeline(run);
}

// Write the table of --timeline FILE.txt, with the first rank's times.
inline void report_profile(Run& run) {
    const Config& c = run.config;
    if (!writes_profile(c) || run.clock.profile.steps == 0)
        return;
    std::string title = concat(layout_text(c), ": rank 0 of ", run.world.size);
    std::string wrong = write_text_file(c.timeline, profile_text(run.clock.profile, title));
    report_failure(run, wrong.empty() ? "" : "--timeline: " + wrong);
}

// Draw --timeline with --explain: the pipeline as its schedule alone would run.
inline void draw_simulation(const Run& run, const Plan& p, const Model& model) {
    std::vector<Schedule> all = schedules_of(p.layout, p.micro_batches);
    all = slots_that_run(all, p.layout, model);
    Simulation s = simulate(all, p.layout.pp.size);

    // Put the bubble into the title. A row is a stage, or a rank with several stages.
    std::string idle = formatted(": ranks are idle %.1f%% of a step", 100 * s.bubble);
    const char* row = p.layout.chunks > 1 ? "pp rank" : "stage";
    or_die(write_timeline(run.config.timeline, simulated_trace(all, s),
                          layout_text(run.config) + idle, row, "forward passes"));
}

// Predict a step for --machine with --explain: returns the simulator's times as text,
// and draws --timeline.
template <typename T, typename S>
std::string predict(const Run& run, const Model& model, const std::vector<PlanOptions>& plans,
                    S where) {
    const Config& c = run.config;
    Machine machine = machine_asked(c, "--machine", where);
    CostModel cost = costs_of<T>(run, machine, model, where);
    const PlanOptions& train = plans[size_t(run.plans.train)];
    Times before = times_before_step<T>(run, train, machine);
    Prediction p = predict_step(run.layout, model, train, cost, double(c.batch_tokens), before);
    if (!c.timeline.empty())
        or_die(write_timeline(c.timeline, p.trace, layout_text(c) + " on " + c.machine,
                              "pp rank", "ms"));
    return p.text;
}

// Say whether ranks fit the machine that --machine names, and its host. sharers: ranks of a card.
inline std::string fits_machine_text(const Machine& machine, int sharers, double rank_bytes,
                                     double host_bytes) {
    double room = room_of_card(machine) / sharers;
    double host_room = room_of_host(machine) / sharers;
    std::string has = concat(machine.name, ", which has ", bytes_text(room), " for a rank");
    if (rank_bytes > room) return "does not fit " + has + "\n";
    if (host_bytes <= host_room) return "fits " + has + "\n";
    return concat("does not fit ", machine.name, ", whose host has ", bytes_text(host_room),
                  " for a rank\n");
}

// Print the output of --explain: the run, its ranks, their memory, and the actions of a step.
template <typename T, typename S>
void print_plan(const Run& run, const Trainer<T, S>& t, const std::vector<PlanOptions>& options) {
    if (!is_first_rank(run)) return; // one rank's text covers all ranks
    const Config& c = run.config;
    const Model& model = t.model;
    bool trains = run.plans.train >= 0;
    int plan = std::max(0, trains ? run.plans.train : run.plans.evaluate);

    // Refuse before drawing: a run that ends here leaves no timeline.
    LLMC_USER_CHECK(c.layer < model.layers(), "--explain %d: the model has layers 0 to %d",
                    int(c.layer), model.head());
    bool timed = !c.machine.empty() && !has_open_answers(c);
    if (!c.timeline.empty() && trains && !timed)
        draw_simulation(run, t.plans[plan], model);

    // Describe the run, and its ranks if there are several.
    std::string text;
    size_t own = companion_bytes(run, options, run.world.rank, t.ctx.where);
    size_t most = t.arena.device().bytes + own; // of any rank

    // Count what stands beside the plans, by stage.
    std::vector<size_t> beside;
    for (int pp = 0; own && pp < run.layout.pp.size; pp++)
        beside.push_back(companion_bytes(run, options, first_rank_of(run.layout, pp), t.ctx.where));
    if (trains)
        text = run_text(model, size_t(c.seq), c.steps, c.batch_tokens, rank_count(c));
    if (rank_count(c) > 1) {
        std::string ranks;
        or_die(cluster_text<T>(run.layout, options, model, t.ctx.where, &ranks, &most, beside));

        // Add the scratch of sums in rank order: CUDA's pool holds it, not the arena.
        size_t scratch = fixed_order_scratch<T>(run.layout, options[0], model);
        if (c.fixed_order)
            ranks += concat("  and sums in rank order up to ", bytes_text(double(scratch)),
                            " of scratch\n");
        text += concat(ranks, "rank 0 of ", rank_count(c), "\n");
    }
    if (trains && timed)
        text += predict<T>(run, model, options, t.ctx.where);

    // Describe memory: the arena, then what the run takes beside it. Moves take the machine's time,
    // or that of PCIe 4 and of a fast disk.
    Machine machine = {};
    if (!c.machine.empty()) machine = machine_asked(c, "--machine", t.ctx.where);
    text += memory_text(t.arena, t.plans, model, machine);
    if (c.save_async && trains)
        text += memory_line("copy for a save", snapshot_bytes(t), 0, "in the host's memory");
    for (const Companion& other : run.companions.all)
        text += memory_line(other.name.c_str(), other.bytes(run, options, run.world.rank), 0,
                            other.parts.c_str());

    // --buddy holds two files of this size, and two more while a save replaces them.
    if (!c.buddy.empty() && trains)
        text += memory_line("files of --buddy", 4 * snapshot_bytes(t), 0,
                            "in --buddy: its own and a neighbour's, twice in a save");

    // Describe the logits, attention over several ranks, and which GPUs the run would fit. On a CPU
    // the workspace above is this one's, so for the GPU count the largest rank again, with a GPU's.
    text += logits_text<T>(t.plans[plan], model);
    text += context_text<T>(t.plans[plan], model);
    if (std::is_same_v<S, Cpu> && !sizes_of_gpu) {
        text += concat("the workspace is that of ", threads_here(Cpu{}), " threads on this CPU\n");
        sizes_of_gpu = true;
        std::string ranks;
        or_die(cluster_text<T>(run.layout, options, model, t.ctx.where, &ranks, &most, beside));
        sizes_of_gpu = false;
    }
    double state = zero_bytes(parameter_bytes<T>(options[size_t(plan)], model), 0, 1);
    text += fits_text(double(most), state * double(parameter_count(model)));
    if (explains_gpu(c)) {
        double host = double(t.arena.memory[int(Tier::HOST)].bytes);
        text += fits_machine_text(machine, sharers_of_card(c), double(most), host);
    }

    // List the actions: those of one layer, or all.
    if (c.layer >= 0) {
        text += concat("actions of layer ", c.layer, ", first micro-batch\n",
                       layer_text(t.arena, t.plans[plan], model, plan, int(c.layer)));
    } else {
        text += "actions of a step, kind(micro-batch,layer)\n" + plan_text(t.plans[plan], model);
        text += legend_text();
    }
    fputs(text.c_str(), stdout);
}

// Measure the peak that MFU is a share of, for all ranks together. Threads as ranks add up only as
// far as each has cores of its own; on one GPU they take turns.
template <typename T, typename S>
void measure_peak(Run& run, S where) {
    // Measure on the first rank, while the others wait at the first collective.
    if (run.plans.train < 0 || !is_first_rank(run))
        return;
    Spend spend(run.clock.account, Work::START);
    Peak peak = machine_peak<T>(where);
    int cores = std::max(1, int(std::thread::hardware_concurrency()) / threads_here(Cpu{}));
    int at_once = std::is_same_v<S, Cpu> ? std::min(run.world.size, cores) : 1;
    run.clock.peak = peak.flops * (run.world.local ? at_once : run.world.size);
    printf("mfu: (6 x parameters + 6 L NH HS T) FLOPs a token, against %.0f GFLOP/s in %s: %s\n",
           run.clock.peak / 1e9, run.config.precision.c_str(), peak.says.c_str());
}

} // namespace llmc
