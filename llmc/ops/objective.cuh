// objective.cuh - preferences, rewards: a coefficient a row - arXiv:2305.18290 arXiv:2402.03300
//   A window of T tokens holds pairs: a chosen sequence and the rejected one after it, each a
//   document of its own.
//   y = sum of log p(target) over a sequence's n targets,   r = y - the reference's y
//   d = r_chosen - r_rejected,   m = y / n,   s = 1 / (1 + exp(-x)),   e label smoothing
//     DPO    -(1-e) log s(beta d) - e log s(-beta d)        cDPO where e > 0
//     IPO    (r_chosen / n - r_rejected / n - 1 / (2 beta))^2   (2310.12036)
//     SimPO  -log s(beta (m_chosen - m_rejected) - gamma)   no reference (2405.14734)
//     ORPO   -m_chosen - beta log s(o_chosen - o_rejected),   o = m - log(1 - exp m) (2403.07691)
//   KTO instead takes each document as an answer of its own; `feedback` marks the undesirable ones:
//     KTO    desirable  w (1 - s(beta (r - z))),   undesirable  w (1 - s(beta (z - r)))
//            z is the batch's reference point (extra/kto.h), w the weight of the label
//            (2402.01306)
//   GRPO takes answers that the policy has sampled, and each row stands alone. a is its advantage,
//   q = p / p_old its ratio to the policy that sampled, x = log p - the reference's:
//     GRPO   -a log p + beta kl(x)                  the first update: it has the policy gradient
//            -min(q a, clip(q) a) + beta kl(x)      the updates after it; clip(q) lies within
//                                                   [1 - clip_low, 1 + clip_high] (1707.06347)
//     kl     k3: exp(-x) - 1 + x (2402.03300)   k2: x^2 / 2
//            As values, k3 has the mean KL(policy, reference) over sampled tokens. As losses, given
//            the tokens before, k3 has on average the gradient of KL(reference, policy), and k2
//            that of KL(policy, reference).
//   coefficient = -dloss / dlog p(target) of a row. The gradient of the row's logits is coefficient
//   times the cross-entropy's, so one backward pass of the head serves all objectives.
//   losses (N) the rows' -log p   feedback, reference, old (N) float   value, margin, correct,
//   coefficient (N): a pair's numbers stand in its first row, 0 in the others; N = B T
//   GRPO keeps advantages in `feedback`, the estimate of KL in `margin`, -log p in `correct`, and
//   in `clipped` 1 where a clipped ratio has no gradient.
//   Contract: all =.  A pair's sums are in double, in the rows' order: bitwise repeatable, and a
//             policy equal to the reference has d = 0 exactly. z is a constant; it stands in the
//             last row of a window's `reference`, which never has a target.
//   Cost: a warp walks the rows of a pair, which is nothing beside the head's matrix products.
//   To copy: this file, types.h and cuda_common.h.
#pragma once
#include <cmath>
#include <cstdint>
#include "cuda_common.h"
#include "types.h"

namespace llmc {

// The objectives. NLL is plain cross-entropy, which needs no coefficients; nor does distillation,
// whose rows stand alone (distill.cuh).
enum class LossKind : uint8_t { NLL, DPO, IPO, SIMPO, ORPO, KTO, GRPO, DISTILL };

// GRPO's estimates of the KL divergence, one token at a time.
enum class KlEstimate : uint8_t { K2, K3 };

// The chosen objective and its hyperparameters.
struct Objective {
    LossKind kind = LossKind::NLL;
    double beta = 0.1;    // weight of the preference; for GRPO, of the reference
    double smoothing = 0; // DPO's label smoothing
    double gamma = 0;     // SimPO's margin
    double desirable = 1; // KTO's weights of the two labels
    double undesirable = 1;
    double share = 0.5;     // distillation's weight of the teacher
    double temperature = 1; // and how soft both softmaxes are
    KlEstimate kl = KlEstimate::K3; // GRPO's
    bool old_policy = false;        // GRPO's rows have log p of the policy that sampled them
    double clip_low = 0.2;          // how far that policy's ratio may go below 1, and above
    double clip_high = 0.2;
    size_t ranks = 1; // that share each sequence (context parallelism)
    bool distills() const { return kind == LossKind::DISTILL; }
    bool rows() const { return kind != LossKind::NLL && !distills(); } // have coefficients
    bool pairs() const { return rows() && kind != LossKind::GRPO; }
    // Floats of a row that LOAD brings, and numbers of a row that the head makes.
    size_t inputs() const { return rows() ? 2 + old_policy : 0; }
    size_t outputs() const { return rows() ? 4 + old_policy : 0; }
    // Whether ranks need the rows of whole sequences, of which each has only a part.
    bool joins() const { return pairs() && ranks > 1; }
    // Numbers of such a row that LOAD brings for pairs: its target, its document's start, feedback
    // and reference. They follow the position and the document's start that attention reads.
    size_t whole_inputs() const { return pairs() ? 4 : 0; }
    size_t shared_numbers() const { return 2 + whole_inputs(); }
};

// Sums over a micro-batch: the loss, and figures to log. For pairs, margin sums by how much the
// chosen sequence leads, and correct counts how often it does.
struct LossSums {
    double loss = 0, margin = 0, correct = 0, clipped = 0; // adjacent: ranks add them as an array

    // Add the sums of another micro-batch.
    void add(const LossSums& x, Objective o) {
        loss += x.loss;
        // Without coefficients nothing has written the others.
        if (!o.rows()) return;
        margin += x.margin;
        correct += x.correct;
        if (o.old_policy) clipped += x.clipped;
    }
};

// The rows of a micro-batch: what an objective reads and writes.
template <typename A> struct ObjectiveRows {
    A *coefficient, *value, *margin, *correct; // (N) each
    const A* losses;                           // (N)
    const int *targets, *doc_start;            // (B,T)
    // (B,T) 1 in a rejected or undesirable answer, or GRPO's advantage; log p of the reference
    const float *feedback, *reference;
    size_t T;
    // With Objective::old_policy: log p of the policy that sampled (B,T), and where it clips (N).
    const float* old = nullptr;
    A* clipped = nullptr;
};

// ----------------------------------------------------------------------------
// a pair

// The sums over one sequence.
struct SequenceSum {
    double y = 0;         // log p of the policy
    double reference = 0; // and of the reference
    double targets = 0;
    size_t end = 0; // the row after the last
};

// The loss of a pair, its margin, and the coefficients of the rows of both sequences.
struct PairLoss {
    double value;
    double margin;
    double of_chosen;
    double of_rejected;
};

// The probability that a difference of log-likelihoods gives to one answer being the better.
LLMC_HD inline double sigmoid(double x) { return 1 / (1 + exp(-x)); }
// -log sigmoid(x), written so that exp does not overflow.
LLMC_HD inline double minus_log_sigmoid(double x) {
    return (x < 0 ? -x : 0) + log1p(exp(x < 0 ? x : -x));
}

// The loss of one pair, by the table at the head of this file. w (won) is the chosen sequence, l
// (lost) the rejected one; each has at least one target.
LLMC_HD inline PairLoss pair_loss(Objective o, const SequenceSum& w, const SequenceSum& l) {
    using enum LossKind;
    double mean_w = w.y / w.targets, mean_l = l.y / l.targets;
    switch (o.kind) {
    case NLL:
    case DISTILL:
    case KTO:
    case GRPO: break;

    // The policy's lead, less the reference's. Label smoothing takes a part e of pairs as swapped.
    case DPO: {
        double e = o.smoothing;
        double u = o.beta * (w.y - w.reference - (l.y - l.reference));
        double c = o.beta * ((1 - e) * sigmoid(-u) - e * sigmoid(u));
        return {(1 - e) * minus_log_sigmoid(u) + e * minus_log_sigmoid(-u), u, c, -c};
    }

    // The lead should be 1 / (2 beta) and no more. Means are over tokens, as in the authors' code.
    case IPO: {
        double d = (w.y - w.reference) / w.targets - (l.y - l.reference) / l.targets;
        double off = d - 1 / (2 * o.beta);
        return {off * off, o.beta * d, -2 * off / w.targets, 2 * off / l.targets};
    }

    // The chosen sequence should be likelier per token, by the margin gamma.
    case SIMPO: {
        double u = o.beta * (mean_w - mean_l);
        double c = o.beta * sigmoid(o.gamma - u);
        return {minus_log_sigmoid(u - o.gamma), u, c / w.targets, -c / l.targets};
    }

    // The chosen sequence's own loss, and the ratio of the odds p / (1 - p) per token. p stays
    // below 1: the odds of a certain token would be infinite.
    case ORPO: {
        double none_w = -expm1(fmin(mean_w, -1e-12));
        double none_l = -expm1(fmin(mean_l, -1e-12));
        double odds = mean_w - log(none_w) - (mean_l - log(none_l));
        double c = o.beta * sigmoid(-odds);
        return {-mean_w + o.beta * minus_log_sigmoid(odds), o.beta * (mean_w - mean_l),
                (1 + c / none_w) / w.targets, -c / none_l / l.targets};
    }
    }
    return {};
}

// The KTO loss of one answer, by how far it lies on its own side of the reference point z.
LLMC_HD inline PairLoss answer_loss(Objective o, const SequenceSum& a, bool undesirable, double z) {
    double sign = undesirable ? -1 : 1;
    double weight = undesirable ? o.undesirable : o.desirable;
    // sigmoid'(u) is small far from the reference point, so such answers weigh little.
    double u = sign * o.beta * (a.y - a.reference - z);
    // The loss before its weight: 1/2 at the point itself, 0 far on the right side.
    double missing = sigmoid(-u);
    double slope = o.beta * sigmoid(u) * missing;
    return {weight * missing, u, sign * weight * slope, 0};
}

// A thread that walks alone, as on the CPU. On a GPU the lanes of a warp walk together.
struct OneWalker {
    size_t lane = 0, lanes = 1;
    LLMC_HD void add(double& sum, double x) const { sum += x; }
    LLMC_HD size_t count(bool x) const { return x; }
};

// Add up the sequence that begins in row n.
template <typename A, typename Walker>
LLMC_HD SequenceSum sum_sequence(const ObjectiveRows<A>& x, size_t n, const Walker& walker) {
    // The sequence ends where another begins, or with the window.
    SequenceSum sum;
    sum.end = n;
    size_t window_end = (n / x.T + 1) * x.T;
    for (size_t rows = walker.lanes; rows == walker.lanes; sum.end += rows) {
        size_t i = sum.end + walker.lane;
        bool inside = i < window_end && x.doc_start[i] == x.doc_start[n];
        rows = walker.count(inside);

        // Rows of the prompt have no target, and add 0.
        bool counts = inside && x.targets[i] >= 0;
        double y = 0, reference = 0;
        if (counts) {
            y = -double(x.losses[i]);
            reference = double(x.reference[i]);
        }
        walker.add(sum.y, y);
        walker.add(sum.reference, reference);
        sum.targets += double(walker.count(counts));
    }
    return sum;
}

// One term of a row's loss, and its derivative by log p.
struct RowTerm {
    double value, slope;
    bool clipped = false;
};

// The estimate of KL at x, the log of the policy's ratio to the reference. The limit of 20 on an
// exponent, here and below, bounds the weight of a token.
LLMC_HD inline RowTerm kl_term(Objective o, double x) {
    if (o.beta == 0) return {0, 0};
    if (o.kl == KlEstimate::K2) return {x * x / 2, x};
    double inverse = exp(fmin(-x, 20.0)); // p of the reference over p of the policy
    return {inverse - 1 + x, 1 - inverse};
}

// The surrogate of an advantage a, where the log of the ratio to the old policy is x. A ratio that
// has already gone as far as it may has no gradient to go on; the way back is free.
LLMC_HD inline RowTerm clipped_term(Objective o, double a, double x) {
    double ratio = exp(fmax(-20.0, fmin(x, 20.0)));
    double bound = a > 0 ? 1 + o.clip_high : 1 - o.clip_low;
    bool clipped = a > 0 ? ratio > bound : a < 0 && ratio < bound;
    return {-a * (clipped ? bound : ratio), clipped ? 0 : -a * ratio, clipped};
}

// One row of a sampled answer (GRPO).
template <typename A>
LLMC_HD void rollout_row(const ObjectiveRows<A>& x, Objective o, size_t n) {
    double nll = x.losses[n];
    double advantage = x.feedback[n];
    RowTerm kl = kl_term(o, -nll - double(x.reference[n]));
    RowTerm gain = {advantage * nll, -advantage};
    if (o.old_policy)
        gain = clipped_term(o, advantage, -nll - double(x.old[n]));

    // A row without a target is not a token of an answer and counts for nothing.
    bool counts = x.targets[n] >= 0;
    x.coefficient[n] = A(counts ? -gain.slope - o.beta * kl.slope : 0);
    x.value[n] = A(counts ? gain.value + o.beta * kl.value : 0);
    x.margin[n] = A(counts ? kl.value : 0);
    x.correct[n] = A(counts ? nll : 0);
    if (o.old_policy)
        x.clipped[n] = A(counts && gain.clipped);
}

// Whether a pair begins in row n: with the first row of a chosen sequence. The rejected one lies
// right after it. For KTO each sequence counts alone.
template <typename A>
LLMC_HD bool begins_pair(const ObjectiveRows<A>& x, Objective o, size_t n) {
    bool chosen = x.feedback[n] == 0 || o.kind == LossKind::KTO;
    return chosen && x.doc_start[n] == int(n % x.T);
}

// Fill in all rows of the pair that begins in row n. A chosen sequence without a rejected one, such
// as padding, gets zeros.
template <typename A, typename Walker>
LLMC_HD void objective_pair(const ObjectiveRows<A>& x, Objective o, size_t n,
                            const Walker& walker) {
    bool alone = o.kind == LossKind::KTO;
    SequenceSum chosen = sum_sequence(x, n, walker), other;
    other.end = chosen.end;
    if (!alone && chosen.end % x.T != 0 && x.feedback[chosen.end] != 0)
        other = sum_sequence(x, chosen.end, walker);

    // The pair's loss. A sequence without targets makes no pair.
    bool pair = chosen.targets > 0 && other.targets > 0;
    PairLoss loss = {};
    if (pair)
        loss = pair_loss(o, chosen, other);
    // For KTO, compare the answer with the reference point z.
    double z = x.reference[(n / x.T + 1) * x.T - 1];
    if (alone && chosen.targets > 0)
        loss = answer_loss(o, chosen, x.feedback[n] != 0, z);

    // Give each row its coefficient. The pair's own numbers stand in its first row.
    for (size_t i = n + walker.lane; i < other.end; i += walker.lanes) {
        double c = i < chosen.end ? loss.of_chosen : loss.of_rejected;
        x.coefficient[i] = x.targets[i] < 0 ? A(0) : A(c);
        x.value[i] = A(i == n ? loss.value : 0);
        x.margin[i] = A(i == n ? loss.margin : 0);
        x.correct[i] = A(i == n && loss.margin > 0);
    }
}

// ----------------------------------------------------------------------------
// CPU

// Fill in coefficient, value, margin and correct of all N rows.
template <typename A>
void objective(const ObjectiveRows<A>& x, Objective o, size_t N, Cpu) {
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        if (o.kind == LossKind::GRPO)
            rollout_row(x, o, n);
        else if (begins_pair(x, o, n))
            objective_pair(x, o, n, OneWalker());
    }
}

// Put rows (B,t) of this rank at their places in whole sequences (B,T), or take them from there.
// Other rows are untouched. positions (B,t) are places in sequences of T rows.
template <bool TO_WHOLE, typename A>
void place_rows(A* to, const A* from, const int* positions, size_t B, size_t t, size_t T, Cpu) {
    for (size_t n = 0; n < B * t; n++) {
        size_t place = n / t * T + size_t(positions[n]);
        to[TO_WHOLE ? place : n] = from[TO_WHOLE ? n : place];
    }
}

// The number of pairs in a window, which the loss is a mean over: rejected sequences with a target,
// or for KTO all sequences with one. It does not depend on how a batch is cut.
inline int64_t count_pairs(const int* targets, const int* doc_start, const float* feedback,
                           size_t T, LossKind kind = LossKind::DPO) { // (T) each
    int64_t pairs = 0;
    bool counted = false; // a target of the sequence has been seen
    for (size_t i = 0; i < T; i++) {
        counted &= doc_start[i] != int(i);
        bool counts = (feedback[i] != 0 || kind == LossKind::KTO) && targets[i] >= 0;
        pairs += counts && !counted;
        counted |= counts;
    }
    return pairs;
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

// A warp adds its lanes' numbers in their order, so that its sums have the bits of one thread's.
struct WarpWalker {
    size_t lane, lanes = 32;
    __device__ void add(double& sum, double x) const {
        for (int l = 0; l < 32; l++)
            sum += __shfl_sync(ALL_LANES, x, l);
    }
    __device__ size_t count(bool x) const {
        return __popc(__ballot_sync(ALL_LANES, x));
    }
};

// A warp has 32 rows, and takes the pairs that begin there one after the other. Most warps have
// none: pairs are few, and as long as their answers. GRPO's rows stand alone.
static __global__ void objective_kernel(ObjectiveRows<float> x, Objective o, size_t N) {
    size_t n = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (o.kind == LossKind::GRPO) {
        if (n < N) rollout_row(x, o, n);
        return;
    }
    WarpWalker walker = {threadIdx.x % 32};
    size_t first = n - walker.lane;
    unsigned begin = __ballot_sync(ALL_LANES, n < N && begins_pair(x, o, n));
    for (; begin != 0; begin &= begin - 1) {
        size_t pair = first + __ffs(begin) - 1;
        objective_pair(x, o, pair, walker);
    }
}

template <bool TO_WHOLE>
__global__ void place_rows_kernel(float* to, const float* from, const int* positions, size_t N,
                                  size_t t, size_t T) {
    size_t n = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (n >= N) return;
    size_t place = n / t * T + size_t(positions[n]);
    to[TO_WHOLE ? place : n] = from[TO_WHOLE ? n : place];
}

// ----------------------------------------------------------------------------
// launchers

inline void objective(const ObjectiveRows<float>& x, Objective o, size_t N, cudaStream_t stream) {
    launch(objective_kernel, unsigned(ceil_div(N, 128)), 128, stream, x, o, N);
}

template <bool TO_WHOLE>
void place_rows(float* to, const float* from, const int* positions, size_t B, size_t t, size_t T,
                cudaStream_t stream) {
    size_t N = B * t;
    unsigned blocks = unsigned(ceil_div(N, 128));
    launch(place_rows_kernel<TO_WHOLE>, blocks, 128, stream, to, from, positions, N, t, T);
}
#endif

} // namespace llmc
