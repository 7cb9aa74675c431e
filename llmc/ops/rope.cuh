// rope.cuh - rotary position embedding and its scalings - arXiv:2104.09864, 2407.21783, 2309.00071
//   A head has HS channels. Channels i and i + HS/2 form a pair (Hugging Face's order), which is
//   rotated by the angle position * f_i,   f_i = theta^(-2i/HS).
//   Llama 3.1 scales f by its wavelength w = 2 pi / f against the original context P0:
//     w < P0/high: f;   w > P0/low: f / factor;   between: (1-s) f / factor + s f,
//     s = (P0/w - low) / (high - low)
//   YaRN blends by the pair's index instead: a pair that makes beta_fast rotations or more within
//   P0 positions keeps f, one that makes beta_slow or fewer gets f / factor. It also multiplies
//   cos and sin by its attention factor.
//   Linear scaling: f / factor.
//   Half (modded-nanogpt): of the pairs i the first half turn, HS/4 of them, by
//   f_i = theta^(-i / (HS/4 - 1)), and the others not at all.
//   transposed: each pair turns by the opposite angle.
//   x, dx: rows n of heads (NH,HS), row n at n * row_stride   positions (N)
//   table (P, HS/2, 2): cos, sin
//   A head may be longer than its HS rotated channels; the others pass unchanged (RopeHeads).
//   DeepSeek's pairs are neighbours, (2i, 2i+1), and rotate by the same angles.
//   Contract: in place. backward rotates the other way, which is the gradient.
//             Bitwise repeatable.
//   Cost: memory-bound: reads and writes x. Pairs of neighbours are loaded as single elements.
//   To copy: this file, types.h and cuda_common.h.
#pragma once
#include <algorithm>
#include "cuda_common.h"
#include "types.h"

namespace llmc {

// The three ways to stretch frequencies for a longer context, and the half that is no scaling.
enum class RopeKind { LLAMA3, LINEAR, YARN, HALF };

// How a model scales its rotary frequencies; a part of the model's shape.
struct RopeScaling {
    float factor = 1; // 1: no scaling
    // Llama 3: wavelengths over original_positions / low_freq_factor are stretched in full, those
    // under original_positions / high_freq_factor not at all.
    float low_freq_factor = 1;
    float high_freq_factor = 4;
    // The context length that the model was trained for before its frequencies were scaled.
    int original_positions = 8192;
    RopeKind kind = RopeKind::LLAMA3;
    // YaRN counts rotations within that context: above beta_fast a pair is not stretched, below
    // beta_slow it is stretched in full.
    float beta_fast = 32, beta_slow = 1;
    bool truncate = true;       // round the blend's limits to whole pairs
    float attention_factor = 1; // multiplies cos and sin
    bool transposed = false;    // pairs turn the other way
};

// Whether the scaling changes anything.
inline bool scales(const RopeScaling& s) { return s.factor != 1 || s.attention_factor != 1; }

// The fraction of pair i that YaRN stretches: 0 keeps its frequency, 1 divides it by the factor.
inline double yarn_stretched(size_t i, size_t HS, double theta, const RopeScaling& s) {
    // The index, a real number, of the pair that makes this many rotations in the original context.
    auto pair_of = [&](double turns) {
        return double(HS) * std::log(s.original_positions / (turns * 2 * M_PI)) /
               (2 * std::log(theta));
    };
    double low = pair_of(s.beta_fast);
    double high = pair_of(s.beta_slow);
    if (s.truncate) {
        low = std::floor(low);
        high = std::ceil(high);
    }

    // Rise linearly from 0 to 1 between the two indices.
    low = std::max(low, 0.0);
    high = std::min(high, double(HS) - 1);
    if (low == high) high += 0.001;
    return std::clamp((double(i) - low) / (high - low), 0.0, 1.0);
}

// The fraction of a frequency that Llama 3.1 stretches, 0 to 1.
inline double llama3_stretched(double f, const RopeScaling& s) {
    double wavelength = 2 * M_PI / f;
    double P0 = s.original_positions;

    // Short waves stay, long waves are stretched, those in between are blended.
    if (wavelength < P0 / s.high_freq_factor) return 0;
    if (wavelength > P0 / s.low_freq_factor) return 1;
    return 1 - (P0 / wavelength - s.low_freq_factor) /
                   (double(s.high_freq_factor) - s.low_freq_factor);
}

// The frequency f_i of pair i, scaled, in radians a position.
inline double rope_frequency(size_t i, size_t HS, double theta, const RopeScaling& s) {
    // Half of the pairs spread over all frequencies from 1 to 1 / theta.
    size_t turning = HS / 4;
    if (s.kind == RopeKind::HALF && i >= turning) return 0;
    if (s.kind == RopeKind::HALF)
        return std::pow(theta, -double(i) / double(std::max(turning, size_t(2)) - 1));

    // Usually each pair turns by its own share of a power of theta.
    double f = std::pow(theta, -2.0 * double(i) / double(HS));
    if (s.factor == 1) return f;
    double stretched = s.kind == RopeKind::LINEAR ? 1
                       : s.kind == RopeKind::YARN ? yarn_stretched(i, HS, theta, s)
                                                  : llama3_stretched(f, s);
    return stretched * f / s.factor + (1 - stretched) * f;
}

// Fill the table of angles. The host makes it once, in double, and rounds at the end.
template <typename A>
void rope_table(A* table, // (P, HS/2, 2): cos, sin
                size_t P, size_t HS, double theta, RopeScaling scaling) {
    double size = scaling.attention_factor;
    double sign = scaling.transposed ? -1 : 1; // of the angle: cos is even
    for (size_t i = 0; i < HS / 2; i++) {
        double f = rope_frequency(i, HS, theta, scaling);
        // In float an angle near position 100,000 would be off by up to 0.004 radians.
        for (size_t p = 0; p < P; p++) {
            table[(p * (HS / 2) + i) * 2] = A(std::cos(double(p) * f) * size);
            table[(p * (HS / 2) + i) * 2 + 1] = A(std::sin(double(p) * f) * size * sign);
        }
    }
}

// Heads to rotate, within rows that may hold more: q and k often lie beside v.
template <typename T> struct RopeHeads {
    T* rows = nullptr; // row n: (NH,HS) at n * row_stride
    size_t NH = 0, row_stride = 0;
    size_t head_stride = 0; // elements between heads; 0: HS, the whole head rotates
    bool neighbours = false; // pairs are (2i, 2i+1)
    const int* doc_start = nullptr; // (N) positions count from here; null: from 0
};

// The row of the table for row n.
template <typename T>
LLMC_HD inline size_t rope_place(const RopeHeads<T>& x, const int* positions, size_t n) {
    return size_t(positions[n] - (x.doc_start ? x.doc_start[n] : 0));
}

// ----------------------------------------------------------------------------
// CPU

// Rotate queries, then keys, forward (direction 1) or back (direction -1).
template <typename T>
void rope_rotate(RopeHeads<T> q, RopeHeads<T> k, const int* positions, // (N)
                 const acc_t<T>* table,                                // (P, HS/2, 2)
                 size_t N, size_t HS, acc_t<T> direction, Cpu) {
    typedef acc_t<T> A;
    size_t half = HS / 2;
    for (const RopeHeads<T>& x : {q, k}) {
        size_t head_stride = x.head_stride ? x.head_stride : HS;
        size_t step = x.neighbours ? 2 : 1;
        size_t apart = x.neighbours ? 1 : half;
        #pragma omp parallel for
        for (size_t n = 0; n < N; n++) {
            // All heads of a row are at the same position and share its cosines and sines.
            const A* turn = table + rope_place(x, positions, n) * HS; // (HS/2, 2)

            // Rotate the pairs of every head.
            for (size_t h = 0; h < x.NH; h++) {
                T* head = x.rows + n * x.row_stride + h * head_stride; // (HS)
                for (size_t i = 0; i < half; i++) {
                    T& first = head[i * step];
                    T& second = head[i * step + apart];
                    A a = to_acc(first);
                    A b = to_acc(second);
                    // The direction changes only the sign of the sine: cos is even.
                    A c = turn[2 * i];
                    A s = direction * turn[2 * i + 1];
                    first = from_acc<T>(a * c - b * s);
                    second = from_acc<T>(b * c + a * s);
                }
            }
        }
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if LLMC_KERNELS

// The grid is (rows, 2): blockIdx.y 0 has q, 1 has k. A thread takes P pairs of a head at a time.
template <typename T, int P>
__global__ void rope_kernel(RopeHeads<T> q, RopeHeads<T> k, const int* positions,
                            const float* table, unsigned HS, float direction) {
    RopeHeads<T> x = blockIdx.y ? k : q;
    const float* turn = table + rope_place(x, positions, blockIdx.x) * HS; // (HS/2, 2)
    unsigned NH = unsigned(x.NH);
    T* row = x.rows + blockIdx.x * x.row_stride; // (NH,HS)
    // Numbers within a row fit 32 bits, which divide much faster than 64.
    unsigned half = HS / 2;
    unsigned stride = x.head_stride ? unsigned(x.head_stride) : HS;
    unsigned packs = half / P; // of a head
    for (unsigned at = threadIdx.x; at < NH * packs; at += blockDim.x) {
        unsigned i = at % packs * P;
        T* head = row + at / packs * stride; // the pairs' firsts
        head += x.neighbours ? 2 * i : i;
        T* seconds = head + (x.neighbours ? 1 : half);

        // Load one pack of first and one of second channels: element j of both is pair i + j. Pairs
        // of neighbours come with P = 1.
        Pack<T, P> a = load<P>(head), b = load<P>(seconds);
        // Angles are float for 16-bit x too, so that rounding happens once, at the store.
        constexpr int ANGLES = P > 1 ? 2 : 1; // of a load: 16 bytes
        for (int j = 0; j < P; j += ANGLES) {
            Pack<float, 2 * ANGLES> angle = load<2 * ANGLES>(turn + 2 * (i + j)); // cos, sin, ..
            for (int i = 0; i < ANGLES; i++) {
                float u = to_float(a.v[j + i]);
                float v = to_float(b.v[j + i]);
                float c = angle.v[2 * i];
                float s = direction * angle.v[2 * i + 1];
                a.v[j + i] = from_acc<T>(u * c - v * s);
                b.v[j + i] = from_acc<T>(v * c + u * s);
            }
        }

        // Write both halves back.
        store(head, a);
        store(seconds, b);
    }
}

// ----------------------------------------------------------------------------
// launchers

// One launch for q and k. A row has as many threads as packs, in whole warps, 256 at most.
template <typename T>
void rope_rotate(RopeHeads<T> q, RopeHeads<T> k, const int* positions, const float* table, size_t N,
                 size_t HS, float direction, cudaStream_t stream) {
    // CUDA refuses a grid without blocks.
    if (N == 0) return;
    auto rotate = [&](auto P) {
        size_t work = std::max(q.NH, k.NH) * (HS / 2 / P); // packs of a row
        size_t threads = work < 256 ? round_up(work, 32) : 256;
        launch(rope_kernel<T, P>, dim3(unsigned(N), k.NH ? 2 : 1), unsigned(threads), stream, q, k,
               positions, table, unsigned(HS), direction);
    };
    // Packs are loaded from both halves of a head, so each half must start at a multiple of a pack.
    bool vector = !q.neighbours && can_vectorize<T>(HS / 2, q.rows, k.rows) &&
                  can_vectorize<float>(0, table) &&
                  q.row_stride % VECTOR<T> == 0 && k.row_stride % VECTOR<T> == 0 &&
                  q.head_stride % VECTOR<T> == 0 && k.head_stride % VECTOR<T> == 0;
    vector ? rotate(Int<VECTOR<T>>()) : rotate(Int<1>());
}
#endif

// ----------------------------------------------------------------------------
// anywhere

// Rotate queries and keys in one launch; k may be empty.
template <typename T, typename S>
void rope_forward(RopeHeads<T> q, RopeHeads<T> k, const int* positions, const acc_t<T>* table,
                  size_t N, size_t HS, S where) {
    rope_rotate(q, k, positions, table, N, HS, acc_t<T>(1), where);
}

// The gradient of a rotation is the opposite rotation, times the same attention factor.
template <typename T, typename S>
void rope_backward(RopeHeads<T> dq, RopeHeads<T> dk, const int* positions, const acc_t<T>* table,
                   size_t N, size_t HS, S where) {
    rope_rotate(dq, dk, positions, table, N, HS, acc_t<T>(-1), where);
}

} // namespace llmc
