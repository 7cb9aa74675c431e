// plan_search.h - every layout that is allowed, and the best few of them simulated and placed
//   1. LIST      every grid of the ranks, its schedules, micro-batches, ZeRO stages and levels of
//                recomputation. config_check() decides what is allowed, so no rule is written
//                twice. One rule is added to shorten the list: tensor parallelism stays inside a
//                node. The global batch and the sequence length stay as the user gave them
//   2. ESTIMATE  time and memory of each, in closed form (planner.h)
//   3. SIMULATE  the best few, as the plans that would run (simulator.h), and place them in memory
//   4. CHOOSE    times within 2% of the fastest are a tie: the fewest techniques win, then the
//                least memory
//   All ranks compute the same numbers, and so choose the same layout.
#pragma once
#include "../io/predict.h"
#include "../planner.h"
#include "limits.h"

namespace llmc {

// A layout that might run: the flags that --plan chooses.
struct Proposal {
    int dp = 1, tp = 1, pp = 1, cp = 1, ep = 1; // ranks along each axis
    // Pipeline stages of a rank, ZeRO's stage, sequences of a micro-batch.
    int chunks = 1, zero = 0, B = 1;
    bool sequence_parallel = false;
    Pipeline pipeline = Pipeline::ONE_F_ONE_B;
    Recompute recompute = Recompute::NONE;
    Estimate estimate = {};

    // How much a user has to know to run this layout. An axis counts ten, because it
    // brings messages of its own; any other technique counts one, a higher level of ZeRO
    // or of recomputation more.
    int techniques() const {
        int axes = (tp > 1) + (pp > 1) + (cp > 1) + (ep > 1);
        return 10 * axes + zero + sequence_parallel + (chunks > 1) +
               (pipeline != Pipeline::ONE_F_ONE_B) + int(recompute);
    }
};

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
    add("pp", p.pp, p.pp > 1);
    add("pipeline", pipeline_name(p.pipeline), p.pipeline != Pipeline::ONE_F_ONE_B);
    add("chunks", p.chunks, p.chunks > 1);
    add("ep", p.ep, p.ep > 1);
    add("zero", p.zero, p.zero > 0);
    add("recompute", recompute_name(p.recompute), p.recompute != Recompute::NONE);
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

    // Set the schedule, the ZeRO stage, the micro-batch and the recomputation.
    c.chunks = p.chunks;
    c.zero = p.zero;
    c.micro_batch = p.B;
    c.sequence_parallel = p.sequence_parallel;
    c.pipeline = pipeline_name(p.pipeline);
    c.recompute = recompute_name(p.recompute);
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

    // Read the rest. --recompute auto counts as full.
    p.chunks = c.chunks;
    p.zero = c.zero;
    p.B = c.micro_batch;
    p.sequence_parallel = c.sequence_parallel;
    p.pipeline = choose_pipeline(c, micro_batches(c), nullptr);
    p.recompute = recompute_named(c.recompute);
    return p;
}

// The question: the flags, the model, the machine, how many ranks, and how much room each has.
struct PlanQuestion {
    Config config; // with a batch and a sequence length, and checked as by --explain
    Shape shape;
    Machine machine;
    int gpus = 1;    // ranks
    double room = 0; // bytes that each rank may take
};

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
    return config_check(c, q.shape);
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
                if (tp > q.machine.cards || q.gpus % each) continue;
                Proposal p;
                p.tp = tp;
                p.pp = pp;
                p.cp = cp;
                p.dp = q.gpus / tp / pp / cp; // what is left

                // Distribute experts over ranks that see different tokens: those of dp and cp.
                for (int ep : q.shape.E ? divisors : one) {
                    p.ep = ep;
                    if (p.dp * p.cp % ep == 0) ask(p);
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
    for (int v : {2, 3, 4, 6, 7, 8})
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

// The options of all plans of a run with these flags. train: receives the index of the
// plan that trains.
inline std::vector<PlanOptions> plans_of(const Config& c, const Shape& shape, int* train) {
    // Make a run that has only flags and a shape: the plans depend on nothing else.
    Run run;
    run.config = c;
    run.shape = shape;
    run.context_length = shape.P;
    std::vector<PlanOptions> plans = choose_plans(run);
    *train = run.train_plan;
    return plans;
}

// The layouts that a search has found.
struct Search {
    std::vector<Proposal> proposals; // those that may fit, the fastest first
    std::vector<Proposal> larger;    // those that would fit in half as much room again
    size_t listed = 0;               // how many are allowed
    Proposal leanest;                // the one that takes the fewest bytes
    std::string why;                 // why the first refused one was refused
};

// Whether one layout is faster than another, by their estimates.
inline bool faster(const Proposal& x, const Proposal& y) {
    return x.estimate.seconds < y.estimate.seconds;
}

// Estimate every allowed layout. Layouts that surely do not fit are counted and dropped. The
// estimate of memory may be a tenth off, so those near the limit stay until they are placed.
template <typename T, typename S>
Search search_layouts(const PlanQuestion& q, S where) {
    // Begin with the plainest layout, which the others change field by field. The planner caches
    // what layouts share.
    Search s;
    Planner<T, S> planner = {with_logits(q.shape, where), {q.machine, sizeof(T)}, where,
                             {}, {}, {}};
    std::map<int, std::vector<int>> stages; // [number of stages]: the first layer of each
    s.leanest.estimate.bytes = INFINITY;
    int train = 0;
    Config one = q.config; // the plainest: one rank
    set_proposal(one, {});
    PlanOptions options = plans_of(one, q.shape, &train)[0];
    Layout layout = choose_layout(one, q.shape);

    // Change `layout` and `options` to a proposal's. The split into stages depends on their number
    // alone, so each number is split once.
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

    // Estimate each with all ZeRO stages and levels of recomputation. These are not checked here:
    // simulate_proposal() checks the best few again.
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
                    else if (p.estimate.bytes < 1.5 * q.room) s.larger.push_back(p);
                    // If a layout surely fits without recomputation, skip the other levels.
                    if (level == 0 && p.estimate.bytes < 0.9 * q.room) break;
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
    Times parts = {};                            // `seconds` by part, the mean over ranks
    std::map<std::string, double> memory = {};   // `bytes` by memory_row()
    std::string wrong = "";                      // why it is refused; "": it is allowed
};

// A proposal as plans, which machines of any speed share.
struct Rehearsal {
    Model model;
    LayoutRuns runs;
};
template <typename T, typename S>
Rehearsal rehearse_proposal(const PlanQuestion& q, const Proposal& p, S where) {
    // Let the check fill in what flags leave out, and make the plans as a run would.
    Config c = q.config;
    set_proposal(c, p);
    config_check(c, q.shape);
    int train = 0;
    Layout layout = choose_layout(c, q.shape);
    Rehearsal r = {make_model(with_logits(q.shape, where), layout), {}};
    r.runs = layout_runs(layout, r.model, plans_of(c, q.shape, &train)[0]);
    return r;
}
template <typename T> StepTime simulate_rehearsal(const Machine& machine, const Rehearsal& r) {
    CostModel cost = {machine, sizeof(T)};
    return simulate_runs(r.runs, r.model, action_cost(cost, r.model));
}

// Simulate a step of a proposal.
template <typename T, typename S>
Trial simulate_proposal(const PlanQuestion& q, const Proposal& p, S where) {
    // Check it with its ZeRO stage and level of recomputation, which the list has not checked.
    Trial t = {p};
    Config c = q.config;
    set_proposal(c, p);
    t.wrong = config_check(c, q.shape);
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

// Place the plans of one pipeline rank, and keep its bytes if they are the most so far. A pipeline
// that is full repeats itself, so of many micro-batches only a few are placed; each of the others
// adds the bytes of its tokens and its loss.
template <typename T, typename S>
void place_proposal(const PlanQuestion& q, Trial& t, int pp_rank, S where) {
    Config c = q.config;
    set_proposal(c, t.proposal);
    config_check(c, q.shape);
    Layout layout = choose_layout(c, q.shape);
    layout = layout_at(layout, first_rank_of(layout, pp_rank));
    Model model = make_model(with_logits(q.shape, where), layout);

    // Place as many micro-batches as the pipeline needs to settle.
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

    // Add a hundredth for several chunks: in the longer plan first fit finds other holes, and tests
    // see differences of this size.
    if (layout.chunks > 1 && m > few) bytes *= 1.01;
    if (t.bytes < INFINITY && bytes <= t.bytes) return;

    // Keep the bytes by row: this rank is the fullest so far.
    t.bytes = bytes;
    t.memory.clear();
    double lasting = 0;
    for (auto& [d, place] : arena.lasting) {
        t.memory[memory_row(d.kind)] += double(place.bytes);
        lasting += double(place.bytes);
    }
    t.memory["activations"] = bytes - lasting;
}

// Whether a trial fits. Only the rank that the estimate calls the fullest is placed.
template <typename T, typename S>
bool fits(const PlanQuestion& q, Trial& t, S where) {
    if (t.bytes == INFINITY)
        place_proposal<T>(q, t, t.proposal.estimate.fullest, where);
    return t.bytes <= q.room;
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
constexpr double MOST_ACTIONS = 3e5, TIE = 1.02;
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
    std::map<std::array<int, 4>, size_t> of_grid;
    std::vector<Trial> trials;
    size_t placed = 0;
    double actions = 0;
    std::set<double> times; // of the trials

    // A proposal is too slow if its estimate is surely beyond the last trial that would be shown.
    auto too_slow = [&](const Proposal& p) {
        return times.size() >= SHOWN &&
               p.estimate.seconds > SURELY_SLOWER * *std::next(times.begin(), SHOWN - 1);
    };

    // Make a proposal a trial; false: it does not fit, or is refused. If its estimate is below nine
    // tenths of the room it surely fits: the closed form is never off by so much.
    auto try_proposal = [&](const Proposal& p) {
        Trial t = {p};
        bool sure = p.estimate.bytes < 0.9 * q.room;
        placed += !sure;
        if (!sure && !fits<T>(q, t, where)) {
            a.larger.push_back(p);
            return false;
        }

        // Take the simulator's time from here on.
        Trial simulated = simulate_proposal<T>(q, p, where);
        a.simulated++;
        actions += 15.0 * p.pp * double(q.shape.L); // about: two short runs
        if (!simulated.wrong.empty()) return false;
        simulated.bytes = t.bytes;
        simulated.memory = t.memory;
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
        size_t& count = of_grid[{p.tp, p.pp, p.cp, p.ep}];
        bool sure = p.estimate.bytes < 0.9 * q.room; // it need not be placed
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
    for (Trial& t : trials)
        if (a.best.size() < SHOWN && fits<T>(q, t, where)) a.best.push_back(t);
    a.chosen = choose_trial(a.best);

    // List what more memory would admit: what was placed and is too large, and what was not placed.
    a.larger.insert(a.larger.end(), a.search.larger.begin(), a.search.larger.end());
    std::stable_sort(a.larger.begin(), a.larger.end(), faster);
    return a;
}

} // namespace llmc
