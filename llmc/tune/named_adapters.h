// named_adapters.h - --adapters NAME=DIR,NAME=DIR: PEFT's folders under names that prompts choose
//   {"prompt": "...", "adapter": "NAME"}    a line of --prompts; without the key, or with null, the
//                                           base alone answers
//   The folders are read as --adapter reads one (adapter_files.h), beside the same base. Ranks,
//   factors and the adapted matrices may differ from folder to folder.
//   Every function that returns a text returns "" or one line that says what is wrong.
#pragma once
#include "../io/hf_places.h"
#include "../model.h"
#include "../comm/text.h"
#include "../trainer.h"
#include "adapter_files.h"

namespace llmc {

// One NAME=DIR of --adapters.
struct NamedFolder {
    std::string name, folder;
};

// Split --adapters into names and folders. Names also begin parameters' names, so they are words.
inline std::string parse_named_folders(const std::string& flag, std::vector<NamedFolder>* folders) {
    std::string part;
    for (std::istringstream parts(flag); std::getline(parts, part, ',');) {
        size_t equals = part.find('=');
        NamedFolder f = {part.substr(0, equals), ""};
        if (equals != std::string::npos)
            f.folder = part.substr(equals + 1);
        if (f.name.empty() || f.folder.empty())
            return concat("--adapters: ", printable(part), " is no NAME=DIR");

        // A name is a word of its own, and its owner can be found only once.
        auto good = [](unsigned char c) { return isalnum(c) || strchr("_-.", c); };
        if (!std::all_of(f.name.begin(), f.name.end(), good))
            return concat("--adapters: the name ", printable(f.name),
                          " has more than letters, digits, _, - and .: choose another one");
        for (const NamedFolder& other : *folders)
            if (other.name == f.name)
                return concat("--adapters: ", f.name, " is ", other.folder, " and ", f.folder,
                              ": give one of them another name");
        folders->push_back(f);
    }
    return "";
}

// Read which matrices each folder adapts, before anything is allocated.
inline std::string read_adapter_sets(const Model& base, const std::string& flag,
                                     AdapterSets* sets) {
    std::vector<NamedFolder> folders;
    LLMC_TRY(parse_named_folders(flag, &folders));
    for (const NamedFolder& f : folders) {
        sets->push_back({f.name, {}});
        LLMC_TRY(read_adapters(base, f.folder, &sets->back().adapters));

        // Rows of experts are sorted by expert, not by text.
        for (const auto& [module, adapter] : sets->back().adapters)
            if (module.find("{}") != std::string::npos)
                return concat("--adapters ", f.name, ": adapts experts (", stack_name(module, 0),
                              "), which texts of one batch cannot choose: give --adapter ",
                              f.folder);
    }
    return "";
}

// Load the weights of all folders into a model that was made for them. All ranks call.
template <typename T, typename S>
std::string load_adapter_sets(Trainer<T, S>& t, const std::string& flag) {
    std::vector<NamedFolder> folders;
    LLMC_TRY(parse_named_folders(flag, &folders));
    for (const NamedFolder& f : folders)
        LLMC_TRY(load_adapters(t, f.folder, f.name + ":"));
    return "";
}

} // namespace llmc
