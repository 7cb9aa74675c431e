// memory_checkpoint.h - replicated in-memory checkpoints: each rank's part on two machines
//   DIR/step_00000100/   a checkpoint (checkpoint.h) in a file system in memory, on each machine:
//                        the files of its ranks and of the machine before it, and the manifest
//   A rank's buddy       the rank with the same place on the next machine. Machines are ordered by
//                        their first ranks, and the first machine follows the last one
//   Save   1. every rank writes its file to DIR of its machine
//          2. it sends the bytes to its buddy, which writes them too
//          3. the ranks exchange sizes and sums; the first rank of each machine writes the manifest
//             and renames the folder. Once all have done so, it removes the save before
//   Load   1. collect the steps that any machine has; try the newest first, with the first whole
//             manifest
//          2. the first rank that has a file whole reads it and sends it on (one_reader.h)
//   A part is lost only when a machine and the next one are both lost: then the checkpoint in --out
//   counts. Ranks that see one folder belong to one machine. %r in DIR stands for the rank: then
//   each rank counts as a machine of its own.
//   Memory: each machine holds its ranks' files and its neighbour's, twice while a save is written.
#pragma once
#include <climits>
#include "../comm/comm.h"
#include "../comm/group.h"
#include "../io/checkpoint.h"
#include "../io/checkpoint_load.h"
#include "../io/files.h"
#include "../io/machines.h"
#include "../io/manifest.h"
#include "../io/one_reader.h"
#include "../ops/types.h"
#include "../comm/text.h"
#include "../trainer.h"

namespace llmc {

// The machines of a run, and which rank keeps a copy of which rank's part.
struct Buddies {
    std::string folder; // on this machine
    std::vector<int> machine_of; // [rank]: the first rank of its machine
    std::vector<int> buddy_of;   // [rank]: the rank that keeps a copy of its part
    std::vector<std::string> missing; // folders that were not there before, the innermost first

    bool is_first(int rank) const { return machine_of[size_t(rank)] == rank; }
};

// DIR as this rank has it: %r becomes the rank's number.
inline std::string buddy_folder(std::string dir, int rank) {
    size_t at = dir.find("%r");
    if (at != std::string::npos)
        dir.replace(at, 2, std::to_string(rank));
    return dir;
}

// Choose for each rank the one that keeps a copy of its part. machine_of[r] is the first rank of
// r's machine. A run on one machine has no buddies and gets an empty list.
inline std::vector<int> choose_buddies(const std::vector<int>& machine_of) {
    std::map<int, std::vector<int>> ranks; // by their machine
    // Group ranks by machine. The map orders machines by their first ranks.
    for (size_t r = 0; r < machine_of.size(); r++)
        ranks[machine_of[r]].push_back(int(r));
    std::vector<int> buddies(machine_of.size());

    if (ranks.size() < 2) return {};
    for (auto it = ranks.begin(); it != ranks.end(); ++it) {
        // The first machine follows the last. Ranks of a smaller machine take the parts of several.
        auto next = std::next(it);
        if (next == ranks.end())
            next = ranks.begin();
        const std::vector<int>& from = it->second;
        const std::vector<int>& to = next->second;
        for (size_t k = 0; k < from.size(); k++)
            buddies[size_t(from[k])] = to[k % to.size()];
    }
    return buddies;
}

// Make the folders, and find which ranks share one. All ranks call.
inline std::string make_buddies(const Comm& world, const std::string& dir, Buddies* b) {
    // Make the folder and its parents, which may exist already.
    b->folder = buddy_folder(dir, world.rank);
    std::error_code error;
    for (std::filesystem::path path = std::filesystem::absolute(b->folder, error);
         !std::filesystem::exists(path, error) && path.has_relative_path();
         path = path.parent_path())
        b->missing.push_back(path.string());
    std::filesystem::create_directories(b->folder, error);
    struct stat s = {};
    std::string wrong;
    bool there = stat(b->folder.c_str(), &s) == 0;
    if (!there || !S_ISDIR(s.st_mode))
        wrong = concat("--buddy ", b->folder, ": cannot be made: ",
                       error ? error.message() : "it is no folder");
    LLMC_TRY(first_error(world, wrong));

    // Tell machines by the kernel's boot id, and folders on one machine by device and inode.
    std::string mine = concat(boot_name(), " ", s.st_dev, " ", s.st_ino);
    std::vector<std::string> all = gather_texts(world, mine);
    for (const std::string& place : all) {
        auto first = std::ranges::find(all, place);
        b->machine_of.push_back(int(first - all.begin()));
    }
    b->buddy_of = choose_buddies(b->machine_of);
    return "";
}

// Remove the folders that make_buddies() has made. The system keeps one that is not empty.
inline void unmake_buddies(const Buddies& b) {
    for (const std::string& folder : b.missing)
        rmdir(folder.c_str());
}

// ----------------------------------------------------------------------------
// save

// Send this rank's file to its buddy, and keep the files that come here: all messages at once.
inline std::string keep_others_files(const Comm& world, const Buddies& b, const RankFile& mine,
                                     const std::string& folder) {
    // Map this rank's own file, which lies in memory, and send it from there.
    void* own = nullptr;
    size_t bytes = 0;
    struct stat s = {};
    std::string wrong;
    if (!mine.owned.empty())
        wrong = map_whole_file(folder + "/" + rank_file(world.rank), &own, &bytes, &s);

    // Exchange the lengths, so that receivers can make room.
    std::vector<int64_t> sizes(size_t(world.size));
    int64_t size = int64_t(bytes);
    all_gather(world, sizes.data(), &size, 1, Cpu{});

    // Exchange the files. A rank of a smaller machine keeps several, one of a larger may keep none.
    std::vector<std::pair<int, std::string>> others;
    for (int r = 0; r < world.size; r++) {
        bool comes_here = b.buddy_of[size_t(r)] == world.rank;
        size_t length = size_t(sizes[size_t(r)]);
        if (comes_here && length)
            others.push_back({r, std::string(length, 0)});
    }
    int buddy = b.buddy_of[size_t(world.rank)];
    std::vector<CommMessage> messages;
    if (size)
        messages.push_back({own, bytes, buddy, true});
    for (auto& [rank, text] : others)
        messages.push_back({text.data(), text.size(), rank, false});
    exchange(world, messages.data(), int(messages.size()), Cpu{});
    if (own) unmap_file(own, bytes);

    // Write the files that came. If a folder has no room, all ranks learn of it.
    for (auto& [rank, text] : others)
        if (wrong.empty())
            wrong = write_text_file(folder + "/" + rank_file(rank), text);
    return wrong;
}

// Remove all saves but that of step `kept`. Without one, a run has ended and is on disk, or a new
// one takes the folder.
inline void remove_buddies(const Comm& world, const Buddies& b, int64_t kept = -1) {
    // Only the first rank removes: the others of its machine see the same folder.
    if (!b.is_first(world.rank)) return;
    for (int64_t step : checkpoint_steps(b.folder))
        if (step != kept)
            remove_checkpoint(b.folder + "/" + step_folder(step));
}

// Save in the memory of this machine and of the next. Returns "" or why there is no
// save. All ranks call.
template <typename T, typename S>
std::string buddy_save(const Trainer<T, S>& t, const Buddies& b, const CheckpointInfo& info) {
    const Comm& world = t.comms.world;
    // Each machine has its own folder, made and named by the machine's first rank.
    bool first = b.is_first(world.rank);
    Save save = {info, b.folder, INT_MAX}; // the save before goes once all machines have this one
    LLMC_TRY(save_begin(t, save, first));

    // 1. and 2. Write this rank's file, and send it to the buddy. Training waits for this: memory
    // is fast, and the network carries one message a rank.
    std::string wrong = first_error(world, save_in_place(t, save));
    if (wrong.empty())
        wrong = keep_others_files(world, b, save.file, save.temporary());

    // 3. Give the save its name on each machine. Once all have done so, remove the one before.
    Written written = exchange_written(world, save, wrong);
    wrong = first_error(world, first ? name_checkpoint(save, written) : "");
    if (wrong.empty()) remove_buddies(world, b, info.step);
    return wrong;
}

// ----------------------------------------------------------------------------
// load

// The steps greater than `newer_than` that any machine has, newest first. All ranks call.
inline std::vector<int64_t> buddy_steps(const Comm& world, const Buddies& b, int64_t newer_than) {
    // List this machine's steps. A machine that lost its memory has none.
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

// Take the manifest of a step from the first rank that has it, then choose a reader for each file:
// the first rank that has it whole. Returns "" or what is missing.
inline std::string find_buddy_files(const Comm& world, const Buddies& b, int64_t step,
                                    const std::string& out, Json* manifest,
                                    std::vector<int>* readers) {
    std::string folder = b.folder + "/" + step_folder(step);
    Json mine;
    bool have = read_manifest(folder, &mine).empty();
    have = have && mine["format"] == CHECKPOINT_FORMAT && folder_of_run(mine) == out;

    // Only one rank sends its manifest: all of them would be world^2 entries. The maximum of world
    // - rank finds the first rank that has one.
    int64_t has_it = have ? world.size - world.rank : 0;
    all_reduce_max(world, &has_it, 1, Cpu{});
    if (has_it == 0)
        return concat("--buddy: step ", step, " is no whole save of this run");
    std::string own = have ? json_text(mine) : "";
    int sender = world.size - int(has_it);
    *manifest = Json::parse(broadcast_text(world, own, sender));

    // Verify the files that lie here; the ranks of a machine share out the work.
    const Json& files = (*manifest)["files"];
    std::vector<int> here = ranks_on({b.machine_of}, b.machine_of[size_t(world.rank)]);
    auto me = std::ranges::find(here, world.rank);
    size_t place = size_t(me - here.begin());
    std::vector<int64_t> first(files.size());

    // Compare manifests: a machine that was away has the old one of a step that was done again.
    have = have && mine["crc32"] == (*manifest)["crc32"];
    for (size_t i = 0; i < files.size(); i++) {
        if (have && i % here.size() == place &&
            verify_file(folder, files[i]).empty())
            first[i] = world.size - world.rank;
    }
    all_reduce_max(world, first.data(), first.size(), Cpu{});

    // The largest number belongs to the first rank.
    for (size_t i = 0; i < files.size(); i++) {
        std::string name = files[i]["file"].get<std::string>();
        if (first[i] == 0)
            return concat("--buddy: ", name, " of step ", step, " is on no machine that is left");
        readers->push_back(world.size - int(first[i]));
    }
    return "";
}

// Load the newest save of the run in `out` that is whole in memory and newer than
// `newer_than`. Returns false if there is none, and then nothing has changed. *wrong says why
// a whole save does not fit.
template <typename T, typename S>
bool buddy_load(Trainer<T, S>& t, const Buddies& b, CheckpointInfo* info, const std::string& out,
                int64_t newer_than, std::vector<std::string>* notes, std::string* wrong) {
    // Try the newest first, and note each one that is not whole.
    const Comm& world = t.comms.world;
    for (int64_t step : buddy_steps(world, b, newer_than)) {
        Json manifest;
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
