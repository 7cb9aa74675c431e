// plan_search.h - every layout that is allowed, and the best few of them simulated and placed
//   1. LIST      every grid of the ranks, its schedules, micro-batches, ZeRO stages and levels of
//                recomputation. config_check() decides what is allowed, so no rule is written
//                twice. Rules that shorten the list: tensor parallelism stays inside a node; ZeRO
//                shares out a bucket among all ranks or those of a node, or its weights among
//                these or those of several nodes; data-parallel ranks come next to tensor-parallel
//                ones where that is faster by the links; and the method of context parallelism is
//                the fastest for a block.
//                The global batch, the sequence length and what the flags say of these stay as the
//                user gave them
//   2. ESTIMATE  time and memory of each, in closed form (planner.h)
//   3. SIMULATE  the best few, as the plans that would run (simulator.h), and place them in memory
//   4. CHOOSE    times within 2% of the fastest are a tie: the fewest techniques win, then the
//                least memory
//   All ranks compute the same numbers, and so choose the same layout.
#pragma once
#include <bit>
#include "../io/config_notes.h"
#include "../io/predict.h"
#include "../planner.h"
#include "before_step.h"
#include "limits.h"

namespace llmc {

// A layout that might run: the flags that --plan chooses.
struct Proposal {
    int dp = 1, tp = 1, pp = 1, cp = 1, ep = 1; // ranks along each axis
    // Pipeline stages of a rank, ZeRO's stage, sequences of a micro-batch.
    int chunks = 1, zero = 0, B = 1;
    int zero_group = 0, hpz = 0, etp = 0; // as the flags of these names have them
    bool sequence_parallel = false;
    std::string cp_method = "gather", order = "tp-pp-dp";
    Pipeline pipeline = Pipeline::ONE_F_ONE_B;
    Recompute recompute = Recompute::NONE;
    // To make room: --masters remainder, 2 bytes less for each master; and --offload, a bit for
    // each row of OFFLOAD_TABLE.
    bool remainder = false;
    unsigned offload = 0;
    Estimate estimate = {};

    // Whether tensor-parallel ranks cut no expert, and how many ranks route rows of their own.
    bool whole_experts() const { return etp == 1 && tp > 1; }
    int routing_ranks() const { return dp * cp * (whole_experts() ? tp : 1); }

    // How much a user has to know to run this layout. An axis counts ten, because it
    // brings messages of its own; any other technique counts one, a higher level of ZeRO
    // or of recomputation more.
    int techniques() const {
        int axes = (tp > 1) + (pp > 1) + (cp > 1) + (ep > 1);
        int orders = (order != "tp-pp-dp") + (cp_method != "gather");
        int groups = (zero_group > 0) + (hpz > 1) + whole_experts();
        return 10 * axes + zero + groups + orders + sequence_parallel + (chunks > 1) +
               (pipeline != Pipeline::ONE_F_ONE_B) + int(recompute) + remainder +
               std::popcount(offload);
    }
};

// Whether a row of OFFLOAD_TABLE is among those of a proposal.
inline bool moves_row(unsigned offload, int row) {
    return offload >> row & 1;
}

// The words of --offload for the rows of a proposal.
inline std::string offload_words(unsigned offload) {
    std::string words;
    for (int row = 0; row < OFFLOAD_ROWS; row++)
        if (moves_row(offload, row))
            words += concat(words.empty() ? "" : ",", OFFLOAD_TABLE[row].name);
    return words.empty() ? "none" : words;
}

// The name of a schedule, as --pipeline has it.
inline const char* pipeline_name(Pipeline p) {
    static const char* names[] = {"gpipe", "1f1b", "interleaved", "zero-bubble"};
    return names[int(p)];
}

// The flags of a proposal, as a shell takes them.
inline std::string proposal_text(const Proposal& p) {
    // Leave out defaults, except --dp and --micro-batch.
    std::string text = concat("--dp ", p.dp);
    auto add = [&](const char* flag, auto value, bool set) {
        if (set) text += concat(" --", flag, " ", value);
    };
    add("tp", p.tp, p.tp > 1);
    if (p.sequence_parallel) text += " --sequence-parallel";
    add("cp", p.cp, p.cp > 1);
    add("cp-method", p.cp_method, p.cp > 1 && p.cp_method != "gather");
    add("pp", p.pp, p.pp > 1);
    add("pipeline", pipeline_name(p.pipeline), p.pipeline != Pipeline::ONE_F_ONE_B);
    add("chunks", p.chunks, p.chunks > 1);
    add("ep", p.ep, p.ep > 1);
    add("etp", p.etp, p.etp > 0);

    add("zero", p.zero, p.zero > 0);
    add("zero-group", p.zero_group, p.zero > 0 && p.zero_group > 0);
    add("hpz", p.hpz, p.hpz > 0);
    add("grid-order", p.order, p.order != "tp-pp-dp");
    add("recompute", recompute_name(p.recompute), p.recompute != Recompute::NONE);
    add("masters", "remainder", p.remainder);
    add("offload", offload_words(p.offload), p.offload > 0);
    return text + concat(" --micro-batch ", p.B);
}

// Set a proposal's flags in a configuration.
inline void set_proposal(Config& c, const Proposal& p) {
    // Set the axes.
    c.dp = p.dp;
    c.tp = p.tp;
    c.pp = p.pp;
    c.cp = p.cp;
    c.ep = p.ep;
    c.etp = p.etp;
    c.cp_method = p.cp_method;
    c.grid_order = p.order;

    // Set the schedule, the ZeRO stage, the micro-batch and the recomputation.
    c.chunks = p.chunks;
    c.zero = p.zero;
    c.zero_group = p.zero_group;
    c.hpz = p.hpz;
    c.micro_batch = p.B;
    c.sequence_parallel = p.sequence_parallel;
    c.pipeline = pipeline_name(p.pipeline);
    c.recompute = recompute_name(p.recompute);
    if (p.remainder) c.masters = "remainder";
    if (p.offload) c.offload = offload_words(p.offload);
}

// The proposal that a configuration's flags make: the reverse of set_proposal().
inline Proposal proposal_of(const Config& c) {
    // Read the axes.
    Proposal p;
    p.dp = c.dp;
    p.tp = c.tp;
    p.pp = c.pp;
    p.cp = c.cp;
    p.ep = c.ep;
    p.etp = c.etp;
    p.cp_method = c.cp_method;
    p.order = c.grid_order;

    // Read the rest. --recompute auto counts as full.
    p.chunks = c.chunks;
    p.zero = c.zero;
    p.zero_group = c.zero_group;
    p.hpz = c.hpz;
    p.B = c.micro_batch;
    p.sequence_parallel = c.sequence_parallel;
    p.pipeline = choose_pipeline(c, micro_batches(c), nullptr);
    p.recompute = recompute_named(c.recompute);
    p.remainder = c.masters == "remainder";
    for (int row = 0; row < OFFLOAD_ROWS; row++)
        p.offload |= unsigned(offloads(c, OFFLOAD_TABLE[row].name)) << row;
    return p;
}

// The question: the flags, the model, the machine, how many ranks, and how much room each has.
struct PlanQuestion {
    Config config; // with a batch and a sequence length, and checked as by --explain
    Shape shape;
    Machine machine;
    Shape teacher = {}; // that --teacher names
    int gpus = 1;    // ranks
    double room = 0; // bytes that each rank may take
    double host_room = INFINITY; // and of the host's memory beside its GPU
    std::shared_ptr<KnownSteps> steps = std::make_shared<KnownSteps>(); // of all trials
};

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
    bool open = q.shape.E && tp > 1 && !given(q.config, "etp");
    if (open) return {0, 1};
    return {q.config.etp};
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
                if (tp > q.machine.cards || q.gpus % each)
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

// Rows (tokens) of a micro-batch beyond which products get no faster, while activations take
// ever more memory.
constexpr int64_t FULL_ROWS = 65536;

// The allowed schedules and micro-batches of a grid.
inline std::vector<Proposal> list_schedules(const PlanQuestion& q, const Proposal& grid) {
    // List micro-batches that divide a rank's part of the global batch, and numbers of chunks.
    std::vector<Proposal> all;
    int64_t samples = q.config.batch_tokens / q.config.seq / grid.dp;
    std::vector<int> sizes, chunks = {1};
    for (int B = 1; B <= 64 && (B == 1 || B * int64_t(q.config.seq) <= FULL_ROWS); B++)
        if (samples % B == 0) sizes.push_back(B);
    for (int v : {2, 3, 4, 6, 7, MOST_CHUNKS})
        if (grid.pp > 1) chunks.push_back(v);

    // Try three schedules. GPipe is left out: it has 1F1B's bubble, and keeps more activations.
    // Zero-bubble with chunks is left out for the same reason.
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

// The options of all plans of a run with these flags. The first one trains.
inline std::vector<PlanOptions> plans_of(const Config& c, const Shape& shape) {
    // Make a run that has only flags and a shape: the plans depend on nothing else.
    Run run;
    run.config = c;
    run.shape = shape;
    run.context_length = shape.P;
    return choose_plans(run);
}

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
    bool differs = p.pp > 1 && p.dp > 1 && near && !given(q.config, "grid-order");
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

    // The placed proposal's.
    const std::vector<AlikeRanks>* ranks = nullptr;
    std::vector<GridOrder> orders = {};
};

// List what runs before a placed proposal's step, and last a rollout's whole plan: its runs are
// parts of it, and it has room for the longest texts.
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
template <typename T, typename S> void place_estimate(Estimator<T, S>& e, const Proposal& p) {
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
    bool open = !given(c, "zero-group") && !keeps_weights_near(c) && p.zero > 0;
    if (sharing >= Sharing::NEAR)
        open &= !given(c, "hpz") && p.zero == 3 && !offloads(c, "weights");
    if (!open || p.ep > 1 || p.whole_experts()) return 0;

    // Look at the nodes.
    int near = axis_in_node(layout, q.machine, &Layout::cp) *
               axis_in_node(layout, q.machine, &Layout::dp);
    int all = p.dp * p.cp;
    bool apart = near > 1 && near < all && all % near == 0;
    if (!apart || sharing != Sharing::NEAR_NODES) return apart ? near : 0;

    // Take a power of two of nodes.
    int nodes = 1;
    while (4 * nodes * nodes * near <= all && all % (2 * nodes * near) == 0)
        nodes *= 2;
    return nodes > 1 ? nodes * near : 0;
}

// Choose the method of context parallelism by which a block takes least time, unless the user has.
template <typename T, typename S>
void choose_method(Estimator<T, S>& e, Proposal& p) {
    if (p.cp == 1 || given(e.q.config, "cp-method"))
        return;
    double least = INFINITY;
    Proposal best = p;
    for (const char* name : {"gather", "ulysses", "ring"}) {
        // Skip a method that this grid does not allow.
        p.cp_method = name;
        if (!refuse_proposal(e.q, p).empty()) continue;
        place_estimate(e, p);
        e.plan.layout.order = layout_order(p.order);
        double seconds = layers_of(e.planner, e.plan)[1].seconds();
        if (seconds >= least) continue;
        least = seconds;
        best = p;
    }
    p = best;
}

// Estimate a placed proposal in the faster order of its grid. Where ZeRO has no such groups as
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
        if (makes_room && order.name != p.order) continue;
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
        if (estimate.seconds >= p.estimate.seconds) continue;
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
    bool theirs = given(q.config, "masters") || q.config.masters != "float";
    bool shrink = !theirs && check_masters(c).empty();
    if (shrink) savings.push_back({true, 0});

    // The host's memory is another one, unless the CPU runs the step. No bit depends on where
    // anything lies, so try all sets, each behind those that it contains.
    bool apart = sizes_of_gpu || !std::is_same_v<S, Cpu>;
    if (given(q.config, "offload") || !apart) return savings;
    for (unsigned offload = 1; offload < 1u << OFFLOAD_ROWS; offload++) {
        c = q.config;
        c.offload = offload_words(offload);
        bool works = refuse_idle_offload(c).empty() && refuse_graphs(c).empty();
        if (!works || !check_policies(c).empty()) continue;
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
        if (e.movable.of[row] < 0.04 * room) return 0;
        sum += e.movable.of[row];
    }
    return sum;
}

// Estimate a placed proposal with what makes room, where it may decide whether the layout fits.
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

// Estimate every allowed layout. Layouts that surely do not fit are counted and dropped. The
// estimate of memory may be a tenth off, so those near the limit stay until they are placed.
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

    // Keep a proposal with its estimate, or drop it.
    double fastest = INFINITY; // seconds of one that surely fits
    auto keep = [&](const Proposal& p) {
        s.listed++;
        if (p.estimate.bytes < s.leanest.estimate.bytes) s.leanest = p;
        if (p.estimate.host > q.host_room) return;
        if (surely_fits(q, p)) fastest = std::min(fastest, p.estimate.seconds);
        if (p.estimate.least() < 1.1 * q.room) s.proposals.push_back(p);
        else if (p.estimate.least() < 1.5 * q.room) s.larger.push_back(p);
    };

    // Estimate each with all ZeRO stages, groups and levels of recomputation. These are not checked
    // here: simulate_proposal() checks the best few again.
    for (Proposal grid : list_grids(q, &s.why)) {
        choose_method(e, grid);
        for (Proposal p : list_schedules(q, grid)) {
            place_estimate(e, p);
            bool shares = p.dp * p.cp > 1 || p.routing_ranks() > p.ep; // experts, at least
            int last_zero = shares ? 3 : 0;
            for (p.zero = grid.zero; p.zero <= last_zero; p.zero++)
                for (Sharing sharing : {Sharing::ASKED, Sharing::NODE, Sharing::NEAR,
                                        Sharing::NEAR_NODES})
                    for (int level = 0; level < RECOMPUTE_LEVELS; level++) {
                        Proposal x = p;
                        e.plan.layout.zero = p.zero;
                        e.plan.recompute = x.recompute = Recompute(level);
                        estimate_orders(e, x, sharing);
                        if (x.estimate.seconds == INFINITY)
                            break;
                        keep(x);
                        // If a layout surely fits without recomputation, skip the other levels.
                        // Neither they nor moves take time off a step that is far from the fastest.
                        bool sure = surely_fits(q, x);
                        bool slow = x.estimate.seconds > HOPELESS * fastest;
                        if (slow || (level == 0 && sure)) break;
                        if (!sure) make_room(e, x, sharing, savings, keep);
                    }
        }
    }

    // Sort by time. The sort is stable, so that all ranks have the same order.
    std::stable_sort(s.proposals.begin(), s.proposals.end(), faster);
    return s;
}

// ----------------------------------------------------------------------------
// 3. simulate and place

// A proposal with the simulator's time and the arena's bytes. Either is infinite until it has been
// computed: most proposals lose by their estimates, and need neither.
struct Trial {
    Proposal proposal;
    double seconds = INFINITY, bytes = INFINITY; // of a step; of the fullest rank
    double host = 0;                             // its bytes in the host's memory, if that is apart
    Times parts = {};                            // `seconds` by part, the mean over ranks
    std::map<std::string, double> memory = {};   // `bytes` by memory_row()
    std::string wrong = "";                      // why it is refused; "": it is allowed
};

// A proposal as plans, which machines of any speed share.
struct Rehearsal {
    Model model;
    LayoutRuns runs;
    std::vector<BeforeRuns> before = {};
    double teacher_C = 0;
};
template <typename T, typename S>
Rehearsal rehearse_proposal(const PlanQuestion& q, const Proposal& p, S where) {
    // Let the check fill in what flags leave out, and make the plans as a run would.
    Config c = q.config;
    set_proposal(c, p);
    config_check(c, q.shape);
    Layout layout = choose_layout(c, q.shape);
    Rehearsal r = {make_model(with_logits(q.shape, where), layout), {}};
    PlanOptions options = plans_of(c, q.shape)[0];
    r.runs = layout_runs(layout, r.model, options, *q.steps);

    // Make those of what runs before, too.
    r.before = before_runs(before_steps(c, options, q.shape, q.teacher), layout, *q.steps);
    r.teacher_C = double(q.teacher.C);
    return r;
}
template <typename T> StepTime simulate_rehearsal(const Machine& machine, const Rehearsal& r) {
    CostModel cost = run_costs<T>(machine, r.model, Cpu{});
    cost.teacher_C = r.teacher_C;
    StepTime step = simulate_runs(r.runs, r.model, action_cost(cost, r.model));
    add_before(step, before_times<T>(machine, r.before));
    return step;
}

// Simulate a step of a proposal.
template <typename T, typename S>
Trial simulate_proposal(const PlanQuestion& q, const Proposal& p, S where) {
    // Check it with its ZeRO stage and level of recomputation, which the list has not checked.
    Trial t = {p};
    Config c = q.config;
    set_proposal(c, p);
    t.wrong = check_with_teacher(c, q.shape, q.teacher);
    if (!t.wrong.empty()) return t;

    // Simulate the plan that trains.
    StepTime step = simulate_rehearsal<T>(q.machine, rehearse_proposal<T>(q, p, where));
    t.seconds = step.seconds;
    t.parts = step.parts;
    return t;
}

// The row of the memory table that a kind of data belongs to.
inline const char* memory_row(Kind kind) {
    switch (kind) {
    case Kind::WEIGHT: return "weights";
    case Kind::GRAD:
    case Kind::GRAD_TIED: return "gradients";
    case Kind::MASTER: return "master weights";
    case Kind::STATE: return "optimizer moments";
    case Kind::EMA: return "mean of weights";
    default: return "constants";
    }
}

// Bytes of a teacher beside a rank's plans. Of many micro-batches a few are placed: each of the
// others adds as many bytes as the last of these.
template <typename T, typename S>
double teacher_room(const Config& c, const Shape& teacher, PlanOptions train, int rank, S where) {
    Run run;
    run.config = c;
    run.teacher_shape = teacher;
    run.train_plan = 0;
    if (!has_teacher(run)) return 0;
    int m = train.micro_batches;
    int few = std::min(m, 4);
    auto bytes = [&](int micro_batches) {
        train.micro_batches = micro_batches;
        return double(teacher_bytes<T>(run, {train}, rank, where));
    };
    double placed = bytes(few);
    return m == few ? placed : placed + (m - few) * (placed - bytes(few - 1));
}

// Place the plans of one pipeline rank, and keep its bytes if they are the most so far. A pipeline
// that is full repeats itself, so of many micro-batches only a few are placed; each of the others
// adds the bytes of its tokens and its loss.
template <typename T, typename S>
void place_proposal(const PlanQuestion& q, Trial& t, int pp_rank, S where) {
    Config c = q.config;
    set_proposal(c, t.proposal);
    config_check(c, q.shape);
    Layout layout = choose_layout(c, q.shape);
    int rank = first_rank_of(layout, pp_rank);
    layout = layout_at(layout, rank);
    Model model = make_model(with_logits(q.shape, where), layout);

    // Place as many micro-batches as the pipeline needs to settle.
    std::vector<PlanOptions> options = plans_of(c, q.shape);
    double teacher = teacher_room<T>(c, q.teacher, options[0], rank, where);
    int m = options[0].micro_batches, few = settled(layout, m).few + layout.pp.size;
    options[0].micro_batches = std::min(m, few);
    std::vector<Plan> plans;
    for (const PlanOptions& o : options) {
        bool trains = o.mode == Mode::TRAIN;
        plans.push_back(trains ? make_plan(layout, model, o, q.steps->of(layout, o)[pp_rank])
                               : make_plan(layout, model, o));
    }
    Arena arena = place_plans<T>(plans, model, where);

    // Count the micro-batches that were left out.
    size_t each = round_up(plans[0].input_numbers() * sizeof(int), ARENA_ALIGN) + ARENA_ALIGN;
    double bytes = double(bytes_here(arena, where)) + double(std::max(0, m - few)) * double(each);

    // Add a hundredth for several chunks: in the longer plan first fit finds other holes, and tests
    // see differences of this size.
    if (layout.chunks > 1 && m > few) bytes *= 1.01;
    if (t.bytes < INFINITY && bytes + teacher <= t.bytes) return;

    // Keep the bytes by row: this rank is the fullest so far.
    t.bytes = bytes + teacher;
    t.host = is_here(Tier::HOST, where) ? 0 : double(arena.memory[int(Tier::HOST)].bytes);
    t.memory.clear();
    double lasting = 0;
    for (auto& [d, place] : arena.lasting) {
        if (!is_here(place.tier, where)) continue;
        t.memory[memory_row(d.kind)] += double(place.bytes);
        lasting += double(place.bytes);
    }
    t.memory["activations"] = bytes - lasting;
    t.memory["teacher"] = teacher;
}

// Whether a trial fits. Only the rank that the estimate calls the fullest is placed.
template <typename T, typename S>
bool fits(const PlanQuestion& q, Trial& t, S where) {
    if (t.bytes == INFINITY)
        place_proposal<T>(q, t, t.proposal.estimate.fullest, where);
    return t.bytes <= q.room && t.host <= q.host_room;
}

// ----------------------------------------------------------------------------
// 4. choose

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
constexpr double SURELY_SLOWER = 1.15;

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
    std::set<double> times; // of the trials

    // A proposal is too slow if its estimate is surely beyond the last trial that would be shown.
    auto too_slow = [&](const Proposal& p) {
        return times.size() >= SHOWN &&
               p.estimate.seconds > SURELY_SLOWER * *std::next(times.begin(), SHOWN - 1);
    };

    // Make a proposal a trial; false: it does not fit, or is refused.
    auto try_proposal = [&](const Proposal& p) {
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
        // Two short runs, about. What moves takes more actions.
        double each = p.offload ? 150 : 15;
        actions += each * p.pp * double(q.shape.L);
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
    for (size_t i = 0; i < simple.size() && i < 4 && actions < MOST_ACTIONS; i++) {
        auto known = [&](const Trial& t) {
            return proposal_text(t.proposal) == proposal_text(simple[i]);
        };
        if (std::none_of(trials.begin(), trials.end(), known)) try_proposal(simple[i]);
    }

    // Show the fastest that fit.
    std::stable_sort(trials.begin(), trials.end(),
                     [](const Trial& x, const Trial& y) { return x.seconds < y.seconds; });
    for (Trial& t : trials) {
        if (a.best.size() == SHOWN) break;
        if (fits<T>(q, t, where)) a.best.push_back(t);
        else a.larger.push_back(t.proposal);
    }
    a.chosen = choose_trial(a.best);

    // List what more memory would admit: what was placed and is too large, and what was not placed.
    a.larger.insert(a.larger.end(), a.search.larger.begin(), a.search.larger.end());
    std::stable_sort(a.larger.begin(), a.larger.end(), faster);
    return a;
}

} // namespace llmc
