// embedding.cuh - token and position embedding, forward and backward
//   out = wte[token - vocab_start] + wpe[position - doc_start]   (wpe null: tokens only)
//   out, dout (N,C)   wte, dwte (Vp,C) acc   wpe, dwpe (P,C) acc   tokens, positions, doc_start (N)
//   Of a vocabulary cut over ranks the table holds Vp rows from vocab_start on: other tokens are
//   zero, and add nothing.
//   Contract: out =    dwte, dwpe = (tables zeroed first) or += (accumulate); null: frozen.
//             Bitwise repeatable: the rows of dout that meet in a row of a table are added one by
//             one in their order, no atomics; all versions give the same bits.
//   Cost: memory-bound. forward reads a row of each table, writes out; backward reads dout, adds
//         into the tables, and writes them whole when it does not accumulate. The GPU sorts row
//         numbers by token in a scratch of embedding_scratch_bytes; the longest run of one token
//         is read by one warp for every 32 loads of columns.
//   To copy: this file and common.h.
#pragma once
#include <utility>
#include "common.h"

// ----------------------------------------------------------------------------
// CPU

template <typename T>
void embedding_forward(T* out, const int* tokens, const int* positions, const int* doc_start,
                       const T* wte, const T* wpe, size_t N, size_t vocab_start, size_t Vp,
                       size_t C, Cpu) {
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        T* y = out + n * C;
        size_t own = size_t(tokens[n]) - vocab_start; // beyond Vp also where the token is below
        if (own < Vp)
            memcpy(y, wte + own * C, C * sizeof(T));
        else
            memset(y, 0, C * sizeof(T));
        if (!wpe) continue;
        const T* position = wpe + size_t(positions[n] - doc_start[n]) * C;
        #pragma omp simd
        for (size_t c = 0; c < C; c++) y[c] = from_acc<T>(to_acc(y[c]) + to_acc(position[c]));
    }
}

template <typename T>
void embedding_backward_weight(acc_t<T>* dwte, acc_t<T>* dwpe, const T* dout, const int* tokens,
                               const int* positions, const int* doc_start, void* /*scratch*/,
                               size_t N, size_t vocab_start, size_t Vp, size_t P, size_t C,
                               bool accumulate, Cpu) {
    typedef acc_t<T> A;
    auto zero = [](A* table, size_t rows, size_t C) {
        #pragma omp parallel for
        for (size_t r = 0; r < rows; r++) memset(table + r * C, 0, C * sizeof(A));
    };
    if (!accumulate && dwte) zero(dwte, Vp, C);
    if (!accumulate && dwpe) zero(dwpe, P, C);
    constexpr size_t COLUMNS = 128;
    #pragma omp parallel for
    for (size_t c0 = 0; c0 < C; c0 += COLUMNS) {
        size_t end = C - c0 < COLUMNS ? C : c0 + COLUMNS;
        for (size_t n = 0; n < N; n++) {
            const T* d = dout + n * C;
            size_t own = size_t(tokens[n]) - vocab_start;
            A* token = dwte && own < Vp ? dwte + own * C : nullptr;
            A* position = dwpe ? dwpe + size_t(positions[n] - doc_start[n]) * C : nullptr;
            for (size_t c = c0; token && c < end; c++) token[c] += to_acc(d[c]);
            for (size_t c = c0; position && c < end; c++) position[c] += to_acc(d[c]);
        }
    }
}

inline size_t embedding_scratch_bytes(size_t, Cpu) { return 0; }

// ----------------------------------------------------------------------------
// CUDA kernels

#if KERNELS

// WARPS warps a row
template <typename T, int P, int WARPS>
__global__ void embedding_forward_kernel(T* out, const int* tokens, const int* positions,
                                         const int* doc_start, const T* wte, const T* wpe, size_t N,
                                         size_t vocab_start, size_t Vp, size_t C) {
    RowOfBlock<WARPS> row;
    if (row.n >= N) return;
    size_t own = size_t(tokens[row.n]) - vocab_start;
    const T* token = own < Vp ? wte + own * C : nullptr;
    const T* position = wpe ? wpe + size_t(positions[row.n] - doc_start[row.n]) * C : nullptr;
    for (size_t c = row.thread * P; c < C; c += row.threads * P) {
        Pack<T, P> x = {};
        if (token) x = load<P>(token + c);
        if (position) {
            Pack<T, P> y = load<P>(position + c);
            for (int i = 0; i < P; i++) x.v[i] = from_acc<T>(to_float(x.v[i]) + to_float(y.v[i]));
        }
        store(out + row.n * C + c, x);
    }
}

// The row of its table that row n adds to; `rows`: none.
struct EmbeddingKeys {
    const int *key, *less; // (N) (N) or null
    unsigned start, rows;
    __device__ unsigned operator()(int n) const {
        unsigned own = unsigned(key[n] - (less ? less[n] : 0)) - start;
        return own < rows ? own : rows;
    }
};

// Rows sorted by key, equal keys in row order: a radix sort, DIGIT_BITS a pass. A warp walks a tile
// of rows in order; `counts` (DIGITS, tiles) is what each tile has of each digit, then with a sum
// over all that comes before where the tile's next row of that digit goes.
constexpr int DIGIT_BITS = 9, DIGITS = 1 << DIGIT_BITS, SORT_TILE = 1024;

template <bool SCATTER>
__global__ void embedding_sort_kernel(int* sorted, int* counts, const int* rows, EmbeddingKeys keys,
                                      int shift, size_t N) {
    SHARED(int, next, DIGITS);
    unsigned lane = threadIdx.x;
    size_t from = size_t(blockIdx.x) * SORT_TILE, to = from + SORT_TILE < N ? from + SORT_TILE : N;
    for (unsigned d = lane; d < DIGITS; d += 32)
        next[d] = SCATTER ? counts[d * gridDim.x + blockIdx.x] : 0;
    __syncwarp(); // next is there
    for (size_t start = from; start < to; start += 32) {
        size_t i = start + lane;
        bool mine = i < to;
        int n = mine ? (rows ? rows[i] : int(i)) : 0;
        unsigned digit = mine ? keys(n) >> shift & (DIGITS - 1) : 0;
        // the lanes that have my digit
        unsigned peers = __ballot_sync(ALL_LANES, mine);
        for (int bit = 0; bit < DIGIT_BITS; bit++) {
            unsigned ones = __ballot_sync(ALL_LANES, digit >> bit & 1);
            peers &= digit >> bit & 1 ? ones : ~ones;
        }
        int before = __popc(peers & ((1u << lane) - 1)), at = next[digit] + before;
        __syncwarp(); // next is read
        if (mine && SCATTER) sorted[at] = n;
        if (mine && before == 0) next[digit] = at + __popc(peers);
        __syncwarp(); // and written
    }
    for (unsigned d = lane; !SCATTER && d < DIGITS; d += 32)
        counts[d * gridDim.x + blockIdx.x] = next[d];
}

// counts[i] = the sum of all before it; one block
constexpr int SCAN_THREADS = 1024;
static __global__ void embedding_scan_kernel(int* counts, size_t count) {
    SHARED(int, sums, SCAN_THREADS);
    size_t each = ceil_div(count, size_t(SCAN_THREADS)), from = threadIdx.x * each,
           to = from + each < count ? from + each : count;
    int sum = 0;
    for (size_t i = from; i < to; i++) sum += counts[i];
    sums[threadIdx.x] = sum;
    __syncthreads(); // the sums of all threads are there
    for (unsigned step = 1; step < SCAN_THREADS; step *= 2) {
        int before = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
        __syncthreads(); // they are read
        sums[threadIdx.x] += before;
        __syncthreads(); // and longer
    }
    int total = sums[threadIdx.x] - sum;
    for (size_t i = from; i < to; i++) {
        int own = counts[i];
        counts[i] = total, total += own;
    }
}

template <int P> __global__ void embedding_zero_kernel(float* table, size_t n) {
    size_t i = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * P;
    if (i < n) store(table + i, Pack<float, P>{});
}

// A warp a sorted row and 32 * P columns: where a key begins, it adds that key's rows to the table.
constexpr int ADD_WARPS = 4, ADD_AHEAD = 16; // rows whose loads are under way together
template <typename T, int P>
__global__ void embedding_add_kernel(float* table, const T* dout, const int* sorted,
                                     EmbeddingKeys keys, size_t N, size_t C) {
    constexpr int F = P % 4 ? 1 : 4; // of the table's floats, 16 bytes at a time
    size_t i = size_t(blockIdx.x) * ADD_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    size_t c = (size_t(blockIdx.y) * 32 + lane) * P;
    if (i >= N) return;
    unsigned key = keys(sorted[i]);
    if (key == keys.rows) return;
    if (i > 0 && keys(sorted[i - 1]) == key) return; // it began before; the warp leaves together
    bool mine = c < C;
    const T* column = dout + (mine ? c : 0);
    float* out = table + size_t(key) * C + c;
    Pack<float, F> sum[P / F] = {};
    for (int k = 0; mine && k < P / F; k++) sum[k] = load<F>(out + k * F);

    for (bool more = true; more; i += 32) {
        // the next 32 row numbers, a lane each; those of the key come first
        int n = i + lane < N ? sorted[i + lane] : 0;
        int count = __popc(__ballot_sync(ALL_LANES, i + lane < N && keys(n) == key));
        auto row = [&](int r) {
            return load<P>(column + size_t(__shfl_sync(ALL_LANES, n, r)) * C);
        };
        auto add = [&](Pack<T, P> d) {
            for (int k = 0; k < P; k++) sum[k / F].v[k % F] += to_float(d.v[k]);
        };
        int r = 0;
        for (; r + ADD_AHEAD <= count; r += ADD_AHEAD) {
            Pack<T, P> d[ADD_AHEAD];
            for (int a = 0; a < ADD_AHEAD; a++) d[a] = row(r + a);
            for (int a = 0; a < ADD_AHEAD; a++) add(d[a]);
        }
        for (; r < count; r++) add(row(r));
        more = count == 32;
    }
    for (int k = 0; mine && k < P / F; k++) store(out + k * F, sum[k]);
}

// ----------------------------------------------------------------------------
// launchers

template <typename T>
void embedding_forward(T* out, const int* tokens, const int* positions, const int* doc_start,
                       const T* wte, const T* wpe, size_t N, size_t vocab_start, size_t Vp,
                       size_t C, cudaStream_t stream) {
    pick_row_kernel<T>(C, can_vectorize<T>(C, out, wte, wpe), [&](auto P, auto WARPS) {
        launch(embedding_forward_kernel<T, P, WARPS>, row_grid<WARPS>(N), row_block<WARPS>(), 0,
               stream, out, tokens, positions, doc_start, wte, wpe, N, vocab_start, Vp, C);
    });
}

inline size_t embedding_scratch_bytes(size_t N, cudaStream_t) {
    return (2 * N + DIGITS * ceil_div(N, size_t(SORT_TILE))) * sizeof(int);
}

// table (rows,C) = or += the rows of dout, each where its key says
template <typename T>
void embedding_add(float* table, const T* dout, EmbeddingKeys keys, void* scratch, size_t N,
                   size_t C, bool accumulate, cudaStream_t stream) {
    size_t rows = keys.rows;
    int *sorted = static_cast<int*>(scratch), *other = sorted + N, *counts = other + N;
    size_t tiles = ceil_div(N, size_t(SORT_TILE));
    const int* from = nullptr; // the first pass reads rows as they are
    for (int shift = 0; shift == 0 || rows >> shift > 0; shift += DIGIT_BITS) {
        if (from) std::swap(sorted, other);
        launch(embedding_sort_kernel<false>, unsigned(tiles), 32, 0, stream, sorted, counts, from,
               keys, shift, N);
        launch(embedding_scan_kernel, 1, SCAN_THREADS, 0, stream, counts, DIGITS * tiles);
        launch(embedding_sort_kernel<true>, unsigned(tiles), 32, 0, stream, sorted, counts, from,
               keys, shift, N);
        from = sorted;
    }
    auto zero = [&](auto P) {
        launch(embedding_zero_kernel<P>, unsigned(ceil_div(rows * C, size_t(256 * P))), 256, 0,
               stream, table, rows * C);
    };
    if (!accumulate) can_vectorize<float>(C, table) ? zero(Int<4>()) : zero(Int<1>());
    auto add = [&](auto P) {
        launch(
            embedding_add_kernel<T, P>,
            dim3(unsigned(ceil_div(N, size_t(ADD_WARPS))), unsigned(ceil_div(C, size_t(32 * P)))),
            ADD_WARPS * 32, 0, stream, table, dout, from, keys, N, C);
    };
    can_vectorize<T>(C, dout, table) ? add(Int<VECTOR<T>>()) : add(Int<1>());
}

template <typename T>
void embedding_backward_weight(float* dwte, float* dwpe, const T* dout, const int* tokens,
                               const int* positions, const int* doc_start, void* scratch, size_t N,
                               size_t vocab_start, size_t Vp, size_t P, size_t C, bool accumulate,
                               cudaStream_t stream) {
    EmbeddingKeys of_token = {tokens, nullptr, unsigned(vocab_start), unsigned(Vp)},
                  of_position = {positions, doc_start, 0, unsigned(P)};
    if (dwte) embedding_add(dwte, dout, of_token, scratch, N, C, accumulate, stream);
    if (dwpe) embedding_add(dwpe, dout, of_position, scratch, N, C, accumulate, stream);
}
#endif
