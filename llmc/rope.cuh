// rope.cuh - rotary position embedding, with Llama-3's scaling - arXiv:2104.09864, 2407.21783
//   Pairs (i, i + HS/2) of a head turn by the angle position * f_i, f_i = theta^(-2i/HS): Hugging
//   Face's order.
//   Llama 3.1 scales f by its wavelength w = 2 pi / f against the original context P0:
//     w < P0/high: f;   w > P0/low: f / factor;   between: (1-s) f / factor + s f,
//     s = (P0/w - low) / (high - low)
//   x, dx: rows n of heads (NH,HS), row n at n * row_stride   positions (N)
//   table (P, HS/2, 2): cos, sin
//   Contract: in place. backward turns the other way: the inverse, and so the gradient.
//             Bitwise repeatable.
//   Cost: memory-bound: reads and writes x.
//   To copy: this file and common.h.
#pragma once
#include "common.h"

inline double rope_frequency(size_t i, size_t HS, double theta, const RopeScaling& s) {
    double f = std::pow(theta, -2.0 * double(i) / double(HS));
    if (s.factor == 1) return f;
    double wavelength = 2 * M_PI / f, P0 = s.original_positions;
    if (wavelength < P0 / s.high_freq_factor) return f;
    if (wavelength > P0 / s.low_freq_factor) return f / s.factor;
    double smooth =
        (P0 / wavelength - s.low_freq_factor) / (double(s.high_freq_factor) - s.low_freq_factor);
    return (1 - smooth) * f / s.factor + smooth * f;
}

template <typename A>
void rope_table(A* table /*(P, HS/2, 2)*/, size_t P, size_t HS, double theta, RopeScaling scaling) {
    for (size_t i = 0; i < HS / 2; i++) {
        double f = rope_frequency(i, HS, theta, scaling);
        for (size_t p = 0; p < P; p++) {
            table[(p * (HS / 2) + i) * 2] = A(std::cos(double(p) * f));
            table[(p * (HS / 2) + i) * 2 + 1] = A(std::sin(double(p) * f));
        }
    }
}

// ----------------------------------------------------------------------------
// CPU

template <typename T>
void rope_rotate(T* x, const int* positions, const acc_t<T>* table, size_t N, size_t NH, size_t HS,
                 size_t row_stride, acc_t<T> direction) {
    size_t half = HS / 2;
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const acc_t<T>* turn = table + size_t(positions[n]) * HS;
        for (size_t h = 0; h < NH; h++) {
            T* head = x + n * row_stride + h * HS;
            for (size_t i = 0; i < half; i++) {
                acc_t<T> a = to_acc(head[i]), b = to_acc(head[i + half]), c = turn[2 * i],
                         s = direction * turn[2 * i + 1];
                head[i] = from_acc<T>(a * c - b * s);
                head[i + half] = from_acc<T>(b * c + a * s);
            }
        }
    }
}

template <typename T>
void rope_forward(T* x, const int* positions, const acc_t<T>* table, size_t N, size_t NH, size_t HS,
                  size_t row_stride, Cpu) {
    rope_rotate(x, positions, table, N, NH, HS, row_stride, acc_t<T>(1));
}

template <typename T>
void rope_backward(T* dx, const int* positions, const acc_t<T>* table, size_t N, size_t NH,
                   size_t HS, size_t row_stride, Cpu) {
    rope_rotate(dx, positions, table, N, NH, HS, row_stride, acc_t<T>(-1));
}

// ----------------------------------------------------------------------------
// CUDA kernels

#if KERNELS

// A block a row; a thread takes P pairs of a head at a time.
template <typename T, int P>
__global__ void rope_kernel(T* x, const int* positions, const float* table, unsigned NH,
                            unsigned HS, size_t row_stride, float direction) {
    const float* turn = table + size_t(positions[blockIdx.x]) * HS;
    T* row = x + blockIdx.x * row_stride;
    unsigned half = HS / 2, packs = half / P; // of a head
    for (unsigned k = threadIdx.x; k < NH * packs; k += blockDim.x) {
        unsigned i = k % packs * P;
        T* head = row + k / packs * HS + i;
        Pack<T, P> a = load<P>(head), b = load<P>(head + half);
        for (int j = 0; j < P; j++) {
            Pack<float, 2> angle = load<2>(turn + 2 * (i + j)); // cos, sin
            float u = to_float(a.v[j]), v = to_float(b.v[j]), c = angle.v[0],
                  s = direction * angle.v[1];
            a.v[j] = from_acc<T>(u * c - v * s);
            b.v[j] = from_acc<T>(v * c + u * s);
        }
        store(head, a), store(head + half, b);
    }
}

// ----------------------------------------------------------------------------
// launchers

template <typename T>
void rope_rotate(T* x, const int* positions, const float* table, size_t N, size_t NH, size_t HS,
                 size_t row_stride, float direction, cudaStream_t stream) {
    if (N == 0) return;
    auto rotate = [&](auto P) {
        size_t work = NH * (HS / 2 / P), threads = work < 256 ? round_up(work, 32) : 256;
        launch(rope_kernel<T, P>, unsigned(N), unsigned(threads), 0, stream, x, positions, table,
               unsigned(NH), unsigned(HS), row_stride, direction);
    };
    bool vector = can_vectorize<T>(HS / 2, x) && row_stride % VECTOR<T> == 0;
    vector ? rotate(Int<VECTOR<T>>()) : rotate(Int<1>());
}

template <typename T>
void rope_forward(T* x, const int* positions, const float* table, size_t N, size_t NH, size_t HS,
                  size_t row_stride, cudaStream_t stream) {
    rope_rotate(x, positions, table, N, NH, HS, row_stride, 1.0f, stream);
}

template <typename T>
void rope_backward(T* dx, const int* positions, const float* table, size_t N, size_t NH, size_t HS,
                   size_t row_stride, cudaStream_t stream) {
    rope_rotate(dx, positions, table, N, NH, HS, row_stride, -1.0f, stream);
}
#endif
