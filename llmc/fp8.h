// fp8.h - fp8 products in a plan: delayed scales, casts once a step, gathered codes
#pragma once
#include "action.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "comm/placement.h"
#include "layout.h"
#include "model.h"
#include "ops/element_type.h"
#include "ops/fp8.cuh"
#include "ops/fp8_delayed.cuh"
#include "ops/fp8_sent.cuh"
#include "ops/linear.cuh"
#include "ops/memory.h"
#include "ops/types.h"
#include "sharding.h"
#include "streams.h"
#include "trainer.h"

namespace llmc {

// ----------------------------------------------------------------------------
// delayed scaling of a run: where maxima and scales lie, and how ranks share them
//   AMAX has three slots for each matrix of each block (fp8_delayed.cuh), of the whole model on
//   every rank: a rank fills those of its layers and pieces, and the others stay 0. After the last
//   backward pass one all-reduce brings the largest together, over tp, dp and stages alike. So
//   every rank has the same scales, whatever the layout, and a checkpoint needs them once.
//   That message has 4 bytes a slot; it is on the critical path, after the norm's.

// Slots: the same on all ranks; none where products scale otherwise.
inline size_t fp8_slots(const Model& m) {
    return m.shape.fp8.kind == Fp8::DELAYED ? FP8_OPERANDS * size_t(m.matrices) : 0;
}

// The state of all matrices.
template <typename T, typename S>
Fp8History fp8_history(const Trainer<T, S>& t) {
    void* home = address<unsigned char>(t, {Kind::AMAX});
    if (!home) return {}; // products scale otherwise, or the plan has no blocks here
    return fp8_history_at(home, fp8_slots(t.model), t.model.shape.fp8.rule);
}

// The slots that products read and fill. An evaluation leaves no maxima.
template <typename T, typename S>
Fp8Late late_scales(const Trainer<T, S>& t) {
    if (t.model.shape.fp8.kind != Fp8::DELAYED) return {};
    // Training notes what it sees; the scales are those of the last step.
    Fp8History h = fp8_history(t);
    bool trains = t.plans[t.plan].mode == Mode::TRAIN;
    return {h.scale, trains ? h.amax : nullptr};
}

// After the last backward pass: the maxima of all ranks, and the next step's scales.
template <typename T, typename S>
void take_amaxes(Trainer<T, S>& t) {
    Fp8History h = fp8_history(t);
    if (!h.slots) return;
    // Words are in the order of magnitudes, a NaN above all.
    int* words = reinterpret_cast<int*>(h.amax);
    all_reduce_max(t.comms.world, words, h.slots, t.ctx.where);
    fp8_next_scales(h, t.model.shape.fp8.rule, t.ctx.where);
}

// ----------------------------------------------------------------------------
// weights of fp8 products, cast once a step: where codes lie, and when they are old
//   A product casts W, or W^T, from bf16 (linear.cuh). Without this file each micro-batch,
//   recomputation and backward pass would cast the same numbers again.
//   1. which   the matrices of this rank's blocks. ZeRO-3 and offloaded weights keep no casts: a
//              copy that stays would take the memory that they save, so each product casts again
//   2. where   in CAST, one after the other, for the whole run: 2 bytes an element, and scales
//   3. made    by the first product of a plan that reads a form: W, W^T, or the values of both
//   4. old     when a plan begins: an update, another recipe's scale or a file came between
//   A code depends only on W and its scale, so the bits are those of a cast at each product. The
//   maximum that delayed scaling asks for is the same too: it counts nothing twice.
//   Cost: GPT-2's block, 4 micro-batches, each recomputed: 44 casts a step become 8 (4 of values).

// Call f(parameter, at) for each matrix of this rank's blocks, with the byte at which its casts
// begin. Returns the end of the last one.
template <typename F>
size_t for_each_cast(const Plan& p, const Model& m, F f) {
    size_t at = 0;
    for (const Parameter& w : m.parameters) {
        if (w.matrix < 0 || !bucket_is_mine(p.layout, m, w.bucket)) continue;
        f(w, at);
        at += fp8_cast_bytes(w.local_rows(), w.local_cols(), m.shape.fp8.kind);
    }
    return at;
}
inline size_t cast_bytes(const Plan& p, const Model& m) {
    return keeps_casts(p, m) ? for_each_cast(p, m, [](const Parameter&, size_t) {}) : 0;
}

// The places of a plan's casts, as the plan begins: nothing is cast yet. Empty: it keeps no casts.
template <typename T, typename S>
std::vector<Fp8Cast> bind_casts(const Trainer<T, S>& t) {
    const Plan& p = t.plans[t.plan];
    auto* base = address<unsigned char>(t, {Kind::CAST});
    if (!base || !keeps_casts(p, t.model)) return {};
    std::vector<Fp8Cast> casts(size_t(t.model.matrices));
    for_each_cast(p, t.model, [&](const Parameter& w, size_t at) {
        casts[size_t(w.matrix)].home = base + at;
    });
    return casts;
}

// The scales and casts of all blocks' matrices, by the matrix's number.
struct Fp8Matrices {
    Fp8Late late = {};
    const Fp8Cast* casts = nullptr; // null: no casts are kept

    // Point a weight at the scales and the cast of its matrix.
    void point(Weight& w, size_t matrix) const {
        w.late = late.at(FP8_OPERANDS * matrix);
        w.cast = casts ? casts + matrix : nullptr;
    }
};
template <typename T, typename S>
Fp8Matrices fp8_matrices(const Trainer<T, S>& t) {
    return {late_scales(t), t.stored.casts.empty() ? nullptr : t.stored.casts.data()};
}

// ----------------------------------------------------------------------------
// ZeRO-3 gathers the weights of fp8 products as codes - arXiv:2310.18313
//   GATHER sends a byte for each element of a block's matrices, and the products have the bits that
//   weights gathered wide would give them (fp8_sent.cuh says why):
//     COUNT       the maxima of all blocks of scales, of this rank's shards: MAXIMA; one message
//                 takes the largest over the shards' ranks                   on the critical path
//     GATHER(b)   shard -> codes, and the vectors as they are: CODES; all-gather; values of all
//                 codes -> GATHERED                     beside the layers before its use, as always
//   A rank's part of CODES is the codes of its shard, a byte for each element, then the elements of
//   its shard that are in no matrix, in 16 bits. Parts are as long as the longest needs.
//   `block` and `tensor` do so. Delayed scaling wants the maximum of what products see, under `mx`
//   W^T has other scales, and `nvfp4` knows no parts of matrices. Generation counts nothing, and
//   offloaded shards are elsewhere at COUNT: these gather wide.
//   Bytes: P/d + 2 V for each rank's part of P parameters, V of them in vectors; wide 2 P/d.

// The number of scales of a bucket's matrices.
inline size_t gathered_scales(const Model& m, int bucket) {
    size_t scales = 0;
    for (int i : m.buckets[bucket].in_order) {
        const Parameter& w = m.parameters[i];
        if (w.matrix >= 0)
            scales +=
                fp8_piece_blocks(w.local_rows(), w.local_cols(), m.shape.fp8.kind == Fp8::TENSOR);
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
        bool whole = m.shape.fp8.kind == Fp8::TENSOR;
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
        fp8_piece_cast(reinterpret_cast<e4m3*>(mine) + at, weight + at, maxima + scale, piece,
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
                fp8_piece_cast(home + at, reinterpret_cast<const e4m3*>(codes) + at,
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
