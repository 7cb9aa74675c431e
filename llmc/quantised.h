// quantised.h - quantised frozen weights: layout in memory, quantisation
//   1. which    The matrices of blocks. Vectors, tables and the head stay T.
//   2. where    One after the other in the bucket of their block: codes, absmax, table, each at a
//               multiple of 256 bytes.
//   3. made     Every rank quantises the whole parameter and keeps its piece, so the codes do not
//               depend on tensor parallelism. A piece must be whole quantisation blocks.
//   4. used     Each product dequantises its matrix into the layer's scratch (linear.cuh).
//   5. cut      ZeRO-3 cuts a bucket's bytes into equal shards; GATHER brings them together before
//               a layer reads them: half a byte for an element instead of two.
//   A bucket with such codes is called narrow, any other one wide.
#pragma once
#include "action.h"
#include "optimizer.h"
#include "layout.h"
#include "model.h"
#include "ops/linear.cuh"
#include "ops/nf4.cuh"
#include "ops/rope.cuh"
#include "ops/types.h"
#include "sharding.h"

namespace llmc {

// ----------------------------------------------------------------------------
// where they lie

// Whether a bucket is narrow. A block's bucket is narrow as a whole: its vectors too are placed by
// bytes. Tables stay wide, because the embedding reads single rows and a tied head shares one.
inline bool is_narrow(Stored stored, const Model& m, int bucket) {
    return stored != Stored::WIDE && m.buckets[bucket].role == Role::BLOCK;
}
inline bool is_narrow(Stored stored, const Model& m, const Parameter& p) {
    return is_narrow(stored, m, p.bucket) && p.shape.size() == 2;
}

// Where the parts of a parameter lie in a narrow bucket, in bytes from the bucket's start.
struct StoredPlace {
    size_t codes = 0; // a vector's values
    size_t absmax = 0;
    size_t table = 0; // NF4 only
    size_t end = 0;
};

// The codes in a byte; and the scales of a row of int8 or int4.
inline size_t codes_of_byte(Stored stored) { return stored == Stored::INT8 ? 1 : 2; }
inline size_t scales_of_row(Stored stored, size_t cols) {
    return stored == Stored::INT4 ? int4_groups(cols) : 1;
}

// Return the place of a parameter when the one before it ends at `at`. Parts are aligned so that
// kernels can read 16 bytes at a time.
template <typename T>
StoredPlace stored_after(Stored stored, const Model& m, const Parameter& p, size_t at) {
    auto take = [&](size_t bytes) {
        size_t start = at;
        at = round_up(at + bytes, ARENA_ALIGN);
        return start;
    };

    // A vector keeps its type. The table is the whole parameter's, on every rank.
    size_t n = p.local_elements();
    StoredPlace place;
    if (!is_narrow(stored, m, p)) {
        place.codes = take(n * sizeof(T));
    } else if (stored == Stored::NF4) {
        place.codes = take(ceil_div(n, 2));
        place.absmax = take(nf4_blocks(n));
        place.table = take(nf4_table_floats(p.elements()) * sizeof(float));
    } else {
        // A row's groups have their scales side by side.
        place.codes = take(ceil_div(n, codes_of_byte(stored)));
        place.absmax = take(p.local_rows() * scales_of_row(stored, p.local_cols()) * sizeof(float));
    }
    place.end = at;
    return place;
}

// Return the place of a parameter: parameters lie in the order of the model's table. With p = null,
// return the place of the last one.
template <typename T>
StoredPlace stored_place(Stored stored, const Model& m, int bucket, const Parameter* p) {
    const Bucket& b = m.buckets[bucket];
    StoredPlace place;
    for (int i = b.first; i < b.first + b.count; i++) {
        place = stored_after<T>(stored, m, m.parameters[i], place.end);
        if (p == &m.parameters[i]) break;
    }
    return place;
}

// The bytes of a narrow bucket that a rank keeps: all of them, or with ZeRO-3 one of equal shards.
// Shards end at multiples of 256 bytes, so no number is cut.
struct StoredRange {
    size_t first, count;
};
template <typename T>
StoredRange stored_range(Stored stored, const Layout& layout, const Model& m, int bucket) {
    size_t bytes = stored_place<T>(stored, m, bucket, nullptr).end; // of the whole bucket
    if (!is_sharded(layout, m, {Kind::WEIGHT, bucket}))
        return {0, bytes};
    Axis ranks = shard_axis(layout, m.buckets[bucket].group);
    size_t shard = round_up(ceil_div(bytes, size_t(ranks.size)), ARENA_ALIGN);
    return {shard * size_t(ranks.rank), shard};
}

// Return the bytes of a narrow bucket when all shards are together.
template <typename T>
size_t gathered_bytes(Stored stored, const Layout& layout, const Model& m, int bucket) {
    size_t ranks = size_t(shard_axis(layout, m.buckets[bucket].group).size);
    return stored_range<T>(stored, layout, m, bucket).count * ranks;
}

// Return the bytes that hold the largest narrow matrix of a layer as T. Products run one after
// another, and each dequantises its own matrix, so one buffer serves all of them.
template <typename T>
size_t wide_bytes(Stored stored, const Model& m, int layer) {
    size_t most = 0;
    for (const Parameter& p : m.parameters) {
        if (p.layer != layer) continue;
        if (!is_narrow(stored, m, p)) continue;
        most = std::max(most, p.local_elements());
    }
    return most * sizeof(T);
}

template <typename T, typename S> struct Trainer;

// ----------------------------------------------------------------------------
// how products find them

// Return pointers to the parts of a parameter, whose bucket starts at `base` in the arena.
template <typename T>
Narrow bind_narrow(Stored stored, const Model& m, const Layout& layout, const Parameter& p,
                   unsigned char* base) {
    StoredPlace place = stored_place<T>(stored, m, p.bucket, &p);
    Narrow narrow;
    narrow.values = base + place.codes;
    if (!is_narrow(stored, m, p)) return narrow;
    if (stored != Stored::NF4) {
        narrow.absmax = reinterpret_cast<const float*>(base + place.absmax);
        if (stored == Stored::INT8)
            narrow.int8 = reinterpret_cast<const int8_t*>(base + place.codes);
        else
            narrow.int4 = base + place.codes;
        return narrow;
    }

    // NF4: a piece is runs of blocks, between the runs of other ranks. A block finds its absmax2 by
    // its number in the whole parameter.
    Nf4& nf4 = narrow.nf4;
    nf4.codes = base + place.codes;
    nf4.absmax = base + place.absmax;
    nf4.table = reinterpret_cast<const float*>(base + place.table);
    if (p.pieces == 1) return narrow;
    PieceRuns runs = piece_runs(p, layout.tp.rank, layout.tp.size);
    nf4.run = runs.run / NF4_BLOCK;
    nf4.part = (runs.run + runs.gap) / NF4_BLOCK;
    nf4.first = runs.start / NF4_BLOCK;
    return narrow;
}

// Return pointers to all parameters in the arena, which does not move. Entries are empty for wide
// buckets, for other ranks' layers, and for shards, whose bytes come together elsewhere.
template <typename T, typename S>
std::vector<Narrow> bind_frozen(const Trainer<T, S>& t) {
    Stored stored = t.plans[0].stored;
    std::vector<Narrow> all;
    for (const Parameter& p : t.model.parameters) {
        Data weight = {Kind::WEIGHT, p.bucket};
        auto* base = address<unsigned char>(t, weight);
        bool cut = is_sharded(t.layout, t.model, weight);
        bool frozen = base && !cut && is_narrow(stored, t.model, p.bucket);
        all.push_back({});
        if (frozen)
            all.back() = bind_narrow<T>(stored, t.model, t.layout, p, base);
    }
    return all;
}

// Point the entries of a bucket in shards at where its bytes are together now. A layer calls it
// before each use, since every GATHER may have another place.
template <typename T, typename S>
void bind_gathered(Trainer<T, S>& t, int bucket) {
    Stored stored = t.plans[t.plan].stored;
    bool cut = is_sharded(t.layout, t.model, {Kind::WEIGHT, bucket});
    if (!cut || !is_narrow(stored, t.model, bucket)) return;
    auto* base = address<unsigned char>(t, {Kind::GATHERED, bucket});
    const Bucket& b = t.model.buckets[bucket];
    for (int i = b.first; i < b.first + b.count; i++) {
        t.stored.narrow[i] = bind_narrow<T>(stored, t.model, t.layout, t.model.parameters[i], base);
    }
}

// Point a weight at its place: products read a matrix by its codes, norms read a vector as it is.
inline void point_at(Weight& w, const Narrow* narrow) {
    if (!narrow->values) return; // a wide bucket's
    w.data = narrow->values;
    w.narrow = narrow->is_matrix() ? narrow : nullptr;
}

// ----------------------------------------------------------------------------
// how they are made: the callback put(at, values) copies into the bucket

// A whole matrix in a narrow format, quantised here or read from a file in that format.
struct StoredMatrix {
    Stored stored = Stored::WIDE;
    std::vector<uint8_t> codes;  // NF4, int4: two a byte; int8: one
    std::vector<uint8_t> scales; // NF4: codes of absmaxes
    std::vector<float> table;    // NF4: the table of nf4.cuh; int8: absmax of rows; int4: scales
    bool finite = true;
};

// Whether all values are finite. A file may hold others, and loading must not hide them.
inline bool all_finite(const std::vector<float>& x) {
    return std::all_of(x.begin(), x.end(), [](float value) { return std::isfinite(value); });
}

// Quantise a whole parameter to NF4. Its blocks run on across the ends of rows, and its absmaxes
// form blocks too, so only the whole parameter determines them and their offset.
inline StoredMatrix make_nf4(const std::vector<float>& whole) {
    size_t n = whole.size(), blocks = nf4_blocks(n);
    StoredMatrix m = {Stored::NF4, std::vector<uint8_t>(ceil_div(n, 2)),
                      std::vector<uint8_t>(blocks), std::vector<float>(nf4_table_floats(n))};
    m.finite = all_finite(whole);

    // Absmaxes are floats only until they are quantised too.
    std::vector<float> absmax(blocks);
    nf4_quantize(m.codes.data(), absmax.data(), whole.data(), n, Cpu{});
    nf4_begin_table(m.table.data(), absmax.data(), blocks);
    nf4_quantize_scales(m.scales.data(), m.table.data(), absmax.data(), blocks, Cpu{});
    return m;
}

// Quantise a whole parameter to any of the formats. Those of int8 and int4 end with their row.
inline StoredMatrix make_matrix(Stored stored, const std::vector<float>& whole, size_t rows) {
    if (stored == Stored::NF4) return make_nf4(whole);
    size_t cols = whole.size() / rows;
    StoredMatrix m = {stored, std::vector<uint8_t>(ceil_div(whole.size(), codes_of_byte(stored))),
                      {}, std::vector<float>(rows * scales_of_row(stored, cols)),
                      all_finite(whole)};
    uint8_t* codes = m.codes.data();
    if (stored == Stored::INT4)
        int4_quantize(codes, m.table.data(), whole.data(), rows, cols, Cpu{});
    else
        int8_quantize(reinterpret_cast<int8_t*>(codes), m.table.data(), whole.data(), rows, cols,
                      Cpu{});
    return m;
}

// Mark a matrix that was not finite. Codes cannot hold NaN, so the first float beside them does,
// and the check of weights finds it there.
inline void mark_bad(const StoredMatrix& m, float* beside) {
    if (!m.finite) *beside = NAN;
}

// Keep this rank's blocks of NF4. A byte holds two codes, so a run of whole blocks is whole bytes;
// only a parameter that is not cut at all may have an odd length.
template <typename F>
void keep_nf4(const Parameter& p, const Layout& layout, const StoredMatrix& m, StoredPlace place,
              F put) {
    size_t local = p.local_elements();
    std::vector<uint8_t> codes(ceil_div(local, 2)), scales(nf4_blocks(local));
    for_each_run(p, layout.tp.rank, layout.tp.size, [&](size_t at, size_t from, size_t count) {
        std::copy_n(&m.codes[from / 2], ceil_div(count, 2), &codes[at / 2]);
        std::copy_n(&m.scales[from / NF4_BLOCK], nf4_blocks(count), &scales[at / NF4_BLOCK]);
    });

    // Every rank keeps the whole parameter's table.
    std::vector<float> table = m.table;
    mark_bad(m, &table[0]);
    put(place.codes, codes);
    put(place.absmax, scales);
    put(place.table, table);
}

// Keep this rank's codes of int8 or int4, and the scales of its rows or groups. A part of a row or
// of a group has the scale of the whole.
template <typename F>
void keep_rows(const Parameter& p, const Layout& layout, const StoredMatrix& m, StoredPlace place,
               F put) {
    size_t in_byte = codes_of_byte(m.stored);
    size_t length = m.stored == Stored::INT4 ? INT4_GROUP : p.cols(); // elements of a scale
    size_t cols = p.local_cols();
    size_t groups = scales_of_row(m.stored, cols);
    size_t of_row = scales_of_row(m.stored, p.cols());
    std::vector<uint8_t> codes(ceil_div(p.local_elements(), in_byte));
    std::vector<float> scales(p.local_rows() * groups);
    for_each_run(p, layout.tp.rank, layout.tp.size, [&](size_t at, size_t from, size_t count) {
        std::copy_n(&m.codes[from / in_byte], ceil_div(count, in_byte), &codes[at / in_byte]);

        // A run may be part of a row, or several rows. Take one group at a time, up to the end of
        // this rank's part of a row.
        for (size_t k = 0; k < count;) {
            size_t whole = from + k;
            size_t c = (at + k) % cols;
            size_t group = (at + k) / cols * groups + c / length;
            size_t theirs = whole / p.cols() * of_row + whole % p.cols() / length;
            scales[group] = m.table[theirs];
            k += std::min(length - c % length, cols - c);
        }
    });

    // Hand over the parts, with NaN in the scales if the matrix was not finite.
    mark_bad(m, &scales[0]);
    put(place.codes, codes);
    put(place.absmax, scales);
}

// Keep this rank's piece of a matrix in the format that the matrix has.
template <typename T, typename F>
void keep_stored(const Model& model, const Layout& layout, const Parameter& p,
                 const StoredMatrix& m, F put) {
    // A run uses one format, so the matrix has the format of its place.
    StoredPlace place = stored_place<T>(m.stored, model, p.bucket, &p);
    if (m.stored == Stored::NF4)
        return keep_nf4(p, layout, m, place, put);
    keep_rows(p, layout, m, place, put);
}

// Make one parameter of a narrow bucket from all its values.
template <typename T, typename A, typename F>
void make_stored(Stored stored, const Model& m, const Layout& layout, const Parameter& p,
                 const std::vector<A>& values, F put) {
    StoredPlace place = stored_place<T>(stored, m, p.bucket, &p);
    if (is_narrow(stored, m, p)) {
        std::vector<float> whole(values.begin(), values.end());
        return keep_stored<T>(m, layout, p, make_matrix(stored, whole, p.rows()), put);
    }

    // Keep a vector in T: a norm's weight is small, and every element of a row depends on it.
    std::vector<T> piece(p.local_elements());
    for_each_run(p, layout.tp.rank, layout.tp.size, [&](size_t at, size_t from, size_t count) {
        for (size_t i = 0; i < count; i++)
            piece[at + i] = from_acc<T>(acc_t<T>(values[from + i]));
    });
    put(place.codes, piece);
}

} // namespace llmc
