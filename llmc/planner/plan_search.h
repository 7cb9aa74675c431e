// plan_search.h - the layouts that are allowed, by branch and bound: the best few are simulated
//   1. LIST    every grid of the ranks and its schedules and micro-batches, as configurations.
//              config_check() decides what is allowed, so no rule is written twice. Rules that
//              shorten the list: tensor parallelism stays inside a node; ZeRO shares out a bucket
//              among all ranks or those of a node, or its weights among these or those of several
//              nodes. The global batch and the sequence length stay as the user gave them, and so
//              does every flag that the planner does not choose
//   2. BOUND   the least seconds and bytes of each, with each ZeRO stage (lower_bound.h)
//   3. SEARCH  The least bound is next: it is placed and simulated (trial.h). One that does not
//              fit gives way to leaner ones: more recomputation, smaller masters, data that leave.
//              Layouts of one family have bounds that are too low by about as much, so once one of
//              them is simulated the others' bounds rise by the same factor. The search ends where
//              no bound is below the times that will be shown, or the work is done
//   4. CHOOSE  times within 2% of the fastest are a tie: the fewest techniques win, then the
//              least memory
//   All ranks compute the same numbers, and so choose the same layout.
#pragma once
#include <bit>
#include <queue>
#include "../action.h"
#include "../head.h"
#include "../io/config.h"
#include "../io/config_check.h"
#include "../io/config_notes.h"
#include "../io/machine.h"
#include "../io/plan_flags.h"
#include "../layout.h"
#include "../model.h"
#include "../offload.h"
#include "../ops/types.h"
#include "../text.h"
#include "before_step.h"
#include "layer_cost.h"
#include "links.h"
#include "lower_bound.h"
#include "trial.h"

namespace llmc {

// The configuration of one rank, with what the flags say beyond a layout.
inline Config plain_config(const PlanQuestion& q) {
    Config c = q.config;
    c.dp = c.tp = c.pp = c.cp = c.ep = c.chunks = c.micro_batch = 1;
    c.pipeline = "1f1b";
    c.recompute = "none";
    c.sequence_parallel = false;

    // Weights that stay near are cut in ZeRO-3 alone.
    c.zero = keeps_weights_near(c) ? 3 : 0;
    return c;
}

// ----------------------------------------------------------------------------
// 1. list

// The divisors of n, in ascending order.
inline std::vector<int> divisors_of(int n) {
    std::vector<int> all;
    for (int d = 1; d <= n; d++)
        if (n % d == 0) all.push_back(d);
    return all;
}

// Check a candidate by the ordinary check of the command line: "" or why it is refused. The check
// takes a copy, because it fills in what flags leave out.
inline std::string refuse_layout(const PlanQuestion& q, Config c) {
    std::string wrong = check_with_teacher(c, q.shape, q.teacher);
    return wrong.empty() ? refuse_idle_offload(c) : wrong;
}

// The values of --etp to try: tp ranks cut all experts or none. A user's flag leaves no choice.
inline std::vector<int> etp_choices(const PlanQuestion& q, int tp) {
    bool open = q.shape.experts.E && tp > 1 && !was_given(q.config, "etp");
    if (open) return {0, 1};
    return {q.config.etp};
}

// Whether each node holds whole groups of tp ranks: all, if there is one node.
inline bool nodes_hold(const Machine& machine, int ranks, int tp) {
    int cards = int(machine.cards);
    if (ranks <= cards)
        return tp <= cards;
    return cards % tp == 0;
}

// The allowed grids of q.gpus ranks, without other techniques. why: receives the first refusal.
inline std::vector<Config> list_grids(const PlanQuestion& q, std::string* why) {
    std::vector<Config> grids;
    std::vector<int> divisors = divisors_of(q.gpus), one = {1};
    Config c = plain_config(q);
    auto ask = [&] {
        std::string wrong = refuse_layout(q, c);
        if (wrong.empty()) grids.push_back(c);
        if (!wrong.empty() && why->empty()) *why = wrong;
    };

    // Keep tensor parallelism inside a node: its messages are on the critical path.
    for (int tp : divisors)
        for (int pp : divisors)
            for (int cp : divisors) {
                int64_t each = int64_t(tp) * pp * cp;
                if (!nodes_hold(q.machine, q.gpus, tp) || q.gpus % each)
                    continue;
                c.tp = tp;
                c.pp = pp;
                c.cp = cp;
                c.dp = q.gpus / tp / pp / cp; // what is left

                // Distribute experts over ranks that see different tokens: those of dp and cp, and
                // of tp where experts are whole, which wants sequence parallelism.
                for (int etp : etp_choices(q, tp))
                    for (int ep : q.shape.experts.E ? divisors : one) {
                        c.etp = etp;
                        c.ep = ep;
                        c.sequence_parallel = has_whole_experts(c);
                        if (routing_ranks(c) % ep == 0) ask();
                    }
            }
    return grids;
}

// Rows (tokens) of a rank's micro-batch beyond which products get no faster, while activations take
// ever more memory; and stages on a rank, beyond which none are tried.
constexpr int64_t FULL_ROWS = 65536;
constexpr int MOST_CHUNKS = 8;

// The allowed schedules and micro-batches of a grid.
inline std::vector<Config> list_schedules(const PlanQuestion& q, const Config& grid) {
    // List micro-batches that divide a rank's part of the global batch, and numbers of chunks.
    std::vector<Config> all;
    int64_t samples = q.config.batch_tokens / q.config.seq / grid.dp;
    std::vector<int> sizes, chunks = {1};
    for (int B = 1; B <= 64; B++) {
        // A single sequence may have more rows than fill a card.
        bool full = B > 1 && B * int64_t(q.config.seq) / grid.cp > FULL_ROWS;
        if (!full && samples % B == 0) sizes.push_back(B);
    }
    for (int v = 2; v <= MOST_CHUNKS; v++)
        if (grid.pp > 1) chunks.push_back(v);

    // Try three schedules. GPipe is left out: it has 1F1B's bubble, and keeps more activations.
    // Zero-bubble with chunks is left out because no sum counts the stages that live there.
    Config c = grid;
    for (int B : sizes)
        for (int v : chunks)
            for (bool sequence_parallel : {false, true})
                for (const char* pipeline : {"1f1b", "interleaved", "zero-bubble"}) {
                    bool interleaved = !strcmp(pipeline, "interleaved");
                    bool idle = (grid.pp == 1 && strcmp(pipeline, "1f1b")) ||
                                (grid.tp == 1 && sequence_parallel);
                    if (idle || interleaved != (v > 1))
                        continue;
                    c.micro_batch = B;
                    c.chunks = v;
                    c.pipeline = pipeline;
                    c.sequence_parallel = sequence_parallel;
                    if (refuse_layout(q, c).empty()) all.push_back(c);
                }
    return all;
}

// The methods of context parallelism that a grid allows, or the user's.
inline std::vector<std::string> context_methods(const PlanQuestion& q, Config grid) {
    if (grid.cp == 1 || was_given(q.config, "cp-method"))
        return {grid.cp_method};
    std::vector<std::string> methods;
    for (const char* name : {"gather", "ulysses", "ring"}) {
        grid.cp_method = name;
        if (refuse_layout(q, grid).empty()) methods.push_back(name);
    }
    return methods;
}

// The orders of the grid that links can tell apart: the user's; and without one, with a node's
// other ranks along dp instead of pp. Tensor parallelism stays nearest in both.
inline std::vector<std::string> orders_of(const PlanQuestion& q, const Config& c) {
    bool near = c.tp * c.cp < q.machine.cards;
    bool differs = c.pp > 1 && c.dp > 1 && near && !was_given(q.config, "grid-order");
    if (differs) return {c.grid_order, "tp-dp-pp"};
    return {c.grid_order};
}

// Which ranks share out a bucket: those of the user's flags, or else all; those of a node
// (--zero-group); or those of one node, or of several, its weights, and all ranks the rest (--hpz).
enum class Sharing { ASKED, NODE, NEAR, NEAR_NODES };

// The data-parallel ranks of a node, if ZeRO may share out each bucket among these alone, or its
// weights: where there are several nodes, and no flag says otherwise; else 0. A group of several
// nodes sends as much across them as all ranks do, but its rings are shorter: it has as many nodes
// as there are groups, or fewer, so that neither ring is long.
inline int node_group(const PlanQuestion& q, const Config& p, Sharing sharing) {
    // Look at what the flags leave open. Experts that are shared out have groups of their own.
    const Config& c = q.config;
    bool open = !was_given(c, "zero-group") && !keeps_weights_near(c) && p.zero > 0;
    if (sharing >= Sharing::NEAR)
        open &= !was_given(c, "hpz") && p.zero == 3 && !offloads(p, "weights");
    if (!open || p.ep > 1 || has_whole_experts(p))
        return 0;

    // Look at the nodes.
    Layout layout = choose_grid(p, q.shape);
    int near = axis_in_node(layout, q.machine, &Layout::cp) *
               axis_in_node(layout, q.machine, &Layout::dp);
    int all = p.dp * p.cp;
    bool apart = near > 1 && near < all && all % near == 0;
    if (!apart || sharing != Sharing::NEAR_NODES)
        return apart ? near : 0;

    // Take a power of two of nodes.
    int nodes = 1;
    while (4 * nodes * nodes * near <= all && all % (2 * nodes * near) == 0)
        nodes *= 2;
    return nodes > 1 ? nodes * near : 0;
}

// A way to make room that the user leaves open: smaller masters, and rows of OFFLOAD_TABLE that
// leave the device, a bit each.
struct Saving {
    bool remainder = false;
    unsigned offload = 0;
    bool operator==(const Saving& x) const = default;
};

// Whether a row of OFFLOAD_TABLE is among these.
inline bool moves_row(unsigned offload, int row) {
    return offload >> row & 1;
}

// The words of --offload for these rows.
inline std::string offload_words(unsigned offload) {
    std::string words;
    for (int row = 0; row < OFFLOAD_ROWS; row++)
        if (moves_row(offload, row))
            words += concat(words.empty() ? "" : ",", OFFLOAD_TABLE[row].name);
    return words.empty() ? "none" : words;
}

template <typename T, typename S> std::vector<Saving> savings_of(const PlanQuestion& q, S) {
    // Remainders keep every master's bits, so nothing but rounding at ties tells them apart. What
    // the user says of masters holds.
    std::vector<Saving> savings;
    Config c = q.config;
    c.masters = "remainder";
    bool theirs = was_given(q.config, "masters") || q.config.masters != "float";
    const std::string before = check_pairs(q.config); // what a saving must not add to
    bool shrink = !theirs && check_pairs(c) == before;
    if (shrink) savings.push_back({true, 0});

    // The host's memory is another one, unless the CPU runs the step. No bit depends on where
    // anything lies, so try all sets, each behind those that it contains.
    bool apart = sizes_of_gpu || !std::is_same_v<S, Cpu>;
    if (was_given(q.config, "offload") || !apart)
        return savings;
    for (unsigned offload = 1; offload < 1u << OFFLOAD_ROWS; offload++) {
        c = q.config;
        c.offload = offload_words(offload);
        bool works = refuse_idle_offload(c).empty() && check_policies(c).empty();
        if (!works || check_pairs(c) != before) continue;
        savings.push_back({false, offload});

        // Masters that stay may shrink beside what leaves.
        if (shrink && !moves_row(offload, OPTIMIZER)) savings.push_back({true, offload});
    }
    return savings;
}

// ----------------------------------------------------------------------------
// 2. bound

// A leaf of the search: the flags that a candidate has beyond its grid and schedule.
struct Leaf {
    int zero = 0;
    Sharing sharing = Sharing::ASKED;
    int level = 0; // of recomputation
    Saving saving = {};
};

// Give a grid and schedule a leaf's flags. Returns false if ZeRO has no such groups.
inline bool take_leaf(const PlanQuestion& q, Config& c, const Leaf& leaf) {
    c.zero = leaf.zero;
    c.recompute = recompute_name(Recompute(leaf.level));
    if (leaf.saving.remainder) c.masters = "remainder";
    if (leaf.saving.offload) c.offload = offload_words(leaf.saving.offload);
    if (leaf.sharing == Sharing::ASKED) return true;
    int group = node_group(q, c, leaf.sharing);
    (leaf.sharing == Sharing::NODE ? c.zero_group : c.hpz) = group;
    return group > 0;
}

// A candidate in the queue: its grid and schedule by number, and the least that it takes.
struct BoundedLayout {
    double seconds; // by which it stands in the queue
    size_t number;  // among equals, the first listed is first
    size_t schedule;
    Leaf leaf;
    Bound bound;
    bool operator<(const BoundedLayout& x) const { // the queue's top is the greatest
        return std::pair(seconds, number) > std::pair(x.seconds, x.number);
    }
};

// A search: the prices of all layouts, of what runs before a step too, and what is left to try.
template <typename T, typename S> struct Search {
    const PlanQuestion& q;
    S where;
    Prices<T, S> prices;
    std::vector<Prices<T, S>> before = {};
    std::vector<Config> schedules = {};
    std::vector<Saving> savings = {};
    std::priority_queue<BoundedLayout> queue = {};
    std::set<std::string> seen = {}; // leaner candidates, by schedule and leaf
    size_t listed = 0;               // how many were bounded
    Config leanest = {};             // the one that takes the fewest bytes
    double least = INFINITY;         // its bytes
    std::string why = "";            // why the first refused grid was refused
};

// Return the least that a configuration takes, with what runs before its step.
template <typename T, typename S> Bound bound_of(Search<T, S>& s, const Config& c) {
    const PlanQuestion& q = s.q;
    Plan p = {train_options(c), choose_grid(c, q.shape), {}};
    p.layout = with_tiers(p.layout, p.offload);
    split_stages(s.prices, p.layout);
    Bound bound = bound_of_plan(s.prices, p);

    // A teacher has weights and room of its own.
    size_t i = 0;
    for (const BeforeStep& before : before_steps(c, p, q.shape, q.teacher)) {
        CostModel cost = {q.machine, sizeof(T)};
        if (i == s.before.size())
            s.before.push_back({with_logits(before.shape, s.where), cost, s.where});
        Plan one = {before.options, before_layout(before, p.layout), {}};
        if (before.teacher) one.layout = with_tiers(one.layout, {});
        split_stages(s.before[i], one.layout);
        Bound evaluation = bound_of_plan(s.before[i++], one);
        bound.seconds += before.times * evaluation.seconds;
        if (before.teacher) add_beside(bound, evaluation);
    }
    bound.of_rank = {}; // the queue is long
    return bound;
}

// Put a candidate into the queue, if it is allowed and new.
template <typename T, typename S>
void push_candidate(Search<T, S>& s, size_t schedule, const Leaf& leaf) {
    Config c = s.schedules[schedule];
    bool known = take_leaf(s.q, c, leaf);
    if (!known || (s.q.named && !has_named(s.q.config, c)))
        return;
    Bound bound = bound_of(s, c);
    s.queue.push({bound.seconds, s.listed++, schedule, leaf, bound});
    if (bound.bytes >= s.least) return;
    s.least = bound.bytes;
    s.leanest = c;
}

// List all grids and schedules, and put each ZeRO stage and group into the queue. Where activations
// leave by the user's flag, what is computed again need not move: then each level, too.
template <typename T, typename S> Search<T, S> search_layouts(const PlanQuestion& q, S where) {
    CostModel cost = {q.machine, sizeof(T)};
    cost.teacher_C = double(q.teacher.C);
    Search<T, S> s = {q, where, {with_logits(q.shape, where), cost, where}};
    s.savings = savings_of<T>(q, where);
    for (const Config& grid : list_grids(q, &s.why)) {
        std::vector<std::string> methods = context_methods(q, grid);
        std::vector<std::string> orders = orders_of(q, grid);
        for (Config c : list_schedules(q, grid))
            for (const std::string& method : methods)
                for (const std::string& order : orders) {
                    c.cp_method = method;
                    c.grid_order = order;
                    s.schedules.push_back(c);
                }
    }

    int levels = offloads(q.config, "activations") ? RECOMPUTE_LEVELS : 1;
    int levels_asked = q.named && was_given(q.config, "recompute") ? RECOMPUTE_LEVELS : levels;
    for (size_t i = 0; i < s.schedules.size(); i++) {
        const Config& c = s.schedules[i];
        bool shares = c.dp * c.cp > 1 || routing_ranks(c) > c.ep; // experts, at least
        for (int zero = c.zero; zero <= (shares ? 3 : 0); zero++)
            for (Sharing sharing : {Sharing::ASKED, Sharing::NODE, Sharing::NEAR,
                                    Sharing::NEAR_NODES})
                for (int level = 0; level < levels_asked; level++)
                    push_candidate(s, i, {zero, sharing, level});
    }
    return s;
}

// ----------------------------------------------------------------------------
// 3. search

// Put what is leaner than a candidate that does not fit into the queue: the next level of
// recomputation, smaller masters, one more row that leaves the device.
template <typename T, typename S> void push_leaner(Search<T, S>& s, const BoundedLayout& from) {
    auto push = [&](Leaf leaf) {
        const Saving& x = leaf.saving;
        std::string name = concat(from.schedule, " ", leaf.zero, " ", int(leaf.sharing), " ",
                                  leaf.level, " ", x.remainder, " ", x.offload);
        if (s.seen.insert(name).second) push_candidate(s, from.schedule, leaf);
    };

    // Recompute more.
    Leaf leaf = from.leaf;
    bool named = s.q.named && was_given(s.q.config, "recompute");
    if (++leaf.level < RECOMPUTE_LEVELS && !named) push(leaf);

    // Take sets that have one row more, or smaller masters. Activations that leave may be faster
    // where more is computed again.
    const Saving& now = from.leaf.saving;
    for (const Saving& x : s.savings) {
        bool contains = (now.offload & x.offload) == now.offload;
        int more = std::popcount(x.offload) - std::popcount(now.offload);
        bool shrinks = more == 0 && x.remainder && !now.remainder;
        bool moves = more == 1 && x.remainder <= now.remainder;
        if (!contains || !(shrinks || moves)) continue;
        leaf = from.leaf;
        leaf.saving = x;
        bool leave = moves_row(x.offload & ~now.offload, ACTIVATIONS) && !named;
        for (; leaf.level < RECOMPUTE_LEVELS; leaf.level++) {
            push(leaf);
            if (!leave) break;
        }
    }
}

// Times within this factor of the fastest are a tie.
constexpr double TIE = 1.02;

// Trials that are shown, and the work of a search: actions of plans that were simulated or placed.
constexpr size_t SHOWN = 6;
constexpr double MOST_WORK = 6e5;

// The answer: the best trials, and which one is chosen.
struct Answer {
    std::vector<Trial> best;          // those that fit, the fastest first
    size_t chosen = 0;                // the index in `best`
    size_t listed = 0, simulated = 0; // candidates that were bounded, and simulated
    Config leanest;                   // the one that takes the fewest bytes
    std::string why;                  // why the first refused grid was refused
};

// Choose among trials that fit, the fastest first: of those that tie with it, the one with the
// fewest techniques, then the least memory. Returns its index.
inline size_t choose_trial(const std::vector<Trial>& best) {
    size_t chosen = 0;
    for (size_t i = 1; i < best.size() && best[i].seconds <= TIE * best[0].seconds; i++) {
        auto rank = [](const Trial& t) { return std::pair(techniques(t.config), t.bytes); };
        if (rank(best[i]) < rank(best[chosen])) chosen = i;
    }
    return chosen;
}

// Layouts whose bounds are too low by about as much: near relatives, and distant ones.
inline std::string distant_family(const Config& c) {
    return concat(c.pp > 1, " ", c.pipeline, " ", c.zero >= 2, " ", c.offload);
}
inline std::string near_family(const Config& c) {
    return concat(distant_family(c), " ", c.tp, " ", c.pp, " ", c.cp, " ", c.ep, " ", c.etp, " ",
                  c.zero, " ", c.hpz > 1, " ", c.chunks, " ", c.cp_method);
}

// The trials of a search, and its work so far.
struct Trials {
    std::vector<Trial> all = {};
    std::set<double> times = {};
    std::map<std::string, double> low = {}; // by family: the least time of a trial / its bound
    double work = 0;

    // Note how low a bound was, and raise one by what its relatives' were; by half as much if these
    // are but distant relatives.
    void note(const std::string& family, double ratio) {
        auto [known, fresh] = low.insert({family, ratio});
        if (!fresh) known->second = std::min(known->second, ratio);
    }
    double raised(const Config& c, double bound) const {
        auto near = low.find(near_family(c));
        auto distant = low.find(distant_family(c));
        double ratio = distant == low.end() ? 1 : (1 + distant->second) / 2;
        return bound * (near == low.end() ? ratio : near->second);
    }

    // The longest time that ties with the fastest, and the one beyond which none is shown.
    double tie() const {
        return times.empty() ? 0 : TIE * *times.begin();
    }
    double limit() const {
        if (times.size() < SHOWN) return INFINITY;
        double last = *std::next(times.begin(), SHOWN - 1);
        return std::max(tie(), last);
    }
};

// Place a candidate and simulate it. Returns whether it became a trial.
template <typename T, typename S>
bool try_candidate(Search<T, S>& s, const BoundedLayout& x, const Config& c, Trials& trials) {
    // Place it, if its sums fit. Where it has no room, go on with leaner ones.
    const PlanQuestion& q = s.q;
    double actions = rehearsal_actions(q, c);
    bool hope = x.bound.bytes <= q.room && x.bound.host <= q.host_room;
    if (hope) {
        const Trial& placed = evaluate_config<T>(q, c, Depth::PLACED, s.where, x.bound.fullest);
        if (!placed.wrong.empty()) return false;
        trials.work += actions / 4;
        hope = has_room(q, placed);
    }
    if (!hope) {
        push_leaner(s, x);
        return false;
    }

    // Simulate it. What moves takes more actions.
    const Trial& t = evaluate_config<T>(q, c, Depth::TIMED, s.where);
    trials.work += x.leaf.saving.offload ? 10 * actions : actions;
    if (!t.wrong.empty()) return false;
    double ratio = t.seconds / x.bound.seconds;
    trials.note(near_family(c), ratio);
    trials.note(distant_family(c), ratio);
    trials.all.push_back(t);
    trials.times.insert(t.seconds);
    return true;
}

// Try candidates, the least bound first.
template <typename T, typename S> Trials try_candidates(Search<T, S>& s) {
    Trials trials;
    std::vector<std::pair<int, BoundedLayout>> simple; // by their techniques
    while (!s.queue.empty()) {
        // Stop where no other can be shown. Of those that would tie with the fastest, the simplest
        // are tried even when the work is done.
        BoundedLayout x = s.queue.top();
        s.queue.pop();
        if (x.seconds > trials.limit()) break;
        double most = trials.all.size() < 3 ? 4 * MOST_WORK : MOST_WORK;
        bool done = trials.work > most;
        if (done && x.seconds > trials.tie()) break;

        // Let a candidate whose bound is too low wait for its turn.
        Config c = s.schedules[x.schedule];
        take_leaf(s.q, c, x.leaf);
        double seconds = trials.raised(c, x.bound.seconds);
        if (seconds > x.seconds) {
            x.seconds = seconds;
            s.queue.push(x);
            continue;
        }
        if (done) simple.push_back({techniques(c), x});
        else try_candidate(s, x, c, trials);
    }

    // Try the four simplest of those that were left: one of them may win a tie.
    std::stable_sort(simple.begin(), simple.end(),
                     [](const auto& x, const auto& y) { return x.first < y.first; });
    for (size_t i = 0; i < simple.size() && i < 4; i++) {
        Config c = s.schedules[simple[i].second.schedule];
        take_leaf(s.q, c, simple[i].second.leaf);
        try_candidate(s, simple[i].second, c, trials);
    }
    return trials;
}

// ----------------------------------------------------------------------------
// 4. choose

// Search, and choose.
template <typename T, typename S> Answer answer_question(const PlanQuestion& q, S where) {
    q.known->clear(); // the question may be another one than before
    Search<T, S> s = search_layouts<T>(q, where);
    Trials trials = try_candidates(s);
    Answer a = {{}, 0, s.listed, trials.all.size(), s.leanest, s.why};

    // The leanest is the last resort.
    if (trials.all.empty() && s.listed > 0) {
        const Trial& t = evaluate_config<T>(q, s.leanest, Depth::TIMED, where);
        bool fits = t.wrong.empty() && has_room(q, t);
        if (fits) trials.all.push_back(t);
    }

    // Show the fastest that fit. The last place is for a simpler one that ties with the first.
    std::stable_sort(trials.all.begin(), trials.all.end(),
                     [](const Trial& x, const Trial& y) { return x.seconds < y.seconds; });
    int simplest = INT_MAX;
    for (const Trial& trial : trials.all) {
        bool full = a.best.size() == SHOWN;
        int needs = techniques(trial.config);
        if (full && trial.seconds > TIE * a.best[0].seconds)
            break;
        if (full && needs >= simplest) continue;
        const Trial& t = evaluate_config<T>(q, trial.config, Depth::SURE, where);
        if (!has_room(q, t)) continue;
        if (full) a.best.pop_back();
        a.best.push_back(t);
        simplest = std::min(simplest, needs);
    }
    a.chosen = choose_trial(a.best);
    return a;
}

} // namespace llmc
