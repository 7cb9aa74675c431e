#!/usr/bin/env bash
# Compile FlashAttention-3's causal bf16 kernels, forward and backward, heads of 64 and 128, for
# dev/bench/sass.py to read beside ours: by this machine's nvcc, without PyTorch, five minutes.
# Fetches the sources into FOLDER and leaves FOLDER/fa3_*.cubin there; the project keeps none of it.
# usage: dev/bench/sass_fa3.sh FOLDER
set -eu
folder=${1:?usage: dev/bench/sass_fa3.sh FOLDER}
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc) || { echo "skipped: nvcc is not installed"; exit 0; }
mkdir -p "$folder"
cd "$folder"

# Get one folder of a repository, at one commit; CUTLASS at the one that FlashAttention names.
fetch() { # owner/name, folder, commit
    local at=${1#*/}
    [ -d "$at" ] || git clone -q --sparse --no-checkout --filter=blob:none "https://github.com/$1"
    git -C "$at" sparse-checkout set "$2"
    git -C "$at" checkout -q "$3"
}
fetch Dao-AILab/flash-attention hopper 0251105a
fetch NVIDIA/cutlass include 7127592069c2fe01b041e174ba4345ef9b279671

# Each is one of the calls in flash_{fwd,bwd}_launch_template.h, with the tiles that they choose.
compile() { # name, header, instance
    [ -e "$1.cubin" ] && return
    printf '#include "%s"\ntemplate void %s;\n' "$2" "$3" >"$1.cu"
    "$nvcc" -std=c++17 -O3 --use_fast_math --expt-relaxed-constexpr --expt-extended-lambda -DNDEBUG \
        -DCUTLASS_ENABLE_GDC_FOR_SM90 -gencode=arch=compute_90a,code=sm_90a -cubin \
        -Iflash-attention/hopper -Icutlass/include "$1.cu" -o "$1.cubin"
    echo "$folder/$1.cubin"
}
bf16=cutlass::bfloat16_t
for d in 64 128; do
    compile fa3_forward_$d flash_fwd_launch_template.h "run_flash_fwd<90, $d, $d, 1, $bf16, $bf16, true, \
        false, false, false, false, false, false, false, false, false>(Flash_fwd_params&, cudaStream_t)"
done
backward() { # head size, rows of a tile, AtomLayoutMdQ
    compile fa3_backward_$1 flash_bwd_launch_template.h "run_flash_bwd<90, $1, $2, 128, $bf16, true, false, \
        false, false, false, false, 2, 2, true, false, false, 2, 1, 2, $3, false>(Flash_bwd_params&, cudaStream_t)"
}
backward 64 128 2
backward 128 64 1
