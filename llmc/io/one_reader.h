// one_reader.h - files that one rank reads for the others: weights, and a folder's small files
//   Each file has one reader. The stages of the pipeline that need its bytes receive them:
//   1. if the reader belongs to another stage, it sends the bytes to this stage's first rank
//   2. one rank of the stage (the reader, or the first rank) broadcasts them to the others
//   So a file system delivers each byte once, whatever the number of ranks, and only one rank opens
//   a file. All ranks call in the same order, so that messages match.
//   Cost: a rank receives as many bytes as it would have read.
//   At the end: texts that ranks exchange, and the small files of a folder.
#pragma once
#include "../action.h"
#include "../comm/comm.h"
#include "../comm/group.h"
#include "../layout.h"
#include "../model.h"
#include "../comm/text.h"
#include "../ops/types.h"
#include "config.h"
#include "files.h"
#include <algorithm>
#include <map>
#include <string>
#include <vector>

namespace llmc {

// The ranks of each pipeline stage, and this rank's own stage as a group.
struct OneReader {
    Layout layout;
    Comm world, stage;
    std::vector<std::vector<int>> members; // [stage]: ranks of the world
    size_t bytes = 0;                      // bytes that this rank has read
};

// Make the groups. All ranks of the world call.
inline OneReader make_one_reader(const Comm& world, const Layout& layout) {
    // Ranks of a stage hold the same layers, whatever other axes cut those layers.
    OneReader r = {layout, world, {}, {}};
    for (int s = 0; s < layout.pp.size; s++)
        r.members.push_back(ranks_where(layout, [=](const Layout& o) {
            return o.pp.rank == s;
        }));
    r.stage = comm_split(world, "stage", r.members[size_t(layout.pp.rank)]);
    return r;
}

// Returns needs(stage): whether a stage has a bucket, and so needs its parameters.
inline auto stages_with(const Layout& layout, const Model& model, int bucket) {
    return [&layout, &model, bucket](int stage) {
        Layout there = layout;
        there.pp.rank = stage;
        return bucket_is_mine(there, model, bucket);
    };
}

// Bring `bytes` bytes, which only `reader` has at `to`, to all ranks of a stage. The reader and the
// ranks of the stage call.
inline void bring_to_stage(OneReader& r, unsigned char* to, size_t bytes, int reader, int stage) {
    const std::vector<int>& members = r.members[size_t(stage)];
    auto place = std::ranges::find(members, reader);
    int root = int(place - members.begin());

    // A reader in another stage sends the bytes to the first rank of this stage.
    if (place == members.end()) {
        root = 0;
        bool sends = r.world.rank == reader;
        bool receives = r.world.rank == members[0];
        CommMessage message = {to, bytes, sends ? members[0] : reader, sends};
        if (sends || receives)
            exchange(r.world, &message, 1, Cpu{});
    }
    // Broadcast within the stage. A reader of another stage is done already.
    if (r.layout.pp.rank == stage)
        broadcast(r.stage, to, bytes, root, Cpu{});
}

// Bring `bytes` bytes of a file to every stage s for which needs(s) is true. The reader has them at
// `to`. The reader and all ranks of those stages call.
template <typename F>
void bring(OneReader& r, unsigned char* to, size_t bytes, int reader, F needs) {
    // A tied table goes to both ends of the pipeline, but is read once.
    bool reads = r.world.rank == reader;
    if (reads) r.bytes += bytes;
    for (int s = 0; s < r.layout.pp.size; s++) {
        // All ranks serve the stages in the same order, so no circle of ranks waits for each other.
        bool calls = reads || s == r.layout.pp.rank;
        if (calls && needs(s))
            bring_to_stage(r, to, bytes, reader, s);
    }
}

// ----------------------------------------------------------------------------
// texts of ranks: what one says, all hear

// Gather every rank's text onto every rank. Returns [rank].
inline std::vector<std::string> gather_texts(const Comm& c, std::string text) {
    // Exchange the lengths first.
    std::vector<int64_t> sizes(c.size);
    int64_t size = int64_t(text.size());
    all_gather(c, sizes.data(), &size, 1, Cpu{});

    // Pad each text to the longest: an all-gather takes equal counts.
    size_t most = std::ranges::max(sizes);
    text.resize(most);
    std::string all(most * sizes.size(), 0);
    all_gather(c, reinterpret_cast<unsigned char*>(all.data()),
               reinterpret_cast<const unsigned char*>(text.data()), most, Cpu{});

    // Cut the padding off again.
    std::vector<std::string> texts;
    for (size_t r = 0; r < sizes.size(); r++)
        texts.push_back(all.substr(r * most, sizes[r]));
    return texts;
}

// Broadcast the sender's text to all ranks. Unlike gather_texts(), a rank receives only one text.
inline std::string broadcast_text(const Comm& c, std::string text, int sender) {
    int64_t size = int64_t(text.size());
    broadcast(c, &size, 1, sender, Cpu{});
    // Receivers make room for the text.
    text.resize(size_t(size));
    broadcast(c, reinterpret_cast<unsigned char*>(text.data()), text.size(), sender, Cpu{});
    return text;
}

// The error of the first rank that has one, on all ranks: where one rank fails, all fail.
inline std::string first_error(const Comm& c, const std::string& wrong) {
    for (const std::string& text : gather_texts(c, wrong))
        if (!text.empty()) return text;
    return "";
}

// ----------------------------------------------------------------------------
// the small files of the folders that a run names: one process reads them for all
//   Configuration, tokenizer and chat template are read before there is a layout.
//   1. list    the first rank finds which of SMALL_FILES each folder has
//   2. read    it reads each once; a file that it cannot read is not shared, and each rank then
//              finds the error itself
//   3. share   it broadcasts paths and bytes, and read_whole_file() (files.h) takes them from there
//   Contract: all processes call, before anything reads these files. Paths are those that readers
//             use, a folder's name with "/" and the file's.
//   Memory: the files' bytes on each process until it ends. A process that runs alone keeps none.

// Every small file that this program reads from a folder of a model, a tokenizer or adapters.
constexpr const char* SMALL_FILES[] = {
    "config.json",       "generation_config.json", "quantize_config.json", "adapter_config.json",
    "tokenizer.json",    "tokenizer_config.json",  "tokenizer.model",      "tokenizer.bin",
    "vocab.bpe",         "merges.txt",             "encoder.json",         "vocab.json",
    "added_tokens.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json"};

// Add the folders or files of a flag, FOLDER,FOLDER or NAME=FOLDER,NAME=FOLDER, to `paths`.
inline void add_listed_paths(const std::string& flag, std::vector<std::string>* paths) {
    for (const std::string& part : texts_between_commas(flag))
        paths->push_back(part.substr(part.find('=') + 1));
}

// List the small files that the flags name: a folder's, or a tokenizer's own file.
inline std::vector<std::string> small_files(const Config& c) {
    std::vector<std::string> named = {c.model, c.tokenizer, c.adapter, c.draft, c.teacher};
    add_listed_paths(c.adapters, &named);
    add_listed_paths(c.average, &named);

    // A weights' file is no small file: only --tokenizer may name one itself.
    std::vector<std::string> paths;
    if (!c.tokenizer.empty())
        paths.push_back(c.tokenizer);
    for (const std::string& folder : named)
        for (const char* file : SMALL_FILES)
            if (!folder.empty())
                paths.push_back(folder + "/" + file);
    return paths;
}

// Read the files that are there, each once.
inline std::map<std::string, std::string> read_small_files(const std::vector<std::string>& paths) {
    std::map<std::string, std::string> files;
    for (const std::string& path : paths) {
        std::string bytes;
        if (!files.count(path) && read_whole_file(path, &bytes).empty())
            files[path] = bytes;
    }
    return files;
}

// Send the first rank's files to all ranks. All ranks call.
inline void share_files(const Comm& world, std::map<std::string, std::string>* files) {
    int64_t count = int64_t(files->size());
    broadcast(world, &count, 1, 0, Cpu{});

    // Only the first rank has files to walk over; the others receive as many.
    std::map<std::string, std::string> all;
    auto next = files->begin();
    for (int64_t i = 0; i < count; i++) {
        bool sends = world.rank == 0;
        std::string path = broadcast_text(world, sends ? next->first : "", 0);
        all[path] = broadcast_text(world, sends ? next->second : "", 0);
        if (sends) ++next;
    }
    *files = all;
}

// Read the small files of the folders that the flags name on the first process, for all.
inline void share_small_files(const Comm& world, const Config& c) {
    if (world.size == 1) return;
    std::map<std::string, std::string> files;
    if (world.rank == 0)
        files = read_small_files(small_files(c));
    share_files(world, &files);
    shared_files() = files;
}

} // namespace llmc
