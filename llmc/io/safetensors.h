// safetensors.h - reading and writing safetensors files - github.com/huggingface/safetensors
//   A file: 8 bytes with the header's length, a JSON header {name: {dtype, shape, data_offsets}},
//   then the tensors' bytes.
//   Reading maps the file and trusts nothing: lengths, JSON, duplicates, shapes, offsets, overlaps
//   and holes are checked before a tensor is handed out.
//   Writing streams into a temporary file, syncs it, and renames it: a file with the final name is
//   always whole.
//   Errors: a function that returns a text returns "" or one line that says what is wrong. Nothing
//   exits or throws.
#pragma once
#include <algorithm>
#include <map>
#include <string>
#include <vector>
#include "../ops/element_type.h"
#include "../ops/types.h"
#include "../comm/text.h"
#include "files.h"
#include "json.h"

namespace llmc {

// A tensor of an open file. `data` points into the map, at any alignment: read it with memcpy.
struct SafeTensor {
    std::string name, dtype;
    std::vector<size_t> shape;
    const unsigned char* data = nullptr;
    size_t bytes = 0;
    int reader = 0; // where one rank reads for all: the rank that has `data`; others have null
    size_t elements() const {
        size_t n = 1;
        for (size_t d : shape) n *= d;
        return n;
    }
};

// An open file. Its bytes are mapped until safetensors_close().
struct SafeTensors {
    std::string path;
    void* map = nullptr;
    size_t bytes = 0;
    std::vector<SafeTensor> tensors; // sorted by name
    std::map<std::string, std::string> metadata;
};

// A shape as text: "(2, 3)"
inline std::string shape_text(const std::vector<size_t>& shape) {
    std::string text = "(";
    for (size_t i = 0; i < shape.size(); i++)
        text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + ")";
}

// End the mapping, and with it the data of all tensors. Closing twice does nothing.
inline void safetensors_close(SafeTensors* s) {
    if (s->map)
        unmap_file(s->map, s->bytes);
    *s = {};
}

// Find a tensor by name, or return null.
inline const SafeTensor* safetensors_find(const SafeTensors& s, const std::string& name) {
    // The tensors are sorted by name, so search by halves.
    auto it = std::ranges::lower_bound(s.tensors, name, {}, &SafeTensor::name);
    return it != s.tensors.end() && it->name == name ? &*it : nullptr;
}

// ----------------------------------------------------------------------------
// element types

// Bytes of an element, or 0 for a type that the format does not have. Integer types are listed so
// that files with them can be checked; only floats can be loaded.
inline size_t dtype_bytes(const std::string& dtype) {
    // clang-format off
    static const std::map<std::string, size_t> known = {
        {"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"F8_E4M3", 1}, {"F8_E5M2", 1},
        {"I64", 8}, {"I32", 4}, {"I16", 2}, {"I8", 1},
        {"U64", 8}, {"U32", 4}, {"U16", 2}, {"U8", 1},   {"BOOL", 1}};
    // clang-format on
    auto it = known.find(dtype);
    return it == known.end() ? 0 : it->second;
}

// Whether tensor_to_float() can read a type.
inline bool is_float_dtype(const std::string& d) {
    return d == "F32" || d == "F16" || d == "BF16" || d == "F64";
}

// Read `count` elements as floats, from `first` on.
inline void tensor_to_float(float* out, const SafeTensor& t, size_t first, size_t count) {
    // A double rounds once, to float; bf16 and fp16 convert exactly.
    const unsigned char* p = t.data + first * dtype_bytes(t.dtype);
    #pragma omp parallel for
    for (size_t i = 0; i < count; i++) {
        if (t.dtype == "F32") {
            memcpy(out + i, p + 4 * i, 4);
        } else if (t.dtype == "F64") {
            double d;
            memcpy(&d, p + 8 * i, 8);
            out[i] = float(d);
        } else {
            bool bf = t.dtype == "BF16";
            uint16_t h;
            memcpy(&h, p + 2 * i, 2);
            out[i] = bf ? to_float(bf16{h}) : to_float(fp16{h});
        }
    }
}

// Round floats to the type of a file.
inline void float_to_type(void* out, const float* in, size_t count, Type type) {
    if (type == Type::F32) {
        memcpy(out, in, count * 4);
        return;
    }
    uint16_t* halves = static_cast<uint16_t*>(out);
    for (size_t i = 0; i < count; i++) {
        bool bf = type == Type::BF16;
        halves[i] = bf ? from_acc<bf16>(in[i]).bits : from_acc<fp16>(in[i]).bits;
    }
}

// ----------------------------------------------------------------------------
// reading

// How many names a JSON text has: its colons outside strings. A parsed object has only the last of
// two equal names, and another program could read such a file as another model.
inline size_t count_names(std::string_view text) {
    size_t names = 0;
    outside_strings(text, [&](char c) { names += c == ':'; });
    return names;
}

// Read and check a shape, and count its elements.
inline std::string read_shape(SafeTensor* t, const Json& shape, size_t* elements) {
    *elements = 1;
    if (!shape.is_array())
        return "has a shape that is no list";
    for (const Json& d : shape) {
        // Do not print a list: printing recurses, and a header full of brackets
        // would exhaust the stack.
        if (!d.is_number_unsigned())
            return "has a shape with " + (d.is_structured() ? d.type_name() : d.dump()) +
                   ", which is no size";
        t->shape.push_back(d.get<size_t>());
        if (__builtin_mul_overflow(*elements, t->shape.back(), elements))
            return "has a shape too large for any file";
    }
    return "";
}

// Check one entry of the header. `body` is the size of all tensors' bytes; *begin receives where
// this tensor's bytes begin among them.
inline std::string read_tensor_entry(SafeTensor* t, const Json& entry, size_t body, size_t* begin) {
    if (!entry.is_object() || !entry.contains("dtype") || !entry.contains("shape") ||
        !entry.contains("data_offsets"))
        return "has no dtype, shape and data_offsets";

    // Find the element type.
    const Json& dtype = entry["dtype"];
    if (!dtype.is_string())
        return "has a dtype that is no text";
    t->dtype = dtype.get<std::string>();
    size_t width = dtype_bytes(t->dtype);
    if (!width)
        return "has the unknown dtype " + printable(t->dtype);

    // Find how many elements there are.
    size_t elements;
    LLMC_TRY(read_shape(t, entry["shape"], &elements));

    // Check the offsets: they must lie in the file, and be exactly as far apart as the bytes need.
    const Json& offsets = entry["data_offsets"];
    bool numbers = offsets.is_array() && offsets.size() == 2 && offsets[0].is_number_unsigned() &&
                   offsets[1].is_number_unsigned();
    if (!numbers)
        return "has data_offsets that are not two positions";
    size_t end = offsets[1].get<size_t>();
    *begin = offsets[0].get<size_t>();
    if (*begin > end || end > body)
        return concat("lies at ", *begin, " to ", end, " of ", body,
                      " bytes of data: the file is cut short or damaged, get it again");
    t->bytes = end - *begin;
    bool countless = elements > SIZE_MAX / width;
    if (countless || t->bytes != elements * width)
        return concat("has ", t->bytes, " bytes, its shape and dtype ", t->dtype, " need ",
                      countless ? "more than there are" : std::to_string(elements * width));
    return "";
}

// Check that the tensors' bytes cover the data, each byte exactly once.
inline std::string check_spans(std::vector<std::pair<size_t, size_t>> spans, size_t body) {
    // Refuse gaps and overlaps, which could hide bytes that no reader checks.
    std::ranges::sort(spans);
    size_t reached = 0;
    for (auto [begin, end] : spans) {
        if (begin < reached)
            return concat("two tensors overlap at byte ", begin, " of the data");
        if (begin > reached)
            return concat("bytes ", reached, " to ", begin, " of the data belong to no tensor");
        reached = end;
    }
    if (reached != body)
        return concat("the tensors end at byte ", reached, " of ", body, " bytes of data");
    return "";
}

// Check the header of a mapped file, and list its tensors.
inline std::string read_safetensors_header(SafeTensors* s) {
    // Find the header.
    const unsigned char* file = static_cast<const unsigned char*>(s->map);
    if (s->bytes < 8)
        return concat("is ", s->bytes, " bytes long, too short for a safetensors file");
    uint64_t length;
    memcpy(&length, file, 8);
    if (length > s->bytes - 8 || length > 100000000)
        return concat("its header is said to take ", length, " bytes, the file has ", s->bytes,
                      ": truncated, or no safetensors file");

    // Parse the header.
    const unsigned char* data = file + 8 + length;
    std::string_view text(reinterpret_cast<const char*>(file + 8), length);
    Json header = Json::parse(text, nullptr, false);
    if (!header.is_object())
        return "its header is no JSON object";

    // Read its tensors, and the texts of its metadata.
    size_t body = s->bytes - 8 - length;
    size_t names = header.size(); // of tensors, and in their entries
    std::vector<std::pair<size_t, size_t>> spans; // {begin, end} of each tensor's bytes
    for (auto& [name, entry] : header.items()) {
        names += entry.is_object() ? entry.size() : 0;
        if (name == "__metadata__") {
            for (auto& [key, value] : entry.items())
                if (value.is_string())
                    s->metadata[key] = value.get<std::string>();
            continue;
        }

        // Check a tensor's entry.
        SafeTensor t;
        t.name = name;
        size_t begin = 0;
        std::string wrong = read_tensor_entry(&t, entry, body, &begin);
        if (!wrong.empty())
            return "tensor " + printable(name) + " " + wrong;

        // The entry is good: note its bytes.
        t.data = data + begin;
        spans.push_back({begin, begin + t.bytes});
        s->tensors.push_back(t);
    }

    // Refuse names that the parser has dropped. No object stands in an entry.
    if (names != count_names(text))
        return "names something twice, or has an object in a tensor's entry";
    return check_spans(spans, body);
}

// Map a file. safetensors_close() ends the mapping.
inline std::string map_file(SafeTensors* s, const std::string& path) {
    *s = {};
    s->path = path;
    struct stat st = {};
    return map_whole_file(path, &s->map, &s->bytes, &st);
}

// Open a file: map it, check its header, sort its tensors by name.
inline std::string safetensors_open(SafeTensors* s, const std::string& path) {
    LLMC_TRY(map_file(s, path));
    std::string wrong = read_safetensors_header(s);
    if (!wrong.empty()) {
        safetensors_close(s);
        return path + ": " + wrong;
    }
    std::ranges::sort(s->tensors, {}, &SafeTensor::name);
    return "";
}

// ----------------------------------------------------------------------------
// writing: names, types and shapes first, then the data in the same order

// The nearest float that a file's type can hold. An export rounds once, from the float sum of base
// and change, never from a base that is already narrow.
inline float as_written(float x, Type dtype) {
    if (dtype == Type::BF16)
        return to_float(from_acc<bf16>(x));
    return dtype == Type::F16 ? to_float(from_acc<fp16>(x)) : x;
}

// Count a value that a narrower type makes infinite, or zero. A value that was no number is
// counted with the infinite ones.
inline void count_lost(FileWriter& w, float value, float written) {
    w.infinite += !std::isfinite(written);
    w.vanished += value != 0 && written == 0;
}

// A tensor to be written: its entry in the header.
struct TensorSpec {
    std::string name;
    Type type;
    std::vector<size_t> shape;
    size_t bytes() const {
        size_t n = type_bytes(type);
        for (size_t d : shape) n *= d;
        return n;
    }
};

// Start a file, and write its header. The caller then puts the tensors' data, in the same order.
inline std::string writer_open(FileWriter* w, const std::string& path,
                               const std::vector<TensorSpec>& specs,
                               const std::map<std::string, std::string>& metadata) {
    // Assign each tensor its place, one after the other.
    OrderedJson header = OrderedJson::object();
    if (!metadata.empty())
        header["__metadata__"] = metadata;
    size_t offset = 0;
    for (const TensorSpec& t : specs) {
        header[t.name] = {{"dtype", type_name(t.type)},
                          {"shape", t.shape},
                          {"data_offsets", {offset, offset + t.bytes()}}};
        offset += t.bytes();
    }

    // Print the header, and pad it with spaces to align the data. Bytes that are not UTF-8 (in a
    // path of the metadata, say) are replaced; plain dump() would throw.
    std::string text = header.dump(-1, ' ', false, Json::error_handler_t::replace);
    text.resize(round_up(text.size(), 8), ' ');

    // Write the header. The tensors' data follows later.
    if (!writer_create(w, path).empty())
        return w->wrong;
    uint64_t length = text.size();
    w->expected = 8 + length + offset;
    writer_put(*w, &length, 8);
    writer_put(*w, text.data(), text.size());
    return w->wrong;
}

// Append a tensor's values in the file's type, and count those that it cannot hold.
inline void writer_put(FileWriter& w, const std::vector<float>& values, Type type) {
    if (values.empty()) return;
    std::vector<unsigned char> bytes(values.size() * type_bytes(type));
    float_to_type(bytes.data(), values.data(), values.size(), type);
    for (float x : values)
        count_lost(w, x, as_written(x, type));
    writer_put(w, bytes.data(), bytes.size());
}

} // namespace llmc
