// model.h - what a model is: its shape, and its parameters, buckets, activations as tables
//   A model is a row of layers: layer 0 embeds, layers 1..L are blocks, layer L+1 is the head
//   (final norm, logits, loss). Layers and buckets are two things. A layer is what runs; a bucket
//   is one flat buffer of parameters, the unit that is updated (and, over many ranks, gathered,
//   reduced and sharded). A layer uses one or more buckets:
//     "embedding"  the token table           layer 0, and layer L+1 too when the head is tied to it
//     "positions"  the table of positions    layer 0 (learned positions only)
//     "block.l"    a block's parameters      layer l + 1
//     "block.l.experts"  its experts' stacks  layer l + 1 (models with experts only)
//     "adapter.l"  its adapters' matrices     layer l + 1 (then no other bucket is trained)
//     "head"       final norm, untied head   layer L+1
//   Inside a bucket each parameter starts at a multiple of 128 elements (256 bytes in bf16), where
//   buckets.h says: offsets are the same in the weight, gradient, master and moment buffers. Tables
//   are written once, in gpt2.h and llama.h, as functions that visit their rows: one visitor makes
//   the table, another binds a block's pointers.
#pragma once
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>
#include "fp8_delayed.cuh"
#include "layout.h"
#include "moe.cuh"
#include "objective.cuh"
#include "rope.cuh"
#include "variants.h"

namespace llmc {

// ----------------------------------------------------------------------------
// shape

// Adapters by their matrix, without ".weight": "h.0.attn.c_attn".
struct Adapter {
    size_t rank;
    double scale; // of what it adds
    float rate_of_b = 1; // B's learning rate, by A's
};
typedef std::map<std::string, Adapter> Adapters;

enum class Family { GPT2, LLAMA, NEOX, MIXTRAL, DEEPSEEK };
enum class Position { LEARNED, ROPE, ALIBI };

// The default is GPT-2's: presets and config.json state only what differs.
struct Shape : Variant {
    Family family = Family::GPT2;
    std::string hf_type = "gpt2";   // model_type in config.json: gpt2, llama, gemma2, ...
    size_t L = 0;                   // blocks
    size_t NH = 0, NKV = 0, HS = 0; // heads, key/value heads, head size
    size_t C = 0, F = 0;            // channels, ffn width; with experts that of one of them
    size_t E = 0, K = 0;            // experts of each block, and how many a token goes through
    Router router = Router::RENORMALISED;
    float gate_scale = 1;           // of all gates
    size_t ffn_beside = 0;          // a layer's: the ffn in the place of its experts, or shared
    size_t V = 0;                   // vocabulary
    size_t P = 0;                   // positions the model is made for: T and prompts stay below
    Position position = Position::LEARNED;
    bool qkv_bias = true; // of GPT-2 and Qwen2
    bool o_bias = false, mlp_bias = false; // of some Llamas: on o; on gate, up and down
    bool tied = true;     // the head is the token table
    float norm_eps = 1e-5f;
    double rope_theta = 10000;
    RopeScaling rope_scaling;
    size_t logits_bytes = 0; // the head's logits at a time; 0: as head.h chooses for the device
    size_t logits_rows = 64; // a chunk of them is a multiple of these rows
    Fp8 fp8 = Fp8::NONE;     // the products of blocks, but for attention's
    Fp8Rule fp8_rule;        // of DELAYED
    bool fp8_kept = true;    // weights are cast once a step (casts.h), else at each product
    double balance = 0, z_loss = 0; // the router's terms in the loss that is trained (moe.cuh)
    Objective objective = {};                 // of the plan that runs: the head's
    std::shared_ptr<const Adapters> adapters; // they alone are trained; null: none (adapters.h)

    // A tensor-parallel rank sees its own NH, NKV, F and V (tensor_parallel.h); V may be 0.
    size_t vocab_start = 0; // its first token
    size_t padded = 0;      // rows of its tables, 0: V rounded up
    size_t row_ranks = 1;   // ranks that share the rows of the residual stream
    size_t expert_ranks = 1; // ranks that share out the experts (expert_parallel.h)

    // The vocabulary as tables hold it: padded with zero rows that never reach a file.
    size_t Vp() const { return padded ? padded : round_up(V, 128); }
};

// The shape as a layer has it: an ffn, experts, or both.
inline Shape layer_shape(Shape s, int layer) {
    // Most families without experts have their ffn in F, and no width beside it.
    bool sparse = s.E && is_sparse(s, layer);
    s.ffn_beside = sparse ? s.shared_F : s.dense_F;
    if (!sparse) s.E = s.K = 0;
    return s;
}

// Channels of all heads in each of attention's two products: the mean, for values may be narrower.
inline double attention_channels(const Shape& s) {
    size_t values = s.HS_v ? s.HS_v : s.HS;
    return double(s.NH * (s.HS + values)) / 2;
}

// Shapes as their papers state them: a head has C / NH channels, GPT-2's ffn 4 C.
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

// ----------------------------------------------------------------------------
// parameters

struct Init {
    float value; // every element, or
    float std;   // normal with this deviation where not 0
};
constexpr Init ZEROS = {0, 0}, ONES = {1, 0};
inline Init normal_init(double std) { return {0, float(std)}; }

// Why tensor-parallel ranks hold parts of a gradient that must be summed. ROWS: each rank
// saw its own rows, which is so only with sequence parallelism. HEADS: each rank saw its
// own heads, always.
enum class Partial : uint8_t { ROWS, HEADS };

// How tensor parallelism cuts a parameter: along `axis` of its shape, which holds `parts` equal
// pieces side by side (3 for GPT-2's q, k, v in one matrix), each cut in tp. Key/value heads stay
// whole: of fewer `units` than ranks, tp / units neighbours hold the same one.
struct Shard {
    int axis = -1; // -1: every rank holds the whole
    int parts = 1;
    int units = 0;                   // 0: any number of cuts
    Partial partial = Partial::ROWS; // of a whole parameter's gradient
};

// The number of ranks that hold the same piece.
inline int replication(const Shard& s, int tp) {
    if (s.axis < 0) return tp;
    return s.units && tp > s.units ? tp / s.units : 1;
}

// A row of the parameter table, and the piece of it that this rank has.
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
    int pieces = 1;    // pieces that tensor parallelism makes of it
    size_t stack = 1;  // equal matrices one below the other, which files hold apart: experts
    Axis experts = {}; // of a stack: the ranks that share it out
    size_t offset = 0; // this rank's piece: elements from the start of its bucket
    int adapter = -1;  // the row of its adapter's A, which its B follows; -1: it has none
    int matrix = -1;   // its number among the matrices of all blocks; -1: it is none

    size_t rows() const { return shape[0]; }
    size_t cols() const { return shape.size() == 2 ? shape[1] : 1; }
    size_t elements() const { return rows() * cols(); }
    size_t file_elements() const { return file_rows * cols(); }

    // This rank's piece.
    size_t local_rows() const { return local_elements() / local_cols(); }
    size_t local_cols() const { return cols() / (shard.axis == 1 ? size_t(pieces) : 1); }
    size_t local_elements() const { return elements() / size_t(pieces * experts.size); }
};

// Buckets are found by role, never by position: a technique may add its own anywhere.
enum class Role : uint8_t {
    TOKENS,    // the token table, and the head where it is tied
    POSITIONS, // the table of learned positions
    BLOCK,     // one block's parameters
    EXPERTS,   // its experts' matrices, in stacks
    ADAPTER,   // low-rank matrices beside its own
    HEAD       // final norm, untied head
};

// Parameters lie in a bucket by who must add their gradients, so that each sum is one range:
//   [0, by_heads)        every tp rank holds them, and adds parts from its heads: norms of q and k
//   [by_heads, common)   every tp rank holds them: norms, biases of the stream
//   [common, shared)     key/value heads that several tp ranks hold
//   [shared, elements)   this tp rank's own
struct Bucket {
    std::string name;
    Role role;
    Group group;               // the ranks that reduce and shard it
    std::vector<int> layers;   // the layers that use it
    bool trainable = true;     // a frozen bucket has no gradient and no update
    int first = 0, count = 0;  // its parameters in the table
    std::vector<int> in_order = {}; // its parameters by offset
    size_t elements = 0;       // the end of the last parameter rounded up to 128
    size_t by_heads = 0, common = 0, shared = 0;
    size_t shard = 0; // elements of a shard that cuts no matrix (buckets.h); 0: cut anywhere

    bool tied() const { return layers.size() > 1; }
};

// The tables that every plan reads: parameters and buckets, as one tensor-parallel rank has them.
struct Model {
    Shape shape; // whole
    int tp = 1, tp_rank = 0;
    int matrices = 0; // of all blocks
    std::vector<Parameter> parameters;
    std::vector<Bucket> buckets;

    int layers() const { return int(shape.L) + 2; }
    int head() const { return int(shape.L) + 1; }
    bool is_block(int layer) const { return layer > 0 && layer < head(); }
};

inline bool uses(const Bucket& bucket, int layer) {
    return std::count(bucket.layers.begin(), bucket.layers.end(), layer) > 0;
}

// The buckets that a layer uses, in the table's order.
inline std::vector<int> buckets_of(const Model& m, int layer) {
    std::vector<int> found;
    for (int b = 0; b < int(m.buckets.size()); b++)
        if (uses(m.buckets[b], layer))
            found.push_back(b);
    return found;
}

// The bucket of a role that a layer uses; -1: there is none.
inline int find_bucket(const Model& m, Role role, int layer) {
    for (int b : buckets_of(m, layer))
        if (m.buckets[b].role == role) return b;
    return -1;
}

// Every parameter once, without padding: what "a model of N parameters" counts.
inline size_t parameter_count(const Model& m) {
    size_t n = 0;
    for (const Parameter& p : m.parameters)
        n += p.file_elements();
    return n;
}

// Open a bucket: the parameters that follow belong to it.
inline void add_bucket(Model& m, const std::string& name, Role role, std::vector<int> layers) {
    Group group = role == Role::EXPERTS ? Group::EXPERTS : Group::DATA;
    Bucket bucket = {name, role, group, layers};
    bucket.first = int(m.parameters.size());
    m.buckets.push_back(bucket);
}

// Append a parameter to the last bucket.
inline void add_parameter(Model& m, Parameter p) {
    p.bucket = int(m.buckets.size()) - 1;
    p.pieces = m.tp / replication(p.shard, m.tp);
    if (m.buckets.back().role == Role::BLOCK && p.shape.size() == 2) p.matrix = m.matrices++;
    m.buckets.back().count++;
    m.parameters.push_back(p);
}

// ----------------------------------------------------------------------------
// activations

// A level of recomputation says what a block makes again for its backward pass. Each but NONE drops
// the outputs of norms and activation functions; the later ones also what products and attention
// made, branch by branch.
enum class Recompute { NONE, SELECTIVE, ATTN, FFN, FULL };
inline bool redoes_attn(Recompute r) { return r == Recompute::ATTN || r == Recompute::FULL; }
inline bool redoes_ffn(Recompute r) { return r == Recompute::FFN || r == Recompute::FULL; }

// The words of --recompute, in the order of the levels.
constexpr int RECOMPUTE_LEVELS = 5;
inline const char* recompute_name(Recompute r) {
    static const char* names[RECOMPUTE_LEVELS] = {"none", "selective", "attention", "ffn", "full"};
    return names[int(r)];
}

// A level for each layer, by its number; layers behind the last one given have the same as that.
// One level alone is that of all layers. Embedding and head have no activations of the table, so
// theirs means nothing.
struct RecomputeLevels {
    std::vector<Recompute> given;

    RecomputeLevels(Recompute all = Recompute::NONE) : given{all} {}
    RecomputeLevels(const std::vector<Recompute>& levels) : given(levels) {}
    Recompute of(int layer) const { return given[std::min(size_t(layer), given.size() - 1)]; }
};

// When a row is born, and what makes it: that decides which levels of recomputation drop it.
//   CHEAP     the output of a norm or an activation function
//   ATTN      products and attention of the first branch, and the residual stream behind it
//   FFN       products of the second branch
//   ROUTING   the choice of experts, which no level drops: R must not choose others
//   GRADIENT  born in the backward pass
enum class Keep { CHEAP, ATTN, FFN, ROUTING, GRADIENT };

// Who reads it last: the backward pass's input half (B), or its weight half (W).
enum class Last { B, W };

// A row of the activation table: elements and bytes on this rank, for one micro-batch.
struct Activation {
    const char* name;
    size_t elements;
    size_t bytes;
    Keep keep;
    Last last;
};

// Whether the forward pass drops a row because R makes it again.
inline bool recomputed(Keep keep, Recompute level) {
    // Gradients are made once, whatever the level is.
    switch (keep) {
    case Keep::CHEAP: return level != Recompute::NONE;
    case Keep::ATTN: return redoes_attn(level);
    case Keep::FFN: return redoes_ffn(level);
    case Keep::ROUTING:
    case Keep::GRADIENT: return false;
    }
    return false;
}

} // namespace llmc
