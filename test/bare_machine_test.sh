#!/usr/bin/env bash
# GPU programs on a machine that has CUDA's libraries, a shell with its tools, and no other library: they load, and
# where there is no driver they end with one clear error. The machine is a folder that chroot enters. Then with a GPU
# whose every launch fails (test/harness/cudart_stub.c): scripts/gpu_check.sh goes to its end and keeps every log.
# usage: test/bare_machine_test.sh        small programs; ALL=1: the archive of `make lease`, all of its rows
set -eu
cd "$(dirname "$0")/.."
cuda=/usr/local/cuda/lib64
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
says() { # text [file]
    grep -qF -- "$1" "${2:-$work/log}" || { echo "it does not say: $1"; cat "${2:-$work/log}"; exit 1; }
}
skip() { echo "skipped: $1"; exit 0; }
[ -x /usr/local/cuda/bin/nvcc ] || skip "there is no CUDA toolkit in /usr/local/cuda"
unshare -rm true 2>/dev/null || skip "this machine lets nobody have a root of their own (unshare -rm)"

# Build what such a machine is given: no MPI, and thereby no NCCL. A shared runtime lets another take its place.
build() { make --no-print-directory DEVICE=cuda MPI=0 "$@"; }
build BUILD=build/bare build/bare/gpu/libraries
programs=(build/bare/gpu/libraries build/bare/shared/gpu/ladder_layernorm_forward)
build GPUS=90a CUDART=shared BUILD=build/bare/shared "${programs[1]}"
[ "${ALL:-0}" = 0 ] || { make lease; programs+=(build/lease/lease/gpu/*); programs=("${programs[@]/*\/built/}"); }

# GPUs are this machine's, else 80 and later: those have code of their own or PTX; without MPI or nvcc, and for other
# GPUs, make says so.
printf '#!/bin/sh\necho $CAPS\n' >"$work/nvidia-smi" && chmod +x "$work/nvidia-smi"
dry() { PATH=$work:$PATH make -n MPI=0 DEVICE=cuda BUILD="$work" "$work/gpu/libraries" >"$work/log" 2>&1; }
CAPS=9.0 dry
says "code=sm_90a "
! grep -q code=sm_80 "$work/log" || exit 1
CAPS= dry
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
for program in ${programs[*]}; do
    needed=$(objdump -p "$program" | sed -n 's/ *NEEDED *//p')
    others=$(echo "$needed" | grep -vE '^(libcublasLt|libcudart|libc|libm|libdl|librt|libpthread|ld-linux-.*|libstdc\+\+|libgcc_s)\.so' || true)
    [ -z "$others" ] || { echo "$program needs" $others; exit 1; }
done

# A machine: the shell's tools with their libraries, libstdc++ beside the C library, the repository's few files.
root=$work/root
put() { mkdir -p "$root$(dirname "$1")" && cp -L "$1" "$root$1"; }
mkdir -p "$root"/{dev,proc,tmp,bin,usr/bin,stub,$cuda,lease/gpu}
for tool in bash sh env awk cat chmod cp cut date dirname grep head ldd ls mkdir mktemp nproc paste rm sed seq sleep sort \
    tail tar tee timeout touch tr wc xz; do
    path=$(readlink -f "$(command -v $tool)")
    cp "$path" "$root/bin/$tool"
    for library in $(ldd "$path" 2>/dev/null | grep -o '/[^ ]*'); do put "$library"; done
done
for library in libc libm libdl librt libpthread libstdc++ libgcc_s; do
    for path in $(ldd ${programs[*]} | grep -o "/[^ ]*/$library\.so[^ ]*" | sort -u); do put "$path"; done
done
cp "$root/bin/env" "$root/usr/bin/env"
cp -r README.md scripts llmc "$root/lease"
cp "${programs[@]:0:2}" "$root/lease/gpu"

# A runtime whose launches fail, with the version of its symbols that programs ask for.
echo 'libcudart.so.13 { global: *; };' >"$work/version"
gcc -Wall -Wextra -Werror -Wno-unused-parameter -shared -fPIC -I/usr/local/cuda/include test/harness/cudart_stub.c \
    -Wl,--version-script="$work/version" -o "$root/stub/libcudart.so.13"

# there FOLDER COMMAND: run it in the machine, where FOLDER stands for CUDA's libraries
there() {
    unshare -rm --propagation private bash -c "mount --rbind /dev '$root/dev' && mount --rbind /proc '$root/proc' &&
        mount --bind '$1/' '$root$cuda' && exec chroot '$root' env -i PATH=/bin:/usr/bin HOME=/tmp bash -c 'cd /; $2'"
}
# Every library loads, and there is no driver.
there $cuda lease/gpu/libraries >"$work/log"
says "GPU: CUDA driver version is insufficient"
cat "$work/log"

# Without a GPU the script says so; without CUDA's libraries it names what is missing.
check="RESULTS=/tmp lease/scripts/gpu_check.sh --prebuilt gpu" full=$root/tmp/gpu_a-GPU.full.log
there $cuda "$check" >"$work/log"
says "skipped: no GPU answers"
printf '#!/bin/sh\necho "a GPU"\n' >"$root/bin/nvidia-smi"
chmod +x "$root/bin/nvidia-smi"
mkdir "$work/nothing"
there "$work/nothing" "$check --only ladders" >"$work/log"
says "skipped passes ladder_layernorm_forward: gpu/ladder_layernorm_forward misses libcudart.so.13"

# With a GPU that fails a program starts and ends at its first launch; one that hangs is ended.
! there $cuda "LD_LIBRARY_PATH=/stub $check --only ladders" >"$work/log" || { cat "$work/log"; exit 1; }
says "FAIL    passes ladder_layernorm_forward: status 1"
says "CUDA says: an illegal memory access" "$full"
! there $cuda "LIMIT=1 STUB_HANG=_Z LD_LIBRARY_PATH=/stub $check --only ladders" >"$work/log" || exit 1
says "FAIL    passes ladder_layernorm_forward: more than 1 s"
[ "${ALL:-0}" = 1 ] || { echo "ok: a bare machine"; exit 0; }

# The archive, unpacked there. Without a driver its programs say so.
rm -r "$root/lease"
cp build/lease/lease.tar.xz "$root"
there $cuda "tar xf lease.tar.xz"
! there $cuda "$check --only kernels --only agree" >"$work/log" || { cat "$work/log"; exit 1; }
says "FAIL    table test_kernels: no row ran: skipped: no GPU answers (CUDA driver version is insufficient"
says "FAIL    agree: training on cuda"
says "train_gpt: error: --device cuda: no GPU answers (CUDA driver version is insufficient" "$full"

# All rows within their seconds, on a GPU that fails each launch.
rm "$root"/tmp/gpu_*
start=$SECONDS
! there $cuda "LD_LIBRARY_PATH=/stub $check --lease 480" >"$work/log" || { cat "$work/log"; exit 1; }
[ $((SECONDS - start)) -le 482 ] || { echo "480 s took $((SECONDS - start)) s"; exit 1; }
tail -n 2 "$work/log"
for row in "test_attention_sm90: attention on Hopper, bf16" "test_kernels: layernorm bf16" "test_kernels: fp8 linear" \
    "test_attention_kernels: attention bf16" "agree: training on cuda" "step gpt2 32" "passes test_device"; do
    says "FAIL    $row: status 1"
done
says "broken: attention on Hopper, bf16"
says "skipped bench nf4: broken: nf4 float"
! there $cuda "LD_LIBRARY_PATH=/stub $check --lease 480 --only bench" >"$work/log" || { cat "$work/log"; exit 1; }
says "FAIL    bench nf4: status 1"

# One kernel hangs and one crashes: the rows behind them run.
rm "$root"/tmp/gpu_*
! there $cuda "STUB_HANG=AdamW STUB_CRASH=gelu LD_LIBRARY_PATH=/stub $check --lease 480 --only kernels" >"$work/log" || exit 1
grep -E 'adamw|gelu' "$work/log"
says "test_kernels: gelu bf16: status 134"
grep -qE "FAIL    test_kernels: adamw.*: more than [0-9]+ s" "$work/log" || { cat "$work/log"; exit 1; }
says "FAIL    test_kernels: nf4 bf16: status 1"
echo "ok: a bare machine"
