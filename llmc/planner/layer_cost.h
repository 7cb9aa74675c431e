// layer_cost.h - seconds of each layer of a plan, by the model's tables - arXiv:2104.04473
//   N = B T / cp rows of a micro-batch on a rank, e bytes of an element. P, H, link: the rates that
//   runs reach (machine.h). a: a collective's latency. tau: the host's time for a block's launches.
//     products    2 N OC IC w / P for each matrix of the layer; w: waste of tiles that do not
//                 fill all SMs. A thin product: its bytes / H. Frozen matrices have no
//                 weight gradient
//     fp8         a block's products at the rate of 8 bits, or at P where a card has none; and the
//                 bytes of casting both operands of each / H. The head stays wide
//     attention   4 N keys Q / P, Q channels of queries; T/2 keys on average and half a tile, 2.5
//                 times as much backward. A ring takes keys in pieces, at 90% of the rate:
//                 ring-flash-attention's README, zigzag. Short chunks of cp waste more of a tile.
//                 At the rate of plain kernels where attention.cuh runs these, 5 times backward
//     the rest    bytes of norms, residuals and activation functions / H, on a CPU / a rate that
//                 is measured apart: its exponentials take longer than their bytes
//     a block     max(products + attention + rest, tau), and the collectives that it waits for
//     collectives by the links of their groups (links.h)
//     jitter      the times of ranks have a standard deviation (machine.h). A stage's ranks wait
//                 for the slowest of them, so the expected maximum of as many normal numbers
//                 lengthens its layers
//   Not counted: the sums of a loss over the ranks that share a vocabulary; the choices of experts
//   that ranks exchange.
#pragma once
#include <functional>
#include "../action.h"
#include "../optimizer.h"
#include "../adapters.h"
#include "../context_parallel.h"
#include "../expert_parallel.h"
#include "../family.h"
#include "../fp8.h"
#include "../io/machine.h"
#include "../io/mfu.h"
#include "../layout.h"
#include "../mla.h"
#include "../model.h"
#include "../ops/attention_types.h"
#include "../ops/fp8.cuh"
#include "../ops/step_scale.h"
#include "../ops/types.h"
#include "../quantised.h"
#include "../recompute.h"
#include "../sharding.h"
#include "links.h"

namespace llmc {

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
    double Q = double(s.NH * s.HS);
    double KV = double(s.NKV * s.HS);
    double matrices = s.latent.kv ? latent_elements(s) : C * (2 * Q + 2 * KV);
    double flops = 0;
    if (redoes_attn(level))
        flops += 2 * matrices + 2 * double(T) * attention_channels(s);
    // A norm after the last product needs it again.
    if (redoes_ffn(level))
        flops += 2 * C * width_of_ffn(s) * (widening_products(s) + int(s.block.post_norm));
    return flops;
}

// ----------------------------------------------------------------------------
// where time goes

// Seconds by part: where the time of an action, or of a rank's step, goes.
struct Times {
    double products = 0, attention = 0, memory = 0, recompute = 0, update = 0; // of a rank alone
    double launch = 0;                                   // of the host, beyond the device's work
    double jitter = 0;                                   // of the slowest rank, beyond the mean
    double tensor = 0, context = 0, experts = 0, pipeline = 0, data = 0; // waits for messages
    double moves = 0;                                    // waits for another tier of memory
    double evaluations = 0, sampling = 0;                // before the step (predict.h)
    double bubble = 0;                                   // waits for other ranks
};
// A part of Times, by its name.
typedef double Times::*Seconds;
struct TimePart {
    const char* name;
    Seconds part;
};
// Return the parts with the names that reports print.
inline const std::vector<TimePart>& time_parts() {
    static const std::vector<TimePart> parts = {
        {"products", &Times::products},
        {"attention", &Times::attention},
        {"norms, activations", &Times::memory},
        {"recomputation", &Times::recompute},
        {"norm, update", &Times::update},
        {"launches", &Times::launch},
        {"slower ranks", &Times::jitter},

        // Waits for messages and moves, time before the step, and waits for ranks.
        {"tensor parallelism", &Times::tensor},
        {"context parallelism", &Times::context},
        {"expert parallelism", &Times::experts},
        {"messages of stages", &Times::pipeline},
        {"data parallelism, ZeRO", &Times::data},
        {"waits for moves", &Times::moves},
        {"evaluations before it", &Times::evaluations},
        {"sampling before it", &Times::sampling},
        {"waits for other ranks", &Times::bubble},
    };
    return parts;
}

// Add `factor` times t to `to`, part by part.
inline void add_times(Times& to, const Times& t, double factor = 1) {
    for (const TimePart& p : time_parts())
        to.*p.part += factor * t.*p.part;
}
// Return the sum of all parts.
inline double total_of(const Times& t) {
    double seconds = 0;
    for (const TimePart& p : time_parts())
        seconds += t.*p.part;
    return seconds;
}

// A machine, and a trainer's habits. The defaults describe this program; the flags describe other
// programs whose step times are published.
struct CostModel {
    Machine machine;
    size_t element = 2; // bytes of a weight
    bool tiled_attention = true;
    bool plain_attention = true; // some calls run plain kernels; false: tensor cores take all
    bool redoes_all = false;   // R runs all of a block's forward pass
    bool cuts_messages = false; // each tp rank sends its part of the rows to the next stage
    double tensor_shown = 1; // the share of a block's tp messages that its products do not hide
    double accumulated = 0;  // bytes moved to add a micro-batch's gradient beside its product
    double teacher_C = 0;    // channels of distillation's teacher, whose logits the head makes too
    // The bytes of a datum that moves between tiers; null: moves take no time.
    std::function<size_t(const Plan&, Data)> bytes = nullptr;
};

// ----------------------------------------------------------------------------
// layers

// A tile of a product's output, and its rate as a share of the best tile's: small tiles read more
// bytes for each FLOP.
struct ProductTile {
    double rows, columns, rate;
};
constexpr ProductTile PRODUCT_TILES[] = { // rates are assumed
    {128, 256, 1},
    {256, 128, 1},
    {128, 128, 0.95},
    {128, 64, 0.85},
    {64, 128, 0.85},
};

// Return the factor by which tiles waste time: those beyond the last full wave cost a full wave.
// Libraries take the tile that wastes least. The rows are those of `matrices` products in one
// launch, in equal parts; the kernels of such products have tiles of 128 rows (grouped_matmul.cuh).
inline double tile_waves(const Machine& machine, double rows, double columns, double matrices) {
    if (machine.sms == 1) return 1;

    double least = INFINITY;
    for (const ProductTile& t : PRODUCT_TILES) {
        if (matrices > 1 && t.rows != 128) continue;
        double down = matrices * std::ceil(rows / matrices / t.rows);
        double exact = rows / t.rows * columns / t.columns;
        double waves = std::ceil(down * std::ceil(columns / t.columns) / machine.sms);
        least = std::min(least, waves * machine.sms / exact / t.rate);
    }
    return least;
}
// Return the rate of products of 8-bit codes; 0: the machine multiplies their values.
inline double codes_rate(const CostModel& c, Fp8 fp8) {
    return fp8 == Fp8::NONE ? 0 : c.machine.fp8_rate(fp8);
}

// Return the seconds of a product (rows,in) x (in,out), or of one with a stack of matrices, which
// share out the rows.
inline double product_seconds(const CostModel& c, double rows, double out, double in,
                              Fp8 fp8 = Fp8::NONE, double stack = 1) {
    double rate = codes_rate(c, fp8);
    if (rate == 0) rate = c.machine.gemm_rate(c.element);
    double best = 2 * rows * out * in / rate;
    // Bound the waste: a small product splits its sum over idle SMs.
    double matrices = std::min(stack, rows); // a row reads one
    double computing = best * std::min(tile_waves(c.machine, rows, out, matrices), 2.0);

    // A thin product, as those of adapters, waits for its rows from memory.
    double moved = rows * (in + out) + matrices * in * out;
    return std::max(computing, c.element * moved / c.machine.memory_rate());
}

// Return the seconds of all products in a block's forward pass. trained: only those whose matrices
// are trained, which the weight half of a backward pass repeats.
inline double block_products(const CostModel& c, const Plan& p, const Model& model, int layer,
                             bool trained = false) {
    double seconds = 0;
    double N = p.rows();
    const Shape& s = model.shape;
    double routed = s.experts.whole ? N / p.layout.tp.size : N; // rows of this rank's choices
    for (int b : buckets_of(model, layer)) {
        const Bucket& bucket = model.buckets[b];
        if (trained && !bucket.trainable) continue;
        for (int i = bucket.first; i < bucket.first + bucket.count; i++) {
            const Parameter& w = model.parameters[i];
            if (w.layer != layer || w.shape.size() != 2 || w.is_value_table())
                continue;

            // A token meets K experts of a stack, so on average this rank's experts have K N rows.
            double experts = double(w.stack) / w.experts.size;
            double rows = w.stack > 1 ? routed * s.experts.K : N;
            double out = double(w.local_rows()) / experts;
            Fp8 fp8 = w.matrix >= 0 ? s.fp8.kind : Fp8::NONE;
            seconds += product_seconds(c, rows, out, w.local_cols(), fp8, experts);
        }
    }
    return seconds;
}

// The three products of a matrix (linear.cuh), by what they make.
enum class Makes { OUT, DINP, DW };

// Return the seconds of casting the operands of one product of each matrix in a block.
inline double cast_seconds(const CostModel& c, const Plan& p, const Model& model, int layer,
                           Makes makes) {
    Fp8 fp8 = model.shape.fp8.kind;
    if (fp8 == Fp8::NONE) return 0;
    // Weights whose casts are kept are cast in one micro-batch of a step.
    // The values of MX's W^T are not kept.
    double weights = keeps_casts(p, model) ? 1.0 / p.micro_batches : 1;
    double turned = fp8 == Fp8::MX && codes_rate(c, fp8) == 0 ? 1 : weights;
    double N = p.rows();
    double elements = 0;
    for (const Parameter& w : model.parameters) {
        if (w.layer != layer || w.matrix < 0)
            continue;
        // k and v read the codes of q's input, up those of gate's (tensor_parallel.h).
        bool behind = false;
        for (const char* name : {".k_proj.weight", ".v_proj.weight", ".up_proj.weight"})
            behind |= fp8 != Fp8::DELAYED && w.name.ends_with(name);
        double inp = behind ? 0 : N * w.local_cols();
        double dout = N * w.local_rows();
        double weight = w.local_elements();
        bool trained = model.buckets[w.bucket].trainable;
        switch (makes) {
        case Makes::OUT: elements += inp + weights * weight; break;
        case Makes::DINP: elements += dout + turned * weight; break;
        case Makes::DW: elements += trained ? dout + inp : 0; break;
        }
    }

    // A scale of a whole operand wants its largest number first. Codes take a byte or half of one,
    // and values that stand in for them as much as before.
    double read = c.element * (fp8 == Fp8::TENSOR || fp8 == Fp8::NVFP4 ? 2 : 1);
    double code = fp8 == Fp8::NVFP4 ? 0.5 : 1;
    double written = codes_rate(c, fp8) > 0 ? code : c.element;
    return (read + written) * elements / c.machine.memory_rate();
}

// Return the bytes that a block moves to dequantise its frozen matrices once: codes are read, wide
// elements written. A pass does it for each product.
inline double dequantised_bytes(const CostModel& c, const Plan& p, const Model& model, int layer) {
    if (p.stored == Stored::WIDE) return 0;
    double codes = p.stored == Stored::INT8 ? 1 : 0.5; // bytes; scales are too few to count
    double elements = 0;
    for (const Parameter& w : model.parameters)
        if (w.layer == layer && is_narrow(p.stored, model, w))
            elements += double(w.local_elements());
    return (codes + c.element) * elements;
}

// Return the bytes of a bucket's weights that ZeRO-3 gathers: codes where they are narrow, or where
// products read codes.
inline double gathered_bytes(const CostModel& c, const Plan& p, const Model& model, int bucket) {
    if (sends_codes(p, model, bucket))
        return double(codes_bytes(p, model, bucket));
    double codes = p.stored == Stored::INT8 ? 1 : 0.5;
    double elements = double(whole_elements(p.layout, model.buckets[bucket]));
    double narrow = 0;
    for (const Parameter& w : model.parameters) {
        bool here = w.bucket == bucket && is_narrow(p.stored, model, w);
        if (here)
            narrow += double(w.local_elements());
    }
    return elements * c.element - narrow * (c.element - codes);
}

// Keys of a tile. Those on the diagonal are computed whole, though half of their scores are masked.
constexpr double ATTENTION_TILE = 128;

// Return the keys that a query meets in tiles, on average on the rank that meets the most: those it
// sees, and masked ones. window: the keys that it sees at most; 0: no window.
inline double tiled_keys(const Plan& p, size_t window) {
    // A query sees half of a sequence on average, unless its rank has the last rows.
    double T = p.T;
    double most = window && window < p.T ? double(window) : T;
    double seen = most * (1 - most / (2 * T));
    double masked = ATTENTION_TILE / 2;
    int cp = p.layout.cp.size;
    int ways = keys_axis(p.layout).size; // ranks that share the queries of a head
    if (ways > 1) switch (p.layout.context.order) {
        // A tile with rows of two chunks meets all keys of the later one.
        case ContextOrder::ZIGZAG:
            if (T / (2 * cp) < ATTENTION_TILE) masked = T / 2;
            break;
        case ContextOrder::CONTIGUOUS: seen = std::min(most, T - T / (2 * ways)); break;
        // A tile's rows are cp tokens apart.
        case ContextOrder::STRIPED: masked *= cp; break;
    }
    return std::min(seen + masked, T);
}

// The share of attention's rate that is left where a ring takes keys in pieces.
constexpr double RING_RATE = 0.9;

// Whether plain kernels run attention.
inline bool is_plain(const CostModel& c, const Plan& p, const Shape& s) {
    if (!c.plain_attention) return false;
    AttentionCall call = attention_call(s, c.element);
    // On a CPU, tiles take all but soft caps (attention_tiled.cuh).
    if (c.machine.sms == 1) return call.softcap;
    AttentionDims d = context_attention_shape(s, p.layout, p.B, p.T);
    return attention_kernels(d, call, false) == AttentionKernels::PLAIN;
}

// Work of attention's backward pass, as a multiple of the forward pass's two products. It has five.
// Plain kernels make two of them twice, and the other three for hidden keys too, which are half of
// all keys under the causal mask: (2 * 2 + 3 * 2) / 2 = 5.
constexpr double FLASH_BACKWARD = 2.5, PLAIN_BACKWARD = 5;

// Return the seconds of a pass whose forward products are `flops`.
inline double attention_seconds(const CostModel& c, const Plan& p, const Shape& s, double flops,
                                bool backward) {
    if (is_plain(c, p, s))
        return (backward ? PLAIN_BACKWARD : 1) * flops / c.machine.plain_rate();
    bool pieces = p.layout.cp.size > 1 && p.layout.context.method == ContextMethod::RING;
    double rate = c.machine.attention_rate(c.element) * (pieces ? RING_RATE : 1);
    return (backward ? FLASH_BACKWARD : 1) * flops / rate;
}

// Attention in a pass of a block: the seconds of its kernels, and the bytes of stored scores.
struct AttentionCost { double seconds, bytes; };
inline AttentionCost block_attention(const CostModel& c, const Plan& p, const Shape& s, int layer,
                                     bool backward) {
    double heads = double(s.NH) / p.layout.tp.size;
    double rows = p.rows();
    if (c.tiled_attention) {
        double flops = 4 * rows * tiled_keys(p, window_of(s, layer)) * heads * s.HS;
        return {attention_seconds(c, p, s, flops, backward), 0};
    }

    // Count stored scores: they are made whole, and pass through mask, softmax and dropout.
    double T = p.T;
    double passes = backward ? 2 : 1;
    double whole = 4 * rows * T * heads * s.HS;
    double bytes = 5.0 * c.element * heads * rows * T;
    return {passes * 1.3 * whole / c.machine.gemm_rate(c.element), passes * bytes};
}

// Return the bytes that a block's norms, residual sums, biases, rotations and activation functions
// move, and those of rows on their way to experts on this rank and back.
inline double block_bytes(const CostModel& c, const Plan& p, const Shape& s) {
    // Norms and residual sums touch the stream ten times, with sequence parallelism 1/tp of it. Add
    // q, k, v twice and the ffn's inner rows three times.
    double N = p.rows();
    double e = c.element;
    double tp = p.layout.tp.size;
    double stream = p.layout.sequence_parallel ? N / tp : N;
    double gated = (widening_products(s) + 1) / 2.0;
    double F = width_of_ffn(s) * gated;
    double heads = (s.NH + 2 * s.NKV) * s.HS;

    // A token's row is read and written for each of its K experts, and their K outputs are read.
    double routed = s.experts.whole ? N / tp : N;
    double slots = s.experts.E ? 3 * routed * s.experts.K : 0;
    return e * ((10 * stream + slots) * s.C + N * (2 * heads + 3 * F) / tp);
}

// Return the seconds that a ring of keys waits: its hops carry those of all sequences. A hop hides
// behind attention to the keys that are there, as far as both can run at once; forward, the last of
// n pieces has no hop beside it. Backward, gradients follow their keys one hop later and go one hop
// further, beside nothing.
inline double ring_seconds(const CostModel& c, const Plan& p, const Shape& s, int layer,
                           const Link& ring, const ContextMessages& keys, bool backward) {
    double sent = double(backward ? keys.backward : keys.forward);
    double hops = ring.n - 1 + (backward ? 2 : 0);
    double wait = hops * ring.message(0) + sent / ring.message_rate();
    double last = backward ? ring.message(double(keys.backward - keys.forward) / ring.n) : 0;
    double attention = block_attention(c, p, s, layer, backward).seconds;
    double beside = backward ? 1 : double(ring.n - 1) / ring.n;
    double hidden = std::min(wait - last, beside * attention);
    return wait - (1 - c.machine.contention) * hidden;
}

// Return the seconds that a block waits for messages of context parallelism.
inline double context_seconds(const CostModel& c, const Plan& p, const Model& model, int layer,
                              bool backward) {
    const Layout& layout = p.layout;
    if (layout.cp.size == 1) return 0;
    Shape mine = rank_shape(model.shape, layout.tp.size, layout.tp.rank, false);
    bool narrow = c.element == 2;
    ContextMessages heads = narrow ? heads_messages<bf16>(mine, layout, p.rows())
                                   : heads_messages<float>(mine, layout, p.rows());
    ContextMessages keys = narrow ? keys_messages<bf16>(mine, layout, p.rows())
                                  : keys_messages<float>(mine, layout, p.rows());
    double passes = backward ? 2 : 1; // backward has twice as many messages
    double seconds = 0;

    // Neighbours exchange heads; those that share keys stand as many ranks apart.
    int near = axis_in_node(layout, c.machine, &Layout::cp);
    Link of_heads = link_of(c.machine, heads_axis(layout).size, near);
    int apart = std::max(1, near / of_heads.n);
    Link of_keys = link_of(c.machine, keys_axis(layout).size, apart);

    // Ulysses sends q, k, v and out of each sequence. It packs them: reads and writes all heads.
    if (of_heads.n > 1) {
        double messages = passes * 4 * p.B;
        double all = passes * of_heads.whole(double(heads.forward));
        seconds += messages * of_heads.all_to_all(all / messages);
        seconds += 2 * all / c.machine.memory_rate();
    }

    // Gather sends the keys of each sequence, and later their gradients.
    if (of_keys.n == 1) return seconds;
    if (layout.context.method == ContextMethod::RING)
        return seconds + ring_seconds(c, p, layer_shape(model.shape, layer), layer, of_keys, keys,
                                      backward);
    double messages = passes * p.B;
    double all = of_keys.whole(double(backward ? keys.backward : keys.forward));
    return seconds + messages * of_keys.all_gather(all / messages);
}

// Return the seconds of f and g of one branch of a block: with sequence parallelism, backward
// gathers the norm's rows again.
inline double branch_messages(const CostModel& c, const Plan& p, const Shape& s, bool backward) {
    Link tp = axis_link(p.layout, c.machine, &Layout::tp);
    double stream = double(p.rows() * s.C * c.element);
    double one = p.layout.sequence_parallel ? (backward ? 3 : 2) * tp.all_gather(stream)
                                            : tp.all_reduce(stream);
    return c.tensor_shown * one;
}
// Whether the second branch sends anything. Where experts are whole and no ffn stands beside them,
// it has no row to gather or sum.
inline bool second_branch_sends(const Shape& s) {
    const ExpertShape& e = s.experts;
    return !e.E || !e.whole || e.ffn_beside > 0;
}

// Return the seconds of a block's collectives: of both branches, other ranks' keys, experts' rows.
inline Times block_messages(const CostModel& c, const Plan& p, const Model& model, int layer,
                            bool backward) {
    const Layout& layout = p.layout;
    Shape s = layer_shape(model.shape, layer);
    double N = p.rows();
    Times t;
    t.tensor = (second_branch_sends(s) ? 2 : 1) * branch_messages(c, p, s, backward);
    t.context = context_seconds(c, p, model, layer, backward);

    // ep: rows of tokens go to the ranks that share out the experts, and sums come back.
    if (layout.ep > 1 && s.experts.E) {
        int near = ranks_in_node(layout, c.machine, Group::EXPERTS);
        Link ep = link_of(c.machine, layout.ep, near);
        double routed = N * s.C * c.element / (s.experts.whole ? layout.tp.size : 1);
        double share = exchanged_share(s, size_t(layout.ep));
        double message = layout.experts.exchange ? ep.all_to_all(share * routed * layout.ep)
                                            : ep.all_gather(routed * layout.ep);
        t.experts = (backward ? 4 : 2) * message;

        // The ffn for all tokens hides a message of F, one of I and one of W (expert_parallel.h).
        double width = double(s.experts.ffn_beside) / layout.tp.size;
        double product = s.experts.ffn_beside ? product_seconds(c, N, width, double(s.C)) : 0;
        auto hidden = [&](int products) { return std::min(message, products * product); };
        t.experts -= backward ? hidden(1) + hidden(3) : hidden(2);
    }
    return t;
}

// Return the seconds that a layer's gradients take where they are added apart from their products.
inline double accumulate_seconds(const CostModel& c, const Model& model, int layer) {
    if (c.accumulated == 0) return 0; // products add to them, as here
    double elements = 0;
    for (const Parameter& w : model.parameters)
        if (w.layer == layer) elements += double(w.local_elements());
    return c.accumulated * elements / c.machine.memory_rate();
}

// Return the seconds of attention in generation, where each sequence's row sees `cache` keys: it
// computes, or reads its keys and values.
inline AttentionCost cached_attention(const CostModel& c, const Plan& p, const Shape& s,
                                      int layer) {
    const Axis& tp = p.layout.tp;
    Shape mine = rank_shape(s, tp.size, tp.rank, false); // tp ranks may share a key's head
    size_t window = window_of(s, layer);
    double seen = double(window ? std::min(window, p.cache) : p.cache);
    double flops = 4 * double(p.rows()) * seen * double(mine.NH * mine.HS);
    double elements = double(p.B) * seen * double(cached_elements(mine));
    double reading = double(c.element) * elements / c.machine.memory_rate();
    return {std::max(attention_seconds(c, p, s, flops, false), reading), 0};
}

// Return the parts of a block's forward pass, or of its backward pass.
inline Times block_seconds(const CostModel& c, const Plan& p, const Model& model, int layer,
                           bool backward) {
    Shape s = layer_shape(model.shape, layer);
    AttentionCost attention = block_attention(c, p, s, layer, backward);
    // A row of each sequence reads what generation has kept.
    bool cached = p.mode == Mode::GENERATE && p.T == 1;
    if (cached) attention = cached_attention(c, p, s, layer);
    Times t = block_messages(c, p, model, layer, backward);
    t.products = block_products(c, p, model, layer);
    if (backward) t.products += block_products(c, p, model, layer, true);
    t.products += cast_seconds(c, p, model, layer, backward ? Makes::DINP : Makes::OUT);
    if (backward) t.products += cast_seconds(c, p, model, layer, Makes::DW);

    t.attention = attention.seconds;
    double bytes = (backward ? 2 : 1) * block_bytes(c, p, s) + attention.bytes;
    double dequantised = dequantised_bytes(c, p, model, layer);
    t.memory = (bytes + dequantised) / c.machine.elementwise_rate();
    if (backward) t.memory += accumulate_seconds(c, model, layer);

    // Add the host's launches, as far as the device's work does not hide them.
    double work = t.products + t.attention + t.memory;
    double launches = c.machine.launch_us * 1e-6 * (backward ? 1.5 : 1);
    t.launch = std::max(launches - work, 0.0);
    return t;
}

// Return the parts of R: what the layer's level of recomputation makes again.
inline Times recompute_seconds(const CostModel& c, const Plan& p, const Model& model, int layer) {
    Shape s = layer_shape(model.shape, layer);
    Recompute level = p.recompute.of(layer);
    Times all = block_seconds(c, p, model, layer, false), t;

    // Take the share of the products that is made again. This program leaves out the ffn's last
    // product, but not inside a segment nor before a norm; other programs redo it.
    bool whole = c.redoes_all || remakes_output(p, model, layer);
    double last = last_product_flops(s);
    double redone = recompute_flops(s, 0, level) + (whole && redoes_ffn(level) ? last : 0);
    t.recompute = all.products * redone / (recompute_flops(s, 0, Recompute::FULL) + last);

    // Add attention and its messages. In other programs SELECTIVE recomputes attention's scores.
    bool scores = c.redoes_all && level != Recompute::NONE;
    if (redoes_attn(level) || scores)
        t.recompute += all.attention;
    t.recompute += all.memory;
    if (redoes_attn(level)) t.context = all.context;

    // Add the sums behind products that are made again, and the rows that they read. Experts' rows
    // come once more.
    double branch = branch_messages(c, p, s, false);
    double gather = p.layout.sequence_parallel ? branch / 2 : 0;
    if (redoes_attn(level)) t.tensor = branch;
    if (redoes_ffn(level)) {
        if (second_branch_sends(s)) t.tensor += whole || s.block.post_norm ? branch : gather;
        t.experts = all.experts / 2;
    }
    t.launch = level == Recompute::FULL ? all.launch : 0;
    return t;
}

// Return the parts of the embedding, which looks up rows and sums those of all ranks. Backward adds
// to them. Sequence parallelism scatters and gathers rows.
inline Times embedding_seconds(const CostModel& c, const Plan& p, const Model& model,
                               bool forward) {
    Times t;
    double bytes = p.rows() * model.shape.C * c.element;
    Link tp = axis_link(p.layout, c.machine, &Layout::tp);
    t.memory = 3 * bytes / c.machine.elementwise_rate();
    if (p.layout.sequence_parallel) t.tensor = tp.all_gather(bytes);
    else if (forward) t.tensor = tp.all_reduce(bytes);
    return t;
}

// Return the parts of a walk over the head's logits that makes their loss: logits are written by
// their product, then read. An evaluation does no more.
inline Times walk_seconds(const CostModel& c, const Plan& p, const Model& model) {
    Times t;
    double N = p.mode == Mode::GENERATE ? double(p.B * p.scored) : double(p.rows());
    double V = double(model.shape.Vp()) / p.layout.tp.size;
    t.products = product_seconds(c, N, V, double(model.shape.C));
    t.memory = 2 * double(c.element) * N * V / c.machine.elementwise_rate();
    return t;
}

// Return the parts of the head: logits, loss, both gradients. In training its backward pass makes
// all of them.
inline Times head_seconds(const CostModel& c, const Plan& p, const Model& model) {
    Times walk = walk_seconds(c, p, model);
    Times t = walk;
    double N = p.rows();
    double V = double(model.shape.Vp()) / p.layout.tp.size;
    double C = model.shape.C;
    double stream = N * C * double(c.element);
    Link tp = axis_link(p.layout, c.machine, &Layout::tp);
    if (p.mode != Mode::TRAIN) {
        t.tensor = p.layout.sequence_parallel ? tp.all_gather(stream) : 0;
        return t;
    }

    // The gradient reads logits and writes itself, and the products behind it read that. A frozen
    // head has no weight gradient.
    double pass = walk.memory / 2; // over all logits
    int gradients = trains_adapters(model.shape) ? 1 : 2;
    t.products += gradients * walk.products;
    t.memory += 4 * pass;
    t.memory += c.accumulated * C * V / c.machine.memory_rate();
    t.tensor = tp.all_reduce(stream);

    // Objectives over sequences walk the logits once before (head.h). A teacher's are written, then
    // read by maxima, sums and the gradient; the student's are read by the maxima as well.
    if (p.objective.rows()) add_times(t, walk);
    if (p.objective.distills()) {
        t.products += product_seconds(c, N, V, c.teacher_C);
        t.memory += 5 * pass;
    }
    return t;
}

// Return the expected maximum of n independent normal numbers, in standard deviations.
inline double expected_maximum(int n) {
    if (n == 1) return 0;
    // Integrate 1 - Phi(x)^n above 0, less Phi(x)^n below it.
    auto integrate = [](double n) {
        double sum = 0, dx = 1.0 / 64;
        for (double x = dx / 2; x < 9; x += dx) {
            double beyond = std::erfc(x / std::sqrt(2.0)) / 2;
            sum += 1 - std::pow(1 - beyond, n) - std::pow(beyond, n);
        }
        return sum * dx;
    };

    // Keep it for powers of two. Between them it grows almost evenly with the logarithm of n.
    static const std::vector<double> known = [&] {
        std::vector<double> of;
        for (int power = 0; power < 32; power++)
            of.push_back(integrate(std::exp2(power)));
        return of;
    }();
    double power = std::log2(double(n));
    size_t below = size_t(power);
    return std::lerp(known[below], known[below + 1], power - double(below));
}

// Return the parts of an action that runs a layer, on an average rank. B is I and W: each of them
// has half of the products, and I has all the rest.
inline Times even_seconds(const CostModel& c, const Plan& p, const Model& model, const Action& a) {
    // Take the two ends of the model first: they have costs of their own.
    bool forward = a.op == Op::F;
    if (a.layer == model.head())
        return forward && p.mode == Mode::TRAIN ? Times() : head_seconds(c, p, model);
    if (a.layer == 0)
        return embedding_seconds(c, p, model, forward);
    if (a.op == Op::R)
        return recompute_seconds(c, p, model, a.layer);

    // Take a block's pass, and split a backward pass where I and W are apart.
    Times t = block_seconds(c, p, model, a.layer, !forward);
    if (forward || a.op == Op::B)
        return t;
    Times w;
    w.products = block_products(c, p, model, a.layer, true);
    w.products += cast_seconds(c, p, model, a.layer, Makes::DW);
    t.products -= w.products;
    return a.op == Op::I ? t : w;
}
// Return the same on the slowest of a stage's ranks.
inline Times layer_seconds(const CostModel& c, const Plan& p, const Model& model, const Action& a) {
    Times t = even_seconds(c, p, model, a);
    double computing = t.products + t.attention + t.memory + t.recompute;
    int ranks = p.layout.world() / p.layout.pp.size;
    t.jitter = c.machine.jitter * expected_maximum(ranks) * computing;
    t.launch -= std::min(t.launch, t.jitter); // longer work hides more of the host's
    return t;
}

} // namespace llmc
