// parking.h - which blocks' activations leave the device, and at which level: the least time
//   minimise  seconds of a rank's compute and moves    subject to    bytes of its arena <= room
//   budget.h chooses levels by FLOPs. Where activations may leave, parking is one more level: it
//   costs no arithmetic, and time only if the link to the other tier is busy when a block needs
//   its rows again. The simulator times that on the plan itself, on a machine's rates. Messages
//   between ranks are left out: every choice has the same.
//   The space: the first blocks are parked, since they wait longest for their backward pass. Levels
//   are those that budget.h lists, FULL ones first: for all blocks, or for those that stay, while
//   parked ones all have one level.
//     seconds >= max(compute + what is redone, bytes moved / rate)      if all moves are hidden
//     bytes   >= live bytes where every move leaves at once             rows of all other blocks
//   1. LIST   all choices, by the least seconds that they can take
//   2. WALK   Skip a choice whose least bytes do not fit. Place and simulate each other one, and
//             stop at the first that cannot be faster than the best so far: it is the fastest of
//             the list. Of all 10^L choices of up to 3 blocks the fastest is at most 1% better.
//   3. NEXT   The same walk under the bytes of the best finds the next dearer one. Of those that
//             are faster and do not fit, the one of fewest bytes is the next cheaper.
//   Cost: 3 L^4 / 4 choices of L blocks. Beyond 8 blocks the parked ones are counted in steps of
//   L/8, beyond 16 those at each level in steps of L/16. A walk that has placed 128 choices takes
//   the best so far, or the leanest if none fitted: of few blocks it meets all.
#pragma once
#include "../action.h"
#include "../arena.h"
#include "../layout.h"
#include "../model.h"
#include "../ops/types.h"
#include "../pipeline.h"
#include "../plan.h"
#include "../sizes.h"
#include "../streams.h"
#include "budget.h"
#include "cost.h"
#include "layer_cost.h"
#include "simulator.h"

namespace llmc {

// ----------------------------------------------------------------------------
// choices

// A choice: the first `parked` blocks of a rank leave the device.
struct ParkedCounts {
    int parked = 0;
    bool alike = false;                // parked blocks all have `level`, and `rest` is the others'
    Recompute level = Recompute::NONE;
    LevelCounts rest = {};             // levels of the other blocks, or of all blocks
    double least = 0;                  // seconds of a step, if moves wait for nothing but the link
    size_t moved = 0;                  // bytes of a micro-batch, both ways
    double flops = 0;                  // redone, a token
    size_t redone = 0;                 // bytes of a micro-batch

    bool parks(int block) const { return block < parked; }
    Recompute of(int block) const {
        if (!alike) return rest.of(block);
        return parks(block) ? level : rest.of(block - parked);
    }
};

// The costs of a block and of a rank, from which the least time of a choice follows.
struct ParkingCosts {
    LevelCosts levels;
    size_t stream = 0;                  // bytes of a block's input
    double compute = 0;                 // seconds of a step that redoes nothing
    double redo[RECOMPUTE_LEVELS] = {}; // seconds of a step, for one block
    double rate = 1;                    // bytes a second to the other tier
    int micro_batches = 1;
};

// Fill in what a choice for `blocks` blocks redoes and moves, and its least seconds.
inline void count_choice(ParkedCounts& c, int blocks, const ParkingCosts& costs) {
    double seconds = costs.compute;
    for (int i = 0; i < blocks; i++) {
        size_t number = size_t(c.of(i));
        const LevelCost& level = costs.levels[number];
        size_t bytes = costs.stream + level.kept[0] + level.kept[1];
        seconds += costs.redo[number];
        c.flops += level.flops;
        c.redone += level.redone;
        c.moved += c.parks(i) ? 2 * bytes : 0;
    }

    // Compute and moves run beside each other, so the longer of the two counts.
    double link = double(c.moved) * costs.micro_batches / costs.rate;
    c.least = std::max(seconds, link);
}

// List the levels' counts for `blocks` blocks: all of them, or those in steps of `stride`. What no
// step reaches goes to the level without recomputation.
inline std::vector<LevelCounts> list_in_steps(int blocks, int stride, const LevelCosts& costs) {
    std::vector<LevelCounts> list = list_choices(blocks, costs);
    std::erase_if(list, [&](const LevelCounts& c) {
        bool whole = c.full == blocks; // the leanest one stays
        return !whole && (c.full % stride || c.branch % stride || c.selective % stride);
    });
    return list;
}

// List all choices for `blocks` blocks, those of the least possible seconds first.
inline std::vector<ParkedCounts> list_parked(int blocks, const ParkingCosts& costs) {
    std::vector<ParkedCounts> list;
    auto add = [&](ParkedCounts c) {
        // With no block of either branch, one of the two entries is enough.
        if (!c.rest.branch && c.rest.which == Recompute::FFN)
            return;
        count_choice(c, blocks, costs);
        list.push_back(c);
    };

    // Park more and more blocks: at levels that begin with FULL, or all of them at one level.
    int stride = std::max(1, int(ceil_div(size_t(blocks), 8)));
    int of_level = std::max(1, int(ceil_div(size_t(blocks), 16)));
    for (int step = 0; (step - 1) * stride < blocks; step++) {
        int parked = std::min(step * stride, blocks);
        for (const LevelCounts& all : list_in_steps(blocks, of_level, costs.levels))
            add({parked, false, Recompute::NONE, all});
        std::vector<LevelCounts> rest = list_in_steps(blocks - parked, of_level, costs.levels);
        for (int level = 0; parked && level < RECOMPUTE_LEVELS; level++)
            for (const LevelCounts& others : rest)
                add({parked, true, Recompute(level), others});
    }

    // Among equals, move the fewest bytes, then redo the fewest.
    auto cheaper = [](const ParkedCounts& x, const ParkedCounts& y) {
        if (x.least != y.least)
            return x.least < y.least;
        if (x.moved != y.moved)
            return x.moved < y.moved;
        return x.redone < y.redone;
    };
    std::stable_sort(list.begin(), list.end(), cheaper);
    return list;
}

// ----------------------------------------------------------------------------
// instants: the least bytes of a choice, by a sum

// One instant of the plan in which every block is FULL and parked: the bytes that no choice
// changes, and for each datum of a block (kept.b, kept.w, its input) the micro-batches held.
struct ParkedInstant {
    size_t fixed;
    std::vector<int> near, whole; // [3 * layer + datum]: of a parked block; of one that stays
};

// The number of a datum in ParkedInstant, or -1 if no choice changes its bytes.
inline int chosen_datum(const Model& model, Data d) {
    if (!model.is_block(d.of)) return -1;
    switch (d.kind) {
    case Kind::KEPT_B:
    case Kind::REDO_B: return 3 * d.of;
    case Kind::KEPT_W:
    case Kind::REDO_W: return 3 * d.of + 1;
    case Kind::STREAM: return 3 * d.of + 2;
    default: return -1;
    }
}

// List the instants. A block that stays holds a datum from its first life to
// its last one.
inline std::vector<ParkedInstant> parked_instants(const Arena& leanest,
                                                  const Plan& p,
                                                  const Model& model) {
    // Note at each action what begins, and after it what ends.
    struct Change {
        int datum, near, whole;
        size_t begun, ended;
    };
    std::vector<std::vector<Change>> changes(p.actions.size() + 1);
    for (auto& [d, lives] : leanest.passing[0]) {
        int datum = of_bucket(d.kind) ? -1 : chosen_datum(model, d);
        bool redo = d.kind == Kind::REDO_B || d.kind == Kind::REDO_W;
        int sign = redo ? -1 : 1;
        for (const Place& life : lives) {
            if (life.tier != Tier::DEVICE) continue;
            size_t bytes = round_up(life.bytes, ARENA_ALIGN);

            // Other data are the same whatever the choice.
            if (datum < 0) {
                changes[life.first].push_back({-1, 0, 0, bytes, 0});
                changes[life.last + 1].push_back({-1, 0, 0, 0, bytes});
                continue;
            }

            // Rows that R remakes are all of a block's rows: they replace what its level keeps.
            size_t fixed = redo ? bytes : 0;
            bool begins = redo || &life == &lives.front();
            bool ends = redo || &life == &lives.back();
            changes[life.first].push_back({datum, sign, begins ? sign : 0, fixed, 0});
            changes[life.last + 1].push_back({datum, -sign, ends ? -sign : 0, 0, fixed});
        }
    }

    // Walk the plan. Of instants that hold the same, keep the one with most fixed bytes.
    std::vector<int> none(3 * model.layers());
    ParkedInstant now = {0, none, none};
    std::map<std::pair<std::vector<int>, std::vector<int>>, size_t> most;
    for (size_t i = 0; i < p.actions.size(); i++) {
        for (const Change& c : changes[i]) {
            now.fixed += c.begun - c.ended;
            if (c.datum < 0) continue;
            now.near[c.datum] += c.near;
            now.whole[c.datum] += c.whole;
        }
        size_t& fixed = most[{now.near, now.whole}];
        fixed = std::max(fixed, now.fixed);
    }

    std::vector<ParkedInstant> all;
    for (auto& [held, fixed] : most)
        all.push_back({fixed, held.first, held.second});
    return all;
}

// Return the least live bytes of a choice. `same`: parked data lie in the memory where the step
// runs, so that parking frees nothing.
inline size_t least_bytes(const std::vector<ParkedInstant>& instants,
                          const ParkingCosts& costs,
                          const std::vector<int>& blocks,
                          const ParkedCounts& choice,
                          bool same) {
    size_t most = 0;
    for (const ParkedInstant& now : instants) {
        size_t bytes = now.fixed;

        // Add what each block holds, by its level and whether it is parked.
        for (int i = 0; i < int(blocks.size()); i++) {
            const LevelCost& level = costs.levels[size_t(choice.of(i))];
            bool away = choice.parks(i) && !same;
            const int* held = away ? now.near.data() : now.whole.data();
            held += 3 * blocks[i];
            bytes += size_t(held[0]) * level.kept[0];
            bytes += size_t(held[1]) * level.kept[1];
            bytes += size_t(held[2]) * costs.stream;
        }
        most = std::max(most, bytes);
    }
    return most;
}

// ----------------------------------------------------------------------------
// the search

// A rank's choices, and all that the walk needs to try one.
template <typename T, typename S> struct ParkingSearch {
    const Layout& layout;
    const Model& model;
    std::vector<PlanOptions> options; // [0] is the plan that trains
    CostModel cost;
    S where;
    std::vector<ScheduleStep> steps = {};
    std::vector<Plan> plans = {};
    std::vector<int> blocks = {}; // this rank's
    ParkingCosts costs = {};
    std::vector<ParkedCounts> list = {};
    std::vector<size_t> least = {};   // [choice]: live bytes, at least
    std::map<int, Choice> tried = {}; // [choice]: placed and timed

    // Whether parked data lie in the memory where the step runs.
    bool same() const {
        return is_here(Tier::HOST, where) && options[0].offload.activations == Tier::HOST;
    }
};

// Return the seconds of a rank's compute and moves, and how many of them it waits for moves.
inline std::pair<double, double> seconds_alone(Plan p, const Model& model,
                                               const CostModel& cost) {
    std::erase_if(p.actions, [](const Action& a) { return needs_others(a.op); });
    StepTime step = simulate_step({p}, model, action_cost(cost, model));
    return {step.seconds, step.parts.moves};
}

// Make the plan of a choice, and return its arena.
template <typename T, typename S>
Arena place_parked(ParkingSearch<T, S>& s, const ParkedCounts& c) {
    // Write the choice into the options, block by block.
    int layers = s.model.layers();
    std::vector<Recompute> levels(layers, Recompute::NONE);
    std::vector<bool> parked(layers, false);
    for (int i = 0; i < int(s.blocks.size()); i++) {
        int layer = s.blocks[i];
        levels[layer] = c.of(i);
        parked[layer] = c.parks(i);
    }
    s.options[0].recompute = levels;
    s.options[0].offload.parked = parked;

    // Make the training plan again: levels change no other plan.
    s.plans[0] = make_plan(s.layout, s.model, s.options[0], s.steps);
    return place_plans<T>(s.plans, s.model, s.where);
}

// Place and time a choice, once.
template <typename T, typename S>
const Choice& try_choice(ParkingSearch<T, S>& s, int number) {
    auto [entry, fresh] = s.tried.insert({number, {}});
    Choice& x = entry->second;
    if (!fresh) return x;

    // Place its plan, then simulate it.
    const ParkedCounts& c = s.list[number];
    Arena arena = place_parked(s, c);
    auto [seconds, waited] = seconds_alone(s.plans[0], s.model, s.cost);
    x.seconds = seconds;
    x.waited = waited;
    x.bytes = bytes_here(arena, s.where);
    x.levels = s.options[0].recompute.given;
    x.parked = s.options[0].offload.parked;
    x.flops = c.flops;
    return x;
}

// The choices that one walk places and simulates before it takes the best that fits.
constexpr size_t MOST_TRIES = 128;

// Return the fastest choice that takes at most `room` bytes; 0 bytes: there is none.
template <typename T, typename S>
Choice fastest_within(ParkingSearch<T, S>& s, size_t room) {
    // Go by the least seconds, until no later choice can be faster than the best.
    Choice best;
    size_t most = s.tried.size() + MOST_TRIES;
    for (int i = 0; i < int(s.list.size()); i++) {
        bool slower = best.bytes && s.list[i].least >= best.seconds;
        if (slower || s.tried.size() >= most)
            break;
        if (s.least[i] > room) continue;
        const Choice& x = try_choice(s, i);
        if (x.bytes > room) continue;
        bool faster = !best.bytes || x.seconds < best.seconds;
        if (faster) best = x;
    }
    if (best.bytes || s.list.empty())
        return best;

    // The walk gave up before anything fitted: ask the choice of the fewest bytes.
    auto leanest = std::min_element(s.least.begin(), s.least.end());
    if (*leanest > room) return best;
    const Choice& x = try_choice(s, int(leanest - s.least.begin()));
    return x.bytes > room ? best : x;
}

// Return the choice of fewest bytes among those that are faster than `best`; 0 bytes: none is.
template <typename T, typename S>
Choice smallest_faster(ParkingSearch<T, S>& s, const Choice& best) {
    // Go by the least bytes, until no later one can take fewer than what was found.
    std::vector<std::pair<size_t, int>> order;
    for (int i = 0; i < int(s.list.size()); i++)
        if (s.list[i].least < best.seconds)
            order.push_back({s.least[i], i});
    std::sort(order.begin(), order.end());

    // Try them in this order. Each try makes and places a plan, so their number is limited.
    Choice found;
    size_t most = s.tried.size() + MOST_TRIES;
    for (auto [least, i] : order) {
        bool over = found.bytes && least >= found.bytes;
        if (over || s.tried.size() >= most)
            break;
        const Choice& x = try_choice(s, i);
        bool smaller = !found.bytes || x.bytes < found.bytes;
        if (x.seconds < best.seconds && smaller)
            found = x;
    }
    return found;
}

// Measure what every choice is made of: bytes and seconds of a block at each level.
template <typename T, typename S> void prepare_costs(ParkingSearch<T, S>& s) {
    const PlanOptions& o = s.options[0];
    // Sizes repeat from one micro-batch and one choice to the next: remember them.
    auto known = std::make_shared<std::map<std::tuple<Recompute, Kind, int, int>, size_t>>();
    s.cost.bytes = [known, &model = s.model, where = s.where](const Plan& p, Data d) {
        auto [entry, fresh] = known->insert({{p.recompute.of(d.of), d.kind, d.of, d.chunk}, 0});
        if (fresh)
            entry->second = data_bytes<T>(p, model, d, where);
        return entry->second;
    };

    // Take the bytes of a block, and the rate at which they move.
    ParkingCosts& costs = s.costs;
    Plan p = s.plans[0];
    costs.levels = level_costs<T>(p, s.model, s.where);
    size_t input = data_bytes<T>(p, s.model, {Kind::STREAM, 1}, s.where);
    costs.stream = round_up(input, ARENA_ALIGN);
    costs.rate = tier_rate(s.cost.machine, o.offload.activations);
    costs.micro_batches = o.micro_batches;

    // Time a step that redoes nothing, then what each level adds for one block.
    place_parked(s, {});
    costs.compute = seconds_alone(s.plans[0], s.model, s.cost).first;
    for (int r = 1; r < RECOMPUTE_LEVELS; r++) {
        p.recompute = Recompute(r);
        Times redo = recompute_seconds(s.cost, p, s.model, s.blocks.front());
        costs.redo[r] = o.micro_batches * total_of(redo);
    }
}

// Prepare the search of the rank at which the layout stands: all of its choices, with the least
// bytes and seconds of each. options[0] is the plan that trains.
template <typename T, typename S>
ParkingSearch<T, S> parking_search(const Layout& layout,
                                   const Model& model,
                                   const std::vector<PlanOptions>& options,
                                   const CostModel& cost,
                                   S where) {
    ParkingSearch<T, S> s = {layout, model, options, cost, where};
    s.steps = schedule_of(layout, options[0])[layout.pp.rank];
    for (const PlanOptions& o : options)
        s.plans.push_back(make_plan(layout, model, o));
    s.blocks = blocks_of(layout, model);
    if (s.blocks.empty()) return s;

    // Place the leanest plan: its lives bound the bytes of every other one.
    prepare_costs(s);
    int count = int(s.blocks.size());
    ParkedCounts leanest = {count, true, Recompute::FULL};
    Arena arena = place_parked(s, leanest);
    std::vector<ParkedInstant> instants = parked_instants(arena, s.plans[0], model);
    size_t lasting = arena.device().persistent_bytes;
    if (s.same())
        lasting += arena.memory[int(Tier::HOST)].persistent_bytes;

    // Bound the bytes of every choice.
    s.list = list_parked(count, s.costs);
    for (const ParkedCounts& c : s.list) {
        size_t bytes = least_bytes(instants, s.costs, s.blocks, c, s.same());
        s.least.push_back(lasting + bytes);
    }
    return s;
}

// Choose levels and parked blocks for the rank at which the layout stands. cost: a machine, by
// whose rates seconds are counted.
template <typename T, typename S>
Choices choose_parking(const Layout& layout,
                       const Model& model,
                       const std::vector<PlanOptions>& options,
                       size_t room,
                       const CostModel& cost,
                       S where) {
    ParkingSearch<T, S> s = parking_search<T>(layout, model, options, cost, where);
    if (s.blocks.empty())
        return choose_levels<T>(layout, model, options, room, where);

    // Find the fastest that fits.
    Choices found;
    found.best = fastest_within(s, room);
    if (!found.best.bytes) return found;

    // A walk that ended early may have missed a faster choice that fits: go on from there.
    found.cheaper = smallest_faster(s, found.best);
    while (found.cheaper.bytes && found.cheaper.bytes <= room) {
        found.best = found.cheaper;
        found.cheaper = smallest_faster(s, found.best);
    }

    // Say what less memory would cost.
    found.dearer = fastest_within(s, found.best.bytes - 1);
    return found;
}

} // namespace llmc
