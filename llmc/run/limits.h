// limits.h - memory and disk that this machine has left, asked before the run
//   CPU memory is given out page by page as it is touched, so a run that is too large is not
//   refused by the system: it is killed minutes later, without a line. The plan knows every byte,
//   so the program refuses first, and names flags that fit.
#pragma once
#include <sys/statvfs.h>
#include "../budget.h"
#include "../io/async_save.h"
#include "../io/mfu.h"
#include "draft.h"

namespace llmc {

// ----------------------------------------------------------------------------
// memory

// A number at the start of a file; `otherwise` where there is no such file or it says "max".
inline size_t number_in_file(const std::string& path, size_t otherwise) {
    std::ifstream in(path);
    size_t n = 0;
    return in >> n ? n : otherwise;
}

// Bytes of a control group that hold files: the system frees them when somebody needs room.
inline size_t cgroup_cache(const std::string& group, const char* prefix) {
    std::ifstream in(group + "/memory.stat");
    size_t bytes = 0, n = 0;
    for (std::string name; in >> name >> n;)
        if (name == concat(prefix, "inactive_file") || name == concat(prefix, "active_file"))
            bytes += n;
    return bytes;
}

// Bytes that a control group may still take; SIZE_MAX: it has no limit.
inline size_t cgroup_room(const std::string& group, bool second) {
    size_t most = number_in_file(
        group + (second ? "/memory.max" : "/memory.limit_in_bytes"), SIZE_MAX);
    if (most == SIZE_MAX) return most;
    size_t used =
        number_in_file(group + (second ? "/memory.current" : "/memory.usage_in_bytes"), 0);
    used -= std::min(used, cgroup_cache(group, second ? "" : "total_"));
    return most > used ? most - used : 0;
}

// The least room of this process's control group and those above it. Containers and batch systems
// set such limits.
inline size_t cgroup_left() {
    size_t least = SIZE_MAX;
    std::ifstream groups("/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {
        // "0::/a/b" is of version 2, "7:memory:/a/b" of version 1.
        bool second = line.rfind("0::", 0) == 0;
        size_t at = line.find(":memory:");
        if (!second && at == std::string::npos)
            continue;
        std::string root = second ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
        std::string group = line.substr(second ? 3 : at + 8);

        // Walk up to the root: inside a container that is the container's own group.
        for (;; group.resize(group.rfind('/'))) {
            least = std::min(least, cgroup_room(root + group, second));
            if (group.find('/') == std::string::npos)
                break;
        }
    }
    return least;
}

// Bytes that this machine can still give: what is free, and what the system can free.
inline size_t memory_left(Cpu) {
    size_t left = SIZE_MAX;
    std::ifstream in("/proc/meminfo");
    for (std::string line; std::getline(in, line);)
        if (line.rfind("MemAvailable:", 0) == 0)
            left = strtoull(line.c_str() + strlen("MemAvailable:"), nullptr, 10) * 1024;
    return std::min(left, cgroup_left());
}
#if LLMC_KERNELS
inline size_t memory_left(cudaStream_t) {
    size_t left = 0, all = 0;
    LLMC_CUDA_CHECK(cudaMemGetInfo(&left, &all));
    return left;
}
#endif

// The name of this machine since it was started.
inline std::string boot_name() {
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    return boot;
}

// Ranks that take their memory from the same place: on the CPU those of this machine, which has one
// boot; on GPUs threads of a process share one, and processes have their own.
template <typename S> int ranks_here(const Run& run, S) {
    if (run.world.local) return run.world.size;
    if (!std::is_same_v<S, Cpu>) return 1;
    std::string boot = boot_name();
    std::vector<std::string> all = gather_texts(run.world, boot);
    return int(std::count(all.begin(), all.end(), boot));
}

// Bytes that a save beside the steps takes of the memory in which a rank's step runs.
template <typename T, typename S>
size_t snapshot_here(const Config& c, const Trainer<T, S>& t) {
    bool saves = c.save_async && c.steps > 0 && !c.eval;
    return saves && std::is_same_v<S, Cpu> ? snapshot_bytes(t) : 0;
}

// Bytes that a rank of a configuration takes; 0: the configuration is refused.
template <typename T, typename S>
size_t arena_bytes(const Run& like, Config c, int rank, S where) {
    // A smaller micro-batch is accumulated more often: the global batch stays.
    int processes = like.world.local ? 1 : like.world.size;
    if (!config_check(c, like.shape, processes).empty())
        return 0;
    Run run = like;
    run.config = c;
    Trainer<T, S> t;
    t.ctx.where = where;
    std::vector<PlanOptions> plans = choose_plans(run);
    trainer_place(t, run.shape, plans, layout_at(choose_layout(c, run.shape), rank));
    size_t beside = snapshot_here(c, t) + draft_bytes<T>(run, plans, where);
    return bytes_here(t.arena, where) + beside;
}

// The most slots that fit, where a run answers prompts or samples what it trains on; "" where one
// slot does not.
template <typename T, typename S>
std::string slots_that_fit(const Run& run, int rank, size_t room, S where) {
    bool has_slots = !run.config.prompts.empty() || has_rollouts(run.config);
    for (int slots = run.config.slots; has_slots && (slots /= 2) > 0;) {
        Config c = run.config;
        c.slots = slots;
        if (arena_bytes<T>(run, c, rank, where) <= room)
            return concat(" --slots ", slots);
    }
    return "";
}

// Flags that make a rank fit `room` bytes, the least change first; "" where none does.
template <typename T, typename S>
std::string flags_that_fit(const Run& run, int rank, size_t room, S where) {
    std::string slots = slots_that_fit<T>(run, rank, room, where);
    if (!slots.empty()) return slots;

    // Ask first whether anything helps. A schedule from a file is for one number of micro-batches.
    Config least = run.config;
    bool any_batch = run.layout.pipeline != Pipeline::GIVEN;
    least.micro_batch = any_batch ? 1 : least.micro_batch;
    least.recompute = "full";
    if (arena_bytes<T>(run, least, rank, where) > room)
        return "";

    // The search for levels does not know activations that leave.
    const char* more = offloads(run.config, "activations") ? "full" : "auto";
    for (const char* recompute : {"", more}) {
        for (int B = run.config.micro_batch; B >= least.micro_batch; B /= 2) {
            Config c = run.config;
            c.micro_batch = B;
            std::string flags;
            if (B != run.config.micro_batch)
                flags += concat(" --micro-batch ", B);
            if (*recompute) {
                c.recompute = recompute;
                flags += concat(" --recompute ", recompute);
            }
            size_t bytes = arena_bytes<T>(run, c, rank, where);
            if (bytes && bytes <= room) return flags;
        }
    }
    return "";
}

// Bytes of this machine that a rank may take. A part stays free for what is no plan's: the program,
// its data and tokenizer, a save's copy.
template <typename S> size_t memory_share(const Run& run, S where) {
    size_t left = memory_left(where);
    return (left - left / 32) / size_t(ranks_here(run, where));
}

// Refuse a plan that needs more than its room: the numbers, and flags that fit. `rank` has it.
template <typename T, typename S>
void refuse_memory(const Run& run, int rank, size_t needed, size_t room, const std::string& there,
                   S where) {
    // The first rank says so for all, so it alone looks for flags: each try is a placing.
    std::string fit;
    if (is_first(run))
        fit = flags_that_fit<T>(run, rank, room, where);
    std::string advice = "these flags fit:" + fit;
    if (fit.empty())
        advice = "no --micro-batch or --recompute makes it fit: try --offload, --masters or "
                 "--states, a smaller --model, or more ranks (--explain shows where the bytes go)";
    bool same = std::is_same_v<S, Cpu> && run.config.offload != "none";
    std::string shared = same && run.config.offload_to == "cpu" ? " with what it offloads" : "";

    // Name the rank where there are several.
    std::string of_rank = "this run";
    if (rank_count(run.config) > 1)
        of_rank = concat("rank ", rank);
    std::string needs = bytes_text(double(needed));
    or_die_on_all_ranks(run, concat(of_rank, " needs ", needs, shared, ", and ", there, advice));
}

// Refuse a run that this machine has no memory for.
template <typename T, typename S>
void check_memory(const Run& run, const Trainer<T, S>& t) {
    size_t share = memory_share(run, t.ctx.where);
    size_t beside = snapshot_here(run.config, t) + run.draft_bytes;
    size_t takes = bytes_here(t.arena, t.ctx.where) + beside;
    int64_t mine[2] = {int64_t(takes), int64_t(share)};
    std::vector<int64_t> all(2 * size_t(run.world.size));
    all_gather(run.world, all.data(), mine, 2, Cpu{});

    // Stages and machines differ: speak of the rank that lacks most.
    int worst = 0;
    auto lacks = [&](int rank) { return all[2 * rank] - all[2 * rank + 1]; };
    for (int rank = 1; rank < run.world.size; rank++)
        if (lacks(rank) > lacks(worst)) worst = rank;
    if (lacks(worst) <= 0) return;
    size_t needed = size_t(all[2 * worst]), room = size_t(all[2 * worst + 1]);
    std::string there = concat(bytes_text(double(room)), " are left",
                               ranks_here(run, t.ctx.where) > 1 ? " for it: " : ": ");
    refuse_memory<T>(run, worst, needed, room, there, t.ctx.where);
}

// ----------------------------------------------------------------------------
// --memory and --recompute auto: every rank asks for all stages, so all hear the same

// The unit of --memory, and of what --explain prints.
constexpr double GIB = 1073741824;

// The first rank of a stage: others of the stage take the same bytes.
inline int first_rank_of(const Layout& layout, int pp_rank) {
    int rank = 0;
    while (layout_at(layout, rank).pp.rank != pp_rank)
        rank++;
    return rank;
}

// Refuse a plan that needs more than --memory, on any rank of the pipeline.
template <typename T, typename S> void check_bound(const Run& run, S where) {
    size_t room = size_t(run.config.memory * GIB);
    if (run.config.memory == 0)
        return;

    // Find the fullest stage. "auto" counts as FULL here: where that fits, the choice does.
    size_t most = 0;
    int worst = 0;
    for (int pp = 0; pp < run.layout.pp.size; pp++) {
        int rank = first_rank_of(run.layout, pp);
        size_t bytes = arena_bytes<T>(run, run.config, rank, where);
        if (bytes > most) worst = rank;
        most = std::max(most, bytes);
    }

    // Say so on all ranks, for all have found the same.
    std::string there = concat("--memory ", run.config.memory, " is less: ");
    if (most > room)
        refuse_memory<T>(run, worst, most, room, there, where);
}

// "layers 1..9 full, 10..32 selective": the levels of this rank's blocks.
inline std::string levels_text(const Layout& layout, const Model& model,
                               const std::vector<Recompute>& levels) {
    // A run of blocks goes on while the level and the rank stay.
    std::string text;
    for (int l = 1, first = 1; l < model.head(); l++) {
        bool mine = is_mine(layout, model, l);
        bool last = l + 1 == model.head();
        bool next_too = !last && is_mine(layout, model, l + 1);
        if (mine && next_too && levels[l + 1] == levels[l])
            continue;

        // Write the run that ends here.
        std::string to = l > first ? concat("..", l) : "";
        std::string comma = text.empty() ? "layers " : ", ";
        if (mine)
            text += concat(comma, first, to, " ", recompute_name(levels[l]));
        first = l + 1;
    }
    return text.empty() ? "no layers" : text;
}

// A choice's bytes, and what it redoes as a share of this rank's part of a step.
inline std::string choice_text(const Choice& choice, const Layout& layout, const Model& model,
                               size_t T) {
    char gib[32], percent[32];
    double bytes = double(choice.bytes);
    double share = choice.flops * layout.pp.size / flops_per_token(model, T);
    snprintf(gib, sizeof(gib), "%.2f GiB", bytes / GIB); // neighbours are close
    snprintf(percent, sizeof(percent), "%.1f%%", 100 * share);
    return concat(bytes < GIB ? bytes_text(bytes) : gib, " with ", percent, " more FLOPs");
}

// Give each block its level, and say so. Where nothing fits all stay FULL, which is then refused.
template <typename T, typename S>
std::string choose_recompute(const Run& run, std::vector<PlanOptions>& plans, S where) {
    const Config& c = run.config;
    if (c.recompute != "auto" || run.train_plan < 0)
        return "";

    // Without --memory take the least that any rank finds. It may shrink before the run takes it.
    size_t room = size_t(c.memory * GIB);
    if (c.memory == 0) {
        std::vector<int64_t> all(size_t(run.world.size));
        int64_t mine = int64_t(memory_share(run, where));
        all_gather(run.world, all.data(), &mine, 1, Cpu{});
        room = size_t(*std::min_element(all.begin(), all.end()));
        room -= room / 32;
    }

    // Choose for one rank of each stage: the others of a stage hold the same bytes. Each rank does
    // this for all stages, so all have one plan without a message.
    std::string text;
    Model model = make_model(with_logits(run.shape, where), run.layout);
    std::vector<Recompute> levels(model.layers(), Recompute::FULL);
    for (int pp = 0; pp < run.layout.pp.size; pp++) {
        Layout layout = layout_at(run.layout, first_rank_of(run.layout, pp));
        // A save's copy is no part of any level.
        Trainer<T, S> placed;
        if (c.save_async) trainer_place(placed, run.shape, plans, layout);
        size_t copy = snapshot_here(c, placed);
        Choices found = choose_levels<T>(layout, model, plans, room - std::min(room, copy), where);
        if (!found.best.bytes) continue;

        // Take the levels of the stage's own layers.
        for (int l = 0; l < model.layers(); l++)
            if (is_mine(layout, model, l))
                levels[l] = found.best.levels[l];

        // Name the stage where there are several.
        auto say = [&](const Choice& x) {
            return choice_text(x, layout, model, size_t(c.seq));
        };
        std::string stage = layout.pp.size > 1 ? concat(", stage ", pp) : "";
        std::string of_blocks = levels_text(layout, model, found.best.levels);
        text += concat("recompute", stage, ": ", of_blocks, "; ", say(found.best), "\n");

        // Say what the neighbours would save and cost: the user may have a little more room, or
        // want some for something else.
        std::string next;
        if (found.cheaper.bytes)
            next += "  next cheaper: " + say(found.cheaper);
        if (found.dearer.bytes)
            next += "  next dearer: " + say(found.dearer);
        if (!next.empty())
            text += next + "\n";
    }
    plans[size_t(run.train_plan)].recompute = levels;

    // Workspaces depend on the number of threads, so machines may differ.
    check_same(run.world, "what --recompute auto chose", text);
    return text;
}

// ----------------------------------------------------------------------------
// disk

// Bytes of a checkpoint: the state of all ranks together.
template <typename T, typename S>
size_t checkpoint_bytes(const Trainer<T, S>& t) {
    size_t elements = 0;
    for (const StateTensor& s : state_tensors(t))
        elements += s.p->file_elements();
    return elements * sizeof(acc_t<T>);
}

// Bytes that a user may still write where a path is; SIZE_MAX: not known.
inline size_t disk_left(const std::string& path) {
    struct statvfs fs;
    if (statvfs(path.c_str(), &fs) != 0)
        return SIZE_MAX;
    return size_t(fs.f_bavail) * fs.f_frsize;
}

// Bytes of a tier that the ranks of this machine take together. All ranks call.
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

// Refuse an offload that its place has no room for: the host's memory beside a GPU, or a disk.
// Returns the bytes that this machine's ranks take of the disk.
template <typename T, typename S>
size_t check_offload(const Run& run, const Trainer<T, S>& t) {
    const Config& c = run.config;
    size_t host = bytes_of_machine(run, t, Tier::HOST), disk = bytes_of_machine(run, t, Tier::DISK);
    auto lacks = [&](const std::string& place, size_t bytes, size_t left, const char* fix) {
        return concat("--offload-to ", place, ": ", bytes_text(double(bytes)),
                      " of state do not fit the ", bytes_text(double(left)), " that are left: ",
                      fix);
    };

    // A folder that is not there has no room either, and a GPU's host is not its memory.
    std::string wrong;
    struct stat info;
    bool folder = stat(c.offload_to.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
    if (disk && !folder)
        wrong = concat("--offload-to ", printable(c.offload_to),
                       ::access(c.offload_to.c_str(), F_OK) == 0
                           ? ": is no folder: give one, or cpu"
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

// A save makes the new checkpoint before it removes the oldest, so there is one more than --keep.
// offloaded: bytes that go to --offload-to, maybe on the same disk.
template <typename T, typename S>
void check_disk(const Run& run, const Trainer<T, S>& t, size_t offloaded) {
    const Config& c = run.config;
    if (c.out.empty() || !is_first(run)) return;
    size_t bytes = checkpoint_bytes(t);
    size_t most = size_t(c.keep) + 1 + c.keep_best;
    size_t there = std::min(most, checkpoint_steps(c.out).size());
    size_t needed = (most - there) * bytes;
    size_t left = disk_left(c.out);
    if (same_disk(c.out, c.offload_to))
        left -= std::min(left, offloaded);
    LLMC_USER_CHECK(needed <= left,
                    "--out %s: %zu checkpoints of %s do not fit the %s that its disk has left: "
                    "make room, or choose another --out%s",
                    c.out.c_str(), most, bytes_text(double(bytes)).c_str(),
                    bytes_text(double(left)).c_str(),
                    c.keep > 1 ? " or a smaller --keep" : "");
}

} // namespace llmc
