// kernel_table.h - the kernel table's harness: CUDA kernels against the CPU version in double
//   The same rows run in the emulator (g++ -DEMULATE) and on a GPU (nvcc). In the emulator each
//   case runs with its threads forward, in reverse and shuffled, and asynchronous operations at
//   their earliest and latest: all must give the same bits. On a GPU each case runs twice.
#pragma once
#include "../../llmc/memory.h"
#include "../harness/op_table.h"

using namespace llmc;

#if defined(__SANITIZE_THREAD__)
constexpr bool SMALL = true; // 80 times slower: the smallest shapes that take every path
#else
constexpr bool SMALL = false;
#endif

// ----------------------------------------------------------------------------
// memory where kernels run: on a GPU the device's; in the emulator of the exact size, so that
// AddressSanitizer sees the first byte beyond

template <typename T> struct Array {
    size_t n = 0;
    size_t shift = 0;   // elements by which the start is out of 16-byte alignment
    T* start = nullptr; // (shift + n)
    T* data = nullptr;  // (n)

    explicit Array(size_t n, size_t shift = 0) : n(n), shift(shift) { // NaN, or -1
        std::vector<unsigned char> poison(bytes(), 0xff);
        take(poison.data());
    }
    explicit Array(const std::vector<double>& x, size_t shift = 0) : n(x.size()), shift(shift) {
        std::vector<T> y(shift + n);
        for (size_t i = 0; i < n; i++) {
            if constexpr (std::is_integral_v<T>)
                y[shift + i] = T(x[i]);
            else
                y[shift + i] = from_acc<T>(acc_t<T>(x[i]));
        }
        take(y.data());
    }
    explicit Array(const std::vector<int>& x) requires std::is_same_v<T, int> : n(x.size()) {
        take(x.data());
    }
    Array(const Array&) = delete;
    ~Array() { cudaFree(start); }
    size_t bytes() const { return (shift + n) * sizeof(T); }
    void take(const void* from) {
        LLMC_CUDA_CHECK(cudaMalloc(&start, bytes()));
        copy_in(start, from, bytes(), no_stream());
        wait_for(no_stream());
        data = start + shift;
    }
    std::vector<T> host() const {
        std::vector<T> x(n);
        copy_out(x.data(), data, n * sizeof(T), no_stream());
        return x;
    }
    static cudaStream_t no_stream() { return nullptr; }
};

// ----------------------------------------------------------------------------
// running a case

// A case's outputs: the first run's are compared with what is wanted, the others with its bits.
struct Outputs {
    Check& c;
    std::string mode;                             // the run's order, for messages
    size_t at = 0;                                // the next output's number
    std::vector<std::vector<unsigned char>> bits; // of the first run's outputs

    template <typename T>
    void add(const char* name, const Array<T>& got, const std::vector<double>& want,
             double tolerance, double terms = 0, bool repeats = true) {
        std::vector<T> host = got.host();
        std::vector<unsigned char> these(host.size() * sizeof(T));
        if (!these.empty()) memcpy(these.data(), host.data(), these.size());

        if (at == bits.size() || !repeats) {
            if (at == bits.size()) bits.push_back(these);
            std::vector<double> x(host.size());
            for (size_t i = 0; i < x.size(); i++) x[i] = as_number(host[i]);
            close(c, name, x, want, tolerance, terms);
        } else {
            expect(c, bits[at] == these, std::string(name) + ": other bits " + mode);
        }
        at++;
    }

    // The same bits in every run, whatever they are.
    template <typename T> void same(const char* name, const T* device, size_t n) {
        std::vector<unsigned char> these(n * sizeof(T));
        copy_out(these.data(), device, these.size(), cudaStream_t{});
        if (at == bits.size()) bits.push_back(these);
        expect(c, bits[at] == these, std::string(name) + ": other bits " + mode);
        at++;
    }
    static double as_number(int x) { return x; }
    template <typename T> static double as_number(T x) { return double(to_acc(x)); }
};

// body(Outputs&) makes its arrays, launches, and adds what came out.
template <typename F> void every_order(Check& c, F body) {
    Outputs out{c, "", 0, {}};
#if defined(EMULATE)
    const char* names[] = {"in forward order", "in reverse order", "in shuffled order"};
    for (int order = 0; order < 3; order++)
        for (bool latest : {false, true}) {
            // ThreadSanitizer sees a race in whatever order: two runs of the six are enough.
            bool spared = SMALL && (order == 1 || latest != (order == 2));
            if (spared) continue;
            emulator::settings = {emulator::Order(order), c.random() | 1, latest};
            out.mode = names[order];
            if (latest) out.mode += ", asynchronous as late as can be";
            out.at = 0;
            body(out);
            for (const std::string& message : emulator::take_messages())
                expect(c, false, out.mode + ": " + message);
        }

    emulator::settings = {};
#else
    for (int run = 0; run < 2; run++) {
        out.mode = "in a second run";
        out.at = 0;
        body(out);
        wait_for(cudaStream_t(nullptr));
    }
#endif
}

inline const char* type_word(float) { return "float"; }
inline const char* type_word(bf16) { return "bf16"; }
inline const char* type_word(fp16) { return "fp16"; }

// Names the case: a failure's message starts with it.
inline char case_text[200];
#define CASE(c, ...)                                         \
    do {                                                     \
        snprintf(case_text, sizeof(case_text), __VA_ARGS__); \
        (c).row = case_text;                                 \
    } while (0)

struct KernelRow {
    const char* name;
    void (*test)(Check&);
};

// test_kernels [name] [--seed N]
inline int kernel_main(int argc, char** argv, const std::vector<KernelRow>& rows) {
    std::string filter;
    uint64_t seed = std::random_device()();
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--seed") && i + 1 < argc)
            seed = strtoull(argv[++i], nullptr, 10);
        else
            filter = argv[i];
    }
    printf("seed %llu (--seed repeats it)\n", (unsigned long long)seed);

#if defined(__CUDACC__)
    if (std::string why = no_gpu_because(); !why.empty()) {
        printf("skipped: %s\n0 passed, 0 failed, 1 skipped\n", why.c_str());
        return 0;
    }
#endif
    // Run the rows whose name has the filter.
    int passed = 0, failed = 0;
    for (const KernelRow& row : rows) {
        if (std::string(row.name).find(filter) == std::string::npos) continue;
        Check c;
        c.random.seed(seed);
        c.row = row.name;
        auto start = std::chrono::steady_clock::now();
        row.test(c);
        double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

        bool good = c.failures == 0 && c.checks > 0;
        printf("%s %s: %d checks, %d failed (%.1f s)\n", good ? "ok" : "FAIL", row.name, c.checks,
               c.failures, s);
        fflush(stdout);
        good ? passed++ : failed++;
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0 || passed == 0;
}
