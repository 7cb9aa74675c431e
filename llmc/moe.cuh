// moe.cuh - mixture of experts: router, sort, gather, gate, combine - arXiv:1701.06538
//   scores   s = exp(logits - max), or sigmoid(logits)          each token, over E experts
//   choice   the K largest of logits, or of sigmoid + bias; of equals the lower expert. Limited to
//            groups: among experts of the best groups alone, by the value of a group's best expert,
//            or for sigmoids by the sum of its two best (arXiv:2405.04434, arXiv:2412.19437)
//   gates    g = scale s / S     S sums s over: SOFTMAX all experts, RENORMALISED and SIGMOID those
//            chosen (arXiv:2401.04088, arXiv:2412.19437), and SIGMOID_ALONE nothing: S = 1
//   slots    slot n K + j is token n's j-th expert, by ascending expert. A stable counting sort
//            gives each slot its row: rows of an expert lie together, by token. A rank that has
//            some of the experts sorts the others' slots behind its own, and gives them no row
//   experts  h = g silu(gate) up: the gate multiplies before the last product, so that y of the
//            slots of a token just add up:   out = residual + sum over j of y[row_of[n,j]]
//   Gradients, with q = s / S, G = dL/dg, and for sigmoids a factor 1 - s:
//     dlogits = scale q (G - sum q G)             of all experts, or of those chosen; alone: q G
//     + balance s' (f - sum s' f)                 s' = s / sum of all s, f = E count / (K T)
//     + z lse p                                   lse = log sum exp(logits), p = softmax
//   The balance terms are those of a sequence (arXiv:2412.19437, eq. 17): they know no micro-batch
//   and no layout. count: slots of a sequence that chose the expert, a constant.
//   logits (N,E), gates, dgates (N,K) acc   ids, row_of (N,K) ints   slot_of (N K)   counts (E)
//   starts (E+1)   x, out, residual (N,C)   xs, y (rows,C)   gate, up, h (rows,F)   M: all slots
//   rows: 1 int, where kernels run: N K, or the slots of this rank's experts
//   Contract: everything =; dgate may be dh, dup may be up.  No atomics; bitwise repeatable, the
//             sort in integers, sums over slots by ascending expert in acc, rounded once.
//   Cost: memory-bound. Each block of the sort reads all N K ids: E of them, from L2.
//   To copy: this file, types.h and cuda_common.h.
#pragma once
#include <algorithm>
#include <climits>
#include "cuda_common.h"

namespace llmc {

// Where the scores come from, and which of them a gate is a share of.
enum class Router : uint8_t { SOFTMAX, RENORMALISED, SIGMOID, SIGMOID_ALONE };
LLMC_HD inline bool is_sigmoid(Router r) {
    return r == Router::SIGMOID || r == Router::SIGMOID_ALONE;
}

// How a token chooses K of E experts. A warp has a lane for each choice.
struct Routing {
    Router router;
    size_t E, K;
    float scale = 1;             // of all gates
    const float* bias = nullptr; // (E) added to sigmoid's scores for the choice alone; or null
    size_t groups = 1;           // equal groups of neighbouring experts
    size_t kept_groups = 1;      // from which a token may choose
};
constexpr size_t MOST_CHOICES = 32;
constexpr size_t MOST_GROUPS = 32;

// Factors of the balance terms' gradients. balance: alpha / (sequences T), z: 2 beta / (sequences
// T), of all sequences of the global batch; 0: the term is left out.
struct BalanceTerms {
    double balance = 0, z = 0;
    const int* counts = nullptr; // (B,E) slots of each sequence that chose an expert
    size_t T = 1;                // tokens of a sequence
    const float* loss_scale = nullptr; // multiplies both, as it does the loss; or null
    size_t ranks = 1;            // that share each sequence: a rank has T / ranks rows of it
};

// Where slots go.
struct Slots {
    int* counts;  // (E)
    int* starts;  // (E+1) the first row of each expert; then N K
    int* row_of;  // (N,K)
    int* slot_of; // (N K) by row
};

// The slot in a row; null: rows are slots, each in its place.
LLMC_HD inline size_t slot_at(const int* slot_of, size_t row) {
    return slot_of ? size_t(slot_of[row]) : row;
}

// Rows that are there; null: all M.
LLMC_HD inline size_t row_count(const int* rows, size_t M) {
    return rows ? size_t(*rows) : M;
}

// A score before it is divided by any sum. max: of the row's logits.
template <typename A>
LLMC_HD A route_score(A logit, A max, Router router) {
    return is_sigmoid(router) ? 1 / (1 + std::exp(-logit)) : std::exp(logit - max);
}

// The value by which experts are chosen. A NaN loses, so that ids stay inside the table; the loss
// shows it all the same.
template <typename A>
LLMC_HD A route_value(A logit, size_t e, const Routing& r) {
    A v = logit;
    if (is_sigmoid(r.router))
        v = route_score(logit, A(0), r.router);
    if (r.bias) v += A(r.bias[e]);
    return v == v ? v : -A(INFINITY);
}

// The value by which a group is kept.
template <typename A>
LLMC_HD A group_value(const A* logits, size_t g, const Routing& r) { // (E)
    A first = -A(INFINITY);
    A second = -A(INFINITY);
    // Groups are equal.
    size_t each = r.E / r.groups;
    for (size_t e = g * each; e < (g + 1) * each; e++) {
        // The two best so far.
        A v = route_value(logits[e], e, r);
        second = v > first ? first : v > second ? v : second;
        first = v > first ? v : first;
    }
    return is_sigmoid(r.router) ? first + second : first;
}

// Whether an expert's group is kept: a bit for each group.
LLMC_HD inline bool may_choose(unsigned kept, size_t e, const Routing& r) {
    return kept >> (e / (r.E / r.groups)) & 1;
}

// A candidate; those of a row are in one order: larger values first, of equals the lower expert.
template <typename A> struct ExpertChoice {
    A value;
    int id;
    LLMC_HD bool before(const ExpertChoice& other) const {
        return value > other.value || (value == other.value && id < other.id);
    }
};

// The sums of a row that gradients share.
template <typename A> struct RouteSums {
    A max;           // of logits
    A exps = 0;      // sum of exp(logits - max)
    A all = 0;       // sum of scores
    A chosen = 0;    // S: over all experts, or those chosen
    A gradients = 0; // sum of q G
    A balances = 0;  // sum of s' f
};

// f of an expert in the sequence of row n.
template <typename A>
LLMC_HD A expert_share(const BalanceTerms& b, const Routing& r, size_t n, size_t e) {
    // 1 where all experts have as many slots.
    size_t sequence = n / (b.T / b.ranks);
    A count = A(b.counts[sequence * r.E + e]);
    return A(r.E) * count / (A(r.K) * A(b.T));
}

// dlogits of one expert. G: its gate's gradient, 0 where it was not chosen.
template <typename A>
LLMC_HD A route_gradient(const RouteSums<A>& sums, const Routing& r, const BalanceTerms& b, A logit,
                         A G, bool chosen, size_t n, size_t e) {
    A s = route_score(logit, sums.max, r.router);
    A slope = is_sigmoid(r.router) ? 1 - s : A(1);
    A more = b.loss_scale ? A(*b.loss_scale) : A(1);

    // The gate: a softmax over all experts moves those that were not chosen too.
    A d = 0;
    if (chosen || r.router == Router::SOFTMAX) {
        A q = s / sums.chosen;
        d = A(r.scale) * q * (G - sums.gradients) * slope;
    }

    // Balance within the sequence, and the size of logits.
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

// The row's sums over experts; `ids`, (K), are those chosen.
template <typename A>
RouteSums<A> route_sums(const A* logits, const int* ids, const Routing& r) { // (E)
    // Powers are of differences to the maximum: none overflows.
    RouteSums<A> x;
    x.max = *std::max_element(logits, logits + r.E);
    for (size_t e = 0; e < r.E; e++) {
        x.exps += std::exp(logits[e] - x.max);
        x.all += route_score(logits[e], x.max, r.router);
    }

    // S: a sigmoid's may be 0 in float, and must not divide.
    for (size_t j = 0; j < r.K; j++)
        x.chosen += route_score(logits[ids[j]], x.max, r.router);
    if (r.router == Router::SOFTMAX) x.chosen = x.all;
    if (r.router == Router::SIGMOID) x.chosen += A(1e-20);
    if (r.router == Router::SIGMOID_ALONE) x.chosen = 1;
    return x;
}

// The groups that a token may choose from, a bit each; of equals the lower one.
template <typename A>
unsigned kept_groups(const A* logits, const Routing& r) { // (E)
    if (r.groups == 1) return 1;
    std::vector<ExpertChoice<A>> all;
    for (size_t g = 0; g < r.groups; g++)
        all.push_back({group_value(logits, g, r), int(g)});

    // Keep the first ones.
    auto before = [](const auto& a, const auto& b) { return a.before(b); };
    std::sort(all.begin(), all.end(), before);
    unsigned kept = 0;
    for (size_t g = 0; g < r.kept_groups; g++)
        kept |= 1u << all[g].id;
    return kept;
}

// ids by ascending expert, and their gates.
template <typename A>
void route_forward(int* ids, A* gates, const A* logits, const Routing& r, // (N,K) (N,K) (N,E)
                   size_t N, Cpu) {
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const A* l = logits + n * r.E;
        int* chosen = ids + n * r.K;

        // Each choice is the first candidate behind the last choice.
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

        // Weigh them.
        RouteSums<A> sums = route_sums(l, chosen, r);
        for (size_t j = 0; j < r.K; j++) {
            A logit = l[chosen[j]];
            A s = route_score(logit, sums.max, r.router);
            gates[n * r.K + j] = A(r.scale) * s / sums.chosen;
        }
    }
}

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

        // Sum over the row.
        RouteSums<A> sums = route_sums(l, chosen, r);
        bool shares = r.router != Router::SIGMOID_ALONE;
        for (size_t j = 0; j < r.K && shares; j++)
            sums.gradients += route_score(l[chosen[j]], sums.max, r.router) / sums.chosen * G[j];
        for (size_t e = 0; e < r.E && b.balance != 0; e++) {
            A s = route_score(l[e], sums.max, r.router);
            sums.balances += s / sums.all * expert_share<A>(b, r, n, e);
        }

        // Walk the experts; those chosen stand in order.
        size_t j = 0;
        for (size_t e = 0; e < r.E; e++) {
            bool is_chosen = j < r.K && chosen[j] == int(e);
            A g = is_chosen ? G[j++] : A(0);
            A d = route_gradient(sums, r, b, l[e], g, is_chosen, n, e);
            dlogits[n * r.E + e] = from_acc<T>(d);
        }
    }
}

// Count the slots of each of `groups` groups of ids, `length` each, that chose an expert: = or +=.
inline void count_slots(int* counts, const int* ids, size_t groups, // (groups,E) (groups,length)
                        size_t length, size_t E, bool accumulate, Cpu) {
    if (!accumulate)
        std::fill_n(counts, groups * E, 0);
    for (size_t i = 0; i < groups * length; i++) {
        size_t group = i / length;
        counts[group * E + size_t(ids[i])]++;
    }
}

// Number the experts [first, first + E) from 0 on; all others become E.
inline void own_experts(int* own, const int* ids, size_t M, size_t first, size_t E, Cpu) { // (M)
    for (size_t i = 0; i < M; i++) {
        // An expert before the first one is a large number too.
        size_t e = size_t(ids[i]) - first;
        own[i] = int(std::min(e, E));
    }
}

// The counting sort of M slots.
inline void sort_slots(const Slots& s, const int* ids, size_t M, size_t E, Cpu where) { // (M)
    // Scan the counts.
    count_slots(s.counts, ids, 1, M, E, false, where);
    s.starts[0] = 0;
    for (size_t e = 0; e < E; e++)
        s.starts[e + 1] = s.starts[e] + s.counts[e];

    // Place the slots. starts[e] serves as the expert's next row, and then moves back.
    for (size_t i = 0; i < M; i++) {
        int row = s.starts[ids[i]]++;
        s.row_of[i] = row;
        s.slot_of[row] = int(i);
    }
    for (size_t e = E; e > 0; e--)
        s.starts[e] = s.starts[e - 1];
    s.starts[0] = 0;
}

// xs[row] = x[its token]
template <typename T>
void gather_slots(T* xs, const T* x, const int* slot_of, const int* rows, // (rows,C) (N,C) (M)
                  size_t, size_t K, size_t C, Cpu) {
    size_t count = size_t(*rows);
    #pragma omp parallel for
    for (size_t row = 0; row < count; row++) {
        size_t n = size_t(slot_of[row]) / K; // the slot's token
        std::copy_n(x + n * C, C, xs + row * C);
    }
}

// out = residual (or null: 0) + the sum of a token's rows; a slot without a row adds nothing
template <typename T>
void combine_slots(T* out, const T* residual, const T* y, const int* row_of, // (N,C) (N,C) (rows,C)
                   const int* rows, size_t N, size_t K, size_t C, Cpu) {
    typedef acc_t<T> A;
    size_t count = size_t(*rows);
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++)
        for (size_t c = 0; c < C; c++) {
            // Slots of a token stand by ascending expert.
            A sum = residual ? to_acc(residual[n * C + c]) : A(0);
            for (size_t j = 0; j < K; j++) {
                size_t row = size_t(row_of[n * K + j]);
                if (row < count) sum += to_acc(y[row * C + c]);
            }
            out[n * C + c] = from_acc<T>(sum);
        }
}

// h = g silu(gate) up
template <typename T>
void gated_swiglu_forward(T* h, const T* gate, const T* up, // (rows,F) each
                          const acc_t<T>* gates, const int* slot_of, const int* rows, // (N,K) (M)
                          size_t M, size_t F, Cpu) {
    typedef acc_t<T> A;
    size_t count = row_count(rows, M);
    #pragma omp parallel for
    for (size_t row = 0; row < count; row++) {
        A weight = gates[slot_at(slot_of, row)];
        #pragma omp simd
        for (size_t i = row * F; i < (row + 1) * F; i++) {
            // s is the sigmoid, as in swiglu.cuh.
            A g = to_acc(gate[i]);
            A s = 1 / (1 + fast_exp(-g));
            h[i] = from_acc<T>(weight * g * s * to_acc(up[i]));
        }
    }
}

// dgates: a sum over each row; of slots without one it is 0, so that ranks' sums add up.
template <typename T>
void gated_swiglu_backward(T* dgate, T* dup, acc_t<T>* dgates,      // (rows,F) (rows,F) (N,K)
                           const T* dh, const T* gate, const T* up, // (rows,F) each
                           const acc_t<T>* gates, const int* slot_of, const int* rows, // (N,K) (M)
                           size_t M, size_t F, Cpu) {
    typedef acc_t<T> A;
    size_t count = row_count(rows, M);
    #pragma omp parallel for
    for (size_t row = 0; row < M; row++) {
        A weight = gates[slot_at(slot_of, row)];
        A sum = 0;
        size_t end = row < count ? (row + 1) * F : 0;
        for (size_t i = row * F; i < end; i++) {
            // Read all inputs before an output that may be one of them is written.
            A d = to_acc(dh[i]);
            A g = to_acc(gate[i]);
            A u = to_acc(up[i]);
            A s = 1 / (1 + fast_exp(-g));

            // The gate's gradient sums dh h / g; the others have its weight.
            sum += d * g * s * u;
            A slope = s * (1 + g * (1 - s)); // of silu
            dgate[i] = from_acc<T>(weight * d * u * slope);
            dup[i] = from_acc<T>(weight * d * g * s);
        }
        dgates[slot_at(slot_of, row)] = sum;
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

constexpr unsigned ROUTE_WARPS = 4;   // tokens of a block
constexpr unsigned SLOT_THREADS = 256;

// The first candidate of a warp's, in every lane.
__device__ inline ExpertChoice<float> warp_first(ExpertChoice<float> x) {
    for (int mask = 16; mask > 0; mask /= 2) {
        // A partner's candidate; of two equal ones both lanes keep the same.
        ExpertChoice<float> y;
        y.value = __shfl_xor_sync(ALL_LANES, x.value, mask);
        y.id = __shfl_xor_sync(ALL_LANES, x.id, mask);
        if (y.before(x)) x = y;
    }
    return x;
}

// The row's sums, for every lane; lane j < K brings the j-th chosen expert as `id`, others -1.
__device__ inline RouteSums<float> warp_route_sums(const float* logits, int id, const Routing& r) {
    // The maximum first, for powers of differences.
    unsigned lane = threadIdx.x % 32;
    RouteSums<float> x;
    x.max = -INFINITY;
    for (size_t e = lane; e < r.E; e += 32)
        x.max = logits[e] > x.max ? logits[e] : x.max;
    x.max = warp_max(x.max);

    // Sums over experts, and over choices.
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

// The groups that a token may choose from, a bit each, in every lane; lane g looks at group g.
__device__ inline unsigned warp_kept_groups(const float* logits, const Routing& r) { // (E)
    // Most routers have one.
    if (r.groups == 1) return 1;
    unsigned lane = threadIdx.x % 32;
    ExpertChoice<float> mine = {-INFINITY, int(lane)};
    if (lane < r.groups) mine.value = group_value(logits, lane, r);

    // A group is kept if few enough come before it.
    unsigned place = 0;
    for (unsigned g = 0; g < unsigned(r.groups); g++) {
        ExpertChoice<float> other = {__shfl_sync(ALL_LANES, mine.value, int(g)), int(g)};
        place += other.before(mine);
    }
    return __ballot_sync(ALL_LANES, lane < r.groups && place < r.kept_groups);
}

// A warp a token. Lane j keeps the j-th choice.
//   ids, gates (N,K)   logits (N,E)
__global__ void route_forward_kernel(int* ids, float* gates, const float* logits, Routing r,
                                     size_t N) {
    size_t n = size_t(blockIdx.x) * ROUTE_WARPS + threadIdx.x / 32;
    if (n >= N) return; // all lanes of a warp leave together
    unsigned lane = threadIdx.x % 32;
    const float* l = logits + n * r.E;

    // Each choice is the first candidate behind the last choice.
    unsigned kept = warp_kept_groups(l, r);
    ExpertChoice<float> last = {INFINITY, -1};
    int mine = -1;
    for (size_t j = 0; j < r.K; j++) {
        // Every lane looks at some experts, then all agree.
        ExpertChoice<float> best = {-INFINITY, INT_MAX};
        for (size_t e = lane; e < r.E; e += 32) {
            if (!may_choose(kept, e, r)) continue;
            ExpertChoice<float> c = {route_value(l[e], e, r), int(e)};
            if (last.before(c) && c.before(best)) best = c;
        }
        last = warp_first(best);
        if (lane == j) mine = last.id;
    }

    // A choice's place is the number of lower experts among the choices.
    RouteSums<float> sums = warp_route_sums(l, mine, r);
    size_t place = 0;
    for (size_t j = 0; j < r.K; j++) {
        int other = __shfl_sync(ALL_LANES, mine, int(j));
        place += other < mine;
    }

    // Lanes without a choice have only answered.
    if (lane >= r.K) return;
    float s = route_score(l[mine], sums.max, r.router);
    ids[n * r.K + place] = mine;
    gates[n * r.K + place] = r.scale * s / sums.chosen;
}

// A warp a token; lanes share out the experts.
template <typename T>
__global__ void route_backward_kernel(T* dlogits, const float* dgates, const float* logits,
                                      const int* ids, Routing r, BalanceTerms b, size_t N) {
    size_t n = size_t(blockIdx.x) * ROUTE_WARPS + threadIdx.x / 32;
    if (n >= N) return; // all lanes of a warp leave together
    unsigned lane = threadIdx.x % 32;
    const float* l = logits + n * r.E;

    // Sum over the choices, a lane each, then over the experts.
    int mine = lane < r.K ? ids[n * r.K + lane] : -1;
    float G = lane < r.K ? dgates[n * r.K + lane] : 0.0f;
    RouteSums<float> sums = warp_route_sums(l, mine, r);

    // An idle lane adds zeros.
    float q = mine >= 0 ? route_score(l[mine], sums.max, r.router) / sums.chosen : 0.0f;
    sums.gradients = r.router == Router::SIGMOID_ALONE ? 0.0f : warp_sum(q * G);
    float balances = 0;
    for (size_t e = lane; e < r.E && b.balance != 0; e += 32)
        balances += route_score(l[e], sums.max, r.router) / sums.all
                    * expert_share<float>(b, r, n, e);
    sums.balances = warp_sum(balances);

    // All lanes walk as often: each asks the others for the choices.
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

        // The last round may have more lanes than experts.
        if (e >= r.E) continue;
        float d = route_gradient(sums, r, b, l[e], g, chosen, n, e);
        dlogits[n * r.E + e] = from_acc<T>(d);
    }
}

// Block (e, group) counts one expert's slots.
//   counts (groups,E)   ids (groups,length)
__global__ void count_slots_kernel(int* counts, const int* ids, size_t length, size_t E,
                                   bool accumulate) {
    const int* mine = ids + size_t(blockIdx.y) * length;
    // Integers: any order of adding gives the same.
    int count = 0;
    for (size_t i = threadIdx.x; i < length; i += SLOT_THREADS)
        count += mine[i] == int(blockIdx.x);
    count = block_sum<SLOT_THREADS / 32>(count);
    int* sum = counts + size_t(blockIdx.y) * E + blockIdx.x;
    if (threadIdx.x == 0) *sum = accumulate ? *sum + count : count;
}

// Block e places its expert's slots in their order, as many at a time as it has threads.
__global__ void place_slots_kernel(Slots s, const int* ids, size_t M, size_t E) {
    // The matches of each warp, in one round.
    constexpr unsigned WARPS = SLOT_THREADS / 32;
    LLMC_SHARED(int, of_warp, WARPS);
    unsigned lane = threadIdx.x % 32;
    unsigned warp = threadIdx.x / 32;
    int e = int(blockIdx.x);

    // The first row: slots of all experts before.
    int before = 0;
    for (int other = int(threadIdx.x); other < e; other += int(SLOT_THREADS))
        before += s.counts[other];
    int row = block_sum<WARPS>(before);
    if (threadIdx.x == 0) {
        s.starts[e] = row;
        if (size_t(e) + 1 == E) s.starts[E] = int(M);
    }

    for (size_t first = 0; first < M; first += SLOT_THREADS) {
        // A warp counts its matches in one word.
        size_t i = first + threadIdx.x;
        bool match = i < M && ids[i] == e;
        unsigned lanes = __ballot_sync(ALL_LANES, match);
        if (lane == 0) of_warp[warp] = __popc(lanes);
        __syncthreads(); // all warps have written

        // Matches of lower lanes and lower warps come first.
        int rank = __popc(lanes & ((1u << lane) - 1));
        int all = 0;
        for (unsigned w = 0; w < WARPS; w++) {
            if (w < warp) rank += of_warp[w];
            all += of_warp[w];
        }
        __syncthreads(); // all have read: the next round may write

        if (match) {
            s.row_of[i] = row + rank;
            s.slot_of[row + rank] = int(i);
        }
        row += all;
    }
}

__global__ void own_experts_kernel(int* own, const int* ids, size_t M, size_t first, size_t E) {
    size_t i = size_t(blockIdx.x) * SLOT_THREADS + threadIdx.x;
    if (i >= M) return;
    size_t e = size_t(ids[i]) - first;
    own[i] = int(e < E ? e : E);
}

// A block a row, if there are so many.
template <typename T, int P>
__global__ void gather_slots_kernel(T* xs, const T* x, const int* slot_of, const int* rows,
                                    size_t K, size_t C) {
    size_t row = blockIdx.x;
    if (row >= size_t(*rows)) return;
    size_t n = size_t(slot_of[row]) / K; // the slot's token
    for (size_t c = threadIdx.x * P; c < C; c += size_t(blockDim.x) * P)
        store(xs + row * C + c, load<P>(x + n * C + c));
}

// A block a token; sums go by ascending expert.
template <typename T, int P>
__global__ void combine_slots_kernel(T* out, const T* residual, const T* y, const int* row_of,
                                     const int* rows, size_t K, size_t C) {
    // Threads side by side have neighbouring channels.
    size_t n = blockIdx.x;
    size_t count = size_t(*rows);
    for (size_t c = threadIdx.x * P; c < C; c += size_t(blockDim.x) * P) {
        float sum[P] = {};
        auto add = [&](const T* from) {
            Pack<T, P> p = load<P>(from + c);
            for (int i = 0; i < P; i++)
                sum[i] += to_float(p.v[i]);
        };

        // The residual, then the token's rows.
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

// WARPS warps share a row; P elements a load.
template <typename T, int P, int WARPS>
__global__ void gated_swiglu_forward_kernel(T* h, const T* gate, const T* up, const float* gates,
                                            const int* slot_of, const int* rows, size_t M,
                                            size_t F) {
    // A row is a slot, and has its gate.
    RowOfBlock<WARPS> row;
    if (row.n >= row_count(rows, M)) return;
    float weight = gates[slot_at(slot_of, row.n)];
    for (size_t i = row.thread * P; i < F; i += row.threads * P) {
        Pack<T, P> pg = load<P>(gate + row.n * F + i);
        Pack<T, P> pu = load<P>(up + row.n * F + i);
        for (int k = 0; k < P; k++) {
            // up's pack takes the result.
            float g = to_float(pg.v[k]);
            float s = 1 / (1 + __expf(-g));
            pu.v[k] = from_acc<T>(weight * g * s * to_float(pu.v[k]));
        }
        store(h + row.n * F + i, pu);
    }
}

// A thread has read its elements before it writes them: outputs may be inputs.
template <typename T, int P, int WARPS>
__global__ void gated_swiglu_backward_kernel(T* dgate, T* dup, float* dgates, const T* dh,
                                             const T* gate, const T* up, const float* gates,
                                             const int* slot_of, const int* rows, size_t M,
                                             size_t F) {
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
            float g = to_float(pg.v[k]);
            float u = to_float(pu.v[k]);
            float s = 1 / (1 + __expf(-g));
            sum += d * g * s * u;
            float slope = s * (1 + g * (1 - s)); // of silu
            pg.v[k] = from_acc<T>(weight * d * u * slope);
            pu.v[k] = from_acc<T>(weight * d * g * s);
        }
        store(dgate + at, pg);
        store(dup + at, pu);
    }

    // The gate's gradient is one number a row.
    sum = row.sum(sum);
    if (row.thread == 0) dgates[slot_at(slot_of, row.n)] = sum;
}

// ----------------------------------------------------------------------------
// launchers

// A lane keeps each choice.
inline void check_routing(const Routing& r) {
    LLMC_CHECK(r.K > 0 && r.K <= r.E && r.K <= MOST_CHOICES, "%zu of %zu experts: at most %zu", r.K,
               r.E, MOST_CHOICES);
    LLMC_CHECK(r.groups <= MOST_GROUPS && r.E % r.groups == 0, "%zu experts in %zu groups", r.E,
               r.groups);
}

// r.bias lies where the kernel runs.
inline void route_forward(int* ids, float* gates, const float* logits, const Routing& r, size_t N,
                          cudaStream_t stream) {
    check_routing(r);
    launch(route_forward_kernel, unsigned(ceil_div(N, ROUTE_WARPS)), ROUTE_WARPS * 32, 0, stream,
           ids, gates, logits, r, N);
}

// So do b.counts and b.loss_scale.
template <typename T>
void route_backward(T* dlogits, const float* dgates, const float* logits, const int* ids,
                    const Routing& r, const BalanceTerms& b, size_t N, cudaStream_t stream) {
    check_routing(r);
    launch(route_backward_kernel<T>, unsigned(ceil_div(N, ROUTE_WARPS)), ROUTE_WARPS * 32, 0,
           stream, dlogits, dgates, logits, ids, r, b, N);
}

// A block for each expert of each group.
inline void count_slots(int* counts, const int* ids, size_t groups, size_t length, size_t E,
                        bool accumulate, cudaStream_t stream) {
    launch(count_slots_kernel, dim3(unsigned(E), unsigned(groups)), SLOT_THREADS, 0, stream, counts,
           ids, length, E, accumulate);
}

// A thread a slot.
inline void own_experts(int* own, const int* ids, size_t M, size_t first, size_t E,
                        cudaStream_t stream) {
    launch(own_experts_kernel, unsigned(ceil_div(M, SLOT_THREADS)), SLOT_THREADS, 0, stream, own,
           ids, M, first, E);
}

// Two launches: counts, then places.
inline void sort_slots(const Slots& s, const int* ids, size_t M, size_t E, cudaStream_t stream) {
    count_slots(s.counts, ids, 1, M, E, false, stream);
    launch(place_slots_kernel, unsigned(E), SLOT_THREADS, 0, stream, s, ids, M, E);
}

// The host reads no count: a grid has a block for each of M slots.
template <typename T>
void gather_slots(T* xs, const T* x, const int* slot_of, const int* rows, size_t M, size_t K,
                  size_t C, cudaStream_t stream) {
    // Rows are read 16 bytes at a time where they can be.
    auto run = [&](auto P) {
        launch(gather_slots_kernel<T, P>, unsigned(M), 128, 0, stream,
               xs, x, slot_of, rows, K, C);
    };
    can_vectorize<T>(C, xs, x) ? run(Int<VECTOR<T>>()) : run(Int<1>());
}

// Null residual: the sum alone.
template <typename T>
void combine_slots(T* out, const T* residual, const T* y, const int* row_of, const int* rows,
                   size_t N, size_t K, size_t C, cudaStream_t stream) {
    // A null residual counts as aligned.
    auto run = [&](auto P) {
        launch(combine_slots_kernel<T, P>, unsigned(N), 128, 0, stream,
               out, residual, y, row_of, rows, K, C);
    };
    can_vectorize<T>(C, out, residual, y) ? run(Int<VECTOR<T>>()) : run(Int<1>());
}

// Any F and alignment.
template <typename T>
void gated_swiglu_forward(T* h, const T* gate, const T* up, const float* gates, const int* slot_of,
                          const int* rows, size_t M, size_t F, cudaStream_t stream) {
    pick_row_kernel<T>(F, can_vectorize<T>(F, h, gate, up), [&](auto P, auto WARPS) {
        launch(gated_swiglu_forward_kernel<T, P, WARPS>, row_grid<WARPS>(M), row_block<WARPS>(), 0,
               stream, h, gate, up, gates, slot_of, rows, M, F);
    });
}

template <typename T>
void gated_swiglu_backward(T* dgate, T* dup, float* dgates,
                           const T* dh, const T* gate, const T* up,
                           const float* gates, const int* slot_of, const int* rows,
                           size_t M, size_t F, cudaStream_t stream) {
    // One pointer that is not aligned sends all five to single elements.
    bool vector = can_vectorize<T>(F, dgate, dup, dh, gate, up);
    pick_row_kernel<T>(F, vector, [&](auto P, auto WARPS) {
        launch(gated_swiglu_backward_kernel<T, P, WARPS>, row_grid<WARPS>(M), row_block<WARPS>(), 0,
               stream, dgate, dup, dgates, dh, gate, up, gates, slot_of, rows, M, F);
    });
}
#endif

} // namespace llmc
