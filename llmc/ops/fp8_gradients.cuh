// fp8_gradients.cuh - gradients as fp8 codes, on their way between ranks - arXiv:2310.18313
//   Each of d ranks has a part of a bucket's gradient, and rank q wants the sum of shard q:
//     1. packets   a rank rounds its part of each shard to e4m3, and packs it for that shard's rank
//     2.           the caller exchanges packets: rank q gets d of them, one from each rank
//     3. sum       rank q adds what the codes stand for, in float, in the order of the ranks
//   A packet is the codes of n elements, and after them a byte for each block of 128: the exponent
//   of the power of two that scales the block (fp8.cuh). FP8-LM sums codes in the network instead,
//   under one scale for all ranks, and so rounds again at every hop. Here a part is rounded once,
//   however many ranks there are, and a scale concerns its own rank alone.
//   whole, mine  (d, n), (n) acc   n is a multiple of 512, so that codes are read four at a time
//   packets      (d, fp8_packet_bytes(n))   sent, or received
//   Contract: packets =   mine =   the sum's bits depend on neither timing nor backend. A NaN or an
//             infinity in any part makes the element's sum NaN. That part's block is not scaled
//             then, so its other elements may become 0 or NaN too.
//   Cost: a rank sends (d-1)/d of 1.008 bytes an element; bf16 takes 2, float 4.
//   Error: 2^-4 of each rank's part at most, 2.7% of its root mean square; what is smaller than
//          about 2^-14 of its block's largest element loses more, and below about 2^-18 it is 0.
//   To copy: this file, fp8.cuh, types.h and cuda_common.h.
#pragma once
#include "fp8.cuh"

namespace llmc {

constexpr size_t FP8_PACKET_ALIGN = 4 * FP8_BLOCK; // what n must be a multiple of

// The bytes of n elements: their codes, and a scale for each block.
LLMC_HD inline size_t fp8_packet_bytes(size_t n) { return n + n / FP8_BLOCK; }

// Where the codes and the scale of one block lie. Blocks are numbered over all packets.
template <typename Byte> struct Fp8PacketBlock {
    Byte *codes, *scale;
    LLMC_HD Fp8PacketBlock(Byte* packets, size_t n, size_t block) {
        size_t each = n / FP8_BLOCK, at = block % each;
        Byte* packet = packets + block / each * fp8_packet_bytes(n);
        codes = packet + at * FP8_BLOCK;
        scale = packet + n + at;
    }
};

// A scale is a normal power of two, so its exponent says it all.
LLMC_HD inline uint8_t fp8_scale_byte(float scale) {
    return uint8_t(bits_as<uint32_t>(scale) >> 23);
}
LLMC_HD inline float fp8_scale_of(uint8_t byte) { return bits_as<float>(uint32_t(byte) << 23); }

// ----------------------------------------------------------------------------
// CPU

// Step 1: pack d parts of n elements each.
template <typename A>
void fp8_pack_gradients(uint8_t* packets, const A* whole, size_t d, size_t n, Cpu) {
    #pragma omp parallel for
    for (size_t b = 0; b < d * n / FP8_BLOCK; b++) {
        // Find the block's scale.
        const A* from = whole + b * FP8_BLOCK; // (128)
        float x[FP8_BLOCK];
        uint32_t most = 0;
        for (size_t k = 0; k < FP8_BLOCK; k++) {
            x[k] = float(from[k]);
            most = std::max(most, fp8_magnitude(x[k]));
        }
        float scale = fp8_scale<e4m3>(most);

        // Write the scale, and the codes.
        Fp8PacketBlock<uint8_t> to(packets, n, b);
        *to.scale = fp8_scale_byte(scale);
        for (size_t k = 0; k < FP8_BLOCK; k++)
            to.codes[k] = fp8_code<e4m3>(x[k], scale, false).bits;
    }
}

// Step 3: add this rank's shard over the packets of d ranks.
template <typename A>
void fp8_sum_gradients(A* mine, const uint8_t* packets, size_t d, size_t n, Cpu) {
    #pragma omp parallel for
    for (size_t b = 0; b < n / FP8_BLOCK; b++) {
        A sum[FP8_BLOCK] = {};
        for (size_t rank = 0; rank < d; rank++) {
            Fp8PacketBlock<const uint8_t> from(packets, n, rank * (n / FP8_BLOCK) + b);
            float inverse = 1 / fp8_scale_of(*from.scale); // exact
            for (size_t k = 0; k < FP8_BLOCK; k++)
                sum[k] += A(fp8_value(e4m3{from.codes[k]}) * inverse);
        }
        std::copy(sum, sum + FP8_BLOCK, mine + b * FP8_BLOCK);
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

constexpr unsigned FP8_GRADIENT_WARPS = 8; // in a block of threads
constexpr unsigned FP8_LANE = FP8_BLOCK / 32; // elements of a lane

// The scaled block that this warp works on.
__device__ inline size_t fp8_block_of_warp() {
    return size_t(blockIdx.x) * FP8_GRADIENT_WARPS + threadIdx.x / 32;
}

// One warp packs one scaled block, four elements a lane.
static __global__ void fp8_pack_gradients_kernel(uint8_t* packets, const float* whole,
                                                 size_t blocks, size_t n) {
    size_t b = fp8_block_of_warp(), lane = threadIdx.x % 32 * FP8_LANE;
    if (b >= blocks) return;

    // Find the block's scale. Every lane has it.
    Pack<float, FP8_LANE> x = load<FP8_LANE>(whole + b * FP8_BLOCK + lane);
    uint32_t most = 0;
    for (unsigned k = 0; k < FP8_LANE; k++) {
        uint32_t m = fp8_magnitude(x.v[k]);
        most = m > most ? m : most;
    }
    float scale = fp8_scale<e4m3>(warp_max(most));

    // Write the scale once, and each lane's codes as one word.
    Fp8PacketBlock<uint8_t> to(packets, n, b);
    Pack<uint8_t, FP8_LANE> codes;
    for (unsigned k = 0; k < FP8_LANE; k++)
        codes.v[k] = fp8_code<e4m3>(x.v[k], scale, false).bits;
    store(to.codes + lane, codes);
    if (lane == 0)
        *to.scale = fp8_scale_byte(scale);
}

// One warp adds one scaled block of all packets, four elements a lane.
static __global__ void fp8_sum_gradients_kernel(float* mine, const uint8_t* packets, size_t d,
                                                size_t n) {
    size_t blocks = n / FP8_BLOCK;
    size_t b = fp8_block_of_warp(), lane = threadIdx.x % 32 * FP8_LANE;
    if (b >= blocks) return;

    // Add in the order of the ranks, as the CPU does.
    Pack<float, FP8_LANE> sum = {};
    for (size_t rank = 0; rank < d; rank++) {
        Fp8PacketBlock<const uint8_t> from(packets, n, rank * blocks + b);
        Pack<uint8_t, FP8_LANE> codes = load<FP8_LANE>(from.codes + lane);
        float inverse = 1 / fp8_scale_of(*from.scale);
        for (unsigned k = 0; k < FP8_LANE; k++)
            sum.v[k] += fp8_value(e4m3{codes.v[k]}) * inverse;
    }
    store(mine + b * FP8_BLOCK + lane, sum);
}

// ----------------------------------------------------------------------------
// launchers; the arguments are the CPU versions'

// The grid of a warp for each scaled block.
inline unsigned fp8_warp_grid(size_t blocks) {
    size_t grid = ceil_div(blocks, size_t(FP8_GRADIENT_WARPS));
    LLMC_CHECK(grid <= 0x7fffffff, "%zu blocks of a gradient are more than a grid has", blocks);
    return unsigned(grid);
}

inline void fp8_pack_gradients(uint8_t* packets, const float* whole, size_t d, size_t n,
                               cudaStream_t stream) {
    size_t blocks = d * n / FP8_BLOCK;
    if (blocks)
        launch(fp8_pack_gradients_kernel, fp8_warp_grid(blocks), FP8_GRADIENT_WARPS * 32, 0,
               stream, packets, whole, blocks, n);
}
inline void fp8_sum_gradients(float* mine, const uint8_t* packets, size_t d, size_t n,
                              cudaStream_t stream) {
    if (n)
        launch(fp8_sum_gradients_kernel, fp8_warp_grid(n / FP8_BLOCK), FP8_GRADIENT_WARPS * 32,
               0, stream, mine, packets, d, n);
}
#endif

} // namespace llmc
