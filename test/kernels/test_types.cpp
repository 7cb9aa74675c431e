// test_types.cpp - random numbers, exp and tanh, narrow types
//   Expected values come from elsewhere: published known answers, libm in double, and the
//   neighbours of a rounded number.
#include <gtest/gtest.h>
#include <omp.h>
#include <bit>
#include <set>
#include "../../llmc/ops/element_type.h"
#include "../../llmc/ops/fast_math.h"
#include "../../llmc/ops/rand.h"
#include "../../llmc/ops/types.h"
#include "../../llmc/io/safetensors.h"

using namespace llmc;

// ----------------------------------------------------------------------------
// random numbers

// The known answers that the authors of Philox publish.
TEST(Random, PhiloxKnownAnswers) {
    struct Case {
        uint64_t seed, hash, index;
        RandomWords words;
    };
    for (const Case& c : std::vector<Case>{
             {0, 0, 0, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
             {~0ull, ~0ull, ~0ull, {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
             {0x299f31d0a4093822,
              0x0370734413198a2e,
              0x85a308d3243f6a88,
              {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}}})
        for (int i = 0; i < 4; i++)
            EXPECT_EQ(random_block(c.seed, c.hash, c.index)[i], c.words[i]) << std::hex << c.seed;
}

TEST(Random, Fnv1aKnownAnswers) {
    EXPECT_EQ(fnv1a(""), 0xcbf29ce484222325u);
    EXPECT_EQ(fnv1a("a"), 0xaf63dc4c8601ec8cu);
    EXPECT_EQ(fnv1a("foobar"), 0x85944171f73967e8u);
    EXPECT_NE(fnv1a("\x80"),
              fnv1a(std::string("\xff\xff\xff\x80"))); // it reads bytes, not signed characters
}

TEST(Random, UniformIsTheFirstWordAndFillsTheUnitInterval) {
    EXPECT_EQ(uniform(0, 0, 0), 0x6627e8d5 * 0x1p-32);

    // Fill a histogram.
    const int N = 1000000, bins = 100;
    std::vector<int> hits(bins);
    for (int i = 0; i < N; i++) {
        double u = uniform(3, fnv1a("uniform"), uint64_t(i));
        ASSERT_TRUE(u >= 0 && u < 1);
        hits[size_t(u * bins)]++;
    }

    // Its chi-square has 99 degrees of freedom. The upper bound is passed once in a thousand seeds;
    // the lower one would mean numbers that are too even.
    double chi2 = 0;
    for (int h : hits) chi2 += (h - N / bins) * double(h - N / bins) / (N / bins);
    EXPECT_LT(chi2, 149);
    EXPECT_GT(chi2, 60);
}

TEST(Random, NormalNumbersAreNormal) {
    const size_t N = 1000000;
    std::vector<double> z(N);
    for (size_t i = 0; i < N; i++) z[i] = normal(1337, fnv1a("test"), i);

    // The first four moments, and the tails. Each may be off by five standard errors.
    double root = std::sqrt(double(N)), m1 = 0, m2 = 0, m3 = 0, m4 = 0;
    for (double x : z) m1 += x / N, m2 += x * x / N, m3 += x * x * x / N, m4 += x * x * x * x / N;
    EXPECT_NEAR(m1, 0, 5 / root);
    EXPECT_NEAR(m2, 1, 5 * std::sqrt(2.0) / root);
    EXPECT_NEAR(m3, 0, 5 * std::sqrt(15.0) / root);
    EXPECT_NEAR(m4, 3, 5 * std::sqrt(96.0) / root);
    for (double k : {0.5, 1.0, 2.0, 3.0, 4.0})
        for (double sign : {-1.0, 1.0}) {
            double p = 0.5 * std::erfc(k / std::sqrt(2.0)), beyond = 0;
            for (double x : z) beyond += sign * x > k;
            EXPECT_NEAR(beyond / N, p, 5 * std::sqrt(p / N)) << sign * k;
        }

    // A block's pairs share a radius. Neighbours must not be correlated, nor their squares.
    for (size_t lag = 1; lag <= 5; lag++) {
        double c = 0, c2 = 0;
        for (size_t i = lag; i < N; i++) {
            double x = z[i], y = z[i - lag];
            c += x * y / N, c2 += (x * x - 1) * (y * y - 1) / N;
        }
        EXPECT_NEAR(c, 0, 5 / root) << lag;
        EXPECT_NEAR(c2, 0, 5 * 2 / root) << lag;
    }
}

TEST(Random, StreamsSeedsAndLargeIndicesDiffer) {
    std::set<double> seen;
    for (uint64_t seed : {0ull, 1ull, 1ull << 32, ~0ull})
        for (const char* stream : {"", "a", "b"})
            for (uint64_t i : {0ull, 1ull, 2ull, 3ull, 4ull, 1ull << 34, 1ull << 35, 1ull << 63})
                seen.insert(normal(seed, fnv1a(stream), i));
    EXPECT_EQ(seen.size(), 4 * 3 * 8u);
}

TEST(Random, FillNormalIsNormalElementByElement) {
    uint64_t stream = fnv1a("fill");
    for (uint64_t first :
         {0ull, 1ull, 2ull, 3ull, 4ull, 5ull, 1023ull, (1ull << 32) + 3, (1ull << 40) + 1})
        for (size_t count : {0, 1, 2, 3, 4, 5, 7, 8, 9, 1001}) {
            std::vector<float> out(count + 2, -7.0f);
            fill_normal(out.data() + 1, 42, stream, first, count, 0.02f);
            for (size_t j = 0; j < count; j++)
                ASSERT_EQ(out[j + 1], float(0.02f * normal(42, stream, first + j)))
                    << first << "+" << j;
            EXPECT_EQ(out.front(), -7.0f); // nothing beside the range is written
            EXPECT_EQ(out.back(), -7.0f);
        }
}

// The same bits with any number of threads.
TEST(Random, FillNormalDoesNotDependOnThreads) {
    const size_t N = 100003;
    int threads = omp_get_max_threads();
    std::vector<float> one(N), out(N);
    omp_set_num_threads(1);
    fill_normal(one.data(), 42, 7, 5, N, 1.0f);
    for (int n : {2, 3, 8}) {
        omp_set_num_threads(n);
        fill_normal(out.data(), 42, 7, 5, N, 1.0f);
        EXPECT_EQ(memcmp(one.data(), out.data(), N * 4), 0) << n;
    }
    omp_set_num_threads(threads);
}

// ----------------------------------------------------------------------------
// exp and tanh

// The float that is n bit patterns further from zero.
static float ulps(float x, int n) { return std::bit_cast<float>(std::bit_cast<int32_t>(x) + n); }

// The functions below return 0 where the bound holds, and otherwise the amount
// by which it is missed.
static double exp_miss(float x) {
    float y = fast_exp(x);
    if (x != x) return y != y ? 0 : 1;
    if (x < -87.3f) return y == 0 && !std::signbit(y) ? 0 : 1;
    if (x > 88.7f) return y == INFINITY ? 0 : 1;
    double want = std::exp(double(x)), error = std::fabs(y - want) / want;
    return error < 2e-7 ? 0 : error;
}
// Between -88 and -87.3 an intermediate result is subnormal, so any value from 0 to 1.3e-38 passes.
// Above 88 nothing is promised.
static double exp_low_miss(float x) {
    return x > 88.0f    ? 0
           : x != x     ? (fast_exp_nonpositive(x) != fast_exp_nonpositive(x) ? 0 : 1)
           : x < -88.0f ? fast_exp_nonpositive(x) != 0 || std::signbit(fast_exp_nonpositive(x))
           : x < -87.3f
               ? fast_exp_nonpositive(x) < 0 || fast_exp_nonpositive(x) > 1.3e-38f
               : std::fabs(fast_exp_nonpositive(x) - std::exp(double(x))) >=
                     2e-7 * std::exp(double(x));
}
static double tanh_miss(float x) {
    float y = fast_tanh(x);
    if (x != x) return y != y ? 0 : 1;
    double error = std::fabs(y - std::tanh(double(x)));
    return error < 3e-7 && std::fabs(y) <= 1 ? 0 : std::max(error, 1e-30);
}

// Test every 61st bit pattern: all exponents, both signs, subnormals, infinities and NaNs.
static double worst_of_all(double (*miss)(float)) {
    double worst = 0;
#pragma omp parallel for reduction(max : worst)
    for (uint64_t u = 0; u < uint64_t(1) << 32; u += 61)
        worst = std::max(worst, miss(std::bit_cast<float>(uint32_t(u))));
    return worst;
}

static const std::vector<float> special = {
    0.0f,      -0.0f,   1.0f,     -1.0f,    0x1p-149f, -0x1p-149f, 0x1.fffffcp-127f,
    0x1p-126f, FLT_MAX, -FLT_MAX, INFINITY, -INFINITY, NAN,        -NAN};

TEST(Maths, FastExpLowIsWithinItsBound) { EXPECT_EQ(worst_of_all(exp_low_miss), 0); }
TEST(Maths, FastExpIsWithinItsBound) {
    EXPECT_EQ(worst_of_all(exp_miss), 0);
    for (float x : special) EXPECT_EQ(exp_miss(x), 0) << x;

    // The edges between cases, and the places where rounding to a multiple of ln 2 turns over.
    for (float edge : {-87.3f, 88.7f})
        for (int n = -1000; n <= 1000; n++)
            ASSERT_EQ(exp_miss(ulps(edge, n)), 0) << edge << " " << n;
    for (int k = -125; k <= 127; k++)
        for (int n = -200; n <= 200; n++)
            ASSERT_EQ(exp_miss(ulps(float((k + 0.5) * M_LN2), n)), 0) << k << " " << n;

    EXPECT_EQ(fast_exp(0.0f), 1.0f);
    EXPECT_EQ(fast_exp(-INFINITY), 0.0f);
    EXPECT_EQ(fast_exp(INFINITY), INFINITY);
    EXPECT_EQ(fast_exp(0x1p-149f), 1.0f);
    EXPECT_GE(fast_exp(-87.3f), FLT_MIN);
    EXPECT_TRUE(std::isnan(fast_exp(NAN)));
    EXPECT_EQ(fast_exp(0.3), std::exp(0.3));
}

TEST(Maths, FastTanhIsWithinItsBound) {
    EXPECT_EQ(worst_of_all(tanh_miss), 0);
    for (float x : special) EXPECT_EQ(tanh_miss(x), 0) << x;
    for (float edge : {-9.0f, 9.0f})
        for (int n = -1000; n <= 1000; n++)
            ASSERT_EQ(tanh_miss(ulps(edge, n)), 0) << edge << " " << n;
    EXPECT_EQ(fast_tanh(0.0f), 0.0f);
    EXPECT_NEAR(fast_tanh(INFINITY), 1, 1e-7);
    EXPECT_NEAR(fast_tanh(-INFINITY), -1, 1e-7);
    EXPECT_TRUE(std::isnan(fast_tanh(NAN)));
    EXPECT_EQ(fast_tanh(0.3), std::tanh(0.3));
}

// ----------------------------------------------------------------------------
// narrow types

static uint16_t bf16_bits(float f) { return from_acc<bf16>(f).bits; }
static float bf16_value(uint16_t h) { return to_float(bf16{h}); }
static uint16_t half_bits(float f) { return from_acc<fp16>(f).bits; }
static float half_value(uint16_t h) { return to_float(fp16{h}); }

// Check rounding at every pair of neighbours a < b of a narrow type. Rounding is monotonic, so
// it is right everywhere if it is right at a, just below the middle, at the middle, just above
// it, and at b. Sixteen-bit patterns of one sign are in order, and of two neighbours the odd one
// has its last bit set.
static void expect_nearest_even(uint16_t (*narrow)(float), float (*wide)(uint16_t),
                                uint16_t infinity) {
    for (uint32_t h = 0; h < infinity; h++)
        for (uint16_t sign : {0, 0x8000}) {
            uint16_t a = uint16_t(h | sign), b = uint16_t(a + 1), even = a & 1 ? b : a;
            // The largest number's upper neighbour is the number at which the
            // next exponent would begin.
            double low = wide(a),
                   high = h + 1u == infinity ? 2 * low - wide(uint16_t(a - 1)) : wide(b);
            float middle = float((low + high) / 2);

            ASSERT_EQ((low + high) / 2, double(middle));
            ASSERT_EQ(narrow(float(low)), a) << std::hex << a;
            ASSERT_EQ(narrow(middle), even) << std::hex << a;
            ASSERT_EQ(narrow(ulps(middle, -1)), a)
                << std::hex << a; // -1 is towards zero for both signs
            ASSERT_EQ(narrow(ulps(middle, 1)), b) << std::hex << a;
        }
}

// Every pattern comes back; a NaN comes back as a NaN of the same sign.
static void expect_round_trips(uint16_t (*narrow)(float), float (*wide)(uint16_t),
                               uint16_t infinity) {
    int nans = 0;
    for (uint32_t h = 0; h < 65536; h++) {
        float f = wide(uint16_t(h));
        bool nan = (h & 0x7fff) > infinity;
        nans += nan;
        ASSERT_EQ(f != f, nan) << std::hex << h;
        uint16_t back = narrow(f);
        bool good = nan ? (back & 0x7fff) > infinity && (back & 0x8000) == (h & 0x8000) : back == h;
        ASSERT_TRUE(good) << std::hex << h << " " << back;
    }
    EXPECT_EQ(nans, 2 * (0x7fff - infinity));

    // NaNs of floats whose set bits would all be cut off stay NaNs.
    for (uint32_t u :
         {0x7f800001u, 0xff800001u, 0x7f80ffffu, 0x7fffffffu, 0xffffffffu, 0x7fc00000u})
        EXPECT_GT(narrow(std::bit_cast<float>(u)) & 0x7fff, infinity) << std::hex << u;
}

TEST(Types, Bf16RoundTripsAndRoundsToEven) {
    expect_round_trips(bf16_bits, bf16_value, 0x7f80);
    expect_nearest_even(bf16_bits, bf16_value, 0x7f80);
    EXPECT_EQ(bf16_value(0x3f80), 1.0f);
    EXPECT_EQ(bf16_value(0xc049), -3.140625f);
    EXPECT_EQ(bf16_bits(FLT_MAX), 0x7f80); // beyond the largest number: infinity
    EXPECT_EQ(bf16_bits(1.00390625f), 0x3f80);
}

TEST(Types, HalfRoundTripsAndRoundsToEven) {
    expect_round_trips(half_bits, half_value, 0x7c00);
    expect_nearest_even(half_bits, half_value, 0x7c00);

    // The value of each half, from its definition.
    for (uint32_t h = 0; h < 65536; h++) {
        int exponent = h >> 10 & 31, mantissa = h & 1023;
        double want =
            exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
        if (exponent == 31) want = mantissa ? NAN : INFINITY;
        float got = half_value(uint16_t(h));
        ASSERT_TRUE(want != want ? got != got : got == (h & 0x8000 ? -want : want))
            << std::hex << h;
    }

    // The largest half, the first float that rounds to infinity, and the ends
    // of the subnormal numbers.
    EXPECT_EQ(half_bits(65504), 0x7bff);
    EXPECT_EQ(half_bits(ulps(65520, -1)), 0x7bff);
    EXPECT_EQ(half_bits(65520), 0x7c00);
    EXPECT_EQ(half_bits(FLT_MAX), 0x7c00);
    EXPECT_EQ(half_bits(-INFINITY), 0xfc00);
    EXPECT_EQ(half_bits(0x1p-25f), 0);
    EXPECT_EQ(half_bits(0x1.8p-25f), 1);
    EXPECT_EQ(half_bits(-0x1p-149f), 0x8000);
    EXPECT_TRUE(std::signbit(half_value(0x8000)));
}

TEST(Types, NamesAndSizes) {
    for (Type t : {Type::F32, Type::BF16, Type::F16, Type::F64}) {
        EXPECT_EQ(dtype_bytes(type_name(t)), type_bytes(t));
        EXPECT_TRUE(is_float_dtype(type_name(t)));
    }
    EXPECT_EQ(type_of<float>(), Type::F32);
    EXPECT_EQ(type_of<double>(), Type::F64);
    EXPECT_EQ(type_of<bf16>(), Type::BF16);
    EXPECT_FALSE(is_float_dtype("I64"));
    EXPECT_EQ(dtype_bytes("F128"), 0u);
    EXPECT_EQ(dtype_bytes(""), 0u);
}
