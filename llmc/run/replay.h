// replay.h - a step done again, to see which rank computes wrong
//   Ranks of a grid that differ in dp alone have the same weights and other samples. In a replay
//   they all take the samples of the first, so that each layer's action must make the same bits on
//   all of them, before any sum over ranks hides who is wrong.
//   1. replay_sums  runs the step again; behind each action of a layer a sum of what it has made
//   2. replay_step  ranks compare: the earliest action that differs, and the ranks that disagree
//                   with most. Of two a second replay tells the one that disagrees with itself
//   A replay leaves all as it was: NORM is made to say that no gradient is finite, so UPDATE writes
//   nothing. It needs machines of one kind, whose sums round alike.
//   Cost: a step and a read of what it makes. UPDATE itself is not looked at: its faults are in the
//   weights, and replicas.h finds them. Experts that ranks share out work on all ranks' tokens: no
//   rank has a twin there, and nothing is replayed.
#pragma once
#include "../io/checkpoint_load.h"
#include "../step.h"

namespace llmc {

// When a layer's action runs in a step, counted alike on all ranks: forward before backward, then
// micro-batches in order, then layers as the pass goes.
inline int64_t when_in_step(const Action& a, int layers) {
    bool backward = a.op != Op::F;
    int64_t layer = backward ? layers - a.layer : a.layer;
    return (int64_t(backward) << 60) + (int64_t(a.micro) << 30) + layer;
}

// Add x (n) to a sum; `at` counts on from datum to datum. Null: there is none.
template <typename P, typename S>
void add_to_sum(uint64_t& sum, uint64_t& at, const P* x, size_t n, S where) {
    if (!x) return;
    // The host holds one datum of an action at a time.
    std::vector<P> here(n);
    copy_out(here.data(), x, n * sizeof(P), where);
    for (const P& value : here)
        sum += element_sum(at++, bits_of(value));
}

// The sum of what an action of a layer has just made: a stream, and gradients.
template <typename T, typename S>
uint64_t result_sum(const Trainer<T, S>& t, const Action& a) {
    // Streams have the rows of this rank.
    uint64_t sum = 0;
    uint64_t at = 0;
    size_t rows = t.plans[t.plan].rows() / t.ctx.shape.row_ranks;
    size_t n = rows * t.model.shape.C;
    // The head's F only keeps its input in training, and the embedding has no input.
    if (a.op == Op::F && a.layer < t.model.head())
        add_to_sum(sum, at, output_of(t, a), n, t.ctx.where);
    if ((a.op == Op::B || a.op == Op::I) && a.layer > 0)
        add_to_sum(sum, at, input_gradient(t, a), n, t.ctx.where);
    if (!reaches_weights(a.op)) return sum;

    // Gradients add up from micro-batch to micro-batch, on all ranks alike.
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

// An action of a layer in a replay, and the sum of what it made.
struct ReplayedAction {
    int64_t when, sum;
    std::string name;
};

// The sample of the first data-parallel rank in the place of anybody's. Samples go round the ranks,
// B at a time (load.h).
inline uint64_t first_ranks_sample(uint64_t sample, const Plan& p, uint64_t cursor) {
    uint64_t B = p.B;
    uint64_t round = B * uint64_t(p.layout.dp.size);
    uint64_t from_here = sample - cursor;
    return cursor + from_here / round * round + from_here % B;
}

// Do the last step again on the first rank's samples. All ranks call.
template <typename T, typename S>
std::vector<ReplayedAction> replay_sums(Trainer<T, S>& t, int plan) {
    // Note what the step changes.
    const Plan& p = t.plans[plan];
    Window window = t.window;
    References references = t.references;
    auto after = t.after;
    uint64_t cursor = t.cursor;
    std::vector<unsigned char> amaxes; // --fp8 delayed's
    fp8_on_host(t, &amaxes);
    StepScale scale = read_value<StepScale>(t, {Kind::SCALE});
    auto put_scale = [&](const StepScale& value) {
        StepScale* home = address<StepScale>(t, {Kind::SCALE});
        copy_in(home, &value, sizeof(value), t.ctx.where);
        wait_for(t.ctx.where);
    };

    // Look at each action of a layer, and keep UPDATE from writing.
    uint64_t samples = p.B * uint64_t(p.micro_batches) * uint64_t(p.layout.dp.size);
    t.cursor -= std::min(t.cursor, samples);
    uint64_t begin = t.cursor;
    t.window = [&](uint64_t sample, int* tokens, int* targets) {
        return window(first_ranks_sample(sample, p, begin), tokens, targets);
    };
    if (references)
        t.references = [&](uint64_t sample, float* advantages, float* to) {
            references(first_ranks_sample(sample, p, begin), advantages, to);
        };
    std::vector<ReplayedAction> list;
    t.after = [&](const Action& a) {
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

    // Put all back.
    t.after = after;
    t.window = window;
    t.references = references;
    t.cursor = cursor;
    put_scale(scale);
    if (!amaxes.empty())
        copy_in(fp8_history(t).amax, amaxes.data(), amaxes.size(), t.ctx.where);
    wait_for(t.ctx.where);
    return list;
}

// A rank's finding in a replay, among those that should compute the same.
enum class Verdict : int64_t { ALIKE, WITH_MOST, ALONE, UNKNOWN };
struct ReplayFinding {
    int64_t when = INT64_MAX; // the earliest action that they do not make alike
    Verdict verdict = Verdict::ALIKE;
    size_t action = 0; // of this rank's list
};

// Compare a rank's actions with its twins': sums (ranks, n), twins: ranks, this one among them.
inline ReplayFinding find_in_replay(const std::vector<ReplayedAction>& mine,
                                    const std::vector<int64_t>& sums, size_t n,
                                    const std::vector<int>& twins) {
    ReplayFinding found;
    for (size_t i = 0; i < mine.size(); i++) {
        // Count who has which sum. Twins have the same plan, so the same actions.
        std::map<int64_t, size_t> holders;
        for (int r : twins)
            holders[sums[size_t(r) * n + i]]++;
        if (holders.size() == 1 || mine[i].when >= found.when)
            continue;

        // Most of them decide; without a majority nobody can say yet.
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

// Do the last step again and name the ranks that compute otherwise than others; "": none does.
// All ranks call, and have the same answer.
template <typename T, typename S>
std::string replay_step(Trainer<T, S>& t, int plan) {
    const Comm& world = t.comms.world;
    if (t.layout.dp.size == 1 || t.layout.ep > 1) return "";

    // Tell all ranks all sums: other stages have other actions.
    std::vector<ReplayedAction> mine = replay_sums(t, plan);
    int64_t n = int64_t(mine.size());
    all_reduce_max(world, &n, 1, Cpu{});
    std::vector<int64_t> own(size_t(n), 0);
    std::vector<int64_t> sums(own.size() * size_t(world.size));
    for (size_t i = 0; i < mine.size(); i++)
        own[i] = mine[i].sum;
    all_gather(world, sums.data(), own.data(), size_t(n), Cpu{});

    // Find the earliest difference among this rank's twins, and of all ranks.
    std::vector<int> twins = ranks_where(t.layout, [&](const Layout& o) {
        const Layout& me = t.layout;
        bool same_place = o.tp.rank == me.tp.rank && o.cp.rank == me.cp.rank;
        return same_place && o.pp.rank == me.pp.rank;
    });
    ReplayFinding found = find_in_replay(mine, sums, size_t(n), twins);
    int64_t earliest = -found.when;
    all_reduce_max(world, &earliest, 1, Cpu{});
    if (-earliest == INT64_MAX) return "";

    // Where nobody can say who is wrong, a rank that now makes another sum than before is.
    bool of_them = found.when == -earliest;
    bool unsure = found.verdict == Verdict::UNKNOWN;
    int64_t unknown = of_them && unsure;
    all_reduce_max(world, &unknown, 1, Cpu{});
    bool unsteady = false;
    if (unknown) {
        // All ranks run it, those too that have found nothing.
        std::vector<ReplayedAction> again = replay_sums(t, plan);
        unsteady = of_them && again[found.action].sum != own[found.action];
    }

    // Name the ranks, and the action.
    bool alone = found.verdict == Verdict::ALONE;
    bool wrong = of_them && (unknown ? unsteady : alone);
    int64_t flag = of_them + 2 * int64_t(wrong);
    std::vector<int64_t> flags(size_t(world.size));
    all_gather(world, flags.data(), &flag, 1, Cpu{});
    // Twins that have found nothing there name nothing.
    std::string own_name = of_them ? mine[found.action].name : "";
    std::vector<std::string> names = gather_texts(world, own_name);
    std::vector<int> differ;
    std::vector<int> blamed;
    for (int r = 0; r < world.size; r++) {
        if (flags[size_t(r)] & 1) differ.push_back(r);
        if (flags[size_t(r)] & 2) blamed.push_back(r);
    }
    const std::string& action = names[size_t(differ[0])];
    if (blamed.empty())
        return concat("in a replay of the step ranks ", list_of_ranks(differ),
                      " made different results of ", action, ", each its own again");
    return concat("in a replay of the step rank", blamed.size() > 1 ? "s " : " ",
                  list_of_ranks(blamed), " made another result of ", action,
                  unknown ? " than the time before" : " than the others");
}

// Give ranks that should keep the same weights those of the first of them: a replay shows who
// computes wrong, and not who has other weights.
template <typename T, typename S>
void even_weights(Trainer<T, S>& t) {
    std::vector<Copied> list = copied_data(t);
    for_each_repeat(t, [&](const Comm& c, auto same) {
        for (const Copied& x : list) {
            KeptRange range = kept_range(t, x.data, *x.p);
            bool repeated = c.size > 1 && same(x);
            bool weight = x.data.kind == Kind::WEIGHT;
            if (!repeated || !weight || !range.count)
                continue;
            // The first rank's go out; all write what they then have.
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
