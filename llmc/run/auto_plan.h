// auto_plan.h - --plan auto: the question of a command line, its answer as flags, and why
//   Without an answer the error says what is missing: ranks that make a layout, or bytes.
#pragma once
#include "plan_search.h"

namespace llmc {

// ----------------------------------------------------------------------------
// what is printed

// Flags that a proposal sets, and those that ask for one.
inline bool is_planned(const std::string& flag) {
    static const std::set<std::string> names = {
        "dp", "tp", "pp", "cp", "ep", "chunks", "zero", "sequence-parallel", "pipeline",
        "recompute", "micro-batch", "batch-tokens", "plan", "gpus", "machine", "explain"};
    return names.count(flag) > 0;
}

// The command that runs a proposal: what the user gave, and its flags.
inline std::string command_text(const Config& user, const PlanQuestion& q, const Proposal& p) {
    // Ranks are processes, unless the user has them as threads.
    bool processes = q.gpus > 1 && user.local_ranks != q.gpus;
    std::string text = processes ? concat("mpirun -np ", q.gpus, " ") : "";
    text += "build/train_gpt";
    for (const Flag& f : config_table()) {
        if (!*f.name || !given(user, f.name) || is_planned(f.name)) continue;
        text += concat(" --", f.name, " ", shell_word(field_text(user, f.field)));
    }
    return text + concat(" --batch-tokens ", q.config.batch_tokens, " ", proposal_text(p));
}

// One line a trial: its time, what that is more than the best's, tokens a second of all ranks, what
// a rank takes, its flags.
inline std::string trial_line(const Trial& t, const Answer& a, const PlanQuestion& q,
                              const std::string& name) {
    // Tokens a second are of all ranks together.
    char line[96];
    double rate = double(q.config.batch_tokens) / t.seconds;
    double more = 100 * (t.seconds / a.best[a.chosen].seconds - 1);
    snprintf(line, sizeof(line), "  %-6s %10.2f ms %+6.1f%% %8s tok/s %10s  ", name.c_str(),
             t.seconds * 1e3, more, count_text(rate).c_str(), bytes_text(t.bytes).c_str());
    bool tie = t.seconds <= TIE * a.best[0].seconds && &t != &a.best[a.chosen];
    return line + proposal_text(t.proposal) + (tie ? "  (a tie)" : "") + "\n";
}

// A row of the table of differences: the best's number, and what the others have more of it.
inline std::string difference_line(const char* name, const std::vector<double>& numbers) {
    // A row that nobody has is left out.
    if (std::all_of(numbers.begin(), numbers.end(), [](double x) { return x == 0; })) return "";
    char cell[64];
    snprintf(cell, sizeof(cell), "  %-24s %10.2f", name, numbers[0]);
    std::string line = cell;
    for (size_t i = 1; i < numbers.size(); i++) {
        snprintf(cell, sizeof(cell), " %+10.2f", numbers[i] - numbers[0]);
        line += cell;
    }
    return line + "\n";
}

// Why the others lose: the parts of their steps add up to their times, rows of memory to a rank's.
inline std::string differences_text(const std::vector<const Trial*>& trials,
                                    const std::vector<std::string>& names) {
    // The first column has numbers, the others what is added to them.
    std::string text = "what the others have more than the best\n  ms of a step            ";
    char cell[32];
    for (const std::string& name : names) {
        snprintf(cell, sizeof(cell), " %10s", name.c_str());
        text += cell;
    }
    text += "\n";
    // A row asks each trial for its number.
    auto row = [&](const char* name, auto number) {
        std::vector<double> numbers;
        for (const Trial* t : trials)
            numbers.push_back(number(*t));
        text += difference_line(name, numbers);
    };

    // Time by part, then memory by row.
    for (const TimePart& part : time_parts())
        row(part.name, [&](const Trial& t) { return 1e3 * t.parts.*part.part; });
    row("together", [](const Trial& t) { return 1e3 * t.seconds; });
    text += "  GiB of the fullest rank\n";
    for (const char* name : {"weights", "gradients", "master weights", "optimizer moments",
                             "constants", "activations"})
        row(name, [&](const Trial& t) {
            auto found = t.memory.find(name);
            return found == t.memory.end() ? 0 : found->second / GIB;
        });
    row("together", [](const Trial& t) { return t.bytes / GIB; });
    return text;
}

// The answer: the command, those that come next, and `yours`, which the user's flags name.
inline std::string answer_text(const Config& user, const PlanQuestion& q, const Answer& a,
                               const Trial* yours = nullptr) {
    std::string text = concat(
        "plan for ", q.gpus, q.gpus > 1 ? " ranks on " : " rank on ", q.machine.name, ", ",
        bytes_text(q.room), " each; ", q.config.batch_tokens, " tokens a step, ", q.config.seq,
        " a sequence\nof ", a.search.listed, " layouts ", a.search.proposals.size(),
        " may fit, ", a.simulated, " were simulated\n");

    // Put the best first, then the others as fast as they are, then the user's.
    std::vector<const Trial*> trials = {&a.best[a.chosen]};
    std::vector<std::string> names = {"best"};
    for (size_t i = 0; i < a.best.size(); i++)
        if (i != a.chosen) {
            trials.push_back(&a.best[i]);
            names.push_back(concat(names.size() + 1));
        }
    if (yours) {
        trials.push_back(yours);
        names.push_back("yours");
    }
    for (size_t i = 0; i < trials.size(); i++)
        text += trial_line(*trials[i], a, q, names[i]);
    if (yours && yours->bytes > q.room)
        text += concat("  yours does not fit: it takes ", bytes_text(yours->bytes - q.room),
                       " too much\n");
    if (user.explain && trials.size() > 1) text += differences_text(trials, names);
    return text + "run it:\n  " + command_text(user, q, trials[0]->proposal) + "\n";
}

// ----------------------------------------------------------------------------
// questions that have no answer

// The most ranks up to so many that have a layout; 0: none has.
inline int nearest_gpus(PlanQuestion q) {
    // List what the grids can make, the largest first, and ask.
    std::set<std::array<int, 4>, std::greater<>> worlds; // ranks, tp, pp, dp
    int64_t samples = std::max<int64_t>(1, q.config.batch_tokens / q.config.seq);
    for (int tp = 1; tp <= q.machine.cards; tp++)
        for (int pp = 1; pp <= int(q.shape.L) + 2; pp++) {
            int dp = int(std::min<int64_t>(samples, q.gpus / tp / pp));
            while (dp > 1 && samples % dp)
                dp--;
            if (dp > 0) worlds.insert({dp * tp * pp, tp, pp, dp});
        }

    // Take the first that is allowed.
    for (auto [ranks, tp, pp, dp] : worlds) {
        Proposal p;
        p.tp = tp;
        p.pp = pp;
        p.dp = dp;
        if (ranks <= q.gpus && refuse_proposal(q, p).empty()) return ranks;
    }
    return 0;
}

// No grid is allowed: say why the plainest is refused, and which number of ranks has one. A batch
// that another number divides helps as well.
inline std::string refuse_ranks(const PlanQuestion& q, const std::string& why) {
    // Where not even one rank has a layout the reason says all.
    int near = nearest_gpus(q);
    return concat("--plan auto: no layout of ", q.gpus, " ranks is allowed (", why, ")",
                  near ? concat(": try ", near, " ranks, or another --batch-tokens") : "");
}

// No layout fits: what lacks, and which other flag frees most of the leanest one.
template <typename T, typename S>
std::string refuse_room(const PlanQuestion& q, const Answer& a, S where) {
    auto bytes_with = [&](const char* flag, const char* value) {
        PlanQuestion other = q;
        Trial t = {a.search.leanest};
        other.config.machine = ""; // moves between tiers have bytes, and no time
        if (*flag) set_flag(other.config, flag, value);
        Config c = other.config;
        set_proposal(c, t.proposal);
        if (!config_check(c, q.shape).empty()) return double(INFINITY);
        place_proposal<T>(other, t, t.proposal.estimate.fullest, where);
        return t.bytes;
    };

    // Ask each flag that takes bytes from the device, and changes neither model nor batch.
    double least = bytes_with("", ""), best = least;
    std::string fix = "more ranks, a smaller --model or a shorter --seq";
    const char* flags[][2] = {{"masters", "none"}, {"masters", "remainder"},
                              {"states", "8bit"}, {"states", "bf16"},
                              {"offload", "optimizer"}, {"offload", "optimizer,gradients"}};
    for (auto& [flag, value] : flags) {
        // On a CPU what is offloaded stays in the same memory.
        double bytes = bytes_with(flag, value);
        if (bytes >= best) continue;
        best = bytes;
        fix = concat("--", flag, " ", value, ", which frees most, ", bytes_text(least - bytes),
                     bytes <= q.room ? ", and fits" : "; more ranks or a smaller --model too");
        // Its time is not simulated.
        if (!strcmp(flag, "offload")) fix += ", beside these flags and without --plan";
    }
    return concat("--plan auto: no layout of ", q.gpus, q.gpus > 1 ? " ranks" : " rank", " fits ",
                  bytes_text(q.room), ": the leanest (", proposal_text(a.search.leanest),
                  ") takes ", bytes_text(least), ", ", bytes_text(least - q.room),
                  " too much: try ", fix);
}

// ----------------------------------------------------------------------------
// the command line

// The machine that is asked about: --machine, the GPU that is here, or the CPU.
template <typename S> Machine machine_asked(const Config& c, S where) {
    // A card that the table does not know needs a FILE.
    Machine machine;
    std::string name = c.machine;
    if (name.empty()) {
        const Machine* here = nullptr;
        if constexpr (!std::is_same_v<S, Cpu>) {
            std::string device = device_name(where);
            here = machine_of_device(device);
            if (!here)
                or_die("--plan auto: " + device + " is no row of --machine: give one that is "
                       "like it, or a FILE");
        }
        name = here ? here->name : "cpu";
    }
    or_die(machine_named(&machine, name));

    // Ranks that are threads share one card, and are neighbours.
    int sharers = c.explain && c.gpus ? 1 : c.local_ranks;
    machine.cards = std::max(machine.cards, double(sharers));
    for (double Machine::*rate : {&Machine::half_tf, &Machine::single_tf, &Machine::memory_tb})
        machine.*rate /= sharers;
    return machine;
}

// Bytes that each rank may take: --memory, what this machine has left, or most of a card.
template <typename S> double room_asked(const Run& run, const Machine& machine, S where) {
    const Config& c = run.config;
    // Threads of a process share one card.
    double card = 0.95 * machine.memory_gb * GIB; // CUDA's context and libraries have the rest
    if (c.memory > 0) return c.memory * GIB;
    if (c.explain) return card / (c.gpus ? 1 : c.local_ranks);
    if (!std::is_same_v<S, Cpu>) return card / c.local_ranks;

    // All ranks choose by the least that one of them finds.
    std::vector<int64_t> all(size_t(run.world.size));
    int64_t mine = int64_t(memory_share(run, where)) / c.local_ranks;
    all_gather(run.world, all.data(), &mine, 1, Cpu{});
    return double(*std::min_element(all.begin(), all.end()));
}

// The question of a command line. A batch that it leaves out is a micro-batch of each rank.
template <typename S> PlanQuestion question_of(const Run& run, S where) {
    // The same on all ranks.
    PlanQuestion q;
    const Config& c = run.config;
    q.shape = run.shape;
    q.machine = machine_asked(c, where);
    q.gpus = c.gpus ? c.gpus : std::max(run.world.size, c.local_ranks);
    q.room = room_asked(run, q.machine, where);

    // A trial is checked as --explain is: its ranks need not be there.
    q.config = c;
    q.config.plan = "none";
    q.config.gpus = 0;
    q.config.local_ranks = 1;
    q.config.explain = true;
    q.config.memory = 0;
    if (c.machine.empty()) q.config.machine = q.machine.name;
    if (c.seq == 0) q.config.seq = int(std::min(run.shape.P, size_t(256)));
    if (c.batch_tokens == 0)
        q.config.batch_tokens = int64_t(c.micro_batch) * q.config.seq * q.gpus;
    return q;
}

// The layout that the user's own flags name, where they name one; a refusal is said.
template <typename T, typename S>
bool named_layout(const PlanQuestion& q, Trial* yours, S where) {
    // Flags that only say a batch name no layout.
    Config c = q.config;
    bool any = false;
    for (const char* name : planned_flags())
        any |= given(c, name);
    if (!any) return false;
    if (c.dp == 0) c.dp = std::max(1, q.gpus / (c.tp * c.pp * c.cp));

    // Its ranks must be as many, or its time would be another question's.
    std::string wrong = config_check(c, q.shape);
    if (wrong.empty() && rank_count(c) != q.gpus)
        wrong = concat("its axes are ", rank_count(c), " ranks, and there are ", q.gpus);
    if (!wrong.empty()) {
        printf("the layout that the flags name: %s\n", wrong.c_str());
        return false;
    }
    *yours = simulate_proposal<T>(q, proposal_of(c), where);
    for (int rank = 0; rank < c.pp; rank++)
        place_proposal<T>(q, *yours, rank, where);
    return true;
}

// Choose for a run, or print. Returns whether there is something to run. Layouts that are refused,
// and those that nowhere fit, end the program with what would help.
template <typename T, typename S> bool plan_run(Run& run, S where) {
    Config& c = run.config;
    PlanQuestion q = question_of(run, where);
    Answer a = answer_question<T>(q, where);
    if (a.search.listed == 0) or_die(refuse_ranks(q, a.search.why));
    if (a.best.empty()) or_die(refuse_room<T>(q, a, where));
    Trial yours;
    bool named = c.explain && named_layout<T>(q, &yours, where);
    // A run names its flags, too: it can be had again without the planner.
    if (is_first(run))
        printf("%s", answer_text(c, q, a, named ? &yours : nullptr).c_str());
    if (c.explain) return false;

    // Take the flags: from here on the run is as if they had been given.
    set_proposal(c, a.best[a.chosen].proposal);
    c.batch_tokens = q.config.batch_tokens;
    check_same(run.world, "what --plan auto chose", proposal_text(a.best[a.chosen].proposal));
    return true;
}

// The same by the type of --precision.
template <typename S> bool plan_run_as(Run& run, S where) {
    // Bytes depend on it.
    const std::string& precision = run.config.precision;
    if (precision == "bf16") return plan_run<bf16>(run, where);
    if (precision == "fp16") return plan_run<fp16>(run, where);
    return plan_run<float>(run, where);
}

} // namespace llmc
