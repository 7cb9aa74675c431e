// replicas.h - weights that several ranks hold, compared by sums that know no order
//   sum of a range = sum over its elements of mix(i, bits) mod 2^64     i: in the whole parameter
//   Every bit of an element changes every bit of its term, so one flipped bit gives another sum.
//   Ranges add up in any order: of pieces, of shards, of a whole parameter in any layout.
//   1. replicas_differ   Each rank sums what it keeps of each weight, master and moment. Ranks that
//                        keep the same elements compare maximum and minimum, two numbers for each
//                        sum. If they differ, all ranks show theirs, and the majority says which
//                        rank is wrong.
//   2. weight_sums       The sums of all whole parameters. A checkpoint's manifest holds them, and
//                        a load in any layout must find the same.
//   A rank whose memory or arithmetic fails diverges without a message, and the loss hides it,
//   because it is a mean.
//   Cost: one read of all that is kept, at each save and every --verify-every steps.
#pragma once
#include <memory>
#include <tuple>
#include "../action.h"
#include "../optimizer.h"
#include "../comm/comm.h"
#include "../comm/group.h"
#include "../layout.h"
#include "../model.h"
#include "../ops/types.h"
#include "../parameters.h"
#include "../quantised.h"
#include "../sharding.h"
#include "../comm/text.h"
#include "../trainer.h"

namespace llmc {

// ----------------------------------------------------------------------------
// sums

// Return the term of an element: two multiplications by odd numbers and SplitMix64's finaliser.
inline uint64_t element_sum(uint64_t index, uint64_t bits) {
    uint64_t x = index * 0x9E3779B97F4A7C15 + bits * 0xD1B54A32D192ED03;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

// Return the bits of a weight as a number.
template <typename T>
uint64_t bits_of(const T& x) {
    uint64_t bits = 0;
    memcpy(&bits, &x, sizeof(x));
    return bits;
}

// Return the sum of a range of a parameter, from its values; padding does not count.
template <typename V>
uint64_t range_sum(const Layout& layout, const Parameter& p, KeptRange range, const V* values) {
    // Cut the padding off first: a loop without a branch runs in vector lanes, eight times as fast.
    uint64_t sum = 0;
    size_t words = p.file_elements();
    for_each_kept(layout, p, range, [&](size_t from, size_t global, size_t count) {
        size_t real = std::min(count, words - std::min(global, words));
        for (size_t i = 0; i < real; i++)
            sum += element_sum(global + i, bits_of(values[from + i]));
    });
    return sum;
}

// Return the sum of what this rank keeps of a parameter: its weight, its master or a moment.
template <typename T, typename S>
uint64_t kept_sum(const Trainer<T, S>& t, Data d, const Parameter& p) {
    // Masters and moments have many formats, so sum their numbers.
    KeptRange range = kept_range(t, d, p);
    if (d.kind != Kind::WEIGHT && range.count)
        return range_sum(t.layout, p, range, read_numbers(t, d, p, range).data());

    // Sum a weight in parts: the host holds one part at a time.
    constexpr size_t PART = size_t(1) << 20; // elements
    std::vector<T> part(std::min(range.count, PART));
    uint64_t sum = 0;
    for (size_t at = 0; at < range.count; at += PART) {
        KeptRange of_part = {range.first + at, std::min(PART, range.count - at), range.at + at};
        read_kept(t, part.data(), d, of_part.at, of_part.count);
        sum += range_sum(t.layout, p, of_part, part.data());
    }
    return sum;
}

// Whether a parameter has a sum.
// Frozen codes have none: their format is their own, and nothing updates them.
template <typename T, typename S>
bool has_sum(const Trainer<T, S>& t, const Parameter& p) {
    return !is_narrow(t.plans[0].stored, t.model, p.bucket);
}

// Return each weight's sum over all its elements, taken from the ranks that own them. All ranks
// must call, and get the same answer.
template <typename T, typename S>
std::vector<uint64_t> weight_sums(const Trainer<T, S>& t) {
    size_t n = t.model.parameters.size();
    std::vector<uint64_t> sums(n);
    std::vector<int64_t> halves(2 * n); // below 2^32 each, so the sum over ranks cannot overflow
    for (size_t i = 0; i < n; i++) {
        const Parameter& p = t.model.parameters[i];
        Data weight = {Kind::WEIGHT, p.bucket};
        uint64_t sum = has_sum(t, p) && owns(t, weight, p) ? kept_sum(t, weight, p) : 0;
        halves[2 * i] = int64_t(sum & UINT32_MAX);
        halves[2 * i + 1] = int64_t(sum >> 32);
    }

    // Add the owners' sums, in halves, and join the halves.
    all_reduce_sum(t.comms.world, halves.data(), 2 * n, Cpu{});
    for (size_t i = 0; i < n; i++)
        sums[i] = uint64_t(halves[2 * i]) + (uint64_t(halves[2 * i + 1]) << 32);
    return sums;
}

// ----------------------------------------------------------------------------
// ranks that keep the same elements

// A weight, its master, or one of its moments: of several ranks, or in a rank's file.
// `data` says where the values lie on this rank, `p` gives the shape and how ranks cut it.
struct StateTensor {
    std::string name; // "m of h.0.ln_1.weight", in a file "m.h.0.ln_1.weight"
    Data data;
    const Parameter* p;
    std::shared_ptr<const Parameter> own = {}; // p, where the model has no such parameter
};

// NorMuon's second moments of a matrix as a parameter of their own: it is saved and compared so.
inline Parameter neurons_as_parameter(Parameter p) {
    p.shape = {neurons_of(p) * size_t(p.experts.size)};
    p.file_rows = p.shape[0];
    p.shard = {-1, 1, 0, p.shard.partial};
    p.pieces = 1;
    p.offset = 0;
    return p;
}

// List a parameter's moments, in the order of the optimizer's table.
template <typename T, typename S>
void add_moments(const Trainer<T, S>& t, const Parameter& p, const char* of,
                 std::vector<StateTensor>& list) {
    int number = 0;
    for (std::string state : states_of(t.plans[0].optimizer, p.muon))
        list.push_back({state + of + p.name, {Kind::STATE, p.bucket, number++}, &p});
    if (!p.muon || t.plans[0].optimizer != Optimizer::NORMUON)
        return;
    auto v = std::make_shared<const Parameter>(neurons_as_parameter(p));
    Data neurons = {Kind::NEURONS, p.bucket, int(&p - t.model.parameters.data())};
    list.push_back({concat("v", of, p.name), neurons, v.get(), v});
}

// List all data of which ranks may have copies, in the same order on all ranks.
template <typename T, typename S>
std::vector<StateTensor> copied_data(const Trainer<T, S>& t) {
    std::vector<StateTensor> list;

    // Only training has masters and moments. Codes of frozen weights have no sum.
    bool masters = t.plans[0].mode == Mode::TRAIN;
    for (const Parameter& p : t.model.parameters) {
        if (has_sum(t, p)) list.push_back({p.name, {Kind::WEIGHT, p.bucket}, &p});
        if (!t.model.buckets[p.bucket].trainable)
            continue;
        if (!masters) continue;
        list.push_back({"the master of " + p.name, {Kind::MASTER, p.bucket}, &p});
        add_moments(t, p, " of ", list);
        if (t.plans[0].ema)
            list.push_back({"the mean of " + p.name, {Kind::EMA, p.bucket}, &p});
    }
    return list;
}

// The largest and the smallest sum of a datum so far.
// The smallest is negated bit by bit, so one maximum over ranks finds both.
struct SumRange {
    int64_t high, low_negated;
    bool one() const { return low_negated == ~high; } // all sums are equal
};

// Widen the ranges over the ranks of `c`,
// for the data of which `same(x)` says that these ranks keep the same elements.
template <typename F>
void widen_over(const Comm& c, const std::vector<StateTensor>& list, std::vector<SumRange>& ranges,
                F same) {
    if (c.size == 1) return;
    std::vector<int64_t> asked;
    for (size_t i = 0; i < ranges.size(); i++)
        if (same(list[i]))
            asked.insert(asked.end(), {ranges[i].high, ranges[i].low_negated});
    all_reduce_max(c, asked.data(), asked.size(), Cpu{});

    // Put the answers back in the same order.
    const int64_t* answer = asked.data();
    for (size_t i = 0; i < ranges.size(); i++)
        if (same(list[i])) {
            ranges[i] = {answer[0], answer[1]};
            answer += 2;
        }
}

// Call f(ranks, same) for each group of ranks that may keep the same elements;
// same(x) says for which data they do.
template <typename T, typename S, typename F>
void for_each_repeat(const Trainer<T, S>& t, F f) {
    int tp = t.layout.tp.size;
    auto bucket = [&](const StateTensor& x) {
        return t.model.buckets[x.p->bucket];
    };

    // Ranks that see other tokens: the replicas of a shard,
    // and the shards' ranks too if a datum is whole.
    for (size_t g = 0; g < std::size(t.comms.of_group); g++) {
        const DataComms& data = t.comms.of_group[g];
        auto of_group = [&](const StateTensor& x) {
            return size_t(bucket(x).group) == g;
        };
        f(data.replica, [&](const StateTensor& x) {
            return of_group(x) && !cut_over_replicas(t.layout, t.model, x.data);
        });
        f(data.shard, [&](const StateTensor& x) {
            return of_group(x) && !is_sharded(t.layout, t.model, x.data);
        });
    }

    // Ranks of one layer: norms are on all of them, a key/value head on some.
    // A tied table is at both ends of a pipeline.
    f(t.comms.tp, [&](const StateTensor& x) {
        return replication(x.p->shard, tp) == tp;
    });
    f(t.comms.kv, [&](const StateTensor& x) {
        return replication(x.p->shard, tp) == t.comms.kv.size;
    });
    f(t.comms.tie, [&](const StateTensor& x) {
        return bucket(x).tied();
    });
}

// ----------------------------------------------------------------------------
// who is wrong

// A rank's own sum of a parameter, shown to all: the elements that it keeps, and their sum.
struct ShownSum {
    int64_t piece, first, count, sum;
};

// Return a list in words: "3", "0, 1 and 2".
inline std::string list_of_ranks(const std::vector<int>& ranks) {
    std::vector<std::string> words;
    for (int rank : ranks)
        words.push_back(std::to_string(rank));
    return words_with_and(words);
}

// Name the ranks that disagree with the majority of those that keep the same elements.
inline std::string minority_text(const std::vector<ShownSum>& shown) {
    typedef std::tuple<int64_t, int64_t, int64_t> Elements;
    std::map<Elements, std::map<int64_t, std::vector<int>>> ranks_by_sum;
    for (size_t r = 0; r < shown.size(); r++) {
        const ShownSum& s = shown[r];
        if (s.count)
            ranks_by_sum[{s.piece, s.first, s.count}][s.sum].push_back(int(r));
    }

    // Report the first range that has two sums.
    for (auto& [elements, by_sum] : ranks_by_sum) {
        if (by_sum.size() == 1) continue;
        size_t all = 0;
        std::vector<int> most, others;
        for (auto& [sum, ranks] : by_sum) {
            all += ranks.size();
            if (ranks.size() > most.size())
                most = ranks;
        }

        // Collect the ranks that disagree with the most frequent sum.
        for (auto& [sum, ranks] : by_sum)
            if (ranks != most)
                others.insert(others.end(), ranks.begin(), ranks.end());
        std::ranges::sort(others);
        if (2 * most.size() > all)
            return concat("rank ", list_of_ranks(others), " has other values than ranks ",
                          list_of_ranks(most));

        // Without a majority, nobody can say which rank is wrong.
        others.insert(others.end(), most.begin(), most.end());
        std::ranges::sort(others);
        return concat("ranks ", list_of_ranks(others), " have different values");
    }
    return "";
}

// Name the first weight, master or moment that differs between ranks that should keep the same, and
// those ranks; return "" if there is none. All ranks must call, and get the same answer.
template <typename T, typename S>
std::string replicas_differ(const Trainer<T, S>& t) {
    const Comm& world = t.comms.world;
    if (world.size == 1) return "";

    // Find what other ranks keep too. Nothing else has to be read: under ZeRO-3 that may be all.
    std::vector<StateTensor> list = copied_data(t);
    std::vector<char> repeated(list.size());
    for_each_repeat(t, [&](const Comm& c, auto same) {
        for (size_t i = 0; i < list.size(); i++)
            repeated[i] |= c.size > 1 && same(list[i]);
    });

    // Sum what this rank keeps of that, and compare over each group of ranks.
    std::vector<SumRange> ranges;
    std::vector<int64_t> sums;
    for (size_t i = 0; i < list.size(); i++) {
        const StateTensor& x = list[i];
        sums.push_back(repeated[i] ? int64_t(kept_sum(t, x.data, *x.p)) : 0);
        ranges.push_back({sums.back(), ~sums.back()});
    }
    for_each_repeat(t, [&](const Comm& c, auto same) {
        widen_over(c, list, ranges, same);
    });

    // Find the first datum that differs on any rank.
    int64_t n = int64_t(ranges.size()), left = 0;
    for (int64_t i = n - 1; i >= 0; i--)
        if (!ranges[size_t(i)].one())
            left = n - i;
    all_reduce_max(world, &left, 1, Cpu{});
    if (!left) return "";

    // Let every rank show its sum of that datum.
    size_t i = size_t(n - left);
    const Parameter& p = *list[i].p;
    KeptRange range = kept_range(t, list[i].data, p);
    int pieces = pieces_of(p.shard, t.layout.tp.size);
    int piece = t.layout.tp.rank * pieces / t.layout.tp.size;
    piece += t.layout.tp.size * p.experts.rank;
    ShownSum mine = {piece, int64_t(range.first), int64_t(range.count), sums[i]};
    std::vector<ShownSum> shown(size_t(world.size));
    all_gather(world, &shown[0].piece, &mine.piece, 4, Cpu{});
    return list[i].name + ": " + minority_text(shown);
}

} // namespace llmc
