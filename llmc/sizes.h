// sizes.h - how many bytes each datum takes on this rank, known before the run
//   data_bytes() answers for every Kind of action.h. The tables of parameters, activations and
//   scratch give the elements; layout and options cut them. The arena places the results, and
//   --explain prints them.
#pragma once
#include "action.h"
#include "adapters.h"
#include "arena.h"
#include "context.h"
#include "context_parallel.h"
#include "expert_parallel.h"
#include "family.h"
#include "fp8.h"
#include "head.h"
#include "mla.h"
#include "model.h"
#include "muon.h"
#include "offload.h"
#include "ops/attention_types.h"
#include "ops/column_sums.cuh"
#include "ops/embedding.cuh"
#include "ops/fp8_delayed.cuh"
#include "ops/grouped_matmul.cuh"
#include "ops/grouped_mma.cuh"
#include "ops/layernorm.cuh"
#include "ops/linear.cuh"
#include "ops/lora.cuh"
#include "ops/lora_grouped.cuh"
#include "ops/matmul.cuh"
#include "ops/muon.cuh"
#include "ops/objective.cuh"
#include "ops/small_states.cuh"
#include "ops/step_scale.h"
#include "ops/tensor_table.cuh"
#include "ops/types.h"
#include "quantised.h"
#include "sharding.h"
#include "tensor_parallel.h"
#include "zero.h"
#include <map>
#include <tuple>

namespace llmc {

// ----------------------------------------------------------------------------
// scratch: memory that a layer needs only while it runs

// The bytes of the head's own activations. Sums the rows as head_acts() in layers.h binds them.
template <typename T>
size_t head_bytes(const Plan& p, const Shape& s) {
    size_t bytes = 0;
    HeadActs<T> acts;
    head_activations(acts, s, head_rows(p), [&](auto*& a, const char*, size_t n, Keep, Last) {
        bytes += round_up(n * sizeof(*a), ARENA_ALIGN);
    });
    return bytes;
}

// The head's workspace. Its products run over chunks of rows; the last chunk may have fewer.
template <typename T, typename S>
size_t head_workspace(const Plan& p, const Shape& s, S where) {
    size_t rows = head_rows(p), chunk = head_chunk_rows(s, rows, sizeof(T)), rest = rows % chunk;
    if (p.mode == Mode::GENERATE) chunk = rows; // generation keeps all its logits

    // Take the sums of a LayerNorm, which are enough for an RMSNorm too, or a product's scratch.
    size_t most = layernorm_sums(p.rows(), s.C, where) * sizeof(acc_t<T>);
    most = std::max(most, linear_scratch_bytes<T>(chunk, s.Vp(), s.C, where));
    if (rest)
        most = std::max(most, linear_scratch_bytes<T>(rest, s.Vp(), s.C, where));
    return most;
}

// The workspace of experts: their products by group, the router's product into acc, and how often
// each sequence chose each expert.
template <typename T, typename S>
size_t expert_workspace(const Plan& p, const Model& model, const Shape& s, const Parameter& stack,
                        S where) {
    const ExpertShape& e = s.experts;
    // Size the experts' products and their adapters'. Any expert may get all rows, or none.
    size_t N = p.rows();
    ExpertCounts n = expert_counts(s, N);
    Groups g = {nullptr, n.experts, stack.local_rows() / n.experts, stack.local_cols(), n.rows};
    size_t bytes = std::max(grouped_scratch_bytes<T>(g, where), p.B * e.E * sizeof(int));
    for (size_t r : ranks_of(model, stack))
        bytes = std::max(bytes, lora_grouped_scratch_bytes<T>(g, r, where));
    if (e.ranks > 1)
        bytes = std::max(bytes, n.slots * sizeof(int)); // slots' experts, by this rank's numbers
    if (p.layout.experts.exchange)
        bytes = std::max(bytes, travel_bytes(e.ranks, routed_rows(s, N)));

    // Whole experts know all tokens' choices: those that are taken pass through here.
    size_t choices = N * e.K * sizeof(int);
    if (e.whole)
        bytes = std::max(bytes, choices);

    // Size the router's product, for all rows and in generation for a single token.
    size_t rows = p.mode == Mode::GENERATE ? 1 : routed_rows(s, N);
    for (size_t n : {N, rows}) {
        bytes = std::max(bytes, wide_product_scratch_bytes<T>(n, e.E, s.C, where));
        bytes = std::max(bytes, wide_product_scratch_bytes<T>(n, 1, s.C, where)); // shared router
    }
    return bytes;
}

// The workspace of a block. Operators run one after another, so it is the most that any asks for.
template <typename T, typename S>
size_t block_workspace(const Plan& p, const Model& model, const Shape& s, int layer, S where) {
    size_t N = p.rows(), most = 0, sums = 0;
    bool generates = p.mode == Mode::GENERATE;

    // Size the products: they run on all rows, on a rank's share of the rows, or in generation on
    // the last rows of each sequence. All biases may be summed in one call.
    for (const Parameter& w : model.parameters) {
        if (w.layer != layer) continue;
        if (w.shape.size() == 1) {
            sums += column_sums_scratch_bytes(N, w.local_elements(), where);
            continue;
        }
        // A table's gradient sorts tokens.
        if (w.is_value_table()) {
            most = std::max(most, embedding_scratch_bytes(N, where));
            continue;
        }
        // Products with a stack run expert by expert.
        if (w.stack > 1) {
            most = std::max(most, expert_workspace<T>(p, model, s, w, where));
            continue;
        }

        // A matrix: the product's own scratch or its adapter's, and behind it the operands in fp8,
        // of which the input may serve the next product too.
        for (size_t rows : {N, generates ? head_rows(p) : N, N / s.rank.rows}) {
            size_t OC = w.local_rows(), IC = w.local_cols();
            size_t bytes = linear_scratch_bytes<T>(rows, OC, IC, where);
            for (size_t r : ranks_of(model, w))
                bytes = std::max(bytes, lora_scratch_bytes<T>(rows, OC, IC, r, where));
            most = std::max(most, bytes + linear_fp8_bytes(rows, OC, IC, s.fp8.kind));
        }
    }
    most = std::max(most, sums);

    // Size attention over a micro-batch, or in generation over prompts, over one token of each
    // sequence, and over the last rows of each. Context-parallel ranks run a share of a sequence.
    std::vector<std::pair<size_t, size_t>> batches = {{p.B, p.T}};
    if (generates)
        batches = {{1, N}, {p.B, (N + p.B - 1) / p.B}, {p.B, 1}, {p.B, p.scored}};
    for (auto [sequences, Tq] : batches) {
        AttentionDims d = attention_shape(s, sequences, Tq, std::max(p.T, p.cache));
        if (p.layout.cp.size > 1)
            d = context_attention_shape(s, p.layout, p.B, p.T);
        most = std::max(most, attention_scratch_bytes<T>(d, threads_here(where), where));
    }
    return most;
}

// The bytes of a block's scratch for the keys of other context-parallel ranks.
template <typename T>
size_t context_bytes(const Plan& p, const Shape& s) {
    if (p.layout.cp.size == 1) return 0;
    return context_scratch_bytes<T>(s, p.layout, p.B, p.T, p.mode == Mode::TRAIN);
}

// The bytes that a rank sends for context-parallel attention, in all blocks of a plan.
template <typename T>
size_t context_plan_bytes(const Plan& p, const Model& model) {
    if (p.layout.cp.size == 1) return 0;
    ContextMessages each = context_messages<T>(rank_shape(p, model), p.layout, p.rows());
    size_t bytes = 0;
    for (const Action& a : p.actions) {
        // The embedding and the head need no rows of other context-parallel ranks.
        if (a.layer < 1 || a.layer >= model.head())
            continue;
        bool again = a.op == Op::R && redoes_attn(p.recompute.of(a.layer));
        if (a.op == Op::F || again)
            bytes += each.forward;
        if (a.op == Op::B || a.op == Op::I)
            bytes += each.backward;
    }
    return bytes;
}

// The scratch table of a layer. Layer -1 stands for NORM.
template <typename T, typename S>
ScratchTable scratch_table(const Plan& p, const Model& model, int layer, S where) {
    using enum ScratchKind;
    const Shape s = layer_shape(rank_shape(p, model), layer);
    size_t N = p.rows(), all_rows = s.rank.rows > 1 ? N * s.C * sizeof(T) : 0;

    // NORM and the head have rows of their own. Embedding and blocks gather rows over tp.
    ScratchTable table;
    if (layer < 0) {
        // NORM and MUON run one after the other, but have scratch of their own.
        table.add(NORM_SUMS, norm_chunks(model) * sizeof(double));
        // Any rank may be the owner of the largest matrix.
        size_t room = 0, workspace = 0;
        for (const MuonMatrix& m : muon_matrices(p.layout, model)) {
            room = std::max(room, muon_room_bytes<T>(m));
            workspace = std::max(
                workspace, muon_scratch_bytes<orthogonal_t<T>>(m.rows, m.cols, where));
        }
        table.add(WORKSPACE, workspace);
        table.add(MUON, room);
    } else if (layer == model.head()) {
        table.add(WORKSPACE, head_workspace<T>(p, s, where));
        table.add(HEAD, head_bytes<T>(p, s));
    } else {
        size_t workspace = layer == 0 ? embedding_scratch_bytes(N, where)
                                      : block_workspace<T>(p, model, s, layer, where);
        table.add(WORKSPACE, workspace);
        table.add(ALL_ROWS, all_rows);

        // Experts need rows of slots, and if ranks share out the experts rows of all tokens.
        if (layer > 0 && s.experts.E) {
            ExpertCounts n = expert_counts(s, N);
            table.add(SLOT_ROWS, n.rows * s.C * sizeof(T));
            if (s.experts.ranks > 1)
                table.add(TOKEN_ROWS, n.tokens * s.C * sizeof(T));
            if (p.layout.experts.exchange)
                table.add(EXCHANGE_ROWS, 2 * n.tokens * s.C * sizeof(T));
        }

        // The rest belongs to single techniques: without them a row has 0 bytes.
        if (layer > 0 && s.latent.kv)
            table.add(HEADS,
                      latent_rooms(s, N, p.mode, largest_rank(model, layer)) * sizeof(T));
        table.add(WIDE, wide_bytes<T>(p.stored, model, layer));
        size_t slots = s.experts.E ? expert_counts(s, N).rows : 0;
        size_t room = std::max(N * largest_rank(model, layer),
                               slots * largest_rank(model, layer, true));
        table.add(ROOM, room * sizeof(T));
        if (layer > 0)
            table.add(CONTEXT, context_bytes<T>(p, s));
    }
    return table;
}

// ----------------------------------------------------------------------------
// every datum

// The bytes of RoPE's table (P, rotary/2, 2), of two such tables, or of ALiBi's slopes (NH).
template <typename T>
size_t constants_bytes(const Plan& p, const Model& model, const Shape& s) {
    size_t positions = std::max(p.T, p.cache) + s.tuned.prefix;
    switch (s.embedding.position) {
    case Position::ROPE:
        return (s.rope.window_theta ? 2 : 1) *
               round_up(positions * rotary_channels(s, s.HS) * sizeof(acc_t<T>), ARENA_ALIGN);
    case Position::ALIBI: return model.shape.NH * sizeof(float);
    default: return 0;
    }
}

// The bytes of all rows of the activation table that lie in one group of a layer.
template <typename T, typename S>
size_t activation_bytes(const Plan& p, const Shape& s, Data group, S where) {
    size_t bytes = 0;
    for (const Activation& row : activation_table<T>(layer_shape(s, group.of), p.rows(), where))
        if (activation_group(row.keep, row.last, p.recompute.of(group.of)) == group.kind)
            bytes += round_up(row.bytes, ARENA_ALIGN);
    return bytes;
}

// The bytes of the 8-bit moments of `elements` that this rank keeps, tensor after tensor.
inline size_t small_state_bytes(const Plan& p, const Model& model, Data d, size_t elements) {
    size_t skip = d.chunk < 0 ? 0 : p.offload.chunk * size_t(d.chunk);
    size_t first = kept_first(p.layout, model, d) + skip, bytes = 0;
    for (const TensorRow& row : tensor_rows(model, d.of, first, first + elements))
        bytes = row.state + state_bytes(row.n, row.small);
    return bytes;
}

// The bytes of a datum on this rank under a plan. 0: the plan has no such datum.
template <typename T, typename S>
size_t data_bytes(const Plan& p, const Model& model, Data d, S where) {
    using enum Kind;
    typedef acc_t<T> A;
    const Shape s = rank_shape(p, model);

    // Count the elements of a bucket's datum. A chunk is a part of what this rank updates.
    Data kept = d.chunk < 0 ? d : Data{MASTER, d.of};
    size_t N = p.rows(), elements = of_bucket(d.kind) ? kept_elements(p.layout, model, kept) : 0;
    elements = chunk_elements(p.offload, elements, d.chunk);

    // Turn elements into bytes, or look the datum up in its table.
    switch (d.kind) {
    // Weights and masters. A master exists only if weights are narrower than acc.
    case WEIGHT:
        if (is_narrow(p.stored, model, d.of))
            return stored_range<T>(p.stored, p.layout, model, d.of).count;
        return elements * sizeof(T);
    case GATHERED:
        if (is_narrow(p.stored, model, d.of))
            return gathered_bytes<T>(p.stored, p.layout, model, d.of);
        return elements * sizeof(T);
    case MASTER: return sizeof(T) < sizeof(A) ? elements * master_bytes(p.masters) : 0;

    // Moments are in acc, bf16 or 8 bits, whatever the type of weights.
    case STATE:
        if (p.states == States::EIGHT_BIT)
            return small_state_bytes(p, model, d, elements);
        if (d.micro == 1) {
            Range range = chunk_of(updated_range(p.layout, model, d.of), p.offload, d.chunk);
            elements = second_moments(model, d.of, range.first, range.first + elements);
        }
        return elements * (p.states == States::BF16 ? sizeof(bf16) : sizeof(A));

    // NorMuon's second moments are few, so every rank has those of all its matrices.
    case NEURONS: return neurons_of(model.parameters[d.micro]) * sizeof(A);

    // The mean of weights moves by less than a bf16 has bits for.
    case EMA: return p.ema ? elements * sizeof(A) : 0;

    // Gradients are in acc, except for the copy that is sent. Sums of their squares are doubles.
    case GRAD:
    case PARTIAL:
    case GRAD_HERE:
    case TIED_HERE:
    case GRAD_TIED: return elements * sizeof(A);
    case SENT: return sent_gradient_bytes(p.gradients, p.layout, model.buckets[d.of]);
    case SQUARES: return updated_norm_chunks(p.layout, model, d.of) * sizeof(double);

    // All offloaded data of a chunk, one after the other; or a shard of weights.
    case MOMENTUM:
    case STAGED: {
        size_t bytes = 0;
        if (d.chunk < 0)
            return data_bytes<T>(p, model, {WEIGHT, d.of}, where);
        for (Data part : staged_data(p, d))
            bytes += round_up(data_bytes<T>(p, model, part, where), ARENA_ALIGN);
        return bytes;
    }

    // A parked datum takes in its tier what it takes on the device.
    case PARKED: return data_bytes<T>(p, model, {Kind(d.chunk), d.of, d.micro}, where);

    // Single values, and tables that last for the run.
    case SCALE: return sizeof(StepScale);
    case AMAX: return fp8_history_bytes(fp8_slots(model), model.shape.fp8.rule);
    case CAST: return cast_bytes(p, model);
    case MAXIMA: return maxima_bytes(p, model);
    case CODES: return codes_bytes(p, model, d.of);
    case CONSTANTS: return constants_bytes<T>(p, model, s);
    case CACHE: return p.B * p.cache * cached_elements(s) * sizeof(T);

    // The step's input: tokens, targets, positions, doc_start, and the positions of other keys.
    case VALID: return 0; // the trainer itself holds this number
    case TOKENS: return p.input_numbers() * sizeof(int);

    // The residual stream, whose rows sequence parallelism shares out, and results of the head.
    case STREAM:
    case DSTREAM: return N / s.rank.rows * s.C * sizeof(T);
    case LOSS: // after the sums, evaluation keeps three numbers for each row
        return p.mode == Mode::EVALUATE ? ARENA_ALIGN + 3 * N * sizeof(A) : sizeof(LossSums);
    case LOGITS: return head_rows(p) * s.Vp() * sizeof(T);
    case LOADS: return loads_bytes(model.shape);

    // A layer's own memory: scratch, and the six groups of its activations.
    case SCRATCH: return scratch_table<T>(p, model, d.of, where).bytes;
    case KEPT_B:
    case KEPT_W:
    case REDO_B:
    case REDO_W:
    case GRADIENT_B:
    case GRADIENT_W: return activation_bytes<T>(p, s, d, where);
    }
    return 0;
}

// ----------------------------------------------------------------------------
// a place for every byte

// Give each datum of the plans its place. Nothing is allocated.
template <typename T, typename S>
Arena place_plans(const std::vector<Plan>& plans, const Model& model, S where) {
    // A size does not depend on the micro-batch: compute it once. Data that last have no such one.
    std::map<std::tuple<const Plan*, Kind, int, int, int>, size_t> known;
    return arena_place(plans, model, [&](const Plan& p, Data d) {
        int number = persistent(d.kind) ? d.micro : -1;
        auto [entry, fresh] = known.insert({{&p, d.kind, d.of, number, d.chunk}, 0});
        if (fresh)
            entry->second = data_bytes<T>(p, model, d, where);
        return entry->second;
    });
}

// The scratch table of every layer that a plan runs.
template <typename T, typename S>
std::map<int, ScratchTable> scratch_tables(const Plan& p, const Model& model, S where) {
    std::map<int, ScratchTable> tables;
    for (const Action& a : p.actions)
        if (!tables.count(a.layer))
            tables[a.layer] = scratch_table<T>(p, model, a.layer, where);
    return tables;
}

} // namespace llmc
