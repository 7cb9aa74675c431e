// flip.h - the smallest change of one number of the machine that makes --plan auto choose otherwise
//   A choice by simulation is as good as the machine's numbers. find_flip() asks for each number x:
//     x' = x (1 + k/1000)    the smallest |k|, at most 500, at which choose_trial() takes another
//   Each number is first changed by as much as the least flip so far, then the interval is halved:
//   this takes for granted that a choice, once flipped, stays so under a larger change.
//   Rates change the times of the layouts that are shown: each is simulated again. Memory changes
//   which layouts fit: those shown may fall out, and those that were too large may come in, so
//   nothing is simulated twice. Layouts that are neither are not looked at.
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
        {"speed of matrix products", "of the peak", &M::gemm},
    };
    return all;
}

// A change that flips the choice: a number, by how many thousandths, and what wins then.
struct Flip {
    const Knob* knob = nullptr; // null: none was found
    int thousandths = 0;
    Proposal winner = {};      // dp 0: none of the layouts that were looked at fits
    bool memory_alone = false; // rates were not varied: the pipelines are too long
};

// The layouts that a flip is sought among. Their times are those of the question's machine.
struct FlipSearch {
    const PlanQuestion& q;
    std::string chosen;               // proposal_text() of the choice
    std::vector<Trial> shown, larger; // those that fit, and those that are too large
    std::vector<Rehearsal> plans;     // [shown]
};

// Limits: of the change, of layouts that more memory would admit.
constexpr int MOST_THOUSANDTHS = 500;
constexpr size_t MOST_LARGER = 6;
// Actions of a simulation of all shown layouts, beyond which only memory is varied; and of one that
// is too large, beyond which it is left out.
constexpr double MOST_FLIP_ACTIONS = 5e4;

// The question with one number of its machine changed. Memory also changes the room.
inline PlanQuestion changed_question(const PlanQuestion& q, const Knob& knob, int thousandths) {
    PlanQuestion other = q;
    double factor = 1 + thousandths / 1000.0;
    other.machine.*knob.field *= factor;
    if (knob.field == &Machine::memory_gb) other.room *= factor;
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

// Whether the planner takes another layout if one number changes. winner: receives it.
template <typename T>
bool flips_at(const FlipSearch& s, const Knob& knob, int thousandths, Proposal* winner) {
    PlanQuestion q = changed_question(s.q, knob, thousandths);
    std::vector<Trial> trials;

    // Other memory: the same times, other layouts. Other rates: the same layouts, other times.
    if (knob.field == &Machine::memory_gb) {
        for (const std::vector<Trial>* some : {&s.shown, &s.larger})
            for (const Trial& t : *some)
                if (t.bytes <= q.room) trials.push_back(t);
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
    // Leave out those that surely lose.
    std::vector<Trial> trials;
    double slowest = SURELY_SLOWER * a.best[a.chosen].seconds;
    size_t tried = 0;
    for (const Proposal& p : a.larger) {
        if (tried++ == MOST_LARGER || p.estimate.seconds > slowest) break;
        if (15.0 * p.pp * double(q.shape.L) > MOST_FLIP_ACTIONS) continue; // it takes seconds
        Trial t = simulate_proposal<T>(q, p, where);
        if (!t.wrong.empty()) continue;
        place_proposal<T>(q, t, p.estimate.fullest, where);
        if (t.bytes > q.room) trials.push_back(t);
    }
    return trials;
}

// Find the smallest change of one number that flips the choice.
template <typename T, typename S>
Flip find_flip(const PlanQuestion& q, const Answer& a, S where) {
    // Gather the layouts, and make the plans of those that fit.
    Flip flip;
    if (a.best.empty()) return flip;
    std::string chosen = proposal_text(a.best[a.chosen].proposal);
    FlipSearch s = {q, chosen, a.best, larger_trials<T>(q, a, where), {}};
    double actions = 0;
    for (const Trial& t : s.shown)
        actions += 15.0 * t.proposal.pp * double(q.shape.L);
    flip.memory_alone = actions > MOST_FLIP_ACTIONS;
    for (size_t i = 0; i < s.shown.size() && !flip.memory_alone; i++)
        s.plans.push_back(rehearse_proposal<T>(q, s.shown[i].proposal, where));

    // Ask of each number whether a smaller change than the least so far flips the choice.
    int most = MOST_THOUSANDTHS;
    for (const Knob& knob : knobs())
        for (int sign : {1, -1}) {
            if (flip.memory_alone && knob.field != &Machine::memory_gb) break;
            Proposal winner;
            int change = within_range(q.machine, knob.field, sign, most);
            if (change == 0 || !flips_at<T>(s, knob, sign * change, &winner)) continue;

            // Halve the interval between a change that does not flip and one that does.
            int low = 0;
            while (change - low > 1) {
                int middle = (low + change) / 2;
                Proposal other;
                bool flips = flips_at<T>(s, knob, sign * middle, &other);
                if (flips) winner = other;
                (flips ? change : low) = middle;
            }
            flip.knob = &knob;
            flip.thousandths = sign * change;
            flip.winner = winner;
            most = change - 1;
        }
    return flip;
}

// The flip as a line. memory_flag: the user gave --memory, which is changed instead of the card's.
inline std::string flip_text(const PlanQuestion& q, const Flip& flip, bool memory_flag) {
    // Without a flip the choice stands firm.
    const char* scope = flip.memory_alone ? " (rates were not varied: the pipelines are long)" : "";
    if (!flip.knob)
        return concat("what would flip the choice: no single number of the machine, by ",
                      MOST_THOUSANDTHS / 10, "% or less", scope, "\n");
    const Knob& knob = *flip.knob;
    bool room = memory_flag && knob.field == &Machine::memory_gb;
    double now = room ? q.room / GIB : q.machine.*knob.field;
    double then = now * (1 + flip.thousandths / 1000.0);

    // Four digits tell a thousandth apart.
    char line[160];
    snprintf(line, sizeof(line), "%.1f%% %s %s (%.4g instead of %.4g %s)",
             std::abs(flip.thousandths) / 10.0, flip.thousandths > 0 ? "more" : "less", knob.words,
             then, now, room ? "GiB" : knob.unit);
    bool fits = flip.winner.dp > 0;
    return concat("what would flip the choice: with ", line,
                  fits ? " this would win" : " none of these would fit", scope,
                  fits ? ":\n  " + proposal_text(flip.winner) : "", "\n");
}

} // namespace llmc
