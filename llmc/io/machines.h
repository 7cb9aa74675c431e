// machines.h - the machines of a run: memory left on each, ranks on each, axes across them
//   Machines are found at the start, by a name that no two of them share; nobody writes them into a
//   file. --plan auto takes their ranks for the cards of a node, --calibrate measures links inside
//   and between them, and a run says which axes cross them.
#pragma once
#include "../comm/group.h"
#include "../layout.h"
#include "../ops/cuda_common.h"
#include "../ops/types.h"
#include "../comm/text.h"
#include "one_reader.h"

namespace llmc {

// ----------------------------------------------------------------------------
// memory that is left

// The number at the start of a file; `otherwise` if there is no such file, or it holds "max".
inline size_t number_in_file(const std::string& path, size_t otherwise) {
    std::ifstream in(path);
    size_t n = 0;
    return in >> n ? n : otherwise;
}

// Bytes of a control group that only cache files: the system frees them when memory is needed.
inline size_t cgroup_cache(const std::string& group, const char* prefix) {
    std::ifstream in(group + "/memory.stat");
    size_t bytes = 0, n = 0;
    for (std::string name; in >> name >> n;)
        if (name == concat(prefix, "inactive_file") || name == concat(prefix, "active_file"))
            bytes += n;
    return bytes;
}

// Bytes that a control group may still take; SIZE_MAX: it has no limit. second: the group is of
// version 2 of Linux's control groups.
inline size_t cgroup_room(const std::string& group, bool second) {
    size_t most = number_in_file(
        group + (second ? "/memory.max" : "/memory.limit_in_bytes"), SIZE_MAX);
    if (most == SIZE_MAX) return most;
    size_t used =
        number_in_file(group + (second ? "/memory.current" : "/memory.usage_in_bytes"), 0);
    used -= std::min(used, cgroup_cache(group, second ? "" : "total_"));
    return most > used ? most - used : 0;
}

// The least room in this process's control group and the groups above it. Containers and batch
// systems set such limits.
inline size_t cgroup_left() {
    size_t least = SIZE_MAX;
    std::ifstream groups("/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {
        // Read a line: "0::/a/b" is a group of version 2, "7:memory:/a/b" one of version 1.
        bool second = line.starts_with("0::");
        size_t at = line.find(":memory:");
        if (!second && at == std::string::npos)
            continue;
        std::string root = second ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
        std::string group = line.substr(second ? 3 : at + 8);

        // Walk up to the root. Inside a container the root is the container's own group.
        for (;; group.resize(group.rfind('/'))) {
            least = std::min(least, cgroup_room(root + group, second));
            if (group.find('/') == std::string::npos)
                break;
        }
    }
    return least;
}

// Bytes that are left on this machine: free memory, and memory that the system can free.
inline size_t memory_left(Cpu) {
    size_t left = SIZE_MAX;
    std::ifstream in("/proc/meminfo");
    for (std::string line; std::getline(in, line);)
        if (line.starts_with("MemAvailable:"))
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

// A name of this machine that no other machine has: Linux draws one at each start.
inline std::string boot_name() {
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    return boot;
}

// The number of ranks that share one memory with this rank. On the CPU these are the ranks of this
// machine. On GPUs each process has a GPU of its own, and threads as ranks share one.
template <typename S> int ranks_here(const Comm& world, S) {
    if (world.local) return world.size;
    if (!std::is_same_v<S, Cpu>) return 1;
    std::string boot = boot_name();
    std::vector<std::string> all = gather_texts(world, boot);
    return int(std::ranges::count(all, boot));
}

// ----------------------------------------------------------------------------
// ranks on machines

// The machine of each rank of the world, numbered in the order in which they appear.
struct Machines {
    std::vector<int> of = {}; // [rank]
    int count = 0;
};

// Number the machines by their ranks' names for them.
inline Machines machines_of(const std::vector<std::string>& names) {
    Machines m;
    std::map<std::string, int> known;
    for (const std::string& name : names)
        m.of.push_back(known.insert({name, int(known.size())}).first->second);
    m.count = int(known.size());
    return m;
}

// Find the machines of all ranks. All ranks call. Threads of a process are on one machine.
inline Machines find_machines(const Comm& world) {
    if (world.local || world.size == 1)
        return {std::vector<int>(size_t(world.size)), 1};
    return machines_of(gather_texts(world, boot_name()));
}

// The ranks of a machine, in order.
inline std::vector<int> ranks_on(const Machines& m, int machine) {
    std::vector<int> ranks;
    for (int r = 0; r < int(m.of.size()); r++)
        if (m.of[size_t(r)] == machine)
            ranks.push_back(r);
    return ranks;
}

// How many ranks each machine has; 0: they have different numbers.
inline int ranks_of_each(const Machines& m) {
    size_t each = ranks_on(m, 0).size();
    for (int machine = 1; machine < m.count; machine++)
        if (ranks_on(m, machine).size() != each)
            return 0;
    return int(each);
}

// Whether the ranks of each machine are numbered side by side, as the order of the grid assumes.
inline bool side_by_side(const Machines& m) { return std::ranges::is_sorted(m.of); }

// The ranks at the same place of each machine as `rank`, which must have equally many ranks each.
inline std::vector<int> ranks_across(const Machines& m, int rank) {
    std::vector<int> mine = ranks_on(m, m.of[size_t(rank)]), across;
    size_t place = size_t(std::ranges::find(mine, rank) - mine.begin());
    for (int machine = 0; machine < m.count; machine++)
        across.push_back(ranks_on(m, machine)[place]);
    return across;
}

// How many ranks of an axis stand on one machine: the least over all ranks.
inline int axis_on_machine(const Layout& layout, const Machines& m, Axis Layout::*axis) {
    // Group ranks by their places along the other axes and by machine.
    std::map<std::array<int, 5>, int> members;
    for (int r = 0; r < layout.world(); r++) {
        Layout me = layout_at(layout, r);
        (me.*axis).rank = 0;
        members[{me.tp.rank, me.cp.rank, me.pp.rank, me.dp.rank, m.of[size_t(r)]}]++;
    }
    int least = (layout.*axis).size;
    for (auto& [place, count] : members)
        least = std::min(least, count);
    return least;
}

// The lines that say how axes lie across several machines; "" for a single one.
inline std::string machines_text(const Layout& layout, const Machines& m) {
    if (m.count == 1) return "";
    int each = ranks_of_each(m);
    std::string text = concat("machines: ", m.count, each ? concat(", ", each, " ranks each") : "",
                              "; on one of them: ");

    // Name the axes that have several ranks.
    auto add = [&](const char* name, Axis Layout::*axis) {
        int size = (layout.*axis).size;
        if (size == 1) return;
        text += concat(text.ends_with(": ") ? "" : ", ", name, " ",
                       axis_on_machine(layout, m, axis), " of ", size);
    };
    add("tp", &Layout::tp);
    add("cp", &Layout::cp);
    add("pp", &Layout::pp);
    add("dp", &Layout::dp);

    // Say what costs most time, and how to start the ranks otherwise.
    if (!side_by_side(m))
        text += "\nnote: ranks of a machine are not numbered side by side: start them with "
                "mpirun --map-by slot, or srun --distribution=block";
    else if (axis_on_machine(layout, m, &Layout::tp) < layout.tp.size)
        text += "\nnote: tensor-parallel ranks stand on several machines, and wait for links "
                "between these in every layer: give a smaller --tp";
    return text + "\n";
}

// NCCL's settings, as the environment has them: the user's, and what the program has set
// (nccl_settings()). Libraries read them silently, and another one may change bits and speed.
inline std::string nccl_settings_text(const char* const* environment) {
    std::string text;
    for (; *environment; environment++)
        if (std::string(*environment).starts_with("NCCL_"))
            text += concat(text.empty() ? "NCCL's settings: " : ", ", printable(*environment));
    return text.empty() ? "" : text + "\n";
}

} // namespace llmc
