// plan_run.h - --plan auto and --fit of a run: the questions that the planner answers
//   The planner knows flags, shapes and machines. What only the program knows, it asks for: a
//   model's shape by its name, the plans of a run, and a teacher's bytes (RunFacts, evaluate.h).
#pragma once
#include "../action.h"
#include "../comm/comm.h"
#include "../io/config.h"
#include "../io/config_check.h"
#include "../io/files.h"
#include "../io/machine.h"
#include "../io/machines.h"
#include "../io/model_shape.h"
#include "../model.h"
#include "../ops/cuda_common.h"
#include "../ops/gpu.h"
#include "../ops/types.h"
#include "../planner/auto_plan.h"
#include "../planner/evaluate.h"
#include "../planner/machine_here.h"
#include "../planner/plan_search.h"
#include "../comm/text.h"
#include "choose.h"
#include "limits.h"
#include "run.h"

namespace llmc {

// The options of all plans of a run with these flags. The first one trains.
inline std::vector<PlanOptions> plans_of(const Config& c, const Shape& shape) {
    // Make a run that has only flags and a shape: the plans depend on nothing else.
    Run run;
    run.config = c;
    run.shape = shape;
    run.samples.context_length = shape.P;
    return choose_plans(run);
}

// Answer what the planner asks of a run. A program without teachers says nothing of them.
inline RunFacts run_facts(const Run& like) {
    RunFacts facts;
    facts.shape = [](const Config& c) { return choose_shape(c); };
    facts.plans = plans_of;
    facts.teacher = [like](const Config& c) {
        Run run = like;
        run.config = c;
        return run.companions.teacher_of ? run.companions.teacher_of(run) : Shape();
    };
    facts.teacher_bytes = [like](const Config& c, const Shape& teacher, const PlanOptions& train,
                                 int rank) {
        Run run = like;
        run.config = c;
        run.companions.teacher = teacher;
        run.plans.train = 0;
        return run.companions.teacher_bytes ? run.companions.teacher_bytes(run, {train}, rank) : 0;
    };
    return facts;
}

// Bytes that each rank may take: --memory, or what this machine has left, or most of a card.
template <typename S> double room_asked(const Run& run, const Machine& machine, S where) {
    // A card's memory is shared by the threads of a process.
    const Config& c = run.config;
    double card = room_of_card(machine) / sharers_of_card(c);
    if (c.memory > 0) return c.memory * GIB;
    if (c.explain) return card;

    // In a run take the least room that any rank finds, so that all ranks choose the same. A GPU of
    // the same name may have less memory than its row.
    size_t mine = memory_share(run, where) / size_t(c.local_ranks);
    double least = double(least_of_ranks(run.world, mine));
    return std::is_same_v<S, Cpu> ? least : std::min(card, least);
}

// Bytes of the host's memory for each rank of a run on GPUs: an equal part of what the machine that
// has least has left, or of what a question's has. A twentieth is for all else that runs there.
// `each`: processes of a machine.
template <typename S>
double host_room_asked(const Run& run, const Machine& machine, int each, S) {
    const Config& c = run.config;
    if (c.explain)
        return room_of_host(machine) / sharers_of_card(c);
    if (std::is_same_v<S, Cpu>) return INFINITY;
    size_t mine = memory_left(Cpu{}) / size_t(each * c.local_ranks);
    return 0.95 * double(least_of_ranks(run.world, mine));
}

// The question that a command line asks, the same on all ranks. Without --batch-tokens the global
// batch is one micro-batch for each rank.
template <typename S> PlanQuestion question_of(const Run& run, S where) {
    // Take the model, the machine, the ranks and the room.
    PlanQuestion q;
    q.run = run_facts(run);
    const Config& c = run.config;
    q.shape = run.shape;
    if (run.complete_shape) run.complete_shape(c, q.shape);
    q.teacher = q.run.teacher(c);
    q.machine = machine_asked(c, "--plan auto", where);
    int each = c.gpus ? 0 : ranks_of_each(find_machines(run.world));
    if (each && run.world.size > 1) q.machine.cards = each; // the nodes that are there
    q.gpus = c.gpus ? c.gpus : std::max(run.world.size, c.local_ranks);
    q.room = room_asked(run, q.machine, where);
    q.host_room = host_room_asked(run, q.machine, each ? each : run.world.size, where);

    // Check trials as --explain would: the ranks of a layout need not be there.
    q.config = c;
    q.config.plan = "none";
    q.config.gpus = 0;
    q.config.local_ranks = 1;
    q.config.given.erase("local-ranks");
    q.config.explain = true;
    q.config.memory = 0;

    // Fill in what the command line leaves out.
    if (c.machine.empty()) q.config.machine = q.machine.name;
    if (c.seq == 0) q.config.seq = int(std::min(run.shape.P, size_t(256)));
    if (c.batch_tokens == 0)
        q.config.batch_tokens = int64_t(c.micro_batch) * q.config.seq * q.gpus;
    return q;
}

// Answer --plan auto: print the answer, and set the run's flags by it. Returns whether there is
// something to run; with --explain there is not. If no layout is allowed, or none fits, the program
// ends with an error that says what would help.
template <typename T, typename S> bool plan_run(Run& run, S where) {
    // Find the best layouts.
    Config& c = run.config;
    PlanQuestion q = question_of(run, where);
    sizes_of_gpu = c.explain && !q.machine.device.empty();
    if (c.gpus && c.machine.empty())
        note(run, concat("--gpus ", c.gpus, " without --machine plans for ", q.machine.name,
                         ": name one, as --machine h100"));
    Answer a = answer_question<T>(q, where);
    if (a.listed == 0) or_die(refuse_ranks(q, a.why));
    if (a.best.empty()) or_die(refuse_room<T>(q, a, where));

    // Print the answer. A run prints it too, so that it can be repeated without the planner.
    Trial yours;
    std::string refused;
    bool named = c.explain && named_layout<T>(q, &yours, where, &refused);

    // The user may know a faster one than was tried.
    if (named && has_room(q, yours) && yours.seconds < a.best[0].seconds) {
        a.best.insert(a.best.begin(), yours);
        if (a.best.size() > SHOWN) a.best.pop_back();
        a.chosen = choose_trial(a.best);
    }
    std::string text = answer_text(c, q, a, named ? &yours : nullptr);
    say(run, refused, text);
    if (c.explain) return false;

    // Set the flags: from here on the run is as if the user had given them.
    take_layout(c, a.best[a.chosen].config);
    c.batch_tokens = q.config.batch_tokens;
    check_same(run.world, "what --plan auto chose", layout_flags_text(a.best[a.chosen].config));
    return true;
}

// Answer --plan auto in the element type of --precision, on which bytes and times depend.
template <typename S> bool plan_run_as(Run& run, S where) {
    return with_precision(run.config, [&](auto type) {
        return plan_run<typename decltype(type)::type>(run, where);
    });
}

// With --plan auto, choose the layout before anything else depends on it. Returns false if the user
// only asked for the plan (--explain), and nothing is to run.
inline bool plan_ahead(Run& run) {
    or_die(check_planning(run.config));
    if (run.config.plan == "none") return true;
#if LLMC_KERNELS
    bool there = no_gpu_because().empty();
    if (run.config.device == "cuda" || (run.config.device == "auto" && there))
        return plan_run_as(run, cudaStream_t{});
#endif
    return plan_run_as(run, Cpu{});
}

} // namespace llmc
