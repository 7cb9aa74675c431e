// mma.cuh - inline-PTX wrappers of one warp, for Ampere and later: ldmatrix, mma, cp.async
//   Also tiles in shared memory as operands of mma, swizzled so that ldmatrix has
//   no bank conflicts.
//   Fragments are those of the PTX manual (ISA 8.7): in each 8 by 8 part, lane l has row l / 4 and
//   columns 2 (l % 4) and the next.
//   Each wrapper has an executable model: test/harness/emulator_warp.h.
//   Contract: an instruction that is .aligned in PTX must be called by all lanes of
//             a warp together.
//   To copy: this file, tensor_cores.h, types.h and cuda_common.h.
#pragma once
#include "tensor_cores.h"

namespace llmc {

#if defined(__CUDACC__)

// ---- matrices of 8 by 8, four at a time ----------------------------------------------------
// Load four matrices. Lane 8 m + r provides the address of row r of matrix m. A row is 8
// elements, 16 bytes, and starts at a multiple of 16 bytes. r[m] receives this lane's two
// elements of matrix m.
LLMC_DEV void ldmatrix_x4(uint32_t (&r)[4], const void* s) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_u32(s)));
}
// The same, transposed: a lane gets column l / 4 of each matrix, its rows 2 (l % 4) and the next.
LLMC_DEV void ldmatrix_x4_t(uint32_t (&r)[4], const void* s) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_u32(s)));
}

// ---- products: d (16,8) += a (16,K) b (K,8), in float ---------------------------------------
// a[0]: rows 0-7, a[1]: rows 8-15 of columns 0-7; a[2], a[3]: the same of columns 8-15.
// b[0]: rows 0-7, b[1]: rows 8-15. d[0], d[1]: row l / 4; d[2], d[3]: the row 8 below.
#define MMA_M16N8K16(type)                                                    \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type       \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
template <typename T>
LLMC_DEV void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    LLMC_TENSOR_CORE_TYPE(T);
    if constexpr (std::is_same_v<T, bf16>)
        MMA_M16N8K16("bf16");
    else
        MMA_M16N8K16("f16");
}
#undef MMA_M16N8K16

// ---- cp.async: copies that a thread starts, collects into groups and waits for ----------------
// Copy 16 bytes to shared memory. The first `bytes` are read, the others become 0; with 0 bytes
// nothing is, and the address may lie behind an array. The copy bypasses L1.
LLMC_DEV void cp_async16(void* s, const void* g, int bytes = 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem_u32(s)),
                 "l"(g), "r"(bytes)
                 : "memory");
}
// Close a group of the copies started so far, which may be none. Groups complete in order.
LLMC_DEV void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait for this thread's own copies only: a block barrier must follow before other threads read.
template <int N>
LLMC_DEV void cp_async_wait() { // for all groups but the last N
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

#endif

#if LLMC_KERNELS
// ---- tiles in shared memory: rows of D elements, chunks of 8 swizzled ---------------------------
template <int D>
__device__ int tile_at(int row, int chunk) {
    // The index of a chunk in a tile. Row r keeps chunk c at c ^ swizzle, so the 8 rows that
    // ldmatrix reads fall into 8 groups of banks. If a row is an odd multiple of 64 bytes, two
    // neighbouring rows lie in different banks and share a swizzle.
    int swizzle = D / 8 % 8 == 0 ? row & 7 : row >> 1 & 3;
    return row * D + (chunk ^ swizzle) * 8;
}

// The index of `more` chunks behind at = tile_at<D>(row, chunk), for chunk 0 or 1 and an even
// `more`: some bits of `at` change, and the rest is an offset. Compilers do not see that: they keep
// or compute an index for each `more` of a loop that is unrolled.
template <int D>
__device__ int tile_behind(int at, int more) {
    static_assert(D % 32 == 0, "the bits that change would belong to the row");
    constexpr int INSIDE = D / 8 % 8 == 0 ? 7 : 3; // bits of a chunk that a swizzle changes
    return (at ^ (more & INSIDE) * 8) + (more & ~INSIDE) * 8;
}

// In the loads below `row` is a multiple of 8, which does not change the swizzle.

// Load rows [row, row + 16), channels [16 k, 16 k + 16) as the first operand of mma.
template <int D, typename T>
__device__ void load_a(uint32_t (&a)[4], const T* tile, int row, int k) {
    // Lanes 0-15 address the left 8 channels of the 16 rows, lanes 16-31 the right ones.
    int lane = threadIdx.x % 32;
    int at = tile_at<D>(lane % 16, lane / 16);
    ldmatrix_x4(a, tile + row * D + tile_behind<D>(at, 2 * k));
}
// Load rows [row, row + 16) as columns, channels [16 k, 16 k + 16) to sum over: two operands b.
template <int D, typename T>
__device__ void load_b(uint32_t (&b)[4], const T* tile, int row, int k) {
    // b[0], b[1] are rows 0-7, b[2], b[3] rows 8-15.
    int lane = threadIdx.x % 32;
    int at = tile_at<D>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    ldmatrix_x4(b, tile + row * D + tile_behind<D>(at, 2 * k));
}
// Load rows [row, row + 16) to sum over, with channels [8 c, 8 c + 16) as columns: two operands b.
template <int D, typename T>
__device__ void load_b_rows(uint32_t (&b)[4], const T* tile, int row, int c) {
    // The load transposes: b[0], b[1] are channels 0-7, b[2], b[3] channels 8-15.
    int lane = threadIdx.x % 32;
    int at = tile_at<D>(row + lane % 16, lane / 16);
    ldmatrix_x4_t(b, tile + tile_behind<D>(at, c));
}

// Load rows [row, row + 16) to sum over, with channels [8 c, 8 c + 16) as rows of operand a.
template <int D, typename T>
__device__ void load_a_rows(uint32_t (&a)[4], const T* tile, int row, int c) {
    // The load transposes: a[0], a[2] are channels 0-7, a[1], a[3] channels 8-15.
    int lane = threadIdx.x % 32;
    int at = tile_at<D>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    ldmatrix_x4_t(a, tile + row * D + tile_behind<D>(at, c));
}

// Two products with one first operand. left and right are adjacent: 16 columns of one result.
template <typename T>
__device__ void mma_pair(float (&left)[4], float (&right)[4], const uint32_t (&a)[4],
                         const uint32_t (&b)[4]) {
    uint32_t first[2] = {b[0], b[1]};
    uint32_t second[2] = {b[2], b[3]};
    mma_m16n8k16<T>(left, a, first);
    mma_m16n8k16<T>(right, a, second);
}
#endif

} // namespace llmc
