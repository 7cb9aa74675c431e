// fp8_delayed.cuh - delayed scaling: a matrix's scale from the steps before it - arXiv:2209.05433
//   TransformerEngine's recipe: who quantises a matrix knows its scale before it has seen it, so
//   one pass is enough, and leaves the largest |x| for later. After a step, for each matrix:
//     1. a = the largest |x| of all that came by, over micro-batches and ranks; none: nothing moves
//     2. the history of the last `length` values takes a, and loses its oldest
//     3. amax = the largest of the history, or a alone (most_recent)
//     4. scale = (MAX / 2^margin) / amax, MAX = 448 or 57344; amax infinite or NaN: as it was
//   A maximum counts nothing twice, so recomputation and ranks with the same rows change nothing.
//   What outgrows its history saturates, once: the next step's scale knows it. The first step has
//   scale 1, as there: small gradients vanish in it.
//   Products use the power of two below the scale, as TransformerEngine's force_pow_2_scales does:
//   fp8.cuh says what that is good for.
//   A matrix of a linear layer has three slots: inp and W in e4m3, dout in e5m2 ("hybrid").
//   Zeros are the state of a run that begins.
//   Contract: state =   maxima have no order: bitwise repeatable, the same in every layout.
//   Cost: reads the history once a step, 4 bytes a slot and step of it.
//   To copy: this file, fp8.cuh, types.h and cuda_common.h.
#pragma once
#include <cfloat>
#include "fp8.cuh"

namespace llmc {

constexpr size_t FP8_OPERANDS = 3; // slots of a linear layer: inp, W, dout

struct Fp8Rule {
    int length = 1024;   // TransformerEngine's defaults
    int margin = 0;      // powers of two that are left free above amax
    bool recent = false; // most_recent: the last step alone
};

// Where the state lies. TransformerEngine keeps the running maximum in the history's first entry;
// here it is a word of its own, and the others are a ring.
struct Fp8History {
    uint32_t* amax = nullptr;   // (slots)          fp8_magnitude of this step's largest
    float* scale = nullptr;     // (slots)          of the next; 0: 1
    uint32_t* rolled = nullptr; // (slots)          steps that have moved the ring
    float* past = nullptr;      // (slots,length-1) maxima of the steps before
    size_t slots = 0;
};

inline size_t fp8_history_bytes(size_t slots, const Fp8Rule& rule) {
    return slots * (2 + size_t(rule.length)) * sizeof(float);
}
inline Fp8History fp8_history_at(void* home, size_t slots, const Fp8Rule& rule) {
    uint32_t* words = static_cast<uint32_t*>(home);
    float* floats = static_cast<float*>(home);
    size_t past = slots * size_t(rule.length - 1);

    // Lie one behind the other: amax, past, scale, rolled.
    Fp8History h;
    h.slots = slots;
    h.amax = words;
    h.past = floats + slots;
    h.scale = h.past + past;
    h.rolled = words + 2 * slots + past;
    return h;
}

// ----------------------------------------------------------------------------
// anywhere

// Take a step's maximum into a slot. most: the largest of its past, without NaNs.
LLMC_HD inline void fp8_next_scale(const Fp8History& h, size_t slot, float most, Fp8Rule rule) {
    float a = bits_as<float>(h.amax[slot]);
    h.amax[slot] = 0;

    // A matrix that no step has seen keeps what it has.
    if (a == 0) return;

    // Put it in the place of the oldest, whose part in `most` was its last.
    uint32_t past = uint32_t(rule.length - 1);
    uint32_t rolled = h.rolled[slot]++;
    if (past) h.past[slot * past + rolled % past] = a;
    float amax = rule.recent || a > most ? a : most; // a NaN is not above it

    // Divide as TransformerEngine does. A scale beyond floats becomes the largest of them.
    constexpr float E4M3_MOST = 448, E5M2_MOST = 57344;
    float top = slot % FP8_OPERANDS == 2 ? E5M2_MOST : E4M3_MOST;
    for (int i = 0; i < rule.margin; i++)
        top /= 2;
    bool finite = amax <= FLT_MAX;
    if (amax > 0 && finite) {
        float scale = top / amax;
        h.scale[slot] = scale <= FLT_MAX ? scale : FLT_MAX;
    }
}

// ----------------------------------------------------------------------------
// CPU

// After a step: the scales of the next, from maxima that all ranks share.
inline void fp8_next_scales(const Fp8History& h, const Fp8Rule& rule, Cpu) {
    size_t past = size_t(rule.length - 1);
    for (size_t slot = 0; slot < h.slots; slot++) {
        float most = 0;
        const float* ring = h.past + slot * past; // (past)
        for (size_t i = 0; i < past; i++)
            most = ring[i] > most ? ring[i] : most; // fmax loses `most` to a signalling NaN
        fp8_next_scale(h, slot, most, rule);
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

// A warp has a slot.
__global__ void fp8_next_scales_kernel(Fp8History h, Fp8Rule rule) {
    unsigned lane = threadIdx.x % 32;
    size_t slot = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    size_t past = size_t(rule.length - 1);
    if (slot >= h.slots) return; // a whole warp

    // Find the largest of the past, without NaNs: floats above 0 are in the order of their bits.
    float most = 0;
    const float* ring = h.past + slot * past; // (past)
    for (size_t i = lane; i < past; i += 32)
        most = ring[i] > most ? ring[i] : most;
    uint32_t largest = warp_max(bits_as<uint32_t>(most));
    __syncwarp(); // every lane has read what the first one changes
    if (lane == 0) fp8_next_scale(h, slot, bits_as<float>(largest), rule);
}

// ----------------------------------------------------------------------------
// launchers

inline void fp8_next_scales(const Fp8History& h, const Fp8Rule& rule, cudaStream_t stream) {
    constexpr unsigned WARPS = 4;
    unsigned blocks = unsigned(ceil_div(h.slots, size_t(WARPS)));
    launch(fp8_next_scales_kernel, blocks, WARPS * 32, 0, stream, h, rule);
}
#endif

} // namespace llmc
