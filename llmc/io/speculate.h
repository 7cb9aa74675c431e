// speculate.h - speculative decoding: a small model guesses, one run judges - arXiv:2211.17192
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
//   To copy: this file.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace llmc {

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
