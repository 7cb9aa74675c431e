// base_identity.h - which frozen weights a run's adapters stand beside: their name, size and CRC-32
//   A checkpoint of adapters does not hold their base: a resume gets it from --model or --seed
//   again. Adapters beside another base are another model, so the manifest identifies the base:
//     a folder   the bytes of all *.safetensors, and the CRC-32 of their names, sizes and CRCs
//     a file     the same, for one file
//     a seed     no bytes, and the CRC-32 of its text
//   The name is only for messages: a folder that was moved is still the same base.
#pragma once
#include "../comm/group.h"
#include "../io/files.h"
#include "../io/one_reader.h"
#include "../comm/text.h"

namespace llmc {

// The files that hold a model's weights, in alphabetical order.
inline std::vector<std::string> weight_files(const std::string& model) {
    if (file_type(model) != S_IFDIR) return {model};
    std::vector<std::string> files;
    for (const std::string& name : names_in(model))
        if (name.ends_with(".safetensors"))
            files.push_back(model + "/" + name);
    std::ranges::sort(files);
    return files;
}

// Identify the base of a run: a folder or a file, or a seed if `model` is "". All ranks call, each
// reads every N-th file, and all get the same answer. Returns "" or what is wrong.
inline std::string base_identity(const Comm& world, const std::string& model, int64_t seed,
                                 Json* base) {
    // Weights that a seed draws have no files to read.
    std::string text = model.empty() ? concat("--seed ", seed) : "";
    std::vector<std::string> files;
    if (!model.empty())
        files = weight_files(model);

    // Read the files. Each line begins with the file's number, which later restores the order.
    std::string wrong, mine;
    size_t step = size_t(world.size);
    for (size_t i = size_t(world.rank); i < files.size() && wrong.empty(); i += step) {
        size_t bytes = 0;
        uint32_t crc = 0;
        wrong = file_crc(files[i], &bytes, &crc);
        std::string name = std::filesystem::path(files[i]).filename().string();
        mine += concat(i, " ", bytes, " ", crc, " ", files.size() > 1 ? name : "", "\n");
    }
    LLMC_TRY(first_error(world, wrong));

    // Join the lines of all ranks. Sizes are added; the lines are hashed.
    size_t all = 0;
    std::map<size_t, std::string> lines;
    for (const std::string& part : gather_texts(world, mine)) {
        std::istringstream in(part);
        for (std::string line; std::getline(in, line);) {
            size_t number = 0, bytes = 0;
            sscanf(line.c_str(), "%zu %zu", &number, &bytes);
            lines[number] = line;
            all += bytes;
        }
    }

    // Hash the lines. A single file is hashed without its name: like a folder it may be renamed.
    for (const auto& [number, line] : lines)
        text += line + "\n";
    const unsigned char* begin = reinterpret_cast<const unsigned char*>(text.data());
    *base = {{"name", model.empty() ? text : model},
             {"bytes", all},
             {"crc32", uint32_t(crc32(0, begin, uInt(text.size())))}};
    return "";
}

} // namespace llmc
