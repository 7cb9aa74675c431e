// explain.h - what --explain prints: parameters, the run's FLOPs and hours, memory, the actions
//   A bar beside a line of the memory table is its share of the total, 40 columns wide. Activations
//   of two plans share their bytes, and a plan's parts are those of its fullest moment.
//   Nothing is run or allocated. Data-parallel ranks of a stage are alike: a cluster takes as long
//   as its pipeline has ranks.
#pragma once
#include "mfu.h"
#include "trainer.h"

// Of a whole 40 columns wide, by eighths of a column: U+2588 is a full one, U+258F an eighth.
inline std::string bar_text(double share) {
    int eighths = int(share * 40 * 8 + 0.5);
    std::string text;
    for (; eighths > 0; eighths -= 8)
        text += std::string("\xe2\x96") + char(0x90 - std::min(eighths, 8));
    return text;
}

// total: what the bar is a share of, 0 for no bar
inline std::string memory_line(const char* what, size_t bytes, size_t total,
                               const std::string& why = "") {
    char text[128];
    if (!bytes) return "";
    snprintf(text, sizeof(text), "  %-26s %14zu %10.1f MiB", what, bytes, double(bytes) / 1048576);
    std::string bar = total ? bar_text(double(bytes) / double(total)) : "";
    return text + (bar.empty() ? "" : "  " + bar) + (why.empty() ? "" : "  " + why) + "\n";
}

inline std::string parameters_text(const Model& model) {
    std::string text;
    char line[256];
    size_t total = parameter_count(model), padding = 0, rows[2] = {0, 0};
    for (const Parameter& p : model.parameters) {
        rows[p.shape.size() == 2] += p.file_elements();
        padding += p.elements() - p.file_elements();
    }
    snprintf(line, sizeof(line),
             "parameters %zu (%.2fM): matrices and tables %zu, vectors %zu; in %zu buckets; "
             "padding %zu\n",
             total, double(total) / 1e6, rows[1], rows[0], model.buckets.size(), padding);
    return line;
}

// What a training run computes, and how long that takes on GPUs at a utilisation that good trainers
// reach: an assumption, not a measurement.
inline std::string run_text(const Model& model, size_t T, int64_t steps, int64_t batch_tokens,
                            int ranks) {
    constexpr double UTILISATION = 0.4;
    double tokens = double(steps) * double(batch_tokens), each = flops_per_token(model, T);
    char line[160];
    snprintf(line, sizeof(line),
             "run: %lld steps x %lld tokens = %.4g tokens of %.4g FLOPs = %.4g FLOPs\n",
             (long long)steps, (long long)batch_tokens, tokens, each, tokens * each);
    std::string text = line;
    for (const char* device : {"A100", "H100"}) {
        double peak = data_sheet(device)->half * 1e12;
        auto hours = [&](int gpus) { return run_hours(tokens * each, peak, UTILISATION, gpus); };
        snprintf(line, sizeof(line), "  %s at %.0f%% of %.0f TFLOP/s in bf16: %.1f hours", device,
                 100 * UTILISATION, peak / 1e12, hours(1));
        text += line;
        snprintf(line, sizeof(line), ", on %d GPUs %.1f", ranks, hours(ranks));
        text += ranks > 1 ? std::string(line) + "\n" : "\n";
    }
    return text;
}

// The action at which most passing bytes are live, and those bytes by meaning.
inline std::string peak_text(const Arena& arena, const Plan& p, const Model& model, int plan,
                             const char* what) {
    std::vector<int64_t> change(p.actions.size() + 1);
    for (auto& [d, lives] : arena.passing[plan])
        for (const Place& l : lives)
            change[l.first] += int64_t(l.bytes), change[l.last + 1] -= int64_t(l.bytes);
    int64_t now = 0, most = -1;
    int at = 0;
    for (size_t i = 0; i < p.actions.size(); i++) {
        now += change[i];
        if (now > most) most = now, at = int(i);
    }
    std::map<std::string, size_t> sums;
    for (auto& [d, lives] : arena.passing[plan])
        for (const Place& l : lives) {
            if (at < l.first || at > l.last) continue;
            bool kept = d.kind == Kind::KEPT_B || d.kind == Kind::KEPT_W,
                 redo = d.kind == Kind::REDO_B || d.kind == Kind::REDO_W;
            bool gradient =
                d.kind == Kind::GRADIENT_B || d.kind == Kind::GRADIENT_W || d.kind == Kind::DSTREAM;
            sums[kept                      ? "  kept activations"
                 : redo                    ? "  recomputed activations"
                 : gradient                ? "  gradients of activations"
                 : d.kind == Kind::STREAM  ? "  residual stream"
                 : d.kind == Kind::SCRATCH ? "  workspace"
                                           : "  batch and losses"] += l.bytes;
        }
    std::string text = memory_line(what, size_t(most), arena.bytes);
    text += "    live at " + action_text(p.actions[at], model) + ", the fullest moment\n";
    for (auto& [part, bytes] : sums) text += memory_line(part.c_str(), bytes, arena.bytes);
    return text;
}

inline std::string memory_text(const Arena& arena, const std::vector<Plan>& plans,
                               const Model& model) {
    std::map<Kind, size_t> sums;
    for (auto& [d, place] : arena.lasting) sums[d.kind] += place.bytes;
    std::string text = "memory, in bytes\n";
    auto add = [&](const char* what, Kind kind, const char* why = "") {
        text += memory_line(what, sums[kind], arena.bytes, why);
    };
    add("weights", Kind::WEIGHT);
    add("gradients", Kind::GRAD);
    add("gradient of the tied head", Kind::GRAD_TIED, "added to the table's once a step");
    add("master weights", Kind::MASTER, "float");
    add("optimizer moments", Kind::MOMENTS, "float");
    add("constants", Kind::CONSTANTS, "rotary tables, slopes");
    add("key/value cache", Kind::CACHE);
    const char* modes[] = {"activations (train)", "activations (evaluate)",
                           "activations (generate)"};
    for (size_t i = 0; i < plans.size(); i++) {
        bool second = i > 0 && plans[i].mode == plans[i - 1].mode; // evaluation: of tasks
        const char* what = second ? "activations (tasks)" : modes[int(plans[i].mode)];
        text += peak_text(arena, plans[i], model, int(i), what);
    }
    text += memory_line("total", arena.bytes, 0, "one allocation; plans share the passing bytes");
    return text;
}

// ----------------------------------------------------------------------------
// a cluster: a line for each rank of the pipeline

// "0..3, 8..11"
inline std::string layers_text(const Plan& p, const Model& model) {
    std::string text;
    for (int s = p.pp_rank; s < p.stages(); s += p.pp) {
        int first = first_layer(p, model, s), last = first_layer(p, model, s + 1) - 1;
        text += (text.empty() ? "" : ", ") + std::to_string(first) +
                (last > first ? ".." + std::to_string(last) : "");
    }
    return text;
}

// What a parameter takes, and what ZeRO leaves of it; without padding and buckets in use.
template <typename T> std::string parameter_text(const Plan& p) {
    double state = sizeof(acc_t<T>), master = sizeof(T) < sizeof(acc_t<T>) ? state : 0;
    ParameterBytes whole = {sizeof(T), state, master + (p.adamw ? 2 * state : 0)};
    char line[128];
    snprintf(line, sizeof(line), "%.4g bytes a parameter, %.4g on each of %d ranks by ZeRO %d",
             zero_bytes(whole, 0, 1), zero_bytes(whole, p.zero, p.shards), p.shards, p.zero);
    return line;
}

// Makes the plans of all ranks of the pipeline, checks them together, and places each. "" or what
// is wrong with them; `text` is the table.
template <typename T, typename S>
std::string cluster_text(const std::vector<Plan>& options, const Model& model, S where,
                         std::string* text) {
    int pp = options[0].pp, largest = 0;
    std::vector<std::vector<Plan>> plans(static_cast<size_t>(pp)); // [rank][plan]
    for (const Plan& o : options) {
        std::vector<Plan> ranks = make_plans(o, model);
        std::string wrong = plans_check(ranks, model);
        if (!wrong.empty()) return wrong;
        for (int r = 0; r < pp; r++) plans[size_t(r)].push_back(ranks[size_t(r)]);
    }
    const Plan& o = options[0];
    bool train = o.mode == Mode::TRAIN;
    std::vector<int> kept(size_t(pp), 1); // stages whose activations live at once
    char line[160];
    *text = concat("memory of a rank, in MiB, by its place in the pipeline; a line stands for ",
                   o.dp() * o.tp, "; ", parameter_text<T>(o), "\n");
    if (train) {
        Simulation s = simulate(schedules_of(o), pp);
        snprintf(line, sizeof(line), "bubble: ranks are idle %.1f%% of a step\n", 100 * s.bubble);
        *text += line, kept = s.peak_live;
    }
    *text += "  rank   persistent  activations        total  kept at once  layers\n";
    size_t most = 0;
    for (int r = 0; r < pp; r++) {
        Arena arena = place_plans<T>(plans[size_t(r)], model, where);
        snprintf(line, sizeof(line), "  %4d %12.1f %12.1f %12.1f  %12d  ", r,
                 double(arena.persistent_bytes) / 1048576,
                 double(arena.bytes - arena.persistent_bytes) / 1048576,
                 double(arena.bytes) / 1048576, kept[size_t(r)]);
        *text += line + layers_text(plans[size_t(r)][0], model) + "\n";
        if (arena.bytes > most) most = arena.bytes, largest = r;
    }
    *text += memory_line("the largest", most, 0, "rank " + std::to_string(largest));
    return "";
}

// ----------------------------------------------------------------------------
// one layer

inline std::string layer_text(const Arena& arena, const Plan& p, const Model& model, int plan,
                              int layer) {
    std::string text;
    for (size_t i = 0; i < p.actions.size(); i++) {
        Action a = p.actions[i];
        if (a.layer != layer || a.micro > 0) continue;
        Access x = access(p, model, a);
        text += action_text(a, model) + "\n";
        auto list = [&](const char* what, const std::vector<Data>& data) {
            for (Data d : data) {
                const Place* place = arena_find(arena, plan, int(i), d);
                if (!place) continue;
                char line[160];
                snprintf(line, sizeof(line), "  %-7s %-24s %14zu bytes at %zu\n", what,
                         data_text(d, model).c_str(), place->bytes, place->offset);
                text += line;
            }
        };
        list("reads", x.reads);
        list("writes", x.writes);
    }
    return text;
}
