// emulator_types.h - stand-ins for CUDA's 16-bit types, where no CUDA header is
//   They hold the bits and convert to nothing. CUDA's own types convert silently, so code that
//   bypasses llmc/ops/types.h would compile with them; here it fails to compile.
#pragma once
#define __CUDA_BF16_H__ // the guards of cuda_bf16.h and cuda_fp16.h, for which this file stands
#define __CUDA_FP16_H__

struct __nv_bfloat16 {
    unsigned short bits_of_emulator;
};
struct __half {
    unsigned short bits_of_emulator;
};
