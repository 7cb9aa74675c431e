// hf_places.h - where a parameter is in the files of a Hugging Face folder: tensor, rows, order
//   Most parameters have a tensor of their own name, [out, in].
//   GPT-2     matrices are [in, out] (Conv1D)
//   Phi-3     q, k, v share a tensor, and so do gate and up
//   GPT-NeoX  q, k, v of one head follow each other, then those of the next
//   experts   a tensor for each; in the model gate, up and down are stacks of all
//   gpt-oss   one tensor for all experts, as Conv1D:
//             mlp.experts.gate_up_proj   (E,C,2F)   gate and up side by side: channel 2f is gate's
//                                                   f, 2f + 1 up's
//             mlp.experts.down_proj      (E,F,C)
//             ..._bias                   (E,2F) (E,C)
#pragma once
#include <string>
#include <vector>
#include "../model.h"

namespace llmc {

// A tensor's name for matrix `number` of a stack: the number replaces {}.
inline std::string stack_name(const std::string& name, size_t number) {
    // A parameter that is not a stack keeps its name.
    size_t at = name.find("{}");
    if (at == std::string::npos) return name;
    return name.substr(0, at) + std::to_string(number) + name.substr(at + 2);
}

// ----------------------------------------------------------------------------
// experts that share a tensor

// Whether files join a parameter with those of other experts.
inline bool joins_experts(const Shape& s, const Parameter& p) {
    return s.experts.bias && p.name.find("{}") != std::string::npos;
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

// ----------------------------------------------------------------------------
// all parameters

// The place of a parameter in a file: a tensor, which may also hold rows of other parameters.
struct HfPlace {
    std::string tensor;
    size_t first, rows; // the parameter's first row, and all rows of the tensor
};
// Find the place of a parameter, or of matrix `number` of a stack.
inline HfPlace hf_place(const Shape& s, const Parameter& p, size_t number = 0) {
    size_t Q = s.NH * s.HS, KV = s.NKV * s.HS;
    struct Joined {
        const char *part, *whole;
        size_t first, rows;
    };

    // Look among the joined tensors. Only Phi-3 has them, and it has no biases.
    const Joined joined[] = {{"self_attn.q_proj", "self_attn.qkv_proj", 0, Q + 2 * KV},
                             {"self_attn.k_proj", "self_attn.qkv_proj", Q, Q + 2 * KV},
                             {"self_attn.v_proj", "self_attn.qkv_proj", Q + KV, Q + 2 * KV},
                             {"mlp.gate_proj", "mlp.gate_up_proj", 0, 2 * s.F},
                             {"mlp.up_proj", "mlp.gate_up_proj", s.F, 2 * s.F}};
    for (const Joined& j : joined) {
        size_t at = p.name.find(j.part);
        if (s.hf_type != "phi3" || at == std::string::npos)
            continue;
        return {p.name.substr(0, at) + j.whole + ".weight", j.first, j.rows};
    }

    // gpt-oss has one tensor for all experts, gate and up side by side. The first one lists it.
    if (joins_experts(s, p)) {
        JoinedPlace place = joined_place(p);
        return {place.tensor, number + place.first, p.file_rows / p.stack};
    }

    // Every other parameter, and each matrix of a stack, has a tensor of its own. Rows beyond
    // file_rows are the padding of the vocabulary, and are in no file.
    return {stack_name(p.name, number), 0, p.file_rows / p.stack};
}

// The shape of a parameter's tensor in a file: without padding, and transposed for Conv1D.
inline std::vector<size_t> file_shape(const Parameter& p, size_t rows) {
    std::vector<size_t> shape = p.shape;
    shape[0] = rows;
    if (p.transposed && shape.size() == 2)
        std::swap(shape[0], shape[1]);
    return shape;
}
inline std::vector<size_t> file_shape(const Parameter& p) { return file_shape(p, p.file_rows); }

// Transpose x (rows,cols) into (cols,rows), for Conv1D's matrices on their way in and out.
inline std::vector<float> transpose(const std::vector<float>& x, size_t rows, size_t cols) {
    std::vector<float> y(rows * cols); // (cols,rows)
    // Each thread writes whole rows of y, so threads share cache lines only at their borders.
    #pragma omp parallel for
    for (size_t c = 0; c < cols; c++)
        for (size_t r = 0; r < rows; r++)
            y[c * rows + r] = x[r * cols + c];
    return y;
}

// Whether files hold q, k and v of one head, then those of the next: GPT-NeoX's do.
inline bool ordered_by_heads(const Parameter& p) {
    return p.name.find("attention.query_key_value.") != std::string::npos;
}

// Swap the two outer dimensions: x (a,b,rest) becomes (b,a,rest).
inline std::vector<float> swap_outer(const std::vector<float>& x, size_t a, size_t b) {
    // Copy runs of `rest` elements.
    size_t rest = x.size() / (a * b);
    std::vector<float> y(x.size());
    for (size_t i = 0; i < a; i++)
        for (size_t j = 0; j < b; j++)
            std::copy_n(&x[(i * b + j) * rest], rest, &y[(j * a + i) * rest]);
    return y;
}

// Reorder the rows of x (NH*HS,C) within each head, for RoPE: other projects' turns rows 2i and
// 2i + 1 together, Hugging Face's i and i + HS/2. to_halves: from pairs to
// halves, else from halves to pairs.
inline std::vector<float> reorder_rotary(const std::vector<float>& x, size_t HS, size_t C,
                                         bool to_halves) {
    std::vector<float> y(x.size());
    for (size_t row = 0; row < x.size() / C; row++) {
        size_t e = row % HS; // row in its head
        size_t half = row - e + e / 2 + e % 2 * (HS / 2);
        size_t from = to_halves ? row : half;
        size_t to = to_halves ? half : row;
        std::copy_n(&x[from * C], C, &y[to * C]);
    }
    return y;
}

} // namespace llmc
