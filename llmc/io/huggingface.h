// huggingface.h - Hugging Face folders: config.json and safetensors to weights, and exports
//   Reading  config.json becomes a Shape (hf_config.h). model.safetensors, or the shards that
//            model.safetensors.index.json names, become weights, tensor by tensor (hf_places.h).
//            One rank reads each file, and sends others what they need (hf_files.h). Files in
//            other formats are read through the dialects that a program names (tensor_source.h).
//   Writing  the same formats, from the float masters, without the vocabulary's padding. The folder
//            is written under another name and renamed when it is whole. An export loads again to
//            the same bits. With the tokenizer's files (tokenizer_export.h) AutoTokenizer and
//            AutoModelForCausalLM load it and generate.
//   Every function that returns a text returns "" or one line that says what is wrong.
#pragma once
#include <filesystem>
#include "../adapters.h"
#include "../comm/group.h"
#include "../model.h"
#include "../ops/attention_sm90.cuh"
#include "../ops/element_type.h"
#include "../optimizer.h"
#include "../parameters.h"
#include "../quantised.h"
#include "../comm/text.h"
#include "../trainer.h"
#include "files.h"
#include "hf_config.h"
#include "hf_files.h"
#include "hf_places.h"
#include "one_reader.h"
#include "safetensors.h"
#include "tensor_source.h"
#include "tokenizer.h"
#include "tokenizer_export.h"
#include "tokenizer_files.h"

namespace llmc {

// ----------------------------------------------------------------------------
// safetensors -> weights

// Check that a tensor exists, with the shape that config.json asks for and a type that can be read.
inline std::string hf_check_tensor(const HfFiles& h, const std::string& name,
                                   const std::vector<size_t>& shape, UsedTensors* used) {
    const SafeTensor* t = hf_find(h, name);
    if (!t) return "tensor " + name + " is missing";
    used->names.insert(t->name);
    // Name both shapes: usually the config.json belongs to another size of the same model.
    if (t->shape != shape)
        return concat("tensor ", t->name, " has the shape ", shape_text(t->shape),
                      ", config.json asks for ", shape_text(shape));
    if (!is_float_dtype(t->dtype))
        return concat("tensor ", t->name, " is ", t->dtype,
                      "; F32, F16, BF16 and F64 can be read");
    return "";
}

// Set a weight from a file's values, which are [out, in] and without padding.
template <typename T, typename S>
void set_file_weight(Trainer<T, S>& t, const Parameter& p, std::vector<float> values) {
    // Fill the padding rows with 0, as in a new model.
    values.resize(p.elements(), 0.0f);
    set_weight(t, p, values.data());
}

// Whether a tensor is a buffer that older files carry beside the parameters: causal masks and
// rotary frequencies, which this program computes.
inline bool hf_ignored(const std::string& name) {
    for (const char* buffer : {".attn.bias", ".attn.masked_bias", ".attention.bias",
                               ".attention.masked_bias", "rotary_emb.inv_freq"})
        if (name.ends_with(buffer)) return true;
    return false;
}

// Whether a tensor belongs to the layers behind DeepSeek-V3's last one. They predict further
// tokens, and are not part of the model here.
inline bool hf_predicts(const Shape& s, const std::string& name) {
    // Layers count from 0, so layer L is the first one behind the model's.
    std::string behind = concat("model.layers.", s.L, ".");
    return s.family == Family::DEEPSEEK && name.starts_with(behind);
}

// Check the tensors of a parameter: each matrix of a stack has its own, unless experts share one.
inline std::string check_plain(const SourceFolder& f, const Parameter& p, UsedTensors* used) {
    for (size_t k = 0; k < p.stack; k++) {
        HfPlace place = hf_place(f.model->shape, p, k);
        LLMC_TRY(hf_check_tensor(f.files, place.tensor, place.shape, used));
    }
    return "";
}

// Refuse tensors that belong to no parameter. *further counts those that are left out.
inline std::string hf_check_unused(const Shape& s, const HfFiles& h,
                                   const std::set<std::string>& used, size_t* further) {
    *further = 0;
    for (const SafeTensors& f : h.files)
        for (const SafeTensor& x : f.tensors)
            if (hf_predicts(s, x.name))
                ++*further;
            else if (!used.count(x.name) && !hf_ignored(x.name))
                return "tensor " + x.name +
                       " belongs to nothing in this model: config.json is another model's";
    return "";
}

// Read a parameter on the stages that need it: its own part of a tensor that may have more. In a
// file each matrix of a stack has its own place; in memory they lie one below the other.
inline std::vector<float> read_plain(SourceFolder& f, const Parameter& p) {
    auto needs = stages_with(f.files.reader.layout, *f.model, p.bucket);

    // Send copies of one tensor, as upcycling has them, once.
    HfPlace before;
    std::vector<float> values, part;
    for (size_t k = 0; k < p.stack; k++) {
        HfPlace place = hf_place(f.model->shape, p, k);
        const SafeTensor* tensor = hf_find(f.files, place.tensor);
        size_t count = place.outputs * p.cols();
        bool same = place.tensor == before.tensor && place.begin == before.begin;
        if (!same)
            part = bring_floats(f.files, *tensor, place.begin, count, needs);
        before = place;
        take_from_block(&values, part, place, p.cols());
    }
    return values;
}

// The source of plain safetensors, under the names of Hugging Face's classes.
inline TensorSource plain_source(SourceFolder& f) {
    TensorSource source;
    source.check = [&f](const Parameter& p, UsedTensors* used) { return check_plain(f, p, used); };
    source.read = [&f](const Parameter& p, Stored, SourceValues* to) {
        to->floats = read_plain(f, p);
        return std::string();
    };
    return source;
}

// Refuse a head beside the table that config.json ties it to, unless both are equal: transformers
// keeps such a head. All ranks call, and see the same bytes.
inline std::string hf_check_tied(HfFiles& h, const Model& m) {
    const SafeTensor* table = hf_find(h, m.parameters[0].name);
    auto all = [](int) { return true; };
    for (const char* name : {"lm_head.weight", "embed_out.weight"}) {
        const SafeTensor* head = hf_find(h, name);
        if (!head || !table || !is_float_dtype(head->dtype) || !is_float_dtype(table->dtype))
            continue;

        // Compare them part by part.
        bool equal = head->shape == table->shape;
        size_t part = size_t(1) << 22;
        for (size_t at = 0; equal && at < table->elements(); at += part) {
            size_t count = std::min(part, table->elements() - at);
            std::vector<float> of_head = bring_floats(h, *head, at, count, all);
            equal = of_head == bring_floats(h, *table, at, count, all);
        }
        if (!equal)
            return concat(name, " is another matrix than ", table->name, ", and "
                          "tie_word_embeddings is true: write false into config.json to use it, "
                          "or take the tensor out");
    }
    return "";
}

// Open a folder's files, and wrap their source by each dialect. All ranks call, and see the same.
inline std::string open_source(SourceFolder* f, TensorSource* source, const Dialects& dialects) {
    LLMC_TRY(hf_open_files(&f->files, f->path));
    const Comm& world = f->files.reader.world;
    std::string said = world.rank ? "" : read_quantization(f->path).dump();
    f->quantization = Json::parse(broadcast_text(world, said, 0), nullptr, false);

    *source = plain_source(*f);
    for (const Dialect& d : dialects)
        LLMC_TRY(d.open(*f, source));
    if (!f->adapter.empty() && !source->merges)
        return "--adapter " + f->adapter + ": is of a kind that this program does not merge";
    return "";
}

// Check that a folder has the tensors of these parameters, and no others. *further counts those of
// layers that are left out.
inline std::string check_source(SourceFolder& f, const TensorSource& source,
                                const Dialects& dialects, const std::vector<Parameter>& parameters,
                                size_t* further) {
    UsedTensors used;
    if (f.model->shape.embedding.tied)
        used.names = {"lm_head.weight", "embed_out.weight"}; // table's copies
    std::string wrong;
    for (const Parameter& p : parameters)
        if (wrong.empty() && !is_adapter(*f.model, p)) // these have a folder of their own
            wrong = source.check(p, &used);
    if (wrong.empty() && f.model->shape.embedding.tied)
        wrong = hf_check_tied(f.files, *f.model);

    // A method that is not read explains missing tensors and foreign codes.
    std::string foreign = check_method(f.quantization, dialects);
    if (!foreign.empty() && (used.codes || !wrong.empty()))
        return foreign;
    return wrong.empty() ? hf_check_unused(f.model->shape, f.files, used.names, further) : wrong;
}

// Load parameters from a source, one after the other, in the same order on all ranks.
template <typename T, typename S>
std::string load_parameters(Trainer<T, S>& t, const TensorSource& source,
                            const std::vector<Parameter>& parameters) {
    for (const Parameter& p : parameters) {
        if (is_adapter(t.model, p)) continue;
        bool narrow = is_narrow(t.plans[0].stored, t.model, p);
        SourceValues values;
        LLMC_TRY(source.read(p, narrow ? t.plans[0].stored : Stored::WIDE, &values));

        // Keep codes as they are; both are empty if another stage needs the parameter.
        if (values.floats.empty()) {
            if (!values.codes.codes.empty()) set_stored(t, p, values.codes);
            continue;
        }
        if (ordered_by_heads(p))
            values.floats = swap_outer(values.floats, t.model.shape.NH, 3);
        set_file_weight(t, p, values.floats);
    }
    return "";
}

// Load parameters from a folder; tensors of others in it are an error. Each byte is read by one
// rank. All ranks call and see the same error. adapter: a folder of adapters to merge; "": none.
// *bytes: tensor bytes that this rank read.
template <typename T, typename S>
std::string hf_load_parameters(Trainer<T, S>& t, const std::string& folder,
                               const std::vector<Parameter>& parameters,
                               const Dialects& dialects = {}, const std::string& adapter = "",
                               size_t* bytes = nullptr) {
    SourceFolder f;
    f.model = &t.model;
    f.path = folder;
    f.adapter = adapter;
    f.files.reader = make_one_reader(t.comms.world, t.layout);
    TensorSource source;
    LLMC_TRY(open_source(&f, &source, dialects));

    // Check all headers before any tensor is sent.
    size_t further = 0;
    std::string wrong = check_source(f, source, dialects, parameters, &further);
    if (wrong.empty()) wrong = load_parameters(t, source, parameters);
    if (!wrong.empty()) return folder + ": " + wrong;
    if (bytes) *bytes = f.files.reader.bytes;
    wrong = first_error(t.comms.world, f.files.ruined);

    // Let one rank report what was left out.
    if (wrong.empty() && further && t.comms.world.rank == 0)
        printf("%s: left out %zu tensors behind the last layer, which predict further tokens\n",
               folder.c_str(), further);
    return wrong;
}

// Load all weights of a folder.
template <typename T, typename S>
std::string hf_load_weights(Trainer<T, S>& t, const std::string& folder,
                            const Dialects& dialects = {}, const std::string& adapter = "",
                            size_t* bytes = nullptr) {
    return hf_load_parameters(t, folder, t.model.parameters, dialects, adapter, bytes);
}

// ----------------------------------------------------------------------------
// weights -> a folder

// Change a JSON file of an export; without the file it begins as {}.
template <typename F>
std::string change_json(ExportTokenizer* e, const std::string& name, F change) {
    std::string& text = e->files[name];
    auto j = OrderedJson::parse(text.empty() ? "{}" : text, nullptr, false);
    if (!j.is_object())
        return name + ": is no JSON object";
    change(j);
    text = j.dump(2) + "\n";
    return "";
}

// Take over what the model's folder says beside its shape: keys of config.json that this program
// does not know.
inline std::string keep_of_folder(ExportTokenizer* e, const std::string& folder,
                                  bool own_tokenizer) {
    // The element type is the export's own. Token ids hold only if the tokenizer is the folder's.
    std::string text;
    LLMC_TRY(read_whole_file(folder + "/config.json", &text));
    e->kept = OrderedJson::parse(text, nullptr, false);
    if (!e->kept.is_object())
        return folder + "/config.json: is no JSON object";
    e->kept.erase("dtype");
    e->kept.erase("quantization_config"); // an export has no codes
    for (const char* id : {"bos_token_id", "eos_token_id", "pad_token_id"})
        if (!own_tokenizer) e->kept.erase(id);
    return "";
}

constexpr const char* CHAT_TEMPLATES = "additional_chat_templates/"; // a folder of named templates
constexpr size_t CARRIED_BYTES = size_t(64) << 20; // larger files are weights, whatever their names

// Take over every other file of the model's folder that is not there yet: the tokenizer's in all
// its forms, settings of generate(), chat templates, licences, code. Left behind are weights, what
// trained them, the card that describes them, and hidden files.
inline std::string carry_files(ExportTokenizer* e, const std::string& folder) {
    std::vector<std::string> names = names_in(folder);
    for (const std::string& name : names_in(folder + "/" + CHAT_TEMPLATES))
        names.push_back(CHAT_TEMPLATES + name);

    for (const std::string& name : names) {
        std::string path = folder + "/" + name;
        bool left = name[0] == '.' || name == "config.json" || name == "README.md" ||
                    name.starts_with("adapter_") || e->files.count(name);
        for (const char* end : {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5",
                                ".msgpack", ".onnx", ".index.json", ".jsonl"})
            left |= name.ends_with(end);
        struct stat st;
        bool file = stat(path.c_str(), &st) == 0 && S_ISREG(st.st_mode);
        if (!left && file && size_t(st.st_size) <= CARRIED_BYTES)
            LLMC_TRY(read_whole_file(path, &e->files[name]));
    }
    return "";
}

// Make answers end with `end`, in both configs: generate() reads generation_config.json. Tokens
// that ended a text before still end one.
inline std::string export_end(ExportTokenizer* e, const Tokenizer& t, int end) {
    std::vector<int> ends = {e->eos};
    auto add_end = [&](OrderedJson& j) {
        // A file that names none has those of the file before.
        std::vector<int> own = named_tokens(t, j, "eos_token");
        ends = own.empty() ? ends : own;
        if (std::ranges::count(ends, end) == 0)
            ends.insert(ends.begin(), end);
        std::erase(ends, -1);
        j["eos_token_id"] = end;
        if (ends.size() > 1) j["eos_token_id"] = ends;
    };
    add_end(e->kept);
    e->eos = end;
    return change_json(e, "generation_config.json", add_end);
}

// Give an export a chat template in the place of all that it has. It writes bos_token and
// eos_token, so these must be what the model was trained with.
inline std::string export_template(ExportTokenizer* e, const std::string& text,
                                   const OrderedJson& bos, const std::string& eos) {
    std::string wrong;
    for (const char* name : {"tokenizer_config.json", "special_tokens_map.json"})
        if (wrong.empty() && (*name == 't' || e->files.count(name)))
            wrong = change_json(e, name, [&](OrderedJson& j) {
                j.erase("chat_template");
                j["bos_token"] = bos;
                j["eos_token"] = eos;
            });
    std::erase_if(e->files, [](const auto& file) {
        return file.first == "chat_template.json" || file.first.starts_with(CHAT_TEMPLATES);
    });
    e->files["chat_template.jinja"] = e->chat_template = text;
    return wrong;
}

// The real path of an export's folder. A slash at the end goes: the temporary folder must stand
// beside "exports/new", not inside it. A link is followed and stays a link.
inline std::string export_folder(std::string path) {
    // Follow as many links as the system would.
    auto strip = [&] {
        while (path.size() > 1 && (path.back() == '/' || path.ends_with("/.")))
            path.pop_back();
    };
    strip();
    std::error_code none;
    for (int links = 0; links < 40 && std::filesystem::is_symlink(path, none); links++) {
        std::filesystem::path target = std::filesystem::read_symlink(path, none);
        path = (std::filesystem::path(path).parent_path() / target).string();
        strip();
    }
    return path;
}

// Check that an export may be written to a folder: only an older export may be in it. carried: the
// names of files that this one replaces.
inline std::string hf_check_folder(const std::string& folder, const TextFiles& carried) {
    // Refuse the current folder, which cannot be exchanged for another.
    std::error_code none;
    std::string path = export_folder(folder);
    if (std::filesystem::equivalent(path, ".", none))
        return "--export " + folder + ": is the current folder: name a new one, as ./export";

    // Check the parent: the export is written beside the folder and renamed into its place.
    std::string parent = folder_of(path);
    if (::access(parent.c_str(), W_OK | X_OK) != 0)
        return "--export " + folder + ": cannot be written: " + parent + ": " + strerror(errno);

    // Refuse a file of that name.
    mode_t type = file_type(path);
    if (type && type != S_IFDIR)
        return "--export " + folder + ": is a file, an export is a folder: choose another name";

    // Refuse a folder with files of any other origin: the rename would remove them.
    std::vector<std::string> names = names_in(path);
    auto templates = carried.lower_bound(CHAT_TEMPLATES);
    bool carries_templates = templates != carried.end() &&
                             templates->first.starts_with(CHAT_TEMPLATES);
    for (const std::string& name : names)
        if (!export_file(name) && !carried.count(name) &&
            !(carries_templates && name + "/" == CHAT_TEMPLATES))
            return "--export " + folder + ": holds " + printable(name) +
                   ", which is no export of ours: choose a new folder";

    // Refuse files of ours that are no whole model, such as a tokenizer's.
    bool config = std::ranges::any_of(names, [](const std::string& name) {
        return name == "config.json" || name == "adapter_config.json";
    });
    bool weights = std::ranges::any_of(names, [](const std::string& name) {
        return name.ends_with(".safetensors");
    });
    if (names.empty() || (config && weights))
        return "";
    return "--export " + folder + ": holds " + printable(names[0]) +
           " and no whole model: choose a new folder";
}

// Check that an export may be written to a file.
inline std::string check_export_file(const std::string& path) {
    std::string parent = folder_of(path);
    if (::access(parent.c_str(), W_OK | X_OK) != 0)
        return "--export " + path + ": cannot be written: " + parent + ": " + strerror(errno);
    mode_t type = file_type(path);
    return type && type != S_IFREG ? "--export " + path + ": is no file: choose another name" : "";
}

// ----------------------------------------------------------------------------
// tensors' names

// A tensor's name in an export. GPT2LMHeadModel keeps its body under "transformer.", its head
// beside it; other families use our names.
inline std::string hf_name(const Shape& s, const std::string& name) {
    bool body = s.family == Family::GPT2 && name != "lm_head.weight";
    return body ? "transformer." + name : name;
}

// ----------------------------------------------------------------------------
// writing a folder

// Check at the start of a run that the folder may be written and that config.json can describe the
// shape. A refusal at the end would cost the run.
inline std::string hf_export_check(const Shape& s, const std::string& folder,
                                   const TextFiles& carried = {}) {
    LLMC_TRY(hf_check_folder(folder, carried));
    return hf_refusal(s);
}

// The whole config.json: first the keys kept from the model's folder, then our own, which win.
inline OrderedJson hf_config_json(const Shape& s, Type dtype, const ExportTokenizer& tokenizer) {
    OrderedJson j = tokenizer.kept;
    j.update(hf_json(s));
    j["torch_dtype"] = dtype == Type::BF16  ? "bfloat16"
                       : dtype == Type::F16 ? "float16"
                                            : "float32";

    // Keep a list of end tokens: several tokens may end a text. An unknown token is null: without
    // the key, transformers would assume the id of the family's first model.
    for (auto [key, id] : {std::pair("bos_token_id", tokenizer.bos),
                           std::pair("eos_token_id", tokenizer.eos)})
        if (!j.contains(key) || j[key].is_null()) j[key] = id < 0 ? OrderedJson() : OrderedJson(id);
    return j;
}

// Sums over the changes D that adapters make, for a model that is written with them merged. They
// measure how much of D survives the rounding.
struct MergeSums {
    double changed = 0, kept = 0; // W' is the weight as the file has it
    double coefficient() const { return changed > 0 ? kept / changed : 1; }
};

// A trained parameter with its adapter merged: W + s B A, in float; in a stack each expert with its
// own. round_row(row) rounds a row as the file will; only the sums use that. All ranks call.
template <typename T, typename S, typename R>
std::vector<float> merged_weight(const Trainer<T, S>& t, const Parameter& p, R round_row,
                                 MergeSums* sums) {
    std::vector<float> w = get_weight(t, p);
    if (p.adapter < 0) return w;
    const Parameter* half = &t.model.parameters[p.adapter];
    std::vector<float> a = get_weight(t, half[0]), b = get_weight(t, half[1]);
    double scale = t.model.shape.tuned.adapters->at(module_of(p)).scale;

    // Compute one row of the change D at a time, as a sum of rows of its expert's A.
    size_t r = half->rows() / p.stack, cols = p.cols();
    for (size_t i = 0; i < p.rows(); i++) {
        std::vector<double> d(cols, 0.0);
        size_t expert = i / (p.rows() / p.stack);
        for (size_t k = 0; k < r; k++)
            for (size_t j = 0; j < cols; j++)
                d[j] += scale * b[i * r + k] * a[(expert * r + k) * cols + j];

        // Add the change, and measure what rounding leaves of it.
        std::vector<float> was(&w[i * cols], &w[i * cols] + cols), row(cols);
        for (size_t j = 0; j < cols; j++)
            w[i * cols + j] = row[j] = float(was[j] + d[j]);
        round_row(row);
        for (size_t j = 0; j < cols; j++) {
            sums->changed += d[j] * d[j];
            sums->kept += (double(row[j]) - was[j]) * d[j];
        }
    }
    return w;
}

// The tensors of a file with parameters [first, last), in its order.
inline std::vector<TensorSpec> export_specs(const Model& m, size_t first, size_t last, Type dtype) {
    std::vector<TensorSpec> specs;
    for (size_t i = first; i < last; i++) {
        const Parameter& p = m.parameters[i];
        for (size_t k = 0; k < p.stack; k++) {
            // Parameters of one tensor follow each other in the order of its rows; list it once.
            HfPlace place = hf_place(m.shape, p, k);
            if (!place.begins_tensor() || is_adapter(m, p)) continue; // adapters are merged
            specs.push_back({hf_name(m.shape, place.tensor), dtype, place.shape});
        }
    }
    return specs;
}

// Write parameters [first, last) into a file. All ranks call and gather every parameter,
// even after a failure, because get_weight() is collective. The first rank writes, and all
// ranks get its error.
template <typename T, typename S>
std::string write_export_file(const Trainer<T, S>& t, const std::string& path, size_t first,
                              size_t last, const std::vector<TensorSpec>& specs, Type dtype,
                              MergeSums* merged) {
    // Write one parameter at a time: the host holds one, as floats, and the gates of experts until
    // their ups come.
    std::vector<float> joined;
    FileWriter w;
    bool writes = t.comms.world.rank == 0;
    if (writes) writer_open(&w, path, specs, {{"format", "pt"}});
    for (size_t i = first; i < last; i++) {
        const Parameter& p = t.model.parameters[i];
        if (is_adapter(t.model, p)) continue;

        // Merge adapters on all ranks, then write on the first.
        auto round_row = [&](std::vector<float>& row) {
            for (float& x : row)
                x = as_written(x, dtype);
        };
        std::vector<float> values = merged_weight(t, p, round_row, merged);
        if (!writes || !w.wrong.empty()) continue;
        values.resize(p.file_elements()); // padding is at the end
        HfPlace place = hf_place(t.model.shape, p);
        for (size_t k = 0; place.turned && k < p.stack; k++) {
            const float* matrix = &values[k * p.elements() / p.stack];
            put_into_block(&joined, matrix, hf_place(t.model.shape, p, k), p.cols());
        }
        if (place.first + 1 < place.step) continue; // gate's tensor is whole when up has come
        if (place.turned)
            values = std::exchange(joined, {});
        if (ordered_by_heads(p))
            values = swap_outer(values, 3, t.model.shape.NH);
        writer_put(w, values, dtype);
    }
    return first_error(t.comms.world, writes ? writer_close(&w) : "");
}

// Split the table into files of at most shard_bytes; a parameter that is larger has its own file.
struct ExportShards {
    std::vector<size_t> starts = {0}; // the first parameter of each file
    size_t total = 0;                 // bytes of all
};
inline ExportShards export_shards(const Model& m, Type dtype, size_t shard_bytes) {
    const std::vector<Parameter>& table = m.parameters;
    ExportShards shards;
    size_t bytes = 0; // of the last file
    // A file begins with a parameter that would exceed the limit.
    for (size_t i = 0; i < table.size(); i++) {
        if (is_adapter(m, table[i])) continue;
        size_t own = table[i].file_elements() * type_bytes(dtype);
        bool begins = hf_place(m.shape, table[i]).begins_tensor(); // a tensor is in one file
        if (begins && bytes && bytes + own > shard_bytes) {
            shards.starts.push_back(i);
            bytes = 0;
        }
        bytes += own;
        shards.total += own;
    }
    return shards;
}

// Write a whole export into an empty folder. All ranks call; the first one writes.
template <typename T, typename S>
std::string write_export(const Trainer<T, S>& t, const std::string& folder, Type dtype,
                         size_t shard_bytes, const ExportTokenizer& tokenizer, MergeSums* merged) {
    ExportShards shards = export_shards(t.model, dtype, shard_bytes);
    size_t files = shards.starts.size();

    // Write the weights, file by file, and note which tensor is in which.
    OrderedJson weight_map; // [tensor]: its file
    for (size_t f = 0; f < files; f++) {
        std::string name = "model.safetensors";
        if (files > 1) name = formatted("model-%05zu-of-%05zu.safetensors", f + 1, files);
        size_t first = shards.starts[f];
        size_t last = f + 1 < files ? shards.starts[f + 1] : t.model.parameters.size();
        std::string path = folder + "/" + name;
        std::vector<TensorSpec> specs = export_specs(t.model, first, last, dtype);
        LLMC_TRY(write_export_file(t, path, first, last, specs, dtype, merged));
        for (const TensorSpec& tensor : specs)
            weight_map[tensor.name] = name;
    }

    // Write the files that describe the weights.
    if (t.comms.world.rank > 0) return "";
    TextFiles texts;
    OrderedJson index = {{"metadata", {{"total_size", shards.total}}}, {"weight_map", weight_map}};
    if (files > 1)
        texts["model.safetensors.index.json"] = index.dump(2);
    OrderedJson config = hf_config_json(t.model.shape, dtype, tokenizer);
    texts["config.json"] = config.dump(2) + "\n";
    OrderedJson ids = {{"bos_token_id", config["bos_token_id"]},
                       {"eos_token_id", config["eos_token_id"]}};
    if (!config["eos_token_id"].is_null() && !tokenizer.files.count("generation_config.json"))
        texts["generation_config.json"] = ids.dump(2) + "\n";
    return write_texts(folder, texts);
}

// Make the temporary folder of an export, after removing what a crash left.
inline std::string make_export_folder(const std::string& folder, const std::string& temporary,
                                      const TextFiles& carried) {
    remove_folder(temporary, carried);
    if (mkdir(temporary.c_str(), 0777) == 0)
        return "";
    return "--export " + folder + ": " + temporary + ": cannot be made: " + strerror(errno);
}

// Export a folder completely or not at all: fill(path) writes into an empty folder, which also gets
// the files of `beside`. All ranks call: the first one writes, the others help to gather each
// parameter. All return the first error.
template <typename T, typename S, typename F>
std::string export_whole(const Trainer<T, S>& t, const std::string& folder,
                         const ExportTokenizer& beside, F fill) {
    // Each step ends in first_error(): no rank continues alone, and none waits for one that failed.
    const Comm& world = t.comms.world;
    bool first = world.rank == 0;

    // Make a folder beside the old one, which stays whole until the new one is.
    std::string path = export_folder(folder);
    std::string temporary = path + ".exporting";
    LLMC_TRY(first_error(world, first ? make_export_folder(folder, temporary, beside.files) : ""));

    // Fill it, then give it the name.
    std::string wrong = fill(temporary);
    if (first && wrong.empty())
        wrong = write_texts(temporary, beside.files);
    if (first && wrong.empty())
        wrong = replace_folder(temporary, path, beside.files);
    wrong = first_error(world, wrong);
    if (first && !wrong.empty()) remove_folder(temporary, beside.files);
    return wrong;
}

// Export a model's folder, with its adapters merged if there are any. *merged receives how much of
// their changes was kept.
template <typename T, typename S>
std::string hf_export(const Trainer<T, S>& t, const std::string& folder, Type dtype,
                      size_t shard_bytes = size_t(5) << 30, const ExportTokenizer& tokenizer = {},
                      MergeSums* merged = nullptr) {
    MergeSums nobody_asks;
    MergeSums* sums = merged ? merged : &nobody_asks;
    return export_whole(t, folder, tokenizer, [&](const std::string& path) {
        return write_export(t, path, dtype, shard_bytes, tokenizer, sums);
    });
}

} // namespace llmc
