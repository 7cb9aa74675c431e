// plan_search.h - every layout that is allowed, and the best few of them simulated and placed
//   1. LIST      every grid of the ranks, its schedules, micro-batches, ZeRO stages and levels of
//                recomputation. config_check() decides what is allowed, so no rule is written
//                twice. Rules that shorten the list: tensor parallelism stays inside a node; ZeRO
//                shares out a bucket among all ranks or those of a node, or its weights among
//                these or those of several nodes; data-parallel ranks come next to tensor-parallel
//                ones where that is faster by the links; and the method of context parallelism is
//                the fastest for a block.
//                The global batch and the sequence length stay as the user gave them, and so does
//                every flag that the planner does not choose
//   2. ESTIMATE  time and memory of each, in closed form (planner.h)
//   3. SIMULATE  the best few, as the plans that would run, and place them in memory (trial.h)
//   4. CHOOSE    times within 2% of the fastest are a tie: the fewest techniques win, then the
//                least memory
//   All ranks compute the same numbers, and so choose the same layout.
#pragma once
#include "../action.h"
#include "../head.h"
#include "../io/config.h"
#include "../io/config_check.h"
#include "../io/config_notes.h"
#include "../io/machine.h"
#include "../io/plan_flags.h"
#include "../layout.h"
#include "../model.h"
#include "../ops/small_states.cuh"
#include "../pipeline.h"
#include "before_step.h"
#include "layer_cost.h"
#include "layer_estimates.h"
#include "links.h"
#include "planner.h"
#include "proposal.h"
#include "trial.h"

namespace llmc {

// The proposal of one rank, with what the flags say beyond it.
inline Proposal plain_proposal(const PlanQuestion& q) {
    Proposal p;
    p.cp_method = q.config.cp_method;
    p.order = q.config.grid_order;
    p.zero_group = q.config.zero_group;
    p.etp = q.config.etp;

    // Weights that stay near are cut in ZeRO-3 alone.
    p.hpz = q.config.hpz;
    p.zero = keeps_weights_near(q.config) ? 3 : 0;
    return p;
}

// ----------------------------------------------------------------------------
// 1. list

// The divisors of n, in ascending order.
inline std::vector<int> divisors_of(int n) {
    // Include 1 and n itself.
    std::vector<int> all;
    for (int d = 1; d <= n; d++)
        if (n % d == 0) all.push_back(d);
    return all;
}

// Check a proposal by the ordinary check of the command line: "" or why it is refused.
inline std::string refuse_proposal(const PlanQuestion& q, const Proposal& p) {
    // Give the check a copy, because it fills in what flags leave out.
    Config c = q.config;
    set_proposal(c, p);
    std::string wrong = check_with_teacher(c, q.shape, q.teacher);
    return wrong.empty() ? refuse_idle_offload(c) : wrong;
}

// The values of --etp to try: tp ranks cut all experts or none. A user's flag leaves no choice.
inline std::vector<int> etp_choices(const PlanQuestion& q, int tp) {
    bool open = q.shape.E && tp > 1 && !was_given(q.config, "etp");
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

// The allowed grids of q.gpus ranks, each as a proposal without other techniques.
// why: receives the first refusal.
inline std::vector<Proposal> list_grids(const PlanQuestion& q, std::string* why) {
    std::vector<Proposal> grids;
    std::vector<int> divisors = divisors_of(q.gpus), one = {1};
    auto ask = [&](const Proposal& p) {
        std::string wrong = refuse_proposal(q, p);
        if (wrong.empty()) grids.push_back(p);
        if (!wrong.empty() && why->empty()) *why = wrong;
    };

    // Keep tensor parallelism inside a node: its messages are on the critical path.
    for (int tp : divisors)
        for (int pp : divisors)
            for (int cp : divisors) {
                int64_t each = int64_t(tp) * pp * cp;
                if (!nodes_hold(q.machine, q.gpus, tp) || q.gpus % each)
                    continue;
                Proposal p = plain_proposal(q);
                p.tp = tp;
                p.pp = pp;
                p.cp = cp;
                p.dp = q.gpus / tp / pp / cp; // what is left

                // Distribute experts over ranks that see different tokens: those of dp and cp, and
                // of tp where experts are whole, which wants sequence parallelism.
                for (int etp : etp_choices(q, tp))
                    for (int ep : q.shape.E ? divisors : one) {
                        p.etp = etp;
                        p.ep = ep;
                        p.sequence_parallel = p.whole_experts();
                        if (p.routing_ranks() % ep == 0) ask(p);
                    }
            }
    return grids;
}

// Rows (tokens) of a rank's micro-batch beyond which products get no faster, while activations take
// ever more memory.
constexpr int64_t FULL_ROWS = 65536;

// The allowed schedules and micro-batches of a grid.
inline std::vector<Proposal> list_schedules(const PlanQuestion& q, const Proposal& grid) {
    // List micro-batches that divide a rank's part of the global batch, and numbers of chunks.
    std::vector<Proposal> all;
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
    // Zero-bubble with chunks is left out because the closed form counts neither the stages that
    // live there nor the bubble.
    for (int B : sizes)
        for (int v : chunks)
            for (bool sequence_parallel : {false, true})
                for (Pipeline pipeline : {Pipeline::ONE_F_ONE_B, Pipeline::INTERLEAVED,
                                          Pipeline::ZERO_BUBBLE}) {
                    bool idle = (grid.pp == 1 && pipeline != Pipeline::ONE_F_ONE_B) ||
                                (grid.tp == 1 && sequence_parallel);
                    if (idle || (pipeline == Pipeline::INTERLEAVED) != (v > 1))
                        continue;
                    Proposal p = grid;
                    p.B = B;
                    p.chunks = v;
                    p.pipeline = pipeline;
                    p.sequence_parallel = sequence_parallel;
                    if (refuse_proposal(q, p).empty()) all.push_back(p);
                }
    return all;
}

// ----------------------------------------------------------------------------
// 2. estimate

// The layouts that a search has found.
struct Search {
    std::vector<Proposal> proposals; // those that may fit, the fastest first
    std::vector<Proposal> larger;    // those that would fit in half as much room again
    size_t listed = 0;               // how many are allowed
    Proposal leanest;                // the one that takes the fewest bytes
    std::string why;                 // why the first refused one was refused
};

// Times within this factor of the fastest are a tie.
constexpr double TIE = 1.02;

// Whether a proposal fits beyond the error of its estimate.
inline bool surely_fits(const PlanQuestion& q, const Proposal& p) {
    const Estimate& e = p.estimate;
    bool sure = e.least() < 0.9 * q.room;
    bool fits = e.bytes < q.room;
    return sure && fits && e.host <= q.host_room;
}

// Whether a proposal need not be placed before it is simulated: its estimates leave more than their
// errors of the room, an eighth, and of the host's, 15%. test_planner holds them to that.
inline bool need_not_place(const PlanQuestion& q, const Proposal& p) {
    const Estimate& e = p.estimate;
    return e.bytes < 0.88 * q.room && e.host < 0.85 * q.host_room;
}

// Whether one layout is faster than another, by their estimates.
inline bool faster(const Proposal& x, const Proposal& y) {
    return x.estimate.seconds < y.estimate.seconds;
}

// An order of the grid, and its axes from the nearest on.
struct GridOrder {
    std::string name;
    std::array<Axis Layout::*, 4> axes;
};

// The orders of the grid that links can tell apart: the user's; and without one, with a node's
// other ranks along dp instead of pp. Tensor parallelism stays nearest in both.
inline std::vector<GridOrder> orders_of(const PlanQuestion& q, const Proposal& p) {
    std::vector<GridOrder> orders = {{p.order, layout_order(p.order)}};
    bool near = p.tp * p.cp < q.machine.cards;
    bool differs = p.pp > 1 && p.dp > 1 && near && !was_given(q.config, "grid-order");
    if (differs) orders.push_back({"tp-dp-pp", layout_order("tp-dp-pp")});
    return orders;
}

// The estimates of many layouts: the prices that they share, and the plan without actions that asks
// for them. Each number of stages is split once, and each pipeline's ranks are told apart once.
template <typename T, typename S> struct Estimator {
    const PlanQuestion& q;
    Planner<T, S> planner;
    PlanOptions asked; // by the user, of one rank
    Plan plan;
    std::map<int, std::vector<int>> stages = {}; // [number of stages]: the first layer of each
    std::map<std::pair<int, int>, std::vector<AlikeRanks>> pipelines = {}; // [pp, chunks]
    // Prices of what runs before a step, each run's and last a rollout's whole plan; the flags with
    // the proposal's axes, on which they depend; and a teacher's stages.
    Config config = q.config;
    std::vector<Planner<T, S>> before = {};
    std::map<int, std::vector<int>> before_stages = {};

    // The proposal that the plan has: its ranks, and the orders of its grid.
    const std::vector<AlikeRanks>* ranks = nullptr;
    std::vector<GridOrder> orders = {};
};

// List what runs before the plan's step, and last a rollout's whole plan: its runs are parts of it,
// and it has room for the longest texts.
template <typename T, typename S> std::vector<BeforeStep> before_of(const Estimator<T, S>& e) {
    std::vector<BeforeStep> all = before_steps(e.config, e.plan, e.q.shape, e.q.teacher);
    if (has_rollouts(e.config))
        all.push_back({e.q.shape, rollout_options(e.config, e.plan), false, 0});
    return all;
}

// Estimate these runs.
template <typename T, typename S> BeforeEstimate estimate_before(Estimator<T, S>& e) {
    if (e.before.empty()) return {};
    std::vector<double> none(size_t(e.plan.layout.pp.size), 0.0);
    BeforeEstimate sum = {0, none, none};
    size_t i = 0;
    for (const BeforeStep& before : before_of(e)) {
        Plan p = {before.options, before_layout(before, e.plan.layout), {}};
        if (before.teacher) {
            // Split each number of stages once.
            int count = p.layout.stages();
            auto [stages, fresh] = e.before_stages.try_emplace(count);
            if (fresh && count > 1) stages->second = choose_stages(before.shape, count);
            p.layout = with_tiers(p.layout, {});
            p.layout.first_layer = stages->second;
        }
        EvaluationEstimate one = estimate_evaluation(e.before[i++], p);
        sum.seconds += before.times * one.seconds;

        // A teacher has weights and room of its own; the step's own model has all but a cache.
        for (size_t rank = 0; rank < none.size(); rank++) {
            double passing = one.passing[rank];
            double beside = before.teacher ? one.weights[rank] + passing : one.cache[rank];
            sum.beside[rank] = std::max(sum.beside[rank], beside);
            if (!before.teacher) sum.instead[rank] = std::max(sum.instead[rank], passing);
        }

        // A teacher keeps the output of its last norm for the student's head, on that rank.
        double norms = double(p.micro_batches) * double(p.rows() * before.shape.C * sizeof(T));
        if (before.teacher) sum.beside.back() += norms;
    }
    return sum;
}

// Change the plan to a proposal's, but for its ZeRO stage, group, order and recomputation.
template <typename T, typename S> void set_estimated(Estimator<T, S>& e, const Proposal& p) {
    // Set the axes.
    const Config& c = e.q.config;
    Layout& layout = e.plan.layout;
    e.config.dp = layout.dp.size = p.dp;
    layout.tp.size = p.tp;
    layout.pp.size = p.pp;
    layout.cp.size = p.cp;
    e.config.ep = layout.ep = p.ep;
    layout.whole_experts = p.whole_experts();
    layout.ep_exchange = p.ep > 1 && c.ep_method == "exchange";
    ContextChoice context;
    read_context_method(p.cp_method, &context);
    layout.cp_method = context.method;
    layout.cp_heads = context.heads;

    // Set the schedule, the stages and the micro-batches.
    layout.chunks = p.chunks;
    layout.pipeline = p.pipeline;
    layout.sequence_parallel = p.sequence_parallel;
    int count = layout.stages();
    if (!e.stages.count(count))
        e.stages[count] = count > 1 ? choose_stages(e.q.shape, count) : std::vector<int>();
    layout.first_layer = e.stages[count];
    auto [ranks, fresh] = e.pipelines.try_emplace({p.pp, p.chunks});
    const Model& model = model_of(e.planner, layout);
    if (fresh) ranks->second = alike_ranks(layout, model, e.planner.kinds);
    e.ranks = &ranks->second;
    e.orders = orders_of(e.q, p);
    e.plan.B = size_t(p.B);
    e.plan.micro_batches = int(c.batch_tokens / (int64_t(p.B) * c.seq * p.dp));
}

// Which ranks share out a bucket: those of the user's flags, or else all; those of a node
// (--zero-group); or those of one node, or of several, its weights, and all ranks the rest (--hpz).
enum class Sharing { ASKED, NODE, NEAR, NEAR_NODES };

// The data-parallel ranks of a node, if ZeRO may share out each bucket among these alone, or its
// weights: where there are several nodes, and no flag says otherwise; else 0. A group of several
// nodes sends as much across them as all ranks do, but its rings are shorter: it has as many nodes
// as there are groups, or fewer, so that neither ring is long.
inline int node_group(const PlanQuestion& q, const Proposal& p, const Layout& layout,
                      Sharing sharing) {
    // Look at what the flags leave open. Experts that are shared out have groups of their own.
    const Config& c = q.config;
    bool open = !was_given(c, "zero-group") && !keeps_weights_near(c) && p.zero > 0;
    if (sharing >= Sharing::NEAR)
        open &= !was_given(c, "hpz") && p.zero == 3 && !offloads(c, "weights");
    if (!open || p.ep > 1 || p.whole_experts())
        return 0;

    // Look at the nodes.
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

// The methods of context parallelism that a grid allows, or the user's.
inline std::vector<std::string> context_methods(const PlanQuestion& q, Proposal grid) {
    if (grid.cp == 1 || was_given(q.config, "cp-method"))
        return {grid.cp_method};
    std::vector<std::string> methods;
    for (const char* name : {"gather", "ulysses", "ring"}) {
        grid.cp_method = name;
        if (refuse_proposal(q, grid).empty()) methods.push_back(name);
    }
    return methods;
}

// Change the plan to a proposal's with the method by which its layers take least time, of one that
// recomputes nothing. Messages for each sequence and those for all weigh differently in short and
// long ones, and so in micro-batches of few and many.
template <typename T, typename S>
void choose_method(Estimator<T, S>& e, Proposal& p, const std::vector<std::string>& methods) {
    double least = INFINITY;
    std::string best = methods[0];
    for (const std::string& name : methods) {
        if (methods.size() == 1) break;
        p.cp_method = name;
        set_estimated(e, p);

        // Sum over all layers: windows differ.
        e.plan.layout.order = layout_order(p.order);
        e.plan.recompute = Recompute::NONE;
        double seconds = 0;
        for (size_t kind : e.planner.kinds.of)
            seconds += layers_of(e.planner, e.plan)[kind].seconds();
        if (seconds >= least) continue;
        least = seconds;
        best = name;
    }
    p.cp_method = best;
    set_estimated(e, p);
}

// Estimate the plan's proposal in the faster order of its grid. Where ZeRO has no such groups as
// `sharing` wants, the estimate is infinite.
template <typename T, typename S>
void estimate_orders(Estimator<T, S>& e, Proposal& p, Sharing sharing) {
    Layout& layout = e.plan.layout;
    e.plan.masters = p.remainder ? Masters::REMAINDER : e.asked.masters;
    Tier away = e.q.config.offload_to == "cpu" ? Tier::HOST : Tier::DISK;
    e.plan.offload = e.asked.offload;
    for (int row = 0; row < OFFLOAD_ROWS; row++)
        if (moves_row(p.offload, row)) e.plan.offload.*OFFLOAD_TABLE[row].tier = away;
    layout.weights_away = e.plan.offload.weights != Tier::DEVICE;
    layout.gradients_away = e.plan.offload.gradients != Tier::DEVICE;
    p.estimate.seconds = INFINITY;
    for (const GridOrder& order : e.orders) {
        // A set that makes room is tried in the order that is faster without it.
        bool makes_room = p.remainder || p.offload;
        if (makes_room && order.name != p.order)
            continue;
        layout.order = order.axes;
        int zero_group = p.zero_group;
        int hpz = p.hpz;
        if (sharing != Sharing::ASKED) {
            int group = node_group(e.q, p, layout, sharing);
            if (group == 0) continue;
            (sharing == Sharing::NODE ? zero_group : hpz) = group;
        }
        layout.weights_near = hpz > 1;
        layout.zero_group = layout.weights_near ? hpz : zero_group;

        // Keep the faster one.
        Estimate estimate = estimate_layout(e.planner, e.plan, *e.ranks, estimate_before(e));
        if (estimate.seconds >= p.estimate.seconds)
            continue;
        p.estimate = estimate;
        p.order = order.name;
        p.zero_group = zero_group;
        p.hpz = hpz;
    }
}

// A way to make room that the user leaves open, as Proposal has it.
struct Saving {
    bool remainder;
    unsigned offload;
};
template <typename T, typename S> std::vector<Saving> savings_of(const PlanQuestion& q, S) {
    // Remainders keep every master's bits, so nothing but rounding at ties tells them apart. What
    // the user says of masters holds.
    std::vector<Saving> savings;
    Config c = q.config;
    c.masters = "remainder";
    bool theirs = was_given(q.config, "masters") || q.config.masters != "float";
    bool shrink = !theirs && check_masters(c).empty();
    if (shrink) savings.push_back({true, 0});

    // The host's memory is another one, unless the CPU runs the step. No bit depends on where
    // anything lies, so try all sets, each behind those that it contains.
    bool apart = sizes_of_gpu || !std::is_same_v<S, Cpu>;
    if (was_given(q.config, "offload") || !apart)
        return savings;
    for (unsigned offload = 1; offload < 1u << OFFLOAD_ROWS; offload++) {
        c = q.config;
        c.offload = offload_words(offload);
        bool works = refuse_idle_offload(c).empty() && refuse_graphs(c).empty();
        if (!works || !check_policies(c).empty())
            continue;
        savings.push_back({false, offload});

        // Masters that stay may shrink beside what leaves.
        if (shrink && !moves_row(offload, OPTIMIZER)) savings.push_back({true, offload});
    }
    return savings;
}

// The most bytes that a saving can free of an estimate's fullest rank; 0: a part of it would free
// next to nothing.
inline double most_saved(const Estimate& e, const Saving& saving, double room) {
    double sum = saving.remainder ? e.movable.masters / 2 : 0;
    if (saving.remainder && sum < 0.02 * room) return 0;
    for (int row = 0; row < OFFLOAD_ROWS; row++) {
        if (!moves_row(saving.offload, row)) continue;
        if (e.movable.of[row] < 0.04 * room)
            return 0;
        sum += e.movable.of[row];
    }
    return sum;
}

// Estimate the plan's proposal with what makes room, where it may decide whether the layout fits.
// A set is left out if a part of it surely makes the layout fit. keep() the fastest, to the first
// that surely fits and those that tie with it.
template <typename T, typename S, typename Keep>
void make_room(Estimator<T, S>& e, const Proposal& p, Sharing sharing,
               const std::vector<Saving>& savings, Keep keep) {
    std::vector<unsigned> enough; // sets by which it surely fits
    std::vector<Proposal> all;
    double room = e.q.room;
    for (const Saving& saving : savings) {
        // Skip what frees too little, and what moves more than it must.
        double saved = most_saved(p.estimate, saving, room);
        bool decides = saved > 0 && p.estimate.bytes - saved < 1.1 * room;
        auto contained = [&](unsigned set) { return (set & saving.offload) == set; };
        bool refused = p.hpz > 1 && moves_row(saving.offload, WEIGHTS); // they stay near
        bool idle = !decides || std::any_of(enough.begin(), enough.end(), contained);
        if (idle || refused) continue;

        Proposal& smaller = all.emplace_back(p);
        smaller.remainder = saving.remainder;
        smaller.offload = saving.offload;
        estimate_orders(e, smaller, sharing);
        if (surely_fits(e.q, smaller)) enough.push_back(saving.offload);
    }

    // Keep none that is slower than it must be.
    std::stable_sort(all.begin(), all.end(), faster);
    double most = INFINITY; // seconds
    for (const Proposal& x : all) {
        if (x.estimate.seconds > most) break;
        if (most == INFINITY && surely_fits(e.q, x)) most = TIE * x.estimate.seconds;
        keep(x);
    }
}

// A layout that takes so many times the fastest one's seconds is not tried with less memory.
constexpr double HOPELESS = 1.2;

// How much of the room an estimate may take that is placed all the same. It may be a tenth too
// high, or much more where gradients come and go between data of unlike sizes (test_planner).
inline double may_fit(const Proposal& p) { return moves_row(p.offload, GRADIENTS) ? 1.7 : 1.1; }

// Estimate every allowed layout. Layouts that surely do not fit are counted and dropped, and those
// near the limit stay until they are placed.
template <typename T, typename S>
Search search_layouts(const PlanQuestion& q, S where) {
    // Begin with the plainest layout, which the others change field by field.
    Search s;
    s.leanest.estimate.bytes = INFINITY;
    Config one = q.config; // the plainest: one rank
    Proposal plain = plain_proposal(q);
    set_proposal(one, plain);
    PlanOptions asked = plans_of(one, q.shape)[0];
    Plan plan = {asked, choose_layout(one, q.shape), {}};
    CostModel cost = {q.machine, sizeof(T)};
    cost.teacher_C = double(q.teacher.C);
    Planner<T, S> planner = {with_logits(q.shape, where), cost, where};
    Estimator<T, S> e = {q, planner, asked, plan};
    for (const BeforeStep& before : before_of(e))
        e.before.push_back({with_logits(before.shape, where), cost, where});
    std::vector<Saving> savings = savings_of<T>(q, where);
    bool leave = offloads(q.config, "activations");

    // Keep a proposal with its estimate, or drop it.
    double fastest = INFINITY; // seconds of one that surely fits
    auto keep = [&](const Proposal& p) {
        s.listed++;
        if (p.estimate.bytes < s.leanest.estimate.bytes) s.leanest = p;
        if (p.estimate.host > q.host_room) return;
        if (surely_fits(q, p)) fastest = std::min(fastest, p.estimate.seconds);
        if (p.estimate.least() < may_fit(p) * q.room) s.proposals.push_back(p);
        else if (p.estimate.least() < 1.5 * q.room) s.larger.push_back(p);
    };

    // Estimate each with all ZeRO stages, groups and levels of recomputation. These are not checked
    // here: simulate_proposal() checks the best few again.
    for (const Proposal& grid : list_grids(q, &s.why)) {
        std::vector<std::string> methods = context_methods(q, grid);
        for (Proposal p : list_schedules(q, grid)) {
            choose_method(e, p, methods);
            bool shares = p.dp * p.cp > 1 || p.routing_ranks() > p.ep; // experts, at least
            int last_zero = shares ? 3 : 0;
            for (p.zero = grid.zero; p.zero <= last_zero; p.zero++)
                for (Sharing sharing : {Sharing::ASKED, Sharing::NODE, Sharing::NEAR,
                                        Sharing::NEAR_NODES})
                    for (int level = 0; level < RECOMPUTE_LEVELS; level++) {
                        Proposal x = p;
                        e.plan.layout.zero = p.zero;
                        e.plan.recompute = x.recompute = Recompute(level);
                        if (q.named && !has_named(q.config, x))
                            continue;
                        estimate_orders(e, x, sharing);
                        if (x.estimate.seconds == INFINITY)
                            break;
                        keep(x);
                        // If a layout surely fits without recomputation, skip the other levels.
                        // Neither they nor moves take time off a step that is far from the fastest,
                        // unless activations leave: what is recomputed need not move.
                        bool sure = surely_fits(q, x);
                        bool slow = x.estimate.seconds > HOPELESS * fastest;
                        if (!leave && (slow || (level == 0 && sure)))
                            break;
                        if (!sure) make_room(e, x, sharing, savings, keep);
                    }
        }
    }

    // Sort by time. The sort is stable, so that all ranks have the same order.
    std::stable_sort(s.proposals.begin(), s.proposals.end(), faster);
    return s;
}

// ----------------------------------------------------------------------------
// 3. and 4. simulate the best few, and choose

// The answer: the best trials, and which one is chosen.
struct Answer {
    Search search;
    std::vector<Trial> best;          // those that fit, the fastest first
    std::vector<Proposal> larger;     // those that do not, the fastest first by their estimates
    size_t chosen = 0, simulated = 0; // the index in `best`; how many were simulated
};

// Limits of the search: trials in all, trials of one grid, placings, and trials printed. Trials of
// many stages take longest, so simulated actions have a limit too, once there are three trials.
constexpr size_t MOST_TRIALS = 64, MOST_OF_GRID = 8, MOST_PLACED = 100, SHOWN = 6;
constexpr double MOST_ACTIONS = 3e5;
// A proposal whose estimate exceeds the time of the last trial shown by this factor is not tried:
// the closed form overestimates by less, as test_planner checks.
constexpr double SURELY_SLOWER = 1.25;

// Choose among trials that fit, the fastest first: of those that tie with it, the one with the
// fewest techniques, then the least memory. Returns its index.
inline size_t choose_trial(const std::vector<Trial>& best) {
    // Begin with the fastest.
    size_t chosen = 0;
    for (size_t i = 1; i < best.size() && best[i].seconds <= TIE * best[0].seconds; i++) {
        auto rank = [](const Trial& t) { return std::pair(t.proposal.techniques(), t.bytes); };
        if (rank(best[i]) < rank(best[chosen])) chosen = i;
    }
    return chosen;
}

// Simulate the best few proposals, and choose. A grid has many variants of about the same time, so
// each grid gets a limited number of trials. A proposal that may not fit is placed before it is
// simulated, so that it takes no trial from another.
template <typename T, typename S>
Answer answer_question(const PlanQuestion& q, S where) {
    // Estimate all layouts, and count what the limits bound.
    Answer a;
    a.search = search_layouts<T>(q, where);
    std::map<std::array<int, 5>, size_t> of_grid;
    std::vector<Trial> trials;
    size_t placed = 0;
    double actions = 0;
    std::set<double> times;      // of the trials
    std::set<std::string> tried; // proposals as text

    // A proposal is too slow if its estimate is surely beyond the last trial that would be shown.
    auto too_slow = [&](const Proposal& p) {
        return times.size() >= SHOWN &&
               p.estimate.seconds > SURELY_SLOWER * *std::next(times.begin(), SHOWN - 1);
    };

    // Make a proposal a trial; false: it was tried before, does not fit, or is refused.
    auto try_proposal = [&](const Proposal& p) {
        if (!tried.insert(proposal_text(p)).second)
            return false;
        Trial t = {p};
        bool sure = need_not_place(q, p);
        placed += !sure;
        if (!sure && !fits<T>(q, t, where)) {
            a.larger.push_back(p);
            return false;
        }

        // Take the simulator's time from here on.
        Trial simulated = simulate_proposal<T>(q, p, where);
        a.simulated++;
        double moves = p.offload ? 10 : 1; // what moves takes more actions
        actions += moves * rehearsal_actions(q, p);
        if (!simulated.wrong.empty()) return false;
        simulated.bytes = t.bytes;
        simulated.memory = t.memory;
        simulated.host = t.host;
        trials.push_back(simulated);
        times.insert(simulated.seconds);
        return true;
    };

    // Try the fastest by estimate.
    const std::vector<Proposal>& all = a.search.proposals;
    std::vector<Proposal> simple;
    for (const Proposal& p : all) {
        if (too_slow(p)) break;
        if (p.estimate.seconds < 1.05 * all[0].estimate.seconds) simple.push_back(p);
        size_t& count = of_grid[{p.tp, p.pp, p.cp, p.ep, p.etp}];
        bool sure = need_not_place(q, p);
        bool enough = trials.size() == MOST_TRIALS || (placed >= MOST_PLACED && !sure) ||
                      (trials.size() >= 3 && actions > MOST_ACTIONS);
        if (enough || count == MOST_OF_GRID) continue;
        count += try_proposal(p);
    }

    // Try also the four simplest of those that are about as fast: one of them may win a tie.
    std::stable_sort(simple.begin(), simple.end(), [](const Proposal& x, const Proposal& y) {
        return x.techniques() < y.techniques();
    });
    for (size_t i = 0; i < simple.size() && i < 4 && actions < MOST_ACTIONS; i++)
        try_proposal(simple[i]);

    // The leanest is the last resort.
    if (trials.empty() && a.search.listed > 0) try_proposal(a.search.leanest);

    // Show the fastest that fit. The last place is for a simpler one that ties with the first.
    std::stable_sort(trials.begin(), trials.end(),
                     [](const Trial& x, const Trial& y) { return x.seconds < y.seconds; });
    int simplest = INT_MAX;
    for (Trial& t : trials) {
        bool full = a.best.size() == SHOWN;
        int techniques = t.proposal.techniques();
        if (full && t.seconds > TIE * a.best[0].seconds)
            break;
        if (full && techniques >= simplest) continue;
        if (!fits_everywhere<T>(q, t, where)) {
            a.larger.push_back(t.proposal);
            continue;
        }
        if (full) a.best.pop_back();
        a.best.push_back(t);
        simplest = std::min(simplest, techniques);
    }
    a.chosen = choose_trial(a.best);

    // List what more memory would admit: what was placed and is too large, and what was not placed.
    a.larger.insert(a.larger.end(), a.search.larger.begin(), a.search.larger.end());
    std::stable_sort(a.larger.begin(), a.larger.end(), faster);
    return a;
}

} // namespace llmc
