// test_attention_kernels.cpp - attention's rows of the kernel table
//   g++ -DEMULATE: the kernels' own source on the CPU; nvcc -x cu: on a GPU
#include "kernels_attention.h"

using namespace llmc;

int main(int argc, char** argv) {
    std::vector<KernelRow> rows;
    add_attention_kernels(rows);
    return kernel_main(argc, argv, rows);
}
