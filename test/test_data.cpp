// test_data.cpp - random numbers, vector maths, narrow types, data windows, samplers, safetensors files
//   Expected values come from elsewhere: published known answers, libm in double, neighbours of a
//   rounded number,
//   and tokens that are their own positions.
#include <gtest/gtest.h>
#include <omp.h>
#include <signal.h>
#include <sys/resource.h>
#include <bit>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>
#include <set>
#include "../llmc/dataloader.h"
#include "../llmc/safetensors.h"
#include "../llmc/sampler.h"

namespace fs = std::filesystem;
#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

static std::string scratch(const std::string& name) {
    std::string folder = testing::TempDir() + "/test_data." + std::to_string(getpid());
    fs::create_directories(folder);
    return folder + "/" + name;
}

static void put(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary).write(bytes.data(), std::streamsize(bytes.size()));
}

static std::string get(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

// The folder of this run's files goes when the tests are over.
struct Cleaner : testing::Environment {
    void TearDown() override { fs::remove_all(fs::path(scratch("x")).parent_path()); }
};
static testing::Environment* cleaner = testing::AddGlobalTestEnvironment(new Cleaner);

// ----------------------------------------------------------------------------
// random numbers

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
              fnv1a(std::string("\xff\xff\xff\x80"))); // bytes, not signed characters
}

TEST(Random, UniformIsTheFirstWordAndFillsTheUnitInterval) {
    EXPECT_EQ(uniform(0, 0, 0), 0x6627e8d5 * 0x1p-32);
    const int N = 1000000, bins = 100;
    std::vector<int> hits(bins);
    for (int i = 0; i < N; i++) {
        double u = uniform(3, fnv1a("uniform"), uint64_t(i));
        ASSERT_TRUE(u >= 0 && u < 1);
        hits[size_t(u * bins)]++;
    }
    double chi2 = 0;
    for (int h : hits) chi2 += (h - N / bins) * double(h - N / bins) / (N / bins);
    EXPECT_LT(chi2, 149); // 99 degrees of freedom, one in a thousand
    EXPECT_GT(chi2, 60);
}

TEST(Random, NormalNumbersAreNormal) {
    const size_t N = 1000000;
    std::vector<double> z(N);
    for (size_t i = 0; i < N; i++) z[i] = normal(1337, fnv1a("test"), i);
    // five standard errors each
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
    // a block's pairs share a radius: neighbours must not be correlated, nor their squares
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
            EXPECT_EQ(out.front(), -7.0f); // and nothing beside it
            EXPECT_EQ(out.back(), -7.0f);
        }
}

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

static float ulps(float x, int n) { return std::bit_cast<float>(std::bit_cast<int32_t>(x) + n); }

// 0 where the bound holds, else by how much it is missed
static double exp_miss(float x) {
    float y = fast_exp(x);
    if (x != x) return y != y ? 0 : 1;
    if (x < -87.3f) return y == 0 && !std::signbit(y) ? 0 : 1;
    if (x > 88.7f) return y == INFINITY ? 0 : 1;
    double want = std::exp(double(x)), error = std::fabs(y - want) / want;
    return error < 2e-7 ? 0 : error;
}
static double exp_low_miss(float x) {
    return x > 88.0f    ? 0
           : x != x     ? (fast_exp_low(x) != fast_exp_low(x) ? 0 : 1)
           : x < -88.0f ? fast_exp_low(x) != 0 || std::signbit(fast_exp_low(x))
           : x < -87.3f // subnormal on the way
               ? fast_exp_low(x) < 0 || fast_exp_low(x) > 1.3e-38f
               : std::fabs(fast_exp_low(x) - std::exp(double(x))) >= 2e-7 * std::exp(double(x));
}
static double tanh_miss(float x) {
    float y = fast_tanh(x);
    if (x != x) return y != y ? 0 : 1;
    double error = std::fabs(y - std::tanh(double(x)));
    return error < 3e-7 && std::fabs(y) <= 1 ? 0 : std::max(error, 1e-30);
}

// Every 61st bit pattern: all exponents, both signs, subnormals, infinities, NaNs.
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
    // where the cases meet, and where the rounding to a multiple of ln 2 turns over
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

// Rounding is monotonic between neighbours a < b of a narrow type: right at a, just below, at and
// just above the
// middle, and at b is right everywhere. Sixteen-bit patterns of one sign are in order, and the odd
// one of two
// neighbours has the last bit set.
static void expect_nearest_even(uint16_t (*narrow)(float), float (*wide)(uint16_t),
                                uint16_t infinity) {
    for (uint32_t h = 0; h < infinity; h++)
        for (uint16_t sign : {0, 0x8000}) {
            uint16_t a = uint16_t(h | sign), b = uint16_t(a + 1), even = a & 1 ? b : a;
            // the neighbour of the largest number is where the next exponent would begin
            double low = wide(a),
                   high = h + 1u == infinity ? 2 * low - wide(uint16_t(a - 1)) : wide(b);
            float middle = float((low + high) / 2);
            ASSERT_EQ((low + high) / 2, double(middle));
            ASSERT_EQ(narrow(float(low)), a) << std::hex << a;
            ASSERT_EQ(narrow(middle), even) << std::hex << a;
            ASSERT_EQ(narrow(ulps(middle, -1)), a)
                << std::hex << a; // -1: towards zero, for both signs
            ASSERT_EQ(narrow(ulps(middle, 1)), b) << std::hex << a;
        }
}

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
    // NaNs of floats whose set bits would all be cut off
    for (uint32_t u :
         {0x7f800001u, 0xff800001u, 0x7f80ffffu, 0x7fffffffu, 0xffffffffu, 0x7fc00000u})
        EXPECT_GT(narrow(std::bit_cast<float>(u)) & 0x7fff, infinity) << std::hex << u;
}

TEST(Types, Bf16RoundTripsAndRoundsToEven) {
    expect_round_trips(bf16_bits, bf16_value, 0x7f80);
    expect_nearest_even(bf16_bits, bf16_value, 0x7f80);
    EXPECT_EQ(bf16_value(0x3f80), 1.0f);
    EXPECT_EQ(bf16_value(0xc049), -3.140625f);
    EXPECT_EQ(bf16_bits(FLT_MAX), 0x7f80); // beyond the largest: infinity
    EXPECT_EQ(bf16_bits(1.00390625f), 0x3f80);
}

TEST(Types, HalfRoundTripsAndRoundsToEven) {
    expect_round_trips(float_to_half, half_to_float, 0x7c00);
    expect_nearest_even(float_to_half, half_to_float, 0x7c00);
    for (uint32_t h = 0; h < 65536; h++) { // the value of every half, from its definition
        int exponent = h >> 10 & 31, mantissa = h & 1023;
        double want =
            exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
        if (exponent == 31) want = mantissa ? NAN : INFINITY;
        float got = half_to_float(uint16_t(h));
        ASSERT_TRUE(want != want ? got != got : got == (h & 0x8000 ? -want : want))
            << std::hex << h;
    }
    EXPECT_EQ(float_to_half(65504), 0x7bff);
    EXPECT_EQ(float_to_half(ulps(65520, -1)), 0x7bff);
    EXPECT_EQ(float_to_half(65520), 0x7c00);
    EXPECT_EQ(float_to_half(FLT_MAX), 0x7c00);
    EXPECT_EQ(float_to_half(-INFINITY), 0xfc00);
    EXPECT_EQ(float_to_half(0x1p-25f), 0);
    EXPECT_EQ(float_to_half(0x1.8p-25f), 1);
    EXPECT_EQ(float_to_half(-0x1p-149f), 0x8000);
    EXPECT_TRUE(std::signbit(half_to_float(0x8000)));
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

// ----------------------------------------------------------------------------
// data

TEST(Permutation, IsABijectionAndEpochsDiffer) {
    for (uint64_t n = 1; n <= 300; n++)
        for (uint64_t seed : {0ull, 1337ull, ~0ull}) {
            std::vector<uint64_t> a(n), b(n), c(n);
            std::vector<char> hit(n);
            for (uint64_t i = 0; i < n; i++) {
                a[i] = permutation(seed, 0, i, n), b[i] = permutation(seed, 1, i, n);
                c[i] = permutation(seed + 1, 0, i, n);
                ASSERT_LT(a[i], n);
                hit[a[i]]++;
            }
            EXPECT_EQ(std::count(hit.begin(), hit.end(), 1), std::ptrdiff_t(n)) << n;
            EXPECT_TRUE(n < 20 || (a != b && a != c && b != c))
                << n; // of so many orders no two agree by chance
        }
    for (uint64_t n : {65535u, 65536u, 65537u, 1000003u, 1u << 20, (1u << 20) + 1}) {
        std::vector<char> hit(n);
        uint64_t same = 0, in_place = 0;
        for (uint64_t i = 0; i < n; i++) {
            uint64_t x = permutation(5, 2, i, n);
            ASSERT_LT(x, n);
            hit[x]++;
            same += x == permutation(5, 3, i, n), in_place += x == i;
        }
        EXPECT_EQ(std::count(hit.begin(), hit.end(), 1), std::ptrdiff_t(n)) << n;
        EXPECT_LT(same, 20u) << n; // one by chance
        EXPECT_LT(in_place, 20u) << n;
    }
    for (uint64_t i = 0; i < 1000; i++)
        EXPECT_LT(permutation(5, 2, i, (1ull << 40) + 1), (1ull << 40) + 1);
}

static const Tokenizer bytes_tokenizer = {"byte", 256};

// A shard of llm.c; `header` overrides what its first words say.
static std::string shard(const std::string& name, const std::vector<uint32_t>& tokens, size_t width,
                         std::vector<uint32_t> header = {}) {
    std::string bytes(1024, '\0');
    uint32_t words[3] = {width == 2 ? 20240520u : 20240801u, width == 2 ? 1u : 7u,
                         uint32_t(tokens.size())};
    std::copy(header.begin(), header.end(), words);
    memcpy(bytes.data(), words, sizeof(words));
    for (uint32_t t : tokens) bytes.append(reinterpret_cast<const char*>(&t), width);
    put(scratch(name), bytes);
    return scratch(name);
}

// tokens that are their own positions, from `first` on
static std::vector<uint32_t> positions(uint32_t first, size_t count) {
    std::vector<uint32_t> tokens(count);
    std::iota(tokens.begin(), tokens.end(), first);
    return tokens;
}

static std::string text_file(const std::string& name, uint32_t first, size_t count) {
    std::string bytes;
    for (uint32_t t : positions(first, count)) bytes += char(t);
    put(scratch(name), bytes);
    return scratch(name);
}

static std::string open_error(const std::string& value, size_t T = 4, size_t V = 1 << 20,
                              Part part = Part::TRAIN, bool own = true) {
    DataLoader d;
    return data_open(&d, value, part, own, bytes_tokenizer, T, V, 1);
}

// the first tokens of windows number `first` to `first + count`; every window is checked to be
// consecutive
static std::vector<int> starts(const DataLoader& d, uint64_t first, size_t count) {
    std::vector<int> out, tokens(d.T), targets(d.T);
    for (uint64_t s = first; s < first + count; s++) {
        EXPECT_EQ(load_window(d, s, tokens.data(), targets.data()), "");
        for (size_t i = 0; i < d.T; i++)
            EXPECT_TRUE(tokens[i] == tokens[0] + int(i) && targets[i] == tokens[i] + 1) << s;
        out.push_back(tokens[0]);
    }
    return out;
}

TEST(Data, EveryWindowOnceAnEpochOverAllKindsOfFiles) {
    // 41 tokens make 10 windows of 4 + 1, 17 make 4 exactly, 4 make none, 16 make 3
    std::string value =
        shard("u16.bin", positions(1000, 41), 2) + "," + shard("short.bin", positions(900, 4), 2) +
        "," + text_file("text.txt", 200, 30) + "," + shard("u32.bin", positions(100000, 17), 4) +
        "," + shard("none.bin", {}, 4) + "," + shard("last.bin", positions(5000, 16), 2);
    std::multiset<int> want;
    for (int i = 0; i < 10; i++) want.insert(1000 + 4 * i);
    for (int i = 0; i < 7; i++) want.insert(200 + 4 * i);
    for (int i = 0; i < 4; i++) want.insert(100000 + 4 * i);
    for (int i = 0; i < 3; i++) want.insert(5000 + 4 * i);

    DataLoader d, other, val;
    ASSERT_EQ(data_open(&d, value, Part::TRAIN, true, bytes_tokenizer, 4, 1 << 20, 7), "");
    ASSERT_EQ(data_open(&other, value, Part::TRAIN, true, bytes_tokenizer, 4, 1 << 20, 8), "");
    ASSERT_EQ(data_open(&val, value, Part::VAL, true, bytes_tokenizer, 4, 1 << 20, 7), "");
    ASSERT_EQ(data_windows(d), 24u);
    EXPECT_EQ(d.tokens, 41u + 4 + 30 + 17 + 0 + 16);
    EXPECT_EQ(data_text(d), "6 files, 108 tokens, 24 windows of 4");
    std::set<std::vector<int>> orders;
    for (uint64_t epoch : {0ull, 1ull, 2ull, 3ull, 1000000007ull})
        for (const DataLoader* x : {&d, &other}) {
            std::vector<int> order = starts(*x, epoch * 24, 24);
            EXPECT_EQ(std::multiset<int>(order.begin(), order.end()), want) << epoch;
            orders.insert(order);
        }
    EXPECT_EQ(orders.size(), 10u);
    std::vector<int> first =
        starts(val, 0, 24); // validation: every window in the files' order, always
    EXPECT_EQ(first, starts(val, 24, 24));
    EXPECT_EQ((std::vector<int>(first.begin(), first.begin() + 2)), (std::vector<int>{1000, 1004}));
    EXPECT_EQ((std::vector<int>(first.end() - 2, first.end())), (std::vector<int>{5004, 5008}));
}

TEST(Data, TrainingAndValidationShareNoToken) {
    for (size_t n = 20; n <= 260; n += n < 80 ? 1 : 9)
        for (size_t T : {1, 2, 3, 7}) {
            if (n / 10 < T + 1) continue;
            std::string a = shard("a.bin", positions(1000, n), 2),
                        b = shard("b.bin", positions(90000, n + 3), 4);
            std::string value = a + "," + b;
            DataLoader parts[2];
            std::set<int> seen[2];
            for (int p : {0, 1}) {
                Part part = p ? Part::VAL : Part::TRAIN;
                ASSERT_EQ(data_open(&parts[p], value, part, false, bytes_tokenizer, T, 1 << 20, 1),
                          "");
                std::vector<int> tokens(T), targets(T);
                for (size_t s = 0; s < parts[p].windows; s++) {
                    ASSERT_EQ(load_window(parts[p], s, tokens.data(), targets.data()), "");
                    seen[p].insert(tokens.begin(), tokens.end()),
                        seen[p].insert(targets.begin(), targets.end());
                }
            }
            for (int t : seen[0])
                ASSERT_FALSE(seen[1].count(t)) << "n " << n << " T " << T << " token " << t;
            // the last tenth, rounded down, and all windows that fit into the parts
            EXPECT_EQ(*seen[1].begin(), int(1000 + n - n / 10));
            EXPECT_EQ(parts[0].windows, (n - n / 10 - 1) / T + (n + 3 - (n + 3) / 10 - 1) / T);
            EXPECT_EQ(parts[1].windows, (n / 10 - 1) / T + ((n + 3) / 10 - 1) / T);
            EXPECT_EQ(parts[0].tokens + parts[1].tokens, 2 * n + 3);
            for (DataLoader& d : parts)
                for (DataFile& f : d.files)
                    munmap(const_cast<unsigned char*>(f.tokens) - 1024, 1024 + n); // many files
        }
}

TEST(Data, OwnValidationFilesAreUsedWholeAndMayNotBeTrainedOn) {
    std::string a = text_file("own_a.txt", 0, 50), b = text_file("own_b.txt", 100, 50),
                link = scratch("own_link.txt");
    fs::create_hard_link(a, link);
    DataLoader train, val, same;
    ASSERT_EQ(data_open(&train, a, Part::TRAIN, true, bytes_tokenizer, 7, 256, 1), "");
    ASSERT_EQ(data_open(&val, b, Part::VAL, true, bytes_tokenizer, 7, 256, 1), "");
    ASSERT_EQ(data_open(&same, b + "," + link, Part::VAL, true, bytes_tokenizer, 7, 256, 1), "");
    EXPECT_EQ(train.tokens, 50u);
    EXPECT_EQ(val.tokens, 50u);
    EXPECT_EQ(data_disjoint(train, val), "");
    EXPECT_HAS(data_disjoint(train, same),
               link + " is in --data and in --val"); // under another name too
    fs::remove(link);
}

TEST(Data, PatternsAndCommas) {
    for (int i : {3, 1, 2}) text_file("pattern" + std::to_string(i) + ".txt", uint32_t(10 * i), 9);
    std::string one = text_file("single.txt", 100, 9);
    std::vector<std::string> paths;
    EXPECT_EQ(
        data_paths(one + "," + scratch("pattern?.txt") + ",," + scratch("pattern[3].txt"), &paths),
        "");
    std::string p1 = scratch("pattern1.txt"), p2 = scratch("pattern2.txt"),
                p3 = scratch("pattern3.txt");
    EXPECT_EQ(paths, (std::vector<std::string>{one, p1, p2, p3, p3}));
    DataLoader d;
    ASSERT_EQ(data_open(&d, scratch("pattern*.txt"), Part::VAL, true, bytes_tokenizer, 4, 256, 1),
              "");
    EXPECT_EQ(starts(d, 0, d.windows), (std::vector<int>{10, 14, 20, 24, 30, 34}));
    EXPECT_HAS(open_error(one + "," + scratch("nothing*.txt")), "nothing*.txt: no file matches");
    EXPECT_HAS(open_error(""), "no data file in ''");
    EXPECT_HAS(open_error(",,"), "no data file in ',,'");
}

TEST(Data, FilesShorterThanAWindow) {
    std::string four = text_file("four.txt", 0, 4), five = text_file("five.txt", 10, 5);
    EXPECT_EQ(open_error(four), "the training text has 4 tokens in " + four +
                                    ": a sequence takes 5; give more text or a smaller --seq");
    EXPECT_HAS(open_error(four + "," + four),
               "has 8 tokens in " + four + " and others: a sequence takes 5");
    EXPECT_EQ(open_error(four + "," + five), "");
    EXPECT_EQ(open_error(five), "");
    // the tenth of 40 tokens has 4; a file that is long enough for training needs not be for
    // validation
    std::string forty = text_file("forty.txt", 0, 40);
    EXPECT_EQ(open_error(forty, 4, 256, Part::TRAIN, false), "");
    std::string wrong = open_error(forty, 4, 256, Part::VAL, false);
    EXPECT_HAS(wrong, "the validation text has 4 tokens");
    EXPECT_HAS(wrong, "or validation files with --val");
    EXPECT_EQ(open_error(forty, 4, 256, Part::VAL, true), "");
    EXPECT_EQ(open_error(text_file("fifty.txt", 0, 50), 4, 256, Part::VAL, false), "");
    EXPECT_HAS(open_error(shard("no_token.bin", {}, 2)), "has 0 tokens");
}

TEST(Data, RefusesFilesThatAreNotWhatTheySay) {
    EXPECT_HAS(open_error(scratch("absent.txt")), "absent.txt: No such file");
    EXPECT_HAS(open_error(testing::TempDir()), "is no file");
    put(scratch("empty.txt"), ""), put(scratch("empty.bin"), "");
    EXPECT_HAS(open_error(scratch("empty.txt")), "is empty");
    EXPECT_HAS(open_error(scratch("empty.bin")), "is empty");
    put(scratch("small.bin"), std::string(1023, 'x'));
    EXPECT_HAS(open_error(scratch("small.bin")),
               "1023 bytes are no token shard: its header alone has 1024");
    std::vector<uint32_t> t = positions(0, 20);
    EXPECT_HAS(
        open_error(shard("bad.bin", t, 2, {7})),
        "magic number 7 is not a token shard's (20240520 or 20240801); text files end in .txt");
    EXPECT_HAS(open_error(shard("bad.bin", t, 2, {20240520, 7})),
               "version 7 of magic 20240520 is unknown, only 1 is");
    EXPECT_HAS(open_error(shard("bad.bin", t, 4, {20240801, 1})),
               "version 1 of magic 20240801 is unknown, only 7 is");
    for (uint32_t promised : {0u, 19u, 21u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
        std::string says = "promises " + std::to_string(promised) + " tokens of ";
        EXPECT_HAS(open_error(shard("bad.bin", t, 2, {20240520, 1, promised})),
                   says + "2 bytes, the file holds 40");
        EXPECT_HAS(open_error(shard("bad.bin", t, 4, {20240801, 7, promised})),
                   says + "4 bytes, the file holds 80");
    }
    EXPECT_HAS(open_error(shard("bad.bin", t, 2, {20240801, 7})),
               "cut short"); // the other form's header
    std::string odd = get(shard("odd.bin", t, 2));
    put(scratch("odd.bin"), odd + "x");
    EXPECT_HAS(open_error(scratch("odd.bin")), "the file holds 41 bytes");
}

TEST(Data, RefusesTokensBeyondTheVocabulary) {
    std::string text = text_file("vocab.txt", 0, 50);
    EXPECT_HAS(open_error(text, 4, 255), "--tokenizer byte writes 256 tokens, the model has 255");
    EXPECT_EQ(open_error(text, 4, 256), "");
    int tokens[4], targets[4];
    for (size_t width : {2, 4}) {
        std::vector<uint32_t> t = positions(0, 29);
        t[12] = width == 2
                    ? 65535
                    : 0xffffffff; // the target that ends window 2, the first input of window 3
        std::string path = shard("beyond.bin", t, width);
        DataLoader d;
        ASSERT_EQ(data_open(&d, path, Part::VAL, true, bytes_tokenizer, 4, 100, 1),
                  ""); // a shard needs no tokenizer
        for (uint64_t s = 0; s < 7; s++) {
            std::string wrong = load_window(d, s, tokens, targets);
            std::string says = path + ": token " + std::to_string(t[12]) +
                               " at position 12 is beyond the model's vocabulary of 100";
            EXPECT_EQ(wrong.substr(0, says.size()), s == 2 || s == 3 ? says : "");
        }
        // the position in a held-back part is the file's
        t = positions(0, 100), t[93] = 300;
        ASSERT_EQ(data_open(&d, shard("beyond2.bin", t, width), Part::VAL, false, bytes_tokenizer,
                            4, 300, 1),
                  "");
        EXPECT_HAS(load_window(d, 0, tokens, targets), "token 300 at position 93");
        ASSERT_EQ(
            data_open(&d, scratch("beyond2.bin"), Part::VAL, false, bytes_tokenizer, 4, 301, 1),
            "");
        EXPECT_EQ(load_window(d, 0, tokens, targets), "");
    }
}

TEST(Data, DocumentsAreSplitBehindTheirEnds) {
    struct Case {
        std::vector<int> tokens, doc_start, ignored;
    };
    const int END = 9;
    for (const Case& c : std::vector<Case>{
             {{1, 2, 3, 4}, {0, 0, 0, 0}, {}},              // the middle of one
             {{1, 2, 9, 4}, {0, 0, 0, 3}, {2}},             // the end of one, the begin of another
             {{9, 1, 2, 9}, {0, 1, 1, 1}, {0, 3}},          // ends at both ends
             {{9, 9, 9, 1, 1}, {0, 1, 2, 3, 3}, {0, 1, 2}}, // documents without a text
             {{9}, {0}, {0}}}) {
        size_t T = c.tokens.size();
        std::vector<int> doc_start(T, -7), targets(T, 5), want(T, 5);
        targets[0] = want[0] = -1; // what was ignored stays so
        split_documents(doc_start.data(), targets.data(), c.tokens.data(), T, -1);
        EXPECT_EQ(doc_start, std::vector<int>(T, 0));
        EXPECT_EQ(targets, want);
        split_documents(doc_start.data(), targets.data(), c.tokens.data(), T, END);
        for (int i : c.ignored) want[size_t(i)] = -1;
        EXPECT_EQ(doc_start, c.doc_start);
        EXPECT_EQ(targets, want);
    }
}

TEST(Data, TheTokenThatEndsDocumentsIsKnownOrGiven) {
    std::string gpt2 = shard("gpt2.bin", positions(0, 20), 2),
                llama3 = shard("llama3.bin", positions(0, 20), 4),
                text = text_file("lines.txt", 0, 20);
    auto end_of = [](const DataLoader& d, int given, int eot) {
        Tokenizer tokenizer;
        tokenizer.eot = eot;
        int end = -7;
        std::string wrong = data_document_end(d, tokenizer, given, &end);
        return wrong.empty() ? std::to_string(end) : wrong;
    };
    auto ask = [&](const std::string& files, int given, size_t V, int eot = -1) {
        DataLoader d;
        EXPECT_EQ(data_open(&d, files, Part::TRAIN, true, bytes_tokenizer, 4, V, 1), "");
        return end_of(d, given, eot);
    };
    EXPECT_EQ(ask(gpt2, -1, 50257), "50256");
    EXPECT_EQ(ask(llama3, -1, 128256), "128000");
    EXPECT_EQ(ask(text, -1, 256, 255), "255");
    EXPECT_EQ(ask(text, 10, 256, 255), "10");
    DataLoader tokenized; // its tokens are as wide as Llama 3's shards'
    tokenized.V = 256, tokenized.files.resize(1), tokenized.files[0].width = 4;
    tokenized.files[0].encoded = std::make_shared<std::vector<int>>();
    EXPECT_EQ(end_of(tokenized, -1, 2), "2");
    EXPECT_EQ(ask(gpt2 + "," + llama3, 0, 50257), "0");
    EXPECT_HAS(ask(text, -1, 256), "--document-end 10");
    EXPECT_HAS(ask(gpt2 + "," + llama3, -1, 128256), "llama3.bin: give files of one kind");
    EXPECT_HAS(ask(gpt2, -1, 50256), "beyond the model's vocabulary of 50256");
    EXPECT_HAS(ask(text, 256, 256), "token 256");
}

TEST(Data, ProjectSourcesAreFoundFromTheProgramsFolder) {
    for (const char* folder : {"/", "/scripts/"}) { // itself, and one below it as a build folder is
        std::vector<std::string> found = project_sources(std::string(REPO_ROOT) + folder);
        auto has = [&](const std::string& end) {
            for (const std::string& f : found)
                if (f.ends_with("/" + end)) return true;
            return false;
        };
        EXPECT_TRUE(has("llmc/common.h") && has("test/test_data.cpp") && has("train_gpt.cu"))
            << folder;
    }
    EXPECT_TRUE(project_sources("/no/such/folder/").empty());
}

// ----------------------------------------------------------------------------
// samplers

static std::vector<std::pair<float, int>> order;

static int sample(const std::vector<float>& logits, float temperature, int top_k, float top_p,
                  double u) {
    return sample_token(logits.data(), logits.size(), temperature, top_k, top_p, u, order);
}

// all tokens that any number in [0,1) gives
static std::set<int> reachable(const std::vector<float>& logits, float temperature, int top_k,
                               float top_p) {
    std::set<int> out;
    for (int i = 0; i < 20000; i++)
        out.insert(sample(logits, temperature, top_k, top_p, i / 20000.0));
    out.insert(sample(logits, temperature, top_k, top_p, 1 - 0x1p-32));
    return out;
}

typedef std::set<int> Ints;

TEST(Sampler, GreedyTakesTheLowestOfEquals) {
    for (double u : {0.0, 0.5, 1 - 0x1p-32}) {
        EXPECT_EQ(sample({1, 3, 2, 3, 3}, 0, 0, 1, u), 1);
        EXPECT_EQ(sample({1, 3, 2, 3, 3}, 2, 1, 1, u), 1); // top-k 1 is greedy at any temperature
        EXPECT_EQ(sample({1, 3, 2, 3, 3}, 1, 0, 0, u), 1); // and so is top-p 0
        EXPECT_EQ(sample({-5, -5}, 0, 0, 1, u), 0);
        EXPECT_EQ(sample({7}, 1, 0, 1, u), 0);
        EXPECT_EQ(sample({0, -INFINITY, 5}, 0, 3, 0.5, u), 2);
    }
}

TEST(Sampler, TopKKeepsTheLikeliest) {
    std::vector<float> logits = {0.1f, 0.5f, 0.3f, 0.5f, 0.2f, 0.4f};
    EXPECT_EQ(reachable(logits, 1, 2, 1), (Ints{1, 3}));
    EXPECT_EQ(reachable(logits, 1, 3, 1), (Ints{1, 3, 5}));
    EXPECT_EQ(reachable(logits, 1, 4, 1), (Ints{1, 2, 3, 5}));
    for (int k : {0, 6, 7, 1000000})
        EXPECT_EQ(reachable(logits, 1, k, 1), (Ints{0, 1, 2, 3, 4, 5})) << k;
    EXPECT_EQ(reachable({2, 2, 2, 2}, 1, 2, 1), (Ints{0, 1})); // lower tokens first among equals
}

TEST(Sampler, TopPKeepsTheFewestThatReachTheShare) {
    std::vector<float> logits; // 0.0625, 0.5, 0.125, 0.25, 0.0625
    for (float p : {0.0625f, 0.5f, 0.125f, 0.25f, 0.0625f}) logits.push_back(std::log(p));
    EXPECT_EQ(reachable(logits, 1, 0, 0.3f), (Ints{1}));
    EXPECT_EQ(reachable(logits, 1, 0, 0.49f), (Ints{1}));
    EXPECT_EQ(reachable(logits, 1, 0, 0.51f), (Ints{1, 3}));
    EXPECT_EQ(reachable(logits, 1, 0, 0.74f), (Ints{1, 3}));
    EXPECT_EQ(reachable(logits, 1, 0, 0.8f), (Ints{1, 2, 3}));
    EXPECT_EQ(reachable(logits, 1, 0, 0.9f), (Ints{0, 1, 2, 3}));
    EXPECT_EQ(reachable(logits, 1, 0, 0.95f), (Ints{0, 1, 2, 3, 4}));
    EXPECT_EQ(reachable(logits, 1, 0, 1), (Ints{0, 1, 2, 3, 4}));
    // the share is one of what top-k left: of {0.5, 0.25} the first is two thirds
    EXPECT_EQ(reachable(logits, 1, 2, 0.6f), (Ints{1}));
    EXPECT_EQ(reachable(logits, 1, 2, 0.7f), (Ints{1, 3}));
    // temperature comes first: at 2 the shares go with the square roots, the first has 0.34 of all
    EXPECT_EQ(reachable(logits, 2, 0, 0.4f), (Ints{1, 3}));
}

TEST(Sampler, LargeAndImpossibleLogits) {
    EXPECT_EQ(reachable({1e30f, 1e30f, -1e30f}, 1, 0, 1), (Ints{0, 1}));
    EXPECT_EQ(reachable({-1e4f, -1e4f}, 1, 0, 1), (Ints{0, 1})); // shifted by the largest: no 0 / 0
    EXPECT_EQ(reachable({-INFINITY, 0, -INFINITY}, 1, 0, 1), (Ints{1}));
    EXPECT_EQ(reachable({-INFINITY, 0, -INFINITY}, 1, 2, 0.9f), (Ints{1}));
    EXPECT_EQ(reachable({0, 1}, 1e-6f, 0, 1), (Ints{1}));
    // a model that has diverged: any token, but one of the vocabulary
    std::vector<float> logits(1000);
    for (size_t i = 0; i < logits.size(); i++)
        logits[i] = i % 7 == 3 ? NAN : i % 11 == 5 ? INFINITY : float(i * 37 % 101);
    for (int k : {0, 40})
        for (float p : {0.9f, 1.0f}) {
            int token = sample(logits, 1, k, p, 0.5);
            EXPECT_TRUE(token >= 0 && token < 1000);
        }
}

TEST(Sampler, FrequenciesFollowTheProbabilities) {
    const int N = 200000;
    std::vector<float> logits = {0.3f, -1.0f, 2.0f, 1.1f, 0.0f, 1.9f, -0.4f, 0.7f};
    struct Case {
        float temperature;
        int top_k;
        float top_p;
        size_t kept;
    };
    std::vector<Case> cases = {{1, 0, 1, 8}, {0.5f, 0, 1, 8}, {3, 0, 1, 8},
                               {1, 4, 1, 4}, {1, 0, 0.7f, 3}, {2, 6, 0.8f, 5}};
    for (Case c : cases) {
        std::vector<std::pair<double, int>> p; // likeliest first
        for (size_t v = 0; v < 8; v++)
            p.push_back({-std::exp(double(logits[v]) / c.temperature), int(v)});
        std::sort(p.begin(), p.end());
        std::map<int, double> expected;
        double sum = 0;
        for (size_t i = 0; i < c.kept; i++) expected[p[i].second] = -p[i].first, sum -= p[i].first;
        std::map<int, int> hits;
        for (int i = 0; i < N; i++) {
            double u = uniform(11, fnv1a("draws"), uint64_t(i));
            hits[sample(logits, c.temperature, c.top_k, c.top_p, u)]++;
        }
        double chi2 = 0;
        for (auto [token, weight] : expected) {
            double want = N * weight / sum;
            chi2 += (hits[token] - want) * (hits[token] - want) / want;
        }
        EXPECT_EQ(hits.size(), c.kept) << c.temperature << " " << c.top_k << " " << c.top_p;
        EXPECT_LT(chi2, 24.3) << c.temperature << " " << c.top_k << " "
                              << c.top_p; // 7 degrees of freedom: 1 in 1000
    }
}

// ----------------------------------------------------------------------------
// safetensors

static std::string bytes_of(uint64_t n) { return {reinterpret_cast<const char*>(&n), 8}; }
static std::string whole(const std::string& header, size_t body) {
    return bytes_of(header.size()) + header + std::string(body, '\1');
}

static std::string open_bytes(const std::string& bytes) {
    put(scratch("bytes.safetensors"), bytes);
    SafeTensors s;
    std::string wrong = safetensors_open(&s, scratch("bytes.safetensors"));
    EXPECT_TRUE(wrong.empty() || (s.map == nullptr && s.tensors.empty()));
    safetensors_close(&s);
    return wrong;
}

// A tensor's entry.
static std::string entry(const std::string& name, const std::string& dtype,
                         const std::string& shape, const std::string& offsets) {
    return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
           ",\"data_offsets\":" + offsets + "}";
}

TEST(SafeTensors, WhatIsWrittenIsReadBack) {
    std::string path = scratch("written.safetensors");
    std::vector<float> f(15);
    for (size_t i = 0; i < f.size(); i++) f[i] = 1.5f - 0.25f * float(i);
    std::vector<double> doubles = {1e-3, -2e5, 1e300, -INFINITY, 0x1p-149};
    uint16_t half[15], brain[15];
    float_to_type(half, f.data(), 15, Type::F16), float_to_type(brain, f.data(), 15, Type::BF16);
    std::map<std::string, std::string> metadata = {
        {"format", "pt"}, {"a \"quoted\"\nline", "\xc3\xa9 \\ \t"}, {"", ""}};
    std::vector<TensorSpec> specs = {
        {"z.weight", Type::F32, {3, 5}},       {"scalar", Type::F32, {}},
        {"a \"b\"\xc3\xa9", Type::BF16, {15}}, {"empty", Type::F32, {0, 4}},
        {"half", Type::F16, {5, 1, 3}},        {"doubles", Type::F64, {5}}};
    FileWriter w;
    ASSERT_EQ(writer_open(&w, path, specs, metadata), "");
    EXPECT_FALSE(fs::exists(path)); // not before it is whole
    writer_put(w, f.data(), 60), writer_put(w, f.data(), 4);
    writer_put(w, brain, 7),
        writer_put(w, reinterpret_cast<char*>(brain) + 7, 23); // pieces of any size
    writer_put(w, nullptr, 0), writer_put(w, half, 30), writer_put(w, doubles.data(), 40);
    ASSERT_EQ(writer_close(&w), "");
    EXPECT_FALSE(fs::exists(path + ".tmp"));
    std::string bytes = get(path);
    EXPECT_EQ(w.bytes, bytes.size());
    EXPECT_EQ(w.crc,
              uint32_t(crc32(0, reinterpret_cast<const Bytef*>(bytes.data()), uInt(bytes.size()))));
    uint64_t header;
    memcpy(&header, bytes.data(), 8);
    EXPECT_EQ(header % 8, 0u); // the data begins aligned

    SafeTensors s;
    ASSERT_EQ(safetensors_open(&s, path), "");
    EXPECT_EQ(s.metadata, metadata);
    EXPECT_EQ(s.tensors.size(), specs.size());
    for (const TensorSpec& t : specs) {
        const SafeTensor* found = safetensors_find(s, t.name);
        ASSERT_NE(found, nullptr) << t.name;
        EXPECT_EQ(found->dtype, type_name(t.type));
        EXPECT_EQ(found->shape, t.shape);
        EXPECT_EQ(found->bytes, t.bytes());
        EXPECT_EQ(found->elements() * type_bytes(t.type), t.bytes());
        std::vector<float> out(found->elements(), -9);
        tensor_to_float(out.data(), *found, 0, out.size());
        for (size_t i = 0; i < out.size(); i++)
            EXPECT_EQ(out[i], t.type == Type::F64 ? float(doubles[i]) : f[i]) << t.name << " " << i;
        for (size_t first : {1, 4}) { // a part of it
            if (out.size() < 5) continue;
            float part = -9;
            tensor_to_float(&part, *found, first, 1);
            EXPECT_EQ(part, out[first]);
        }
    }
    for (const char* name : {"", "z.weigh", "z.weights", "zz", "__metadata__"})
        EXPECT_EQ(safetensors_find(s, name), nullptr) << name;
    safetensors_close(&s);
    safetensors_close(&s); // twice does no harm
}

TEST(SafeTensors, AFileOfNothingIsWhole) {
    FileWriter w;
    ASSERT_EQ(writer_open(&w, scratch("nothing.safetensors"), {}, {}), "");
    ASSERT_EQ(writer_close(&w), "");
    SafeTensors s;
    EXPECT_EQ(safetensors_open(&s, scratch("nothing.safetensors")), "");
    EXPECT_TRUE(s.tensors.empty());
    safetensors_close(&s);
}

TEST(SafeTensors, TensorsMayComeInAnyOrderAndBeUnaligned) {
    std::string b = entry("b", "F32", "[1]", "[3,7]"), a = entry("a", "U8", "[3]", "[0,3]");
    EXPECT_EQ(open_bytes(whole("{" + b + "," + a + "}  ", 7)), "");
    EXPECT_EQ(open_bytes(whole("{" + entry("a", "F64", "[0]", "[0,0]") + "}", 0)), "");
    for (const char* dtype :
         {"I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "F8_E4M3", "F8_E5M2"}) {
        std::string n = std::to_string(3 * dtype_bytes(dtype));
        std::string header = std::string("{") + entry("a", dtype, "[3]", "[0," + n + "]") + "}";
        EXPECT_EQ(open_bytes(whole(header, 3 * dtype_bytes(dtype))), "");
    }
}

TEST(SafeTensors, RefusesEveryMalformedHeader) {
    const std::string good = entry("a", "F32", "[2]", "[0,8]");
    ASSERT_EQ(open_bytes(whole("{" + good + "}", 8)), "");
    struct Case {
        std::string header;
        size_t body;
        const char* wrong;
    };
    std::string huge = "18446744073709551615", big = "4294967296", deep(300000, '['),
                closed(300000, ']');
    for (const Case& c : std::vector<Case>{
             {"", 0, "no JSON object"},
             {"{", 0, "no JSON object"},
             {"{" + good, 8, "no JSON object"},
             {"{" + good + "}}", 8, "no JSON object"},
             {"{" + good + ",}", 8, "no JSON object"},
             {"{\"\xff\":1}", 0, "no JSON object"}, // not UTF-8
             {"{\"a\":1e999}", 0, "no JSON object"},
             {"hello", 0, "no JSON object"},
             {"[]", 0, "no JSON object"},
             {"[" + std::string("{") + good + "}]", 8, "no JSON object"},
             {"null", 0, "no JSON object"},
             {"7", 0, "no JSON object"},
             {deep, 0, "no JSON object"},
             {deep + closed, 0, "no JSON object"},
             {"{" + good + "," + good + "}", 8, "names a twice"},
             {"{" + good + "," + entry("a", "F32", "[1]", "[8,12]") + "}", 12, "names a twice"},
             {"{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}",
              8, "names dtype twice"},
             {"{\"a\":3}", 0, "tensor a has no dtype, shape and data_offsets"},
             {"{\"a\":null}", 0, "has no dtype, shape"},
             {"{\"a\":[\"F32\",[2],[0,8]]}", 8, "has no dtype, shape"},
             {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, "has no dtype, shape"},
             {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", 8, "has no dtype, shape"},
             {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "has no dtype, shape"},
             {"{\"a\":{\"dtype\":32,\"shape\":[2],\"data_offsets\":[0,8]}}", 8,
              "dtype that is no text"},
             {"{" + entry("a", "F33", "[2]", "[0,8]") + "}", 8, "unknown dtype F33"},
             {"{" + entry("a", "f32", "[2]", "[0,8]") + "}", 8, "unknown dtype f32"},
             {"{" + entry("a", "F32", "2", "[0,8]") + "}", 8, "shape that is no list"},
             {"{" + entry("a", "F32", "{\"0\":2}", "[0,8]") + "}", 8, "shape that is no list"},
             {"{" + entry("a", "F32", "[2.0]", "[0,8]") + "}", 8, "shape with 2.0"},
             {"{" + entry("a", "F32", "[2e0]", "[0,8]") + "}", 8, "which is no size"},
             {"{" + entry("a", "F32", "[-2]", "[0,8]") + "}", 8, "shape with -2"},
             {"{" + entry("a", "F32", "[-2,-1]", "[0,8]") + "}", 8, "shape with -2"},
             {"{" + entry("a", "F32", "[\"2\"]", "[0,8]") + "}", 8, "which is no size"},
             {"{" + entry("a", "F32", "[true]", "[0,8]") + "}", 8, "which is no size"},
             {"{" + entry("a", "F32", "[null]", "[0,8]") + "}", 8, "which is no size"},
             {"{" + entry("a", "F32", "[[2]]", "[0,8]") + "}", 8, "which is no size"},
             {"{" + entry("a", "F32", "[" + deep + closed + "]", "[0,8]") + "}", 8,
              "which is no size"},
             {"{" + entry("a", "F32", "[18446744073709551616]", "[0,8]") + "}", 8,
              "which is no size"},
             {"{" + entry("a", "F32", "[" + big + "," + big + "]", "[0,0]") + "}", 0,
              "shape too large"},
             {"{" + entry("a", "F32", "[" + huge + ",2]", "[0,8]") + "}", 8, "shape too large"},
             {"{" + entry("a", "F32", "[" + huge + "]", "[0,8]") + "}", 8,
              "need more than there are"},
             {"{" + entry("a", "F32", "[4611686018427387904]", "[0,0]") + "}", 0,
              "need more than there are"},
             {"{" + entry("a", "F32", "[4611686018427387906]", "[0,8]") + "}", 8,
              "need more than there are"},
             {"{" + entry("a", "F32", "[3]", "[0,8]") + "}", 8,
              "has 8 bytes, its shape and dtype F32 need 12"},
             {"{" + entry("a", "F32", "[1]", "[0,8]") + "}", 8,
              "has 8 bytes, its shape and dtype F32 need 4"},
             {"{" + entry("a", "F32", "[]", "[0,8]") + "}", 8, "need 4"},
             {"{" + entry("a", "F32", "[0]", "[0,8]") + "}", 8, "need 0"},
             {"{" + entry("a", "F32", "[2]", "8") + "}", 8, "are not two positions"},
             {"{" + entry("a", "F32", "[2]", "[8]") + "}", 8, "are not two positions"},
             {"{" + entry("a", "F32", "[2]", "[]") + "}", 8, "are not two positions"},
             {"{" + entry("a", "F32", "[2]", "[0,8,8]") + "}", 8, "are not two positions"},
             {"{" + entry("a", "F32", "[2]", "[-8,0]") + "}", 8, "are not two positions"},
             {"{" + entry("a", "F32", "[2]", "[0.0,8.0]") + "}", 8, "are not two positions"},
             {"{" + entry("a", "F32", "[2]", "[\"0\",\"8\"]") + "}", 8, "are not two positions"},
             {"{" + entry("a", "F32", "[2]", "[8,0]") + "}", 8, "lies at 8 to 0 of 8"},
             {"{" + entry("a", "F32", "[2]", "[0,8]") + "}", 7, "lies at 0 to 8 of 7 bytes"},
             {"{" + entry("a", "F32", "[2]", "[8,16]") + "}", 8, "lies at 8 to 16 of 8"},
             {"{" + entry("a", "F32", "[2]", "[18446744073709551608," + huge + "]") + "}", 8,
              "lies at"},
             {"{" + entry("a", "F32", "[2]", "[0," + huge + "]") + "}", 8, "lies at"},
             {"{" + good + "," + entry("b", "F32", "[2]", "[4,12]") + "}", 12,
              "two tensors overlap at byte 4"},
             {"{" + good + "," + entry("b", "F32", "[2]", "[0,8]") + "}", 8,
              "two tensors overlap at byte 0"},
             {"{" + good + "," + entry("b", "F32", "[2]", "[12,20]") + "}", 20,
              "bytes 8 to 12 of the data belong to no tensor"},
             {"{" + entry("a", "F32", "[2]", "[4,12]") + "}", 12,
              "bytes 0 to 4 of the data belong to no tensor"},
             {"{" + good + "}", 9, "the tensors end at byte 8 of 9"},
             {"{}", 1, "the tensors end at byte 0 of 1"},
         }) {
        std::string wrong = open_bytes(whole(c.header, c.body));
        EXPECT_HAS(wrong, c.wrong) << c.header.substr(0, 200);
        EXPECT_EQ(wrong.find('\n'), std::string::npos);
    }
}

TEST(SafeTensors, RefusesLengthsThatDoNotFit) {
    std::string good = whole("{" + entry("a", "F32", "[2]", "[0,8]") + "}", 8);
    for (size_t n = 0; n < good.size(); n++)
        EXPECT_NE(open_bytes(good.substr(0, n)), "") << n; // cut anywhere
    EXPECT_NE(open_bytes(good + "x"), "");
    EXPECT_HAS(open_bytes(good.substr(0, 5)), "is 5 bytes long, too short");
    EXPECT_HAS(open_bytes(good.substr(0, 30)), "truncated, or no safetensors file");
    for (uint64_t length : {good.size() - 7, good.size(), 1ul << 32, 1ul << 63, ~0ul, ~7ul})
        EXPECT_HAS(open_bytes(bytes_of(length) + good.substr(8)),
                   "said to take " + std::to_string(length) + " bytes");
    SafeTensors s;
    EXPECT_HAS(safetensors_open(&s, scratch("absent.safetensors")), "No such file");
    EXPECT_HAS(safetensors_open(&s, testing::TempDir()), "is empty or no file");
    EXPECT_HAS(open_bytes(""), "is empty or no file");
}

TEST(SafeTensors, MetadataIsText) {
    put(scratch("meta.safetensors"),
        whole("{\"__metadata__\":{\"a\":\"b\",\"n\":7,\"l\":[\"c\"]}}", 0));
    SafeTensors s;
    ASSERT_EQ(safetensors_open(&s, scratch("meta.safetensors")), "");
    EXPECT_EQ(s.metadata,
              (std::map<std::string, std::string>{{"a", "b"}})); // what is no text is left out
    safetensors_close(&s);
    for (const char* value : {"null", "7", "[]", "[1,2]", "{}", "true"}) // odd, but no harm
        EXPECT_EQ(open_bytes(whole(std::string("{\"__metadata__\":") + value + "}", 0)), "")
            << value;
}

// Write `bytes` of data where the header promises 64 KB; the message.
static std::string write_over(const std::string& path, size_t bytes) {
    FileWriter w;
    std::vector<float> data(16384, 1.0f);
    writer_open(&w, path, {{"a", Type::F32, {16384}}}, {});
    writer_put(w, data.data(), bytes);
    return writer_close(&w);
}

static void expect_untouched(const std::string& path) {
    EXPECT_FALSE(fs::exists(fs::symlink_status(path + ".tmp")));
    EXPECT_EQ(get(path), "old");
}

TEST(SafeTensors, AFailedWriteLeavesTheOldFile) {
    std::string path = scratch("old.safetensors");
    put(path, "old");
    // fewer bytes than promised, and more
    EXPECT_HAS(write_over(path, 65532), "bytes written, the header promises");
    expect_untouched(path);
    FileWriter w;
    writer_open(&w, path, {}, {});
    writer_put(w, "12345678", 8);
    EXPECT_HAS(writer_close(&w), "24 bytes written, the header promises 16");
    expect_untouched(path);

    // files may grow to `limit` bytes only: in the data, in the header, and in its length
    rlimit before, small;
    getrlimit(RLIMIT_FSIZE, &before);
    auto handler = signal(SIGXFSZ, SIG_IGN);
    for (size_t limit : {40000, 12, 4, 0}) {
        small = before, small.rlim_cur = limit;
        ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
        std::string wrong = write_over(path, 65536);
        setrlimit(RLIMIT_FSIZE, &before); // before anything is printed
        EXPECT_HAS(wrong, path + ": cannot be written: File too large") << limit;
        expect_untouched(path);
    }
    signal(SIGXFSZ, handler);

    // a full disk
    fs::create_symlink("/dev/full", path + ".tmp");
    EXPECT_HAS(write_over(path, 65536), path + ": cannot be written: No space left");
    expect_untouched(path);

    EXPECT_EQ(write_over(path, 65536), ""); // and now it works
    SafeTensors s;
    EXPECT_EQ(safetensors_open(&s, path), "");
    safetensors_close(&s);
}

TEST(SafeTensors, AFolderThatCannotBeWritten) {
    EXPECT_HAS(write_over(scratch("no/folder/x.safetensors"), 65536),
               "cannot be written: No such file");
    put(scratch("file"), "old");
    EXPECT_HAS(write_over(scratch("file/x.safetensors"), 65536),
               "cannot be written: Not a directory");
    EXPECT_EQ(get(scratch("file")), "old");
    EXPECT_HAS(write_over("/proc/self/x.safetensors", 65536),
               "cannot be written"); // root may not write there either
    // the final name is a folder
    fs::create_directories(scratch("taken.safetensors/inside"));
    EXPECT_HAS(write_over(scratch("taken.safetensors"), 65536), "cannot be renamed");
    EXPECT_FALSE(fs::exists(scratch("taken.safetensors.tmp")));
    EXPECT_TRUE(fs::exists(scratch("taken.safetensors/inside")));
    // a folder without the right to write
    fs::create_directories(scratch("locked"));
    std::string path = scratch("locked/old.safetensors");
    put(path, "old");
    fs::permissions(scratch("locked"), fs::perms::owner_read | fs::perms::owner_exec);
    std::string wrong = geteuid() == 0 ? "Permission denied"
                                       : write_over(path, 65536); // root may write all the same
    EXPECT_HAS(wrong, "Permission denied");
    fs::permissions(scratch("locked"), fs::perms::owner_all);
    expect_untouched(path);
    EXPECT_EQ(sync_folder(folder_of(path)), "");
    EXPECT_HAS(sync_folder(scratch("absent")), "No such file");
    EXPECT_EQ(folder_of("x.safetensors"), ".");
}

TEST(SafeTensors, TextThatIsNotUtf8IsWrittenWithoutAThrow) {
    std::string path = scratch("latin1.safetensors");
    FileWriter w;
    EXPECT_NO_THROW(writer_open(&w, path, {}, {{"data", "caf\xe9.txt"}}));
    EXPECT_EQ(writer_close(&w), "");
    SafeTensors s;
    EXPECT_EQ(safetensors_open(&s, path), "");
    EXPECT_EQ(s.metadata["data"], "caf\xef\xbf\xbd.txt"); // the replacement character
    safetensors_close(&s);
}
