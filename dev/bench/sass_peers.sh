#!/usr/bin/env bash
# Compile others' kernels for dev/bench/sass.py to read beside ours, by this machine's nvcc, without PyTorch, in five
# minutes: FlashAttention-3's causal bf16 kernels, forward and backward, heads of 64 and 128, and DeepGEMM's grouped
# products in bf16. Fetches the sources into FOLDER and leaves FOLDER/*.cubin there; the project keeps none of it.
# usage: dev/bench/sass_peers.sh FOLDER
set -eu
folder=${1:?usage: dev/bench/sass_peers.sh FOLDER}
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc) || { echo "skipped: nvcc is not installed"; exit 0; }
mkdir -p "$folder"
cd "$folder"

# Get one folder of a repository, at one commit; CUTLASS at the one that the other names.
fetch() { # owner/name, folder, commit
    local at=${1#*/}
    [ -d "$at" ] || git clone -q --sparse --no-checkout --filter=blob:none "https://github.com/$1"
    git -C "$at" sparse-checkout set "$2"
    git -C "$at" checkout -q "$3"
}

compile() { # name, header, line, options
    [ -e "$1.cubin" ] && return
    printf '#include "%s"\n%s\n' "$2" "$3" >"$1.cu"
    "$nvcc" -O3 --expt-relaxed-constexpr --expt-extended-lambda -gencode=arch=compute_90a,code=sm_90a -cubin \
        -Icutlass/include $4 "$1.cu" -o "$1.cubin"
    echo "$folder/$1.cubin"
}

# Each is one of the calls in flash_{fwd,bwd}_launch_template.h, with the tiles that they choose.
fetch Dao-AILab/flash-attention hopper 0251105a
fetch NVIDIA/cutlass include 7127592069c2fe01b041e174ba4345ef9b279671
flash="-std=c++17 --use_fast_math -DNDEBUG -DCUTLASS_ENABLE_GDC_FOR_SM90 -Iflash-attention/hopper"
bf16=cutlass::bfloat16_t
for d in 64 128; do
    compile fa3_forward_$d flash_fwd_launch_template.h "template void run_flash_fwd<90, $d, $d, 1, $bf16, $bf16, true, \
        false, false, false, false, false, false, false, false, false>(Flash_fwd_params&, cudaStream_t);" "$flash"
done
backward() { # head size, rows of a tile, AtomLayoutMdQ
    compile fa3_backward_$1 flash_bwd_launch_template.h "template void run_flash_bwd<90, $1, $2, 128, $bf16, true, false, \
        false, false, false, false, 2, 2, true, false, false, 2, 1, 2, $3, false>(Flash_bwd_params&, cudaStream_t);" "$flash"
}
backward 64 128 2
backward 128 64 1

# Groups that follow each other along the rows (K-major operands), and along the sum (dW, added in float), with the
# tiles of csrc/jit_kernels/heuristics/sm90.hpp for many rows: 128 x 256 x 64, four stages, clusters of two.
fetch deepseek-ai/DeepGEMM deep_gemm/include 54e22612409371d6364144b69086735beb54e98b
fetch NVIDIA/cutlass include f3fde58372d33e9a5650ba7b80fc48b3b49d40c8
grouped() { # name, order of the operands, swizzle of the outputs, kind of groups, += or =, type of the outputs
    local major=cute::UMMA::Major::$2
    compile "$1" deep_gemm/impls/sm90_bf16_gemm.cuh "void* kernel = (void*)&deep_gemm::sm90_bf16_gemm_impl<$major, $major, \
        0, 0, 0, 8, 128, 256, 64, 128, 128, $3, 4, 128, 256, 2, false, 132, deep_gemm::GemmType::$4, $5, $6>;" \
        "-std=c++20 -IDeepGEMM/deep_gemm/include"
}
grouped deepgemm_rows K 128 MGroupedContiguous false $bf16
grouped deepgemm_sums MN 0 KGroupedContiguous true float
