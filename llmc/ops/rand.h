// rand.h - random numbers as functions of (seed, stream, index): Philox4x32-10 - Salmon, SC'11
//   Counter-based: there is no state. A number depends on its seed, stream and index
//   alone, so initial weights, data order, samples and stochastic rounding depend on
//   neither rank nor history.
//   key = the seed's two words
//   counter = {index low, index high, hash low, hash high},   hash = FNV-1a 64 of the stream's name
//   To copy: this file and types.h.
#pragma once
#include <string>
#include "types.h"

namespace llmc {

// FNV-1a, 64 bits: turns the name of a stream into a number.
inline uint64_t fnv1a(const std::string& name) {
    uint64_t h = 0xcbf29ce484222325;
    for (unsigned char c : name) h = (h ^ c) * 0x100000001b3;
    return h;
}

// One block of Philox: four random words.
struct RandomWords {
    uint32_t v[4];
    LLMC_HD uint32_t operator[](int i) const { return v[i]; }
};

// The four words of one counter.
LLMC_HD inline RandomWords random_block(uint64_t seed, uint64_t hash, uint64_t index) {
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    uint32_t c0 = uint32_t(index), c1 = uint32_t(index >> 32);
    uint32_t c2 = uint32_t(hash), c3 = uint32_t(hash >> 32);
    // Mix for ten rounds: two wide products, whose halves change places under a new key.
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = uint64_t(0xD2511F53) * c0;
        uint64_t p1 = uint64_t(0xCD9E8D57) * c2;
        c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
        c1 = uint32_t(p1);
        c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
        c3 = uint32_t(p0);
        // Step the keys by the golden ratio and by sqrt(3) - 1, as fractions of 2^32.
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return {{c0, c1, c2, c3}};
}

// A number in [0, 1). It has 32 random bits, so every value is a multiple of 2^-32.
inline double uniform(uint64_t seed, uint64_t hash, uint64_t i) {
    return random_block(seed, hash, i)[0] * 0x1p-32;
}

// Four normal numbers by Box-Muller: block k makes elements 4k .. 4k+3 of the stream.
inline void normal_block(double* out, // (4)
                         uint64_t seed, uint64_t hash, uint64_t block) {
    RandomWords x = random_block(seed, hash, block);
    for (int pair = 0; pair < 2; pair++) {
        // Adding 1 keeps the logarithm finite.
        double r = std::sqrt(-2 * std::log((x[2 * pair] + 1.0) * 0x1p-32));
        double angle = 2 * M_PI * (x[2 * pair + 1] * 0x1p-32);
        out[2 * pair] = r * std::cos(angle);
        out[2 * pair + 1] = r * std::sin(angle);
    }
}

// Normal number i of the stream: mean 0, deviation 1. It throws away three of the block's four
// numbers; for many numbers use fill_normal().
inline double normal(uint64_t seed, uint64_t hash, uint64_t i) {
    double z[4];
    normal_block(z, seed, hash, i / 4);
    return z[i % 4];
}

// out[j] = std * normal number first + j. The first and the last block may reach outside.
inline void fill_normal(float* out, // (count)
                        uint64_t seed, uint64_t hash, uint64_t first, size_t count, float std) {
    if (count == 0) return;

    uint64_t from = first / 4, to = (first + count - 1) / 4; // blocks

    // Make whole blocks, and keep the numbers that are asked for.
    #pragma omp parallel for
    for (uint64_t block = from; block <= to; block++) {
        double z[4];
        normal_block(z, seed, hash, block);
        for (uint64_t i = block * 4; i < block * 4 + 4; i++)
            if (i >= first && i < first + count)
                out[i - first] = float(std * z[i - block * 4]);
    }
}

} // namespace llmc
