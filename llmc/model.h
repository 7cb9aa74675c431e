// model.h - what a model is: its shape, and its parameters, buckets, activations as tables
//   A model is a row of layers: layer 0 embeds, layers 1..L are blocks, layer L+1 is the head
//   (final norm, logits, loss). A layer is the unit that runs. A bucket is a flat buffer of
//   parameters, the unit that is updated (and over many ranks gathered, reduced and sharded).
//   A layer uses one or more buckets:
//     "embedding"  the token table           layer 0, and layer L+1 too when the head is tied to it
//     "positions"  the table of positions    layer 0 (learned positions only)
//     "block.l"    a block's parameters      layer l + 1
//     "block.l.experts"  its experts' stacks  layer l + 1 (only in models with experts)
//     "block.l.values"   its table of values  layer l + 1 (only with value embeddings)
//     "adapter.l[.experts]"  their adapters   layer l + 1 (only adapters are then trained)
//     "head"       final norm, untied head   layer L+1
//   Inside a bucket place_bucket() places each parameter at a multiple of 128 elements (256 bytes
//   in bf16). Its offset is the same in the weight, gradient, master and moment buffers. Each table
//   is written once, in its family's header, as a function that visits its rows: one visitor makes
//   the table, another one binds a block's pointers.
#pragma once
#include "layout.h"
#include "ops/elementwise.cuh"
#include "ops/expert_capacity.cuh"
#include "ops/fp8.cuh"
#include "ops/fp8_delayed.cuh"
#include "ops/moe.cuh"
#include "ops/objective.cuh"
#include "ops/rope.cuh"
#include "ops/types.h"
#include <algorithm>
#include <bitset>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace llmc {

// ----------------------------------------------------------------------------
// shape: what differs between variants of one family, and between layers of one model
//   A variant is a model_type whose blocks are Llama's but for facts of its Shape:
//     norms       before a branch, after it (OLMo-2) or both (Gemma); of q and k
//     attention   windows in some layers, no RoPE in some (SmolLM3), softcaps
//     the ffn     its gate is SiLU or GELU, or gpt-oss' own; modded-nanogpt's has no gate
//   Blocks read the facts; nothing else asks for a name.

// Adapters by the name of their matrix, without ".weight": "h.0.attn.c_attn".
struct Adapter {
    size_t rank;
    double scale;         // multiplies the adapter's result
    float rate_of_b = 1; // B's learning rate divided by A's
};
typedef std::map<std::string, Adapter> Adapters;

// Adapters under a name, by which texts choose them (adapters.h).
struct AdapterSet {
    std::string name;
    Adapters adapters;
};
typedef std::vector<AdapterSet> AdapterSets;

enum class Family { GPT2, LLAMA, NEOX, MIXTRAL, GPT_OSS, DEEPSEEK };
enum class Position { LEARNED, ROPE, ALIBI };

// Each struct holds the fields of one technique. Defaults are GPT-2's; set_variant() and
// config.json state what differs. A count of 0 means that there is nothing of the kind.
struct EmbeddingShape {
    bool tied = true; // the head is the token table
    Position position = Position::LEARNED;
    bool scaled = false; // Gemma: times the root of C
    bool normed = false;    // modded-nanogpt: the first block reads a norm of the embedding
    bool head_bias = false; // modded-nanogpt: the head has one
};

// Norms, and the ffn.
struct BlockShape {
    float norm_eps = 1e-5f;
    float norm_plus = 0;        // Gemma: RMSNorm multiplies by this + weight
    bool qk_norm = false;       // Qwen3: each head's q and k are normed before RoPE
    bool whole_qk_norm = false; // with qk_norm, OLMo-2: all heads of a token are one row
    bool qk_gains = true;       // those norms have weights; modded-nanogpt's do not
    bool gains = true;          // the stream's norms have weights; nanochat's scale by norm_plus
    bool pre_norm = true;       // a branch reads a norm of the stream; OLMo-2's the stream itself
    bool post_norm = false;     // OLMo-2, Gemma: a branch's result is normed before it joins
    bool parallel = false;      // GPT-NeoX: both branches read the block's input
    Gate gate = Gate::SILU;     // Llama's ffn; Gemma: GELU; modded-nanogpt: RELU2, without `up`
    bool exact_gelu = false;    // GPT-NeoX: by erf, in place of the tanh form
    bool mlp_bias = false;      // some Llamas: biases on gate, up and down
    bool zero_start = false;    // modded-nanogpt's first weights, or nanochat's (llama.h)
    bool scalars = false;       // nanochat: a block begins with r x + z x0, x0 the normed embedding
    float place = 0;            // layer_shape(): from 0, the first block's, to 1, the last one's
};

struct AttentionShape {
    bool qkv_bias = true;          // GPT-2 and Qwen2 have biases on q, k, v
    bool o_bias = false;           // some Llamas
    size_t window = 0;             // keys further back are not seen
    std::bitset<1026> full_layers; // [layer]: has no window
    double score_scalar = 0;       // scores are q.k over the root of this; 0: of HS
    float softcap = 0;             // Gemma 2
    bool sinks = false;            // gpt-oss: a logit of each head joins (attention_join.cuh)
    bool values = false;           // nanochat: every other block's v has an embedding of the token
};

struct RopeShape {
    double theta = 10000;
    RopeScaling scaling;
    double window_theta = 0; // Gemma 3: the base where a window is; 0: the others'
    size_t rotary = 0;       // channels of a head that turn; 0: all
    size_t nope_every = 0;   // SmolLM3: every so many blocks one has no RoPE
};

// DeepSeek: latent attention (mla.h). The last channels of a head turn, pairs of neighbours.
struct LatentShape {
    size_t kv = 0;   // channels of the latent of keys and values; 0: there is none
    size_t q = 0;    // of queries
    size_t HS_v = 0; // channels of a head of values; 0: HS
};

// Some blocks have an ffn in place of experts, or beside them experts of every token.
struct ExpertShape {
    size_t E = 0, K = 0; // experts of each block, and how many each token goes through
    Router router = Router::RENORMALISED;
    float gate_scale = 1;           // multiplies the gates of all experts
    ExpertCapacity capacity;        // limits the tokens of an expert; a plan fills in the numbers
    double balance = 0, z_loss = 0; // weights of the router's terms in the trained loss (moe.cuh)
    size_t ffn_beside = 0;          // layer_shape(): width of shared experts, or of a dense ffn
    size_t dense_first = 0;         // DeepSeek: the first so many blocks have an ffn
    size_t sparse_every = 1;        // Qwen: every so many blocks one has experts
    size_t dense_F = 0;             // the width of that ffn
    size_t shared_F = 0;            // of the shared experts together; 0: there are none
    bool shared_gate = false;       // Qwen2-MoE: each token weighs them by a sigmoid of its own
    size_t groups = 1;              // DeepSeek: equal groups of experts
    size_t kept_groups = 1;         // of which a token may choose from so many
    bool choice_bias = false;       // DeepSeek-V3: numbers that the choice adds to scores
    bool bias = false;              // gpt-oss: router and experts have biases
    double gate_alpha = 1;          // gpt-oss: gates are x sigmoid(alpha x)
    double gate_limit = 0; // gpt-oss: they and up are clamped, and up + 1 multiplies; 0: neither
    size_t ranks = 1;               // ranks that share out the experts
    bool whole = false;             // tp ranks cut no expert, and each routes its own rows
};

// fp8 in the products of blocks, attention's own left out.
struct Fp8Shape {
    Fp8 kind = Fp8::NONE;
    Fp8Rule rule;     // how DELAYED chooses scales
    bool kept = true; // cast weights once a step (fp8.h), else at each product
};

struct LossShape {
    Objective objective = {}; // the loss of the running plan, for the head
    size_t logits_bytes = 0;  // bytes of logits at a time; 0: head.h chooses for the device
    size_t logits_rows = 64;  // a chunk of logits has a multiple of so many rows
    float softcap = 0;        // Gemma 2
    bool root_softcap = false; // modded-nanogpt: the cap has the root's form (elementwise.cuh)
};

// Trained in place of all weights.
struct TunedShape {
    std::shared_ptr<const Adapters> adapters; // if not null, only these are trained (adapters.h)
    std::shared_ptr<const AdapterSets> sets;  // if not null, each generated text chooses from these
    size_t prefix = 0; // if not 0, only so many keys and values of each layer are trained
};

// A tensor-parallel rank sees its own NH, NKV, F and V (tensor_parallel.h); its V may be 0.
struct RankShape {
    size_t vocab_start = 0; // this rank's first token
    size_t padded = 0;      // rows of this rank's tables; 0: V rounded up
    size_t rows = 1;        // ranks that share the rows of the residual stream
};

// The default is GPT-2's: presets and config.json state only what differs.
struct Shape {
    Family family = Family::GPT2;
    std::string hf_type = "gpt2";   // model_type in config.json: gpt2, llama, gemma2, ...
    size_t L = 0;                   // blocks
    size_t NH = 0, NKV = 0, HS = 0; // heads, key/value heads, head size
    size_t C = 0, F = 0;            // channels, ffn width; with experts the width of one expert
    size_t V = 0;                   // vocabulary
    size_t P = 0;                   // positions that the model has: the limit of T and prompts
    EmbeddingShape embedding;
    BlockShape block;
    AttentionShape attention;
    RopeShape rope;
    LatentShape latent;
    ExpertShape experts;
    Fp8Shape fp8;
    LossShape loss;
    TunedShape tuned;
    RankShape rank;

    // The rows of a token table: the vocabulary, padded with zero rows that never reach a file.
    size_t Vp() const { return rank.padded ? rank.padded : round_up(V, 128); }
};

// ----------------------------------------------------------------------------
// what a layer has: block b is layer b + 1

// The window; 0: queries see all keys before them. An action of no layer has -1.
inline size_t window_of(const Shape& v, int layer) {
    bool window = layer > 0 && !v.attention.full_layers[size_t(layer)];
    return window ? v.attention.window : 0;
}

// The channels of a head that RoPE turns.
inline size_t rotary_channels(const Shape& v, size_t HS) {
    return v.rope.rotary ? v.rope.rotary : HS;
}

// The first of them.
inline size_t first_rotary(const Shape& v, size_t HS) {
    return v.latent.kv ? HS - rotary_channels(v, HS) : 0;
}

// Whether RoPE turns the heads of a layer.
inline bool has_rope(const Shape& v, int layer) {
    return !v.rope.nope_every || layer % int(v.rope.nope_every) != 0;
}

// Whether a layer has experts, in a model that has them.
inline bool is_sparse(const Shape& v, int layer) {
    return layer > int(v.experts.dense_first) && layer % int(v.experts.sparse_every) == 0;
}

// ----------------------------------------------------------------------------
// what a model_type has, whatever the sizes are

inline void set_variant(Shape& v, const std::string& type) {
    // Norms of q and k, and of branches.
    bool gemma = type == "gemma2" || type == "gemma3_text";
    bool olmo = type == "olmo2" || type == "olmo3";
    v.block.whole_qk_norm = olmo || type == "olmoe";
    v.block.qk_norm =
        v.block.whole_qk_norm || type == "qwen3" || type == "qwen3_moe" || type == "gemma3_text";
    v.block.pre_norm = !olmo;
    v.block.post_norm = olmo || gemma;
    if (type == "olmo3") v.rope.window_theta = 500000; // scaling is for layers without a window

    // Gemma's norms, gate and embedding.
    v.block.norm_plus = gemma ? 1 : 0;
    v.block.gate = gemma ? Gate::GELU : Gate::SILU;
    v.embedding.scaled = gemma;

    // gpt-oss.
    bool oss = type == "gpt_oss";
    v.attention.sinks = oss;
    v.experts.bias = oss;
    v.experts.gate_alpha = oss ? 1.702 : 1;
    v.experts.gate_limit = oss ? 7 : 0;

    // modded-nanogpt's baseline of track 3, and nanochat.
    bool track3 = type == "track3";
    if (!track3 && !type.starts_with("nanochat")) return;
    v.block.qk_norm = true;
    v.block.qk_gains = false;
    v.block.gate = Gate::RELU2;
    v.embedding.normed = true;
    v.rope.scaling.transposed = true;

    // nanochat has no weights of norms, and track 3 has biases and more of its own.
    v.block.gains = track3;
    v.block.norm_plus = track3 ? 0 : 1;
    v.block.zero_start = true;
    v.block.scalars = v.attention.values = type == "nanochat_values";
    if (!track3) return;
    v.attention.qkv_bias = v.attention.o_bias = v.block.mlp_bias = v.embedding.head_bias = true;
    v.attention.score_scalar = 1 / (0.12 * 0.12);
    v.rope.scaling.kind = RopeKind::HALF;
    v.loss.root_softcap = true;
}

// The shape of one layer: a block has a dense ffn, experts, or both. The first may norm its input.
inline Shape layer_shape(Shape s, int layer) {
    s.embedding.normed &= layer == 1 || s.block.scalars;
    s.attention.values &= (int(s.L) - layer) % 2 == 0;
    s.block.place = s.L > 1 ? float(layer - 1) / float(s.L - 1) : 1;

    // Families without experts keep their ffn's width in F: most of them leave ffn_beside at 0.
    bool sparse = s.experts.E && is_sparse(s, layer);
    s.experts.ffn_beside = sparse ? s.experts.shared_F : s.experts.dense_F;
    if (!sparse) s.experts.E = s.experts.K = 0;
    return s;
}

// The bytes of LOADS: how many slots choose each block's experts in a step, (L,E), and with a
// capacity how many of these are dropped, (L,E).
inline size_t loads_bytes(const Shape& s) {
    size_t tables = s.experts.capacity.factor > 0 ? 2 : 1;
    return tables * s.L * s.experts.E * sizeof(int);
}

// Elements of the cache for a token and layer: a key and a value of each head, or with latent
// attention the latent and the rotary part of all keys (mla.h).
inline size_t cached_elements(const Shape& s) {
    return s.latent.kv ? s.latent.kv + s.rope.rotary : 2 * s.NKV * s.HS;
}

// ----------------------------------------------------------------------------
// parameters

// A parameter's first value.
struct Init {
    float value; // every element, or the mean
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
    bool muon = false; // Muon updates it, so it has no second moment

    size_t rows() const { return shape[0]; }
    size_t cols() const { return shape.size() == 2 ? shape[1] : 1; }
    size_t elements() const { return rows() * cols(); }
    size_t file_elements() const { return file_rows * cols(); }
    // Only value embeddings, whose rows are tokens, are cut by heads along their columns.
    bool is_value_table() const { return shard.axis == 1 && shard.units > 0; }

    // The piece that this rank holds.
    size_t local_rows() const { return local_elements() / local_cols(); }
    size_t local_cols() const { return cols() / (shard.axis == 1 ? size_t(pieces) : 1); }
    size_t local_elements() const { return elements() / size_t(pieces * experts.size); }

    // Matrices one below the other: GPT-2's q, k, v, and experts.
    size_t matrices() const {
        return std::max(stack, shard.axis == 0 ? size_t(shard.parts) : size_t(1));
    }
};

// Code finds a bucket by its role, never by number, so a technique may add its own anywhere.
enum class Role : uint8_t {
    TOKENS,    // the token table, which is also the head of a tied model
    POSITIONS, // the table of learned positions
    BLOCK,     // one block's parameters
    EXPERTS,   // the matrices of a block's experts, in stacks
    VALUES,    // a block's table of value embeddings, and their gate
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

    bool tied() const { return layers.size() > 1; }
};

// The tables that every plan reads: parameters and buckets, with the pieces of one tp rank.
struct Model {
    Shape shape; // the whole model's; rank_shape() cuts it
    int tp = 1, tp_rank = 0;
    int matrices = 0; // in all blocks
    bool muon = false; // the optimizer is Muon: matrices of blocks have no second moment
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

// A level for each layer, by its number. Layers past the last one given take the last one's level,
// so one level serves all. Embedding and head ignore their levels: they have no activation table.
// A segment is a run of FULL blocks that keeps only the first one's input (recompute.h).
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

// ----------------------------------------------------------------------------
// how a bucket is filled: where its parameters lie, and where its shards are cut
//   A bucket is cut into equal shards of whole norm chunks. A cut may fall inside a parameter: most
//   optimizers update each element alone, and Muon brings a matrix's parts together (muon.h).

// The number of pieces that tensor-parallel ranks cut a parameter into.
inline int pieces_of(const Shard& s, int tp) {
    return s.axis < 0 ? 1 : tp / replication(s, tp);
}

// Append a bucket. The parameters that are added next belong to it.
inline void add_bucket(Model& m, const std::string& name, Role role, std::vector<int> layers,
                       Group group = Group::DATA) {
    Bucket bucket = {name, role, group, layers};
    bucket.first = int(m.parameters.size());
    m.used.resize(m.shape.L + 2);
    for (int layer : layers)
        m.used[size_t(layer)].push_back(int(m.buckets.size()));
    m.buckets.push_back(bucket);
}

// Append a parameter to the last bucket.
inline void add_parameter(Model& m, Parameter p) {
    p.bucket = int(m.buckets.size()) - 1;
    p.pieces = pieces_of(p.shard, m.tp);
    if (m.buckets.back().role == Role::BLOCK && p.shape.size() == 2) p.matrix = m.matrices++;
    m.buckets.back().count++;
    m.parameters.push_back(p);
}

// A rank's piece of a parameter, as runs of consecutive elements of the whole. The first run begins
// at `start`, each has `run` elements, and `gap` elements of other ranks lie between two runs.
// Experts stand one behind the other: expert parallelism cuts their stack into ranges, and tensor
// parallelism cuts each expert.
struct PieceRuns {
    size_t start, run, gap;
};
inline PieceRuns piece_runs(const Parameter& p, int tp_rank, int tp) {
    size_t pieces = size_t(pieces_of(p.shard, tp)), same = size_t(tp) / pieces;
    size_t range = p.elements() / size_t(p.experts.size);
    size_t first = range * size_t(p.experts.rank);

    // A parameter that no tensor-parallel rank cuts is one run.
    if (pieces == 1) return {first, range, 0};

    // A cut along the second axis divides each row; along the first axis it divides each part.
    size_t inner = p.shard.axis == 0 ? p.cols() : 1;
    size_t part = p.shape[size_t(p.shard.axis)] / size_t(p.shard.parts) * inner;
    size_t run = part / pieces;
    return {first + size_t(tp_rank) / same * run, run, part - run};
}

// Call f(local, global, count) for each run of a rank's piece: `count` elements that begin at
// `local` in the piece and at `global` in the whole parameter. Initial weights, checkpoints and
// exports go through here, so that none of them depends on the layout.
template <typename F>
void for_each_run(const Parameter& p, int tp_rank, int tp, F f) {
    auto [start, run, gap] = piece_runs(p, tp_rank, tp);
    size_t range = p.elements() / size_t(p.experts.size);
    for (size_t k = 0; k < range / (run + gap); k++)
        f(k * run, start + k * (run + gap), run);
}

// The elements of a rank's part of an update that is cut, of all parts together, and of a shard of
// weights. Parts are equal and hold whole chunks of the norm, so a bucket that is cut is padded.
constexpr size_t SHARD_ALIGN = 4096; // elements
inline size_t update_elements(const Layout& layout, const Bucket& b) {
    size_t parts = size_t(update_axis(layout, b.group).size);
    return parts == 1 ? b.elements : round_up(ceil_div(b.elements, parts), SHARD_ALIGN);
}
inline size_t whole_elements(const Layout& layout, const Bucket& b) {
    return update_elements(layout, b) * size_t(update_axis(layout, b.group).size);
}
inline size_t shard_elements(const Layout& layout, const Bucket& b) {
    return whole_elements(layout, b) / size_t(shard_axis(layout, b.group).size);
}

// Give each parameter of a bucket its offset.
inline void place_bucket(Model& m, Bucket& b, size_t align) {
    b.elements = 0;
    b.in_order = {};

    // Place the parameters that `belongs` selects behind all earlier ones, and return their end.
    auto place = [&](auto belongs) {
        for (int i = b.first; i < b.first + b.count; i++) {
            Parameter& p = m.parameters[i];
            if (!belongs(p.shard)) continue;
            p.offset = b.elements;
            b.elements = round_up(p.offset + p.local_elements(), align);
            b.in_order.push_back(i);
        }
        return b.elements;
    };

    // Order parameters by the ranks that sum their gradients; see Bucket.
    b.by_heads = place([](Shard s) { return s.axis < 0 && s.partial == Partial::HEADS; });
    b.common = place([](Shard s) { return s.axis < 0 && s.partial == Partial::ROWS; });
    b.shared = place([](Shard s) { return s.axis >= 0 && s.units > 0; });
    place([](Shard s) {
        bool cut = s.axis >= 0 && s.units == 0;
        return cut || s.partial == Partial::EXPERTS;
    });
}

// Whether Muon updates a parameter: a matrix of a block, or a stack of its experts' matrices. A row
// or a column alone is a vector.
inline bool is_muon_matrix(const Model& m, const Parameter& p) {
    const Bucket& b = m.buckets[p.bucket];
    bool of_block = b.role == Role::BLOCK || b.role == Role::EXPERTS || b.role == Role::VALUES;
    of_block &= !p.is_value_table();
    return b.trainable && of_block && p.rows() / p.matrices() > 1 && p.cols() > 1;
}

// Give all parameters their offsets, once the table is complete, and say which ones Muon updates.
inline void place_parameters(Model& m, const Layout& layout) {
    m.muon = layout.muon > 0;
    for (Bucket& b : m.buckets)
        place_bucket(m, b, layout.tensor_align);
    for (Parameter& p : m.parameters)
        p.muon = layout.muon && is_muon_matrix(m, p);
}

} // namespace llmc
