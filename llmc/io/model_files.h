// model_files.h - models in one file: llm.c's and llama2.c's .bin - github.com/karpathy
//   The file's first word says which kind it is. Numbers are little-endian:
//     llm.c, GPT-2     256 int32: 20240326, version, positions, V, L, NH, C, Vp; then the tensors:
//                      version 3 float, 5 bf16; the token table has Vp rows, V of them in use
//     llm.c, Llama 3   256 int32: 20240803, version 3 or 5, positions, V, L, NH, NKV, C, the number
//                      that divides F, whether RoPE is scaled, Llama's version (3, then 0 or 1);
//                      256 floats: a factor of F, eps, theta
//     llama2.c         "24ka", version 1, then the numbers of the older form, whether the head is
//                      tied; zeros up to 256 bytes; float tensors
//     llama2.c, older  7 int32: C, F, L, NH, NKV, V (below zero: the head is not tied), positions;
//                      float tensors, with two tables of RoPE. It has no mark of its own: a file
//                      has this form if its size is exactly what these numbers need
//   Reading  A header is translated to Hugging Face's config.json, and checked like one. Tensors of
//            one name lie together, layer after layer. All are [out, in], so nothing is transposed.
//            Both projects' RoPE turns neighbours (2i, 2i+1), Hugging Face's turns (i, i + HS/2):
//            the rows of q and k are reordered.
//   Writing  llm.c's GPT-2, completely or not at all.
//   Every function that returns a text returns "" or one line that says what is wrong.
#pragma once
#include <sstream>
#include "../family.h"
#include "../model.h"
#include "../ops/element_type.h"
#include "../ops/types.h"
#include "../optimizer.h"
#include "../parameters.h"
#include "../comm/text.h"
#include "../trainer.h"
#include "files.h"
#include "hf_config.h"
#include "hf_files.h"
#include "hf_places.h"
#include "huggingface.h"
#include "one_reader.h"
#include "safetensors.h"
#include "tensor_source.h"

namespace llmc {

// The first words of the files, which tell their formats.
constexpr int32_t LLMC_GPT2_MARK = 20240326, LLMC_LLAMA_MARK = 20240803, LLAMA2C_MARK = 0x616b3432;

// A mapped file. Once opened, it looks like a safetensors file.
struct ModelFile {
    SafeTensors file; // tensors by their Hugging Face names
    Shape shape;
};

// A header, translated to the keys of config.json. All formats go through hf_shape(), so a broken
// number is refused in one place.
struct ModelHeader {
    HfConfig config;
    std::string dtype = "F32";
    const char* order = nullptr; // order of the tensors, see below
    size_t bytes = 0;            // size of the header
    size_t skipped = 0;          // elements that belong to no parameter
};

// The tensors in the order of a file. A name that the model has in every layer stands for all of
// them, layer by layer. Names joined by commas lie together in each layer. A - stands for bytes
// that are no parameter.

// clang-format off
constexpr const char* LLMC_GPT2_ORDER =
    "wte.weight - wpe.weight "
    "ln_1.weight ln_1.bias attn.c_attn.weight attn.c_attn.bias attn.c_proj.weight attn.c_proj.bias "
    "ln_2.weight ln_2.bias mlp.c_fc.weight mlp.c_fc.bias mlp.c_proj.weight mlp.c_proj.bias "
    "ln_f.weight ln_f.bias";

constexpr const char* LLMC_LLAMA_ORDER =
    "model.embed_tokens.weight "
    "input_layernorm.weight "
    "self_attn.q_proj.weight,self_attn.k_proj.weight,self_attn.v_proj.weight "
    "self_attn.o_proj.weight "
    "post_attention_layernorm.weight "
    "mlp.up_proj.weight mlp.gate_proj.weight mlp.down_proj.weight "
    "model.norm.weight lm_head.weight";

constexpr const char* LLAMA2C_OLD_ORDER =
    "model.embed_tokens.weight "
    "input_layernorm.weight "
    "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight "
    "self_attn.o_proj.weight "
    "post_attention_layernorm.weight "
    "mlp.gate_proj.weight mlp.down_proj.weight mlp.up_proj.weight "
    "model.norm.weight - lm_head.weight";

constexpr const char* LLAMA2C_ORDER =
    "input_layernorm.weight post_attention_layernorm.weight model.norm.weight "
    "model.embed_tokens.weight "
    "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight "
    "self_attn.o_proj.weight "
    "mlp.gate_proj.weight mlp.down_proj.weight mlp.up_proj.weight "
    "lm_head.weight";
// clang-format on

// ----------------------------------------------------------------------------
// headers

// Word i of a file, or 0 beyond its end.
template <typename A>
A word_at(const SafeTensors& f, size_t i) {
    A word = 0;
    // A file may be shorter than its header; its size is checked once the shape is known.
    if ((i + 1) * sizeof(A) <= f.bytes)
        memcpy(&word, static_cast<const char*>(f.map) + i * sizeof(A), sizeof(A));
    return word;
}

// A number as JSON would have it: unsigned if it is not negative, which hf_size() asks for.
inline Json number_at(const SafeTensors& f, size_t i) {
    int32_t word = word_at<int32_t>(f, i);
    return word < 0 ? Json(word) : Json(uint64_t(word));
}

// Read the element type of an llm.c file, which its version determines.
inline std::string read_llmc_version(ModelHeader* h, const SafeTensors& f) {
    // Refuse other versions: their headers have other words.
    int version = word_at<int32_t>(f, 1);
    h->dtype = version == 5 ? "BF16" : "F32";
    if (version == 3 || version == 5) return "";
    return concat(f.path, ": is of version ", version,
                  " of llm.c's model files; 3 (float) and 5 (bf16) can be read: write it again "
                  "with a newer llm.c");
}

// Read the header of llm.c's GPT-2: 256 words.
inline std::string read_llmc_gpt2(ModelHeader* h, const SafeTensors& f) {
    h->order = LLMC_GPT2_ORDER;
    h->bytes = 256 * 4;
    // clang-format off
    h->config.j = {
        {"model_type",  "gpt2"},
        {"n_positions", number_at(f, 2)},
        {"vocab_size",  number_at(f, 3)},
        {"n_layer",     number_at(f, 4)},
        {"n_head",      number_at(f, 5)},
        {"n_embd",      number_at(f, 6)},
    };
    // clang-format on

    // The token table ends with Vp - V rows of padding.
    int64_t V = word_at<int32_t>(f, 3);
    int64_t C = word_at<int32_t>(f, 6);
    int64_t Vp = word_at<int32_t>(f, 7);
    h->skipped = size_t(Vp - V) * size_t(C);
    std::string wrong = read_llmc_version(h, f);
    if (!wrong.empty() || Vp >= V)
        return wrong;
    return concat(f.path, ": has a token table of ", Vp, " rows for a vocabulary of ", V,
                  ": write it again with a newer llm.c");
}

// Read the header of llm.c's Llama 3: 256 words, then 256 floats.
inline std::string read_llmc_llama(ModelHeader* h, const SafeTensors& f) {
    // Compute the ffn: 2/3 of 4 C, times a factor, both rounded down, then up to the next multiple.
    double C = word_at<int32_t>(f, 7);
    double multiple = word_at<int32_t>(f, 8);
    double factor = decimal(word_at<float>(f, 256));
    double ffn = multiple * std::ceil(std::floor(factor * std::floor(8 * C / 3)) / multiple);

    h->order = LLMC_LLAMA_ORDER;
    h->bytes = 2 * 256 * 4;
    // clang-format off
    h->config.j = {
        {"model_type",              "llama"},
        {"max_position_embeddings", number_at(f, 2)},
        {"vocab_size",              number_at(f, 3)},
        {"num_hidden_layers",       number_at(f, 4)},
        {"num_attention_heads",     number_at(f, 5)},
        {"num_key_value_heads",     number_at(f, 6)},
        {"hidden_size",             number_at(f, 7)},
        {"intermediate_size",       uint64_t(ffn >= 1 && ffn < 0x1p31 ? ffn : 0)},
        {"rms_norm_eps",            decimal(word_at<float>(f, 257))},
        {"rope_theta",              decimal(word_at<float>(f, 258))},
    };
    // clang-format on

    // Llama 3.1 scales RoPE.
    if (word_at<int32_t>(f, 9))
        h->config.j["rope_scaling"] = {{"rope_type", "llama3"},
                                       {"original_max_position_embeddings", 8192}};
    return read_llmc_version(h, f);
}

// Read the seven numbers that both forms of llama2.c have, from word `at` on.
inline void read_llama2c_numbers(ModelHeader* h, const SafeTensors& f, size_t at) {
    // A negative vocabulary means that the head has a table of its own.
    int64_t V = word_at<int32_t>(f, at + 5);
    // clang-format off
    h->config.j = {
        {"model_type",              "llama"},
        {"hidden_size",             number_at(f, at)},
        {"intermediate_size",       number_at(f, at + 1)},
        {"num_hidden_layers",       number_at(f, at + 2)},
        {"num_attention_heads",     number_at(f, at + 3)},
        {"num_key_value_heads",     number_at(f, at + 4)},
        {"vocab_size",              uint64_t(std::abs(V))},
        {"max_position_embeddings", number_at(f, at + 6)},
        {"rms_norm_eps",            1e-5},
        {"tie_word_embeddings",     V > 0},
    };
    // clang-format on
}

// Read the header of llama2.c's version 1. Its files have no tables of RoPE.
inline std::string read_llama2c(ModelHeader* h, const SafeTensors& f) {
    int version = word_at<int32_t>(f, 1);
    read_llama2c_numbers(h, f, 2);
    h->order = LLAMA2C_ORDER;
    h->bytes = 256;
    h->config.j["tie_word_embeddings"] = word_at<unsigned char>(f, 36) != 0;
    if (version == 1) return "";
    return concat(f.path, ": is of version ", version, " of llama2.c's model files",
                  version == 2 ? " (int8)" : "",
                  "; 1 and the older form without a version can be read: export it again with "
                  "--version 1");
}

// Read the header of llama2.c's older form. Its two tables of RoPE stand before the head.
inline std::string read_llama2c_old(ModelHeader* h, const SafeTensors& f) {
    read_llama2c_numbers(h, f, 0);
    h->order = LLAMA2C_OLD_ORDER;
    h->bytes = 7 * 4;
    int64_t C = word_at<int32_t>(f, 0);
    int64_t NH = word_at<int32_t>(f, 3);
    int64_t P = word_at<int32_t>(f, 6);
    if (NH > 0) h->skipped = size_t(P) * size_t(C / NH / 2 * 2); // cosines and sines
    return "";
}

// ----------------------------------------------------------------------------
// tensors

// Call f(parameter) for each parameter in a file's order, and f(null) for bytes of no parameter.
template <typename F>
void for_each_in_order(const Model& model, const char* order, F f) {
    std::map<std::string, const Parameter*> table; // [name]
    for (const Parameter& p : model.parameters)
        table[p.name] = &p;
    std::string block; // "h."
    with_family(model.shape.family, [&](auto family) { block = family.block_prefix; });

    // Walk over the names; a name in layers stands for one parameter in each.
    std::string names;
    for (std::istringstream words(order); words >> names;) {
        if (names == "-" || table.count(names)) {
            f(names == "-" ? nullptr : table[names]);
            continue;
        }
        // A name that no layer has is lm_head of a tied model: skip it.
        for (size_t l = 0; l < model.shape.L; l++)
            for (const std::string& name : texts_between_commas(names)) {
                auto found = table.find(concat(block, l, ".", name));
                if (found != table.end())
                    f(found->second);
            }
    }
}

// Place each of the model's tensors in the file. Returns the size that the file must have. A tensor
// that begins beyond the file's end has null data.
inline size_t place_tensors(ModelFile* m, const ModelHeader& h) {
    const unsigned char* begin = static_cast<const unsigned char*>(m->file.map);
    // Lay the tensors one after the other: the file has no table of them.
    size_t width = dtype_bytes(h.dtype);
    size_t at = h.bytes;
    for_each_in_order(make_model(m->shape), h.order, [&](const Parameter* p) {
        if (!p) {
            at += h.skipped * width;
            return;
        }

        // Place a parameter, without the layout's padding of the vocabulary.
        SafeTensor t;
        t.name = p->name;
        t.dtype = h.dtype;
        t.shape = p->shape;
        t.shape[0] = p->file_rows;
        t.bytes = t.elements() * width;
        if (at <= m->file.bytes)
            t.data = begin + at;
        m->file.tensors.push_back(t);
        at += t.bytes;
    });

    // Sort by name: safetensors_find() searches by halves.
    std::ranges::sort(m->file.tensors, {}, &SafeTensor::name);
    return at;
}

// Read a mapped file's header, and place its tensors.
inline std::string read_model_file(ModelFile* m) {
    // Choose the format by the first word.
    const SafeTensors& f = m->file;
    ModelHeader h;
    h.config.path = f.path;
    int32_t mark = word_at<int32_t>(f, 0);
    bool marked = mark == LLMC_GPT2_MARK || mark == LLMC_LLAMA_MARK || mark == LLAMA2C_MARK;
    LLMC_TRY(mark == LLMC_GPT2_MARK    ? read_llmc_gpt2(&h, f)
             : mark == LLMC_LLAMA_MARK ? read_llmc_llama(&h, f)
             : mark == LLAMA2C_MARK    ? read_llama2c(&h, f)
                                       : read_llama2c_old(&h, f));

    // Without a mark, only the exact size tells that it is a model file.
    std::string wrong = hf_shape(&m->shape, h.config);
    size_t size = wrong.empty() ? place_tensors(m, h) : 0;
    if (!marked && size != f.bytes) {
        std::string why = size ? concat("as llama2.c's older form its numbers ask for ", size,
                                        " bytes, it has ", f.bytes)
                               : "its numbers are no model's of llama2.c's older form";
        return concat(f.path, ": is no model file: it begins with ", mark,
                      ", not with 20240326 or 20240803 (llm.c) or ak42 (llama2.c), and ", why,
                      "; of a Hugging Face model give the folder");
    }
    if (wrong.empty() && size != f.bytes)
        wrong = concat(f.path, ": is ", f.bytes, " bytes long, its header asks for ", size,
                       ": get it again");
    return wrong;
}

// Unmap the file.
inline void model_file_close(ModelFile* m) { safetensors_close(&m->file); }

// Map a file and place its tensors. After an error nothing is open.
inline std::string model_file_open(ModelFile* m, const std::string& path) {
    *m = {};
    LLMC_TRY(map_file(&m->file, path));
    std::string wrong = read_model_file(m);
    if (!wrong.empty()) model_file_close(m);
    return wrong;
}

// Read only the shape, which decides what is allocated. Opening maps the file and reads its header,
// so this costs next to nothing.
inline std::string model_file_shape(Shape* shape, const std::string& path) {
    ModelFile m;
    std::string wrong = model_file_open(&m, path);
    *shape = m.shape;
    model_file_close(&m);
    return wrong;
}

// Load all weights of a file. The first rank reads each tensor once, and sends it to the stages
// that need it. All ranks call, and see the same error. *bytes: tensor bytes that this rank read.
template <typename T, typename S>
std::string model_file_load(Trainer<T, S>& t, const std::string& path, size_t* bytes = nullptr) {
    // Open the file on the first rank; the others see its header.
    HfFiles h;
    h.reader = make_one_reader(t.comms.world, t.layout);
    ModelFile m;
    bool opens = t.comms.world.rank <= 0;
    LLMC_TRY(first_error(t.comms.world, opens ? model_file_open(&m, path) : ""));
    h.files = {m.file}; // which closes it
    share_headers(&h, {path});

    // Bring one parameter after the other.
    TensorSource source;
    source.read = [&](const Parameter& p, Stored, SourceValues* to) {
        const SafeTensor* tensor = safetensors_find(h.files[0], p.name);
        LLMC_CHECK(tensor, "%s has no %s", path.c_str(), p.name.c_str());
        auto needs = stages_with(t.layout, t.model, p.bucket);
        to->floats = bring_floats(h, *tensor, 0, tensor->elements(), needs);

        // Reorder a Llama's queries and keys, which RoPE turns; values keep their order.
        if (p.name.ends_with("q_proj.weight") || p.name.ends_with("k_proj.weight"))
            to->floats = reorder_rotary(to->floats, t.model.shape.HS, p.cols(), true);
        return std::string();
    };
    std::string wrong = load_parameters(t, source, t.model.parameters);
    if (bytes) *bytes = h.reader.bytes;
    return first_error(t.comms.world, h.ruined);
}

// ----------------------------------------------------------------------------
// writing

// Check at the start of a run that the path can be written, and that llm.c's GPT-2 has this shape.
inline std::string model_file_check(const Shape& s, const std::string& path, Type dtype) {
    LLMC_TRY(check_export_file(path));

    // Refuse shapes that the header cannot describe.
    bool like_gpt2 = s.family == Family::GPT2 && s.embedding.position == Position::LEARNED &&
                     s.embedding.tied && s.NKV == s.NH && s.NH * s.HS == s.C && s.F == 4 * s.C &&
                     s.block.norm_eps == 1e-5f;
    if (!like_gpt2)
        return "--export " + path +
               ": llm.c's file is of a GPT-2 as it was published (learned positions, a tied head, "
               "ffn of four times the channels): export into a folder";

    // The header has a version for each type, and none for fp16.
    if (dtype == Type::F16)
        return "--export " + path + ": llm.c's files are float or bf16: --export-dtype bf16";
    return "";
}

// Export an llm.c file, completely or not at all. All ranks call: the first one writes, the others
// help to gather each parameter.
template <typename T, typename S>
std::string model_file_export(const Trainer<T, S>& t, const std::string& path, Type dtype) {
    const Shape& s = t.model.shape;
    bool writes = t.comms.world.rank <= 0;
    size_t Vp = round_up(s.V, 128); // the file's own padding, whatever the layout's is
    size_t skipped = (Vp - s.V) * s.C;

    // Write the header.
    FileWriter w;
    if (writes) {
        size_t version = dtype == Type::BF16 ? 5 : 3;
        std::vector<size_t> numbers = {LLMC_GPT2_MARK, version, s.P, s.V, s.L, s.NH, s.C, Vp};
        std::vector<int32_t> header(numbers.begin(), numbers.end());
        header.resize(256);
        size_t elements = parameter_count(t.model) + skipped;
        writer_create(&w, path);
        w.expected = header.size() * 4 + elements * type_bytes(dtype);
        writer_put(w, header.data(), header.size() * 4);
    }

    // Gather the tensors in the order of the file; zeros stand for the padding.
    for_each_in_order(t.model, LLMC_GPT2_ORDER, [&](const Parameter* p) {
        std::vector<float> values = p ? get_weight(t, *p) : std::vector<float>();
        if (!writes) return;
        values.resize(p ? p->file_elements() : skipped);
        writer_put(w, values, dtype);
    });
    return writes ? writer_close(&w) : "";
}

} // namespace llmc
