// pipeline.h - pipeline schedules, their sends and receives, their proof, the split into stages - arXiv:2104.04473
//   A model's layers are cut into pp * chunks stages; stage s lives on rank s % pp. A schedule is
//   one rank's list of slots; F0.1 is the forward pass of micro-batch 0 through stage 1:
//     F forward    B backward, both halves; or apart:    I gradient of the input    W of the weights
//   1. schedule_of     GPipe, 1F1B, interleaved or zero-bubble: what each rank does, in which order
//   2. add_transfers   what crosses between ranks, one group of receives and sends before each slot
//   3. check_schedule  "" or the fault: slots, their order, and no deadlock if sends wait for receives
//   4. simulate        when each slot runs, the share of idle time, the most activations that live
//   4 stages, 6 micro-batches, B twice as long as F; a digit is the micro-batch:
//     1F1B  arXiv:1806.03377, arXiv:2104.04473                  bubble (p-1)(F+I+W)
//@1F1B
//     zero-bubble ZB-H1  arXiv:2401.10241                       bubble (p-1)(F+I-W)
//@ZB
//   Contract: every schedule runs the weight gradients of a stage in ascending micro-batch order, so
//   all of them add the same numbers in the same order: their gradients are equal bit for bit.
//   Cost: idle time over busy time: (p-1)/m for GPipe and 1F1B, (p-1)/(chunks m) interleaved, with
//   chunks times the messages. Live activations of rank r, in stages: m, min(m, p-r), and
//   min(chunks m, 2(p-r-1) + (chunks-1)p + 1); ZB-H1 min(m, p) on every rank: no more than 1F1B's
//   rank 0.
//   To copy: this file.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

enum class Pass : char { F = 'F', B = 'B', I = 'I', W = 'W' };

struct Slot {
    Pass pass;
    int micro;
    int stage; // 0 .. pp * chunks - 1
};

typedef std::vector<Slot> Schedule; // one rank's, in order

enum class Pipeline { GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE, GIVEN }; // GIVEN: by a file

inline bool operator==(const Slot& a, const Slot& b) {
    return a.pass == b.pass && a.micro == b.micro && a.stage == b.stage;
}

inline std::string name_of(const Slot& s) {
    return char(s.pass) + std::to_string(s.micro) + "." + std::to_string(s.stage);
}

// Sends a gradient down: all of B, or its input half.
inline bool is_backward(Pass pass) { return pass == Pass::B || pass == Pass::I; }

// ----------------------------------------------------------------------------
// schedules

// The units (micro-batch, chunk) of a rank in the order of its forward passes. Micro-batches go in
// groups; a group passes chunk 0, then chunk 1, and so on. Groups have pp micro-batches where pp
// divides their number; else some have more, because a smaller group would return to rank 0
// before the pipeline is full. Backward: the same groups and micro-batches, the last chunk first.
inline Schedule units(Pass pass, int group, int pp, int chunks, int micro_batches, int rank) {
    Schedule s;
    int groups = std::max(1, micro_batches / group);
    for (int g = 0, first = 0; g < groups; g++) {
        int size = micro_batches / groups + (g < micro_batches % groups);
        for (int i = 0; i < chunks; i++)
            for (int m = first; m < first + size; m++)
                s.push_back({pass, m, (pass == Pass::F ? i : chunks - 1 - i) * pp + rank});
        first += size;
    }
    return s;
}

// `warmup` forward passes, then one forward and one backward in turn, then the backward passes left.
inline Schedule alternate(const Schedule& forward, const Schedule& backward, int warmup) {
    Schedule s;
    int f = 0, n = int(forward.size());
    for (int b = 0; b < n; b++) {
        for (; f < n && f <= warmup + b; f++) s.push_back(forward[f]);
        s.push_back(backward[b]);
    }
    return s;
}

// Before: F and B. After: B is parted into I and W, and W runs `delay` backward passes later: the
// gradients reach the first stage sooner, and late W fill what would be the bubble at the end.
inline Schedule delay_weights(const Schedule& in, int delay) {
    Schedule s, weights;
    size_t done = 0;
    for (Slot a : in) {
        if (a.pass == Pass::F) { s.push_back(a); continue; }
        s.push_back({Pass::I, a.micro, a.stage});
        weights.push_back({Pass::W, a.micro, a.stage});
        if (weights.size() > size_t(delay)) s.push_back(weights[done++]);
    }
    s.insert(s.end(), weights.begin() + done, weights.end());
    return s;
}

// Rank r's schedule. GPipe over several chunks is breadth-first (arXiv:2211.05953). 1F1B over
// several chunks is the interleaved schedule, and zero-bubble starts from it.
inline Schedule schedule_of(Pipeline kind, int pp, int chunks, int micro_batches, int rank) {
    bool interleaved = kind == Pipeline::INTERLEAVED || chunks > 1;
    int m = micro_batches, group = kind == Pipeline::GPIPE ? m : pp;
    int largest = (m + std::max(1, m / group) - 1) / std::max(1, m / group);
    int warmup = interleaved ? 2 * (pp - rank - 1) + (chunks - 1) * largest : pp - rank - 1;
    if (kind == Pipeline::GPIPE) warmup = m * chunks;
    Schedule s = alternate(units(Pass::F, group, pp, chunks, m, rank),
                           units(Pass::B, group, pp, chunks, m, rank), warmup);
    return kind == Pipeline::ZERO_BUBBLE ? delay_weights(s, rank) : s;
}

inline std::vector<Schedule> schedules_of(Pipeline kind, int pp, int chunks, int micro_batches) {
    std::vector<Schedule> all;
    for (int r = 0; r < pp; r++) all.push_back(schedule_of(kind, pp, chunks, micro_batches, r));
    return all;
}

// ----------------------------------------------------------------------------
// what crosses between ranks

// One message at one end. It crosses the border below `stage`: an activation goes up from stage - 1
// into it, a gradient comes down from it into stage - 1.
struct Transfer {
    bool send;
    int peer;
    bool gradient;
    int micro, stage;
};

// The transfers are one group, executed before the slot: all are posted at once, and the group is
// over when all are done. The last step of a rank has no slot; it holds the send that is left.
struct Step {
    bool has_slot = false;
    Slot slot = {};
    std::vector<Transfer> transfers = {};
};

// A message and its ends: slot `made` of rank `from` makes it, slot `used` of rank `to` needs it.
struct Message {
    int from, made, to, used;
    bool gradient;
    int micro, stage;
};

inline std::vector<Message> messages_of(const std::vector<Schedule>& all, int pp) {
    std::map<std::tuple<bool, int, int>, std::pair<int, int>> users; // what -> (rank, slot)
    for (int r = 0; r < pp; r++)
        for (int i = 0; i < int(all[r].size()); i++) {
            auto [pass, micro, stage] = all[r][i];
            if (pass == Pass::F) users[{false, micro, stage}] = {r, i};
            if (is_backward(pass)) users[{true, micro, stage + 1}] = {r, i};
        }
    std::vector<Message> messages;
    for (int r = 0; r < pp; r++)
        for (int i = 0; i < int(all[r].size()); i++) {
            auto [pass, micro, stage] = all[r][i];
            bool gradient = is_backward(pass);
            int border = gradient ? stage : stage + 1;
            auto user = users.find({gradient, micro, border});
            if (pass == Pass::W || user == users.end() || user->second.first == r) continue;
            auto [to, used] = user->second;
            messages.push_back({r, i, to, used, gradient, micro, border});
        }
    return messages;
}

inline std::string name_of(const Transfer& t) {
    return std::string(t.gradient ? "gradient " : "activation ") + std::to_string(t.micro) + "." +
           std::to_string(t.stage);
}

// ----------------------------------------------------------------------------
// time

struct Costs { // of one stage
    double F = 1, I = 1, W = 1; // B = I + W
};

inline double seconds_of(const Step& s, const Costs& c) {
    if (!s.has_slot) return 0;
    Pass p = s.slot.pass;
    return p == Pass::F ? c.F : p == Pass::I ? c.I : p == Pass::W ? c.W : c.I + c.W;
}

template <typename T>
using PerStep = std::vector<std::vector<T>>; // [rank][step]

// A step begins after the end of step `step` of `rank`, because of `what`.
struct Wait {
    int rank, step;
    Transfer what;
};

struct Timeline {
    PerStep<double> start, end; // of the steps that ran: after a deadlock not all did
};

// Runs every rank's steps in order, each as soon as all that it waits for has ended.
inline Timeline run_steps(const PerStep<Step>& steps, const PerStep<std::vector<Wait>>& waits,
                          const Costs& costs) {
    size_t pp = steps.size();
    Timeline t = {PerStep<double>(pp), PerStep<double>(pp)};
    auto has_ended = [&](const Wait& w) { return size_t(w.step) < t.end[w.rank].size(); };
    for (bool moved = true; moved;) {
        moved = false;
        for (size_t r = 0; r < pp; r++)
            for (size_t i = t.end[r].size(); i < steps[r].size(); i++, moved = true) {
                if (!std::all_of(waits[r][i].begin(), waits[r][i].end(), has_ended)) break;
                double start = i > 0 ? t.end[r][i - 1] : 0;
                for (const Wait& w : waits[r][i]) start = std::max(start, t.end[w.rank][w.step]);
                t.start[r].push_back(start);
                t.end[r].push_back(start + seconds_of(steps[r][i], costs));
            }
    }
    return t;
}

// "" or the cycle: where a rank stopped, follow what it waits for until a rank comes again.
inline std::string deadlock_in(const PerStep<Step>& steps, const PerStep<std::vector<Wait>>& waits,
                               const Timeline& t) {
    int pp = int(steps.size()), rank = 0;
    while (rank < pp && t.end[rank].size() == steps[rank].size()) rank++;
    if (rank == pp) return "";
    auto blocker = [&](int r) {
        const std::vector<Wait>& w = waits[r][t.end[r].size()];
        return *std::find_if(w.begin(), w.end(), [&](const Wait& wait) {
            return size_t(wait.step) >= t.end[wait.rank].size();
        });
    };
    for (int i = 0; i < pp; i++) rank = blocker(rank).rank; // on the cycle now, wherever it began
    std::string text = "deadlock:";
    int first = rank;
    do {
        Wait w = blocker(rank);
        size_t i = t.end[rank].size();
        const Step& step = steps[rank][i];
        text += std::string(rank == first ? "" : ";") + " rank " + std::to_string(rank) +
                " in step " + std::to_string(i) + ", before " +
                (step.has_slot ? name_of(step.slot) : "its end") +
                (w.what.send ? ", sends " : ", receives ") + name_of(w.what) +
                (w.what.send ? " to rank " : " from rank ") + std::to_string(w.rank);
        rank = w.rank;
    } while (rank != first);
    return text;
}

// The schedules as steps without transfers, and what they wait for if sends never wait.
inline PerStep<Step> bare_steps(const std::vector<Schedule>& all, int pp) {
    PerStep<Step> steps(pp);
    for (int r = 0; r < pp; r++) {
        for (const Slot& s : all[r]) steps[r].push_back({true, s});
        steps[r].push_back({});
    }
    return steps;
}

inline PerStep<std::vector<Wait>> no_waits(const PerStep<Step>& steps) {
    PerStep<std::vector<Wait>> waits;
    for (const std::vector<Step>& rank : steps) waits.emplace_back(rank.size());
    return waits;
}

inline PerStep<std::vector<Wait>> waits_for_data(const PerStep<Step>& steps,
                                                 const std::vector<Message>& messages) {
    PerStep<std::vector<Wait>> waits = no_waits(steps);
    for (const Message& m : messages)
        waits[m.to][m.used].push_back(
            {m.from, m.made, {false, m.from, m.gradient, m.micro, m.stage}});
    return waits;
}

// ----------------------------------------------------------------------------
// transfers

// Before: schedules that end if sends never wait. After: every rank's steps, which end although
// each send waits for its receive, and each receive for its send.
//   The rule: a send goes with the step after the slot that made it. Its receive goes with the first
//   step that, in the timeline where sends never wait, starts when the message has been made.
//   The proof: a group is posted when its rank has ended the slot before it. For a sender that waits
//   for its receiver, and the reverse, this slot starts earlier in that timeline than the slot
//   after the waiting group. Every wait leads to an earlier start, so none leads in a circle.
//   Between two ranks, both sides have the order in which the messages were made: no tags needed.
// To receive only when a slot needs it is not enough: interleaved schedules deadlock. The price is
// that a message may lie in its buffer for some slots.
inline PerStep<Step> add_transfers(const std::vector<Schedule>& all, int pp) {
    std::vector<Message> messages = messages_of(all, pp);
    PerStep<Step> steps = bare_steps(all, pp);
    Timeline t = run_steps(steps, waits_for_data(steps, messages), Costs());
    std::stable_sort(messages.begin(), messages.end(), [&](const Message& a, const Message& b) {
        return t.end[a.from][a.made] < t.end[b.from][b.made];
    });
    for (const Message& m : messages) {
        const std::vector<double>& start = t.start[m.to];
        auto first = std::lower_bound(start.begin(), start.end(), t.end[m.from][m.made]);
        steps[m.to][first - start.begin()].transfers.push_back(
            {false, m.from, m.gradient, m.micro, m.stage});
    }
    for (const Message& m : messages) // after the receives: one at most, a slot makes one message
        steps[m.from][m.made + 1].transfers.push_back(
            {true, m.to, m.gradient, m.micro, m.stage});
    return steps;
}

// One rank's.
inline std::vector<Step> add_transfers(const std::vector<Schedule>& all, int rank, int pp) {
    return add_transfers(all, pp)[rank];
}

// ----------------------------------------------------------------------------
// the check

// Pairs the k-th send from a rank to another with the k-th receive there, as a library without tags
// does, and adds to each end's step the wait for the other. "" or the first pair that differs.
inline std::string pair_transfers(const PerStep<Step>& steps,
                                  PerStep<std::vector<Wait>>& waits) {
    typedef std::vector<std::pair<int, Transfer>> Queue; // (step, transfer)
    int pp = int(steps.size());
    std::map<std::pair<int, int>, std::pair<Queue, Queue>> channels; // (from, to): sends, receives
    for (int r = 0; r < pp; r++)
        for (int i = 0; i < int(steps[r].size()); i++)
            for (const Transfer& t : steps[r][i].transfers)
                if (t.send)
                    channels[{r, t.peer}].first.push_back({i, t});
                else
                    channels[{t.peer, r}].second.push_back({i, t});
    for (auto& [ends, queues] : channels) {
        auto [from, to] = ends;
        auto& [sends, receives] = queues;
        for (size_t k = 0; k < std::max(sends.size(), receives.size()); k++) {
            std::string sent = k < sends.size() ? name_of(sends[k].second) : "nothing";
            std::string received = k < receives.size() ? name_of(receives[k].second) : "nothing";
            if (sent != received)
                return "message " + std::to_string(k) + " from rank " + std::to_string(from) +
                       " to rank " + std::to_string(to) + ": sent is " + sent +
                       ", received is " + received;
            auto [i, send] = sends[k];
            auto [j, receive] = receives[k];
            if (j > 0) waits[from][i].push_back({to, j - 1, send});
            if (i > 0) waits[to][j].push_back({from, i - 1, receive});
        }
    }
    return "";
}

// "" or the fault: each send has its receive in the same order on both sides, what a slot needs
// has come, what is sent has been made, and nobody waits for ever.
inline std::string check_transfers(const PerStep<Step>& steps) {
    PerStep<std::vector<Wait>> waits = no_waits(steps);
    std::string fault = pair_transfers(steps, waits);
    if (!fault.empty()) return fault;
    std::vector<Schedule> all(steps.size());
    for (size_t r = 0; r < steps.size(); r++)
        for (const Step& s : steps[r])
            if (s.has_slot) all[r].push_back(s.slot);
    std::map<std::string, std::pair<int, int>> sent, received; // message -> (rank, step)
    for (size_t r = 0; r < steps.size(); r++)
        for (size_t i = 0; i < steps[r].size(); i++)
            for (const Transfer& t : steps[r][i].transfers)
                (t.send ? sent : received)[name_of(t)] = {int(r), int(i)};
    for (const Message& m : messages_of(all, int(steps.size()))) {
        std::string name = name_of(Transfer{true, m.to, m.gradient, m.micro, m.stage});
        auto send = sent.find(name), receive = received.find(name);
        if (send == sent.end() || send->second.first != m.from || send->second.second <= m.made)
            return name + " is not sent by rank " + std::to_string(m.from) + " after " +
                   name_of(all[m.from][m.made]) + ", which makes it";
        if (receive == received.end() || receive->second.first != m.to ||
            receive->second.second > m.used)
            return name + " is not received by rank " + std::to_string(m.to) + " before " +
                   name_of(all[m.to][m.used]) + ", which needs it";
    }
    return deadlock_in(steps, waits, run_steps(steps, waits, Costs()));
}

// "" or the fault of a set of schedules: every pass once, in its place and order, and no deadlock.
inline std::string check_schedule(const std::vector<Schedule>& all, int pp, int chunks,
                                  int micro_batches) {
    enum { DONE_F = 1, DONE_I = 2, DONE_W = 4 };
    int stages = pp * chunks;
    if (int(all.size()) != pp)
        return std::to_string(all.size()) + " schedules for " + std::to_string(pp) + " ranks";
    std::vector<std::vector<int>> done(stages, std::vector<int>(micro_batches));
    std::vector<int> next_weights(stages); // the micro-batch whose weight gradients come next
    for (int r = 0; r < pp; r++)
        for (size_t i = 0; i < all[r].size(); i++) {
            auto [pass, micro, stage] = all[r][i];
            std::string where = "rank " + std::to_string(r) + ", slot " + std::to_string(i) + " (" +
                                name_of(all[r][i]) + "): ";
            if (micro < 0 || micro >= micro_batches)
                return where + "micro-batches are 0 to " + std::to_string(micro_batches - 1);
            if (stage < 0 || stage >= stages)
                return where + "stages are 0 to " + std::to_string(stages - 1);
            if (stage % pp != r)
                return where + "the stage lives on rank " + std::to_string(stage % pp);
            int& state = done[stage][micro];
            int does = pass == Pass::F   ? DONE_F
                       : pass == Pass::I ? DONE_I
                       : pass == Pass::W ? DONE_W
                                         : DONE_I | DONE_W;
            if (state & does) return where + "done before";
            if (does != DONE_F && !(state & DONE_F)) return where + "its F comes later or never";
            if (does == DONE_W && !(state & DONE_I)) return where + "its I comes later or never";
            if (pp == 1 && does == DONE_F && stage > 0 && !(done[stage - 1][micro] & DONE_F))
                return where + "F of the stage below comes later or never";
            if (pp == 1 && (does & DONE_I) && stage < stages - 1 &&
                !(done[stage + 1][micro] & DONE_I))
                return where + "the backward pass of the stage above comes later or never";
            if ((does & DONE_W) && micro != next_weights[stage]++)
                return where + "weight gradients must be added in ascending order, next is " +
                       std::to_string(next_weights[stage] - 1);
            state |= does;
        }
    for (int s = 0; s < stages; s++)
        for (int m = 0; m < micro_batches; m++) {
            Pass lacks = !(done[s][m] & DONE_F)   ? Pass::F
                         : !(done[s][m] & DONE_I) ? Pass::B
                                                  : Pass::W;
            if (done[s][m] != (DONE_F | DONE_I | DONE_W))
                return "rank " + std::to_string(s % pp) + " lacks " + name_of({lacks, m, s});
        }
    PerStep<Step> steps = bare_steps(all, pp);
    PerStep<std::vector<Wait>> waits = waits_for_data(steps, messages_of(all, pp));
    std::string fault = deadlock_in(steps, waits, run_steps(steps, waits, Costs()));
    return fault.empty() ? check_transfers(add_transfers(all, pp)) : fault;
}

// ----------------------------------------------------------------------------
// the simulator

struct Simulation {
    double time;                // from the first slot's start to the last one's end
    double bubble;              // idle share of it, of the rank that is busy longest
    std::vector<int> peak_live; // per rank: most (micro, stage) whose F is done and B or W is not
    PerStep<double> start, end; // of every slot
};

// Before: schedules that pass the check. Sends never wait, or, `blocking`, as in the groups above.
inline Simulation simulate(const std::vector<Schedule>& all, int pp, const Costs& costs = {},
                           bool blocking = false) {
    PerStep<Step> steps = blocking ? add_transfers(all, pp) : bare_steps(all, pp);
    PerStep<std::vector<Wait>> waits = waits_for_data(steps, messages_of(all, pp));
    if (blocking) pair_transfers(steps, waits = no_waits(steps));
    Timeline t = run_steps(steps, waits, costs);
    Simulation s = {0, 0, std::vector<int>(pp), t.start, t.end};
    double most_busy = 0;
    for (int r = 0; r < pp; r++) {
        double busy = 0;
        int live = 0;
        for (const Step& step : steps[r]) {
            busy += seconds_of(step, costs);
            if (!step.has_slot) continue;
            if (step.slot.pass == Pass::F) live++;
            if (step.slot.pass == Pass::B || step.slot.pass == Pass::W) live--;
            s.peak_live[r] = std::max(s.peak_live[r], live);
        }
        s.start[r].pop_back(), s.end[r].pop_back(); // the step without slot
        if (!s.end[r].empty()) s.time = std::max(s.time, s.end[r].back());
        most_busy = std::max(most_busy, busy);
    }
    s.bubble = s.time > 0 ? 1 - most_busy / s.time : 0;
    return s;
}
