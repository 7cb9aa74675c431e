// joined_experts.h - gpt-oss' experts in files: one tensor for all of them, also in MXFP4
//   mlp.experts.gate_up_proj   (E,C,2F)   gate and up side by side: channel 2f is gate's f, 2f + 1
//                                         up's; [in, out], as Conv1D
//   mlp.experts.down_proj      (E,F,C)
//   ..._bias                   (E,2F) (E,C)
//   MXFP4 (the OCP Microscaling specification) has two tensors for a matrix, as [out, in]:
//     ..._blocks   U8 (E,out,in/32,16)   codes of E2M1, 32 in a block; of two in a byte the lower
//                                        four bits come first
//     ..._scales   U8 (E,out,in/32)      a block's power of two, plus 127
//   Codes become the values that they stand for. Exports are never in MXFP4.
//   In the model gate, up and down are stacks of [out, in], as in other families.
#pragma once
#include "../io/hf_files.h"
#include "../io/safetensors.h"
#include "../model.h"
#include "../text.h"
#include "prequantised.h"

namespace llmc {

// Whether files join a parameter with those of other experts.
inline bool joins_experts(const Shape& s, const Parameter& p) {
    return s.expert_bias && p.name.find("{}") != std::string::npos;
}

// The tensor that holds a parameter: every step-th output from `first` on.
struct JoinedPlace {
    std::string tensor;
    size_t first = 0, step = 1;
};
inline JoinedPlace joined_place(const Parameter& p) {
    // "...experts.{}.gate_proj.weight" is "...experts.gate_up_proj".
    size_t at = p.name.find("{}.");
    std::string rest = p.name.substr(at + 3);
    bool up = rest.starts_with("up_");
    bool down = rest.starts_with("down_");
    std::string tensor = p.name.substr(0, at) + (down ? "down_proj" : "gate_up_proj");
    if (rest.ends_with(".bias")) tensor += "_bias";

    // Gate and up share the outputs of their tensor.
    return {tensor, size_t(up), size_t(down ? 1 : 2)};
}

// The shape of that tensor.
inline std::vector<size_t> joined_shape(const Parameter& p) {
    // The input's axis comes before the output's; a bias has none.
    size_t outputs = p.rows() / p.stack * joined_place(p).step;
    if (p.shape.size() == 1)
        return {p.stack, outputs};
    return {p.stack, p.cols(), outputs};
}

// Check the tensors of a parameter, and mark them as used.
inline std::string check_joined(const FindTensor& find, const Parameter& p,
                                std::set<std::string>* used) {
    std::string name = joined_place(p).tensor;
    size_t outputs = joined_shape(p).back();
    size_t blocks = p.cols() / 32;

    // Check one tensor; an error names both types and both shapes.
    auto check = [&](const std::string& part, std::vector<size_t> shape, bool floats) {
        const SafeTensor* t = find(part);
        if (!t) return "tensor " + part + " is missing";
        used->insert(t->name);
        bool type = floats ? is_float_dtype(t->dtype) : t->dtype == "U8";
        if (type && t->shape == shape)
            return std::string();
        return concat("tensor ", part, " is ", t->dtype, " ", shape_text(t->shape), ", and ",
                      floats ? "numbers" : "U8", " of ", shape_text(shape), " are wanted");
    };

    // Take codes where the tensor itself is not there.
    bool matrix = p.shape.size() == 2;
    bool codes = matrix && !find(name) && find(name + "_blocks");
    if (!codes)
        return check(name, joined_shape(p), true);
    if (p.cols() % 32)
        return concat("tensor ", name, "_blocks: blocks of 32 do not divide ", p.cols(), " inputs");
    std::string wrong = check(name + "_blocks", {p.stack, outputs, blocks, 16}, false);
    return wrong.empty() ? check(name + "_scales", {p.stack, outputs, blocks}, false) : wrong;
}

// The value of a code of E2M1.
inline float e2m1_value(int code) {
    // Two bits of exponent and one of mantissa; the fourth bit is the sign.
    const float values[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    float x = values[code & 7];
    return code & 8 ? -x : x;
}

// One expert's part (rows,cols) of a parameter, on ranks whose stage needs it. All ranks call.
template <typename N>
std::vector<float> bring_joined(HfFiles& h, const Parameter& p, size_t expert, N needs) {
    // One expert has `rows` outputs of this parameter, among `outputs` of the tensor.
    JoinedPlace place = joined_place(p);
    size_t rows = p.rows() / p.stack;
    size_t cols = p.cols();
    size_t outputs = rows * place.step;

    // Fill this parameter's outputs from value(output, input).
    std::vector<float> values(needs(h.reader.layout.pp.rank) ? rows * cols : 0);
    auto each = [&](auto value) {
        for (size_t i = 0; i < values.size(); i++) {
            size_t output = place.first + i / cols * place.step;
            values[i] = value(output, i % cols);
        }
    };

    // Read plain numbers, if the file has them.
    if (const SafeTensor* tensor = hf_find(h, place.tensor)) {
        size_t all = outputs * cols;
        std::vector<float> x = bring_floats(h, *tensor, expert * all, all, needs);
        each([&](size_t out, size_t in) { return x[in * outputs + out]; });
        return values;
    }

    // Bring an expert's part of the tensors of codes.
    auto bytes_of = [&](const char* part, size_t count) {
        std::vector<unsigned char> bytes(count);
        bring_chunks(h, *hf_find(h, place.tensor + part), expert * count, count, needs,
                     [&](const unsigned char* from, size_t at, size_t n) {
                         std::copy_n(from, n, bytes.data() + at);
                     });
        return bytes;
    };

    // Two codes lie in a byte, and 32 share a scale. The inputs of an output lie side by side.
    std::vector<unsigned char> codes = bytes_of("_blocks", outputs * cols / 2);
    std::vector<unsigned char> scales = bytes_of("_scales", outputs * cols / 32);
    each([&](size_t out, size_t in) {
        size_t at = out * cols + in;
        int code = codes[at / 2] >> (at % 2 ? 4 : 0);
        return std::ldexp(e2m1_value(code), int(scales[at / 32]) - 127);
    });
    return values;
}

// Put a parameter's values into its tensor. `tensor` holds gate's outputs already when up's come.
inline void join_experts(std::vector<float>* tensor, const Parameter& p,
                         const std::vector<float>& values) {
    JoinedPlace place = joined_place(p);
    size_t rows = p.rows() / p.stack;
    size_t cols = p.cols();
    size_t outputs = rows * place.step;
    tensor->resize(p.elements() * place.step);

    // Walk the parameter's elements, which lie as [out, in].
    for (size_t i = 0; i < values.size(); i++) {
        size_t expert = i / (rows * cols);
        size_t output = place.first + i / cols % rows * place.step;
        size_t input = i % cols;
        (*tensor)[(expert * cols + input) * outputs + output] = values[i];
    }
}

} // namespace llmc
