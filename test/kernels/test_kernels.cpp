// test_kernels.cpp - the kernel table: test_kernels [name] [--seed N]
//   g++ -DEMULATE: the kernels' own source on the CPU; nvcc -x cu: on a GPU
#include "kernels_distill.h"
#include "kernels_elementwise.h"
#include "kernels_fp8.h"
#include "kernels_moe.h"
#include "kernels_nf4.h"
#include "kernels_norms.h"
#include "kernels_oss.h"
#include "kernels_prefix.h"
#include "kernels_products.h"
#include "kernels_training.h"
#include "kernels_variants.h"

using namespace llmc;

#if defined(EMULATE)
// A GPU that is older than the kernels need is refused, with its name and what it lacks.
inline void old_gpu(Check& c) {
    expect(c, no_gpu_because().empty(), "an Ampere is refused");
    emulator::gpu = {7, 5, size_t(64) << 10};
    std::string why = no_gpu_because();
    emulator::gpu = emulator::AMPERE;
    expect(c, why == "the emulator is sm_75: the kernels need sm_80 (Ampere) or later", why);
}
#endif

int main(int argc, char** argv) {
    std::vector<KernelRow> rows;
    add_norm_kernels(rows);
    add_elementwise_kernels(rows);
    add_product_kernels(rows);
    add_fp8_kernels(rows);
    add_training_kernels(rows);
    add_distill_kernels(rows);
    add_nf4_kernels(rows);
    add_prefix_kernels(rows);
    add_moe_kernels(rows);
    add_oss_kernels(rows);
    add_variant_kernels(rows);
#if defined(EMULATE)
    rows.push_back({"old GPU", old_gpu});
#endif
    return kernel_main(argc, argv, rows);
}
