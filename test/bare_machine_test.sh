#!/usr/bin/env bash
# GPU programs on a machine that has CUDA's libraries, a shell with its tools, and no other library: they load, and
# where there is no driver they end with one clear error. The machine is a folder that chroot enters.
# usage: test/bare_machine_test.sh        a small program that calls each library; ALL=1: the trainer and the kernels' test
set -eu
cd "$(dirname "$0")/.."
cuda=/usr/local/cuda/lib64 programs=(libraries)
[ "${ALL:-0}" = 0 ] || programs+=(train_gpt test_kernels)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
says() { # text
    grep -qF -- "$1" "$work/log" || { echo "it does not say: $1"; cat "$work/log"; exit 1; }
}
skip() { echo "skipped: $1"; exit 0; }
[ -x /usr/local/cuda/bin/nvcc ] || skip "there is no CUDA toolkit in /usr/local/cuda"
unshare -rm true 2>/dev/null || skip "this machine lets nobody have a root of their own (unshare -rm)"

# Build what such a machine is given: no MPI, and thereby no NCCL.
make --no-print-directory DEVICE=cuda MPI=0 BUILD=build/bare "${programs[@]/#/build/bare/gpu/}"

# GPUs are 80 and later: those have code of their own or PTX; without MPI or nvcc, and for other GPUs, make says so.
make -n MPI=0 DEVICE=cuda BUILD="$work" "$work/gpu/libraries" >"$work/log" 2>&1
says "code=sm_80 "
says "code=compute_80 "
! grep -q 'WITH_MPI\|lmpi\|nccl' "$work/log" || { cat "$work/log"; exit 1; }
! make -n GPUS="75 80" >"$work/log" 2>&1 || exit 1
says "GPUS=75 80: the kernels need 80 (Ampere) or later"
! make DEVICE=cuda NVCC=no_nvcc BUILD="$work" "$work/gpu/libraries" >"$work/log" 2>&1 || exit 1
says "there is no no_nvcc: install the CUDA toolkit"
if [ "${ALL:-0}" = 1 ]; then
    ! make DEVICE=cuda GPUS=80 LIBS=-lnobody BUILD="$work" "$work/gpu/libraries" >"$work/log" 2>&1 || exit 1
    says "$work/gpu/libraries misses -lnobody (make setup)"
fi

# They name CUDA's libraries and those that every machine has.
for program in "${programs[@]}"; do
    needed=$(objdump -p "build/bare/gpu/$program" | sed -n 's/ *NEEDED *//p')
    others=$(echo "$needed" | grep -vE '^(libcublasLt|libc|libm|libdl|librt|libpthread|ld-linux-.*|libstdc\+\+|libgcc_s)\.so' || true)
    [ -z "$others" ] || { echo "$program needs" $others; exit 1; }
done

# A machine: the shell's tools with their libraries, libstdc++ beside the C library, the repository's few files.
root=$work/root
put() { mkdir -p "$root$(dirname "$1")" && cp -L "$1" "$root$1"; }
mkdir -p "$root"/{dev,proc,tmp,bin,usr/bin,$cuda,repository/build}
for tool in bash sh env awk cat chmod cp cut date dirname grep head ldd ls mkdir mktemp paste rm sed seq sort tail tee timeout touch tr wc; do
    path=$(readlink -f "$(command -v $tool)")
    cp "$path" "$root/bin/$tool"
    for library in $(ldd "$path" 2>/dev/null | grep -o '/[^ ]*'); do put "$library"; done
done
for library in libc libm libdl librt libpthread libstdc++ libgcc_s; do
    for path in $(ldd "${programs[@]/#/build/bare/gpu/}" | grep -o "/[^ ]*/$library\.so[^ ]*"); do put "$path"; done
done
cp "$root/bin/env" "$root/usr/bin/env"
cp -r README.md scripts llmc "$root/repository"
cp -r build/bare/gpu "$root/repository/build"

# there FOLDER COMMAND: run it in the machine, where FOLDER stands for CUDA's libraries
there() {
    unshare -rm --propagation private bash -c "mount --rbind /dev '$root/dev' && mount --rbind /proc '$root/proc' &&
        mount --bind '$1/' '$root$cuda' && exec chroot '$root' env -i PATH=/bin:/usr/bin HOME=/tmp bash -c 'cd /repository; $2'"
}
# Every library loads, and there is no driver.
there $cuda build/gpu/libraries >"$work/log"
says "GPU: CUDA driver version is insufficient"
cat "$work/log"

# Without a GPU the script skips its parts; without CUDA's libraries it names what is missing.
there $cuda "scripts/gpu_check.sh --prebuilt build/gpu" >"$work/log"
says "skipped kernels: no GPU answers"
says "0 passed, 0 failed, 10 skipped"
printf '#!/bin/sh\necho "a GPU"\n' >"$root/bin/nvidia-smi"
chmod +x "$root/bin/nvidia-smi"
cp "$root/repository/build/gpu/libraries" "$root/repository/build/gpu/bench_kernels"
mkdir "$work/nothing"
there "$work/nothing" "RESULTS=/tmp scripts/gpu_check.sh --prebuilt build/gpu --only bench" >"$work/log"
says "skipped bench: build/gpu/bench_kernels misses libcublasLt.so"
[ "${ALL:-0}" = 1 ] || { echo "ok: a bare machine"; exit 0; }

# The kernels' test says that there is no driver, and the trainer says it after 50 steps on the CPU.
! there $cuda "scripts/gpu_check.sh --prebuilt build/gpu --only kernels --only agree" >"$work/log" || { cat "$work/log"; exit 1; }
says "FAIL    kernels: test_kernels: skipped: no GPU answers (CUDA driver version is insufficient"
says "FAIL    agree: training on cuda"
says "train_gpt: error: --device cuda: no GPU answers (CUDA driver version is insufficient"
cat "$work/log"
echo "ok: a bare machine"
