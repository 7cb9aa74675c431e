// crossentropy.cuh - cross-entropy over rows of logits, in three functions - arXiv:1909.08053
// section 3 for the split
//   loss = log(sum_v exp(l_v)) - l_target,   dl_v = (exp(l_v) / sum - [v = target]) * scale
//   1. max     row maximum                      (vocabulary-parallel: all-reduce max)
//   2. sum     sum of exp(l - max), target logit (all-reduce sum)
//   3. loss, backward
//   logits (N,Vp), columns from V on are padding   targets (N), negative: ignored, loss and
//   gradient 0
//   row_max, sum_exp, target_logit, losses (N) acc
//   Contract: all =; backward writes the gradient over the logits, padding included.  Bitwise
//   repeatable.
//   Cost: memory-bound: max and sum read the logits, backward reads and writes them.
//   To copy: this file and common.h.
#pragma once
#include "common.h"

// ----------------------------------------------------------------------------
// CPU

template <typename T>
void crossentropy_max(acc_t<T>* row_max, const T* logits, size_t N, size_t V, size_t Vp, Cpu) {
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const T* l = logits + n * Vp;
        acc_t<T> most = to_acc(l[0]);
        #pragma omp simd reduction(max : most)
        for (size_t v = 0; v < V; v++) most = to_acc(l[v]) > most ? to_acc(l[v]) : most;
        row_max[n] = most;
    }
}

template <typename T>
void crossentropy_sum(acc_t<T>* sum_exp, acc_t<T>* target_logit, const T* logits,
                      const int* targets, const acc_t<T>* row_max, size_t N, size_t V, size_t Vp,
                      size_t vocab_start, Cpu) {
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const T* l = logits + n * Vp;
        acc_t<T> sum = 0, m = row_max[n];
        #pragma omp simd reduction(+ : sum)
        for (size_t v = 0; v < V; v++) sum += fast_exp_low(to_acc(l[v]) - m);
        sum_exp[n] = sum;
        int64_t own = int64_t(targets[n]) - int64_t(vocab_start);
        target_logit[n] = targets[n] >= 0 && own >= 0 && own < int64_t(V) ? to_acc(l[own]) : 0;
    }
}

template <typename A>
void crossentropy_loss(A* losses, const A* row_max, const A* sum_exp, const A* target_logit,
                       const int* targets, size_t N, Cpu) {
    for (size_t n = 0; n < N; n++)
        losses[n] = targets[n] < 0 ? 0 : std::log(sum_exp[n]) + row_max[n] - target_logit[n];
}

template <typename T>
void crossentropy_backward(T* logits, const int* targets, const acc_t<T>* row_max,
                           const acc_t<T>* sum_exp, acc_t<T> scale, size_t N, size_t V, size_t Vp,
                           size_t vocab_start, Cpu) {
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        T* l = logits + n * Vp;
        if (targets[n] < 0) {
            memset(l, 0, Vp * sizeof(T));
            continue;
        }
        acc_t<T> m = row_max[n], factor = scale / sum_exp[n];
        int64_t own = int64_t(targets[n]) - int64_t(vocab_start);
        bool here = own >= 0 && own < int64_t(V);
        acc_t<T> target = here ? to_acc(l[own]) : 0;
        #pragma omp simd
        for (size_t v = 0; v < V; v++) l[v] = from_acc<T>(fast_exp_low(to_acc(l[v]) - m) * factor);
        for (size_t v = V; v < Vp; v++) l[v] = from_acc<T>(0);
        if (here) l[own] = from_acc<T>(fast_exp_low(target - m) * factor - scale);
    }
}

// total = the sum of the losses, in order, in double
template <typename A> void crossentropy_total(double* total, const A* losses, size_t N, Cpu) {
    *total = 0;
    for (size_t n = 0; n < N; n++) *total += losses[n];
}
