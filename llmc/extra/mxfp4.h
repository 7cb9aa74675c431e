// mxfp4.h - gpt-oss' experts in files of MXFP4, expanded as they are read
//   The format is one of the OCP Microscaling specification. A matrix of all experts is two
//   tensors (hf_places.h says how outputs are joined), [out, in]:
//     NAME_blocks   U8 (E,out,in/32,16)   codes of E2M1, 32 in a block; of two in a byte the lower
//                                         four bits come first
//     NAME_scales   U8 (E,out,in/32)      a block's power of two, plus 127
//   Codes become the values that they stand for. Exports are never in MXFP4.
//   A dialect of folders (tensor_source.h).
#pragma once
#include <cmath>
#include <string>
#include <vector>
#include "../io/hf_files.h"
#include "../io/hf_places.h"
#include "../io/one_reader.h"
#include "../io/safetensors.h"
#include "../io/tensor_source.h"
#include "../model.h"
#include "../comm/text.h"
#include "../optimizer.h"

namespace llmc {

// Check a parameter's two tensors, and mark them as used.
inline std::string check_mxfp4(const HfFiles& h, const Parameter& p, UsedTensors* used) {
    HfPlace place = joined_place(p, 0);
    std::string name = place.tensor;
    size_t blocks = p.cols() / 32;
    if (p.cols() % 32)
        return concat("tensor ", name, "_blocks: blocks of 32 do not divide ", p.cols(), " inputs");

    // Check one tensor; an error names both types and both shapes.
    auto check = [&](const std::string& part, std::vector<size_t> shape) {
        const SafeTensor* t = hf_find(h, part);
        if (!t) return "tensor " + part + " is missing";
        used->names.insert(t->name);
        if (t->dtype == "U8" && t->shape == shape)
            return std::string();
        return concat("tensor ", part, " is ", t->dtype, " ", shape_text(t->shape), ", and U8 of ",
                      shape_text(shape), " are wanted");
    };
    LLMC_TRY(check(name + "_blocks", {p.stack, place.outputs, blocks, 16}));
    return check(name + "_scales", {p.stack, place.outputs, blocks});
}

// The value of a code of E2M1.
inline float e2m1_value(int code) {
    // Two bits of exponent and one of mantissa; the fourth bit is the sign.
    const float values[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    float x = values[code & 7];
    return code & 8 ? -x : x;
}

// Read a parameter on the stages that need it, one expert after the other. All ranks call.
inline std::vector<float> read_mxfp4(SourceFolder& f, const Parameter& p) {
    // One expert has `rows` outputs of this parameter, among `outputs` of the tensor.
    HfPlace place = joined_place(p, 0);
    auto needs = stages_with(f.files.reader.layout, *f.model, p.bucket);
    bool mine = needs(f.files.reader.layout.pp.rank);
    size_t rows = p.rows() / p.stack;
    size_t cols = p.cols();
    size_t elements = place.outputs * cols; // of an expert

    std::vector<float> values;
    for (size_t e = 0; e < p.stack; e++) {
        // Bring an expert's part of both tensors.
        auto bytes_of = [&](const char* part, size_t count) {
            std::vector<unsigned char> bytes(count);
            bring_chunks(f.files, *hf_find(f.files, place.tensor + part), e * count, count, needs,
                         [&](const unsigned char* from, size_t at, size_t n) {
                             std::copy_n(from, n, bytes.data() + at);
                         });
            return bytes;
        };
        std::vector<unsigned char> codes = bytes_of("_blocks", elements / 2);
        std::vector<unsigned char> scales = bytes_of("_scales", elements / 32);

        // Two codes lie in a byte, and 32 share a scale. The inputs of an output lie side by side.
        for (size_t i = 0; mine && i < rows * cols; i++) {
            size_t at = (place.first + i / cols * place.step) * cols + i % cols;
            int code = codes[at / 2] >> (at % 2 ? 4 : 0);
            values.push_back(std::ldexp(e2m1_value(code), int(scales[at / 32]) - 127));
        }
    }
    return values;
}

// Wrap a source: matrices of experts that have blocks in place of their tensor are read from these.
inline std::string open_mxfp4(SourceFolder& f, TensorSource* source) {
    TensorSource inner = *source;
    auto is_coded = [&f](const Parameter& p) {
        bool joined = joins_experts(f.model->shape, p) && p.shape.size() == 2;
        std::string name = joined ? joined_place(p, 0).tensor : "";
        return joined && !hf_find(f.files, name) && hf_find(f.files, name + "_blocks");
    };
    source->check = [=, &f](const Parameter& p, UsedTensors* used) {
        return is_coded(p) ? check_mxfp4(f.files, p, used) : inner.check(p, used);
    };
    source->read = [=, &f](const Parameter& p, Stored wanted, SourceValues* to) {
        if (!is_coded(p)) return inner.read(p, wanted, to);
        to->floats = read_mxfp4(f, p);
        return std::string();
    };
    return "";
}

inline const Dialect MXFP4 = {{"mxfp4"}, open_mxfp4};

} // namespace llmc
