// model.h - what a model is: its shape, the presets, its parameters, buckets and activations as tables
//   A model is a row of layers: layer 0 embeds, layers 1..L are blocks, layer L+1 is the head (final
//   norm, logits, loss). Layers and buckets are two things. A layer is what runs; a bucket is one
//   flat buffer of parameters, the unit that is updated (and, over many ranks, gathered, reduced and
//   sharded). A layer uses one or more buckets:
//     "embedding"  the token table           layer 0, and layer L+1 too when the head is tied to it
//     "positions"  the table of positions    layer 0 (learned positions only)
//     "block.l"    a block's parameters      layer l + 1
//     "head"       final norm, untied head   layer L+1
//   Inside a bucket each parameter starts at a multiple of 128 elements (256 bytes in bf16): offsets
//   are the same in the weight, gradient, master and moment buffers.
//   Tables are written once, in gpt2.h and llama.h, as functions that visit their rows: one visitor
//   makes the table, another binds a block's pointers.
#pragma once
#include <string>
#include <vector>
#include "common.h"
#include "grid.h"

// ----------------------------------------------------------------------------
// shape

enum class Family { GPT2, LLAMA };
enum class Position { LEARNED, ROPE, ALIBI };

struct Shape {
    Family family = Family::GPT2;
    std::string hf_type = "gpt2";   // model_type in config.json: gpt2, llama, mistral, qwen2
    size_t L = 0;                   // blocks
    size_t NH = 0, NKV = 0, HS = 0; // heads, key/value heads, head size
    size_t C = 0, F = 0;            // channels, ffn width
    size_t V = 0;                   // vocabulary
    size_t P = 0;                   // positions the model is made for: T and prompts stay below
    Position position = Position::LEARNED;
    bool qkv_bias = true; // of GPT-2 and Qwen2
    bool tied = true;     // the head is the token table
    float norm_eps = 1e-5f;
    double rope_theta = 10000;
    RopeScaling rope_scaling;
    size_t sliding_window = 0;              // Mistral: keys further back are not seen; 0: none
    size_t logits_bytes = size_t(64) << 20; // the head's logits at a time: a chunk of rows
    // What a tensor-parallel rank sees (tensor_parallel.h): NH, NKV, F and V are its own; V may be 0.
    size_t vocab_start = 0; // its first token
    size_t padded = 0;      // rows of its tables, 0: V rounded up
    size_t row_ranks = 1;   // ranks that share the rows of the residual stream
    // padded with zero rows that never reach a file
    size_t Vp() const { return padded ? padded : round_up(V, 128); }
};

inline Shape gpt2_shape(size_t L, size_t NH, size_t C, size_t V = 50257, size_t P = 1024) {
    Shape s;
    s.L = L, s.NH = s.NKV = NH, s.HS = C / NH, s.C = C, s.F = 4 * C, s.V = V, s.P = P;
    return s;
}

inline Shape llama_shape(size_t L, size_t NH, size_t NKV, size_t C, size_t F, size_t V, size_t P,
                         double theta) {
    Shape s;
    s.family = Family::LLAMA, s.hf_type = "llama", s.position = Position::ROPE;
    s.L = L, s.NH = NH, s.NKV = NKV, s.HS = C / NH, s.C = C, s.F = F, s.V = V, s.P = P;
    s.qkv_bias = false, s.tied = false, s.rope_theta = theta;
    return s;
}

inline Shape llama31_shape(size_t L, size_t NH, size_t C, size_t F) {
    Shape s = llama_shape(L, NH, 8, C, F, 128256, 131072, 500000);
    s.rope_scaling = {8, 1, 4, 8192};
    return s;
}

inline Shape qwen2_shape(size_t L, size_t NH, size_t NKV, size_t C, size_t F) {
    Shape s = llama_shape(L, NH, NKV, C, F, 151936, 32768, 1000000);
    s.hf_type = "qwen2", s.qkv_bias = true, s.tied = true, s.norm_eps = 1e-6f;
    return s;
}

struct Preset {
    const char* name;
    Shape shape;
    const char* help;
};

inline std::vector<Preset> model_presets() {
    return {
        {"tiny", gpt2_shape(4, 4, 128, 256, 1024), "GPT-2 of 0.9M parameters over bytes"},
        {"tiny-llama", llama_shape(4, 4, 2, 128, 352, 256, 1024, 10000),
         "Llama of 0.8M parameters over bytes"},
        {"gpt2", gpt2_shape(12, 12, 768), "124M"},
        {"gpt2-medium", gpt2_shape(24, 16, 1024), "350M"},
        {"gpt2-large", gpt2_shape(36, 20, 1280), "774M"},
        {"gpt2-xl", gpt2_shape(48, 25, 1600), "1558M"},
        {"tinyllama-1.1b", llama_shape(22, 32, 4, 2048, 5632, 32000, 2048, 10000),
         "TinyLlama 1.1B"},
        {"llama2-7b", llama_shape(32, 32, 32, 4096, 11008, 32000, 4096, 10000), "Llama 2 7B"},
        {"llama3-8b", llama_shape(32, 32, 8, 4096, 14336, 128256, 8192, 500000), "Llama 3 8B"},
        {"llama3-70b", llama_shape(80, 64, 8, 8192, 28672, 128256, 8192, 500000), "Llama 3 70B"},
        {"llama3-405b", llama31_shape(126, 128, 16384, 53248), "Llama 3.1 405B"},
        {"qwen2.5-0.5b", qwen2_shape(24, 14, 2, 896, 4864), "Qwen2.5 0.5B"},
    };
}

// ----------------------------------------------------------------------------
// parameters

struct Init {
    float value; // every element, or
    float std;   // normal with this deviation where not 0
};
constexpr Init ZEROS = {0, 0}, ONES = {1, 0};
inline Init normal_init(double std) { return {0, float(std)}; }

// How tensor parallelism cuts a parameter: along `axis` of its shape, which holds `parts` equal
// pieces side by side (3 for GPT-2's q, k, v in one matrix), each cut in tp. Key/value heads stay
// whole: of fewer `units` than ranks, tp / units neighbours hold the same one.
struct Shard {
    int axis = -1; // -1: every rank holds the whole
    int parts = 1;
    int units = 0; // 0: any number of cuts
};
// Ranks that hold the same piece.
inline int replication(const Shard& s, int tp) {
    if (s.axis < 0) return tp;
    return s.units && tp > s.units ? tp / s.units : 1;
}

struct Parameter {
    std::string name;          // the Hugging Face name
    std::vector<size_t> shape; // (rows, cols) as [out, in], or (C); the vocabulary is padded here
    size_t file_rows;          // rows that a file holds: V of Vp, else shape[0]
    bool transposed;           // files hold [in, out] (GPT-2's Conv1D)
    Shard shard;
    Init init;
    bool decay;
    int layer; // the layer that defines it
    int bucket = 0;
    int pieces = 1;    // that tensor parallelism makes of it
    size_t offset = 0; // of this rank's piece, elements from the start of its bucket
    size_t rows() const { return shape[0]; }
    size_t cols() const { return shape.size() == 2 ? shape[1] : 1; }
    size_t elements() const { return rows() * cols(); }
    size_t file_elements() const { return file_rows * cols(); }
    // this rank's piece
    size_t local_rows() const { return rows() / (shard.axis == 0 ? size_t(pieces) : 1); }
    size_t local_cols() const { return cols() / (shard.axis == 1 ? size_t(pieces) : 1); }
    size_t local_elements() const { return elements() / size_t(pieces); }
};

// Of a tensor-parallel rank: first what all ranks have (norms, biases of the stream), then what
// some have (key/value heads), then what it alone has: gradients that ranks share are one range.
struct Bucket {
    std::string name;
    int first, count;          // its parameters in the table
    std::vector<int> in_order; // by offset
    size_t elements;           // padded: the end of the last parameter rounded up to 128
    size_t common, shared;     // ends of the first two groups
    bool trainable;            // a frozen bucket has no gradient, no update
    std::vector<int> layers;   // the layers that use it
    bool tied() const { return layers.size() > 1; }
};

struct Model {
    Shape shape; // whole
    int tp = 1;
    std::vector<Parameter> parameters;
    std::vector<Bucket> buckets;
    int layers() const { return int(shape.L) + 2; }
    int head() const { return int(shape.L) + 1; }
};

inline std::vector<int> buckets_of(const Model& m, int layer) {
    std::vector<int> found;
    for (size_t b = 0; b < m.buckets.size(); b++)
        for (int l : m.buckets[b].layers)
            if (l == layer) found.push_back(int(b));
    return found;
}

// Every parameter once, without padding: what "a model of N parameters" counts.
inline size_t parameter_count(const Model& m) {
    size_t n = 0;
    for (const Parameter& p : m.parameters) n += p.file_elements();
    return n;
}

inline int add_bucket(Model& m, const std::string& name, std::vector<int> layers) {
    m.buckets.push_back({name, int(m.parameters.size()), 0, {}, 0, 0, 0, true, layers});
    return int(m.buckets.size()) - 1;
}

// Append a parameter to the last bucket.
inline void add_parameter(Model& m, Parameter p) {
    p.bucket = int(m.buckets.size()) - 1;
    p.pieces = m.tp / replication(p.shard, m.tp);
    m.buckets.back().count++;
    m.parameters.push_back(p);
}

// When all are there: where each parameter lies in its bucket.
inline void place_parameters(Model& m) {
    for (Bucket& b : m.buckets) {
        auto place = [&](bool common, bool shared) {
            for (int i = b.first; i < b.first + b.count; i++) {
                Parameter& p = m.parameters[size_t(i)];
                if ((p.shard.axis < 0) != common || (p.shard.units > 0) != shared) continue;
                p.offset = b.elements;
                b.elements = round_up(p.offset + p.local_elements(), 128);
                b.in_order.push_back(i);
            }
            return b.elements;
        };
        b.common = place(true, false), b.shared = place(false, true), place(false, false);
    }
}

// Where a rank's elements lie in the whole parameter, as runs of consecutive elements: f(local,
// global, count). Initial weights, checkpoints and exports go through here, so that none depends on
// the layout.
template <typename F> void for_each_run(const Parameter& p, int tp_rank, int tp, F f) {
    size_t same = size_t(replication(p.shard, tp)), pieces = size_t(tp) / same;
    if (pieces == 1) return f(size_t(0), size_t(0), p.elements());
    size_t inner = p.shard.axis == 0 ? p.cols() : 1;
    size_t part = p.shape[size_t(p.shard.axis)] / size_t(p.shard.parts) * inner,
           run = part / pieces, piece = size_t(tp_rank) / same;
    for (size_t k = 0; k < p.elements() / part; k++) f(k * run, k * part + piece * run, run);
}

// ----------------------------------------------------------------------------
// activations

enum class Recompute { NONE, SELECTIVE, FULL };

// When a row is born, and which level of recomputation drops it after the forward pass.
//   KEPT      what only a matrix product or attention can make again; full recomputation drops it
//   CHEAP     norm and activation-function outputs: selective recomputation drops them too
//   GRADIENT  born in the backward pass
enum class Keep { KEPT, CHEAP, GRADIENT };
enum class Last {
    B,
    W
}; // who reads it last: the input half or the weight half of the backward pass

struct Activation {
    const char* name;
    size_t elements;
    size_t bytes;
    Keep keep;
    Last last;
};

inline bool recomputed(Keep keep, Recompute level) {
    return level == Recompute::FULL ? keep != Keep::GRADIENT
                                    : level == Recompute::SELECTIVE && keep == Keep::CHEAP;
}
