// column_sums.cuh - sums over the rows of matrices: the gradients of biases
//   out[c] = or += the sum over n of x[n][c]
//   Each sum is made in parts, one for each strip of rows. column_sums makes the parts of matrices,
//   then adds them up, with the parts that other operators have written: two launches for up to 32
//   sums.
//   x (N,C)   out (C) acc
//   Contract: out = or += (accumulate); null: not wanted.  Bitwise repeatable (partial_sums.cuh).
//   Cost: memory-bound: reads each x once, writes and reads the parts.
//   To copy: this file, partial_sums.cuh, types.h and cuda_common.h.
#pragma once
#include "cuda_common.h"
#include "partial_sums.cuh"
#include "types.h"

namespace llmc {

// A sum over the rows of a matrix.
template <typename T> struct ColumnSum {
    acc_t<T>* out; // (C), or null
    const T* x;    // (N,C)
    size_t N, C;
};

// ----------------------------------------------------------------------------
// CPU

// One sum.
template <typename T>
void column_sums(acc_t<T>* out, const T* x, void* /*scratch*/, size_t N, size_t C, // (C) (N,C)
                 bool accumulate, Cpu) {
    sum_columns<1>({out}, N, C, accumulate, [&](auto& sum, size_t n, size_t c0, auto columns) {
        const T* row = x + n * C + c0; // (columns)
        #pragma omp simd
        for (size_t c = 0; c < columns; c++)
            sum[0][c] += to_acc(row[c]);
    });
}

// Many sums: of matrices, and of parts that are already written.
template <typename T>
void column_sums(const std::vector<ColumnSum<T>>& columns,
                 const std::vector<PartialSums<acc_t<T>>>& ready, void* scratch,
                 bool accumulate, Cpu where) {
    for (const ColumnSum<T>& s : columns)
        if (s.out)
            column_sums(s.out, s.x, scratch, s.N, s.C, accumulate, where);
    add_parts(ready, accumulate, where);
}
inline size_t column_sums_scratch_bytes(size_t, size_t, Cpu) { return 0; }

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

// The scratch for the parts of one matrix's sum.
inline size_t column_sums_scratch_bytes(size_t N, size_t C, cudaStream_t stream) {
    return strips_of(N, COLUMN_STRIPS, stream) * C * sizeof(float);
}

// A matrix, and where its parts go.
template <typename T> struct ColumnStrips {
    const T* x;   // (N,C)
    float* parts; // (strips,C)
    size_t N, C, strips;
};

// The grid is (blocks of columns, strips of rows, matrices).
template <typename T, int P>
__global__ void column_sums_kernel(__grid_constant__ const SumList<ColumnStrips<T>> list) {
    const ColumnStrips<T>& s = list.sums[blockIdx.z];
    size_t column = blockIdx.x * size_t(32 * P);
    // The whole block leaves where its matrix is narrower, or has fewer strips, than others.
    if (column >= s.C || blockIdx.y >= s.strips) return;

    // Sum the strip.
    size_t rows = ceil_div(s.N, s.strips);
    size_t from = blockIdx.y * rows;
    size_t to = from + rows < s.N ? from + rows : s.N;
    float* part = s.parts + blockIdx.y * s.C; // (C)
    auto load_row = [&](size_t n, size_t c) { return load<P>(s.x + n * s.C + c); };
    sum_strip<COLUMN_WARPS, P>(from, to, column, s.C, load_row,
                               [&](size_t c, float sum) { part[c] = sum; });
}

// ----------------------------------------------------------------------------
// launchers

// Two launches at most: one reads all matrices, one adds all parts.
//   scratch: column_sums_scratch_bytes of every matrix
template <typename T>
void column_sums(const std::vector<ColumnSum<T>>& columns,
                 const std::vector<PartialSums<float>>& ready, void* scratch, bool accumulate,
                 cudaStream_t stream) {
    // Load 16 bytes at a time if every matrix allows it.
    bool vector = true;
    for (const ColumnSum<T>& s : columns)
        vector = vector && can_vectorize<T>(s.C, s.x);

    // Give each matrix the place of its parts.
    SumList<ColumnStrips<T>> strips = {};
    std::vector<PartialSums<float>> parts = ready;
    float* next = static_cast<float*>(scratch);
    size_t most_strips = 0;
    size_t most_columns = 0;
    for (const ColumnSum<T>& s : columns) {
        if (!s.out) continue;
        size_t count = strips_of(s.N, COLUMN_STRIPS, stream);
        strips.add({s.x, next, s.N, s.C, count});
        parts.push_back({s.out, next, count, s.C, s.C});
        next += count * s.C;
        most_strips = std::max(most_strips, count);
        most_columns = std::max(most_columns, s.C);
    }

    // Make the parts, then add them.
    size_t columns_of_block = 32 * (vector ? VECTOR<T> : 1);
    dim3 grid(unsigned(ceil_div(most_columns, columns_of_block)), unsigned(most_strips),
              strips.count);
    if (strips.count)
        launch(vector ? column_sums_kernel<T, VECTOR<T>> : column_sums_kernel<T, 1>, grid,
               COLUMN_WARPS * 32, stream, strips);
    add_parts(parts, accumulate, stream);
}

template <typename T>
void column_sums(float* out, const T* x, void* scratch, size_t N, size_t C, bool accumulate,
                 cudaStream_t stream) {
    column_sums<T>({{out, x, N, C}}, {}, scratch, accumulate, stream);
}
#endif

} // namespace llmc
