// auto_plan.h - --plan auto: the question of a command line, its answer as flags, and why
//   If there is no answer, the error says what is missing: a number of ranks that has a layout, or
//   bytes of memory.
#pragma once
#include "../comm/comm.h"
#include "../io/config.h"
#include "../io/config_check.h"
#include "../io/file_kind.h"
#include "../io/files.h"
#include "../io/machine.h"
#include "../io/machines.h"
#include "../run/choose.h"
#include "../text.h"
#include "../tune/teach.h"
#include "layer_cost.h"
#include "machine_here.h"
#include "plan_search.h"
#include "proposal.h"
#include "trial.h"

namespace llmc {

// ----------------------------------------------------------------------------
// what is printed

// Whether a flag is set by a proposal, or only asks for one: command_text() leaves both kinds out.
inline bool is_planned(const std::string& flag) {
    static const std::set<std::string> names = {
        "dp", "tp", "pp", "cp", "ep", "chunks", "zero", "sequence-parallel", "pipeline",
        "recompute", "micro-batch", "batch-tokens", "plan", "gpus", "machine", "explain",
        "cp-method", "grid-order", "zero-group", "hpz", "etp"};
    return names.count(flag) > 0;
}

// The command that runs a proposal: the user's own flags, then the proposal's.
inline std::string command_text(const Config& user, const PlanQuestion& q, const Proposal& p) {
    // Start ranks as processes, unless the user has them as threads.
    bool processes = q.gpus > 1 && user.local_ranks != q.gpus;
    std::string text = processes ? concat("mpirun -np ", q.gpus, " ") : "";
    text += "build/train_gpt";
    for (const Flag& f : config_table()) {
        if (!*f.name || !was_given(user, f.name) || is_planned(f.name))
            continue;
        text += concat(" --", f.name, " ", shell_word(field_text(user, f.field)));
    }
    return text + concat(" --batch-tokens ", q.config.batch_tokens, " ", proposal_text(p));
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
    char line[96];
    double rate = double(q.config.batch_tokens) / t.seconds;
    double more = 100 * (t.seconds / a.best[0].seconds - 1);
    snprintf(line, sizeof(line), "  %-6s %10.2f ms %+6.1f%% %8s tok/s %10s  ", name.c_str(),
             t.seconds * 1e3, more, count_text(rate).c_str(), bytes_text(t.bytes).c_str());
    double times = t.seconds / a.best[0].seconds;
    bool close = times <= TIE && times >= 1 / TIE;
    bool tie = close && has_room(q, t) && &t != &a.best[a.chosen];
    return line + proposal_text(t.proposal) + (tie ? "  (a tie)" : "") + "\n";
}

// A row of the table of differences: the best trial's number, then for each other trial its number
// minus the best's.
inline std::string difference_line(const char* name, const std::vector<double>& numbers) {
    // Leave out a row in which all numbers print as 0, and print no sign of what rounds to 0.
    auto zero = [](double x) { return std::fabs(x) < 0.005; };
    if (std::all_of(numbers.begin(), numbers.end(), zero))
        return "";
    char cell[64];
    snprintf(cell, sizeof(cell), "  %-24s %10.2f", name, numbers[0]);
    std::string line = cell;
    for (size_t i = 1; i < numbers.size(); i++) {
        double more = numbers[i] - numbers[0];
        snprintf(cell, sizeof(cell), " %+10.2f", zero(more) ? 0 : more);
        line += cell;
    }
    return line + "\n";
}

// The table that shows why the others lose. The rows of time add up to a step, those of memory to
// the bytes of the fullest rank.
inline std::string differences_text(const std::vector<NamedTrial>& trials) {
    // Write the heading: a column for each trial, the best one first.
    std::string text = "what the others have more than the best\n  ms of a step            ";
    char cell[32];
    for (const NamedTrial& t : trials) {
        snprintf(cell, sizeof(cell), " %10s", t.name.c_str());
        text += cell;
    }
    text += "\n";

    // A row takes number(trial) of each trial.
    auto row = [&](const char* name, auto number) {
        std::vector<double> numbers;
        for (const NamedTrial& t : trials)
            numbers.push_back(number(*t.trial));
        text += difference_line(name, numbers);
    };

    // Write the rows: time by part, then memory by kind of data.
    for (const TimePart& part : time_parts())
        row(part.name, [&](const Trial& t) { return 1e3 * t.parts.*part.part; });
    row("together", [](const Trial& t) { return 1e3 * t.seconds; });

    // A small model's bytes stand in MiB.
    bool small = trials[0].trial->bytes < GIB;
    double unit = small ? GIB / 1024 : GIB;
    text += small ? "  MiB of the fullest rank\n" : "  GiB of the fullest rank\n";
    for (const char* name : memory_rows())
        row(name, [&](const Trial& t) {
            auto found = t.memory.find(name);
            return found == t.memory.end() ? 0 : found->second / unit;
        });
    row("together", [&](const Trial& t) { return t.bytes / unit; });
    return text;
}

// The trials of an answer by name: the chosen one first, then the others from fast to slow, then
// the layout that the user's own flags name, if they do.
inline std::vector<NamedTrial> named_trials(const Answer& a, const Trial* yours) {
    std::vector<NamedTrial> named = {{"best", &a.best[a.chosen]}};
    for (size_t i = 0; i < a.best.size(); i++)
        if (i != a.chosen) named.push_back({concat(named.size() + 1), &a.best[i]});
    if (yours) named.push_back({"yours", yours});
    return named;
}

// The answer as text: a line for each of the best trials and for `yours`, the layout that the
// user's own flags name; then the command that runs the best.
inline std::string answer_text(const Config& user, const PlanQuestion& q, const Answer& a,
                               const Trial* yours = nullptr) {
    std::string text = concat(
        "plan for ", q.gpus, q.gpus > 1 ? " ranks on " : " rank on ", q.machine.name, ", ",
        bytes_text(q.room), " each; ", q.config.batch_tokens, " tokens a step, ", q.config.seq,
        " a sequence\nof ", a.search.listed, " layouts ", a.search.proposals.size(),
        " may fit, ", a.simulated, " were simulated; within 2% of the fastest is a tie, and the "
        "simplest is best\n");

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
    if (user.explain && trials.size() > 1) text += differences_text(trials);
    std::string command = command_text(user, q, best.proposal);
    return text + "run it:\n  " + command + "\n";
}

// ----------------------------------------------------------------------------
// questions that have no answer

// The largest number of ranks, at most q.gpus, that has an allowed layout; 0: none has one.
inline int nearest_gpus(PlanQuestion q) {
    // List the grids of tp, pp and dp, most ranks first. dp must divide the step's sequences.
    std::set<std::array<int, 4>, std::greater<>> worlds; // ranks, tp, pp, dp
    int64_t samples = std::max<int64_t>(1, q.config.batch_tokens / q.config.seq);
    for (int tp = 1; tp <= q.machine.cards; tp++)
        for (int pp = 1; pp <= int(q.shape.L) + 2; pp++) {
            int dp = int(std::min<int64_t>(samples, q.gpus / tp / pp));
            while (dp > 1 && samples % dp)
                dp--;
            int ranks = dp * tp * pp;
            if (dp > 0 && nodes_hold(q.machine, ranks, tp)) worlds.insert({ranks, tp, pp, dp});
        }

    // Return the first that config_check() allows.
    for (auto [ranks, tp, pp, dp] : worlds) {
        Proposal p = plain_proposal(q);
        p.tp = tp;
        p.pp = pp;
        p.dp = dp;
        p.sequence_parallel = p.whole_experts();
        if (ranks <= q.gpus && refuse_proposal(q, p).empty())
            return ranks;
    }
    return 0;
}

// The error when no layout of these ranks is allowed: why the first one tried was refused, and the
// nearest number of ranks that has one. Another batch, which more numbers divide, helps as well.
inline std::string refuse_ranks(const PlanQuestion& q, const std::string& why) {
    // If not even a single rank has a layout, look for a fault that has nothing to do with one.
    int near = nearest_gpus(q);
    std::string wrong = refuse_proposal(q, {});
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
        PlanQuestion other = q;
        t = {a.search.leanest};
        if (*flag) set_flag(other.config, flag, value);
        if (!strcmp(flag, "masters")) t.proposal.remainder = false; // the flag holds
        if (!strcmp(flag, "offload")) t.proposal.offload = 0;
        Config c = other.config;
        set_proposal(c, t.proposal);
        if (!check_with_teacher(c, q.shape, q.teacher).empty())
            return double(INFINITY);
        fits_everywhere<T>(other, t, where);
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
    const char* flags[][2] = {{"masters", "none"}, {"masters", "remainder"},
                              {"states", "8bit"}, {"states", "bf16"},
                              {"offload", "optimizer"}, {"offload", "optimizer,gradients"},
                              {"offload", "optimizer,gradients,weights"},
                              {"offload", "optimizer,gradients,weights,activations"}};
    for (auto& [flag, value] : flags) {
        // On the CPU, offloading frees nothing, as bytes_with() shows: it is the same memory.
        double bytes = bytes_with(flag, value);
        if (bytes >= best || t.host > q.host_room)
            continue;
        best = bytes;
        fix = concat("--", flag, " ", value, ", which frees most, ", bytes_text(least - bytes),
                     bytes <= q.room ? ", and fits" : "; more ranks or a smaller --model too");
    }
    return concat("--plan auto: no layout of ", q.gpus, q.gpus > 1 ? " ranks" : " rank", " fits ",
                  bytes_text(q.room), ": the leanest (", proposal_text(a.search.leanest),
                  ") takes ", bytes_text(least), ", ", bytes_text(least - q.room),
                  " too much: try ", fix);
}

// ----------------------------------------------------------------------------
// the command line

// Bytes that each rank may take: --memory, or what this machine has left, or most of a card.
template <typename S> double room_asked(const Run& run, const Machine& machine, S where) {
    // A card's memory is shared by the threads of a process.
    const Config& c = run.config;
    double card = room_of_card(machine) / sharers_of_card(c);
    if (c.memory > 0) return c.memory * GIB;
    if (c.explain) return card;

    // In a run take the least room that any rank finds, so that all ranks choose the same. A GPU of
    // the same name may have less memory than its row.
    std::vector<int64_t> all(size_t(run.world.size));
    int64_t mine = int64_t(memory_share(run, where)) / c.local_ranks;
    all_gather(run.world, all.data(), &mine, 1, Cpu{});
    double least = double(*std::min_element(all.begin(), all.end()));
    return std::is_same_v<S, Cpu> ? least : std::min(card, least);
}

// Bytes of the host's memory for each rank of a run on GPUs: an equal part of what the machine that
// has least has left, or of what a question's has. A twentieth is for all else that runs there.
// `each`: processes of a machine.
template <typename S>
double host_room_asked(const Run& run, const Machine& machine, int each, S) {
    const Config& c = run.config;
    if (c.explain)
        return room_of_host(machine) / sharers_of_card(c);
    if (std::is_same_v<S, Cpu>) return INFINITY;
    std::vector<int64_t> all(size_t(run.world.size));
    int64_t mine = int64_t(memory_left(Cpu{})) / (each * run.config.local_ranks);
    all_gather(run.world, all.data(), &mine, 1, Cpu{});
    return 0.95 * double(*std::min_element(all.begin(), all.end()));
}

// The question that a command line asks, the same on all ranks. Without --batch-tokens the global
// batch is one micro-batch for each rank.
template <typename S> PlanQuestion question_of(const Run& run, S where) {
    // Take the model, the machine, the ranks and the room.
    PlanQuestion q;
    const Config& c = run.config;
    q.shape = run.shape;
    add_adapters(c, q.shape);
    q.teacher = choose_teacher_shape(run);
    q.machine = machine_asked(c, "--plan auto", where);
    int each = c.gpus ? 0 : ranks_of_each(find_machines(run.world));
    if (each && run.world.size > 1) q.machine.cards = each; // the nodes that are there
    q.gpus = c.gpus ? c.gpus : std::max(run.world.size, c.local_ranks);
    q.room = room_asked(run, q.machine, where);
    q.host_room = host_room_asked(run, q.machine, each ? each : run.world.size, where);

    // Check trials as --explain would: the ranks of a layout need not be there.
    q.config = c;
    q.config.plan = "none";
    q.config.gpus = 0;
    q.config.local_ranks = 1;
    q.config.given.erase("local-ranks");
    q.config.explain = true;
    q.config.memory = 0;

    // Fill in what the command line leaves out.
    if (c.machine.empty()) q.config.machine = q.machine.name;
    if (c.seq == 0) q.config.seq = int(std::min(run.shape.P, size_t(256)));
    if (c.batch_tokens == 0)
        q.config.batch_tokens = int64_t(c.micro_batch) * q.config.seq * q.gpus;
    return q;
}

// Simulate and place the layout that the user's own flags name, to compare it with the best. What
// they leave open is as in the fastest of the search's layouts that fit, or else in the leanest.
// Returns false if they name none, or one that is refused: why receives a line.
template <typename T, typename S>
bool named_layout(const PlanQuestion& q, Trial* yours, S where, std::string* why = nullptr) {
    if (!names_layout(q.config)) return false;

    // Ask again, of those that have the named values.
    PlanQuestion mine = q;
    mine.named = true;
    Answer a = answer_question<T>(mine, where);
    if (!a.best.empty()) {
        *yours = a.best[0];
        return true;
    }

    // The search may have none, because it looks at none of this kind: take the flags as they are.
    Config c = q.config;
    if (!was_given(c, "micro-batch")) c.micro_batch = 1;
    if (c.dp == 0) c.dp = std::max(1, q.gpus / (c.tp * c.pp * c.cp));
    if (a.search.listed > 0) set_proposal(c, a.search.leanest);

    // Refuse another number of ranks: its time could not be compared with the others'.
    std::string wrong = check_with_teacher(c, q.shape, q.teacher);
    if (wrong.empty() && rank_count(c) != q.gpus)
        wrong = concat("its axes are ", rank_count(c), " ranks, and there are ", q.gpus);
    if (!wrong.empty()) {
        if (why) *why = "the layout that the flags name: " + wrong + "\n";
        return false;
    }

    // Share out more and more, unless the user says how much, until it fits.
    Proposal p = proposal_of(c);
    bool shares = p.dp * p.cp > 1 && !was_given(c, "zero");
    for (int last = shares ? 3 : p.zero;; p.zero++) {
        Trial t = simulate_proposal<T>(q, p, where);
        if (!t.wrong.empty()) return true;
        *yours = t;
        if (fits_everywhere<T>(q, *yours, where) || p.zero == last)
            return true;
    }
}

// Answer --plan auto: print the answer, and set the run's flags by it. Returns whether there is
// something to run; with --explain there is not. If no layout is allowed, or none fits, the program
// ends with an error that says what would help.
template <typename T, typename S> bool plan_run(Run& run, S where) {
    // Find the best layouts.
    Config& c = run.config;
    PlanQuestion q = question_of(run, where);
    sizes_of_gpu = c.explain && !q.machine.device.empty();
    if (c.gpus && c.machine.empty())
        note(run, concat("--gpus ", c.gpus, " without --machine plans for ", q.machine.name,
                         ": name one, as --machine h100"));
    Answer a = answer_question<T>(q, where);
    if (a.search.listed == 0) or_die(refuse_ranks(q, a.search.why));
    if (a.best.empty()) or_die(refuse_room<T>(q, a, where));

    // Print the answer. A run prints it too, so that it can be repeated without the planner.
    Trial yours;
    std::string refused;
    bool named = c.explain && named_layout<T>(q, &yours, where, &refused);

    // The user may know a faster one than was tried.
    bool faster = named && has_room(q, yours) && yours.seconds < a.best[0].seconds;
    if (faster) {
        a.best.insert(a.best.begin(), yours);
        if (a.best.size() > SHOWN) a.best.pop_back();
        a.chosen = choose_trial(a.best);
    }
    std::string text = answer_text(c, q, a, named ? &yours : nullptr);
    if (is_first_rank(run)) printf("%s%s", refused.c_str(), text.c_str());
    if (c.explain) return false;

    // Set the flags: from here on the run is as if the user had given them.
    set_proposal(c, a.best[a.chosen].proposal);
    c.batch_tokens = q.config.batch_tokens;
    check_same(run.world, "what --plan auto chose", proposal_text(a.best[a.chosen].proposal));
    return true;
}

// Answer --plan auto in the element type of --precision, on which bytes and times depend.
template <typename S> bool plan_run_as(Run& run, S where) {
    // The names are those that run_rank() turns into types (train_gpt.cu).
    const std::string& precision = run.config.precision;
    if (precision == "bf16")
        return plan_run<bf16>(run, where);
    if (precision == "fp16")
        return plan_run<fp16>(run, where);
    return plan_run<float>(run, where);
}

} // namespace llmc
