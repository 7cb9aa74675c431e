// ladder.h - what the ladders share: how a rung is checked, measured and printed
//   A ladder is one operator written several times, from the naive kernel to the project's own; a
//   rung says what it changes and what that should give, in bytes or FLOPs. Everywhere a rung is
//   checked at small odd sizes against the CPU version in double, in the emulator under all orders
//   of threads; on a GPU it is measured too.
#pragma once
#include "../../test/kernels/kernel_table.h"

using namespace llmc;

#if defined(__CUDACC__)
constexpr bool ON_GPU = true;
#else
constexpr bool ON_GPU = false;
template <typename F> double gpu_seconds(F, int, cudaStream_t) { return 0; } // time is not emulated
#endif

// Rungs are measured on random numbers: on zeros a GPU is faster.
template <typename T> void fill_random(Array<T>& x) {
    auto value = [](size_t i) {
        uint64_t bits = (i + 1) * 0x9e3779b97f4a7c15ull;
        return from_acc<T>(float(double((bits ^ bits >> 29) * bits >> 11) * 0x1p-52 - 1));
    };
    fill_memory(x.data, x.n, value, cudaStream_t{});
}

template <typename T> void fill(Array<T>& to, const std::vector<double>& x) {
    std::vector<T> y = as<T>(x);
    copy_in(to.data, y.data(), to.n * sizeof(T), cudaStream_t{});
    wait_for(cudaStream_t{});
}

template <typename Run> struct Rung {
    const char* name;
    Run run;
};

struct Work { // of one run
    double amount, unit;
    const char* unit_name;
};

// check(c, run) compares; seconds(run) is asked on a GPU alone. `first` is the first rung's number.
// Returns how many failed.
template <typename Run, size_t COUNT, typename F, typename G>
int climb(int first, const Rung<Run> (&ladder)[COUNT], F check, Work work, G seconds) {
    int failed = 0;
    if (std::string why = no_gpu_because(); !why.empty()) {
        printf("skipped: %s\n", why.c_str());
        return 0;
    }
    for (const Rung<Run>& rung : ladder) {
        // Check.
        Check c;
        c.random.seed(1);
        c.row = rung.name;
        check(c, rung.run);
        bool good = c.failures == 0 && c.checks > 0;
        failed += !good;

        // Print, on a GPU with its rate.
        printf("%-4s %d  %-*s", good ? "ok" : "FAIL", first++, ON_GPU ? 44 : 0, rung.name);
        if (ON_GPU) {
            double s = seconds(rung.run);
            printf(" %9.3f ms %8.1f %s", s * 1e3, work.amount / s / work.unit, work.unit_name);
        }
        printf("\n");
        fflush(stdout);
    }
    return failed;
}
