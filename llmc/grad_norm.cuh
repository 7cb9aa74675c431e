// grad_norm.cuh - global gradient norm, clipping factor, finiteness check - arXiv:1211.5063
//   norm = sqrt(sum g^2),   scale = min(1, clip / norm)   both over fp16's loss scale, if there is
//   grad (n) acc   or a table of tensors in one bucket: a row says where each starts and its length
//   sums: one double per chunk of 4096 elements of a tensor, the last chunk shorter, so that the
//         norm does not depend on how tensors are shared out
//   Contract: sums =;  finish adds them and writes {norm, scale, finite}, step counts finite steps;
//             from Betas it makes AdamW's bias corrections too.
//             Bitwise repeatable. The two versions add a chunk's squares, and the sums, in orders
//             of their own. Nothing waits for the host.
//   Cost: memory-bound: reads grad.  A launch for 40 tensors.
//   To copy: this file, loss_scale.cuh, types.h and cuda_common.h.
#pragma once
#include "cuda_common.h"
#include "loss_scale.cuh"

namespace llmc {

// Elements of a chunk: 16 for each thread of the kernel's block.
constexpr size_t GRAD_NORM_CHUNK = 4096;

// The host's numbers of a step. They lie beside the norm and are no arguments of a launch: a graph
// that replays launches replays their arguments too.
struct StepNumbers {
    double target_weight = 0; // 1 / valid targets: the loss is their mean
    float lr = -1;            // below 0: the optimizer's own settings say it
};

// Written by the norm, read by the optimizer. It stays where the gradients are, so that no step
// waits for the host.
struct StepScale {
    double norm;
    float scale;  // gradients are multiplied by it
    int finite;   // 0: the optimizer writes nothing
    int64_t step; // optimizer steps done, this one included
    LossScale loss = {}; // fp16: the scale of the next step
    // AdamW's 1 / (1 - beta^step); 0: not made, each of its threads makes them itself
    double correct1 = 0, correct2 = 0;
    StepNumbers given = {}; // by the host, before the step
};

// How fast AdamW's moments forget; both 0: its corrections are not wanted.
struct Betas {
    float first = 0, second = 0;
};

// base^n, the same bits on CPU and GPU.
LLMC_HD inline double power(double base, int64_t n) {
    double x = 1;
    for (; n > 0; n /= 2, base *= base)
        if (n % 2) x *= base;
    return x;
}
LLMC_HD inline double bias_correction(float beta, int64_t step) {
    return 1 / (1 - power(double(beta), step));
}

// Make the corrections of a step once, for all of its threads.
LLMC_HD inline void correct_bias(StepScale* s, Betas betas) {
    if (betas.first == 0 && betas.second == 0)
        return;
    s->correct1 = bias_correction(betas.first, s->step);
    s->correct2 = bias_correction(betas.second, s->step);
}

// Conclude from the sum of squares. One NaN or infinity among the gradients makes the sum so: one
// test finds it. clip 0: none.
LLMC_HD inline void finish_step_scale(StepScale* out, double sum, float clip,
                                      const LossScaling& rule, Betas betas) {
    // Gradients carry the loss scale; to divide by a power of two is exact.
    float loss_scale = rule.on ? out->loss.now : 1;
    double norm = sqrt(sum) / loss_scale;
    float clipped = clip > 0 && norm > clip ? float(clip / norm) : 1;
    out->norm = norm;
    out->scale = clipped / loss_scale;
    out->finite = sum - sum == 0; // NaN and infinity give NaN
    out->step += out->finite;
    correct_bias(out, betas);
    if (rule.on)
        next_loss_scale(&out->loss, rule, out->finite);
}

// A tensor of a bucket: the bucket's pointers are shared, operators walk its rows.
struct TensorRow {
    size_t offset, n;  // elements from the bucket's start, its length
    bool decay = true; // AdamW, SGD: whether weight decay is for this tensor too

    // Stochastic rounding: a hash of the tensor's name, and the index of this row's first element
    // in the tensor, or in a tensor-parallel rank's piece of it.
    uint64_t hash = 0;
    uint64_t first = 0;
    // A piece is cut out of the tensor in runs, which begin at `start` and lie `gap` apart.
    uint64_t start = 0, run = 1, gap = 0;

    // Moments in 8 bits: where the row's begin, in bytes, and whether these are codes or floats.
    size_t state = 0;
    bool small = false;

    float rate = 1; // AdamW, SGD: of the step's learning rate

    size_t chunk = 0; // set by launchers: chunks of the rows before it
};

// The index of a row's element i in the whole tensor, however it is cut over ranks.
LLMC_HD inline uint64_t whole_index(const TensorRow& row, size_t i) {
    uint64_t piece = row.first + i;
    return row.start + piece + (row.gap ? piece / row.run * row.gap : 0);
}

// Chunks end at multiples of GRAD_NORM_CHUNK of the bucket, and where a row ends: a bucket that is
// cut there has the same chunks in its parts.
struct Chunk {
    size_t from, to; // elements of the row
};
LLMC_HD inline size_t chunks_of(const TensorRow& row) {
    if (row.n == 0) return 0;
    // Count from the multiple before the row: its first chunk may be short.
    return (row.offset % GRAD_NORM_CHUNK + row.n + GRAD_NORM_CHUNK - 1) / GRAD_NORM_CHUNK;
}
LLMC_HD inline Chunk chunk_of(const TensorRow& row, size_t k) {
    size_t before = row.offset % GRAD_NORM_CHUNK;
    size_t end = (k + 1) * GRAD_NORM_CHUNK - before;
    return {k == 0 ? 0 : end - GRAD_NORM_CHUNK, end < row.n ? end : row.n};
}

// ----------------------------------------------------------------------------
// CPU

// One row's sums: (chunks of the row).
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

// The sums of all rows, in order; returns how many they are.
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

// A step counts when it is finite.
inline void grad_norm_finish(StepScale* out, const double* sums, size_t count, float clip,
                             Cpu, const LossScaling& rule = {}, Betas betas = {}) {
    double sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += sums[i];
    finish_step_scale(out, sum, clip, rule, betas);
}

// grad += other: the two gradients of a tied table
template <typename A>
void add_gradients(A* grad, const A* other, size_t n, Cpu) {
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++)
        grad[i] += other[i];
}

// Gradients as ranks send them in 16 bits, rounded to nearest, and back.
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

// Part of a bucket's table, passed to a kernel by value: a launch can carry 4 KB.
constexpr size_t TABLE_ROWS = 40;
struct TensorTable {
    TensorRow rows[TABLE_ROWS];
    size_t count = 0, chunks = 0;
};

// A block's work: a row and its range of elements.
struct TensorChunk {
    const TensorRow& row;
    size_t from, to; // elements of the row
};
__device__ inline TensorChunk find_chunk(const TensorTable& table, size_t chunk) {
    // At most 40 rows, which all threads read alike: a walk is fast enough.
    size_t r = 0;
    while (r + 1 < table.count && table.rows[r + 1].chunk <= chunk)
        r++;
    const TensorRow& row = table.rows[r];
    Chunk part = chunk_of(row, chunk - row.chunk);
    return {row, part.from, part.to};
}

constexpr int GRAD_NORM_WARPS = 8;

// A block a chunk.
//   sums (chunks of the table)   grad: the bucket's
template <int P>
__global__ void grad_squares_kernel(double* sums, const float* grad,
                                    __grid_constant__ const TensorTable table) {
    TensorChunk chunk = find_chunk(table, blockIdx.x);
    const float* g = grad + chunk.row.offset; // (row.n)
    double sum = 0;
    // Square in double: in float a gradient from 2^64 on would overflow.
    for (size_t i = chunk.from + threadIdx.x * P; i < chunk.to; i += GRAD_NORM_WARPS * 32 * P) {
        Pack<float, P> p = load_some<P>(g + i, chunk.to - i);
        for (int k = 0; k < P; k++)
            sum += double(p.v[k]) * double(p.v[k]);
    }
    sum = block_sum<GRAD_NORM_WARPS>(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

constexpr int FINISH_WARPS = 32;

// One block: which sums a thread adds depends on the count alone.
static __global__ void grad_norm_finish_kernel(StepScale* out, const double* sums, size_t count,
                                               float clip, LossScaling rule, Betas betas) {
    double sum = 0;
    for (size_t i = threadIdx.x; i < count; i += FINISH_WARPS * 32)
        sum += sums[i];
    sum = block_sum<FINISH_WARPS>(sum);
    if (threadIdx.x == 0)
        finish_step_scale(out, sum, clip, rule, betas);
}

// P elements a thread, the last thread fewer.
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

// The same, of an element in another type.
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

// f(table, chunks before it) for up to 40 rows at a time, empty ones left out; returns all chunks.
template <typename F>
size_t for_each_table(const TensorRow* rows, size_t count, F f) {
    // Rows that nobody fills are zeros: equal tables are then equal arguments.
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

        // Hand out a table that is full, or the last.
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

// whether the rows start at multiples of P elements
template <int P>
bool rows_aligned(const TensorTable& table) {
    for (size_t r = 0; r < table.count; r++)
        if (table.rows[r].offset % P) return false;
    return true;
}

// Launches for 40 tensors each; returns how many sums there are.
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

inline void grad_norm_finish(StepScale* out, const double* sums, size_t count, float clip,
                             cudaStream_t stream, const LossScaling& rule = {},
                             Betas betas = {}) {
    launch(grad_norm_finish_kernel, 1, FINISH_WARPS * 32, 0, stream, out, sums, count, clip, rule,
           betas);
}

inline void add_gradients(float* grad, const float* other, size_t n, cudaStream_t stream) {
    bool vector = can_vectorize<float>(0, grad, other);
    pick_element_kernel<float>(n, vector, [&](auto P, unsigned grid) {
        launch(add_gradients_kernel<P>, grid, ELEMENT_THREADS, 0, stream, grad, other, n);
    });
}

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
