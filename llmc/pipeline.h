// pipeline.h - pipeline schedules, their sends and receives, their proof - arXiv:1806.03377
//   A model's layers are cut into pp * chunks stages; stage s is on rank s % pp. A schedule is the
//   list of one rank's slots. A slot prints as F0.1: the forward pass (F) of micro-batch 0 through
//   stage 1. The letter is one of
//     F  forward   B  backward; or its halves alone:  I  input's gradient   W  weights' gradient
//   1. schedule_of     each rank's slots in order; read_schedule takes them from a file
//   2. add_transfers   messages between ranks: one group of receives and sends before each slot
//   3. check_schedule  "" or the fault: in slots, in their order, or a deadlock of the messages
//   4. simulate        when each slot runs, the idle share, the most activations alive at a time
//   5. split_layers    which layers make a stage
//   Below, 4 ranks run 5 micro-batches; B takes twice as long as F. Line r is rank r and stage r:
//     1F1B - arXiv:1806.03377
//       F0 F1 F2 F3                   B0 -- F4 B1 --    B2 --    B3 --    B4 --
//          F0 F1 F2             B0 -- F3 B1 -- F4 B2 --    B3 --    B4 --
//             F0 F1       B0 -- F2 B1 -- F3 B2 -- F4 B3 --    B4 --
//                F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 --
//     zero-bubble ZB-H1: ranks wait less, and late W fill the end - arXiv:2401.10241
//       F0 F1 F2 F3          I0 W0 F4 I1 W1 I2 W2 I3 W3 I4 W4
//          F0 F1 F2       I0 F3 I1 W0 F4 I2 W1 I3 W2 I4 W3 W4
//             F0 F1    I0 F2 I1 F3 I2 W0 F4 I3 W1 I4 W2 W3 W4
//                F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 W2 W3 W4
//   schedule                       idle time of a rank     live activations of rank r, in stages
//   GPipe        arXiv:1811.06965  (p-1) (F+I+W)           m
//   1F1B         arXiv:1806.03377  (p-1) (F+I+W)           min(m, p-r)
//   interleaved  arXiv:2104.04473  (p-1) (F+I+W)           min(vm, 2(p-r-1) + (v-1)p + 1)
//   ZB-H1        arXiv:2401.10241  (p-1) (F+I-W)           min(m, p); min(m, p-r) wait for I
//   p = pp, v = chunks (1 except for interleaved), m >= p micro-batches, and F, I, W the times of
//   one stage. The live activations of interleaved also need m to be a multiple of p. A chunk has
//   1/v of a rank's layers, so interleaved idles 1/v as long as 1F1B and sends v times the
//   messages. After I a stage keeps only what W needs. Sends that wait for their receives cost no
//   extra time: a test tries all sizes up to 8 ranks, 4 chunks and 24 micro-batches.
//   Contract: each stage adds its weight gradients in ascending micro-batch order, and the check
//   enforces it. All schedules therefore have the same sums, bit for bit. Everything follows from
//   the sizes, before the run.
//   To copy: this file and comm/text.h.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>
#include "comm/text.h"

namespace llmc {

// The operations of a slot, by the letter that prints.
enum class SlotOp : char { F = 'F', B = 'B', I = 'I', W = 'W' };

// One operation of one micro-batch in one stage.
struct Slot {
    SlotOp op;
    int micro;
    int stage; // 0 .. pp * chunks - 1

    bool operator==(const Slot&) const = default;
};

typedef std::vector<Slot> Schedule; // one rank's, in order

enum class Pipeline { GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE, GIVEN }; // GIVEN: by a file
// Their names, as --pipeline has them.
inline constexpr std::array PIPELINE_NAMES = {"gpipe", "1f1b", "interleaved", "zero-bubble"};

// Whether a slot makes the gradient that the stage below waits for: B does, and so does I.
inline bool is_backward(SlotOp op) { return op == SlotOp::B || op == SlotOp::I; }

// Return a slot's text, "F0.1": the operation, the micro-batch, the stage.
inline std::string name_of(const Slot& s) {
    return char(s.op) + std::to_string(s.micro) + "." + std::to_string(s.stage);
}

// ----------------------------------------------------------------------------
// schedules

// Return one rank's forward or backward passes in order. Micro-batches run in groups: a group
// passes chunk 0, then chunk 1, and so on; backward starts with the last chunk. In the textbook
// `group` divides the number of micro-batches. Where it does not, some groups are larger and none
// is smaller: a small group would be back at rank 0 before the pipeline is full, and would wait.
inline Schedule pass_order(SlotOp op, int group, int pp, int chunks, int micro_batches, int rank) {
    Schedule s;
    int groups = std::max(1, micro_batches / group);
    // Spread the remainder over the first groups.
    int first = 0;
    for (int g = 0; g < groups; g++) {
        int size = micro_batches / groups + (g < micro_batches % groups);
        for (int i = 0; i < chunks; i++) {
            int chunk = op == SlotOp::F ? i : chunks - 1 - i;
            for (int m = first; m < first + size; m++)
                s.push_back({op, m, chunk * pp + rank});
        }
        first += size;
    }
    return s;
}

// Run `warmup` forward passes, then one forward and one backward in turn, then the remaining ones.
inline Schedule alternate(const Schedule& forward, const Schedule& backward, int warmup) {
    Schedule s;
    int n = int(forward.size());
    int f = 0;
    for (int b = 0; b < n; b++) {
        // Stay `warmup` forward passes ahead until there are no more.
        for (; f < n && f <= warmup + b; f++)
            s.push_back(forward[f]);
        s.push_back(backward[b]);
    }
    return s;
}

// Before: slots F and B. After: each B becomes I, and its W follows `delay` backward passes later.
// The stage below gets its gradient sooner, and late W fill the idle time at the end.
inline Schedule delay_weights(const Schedule& in, int delay) {
    Schedule s, weights;
    size_t done = 0; // slots of `weights` that are in s
    for (Slot slot : in) {
        s.push_back({slot.op == SlotOp::B ? SlotOp::I : slot.op, slot.micro, slot.stage});
        if (slot.op == SlotOp::B)
            weights.push_back({SlotOp::W, slot.micro, slot.stage});

        // Let the oldest W go once more than `delay` wait.
        if (weights.size() - done > size_t(delay))
            s.push_back(weights[done++]);
    }
    s.insert(s.end(), weights.begin() + done, weights.end());
    return s;
}

// Return one rank's schedule. GPipe over several chunks is breadth-first (arXiv:2211.05953). 1F1B
// over several chunks is the interleaved schedule, from which zero-bubble starts too.
// GIVEN comes from a file: see read_schedule.
inline Schedule schedule_of(Pipeline kind, int pp, int chunks, int micro_batches, int rank) {
    if (kind == Pipeline::GIVEN) return {};
    int m = micro_batches;
    int group = kind == Pipeline::GPIPE ? m : pp;
    int groups = std::max(1, m / group);
    int largest = (m + groups - 1) / groups; // micro-batches of a group

    // Count the forward passes before the first backward pass. Early ranks have more: their first
    // gradient must come back through all later ranks.
    bool interleaved = chunks > 1 || kind == Pipeline::INTERLEAVED;
    int warmup = pp - rank - 1;
    if (interleaved)
        warmup = 2 * warmup + (chunks - 1) * largest;
    if (kind == Pipeline::GPIPE)
        warmup = chunks * m;

    // Alternate forward and backward passes after this warm-up.
    Schedule s = alternate(pass_order(SlotOp::F, group, pp, chunks, m, rank),
                           pass_order(SlotOp::B, group, pp, chunks, m, rank), warmup);
    return kind == Pipeline::ZERO_BUBBLE ? delay_weights(s, rank) : s;
}

// Return the schedules of all ranks.
inline std::vector<Schedule> schedules_of(Pipeline kind, int pp, int chunks, int micro_batches) {
    std::vector<Schedule> all;
    for (int r = 0; r < pp; r++)
        all.push_back(schedule_of(kind, pp, chunks, micro_batches, r));
    return all;
}

// Read schedules from a file or a string: a line for each rank, with words like F0.1 (micro-batch
// 0, stage 1); # begins a comment. Returns "" or the fault and its line. check_schedule says
// whether the schedule can run.
inline std::string read_schedule(std::istream& in, std::vector<Schedule>& all) {
    if (!in)
        return "the schedule cannot be read: is the path right?";
    all.clear();
    std::string line, word;
    for (int number = 1; std::getline(in, line); number++) {
        std::istringstream words(line.substr(0, line.find('#')));
        Schedule mine;

        // A word is a letter, digits, a dot, digits, and nothing else.
        while (words >> word) {
            char op = 0;
            char rest = 0;
            int micro = 0;
            int stage = 0;
            bool digits = word.find_first_not_of("0123456789.", 1) == std::string::npos;
            int n = sscanf(word.c_str(), "%c%6d.%6d%c", &op, &micro, &stage, &rest);
            if (n != 3 || !digits || std::string("FBIW").find(op) == std::string::npos)
                return concat("line ", number, ": '", word,
                              "' is no slot: write a letter of FBIW, ",
                              "the micro-batch, a dot and the stage, like F0.1");
            mine.push_back({SlotOp(op), micro, stage});
        }

        // Skip a line without words: it belongs to no rank.
        if (!mine.empty()) all.push_back(mine);
    }
    return all.empty() ? "the schedule is empty: write a line of slots for each rank" : "";
}

// ----------------------------------------------------------------------------
// steps: slots, and the messages between ranks

// One end of a message. The message crosses the border below `stage`: an activation goes up from
// stage - 1 into `stage`, a gradient comes down from `stage` into stage - 1.
struct Transfer {
    bool send;
    int peer; // the rank at the other end
    bool gradient;
    int micro, stage;
};

// One slot and the transfers before it, which form a group: all are posted at once, and the group
// is over when all of them are done. A rank's last step has no slot; it holds the remaining sends.
struct ScheduleStep {
    bool has_slot = false;
    Slot slot = {};
    std::vector<Transfer> transfers = {};
};

template <typename T> using PerRank = std::vector<std::vector<T>>; // [rank][step]
typedef PerRank<ScheduleStep> Steps;

// Return a message's text, "activation 0.1": micro-batch 0, across the border below stage 1.
inline std::string name_of(const Transfer& t) {
    return (t.gradient ? "gradient " : "activation ") + std::to_string(t.micro) + "." +
           std::to_string(t.stage);
}

// A message's identity, equal at both ends: gradient, micro, stage.
typedef std::tuple<bool, int, int> MessageKey;
inline MessageKey key_of(const Transfer& t) { return {t.gradient, t.micro, t.stage}; }

// made_by() returns the send of a slot's result to the next stage; needed_by() returns the receive
// of its input from the stage before. For B and I, the next stage is the one below. W makes no
// message and needs none. The peer stays -1 until crossings_of() knows whether the other stage is
// on another rank.
inline Transfer made_by(const Slot& s) {
    bool gradient = is_backward(s.op);
    return {true, -1, gradient, s.micro, gradient ? s.stage : s.stage + 1};
}

inline Transfer needed_by(const Slot& s) {
    bool gradient = is_backward(s.op);
    return {false, -1, gradient, s.micro, gradient ? s.stage + 1 : s.stage};
}

// A message: slot `made` of rank `from` makes it, slot `used` of rank `to` needs it.
struct Crossing {
    int from, made;
    int to, used;
    Transfer send, receive; // its ends
    double made_at = 0;     // in a timeline where sends never wait
};

// List all messages between different ranks, ordered by receiver.
inline std::vector<Crossing> crossings_of(const std::vector<Schedule>& all, int pp) {
    // Number the messages: at each border a micro-batch has an activation and a gradient.
    size_t micros = 0;
    size_t borders = 0;
    for (const Schedule& schedule : all)
        for (const Slot& slot : schedule) {
            micros = std::max(micros, size_t(slot.micro) + 1);
            borders = std::max(borders, size_t(slot.stage) + 2);
        }
    auto number = [&](const Transfer& t) {
        return 2 * (size_t(t.micro) * borders + size_t(t.stage)) + t.gradient;
    };

    // Note which slot makes each message.
    std::vector<Crossing> made(2 * micros * borders, {-1, -1, -1, -1, {}, {}, 0});
    for (int r = 0; r < pp; r++)
        for (int i = 0; i < int(all[r].size()); i++) {
            if (all[r][i].op == SlotOp::W) continue;
            Transfer t = made_by(all[r][i]);
            made[number(t)] = {r, i, -1, -1, t, {}};
        }

    // Join each message with the slot that needs it, unless that slot is on the same rank.
    std::vector<Crossing> messages;
    for (int r = 0; r < pp; r++)
        for (int i = 0; i < int(all[r].size()); i++) {
            if (all[r][i].op == SlotOp::W) continue;
            Transfer t = needed_by(all[r][i]);
            const Crossing& maker = made[number(t)];
            if (maker.from < 0 || maker.from == r) continue;

            Crossing m = maker;
            m.to = r;
            m.used = i;
            m.send.peer = r;
            m.receive = t;
            m.receive.peer = m.from;
            messages.push_back(m);
        }
    return messages;
}

// Return the schedules as steps without transfers.
inline Steps bare_steps(const std::vector<Schedule>& all, int pp) {
    Steps steps(pp);
    for (int r = 0; r < pp; r++) {
        for (const Slot& s : all[r])
            steps[r].push_back({true, s});
        steps[r].push_back({});
    }
    return steps;
}

// ----------------------------------------------------------------------------
// time

// The time of one micro-batch in one stage, in any unit. B takes I + W.
struct Costs {
    double F = 1;
    double I = 1;
    double W = 1;
};

// Return the time of a step: that of its slot, or 0 without one.
inline double time_of(const ScheduleStep& s, const Costs& c) {
    if (!s.has_slot) return 0;
    SlotOp op = s.slot.op;
    return op == SlotOp::F ? c.F : op == SlotOp::I ? c.I : op == SlotOp::W ? c.W : c.I + c.W;
}

// A dependency: a step begins only after step `step` of rank `rank` has ended.
// `what` is the message that causes it.
struct Wait {
    int rank, step;
    Transfer what;
};

typedef PerRank<std::vector<Wait>> Waits;

// When each step runs.
struct Timeline {
    PerRank<double> start, end; // of the steps that ran: after a deadlock not all did
};

// Run every rank's steps in order, each as soon as the steps that it waits for have ended. With
// in_rounds every step takes one round, whatever its cost, and a backward pass may share the round
// of the forward pass right before it.
inline Timeline run_steps(const Steps& steps, const Waits& waits, const Costs& costs = {},
                          bool in_rounds = false) {
    size_t pp = steps.size();
    Timeline t = {PerRank<double>(pp), PerRank<double>(pp)};
    auto has_ended = [&](const Wait& w) { return size_t(w.step) < t.end[w.rank].size(); };

    // Run one step: it starts after the step before it and after all that it waits for.
    auto run = [&](size_t r, size_t i) {
        // Only rounds can be shared: with costs, steps of a rank never overlap.
        bool shares = in_rounds && i > 0 && steps[r][i - 1].slot.op == SlotOp::F &&
                      steps[r][i].slot.op != SlotOp::F;
        double start = i == 0 ? 0 : shares ? t.start[r][i - 1] : t.end[r][i - 1];
        for (const Wait& w : waits[r][i])
            start = std::max(start, t.end[w.rank][w.step]);
        t.start[r].push_back(start);
        t.end[r].push_back(start + (in_rounds ? 1 : time_of(steps[r][i], costs)));
    };

    // Advance each rank as far as it can go, until no rank moves.
    for (bool moved = true; moved;) {
        moved = false;
        for (size_t r = 0; r < pp; r++)
            for (size_t i = t.end[r].size(); i < steps[r].size(); i++) {
                if (!std::all_of(waits[r][i].begin(), waits[r][i].end(), has_ended))
                    break;
                run(r, i);
                moved = true;
            }
    }
    return t;
}

// Return the time at which the last rank is done.
inline double last_end(const Timeline& t) {
    double last = 0;
    for (const std::vector<double>& end : t.end)
        last = std::max(last, end.empty() ? 0 : end.back());
    return last;
}

// Return the cycle of a deadlock as text, or "". `t` is a timeline in which some rank has stopped.
inline std::string deadlock_in(const Steps& steps, const Waits& waits, const Timeline& t) {
    int pp = int(steps.size());

    // Find a rank that has stopped.
    int rank = 0;
    while (rank < pp && t.end[rank].size() == steps[rank].size())
        rank++;
    if (rank == pp) return "";

    // Follow the waits, starting there. After pp moves the rank is on the cycle.
    auto blocker = [&](int r) {
        for (const Wait& w : waits[r][t.end[r].size()])
            if (size_t(w.step) >= t.end[w.rank].size())
                return w;
        return Wait{};
    };
    for (int i = 0; i < pp; i++)
        rank = blocker(rank).rank;

    // Describe the cycle, once around.
    std::string text = "deadlock";
    int first = rank;
    do {
        Wait w = blocker(rank);
        size_t i = t.end[rank].size();
        const ScheduleStep& step = steps[rank][i];
        text += concat(rank == first ? ": " : "; ", "rank ", rank, " in step ", i, " before ",
                       step.has_slot ? name_of(step.slot) : "its end", " waits to ",
                       w.what.send ? "send " : "receive ", name_of(w.what),
                       w.what.send ? " to rank " : " from rank ", w.rank);
        rank = w.rank;
    } while (rank != first);
    return text;
}

// Return the waits for the case in which sends never wait: a slot begins after the slots whose
// messages it needs.
inline Waits waits_for_data(const Steps& steps, const std::vector<Crossing>& messages) {
    Waits waits;
    for (const std::vector<ScheduleStep>& rank : steps)
        waits.emplace_back(rank.size());
    for (const Crossing& m : messages)
        waits[m.to][m.used].push_back({m.from, m.made, m.receive});
    return waits;
}

// ----------------------------------------------------------------------------
// transfers

// Pair the k-th send from one rank to another with the k-th receive there, as libraries without
// tags do. Both groups must have begun, so each end's step waits until the other rank has ended the
// step before its own end. Returns "" or the first pair that differs.
inline std::string pair_transfers(const Steps& steps, Waits& waits) {
    struct End {
        int step;
        Transfer what;
    };
    std::map<std::pair<int, int>, std::vector<End>> sends, receives; // of (from, to)
    waits = waits_for_data(steps, {});

    // List the ends of each pair of ranks, in the order of their steps.
    for (int r = 0; r < int(steps.size()); r++)
        for (int i = 0; i < int(steps[r].size()); i++)
            for (const Transfer& t : steps[r][i].transfers)
                (t.send ? sends[{r, t.peer}] : receives[{t.peer, r}]).push_back({i, t});
    for (const auto& [ends, list] : receives) sends[ends]; // adds pairs that have only receives

    // Match sends and receives one by one.
    for (const auto& [ends, sent] : sends) {
        auto [from, to] = ends;
        const std::vector<End>& received = receives[ends];
        for (size_t k = 0; k < std::max(sent.size(), received.size()); k++) {
            // Compare the two ends.
            bool both = k < sent.size() && k < received.size();
            if (!both || key_of(sent[k].what) != key_of(received[k].what))
                return concat("message ", k, " from rank ", from, " to rank ", to, ": ",
                              k < sent.size() ? name_of(sent[k].what) : "nothing",
                              " is sent, ",
                              k < received.size() ? name_of(received[k].what) : "nothing",
                              " is received");

            // Make each end wait for the other. A first step has none before it to wait for.
            int i = sent[k].step;
            int j = received[k].step;
            if (j > 0)
                waits[from][i].push_back({to, j - 1, sent[k].what});
            if (i > 0)
                waits[to][j].push_back({from, i - 1, received[k].what});
        }
    }
    return "";
}

// Before: schedules that end if sends never wait. After: every rank's steps, which also end when
// each send waits for its receive and each receive for its send.
//   The rule: each end of a message stands in its rank's first step that starts no sooner than the
//   message is made, in a timeline where sends never wait.
//   The proof: let a group stand before slot i, and its peer's group before slot j. The first group
//   waits until the peer has ended slot j - 1. By the rule, slot j - 1 starts before the message is
//   made, and slot i does not. So every wait leads to a slot that starts earlier, and no chain of
//   waits is a circle.
// Both ends list the messages between two ranks in the order in which they were made, so messages
// need no tags. Receiving just before the slot that needs a message would be simpler, but then
// interleaved schedules deadlock. The price is that a message may lie in its buffer for some slots.
inline Steps place_transfers(Steps steps, std::vector<Crossing> messages, const Timeline& t) {
    // Sort the messages by the time at which they are made.
    for (Crossing& m : messages)
        m.made_at = t.end[m.from][m.made];
    std::sort(messages.begin(), messages.end(), [](const Crossing& a, const Crossing& b) {
        return std::tie(a.made_at, a.made, a.from) < std::tie(b.made_at, b.made, b.from);
    });

    // Place both ends by the rule, receives first.
    auto place = [&](int rank, double time, const Transfer& transfer) {
        const std::vector<double>& start = t.start[rank];
        size_t i = std::lower_bound(start.begin(), start.end(), time) - start.begin();
        steps[rank][i].transfers.push_back(transfer);
    };
    for (const Crossing& m : messages)
        place(m.to, m.made_at, m.receive);
    for (const Crossing& m : messages)
        place(m.from, m.made_at, m.send);
    return steps;
}

// Place groups between any two slots, or only between rounds of one forward and one backward pass,
// whichever makes the ranks wait less. 1F1B wants any slot: it needs a message as soon as it is
// made. The interleaved schedule wants rounds: it warms up for twice as long, so a message may take
// a whole round, while between two slots its peer would often be in a long backward pass.
inline Steps add_transfers(const std::vector<Schedule>& all, int pp) {
    std::vector<Crossing> messages = crossings_of(all, pp);
    Steps bare = bare_steps(all, pp);
    Waits data = waits_for_data(bare, messages);
    Timeline free = run_steps(bare, data); // sends never wait

    // Place the transfers both ways.
    double least = INFINITY;
    Steps best;
    for (bool in_rounds : {false, true}) {
        Timeline t = in_rounds ? run_steps(bare, data, Costs(), true) : free;
        Steps steps = place_transfers(bare, messages, t);
        Waits waits;
        pair_transfers(steps, waits);

        // Measure the time with sends that wait, and keep the better placement.
        double time = last_end(run_steps(steps, waits));
        if (time >= least) continue;
        best = std::move(steps);
        least = time;
        if (least <= last_end(free)) break; // nothing is better
    }
    return best;
}

// ----------------------------------------------------------------------------
// the check

// Return "" or the first message that is missing: a slot needs it, or a transfer sends it, before
// the rank has made or received it.
inline std::string check_arrivals(const std::vector<ScheduleStep>& steps, int rank, int stages) {
    std::set<MessageKey> here; // messages that this rank has made or received so far
    for (size_t i = 0; i < steps.size(); i++) {
        const Slot& slot = steps[i].slot;
        auto fault = [&](const auto&... what) {
            return concat("rank ", rank, " in step ", i, ": ", what...);
        };

        // Check the group first: sends take messages that are here, receives bring more.
        for (const Transfer& t : steps[i].transfers)
            if (t.send && !here.count(key_of(t)))
                return fault(name_of(t), " is sent before it is made");
        for (const Transfer& t : steps[i].transfers)
            if (!here.insert(key_of(t)).second && !t.send)
                return fault(name_of(t), " is received again");

        // Check the slot. The pipeline's two ends need nothing from outside.
        if (!steps[i].has_slot || slot.op == SlotOp::W) continue;
        Transfer need = needed_by(slot);
        if (need.stage > 0 && need.stage < stages && !here.count(key_of(need)))
            return fault(name_of(slot), " needs ", name_of(need), ", which comes later or never");
        here.insert(key_of(made_by(slot)));
    }
    return "";
}

// Return "" or the fault of steps with transfers. A deadlock is described by its whole cycle.
inline std::string check_transfers(const Steps& steps, int stages) {
    Waits waits;
    std::string fault = pair_transfers(steps, waits);
    for (size_t r = 0; r < steps.size() && fault.empty(); r++)
        fault = check_arrivals(steps[r], int(r), stages);
    if (!fault.empty()) return fault;
    return deadlock_in(steps, waits, run_steps(steps, waits));
}

// Return "" or the fault of one rank's slots: each pass runs once, F before I before W, and W
// in ascending order.
inline std::string check_slots(const Schedule& mine, int rank, int pp, int chunks,
                               int micro_batches) {
    enum { F = 1, I = 2, W = 4, ALL = 7 };
    std::vector<std::vector<int>> done(chunks, std::vector<int>(micro_batches)); // bits of F, I, W
    std::vector<int> next(chunks); // the micro-batch that adds its weight gradients next
    for (size_t i = 0; i < mine.size(); i++) {
        auto [op, micro, stage] = mine[i];
        auto fault = [&](const auto&... what) {
            return concat("rank ", rank, ", slot ", i, ", ", name_of(mine[i]), ": ", what...);
        };

        // The slot must exist and belong to this rank.
        if (micro < 0 || micro >= micro_batches)
            return fault("micro-batches are 0 to ", micro_batches - 1);
        if (stage < 0 || stage >= pp * chunks)
            return fault("stages are 0 to ", pp * chunks - 1);
        if (stage % pp != rank)
            return fault("the stage is on rank ", stage % pp);

        // The slot must come once, and after the slots that it needs.
        int& state = done[stage / pp][micro];
        int does = op == SlotOp::F ? F : op == SlotOp::I ? I : op == SlotOp::W ? W : I | W;
        if (state & does) return fault("done before");
        if (does != F && !(state & F))
            return fault("F must come first");
        if (does == W && !(state & I))
            return fault("I must come first");
        if (does & W && micro != next[stage / pp]++)
            return fault("weight gradients add in ascending order, micro-batch ",
                         next[stage / pp] - 1, " is next");
        state |= does;
    }

    // Every slot must be there.
    for (int c = 0; c < chunks; c++)
        for (int m = 0; m < micro_batches; m++) {
            int state = done[c][m];
            if (state == ALL) continue;
            SlotOp lacks = !(state & F) ? SlotOp::F : !(state & I) ? SlotOp::B : SlotOp::W;
            return concat("rank ", rank, " lacks ", name_of(Slot{lacks, m, c * pp + rank}));
        }
    return "";
}

// Return "" or the fault of a set of schedules. It checks
//   1. each rank's own slots   2. their order, if sends never wait   3. their transfers
inline std::string check_schedule(const std::vector<Schedule>& all, int pp, int chunks,
                                  int micro_batches) {
    // 1. Each rank by itself.
    if (int(all.size()) != pp)
        return concat(all.size(), " schedules for ", pp, " ranks");
    for (int r = 0; r < pp; r++) {
        std::string fault = check_slots(all[r], r, pp, chunks, micro_batches);
        if (!fault.empty()) return fault;
    }

    // 2. No cycle of slots that need each other: transfers are placed in a timeline, and only
    // schedules without a cycle have one.
    Steps steps = bare_steps(all, pp);
    Waits waits = waits_for_data(steps, crossings_of(all, pp));
    std::string fault = deadlock_in(steps, waits, run_steps(steps, waits));
    if (!fault.empty()) return fault;

    // 3. The groups of transfers, which must end even though sends wait.
    return check_transfers(add_transfers(all, pp), pp * chunks);
}

// ----------------------------------------------------------------------------
// the simulator

// The result of simulate(); times are in the unit of its costs.
struct Simulation {
    double time;                // from the first slot's start to the last one's end
    double bubble;              // idle share of it, the same on all ranks
    std::vector<int> peak_live; // (pp) each rank's peak_live
    PerRank<double> start, end; // of every slot
};

// Return the peak number of live activations: pairs of a stage and a micro-batch that have run F,
// and neither B nor W yet.
inline int peak_live(const Schedule& mine) {
    int live = 0;
    int peak = 0;
    for (const Slot& s : mine) {
        live += s.op == SlotOp::F ? 1 : s.op == SlotOp::I ? 0 : -1;
        peak = std::max(peak, live);
    }
    return peak;
}

// Simulate schedules that pass the check.
// Sends never wait, unless `blocking`: then groups of transfers wait as in pair_transfers().
inline Simulation simulate(const std::vector<Schedule>& all, int pp, const Costs& costs = {},
                           bool blocking = false) {
    Steps steps = blocking ? add_transfers(all, pp) : bare_steps(all, pp);
    Waits waits = waits_for_data(steps, crossings_of(all, pp));
    if (blocking) pair_transfers(steps, waits);
    Timeline t = run_steps(steps, waits, costs);

    // Add up the busy time. Drop the last steps, which have no slot.
    Simulation s = {last_end(t), 0, std::vector<int>(pp), t.start, t.end};
    double busy = 0; // all ranks
    for (int r = 0; r < pp; r++) {
        for (const ScheduleStep& step : steps[r])
            busy += time_of(step, costs);
        s.peak_live[r] = peak_live(all[r]);
        s.start[r].pop_back();
        s.end[r].pop_back();
    }
    s.bubble = 1 - busy / (pp * s.time);
    return s;
}

// ----------------------------------------------------------------------------
// layers into stages

// Return the first layer of each stage, followed by the number of layers; or nothing if there are
// more stages than layers. No layer is dropped and no stage is empty.
//   1. The largest stage's cost is the least possible.
//   2. Among those splits, the sum of squared costs is least.
//   3. Among those, the first stage is shortest, then the second: they keep the most activations.
// cost (n) >= 0 is rounded to a billionth of the sum; whole numbers stay exact.
inline std::vector<int> split_layers(const std::vector<double>& cost, int stages) {
    int n = int(cost.size());
    if (stages < 1 || stages > n) return {};
    const int64_t NONE = INT64_MAX;

    // Scale the costs to integers with a sum below 2^30: equal sums stay equal.
    double total = 0;
    for (double c : cost) total += c;
    int exponent;
    std::frexp(total, &exponent);
    std::vector<int64_t> sum(n + 1); // of the layers before
    for (int i = 0; i < n; i++)
        sum[i + 1] = sum[i] + std::llround(std::ldexp(cost[i], 30 - exponent));

    // Solve from the last layer back: best[k][i] is the best cost of layers i to n - 1 in k stages.
    // `join` adds a stage of some cost before the rest.
    auto solve = [&](auto join) {
        PerRank<int64_t> best(stages + 1, std::vector<int64_t>(n + 1, NONE));
        best[0][n] = 0;
        for (int k = 1; k <= stages; k++) // each other stage has a layer at least
            for (int i = stages - k; i <= n - k; i++)
                for (int end = i + 1; end <= n - k + 1; end++)
                    best[k][i] = std::min(best[k][i], join(sum[end] - sum[i], best[k - 1][end]));
        return best;
    };

    // 1. and 2.: find the least largest cost, then the least squares among splits that keep to it.
    int64_t largest = solve([](int64_t c, int64_t rest) { return std::max(c, rest); })[stages][0];
    auto squares = [&](int64_t c, int64_t rest) {
        return c > largest || rest == NONE ? NONE : c * c + rest;
    };
    PerRank<int64_t> best = solve(squares);

    // 3. End each stage as soon as the remaining layers can still be best.
    std::vector<int> first = {0};
    for (int k = stages; k > 0; k--) {
        int i = first.back();
        int end = i + 1;
        while (squares(sum[end] - sum[i], best[k - 1][end]) != best[k][i])
            end++;
        first.push_back(end);
    }
    return first;
}

} // namespace llmc
