// profile.h - what a step's time goes to: a table of the kinds of actions, the longest first
//   action               count     total ms    ms each   share
//   B block                240      812.113      3.384   48.1%
//   ...
//   between                 20       11.402      0.570    0.7%
//   A share is that of the steps' time, from their first action to their loss. The time between
//   actions is a GPU's wait for the host. With NCCL a collective runs beside the actions: its line
//   shows only its start, and the time that compute waits for it stands under WAIT.
#pragma once
#include <algorithm>
#include "../stopwatch.h"
#include "../text.h"

namespace llmc {

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
        auto same = [&](const ProfileRow& row) { return row.kind == a.kind; };
        auto row = std::find_if(p.rows.begin(), p.rows.end(), same);
        if (row == p.rows.end())
            row = p.rows.insert(row, {a.kind});
        row->count++;
        row->seconds += a.end - a.start;
    }
}

// A row as a line. Times are in milliseconds: a step's actions take from thousandths to thousands.
inline std::string profile_line(const ProfileRow& row, double all) {
    char line[160];
    snprintf(line, sizeof(line), "%-24s %9lld %12.3f %10.3f %6.1f%%\n", row.kind.c_str(),
             (long long)row.count, row.seconds * 1e3, row.seconds * 1e3 / double(row.count),
             100 * row.seconds / all);
    return line;
}

// The whole table. `title` names the run.
inline std::string profile_text(Profile p, const std::string& title) {
    // Add the time between actions as the last row.
    double left = p.seconds;
    for (const ProfileRow& row : p.rows)
        left -= row.seconds;
    std::stable_sort(p.rows.begin(), p.rows.end(),
                     [](auto& a, auto& b) { return a.seconds > b.seconds; });
    p.rows.push_back({"between", p.steps, left});

    // Name the columns that profile_line() fills.
    char head[160];
    snprintf(head, sizeof(head), "%lld steps of %.3f ms\n%-24s %9s %12s %10s %7s\n",
             (long long)p.steps, p.seconds * 1e3 / double(p.steps), "action", "count", "total ms",
             "ms each", "share");
    std::string text = title + "\n" + head;
    for (const ProfileRow& row : p.rows)
        text += profile_line(row, p.seconds);
    return text;
}

} // namespace llmc
