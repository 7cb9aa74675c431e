// adamw_formats.cuh - AdamW over masters and moments of fewer bits, and rounding at random
//   AdamWMemory names the format of the masters and of the moments: see small_states.cuh.
//   Contract: as adamw.cuh.  A weight with a remainder is its master rounded to nearest, an exact
//             tie away from zero.  Without a master, bf16 and fp16 lose steps below half a unit in
//             the last place: h.stochastic then rounds up with a probability equal to the
//             remainder, by 16 random bits of (seed, step, name, global element), which no layout
//             changes. bf16 moments are rounded in the same way.
//   Cost: 28 bytes a bf16 parameter with remainders; moments take 8 bytes less each way in bf16.
//   To copy: this file, adamw.cuh, element_type.h, elements.h, rand.h, small_states.cuh,
//            step_scale.h, tensor_table.cuh, types.h and cuda_common.h.
#pragma once
#include "adamw.cuh"
#include "cuda_common.h"
#include "element_type.h"
#include "elements.h"
#include "rand.h"
#include "small_states.cuh"
#include "step_scale.h"
#include "tensor_table.cuh"
#include "types.h"

namespace llmc {

// The memory of a bucket. Rows (TensorRow) say which elements belong to which tensor.
template <typename T> struct AdamWMemory {
    T* weight;
    void* master; // float or uint16_t, as `masters` says; null: the weight is the master
    const acc_t<T>* grad;
    void *m, *v; // acc_t<T>, bf16 or bytes, as `states` says
    Masters masters = Masters::FLOAT;
    States states = States::FLOAT;
};

// ----------------------------------------------------------------------------
// rounding at random

// Streams of random bits, one for each quantity that is rounded: added to the hash of the name.
constexpr uint64_t ROUND_WEIGHT = 0, ROUND_M = 1, ROUND_V = 2;

// Round x up or down in magnitude at random, up with a probability equal to the remainder. The
// result is the bits of a bf16 or fp16; `random` is in [0, 2^16).
LLMC_HD inline uint16_t stochastic_bf16(float x, uint32_t random) {
    uint32_t u = bits_as<uint32_t>(x);
    if ((u & 0x7f800000) == 0x7f800000) return from_acc<bf16>(x).bits; // infinity, NaN
    // The sum carries into the upper half with a probability equal to the remainder.
    return uint16_t((u + random) >> 16);
}
LLMC_HD inline uint16_t stochastic_fp16(float x, uint32_t random) {
    uint32_t u = bits_as<uint32_t>(x);
    uint32_t sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;

    // From 65504 on round to nearest: fp16 has no larger number. A normal number drops 13 bits.
    if (u >= 0x477fe000) return from_acc<fp16>(x).bits;
    if (u >= 0x38800000)
        return uint16_t(sign | ((u + (random >> 3) - 0x38000000) >> 13));

    // Count a subnormal in units of 2^-24, with 16 bits after the binary point.
    return uint16_t(sign | ((uint32_t(bits_as<float>(u) * 0x1p40f) + random) >> 16));
}

// Round to a 16-bit type at random. Wider types are returned as they are.
template <typename T>
LLMC_HD inline T round_stochastic(acc_t<T> x, uint32_t random) {
    if constexpr (type_of<T>() == Type::BF16)
        return bits_as<T>(stochastic_bf16(x, random));
    else if constexpr (type_of<T>() == Type::F16)
        return bits_as<T>(stochastic_fp16(x, random));
    else
        return from_acc<T>(x); // float and double are their own masters
}

// Sixteen random bits for each element. One block of Philox serves eight elements.
struct RoundingBits {
    uint64_t seed, hash;
    uint64_t block = ~uint64_t(0); // the block that `words` holds
    RandomWords words = {};
    // The step is part of the seed: else an element would be rounded the same way in each step.
    LLMC_HD RoundingBits(uint64_t seed, int64_t step, uint64_t hash)
        : seed(seed ^ uint64_t(step) << 32), hash(hash) {}
    LLMC_HD uint32_t operator()(uint64_t element) {
        // Draw a block once for its eight elements.
        if (element / 8 != block) {
            block = element / 8;
            words = random_block(seed, hash, block);
        }

        // Select the word by comparisons. An index would move the words out of registers.
        uint32_t k = uint32_t(element % 8);
        uint32_t word = words[0];
        for (uint32_t i = 1; i < 4; i++)
            word = k / 2 == i ? words[int(i)] : word;
        return word >> (k % 2 * 16) & 0xffff;
    }
};

// ----------------------------------------------------------------------------
// weights

// Weights in bf16, and the 16 bits that each lacks of its master.
template <typename T> struct SplitMasters {
    T* weight;
    uint16_t* remainder;

    // Join the two halves of a master, and split it again: rounding may change the weight too.
    void read(float* w, const TensorRow& row, size_t i, size_t n) const { // w (n)
        size_t at = row.offset + i;
        #pragma omp simd
        for (size_t k = 0; k < n; k++)
            w[k] = join_float({bits_as<uint16_t>(weight[at + k]), remainder[at + k]});
    }
    void write(const float* w, const TensorRow& row, size_t i, size_t n, int64_t) const {
        size_t at = row.offset + i;
        #pragma omp simd
        for (size_t k = 0; k < n; k++) {
            SplitFloat parts = split_float(w[k]);
            weight[at + k] = bits_as<T>(parts.weight);
            remainder[at + k] = parts.remainder;
        }
    }

#if LLMC_KERNELS
    // Four remainders are 8 bytes: what is aligned for four floats is aligned for them too.
    bool aligned() const { return can_vectorize<float>(0, weight, remainder); }
    template <int P>
    __device__ void load(Pack<float, P>& w, const TensorRow& row, size_t i, size_t count) const {
        Pack<T, P> upper = load_some<P>(weight + row.offset + i, count);
        Pack<uint16_t, P> lower = load_some<P>(remainder + row.offset + i, count);
        for (int k = 0; k < P; k++)
            w.v[k] = join_float({bits_as<uint16_t>(upper.v[k]), lower.v[k]});
    }
    template <int P>
    __device__ void store(const Pack<float, P>& w, const TensorRow& row, size_t i, size_t count,
                          int64_t) const {
        Pack<T, P> upper;
        Pack<uint16_t, P> lower;
        for (int k = 0; k < P; k++) {
            SplitFloat parts = split_float(w.v[k]);
            upper.v[k] = bits_as<T>(parts.weight);
            lower.v[k] = parts.remainder;
        }
        store_some(remainder + row.offset + i, lower, count);
        store_some(weight + row.offset + i, upper, count);
    }
#endif
};

// Weights of 16 bits without a master, rounded at random.
template <typename T> struct RandomWeights : FloatMasters<T> {
    uint64_t seed;

    void write(const acc_t<T>* w, const TensorRow& row, size_t i, size_t n, int64_t step) const {
        RoundingBits random(seed, step, row.hash + ROUND_WEIGHT);
        T* weight = this->weight + row.offset + i; // (n)
        for (size_t k = 0; k < n; k++)
            weight[k] = round_stochastic<T>(w[k], random(whole_index(row, i + k)));
    }

#if LLMC_KERNELS
    template <int P>
    __device__ void store(const Pack<float, P>& w, const TensorRow& row, size_t i, size_t count,
                          int64_t step) const {
        // Number elements within the whole tensor, so that no layout changes a bit.
        RoundingBits random(seed, step, row.hash + ROUND_WEIGHT);
        Pack<T, P> rounded;
        // A loop would index arrays, in local memory. nvcc does not unroll it for Blackwell.
        #pragma unroll
        for (int k = 0; k < P; k++)
            rounded.v[k] = round_stochastic<T>(w.v[k], random(whole_index(row, i + k)));
        store_some(this->weight + row.offset + i, rounded, count);
    }
#endif
};

// ----------------------------------------------------------------------------
// moments: STREAM is ROUND_M or ROUND_V

// Moments in bf16. Rounded to nearest, a second moment would stand still wherever a step adds less
// than half a unit in its last place, so they are rounded at random.
template <uint64_t STREAM> struct Bf16Moment {
    bf16* moment;
    bool stochastic;
    uint64_t seed;
    static constexpr size_t BLOCK = 1;
    LLMC_HD bf16* at(const TensorRow& row) const {
        return moment + (STREAM == ROUND_V ? row.second : row.offset);
    }

    // Round element i of a row by the bits of its stream.
    LLMC_HD bf16 rounded(float x, RoundingBits& random, const TensorRow& row, size_t i) const {
        return stochastic ? round_stochastic<bf16>(x, random(whole_index(row, i)))
                          : from_acc<bf16>(x);
    }
    template <typename A> void read(A* x, const TensorRow& row, size_t i, size_t n) const { // x (n)
        #pragma omp simd
        for (size_t k = 0; k < n; k++)
            x[k] = to_float(at(row)[i + k]);
    }
    template <typename A>
    void write(const A* x, const TensorRow& row, size_t i, size_t n, int64_t step) const {
        RoundingBits random(seed, step, row.hash + STREAM);
        for (size_t k = 0; k < n; k++)
            at(row)[i + k] = rounded(float(x[k]), random, row, i + k);
    }

#if LLMC_KERNELS
    bool aligned() const { return can_vectorize<float>(0, moment); }
    __device__ void begin() {}
    template <int P>
    __device__ void load(Pack<float, P>& x, const TensorRow& row, size_t i, size_t count) const {
        Pack<bf16, P> narrow = load_some<P>(at(row) + i, count);
        for (int k = 0; k < P; k++)
            x.v[k] = to_float(narrow.v[k]);
    }
    template <int P>
    __device__ void store(const Pack<float, P>& x, const TensorRow& row, size_t i, size_t count,
                          int64_t step) const {
        Pack<bf16, P> narrow;
        RoundingBits random(seed, step, row.hash + STREAM);
        for (int k = 0; k < P; k++)
            narrow.v[k] = rounded(x.v[k], random, row, i + k);
        store_some(at(row) + i, narrow, count);
    }
#endif
};

// Moments in codes of 8 bits, in blocks that share an absmax. Tensors of few elements have floats.
template <uint64_t STREAM> struct CodedMoment {
    unsigned char* moment;
    DynamicMap map = {};                         // on a GPU: in shared memory
    static constexpr bool SIGN = STREAM == ROUND_M; // second moments cannot be negative
    static constexpr size_t BLOCK = STATE_BLOCK;

    void read(float*& x, const TensorRow& row, size_t i, size_t n) const { // x (n)
        if (row.small)
            read_block(x, state_block(moment + row.state, row.n, i), n, dynamic_map(SIGN));
        else
            x = reinterpret_cast<float*>(moment + row.state) + i;
    }
    // A block's codes depend on its new absmax. Floats were updated in place.
    void write(const float* x, const TensorRow& row, size_t i, size_t n, int64_t) const {
        if (row.small)
            write_block(state_block(moment + row.state, row.n, i), x, n, dynamic_map(SIGN));
    }

#if LLMC_KERNELS
    bool aligned() const { return can_vectorize<float>(0, moment); }

    // Fill the map in shared memory: each thread makes one code's value, and the middle between it
    // and the next. Every thread of the block must call it.
    __device__ void begin() {
        static_assert(UPDATE_THREADS == 256);
        LLMC_SHARED(float, tables, 4 * 256); // (map,2,256): in the emulator both maps share it
        float* values = tables + 512 * SIGN;
        int code = int(threadIdx.x);
        values[code] = dynamic_value(SIGN, code);
        values[256 + code] = dynamic_middle(SIGN, code);
        __syncthreads(); // all codes are there
        map = {values, values + 256};
    }

    // One warp has one block.
    template <int P>
    __device__ void load(Pack<float, P>& x, const TensorRow& row, size_t i, size_t count) const {
        if (!row.small) {
            x = load_some<P>(reinterpret_cast<const float*>(moment + row.state) + i, count);
            return;
        }

        // A lane past the end reads nothing.
        x = {};
        if (count == 0) return;

        // Decode by the block's map and scale.
        StateBlock block = state_block(moment + row.state, row.n, i);
        Pack<uint8_t, P> codes = load_some<P>((const uint8_t*)block.codes, count);
        for (int k = 0; k < P; k++)
            x.v[k] = size_t(k) < count ? map.value[codes.v[k]] * *block.absmax : 0;
    }

    // All lanes of a warp must call it together.
    template <int P>
    __device__ void store(const Pack<float, P>& x, const TensorRow& row, size_t i, size_t count,
                          int64_t) const {
        if (!row.small)
            return store_some(reinterpret_cast<float*>(moment + row.state) + i, x, count);

        // Find the block's largest magnitude. A lane past the end contributes 0.
        float largest = 0;
        for (int k = 0; k < P; k++)
            largest = size_t(k) < count ? fmaxf(largest, fabsf(x.v[k])) : largest;
        float absmax = block_scale(warp_max(largest));

        // Quantise. Every lane writes its codes; the first lane writes the scale.
        Pack<uint8_t, P> codes;
        for (int k = 0; k < P; k++) {
            float y = scaled(x.v[k], absmax);
            codes.v[k] = dynamic_code(map, y);
        }
        __syncwarp(); // shuffles order no memory, and every lane has read the old scale
        if (count == 0) return;
        StateBlock block = state_block(moment + row.state, row.n, i);
        store_some(block.codes, codes, count);
        if (threadIdx.x % 32 == 0)
            *block.absmax = absmax;
    }
#endif
};

// ----------------------------------------------------------------------------
// anywhere

// Call f with a bucket's weights in their format. Only a bf16 is the upper half of a float, so no
// other type has remainders.
template <typename T, typename F>
void with_weights(const AdamWMemory<T>& x, bool stochastic, uint64_t seed, F f) {
    if constexpr (type_of<T>() == Type::BF16)
        if (x.masters == Masters::REMAINDER)
            return f(SplitMasters<T>{x.weight, static_cast<uint16_t*>(x.master)});
    if constexpr (sizeof(T) == 2)
        if (!x.master && stochastic)
            return f(RandomWeights<T>{{x.weight, nullptr}, seed});
    f(FloatMasters<T>{x.weight, static_cast<float*>(x.master)});
}

// Take one AdamW step on all tensors of a bucket, in its formats. Only float moments have codes.
template <typename T, typename S>
void adamw_update(const AdamWMemory<T>& x, const TensorRow* rows, size_t count, // (count)
                  AdamW h, const StepScale* scale, S where) {
    typedef acc_t<T> A;
    with_weights(x, h.stochastic, h.seed, [&](const auto& weights) {
        auto update = [&](const auto& m, const auto& v) {
            update_tensors<AdamWRule, T>(h, weights, m, v, x.grad, rows, count, scale, where);
        };

        // Choose the moments' format.
        switch (x.states) {
        case States::FLOAT:
            return update(FloatMoment<A>{static_cast<A*>(x.m)},
                          FloatMoment<A>{static_cast<A*>(x.v), true});
        case States::BF16:
            return update(Bf16Moment<ROUND_M>{static_cast<bf16*>(x.m), h.stochastic, h.seed},
                          Bf16Moment<ROUND_V>{static_cast<bf16*>(x.v), h.stochastic, h.seed});
        case States::EIGHT_BIT:
            if constexpr (std::is_same_v<A, float>)
                update(CodedMoment<ROUND_M>{static_cast<unsigned char*>(x.m)},
                       CodedMoment<ROUND_V>{static_cast<unsigned char*>(x.v)});
        }
    });
}

} // namespace llmc
