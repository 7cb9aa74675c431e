#!/usr/bin/env bash
# The machine code of Hopper's attention keeps its limits; without never(), which keeps waits behind
# the exponentials, the guard is red. Half a minute of nvcc.
# Last line: N passed, N failed.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
[ -n "$nvcc" ] || { echo "skipped: nvcc (there is no CUDA toolkit)"; exit 0; }
passed=0 failed=0

verdict() { # status, what
    if [ "$1" = 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
    [ "$1" = 0 ] && echo "ok   $2" || echo "FAIL $2"
}
compile() { # from a folder with llmc/, which becomes kernels.cubin there
    cat >"$1/kernels.cu" <<'END'
#include "llmc/attention_sm90.cuh"
using namespace llmc;
typedef __nv_bfloat16 T;
template void llmc::attention_hopper_forward<T>(T*, float*, const AttentionOperands<T>&, void*, cudaStream_t);
template void llmc::attention_hopper_backward<T>(T*, T*, T*, const T*, const float*, const AttentionOperands<T>&,
                                                 void*, cudaStream_t);
END
    "$nvcc" -std=c++20 -O3 -cubin -gencode=arch=compute_90a,code=sm_90a -I"$1" "$1/kernels.cu" -o "$1/kernels.cubin"
}

cp -r llmc "$folder"
compile "$folder" && dev/bench/sass.py guard "$folder/kernels.cubin" | tee "$folder/says"
verdict $? "compiled attention keeps its limits"
if grep '^skipped' "$folder/says"; then exit 0; fi

sed -i '/^ *never(/d' "$folder/llmc/attention_sm90.cuh"
compile "$folder"
dev/bench/sass.py guard "$folder/kernels.cubin" >"$folder/says"
verdict $((1 - $?)) "without never() the guard is red"
for way in forward backward; do
    grep -q "${way}_kernel<.*64.* exponentials under the product" "$folder/says"
    verdict $? "it names the exponentials of $way"
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
