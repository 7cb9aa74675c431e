// fp8_delayed.cuh - delayed scaling: a matrix's scale from the steps before it - arXiv:2209.05433
//   This is TransformerEngine's recipe: a matrix's scale is known before the matrix is seen, so one
//   pass quantises it, and this pass records the largest |x| for later. After a step, each matrix:
//     1. a = the largest |x| seen, over micro-batches and ranks; if nothing was seen, stop here
//     2. the history of the last `length` values takes a and drops its oldest
//     3. amax = the largest of the history, or a alone (most_recent)
//     4. scale = (MAX / 2^margin) / amax, MAX = 448 or 57344; unchanged if amax is infinite or NaN
//   A maximum may count a value twice: recomputation and ranks with the same rows change nothing.
//   A value that outgrows the history saturates once: the scale of the next step accounts for it.
//   The first step has scale 1, as in TransformerEngine: small gradients vanish in it.
//   Products use the power of two below the scale (fp8.cuh): its force_pow_2_scales.
//   A matrix of a linear layer has three slots: inp and W in e4m3, dout in e5m2 ("hybrid").
//   A run begins with all state zero.
//   Contract: state =   maxima have no order: bitwise repeatable, the same in every layout.
//   Cost: once a step, reads the history: 4 bytes for each slot and each step in it.
//   To copy: this file, elements.h, fp8.cuh, types.h and cuda_common.h.
#pragma once
#include <cfloat>
#include "cuda_common.h"
#include "fp8.cuh"
#include "types.h"

namespace llmc {

constexpr size_t FP8_OPERANDS = 3; // slots of a linear layer: inp, W, dout

// The settings of the recipe.
struct Fp8Rule {
    int length = 1024;   // TransformerEngine's defaults
    int margin = 0;      // powers of two left free above amax
    bool recent = false; // most_recent: use the last step alone
};

// Where the state lies. TransformerEngine keeps the running maximum in the history's first entry.
// Here it is a word of its own, and the other entries are a ring.
struct Fp8History {
    uint32_t* amax = nullptr;   // (slots)          fp8_magnitude of this step's largest
    float* scale = nullptr;     // (slots)          for the next step; 0 means 1
    uint32_t* rolled = nullptr; // (slots)          the number of steps that have moved the ring
    float* past = nullptr;      // (slots,length-1) the maxima of the steps before
    size_t slots = 0;
};

// The bytes of the state: three words for each slot, and its ring.
inline size_t fp8_history_bytes(size_t slots, const Fp8Rule& rule) {
    return slots * (2 + size_t(rule.length)) * sizeof(float);
}

// Lay the state out at `home` (fp8_history_bytes).
inline Fp8History fp8_history_at(void* home, size_t slots, const Fp8Rule& rule) {
    uint32_t* words = static_cast<uint32_t*>(home);
    float* floats = static_cast<float*>(home);
    size_t past = slots * size_t(rule.length - 1);

    // The parts follow each other: amax, past, scale, rolled.
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

// Take a step's maximum into a slot. most: the largest value of the slot's past, without NaNs.
LLMC_HD inline void fp8_next_scale(const Fp8History& h, size_t slot, float most, Fp8Rule rule) {
    float a = bits_as<float>(h.amax[slot]);
    h.amax[slot] = 0;

    // A matrix that this step has not used keeps its scale.
    if (a == 0) return;

    // Overwrite the oldest entry of the ring; `most` still includes it.
    uint32_t past = uint32_t(rule.length - 1);
    uint32_t rolled = h.rolled[slot]++;
    if (past)
        h.past[slot * past + rolled % past] = a;
    float amax = rule.recent || a > most ? a : most; // false for a NaN

    // Divide as TransformerEngine does. A scale too large for a float becomes the largest float.
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

// Set the scales for the next step, from maxima that are the same on all ranks.
inline void fp8_next_scales(const Fp8History& h, const Fp8Rule& rule, Cpu) {
    size_t past = size_t(rule.length - 1);
    for (size_t slot = 0; slot < h.slots; slot++) {
        float most = 0;
        const float* ring = h.past + slot * past; // (past)
        for (size_t i = 0; i < past; i++)
            most = ring[i] > most ? ring[i] : most; // fmax would lose `most` to a signalling NaN
        fp8_next_scale(h, slot, most, rule);
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

// One warp for each slot.
static __global__ void fp8_next_scales_kernel(Fp8History h, Fp8Rule rule) {
    unsigned lane = threadIdx.x % 32;
    size_t slot = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    size_t past = size_t(rule.length - 1);
    if (slot >= h.slots) return; // a whole warp leaves

    // Find the largest of the past, without NaNs. The bits of floats above 0 are in their order.
    float most = 0;
    const float* ring = h.past + slot * past; // (past)
    for (size_t i = lane; i < past; i += 32)
        most = ring[i] > most ? ring[i] : most;
    uint32_t largest = warp_max(bits_as<uint32_t>(most));
    __syncwarp(); // every lane has read what the first lane will change
    if (lane == 0)
        fp8_next_scale(h, slot, bits_as<float>(largest), rule);
}

// ----------------------------------------------------------------------------
// launchers

inline void fp8_next_scales(const Fp8History& h, const Fp8Rule& rule, cudaStream_t stream) {
    constexpr unsigned WARPS = 4;
    unsigned blocks = unsigned(ceil_div(h.slots, size_t(WARPS)));
    launch(fp8_next_scales_kernel, blocks, WARPS * 32, stream, h, rule);
}
#endif

} // namespace llmc
