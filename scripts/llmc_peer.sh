#!/usr/bin/env bash
# llm.c beside this trainer: build its train_gpt2cu, make tokens that both read, print the commands that compare.
# usage: scripts/llmc_peer.sh CHECKOUT OUT      CHECKOUT: a clone of github.com/karpathy/llm.c, which stays as it is
#   SM=90   the GPU's architecture
# Writes OUT/train_gpt2cu, OUT/tokens_train.bin and OUT/tokens_val.bin. Needs nvcc, make and python3, and no GPU: copy
# OUT to a machine that has one.
#
# Build: llm.c's own Makefile, in bf16, for one GPU, without MPI and cuDNN. CUDA 13 wants a place where llm.c gives
#   cudaMemAdvise a device's number: a header that is included first takes the number.
# Run: train_gpt2cu needs a driver and libcublasLt, which it looks for beside itself, in /usr/local/cuda/lib64 and in
#   LD_LIBRARY_PATH. It runs in any folder. With -e d12 it draws GPT-2 124M's weights itself, with -s 0 it samples
#   nothing, so that a missing gpt2_tokenizer.bin is a warning, and without -h 1 it asks for no HellaSwag.
# Tokens: drawn from GPT-2's vocabulary by Zipf's law, so the loss of both programs falls from ln 50257 = 10.8 towards
#   the entropy that is printed. Each program shuffles the windows in an order of its own.
# Both: AdamW with betas 0.9 and 0.95, float masters, no decay, a constant learning rate, clipping at 1, nothing
#   recomputed. llm.c keeps gradients in bf16, this trainer in float.
set -eu
fail() { echo "llmc_peer.sh: error: $*" >&2; exit 1; }
[ $# = 2 ] || fail "usage: scripts/llmc_peer.sh CHECKOUT OUT"
checkout=$1
[ -e "$checkout/train_gpt2.cu" ] || fail "$checkout holds no train_gpt2.cu: git clone https://github.com/karpathy/llm.c"
PATH=$PATH:/usr/local/cuda/bin
command -v nvcc >/dev/null || fail "there is no nvcc: install the CUDA toolkit"
mkdir -p "$2"
out=$(realpath "$2")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Build a copy.
cp -r "$checkout/Makefile" "$checkout/train_gpt2.cu" "$checkout/llmc" "$work"
cat >"$work/cuda_13.h" <<'END'
#include <cuda_runtime.h>
#if CUDART_VERSION >= 13000
inline cudaError_t cudaMemAdvise(const void* p, size_t bytes, cudaMemoryAdvise advice, int gpu) {
    cudaMemLocation place = {gpu < 0 ? cudaMemLocationTypeHost : cudaMemLocationTypeDevice, gpu};
    return cudaMemAdvise(p, bytes, advice, place);
}
#endif
END
libraries="-lcublas -lcublasLt -Xlinker -rpath,'\$\$ORIGIN:/usr/local/cuda/lib64'"
# llm.c asks NVML for clocks where its header is installed.
echo '#include <nvml.h>' | nvcc -x cu -E - >/dev/null 2>&1 && libraries="$libraries -lnvidia-ml"
make -C "$work" --no-print-directory train_gpt2cu PRECISION=BF16 NO_MULTI_GPU=1 NO_USE_MPI=1 USE_CUDNN=0 \
    GPU_COMPUTE_CAPABILITY="${SM:-90}" NVCC_INCLUDES="-include $work/cuda_13.h" NVCC_LDFLAGS="$libraries"
strip "$work/train_gpt2cu" -o "$out/train_gpt2cu"

# Draw the tokens: a header of 256 words {magic, version, count}, then 16 bits each.
python3 - "$out" <<'END'
import array, itertools, math, random, sys
VOCABULARY = 50257
random.seed(1)
weights = [1 / (rank + 2.7) for rank in range(VOCABULARY)]
sums = list(itertools.accumulate(weights))
for name, count in ("train", 10_000_000), ("val", 1_000_000):
    tokens = array.array("H", random.choices(range(VOCABULARY), cum_weights=sums, k=count))
    header = array.array("i", [20240520, 1, count] + 253 * [0])
    with open(f"{sys.argv[1]}/tokens_{name}.bin", "wb") as file:
        header.tofile(file)
        tokens.tofile(file)
entropy = -sum(w / sums[-1] * math.log(w / sums[-1]) for w in weights)
print(f"tokens: 10M to train on, 1M to validate; a model that knows their frequencies has the loss {entropy:.2f}")
END

echo "train_gpt2cu needs$(readelf -d "$out/train_gpt2cu" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/ \1/p' | tr -d '\n')"
echo "compare tok/s and loss of"
echo "  (cd $out && ./train_gpt2cu -i tokens_train.bin -j tokens_val.bin -e d12 -b 32 -t 1024 -d 32768 -x 20 -l 0.0003" \
    "-q 1 -u 0 -c 0 -r 0 -v 1000000 -m 1 -s 0 -h 0)"
echo "  build/train_gpt --device cuda --model gpt2 --precision bf16 --data $out/tokens_train.bin --val" \
    "$out/tokens_val.bin --seq 1024 --micro-batch 32 --batch-tokens 32768 --steps 20 --lr 0.0003 --schedule constant" \
    "--warmup 0 --weight-decay 0 --eval-every 0 --eval-tokens 32768 --sample-tokens 0"
