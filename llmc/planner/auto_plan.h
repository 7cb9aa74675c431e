// auto_plan.h - --plan auto: the answer as flags, why it is the best, and what is wrong without one
//   If there is no answer, the error says what is missing: a number of ranks that has a layout, or
//   bytes of memory.
#pragma once
#include "../io/config.h"
#include "../io/config_check.h"
#include "../io/file_kind.h"
#include "../comm/text.h"
#include "evaluate.h"
#include "layer_cost.h"
#include "machine_here.h"
#include "plan_search.h"

namespace llmc {

// ----------------------------------------------------------------------------
// what is printed

// Whether a flag is set by a layout, or only asks for one: command_text() leaves both kinds out.
// What the user says of masters and offload holds.
inline bool is_planned(const std::string& flag) {
    static const std::set<std::string> asks = {"batch-tokens", "plan", "gpus", "machine",
                                               "explain"};
    const std::vector<const char*>& names = layout_flags();
    bool layout = std::find(names.begin(), names.end(), flag) != names.end();
    bool theirs = flag == "masters" || flag == "offload";
    return asks.count(flag) || (layout && !theirs);
}

// The command that runs a layout: the user's own flags, then the layout's.
inline std::string command_text(const Config& user, const PlanQuestion& q, const Config& layout) {
    // Start ranks as processes, unless the user has them as threads.
    bool processes = q.gpus > 1 && user.local_ranks != q.gpus;
    const Program* train = &program_named("train_gpt");
    const Program* tune = &program_named("tune_gpt");
    bool tunes = false;
    for (const std::string& flag : user.given)
        tunes |= takes_flag(tune, flag) && !takes_flag(train, flag);
    std::string text = processes ? concat("mpirun -np ", q.gpus, " ") : "";
    text += tunes ? "build/tune_gpt" : "build/train_gpt";

    // Repeat the user's own flags.
    for (const Flag& f : config_table()) {
        bool own = *f.name && was_given(user, f.name);
        if (!own || is_planned(f.name)) continue;
        std::string value = field_text(user, f.field);
        text += concat(" --", f.name, " ", shell_word(value));
    }
    return text + concat(" --batch-tokens ", q.config.batch_tokens, " ",
                         layout_flags_text(layout));
}

// A trial of the answer, by the name that its row has.
struct NamedTrial {
    std::string name;
    const Trial* trial;
};

// A trial as one line: its time, how much longer it takes than the fastest, tokens a second, bytes
// of the fullest rank, flags.
inline std::string trial_line(const Trial& t, const Answer& a, const PlanQuestion& q,
                              const std::string& name) {
    // The rate counts the tokens of all ranks together.
    double rate = double(q.config.batch_tokens) / t.seconds;
    double times = t.seconds / a.best[0].seconds;
    double more = 100 * (times - 1);
    std::string line = formatted("  %-6s %10.2f ms %+6.1f%% %8s tok/s %10s  ", name.c_str(),
                                 t.seconds * 1e3, more, count_text(rate).c_str(),
                                 bytes_text(t.bytes).c_str());

    // Several may be as good as the best.
    bool close = times <= TIE && times >= 1 / TIE;
    bool chosen = &t == &a.best[a.chosen];
    bool tie = close && !chosen && has_room(q, t);
    return line + layout_flags_text(t.config) + (tie ? "  (a tie)" : "") + "\n";
}

// The table that shows why the others lose: a column for each trial, the best one first, then what
// each other one has more. The rows of time add up to a step.
inline std::string differences_text(const std::vector<NamedTrial>& trials) {
    std::string text = "what the others have more than the best\n  ms of a step            ";
    for (const NamedTrial& t : trials)
        text += formatted(" %10s", t.name.c_str());
    text += "\n";

    // A row takes number(trial) of each. What rounds to 0 has no sign; a row of it is left out.
    auto row = [&](const char* name, auto number) {
        double best = number(*trials[0].trial);
        auto zero = [](double x) { return std::fabs(x) < 0.005; };
        std::string line = formatted("  %-24s %10.2f", name, best);
        bool any = !zero(best);
        for (size_t i = 1; i < trials.size(); i++) {
            double x = number(*trials[i].trial);
            any |= !zero(x);
            double more = zero(x - best) ? 0 : x - best;
            line += formatted(" %+10.2f", more);
        }
        if (any) text += line + "\n";
    };

    // Write the rows: time by part, then memory. A small model's bytes are in MiB.
    for (const TimePart& part : time_parts())
        row(part.name, [&](const Trial& t) { return 1e3 * t.parts.*part.part; });
    row("together", [](const Trial& t) { return 1e3 * t.seconds; });
    bool small = trials[0].trial->bytes < GIB;
    double unit = small ? GIB / 1024 : GIB;
    row(small ? "MiB of the fullest rank" : "GiB of the fullest rank",
        [&](const Trial& t) { return t.bytes / unit; });
    return text;
}

// The trials of an answer by name: the chosen one first, then the others from fast to slow, then
// the layout that the user's own flags name, if they do.
inline std::vector<NamedTrial> named_trials(const Answer& a, const Trial* yours) {
    std::vector<NamedTrial> named = {{"best", &a.best[a.chosen]}};
    for (size_t i = 0; i < a.best.size(); i++) {
        if (i == a.chosen) continue;
        std::string place = concat(named.size() + 1);
        named.push_back({place, &a.best[i]});
    }
    if (yours) named.push_back({"yours", yours});
    return named;
}

// The answer as text: a line for each of the best trials and for `yours`, the layout that the
// user's own flags name; then the command that runs the best.
inline std::string answer_text(const Config& user, const PlanQuestion& q, const Answer& a,
                               const Trial* yours = nullptr) {
    std::string text = concat(
        "plan for ", q.gpus, q.gpus > 1 ? " ranks on " : " rank on ", q.machine.name, ", ",
        bytes_text(q.room), " each; ",
        q.config.batch_tokens, " tokens a step, ", q.config.seq, " a sequence\n"
        "of ", a.listed, " layouts ", a.simulated, " were simulated; "
        "within 2% of the fastest is a tie, and the simplest is best\n");

    // Print them. With --explain the table of differences follows.
    std::vector<NamedTrial> trials = named_trials(a, yours);
    for (const NamedTrial& t : trials)
        text += trial_line(*t.trial, a, q, t.name);
    if (yours && yours->bytes > q.room)
        text += concat("  yours does not fit: it takes ", bytes_text(yours->bytes - q.room),
                       " too much\n");
    else if (yours && !has_room(q, *yours))
        text += concat("  yours does not fit: the host lacks ",
                       bytes_text(yours->host - q.host_room), "\n");
    const Trial& best = *trials[0].trial;
    if (best.host > 0)
        text += concat("  best keeps ", bytes_text(best.host),
                       " a rank in the host's memory beside these\n");
    if (user.explain && trials.size() > 1)
        text += differences_text(trials);
    std::string command = command_text(user, q, best.config);
    return text + "run it:\n  " + command + "\n";
}

// ----------------------------------------------------------------------------
// questions that have no answer

// The largest number of ranks, up to q.gpus, that has an allowed grid of tp, pp and dp; 0: none.
inline int nearest_gpus(const PlanQuestion& q) {
    int64_t samples = std::max<int64_t>(1, q.config.batch_tokens / q.config.seq);
    int layers = int(q.shape.L) + 2;
    Config c = plain_config(q);
    for (int ranks = q.gpus; ranks > 0; ranks--)
        for (c.tp = 1; c.tp <= q.machine.cards; c.tp++)
            for (c.pp = 1; c.pp <= layers; c.pp++) {
                // dp takes what is left, and must divide the step's sequences.
                c.dp = ranks / (c.tp * c.pp);
                c.sequence_parallel = has_whole_experts(c);
                bool all = c.dp * c.tp * c.pp == ranks;
                bool whole = c.dp > 0 && all && samples % c.dp == 0;
                bool near = whole && nodes_hold(q.machine, ranks, c.tp);
                if (near && refuse_layout(q, c).empty()) return ranks;
            }
    return 0;
}

// The error when no layout of these ranks is allowed: why the first one tried was refused, and the
// nearest number of ranks that has one. Another batch, which more numbers divide, helps as well.
inline std::string refuse_ranks(const PlanQuestion& q, const std::string& why) {
    // If not even a single rank has a layout, look for a fault that has nothing to do with one.
    int near = nearest_gpus(q);
    Config one = plain_config(q);
    one.zero = one.etp = one.zero_group = one.hpz = 0;
    std::string wrong = refuse_layout(q, one);
    if (near == 0)
        return wrong.empty() ? why : wrong;
    return concat("--plan auto: no layout of ", q.gpus, " ranks is allowed (", why, "): try ", near,
                  " ranks, or another --batch-tokens");
}

// The error when no layout fits: how many bytes the leanest one lacks, and which other flag frees
// most of them.
template <typename T, typename S>
std::string refuse_room(const PlanQuestion& q, const Answer& a, S where) {
    // Place the leanest layout with one more flag, and return its bytes; infinity: not allowed.
    Trial t;
    auto bytes_with = [&](const char* flag, const char* value) {
        t = {a.leanest};
        if (*flag) set_flag(t.config, flag, value);
        Config c = t.config;
        if (!check_with_teacher(c, q.shape, q.teacher).empty())
            return double(INFINITY);
        fits_everywhere<T>(q, t, where);
        return t.bytes;
    };

    // The card may have room for the leanest, and its host may not.
    double least = bytes_with("", ""), best = least;
    if (least <= q.room && t.host > q.host_room)
        return concat("--plan auto: only layouts with --offload fit ", bytes_text(q.room),
                      ", and the host's memory has ", bytes_text(q.host_room),
                      " for each rank, too little: try --offload-to FOLDER, more ranks or a "
                      "smaller --model");

    // Try each flag that takes bytes off the device, and changes neither the model nor the batch.
    std::string fix = "more ranks, a smaller --model or a shorter --seq";
    const char* flags[][2] = {{"masters", "none"},
                              {"masters", "remainder"},
                              {"states", "8bit"},
                              {"states", "bf16"},
                              {"offload", "optimizer"},
                              {"offload", "optimizer,gradients"},
                              {"offload", "optimizer,gradients,weights"},
                              {"offload", "optimizer,gradients,weights,activations"}};
    for (auto& [flag, value] : flags) {
        // On the CPU, offloading frees nothing, as bytes_with() shows: it is the same memory.
        double bytes = bytes_with(flag, value);
        if (bytes >= best || t.host > q.host_room) continue;
        best = bytes;
        fix = concat("--", flag, " ", value, ", which frees most, ", bytes_text(least - bytes),
                     bytes <= q.room ? ", and fits" : "; more ranks or a smaller --model too");
    }
    return concat("--plan auto: no layout of ", q.gpus, q.gpus > 1 ? " ranks" : " rank",
                  " fits ", bytes_text(q.room),
                  ": the leanest (", layout_flags_text(a.leanest), ") takes ", bytes_text(least),
                  ", ", bytes_text(least - q.room), " too much: try ", fix);
}

// Evaluate the layout that the user's own flags name, to compare it with the best. What they leave
// open is as in the fastest of the search's layouts that fit, or else in the leanest. Returns false
// if they name none, or one that is refused: why receives a line.
template <typename T, typename S>
bool named_layout(const PlanQuestion& q, Trial* yours, S where, std::string* why = nullptr) {
    bool named = false;
    has_named(q.config, q.config, &named);
    if (!named) return false;

    // Ask again, of those that have the named values.
    PlanQuestion mine = q;
    mine.named = true;
    Answer a = answer_question<T>(mine, where);
    if (!a.best.empty()) {
        *yours = a.best[0];
        return true;
    }

    // The search may have none, because it looks at none of this kind: take the flags as they are.
    Config c = a.listed > 0 ? a.leanest : q.config;
    if (a.listed == 0 && !was_given(c, "micro-batch"))
        c.micro_batch = 1;
    int others = c.tp * c.pp * c.cp;
    if (c.dp == 0) c.dp = std::max(1, q.gpus / others);

    // Refuse another number of ranks: its time could not be compared with the others'.
    Config checked = c;
    std::string wrong = check_with_teacher(checked, q.shape, q.teacher);
    if (wrong.empty() && rank_count(c) != q.gpus)
        wrong = concat("its axes are ", rank_count(c), " ranks, and there are ", q.gpus);
    if (!wrong.empty()) {
        if (why) *why = "the layout that the flags name: " + wrong + "\n";
        return false;
    }

    // Share out more and more, unless the user says how much, until it fits.
    bool shares = c.dp * c.cp > 1 && !was_given(c, "zero");
    for (int last = shares ? 3 : c.zero;; c.zero++) {
        *yours = {c};
        simulate_trial<T>(q, *yours, where);
        if (fits_everywhere<T>(q, *yours, where) || c.zero == last)
            return true;
    }
}

} // namespace llmc
