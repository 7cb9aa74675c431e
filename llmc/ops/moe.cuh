// moe.cuh - mixture of experts: router, sort, gather, gate, combine - arXiv:1701.06538
//   scores   s = exp(logits - max), or sigmoid(logits)          each token, over E experts
//   choice   the K largest of logits, or of sigmoid + bias; ties go to the lower expert. With
//            groups, only the experts of the best groups; a group's value is that of its best
//            expert, or for sigmoids the sum of its two best (arXiv:2405.04434, arXiv:2412.19437)
//   gates    g = scale s / S     S is the sum of s: for SOFTMAX over all experts, for RENORMALISED
//            and SIGMOID over those chosen (arXiv:2401.04088, arXiv:2412.19437); for SIGMOID_ALONE
//            S = 1
//   slots    slot n K + j is token n's j-th expert, in ascending order of experts. A stable
//            counting sort gives each slot its row: the rows of an expert are adjacent, in order of
//            tokens. A rank that has only some of the experts sorts the other experts' slots behind
//            its own, and gives them no row
//   lists    tokens by the ranks that have their experts. The rows of a list are packed and put
//            back as slots are, with K = 1
//   experts  h = g silu(gate) up: the gate multiplies before the last product, so that the results
//            y of a token's slots just add up:   out = residual + sum over j of y[row_of[n,j]]
//            gpt-oss has x sigmoid(alpha x) for silu, clamps gate above and up on both sides, and
//            adds 1 to up (arXiv:2508.10925). A clamped number has no gradient
//   Gradients, with q = s / S, G = dL/dg, and for sigmoids a factor 1 - s:
//     dlogits = scale q (G - sum q G)             all experts, or those chosen; SIGMOID_ALONE: q G
//     + balance s' (f - sum s' f)                 s' = s / sum of all s, f = E count / (K T)
//     + z lse p                                   lse = log sum exp(logits), p = softmax
//   The balance terms belong to a sequence (arXiv:2412.19437, eq. 17), so they depend on neither
//   micro-batches nor the layout. count: slots of a sequence that chose the expert, a constant.
//   logits (N,E), gates, dgates (N,K) acc   ids, row_of (N,K) ints   slot_of (N K)   counts (E)
//   starts (E+1)   x, out, residual (N,C)   xs, y (rows,C)   gate, up, h (rows,F)   M: all slots
//   rows: 1 int on the device: N K, or the number of slots of this rank's experts, or of a list
//   Contract: everything =; dgate may be dh, dup may be up.  Bitwise repeatable: atomics count
//             slots, the sort is in integers, sums over slots are in ascending order of experts, in
//             acc, and rounded once.
//   Cost: memory-bound. The sort reads ids twice, a warp for each 1024 slots.
//   To copy: this file, fast_math.h, rows.cuh, types.h and cuda_common.h.
#pragma once
#include <algorithm>
#include <climits>
#include <numeric>
#include <vector>
#include "cuda_common.h"
#include "fast_math.h"
#include "rows.cuh"
#include "types.h"

namespace llmc {

// How scores are computed, and which of them a gate is divided by. SIGMOID_ALONE divides by none:
// gates of shared experts, and DeepSeek-V3 without norm_topk_prob. No flag names it.
enum class Router : uint8_t { SOFTMAX, RENORMALISED, SIGMOID, SIGMOID_ALONE };

// Whether scores are sigmoids.
LLMC_HD inline bool is_sigmoid(Router r) {
    return r == Router::SIGMOID || r == Router::SIGMOID_ALONE;
}

// How a token chooses K of E experts. K is limited because a warp has a lane for each choice.
struct Routing {
    Router router;
    size_t E, K;
    float scale = 1;             // multiplies all gates
    const float* bias = nullptr; // (E) added to sigmoids, for the choice alone; or null
    size_t groups = 1;           // equal groups of adjacent experts
    size_t kept_groups = 1;      // groups that a token may choose from
};
constexpr size_t MOST_CHOICES = 32;
constexpr size_t MOST_GROUPS = 32;

// The factors of the balance terms' gradients. balance: alpha / (sequences T), z: 2 beta /
// (sequences T), over all sequences of the global batch; alpha is --balance, beta is --z-loss. 0
// leaves a term out.
struct BalanceTerms {
    double balance = 0, z = 0;
    const int* counts = nullptr; // (B,E) slots of each sequence that chose an expert
    size_t T = 1;                // tokens in a sequence
    const float* loss_scale = nullptr; // multiplies both, as it does the loss; or null
    size_t ranks = 1;            // context-parallel ranks: each has T / ranks rows of a sequence
    size_t first = 0;            // where the rows begin within those sequences
};

// The sort's result: the row of each slot.
struct Slots {
    int* counts;  // (E)
    int* starts;  // (E+1) the first row of each expert; at the end N K
    int* row_of;  // (N,K)
    int* slot_of; // (N K) the slot of each row
};

// The slot of a row. With a null slot_of, row i is slot i.
LLMC_HD inline size_t slot_at(const int* slot_of, size_t row) {
    return slot_of ? size_t(slot_of[row]) : row;
}

// The number of rows that exist: *rows, or all M if it is null.
LLMC_HD inline size_t row_count(const int* rows, size_t M) {
    return rows ? size_t(*rows) : M;
}

// For each rank, the tokens that chose one of its experts: rank r has experts [r experts,
// (r+1) experts). List r is that of rank r; with `only`, that of rank r's tokens for rank `only`.
struct TokenLists {
    size_t lists, N, K, experts;
    size_t stride; // choices between the tokens of two lists; 0: all lists are of the same tokens
    int only = -1; // -1: each list has a rank of its own

    // Whether list r has token n. A choice that was dropped lies on no rank.
    LLMC_HD bool has(const int* ids, size_t r, size_t n) const {
        size_t rank = only < 0 ? r : size_t(only);
        const int* chosen = ids + r * stride + n * K;
        bool found = false;
        for (size_t j = 0; j < K; j++)
            found |= size_t(chosen[j]) / experts == rank;
        return found;
    }
};

// The activation of an expert's gate, and what it multiplies. The defaults are SwiGLU's.
struct ExpertGate {
    double alpha = 1;        // x sigmoid(alpha x)
    double limit = INFINITY; // gate is at most this, up between this and its negative
    double plus = 0;         // added to up
};

// One element of gate and up, clamped. NaN stays NaN.
template <typename A> struct ClampedGate {
    A x;      // the gate
    A u;      // up, with what is added to it
    A scaled; // alpha x

    // A number that the clamp has moved has no gradient.
    bool x_moved;
    bool u_moved;
};
template <typename A>
LLMC_HD inline ClampedGate<A> clamped_gate(A gate, A up, const ExpertGate& kind) {
    A limit = A(kind.limit);
    bool low = up < -limit;
    bool high = up > limit;
    bool top = gate > limit;

    // Without a limit both stay as they are.
    A x = top ? limit : gate;
    A u = up;
    if (low) u = -limit;
    if (high) u = limit;

    // Add to up, and take the sigmoid's argument.
    u += A(kind.plus);
    A scaled = A(kind.alpha) * x;
    return {x, u, scaled, top, low || high};
}

// h / g, and what the gradients of gate and up multiply dh g by. s: the sigmoid of c.scaled.
template <typename A> struct GatedAt {
    A value, gate_slope, up_slope;
};
template <typename A>
LLMC_HD inline GatedAt<A> gated_at(const ClampedGate<A>& c, A s) {
    // The activation and its slope.
    A value = c.x * s;
    A slope = s * (1 + c.scaled * (1 - s));
    A to_gate = c.x_moved ? A(0) : c.u * slope;
    A to_up = c.u_moved ? A(0) : value;
    return {value * c.u, to_gate, to_up};
}

// A score before it is divided by any sum. max: the largest of the row's logits.
template <typename A>
LLMC_HD A route_score(A logit, A max, Router router) {
    return is_sigmoid(router) ? 1 / (1 + std::exp(-logit)) : std::exp(logit - max);
}

// The value by which experts are chosen. A NaN loses, so that ids stay within the table; the loss
// shows it anyway.
template <typename A>
LLMC_HD A route_value(A logit, size_t e, const Routing& r) {
    A v = logit;
    if (is_sigmoid(r.router))
        v = route_score(logit, A(0), r.router);
    if (r.bias) v += A(r.bias[e]);
    return v == v ? v : -A(INFINITY);
}

// The value by which groups are chosen: that of the best expert, or for sigmoids of the two best.
template <typename A>
LLMC_HD A group_value(const A* logits, size_t g, const Routing& r) { // (E)
    A first = -A(INFINITY);
    A second = -A(INFINITY);

    // All groups have the same number of experts.
    size_t each = r.E / r.groups;
    for (size_t e = g * each; e < (g + 1) * each; e++) {
        // Keep the two best values so far.
        A v = route_value(logits[e], e, r);
        second = v > first ? first : v > second ? v : second;
        first = v > first ? v : first;
    }
    return is_sigmoid(r.router) ? first + second : first;
}

// Whether the group of expert e is kept. `kept` has a bit for each group.
LLMC_HD inline bool may_choose(unsigned kept, size_t e, const Routing& r) {
    return kept >> (e / (r.E / r.groups)) & 1;
}

// A candidate. The candidates of a row are totally ordered: larger values first, then lower ids.
template <typename A> struct ExpertChoice {
    A value;
    int id;
    LLMC_HD bool before(const ExpertChoice& other) const {
        return value > other.value || (value == other.value && id < other.id);
    }
};

// The sums of a row that its gradients share.
template <typename A> struct RouteSums {
    A max;           // of the logits
    A exps = 0;      // sum of exp(logits - max)
    A all = 0;       // sum of scores
    A chosen = 0;    // S: see the header
    A gradients = 0; // sum of q G
    A balances = 0;  // sum of s' f
};

// f of an expert in the sequence of row n: 1 if all experts have equally many slots.
template <typename A>
LLMC_HD A expert_share(const BalanceTerms& b, const Routing& r, size_t n, size_t e) {
    size_t sequence = (b.first + n) / (b.T / b.ranks);
    A count = A(b.counts[sequence * r.E + e]);
    return A(r.E) * count / (A(r.K) * A(b.T));
}

// dlogits of one expert. G is the gradient of its gate, 0 if it was not chosen.
template <typename A>
LLMC_HD A route_gradient(const RouteSums<A>& sums, const Routing& r, const BalanceTerms& b, A logit,
                         A G, bool chosen, size_t n, size_t e) {
    A s = route_score(logit, sums.max, r.router);
    A slope = is_sigmoid(r.router) ? 1 - s : A(1);
    A more = b.loss_scale ? A(*b.loss_scale) : A(1);

    // Add the gate's part. A softmax over all experts also moves those that were not chosen.
    A d = 0;
    if (chosen || r.router == Router::SOFTMAX) {
        A q = s / sums.chosen;
        d = A(r.scale) * q * (G - sums.gradients) * slope;
    }

    // Add the balance within the sequence, and the z term, which keeps logits small.
    if (b.balance != 0) {
        A share = expert_share<A>(b, r, n, e);
        d += more * A(b.balance) * s / sums.all * (share - sums.balances) * slope;
    }
    if (b.z != 0) {
        A lse = sums.max + std::log(sums.exps);
        d += more * A(b.z) * lse * std::exp(logit - sums.max) / sums.exps;
    }
    return d;
}

// ----------------------------------------------------------------------------
// CPU

// The sums of a row over its experts. ids (K) are those chosen.
template <typename A>
RouteSums<A> route_sums(const A* logits, const int* ids, const Routing& r) { // (E)
    // Exponents are differences to the maximum, so that none overflows.
    RouteSums<A> x;
    x.max = *std::max_element(logits, logits + r.E);
    for (size_t e = 0; e < r.E; e++) {
        x.exps += std::exp(logits[e] - x.max);
        x.all += route_score(logits[e], x.max, r.router);
    }

    // Sum the chosen scores into S. The sum of sigmoids may be 0 in float, so add a little before
    // dividing by it.
    for (size_t j = 0; j < r.K; j++)
        x.chosen += route_score(logits[ids[j]], x.max, r.router);
    if (r.router == Router::SOFTMAX) x.chosen = x.all;
    if (r.router == Router::SIGMOID) x.chosen += A(1e-20);
    if (r.router == Router::SIGMOID_ALONE) x.chosen = 1;
    return x;
}

// The groups that a token may choose from, as bits. Ties go to the lower group.
template <typename A>
unsigned kept_groups(const A* logits, const Routing& r) { // (E)
    if (r.groups == 1) return 1;
    std::vector<ExpertChoice<A>> all;
    for (size_t g = 0; g < r.groups; g++)
        all.push_back({group_value(logits, g, r), int(g)});

    // Keep the best groups.
    auto before = [](const auto& a, const auto& b) { return a.before(b); };
    std::sort(all.begin(), all.end(), before);
    unsigned kept = 0;
    for (size_t g = 0; g < r.kept_groups; g++)
        kept |= 1u << all[g].id;
    return kept;
}

// Choose experts. ids are in ascending order, with their gates.
template <typename A>
void route_forward(int* ids, A* gates, const A* logits, const Routing& r, // (N,K) (N,K) (N,E)
                   size_t N, Cpu) {
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const A* l = logits + n * r.E;
        int* chosen = ids + n * r.K;

        // Each choice is the best candidate after the choice before it.
        unsigned kept = kept_groups(l, r);
        ExpertChoice<A> last = {A(INFINITY), -1};
        for (size_t j = 0; j < r.K; j++) {
            ExpertChoice<A> best = {-A(INFINITY), INT_MAX};
            for (size_t e = 0; e < r.E; e++) {
                if (!may_choose(kept, e, r)) continue;
                ExpertChoice<A> c = {route_value(l[e], e, r), int(e)};
                if (last.before(c) && c.before(best)) best = c;
            }
            chosen[j] = best.id;
            last = best;
        }
        std::sort(chosen, chosen + r.K);

        // Compute their gates.
        RouteSums<A> sums = route_sums(l, chosen, r);
        for (size_t j = 0; j < r.K; j++) {
            A logit = l[chosen[j]];
            A s = route_score(logit, sums.max, r.router);
            gates[n * r.K + j] = A(r.scale) * s / sums.chosen;
        }
    }
}

// dlogits, from the gradients of the gates and the balance terms.
template <typename T>
void route_backward(T* dlogits, const acc_t<T>* dgates, const acc_t<T>* logits, // (N,E) (N,K) (N,E)
                    const int* ids, const Routing& r, const BalanceTerms& b,    // (N,K)
                    size_t N, Cpu) {
    typedef acc_t<T> A;
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const A* l = logits + n * r.E;
        const A* G = dgates + n * r.K;
        const int* chosen = ids + n * r.K;

        // Compute the sums over the row.
        RouteSums<A> sums = route_sums(l, chosen, r);
        bool shares = r.router != Router::SIGMOID_ALONE;
        for (size_t j = 0; j < r.K && shares; j++)
            sums.gradients += route_score(l[chosen[j]], sums.max, r.router) / sums.chosen * G[j];
        for (size_t e = 0; e < r.E && b.balance != 0; e++) {
            A s = route_score(l[e], sums.max, r.router);
            sums.balances += s / sums.all * expert_share<A>(b, r, n, e);
        }

        // Walk the experts. The chosen ids are in ascending order, so one index suffices.
        size_t j = 0;
        for (size_t e = 0; e < r.E; e++) {
            bool is_chosen = j < r.K && chosen[j] == int(e);
            A g = is_chosen ? G[j++] : A(0);
            A d = route_gradient(sums, r, b, l[e], g, is_chosen, n, e);
            dlogits[n * r.E + e] = from_acc<T>(d);
        }
    }
}

// Count, for each of `groups` groups of `length` ids, the slots that chose an expert: = or +=.
inline void count_slots(int* counts, const int* ids, size_t groups, // (groups,E) (groups,length)
                        size_t length, size_t E, bool accumulate, Cpu) {
    if (!accumulate)
        std::fill_n(counts, groups * E, 0);
    for (size_t i = 0; i < groups * length; i++) {
        size_t group = i / length;
        counts[group * E + size_t(ids[i])]++;
    }
}

// Number the experts [first, first + E) from 0; all other experts become E.
inline void own_experts(int* own, const int* ids, size_t M, size_t first, size_t E, Cpu) { // (M)
    for (size_t i = 0; i < M; i++) {
        // An expert below `first` wraps around to a large number.
        size_t e = size_t(ids[i]) - first;
        own[i] = int(std::min(e, E));
    }
}

// List tokens in their order: those of list r lie from tokens[r N] on, and are counts[r].
inline void list_tokens(int* tokens, int* counts, const int* ids, // (lists,N) (lists) (..,N,K)
                        const TokenLists& of, Cpu) {
    for (size_t r = 0; r < of.lists; r++) {
        counts[r] = 0;
        for (size_t n = 0; n < of.N; n++)
            if (of.has(ids, r, n))
                tokens[r * of.N + size_t(counts[r]++)] = int(n);
    }
}

// Sort M slots by expert: a stable counting sort.
inline void sort_slots(const Slots& s, const int* ids, size_t M, size_t E, Cpu where) { // (M)
    // Scan the counts.
    count_slots(s.counts, ids, 1, M, E, false, where);
    s.starts[0] = 0;
    std::partial_sum(s.counts, s.counts + E, s.starts + 1);

    // Place the slots, each in the next row of its expert.
    std::vector<int> next(s.starts, s.starts + E);
    for (size_t i = 0; i < M; i++) {
        int row = next[size_t(ids[i])]++;
        s.row_of[i] = row;
        s.slot_of[row] = int(i);
    }
}

// Move rows between slots and tokens: xs[row] = x[the row's token], or the reverse (TO_TOKENS),
// where a token has one row at most, and those without a row stay as they are.
template <bool TO_TOKENS, typename T>
void move_rows(T* to, const T* from, const int* slot_of, const int* rows, // (M)
               size_t, size_t K, size_t C, Cpu) {
    size_t count = size_t(*rows);
    #pragma omp parallel for
    for (size_t row = 0; row < count; row++) {
        size_t n = size_t(slot_of[row]) / K; // the slot's token
        std::copy_n(from + (TO_TOKENS ? row : n) * C, C, to + (TO_TOKENS ? n : row) * C);
    }
}

// out = residual (null: 0) + the sum of a token's rows. A slot without a row adds nothing.
template <typename T>
void combine_slots(T* out, const T* residual, const T* y, const int* row_of, // (N,C) (N,C) (rows,C)
                   const int* rows, size_t N, size_t K, size_t C, Cpu) {
    typedef acc_t<T> A;
    size_t count = size_t(*rows);
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++)
        for (size_t c = 0; c < C; c++) {
            // A token's slots are in ascending order of experts.
            A sum = residual ? to_acc(residual[n * C + c]) : A(0);
            for (size_t j = 0; j < K; j++) {
                size_t row = size_t(row_of[n * K + j]);
                if (row < count) sum += to_acc(y[row * C + c]);
            }
            out[n * C + c] = from_acc<T>(sum);
        }
}

// h = g silu(gate) up.
template <typename T>
void gated_swiglu_forward(T* h, const T* gate, const T* up, // (rows,F) each
                          const acc_t<T>* gates, const int* slot_of, const int* rows, // (N,K) (M)
                          size_t M, size_t F, Cpu, const ExpertGate& kind = {}) {
    typedef acc_t<T> A;
    size_t count = row_count(rows, M);
    #pragma omp parallel for
    for (size_t row = 0; row < count; row++) {
        A weight = gates[slot_at(slot_of, row)];
        #pragma omp simd
        for (size_t i = row * F; i < (row + 1) * F; i++) {
            // s is the sigmoid, as in swiglu.cuh.
            ClampedGate<A> c = clamped_gate(to_acc(gate[i]), to_acc(up[i]), kind);
            A s = 1 / (1 + fast_exp(-c.scaled));
            h[i] = from_acc<T>(weight * gated_at(c, s).value);
        }
    }
}

// The gradients of gate, up and g. dgates is a sum over each row. A slot without a row gets 0, so
// that the sums of several ranks add up.
template <typename T>
void gated_swiglu_backward(T* dgate, T* dup, acc_t<T>* dgates,      // (rows,F) (rows,F) (N,K)
                           const T* dh, const T* gate, const T* up, // (rows,F) each
                           const acc_t<T>* gates, const int* slot_of, const int* rows, // (N,K) (M)
                           size_t M, size_t F, Cpu, const ExpertGate& kind = {}) {
    typedef acc_t<T> A;
    size_t count = row_count(rows, M);
    #pragma omp parallel for
    for (size_t row = 0; row < M; row++) {
        A weight = gates[slot_at(slot_of, row)];
        A sum = 0;
        size_t end = row < count ? (row + 1) * F : 0;
        for (size_t i = row * F; i < end; i++) {
            // Read all inputs before writing an output that may be one of them.
            A d = to_acc(dh[i]);
            ClampedGate<A> c = clamped_gate(to_acc(gate[i]), to_acc(up[i]), kind);
            A s = 1 / (1 + fast_exp(-c.scaled));
            GatedAt<A> at = gated_at(c, s);

            // The gradient of g sums dh h / g; the other two are multiplied by g.
            sum += d * at.value;
            dgate[i] = from_acc<T>(weight * d * at.gate_slope);
            dup[i] = from_acc<T>(weight * d * at.up_slope);
        }
        dgates[slot_at(slot_of, row)] = sum;
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

constexpr unsigned ROUTE_WARPS = 4;   // tokens in a block
constexpr unsigned SLOT_THREADS = 256;
constexpr unsigned MOST_COUNTED = 8192; // experts: a block counts them in 32 KB
constexpr size_t SORTED_SLOTS = 1024;  // that a warp places, at least

// The first candidate in a warp, returned to every lane.
__device__ inline ExpertChoice<float> warp_first(ExpertChoice<float> x) {
    for (int mask = 16; mask > 0; mask /= 2) {
        // Take the partner's candidate if it comes first. Of two equal ones both keep the same.
        ExpertChoice<float> y;
        y.value = __shfl_xor_sync(ALL_LANES, x.value, mask);
        y.id = __shfl_xor_sync(ALL_LANES, x.id, mask);
        if (y.before(x)) x = y;
    }
    return x;
}

// The sums of a row, for every lane. Lane j < K passes the j-th chosen expert as `id`, others -1.
__device__ inline RouteSums<float> warp_route_sums(const float* logits, int id, const Routing& r) {
    // Find the maximum first, because exponents are differences to it.
    unsigned lane = threadIdx.x % 32;
    RouteSums<float> x;
    x.max = -INFINITY;
    for (size_t e = lane; e < r.E; e += 32)
        x.max = logits[e] > x.max ? logits[e] : x.max;
    x.max = warp_max(x.max);

    // Sum over the experts, and over the choices.
    for (size_t e = lane; e < r.E; e += 32) {
        x.exps += std::exp(logits[e] - x.max);
        x.all += route_score(logits[e], x.max, r.router);
    }
    x.exps = warp_sum(x.exps);
    x.all = warp_sum(x.all);
    x.chosen = warp_sum(id >= 0 ? route_score(logits[id], x.max, r.router) : 0.0f);
    if (r.router == Router::SOFTMAX) x.chosen = x.all;
    if (r.router == Router::SIGMOID) x.chosen += 1e-20f;
    if (r.router == Router::SIGMOID_ALONE) x.chosen = 1;
    return x;
}

// The groups that a token may choose from, as bits, in every lane. Lane g evaluates group g.
__device__ inline unsigned warp_kept_groups(const float* logits, const Routing& r) { // (E)
    // Most routers have one group.
    if (r.groups == 1) return 1;
    unsigned lane = threadIdx.x % 32;
    ExpertChoice<float> mine = {-INFINITY, int(lane)};
    if (lane < r.groups) mine.value = group_value(logits, lane, r);

    // A group is kept if fewer than kept_groups groups come before it.
    unsigned place = 0;
    for (unsigned g = 0; g < unsigned(r.groups); g++) {
        ExpertChoice<float> other = {__shfl_sync(ALL_LANES, mine.value, int(g)), int(g)};
        place += other.before(mine);
    }
    return __ballot_sync(ALL_LANES, lane < r.groups && place < r.kept_groups);
}

// A warp has a token, and lane j keeps its j-th choice.
//   ids, gates (N,K)   logits (N,E)
static __global__ void route_forward_kernel(int* ids, float* gates, const float* logits, Routing r,
                                            size_t N) {
    size_t n = size_t(blockIdx.x) * ROUTE_WARPS + threadIdx.x / 32;
    if (n >= N) return; // all lanes of a warp leave together
    unsigned lane = threadIdx.x % 32;
    const float* l = logits + n * r.E;

    // Each choice is the best candidate after the choice before it.
    unsigned kept = warp_kept_groups(l, r);
    ExpertChoice<float> last = {INFINITY, -1};
    int mine = -1;
    for (size_t j = 0; j < r.K; j++) {
        // Each lane looks at some of the experts, then the warp agrees.
        ExpertChoice<float> best = {-INFINITY, INT_MAX};
        for (size_t e = lane; e < r.E; e += 32) {
            if (!may_choose(kept, e, r)) continue;
            ExpertChoice<float> c = {route_value(l[e], e, r), int(e)};
            if (last.before(c) && c.before(best)) best = c;
        }
        last = warp_first(best);
        if (lane == j) mine = last.id;
    }

    // Find the place of a choice: the number of lower experts among the choices.
    RouteSums<float> sums = warp_route_sums(l, mine, r);
    size_t place = 0;
    for (size_t j = 0; j < r.K; j++) {
        int other = __shfl_sync(ALL_LANES, mine, int(j));
        place += other < mine;
    }

    // Lanes without a choice only took part in the shuffles.
    if (lane >= r.K) return;
    float s = route_score(l[mine], sums.max, r.router);
    ids[n * r.K + place] = mine;
    gates[n * r.K + place] = r.scale * s / sums.chosen;
}

// A warp has a token, and its lanes share out the experts.
template <typename T>
__global__ void route_backward_kernel(T* dlogits, const float* dgates, const float* logits,
                                      const int* ids, Routing r, BalanceTerms b, size_t N) {
    size_t n = size_t(blockIdx.x) * ROUTE_WARPS + threadIdx.x / 32;
    if (n >= N) return; // all lanes of a warp leave together
    unsigned lane = threadIdx.x % 32;
    const float* l = logits + n * r.E;

    // Sum over the choices, one a lane, then over the experts.
    int mine = lane < r.K ? ids[n * r.K + lane] : -1;
    float G = lane < r.K ? dgates[n * r.K + lane] : 0.0f;
    RouteSums<float> sums = warp_route_sums(l, mine, r);

    // A lane without a choice adds 0.
    float q = mine >= 0 ? route_score(l[mine], sums.max, r.router) / sums.chosen : 0.0f;
    sums.gradients = r.router == Router::SIGMOID_ALONE ? 0.0f : warp_sum(q * G);
    float balances = 0;
    for (size_t e = lane; e < r.E && b.balance != 0; e += 32)
        balances += route_score(l[e], sums.max, r.router) / sums.all
                    * expert_share<float>(b, r, n, e);
    sums.balances = warp_sum(balances);

    // Walk the experts. All lanes make the same rounds: each asks the others for the choices.
    for (size_t e0 = 0; e0 < r.E; e0 += 32) {
        size_t e = e0 + lane;
        float g = 0;
        bool chosen = false;
        for (size_t j = 0; j < r.K; j++) {
            int id = __shfl_sync(ALL_LANES, mine, int(j));
            float of_id = __shfl_sync(ALL_LANES, G, int(j));
            if (id != int(e)) continue;
            g = of_id;
            chosen = true;
        }

        // In the last round there may be more lanes than experts.
        if (e >= r.E) continue;
        float d = route_gradient(sums, r, b, l[e], g, chosen, n, e);
        dlogits[n * r.E + e] = from_acc<T>(d);
    }
}

// Call f(slot, its expert) for slots [first, end), as many at a time as the block has threads, in
// order; -1: the thread has no slot.
template <typename F>
__device__ void for_each_slot(const int* ids, size_t first, size_t end, F f) {
    constexpr unsigned AHEAD = 8; // loads of a thread that are under way together
    for (size_t i = first + threadIdx.x; i < end + threadIdx.x; i += AHEAD * blockDim.x) {
        int e[AHEAD];
        for (unsigned j = 0; j < AHEAD; j++)
            e[j] = i + j * blockDim.x < end ? ids[i + j * blockDim.x] : -1;
        for (unsigned j = 0; j < AHEAD; j++)
            f(i + j * blockDim.x, e[j]);
    }
}

// The slots of groups, a block each. The last group also has what is left over. Counts of the first
// group lie in `first`, those of group c in others + c * apart.
struct SlotGroups {
    int *first, *others;
    size_t apart;
    size_t length; // slots of a group
    size_t M;      // all slots

    __device__ int* counts(size_t c) const { return c ? others + c * apart : first; } // (E)
    __device__ size_t end(size_t c) const {
        bool last = c + 1 == gridDim.x;
        return last ? M : (c + 1) * length;
    }
};

// Block c counts the slots of each expert in group c.
static __global__ void count_slots_kernel(SlotGroups x, const int* ids, size_t E, bool accumulate) {
    LLMC_SHARED(int, found, MOST_COUNTED);
    for (size_t e = threadIdx.x; e < E; e += SLOT_THREADS)
        found[e] = 0;
    __syncthreads(); // all are 0
    size_t c = blockIdx.x;
    for_each_slot(ids, c * x.length, x.end(c), [&](size_t, int e) {
        if (e >= 0) atomicAdd(found + e, 1);
    });
    __syncthreads(); // all are counted
    int* sums = x.counts(c);
    for (size_t e = threadIdx.x; e < E; e += SLOT_THREADS)
        sums[e] = accumulate ? sums[e] + found[e] : found[e];
}

// The number of matches in lower threads of the block; `all` gets those of the whole block.
//   of_warp (SLOT_THREADS / 32): shared
__device__ inline int rank_of_match(bool match, int* of_warp, int* all) {
    // Each warp counts its matches by a ballot.
    unsigned lane = threadIdx.x % 32;
    unsigned warp = threadIdx.x / 32;
    unsigned lanes = __ballot_sync(ALL_LANES, match);
    if (lane == 0) of_warp[warp] = __popc(lanes);
    __syncthreads(); // all warps have written

    // Matches in lower lanes and lower warps come first.
    int rank = __popc(lanes & ((1u << lane) - 1));
    *all = 0;
    for (unsigned w = 0; w < SLOT_THREADS / 32; w++) {
        if (w < warp) rank += of_warp[w];
        *all += of_warp[w];
    }
    __syncthreads(); // all have read: the next call may write
    return rank;
}

// The sum over this lane and all lower ones.
__device__ inline int warp_prefix(int x) {
    for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_up_sync(ALL_LANES, x, d);
        if (int(threadIdx.x % 32) >= d) x += other;
    }
    return x;
}

// Warp e replaces its expert's counts in all groups but the first by those of the groups before.
static __global__ void scan_slots_kernel(SlotGroups x, size_t groups) {
    int before = x.first[blockIdx.x];
    for (size_t c0 = 1; c0 < groups; c0 += 32) {
        size_t c = c0 + threadIdx.x;
        int count = c < groups ? x.counts(c)[blockIdx.x] : 0;
        int sum = warp_prefix(count);
        if (c < groups) x.counts(c)[blockIdx.x] = before + sum - count;
        before += __shfl_sync(ALL_LANES, sum, 31);
    }
    if (threadIdx.x == 0) x.first[blockIdx.x] = before; // all groups
}

// Warp c places the slots of group c in order.
static __global__ void place_slots_kernel(Slots s, SlotGroups x, const int* ids, size_t E) {
    LLMC_SHARED(int, next, MOST_COUNTED); // the next row of each expert
    size_t c = blockIdx.x;
    int before = 0;
    for (size_t e0 = 0; e0 < E; e0 += 32) {
        // Rows of lower experts come first, then those of earlier groups.
        size_t e = e0 + threadIdx.x;
        int count = e < E ? s.counts[e] : 0;
        int end = before + warp_prefix(count);
        int earlier = e < E && c ? x.counts(c)[e] : 0;
        if (e < E)
            next[e] = end - count + earlier;
        if (e < E && c == 0)
            s.starts[e] = end - count;
        before = __shfl_sync(ALL_LANES, end, 31);
    }
    if (threadIdx.x == 0 && c == 0) s.starts[E] = before;
    __syncwarp(); // next is written, and all counts have been read: row_of may be written

    for_each_slot(ids, c * x.length, x.end(c), [&](size_t i, int e) {
        // Rows follow the order of slots.
        unsigned same = __match_any_sync(ALL_LANES, e);
        unsigned lower = same & ((1u << threadIdx.x) - 1);
        int row = e >= 0 ? next[e] + __popc(lower) : 0;
        __syncwarp(); // all have read
        if (e >= 0) {
            if (!lower) next[e] += __popc(same);
            s.row_of[i] = row;
            s.slot_of[row] = int(i);
        }
        __syncwarp(); // next is written
    });
}

// Block r makes list r, as many tokens at a time as it has threads.
static __global__ void list_tokens_kernel(int* tokens, int* counts, const int* ids, TokenLists of) {
    constexpr unsigned WARPS = SLOT_THREADS / 32;
    LLMC_SHARED(int, of_warp, WARPS);
    size_t r = blockIdx.x;
    size_t count = 0;
    for (size_t first = 0; first < of.N; first += SLOT_THREADS) {
        // Rows follow the order of tokens.
        size_t n = first + threadIdx.x;
        bool match = n < of.N && of.has(ids, r, n);
        int all = 0;
        int rank = rank_of_match(match, of_warp, &all);
        if (match) tokens[r * of.N + count + size_t(rank)] = int(n);
        count += size_t(all);
    }
    if (threadIdx.x == 0) counts[r] = int(count);
}

// A thread a slot.
static __global__ void own_experts_kernel(int* own, const int* ids, size_t M, size_t first,
                                          size_t E) {
    size_t i = size_t(blockIdx.x) * SLOT_THREADS + threadIdx.x;
    if (i >= M) return;
    size_t e = size_t(ids[i]) - first;
    own[i] = int(e < E ? e : E);
}

// A block has a row, if that row exists.
template <typename T, int P, bool TO_TOKENS>
__global__ void move_rows_kernel(T* to, const T* from, const int* slot_of, const int* rows,
                                 size_t K, size_t C) {
    size_t row = blockIdx.x;
    if (row >= size_t(*rows)) return;
    size_t n = size_t(slot_of[row]) / K; // the slot's token
    to += (TO_TOKENS ? n : row) * C;
    from += (TO_TOKENS ? row : n) * C;
    for (size_t c = threadIdx.x * P; c < C; c += size_t(blockDim.x) * P)
        store(to + c, load<P>(from + c));
}

// A block has a token. It adds rows in ascending order of experts.
template <typename T, int P>
__global__ void combine_slots_kernel(T* out, const T* residual, const T* y, const int* row_of,
                                     const int* rows, size_t K, size_t C) {
    size_t n = blockIdx.x;
    size_t count = size_t(*rows);
    // Neighbouring threads have neighbouring channels.
    for (size_t c = threadIdx.x * P; c < C; c += size_t(blockDim.x) * P) {
        float sum[P] = {};
        auto add = [&](const T* from) {
            Pack<T, P> p = load<P>(from + c);
            for (int i = 0; i < P; i++)
                sum[i] += to_float(p.v[i]);
        };

        // Add the residual, then the token's rows.
        if (residual) add(residual + n * C);
        for (size_t j = 0; j < K; j++) {
            size_t row = size_t(row_of[n * K + j]);
            if (row < count) add(y + row * C);
        }

        // Round once.
        Pack<T, P> p;
        for (int i = 0; i < P; i++)
            p.v[i] = from_acc<T>(sum[i]);
        store(out + n * C + c, p);
    }
}

// WARPS warps share a row; a load takes P elements.
template <typename T, int P, int WARPS>
__global__ void gated_swiglu_forward_kernel(T* h, const T* gate, const T* up, const float* gates,
                                            const int* slot_of, const int* rows, size_t M,
                                            size_t F, ExpertGate kind) {
    // A row is a slot, which has a gate value g of its own.
    RowOfBlock<WARPS> row;
    if (row.n >= row_count(rows, M)) return;
    float weight = gates[slot_at(slot_of, row.n)];
    for (size_t i = row.thread * P; i < F; i += row.threads * P) {
        Pack<T, P> pg = load<P>(gate + row.n * F + i);
        Pack<T, P> pu = load<P>(up + row.n * F + i);
        for (int k = 0; k < P; k++) {
            // The result goes into up's pack.
            ClampedGate<float> c = clamped_gate(to_float(pg.v[k]), to_float(pu.v[k]), kind);
            float s = 1 / (1 + __expf(-c.scaled));
            pu.v[k] = from_acc<T>(weight * gated_at(c, s).value);
        }
        store(h + row.n * F + i, pu);
    }
}

// Outputs may be inputs: a thread reads its elements before it writes them.
template <typename T, int P, int WARPS>
__global__ void gated_swiglu_backward_kernel(T* dgate, T* dup, float* dgates, const T* dh,
                                             const T* gate, const T* up, const float* gates,
                                             const int* slot_of, const int* rows, size_t M,
                                             size_t F, ExpertGate kind) {
    RowOfBlock<WARPS> row;
    if (row.n >= M) return;
    float weight = gates[slot_at(slot_of, row.n)];
    float sum = 0;
    size_t end = row.n < row_count(rows, M) ? F : 0; // a slot without a row has nothing to read
    for (size_t i = row.thread * P; i < end; i += row.threads * P) {
        size_t at = row.n * F + i;
        Pack<T, P> pd = load<P>(dh + at);
        Pack<T, P> pg = load<P>(gate + at);
        Pack<T, P> pu = load<P>(up + at);

        // The packs of gate and up become their gradients.
        for (int k = 0; k < P; k++) {
            float d = to_float(pd.v[k]);
            ClampedGate<float> c = clamped_gate(to_float(pg.v[k]), to_float(pu.v[k]), kind);
            float s = 1 / (1 + __expf(-c.scaled));
            GatedAt<float> at = gated_at(c, s);
            sum += d * at.value;
            pg.v[k] = from_acc<T>(weight * d * at.gate_slope);
            pu.v[k] = from_acc<T>(weight * d * at.up_slope);
        }
        store(dgate + at, pg);
        store(dup + at, pu);
    }

    // The gradient of g is one number a row.
    sum = row.sum(sum);
    if (row.thread == 0) dgates[slot_at(slot_of, row.n)] = sum;
}

// ----------------------------------------------------------------------------
// launchers

// Check a routing against the limits of the kernels: a lane for each choice and for each group.
inline void check_routing(const Routing& r) {
    LLMC_CHECK(r.K > 0 && r.K <= r.E && r.K <= MOST_CHOICES, "%zu of %zu experts: at most %zu", r.K,
               r.E, MOST_CHOICES);
    LLMC_CHECK(r.groups <= MOST_GROUPS && r.E % r.groups == 0, "%zu experts in %zu groups", r.E,
               r.groups);
}

// One warp for each token. r.bias must be on the device.
inline void route_forward(int* ids, float* gates, const float* logits, const Routing& r, size_t N,
                          cudaStream_t stream) {
    check_routing(r);
    launch(route_forward_kernel, unsigned(ceil_div(N, ROUTE_WARPS)), ROUTE_WARPS * 32, stream, ids,
           gates, logits, r, N);
}

// One warp for each token. r.bias, b.counts and b.loss_scale must be on the device.
template <typename T>
void route_backward(T* dlogits, const float* dgates, const float* logits, const int* ids,
                    const Routing& r, const BalanceTerms& b, size_t N, cudaStream_t stream) {
    check_routing(r);
    launch(route_backward_kernel<T>, unsigned(ceil_div(N, ROUTE_WARPS)), ROUTE_WARPS * 32, stream,
           dlogits, dgates, logits, ids, r, b, N);
}

inline void count_slots(int* counts, const int* ids, size_t groups, size_t length, size_t E,
                        bool accumulate, cudaStream_t stream) {
    LLMC_CHECK(E <= MOST_COUNTED, "%zu experts: at most %u are counted", E, MOST_COUNTED);
    SlotGroups x = {counts, counts, E, length, groups * length};
    launch(count_slots_kernel, unsigned(groups), SLOT_THREADS, stream, x, ids, E, accumulate);
}

inline void list_tokens(int* tokens, int* counts, const int* ids, const TokenLists& of,
                        cudaStream_t stream) {
    launch(list_tokens_kernel, unsigned(of.lists), SLOT_THREADS, stream, tokens, counts, ids, of);
}

inline void own_experts(int* own, const int* ids, size_t M, size_t first, size_t E,
                        cudaStream_t stream) {
    launch(own_experts_kernel, unsigned(ceil_div(M, SLOT_THREADS)), SLOT_THREADS, stream, own, ids,
           M, first, E);
}

// Count, sum over groups if there are several, and place. A group's counts lie in its own part of
// row_of, which is long enough, and which nothing else needs until its slots are placed.
inline void sort_slots(const Slots& s, const int* ids, size_t M, size_t E, cudaStream_t stream) {
    LLMC_CHECK(E <= MOST_COUNTED, "%zu experts: at most %u are sorted", E, MOST_COUNTED);
    size_t length = std::max(SORTED_SLOTS, E);
    unsigned groups = unsigned(std::max(M / length, size_t(1)));
    SlotGroups x = {s.counts, s.row_of, length, length, M};
    launch(count_slots_kernel, groups, SLOT_THREADS, stream, x, ids, E, false);
    if (groups > 1)
        launch(scan_slots_kernel, unsigned(E), 32, stream, x, groups);
    launch(place_slots_kernel, groups, 32, stream, s, x, ids, E);
}

// The grid has a block for each of M slots, so the host need not read *rows.
template <bool TO_TOKENS, typename T>
void move_rows(T* to, const T* from, const int* slot_of, const int* rows, size_t M, size_t K,
               size_t C, cudaStream_t stream) {
    // Loads take 16 bytes where C and both pointers allow it.
    bool vector = can_vectorize<T>(C, to, from);
    launch(vector ? move_rows_kernel<T, VECTOR<T>, TO_TOKENS> : move_rows_kernel<T, 1, TO_TOKENS>,
           unsigned(M), 128, stream,
           to, from, slot_of, rows, K, C);
}

template <typename T>
void combine_slots(T* out, const T* residual, const T* y, const int* row_of, const int* rows,
                   size_t N, size_t K, size_t C, cudaStream_t stream) {
    bool vector = can_vectorize<T>(C, out, residual, y);
    launch(vector ? combine_slots_kernel<T, VECTOR<T>> : combine_slots_kernel<T, 1>,
           unsigned(N), 128, stream,
           out, residual, y, row_of, rows, K, C);
}

template <typename T>
void gated_swiglu_forward(T* h, const T* gate, const T* up, const float* gates, const int* slot_of,
                          const int* rows, size_t M, size_t F, cudaStream_t stream,
                          const ExpertGate& kind = {}) {
    pick_row_kernel<T>(F, can_vectorize<T>(F, h, gate, up), [&](auto P, auto WARPS) {
        launch(gated_swiglu_forward_kernel<T, P, WARPS>, row_grid<WARPS>(M), row_block<WARPS>(),
               stream, h, gate, up, gates, slot_of, rows, M, F, kind);
    });
}

template <typename T>
void gated_swiglu_backward(T* dgate, T* dup, float* dgates, const T* dh, const T* gate, const T* up,
                           const float* gates, const int* slot_of, const int* rows, size_t M,
                           size_t F, cudaStream_t stream, const ExpertGate& kind = {}) {
    bool vector = can_vectorize<T>(F, dgate, dup, dh, gate, up);
    pick_row_kernel<T>(F, vector, [&](auto P, auto WARPS) {
        launch(gated_swiglu_backward_kernel<T, P, WARPS>, row_grid<WARPS>(M), row_block<WARPS>(),
               stream, dgate, dup, dgates, dh, gate, up, gates, slot_of, rows, M, F, kind);
    });
}
#endif

// ----------------------------------------------------------------------------
// anywhere

// xs[row] = x[the row's token].
template <typename T, typename S>
void gather_slots(T* xs, const T* x, const int* slot_of, const int* rows, // (rows,C) (N,C) (M)
                  size_t M, size_t K, size_t C, S where) {
    move_rows<false>(xs, x, slot_of, rows, M, K, C, where);
}

// The reverse: x[the row's token] = xs[row].
template <typename T, typename S>
void scatter_slots(T* x, const T* xs, const int* slot_of, const int* rows, // (N,C) (rows,C) (M)
                   size_t M, size_t K, size_t C, S where) {
    move_rows<true>(x, xs, slot_of, rows, M, K, C, where);
}

} // namespace llmc
