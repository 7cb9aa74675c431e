// report.h - what a run tells: validation, tasks, samples, exports, timelines, the plan
#pragma once
#include "../io/explain.h"
#include "../io/predict.h"
#include "../io/mfu.h"
#include "reference_point.h"

namespace llmc {

// ----------------------------------------------------------------------------
// validation, tasks, samples, exports

// The loss over the validation samples: all ranks take part, and all have the sum.
template <typename T, typename S>
Loss evaluate(Run& run, Trainer<T, S>& t) {
    Loss total;
    auto window = [&](uint64_t sample, int* tokens, int* targets) {
        return load_window(run.val, sample, tokens, targets);
    };
    References of_training = t.references;
    double point_of_training = run.reference_point;
    take_validation_references(run, t);
    run_samples(t, run.evaluate_plan, run.val_samples, window, [&] {
        Loss loss = plan_loss(t);
        total.sum += loss.sum;
        total.valid += loss.valid;
        total.margin += loss.margin;
        total.correct += loss.correct;
    });
    t.references = of_training;
    run.reference_point = point_of_training;
    return total;
}

// Bits per byte can be compared between tokenizers, the loss cannot. A loss of weights that no step
// of this run has changed has no step in front.
template <typename T, typename S>
void report_validation(Run& run, Trainer<T, S>& t) {
    if (run.val.windows == 0) return;
    Loss loss = evaluate(run, t);
    if (run.stopped) return; // in the middle: the loss is of some samples only
    broadcast(run.world, &loss.sum, 1, 0, Cpu{}); // ranks decide by it

    // Remember the best: its step's weights are kept.
    run.val_loss = loss.mean();
    if (loss.mean() < run.best_loss) {
        run.best_loss = loss.mean();
        run.best_step = run.step;
    }
    if (!is_first(run)) return;

    // Print and log the same numbers.
    finish_line(run.log);
    nlohmann::json line = {{"step", run.step}, {"val_loss", loss.mean()}};
    line["val_tokens"] = loss.valid;
    if (run.step > 0)
        printf("step %lld | ", (long long)run.step);
    printf("val loss %.4f", loss.mean());
    if (run.val_bytes) {
        double bits = bits_per_byte(loss.sum, run.val_bytes);
        line["bits_per_byte"] = bits;
        printf(" | %.4f bits per byte", bits);
    }
    // Say how often the better answer wins, and by how much.
    if (has_pairs(run.config)) {
        double n = double(std::max<int64_t>(loss.valid, 1));
        line["margin"] = loss.margin / n;
        line["accuracy"] = loss.correct / n;
        printf(" | margin %.4f | accuracy %.3f", loss.margin / n, loss.correct / n);
    }
    const char* what = has_pairs(run.config) ? "pairs" : "tokens";
    if (run.config.loss == "kto") what = "answers";
    printf(" | %lld %s\n", (long long)loss.valid, what);
    fflush(stdout);
    note(run, log_append(run.log, line));
}

// All ranks score; the first prints and logs.
template <typename T, typename S>
void report_tasks(Run& run, Trainer<T, S>& t) {
    if (run.score_groups.empty()) return;
    // Candidates of about one length share a plan.
    for (const ScoreGroup& group : run.score_groups)
        score_group(t, group, run.tasks.candidates);
    if (!is_first(run) || run.stopped) return;

    // Print a table for each task, and log one line for all.
    finish_line(run.log);
    nlohmann::json line = {{"step", run.step}};
    for (const Task& task : run.tasks.tasks) {
        Score score = score_task(task, run.tasks.candidates);
        printf("%s", score_text(task, score).c_str());
        score_log(line, task, score);
    }
    fflush(stdout);
    note(run, log_append(run.log, line));
}

// Everything that --eval and --eval-every ask for.
template <typename T, typename S>
void report_evaluation(Run& run, Trainer<T, S>& t) {
    Spend spend(run.account, Work::EVALUATE);
    report_validation(run, t);
    report_tasks(run, t);
}

// Write one file for llama.cpp. It is named as the model is: the last word of --model.
template <typename T, typename S>
std::string export_gguf(Run& run, Trainer<T, S>& t, MergeSums* merged) {
    const Config& c = run.config;
    bool known = vocab_matches(run) && gguf_no_tokenizer(run.tokenizer).empty();
    std::string name = std::filesystem::path(export_folder(c.model)).filename();
    return gguf_export(t, c.export_dir, gguf_type(c.export_dtype),
                       known ? &run.tokenizer : nullptr, run.exported, name, merged);
}

// Weights in the layout of other programs; Hugging Face folders in files of 5 GiB. Weights that
// the run has ruined do not replace an export that is there. Returns whether it is written.
template <typename T, typename S>
bool write_export(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    if (c.export_dir.empty()) return false;
    Spend spend(run.account, Work::EXPORT);
    constexpr size_t FILE_BYTES = size_t(5) << 30;
    std::string wrong = run.train_plan >= 0 ? ruined_weights(run, t) : "";
    bool adapters = run.shape.adapters && !c.merge; // alone

    // Write, and say what a merge has kept.
    MergeSums merged;
    if (wrong.empty())
        wrong = adapters ? export_adapters(t, c.export_dir, export_type(c), c.model)
                : is_gguf(c.export_dir) ? export_gguf(run, t, &merged)
                : is_model_file(c.export_dir)
                    ? model_file_export(t, c.export_dir, export_type(c))
                    : hf_export(t, c.export_dir, export_type(c), FILE_BYTES, run.exported, &merged);
    if (c.merge && is_first(run))
        printf("merged: the file keeps %.3f of what the adapters change%s\n", merged.coefficient(),
               merged.coefficient() < 0.98 ? ": --export-dtype fp32 keeps all" : "");

    // One rank's failure is everyone's: a model in parts is none.
    wrong = first_error(run.world, wrong);
    if (is_first(run) && !wrong.empty())
        report_failure(run, "--export " + c.export_dir + ": " + wrong);
    return wrong.empty();
}

// Close the run: what it did, its best validation loss, and where its files are.
inline void report_end(Run& run, bool exported) {
    const Config& c = run.config;
    if (!is_first(run)) return;
    finish_line(run.log);

    // Sum up the training, where there was any.
    int64_t steps = run.step - run.first_step;
    if (steps > 0) {
        printf("done: %lld steps, %s tokens in %s", (long long)steps,
               count_text(double(steps) * double(c.batch_tokens)).c_str(),
               duration_text(clock_seconds() - run.started).c_str());
        if (std::isfinite(run.best_loss))
            printf(" | best val loss %.4f at step %lld", run.best_loss, (long long)run.best_step);
        printf("\n");
    }

    // One rank's queries may see more keys than another's, as documents lie.
    double imbalance = steps > 0 ? run.cp_imbalance / double(steps) : 0;
    if (imbalance > 1.005)
        printf("cp: attention waits for a rank with %.2f times the mean's pairs of tokens\n",
               imbalance);

    // A busy expert is slow, and experts that nobody chooses learn nothing.
    double max_vio = steps > 0 ? run.max_vio / double(steps) : 0;
    if (max_vio > 0)
        printf("experts: the busiest of a block got %.2f times an even share of the tokens\n",
               1 + max_vio);

    // Name what is there: a run without --out has left nothing but an export.
    std::string saved = c.out + "/" + step_folder(run.step);
    if (steps > 0 && !c.out.empty()) {
        if (file_type(saved))
            printf("  checkpoint  %s\n", saved.c_str());
        printf("  log         %s/log.jsonl\n", c.out.c_str());
    }
    if (exported)
        printf("  export      %s\n", c.export_dir.c_str());
    if (steps > 0)
        printf("  time        %s\n", account_text(run.account).c_str());
}

// ----------------------------------------------------------------------------
// pictures and plans

// One rank's timed actions, on every rank.
inline std::vector<TimedAction> broadcast_trace(const Comm& world, std::vector<TimedAction> trace,
                                                int from) {
    // Names have a fixed length on the way; longer ones are cut.
    int64_t count = int64_t(trace.size());
    broadcast(world, &count, 1, from, Cpu{});
    trace.resize(size_t(count));
    for (TimedAction& a : trace) {
        char name[256] = {};
        snprintf(name, sizeof(name), "%s", a.name.c_str());
        broadcast(world, reinterpret_cast<unsigned char*>(name), sizeof(name), from, Cpu{});
        broadcast(world, &a.start, 1, from, Cpu{});
        broadcast(world, &a.end, 1, from, Cpu{});
        a.name = name;
    }
    return trace;
}

// The timed actions of all ranks, from the first one's start on. All ranks call it.
inline Trace gather_trace(const Run& run) {
    Trace all;
    for (int r = 0; r < run.world.size; r++)
        all.push_back(broadcast_trace(run.world, run.trace, r));

    // Count time from the earliest start of any rank.
    double first = INFINITY;
    for (auto& rank : all)
        for (TimedAction& a : rank)
            first = std::min(first, a.start);
    for (auto& rank : all)
        for (TimedAction& a : rank) {
            a.start -= first;
            a.end -= first;
        }
    return all;
}

// All ranks give their times; the first writes the file.
inline void draw_timeline(Run& run) {
    Trace trace = gather_trace(run);
    if (!is_first(run)) return;
    std::string title = layout_text(run.config) + ": the last step";
    report_failure(run, write_timeline(run.config.timeline, trace, title, "rank", "ms"));
}

// Whether the step that comes is timed action by action: all are, or the last.
inline bool wants_times(const Run& run) {
    const Config& c = run.config;
    return !c.profile.empty() || (!c.timeline.empty() && run.step + 1 == c.steps);
}

// After a step of so many seconds: read its actions' times, draw the last step's, add up all. The
// first step also makes what later ones find ready: the profile has it only where it is alone.
template <typename T, typename S>
void take_times(Run& run, Trainer<T, S>& t, double seconds) {
    const Config& c = run.config;
    // On a GPU the laps are events, which are over: the step has waited for its loss.
    run.trace = read_laps(t.watch, t.model);
    t.watch.on = false;
    if (!c.timeline.empty() && run.step + 1 == c.steps)
        draw_timeline(run);
    if (run.step == run.first_step + 1)
        run.profile = {};
    if (!c.profile.empty())
        profile_add(run.profile, run.trace, seconds);
}

// Write --profile's table, of the first rank.
inline void report_profile(Run& run) {
    const Config& c = run.config;
    if (c.profile.empty() || run.profile.steps == 0)
        return;
    std::string title = concat(layout_text(c), ": rank 0 of ", run.world.size);
    std::string wrong = write_text_file(c.profile, profile_text(run.profile, title));
    report_failure(run, wrong.empty() ? "" : "--profile: " + wrong);
}

// --timeline with --explain: the pipeline's simulation.
inline void draw_simulation(const Run& run, const Plan& p) {
    std::vector<Schedule> all = schedules_of(p.layout, p.micro_batches);
    Simulation s = simulate(all, p.layout.pp.size);

    // Title it with the bubble; a row is a stage, or a rank that has several.
    char idle[64];
    snprintf(idle, sizeof(idle), ": ranks are idle %.1f%% of a step", 100 * s.bubble);
    const char* row = p.layout.chunks > 1 ? "pp rank" : "stage";
    or_die(write_timeline(run.config.timeline, simulated_trace(all, s),
                          layout_text(run.config) + idle, row, "forward passes"));
}

// --machine with --explain: the step as the simulator times it, and its timeline.
template <typename T>
std::string predict(const Run& run, const Model& model, const PlanOptions& options) {
    const Config& c = run.config;
    CostModel cost;
    or_die(machine_named(&cost.machine, c.machine));
    cost.element = sizeof(T);
    Prediction p = predict_step(run.layout, model, options, cost, double(c.batch_tokens));
    if (!c.timeline.empty())
        or_die(write_timeline(c.timeline, p.trace, layout_text(c) + " on " + c.machine,
                              "pp rank", "ms"));
    return p.text;
}

// Print what --explain tells: the run, its ranks, memory, and the actions of a step.
template <typename T, typename S>
void print_plan(const Run& run, const Trainer<T, S>& t, const std::vector<PlanOptions>& options) {
    if (!is_first(run)) return; // it speaks of all ranks
    const Config& c = run.config;
    const Model& model = t.model;
    bool trains = run.train_plan >= 0;
    int plan = std::max(0, trains ? run.train_plan : run.evaluate_plan);

    // Refuse before drawing: a run that ends here leaves no timeline.
    LLMC_USER_CHECK(c.layer < model.layers(), "--layer %d: the model has layers 0 to %d", c.layer,
                    model.head());
    if (!c.timeline.empty() && trains && c.machine.empty())
        draw_simulation(run, t.plans[plan]);

    // The run, and its ranks where there are several.
    std::string text;
    size_t most = t.arena.device().bytes; // of any rank
    if (trains)
        text = run_text(model, size_t(c.seq), c.steps, c.batch_tokens, rank_count(c));
    if (rank_count(c) > 1) {
        std::string ranks;
        or_die(cluster_text<T>(run.layout, options, model, t.ctx.where, &ranks, &most));
        // CUDA's pool holds it, not the arena.
        size_t scratch = fixed_order_scratch<T>(run.layout, options[0], model);
        if (c.fixed_order)
            ranks += concat("  and sums in rank order up to ", bytes_text(double(scratch)),
                            " of scratch\n");
        text += concat(ranks, "rank 0 of ", rank_count(c), "\n");
    }
    if (!c.machine.empty())
        text += predict<T>(run, model, options[size_t(plan)]);

    // Memory, then a single layer's actions or all of them.
    text += memory_text(t.arena, t.plans, model);
    // No plan has it: the run takes it beside its arena.
    if (c.save_async && trains)
        text += memory_line("copy for a save", snapshot_bytes(t), 0, "in the host's memory");
    if (run.draft_bytes)
        text += memory_line("draft", run.draft_bytes, 0,
                            "its weights, and a cache beside the model's");
    // Two files in their place and two that are written.
    if (!c.buddy.empty() && trains)
        text += memory_line("files of --buddy", 4 * snapshot_bytes(t), 0,
                            "in --buddy: its own and a neighbour's, twice in a save");
    text += logits_text<T>(t.plans[plan], model);
    text += context_text<T>(t.plans[plan], model);
    double state = zero_bytes(parameter_bytes<T>(options[size_t(plan)], model), 0, 1);
    text += fits_text(double(most + run.draft_bytes), state * double(parameter_count(model)));
    if (c.layer >= 0) {
        text += concat("actions of layer ", c.layer, ", first micro-batch\n",
                       layer_text(t.arena, t.plans[plan], model, plan, c.layer));
    } else {
        text += "actions of a step, kind(micro-batch,layer)\n" + plan_text(t.plans[plan], model);
        text += legend_text();
    }
    fputs(text.c_str(), stdout);
}

// Measure what mfu is a share of. Threads as ranks run side by side only while each has cores of
// its own; on one GPU they take turns.
template <typename T, typename S>
void measure_peak(Run& run, S where) {
    // Only the first rank measures: the others wait at the first collective.
    if (run.train_plan < 0 || !is_first(run))
        return;
    Spend spend(run.account, Work::START);
    Peak peak = machine_peak<T>(where);
    int cores = std::max(1, int(std::thread::hardware_concurrency()) / threads_here(Cpu{}));
    int at_once = std::is_same_v<S, Cpu> ? std::min(run.world.size, cores) : 1;
    run.peak = peak.flops * (run.world.local ? at_once : run.world.size);
    printf("mfu: (6 x parameters + 6 L NH HS T) FLOPs a token, against %.0f GFLOP/s in %s: %s\n",
           run.peak / 1e9, run.config.precision.c_str(), peak.says.c_str());
}

} // namespace llmc
