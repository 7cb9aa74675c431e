// family.h - the families of models: a row each, and the one place that chooses between them
//   A family is a struct of facts (model_types, block_prefix, body_prefix) and types (Embedding,
//   Block, Head, Acts), and functions that are found by these types:
//     tables   embedding_parameters, position_parameters, block_parameters, expert_parameters,
//              head_parameters, block_activations
//     block    block_forward, block_recompute, block_backward_input, block_backward_weight
//     head     head_norm, head_backward
//   A new family is its header, its name in `enum class Family`, and a row here.
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

// ----------------------------------------------------------------------------
// tables made by visiting a family's rows

// Most families have no experts.
template <typename Block, typename Row>
void expert_parameters(Block&, const Shape&, Row) {}

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

// The width of the ffn that a token meets: all of its experts together, and the ffn beside them.
inline double width_of_ffn(const Shape& s) {
    const ExpertShape& e = s.experts;
    return e.E || e.ffn_beside ? double(s.F * e.K + e.ffn_beside) : double(s.F);
}

// FLOPs a token of the product that R leaves out where nobody reads a block's output again.
inline double last_product_flops(const Shape& s) {
    return s.block.post_norm ? 0 : 2 * double(s.C) * width_of_ffn(s);
}

// FLOPs a token of a block's R: products and attention, as mfu.h counts them. Norms and activation
// functions are bound by memory, and do not count.
inline double recompute_flops(const Shape& s, size_t T, Recompute level) {
    double C = double(s.C);
    double F = width_of_ffn(s);
    double Q = double(s.NH * s.HS);
    double KV = double(s.NKV * s.HS);
    double matrices = s.latent.kv ? latent_elements(s) : C * (2 * Q + 2 * KV);
    double flops = 0;
    if (redoes_attn(level))
        flops += 2 * matrices + 2 * double(T) * attention_channels(s);
    with_family(s.family, [&](auto family) {
        // A norm after the last product needs it again.
        if (redoes_ffn(level))
            flops += 2 * C * F * (family.widening_products + int(s.block.post_norm));
    });
    return flops;
}

} // namespace llmc
