// fp8_sent.cuh - weights and gradients as fp8 codes, on their way between ranks - arXiv:2310.18313
//   WEIGHTS, gathered
//   ZeRO-3 gathers weights in shards, and products of blocks cast them to e4m3 (linear.cuh). So
//   ranks may send codes, a byte an element instead of two. A shard begins and ends anywhere in a
//   matrix, and a block of 128 x 128 lies on several ranks:
//     1. maxima   a rank's largest magnitude in each block that it has a part of
//     2.          the caller takes the largest over all ranks
//     3. codes    of the rank's part, each with the scale of its whole block
//     4.          the caller gathers the codes of all parts
//     5. values   of all codes: code / scale, which are bf16 numbers
//   The bits of a product are those of weights that were gathered wide: the values are the values
//   of the same codes, and casting them again changes none. Their maximum is the block's, rounded
//   to e4m3. It gives the same scale, or a scale of twice that if it was rounded down to 224, and
//   at twice the scale every code has a code too. (Not so for a weight of 1.875 2^127 and more.)
//   x, values (count)   codes (count)   amax (fp8_piece_blocks) bits of |x|, 0 before step 1
//   Contract: amax max=   codes, values =   no order matters: bitwise repeatable.
//   Cost: each step reads its input once, and writes a byte or two an element.
//   GRADIENTS, reduced and scattered
//   Each of d ranks has a part of a bucket's gradient, and rank q wants the sum of shard q:
//     1. packets   a rank rounds its part of each shard to e4m3, and packs it for that shard's rank
//     2.           the caller exchanges packets: rank q gets d of them, one from each rank
//     3. sum       rank q adds what the codes stand for, in float, in the order of the ranks
//   A packet is the codes of n elements, and after them a byte for each block of 128: the exponent
//   of the power of two that scales the block (fp8.cuh). A rank rounds its part once; FP8-LM sums
//   codes in the network, under one scale for all ranks, and rounds again at every hop.
//   whole, mine  (d, n), (n) acc   n is a multiple of 512, so that codes are read four at a time
//   packets      (d, fp8_packet_bytes(n))   sent, or received
//   Contract: packets =   mine =   the sum's bits depend on neither timing nor backend. A NaN or an
//             infinity makes the element's sum NaN; the others of its block are not scaled then.
//   Cost: a rank sends (d-1)/d of 1.008 bytes an element; bf16 takes 2, float 4.
//   Error: 2^-4 of each rank's part at most, 2.7% of its root mean square; what is smaller than
//          about 2^-14 of its block's largest element loses more, and below about 2^-18 it is 0.
//   To copy: this file, elements.h, fp8.cuh, types.h and cuda_common.h.
#pragma once
#include <vector>
#include "cuda_common.h"
#include "fp8.cuh"
#include "types.h"

namespace llmc {

// ----------------------------------------------------------------------------
// weights: pieces of matrices

// Elements [first, first + count) of a matrix, row by row.
struct Fp8Piece {
    size_t rows, cols; // of the whole matrix
    size_t first, count;
    bool whole; // one scale for the matrix, else one for each square

    LLMC_HD size_t across() const { return (cols + FP8_BLOCK - 1) / FP8_BLOCK; }
};

// The number of a matrix's scales.
inline size_t fp8_piece_blocks(size_t rows, size_t cols, bool whole) {
    return whole ? 1 : ceil_div(rows, FP8_BLOCK) * ceil_div(cols, FP8_BLOCK);
}

// A run of up to 128 elements in one row and one block: `at` counts from the piece's start. The
// first and the last row of a piece may be cut, so a run may be empty.
struct Fp8Run {
    size_t at, count, block;
};
inline size_t fp8_runs(const Fp8Piece& p) {
    if (p.count == 0) return 0;
    size_t rows = (p.first + p.count - 1) / p.cols - p.first / p.cols + 1;
    return rows * p.across();
}
LLMC_HD inline Fp8Run fp8_run(const Fp8Piece& p, size_t number) {
    size_t row = p.first / p.cols + number / p.across(), square = number % p.across();
    size_t begin = row * p.cols + square * FP8_BLOCK;
    size_t row_end = (row + 1) * p.cols, end = begin + FP8_BLOCK, last = p.first + p.count;

    // Cut the run where the row ends, and where the piece begins and ends.
    end = end < row_end ? end : row_end;
    end = end < last ? end : last;
    begin = begin > p.first ? begin : p.first;
    size_t block = p.whole ? 0 : row / FP8_BLOCK * p.across() + square;
    return {begin - p.first, end > begin ? end - begin : 0, block};
}

// ----------------------------------------------------------------------------
// weights: CPU

// Step 1. Threads have maxima of their own, and take the largest of them at the end.
template <typename T>
void fp8_piece_maxima(uint32_t* amax, const T* x, const Fp8Piece& p, Cpu) { // (blocks) (count)
    size_t blocks = fp8_piece_blocks(p.rows, p.cols, p.whole), runs = fp8_runs(p);
    #pragma omp parallel
    {
        std::vector<uint32_t> own(blocks);
        #pragma omp for
        for (size_t n = 0; n < runs; n++) {
            Fp8Run run = fp8_run(p, n);
            for (size_t i = 0; i < run.count; i++)
                own[run.block] = std::max(own[run.block], fp8_magnitude(x[run.at + i]));
        }
        #pragma omp critical
        for (size_t b = 0; b < blocks; b++)
            amax[b] = std::max(amax[b], own[b]);
    }
}

// Steps 3 and 5: codes of x, or the values of codes.
template <typename Out, typename In>
LLMC_HD inline Out fp8_piece_element(In x, float scale) {
    if constexpr (std::is_same_v<Out, e4m3>)
        return fp8_code<e4m3>(to_float(x), scale);
    else
        return fp8_result<Out>(x, 1 / scale);
}
template <typename Out, typename In>
void fp8_piece_cast(Out* out, const In* x, const uint32_t* amax, // (count) (count) (blocks)
                    const Fp8Piece& p, Cpu) {
    size_t runs = fp8_runs(p);
    #pragma omp parallel for
    for (size_t n = 0; n < runs; n++) {
        Fp8Run run = fp8_run(p, n);
        float scale = fp8_scale<e4m3>(amax[run.block]);
        for (size_t i = run.at; i < run.at + run.count; i++)
            out[i] = fp8_piece_element<Out>(x[i], scale);
    }
}

// ----------------------------------------------------------------------------
// gradients: packets

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
// gradients: CPU

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
            to.codes[k] = fp8_code<e4m3>(x[k], scale).bits;
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
// CUDA kernels of weights

#if LLMC_KERNELS

constexpr unsigned FP8_SENT_WARPS = 8; // in a block of threads

// Each step has a warp for each run: its lanes read neighbours. Return the run, or an empty one.
__device__ inline Fp8Run fp8_run_of_warp(const Fp8Piece& p, size_t runs) {
    size_t n = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    return n < runs ? fp8_run(p, n) : Fp8Run{};
}

template <typename T>
__global__ void fp8_piece_maxima_kernel(uint32_t* amax, const T* x, Fp8Piece p, size_t runs) {
    Fp8Run run = fp8_run_of_warp(p, runs);
    uint32_t most = 0;
    for (size_t i = threadIdx.x % 32; i < run.count; i += 32) {
        uint32_t m = fp8_magnitude(x[run.at + i]);
        most = m > most ? m : most;
    }
    most = warp_max(most);
    if (threadIdx.x % 32 == 0 && run.count)
        atomicMax(amax + run.block, most);
}

template <typename Out, typename In>
__global__ void fp8_piece_cast_kernel(Out* out, const In* x, const uint32_t* amax, Fp8Piece p,
                                      size_t runs) {
    Fp8Run run = fp8_run_of_warp(p, runs);
    if (!run.count) return;
    float scale = fp8_scale<e4m3>(amax[run.block]);
    for (size_t i = threadIdx.x % 32; i < run.count; i += 32)
        out[run.at + i] = fp8_piece_element<Out>(x[run.at + i], scale);
}

// ----------------------------------------------------------------------------
// CUDA kernels of gradients

constexpr unsigned FP8_LANE = FP8_BLOCK / 32; // elements of a lane

// The scaled block that this warp works on.
__device__ inline size_t fp8_block_of_warp() {
    return size_t(blockIdx.x) * FP8_SENT_WARPS + threadIdx.x / 32;
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
        codes.v[k] = fp8_code<e4m3>(x.v[k], scale).bits;
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

// One warp for each of n runs or scaled blocks. The operands are the kernel's arguments.
template <typename Kernel, typename... Operands>
void launch_fp8_warps(Kernel* kernel, size_t n, cudaStream_t stream, Operands... operands) {
    size_t grid = ceil_div(n, size_t(FP8_SENT_WARPS));
    LLMC_CHECK(grid <= 0x7fffffff, "%zu blocks of a matrix are more than a grid has", n);
    if (n)
        launch(kernel, unsigned(grid), FP8_SENT_WARPS * 32, stream, operands...);
}

template <typename T>
void fp8_piece_maxima(uint32_t* amax, const T* x, const Fp8Piece& p, cudaStream_t stream) {
    size_t runs = fp8_runs(p);
    launch_fp8_warps(fp8_piece_maxima_kernel<T>, runs, stream, amax, x, p, runs);
}
template <typename Out, typename In>
void fp8_piece_cast(Out* out, const In* x, const uint32_t* amax, const Fp8Piece& p,
                    cudaStream_t stream) {
    size_t runs = fp8_runs(p);
    launch_fp8_warps(fp8_piece_cast_kernel<Out, In>, runs, stream, out, x, amax, p, runs);
}
inline void fp8_pack_gradients(uint8_t* packets, const float* whole, size_t d, size_t n,
                               cudaStream_t stream) {
    size_t blocks = d * n / FP8_BLOCK;
    launch_fp8_warps(fp8_pack_gradients_kernel, blocks, stream, packets, whole, blocks, n);
}
inline void fp8_sum_gradients(float* mine, const uint8_t* packets, size_t d, size_t n,
                              cudaStream_t stream) {
    launch_fp8_warps(fp8_sum_gradients_kernel, n / FP8_BLOCK, stream, mine, packets, d, n);
}
#endif

} // namespace llmc
