// fp8_cast.cu - a ladder: a matrix to 8-bit floats, by blocks of a row - arXiv:2209.05433
//   A block is 128 neighbours of a row. Its scale is the largest power of two with
//   max |x| scale <= 448; a code is x scale as e4m3, rounded to nearest, ties to even.
//   x (N,C) bf16   codes (N,C) e4m3   inverse (C / 128, N) float: 1 / scale of each block
//   Any kernel must read 2 N C bytes and write N C, and 4 bytes a block: 3.03 N C. So the rate
//   counts those, and the ceiling is a copy's, 4.8 TB/s on paper: 1.58e12 elements a second. 528
//   schedulers issue 32 lanes each at 1.98 GHz, 3.3e13 a second: beyond 21 instructions an element
//   arithmetic is the limit. The shares are what each rung's own limit allows.
//
//   rung                         instructions   at most   H200, GB/s of 3.03 N C bytes,
//                                  an element             N = 16384, C = 4096
//     1  one thread a block                26        6%
//     2  one warp a block                  32       66%
//     3  16-byte loads                     26       81%
//     4  the hardware's rounding           13      100%
//     5  llmc/ops/fp8.cuh                  11      100%
//
//   make ladders, or by hand
//     g++ -std=c++20 -O1 -DEMULATE -x c++ dev/cuda/fp8_cast.cu -lpthread     checks
//     nvcc -std=c++20 -O3 -arch=sm_90a dev/cuda/fp8_cast.cu -lcublasLt       measures too
#include "../../llmc/ops/fp8.cuh"
#include "../../test/kernels/kernels_fp8.h"
#include "ladder.h"

using namespace llmc;

typedef bf16 T;

struct RowBlocks {
    e4m3* codes;        // (N,C)
    float* inverse;     // (C / 128, N)
    const T* x;         // (N,C)
    unsigned N, across; // rows, and blocks in a row

    // Write a block's 1 / scale. Blocks are numbered along rows.
    __device__ void put_inverse(unsigned block, float scale) const {
        inverse[size_t(block % across) * N + block / across] = 1 / scale;
    }
};

// ----------------------------------------------------------------------------
// 1. One thread a block: the definition as it stands.
//   Lanes read 256 bytes apart: a warp's load of 64 useful bytes touches 32 sectors, one a clock,
//   and so do the second reading and the store: 3 clocks an element and SM, 8.7e10 a second. An
//   SM's 2048 blocks are 512 KB, twice its L1, so most sectors come from L2 more than once.
//   Rounding on integers takes 22 instructions, subnormal and normal numbers both.

__global__ void thread_a_block_kernel(RowBlocks a) {
    unsigned block = blockIdx.x * blockDim.x + threadIdx.x;
    if (block >= a.N * a.across) return;
    const T* x = a.x + size_t(block) * FP8_BLOCK;
    e4m3* codes = a.codes + size_t(block) * FP8_BLOCK;

    uint32_t most = 0;
    for (size_t i = 0; i < FP8_BLOCK; i++) most = fp8_larger(most, fp8_magnitude(x[i]));
    const float scale = fp8_scale<e4m3>(most);
    for (size_t i = 0; i < FP8_BLOCK; i++) codes[i] = fp8_code<e4m3>(to_float(x[i]), scale);
    a.put_inverse(block, scale);
}

static void thread_a_block(const RowBlocks& a, cudaStream_t stream) {
    launch(thread_a_block_kernel, ceil_div(a.N * a.across, 128u), 128, stream, a);
}

// ----------------------------------------------------------------------------
// 2. One warp a block: lane l has the elements l, l + 32, ..; the maximum meets by shuffles.
//   A load is 64 neighbouring bytes, two whole sectors. A lane keeps its four elements in
//   registers, so x is read once: the bytes are the least. What is left is arithmetic: the rounding
//   of rung 1, and five shuffles and a scale for only four elements.

constexpr int WARPS = 4; // of a thread block, in this rung and the next two

__global__ void warp_a_block_kernel(RowBlocks a) {
    unsigned block = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (block >= a.N * a.across) return; // whole warps: no shuffle misses a lane
    const size_t first = size_t(block) * FP8_BLOCK + lane;

    T x[FP8_BLOCK / 32];
    uint32_t most = 0;
    #pragma unroll
    for (size_t i = 0; i < FP8_BLOCK / 32; i++) {
        x[i] = a.x[first + 32 * i];
        most = fp8_larger(most, fp8_magnitude(x[i]));
    }
    const float scale = fp8_scale<e4m3>(warp_max(most));
    #pragma unroll
    for (size_t i = 0; i < FP8_BLOCK / 32; i++)
        a.codes[first + 32 * i] = fp8_code<e4m3>(to_float(x[i]), scale);
    if (lane == 0) a.put_inverse(block, scale);
}

static void warp_a_block(const RowBlocks& a, cudaStream_t stream) {
    const unsigned blocks = ceil_div(a.N * a.across, unsigned(WARPS));
    launch(warp_a_block_kernel, blocks, WARPS * 32, stream, a);
}

// ----------------------------------------------------------------------------
// 3. 16-byte loads: a lane has eight neighbours, half a warp a block.
//   A load, a store, shuffles and a scale serve eight elements. Maxima are taken of the bits as
//   they are: two elements a word, shifted. The rounding alone is still too much.
// 4. The hardware's rounding: from sm_89 on one instruction rounds two numbers.
//   What is left is a widening, a product, a check for infinity and half a conversion an element:
//   memory is the limit now.

constexpr int P = VECTOR<T>; // elements of 16 bytes

template <bool HARDWARE> __global__ void packs_kernel(RowBlocks a) {
    constexpr int LANES = FP8_BLOCK / P; // of a block
    unsigned block = (blockIdx.x * WARPS * 32 + threadIdx.x) / LANES;
    size_t first = size_t(block) * FP8_BLOCK + threadIdx.x % LANES * P;
    bool inside = block < a.N * a.across;

    // Load. Lanes beyond the end stay for the shuffles.
    Pack<T, P> x = {};
    if (inside) x = load<P>(a.x + first);
    auto words = bits_as<Pack<uint32_t, P / 2>>(x);
    uint32_t most = 0;
    #pragma unroll
    for (uint32_t w : words.v)
        most = fp8_larger(most, fp8_larger(w << 1, w << 17));
    const float scale = fp8_scale<e4m3>(fp8_word_magnitude<T>(warp_max(most, LANES / 2)));

    // Round, and write.
    Pack<e4m3, P> codes;
    #pragma unroll
    for (int i = 0; i < P; i += 2) {
        const float two[2] = {fp8_scaled(to_float(x.v[i]), scale),
                              fp8_scaled(to_float(x.v[i + 1]), scale)};
        Pack<e4m3, 2> pair = {to_fp8<e4m3>(two[0]), to_fp8<e4m3>(two[1])};
        if (HARDWARE) pair = fp8_pair<e4m3>(two[0], two[1]);
        codes.v[i] = pair.v[0], codes.v[i + 1] = pair.v[1];
    }
    if (!inside) return;
    store(a.codes + first, codes);
    if (threadIdx.x % LANES == 0) a.put_inverse(block, scale);
}

template <bool HARDWARE> static void packs(const RowBlocks& a, cudaStream_t stream) {
    const unsigned blocks = ceil_div(a.N * a.across, unsigned(WARPS * 32 * P / FP8_BLOCK));
    launch(packs_kernel<HARDWARE>, blocks, WARPS * 32, stream, a);
}

// ----------------------------------------------------------------------------
// 5. The project's own: a thread block a tile of 128 x 128, a thread 8 x 8 elements.
//   Blocks of columns and squares, and the transpose's codes from the same reading, as products of
//   gradients need them: the tile, shared maxima and barriers are for those. On rows alone it
//   should be as fast as rung 4.

static void library(const RowBlocks& a, cudaStream_t stream) {
    fp8_quantise<e4m3>(a.codes, (e4m3*)nullptr, a.inverse, a.x, nullptr, a.N, a.across * FP8_BLOCK,
                       Fp8Blocks::ROWS, stream);
}

// ----------------------------------------------------------------------------
// the ladder

typedef void (*Run)(const RowBlocks&, cudaStream_t);

static const Rung<Run> ladder[] = {{"one thread a block", thread_a_block},
                                   {"one warp a block", warp_a_block},
                                   {"16-byte loads", packs<false>},
                                   {"the hardware's rounding", packs<true>},
                                   {"llmc/ops/fp8.cuh", library}};

static void check(Check& c, Run run, size_t N, size_t C, bool finite) {
    // Want: the CPU's bytes.
    std::vector<T> x = fp8_inputs(c, N, C, finite);
    std::vector<e4m3> codes(N * C);
    std::vector<float> inverse(fp8_scales(N, C, Fp8Blocks::ROWS));
    fp8_quantise<e4m3>(codes.data(), (e4m3*)nullptr, inverse.data(), x.data(), nullptr, N, C,
                       Fp8Blocks::ROWS, Cpu{});

    every_order(c, [&](Outputs& o) {
        Array<T> inp(x.size());
        copy_in(inp.data, x.data(), x.size() * sizeof(T), cudaStream_t{});
        Array<unsigned char> code(codes.size());
        Array<float> scale(inverse.size());
        run({reinterpret_cast<e4m3*>(code.data), scale.data, inp.data, unsigned(N),
             unsigned(C / FP8_BLOCK)}, nullptr);
        same_bytes(c, "codes", code, codes);
        same_bytes(c, "1 / scales", scale, inverse);
        o.same("codes", code.data, codes.size());
    });
}

static double seconds(Run run, size_t N, size_t C) {
    Array<T> x(N * C);
    Array<unsigned char> codes(N * C);
    Array<float> inverse(N * C / FP8_BLOCK);
    fill_random(x);
    RowBlocks a = {reinterpret_cast<e4m3*>(codes.data), inverse.data, x.data, unsigned(N),
                   unsigned(C / FP8_BLOCK)};
    return gpu_seconds([&] { run(a, nullptr); }, 20, nullptr);
}

int main() {
    const size_t N = 16384, C = 4096;
    auto check_shapes = [](Check& c, Run run) { // blocks end within thread blocks, and within warps
        for (auto [N, C] : {std::pair(1, 128), {5, 384}, {131, 256}})
            for (bool finite : {true, false})
                check(c, run, size_t(N), size_t(C), finite);
    };
    Work work = {(3 + 4.0 / FP8_BLOCK) * N * C, 1e9, "GB/s"};
    return climb(1, ladder, check_shapes, work, [&](Run run) { return seconds(run, N, C); }) > 0;
}
