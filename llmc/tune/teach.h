// teach.h - --teacher: the model that --loss distill learns from, chosen, placed and loaded
//   The teacher computes in the run's element type and layout (../teacher.h). It must have the
//   run's vocabulary: a distribution over other tokens says nothing about these.
#pragma once
#include "../action.h"
#include "../arena.h"
#include "../io/config.h"
#include "../io/config_check.h"
#include "../io/files.h"
#include "../io/model_shape.h"
#include "../io/plan_flags.h"
#include "../layout.h"
#include "../model.h"
#include "../ops/fp8.cuh"
#include "../ops/types.h"
#include "../run/account.h"
#include "../run/run.h"
#include "../sharding.h"
#include "../text.h"
#include "../trainer.h"
#include "../transfers.h"
#include "second_model.h"
#include "teacher.h"

namespace llmc {

// Whether this run trains beside a teacher.
inline bool has_teacher(const Run& run) {
    return run.config.loss == "distill" && run.plans.train >= 0;
}

// The shape of the teacher that the flags name; empty without one.
inline Shape choose_teacher_shape(const Run& run) {
    const Config& c = run.config;
    if (!wants_teacher(c) || c.teacher.empty())
        return {};

    // Refuse what is no model of its own.
    Config d = second_config(run, c.teacher);
    bool there = !d.out.empty() || file_type(d.model);
    LLMC_USER_CHECK(there,
                    "--teacher %s: is neither a Hugging Face folder, a .bin nor a run's folder",
                    printable(c.teacher).c_str());
    LLMC_USER_CHECK(!has_adapters(d) && d.add_tokens.empty(),
                    "--teacher %s: its checkpoint has adapters or added tokens, and stands on "
                    "another model: --export it, with --merge, and give the folder",
                    printable(c.teacher).c_str());

    // Read its shape. It computes in the model's type.
    Shape shape = choose_shape(d, "--teacher");
    shape.fp8.kind = Fp8::NONE;
    return shape;
}

// Choose the teacher, and compare it with the model.
inline void choose_teacher(Run& run) {
    const Config& c = run.config;
    if (!wants_teacher(c)) return;
    run.companions.teacher = choose_teacher_shape(run);
    or_die(check_teacher(c, run.shape, run.companions.teacher));
    Config d = second_config(run, c.teacher);
    or_die(check_same_tokens(run, d, run.companions.teacher, "--teacher", c.teacher, "teacher"));
}

// Place the teacher of a rank beside its training plan.
template <typename T, typename S>
void place_teacher(const Run& run, const std::vector<PlanOptions>& plans, int rank,
                   Teacher<T, S>& teacher) {
    Layout layout = layout_at(choose_layout(run.config, run.companions.teacher), rank);
    teacher_place(teacher, run.companions.teacher, plans[size_t(run.plans.train)], layout);
}

// Bytes that the teacher takes of the memory that holds the model; 0 without one.
template <typename T, typename S>
size_t bytes_of_teacher(const Run& run, const std::vector<PlanOptions>& plans, int rank, S where) {
    if (!has_teacher(run)) return 0;
    Teacher<T, S> teacher;
    teacher.t.ctx.where = where;
    place_teacher(run, plans, rank, teacher);
    return bytes_here(teacher.t.arena, where) + teacher.norm_bytes;
}

// The same in the element type of --precision.
inline size_t teacher_bytes(const Run& run, const std::vector<PlanOptions>& plans, int rank) {
    return with_precision(run.config, [&](auto type) {
        return bytes_of_teacher<typename decltype(type)::type>(run, plans, rank, Cpu{});
    });
}

// Let a run have a teacher: before it is planned, and in memory beside its plans.
inline void take_teacher(Run& run) {
    run.companions.teacher_of = choose_teacher_shape;
    run.companions.teacher_bytes = teacher_bytes;
    if (wants_teacher(run.config))
        run.companions.all.push_back({"teacher", "its weights, an evaluation's memory, C elements "
                                      "a row of the step", Tier::DEVICE, teacher_bytes});
}

// Load the teacher, if there is one, and let each step ask it first; it lives as long as `t`.
// All ranks call, for loading is shared.
template <typename T, typename S>
void open_teacher(Run& run, Trainer<T, S>& t, const std::vector<PlanOptions>& plans) {
    if (!has_teacher(run)) return;
    Spend spend(run.clock.account, Work::LOAD);

    // Place and allocate it. Its heads may be shared by other ranks, so it has groups of its own.
    auto drop = [](Teacher<T, S>* teacher) {
        teacher_free(*teacher);
        delete teacher;
    };
    std::shared_ptr<Teacher<T, S>> teacher(new Teacher<T, S>, drop);
    teacher->t.ctx.where = t.ctx.where;
    place_teacher(run, plans, run.world.rank, *teacher);
    const Layout& layout = teacher->t.layout;
    teacher->t.comms =
        make_comms(run.world, layout, ranks_of_kv_head(layout, teacher->t.model));
    teacher_allocate(*teacher);

    // Load its weights.
    load_second(run, teacher->t, second_config(run, run.config.teacher));
    if (is_first_rank(run))
        printf("teacher: %s, %zu parameters, frozen\n", printable(run.config.teacher).c_str(),
               parameter_count(teacher->t.model));
    t.hooks.before = [teacher, &t] { teacher_forward(*teacher, t); };
}

} // namespace llmc
