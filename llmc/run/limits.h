// limits.h - memory and disk that this machine has left, asked before the run
//   Linux gives out memory page by page as it is touched. So it does not refuse a run that is too
//   large: it kills it minutes later, without a message. The plan knows every byte, so the program
//   refuses first, and names flags that fit.
#pragma once
#include <sys/statvfs.h>
#include "../action.h"
#include "../arena.h"
#include "../comm/comm.h"
#include "../family.h"
#include "../head.h"
#include "../io/checkpoint.h"
#include "../io/config.h"
#include "../io/config_check.h"
#include "../io/files.h"
#include "../io/machines.h"
#include "../io/mfu.h"
#include "../io/one_reader.h"
#include "../io/plan_flags.h"
#include "../io/replicas.h"
#include "../layout.h"
#include "../model.h"
#include "../recompute.h"
#include "../ops/types.h"
#include "../pipeline.h"
#include "../planner/activations.h"
#include "../planner/layer_cost.h"
#include "../planner/machine_here.h"
#include "../comm/text.h"
#include "../trainer.h"
#include "async_save.h"
#include "choose.h"
#include "run.h"

namespace llmc {

// ----------------------------------------------------------------------------
// memory

// Bytes that a rank takes beside its arena, of the memory that holds the model. An asynchronous
// save's copy takes none of a GPU's: it is in the host's memory.
template <typename T, typename S>
size_t bytes_beside(const Run& run, const std::vector<PlanOptions>& plans, int rank,
                    const Trainer<T, S>& t) {
    const Config& c = run.config;
    bool copies = c.save_async && has_steps(c) && is_here(Tier::HOST, t.ctx.where);
    return (copies ? snapshot_bytes(t) : 0) + companion_bytes(run, plans, rank, t.ctx.where);
}

// Bytes that a rank takes under given plans. Nothing is allocated.
template <typename T, typename S>
size_t plans_bytes(const Run& run, const std::vector<PlanOptions>& plans, int rank, S where) {
    Trainer<T, S> t;
    t.ctx.where = where;
    trainer_place(t, run.shape, plans, layout_at(run.layout, rank));
    return bytes_here(t.arena, where) + bytes_beside<T>(run, plans, rank, t);
}

// Bytes that a rank takes under a configuration; 0: config_check() refuses the configuration. The
// global batch stays the same: a smaller micro-batch is accumulated more often.
template <typename T, typename S>
size_t arena_bytes(const Run& like, Config c, int rank, S where) {
    // Check the flags as the run itself would. Threads as ranks count as one process.
    int processes = like.world.local ? 1 : like.world.size;
    if (!config_check(c, like.shape, processes).empty())
        return 0;

    Run run = like;
    run.config = c;
    std::vector<PlanOptions> plans = choose_plans(run);
    run.layout = choose_layout(c, run.shape);
    return plans_bytes<T>(run, plans, rank, where);
}

// Configurations that take less memory, the smallest change first: fewer slots, where prompts are
// answered or sampled; smaller micro-batches, with the run's own level of recomputation and then
// with levels chosen for each block. A schedule from a file fixes the size of its micro-batches.
inline std::vector<Config> leaner_configs(const Run& run) {
    const Config& c = run.config;
    std::vector<Config> all;
    bool has_slots = !c.prompts.empty() || has_rollouts(c);
    for (int slots = c.slots / 2; has_slots && slots > 0; slots /= 2)
        all.emplace_back(c).slots = slots;

    // Halve the micro-batch.
    int least = run.layout.pipeline == Pipeline::GIVEN ? c.micro_batch : 1;
    for (const std::string& recompute : {c.recompute, std::string("auto")})
        for (int B = c.micro_batch; B >= least; B /= 2) {
            Config& leaner = all.emplace_back(c);
            leaner.micro_batch = B;
            leaner.recompute = recompute;
        }
    return all;
}

// Flags that make a rank fit into `room` bytes, the smallest change first; "" if none does.
template <typename T, typename S>
std::string flags_that_fit(const Run& run, int rank, size_t room, S where) {
    const Config& c = run.config;
    for (const Config& leaner : leaner_configs(run)) {
        std::string flags;
        if (leaner.slots != c.slots)
            flags += concat(" --slots ", leaner.slots);
        if (leaner.micro_batch != c.micro_batch)
            flags += concat(" --micro-batch ", leaner.micro_batch);
        if (leaner.recompute != c.recompute)
            flags += concat(" --recompute ", leaner.recompute);

        // Place its plans, unless it is the run's own.
        size_t bytes = flags.empty() ? 0 : arena_bytes<T>(run, leaner, rank, where);
        if (bytes && bytes <= room) return flags;
    }
    return "";
}

// Bytes of this machine that a rank may take: an equal share of what is left. A part stays free for
// memory that no plan counts: the program, its data and tokenizer, what a save copies.
template <typename S> size_t memory_share(const Run& run, S where) {
    size_t left = memory_left(where);
    return (left - left / 32) / size_t(ranks_here(run.world, where));
}

// The least of all ranks' numbers. All ranks call.
inline size_t least_of_ranks(const Comm& world, size_t mine) {
    int64_t most = -int64_t(mine);
    all_reduce_max(world, &most, 1, Cpu{});
    return size_t(-most);
}

// End the run because `rank` needs more bytes than it has room for. The message gives both numbers,
// and flags that fit.
template <typename T, typename S>
void refuse_memory(const Run& run, int rank, size_t needed, size_t room, const std::string& there,
                   S where) {
    // Look for flags on the first rank, which prints the message: each try places a whole plan.
    std::string fit;
    if (is_first_rank(run))
        fit = flags_that_fit<T>(run, rank, room, where);
    std::string advice = "these flags fit:" + fit;
    bool shares = run.layout.dp.size * run.layout.cp.size > 1 && run.layout.zero < 3;
    if (fit.empty())
        advice = concat("no --micro-batch or --recompute makes it fit: try ",
                        shares ? "--zero 3, " : "", "--offload, --masters or --states, a smaller "
                        "--model, or more ranks (--explain shows where the bytes go)");

    // On the CPU, data offloaded to "cpu" lies in the same memory: say that it is included.
    bool same = is_here(Tier::HOST, where) && run.config.offload != "none";
    std::string shared = same && run.config.offload_to == "cpu" ? " with what it offloads" : "";

    // Name the rank if there are several.
    std::string of_rank = "this run";
    if (rank_count(run.config) > 1)
        of_rank = concat("rank ", rank);
    std::string needs = bytes_text(double(needed));
    or_die_on_all_ranks(run, concat(of_rank, " needs ", needs, shared, ", and ", there, advice));
}

// End the run if any rank needs more memory than its machine has left for it. All ranks call.
template <typename T, typename S>
void check_memory(const Run& run, const std::vector<PlanOptions>& plans, const Trainer<T, S>& t) {
    // Gather what each rank takes, and what it may take.
    size_t share = memory_share(run, t.ctx.where);
    size_t beside = bytes_beside(run, plans, run.world.rank, t);
    size_t takes = bytes_here(t.arena, t.ctx.where) + beside;
    int64_t mine[2] = {int64_t(takes), int64_t(share)};
    std::vector<int64_t> all(2 * size_t(run.world.size));
    all_gather(run.world, all.data(), mine, 2, Cpu{});

    // Name the rank that lacks most: stages and machines differ.
    int worst = 0;
    auto lacks = [&](int rank) { return all[2 * rank] - all[2 * rank + 1]; };
    for (int rank = 1; rank < run.world.size; rank++)
        if (lacks(rank) > lacks(worst)) worst = rank;
    if (lacks(worst) <= 0) return;
    size_t needed = size_t(all[2 * worst]), room = size_t(all[2 * worst + 1]);
    std::string there = concat(bytes_text(double(room)), " are left",
                               ranks_here(run.world, t.ctx.where) > 1 ? " for it: " : ": ");
    refuse_memory<T>(run, worst, needed, room, there, t.ctx.where);
}

// ----------------------------------------------------------------------------
// --memory and --recompute auto: every rank asks for all stages, so all hear the same

// End the run if any stage of the pipeline needs more than --memory. Where --recompute auto has
// found no levels that fit, the plans recompute everything.
template <typename T, typename S>
void check_bound(const Run& run, const std::vector<PlanOptions>& plans, S where) {
    size_t room = size_t(run.config.memory * GIB);
    if (run.config.memory == 0)
        return;

    // Find the fullest stage.
    size_t most = 0;
    int worst = 0;
    for (int pp = 0; pp < run.layout.pp.size; pp++) {
        int rank = first_rank_of(run.layout, pp);
        size_t bytes = plans_bytes<T>(run, plans, rank, where);
        if (bytes > most) worst = rank;
        most = std::max(most, bytes);
    }

    // Refuse on all ranks: all have found the same stage.
    std::string there = concat("--memory ", run.config.memory, " is less: ");
    if (most > room)
        refuse_memory<T>(run, worst, most, room, there, where);
}

// "layers 1..9 full offloaded, 10..32 selective": the levels of this rank's blocks.
inline std::string levels_text(const Layout& layout, const Model& model, const Choice& choice) {
    // Name a block's level, and its segments, and whether its activations leave the device.
    auto name_of = [&](int l) {
        bool offloaded = !choice.offloaded.empty() && choice.offloaded[size_t(l)];
        std::string name = recompute_name(choice.levels[size_t(l)]);
        if (offloaded) name += " offloaded";
        return choice.segment == 1 ? name : concat(name, " in segments of ", choice.segment);
    };

    // Extend a range of layers while the next layer is on this rank and has the same level.
    std::string text;
    for (int l = 1, first = 1; l < model.head(); l++) {
        bool mine = is_mine(layout, model, l);
        bool last = l + 1 == model.head();
        bool next_too = !last && is_mine(layout, model, l + 1);
        if (mine && next_too && name_of(l + 1) == name_of(l))
            continue;

        // Write the range that ends here.
        std::string to = l > first ? concat("..", l) : "";
        std::string comma = text.empty() ? "layers " : ", ";
        if (mine)
            text += concat(comma, first, to, " ", name_of(l));
        first = l + 1;
    }
    return text.empty() ? "no layers" : text;
}

// A choice in words: its bytes, and the FLOPs that it recomputes as a share of this rank's part
// of a step.
inline std::string choice_text(const Choice& choice, const Layout& layout, const Model& model,
                               size_t T) {
    double bytes = double(choice.bytes);
    double share = choice.flops * layout.pp.size / flops_per_token(model, T);
    std::string gib = formatted("%.2f GiB", bytes / GIB); // two digits: neighbours are close
    std::string text = bytes < GIB ? bytes_text(bytes) : gib;
    text += formatted(" with %.1f%% more FLOPs", 100 * share);
    if (!choice.seconds) return text;

    // Add the time where activations may leave: moves cost no FLOPs.
    return text + formatted(", %.2f ms a step alone, %.1f%% of it waiting for moves",
                            choice.seconds * 1e3, 100 * choice.waited / choice.seconds);
}

// With --recompute auto, choose each block's level, write it into the training plan, and return the
// lines to print. If nothing fits all blocks stay FULL, and the checks above refuse the run.
template <typename T, typename S>
std::string choose_recompute(const Run& run, std::vector<PlanOptions>& plans, S where) {
    const Config& c = run.config;
    if (c.recompute != "auto" || run.plans.train < 0)
        return "";

    // Find the room. Without --memory it is the least that any rank has left, less a margin: it may
    // shrink before the run takes it.
    size_t room = size_t(c.memory * GIB);
    if (c.memory == 0) {
        room = least_of_ranks(run.world, memory_share(run, where));
        room -= room / 32;
    }

    // Choose for one rank of each stage: the other ranks of the stage hold the same bytes. Every
    // rank does this for all stages, so all agree without a message.
    std::string text;
    Model model = make_model(with_logits(run.shape, where), run.layout);
    std::vector<Recompute> levels(model.layers(), Recompute::FULL);
    std::vector<int> segments(model.layers(), 1);
    std::vector<bool> offloaded(model.layers(), true);
    bool leave = offloads(c, "activations");
    CostModel cost;
    cost.element = sizeof(T);
    if (leave)
        cost.machine = machine_asked(c, "--recompute auto", where);
    for (int pp = 0; pp < run.layout.pp.size; pp++) {
        int rank = first_rank_of(run.layout, pp);
        Layout layout = layout_at(run.layout, rank);

        // Search with the room that copies and a second model leave.
        Trainer<T, S> placed;
        placed.ctx.where = where;
        trainer_place(placed, run.shape, plans, layout);
        size_t left = room - std::min(room, bytes_beside<T>(run, plans, rank, placed));
        Choices found = choose_activations<T>(layout, model, plans, left, cost, where);
        if (!found.best.bytes) continue;

        // Take over the levels of this stage's layers.
        const Choice& best = found.best;
        for (size_t l = 0; l < levels.size(); l++) {
            if (!is_mine(layout, model, int(l))) continue;
            levels[l] = best.levels[l];
            segments[l] = best.segment;
            if (!best.offloaded.empty()) offloaded[l] = best.offloaded[l];
        }

        // Print the choice, with its stage if there are several.
        auto say = [&](const Choice& x) {
            return choice_text(x, layout, model, size_t(c.seq));
        };
        std::string stage = layout.pp.size > 1 ? concat(", stage ", pp) : "";
        std::string of_blocks = levels_text(layout, model, best);
        std::string by = leave ? concat(", by the rates of ", cost.machine.name) : "";
        text += concat("recompute", stage, ": ", of_blocks, "; ", say(best), by, "\n");

        // Print the next cheaper and the next dearer choice too: the user may be able to find a
        // little more room, or want some of it for something else.
        if (found.cheaper.bytes)
            text += "  next cheaper: " + say(found.cheaper) + "\n";
        if (found.dearer.bytes)
            text += "  next dearer: " + say(found.dearer) + "\n";
    }
    plans[size_t(run.plans.train)].recompute = levels;
    plans[size_t(run.plans.train)].recompute.segments = segments;
    if (leave)
        plans[size_t(run.plans.train)].offload.parked = offloaded;

    // Check that all ranks chose the same. Workspaces depend on the number of threads, so ranks on
    // different machines may not.
    check_same(run.world, "what --recompute auto chose", text);
    return text;
}

// ----------------------------------------------------------------------------
// disk

// Bytes that the user may still write on the disk of a path; SIZE_MAX: unknown.
inline size_t disk_left(const std::string& path) {
    struct statvfs fs;
    if (statvfs(path.c_str(), &fs) != 0)
        return SIZE_MAX;
    return size_t(fs.f_bavail) * fs.f_frsize;
}

// Bytes that the ranks of this machine take together in a tier of memory. All ranks call.
template <typename T, typename S>
size_t bytes_of_machine(const Run& run, const Trainer<T, S>& t, Tier tier) {
    std::string boot = boot_name();
    size_t sum = 0;
    for (const std::string& rank :
         gather_texts(run.world, concat(boot, " ", t.arena.memory[int(tier)].bytes)))
        if (rank.starts_with(boot))
            sum += strtoull(rank.c_str() + boot.size(), nullptr, 10);
    return sum;
}

// End the run if --offload-to has no room for what is offloaded: the host's memory beside a GPU, or
// a disk. Returns the bytes that this machine's ranks take of the disk.
template <typename T, typename S>
size_t check_offload(const Run& run, const Trainer<T, S>& t) {
    const Config& c = run.config;
    size_t host = bytes_of_machine(run, t, Tier::HOST), disk = bytes_of_machine(run, t, Tier::DISK);
    auto lacks = [&](const std::string& place, size_t bytes, size_t left, const char* fix) {
        return concat("--offload-to ", place, ": ", bytes_text(double(bytes)),
                      " of state do not fit the ", bytes_text(double(left)), " that are left: ",
                      fix);
    };

    // Refuse a folder that is not there, a disk that is too full, or a host without the memory. On
    // the CPU check_memory() has counted the host's bytes: they share the run's memory.
    std::string wrong;
    mode_t type = file_type(c.offload_to);
    if (disk && type != S_IFDIR)
        wrong = concat("--offload-to ", printable(c.offload_to),
                       type ? ": is no folder: give one, or cpu"
                            : ": there is no such folder: make it, or give cpu");
    else if (disk > disk_left(c.offload_to))
        wrong = lacks(c.offload_to, disk, disk_left(c.offload_to),
                      "make room, or choose another folder");
    else if (!std::is_same_v<S, Cpu> && host > memory_left(Cpu{}))
        wrong = lacks("cpu", host, memory_left(Cpu{}), "give a folder");
    or_die_on_all_ranks(run, first_error(run.world, wrong));
    return disk;
}

// Whether two paths lie on one file system.
inline bool same_disk(const std::string& a, const std::string& b) {
    struct stat of_a, of_b;
    bool both = stat(a.c_str(), &of_a) == 0 && stat(b.c_str(), &of_b) == 0;
    return both && of_a.st_dev == of_b.st_dev;
}

// End the run if the disk of --out has no room for its checkpoints. A save writes the new one
// before it removes the oldest, so one more than --keep must fit.
// offloaded: bytes that go to --offload-to, which may be on the same disk.
template <typename T, typename S>
void check_disk(const Run& run, const Trainer<T, S>& t, size_t offloaded) {
    const Config& c = run.config;
    if (c.out.empty() || !is_first_rank(run))
        return;

    // Count the checkpoints that are still to come, each with the state of all ranks.
    size_t bytes = 0;
    for (const StateTensor& s : state_tensors(t))
        bytes += s.p->file_elements() * sizeof(acc_t<T>);
    size_t most = size_t(newest_kept(c)) + 1 + keeps_best(c);
    size_t there = std::min(most, checkpoint_steps(c.out).size());
    size_t needed = (most - there) * bytes;

    // Offloaded data take their room before the first save.
    size_t left = disk_left(c.out);
    if (same_disk(c.out, c.offload_to))
        left -= std::min(left, offloaded);
    LLMC_USER_CHECK(needed <= left,
                    "--out %s: %zu checkpoints of %s do not fit the %s that its disk has left: "
                    "make room, or choose another --out%s",
                    c.out.c_str(), most, bytes_text(double(bytes)).c_str(),
                    bytes_text(double(left)).c_str(),
                    newest_kept(c) > 1 ? " or a smaller --keep" : "");
}

} // namespace llmc
