// parameters.h - parameters whole, and the range that a rank keeps: drawn, written, read
//   Everything is addressed by the global element, so that no result depends on the layout. Initial
//   weights are keyed by seed, name and global index. Checkpoints and exports read and write
//   through fetch_numbers() and make_weight().
#pragma once
#include "action.h"
#include "adapters.h"
#include "arena.h"
#include "comm/comm.h"
#include "layout.h"
#include "model.h"
#include "offload.h"
#include "ops/cuda_common.h"
#include "ops/element_type.h"
#include "ops/memory.h"
#include "ops/rand.h"
#include "ops/small_states.cuh"
#include "ops/tensor_table.cuh"
#include "ops/types.h"
#include "optimizer.h"
#include "quantised.h"
#include "sharding.h"
#include "trainer.h"

namespace llmc {

// ----------------------------------------------------------------------------
// lasting data, wherever they lie
//   Checkpoints and initial weights need not know of chunks: read_kept() and fill_kept() walk them.

// Return where element `at` of a datum lies: the datum, or its chunk; null if this rank has none.
template <typename T, typename S>
const Place* kept_place(const Trainer<T, S>& t, Data d, size_t at) {
    const Place* place = arena_find(t.arena, t.plan, t.at, d);
    if (place) return place;

    // Look for the chunk of an offloaded bucket.
    d.chunk = int(at / t.plans[t.plan].offload.chunk);
    return arena_find(t.arena, t.plan, t.at, d);
}

// Return the index of element `at` in a datum or its chunk. Second moments lie close together where
// some tensors have none.
template <typename T, typename S>
size_t kept_index(const Trainer<T, S>& t, Data d, size_t at) {
    if (!t.model.muon || d.kind != Kind::STATE || d.micro != 1) return at;
    Range range = updated_range(t.layout, t.model, d.of);
    size_t first = chunk_of(range, t.plans[t.plan].offload, d.chunk).first;
    TensorRow row = tensor_rows(t.model, d.of, first, first + at + 1).back();
    return row.second + at - row.offset;
}

// Call f(place, byte, from, count) for each contiguous piece of elements [at, at+count) of type V:
// `byte` is its offset in its tier, `from` its first element, counted from `at`.
template <typename V, typename T, typename S, typename F>
void for_each_piece(const Trainer<T, S>& t, Data d, size_t at, size_t count, F f) {
    // A datum that is not in chunks is one piece.
    if (!count) return;
    const Place* whole = arena_find(t.arena, t.plan, t.at, d);
    if (whole)
        return f(*whole, whole->offset + kept_index(t, d, at) * sizeof(V), size_t(0), count);

    // Take from each chunk its share of the range.
    size_t chunk = t.plans[t.plan].offload.chunk;
    for (size_t from = 0; from < count;) {
        d.chunk = int((at + from) / chunk);
        size_t within = (at + from) % chunk, n = std::min(count - from, chunk - within);
        // Chunks of a bucket are not neighbours in their tier.
        const Place* place = arena_find(t.arena, t.plan, t.at, d);
        f(*place, place->offset + kept_index(t, d, within) * sizeof(V), from, n);
        from += n;
    }
}

// Copy elements [at, at+count) of a datum to the host.
template <typename V, typename T, typename S>
void read_kept(const Trainer<T, S>& t, V* to, Data d, size_t at, size_t count) {
    // The pieces may lie in several chunks, all in one tier.
    for_each_piece<V>(t, d, at, count, [&](const Place& p, size_t byte, size_t from, size_t n) {
        const Memory& m = t.arena.memory[int(p.tier)];
        size_t bytes = n * sizeof(V);
        switch (p.tier) {
        case Tier::DEVICE: return copy_out(to + from, m.base + byte, bytes, t.ctx.where);
        case Tier::HOST: memcpy(to + from, m.base + byte, bytes); return;
        case Tier::DISK: {
            std::string wrong = disk_move(*m.disk, Way::FROM_DISK, to + from, byte, bytes);
            LLMC_USER_CHECK(wrong.empty(), "--offload-to %s", wrong.c_str());
        }
        }
    });
}

// Set elements [at, at+count) to value(i), where i counts from 0; done on return.
template <typename V, typename T, typename S, typename F>
void fill_kept(Trainer<T, S>& t, Data d, size_t at, size_t count, F value) {
    for_each_piece<V>(t, d, at, count, [&](const Place& p, size_t byte, size_t from, size_t n) {
        const Memory& m = t.arena.memory[int(p.tier)];
        // Fill in place, except in a file, which has no address.
        V* home = reinterpret_cast<V*>(m.base + byte);
        auto here = [&](size_t i) { return value(from + i); };
        switch (p.tier) {
        case Tier::DEVICE: return fill_memory(home, n, here, t.ctx.where);
        case Tier::HOST: return fill_memory(home, n, here, Cpu{});
        case Tier::DISK: {
            std::vector<V> values(n); // a chunk at most
            fill_memory(values.data(), n, here, Cpu{});
            size_t bytes = n * sizeof(V);
            std::string wrong = disk_move(*m.disk, Way::TO_DISK, values.data(), byte, bytes);
            LLMC_USER_CHECK(wrong.empty(), "--offload-to %s", wrong.c_str());
        }
        }
    });
}

// ----------------------------------------------------------------------------
// the part of a parameter that this rank keeps

// The part of a parameter that this rank keeps in a datum (a weight, a master, a state tensor).
struct KeptRange {
    size_t first, count; // elements of this rank's piece of the parameter
    size_t at;           // the first of them, counted from the datum's first
};

// The overlap of two ranges of the bucket: the rank's piece of the parameter, and the range of the
// datum that it keeps. If there is no overlap, or no place for the datum, all numbers are zero.
template <typename T, typename S>
KeptRange kept_range(const Trainer<T, S>& t, Data d, const Parameter& p) {
    size_t kept = kept_first(t.layout, t.model, d);
    size_t kept_end = kept + kept_elements(t.layout, t.model, d);
    size_t first = std::max(p.offset, kept);
    size_t end = std::min(p.offset + p.local_elements(), kept_end);
    bool none = p.muon && d.kind == Kind::STATE && d.micro == 1; // has no second moment
    if (first >= end || none || !kept_place(t, d, first - kept))
        return {0, 0, 0};
    return {first - p.offset, end - first, first - kept};
}

// Call f(at, global, count) for each run of kept elements: `count` elements that begin at `at`,
// counted from the first kept one, and at `global` in the whole parameter.
template <typename F>
void for_each_kept(const Layout& layout, const Parameter& p, KeptRange range, F f) {
    size_t range_end = range.first + range.count;
    auto clip = [&](size_t local, size_t global, size_t count) {
        size_t first = std::max(local, range.first);
        size_t end = std::min(local + count, range_end);
        if (first < end)
            f(first - range.first, global + first - local, end - first);
    };
    for_each_run(p, layout.tp.rank, layout.tp.size, clip);
}

// Whether this rank keeps data of a kind. With adapters, a stage without blocks keeps no state.
template <typename T, typename S>
bool keeps_any(const Trainer<T, S>& t, Kind kind) {
    for (auto& [d, place] : t.arena.lasting)
        if (d.kind == kind && place.bytes)
            return true;
    return false;
}

// Whether this rank is the owner: among ranks that keep the same elements, the one that contributes
// them when the whole parameter is collected.
template <typename T, typename S>
bool owns(const Trainer<T, S>& t, Data d, const Parameter& p) {
    const Bucket& bucket = t.model.buckets[p.bucket];
    const DataComms& data = t.comms.data(bucket.group);

    // Among ranks with equal elements, the one that is first along every axis owns them.
    const Axis& tp = t.layout.tp;
    bool first_replica = cut_over_replicas(t.layout, t.model, d) || data.replica.rank == 0;
    bool first_shard = is_sharded(t.layout, t.model, d) || data.shard.rank == 0;
    bool first_piece = tp.rank % replication(p.shard, tp.size) == 0;
    bool first_stage = is_mine(t.layout, t.model, bucket.layers.front());
    return first_replica && first_shard && first_piece && first_stage;
}

// ----------------------------------------------------------------------------
// writing

// A function put(at, values) that copies values into a narrow bucket, `at` bytes from its start. Of
// a bucket in shards it copies what this rank keeps.
template <typename T, typename S>
auto put_into(Trainer<T, S>& t, int bucket) {
    unsigned char* base = address<unsigned char>(t, {Kind::WEIGHT, bucket});
    StoredRange kept = stored_range<T>(t.plans[0].stored, t.layout, t.model, bucket);
    return [&t, base, kept](size_t at, const auto& values) {
        // Clip the values to what this rank keeps.
        size_t end = at + values.size() * sizeof(values[0]);
        size_t from = std::max(at, kept.first);
        size_t to = std::min(end, kept.first + kept.count);
        if (from >= to) return;

        // Count bytes: a format's codes and scales have different types.
        auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
        bytes += from - at;
        copy_in(base + (from - kept.first), bytes, to - from, t.ctx.where);
        wait_for(t.ctx.where); // the copy reads `values`, which may end when this returns
    };
}

// Quantise a parameter of a narrow bucket, on the ranks that have it. Each of them takes the whole
// parameter, so that codes do not depend on the layout. The host holds one parameter at a time.
template <typename A, typename T, typename S, typename F>
void make_frozen(Trainer<T, S>& t, const Parameter& p, F values) {
    Stored stored = t.plans[0].stored;
    bool here = address<unsigned char>(t, {Kind::WEIGHT, p.bucket});
    if (!here) return;
    std::vector<A> whole(p.elements());
    values(whole.data(), size_t(0), whole.size());
    make_stored<T>(stored, t.model, t.layout, p, whole, put_into(t, p.bucket));
}

// Store a matrix that a file holds in this run's format: its bytes stay as they are, on the ranks
// that have the matrix.
template <typename T, typename S>
void set_stored(Trainer<T, S>& t, const Parameter& p, const StoredMatrix& matrix) {
    bool here = address<unsigned char>(t, {Kind::WEIGHT, p.bucket});
    if (here) keep_stored<T>(t.model, t.layout, p, matrix, put_into(t, p.bucket));
}

// Store the part of a parameter that this rank keeps, into its weight and its master. values(to,
// global, count) gives `count` elements from `global` on, as trained, with zeros for padding. A is
// float or wider.
template <typename A, typename T, typename S, typename F>
void make_weight(Trainer<T, S>& t, const Parameter& p, F values) {
    if (is_narrow(t.plans[0].stored, t.model, p.bucket))
        return make_frozen<A>(t, p, values);

    // Compute the longer range once: it contains the other one.
    Data weight = {Kind::WEIGHT, p.bucket};
    Data master = {Kind::MASTER, p.bucket};
    KeptRange of_weight = kept_range(t, weight, p);
    KeptRange of_master = kept_range(t, master, p);
    KeptRange most = of_weight.count > of_master.count ? of_weight : of_master;
    std::vector<A> kept(most.count);
    for_each_kept(t.layout, p, most, [&](size_t at, size_t global, size_t count) {
        values(kept.data() + at, global, count);
    });

    // Store a range of it in a datum's own type.
    auto store = [&](Data d, KeptRange range, auto narrow) {
        if (!range.count) return;
        const A* from = kept.data() + (range.first - most.first);
        auto value = [=](size_t i) { return narrow(from[i]); };
        typedef decltype(value(0)) V;
        fill_kept<V>(t, d, range.at, range.count, value);
    };

    // If masters are remainders, split each number into a weight and a remainder: the remainder
    // undoes only this rounding of the weight.
    if constexpr (type_of<T>() == Type::BF16)
        if (t.plans[0].masters == Masters::REMAINDER) {
            auto split = [](A x) { return split_float(float(x)); };
            store(weight, of_weight, [=](A x) { return T{split(x).weight}; });
            store(master, of_master, [=](A x) { return split(x).remainder; });
            return;
        }

    // Else store the weight rounded, and the master as float.
    store(weight, of_weight, [](A x) { return from_acc<T>(acc_t<T>(x)); });
    store(master, of_master, [](A x) { return float(x); });
}

// ----------------------------------------------------------------------------
// 8-bit moments as numbers
//   A file holds floats. A code stands for its value times absmax, except that the lowest code of a
//   map with signs stands for -absmax. Then the largest magnitude is the block's absmax, every
//   number is closest to its own code, and the same blocks come back bit for bit. Under another
//   tensor parallelism pieces have other blocks.

// Whether a state tensor is the first moment, which has a sign; the second one has none.
inline bool is_first_moment(Data d) { return d.micro == 0; }

// Turn the bytes of a row into its numbers (row.n); below, turn the numbers back into bytes.
inline void numbers_of_bytes(float* x, unsigned char* bytes, const TensorRow& row, bool is_signed) {
    if (!row.small) {
        memcpy(x, bytes, row.n * sizeof(float));
        return;
    }

    // Read block by block: each has its own scale.
    DynamicMap map = dynamic_map(is_signed);
    for (size_t i = 0; i < row.n; i += STATE_BLOCK) {
        StateBlock block = state_block(bytes, row.n, i);
        size_t n = std::min(STATE_BLOCK, row.n - i);
        read_block(x + i, block, n, map);

        // The lowest code stands for the largest magnitude.
        for (size_t k = 0; k < n; k++)
            if (is_signed && block.codes[k] == 0)
                x[i + k] = -*block.absmax;
    }
}
inline void bytes_of_numbers(unsigned char* bytes, const float* x, const TensorRow& row,
                             bool is_signed) {
    if (!row.small) {
        memcpy(bytes, x, row.n * sizeof(float));
        return;
    }

    // Write block by block. The last one may be shorter.
    DynamicMap map = dynamic_map(is_signed);
    for (size_t i = 0; i < row.n; i += STATE_BLOCK) {
        StateBlock block = state_block(bytes, row.n, i);
        size_t n = std::min(STATE_BLOCK, row.n - i);
        write_block(block, x + i, n, map);
    }
}

// Call f(data, row, first) for each row of a parameter that this rank keeps: there is one, or one
// in each offloaded chunk. row.state counts bytes from the start of `data`; `first` counts elements
// from the start of the range.
template <typename T, typename S, typename F>
void for_each_state_row(const Trainer<T, S>& t, Data d, const Parameter& p, KeptRange range, F f) {
    uint64_t hash = fnv1a(p.name);
    const Plan& plan = t.plans[0];
    bool whole = arena_find(t.arena, t.plan, t.at, d);

    // Walk over the elements that this rank keeps, chunk by chunk.
    size_t kept = kept_first(t.layout, t.model, d);
    size_t all = kept_elements(t.layout, t.model, d);
    size_t step = whole ? all : plan.offload.chunk;
    for (size_t from = 0; from < all; from += step) {
        // An offloaded chunk counts its rows from its own start.
        Data part = d;
        part.chunk = whole ? -1 : int(from / step);
        size_t count = std::min(step, all - from);

        // Find the parameter's row among the chunk's rows: there is at most one.
        size_t first = kept + from;
        size_t end = first + count;
        for (const TensorRow& row : tensor_rows(t.model, d.of, first, end)) {
            bool of_p = row.hash == hash;
            bool within = row.first < range.first + range.count;
            if (of_p && within)
                f(part, row, row.first - range.first);
        }
    }
}

// Whether a kind is stored as numbers of type acc, apart from narrow moments.
inline bool is_in_acc(Kind kind) {
    return kind != Kind::WEIGHT && kind != Kind::MASTER;
}

// Store a range of a state tensor from its numbers (range.count). bf16 moments are rounded to
// nearest, which is exact for numbers that were bf16 when they were saved.
template <typename T, typename S>
void write_state(Trainer<T, S>& t, Data d, const Parameter& p, KeptRange range,
                 const acc_t<T>* values) {
    if (!range.count) return;
    States format = d.kind == Kind::STATE ? t.plans[0].states : States::FLOAT;
    if (format == States::EIGHT_BIT)
        return for_each_state_row(t, d, p, range, [&](Data part, const TensorRow& row, size_t at) {
            std::vector<float> x(values + at, values + at + row.n);
            std::vector<unsigned char> bytes(state_bytes(row.n, row.small));
            bytes_of_numbers(bytes.data(), x.data(), row, is_first_moment(d));

            // Write the bytes where the row begins.
            auto byte = [&](size_t i) { return bytes[i]; };
            fill_kept<unsigned char>(t, part, row.state, bytes.size(), byte);
        });

    // Round to nearest: only an update rounds stochastically.
    if (format == States::BF16) {
        auto narrow = [=](size_t i) { return from_acc<bf16>(float(values[i])); };
        return fill_kept<bf16>(t, d, range.at, range.count, narrow);
    }

    // Numbers as wide as sums need no rounding.
    auto whole = [=](size_t i) { return values[i]; };
    fill_kept<acc_t<T>>(t, d, range.at, range.count, whole);
}

// Store the part of a parameter that this rank keeps, from an array of all its elements.
template <typename T, typename S, typename A>
void set_weight(Trainer<T, S>& t, const Parameter& p, const A* values) {
    make_weight<A>(t, p, [&](A* to, size_t global, size_t count) {
        std::copy_n(values + global, count, to);
    });
}

// Draw a weight's first values from --seed: counter-based, keyed by name and global element.
template <typename T, typename S>
void draw_weight(Trainer<T, S>& t, const Parameter& p, uint64_t seed) {
    // Elements past the end of the file's are padding, which is zero.
    size_t end = p.file_elements();
    make_weight<float>(t, p, [&](float* to, size_t global, size_t count) {
        size_t real = global < end ? std::min(count, end - global) : 0;
        std::fill_n(to, count, 0.0f);
        if (p.init.std > 0) {
            fill_normal(to, seed, fnv1a(p.name), global, real, p.init.std);
            for (size_t i = 0; i < real; i++)
                to[i] += p.init.value;
        } else {
            std::fill_n(to, real, p.init.value);
        }
    });
}

// Draw all weights, or only those of adapters, if all other weights are read from files.
template <typename T, typename S>
void init_weights(Trainer<T, S>& t, uint64_t seed, bool adapters_alone = false) {
    for (const Parameter& p : t.model.parameters)
        if (!adapters_alone || is_adapter(t.model, p))
            draw_weight(t, p, seed);
}

// ----------------------------------------------------------------------------
// reading: all ranks call, and each of them gets the whole parameter

// Read the numbers for which a range of a master, a weight or a state tensor stands on this rank.
// They go into values (range.count).
template <typename T, typename S>
void read_numbers(const Trainer<T, S>& t, acc_t<T>* values, Data d, const Parameter& p,
                  KeptRange range) {
    using enum Kind;
    // Read moments in bf16.
    if (d.kind == STATE && t.plans[0].states == States::BF16) {
        std::vector<bf16> narrow(range.count);
        read_kept(t, narrow.data(), d, range.at, range.count);
        for (size_t i = 0; i < range.count; i++)
            values[i] = to_float(narrow[i]);
        return;
    }

    // Read moments in 8 bits, row by row.
    if (d.kind == STATE && t.plans[0].states == States::EIGHT_BIT) {
        for_each_state_row(t, d, p, range, [&](Data part, const TensorRow& row, size_t first) {
            std::vector<unsigned char> bytes(state_bytes(row.n, row.small));
            read_kept(t, bytes.data(), part, row.state, bytes.size());

            // Undo the format. Padding is left out.
            size_t n = std::min(row.n, range.count - first);
            std::vector<float> x(row.n);
            numbers_of_bytes(x.data(), bytes.data(), row, is_first_moment(d));
            std::copy_n(x.data(), n, values + first);
        });
        return;
    }

    // Read moments in acc, and the mean of weights.
    if (is_in_acc(d.kind))
        return read_kept(t, values, d, range.at, range.count);

    // Read masters and weights of the type of `values` straight into them.
    bool master = d.kind == MASTER && t.plans[0].masters == Masters::FLOAT;
    if constexpr (std::is_same_v<acc_t<T>, float>)
        if (master)
            return read_kept(t, values, d, range.at, range.count);
    if constexpr (std::is_same_v<acc_t<T>, T>)
        if (d.kind == WEIGHT)
            return read_kept(t, values, d, range.at, range.count);

    // Widen float masters, if sums are in double.
    if (master) {
        std::vector<float> masters(range.count);
        read_kept(t, masters.data(), d, range.at, range.count);
        std::copy(masters.begin(), masters.end(), values);
        return;
    }

    // Join weights and remainders, or take weights as they are. ZeRO-1 and 2 keep whole weights
    // beside a shard of remainders, so the range begins at different places in the two.
    Data weight = {WEIGHT, p.bucket};
    KeptRange of_weight = kept_range(t, weight, p);
    size_t at = of_weight.at + (range.first - of_weight.first);
    std::vector<T> weights(range.count);
    std::vector<uint16_t> remainders(d.kind == MASTER ? range.count : 0);
    read_kept(t, weights.data(), weight, at, range.count);
    if (d.kind == MASTER)
        read_kept(t, remainders.data(), d, range.at, range.count);

    // Only bf16 weights have remainders.
    for (size_t i = 0; i < range.count; i++) {
        values[i] = to_acc(weights[i]);
        if constexpr (type_of<T>() == Type::BF16)
            if (d.kind == MASTER)
                values[i] = join_float({weights[i].bits, remainders[i]});
    }
}
template <typename T, typename S>
std::vector<acc_t<T>> read_numbers(const Trainer<T, S>& t, Data d, const Parameter& p,
                                   KeptRange range) {
    std::vector<acc_t<T>> values(range.count);
    read_numbers(t, values.data(), d, p, range);
    return values;
}

// The whole parameter, in elements of V, collected from the ranks that own its parts. read(range)
// gives the part that this rank keeps.
template <typename V, typename T, typename S, typename F>
std::vector<V> gather_owned(const Trainer<T, S>& t, Data d, const Parameter& p, F read) {
    std::vector<V> values(p.elements(), V{});
    KeptRange range = kept_range(t, d, p);
    if (range.count && owns(t, d, p)) {
        std::vector<V> kept = read(range);
        for_each_kept(t.layout, p, range, [&](size_t at, size_t global, size_t count) {
            std::copy_n(kept.data() + at, count, values.data() + global);
        });
    }

    // Add bytes over all ranks: one rank gives each element, and the others give zero.
    unsigned char* bytes = reinterpret_cast<unsigned char*>(values.data());
    all_reduce_sum(t.comms.world, bytes, values.size() * sizeof(V), Cpu{});
    return values;
}

// The whole parameter as a datum stores it, in elements of V: no format is undone.
template <typename V, typename T, typename S>
std::vector<V> fetch(const Trainer<T, S>& t, Data d, const Parameter& p) {
    return gather_owned<V>(t, d, p, [&](KeptRange range) {
        std::vector<V> kept(range.count);
        read_kept(t, kept.data(), d, range.at, range.count);
        return kept;
    });
}

// The whole parameter as the numbers for which a datum stands. Files hold these, so that a run with
// masters of any kind can read the files of any other.
template <typename T, typename S>
std::vector<acc_t<T>> fetch_numbers(const Trainer<T, S>& t, Data d, const Parameter& p) {
    return gather_owned<acc_t<T>>(t, d, p, [&](KeptRange range) {
        return read_numbers(t, d, p, range);
    });
}

// The float values of a parameter as trained: its master, or its weight if it has no master, which
// is so for frozen parameters too.
template <typename T, typename S>
std::vector<float> get_weight(const Trainer<T, S>& t, const Parameter& p) {
    bool master = keeps_any(t, Kind::MASTER) && t.model.buckets[p.bucket].trainable;
    Kind kind = master ? Kind::MASTER : Kind::WEIGHT;
    std::vector<acc_t<T>> values = fetch_numbers(t, {kind, p.bucket}, p);
    return std::vector<float>(values.begin(), values.end());
}

} // namespace llmc
