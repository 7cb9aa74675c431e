// trial.h - a proposal as the plans that would run: simulated, and placed in memory
//   1. simulate_proposal()  the time of a step, by parts; with what runs before it
//   2. place_proposal()     the bytes of a pipeline rank, by rows; fits() asks if there is room
//   Both make as few micro-batches as a pipeline needs to settle.
#pragma once
#include "../action.h"
#include "../arena.h"
#include "../family.h"
#include "../head.h"
#include "../io/config.h"
#include "../io/config_check.h"
#include "../io/machine.h"
#include "../io/plan_flags.h"
#include "../layout.h"
#include "../model.h"
#include "../ops/types.h"
#include "../pipeline.h"
#include "../plan.h"
#include "../run/choose_plans.h"
#include "../trainer.h"
#include "../tune/teach.h"
#include "before_step.h"
#include "cost.h"
#include "layer_cost.h"
#include "layer_estimates.h"
#include "planner.h"
#include "predict.h"
#include "proposal.h"
#include "simulator.h"

namespace llmc {

// The question: the flags, the model, the machine, how many ranks, and how much room each has.
struct PlanQuestion {
    Config config; // with a batch and a sequence length, and checked as by --explain
    Shape shape;
    Machine machine;
    Shape teacher = {}; // that --teacher names
    int gpus = 1;    // ranks
    double room = 0; // bytes that each rank may take
    double host_room = INFINITY; // and of the host's memory beside its GPU
    bool named = false; // keep to the values that the user's flags name (has_named())
    std::shared_ptr<KnownSteps> steps = std::make_shared<KnownSteps>(); // of all trials
};

// Whether the user's flags name a value of what the planner chooses. Other flags hold in any case.
inline bool names_layout(const Config& c) {
    bool any = was_given(c, "micro-batch");
    for (const char* name : planned_flags())
        any |= was_given(c, name);
    return any;
}

// Whether a proposal has all values that they name.
inline bool has_named(const Config& c, const Proposal& p) {
    auto same = [&](const char* flag, const auto& named, const auto& value) {
        return !was_given(c, flag) || named == value;
    };
    return same("dp", c.dp, p.dp) &&
           same("tp", c.tp, p.tp) &&
           same("pp", c.pp, p.pp) &&
           same("cp", c.cp, p.cp) &&
           same("ep", c.ep, p.ep) &&
           same("zero", c.zero, p.zero) &&
           same("pipeline", c.pipeline, PIPELINE_NAMES[size_t(p.pipeline)]) &&
           same("chunks", c.chunks, p.chunks) &&
           same("sequence-parallel", c.sequence_parallel, p.sequence_parallel) &&
           same("recompute", recompute_named(c.recompute), p.recompute) &&
           same("micro-batch", c.micro_batch, p.B);
}

// The options of all plans of a run with these flags. The first one trains.
inline std::vector<PlanOptions> plans_of(const Config& c, const Shape& shape) {
    // Make a run that has only flags and a shape: the plans depend on nothing else.
    Run run;
    run.config = c;
    run.shape = shape;
    run.context_length = shape.P;
    return choose_plans(run);
}

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
    int micro_batches = 0; // of the whole step
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
    r.micro_batches = options.micro_batches;
    r.runs = layout_runs(layout, r.model, options, *q.steps);

    // Make those of what runs before, too.
    r.before = before_runs(before_steps(c, options, q.shape, q.teacher), layout, *q.steps);
    r.teacher_C = double(q.teacher.C);
    return r;
}

// About as many actions as its plans have: two short runs. Interleaved groups of unequal sizes want
// longer ones (settled()).
inline double rehearsal_actions(const PlanQuestion& q, const Proposal& p) {
    int m = int(q.config.batch_tokens / (int64_t(p.B) * q.config.seq * p.dp));
    Layout layout;
    layout.pp.size = p.pp;
    layout.pipeline = p.pipeline;
    double longer = std::min(m, settled(layout, m).few) / (3.0 * p.pp);
    return 15.0 * p.pp * double(q.shape.L) * std::max(1.0, longer);
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
    t.wrong = step.stuck;
    if (!t.wrong.empty()) return t;
    t.seconds = step.seconds;
    t.parts = step.parts;
    return t;
}

// The rows of the memory table, in their order.
inline const std::vector<const char*>& memory_rows() {
    static const std::vector<const char*> rows = {
        "weights",           "codes of fp8 weights", "gradients", "master weights",
        "optimizer moments", "mean of weights",      "constants", "key/value cache",
        "activations",       "teacher",
    };
    return rows;
}

// The row that a kind of data belongs to. Maxima of 8-bit products stand with the codes.
inline const char* memory_row(Kind kind) {
    switch (kind) {
    case Kind::WEIGHT: return "weights";
    case Kind::AMAX:
    case Kind::MAXIMA:
    case Kind::CAST: return "codes of fp8 weights";
    case Kind::GRAD:
    case Kind::GRAD_TIED: return "gradients";
    case Kind::MASTER: return "master weights";
    case Kind::STATE: return "optimizer moments";
    case Kind::EMA: return "mean of weights";
    case Kind::CACHE: return "key/value cache";
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
        return double(bytes_of_teacher<T>(run, {train}, rank, where));
    };
    double placed = bytes(few);
    return m == few ? placed : placed + (m - few) * (placed - bytes(few - 1));
}

// Micro-batches of a plan that is placed whole, times a rank's layers or a pipeline's ranks: more
// take too long.
constexpr int MOST_PLACED_WHOLE = 2000;

// Place the plans of one pipeline rank, and keep its bytes if they are the most so far. A pipeline
// that is full repeats itself, so of many micro-batches only a few are placed; each of the others
// adds the bytes of its tokens and its loss. A longer plan has other holes: `whole` places all
// micro-batches of a step, or as many as MOST_PLACED_WHOLE allows.
template <typename T, typename S>
void place_proposal(const PlanQuestion& q, Trial& t, int pp_rank, bool whole, S where) {
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
    int m = options[0].micro_batches;
    int few = settled(layout, m).few + layout.pp.size;
    int each_takes = std::max(layout.pp.size, int(q.shape.L) / layout.pp.size);
    if (whole) few = std::max(few, MOST_PLACED_WHOLE / each_takes);
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
    double bytes = double(bytes_here(arena, where));
    bytes += double(std::max(0, m - few)) * double(each);
    double host = is_here(Tier::HOST, where) ? 0 : double(arena.memory[int(Tier::HOST)].bytes);
    t.host = std::max(t.host, host);

    // Add a hundredth for several chunks: in the longer plan first fit finds other holes, and tests
    // see differences of this size.
    if (layout.chunks > 1 && m > few) bytes *= 1.01;
    if (t.bytes < INFINITY && bytes + teacher <= t.bytes)
        return;

    // Keep the bytes by row: this rank is the fullest so far.
    t.bytes = bytes + teacher;
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

// Whether there is room for a trial, as far as it was placed.
inline bool has_room(const PlanQuestion& q, const Trial& t) {
    return t.bytes <= q.room && t.host <= q.host_room;
}

// Whether a trial fits. Only the rank that the estimate calls the fullest is placed.
template <typename T, typename S>
bool fits(const PlanQuestion& q, Trial& t, S where) {
    if (t.bytes == INFINITY)
        place_proposal<T>(q, t, t.proposal.estimate.fullest, false, where);
    return has_room(q, t);
}

// Whether a trial fits on all ranks, whichever is the fullest, with the micro-batches of the whole
// step (up to MOST_PLACED_WHOLE). Of ranks with layers alike the first is placed, which has most in
// flight. A later one may have more weight halves that wait, or more of what runs before a step:
// then each is placed.
template <typename T, typename S>
bool fits_everywhere(const PlanQuestion& q, Trial& t, S where) {
    Config c = q.config;
    set_proposal(c, t.proposal);
    config_check(c, q.shape);
    Layout layout = choose_layout(c, q.shape);
    Model model = make_model(with_logits(q.shape, where), layout);
    PlanOptions options = plans_of(c, q.shape)[0];
    bool each = layout.pipeline == Pipeline::ZERO_BUBBLE ||
                !before_steps(c, options, q.shape, q.teacher).empty();
    t.bytes = INFINITY;
    t.host = 0;
    for (const AlikeRanks& alike : alike_ranks(layout, model, kinds_of_layers(model)))
        for (int rank : alike.ranks) {
            place_proposal<T>(q, t, rank, true, where);
            if (!each) break;
        }
    return has_room(q, t);
}

} // namespace llmc
