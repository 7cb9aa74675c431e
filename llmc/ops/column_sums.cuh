// column_sums.cuh - sums over rows: the gradients of biases and of norms' weights
//   out[c] = or += the sum over n of x[n][c]
//   Each sum is made in parts, one for each strip of rows. Operators that have the rows in
//   registers (the backward passes of norms and GELU) write their parts beside their own work.
//   column_sums makes the parts of matrices, then adds up all parts of all sums: two launches for
//   up to 32 sums.
//   x (N,C)   out (C) acc   parts (count,C), each `stride` elements after the one before
//   Contract: out = or += (accumulate); null: not wanted.  Bitwise repeatable, on the CPU for any
//             number of threads: the number of parts depends on N alone, parts are added in a fixed
//             order, no atomics. On the CPU there is one part.
//   Cost: memory-bound: reads each x once, writes and reads the parts.
//   To copy: this file, types.h and cuda_common.h.
#pragma once
#include <algorithm>
#include <vector>
#include "cuda_common.h"

namespace llmc {

// A sum whose parts are already written, and where they lie.
template <typename A> struct PartialSums {
    A* out;         // (C), or null
    const A* parts; // (count,C)
    size_t count, stride, C;
};

// A sum over the rows of a matrix.
template <typename T> struct ColumnSum {
    acc_t<T>* out; // (C), or null
    const T* x;    // (N,C)
    size_t N, C;
};

// ----------------------------------------------------------------------------
// CPU

// One sum. A thread owns a block of columns and adds the rows in order.
template <typename T>
void column_sums(acc_t<T>* out, const T* x, // (C) (N,C)
                 void* /*scratch*/, size_t N, size_t C, bool accumulate, Cpu) {
    constexpr size_t COLUMNS = 128;
    #pragma omp parallel for
    for (size_t c0 = 0; c0 < C; c0 += COLUMNS) {
        size_t count = std::min(COLUMNS, C - c0);
        acc_t<T> sum[COLUMNS] = {};

        // Add the rows.
        for (size_t n = 0; n < N; n++) {
            const T* row = x + n * C + c0; // (count)
            #pragma omp simd
            for (size_t c = 0; c < count; c++)
                sum[c] += to_acc(row[c]);
        }

        // Write, or add to what is there.
        for (size_t c = 0; c < count; c++)
            out[c0 + c] = accumulate ? out[c0 + c] + sum[c] : sum[c];
    }
}

// Many sums: of matrices, and of parts that are already written.
template <typename T>
void column_sums(const std::vector<ColumnSum<T>>& columns,
                 const std::vector<PartialSums<acc_t<T>>>& ready, void* scratch, bool accumulate,
                 Cpu where) {
    for (const ColumnSum<T>& s : columns)
        if (s.out)
            column_sums(s.out, s.x, scratch, s.N, s.C, accumulate, where);
    // On the CPU a sum has one part, which is the sum.
    for (const auto& s : ready)
        for (size_t c = 0; s.out && c < s.C; c++)
            s.out[c] = accumulate ? s.out[c] + s.parts[c] : s.parts[c];
}

// The number of parts for N rows: of a norm's sums, then of a matrix's or GELU's.
inline size_t strip_parts(size_t, Cpu) { return 1; }
inline size_t column_parts(size_t, Cpu) { return 1; }
inline size_t column_sums_scratch_bytes(size_t, size_t, Cpu) { return 0; }

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

// The number of strips that N rows are cut into, `most` at most. Strips are about 32 rows or
// longer, and equal but for the last one.
inline size_t strips_of(size_t N, size_t most) {
    size_t rows = ceil_div(N, std::min(ceil_div(N, size_t(32)), most));
    return ceil_div(N, rows);
}

// A block of a norm takes one row (or four) at a time, and a large GPU runs a thousand blocks. The
// blocks of column_sums and GELU own only some of the columns, so fewer strips fill the GPU.
inline size_t strip_parts(size_t N, cudaStream_t) { return strips_of(N, 1024); }
inline size_t column_parts(size_t N, cudaStream_t) { return strips_of(N, 128); }

// The scratch for the parts of one matrix's sum.
inline size_t column_sums_scratch_bytes(size_t N, size_t C, cudaStream_t stream) {
    return column_parts(N, stream) * C * sizeof(float);
}

constexpr int COLUMN_WARPS = 8; // in a block

// Sum 32 P columns over a strip of rows and write the sums to part (C). A lane owns P columns; the
// block's warps share the rows, and their sums are added in order in shared memory. load_row(n, c)
// returns the Pack of row n's columns c to c + P - 1.
template <int P, typename F>
__device__ void sum_strip(float* part, size_t from, size_t to, size_t first_column, size_t C,
                          F load_row) {
    LLMC_SHARED(float, sums, COLUMN_WARPS * 32 * P); // (warp,P,32)
    int lane = threadIdx.x % 32;
    int warp = threadIdx.x / 32;
    size_t c = first_column + lane * P;

    // Sum this lane's columns over the warp's share of the rows.
    float sum[P] = {};
    if (c < C)
        for (size_t n = from + warp; n < to; n += COLUMN_WARPS) {
            auto row = load_row(n, c);
            for (int i = 0; i < P; i++)
                sum[i] += to_float(row.v[i]);
        }
    for (int i = 0; i < P; i++)
        sums[(warp * P + i) * 32 + lane] = sum[i];
    __syncthreads(); // all warps have written

    // Add the warps in order.
    for (int j = threadIdx.x; j < 32 * P; j += COLUMN_WARPS * 32) {
        float total = 0;
        for (int w = 0; w < COLUMN_WARPS; w++)
            total += sums[w * 32 * P + j];
        size_t column = first_column + j % 32 * P + j / 32;
        if (part && column < C) part[column] = total;
    }
}

// A table of sums, passed by value: a launch carries 4 KB of arguments.
constexpr size_t SUMS_OF_LAUNCH = 32;
template <typename Row> struct SumTable {
    Row rows[SUMS_OF_LAUNCH];
    unsigned first[SUMS_OF_LAUNCH]; // the number of blocks of the rows before
    unsigned count = 0, blocks = 0;

    // Add a sum that takes so many blocks.
    void add(const Row& row, size_t blocks_of_row) {
        LLMC_CHECK(count < SUMS_OF_LAUNCH, "more than %zu sums in a launch", SUMS_OF_LAUNCH);
        rows[count] = row;
        first[count++] = blocks;
        blocks += unsigned(blocks_of_row);
    }
    // The row that a block works for. All threads take the same steps through the table.
    __device__ unsigned find(unsigned block) const {
        unsigned r = 0;
        while (r + 1 < count && first[r + 1] <= block)
            r++;
        return r;
    }
};

// A row of the table: a matrix, and where its parts go.
template <typename T> struct ColumnStrips {
    const T* x;   // (N,C)
    float* parts; // (strips,C)
    size_t N, C, strips;
};

// The grid is (blocks of columns, over all matrices; strips of rows).
template <typename T, int P>
__global__ void column_sums_kernel(__grid_constant__ const SumTable<ColumnStrips<T>> table) {
    unsigned r = table.find(blockIdx.x);
    const ColumnStrips<T>& s = table.rows[r];
    if (blockIdx.y >= s.strips) return; // the whole block leaves: this matrix has fewer strips
    size_t rows = ceil_div(s.N, s.strips);
    size_t from = blockIdx.y * rows;
    size_t to = from + rows < s.N ? from + rows : s.N;
    size_t column = (blockIdx.x - table.first[r]) * size_t(32 * P);
    sum_strip<P>(s.parts + blockIdx.y * s.C, from, to, column, s.C,
                 [&](size_t n, size_t c) { return load<P>(s.x + n * s.C + c); });
}

constexpr int PARTS_WARPS = 32;

// A block adds the parts of 32 columns. Warp w takes every 32nd part from w on, so that a warp
// loads neighbouring columns; the warps' sums are added in order in shared memory.
static __global__ void add_parts_kernel(__grid_constant__ const SumTable<PartialSums<float>> table,
                                        bool accumulate) {
    LLMC_SHARED(float, sums, PARTS_WARPS * 32); // (warp,column)
    unsigned r = table.find(blockIdx.x);
    const PartialSums<float>& s = table.rows[r];
    unsigned lane = threadIdx.x % 32;
    unsigned warp = threadIdx.x / 32;
    size_t c = (blockIdx.x - table.first[r]) * size_t(32) + lane;

    // Sum the warp's share of the parts.
    float sum = 0;
    if (c < s.C)
        for (size_t part = warp; part < s.count; part += PARTS_WARPS)
            sum += s.parts[part * s.stride + c];
    sums[threadIdx.x] = sum;
    __syncthreads(); // all warps have written

    // Add the warps in order.
    if (warp > 0 || c >= s.C) return;
    float total = 0;
    for (int w = 0; w < PARTS_WARPS; w++)
        total += sums[w * 32 + lane];
    s.out[c] = accumulate ? s.out[c] + total : total;
}

// ----------------------------------------------------------------------------
// norms: a block owns a strip of rows. A thread has the same columns of every row, and keeps K sums
// for each of them in registers; where a row is too long for that (PACKS 0) the sums stay in
// memory, in the block's part.

// WARPS warps share a row, and a thread takes PACKS packs of it. If a row takes one warp, the block
// works on four rows at a time.
template <int P, int WARPS, int PACKS> struct StripOfRows {
    static constexpr int HELD = PACKS ? PACKS : 1; // packs in registers at a time
    static constexpr unsigned threads = WARPS * 32;
    static constexpr size_t step = WARPS == 1 ? 4 : 1; // rows at a time
    unsigned thread = threadIdx.x % threads;
    size_t first, end;

    // This block's strip of `rows` rows, of N in all.
    __device__ StripOfRows(size_t N, size_t rows) {
        size_t from = blockIdx.x * rows;
        first = from + threadIdx.x / threads;
        end = from + rows < N ? from + rows : N;
    }

    // Call f(k, c) for each of this thread's packs: its index among the packs held, and
    // its first column.
    template <typename F>
    __device__ void for_packs(size_t C, F f) const {
        if constexpr (PACKS == 0) {
            for (size_t c = thread * P; c < C; c += threads * P)
                f(0, c);
        } else {
            #pragma unroll
            for (int k = 0; k < PACKS; k++)
                if (size_t c = (thread + k * threads) * P; c < C)
                    f(k, c);
        }
    }

    // Sum K numbers over the row; every thread gets the sums. All threads of the row must call it.
    template <int K>
    __device__ void sum(float (&x)[K]) const {
        if constexpr (WARPS > 1) {
            block_sums<WARPS>(x);
        } else {
            for (int k = 0; k < K; k++)
                x[k] = warp_sum(x[k]);
        }
    }
};

// The K sums of each of a thread's columns over its rows.
//   part (K,C) belongs to the block; null: not wanted
template <int K, int P, int WARPS, int PACKS> struct StripSums {
    typedef StripOfRows<P, WARPS, PACKS> Strip;
    float sum[Strip::HELD][K][P] = {};
    float* part;
    size_t C;

    __device__ StripSums(float* parts, size_t C)
        : part(parts ? parts + blockIdx.x * K * C : nullptr), C(C) {}

    // Call it before a row adds to sum[0], the pack at c. With PACKS 0 it loads what
    // earlier rows left.
    __device__ void take(size_t c, bool first_row) {
        if constexpr (PACKS == 0)
            for (int k = 0; k < K; k++)
                for (int i = 0; i < P; i++)
                    sum[0][k][i] = part && !first_row ? part[k * C + c + i] : 0;
    }
    // Write the sums of one pack, at column c, to the block's part.
    __device__ void leave(int at, size_t c) const {
        for (int k = 0; part && k < K; k++)
            for (int i = 0; i < P; i++)
                part[k * C + c + i] = sum[at][k][i];
    }
    // Call it after a row has added to sum[0]. With PACKS 0 it writes the pack back.
    __device__ void leave_row(size_t c) const {
        if constexpr (PACKS == 0) leave(0, c);
    }

    // Add what earlier warps left `there`, unless this is the first one, and leave the sum there. A
    // lane's numbers lie 32 apart.
    __device__ void add_to(float* there, bool first) {
        #pragma unroll
        for (int j = 0; j < K * P * PACKS; j++) {
            float& x = sum[j / (K * P)][j / P % K][j % P];
            if (!first) x += there[j * 32];
            there[j * 32] = x;
        }
    }

    // Write the block's part after the last row, from sums in registers. All threads must call it.
    __device__ void write(const Strip& strip) {
        if constexpr (WARPS == 1) {
            // The four rows have a warp each: add the warps in order.
            LLMC_SHARED(float, sums, K * P * 32 * PACKS);
            for (unsigned w = 0; w < 4; w++) {
                if (threadIdx.x / 32 == w)
                    add_to(sums + strip.thread, w == 0);
                __syncthreads(); // the next warp reads it
            }
            if (threadIdx.x / 32 < 3) return;
        }
        strip.for_packs(C, [&](int at, size_t c) { leave(at, c); });
    }
};

// Call f(P, WARPS, PACKS) for rows of C elements: as few threads as hold a row in one or two packs
// each. With three sums, 512 threads have registers for one pack only.
template <typename T, int K, typename F>
void pick_strip_kernel(size_t C, bool vector, F f) {
    constexpr int V = VECTOR<T>;
    constexpr int LONG = K == 1 ? 2 : 0;
    size_t packs = C / V;
    if (!vector)
        return C <= 32 ? f(Int<1>(), Int<1>(), Int<1>()) : f(Int<1>(), Int<4>(), Int<0>());
    packs <= 32      ? f(Int<V>(), Int<1>(), Int<1>())
    : packs <= 128   ? f(Int<V>(), Int<4>(), Int<1>())
    : packs <= 256   ? f(Int<V>(), Int<4>(), Int<2>())
    : packs <= 512   ? f(Int<V>(), Int<16>(), Int<1>())
    : packs <= 1024  ? f(Int<V>(), Int<16>(), Int<LONG>())
                     : f(Int<V>(), Int<16>(), Int<0>());
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
    size_t columns_of_block = 32 * (vector ? VECTOR<T> : 1);

    // Give each matrix its blocks and the place of its parts. Unused rows are zero, so equal sums
    // are equal arguments when launches are compared.
    SumTable<ColumnStrips<T>> strips = {};
    SumTable<PartialSums<float>> parts = {};
    float* next = static_cast<float*>(scratch);
    size_t most = 0;
    for (const ColumnSum<T>& s : columns) {
        if (!s.out) continue;
        size_t count = column_parts(s.N, stream);
        ColumnStrips<T> strip = {s.x, next, s.N, s.C, count};
        PartialSums<float> sum = {s.out, next, count, s.C, s.C};
        strips.add(strip, ceil_div(s.C, columns_of_block));
        parts.add(sum, ceil_div(s.C, size_t(32)));
        next += count * s.C;
        most = std::max(most, count);
    }

    // Add the sums whose parts are already written.
    for (const PartialSums<float>& s : ready)
        if (s.out)
            parts.add(s, ceil_div(s.C, size_t(32)));

    // Make the parts, then add them.
    if (strips.count)
        launch(vector ? column_sums_kernel<T, VECTOR<T>> : column_sums_kernel<T, 1>,
               dim3(strips.blocks, unsigned(most)), COLUMN_WARPS * 32, 0, stream, strips);
    if (parts.count)
        launch(add_parts_kernel, parts.blocks, PARTS_WARPS * 32, 0, stream, parts, accumulate);
}

// One sum of one matrix.
template <typename T>
void column_sums(float* out, const T* x, void* scratch, size_t N, size_t C, bool accumulate,
                 cudaStream_t stream) {
    column_sums<T>({{out, x, N, C}}, {}, scratch, accumulate, stream);
}
#endif

} // namespace llmc
