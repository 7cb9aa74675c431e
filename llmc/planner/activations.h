// activations.h - --recompute auto: each block's level, and which blocks offload their activations
//   minimise  the cost of a rank's step    subject to    bytes of its arena <= room
//   The cost is the FLOPs that blocks redo. Where activations may leave the device (--offload
//   activations) it is the seconds of compute and moves: the simulator times the plan itself, on a
//   machine's rates. Messages between ranks are left out, since every choice has the same.
//   Blocks are alike, so a choice counts them. An early block waits longest for its backward pass:
//   the first ones are offloaded, and those that keep least come first, FULL before one branch
//   before SELECTIVE before NONE. One branch is enough: ATTN on one block and FFN on another cost
//   and keep together what FULL and SELECTIVE do. Levels count over all blocks, or over those that
//   stay, while offloaded ones have one level.
//     cost  >= compute + what is redone, and >= bytes moved / rate
//     bytes >= live bytes where every move ends at once: over all instants, what no choice changes
//              and, for each block, micro-batches in flight x what its level keeps
//   1. LIST  all choices, by the least cost that they can have
//   2. WALK  Skip a choice whose least bytes do not fit. Place and time the plan of each other one,
//            and stop at the first that cannot be better than the best so far. Of all 10^L choices
//            of up to 3 blocks the fastest is at most 1% better
//   3. NEXT  The same walk under the bytes of the best finds the next dearer one. The next cheaper
//            is the one of fewest bytes among those of less cost
//   Where not even FULL fits, and nothing leaves, blocks keep one input together (recompute.h).
//   Cost: L^3 / 3 choices of L blocks; 32 take 0.3 s. With offload 3 L^4 / 4: beyond 8 blocks the
//   offloaded ones are counted in steps of L/8, beyond 16 those at each level in steps of L/16,
//   and a walk that has placed 128 choices takes the best so far, or the leanest.
//   llama3-8b in bf16, --seq 8192 --micro-batch 1 --memory 150: NONE takes 169.6 GiB, FULL 138.6 at
//   22.6% more FLOPs; 1 FULL, 19 FFN, 11 SELECTIVE and 1 NONE take 150.0 at 8.9%.
#pragma once
#include "../action.h"
#include "../arena.h"
#include "../layout.h"
#include "../model.h"
#include "../ops/types.h"
#include "../pipeline.h"
#include "../plan.h"
#include "../recompute.h"
#include "../sizes.h"
#include "../streams.h"
#include "cost.h"
#include "layer_cost.h"
#include "simulator.h"

namespace llmc {

// ----------------------------------------------------------------------------
// choices

// A level of recomputation for one block.
struct LevelCost {
    double flops; // redone, for each token
    // Bytes that one micro-batch keeps: [0] last read by the input half of the backward pass,
    // [1] by the weight half.
    size_t kept[2];
    size_t redone; // bytes of a micro-batch
    double cost;   // FLOPs, or seconds of a step
};

// The costs and sizes of a block, from which those of a choice follow.
struct BlockCosts {
    std::array<LevelCost, RECOMPUTE_LEVELS> levels;
    size_t input = 0;       // bytes of a block's input
    double compute = 0;     // the cost of a step that redoes nothing
    double rate = INFINITY; // bytes a second to the other tier
    int micro_batches = 1;
};

// Return the costs of every level for one block, in FLOPs. `p` is a plan of the trainer.
template <typename T, typename S>
BlockCosts block_costs(Plan p, const Model& model, S where) {
    // Where blocks differ, one with experts stands for all: no other kind has more rows.
    BlockCosts costs;
    int layer = 1;
    while (layer + 1 < model.head() && !is_sparse(model.shape, layer))
        layer++;
    Shape shape = layer_shape(model.shape, layer);
    size_t input = data_bytes<T>(p, model, {Kind::STREAM, 1}, where);
    costs.input = round_up(input, ARENA_ALIGN);
    costs.micro_batches = p.micro_batches;

    // Ask each level for the rows that it keeps. It redoes what NONE keeps and it does not.
    const size_t* none = costs.levels[0].kept;
    for (int r = 0; r < RECOMPUTE_LEVELS; r++) {
        p.recompute = Recompute(r);
        size_t b = data_bytes<T>(p, model, {Kind::KEPT_B, layer}, where);
        size_t w = data_bytes<T>(p, model, {Kind::KEPT_W, layer}, where);
        size_t all = r == 0 ? b + w : none[0] + none[1];
        double flops = recompute_flops(shape, p.T, Recompute(r));
        costs.levels[r] = {flops, {b, w}, all - b - w, flops};
    }
    return costs;
}

// A choice: the first `offloaded` blocks of a rank offload their activations. FULL comes first,
// then the branch, then SELECTIVE; the last blocks keep everything.
struct LevelCounts {
    int full, branch, selective;
    Recompute which;                   // the branch: ATTN or FFN
    int offloaded = 0;
    bool alike = false;                // offloaded blocks have `level`; others are counted
    Recompute level = Recompute::NONE;
    int segment = 1;                   // FULL blocks that keep one input
    double flops = 0, least = 0;       // redone, a token; the least cost
    size_t redone = 0, moved = 0;      // bytes of a micro-batch; moved both ways

    // Return the level of block `block`, counted from 0.
    Recompute of(int block) const {
        if (alike && block < offloaded) return level;
        if (alike) block -= offloaded;
        if (block < full) return Recompute::FULL;
        if (block < full + branch) return which;
        return block < full + branch + selective ? Recompute::SELECTIVE : Recompute::NONE;
    }
};

// Fill in what a choice for `blocks` blocks redoes and moves, and its least cost.
inline void count_choice(LevelCounts& c, int blocks, const BlockCosts& costs) {
    double cost = costs.compute;
    for (int i = 0; i < blocks; i++) {
        const LevelCost& level = costs.levels[size_t(c.of(i))];
        cost += level.cost;
        c.flops += level.flops;
        c.redone += level.redone;
        if (i < c.offloaded)
            c.moved += 2 * (costs.input + level.kept[0] + level.kept[1]);
    }

    // Compute and moves run at once, so the longer of the two counts.
    c.least = std::max(cost, double(c.moved) * costs.micro_batches / costs.rate);
}

// List all choices for `blocks` blocks, those of the least possible cost first.
inline std::vector<LevelCounts> list_choices(int blocks, const BlockCosts& costs,
                                             bool offloads = false) {
    // Count the levels of `n` blocks in steps; the leanest choice is no step's.
    std::vector<LevelCounts> list;
    int sixteenth = std::max(1, int(ceil_div(blocks, 16)));
    int step = offloads ? sixteenth : 1;
    auto add_levels = [&](int n, int offloaded, bool alike, Recompute level) {
        auto add = [&](int full, int branch, int selective, Recompute which) {
            list.push_back({full, branch, selective, which, offloaded, alike, level});
            count_choice(list.back(), blocks, costs);
        };
        for (int full = 0; full <= n; full += step)
            for (int branch = 0; full + branch <= n; branch += step)
                for (int selective = 0; full + branch + selective <= n; selective += step) {
                    add(full, branch, selective, Recompute::ATTN);
                    if (branch) add(full, branch, selective, Recompute::FFN);
                }
        if (n % step)
            add(n, 0, 0, Recompute::ATTN);
    };

    // Offload more and more blocks: at levels that begin with FULL, or all of them at one level.
    int stride = std::max(1, int(ceil_div(blocks, 8)));
    int last = offloads ? int(ceil_div(blocks, stride)) : 0;
    for (int i = 0; i <= last; i++) {
        int offloaded = std::min(i * stride, blocks);
        add_levels(blocks, offloaded, false, Recompute::NONE);
        for (int level = 0; offloaded && level < RECOMPUTE_LEVELS; level++)
            add_levels(blocks - offloaded, offloaded, true, Recompute(level));
    }

    // Among equals, move the fewest bytes, then redo the fewest.
    auto order = [](const LevelCounts& c) {
        return std::tuple(c.least, c.moved, c.redone);
    };
    auto before = [&](const LevelCounts& x, const LevelCounts& y) {
        return order(x) < order(y);
    };
    std::stable_sort(list.begin(), list.end(), before);
    return list;
}

// ----------------------------------------------------------------------------
// instants: the least bytes of a choice, by a sum

// One instant of the plan in which every block is FULL: the bytes that no choice changes, and for
// each datum of a block (kept for both halves, its input) the micro-batches held.
struct Instant {
    size_t fixed;
    std::vector<int> away, near; // [3 * layer + datum]: of a block that offloads; of one that stays
};

// The number of a datum in Instant, or -1 if no choice changes its bytes.
inline int chosen_datum(const Model& model, Data d) {
    if (of_bucket(d.kind) || !model.is_block(d.of)) return -1;
    switch (d.kind) {
    case Kind::KEPT_B:
    case Kind::REDO_B: return 3 * d.of;
    case Kind::KEPT_W:
    case Kind::REDO_W: return 3 * d.of + 1;
    case Kind::STREAM: return 3 * d.of + 2;
    default: return -1;
    }
}

// List the instants of a plan, given its arena. A block that stays holds a datum from its first
// life to its last one.
inline std::vector<Instant> instants_of(const Arena& leanest, const Plan& p, const Model& model) {
    // Note at each action what begins, and after it what ends.
    struct Change {
        int datum, away, near;
        size_t begun, ended;
    };
    std::vector<std::vector<Change>> changes(p.actions.size() + 1);
    for (auto& [d, lives] : leanest.passing[0]) {
        // Rows that R remakes are all of a block's rows: they replace what its level keeps.
        int datum = chosen_datum(model, d);
        bool redo = d.kind == Kind::REDO_B || d.kind == Kind::REDO_W;
        int sign = datum < 0 ? 0 : redo ? -1 : 1;
        for (const Place& life : lives) {
            if (life.tier != Tier::DEVICE) continue;
            bool counted = redo || datum < 0;
            size_t fixed = counted ? round_up(life.bytes, ARENA_ALIGN) : 0;
            int begins = redo || &life == &lives.front() ? sign : 0;
            int ends = redo || &life == &lives.back() ? -sign : 0;
            changes[life.first].push_back({datum, sign, begins, fixed, 0});
            changes[life.last + 1].push_back({datum, -sign, ends, 0, fixed});
        }
    }

    // Walk the plan. Of instants that hold the same, keep the one with most fixed bytes.
    std::vector<int> none(3 * model.layers());
    Instant now = {0, none, none};
    typedef std::pair<std::vector<int>, std::vector<int>> Held;
    std::map<Held, size_t> most;
    for (size_t i = 0; i < p.actions.size(); i++) {
        for (const Change& c : changes[i]) {
            now.fixed += c.begun - c.ended;
            if (c.datum < 0) continue;
            now.away[c.datum] += c.away;
            now.near[c.datum] += c.near;
        }
        size_t& fixed = most[{now.away, now.near}];
        fixed = std::max(fixed, now.fixed);
    }

    // Put the fullest instant first: it refuses most choices.
    std::vector<Instant> all;
    for (auto& [held, fixed] : most)
        all.insert(all.begin(), {fixed, held.first, held.second});
    return all;
}

// Return the peak of live bytes, for levels of all layers and those that are `away`, if any. If the
// peak exceeds `limit`, the result is only some number above it.
inline size_t live_bytes(const std::vector<Instant>& instants, const BlockCosts& costs,
                         const std::vector<Recompute>& levels, const std::vector<bool>& away = {},
                         size_t limit = SIZE_MAX) {
    size_t most = 0;
    for (size_t i = 0; i < instants.size() && most <= limit; i++) {
        const Instant& now = instants[i];
        size_t bytes = now.fixed;

        // Add what each layer holds, by its level.
        for (size_t layer = 0; layer < levels.size(); layer++) {
            bool leaves = !away.empty() && away[layer];
            const std::vector<int>& all = leaves ? now.away : now.near;
            const int* held = all.data() + 3 * layer;
            const LevelCost& level = costs.levels[size_t(levels[layer])];
            bytes += size_t(held[0]) * level.kept[0];
            bytes += size_t(held[1]) * level.kept[1];
            bytes += size_t(held[2]) * costs.input;
        }
        most = std::max(most, bytes);
    }
    return most;
}

// ----------------------------------------------------------------------------
// the search

// A choice and the bytes of its arena; 0 bytes means that there is no choice.
struct Choice {
    std::vector<Recompute> levels;    // [layer]; those of other ranks are NONE
    std::vector<bool> offloaded = {}; // [layer]: whose activations leave the device
    int segment = 1;                  // blocks that keep one input (recompute.h)
    double flops = 0, cost = 0;       // redone, for each token; what is minimised
    size_t bytes = 0;
    double seconds = 0, waited = 0;   // of the rank's compute and moves, if any may leave
};

// best: the cheapest that fits. cheaper: the smallest of those that cost less and do not fit.
// dearer: the next one that takes fewer bytes than best.
struct Choices { Choice best, cheaper, dearer; };

// List this rank's blocks that run backward: only these keep or redo anything.
inline std::vector<int> blocks_of(const Layout& layout, const Model& model) {
    std::vector<int> blocks;
    for (int l = std::max(1, lowest_trained(model)); l < model.head(); l++)
        if (is_mine(layout, model, l))
            blocks.push_back(l);
    return blocks;
}

// A rank's choices, and all that the walk needs to try one.
template <typename T, typename S> struct ActivationSearch {
    const Layout& layout;
    const Model& model;
    std::vector<PlanOptions> options; // [0] is the plan that trains
    CostModel cost;
    S where;
    bool offloads = false;
    std::vector<ScheduleStep> steps = {};
    std::vector<Plan> plans = {};
    std::vector<int> blocks = {}; // this rank's
    BlockCosts costs = {};
    std::vector<Instant> instants = {};
    size_t lasting = 0; // bytes for the whole run
    std::vector<LevelCounts> list = {};
    std::vector<size_t> least = {};   // [choice]: bytes, as far as they were counted
    std::map<int, Choice> tried = {}; // [choice]: placed and timed
};

// Return the seconds of a rank's compute and moves, and how many of them it waits for moves.
inline std::pair<double, double> seconds_alone(Plan p, const Model& model, const CostModel& cost) {
    auto meets = [](const Action& a) { return needs_others(a.op); };
    std::erase_if(p.actions, meets);
    StepTime step = simulate_step({p}, model, action_cost(cost, model));
    return {step.seconds, step.parts.moves};
}

// Write a choice into a plan's options.
template <typename T, typename S>
void take_choice(ActivationSearch<T, S>& s, const LevelCounts& c) {
    std::vector<Recompute> levels(s.model.layers(), Recompute::NONE);
    std::vector<bool> offloaded(s.model.layers(), false);
    for (int i = 0; i < int(s.blocks.size()); i++) {
        int layer = s.blocks[i];
        levels[layer] = c.of(i);
        offloaded[layer] = i < c.offloaded;
    }
    PlanOptions& train = s.options[0];
    train.recompute = levels;
    train.recompute.segments = {c.segment};
    if (s.offloads) train.offload.parked = offloaded;
}

// Make the training plan again, and return the arena: levels change no other plan.
template <typename T, typename S>
Arena place_options(ActivationSearch<T, S>& s) {
    s.plans[0] = make_plan(s.layout, s.model, s.options[0], s.steps);
    return place_plans<T>(s.plans, s.model, s.where);
}

// Return the least bytes of a choice, or some number above `limit`.
template <typename T, typename S>
size_t least_bytes(ActivationSearch<T, S>& s, int number, size_t limit) {
    size_t& known = s.least[number];
    bool open = s.list[number].segment > 1; // the sum knows no segments
    if (open || known > limit || s.tried.count(number)) return known;

    // Offloading to the memory where the step runs frees nothing.
    take_choice(s, s.list[number]);
    const PlanOptions& o = s.options[0];
    bool frees = s.offloads && !is_here(o.offload.activations, s.where);
    std::vector<bool> away;
    if (frees) away = o.offload.parked;
    size_t passing = limit - std::min(limit, s.lasting);
    size_t live = live_bytes(s.instants, s.costs, o.recompute.given, away, passing);
    known = s.lasting + live;
    return known;
}

// Place a choice, once. Time it where activations may leave.
template <typename T, typename S>
const Choice& try_choice(ActivationSearch<T, S>& s, int number) {
    least_bytes(s, number, SIZE_MAX);
    auto [entry, fresh] = s.tried.insert({number, {}});
    Choice& x = entry->second;
    if (!fresh) return x;
    const LevelCounts& counts = s.list[number];
    const PlanOptions& train = s.options[0];
    take_choice(s, counts);
    x.bytes = bytes_here(place_options(s), s.where);
    x.levels = train.recompute.given;
    x.segment = counts.segment;
    x.flops = counts.flops;
    x.cost = counts.least;
    if (!s.offloads) return x;
    x.offloaded = train.offload.parked;
    std::tie(x.seconds, x.waited) = seconds_alone(s.plans[0], s.model, s.cost);
    x.cost = x.seconds;
    return x;
}

// Return the untried choice of the fewest bytes at least, among those that may cost less than
// `cost` and take less than `limit` bytes; -1: there is none.
template <typename T, typename S>
int leanest_untried(ActivationSearch<T, S>& s, double cost, size_t limit) {
    int found = -1;
    for (int i = 0; i < int(s.list.size()); i++) {
        if (s.list[i].least >= cost) break;
        if (s.tried.count(i)) continue;
        size_t bytes = least_bytes(s, i, limit - 1);
        if (bytes >= limit) continue;
        limit = bytes;
        found = i;
    }
    return found;
}

// How many choices a walk may place: simulations take long.
template <typename T, typename S>
size_t most_tries(const ActivationSearch<T, S>& s) {
    return s.offloads ? s.tried.size() + 128 : SIZE_MAX;
}

// Return the cheapest choice that takes at most `room` bytes; 0 bytes: there is none.
template <typename T, typename S>
Choice cheapest_within(ActivationSearch<T, S>& s, size_t room) {
    // Go by the least cost, until no later choice can be better than the best.
    Choice best;
    size_t most = most_tries(s);
    for (int i = 0; i < int(s.list.size()); i++) {
        bool dearer = best.bytes && s.list[i].least >= best.cost;
        if (dearer || s.tried.size() >= most)
            break;
        if (least_bytes(s, i, room) > room) continue;
        const Choice& x = try_choice(s, i);
        bool better = !best.bytes || x.cost < best.cost;
        if (x.bytes <= room && better) best = x;
    }
    if (best.bytes) return best;

    // The walk gave up before anything fitted: ask the choice of the fewest bytes.
    int leanest = leanest_untried(s, INFINITY, room + 1);
    if (leanest < 0) return best;
    const Choice& x = try_choice(s, leanest);
    return x.bytes > room ? best : x;
}

// Return the choice of fewest bytes among those that cost less than `best`; 0 bytes: none does.
template <typename T, typename S>
Choice smallest_cheaper(ActivationSearch<T, S>& s, const Choice& best) {
    Choice found;
    auto look = [&](const Choice& x) {
        bool smaller = !found.bytes || x.bytes < found.bytes;
        if (x.cost < best.cost && smaller) found = x;
    };
    for (auto& [number, x] : s.tried)
        look(x);

    // Try others, as long as one may take fewer bytes than what was found.
    size_t most = most_tries(s);
    while (s.tried.size() < most) {
        size_t limit = found.bytes ? found.bytes : SIZE_MAX;
        int next = leanest_untried(s, best.cost, limit);
        if (next < 0) break;
        look(try_choice(s, next));
    }
    return found;
}

// Measure what moves and seconds every choice is made of.
template <typename T, typename S>
void time_levels(ActivationSearch<T, S>& s) {
    // Sizes repeat from one micro-batch and one choice to the next: remember them.
    typedef std::tuple<Recompute, Kind, int, int, int> Size;
    auto known = std::make_shared<std::map<Size, size_t>>();
    s.cost.bytes = [known, &model = s.model, where = s.where](const Plan& p, Data d) {
        int number = persistent(d.kind) ? d.micro : -1;
        Size size = {p.recompute.of(d.of), d.kind, d.of, number, d.chunk};
        auto [entry, fresh] = known->insert({size, 0});
        if (fresh)
            entry->second = data_bytes<T>(p, model, d, where);
        return entry->second;
    };
    s.costs.rate = tier_rate(s.cost.machine, s.options[0].offload.activations);

    // Time a step that redoes nothing, then what each level adds for one block.
    take_choice(s, {});
    place_options(s);
    s.costs.compute = seconds_alone(s.plans[0], s.model, s.cost).first;
    Plan p = s.plans[0];
    for (int r = 0; r < RECOMPUTE_LEVELS; r++) {
        p.recompute = Recompute(r);
        Times redo;
        if (r > 0)
            redo = recompute_seconds(s.cost, p, s.model, s.blocks.front());
        s.costs.levels[r].cost = p.micro_batches * total_of(redo);
    }
}

// Add the choice in which FULL blocks keep one input for each `size` of them. Beyond the root of
// all inputs held, the rows of a segment outweigh the inputs that it drops.
template <typename T, typename S>
void add_segments(ActivationSearch<T, S>& s, int size) {
    int blocks = int(s.blocks.size());
    if (size * size > blocks * s.options[0].micro_batches) return;
    LevelCounts c = {blocks, 0, 0, Recompute::ATTN};
    c.segment = size;
    count_choice(c, blocks, s.costs);

    // Every block but the last one of a segment redoes its last product too.
    take_choice(s, c);
    Plan p = s.plans[0].without_actions();
    p.recompute = s.options[0].recompute;
    for (int l : s.blocks)
        if (remakes_output(p, s.model, l))
            c.flops += last_product_flops(layer_shape(s.model.shape, l));
    c.least = c.flops;
    s.list.push_back(c);
}

// Prepare the search of the rank at which the layout stands. options[0] is the plan that trains;
// cost: the machine by whose rates offloaded activations move.
template <typename T, typename S>
ActivationSearch<T, S> activation_search(const Layout& layout, const Model& model,
                                         const std::vector<PlanOptions>& options,
                                         const CostModel& cost, S where) {
    ActivationSearch<T, S> s = {layout, model, options, cost, where};
    s.steps = schedule_of(layout, options[0])[layout.pp.rank];
    for (const PlanOptions& o : options)
        s.plans.push_back(make_plan(layout, model, o));
    s.blocks = blocks_of(layout, model);
    bool may_leave = options[0].offload.activations != Tier::DEVICE;
    s.offloads = may_leave && !s.blocks.empty();
    s.costs = block_costs<T>(s.plans[0], model, where);
    if (s.offloads) time_levels(s);

    // Place the leanest plan: its lives bound the bytes of every other one.
    int count = int(s.blocks.size());
    int offloaded = s.offloads ? count : 0;
    take_choice(s, {count, 0, 0, Recompute::ATTN, offloaded});
    Arena arena = place_options(s);
    const Memory& host = arena.memory[int(Tier::HOST)];
    s.lasting = arena.device().persistent_bytes;
    if (is_here(Tier::HOST, where))
        s.lasting += s.offloads ? host.persistent_bytes : host.bytes;
    s.instants = instants_of(arena, s.plans[0], model);
    s.list = list_choices(count, s.costs, s.offloads);
    for (int size = 2; !s.offloads && size <= count; size++)
        add_segments(s, size);
    s.least.assign(s.list.size(), 0);
    return s;
}

// Choose levels, and the blocks that offload their activations if these may leave, for the rank at
// which the layout stands.
template <typename T, typename S>
Choices choose_activations(const Layout& layout, const Model& model,
                           const std::vector<PlanOptions>& options, size_t room,
                           const CostModel& cost, S where) {
    auto s = activation_search<T>(layout, model, options, cost, where);

    // Find the cheapest that fits. A walk that ended early may have missed one: go on from there.
    Choices found;
    found.best = cheapest_within(s, room);
    if (!found.best.bytes) return found;
    found.cheaper = smallest_cheaper(s, found.best);
    while (found.cheaper.bytes && found.cheaper.bytes <= room) {
        found.best = found.cheaper;
        found.cheaper = smallest_cheaper(s, found.best);
    }

    // Say what less memory would cost.
    found.dearer = cheapest_within(s, found.best.bytes - 1);
    return found;
}

} // namespace llmc
