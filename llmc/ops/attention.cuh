// attention.cuh - causal attention with online softmax, in O(T) memory, on a GPU - arXiv:2205.14135
//   p = softmax of s over the keys that i sees,   out_i = sum_j p_ij v_j   (s: attention_types.h)
//   Backward: D_i = dout_i.out_i;  dP = dout V^T;  dS = P (dP - D) cap'(s)
//             dV = P^T dout,   dK = scale dS^T Q,   dQ = scale dS K
//   out (B,Tq,NH,HS_v)   dq, dk, dv as q, k, v
//   lse (B,NH,Tq) float: log of the sum of exp(s), kept for backward and to merge results over
//   blocks of keys (attention_join.cuh).
//   The launchers choose between three sets of kernels: wgmma (attention_sm90.cuh), mma.sync
//   (attention_sm80.cuh), and the plain kernels of this file. The plain kernels take every type,
//   any head size up to 256, and soft caps with ALiBi.
//   Contract: out, lse =   dq, dk, dv = or += (x.accumulate).  Results in T, or in float.
//             A row that sees nothing: out 0, lse -inf, gradients 0.  Bitwise repeatable.
//   Cost: forward 4, backward 10 FLOPs per (query, key, channel) seen; 14 backward where two
//         kernels compute the scores twice. Scratch: attention_scratch_bytes(), O(T).
//   To copy: this file, attention_rows.cuh, attention_sm80.cuh, attention_sm90.cuh,
//            attention_types.h, gpu.h, hopper.cuh, mma.cuh, tensor_cores.h,
//            types.h and cuda_common.h.
#pragma once
#include <algorithm>
#include <string>
#include "attention_sm80.cuh"
#include "attention_sm90.cuh"
#include "attention_types.h"
#include "cuda_common.h"
#include "gpu.h"
#include "tensor_cores.h"
#include "types.h"

namespace llmc {

#if LLMC_KERNELS

// ----------------------------------------------------------------------------
// plain kernels, in float. A warp owns PLAIN_ROWS rows, and a block's warps share tiles of 32
// columns. A lane first computes the scores of one column, then sums some channels of each row.

constexpr int PLAIN_WARPS = 4, PLAIN_ROWS = 4, PLAIN_BLOCK = PLAIN_WARPS * PLAIN_ROWS;

// Copy rows of HS channels to shared memory, `stride` floats apart. row(i) begins one; null: zeros.
template <typename F>
__device__ void load_tile(float* tile, int rows, int HS, int stride, F row) {
    // Neighbouring threads read neighbouring channels, so the loads coalesce.
    for (int k = threadIdx.x; k < rows * HS; k += PLAIN_WARPS * 32) {
        const auto* from = row(k / HS);
        tile[k / HS * stride + k % HS] = from ? to_float(from[k % HS]) : 0;
    }
}

// Copy a tile of 32 keys and values: k (32, HS + 1), v (32, HS_v + 1).
template <typename T>
__device__ void load_keys(float* k, float* v, const AttentionOperands<T>& x, size_t b, size_t kh,
                          size_t j0) {
    // With HS + 1 floats a row, one channel of 32 keys lies in 32 different banks (HS is even).
    int HS = int(x.d.HS);
    int HS_v = int(x.d.HS_v);
    load_tile(k, 32, HS, HS + 1,
              [&](int j) { return j0 + j < x.d.Tk ? x.k + x.key_at(b, kh, j0 + j) : nullptr; });
    load_tile(v, 32, HS_v, HS_v + 1,
              [&](int j) { return j0 + j < x.d.Tk ? x.v + x.value_at(b, kh, j0 + j) : nullptr; });
}

// The dot product of two rows (n) in shared memory, by one lane.
__device__ inline float dot(const float* a, const float* b, int n) {
    float sum = 0;
    for (int e = 0; e < n; e++)
        sum += a[e] * b[e];
    return sum;
}

// sum[k] += x_j * tile[j][lane + 32 k], over the tile's 32 rows j. Lane j holds x_j.
template <int D>
__device__ void add_columns(float (&sum)[D], float x, const float* tile, int HS, int stride) {
    int lane = threadIdx.x % 32;
    for (int j = 0; j < 32; j++) {
        // Broadcast row j's factor by a shuffle, so that scores never go through shared memory.
        float xj = __shfl_sync(ALL_LANES, x, j);
        #pragma unroll
        for (int k = 0; k < D; k++)
            // The last 32 may be fewer.
            if (lane + 32 * k < HS)
                sum[k] += xj * tile[j * stride + lane + 32 * k];
    }
}

// Write the HS channels of a row, times `factor`. Lane l holds channels l + 32 k.
template <typename O, int D>
__device__ void store_channels(O* to, const float (&x)[D], float factor, int HS,
                               bool accumulate = false) {
    #pragma unroll
    for (int k = 0, e = threadIdx.x % 32; k < D; k++, e += 32)
        if (e < HS)
            put(to + e, x[k] * factor, accumulate);
}

// One block has 16 queries of one head. D = the larger head size / 32, rounded up.
template <typename T, typename O, int D>
__global__ void attention_forward_kernel(O* out, float* lse, const AttentionOperands<T> x) {
    const AttentionDims& d = x.d;
    int HS = int(d.HS);
    int HS_v = int(d.HS_v);
    int lane = threadIdx.x % 32;
    int warp = threadIdx.x / 32;
    size_t i0 = size_t(blockIdx.x) * PLAIN_BLOCK;
    size_t h = blockIdx.y;
    size_t b = blockIdx.z;
    size_t kh = h / (d.NH / d.NKV);
    float* q = reinterpret_cast<float*>(dynamic_shared()); // (PLAIN_BLOCK, HS)
    float* k = q + PLAIN_BLOCK * HS;                       // (32, HS + 1)
    float* v = k + 32 * (HS + 1);                          // (32, HS_v + 1)

    // Load the block's queries, which stay while the block walks all keys.
    load_tile(q, PLAIN_BLOCK, HS, HS,
              [&](int r) { return i0 + r < d.Tq ? x.query(b, h, i0 + r) : nullptr; });

    // A lane sums channels lane + 32 k of out. Every lane has the maximum and the sum of each row.
    float sum[PLAIN_ROWS][D] = {}, row_max[PLAIN_ROWS], row_sum[PLAIN_ROWS] = {};
    for (float& m : row_max) m = -INFINITY;

    // Walk all keys. Every warp helps to load, so no warp may leave the loop early.
    for (size_t j0 = 0; j0 < d.Tk; j0 += 32) {
        __syncthreads(); // all warps have read the last tiles
        load_keys(k, v, x, b, kh, j0);
        __syncthreads(); // these tiles are there
        #pragma unroll
        for (int r = 0; r < PLAIN_ROWS; r++) {
            // Compute one score a lane.
            int row = warp * PLAIN_ROWS + r;
            int distance = 0;
            bool seen = x.visible(b, i0 + row, j0 + lane, distance);
            // Skip the row only if all lanes can: the shuffles below need every lane.
            if (!__any_sync(ALL_LANES, seen)) continue;
            float s = -INFINITY;
            if (seen)
                s = x.capped(dot(q + row * HS, k + lane * (HS + 1), HS)) - x.slope(h) * distance;

            // Online softmax: rescale the sums to the new maximum.
            float most = warp_max(s);
            most = row_max[r] > most ? row_max[r] : most;
            float p = seen ? expf(s - most) : 0;
            float rescale = expf(row_max[r] - most);
            row_max[r] = most;
            row_sum[r] = row_sum[r] * rescale + warp_sum(p);
            #pragma unroll
            for (int e = 0; e < D; e++)
                sum[r][e] *= rescale;
            add_columns(sum[r], p, v, HS_v, HS_v + 1);
        }
    }

    // Divide by the sums of exponentials, and write out and lse.
    #pragma unroll
    for (int r = 0; r < PLAIN_ROWS; r++) {
        size_t i = i0 + warp * PLAIN_ROWS + r;
        if (i >= d.Tq) continue;
        bool seen = row_sum[r] != 0; // true for a NaN too
        float inverse = seen ? 1 / row_sum[r] : 0;
        store_channels(out + x.out_at(b, h, i), sum[r], inverse, HS_v);
        if (lane == 0)
            lse[x.lse_at(b, h, i)] = seen ? row_max[r] + logf(row_sum[r]) : -INFINITY;
    }
}

// D_i = dout_i.out_i, one warp a row. The rows are (B,Tq,NH), D is (B,NH,Tq).
template <typename T>
__global__ void attention_row_sums_kernel(float* D, const T* dout, const T* out, AttentionDims d) {
    // Rows are numbered as (B,Tq,NH), the order of dout and out.
    size_t row = size_t(blockIdx.x) * PLAIN_WARPS + threadIdx.x / 32;
    if (row >= d.B * d.Tq * d.NH) return; // whole warps leave

    // The lanes share the row's channels.
    float sum = 0;
    for (size_t e = threadIdx.x % 32; e < d.HS_v; e += 32)
        sum += to_float(dout[row * d.HS_v + e]) * to_float(out[row * d.HS_v + e]);
    sum = warp_sum(sum);

    // D has the order of lse: the queries of a head are adjacent.
    size_t h = row % d.NH;
    size_t i = row / d.NH % d.Tq;
    size_t b = row / d.NH / d.Tq;
    if (threadIdx.x % 32 == 0)
        D[(b * d.NH + h) * d.Tq + i] = sum;
}

// One score's p = exp(s - lse) and ds = p (dp - D) cap'(s); both are 0 where it is masked.
struct PlainScore {
    float p, ds;
};
template <typename T>
__device__ PlainScore plain_score(const AttentionOperands<T>& x, const float* lse, const float* D,
                                  size_t b, size_t h, size_t i, size_t j, const float* q,
                                  const float* k, const float* dout, const float* v) {
    int distance = 0;
    if (!x.visible(b, i, j, distance))
        return {0, 0};
    // Keep s without ALiBi: the derivative of the cap is taken at that value.
    float s = x.capped(dot(q, k, int(x.d.HS)));
    float p = expf(s - x.slope(h) * distance - lse[x.lse_at(b, h, i)]);
    // The softmax's gradient subtracts D, which is the mean of dp under p.
    float dp = dot(dout, v, int(x.d.HS_v));
    return {p, p * (dp - D[x.lse_at(b, h, i)]) * x.cap_derivative(s)};
}

// dq: a block has 16 queries of one head and walks all keys.
template <typename T, typename Q, int D>
__global__ void attention_backward_q_kernel(Q* dq, const AttentionOperands<T> x, const float* lse,
                                            const float* row_sums) {
    const AttentionDims& d = x.d;
    int HS = int(d.HS);
    int HS_v = int(d.HS_v);
    int lane = threadIdx.x % 32;
    int warp = threadIdx.x / 32;
    size_t i0 = size_t(blockIdx.x) * PLAIN_BLOCK;
    size_t h = blockIdx.y;
    size_t b = blockIdx.z;
    size_t kh = h / (d.NH / d.NKV);
    float* q = reinterpret_cast<float*>(dynamic_shared()); // (PLAIN_BLOCK, HS)
    float* dout = q + PLAIN_BLOCK * HS;                    // (PLAIN_BLOCK, HS_v)
    float* k = dout + PLAIN_BLOCK * HS_v;                  // (32, HS + 1)
    float* v = k + 32 * (HS + 1);                          // (32, HS_v + 1)

    // Load the block's queries, and the gradients of their outputs.
    load_tile(q, PLAIN_BLOCK, HS, HS,
              [&](int r) { return i0 + r < d.Tq ? x.query(b, h, i0 + r) : nullptr; });
    load_tile(dout, PLAIN_BLOCK, HS_v, HS_v,
              [&](int r) { return i0 + r < d.Tq ? x.gradient(b, h, i0 + r) : nullptr; });

    // Walk all keys. Lane j of a warp computes ds for key j; then each lane adds its own channels.
    float sum[PLAIN_ROWS][D] = {};
    for (size_t j0 = 0; j0 < d.Tk; j0 += 32) {
        __syncthreads(); // the tiles before have been read
        load_keys(k, v, x, b, kh, j0);
        __syncthreads(); // these tiles are there
        #pragma unroll
        for (int r = 0; r < PLAIN_ROWS; r++) {
            int row = warp * PLAIN_ROWS + r;
            // A masked score has ds = 0.
            PlainScore s =
                plain_score(x, lse, row_sums, b, h, i0 + row, j0 + lane, q + row * HS,
                            k + lane * (HS + 1), dout + row * HS_v, v + lane * (HS_v + 1));
            add_columns(sum[r], s.ds, k, HS, HS + 1);
        }
    }

    // Write dq. The sum still lacks scale, which is applied here once.
    #pragma unroll
    for (int r = 0; r < PLAIN_ROWS; r++) {
        size_t i = i0 + warp * PLAIN_ROWS + r;
        if (i >= d.Tq) continue;
        store_channels(dq + x.query_at(b, h, i), sum[r], x.scale, HS, x.accumulate);
    }
}

// dk and dv: a block has 16 keys of one key head and walks the queries of all heads that read it.
template <typename T, typename K, int D>
__global__ void attention_backward_kv_kernel(K* dk, K* dv, const AttentionOperands<T> x,
                                             const float* lse, const float* row_sums) {
    const AttentionDims& d = x.d;
    int HS = int(d.HS);
    int HS_v = int(d.HS_v);
    int lane = threadIdx.x % 32;
    int warp = threadIdx.x / 32;
    size_t j0 = size_t(blockIdx.x) * PLAIN_BLOCK;
    size_t kh = blockIdx.y;
    size_t b = blockIdx.z;
    size_t group = d.NH / d.NKV;
    float* k = reinterpret_cast<float*>(dynamic_shared()); // (PLAIN_BLOCK, HS)
    float* v = k + PLAIN_BLOCK * HS;                       // (PLAIN_BLOCK, HS_v)
    float* q = v + PLAIN_BLOCK * HS_v;                     // (32, HS + 1)
    float* dout = q + 32 * (HS + 1);                       // (32, HS_v + 1)

    // Load the block's keys and values, which stay while the block walks the queries.
    load_tile(k, PLAIN_BLOCK, HS, HS,
              [&](int r) { return j0 + r < d.Tk ? x.k + x.key_at(b, kh, j0 + r) : nullptr; });
    load_tile(v, PLAIN_BLOCK, HS_v, HS_v,
              [&](int r) { return j0 + r < d.Tk ? x.v + x.value_at(b, kh, j0 + r) : nullptr; });

    // Sum over all heads of the group in one block: no atomics, and the same order in every run.
    float sum_k[PLAIN_ROWS][D] = {}, sum_v[PLAIN_ROWS][D] = {};
    for (size_t h = kh * group; h < (kh + 1) * group; h++)
        for (size_t i0 = 0; i0 < d.Tq; i0 += 32) {
            __syncthreads(); // the tiles before have been read
            load_tile(q, 32, HS, HS + 1,
                      [&](int i) { return i0 + i < d.Tq ? x.query(b, h, i0 + i) : nullptr; });
            load_tile(dout, 32, HS_v, HS_v + 1,
                      [&](int i) { return i0 + i < d.Tq ? x.gradient(b, h, i0 + i) : nullptr; });
            __syncthreads(); // these tiles are there
            #pragma unroll
            for (int r = 0; r < PLAIN_ROWS; r++) {
                int row = warp * PLAIN_ROWS + r;

                // Lane i computes p and ds of query i; then each lane sums its own channels.
                PlainScore s =
                    plain_score(x, lse, row_sums, b, h, i0 + lane, j0 + row, q + lane * (HS + 1),
                                k + row * HS, dout + lane * (HS_v + 1), v + row * HS_v);
                add_columns(sum_v[r], s.p, dout, HS_v, HS_v + 1);
                add_columns(sum_k[r], s.ds, q, HS, HS + 1);
            }
        }

    // Write dk, which still lacks scale, and dv, which needs none.
    #pragma unroll
    for (int r = 0; r < PLAIN_ROWS; r++) {
        size_t j = j0 + warp * PLAIN_ROWS + r;
        if (j >= d.Tk) continue;
        store_channels(dk + x.key_at(b, kh, j), sum_k[r], x.scale, HS, x.accumulate);
        store_channels(dv + x.value_at(b, kh, j), sum_v[r], 1, HS_v, x.accumulate);
    }
}

// Call f(D) with the larger head size / 32, rounded up to a size that has a kernel.
template <typename F>
void pick_plain_kernel(const AttentionDims& d, F f) {
    size_t HS = std::max(d.HS, d.HS_v);
    LLMC_CHECK(HS <= 256, "attention on a GPU has heads of at most 256 channels, not %zu", HS);
    // Three sizes keep compilation short. Channels beyond the head's leave lanes idle.
    HS <= 64 ? f(Int<2>()) : HS <= 128 ? f(Int<4>()) : f(Int<8>());
}

// Shared memory of a block: its rows of q, in backward also rows of HS_v channels, and two tiles.
inline size_t plain_shared_bytes(const AttentionDims& d, bool backward) {
    // At most 98,560 bytes (backward, 256 channels): just under a block's 99 KB on sm_86.
    size_t rows = PLAIN_BLOCK * (d.HS + (backward ? d.HS_v : 0));
    return (rows + 32 * (d.HS + d.HS_v + 2)) * sizeof(float);
}

// The grid (blocks of rows, heads, sequences). CUDA allows 65535 of the latter two.
inline dim3 plain_grid(size_t rows, size_t heads, size_t B) {
    return dim3(unsigned(ceil_div(rows, size_t(PLAIN_BLOCK))), unsigned(heads), unsigned(B));
}

// The plain forward kernel, for any operands.
template <typename T, typename O>
void attention_plain_forward(O* out, float* lse, const AttentionOperands<T>& operands,
                             cudaStream_t stream) {
    const AttentionOperands<T> x = completed(operands);
    pick_plain_kernel(x.d, [&](auto D) {
        // A block takes 16 queries of one head.
        launch_shared(attention_forward_kernel<T, O, D>, plain_grid(x.d.Tq, x.d.NH, x.d.B),
                      PLAIN_WARPS * 32, plain_shared_bytes(x.d, false), stream, out, lse, x);
    });
}

// The plain backward kernels, for any operands. scratch: D_i (B,NH,Tq) float.
template <typename T, typename Q, typename K>
void attention_plain_backward(Q* dq, K* dk, K* dv, const T* out, const float* lse,
                              const AttentionOperands<T>& operands, void* scratch,
                              cudaStream_t stream) {
    const AttentionOperands<T> x = completed(operands);
    const AttentionDims& d = x.d;
    float* row_sums = static_cast<float*>(scratch);

    // Compute D of every row, which both kernels read.
    launch(attention_row_sums_kernel<T>, unsigned(ceil_div(d.B * d.Tq * d.NH, size_t(PLAIN_WARPS))),
           PLAIN_WARPS * 32, stream, row_sums, x.dout, out, d);

    // Compute the scores twice, once for dq and once for dk, dv: the price of using no atomics.
    size_t shared = plain_shared_bytes(d, true);
    pick_plain_kernel(d, [&](auto D) {
        launch_shared(attention_backward_q_kernel<T, Q, D>, plain_grid(d.Tq, d.NH, d.B),
                      PLAIN_WARPS * 32, shared, stream, dq, x, lse, row_sums);
        launch_shared(attention_backward_kv_kernel<T, K, D>, plain_grid(d.Tk, d.NKV, d.B),
                      PLAIN_WARPS * 32, shared, stream, dk, dv, x, lse, row_sums);
    });
}

// ----------------------------------------------------------------------------
// launchers: tensor cores where type, sizes and alignment allow, else the plain kernels

// Scratch for the kernels that need most. Which ones run depends on the operands' addresses, which
// are known only at the call.
template <typename T>
size_t attention_scratch_bytes(const AttentionDims& d, int, cudaStream_t) {
    return std::max({attention_mma_scratch_bytes(d), attention_hopper_scratch_bytes(d),
                     d.B * d.NH * d.Tq * sizeof(float)});
}

// The kernels that both launchers choose for aligned operands, and why no faster ones.
inline std::string attention_backend(const AttentionDims& d, AttentionCall call,
                                     cudaStream_t stream) {
    // Ask what the launchers ask. Backward's kernels are never faster than forward's.
    const bool hopper = is_hopper(stream);
    const bool wgmma = attention_kernels(d, call, hopper) == AttentionKernels::WGMMA;
    call.backward = true;
    switch (attention_kernels(d, call, hopper)) {
    case AttentionKernels::WGMMA: return "flash attention by wgmma";
    case AttentionKernels::MMA:
        if (!hopper) return "flash attention by mma.sync: this GPU is no Hopper";
        if (wgmma)
            return "flash attention by wgmma, backward by mma.sync: more than 128 channels a head";
        return "flash attention by mma.sync: Hopper's kernels take at most 64 heads a group, and "
               "soft caps of heads of more than 64 channels";
    case AttentionKernels::PLAIN: break;
    }

    // Say the first reason that holds.
    if (call.element != 2) return "plain kernels, in float";
    if (call.softcap && call.alibi)
        return "plain kernels: those of tensor cores have no soft cap with ALiBi";
    return "plain kernels: tensor cores take heads of 8 to 256 channels, a multiple of 8, not " +
           std::to_string(d.HS);
}

// Forward. T: float, bf16, fp16, __nv_bfloat16, __half. O: T or float.
template <typename T, typename O>
void attention_forward(O* out, float* lse, const AttentionOperands<T>& x, void* scratch,
                       cudaStream_t stream) {
    if constexpr (!IS_NATIVE<T> || !IS_NATIVE<O>) {
        attention_forward(as_native(out), lse, as_native(x), scratch, stream);
    } else {
        // Tensor-core kernels write out in T only. Results in float come from the plain kernels.
        if constexpr (IS_BF16_OR_FP16<T> && std::is_same_v<T, O>) {
            const AttentionKernels best = attention_kernels(x, is_hopper(stream), false, out);
            if (best == AttentionKernels::WGMMA)
                return attention_hopper_forward(out, lse, x, scratch, stream);
            if (best == AttentionKernels::MMA)
                return attention_mma_forward(out, lse, x, scratch, stream);
        }
        attention_plain_forward(out, lse, x, stream);
    }
}

// Backward. Q, K: T or float.
template <typename T, typename Q, typename K>
void attention_backward(Q* dq, K* dk, K* dv, const T* out, const float* lse,
                        const AttentionOperands<T>& x, void* scratch, cudaStream_t stream) {
    LLMC_CHECK(x.dout, "attention's backward pass needs x.dout");
    if constexpr (!IS_NATIVE<T> || !IS_NATIVE<Q> || !IS_NATIVE<K>) {
        attention_backward(as_native(dq), as_native(dk), as_native(dv), as_native(out), lse,
                           as_native(x), scratch, stream);
    } else {
        if constexpr (IS_BF16_OR_FP16<T>) {
            const bool hopper = is_hopper(stream);
            const AttentionKernels best = attention_kernels(x, hopper, true, dq, dk, dv, out);
            if (best == AttentionKernels::WGMMA)
                return attention_hopper_backward(dq, dk, dv, out, lse, x, scratch, stream);
            if (best == AttentionKernels::MMA)
                return attention_mma_backward(dq, dk, dv, out, lse, x, scratch, stream);
        }
        attention_plain_backward(dq, dk, dv, out, lse, x, scratch, stream);
    }
}
#endif

} // namespace llmc
