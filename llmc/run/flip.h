// flip.h - the smallest change of one number of the machine that makes --plan auto choose otherwise
//   A choice by simulation is as good as the machine's numbers. find_flip() asks for each number x:
//     x' = x (1 + k/1000)    the smallest |k|, at most 500, at which choose_trial() takes another
//   Each number is first changed by a thousandth less than the least flip so far; if that flips the
//   choice too, the interval is halved. A choice, once flipped, is taken to stay so under a larger
//   change.
//   Rates change the times of the layouts that are shown: each is simulated again. Memory changes
//   which layouts fit: those shown may fall out, and those that were too large may come in, so
//   nothing is simulated twice. Layouts that are neither are looked at only in the end: where that
//   is quick, a plan for the changed machine says who wins there.
//   find_lead() asks the same for a layout that the user names: which change, from a tenth to ten
//   times, makes it at least as fast as all that are shown?
//   Cost: some hundred simulations, of plans that are made once. Long pipelines would take seconds,
//   so there only memory is varied, and the line says so.
#pragma once
#include "plan_search.h"

namespace llmc {

// A number of the machine that is varied, in words, and its unit.
struct Knob {
    const char* words;
    const char* unit;
    MachineNumber field;
};
inline const std::vector<Knob>& knobs() {
    typedef Machine M;
    static const std::vector<Knob> all = {
        {"memory", "GB", &M::memory_gb},
        {"bandwidth between nodes", "GB/s", &M::nic_gb},
        {"bandwidth inside a node", "GB/s", &M::link_gb},
        {"bandwidth of a card's memory", "TB/s", &M::memory_tb},
        {"bandwidth to the host's memory", "GB/s", &M::host_gb},
        {"speed of matrix products", "of the peak", &M::gemm},
    };
    return all;
}

// A change that flips the choice: a number, by how many thousandths, and what wins then.
struct Flip {
    const Knob* knob = nullptr; // null: none was found
    int thousandths = 0;
    Proposal winner = {};      // dp 0: none of the layouts that were looked at fits
    bool kept = false;         // a plan for the changed machine keeps the choice
    bool planned = false;      // all layouts were looked at, by a plan for the changed machine
    bool memory_alone = false; // rates were not varied: the pipelines are too long
};

// The layouts that a flip is sought among. Their times are those of the question's machine.
struct FlipSearch {
    const PlanQuestion& q;
    std::string chosen;               // proposal_text() of the choice
    std::vector<Trial> shown, larger; // those that fit, and those that are too large
    std::vector<Rehearsal> plans;     // [shown]
};

// Limits: of the change, of layouts that more memory would admit, and of those that are planned
// anew, which takes a tenth of a second.
constexpr int MOST_THOUSANDTHS = 500;
constexpr size_t MOST_REPLANNED = 20000;
constexpr size_t MOST_LARGER = 6;
// A limit on simulated actions. Where all shown layouts together have more, only memory is varied;
// a layout that has more alone, and did not fit, is left out.
constexpr double MOST_FLIP_ACTIONS = 5e4;

// The question with one number of its machine changed. Memory also changes the room.
inline PlanQuestion changed_question(const PlanQuestion& q, const Knob& knob, int thousandths) {
    PlanQuestion other = q;
    double factor = 1 + thousandths / 1000.0;
    other.machine.*knob.field *= factor;
    if (knob.field == &Machine::memory_gb)
        other.room *= factor;
    return other;
}

// The largest change, in thousandths up to `most`, after which a machine may still have the number:
// a share above 1 is none.
inline int within_range(const Machine& machine, MachineNumber number, int sign, int most) {
    for (const MachineField& f : machine_fields()) {
        if (f.field != number) continue;
        double edge = sign > 0 ? f.most : f.least;
        double reach = 1000 * std::fabs(edge / (machine.*number) - 1);
        return std::min(most, int(std::min(reach, 1e6)));
    }
    return 0;
}

// Whether the planner takes another layout if one number changes. winner: receives the choice.
template <typename T>
bool flips_at(const FlipSearch& s, const Knob& knob, int thousandths, Proposal* winner) {
    PlanQuestion q = changed_question(s.q, knob, thousandths);
    std::vector<Trial> trials;

    // Other memory: the same times, other layouts. Other rates: the same layouts, other times.
    if (knob.field == &Machine::memory_gb) {
        for (const std::vector<Trial>* some : {&s.shown, &s.larger})
            for (const Trial& t : *some)
                if (t.bytes <= q.room)
                    trials.push_back(t);
    } else {
        trials = s.shown;
        for (size_t i = 0; i < trials.size(); i++)
            trials[i].seconds = simulate_rehearsal<T>(q.machine, s.plans[i]).seconds;
    }
    winner->dp = 0;
    if (trials.empty()) return true;

    // Choose as answer_question() does.
    std::stable_sort(trials.begin(), trials.end(),
                     [](const Trial& x, const Trial& y) { return x.seconds < y.seconds; });
    *winner = trials[choose_trial(trials)].proposal;
    return proposal_text(*winner) != s.chosen;
}

// Simulate and place the fastest of the layouts that are too large, by their estimates.
template <typename T, typename S>
std::vector<Trial> larger_trials(const PlanQuestion& q, const Answer& a, S where) {
    // Leave out those that surely lose, and those that fit after all: they are no question of room.
    std::vector<Trial> trials;
    double slowest = SURELY_SLOWER * a.best[a.chosen].seconds;
    size_t tried = 0;
    for (const Proposal& p : a.larger) {
        if (tried++ == MOST_LARGER || p.estimate.seconds > slowest)
            break;
        if (rehearsal_actions(q, p) > MOST_FLIP_ACTIONS)
            continue;
        Trial t = simulate_proposal<T>(q, p, where);
        if (!t.wrong.empty()) continue;
        fits_everywhere<T>(q, t, where);
        if (t.bytes > q.room && t.host <= q.host_room)
            trials.push_back(t);
    }
    return trials;
}

// The smallest change of a number, in thousandths up to `most`, at which flips(change) holds; 0: it
// does not hold at `most` either. Once it holds it is taken to hold under larger changes.
template <typename F>
int smallest_change(const Machine& machine, const Knob& knob, int sign, int most, F flips) {
    int change = within_range(machine, knob.field, sign, most);
    if (change == 0 || !flips(sign * change))
        return 0;

    // Halve the interval between a change that does not flip and one that does.
    int low = 0;
    while (change - low > 1) {
        int middle = (low + change) / 2;
        bool held = flips(sign * middle);
        (held ? change : low) = middle;
    }
    return change;
}

// Make the plans of the shown layouts. Returns true, and makes none, if their pipelines are too
// long to vary rates.
template <typename T, typename S> bool rehearse_shown(FlipSearch& s, S where) {
    double actions = 0;
    for (const Trial& t : s.shown)
        actions += rehearsal_actions(s.q, t.proposal);
    if (actions > MOST_FLIP_ACTIONS) return true;
    for (const Trial& t : s.shown)
        s.plans.push_back(rehearse_proposal<T>(s.q, t.proposal, where));
    return false;
}

// Find the smallest change of one number that flips the choice.
template <typename T, typename S>
Flip find_flip(const PlanQuestion& q, const Answer& a, S where) {
    // Gather the layouts, and make the plans of those that fit.
    Flip flip;
    if (a.best.empty()) return flip;
    std::string chosen = proposal_text(a.best[a.chosen].proposal);
    FlipSearch s = {q, chosen, a.best, larger_trials<T>(q, a, where), {}};
    flip.memory_alone = rehearse_shown<T>(s, where);

    // Ask of each number whether a smaller change than the least so far flips the choice.
    int most = MOST_THOUSANDTHS;
    for (const Knob& knob : knobs())
        for (int sign : {1, -1}) {
            if (flip.memory_alone && knob.field != &Machine::memory_gb)
                break;
            Proposal winner;
            int change = smallest_change(q.machine, knob, sign, most, [&](int k) {
                return flips_at<T>(s, knob, k, &winner);
            });
            if (change == 0) continue;

            // Ask once more who wins there: the search may have ended at another change.
            flips_at<T>(s, knob, sign * change, &winner);
            flip.knob = &knob;
            flip.thousandths = sign * change;
            flip.winner = winner;
            most = change - 1;
        }
    if (!flip.knob || a.search.listed > MOST_REPLANNED)
        return flip;

    // Plan for the changed machine: a layout that is not shown may win there.
    Answer there = answer_question<T>(changed_question(q, *flip.knob, flip.thousandths), where);
    Proposal winner;
    winner.dp = 0;
    if (!there.best.empty()) winner = there.best[there.chosen].proposal;
    flip.kept = proposal_text(winner) == chosen;
    flip.planned = !flip.kept;
    if (flip.planned) flip.winner = winner;
    return flip;
}

// Whether the last shown layout fits and is at least as fast as all others if one number changes.
template <typename T> bool leads_at(const FlipSearch& s, const Knob& knob, int thousandths) {
    // Other memory leaves the times as they are.
    PlanQuestion q = changed_question(s.q, knob, thousandths);
    if (s.shown.back().bytes > q.room)
        return false;
    auto seconds = [&](size_t i) {
        if (knob.field == &Machine::memory_gb)
            return s.shown[i].seconds;
        return simulate_rehearsal<T>(q.machine, s.plans[i]).seconds;
    };
    double mine = seconds(s.shown.size() - 1);
    for (size_t i = 0; i + 1 < s.shown.size(); i++)
        if (seconds(i) < mine) return false;
    return true;
}

// The changes that find_lead() tries, in thousandths: down to a tenth of a number, up to ten times.
constexpr int LEAST_SHARE = 900, MOST_TIMES = 9000;

// Find the smallest change of one number, as a factor, with which a layout that the user names
// leads all that are shown.
template <typename T, typename S>
Flip find_lead(const PlanQuestion& q, const Answer& a, const Trial& yours, S where) {
    // Yours is the last of the layouts, as leads_at() wants it.
    Flip flip;
    FlipSearch s = {q, "", a.best, {}, {}};
    s.shown.push_back(yours);
    flip.memory_alone = rehearse_shown<T>(s, where);

    // Compare changes by their factors: twice as much is as far as half.
    double least = INFINITY;
    for (const Knob& knob : knobs())
        for (int sign : {1, -1}) {
            if (flip.memory_alone && knob.field != &Machine::memory_gb)
                break;
            int most = sign > 0 ? MOST_TIMES : LEAST_SHARE;
            int change = smallest_change(q.machine, knob, sign, most, [&](int k) {
                return leads_at<T>(s, knob, k);
            });
            double far = std::fabs(std::log(1 + sign * change / 1000.0));
            if (change == 0 || far >= least) continue;
            least = far;
            flip.knob = &knob;
            flip.thousandths = sign * change;
            flip.winner = yours.proposal;
        }
    return flip;
}

// A number in five digits, rounded up or down.
inline double rounded(double x, bool up) {
    double unit = std::pow(10, std::floor(std::log10(x)) - 4);
    double steps = x / unit;
    return unit * (up ? std::ceil(steps - 1e-6) : std::floor(steps + 1e-6));
}

// A change in words. memory_flag: the user gave --memory, which is changed instead of the card's.
inline std::string change_text(const PlanQuestion& q, const Flip& flip, bool memory_flag) {
    const Knob& knob = *flip.knob;
    bool room = memory_flag && knob.field == &Machine::memory_gb;
    double now = room ? q.room / GIB : q.machine.*knob.field;
    double then = rounded(now * (1 + flip.thousandths / 1000.0), flip.thousandths > 0);

    // Who types the number is past the flip, not short of it.
    char line[160];
    snprintf(line, sizeof(line), "%.1f%% %s %s (%.5g instead of %.5g %s)",
             std::abs(flip.thousandths) / 10.0, flip.thousandths > 0 ? "more" : "less", knob.words,
             then, now, room ? "GiB" : knob.unit);
    return line;
}

// The line that says which change makes the user's layout lead; "" if it leads already.
inline std::string lead_text(const PlanQuestion& q, const Answer& a, const Trial& yours,
                             const Flip& flip, bool memory_flag) {
    if (yours.bytes <= q.room && yours.seconds <= a.best[0].seconds)
        return "";
    const char* scope = flip.memory_alone ? " (rates were not varied: the pipelines are long)" : "";
    std::string what = flip.knob ? "with " + change_text(q, flip, memory_flag)
                                 : "no single number of the machine, from a tenth to ten times";
    return concat("what would make yours as fast as any of these: ", what, scope, "\n");
}

// The flip as a line. memory_flag: the user gave --memory, which is changed instead of the card's.
inline std::string flip_text(const PlanQuestion& q, const Flip& flip, bool memory_flag) {
    // Without a flip the choice stands firm.
    const char* scope = flip.memory_alone ? " (rates were not varied: the pipelines are long)" : "";
    if (!flip.knob)
        return concat("what would flip the choice: no single number of the machine, by ",
                      MOST_THOUSANDTHS / 10, "% or less", scope, "\n");
    bool fits = flip.winner.dp > 0;
    const char* what = fits ? " of these this would be best"
                            : " none of the planner's above would fit";
    if (flip.kept && fits) what = " of these this would be best, but a new plan keeps the choice";
    if (flip.planned) what = fits ? " this would win" : " the planner would find none that fits";
    return concat("what would flip the choice: with ", change_text(q, flip, memory_flag), what,
                  scope, fits ? ":\n  " + proposal_text(flip.winner) : "", "\n");
}

} // namespace llmc
