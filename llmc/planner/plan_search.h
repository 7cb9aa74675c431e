// plan_search.h - the layouts that are allowed, by branch and bound: the best few are simulated
//   1. LIST    every grid of the ranks and its schedules and micro-batches, as configurations.
//              config_check() decides what is allowed, so no rule is written twice. Rules that
//              shorten the list: tensor parallelism stays inside a node; ZeRO shares out a bucket
//              among all ranks or those of a node, or its weights among these or those of several
//              nodes. The global batch and the sequence length stay as the user gave them, and so
//              does every flag that the planner does not choose
//   2. BOUND   the least seconds and bytes of each, with each ZeRO stage (lower_bound.h)
//   3. SEARCH  The least bound is next: it is placed and simulated (evaluate.h). One that does not
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
#include "../io/machine.h"
#include "../io/plan_flags.h"
#include "../layout.h"
#include "../model.h"
#include "../recompute.h"
#include "../offload.h"
#include "../ops/types.h"
#include "../comm/text.h"
#include "evaluate.h"
#include "layer_cost.h"
#include "links.h"
#include "lower_bound.h"
#include "predict.h"

namespace llmc {

// The configuration of one rank, with what the flags say beyond a layout.
inline Config plain_config(const PlanQuestion& q) {
    Config c = q.config;
    c.dp = c.tp = c.pp = c.cp = c.ep = 1;
    c.chunks = c.micro_batch = 1;
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
    LLMC_TRY(check_with_teacher(c, q.shape, q.teacher));
    return refuse_idle_offload(c);
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
    std::vector<int> divisors = divisors_of(q.gpus);
    std::vector<int> one = {1};
    Config c = plain_config(q);
    auto ask = [&] {
        std::string wrong = refuse_layout(q, c);
        if (wrong.empty()) grids.push_back(c);
        else if (why->empty()) *why = wrong;
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
                bool open = q.shape.experts.E && tp > 1 && !was_given(q.config, "etp");
                std::vector<int> etps = {q.config.etp};
                if (open) etps = {0, 1};
                for (int etp : etps)
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
    // List micro-batches that divide a rank's part of the global batch. A single sequence may have
    // more rows than fill a card.
    int64_t samples = q.config.batch_tokens / q.config.seq / grid.dp;
    std::vector<int> sizes;
    for (int B = 1; B <= 64; B++) {
        int64_t rows = B * int64_t(q.config.seq) / grid.cp;
        bool full = B > 1 && rows > FULL_ROWS;
        if (!full && samples % B == 0)
            sizes.push_back(B);
    }

    // List schedules, with chunks. GPipe is left out: it has 1F1B's bubble, and keeps more
    // activations. So is zero-bubble with chunks: no sum counts the stages that live there.
    std::vector<std::pair<const char*, int>> schedules = {{"1f1b", 1}};
    if (grid.pp > 1) schedules.push_back({"zero-bubble", 1});
    for (int chunks = 2; grid.pp > 1 && chunks <= MOST_CHUNKS; chunks++)
        schedules.push_back({"interleaved", chunks});

    std::vector<Config> all;
    Config c = grid;
    for (int B : sizes)
        for (auto [pipeline, chunks] : schedules)
            for (bool sequence_parallel : {false, true}) {
                if (sequence_parallel && grid.tp == 1) continue;
                c.micro_batch = B;
                c.chunks = chunks;
                c.pipeline = pipeline;
                c.sequence_parallel = sequence_parallel;
                if (refuse_layout(q, c).empty())
                    all.push_back(c);
            }
    return all;
}

// The methods of context parallelism and the orders of the grid that links can tell apart, or the
// user's: with a node's other ranks along dp instead of pp. Tensor parallelism stays nearest.
inline std::vector<Config> list_variants(const PlanQuestion& q, const Config& grid) {
    std::vector<std::string> methods = {grid.cp_method};
    std::vector<std::string> orders = {grid.grid_order};
    if (grid.cp > 1 && !was_given(q.config, "cp-method"))
        methods = {"gather", "ulysses", "ring"};
    bool near = grid.tp * grid.cp < q.machine.cards;
    if (grid.pp > 1 && grid.dp > 1 && near && !was_given(q.config, "grid-order"))
        orders.push_back("tp-dp-pp");

    std::vector<Config> all;
    Config c = grid;
    for (const std::string& method : methods)
        for (const std::string& order : orders) {
            c.cp_method = method;
            c.grid_order = order;
            if (refuse_layout(q, c).empty())
                all.push_back(c);
        }
    return all;
}

// The ranks among which ZeRO shares out each bucket (--zero-group), or its weights (--hpz).
struct Sharing {
    int zero_group = 0, hpz = 0;
};

// The groups to try for ZeRO: those of the user's flags, or else all ranks; and where there are
// several nodes and no flag says otherwise, those of a node for each bucket or for its weights. A
// group of several nodes sends as much across them as all ranks do, but its rings are shorter: it
// has as many nodes as there are groups, or fewer, so that neither ring is long.
inline std::vector<Sharing> list_groups(const PlanQuestion& q, const Config& p) {
    // Experts that are shared out have groups of their own.
    std::vector<Sharing> all = {{p.zero_group, p.hpz}};
    bool open = !was_given(q.config, "zero-group") && !keeps_weights_near(q.config) && p.zero > 0;
    if (!open || p.ep > 1 || has_whole_experts(p))
        return all;
    Layout layout = choose_grid(p, q.shape);
    int near = axis_in_node(layout, q.machine, &Layout::cp) *
               axis_in_node(layout, q.machine, &Layout::dp);
    int ranks = p.dp * p.cp;
    if (near == 1 || near >= ranks || ranks % near)
        return all;
    all.push_back({near, 0});
    if (p.zero < 3 || was_given(q.config, "hpz"))
        return all;
    all.push_back({0, near});

    // Take a power of two of nodes.
    int nodes = 1;
    while (4 * nodes * nodes * near <= ranks && ranks % (2 * nodes * near) == 0)
        nodes *= 2;
    if (nodes > 1) all.push_back({0, nodes * near});
    return all;
}

// A way to make room that the user leaves open: smaller masters, and rows of OFFLOAD_TABLE that
// leave the device, a bit each.
struct Saving {
    bool remainder = false;
    unsigned offload = 0;
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

template <typename T, typename S>
std::vector<Saving> savings_of(const PlanQuestion& q, S) {
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
        if (shrink && !moves_row(offload, OPTIMIZER))
            savings.push_back({true, offload});
    }
    return savings;
}

// ----------------------------------------------------------------------------
// 2. bound

// A leaf of the search: the flags that a candidate has beyond its grid and schedule.
struct Leaf {
    int zero = 0;
    Sharing sharing = {};
    int level = 0; // of recomputation
    Saving saving = {};
};

// Give a grid and schedule a leaf's flags.
inline Config with_leaf(Config c, const Leaf& leaf) {
    c.zero = leaf.zero;
    c.zero_group = leaf.sharing.zero_group;
    c.hpz = leaf.sharing.hpz;
    c.recompute = recompute_name(Recompute(leaf.level));
    if (leaf.saving.remainder) c.masters = "remainder";
    if (leaf.saving.offload)
        c.offload = offload_words(leaf.saving.offload);
    return c;
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
    std::set<std::array<size_t, 7>> seen = {}; // leaner candidates, by schedule and leaf
    size_t listed = 0;               // how many were bounded
    Config leanest = {};             // the one that takes the fewest bytes
    double least = INFINITY;         // its bytes
    std::string why = "";            // why the first refused grid was refused
};

// Return the least that a configuration takes, with what runs before its step.
template <typename T, typename S>
Bound bound_of(Search<T, S>& s, const Config& c) {
    const PlanQuestion& q = s.q;
    Layout grid = choose_grid(c, q.shape);
    Plan p = {train_options(c), grid, {}};
    p.layout = with_tiers(p.layout, p.offload);
    split_stages(s.prices, p.layout);
    Bound bound = bound_of_plan(s.prices, p);

    // A teacher has weights and room of its own.
    size_t i = 0;
    for (const BeforeStep& before : before_steps(c, p, q.shape, q.teacher)) {
        CostModel cost = {q.machine, sizeof(T)};
        if (i == s.before.size()) {
            Shape shape = with_logits(before.shape, s.where);
            s.before.push_back({shape, cost, s.where});
        }
        Plan one = {before.options, before_layout(before, p.layout), {}};
        if (before.teacher)
            one.layout = with_tiers(one.layout, {});
        Prices<T, S>& prices = s.before[i++];
        split_stages(prices, one.layout);
        Bound evaluation = bound_of_plan(prices, one);
        bound.seconds += before.times * evaluation.seconds;
        if (before.teacher) bound.bytes += evaluation.bytes;
    }
    return bound;
}

// Put a candidate into the queue, if it is allowed and new.
template <typename T, typename S>
void push_candidate(Search<T, S>& s, size_t schedule, const Leaf& leaf) {
    // Weights that stay near do not leave.
    Config c = with_leaf(s.schedules[schedule], leaf);
    bool clash = keeps_weights_near(c) && moves_row(leaf.saving.offload, WEIGHTS);
    bool other = s.q.named && !has_named(s.q.config, c);
    if (clash || other) return;
    Bound bound = bound_of(s, c);
    s.queue.push({bound.seconds, s.listed++, schedule, leaf, bound});
    if (bound.bytes >= s.least) return;
    s.least = bound.bytes;
    s.leanest = c;
}

// List all grids and schedules, and put each ZeRO stage and group into the queue. Where activations
// leave by the user's flag, what is computed again need not move: then each level, too.
template <typename T, typename S>
Search<T, S> search_layouts(const PlanQuestion& q, S where) {
    CostModel cost = {q.machine, sizeof(T)};
    cost.teacher_C = double(q.teacher.C);
    Shape shape = with_logits(q.shape, where);
    Search<T, S> s = {q, where, {shape, cost, where}};
    s.savings = savings_of<T>(q, where);
    for (const Config& grid : list_grids(q, &s.why)) {
        std::vector<Config> variants = list_variants(q, grid);
        for (Config c : list_schedules(q, grid))
            for (const Config& variant : variants) {
                c.cp_method = variant.cp_method;
                c.grid_order = variant.grid_order;
                s.schedules.push_back(c);
            }
    }

    bool named = q.named && was_given(q.config, "recompute");
    int levels = named || offloads(q.config, "activations") ? RECOMPUTE_LEVELS : 1;
    for (size_t i = 0; i < s.schedules.size(); i++) {
        Config c = s.schedules[i];
        bool shares = c.dp * c.cp > 1 || routing_ranks(c) > c.ep; // experts, at least
        int last = shares ? 3 : 0;
        for (int zero = c.zero; zero <= last; zero++) {
            c.zero = zero;
            for (Sharing sharing : list_groups(q, c))
                for (int level = 0; level < levels; level++)
                    push_candidate(s, i, {zero, sharing, level});
        }
    }
    return s;
}

// ----------------------------------------------------------------------------
// 3. search

// Put what is leaner than a candidate that does not fit into the queue: the next level of
// recomputation, smaller masters, one more row that leaves the device.
template <typename T, typename S>
void push_leaner(Search<T, S>& s, const BoundedLayout& from) {
    auto push = [&](Leaf leaf) {
        const Sharing& groups = leaf.sharing;
        const Saving& x = leaf.saving;
        std::array<size_t, 7> name = {from.schedule,
                                      size_t(leaf.zero),
                                      size_t(groups.zero_group), size_t(groups.hpz),
                                      size_t(leaf.level),
                                      x.remainder, x.offload};
        if (s.seen.insert(name).second)
            push_candidate(s, from.schedule, leaf);
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
        unsigned added = x.offload & ~now.offload;
        bool leave = moves_row(added, ACTIVATIONS) && !named;
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
    auto rank = [](const Trial& t) {
        return std::pair(techniques(t.config), t.bytes);
    };
    for (size_t i = 1; i < best.size(); i++) {
        if (best[i].seconds > TIE * best[0].seconds) break;
        if (rank(best[i]) < rank(best[chosen]))
            chosen = i;
    }
    return chosen;
}

// Layouts whose bounds are too low by about as much: near relatives, and distant ones.
inline std::string distant_family(const Config& c) {
    return concat(c.pp > 1, " ", c.pipeline, " ", c.zero >= 2, " ", c.offload);
}
inline std::string near_family(const Config& c) {
    return concat(distant_family(c), " ",
                  c.tp, " ", c.pp, " ", c.cp, " ", c.ep, " ", c.etp, " ",
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
        if (!fresh)
            known->second = std::min(known->second, ratio);
    }
    double raised(const Config& c, double bound) const {
        auto near = low.find(near_family(c));
        if (near != low.end()) return bound * near->second;
        auto distant = low.find(distant_family(c));
        double ratio = distant == low.end() ? 1 : (1 + distant->second) / 2;
        return bound * ratio;
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
        const Trial& placed = evaluate<T>(q, c, Depth::PLACED, s.where, x.bound.fullest);
        if (!placed.wrong.empty()) return false;
        trials.work += actions / 4;
        hope = has_room(q, placed);
    }
    if (!hope) {
        push_leaner(s, x);
        return false;
    }

    // Simulate it. What moves takes more actions.
    const Trial& t = evaluate<T>(q, c, Depth::TIMED, s.where);
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
template <typename T, typename S>
Trials try_candidates(Search<T, S>& s) {
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
        Config c = with_leaf(s.schedules[x.schedule], x.leaf);
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
    std::ranges::stable_sort(simple, {}, &std::pair<int, BoundedLayout>::first);
    for (size_t i = 0; i < simple.size() && i < 4; i++) {
        const BoundedLayout& x = simple[i].second;
        Config c = with_leaf(s.schedules[x.schedule], x.leaf);
        try_candidate(s, x, c, trials);
    }
    return trials;
}

// ----------------------------------------------------------------------------
// 4. choose

// Search, and choose.
template <typename T, typename S>
Answer answer_question(const PlanQuestion& q, S where) {
    q.known->clear(); // the question may be another one than before
    Search<T, S> s = search_layouts<T>(q, where);
    Trials trials = try_candidates(s);
    Answer a = {{}, 0, s.listed, trials.all.size(), s.leanest, s.why};

    // The leanest is the last resort.
    if (trials.all.empty() && s.listed > 0) {
        const Trial& t = evaluate<T>(q, s.leanest, Depth::TIMED, where);
        bool fits = t.wrong.empty() && has_room(q, t);
        if (fits) trials.all.push_back(t);
    }

    // Show the fastest that fit. The last place is for a simpler one that ties with the first.
    std::ranges::stable_sort(trials.all, {}, &Trial::seconds);
    int simplest = INT_MAX;
    for (const Trial& trial : trials.all) {
        bool full = a.best.size() == SHOWN;
        int needs = techniques(trial.config);
        if (full && trial.seconds > TIE * a.best[0].seconds)
            break;
        if (full && needs >= simplest) continue;
        const Trial& t = evaluate<T>(q, trial.config, Depth::SURE, where);
        if (!has_room(q, t)) continue;
        if (full) a.best.pop_back();
        a.best.push_back(t);
        simplest = std::min(simplest, needs);
    }
    a.chosen = choose_trial(a.best);
    return a;
}

} // namespace llmc
