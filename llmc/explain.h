// explain.h - what --explain prints: parameters, the memory table, the actions; nothing is run or
// allocated
#pragma once
#include "trainer.h"

inline std::string megabytes(size_t bytes) {
    char text[48];
    snprintf(text, sizeof(text), "%15zu %11.1f MiB", bytes, double(bytes) / 1048576);
    return text;
}

inline std::string memory_line(const char* what, size_t bytes, const std::string& why = "") {
    char text[256];
    if (!bytes) return "";
    snprintf(text, sizeof(text), "  %-26s %s   %s\n", what, megabytes(bytes).c_str(), why.c_str());
    return text;
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

// The action at which most passing bytes are live, and those bytes by meaning.
inline std::string peak_text(const Arena& arena, const Plan& p, const Model& model, int plan) {
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
    const char* modes[] = {"activations (train)", "activations (evaluate)",
                           "activations (generate)"};
    std::string text =
        memory_line(modes[int(p.mode)], size_t(most),
                    "live at " + action_text(p.actions[at], model) + ", the fullest moment");
    for (auto& [what, bytes] : sums) text += memory_line(what.c_str(), bytes);
    return text;
}

inline std::string memory_text(const Arena& arena, const std::vector<Plan>& plans,
                               const Model& model) {
    std::map<Kind, size_t> sums;
    for (auto& [d, place] : arena.lasting) sums[d.kind] += place.bytes;
    std::string text = "memory, in bytes\n";
    text += memory_line("weights", sums[Kind::WEIGHT]);
    text += memory_line("gradients", sums[Kind::GRAD]);
    text += memory_line("gradient of the tied head", sums[Kind::GRAD_TIED],
                        "added to the table's once a step");
    text += memory_line("master weights", sums[Kind::MASTER], "float");
    text += memory_line("optimizer moments", sums[Kind::MOMENTS], "float");
    text += memory_line("constants", sums[Kind::CONSTANTS], "rotary tables, slopes");
    text += memory_line("key/value cache", sums[Kind::CACHE]);
    for (size_t i = 0; i < plans.size(); i++) text += peak_text(arena, plans[i], model, int(i));
    text += memory_line("total", arena.bytes, "one allocation; plans share the passing bytes");
    return text;
}

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
