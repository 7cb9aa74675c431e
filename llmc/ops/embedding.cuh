// embedding.cuh - token and position embedding, forward and backward
//   out = scale wte[token - vocab_start] + wpe[position - doc_start]   (wpe null: tokens only)
//   out, dout (N,C)   wte, dwte (Vp,C) acc   wpe, dwpe (P,C) acc   tokens, positions, doc_start (N)
//   Under tensor parallelism each rank's table holds Vp rows of the vocabulary, from vocab_start
//   on. A token outside this range gives zeros forward and adds nothing backward.
//   Contract: out =    dwte, dwpe = (tables zeroed first) or += (accumulate); null: frozen.
//             Bitwise repeatable: rows of dout that go to the same row of a table are added one by
//             one, in their order, without atomics. All versions give the same bits.
//   Cost: memory-bound. forward reads a row of each table and writes out. backward reads dout and
//         adds into the tables; it writes them whole when it does not accumulate. The GPU sorts
//         row numbers by token, in a scratch of embedding_scratch_bytes. All rows of one token are
//         read by one warp for every 32 loads of columns.
//   To copy: this file, rows.cuh, types.h and cuda_common.h.
#pragma once
#include <utility>
#include "cuda_common.h"
#include "rows.cuh"
#include "types.h"

namespace llmc {

// ----------------------------------------------------------------------------
// CPU

// One task a row: copy the token's row of wte, then add the position's row of wpe.
template <typename T>
void embedding_forward(T* out,                                                        // (N,C)
                       const int* tokens, const int* positions, const int* doc_start, // (N) each
                       const T* wte, const T* wpe, // (Vp,C) (P,C) or null
                       size_t N, size_t vocab_start, size_t Vp, size_t C, Cpu,
                       acc_t<T> scale = 1) {
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        T* y = out + n * C; // (C)

        // Copy the token's row. A token below vocab_start wraps around to a number beyond Vp.
        size_t own = size_t(tokens[n]) - vocab_start;
        if (own < Vp)
            memcpy(y, wte + own * C, C * sizeof(T));
        else
            memset(y, 0, C * sizeof(T));
        for (size_t c = 0; scale != 1 && c < C; c++)
            y[c] = from_acc<T>(to_acc(y[c]) * scale);

        // Add the row of its position within the document.
        if (!wpe) continue;
        const T* position = wpe + size_t(positions[n] - doc_start[n]) * C;
        #pragma omp simd
        for (size_t c = 0; c < C; c++)
            y[c] = from_acc<T>(to_acc(y[c]) + to_acc(position[c]));
    }
}

// Add each row of dout to its token's row and its position's row. A null table is frozen.
template <typename T>
void embedding_backward_weight(acc_t<T>* dwte, acc_t<T>* dwpe,          // (Vp,C) (P,C), = or +=
                               const T* dout,                           // (N,C)
                               const int* tokens, const int* positions, // (N) (N)
                               const int* doc_start, void* /*scratch*/, // (N)
                               size_t N, size_t vocab_start, size_t Vp, size_t P, size_t C,
                               bool accumulate, Cpu, acc_t<T> scale = 1) {
    typedef acc_t<T> A;
    auto zero = [](A* table, size_t rows, size_t C) {
        #pragma omp parallel for
        for (size_t r = 0; r < rows; r++)
            memset(table + r * C, 0, C * sizeof(A));
    };

    // Clear the whole tables, because most of their rows have no token in a batch.
    if (!accumulate && dwte)
        zero(dwte, Vp, C);
    if (!accumulate && dwpe)
        zero(dwpe, P, C);

    // A thread owns a block of columns and walks all rows: no two threads add to the same element.
    constexpr size_t COLUMNS = 128;
    #pragma omp parallel for
    for (size_t c0 = 0; c0 < C; c0 += COLUMNS) {
        size_t end = C - c0 < COLUMNS ? C : c0 + COLUMNS;
        for (size_t n = 0; n < N; n++) {
            const T* d = dout + n * C; // (C)
            size_t own = size_t(tokens[n]) - vocab_start;
            // A token of another shard adds nothing here.
            A* token = dwte && own < Vp ? dwte + own * C : nullptr;
            A* position = dwpe ? dwpe + size_t(positions[n] - doc_start[n]) * C : nullptr;
            for (size_t c = c0; token && c < end; c++)
                token[c] += scale * to_acc(d[c]);
            for (size_t c = c0; position && c < end; c++)
                position[c] += to_acc(d[c]);
        }
    }
}

// The CPU adds rows in their own order and sorts nothing.
inline size_t embedding_scratch_bytes(size_t, Cpu) { return 0; }

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

// WARPS warps share a row of out.
template <typename T, int P, int WARPS>
__global__ void embedding_forward_kernel(T* out, const int* tokens, const int* positions,
                                         const int* doc_start, const T* wte, const T* wpe, size_t N,
                                         size_t vocab_start, size_t Vp, size_t C, float scale) {
    RowOfBlock<WARPS> row;
    if (row.n >= N) return;

    // Find the two table rows of this token.
    size_t own = size_t(tokens[row.n]) - vocab_start;
    const T* token = own < Vp ? wte + own * C : nullptr; // (C)
    const T* position = wpe ? wpe + size_t(positions[row.n] - doc_start[row.n]) * C : nullptr;
    for (size_t c = row.thread * P; c < C; c += row.threads * P) {
        // A token of another shard leaves zeros: the ranks' outputs are summed afterwards.
        Pack<T, P> x = {};
        if (token) x = load<P>(token + c);
        for (int i = 0; scale != 1 && i < P; i++)
            x.v[i] = from_acc<T>(to_float(x.v[i]) * scale);
        if (position) {
            Pack<T, P> y = load<P>(position + c);
            for (int i = 0; i < P; i++)
                x.v[i] = from_acc<T>(to_float(x.v[i]) + to_float(y.v[i]));
        }
        store(out + row.n * C + c, x);
    }
}

// Maps row n of dout to the table row that it adds to, or to `rows` if it adds to none.
struct EmbeddingKeys {
    const int *key, *less; // (N) (N) or null
    // Keys are numbers of table rows: key[n] - less[n] - start, or `rows` if out of range.
    unsigned start, rows;
    __device__ unsigned operator()(int n) const {
        unsigned own = unsigned(key[n] - (less ? less[n] : 0)) - start;
        return own < rows ? own : rows;
    }
};

// Radix sort of row numbers by key, DIGIT_BITS bits a pass. It is stable: equal keys keep their
// order. One warp walks a tile of SORT_TILE rows in order.
//   1. count (SCATTER false): counts (DIGITS, tiles) is how often each digit occurs in each tile
//   2. scan: counts becomes the place where a tile's next row with a digit goes
//   3. scatter (SCATTER true): each row goes to its place
constexpr int DIGIT_BITS = 9, DIGITS = 1 << DIGIT_BITS, SORT_TILE = 1024;

// One pass of the sort: step 1, or (SCATTER) step 3.
//   sorted, rows (N); null rows stands for 0 .. N-1   counts (DIGITS, tiles)
template <bool SCATTER>
__global__ void embedding_sort_kernel(int* sorted, int* counts, const int* rows, EmbeddingKeys keys,
                                      int shift, size_t N) {
    LLMC_SHARED(int, next, DIGITS);
    unsigned lane = threadIdx.x;
    size_t from = size_t(blockIdx.x) * SORT_TILE;
    size_t to = from + SORT_TILE < N ? from + SORT_TILE : N;

    // Start each digit's counter: at zero to count, at its place in the sorted list to scatter.
    for (unsigned d = lane; d < DIGITS; d += 32)
        next[d] = SCATTER ? counts[d * gridDim.x + blockIdx.x] : 0;
    __syncwarp(); // all lanes have written next

    // Walk in order: equal keys keep the rows' order, so the sums are always added in that order.
    for (size_t start = from; start < to; start += 32) {
        // Each lane takes one of the next 32 rows.
        size_t i = start + lane;
        bool mine = i < to;
        int n = mine ? (rows ? rows[i] : int(i)) : 0;
        unsigned digit = mine ? keys(n) >> shift & (DIGITS - 1) : 0;

        // Find the lanes that have this lane's digit, one bit at a time.
        unsigned peers = __ballot_sync(ALL_LANES, mine);
        for (int bit = 0; bit < DIGIT_BITS; bit++) {
            unsigned ones = __ballot_sync(ALL_LANES, digit >> bit & 1);
            peers &= digit >> bit & 1 ? ones : ~ones;
        }

        // Place the row after its peers' rows in lower lanes. The first peer counts all peers.
        int before = __popc(peers & ((1u << lane) - 1));
        int at = next[digit] + before;
        __syncwarp(); // all lanes have read next
        if (mine && SCATTER) sorted[at] = n;
        if (mine && before == 0)
            next[digit] = at + __popc(peers);
        __syncwarp(); // the next rows may read
    }

    // Write the tile's counts for the scan.
    for (unsigned d = lane; !SCATTER && d < DIGITS; d += 32)
        counts[d * gridDim.x + blockIdx.x] = next[d];
}

// Exclusive prefix sum, in one block: counts[i] becomes the sum of all counts before it.
constexpr int SCAN_THREADS = 1024;
static __global__ void embedding_scan_kernel(int* counts, size_t count) {
    LLMC_SHARED(int, sums, SCAN_THREADS);

    // Sum one range of counts for each thread.
    size_t each = ceil_div(count, SCAN_THREADS);
    size_t from = threadIdx.x * each;
    size_t to = from + each < count ? from + each : count;
    int sum = 0;
    for (size_t i = from; i < to; i++)
        sum += counts[i];
    sums[threadIdx.x] = sum;
    __syncthreads(); // all have written

    // Prefix sum over the threads: add the value 1, 2, 4, .. threads before. Each step doubles the
    // range that a thread's sum covers.
    for (unsigned step = 1; step < SCAN_THREADS; step *= 2) {
        int before = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
        __syncthreads(); // all have read
        sums[threadIdx.x] += before;
        __syncthreads(); // all have added
    }

    // Write the place of each count.
    int total = sums[threadIdx.x] - sum;
    for (size_t i = from; i < to; i++) {
        int own = counts[i];
        counts[i] = total;
        total += own;
    }
}

// Sums the rows of equal keys. A warp has one sorted row and 32 * P columns; if a key's run begins
// at this row, the warp adds the whole run to the table, with ADD_AHEAD loads in flight.
constexpr int ADD_WARPS = 4, ADD_AHEAD = 16;
template <typename T, int P>
__global__ void embedding_add_kernel(float* table, const T* dout, const int* sorted,
                                     EmbeddingKeys keys, size_t N, size_t C, float scale) {
    constexpr int F = P % 4 ? 1 : 4; // the table's floats, 16 bytes at a time
    size_t i = size_t(blockIdx.x) * ADD_WARPS + threadIdx.x / 32;
    size_t lane = threadIdx.x % 32;
    size_t c = (size_t(blockIdx.y) * 32 + lane) * P;

    // Leave if the row adds to no key or if its run began earlier. The whole warp leaves together.
    if (i >= N) return;
    unsigned key = keys(sorted[i]);
    if (key == keys.rows) return;
    if (i > 0 && keys(sorted[i - 1]) == key)
        return;

    // Start from the table's row, which is zero or an earlier micro-batch's gradient.
    bool mine = c < C;
    const T* column = dout + (mine ? c : 0);  // (N,C) from column c on
    float* out = table + size_t(key) * C + c; // (P)
    Pack<float, F> sum[P / F] = {};
    for (int k = 0; mine && k < P / F; k++)
        sum[k] = load<F>(out + k * F);

    for (bool more = true; more; i += 32) {
        // Read the next 32 row numbers, one a lane. Rows of this key come first.
        int n = i + lane < N ? sorted[i + lane] : 0;
        int count = __popc(__ballot_sync(ALL_LANES, i + lane < N && keys(n) == key));

        // row(r) loads a row's columns, add() adds them to the sums.
        auto row = [&](int r) {
            return load<P>(column + size_t(__shfl_sync(ALL_LANES, n, r)) * C);
        };
        auto add = [&](Pack<T, P> d) {
            for (int k = 0; k < P; k++)
                sum[k / F].v[k % F] += scale * to_float(d.v[k]);
        };

        // Add the rows in order, after loading ADD_AHEAD of them at once.
        int r = 0;
        for (; r + ADD_AHEAD <= count; r += ADD_AHEAD) {
            Pack<T, P> d[ADD_AHEAD];
            for (int a = 0; a < ADD_AHEAD; a++)
                d[a] = row(r + a);
            for (int a = 0; a < ADD_AHEAD; a++)
                add(d[a]);
        }
        for (; r < count; r++)
            add(row(r));
        more = count == 32;
    }

    // Write. No other warp has this key and these columns, so no atomics are needed.
    for (int k = 0; mine && k < P / F; k++)
        store(out + k * F, sum[k]);
}

// ----------------------------------------------------------------------------
// launchers: any C and alignment

template <typename T>
void embedding_forward(T* out, const int* tokens, const int* positions, const int* doc_start,
                       const T* wte, const T* wpe, size_t N, size_t vocab_start, size_t Vp,
                       size_t C, cudaStream_t stream, float scale = 1) {
    pick_row_kernel<T>(C, can_vectorize<T>(C, out, wte, wpe), [&](auto P, auto WARPS) {
        launch(embedding_forward_kernel<T, P, WARPS>,
               row_grid<WARPS>(N), row_block<WARPS>(), stream,
               out, tokens, positions, doc_start, wte, wpe, N, vocab_start, Vp, C, scale);
    });
}

// Two lists of N row numbers, which the passes read and write in turn, and the counts.
inline size_t embedding_scratch_bytes(size_t N, cudaStream_t) {
    return (2 * N + DIGITS * ceil_div(N, SORT_TILE)) * sizeof(int);
}

// table (rows,C) = or += the sum of dout's rows (N,C), each added to the table row of its key.
template <typename T>
void embedding_add(float* table, const T* dout, EmbeddingKeys keys, void* scratch, size_t N,
                   size_t C, bool accumulate, cudaStream_t stream, float scale = 1) {
    size_t rows = keys.rows;
    unsigned tiles = unsigned(ceil_div(N, SORT_TILE));
    int* sorted = static_cast<int*>(scratch); // (N)
    int* other = sorted + N;                  // (N)
    int* counts = other + N;                  // (DIGITS, tiles)

    // Sort by one digit after another. The first pass reads rows 0 .. N-1 as they are.
    const int* from = nullptr;
    // `rows` is itself a key: rows that add to no table row are sorted after all others.
    for (int shift = 0; shift == 0 || rows >> shift > 0; shift += DIGIT_BITS) {
        if (from) std::swap(sorted, other);
        launch(embedding_sort_kernel<false>,
               tiles, 32, stream,
               sorted, counts, from, keys, shift, N);
        launch(embedding_scan_kernel,
               1, SCAN_THREADS, stream,
               counts, DIGITS * tiles);
        launch(embedding_sort_kernel<true>,
               tiles, 32, stream,
               sorted, counts, from, keys, shift, N);
        from = sorted;
    }

    // Zero the table.
    if (!accumulate)
        LLMC_CUDA_CHECK(cudaMemsetAsync(table, 0, rows * C * sizeof(float), stream));

    // Add each key's rows.
    auto add = [&](auto P) {
        dim3 grid(unsigned(ceil_div(N, ADD_WARPS)), unsigned(ceil_div(C, 32 * P)));
        launch(embedding_add_kernel<T, P>,
               grid, ADD_WARPS * 32, stream,
               table, dout, from, keys, N, C, scale);
    };
    can_vectorize<T>(C, dout, table) ? add(Int<VECTOR<T>>()) : add(Int<1>());
}

// Both tables, one after the other in the same scratch. Only the token's row is scaled.
template <typename T>
void embedding_backward_weight(float* dwte, float* dwpe, const T* dout, const int* tokens,
                               const int* positions, const int* doc_start, void* scratch, size_t N,
                               size_t vocab_start, size_t Vp, size_t P, size_t C, bool accumulate,
                               cudaStream_t stream, float scale = 1) {
    EmbeddingKeys of_token = {tokens, nullptr, unsigned(vocab_start), unsigned(Vp)};
    EmbeddingKeys of_position = {positions, doc_start, 0, unsigned(P)};
    if (dwte)
        embedding_add(dwte, dout, of_token, scratch, N, C, accumulate, stream, scale);
    if (dwpe)
        embedding_add(dwpe, dout, of_position, scratch, N, C, accumulate, stream);
}
#endif

} // namespace llmc
