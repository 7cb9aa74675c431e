// tensor_source.h - where weights come from: a parameter's values, whatever the format of its file
//   1. open    Plain safetensors are the source that huggingface.h knows. Each dialect that a
//              program names may wrap it: it answers for the parameters that are stored its way,
//              and passes all others on.
//   2. check   The tensors of each parameter, by headers: a folder that does not fit is refused
//              before any tensor is sent.
//   3. read    One parameter after the other, in the same order on all ranks.
//   A dialect is one file in llmc/extra/, and one row in the list of a program.
//   Every function that returns a text returns "" or one line that says what is wrong.
#pragma once
#include <functional>
#include <set>
#include <string>
#include <vector>
#include "../model.h"
#include "../optimizer.h"
#include "../quantised.h"
#include "../comm/text.h"
#include "hf_files.h"
#include "hf_places.h"
#include "json.h"
#include "safetensors.h"

namespace llmc {

// The tensors of a folder that its parameters use.
struct UsedTensors {
    std::set<std::string> names;
    bool codes = false; // some matrices are stored as codes
};

// The values of a parameter: floats [out, in] without padding, in the file's order of rows, or else
// the codes of the format that the run stores. Both are empty if another stage needs the parameter.
struct SourceValues {
    std::vector<float> floats = {};
    StoredMatrix codes = {};
};

// A source. All ranks call, and see the same error.
struct TensorSource {
    // Check that a parameter's tensors are there and fit, and mark them as used.
    std::function<std::string(const Parameter& p, UsedTensors* used)> check;
    // Read a parameter. wanted: the format in which the run stores it.
    std::function<std::string(const Parameter& p, Stored wanted, SourceValues* to)> read;
    bool merges = false; // the folder's adapter is merged into what it reads
};

// A folder that is being read. It must outlive its source.
struct SourceFolder {
    HfFiles files = {};
    const Model* model = nullptr;
    std::string path = "";
    std::string adapter = "";         // a folder of adapters to merge; "": none
    Json quantization = {};           // what the folder says of its codes; null: nothing
};

// A way to store weights besides plain safetensors.
struct Dialect {
    std::vector<std::string> methods; // each quant_method that it reads
    // Wrap *source, if the folder may have such tensors.
    std::string (*open)(SourceFolder& f, TensorSource* source);
    // Check by headers, before anything is allocated, an adapter that is merged as it is read.
    std::string (*check_adapter)(const Model& base, const std::string& adapter) = nullptr;
};
typedef std::vector<Dialect> Dialects;

// ----------------------------------------------------------------------------
// what a folder says of its codes

// A key's word in small letters: AutoAWQ writes the version both as GEMM and as gemm.
inline std::string quantization_word(const Json& q, const char* key, const char* otherwise) {
    Json value = q.value(key, Json(otherwise));
    std::string word = value.is_string() ? value.get<std::string>() : value.dump();
    for (char& c : word) c = char(tolower(c));
    return word;
}

// The method of a quantization_config. Without the key it is GPTQ: older versions left it out.
inline std::string quantization_method(const Json& q) {
    return q.is_object() ? quantization_word(q, "quant_method", "gptq") : "";
}

// Read what a folder says: in config.json, or as older versions of AutoGPTQ, in a file of its own.
inline Json read_quantization(const std::string& folder) {
    Json config;
    read_json(folder + "/config.json", &config);
    if (config.is_object() && config.contains("quantization_config"))
        return config["quantization_config"];
    Json own; // stays null if there is no file
    read_json(folder + "/quantize_config.json", &own);
    return own;
}

// Refuse a method that no dialect reads; it explains missing tensors and unknown types.
inline std::string check_method(const Json& q, const Dialects& dialects) {
    std::vector<std::string> known;
    for (const Dialect& d : dialects)
        known.insert(known.end(), d.methods.begin(), d.methods.end());
    std::string method = quantization_method(q);
    if (method.empty() || std::ranges::count(known, method))
        return "";

    return concat("quantization_config has quant_method ", printable(method), ": ",
                  known.empty() ? "convert_gpt FOLDER OUT writes plain weights, which are read here"
                                : words_with_and(known) + " are read; dequantise it");
}

// ----------------------------------------------------------------------------
// sources of codes

// How a dialect reads matrices that are stored as codes.
struct CodesDialect {
    // The tensor with the codes of a matrix; null: it has none.
    std::function<const SafeTensor*(const HfFiles& h, const std::string& name)> find;
    // Read the codes, or the values that they stand for where the run stores another format.
    std::function<std::string(const FindTensor& find, const SafeTensor& codes, const Parameter& p,
                              Stored wanted, SourceValues* to)> read;
};

// Wrap a source: matrices that are stored as codes are read from these. Every rank sees the codes,
// also where its stage does not need them: their contents may be refused, on all ranks alike.
inline void wrap_codes(SourceFolder& f, TensorSource* source, const CodesDialect& d) {
    TensorSource inner = *source;
    source->check = [=, &f](const Parameter& p, UsedTensors* used) {
        std::string name = hf_place(f.model->shape, p).tensor;
        const SafeTensor* codes = d.find(f.files, name);
        if (!codes) return inner.check(p, used);
        used->codes = true;

        // Mark all that stands beside the codes under the name of the matrix.
        std::string stem = codes->name.substr(0, codes->name.rfind('.') + 1);
        for (const SafeTensors& file : f.files.files)
            for (const SafeTensor& t : file.tensors)
                if (t.name.starts_with(stem)) used->names.insert(t.name);

        // Refuse a part of a matrix, or another order of rows: blocks of codes would not fit.
        bool whole = name == p.name && p.stack == 1 && !ordered_by_heads(p);
        if (whole && p.shape.size() == 2)
            return std::string();
        return "tensor " + codes->name + " is " + codes->dtype + ", and only whole matrices can be "
               "read from codes: dequantise the folder first";
    };
    source->read = [=, &f](const Parameter& p, Stored wanted, SourceValues* to) {
        const SafeTensor* codes = d.find(f.files, hf_place(f.model->shape, p).tensor);
        if (!codes) return inner.read(p, wanted, to);
        FindTensor find = find_and_bring(f.files);
        return d.read(find, *find(codes->name), p, wanted, to);
    };
}

} // namespace llmc
