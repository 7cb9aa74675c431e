// adapter_files.h - PEFT's adapters: adapter_config.json and adapter_model.safetensors, in and out
//   Reading  The tensors determine which matrices have an adapter, and its rank r: each is called
//            base_model.model.NAME.lora_A.weight (r,in) or lora_B (out,r), where NAME is the
//            matrix's name. Neither is transposed, not even GPT-2's. Each expert has tensors of
//            its own, all of one rank and alpha. The config gives alpha, by module if alpha_pattern
//            says so, and whether it is rank-stabilised. Options that would make another function
//            of the same tensors are refused by name.
//   Writing  The same files, in float or as --export-dtype says. A matrix's factor s is written as
//            alpha = s r, which other programs read correctly, rank-stabilised or not.
//   Merging  W + s B A in float, rounded once (--merge). A narrow type may round a small change
//            away: the coefficient <W' - W, D> / <D, D> over all changes D says how much is kept.
//   Every function that returns a text returns "" or one line that says what is wrong.
#pragma once
#include <regex>
#include "../adapters.h"
#include "../io/files.h"
#include "../io/hf_files.h"
#include "../io/hf_places.h"
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

namespace llmc {

// PEFT's model wraps the base twice; each wrapper puts a word in front of a parameter's name.
constexpr const char* PEFT_PREFIX = "base_model.model.";

// The largest factor of an adapter that is read. Beyond it a change is no small one, and its
// products soon leave the range of floats.
constexpr double MOST_SCALE = 1e6;

// ----------------------------------------------------------------------------
// adapter_config.json

inline std::string peft_config_path(const std::string& folder) {
    return folder + "/adapter_config.json";
}

// Whether a key asks for something: null, false, "", [] and {} do not. PEFT writes all of its keys,
// also those that it does not use.
inline bool asks(const Json& j, const char* key) {
    if (!json_has(j, key)) return false;
    const Json& value = j[key];
    if (value.is_boolean())
        return value.get<bool>();
    return value.is_number() || !value.empty();
}

enum class Merging { NONE, DORA, IA3 }; // NONE: plain LoRA, which stays beside its matrices

// The kind of a config that was read.
inline Merging merging_of(const Json& j) {
    if (j.value("peft_type", Json()) == "IA3") return Merging::IA3;
    return asks(j, "use_dora") ? Merging::DORA : Merging::NONE;
}

// Find how a folder's adapters are read.
inline std::string merging_of(const std::string& folder, Merging* merging) {
    Json j;
    LLMC_TRY(read_json(peft_config_path(folder), &j));
    *merging = merging_of(j);
    return "";
}

// Refuse options that compute another function of A and B, or that train more than them.
inline std::string check_peft_config(const Json& j, const std::string& path) {
    // Refuse options for anything that stands beside A and B.
    for (const char* key :
         {"use_dora", "modules_to_save", "trainable_token_indices", "target_parameters",
          "lora_bias", "layer_replication", "megatron_config", "alora_invocation_tokens",
          "arrow_config", "kasa_config", "monteclora_config", "velora_config", "use_bdlora",
          "use_qalora"})
        if (asks(j, key))
            return concat(path, ": ", key, " is ", json_word(j[key]),
                          ", which is not built: merge it with PEFT, and give the folder as "
                          "--model");

    // Refuse other kinds of adapters, and trained biases.
    if (j.value("peft_type", Json()) != "LORA")
        return path + ": is an adapter of type " + json_word(j.value("peft_type", Json())) +
               "; LORA can be read";
    if (asks(j, "bias") && j["bias"] != "none")
        return path + ": bias is " + json_word(j["bias"]) +
               ", which trains biases too: only none can be read";

    // Refuse initialisations that subtract the initial A and B from the base, and so change it.
    Json init = j.value("init_lora_weights", Json(true));
    bool plain = init.is_boolean() || init == "gaussian" || init == "eva" || init == "orthogonal";
    if (!plain)
        return path + ": init_lora_weights is " + json_word(init) +
               ", which has changed the base: merge it with PEFT, and give the folder as --model";
    return "";
}

// Refuse an adapter in a block that layers_to_transform leaves out: PEFT would not use it.
inline std::string check_peft_layers(const Json& j, const std::string& path, const Parameter& w) {
    // One number stands for a list of one.
    if (!asks(j, "layers_to_transform"))
        return "";
    Json layers = j["layers_to_transform"];
    if (!layers.is_array()) layers = {layers};
    for (const Json& layer : layers)
        if (layer == w.layer - 1) return "";
    return concat(path, ": layers_to_transform leaves out block ", w.layer - 1, ", and ",
                  module_of(w), " has an adapter: leave layers_to_transform out");
}

// Read a config. Patterns become lists of pairs, in the file's order: the first that fits counts.
inline std::string read_peft_config(const std::string& path, Json* j) {
    std::string text;
    LLMC_TRY(read_whole_file(path, &text));
    LLMC_TRY(parse_json(text, path, j));

    // Parse it once more: the library's usual object sorts its names.
    auto ordered = OrderedJson::parse(text);
    for (const char* key : {"rank_pattern", "alpha_pattern"}) {
        Json pairs = Json::array();
        if (!asks(*j, key)) ordered[key] = OrderedJson::object();
        if (!ordered[key].is_object())
            return concat(path, ": ", key, " is ", json_word((*j)[key]), ", and no object");
        for (auto& [pattern, value] : ordered[key].items()) pairs.push_back({pattern, Json(value)});
        (*j)[key] = pairs;
    }
    return "";
}

// Whether a pattern is a module's name, or the end of it after a dot. PEFT takes patterns as
// regular expressions, so a dot in one means any character.
inline bool pattern_fits(const std::string& pattern, const std::string& module) {
    if (pattern.size() > module.size())
        return false;
    size_t at = module.size() - pattern.size();
    bool begins = at == 0 || module[at - 1] == '.';
    return begins && std::equal(pattern.begin(), pattern.end(), module.begin() + long(at),
                                [](char p, char c) { return p == '.' || p == c; });
}

// A number of a module: that of the first pattern that fits, else the one of all modules.
inline std::string peft_number(const Json& j, const std::string& path, const char* of_all,
                               const char* patterns, const std::string& module, double* number) {
    Json value = j.value(of_all, Json(8));
    for (const Json& pair : j.value(patterns, Json::array())) {
        const std::string pattern = pair[0];
        if (pattern.find_first_of("*+?[](){}|^$\\") != std::string::npos)
            return concat(path, ": ", patterns, " ", printable(pattern),
                          " is a regular expression: names of modules can be read");
        if (!pattern_fits(pattern, module))
            continue;
        value = pair[1];
        break;
    }

    // Accept any number: alpha is only divided by the rank.
    if (!value.is_number())
        return concat(path, ": ", of_all, " of ", module, " is ", json_word(value),
                      ", and no number");
    *number = value.get<double>();
    return "";
}

// The factor of a module's adapter of rank r. The config must give the rank that the tensors have,
// if it gives one, and a factor that floats can compute with.
inline std::string peft_scale(const Json& j, const std::string& path, const std::string& module,
                              size_t r, double* scale) {
    double rank = 0, alpha = 0;
    LLMC_TRY(peft_number(j, path, "r", "rank_pattern", module, &rank));
    LLMC_TRY(peft_number(j, path, "lora_alpha", "alpha_pattern", module, &alpha));

    // Compare the rank. Without the key PEFT has 8, and could not load other tensors.
    if (j.contains("r") && rank != double(r))
        return concat(path, ": r of ", module, " is ", rank, ", and its tensors have rank ", r,
                      ": get both files again");
    *scale = lora_scale({r, alpha, asks(j, "use_rslora"), ""});
    return std::abs(*scale) <= MOST_SCALE
               ? "" : concat(path, ": lora_alpha ", alpha, " of ", module, " makes the factor ",
                             *scale, ", and up to ", MOST_SCALE, " is read: get the file again");
}

// ----------------------------------------------------------------------------
// reading

// The name that PEFT gives a parameter, or in a stack that of expert number `expert`.
inline std::string peft_name(const Model& m, const std::string& name, size_t expert = 0) {
    return PEFT_PREFIX + stack_name(hf_name(m.shape, name), expert);
}

// The name of a parameter's module in a config, where PEFT's wrappers put nothing in front.
inline std::string peft_module(const Model& m, const std::string& module, size_t expert = 0) {
    return peft_name(m, module, expert).substr(strlen(PEFT_PREFIX));
}
inline std::string peft_module(const Model& m, const Parameter& p, size_t expert = 0) {
    return peft_module(m, module_of(p), expert);
}

// Open the file with a folder's tensors. Older versions of PEFT wrote a pickle, which is refused;
// the message gives the reason, which is not its age.
inline std::string open_adapter(SafeTensors* file, const std::string& folder) {
    std::string path = folder + "/adapter_model.safetensors";
    if (!file_type(path) && file_type(folder + "/adapter_model.bin"))
        return folder + "/adapter_model.bin: is a pickle, which can hold programs: save it again "
                        "as safetensors";
    return safetensors_open(file, path);
}

// Check the two halves of a matrix's adapter against the matrix. This finds a file of another
// model: the config does not say its base's shape.
inline std::string check_halves(const std::string& path, const Parameter& w, const SafeTensor* a,
                                const SafeTensor* b, size_t expert = 0) {
    // Either half may be the missing one.
    std::string module = stack_name(module_of(w), expert);
    size_t rows = w.rows() / w.stack;
    if (!a || !b)
        return concat(path, ": ", module, " has lora_", a ? "A" : "B", " and no lora_",
                      a ? "B" : "A", ": get the file again");
    for (const SafeTensor* t : {a, b})
        if (t->shape.size() != 2 || !is_float_dtype(t->dtype))
            return concat(path, ": ", t->name, " is ", t->dtype, shape_text(t->shape),
                          ", and no matrix of floats");

    // Compare the outer sizes with the matrix: those of another base differ.
    size_t r = a->shape[0];
    if (a->shape[1] != w.cols() || b->shape[0] != rows)
        return concat(path, ": the adapter of ", module, " is for a matrix of ", b->shape[0], " x ",
                      a->shape[1], ", and the model's is ", rows, " x ", w.cols(),
                      ": give the --model that it was trained on");
    if (b->shape[1] != r)
        return concat(path, ": lora_A of ", module, " has rank ", r, " and lora_B ", b->shape[1]);
    return r ? "" : concat(path, ": the adapter of ", module, " has rank 0");
}

// Refuse a tensor without a place: it would be lost silently. `used` names those that have one.
// Routers choose as the base does, and stacked experts have another form (target_parameters).
inline std::string check_places(const SafeTensors& file, const std::set<std::string>& used) {
    for (const SafeTensor& t : file.tensors) {
        if (used.count(t.name)) continue;
        bool router = t.name.find("gate.lora_") != std::string::npos;
        return file.path + ": tensor " + printable(t.name) +
               (router ? " adapts a router, which stays the base's here: train without it"
                       : " belongs to no matrix of a block of this model");
    }
    return used.empty() ? file.path + ": holds no adapter" : "";
}

// Whether one of a list's names means a module.
inline bool is_listed(const Json& names, const std::string& module) {
    return std::any_of(names.begin(), names.end(), [&](const Json& name) {
        return name.is_string() && targets_module(name.get<std::string>(), module);
    });
}

// Whether a regular expression means a module: it matches the whole name, as Python's re.fullmatch
// does. An expression that is not read gives `unread`.
inline bool expression_names(const std::string& expression, const std::string& module,
                             bool unread) {
    // The library recurses as deep as an expression is long, its counted repetitions written out.
    if (expression.size() > 1000 || expression.find('{') != std::string::npos)
        return unread;
    try {
        // This matcher's time is polynomial in the text; it knows no back-references.
        auto how = std::regex::ECMAScript | std::regex_constants::__polynomial;
        return std::regex_match(module, std::regex(expression, how));
    } catch (const std::regex_error&) {
        return unread; // Python's own syntax
    }
}

// Whether target_modules or exclude_modules means a module: a list of names, or a text.
inline bool names_module(const Json& names, const std::string& module, bool unread) {
    if (names == "all-linear") return true;
    return names.is_string() ? expression_names(names, module, unread) : is_listed(names, module);
}

// Compare the modules that a config chooses with those that have tensors, both by PEFT's names: a
// chosen module has tensors, and no other has. So a config of another file is found.
//   a list         of modules' names, or their ends after a dot; a name that the model has not
//                  means nothing, as in PEFT; nor do those of experts, which are no modules in
//                  transformers since 5
//   "all-linear"   every matrix of a block
//   another text   a regular expression
inline std::string check_targets(const Model& base, const Json& j, const std::string& path,
                                 const std::set<std::string>& modules) {
    if (!asks(j, "target_modules")) return "";
    const Json& targets = j["target_modules"];
    if (!targets.is_array() && !targets.is_string())
        return concat(path, ": target_modules is ", json_word(targets), ", and neither a list of "
                      "modules' names nor a text");

    // Ask of each matrix whether it is chosen. Either all experts of a stack have tensors or none.
    Json exclude = j.value("exclude_modules", Json());
    for (const Parameter& p : base.parameters) {
        if (!adaptable(base, p)) continue;
        std::string module = peft_module(base, p);
        bool has = modules.count(module);
        if (p.stack > 1 && !has) continue;
        bool named = names_module(targets, module, has);
        bool excluded = names_module(exclude, module, !has);
        bool chosen = named && !excluded && check_peft_layers(j, path, p).empty();

        // Name the key that disagrees.
        const char* fault = has && excluded  ? "exclude_modules names "
                            : has && !named  ? "target_modules does not name "
                            : chosen && !has ? "target_modules names "
                                             : nullptr;
        if (fault)
            return concat(path, ": ", fault, module, ", which has ", has ? "" : "no ",
                          "tensors in adapter_model.safetensors: get both files again");
    }
    return "";
}

// Read the adapter of a matrix, if it has one: note its rank and factor, its tensors' names and its
// module's. Experts of one stack have equal ones: their products are one launch.
inline std::string read_adapter(const Model& base, const Parameter& p, size_t expert, const Json& j,
                                const SafeTensors& file, Adapters* adapters,
                                std::set<std::string>* used, std::set<std::string>* modules) {
    std::string name = peft_name(base, module_of(p), expert);
    const SafeTensor* a = safetensors_find(file, name + ".lora_A.weight");
    const SafeTensor* b = safetensors_find(file, name + ".lora_B.weight");
    auto first = adapters->find(module_of(p));
    bool any = a || b;
    bool others = first != adapters->end();
    if (!any && !others) return "";
    std::string module = peft_module(base, p, expert);
    if (expert > 0 && any != others)
        return concat(file.path, ": ", module, " has ", any ? "an" : "no", " adapter, unlike the "
                      "first expert of its block: adapters of all or of none can be read");

    // Check the pair.
    double scale = 0;
    std::string path = peft_config_path(folder_of(file.path));
    LLMC_TRY(check_halves(file.path, p, a, b, expert));
    LLMC_TRY(check_peft_layers(j, path, p));
    LLMC_TRY(peft_scale(j, path, module, a->shape[0], &scale));

    // Compare it with the first expert's.
    Adapter own = {a->shape[0], scale};
    if (others && (own.rank != first->second.rank || own.scale != first->second.scale))
        return concat(file.path, ": the adapter of ", module, " has rank ", own.rank, ", factor ",
                      own.scale, ", and that of the first expert rank ", first->second.rank,
                      ", factor ", first->second.scale, ": equal ones can be read");
    (*adapters)[module_of(p)] = own;
    used->insert({a->name, b->name});
    modules->insert(module);
    return "";
}

// Read which adapters a folder has, for a model that has none yet. Only headers are read, before
// anything is allocated; load_adapters() reads the values later.
inline std::string read_adapters(const Model& base, const std::string& folder, Adapters* adapters) {
    std::string path = peft_config_path(folder);
    Json j;
    SafeTensors file;
    LLMC_TRY(read_peft_config(path, &j));
    LLMC_TRY(check_peft_config(j, path));
    LLMC_TRY(open_adapter(&file, folder));

    // Look for both halves of each matrix.
    std::string wrong;
    std::set<std::string> used, modules;
    for (const Parameter& p : base.parameters)
        for (size_t e = 0; wrong.empty() && adaptable(base, p) && e < p.stack; e++)
            wrong = read_adapter(base, p, e, j, file, adapters, &used, &modules);

    // Refuse tensors that belong to no matrix, and targets that no tensor serves.
    if (wrong.empty())
        wrong = check_places(file, used);
    if (wrong.empty())
        wrong = check_targets(base, j, path, modules);
    safetensors_close(&file);
    return wrong;
}

// Load the weights of a folder's adapters into a model that was made for them: those whose names
// begin with `prefix`, where the model has several sets. As with the base, one rank reads each
// tensor for all.
template <typename T, typename S>
std::string load_adapters(Trainer<T, S>& t, const std::string& folder,
                          const std::string& prefix = "") {
    HfFiles h;
    h.reader = make_one_reader(t.comms.world, t.layout);
    std::string path = folder + "/adapter_model.safetensors";
    LLMC_TRY(hf_open_shared(&h, {path}));
    for (const Parameter& p : t.model.parameters) {
        if (!is_adapter(t.model, p) || !p.name.starts_with(prefix))
            continue;
        auto needs = stages_with(t.layout, t.model, p.bucket);
        std::vector<float> values; // of all experts of a stack
        for (size_t e = 0; e < p.stack; e++) {
            // Refuse a file that has changed since read_adapters() saw it: the plan no longer fits.
            std::string name = peft_name(t.model, p.name.substr(prefix.size()), e);
            const SafeTensor* tensor = safetensors_find(h.files[0], name);
            if (!tensor || tensor->shape != file_shape(p, p.rows() / p.stack))
                return path + ": has changed since the run began";
            std::vector<float> part = bring_floats(h, *tensor, 0, tensor->elements(), needs);
            values.insert(values.end(), part.begin(), part.end());
        }

        // Keep this rank's part.
        if (!values.empty())
            set_file_weight(t, p, values);
    }
    return first_error(t.comms.world, h.ruined);
}

// ----------------------------------------------------------------------------
// writing

// List the blocks that have adapters, counted from 0.
inline std::set<size_t> adapted_blocks(const Model& m) {
    std::set<size_t> blocks;
    for (const Parameter& p : m.parameters)
        if (p.adapter >= 0)
            blocks.insert(size_t(p.layer) - 1);
    return blocks;
}

// List the names for target_modules: the last word of a name if all matrices with that word have
// adapters, else whole names. Blocks without any do not count: layers_to_transform leaves them out.
inline std::set<std::string> target_modules(const Model& m) {
    std::set<std::string> partly, names;
    std::set<size_t> blocks = adapted_blocks(m);
    auto word_of = [](const std::string& module) {
        return module.substr(module.rfind('.') + 1);
    };
    for (const Parameter& p : m.parameters)
        if (adaptable(m, p) && p.adapter < 0 && blocks.count(size_t(p.layer) - 1))
            partly.insert(word_of(module_of(p)));

    // Use a whole name if a matrix without an adapter has the same last word: the word alone would
    // adapt that matrix too.
    for (const Parameter& p : m.parameters) {
        std::string word = word_of(module_of(p));
        for (size_t e = 0; p.adapter >= 0 && e < p.stack; e++)
            names.insert(partly.count(word) ? peft_module(m, p, e) : word);
    }
    return names;
}

// Why PEFT would not use some adapters, or "". transformers 5 joins the experts of a block. PEFT
// turns their matrices' names into the joined ones, so it loads gate and up of an expert only with
// down; and, but for Qwen2-MoE, whose experts it does not know, no ffn beside experts.
inline std::string peft_loses(const Shape& s) {
    for (const auto& [module, adapter] : *s.tuned.adapters) {
        size_t stack = module.find("{}.");
        bool expert = stack != std::string::npos, qwen2 = s.hf_type == "qwen2_moe";
        bool down = module.ends_with(".w2") || module.ends_with(".down_proj");
        std::string front = module.substr(0, expert ? stack + 3 : 0);
        auto of_expert = std::ranges::count_if(*s.tuned.adapters, [&](const auto& other) {
            return other.first.starts_with(front);
        });

        // Name the first one that is lost.
        bool ffn = s.experts.E && !qwen2 && module.find(".mlp.") != std::string::npos;
        if (expert ? qwen2 || (!down && of_expert < 3) : ffn)
            return "PEFT with transformers 5 loads no adapter of " + stack_name(module, 0) +
                   ": give --merge, or --lora-targets attention";
    }
    return "";
}

// The config of a model's adapters. r and lora_alpha are those of the first one; modules that
// differ are listed in patterns, under their whole names, each expert by its own.
inline OrderedJson peft_config(const Model& m, const std::string& base) {
    auto number = [](double x) { // PEFT writes a whole number as an integer
        return x == std::floor(x) ? OrderedJson(int64_t(x)) : OrderedJson(x);
    };
    OrderedJson ranks = OrderedJson::object(), alphas = ranks;
    const Adapter first = m.shape.tuned.adapters->begin()->second;
    double alpha = first.scale * double(first.rank);

    // Write alpha = factor x rank, whatever the factor was computed from.
    for (const auto& [module, adapter] : *m.shape.tuned.adapters) {
        size_t matrices = module.find("{}") == std::string::npos ? 1 : m.shape.experts.E;
        double own = adapter.scale * double(adapter.rank);
        for (size_t e = 0; e < matrices; e++) {
            std::string name = peft_module(m, module, e);
            if (adapter.rank != first.rank)
                ranks[name] = adapter.rank;
            if (own != alpha)
                alphas[name] = number(own);
        }
    }

    // Name the blocks if some have none; null means all.
    std::set<size_t> blocks = adapted_blocks(m);
    OrderedJson layers;
    if (blocks.size() < m.shape.L)
        layers = blocks;

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
        {"layers_to_transform", layers},
        {"bias", "none"},
        {"fan_in_fan_out", m.shape.family == Family::GPT2}, // the base's matrices are [in, out]
        {"inference_mode", true},
    };
    // clang-format on
}

// Write a complete folder of adapters into an empty one. All ranks call; the first one writes.
template <typename T, typename S>
std::string write_adapters(const Trainer<T, S>& t, const std::string& folder, Type dtype,
                           const std::string& base) {
    // List the tensors first: the header comes before the data. Every rank lists all of them, also
    // those that other ranks own.
    std::vector<TensorSpec> specs;
    for (const Parameter& p : t.model.parameters)
        for (size_t e = 0; is_adapter(t.model, p) && e < p.stack; e++)
            specs.push_back({peft_name(t.model, p.name, e), dtype,
                             file_shape(p, p.rows() / p.stack)});

    // Gather and write them. get_weight() is collective, so no rank may leave the
    // loop after a failure.
    FileWriter w;
    bool writes = t.comms.world.rank <= 0;
    if (writes)
        writer_open(&w, folder + "/adapter_model.safetensors", specs, {{"format", "pt"}});
    for (const Parameter& p : t.model.parameters) {
        if (!is_adapter(t.model, p)) continue;
        std::vector<float> values = get_weight(t, p);
        if (writes && w.wrong.empty())
            writer_put(w, values, dtype);
    }
    std::string wrong = first_error(t.comms.world, writes ? writer_close(&w) : "");
    if (!wrong.empty() || !writes) return wrong;
    std::string config = peft_config(t.model, base).dump(2) + "\n";
    return write_texts(folder, {{"adapter_config.json", config}});
}

// Export a folder of adapters, completely or not at all. `base` is the model's name in the config.
template <typename T, typename S>
std::string export_adapters(const Trainer<T, S>& t, const std::string& folder, Type dtype,
                            const std::string& base, const ExportTokenizer& beside = {}) {
    return export_whole(t, folder, beside, [&](const std::string& path) {
        return write_adapters(t, path, dtype, base);
    });
}

// ----------------------------------------------------------------------------
// --adapters NAME=DIR,NAME=DIR: folders under names that prompts choose
//   {"prompt": "...", "adapter": "NAME"}    a line of --prompts; without the key, or with null, the
//                                           base alone answers
//   Ranks, factors and the adapted matrices may differ from folder to folder.

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
        if (!std::ranges::all_of(f.name, good))
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
