// expert_loads.h - how evenly tokens choose their experts: loads and MaxVio - arXiv:2408.15664
//   A forward pass in training adds the slots that chose each expert of its block (moe.cuh) to
//   LOADS, (L,E) integers of a step. After it the ranks that see other tokens add theirs up. With a
//   capacity a second table counts those of the slots that were dropped (expert_capacity.cuh).
//   MaxVio of a block = the largest load / the mean load - 1: 0 is even, E/K - 1 is one choice for
//   all. The least load / the mean is 0 where nobody chooses an expert, which then learns nothing.
#pragma once
#include <numeric>
#include "trainer.h"

namespace llmc {

// LOADS of a block's experts, (E), this rank's tokens alone; null: this plan counts none.
template <typename T, typename S>
int* expert_loads(const Trainer<T, S>& t, int layer) {
    int* loads = address<int>(t, {Kind::LOADS}); // (L,E)
    size_t block = size_t(layer - 1);
    return loads ? loads + block * t.model.shape.E : nullptr;
}

// The worst MaxVio of all blocks with experts, -1 where there are none, and the least load / mean.
struct ExpertBalance {
    double max_vio = -1, least = 0;
};

// loads (L,E), of all ranks.
inline ExpertBalance expert_balance(const std::vector<int64_t>& loads, size_t E) {
    ExpertBalance all;
    for (size_t first = 0; first < loads.size(); first += E) {
        auto block = loads.begin() + ptrdiff_t(first), end = block + ptrdiff_t(E);
        double mean = double(std::accumulate(block, end, int64_t(0))) / double(E);
        if (mean == 0) continue; // its ffn is dense
        double least = double(*std::min_element(block, end)) / mean;
        all.least = all.max_vio < 0 ? least : std::min(all.least, least);
        all.max_vio = std::max(all.max_vio, double(*std::max_element(block, end)) / mean - 1);
    }
    return all;
}

// One of the tables in LOADS, of all ranks. All ranks call this, and hear the same.
template <typename T, typename S>
std::vector<int64_t> sum_of_loads(const Trainer<T, S>& t, size_t table) { // (L,E)
    // The host has waited for the step already: this copy is short.
    std::vector<int> mine(t.model.shape.L * t.model.shape.E);
    const int* from = expert_loads(t, 1) + table * mine.size();
    copy_out(mine.data(), from, mine.size() * sizeof(int), t.ctx.where);

    // Other tokens stand on other ranks, other blocks on other stages.
    std::vector<int64_t> loads(mine.begin(), mine.end());
    all_reduce_sum(t.comms.samples, loads.data(), loads.size(), Cpu{});
    all_reduce_sum(t.comms.pp, loads.data(), loads.size(), Cpu{});
    return loads;
}

// The loads (L,E) of the step that is over; none where a model has no experts.
template <typename T, typename S>
std::vector<int64_t> step_loads(const Trainer<T, S>& t) {
    if (!counts_loads(t.plans[t.plan], t.model)) return {};
    return sum_of_loads(t, 0);
}

// The share of the step's slots that were dropped, -1 without a capacity. `loads` are the step's.
template <typename T, typename S>
double dropped_share(const Trainer<T, S>& t, const std::vector<int64_t>& loads) {
    if (loads.empty() || t.model.shape.capacity.factor == 0) return -1;
    std::vector<int64_t> dropped = sum_of_loads(t, 1);
    auto total = [](const auto& table) {
        return double(std::accumulate(table.begin(), table.end(), int64_t(0)));
    };
    return total(dropped) / total(loads);
}

} // namespace llmc
