// adamw.cuh - AdamW with decoupled decay, and SGD, over a table of tensors - arXiv:1711.05101
//   g = grad * scale,   m = b1 m + (1-b1) g,   v = b2 v + (1-b2) g^2
//   w -= lr * ((m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps) + decay * w)
//   SGD: w -= lr * (g + decay * w)
//   weight (n) T   master (n) float, or null where the weight is its own master
//   grad, m, v (n) acc   or a table of tensors in one bucket, in one call
//   scale: {scale, finite, step} as grad_norm_finish leaves them, with the step's learning rate if
//          the host has given one (else h.lr). A null scale means 1, true, h.step.
//   One loop and one kernel serve all rules and formats: a rule updates an element, and types say
//   how weights and moments are read and written. adamw_formats.cuh has those of fewer bits.
//   Contract: master, m, v updated. weight = the master rounded to nearest, ties to even. Nothing
//             is written if !scale->finite, and nothing between a table's tensors. Bitwise
//             repeatable; all versions give the same bits where the square root, the division and
//             fma are IEEE (a CPU, or nvcc without -use_fast_math).
//   Cost: memory-bound: reads grad, master, m, v; writes master, m, v, weight: 30 bytes a bf16
//         parameter, 24 without a master. The scale stays in device memory.
//   To copy: this file, elements.h, step_scale.h, tensor_table.cuh, types.h and cuda_common.h.
#pragma once
#include "cuda_common.h"
#include "elements.h"
#include "step_scale.h"
#include "tensor_table.cuh"
#include "types.h"

namespace llmc {

// ----------------------------------------------------------------------------
// one element: the rules, as both versions apply them

// The settings of a step. Each tensor's row says whether weight decay applies to it.
struct AdamW {
    float lr, beta1, beta2, eps, decay;
    bool stochastic = false; // for formats that round at random (adamw_formats.cuh)
    uint64_t seed = 0;       // of that rounding
    int64_t step = 1;        // this step's number, from 1; a StepScale overrides it
};
struct Sgd {
    float lr, decay;
    int64_t step = 0; // not used: there are no moments whose bias it would correct
};

// The numbers of this step. Without a StepScale the gradient is neither scaled nor checked.
LLMC_HD inline StepScale this_step(const StepScale* scale, int64_t step) {
    return scale ? *scale : StepScale{0, 1, 1, step};
}

// The learning rate: the one the host gave for this step, else the settings'.
LLMC_HD inline float rate_of(const StepScale& now, float lr) {
    return now.given.lr < 0 ? lr : now.given.lr;
}

// One AdamW step on one element. fma is written out, because the compiler could otherwise contract
// products differently in each version and change the bits.
template <typename A> struct AdamWRule {
    A scale, b1, b2, lr, eps;
    A correct1, correct2; // 1 / (1 - beta^t)
    LLMC_HD AdamWRule(const AdamW& h, const StepScale& now)
        : scale(now.scale), b1(h.beta1), b2(h.beta2), lr(rate_of(now, h.lr)), eps(h.eps),
          correct1(A(now.correct1 > 0 ? now.correct1 : bias_correction(h.beta1, now.step))),
          correct2(A(now.correct2 > 0 ? now.correct2 : bias_correction(h.beta2, now.step))) {}

    // Update the moments in place and return the new weight. `rate` is the tensor's factor of lr.
    LLMC_HD A operator()(A& m, A& v, A grad, A w, A decay, A rate) const {
        A g = grad * scale;
        m = std::fma(b1, m, (1 - b1) * g);
        v = std::fma(b2, v, (1 - b2) * g * g);
        // Correct the moments' bias towards 0, from which they started.
        A change = m * correct1 / (std::sqrt(v * correct2) + eps);
        return std::fma(-lr * rate, std::fma(decay, w, change), w);
    }
};

// One SGD step on one element.
template <typename A> struct SgdRule {
    A scale, lr;
    LLMC_HD SgdRule(const Sgd& h, const StepScale& now)
        : scale(now.scale), lr(rate_of(now, h.lr)) {}
    LLMC_HD A operator()(A&, A&, A grad, A w, A decay, A rate) const {
        return std::fma(-(lr * rate), std::fma(decay, w, grad * scale), w);
    }
};

// ----------------------------------------------------------------------------
// formats: how elements of a row, from its element i on, are read and written
//   read() and write() take n elements on the CPU. load() and store() take the P elements of a
//   thread on a GPU, or the first `count` of them. All arrays are the bucket's.

// Ask for the floats of eight blocks later, as a CPU's own prefetching ends with each page.
constexpr size_t UPDATE_BLOCK = 64; // elements that a thread works on at a time, at least
template <typename A> void prefetch_block(const A* x) {
    for (size_t k = 0; k < UPDATE_BLOCK; k += 16)
        __builtin_prefetch(x + 8 * UPDATE_BLOCK + k);
}

// Weights with masters in float, or without.
template <typename T> struct FloatMasters {
    T* weight;
    float* master; // or null

    // Update in place what is in acc_t: masters, or weights that are their own.
    void read(acc_t<T>*& w, const TensorRow& row, size_t i, size_t n) const { // w (n)
        T* own = weight + row.offset + i;
        if constexpr (sizeof(acc_t<T>) == sizeof(float))
            if (master) return prefetch_block(w = master + row.offset + i);
        if constexpr (std::is_same_v<T, acc_t<T>>)
            prefetch_block(w = own);
        else
            for (size_t k = 0; k < n; k++)
                w[k] = to_acc(own[k]);
    }
    void write(const acc_t<T>* w, const TensorRow& row, size_t i, size_t n, int64_t) const {
        T* narrow = weight + row.offset + i;
        #pragma omp simd
        for (size_t k = 0; k < n; k++)
            narrow[k] = from_acc<T>(w[k]);
    }

#if LLMC_KERNELS
    bool aligned() const { return can_vectorize<float>(0, weight, master); }
    template <int P>
    __device__ void load(Pack<float, P>& w, const TensorRow& row, size_t i, size_t count) const {
        size_t at = row.offset + i;
        if (master) {
            w = load_some<P>(master + at, count);
            return;
        }
        Pack<T, P> narrow = load_some<P>(weight + at, count);
        for (int k = 0; k < P; k++)
            w.v[k] = to_float(narrow.v[k]);
    }
    template <int P>
    __device__ void store(const Pack<float, P>& w, const TensorRow& row, size_t i, size_t count,
                          int64_t) const {
        size_t at = row.offset + i;
        Pack<T, P> narrow;
        for (int k = 0; k < P; k++)
            narrow.v[k] = from_acc<T>(w.v[k]);
        if (master) store_some(master + at, w, count);
        store_some(weight + at, narrow, count);
    }
#endif
};

// The first or the second moments, in float.
template <typename A> struct FloatMoment {
    A* moment;
    bool second = false;
    static constexpr size_t BLOCK = 1; // elements that are read and written together
    LLMC_HD A* at(const TensorRow& r) const { return moment + (second ? r.second : r.offset); }

    // Update in place.
    void read(A*& x, const TensorRow& r, size_t i, size_t) const { prefetch_block(x = at(r) + i); }
    void write(const A*, const TensorRow&, size_t, size_t, int64_t) const {}

#if LLMC_KERNELS
    bool aligned() const { return can_vectorize<float>(0, moment); }
    __device__ void begin() {}
    template <int P>
    __device__ void load(Pack<float, P>& x, const TensorRow& row, size_t i, size_t count) const {
        x = load_some<P>(at(row) + i, count);
    }
    template <int P>
    __device__ void store(const Pack<float, P>& x, const TensorRow& row, size_t i, size_t count,
                          int64_t) const {
        store_some(at(row) + i, x, count);
    }
#endif
};

// SGD has no moments.
struct NoMoment {
    static constexpr size_t BLOCK = 1;
    template <typename... X> void read(X&&...) const {}
    template <typename... X> void write(X&&...) const {}

#if LLMC_KERNELS
    bool aligned() const { return true; }
    __device__ void begin() {}
    template <typename... X> __device__ void load(X&&...) const {}
    template <typename... X> __device__ void store(X&&...) const {}
#endif
};

// ----------------------------------------------------------------------------
// CPU

// Take one step on all tensors of a bucket.
template <template <typename> class Rule, typename T, typename H, typename W, typename M,
          typename V>
void update_tensors(const H& h, const W& weights, const M& first, const V& second,
                    const acc_t<T>* grad, const TensorRow* rows, size_t count, // (count)
                    const StepScale* scale, Cpu) {
    typedef acc_t<T> A;
    StepScale now = this_step(scale, h.step);
    // Skip the whole step if a gradient is not finite: a NaN in the moments would stay forever.
    if (!now.finite) return;

    // Walk the tensors. A block goes through L1, so that each format needs only a loop of its own.
    constexpr size_t BLOCK = UPDATE_BLOCK > M::BLOCK ? UPDATE_BLOCK : M::BLOCK;
    const Rule<A> update(h, now);
    for (size_t r = 0; r < count; r++) {
        const TensorRow& row = rows[r];
        A decay = row.decay ? h.decay : 0, rate = row.rate;
        #pragma omp parallel for
        for (size_t i = 0; i < row.n; i += BLOCK) {
            // Read a block's weights and moments as acc_t, in place where that is their format.
            size_t n = row.n - i < BLOCK ? row.n - i : BLOCK;
            A w_block[BLOCK], m_block[BLOCK], v_block[BLOCK];
            A *w = w_block, *m = m_block, *v = v_block; // (n)
            const A* g = grad + row.offset + i;         // (n)
            prefetch_block(g);
            weights.read(w, row, i, n);
            first.read(m, row, i, n);
            second.read(v, row, i, n);

            // Take the step, then write everything back in its own format.
            #pragma omp simd
            for (size_t k = 0; k < n; k++)
                w[k] = update(m[k], v[k], g[k], w[k], decay, rate);
            weights.write(w, row, i, n, now.step);
            first.write(m, row, i, n, now.step);
            second.write(v, row, i, n, now.step);
        }
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

constexpr int UPDATE_THREADS = 256;
constexpr unsigned UPDATE_BLOCKS = 2048; // at most; a block walks several chunks if there are more

// Call f(row, i, left) for every chunk of the table: each thread has P elements of the row from i
// on, or the `left` ones where fewer are left.
template <int P, typename F>
__device__ void for_each_element(const TensorTable& table, F f) {
    for (size_t c = blockIdx.x; c < table.chunks; c += gridDim.x) {
        TensorChunk chunk = find_chunk(table, c);

        // A warp stays together, for f may shuffle: lanes past the end call f with 0 elements left.
        size_t lane = threadIdx.x % 32 * P;
        for (size_t w = chunk.from + threadIdx.x / 32 * 32 * P; w < chunk.to;
             w += UPDATE_THREADS * P)
            f(chunk.row, w + lane, w + lane < chunk.to ? chunk.to - w - lane : 0);
    }
}

// Each thread takes P elements at a time; blocks walk the table's chunks.
template <template <typename> class Rule, int P, typename H, typename W, typename M, typename V>
__global__ void update_kernel(H h, W weights, M first, V second, const float* grad,
                              __grid_constant__ const TensorTable table, const StepScale* scale) {
    StepScale now = this_step(scale, h.step);
    if (!now.finite) return;
    const Rule<float> update(h, now);
    first.begin();
    second.begin();
    for_each_element<P>(table, [&](const TensorRow& row, size_t i, size_t count) {
        float decay = row.decay ? h.decay : 0;

        // Read, and take the step.
        Pack<float, P> g = load_some<P>(grad + row.offset + i, count);
        Pack<float, P> w, m = {}, v = {};
        first.load(m, row, i, count);
        second.load(v, row, i, count);
        weights.load(w, row, i, count);
        for (int k = 0; k < P; k++)
            w.v[k] = update(m.v[k], v.v[k], g.v[k], w.v[k], decay, row.rate);

        // Write.
        first.store(m, row, i, count, now.step);
        second.store(v, row, i, count, now.step);
        weights.store(w, row, i, count, now.step);
    });
}

// ----------------------------------------------------------------------------
// launchers

// One launch for each 40 tensors, of one block a chunk, UPDATE_BLOCKS at most.
template <template <typename> class Rule, typename T, typename H, typename W, typename M,
          typename V>
void update_tensors(const H& h, const W& weights, const M& first, const V& second,
                    const float* grad, const TensorRow* rows, size_t count,
                    const StepScale* scale, cudaStream_t stream) {
    for_each_table(rows, count, [&](const TensorTable& table, size_t) {
        bool aligned = weights.aligned() && first.aligned() && second.aligned() &&
                       can_vectorize<float>(0, grad);
        unsigned grid = table.chunks < UPDATE_BLOCKS ? unsigned(table.chunks) : UPDATE_BLOCKS;
        auto run = [&](auto P) {
            launch(update_kernel<Rule, P, H, W, M, V>, grid, UPDATE_THREADS, stream, h, weights,
                   first, second, grad, table, scale);
        };

        // A warp takes a whole block. Otherwise a thread takes four elements where all are aligned:
        // 16 bytes of everything but 16-bit weights.
        if constexpr (M::BLOCK > 1) {
            LLMC_CHECK(aligned && rows_aligned<M::BLOCK>(table),
                       "moments in blocks: tensors start at multiples of %zu elements", M::BLOCK);
            run(Int<M::BLOCK / 32>());
        } else {
            aligned && rows_aligned<4>(table) ? run(Int<4>()) : run(Int<1>());
        }
    });
}
#endif

// ----------------------------------------------------------------------------
// everything in float, as most callers have it; one tensor is a table of one row

template <typename T, typename S>
void adamw_update(T* weight, float* master,                       // a bucket's; master or null
                  const acc_t<T>* grad, acc_t<T>* m, acc_t<T>* v, // the bucket's
                  const TensorRow* rows, size_t count,            // (count)
                  AdamW h, const StepScale* scale, S where) {
    LLMC_CHECK(!h.stochastic, "adamw_formats.cuh rounds at random, adamw.cuh to nearest");
    typedef FloatMoment<acc_t<T>> Moment;
    update_tensors<AdamWRule, T>(h, FloatMasters<T>{weight, master}, Moment{m}, Moment{v, true},
                                 grad, rows, count, scale, where);
}
template <typename T, typename S>
void sgd_update(T* weight, float* master, const acc_t<T>* grad, const TensorRow* rows, size_t count,
                float lr, float decay, const StepScale* scale, S where) {
    NoMoment none;
    update_tensors<SgdRule, T>(Sgd{lr, decay}, FloatMasters<T>{weight, master}, none, none, grad,
                               rows, count, scale, where);
}

template <typename T, typename S>
void adamw_update(T* weight, float* master, const acc_t<T>* grad, acc_t<T>* m, acc_t<T>* v,
                  size_t n, AdamW h, const StepScale* scale, S where) {
    TensorRow row = {0, n};
    adamw_update(weight, master, grad, m, v, &row, 1, h, scale, where);
}

} // namespace llmc
