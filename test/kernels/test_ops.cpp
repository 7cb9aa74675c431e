// test_ops.cpp - the op table: test_ops [test|grad|perf] [name] [--seed N]
//   Without a mode: test and grad.
#include <cstdlib>
#include "../harness/op_table.h"
#include "ops_distill.h"
#include "ops_moe.h"
#include "ops_muon.h"
#include "ops_nf4.h"
#include "ops_oss.h"
#include "ops_prefix.h"
#include "ops_products.h"
#include "ops_simple.h"

using namespace llmc;

template <typename T> static double product_rate_of() {
    const size_t n = 1024;
    std::vector<T> a(n * n, from_acc<T>(1)), b(n * n, from_acc<T>(1)), c(n * n);
    Blas blas;
    std::vector<unsigned char> scratch(linear_scratch_bytes<T>(n, n, n, Cpu{}) + 64);
    blas_scratch(blas, scratch.data(), scratch.size());
    Weight w = {b.data(), type_of<T>(), n, n, nullptr, nullptr};
    return 2.0 * double(n * n * n) / seconds_of([&] {
               linear_forward(c.data(), a.data(), w, nullptr, (const T*)nullptr, n, blas, Cpu{});
           });
}

// All other rows stand on this: one NaN among good numbers is an error, wherever it is.
static void comparison(Check& c) {
    for (size_t n : {1, 2, 9})
        for (size_t i = 0; i < n; i++)
            for (double wrong : {double(NAN), double(INFINITY), 2.}) {
                std::vector<double> want(n, 1), got = want;
                size_t at = n;
                expect(c, largest_error(got, want, 0, &at) == 0, "equal");
                got[i] = wrong;
                expect(c, !(largest_error(got, want, 0, &at) <= 0.5) && at == i, "one is wrong");
            }
}

int main(int argc, char** argv) {
    std::string mode = "", filter;
    uint64_t seed = 1; // the same test on each machine; test/check.sh draws others
    for (int i = 1; i < argc; i++) {
        std::string word = argv[i];
        if (word == "test" || word == "grad" || word == "perf")
            mode = word;
        else if (word == "--seed" && i + 1 < argc)
            seed = strtoull(argv[++i], nullptr, 10);
        else
            filter = word;
    }

    // The rows: rates alone with `perf`, else tests and gradients.
    std::vector<Row> rows = {{"comparison", comparison, nullptr, nullptr}};
    add_simple_rows(rows);
    add_distill_rows(rows);
    add_product_rows(rows);
    add_nf4_rows(rows);
    add_prefix_rows(rows);
    add_moe_rows(rows);
    add_muon_rows(rows);
    add_oss_rows(rows);
    if (mode == "perf") {
        Perf p = {copy_rate(), product_rate_of<float>(), product_rate_of<bf16>()};
        printf("ceilings of this run: copy %.1f GB/s (read plus written), 1024^3 products %.0f "
               "GFLOP/s f32, %.0f GFLOP/s bf16; %d threads, %s\n",
               p.copy_bytes / 1e9, p.product_f32 / 1e9, p.product_bf16 / 1e9, threads_here(Cpu{}),
               matmul_backend());
        for (const Row& row : rows) {
            if (!row.perf || std::string(row.name).find(filter) == std::string::npos) continue;
            printf("%s\n", row.name);
            row.perf(p);
        }
        return 0;
    }

    printf("seed %llu (--seed repeats it)\n", (unsigned long long)seed);
    int passed = 0, failed = 0;
    for (const Row& row : rows)
        for (const char* m : {"test", "grad"}) {
            auto run = !strcmp(m, "test") ? row.test : row.grad;
            if (!run || (!mode.empty() && mode != m) ||
                std::string(row.name).find(filter) == std::string::npos)
                continue;
            Check c;
            c.random.seed(seed);
            c.row = row.name;
            run(c);
            bool good = c.failures == 0 && c.checks > 0;
            printf("%s %s %s: %d checks, %d failed\n", good ? "ok" : "FAIL", row.name, m, c.checks,
                   c.failures);
            good ? passed++ : failed++;
        }
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0 || passed == 0;
}
