// budget.h - a level of recomputation for each block: the least arithmetic whose bytes fit
//   minimise  FLOPs that a rank's blocks redo    subject to    bytes of its arena <= room
//   Blocks are alike, so a choice only counts the blocks at each level. At any instant of the plan
//   the running block holds all of its rows, and each block with micro-batches in flight (between
//   forward and backward) holds the rows that its level keeps:
//     live bytes = fixed + sum over blocks of micro-batches in flight * kept(level)
//   1. ORDER  An early block waits longest for its backward pass, so blocks that keep least come
//             first.
//   2. LIST   Counts of FULL, one branch, SELECTIVE and NONE, by FLOPs, then by bytes redone. One
//             branch is enough: ATTN on one block and FFN on another cost and keep together what
//             FULL and SELECTIVE do.
//   3. WALK   Skip every choice whose live bytes do not fit. Place the plan of the first one that
//             does, and walk on if its arena does not fit: the arena is the truth.
//   Cost: L^3 / 3 choices, most refused by one sum; 32 blocks take 0.3 s. llama3-8b in bf16 with
//   --seq 8192 --micro-batch 1 --memory 150: NONE takes 169.6 GiB, FULL 138.6 with 22.6% more
//   FLOPs; layer 1 FULL, 2..20 FFN, 21..31 SELECTIVE and 32 NONE take 150.0 with 8.9%.
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
#include "layer_cost.h"

namespace llmc {

// The cost of a level of recomputation for one block.
struct LevelCost {
    double flops; // redone, for each token
    // Bytes that one micro-batch keeps: [0] last read by the input half of the backward pass,
    // [1] by the weight half.
    size_t kept[2];
    size_t redone; // bytes of a micro-batch
};
typedef std::array<LevelCost, RECOMPUTE_LEVELS> LevelCosts;

// Return the cost of every level for one block. `p` is a plan of the trainer.
template <typename T, typename S>
LevelCosts level_costs(Plan p, const Model& model, S where) {
    // Where blocks differ, one with experts stands for all: no other kind has more rows.
    LevelCosts costs;
    int layer = 1;
    while (layer + 1 < model.head() && !is_sparse(model.shape, layer))
        layer++;
    Shape shape = layer_shape(model.shape, layer);

    // Ask each level for the rows that it keeps.
    // It redoes the rows that NONE keeps and it does not.
    for (int r = 0; r < RECOMPUTE_LEVELS; r++) {
        p.recompute = Recompute(r);
        size_t b = data_bytes<T>(p, model, {Kind::KEPT_B, layer}, where);
        size_t w = data_bytes<T>(p, model, {Kind::KEPT_W, layer}, where);
        size_t all = r == 0 ? b + w : costs[0].kept[0] + costs[0].kept[1];
        costs[r] = {recompute_flops(shape, p.T, Recompute(r)), {b, w}, all - b - w};
    }
    return costs;
}

// ----------------------------------------------------------------------------
// instants: the live bytes of a plan, whatever its levels are

// One instant of the plan: the bytes that no level changes, and for each layer the number of
// micro-batches of which it holds only its kept rows.
struct Instant {
    size_t fixed;
    std::vector<int> in_flight; // [2 * layer + half], halves as in LevelCost::kept
};

// List the instants of a plan whose blocks all recompute fully. `full` is its arena, placed first.
inline std::vector<Instant> instants_of(const Arena& full, const Plan& p, const Model& model) {
    // Note the bytes that appear at each action, and those that disappear after it.
    std::vector<std::vector<std::tuple<Data, int, size_t>>> changes(p.actions.size() + 1);
    for (auto& [d, lives] : full.passing[0])
        for (const Place& life : lives) {
            bool here = life.tier == Tier::DEVICE;
            size_t bytes = here ? round_up(life.bytes, ARENA_ALIGN) : 0;
            changes[life.first].push_back({d, 1, bytes});
            changes[life.last + 1].push_back({d, -1, bytes});
        }

    // Walk the plan. While the rows that R remakes exist, a layer has all of its rows, and
    // they count as fixed. Micro-batches repeat each other, so of equal instants only the
    // largest is kept.
    Instant now = {0, std::vector<int>(2 * model.layers())};
    std::map<std::vector<int>, size_t> most;
    for (size_t i = 0; i < p.actions.size(); i++) {
        for (auto [d, sign, bytes] : changes[i]) {
            now.fixed += size_t(sign) * bytes;
            int b = 2 * d.of, w = b + 1;
            switch (d.kind) {
            case Kind::KEPT_B: now.in_flight[b] += sign; break;
            case Kind::KEPT_W: now.in_flight[w] += sign; break;
            case Kind::REDO_B: now.in_flight[b] -= sign; break;
            case Kind::REDO_W: now.in_flight[w] -= sign; break;
            default: break;
            }
        }
        size_t& fixed = most[now.in_flight];
        fixed = std::max(fixed, now.fixed);
    }

    // Put the fullest instant first: it refuses most choices.
    std::vector<Instant> all;
    for (auto& [in_flight, fixed] : most)
        all.insert(all.begin(), {fixed, in_flight});
    return all;
}

// Return the peak of live bytes.
// If the peak exceeds `limit`, the result is only some number above it.
inline size_t live_bytes(const std::vector<Instant>& instants, const LevelCosts& costs,
                         const std::vector<Recompute>& levels, size_t limit = SIZE_MAX) {
    size_t most = 0;
    // Add to an instant the rows that each level keeps, for each micro-batch in flight.
    for (size_t i = 0; i < instants.size() && most <= limit; i++) {
        size_t bytes = instants[i].fixed;
        for (size_t k = 0; k < instants[i].in_flight.size(); k++)
            bytes += size_t(instants[i].in_flight[k]) * costs[int(levels[k / 2])].kept[k % 2];
        most = std::max(most, bytes);
    }
    return most;
}

// ----------------------------------------------------------------------------
// choices

// A choice: how many blocks have each level.
// FULL comes first, then the branch, then SELECTIVE; the last blocks keep everything.
struct LevelCounts {
    int full, branch, selective;
    Recompute which; // the branch: ATTN or FFN
    double flops;    // redone, a token
    size_t redone;   // bytes of a micro-batch

    // Return the level of block `block`, counted from 0.
    Recompute of(int block) const {
        if (block < full) return Recompute::FULL;
        if (block < full + branch) return which;
        return block < full + branch + selective ? Recompute::SELECTIVE : Recompute::NONE;
    }
};

// List all choices for `blocks` blocks, the cheapest first.
inline std::vector<LevelCounts> list_choices(int blocks, const LevelCosts& costs) {
    const LevelCost &all = costs[int(Recompute::FULL)], &cheap = costs[int(Recompute::SELECTIVE)];
    std::vector<LevelCounts> list;
    auto redone = [](int count, const LevelCost& one) { return size_t(count) * one.redone; };

    // Count blocks at each level: they are alike, so the counts are the whole choice.
    for (Recompute which : {Recompute::ATTN, Recompute::FFN})
        for (int full = 0; full <= blocks; full++)
            for (int branch = 0; full + branch <= blocks; branch++)
                for (int selective = 0; full + branch + selective <= blocks; selective++) {
                    const LevelCost& one = costs[int(which)];
                    list.push_back({full, branch, selective, which,
                                    full * all.flops + branch * one.flops,
                                    redone(full, all) + redone(branch, one) +
                                        redone(selective, cheap)});
                }

    // Sort by arithmetic; among equals, by the bytes made again.
    std::stable_sort(list.begin(), list.end(), [](const LevelCounts& x, const LevelCounts& y) {
        return std::pair(x.flops, x.redone) < std::pair(y.flops, y.redone);
    });
    return list;
}

// A choice and the bytes of its arena; 0 bytes means that there is no choice.
struct Choice {
    std::vector<Recompute> levels; // [layer]; those of other ranks are NONE
    double flops = 0;              // redone, for each token
    size_t bytes = 0;
    std::vector<int> segments = {}; // [layer]: blocks that keep one input (recompute.h)
    std::vector<bool> parked = {};  // [layer]: whose activations leave the device (parking.h)
    double seconds = 0, waited = 0; // of the rank's compute and moves, if any is parked
};

// List this rank's blocks that run backward: only these keep or redo anything.
inline std::vector<int> blocks_of(const Layout& layout, const Model& model) {
    std::vector<int> blocks;
    for (int l = std::max(1, lowest_trained(model)); l < model.head(); l++)
        if (is_mine(layout, model, l))
            blocks.push_back(l);
    return blocks;
}

// best: the cheapest that fits. cheaper: the smallest of those that cost less and do not fit.
// dearer: the next one that takes fewer bytes than best.
struct Choices { Choice best, cheaper, dearer; };

// A function that places a rank's plan and returns the arena's bytes.
typedef std::function<size_t(const RecomputeLevels&)> LevelBytes;

// Choose segments for a rank whose blocks do not fit even if each keeps its input alone: the
// smallest that fit, which redo the least.
inline Choices choose_segments(const Plan& p,
                               const Model& model,
                               int blocks,
                               double full_flops,
                               size_t room,
                               const LevelBytes& place) {
    // Begin with blocks that keep an input each.
    Choices found;
    Choice last;
    last.levels.assign(model.layers(), Recompute::FULL);
    last.flops = blocks * full_flops;
    last.bytes = place(last.levels);
    // Beyond the root of all inputs held, the rows of a segment outweigh the inputs that it drops.
    for (int size = 2; size <= blocks && size * size <= blocks * p.micro_batches; size++) {
        // Every block but the last one of a segment redoes its last product too.
        Choice now = last;
        RecomputeLevels levels = last.levels;
        levels.segments.assign(model.layers(), size);
        now.segments = levels.segments;
        now.flops = blocks * full_flops;
        Plan like = p;
        like.recompute = levels;
        for (int l : blocks_of(p.layout, model))
            if (remakes_output(like, model, l))
                now.flops += last_product_flops(layer_shape(model.shape, l));
        now.bytes = place(levels);

        // Take the first that fits, then the next one of fewer bytes.
        bool over = found.best.bytes > 0;
        if (over && now.bytes < found.best.bytes) {
            found.dearer = now;
            break;
        }
        if (!over && now.bytes <= room) {
            found.best = now;
            found.cheaper = last;
        }
        if (now.bytes < last.bytes) last = now;
    }
    return found;
}

// Choose the levels for the rank at which the layout stands. options[0] is the plan that trains.
template <typename T, typename S>
Choices choose_levels(const Layout& layout, const Model& model, std::vector<PlanOptions> options,
                      size_t room, S where) {
    // Make all plans once: levels change the first plan alone.
    std::vector<ScheduleStep> steps = schedule_of(layout, options[0])[layout.pp.rank];
    std::vector<Plan> plans;
    for (const PlanOptions& o : options)
        plans.push_back(make_plan(layout, model, o));
    auto place = [&](const RecomputeLevels& levels) {
        options[0].recompute = levels;
        plans[0] = make_plan(layout, model, options[0], steps);
        return place_plans<T>(plans, model, where);
    };

    // Place the plan that recomputes everything.
    // If that does not fit, only segments may; if it does, it shows the instants.
    Choices found;
    Arena full = place(std::vector<Recompute>(model.layers(), Recompute::FULL));
    std::vector<int> blocks = blocks_of(layout, model);
    LevelCosts costs = level_costs<T>(plans[0], model, where);
    if (bytes_here(full, where) > room) {
        auto bytes = [&](const RecomputeLevels& levels) {
            return bytes_here(place(levels), where);
        };
        double flops = costs[int(Recompute::FULL)].flops;
        return choose_segments(plans[0], model, int(blocks.size()), flops, room, bytes);
    }
    std::vector<Instant> instants = instants_of(full, plans[0], model);
    size_t passing = full.device().bytes - full.device().persistent_bytes;
    size_t lasting = bytes_here(full, where) - passing;

    // Walk the choices. One matters only if it takes fewer bytes than all that cost less.
    size_t least = SIZE_MAX;
    for (const LevelCounts& c : list_choices(int(blocks.size()), costs)) {
        std::vector<Recompute> levels(model.layers(), Recompute::NONE);
        for (int i = 0; i < int(blocks.size()); i++)
            levels[blocks[i]] = c.of(i);
        size_t bytes = lasting + live_bytes(instants, costs, levels, least - lasting);
        if (bytes < least && bytes <= room)
            bytes = bytes_here(place(levels), where);
        if (bytes >= least) continue;

        // Take the first that fits, and note the next one that takes fewer bytes; then stop.
        bool fits = bytes <= room;
        bool over = found.best.bytes > 0;
        (over ? found.dearer : fits ? found.best : found.cheaper) = {levels, c.flops, bytes};
        if (over) break;
        least = bytes;
    }
    return found;
}

} // namespace llmc
