// hopper.cuh - every inline-PTX wrapper of the project, sm_80 and sm_90a; no asm anywhere else
//   Warp level (sm_80 and up): ldmatrix, stmatrix (sm_90), mma, cp.async, fast exp2 and tanh.
//   Hopper: mbarrier, TMA, wgmma, named barriers, setmaxnreg, proxy fences.
//   Each wrapper has an executable model: test/emulator_warp.h, test/emulator_hopper.h.
//   To copy: this file and common.h.
#pragma once
#include <type_traits>
#include "common.h"

#if defined(EMULATE)
#include "../test/emulator_hopper.h"
#include "../test/emulator_warp.h"
#elif defined(__CUDACC__)
#include <cuda.h>
#define DEV __device__ __forceinline__

DEV uint32_t smem_u32(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// ---- mbarrier -------------------------------------------------------------------------
DEV void mbar_init(uint64_t* b, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_u32(b)), "r"(arrivals));
}
DEV void mbar_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEV void mbar_expect_tx(uint64_t* b, uint32_t bytes) { // arrive (1) and add bytes to tx-count
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_u32(b)),
                 "r"(bytes)
                 : "memory");
}
DEV void mbar_arrive(uint64_t* b) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(smem_u32(b))
                 : "memory");
}
DEV void mbar_arrive_cluster(uint64_t* b, uint32_t cta) { // arrive on a peer CTA's barrier
    asm volatile(
        "{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [r];\n}" ::"r"(smem_u32(b)),
        "r"(cta)
        : "memory");
}
DEV bool mbar_try_wait(uint64_t* b, uint32_t parity) {
    uint32_t ok;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 "
        "%0,1,0,p;\n}"
        : "=r"(ok)
        : "r"(smem_u32(b)), "r"(parity)
        : "memory");
    return ok;
}
DEV void mbar_wait(uint64_t* b, uint32_t parity) {
    while (!mbar_try_wait(b, parity)) {}
}
DEV void mbar_inval(uint64_t* b) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(smem_u32(b)));
}

// ---- fences / named barriers / registers ----------------------------------------------
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
DEV bool elect_one() {
    uint32_t p;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0,1,0,p;\n}" : "=r"(p));
    return p;
}

// ---- TMA -------------------------------------------------------------------------------
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
                          int c3, uint64_t pol) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::"
        "cache_hint [%0], [%1, {%3,%4,%5,%6}], [%2], %7;" ::"r"(smem_u32(s)),
        "l"(m), "r"(smem_u32(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(pol)
        : "memory");
}
DEV void tma_load_4d_mc(void* s, const CUtensorMap* m, uint64_t* bar, int c0, int c1, int c2,
                        int c3, uint16_t mask) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes."
        "multicast::cluster [%0], [%1, {%3,%4,%5,%6}], [%2], %7;" ::"r"(smem_u32(s)),
        "l"(m), "r"(smem_u32(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(mask)
        : "memory");
}
DEV void tma_load_4d_cta(void* s, const CUtensorMap* m, uint64_t* bar, int c0, int c1, int c2,
                         int c3) { // PTX 8.6+: .shared::cta destination
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
        "{%3,%4,%5,%6}], [%2];" ::"r"(smem_u32(s)),
        "l"(m), "r"(smem_u32(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}
DEV void tma_store_4d(const CUtensorMap* m, const void* s, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2,%3,%4,%5}], [%1];" ::
            "l"(m),
        "r"(smem_u32(s)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}
DEV void tma_reduce_add_4d(const CUtensorMap* m, const void* s, int c0, int c1, int c2,
                           int c3) { // dQ accumulation, fp32 map
    asm volatile(
        "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, "
        "{%2,%3,%4,%5}], [%1];" ::"l"(m),
        "r"(smem_u32(s)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}
DEV void bulk_load_1d(void* s, const void* g, uint32_t bytes,
                      uint64_t* bar) { // LSE / D vectors (16 B aligned, multiple of 16 B)
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
DEV void bulk_prefetch_l2(const void* g, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(g), "r"(bytes) : "memory");
}
DEV void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> DEV void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
} // smem source reusable
template <int N> DEV void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
} // global writes done
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

// ---- wgmma -----------------------------------------------------------------------------
DEV void wg_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEV void wg_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
DEV void keep(float& r) {
    asm volatile("" : "+f"(r)::"memory");
} // stop the compiler moving accumulator reads across a wait
// 128B-swizzle descriptor. lbo/sbo in bytes. K-major: lbo ignored (write 1 unit), sbo = 1024 (8 rows x 128 B).
// MN-major: lbo = bytes between 64-element column chunks, sbo = 1024 (8 k-rows x 128 B).
DEV uint64_t desc_sw128(uint32_t addr, uint32_t lbo, uint32_t sbo) {
    return (uint64_t)((addr & 0x3FFFF) >> 4) | (uint64_t)((lbo & 0x3FFFF) >> 4) << 16 |
           (uint64_t)((sbo & 0x3FFFF) >> 4) << 32 | 1ull << 62;
}

#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)
#define F32(i) F16(i), F16(i + 16)
#define L32                                                                                        \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%" \
    "25,%26,%27,%28,%29,%30,%31}"
#define L64                                                                                        \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%" \
    "25,%26,%27,%28,%29,%30,%31,"                                                                  \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54," \
    "%55,%56,%57,%58,%59,%60,%61,%62,%63}"
// D[64xN] (+)= A(smem) * B(smem);  acc is a runtime predicate; tA/tB: 0 = K-major, 1 = MN-major (16-bit types only)
template <int tA, int tB>
DEV void wgmma_m64n64k16(float (&d)[32], uint64_t a, uint64_t b, int acc) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " L32
        ", %32, %33, p, 1, 1, %35, %36;\n}"
        : F32(0)
        : "l"(a), "l"(b), "r"(acc), "n"(tA), "n"(tB));
}
template <int tA, int tB>
DEV void wgmma_m64n128k16(float (&d)[64], uint64_t a, uint64_t b, int acc) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " L64
        ", %64, %65, p, 1, 1, %67, %68;\n}"
        : F32(0), F32(32)
        : "l"(a), "l"(b), "r"(acc), "n"(tA), "n"(tB));
}
// A from registers (always K-major); only tB remains
template <int tB>
DEV void wgmma_rs_m64n128k16(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int acc) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " L64
        ", {%64,%65,%66,%67}, %68, p, 1, 1, %70;\n}"
        : F32(0), F32(32)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(acc), "n"(tB));
}
template <int tB>
DEV void wgmma_rs_m64n64k16(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int acc) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " L32
        ", {%32,%33,%34,%35}, %36, p, 1, 1, %38;\n}"
        : F32(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(acc), "n"(tB));
}
// fp8: both operands K-major only, no transpose immediates
DEV void wgmma_m64n128k32_e4m3(float (&d)[64], uint64_t a, uint64_t b, int acc) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " L64 ", %64, %65, p, 1, 1;\n}"
        : F32(0), F32(32)
        : "l"(a), "l"(b), "r"(acc));
}
DEV void wgmma_m64n128k32_e5m2_e4m3(float (&d)[64], uint64_t a, uint64_t b, int acc) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e5m2.e4m3 " L64 ", %64, %65, p, 1, 1;\n}"
        : F32(0), F32(32)
        : "l"(a), "l"(b), "r"(acc));
}

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
DEV uint16_t pack_e4m3(float lo, float hi) {
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
    return r;
}
DEV uint16_t pack_e5m2(float lo, float hi) {
    uint16_t r;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
    return r;
}
DEV void red_add_v4(float* g, float4 v) {
    asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(g), "f"(v.x), "f"(v.y),
                 "f"(v.z), "f"(v.w)
                 : "memory");
}
DEV void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEV void pdl_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEV void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEV void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
#endif
