// sinks.cuh - attention sinks: a logit of each head that joins its softmax - arXiv:2508.10925
//   out' = out sigmoid(lse - s),   lse' = log(exp(lse) + exp(s))            s: the head's sink
//   A sink is a key of score s whose value is 0, so attention over the text enters here as one
//   number and one row. No kernel of attention knows of sinks.
//   Backward reads the joined out and lse, and so does attention over the text: D = dout.out'.
//   ds = - sum over rows of exp(s - lse') D
//   out, dout (B,T,NH,HS)   lse (B,NH,T)   sinks (NH)
//   sums (parts,stride): parts of ds, of which NH columns are written; column_sums() adds them
//   up. A part is a range of rows: all of them on the CPU.
//   Contract: out, lse become the joined ones; sums =. Bitwise repeatable.
//   Cost: memory-bound. forward reads and writes out, backward reads out and dout.
//   To copy: this file, attention_types.h, types.h and cuda_common.h.
#pragma once
#include "attention_types.h"
#include "cuda_common.h"

namespace llmc {

// The rows of attention's output, by sequences and heads.
struct SinkDims {
    size_t B, T; // sequences, and queries of each
    size_t NH, HS;

    // A row n is a query of all sequences; lse has the queries of a head side by side.
    LLMC_HD size_t rows() const { return B * T; }
    LLMC_HD size_t out_at(size_t n, size_t h) const { return (n * NH + h) * HS; }
    LLMC_HD size_t lse_at(size_t n, size_t h) const { return (n / T * NH + h) * T + n % T; }
};

// The rows of a call of attention.
inline SinkDims sink_dims(const AttentionDims& d) {
    return {d.B, d.Tq, d.NH, d.HS};
}

// The number of parts of the gradient's sums. It does not depend on the rows.
constexpr size_t SINK_PARTS = 64; // on a GPU
inline size_t sink_parts(Cpu) { return 1; }

// log(exp(lse) + exp(s)). A row that saw no key has an lse of -infinity.
template <typename A> LLMC_HD A joined_lse(A lse, A s) {
    // The larger one stays outside of the exponential, so that none overflows.
    A most = lse > s ? lse : s;
    return most + std::log1p(std::exp(-std::fabs(lse - s)));
}

// ----------------------------------------------------------------------------
// CPU: threads share out rows, then heads

// Join the sinks to what attention over the text gave.
template <typename T>
void sinks_forward(T* out, acc_t<T>* lse, const T* sinks, const SinkDims& d, Cpu) {
    typedef acc_t<T> A;
    #pragma omp parallel for
    for (size_t n = 0; n < d.rows(); n++)
        for (size_t h = 0; h < d.NH; h++) {
            // Find the share of the softmax that is left for the text.
            A& all = lse[d.lse_at(n, h)];
            A s = to_acc(sinks[h]);
            A share = 1 / (1 + std::exp(s - all));

            // Scale the row: a sink's value is 0.
            T* row = out + d.out_at(n, h);
            for (size_t c = 0; c < d.HS; c++)
                row[c] = from_acc<T>(share * to_acc(row[c]));
            all = joined_lse(all, s);
        }
}

// The gradients of sinks, each a sum over all rows: one part, so no stride is needed.
template <typename T>
void sinks_backward(acc_t<T>* sums, size_t, const T* dout, const T* out, const acc_t<T>* lse,
                    const T* sinks, const SinkDims& d, Cpu) {
    typedef acc_t<T> A;
    #pragma omp parallel for
    for (size_t h = 0; h < d.NH; h++) {
        A sum = 0;
        A s = to_acc(sinks[h]);
        for (size_t n = 0; n < d.rows(); n++) {
            const T* row = out + d.out_at(n, h);
            const T* drow = dout + d.out_at(n, h);
            A D = 0;
            for (size_t c = 0; c < d.HS; c++)
                D += to_acc(row[c]) * to_acc(drow[c]);

            // The sink's share of the softmax; lse is the joined one.
            A p = std::exp(s - lse[d.lse_at(n, h)]);
            sum -= p * D;
        }
        sums[h] = sum;
    }
}

// ----------------------------------------------------------------------------
// CUDA: forward a warp a head's row; backward a warp a head's part

#if LLMC_KERNELS
constexpr unsigned SINK_WARPS = 8;
inline size_t sink_parts(cudaStream_t) { return SINK_PARTS; }

template <typename T>
__global__ void sinks_forward_kernel(T* out, float* lse, const T* sinks, SinkDims d) {
    size_t i = size_t(blockIdx.x) * SINK_WARPS + threadIdx.x / 32;
    if (i >= d.rows() * d.NH) return; // whole warps
    size_t n = i / d.NH;
    size_t h = i % d.NH;

    // Find the share of the softmax that is left for the text.
    float* all = lse + d.lse_at(n, h);
    float before = *all;
    float s = to_float(sinks[h]);
    float share = 1 / (1 + expf(s - before));

    // The lanes share out the channels.
    T* row = out + d.out_at(n, h);
    for (size_t c = threadIdx.x % 32; c < d.HS; c += 32)
        row[c] = from_acc<T>(share * to_float(row[c]));

    // Every lane has read lse: the first one may write it.
    __syncwarp();
    if (threadIdx.x % 32 == 0) *all = joined_lse(before, s);
}

template <typename T>
__global__ void sinks_backward_kernel(float* sums, size_t stride,
                                      const T* dout, const T* out,
                                      const float* lse, const T* sinks,
                                      SinkDims d) {
    size_t i = size_t(blockIdx.x) * SINK_WARPS + threadIdx.x / 32;
    if (i >= SINK_PARTS * d.NH) return; // whole warps
    size_t part = i / d.NH;
    size_t h = i % d.NH;
    float s = to_float(sinks[h]);
    float sum = 0;

    // Walk over the part's rows, of which there may be none.
    size_t first = d.rows() * part / SINK_PARTS;
    size_t end = d.rows() * (part + 1) / SINK_PARTS;
    for (size_t n = first; n < end; n++) {
        const T* row = out + d.out_at(n, h);
        const T* drow = dout + d.out_at(n, h);
        float D = 0;
        for (size_t c = threadIdx.x % 32; c < d.HS; c += 32)
            D += to_float(row[c]) * to_float(drow[c]);

        // All lanes get the row's sum, and add the same.
        float p = expf(s - lse[d.lse_at(n, h)]);
        sum -= p * warp_sum(D);
    }
    if (threadIdx.x % 32 == 0) sums[part * stride + h] = sum;
}

// One warp takes a head's row.
template <typename T>
void sinks_forward(T* out, float* lse, const T* sinks, const SinkDims& d, cudaStream_t stream) {
    size_t warps = d.rows() * d.NH;
    unsigned grid = unsigned(ceil_div(warps, size_t(SINK_WARPS)));
    launch(sinks_forward_kernel<T>, grid, SINK_WARPS * 32, 0, stream, out, lse, sinks, d);
}

// One warp takes a head's part. Parts without rows become 0.
template <typename T>
void sinks_backward(float* sums, size_t stride,
                    const T* dout, const T* out,
                    const float* lse, const T* sinks,
                    const SinkDims& d, cudaStream_t stream) {
    size_t warps = SINK_PARTS * d.NH;
    unsigned grid = unsigned(ceil_div(warps, size_t(SINK_WARPS)));
    launch(sinks_backward_kernel<T>, grid, SINK_WARPS * 32, 0, stream, sums, stride, dout, out, lse,
           sinks, d);
}
#endif

// ----------------------------------------------------------------------------
// anywhere: as blocks call it, behind attention over the text

// The sinks of these heads, and the parts of their gradient.
template <typename T> struct Sinks {
    // The heads are those with which this rank attends.
    const T* logits = nullptr; // (NH); null: the model has none
    acc_t<T>* sums = nullptr;  // (parts,stride); null: not training
    size_t stride = 0;         // heads of the rank
};

// Join the sinks to out and lse, in place. Does nothing without sinks.
template <typename T, typename S>
void join_sinks(T* out, acc_t<T>* lse, const AttentionOperands<T>& x, const Sinks<T>& s, S where) {
    if (s.logits) sinks_forward(out, lse, s.logits, sink_dims(x.d), where);
}

// Sum the sinks' own gradient: attention has those of q, k and v.
template <typename T, typename S>
void join_sinks_backward(const T* out, const acc_t<T>* lse, const AttentionOperands<T>& x,
                         const Sinks<T>& s, S where) {
    if (!s.logits) return;
    SinkDims d = sink_dims(x.d);
    sinks_backward(s.sums, s.stride, x.dout, out, lse, s.logits, d, where);
}

} // namespace llmc
