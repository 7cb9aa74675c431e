// hopper.cuh - every inline-PTX wrapper of the project, sm_80 and sm_90a; no asm anywhere else
//   Warp level (sm_80 and up): ldmatrix, stmatrix (sm_90), mma, cp.async, fast exp2 and tanh.
//   Hopper: mbarrier, TMA, wgmma, named barriers, setmaxnreg, proxy fences.
//   Each wrapper has an executable model: test/emulator_warp.h, test/emulator_hopper.h.
//   Contract: what is .aligned in PTX is called by all lanes of a warp, wgmma and setmaxnreg by all
//   warps of a warpgroup, alike.
//   To copy: this file and common.h.
#pragma once
#include <type_traits>
#include "common.h"

#if defined(EMULATE)
#include "../test/emulator_hopper.h"
#include "../test/emulator_warp.h"
#elif defined(__CUDACC__)
#include <cuda.h>
#include <cudaTypedefs.h>
#define DEV __device__ __forceinline__

DEV uint32_t smem_u32(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// ---- mbarrier: a phase is over when all arrivals and all expected bytes have come --------
// waiting for parity 0, then 1, then 0 waits for one phase after the other; for 1 at first: passes
DEV void mbar_init(uint64_t* b, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_u32(b)), "r"(arrivals));
}
DEV void mbar_init_fence() { // by who made them, before the block's barrier
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEV void mbar_expect_tx(uint64_t* b, uint32_t bytes) { // an arrival, and bytes to come
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_u32(b)),
                 "r"(bytes)
                 : "memory");
}
DEV void mbar_arrive(uint64_t* b) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(smem_u32(b))
                 : "memory");
}
DEV void mbar_arrive_cluster(uint64_t* b, uint32_t cta) { // on that block's barrier
    asm volatile(
        "{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [r];\n}" ::"r"(smem_u32(b)),
        "r"(cta)
        : "memory");
}
DEV void mbar_wait(uint64_t* b, uint32_t parity) {
    uint32_t done;
    do { // a try suspends the thread for a while
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.b32 %0,1,0,p;\n}"
            : "=r"(done)
            : "r"(smem_u32(b)), "r"(parity)
            : "memory");
    } while (!done);
}
DEV void mbar_inval(uint64_t* b) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(smem_u32(b)));
}

// ---- fences, named barriers, registers ----------------------------------------------------
// what this thread wrote to shared memory is seen by TMA stores and wgmma: before the barrier that
// they wait for
DEV void fence_async_smem() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <int N> DEV void regs_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> DEV void regs_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
DEV void bar_sync(int id, int n) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n) : "memory"); }
DEV void bar_arrive(int id, int n) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(n) : "memory");
}
DEV bool elect_one() { // true for one lane of the warp
    uint32_t p;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0,1,0,p;\n}" : "=r"(p));
    return p;
}
DEV void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEV void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// A word in global memory that says whose turn it is.
DEV void wait_for_turn(const int* turn, int mine) {
    int now;
    do asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    while (now != mine);
}
DEV void pass_turn(int* turn) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turn) : "memory");
}

// ---- TMA: tiles of a tensor map, whose coordinates come innermost first -------------------
DEV void tma_prefetch_desc(const CUtensorMap* m) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(m) : "memory");
}
DEV void tma_load_2d(void* s, const CUtensorMap* m, uint64_t* bar, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%3,%4}], [%2];" ::"r"(smem_u32(s)),
        "l"(m), "r"(smem_u32(bar)), "r"(c0), "r"(c1)
        : "memory");
}
DEV void tma_load_3d(void* s, const CUtensorMap* m, uint64_t* bar, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%3,%4,%5}], [%2];" ::"r"(smem_u32(s)),
        "l"(m), "r"(smem_u32(bar)), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}
DEV void tma_load_4d(void* s, const CUtensorMap* m, uint64_t* bar, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%3,%4,%5,%6}], [%2];" ::"r"(smem_u32(s)),
        "l"(m), "r"(smem_u32(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}
DEV void tma_load_4d_hint(void* s, const CUtensorMap* m, uint64_t* bar, int c0, int c1, int c2,
                          int c3, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::"
        "cache_hint [%0], [%1, {%3,%4,%5,%6}], [%2], %7;" ::"r"(smem_u32(s)),
        "l"(m), "r"(smem_u32(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
        : "memory");
}
DEV void tma_store_2d(const CUtensorMap* m, const void* s, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2,%3}], [%1];" ::"l"(m),
        "r"(smem_u32(s)), "r"(c0), "r"(c1)
        : "memory");
}
DEV void tma_store_4d(const CUtensorMap* m, const void* s, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2,%3,%4,%5}], [%1];" ::
            "l"(m),
        "r"(smem_u32(s)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}
DEV void tma_reduce_add_2d(const CUtensorMap* m, const void* s, int c0, int c1) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2,%3}], "
        "[%1];" ::"l"(m),
        "r"(smem_u32(s)), "r"(c0), "r"(c1)
        : "memory");
}

// ---- bulk copies: bytes and addresses are multiples of 16 ----------------------------------
DEV void bulk_load_1d(void* s, const void* g, uint32_t bytes, uint64_t* bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(smem_u32(s)),
        "l"(g), "r"(bytes), "r"(smem_u32(bar))
        : "memory");
}
DEV void bulk_reduce_add_f32(float* g, const void* s, uint32_t bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(g),
        "r"(smem_u32(s)), "r"(bytes)
        : "memory");
}
// stores and reductions of a thread come in groups, as cp.async does
DEV void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> DEV void bulk_wait_read() { // shared memory may be written again
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
template <int N> DEV void bulk_wait() { // global memory is written
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
DEV uint64_t l2_evict_last() {
    uint64_t p;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(p));
    return p;
}
DEV uint64_t l2_evict_first() {
    uint64_t p;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
    return p;
}

// ---- wgmma ---------------------------------------------------------------------------------
// before a product whose registers were touched, and before the first
DEV void wg_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEV void wg_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// after a wait: the compiler moves no reading of the accumulator before it
DEV void keep(float& r) { asm volatile("" : "+f"(r)::"memory"); }

#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)
#define F32(i) F16(i), F16(i + 16)
#define L32                                                                                   \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
    "%24,%25,%26,%27,%28,%29,%30,%31}"
#define L64                                                                                    \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"  \
    "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45," \
    "%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
#define WGMMA(shape, type, list, a, b, p, rest)                                                    \
    "{\n.reg .pred p;\nsetp.ne.b32 p, " p ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32." type \
    "." type " " list ", " a ", " b ", p, 1, 1, " rest ";\n}"
#define WGMMA_64(type)                                                          \
    asm volatile(WGMMA("m64n64k16", type, L32, "%32", "%33", "%34", "%35, %36") \
                 : F32(0)                                                       \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(tA), "n"(tB))
#define WGMMA_128(type)                                                          \
    asm volatile(WGMMA("m64n128k16", type, L64, "%64", "%65", "%66", "%67, %68") \
                 : F32(0), F32(32)                                               \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(tA), "n"(tB))
#define WGMMA_RS_64(type)                                                                \
    asm volatile(WGMMA("m64n64k16", type, L32, "{%32,%33,%34,%35}", "%36", "%37", "%38") \
                 : F32(0)                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(tB))
#define WGMMA_RS_128(type)                                                                \
    asm volatile(WGMMA("m64n128k16", type, L64, "{%64,%65,%66,%67}", "%68", "%69", "%70") \
                 : F32(0), F32(32)                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(tB))

// d (64,N) = or += a (64,16) b (N,16)^T, operands in shared memory; tA, tB: 0 K-major, 1 MN-major
template <typename T, int N, int tA, int tB>
DEV void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {
    static_assert(N == 64 || N == 128, "wgmma() has 64 or 128 columns here");
    constexpr bool BF16 = std::is_same_v<T, bf16>;
    if constexpr (N == 64 && BF16) WGMMA_64("bf16");
    if constexpr (N == 64 && !BF16) WGMMA_64("f16");
    if constexpr (N == 128 && BF16) WGMMA_128("bf16");
    if constexpr (N == 128 && !BF16) WGMMA_128("f16");
}
// a from registers: the fragments of mma_m16n8k16, 16 rows a warp
template <typename T, int N, int tB>
DEV void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    static_assert(N == 64 || N == 128, "wgmma_rs() has 64 or 128 columns here");
    constexpr bool BF16 = std::is_same_v<T, bf16>;
    if constexpr (N == 64 && BF16) WGMMA_RS_64("bf16");
    if constexpr (N == 64 && !BF16) WGMMA_RS_64("f16");
    if constexpr (N == 128 && BF16) WGMMA_RS_128("bf16");
    if constexpr (N == 128 && !BF16) WGMMA_RS_128("f16");
}
#undef F4
#undef F16
#undef F32
#undef L32
#undef L64
#undef WGMMA
#undef WGMMA_64
#undef WGMMA_128
#undef WGMMA_RS_64
#undef WGMMA_RS_128

// ---- warp-level (sm_80+) ---------------------------------------------------------------
DEV void ldmatrix_x4(uint32_t (&r)[4], const void* s) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_u32(s)));
}
DEV void ldmatrix_x4_t(uint32_t (&r)[4], const void* s) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_u32(s)));
}
DEV void stmatrix_x4(void* s, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(smem_u32(s)),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
DEV void stmatrix_x4_t(void* s, const uint32_t (&r)[4]) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(smem_u32(s)),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
}
// d (16,8) += a (16,16) b (16,8), operands bf16 or fp16
#define MMA_M16N8K16(type)                                                    \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type       \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
template <typename T>
DEV void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    if constexpr (std::is_same_v<T, bf16>)
        MMA_M16N8K16("bf16");
    else
        MMA_M16N8K16("f16");
}
#undef MMA_M16N8K16
DEV void mma_m16n8k32_e4m3(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// 16 bytes to shared memory, of which the first `bytes` are read and the others 0
DEV void cp_async16(void* s, const void* g, int bytes = 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem_u32(s)),
                 "l"(g), "r"(bytes)
                 : "memory");
}
DEV void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEV void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
DEV float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEV float tanh_fast(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// two numbers as T in one register
template <typename T> DEV uint32_t pack(float low, float high) {
    uint32_t r;
    if constexpr (std::is_same_v<T, bf16>)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
DEV uint16_t pack_e4m3(float low, float high) {
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
}
DEV uint16_t pack_e5m2(float low, float high) {
    uint16_t r;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
}
DEV void red_add_v4(float* g, float4 v) {
    asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(g), "f"(v.x), "f"(v.y),
                 "f"(v.z), "f"(v.w)
                 : "memory");
}
DEV void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEV void pdl_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#endif

// Whether this pass compiles Hopper's own instructions: kernels that use them are empty in others.
#if defined(EMULATE) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER_PASS 1
#else
#define HOPPER_PASS 0
#endif

#if KERNELS
// A wgmma operand in shared memory under the 128-byte swizzle (chunk of 16 bytes ^= row % 8, in
// blocks of 8 rows of 128 bytes). Bytes, all of them multiples of 16:
//   K-major   rows of 64 elements of K; stride: from 8 rows to the next 8; leading: not used.
//             The next 16 of K: start + 32; after 64 of K: the next column of blocks.
//   MN-major  rows are K, 64 elements of M or N in each; stride: from 8 of K to the next 8;
//             leading: from 64 of M or N to the next 64. The next 16 of K: start + 2048.
HD inline uint64_t descriptor(uint32_t start, uint32_t leading, uint32_t stride) {
    return uint64_t((start & 0x3ffff) >> 4) | uint64_t((leading & 0x3ffff) >> 4) << 16 |
           uint64_t((stride & 0x3ffff) >> 4) << 32 | uint64_t(1) << 62;
}

// How TMA reaches a tensor: dims, innermost first; strides of dims 1.. in elements; the box that a
// load or store moves. Elements out of range are read as zeros and not written. swizzle: as
// descriptor() has it, for boxes of 128 bytes. Pass it as `const __grid_constant__ CUtensorMap`.
template <typename T, int RANK>
CUtensorMap make_tensor_map(const T* base, const size_t (&dims)[RANK],
                            const size_t (&strides)[RANK - 1], const unsigned (&box)[RANK],
                            bool swizzle) {
    CHECK(uintptr_t(base) % 16 == 0, "a tensor map's base must be 16-byte aligned: %p",
          (const void*)base);
    CHECK(box[0] * sizeof(T) % 16 == 0 && (!swizzle || box[0] * sizeof(T) == 128),
          "a box of %zu bytes: a multiple of 16, or 128 with swizzle", box[0] * sizeof(T));
    for (int i = 0; i < RANK; i++)
        CHECK(dims[i] > 0 && dims[i] <= size_t(1) << 32 && box[i] > 0 && box[i] <= 256,
              "dim %d of a tensor map: %zu, box %u; a box has 1 to 256", i, dims[i], box[i]);
    for (int i = 0; i + 1 < RANK; i++)
        CHECK(strides[i] * sizeof(T) % 16 == 0 && strides[i] * sizeof(T) < size_t(1) << 40,
              "stride %d of a tensor map is %zu elements: no multiple of 16 bytes", i, strides[i]);
    CUtensorMap map;
#if defined(EMULATE)
    map = {};
    map.base = reinterpret_cast<unsigned char*>(const_cast<T*>(base));
    map.rank = RANK, map.element = sizeof(T), map.swizzle = swizzle;
    for (int i = 0; i < RANK; i++) {
        map.dims[i] = dims[i], map.box[i] = box[i];
        map.strides[i] = i ? strides[i - 1] * sizeof(T) : sizeof(T);
    }
#else
    static_assert(sizeof(T) == 4 || sizeof(T) == 2, "float, bf16 or fp16");
    static const auto encode = [] { // from the driver: nothing to link
        void* function = nullptr;
        cudaDriverEntryPointQueryResult result;
        CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                    cudaEnableDefault, &result));
        CHECK(result == cudaDriverEntryPointSuccess, "the driver has no tensor maps (%d)",
              int(result));
        return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
    }();
    cuuint64_t sizes[RANK], bytes[RANK];
    cuuint32_t boxes[RANK], ones[RANK];
    for (int i = 0; i < RANK; i++) {
        sizes[i] = dims[i], boxes[i] = box[i], ones[i] = 1;
        bytes[i] = i + 1 < RANK ? strides[i] * sizeof(T) : 0;
    }
    CUtensorMapDataType type = std::is_same_v<T, float>  ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                               : std::is_same_v<T, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                         : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    CUresult status = encode(&map, type, RANK, const_cast<T*>(base), sizes, bytes, boxes, ones,
                             CU_TENSOR_MAP_INTERLEAVE_NONE,
                             swizzle ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    CHECK(status == CUDA_SUCCESS, "the driver refuses a tensor map (error %d)", int(status));
#endif
    return map;
}
#endif
