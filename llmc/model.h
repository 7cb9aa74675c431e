// model.h - what a model is: its shape, and its parameters, buckets, activations as tables
//   A model is a row of layers: layer 0 embeds, layers 1..L are blocks, layer L+1 is the head
//   (final norm, logits, loss). A layer is the unit that runs. A bucket is a flat buffer of
//   parameters, the unit that is updated (and over many ranks gathered, reduced and sharded).
//   A layer uses one or more buckets:
//     "embedding"  the token table           layer 0, and layer L+1 too when the head is tied to it
//     "positions"  the table of positions    layer 0 (learned positions only)
//     "block.l"    a block's parameters      layer l + 1
//     "block.l.experts"  its experts' stacks  layer l + 1 (only in models with experts)
//     "adapter.l[.experts]"  their adapters   layer l + 1 (only adapters are then trained)
//     "head"       final norm, untied head   layer L+1
//   Inside a bucket buckets.h places each parameter at a multiple of 128 elements (256 bytes in
//   bf16). Its offset is the same in the weight, gradient, master and moment buffers. Each table is
//   written once, in gpt2.h or llama.h, as a function that visits its rows: one visitor makes the
//   table, another one binds a block's pointers.
#pragma once
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>
#include "expert_capacity.cuh"
#include "fp8_delayed.cuh"
#include "layout.h"
#include "objective.cuh"
#include "rope.cuh"
#include "variants.h"

namespace llmc {

// ----------------------------------------------------------------------------
// shape

// Adapters by the name of their matrix, without ".weight": "h.0.attn.c_attn".
struct Adapter {
    size_t rank;
    double scale;         // multiplies the adapter's result
    float rate_of_b = 1; // B's learning rate divided by A's
};
typedef std::map<std::string, Adapter> Adapters;

// Adapters under a name, by which texts choose them (adapter_sets.h).
struct AdapterSet {
    std::string name;
    Adapters adapters;
};
typedef std::vector<AdapterSet> AdapterSets;

enum class Family { GPT2, LLAMA, NEOX, MIXTRAL, DEEPSEEK };
enum class Position { LEARNED, ROPE, ALIBI };

// The default is GPT-2's: presets and config.json state only what differs.
struct Shape : Variant {
    Family family = Family::GPT2;
    std::string hf_type = "gpt2";   // model_type in config.json: gpt2, llama, gemma2, ...
    size_t L = 0;                   // blocks
    size_t NH = 0, NKV = 0, HS = 0; // heads, key/value heads, head size
    size_t C = 0, F = 0;            // channels, ffn width; with experts the width of one expert
    size_t E = 0, K = 0;            // experts of each block, and how many each token goes through
    Router router = Router::RENORMALISED;
    float gate_scale = 1;           // multiplies the gates of all experts
    ExpertCapacity capacity;        // limits the tokens of an expert; a plan fills in the numbers
    size_t ffn_beside = 0;          // layer_shape(): width of shared experts, or of a dense ffn
    size_t V = 0;                   // vocabulary
    size_t P = 0;                   // positions that the model has: the limit of T and prompts
    Position position = Position::LEARNED;
    bool qkv_bias = true; // GPT-2 and Qwen2 have biases on q, k, v
    bool o_bias = false, mlp_bias = false; // some Llamas: biases on o; on gate, up and down
    bool tied = true;     // the head is the token table
    float norm_eps = 1e-5f;
    double rope_theta = 10000;
    RopeScaling rope_scaling;
    size_t logits_bytes = 0; // bytes of logits at a time; 0: head.h chooses for the device
    size_t logits_rows = 64; // a chunk of logits has a multiple of so many rows
    Fp8 fp8 = Fp8::NONE;     // fp8 in the products of blocks, attention's own left out
    Fp8Rule fp8_rule;        // how DELAYED chooses scales
    bool fp8_kept = true;    // cast weights once a step (casts.h), else at each product
    double balance = 0, z_loss = 0; // weights of the router's terms in the trained loss (moe.cuh)
    Objective objective = {};                 // the loss of the running plan, for the head
    std::shared_ptr<const Adapters> adapters; // if not null, only these are trained (adapters.h)
    std::shared_ptr<const AdapterSets> sets;  // if not null, each generated text chooses from these
    size_t prefix = 0; // if not 0, only so many keys and values of each layer are trained

    // A tensor-parallel rank sees its own NH, NKV, F and V (tensor_parallel.h); its V may be 0.
    size_t vocab_start = 0; // this rank's first token
    size_t padded = 0;      // rows of this rank's tables; 0: V rounded up
    size_t row_ranks = 1;   // ranks that share the rows of the residual stream
    size_t expert_ranks = 1, expert_rounds = 1; // who shares experts, and in how many rounds
    bool whole_experts = false; // tp ranks cut no expert, and each routes its own rows

    // The rows of a token table: the vocabulary, padded with zero rows that never reach a file.
    size_t Vp() const { return padded ? padded : round_up(V, 128); }
};

// The shape of one layer: a block has a dense ffn, experts, or both.
inline Shape layer_shape(Shape s, int layer) {
    // Families without experts keep their ffn's width in F: most of them leave ffn_beside at 0.
    bool sparse = s.E && is_sparse(s, layer);
    s.ffn_beside = sparse ? s.shared_F : s.dense_F;
    if (!sparse) s.E = s.K = 0;
    return s;
}

// Channels of all heads in one of attention's two products. Values may be narrower than keys, so
// this is the mean of both products.
inline double attention_channels(const Shape& s) {
    size_t values = s.HS_v ? s.HS_v : s.HS;
    return double(s.NH * (s.HS + values)) / 2;
}

// Elements of the cache for a token and layer: a key and a value of each head, or with latent
// attention the latent and the rotary part of all keys (latent_cache.h).
inline size_t cached_elements(const Shape& s) {
    return s.kv_latent ? s.kv_latent + s.rotary : 2 * s.NKV * s.HS;
}

// ----------------------------------------------------------------------------
// parameters

// A parameter's first value.
struct Init {
    float value; // every element, unless std is given
    float std;   // if not 0: normal numbers with this standard deviation
};
constexpr Init ZEROS = {0, 0}, ONES = {1, 0};
inline Init normal_init(double std) { return {0, float(std)}; }

// The reason why tensor-parallel ranks hold partial gradients that must be summed. ROWS: each rank
// saw its own rows, which is so only with sequence parallelism. HEADS: each rank saw its own heads,
// with sequence parallelism or without. EXPERTS: whole experts are summed over Group::EXPERTS,
// which has these ranks too.
enum class Partial : uint8_t { ROWS, HEADS, EXPERTS };

// How tensor parallelism cuts a parameter: along `axis` of its shape, which holds `parts` equal
// parts side by side (3 for GPT-2's q, k, v in one matrix), each cut in tp. Key/value heads stay
// whole: where there are fewer `units` than ranks, tp / units neighbours hold the same head.
struct Shard {
    int axis = -1; // -1: no rank cuts the parameter
    int parts = 1;
    int units = 0;                   // 0: a cut may fall anywhere
    Partial partial = Partial::ROWS; // axis -1: why its gradient is partial
};

// The number of tensor-parallel ranks that hold the same piece of a parameter. Those of whole
// experts are counted with their group instead.
inline int replication(const Shard& s, int tp) {
    if (s.partial == Partial::EXPERTS) return 1;
    if (s.axis < 0) return tp;
    return s.units && tp > s.units ? tp / s.units : 1;
}

// One row of the parameter table, and the piece of that parameter which this rank holds.
struct Parameter {
    std::string name;          // the Hugging Face name
    std::vector<size_t> shape; // (rows, cols) as [out, in], or (C); the vocabulary is padded here
    size_t file_rows;          // rows that a file holds: V for a table of Vp rows, else shape[0]
    bool transposed;           // files hold it as [in, out] (GPT-2's Conv1D)
    Shard shard;
    Init init;
    bool decay;
    int layer; // the layer that defines it
    int bucket = 0;
    int pieces = 1;    // different pieces that tensor parallelism makes of it
    size_t stack = 1;  // experts: equal matrices one below the other, which files hold one by one
    Axis experts = {}; // the ranks that share out a stack
    size_t offset = 0; // this rank's piece begins here: elements from the bucket's start
    int adapter = -1;  // the row of its adapter's A; B's is the next. -1: no adapter
    int matrix = -1;   // number among the matrices of all blocks; -1: no such matrix

    size_t rows() const { return shape[0]; }
    size_t cols() const { return shape.size() == 2 ? shape[1] : 1; }
    size_t elements() const { return rows() * cols(); }
    size_t file_elements() const { return file_rows * cols(); }

    // The piece that this rank holds.
    size_t local_rows() const { return local_elements() / local_cols(); }
    size_t local_cols() const { return cols() / (shard.axis == 1 ? size_t(pieces) : 1); }
    size_t local_elements() const { return elements() / size_t(pieces * experts.size); }
};

// Code finds a bucket by its role, never by number, so a technique may add its own anywhere.
enum class Role : uint8_t {
    TOKENS,    // the token table, which is also the head of a tied model
    POSITIONS, // the table of learned positions
    BLOCK,     // one block's parameters
    EXPERTS,   // the matrices of a block's experts, in stacks
    ADAPTER,   // low-rank matrices beside a block's own
    HEAD       // final norm, untied head
};

// A bucket orders its parameters by the tp ranks that sum their gradients: each sum is one range.
//   [0, by_heads)        every tp rank holds them, each with a part from its heads: norms of q, k
//   [by_heads, common)   every tp rank holds them: norms, biases that join the residual stream
//   [common, shared)     several tp ranks hold them: shared key/value heads
//   [shared, elements)   only this tp rank holds them, or their group has all tp ranks: experts
struct Bucket {
    std::string name;
    Role role;
    Group group;               // the ranks over which it is reduced and sharded
    std::vector<int> layers;   // the layers that use it
    bool trainable = true;     // a frozen bucket has no gradient and no update
    int first = 0, count = 0;  // range of its parameters in the table
    std::vector<int> in_order = {}; // the same parameters, by offset
    size_t elements = 0;       // the end of the last parameter, rounded up to 128
    size_t by_heads = 0, common = 0, shared = 0;
    size_t shard = 0; // a shard's elements, if shards cut no matrix (buckets.h); 0: cut anywhere

    bool tied() const { return layers.size() > 1; }
};

// The tables that every plan reads: parameters and buckets, with the pieces of one tp rank.
struct Model {
    Shape shape; // the whole model's; rank_shape() cuts it
    int tp = 1, tp_rank = 0;
    int matrices = 0; // in all blocks
    std::vector<Parameter> parameters;
    std::vector<Bucket> buckets;
    std::vector<std::vector<int>> used = {}; // [layer]: its buckets, in the table's order

    int layers() const { return int(shape.L) + 2; }
    int head() const { return int(shape.L) + 1; }
    bool is_block(int layer) const { return layer > 0 && layer < head(); }
};

// The buckets that a layer uses, in the table's order.
inline const std::vector<int>& buckets_of(const Model& m, int layer) {
    return m.used.at(size_t(layer));
}

// The bucket of that role which a layer uses, or -1.
inline int find_bucket(const Model& m, Role role, int layer) {
    for (int b : buckets_of(m, layer))
        if (m.buckets[b].role == role) return b;
    return -1;
}

// The N of "a model of N parameters": each parameter counts once, padding does not count.
inline size_t parameter_count(const Model& m) {
    size_t n = 0;
    for (const Parameter& p : m.parameters)
        n += p.file_elements();
    return n;
}

// ----------------------------------------------------------------------------
// activations

// A level of recomputation says which activations a block drops after F and makes again in R. All
// but NONE drop the outputs of norms and activation functions. ATTN, FFN and FULL (both) also drop
// what the products and attention of their branch made.
enum class Recompute { NONE, SELECTIVE, ATTN, FFN, FULL };
inline bool redoes_attn(Recompute r) { return r == Recompute::ATTN || r == Recompute::FULL; }
inline bool redoes_ffn(Recompute r) { return r == Recompute::FFN || r == Recompute::FULL; }

// The names that --recompute takes, in the order of the levels.
constexpr int RECOMPUTE_LEVELS = 5;
inline const char* recompute_name(Recompute r) {
    static const char* names[RECOMPUTE_LEVELS] = {"none", "selective", "attention", "ffn", "full"};
    return names[int(r)];
}

// A level for each layer, by its number. Layers past the last one given take the last one's level,
// so one level serves all. Embedding and head ignore their levels: they have no activation table.
// A segment is a run of FULL blocks that keeps only the first one's input (segments.h).
struct RecomputeLevels {
    std::vector<Recompute> given;
    std::vector<int> segments = {}; // [layer]: the blocks of its segment; empty: one

    RecomputeLevels(Recompute all = Recompute::NONE) : given{all} {}
    RecomputeLevels(const std::vector<Recompute>& levels) : given(levels) {}
    Recompute of(int layer) const { return given[std::min(size_t(layer), given.size() - 1)]; }
    int segment(int layer) const {
        return segments.empty() ? 1 : segments[std::min(size_t(layer), segments.size() - 1)];
    }
};

// The source of a row of the activation table, which decides the levels that drop the row.
//   CHEAP     the output of a norm or an activation function
//   ATTN      products and attention of the first branch, and the residual stream after it
//   FFN       products of the second branch
//   ROUTING   the choice of experts, which no level drops: R must not choose other experts
//   GRADIENT  a gradient, made in the backward pass
//   PASSING   an input that only frozen products read, so no backward pass does: F drops it
enum class Keep { CHEAP, ATTN, FFN, ROUTING, GRADIENT, PASSING };

// The last reader of a row: the input half (B) or the weight half (W) of the backward pass.
enum class Last { B, W };

// One row of the activation table: its elements and bytes on this rank, for one micro-batch.
struct Activation {
    const char* name;
    size_t elements, bytes;
    Keep keep;
    Last last;
};

// Whether F drops a row at this level, because R makes it again.
inline bool recomputed(Keep keep, Recompute level) {
    switch (keep) {
    case Keep::CHEAP: return level != Recompute::NONE;
    case Keep::ATTN: return redoes_attn(level);
    case Keep::FFN: return redoes_ffn(level);
    case Keep::ROUTING:
    case Keep::GRADIENT: return false; // made once, whatever the level is
    default: return true; // PASSING: no backward pass reads it
    }
}

} // namespace llmc
