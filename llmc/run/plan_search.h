// plan_search.h - every layout that is allowed, and the best few of them simulated and placed
//   1. LIST      every grid of the ranks, its schedules, micro-batches, ZeRO stages and levels of
//                recomputation. config_check() says what is allowed: no rule is written twice, but
//                for one that cuts: tensor parallelism stays inside a node. The global batch and
//                the sequence are the user's, and stay
//   2. ESTIMATE  time and memory of each, in closed form (planner.h)
//   3. SIMULATE  the best few, as the plans that would run (simulator.h); place them, too
//   4. CHOOSE    what lies within 2% of the fastest is a tie: fewest techniques win, then least
//                memory
//   All ranks choose by the same numbers, and so the same.
#pragma once
#include "../io/predict.h"
#include "../planner.h"
#include "limits.h"

namespace llmc {

// A layout that might run, as the flags that --plan chooses.
struct Proposal {
    // The axes.
    int dp = 1, tp = 1, pp = 1, cp = 1, ep = 1;
    // Stages of a rank, ZeRO's stage, sequences of a micro-batch.
    int chunks = 1, zero = 0, B = 1;
    bool sequence_parallel = false;
    Pipeline pipeline = Pipeline::ONE_F_ONE_B;
    Recompute recompute = Recompute::NONE;
    Estimate estimate = {};

    // Techniques count less than axes, for an axis brings messages of its own. A higher ZeRO stage
    // and a higher level of recomputation are more to know, too.
    int techniques() const {
        int axes = (tp > 1) + (pp > 1) + (cp > 1) + (ep > 1);
        return 10 * axes + zero + sequence_parallel + (chunks > 1) +
               (pipeline != Pipeline::ONE_F_ONE_B) + int(recompute);
    }
};

// The flags that a proposal sets, with those of its values that are no default; a shell takes them
// as they are.
inline const char* pipeline_name(Pipeline p) {
    static const char* names[] = {"gpipe", "1f1b", "interleaved", "zero-bubble"};
    return names[int(p)];
}
inline std::string proposal_text(const Proposal& p) {
    // Defaults are left out, but for the data-parallel ranks and the micro-batch.
    std::string text = concat("--dp ", p.dp);
    auto add = [&](const char* flag, auto value, bool set) {
        if (set) text += concat(" --", flag, " ", value);
    };
    add("tp", p.tp, p.tp > 1);
    if (p.sequence_parallel) text += " --sequence-parallel";
    add("cp", p.cp, p.cp > 1);
    add("pp", p.pp, p.pp > 1);
    add("pipeline", pipeline_name(p.pipeline), p.pipeline != Pipeline::ONE_F_ONE_B);
    add("chunks", p.chunks, p.chunks > 1);
    add("ep", p.ep, p.ep > 1);
    add("zero", p.zero, p.zero > 0);
    add("recompute", recompute_name(p.recompute), p.recompute != Recompute::NONE);
    return text + concat(" --micro-batch ", p.B);
}

// The configuration with a proposal's flags.
inline void set_proposal(Config& c, const Proposal& p) {
    // The axes.
    c.dp = p.dp;
    c.tp = p.tp;
    c.pp = p.pp;
    c.cp = p.cp;
    c.ep = p.ep;

    // Schedule, shards, micro-batch, levels.
    c.chunks = p.chunks;
    c.zero = p.zero;
    c.micro_batch = p.B;
    c.sequence_parallel = p.sequence_parallel;
    c.pipeline = pipeline_name(p.pipeline);
    c.recompute = recompute_name(p.recompute);
}
inline Proposal proposal_of(const Config& c) {
    // The same fields the other way.
    Proposal p;
    p.dp = c.dp;
    p.tp = c.tp;
    p.pp = c.pp;
    p.cp = c.cp;
    p.ep = c.ep;

    // A level of "auto" counts as full.
    p.chunks = c.chunks;
    p.zero = c.zero;
    p.B = c.micro_batch;
    p.sequence_parallel = c.sequence_parallel;
    p.pipeline = choose_pipeline(c, micro_batches(c), nullptr);
    p.recompute = recompute_named(c.recompute);
    return p;
}

// The question: flags, how many GPUs, and the bytes that each has for a rank.
struct PlanQuestion {
    // With a batch and a sequence, as a trial that nothing runs.
    Config config;
    Shape shape;
    Machine machine;
    int gpus = 1;
    // Bytes.
    double room = 0;
};

// ----------------------------------------------------------------------------
// 1. list

inline std::vector<int> divisors_of(int n) {
    // In ascending order.
    std::vector<int> all;
    for (int d = 1; d <= n; d++)
        if (n % d == 0) all.push_back(d);
    return all;
}

// "" or why the ordinary check refuses a proposal.
inline std::string refuse_proposal(const PlanQuestion& q, const Proposal& p) {
    // The check fills in what flags leave out, so it has a copy.
    Config c = q.config;
    set_proposal(c, p);
    return config_check(c, q.shape);
}

// Grids of so many ranks that are allowed, each as its plainest proposal. `why`: the first refusal.
inline std::vector<Proposal> list_grids(const PlanQuestion& q, std::string* why) {
    std::vector<Proposal> grids;
    std::vector<int> divisors = divisors_of(q.gpus), one = {1};
    auto ask = [&](const Proposal& p) {
        std::string wrong = refuse_proposal(q, p);
        if (wrong.empty()) grids.push_back(p);
        if (!wrong.empty() && why->empty()) *why = wrong;
    };

    // Tensor parallelism's messages are on the critical path: no further than a node.
    for (int tp : divisors)
        for (int pp : divisors)
            for (int cp : divisors) {
                int64_t each = int64_t(tp) * pp * cp;
                if (tp > q.machine.cards || q.gpus % each) continue;
                Proposal p;
                p.tp = tp;
                p.pp = pp;
                p.cp = cp;
                p.dp = q.gpus / tp / pp / cp; // what is left

                // Experts are shared out over ranks that see other tokens.
                for (int ep : q.shape.E ? divisors : one) {
                    p.ep = ep;
                    if (p.dp * p.cp % ep == 0) ask(p);
                }
            }
    return grids;
}

// Rows of a micro-batch beyond which products are no faster, and activations take more.
constexpr int64_t FULL_ROWS = 65536;

// A grid's schedules and micro-batches that are allowed.
inline std::vector<Proposal> list_schedules(const PlanQuestion& q, const Proposal& grid) {
    std::vector<Proposal> all;
    // Micro-batches divide a rank's part of the step, for the global batch stays as it is.
    int64_t samples = q.config.batch_tokens / q.config.seq / grid.dp;
    std::vector<int> sizes, chunks = {1};
    for (int B = 1; B <= 64 && (B == 1 || B * int64_t(q.config.seq) <= FULL_ROWS); B++)
        if (samples % B == 0) sizes.push_back(B);
    for (int v : {2, 3, 4, 6, 7, 8})
        if (grid.pp > 1) chunks.push_back(v);

    // GPipe waits as long as 1F1B and keeps more, and so does zero-bubble in chunks.
    for (int B : sizes)
        for (int v : chunks)
            for (bool sequence_parallel : {false, true})
                for (Pipeline pipeline : {Pipeline::ONE_F_ONE_B, Pipeline::INTERLEAVED,
                                          Pipeline::ZERO_BUBBLE}) {
                    bool idle = (grid.pp == 1 && pipeline != Pipeline::ONE_F_ONE_B) ||
                                (grid.tp == 1 && sequence_parallel);
                    if (idle || (pipeline == Pipeline::INTERLEAVED) != (v > 1)) continue;
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

// The options of the plan that trains, and those of all plans of a run with these flags.
inline std::vector<PlanOptions> plans_of(const Config& c, const Shape& shape, int* train) {
    // Nothing of the run but its flags says which plans there are.
    Run run;
    run.config = c;
    run.shape = shape;
    run.context_length = shape.P;
    std::vector<PlanOptions> plans = choose_plans(run);
    *train = run.train_plan;
    return plans;
}

struct Search {
    std::vector<Proposal> proposals; // that may fit, the fastest first
    size_t listed = 0;               // all that are allowed
    Proposal leanest;                // that takes least
    std::string why;                 // the first refusal
};

// Every allowed layout with its estimate. Those that surely need too much are counted and dropped;
// the closed form of memory may be a tenth off, so those near the room stay until they are placed.
template <typename T, typename S>
Search search_layouts(const PlanQuestion& q, S where) {
    // The planner remembers what layouts share, stages are remembered here.
    Search s;
    Planner<T, S> planner = {with_logits(q.shape, where), {q.machine, sizeof(T)}, where,
                             {}, {}, {}};
    std::map<int, std::vector<int>> stages; // by their number: first layers
    s.leanest.estimate.bytes = INFINITY;
    int train = 0;
    Config one = q.config; // of one rank, from which the others differ in sizes alone
    set_proposal(one, {});
    PlanOptions options = plans_of(one, q.shape, &train)[0];
    Layout layout = choose_layout(one, q.shape);

    // A layout's stages are asked once: they depend on their number alone.
    auto place = [&](const Proposal& p) {
        layout.dp.size = p.dp;
        layout.tp.size = p.tp;
        layout.pp.size = p.pp;
        layout.cp.size = p.cp;
        layout.ep = p.ep;
        layout.ep_exchange = p.ep > 1 && q.config.ep_method == "exchange";
        layout.chunks = p.chunks;
        layout.pipeline = p.pipeline;
        layout.sequence_parallel = p.sequence_parallel;
        int count = layout.stages();
        if (!stages.count(count))
            stages[count] = count > 1 ? choose_stages(q.shape, count) : std::vector<int>();
        layout.first_layer = stages[count];
        options.B = size_t(p.B);
        options.micro_batches = int(q.config.batch_tokens / (int64_t(p.B) * q.config.seq * p.dp));
    };

    // ZeRO and recomputation are allowed wherever the rest is; the best few are asked again.
    for (const Proposal& grid : list_grids(q, &s.why))
        for (Proposal p : list_schedules(q, grid)) {
            place(p);
            int last_zero = p.dp * p.cp > 1 ? 3 : 0;
            for (p.zero = 0; p.zero <= last_zero; p.zero++)
                for (int level = 0; level < RECOMPUTE_LEVELS; level++) {
                    layout.zero = p.zero;
                    options.recompute = p.recompute = Recompute(level);
                    p.estimate = estimate_layout(planner, layout, options);
                    s.listed++;
                    if (p.estimate.bytes < s.leanest.estimate.bytes) s.leanest = p;
                    if (p.estimate.bytes < 1.1 * q.room) s.proposals.push_back(p);
                    // Nothing is made again where all of it fits.
                    if (level == 0 && p.estimate.bytes < 0.9 * q.room) break;
                }
        }
    std::stable_sort(s.proposals.begin(), s.proposals.end(),
                     [](const Proposal& x, const Proposal& y) {
                         return x.estimate.seconds < y.estimate.seconds;
                     });
    return s;
}

// ----------------------------------------------------------------------------
// 3. simulate and place

// A proposal as it would run: its time is the simulator's, its bytes are the arena's. Neither is
// asked before it matters: most proposals lose by their estimates.
struct Trial {
    Proposal proposal;
    double seconds = INFINITY, bytes = INFINITY; // of a step; of the fullest rank
    // The seconds by part, as the mean over ranks.
    Times parts = {};
    // The bytes by row, of the fullest rank.
    std::map<std::string, double> memory = {};
    // Why it is refused; "": it is not.
    std::string wrong = "";
};

// Simulate a proposal's step.
template <typename T, typename S>
Trial simulate_proposal(const PlanQuestion& q, const Proposal& p, S where) {
    // The list has asked for one ZeRO stage and one level alone: ask for these.
    Trial t = {p};
    Config c = q.config;
    set_proposal(c, p);
    t.wrong = config_check(c, q.shape);
    if (!t.wrong.empty()) return t;

    // The plans are those of a run.
    int train = 0;
    Layout layout = choose_layout(c, q.shape);
    Model model = make_model(with_logits(q.shape, where), layout);
    PlanOptions options = plans_of(c, q.shape, &train)[0];
    CostModel cost = {q.machine, sizeof(T)};
    StepTime step = simulate_layout(layout, model, options, action_cost(cost, model));
    t.seconds = step.seconds;
    t.parts = step.parts;
    return t;
}

// The rows of the memory table.
inline const char* memory_row(Kind kind) {
    switch (kind) {
    case Kind::WEIGHT: return "weights";
    case Kind::GRAD:
    case Kind::GRAD_TIED: return "gradients";
    case Kind::MASTER: return "master weights";
    case Kind::STATE: return "optimizer moments";
    default: return "constants";
    }
}

// Place the plans of a rank of the pipeline. A pipeline that is full repeats itself, so of a long
// accumulation some rounds are placed; of the others each micro-batch adds its tokens and its loss.
template <typename T, typename S>
void place_proposal(const PlanQuestion& q, Trial& t, int pp_rank, S where) {
    Config c = q.config;
    set_proposal(c, t.proposal);
    config_check(c, q.shape);
    Layout layout = choose_layout(c, q.shape);
    layout = layout_at(layout, first_rank_of(layout, pp_rank));
    Model model = make_model(with_logits(q.shape, where), layout);

    // Leave out what repeats.
    int train = 0;
    std::vector<PlanOptions> options = plans_of(c, q.shape, &train);
    int m = options[0].micro_batches, few = settled(layout, m).few + layout.pp.size;
    options[0].micro_batches = std::min(m, few);
    std::vector<Plan> plans;
    for (const PlanOptions& o : options)
        plans.push_back(make_plan(layout, model, o));
    Arena arena = place_plans<T>(plans, model, where);

    // Count the micro-batches that were left out.
    size_t each = round_up(plans[0].input_numbers() * sizeof(int), ARENA_ALIGN) + ARENA_ALIGN;
    double bytes = double(bytes_here(arena, where)) + double(std::max(0, m - few)) * double(each);
    // First fit finds other holes in a longer plan of several chunks: a hundredth, as tests see it.
    if (layout.chunks > 1 && m > few) bytes *= 1.01;
    if (t.bytes < INFINITY && bytes <= t.bytes) return;

    // Keep the rows of the fullest rank.
    t.bytes = bytes;
    t.memory.clear();
    double lasting = 0;
    for (auto& [d, place] : arena.lasting) {
        t.memory[memory_row(d.kind)] += double(place.bytes);
        lasting += double(place.bytes);
    }
    t.memory["activations"] = bytes - lasting;
}

// Whether a trial fits, by the rank that the estimate has as the fullest.
template <typename T, typename S>
bool fits(const PlanQuestion& q, Trial& t, S where) {
    if (t.bytes == INFINITY)
        place_proposal<T>(q, t, t.proposal.estimate.fullest, where);
    return t.bytes <= q.room;
}

// ----------------------------------------------------------------------------
// 4. choose

struct Answer {
    Search search;
    std::vector<Trial> best; // that fit, the fastest first
    size_t chosen = 0, simulated = 0;
};

// How many are simulated of all, and of each grid; how many are placed and printed.
// Actions: a trial of many stages takes longest, and three are the least.
constexpr size_t MOST_TRIALS = 64, MOST_OF_GRID = 8, MOST_PLACED = 100, SHOWN = 6;
constexpr double MOST_ACTIONS = 3e5, TIE = 1.02;
// An estimate that is so much more than the time of the last trial shown is of no use: the closed
// form is less too slow, as test_planner sees it.
constexpr double SURELY_SLOWER = 1.15;

// Choose among those that fit: of ties the one with the fewest techniques, then the least memory.
inline size_t choose_trial(const std::vector<Trial>& best) {
    // The first is the fastest.
    size_t chosen = 0;
    for (size_t i = 1; i < best.size() && best[i].seconds <= TIE * best[0].seconds; i++) {
        auto rank = [](const Trial& t) { return std::pair(t.proposal.techniques(), t.bytes); };
        if (rank(best[i]) < rank(best[chosen])) chosen = i;
    }
    return chosen;
}

// Simulate the best few. A grid has many variants of about one time, so each grid has some places;
// what may not fit is placed first, for its place is another's then.
template <typename T, typename S>
Answer answer_question(const PlanQuestion& q, S where) {
    Answer a;
    a.search = search_layouts<T>(q, where);
    std::map<std::array<int, 4>, size_t> of_grid;
    std::vector<Trial> trials;
    size_t placed = 0;
    double actions = 0;
    std::set<double> times; // of the trials
    auto too_slow = [&](const Proposal& p) {
        return times.size() >= SHOWN &&
               p.estimate.seconds > SURELY_SLOWER * *std::next(times.begin(), SHOWN - 1);
    };
    auto try_proposal = [&](const Proposal& p) {
        // Nine tenths of the room are more than the closed form is ever wrong by.
        Trial t = {p};
        bool sure = p.estimate.bytes < 0.9 * q.room;
        placed += !sure;
        if (!sure && !fits<T>(q, t, where)) return false;

        // The time is the simulator's from here on.
        Trial simulated = simulate_proposal<T>(q, p, where);
        a.simulated++;
        actions += 15.0 * p.pp * double(q.shape.L); // of two short runs
        if (!simulated.wrong.empty()) return false;
        simulated.bytes = t.bytes;
        simulated.memory = t.memory;
        trials.push_back(simulated);
        times.insert(simulated.seconds);
        return true;
    };

    // Take the fastest by estimate, then the simplest of those that are about as fast.
    const std::vector<Proposal>& all = a.search.proposals;
    std::vector<Proposal> simple;
    for (const Proposal& p : all) {
        if (too_slow(p)) break;
        if (p.estimate.seconds < 1.05 * all[0].estimate.seconds) simple.push_back(p);
        size_t& count = of_grid[{p.tp, p.pp, p.cp, p.ep}];
        bool sure = p.estimate.bytes < 0.9 * q.room; // it needs no place
        bool enough = trials.size() == MOST_TRIALS || (placed >= MOST_PLACED && !sure) ||
                      (trials.size() >= 3 && actions > MOST_ACTIONS);
        if (enough || count == MOST_OF_GRID) continue;
        count += try_proposal(p);
    }
    std::stable_sort(simple.begin(), simple.end(), [](const Proposal& x, const Proposal& y) {
        return x.techniques() < y.techniques();
    });
    for (size_t i = 0; i < simple.size() && i < 4 && actions < MOST_ACTIONS; i++) {
        auto known = [&](const Trial& t) {
            return proposal_text(t.proposal) == proposal_text(simple[i]);
        };
        if (std::none_of(trials.begin(), trials.end(), known)) try_proposal(simple[i]);
    }

    // Place those that are shown.
    std::stable_sort(trials.begin(), trials.end(),
                     [](const Trial& x, const Trial& y) { return x.seconds < y.seconds; });
    for (Trial& t : trials)
        if (a.best.size() < SHOWN && fits<T>(q, t, where)) a.best.push_back(t);
    a.chosen = choose_trial(a.best);
    return a;
}

} // namespace llmc
