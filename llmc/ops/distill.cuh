// distill.cuh - cross-entropy and the divergence from a teacher's softmax - arXiv:1503.02531
//   q = softmax(s / tau), p = softmax(t / tau),   s, t the student's and the teacher's logits
//   loss = (1-a) (log sum_v exp(s_v) - s_target) + a tau^2 sum_v p_v (log p_v - log q_v)
//   ds_v = (1-a) (softmax(s)_v - [v = target]) + a tau (q_v - p_v),   times scale
//   1. maxima     of both rows (crossentropy_max)      a sharded vocabulary: all-reduce max
//   2. sums       five of each row, named below        a sharded vocabulary: all-reduce sum
//   3. loss, backward
//   tau^2 keeps the gradient's size as tau grows: ds falls with 1 / tau twice.
//   student, teacher (N,Vp), columns from V on are padding
//   maxima (2,N)   sums (5,N)   losses (N)   all acc
//   targets (N): a negative one is ignored, with loss and gradient 0. A shard holds V columns of
//   the vocabulary, from vocab_start on.
//   Contract: all =.  backward writes the gradient over the student's logits, padding included.
//             Equal logits have the divergence 0 and the gradient 0, exactly. A teacher's logit of
//             -inf has probability 0. Bitwise repeatable.
//   Cost: memory-bound: maxima, sums and backward read both rows, backward writes the student's.
//   To copy: this file, crossentropy.cuh, fast_math.h, gpu.h, types.h and cuda_common.h.
#pragma once
#include "crossentropy.cuh"
#include "cuda_common.h"
#include "fast_math.h"
#include "types.h"

namespace llmc {

// How much the teacher counts, and how soft both softmaxes are.
struct Distillation {
    double share = 0.5;     // a
    double temperature = 1; // tau
};

// The sums of a row, in the order in which they lie in `sums`; m are the rows' maxima.
enum class DistillSum {
    PLAIN,   // exp(s - m_s)
    SOFT,    // exp((s - m_s) / tau)
    TEACHER, // exp((t - m_t) / tau)
    CROSS,   // exp((t - m_t) / tau) ((t - m_t) - (s - m_s)) / tau
    TARGET,  // the target's s, from the shard that has it
    COUNT
};
constexpr size_t DISTILL_SUMS = size_t(DistillSum::COUNT);

// The rows that the three steps share: logits, and what is known of each row.
template <typename T> struct DistillRows {
    T* student;         // (N,Vp)
    const T* teacher;   // (N,Vp)
    const int* targets; // (N)
    acc_t<T>* maxima;   // (2,N) the student's, then the teacher's
    acc_t<T>* sums;     // (5,N)
    size_t N, V, Vp, vocab_start;

    LLMC_HD acc_t<T>& sum(DistillSum which, size_t n) const { return sums[size_t(which) * N + n]; }
    LLMC_HD acc_t<T> student_max(size_t n) const { return maxima[n]; }
    LLMC_HD acc_t<T> teacher_max(size_t n) const { return maxima[N + n]; }

    // Return whether this shard has row n's target, and its column in the shard.
    LLMC_HD bool has_target(size_t n, size_t* own) const {
        return in_shard(targets[n], vocab_start, V, own);
    }
};

// A column's part of CROSS: nothing where the teacher's probability is 0, or its logit -inf.
template <typename A> LLMC_HD A cross_term(A weight, A lead) {
    return weight > 0 ? weight * lead : 0;
}

// The loss of row n from its sums.
template <typename T> LLMC_HD acc_t<T> distill_loss_of(const DistillRows<T>& x, Distillation d,
                                                       size_t n) {
    typedef acc_t<T> A;
    if (x.targets[n] < 0) return 0;
    A plain = std::log(x.sum(DistillSum::PLAIN, n)) + x.student_max(n);
    A nll = plain - x.sum(DistillSum::TARGET, n);

    // log q and log p are differences to the logs of their sums, which the divergence takes once.
    A soft = x.sum(DistillSum::SOFT, n);
    A teacher = x.sum(DistillSum::TEACHER, n);
    A divergence = x.sum(DistillSum::CROSS, n) / teacher + std::log(soft) - std::log(teacher);
    A tau = A(d.temperature);
    return A(1 - d.share) * nll + A(d.share) * tau * tau * divergence;
}

// The factors of a row's gradient.
//   f.soft q - f.teacher p, as it is summed here, is exactly 0 where q = p and the factors are one:
//   a compiler may fuse a product with the sum after it, and then two equal products differ.
template <typename A> struct DistillFactors {
    A plain, soft, teacher, target;
    LLMC_HD A lead(A student, A teachers) const {
        return soft * (student - teachers) + (soft - teacher) * teachers;
    }
};
template <typename T>
LLMC_HD DistillFactors<acc_t<T>> distill_factors(const DistillRows<T>& x, Distillation d,
                                                 GradientScale scale, size_t n) {
    typedef acc_t<T> A;
    A all = scale.template of_row<A>(n);
    A hard = A(1 - d.share) * all;
    A soft = A(d.share * d.temperature) * all;
    return {hard / x.sum(DistillSum::PLAIN, n), soft / x.sum(DistillSum::SOFT, n),
            soft / x.sum(DistillSum::TEACHER, n), hard};
}

// ----------------------------------------------------------------------------
// CPU

// Step 1: the maxima of this shard's columns.
template <typename T, typename S> void distill_max(const DistillRows<T>& x, S where) {
    crossentropy_max(x.maxima, x.student, x.N, x.V, x.Vp, where);
    crossentropy_max(x.maxima + x.N, x.teacher, x.N, x.V, x.Vp, where);
}

// Step 2: the sums over this shard's columns.
template <typename T> void distill_sums(const DistillRows<T>& x, Distillation d, Cpu) {
    typedef acc_t<T> A;
    A rate = A(1 / d.temperature);
    #pragma omp parallel for
    for (size_t n = 0; n < x.N; n++) {
        const T* s = x.student + n * x.Vp; // (Vp)
        const T* t = x.teacher + n * x.Vp; // (Vp)
        A student_max = x.student_max(n);
        A teacher_max = x.teacher_max(n);

        // Sum in one reading of both rows.
        A plain = 0, soft = 0, teacher = 0, cross = 0;
        #pragma omp simd reduction(+ : plain, soft, teacher, cross)
        for (size_t v = 0; v < x.V; v++) {
            A of_student = to_acc(s[v]) - student_max;
            A of_teacher = to_acc(t[v]) - teacher_max;
            A weight = fast_exp_nonpositive(of_teacher * rate);
            plain += fast_exp_nonpositive(of_student);
            soft += fast_exp_nonpositive(of_student * rate);
            teacher += weight;
            cross += cross_term(weight, (of_teacher - of_student) * rate);
        }

        // Shards without the target give 0, so that the sum over shards is its logit.
        size_t own;
        x.sum(DistillSum::TARGET, n) = x.has_target(n, &own) ? to_acc(s[own]) : 0;
        x.sum(DistillSum::PLAIN, n) = plain;
        x.sum(DistillSum::SOFT, n) = soft;
        x.sum(DistillSum::TEACHER, n) = teacher;
        x.sum(DistillSum::CROSS, n) = cross;
    }
}

// Step 3: the losses.
template <typename T>
void distill_loss(acc_t<T>* losses, const DistillRows<T>& x, Distillation d, Cpu) { // (N)
    for (size_t n = 0; n < x.N; n++)
        losses[n] = distill_loss_of(x, d, n);
}

// And the gradient, over the student's logits.
template <typename T>
void distill_backward(const DistillRows<T>& x, Distillation d, GradientScale scale, Cpu) {
    typedef acc_t<T> A;
    A rate = A(1 / d.temperature);
    #pragma omp parallel for
    for (size_t n = 0; n < x.N; n++) {
        T* s = x.student + n * x.Vp;       // (Vp)
        const T* t = x.teacher + n * x.Vp; // (Vp)
        size_t own, counted = x.targets[n] < 0 ? 0 : x.V;
        bool here = x.has_target(n, &own);
        DistillFactors<A> f = distill_factors(x, d, scale, n);

        // Columns that do not count have no gradient: all of an ignored row, and the padding.
        for (size_t v = counted; v < x.Vp; v++)
            s[v] = from_acc<T>(0);
        for (size_t v = 0; v < counted; v++) {
            // Both models at the temperature, then the student alone.
            A logit = to_acc(s[v]);
            A of_student = logit - x.student_max(n);
            A of_teacher = to_acc(t[v]) - x.teacher_max(n);
            A g = f.lead(fast_exp_nonpositive(of_student * rate),
                         fast_exp_nonpositive(of_teacher * rate));
            g += f.plain * fast_exp_nonpositive(of_student);
            if (here && v == own)
                g -= f.target;
            if (scale.softcap != 0)
                g *= scale.cap_slope(logit);
            s[v] = from_acc<T>(g);
        }
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

// A block works on a row; a thread takes P neighbouring logits at a time.
constexpr int DISTILL_WARPS = 8;
constexpr int DISTILL_THREADS = 32 * DISTILL_WARPS;

// Step 2.
template <typename T, int P>
__global__ void distill_sums_kernel(DistillRows<T> x, Distillation d) {
    size_t n = blockIdx.x, own;
    const T* s = x.student + n * x.Vp; // (Vp)
    const T* t = x.teacher + n * x.Vp; // (Vp)
    float rate = float(1 / d.temperature);

    // Sum this thread's columns.
    float sums[4] = {};
    for (size_t v = threadIdx.x * P; v < x.V; v += DISTILL_THREADS * P) {
        Pack<T, P> student = load<P>(s + v), teacher = load<P>(t + v);
        for (int k = 0; k < P; k++) {
            if (v + k >= x.V) continue;
            float of_student = to_float(student.v[k]) - x.student_max(n);
            float of_teacher = to_float(teacher.v[k]) - x.teacher_max(n);
            float weight = expf(of_teacher * rate);
            sums[int(DistillSum::PLAIN)] += expf(of_student);
            sums[int(DistillSum::SOFT)] += expf(of_student * rate);
            sums[int(DistillSum::TEACHER)] += weight;
            sums[int(DistillSum::CROSS)] += cross_term(weight, (of_teacher - of_student) * rate);
        }
    }

    // Add the threads' sums. One thread writes them, and the target's logit.
    block_sums<DISTILL_WARPS>(sums);
    if (threadIdx.x > 0) return;
    for (size_t k = 0; k < 4; k++)
        x.sums[k * x.N + n] = sums[k];
    x.sum(DistillSum::TARGET, n) = x.has_target(n, &own) ? to_float(s[own]) : 0;
}

// Step 3: one thread a row.
template <typename T>
__global__ void distill_loss_kernel(float* losses, DistillRows<T> x, Distillation d) {
    size_t n = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (n < x.N)
        losses[n] = distill_loss_of(x, d, n);
}

// And the gradient. Each thread writes only what it has read.
template <typename T, int P>
__global__ void distill_backward_kernel(DistillRows<T> x, Distillation d, GradientScale scale) {
    size_t n = blockIdx.x, own;
    T* s = x.student + n * x.Vp;       // (Vp)
    const T* t = x.teacher + n * x.Vp; // (Vp)
    bool here = x.has_target(n, &own);
    size_t counted = x.targets[n] < 0 ? 0 : x.V;
    float rate = float(1 / d.temperature);
    DistillFactors<float> f = distill_factors(x, d, scale, n);

    // Cover all of Vp: padding and ignored rows get zeros.
    for (size_t v = threadIdx.x * P; v < x.Vp; v += DISTILL_THREADS * P) {
        Pack<T, P> student = load<P>(s + v), teacher = load<P>(t + v), gradient = {};
        for (int k = 0; k < P; k++) {
            if (v + k >= counted) continue;
            float logit = to_float(student.v[k]);
            float of_student = logit - x.student_max(n);
            float of_teacher = to_float(teacher.v[k]) - x.teacher_max(n);
            float g = f.lead(expf(of_student * rate), expf(of_teacher * rate));
            g += f.plain * expf(of_student);
            if (here && v + k == own)
                g -= f.target;
            if (scale.softcap != 0)
                g *= scale.cap_slope(logit);
            gradient.v[k] = from_acc<T>(g);
        }
        store(s + v, gradient);
    }
}

// ----------------------------------------------------------------------------
// launchers

// Step 2 and step 3: any N, V and alignment.
template <typename T>
void distill_sums(const DistillRows<T>& x, Distillation d, cudaStream_t stream) {
    bool vector = can_vectorize<T>(x.Vp, x.student, x.teacher);
    launch(vector ? distill_sums_kernel<T, VECTOR<T>> : distill_sums_kernel<T, 1>,
           unsigned(x.N), DISTILL_THREADS, stream,
           x, d);
}
template <typename T>
void distill_loss(float* losses, const DistillRows<T>& x, Distillation d, cudaStream_t stream) {
    launch(distill_loss_kernel<T>, unsigned(ceil_div(x.N, 128)), 128, stream, losses, x, d);
}
template <typename T>
void distill_backward(const DistillRows<T>& x, Distillation d, GradientScale scale,
                      cudaStream_t stream) {
    bool vector = can_vectorize<T>(x.Vp, x.student, x.teacher);
    launch(vector ? distill_backward_kernel<T, VECTOR<T>> : distill_backward_kernel<T, 1>,
           unsigned(x.N), DISTILL_THREADS, stream,
           x, d, scale);
}
#endif

} // namespace llmc
