// merged_adapters.h - PEFT's DoRA and (IA)3 adapters, read by merging them into the base weights
//   DoRA   W' = diag(m / n) (W + s B A),  n_i = |W_i + s (B A)_i|          arXiv:2402.09353
//          lora_A (r,in), lora_B (out,r), lora_magnitude_vector m (out). n_i is the Euclidean norm
//          of output row i over all inputs; a row of zeros is refused. Biases stay as they are.
//   (IA)3  W' = diag(l) W, b' = diag(l) b   ia3_l (out,1): outputs scaled  arXiv:2205.05638
//          W' = W diag(l)                   ia3_l (1,in): inputs scaled; feedforward_modules lists
//          these matrices.
//   Each rank that keeps a part of W computes the whole W' from the files in double, rounds each
//   element to float once, and then keeps its part. So every layout has the same weights, and a
//   cut of W's columns needs no sum for n.
//   Contract: afterwards the model is a plain one: to evaluate, sample and export. Training such
//             an adapter is refused. A dialect of folders (tensor_source.h).
//   Cost: 2 r out in FLOPs a matrix, once; the host holds one matrix and its adapter as floats.
#pragma once
#include "../adapters.h"
#include "../comm/group.h"
#include "../io/hf_files.h"
#include "../io/hf_places.h"
#include "../io/json.h"
#include "../io/one_reader.h"
#include "../io/safetensors.h"
#include "../io/tensor_source.h"
#include "../model.h"
#include "../comm/text.h"
#include "../optimizer.h"
#include "../tune/adapter_files.h"

namespace llmc {

// How one parameter is changed. The tensors of the other kind are null.
struct WeightMerge {
    const SafeTensor *a = nullptr, *b = nullptr, *magnitude = nullptr; // DoRA
    const SafeTensor* factors = nullptr;                               // (IA)3: l
    double scale = 1;                                                  // DoRA's s
    bool inputs = false; // l scales columns, not rows
};
typedef std::map<std::string, WeightMerge> Merges; // [parameter's name]

// ----------------------------------------------------------------------------
// adapter_config.json

// Read feedforward_modules, a list of modules' names. Without it, *names stays empty.
inline std::string read_feedforward(const Json& j, const std::string& path, Json* names) {
    const char* key = "feedforward_modules";
    *names = Json::array();
    if (!asks(j, key)) return "";
    *names = j[key];
    bool list = names->is_array();
    for (const Json& name : *names) list = list && name.is_string();
    return list ? ""
                : concat(path, ": ", key, " is ", json_word(*names),
                         ": a list of modules' names can be read");
}

// ----------------------------------------------------------------------------
// which parameters are changed, by headers alone

// Refuse what stands beside an expert: these are kept in stacks, and read as plain LoRA alone.
inline std::string check_no_stack(const Parameter& p, const std::string& path) {
    if (p.stack == 1) return "";
    return concat(path, ": ", stack_name(module_of(p), 0), " is an expert's, beside which plain "
                  "LoRA alone is read: merge it with PEFT, and give the folder as --model");
}

// Check a tensor of factors against the shape that its matrix asks for.
inline std::string check_factors(const std::string& path, const SafeTensor& t,
                                 const std::vector<size_t>& shape, const std::string& why) {
    if (t.shape == shape && is_float_dtype(t.dtype))
        return "";
    return concat(path, ": ", printable(t.name), " is ", t.dtype, shape_text(t.shape), ", and ",
                  why, " asks for floats of ", shape_text(shape),
                  ": give the --model that it was trained on");
}

// Find DoRA's tensors of each matrix.
inline std::string find_dora(const Model& base, const Json& j, const std::string& config,
                             const SafeTensors& file, Merges* merges, std::set<std::string>* used) {
    for (const Parameter& p : base.parameters) {
        std::string module = peft_name(base, module_of(p));
        WeightMerge m;
        m.a = safetensors_find(file, module + ".lora_A.weight");
        m.b = safetensors_find(file, module + ".lora_B.weight");
        m.magnitude = safetensors_find(file, module + ".lora_magnitude_vector");
        if (!adaptable(base, p) || (!m.a && !m.b))
            continue;

        // Check the three against the matrix.
        LLMC_TRY(check_no_stack(p, file.path));
        LLMC_TRY(check_halves(file.path, p, m.a, m.b));
        if (!m.magnitude)
            return concat(file.path, ": ", module_of(p), " has lora_A and no "
                          "lora_magnitude_vector, which use_dora asks for: get the file again");
        LLMC_TRY(check_factors(file.path, *m.magnitude, {p.rows()}, module_of(p)));

        // Note the scale, which is LoRA's.
        LLMC_TRY(peft_scale(j, config, peft_module(base, p), m.a->shape[0], &m.scale));
        (*merges)[p.name] = m;
        used->insert({m.a->name, m.b->name, m.magnitude->name});
    }
    return "";
}

// Insist that each name of feedforward_modules means a matrix that has factors.
inline std::string check_feedforward(const Json& names, const std::string& config,
                                     const std::set<std::string>& modules) {
    for (const std::string name : names) {
        bool any = std::ranges::any_of(modules, [&](const std::string& module) {
            return targets_module(name, module);
        });
        if (!any)
            return concat(config, ": feedforward_modules lists ", printable(name), ", and no "
                          "matrix of a block of that name has factors: give the --model that it "
                          "was trained on");
    }
    return "";
}

// Find (IA)3's factors of each matrix, and of the bias after it.
inline std::string find_ia3(const Model& base, const Json& j, const std::string& config,
                            const SafeTensors& file, Merges* merges, std::set<std::string>* used) {
    Json feedforward;
    LLMC_TRY(read_feedforward(j, config, &feedforward));
    std::set<std::string> modules; // those with factors, by the names of PEFT
    for (const Parameter& p : base.parameters) {
        std::string matrix = peft_module(base, p), name = module_of(p);
        const SafeTensor* factors = safetensors_find(file, PEFT_PREFIX + matrix + ".ia3_l");
        if (!adaptable(base, p) || !factors)
            continue;

        // The config says which side is scaled; the shape must agree.
        bool inputs = is_listed(feedforward, matrix);
        std::vector<size_t> rows = {p.rows(), 1}, columns = {1, p.cols()};
        std::string why = concat(name, inputs ? ", one of" : ", none of", " feedforward_modules,");
        LLMC_TRY(check_no_stack(p, file.path));
        LLMC_TRY(check_factors(file.path, *factors, inputs ? columns : rows, why));

        // Scaled outputs include the bias.
        WeightMerge m;
        m.factors = factors;
        m.inputs = inputs;
        (*merges)[p.name] = m;
        if (!inputs)
            (*merges)[name + ".bias"] = m;
        used->insert(factors->name);
        modules.insert(matrix);
    }
    return check_feedforward(feedforward, config, modules);
}

// Find all parameters that a folder's adapters change. The file's headers are known.
inline std::string find_merges(const Model& base, const std::string& folder,
                               const SafeTensors& file, Merges* merges) {
    Json j;
    std::string path = peft_config_path(folder);
    LLMC_TRY(read_peft_config(path, &j));

    // Both kinds refuse what else may be trained beside them: show the check a plain LoRA.
    Merging merging = merging_of(j);
    Json plain = j;
    plain["use_dora"] = false;
    plain["peft_type"] = "LORA";
    if (merging == Merging::DORA) plain["peft_type"] = j.value("peft_type", Json());
    LLMC_TRY(check_peft_config(plain, path));

    // Look for each matrix's tensors, then for tensors without a matrix.
    std::set<std::string> used;
    LLMC_TRY(merging == Merging::DORA ? find_dora(base, j, path, file, merges, &used)
                                      : find_ia3(base, j, path, file, merges, &used));
    LLMC_TRY(check_places(file, used));

    // Compare them with what the config names.
    std::set<std::string> modules;
    for (const Parameter& p : base.parameters)
        if (adaptable(base, p) && merges->count(p.name))
            modules.insert(peft_module(base, p));
    return check_targets(base, j, path, modules);
}

// Check a folder's adapters before anything is allocated.
inline std::string check_merges(const Model& base, const std::string& folder) {
    SafeTensors file;
    Merges merges;
    std::string wrong = open_adapter(&file, folder);
    if (wrong.empty())
        wrong = find_merges(base, folder, file, &merges);
    safetensors_close(&file);
    return wrong;
}

// ----------------------------------------------------------------------------
// the merge

// W' = diag(m / n) (W + s B A), row by row. r: the rank. Returns how many rows have n = 0: they
// have no direction, so no factor gives them the length m.
inline size_t merge_dora(std::vector<float>* w, const std::vector<float>& a, // (out,in) (r,in)
                         const std::vector<float>& b, const std::vector<float>& m, // (out,r) (out)
                         size_t r, double scale) {
    size_t rows = m.size();
    size_t cols = a.size() / r;
    size_t zeros = 0;
    #pragma omp parallel for reduction(+ : zeros)
    for (size_t i = 0; i < rows; i++) {
        // Add the low-rank product in double: the row is divided by its norm below.
        float* row = w->data() + i * cols;
        std::vector<double> sum(row, row + cols);
        for (size_t k = 0; k < r; k++)
            for (size_t j = 0; j < cols; j++)
                sum[j] += scale * b[i * r + k] * a[k * cols + j];

        // Give the row the trained length. Its norm is over all inputs.
        double squares = 0;
        for (double x : sum)
            squares += x * x;
        zeros += squares == 0;
        double factor = m[i] / std::sqrt(squares);
        for (size_t j = 0; j < cols; j++)
            row[j] = float(factor * sum[j]);
    }
    return zeros;
}

// Multiply rows, or columns, by l. A bias (out) is a matrix of one column.
inline void merge_ia3(std::vector<float>* w, const std::vector<float>& l, bool inputs) {
    // A product of two floats is exact in double, so this rounds once.
    size_t cols = inputs ? l.size() : w->size() / l.size();
    for (size_t i = 0; i < w->size(); i++)
        (*w)[i] = float(double((*w)[i]) * l[inputs ? i % cols : i / cols]);
}

// The adapters of a folder, open while the base is read.
struct MergedAdapter {
    HfFiles files = {};
    Merges merges = {};
};

// Change a parameter's values by its adapter. All ranks call: those without values only pass the
// adapter's tensors on.
inline void merge_adapter(SourceFolder& f, MergedAdapter& adapter, const Parameter& p,
                          std::vector<float>* w) {
    auto found = adapter.merges.find(p.name);
    if (found == adapter.merges.end()) return;
    const WeightMerge& m = found->second;
    auto needs = stages_with(f.files.reader.layout, *f.model, p.bucket);
    auto floats = [&](const SafeTensor* x) {
        return bring_floats(adapter.files, *x, 0, x->elements(), needs);
    };

    // Bring the factors, and for DoRA two tensors more.
    std::vector<float> first = floats(m.a ? m.a : m.factors);
    if (m.factors && !w->empty())
        merge_ia3(w, first, m.inputs);
    if (m.factors) return;
    std::vector<float> b = floats(m.b), magnitude = floats(m.magnitude);
    if (w->empty()) return;
    size_t zeros = merge_dora(w, first, b, magnitude, m.a->shape[0], m.scale);
    if (zeros && adapter.files.ruined.empty())
        adapter.files.ruined =
            concat("--adapter ", f.adapter, ": ", zeros, " rows of ", p.name, " with its adapter "
                   "are zero, and DoRA scales each row to a length: train the adapter again "
                   "without ", module_of(p));
}

// Wrap a source: the adapters of the folder f.adapter are merged into what it reads.
inline std::string open_merged(SourceFolder& f, TensorSource* source) {
    if (f.adapter.empty()) return "";
    const Comm& world = f.files.reader.world;
    auto adapter = std::make_shared<MergedAdapter>();
    adapter->files.reader = f.files.reader;
    std::string file = f.adapter + "/adapter_model.safetensors";
    LLMC_TRY(hf_open_shared(&adapter->files, {file}));
    std::string wrong = find_merges(*f.model, f.adapter, adapter->files.files[0], &adapter->merges);

    // Codes have no room for a change.
    TensorSource inner = *source;
    source->check = [=](const Parameter& p, UsedTensors* used) {
        std::string refusal = inner.check(p, used);
        if (refusal.empty() && used->codes)
            refusal = "has matrices stored as codes, into which no adapter can be merged: "
                      "dequantise the folder first";
        return refusal;
    };
    source->read = [=, &f](const Parameter& p, Stored wanted, SourceValues* to) {
        std::string refusal = inner.read(p, wanted, to);
        merge_adapter(f, *adapter, p, &to->floats);
        if (f.files.ruined.empty()) f.files.ruined = adapter->files.ruined;
        return refusal;
    };
    source->merges = true;
    return first_error(world, wrong);
}

inline const Dialect MERGED_ADAPTERS = {{}, open_merged, check_merges};

} // namespace llmc
