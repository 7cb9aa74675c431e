// simulator.h - the time of a step: the very plans that run, event by event, before they run
//   1. A rank goes through its plan in order. Compute runs at once. All else is posted, and runs in
//      the stream of its queue, after what was posted there before it. What needs other ranks
//      also begins in the order of the host's calls, as NCCL does where streams share a GPU.
//   2. A collective starts when its last rank has arrived, a message when both ends have. An
//      exchange is over with its last message.
//   3. Before action j a rank waits for everything that finish_before() (streams.h) wants finished.
//      A message that ran beside layers has taken a share of its time from them (contention,
//      machine.h).
//   Nothing else is known here: queue_of(), finish_before() and the cost of an action (cost.h) say
//   the rest. Ranks that differ only in dp, cp or tp have equal plans and arrive together, so one
//   pipeline of pp ranks stands for a cluster of any size. Given the plans of all ranks, the same
//   code lets them meet one by one; the test finds the same result to the bit.
//   Each rank's step splits into parts that add up to it; the result has their mean over ranks.
//   Cost: linear in actions, except for finish_before().
#pragma once
#include <array>
#include "../action.h"
#include "../comm/comm.h"
#include "../layout.h"
#include "../model.h"
#include "../pipeline.h"
#include "../plan.h"
#include "../streams.h"
#include "../comm/text.h"
#include "cost.h"
#include "layer_cost.h"

namespace llmc {

// The times of an action. A collective is posted (start), gets its stream (ready), meets its last
// rank (met), and is over (end).
struct ActionTimes {
    double start = -1, ready = -1, met = -1, end = -1; // -1: not yet
    int before = -1;                                   // the collective that was posted before it
};

// An action of a rank, both by number.
struct Member {
    int rank, action;
};

// A stream: the actions posted to it, in order, how many of them have run, and when it is free.
struct Line {
    std::vector<int> posted;
    size_t over = 0;
    double free = 0;
};

// The state of a rank during the simulation.
struct SimulatedRank {
    std::vector<ActionTimes> of;       // [action]
    std::vector<std::vector<int>> due; // [action]: what must be finished before it
    std::vector<std::vector<Member>> partners; // [action]: those that it meets
    std::array<Line, 4> lines; // [queue]
    int at = 0;                // the next action
    int called = -1;           // the last collective that was posted
    double now = 0;
    Times parts;
    Line& line(Queue queue) { return lines[size_t(queue)]; }
};

// The result of a simulation.
struct StepTime {
    double seconds = 0;
    Times parts;                      // the mean over ranks: they add up to `seconds`
    std::vector<SimulatedRank> ranks; // with the times of each action
    std::string stuck;                // "", or the actions at which ranks wait forever
};

// Check that all ranks come to their end. A step in which some wait forever looks short.
inline void check_ends(const StepTime& step) {
    LLMC_CHECK(step.stuck.empty(), "%s", step.stuck.c_str());
}

// The plans of some ranks, run side by side.
struct Simulator {
    const std::vector<Plan>& plans;
    const ActionCost& cost;
    std::vector<SimulatedRank> ranks;
};

// ----------------------------------------------------------------------------
// who meets whom

// Return the meetings of an action: actions of equal numbers start together, those of other ranks
// too. sent: this rank's messages so far, by the stages that they join.
typedef std::array<int, 5> Meeting;
inline std::vector<Meeting> meetings_of(const Plan& p, int number, bool has_mates,
                                        std::map<std::pair<int, int>, int>& sent) {
    using enum Op;
    const Layout& x = p.layout;
    const Action& a = p.actions[number];
    int op = int(a.op);
    switch (a.op) {
    // COUNT, NORM and MUON join all stages, TIE the two that hold the table.
    case MUON:
        if (a.chunk >= 0) return {}; // momentum is updated without others
        return {{op, a.bucket}};
    case COUNT:
    case NORM:
    case TIE: return {{op, a.bucket}};

    // The k-th message from one stage to another meets the k-th receive there, in this pipeline.
    case SENDRECV: {
        std::vector<Meeting> all;
        int column = x.dp.rank * x.cp.size + x.cp.rank;
        int pipeline = column * x.tp.size + x.tp.rank;
        for (const Transfer& t : a.transfers) {
            int from = t.send ? x.pp.rank : t.peer;
            int to = t.send ? t.peer : x.pp.rank;
            all.push_back({op, pipeline, from, to, sent[{from, to}]++});
        }
        return all;
    }

    // Ranks of a stage have equal plans. Collectives inside layers join tp, cp and ep ranks.
    case GATHER:
    case REDUCE:
    case PUBLISH:
        if (!has_mates) return {};
        return {{op, x.pp.rank, number, x.experts.whole ? -1 : x.tp.rank}};
    default:
        if (!has_mates || !computes(a.op)) return {};
        return {{op, x.pp.rank, number, x.ep > 1 ? -1 : x.dp.rank}};
    }
}

// Let all actions of a meeting wait for each other. plans_check() has made sure that they match.
inline void join_ranks(Simulator& s) {
    std::map<Meeting, std::vector<Member>> all;
    bool has_mates = int(s.plans.size()) > s.plans[0].layout.pp.size;
    for (int r = 0; r < int(s.plans.size()); r++) {
        std::map<std::pair<int, int>, int> sent;
        int count = int(s.plans[r].actions.size());
        for (int i = 0; i < count; i++)
            for (const Meeting& m : meetings_of(s.plans[r], i, has_mates, sent))
                all[m].push_back({r, i});
    }
    for (auto& [meeting, members] : all)
        for (Member me : members) {
            std::vector<Member>& partners = s.ranks[me.rank].partners[me.action];
            partners.insert(partners.end(), members.begin(), members.end());
        }
}

// Prepare the ranks: what is due before each action, and whom it meets.
inline void prepare_ranks(Simulator& s, const Model& model) {
    for (const Plan& p : s.plans) {
        // In a stream, both halves of an exchange end together, so the earlier one says when
        // it is due.
        SimulatedRank& rank = s.ranks.emplace_back();
        rank.of.resize(p.actions.size());
        rank.partners.resize(p.actions.size());
        rank.due.resize(p.actions.size() + 1);
        std::vector<Finish> finish = finish_before(p, model); // the executor uses the same
        for (int i = 0; i < int(finish.size()); i++)
            if (queue_of(p.actions[i].op) != Queue::COMPUTE)
                rank.due[finish[i].first()].push_back(i);
    }
    join_ranks(s);
}

// Return when the last rank of an action arrived, or -1 if one has not arrived yet. `there` says
// which of its times counts as arrival.
inline double meeting(const Simulator& s, int r, int i, double ActionTimes::*there) {
    double last = s.ranks[r].of[i].*there;
    for (Member other : s.ranks[r].partners[i]) {
        double t = s.ranks[other.rank].of[other.action].*there;
        if (t < 0) return -1;
        last = std::max(last, t);
    }
    return last;
}

// ----------------------------------------------------------------------------
// the loop

// Run what waits in a rank's stream, in order, while all the ranks that meet there have arrived.
// Returns whether anything changed.
inline bool run_line(Simulator& s, int r, Line& line) {
    SimulatedRank& me = s.ranks[r];
    const Plan& p = s.plans[r];
    bool moved = false;
    while (line.over < line.posted.size()) {
        // The first in line is ready when its stream is free, and when the collective before it,
        // on whatever stream, has begun.
        int i = line.posted[line.over];
        ActionTimes& m = me.of[i];
        double begun = m.before < 0 ? 0 : me.of[m.before].ready;
        if (begun < 0) break;

        // Look whether the other ranks are ready too.
        moved |= m.ready < 0;
        m.ready = std::max({m.start, line.free, begun});
        m.met = meeting(s, r, i, &ActionTimes::ready);
        if (m.met < 0) break;

        // All ranks are there, so its end is known.
        m.end = m.met + total_of(s.cost.of(p, p.actions[i]));
        line.free = m.end;
        line.over++;
        moved = true;
    }
    return moved;
}
inline bool run_lines(Simulator& s, int r) {
    bool moved = false;
    for (Line& line : s.ranks[r].lines)
        moved |= run_line(s, r, line);
    return moved;
}

// Wait for everything that is due before a rank's next action.
// Returns false if some of it is not over yet.
inline bool finish_due(Simulator& s, int r) {
    SimulatedRank& me = s.ranks[r];
    // Require all of it to be over: a stream that waits for one of two waits for both.
    const std::vector<int>& due = me.due[me.at];
    for (int i : due)
        if (me.of[i].end < 0) return false;

    for (int i : due) {
        const ActionTimes& m = me.of[i];
        Op op = s.plans[r].actions[i].op;
        Seconds part = op == Op::SENDRECV ? &Times::pipeline : &Times::data;
        if (queue_of(op) == Queue::MOVE)
            part = &Times::moves;

        // As far as the message ran beside layers, these took longer.
        double beside = std::max(0.0, std::min(me.now, m.end) - m.met);
        double taken = needs_others(op) ? s.cost.contention * beside : 0;
        me.parts.*part += taken;

        // Split the wait: until the last rank came it is a bubble, the rest is the message's time.
        double wait = std::max(0.0, m.end - me.now);
        double waits_from = std::max(me.now, m.ready);
        double bubble = wait > 0 ? std::max(0.0, m.met - waits_from) : 0;
        me.parts.bubble += bubble;
        me.parts.*part += wait - bubble;
        me.now = std::max(me.now, m.end) + taken;
    }
    return true;
}

// Run the next action of the compute queue. Returns false if its ranks have not all arrived.
inline bool run_compute(Simulator& s, int r) {
    SimulatedRank& me = s.ranks[r];
    const Plan& p = s.plans[r];
    ActionTimes& m = me.of[me.at];
    m.start = me.now;
    m.met = meeting(s, r, me.at, &ActionTimes::start);
    if (m.met < 0) return false;

    // Count the action's parts for this rank; the wait for the last rank is a bubble.
    Times t = s.cost.of(p, p.actions[me.at]);
    m.end = m.met + total_of(t);
    add_times(me.parts, t);
    me.parts.bubble += m.met - me.now;
    me.now = m.end;
    return true;
}

// Run a rank as far as it can go. Returns whether anything changed.
inline bool advance(Simulator& s, int r) {
    SimulatedRank& me = s.ranks[r];
    const std::vector<Action>& actions = s.plans[r].actions;
    int end = int(actions.size());
    bool moved = run_lines(s, r);

    // The place past the last action finishes what is still in flight.
    for (; me.at <= end && finish_due(s, r); me.at++) {
        bool last = me.at == end;
        Queue queue = last ? Queue::COMPUTE : queue_of(actions[me.at].op);
        if (queue != Queue::COMPUTE) {
            me.of[me.at].start = me.now;
            if (needs_others(actions[me.at].op))
                me.of[me.at].before = std::exchange(me.called, me.at);
            me.line(queue).posted.push_back(me.at);
        } else if (!last) {
            bool came = me.of[me.at].start < 0;
            if (!run_compute(s, r)) return moved || came;
        }

        // Run what is posted, and what waited for this rank to get here.
        run_lines(s, r);
        moved = true;
    }
    return moved;
}

// Simulate a step, given the plans of some ranks: a pipeline's, which stands for all, or
// the whole world's.
inline StepTime simulate_step(const std::vector<Plan>& plans, const Model& model,
                              const ActionCost& cost) {
    // Run each rank until it waits for another. Every round advances some rank, or none can move.
    Simulator s = {plans, cost, {}};
    prepare_ranks(s, model);
    for (bool moved = true; moved;) {
        moved = false;
        for (int r = 0; r < int(plans.size()); r++)
            moved |= advance(s, r);
    }

    // All ranks are through, or some wait forever. Note where those wait.
    StepTime step;
    for (size_t r = 0; r < plans.size(); r++) {
        SimulatedRank& rank = s.ranks[r];
        const std::vector<Action>& actions = plans[r].actions;
        size_t at = size_t(rank.at);
        size_t end = actions.size();
        step.seconds = std::max(step.seconds, rank.now);
        if (at > end) continue;
        std::string where = at < end ? action_text(actions[at], model) : "its end";
        step.stuck += concat(step.stuck.empty() ? "" : "; ", "rank ", r, " waits at ", where);
    }

    // Let every rank wait for the last one, and average the parts.
    for (SimulatedRank& rank : s.ranks) {
        rank.parts.bubble += step.seconds - rank.now;
        add_times(step.parts, rank.parts, 1.0 / plans.size());
    }
    step.ranks = std::move(s.ranks);
    return step;
}

// `few` micro-batches fill a pipeline twice or more. From there on it is in a steady state: each
// `round` of micro-batches is like the one before it. Interleaved stages take turns in rounds of
// `pp`; other schedules repeat every micro-batch. If pp does not divide m, the first m % pp rounds
// of a long step have one micro-batch more; `few` holds them.
struct Settled {
    int few, round;
};
inline Settled settled(const Layout& layout, int micro_batches) {
    // Rounds of up to four micro-batches average out waits that do not occur in each one.
    int pp = layout.pp.size;
    int rest = micro_batches % pp;
    if (layout.pipeline == Pipeline::INTERLEAVED)
        return {(2 + rest) * pp + rest, pp};
    int round = std::min(pp, 4);
    return {2 * pp + round, round};
}

// The steps of pipelines, which layouts that differ in nothing else share.
struct KnownSteps {
    // mode, schedule, pp, chunks, batches
    std::map<std::array<int, 5>, PerRank<ScheduleStep>> known = {};

    // Make the steps of a plan, at most once for each pipeline.
    const PerRank<ScheduleStep>& of(const Layout& layout, const PlanOptions& options) {
        std::array<int, 5> key = {int(options.mode), int(layout.pipeline), layout.pp.size,
                                  layout.chunks, options.micro_batches};
        auto [entry, fresh] = known.insert({key, {}});
        if (fresh) entry->second = schedule_of(layout, options);
        return entry->second;
    }
};

// Simulate a layout's step. A full pipeline repeats itself, so only the two ends of a long step are
// simulated: times and parts grow by the same amount for each round between.
inline StepTime simulate_layout(Layout layout, const Model& model, PlanOptions options,
                                const ActionCost& cost, KnownSteps& known) {
    auto simulate = [&](int micro_batches) {
        options.micro_batches = micro_batches;
        const PerRank<ScheduleStep>& steps = known.of(layout, options);
        std::vector<Plan> plans;
        for (layout.pp.rank = 0; layout.pp.rank < layout.pp.size; layout.pp.rank++)
            plans.push_back(make_plan(layout, model, options, steps[layout.pp.rank]));
        return simulate_step(plans, model, cost);
    };

    // Simulate the whole step, or `few` micro-batches and a round more.
    int m = options.micro_batches;
    auto [few, round] = settled(layout, m);
    if (m <= few + round || layout.pipeline == Pipeline::GIVEN)
        return simulate(m);
    StepTime step = simulate(few), more = simulate(few + round);
    double rounds = double(m - few) / round;

    // Each round takes as long as the one that `more` has.
    step.seconds += rounds * (more.seconds - step.seconds);
    if (step.stuck.empty()) step.stuck = more.stuck;
    add_times(more.parts, step.parts, -1);
    add_times(step.parts, more.parts, rounds);
    return step;
}
inline StepTime simulate_layout(const Layout& layout, const Model& model,
                                const PlanOptions& options, const ActionCost& cost) {
    KnownSteps known;
    return simulate_layout(layout, model, options, cost, known);
}

// Add what comes before a step, by parts of their own.
inline void add_before(StepTime& step, const Times& before) {
    step.seconds += total_of(before);
    add_times(step.parts, before);
}

} // namespace llmc
