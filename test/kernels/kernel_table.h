// kernel_table.h - the kernel table's harness: CUDA kernels against the CPU version in double
//   The same rows run in the emulator (g++ -DEMULATE) and on a GPU (nvcc). In the emulator each
//   case runs with its threads forward, in reverse and shuffled, and with asynchronous operations
//   at their earliest and their latest: all must give the same bits. On a GPU each case runs twice.
#pragma once
#include <unistd.h>
#include "../../llmc/ops/memory.h"
#include "../harness/op_table.h"

using namespace llmc;

#if defined(__SANITIZE_THREAD__)
constexpr bool SMALL = true; // 80 times slower: take the smallest shapes that reach every path
#else
constexpr bool SMALL = false;
#endif

// A sanitizer finds a race, or a byte out of bounds, in any order of the threads.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool TWO_ORDERS = true; // forward at the earliest, shuffled at the latest
#else
constexpr bool TWO_ORDERS = false;
#endif

// ----------------------------------------------------------------------------
// memory where kernels run. In the emulator it has the exact size, so that AddressSanitizer sees
// the first byte beyond it.

// An array in the device's memory, made from numbers on the host.

template <typename T> struct Array {
    size_t n = 0;
    size_t shift = 0;   // elements by which the start is out of 16-byte alignment
    T* start = nullptr; // (shift + n)
    T* data = nullptr;  // (n)

    // Poisoned: every byte is 0xff, which is NaN in a float and -1 in an int.
    explicit Array(size_t n, size_t shift = 0) : n(n), shift(shift) {
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
    // The same bytes: a conversion from double may change a NaN's.
    explicit Array(const std::vector<T>& x) requires(!std::is_same_v<T, double>) : n(x.size()) {
        take(x.data());
    }
    Array(const Array&) = delete;
    ~Array() { cudaFree(start); }
    size_t bytes() const { return (shift + n) * sizeof(T); }
    // Allocate, and copy from the host.
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

// A case's outputs. Those of the first run are compared with what is wanted, those of later runs
// with the bits of the first.
struct Outputs {
    Check& c;
    std::string mode;                             // the run's order and times, for messages
    size_t at = 0;                                // number of the next output
    std::vector<std::vector<unsigned char>> bits; // the first run's outputs

    // Check one output: the first run against `want`, others against its bits.
    template <typename T>
    void add(const char* name, const Array<T>& got, const std::vector<double>& want,
             double tolerance, double terms = 0) {
        std::vector<T> host = got.host();
        std::vector<unsigned char> these(host.size() * sizeof(T));
        if (!these.empty()) memcpy(these.data(), host.data(), these.size());
        if (at == bits.size()) {
            bits.push_back(these);
            std::vector<double> x(host.size());
            for (size_t i = 0; i < x.size(); i++) x[i] = as_number(host[i]);
            close(c, name, x, want, tolerance, terms);
        } else {
            expect(c, bits[at] == these, std::string(name) + ": other bits " + mode);
        }
        at++;
    }

    // Check that an output has the same bits in every run. Their values are not known.
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

// Whether a case runs once for each warp that comes last, or with one warp drawn by chance.
inline bool each_warp_last = false;

// Run a case in every order. body(Outputs&) makes the arrays, launches, and adds the outputs.
template <typename F> void every_order(Check& c, F body) {
    Outputs out{c, "", 0, {}};
#if defined(EMULATE)
    const char* names[] = {"in forward order", "in reverse order", "in shuffled order"};
    for (int order = 0; order < 3; order++)
        for (bool latest : {false, true}) {
            if (TWO_ORDERS && (order == 1 || latest != (order == 2))) continue;
            emulator::settings = {emulator::Order(order), c.random() | 1, latest};
            out.mode = names[order];
            if (latest) out.mode += ", asynchronous as late as can be";
            out.at = 0;
            body(out);
            for (const std::string& message : emulator::take_messages())
                expect(c, false, out.mode + ": " + message);
        }

    // Keep one warp back.
    for (int i = 0; i < (each_warp_last ? 12 : 1); i++) {
        int warp = each_warp_last ? i : int(c.random() % 12);
        emulator::settings = {emulator::Order::SHUFFLED, c.random() | 1, true, warp};
        out.mode = "with warp " + std::to_string(warp) + " last";
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

// Names the case. A failure's message starts with this name. On a GPU, where an error ends the
// program, the name is printed before the case runs.
inline char case_text[200];
inline void begin_case(Check& c) {
    c.row = case_text;
#if defined(__CUDACC__)
    printf("  case %s\n", case_text);
    fflush(stdout);
#endif
}
#define CASE(c, ...)                                         \
    do {                                                     \
        snprintf(case_text, sizeof(case_text), __VA_ARGS__); \
        begin_case(c);                                       \
    } while (0)

struct KernelRow {
    const char* name;
    void (*test)(Check&);
};

// Rows for each type that a kernel takes, such as "gelu float", "gelu bf16" and "gelu fp16".
#define TWO_TYPES(name, test) {name " float", test<float>}, {name " bf16", test<bf16>}
#define THREE_TYPES(name, test) TWO_TYPES(name, test), {name " fp16", test<fp16>}

// A table's main(): test_kernels [name] [--seed N] [--after ROW] [--limit S]
//   name       run the rows whose name contains it
//   --after    begin behind this row: a CUDA error ends the program, and a second call goes on
//   --limit    end the program, by SIGALRM, where a row takes longer than S seconds
inline int kernel_main(int argc, char** argv, const std::vector<KernelRow>& rows) {
    // Read the rows' name, the seed, where to begin and a row's time.
    std::string filter, after;
    uint64_t seed = 1; // the same test on each machine; test/check.sh draws others
    unsigned limit = 0;
    for (int i = 1; i < argc; i++) {
        bool has_value = i + 1 < argc;
        if (!strcmp(argv[i], "--seed") && has_value)
            seed = strtoull(argv[++i], nullptr, 10);
        else if (!strcmp(argv[i], "--after") && has_value)
            after = argv[++i];
        else if (!strcmp(argv[i], "--limit") && has_value)
            limit = unsigned(atoi(argv[++i]));
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
    // Run the rows, each from the same seed, so that one row alone repeats what it
    // did among the others.
    int passed = 0, failed = 0;
    bool begun = after.empty();
    for (const KernelRow& row : rows) {
        bool runs = begun && std::string(row.name).find(filter) != std::string::npos;
        begun = begun || row.name == after;
        if (!runs) continue;

        // Print the name first: where the program ends within the row, this line is the last.
        printf("run %s\n", row.name);
        fflush(stdout);
        alarm(limit);
        Check c;
        c.random.seed(seed);
        c.row = row.name;
        auto start = std::chrono::steady_clock::now();
        row.test(c);
        alarm(0);
        double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

        bool good = c.failures == 0 && c.checks > 0;
        printf("%s %s: %d checks, %d failed (%.1f s)\n", good ? "ok" : "FAIL", row.name, c.checks,
               c.failures, s);
        fflush(stdout);
        good ? passed++ : failed++;
    }
    if (!begun) printf("no row is called %s\n", after.c_str());
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0 || passed == 0;
}
