// teacher.h - a frozen model beside the trained one: distillation's teacher - arXiv:1503.02531
//   1. FORWARD   before a step the teacher evaluates the step's batch, micro-batch by micro-batch,
//                and keeps the output of its last norm
//   2. TRAIN     the student's head makes the teacher's logits beside its own, chunk by chunk
//                (head.h), so all logits never exist at once; distill.cuh compares them
//   Layout: the student's, so a rank's head has the teacher's norm of its own rows, and both tables
//           are cut alike over tensor-parallel ranks. The teacher's layers are split over the
//           stages anew. Data-parallel ranks each hold it whole, whatever ZeRO shards.
//   Cost: the teacher's forward pass, and its head's product twice. Memory: its weights, what an
//         evaluation takes, and C elements for each row of a step.
#pragma once
#include "../action.h"
#include "../arena.h"
#include "../head.h"
#include "../io/config.h"
#include "../io/config_check.h"
#include "../io/files.h"
#include "../io/plan_flags.h"
#include "../layers.h"
#include "../layout.h"
#include "../model.h"
#include "../ops/memory.h"
#include "../ops/types.h"
#include "../run/run.h"
#include "../sharding.h"
#include "../step.h"
#include "../comm/text.h"
#include "../trainer.h"
#include "../transfers.h"
#include "companion.h"

namespace llmc {

// The teacher of a rank.
template <typename T, typename S> struct Teacher {
    Trainer<T, S> t;
    TeacherHead head = {};          // what the student's head reads
    unsigned char* norms = nullptr; // (micro-batches,N,C) on the stage with the head
    size_t norm_bytes = 0;          // of all micro-batches
};

// Place the teacher's plan in memory. Nothing is allocated.
template <typename T, typename S>
void teacher_place(Teacher<T, S>& teacher, const Shape& shape, const PlanOptions& train,
                   const Layout& layout) {
    Trainer<T, S>& t = teacher.t;
    trainer_place(t, shape, {teacher_options(train)}, teacher_layout(layout));
    bool has_head = is_mine(t.layout, t.model, t.model.head());
    size_t rows = size_t(train.micro_batches) * t.plans[0].rows();
    teacher.norm_bytes = has_head ? rows * shape.C * sizeof(T) : 0;
}

// Copy what the head's norm gave for a micro-batch, and remember the head for the student.
template <typename T, typename S>
void keep_norm(Teacher<T, S>& teacher, const Action& a) {
    Trainer<T, S>& t = teacher.t;
    if (a.op != Op::F || a.layer != t.model.head())
        return;
    size_t bytes = t.plans[0].rows() * t.model.shape.C * sizeof(T);
    copy_rows(teacher.norms + size_t(a.micro) * bytes, bytes, head_acts(t).norm, bytes, bytes, 1,
              t.ctx.where);

    // Remember where the head's weights lie; its scratch is given back in teacher_forward().
    teacher.head.blas = &t.ctx.blas;
    with_head(t, [&](const auto& w) { teacher.head.lm_head = w.lm_head; });
}

// Allocate the teacher. Its weights are loaded afterwards, as a trainer's are.
template <typename T, typename S>
void teacher_allocate(Teacher<T, S>& teacher) {
    Trainer<T, S>& t = teacher.t;
    trainer_allocate(t);
    init_constants(t);
    size_t bytes = std::max(teacher.norm_bytes, size_t(1)); // a stage without the head: one
    teacher.norms = static_cast<unsigned char*>(device_memory(bytes, t.ctx.where));
    teacher.head.norm = teacher.norms;
    teacher.head.C = t.model.shape.C;
    teacher.head.softcap = t.model.shape.loss.softcap;
    teacher.head.root_softcap = t.model.shape.loss.root_softcap;
    t.hooks.after = [&teacher](const Action& a) { keep_norm(teacher, a); };
}

// Free it. Nothing may still run.
template <typename T, typename S>
void teacher_free(Teacher<T, S>& teacher) {
    device_free(teacher.norms, teacher.norm_bytes, teacher.t.ctx.where);
    trainer_free(teacher.t);
}

// Let the teacher read the batch that the student's next step trains on, and point the student's
// head at what it made of it. All ranks call.
template <typename T, typename S>
void teacher_forward(Teacher<T, S>& teacher, Trainer<T, S>& student) {
    // Read the same samples, with the same documents.
    Trainer<T, S>& t = teacher.t;
    t.data.window = student.data.window;
    t.data.cursor = student.data.cursor;
    t.data.samples_end = student.data.samples_end;
    t.data.document_end = student.data.document_end;
    run_plan(t, 0);

    // A later action may have taken the head's scratch for its own: give it back.
    if (teacher.head.blas) {
        int head = t.model.head(), end = t.at; // the last action
        while (t.at > 0 && t.plans[0].actions[t.at].layer != head)
            t.at--;
        bind_scratch(t, head);
        t.at = end;
    }
    student.ctx.teacher = &teacher.head;
}

// ----------------------------------------------------------------------------
// --teacher: the teacher of a run, chosen, placed and loaded
//   It computes in the run's element type and layout, and must have the run's vocabulary: a
//   distribution over other tokens says nothing about these.

// Whether this run trains beside a teacher.
inline bool has_teacher(const Run& run) {
    return run.config.loss == "distill" && run.plans.train >= 0;
}

// The shape of the teacher that the flags name; empty without one.
inline Shape choose_teacher_shape(const Run& run) {
    const std::string& name = run.config.teacher;
    if (!wants_teacher(run.config) || name.empty())
        return {};
    bool there = !companion_config(run, name).out.empty() || file_type(name);
    LLMC_USER_CHECK(there,
                    "--teacher %s: is neither a Hugging Face folder, a .bin nor a run's folder",
                    printable(name).c_str());
    return choose_companion(run, "--teacher", name);
}

// Choose the teacher, and compare it with the model.
inline void choose_teacher(Run& run) {
    const Config& c = run.config;
    if (!wants_teacher(c)) return;
    run.companions.teacher = choose_teacher_shape(run);
    or_die(check_teacher(c, run.shape, run.companions.teacher));
    or_die(check_same_tokens(run, run.companions.teacher, "--teacher", c.teacher));
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
    load_companion(run, teacher->t, run.config.teacher);
    say(run, "teacher: ", printable(run.config.teacher), ", ", parameter_count(teacher->t.model),
        " parameters, frozen\n");
    t.hooks.before = [teacher, &t] { teacher_forward(*teacher, t); };
}

} // namespace llmc
