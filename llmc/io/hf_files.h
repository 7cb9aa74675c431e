// hf_files.h - the safetensors files of a folder: one rank opens each, and all ranks see its header
//   1. list    the first rank finds which files there are, and broadcasts their names
//   2. open    rank i mod N opens file i and checks it; an error ends the load on all ranks
//   3. share   that rank broadcasts the header: names, types, shapes. All ranks check the same
//              headers, so they find the same error before any tensor is sent
//   4. bring   the file's reader reads a tensor once and sends it to the pipeline stages that need
//              it (one_reader.h), in chunks. All ranks call, in one order
//   Contract: a tensor's `data` is null on every rank but its reader.
//   Memory: one chunk of at most 16 MiB a rank, and none where one rank runs alone.
#pragma once
#include "../comm/group.h"
#include "../comm/text.h"
#include "files.h"
#include "json.h"
#include "one_reader.h"
#include "safetensors.h"

namespace llmc {

// The files of a folder. This rank maps those that it reads, until this struct's scope ends.
struct HfFiles {
    std::vector<SafeTensors> files = {};
    OneReader reader = {};
    size_t most = 16 << 20; // bytes of a chunk: a whole number of elements of any type
    std::vector<unsigned char> chunk = {};
    std::string ruined = {}; // the first tensor whose values cannot be used; ranks compare it last

    ~HfFiles() {
        for (SafeTensors& f : files) safetensors_close(&f);
    }
};

// ----------------------------------------------------------------------------
// open

// Read an index of shards: the file of each tensor, and the set of files.
inline std::string hf_read_index(const std::string& path, Json* weight_map,
                                 std::set<std::string>* files) {
    Json index;
    LLMC_TRY(read_json(path, &index));
    if (!index.contains("weight_map") || !index["weight_map"].is_object())
        return path + ": has no weight_map";

    // Refuse names with a slash: they could lead to any file of the machine.
    *weight_map = index["weight_map"];
    for (auto& [tensor, file] : weight_map->items()) {
        if (!file.is_string() || file.get<std::string>().find('/') != std::string::npos)
            return path + ": " + printable(tensor) + " is in no file of this folder";
        files->insert(file.get<std::string>());
    }
    return "";
}

// List the files of a folder: model.safetensors, or else the shards of the index, as transformers
// does. *list: {"files": [names], "map": {tensor: its file}}.
inline std::string hf_list_files(const std::string& folder, Json* list) {
    // Find which form the folder has.
    std::string index_path = folder + "/model.safetensors.index.json";
    bool one = file_type(folder + "/model.safetensors");
    bool sharded = !one && file_type(index_path);
    if (!one && !sharded)
        return folder +
               "/model.safetensors: No such file, and no model.safetensors.index.json: weights in "
               "another format must be converted first";

    // List the files, each once.
    std::set<std::string> names;
    if (one) names.insert("model.safetensors");
    Json map = Json::object();
    std::string wrong = sharded ? hf_read_index(index_path, &map, &names) : "";
    *list = {{"files", names}, {"map", map}};
    return wrong;
}

// A header as a text for other ranks: [[name, type, shape, bytes], ...], sorted by name.
inline std::string header_text(const SafeTensors& file) {
    Json header = Json::array();
    for (const SafeTensor& t : file.tensors)
        header.push_back({t.name, t.dtype, t.shape, t.bytes});
    return header.dump();
}

// Rebuild a file's tensors, without their data, from its reader's text.
inline std::vector<SafeTensor> tensors_of_header(const std::string& text) {
    std::vector<SafeTensor> tensors;
    for (const Json& entry : Json::parse(text)) {
        SafeTensor t;
        t.name = entry[0].get<std::string>();
        t.dtype = entry[1].get<std::string>();
        t.shape = entry[2].get<std::vector<size_t>>();
        t.bytes = entry[3].get<size_t>();
        tensors.push_back(t);
    }
    return tensors;
}

// Broadcast the headers of files, of which rank i mod N has opened file i.
inline void share_headers(HfFiles* h, const std::vector<std::string>& paths) {
    const Comm& world = h->reader.world;
    for (size_t i = 0; i < paths.size(); i++) {
        int reader = int(i % size_t(world.size));
        bool reads = reader == world.rank;
        SafeTensors& file = h->files[i];
        file.path = paths[i];

        std::string text = broadcast_text(world, reads ? header_text(file) : "", reader);
        if (!reads) file.tensors = tensors_of_header(text);
        for (SafeTensor& t : file.tensors)
            t.reader = reader;
    }
}

// Open files, each on its reader, and share their headers. All ranks call, and see one result.
inline std::string hf_open_shared(HfFiles* h, const std::vector<std::string>& paths) {
    // Open this rank's files.
    const Comm& world = h->reader.world;
    std::string wrong;
    h->files.resize(paths.size());
    for (size_t i = 0; wrong.empty() && i < paths.size(); i++) {
        bool reads = i % size_t(world.size) == size_t(world.rank);
        if (reads)
            wrong = safetensors_open(&h->files[i], paths[i]);
    }
    wrong = first_error(world, wrong);
    if (wrong.empty()) share_headers(h, paths);
    return wrong;
}

// Open a folder's files. All ranks call, and see one result.
inline std::string hf_open_files(HfFiles* h, const std::string& folder) {
    // Let the first rank list the files: a network's folder may look different to each rank.
    const Comm& world = h->reader.world;
    Json list;
    LLMC_TRY(first_error(world, world.rank > 0 ? "" : hf_list_files(folder, &list)));
    list = Json::parse(broadcast_text(world, list.dump(), 0));

    // Open them.
    std::vector<std::string> names = list["files"], paths;
    for (const std::string& name : names)
        paths.push_back(folder + "/" + name);
    LLMC_TRY(hf_open_shared(h, paths));

    // Refuse a tensor that occurs twice: it is ambiguous.
    std::map<std::string, std::string> seen; // [tensor]: its file
    for (size_t i = 0; i < names.size(); i++)
        for (const SafeTensor& t : h->files[i].tensors)
            if (!seen.insert({t.name, names[i]}).second)
                return concat(folder, ": tensor ", t.name, " is in ", seen[t.name],
                              " and again in ", names[i]);

    // Check the index: every tensor must be in the file that it names.
    for (auto& [tensor, file] : list["map"].items())
        if (!seen.count(tensor) || seen[tensor] != file.get<std::string>())
            return folder + "/model.safetensors.index.json: " + printable(tensor) +
                   " is not in " + printable(file.get<std::string>());
    return "";
}

// Find a tensor by name, or return null. GPT-2's tensors have the prefix of GPT2LMHeadModel in some
// folders only. The search goes through all files; the index was checked when they were opened.
inline const SafeTensor* hf_find(const HfFiles& h, const std::string& name) {
    for (const SafeTensors& f : h.files)
        for (const char* prefix : {"", "transformer."})
            if (const SafeTensor* t = safetensors_find(f, prefix + name))
                return t;
    return nullptr;
}

// ----------------------------------------------------------------------------
// read

// Bring bytes [first, first + count) of a tensor to each stage s with needs(s). There
// use(bytes, at, n) receives the n bytes from first + at on. All ranks call.
template <typename N, typename U>
void bring_chunks(HfFiles& h, const SafeTensor& t, size_t first, size_t count, N needs, U use) {
    // One rank alone uses the map itself.
    OneReader& r = h.reader;
    if (r.world.size == 1) {
        r.bytes += count;
        return use(t.data + first, size_t(0), count);
    }

    // Copy each chunk out of the map: a network card may refuse pages that are mapped read-only.
    bool reads = r.world.rank == t.reader;
    bool mine = needs(r.layout.pp.rank);
    if (!reads && !mine) return;
    for (size_t at = 0; at < count; at += h.most) {
        size_t n = std::min(h.most, count - at);
        h.chunk.resize(std::max(h.chunk.size(), n));
        if (reads)
            memcpy(h.chunk.data(), t.data + first + at, n);
        bring(r, h.chunk.data(), n, t.reader, needs);
        if (mine)
            use(h.chunk.data(), at, n);
    }
}

// Bring elements [first, first + count) of a tensor as floats. Returns nothing on a rank whose
// stage does not need them.
template <typename N>
std::vector<float> bring_floats(HfFiles& h, const SafeTensor& t, size_t first, size_t count,
                                N needs) {
    bool mine = needs(h.reader.layout.pp.rank);
    std::vector<float> values(mine ? count : 0);
    size_t width = dtype_bytes(t.dtype);

    // Convert each chunk as a tensor of its own.
    auto convert = [&](const unsigned char* bytes, size_t at, size_t n) {
        SafeTensor part = t;
        part.data = bytes;
        tensor_to_float(values.data() + at / width, part, 0, n / width);
    };
    bring_chunks(h, t, first * width, count * width, needs, convert);

    // Note values that no model can use, with the file that they are in.
    auto is_bad = [](float x) { return !std::isfinite(x); };
    auto bad = std::ranges::count_if(values, is_bad);
    for (const SafeTensors& f : h.files)
        if (bad && h.ruined.empty() && safetensors_find(f, t.name))
            h.ruined = concat(f.path, ": tensor ", t.name, ": ", bad, " of ", values.size(),
                              " values are not finite: take another file");
    return values;
}

// Bring a whole tensor to all ranks, as it is in the file. *bytes keeps its data.
inline SafeTensor bring_tensor(HfFiles& h, const SafeTensor& t, std::vector<unsigned char>* bytes) {
    bytes->resize(t.bytes);
    auto keep = [&](const unsigned char* from, size_t at, size_t n) {
        std::copy_n(from, n, bytes->data() + at);
    };
    bring_chunks(h, t, 0, t.bytes, [](int) { return true; }, keep);
    SafeTensor whole = t;
    whole.data = bytes->data();
    return whole;
}

// Finds a tensor of a folder by name; null if there is none.
typedef std::function<const SafeTensor*(const std::string&)> FindTensor;

// Find tensors of a folder, and bring each whole to all ranks, once. All ranks call, in one order.
inline FindTensor find_and_bring(HfFiles& h) {
    struct Brought {
        std::vector<unsigned char> bytes = {};
        SafeTensor tensor = {};
    };
    auto brought = std::make_shared<std::map<std::string, Brought>>();
    return [&h, brought](const std::string& name) -> const SafeTensor* {
        const SafeTensor* tensor = hf_find(h, name);
        if (!tensor) return nullptr;
        auto [at, is_new] = brought->insert({tensor->name, {}});
        Brought& b = at->second;
        if (is_new) b.tensor = bring_tensor(h, *tensor, &b.bytes);
        return &b.tensor;
    };
}

} // namespace llmc
