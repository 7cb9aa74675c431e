// huggingface.h - Hugging Face folders in and out: config.json and safetensors of GPT-2, Llama, Mistral, Qwen2
//   Reading: config.json becomes a Shape; model.safetensors, or the shards that
//   model.safetensors.index.json names, become weights, tensor by tensor. GPT-2's matrices are
//   stored [in, out] (Conv1D) and turned on the way.
//   Writing: the same, from the float masters, without the vocabulary's padding, into a folder of
//   another name that is renamed when it is whole. An export loads again to the same bits. With the
//   tokenizer's files (tokenizer_export.h) AutoTokenizer and AutoModelForCausalLM load and generate.
//   Every function returns "" or one line that says what is wrong.
#pragma once
#include <dirent.h>
#include <fstream>
#include "safetensors.h"
#include "trainer.h"

// ----------------------------------------------------------------------------
// config.json -> Shape

struct HfConfig {
    nlohmann::json j;
    std::string path, wrong; // the first thing that is wrong
    bool has(const char* key) const { return j.contains(key) && !j[key].is_null(); }
};

// A value as a message shows it: lists are not printed, for printing recurses, and brackets in
// brackets end the stack.
inline std::string hf_text(const nlohmann::json& j) {
    return j.is_structured() ? j.type_name() : j.dump();
}

inline size_t hf_size(HfConfig& c, const char* key, size_t otherwise = 0) {
    if (!c.has(key) && otherwise) return otherwise;
    bool good = c.has(key) && c.j[key].is_number_unsigned() && c.j[key].get<uint64_t>() > 0 &&
                c.j[key].get<uint64_t>() <= (1u << 24);
    if (!good && c.wrong.empty())
        c.wrong = c.path + ": " + key +
                  (c.has(key) ? " is " + hf_text(c.j[key]) + ", which is no size" : " is missing");
    return good ? c.j[key].get<size_t>() : 1;
}

inline double hf_number(HfConfig& c, const nlohmann::json& j, const char* key, double otherwise) {
    if (!j.contains(key) || j[key].is_null()) return otherwise;
    if (!j[key].is_number() && c.wrong.empty())
        c.wrong = c.path + ": " + key + " is " + hf_text(j[key]) + ", which is no number";
    return j[key].is_number() ? j[key].get<double>() : otherwise;
}

inline void hf_refuse_unless(HfConfig& c, const char* key, const nlohmann::json& only) {
    if (c.has(key) && c.j[key] != only && c.wrong.empty())
        c.wrong = c.path + ": " + key + " " + hf_text(c.j[key]) + " is not built yet, only " +
                  only.dump() + " is";
}

inline double hf_positive(HfConfig& c, const nlohmann::json& j, const char* key, double otherwise) {
    double x = hf_number(c, j, key, otherwise);
    if (!(x > 0) && c.wrong.empty())
        c.wrong = c.path + ": " + key + " is " + hf_text(j[key]) + ", not above zero";
    return x > 0 ? x : otherwise;
}

inline bool hf_flag(HfConfig& c, const char* key, bool otherwise) {
    if (!c.has(key)) return otherwise;
    if (!c.j[key].is_boolean() && c.wrong.empty())
        c.wrong = c.path + ": " + key + " is " + hf_text(c.j[key]) + ", neither true nor false";
    return c.j[key].is_boolean() ? c.j[key].get<bool>() : otherwise;
}

inline Shape hf_gpt2_shape(HfConfig& c) {
    size_t C = hf_size(c, "n_embd");
    Shape s = gpt2_shape(hf_size(c, "n_layer"), hf_size(c, "n_head"), C, hf_size(c, "vocab_size"),
                         hf_size(c, "n_positions", c.has("n_ctx") ? hf_size(c, "n_ctx") : 0));
    s.F = hf_size(c, "n_inner", 4 * C);
    s.norm_eps = float(hf_positive(c, c.j, "layer_norm_epsilon", 1e-5));
    s.tied = hf_flag(c, "tie_word_embeddings", true);
    hf_refuse_unless(c, "activation_function", "gelu_new");
    hf_refuse_unless(c, "scale_attn_weights", true);
    hf_refuse_unless(c, "scale_attn_by_inverse_layer_idx", false);
    if (C % s.NH && c.wrong.empty())
        c.wrong = c.path + ": n_head " + std::to_string(s.NH) + " does not divide n_embd " +
                  std::to_string(C);
    return s;
}

// rope_scaling of older files, rope_parameters of newer ones; rope_type was called type before
inline void hf_rope(HfConfig& c, Shape& s) {
    s.rope_theta = hf_positive(c, c.j, "rope_theta", 10000);
    for (const char* key : {"rope_scaling", "rope_parameters"}) {
        if (!c.has(key)) continue;
        const nlohmann::json& r = c.j[key];
        if (!r.is_object()) return (void)(c.wrong = c.path + ": " + key + " is no object");
        s.rope_theta = hf_positive(c, r, "rope_theta", s.rope_theta);
        nlohmann::json named =
            r.value("rope_type", r.value("type", nlohmann::json())); // of any type, or null
        std::string type = named.is_string() ? named.get<std::string>()
                           : named.is_null() ? "default"
                                             : hf_text(named);
        if (type == "default") continue;
        if (type != "llama3")
            return (void)(c.wrong = c.path + ": rope scaling " + type +
                                    " is not built yet, only llama3 is");
        RopeScaling& x = s.rope_scaling;
        x = {float(hf_positive(c, r, "factor", 8)), float(hf_positive(c, r, "low_freq_factor", 1)),
             float(hf_positive(c, r, "high_freq_factor", 4)), 0};
        double original = hf_positive(c, r, "original_max_position_embeddings", 8192);
        x.original_positions = int(std::min(original, double(1 << 24)));
        if (x.low_freq_factor >= x.high_freq_factor && c.wrong.empty())
            c.wrong = c.path + ": " + key + " has low_freq_factor " +
                      nlohmann::json(x.low_freq_factor).dump() + ", not below high_freq_factor " +
                      nlohmann::json(x.high_freq_factor).dump();
    }
}

inline Shape hf_llama_shape(HfConfig& c, const std::string& type) {
    size_t C = hf_size(c, "hidden_size"), NH = hf_size(c, "num_attention_heads");
    Shape s =
        llama_shape(hf_size(c, "num_hidden_layers"), NH, hf_size(c, "num_key_value_heads", NH), C,
                    hf_size(c, "intermediate_size"), hf_size(c, "vocab_size"),
                    hf_size(c, "max_position_embeddings", 2048), 10000);
    s.hf_type = type;
    s.HS = hf_size(c, "head_dim", std::max(C / NH, size_t(1)));
    s.norm_eps = float(hf_positive(c, c.j, "rms_norm_eps", 1e-6));
    s.qkv_bias = type == "qwen2";
    s.tied = hf_flag(c, "tie_word_embeddings", false);
    hf_rope(c, s);
    hf_refuse_unless(c, "hidden_act", "silu");
    hf_refuse_unless(c, "attention_bias", false);
    hf_refuse_unless(c, "mlp_bias", false);
    if (type == "qwen2")
        hf_refuse_unless(c, "use_sliding_window", false); // of its upper layers only
    bool window = c.has("sliding_window") && hf_flag(c, "use_sliding_window", type == "mistral");
    if (window) s.sliding_window = hf_size(c, "sliding_window");
    if (!c.has("head_dim") && C % NH && c.wrong.empty())
        c.wrong = c.path + ": num_attention_heads " + std::to_string(NH) +
                  " does not divide hidden_size " + std::to_string(C);
    if (NH % s.NKV && c.wrong.empty())
        c.wrong = c.path + ": num_key_value_heads " + std::to_string(s.NKV) +
                  " does not divide num_attention_heads " + std::to_string(NH);
    return s;
}

// Sizes whose products could not be counted are some other file's, or a broken one's.
inline void hf_check_sizes(HfConfig& c, const Shape& s) {
    size_t widest = std::max({s.C, s.F, s.NH * s.HS});
    bool sane = s.L <= 10000 && widest <= (1u << 20);
    if (!sane && c.wrong.empty())
        c.wrong = c.path + ": " + std::to_string(s.L) + " layers, up to " + std::to_string(widest) +
                  " wide: models of up to 10000 layers and 1048576 channels can be read";
}

// The shape of a parsed config.json, or of what says the same.
inline std::string hf_shape(Shape* shape, HfConfig& c) {
    std::string type = c.has("model_type") && c.j["model_type"].is_string()
                           ? c.j["model_type"].get<std::string>()
                           : "";
    if (type == "gpt2")
        *shape = hf_gpt2_shape(c);
    else if (type == "llama" || type == "mistral" || type == "qwen2")
        *shape = hf_llama_shape(c, type);
    else
        return c.path + ": model_type '" + type +
               "' is not supported: gpt2, llama, mistral and qwen2 are";
    hf_check_sizes(c, *shape);
    return c.wrong;
}

inline std::string hf_read_config(Shape* shape, const std::string& folder) {
    HfConfig c;
    c.path = folder + "/config.json";
    std::ifstream in(c.path);
    if (!in)
        return folder +
               ": has no config.json: a Hugging Face folder holds config.json and *.safetensors";
    c.j = nlohmann::json::parse(in, nullptr, false);
    if (!c.j.is_object()) return c.path + ": is no JSON object";
    return hf_shape(shape, c);
}

// ----------------------------------------------------------------------------
// safetensors -> weights

struct HfFiles {
    std::vector<SafeTensors> files;
    ~HfFiles() {
        for (SafeTensors& f : files) safetensors_close(&f);
    }
};

// One file, or else the shards of an index: a folder with both is read as transformers reads it.
inline std::string hf_open_files(HfFiles* h, const std::string& folder) {
    std::vector<std::string> names;
    std::string index_path = folder + "/model.safetensors.index.json";
    bool one = access((folder + "/model.safetensors").c_str(), F_OK) == 0,
         sharded = !one && access(index_path.c_str(), F_OK) == 0;
    if (!one && !sharded)
        return folder +
               "/model.safetensors: No such file, and no model.safetensors.index.json: weights in "
               "another format must be converted first";
    nlohmann::json index;
    if (sharded) {
        std::ifstream in(index_path);
        index = nlohmann::json::parse(in, nullptr, false);
        if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object())
            return index_path + ": has no weight_map";
        std::set<std::string> unique;
        for (auto& [tensor, file] : index["weight_map"].items()) {
            if (!file.is_string() || file.get<std::string>().find('/') != std::string::npos)
                return index_path + ": " + tensor + " is in no file of this folder";
            unique.insert(file.get<std::string>());
        }
        names.assign(unique.begin(), unique.end());
    } else
        names = {"model.safetensors"};
    std::map<std::string, std::string> seen;
    for (const std::string& name : names) {
        h->files.emplace_back();
        std::string wrong = safetensors_open(&h->files.back(), folder + "/" + name);
        if (!wrong.empty()) return wrong;
        for (const SafeTensor& t : h->files.back().tensors)
            if (!seen.insert({t.name, name}).second)
                return folder + ": tensor " + t.name + " is in " + seen[t.name] + " and again in " +
                       name;
    }
    if (sharded)
        for (auto& [tensor, file] : index["weight_map"].items())
            if (!seen.count(tensor) || seen[tensor] != file.get<std::string>())
                return index_path + ": " + tensor + " is not in " + file.get<std::string>();
    return "";
}

inline const SafeTensor* hf_find(const HfFiles& h, const std::string& name) {
    for (const SafeTensors& f : h.files)
        for (const char* prefix : {"", "transformer."})
            if (const SafeTensor* t = safetensors_find(f, prefix + name)) return t;
    return nullptr;
}

inline std::string shape_text(const std::vector<size_t>& shape) {
    std::string text = "(";
    for (size_t i = 0; i < shape.size(); i++) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + ")";
}

// What a file holds for a parameter: without padding, and turned where Conv1D is.
inline std::vector<size_t> file_shape(const Parameter& p) {
    std::vector<size_t> shape = p.shape;
    shape[0] = p.file_rows;
    if (p.transposed && shape.size() == 2) std::swap(shape[0], shape[1]);
    return shape;
}

inline std::vector<float> turned(const std::vector<float>& x, size_t rows, size_t cols) {
    std::vector<float> y(rows * cols);
    #pragma omp parallel for
    for (size_t c = 0; c < cols; c++)
        for (size_t r = 0; r < rows; r++) y[c * rows + r] = x[r * cols + c];
    return y;
}

inline std::string hf_check_tensor(const SafeTensor* t, const Parameter& p,
                                   const std::string& folder) {
    if (!t) return folder + ": tensor " + p.name + " is missing";
    if (t->shape != file_shape(p))
        return folder + ": tensor " + t->name + " has the shape " + shape_text(t->shape) +
               ", config.json asks for " + shape_text(file_shape(p));
    if (!is_float_dtype(t->dtype))
        return folder + ": tensor " + t->name + " is " + t->dtype +
               "; F32, F16, BF16 and F64 can be read";
    return "";
}

inline std::vector<float> tensor_floats(const SafeTensor& t) {
    std::vector<float> values(t.elements());
    tensor_to_float(values.data(), t, 0, values.size());
    return values;
}

// A parameter as a file has it, [out, in] and without padding.
template <typename T, typename S>
void set_file_weight(Trainer<T, S>& t, const Parameter& p, std::vector<float> values) {
    values.resize(p.elements(), 0.0f);
    set_weight(t, p, values.data());
}

// Tensors that older files carry although they are no parameters.
inline bool hf_ignored(const std::string& name) {
    auto ends = [&](const char* end) {
        return name.size() >= strlen(end) &&
               name.compare(name.size() - strlen(end), strlen(end), end) == 0;
    };
    return ends(".attn.bias") || ends(".attn.masked_bias") || ends("rotary_emb.inv_freq");
}

template <typename T, typename S>
std::string hf_load_weights(Trainer<T, S>& t, const std::string& folder) {
    HfFiles h;
    std::string wrong = hf_open_files(&h, folder);
    if (!wrong.empty()) return wrong;
    std::set<std::string> used;
    if (t.model.shape.tied) used.insert("lm_head.weight");
    for (const Parameter& p : t.model.parameters) {
        const SafeTensor* tensor = hf_find(h, p.name);
        wrong = hf_check_tensor(tensor, p, folder);
        if (!wrong.empty()) return wrong;
        used.insert(tensor->name);
        std::vector<float> values = tensor_floats(*tensor);
        if (p.transposed) values = turned(values, tensor->shape[0], tensor->shape[1]);
        set_file_weight(t, p, values);
    }
    for (const SafeTensors& f : h.files)
        for (const SafeTensor& x : f.tensors)
            if (!used.count(x.name) && !hf_ignored(x.name))
                return folder + ": tensor " + x.name +
                       " belongs to nothing in this model: config.json is another model's";
    return "";
}

// ----------------------------------------------------------------------------
// weights -> a folder

// What an export has besides the weights.
struct ExportTokenizer {
    int bos = -1, eos = -1; // -1: not known
    std::map<std::string, std::string> files = {};
};

// What exports are made of.
inline bool export_file(const std::string& name) {
    for (const char* own : {"config.json", "generation_config.json", "tokenizer.json",
                            "tokenizer.model", "tokenizer_config.json"})
        if (name == own || name == std::string(own) + ".tmp") return true;
    return name.rfind("model", 0) == 0 && name.find(".safetensors") != std::string::npos;
}

// What exports and checkpoints are made of. Nothing else is ever removed, whatever a folder is
// called.
inline bool own_file(const std::string& name) {
    bool rank = name.rfind("rank_", 0) == 0 && name.find(".safetensors") != std::string::npos;
    return export_file(name) || rank || name.rfind("manifest.json", 0) == 0;
}

// "exports/new/" is "exports/new": the folder it is written into stands beside it, never inside.
inline std::string without_slashes(std::string path) {
    while (path.size() > 1 && path.back() == '/') path.pop_back();
    return path;
}

// What config.json can say of a shape; and nothing but an older export may be replaced. Checked when the run starts.
inline std::string hf_export_check(const Shape& s, const std::string& folder) {
    std::string path = without_slashes(folder), parent = folder_of(path);
    if (access(parent.c_str(), W_OK | X_OK) != 0)
        return "--export " + folder + ": cannot be written: " + parent + ": " + strerror(errno);
    struct stat st;
    if (stat(path.c_str(), &st) == 0 && !S_ISDIR(st.st_mode))
        return "--export " + folder + ": is a file, an export is a folder: choose another name";
    if (DIR* d = opendir(folder.c_str())) {
        std::string stranger;
        while (dirent* e = readdir(d)) {
            std::string n = e->d_name;
            if (n != "." && n != ".." && !export_file(n)) stranger = n;
        }
        closedir(d);
        if (!stranger.empty())
            return "--export " + folder + ": holds " + stranger +
                   ", which is no export of ours: choose a new folder";
    }
    if (s.family == Family::GPT2 && s.position != Position::LEARNED)
        return "--export: Hugging Face's GPT-2 has learned positions only: drop --export, or use "
               "--position learned";
    if (s.family == Family::GPT2 && (s.NKV != s.NH || s.NH * s.HS != s.C))
        return "--export: Hugging Face's GPT-2 has as many key/value heads as heads, and heads as "
               "wide as its channels together: drop --export";
    if (s.family == Family::LLAMA && s.qkv_bias != (s.hf_type == "qwen2"))
        return "--export: biases on q, k and v are Qwen2's, always and alone: drop --export";
    if (s.family == Family::LLAMA && s.position != Position::ROPE)
        return "--export: Hugging Face's Llama has RoPE only: drop --export, or use --position "
               "rope";
    return "";
}

// The shortest decimal that reads back as the same float: 1e-05, not 9.999999747378752e-06.
inline double decimal(float x) {
    char text[32];
    for (int digits = 1; digits <= 9; digits++) {
        snprintf(text, sizeof(text), "%.*g", digits, double(x));
        if (strtof(text, nullptr) == x) break;
    }
    return strtod(text, nullptr);
}

// null, where a token is not known: what is left out would be the one of the family's first model
inline nlohmann::ordered_json begin_and_end(const ExportTokenizer& t) {
    nlohmann::ordered_json j = {{"bos_token_id", nullptr}, {"eos_token_id", nullptr}};
    if (t.bos >= 0) j["bos_token_id"] = t.bos;
    if (t.eos >= 0) j["eos_token_id"] = t.eos;
    return j;
}

inline nlohmann::ordered_json hf_config_json(const Shape& s, Type dtype,
                                             const ExportTokenizer& tokenizer) {
    const char* torch_type = dtype == Type::BF16  ? "bfloat16"
                             : dtype == Type::F16 ? "float16"
                                                  : "float32";
    nlohmann::ordered_json j;
    if (s.family == Family::GPT2) {
        j = {{"architectures", {"GPT2LMHeadModel"}},
             {"model_type", "gpt2"},
             {"vocab_size", s.V},
             {"n_positions", s.P},
             {"n_ctx", s.P},
             {"n_embd", s.C},
             {"n_layer", s.L},
             {"n_head", s.NH},
             {"n_inner", s.F},
             {"activation_function", "gelu_new"},
             {"layer_norm_epsilon", decimal(s.norm_eps)}};
    } else {
        const char* architecture = s.hf_type == "qwen2"     ? "Qwen2ForCausalLM"
                                   : s.hf_type == "mistral" ? "MistralForCausalLM"
                                                            : "LlamaForCausalLM";
        j = {{"architectures", {architecture}},
             {"model_type", s.hf_type},
             {"vocab_size", s.V},
             {"max_position_embeddings", s.P},
             {"hidden_size", s.C},
             {"intermediate_size", s.F},
             {"num_hidden_layers", s.L},
             {"num_attention_heads", s.NH},
             {"num_key_value_heads", s.NKV},
             {"head_dim", s.HS},
             {"hidden_act", "silu"},
             {"rms_norm_eps", decimal(s.norm_eps)},
             {"rope_theta", s.rope_theta}};
        if (s.rope_scaling.factor != 1)
            j["rope_scaling"] = {
                {"rope_type", "llama3"},
                {"factor", s.rope_scaling.factor},
                {"low_freq_factor", s.rope_scaling.low_freq_factor},
                {"high_freq_factor", s.rope_scaling.high_freq_factor},
                {"original_max_position_embeddings", s.rope_scaling.original_positions}};
        if (s.sliding_window)
            j["sliding_window"] = s.sliding_window;
        else if (s.hf_type == "mistral")
            j["sliding_window"] = nullptr;
    }
    j["tie_word_embeddings"] = s.tied;
    j["torch_dtype"] = torch_type;
    j.update(begin_and_end(tokenizer));
    return j;
}

inline void remove_folder(
    const std::string& folder) { // our files in it, and itself when nothing is left
    if (DIR* d = opendir(folder.c_str())) {
        while (dirent* e = readdir(d))
            if (own_file(e->d_name)) unlink((folder + "/" + e->d_name).c_str());
        closedir(d);
        rmdir(folder.c_str());
    }
}

// Put a whole new folder in the place of an old one or of nothing: at every moment one of the two is there.
inline std::string replace_folder(const std::string& fresh, const std::string& folder) {
    bool old = access(folder.c_str(), F_OK) == 0;
    bool good = renameat2(AT_FDCWD, fresh.c_str(), AT_FDCWD, folder.c_str(),
                          old ? RENAME_EXCHANGE : 0) == 0;
    if (!good && old &&
        (errno == EINVAL || errno == ENOSYS)) { // a file system that cannot exchange two names
        std::string aside = folder + ".old";
        if (rename(folder.c_str(), aside.c_str()) == 0) {
            good = rename(fresh.c_str(), folder.c_str()) == 0;
            rename(aside.c_str(), good ? fresh.c_str() : folder.c_str());
        }
    }
    if (!good) return folder + ": cannot be renamed: " + strerror(errno);
    std::string wrong = sync_folder(folder_of(folder));
    if (old) remove_folder(fresh);
    return wrong;
}

// GPT2LMHeadModel keeps its body under "transformer.", its head beside it.
inline std::string export_name(const Parameter& p, const Shape& s) {
    return s.family == Family::GPT2 && p.name != "lm_head.weight" ? "transformer." + p.name
                                                                  : p.name;
}

template <typename T, typename S>
std::string write_export_file(const Trainer<T, S>& t, const std::string& path, size_t first,
                              size_t last, Type dtype) {
    std::vector<TensorSpec> specs;
    for (size_t i = first; i < last; i++)
        specs.push_back({export_name(t.model.parameters[i], t.model.shape), dtype,
                         file_shape(t.model.parameters[i])});
    FileWriter w;
    writer_open(&w, path, specs, {{"format", "pt"}});
    for (size_t i = first; i < last && w.wrong.empty(); i++) {
        const Parameter& p = t.model.parameters[i];
        std::vector<float> values = get_weight(t, p);
        values.resize(p.file_elements());
        if (p.transposed) values = turned(values, p.rows(), p.cols());
        writer_put(w, values, dtype);
    }
    return writer_close(&w);
}

template <typename T, typename S>
std::string write_export(const Trainer<T, S>& t, const std::string& folder, Type dtype,
                         size_t shard_bytes, const ExportTokenizer& tokenizer) {
    const std::vector<Parameter>& table = t.model.parameters;
    std::vector<size_t> starts = {0}; // the first parameter of each file
    size_t bytes = 0, total = 0;
    for (size_t i = 0; i < table.size(); i++) {
        size_t own = table[i].file_elements() * type_bytes(dtype);
        if (bytes && bytes + own > shard_bytes) starts.push_back(i), bytes = 0;
        bytes += own, total += own;
    }
    nlohmann::ordered_json map;
    for (size_t f = 0; f < starts.size(); f++) {
        char name[64] = "model.safetensors";
        if (starts.size() > 1)
            snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", f + 1, starts.size());
        size_t last = f + 1 < starts.size() ? starts[f + 1] : table.size();
        std::string wrong = write_export_file(t, folder + "/" + name, starts[f], last, dtype);
        if (!wrong.empty()) return wrong;
        for (size_t i = starts[f]; i < last; i++) map[export_name(table[i], t.model.shape)] = name;
    }
    std::string wrong;
    if (starts.size() > 1)
        wrong = write_text_file(
            folder + "/model.safetensors.index.json",
            nlohmann::ordered_json{{"metadata", {{"total_size", total}}}, {"weight_map", map}}.dump(
                2));
    std::map<std::string, std::string> files = tokenizer.files;
    files["config.json"] = hf_config_json(t.model.shape, dtype, tokenizer).dump(2) + "\n";
    if (tokenizer.eos >= 0)
        files["generation_config.json"] = begin_and_end(tokenizer).dump(2) + "\n";
    for (const auto& [name, bytes] : files)
        if (wrong.empty()) wrong = write_text_file(folder + "/" + name, bytes);
    return wrong.empty() ? sync_folder(folder) : wrong;
}

template <typename T, typename S>
std::string hf_export(const Trainer<T, S>& t, const std::string& folder, Type dtype,
                      size_t shard_bytes = size_t(5) << 30, const ExportTokenizer& tokenizer = {}) {
    if (t.comms.world.rank > 0) { // the first rank writes
        for (const Parameter& p : t.model.parameters) get_weight(t, p);
        return "";
    }
    std::string path = without_slashes(folder), temporary = path + ".exporting";
    remove_folder(temporary);
    if (mkdir(temporary.c_str(), 0777) != 0)
        return "--export " + folder + ": " + temporary + ": cannot be made: " + strerror(errno);
    std::string wrong = write_export(t, temporary, dtype, shard_bytes, tokenizer);
    if (wrong.empty()) wrong = replace_folder(temporary, path);
    if (!wrong.empty()) remove_folder(temporary);
    return wrong;
}
