// health.h - values that are not finite: in weights, in a step; and weights that are ruined
//   first_bad_weight    after a load and before a save: look at every weight of this rank
//   ruined_weights      before a save: try the weights on the text of the last step. Its loss must
//                       be low; on other text even a sound model may fail, one that has learned
//                       its text by heart. --save-async tries them by the next step's loss first
//   check_replicas      before a save, and every --verify-every steps: ranks that keep the same
//                       data compare it (replicas.h). A silent fault of a machine ends the run
//   check_ranks         every --verify-every steps: the same, and all ranks repeat a step, which
//                       must give the same on all of them
//   trace_bad_value     after a step that diverged: repeat the step, and look at each action's
//                       results as they are made. A step whose norm is not finite updates nothing,
//                       so the repeated step makes the same values, but for the order of sums.
#pragma once
#include "../action.h"
#include "../optimizer.h"
#include "../comm/comm.h"
#include "../family.h"
#include "../io/checkpoint.h"
#include "../io/config.h"
#include "../io/dataloader.h"
#include "../io/likelihood.h"
#include "../io/one_reader.h"
#include "../io/replicas.h"
#include "../layers.h"
#include "../model.h"
#include "../ops/memory.h"
#include "../ops/types.h"
#include "../parameters.h"
#include "../quantised.h"
#include "../step.h"
#include "../comm/text.h"
#include "../trainer.h"
#include "run.h"

namespace llmc {

// ----------------------------------------------------------------------------
// values

// The values of an array that are not finite: their count, the index of the first, and the range of
// the finite values.
struct BadValues {
    size_t count = 0, first = 0;
    double low = INFINITY, high = -INFINITY; // the range of the finite values
};

// Whether x (n) has a value that is not finite. There is no branch, so vector lanes do it: every
// save waits for this look at all weights.
template <typename P>
bool has_bad_value(const P* x, size_t n) {
    int bad = 0;
    #pragma omp parallel for simd reduction(| : bad) if (n > 100000)
    for (size_t i = 0; i < n; i++)
        bad |= !(std::fabs(to_acc(x[i])) <= std::numeric_limits<acc_t<P>>::max());
    return bad;
}

// Look for bad values among n elements, which read(to, at, count) copies to the host part by part.
template <typename P, typename F>
BadValues find_bad_values(size_t n, F read) {
    constexpr size_t PART = size_t(1) << 20; // elements
    std::vector<P> part(std::min(n, PART));
    BadValues bad;
    // Look quickly first. Nobody asks for the range of values if all are finite.
    bool any = false;
    for (size_t at = 0; at < n && !any; at += PART) {
        size_t count = std::min(PART, n - at);
        read(part.data(), at, count);
        any = has_bad_value(part.data(), count);
    }
    if (!any) return bad;

    // Count the bad values, and find the range of the others.
    for (size_t at = 0; at < n; at += PART) {
        size_t count = std::min(PART, n - at);
        read(part.data(), at, count);
        for (size_t i = 0; i < count; i++) {
            double value = double(to_acc(part[i]));
            if (std::isfinite(value)) {
                bad.low = std::min(bad.low, value);
                bad.high = std::max(bad.high, value);
            } else if (bad.count++ == 0) {
                bad.first = at + i;
            }
        }
    }
    return bad;
}

// Look for bad values in an array x (n), in the memory of `where`.
template <typename P, typename S>
BadValues find_bad_values(const P* x, size_t n, S where) {
    return find_bad_values<P>(n, [=](P* to, size_t at, size_t count) {
        copy_out(to, x + at, count * sizeof(P), where);
    });
}

// "ffn_act: 3 of 4096 values are not finite, the first at 17; finite ones span -2.1 to 3e38"; "":
// all n are finite.
inline std::string bad_values_text(const std::string& name, const BadValues& bad, size_t n) {
    if (bad.count == 0) return "";
    std::string others =
        bad.count == n ? "" : concat("; finite ones span ", bad.low, " to ", bad.high);
    return concat(name, ": ", bad.count, " of ", n, " values are not finite, the first at ",
                  bad.first, others);
}

// Look for bad values in a frozen weight (quantised.h). A vector is kept as values. A matrix is
// kept as integer codes, which cannot express infinity: one float beside them is not finite if a
// value of the matrix was not.
template <typename T, typename S>
BadValues find_bad_frozen(const Trainer<T, S>& t, const Parameter& p) {
    Stored stored = t.plans[0].stored;
    auto* base = address<const unsigned char>(t, {Kind::WEIGHT, p.bucket});
    if (!base) return {};
    StoredPlace place = stored_place<T>(stored, t.model, p.bucket, &p);
    StoredRange kept = stored_range<T>(stored, t.layout, t.model, p.bucket);

    // Look at the part of it in this rank's shard.
    bool matrix = is_narrow(stored, t.model, p);
    size_t at = !matrix ? place.codes : stored == Stored::NF4 ? place.table : place.absmax;
    size_t bytes = matrix ? sizeof(float) : p.local_elements() * sizeof(T);
    size_t from = std::max(at, kept.first);
    size_t to = std::min(at + bytes, kept.first + kept.count);
    if (from >= to) return {};

    // Look at one number of a matrix, or at all elements of a vector.
    const unsigned char* here = base + (from - kept.first);
    const float* mark = reinterpret_cast<const float*>(here);
    const T* values = reinterpret_cast<const T*>(here);
    if (matrix)
        return find_bad_values(mark, 1, t.ctx.where);
    return find_bad_values(values, (to - from) / sizeof(T), t.ctx.where);
}

// Describe the first weight of this rank that is not finite; "": all are finite.
template <typename T, typename S>
std::string first_bad_weight(const Trainer<T, S>& t) {
    for (const Parameter& p : t.model.parameters) {
        Data weight = {Kind::WEIGHT, p.bucket};
        KeptRange range = kept_range(t, weight, p);
        bool frozen = is_narrow(t.plans[0].stored, t.model, p.bucket);
        if (!range.count && !frozen) continue;

        // Look at the frozen weight's mark, or at the values themselves, which may be offloaded.
        auto read = [&](T* to, size_t at, size_t count) {
            read_kept(t, to, weight, range.at + at, count);
        };
        BadValues bad = frozen ? find_bad_frozen(t, p) : find_bad_values<T>(range.count, read);
        size_t all = frozen ? p.local_elements() : range.count;
        LLMC_TRY(bad_values_text(p.name, bad, all));
    }
    return "";
}

// End the run if a weight is not finite: no step can use it, and the step's own error would name
// the divergence and not its cause. A run that does not train prints where its weights come from.
template <typename T, typename S>
void check_weights(const Run& run, const Trainer<T, S>& t) {
    std::string wrong = first_error(run.world, first_bad_weight(t));
    if (!wrong.empty())
        wrong = run.health.weights + ": " + wrong + ": these weights are ruined, take others";
    or_die_on_all_ranks(run, wrong);
    if (run.plans.train < 0 && is_first_rank(run))
        printf("weights: %s\n", run.health.weights.c_str());
}

// The end of an error message: the hint that --resume goes on, if there is a checkpoint.
inline std::string resume_hint(const Run& run) {
    bool saved = !run.config.out.empty() && !checkpoint_steps(run.config.out).empty();
    return saved ? "; --resume goes on from the last checkpoint" : "";
}

// End the run if ranks that should keep the same data differ: no later step mends that, and a
// checkpoint would preserve it. A replay of the step then shows whether a rank still computes wrong
// values, or only its memory was changed.
template <typename T, typename S>
void check_replicas(const Run& run, Trainer<T, S>& t) {
    std::string wrong = replicas_differ(t);
    if (wrong.empty()) return;

    // Replay the step from equal weights. One data-parallel rank has no twin to compare with, and
    // with expert parallelism none has.
    std::string who = run.health.replay(true);
    bool twins = run.layout.dp.size > 1 && run.layout.ep == 1;
    bool alike = twins && who.empty();
    if (alike) who = "a replay of the step is the same on all ranks, as if memory had failed";
    or_die_on_all_ranks(run, concat("step ", run.step, ": ", wrong, who.empty() ? "" : "; ", who,
                                    ": suspect that machine, and leave it out", resume_hint(run)));
}

// Run check_replicas(), and check that all ranks compute the same from one batch. Equal weights do
// not show that: a wrong gradient is summed over the ranks, and makes all weights wrong alike.
template <typename T, typename S>
void check_ranks(const Run& run, Trainer<T, S>& t) {
    // Replay first, but report differing weights first: they would explain a replay's difference.
    std::string who = run.health.replay(false);
    check_replicas(run, t);
    if (who.empty()) return;
    or_die_on_all_ranks(run, concat("step ", run.step, ": ", who, ": suspect that machine, leave "
                                    "it out, and go on from a checkpoint before it failed",
                                    resume_hint(run)));
}

// ----------------------------------------------------------------------------
// before a save

// The loss of these weights on some text of the last step: one micro-batch on
// each data-parallel rank.
template <typename T, typename S>
double try_weights(Run& run, Trainer<T, S>& t) {
    uint64_t samples = t.plans[run.plans.evaluate].B * uint64_t(t.layout.dp.size);
    uint64_t start = t.data.cursor - std::min(t.data.cursor, samples);
    auto window = [&](uint64_t sample, int* tokens, int* targets) {
        return load_window(run.data.train, start + sample, tokens, targets);
    };
    double loss = 0;
    run_samples(t, run.plans.evaluate, samples, window, [&] { loss = plan_loss(t).mean(); });

    // Broadcast the loss: ranks decide by it, so it must have the same bits on all of them.
    broadcast(run.world, &loss, 1, 0, Cpu{});
    return loss;
}

// Whether a high loss shows that weights are ruined. Preference learning may make both answers
// unlikely, and a reward may favour any text, so there it proves nothing.
inline bool loss_proves(const Run& run) { return !objective_of(run.config).rows(); }

// Why these weights must not be saved over good ones; "": they may be saved. No step has measured
// the loss since the last update, so measure it here, on the text that the update learned from.
// `later`: leave that to the next step, and only look for values that are not finite.
template <typename T, typename S>
std::string ruined_weights(Run& run, Trainer<T, S>& t, bool later = false) {
    std::string wrong = first_error(run.world, first_bad_weight(t));
    if (wrong.empty() && loss_proves(run) && !later) {
        double loss = try_weights(run, t);
        if (blown_up(loss, run.shape.V, run.progress.first_loss))
            wrong = concat("its loss on the last step's text is ", loss, ", and guessing costs ",
                           std::log(double(run.shape.V)));
    }
    run.health.ruined = !wrong.empty();
    return run.health.ruined ? "the weights are ruined: " + wrong : "";
}

// ----------------------------------------------------------------------------
// the first value that is not finite

// A visitor of the table of activations that looks for bad values in each row.
template <typename T, typename S> struct FindBadActs : BindActs<T, S> {
    S where;
    std::string* found;

    FindBadActs(const Trainer<T, S>& t, const Action& a, std::string* f)
        : BindActs<T, S>(t, a), where(t.ctx.where), found(f) {}
    template <typename P>
    void operator()(P*& pointer, const char* name, size_t n, Keep keep, Last last) {
        BindActs<T, S>::operator()(pointer, name, n, keep, last);
        if constexpr (std::is_same_v<P, T> || std::is_same_v<P, acc_t<T>>) {
            // Skip gradients: a forward pass does not make them, so they hold old values.
            if (!pointer || !found->empty() || keep == Keep::GRADIENT)
                return;
            *found = bad_values_text(name, find_bad_values(pointer, n, where), n);
        }
    }
};

// Describe the bad values of a residual stream or of its gradient; "": none. x (rows, C) is null if
// the action has none.
template <typename T, typename S>
std::string bad_stream(const Trainer<T, S>& t, const T* x, const char* name) {
    if (!x) return "";
    size_t n = t.plans[t.plan].rows() / t.ctx.shape.rank.rows * t.model.shape.C;
    return bad_values_text(name, find_bad_values(x, n, t.ctx.where), n);
}

// Describe the first bad gradient among a layer's parameters; "": none is bad.
template <typename T, typename S>
std::string bad_gradient(const Trainer<T, S>& t, const Action& a) {
    for (int b : buckets_of(t.model, a.layer)) {
        const acc_t<T>* grad = gradients_of(t, b, a.layer);
        for (int i : t.model.buckets[b].in_order) {
            const Parameter& p = t.model.parameters[i];
            if (!grad || p.bucket != b) continue;
            size_t n = p.local_elements();
            BadValues bad = find_bad_values(grad + p.offset, n, t.ctx.where);
            LLMC_TRY(bad_values_text("gradient of " + p.name, bad, n));
        }
    }
    return "";
}

// Describe the first value that is not finite among the results of the action that has just run;
// "": all are finite.
template <typename T, typename S>
std::string bad_results(const Trainer<T, S>& t, const Action& a) {
    std::string found;
    bool block = a.layer > 0 && a.layer < t.model.head();
    bool forward = a.op == Op::F || a.op == Op::R;
    if (!forward && a.op != Op::B && a.op != Op::I && a.op != Op::W)
        return "";

    // Forward: look at the activations in the order in which they are made.
    if (forward && block)
        with_family(t.model.shape.family, [&](auto family) {
            typename decltype(family)::template Acts<T> acts = {};
            block_activations(acts, t.ctx.shape, t.plans[t.plan].rows(), t.ctx.where,
                              FindBadActs<T, S>(t, a, &found));
        });
    if (a.op == Op::F && a.layer < t.model.head() && found.empty())
        found = bad_stream(t, output_of(t, a), "output");

    // Backward: look at the input's gradient, then at the parameters'. The embedding has no input.
    bool gives_input = a.op == Op::B || a.op == Op::I;
    if (gives_input && a.layer > 0)
        found = bad_stream(t, input_gradient(t, a), "gradient of the input");
    if (reaches_weights(a.op) && found.empty())
        found = bad_gradient(t, a);
    return found;
}

// The place of a layer's action in a step, a number that orders actions alike on all ranks: forward
// before backward, then by micro-batch, then by layer in the direction of the pass.
inline int64_t when_in_step(const Action& a, int layers) {
    bool backward = a.op != Op::F;
    int64_t layer = backward ? layers - a.layer : a.layer;
    return (int64_t(backward) << 60) + (int64_t(a.micro) << 30) + layer;
}

// Repeat the step and describe the first value that is not finite; "": there was none this time.
// All ranks call, and get the same answer.
template <typename T, typename S>
std::string trace_bad_value(Run& run, Trainer<T, S>& t) {
    // Look at the results after each action, until the first bad one.
    int64_t when = INT64_MAX;
    std::string what;
    t.hooks.after = [&](const Action& a) {
        if (!what.empty()) return;
        std::string found = bad_results(t, a);
        if (found.empty()) return;
        when = when_in_step(a, t.model.layers());
        what = concat("micro-batch ", a.micro, ", layer ", a.layer, ", ", action_text(a, t.model),
                      ", ", found);
    };
    run_plan(t, run.plans.train);
    t.hooks.after = nullptr;

    // Take the finding of the rank whose bad action comes first in a step.
    std::vector<int64_t> all(run.world.size);
    all_gather(run.world, all.data(), &when, 1, Cpu{});
    std::vector<std::string> texts = gather_texts(run.world, what);
    return texts[size_t(std::ranges::min_element(all) - all.begin())];
}

} // namespace llmc
