// test_kernels.cpp - the kernel table: test_kernels [name] [--seed N]
//   g++ -DEMULATE: the kernels' own source on the CPU; nvcc -x cu: on a GPU
#include "kernels_elementwise.h"
#include "kernels_norms.h"
#include "kernels_training.h"

int main(int argc, char** argv) {
    std::vector<KernelRow> rows;
    add_norm_kernels(rows);
    add_elementwise_kernels(rows);
    add_training_kernels(rows);
    return kernel_main(argc, argv, rows);
}
