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

// Whether files join a parameter with those of other experts.
inline bool joins_experts(const Shape& s, const Parameter& p) {
    return s.experts.bias && p.name.find("{}") != std::string::npos;
}

// The shape of a parameter's tensor in a file: without padding, and transposed for Conv1D.
inline std::vector<size_t> file_shape(const Parameter& p, size_t rows) {
    std::vector<size_t> shape = p.shape;
    shape[0] = rows;
    if (p.transposed && shape.size() == 2)
        std::swap(shape[0], shape[1]);
    return shape;
}

// The place of a parameter, or of one matrix of a stack: a block of a tensor, which has `outputs`
// outputs. The matrix has those from `first` on, every step-th.
struct HfPlace {
    std::string tensor = "";
    std::vector<size_t> shape = {}; // of the whole tensor
    size_t begin = 0, outputs = 0;  // the block's first element
    size_t first = 0, step = 1;
    bool turned = false;            // inputs come before outputs
    bool begins_tensor() const { return begin == 0 && first == 0; }
};

// "...experts.{}.gate_proj.weight" is in "...experts.gate_up_proj".
inline HfPlace joined_place(const Parameter& p, size_t number) {
    size_t at = p.name.find("{}.");
    std::string rest = p.name.substr(at + 3);
    bool down = rest.starts_with("down_");
    HfPlace place = {p.name.substr(0, at) + (down ? "down_proj" : "gate_up_proj")};
    if (rest.ends_with(".bias"))
        place.tensor += "_bias";

    // Gate and up share the outputs of their tensor.
    place.first = rest.starts_with("up_");
    place.step = down ? 1 : 2;
    place.outputs = p.rows() / p.stack * place.step;
    place.begin = number * place.outputs * p.cols();
    place.turned = true;
    place.shape = {p.stack, p.cols(), place.outputs};
    if (p.shape.size() == 1)
        place.shape = {p.stack, place.outputs};
    return place;
}

// Find the place of a parameter, or of matrix `number` of a stack.
inline HfPlace hf_place(const Shape& s, const Parameter& p, size_t number = 0) {
    if (joins_experts(s, p)) return joined_place(p, number);
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
        std::string tensor = p.name.substr(0, at) + j.whole + ".weight";
        return {tensor, file_shape(p, j.rows), j.first * p.cols(), p.file_rows};
    }

    // Every other parameter, and each matrix of a stack, has a tensor of its own. Rows beyond
    // file_rows are the padding of the vocabulary, and are in no file.
    size_t rows = p.file_rows / p.stack;
    HfPlace place = {stack_name(p.name, number), file_shape(p, rows)};
    place.outputs = rows;
    place.turned = p.transposed && p.shape.size() == 2;
    return place;
}

// Append a matrix [out, in] that is in a block.
inline void take_from_block(std::vector<float>* matrix, const std::vector<float>& block,
                            const HfPlace& place, size_t cols) {
    size_t begin = matrix->size();
    matrix->insert(matrix->end(), block.begin(), block.end());
    if (!place.turned || block.empty()) return;

    // Each thread writes whole rows, so threads share cache lines only at their borders.
    size_t rows = place.outputs / place.step;
    matrix->resize(begin + rows * cols);
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++) {
        size_t output = place.first + r * place.step;
        float* row = &(*matrix)[begin + r * cols];
        for (size_t c = 0; c < cols; c++)
            row[c] = block[c * place.outputs + output];
    }
}

// Put a matrix [out, in] into its block of a tensor, whose inputs come before outputs.
inline void put_into_block(std::vector<float>* tensor, const float* matrix, const HfPlace& place,
                           size_t cols) {
    size_t rows = place.outputs / place.step;
    tensor->resize(std::max(tensor->size(), place.begin + place.outputs * cols));
    #pragma omp parallel for
    for (size_t c = 0; c < cols; c++) {
        float* outputs = &(*tensor)[place.begin + c * place.outputs + place.first];
        for (size_t r = 0; r < rows; r++)
            outputs[r * place.step] = matrix[r * cols + c];
    }
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
