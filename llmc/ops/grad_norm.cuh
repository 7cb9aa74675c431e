// grad_norm.cuh - global gradient norm, clipping factor, finiteness check - arXiv:1211.5063
//   norm = sqrt(sum g^2),   scale = min(1, clip / norm)   both divided by fp16's loss scale, if any
//   grad (n) acc   or a table of tensors in one bucket: a row says where each starts and its length
//   sums: one double for each chunk of 4096 elements of a tensor (the last may be shorter), so that
//         the norm does not depend on how tensors are shared out over ranks
//   Contract: sums =;  finish adds them and writes {norm, scale, finite}; step counts finite steps.
//             Given Betas, finish also computes AdamW's bias corrections.
//             Bitwise repeatable. CPU and GPU each add a chunk's squares, and the sums, in an
//             order of their own. Nothing waits for the host.
//   Cost: memory-bound: reads grad.  One launch for each 40 tensors.
//   To copy: this file, elements.h, elementwise.cuh, loss_scale.cuh, step_scale.h,
//            tensor_table.cuh, types.h and cuda_common.h.
#pragma once
#include "cuda_common.h"
#include "elements.h"
#include "elementwise.cuh"
#include "loss_scale.cuh"
#include "step_scale.h"
#include "tensor_table.cuh"
#include "types.h"

namespace llmc {

// The decay rates of AdamW's moments. Both 0: do not compute its bias corrections.
struct Betas {
    float first = 0, second = 0;
};

// Compute a step's bias corrections once, instead of in every thread of the optimizer.
LLMC_HD inline void correct_bias(StepScale* s, Betas betas) {
    if (betas.first == 0 && betas.second == 0) return;
    s->correct1 = bias_correction(betas.first, s->step);
    s->correct2 = bias_correction(betas.second, s->step);
}

// Conclude the step from the sum of squares. A single NaN or infinity among the gradients makes the
// sum one too, so one test finds it. clip 0: do not clip.
LLMC_HD inline void finish_step_scale(StepScale* out, double sum, float clip,
                                      const LossScaling& rule, Betas betas) {
    // Gradients carry the loss scale. It is a power of two, so dividing by it is exact.
    float loss_scale = rule.on ? out->loss.now : 1;
    double norm = sqrt(sum) / loss_scale;
    float clipped = clip > 0 && norm > clip ? float(clip / norm) : 1;
    out->norm = norm;
    out->scale = clipped / loss_scale;
    out->finite = sum - sum == 0; // the difference is NaN for NaN and infinity
    out->step += out->finite;
    correct_bias(out, betas);
    if (rule.on)
        next_loss_scale(&out->loss, rule, out->finite);
}

// ----------------------------------------------------------------------------
// CPU

// Sum the squares of all rows, in order, chunk by chunk. Returns the number of sums.
template <typename A>
size_t grad_squares(double* sums, const A* grad,                // (all chunks), the bucket's
                    const TensorRow* rows, size_t count, Cpu) { // (count)
    size_t chunks = 0;
    for (size_t r = 0; r < count; r++) {
        const TensorRow& row = rows[r];
        const A* g = grad + row.offset; // (row.n)
        #pragma omp parallel for
        for (size_t k = 0; k < chunks_of(row); k++) {
            Chunk chunk = chunk_of(row, k);
            double sum = 0;
            #pragma omp simd reduction(+ : sum)
            for (size_t i = chunk.from; i < chunk.to; i++)
                sum += double(g[i]) * double(g[i]);
            sums[chunks + k] = sum;
        }
        chunks += chunks_of(row);
    }
    return chunks;
}

// Add the sums and conclude the step. Only a finite step counts.
inline void grad_norm_finish(StepScale* out, const double* sums, size_t count, float clip,
                             Cpu, const LossScaling& rule = {}, Betas betas = {}) {
    double sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += sums[i];
    finish_step_scale(out, sum, clip, rule, betas);
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

constexpr int GRAD_NORM_WARPS = 8;

// One block a chunk.
//   sums (chunks of the table)   grad: the bucket's
template <int P>
__global__ void grad_squares_kernel(double* sums, const float* grad,
                                    __grid_constant__ const TensorTable table) {
    TensorChunk chunk = find_chunk(table, blockIdx.x);
    const float* g = grad + chunk.row.offset; // (row.n)
    double sum[1] = {};

    // Square in double: in float a gradient of 2^64 or more would overflow.
    for (size_t i = chunk.from + threadIdx.x * P; i < chunk.to; i += GRAD_NORM_WARPS * 32 * P) {
        Pack<float, P> p = load_some<P>(g + i, chunk.to - i);
        for (int k = 0; k < P; k++)
            sum[0] += double(p.v[k]) * double(p.v[k]);
    }
    block_sums<GRAD_NORM_WARPS>(sum);
    if (threadIdx.x == 0)
        sums[blockIdx.x] = sum[0];
}

constexpr int FINISH_WARPS = 32;
constexpr size_t NORM_RUN = 4096; // sums that one block adds into the first of them

// The sum of every `stride`-th of `count` sums, in each thread of a block. Which sums a thread adds
// depends on the count alone.
__device__ inline double sum_of_sums(const double* sums, size_t count, size_t stride) {
    double sum[1] = {};
    for (size_t i = threadIdx.x * stride; i < count; i += FINISH_WARPS * 32 * stride)
        sum[0] += sums[i];
    block_sums<FINISH_WARPS>(sum);
    return sum[0];
}

// One block a run: a model of 8e9 elements has 2e6 sums, too many for one block's reads.
static __global__ void grad_norm_runs_kernel(double* sums, size_t count) {
    double* run = sums + blockIdx.x * NORM_RUN;
    size_t left = count - blockIdx.x * NORM_RUN;
    double sum = sum_of_sums(run, left < NORM_RUN ? left : NORM_RUN, 1);
    if (threadIdx.x == 0) *run = sum;
}

// One block concludes the step.
static __global__ void grad_norm_finish_kernel(StepScale* out, const double* sums, size_t count,
                                               size_t stride, float clip, LossScaling rule,
                                               Betas betas) {
    double sum = sum_of_sums(sums, count, stride);
    if (threadIdx.x == 0)
        finish_step_scale(out, sum, clip, rule, betas);
}

// ----------------------------------------------------------------------------
// launchers

// One launch for each 40 tensors. Returns the number of sums.
inline size_t grad_squares(double* sums, const float* grad, const TensorRow* rows, size_t count,
                           cudaStream_t stream) {
    return for_each_table(rows, count, [&](const TensorTable& table, size_t done) {
        bool vector = can_vectorize<float>(0, grad) && rows_aligned<4>(table);
        launch(vector ? grad_squares_kernel<4> : grad_squares_kernel<1>, unsigned(table.chunks),
               GRAD_NORM_WARPS * 32, stream, sums + done, grad, table);
    });
}

// Add the sums, more than NORM_RUN of them first run by run, in place, and conclude the step.
inline void grad_norm_finish(StepScale* out, double* sums, size_t count, float clip,
                             cudaStream_t stream, const LossScaling& rule = {}, Betas betas = {}) {
    bool runs = count > NORM_RUN;
    unsigned grid = unsigned(ceil_div(count, NORM_RUN));
    if (runs)
        launch(grad_norm_runs_kernel, grid, FINISH_WARPS * 32, stream, sums, count);
    launch(grad_norm_finish_kernel, 1, FINISH_WARPS * 32, stream, out, sums, count,
           runs ? NORM_RUN : size_t(1), clip, rule, betas);
}
#endif

// ----------------------------------------------------------------------------
// anywhere: one tensor, and gradients on their way between ranks

// Sum the squares of one tensor of n elements.
template <typename A, typename S>
void grad_squares(double* sums, const A* grad, size_t n, S where) { // (chunks of n) (n)
    TensorRow row = {0, n};
    grad_squares(sums, grad, &row, 1, where);
}

// grad += other. A tied table has two gradients.
template <typename A, typename S>
void add_gradients(A* grad, const A* other, size_t n, S where) {
    add_forward(grad, grad, other, n, where);
}

// Convert gradients to bf16, rounded to nearest, to send them between ranks; and back.
struct ElementCopy {
    template <typename A> LLMC_HD A operator()(A x) const { return x; }
};
template <typename A, typename S>
void narrow_gradients(bf16* to, const A* from, size_t n, S where) {
    map_elements(to, n, ElementCopy(), where, from);
}
template <typename A, typename S>
void widen_gradients(A* to, const bf16* from, size_t n, S where) {
    map_elements(to, n, ElementCopy(), where, from);
}

} // namespace llmc
