// buckets.h - how a bucket is filled: where its parameters lie, and where its shards are cut
//   A bucket is cut into equal shards of whole norm chunks. A cut may fall inside a parameter, for
//   AdamW and SGD update each element alone. An optimizer that works on whole matrices
//   (Layout::whole_matrices) needs each matrix of a block in one shard. Then a matrix that a cut
//   would divide starts at the next shard, and shards are as small as this allows:
//     shard 0 | ln_1, q k v, o .....|     a block of GPT-2 on two ranks: 4 C^2 and 8 C^2 elements;
//     shard 1 | fc, proj            |     dots: padding, which makes both equally long
//   Vectors may be cut, and so may tables (embedding, positions, head): no such optimizer treats
//   them as matrices. With more shards than matrices, some shards hold nothing but padding.
#pragma once
#include "model.h"

namespace llmc {

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

// The number of a parameter's elements that one token goes through: in a stack of E experts K of E.
inline size_t active_elements(const Model& m, const Parameter& p) {
    return p.stack > 1 ? p.file_elements() / p.stack * m.shape.K : p.file_elements();
}
inline size_t active_parameters(const Model& m) {
    size_t n = 0;
    for (const Parameter& p : m.parameters)
        n += active_elements(m, p);
    return n;
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
    if (pieces == 1)
        return {first, range, 0};

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
    if (b.shard) return b.shard;
    return parts == 1 ? b.elements : round_up(ceil_div(b.elements, parts), SHARD_ALIGN);
}
inline size_t whole_elements(const Layout& layout, const Bucket& b) {
    return update_elements(layout, b) * size_t(update_axis(layout, b.group).size);
}
inline size_t shard_elements(const Layout& layout, const Bucket& b) {
    return whole_elements(layout, b) / size_t(shard_axis(layout, b.group).size);
}

// The first place from `at` on where a matrix of n elements lies in one shard. shard: a shard's
// elements; 0: nothing is cut. The place starts a chunk of the norm, so the chunks' sums are the
// same however the bucket is cut.
inline size_t matrix_place(size_t at, size_t n, size_t shard) {
    at = round_up(at, SHARD_ALIGN);
    bool cut = shard && at / shard != (at + n - 1) / shard;
    return cut ? round_up(at, shard) : at;
}

// Give each parameter of a bucket its offset. whole: place matrices so that shards of b.shard
// elements do not cut them.
inline void place_bucket(Model& m, Bucket& b, bool whole, size_t align) {
    b.elements = 0;
    b.in_order = {};

    // Place the parameters that `belongs` selects behind all earlier ones, and return their end.
    auto place = [&](auto belongs) {
        for (int i = b.first; i < b.first + b.count; i++) {
            Parameter& p = m.parameters[i];
            if (!belongs(p.shard)) continue;
            bool matrix = whole && p.shape.size() == 2;
            p.offset = matrix ? matrix_place(b.elements, p.local_elements(), b.shard) : b.elements;
            b.elements = round_up(p.offset + p.local_elements(), align);
            b.in_order.push_back(i);
        }
        return b.elements;
    };

    // Order parameters by the ranks that sum their gradients; see Bucket (model.h).
    b.by_heads = place([](Shard s) { return s.axis < 0 && s.partial == Partial::HEADS; });
    b.common = place([](Shard s) { return s.axis < 0 && s.partial == Partial::ROWS; });
    b.shared = place([](Shard s) { return s.axis >= 0 && s.units > 0; });
    place([](Shard s) {
        bool cut = s.axis >= 0 && s.units == 0;
        return cut || s.partial == Partial::EXPERTS;
    });
}

// Place a bucket in the smallest shards that hold its matrices whole. If shards of some size are
// enough, larger ones are enough too, so a binary search finds the size.
inline void place_whole_matrices(Model& m, Bucket& b, size_t shards, size_t align) {
    // Bound the size: a shard as long as the bucket is enough, one below its largest matrix is not.
    b.shard = 0;
    place_bucket(m, b, true, align);
    size_t largest = 1;
    for (int i : b.in_order)
        if (m.parameters[i].shape.size() == 2)
            largest = std::max(largest, m.parameters[i].local_elements());
    if (shards == 1) return;

    // Search in units of SHARD_ALIGN.
    size_t least = ceil_div(largest, SHARD_ALIGN);
    size_t enough = ceil_div(b.elements, SHARD_ALIGN);
    while (least < enough) {
        size_t middle = (least + enough) / 2;
        b.shard = middle * SHARD_ALIGN;
        place_bucket(m, b, true, align);
        bool fits = b.elements <= shards * b.shard;
        (fits ? enough : least) = fits ? middle : middle + 1;
    }
    b.shard = enough * SHARD_ALIGN;
    place_bucket(m, b, true, align);
}

// Give all parameters their offsets, once the table is complete. Without ZeRO nothing is cut.
inline void place_parameters(Model& m, const Layout& layout) {
    for (Bucket& b : m.buckets) {
        bool whole = layout.whole_matrices && b.role == Role::BLOCK;
        int shards = layout.zero ? update_axis(layout, b.group).size : 1;
        if (whole) {
            place_whole_matrices(m, b, size_t(shards), layout.tensor_align);
        } else {
            place_bucket(m, b, false, layout.tensor_align);
        }
    }
}

} // namespace llmc
