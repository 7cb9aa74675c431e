// adamw.cuh - AdamW with decoupled decay, masters and moments of any width, SGD - arXiv:1711.05101
//   g = grad * scale,   m = b1 m + (1-b1) g,   v = b2 v + (1-b2) g^2
//   w -= lr * ((m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps) + decay * w)
//   weight (n) T   master (n) float, or null where the weight is its own master
//   grad, m, v (n) acc   or a table of tensors in one bucket, in one call
//   Each row of the table has a factor for lr (LoRA+).
//   scale: {scale, finite, step} as grad_norm_finish leaves them, with the step's learning rate if
//          the host has given one (else h.lr). A null scale means 1, true, h.step.
//   AdamWMemory: master as the 16-bit remainders of small_states.cuh, m and v in bf16 or 8 bits
//   Contract: master, m, v updated. weight = the master rounded to nearest; an exact tie goes to
//             even, but away from zero where the master is a remainder. Nothing is written if
//             !scale->finite, and nothing between a table's tensors. Bitwise repeatable: an element
//             depends on nothing but itself. All versions give the same bits where the square
//             root, the division and fma are IEEE (a CPU, or nvcc without -use_fast_math).
//             Without a master, bf16 and fp16 lose steps below half a unit in the last place.
//             h.stochastic then rounds up with a probability equal to the remainder, by 16 random
//             bits of (seed, step, name, global element): the layout does not change them.
//   Cost: memory-bound: reads grad, master, m, v; writes master, m, v, weight: 30 bytes a bf16
//         parameter, 28 with remainders, 24 without a master. The GPU reads the scale from device
//         memory, where the norm left it.
//   To copy: this file and grad_norm.cuh, loss_scale.cuh, small_states.cuh,
//   rand.h, types.h, cuda_common.h.
#pragma once
#include "cuda_common.h"
#include "grad_norm.cuh"
#include "rand.h"
#include "small_states.cuh"

namespace llmc {

// The settings of a step. Each tensor's row says whether weight decay applies to it.
struct AdamW {
    float lr, beta1, beta2, eps, decay;
    bool stochastic = false; // for weights without a master, and for bf16 moments
    uint64_t seed = 0;       // of the stochastic rounding
    int64_t step = 1;        // this step's number, from 1; a StepScale overrides it
};

// The memory of a bucket. Rows (TensorRow) say which elements belong to which tensor.
template <typename T> struct AdamWMemory {
    T* weight;
    void* master; // float or uint16_t, as `masters` says; null: the weight is the master
    const acc_t<T>* grad;
    void *m, *v; // acc_t<T>, bf16 or bytes, as `states` says
    Masters masters = Masters::FLOAT;
    States states = States::FLOAT;
};

// Streams of random bits, one for each quantity that is rounded. The number is added to the hash of
// the tensor's name.
constexpr uint64_t ROUND_WEIGHT = 0, ROUND_M = 1, ROUND_V = 2;

// ----------------------------------------------------------------------------
// one element: what both versions do to it

// The numbers of this step. Without a StepScale the gradient is neither scaled nor checked.
LLMC_HD inline StepScale this_step(const StepScale* scale, int64_t step) {
    return scale ? *scale : StepScale{0, 1, 1, step};
}

// The learning rate: the one the host gave for this step, else the settings'.
LLMC_HD inline float rate_of(const StepScale& now, float lr) {
    return now.given.lr < 0 ? lr : now.given.lr;
}

// One AdamW step on one element. fma is written out, because the compiler could otherwise contract
// products differently in each version and change the bits.
template <typename A> struct AdamWStep {
    A scale, b1, b2, lr, eps;
    A correct1, correct2; // 1 / (1 - beta^t)
    LLMC_HD AdamWStep(const AdamW& h, const StepScale& now)
        : scale(now.scale), b1(h.beta1), b2(h.beta2), lr(rate_of(now, h.lr)), eps(h.eps),
          correct1(A(now.correct1 > 0 ? now.correct1 : bias_correction(h.beta1, now.step))),
          correct2(A(now.correct2 > 0 ? now.correct2 : bias_correction(h.beta2, now.step))) {}

    // Update the moments in place and return the new weight. `rate` is the tensor's own
    // factor of lr.
    LLMC_HD A operator()(A& m, A& v, A grad, A w, A decay, A rate) const {
        A g = grad * scale;
        m = std::fma(b1, m, (1 - b1) * g);
        v = std::fma(b2, v, (1 - b2) * g * g);
        // Correct the moments' bias towards 0, from which they started.
        A change = m * correct1 / (std::sqrt(v * correct2) + eps);
        return std::fma(-lr * rate, std::fma(decay, w, change), w);
    }
};

// One SGD step on one element: w - lr * (grad * scale + decay * w).
template <typename A>
LLMC_HD inline A sgd_element(A grad, A w, A scale, A lr, A decay) {
    return std::fma(-lr, std::fma(decay, w, grad * scale), w);
}

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
    if (u >= 0x477fe000)
        return from_acc<fp16>(x).bits;
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
    // The step is part of the seed; otherwise an element would be rounded the same way
    // in each step.
    LLMC_HD RoundingBits(const AdamW& h, int64_t step, uint64_t hash)
        : seed(h.seed ^ uint64_t(step) << 32), hash(hash) {}
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
// CPU

// The number of elements that a thread works on at a time: a block that shares an absmax in 8 bits.
constexpr size_t UPDATE_BLOCK = STATE_BLOCK;

// Whether the moments of a stream can be negative: only the first moments can.
LLMC_HD inline bool has_sign(uint64_t stream) { return stream == ROUND_M; }

// Read n weights from element `at` on, from the masters if there are any.
template <typename T>
void read_weights(acc_t<T>* w, const AdamWMemory<T>& x, size_t at, size_t n) { // w (n)
    typedef acc_t<T> A;
    // Join a weight and its remainder, the two halves of a master.
    if constexpr (type_of<T>() == Type::BF16)
        if (x.masters == Masters::REMAINDER) {
            const uint16_t* remainder = static_cast<const uint16_t*>(x.master) + at;
            #pragma omp simd
            for (size_t k = 0; k < n; k++)
                w[k] = join_float({bits_as<uint16_t>(x.weight[at + k]), remainder[k]});
            return;
        }

    // The compiler moves the test of the pointer out of the loop.
    const float* master = static_cast<const float*>(x.master);
    #pragma omp simd
    for (size_t k = 0; k < n; k++)
        w[k] = master ? A(master[at + k]) : to_acc(x.weight[at + k]);
}

// Write n weights of a row from its element i on: the master exactly, the weight rounded.
template <typename T>
void write_weights(const AdamWMemory<T>& x, const acc_t<T>* w, // (n)
                   const TensorRow& row, size_t i, size_t n, const AdamW& h, int64_t step) {
    T* weight = x.weight + row.offset + i; // (n)
    // Split the masters: the upper half is the weight, the lower half the remainder.
    if constexpr (type_of<T>() == Type::BF16)
        if (x.masters == Masters::REMAINDER) {
            uint16_t* remainder = static_cast<uint16_t*>(x.master) + row.offset + i;
            #pragma omp simd
            for (size_t k = 0; k < n; k++) {
                SplitFloat parts = split_float(w[k]);
                weight[k] = bits_as<T>(parts.weight);
                remainder[k] = parts.remainder;
            }
            return;
        }

    // Without a master, round at random. Otherwise steps below half a unit in the last
    // place are lost.
    if (!x.master && h.stochastic && sizeof(T) == 2) {
        RoundingBits random(h, step, row.hash + ROUND_WEIGHT);
        for (size_t k = 0; k < n; k++)
            weight[k] = round_stochastic<T>(w[k], random(whole_index(row, i + k)));
        return;
    }

    // Write the master, and round it to nearest for the weight.
    float* master = static_cast<float*>(x.master) + (x.master ? row.offset + i : 0);
    #pragma omp simd
    for (size_t k = 0; k < n; k++) {
        if (x.master)
            master[k] = float(w[k]);
        weight[k] = from_acc<T>(w[k]);
    }
}

// Return n moments of a row from its element i on. Float moments are returned in place; others are
// widened into `room` (n).
template <typename A>
A* read_moments(void* moments, States states, const TensorRow& row, size_t i, size_t n,
                uint64_t stream, A* room) {
    // Float moments need no room. With 8-bit states, tensors of few elements have
    // float moments too.
    if (states == States::FLOAT)
        return static_cast<A*>(moments) + row.offset + i;
    unsigned char* tensor = static_cast<unsigned char*>(moments) + row.state;
    if (states == States::EIGHT_BIT && !row.small)
        return reinterpret_cast<A*>(tensor) + i;

    // Widen the others: 8-bit codes by their block's scale and map, or bf16.
    if constexpr (std::is_same_v<A, float>)
        if (states == States::EIGHT_BIT) {
            read_block(room, state_block(tensor, row.n, i), n, dynamic_map(has_sign(stream)));
            return room;
        }
    const bf16* from = static_cast<const bf16*>(moments) + row.offset + i;
    #pragma omp simd
    for (size_t k = 0; k < n; k++)
        room[k] = to_float(from[k]);
    return room;
}

// Write moments of a row back from its element i on, unless they are float and updated in place.
template <typename A>
void write_moments(void* moments, States states, const A* values, // (n)
                   const TensorRow& row, size_t i, size_t n, const AdamW& h, int64_t step,
                   uint64_t stream) {
    // Float moments were updated in place.
    if (states == States::FLOAT || (states == States::EIGHT_BIT && !row.small))
        return;

    // Quantise a block: its codes depend on its new absmax.
    if constexpr (std::is_same_v<A, float>)
        if (states == States::EIGHT_BIT) {
            unsigned char* tensor = static_cast<unsigned char*>(moments) + row.state;
            StateBlock block = state_block(tensor, row.n, i);
            return write_block(block, values, n, dynamic_map(has_sign(stream)));
        }

    // bf16 moments are rounded at random. Rounded to nearest, a second moment would stand still
    // wherever a step adds less than half a unit in the last place.
    bf16* to = static_cast<bf16*>(moments) + row.offset + i; // (n)
    RoundingBits random(h, step, row.hash + stream);
    for (size_t k = 0; k < n; k++) {
        float x = float(values[k]);
        to[k] = h.stochastic ? round_stochastic<bf16>(x, random(whole_index(row, i + k)))
                             : from_acc<bf16>(x);
    }
}

// Take one AdamW step on all tensors of a bucket.
template <typename T>
void adamw_update(const AdamWMemory<T>& x, const TensorRow* rows, size_t count, // (count)
                  AdamW h, const StepScale* scale, Cpu) {
    typedef acc_t<T> A;
    StepScale now = this_step(scale, h.step);
    // Skip the whole step if a gradient is not finite: a NaN in the moments would stay forever.
    if (!now.finite) return;

    // Walk the tensors; threads share out the blocks of each. A block is read, updated and written
    // through L1, so that each storage format needs only a loop of its own.
    const AdamWStep<A> update(h, now);
    for (size_t r = 0; r < count; r++) {
        const TensorRow& row = rows[r];
        A decay = row.decay ? h.decay : 0;
        A rate = row.rate;
        #pragma omp parallel for
        for (size_t i = 0; i < row.n; i += UPDATE_BLOCK) {
            // Read a block's weights and moments as acc_t.
            size_t at = row.offset + i;
            size_t left = row.n - i;
            size_t n = left < UPDATE_BLOCK ? left : UPDATE_BLOCK;
            A w[UPDATE_BLOCK];
            A m_room[UPDATE_BLOCK];
            A v_room[UPDATE_BLOCK];
            read_weights(w, x, at, n);
            A* m = read_moments(x.m, x.states, row, i, n, ROUND_M, m_room); // (n)
            A* v = read_moments(x.v, x.states, row, i, n, ROUND_V, v_room); // (n)
            const A* grad = x.grad + at;                                    // (n)

            // Take the step, then write everything back in its own format.
            #pragma omp simd
            for (size_t k = 0; k < n; k++)
                w[k] = update(m[k], v[k], grad[k], w[k], decay, rate);
            write_weights(x, w, row, i, n, h, now.step);
            write_moments(x.m, x.states, m, row, i, n, h, now.step, ROUND_M);
            write_moments(x.v, x.states, v, row, i, n, h, now.step, ROUND_V);
        }
    }
}

// Take one SGD step on all tensors of a bucket: w -= lr * (g + decay * w).
template <typename T>
void sgd_update(T* weight, float* master, const acc_t<T>* grad, // a bucket's; master or null
                const TensorRow* rows, size_t count,            // (count)
                float lr, float decay, const StepScale* scale, Cpu) {
    typedef acc_t<T> A;
    // SGD has no moments, so it needs no step number to correct their bias.
    StepScale now = this_step(scale, 0);
    if (!now.finite) return;

    // Walk the tensors; threads share out the elements of each.
    A s = now.scale;
    A rate = rate_of(now, lr);
    for (size_t r = 0; r < count; r++) {
        A row_decay = rows[r].decay ? decay : 0;
        A row_rate = rate * rows[r].rate;
        #pragma omp parallel for simd
        for (size_t i = rows[r].offset; i < rows[r].offset + rows[r].n; i++) {
            // Read the master if there is one: it has the bits that the weight lacks.
            A w = master ? A(master[i]) : to_acc(weight[i]);
            w = sgd_element(grad[i], w, s, row_rate, row_decay);
            if (master) master[i] = float(w);
            weight[i] = from_acc<T>(w);
        }
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

constexpr int UPDATE_THREADS = 256;
constexpr unsigned UPDATE_BLOCKS = 2048; // at most; a block walks several chunks if there are more

// Call f(row, i, left) for every chunk of the table: each thread has P elements of the row from i
// on, or the `left` ones where fewer are left.
template <int P, typename F>
__device__ void for_each_element(const TensorTable& table, F f) {
    for (size_t c = blockIdx.x; c < table.chunks; c += gridDim.x) {
        TensorChunk chunk = find_chunk(table, c);

        // A warp stays together, because f may shuffle: lanes past the end call f with
        // 0 elements left.
        size_t lane = threadIdx.x % 32 * P;
        for (size_t w = chunk.from + threadIdx.x / 32 * 32 * P; w < chunk.to;
             w += UPDATE_THREADS * P)
            f(chunk.row, w + lane, w + lane < chunk.to ? chunk.to - w - lane : 0);
    }
}

// Read P weights as float, from the master if there is one.
template <int P, typename T>
__device__ Pack<float, P> load_weights(const T* weight, const float* master, size_t count) {
    if (master) return load_some<P>(master, count);
    Pack<T, P> narrow = load_some<P>(weight, count);
    Pack<float, P> w;
    for (int k = 0; k < P; k++)
        w.v[k] = to_float(narrow.v[k]);
    return w;
}

// The same for a bucket's element `at` on. With SPLIT, join weights and remainders.
template <bool SPLIT, int P, typename T>
__device__ Pack<float, P> read_some(const AdamWMemory<T>& x, size_t at, size_t count) {
    if constexpr (SPLIT) {
        // Two loads of half a float each move as many bytes as one load of a float.
        Pack<T, P> upper = load_some<P>(x.weight + at, count);
        Pack<uint16_t, P> lower = load_some<P>(static_cast<uint16_t*>(x.master) + at, count);
        Pack<float, P> w;
        for (int k = 0; k < P; k++)
            w.v[k] = join_float({bits_as<uint16_t>(upper.v[k]), lower.v[k]});
        return w;
    } else {
        const float* master = static_cast<const float*>(x.master);
        return load_weights<P>(x.weight + at, master ? master + at : nullptr, count);
    }
}

// Write P weights of a row from its element i on: the master exactly, the weight rounded.
template <bool SPLIT, int P, typename T>
__device__ void write_some(const AdamWMemory<T>& x, const Pack<float, P>& w, const TensorRow& row,
                           size_t i, size_t count, const AdamW& h, int64_t step) {
    size_t at = row.offset + i;
    Pack<T, P> rounded;
    if constexpr (SPLIT) {
        // Write both halves: rounding the upper half up may have changed the weight too.
        Pack<uint16_t, P> lower;
        for (int k = 0; k < P; k++) {
            SplitFloat parts = split_float(w.v[k]);
            rounded.v[k] = bits_as<T>(parts.weight);
            lower.v[k] = parts.remainder;
        }
        store_some(static_cast<uint16_t*>(x.master) + at, lower, count);
    } else if (!x.master && h.stochastic && sizeof(T) == 2) {
        // Number elements within the whole tensor, so that no layout changes a bit.
        RoundingBits random(h, step, row.hash + ROUND_WEIGHT);
        // A loop would index arrays, in local memory. nvcc does not unroll it for Blackwell.
        #pragma unroll
        for (int k = 0; k < P; k++)
            rounded.v[k] = round_stochastic<T>(w.v[k], random(whole_index(row, i + k)));
    } else {
        // Write the master, and round it to nearest for the weight.
        for (int k = 0; k < P; k++)
            rounded.v[k] = from_acc<T>(w.v[k]);
        if (x.master)
            store_some(static_cast<float*>(x.master) + at, w, count);
    }

    store_some(x.weight + at, rounded, count);
}

// The two maps of 8-bit codes in a block's shared memory. Other formats need none.
struct SharedMaps {
    DynamicMap map[2]; // [has a sign]
};
// Fill the maps in shared memory. Every thread of the block must call it.
template <States STATES>
__device__ SharedMaps make_maps() {
    if constexpr (STATES == States::EIGHT_BIT) {
        static_assert(UPDATE_THREADS == 256);
        LLMC_SHARED(float, tables, 4 * 256);
        // Each thread makes one code's value in each map, and the middle between this value
        // and the next.
        int code = int(threadIdx.x);
        for (int k = 0; k < 2; k++) {
            float* values = tables + 512 * k;
            float* middles = values + 256;
            values[code] = dynamic_value(k, code);
            middles[code] = dynamic_middle(k, code);
        }
        __syncthreads(); // all codes are there
        return {{{tables, tables + 256}, {tables + 512, tables + 768}}};
    } else {
        return {};
    }
}

// Read P moments of a row from its element i on. With 8-bit states one warp has one block of 256.
template <States STATES, int P>
__device__ Pack<float, P> read_moments(void* moments, const TensorRow& row, size_t i, size_t count,
                                       const DynamicMap& map) {
    size_t at = row.offset + i;
    if constexpr (STATES == States::FLOAT) {
        return load_some<P>(static_cast<const float*>(moments) + at, count);
    } else if constexpr (STATES == States::EIGHT_BIT) {
        unsigned char* tensor = static_cast<unsigned char*>(moments) + row.state;
        if (!row.small)
            return load_some<P>(reinterpret_cast<const float*>(tensor) + i, count);

        // A lane past the end reads nothing.
        Pack<float, P> x = {};
        if (count == 0) return x;

        // Decode by the block's map and scale.
        StateBlock block = state_block(tensor, row.n, i);
        Pack<uint8_t, P> codes = load_some<P>((const uint8_t*)block.codes, count);
        for (int k = 0; k < P; k++)
            x.v[k] = size_t(k) < count ? map.value[codes.v[k]] * *block.absmax : 0;
        return x;
    } else {
        Pack<bf16, P> narrow = load_some<P>(static_cast<const bf16*>(moments) + at, count);
        Pack<float, P> x;
        for (int k = 0; k < P; k++)
            x.v[k] = to_float(narrow.v[k]);
        return x;
    }
}

// Write P moments of a row back from its element i on. All lanes of a warp must call it together.
template <States STATES, int P>
__device__ void write_moments(void* moments, const Pack<float, P>& x, const TensorRow& row,
                              size_t i, size_t count, const AdamW& h, int64_t step,
                              uint64_t stream, const DynamicMap& map) {
    size_t at = row.offset + i;
    if constexpr (STATES == States::FLOAT) {
        store_some(static_cast<float*>(moments) + at, x, count);
    } else if constexpr (STATES == States::EIGHT_BIT) {
        unsigned char* tensor = static_cast<unsigned char*>(moments) + row.state;
        if (!row.small)
            return store_some(reinterpret_cast<float*>(tensor) + i, x, count);

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
        StateBlock block = state_block(tensor, row.n, i);
        store_some(block.codes, codes, count);
        if (threadIdx.x % 32 == 0)
            *block.absmax = absmax;
    } else {
        // Round at random by the same bits as the CPU.
        Pack<bf16, P> narrow;
        RoundingBits random(h, step, row.hash + stream);
        for (int k = 0; k < P; k++)
            narrow.v[k] = h.stochastic
                              ? round_stochastic<bf16>(x.v[k], random(whole_index(row, i + k)))
                              : from_acc<bf16>(x.v[k]);
        store_some(static_cast<bf16*>(moments) + at, narrow, count);
    }
}

// Each thread takes P elements at a time; blocks walk the table's chunks. Pointers in x are the
// bucket's, and each row lies `offset` elements into it.
template <typename T, int P, bool SPLIT, States STATES>
__global__ void adamw_update_kernel(AdamWMemory<T> x, __grid_constant__ const TensorTable table,
                                    AdamW h, const StepScale* scale) {
    StepScale now = this_step(scale, h.step);
    if (!now.finite) return;
    const AdamWStep<float> update(h, now);
    const SharedMaps maps = make_maps<STATES>();
    for_each_element<P>(table, [&](const TensorRow& row, size_t i, size_t count) {
        size_t at = row.offset + i;
        float decay = row.decay ? h.decay : 0;

        // Read, and take the step.
        Pack<float, P> g = load_some<P>(x.grad + at, count);
        Pack<float, P> m = read_moments<STATES, P>(x.m, row, i, count, maps.map[1]);
        Pack<float, P> v = read_moments<STATES, P>(x.v, row, i, count, maps.map[0]);
        Pack<float, P> w = read_some<SPLIT, P>(x, at, count);
        for (int k = 0; k < P; k++)
            w.v[k] = update(m.v[k], v.v[k], g.v[k], w.v[k], decay, row.rate);

        // Write.
        write_moments<STATES>(x.m, m, row, i, count, h, now.step, ROUND_M, maps.map[1]);
        write_moments<STATES>(x.v, v, row, i, count, h, now.step, ROUND_V, maps.map[0]);
        write_some<SPLIT>(x, w, row, i, count, h, now.step);
    });
}

// SGD: each thread takes P elements at a time; blocks walk the table's chunks.
template <typename T, int P>
__global__ void sgd_update_kernel(T* weight, float* master, const float* grad,
                                  __grid_constant__ const TensorTable table, float lr, float decay,
                                  const StepScale* scale) {
    StepScale now = this_step(scale, 0);
    if (!now.finite) return;
    float rate = rate_of(now, lr);
    for_each_element<P>(table, [&](const TensorRow& row, size_t i, size_t count) {
        size_t at = row.offset + i;
        float row_decay = row.decay ? decay : 0;
        float row_rate = rate * row.rate;

        // Read, take the step, round to nearest.
        Pack<float, P> g = load_some<P>(grad + at, count);
        Pack<float, P> w = load_weights<P>(weight + at, master ? master + at : nullptr, count);
        Pack<T, P> rounded;
        for (int k = 0; k < P; k++) {
            w.v[k] = sgd_element(g.v[k], w.v[k], now.scale, row_rate, row_decay);
            rounded.v[k] = from_acc<T>(w.v[k]);
        }

        // Write.
        if (master) store_some(master + at, w, count);
        store_some(weight + at, rounded, count);
    });
}

// ----------------------------------------------------------------------------
// launchers

// The number of blocks: one a chunk, UPDATE_BLOCKS at most.
inline unsigned update_grid(const TensorTable& table) {
    return table.chunks < UPDATE_BLOCKS ? unsigned(table.chunks) : UPDATE_BLOCKS;
}

// The kernel for a bucket's formats. Only a bf16 is the upper half of a float, so no other type
// can have remainders.
template <typename T, int P, States STATES>
auto pick_adamw_kernel(const AdamWMemory<T>& x) {
    if constexpr (type_of<T>() == Type::BF16)
        if (x.masters == Masters::REMAINDER)
            return adamw_update_kernel<T, P, true, STATES>;
    return adamw_update_kernel<T, P, false, STATES>;
}

// The same for moments in bf16 or float; 8-bit moments have a launch of their own below.
template <typename T, int P>
auto pick_adamw_kernel(const AdamWMemory<T>& x) {
    bool narrow = x.states == States::BF16;
    return narrow ? pick_adamw_kernel<T, P, States::BF16>(x)
                  : pick_adamw_kernel<T, P, States::FLOAT>(x);
}

// One launch for each 40 tensors.
template <typename T>
void adamw_update(const AdamWMemory<T>& x, const TensorRow* rows, size_t count, AdamW h,
                  const StepScale* scale, cudaStream_t stream) {
    // Treat remainders as floats in this test: four of them are 8 bytes, so what is aligned for
    // four floats is aligned for them too.
    const float* master = static_cast<const float*>(x.master);
    for_each_table(rows, count, [&](const TensorTable& table, size_t) {
        // Take four elements at a time where all are aligned: 16 bytes of everything but
        // a 16-bit weight.
        const float *m = static_cast<const float*>(x.m), *v = static_cast<const float*>(x.v);
        bool aligned = can_vectorize<float>(0, x.weight, master, x.grad, m, v);
        bool vector = aligned && rows_aligned<4>(table);

        // A warp reads a block of 256 codes with 8 a lane, so every tensor must start at
        // a whole block.
        if (x.states == States::EIGHT_BIT) {
            LLMC_CHECK(aligned && rows_aligned<int(STATE_BLOCK)>(table),
                       "moments in 8 bits: tensors start at multiples of 256 elements");
            return launch(pick_adamw_kernel<T, 8, States::EIGHT_BIT>(x), update_grid(table),
                          UPDATE_THREADS, 0, stream, x, table, h, scale);
        }
        launch(vector ? pick_adamw_kernel<T, 4>(x) : pick_adamw_kernel<T, 1>(x),
               update_grid(table), UPDATE_THREADS, 0, stream, x, table, h, scale);
    });
}

// One launch for each 40 tensors.
template <typename T>
void sgd_update(T* weight, float* master, const float* grad, const TensorRow* rows, size_t count,
                float lr, float decay, const StepScale* scale, cudaStream_t stream) {
    for_each_table(rows, count, [&](const TensorTable& table, size_t) {
        // Four elements at a time, as in AdamW's launcher.
        bool vector = can_vectorize<float>(0, weight, master, grad) && rows_aligned<4>(table);
        launch(vector ? sgd_update_kernel<T, 4> : sgd_update_kernel<T, 1>,
               update_grid(table), UPDATE_THREADS, 0, stream,
               weight, master, grad, table, lr, decay, scale);
    });
}
#endif

// ----------------------------------------------------------------------------
// everything in float, as most callers have it; one tensor is a table of one row

// A table of tensors.
template <typename T, typename S>
void adamw_update(T* weight, float* master,                       // a bucket's; master or null
                  const acc_t<T>* grad, acc_t<T>* m, acc_t<T>* v, // the bucket's
                  const TensorRow* rows, size_t count,            // (count)
                  AdamW h, const StepScale* scale, S where) {
    AdamWMemory<T> x = {weight, master, grad, m, v};
    adamw_update(x, rows, count, h, scale, where);
}

// One tensor.
template <typename T, typename S>
void adamw_update(T* weight, float* master, const acc_t<T>* grad, acc_t<T>* m, acc_t<T>* v,
                  size_t n, AdamW h, const StepScale* scale, S where) {
    TensorRow row = {0, n};
    adamw_update(weight, master, grad, m, v, &row, 1, h, scale, where);
}

// One tensor.
template <typename T, typename S>
void sgd_update(T* weight, float* master, const acc_t<T>* grad, size_t n, float lr, float decay,
                const StepScale* scale, S where) {
    TensorRow row = {0, n};
    sgd_update(weight, master, grad, &row, 1, lr, decay, scale, where);
}

} // namespace llmc
