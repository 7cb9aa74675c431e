// sampler.h - the next token: drawn, or guessed and judged - arXiv:1904.09751, arXiv:2211.17192
//   A row of logits, temperature, top-k and top-p give a distribution, from which a token is drawn:
//   1. p = softmax(logits / temperature); temperature 0 is greedy: the lowest index among equals
//   2. keep the top_k likeliest tokens; 0 keeps all
//   3. among them keep the fewest whose share reaches top_p; 1 keeps all
//   4. draw one of the tokens that are kept
//   logits (V)   `uniform` in [0,1) decides the draw: equal numbers give equal tokens
//   token_shares() does 1 to 3 alone: it returns the distribution from which 4 draws.
//   Cost: a few passes over V, and a sort of what top_k keeps, or of what top_p might keep.
//   At the end: speculative decoding, in which a small model guesses and one run judges.
//   To copy: this file.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
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
        std::ranges::sort(order, likelier);
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

// ----------------------------------------------------------------------------
// speculative decoding: a small model guesses, one run judges - arXiv:2211.17192
//   1. draft   the small model continues a text by up to n tokens, each x_i drawn from its own q_i
//   2. read    one run of the model reads all of them after the text, which gives p_1 .. p_n+1
//   3. judge   x_i stays with probability min(1, p_i(x_i) / q_i(x_i)). The first that does not stay
//              is drawn again from max(0, p_i - q_i), and all later ones are dropped
//   4. if all stay, one more token is drawn from p_n+1
//   A token x appears with probability q min(1, p / q) because it stays, and max(0, p - q) because
//   it is drawn again: together p(x). So texts have the model's own distribution whatever the small
//   model guesses; good guesses only save runs. The rule is also in arXiv:2302.01318. Temperature,
//   top-k and top-p are part of p and q: greedy texts are the model's own.
//   Each position of a text has three random numbers: to guess, to judge, to draw. So a text
//   depends on n and on both models, but on nothing else in the batch.

// A small model beside the main one, behind functions that hide its type.
struct Draft {
    size_t tokens = 0; // most tokens that it guesses ahead
    // Read tokens (B,n): sequence b from position past[b] on, in slot first_slot + b. Returns the
    // logits (B,V) after the last token of each.
    std::function<const float*(const int* tokens, size_t B, size_t n, const size_t* past,
                               size_t first_slot)>
        read = nullptr;
    // Copy the keys and values of a slot's first n positions to another slot.
    std::function<void(size_t from, size_t to, size_t n)> copy_slot = nullptr;

    // Counts so far: the model's runs, summed over texts; guesses; guesses that stayed.
    size_t steps = 0, guesses = 0, stayed = 0;
};

// Added to a text's stream: separate random numbers to guess and to judge.
constexpr uint64_t GUESS_STREAM = 0x6775657373, JUDGE_STREAM = 0x6a75646765;

// Draw from a distribution (V) by a number in [0,1). The shares need not add up to 1.
inline int draw_share(const std::vector<double>& shares, double uniform) {
    double left = 0;
    for (double p : shares) left += p;
    left *= uniform;

    // Rounding may leave a little over: then return the last token that can be drawn.
    int last = 0;
    for (size_t v = 0; v < shares.size(); v++) {
        if (shares[v] <= 0)
            continue;
        last = int(v);
        left -= shares[v];
        if (left < 0) break;
    }
    return last;
}

// The probability that guess x stays.
inline double stay_share(const std::vector<double>& p, const std::vector<double>& q, int x) {
    size_t v = size_t(x);
    return p[v] >= q[v] ? 1 : p[v] / q[v];
}

// The distribution to draw from when a guess is dropped, not normalised: what the model's share of
// a token has beyond the draft's.
inline std::vector<double> rest_shares(const std::vector<double>& p,
                                       const std::vector<double>& q) { // (V)
    std::vector<double> rest(p.size());
    for (size_t v = 0; v < p.size(); v++)
        rest[v] = std::max(0.0, p[v] - q[v]);
    return rest;
}

} // namespace llmc
