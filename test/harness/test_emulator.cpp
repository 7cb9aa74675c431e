// test_emulator.cpp - the emulator's own tests: small kernels with planted bugs, and right twins
//   test_emulator             each bug must be reported or show in the result; no right twin may
//   test_emulator bug NAME    run one kernel with its bug, or
//   test_emulator right NAME  without it, in every order, for a sanitizer to watch
//                             (emulator_bugs.sh); NAME "all" runs all of them
//   A kernel is a template over whether it has its bug. The known answers of swizzle, descriptors
//   and fragments are written from the PTX manual's figures, not from the models.
#include <cinttypes>
#include <set>
#include "../../llmc/ops/tensor_cores.h"
#include "../../llmc/ops/hopper.cuh"
#include "../../llmc/ops/mma.cuh"

using namespace llmc;

namespace {

// ----------------------------------------------------------------------------
// the harness

int passed = 0, failed = 0;
void verdict(bool good, const std::string& name, const std::string& why = "") {
    printf("%s %s%s%s\n", good ? "ok" : "FAIL", name.c_str(), why.empty() ? "" : ": ", why.c_str());
    good ? passed++ : failed++;
}

constexpr size_t OUTPUTS = 16384;
typedef std::vector<float> Output;
typedef void (*Kernel)(float* out);

// A planted bug, and the launch that shows it.
struct Bug {
    const char* name;
    // The message expected. null: results differ between orders. "": only a sanitizer sees the bug.
    const char* message;
    unsigned threads, blocks;
    size_t shared_bytes;
    Kernel bug, right;
};

struct Findings {
    std::vector<std::string> messages;
    std::set<std::string> results; // the outputs that occurred, as bytes
    bool poison = false;           // NaN in a result
};

// Run a kernel in the three thread orders, with asynchronous operations at their
// earliest and at their latest, then with each warp as the last one.
Findings run_all(Kernel kernel, const Bug& b) {
    Findings f;
    auto run = [&](const emulator::Settings& settings) {
        emulator::settings = settings;
        Output out(OUTPUTS);
        launch_bytes(kernel, b.blocks, b.threads, b.shared_bytes, cudaStream_t{}, out.data());
        for (const std::string& m : emulator::take_messages()) f.messages.push_back(m);
        for (float x : out) f.poison |= x != x;
        f.results.insert(std::string(reinterpret_cast<char*>(out.data()), OUTPUTS * 4));
    };
    for (int order = 0; order < 3; order++)
        for (bool latest : {false, true}) run({emulator::Order(order), 7, latest});
    for (int warp = 0; warp < int(b.threads + 31) / 32; warp++)
        run({emulator::Order::FORWARD, 7, true, warp});
    emulator::settings = {};
    return f;
}

// A right twin reports nothing, and has one result without NaN.
void check_right(const Bug& b) {
    Findings f = run_all(b.right, b);
    std::string why = !f.messages.empty()     ? f.messages[0]
                      : f.results.size() != 1 ? std::to_string(f.results.size()) + " results"
                      : f.poison              ? "NaN in the result"
                                              : "";
    verdict(why.empty(), std::string(b.name) + ", right", why);
}
void check_bug(const Bug& b) {
    if (b.message && !*b.message) return; // emulator_bugs.sh looks for these

    // Two results, or NaN, show the bug where no message is expected.
    Findings f = run_all(b.bug, b);
    bool found = !b.message && (f.results.size() > 1 || f.poison);
    std::string why = b.message ? "not reported" : "the same result in every order";

    // Otherwise one of the messages must say what is expected.
    if (b.message)
        for (const std::string& m : f.messages) {
            found |= m.find(b.message) != std::string::npos;
            why = "reported is: " + m;
        }
    verdict(found, std::string(b.name) + ", planted", found ? "" : why);
}

// ----------------------------------------------------------------------------
// barriers, shared and global memory

template <bool BUG> void missing_barrier(float* out) {
    LLMC_SHARED(float, x, 64);
    x[threadIdx.x] = float(threadIdx.x);
    if (!BUG) __syncthreads();
    out[threadIdx.x] = x[63 - threadIdx.x]; // LINE missing_barrier
}

// While the second warp waits for its own lanes, the first one has had its turn in any order, but
// for the one in which it is the last.
template <bool BUG> void slow_warp(float* out) {
    LLMC_SHARED(float, x, 32);
    if (threadIdx.x < 32) x[threadIdx.x] = 1;
    for (int i = 0; i < 2; i++) __syncwarp();
    if (!BUG) __syncthreads();
    if (threadIdx.x >= 32) out[threadIdx.x] = x[threadIdx.x - 32];
}

// The bug writes the value that is there already, so only ThreadSanitizer can see it.
template <bool BUG> void write_after_read(float* out) {
    LLMC_SHARED(float, x, 64);
    x[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = x[63 - threadIdx.x];
    if (!BUG) __syncthreads();
    x[threadIdx.x] = 1; // LINE write_after_read
}

// The same bug with a copy. The compiler knows that the size is small, and
// copies by plain instructions.
template <bool BUG> void copy_into_a_tile_in_use(float* out) {
    LLMC_SHARED(float, x, 256);
    for (int i = 0; i < 4; i++) x[threadIdx.x * 4 + i] = 0;
    __syncthreads();
    out[threadIdx.x] = x[255 - threadIdx.x * 4];
    if (!BUG) __syncthreads();
    int bytes = threadIdx.x % 2 ? 16 : 0;
    cp_async16(x + threadIdx.x * 4, out + 1000, bytes); // LINE copy_into_a_tile_in_use
    cp_async_commit();
    cp_async_wait<0>();
}

// The two branches hold two barriers.
template <bool BUG> void divergent_barrier(float* out) {
    if (BUG && threadIdx.x % 2)
        __syncthreads();
    else
        __syncthreads();
    out[threadIdx.x] = 1;
}

// Thread 5 never comes to the barrier.
template <bool BUG> void return_before_barrier(float* out) {
    if (BUG && threadIdx.x == 5) return;
    __syncthreads();
    out[threadIdx.x] = 1;
}

template <bool BUG> void outside_the_mask(float* out) {
    unsigned mask = BUG ? 0x0000ffffu : ALL_LANES;
    out[threadIdx.x] = __shfl_sync(mask, float(threadIdx.x), 3);
}
template <bool BUG> void reads_outside_the_mask(float* out) {
    float x = 1;
    if (threadIdx.x < 16) x = __shfl_sync(0x0000ffffu, float(threadIdx.x), BUG ? 20 : 3);
    out[threadIdx.x] = x;
}
template <bool BUG> void returned_lane_in_mask(float* out) {
    if (BUG && threadIdx.x == 31) return;
    out[threadIdx.x] = __shfl_xor_sync(ALL_LANES, float(threadIdx.x), 1);
}
template <bool BUG> void different_shuffles(float* out) {
    float x = float(threadIdx.x);
    if (BUG && threadIdx.x < 16)
        x = __shfl_xor_sync(ALL_LANES, x, 1);
    else
        x = __shfl_down_sync(ALL_LANES, x, 1);
    out[threadIdx.x] = x;
}

template <bool BUG> void beyond_shared(float* out) {
    LLMC_SHARED(float, x, 64);
    x[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = x[threadIdx.x + (BUG && threadIdx.x == 63)]; // LINE beyond_shared
}
template <bool BUG> void beyond_global(float* out) {
    out[threadIdx.x + (BUG && threadIdx.x == 63 ? OUTPUTS - 63 : 0)] = 1; // LINE beyond_global
}
// Shared memory starts as NaN, so an element that nobody wrote shows in the result.
template <bool BUG> void never_written(float* out) {
    LLMC_SHARED(float, x, 65);
    x[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = x[threadIdx.x + BUG];
}
template <bool BUG> void too_much_shared(float* out) {
    LLMC_SHARED(float, x, (BUG ? 49 : 48) * 256);
    x[threadIdx.x] = 1;
    out[threadIdx.x] = x[threadIdx.x];
}

// A warp waits at a barrier to which no other warp comes.
template <bool BUG> void deadlock(float* out) {
    if (!BUG || threadIdx.x < 32) bar_sync(3, 64);
    out[threadIdx.x] = 1;
}
template <bool BUG> void barrier_of_two_sizes(float* out) {
    bar_sync(1, BUG && threadIdx.x < 32 ? 32 : 64);
    out[threadIdx.x] = 1;
}
// A consumer that reports the slot as free before it has read it.
template <bool BUG> void named_barriers(float* out) {
    LLMC_SHARED(float, x, 32);
    for (int i = 0; i < 4; i++)
        if (threadIdx.x < 32) {
            if (i > 0) bar_sync(2, 64); // the slot is free
            x[threadIdx.x] = float(i * 100 + threadIdx.x);
            bar_arrive(1, 64); // the slot is full
        } else {
            bar_sync(1, 64);
            if (BUG && i < 3) bar_arrive(2, 64);
            __syncwarp();
            float y = x[63 - threadIdx.x]; // LINE named_barriers
            if (!BUG && i < 3) bar_arrive(2, 64);
            out[i * 32 + threadIdx.x - 32] = y;
        }
}
// Block 2 waits for the turn that comes after its own.
template <bool BUG> void turns_of_blocks(float* out) {
    int* turn = reinterpret_cast<int*>(out + 1000);
    if (threadIdx.x == 0) {
        wait_for_turn(turn, int(blockIdx.x) + (BUG && blockIdx.x == 2));
        out[0] = out[0] * 2 + float(blockIdx.x); // LINE turns_of_blocks
        pass_turn(turn, 1);
    }
}

// ----------------------------------------------------------------------------
// cp.async

// The wait leaves the second of two groups in flight, and the second is what is read. The last line
// waits in both twins, so that only the read differs.
template <bool BUG> void copy_waits_for_too_few(float* out) {
    LLMC_SHARED(float, x, 256);
    for (int stage = 0; stage < 2; stage++) {
        out[1000 + threadIdx.x * 4] = float(threadIdx.x);
        cp_async16(x + stage * 128 + threadIdx.x * 4, out + 1000 + threadIdx.x * 4);
        cp_async_commit();
    }
    BUG ? cp_async_wait<1>() : cp_async_wait<0>();
    out[threadIdx.x] = x[128 + threadIdx.x * 4];
    cp_async_wait<0>();
}

// ----------------------------------------------------------------------------
// mbarrier and TMA. The tensor lies at out + 4096 and has rows of 64 numbers of 16 bits.

// Encoded anew: the maps that make_tensor_map keeps are a host thread's, and these are a block's.
CUtensorMap map_of(float* out, size_t columns = 64, size_t rows = 16, unsigned box_rows = 8) {
    const size_t all = 64 * rows;
    return encode_tensor_map<bf16, 4>(reinterpret_cast<bf16*>(out + 4096), {columns, rows, 1, 1},
                                      {64, all, all}, {64, box_rows, 1, 1}, true);
}
// The first warp writes the numbers 0 to 255 in bf16, over and over.
void fill_tensor(float* out, int rows) {
    bf16* x = reinterpret_cast<bf16*>(out + 4096);
    if (threadIdx.x < 32)
        for (int i = int(threadIdx.x); i < rows * 64; i += 32)
            x[i] = from_acc<bf16>(float(i % 256));
}
// One number of a tile that is stored with the 128-byte swizzle.
float number_at(const unsigned char* tile, int row, int column) {
    int chunk = (column / 8) ^ (row % 8);
    return to_float(reinterpret_cast<const bf16*>(tile + row * 128 + chunk * 16)[column % 8]);
}
void one_mbarrier(uint64_t* bar, unsigned count = 1) {
    if (threadIdx.x == 0) mbar_init(bar, count), mbar_init_fence();
    __syncthreads();
}
// The map of a tensor that is filled, once a barrier can wait for its loads.
CUtensorMap tensor_to_load(float* out, uint64_t* bar) {
    CUtensorMap map = map_of(out);
    fill_tensor(out, 16);
    one_mbarrier(bar);
    return map;
}

template <bool BUG> void load_without_wait(float* out) {
    unsigned char* tile = dynamic_shared();
    LLMC_SHARED(uint64_t, bar, 1);
    CUtensorMap map = tensor_to_load(out, bar);
    if (threadIdx.x == 0) {
        mbar_expect_tx(bar, 1024);
        tma_load_4d(tile, &map, bar, 0, 8, 0, 0);
    }
    if (!BUG || threadIdx.x == 40) mbar_wait(bar, 0);
    out[threadIdx.x] = number_at(tile, 3, int(threadIdx.x));
    mbar_wait(bar, 0);
}
template <bool BUG> void load_waits_for_the_phase_before(float* out) {
    unsigned char* tile = dynamic_shared();
    LLMC_SHARED(uint64_t, bar, 1);
    CUtensorMap map = tensor_to_load(out, bar);
    for (int i = 0; i < 2; i++) {
        if (threadIdx.x == 0) {
            mbar_expect_tx(bar, 1024);
            tma_load_4d(tile + i * 1024, &map, bar, 0, i * 8, 0, 0);
        }
        mbar_wait(bar, BUG ? 0 : i);
        out[i * 64 + threadIdx.x] = number_at(tile + i * 1024, 3, int(threadIdx.x)) + i;
        if (!BUG || i == 0) __syncthreads();
    }
    mbar_wait(bar, 1);
}
// A ring of one slot: the consumer says that the slot is free before it has read it, so the next
// load overwrites what is being read.
template <bool BUG> void load_into_a_slot_in_use(float* out) {
    unsigned char* tile = dynamic_shared();

    // The producer fills the slot four times, whenever it is free.
    LLMC_SHARED(uint64_t, bar, 2); // full, empty
    CUtensorMap map = map_of(out, 64, 32);
    fill_tensor(out, 32);
    if (threadIdx.x == 0) mbar_init(bar, 1), mbar_init(bar + 1, 32), mbar_init_fence();
    __syncthreads();
    if (threadIdx.x < 32) {
        if (threadIdx.x == 0)
            for (int i = 0; i < 4; i++) {
                mbar_wait(bar + 1, (i + 1) & 1);
                mbar_expect_tx(bar, 1024);
                tma_load_4d(tile, &map, bar, 0, i * 8, 0, 0); // LINE load_into_a_slot_in_use
            }

    // The consumer reads it.
    } else {
        for (int i = 0; i < 4; i++) {
            mbar_wait(bar, i & 1);
            if (BUG) mbar_arrive(bar + 1); // says that the slot is free, and reads it afterwards
            float x = number_at(tile, i, int(threadIdx.x));
            if (!BUG) mbar_arrive(bar + 1);
            out[i * 32 + threadIdx.x] = x;
        }
    }
}
// One load of a tile, whose barrier expects these bytes, and may get an arrival too many.
void load_once(float* out, unsigned char* tile, int bytes, bool arrives = false) {
    LLMC_SHARED(uint64_t, bar, 1);
    CUtensorMap map = tensor_to_load(out, bar);
    if (threadIdx.x == 0) {
        mbar_expect_tx(bar, bytes);
        if (arrives) mbar_arrive(bar);
        tma_load_4d(tile, &map, bar, 0, 0, 0, 0);
    }
    mbar_wait(bar, 0);
    out[threadIdx.x] = number_at(tile, 1, int(threadIdx.x));
}
template <bool BUG> void wrong_bytes(float* out) {
    load_once(out, dynamic_shared(), BUG ? 1040 : 1024);
}
template <bool BUG> void too_many_arrivals(float* out) {
    load_once(out, dynamic_shared(), 1024, BUG);
}
template <bool BUG> void unaligned_tile(float* out) {
    load_once(out, dynamic_shared() + (BUG ? 512 : 0), 1024);
}
template <bool BUG> void no_init_fence(float* out) {
    LLMC_SHARED(uint64_t, bar, 1);
    if (threadIdx.x == 0) {
        mbar_init(bar, 64);
        if (!BUG) mbar_init_fence();
    }
    __syncthreads();
    mbar_arrive(bar);
    mbar_wait(bar, 0);
    out[threadIdx.x] = 1;
}
template <bool BUG> void never_initialised(float* out) {
    LLMC_SHARED(uint64_t, bar, 2);
    one_mbarrier(bar, 64);
    mbar_arrive(bar + BUG);
    if (!BUG) mbar_wait(bar, 0);
    out[threadIdx.x] = 1;
}
// No barrier orders the initialisation before its use; in some thread orders it
// comes first all the same.
template <bool BUG> void init_without_barrier(float* out) {
    LLMC_SHARED(uint64_t, bar, 1);
    if (threadIdx.x == 0) mbar_init(bar, 1), mbar_init_fence(); // LINE init_without_barrier
    if (!BUG) __syncthreads();
    if (threadIdx.x == 0) mbar_arrive(bar);
    if (threadIdx.x == 0 || !BUG) mbar_wait(bar, 0);
    if (threadIdx.x > 0 && BUG) __syncwarp(1u << threadIdx.x % 32), mbar_wait(bar, 0);
    out[threadIdx.x] = 1;
}
template <bool BUG> void load_in_flight_at_end(float* out) {
    unsigned char* tile = dynamic_shared();
    LLMC_SHARED(uint64_t, bar, 1);
    CUtensorMap map = tensor_to_load(out, bar);
    if (threadIdx.x == 0) {
        mbar_expect_tx(bar, 1024);
        tma_load_4d(tile, &map, bar, 0, 0, 0, 0);
        if (!BUG) mbar_wait(bar, 0);
    }
    out[threadIdx.x] = 1;
}

// ----------------------------------------------------------------------------
// stores

// 64 threads write 8 rows.
void write_tile(unsigned char* tile, float x) {
    for (int i = int(threadIdx.x); i < 8 * 64; i += int(blockDim.x))
        reinterpret_cast<bf16*>(tile)[i] = from_acc<bf16>(x + float(i % 64));
}
// Store a tile. Each thread says whether it fences; the first one, whether it commits and waits.
void store_once(float* out, bool fences, bool commits, bool waits) {
    unsigned char* tile = dynamic_shared();
    CUtensorMap map = map_of(out);
    write_tile(tile, 1);
    if (fences) fence_async_smem();
    __syncthreads();
    if (threadIdx.x > 0) return;
    tma_store_4d(&map, tile, 0, 0, 0, 0);
    if (commits) bulk_commit();
    if (waits) bulk_wait_read<0>();
}
// Only one thread fences, but the others' writes need fences of their own.
template <bool BUG> void store_with_one_fence(float* out) {
    store_once(out, !BUG || threadIdx.x == 0, true, true);
}
template <bool BUG> void store_not_waited_for(float* out) { store_once(out, true, true, !BUG); }
template <bool BUG> void store_not_committed(float* out) { store_once(out, true, !BUG, true); }
// The second tile overwrites the first while its store may still read it.
template <bool BUG> void source_changes_under_a_store(float* out) {
    unsigned char* tile = dynamic_shared();
    CUtensorMap map = map_of(out);
    for (int i = 0; i < 2; i++) {
        write_tile(tile, float(i * 10));
        fence_async_smem();
        __syncthreads();
        if (threadIdx.x == 0) {
            tma_store_4d(&map, tile, 0, i * 8, 0, 0), bulk_commit();
            if (!BUG || i == 1) bulk_wait_read<0>();
        }
        __syncthreads();
    }
}
// bulk_wait_read() says that the source has been read, not that the sum has arrived.
template <bool BUG> void reads_a_sum_too_early(float* out) {
    float* x = reinterpret_cast<float*>(dynamic_shared());
    for (int i = 0; i < 4; i++) x[threadIdx.x * 4 + i] = float(i);
    fence_async_smem();
    __syncthreads();
    if (threadIdx.x == 0) {
        bulk_reduce_add_f32(out + 1024, x, 1024), bulk_commit();
        bulk_reduce_add_f32(out + 1024, x, 1024), bulk_commit();
        BUG ? bulk_wait_read<0>() : bulk_wait<0>();
        out[0] = out[1024 + 3];
        bulk_wait<0>();
    }
}

// ----------------------------------------------------------------------------
// wgmma: 64 rows of a, 64 columns, K = 16, by one warpgroup

// Write a K-major operand of 64 rows and 64 columns at `tile`. The numbers are small integers, so
// that every sum is exact.
void write_operand(unsigned char* tile, int seed) {
    for (int i = int(threadIdx.x); i < 64 * 64; i += int(blockDim.x)) {
        int row = i / 64, column = i % 64;
        auto* x = reinterpret_cast<bf16*>(tile + row * 128 + ((column / 8) ^ (row % 8)) * 16);
        x[column % 8] = from_acc<bf16>(float((row * 7 + column * 3 + seed) % 5 - 2));
    }
}
struct Operands {
    unsigned char *a = dynamic_shared(), *b = a + 8192;
    uint64_t da = descriptor(smem_u32(a), 16, 1024), db = descriptor(smem_u32(b), 16, 1024);
};
Operands two_operands() {
    Operands x;
    write_operand(x.a, 1), write_operand(x.b, 2);
    fence_async_smem();
    __syncthreads();
    return x;
}
// Begin a product, with an accumulator of zeros or of what is in d.
void begin_product(float (&d)[32], const Operands& x, bool adds = false) {
    wg_fence();
    wgmma<bf16, 64, 0, 0>(d, x.da, x.db, adds), wg_commit();
}
void put_result(float* out, const float (&d)[32]) {
    for (int i = 0; i < 32; i++) out[threadIdx.x * 32 + i] = d[i];
}
// One product, from its beginning to its result.
void multiply(float* out, const Operands& x) {
    float d[32];
    begin_product(d, x);
    wg_wait<0>();
    put_result(out, d);
}

template <bool BUG> void product_waits_for_too_few(float* out) {
    Operands x = two_operands();
    float d[32], e[32];
    wg_fence();
    wgmma<bf16, 64, 0, 0>(d, x.da, x.db, 0), wg_commit();
    wgmma<bf16, 64, 0, 0>(e, x.da, x.db + 2, 0), wg_commit();
    BUG ? wg_wait<1>() : wg_wait<0>();
    for (int i = 0; i < 32; i++) d[i] += e[i];
    put_result(out, d);
    wg_wait<0>();
}
template <bool BUG> void product_without_register_fence(float* out) {
    Operands x = two_operands();
    float d[32];
    for (float& y : d) y = 1;
    if (!BUG) wg_fence();
    wgmma<bf16, 64, 0, 0>(d, x.da, x.db, 1), wg_commit();
    wg_wait<0>();
    put_result(out, d);
}
template <bool BUG> void product_not_committed(float* out) {
    Operands x = two_operands();
    float d[32];
    wg_fence();
    wgmma<bf16, 64, 0, 0>(d, x.da, x.db, 0);
    if (!BUG) wg_commit();
    wg_wait<0>();
    put_result(out, d);
    wg_commit(), wg_wait<0>();
}
template <bool BUG> void product_of_unfenced_operand(float* out) {
    Operands x;
    write_operand(x.a, 1);
    fence_async_smem();
    write_operand(x.b, 2);
    if (!BUG) fence_async_smem();
    __syncthreads();
    multiply(out, x);
}
template <bool BUG> void operand_changes_under_a_product(float* out) {
    Operands x = two_operands();
    float d[32];
    begin_product(d, x);
    if (!BUG) wg_wait<0>();
    __syncthreads();
    write_operand(x.b, 3);
    fence_async_smem();
    __syncthreads();
    wg_wait<0>();
    put_result(out, d);
}
template <bool BUG> void register_operand_changes(float* out) {
    Operands x = two_operands();
    float d[32];
    uint32_t a[4];
    for (uint32_t& y : a) y = pack<bf16>(float(threadIdx.x % 3), 1);
    wg_fence();
    wgmma_rs<bf16, 64, 0>(d, a, x.db, 0), wg_commit();
    if (!BUG) wg_wait<0>();
    for (uint32_t& y : a) y = pack<bf16>(2, 2);
    wg_wait<0>();
    put_result(out, d);
    out[OUTPUTS - 1 - threadIdx.x] = float(a[0]);
}
template <bool BUG> void accumulator_changes(float* out) {
    Operands x = two_operands();
    float d[32];
    for (float& y : d) y = 1;
    begin_product(d, x, true);
    if (!BUG) wg_wait<0>();
    for (float& y : d) y *= 2;
    wg_wait<0>();
    put_result(out, d);
}
template <bool BUG> void warps_disagree(float* out) {
    Operands x = two_operands();
    x.db += BUG && threadIdx.x >= 96 ? 2 : 0;
    multiply(out, x);
}
template <bool BUG> void descriptor_inside_a_swizzle(float* out) {
    Operands x = two_operands();
    x.db += BUG ? 8 : 0;
    multiply(out, x);
}
template <bool BUG> void products_in_flight_at_end(float* out) {
    Operands x = two_operands();
    float d[32];
    begin_product(d, x);
    if (!BUG) wg_wait<0>();
    out[threadIdx.x] = 1;
}
// One warp reads an operand that another warp is still writing: there is no barrier between.
template <bool BUG> void operand_without_barrier(float* out) {
    Operands x;
    write_operand(x.a, 1), write_operand(x.b, 2); // LINE operand_without_barrier
    fence_async_smem();
    if (!BUG) __syncthreads();
    multiply(out, x);
    __syncthreads();
}

// ----------------------------------------------------------------------------
// registers: 384 threads start with 168 each

template <bool BUG> void too_many_registers(float* out) {
    if (threadIdx.x < 128)
        BUG ? regs_dec<40>() : regs_dec<24>();
    else
        regs_inc<240>();
    out[threadIdx.x] = 1;
}
template <bool BUG> void registers_by_seven(float* out) {
    if (threadIdx.x < 128)
        BUG ? regs_dec<25>() : regs_dec<24>();
    else
        regs_inc<232>();
    out[threadIdx.x] = 1;
}
template <bool BUG> void more_is_less(float* out) {
    BUG ? regs_inc<160>() : regs_dec<160>();
    out[threadIdx.x] = 1;
}

// ----------------------------------------------------------------------------
// the table: a bug, what is expected, and its launch: threads, blocks, bytes of shared memory

#define BUG_ROW(name, message, threads, blocks, shared) \
    { #name, message, threads, blocks, shared, name < true>, name < false> }
const Bug BUGS[] = {
    BUG_ROW(missing_barrier, nullptr, 64, 1, 0),
    BUG_ROW(slow_warp, nullptr, 64, 1, 0),
    BUG_ROW(write_after_read, "", 64, 1, 0),
    BUG_ROW(copy_into_a_tile_in_use, "", 64, 1, 0),
    BUG_ROW(divergent_barrier, "a divergent barrier", 64, 1, 0),
    BUG_ROW(return_before_barrier, "have returned", 64, 1, 0),
    BUG_ROW(outside_the_mask, "which it is not in", 32, 1, 0),
    BUG_ROW(reads_outside_the_mask, "but is not in the mask", 32, 1, 0),
    BUG_ROW(returned_lane_in_mask, "but has returned", 32, 1, 0),
    BUG_ROW(different_shuffles, "is in __shfl", 32, 1, 0),
    BUG_ROW(beyond_shared, "", 64, 1, 0),
    BUG_ROW(beyond_global, "", 64, 1, 0),
    BUG_ROW(never_written, nullptr, 64, 1, 0),
    BUG_ROW(too_much_shared, "CUDA allows 48 KiB", 64, 1, 0),
    BUG_ROW(deadlock, "32 threads from 0 on: bar_sync at", 64, 1, 0),
    BUG_ROW(barrier_of_two_sizes, "barrier for", 64, 1, 0),
    BUG_ROW(named_barriers, nullptr, 64, 1, 0),
    BUG_ROW(turns_of_blocks, "deadlock", 32, 4, 0),
    BUG_ROW(copy_waits_for_too_few, nullptr, 32, 1, 0),
    BUG_ROW(load_without_wait, nullptr, 64, 1, 1024),
    BUG_ROW(load_waits_for_the_phase_before, nullptr, 64, 1, 2048),
    BUG_ROW(load_into_a_slot_in_use, "", 64, 1, 1024),
    BUG_ROW(wrong_bytes, "64 threads from 0 on: mbar_wait at", 64, 1, 1024),
    BUG_ROW(no_init_fence, "has had no mbar_init_fence()", 64, 1, 0),
    BUG_ROW(never_initialised, "no mbarrier has been initialised", 64, 1, 0),
    BUG_ROW(init_without_barrier, "no mbarrier has been initialised", 64, 1, 0),
    BUG_ROW(too_many_arrivals, "more than 1 arrivals", 64, 1, 1024),
    BUG_ROW(load_in_flight_at_end, "ends before a load", 64, 1, 1024),
    BUG_ROW(unaligned_tile, "is not 1024-byte aligned", 64, 1, 2048),
    BUG_ROW(store_with_one_fence, "no fence_async_smem()", 64, 1, 1024),
    BUG_ROW(source_changes_under_a_store, nullptr, 64, 1, 1024),
    BUG_ROW(store_not_waited_for, "no bulk_wait_read()", 64, 1, 1024),
    BUG_ROW(store_not_committed, "has not committed", 64, 1, 1024),
    BUG_ROW(reads_a_sum_too_early, nullptr, 64, 1, 1024),
    BUG_ROW(product_waits_for_too_few, nullptr, 128, 1, 16384),
    BUG_ROW(product_without_register_fence, "no wg_fence()", 128, 1, 16384),
    BUG_ROW(product_not_committed, "are not committed", 128, 1, 16384),
    BUG_ROW(product_of_unfenced_operand, "no fence_async_smem()", 128, 1, 16384),
    BUG_ROW(operand_changes_under_a_product, nullptr, 128, 1, 16384),
    BUG_ROW(register_operand_changes, nullptr, 128, 1, 16384),
    BUG_ROW(accumulator_changes, nullptr, 128, 1, 16384),
    BUG_ROW(warps_disagree, "disagree on product 0", 128, 1, 16384),
    BUG_ROW(descriptor_inside_a_swizzle, "in row 1 of a swizzle's 8", 128, 1, 16384),
    BUG_ROW(products_in_flight_at_end, "returns with products in flight", 128, 1, 16384),
    BUG_ROW(operand_without_barrier, nullptr, 128, 1, 16384),
    BUG_ROW(too_many_registers, "setmaxnreg, for registers", 384, 1, 0),
    BUG_ROW(registers_by_seven, "setmaxnreg 25", 384, 1, 0),
    BUG_ROW(more_is_less, "setmaxnreg.inc to 160", 384, 1, 0),
};

// ----------------------------------------------------------------------------
// known answers

// Whether `good` stays true, with no message, in each order and at both times of asynchronous work.
template <typename F> bool answers(unsigned threads, size_t shared, F kernel) {
    bool good = true;
    for (int order = 0; order < 3; order++)
        for (bool latest : {false, true}) {
            emulator::settings = {emulator::Order(order), 7, latest};
            emulator::run_grid(1, threads, shared, [&] { kernel(good); });
            for (const std::string& m : emulator::take_messages())
                printf("  %s\n", m.c_str()), good = false;
        }
    emulator::settings = {};
    return good;
}

// The manual's figure of the 128-byte swizzle: row r, place p holds chunk SWIZZLE_128[r][p].
const int SWIZZLE_128[8][8] = {{0, 1, 2, 3, 4, 5, 6, 7}, {1, 0, 3, 2, 5, 4, 7, 6},
                               {2, 3, 0, 1, 6, 7, 4, 5}, {3, 2, 1, 0, 7, 6, 5, 4},
                               {4, 5, 6, 7, 0, 1, 2, 3}, {5, 4, 7, 6, 1, 0, 3, 2},
                               {6, 7, 4, 5, 2, 3, 0, 1}, {7, 6, 5, 4, 3, 2, 1, 0}};

std::vector<uint16_t> counting(size_t n) {
    std::vector<uint16_t> x(n);
    for (size_t i = 0; i < n; i++) x[i] = uint16_t(i);
    return x;
}

// A loaded tile of counting numbers has its chunks where the manual's figure has them.
void known_swizzle() {
    std::vector<uint16_t> x = counting(16 * 64);
    auto map =
        make_tensor_map<bf16, 4>(reinterpret_cast<bf16*>(x.data()), {64, 16, 1, 1},
                                 {64, 1024, 1024}, {64, 16, 1, 1}, true);

    // Load the tile and compare each number with the figure.
    bool good = answers(32, 2048, [&](bool& good) {
        LLMC_SHARED(uint64_t, bar, 1);
        auto* tile = reinterpret_cast<uint16_t*>(dynamic_shared());
        one_mbarrier(bar);
        if (threadIdx.x == 0) mbar_expect_tx(bar, 2048), tma_load_4d(tile, &map, bar, 0, 0, 0, 0);
        mbar_wait(bar, 0);
        for (int row = 0; row < 16; row++)
            for (int place = 0; place < 8; place++)
                for (int i = 0; i < 8; i++)
                    good &= tile[row * 64 + place * 8 + i] ==
                            row * 64 + SWIZZLE_128[row % 8][place] * 8 + i;
    });
    verdict(good, "known answer: the 128-byte swizzle");
}

// A box over the edges of a tensor. B = 2, T = 5, H = 3, and rows of D = 40 with a box of 64:
// elements beyond the tensor load as zeros and are not stored.
void known_edges() {
    constexpr size_t D = 40, H = 3, T = 5, B = 2;
    std::vector<uint16_t> x = counting(B * T * H * D), y(x.size(), 7);
    auto map_of = [](std::vector<uint16_t>& x) {
        return make_tensor_map<bf16, 4>(reinterpret_cast<bf16*>(x.data()), {D, H, T, B},
                                        {D, H * D, T * H * D}, {64, 1, 4, 1}, true);
    };
    auto from = map_of(x), to = map_of(y);

    // Load a tile of which two rows and 40 columns are inside, and compare.
    bool good = answers(32, 1024, [&](bool& good) {
        LLMC_SHARED(uint64_t, bar, 1);
        auto* tile = reinterpret_cast<uint16_t*>(dynamic_shared());
        one_mbarrier(bar);
        if (threadIdx.x == 0) mbar_expect_tx(bar, 512), tma_load_4d(tile, &from, bar, 0, 2, 3, 1);
        mbar_wait(bar, 0);
        for (size_t row = 0; row < 4; row++)
            for (size_t c = 0; c < 64; c++) {
                uint16_t got = tile[row * 64 + (c / 8 ^ row) * 8 + c % 8];
                bool inside = c < D && row < 2;
                good &= got == (inside ? uint16_t(((1 * T + 3 + row) * H + 2) * D + c) : 0);
            }

        // Store the tile again.
        __syncthreads();
        if (threadIdx.x == 0) tma_store_4d(&to, tile, 0, 2, 3, 1), bulk_commit(), bulk_wait<0>();
    });

    // Only what lies inside the tensor has been written.
    for (size_t i = 0; i < y.size(); i++) {
        size_t h = i / D % H, t = i / (H * D) % T, b = i / (T * H * D);
        good &= y[i] == (b == 1 && h == 2 && t >= 3 ? uint16_t(i) : 7);
    }
    verdict(good, "known answer: tiles over a tensor's edges");
}

void known_descriptor() {
    // Address 0x400, leading 16 and stride 1024 bytes. Each field counts units of 16 bytes; bits 62
    // and 63 hold swizzle mode 1.
    verdict(descriptor(0x400, 16, 1024) == 0x4000004000010040ull &&
                descriptor(0x22000, 8192, 1024) == 0x4000004002002200ull,
            "known answer: descriptors");
}

// d = a b^T, where each operand is K-major or MN-major. place() is this test's own layout.
uint32_t place(bool mn_major, int i, int k, int rows) { // the index of element (row i, k)
    int line = mn_major ? k : i, column = mn_major ? i : k, lines = mn_major ? 64 : rows;
    return uint32_t(column / 64 * lines * 64 + line * 64 +
                    SWIZZLE_128[line % 8][column % 64 / 8] * 8 + column % 8);
}
template <typename T, int N, int tA, int tB> void known_product(const char* name) {
    auto a_of = [](int i, int k) { return float((i * 5 + k * 3) % 7 - 3); };
    auto b_of = [](int j, int k) { return float((j * 2 + k * 5) % 11 - 5); };
    bool good = answers(128, 8192 + N * 128, [&](bool& good) {
        // Write both operands, K-major or MN-major.
        T *a = reinterpret_cast<T*>(dynamic_shared()), *b = a + 4096;
        for (int i = int(threadIdx.x); i < 64 * 64; i += 128)
            a[place(tA, i / 64, i % 64, 64)] = from_acc<T>(a_of(i / 64, i % 64));
        for (int i = int(threadIdx.x); i < N * 64; i += 128)
            b[place(tB, i / 64, i % 64, N)] = from_acc<T>(b_of(i / 64, i % 64));
        fence_async_smem();
        __syncthreads();

        // Multiply in four steps of 16 along K.
        float d[N / 2];
        wg_fence();
        for (int k = 0; k < 4; k++) {
            uint32_t step_a = tA ? 2048 : 32, step_b = tB ? 2048 : 32;
            wgmma<T, N, tA, tB>(d, descriptor(smem_u32(a) + k * step_a, 8192, 1024),
                                descriptor(smem_u32(b) + k * step_b, 8192, 1024), k > 0);
        }
        wg_commit(), wg_wait<0>();

        // Compare this thread's accumulators with the definition. Small integers
        // make every sum exact.
        for (int x = 0; x < N / 2; x++) {
            int row = int(threadIdx.x) / 32 * 16 + int(threadIdx.x) % 32 / 4 + (x & 2) * 4;
            int column = x / 4 * 8 + int(threadIdx.x) % 4 * 2 + x % 2;
            float want = 0;
            for (int k = 0; k < 64; k++) want += a_of(row, k) * b_of(column, k);
            good &= d[x] == want;
        }
    });
    verdict(good, std::string("known answer: wgmma ") + name);
}

// A point of a figure: element `index` of the thread's fragment is (row, column) of the matrix.
struct Place {
    unsigned thread, index;
    int row, column;
};
void known_accumulators() {
    const Place figure[] = {{0, 0, 0, 0},   {0, 1, 0, 1},    {0, 2, 8, 0},     {0, 3, 8, 1},
                            {0, 4, 0, 8},   {1, 0, 0, 2},    {4, 0, 1, 0},     {31, 3, 15, 7},
                            {32, 0, 16, 0}, {37, 6, 25, 10}, {127, 31, 63, 63}};

    // Give each element of d a number that names it: a (row, 0) = row, a (row, 1) = 64, b (column,
    // 0) = 1 and b (column, 1) = column make d = row + 64 column.
    bool good = answers(128, 16384, [&](bool& good) {
        bf16 *a = reinterpret_cast<bf16*>(dynamic_shared()), *b = a + 4096;
        for (int i = int(threadIdx.x); i < 64 * 64; i += 128) {
            float column = float(i % 64), row = float(i / 64);
            a[place(false, i / 64, i % 64, 64)] = from_acc<bf16>(column == 0   ? row
                                                                 : column == 1 ? 64
                                                                               : 0);
            b[place(false, i / 64, i % 64, 64)] = from_acc<bf16>(column == 0   ? 1
                                                                 : column == 1 ? row
                                                                               : 0);
        }

        // Multiply, and look at the figure's points.
        fence_async_smem();
        __syncthreads();
        float d[32];
        wg_fence();
        wgmma<bf16, 64, 0, 0>(d, descriptor(smem_u32(a), 16, 1024),
                              descriptor(smem_u32(b), 16, 1024), 0);
        wg_commit(), wg_wait<0>();
        for (const Place& p : figure)
            if (p.thread == threadIdx.x) good &= d[p.index] == float(p.row + 64 * p.column);
    });
    verdict(good, "known answer: accumulators of wgmma");
}
// A register operand: 16-bit number `index` of the thread is (row, k) of a.
void known_register_operand() {
    const Place figure[] = {{0, 0, 0, 0},  {0, 1, 0, 1},    {0, 2, 8, 0},   {0, 4, 0, 8},
                            {0, 6, 8, 8},  {5, 0, 1, 2},    {5, 3, 9, 3},   {5, 5, 1, 11},
                            {5, 7, 9, 11}, {31, 7, 15, 15}, {66, 4, 32, 12}};
    bool good = true;
    for (const Place& p : figure)
        // Set one number of a to 3, with b the identity: d is 3 at that number's
        // place and 0 elsewhere.
        good &= answers(128, 8192, [&](bool& good) {
            bf16* b = reinterpret_cast<bf16*>(dynamic_shared()); // b (n, k) = (n == k)
            for (int i = int(threadIdx.x); i < 64 * 64; i += 128)
                b[place(false, i / 64, i % 64, 64)] = from_acc<bf16>(float(i / 64 == i % 64));
            fence_async_smem();
            __syncthreads();

            // Multiply, with a in registers.
            float d[32];
            uint32_t a[4] = {};
            if (threadIdx.x == p.thread)
                a[p.index / 2] = uint32_t(from_acc<bf16>(3).bits) << (p.index % 2 * 16);
            wg_fence();
            wgmma_rs<bf16, 64, 0>(d, a, descriptor(smem_u32(b), 16, 1024), 0);
            wg_commit(), wg_wait<0>();

            // Look for the 3.
            for (int x = 0; x < 32; x++) {
                int row = int(threadIdx.x) / 32 * 16 + int(threadIdx.x) % 32 / 4 + (x & 2) * 4;
                int column = x / 4 * 8 + int(threadIdx.x) % 4 * 2 + x % 2;
                good &= d[x] == (row == p.row && column == p.column ? 3 : 0);
            }
        });
    verdict(good, "known answer: register operands of wgmma");
}

// mma.m16n8k16: the numbers of a, b and d that lane 5 holds, and some other lanes of the figures.
void known_mma() {
    const Place a_figure[] = {{5, 0, 1, 2},  {5, 1, 1, 3},  {5, 2, 9, 2},
                              {5, 4, 1, 10}, {5, 7, 9, 11}, {31, 7, 15, 15}};
    const Place b_figure[] = {
        {5, 0, 2, 1}, {5, 1, 3, 1}, {5, 2, 10, 1}, {5, 3, 11, 1}, {30, 3, 13, 7}}; // (k, column)
    const Place d_figure[] = {
        {5, 0, 1, 2}, {5, 1, 1, 3}, {5, 2, 9, 2}, {5, 3, 9, 3}, {31, 3, 15, 7}};
    bool good = answers(32, 0, [&](bool& good) {
        // Multiply one number of a by one of b. They meet where a's column is b's row, and the
        // product shows where d has it.
        for (const Place& pa : a_figure)
            for (const Place& pb : b_figure) {
                uint32_t a[4] = {}, b[2] = {};
                uint32_t two = from_acc<bf16>(2).bits;
                if (threadIdx.x == pa.thread) a[pa.index / 2] = two << (pa.index % 2 * 16);
                if (threadIdx.x == pb.thread) b[pb.index / 2] = two << (pb.index % 2 * 16);
                float d[4] = {};
                mma_m16n8k16<bf16>(d, a, b);

                // Look at the sum of all of d, and then at the figure's points.
                float sum = warp_sum(d[0] + d[1] + d[2] + d[3]);
                good &= sum == (pa.column == pb.row ? 4 : 0);
                for (const Place& pd : d_figure)
                    if (pd.thread == threadIdx.x && pa.column == pb.row)
                        good &= d[pd.index] == (pd.row == pa.row && pd.column == pb.column ? 4 : 0);
            }
    });
    verdict(good, "known answer: fragments of mma");
}
// ldmatrix: lane 4 r + c has columns 2 c and 2 c + 1 of row r; transposed, it has rows 2 c and
// 2 c + 1 of column r.
void known_ldmatrix() {
    bool good = answers(32, 0, [&](bool& good) {
        LLMC_SHARED(uint16_t, x, 256);
        for (int i = int(threadIdx.x); i < 256; i += 32) x[i] = uint16_t(i);
        __syncthreads();

        // Load four matrices, straight and transposed, and look at lanes 5 and 31.
        uint32_t r[4], t[4];
        ldmatrix_x4(r, x + threadIdx.x * 8);
        ldmatrix_x4_t(t, x + threadIdx.x * 8);
        if (threadIdx.x == 5)
            good &= r[0] == (10u | 11u << 16) && r[3] == (202u | 203u << 16) &&
                    t[0] == (17u | 25u << 16) && t[2] == (145u | 153u << 16);
        if (threadIdx.x == 31) good &= r[1] == (126u | 127u << 16) && t[1] == (119u | 127u << 16);

        // Store the transposed matrices: each is the transpose of what was there.
        __syncthreads();
        stmatrix_x4(x + threadIdx.x * 8, t);
        __syncthreads();
        for (int i = int(threadIdx.x); i < 256; i += 32)
            good &= x[i] == i / 64 * 64 + i % 8 * 8 + i % 64 / 8;
    });
    verdict(good, "known answer: fragments of ldmatrix, stmatrix");
}

// ----------------------------------------------------------------------------
// streams

__global__ void add_kernel(float* x, float y) { *x += y; }
__global__ void copy_kernel(float* to, const float* from) { *to = *from; }

// Let a stream wait for what another one has been given. The event is gone before anything runs.
void join(cudaStream_t waits, cudaStream_t is_waited_for) {
    cudaEvent_t e;
    cudaEventCreate(&e), cudaEventRecord(e, is_waited_for);
    cudaStreamWaitEvent(waits, e, 0), cudaEventDestroy(e);
}

// Two streams in both orders of what runs beside the one that the host waits for.
struct TwoStreams {
    cudaStream_t one, two;
    TwoStreams() {
        cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking);
        cudaStreamCreateWithFlags(&two, cudaStreamNonBlocking);
    }
    ~TwoStreams() {
        cudaStreamDestroy(one), cudaStreamDestroy(two);
        emulator::beside = emulator::Beside::LAST;
    }

    // The orders in which work() returns something else than `want`: "", "last", "first" or both.
    template <typename W> std::string shows(float want, W work) {
        std::string orders;
        emulator::beside = emulator::Beside::LAST;
        if (work() != want) orders += "last";
        emulator::beside = emulator::Beside::FIRST;
        if (work() != want) orders += "first";
        return orders;
    }
};

// Stream one makes x, stream two copies it to y, and one copies y to z and changes x, for two to
// copy it once more. Each wait that is missing shows in one of the orders.
float copies(const TwoStreams& s, bool start, bool finish, bool again, bool captured) {
    float x = 0, y = 0, z = 0, last = 0;
    if (captured) {
        cudaStreamBeginCapture(s.one, cudaStreamCaptureModeThreadLocal);
        join(s.two, s.one);
    }
    launch(add_kernel, 1, 1, s.one, &x, 1.0f);
    if (start) join(s.two, s.one);
    launch(copy_kernel, 1, 1, s.two, &y, &x);
    if (finish) join(s.one, s.two);
    launch(copy_kernel, 1, 1, s.one, &z, &y);
    launch(add_kernel, 1, 1, s.one, &x, 1.0f);
    if (again) join(s.two, s.one);
    launch(copy_kernel, 1, 1, s.two, &last, &x);

    // Run it, at once or as a graph.
    if (captured) {
        cudaGraph_t graph;
        join(s.one, s.two);
        if (cudaStreamEndCapture(s.one, &graph) != cudaSuccess) return -1;
        cudaGraphLaunch(graph, s.one);
        cudaGraphExecDestroy(graph);
    }
    cudaStreamSynchronize(s.one), cudaStreamSynchronize(s.two);
    return 100 * y + 10 * z + last;
}
void missing_waits() {
    TwoStreams s;
    for (bool captured : {false, true}) {
        auto shows = [&](bool start, bool finish, bool again) {
            return s.shows(112, [&] { return copies(s, start, finish, again, captured); });
        };
        std::string where = captured ? " in a graph" : "";
        verdict(shows(true, true, true) == "", "streams that wait are right" + where);
        verdict(shows(false, true, true) == "first", "reading before it is written" + where);
        verdict(shows(true, false, true) == "last", "reading what is yet to arrive" + where);
        verdict(shows(true, true, false) == "first", "reading before it is changed" + where);
    }
}

// Nothing runs before somebody waits. Until then a copy to the host is NaN, unless an earlier copy
// from there is still to run. A copy from the host takes what is there when it runs.
void late_copies() {
    TwoStreams s;
    float *host, *device;
    cudaMallocHost(&host, 8), cudaMalloc(&device, 8);
    auto in = [&] { cudaMemcpyAsync(device, host, 4, cudaMemcpyHostToDevice, s.one); };
    auto out = [&](int i) {
        cudaMemcpyAsync(host + i, device, 4, cudaMemcpyDeviceToHost, s.one);
    };
    host[0] = host[1] = 1;
    in();
    bool good = std::isnan(*device);
    out(1);
    good &= std::isnan(host[1]);
    out(0);
    good &= host[0] == 1;
    host[0] = 2; // too early: the copy takes this
    cudaStreamSynchronize(s.one);
    verdict(good && host[0] == 2 && host[1] == 2, "copies run when somebody waits");

    // A copy to memory that is not pinned is over when the call returns.
    float pageable = 0;
    cudaMemcpyAsync(&pageable, device, 4, cudaMemcpyDeviceToHost, s.one);
    verdict(pageable == 2, "a copy to pageable memory waits");
    cudaFreeHost(host), cudaFree(device);
}

// An event passes when its stream comes to it. A host that waits for it runs nothing behind it.
void events() {
    TwoStreams s;
    float x = 0, ms = -1;
    cudaEvent_t before, after;
    cudaEventCreate(&before), cudaEventCreate(&after);
    cudaEventRecord(before, s.one);
    launch(add_kernel, 1, 1, s.one, &x, 1.0f);
    cudaEventRecord(after, s.one);
    launch(add_kernel, 1, 1, s.one, &x, 1.0f);
    bool good = cudaEventElapsedTime(&ms, before, after) == cudaErrorNotReady;
    cudaEventSynchronize(after);
    good &= x == 1 && cudaEventElapsedTime(&ms, before, after) == cudaSuccess && ms > 0;
    verdict(good && cudaStreamQuery(s.one) == cudaSuccess && x == 2, "events");
    cudaEventDestroy(before), cudaEventDestroy(after);
}

// ----------------------------------------------------------------------------
// captures

// A launch of a graph repeats what its streams were given during the capture, with the arguments
// they had then. A forked stream must be joined before the capture ends. A host that captures
// may not make some calls.
void captures() {
    TwoStreams s;
    cudaStream_t one = s.one, two = s.two;
    auto capture = [&](auto work) {
        cudaGraph_t graph;
        cudaStreamBeginCapture(one, cudaStreamCaptureModeThreadLocal);
        work();
        return std::pair(cudaStreamEndCapture(one, &graph), graph);
    };

    // A graph of two streams: x + y, then x + 2 y. Nothing runs until it is launched, and a later
    // change of y has no effect. Two launches make 2 (1 + 2) = 6.
    float x = 0, y = 1;
    auto [status, graph] = capture([&] {
        launch(add_kernel, 1, 1, one, &x, y);
        join(two, one);
        launch(add_kernel, 1, 1, two, &x, 2 * y);
        join(one, two);
    });
    y = 100;
    bool good = status == cudaSuccess && x == 0;
    cudaGraphLaunch(graph, one), cudaGraphLaunch(graph, one), cudaStreamSynchronize(one);
    verdict(good && x == 6 && emulator::take_messages().empty(), "a graph is what was captured");
    cudaGraphExecDestroy(graph);

    // The second stream is forked and never joined.
    auto [unjoined, half] =
        capture([&] { join(two, one), launch(add_kernel, 1, 1, two, &x, y); });
    verdict(unjoined == cudaErrorStreamCaptureUnjoined, "a captured stream that is not joined");
    cudaGraphExecDestroy(half);

    // The second stream takes no part in the capture.
    auto [outside, none] = capture([&] { launch(add_kernel, 1, 1, two, &x, y); });
    verdict(x == 6 && emulator::take_messages().size() == 1, "work beside a capture");
    cudaGraphExecDestroy(none);

    // A host that captures may not wait for the device.
    float* memory = nullptr;
    auto [waits, nothing] = capture([&] {
        good = cudaStreamSynchronize(one) != cudaSuccess && cudaStreamQuery(one) != cudaSuccess &&
               cudaMalloc(&memory, 4) != cudaSuccess && cudaFree(nullptr) != cudaSuccess;
    });
    verdict(good && emulator::take_messages().size() == 4, "a host that waits while it captures");
    cudaGraphExecDestroy(nothing);
}

} // namespace

int main(int argc, char** argv) {
    setvbuf(stdout, nullptr, _IOLBF, 1 << 12); // a crash does not lose the lines before it

    // Run the kernels that are named, for a sanitizer to watch.
    if (argc == 3) {
        int found = 0;
        for (const Bug& b : BUGS)
            if (!strcmp(argv[2], "all") || !strcmp(argv[2], b.name))
                found++, run_all(!strcmp(argv[1], "bug") ? b.bug : b.right, b);
        if (found == 0) fprintf(stderr, "test_emulator: no bug is called %s\n", argv[2]);
        return found == 0;
    }

    // Hold each bug against its right twin, then the models against known answers.
    for (const Bug& b : BUGS) check_bug(b), check_right(b);
    known_swizzle(), known_edges(), known_descriptor(), known_accumulators();
    known_register_operand(), known_mma(), known_ldmatrix();
    missing_waits(), late_copies(), events(), captures();
    known_product<bf16, 64, 0, 0>("m64n64, both K-major");
    known_product<fp16, 128, 0, 0>("m64n128, both K-major, fp16");
    known_product<bf16, 128, 0, 1>("m64n128, b MN-major");
    known_product<bf16, 256, 0, 1>("m64n256, b MN-major");
    known_product<bf16, 64, 1, 1>("m64n64, both MN-major");
    known_product<fp16, 64, 1, 0>("m64n64, a MN-major, fp16");
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
