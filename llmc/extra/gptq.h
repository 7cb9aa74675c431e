// gptq.h - matrices of 4 bits in files of GPTQ and AWQ - arXiv:2210.17323, arXiv:2306.00978
//   w[o,i] = scale[g,o] * (code[i,o] - zero[g,o])         g: the group of input i
//   NAME.qweight   I32   GPTQ (in/8,out): a word has eight inputs, the first in its lowest bits
//                        AWQ (in,out/8): a word has outputs 0 2 4 6 1 3 5 7 of eight
//   NAME.qzeros    I32 (groups,out/8): zero points, eight outputs in a word, as the format orders
//                        them. GPTQ's first format stores zero - 1; gptq_v2 and AWQ store zero
//   NAME.scales    F16, BF16 or F32 (groups,out)
//   NAME.g_idx     I32 (in), GPTQ only: groups of inputs, which desc_act does not leave in order.
//                        Without it, and in AWQ, input i has group i / group_size
//   NAME.bias      zeros that AutoGPTQ wrote for a layer that has no bias
//   quantization_config in config.json, or quantize_config.json, says which format it is.
//   A dialect of folders (tensor_source.h).
//   Contract: a product of 5 and 11 bits is exact in float, so a matrix is expanded without
//             rounding. With --weights int4 codes and scales are kept as they are; this needs zero
//             points of 8, and groups that are whole groups of nf4.cuh. Others are refused.
//   Memory: while it is loaded, a matrix takes 0.6 bytes an element, and 4 if it is expanded.
#pragma once
#include "../io/hf_files.h"
#include "../io/safetensors.h"
#include "../io/tensor_source.h"
#include "../model.h"
#include "../ops/nf4.cuh"
#include "../ops/types.h"
#include "../optimizer.h"
#include "../quantised.h"
#include "../comm/text.h"

namespace llmc {

constexpr size_t PACKED_CODES = 8; // codes in a word

// The format of a folder's packed matrices.
struct PackedFormat {
    bool known = false;       // whether the folder says it
    bool awq = false;
    size_t group = 0;         // inputs that share a scale; 0: all of them
    int added = 0;            // what a stored zero point lacks
    std::string refusal = ""; // why a folder of another format cannot be read
};

// ----------------------------------------------------------------------------
// which format it is

// Read a quantization_config. One of another method says nothing of the format here.
inline PackedFormat parse_packed(const Json& q) {
    PackedFormat f;
    std::string method = quantization_method(q);
    f.awq = method == "awq";
    if (!f.awq && method != "gptq")
        return f;
    auto refuse = [&](const char* key, const std::string& value, const char* fix) {
        f.refusal = concat("quantization_config has ", key, " ", printable(value), ": ", fix);
        return f;
    };

    // Find the variant: others pack codes for one kernel.
    const char* key = f.awq ? "version" : "checkpoint_format";
    std::string variant = quantization_word(q, key, f.awq ? "gemm" : "gptq");
    if (q.value("is_marlin_format", Json()) == true) variant = "marlin";
    if (f.awq && variant != "gemm")
        return refuse(key, variant, "gemm is read; quantise with it, or dequantise the folder");
    if (!f.awq && variant != "gptq" && variant != "gptq_v2")
        return refuse(key, variant, "gptq and gptq_v2 are read; save it as one of them");
    f.added = !f.awq && variant == "gptq";

    // Find the width and the groups.
    Json bits = q.value("bits", Json());
    if (bits != 4)
        return refuse("bits", bits.dump(), "4 is read; quantise to 4 bits, or dequantise it");
    Json group = q.value("group_size", Json());
    bool good = group == -1 || (group.is_number_unsigned() && group > 0);
    if (!good)
        return refuse("group_size", group.dump(), "it is -1 or the inputs that share a scale");
    f.group = group == -1 ? 0 : group.get<size_t>();
    f.known = true;
    return f;
}

// ----------------------------------------------------------------------------
// a matrix

// A matrix's parts, as they are in the file.
struct PackedMatrix {
    bool awq = false;
    size_t rows = 0, cols = 0;     // outputs, inputs
    size_t groups = 0;
    std::vector<uint32_t> words;   // GPTQ (cols/8,rows), AWQ (cols,rows/8)
    std::vector<uint8_t> zeros;    // (groups,rows)
    std::vector<float> scales;     // (groups,rows)
    std::vector<uint32_t> of_col;  // (cols) each input's group
};

// The name of a matrix's part, from the name of the matrix or of its codes.
inline std::string packed_part(const std::string& name, const char* part) {
    return name.substr(0, name.rfind('.') + 1) + part;
}

// The code of output r in a row of words that packs outputs. AWQ puts even outputs first.
inline uint8_t packed_output(bool awq, const uint32_t* words, size_t r) {
    constexpr size_t AWQ_PLACE[] = {0, 4, 1, 5, 2, 6, 3, 7};
    size_t k = r % PACKED_CODES;
    size_t place = awq ? AWQ_PLACE[k] : k;
    return words[r / PACKED_CODES] >> 4 * place & 15;
}

// The code of output r and input c.
inline uint8_t packed_code(const PackedMatrix& m, size_t r, size_t c) {
    if (m.awq)
        return packed_output(true, &m.words[c * (m.rows / PACKED_CODES)], r);
    uint32_t word = m.words[c / PACKED_CODES * m.rows + r];
    return word >> 4 * (c % PACKED_CODES) & 15;
}

// Find a part with its shape, and copy its words: a file need not align them.
inline std::string packed_words(const FindTensor& find, const std::string& name,
                                const std::vector<size_t>& shape, std::vector<uint32_t>* words) {
    const SafeTensor* t = find(name);
    if (!t) return "tensor " + name + " is missing: quantise the model again";
    if (t->dtype != "I32" || t->shape != shape)
        return concat("tensor ", name, " is ", t->dtype, " ", shape_text(t->shape), ", and I32 ",
                      shape_text(shape), " is wanted: config.json is another model's");
    words->resize(t->elements());
    memcpy(words->data(), t->data, t->bytes);
    return "";
}

// Read zero points and scales of all groups.
inline std::string read_packed_groups(const FindTensor& find, const SafeTensor& t,
                                      const PackedFormat& f, PackedMatrix* m) {
    // Read the words of the zero points.
    std::vector<uint32_t> packed;
    size_t words = m->rows / PACKED_CODES;
    std::string name = packed_part(t.name, "qzeros");
    LLMC_TRY(packed_words(find, name, {m->groups, words}, &packed));

    // Unpack them. Readers disagree on 15 + 1 in the first format: some take 16, some 0.
    m->zeros.resize(m->groups * m->rows);
    for (size_t i = 0; i < m->zeros.size(); i++) {
        size_t r = i % m->rows;
        size_t group = i / m->rows;
        int zero = packed_output(m->awq, &packed[group * words], r) + f.added;
        if (zero > 15)
            return "tensor " + name + " has a zero point that stands for 0 or for 16: save the "
                   "folder as gptq_v2";
        m->zeros[i] = uint8_t(zero);
    }

    // Read the scales, as floats.
    name = packed_part(t.name, "scales");
    const SafeTensor* scales = find(name);
    std::vector<size_t> shape = {m->groups, m->rows};
    if (!scales || !is_float_dtype(scales->dtype) || scales->shape != shape)
        return concat("tensor ", name, " is missing, or not F16 ", shape_text(shape),
                      ": config.json is another model's");
    m->scales.resize(m->zeros.size());
    tensor_to_float(m->scales.data(), *scales, 0, m->scales.size());
    return "";
}

// Read a matrix's parts.
inline std::string read_packed_parts(const FindTensor& find, const SafeTensor& t,
                                     const Parameter& p, const PackedFormat& f, PackedMatrix* m) {
    m->awq = f.awq;
    m->rows = p.file_rows;
    m->cols = p.cols();
    if (m->rows % PACKED_CODES || m->cols % PACKED_CODES)
        return concat("tensor ", t.name, " has ", m->cols, " inputs and ", m->rows,
                      " outputs, which words of 8 codes do not divide: dequantise the folder");
    std::vector<size_t> shape = {m->cols / PACKED_CODES, m->rows};
    if (f.awq)
        shape = {m->cols, m->rows / PACKED_CODES};
    LLMC_TRY(packed_words(find, t.name, shape, &m->words));

    // Read the groups, then which group each input has.
    size_t group = f.group ? f.group : m->cols;
    m->groups = ceil_div(m->cols, group);
    LLMC_TRY(read_packed_groups(find, t, f, m));
    for (size_t c = 0; c < m->cols; c++)
        m->of_col.push_back(uint32_t(c / group));

    // An index replaces the order of the groups.
    std::string index = packed_part(t.name, "g_idx");
    if (!f.awq && find(index))
        LLMC_TRY(packed_words(find, index, {m->cols}, &m->of_col));

    // A group that does not exist would be read beyond the scales.
    bool inside = std::ranges::all_of(m->of_col, [&](uint32_t g) { return g < m->groups; });
    return inside ? "" : concat("tensor ", index, " names a group beyond ", m->groups - 1,
                                ": quantise the model again");
}

// Expand a matrix to the values (rows,cols) of its codes.
inline std::vector<float> expand_packed(const PackedMatrix& m) {
    std::vector<float> values(m.rows * m.cols);
    #pragma omp parallel for
    for (size_t r = 0; r < m.rows; r++)
        for (size_t c = 0; c < m.cols; c++) {
            size_t g = m.of_col[c] * m.rows + r;
            int steps = int(packed_code(m, r, c)) - int(m.zeros[g]);
            values[r * m.cols + c] = float(steps) * m.scales[g];
        }
    return values;
}

// Whether nf4.cuh can hold the matrix as it is: all inputs of one of its groups have one scale,
// and 8 is the code of 0.
inline bool fits_int4(const PackedMatrix& m) {
    bool fits = std::ranges::all_of(m.zeros, [](int z) { return z == INT4_ZERO; });
    for (size_t c = 0; c < m.cols; c++)
        fits = fits && m.of_col[c] == m.of_col[c - c % INT4_GROUP];
    return fits;
}

// Lay codes and scales out as nf4.cuh has them. A row is an even number of codes, so no byte has
// codes of two rows.
inline StoredMatrix packed_to_int4(const PackedMatrix& m) {
    StoredMatrix out;
    size_t groups = int4_groups(m.cols);
    out.stored = Stored::INT4;
    out.codes.resize(m.rows * m.cols / 2);
    out.table.resize(m.rows * groups);

    #pragma omp parallel for
    for (size_t r = 0; r < m.rows; r++) {
        for (size_t c = 0; c < m.cols; c += 2) {
            int pair = packed_code(m, r, c) << 4 | packed_code(m, r, c + 1);
            out.codes[(r * m.cols + c) / 2] = uint8_t(pair);
        }
        for (size_t g = 0; g < groups; g++)
            out.table[r * groups + g] = m.scales[m.of_col[g * INT4_GROUP] * m.rows + r];
    }
    return out;
}

// Refuse a bias of a layer that has none in this model, unless it is zeros.
inline std::string check_packed_bias(const FindTensor& find, const SafeTensor& t) {
    const SafeTensor* bias = find(packed_part(t.name, "bias"));
    if (!bias || !is_float_dtype(bias->dtype))
        return "";
    std::vector<float> x(bias->elements());
    tensor_to_float(x.data(), *bias, 0, x.size());
    bool zeros = std::ranges::all_of(x, [](float v) { return v == 0; });
    return zeros ? "" : "tensor " + bias->name + " is a bias that this model has not: config.json "
                        "is another model's";
}

// Read a packed matrix. If the run stores matrices as int4, *m receives its codes; otherwise
// *values receives the expanded values.
inline std::string read_packed(const FindTensor& find, const SafeTensor& t, const Parameter& p,
                               const PackedFormat& f, Stored wanted, StoredMatrix* m,
                               std::vector<float>* values) {
    // Without a format the words could mean anything.
    if (!f.known)
        return "tensor " + t.name + " is GPTQ's or AWQ's, and config.json has no "
               "quantization_config of theirs: take it from the model's page";
    PackedMatrix packed;
    LLMC_TRY(read_packed_parts(find, t, p, f, &packed));

    // Keep the codes, or expand them. Rounding them to another grid of 4 bits would lose what
    // quantisation has tuned.
    bool keep = wanted == Stored::INT4;
    if (keep && !fits_int4(packed))
        return "tensor " + t.name + " has zero points, or groups of its own, and --weights int4 "
               "has 8 and 128: give --weights float, or quantise with sym and group_size 128";
    if (keep) {
        *m = packed_to_int4(packed);
    } else {
        *values = expand_packed(packed);
    }
    m->finite = all_finite(packed.scales);
    return "";
}

// ----------------------------------------------------------------------------
// the dialect

// Wrap a source: packed matrices are read from their codes.
inline std::string open_packed(SourceFolder& f, TensorSource* source) {
    PackedFormat format = parse_packed(f.quantization);
    CodesDialect d;
    d.find = [](const HfFiles& h, const std::string& name) -> const SafeTensor* {
        bool plain = hf_find(h, name) || !name.ends_with(".weight");
        return plain ? nullptr : hf_find(h, packed_part(name, "qweight"));
    };

    // A packed matrix may have a bias of zeros, of which the model knows nothing.
    d.read = [format, &f](const FindTensor& find, const SafeTensor& codes, const Parameter& p,
                          Stored wanted, SourceValues* to) {
        std::string wrong = read_packed(find, codes, p, format, wanted, &to->codes, &to->floats);
        std::string bias = packed_part(p.name, "bias");
        const std::vector<Parameter>& all = f.model->parameters;
        bool has_bias = std::ranges::find(all, bias, &Parameter::name) != all.end();
        return wrong.empty() && !has_bias ? check_packed_bias(find, codes) : wrong;
    };
    wrap_codes(f, source, d);
    if (format.refusal.empty()) return "";

    // A variant that is not read explains codes and missing tensors.
    TensorSource inner = *source;
    source->check = [=](const Parameter& p, UsedTensors* used) {
        std::string wrong = inner.check(p, used);
        return wrong.empty() && !used->codes ? wrong : format.refusal;
    };
    return "";
}

inline const Dialect GPTQ_AND_AWQ = {{"gptq", "awq"}, open_packed};

} // namespace llmc
