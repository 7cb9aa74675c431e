// gathered_codes.h - ZeRO-3 gathers the weights of fp8 products as codes - arXiv:2310.18313
//   GATHER sends a byte for each element of a block's matrices, and the products have the bits that
//   weights gathered wide would give them (fp8_gather.cuh says why):
//     COUNT       the maxima of all blocks of scales, of this rank's shards: MAXIMA; one message
//                 takes the largest over the shards' ranks                   on the critical path
//     GATHER(b)   shard -> codes, and the vectors as they are: CODES; all-gather; values of all
//                 codes -> GATHERED                     beside the layers before its use, as always
//   A rank's part of CODES is the codes of its shard, a byte for each element, then the elements of
//   its shard that are in no matrix, in 16 bits. Parts are as long as the longest needs.
//   Recipes with scales from the weights themselves do so: `block` and `tensor`. Delayed scaling
//   wants the maximum of what products see. Generation counts nothing, and offloaded shards are
//   elsewhere at COUNT: these gather wide.
//   Bytes: P/d + 2 V for each rank's part of P parameters, V of them in vectors; wide 2 P/d.
#pragma once
#include "action.h"
#include "comm/comms.h"
#include "fp8_gather.cuh"
#include "memory.h"

namespace llmc {

template <typename T, typename S> struct Trainer;

// Whether ranks that have a bucket gather it as codes.
inline bool sends_codes(const Plan& p, const Model& m, int bucket) {
    // Look at the recipe and at the plan.
    bool of_blocks = m.shape.fp8 == Fp8::BLOCK;
    bool of_tensors = m.shape.fp8 == Fp8::TENSOR;
    if (!of_blocks && !of_tensors) return false;
    if (p.mode == Mode::GENERATE) return false;

    // Look at the bucket. Experts have products of other kinds.
    bool block = m.buckets[bucket].role == Role::BLOCK;
    if (!block || m.shape.E > 0)
        return false;
    bool cut = is_sharded(p.layout, m, {Kind::WEIGHT, bucket});
    return cut && !p.layout.weights_away;
}

// Whether the plan gathers a bucket as codes: this rank has it.
inline bool gathers_codes(const Plan& p, const Model& m, int bucket) {
    return sends_codes(p, m, bucket) && bucket_is_mine(p.layout, m, bucket);
}

// The number of scales of a bucket's matrices.
inline size_t gathered_scales(const Model& m, int bucket) {
    size_t scales = 0;
    for (int i : m.buckets[bucket].in_order) {
        const Parameter& w = m.parameters[i];
        if (w.matrix >= 0)
            scales += fp8_piece_blocks(w.local_rows(), w.local_cols(), m.shape.fp8 == Fp8::TENSOR);
    }
    return scales;
}

// Where a bucket's maxima begin in MAXIMA; the bucket after the last one gives their number.
inline size_t maxima_before(const Plan& p, const Model& m, int bucket) {
    size_t before = 0;
    for (int b = 0; b < bucket; b++)
        before += gathers_codes(p, m, b) ? gathered_scales(m, b) : 0;
    return before;
}
inline size_t maxima_bytes(const Plan& p, const Model& m) {
    return maxima_before(p, m, int(m.buckets.size())) * sizeof(uint32_t);
}

// Walk over elements [first, first + count) of a bucket, without the padding after its last
// parameter. matrix(piece, at, scale) takes a piece of a matrix, which begins `at` elements after
// `first`; its scales begin at number `scale`. wide(at, count) takes elements of no matrix.
template <typename M, typename W>
void for_each_gathered(const Model& m, int bucket, size_t first, size_t count, M matrix, W wide) {
    size_t end = std::min(first + count, m.buckets[bucket].elements);
    if (end <= first) return; // a shard of padding

    // Elements between matrices are wide: hand them out when the next matrix begins.
    size_t done = first;
    size_t scale = 0;
    auto wide_until = [&](size_t to) {
        if (to > done)
            wide(done - first, to - done);
        done = std::max(done, to);
    };

    // Walk the matrices by their offsets.
    for (int i : m.buckets[bucket].in_order) {
        const Parameter& w = m.parameters[i];
        if (w.matrix < 0) continue;

        // Cut the matrix to the range.
        bool whole = m.shape.fp8 == Fp8::TENSOR;
        size_t rows = w.local_rows(), cols = w.local_cols();
        size_t from = std::clamp(w.offset, first, end);
        size_t to = std::clamp(w.offset + rows * cols, first, end);
        wide_until(from);
        if (to > from)
            matrix(Fp8Piece{rows, cols, from - w.offset, to - from, whole}, from - first, scale);
        done = std::max(done, to);
        scale += fp8_piece_blocks(rows, cols, whole);
    }
    wide_until(end);
}

// Add the data that COUNT touches: shards, and their maxima. X is an Access.
template <typename X>
void access_maxima(X& x, const Plan& p, const Model& m) {
    for (int b = 0; b < int(m.buckets.size()); b++) {
        if (!gathers_codes(p, m, b)) continue;
        x.read({Kind::WEIGHT, b});
        x.write({Kind::MAXIMA});
    }
}

// A rank's part of the message: codes, then wide elements. Its sizes are the same on all ranks.
struct CodesMessage {
    size_t shard; // elements
    size_t codes, bytes;
};
inline CodesMessage codes_message(const Layout& layout, const Model& m, int bucket) {
    const Bucket& b = m.buckets[bucket];
    size_t shard = shard_elements(layout, b);
    size_t most = 0;
    for (int r = 0; r < shard_axis(layout, b.group).size; r++) {
        size_t wide = 0;
        size_t first = shard * size_t(r);
        auto skip = [](auto&&...) {};
        auto add = [&](size_t, size_t n) { wide += n; };
        for_each_gathered(m, bucket, first, shard, skip, add);
        most = std::max(most, wide);
    }
    size_t codes = round_up(shard, 16);
    return {shard, codes, codes + round_up(most * sizeof(bf16), 16)};
}
inline size_t codes_bytes(const Plan& p, const Model& m, int bucket) {
    size_t ranks = size_t(shard_axis(p.layout, m.buckets[bucket].group).size);
    return codes_message(p.layout, m, bucket).bytes * ranks;
}

// Find the largest magnitudes of this rank's shard of a bucket, for COUNT.
template <typename T, typename S>
void shard_maxima(Trainer<T, S>& t, int b, uint32_t* maxima) {
    const T* shard = address<const T>(t, {Kind::WEIGHT, b});
    Axis ranks = shard_axis(t.layout, t.model.buckets[b].group);
    size_t count = shard_elements(t.layout, t.model.buckets[b]);
    auto find = [&](const Fp8Piece& piece, size_t at, size_t scale) {
        fp8_piece_maxima(maxima + scale, shard + at, piece, t.ctx.where);
    };
    size_t first = count * size_t(ranks.rank);
    auto skip = [](auto&&...) {};
    for_each_gathered(t.model, b, first, count, find, skip);
}

// COUNT's part: the largest magnitudes of all ranks' shards. All ranks that share shards call.
// Products of other types than bf16 have no fp8.
template <typename T, typename S>
void share_maxima(Trainer<T, S>& t) {
    if constexpr (type_of<T>() == Type::BF16) {
        const Plan& p = t.plans[t.plan];
        uint32_t* maxima = address<uint32_t>(t, {Kind::MAXIMA});
        if (!maxima) return;
        device_zero(maxima, maxima_bytes(p, t.model), t.ctx.where);
        for (int b = 0; b < int(t.model.buckets.size()); b++)
            if (gathers_codes(p, t.model, b))
                shard_maxima(t, b, maxima + maxima_before(p, t.model, b));

        // Bits of magnitudes are in order as integers, a NaN above all.
        size_t count = maxima_bytes(p, t.model) / sizeof(uint32_t);
        all_reduce_max(t.comms.data(Group::DATA).shard, reinterpret_cast<int*>(maxima), count,
                       t.ctx.where);
    }
}

// GATHER: weight (P/d) -> whole (P), by way of `sent`.
template <typename T, typename S>
InFlight<S> gather_codes(const Trainer<T, S>& t, int b, T* whole, const T* weight,
                         unsigned char* sent, S where) {
    const Model* model = &t.model;
    const Comm& shard = t.comms.data(model->buckets[b].group).shard;
    CodesMessage part = codes_message(t.layout, *model, b);
    const uint32_t* maxima = address<const uint32_t>(t, {Kind::MAXIMA}) +
                             maxima_before(t.plans[t.plan], *model, b);
    if (Placements* checked = t.comms.placements())
        placement_forget(*checked, sent, part.bytes * size_t(shard.size));

    // Write this rank's part.
    unsigned char* mine = sent + part.bytes * size_t(shard.rank);
    unsigned char* wide = mine + part.codes;
    auto put_codes = [&](const Fp8Piece& piece, size_t at, size_t scale) {
        fp8_piece_codes(reinterpret_cast<e4m3*>(mine) + at, weight + at, maxima + scale, piece,
                        where);
    };
    auto put_wide = [&](size_t at, size_t n) {
        size_t bytes = n * sizeof(T);
        copy_rows(wide, bytes, weight + at, bytes, bytes, 1, where);
        wide += bytes;
    };
    size_t first = part.shard * size_t(shard.rank);
    for_each_gathered(*model, b, first, part.shard, put_codes, put_wide);

    // Gather all parts in place. When they are there, write the values of their codes.
    InFlight<S> f = {start_all_gather(shard, sent, mine, part.bytes, where)};
    f.rest = [=, &comms = t.comms, ranks = size_t(shard.size)] {
        for (size_t r = 0; r < ranks; r++) {
            const unsigned char* codes = sent + part.bytes * r;
            const unsigned char* behind = codes + part.codes;
            T* home = whole + part.shard * r;
            auto take_codes = [&](const Fp8Piece& piece, size_t at, size_t scale) {
                fp8_piece_values(home + at, reinterpret_cast<const e4m3*>(codes) + at,
                                 maxima + scale, piece, where);
            };

            // Elements of no matrix came as they are, behind the codes.
            auto take_wide = [&](size_t at, size_t n) {
                size_t bytes = n * sizeof(T);
                copy_rows(home + at, bytes, behind, bytes, bytes, 1, where);
                behind += bytes;
            };
            for_each_gathered(*model, b, part.shard * r, part.shard, take_codes, take_wide);
        }

        // These bytes hold whole weights now.
        Placements* checked = comms.placements();
        if (checked)
            placement_forget(*checked, whole, part.shard * ranks * sizeof(T));
    };
    return f;
}

} // namespace llmc
