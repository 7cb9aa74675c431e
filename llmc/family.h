// family.h - the families of models: a row each, and the one place that chooses between them
//   A family is a struct of facts (block_prefix, body_prefix, widening_products) and types
//   (Embedding, Block, Head, Acts), and functions that are found by these types:
//     tables   embedding_parameters, position_parameters, block_parameters, expert_parameters,
//              head_parameters, block_activations
//     block    block_forward, block_recompute, block_backward_input, block_backward_weight
//     head     head_norm, head_backward
//   A new family is its header, its name in enum class Family (model.h), a row here, a class in
//   io/hf_config.h, and the names of its matrices in inputs_kept() (tensor_parallel.h). The models
//   that --model names are presets at the end.
#pragma once
#include "adapters.h"
#include "gpt2.h"
#include "gpt_oss.h"
#include "layout.h"
#include "llama.h"
#include "mixtral.h"
#include "mla.h"
#include "model.h"
#include "ops/linear.cuh"
#include "ops/matmul.cuh"
#include "ops/moe.cuh"
#include "ops/rope.cuh"
#include "ops/types.h"

namespace llmc {

// Call f with the family's struct: with_family(shape.family, [&](auto family) { ... }).
template <typename F> void with_family(Family family, F f) {
    switch (family) {
    case Family::GPT2: return f(Gpt2{});
    case Family::LLAMA: return f(Llama{});
    case Family::NEOX: return f(Neox{});
    case Family::MIXTRAL: return f(Mixtral{});
    case Family::GPT_OSS: return f(GptOss{});
    case Family::DEEPSEEK: return f(Deepseek{});
    }
}

// The products of an ffn from C to F channels: ReLU^2 has no gate.
inline int widening_products(const Shape& s) {
    int products = 1;
    with_family(s.family, [&](auto family) { products = family.widening_products; });
    return is_gated(s) ? products : 1;
}

// ----------------------------------------------------------------------------
// tables made by visiting a family's rows

// Most families have no experts, and no value embeddings.
template <typename Block, typename Row>
void expert_parameters(Block&, const Shape&, Row) {}
template <typename Block, typename Row>
void value_parameters(Block&, const Shape&, Row) {}

// The parameter table of a shape, as a layout cuts it: over tp ranks, experts over ep ranks, and
// where ZeRO may.
inline Model make_model(const Shape& shape, const Layout& layout = {}) {
    int tp = layout.tp.size;
    Model model;
    model.shape = shape;
    model.shape.experts.whole = layout.experts.whole && shape.experts.E;
    model.shape.rank.padded =
        round_up(shape.V, 128 * size_t(tp)); // ranks have equal rows of tables
    model.tp = tp;
    model.tp_rank = layout.tp.rank;

    // Padding comes first: the visitors below read it through Vp().
    const Shape& s = model.shape;

    // A row is appended to the bucket that is open.
    std::string prefix;
    int layer = 0, head = model.head();

    // Vocabulary tables are padded in memory, but their files have V rows.
    auto row = [&](Weight&, const char* name, std::initializer_list<size_t> dims, Init init,
                   bool decay, Shard shard, bool transposed) {
        size_t rows = *dims.begin();
        bool vocabulary = shard.axis == 0 && (layer == 0 || layer == head);
        bool stack = strstr(name, "{}");
        if (stack && layout.experts.whole) shard = {-1, 1, 0, Partial::EXPERTS};
        add_parameter(model, {prefix + name, dims, vocabulary ? s.V : rows, transposed, shard, init,
                              decay, layer});
        // A stack has a matrix for each expert.
        if (!stack) return;
        model.parameters.back().stack = s.experts.E;
        model.parameters.back().experts = expert_axis(layout);
    };

    with_family(s.family, [&](auto family) {
        typename decltype(family)::Embedding embedding;
        typename decltype(family)::Block block;
        typename decltype(family)::Head last;

        // Layer 0 embeds.
        std::vector<int> users = s.embedding.tied ? std::vector<int>{0, head} : std::vector<int>{0};
        add_bucket(model, "embedding", Role::TOKENS, users);
        embedding_parameters(embedding, s, row);
        if (s.embedding.position == Position::LEARNED) {
            add_bucket(model, "positions", Role::POSITIONS, {0});
            position_parameters(embedding, s, row);
        }

        // Blocks, each a bucket.
        for (layer = 1; layer < head; layer++) {
            std::string number = std::to_string(layer - 1);
            add_bucket(model, "block." + number, Role::BLOCK, {layer});
            prefix = family.block_prefix + number + ".";
            Shape here = layer_shape(s, layer);
            block_parameters(block, here, row);
            add_adapters(model, number);
            add_prefix(model, number);
            if (here.attention.values)
                add_bucket(model, "block." + number + ".values", Role::VALUES, {layer});
            value_parameters(block, here, row);
            if (here.experts.E == 0) continue;
            add_bucket(model, "block." + number + ".experts", Role::EXPERTS, {layer},
                       Group::EXPERTS);
            expert_parameters(block, here, row);
            add_adapters(model, number);
        }

        // The head.
        prefix = "";
        add_bucket(model, "head", Role::HEAD, {head});
        head_parameters(last, s, row);
    });
    freeze_base(model);
    place_parameters(model, layout);
    return model;
}

// The activation table of a block of N rows, whose layer has this shape.
// T is the type of activations; statistics of norms and attention are wider, in acc. Sums over rows
// have more parts on a GPU.
template <typename T, typename S>
std::vector<Activation> activation_table(const Shape& s, size_t N, S where) {
    std::vector<Activation> rows;
    auto row = [&](auto*& p, const char* name, size_t n, Keep keep, Last last) {
        rows.push_back({name, n, n * sizeof(*p), keep, last});
    };
    with_family(s.family, [&](auto family) {
        typename decltype(family)::template Acts<T> acts;
        block_activations(acts, s, N, where, row);
    });
    return rows;
}

// ----------------------------------------------------------------------------
// presets: the models that --model names, with shapes as their papers and config.json state them

// GPT-2: a head has C / NH channels, and the ffn has 4 C.
inline Shape gpt2_shape(size_t L, size_t NH, size_t C, size_t V = 50257, size_t P = 1024) {
    Shape s;
    s.L = L, s.C = C, s.F = 4 * C;
    s.NH = s.NKV = NH, s.HS = C / NH;
    s.V = V, s.P = P;
    return s;
}

// Llama: fewer heads of keys than of queries, no biases, and a head that is not tied.
inline Shape llama_shape(size_t L, size_t NH, size_t NKV, size_t C, size_t F, size_t V, size_t P,
                         double theta) {
    Shape s;
    s.family = Family::LLAMA, s.hf_type = "llama", s.embedding.position = Position::ROPE;
    s.L = L, s.C = C, s.F = F;
    s.NH = NH, s.NKV = NKV, s.HS = C / NH;
    s.V = V, s.P = P;
    s.attention.qkv_bias = false, s.embedding.tied = false, s.rope.theta = theta;
    return s;
}

// GPT-NeoX: GPT-2's block with parallel branches; RoPE rotates a quarter of each head.
inline Shape neox_shape(size_t L, size_t NH, size_t C, size_t V, size_t P = 2048) {
    Shape s = gpt2_shape(L, NH, C, V, P);
    s.family = Family::NEOX, s.hf_type = "gpt_neox", s.embedding.position = Position::ROPE;
    s.embedding.tied = false, s.block.parallel = s.block.exact_gelu = true,
    s.rope.rotary = s.HS / 4;
    return s;
}

// Llama 3.1 stretches RoPE from 8192 positions to 131072.
inline Shape llama31_shape(size_t L, size_t NH, size_t C, size_t F) {
    Shape s = llama_shape(L, NH, 8, C, F, 128256, 131072, 500000);
    s.rope.scaling = {8, 1, 4, 8192};
    return s;
}

// Qwen2 has biases on q, k and v.
inline Shape qwen2_shape(size_t L, size_t NH, size_t NKV, size_t C, size_t F) {
    Shape s = llama_shape(L, NH, NKV, C, F, 151936, 32768, 1000000);
    s.hf_type = "qwen2", s.attention.qkv_bias = true, s.embedding.tied = true,
    s.block.norm_eps = 1e-6f;
    return s;
}

// Qwen3 normalises q and k, and its heads are wider than C / NH.
inline Shape qwen3_shape(size_t L, size_t NH, size_t NKV, size_t C, size_t F) {
    Shape s = llama_shape(L, NH, NKV, C, F, 151936, 40960, 1000000);
    s.hf_type = "qwen3", s.block.qk_norm = true, s.embedding.tied = true, s.HS = 128,
    s.block.norm_eps = 1e-6f;
    return s;
}

// A variant of Llama, by its model_type. Give HS where heads do not have C / NH channels.
inline Shape variant_shape(const char* type, Shape s, bool tied, float norm_eps, size_t HS = 0) {
    set_variant(s, type);
    s.hf_type = type;
    s.embedding.tied = tied, s.block.norm_eps = norm_eps;
    if (HS) s.HS = HS;
    return s;
}

// Let every n-th block see all keys.
inline void see_all_every(Shape& v, size_t n) {
    for (size_t layer = n; layer < v.attention.full_layers.size(); layer += n)
        v.attention.full_layers[layer] = true;
}

// Gemma divides scores by the root of 256. One block in `every` sees all keys, the others a window.
inline Shape gemma_shape(const char* type, Shape s, size_t window, size_t every) {
    // Heads have 256 channels, whatever C is.
    s = variant_shape(type, s, true, 1e-6f, 256);
    s.attention.score_scalar = 256, s.attention.window = window;
    see_all_every(s, every);
    return s;
}

// Gemma 2 caps scores and logits. Every second block sees all keys.
inline Shape gemma2_2b() {
    Shape s = llama_shape(26, 8, 4, 2304, 9216, 256000, 8192, 10000);
    s = gemma_shape("gemma2", s, 4096, 2);
    s.attention.softcap = 50, s.loss.softcap = 30;
    return s;
}

// In Gemma 3 the blocks with a window have a RoPE base of their own.
inline Shape gemma3_1b() {
    Shape s = llama_shape(26, 4, 1, 1152, 6912, 262144, 32768, 1000000);
    s = gemma_shape("gemma3_text", s, 512, 6);
    s.rope.window_theta = 10000;
    return s;
}

// SmolLM3 has no RoPE in every fourth block.
inline Shape smollm3_3b() {
    Shape s = llama_shape(36, 16, 4, 2048, 11008, 128256, 65536, 5000000);
    s = variant_shape("smollm3", s, true, 1e-6f);
    s.rope.nope_every = 4;
    return s;
}

// OLMo-2 normalises the outputs of its branches instead of the inputs.
inline Shape olmo2_7b() {
    Shape s = llama_shape(32, 32, 32, 4096, 11008, 100352, 4096, 500000);
    return variant_shape("olmo2", s, false, 1e-6f);
}

// Every Phi-3 mini has a window. The paper says 2048 wide, the files 2047.
inline Shape phi3_mini() {
    Shape s = llama_shape(32, 32, 32, 3072, 8192, 32064, 4096, 10000);
    s = variant_shape("phi3", s, false, 1e-5f);
    s.attention.window = 2047;
    return s;
}

// modded-nanogpt's track 3, the baseline model: GPT-2's sizes with fewer and wider heads. Its norms
// add float's own epsilon.
inline Shape track3() {
    Shape s = llama_shape(12, 6, 6, 768, 3072, 50304, 1024, 1024);
    s.loss.softcap = 15;
    return variant_shape("track3", s, false, 1.1920929e-7f);
}

// nanochat at a depth of 12, as transformers has it: without value embeddings, smear, backout,
// scales of the stream, windows, and the factor 1.2 of q and k. --depth has the other sizes.
// nanochat_values has the first and the fourth of them.
inline Shape nanochat(const char* type = "nanochat") {
    Shape s = llama_shape(12, 6, 6, 768, 3072, 32768, 2048, 100000);
    s.loss.softcap = 15;
    return variant_shape(type, s, false, 1.1920929e-7f);
}

// GPT-3 is GPT-2 with 2048 positions. Here heads must fill the channels: the paper's XL has 24
// heads of 128 channels, of which only 16 fit; its 13B has 5140 channels, which 40 heads of 128
// do not fill.
inline Shape gpt3_shape(size_t L, size_t NH, size_t C) { return gpt2_shape(L, NH, C, 50257, 2048); }

// A Llama whose blocks have E experts of F channels; each token goes through K of them.
inline Shape mixtral_shape(Shape s, size_t E, size_t K, size_t F) {
    // The kind of norm on q and k tells the model classes apart.
    s.family = Family::MIXTRAL;
    s.hf_type = !s.block.qk_norm ? "mixtral" : s.block.whole_qk_norm ? "olmoe" : "qwen3_moe";
    s.experts.E = E, s.experts.K = K, s.F = F;
    return s;
}

// Qwen3-MoE has an untied head.
inline Shape qwen3_moe_shape(size_t L, size_t NH, size_t NKV, size_t C, size_t F) {
    // A token goes through 8 of 128 experts, at every size.
    Shape s = mixtral_shape(qwen3_shape(L, NH, NKV, C, F), 128, 8, F);
    s.embedding.tied = false;
    return s;
}

// Qwen1.5-MoE: 4 of 60 experts, and a shared one that every token weights by a gate. Biases
// as in Qwen2.
inline Shape qwen15_moe() {
    Shape s = mixtral_shape(llama_shape(24, 16, 16, 2048, 0, 151936, 8192, 1000000), 60, 4, 1408);
    // The gates are the softmax's own. The shared expert is as wide as the four chosen ones.
    s.hf_type = "qwen2_moe", s.attention.qkv_bias = true, s.block.norm_eps = 1e-6f;
    s.experts.router = Router::SOFTMAX, s.experts.shared_F = 5632, s.experts.shared_gate = true;
    return s;
}

// OLMoE's norms of q and k span all heads. Its gates are the softmax's own.
inline Shape olmoe_1b_7b() {
    // The ffn's width is 0 here; the experts' follows below.
    Shape s = llama_shape(16, 16, 16, 2048, 0, 50304, 4096, 10000);
    set_variant(s, "olmoe");
    s = mixtral_shape(s, 64, 8, 1024);
    s.experts.router = Router::SOFTMAX;
    return s;
}

// gpt-oss: a window in every other block, and YaRN from 4096 positions.
inline Shape gpt_oss_shape(size_t L, size_t E) {
    // A token goes through 4 experts, at both sizes.
    Shape s = llama_shape(L, 64, 8, 2880, 0, 201088, 131072, 150000);
    s = mixtral_shape(s, E, 4, 2880);
    s = variant_shape("gpt_oss", s, false, 1e-5f, 64);
    s.family = Family::GPT_OSS;
    s.attention.qkv_bias = true; // and, without a flag, those of router and experts
    s.attention.o_bias = true;
    s.attention.window = 128;
    see_all_every(s, 2);

    // Cosines and sines grow with the logarithm of the factor.
    float size = float(0.1 * std::log(32.0) + 1);
    s.rope.scaling = {32, 1, 4, 4096, RopeKind::YARN, 32, 1, false, size};
    return s;
}

// The sizes of DeepSeek's attention: latents of DQ (0: none) and DC channels; heads of `plain`
// channels and `rotary` ones, which RoPE rotates; values of HS_v.
struct LatentSizes {
    size_t DQ;
    size_t DC;
    size_t plain;
    size_t rotary;
    size_t HS_v;
};

// A DeepSeek. W is the width of the ffn in the first blocks, which have no experts.
inline Shape deepseek_shape(const char* type, Shape s, LatentSizes d, size_t W) {
    s.family = Family::DEEPSEEK;
    s.hf_type = type;
    s.block.norm_eps = 1e-6f;
    s.F = s.experts.dense_F = W;

    // Heads.
    s.latent.q = d.DQ;
    s.latent.kv = d.DC;
    s.HS = d.plain + d.rotary;
    s.rope.rotary = d.rotary;
    s.latent.HS_v = d.HS_v;
    return s;
}

// Experts after the first `dense` blocks: E experts of F channels, `shared` ones for every token.
inline Shape with_experts(Shape s, size_t dense, size_t E, size_t K, size_t F, size_t shared) {
    s.experts.dense_first = dense;
    s.experts.E = E;
    s.experts.K = K;
    s.F = F;
    s.experts.shared_F = shared * F;
    s.experts.router = Router::SOFTMAX;
    return s;
}

// YaRN to 163840 positions. Scores are multiplied by the square of the size that `mscale` gives.
inline Shape deepseek_yarn(Shape s, double mscale) {
    s.rope.scaling = {40, 1, 4, 4096, RopeKind::YARN};
    // Scores are divided by the root of score_scalar, hence the fourth power.
    double size = 0.1 * mscale * std::log(40.0) + 1;
    s.attention.score_scalar = double(s.HS) / std::pow(size, 4);
    return s;
}

// Without a latent for queries, and without groups of experts.
inline Shape deepseek_v2_lite() {
    Shape s = llama_shape(27, 16, 16, 2048, 0, 102400, 163840, 10000);
    s = deepseek_shape("deepseek_v2", s, {0, 512, 128, 64, 128}, 10944);
    s = with_experts(s, 1, 64, 6, 1408, 2);
    return deepseek_yarn(s, 0.707);
}

// With a latent for queries, and experts in groups.
inline Shape deepseek_v2() {
    Shape s = llama_shape(60, 128, 128, 5120, 0, 102400, 163840, 10000);
    s = deepseek_shape("deepseek_v2", s, {1536, 512, 128, 64, 128}, 12288);
    s = with_experts(s, 1, 160, 6, 1536, 2);
    s.experts.gate_scale = 16;
    // A token's experts come from three of eight groups.
    s.experts.groups = 8;
    s.experts.kept_groups = 3;
    return deepseek_yarn(s, 0.707);
}

// With a router of sigmoids, whose choice has a bias.
inline Shape deepseek_v3() {
    Shape s = llama_shape(61, 128, 128, 7168, 0, 129280, 163840, 10000);
    s = deepseek_shape("deepseek_v3", s, {1536, 512, 128, 64, 128}, 18432);
    s = with_experts(s, 3, 256, 8, 2048, 1);
    s.experts.router = Router::SIGMOID;
    s.experts.choice_bias = true;
    s.experts.gate_scale = 2.5f;
    // A token's experts come from four of eight groups.
    s.experts.groups = 8;
    s.experts.kept_groups = 4;
    return deepseek_yarn(s, 1);
}

// A name that --model takes, and what --help says about it.
struct Preset {
    const char* name;
    Shape shape;
    const char* help;
};

// All presets, one row each.
inline std::vector<Preset> model_presets() {
    return {
        // Tiny models over bytes.
        {"tiny", gpt2_shape(4, 4, 128, 256, 1024), "GPT-2 of 0.9M parameters over bytes"},
        {"tiny-llama", llama_shape(4, 4, 2, 128, 352, 256, 1024, 10000),
         "Llama of 0.8M parameters over bytes"},
        {"tiny-moe", mixtral_shape(llama_shape(4, 4, 2, 128, 0, 256, 1024, 10000), 8, 2, 176),
         "Mixtral of 2.4M parameters over bytes, 0.8M of them active"},
        {"tiny-mla", deepseek_shape("deepseek_v3", llama_shape(4, 4, 4, 128, 0, 256, 1024, 10000),
                                    {48, 32, 32, 16, 32}, 352),
         "DeepSeek's latent attention, 0.8M parameters over bytes"},

        // OpenAI's models.
        {"gpt2", gpt2_shape(12, 12, 768), "124M"},
        {"gpt2-medium", gpt2_shape(24, 16, 1024), "350M"},
        {"gpt2-large", gpt2_shape(36, 20, 1280), "774M"},
        {"gpt2-xl", gpt2_shape(48, 25, 1600), "1558M"},
        {"track3", track3(), "162M, modded-nanogpt's track 3"},
        {"nanochat", nanochat(), "135M, nanochat of depth 12; --depth: other sizes"},
        {"nanochat-values", nanochat("nanochat_values"),
         "286M, the same with value embeddings and residual scalars"},
        {"gpt3-small", gpt3_shape(12, 12, 768), "125M"},
        {"gpt3-medium", gpt3_shape(24, 16, 1024), "350M"},
        {"gpt3-large", gpt3_shape(24, 16, 1536), "760M"},
        {"gpt3-xl", gpt3_shape(24, 16, 2048), "1.3B"},
        {"gpt3-2.7b", gpt3_shape(32, 32, 2560), "2.7B"},
        {"gpt3-6.7b", gpt3_shape(32, 32, 4096), "6.7B"},
        {"gpt3-13b", gpt3_shape(40, 40, 5120), "13B"},
        {"gpt3-175b", gpt3_shape(96, 96, 12288), "175B"},

        // Llama, Qwen and OLMo.
        {"tinyllama-1.1b", llama_shape(22, 32, 4, 2048, 5632, 32000, 2048, 10000),
         "TinyLlama 1.1B"},
        {"llama2-7b", llama_shape(32, 32, 32, 4096, 11008, 32000, 4096, 10000), "Llama 2 7B"},
        {"llama3-8b", llama_shape(32, 32, 8, 4096, 14336, 128256, 8192, 500000), "Llama 3 8B"},
        {"llama3-70b", llama_shape(80, 64, 8, 8192, 28672, 128256, 8192, 500000), "Llama 3 70B"},
        {"llama3.1-8b", llama31_shape(32, 32, 4096, 14336), "Llama 3.1 8B, 131072 tokens"},
        {"llama3.1-70b", llama31_shape(80, 64, 8192, 28672), "Llama 3.1 70B, 131072 tokens"},
        {"llama3-405b", llama31_shape(126, 128, 16384, 53248), "Llama 3.1 405B"},
        {"qwen2.5-0.5b", qwen2_shape(24, 14, 2, 896, 4864), "Qwen2.5 0.5B"},
        {"qwen3-0.6b", qwen3_shape(28, 16, 8, 1024, 3072), "Qwen3 0.6B"},
        {"qwen3-1.7b", qwen3_shape(28, 16, 8, 2048, 6144), "Qwen3 1.7B"},
        {"olmo-2-7b", olmo2_7b(), "OLMo-2 7B"},

        // GPT-NeoX.
        {"pythia-70m", neox_shape(6, 8, 512, 50304), "Pythia 70M"},
        {"pythia-160m", neox_shape(12, 12, 768, 50304), "Pythia 160M"},
        {"pythia-410m", neox_shape(24, 16, 1024, 50304), "Pythia 410M"},
        {"pythia-1b", neox_shape(16, 8, 2048, 50304), "Pythia 1B"},
        {"pythia-1.4b", neox_shape(24, 16, 2048, 50304), "Pythia 1.4B"},
        {"pythia-2.8b", neox_shape(32, 32, 2560, 50304), "Pythia 2.8B"},
        {"pythia-6.9b", neox_shape(32, 32, 4096, 50432), "Pythia 6.9B"},
        {"pythia-12b", neox_shape(36, 40, 5120, 50688), "Pythia 12B"},

        // Further variants of Llama.
        {"smollm3-3b", smollm3_3b(), "SmolLM3 3B"},
        {"phi-3-mini", phi3_mini(), "Phi-3 mini 3.8B"},
        {"gemma-2-2b", gemma2_2b(), "Gemma 2 2B"},
        {"gemma-3-1b", gemma3_1b(), "Gemma 3 1B, text"},

        // Mixtures of experts.
        {"mixtral-8x7b", mixtral_shape(llama_shape(32, 32, 8, 4096, 0, 32000, 32768, 1000000), 8, 2,
                                       14336), "Mixtral 8x7B"},
        {"olmoe-1b-7b", olmoe_1b_7b(), "OLMoE 7B, 1B of them active"},
        {"qwen1.5-moe-a2.7b", qwen15_moe(), "Qwen1.5-MoE 14B, 2.7B of them active"},
        {"gpt-oss-20b", gpt_oss_shape(24, 32), "gpt-oss 21B, 3.6B of them active"},
        {"gpt-oss-120b", gpt_oss_shape(36, 128), "gpt-oss 117B, 5.1B of them active"},
        {"deepseek-v2-lite", deepseek_v2_lite(), "DeepSeek-V2-Lite 16B, 2.7B of them active"},
        {"deepseek-v2", deepseek_v2(), "DeepSeek-V2 236B, 21B of them active"},
        {"deepseek-v3", deepseek_v3(), "DeepSeek-V3 671B, 37B of them active"},
        {"qwen3-30b-a3b", qwen3_moe_shape(48, 32, 4, 2048, 768), "Qwen3 30B, 3B of them active"},
    };
}

} // namespace llmc
