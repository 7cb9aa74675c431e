// sharding.h - each rank's share of shapes, of a bucket's data, and of its rows
//   The passes of zero.h and offload.h follow these rules, and access.h states what they touch.
#pragma once
#include "action.h"
#include "layout.h"
#include "model.h"
#include "ops/expert_capacity.cuh"
#include "ops/fp8.cuh"
#include "ops/tensor_table.cuh"
#include "ops/rand.h"
#include "ops/small_states.cuh"
#include "ops/types.h"

namespace llmc {

// ----------------------------------------------------------------------------
// the shape with which a rank computes

// Whether tp ranks can share a model's heads and ffn. There may be more ranks than key/value heads,
// if each head goes to a whole number of ranks.
inline bool tp_divides(const Shape& s, size_t tp) {
    const ExpertShape& e = s.experts;
    bool experts = e.whole || s.F % tp == 0;
    bool ffns = experts && e.dense_F % tp == 0 && e.shared_F % tp == 0;
    return s.NH % tp == 0 && ffns && (s.NKV % tp == 0 || tp % s.NKV == 0);
}

// Return the shape that rank `rank` of tp computes with.
inline Shape rank_shape(Shape s, int tp, int rank, bool sequence_parallel) {
    size_t n = size_t(tp);
    size_t rows = s.Vp() / n; // of the token table; the last ranks may have padding alone
    s.rank.vocab_start = size_t(rank) * rows;
    s.rank.padded = rows;
    s.V = s.V > s.rank.vocab_start ? std::min(s.V - s.rank.vocab_start, rows) : 0;

    // Divide heads and ffn. With fewer key/value heads than ranks, several ranks share one head.
    s.NH /= n;
    s.NKV = std::max(s.NKV / n, size_t(1));
    if (!s.experts.whole) s.F /= n;
    s.experts.dense_F /= n;
    s.experts.shared_F /= n;
    s.rank.rows = sequence_parallel ? n : 1;
    return s;
}

// The shape with which this rank computes under a plan. Generation never cuts rows, and never drops
// a token's choices.
inline Shape rank_shape(const Plan& p, const Model& model) {
    bool generates = p.mode == Mode::GENERATE;
    bool cut_rows = p.layout.sequence_parallel && !generates;
    Shape s = rank_shape(model.shape, p.layout.tp.size, p.layout.tp.rank, cut_rows);
    s.experts.ranks = size_t(p.layout.ep);
    s.loss.objective = p.objective;
    s.loss.objective.ranks = size_t(p.layout.cp.size);
    if (!generates)
        s.experts.capacity =
            expert_capacity(s.experts.capacity.factor, p.T, s.experts.E, s.experts.K);
    return s;
}

// ----------------------------------------------------------------------------
// which ranks sum a bucket's gradient, and what each keeps of it

// Whether a bucket is reduced after each micro-batch into a shard, as ZeRO-2 and 3 do. Not a tied
// table: its two gradients are added first, at the end of the step. Nor a bucket in the same layer
// as a tied table, because an action has one flag, `first`, for all gradients of its layer. For the
// same reason a rank's own experts go with their block, although they have nothing to sum.
inline bool reduced_each(const Layout& layout, const Model& model, int bucket) {
    int ranks = std::max(update_axis(layout, Group::DATA).size,
                         update_axis(layout, Group::EXPERTS).size);
    if (layout.zero < 2 || ranks == 1) return false;
    for (int l : model.buckets[bucket].layers)
        for (int other : buckets_of(model, l))
            if (model.buckets[other].tied()) return false;
    return true;
}

// The number of tensor-parallel ranks that hold the same key/value head.
inline int ranks_of_kv_head(const Layout& layout, const Model& model) {
    return std::max(1, layout.tp.size / int(model.shape.NKV));
}

// Elements [0, this) of a bucket have a partial gradient on every tensor-parallel rank; see Bucket.
inline size_t partial_over_tp(const Layout& layout, const Bucket& bucket) {
    return layout.sequence_parallel ? bucket.common : bucket.by_heads;
}

// Whether a bucket has replicated parameters or shared heads, whose gradients add over tp ranks.
inline bool adds_over_tp(const Layout& layout, const Model& model, int bucket) {
    const Bucket& b = model.buckets[bucket];
    bool shares_heads = ranks_of_kv_head(layout, model) > 1 && b.shared > b.common;
    return layout.tp.size > 1 && (partial_over_tp(layout, b) > 0 || shares_heads);
}

// Whether the plan gives a bucket a REDUCE. Without other ranks to sum with it needs none.
inline bool is_reduced(const Layout& layout, const Model& model, int bucket) {
    bool many = group_axis(layout, model.buckets[bucket].group).size > 1;
    return many || reduced_each(layout, model, bucket) || adds_over_tp(layout, model, bucket);
}

// The ranks among which a bucket's datum is cut, if it is, and the number of this rank's part.
inline Axis cut_axis(const Layout& layout, const Model& model, Data d) {
    Group group = model.buckets[d.of].group;
    return d.kind == Kind::WEIGHT ? shard_axis(layout, group) : update_axis(layout, group);
}

// Whether this rank keeps only a shard of a bucket's datum. Each level of ZeRO shards one datum
// more: 1 the optimizer's, 2 the gradient, 3 the weights. Offloaded weights come for each use
// whatever the level is, so every level shards them.
inline bool is_sharded(const Layout& layout, const Model& model, Data d) {
    if (cut_axis(layout, model, d).size == 1) return false;
    switch (d.kind) {
    case Kind::WEIGHT: return layout.zero == 3 || (layout.zero && layout.offload.weights);
    case Kind::MASTER:
    case Kind::STATE:
    case Kind::EMA: return layout.zero >= 1;
    // An offloaded gradient lies where its update runs: each rank keeps the range that it updates.
    case Kind::GRAD:
        if (layout.offload.gradients) return layout.zero >= 1;
        return reduced_each(layout, model, d.of);
    case Kind::GRAD_HERE: return reduced_each(layout, model, d.of);
    default: return false;
    }
}

// The range of a bucket's datum that this rank keeps: its length and its start, in elements.
inline size_t kept_elements(const Layout& layout, const Model& model, Data d) {
    size_t whole = whole_elements(layout, model.buckets[d.of]);
    return is_sharded(layout, model, d) ? whole / size_t(cut_axis(layout, model, d).size) : whole;
}
inline size_t kept_first(const Layout& layout, const Model& model, Data d) {
    size_t part = size_t(cut_axis(layout, model, d).rank);
    return is_sharded(layout, model, d) ? kept_elements(layout, model, d) * part : 0;
}

// The range of a bucket that this rank reduces, updates and publishes, counted in elements.
struct Range {
    size_t first, count;
    bool sharded; // ZeRO: others have the rest
};
// Return that range: the whole bucket, or this rank's shard of it under ZeRO.
inline Range updated_range(const Layout& layout, const Model& model, int bucket) {
    const Bucket& b = model.buckets[bucket];
    bool sharded = is_sharded(layout, model, {Kind::MASTER, bucket});
    size_t part = update_elements(layout, b);
    if (!sharded) return {0, whole_elements(layout, b), false};
    return {part * size_t(update_axis(layout, b.group).rank), part, true};
}

// Whether this rank contributes its range to a norm. Ranks of a group that update the same range,
// because the bucket is not sharded, hold equal numbers, and only the first of them counts.
inline bool is_first_of_equals(const Layout& layout, const Model& model, int bucket) {
    Axis parts = update_axis(layout, model.buckets[bucket].group);
    return updated_range(layout, model, bucket).sharded || parts.rank == 0;
}

// Whether the ranks that hold the same shard of weights share out a bucket's datum among them.
inline bool cut_over_replicas(const Layout& layout, const Model& model, Data d) {
    return layout.weights_near && d.kind != Kind::WEIGHT && is_sharded(layout, model, d);
}

// Whether this rank's norm counts a bucket. A tied table lives on two stages: the first counts it.
inline bool is_squared(const Layout& layout, const Model& model, int bucket) {
    const Bucket& b = model.buckets[bucket];
    return b.trainable && is_mine(layout, model, b.layers.front());
}

// Whether a bucket needs PUBLISH, because a rank keeps more of its weights than it updates: ZeRO-1
// and 2 keep all of them, and weights that are near are shards of which it updates a part.
inline bool is_published(const Layout& layout, const Bucket& b) {
    bool some_whole = layout.zero == 1 || layout.zero == 2;
    if (layout.weights_near)
        return update_axis(layout, b.group).size > 1;
    return shard_axis(layout, b.group).size > 1 && some_whole && !layout.offload.weights;
}

// Whether MUON works on a bucket of this rank.
inline bool has_muon_matrices(const Layout& layout, const Model& model, int bucket) {
    const Bucket& b = model.buckets[bucket];
    auto first = model.parameters.begin() + b.first;
    return bucket_is_mine(layout, model, bucket) &&
           std::any_of(first, first + b.count, [](const Parameter& p) { return p.muon; });
}

inline std::vector<int> muon_buckets(const Layout& layout, const Model& model) {
    std::vector<int> buckets;
    for (int b = 0; b < int(model.buckets.size()); b++)
        if (has_muon_matrices(layout, model, b))
            buckets.push_back(b);
    return buckets;
}

// The number of NorMuon's second moments of a matrix, or of this rank's matrices of a stack: one
// for each row, or column where there are more of those. No tensor-parallel rank cuts them.
inline size_t neurons_of(const Parameter& p) {
    size_t shorter = std::min(p.rows() / p.matrices(), p.cols());
    return p.muon ? p.elements() / size_t(p.experts.size) / shorter : 0;
}

// The datum in which a layer finds its weights.
inline Kind weight_kind(const Layout& layout, const Model& model, int bucket) {
    bool cut = is_sharded(layout, model, {Kind::WEIGHT, bucket});
    return cut || layout.offload.weights ? Kind::GATHERED : Kind::WEIGHT;
}
// The datum that FETCH(b) fills: STAGED with a shard that GATHER completes, or GATHERED at once.
inline Kind fetched_kind(const Layout& layout, const Model& model, int bucket) {
    return is_sharded(layout, model, {Kind::WEIGHT, bucket}) ? Kind::STAGED : Kind::GATHERED;
}
// The datum in which the step's gradient is summed: GRAD, or GRAD_HERE if gradients are offloaded.
inline Kind summed_kind(const Layout& layout) {
    return layout.offload.gradients ? Kind::GRAD_HERE : Kind::GRAD;
}
inline Kind tied_kind(const Layout& layout) {
    return layout.offload.gradients ? Kind::TIED_HERE : Kind::GRAD_TIED;
}
// The datum to which a layer adds its gradient.
inline Kind gradient_kind(const Layout& layout, const Model& model, int bucket, int layer) {
    if (reduced_each(layout, model, bucket)) return Kind::PARTIAL;
    bool head_of_tied = model.buckets[bucket].tied() && layer == model.head();
    return head_of_tied ? tied_kind(layout) : summed_kind(layout);
}

// ----------------------------------------------------------------------------
// which weights of fp8 products are kept as codes, and which are gathered as codes (fp8.h)

// Whether the plan's blocks keep their casts. Generation does not: it reads weights once a plan.
inline bool keeps_casts(const Plan& p, const Model& m) {
    bool whole = p.layout.zero < 3 && !p.layout.offload.weights;
    return m.shape.fp8.kind != Fp8::NONE && m.shape.fp8.kept && whole && p.mode != Mode::GENERATE;
}

// Whether ranks that have a bucket gather it as codes.
inline bool sends_codes(const Plan& p, const Model& m, int bucket) {
    // Look at the recipe and at the plan.
    bool of_blocks = m.shape.fp8.kind == Fp8::BLOCK;
    bool of_tensors = m.shape.fp8.kind == Fp8::TENSOR;
    if (!of_blocks && !of_tensors) return false;
    if (p.mode == Mode::GENERATE) return false;

    // Look at the bucket. Experts have products of other kinds.
    bool block = m.buckets[bucket].role == Role::BLOCK;
    if (!block || m.shape.experts.E > 0) return false;
    bool cut = is_sharded(p.layout, m, {Kind::WEIGHT, bucket});
    return cut && !p.layout.offload.weights;
}

// Whether the plan gathers a bucket as codes: this rank has it.
inline bool gathers_codes(const Plan& p, const Model& m, int bucket) {
    return sends_codes(p, m, bucket) && bucket_is_mine(p.layout, m, bucket);
}

// ----------------------------------------------------------------------------
// the rows over which norm and optimizer walk

// Whether a parameter may have 8-bit moments: the larger matrices of blocks may. Tables, vectors
// and the head keep float moments: training is unstable without (transformers #14819).
inline bool has_small_states(const Model& model, const Parameter& p) {
    Role role = model.buckets[p.bucket].role;
    bool block = role == Role::BLOCK || role == Role::EXPERTS || role == Role::ADAPTER;
    return block && p.shape.size() == 2 && p.elements() >= 4096;
}

// Return a parameter's learning rate as a factor of the step's. B of an adapter may learn faster
// than A: the wider the model, the less a step of equal rates would change its output.
// This is LoRA+, arXiv:2402.12354.
inline float learning_rate_of(const Model& m, const Parameter& p) {
    const std::string end = ".lora_B.weight";
    if (!m.shape.tuned.adapters || !p.name.ends_with(end))
        return 1;
    return m.shape.tuned.adapters->at(p.name.substr(0, p.name.size() - end.size())).rate_of_b;
}

// The group of a parameter that may have a rate of its own. Positions count as a table.
inline MuonGroup muon_group(const Model& m, const Parameter& p) {
    using enum MuonGroup;
    Role role = m.buckets[p.bucket].role;
    if (is_muon_matrix(m, p)) return MATRIX;
    if (p.is_value_table()) return VALUES;
    if (p.name.ends_with("resid_lambda")) return RESID;
    if (p.name.ends_with("x0_lambda")) return X0;
    if (p.shape.size() == 1) return VECTOR;
    if (role == Role::HEAD) return HEAD;
    bool table = role == Role::TOKENS || role == Role::POSITIONS;
    return table ? TABLE : VECTOR;
}

// Rows of second moments start at multiples of so many elements.
constexpr size_t SECOND_ALIGN = 128;

// The elements [from, to) of a bucket as rows, one for each parameter; offsets count from `from`.
// A row knows its parameter's name, and the place of each element in the whole parameter, so that
// stochastic rounding is the same for all shards and pieces.
inline std::vector<TensorRow> tensor_rows(const Model& model, int bucket, size_t from, size_t to) {
    std::vector<TensorRow> rows;
    size_t state = 0;  // bytes of the 8-bit moments of all rows before
    size_t second = 0; // elements of their second moments, where Muon's matrices have none
    for (int i : model.buckets[bucket].in_order) {
        const Parameter& p = model.parameters[i];
        size_t start = std::max(p.offset, from);
        size_t end = std::min(p.offset + p.local_elements(), to);
        if (start >= end) continue;

        // Add a row. Under tp it is a piece of the whole parameter.
        PieceRuns piece = piece_runs(p, model.tp_rank, model.tp);
        rows.push_back({start - from, end - start, p.decay, fnv1a(p.name), start - p.offset,
                        piece.start, piece.run, piece.gap, start - from, state,
                        has_small_states(model, p), learning_rate_of(model, p)});
        rows.back().group = muon_group(model, p);
        state += state_bytes(end - start, rows.back().small);
        if (model.muon) rows.back().second = second;
        if (!p.muon) second += round_up(end - start, SECOND_ALIGN);
    }
    return rows;
}

// The elements of the second moments of a range of a bucket.
inline size_t second_moments(const Model& model, int bucket, size_t from, size_t to) {
    if (!model.muon) return to - from;
    std::vector<TensorRow> rows = tensor_rows(model, bucket, from, to);
    if (rows.empty()) return 0;
    const TensorRow& last = rows.back();
    return last.second + (last.group == MuonGroup::MATRIX ? 0 : round_up(last.n, SECOND_ALIGN));
}

// The number of the norm's chunks in the elements [from, to) of a bucket, and in all buckets.
inline size_t norm_chunks(const Model& model, int bucket, size_t from, size_t to) {
    size_t n = 0;
    for (const TensorRow& row : tensor_rows(model, bucket, from, to))
        n += chunks_of(row);
    return n;
}
inline size_t norm_chunks(const Model& model) {
    size_t n = 0;
    for (size_t b = 0; b < model.buckets.size(); b++)
        n += norm_chunks(model, int(b), 0, model.buckets[b].elements);
    return n;
}

// The number of the norm's chunks in the range of a bucket that this rank updates.
inline size_t updated_norm_chunks(const Layout& layout, const Model& model, int bucket) {
    Range range = updated_range(layout, model, bucket);
    return norm_chunks(model, bucket, range.first, range.first + range.count);
}

} // namespace llmc
