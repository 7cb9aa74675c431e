#!/usr/bin/env bash
# The machine code of attention and of experts' products keeps its limits; without never(), which
# keeps waits behind the exponentials, the guard is red. A build on local memory, on spilled registers
# or on products that wait for each other fails.
# Two minutes of nvcc. Last line: N passed, N failed, N skipped.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
if [ -z "$nvcc" ]; then
    echo "skipped: nvcc (there is no CUDA toolkit)"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi
release=$("$nvcc" --version | sed -n 's/.*, V//p')
passed=0 failed=0 skipped=0

verdict() { # status, what
    if [ "$1" = 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
    [ "$1" = 0 ] && echo "ok   $2" || echo "FAIL $2"
}

# The Makefile's rule builds a program, and removes one whose kernel has local memory.
build() { # a program of one kernel, whose body this is
    printf '#include <cstdio>\n__global__ void kernel(float* x, int n) {\n%s\n}\n%s\n' "$1" \
        'int main() { kernel<<<1, 1>>>(nullptr, 1); }' >"$folder/small.cpp"
    make --no-print-directory DEVICE=cuda NVCC="$nvcc" GPUS=80 VPATH="$folder" BUILD="$folder/build" \
        "$folder/build/gpu/small" >"$folder/says" 2>&1
}
build '*x = n;'
verdict $? "a program without local memory is built"
! build 'float v[64] = {}; for (int i = 0; i < n; i++) v[i % 64 ^ n] += x[i]; *x = v[n];'
verdict $? "one with an array in local memory is not"
grep -q 'Local memory used for' "$folder/says" && [ ! -e "$folder/build/gpu/small" ]
verdict $? "the log says why, and no program is left"

# Code keeps its limits. They hold for one release of nvcc: the guard says which.
experts() {
    cat <<END
#include "llmc/ops/grouped_sm90.cuh"
using namespace llmc;
template void llmc::grouped_tensor_cores<true, true>(bf16*, const bf16*, const bf16*, const Groups&, bool, cudaStream_t);
template void llmc::grouped_tensor_cores<true, false>(bf16*, const bf16*, const bf16*, const Groups&, bool, cudaStream_t);
template void llmc::grouped_tensor_cores<false, false>(float*, const bf16*, const bf16*, const Groups&, bool, cudaStream_t);
END
}
attention() { # hopper or mma
    cat <<END
#include "llmc/ops/attention_sm80.cuh"
#include "llmc/ops/attention_sm90.cuh"
using namespace llmc;
typedef __nv_bfloat16 T;
template void llmc::attention_$1_forward<T>(T*, float*, const AttentionOperands<T>&, void*, cudaStream_t);
template void llmc::attention_$1_backward<T>(T*, T*, T*, const T*, const float*, const AttentionOperands<T>&,
                                             void*, cudaStream_t);
END
}
compile() { # in a folder with llmc/: experts, hopper or mma, whose code for a GPU becomes experts.cubin or the like
    if [ "$2" = experts ]; then experts; else attention "$2"; fi >"$1/$2.cu"
    : >"$folder/says"
    "$nvcc" -std=c++20 -cubin "-arch=sm_$3" -Xptxas -warn-lmem-usage,-Werror -I"$1" "$1/$2.cu" -o "$1/$2.cubin" \
        >"$folder/log" 2>&1
    local status=$?
    cat "$folder/log"
    [ $status = 0 ] && ! grep -q '(C75' "$folder/log" # ptxas serialises products of wgmma
}
guard() { dev/bench/sass.py guard "$folder/$1.cubin" "$release" >"$folder/says"; }
cp -r llmc "$folder"
for kernels in "mma 80" "hopper 90a" "experts 80" "experts 90a"; do
    # shellcheck disable=SC2086 # the kernels and the GPU
    compile "$folder" $kernels && guard "${kernels% *}"
    status=$?
    cat "$folder/says"
    if grep -qE '^skipped|not held' "$folder/says"; then
        echo "skipped: limits on the machine code of ${kernels% *} kernels"
        skipped=$((skipped + 1))
    else
        verdict $status "the ${kernels% *} kernels keep their limits on sm_${kernels#* }"
    fi
done
for gpu in 90a 120a; do # where the mma kernels run too, with fewer registers to spare
    "$nvcc" --list-gpu-code | grep -q "sm_${gpu%a}" || continue
    compile "$folder" mma $gpu
    verdict $? "the mma kernels have no local memory on sm_$gpu"
done
if [ $skipped = 0 ]; then
    sed -i '/^ *never(/d' "$folder/llmc/ops/attention_sm90.cuh"
    compile "$folder" hopper 90a
    ! guard hopper
    verdict $? "without never() the guard is red"
    for way in forward backward; do
        grep -q "${way}_kernel<.*64.* exponentials under the product" "$folder/says"
        verdict $? "it names the exponentials of $way"
    done
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
