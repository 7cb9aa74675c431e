// hopper.cuh - inline-PTX wrappers of Hopper (sm_90a): mbarrier, TMA, wgmma, barriers, registers
//   This file, mma.cuh and tensor_cores.h hold all inline PTX of the project.
//   Each wrapper has a caller, and a model that the tests run: test/harness/emulator_hopper.h. The
//   PTX manual has a section named after each instruction; CUTLASS has the same wrappers:
//     instruction                         from      in CUTLASS
//     mbarrier, bar, fence.proxy.async    sm_90     cutlass/arch/barrier.h
//     setmaxnreg                          sm_90a    cutlass/arch/reg_reconfig.h
//     elect.sync                          sm_90     cute/arch/cluster_sm90.hpp
//     cp.async.bulk, .tensor, prefetch    sm_90     cute/arch/copy_sm90_tma.hpp
//     stmatrix                            sm_90     cute/arch/copy_sm90.hpp
//     wgmma                               sm_90a    cute/arch/mma_sm90_gmma.hpp, mma_sm90_desc.hpp
//     ld.acquire, red.release             sm_70     cutlass/semaphore.h
//   Contract: an instruction that is .aligned in PTX must be called by all lanes of a warp
//             together, wgmma and setmaxnreg by all warps of a warpgroup.  wgmma takes bf16 and
//             fp16; a tensor map takes float too.
//   To copy: this file, tensor_cores.h, types.h and cuda_common.h.
#pragma once
#include <array>
#include <map>
#include "tensor_cores.h"

#if defined(EMULATE)
#include "../../test/harness/emulator_hopper.h"
#elif defined(__CUDACC__)
#include <cuda.h>
#include <cudaTypedefs.h>
#endif

namespace llmc {

#if defined(__CUDACC__)

// ---- mbarrier: a phase is over when all arrivals and all expected bytes have come --------
// Initialise a barrier. One thread does it, before any other may arrive or wait. Phases have
// the parities 0, 1, 0, ...: wait for them in turn. On a new barrier a wait for parity 1
// returns at once.
LLMC_DEV void mbar_init(uint64_t* b, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_u32(b)), "r"(arrivals));
}
// Make new barriers visible to TMA.
LLMC_DEV void mbar_init_fence() { // after mbar_init, before the block's barrier
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrive and announce bytes, in one instruction, so that the phase cannot end between the two.
LLMC_DEV void mbar_expect_tx(uint64_t* b, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_u32(b)),
                 "r"(bytes)
                 : "memory");
}
// Arrive once. The arrival releases what this thread wrote before.
LLMC_DEV void mbar_arrive(uint64_t* b) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(smem_u32(b))
                 : "memory");
}
// Wait until the phase of this parity is over.
LLMC_DEV void mbar_wait(uint64_t* b, uint32_t parity) {
    uint32_t done;
    do { // each try suspends the thread for a while
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.b32 %0,1,0,p;\n}"
            : "=r"(done)
            : "r"(smem_u32(b)), "r"(parity)
            : "memory");
    } while (!done);
}

// ---- fences, named barriers, registers ----------------------------------------------------
// Make this thread's writes to shared memory visible to TMA stores and wgmma. Call it before the
// barrier that those wait for.
LLMC_DEV void fence_async_smem() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Set the number of registers of each thread to N, a multiple of 8. regs_inc waits until other
// warps have given enough away by regs_dec.
template <int N> LLMC_DEV void regs_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> LLMC_DEV void regs_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
// Named barrier `id` of n threads: arrive and wait, or arrive and continue. A block has 16
// barriers, and 0 is __syncthreads(). n counts whole warps.
LLMC_DEV void bar_sync(int id, int n) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n) : "memory");
}
LLMC_DEV void bar_arrive(int id, int n) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(n) : "memory");
}
// Choose one lane of a warp, to issue TMA and arrivals: only it gets true. All lanes must call it.
LLMC_DEV bool elect_one() {
    uint32_t p;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0,1,0,p;\n}" : "=r"(p));
    return p;
}

// Wait until a word in global memory says that it is this block's turn; a negative word means that
// turns were lost. One thread polls; then it sees all that the block before has written, and so do
// its bulk copies, which go by the asynchronous proxy.
LLMC_DEV void wait_for_turn(int* turn, int mine) {
    int now, polls = 0;
    do {
        // An acquire would empty the SM's L1 at each poll.
        asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
        // A turn that has not come in half a minute never comes: give up, for all blocks that wait.
        // A printf here would make ptxas serialise the kernel's products: check_turn() reports it.
        if (++polls == 1 << 26) atomicExch(turn, INT_MIN);
    } while (now != mine && now >= 0);
    // Acquire once: a load costs less than a fence, which waits for the thread's writes too.
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];\nfence.proxy.async.global;"
                 : "=r"(now)
                 : "l"(turn)
                 : "memory");
}
// Call it in a later kernel: it stops with an error if turns were lost.
LLMC_DEV void check_turn(const int* turn) {
    if (*turn >= 0) return;
    printf("a block's turn never came: blocks did not start in the order of their indices\n");
    __trap();
}
// Pass the turn on, `by` further, with release: who has it then sees what was written before.
LLMC_DEV void pass_turn(int* turn, int by) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(turn), "r"(by) : "memory");
}

// ---- TMA: tiles of a tensor map, whose coordinates come innermost first -------------------
// Prefetch a map, so that its first use does not wait for it.
LLMC_DEV void tma_prefetch(const CUtensorMap* m) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(m) : "memory");
}
// Load a box into shared memory at s; its bytes count on the barrier. Elements out of range become
// zeros, and their bytes count as well.
LLMC_DEV void tma_load_4d(void* s, const CUtensorMap* m, uint64_t* bar, int c0, int c1, int c2,
                          int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%3,%4,%5,%6}], [%2];" ::"r"(smem_u32(s)),
        "l"(m), "r"(smem_u32(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}
// Store a box from shared memory; bulk_commit() and bulk_wait*() cover it. After ordinary writes to
// s call fence_async_smem() first, or TMA may store the old contents.
LLMC_DEV void tma_store_4d(const CUtensorMap* m, const void* s, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2,%3,%4,%5}], [%1];" ::
            "l"(m),
        "r"(smem_u32(s)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

// ---- stmatrix: the reverse of ldmatrix -------------------------------------------------------
// Store four 8 by 8 matrices. Lane 8 m + r provides the address of row r of matrix m, 16 bytes.
LLMC_DEV void stmatrix_x4(void* s, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(smem_u32(s)),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// ---- bulk copies: bytes and addresses are multiples of 16 ----------------------------------
// Load bytes into shared memory; they count on the barrier.
LLMC_DEV void bulk_load_1d(void* s, const void* g, uint32_t bytes, uint64_t* bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(smem_u32(s)),
        "l"(g), "r"(bytes), "r"(smem_u32(bar))
        : "memory");
}
// Store bytes of shared memory at g.
LLMC_DEV void bulk_store_1d(void* g, const void* s, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(g),
                 "r"(smem_u32(s)), "r"(bytes)
                 : "memory");
}
// Add floats in shared memory to g, by one atomic addition each. Other blocks' additions come in
// any order, so rounding varies unless blocks take turns.
LLMC_DEV void bulk_reduce_add_f32(float* g, const void* s, uint32_t bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(g),
        "r"(smem_u32(s)), "r"(bytes)
        : "memory");
}
// Close a group of this thread's stores and reductions, and wait for all groups but the last N.
LLMC_DEV void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N>
LLMC_DEV void bulk_wait_read() { // until shared memory may be overwritten
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
template <int N>
LLMC_DEV void bulk_wait() { // until global memory is written
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// ---- wgmma ---------------------------------------------------------------------------------
// Call it before the first product, and before each product whose registers have been written since
// the last one.
LLMC_DEV void wg_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Close a group of all products since the last commit; wait for all groups but the last N.
LLMC_DEV void wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> LLMC_DEV void wg_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Call it after a wait. It keeps the compiler from reading the accumulator earlier.
LLMC_DEV void keep(float& r) { asm volatile("" : "+f"(r)::"memory"); }
// Call it before a wait, with a condition that is never true and depends on the arithmetic that
// should run before the wait. ptxas moves a wait up over arithmetic, which then no longer overlaps
// the products, but never over a branch.
LLMC_DEV void never(bool impossible) {
    if (impossible) __trap();
}

// The accumulator's operands: 32 registers a thread for 64 columns, 64 for 128, 128 for 256.
#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)
#define F32(i) F16(i), F16(i + 16)
#define F64(i) F32(i), F32(i + 32)
#define L32                                                                                   \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
    "%24,%25,%26,%27,%28,%29,%30,%31}"
#define L64                                                                                    \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"  \
    "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45," \
    "%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
#define L128                                                                                     \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"    \
    "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,"   \
    "%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,"   \
    "%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,"   \
    "%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109," \
    "%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}"
// p is the instruction's scale-d: if false, the product overwrites d. 1, 1: no operand is negated.
#define WGMMA(shape, type, list, a, b, p, rest)                                                    \
    "{\n.reg .pred p;\nsetp.ne.b32 p, " p ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32." type \
    "." type " " list ", " a ", " b ", p, 1, 1, " rest ";\n}"
// Both a and b are descriptors of shared memory.
#define WGMMA_64(type)                                                          \
    asm volatile(WGMMA("m64n64k16", type, L32, "%32", "%33", "%34", "%35, %36") \
                 : F32(0)                                                       \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(tA), "n"(tB))
#define WGMMA_128(type)                                                          \
    asm volatile(WGMMA("m64n128k16", type, L64, "%64", "%65", "%66", "%67, %68") \
                 : F32(0), F32(32)                                               \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(tA), "n"(tB))
#define WGMMA_256(type)                                                                \
    asm volatile(WGMMA("m64n256k16", type, L128, "%128", "%129", "%130", "%131, %132") \
                 : F64(0), F64(64)                                                     \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(tA), "n"(tB))
// _RS: a comes from registers, four a thread, and is always K-major.
#define WGMMA_RS_64(type)                                                                \
    asm volatile(WGMMA("m64n64k16", type, L32, "{%32,%33,%34,%35}", "%36", "%37", "%38") \
                 : F32(0)                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(tB))
#define WGMMA_RS_128(type)                                                                \
    asm volatile(WGMMA("m64n128k16", type, L64, "{%64,%65,%66,%67}", "%68", "%69", "%70") \
                 : F32(0), F32(32)                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(tB))

// d (64,N) = or += a (64,16) b (N,16)^T, both in shared memory. tA, tB: 0 K-major, 1 MN-major.
template <typename T, int N, int tA, int tB>
LLMC_DEV void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {
    LLMC_TENSOR_CORE_TYPE(T);
    static_assert(N == 64 || N == 128 || N == 256, "wgmma() has 64, 128 or 256 columns here");
    constexpr bool BF16 = std::is_same_v<T, bf16>;
    if constexpr (N == 64 && BF16) WGMMA_64("bf16");
    if constexpr (N == 64 && !BF16) WGMMA_64("f16");
    if constexpr (N == 128 && BF16) WGMMA_128("bf16");
    if constexpr (N == 128 && !BF16) WGMMA_128("f16");
    if constexpr (N == 256 && BF16) WGMMA_256("bf16");
    if constexpr (N == 256 && !BF16) WGMMA_256("f16");
}
// The same with a in registers: the fragments of mma_m16n8k16, 16 rows a warp.
template <typename T, int N, int tB>
LLMC_DEV void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    LLMC_TENSOR_CORE_TYPE(T);
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
#undef F64
#undef L32
#undef L64
#undef L128
#undef WGMMA
#undef WGMMA_64
#undef WGMMA_128
#undef WGMMA_256
#undef WGMMA_RS_64
#undef WGMMA_RS_128

#endif

// Whether this pass of the compiler takes Hopper's own instructions. If not, a kernel that needs
// them calls needs_sm90a().
#if defined(EMULATE) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER_PASS 1
#else
#define HOPPER_PASS 0
#endif

#if defined(__CUDACC__) && !HOPPER_PASS
// End the launch with an error: an empty kernel would silently leave its outputs unwritten. This
// happens on a Hopper that runs code compiled for another GPU.
LLMC_DEV void needs_sm90a() {
    // Let one thread trap: the trap of another could come before the message.
    unsigned block = blockIdx.x + blockIdx.y + blockIdx.z;
    if (block + threadIdx.x > 0) return;
    // The text takes no argument, which would lie in local memory.
    printf("a kernel of Hopper's has no code for this GPU: compile for sm_90a (make GPUS=90a)\n");
    __trap();
}
#endif

#if LLMC_KERNELS
// The descriptor of a wgmma operand in shared memory under the 128-byte swizzle (in blocks of 8
// rows of 128 bytes, chunk of 16 bytes ^= row % 8). All arguments are bytes and multiples of 16:
//   K-major   a row is 64 elements of K; stride: from 8 rows to the next 8; leading: not used.
//             The next 16 of K: start + 32; after 64 of K: the next column of blocks.
//   MN-major  a row is one K, with 64 elements of M or N; stride: from 8 of K to the next 8;
//             leading: from 64 of M or N to the next 64. The next 16 of K: start + 2048.
LLMC_HD inline uint64_t descriptor(uint32_t start, uint32_t leading, uint32_t stride) {
    // Each field counts 16 bytes, in 14 bits.
    constexpr uint32_t MASK = 0x3ffff;
    uint64_t starts = (start & MASK) >> 4;
    uint64_t leads = (leading & MASK) >> 4;
    uint64_t strides = (stride & MASK) >> 4;
    uint64_t swizzle = uint64_t(1) << 62; // of 128 bytes
    return starts | leads << 16 | strides << 32 | swizzle;
}

// Describe to TMA how a tensor lies: dims, innermost first; strides of dims 1.. in elements;
// and the box that a load or store moves. Elements out of range are read as zeros and not
// written. swizzle is the one of descriptor(), for boxes of 128 bytes.
template <typename T, int RANK>
CUtensorMap encode_tensor_map(const T* base, const size_t (&dims)[RANK],
                            const size_t (&strides)[RANK - 1], const unsigned (&box)[RANK],
                            bool swizzle) {
    static_assert(std::is_same_v<T, float> || IS_BF16_OR_FP16<T>,
                  "a tensor map is of float, llmc::bf16 or llmc::fp16");

    // Refuse what the hardware does not take.
    LLMC_CHECK(uintptr_t(base) % 16 == 0, "a tensor map's base must be 16-byte aligned: %p",
               (const void*)base);
    size_t row = box[0] * sizeof(T);
    LLMC_CHECK(row % 16 == 0 && (!swizzle || row == 128),
               "a box of %zu bytes: a multiple of 16, or 128 with swizzle", row);
    for (int i = 0; i < RANK; i++) {
        bool dim_fits = dims[i] > 0 && dims[i] <= size_t(1) << 32;
        bool box_fits = box[i] > 0 && box[i] <= 256;
        LLMC_CHECK(dim_fits && box_fits, "dim %d of a tensor map: %zu, box %u; a box has 1 to 256",
                   i, dims[i], box[i]);
    }

    // The innermost dim has no stride: its elements are neighbours.
    for (int i = 0; i + 1 < RANK; i++) {
        size_t bytes = strides[i] * sizeof(T);
        LLMC_CHECK(bytes % 16 == 0 && bytes < size_t(1) << 40,
                   "stride %d of a tensor map is %zu elements: no multiple of 16 bytes", i,
                   strides[i]);
    }

    CUtensorMap map;
#if defined(EMULATE)
    // The emulator reads the numbers directly: strides in bytes, the innermost included.
    emulator::encoded_maps++;
    map = {};
    map.base = reinterpret_cast<unsigned char*>(const_cast<T*>(base));
    map.rank = RANK;
    map.element = sizeof(T);
    map.swizzle = swizzle;
    for (int i = 0; i < RANK; i++) {
        map.dims[i] = dims[i];
        map.box[i] = box[i];
        map.strides[i] = i ? strides[i - 1] * sizeof(T) : sizeof(T);
    }
#else
    // Ask the driver for its encoder, so that there is no library to link.
    static const auto encode = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult result;
        LLMC_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                         cudaEnableDefault, &result));
        LLMC_CHECK(result == cudaDriverEntryPointSuccess, "the driver has no tensor maps (%d)",
                   int(result));
        return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
    }();

    // Encode. Strides are in bytes, without the innermost.
    cuuint64_t sizes[RANK], bytes[RANK];
    cuuint32_t boxes[RANK], ones[RANK];
    for (int i = 0; i < RANK; i++) {
        sizes[i] = dims[i];
        boxes[i] = box[i];
        ones[i] = 1;
        bytes[i] = i + 1 < RANK ? strides[i] * sizeof(T) : 0;
    }
    CUtensorMapDataType type = std::is_same_v<T, float>  ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                               : std::is_same_v<T, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                         : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    // Out-of-range elements are filled with zeros; L2 fetches 256 bytes at a time.
    CUresult status = encode(&map, type, RANK, const_cast<T*>(base), sizes, bytes, boxes, ones,
                             CU_TENSOR_MAP_INTERLEAVE_NONE,
                             swizzle ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    LLMC_CHECK(status == CUDA_SUCCESS, "the driver refuses a tensor map (error %d)", int(status));
#endif
    return map;
}

constexpr size_t MOST_MAPS = 4096; // of one type and rank that a thread keeps: about 1 MiB

// The same, but take a map that this thread has encoded before, if there is one: layers come with
// the same operands in every step. A map holds nothing but these arguments, so it stays valid.
// Pass it as `const __grid_constant__ CUtensorMap`.
template <typename T, int RANK>
CUtensorMap make_tensor_map(const T* base, const size_t (&dims)[RANK],
                            const size_t (&strides)[RANK - 1], const unsigned (&box)[RANK],
                            bool swizzle) {
    // Every argument is part of the key.
    typedef std::array<size_t, 3 * RANK + 1> Key;
    Key key = {size_t(uintptr_t(base)), swizzle};
    auto next = key.begin() + 2;
    for (size_t dim : dims)
        *next++ = dim;
    for (size_t stride : strides)
        *next++ = stride;
    for (unsigned side : box)
        *next++ = side;

    // Find it, or encode it. A text that grows brings new sizes without end, so limit the store.
    static thread_local std::map<Key, CUtensorMap> known;
    const auto found = known.find(key);
    if (found != known.end())
        return found->second;
    if (known.size() == MOST_MAPS)
        known.clear();
    known[key] = encode_tensor_map(base, dims, strides, box, swizzle);
    return known[key];
}
#endif

} // namespace llmc
