// grad_norm.cuh - the global gradient norm, the clipping factor, is all finite - arXiv:1211.5063
//   norm = sqrt(sum g^2),   scale = min(1, clip / norm)
//   grad (n) acc   or a table of tensors in one bucket: a row says where each starts and its length
//   sums: one double per chunk of 4096 elements of a tensor, so that the norm does not depend on
//         how tensors are shared out; the last chunk of a tensor is shorter
//   Contract: sums =;  finish adds them and writes {norm, scale, finite}, step counts finite steps.
//             Bitwise repeatable. The two versions add a chunk's squares, and the sums, in orders
//             of their own. Nothing waits for the host.
//   Cost: memory-bound: reads grad.  A launch for 64 tensors.
//   To copy: this file and common.h.
#pragma once
#include "common.h"

constexpr size_t GRAD_NORM_CHUNK = 4096;

// Written by the norm, read by the optimizer; stays where the gradients are, so that no step waits
// for the host.
struct StepScale {
    double norm;
    float scale;  // what gradients are multiplied with
    int finite;   // 0: the optimizer writes nothing
    int64_t step; // optimizer steps done, this one included
};

// A tensor of a bucket: the bucket's pointers are shared, rows are what an operator walks.
struct TensorRow {
    size_t offset, n;   // elements from the bucket's start, its length
    bool decay = true;  // AdamW, SGD: weight decay is for this tensor too
    uint64_t hash = 0;  // of its name, and
    uint64_t first = 0; // the index of its first element in the tensor, or in a tensor-parallel
                        // rank's piece of it: for stochastic rounding
    size_t chunk = 0;   // launchers: chunks of the rows before it
};

// Chunks end at multiples of GRAD_NORM_CHUNK of the bucket, and where a row ends: a bucket that is
// cut there has the same chunks in its parts.
struct Chunk {
    size_t from, to; // elements of the row
};
HD inline size_t chunks_of(const TensorRow& row) {
    if (row.n == 0) return 0;
    return (row.offset % GRAD_NORM_CHUNK + row.n + GRAD_NORM_CHUNK - 1) / GRAD_NORM_CHUNK;
}
HD inline Chunk chunk_of(const TensorRow& row, size_t k) {
    size_t before = row.offset % GRAD_NORM_CHUNK, end = (k + 1) * GRAD_NORM_CHUNK - before;
    return {k == 0 ? 0 : end - GRAD_NORM_CHUNK, end < row.n ? end : row.n};
}

// ----------------------------------------------------------------------------
// CPU

template <typename A> void grad_squares(double* sums, const A* grad, const TensorRow& row) {
    #pragma omp parallel for
    for (size_t k = 0; k < chunks_of(row); k++) {
        Chunk chunk = chunk_of(row, k);
        const A* g = grad + row.offset;
        double sum = 0;
        #pragma omp simd reduction(+ : sum)
        for (size_t i = chunk.from; i < chunk.to; i++) sum += double(g[i]) * double(g[i]);
        sums[k] = sum;
    }
}
template <typename A> void grad_squares(double* sums, const A* grad, size_t n, Cpu) {
    grad_squares(sums, grad, TensorRow{0, n});
}

// sums: of the rows in order; returns how many
template <typename A>
size_t grad_squares(double* sums, const A* grad, const TensorRow* rows, size_t count, Cpu) {
    size_t chunks = 0;
    for (size_t r = 0; r < count; chunks += chunks_of(rows[r++]))
        grad_squares(sums + chunks, grad, rows[r]);
    return chunks;
}

inline void grad_norm_finish(StepScale* out, const double* sums, size_t count, float clip, Cpu) {
    double sum = 0;
    for (size_t i = 0; i < count; i++) sum += sums[i];
    out->norm = std::sqrt(sum);
    out->finite = std::isfinite(sum);
    out->scale = clip > 0 && out->norm > clip ? float(clip / out->norm) : 1.0f;
    out->step += out->finite;
}

// grad += other: the two gradients of a tied table
template <typename A> void add_gradients(A* grad, const A* other, size_t n, Cpu) {
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) grad[i] += other[i];
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if KERNELS

// Part of a bucket's table, passed to a kernel by value (4 KB is what a launch can carry).
constexpr size_t TABLE_ROWS = 64;
struct TensorTable {
    TensorRow rows[TABLE_ROWS];
    size_t count = 0, chunks = 0;
};

struct TensorChunk {
    const TensorRow& row;
    size_t from, to; // elements of the row
};
__device__ inline TensorChunk find_chunk(const TensorTable& table, size_t chunk) {
    size_t r = 0;
    while (r + 1 < table.count && table.rows[r + 1].chunk <= chunk) r++;
    const TensorRow& row = table.rows[r];
    Chunk part = chunk_of(row, chunk - row.chunk);
    return {row, part.from, part.to};
}

constexpr int GRAD_NORM_WARPS = 8;

// A block a chunk.
template <int P>
__global__ void grad_squares_kernel(double* sums, const float* grad,
                                    __grid_constant__ const TensorTable table) {
    TensorChunk chunk = find_chunk(table, blockIdx.x);
    const float* g = grad + chunk.row.offset;
    double sum = 0;
    for (size_t i = chunk.from + threadIdx.x * P; i < chunk.to; i += GRAD_NORM_WARPS * 32 * P) {
        Pack<float, P> p = load_some<P>(g + i, chunk.to - i);
        for (int k = 0; k < P; k++) sum += double(p.v[k]) * double(p.v[k]);
    }
    sum = block_sum<GRAD_NORM_WARPS>(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

constexpr int FINISH_WARPS = 32;

// One block: the sums that a thread adds depend on the count alone.
static __global__ void grad_norm_finish_kernel(StepScale* out, const double* sums, size_t count,
                                               float clip) {
    double sum = 0;
    for (size_t i = threadIdx.x; i < count; i += FINISH_WARPS * 32) sum += sums[i];
    sum = block_sum<FINISH_WARPS>(sum);
    if (threadIdx.x > 0) return;
    double norm = sqrt(sum);
    int finite = sum - sum == 0; // NaN and infinity have no such difference
    out->norm = norm;
    out->finite = finite;
    out->scale = clip > 0 && norm > clip ? float(clip / norm) : 1.0f;
    out->step += finite;
}

template <int P> __global__ void add_gradients_kernel(float* grad, const float* other, size_t n) {
    size_t i = first_element<P>();
    if (i >= n) return;
    Pack<float, P> a = load_some<P>(grad + i, n - i), b = load_some<P>(other + i, n - i);
    for (int k = 0; k < P; k++) a.v[k] += b.v[k];
    store_some(grad + i, a, n - i);
}

// ----------------------------------------------------------------------------
// launchers

// f(table, chunks before it) for up to 64 rows at a time, empty ones left out; returns all chunks
template <typename F> size_t for_each_table(const TensorRow* rows, size_t count, F f) {
    size_t done = 0;
    TensorTable table;
    for (size_t r = 0; r < count; r++) {
        if (rows[r].n > 0) {
            TensorRow& row = table.rows[table.count++];
            row = rows[r], row.chunk = table.chunks;
            table.chunks += chunks_of(row);
        }
        if (table.count == TABLE_ROWS || (r + 1 == count && table.count > 0)) {
            f(table, done);
            done += table.chunks, table.count = 0, table.chunks = 0;
        }
    }
    return done;
}
// whether the rows start at multiples of P elements
template <int P> bool rows_aligned(const TensorTable& table) {
    for (size_t r = 0; r < table.count; r++)
        if (table.rows[r].offset % P) return false;
    return true;
}

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
                             cudaStream_t stream) {
    launch(grad_norm_finish_kernel, 1, FINISH_WARPS * 32, 0, stream, out, sums, count, clip);
}

inline void add_gradients(float* grad, const float* other, size_t n, cudaStream_t stream) {
    bool vector = can_vectorize<float>(0, grad, other);
    pick_element_kernel<float>(n, vector, [&](auto P, unsigned grid) {
        launch(add_gradients_kernel<P>, grid, ELEMENT_THREADS, 0, stream, grad, other, n);
    });
}
#endif
