// adapter_files.h - PEFT's adapters: adapter_config.json and adapter_model.safetensors, in and out
//   Reading  the tensors decide which matrices have an adapter, and of which rank: each is called
//            base_model.model.NAME.lora_A.weight (r,in), or lora_B (out,r), where NAME is the
//            matrix's; for GPT-2 too neither is transposed. The config gives alpha, by module where
//            alpha_pattern says so, and whether it is rank-stabilised. What would make another
//            function of the same tensors is refused by name.
//   Writing  the same, float or as --export-dtype says. The factor s of a matrix is written as
//            alpha = s r, which other programs read too, rank-stabilised or not.
//   Merging  W + s B A in float, rounded once (--merge). A narrow type may round a small change
//            away: the coefficient <W' - W, D> / <D, D> of all changes D says how much is kept.
//   Every function returns "" or one line that says what is wrong.
#pragma once
#include "huggingface.h"

namespace llmc {

constexpr const char* PEFT_PREFIX = "base_model.model.";

// ----------------------------------------------------------------------------
// adapter_config.json

// Whether a key asks for something: null, false, "", [] and {} ask for nothing. PEFT writes all of
// its keys, also those that it does not use.
inline bool asks(const nlohmann::json& j, const char* key) {
    if (!j.contains(key) || j[key].is_null()) return false;
    const nlohmann::json& value = j[key];
    if (value.is_boolean()) return value.get<bool>();
    return value.is_number() || !value.empty();
}

// Refuse what makes another function of A and B, or trains more than them.
inline std::string check_peft_config(const nlohmann::json& j, const std::string& path) {
    for (const char* key :
         {"use_dora", "modules_to_save", "trainable_token_indices", "target_parameters",
          "lora_bias", "layer_replication", "megatron_config", "alora_invocation_tokens",
          "arrow_config", "kasa_config", "monteclora_config", "velora_config", "use_bdlora",
          "use_qalora"})
        if (asks(j, key))
            return concat(path, ": ", key, " is ", json_word(j[key]),
                          ", which is not built: merge it with PEFT, and give the folder as "
                          "--model");
    if (j.value("peft_type", nlohmann::json()) != "LORA")
        return path + ": is an adapter of type " +
               json_word(j.value("peft_type", nlohmann::json())) + "; LORA can be read";
    if (asks(j, "bias") && j["bias"] != "none")
        return path + ": bias is " + json_word(j["bias"]) +
               ", which trains biases too: only none can be read";

    // Some ways to begin subtract from the base what A and B begin with.
    nlohmann::json init = j.value("init_lora_weights", nlohmann::json(true));
    bool plain = init.is_boolean() || init == "gaussian" || init == "eva" || init == "orthogonal";
    if (!plain)
        return path + ": init_lora_weights is " + json_word(init) +
               ", which has changed the base: merge it with PEFT, and give the folder as --model";
    return "";
}

// The alpha of a module: lora_alpha, or that of the first pattern which is its name, or the end of
// it behind a dot.
inline std::string peft_alpha(const nlohmann::json& j, const std::string& path,
                              const std::string& module, double* alpha) {
    nlohmann::json value = j.value("lora_alpha", nlohmann::json(8));
    nlohmann::json patterns = j.value("alpha_pattern", nlohmann::json());
    for (auto& [pattern, of_pattern] : patterns.items()) {
        // PEFT takes regular expressions; a name's dots mean any character, and find dots.
        if (pattern.find_first_of("*+?[](){}|^$\\") != std::string::npos)
            return path + ": alpha_pattern " + printable(pattern) +
                   " is a regular expression: names of modules can be read";
        if (!targets_module(pattern, module)) continue;
        value = of_pattern;
        break;
    }

    // A division by a rank follows, so any finite number will do.
    if (!value.is_number())
        return path + ": alpha of " + module + " is " + json_word(value) + ", and no number";
    *alpha = value.get<double>();
    return "";
}

// ----------------------------------------------------------------------------
// reading

// The name that PEFT gives a parameter. Its model wraps the base twice:
// each wrapper adds a word in front of the name.
inline std::string peft_name(const Model& m, const std::string& name) {
    std::string full;
    with_family(m.shape.family, [&](auto family) { full = hf_name(family, name); });
    return PEFT_PREFIX + full;
}

// Open a folder's tensors. The file that older versions of PEFT wrote is refused, and the message
// says why: the reason is not its age.
inline std::string open_adapter(SafeTensors* file, const std::string& folder) {
    std::string path = folder + "/adapter_model.safetensors";
    bool older = ::access((folder + "/adapter_model.bin").c_str(), F_OK) == 0;
    if (::access(path.c_str(), F_OK) != 0 && older)
        return folder + "/adapter_model.bin: is a pickle, which can hold programs: save it again "
                        "as safetensors";
    return safetensors_open(file, path);
}

// Check the two halves of a matrix's adapter against it. A file of another model is found here, for
// config.json says nothing of its base's shape.
inline std::string check_halves(const std::string& path, const Parameter& w, const SafeTensor* a,
                                const SafeTensor* b) {
    // Each of the two may be the one that is there.
    std::string module = module_of(w);
    if (!a || !b)
        return concat(path, ": ", module, " has lora_", a ? "A" : "B", " and no lora_",
                      a ? "B" : "A", ": get the file again");
    for (const SafeTensor* t : {a, b})
        if (t->shape.size() != 2 || !is_float_dtype(t->dtype))
            return concat(path, ": ", t->name, " is ", t->dtype, shape_text(t->shape),
                          ", and no matrix of floats");

    // Another base shows itself here:
    // both outer sizes are the matrix's.
    size_t r = a->shape[0];
    if (a->shape[1] != w.cols() || b->shape[0] != w.rows())
        return concat(path, ": the adapter of ", module, " is for a matrix of ", b->shape[0], " x ",
                      a->shape[1], ", and the model's is ", w.rows(), " x ", w.cols(),
                      ": give the --model that it was trained on");
    if (b->shape[1] != r)
        return concat(path, ": lora_A of ", module, " has rank ", r, " and lora_B ", b->shape[1]);
    return r ? "" : concat(path, ": the adapter of ", module, " has rank 0");
}

// The adapters of a folder, for a model without any. Headers are looked at before a byte is
// allocated; the values are read when there is a place for them.
inline std::string read_adapters(const Model& base, const std::string& folder,
                                 Adapters* adapters) {
    std::string path = folder + "/adapter_config.json";
    nlohmann::json j;
    std::string wrong = read_json(path, &j);
    if (wrong.empty() && !j.is_object()) wrong = path + ": is no JSON object";
    if (wrong.empty()) wrong = check_peft_config(j, path);
    SafeTensors file;
    if (wrong.empty()) wrong = open_adapter(&file, folder);
    if (!wrong.empty()) return wrong;

    // Look for both halves of each matrix.
    std::set<std::string> used;
    for (const Parameter& p : base.parameters) {
        std::string module = peft_name(base, module_of(p));
        const SafeTensor* a = safetensors_find(file, module + ".lora_A.weight");
        const SafeTensor* b = safetensors_find(file, module + ".lora_B.weight");
        if (!adaptable(base, p) || (!a && !b)) continue;
        double alpha = 0;
        if (wrong.empty()) wrong = check_halves(file.path, p, a, b);
        if (wrong.empty())
            wrong = peft_alpha(j, path, module.substr(strlen(PEFT_PREFIX)), &alpha);
        if (!wrong.empty()) break;
        LoraOptions o = {a->shape[0], alpha, asks(j, "use_rslora"), ""};
        (*adapters)[module_of(p)] = {o.rank, lora_scale(o)};
        used.insert({a->name, b->name});
    }

    // Every tensor must have its place.
    // One that is left over would be lost without a word.
    for (const SafeTensor& t : file.tensors)
        if (wrong.empty() && !used.count(t.name))
            wrong = file.path + ": tensor " + printable(t.name) +
                    " belongs to no matrix of a block of this model";
    if (wrong.empty() && adapters->empty())
        wrong = file.path + ": holds no adapter";
    safetensors_close(&file);
    return wrong;
}

// Load the weights of a folder's adapters, for which the model has been made. Every rank reads each
// tensor, and keeps its part, as it does of the base.
template <typename T, typename S>
std::string load_adapters(Trainer<T, S>& t, const std::string& folder) {
    SafeTensors file;
    std::string wrong = open_adapter(&file, folder);
    if (!wrong.empty()) return wrong;
    for (const Parameter& p : t.model.parameters) {
        if (!is_adapter(t.model, p)) continue;
        // read_adapters() has seen each; a file that has changed since is no plan's.
        const SafeTensor* tensor = safetensors_find(file, peft_name(t.model, p.name));
        if (!tensor || tensor->shape != p.shape) {
            wrong = file.path + ": has changed since the run began";
            break;
        }
        set_file_weight(t, p, tensor_floats(*tensor));
    }
    safetensors_close(&file);
    return wrong;
}

// ----------------------------------------------------------------------------
// writing

// The names of target_modules: a last word where all matrices of that name have adapters.
inline std::set<std::string> target_modules(const Model& m) {
    std::set<std::string> partly, names;
    auto word_of = [](const std::string& module) { return module.substr(module.rfind('.') + 1); };
    for (const Parameter& p : m.parameters)
        if (adaptable(m, p) && p.adapter < 0)
            partly.insert(word_of(module_of(p)));

    // A word that another matrix has too would adapt that one.
    // Its whole name means one matrix only.
    for (const Parameter& p : m.parameters) {
        std::string word = word_of(module_of(p));
        std::string whole = peft_name(m, module_of(p)).substr(strlen(PEFT_PREFIX));
        if (p.adapter >= 0)
            names.insert(partly.count(word) ? whole : word);
    }
    return names;
}

// The config of a model's adapters. Modules with another rank or alpha than the first stand in
// patterns, under their whole names.
inline nlohmann::ordered_json peft_config(const Model& m, const std::string& base) {
    auto number = [](double x) { // a whole one as PEFT has it
        return x == std::floor(x) ? nlohmann::ordered_json(int64_t(x)) : nlohmann::ordered_json(x);
    };
    nlohmann::ordered_json ranks = nlohmann::ordered_json::object(), alphas = ranks;
    const Adapter first = m.shape.adapters->begin()->second;
    double alpha = first.scale * double(first.rank);
    // The factor is alpha / rank, whatever it was made from.
    for (const auto& [module, adapter] : *m.shape.adapters) {
        std::string name = peft_name(m, module).substr(strlen(PEFT_PREFIX));
        double own = adapter.scale * double(adapter.rank);
        if (adapter.rank != first.rank) ranks[name] = adapter.rank;
        if (own != alpha) alphas[name] = number(own);
    }

    // clang-format off
    return {
        {"peft_type", "LORA"},
        {"task_type", "CAUSAL_LM"},
        {"base_model_name_or_path", base},
        {"r", first.rank},
        {"lora_alpha", number(alpha)},
        {"rank_pattern", ranks},
        {"alpha_pattern", alphas},
        {"lora_dropout", 0.0},
        {"target_modules", target_modules(m)},
        {"bias", "none"},
        {"fan_in_fan_out", m.shape.family == Family::GPT2}, // the base's matrices are [in, out]
        {"inference_mode", true},
    };
    // clang-format on
}

// Write a whole folder of adapters into an empty one. All ranks call; the first one writes.
template <typename T, typename S>
std::string write_adapters(const Trainer<T, S>& t, const std::string& folder, Type dtype,
                           const std::string& base) {
    // List the tensors first: the header stands in front of the data.
    // A rank lists all, also those that others own.
    std::vector<TensorSpec> specs;
    for (const Parameter& p : t.model.parameters)
        if (is_adapter(t.model, p))
            specs.push_back({peft_name(t.model, p.name), dtype, p.shape});

    // Gathering is collective, also after a failure.
    // So no rank may leave the loop.
    FileWriter w;
    bool writes = t.comms.world.rank <= 0;
    if (writes)
        writer_open(&w, folder + "/adapter_model.safetensors", specs, {{"format", "pt"}});
    for (const Parameter& p : t.model.parameters) {
        if (!is_adapter(t.model, p)) continue;
        std::vector<float> values = get_weight(t, p);
        if (writes && w.wrong.empty()) writer_put(w, values, dtype);
    }
    std::string wrong = first_error(t.comms.world, writes ? writer_close(&w) : "");
    if (!wrong.empty() || !writes) return wrong;
    wrong = write_text_file(folder + "/adapter_config.json",
                            peft_config(t.model, base).dump(2) + "\n");
    return wrong.empty() ? sync_folder(folder) : wrong;
}

// Export a folder of adapters, whole or not at all; base: the model's name in the config.
template <typename T, typename S>
std::string export_adapters(const Trainer<T, S>& t, const std::string& folder, Type dtype,
                            const std::string& base) {
    return export_whole(t, folder, [&](const std::string& path) {
        return write_adapters(t, path, dtype, base);
    });
}

} // namespace llmc
