// speculate.h - speculative decoding: a small model guesses, one run judges - arXiv:2211.17192
//   1. draft   the small model continues a text by up to n tokens, each x_i drawn from its own q_i
//   2. read    one run of the model reads them all behind the text, and has p_1 .. p_n+1
//   3. judge   x_i stays with probability min(1, p_i(x_i) / q_i(x_i)); the first that does not is
//              drawn again from max(0, p_i - q_i), and those behind it are forgotten
//   4. where all stay, one token more is drawn from p_n+1
//   A token x has probability q min(1, p / q) where it stays, and max(0, p - q) where it is drawn
//   again: together p(x). So texts have the model's own distribution whatever the small one says,
//   which only decides how many runs they take; the rule is also in arXiv:2302.01318. Temperature,
//   top-k and top-p make p and q what they are: greedy texts are the model's own.
//   Position i of a text has its own three numbers: to guess, to judge, to draw. So a text depends
//   on n and on both models, and on nothing else in the batch.
//   To copy: this file.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace llmc {

// A small model beside the model, seen without its type.
struct Draft {
    size_t tokens = 0; // that it guesses ahead, at most
    // Read tokens (B,n), sequence b from position past[b] on, in slot first_slot + b. Returns the
    // logits (B,V) behind each one's last token.
    std::function<const float*(const int* tokens, size_t B, size_t n, const size_t* past,
                               size_t first_slot)>
        read = nullptr;
    // Copy the keys and values of a slot's first n positions to another slot.
    std::function<void(size_t from, size_t to, size_t n)> copy_slot = nullptr;

    // So far: the model's runs, counted in each text; guesses, and those that stayed.
    size_t steps = 0, guesses = 0, stayed = 0;
};

// Streams of a text's numbers beside the one that draws.
constexpr uint64_t GUESS_STREAM = 0x6775657373, JUDGE_STREAM = 0x6a75646765;

// Draw from a distribution (V) by a number in [0,1). Shares need not add up to 1.
inline int draw_share(const std::vector<double>& shares, double uniform) {
    double left = 0;
    for (double p : shares) left += p;
    left *= uniform;

    // Rounding may leave a little over: then it is the last that can be drawn.
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

// The distribution to draw from where a guess goes, up to its sum: the model's share of a token
// beyond the draft's.
inline std::vector<double> rest_shares(const std::vector<double>& p,
                                       const std::vector<double>& q) { // (V)
    std::vector<double> rest(p.size());
    for (size_t v = 0; v < p.size(); v++)
        rest[v] = std::max(0.0, p[v] - q[v]);
    return rest;
}

} // namespace llmc
