// muon.cuh - Muon: momentum orthogonalised by Newton-Schulz - arXiv:2502.16982, arXiv:2510.05491
//   m = mu m + (1 - mu) g,   u = mu m + (1 - mu) g (Nesterov) or m,   x = u / (s |u| + eps)
//   k times:  A = x x^T, or x^T x where that is smaller,   x = a x + (b A + c A A) x
//   w -= lr (f x + decay w),   f as `scale` says; cautious: decay only where x w >= 0
//   A singular value s of x becomes a s + b s^3 + c s^5 in each iteration, so all approach 1.
//   NorMuon: v = b2 v + (1 - b2) mean (f x)^2 of each row, or column where there are more of those;
//            f x / sqrt(v) then, brought back to the norm of f x
//   MuonEq (arXiv:2603.28254): before, u = diag(1 / max(|row|, 1e-6)) u, brought back to its norm
//   Muon+ (arXiv:2602.21545): after the iterations, x sqrt(min(r,c)) / |x|
//   grad, m (n) acc   a table of tensors in one bucket; u takes grad's place, and f x takes u's
//   x (r,c) bf16, or float and double in those precisions: fp16 has no room for small gradients
//   v (max(r,c)) acc
//   Contract: m, u, v =.  Nothing is written if !scale->finite. A matrix's result depends on its
//             own elements alone.  Bitwise repeatable where products are (matmul.cuh).
//   Cost: k (4 m^2 n + 2 m^3) FLOPs for a matrix of m x n, m <= n.
//   To copy: this file, adamw.cuh, adamw_formats.cuh, element_type.h, elements.h, elementwise.cuh,
//            gpu.h, grad_norm.cuh, loss_scale.cuh, matmul.cuh, memory.h, rand.h, small_states.cuh,
//            step_scale.h, tensor_table.cuh, types.h and cuda_common.h.
#pragma once
#include "adamw.cuh"
#include "adamw_formats.cuh"
#include "cuda_common.h"
#include "element_type.h"
#include "elementwise.cuh"
#include "grad_norm.cuh"
#include "matmul.cuh"
#include "memory.h"
#include "small_states.cuh"
#include "step_scale.h"
#include "tensor_table.cuh"
#include "types.h"
#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace llmc {

// ----------------------------------------------------------------------------
// settings

// One polynomial for each iteration, and the factor of the norm that keeps them from diverging.
struct NewtonSchulz {
    const char* name;
    std::vector<std::array<double, 3>> steps; // a, b, c
    double safety = 1;
};

// Keller Jordan's Muon, torch.optim.Muon. plan_flags.h has other tables and scales.
inline const NewtonSchulz SIMPLE = {"simple", std::vector(5, std::array{3.4445, -4.7750, 2.0315})};

// The factor f of the orthogonalised matrix, Keller Jordan's.
inline double shape_scale(double r, double c) {
    return std::sqrt(std::max(1.0, r / c));
}

// The settings of a step.
struct Muon {
    float momentum = 0.95f, first_momentum = 0.95f; // from the second to the first
    int momentum_steps = 1;                         // in so many steps
    float decay = 0;
    bool nesterov = true, cautious = false;
    float beta2 = 0.95f; // NorMuon's
    bool muoneq = false, plus = false; // MuonEq's rows, Muon+'s norm
    double (*scale)(double r, double c) = shape_scale;
    const NewtonSchulz* table = &SIMPLE;
    float eps = 1e-7f;
    bool stochastic = false; // as AdamW's
    uint64_t seed = 0;
    int64_t step = 1;

    // AdamW's part: [MuonGroup] the rate divided by the matrices', decay and beta1 (-1: theirs).
    std::array<float, 8> rates = {1, 1, 1, 1, 1, 1, 1, 1};
    float others_decay = 0, others_beta1 = -1;
    bool decays_vectors = false, apart = false; // apart: where AdamW updates matrices too
};

// The type of x.
template <typename T>
using orthogonal_t = std::conditional_t<std::is_same_v<T, fp16>, bf16, T>;

// ----------------------------------------------------------------------------
// one element: rules, as update_tensors() (adamw.cuh) applies them

// u in place of the gradient. The weight of this update is the gradient itself.
template <typename A> struct MomentumRule {
    A scale, mu;
    bool nesterov;
    LLMC_HD MomentumRule(const Muon& h, const StepScale& now)
        : scale(now.scale), nesterov(h.nesterov) {
        float share = float(now.step - 1) / float(h.momentum_steps);
        if (share > 1) share = 1;
        mu = h.first_momentum + (h.momentum - h.first_momentum) * share;
    }
    LLMC_HD A operator()(A& m, A&, A grad, A, A, A) const {
        A g = (1 - mu) * (grad * scale);
        m = std::fma(mu, m, g);
        return nesterov ? std::fma(mu, m, g) : m;
    }
};

// The weight, from f x in place of the gradient.
template <typename A> struct MuonRule {
    A lr;
    bool cautious;
    LLMC_HD MuonRule(const Muon& h, const StepScale& now)
        : lr(rate_of(now, 0)), cautious(h.cautious) {}
    LLMC_HD A operator()(A&, A&, A x, A w, A decay, A rate) const {
        A kept = cautious && x * w < 0 ? 0 : decay;
        return std::fma(-(lr * rate), std::fma(kept, w, x), w);
    }
};

// Update the momentum of all tensors, and put u where the gradient was.
template <typename T, typename S>
void muon_momentum(acc_t<T>* grad, void* m, States states,      // the bucket's
                   const TensorRow* rows, size_t count, Muon h, // (count)
                   const StepScale* scale, S where) {
    typedef acc_t<T> A;
    FloatMasters<A> u = {grad, nullptr};
    NoMoment none;
    auto update = [&](const auto& moment) {
        update_tensors<MomentumRule, T>(h, u, moment, none, grad, rows, count, scale, where);
    };
    if (states == States::BF16) {
        update(Bf16Moment<ROUND_M>{static_cast<bf16*>(m), h.stochastic, h.seed});
    } else {
        update(FloatMoment<A>{static_cast<A*>(m)});
    }
}

// Update all weights by f x, which lies where the gradient was.
template <typename T, typename S>
void muon_update(const AdamWMemory<T>& x, const TensorRow* rows, size_t count, // (count)
                 Muon h, const StepScale* scale, S where) {
    NoMoment none;
    with_weights(x, h.stochastic, h.seed, [&](const auto& weights) {
        update_tensors<MuonRule, T>(h, weights, none, none, x.grad, rows, count, scale, where);
    });
}

// ----------------------------------------------------------------------------
// one matrix

// The three products of an iteration on x (r,c). m is the smaller side.
struct MuonProducts {
    Product gram, square, apply;
};
inline MuonProducts muon_products(size_t r, size_t c) {
    bool tall = r > c;
    size_t m = std::min(r, c);
    Strides rows = {c, 1};
    Strides columns = {1, c};
    Strides small = {m, 1};
    Strides first = tall ? columns : rows;
    Strides second = tall ? rows : columns;

    // A = x^T x or x x^T, A A, and x += x P or P x.
    MuonProducts p;
    p.gram = {m, m, std::max(r, c), first, second, m};
    p.square = {m, m, m, small, small, m};
    p.apply = {r, c, m, tall ? rows : small, tall ? small : rows, c};
    p.apply.accumulate = true;
    return p;
}

// Memory for one matrix of up to r x c elements. All parts start at multiples of 256 bytes.
template <typename N> struct MuonRoom {
    N *x, *next;      // (r,c)
    N *gram, *square; // (m,m)
    double* sums;     // one for each chunk of the norm
    StepScale* norm;  // (2)

    // Point at memory, or at nothing where `base` is null. Returns the bytes.
    size_t bind(unsigned char* base, size_t r, size_t c) {
        size_t m = std::min(r, c), at = 0;
        auto take = [&](auto*& part, size_t count) {
            typedef std::remove_reference_t<decltype(part)> P;
            part = base ? reinterpret_cast<P>(base + at) : nullptr;
            at += round_up(count * sizeof(*part), size_t(256));
        };
        take(x, r * c);
        take(next, r * c);
        take(gram, m * m);
        take(square, m * m);
        take(sums, ceil_div(r * c, GRAD_NORM_CHUNK));
        take(norm, 2);
        return at;
    }
};

// The scratch that the products of a matrix need.
template <typename N, typename S> size_t muon_scratch_bytes(size_t r, size_t c, S where) {
    MuonProducts p = muon_products(r, c);
    Type t = type_of<N>();
    return matmul_scratch_bytes({p.gram, p.square, p.apply}, t, t, where);
}

// Functions of elements that map_elements() applies.
template <typename A> struct ElementMix {
    A b, c;
    LLMC_HD A operator()(A x, A y) const { return std::fma(b, x, c * y); }
};
template <typename A> struct ElementNormed {
    const StepScale* norm;
    A safety, eps;
    const StepScale* times = nullptr; // another norm
    LLMC_HD A operator()(A x) const {
        A y = x / (A(norm->norm) * safety + eps);
        return times ? y * A(times->norm) : y;
    }
};

// NorMuon's lines of u: its rows, or its columns if there are more. MuonEq's: its rows; v is null.
template <typename A> struct MuonLines {
    A *u, *v; // (r,c) (count)
    size_t count, length;
    size_t apart, step; // elements from line to line, and within one
    A beta2;
    const StepScale* scale;
    LLMC_HD void divide(size_t line) const {
        A* x = u + line * apart;
        A sum = 0;
        for (size_t k = 0; k < length; k++)
            sum = std::fma(x[k * step], x[k * step], sum);
        if (v && scale->finite)
            v[line] = std::fma(beta2, v[line], (1 - beta2) * (sum / A(length)));
        A square = v ? v[line] : sum;
        A least = v ? 1e-10 : 1e-12;
        A root = std::sqrt(std::fmax(square, least));
        for (size_t k = 0; k < length; k++)
            x[k * step] /= root;
    }
};
template <typename A> void divide_lines(const MuonLines<A>& lines, Cpu) {
    #pragma omp parallel for
    for (size_t i = 0; i < lines.count; i++)
        lines.divide(i);
}
#if LLMC_KERNELS
static __global__ void divide_lines_kernel(MuonLines<float> lines) {
    size_t i = blockIdx.x * 32 + threadIdx.x; // lines are few: a warp a block
    if (i < lines.count) lines.divide(i);
}
inline void divide_lines(const MuonLines<float>& lines, cudaStream_t stream) {
    launch(divide_lines_kernel, unsigned(ceil_div(lines.count, 32)), 32, stream, lines);
}
#endif

// u (r,c) = f times its nearest orthogonal matrix, nearly. v, scale: NorMuon's, or null.
template <typename N, typename A, typename S>
void muon_orthogonalise(A* u, size_t r, size_t c, const Muon& h, MuonRoom<N> room, Blas& blas,
                        S where, A* v = nullptr, const StepScale* scale = nullptr) {
    const NewtonSchulz& table = *h.table;
    size_t n = r * c;
    size_t m = std::min(r, c);
    auto norm_of_u = [&](StepScale* norm) {
        device_zero(norm, sizeof(StepScale), where);
        grad_squares(room.sums, u, n, where);
        grad_norm_finish(norm, room.sums, ceil_div(n, GRAD_NORM_CHUNK), 0, where);
    };

    // Divide each line, and bring the norm back.
    auto even_out = [&](const MuonLines<A>& lines) {
        norm_of_u(room.norm);
        divide_lines(lines, where);
        norm_of_u(room.norm + 1);
        ElementNormed<A> back = {room.norm + 1, 1, A(1e-30), room.norm};
        map_elements(u, n, back, where, u);
    };

    // MuonEq. (The paper's u is shorter where a row is clamped; dividing by its norm undoes that.)
    if (h.muoneq)
        even_out({u, nullptr, r, c, c, 1, 0, scale});

    // Divide by the norm, which the device keeps.
    norm_of_u(room.norm);
    map_elements(room.x, n, ElementNormed<A>{room.norm, A(table.safety), A(h.eps)}, where, u);

    // Iterate.
    auto product = [&](N* out, const N* a, const N* b, const Product& p) {
        const N* none = nullptr;
        matmul(out, a, b, none, none, p, blas, where);
    };
    MuonProducts p = muon_products(r, c);
    bool tall = r > c;
    for (auto [a, b, of_square] : table.steps) {
        // P = b A + c A A
        product(room.gram, room.x, room.x, p.gram);
        product(room.square, room.gram, room.gram, p.square);
        ElementMix<A> mix = {A(b), A(of_square)};
        map_elements(room.gram, m * m, mix, where, room.gram, room.square);

        // x = a x + P x
        ElementTimes<A> times = {A(a)};
        map_elements(room.next, n, times, where, room.x);
        const N* left = tall ? room.x : room.gram;
        const N* right = tall ? room.gram : room.x;
        product(room.next, left, right, p.apply);
        std::swap(room.x, room.next);
    }

    // Scale. Muon+: to the norm of f times an orthogonal matrix.
    A factor = A(h.scale(double(r), double(c)));
    map_elements(u, n, ElementTimes<A>{factor}, where, room.x);
    if (h.plus) {
        norm_of_u(room.norm);
        A share = 1 / (factor * std::sqrt(A(m)));
        map_elements(u, n, ElementNormed<A>{room.norm, share, A(1e-30)}, where, u);
    }
    if (!v) return;

    // NorMuon.
    MuonLines<A> lines = {u, v, r, c, c, 1, A(h.beta2), scale};
    if (r < c) lines = {u, v, c, r, 1, c, A(h.beta2), scale};
    even_out(lines);
}

} // namespace llmc
