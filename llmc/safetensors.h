// safetensors.h - reading and writing safetensors files - github.com/huggingface/safetensors
//   A file: 8 bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, then the
//   tensors' bytes.
//   Reading maps the file and believes nothing: lengths, JSON, duplicates, shapes,
//   offsets, overlaps and holes are checked before a tensor is handed out. Writing streams into a
//   temporary file, syncs it, and renames it: a file of the final name is whole. Every function
//   returns "" or one line that says what is wrong; nothing exits or throws.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <map>
#include <set>
#include <string>
#include <vector>
#include <nlohmann/json.hpp>
#include "common.h"
#include "files.h"

struct SafeTensor {
    std::string name, dtype;
    std::vector<size_t> shape;
    const unsigned char* data = nullptr;
    size_t bytes = 0;
    size_t elements() const {
        size_t n = 1;
        for (size_t d : shape) n *= d;
        return n;
    }
};

struct SafeTensors {
    std::string path;
    void* map = nullptr;
    size_t bytes = 0;
    std::vector<SafeTensor> tensors; // by name
    std::map<std::string, std::string> metadata;
};

inline void safetensors_close(SafeTensors* s) {
    if (s->map) munmap(s->map, s->bytes);
    *s = {};
}

inline const SafeTensor* safetensors_find(const SafeTensors& s, const std::string& name) {
    auto it =
        std::lower_bound(s.tensors.begin(), s.tensors.end(), name,
                         [](const SafeTensor& t, const std::string& n) { return t.name < n; });
    return it != s.tensors.end() && it->name == name ? &*it : nullptr;
}

// ----------------------------------------------------------------------------
// element types

// bytes of an element; 0: a type that the format does not have
inline size_t dtype_bytes(const std::string& dtype) {
    static const std::map<std::string, size_t> known = {
        {"F64", 8}, {"F32", 4}, {"F16", 2},  {"BF16", 2},    {"I64", 8},
        {"I32", 4}, {"I16", 2}, {"I8", 1},   {"U64", 8},     {"U32", 4},
        {"U16", 2}, {"U8", 1},  {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};
    auto it = known.find(dtype);
    return it == known.end() ? 0 : it->second;
}

inline float half_to_float(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * float(mantissa) * 0x1p-24f;
    uint32_t u = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

// round to nearest, ties to even; too large becomes infinity, a NaN stays a NaN
inline uint16_t float_to_half(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    uint32_t sign = u >> 16 & 0x8000, absolute = u & 0x7fffffff;
    if (absolute > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (absolute >= 0x477ff000) return uint16_t(sign | 0x7c00); // from 65520 on
    if (absolute < 0x38800000) { // subnormal: a whole number of 2^-24
        float scaled = std::fabs(f) * 0x1p24f;
        return uint16_t(sign | uint32_t(std::nearbyintf(scaled)));
    }
    uint32_t rounded = absolute + 0xfff + (absolute >> 13 & 1);
    return uint16_t(sign | (rounded - 0x38000000) >> 13);
}

inline bool is_float_dtype(const std::string& d) {
    return d == "F32" || d == "F16" || d == "BF16" || d == "F64";
}

// `count` elements from `first` on, as floats
inline void tensor_to_float(float* out, const SafeTensor& t, size_t first, size_t count) {
    const unsigned char* p = t.data + first * dtype_bytes(t.dtype);
    #pragma omp parallel for
    for (size_t i = 0; i < count; i++) {
        double d;
        uint16_t h;
        if (t.dtype == "F32")
            memcpy(out + i, p + 4 * i, 4);
        else if (t.dtype == "F64")
            memcpy(&d, p + 8 * i, 8), out[i] = float(d);
        else
            memcpy(&h, p + 2 * i, 2),
                out[i] = t.dtype == "BF16" ? to_float(bf16{h}) : half_to_float(h);
    }
}

inline void float_to_type(void* out, const float* in, size_t count, Type type) {
    if (type == Type::F32) memcpy(out, in, count * 4);
    for (size_t i = 0; type != Type::F32 && i < count; i++)
        static_cast<uint16_t*>(out)[i] =
            type == Type::BF16 ? from_acc<bf16>(in[i]).bits : float_to_half(in[i]);
}

// ----------------------------------------------------------------------------
// reading

// JSON objects keep the last of two equal names: a file with a tensor twice must be found while
// parsing.
struct DuplicateKeys {
    std::vector<std::set<std::string>> open;
    std::string twice;
    bool operator()(int, nlohmann::json::parse_event_t event, nlohmann::json& value) {
        if (event == nlohmann::json::parse_event_t::object_start) open.push_back({});
        if (event == nlohmann::json::parse_event_t::object_end) open.pop_back();
        if (event == nlohmann::json::parse_event_t::key &&
            !open.back().insert(value.get<std::string>()).second)
            twice = value.get<std::string>();
        return true;
    }
};

inline std::string read_tensor_entry(SafeTensor* t, const nlohmann::json& entry, size_t body,
                                     size_t* begin) {
    if (!entry.is_object() || !entry.contains("dtype") || !entry.contains("shape") ||
        !entry.contains("data_offsets"))
        return "has no dtype, shape and data_offsets";
    const nlohmann::json &dtype = entry["dtype"], &shape = entry["shape"],
                         &offsets = entry["data_offsets"];
    if (!dtype.is_string()) return "has a dtype that is no text";
    t->dtype = dtype.get<std::string>();
    size_t width = dtype_bytes(t->dtype), elements = 1;
    if (!width) return "has the unknown dtype " + t->dtype;
    if (!shape.is_array()) return "has a shape that is no list";
    for (const nlohmann::json& d : shape) {
        // a list is not printed: printing recurses, and a header of brackets would end the stack
        if (!d.is_number_unsigned())
            return "has a shape with " + (d.is_structured() ? d.type_name() : d.dump()) +
                   ", which is no size";
        t->shape.push_back(d.get<size_t>());
        if (__builtin_mul_overflow(elements, t->shape.back(), &elements))
            return "has a shape too large for any file";
    }
    bool numbers = offsets.is_array() && offsets.size() == 2 && offsets[0].is_number_unsigned() &&
                   offsets[1].is_number_unsigned();
    if (!numbers) return "has data_offsets that are not two positions";
    size_t end = offsets[1].get<size_t>();
    *begin = offsets[0].get<size_t>();
    if (*begin > end || end > body)
        return "lies at " + std::to_string(*begin) + " to " + std::to_string(end) + " of " +
               std::to_string(body) + " bytes of data";
    t->bytes = end - *begin;
    if (elements > SIZE_MAX / width || t->bytes != elements * width)
        return "has " + std::to_string(t->bytes) + " bytes, its shape and dtype " + t->dtype +
               " need " +
               (elements > SIZE_MAX / width ? "more than there are"
                                            : std::to_string(elements * width));
    return "";
}

inline std::string read_safetensors_header(SafeTensors* s) {
    const unsigned char* file = static_cast<const unsigned char*>(s->map);
    if (s->bytes < 8)
        return "is " + std::to_string(s->bytes) + " bytes long, too short for a safetensors file";
    uint64_t length;
    memcpy(&length, file, 8);
    if (length > s->bytes - 8 || length > 100000000)
        return "its header is said to take " + std::to_string(length) + " bytes, the file has " +
               std::to_string(s->bytes) + ": truncated, or no safetensors file";
    DuplicateKeys keys;
    nlohmann::json header =
        nlohmann::json::parse(file + 8, file + 8 + length, std::ref(keys), false);
    if (header.is_discarded() || !header.is_object()) return "its header is no JSON object";
    if (!keys.twice.empty()) return "names " + keys.twice + " twice";
    size_t body = s->bytes - 8 - length;
    std::vector<std::pair<size_t, size_t>> spans;
    for (auto& [name, entry] : header.items()) {
        if (name == "__metadata__") {
            for (auto& [key, value] : entry.items())
                if (value.is_string()) s->metadata[key] = value.get<std::string>();
            continue;
        }
        SafeTensor t;
        t.name = name;
        size_t begin = 0;
        std::string wrong = read_tensor_entry(&t, entry, body, &begin);
        if (!wrong.empty()) return "tensor " + name + " " + wrong;
        t.data = file + 8 + length + begin;
        spans.push_back({begin, begin + t.bytes});
        s->tensors.push_back(t);
    }
    std::sort(spans.begin(), spans.end());
    size_t reached = 0;
    for (auto [begin, end] : spans) {
        if (begin < reached)
            return "two tensors overlap at byte " + std::to_string(begin) + " of the data";
        if (begin > reached)
            return "bytes " + std::to_string(reached) + " to " + std::to_string(begin) +
                   " of the data belong to no tensor";
        reached = end;
    }
    if (reached != body)
        return "the tensors end at byte " + std::to_string(reached) + " of " +
               std::to_string(body) + " bytes of data";
    return "";
}

// The file's bytes, mapped; safetensors_close ends that.
inline std::string map_file(SafeTensors* s, const std::string& path) {
    *s = {};
    s->path = path;
    int fd = open(path.c_str(), O_RDONLY);
    if (fd < 0) return path + ": " + strerror(errno);
    struct stat st;
    bool good = fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size > 0;
    if (good)
        s->bytes = size_t(st.st_size),
        s->map = mmap(nullptr, s->bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (!good || s->map == MAP_FAILED) return s->map = nullptr, path + ": is empty or no file";
    return "";
}

inline std::string safetensors_open(SafeTensors* s, const std::string& path) {
    std::string wrong = map_file(s, path);
    if (!wrong.empty()) return wrong;
    wrong = read_safetensors_header(s);
    if (!wrong.empty()) return safetensors_close(s), path + ": " + wrong;
    std::sort(s->tensors.begin(), s->tensors.end(),
              [](const SafeTensor& a, const SafeTensor& b) { return a.name < b.name; });
    return "";
}

// ----------------------------------------------------------------------------
// writing: names, types and shapes first, then the data in the same order

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

inline std::string writer_open(FileWriter* w, const std::string& path,
                               const std::vector<TensorSpec>& specs,
                               const std::map<std::string, std::string>& metadata) {
    nlohmann::ordered_json header;
    if (!metadata.empty()) header["__metadata__"] = metadata;
    size_t offset = 0;
    for (const TensorSpec& t : specs) {
        header[t.name] = {{"dtype", type_name(t.type)},
                          {"shape", t.shape},
                          {"data_offsets", {offset, offset + t.bytes()}}};
        offset += t.bytes();
    }
    // text that is not UTF-8 (a path in the metadata, say) gets replacement characters, where plain
    // dump() throws
    std::string text = specs.empty() && metadata.empty()
                           ? "{}"
                           : header.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    text.resize(round_up(text.size(), 8), ' ');
    if (!writer_create(w, path).empty()) return w->wrong;
    uint64_t length = text.size();
    w->expected = 8 + length + offset;
    writer_put(*w, &length, 8);
    writer_put(*w, text.data(), text.size());
    return w->wrong;
}

inline void writer_put(FileWriter& w, const std::vector<float>& values, Type type) {
    if (values.empty()) return;
    std::vector<unsigned char> bytes(values.size() * type_bytes(type));
    float_to_type(bytes.data(), values.data(), values.size(), type);
    writer_put(w, bytes.data(), bytes.size());
}
