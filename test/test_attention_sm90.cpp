// test_attention_sm90.cpp - rows of the kernel table: Hopper's attention
//   g++ -DEMULATE: the kernels' own source on the CPU; nvcc -x cu: on a GPU
#include "kernels_attention.h"

// Tiles are 128 rows and keys forward, 64 rows and 128 keys backward.
inline std::vector<AttentionCase> hopper_cases() {
    if (SMALL)
        return {
            {1, 70, 140, 2, 1, 64, 1}, {1, 5, 400, 1, 1, 64, 2}, {1, 10, 20, 3, 1, 72, 3, true}};
    return {{1, 1, 1, 1, 1, 64, 0},
            {1, 65, 65, 1, 1, 64, 0},
            {1, 300, 300, 1, 1, 64, 0}, // more tiles than stages
            {1, 129, 129, 2, 2, 128, 0, false, INT_MAX, 256},
            {2, 70, 70, 4, 2, 32, 1},  // documents, groups of two
            {1, 45, 200, 3, 1, 64, 2}, // three heads: idle rows in a tile
            {1, 50, 50, 7, 1, 96, 0, true},
            {2, 40, 150, 2, 2, 64, 3},             // rows that see nothing, keys in any order
            {1, 200, 200, 1, 1, 24, 0, false, 40}, // tiles left of the window are skipped
            {1, 150, 60, 2, 1, 40, 2, true},       // queries before the first key
            {1, 3, 400, 4, 1, 128, 2, false, 150, 8},
            {1, 2, 30, 64, 1, 8, 2}, // a tile has one query
            {1, 140, 260, 2, 1, 128, 1},
            {1, 20, 30, 1, 1, 104, 2},
            {1, 100, 100, 3, 1, 64, 4},
            {1, 1, 100, 3, 1, 64, 4}};
}
// more tiles than a warp looks at once, of keys and of rows
inline std::vector<AttentionCase> long_cases() {
    if (SMALL) return {};
    return {{1, 3, 4300, 1, 1, 8, 2}, {1, 34, 20, 64, 1, 8, 2}};
}

template <typename T, std::vector<AttentionCase> cases(), Path path> void row(Check& c) {
#if defined(__CUDACC__)
    if (!is_hopper(cudaStream_t{})) {
        printf("skipped: this GPU is no Hopper\n");
        c.checks++;
        return;
    }
#endif
    if (cases().empty()) c.checks++;
    attention_kernels<T, cases, path>(c);
}

int main(int argc, char** argv) {
    return kernel_main(
        argc, argv,
        {{"attention on Hopper, bf16", row<bf16, hopper_cases, Path::HOPPER>},
         {"attention on Hopper, fp16", row<fp16, hopper_cases, Path::HOPPER>},
         {"attention on Hopper, dQ in any order", row<bf16, hopper_cases, Path::HOPPER_ANY_ORDER>},
         {"attention on Hopper, many tiles", row<bf16, long_cases, Path::HOPPER>}});
}
