// test_fp8.cpp - 8-bit floats: conversions, scales, matrices in blocks, linear layers, on the CPU
//   Expected values come from definitions in double: the nearest of all codes, floor(log2), a
//   block's maximum. Where the machine has CUDA's own header, they come from it too.
#include <gtest/gtest.h>
#include <omp.h>
#include <algorithm>
#include <bit>
#include <cfloat>
#include <random>
#include <vector>
#if __has_include("/usr/local/cuda/include/cuda_fp8.h")
#include "/usr/local/cuda/include/cuda_fp8.h"
#define WITH_CUDA_FP8
#endif
#include "../../llmc/ops/fp8_delayed.cuh"
#include "../../llmc/ops/fp8_sent.cuh"
#include "../../llmc/ops/linear.cuh"

using namespace llmc;

static float float_of(uint32_t u) { return std::bit_cast<float>(u); }
static uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }

// ----------------------------------------------------------------------------
// conversions

// A format by its definition: (mantissa or 1.mantissa) 2^exponent.
struct Definition {
    int mantissa, least, top; // bits, the least normal exponent, the code of the largest number
    double value(int code) const {
        int e = code >> mantissa, m = code & ((1 << mantissa) - 1);
        double fraction = std::ldexp(m, -mantissa);
        return e ? std::ldexp(1 + fraction, e - 1 + least) : std::ldexp(fraction, least);
    }
};
constexpr Definition E4M3 = {3, -6, 0x7e}, E5M2 = {2, -14, 0x7b}, E2M1 = {1, 0, 7};
static Definition definition(e4m3) { return E4M3; }
static Definition definition(e5m2) { return E5M2; }

// The code of |x| in a format without a largest number: the nearest code, and of two equally near
// the even one. Codes grow with values, so a caller whose x grows starts at its last answer.
static int nearest(const Definition& d, double x, int from) {
    int code = from;
    while (x > (d.value(code) + d.value(code + 1)) / 2) code++;
    bool tie = x == (d.value(code) + d.value(code + 1)) / 2;
    return tie && code % 2 ? code + 1 : code;
}

// Convert the floats with bits in [first, end), in both signs, and count wrong codes.
template <typename F> static size_t wrong_codes(uint32_t first, uint32_t end) {
    const Definition d = definition(F());
    size_t wrong = 0;
    int at = 0;

    // Want: the nearest code, cut at the format's end. A NaN is 0x7f.
    for (uint32_t u = first; u < end; u++) {
        float x = float_of(u);
        int want = 0x7f;
        if (x == x) {
            at = x > 1e9 ? d.top : nearest(d, x, u == first || at > 0 ? std::max(at - 1, 0) : 0);
            want = std::min(at, d.top);
        }

        // Convert, and ask CUDA's header too where there is one.
        for (uint32_t sign : {0u, 0x80u}) {
            uint8_t got = to_fp8<F>(float_of(u | sign << 24)).bits;
            wrong += got != (x == x ? want | int(sign) : 0x7f);
#if defined(WITH_CUDA_FP8)
            auto kind = std::is_same_v<F, e4m3> ? __NV_E4M3 : __NV_E5M2;
            float signed_x = float_of(u | sign << 24);
            wrong += got != __nv_cvt_float_to_fp8(signed_x, __NV_SATFINITE, kind);
#endif
        }
    }
    return wrong;
}

// Check the first `take` of every `step` bit patterns.
template <typename F> static size_t wrong_codes_of_all(uint64_t step, uint64_t take) {
    size_t wrong = 0;
    #pragma omp parallel for reduction(+ : wrong) schedule(dynamic)
    for (uint64_t u = 0; u < uint64_t(1) << 31; u += step)
        wrong += wrong_codes<F>(uint32_t(u), uint32_t(u + take));
    return wrong;
}

TEST(Fp8, CodesStandForTheirDefinition) {
    for (int code = 0; code < 128; code++)
        for (int sign : {0, 1}) {
            uint8_t bits = uint8_t(code | sign << 7);
            float a = to_float(e4m3{bits}), b = to_float(e5m2{bits});
            EXPECT_EQ(std::signbit(a), bool(sign));
            EXPECT_EQ(std::signbit(b), bool(sign));
            if (code <= E4M3.top)
                EXPECT_EQ(std::fabs(a), E4M3.value(code)) << code;
            else
                EXPECT_TRUE(std::isnan(a));
            if (code <= E5M2.top)
                EXPECT_EQ(std::fabs(b), E5M2.value(code)) << code;
            else
                EXPECT_TRUE(code == 0x7c ? std::isinf(b) : std::isnan(b)) << code;

            // Every code converts back to itself, but all NaNs become one, and infinity saturates.
            EXPECT_EQ(to_fp8<e4m3>(a).bits, a == a ? bits : 0x7f);
            EXPECT_EQ(to_fp8<e5m2>(b).bits, b != b ? 0x7f : std::isinf(b) ? bits - 1 : bits);
        }
    EXPECT_EQ(E4M3.value(E4M3.top), 448);
    EXPECT_EQ(E5M2.value(E5M2.top), 57344);
}

TEST(Fp8, ASampleOfFloatsRoundsToTheNearestCode) {
    EXPECT_EQ(wrong_codes_of_all<e4m3>(1 << 20, 1 << 10), 0u); // 2^21 floats and their negatives
    EXPECT_EQ(wrong_codes_of_all<e5m2>(1 << 20, 1 << 10), 0u);
}

// `make check` runs this: 2^32 floats, both formats.
TEST(Fp8, DISABLED_EveryFloatRoundsToTheNearestCode) {
    EXPECT_EQ(wrong_codes_of_all<e4m3>(1 << 20, 1 << 20), 0u);
    EXPECT_EQ(wrong_codes_of_all<e5m2>(1 << 20, 1 << 20), 0u);
}

// The middles between codes and the floats beside them, which a sample might miss.
template <typename F> static void expect_ties_to_even() {
    Definition d = definition(F());
    for (int code = 0; code <= d.top; code++) {
        uint32_t middle = bits_of(float((d.value(code) + d.value(code + 1)) / 2));
        EXPECT_EQ(wrong_codes<F>(middle - 1, middle + 2), 0u) << code;
    }
}

TEST(Fp8, TiesGoToTheEvenCode) {
    expect_ties_to_even<e4m3>();
    expect_ties_to_even<e5m2>();

    // Zero, subnormal numbers, the largest float, infinity and NaN.
    for (uint32_t u : {0u, 1u, 0x7fffffu, 0x800000u, 0x7f7fffffu, 0x7f800000u, 0x7f800001u}) {
        EXPECT_EQ(wrong_codes<e4m3>(u, u + 1), 0u) << std::hex << u;
        EXPECT_EQ(wrong_codes<e5m2>(u, u + 1), 0u) << std::hex << u;
    }

    // The ends of the formats.
    EXPECT_EQ(to_fp8<e4m3>(std::nextafter(464.0f, 500.0f)).bits, 0x7e); // nearer to 480
    EXPECT_EQ(to_fp8<e5m2>(-INFINITY).bits, 0xfb);
}

// ----------------------------------------------------------------------------
// scales

// The largest power of two that a float holds and that keeps amax within the format.
static double scale_of(double amax, double top) {
    if (!(amax > 0) || std::isinf(amax)) return 1;
    double e = std::floor(std::log2(top / amax));
    while (std::ldexp(amax, int(e) + 1) <= top) e++; // log2 rounds
    while (std::ldexp(amax, int(e)) > top) e--;
    return std::ldexp(1, int(std::min(e, 127.0)));
}

TEST(Fp8, ScalesAreTheLargestPowersOfTwoThatFit) {
    auto expect_scales = [](uint32_t u) {
        double amax = float_of(u);
        EXPECT_EQ(double(fp8_scale<e4m3>(u)), scale_of(amax, 448)) << std::hex << u;
        EXPECT_EQ(double(fp8_scale<e5m2>(u)), scale_of(amax, 57344)) << std::hex << u;
    };
    for (uint64_t u = 0; u < 0x80000000; u += 4099) expect_scales(uint32_t(u));

    // The scale falls where the mantissa passes 1.75. Subnormal numbers have the largest scale.
    for (uint32_t e = 0; e < 255; e++)
        for (uint32_t m : {0u, 0x5fffffu, 0x600000u, 0x600001u, 0x7fffffu})
            expect_scales(e << 23 | m);
    for (uint32_t u : {0u, 1u, 0x7fffffu, 0x7f7fffffu, 0x7f800000u, 0x7f800001u, 0x7fffffffu})
        expect_scales(u);
}

// ----------------------------------------------------------------------------
// matrices

// The number of an element's scale, by the definition of blocks.
static size_t place_of(size_t r, size_t c, size_t rows, size_t cols, Fp8Blocks b) {
    size_t across = (cols + 511) / 512 * 4, down = (rows + 511) / 512 * 4;
    if (b == Fp8Blocks::MX_COLUMNS) return place_of(c, r, cols, rows, Fp8Blocks::MX_ROWS);
    if (b == Fp8Blocks::MX_ROWS) // four scales of a row lie together, of rows 32 apart next
        return (r / 128 * ((cols + 127) / 128) + c / 128) * 512 + r % 32 * 16 + r / 32 % 4 * 4 +
               c / 32 % 4;
    return b == Fp8Blocks::ROWS        ? c / 128 * rows + r
           : b == Fp8Blocks::COLUMNS   ? r / 128 * cols + c
           : b == Fp8Blocks::SQUARES   ? r / 128 * across + c / 128
           : b == Fp8Blocks::SQUARES_T ? c / 128 * down + r / 128
                                       : 0;
}

// Numbers of all sizes, with a row of zeros and one of subnormals; perhaps infinities and NaNs.
static std::vector<bf16> mixed_matrix(size_t rows, size_t cols, uint64_t seed, bool finite) {
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal;
    std::vector<bf16> x(rows * cols);
    for (bf16& v : x) v = from_acc<bf16>(float(normal(random) * std::exp(3 * normal(random))));
    for (size_t c = 0; c < cols && rows > 2; c++) x[2 * cols + c] = {uint16_t(c % 2 ? 0x8000 : 0)};
    for (size_t c = 0; c < cols && rows > 1; c++) x[cols + c] = {uint16_t(random() % 0x80)};
    for (int i = 0; i < 3 && !finite; i++) {
        x[random() % x.size()] = from_acc<bf16>(INFINITY);
        x[random() % x.size()] = from_acc<bf16>(-NAN);
    }
    return x;
}

// Quantise a matrix in all three forms, and hold each element against the definition.
template <typename F> static void expect_quantised(size_t rows, size_t cols, Fp8Blocks blocks) {
    double top = definition(F()).value(definition(F()).top);
    for (bool finite : {true, false}) {
        auto x = mixed_matrix(rows, cols, rows * 1000 + cols, finite);
        std::vector<F> codes(x.size(), F{0x55}), transposed(x.size(), F{0x55});
        std::vector<bf16> values(x.size()), values_t(x.size());
        std::vector<float> inverse(fp8_scales(rows, cols, blocks), -1);
        std::vector<uint8_t> exponents(inverse.size(), 7);
        bool mx = is_mx(blocks);
        void* scales = mx ? (void*)exponents.data() : inverse.data();
        uint32_t amax = 0;

        fp8_quantise<F, F>(codes.data(), nullptr, scales, x.data(), &amax, rows, cols, blocks,
                           Cpu{});
        fp8_quantise<F, F>(nullptr, transposed.data(), nullptr, x.data(), &amax, rows, cols, blocks,
                           Cpu{});
        fp8_quantise<F>(values.data(), values_t.data(), nullptr, x.data(), &amax, rows, cols,
                        blocks, Cpu{});

        // Each block's largest number, in double. A number that is not finite makes it infinite.
        std::vector<double> most(inverse.size(), -1);
        for (size_t i = 0; i < x.size(); i++) {
            double v = std::fabs(to_float(x[i]));
            double& m = most[place_of(i / cols, i % cols, rows, cols, blocks)];
            m = std::isfinite(v) ? std::max(m, v) : INFINITY;
        }

        // A scale of no block stays as it was, but MX's byte is 0, as for zeros: a GPU reads it.
        for (size_t b = 0; b < most.size(); b++) {
            if (mx) inverse[b] = float(std::ldexp(1, exponents[b] - 127));
            double want = most[b] >= 0 ? 1 / scale_of(most[b], top) : -1;
            if (mx && most[b] <= 0) want = std::ldexp(1, -127);
            ASSERT_EQ(inverse[b], float(want)) << b;
        }

        for (size_t i = 0; i < x.size(); i++) {
            size_t r = i / cols, c = i % cols, block = place_of(r, c, rows, cols, blocks);
            double scale = scale_of(most[block], top);
            float v = to_float(x[i]);
            F want = std::isinf(v) ? F{0x7f} : to_fp8<F>(float(v * scale));
            ASSERT_EQ(codes[i].bits, want.bits) << r << " " << c;
            ASSERT_EQ(transposed[c * rows + r].bits, want.bits) << r << " " << c;

            // A code's value is exact in bf16, unless the block holds an infinity. Infinities and
            // NaNs show in the values.
            float value = float(double(to_float(want)) / scale);
            uint16_t bits = from_acc<bf16>(value).bits;
            ASSERT_EQ(values[i].bits, bits) << r << " " << c;
            ASSERT_EQ(values_t[c * rows + r].bits, bits) << r << " " << c;
            bool exact = std::isinf(most[block]) || to_float(bf16{bits}) == value;
            bool shows = std::isfinite(v) || !std::isfinite(to_float(values[i]));
            ASSERT_TRUE(exact && shows) << r << " " << c;
        }
    }
}

// One thread takes all tiles of a matrix, or five share them.
TEST(Fp8, MatricesInBlocksOfEveryKind) {
    for (int kind = 0; kind <= int(Fp8Blocks::MX_COLUMNS); kind++)
        for (int threads : {1, 5})
            for (auto [rows, cols] :
                 {std::pair(1, 1), {3, 129}, {128, 128}, {130, 40}, {257, 131}, {20, 700}}) {
                SCOPED_TRACE(testing::Message() << kind << " " << rows << "x" << cols);
                omp_set_num_threads(threads);
                Fp8Blocks blocks = Fp8Blocks(kind);
                expect_quantised<e4m3>(size_t(rows), size_t(cols), blocks);
                expect_quantised<e5m2>(size_t(rows), size_t(cols), blocks);
            }
    omp_set_num_threads(2);
}

// Cut a matrix anywhere, cast each part with maxima of all parts, and compare with a cast of the
// whole. Numbers just above half of a block's top round down to it, so that the maximum of the
// values would choose another scale: casting the values again must change none all the same.
TEST(Fp8, PartsOfAMatrixHaveTheCodesOfTheWhole) {
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    for (auto [rows, cols] : {std::pair<size_t, size_t>{1, 1}, {3, 200}, {129, 130}, {260, 384}})
        for (bool whole : {false, true})
            for (int special = 0; special < 3; special++) {
                // Draw numbers over many powers of two, or with a few that are not finite.
                size_t n = rows * cols;
                std::vector<bf16> x(n);
                for (bf16& v : x)
                    v = from_acc<bf16>(normal(random) * std::exp2(float(random() % 24) - 30));
                if (special == 1) x[random() % n] = from_acc<bf16>(INFINITY);
                if (special == 2)
                    for (bf16& v : x) // 1.75390625 2^-k rounds to 1.75 2^-k
                        v = from_acc<bf16>(0x1.c1p-3f * std::exp2(-float(random() % 9)));

                // Want: the values of the whole matrix's codes.
                Fp8Blocks blocks = whole ? Fp8Blocks::WHOLE : Fp8Blocks::SQUARES;
                std::vector<bf16> want(n), values(n), again(n);
                uint32_t word = 0;
                fp8_quantise<e4m3, bf16>(want.data(), nullptr, nullptr, x.data(), &word, rows, cols,
                                         blocks, Cpu{});

                // Cut it at three places, and cast the parts.
                std::vector<size_t> cuts = {0, random() % (n + 1), random() % (n + 1), n};
                std::sort(cuts.begin(), cuts.end());
                std::vector<uint32_t> maxima(fp8_piece_blocks(rows, cols, whole));
                std::vector<e4m3> codes(n);
                auto each = [&](auto f) {
                    for (size_t i = 0; i + 1 < cuts.size(); i++)
                        f(Fp8Piece{rows, cols, cuts[i], cuts[i + 1] - cuts[i], whole}, cuts[i]);
                };
                each([&](const Fp8Piece& p, size_t at) {
                    fp8_piece_maxima(maxima.data(), x.data() + at, p, Cpu{});
                });
                each([&](const Fp8Piece& p, size_t at) {
                    fp8_piece_cast(codes.data() + at, x.data() + at, maxima.data(), p, Cpu{});
                });
                each([&](const Fp8Piece& p, size_t at) {
                    fp8_piece_cast(values.data() + at, codes.data() + at, maxima.data(), p,
                                     Cpu{});
                });

                // Compare, and cast the values once more.
                auto same = [&](const std::vector<bf16>& got) {
                    return memcmp(got.data(), want.data(), n * sizeof(bf16)) == 0;
                };
                EXPECT_TRUE(same(values)) << rows << " " << cols << " " << whole << special;
                fp8_quantise<e4m3, bf16>(again.data(), nullptr, nullptr, values.data(), &word, rows,
                                         cols, blocks, Cpu{});
                EXPECT_TRUE(same(again)) << rows << " " << cols << " " << whole << special;
            }
}

// ----------------------------------------------------------------------------
// NVFP4

TEST(Nvfp4, CodesAreTheNearestOrRightOnAverage) {
    const int draws = 64;
    for (double x = 0; x < 8; x += 0x1p-7) {
        int want = std::min(nearest(E2M1, x, 0), E2M1.top);
        ASSERT_EQ(e2m1_code(to_fp8<e2m1>(float(x))), unsigned(want)) << x;
        ASSERT_EQ(e2m1_value(unsigned(want) | 8), -E2M1.value(want)) << x;

        // Evenly spread random numbers: the mean is x to a draw's share of the largest step.
        double sum = 0;
        for (int i = 0; i < draws; i++) {
            float near = e2m1_stochastic(float(-x), float(i) / draws);
            double value = -e2m1_value(e2m1_code(to_fp8<e2m1>(near)));
            ASSERT_LT(std::fabs(value - std::min(x, 6.0)), x < 2 ? 0.5 : x < 4 ? 1 : 2) << x;
            sum += value;
        }
        ASSERT_NEAR(sum / draws, std::min(x, 6.0), 2.0 / draws) << x;
    }
}

// A matrix as an operand. Bits of kind: turned, in squares, transformed, stochastic.
static Nvfp4 nvfp4_operand(size_t rows, size_t cols, int kind) {
    bool turned = kind & 1;
    return {turned ? cols : rows, turned ? rows : cols, turned ? 1 : cols, turned ? cols : 1,
            bool(kind & 2), bool(kind & 4), bool(kind & 8)};
}

// An operand (outer,K) by the definition: what is rounded, each block's scale, and what is left.
struct Nvfp4Want {
    std::vector<double> x, left; // (outer,K)
    std::vector<uint8_t> scales; // (outer, K/16)
    size_t across;
    double factor;
};
static Nvfp4Want nvfp4_want(const std::vector<bf16>& x, const Nvfp4& how) {
    size_t outer = how.outer, K = how.K, across = (K + 15) / 16;
    Nvfp4Want want = {std::vector<double>(outer * K), std::vector<double>(outer * K),
                      std::vector<uint8_t>(outer * across), across, 1};
    double largest = 0;
    for (bf16 v : x) largest = std::max(largest, std::fabs(double(to_float(v))));
    double top = how.hadamard ? 672 : 2688;
    if (largest > 0) want.factor = std::exp2(std::min(std::floor(std::log2(top / largest)), 112.0));

    // A transform is Sylvester's matrix, with a sign for each number; its rows have length 1.
    auto number = [&](size_t o, size_t k) { return double(to_float(x[o * how.row + k * how.column])); };
    std::vector<double> most(outer * across);
    auto block = [&](size_t o, size_t k) {
        return (how.squares ? o / 16 * 16 : o) * across + k / 16;
    };
    for (size_t o = 0; o < outer; o++)
        for (size_t k = 0; k < K; k++) {
            size_t first = k / 16 * 16;
            double v = how.hadamard && first + 16 <= K ? 0 : number(o, k);
            for (size_t j = first; how.hadamard && first + 16 <= K && j < first + 16; j++) {
                int minus = std::popcount((k - first) & (j - first)) + (0x243f >> (j - first) & 1);
                v += number(o, j) * (minus % 2 ? -0.25 : 0.25);
            }
            want.x[o * K + k] = v;
            most[block(o, k)] = std::max(most[block(o, k)], std::fabs(v));
        }

    // A number's code counts the scale over the factor, in float.
    float factor = float(want.factor);
    for (size_t o = 0; o < outer; o++)
        for (size_t k = 0; k < K; k++) {
            e4m3 scale = to_fp8<e4m3>(float(most[block(o, k)]) * (factor / 6));
            want.scales[o * across + k / 16] = scale.bits;
            double size = to_float(scale), v = want.x[o * K + k];
            float steps = size > 0 ? float(std::fabs(v)) * (factor / float(size)) : 0;
            int code = std::min(nearest(E2M1, std::min(steps, 8.0f), 0), 7);
            want.left[o * K + k] = std::copysign(E2M1.value(code) * size / want.factor, v);
        }
    return want;
}

// Numbers over so few powers of two that a transform's float sums are exact, and a row of zeros.
static std::vector<bf16> near_numbers(size_t rows, size_t cols) {
    std::mt19937 random(unsigned(rows * 1000 + cols));
    std::vector<bf16> x(rows * cols);
    for (size_t i = 0; i < x.size(); i++)
        x[i] = from_acc<bf16>(i / cols == 2 ? 0 : std::ldexp(float(random() % 511) - 255,
                                                             -int(random() % 6) - 9));
    return x;
}

TEST(Nvfp4, MatricesAreTheDefinition) {
    for (auto [rows, cols] :
         {std::pair<size_t, size_t>{1, 1}, {5, 16}, {48, 80}, {144, 272}, {70, 131}})
        for (int kind = 0; kind < 8; kind++) {
            SCOPED_TRACE(testing::Message() << rows << "x" << cols << " " << kind);
            Nvfp4 how = nvfp4_operand(rows, cols, kind);
            auto x = near_numbers(rows, cols);
            size_t outer = how.outer, K = how.K;
            Nvfp4Want want = nvfp4_want(x, how);
            std::vector<bf16> values(x.size());
            Nvfp4Head head = {};
            nvfp4_quantise(values.data(), nullptr, &head, x.data(), how, Cpu{});
            EXPECT_EQ(double(head.inverse), 1 / want.factor);
            for (size_t i = 0; i < x.size(); i++)
                ASSERT_EQ(double(to_float(values[i / K * how.row + i % K * how.column])), want.left[i]) << i;

            // Codes stand for the values, and every scale beyond the matrix is 0.
            if (K % 16) continue;
            std::vector<uint64_t> codes(outer * K / 16);
            std::vector<uint8_t> scales(fp8_scales(
                rows, cols, kind & 1 ? Fp8Blocks::NVFP4_COLUMNS : Fp8Blocks::NVFP4_ROWS), 7);
            nvfp4_quantise(codes.data(), scales.data(), &head, x.data(), how, Cpu{});
            for (size_t i = 0; i < scales.size(); i++) {
                size_t tiles = (K + 63) / 64, t = i / 512;
                size_t o = t / tiles * 128 + i / 16 % 32 + i / 4 % 4 * 32;
                size_t k = t % tiles * 64 + i % 4 * 16;
                uint8_t wanted = how.has(o, k) ? want.scales[o * want.across + k / 16] : 0;
                ASSERT_EQ(scales[i], wanted) << i;
                for (size_t j = 0; how.has(o, k) && j < 16; j++) {
                    unsigned code = codes[(o * K + k) / 16] >> 4 * j & 15;
                    double value = e2m1_value(code) * double(to_float(e4m3{scales[i]}));
                    ASSERT_EQ(value / want.factor, want.left[o * K + k + j]) << o << " " << k;
                }
            }
        }
}

// An infinity makes its block NaN, or its square, and nothing else.
TEST(Nvfp4, NothingIsHidden) {
    for (bool squares : {false, true}) {
        auto x = near_numbers(32, 32);
        x[17 * 32 + 5] = from_acc<bf16>(-INFINITY);
        Nvfp4Head head = {};
        nvfp4_quantise(x.data(), nullptr, &head, x.data(), nvfp4_operand(32, 32, 2 * squares),
                       Cpu{});
        for (size_t i = 0; i < x.size(); i++) {
            bool inside = i % 32 < 16 && (squares ? i / 32 >= 16 : i / 32 == 17);
            ASSERT_EQ(std::isnan(to_float(x[i])), inside) << i;
        }
    }
}

// Gradients keep their mean: every number becomes a neighbour, and the sum is right to 5 sigma. A
// piece that is cut at multiples of 16 has the values of the whole.
TEST(Nvfp4, StochasticRoundingKeepsTheMeanInEveryLayout) {
    size_t rows = 512, cols = 256;
    auto x = near_numbers(rows, cols);
    Nvfp4 how = nvfp4_operand(rows, cols, 8);
    std::vector<bf16> values(x.size()), piece(x.size() / 2);
    Nvfp4Head head = {};
    nvfp4_quantise(values.data(), nullptr, &head, x.data(), how, Cpu{});
    Nvfp4Want nearest = nvfp4_want(x, how);
    double sum = 0, variance = 0, energy = 0;
    for (size_t i = 0; i < x.size(); i++) {
        double step = 2.25 * to_float(e4m3{nearest.scales[i / 16]}) / nearest.factor; // up by 1/8
        double error = std::fabs(double(to_float(values[i]))) - std::fabs(to_float(x[i]));
        ASSERT_LE(std::fabs(error), step) << i;
        sum += error, variance += error * error, energy += nearest.x[i] * nearest.x[i];
    }
    EXPECT_LT(std::fabs(sum), 5 * std::sqrt(variance));
    EXPECT_GT(std::sqrt(variance / energy), 0.12); // to nearest has 0.095

    // A factor of twice the whole's shifts exponents alone.
    auto half = std::vector<bf16>(x.begin() + long(x.size() / 2), x.end());
    nvfp4_quantise(piece.data(), nullptr, &head, half.data(),
                   nvfp4_operand(rows / 2, cols, 8), Cpu{});
    EXPECT_EQ(memcmp(piece.data(), &values[x.size() / 2], piece.size() * sizeof(bf16)), 0);
}

// The error of a quantised matrix, relative to its root mean square. The wanted figures come from a
// separate program. 2% is twenty times the change that another seed makes.
static double relative_error(const std::vector<float>& x, const std::vector<float>& values) {
    double error = 0, sum = 0;
    for (size_t i = 0; i < x.size(); i++) {
        error += std::pow(double(values[i]) - x[i], 2);
        sum += double(x[i]) * x[i];
    }
    return std::sqrt(error / sum);
}

TEST(Fp8, ErrorsAreThoseOfTheFormats) {
    std::mt19937_64 random(7);
    std::normal_distribution<double> normal;
    const size_t n = 1024;
    std::vector<float> x(n * n), values(n * n);
    for (float& v : x) v = float(normal(random));
    auto expect_error = [&](auto format, Fp8Blocks blocks, double want) {
        uint32_t amax = 0;
        fp8_quantise<decltype(format), float>(values.data(), nullptr, nullptr, x.data(), &amax, n, n,
                                              blocks, Cpu{});
        EXPECT_NEAR(relative_error(x, values), want, 0.02 * want) << int(blocks);
    };
    for (Fp8Blocks blocks :
         {Fp8Blocks::ROWS, Fp8Blocks::COLUMNS, Fp8Blocks::SQUARES, Fp8Blocks::WHOLE}) {
        expect_error(e4m3(), blocks, 0.02655);
        expect_error(e5m2(), blocks, 0.0528);
    }

    // NVFP4: to nearest, in squares, stochastically.
    for (auto [kind, want] : {std::pair(0, 0.095), {2, 0.111}, {8, 0.148}}) {
        Nvfp4Head head;
        nvfp4_quantise(values.data(), nullptr, &head, x.data(), nvfp4_operand(n, n, kind), Cpu{});
        EXPECT_NEAR(relative_error(x, values), want, 0.02 * want) << kind;
    }
}

// ----------------------------------------------------------------------------
// linear layers

// Round a number to the nearest code and back in double. One that is too large for its scale
// becomes the largest code.
static bf16 left_of(bf16 x, double scale, const Definition& d) {
    double v = to_float(x), size = std::min(std::fabs(v) * scale, d.value(d.top));
    return from_acc<bf16>(float(std::copysign(d.value(nearest(d, size, 0)) / scale, v)));
}

// The same of a matrix, with one scale a block.
static std::vector<bf16> left_of(const std::vector<bf16>& x, size_t rows, size_t cols,
                                 Fp8Blocks blocks, const Definition& d) {
    std::vector<double> most(fp8_scales(rows, cols, blocks));
    auto place = [&](size_t i) { return place_of(i / cols, i % cols, rows, cols, blocks); };
    for (size_t i = 0; i < x.size(); i++)
        most[place(i)] = std::max(most[place(i)], std::fabs(double(to_float(x[i]))));
    std::vector<bf16> left(x.size());
    for (size_t i = 0; i < x.size(); i++)
        left[i] = left_of(x[i], scale_of(most[place(i)], d.value(d.top)), d);
    return left;
}

// Scratch of exactly the planned size, poisoned. intact() says whether a byte
// outside it was written.
struct Scratch {
    Blas blas;
    std::vector<unsigned char> bytes;
    size_t at, n;
    explicit Scratch(size_t n) : bytes(n + 512, 0xff), n(n) {
        at = (256 - uintptr_t(bytes.data()) % 256) % 256;
        blas_scratch(blas, bytes.data() + at, n);
    }
    bool intact() const {
        bool same = blas.scratch_bytes == n;
        for (size_t i = 0; i < bytes.size(); i++)
            same = same && ((i >= at && i < at + n) || bytes[i] == 0xff);
        return same;
    }
};

struct LinearRun {
    std::vector<bf16> out, dinp;
    std::vector<float> dweight;
};
struct LinearOperandsOf { // the operands of one product
    std::vector<bf16> x, dy, w;
};

// The three products out, dinp and dweight, each from operands of its own. dinp starts
// as 1 and dweight as 2.
static LinearRun run_linear(const std::array<LinearOperandsOf, 3>& of, size_t N, size_t OC,
                            size_t IC, Fp8 fp8, bool accumulate, Fp8Late late = {}) {
    LinearRun run = {std::vector<bf16>(N * OC), std::vector<bf16>(N * IC, from_acc<bf16>(1)),
                     std::vector<float>(OC * IC, 2)};
    Scratch s(linear_scratch_bytes<bf16>(N, OC, IC, Cpu{}) + linear_fp8_bytes(N, OC, IC, fp8));
    auto weight = [&](const LinearOperandsOf& o) {
        Weight w = {const_cast<bf16*>(o.w.data()), Type::BF16, OC, IC, run.dweight.data(), nullptr,
                    fp8};
        w.late = late;
        return w;
    };

    const bf16* no_residual = nullptr;
    linear_forward(run.out.data(), of[0].x.data(), weight(of[0]), nullptr, no_residual, N, s.blas,
                   Cpu{});
    linear_backward_input(run.dinp.data(), of[1].dy.data(), weight(of[1]), N, accumulate, s.blas,
                          Cpu{});
    linear_backward_weight(weight(of[2]), nullptr, of[2].dy.data(), of[2].x.data(), N, accumulate,
                           s.blas, Cpu{});

    EXPECT_TRUE(s.intact());
    return run;
}

// Check the float dweight against exact sums of its operands. Double has no rounding here: the
// terms are products of two 4-bit numbers, and there are at most 2^17 of them.
static void expect_exact_sums(const LinearRun& run, const LinearOperandsOf& o, size_t N, size_t OC,
                              size_t IC) {
    for (size_t k = 0; k < OC * IC; k += 37) {
        double sum = 0, all = 0;
        for (size_t n = 0; n < N; n++) {
            double term = double(to_float(o.dy[n * OC + k / IC])) * to_float(o.x[n * IC + k % IC]);
            sum += term;
            all += std::fabs(term);
        }
        ASSERT_NEAR(run.dweight[k], sum, double(N) * 0x1p-24 * all) << k;
    }
}

// ----------------------------------------------------------------------------
// delayed scaling

// A run's state before its first step, and its bytes.
struct Late {
    Fp8Rule rule;
    std::vector<unsigned char> bytes;
    Fp8History h;
    Late(size_t slots, const Fp8Rule& rule)
        : rule(rule), bytes(fp8_history_bytes(slots, rule)),
          h(fp8_history_at(bytes.data(), slots, rule)) {}
};

// The rows that dev/golden/fp8_delayed.py prints: the scale after each step, as bits.
TEST(Fp8, DelayedScalesFollowTransformerEngine) {
    // The largest number of each step's tensor.
    const std::vector<double> events = {0, 1.5, 3.25, 0.7, 0.7, 0, 0.1, 1e-40, 0.3, INFINITY, 0.2,
                                        0.2, 0.2, 0.2, NAN, 5e5, 0.01, 1e-3, 0.25, 1e-42};
    struct Case {
        int length, top, margin;
        bool recent;
        std::vector<uint32_t> scales;
    };
    const Case cases[] = {
        {4, 448, 0, false,
         {0x3f800000, 0x43955555, 0x4309d89e, 0x4309d89e, 0x4309d89e, 0x4309d89e, 0x4309d89e,
          0x44200000, 0x44200000, 0x44200000, 0x44200000, 0x44200000, 0x44200000, 0x450c0000,
          0x450c0000, 0x3a6ae18b, 0x3a6ae18b, 0x3a6ae18b, 0x3a6ae18b, 0x44e00000}},
        {4, 57344, 2, false,
         {0x3f800000, 0x46155555, 0x4589d89e, 0x4589d89e, 0x4589d89e, 0x4589d89e, 0x4589d89e,
          0x46a00000, 0x46a00000, 0x46a00000, 0x46a00000, 0x46a00000, 0x46a00000, 0x478c0000,
          0x478c0000, 0x3ceae18b, 0x3ceae18b, 0x3ceae18b, 0x3ceae18b, 0x47600000}},
        {1, 448, 0, false,
         {0x3f800000, 0x43955555, 0x4309d89e, 0x44200000, 0x44200000, 0x44200000, 0x458c0000,
          0x7f7fffff, 0x44baaaaa, 0x44baaaaa, 0x450c0000, 0x450c0000, 0x450c0000, 0x450c0000,
          0x450c0000, 0x3a6ae18b, 0x472f0000, 0x48dabfff, 0x44e00000, 0x7f7fffff}},
        {4, 448, 1, true,
         {0x3f800000, 0x43155555, 0x4289d89e, 0x43a00000, 0x43a00000, 0x43a00000, 0x450c0000,
          0x7f7fffff, 0x443aaaaa, 0x443aaaaa, 0x448c0000, 0x448c0000, 0x448c0000, 0x448c0000,
          0x448c0000, 0x39eae18b, 0x46af0000, 0x485abfff, 0x44600000, 0x7f7fffff}},
    };

    // Show each step's maximum to one slot of the state, and compare the scale that follows.
    for (const Case& c : cases) {
        Late late(FP8_OPERANDS, {c.length, c.margin, c.recent});
        size_t slot = c.top == 448 ? 0 : 2;
        for (size_t i = 0; i < events.size(); i++) {
            late.h.amax[slot] = fp8_magnitude(float(events[i]));
            fp8_next_scales(late.h, late.rule, Cpu{});
            float scale = late.h.scale[slot];
            EXPECT_EQ(bits_of(scale == 0 ? 1 : scale), c.scales[i]) << c.length << " " << i;
            EXPECT_EQ(late.h.amax[slot], 0u);
            EXPECT_EQ(late.h.scale[1], 0) << "a slot that nothing has come by";
        }
    }
}

// The power of two at or below a scale. Codes stand for the values that left_of()
// gives under that scale.
TEST(Fp8, LateScalesArePowersOfTwo) {
    EXPECT_EQ(fp8_late_scale(0), 1);
    EXPECT_EQ(fp8_late_scale(1.999f), 1);
    EXPECT_EQ(fp8_late_scale(2), 2);
    EXPECT_EQ(fp8_late_scale(FLT_MAX), 0x1p127f);
    EXPECT_EQ(fp8_late_scale(0x1p-140f), 0x1p-126f);
}

// How recipes cut operands of sums along rows, and of sums along columns.
struct Cut {
    Fp8 recipe;
    Fp8Blocks rows, columns, w, w_turned;
    Definition gradient;
};
typedef Fp8Blocks B;
static const Cut cuts[] = {
    {Fp8::BLOCK, B::ROWS, B::COLUMNS, B::SQUARES, B::SQUARES_T, E4M3},
    {Fp8::TENSOR, B::WHOLE, B::WHOLE, B::WHOLE, B::WHOLE, E5M2},
    {Fp8::MX, B::MX_ROWS, B::MX_COLUMNS, B::MX_ROWS, B::MX_COLUMNS, E4M3},
    {Fp8::NVFP4, B::NVFP4_ROWS, B::NVFP4_COLUMNS, B::SQUARES, B::SQUARES_T, E2M1},
};

// A product of fp8 operands has the bits of the bf16 product of what the codes stand for.
TEST(Fp8, LinearLayersAreProductsOfWhatCodesStandFor) {
    auto same = [](const auto& a, const auto& b) {
        return memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
    };
    for (auto [N, OC, IC] : {std::array<size_t, 3>{1, 3, 5}, {130, 40, 260}, {256, 300, 128},
                             {9, 8, 4096}, {2000, 20, 30}})
        for (const Cut& cut : cuts) {
            auto x = mixed_matrix(N, IC, 1, true), dy = mixed_matrix(N, OC, 2, true);
            auto w = mixed_matrix(OC, IC, 3, true);

            // Take what codes stand for. NVFP4's own tests hold its values against the definition.
            auto left = [&](const std::vector<bf16>& m, size_t rows, size_t cols, Fp8Blocks blocks,
                            Definition d = E4M3) {
                if (cut.recipe != Fp8::NVFP4) return left_of(m, rows, cols, blocks, d);
                bool turned = blocks == B::NVFP4_COLUMNS || blocks == B::SQUARES_T;
                std::vector<bf16> values(m.size());
                Nvfp4Head head;
                nvfp4_quantise(values.data(), nullptr, &head, m.data(),
                               nvfp4_operand(rows, cols, turned | (&m == &w) << 1 |
                                             (blocks == B::NVFP4_COLUMNS) << 2 | (&m == &dy) << 3),
                               Cpu{});
                return values;
            };
            LinearOperandsOf all = {x, dy, w};
            LinearOperandsOf out = {left(x, N, IC, cut.rows), {}, left(w, OC, IC, cut.w)};
            LinearOperandsOf dinp = {{}, left(dy, N, OC, cut.rows, cut.gradient),
                                     left(w, OC, IC, cut.w_turned)};
            LinearOperandsOf dw = {left(x, N, IC, cut.columns),
                                   left(dy, N, OC, cut.columns, cut.gradient), {}};

            // Compare the three products, written and added.
            for (bool accumulate : {false, true}) {
                SCOPED_TRACE(testing::Message() << N << " " << OC << " " << IC << accumulate);
                LinearRun got = run_linear({all, all, all}, N, OC, IC, cut.recipe, accumulate);
                LinearRun want = run_linear({out, dinp, dw}, N, OC, IC, Fp8::NONE, accumulate);
                EXPECT_TRUE(same(got.out, want.out));
                EXPECT_TRUE(same(got.dinp, want.dinp));
                EXPECT_TRUE(same(got.dweight, want.dweight));
                if (!accumulate) expect_exact_sums(got, dw, N, OC, IC);
            }
        }
}

// The same with scales that are known before: x saturates, and w and dy have room to spare. The
// maxima left behind are those of whole operands, however often an operand was quantised.
TEST(Fp8, DelayedLinearLayersAreProductsOfWhatCodesStandFor) {
    size_t N = 130, OC = 40, IC = 260;
    auto x = mixed_matrix(N, IC, 1, true), dy = mixed_matrix(N, OC, 2, true);
    auto w = mixed_matrix(OC, IC, 3, true);
    auto most = [](const std::vector<bf16>& m) {
        float most = 0;
        for (bf16 v : m) most = std::max(most, std::fabs(to_float(v)));
        return most;
    };

    // Choose scales of 1.75 times a power of two. The layer uses that power.
    Late late(FP8_OPERANDS, {});
    const float powers[] = {std::exp2(std::ceil(std::log2(448 / most(x))) + 3),
                            std::exp2(std::floor(std::log2(448 / most(w))) - 2),
                            std::exp2(std::floor(std::log2(57344 / most(dy))) - 1)};
    for (size_t i = 0; i < FP8_OPERANDS; i++) late.h.scale[i] = powers[i] * 1.75f;

    late.h.amax[1] = fp8_magnitude(2 * most(w)); // from another micro-batch
    Fp8Late all = {late.h.scale, late.h.amax};
    LinearOperandsOf given = {x, dy, w}, left = given;
    for (bf16& v : left.x) v = left_of(v, powers[0], E4M3);
    for (bf16& v : left.w) v = left_of(v, powers[1], E4M3);
    for (bf16& v : left.dy) v = left_of(v, powers[2], E5M2);
    LinearRun got = run_linear({given, given, given}, N, OC, IC, Fp8::DELAYED, false, all);
    LinearRun want = run_linear({left, left, left}, N, OC, IC, Fp8::NONE, false);

    EXPECT_TRUE(memcmp(got.out.data(), want.out.data(), N * OC * sizeof(bf16)) == 0);
    EXPECT_TRUE(memcmp(got.dinp.data(), want.dinp.data(), N * IC * sizeof(bf16)) == 0);
    EXPECT_TRUE(got.dweight == want.dweight);
    EXPECT_EQ(float_of(late.h.amax[0]), most(x));
    EXPECT_EQ(float_of(late.h.amax[1]), 2 * most(w));
    EXPECT_EQ(float_of(late.h.amax[2]), most(dy));

    // An evaluation uses the same scales and leaves no maxima. Infinity does not saturate.
    std::fill_n(late.h.amax, FP8_OPERANDS, 7u);
    LinearRun seen = run_linear({given, given, given}, N, OC, IC, Fp8::DELAYED, false,
                                {late.h.scale, nullptr});
    EXPECT_TRUE(memcmp(seen.out.data(), got.out.data(), N * OC * sizeof(bf16)) == 0);
    EXPECT_EQ(late.h.amax[0], 7u);
    given.x[2 * IC + 131] = from_acc<bf16>(INFINITY);
    LinearRun bad = run_linear({given, given, given}, N, OC, IC, Fp8::DELAYED, false, all);
    EXPECT_FALSE(std::isfinite(to_float(bad.out[2 * OC + 5])));
    EXPECT_EQ(late.h.amax[0], FP8_INFINITY);
}

// An infinity or a NaN reaches the output and the weight's gradient.
TEST(Fp8, LinearLayersHideNothing) {
    size_t N = 4, OC = 130, IC = 140;
    for (float bad : {INFINITY, -NAN})
        for (Fp8 recipe : {Fp8::BLOCK, Fp8::TENSOR, Fp8::MX, Fp8::NVFP4}) {
            auto x = mixed_matrix(N, IC, 1, true), dy = mixed_matrix(N, OC, 2, true);
            auto w = mixed_matrix(OC, IC, 3, true);
            x[2 * IC + 131] = from_acc<bf16>(bad);
            LinearOperandsOf all = {x, dy, w};
            LinearRun run = run_linear({all, all, all}, N, OC, IC, recipe, false);

            EXPECT_FALSE(std::isfinite(to_float(run.out[2 * OC + 5])));
            EXPECT_FALSE(std::isfinite(run.dweight[5 * IC + 131]));
        }
}

// ----------------------------------------------------------------------------
// what cuBLASLt multiplies

// For each row of the library's page on narrow precisions: a product that it allows, and the one
// change that it forbids.
TEST(Fp8, ProductsThatTheLibraryForbidsAreKnown) {
    auto rows = Fp8Blocks::ROWS, squares = Fp8Blocks::SQUARES, whole = Fp8Blocks::WHOLE;
    const Fp8Product blocks = {128, 256, 512, rows, squares, false, false, Type::BF16};
    const Fp8Product tensor = {128, 256, 512, whole, whole, true, false, Type::F32, true};
    const size_t now = 130000, before = 120800;
    auto with = [](Fp8Product p, auto change) {
        change(p);
        return p;
    };

    // The chips that multiply codes, and the one that takes scales of blocks.
    EXPECT_EQ(fp8_refuses(blocks, 90, now), nullptr);
    for (int architecture : {89, 90, 100, 120}) {
        EXPECT_EQ(fp8_refuses(tensor, architecture, before), nullptr) << architecture;
        EXPECT_EQ(fp8_refuses(blocks, architecture, now) == nullptr, architecture == 90);
    }

    // MXFP8 and NVFP4: Blackwell's.
    for (B rows : {B::MX_ROWS, B::NVFP4_ROWS}) {
        Fp8Product mx = {128, 256, 512, rows, rows, false, false, Type::BF16};
        for (int architecture : {89, 90, 100, 120})
            EXPECT_EQ(fp8_refuses(mx, architecture, before) == nullptr, architecture >= 100);
        EXPECT_TRUE(fp8_refuses(mx, 100, 120700));
        for (auto size : {&Fp8Product::M, &Fp8Product::N, &Fp8Product::K})
            EXPECT_TRUE(fp8_refuses(
                with(mx, [&](auto& p) { p.*size += size == &Fp8Product::K ? 16 : 8; }), 100, now));
    }

    // Older chips, and an older library.
    for (int architecture : {80, 86})
        EXPECT_STREQ(fp8_refuses(tensor, architecture, now),
                     "tensor cores multiply codes of 8 bits from sm_89 on");
    EXPECT_STREQ(fp8_refuses(blocks, 90, before), "scales of blocks came with cuBLAS 12.9");

    // Sizes. One row of queries makes M odd, which products with one scale allow.
    EXPECT_EQ(fp8_refuses(with(tensor, [](auto& p) { p.M = 1; }), 90, now), nullptr);
    EXPECT_TRUE(fp8_refuses(with(blocks, [](auto& p) { p.M = 1; }), 90, now));
    EXPECT_TRUE(fp8_refuses(with(blocks, [](auto& p) { p.M = 4; }), 90, now));
    EXPECT_TRUE(fp8_refuses(with(tensor, [](auto& p) { p.K = 520; }), 90, now));
    EXPECT_TRUE(fp8_refuses(with(tensor, [](auto& p) { p.N = 254; }), 90, now));
    EXPECT_EQ(fp8_refuses(with(tensor, [](auto& p) { p.N = 252; }), 90, now), nullptr);
    EXPECT_TRUE(fp8_refuses(with(tensor, [](auto& p) { p.N = 252, p.out = Type::BF16; }), 90, now));

    // Formats and scales.
    EXPECT_TRUE(fp8_refuses(with(tensor, [](auto& p) { p.b_wide = true; }), 90, now));
    EXPECT_TRUE(fp8_refuses(with(tensor, [&](auto& p) { p.b = rows; }), 90, now));
    EXPECT_TRUE(fp8_refuses(with(blocks, [&](auto& p) { p.a = squares; }), 90, now));
    EXPECT_EQ(fp8_refuses(with(blocks, [&](auto& p) { p.b = rows; }), 90, now), nullptr);
}
