// partial_sums.cuh - sums over rows, made in parts: what norms, GELU and column_sums share
//   out[c] = or += the sum over parts of parts[part][c]
//   An operator that has the rows in registers writes a part for each strip of rows, beside its own
//   work. add_parts adds up the parts of up to 32 sums, in one launch.
//   out (C) acc   parts (count,C), each `stride` elements after the one before
//   Contract: out = or += (accumulate); null: not wanted.  Bitwise repeatable, on the CPU for any
//             number of threads: the number of parts depends on N alone, parts are added in a fixed
//             order, no atomics. On the CPU there is one part, unless a row leaves a number.
//   To copy: this file, types.h and cuda_common.h.
#pragma once
#include <algorithm>
#include <vector>
#include "cuda_common.h"
#include "types.h"

namespace llmc {

// A sum whose parts are already written, and where they lie.
template <typename A> struct PartialSums {
    A* out;         // (C), or null
    const A* parts; // (count,C)
    size_t count, stride, C;
};

// The most parts of a norm's sums, and of a matrix's or GELU's. A block of a norm takes one row (or
// four) at a time, and a large GPU runs a thousand blocks. The other blocks own only some of the
// columns, so fewer strips fill the GPU.
constexpr size_t ROW_STRIPS = 1024, COLUMN_STRIPS = 128;

// ----------------------------------------------------------------------------
// CPU

// Make K sums over N rows, a thread a block of columns: the rows come in order, so the result does
// not depend on the number of threads. add_row(sum, n, c0, columns) adds row n, from column c0 on,
// to sum (K,columns). AVX-512 registers hold two sums of a block.
template <int K, typename A, typename F>
void sum_columns(A* const (&out)[K], size_t N, size_t C, bool accumulate, F add_row) { // (C) each
    constexpr size_t COLUMNS = 128;
    #pragma omp parallel for
    for (size_t c0 = 0; c0 < C; c0 += COLUMNS) {
        size_t count = std::min(COLUMNS, C - c0);
        A sum[K][COLUMNS] = {};

        // Add the rows. With a constant width the compiler keeps the sums in registers.
        for (size_t n = 0; n < N && count == COLUMNS; n++)
            add_row(sum, n, c0, std::integral_constant<size_t, COLUMNS>());
        for (size_t n = 0; n < N && count < COLUMNS; n++)
            add_row(sum, n, c0, count);

        // Write, or add to what earlier micro-batches left.
        for (int k = 0; k < K; k++)
            for (size_t c = 0; c < count && out[k]; c++)
                out[k][c0 + c] = accumulate ? out[k][c0 + c] + sum[k][c] : sum[k][c];
    }
}

template <typename A>
void add_parts(const std::vector<PartialSums<A>>& sums, bool accumulate, Cpu) {
    for (const PartialSums<A>& s : sums)
        for (size_t i = 0; s.out && i < s.count * s.C; i++) {
            A x = s.parts[i / s.C * s.stride + i % s.C];
            A& out = s.out[i % s.C];
            out = accumulate || i >= s.C ? out + x : x;
        }
}

inline size_t strips_of(size_t, size_t, Cpu) { return 1; }

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

// The number of strips that N rows are cut into, `most` at most. Strips are about 32 rows or
// longer, and equal but for the last one.
inline size_t strips_of(size_t N, size_t most, cudaStream_t) {
    size_t rows = ceil_div(N, std::min(ceil_div(N, 32), most));
    return ceil_div(N, rows);
}

// Sum 32 P columns over the rows `from` to `to`, in a block of WARPS warps: call write(c, sum) for
// each column. A lane owns P columns; the warps share the rows, and their sums are added in order
// in shared memory. load_row(n, c) returns the Pack of row n's columns c to c + P - 1.
template <int WARPS, int P, typename F, typename G>
__device__ void sum_strip(size_t from, size_t to, size_t first_column, size_t C, F load_row,
                          G write) {
    LLMC_SHARED(float, sums, WARPS * 32 * P); // (warp,P,32)
    int lane = threadIdx.x % 32;
    int warp = threadIdx.x / 32;
    size_t c = first_column + lane * P;

    // Sum this lane's columns over the warp's share of the rows.
    float sum[P] = {};
    if (c < C)
        for (size_t n = from + warp; n < to; n += WARPS) {
            auto row = load_row(n, c);
            for (int i = 0; i < P; i++)
                sum[i] += to_float(row.v[i]);
        }
    for (int i = 0; i < P; i++)
        sums[(warp * P + i) * 32 + lane] = sum[i];
    __syncthreads(); // all warps have written

    // Add the warps in order.
    for (int j = threadIdx.x; j < 32 * P; j += WARPS * 32) {
        float total = 0;
        for (int w = 0; w < WARPS; w++)
            total += sums[w * 32 * P + j];
        size_t column = first_column + j % 32 * P + j / 32;
        if (column < C) write(column, total);
    }
}

// A list of sums, passed by value: a launch carries 4 KB of arguments.
constexpr size_t SUMS_OF_LAUNCH = 32;
template <typename Sum> struct SumList {
    Sum sums[SUMS_OF_LAUNCH];
    unsigned count;
    void add(const Sum& sum) {
        LLMC_CHECK(count < SUMS_OF_LAUNCH, "more than %zu sums in a launch", SUMS_OF_LAUNCH);
        sums[count++] = sum;
    }
};

constexpr int COLUMN_WARPS = 8; // in a block that sums rows
constexpr int PARTS_WARPS = 32; // in a block that adds parts

// The grid is (blocks of 32 columns, sums).
static __global__ void add_parts_kernel(__grid_constant__ const SumList<PartialSums<float>> list,
                                        bool accumulate) {
    const PartialSums<float>& s = list.sums[blockIdx.y];
    auto load_part = [&](size_t part, size_t c) { return load<1>(s.parts + part * s.stride + c); };
    sum_strip<PARTS_WARPS, 1>(0, s.count, blockIdx.x * size_t(32), s.C, load_part,
                              [&](size_t c, float sum) {
        s.out[c] = accumulate ? s.out[c] + sum : sum;
    });
}

// One launch. Unused sums are zero, so equal lists are equal arguments when launches are compared.
template <typename A>
void add_parts(const std::vector<PartialSums<A>>& sums, bool accumulate, cudaStream_t stream) {
    SumList<PartialSums<float>> list = {};
    size_t most = 0; // columns
    for (const PartialSums<A>& s : sums) {
        if (!s.out) continue;
        list.add(s);
        most = std::max(most, s.C);
    }
    if (list.count)
        launch(add_parts_kernel, dim3(unsigned(ceil_div(most, 32)), list.count), PARTS_WARPS * 32,
               stream, list, accumulate);
}
#endif

} // namespace llmc
