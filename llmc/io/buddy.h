// buddy.h - saves in memory that outlive a machine: each rank's part lies on two
//   DIR/step_00000100/   as a checkpoint (checkpoint.h), in a file system of memory, on each
//                        machine: the files of its ranks, of the machine before it, the manifest
//   A rank's buddy       the rank of the next machine that has its place there. Machines stand in
//                        the order of their first ranks; behind the last one comes the first
//   Save   1. every rank writes its file to DIR of its machine
//          2. it sends the bytes to its buddy, which writes them too
//          3. the ranks tell each other sizes and sums; the first of each machine writes the
//             manifest and renames the folder. Once all have, it removes the save before
//   Load   1. steps that any machine has, the newest first, with the first manifest that is whole
//          2. a file is read by the first rank that has it whole, and sent (one_reader.h)
//   A part is lost when a machine and the one behind it are: then the save of --out counts.
//   Ranks that see one folder are of one machine. %r in DIR stands for the rank: then each rank is
//   a machine of its own.
//   Memory: on each machine its ranks' files and their neighbours', twice while a save is written.
#pragma once
#include "checkpoint_load.h"

namespace llmc {

// The machines of a run, and who keeps whose part.
struct Buddies {
    std::string folder; // on this machine
    std::vector<int> machine_of; // [rank]: the first rank of its machine
    std::vector<int> buddy_of;   // [rank]

    bool is_first(int rank) const { return machine_of[size_t(rank)] == rank; }
};

// The ranks of a rank's machine.
inline std::vector<int> ranks_beside(const Buddies& b, int rank) {
    std::vector<int> ranks;
    // In the order of the world, this one among them.
    int machine = b.machine_of[size_t(rank)];
    for (size_t r = 0; r < b.machine_of.size(); r++)
        if (b.machine_of[r] == machine) ranks.push_back(int(r));
    return ranks;
}

// DIR as a rank has it.
inline std::string buddy_folder(std::string dir, int rank) {
    // Most names have none.
    size_t at = dir.find("%r");
    if (at != std::string::npos)
        dir.replace(at, 2, std::to_string(rank));
    return dir;
}

// The rank that keeps a copy of each rank's part, from the machines' first ranks; a run on one
// machine has none, and gives no list.
inline std::vector<int> choose_buddies(const std::vector<int>& machine_of) {
    std::map<int, std::vector<int>> ranks; // by their machine
    // A map has the machines in the order of their first ranks.
    for (size_t r = 0; r < machine_of.size(); r++)
        ranks[machine_of[r]].push_back(int(r));
    std::vector<int> buddies(machine_of.size());
    if (ranks.size() < 2) return {};
    for (auto it = ranks.begin(); it != ranks.end(); ++it) {
        // Behind the last machine comes the first. A smaller one takes the parts of several.
        auto next = std::next(it);
        if (next == ranks.end()) next = ranks.begin();
        const std::vector<int>& from = it->second;
        const std::vector<int>& to = next->second;
        for (size_t k = 0; k < from.size(); k++)
            buddies[size_t(from[k])] = to[k % to.size()];
    }
    return buddies;
}

// Make the folders, and find who shares one. All ranks call.
inline std::string make_buddies(const Comm& world, const std::string& dir, Buddies* b) {
    b->folder = buddy_folder(dir, world.rank);
    std::error_code error;
    std::filesystem::create_directories(b->folder, error);
    struct stat s = {};
    std::string wrong;
    bool there = stat(b->folder.c_str(), &s) == 0;
    if (!there || !S_ISDIR(s.st_mode))
        wrong = concat("--buddy ", b->folder, ": cannot be made: ",
                       error ? error.message() : "it is no folder");
    wrong = first_error(world, wrong);
    if (!wrong.empty()) return wrong;

    // A machine is known by when it was started, a folder on it by its number.
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    std::string mine = concat(boot, " ", s.st_dev, " ", s.st_ino);
    std::vector<std::string> all = gather_texts(world, mine);
    for (const std::string& place : all) {
        auto first = std::find(all.begin(), all.end(), place);
        b->machine_of.push_back(int(first - all.begin()));
    }
    b->buddy_of = choose_buddies(b->machine_of);
    return "";
}

// ----------------------------------------------------------------------------
// save

// Send this rank's file to its buddy, and keep those that come here: all messages at once.
inline std::string keep_others_files(const Comm& world, const Buddies& b, const RankFile& mine,
                                     const std::string& folder) {
    // It lies in memory: send it from there.
    void* own = nullptr;
    size_t bytes = 0;
    struct stat s = {};
    std::string wrong;
    if (!mine.owned.empty())
        wrong = map_whole_file(folder + "/" + rank_file(world.rank), &own, &bytes, &s);
    std::vector<int64_t> sizes(size_t(world.size));
    int64_t size = int64_t(bytes);
    all_gather(world, sizes.data(), &size, 1, Cpu{});

    // Exchange: a rank of a smaller machine keeps several, or none.
    std::vector<std::pair<int, std::string>> others;
    for (int r = 0; r < world.size; r++) {
        bool comes_here = b.buddy_of[size_t(r)] == world.rank;
        size_t length = size_t(sizes[size_t(r)]);
        if (comes_here && length)
            others.push_back({r, std::string(length, 0)});
    }
    int buddy = b.buddy_of[size_t(world.rank)];
    std::vector<CommMessage> messages;
    if (size) messages.push_back({own, bytes, buddy, true});
    for (auto& [rank, text] : others)
        messages.push_back({text.data(), text.size(), rank, false});
    exchange(world, messages.data(), int(messages.size()), Cpu{});
    if (own) unmap_file(own, bytes);

    // Write what has come.
    // A folder without room says so on all ranks.
    for (auto& [rank, text] : others)
        if (wrong.empty()) wrong = write_text_file(folder + "/" + rank_file(rank), text);
    return wrong;
}

// Save in the memory of this machine and the next. All ranks call: "" or why there is none.
template <typename T, typename S>
std::string buddy_save(const Trainer<T, S>& t, const Buddies& b, const CheckpointInfo& info) {
    const Comm& world = t.comms.world;
    // Each machine has a folder of its own, which its first rank makes and names.
    bool first = b.is_first(world.rank);
    Save save = {info, b.folder, 1};
    std::string wrong = first ? make_temporary(save.out, save.temporary()) : "";
    wrong = first_error(world, wrong);
    if (!wrong.empty()) return wrong;

    // 1. and 2. Write, and send.
    save.manifest = manifest_of(t, info);
    save.file = rank_file_of(t);
    // Steps wait for this: memory is fast, and the network's part is one message.
    wrong = write_rank_file(save.file, save.temporary(), [&](size_t i) {
        auto& [s, range] = save.file.owned[i];
        return read_numbers(t, s.data, *s.p, range);
    });
    wrong = first_error(world, wrong);
    if (wrong.empty())
        wrong = first_error(world, keep_others_files(world, b, save.file, save.temporary()));

    // 3. Give it its name on each machine, then remove the one before.
    if (wrong.empty()) {
        nlohmann::json files = files_of_all(world, save.file);
        if (first)
            wrong = write_manifest(save.manifest, files, save.temporary());
        if (first && wrong.empty())
            wrong = replace_folder(save.temporary(), save.folder());
        wrong = first_error(world, wrong);
    }
    if (first && !wrong.empty()) remove_folder(save.temporary());
    if (!first || !wrong.empty()) return wrong;
    for (int64_t step : checkpoint_steps(save.out))
        if (step != info.step)
            remove_checkpoint(save.out + "/" + step_folder(step));
    return "";
}

// Remove all saves: a run has ended and is on disk, or a new one begins.
inline void remove_buddies(const Comm& world, const Buddies& b) {
    // The others of a machine see the same folder.
    if (!b.is_first(world.rank)) return;
    for (int64_t step : checkpoint_steps(b.folder))
        remove_checkpoint(b.folder + "/" + step_folder(step));
}

// ----------------------------------------------------------------------------
// load

// The steps that any machine has, the newest first, without those up to `newer_than`.
inline std::vector<int64_t> buddy_steps(const Comm& world, const Buddies& b, int64_t newer_than) {
    // A machine that has lost its memory has none.
    std::string mine;
    for (int64_t step : checkpoint_steps(b.folder))
        mine += concat(step, " ");
    std::set<int64_t, std::greater<int64_t>> steps;
    for (const std::string& text : gather_texts(world, mine)) {
        std::istringstream in(text);
        for (int64_t step; in >> step;)
            if (step > newer_than) steps.insert(step);
    }
    return {steps.begin(), steps.end()};
}

// The manifest of a step, of the first rank that has it; then who reads each file: the first rank
// that has it whole. "" or what is missing.
inline std::string find_buddy_files(const Comm& world, const Buddies& b, int64_t step,
                                    const std::string& out, nlohmann::json* manifest,
                                    std::vector<int>* readers) {
    std::string folder = b.folder + "/" + step_folder(step);
    nlohmann::json mine;
    bool have = read_manifest(folder, &mine).empty();
    have = have && mine["config"].value("out", "") == out;
    // One rank sends it: manifests of all would be world^2 entries.
    int64_t has_it = have ? world.size - world.rank : 0;
    all_reduce_max(world, &has_it, 1, Cpu{});
    if (has_it == 0)
        return concat("--buddy: step ", step, " is no whole save of this run");
    std::string own = have ? json_text(mine) : "";
    int sender = world.size - int(has_it);
    *manifest = nlohmann::json::parse(broadcast_text(world, own, sender));

    // The ranks of a machine share out the reading.
    const nlohmann::json& files = (*manifest)["files"];
    std::vector<int> here = ranks_beside(b, world.rank);
    auto me = std::find(here.begin(), here.end(), world.rank);
    size_t place = size_t(me - here.begin());
    std::vector<int64_t> first(files.size());
    // A step that was done again has another manifest on machines that were away.
    have = have && mine["crc32"] == (*manifest)["crc32"];
    for (size_t i = 0; i < files.size(); i++) {
        bool looks = have && i % here.size() == place;
        if (looks && verify_file(folder, files[i]).empty())
            first[i] = world.size - world.rank;
    }
    all_reduce_max(world, first.data(), first.size(), Cpu{});

    // The largest number is the first rank's.
    for (size_t i = 0; i < files.size(); i++) {
        std::string name = files[i]["file"].get<std::string>();
        if (first[i] == 0)
            return concat("--buddy: ", name, " of step ", step, " is on no machine that is left");
        readers->push_back(world.size - int(first[i]));
    }
    return "";
}

// Load the newest save of the run in `out` that is whole in memory and newer than `newer_than`.
// False: there is none, and nothing has changed; *wrong where one does not fit.
template <typename T, typename S>
bool buddy_load(Trainer<T, S>& t, const Buddies& b, CheckpointInfo* info, const std::string& out,
                int64_t newer_than, std::vector<std::string>* notes, std::string* wrong) {
    // Try the newest first; each that is not whole is said.
    const Comm& world = t.comms.world;
    for (int64_t step : buddy_steps(world, b, newer_than)) {
        nlohmann::json manifest;
        std::vector<int> readers;
        std::string missing = find_buddy_files(world, b, step, out, &manifest, &readers);
        if (!missing.empty()) {
            notes->push_back(missing);
            continue;
        }
        std::string folder = b.folder + "/" + step_folder(step);
        *wrong = load_verified(t, info, folder, manifest, readers, notes);
        return true;
    }
    return false;
}

} // namespace llmc
