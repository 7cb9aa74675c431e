// shared_files.h - the small files of the folders that a run names: one process reads them for all
//   Weights and manifests have one reader each (one_reader.h). This file does the same for the
//   rest of a folder: configuration, tokenizer, chat template.
//   1. list    the first rank finds which of SMALL_FILES each folder has
//   2. read    it reads each once; a file that it cannot read is not shared, and each rank then
//              finds the error itself
//   3. share   it broadcasts paths and bytes, and read_whole_file() (files.h) takes them from there
//   Contract: all processes call, before anything reads these files. Paths are those that readers
//             use, a folder's name with "/" and the file's.
//   Memory: the files' bytes on each process until it ends. A process that runs alone keeps none.
#pragma once
#include "../comm/comm.h"
#include "../comm/group.h"
#include "../ops/types.h"
#include "config.h"
#include "files.h"
#include "one_reader.h"

namespace llmc {

// Every small file that this program reads from a folder of a model, a tokenizer or adapters.
constexpr const char* SMALL_FILES[] = {
    "config.json",       "generation_config.json", "quantize_config.json", "adapter_config.json",
    "tokenizer.json",    "tokenizer_config.json",  "tokenizer.model",      "tokenizer.bin",
    "vocab.bpe",         "merges.txt",             "encoder.json",         "vocab.json",
    "added_tokens.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json"};

// Add the folders or files of a flag, FOLDER,FOLDER or NAME=FOLDER,NAME=FOLDER, to `paths`.
inline void add_listed_paths(const std::string& flag, std::vector<std::string>* paths) {
    std::istringstream parts(flag);
    for (std::string part; std::getline(parts, part, ',');)
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
