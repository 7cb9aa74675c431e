// sampler.h - the next token from a row of logits: temperature, top-k, top-p - arXiv:1904.09751
//   1. p = softmax(logits / temperature); temperature 0 is greedy: the lowest index among equals
//   2. keep the top_k likeliest tokens; 0 keeps all
//   3. among them keep the fewest whose share reaches top_p; 1 keeps all
//   4. draw one of the tokens that are kept
//   logits (V)   `uniform` in [0,1) decides the draw: equal numbers give equal tokens
//   token_shares() does 1 to 3 alone: it returns the distribution from which 4 draws.
//   Cost: a few passes over V, and a sort of what top_k keeps, or of what top_p might keep.
//   To copy: this file.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

namespace llmc {

// Leave in `order` the tokens that may be drawn, with their probabilities times a common factor.
// Returns the sum of these.
inline double keep_tokens(const float* logits, size_t V, float temperature, int top_k, float top_p,
                          std::vector<std::pair<float, int>>& order) {
    // 1. Compute the probabilities of all tokens.
    if (temperature <= 0 || top_k == 1) {
        order = {{1.0f, int(std::max_element(logits, logits + V) - logits)}};
        return 1;
    }
    float most = *std::max_element(logits, logits + V);
    order.resize(V);
    for (size_t v = 0; v < V; v++)
        order[v] = {std::exp((logits[v] - most) / temperature), int(v)};

    // 2. Keep the top_k likeliest tokens, the lower ones among equals.
    auto likelier = [](auto a, auto b) {
        return a.first != b.first ? a.first > b.first : a.second < b.second;
    };
    if (top_k > 0 && size_t(top_k) < V) {
        std::nth_element(order.begin(), order.begin() + top_k, order.end(), likelier);
        order.resize(top_k);
    }
    double sum = 0;
    for (auto& [p, token] : order) sum += p;

    // 3. Keep the first tokens whose share of the sum reaches top_p, at least one. All tokens below
    // `least` together hold less than the share that may go: remove them before the sort.
    double least = (1 - double(top_p)) * sum / double(order.size());
    if (top_p < 1)
        std::erase_if(order, [&](const auto& x) { return x.first < least; });
    if (top_k > 0 || top_p < 1)
        std::sort(order.begin(), order.end(), likelier);
    if (top_p < 1) {
        double share = 0;
        size_t n = 0;
        while (n < order.size() && share < double(top_p) * sum)
            share += order[n++].first;
        order.resize(std::max(n, size_t(1)));
        sum = share;
    }
    return sum;
}

// Draw a token. `order` is room for (probability, token) pairs, kept from call to call.
inline int sample_token(const float* logits, size_t V, float temperature, int top_k, float top_p,
                        double uniform, std::vector<std::pair<float, int>>& order) {
    double sum = keep_tokens(logits, V, temperature, top_k, top_p, order);

    // 4. Walk over the kept tokens until their probabilities reach the drawn share.
    double left = uniform * sum;
    for (auto& [p, token] : order) {
        left -= p;
        if (left < 0) return token;
    }
    return order.back().second; // rounding left a little over
}

// The probability of every token, as sample_token() draws it.
inline std::vector<double> token_shares(const float* logits, size_t V, float temperature,
                                        int top_k, float top_p,
                                        std::vector<std::pair<float, int>>& order) { // (V)
    double sum = keep_tokens(logits, V, temperature, top_k, top_p, order);
    std::vector<double> shares(V);
    for (auto& [p, token] : order)
        shares[size_t(token)] = double(p) / sum;
    return shares;
}

} // namespace llmc
