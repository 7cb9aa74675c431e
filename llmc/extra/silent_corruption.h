// silent_corruption.h - silent data corruption: repeat a step on all ranks, and compare the bits
//   Twins: ranks of a grid that differ in dp alone. They have the same weights, but different
//   samples. In a replay all twins take the samples of the first one, so each action of a layer
//   must make the same bits on all of them, before any sum over ranks hides who is wrong.
//   1. replay_sums  repeats the step, and after each action of a layer sums up what it has made
//   2. replay_step  compares the sums of all ranks: it finds the earliest action that differs, and
//                   the ranks that disagree with the majority. Between two twins there is none:
//                   then a second replay shows which of them disagrees with itself
//   A replay changes nothing: after NORM the gradients are declared not finite, so that UPDATE
//   writes nothing. It needs machines of one kind, whose sums round alike.
//   Cost: a step, and reading its results. UPDATE itself is not checked: its faults end up in the
//   weights, where replicas.h finds them. With expert parallelism nothing is replayed: experts work
//   on the tokens of all ranks, so no rank has a twin.
#pragma once
#include "../action.h"
#include "../comm/comm.h"
#include "../comm/group.h"
#include "../context.h"
#include "../fp8.h"
#include "../io/checkpoint.h"
#include "../io/one_reader.h"
#include "../io/replicas.h"
#include "../layout.h"
#include "../model.h"
#include "../ops/memory.h"
#include "../ops/step_scale.h"
#include "../ops/types.h"
#include "../parameters.h"
#include "../run/health.h"
#include "../step.h"
#include "../comm/text.h"
#include "../trainer.h"

namespace llmc {

// Add the elements of x (n) to a sum. `at` numbers elements across calls, so that their order
// counts. x may be null: then nothing is added.
template <typename P, typename S>
void add_to_sum(uint64_t& sum, uint64_t& at, const P* x, size_t n, S where) {
    if (!x) return;
    // Copy to the host, one tensor at a time.
    std::vector<P> here(n);
    copy_out(here.data(), x, n * sizeof(P), where);
    for (const P& value : here)
        sum += element_sum(at++, bits_of(value));
}

// The sum over what an action of a layer has just made: a residual stream or its gradient, and the
// gradients of parameters.
template <typename T, typename S>
uint64_t result_sum(const Trainer<T, S>& t, const Action& a) {
    // Add the stream, which has the rows of this rank. In training the head's F makes no stream, it
    // only keeps its input; and the embedding has no input, so its B makes no stream's gradient.
    uint64_t sum = 0;
    uint64_t at = 0;
    size_t rows = t.plans[t.plan].rows() / t.ctx.shape.rank.rows;
    size_t n = rows * t.model.shape.C;
    if (a.op == Op::F && a.layer < t.model.head())
        add_to_sum(sum, at, output_of(t, a), n, t.ctx.where);
    if ((a.op == Op::B || a.op == Op::I) && a.layer > 0)
        add_to_sum(sum, at, input_gradient(t, a), n, t.ctx.where);
    if (!reaches_weights(a.op)) return sum;

    // Add the parameters' gradients, which accumulate over micro-batches, alike on all twins.
    for (int b : buckets_of(t.model, a.layer)) {
        const acc_t<T>* grad = gradients_of(t, b, a.layer);
        for (int i : t.model.buckets[b].in_order) {
            const Parameter& p = t.model.parameters[i];
            if (grad && p.bucket == b)
                add_to_sum(sum, at, grad + p.offset, p.local_elements(), t.ctx.where);
        }
    }
    return sum;
}

// An action of a layer in a replay: its place in the step, the sum of its results, and its name.
struct ReplayedAction {
    int64_t when, sum;
    std::string name;
};

// The sample that the first data-parallel rank reads where this rank would read `sample`. Samples
// are dealt to ranks in turn, B at a time (load.h).
inline uint64_t first_ranks_sample(uint64_t sample, const Plan& p, uint64_t cursor) {
    uint64_t B = p.B;
    uint64_t round = B * uint64_t(p.layout.dp.size);
    uint64_t from_here = sample - cursor;
    return cursor + from_here / round * round + from_here % B;
}

// Repeat the last step on the first data-parallel rank's samples, and return its actions.
// All ranks call.
template <typename T, typename S>
std::vector<ReplayedAction> replay_sums(Trainer<T, S>& t, int plan) {
    // Remember everything that the step would change.
    const Plan& p = t.plans[plan];
    DataSource data = t.data;
    auto after = t.hooks.after;
    std::vector<unsigned char> amaxes; // the history of --fp8 delayed
    fp8_on_host(t, &amaxes);
    StepScale scale = read_value<StepScale>(t, {Kind::SCALE});
    auto put_scale = [&](const StepScale& value) {
        StepScale* home = address<StepScale>(t, {Kind::SCALE});
        copy_in(home, &value, sizeof(value), t.ctx.where);
        wait_for(t.ctx.where);
    };

    // Go back to the step's first sample, and give each rank the first rank's windows.
    uint64_t samples = p.B * uint64_t(p.micro_batches) * uint64_t(p.layout.dp.size);
    t.data.cursor -= std::min(t.data.cursor, samples);
    uint64_t begin = t.data.cursor;
    t.data.window = [&](uint64_t sample, int* tokens, int* targets) {
        return data.window(first_ranks_sample(sample, p, begin), tokens, targets);
    };
    if (data.references)
        t.data.references = [&](uint64_t sample, RowNumbers to) {
            data.references(first_ranks_sample(sample, p, begin), to);
        };
    if (t.hooks.before) t.hooks.before(); // a teacher reads the same samples

    // Sum up each layer's action after it has run. After NORM declare the gradients not finite, so
    // that UPDATE writes nothing.
    std::vector<ReplayedAction> list;
    t.hooks.after = [&](const Action& a) {
        if (after) after(a);
        bool forward = a.op == Op::F;
        bool backward = a.op == Op::B || a.op == Op::I || a.op == Op::W;
        if (forward || backward) {
            int64_t when = when_in_step(a, t.model.layers());
            int64_t sum = int64_t(result_sum(t, a));
            list.push_back({when, sum, action_text(a, t.model)});
        }
        if (a.op != Op::NORM) return;
        StepScale refused = read_value<StepScale>(t, {Kind::SCALE});
        refused.finite = 0;
        put_scale(refused);
    };
    run_plan(t, plan);
    wait_for(t.ctx.where);

    // Restore everything.
    t.hooks.after = after;
    t.data = data;
    put_scale(scale);
    if (!amaxes.empty())
        copy_in(fp8_history(t).amax, amaxes.data(), amaxes.size(), t.ctx.where);
    wait_for(t.ctx.where);
    return list;
}

// The finding of a replay about one rank, compared with its twins.
enum class Verdict : int64_t { ALIKE, WITH_MOST, ALONE, UNKNOWN };
struct ReplayFinding {
    int64_t when = INT64_MAX; // place in the step of the earliest action whose sums differ
    Verdict verdict = Verdict::ALIKE;
    size_t action = 0; // its index in this rank's list
};

// Compare a rank's actions with its twins'. sums (ranks, n): those of all ranks. twins: the ranks
// to compare, this one included.
inline ReplayFinding find_in_replay(const std::vector<ReplayedAction>& mine,
                                    const std::vector<int64_t>& sums, size_t n,
                                    const std::vector<int>& twins) {
    ReplayFinding found;
    for (size_t i = 0; i < mine.size(); i++) {
        // Count how many twins have each sum. Twins have the same plan, so the same actions.
        std::map<int64_t, size_t> holders;
        for (int r : twins)
            holders[sums[size_t(r) * n + i]]++;
        if (holders.size() == 1 || mine[i].when >= found.when)
            continue;

        // Let the majority decide; without one, nobody can say yet who is wrong.
        size_t most = 0;
        for (auto& [sum, count] : holders)
            most = std::max(most, count);
        bool with_most = holders[mine[i].sum] == most;
        Verdict verdict = with_most ? Verdict::WITH_MOST : Verdict::ALONE;
        if (2 * most <= twins.size())
            verdict = Verdict::UNKNOWN;
        found = {mine[i].when, verdict, i};
    }
    return found;
}

// Repeat the last step, and name the ranks that compute other results than their twins; "": none
// does. All ranks call, and get the same answer.
template <typename T, typename S>
std::string replay_step(Trainer<T, S>& t, int plan) {
    const Comm& world = t.comms.world;
    if (t.layout.dp.size == 1 || t.layout.ep > 1)
        return "";

    // Share all sums with all ranks. Stages differ in their number of actions, so pad the lists.
    std::vector<ReplayedAction> mine = replay_sums(t, plan);
    int64_t n = int64_t(mine.size());
    all_reduce_max(world, &n, 1, Cpu{});
    std::vector<int64_t> own(size_t(n), 0);
    std::vector<int64_t> sums(own.size() * size_t(world.size));
    for (size_t i = 0; i < mine.size(); i++)
        own[i] = mine[i].sum;
    all_gather(world, sums.data(), own.data(), size_t(n), Cpu{});

    // Find the earliest difference among this rank's twins, then the earliest of all ranks.
    std::vector<int> twins = ranks_where(t.layout, [&](const Layout& o) {
        const Layout& me = t.layout;
        bool same_place = o.tp.rank == me.tp.rank && o.cp.rank == me.cp.rank;
        return same_place && o.pp.rank == me.pp.rank;
    });
    ReplayFinding found = find_in_replay(mine, sums, size_t(n), twins);
    int64_t earliest = -found.when;
    all_reduce_max(world, &earliest, 1, Cpu{});
    if (-earliest == INT64_MAX) return "";

    // If there is no majority, replay once more: a rank that now makes another sum than
    // before is wrong.
    bool of_them = found.when == -earliest;
    bool unsure = found.verdict == Verdict::UNKNOWN;
    int64_t unknown = of_them && unsure;
    all_reduce_max(world, &unknown, 1, Cpu{});
    bool unsteady = false;
    if (unknown) {
        // All ranks must run it, because its collectives need all of them.
        std::vector<ReplayedAction> again = replay_sums(t, plan);
        unsteady = of_them && again[found.action].sum != own[found.action];
    }

    // Collect which ranks differ (1) and which of them are to blame (2), and the action's name.
    bool alone = found.verdict == Verdict::ALONE;
    bool wrong = of_them && (unknown ? unsteady : alone);
    int64_t flag = of_them + 2 * int64_t(wrong);
    std::vector<int64_t> flags(size_t(world.size));
    all_gather(world, flags.data(), &flag, 1, Cpu{});
    std::string own_name = of_them ? mine[found.action].name : "";
    std::vector<std::string> names = gather_texts(world, own_name);

    // Write the sentence.
    std::vector<int> differ;
    std::vector<int> blamed;
    for (int r = 0; r < world.size; r++) {
        if (flags[size_t(r)] & 1)
            differ.push_back(r);
        if (flags[size_t(r)] & 2)
            blamed.push_back(r);
    }
    const std::string& action = names[size_t(differ[0])];
    if (blamed.empty())
        return concat("in a replay of the step ranks ", list_of_ranks(differ),
                      " made different results of ", action, ", each its own again");
    return concat("in a replay of the step rank", blamed.size() > 1 ? "s " : " ",
                  list_of_ranks(blamed), " made another result of ", action,
                  unknown ? " than the time before" : " than the others");
}

// Copy the weights of the first rank to all ranks that should have the same. A replay then shows
// which rank computes wrong, not which one has other weights.
template <typename T, typename S>
void even_weights(Trainer<T, S>& t) {
    std::vector<StateTensor> list = copied_data(t);
    for_each_repeat(t, [&](const Comm& c, auto same) {
        for (const StateTensor& x : list) {
            KeptRange range = kept_range(t, x.data, *x.p);
            bool repeated = c.size > 1 && same(x);
            bool weight = x.data.kind == Kind::WEIGHT;
            if (!repeated || !weight || !range.count)
                continue;
            // Broadcast the first rank's values; every rank writes what it then has.
            std::vector<T> values(range.count);
            read_kept(t, values.data(), x.data, range.at, range.count);
            broadcast(c, values.data(), values.size(), 0, Cpu{});
            auto value = [&](size_t i) { return values[i]; };
            fill_kept<T>(t, x.data, range.at, range.count, value);
            wait_for(t.ctx.where);
        }
    });
}

} // namespace llmc
