// grouped_bias.cuh - a bias for each expert, over rows that are sorted by expert
//   Rows [starts[e], starts[e+1]) belong to expert e, which has b_e (C) of a stack of E:
//     out += g b_e        db_e = or += sum over its rows of g dout        dg += dout.b_e
//   g is the gate of the row's slot, which multiplies an expert's output, or 1 without gates.
//   out, dout (M,C)   b (E,C)   db (E,C) acc   gates, dgates (slots) acc   slot_of (M)
//   Contract: an expert without rows has db = 0, or leaves it unchanged when accumulating. Bitwise
//             repeatable: a thread adds rows in their order. Any C.
//   Cost: memory-bound.
//   To copy: this file, attention_types.h, gpu.h, grouped_mma.cuh, mma.cuh, tensor_cores.h,
//            types.h and cuda_common.h.
#pragma once
#include <vector>
#include "attention_types.h"
#include "cuda_common.h"
#include "grouped_mma.cuh"
#include "types.h"

namespace llmc {

// Biases of a stack (g.OC of each expert), its rows, and what multiplies each of them.
template <typename A> struct GroupedBias {
    Groups g;
    const A* gates = nullptr;     // (slots), or null: 1
    const int* slot_of = nullptr; // (M), read with gates

    // An expert's rows, and what multiplies the bias in a row.
    LLMC_HD size_t first(size_t e) const { return size_t(g.starts[e]); }
    LLMC_HD size_t end(size_t e) const { return size_t(g.starts[e + 1]); }
    LLMC_HD A weight(size_t row) const { return gates ? gates[slot_of[row]] : A(1); }
};

// ----------------------------------------------------------------------------
// CPU

// Add each expert's bias to its rows.
template <typename T>
void grouped_bias_forward(T* out, const T* bias, const GroupedBias<acc_t<T>>& x, Cpu) {
    typedef acc_t<T> A;
    size_t C = x.g.OC;
    for (size_t e = 0; e < x.g.E; e++) {
        // Threads share out the rows of one expert after the other.
        const T* b = bias + e * C;
        size_t end = x.end(e);
        #pragma omp parallel for
        for (size_t row = x.first(e); row < end; row++) {
            A g = x.weight(row);
            for (size_t c = 0; c < C; c++)
                put(out + row * C + c, g * to_acc(b[c]), true);
        }
    }
}

// The gradients of biases.
template <typename T>
void grouped_bias_backward(acc_t<T>* dbias, const T* dout, const GroupedBias<acc_t<T>>& x,
                           bool accumulate, Cpu) {
    typedef acc_t<T> A;
    size_t C = x.g.OC;
    #pragma omp parallel for
    for (size_t e = 0; e < x.g.E; e++) {
        // Sum the expert's rows; without one the sums are 0.
        std::vector<A> sum(C);
        for (size_t row = x.first(e); row < x.end(e); row++) {
            A g = x.weight(row);
            for (size_t c = 0; c < C; c++)
                sum[c] += g * to_acc(dout[row * C + c]);
        }

        // Write them, or add them to those of earlier micro-batches.
        for (size_t c = 0; c < C; c++)
            put(dbias + e * C + c, sum[c], accumulate);
    }
}

// Add the biases' part of the gates' gradients.
template <typename T>
void grouped_bias_backward_gates(acc_t<T>* dgates, const T* dout, const T* bias,
                                 const GroupedBias<acc_t<T>>& x, Cpu) {
    size_t C = x.g.OC;
    #pragma omp parallel for
    for (size_t e = 0; e < x.g.E; e++) {
        const T* b = bias + e * C;
        for (size_t row = x.first(e); row < x.end(e); row++) {
            // Every row has a slot of its own, so threads do not meet.
            acc_t<T> sum = 0;
            for (size_t c = 0; c < C; c++)
                sum += to_acc(dout[row * C + c]) * to_acc(b[c]);
            dgates[x.slot_of[row]] += sum;
        }
    }
}

// ----------------------------------------------------------------------------
// CUDA: blocks (i,e) share the rows of expert e, or its channels

#if LLMC_KERNELS
constexpr unsigned BIAS_THREADS = 256;
constexpr unsigned BIAS_WARPS = BIAS_THREADS / 32;
constexpr unsigned BIAS_BLOCKS = 64; // of an expert

// A block takes a row at a time, and its threads share out the channels.
template <typename T>
__global__ void grouped_bias_forward_kernel(T* out, const T* bias, GroupedBias<float> x) {
    size_t C = x.g.OC;
    size_t e = blockIdx.y;
    const T* b = bias + e * C;

    // An expert has BIAS_BLOCKS blocks, so each takes every 64th row.
    for (size_t row = x.first(e) + blockIdx.x; row < x.end(e); row += BIAS_BLOCKS) {
        float g = x.weight(row);
        for (size_t c = threadIdx.x; c < C; c += BIAS_THREADS)
            put(out + row * C + c, g * to_float(b[c]), true);
    }
}

// A thread has a channel.
template <typename T>
__global__ void grouped_bias_backward_kernel(float* dbias, const T* dout, GroupedBias<float> x,
                                             bool accumulate) {
    size_t C = x.g.OC;
    size_t e = blockIdx.y;
    size_t c = size_t(blockIdx.x) * BIAS_THREADS + threadIdx.x;
    if (c >= C) return;

    // Neighbouring threads read neighbouring channels of a row.
    float sum = 0;
    for (size_t row = x.first(e); row < x.end(e); row++)
        sum += x.weight(row) * to_float(dout[row * C + c]);
    put(dbias + e * C + c, sum, accumulate);
}

// A warp takes a row at a time.
template <typename T>
__global__ void grouped_bias_gates_kernel(float* dgates, const T* dout, const T* bias,
                                          GroupedBias<float> x) {
    size_t C = x.g.OC;
    size_t e = blockIdx.y;
    size_t warp = size_t(blockIdx.x) * BIAS_WARPS + threadIdx.x / 32;
    const T* b = bias + e * C;

    // The warps of an expert's blocks share out its rows.
    for (size_t row = x.first(e) + warp; row < x.end(e); row += BIAS_BLOCKS * BIAS_WARPS) {
        float sum = 0;
        for (size_t c = threadIdx.x % 32; c < C; c += 32)
            sum += to_float(dout[row * C + c]) * to_float(b[c]);

        // One lane adds, without atomics: every row has a slot of its own.
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) dgates[x.slot_of[row]] += sum;
    }
}

// ----------------------------------------------------------------------------
// launchers: starts, gates and slot_of must be on the device

// The grid does not depend on the experts' rows, which the host does not know.
template <typename T>
void grouped_bias_forward(T* out, const T* bias, const GroupedBias<float>& x, cudaStream_t stream) {
    dim3 grid(BIAS_BLOCKS, unsigned(x.g.E));
    launch(grouped_bias_forward_kernel<T>, grid, BIAS_THREADS, stream, out, bias, x);
}

// A thread for each channel of each expert. Experts have unequal rows, so some threads walk far
// longer than others.
template <typename T>
void grouped_bias_backward(float* dbias, const T* dout, const GroupedBias<float>& x,
                           bool accumulate, cudaStream_t stream) {
    size_t blocks = ceil_div(x.g.OC, size_t(BIAS_THREADS));
    dim3 grid(unsigned(blocks), unsigned(x.g.E));
    launch(grouped_bias_backward_kernel<T>, grid, BIAS_THREADS, stream, dbias, dout, x, accumulate);
}

// dgates holds the part of the experts' inner rows already: this one is added.
template <typename T>
void grouped_bias_backward_gates(float* dgates, const T* dout, const T* bias,
                                 const GroupedBias<float>& x, cudaStream_t stream) {
    dim3 grid(BIAS_BLOCKS, unsigned(x.g.E));
    launch(grouped_bias_gates_kernel<T>, grid, BIAS_THREADS, stream, dgates, dout, bias, x);
}
#endif

} // namespace llmc
