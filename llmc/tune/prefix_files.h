// prefix_files.h - PEFT's prefix tuning, in and out, and its prompt tuning, in
//   prompt_embeddings (n, L * 2 * KV): row i has token i's key and value of each layer, layer by
//   layer. KV = NKV HS, which PEFT calls token_dim; its num_attention_heads is NKV.
//   A prefix that PEFT trained through a projection is saved after it, as the same tensor. Prompt
//   tuning and P-tuning have a tensor of this name too, (n, C): rows before the embeddings, whose
//   keys and values become a prefix (../prompt_tuning.h).
//   Writing  The rows of the layers are gathered one by one; the host holds the whole tensor.
//   Every function that returns a text returns "" or one line that says what is wrong.
#pragma once
#include "../adapters.h"
#include "../io/files.h"
#include "../io/hf_files.h"
#include "../io/huggingface.h"
#include "../io/json.h"
#include "../io/one_reader.h"
#include "../io/safetensors.h"
#include "../io/tokenizer_export.h"
#include "../model.h"
#include "../ops/element_type.h"
#include "../parameters.h"
#include "../comm/text.h"
#include "../trainer.h"
#include "adapter_files.h"
#include "prompt_tuning.h"

namespace llmc {

constexpr const char* PREFIX_TENSOR = "prompt_embeddings";

// ----------------------------------------------------------------------------
// reading

// Tell what a folder holds before the text: keys and values of each layer, or rows before the
// embeddings. A folder without a config is left to the other readers.
enum class BeforeText { NOTHING, PREFIX, PROMPT };
inline BeforeText before_text(const std::string& folder) {
    Json j;
    if (folder.empty() || !read_json(peft_config_path(folder), &j).empty())
        return BeforeText::NOTHING;
    Json type = j.value("peft_type", Json());
    if (type == "PREFIX_TUNING") return BeforeText::PREFIX;
    bool prompt = type == "PROMPT_TUNING" || type == "P_TUNING";
    return prompt ? BeforeText::PROMPT : BeforeText::NOTHING;
}

// The numbers of a row of the tensor.
inline size_t width_before_text(const Shape& s, BeforeText what) {
    return what == BeforeText::PROMPT ? s.C : s.L * 2 * s.NKV * s.HS;
}

// Read how many tokens the prefix of a folder has, and check that it is for this model. Only the
// header is read; load_prefix() reads the values later.
inline std::string read_prefix(const Shape& s, const std::string& folder, size_t* n) {
    SafeTensors file;
    BeforeText what = before_text(folder);
    bool prompt = what == BeforeText::PROMPT;
    if (prompt && s.attention.window)
        return folder + ": is a prompt, whose rows leave the model's sliding window, and a prefix "
                        "does not: such a model is not built";

    // Find its only tensor.
    std::string wrong = open_adapter(&file, folder);
    if (!wrong.empty()) return wrong;
    const SafeTensor* t = safetensors_find(file, PREFIX_TENSOR);
    size_t width = width_before_text(s, what);

    // Compare the tensor with the model: the config does not decide what is read.
    bool matrix = t && t->shape.size() == 2 && is_float_dtype(t->dtype);
    if (!matrix)
        wrong = concat(file.path, ": has no matrix of floats called ", PREFIX_TENSOR,
                       ": get the file again");
    else if (t->shape[1] != width || !t->shape[0])
        wrong = concat(file.path, ": ", PREFIX_TENSOR, " is ", shape_text(t->shape),
                       ", and a ", prompt ? "prompt" : "prefix", " of this model has rows of ",
                       width,
                       ": give the --model that it was trained on");
    else if (file.tensors.size() != 1)
        wrong = concat(file.path, ": holds ", file.tensors.size(), " tensors, and a prefix is one: "
                       "leave trained modules out");

    // A row of the tensor is a token.
    if (wrong.empty())
        *n = t->shape[0];
    safetensors_close(&file);
    return wrong;
}

// The column of PEFT's tensor where a parameter of the prefix begins.
inline size_t prefix_column(const Model& m, const Parameter& p) {
    size_t half = p.name.ends_with(".v") ? 1 : 0;
    return (size_t(p.layer - 1) * 2 + half) * m.shape.NKV * m.shape.HS;
}

// Load a prefix. One rank reads the tensor for all; each parameter takes its columns. plan: of a
// prompt's rows, which it evaluates; -1 where the folder has none.
template <typename T, typename S>
std::string load_prefix(Trainer<T, S>& t, const std::string& folder, int plan) {
    HfFiles h;
    h.reader = make_one_reader(t.comms.world, t.layout);
    std::string path = folder + "/adapter_model.safetensors";
    LLMC_TRY(hf_open_shared(&h, {path}));

    // Check the shape again: the file was closed in the meantime.
    const Shape& s = t.model.shape;
    BeforeText what = plan < 0 ? BeforeText::PREFIX : BeforeText::PROMPT;
    size_t KV = s.NKV * s.HS;
    size_t width = width_before_text(s, what);
    const SafeTensor* tensor = safetensors_find(h.files[0], PREFIX_TENSOR);
    if (!tensor || tensor->shape != std::vector<size_t>{s.tuned.prefix, width})
        return path + ": has changed since the run began";

    // Every rank takes the tensor, which is small, and keeps its part.
    auto all_stages = [](int) { return true; };
    std::vector<float> all = bring_floats(h, *tensor, 0, tensor->elements(), all_stages);
    if (!h.ruined.empty()) return h.ruined;
    if (plan >= 0) {
        make_prefix(t, plan, all);
        return "";
    }

    // A token has the keys and values of all layers in one row.
    for (const Parameter& p : t.model.parameters) {
        if (!is_adapter(t.model, p)) continue;
        std::vector<float> values(p.elements());
        for (size_t i = 0; i < s.tuned.prefix; i++)
            std::copy_n(&all[i * width + prefix_column(t.model, p)], KV, &values[i * KV]);
        set_file_weight(t, p, values);
    }
    return "";
}

// Load a folder's adapters of either kind.
template <typename T, typename S>
std::string load_trained_adapters(Trainer<T, S>& t, const std::string& folder, int plan = -1) {
    return t.model.shape.tuned.prefix ? load_prefix(t, folder, plan) : load_adapters(t, folder);
}

// ----------------------------------------------------------------------------
// writing

inline OrderedJson prefix_config(const Shape& s, const std::string& base) {
    // clang-format off
    return {
        {"peft_type", "PREFIX_TUNING"},
        {"task_type", "CAUSAL_LM"},
        {"base_model_name_or_path", base},
        {"num_virtual_tokens", s.tuned.prefix},
        {"num_layers", s.L},
        {"num_attention_heads", s.NKV},
        {"token_dim", s.NKV * s.HS},
        {"encoder_hidden_size", s.NKV * s.HS},
        {"num_transformer_submodules", 1},
        {"prefix_projection", false},
        {"inference_mode", true},
    };
    // clang-format on
}

// Write a complete folder into an empty one. All ranks call; the first one writes.
template <typename T, typename S>
std::string write_prefix(const Trainer<T, S>& t, const std::string& folder, Type dtype,
                         const std::string& base) {
    const Shape& s = t.model.shape;
    size_t KV = s.NKV * s.HS, width = s.L * 2 * KV;
    std::vector<float> all(s.tuned.prefix * width);

    // Gather the layers' rows into their columns. get_weight() is collective.
    for (const Parameter& p : t.model.parameters) {
        if (!is_adapter(t.model, p)) continue;
        std::vector<float> values = get_weight(t, p);
        for (size_t i = 0; i < s.tuned.prefix; i++)
            std::copy_n(&values[i * KV], KV, &all[i * width + prefix_column(t.model, p)]);
    }

    // Write the tensor, then the config.
    FileWriter w;
    bool writes = t.comms.world.rank <= 0;
    if (writes) {
        std::vector<TensorSpec> specs = {{PREFIX_TENSOR, dtype, {s.tuned.prefix, width}}};
        writer_open(&w, folder + "/adapter_model.safetensors", specs, {{"format", "pt"}});
        if (w.wrong.empty())
            writer_put(w, all, dtype);
    }
    std::string wrong = first_error(t.comms.world, writes ? writer_close(&w) : "");
    if (!wrong.empty() || !writes) return wrong;
    std::string config = prefix_config(s, base).dump(2) + "\n";
    return write_texts(folder, {{"adapter_config.json", config}});
}

// Export what was trained beside the base, of either kind: completely or not at all. beside: the
// tokenizer and chat template that go with it.
template <typename T, typename S>
std::string export_trained_adapters(const Trainer<T, S>& t, const std::string& folder, Type dtype,
                                    const std::string& base, const ExportTokenizer& beside = {}) {
    if (!t.model.shape.tuned.prefix)
        return export_adapters(t, folder, dtype, base, beside);
    return export_whole(t, folder, beside, [&](const std::string& path) {
        return write_prefix(t, path, dtype, base);
    });
}

} // namespace llmc
