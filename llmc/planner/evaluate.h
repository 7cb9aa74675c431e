// evaluate.h - a candidate is a configuration: why it is refused, or its seconds and bytes
//   1. CHECKED  config_check() allows it
//   2. PLACED   the rank that is probably the fullest has room, with a few micro-batches
//   3. TIMED    simulated: the time of a step, by parts; with what runs before it
//   4. SURE     every rank that may be the fullest has room, with all micro-batches
//   evaluate() goes as far as it is asked, and stops where a configuration fails. It remembers what
//   it has found. --plan auto and --fit differ in nothing but the configurations that they ask for.
#pragma once
#include "../action.h"
#include "../arena.h"
#include "../family.h"
#include "../head.h"
#include "../io/config.h"
#include "../io/config_check.h"
#include "../io/files.h"
#include "../io/machine.h"
#include "../io/plan_flags.h"
#include "../layout.h"
#include "../model.h"
#include "../offload.h"
#include "../ops/types.h"
#include "../pipeline.h"
#include "../plan.h"
#include "../sizes.h"
#include "../comm/text.h"
#include "cost.h"
#include "layer_cost.h"
#include "lower_bound.h"
#include "predict.h"
#include "simulator.h"
#include <functional>
#include <memory>

namespace llmc {

// The facts of a run that only the program knows.
struct RunFacts {
    std::function<Shape(const Config&)> shape;   // of --model
    std::function<Shape(const Config&)> teacher; // of --teacher; empty without one
    // The options of all its plans. The first one trains.
    std::function<std::vector<PlanOptions>(const Config&, const Shape&)> plans;
    // Bytes that a rank's teacher takes beside a training plan.
    std::function<size_t(const Config&, const Shape& teacher, const PlanOptions& train, int rank)>
        teacher_bytes;
};

// How far an evaluation goes.
enum class Depth { CHECKED, PLACED, TIMED, SURE };

// A configuration, and what is known of it. Seconds and bytes are infinite until they are computed.
struct Trial {
    Config config;
    double seconds = INFINITY, bytes = INFINITY; // of a step; of the fullest rank
    double host = 0;                             // its bytes in the host's memory, if that is apart
    Times parts = {};                            // `seconds` by part, the mean over ranks
    double teacher = 0;                          // a teacher's bytes of these
    std::string wrong = "";                      // why it is refused; "": it is allowed
    Depth depth = Depth::CHECKED;                // how far it has been evaluated
};

// The question: the flags, the model, the machine, how many ranks, and how much room each has.
struct PlanQuestion {
    RunFacts run;
    Config config; // with a batch and a sequence length, and checked as by --explain
    Shape shape;
    Machine machine;
    Shape teacher = {}; // that --teacher names
    int gpus = 1;    // ranks
    double room = 0; // bytes that each rank may take
    double host_room = INFINITY; // and of the host's memory beside its GPU
    bool named = false; // keep to the values that the user's flags name (has_named())
    std::shared_ptr<KnownSteps> steps = std::make_shared<KnownSteps>(); // of all trials
    typedef std::map<std::string, Trial> KnownTrials;
    std::shared_ptr<KnownTrials> known = std::make_shared<KnownTrials>(); // by config_key()
};

// ----------------------------------------------------------------------------
// a candidate is a configuration

// The flags that make a layout, in the order in which a command line has them.
inline const std::vector<const char*>& layout_flags() {
    static const std::vector<const char*> names = {
        "dp",  "tp",   "sequence-parallel", "cp",  "cp-method",  "pp",        "pipeline", "chunks",
        "ep",  "etp",  "zero",              "zero-group", "hpz", "grid-order", "recompute",
        "masters", "offload", "micro-batch"};
    return names;
}

// A layout's flags, as a shell takes them. Defaults are left out, and so is what the user has said
// of masters and offload.
inline std::string layout_flags_text(const Config& c) {
    static const Config plain;
    std::string text;
    for (std::string name : layout_flags()) {
        const Field& field = find_flag(name)->field;
        std::string value = field_text(c, field);
        bool always = name == "dp" || name == "micro-batch";
        bool usual = !always && value == field_text(plain, field);
        bool open = name == "masters" || name == "offload";
        bool theirs = open && was_given(c, name);
        bool group = name == "zero-group" && c.zero == 0;
        if (usual || theirs || group) continue;
        bool on = name == "sequence-parallel"; // it takes no value
        text += concat(text.empty() ? "--" : " --", name);
        if (!on) text += " " + value;
    }
    return text;
}

// Give a configuration another one's layout.
inline void take_layout(Config& to, const Config& from) {
    auto take = [&](auto member) { to.*member = from.*member; };
    for (const char* name : layout_flags())
        std::visit(take, find_flag(name)->field);
}

// Whether a candidate has the values that the user's flags name, of what the planner chooses.
// --recompute auto counts as full. any: receives whether they name one.
inline bool has_named(const Config& user, const Config& c, bool* any = nullptr) {
    std::vector<std::string> names(planned_flags().begin(), planned_flags().end());
    names.push_back("micro-batch");
    bool all = true;
    for (const std::string& name : names) {
        if (!was_given(user, name)) continue;
        if (any) *any = true;
        const Field& field = find_flag(name)->field;
        bool levels = name == "recompute" && recompute_of(user) == recompute_of(c);
        all &= levels || field_text(user, field) == field_text(c, field);
    }
    return all;
}

// How much a user has to know to run a layout. An axis counts ten, because it brings messages of
// its own. A row that leaves the card counts four: it needs another memory, and the way there. Any
// other technique counts one, a higher level of ZeRO or recomputation more.
inline int techniques(const Config& c) {
    int axes = (c.tp > 1) + (c.pp > 1) + (c.cp > 1) + (c.ep > 1);
    int orders = (c.grid_order != "tp-pp-dp") + (c.cp_method != "gather");
    int groups = (c.zero_group > 0) + (c.hpz > 1) + has_whole_experts(c);

    // Rows that leave the device.
    int rows = 0;
    for (const OffloadRow& row : OFFLOAD_TABLE)
        rows += offloads(c, row.name);
    return 10 * axes + c.zero + groups + orders + c.sequence_parallel + (c.chunks > 1) +
           (c.pipeline != "1f1b") + int(recompute_of(c)) +
           (c.masters == "remainder") + 4 * rows;
}

// A candidate's name among all that were evaluated: the flags that are not default.
inline std::string config_key(const Config& c) {
    static const Config plain;
    std::string key;
    for (const Flag& f : config_table()) {
        if (!*f.name) continue; // a heading
        std::string value = field_text(c, f.field);
        if (value != field_text(plain, f.field))
            key += concat(f.name, "=", value, "\n");
    }
    return key;
}

// The shape of a candidate's run: with new adapters, where its flags ask for them.
inline Shape shape_of(const PlanQuestion& q, const Config& c) {
    if (!c.lora || q.shape.tuned.adapters)
        return q.shape;
    Shape shape = q.shape;
    Adapters adapters;
    or_die(choose_adapters(make_model(shape), lora_options(c), &adapters));
    shape.tuned.adapters = std::make_shared<const Adapters>(adapters);
    return shape;
}

// A candidate's run: what its flags mean, for the first rank.
struct CandidateRun {
    Config config; // with what config_check() fills in
    Shape shape;
    Layout layout;
    std::vector<PlanOptions> options; // the first plan trains
};
inline CandidateRun run_of(const PlanQuestion& q, const Config& c) {
    CandidateRun run = {c, shape_of(q, c), {}, {}};
    config_check(run.config, run.shape);
    run.layout = choose_layout(run.config, run.shape);
    run.options = q.run.plans(run.config, run.shape);
    return run;
}

// ----------------------------------------------------------------------------
// time

// About as many actions as its plans have: two short runs. Interleaved groups of unequal sizes want
// longer ones (settled()).
inline double rehearsal_actions(const PlanQuestion& q, const Config& c) {
    int m = micro_batches_of(c);
    Layout layout;
    layout.pp.size = c.pp;
    layout.pipeline = choose_pipeline(c, m, nullptr);
    int few = std::min(m, settled(layout, m).few);
    double longer = few / (3.0 * c.pp);
    return 15.0 * c.pp * double(q.shape.L) * std::max(1.0, longer);
}

// Simulate a step of a configuration that was checked, and keep its time.
template <typename T, typename S>
void simulate_trial(const PlanQuestion& q, Trial& t, S where) {
    CandidateRun run = run_of(q, t.config);
    Model model = make_model(with_logits(run.shape, where), run.layout);
    CostModel cost = run_costs<T>(q.machine, model, Cpu{});
    cost.teacher_C = double(q.teacher.C);
    ActionCost prices = action_cost(cost, model);
    StepTime step = simulate_layout(run.layout, model, run.options[0], prices, *q.steps);
    t.wrong = step.stuck;
    if (!t.wrong.empty()) return;

    // Add what runs before it.
    std::vector<BeforeStep> before = before_steps(run.config, run.options[0], run.shape, q.teacher);
    add_before(step, before_times<T>(q.machine, before, run.layout, *q.steps));
    t.seconds = step.seconds;
    t.parts = step.parts;
}

// ----------------------------------------------------------------------------
// memory

// Bytes of a teacher beside a rank's plans. Of many micro-batches a few are placed: each of the
// others adds as many bytes as the last of these.
inline double teacher_room(const RunFacts& run, const Config& c, const Shape& teacher,
                           PlanOptions train, int rank) {
    if (c.loss != "distill") return 0;
    int m = train.micro_batches;
    int few = std::min(m, 4);
    auto bytes = [&](int micro_batches) {
        train.micro_batches = micro_batches;
        return double(run.teacher_bytes(c, teacher, train, rank));
    };
    double placed = bytes(few);
    if (m == few) return placed;
    return placed + (m - few) * (placed - bytes(few - 1));
}

// Micro-batches of a plan that is placed whole, times a rank's layers or a pipeline's ranks: more
// take too long.
constexpr int MOST_PLACED_WHOLE = 2000;

// Place the plans of one pipeline rank, and keep its bytes if they are the most so far. A pipeline
// that is full repeats itself, so of many micro-batches only a few are placed; each of the others
// adds the bytes of its tokens and its loss. A longer plan has other holes: `whole` places all
// micro-batches of a step, or as many as MOST_PLACED_WHOLE allows.
template <typename T, typename S>
void place_trial(const PlanQuestion& q, Trial& t, int pp_rank, bool whole, S where) {
    CandidateRun run = run_of(q, t.config);
    std::vector<PlanOptions>& options = run.options;
    int rank = first_rank_of(run.layout, pp_rank);
    Layout layout = layout_at(run.layout, rank);
    Model model = make_model(with_logits(run.shape, where), layout);

    // Place as many micro-batches as the pipeline needs to settle.
    double teacher = teacher_room(q.run, run.config, q.teacher, options[0], rank);
    int m = options[0].micro_batches;
    int few = settled(layout, m).few + layout.pp.size;
    int each_takes = std::max(layout.pp.size, int(q.shape.L) / layout.pp.size);
    if (whole) few = std::max(few, MOST_PLACED_WHOLE / each_takes);
    options[0].micro_batches = std::min(m, few);
    std::vector<Plan> plans;
    for (const PlanOptions& o : options) {
        if (o.mode != Mode::TRAIN) {
            plans.push_back(make_plan(layout, model, o));
            continue;
        }
        const PerRank<ScheduleStep>& steps = q.steps->of(layout, o);
        plans.push_back(make_plan(layout, model, o, steps[pp_rank]));
    }
    Arena arena = place_plans<T>(plans, model, where);

    // Count the micro-batches that were left out.
    size_t input = plans[0].input_numbers() * sizeof(int);
    size_t each = round_up(input, ARENA_ALIGN) + ARENA_ALIGN;
    double bytes = double(bytes_here(arena, where));
    bytes += double(std::max(0, m - few)) * double(each);
    double host = is_here(Tier::HOST, where) ? 0 : double(arena.memory[int(Tier::HOST)].bytes);
    t.host = std::max(t.host, host);

    // Add a hundredth for several chunks: in the longer plan first fit finds other holes, and tests
    // see differences of this size.
    if (layout.chunks > 1 && m > few) bytes *= 1.01;
    if (t.bytes < INFINITY && bytes + teacher <= t.bytes)
        return;

    // This rank is the fullest so far.
    t.bytes = bytes + teacher;
    t.teacher = teacher;
}

// Whether there is room for a trial, as far as it was placed.
inline bool has_room(const PlanQuestion& q, const Trial& t) {
    return t.bytes <= q.room && t.host <= q.host_room;
}

// Ranks of a pipeline whose stages have layers of the same kinds, in the order of their first ones.
inline std::vector<std::vector<int>> alike_ranks(const Layout& layout, const Model& model) {
    LayerKinds kinds = kinds_of_layers(model);
    std::map<std::vector<size_t>, size_t> known;
    std::vector<std::vector<int>> all;
    for (int rank = 0; rank < layout.pp.size; rank++) {
        // List the kinds of its layers, each stage with an end.
        std::vector<size_t> layers;
        for (int s = rank; s < layout.stages(); s += layout.pp.size) {
            int end = first_layer_of(layout, model, s + 1);
            for (int l = first_layer_of(layout, model, s); l < end; l++)
                layers.push_back(kinds.of[size_t(l)]);
            layers.push_back(kinds.first.size());
        }

        // Add the rank to its like, or begin with a kind that is new.
        auto [entry, fresh] = known.insert({layers, all.size()});
        if (fresh) all.push_back({});
        all[entry->second].push_back(rank);
    }
    return all;
}

// Whether a trial fits on all ranks, whichever is the fullest, with the micro-batches of the whole
// step (up to MOST_PLACED_WHOLE). Of ranks with layers alike the first is placed, which has most in
// flight. A later one may have more weight halves that wait, or more of what runs before a step:
// then each is placed.
template <typename T, typename S>
bool fits_everywhere(const PlanQuestion& q, Trial& t, S where) {
    CandidateRun run = run_of(q, t.config);
    Model model = make_model(with_logits(run.shape, where), run.layout);
    bool each = run.layout.pipeline == Pipeline::ZERO_BUBBLE ||
                !before_steps(run.config, run.options[0], run.shape, q.teacher).empty();
    t.bytes = INFINITY;
    t.host = 0;
    for (const std::vector<int>& alike : alike_ranks(run.layout, model))
        for (int rank : alike) {
            place_trial<T>(q, t, rank, true, where);
            if (!each) break;
        }
    return has_room(q, t);
}

// ----------------------------------------------------------------------------
// all of it

// Evaluate a configuration, as far as `depth` says. fullest: the rank of the pipeline to place
// first. The result stays where it is.
template <typename T, typename S>
const Trial& evaluate(const PlanQuestion& q, const Config& c, Depth depth, S where,
                      int fullest = 0) {
    // Check it once.
    auto [entry, fresh] = q.known->try_emplace(config_key(c));
    Trial& t = entry->second;
    if (fresh) {
        t.config = c;
        t.wrong = check_with_teacher(t.config, q.shape, q.teacher);
        t.config = c;
    }

    // Go on from where the last evaluation ended.
    while (t.wrong.empty() && t.depth < depth) {
        bool placed = t.depth >= Depth::PLACED;
        if (placed && !has_room(q, t)) break;
        t.depth = Depth(int(t.depth) + 1);
        if (t.depth == Depth::PLACED)
            place_trial<T>(q, t, fullest, false, where);
        if (t.depth == Depth::TIMED)
            simulate_trial<T>(q, t, where);
        if (t.depth == Depth::SURE)
            fits_everywhere<T>(q, t, where);
    }
    return t;
}

} // namespace llmc
