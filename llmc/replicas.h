// replicas.h - weights that several ranks hold, compared by sums that know no order
//   sum of a range = sum over its elements of mix(i, bits) mod 2^64     i: in the whole parameter
//   Every bit of an element changes every bit of its term, so one flipped bit is another sum, and
//   ranges add up in any order: of pieces, of shards, of a whole parameter in any layout.
//   1. replicas_differ   each rank sums what it keeps of each parameter; ranks that keep the same
//                        elements compare maximum and minimum, two numbers a parameter. Where they
//                        differ all ranks show theirs, and the majority says who is wrong
//   2. weight_sums       of all parameters, whole: a checkpoint's manifest has them, and a load in
//                        any layout must find the same
//   A rank whose memory or arithmetic fails goes its own way without a message: losses are means,
//   and hide it. Cost: one read of the weights, at each save and every --verify-every steps.
#pragma once
#include <tuple>
#include "parameters.h"

namespace llmc {

// ----------------------------------------------------------------------------
// sums

// The term of an element: two multiplications by odd numbers and the finaliser of SplitMix64.
inline uint64_t element_sum(uint64_t index, uint64_t bits) {
    uint64_t x = index * 0x9E3779B97F4A7C15 + bits * 0xD1B54A32D192ED03;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

// The bits of a weight as a number.
template <typename T>
uint64_t bits_of(const T& x) {
    uint64_t bits = 0;
    memcpy(&bits, &x, sizeof(x));
    return bits;
}

// The sum of what this rank keeps of a parameter's weight; padding is not in it.
template <typename T, typename S>
uint64_t kept_sum(const Trainer<T, S>& t, const Parameter& p) {
    Data weight = {Kind::WEIGHT, p.bucket};
    KeptRange range = kept_range(t, weight, p);

    // The host holds a part of it at a time.
    constexpr size_t PART = size_t(1) << 20; // elements
    std::vector<T> part(std::min(range.count, PART));
    uint64_t sum = 0;
    for (size_t at = 0; at < range.count; at += PART) {
        KeptRange of_part = {range.first + at, std::min(PART, range.count - at), range.at + at};
        read_kept(t, part.data(), weight, of_part.at, of_part.count);
        for_each_kept(t.layout, p, of_part, [&](size_t from, size_t global, size_t count) {
            for (size_t i = 0; i < count; i++)
                if (global + i < p.file_elements())
                    sum += element_sum(global + i, bits_of(part[from + i]));
        });
    }
    return sum;
}

// Codes of a frozen bucket lie in a format of their own, and nothing updates them.
template <typename T, typename S>
bool has_sum(const Trainer<T, S>& t, const Parameter& p) {
    return !is_narrow(t.plans[0].stored, t.model, p.bucket);
}

// Each parameter's sum, of what this rank keeps; 0 where it keeps nothing.
template <typename T, typename S>
std::vector<uint64_t> kept_sums(const Trainer<T, S>& t) {
    std::vector<uint64_t> sums;
    for (const Parameter& p : t.model.parameters)
        sums.push_back(has_sum(t, p) ? kept_sum(t, p) : 0);
    return sums;
}

// Each parameter's sum over all its elements, from the ranks that own them. All ranks call, and
// have the same answer.
template <typename T, typename S>
std::vector<uint64_t> weight_sums(const Trainer<T, S>& t) {
    std::vector<uint64_t> sums = kept_sums(t);
    size_t n = sums.size();
    std::vector<int64_t> halves(2 * n); // a rank's are below 2^32: so many ranks do not overflow
    for (size_t i = 0; i < n; i++) {
        const Parameter& p = t.model.parameters[i];
        if (!owns(t, {Kind::WEIGHT, p.bucket}, p)) continue;
        halves[2 * i] = int64_t(sums[i] & UINT32_MAX);
        halves[2 * i + 1] = int64_t(sums[i] >> 32);
    }
    all_reduce_sum(t.comms.world, halves.data(), 2 * n, Cpu{});
    for (size_t i = 0; i < n; i++)
        sums[i] = uint64_t(halves[2 * i]) + (uint64_t(halves[2 * i + 1]) << 32);
    return sums;
}

// ----------------------------------------------------------------------------
// ranks that keep the same

// The largest and the smallest sum of a parameter so far, the second one negated bit by bit: one
// maximum over ranks finds both.
struct SumRange {
    int64_t high, low_negated;
    bool one() const { return low_negated == ~high; }
};

// Widen the ranges of those parameters for which `same(p)` says that ranks of `c` keep the same.
template <typename T, typename S, typename F>
void widen_over(const Trainer<T, S>& t, const Comm& c, std::vector<SumRange>& ranges, F same) {
    if (c.size == 1) return;
    std::vector<int64_t> asked;
    for (size_t i = 0; i < ranges.size(); i++)
        if (same(t.model.parameters[i]))
            asked.insert(asked.end(), {ranges[i].high, ranges[i].low_negated});
    all_reduce_max(c, asked.data(), asked.size(), Cpu{});

    // Put the answers back in the same order.
    const int64_t* answer = asked.data();
    for (size_t i = 0; i < ranges.size(); i++)
        if (same(t.model.parameters[i])) {
            ranges[i] = {answer[0], answer[1]};
            answer += 2;
        }
}

// Compare along every axis on which a parameter is repeated.
template <typename T, typename S>
std::vector<SumRange> compare_sums(const Trainer<T, S>& t, const std::vector<uint64_t>& sums) {
    std::vector<SumRange> ranges;
    for (uint64_t sum : sums)
        ranges.push_back({int64_t(sum), ~int64_t(sum)});
    const Layout& layout = t.layout;
    int tp = layout.tp.size;
    auto sharded = [&](const Parameter& p) {
        return is_sharded(layout, t.model, {Kind::WEIGHT, p.bucket});
    };

    // Ranks that see other tokens: replicas of a shard, and all of a group where weights are whole.
    for (size_t g = 0; g < std::size(t.comms.of_group); g++) {
        const DataComms& data = t.comms.of_group[g];
        auto of_group = [&](const Parameter& p) {
            return size_t(t.model.buckets[p.bucket].group) == g;
        };
        widen_over(t, data.replica, ranges, of_group);
        widen_over(t, data.shard, ranges,
                   [&](const Parameter& p) { return of_group(p) && !sharded(p); });
    }

    // Ranks of a layer: norms are on all of them, a key/value head on some. And a tied table is at
    // both ends of a pipeline.
    widen_over(t, t.comms.tp, ranges,
               [&](const Parameter& p) { return replication(p.shard, tp) == tp; });
    widen_over(t, t.comms.kv, ranges,
               [&](const Parameter& p) { return replication(p.shard, tp) == t.comms.kv.size; });
    widen_over(t, t.comms.tie, ranges,
               [&](const Parameter& p) { return t.model.buckets[p.bucket].tied(); });
    return ranges;
}

// ----------------------------------------------------------------------------
// who is wrong

// A rank shows which elements of a parameter it keeps, and their sum.
struct ShownSum {
    int64_t piece, first, count, sum;
};

// "3", "0, 1 and 2"
inline std::string list_of_ranks(const std::vector<int>& ranks) {
    std::string text;
    for (size_t i = 0; i < ranks.size(); i++) {
        const char* comma = i + 1 == ranks.size() ? " and " : ", ";
        text += concat(i ? comma : "", ranks[i]);
    }
    return text;
}

// Name the ranks that disagree with most of those that keep the same elements.
inline std::string minority_text(const std::vector<ShownSum>& shown) {
    typedef std::tuple<int64_t, int64_t, int64_t> Elements;
    std::map<Elements, std::map<int64_t, std::vector<int>>> ranks_by_sum;
    for (size_t r = 0; r < shown.size(); r++) {
        const ShownSum& s = shown[r];
        if (s.count)
            ranks_by_sum[{s.piece, s.first, s.count}][s.sum].push_back(int(r));
    }

    // The first range that has two sums is enough.
    for (auto& [elements, by_sum] : ranks_by_sum) {
        if (by_sum.size() == 1) continue;
        size_t all = 0;
        std::vector<int> most, others;
        for (auto& [sum, ranks] : by_sum) {
            all += ranks.size();
            if (ranks.size() > most.size()) most = ranks;
        }
        for (auto& [sum, ranks] : by_sum)
            if (ranks != most)
                others.insert(others.end(), ranks.begin(), ranks.end());
        std::sort(others.begin(), others.end());
        if (2 * most.size() > all)
            return concat("rank ", list_of_ranks(others), " has other values than ranks ",
                          list_of_ranks(most));

        // Without a majority nobody can say which of them is wrong.
        others.insert(others.end(), most.begin(), most.end());
        std::sort(others.begin(), others.end());
        return concat("ranks ", list_of_ranks(others), " have different values");
    }
    return "";
}

// Name the first parameter whose weights differ between ranks that should have the same, and the
// ranks; "": none. All ranks call, and have the same answer.
template <typename T, typename S>
std::string replicas_differ(const Trainer<T, S>& t) {
    const Comm& world = t.comms.world;
    if (world.size == 1) return "";
    std::vector<uint64_t> sums = kept_sums(t);
    std::vector<SumRange> ranges = compare_sums(t, sums);

    // Find the first of any rank.
    int64_t n = int64_t(ranges.size()), left = 0;
    for (int64_t i = n - 1; i >= 0; i--)
        if (!ranges[size_t(i)].one()) left = n - i;
    all_reduce_max(world, &left, 1, Cpu{});
    if (!left) return "";

    // Let every rank show what it has of it.
    size_t i = size_t(n - left);
    const Parameter& p = t.model.parameters[i];
    KeptRange range = kept_range(t, {Kind::WEIGHT, p.bucket}, p);
    int piece = t.layout.tp.rank / replication(p.shard, t.layout.tp.size);
    piece += t.layout.tp.size * p.experts.rank;
    ShownSum mine = {piece, int64_t(range.first), int64_t(range.count), int64_t(sums[i])};
    std::vector<ShownSum> shown(size_t(world.size));
    all_gather(world, &shown[0].piece, &mine.piece, 4, Cpu{});
    return p.name + ": " + minority_text(shown);
}

} // namespace llmc
