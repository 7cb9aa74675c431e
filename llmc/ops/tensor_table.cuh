// tensor_table.cuh - the tensors of a bucket as a table that one launch walks, chunk by chunk
//   Chunks end at multiples of 4096 elements of the bucket and at a tensor's end: a bucket that is
//   cut at such a multiple has the same chunks in its parts.
//   To copy: this file, types.h and cuda_common.h.
#pragma once
#include "cuda_common.h"
#include "types.h"

namespace llmc {

// Elements of a chunk: 16 for each thread of the kernel's block.
constexpr size_t GRAD_NORM_CHUNK = 4096;

// Muon updates MATRIX (muon.cuh), and AdamW the other groups, each at a rate of its own.
enum class MuonGroup : uint8_t { NONE, MATRIX, TABLE, HEAD, VECTOR, VALUES, RESID, X0 };

// A tensor within a bucket. Operators take the bucket's pointers and walk its rows.
struct TensorRow {
    size_t offset, n;  // elements: from the bucket's start; the tensor's length
    bool decay = true; // AdamW, SGD: whether weight decay applies to this tensor

    // For stochastic rounding: a hash of the tensor's name, and the index of this row's first
    // element in the tensor, or in this rank's piece of it under tensor parallelism.
    uint64_t hash = 0;
    uint64_t first = 0;
    // A piece: runs of `run` elements, the first at `start`, with `gap` elements between them.
    uint64_t start = 0, run = 1, gap = 0;

    size_t second = offset; // where the second moments begin; Muon's matrices have none
    // 8-bit moments: the byte where the row's begin, and whether they are codes (small) or floats.
    size_t state = 0;
    bool small = false;

    float rate = 1;    // a factor of the step's learning rate
    MuonGroup group = MuonGroup::NONE;

    size_t chunk = 0; // set by launchers: the number of chunks in the rows before this one
};

// The index of a row's element i in the whole tensor, however the tensor is cut over ranks.
LLMC_HD inline uint64_t whole_index(const TensorRow& row, size_t i) {
    uint64_t piece = row.first + i;
    return row.start + piece + (row.gap ? piece / row.run * row.gap : 0);
}

// A range of a row.
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

// Call f(table, chunks before) for tables of up to 40 rows, none empty. Returns the chunk count.
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
#endif

} // namespace llmc
