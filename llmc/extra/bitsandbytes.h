// bitsandbytes.h - matrices of 4 or 8 bits in files of bitsandbytes - arXiv:2305.14314
//   NAME                      U8 (n/2,1): codes of NF4         I8 (rows,cols): codes of int8
//   NAME.absmax               U8 (n/64): codes of the absmaxes, or F32 if these are not quantised
//   NAME.nested_quant_map     F32 (256)     NAME.nested_absmax   F32 (n/16384)
//   NAME.quant_map            F32 (16)      NAME.quant_state.bitsandbytes__nf4   U8, a JSON text:
//                             shape, blocksize, nested_blocksize, nested_offset
//   SCB in place of `weight`  F32 (rows), the absmax of each row of int8; weight_format is 0
//   Both formats equal nf4.cuh's to the byte. With --weights of the same format, codes and absmaxes
//   are kept as matrix products read them, and nothing is rounded again. Otherwise the matrix is
//   expanded to the values that its codes stand for. Rows are outputs, also in GPT-2's files, which
//   hold plain matrices transposed. A dialect of folders (tensor_source.h).
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

// Whether a tensor holds codes.
inline bool is_prequantised(const SafeTensor& t) { return t.dtype == "U8" || t.dtype == "I8"; }

// Find a tensor that belongs to a matrix's codes, and check its type and length.
// elements 0: any length.
inline std::string find_part(const FindTensor& find, const std::string& name, const char* dtype,
                             size_t elements, const SafeTensor** part) {
    *part = find(name);
    if (!*part) return "tensor " + name + " is missing";

    // The length must fit, so that nothing is read beyond the end of the file.
    const SafeTensor& found = **part;
    bool same_type = found.dtype == dtype;
    bool same_size = !elements || found.elements() == elements;
    if (same_type && same_size) return "";
    return concat("tensor ", name, " is ", found.dtype, " ", shape_text(found.shape), ", and ",
                  dtype, " of ", elements, " is wanted");
}

// Read NF4's absmaxes: codes with their table into *m, or floats into *absmax.
inline std::string read_nf4_scales(const FindTensor& find, const std::string& name,
                                   const Json& state, size_t n, StoredMatrix* m,
                                   std::vector<float>* absmax) {
    // Double quantisation shows in the tensors' names: only then there is a table.
    bool nested = find(name + ".nested_absmax") != nullptr;
    const char* dtype = nested ? "U8" : "F32";
    size_t blocks = nf4_blocks(n);
    const SafeTensor* scales = nullptr;
    LLMC_TRY(find_part(find, name + ".absmax", dtype, blocks, &scales));

    // Absmaxes in float need no table.
    if (!nested) {
        absmax->resize(blocks);
        tensor_to_float(absmax->data(), *scales, 0, blocks);
        return "";
    }

    // Find the parts of the table: a map, and absmaxes of the absmaxes.
    const SafeTensor* map = nullptr;
    const SafeTensor* absmax2 = nullptr;
    size_t groups = nf4_table_floats(n) - NF4_TABLE;
    LLMC_TRY(find_part(find, name + ".nested_quant_map", "F32", NF4_MAP, &map));
    LLMC_TRY(find_part(find, name + ".nested_absmax", "F32", groups, &absmax2));

    // Check what the state says of them.
    Json block = state.value("nested_blocksize", Json());
    bool offset = state.contains("nested_offset") && state["nested_offset"].is_number();
    if (block != int(NF4_SCALES_BLOCK) || !offset)
        return "tensor " + name + " has blocks of absmaxes other than 256, or no offset";

    // Read the table as nf4.cuh has it: offset, map, absmaxes of the absmaxes.
    m->table.resize(nf4_table_floats(n));
    m->table[0] = state["nested_offset"].get<float>();
    tensor_to_float(&m->table[1], *map, 0, NF4_MAP);
    tensor_to_float(&m->table[NF4_TABLE], *absmax2, 0, groups);
    m->scales.assign(scales->data, scales->data + blocks);
    return "";
}

// Read a matrix in NF4. *absmax receives its absmaxes if they are floats, and stays empty if they
// are codes in *m.
inline std::string read_nf4(const FindTensor& find, const SafeTensor& t, const Parameter& p,
                            StoredMatrix* m, std::vector<float>* absmax) {
    // Read the quantisation state: JSON in a tensor of bytes.
    std::string name = t.name;
    std::string state_name = name + ".quant_state.bitsandbytes__nf4";
    const SafeTensor* text = nullptr;
    std::string wrong = find_part(find, state_name, "U8", 0, &text);
    if (!wrong.empty())
        return "tensor " + name + " has codes of 8 bits and is no NF4: quantise with "
               "bnb_4bit_quant_type nf4";
    auto end = text->data + text->bytes;
    auto state = Json::parse(text->data, end, nullptr, false);
    if (!state.is_object() || state.value("blocksize", Json()) != int(NF4_BLOCK))
        return "tensor " + name + " has blocks of other than 64 elements";

    // Compare the shapes: a matrix of another shape may have as many bytes.
    std::vector<size_t> rows_cols = {p.file_rows, p.cols()};
    Json shape = state.value("shape", Json());
    if (shape != Json(rows_cols))
        return concat("tensor ", name, " has the shape ", shape.dump(),
                      ", config.json asks for ", shape_text(rows_cols));

    // Check the number of codes, two in a byte.
    size_t n = p.file_elements();
    if (t.bytes != ceil_div(n, 2))
        return concat("tensor ", name, " has ", t.bytes, " bytes for ", n, " elements");

    // Check the map, which belongs to the format: FP4 and others have codes of 4 bits too.
    const SafeTensor* map = nullptr;
    LLMC_TRY(find_part(find, name + ".quant_map", "F32", 16, &map));
    std::vector<float> values(16);
    tensor_to_float(values.data(), *map, 0, 16);
    for (unsigned code = 0; code < 16; code++)
        if (values[code] != nf4_value(code))
            return "tensor " + name + ".quant_map is not NF4's";

    // Keep the codes as they are, then their absmaxes.
    m->stored = Stored::NF4;
    m->codes.assign(t.data, t.data + t.bytes);
    return read_nf4_scales(find, name, state, n, m, absmax);
}

// Read a matrix in int8, with an absmax for each row.
inline std::string read_int8(const FindTensor& find, const SafeTensor& t, const Parameter& p,
                             StoredMatrix* m) {
    // Check the shape: a row is an output.
    std::vector<size_t> rows_cols = {p.file_rows, p.cols()};
    if (t.shape != rows_cols)
        return concat("tensor ", t.name, " has the shape ", shape_text(t.shape),
                      ", config.json asks for ", shape_text(rows_cols));

    // Find the rows' absmaxes.
    std::string stem = t.name.substr(0, t.name.rfind('.') + 1);
    const SafeTensor* scales = nullptr;
    LLMC_TRY(find_part(find, stem + "SCB", "F32", p.file_rows, &scales));

    // Refuse other memory layouts, which are tiled for a GPU's cache.
    const SafeTensor* format = find(stem + "weight_format");
    bool in_rows = !format || (format->bytes == 1 && format->data[0] == 0);
    if (!in_rows)
        return "tensor " + t.name + " does not lie in rows: save it with a newer bitsandbytes";

    // Keep codes and absmaxes: they are laid out as matrix products read them.
    m->stored = Stored::INT8;
    m->codes.assign(t.data, t.data + t.bytes);
    m->table.resize(p.file_rows);
    tensor_to_float(m->table.data(), *scales, 0, p.file_rows);
    return "";
}

// Read a matrix whose codes are in t. If the run stores matrices as `wanted` and the file's format
// is another one, *values receives the expanded values; otherwise it stays empty.
inline std::string read_prequantised(const FindTensor& find, const SafeTensor& t,
                                     const Parameter& p, Stored wanted, StoredMatrix* m,
                                     std::vector<float>* values) {
    // Read by the format of the codes: int8 or NF4.
    std::vector<float> absmax;
    bool bytes = t.dtype == "I8";
    LLMC_TRY(bytes ? read_int8(find, t, p, m) : read_nf4(find, t, p, m, &absmax));

    // Note whether all absmaxes are finite: a bad one spoils its block, and the weights'
    // check must find it.
    m->finite = all_finite(m->table) && all_finite(absmax);

    // Keep the codes if the run stores this format.
    bool float_absmax = !bytes && !absmax.empty();
    if (wanted == Stored::NF4 && float_absmax)
        return "tensor " + t.name + " has absmaxes in float, and --weights nf4 has codes for them: "
               "give --weights float, or quantise with bnb_4bit_use_double_quant";
    if (wanted == m->stored) return "";

    // Expand the codes to values.
    size_t n = p.file_elements();
    values->resize(n);
    if (bytes) {
        const int8_t* codes = reinterpret_cast<const int8_t*>(m->codes.data());
        int8_dequantize(values->data(), codes, m->table.data(), p.file_rows, p.cols(), Cpu{});
    } else if (absmax.empty()) {
        nf4_dequantize(values->data(), {m->codes.data(), m->scales.data(), m->table.data()}, n,
                       Cpu{});
    } else {
        // Float absmaxes are no format of our operators, so expand them here.
        for (size_t i = 0; i < n; i++)
            (*values)[i] = nf4_value(nibble_of(m->codes[i / 2], i)) * absmax[i / NF4_BLOCK];
    }
    return "";
}

// ----------------------------------------------------------------------------
// the dialect

// Wrap a source: matrices whose tensors hold codes are expanded, or kept.
inline std::string open_bitsandbytes(SourceFolder& f, TensorSource* source) {
    CodesDialect d;
    d.find = [](const HfFiles& h, const std::string& name) {
        const SafeTensor* tensor = hf_find(h, name);
        return tensor && is_prequantised(*tensor) ? tensor : nullptr;
    };
    d.read = [](const FindTensor& find, const SafeTensor& codes, const Parameter& p, Stored wanted,
                SourceValues* to) {
        return read_prequantised(find, codes, p, wanted, &to->codes, &to->floats);
    };
    wrap_codes(f, source, d);
    return "";
}

inline const Dialect BITSANDBYTES = {{"bitsandbytes"}, open_bitsandbytes};

} // namespace llmc
