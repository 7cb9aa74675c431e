// pipeline.h - pipeline schedules, their sends and receives, their proof - arXiv:1806.03377
//   A model's layers are cut into pp * chunks stages; stage s is on rank s % pp. A schedule is one
//   rank's list of slots; F0.1 is the forward pass of micro-batch 0 through stage 1:
//     F  forward    B  backward, both halves; or apart:  I  input's gradient  W  weights' gradient
//   1. schedule_of     what each rank does, in which order; or read_schedule, from a file
//   2. add_transfers   what crosses between ranks: one group of receives and sends before each slot
//   3. check_schedule  "" or the fault: slots, their order, a deadlock if sends wait for receives
//   4. simulate        when each slot runs, the idle share, the most activations alive at a time
//   5. split_layers    which layers make a stage
//   4 ranks, 5 micro-batches, B twice as long as F; a line for each rank, 0 to 3:
//     1F1B - arXiv:1806.03377
//       F0 F1 F2 F3                   B0 -- F4 B1 --    B2 --    B3 --    B4 --
//          F0 F1 F2             B0 -- F3 B1 -- F4 B2 --    B3 --    B4 --
//             F0 F1       B0 -- F2 B1 -- F3 B2 -- F4 B3 --    B4 --
//                F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 --
//     zero-bubble ZB-H1: the first rank waits less, late W fill the end - arXiv:2401.10241
//       F0 F1 F2 F3          I0 W0 F4 I1 W1 I2 W2 I3 W3 I4 W4
//          F0 F1 F2       I0 F3 I1 W0 F4 I2 W1 I3 W2 I4 W3 W4
//             F0 F1    I0 F2 I1 F3 I2 W0 F4 I3 W1 I4 W2 W3 W4
//                F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 W2 W3 W4
//   schedule                       idle time of a rank     live activations of rank r, in stages
//   GPipe        arXiv:1811.06965  (p-1) (F+I+W)           m
//   1F1B         arXiv:1806.03377  (p-1) (F+I+W)           min(m, p-r)
//   interleaved  arXiv:2104.04473  (p-1) (F+I+W)           min(vm, 2(p-r-1) + (v-1)p + 1)
//   ZB-H1        arXiv:2401.10241  (p-1) (F+I-W)           min(m, p), of these min(m, p-r) before I
//   p = pp, v = chunks (1 but for interleaved), m >= p micro-batches, and for interleaved's live
//   activations a multiple of p; F I W of one stage. A chunk has 1/v of a rank's layers, so that
//   interleaved idles 1/v as long as 1F1B, for v times the messages. From I to W only what W needs
//   has to live. Sends that wait for their receives cost no time: a test has all sizes to 8, 4, 24.
//   Contract: the weight gradients of a stage add in ascending micro-batch order, on this the check
//   insists: all schedules have the same sums, bit for bit. All follows from sizes, before the run.
//   To copy: this file.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <map>
#include <set>
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

// Makes the gradient that the stage below waits for: all of B, or its input half.
inline bool is_backward(Pass pass) { return pass == Pass::B || pass == Pass::I; }

template <typename... Part> std::string concat(const Part&... part) {
    std::ostringstream s;
    (s << ... << part);
    return s.str();
}

inline std::string name_of(const Slot& s) {
    return char(s.pass) + std::to_string(s.micro) + "." + std::to_string(s.stage);
}

// ----------------------------------------------------------------------------
// schedules

// A rank's forward or backward passes in their order. Micro-batches go in groups: a group passes
// chunk 0, then chunk 1, and so on; backward the last chunk comes first. `group` divides the
// micro-batches in the textbook. Else some groups have more, never less: a small one would be back
// at rank 0 before the pipeline is full, and wait.
inline Schedule pass_order(Pass pass, int group, int pp, int chunks, int micro_batches, int rank) {
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

// `warmup` forward passes, then forward and backward in turn, then the backward passes left.
inline Schedule alternate(const Schedule& forward, const Schedule& backward, int warmup) {
    Schedule s;
    int f = 0, n = int(forward.size());
    for (int b = 0; b < n; b++) {
        for (; f < n && f <= warmup + b; f++) s.push_back(forward[f]);
        s.push_back(backward[b]);
    }
    return s;
}

// Before: F and B. After: B is parted into I and W, and W comes `delay` backward passes later. The
// first stage has its gradients sooner; late W fill what would be the bubble at the end.
inline Schedule delay_weights(const Schedule& in, int delay) {
    Schedule s, weights;
    size_t done = 0;
    for (Slot a : in) {
        s.push_back({a.pass == Pass::B ? Pass::I : a.pass, a.micro, a.stage});
        if (a.pass == Pass::B) weights.push_back({Pass::W, a.micro, a.stage});
        if (weights.size() - done > size_t(delay)) s.push_back(weights[done++]);
    }
    s.insert(s.end(), weights.begin() + done, weights.end());
    return s;
}

// A rank's schedule. GPipe over several chunks is breadth-first (arXiv:2211.05953); 1F1B over
// several is the interleaved schedule, and zero-bubble begins from it. GIVEN: see read_schedule.
inline Schedule schedule_of(Pipeline kind, int pp, int chunks, int micro_batches, int rank) {
    if (kind == Pipeline::GIVEN) return {};
    int m = micro_batches, group = kind == Pipeline::GPIPE ? m : pp;
    int groups = std::max(1, m / group), largest = (m + groups - 1) / groups;
    bool interleaved = chunks > 1 || kind == Pipeline::INTERLEAVED;
    int warmup = pp - rank - 1;
    if (interleaved) warmup = 2 * warmup + (chunks - 1) * largest;
    if (kind == Pipeline::GPIPE) warmup = chunks * m;
    Schedule s = alternate(pass_order(Pass::F, group, pp, chunks, m, rank),
                           pass_order(Pass::B, group, pp, chunks, m, rank), warmup);
    return kind == Pipeline::ZERO_BUBBLE ? delay_weights(s, rank) : s;
}

// Every rank's.
inline std::vector<Schedule> schedules_of(Pipeline kind, int pp, int chunks, int micro_batches) {
    std::vector<Schedule> all;
    for (int r = 0; r < pp; r++) all.push_back(schedule_of(kind, pp, chunks, micro_batches, r));
    return all;
}

// A schedule as text: a line for each rank, words like F0.1, and comments after #.
inline std::string write_schedule(const std::vector<Schedule>& all) {
    std::string text;
    for (const Schedule& mine : all) {
        for (const Slot& s : mine) text += (&s == mine.data() ? "" : " ") + name_of(s);
        text += "\n";
    }
    return text;
}

// Reads one, of a file or a string. "" or what is wrong in which line; the check comes after.
inline std::string read_schedule(std::istream& in, std::vector<Schedule>& all) {
    if (!in) return "the schedule cannot be read: is the path right?";
    all.clear();
    std::string line, word;
    for (int number = 1; std::getline(in, line); number++) {
        std::istringstream words(line.substr(0, line.find('#')));
        Schedule mine;
        while (words >> word) {
            char pass = 0, rest = 0;
            int micro = 0, stage = 0;
            bool digits = word.find_first_not_of("0123456789.", 1) == std::string::npos;
            int n = sscanf(word.c_str(), "%c%6d.%6d%c", &pass, &micro, &stage, &rest);
            if (n != 3 || !digits || std::string("FBIW").find(pass) == std::string::npos)
                return concat("line ", number, ": '", word,
                              "' is no slot: write a letter of FBIW, ",
                              "the micro-batch, a dot and the stage, like F0.1");
            mine.push_back({Pass(pass), micro, stage});
        }
        if (!mine.empty()) all.push_back(mine);
    }
    return all.empty() ? "the schedule is empty: write a line of slots for each rank" : "";
}

// ----------------------------------------------------------------------------
// steps: slots and what crosses between ranks

// One end of a message. It crosses the border below `stage`: an activation goes up from stage - 1
// into it, a gradient comes down from it into stage - 1.
struct Transfer {
    bool send;
    int peer;
    bool gradient;
    int micro, stage;
};

// The transfers are one group, executed before the slot: all are posted at once, and the group is
// over when all are done. The last step of a rank has no slot; it holds the sends that are left.
struct Step {
    bool has_slot = false;
    Slot slot = {};
    std::vector<Transfer> transfers = {};
};

template <typename T> using PerStep = std::vector<std::vector<T>>; // [rank][step]

inline std::string name_of(const Transfer& t) {
    return (t.gradient ? "gradient " : "activation ") + std::to_string(t.micro) + "." +
           std::to_string(t.stage);
}

// What crosses where, at either end.
typedef std::tuple<bool, int, int> Key;
inline Key key_of(const Transfer& t) { return {t.gradient, t.micro, t.stage}; }

// What a slot makes for the next stage, and what it needs from the stage before, on whatever rank
// these are. For B and I the next stage is the one below. W makes and needs nothing.
inline Transfer made_by(const Slot& s) {
    bool gradient = is_backward(s.pass);
    return {true, -1, gradient, s.micro, gradient ? s.stage : s.stage + 1};
}

inline Transfer needed_by(const Slot& s) {
    bool gradient = is_backward(s.pass);
    return {false, -1, gradient, s.micro, gradient ? s.stage + 1 : s.stage};
}

// A message: slot `made` of rank `from` makes it, slot `used` of rank `to` needs it.
struct Crossing {
    int from, made, to, used;
    Transfer send, receive; // its ends
};

// All messages, rank by rank of their receivers.
inline std::vector<Crossing> crossings_of(const std::vector<Schedule>& all, int pp) {
    std::map<Key, Crossing> made;
    for (int r = 0; r < pp; r++)
        for (int i = 0; i < int(all[r].size()); i++)
            if (Transfer t = made_by(all[r][i]); all[r][i].pass != Pass::W)
                made[key_of(t)] = {r, i, -1, -1, t, {}};
    std::vector<Crossing> messages;
    for (int r = 0; r < pp; r++)
        for (int i = 0; i < int(all[r].size()); i++) {
            Transfer t = needed_by(all[r][i]);
            auto maker = made.find(key_of(t));
            if (all[r][i].pass == Pass::W || maker == made.end() || maker->second.from == r)
                continue;
            Crossing m = maker->second;
            m.to = m.send.peer = r, m.used = i, m.receive = t, m.receive.peer = m.from;
            messages.push_back(m);
        }
    return messages;
}

// The schedules as steps without transfers.
inline PerStep<Step> bare_steps(const std::vector<Schedule>& all, int pp) {
    PerStep<Step> steps(pp);
    for (int r = 0; r < pp; r++) {
        for (const Slot& s : all[r]) steps[r].push_back({true, s});
        steps[r].push_back({});
    }
    return steps;
}

// ----------------------------------------------------------------------------
// time

struct Costs { // of a stage and a micro-batch; B takes I + W
    double F = 1, I = 1, W = 1;
};

inline double time_of(const Step& s, const Costs& c) {
    if (!s.has_slot) return 0;
    Pass p = s.slot.pass;
    return p == Pass::F ? c.F : p == Pass::I ? c.I : p == Pass::W ? c.W : c.I + c.W;
}

// A step begins after the end of step `step` of `rank`, because of `what`.
struct Wait {
    int rank, step;
    Transfer what;
};

struct Timeline {
    PerStep<double> start, end; // of the steps that ran: after a deadlock not all did
};

// Runs every rank's steps in order, each as soon as all that it waits for has ended. In rounds each
// step takes one, but a backward pass may share the round of the forward pass before it.
inline Timeline run_steps(const PerStep<Step>& steps, const PerStep<std::vector<Wait>>& waits,
                          const Costs& costs = {}, bool in_rounds = false) {
    size_t pp = steps.size();
    Timeline t = {PerStep<double>(pp), PerStep<double>(pp)};
    auto has_ended = [&](const Wait& w) { return size_t(w.step) < t.end[w.rank].size(); };
    auto run = [&](size_t r, size_t i) {
        bool shares = in_rounds && i > 0 && steps[r][i - 1].slot.pass == Pass::F &&
                      steps[r][i].slot.pass != Pass::F;
        double start = i == 0 ? 0 : shares ? t.start[r][i - 1] : t.end[r][i - 1];
        for (const Wait& w : waits[r][i]) start = std::max(start, t.end[w.rank][w.step]);
        t.start[r].push_back(start);
        t.end[r].push_back(start + (in_rounds ? 1 : time_of(steps[r][i], costs)));
    };
    for (bool moved = true; moved;) {
        moved = false;
        for (size_t r = 0; r < pp; r++)
            for (size_t i = t.end[r].size(); i < steps[r].size(); i++, moved = true) {
                if (!std::all_of(waits[r][i].begin(), waits[r][i].end(), has_ended)) break;
                run(r, i);
            }
    }
    return t;
}

inline double last_end(const Timeline& t) {
    double last = 0;
    for (const std::vector<double>& end : t.end)
        last = std::max(last, end.empty() ? 0 : end.back());
    return last;
}

// "" or the cycle: from where a rank stopped, follow what it waits for until a rank comes again.
inline std::string deadlock_in(const PerStep<Step>& steps, const PerStep<std::vector<Wait>>& waits,
                               const Timeline& t) {
    int pp = int(steps.size()), rank = 0;
    while (rank < pp && t.end[rank].size() == steps[rank].size()) rank++;
    if (rank == pp) return "";
    auto blocker = [&](int r) {
        for (const Wait& w : waits[r][t.end[r].size()])
            if (size_t(w.step) >= t.end[w.rank].size()) return w;
        return Wait{};
    };
    for (int i = 0; i < pp; i++) rank = blocker(rank).rank; // on the cycle now, wherever it began
    std::string text = "deadlock";
    int first = rank;
    do {
        Wait w = blocker(rank);
        size_t i = t.end[rank].size();
        const Step& step = steps[rank][i];
        text += concat(rank == first ? ": " : "; ", "rank ", rank, " in step ", i, " before ",
                       step.has_slot ? name_of(step.slot) : "its end", " waits to ",
                       w.what.send ? "send " : "receive ", name_of(w.what),
                       w.what.send ? " to rank " : " from rank ", w.rank);
        rank = w.rank;
    } while (rank != first);
    return text;
}

// What steps wait for if sends never wait: the ends of the slots whose messages they need.
inline PerStep<std::vector<Wait>> waits_for_data(const PerStep<Step>& steps,
                                                 const std::vector<Crossing>& messages) {
    PerStep<std::vector<Wait>> waits;
    for (const std::vector<Step>& rank : steps) waits.emplace_back(rank.size());
    for (const Crossing& m : messages) waits[m.to][m.used].push_back({m.from, m.made, m.receive});
    return waits;
}

// ----------------------------------------------------------------------------
// transfers

// Pairs the k-th send from one rank to another with the k-th receive there, as libraries without
// tags do: each end's step waits until the other rank has ended the step before its own end.
// "" or the first pair that differs.
inline std::string pair_transfers(const PerStep<Step>& steps, PerStep<std::vector<Wait>>& waits) {
    struct End {
        int step;
        Transfer what;
    };
    std::map<std::pair<int, int>, std::vector<End>> sends, receives; // of (from, to)
    waits = waits_for_data(steps, {});
    for (int r = 0; r < int(steps.size()); r++)
        for (int i = 0; i < int(steps[r].size()); i++)
            for (const Transfer& t : steps[r][i].transfers)
                (t.send ? sends[{r, t.peer}] : receives[{t.peer, r}]).push_back({i, t});
    for (const auto& [ends, list] : receives) sends[ends]; // a pair that receives only
    for (const auto& [ends, sent] : sends) {
        auto [from, to] = ends;
        const std::vector<End>& received = receives[ends];
        for (size_t k = 0; k < std::max(sent.size(), received.size()); k++) {
            bool both = k < sent.size() && k < received.size();
            if (!both || key_of(sent[k].what) != key_of(received[k].what))
                return concat("message ", k, " from rank ", from, " to rank ", to, ": ",
                              k < sent.size() ? name_of(sent[k].what) : "nothing", " is sent, ",
                              k < received.size() ? name_of(received[k].what) : "nothing",
                              " is received");
            int i = sent[k].step, j = received[k].step;
            if (j > 0) waits[from][i].push_back({to, j - 1, sent[k].what});
            if (i > 0) waits[to][j].push_back({from, i - 1, received[k].what});
        }
    }
    return "";
}

// Before: schedules that end if sends never wait. After: every rank's steps, which end although
// each send waits for its receive and each receive for its send.
//   The rule: on both sides a message goes with the first step that starts no sooner than the
//   message is made, in a timeline where sends never wait.
//   The proof: a group waits until each peer has ended the slot before its group. In this timeline
//   that slot starts sooner than the message is made, the slot after the waiting group does not. So
//   every wait leads to an earlier start, and none in a circle.
// Both sides have the messages between two ranks in the order in which they were made: no tags.
// To receive only just before the slot that needs it would be simpler; interleaved schedules
// deadlock so. The price is that a message may lie in its buffer for some slots.
inline PerStep<Step> place_transfers(const std::vector<Schedule>& all, int pp, bool in_rounds) {
    std::vector<Crossing> messages = crossings_of(all, pp);
    PerStep<Step> steps = bare_steps(all, pp);
    Timeline t = run_steps(steps, waits_for_data(steps, messages), Costs(), in_rounds);
    auto made_at = [&](const Crossing& m) { return t.end[m.from][m.made]; };
    std::sort(messages.begin(), messages.end(), [&](const Crossing& a, const Crossing& b) {
        return std::tuple(made_at(a), a.made, a.from) < std::tuple(made_at(b), b.made, b.from);
    });
    auto place = [&](int rank, double time, const Transfer& transfer) {
        const std::vector<double>& start = t.start[rank];
        size_t i = std::lower_bound(start.begin(), start.end(), time) - start.begin();
        steps[rank][i].transfers.push_back(transfer);
    };
    for (const Crossing& m : messages) place(m.to, made_at(m), m.receive); // receives first
    for (const Crossing& m : messages) place(m.from, made_at(m), m.send);
    return steps;
}

// Groups between all slots, or only between rounds of a forward and a backward pass: those that let
// the ranks wait less. 1F1B needs a message as soon as it is made, so the first. Interleaved warms
// up for twice as long, which gives messages the time of a round; there the first would often find
// the peer in the middle of a longer backward pass.
inline PerStep<Step> add_transfers(const std::vector<Schedule>& all, int pp) {
    PerStep<Step> best;
    double least = INFINITY;
    for (bool in_rounds : {false, true}) {
        PerStep<Step> steps = place_transfers(all, pp, in_rounds);
        PerStep<std::vector<Wait>> waits;
        pair_transfers(steps, waits);
        double time = last_end(run_steps(steps, waits));
        if (time < least) best = std::move(steps), least = time;
    }
    return best;
}

// One rank's.
inline std::vector<Step> add_transfers(const std::vector<Schedule>& all, int rank, int pp) {
    return add_transfers(all, pp)[rank];
}

// ----------------------------------------------------------------------------
// the check

// "" or what a slot needs, or a transfer sends, though the rank has neither made nor received it.
inline std::string check_arrivals(const std::vector<Step>& steps, int rank, int stages) {
    std::set<Key> here;
    for (size_t i = 0; i < steps.size(); i++) {
        const Slot& slot = steps[i].slot;
        for (const Transfer& t : steps[i].transfers)
            if (t.send && !here.count(key_of(t)))
                return concat("rank ", rank, " in step ", i, ": ", name_of(t),
                              " is sent before it is made");
        for (const Transfer& t : steps[i].transfers)
            if (!here.insert(key_of(t)).second && !t.send)
                return concat("rank ", rank, " in step ", i, ": ", name_of(t),
                              " is received again");
        if (!steps[i].has_slot || slot.pass == Pass::W) continue;
        Transfer need = needed_by(slot); // but at the two ends of the pipeline
        if (need.stage > 0 && need.stage < stages && !here.count(key_of(need)))
            return concat("rank ", rank, " in step ", i, ": ", name_of(slot), " needs ",
                          name_of(need), ", which comes later or never");
        here.insert(key_of(made_by(slot)));
    }
    return "";
}

// "" or the fault of steps with transfers. A deadlock names its whole cycle.
inline std::string check_transfers(const PerStep<Step>& steps, int stages) {
    PerStep<std::vector<Wait>> waits;
    std::string fault = pair_transfers(steps, waits);
    for (size_t r = 0; r < steps.size() && fault.empty(); r++)
        fault = check_arrivals(steps[r], int(r), stages);
    if (!fault.empty()) return fault;
    return deadlock_in(steps, waits, run_steps(steps, waits));
}

// "" or the fault of one rank's slots: each pass once, F before I before W, W in ascending order.
inline std::string check_slots(const Schedule& mine, int rank, int pp, int chunks,
                               int micro_batches) {
    enum { F = 1, I = 2, W = 4, ALL = 7 };
    std::vector<std::vector<int>> done(chunks, std::vector<int>(micro_batches));
    std::vector<int> next(chunks); // the micro-batch that adds its weight gradients next
    for (size_t i = 0; i < mine.size(); i++) {
        auto [pass, micro, stage] = mine[i];
        auto fault = [&](const auto&... what) {
            return concat("rank ", rank, ", slot ", i, ", ", name_of(mine[i]), ": ", what...);
        };
        if (micro < 0 || micro >= micro_batches)
            return fault("micro-batches are 0 to ", micro_batches - 1);
        if (stage < 0 || stage >= pp * chunks) return fault("stages are 0 to ", pp * chunks - 1);
        if (stage % pp != rank) return fault("the stage is on rank ", stage % pp);
        int& state = done[stage / pp][micro];
        int does = pass == Pass::F ? F : pass == Pass::I ? I : pass == Pass::W ? W : I | W;
        if (state & does) return fault("done before");
        if (does != F && !(state & F)) return fault("F must come first");
        if (does == W && !(state & I)) return fault("I must come first");
        if (does & W && micro != next[stage / pp]++)
            return fault("weight gradients add in ascending order, micro-batch ",
                         next[stage / pp] - 1, " is next");
        state |= does;
    }
    for (int c = 0; c < chunks; c++)
        for (int m = 0; m < micro_batches; m++)
            if (int state = done[c][m]; state != ALL) {
                Pass lacks = !(state & F) ? Pass::F : !(state & I) ? Pass::B : Pass::W;
                return concat("rank ", rank, " lacks ", name_of(Slot{lacks, m, c * pp + rank}));
            }
    return "";
}

// "" or the fault of a set of schedules.
inline std::string check_schedule(const std::vector<Schedule>& all, int pp, int chunks,
                                  int micro_batches) {
    if (int(all.size()) != pp) return concat(all.size(), " schedules for ", pp, " ranks");
    std::string fault;
    for (int r = 0; r < pp && fault.empty(); r++)
        fault = check_slots(all[r], r, pp, chunks, micro_batches);
    if (!fault.empty()) return fault;
    PerStep<Step> steps = bare_steps(all, pp);
    PerStep<std::vector<Wait>> waits = waits_for_data(steps, crossings_of(all, pp));
    fault = deadlock_in(steps, waits, run_steps(steps, waits));
    return fault.empty() ? check_transfers(add_transfers(all, pp), pp * chunks) : fault;
}

// ----------------------------------------------------------------------------
// the simulator

struct Simulation {
    double time;                // from the first slot's start to the last one's end
    double bubble;              // idle share of it; all ranks are busy for as long
    std::vector<int> peak_live; // per rank: most (micro, stage) whose F is done and B or W is not
    PerStep<double> start, end; // of every slot
};

// The most stages and micro-batches whose F is done and whose B or W is not.
inline int peak_live(const Schedule& mine) {
    int live = 0, peak = 0;
    for (const Slot& s : mine) {
        live += s.pass == Pass::F ? 1 : s.pass == Pass::I ? 0 : -1;
        peak = std::max(peak, live);
    }
    return peak;
}

// Before: schedules that pass the check. Sends never wait; or, blocking, as the groups above do.
inline Simulation simulate(const std::vector<Schedule>& all, int pp, const Costs& costs = {},
                           bool blocking = false) {
    PerStep<Step> steps = blocking ? add_transfers(all, pp) : bare_steps(all, pp);
    PerStep<std::vector<Wait>> waits = waits_for_data(steps, crossings_of(all, pp));
    if (blocking) pair_transfers(steps, waits);
    Timeline t = run_steps(steps, waits, costs);
    Simulation s = {last_end(t), 0, std::vector<int>(pp), t.start, t.end};
    double busy = 0; // all ranks
    for (int r = 0; r < pp; r++) {
        for (const Step& step : steps[r]) busy += time_of(step, costs);
        s.peak_live[r] = peak_live(all[r]);
        s.start[r].pop_back(), s.end[r].pop_back(); // the step without slot
    }
    s.bubble = 1 - busy / (pp * s.time);
    return s;
}

// The timeline as text: a line for each rank, three characters for each second, -- while a slot
// goes on. For costs that are whole seconds.
inline std::string picture_of(const std::vector<Schedule>& all, const Simulation& s) {
    std::string text;
    for (size_t r = 0; r < all.size(); r++) {
        std::string line;
        for (size_t i = 0; i < all[r].size(); i++) {
            line.resize(size_t(s.start[r][i]) * 3, ' ');
            std::string name = concat(char(all[r][i].pass), all[r][i].micro);
            line += name + std::string(name.size() < 3 ? 3 - name.size() : 0, ' ');
            for (int k = 1; k < int(s.end[r][i] - s.start[r][i]); k++) line += "-- ";
        }
        text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
    }
    return text;
}

// ----------------------------------------------------------------------------
// layers into stages

// The first layer of each stage, and the number of layers at the end; empty if there are more
// stages than layers. No layer is dropped and no stage is empty. The largest stage cost is the
// least possible; among those splits the sum of squares is least; among those the first stage is
// the shortest, then the second: they keep the most activations. Costs (>= 0) count to a billionth
// of their sum; whole numbers exactly.
inline std::vector<int> split_layers(const std::vector<double>& cost, int stages) {
    int n = int(cost.size());
    if (stages < 1 || stages > n) return {};
    const int64_t NONE = INT64_MAX;
    double total = 0;
    for (double c : cost) total += c;
    int exponent; // costs as integers, their sum below 2^30: equal sums stay equal
    std::frexp(total, &exponent);
    std::vector<int64_t> sum(n + 1);
    for (int i = 0; i < n; i++)
        sum[i + 1] = sum[i] + std::llround(std::ldexp(cost[i], 30 - exponent));

    // best[k][i]: layers i to n-1 in k stages; `join` adds a stage of some cost before a rest
    auto solve = [&](auto join) {
        PerStep<int64_t> best(stages + 1, std::vector<int64_t>(n + 1, NONE));
        best[0][n] = 0;
        for (int k = 1; k <= stages; k++)
            for (int i = 0; i < n; i++)
                for (int end = i + 1; end <= n; end++)
                    best[k][i] = std::min(best[k][i], join(sum[end] - sum[i], best[k - 1][end]));
        return best;
    };
    int64_t largest = solve([](int64_t c, int64_t rest) { return std::max(c, rest); })[stages][0];
    auto squares = [&](int64_t c, int64_t rest) {
        return c > largest || rest == NONE ? NONE : c * c + rest;
    };
    PerStep<int64_t> best = solve(squares);
    std::vector<int> first = {0};
    for (int k = stages; k > 0; k--) {
        int i = first.back(), end = i + 1;
        while (squares(sum[end] - sum[i], best[k - 1][end]) != best[k][i]) end++;
        first.push_back(end);
    }
    return first;
}
