// elements.h - what elementwise kernels share: a thread takes a few neighbouring elements
//   To copy: this file, types.h and cuda_common.h.
#pragma once
#include "cuda_common.h"
#include "types.h"

#if LLMC_KERNELS
namespace llmc {

constexpr unsigned ELEMENT_THREADS = 256;
// The index of this thread's first element.
template <int P> __device__ size_t first_element() {
    return (size_t(blockIdx.x) * ELEMENT_THREADS + threadIdx.x) * P;
}

// Call f(P, blocks) for n elements; not at all if there are none.
template <typename T, typename F>
void pick_element_kernel(size_t n, bool vector, F f) {
    if (n == 0) return;
    auto pick = [&](auto P) { f(P, unsigned(ceil_div(n, ELEMENT_THREADS * P))); };
    vector ? pick(Int<VECTOR<T>>()) : pick(Int<1>());
}

// Load the P elements at p, or only the first `count` of them and zeros; one by one unless
// aligned. Both branches produce words, not elements: given elements, the compiler would unpack
// each load at once, and one load would wait for the other.
template <int P, typename T>
__device__ Pack<T, P> load_some(const T* p, size_t count, bool aligned = true) {
    typedef std::conditional_t<P * sizeof(T) % 4 == 0, uint32_t, T> Word;
    constexpr int N = int(P * sizeof(T) / sizeof(Word));
    Pack<Word, N> words;
    if (aligned && count >= P) {
        words = load<N>(reinterpret_cast<const Word*>(p));
    } else {
        Pack<T, P> x = {};
        for (int i = 0; i < P; i++)
            if (size_t(i) < count)
                x.v[i] = p[i];
        words = bits_as<Pack<Word, N>>(x);
    }
    return bits_as<Pack<T, P>>(words);
}

// Store the P elements at p, or only the first `count` of them.
template <int P, typename T>
__device__ void store_some(T* p, Pack<T, P> x, size_t count, bool aligned = true) {
    if (aligned && count >= P) return store(p, x);
    for (int i = 0; i < P; i++)
        if (size_t(i) < count)
            p[i] = x.v[i];
}

} // namespace llmc
#endif
