// sizes.h - how many bytes each datum takes on this rank, known before the run
//   data_bytes() answers for every Kind of action.h. The parameter, activation and scratch
//   tables give elements, layout and options cut them; the arena places the answers,
//   --explain prints them.
#pragma once
#include "adamw.cuh"
#include "amaxes.h"
#include "arena.h"
#include "family.h"
#include "frozen.h"
#include "grad_norm.cuh"
#include "rand.h"

namespace llmc {

// ----------------------------------------------------------------------------
// activations

// The group in which a row of the activation table lies.
inline Kind activation_group(Keep keep, Last last, Recompute level) {
    bool w = last == Last::W;
    if (keep == Keep::GRADIENT)
        return w ? Kind::GRADIENT_W : Kind::GRADIENT_B;
    if (recomputed(keep, level))
        return w ? Kind::REDO_W : Kind::REDO_B;
    return w ? Kind::KEPT_W : Kind::KEPT_B;
}

// The shape that this rank computes with under a plan: generation never cuts rows.
inline Shape rank_shape(const Plan& p, const Model& model) {
    bool cut_rows = p.layout.sequence_parallel && p.mode != Mode::GENERATE;
    Shape s = rank_shape(model.shape, p.layout.tp.size, p.layout.tp.rank, cut_rows);
    s.expert_ranks = size_t(p.layout.ep);
    s.objective = p.objective;
    return s;
}

// ----------------------------------------------------------------------------
// the rows that norm and optimizer walk

// Whether a parameter's moments may be 8 bits: those of a block's larger matrices. Tables, vectors
// and the head stay float, for training is unstable without (transformers #14819).
inline bool has_small_states(const Model& model, const Parameter& p) {
    Role role = model.buckets[p.bucket].role;
    bool block = role == Role::BLOCK || role == Role::EXPERTS || role == Role::ADAPTER;
    return block && p.shape.size() == 2 && p.elements() >= 4096;
}

// The parameters of elements [from, to) of a bucket, by their distance from `from`.
// Rows know the parameter's name and the place of each element in the whole of it, so that
// stochastic rounding is the same for all shards and pieces.
inline std::vector<TensorRow> tensor_rows(const Model& model, int bucket, size_t from, size_t to) {
    const Bucket& b = model.buckets[bucket];
    std::vector<TensorRow> rows;
    size_t state = 0; // bytes of the rows before, in 8 bits
    for (int i : b.in_order) {
        const Parameter& p = model.parameters[i];
        size_t start = std::max(p.offset, from);
        size_t end = std::min(p.offset + p.local_elements(), to);
        if (start >= end) continue;
        // Under tp a parameter is a piece of the whole.
        PieceRuns piece = piece_runs(p, model.tp_rank, model.tp);
        rows.push_back({start - from, end - start, p.decay, fnv1a(p.name), start - p.offset,
                        piece.start, piece.run, piece.gap, state, has_small_states(model, p),
                        learning_rate_of(model, p)});
        state += state_bytes(end - start, rows.back().small);
    }
    return rows;
}

// Chunks of the norm in the first `to` elements of a bucket; in all buckets.
inline size_t norm_chunks(const Model& model, int bucket, size_t to) {
    size_t n = 0;
    for (const TensorRow& row : tensor_rows(model, bucket, 0, to))
        n += chunks_of(row);
    return n;
}
inline size_t norm_chunks(const Model& model) {
    size_t n = 0;
    for (size_t b = 0; b < model.buckets.size(); b++)
        n += norm_chunks(model, int(b), model.buckets[b].elements);
    return n;
}

// Chunks of the norm in the range of a bucket that this rank updates.
inline size_t updated_norm_chunks(const Layout& layout, const Model& model, int bucket) {
    Range range = updated_range(layout, model, bucket);
    size_t n = 0;
    for (const TensorRow& row : tensor_rows(model, bucket, range.first, range.first + range.count))
        n += chunks_of(row);
    return n;
}

// ----------------------------------------------------------------------------
// scratch: what a layer needs only while it runs, as a table of rows

enum class ScratchKind : uint8_t {
    WORKSPACE, // products, norms, attention, embedding: beside their operands
    ALL_ROWS,  // (N,C) the rows of all tensor-parallel ranks
    SLOT_ROWS, // (M,C) rows by expert, on their way into a product or out of it
    TOKEN_ROWS, // (ep,N,C) the rows of all expert-parallel ranks
    EXCHANGE_ROWS, // (2,ep,N,C) those that are sent and received, where only these travel
    HEADS,     // (rooms,N,NH,HS) keys and values as latent attention expands them
    HEAD,      // the head's own activations (head.h)
    WIDE,      // a frozen matrix, dequantised
    ROOM,      // (N,r) between the two products of an adapter
    CONTEXT,   // keys and values of all context-parallel ranks, and their gradients
    NORM_SUMS  // a sum of squares a chunk
};

// Offsets count bytes from the start of the layer's scratch.
struct ScratchRow {
    ScratchKind name;
    size_t offset, bytes;
};

// Rows lie side by side: unlike the arena's data, all of them live while the layer runs.
struct ScratchTable {
    std::vector<ScratchRow> rows;
    size_t bytes = 0;

    void add(ScratchKind name, size_t size) {
        if (!size) return;
        rows.push_back({name, bytes, size});
        bytes += round_up(size, ARENA_ALIGN);
    }
    const ScratchRow* find(ScratchKind name) const {
        for (const ScratchRow& row : rows)
            if (row.name == name) return &row;
        return nullptr;
    }
};

// Rows that the head works on: all of a micro-batch, or the last of each sequence when generating.
inline size_t head_rows(const Plan& p) {
    return p.mode == Mode::GENERATE ? p.B * p.scored : p.rows();
}

// The head's own rows, counted by the visitor that trainer.h binds them with.
template <typename T>
size_t head_bytes(const Plan& p, const Shape& s) {
    size_t bytes = 0;
    HeadActs<T> acts;
    head_activations(acts, s, head_rows(p), [&](auto*& a, const char*, size_t n, Keep, Last) {
        bytes += round_up(n * sizeof(*a), ARENA_ALIGN);
    });
    return bytes;
}

// The head's products have a chunk of rows, the last one fewer.
template <typename T, typename S>
size_t head_workspace(const Plan& p, const Shape& s, S where) {
    size_t rows = head_rows(p), chunk = head_chunk_rows(s, rows, sizeof(T)), rest = rows % chunk;
    if (p.mode == Mode::GENERATE) chunk = rows; // its logits are kept, all of them
    // One figure serves both families: LayerNorm has a sum more.
    size_t most = layernorm_sums(p.rows(), s.C, where) * sizeof(acc_t<T>);
    most = std::max(most, linear_scratch_bytes<T>(chunk, s.Vp(), s.C, where));
    if (rest)
        most = std::max(most, linear_scratch_bytes<T>(rest, s.Vp(), s.C, where));
    return most;
}

// Slots of each block's experts, over a step.
inline size_t loads_bytes(const Shape& s) { return s.L * s.E * sizeof(int); }

// Experts: products by group, the router's into acc, a sequence's loads.
template <typename T, typename S>
size_t expert_workspace(const Plan& p, const Shape& s, const Parameter& stack, S where) {
    // Any expert may get all rows, or none.
    size_t N = p.rows();
    ExpertCounts n = expert_counts(s, N);
    Groups g = {nullptr, n.experts, stack.local_rows() / n.experts, stack.local_cols(), n.rows};
    size_t bytes = std::max(grouped_scratch_bytes<T>(g, where), p.B * s.E * sizeof(int));
    if (s.expert_ranks > 1)
        bytes = std::max(bytes, n.slots * sizeof(int)); // their experts, as this rank numbers them

    // A token that is generated asks the router alone.
    size_t rows = p.mode == Mode::GENERATE ? 1 : N;
    for (size_t n : {N, rows}) {
        bytes = std::max(bytes, wide_product_scratch_bytes<T>(n, s.E, s.C, where));
        bytes = std::max(bytes, wide_product_scratch_bytes<T>(n, 1, s.C, where)); // shared experts'
    }
    return bytes;
}

// Operators run one after another, so the workspace is the most that any of them asks for.
template <typename T, typename S>
size_t block_workspace(const Plan& p, const Model& model, const Shape& s, int layer, S where) {
    size_t N = p.rows(), most = 0, sums = 0;
    bool generates = p.mode == Mode::GENERATE;

    // Products have all rows, one token's when generating, or a rank's share of the rows.
    // All biases may be summed in one call.
    for (const Parameter& w : model.parameters) {
        if (w.layer != layer) continue;
        if (w.shape.size() == 1) {
            sums += column_sums_scratch_bytes(N, w.local_elements(), where);
            continue;
        }
        // Stacks are multiplied an expert at a time.
        if (w.stack > 1) {
            most = std::max(most, expert_workspace<T>(p, s, w, where));
            continue;
        }
        for (size_t rows : {N, generates ? head_rows(p) : N, N / s.row_ranks}) {
            size_t OC = w.local_rows(), IC = w.local_cols();
            size_t bytes = linear_scratch_bytes<T>(rows, OC, IC, where);
            size_t operands = linear_fp8_bytes(rows, OC, IC, s.fp8);
            most = std::max(most, bytes + operands);
            if (w.adapter < 0) continue;
            size_t r = model.parameters[w.adapter].rows();
            most = std::max(most, lora_scratch_bytes<T>(rows, OC, IC, r, where));
        }
    }
    most = std::max(most, sums);

    // Attention has the queries of a prompt, then the last of each sequence; or its share of one.
    std::vector<std::pair<size_t, size_t>> batches = {{p.B, p.T}};
    if (generates) batches = {{1, p.T}, {p.B, 1}, {p.B, p.scored}};
    for (auto [sequences, Tq] : batches) {
        AttentionDims d = attention_shape(s, sequences, Tq, std::max(p.T, p.cache));
        if (p.layout.cp.size > 1)
            d = context_attention_shape(s, p.layout, p.B, p.T);
        most = std::max(most, attention_scratch_bytes<T>(d, threads_here(where), where));
    }
    return most;
}

// Bytes of a block's scratch for the keys of other context-parallel ranks.
template <typename T>
size_t context_bytes(const Plan& p, const Shape& s) {
    if (p.layout.cp.size == 1) return 0;
    return context_scratch_bytes<T>(s, p.layout, p.B, p.T, p.mode == Mode::TRAIN);
}

// Bytes that a rank sends for attention in all blocks of a plan.
template <typename T>
size_t context_plan_bytes(const Plan& p, const Model& model) {
    if (p.layout.cp.size == 1) return 0;
    ContextMessages each = context_messages<T>(rank_shape(p, model), p.layout, p.rows());
    size_t bytes = 0;
    for (const Action& a : p.actions) {
        // The embedding and the head ask no other rank's rows.
        if (a.layer < 1 || a.layer >= model.head()) continue;
        bool again = a.op == Op::R && redoes_attn(p.recompute.of(a.layer));
        if (a.op == Op::F || again) bytes += each.forward;
        if (a.op == Op::B || a.op == Op::I) bytes += each.backward;
    }
    return bytes;
}

// The scratch of a layer; of layer -1, the norm's.
template <typename T, typename S>
ScratchTable scratch_table(const Plan& p, const Model& model, int layer, S where) {
    const Shape s = layer_shape(rank_shape(p, model), layer);
    size_t N = p.rows(), all_rows = s.row_ranks > 1 ? N * s.C * sizeof(T) : 0;

    // The norm and the head have rows of their own; embedding and blocks gather rows over tp.
    ScratchTable table;
    if (layer < 0) {
        table.add(ScratchKind::NORM_SUMS, norm_chunks(model) * sizeof(double));
    } else if (layer == model.head()) {
        table.add(ScratchKind::WORKSPACE, head_workspace<T>(p, s, where));
        table.add(ScratchKind::HEAD, head_bytes<T>(p, s));
    } else {
        size_t workspace = layer == 0 ? embedding_scratch_bytes(N, where)
                                      : block_workspace<T>(p, model, s, layer, where);
        table.add(ScratchKind::WORKSPACE, workspace);
        table.add(ScratchKind::ALL_ROWS, all_rows);
        // Experts need rows of slots, and where ranks share them out rows of all tokens.
        if (layer > 0 && s.E) {
            ExpertCounts n = expert_counts(s, N);
            table.add(ScratchKind::SLOT_ROWS, n.rows * s.C * sizeof(T));
            if (s.expert_ranks > 1)
                table.add(ScratchKind::TOKEN_ROWS, n.tokens * s.C * sizeof(T));
            if (p.layout.ep_exchange)
                table.add(ScratchKind::EXCHANGE_ROWS, 2 * n.tokens * s.C * sizeof(T));
        }
        if (layer > 0 && s.kv_latent)
            table.add(ScratchKind::HEADS, latent_rooms(s, N, p.mode == Mode::TRAIN) * sizeof(T));
        table.add(ScratchKind::WIDE, wide_bytes<T>(p.stored, model, layer));
        table.add(ScratchKind::ROOM, N * largest_rank(model, layer) * sizeof(T));
        if (layer > 0)
            table.add(ScratchKind::CONTEXT, context_bytes<T>(p, s));
    }
    return table;
}

// ----------------------------------------------------------------------------
// every datum

// RoPE's table (P, rotary/2, 2), or two, or ALiBi's slopes (NH).
template <typename T>
size_t constants_bytes(const Plan& p, const Model& model, const Shape& s) {
    size_t positions = std::max(p.T, p.cache);
    switch (s.position) {
    case Position::ROPE:
        return (s.window_theta ? 2 : 1) *
               round_up(positions * rotary_channels(s, s.HS) * sizeof(acc_t<T>), ARENA_ALIGN);
    case Position::ALIBI: return model.shape.NH * sizeof(float);
    default: return 0;
    }
}

// The rows of the activation table that lie in a layer's group.
template <typename T, typename S>
size_t activation_bytes(const Plan& p, const Shape& s, Data group, S where) {
    size_t bytes = 0;
    for (const Activation& row : activation_table<T>(layer_shape(s, group.of), p.rows(), where))
        if (activation_group(row.keep, row.last, p.recompute.of(group.of)) == group.kind)
            bytes += round_up(row.bytes, ARENA_ALIGN);
    return bytes;
}

// Bytes of 8-bit moments of `elements` that a rank keeps: tensor after tensor.
inline size_t small_state_bytes(const Plan& p, const Model& model, Data d, size_t elements) {
    size_t skip = d.chunk < 0 ? 0 : p.offload.chunk * size_t(d.chunk);
    size_t first = kept_first(p.layout, model, d) + skip, bytes = 0;
    for (const TensorRow& row : tensor_rows(model, d.of, first, first + elements))
        bytes = row.state + state_bytes(row.n, row.small);
    return bytes;
}

// Bytes of a datum on this rank under a plan. 0: the plan has nothing of that kind.
template <typename T, typename S>
size_t data_bytes(const Plan& p, const Model& model, Data d, S where) {
    typedef acc_t<T> A;
    const Shape s = rank_shape(p, model);
    // Chunks are of what this rank updates.
    Data kept = d.chunk < 0 ? d : Data{Kind::MASTER, d.of};
    size_t N = p.rows(), elements = of_bucket(d.kind) ? kept_elements(p.layout, model, kept) : 0;
    elements = chunk_elements(p.offload, elements, d.chunk);
    switch (d.kind) {
    // Buckets. Gradients and moments are in acc; a master only where weights are narrower.
    case Kind::WEIGHT:
        if (is_narrow(p.stored, model, d.of)) return stored_bytes<T>(p.stored, model, d.of);
        return elements * sizeof(T);
    case Kind::GATHERED: return elements * sizeof(T);
    case Kind::MASTER: return sizeof(T) < sizeof(A) ? elements * master_bytes(p.masters) : 0;
    // Moments, for which wide weights change nothing.
    case Kind::STATE:
        if (p.states == States::EIGHT_BIT) return small_state_bytes(p, model, d, elements);
        return elements * (p.states == States::BF16 ? sizeof(bf16) : sizeof(A));
    case Kind::GRAD:
    case Kind::PARTIAL:
    case Kind::GRAD_HERE:
    case Kind::TIED_HERE:
    case Kind::GRAD_TIED: return elements * sizeof(A);
    case Kind::SENT: {
        // Only data-parallel ranks sum in 16 bits.
        const Bucket& b = model.buckets[d.of];
        bool sent = p.narrow_gradients && group_axis(p.layout, b.group).size > 1;
        return sent ? whole_elements(p.layout, b) * sizeof(bf16) : 0;
    }
    case Kind::SQUARES: return updated_norm_chunks(p.layout, model, d.of) * sizeof(double);

    // A chunk's offloaded data, one behind the other; or a shard of weights.
    case Kind::STAGED: {
        size_t bytes = 0;
        if (d.chunk < 0)
            return data_bytes<T>(p, model, {Kind::WEIGHT, d.of}, where);
        for (Data part : staged_data(p, d.of, d.chunk))
            bytes += round_up(data_bytes<T>(p, model, part, where), ARENA_ALIGN);
        return bytes;
    }

    case Kind::PARKED: return data_bytes<T>(p, model, {Kind(d.chunk), d.of, d.micro}, where);

    // Single values and tables that last.
    case Kind::SCALE: return sizeof(StepScale);
    case Kind::AMAX: return fp8_history_bytes(fp8_slots(model), model.shape.fp8_rule);
    case Kind::CAST: return cast_bytes(p, model);
    case Kind::CONSTANTS: return constants_bytes<T>(p, model, s);
    case Kind::CACHE: return p.B * p.cache * 2 * s.NKV * s.HS * sizeof(T);

    // A step's input: tokens, targets, positions, doc_start, and the positions of other keys.
    case Kind::VALID: return 0; // a number of the trainer's
    case Kind::TOKENS: return p.input_numbers() * sizeof(int);

    // The residual stream, whose rows sequence parallelism shares out, and the head's results.
    case Kind::STREAM:
    case Kind::DSTREAM: return N / s.row_ranks * s.C * sizeof(T);
    case Kind::LOSS: // evaluation keeps three numbers of each row behind the sum
        return p.mode == Mode::EVALUATE ? ARENA_ALIGN + 3 * N * sizeof(A) : sizeof(LossSums);
    case Kind::LOGITS: return head_rows(p) * s.Vp() * sizeof(T);
    case Kind::LOADS: return loads_bytes(model.shape);

    // A layer's own memory: scratch, and the six groups of its activations.
    case Kind::SCRATCH: return scratch_table<T>(p, model, d.of, where).bytes;
    case Kind::KEPT_B:
    case Kind::KEPT_W:
    case Kind::REDO_B:
    case Kind::REDO_W:
    case Kind::GRADIENT_B:
    case Kind::GRADIENT_W: return activation_bytes<T>(p, s, d, where);
    }
    return 0;
}

} // namespace llmc
