// lora.cuh - low-rank adapters beside a frozen matrix, in thin products - arXiv:2106.09685
//   out  += s (inp A^T) B^T                   s = alpha / r, or alpha / sqrt(r): arXiv:2312.03732
//   dinp += s (dout B) A,   dB = s dout^T (inp A^T),   dA = s (dout B)^T inp
//   inp, dinp (N,IC)   out, dout (N,OC)   A (r,IC)   B (OC,r)   dA, dB acc   room (N,r)
//   batch   many adapters, each beside its own rows (arXiv:2311.03285); a row may have none:
//             out[n] += s_k (inp[n] A_k^T) B_k^T       k: the adapter of row n
//           The base weight multiplies all rows in one product, which is most of the work. Rows of
//           one adapter lie together, because a sequence has one, so each run of them takes the two
//           thin products. Ranks may differ. On a GPU one launch takes the rows of all short runs,
//           as Punica's kernels do (arXiv:2310.18547): it reads A_k and B_k again for each row,
//           from L2 where rows share them, and rounds less.
//   s multiplies the product with r columns, never a weight: AdamW sees A and B as they are.
//   Contract: out, dinp +=   dA, dB = or += (accumulate).  Where B is zero, out and dinp stay what
//             they were, and dA is zero. Bitwise repeatable for equal threads.
//   Cost: 2 N r (IC + OC) FLOPs forward and 8 N r (IC + OC) backward. The gradients of the weights
//         compute inp A^T and dout B again, so that nothing of N rows is kept. The products are
//         thin: each reads or writes N IC or N OC elements and waits for memory.
//   To copy: this file, element_type.h, elements.h, elementwise.cuh, gpu.h, matmul.cuh,
//            types.h and cuda_common.h.
#pragma once
#include <vector>
#include "cuda_common.h"
#include "element_type.h"
#include "elementwise.cuh"
#include "matmul.cuh"
#include "types.h"

namespace llmc {

// The adapter of a matrix (OC,IC). A Weight points at it (linear.cuh), so its owner must keep it
// alive while products run.
struct Lora {
    const void *a = nullptr, *b = nullptr; // (r,IC) (OC,r)
    void *da = nullptr, *db = nullptr;     // (r,IC) (OC,r) acc; null: not training
    size_t rank = 0;                       // r
    double scale = 1;                      // s
};

// x *= s. It applies the adapter's scale to a matrix of r columns.
template <typename T, typename S>
void lora_scale(T* x, size_t n, double s, S where) { // (n)
    typedef acc_t<T> A;
    // An alpha equal to the rank gives s = 1 and needs no pass.
    if (s == 1) return;
    map_elements(x, n, ElementTimes<A>{A(s)}, where, x);
}

// ----------------------------------------------------------------------------
// the products

// The six products for N rows: two into r columns and out of them each way, then those of the
// gradients of the weights.
struct LoraProducts {
    Product x_a, h_b;   // inp A^T, and that times B^T
    Product dy_b, dh_a; // dout B, and that times A
    Product db, da;     // dout^T (inp A^T), (dout B)^T inp
};
// Describe the six products. `accumulate` is for the gradients of the weights; out and
// dinp always accumulate.
inline LoraProducts lora_products(size_t N, size_t OC, size_t IC, size_t r, bool accumulate) {
    // Each line: rows, columns, length of the sum; strides of both operands; row stride of the
    // output; whether it accumulates.
    return {{N, r, IC, {IC, 1}, {1, IC}, r},
            // From r columns to OC, added to what the base weight's product has written.
            {N, OC, r, {r, 1}, {1, r}, OC, true},
            // The same two in backward: through B, then through A.
            {N, r, OC, {OC, 1}, {r, 1}, r},
            {N, IC, r, {r, 1}, {IC, 1}, IC, true},
            // The gradients sum over the N rows, so their first operand is read transposed.
            {OC, r, N, {1, OC}, {r, 1}, r, accumulate},
            {r, IC, N, {1, r}, {IC, 1}, IC, accumulate}};
}

// The largest scratch that any of the six products needs.
template <typename T, typename S>
size_t lora_scratch_bytes(size_t N, size_t OC, size_t IC, size_t r, S where) {
    Type t = type_of<T>();        // of weights and activations
    Type a = type_of<acc_t<T>>(); // of gradients of weights
    size_t most = 0;
    // The first micro-batch writes the gradients, later ones add to them: ask for both.
    for (bool accumulate : {false, true}) {
        LoraProducts p = lora_products(N, OC, IC, r, accumulate);
        most = std::max({most, matmul_scratch_bytes({p.x_a, p.h_b, p.dy_b, p.dh_a}, t, t, where),
                         matmul_scratch_bytes({p.db, p.da}, t, a, where)});
    }
    return most;
}

// out += s (inp A^T) B^T, as two thin products. One product with the matrix B A would be as large
// as the base weight's own.
template <typename T, typename S>
void lora_forward(T* out, const T* inp, const Lora& l, T* room, // (N,OC) (N,IC)  room (N,r)
                  size_t N, size_t OC, size_t IC, Blas& blas, S where) {
    const T *a = static_cast<const T*>(l.a), *b = static_cast<const T*>(l.b), *nothing = nullptr;
    LoraProducts p = lora_products(N, OC, IC, l.rank, false);
    matmul(room, inp, a, nothing, nothing, p.x_a, blas, where);
    lora_scale(room, N * l.rank, l.scale, where);
    matmul(out, room, b, nothing, nothing, p.h_b, blas, where);
}

// dinp += s (dout B) A. The base weight's product comes first: it writes dinp or adds to it.
template <typename T, typename S>
void lora_backward_input(T* dinp, const T* dout, const Lora& l, T* room, // (N,IC) (N,OC)
                         size_t N, size_t OC, size_t IC, Blas& blas, S where) {
    const T *a = static_cast<const T*>(l.a), *b = static_cast<const T*>(l.b), *nothing = nullptr;
    LoraProducts p = lora_products(N, OC, IC, l.rank, false);
    matmul(room, dout, b, nothing, nothing, p.dy_b, blas, where);
    lora_scale(room, N * l.rank, l.scale, where);
    matmul(dinp, room, a, nothing, nothing, p.dh_a, blas, where);
}

// dB = or += s dout^T (inp A^T),  dA = or += s (dout B)^T inp
template <typename T, typename S>
void lora_backward_weight(const Lora& l, const T* dout, const T* inp, T* room, // (N,OC) (N,IC)
                          size_t N, size_t OC, size_t IC, bool accumulate, Blas& blas, S where) {
    typedef acc_t<T> A;
    const T *a = static_cast<const T*>(l.a), *b = static_cast<const T*>(l.b), *nothing = nullptr;
    const A* no_residual = nullptr;
    LoraProducts p = lora_products(N, OC, IC, l.rank, accumulate);
    // dB. The room serves both gradients, one after the other.
    matmul(room, inp, a, nothing, nothing, p.x_a, blas, where);
    lora_scale(room, N * l.rank, l.scale, where);
    matmul(static_cast<A*>(l.db), dout, room, nothing, no_residual, p.db, blas, where);

    // dA, a sum over the same rows.
    matmul(room, dout, b, nothing, nothing, p.dy_b, blas, where);
    lora_scale(room, N * l.rank, l.scale, where);
    matmul(static_cast<A*>(l.da), room, inp, nothing, no_residual, p.da, blas, where);
}

// ----------------------------------------------------------------------------
// a batch: which rows use which adapter

// A run of adjacent rows that use the same adapter.
struct LoraRows {
    size_t first, rows;
    size_t adapter; // a number below the count of adapters
};
typedef std::vector<LoraRows> LoraRuns;

// Find the runs in B sequences of T rows, whose adapters are given (-1: none). Neighbours with the
// same adapter share a run.
inline LoraRuns lora_rows(const int* adapters, size_t B, size_t T) { // (B)
    LoraRuns runs;
    for (size_t b = 0; b < B; b++) {
        if (adapters[b] < 0) continue;
        size_t adapter = size_t(adapters[b]);
        bool joins = b > 0 && adapters[b - 1] == adapters[b];
        if (joins)
            runs.back().rows += T;
        else
            runs.push_back({b * T, T, adapter});
    }
    return runs;
}

// ----------------------------------------------------------------------------
// a batch on a GPU: runs of few rows

// Whether the kernel takes a run. The CPU has the two products above for all of them.
inline bool lora_by_row(const LoraRows&, const Lora&, Cpu) { return false; }

#if LLMC_KERNELS

// While texts grow by a token a step, neighbours seldom share an adapter: two launches a run would
// then take longer than their work. Longer runs, such as prompts, have products on tensor cores.
constexpr size_t LORA_FEW_ROWS = 16, LORA_MOST_RANK = 256;
inline bool lora_by_row(const LoraRows& run, const Lora& l, cudaStream_t) {
    return run.rows <= LORA_FEW_ROWS && l.rank <= LORA_MOST_RANK;
}

// The rows of one launch, each with its adapter. The kernel takes the table by value, so nothing is
// copied to the device before it.
struct LoraRow {
    const void *a, *b; // (r,IC) (OC,r)
    size_t row;
    unsigned rank;
    float scale;
};
constexpr unsigned LORA_LAUNCH_ROWS = 64, LORA_WARPS = 8;
struct LoraTable {
    LoraRow rows[LORA_LAUNCH_ROWS];
};

// A block takes a row. Its h (r) stays in shared memory as float, where the two products
// above round it to T. A row's bits depend on nothing but the row and its adapter.
template <typename T>
__global__ void lora_rows_kernel(T* out, const T* inp, LoraTable table, size_t OC, size_t IC) {
    LLMC_SHARED(float, h, LORA_MOST_RANK);
    const LoraRow& l = table.rows[blockIdx.x];
    const T *a = static_cast<const T*>(l.a), *b = static_cast<const T*>(l.b);
    const T* x = inp + l.row * IC; // (IC)
    T* y = out + l.row * OC;       // (OC)
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    // h = s A x: each warp takes rows of A in turn.
    for (unsigned k = warp; k < l.rank; k += LORA_WARPS) {
        float sum = 0;
        for (size_t c = lane; c < IC; c += 32)
            sum += to_float(x[c]) * to_float(a[k * IC + c]);
        sum = warp_sum(sum);
        if (lane == 0)
            h[k] = l.scale * sum;
    }
    __syncthreads(); // all warps have written h

    // y += B h: each thread takes outputs in turn.
    for (size_t o = threadIdx.x; o < OC; o += blockDim.x) {
        float sum = 0;
        for (unsigned k = 0; k < l.rank; k++)
            sum += h[k] * to_float(b[o * l.rank + k]);
        y[o] = from_acc<T>(to_float(y[o]) + sum);
    }
}

// Run the kernel for all runs that it takes, LORA_LAUNCH_ROWS rows at a time.
template <typename T>
void lora_rows_forward(T* out, const T* inp, const Lora* adapters, const LoraRuns& runs, size_t OC,
                       size_t IC, cudaStream_t stream) {
    // A launch takes its table by value, so each has a table of its own.
    LoraTable table = {};
    unsigned count = 0;
    auto flush = [&] {
        if (count)
            launch(lora_rows_kernel<T>, count, LORA_WARPS * 32, stream, out, inp, table, OC, IC);
        count = 0;
    };

    // Fill tables.
    for (const LoraRows& run : runs) {
        const Lora& l = adapters[run.adapter];
        if (!l.rank || !lora_by_row(run, l, stream)) continue;
        for (size_t row = run.first; row < run.first + run.rows; row++) {
            table.rows[count++] = {l.a, l.b, row, unsigned(l.rank), float(l.scale)};
            if (count == LORA_LAUNCH_ROWS) flush();
        }
    }
    flush();
}
#endif

// ----------------------------------------------------------------------------
// a batch

// Add to each run of rows what its adapter says. An adapter of rank 0 leaves this matrix alone.
template <typename T, typename S>
void lora_batch_forward(T* out, const T* inp, const Lora* adapters, // (N,OC) (N,IC)
                        const LoraRuns& runs, T* room,              // room (N,r)
                        size_t OC, size_t IC, Blas& blas, S where) {
    // Long runs take the two products, each on its own.
    for (const LoraRows& run : runs) {
        const Lora& l = adapters[run.adapter];
        if (!l.rank || lora_by_row(run, l, where)) continue;
        lora_forward(out + run.first * OC, inp + run.first * IC, l, room, run.rows, OC, IC, blas,
                     where);
    }

    // On a GPU all rows of short runs share a launch.
    if constexpr (!std::is_same_v<S, Cpu>)
        lora_rows_forward(out, inp, adapters, runs, OC, IC, where);
}

} // namespace llmc
