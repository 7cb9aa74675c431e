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
//   To copy: this file, loss_scale.cuh, types.h and cuda_common.h.
#pragma once
#include "cuda_common.h"
#include "loss_scale.cuh"

namespace llmc {

// Elements of a chunk: 16 for each thread of the kernel's block.
constexpr size_t GRAD_NORM_CHUNK = 4096;

// The host's numbers for a step. They lie in memory, beside the norm, and are no arguments of a
// launch, because a CUDA graph replays its launches with the same arguments.
struct StepNumbers {
    double target_weight = 0; // 1 / valid targets: the loss is their mean
    float lr = -1;            // below 0: use the optimizer's own settings
};

// The state of a step: written by the norm, read by the optimizer. It stays on the gradients'
// device, so that no step waits for the host.
struct StepScale {
    double norm;
    float scale;  // gradients are multiplied by it
    int finite;   // 0: the optimizer writes nothing
    int64_t step; // optimizer steps done, this one included
    LossScale loss = {}; // fp16: the scale of the next step
    // AdamW's 1 / (1 - beta^step), or 0: not computed here, each thread of AdamW
    // computes them itself.
    double correct1 = 0, correct2 = 0;
    StepNumbers given = {}; // written by the host before the step
};

// The decay rates of AdamW's moments. Both 0: do not compute its bias corrections.
struct Betas {
    float first = 0, second = 0;
};

// base^n by repeated squaring, with the same bits on CPU and GPU.
LLMC_HD inline double power(double base, int64_t n) {
    double x = 1;
    for (; n > 0; n /= 2, base *= base)
        if (n % 2) x *= base;
    return x;
}

// AdamW's factor 1 / (1 - beta^step) that corrects a moment's bias.
LLMC_HD inline double bias_correction(float beta, int64_t step) {
    return 1 / (1 - power(double(beta), step));
}

// Compute a step's bias corrections once, instead of in every thread of the optimizer.
LLMC_HD inline void correct_bias(StepScale* s, Betas betas) {
    if (betas.first == 0 && betas.second == 0)
        return;
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

// A tensor within a bucket. Operators take the bucket's pointers and walk its rows.
struct TensorRow {
    size_t offset, n;  // elements: from the bucket's start; the tensor's length
    bool decay = true; // AdamW, SGD: whether weight decay applies to this tensor

    // For stochastic rounding: a hash of the tensor's name, and the index of this row's first
    // element in the tensor, or in this rank's piece of it under tensor parallelism.
    uint64_t hash = 0;
    uint64_t first = 0;
    // A piece consists of runs of `run` elements. The first begins at `start`, with `gap` elements
    // between two runs.
    uint64_t start = 0, run = 1, gap = 0;

    // 8-bit moments: the byte where the row's moments begin, and whether they are codes
    // (small) or floats.
    size_t state = 0;
    bool small = false;

    float rate = 1; // AdamW, SGD: a factor of the step's learning rate

    size_t chunk = 0; // set by launchers: the number of chunks in the rows before this one
};

// The index of a row's element i in the whole tensor, however the tensor is cut over ranks.
LLMC_HD inline uint64_t whole_index(const TensorRow& row, size_t i) {
    uint64_t piece = row.first + i;
    return row.start + piece + (row.gap ? piece / row.run * row.gap : 0);
}

// A range of a row. Chunks end at multiples of GRAD_NORM_CHUNK of the bucket and at a row's end, so
// a bucket that is cut at such a multiple has the same chunks in its parts.
struct Chunk {
    size_t from, to; // elements of the row
};
// The number of chunks of a row.
LLMC_HD inline size_t chunks_of(const TensorRow& row) {
    if (row.n == 0) return 0;
    // Count from the multiple before the row, because the first chunk may be short.
    return (row.offset % GRAD_NORM_CHUNK + row.n + GRAD_NORM_CHUNK - 1) / GRAD_NORM_CHUNK;
}

// Chunk k of a row.
LLMC_HD inline Chunk chunk_of(const TensorRow& row, size_t k) {
    size_t before = row.offset % GRAD_NORM_CHUNK;
    size_t end = (k + 1) * GRAD_NORM_CHUNK - before;
    return {k == 0 ? 0 : end - GRAD_NORM_CHUNK, end < row.n ? end : row.n};
}

// ----------------------------------------------------------------------------
// CPU

// Sum the squares of one row, chunk by chunk: sums (chunks of the row).
template <typename A>
void grad_squares(double* sums, const A* grad, const TensorRow& row) {
    #pragma omp parallel for
    for (size_t k = 0; k < chunks_of(row); k++) {
        Chunk chunk = chunk_of(row, k);
        const A* g = grad + row.offset; // (row.n)
        double sum = 0;
        #pragma omp simd reduction(+ : sum)
        for (size_t i = chunk.from; i < chunk.to; i++)
            sum += double(g[i]) * double(g[i]);
        sums[k] = sum;
    }
}

// One tensor is a row from 0.
template <typename A>
void grad_squares(double* sums, const A* grad, size_t n, Cpu) {
    grad_squares(sums, grad, TensorRow{0, n});
}

// Sum the squares of all rows, in order. Returns the number of sums.
template <typename A>
size_t grad_squares(double* sums, const A* grad,                // (all chunks), the bucket's
                    const TensorRow* rows, size_t count, Cpu) { // (count)
    size_t chunks = 0;
    for (size_t r = 0; r < count; r++) {
        grad_squares(sums + chunks, grad, rows[r]);
        chunks += chunks_of(rows[r]);
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

// grad += other. A tied table has two gradients.
template <typename A>
void add_gradients(A* grad, const A* other, size_t n, Cpu) {
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++)
        grad[i] += other[i];
}

// Convert gradients to bf16, rounded to nearest, to send them between ranks; and back.
template <typename A>
void narrow_gradients(bf16* to, const A* from, size_t n, Cpu) {
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++)
        to[i] = from_acc<bf16>(float(from[i]));
}
template <typename A>
void widen_gradients(A* to, const bf16* from, size_t n, Cpu) {
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++)
        to[i] = to_acc(from[i]);
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

// Part of a bucket's table, passed to a kernel by value: a launch carries 4 KB of arguments.
constexpr size_t TABLE_ROWS = 40;
struct TensorTable {
    TensorRow rows[TABLE_ROWS];
    size_t count = 0, chunks = 0;
};

// The work of one block: a range of elements of a row.
struct TensorChunk {
    const TensorRow& row;
    size_t from, to; // elements of the row
};
// The block's chunk, by its number within the table.
__device__ inline TensorChunk find_chunk(const TensorTable& table, size_t chunk) {
    // Walk the rows: at most 40, and all threads read the same ones.
    size_t r = 0;
    while (r + 1 < table.count && table.rows[r + 1].chunk <= chunk)
        r++;
    const TensorRow& row = table.rows[r];
    Chunk part = chunk_of(row, chunk - row.chunk);
    return {row, part.from, part.to};
}

constexpr int GRAD_NORM_WARPS = 8;

// One block a chunk.
//   sums (chunks of the table)   grad: the bucket's
template <int P>
__global__ void grad_squares_kernel(double* sums, const float* grad,
                                    __grid_constant__ const TensorTable table) {
    TensorChunk chunk = find_chunk(table, blockIdx.x);
    const float* g = grad + chunk.row.offset; // (row.n)
    double sum = 0;

    // Square in double: in float a gradient of 2^64 or more would overflow.
    for (size_t i = chunk.from + threadIdx.x * P; i < chunk.to; i += GRAD_NORM_WARPS * 32 * P) {
        Pack<float, P> p = load_some<P>(g + i, chunk.to - i);
        for (int k = 0; k < P; k++)
            sum += double(p.v[k]) * double(p.v[k]);
    }
    sum = block_sum<GRAD_NORM_WARPS>(sum);
    if (threadIdx.x == 0)
        sums[blockIdx.x] = sum;
}

constexpr int FINISH_WARPS = 32;
constexpr size_t NORM_RUN = 4096; // sums that one block adds into the first of them

// The sum of every `stride`-th of `count` sums, in each thread of a block. Which sums a thread adds
// depends on the count alone.
__device__ inline double sum_of_sums(const double* sums, size_t count, size_t stride) {
    double sum = 0;
    for (size_t i = threadIdx.x * stride; i < count; i += FINISH_WARPS * 32 * stride)
        sum += sums[i];
    return block_sum<FINISH_WARPS>(sum);
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

// A thread takes P elements; the last thread may have fewer.
template <int P>
__global__ void add_gradients_kernel(float* grad, const float* other, size_t n) {
    size_t i = first_element<P>();
    if (i >= n) return;
    Pack<float, P> a = load_some<P>(grad + i, n - i);
    Pack<float, P> b = load_some<P>(other + i, n - i);
    for (int k = 0; k < P; k++)
        a.v[k] += b.v[k];
    store_some(grad + i, a, n - i);
}

// Convert each element to another type. A thread takes P elements; the last thread may have fewer.
template <typename To, typename From, int P>
__global__ void convert_gradients_kernel(To* to, const From* from, size_t n) {
    size_t i = first_element<P>();
    if (i >= n) return;
    Pack<From, P> a = load_some<P>(from + i, n - i);
    Pack<To, P> b;
    for (int k = 0; k < P; k++)
        b.v[k] = from_acc<To>(to_acc(a.v[k]));
    store_some(to + i, b, n - i);
}

// ----------------------------------------------------------------------------
// launchers

// Call f(table, chunks before it) for tables of up to 40 rows, empty rows left out. Returns the
// number of all chunks.
template <typename F>
size_t for_each_table(const TensorRow* rows, size_t count, F f) {
    // Unused rows are zero, so equal tables are equal arguments when launches are compared.
    size_t done = 0;
    TensorTable table = {};
    for (size_t r = 0; r < count; r++) {
        // Add the row.
        if (rows[r].n > 0) {
            TensorRow& row = table.rows[table.count++];
            row = rows[r];
            row.chunk = table.chunks;
            table.chunks += chunks_of(row);
        }

        // Hand out a table that is full, or the last one.
        bool last = r + 1 == count && table.count > 0;
        if (table.count == TABLE_ROWS || last) {
            f(table, done);
            done += table.chunks;
            table.count = 0;
            table.chunks = 0;
        }
    }
    return done;
}

// Whether all rows start at multiples of P elements.
template <int P>
bool rows_aligned(const TensorTable& table) {
    for (size_t r = 0; r < table.count; r++)
        if (table.rows[r].offset % P) return false;
    return true;
}

// One launch for each 40 tensors. Returns the number of sums.
inline size_t grad_squares(double* sums, const float* grad, const TensorRow* rows, size_t count,
                           cudaStream_t stream) {
    return for_each_table(rows, count, [&](const TensorTable& table, size_t done) {
        bool vector = can_vectorize<float>(0, grad) && rows_aligned<4>(table);
        launch(vector ? grad_squares_kernel<4> : grad_squares_kernel<1>, unsigned(table.chunks),
               GRAD_NORM_WARPS * 32, 0, stream, sums + done, grad, table);
    });
}

inline void grad_squares(double* sums, const float* grad, size_t n, cudaStream_t stream) {
    TensorRow row = {0, n};
    grad_squares(sums, grad, &row, 1, stream);
}

// Add the sums, more than NORM_RUN of them first run by run, in place, and conclude the step.
inline void grad_norm_finish(StepScale* out, double* sums, size_t count, float clip,
                             cudaStream_t stream, const LossScaling& rule = {},
                             Betas betas = {}) {
    bool runs = count > NORM_RUN;
    unsigned grid = unsigned(ceil_div(count, NORM_RUN));
    if (runs)
        launch(grad_norm_runs_kernel, grid, FINISH_WARPS * 32, 0, stream, sums, count);
    launch(grad_norm_finish_kernel, 1, FINISH_WARPS * 32, 0, stream, out, sums, count,
           runs ? NORM_RUN : size_t(1), clip, rule, betas);
}

// grad += other, on a GPU.
inline void add_gradients(float* grad, const float* other, size_t n, cudaStream_t stream) {
    bool vector = can_vectorize<float>(0, grad, other);
    pick_element_kernel<float>(n, vector, [&](auto P, unsigned grid) {
        launch(add_gradients_kernel<P>, grid, ELEMENT_THREADS, 0, stream, grad, other, n);
    });
}

// Convert n gradients to another type.
template <typename To, typename From>
void convert_gradients(To* to, const From* from, size_t n, cudaStream_t stream) {
    bool vector = can_vectorize<float>(0, to, from); // four at a time, of either type
    pick_element_kernel<float>(n, vector, [&](auto P, unsigned grid) {
        launch(convert_gradients_kernel<To, From, P>, grid, ELEMENT_THREADS, 0, stream, to, from,
               n);
    });
}
inline void narrow_gradients(bf16* to, const float* from, size_t n, cudaStream_t stream) {
    convert_gradients(to, from, n, stream);
}
inline void widen_gradients(float* to, const bf16* from, size_t n, cudaStream_t stream) {
    convert_gradients(to, from, n, stream);
}
#endif

} // namespace llmc
