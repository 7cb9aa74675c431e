// sampler.h - the next token from a row of logits: greedy, temperature, top-k, top-p - arXiv:1904.09751
//   p = softmax(logits / temperature); keep the k likeliest; of those the fewest whose share
//   reaches top_p; draw.
//   temperature 0 is greedy (the lowest index of equals); top_k 0 and top_p 1 keep all.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

// `uniform` in [0,1) decides; `order` is room for (probability, token) pairs.
inline int sample_token(const float* logits, size_t V, float temperature, int top_k, float top_p,
                        double uniform, std::vector<std::pair<float, int>>& order) {
    if (temperature <= 0 || top_k == 1) return int(std::max_element(logits, logits + V) - logits);
    float most = *std::max_element(logits, logits + V);
    order.resize(V);
    double sum = 0;
    for (size_t v = 0; v < V; v++) order[v] = {std::exp((logits[v] - most) / temperature), int(v)};
    if (top_k > 0 || top_p < 1) // likeliest first, lower tokens first among equals
        std::sort(order.begin(), order.end(), [](auto a, auto b) {
            return a.first != b.first ? a.first > b.first : a.second < b.second;
        });
    if (top_k > 0 && size_t(top_k) < V) order.resize(size_t(top_k));
    for (auto& [p, token] : order) sum += p;
    if (top_p < 1) {
        double share = 0;
        size_t n = 0;
        while (n < order.size() && share < double(top_p) * sum) share += order[n++].first;
        order.resize(std::max(n, size_t(1)));
        sum = share;
    }
    double left = uniform * sum;
    for (auto& [p, token] : order)
        if ((left -= p) < 0) return token;
    return order.back().second;
}
