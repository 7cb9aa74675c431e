// account.h - where a run's time goes: every second belongs to one kind of work
//   start     from the program's start to its first step, loading left out: planning, checks of
//             memory and disk, allocation, trials of algorithms
//   load      weights and moments, from a checkpoint, a folder or a seed
//   steps     optimizer steps, with the wait for their data
//   wait      the part of the steps in which the first rank waited for others: communication that
//             no computing hides, and ranks that come late. On GPUs streams wait, not the host:
//             there --timeline FILE.txt measures it by events; without it this time is of the steps
//   evaluate, sample, save, export
//   rest      everything else: agreeing on signals, printing lines
//   A kind that begins ends the one before, so the seconds add up to the time since the start. The
//   account also counts the steps that a killed run had done and that this one does again.
#pragma once
#include "../comm/rank_status.h"
#include "../streams.h"
#include "../comm/text.h"
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

namespace llmc {

enum class Work : uint8_t { START, LOAD, STEPS, EVALUATE, SAMPLE, SAVE, EXPORT, REST, WAIT };
constexpr std::array<const char*, 9> WORK_NAMES = {
    "start", "load", "steps", "evaluate", "sample", "save", "export", "rest", "wait"};

// The seconds of each kind so far, and the kind that is running now.
struct Account {
    std::array<double, WORK_NAMES.size()> seconds = {};
    Work now = Work::START;
    double since = clock_seconds(); // when `now` began

    // Turn to another kind, and return the one before.
    Work turn_to(Work next) {
        double time = clock_seconds();
        seconds[size_t(now)] += time - since;
        since = time;
        return std::exchange(now, next);
    }
    // Move some seconds from one kind to another.
    void recount(Work from, Work to, double some) {
        seconds[size_t(from)] -= some;
        seconds[size_t(to)] += some;
    }
    // The seconds of a kind up to this moment, also while it is running.
    double spent_on(Work work) const {
        return seconds[size_t(work)] + (work == now ? clock_seconds() - since : 0);
    }
    double total() const {
        double sum = 0;
        for (double s : seconds) sum += s;
        return sum;
    }
};

// Counts time as one kind of work while it lives, then returns to the kind before.
struct Spend {
    Account& account;
    Work before;
    Spend(Account& a, Work work) : account(a), before(a.turn_to(work)) {}
    ~Spend() { account.turn_to(before); }
    Spend(const Spend&) = delete;
};

// "12 s: 91.0% steps, 6.2% start, 2.8% save": the largest share first, shares below a
// thousandth left out.
inline std::string account_text(Account account) {
    account.turn_to(account.now);
    std::vector<std::pair<double, const char*>> shares;
    for (size_t i = 0; i < WORK_NAMES.size(); i++)
        shares.push_back({account.seconds[i] / account.total(), WORK_NAMES[i]});
    std::ranges::stable_sort(shares, std::greater<>(), [](const auto& x) { return x.first; });

    // Write the total, then the shares.
    std::string text = duration_text(account.total());
    const char* between = ": ";
    for (auto& [share, name] : shares) {
        if (share < 0.001) break;
        text += formatted("%s%.1f%% %s", between, 100 * share, name);
        between = ", ";
    }
    return text;
}

// The log's line: the total and each kind in seconds, and how many steps were done again because an
// earlier process lost them.
inline nlohmann::json account_json(Account account, int64_t step, int64_t repeated) {
    account.turn_to(account.now);
    nlohmann::json kinds = nlohmann::json::object();
    for (size_t i = 0; i < WORK_NAMES.size(); i++)
        kinds[WORK_NAMES[i]] = account.seconds[i];
    return {{"step", step},
            {"wall", account.total()},
            {"seconds", kinds},
            {"repeated_steps", repeated}};
}

// ----------------------------------------------------------------------------
// what a step's time goes to: a table of the kinds of actions, the longest first
//   action               count     total ms    ms each   share
//   B block                240      812.113      3.384   48.1%
//   ...
//   between                 20       11.402      0.570    0.7%
//   A share is that of the steps' time, from their first action to their loss. The time between
//   actions is a GPU's wait for the host. With NCCL a collective runs beside the actions: its line
//   shows only its start, and the time that compute waits for it stands under WAIT.

// All actions of one kind, as action_kind() names it.
struct ProfileRow {
    std::string kind;
    int64_t count = 0;
    double seconds = 0;
};

// The rows over some steps, and the time of those steps.
struct Profile {
    std::vector<ProfileRow> rows;
    int64_t steps = 0;
    double seconds = 0;
};

// Add a step that took `seconds`.
inline void profile_add(Profile& p, const std::vector<TimedAction>& actions, double seconds) {
    p.steps++;
    p.seconds += seconds;

    // Find each action's row. There are about twenty kinds, so a linear search is fast enough.
    for (const TimedAction& a : actions) {
        auto row = std::ranges::find(p.rows, a.kind, &ProfileRow::kind);
        if (row == p.rows.end())
            row = p.rows.insert(row, {a.kind});
        row->count++;
        row->seconds += a.end - a.start;
    }
}

// The whole table. `title` names the run.
inline std::string profile_text(Profile p, const std::string& title) {
    // Add the time between actions as the last row.
    double left = p.seconds;
    for (const ProfileRow& row : p.rows)
        left -= row.seconds;
    std::ranges::stable_sort(p.rows, std::greater<>(), &ProfileRow::seconds);
    p.rows.push_back({"between", p.steps, left});

    // Times are in milliseconds: a step's actions take from thousandths to thousands.
    std::string text = title + "\n";
    text += formatted("%lld steps of %.3f ms\n%-24s %9s %12s %10s %7s\n", (long long)p.steps,
                      p.seconds * 1e3 / double(p.steps), "action", "count", "total ms", "ms each",
                      "share");
    for (const ProfileRow& row : p.rows)
        text += formatted("%-24s %9lld %12.3f %10.3f %6.1f%%\n", row.kind.c_str(),
                          (long long)row.count, row.seconds * 1e3,
                          row.seconds * 1e3 / double(row.count), 100 * row.seconds / p.seconds);
    return text;
}

} // namespace llmc
