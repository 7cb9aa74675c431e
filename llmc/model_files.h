// model_files.h - models in one file: llm.c's and llama2.c's .bin - github.com/karpathy
//   Which kind it is stands in the file, numbers are little-endian:
//     llm.c, GPT-2     256 int32: 20240326, version, positions, V, L, NH, C, Vp; the tensors:
//                      version 3 float, 5 bf16; the token table has Vp rows, V of them in use
//     llm.c, Llama 3   256 int32: 20240803, version 3 or 5, positions, V, L, NH, NKV, C,
//                      multiple of, scaled RoPE, 3, 0 or 1; 256 floats: ffn factor, eps, theta
//     llama2.c         "24ka", version 1, then what the older form begins with, whether the head is
//                      tied; zeros up to 256 bytes; float tensors
//     llama2.c, older  7 int32: C, F, L, NH, NKV, V (below zero: the head is not tied), positions;
//                      float tensors, with two tables of RoPE. It has no mark of its own: a file is
//                      one where its size is exactly what these numbers ask for
//   A header becomes what Hugging Face's config.json would say, and is checked as that. Tensors of
//   one name lie together, layer after layer. All are [out, in]: nothing is turned, as Hugging
//   Face's Conv1D is. Both projects' RoPE turns neighbours (2i, 2i+1) where Hugging Face's turns
//   (i, i + HS/2): the rows of q and k are put in its order.
//   Written is llm.c's GPT-2, whole or not at all.
//   Every function returns "" or one line that says what is wrong.
#pragma once
#include <sstream>
#include "huggingface.h"

struct ModelFile {
    SafeTensors file; // tensors by their Hugging Face names
    Shape shape;
    bool neighbours = false; // RoPE turns (2i, 2i+1)
};

// What a header says.
struct ModelHeader {
    HfConfig config;
    std::string dtype = "F32";
    size_t bytes = 0; // of the header
    const char* order = nullptr;
    size_t skipped = 0; // elements that are no parameter's
};

// Tensors in a file's order. A name that the model has in layers stands for all of them, one after
// another; names with commas lie together in each layer; - is what is no parameter.
constexpr const char *LLMC_GPT2_ORDER =
                         "wte.weight - wpe.weight ln_1.weight ln_1.bias attn.c_attn.weight "
                         "attn.c_attn.bias attn.c_proj.weight attn.c_proj.bias ln_2.weight "
                         "ln_2.bias mlp.c_fc.weight mlp.c_fc.bias mlp.c_proj.weight "
                         "mlp.c_proj.bias ln_f.weight ln_f.bias",
                     *LLMC_LLAMA_ORDER =
                         "model.embed_tokens.weight input_layernorm.weight "
                         "self_attn.q_proj.weight,self_attn.k_proj.weight,self_attn.v_proj.weight "
                         "self_attn.o_proj.weight post_attention_layernorm.weight "
                         "mlp.up_proj.weight mlp.gate_proj.weight mlp.down_proj.weight "
                         "model.norm.weight lm_head.weight",
                     *LLAMA2C_OLD_ORDER =
                         "model.embed_tokens.weight input_layernorm.weight "
                         "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight "
                         "self_attn.o_proj.weight post_attention_layernorm.weight "
                         "mlp.gate_proj.weight mlp.down_proj.weight mlp.up_proj.weight "
                         "model.norm.weight - lm_head.weight",
                     *LLAMA2C_ORDER =
                         "input_layernorm.weight post_attention_layernorm.weight model.norm.weight "
                         "model.embed_tokens.weight "
                         "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight "
                         "self_attn.o_proj.weight mlp.gate_proj.weight mlp.down_proj.weight "
                         "mlp.up_proj.weight lm_head.weight";

// ----------------------------------------------------------------------------
// headers

template <typename A> A word_at(const SafeTensors& f, size_t i) { // 0 beyond the end
    A word = 0;
    if ((i + 1) * sizeof(A) <= f.bytes)
        memcpy(&word, static_cast<const char*>(f.map) + i * sizeof(A), sizeof(A));
    return word;
}

inline nlohmann::json number_at(const SafeTensors& f, size_t i) { // as a JSON file would have it
    int32_t word = word_at<int32_t>(f, i);
    return word < 0 ? nlohmann::json(word) : nlohmann::json(uint64_t(word));
}

// The type of an llm.c file's tensors, by its version.
inline std::string read_llmc_version(ModelHeader* h, const SafeTensors& f) {
    int version = word_at<int32_t>(f, 1);
    h->dtype = version == 5 ? "BF16" : "F32";
    if (version == 3 || version == 5) return "";
    return f.path + ": is of version " + std::to_string(version) +
           " of llm.c's model files; 3 (float) and 5 (bf16) can be read: write it again with a "
           "newer llm.c";
}

inline std::string read_llmc_gpt2(ModelHeader* h, const SafeTensors& f) {
    h->order = LLMC_GPT2_ORDER, h->bytes = 256 * 4;
    h->config.j = {{"model_type", "gpt2"},          {"n_positions", number_at(f, 2)},
                   {"vocab_size", number_at(f, 3)}, {"n_layer", number_at(f, 4)},
                   {"n_head", number_at(f, 5)},     {"n_embd", number_at(f, 6)}};
    int64_t V = word_at<int32_t>(f, 3), C = word_at<int32_t>(f, 6), Vp = word_at<int32_t>(f, 7);
    h->skipped = size_t(Vp - V) * size_t(C);
    std::string wrong = read_llmc_version(h, f);
    return !wrong.empty() || Vp >= V ? wrong
                                     : f.path + ": has a token table of " + std::to_string(Vp) +
                                           " rows for a vocabulary of " + std::to_string(V) +
                                           ": write it again with a newer llm.c";
}

inline std::string read_llmc_llama(ModelHeader* h, const SafeTensors& f) {
    double C = word_at<int32_t>(f, 7), multiple = word_at<int32_t>(f, 8);
    double factor = decimal(word_at<float>(f, 256));
    // 2/3 of 4 C, times the factor, each cut to a whole number, up to the next multiple
    double ffn = multiple * std::ceil(std::floor(factor * std::floor(8 * C / 3)) / multiple);
    h->order = LLMC_LLAMA_ORDER, h->bytes = 2 * 256 * 4;
    h->config.j = {{"model_type", "llama"},
                   {"max_position_embeddings", number_at(f, 2)},
                   {"vocab_size", number_at(f, 3)},
                   {"num_hidden_layers", number_at(f, 4)},
                   {"num_attention_heads", number_at(f, 5)},
                   {"num_key_value_heads", number_at(f, 6)},
                   {"hidden_size", number_at(f, 7)},
                   {"intermediate_size", uint64_t(ffn >= 1 && ffn < 0x1p31 ? ffn : 0)},
                   {"rms_norm_eps", decimal(word_at<float>(f, 257))},
                   {"rope_theta", decimal(word_at<float>(f, 258))}};
    if (word_at<int32_t>(f, 9)) h->config.j["rope_scaling"] = {{"rope_type", "llama3"}};
    return read_llmc_version(h, f);
}

// Of both of llama2.c's forms: seven numbers from word `at` on.
inline void read_llama2c_numbers(ModelHeader* h, const SafeTensors& f, size_t at) {
    int64_t V = word_at<int32_t>(f, at + 5);
    h->config.j = {{"model_type", "llama"},
                   {"hidden_size", number_at(f, at)},
                   {"intermediate_size", number_at(f, at + 1)},
                   {"num_hidden_layers", number_at(f, at + 2)},
                   {"num_attention_heads", number_at(f, at + 3)},
                   {"num_key_value_heads", number_at(f, at + 4)},
                   {"vocab_size", uint64_t(std::abs(V))},
                   {"max_position_embeddings", number_at(f, at + 6)},
                   {"rms_norm_eps", 1e-5},
                   {"tie_word_embeddings", V > 0}};
}

inline std::string read_llama2c(ModelHeader* h, const SafeTensors& f) {
    int version = word_at<int32_t>(f, 1);
    read_llama2c_numbers(h, f, 2);
    h->order = LLAMA2C_ORDER, h->bytes = 256;
    h->config.j["tie_word_embeddings"] = word_at<unsigned char>(f, 36) != 0;
    if (version == 1) return "";
    return f.path + ": is of version " + std::to_string(version) + " of llama2.c's model files" +
           (version == 2 ? " (int8)" : "") +
           "; 1 and the older form without a version can be read: export it again with --version 1";
}

inline std::string read_llama2c_old(ModelHeader* h, const SafeTensors& f) {
    read_llama2c_numbers(h, f, 0);
    h->order = LLAMA2C_OLD_ORDER, h->bytes = 7 * 4;
    int64_t C = word_at<int32_t>(f, 0), NH = word_at<int32_t>(f, 3), P = word_at<int32_t>(f, 6);
    if (NH > 0) h->skipped = size_t(P) * size_t(C / NH / 2 * 2); // cosines and sines
    return "";
}

// ----------------------------------------------------------------------------
// tensors

// f(parameter), in a file's order; f(null) for what is no parameter
template <typename F> void for_each_in_order(const Model& model, const char* order, F f) {
    std::map<std::string, const Parameter*> table;
    for (const Parameter& p : model.parameters) table[p.name] = &p;
    std::string block = model.shape.family == Family::GPT2 ? "h." : "model.layers.", names, name;
    for (std::istringstream words(order); words >> names;) {
        if (names == "-" || table.count(names)) {
            f(names == "-" ? nullptr : table[names]);
            continue;
        }
        for (size_t l = 0; l < model.shape.L; l++)
            for (std::istringstream together(names); std::getline(together, name, ',');) {
                auto found = table.find(block + std::to_string(l) + "." + name);
                if (found != table.end()) f(found->second); // none: a head that is the token table
            }
    }
}

// Where each of the model's tensors lies; the size that the file must have comes back.
inline size_t place_tensors(ModelFile* m, const ModelHeader& h) {
    const unsigned char* begin = static_cast<const unsigned char*>(m->file.map);
    size_t width = dtype_bytes(h.dtype), at = h.bytes;
    for_each_in_order(make_model(m->shape), h.order, [&](const Parameter* p) {
        if (!p) return void(at += h.skipped * width);
        SafeTensor t;
        t.name = p->name, t.dtype = h.dtype, t.shape = p->shape, t.shape[0] = p->file_rows;
        t.bytes = t.elements() * width;
        if (at <= m->file.bytes) t.data = begin + at;
        m->file.tensors.push_back(t);
        at += t.bytes;
    });
    std::sort(m->file.tensors.begin(), m->file.tensors.end(),
              [](const SafeTensor& a, const SafeTensor& b) { return a.name < b.name; });
    return at;
}

inline std::string read_model_file(ModelFile* m) {
    const SafeTensors& f = m->file;
    ModelHeader h;
    h.config.path = f.path;
    int32_t mark = word_at<int32_t>(f, 0);
    bool marked = mark == 20240326 || mark == 20240803 || mark == 0x616b3432;
    std::string wrong = mark == 20240326     ? read_llmc_gpt2(&h, f)
                        : mark == 20240803   ? read_llmc_llama(&h, f)
                        : mark == 0x616b3432 ? read_llama2c(&h, f)
                                             : read_llama2c_old(&h, f);
    if (!wrong.empty()) return wrong;
    wrong = hf_shape(&m->shape, h.config);
    size_t size = wrong.empty() ? place_tensors(m, h) : 0;
    m->neighbours = mark != 20240326;
    if (!marked && size != f.bytes)
        return f.path + ": is no model file: it begins with " + std::to_string(mark) +
               ", not with 20240326 or 20240803 (llm.c) or ak42 (llama2.c), and " +
               (size ? "as llama2.c's older form its numbers ask for " + std::to_string(size) +
                           " bytes, it has " + std::to_string(f.bytes)
                     : "its numbers are no model's of llama2.c's older form") +
               "; of a Hugging Face model give the folder";
    if (wrong.empty() && size != f.bytes)
        wrong = f.path + ": is " + std::to_string(f.bytes) + " bytes long, its header asks for " +
                std::to_string(size) + ": get it again";
    return wrong;
}

inline void model_file_close(ModelFile* m) { safetensors_close(&m->file); }

inline std::string model_file_open(ModelFile* m, const std::string& path) {
    *m = {};
    std::string wrong = map_file(&m->file, path);
    if (wrong.empty() && !(wrong = read_model_file(m)).empty()) model_file_close(m);
    return wrong;
}

inline std::string model_file_shape(Shape* shape, const std::string& path) {
    ModelFile m;
    std::string wrong = model_file_open(&m, path);
    *shape = m.shape;
    return model_file_close(&m), wrong;
}

// Rows (2i, 2i+1) of each head become (i, i + HS/2).
inline std::vector<float> in_halves(const std::vector<float>& x, size_t HS, size_t C) {
    std::vector<float> y(x.size());
    for (size_t row = 0; row < x.size() / C; row++) {
        size_t e = row % HS, to = row - e + e / 2 + e % 2 * (HS / 2);
        std::copy_n(&x[row * C], C, &y[to * C]);
    }
    return y;
}

template <typename T, typename S>
std::string model_file_load(Trainer<T, S>& t, const std::string& path) {
    ModelFile m;
    std::string wrong = model_file_open(&m, path);
    if (!wrong.empty()) return wrong;
    for (const Parameter& p : t.model.parameters) {
        const SafeTensor* tensor = safetensors_find(m.file, p.name);
        CHECK(tensor, "%s has no %s", path.c_str(), p.name.c_str());
        bool turns = p.name.ends_with("q_proj.weight") || p.name.ends_with("k_proj.weight");
        std::vector<float> values = tensor_floats(*tensor);
        if (m.neighbours && turns) values = in_halves(values, m.shape.HS, p.cols());
        set_file_weight(t, p, values);
    }
    return model_file_close(&m), "";
}

// ----------------------------------------------------------------------------
// writing

// Checked when the run starts.
inline std::string model_file_check(const Shape& s, const std::string& path, Type dtype) {
    bool like_gpt2 = s.family == Family::GPT2 && s.position == Position::LEARNED && s.tied &&
                     s.NKV == s.NH && s.NH * s.HS == s.C && s.F == 4 * s.C && s.norm_eps == 1e-5f;
    struct stat st;
    if (access(folder_of(path).c_str(), W_OK | X_OK) != 0)
        return "--export " + path + ": cannot be written: " + folder_of(path) + ": " +
               strerror(errno);
    if (stat(path.c_str(), &st) == 0 && !S_ISREG(st.st_mode))
        return "--export " + path + ": is no file: choose another name";
    if (!like_gpt2)
        return "--export " + path +
               ": llm.c's file is of a GPT-2 as it was published (learned positions, a tied head, "
               "ffn of four times the channels): export into a folder";
    if (dtype == Type::F16)
        return "--export " + path + ": llm.c's files are float or bf16: --export-dtype bf16";
    return "";
}

template <typename T, typename S>
std::string model_file_export(const Trainer<T, S>& t, const std::string& path, Type dtype) {
    const Shape& s = t.model.shape;
    FileWriter w;
    bool writes = t.comms.world.rank <= 0;                      // the first rank
    size_t Vp = round_up(s.V, 128), skipped = (Vp - s.V) * s.C; // whatever the layout's padding
    std::vector<size_t> header = {20240326, dtype == Type::BF16 ? 5u : 3u, s.P, s.V, s.L, s.NH, s.C,
                                  Vp};
    std::vector<int32_t> words(header.begin(), header.end());
    words.resize(256);
    if (writes) {
        size_t elements = parameter_count(t.model) + skipped;
        writer_create(&w, path);
        w.expected = words.size() * 4 + elements * type_bytes(dtype);
        writer_put(w, words.data(), words.size() * 4);
    }
    for_each_in_order(t.model, LLMC_GPT2_ORDER, [&](const Parameter* p) {
        std::vector<float> values = p ? get_weight(t, *p) : std::vector<float>();
        if (!writes) return;
        values.resize(p ? p->file_elements() : skipped);
        writer_put(w, values, dtype);
    });
    return writes ? writer_close(&w) : "";
}
