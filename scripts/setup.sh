#!/usr/bin/env bash
# Install what the build needs on Debian or Ubuntu: `setup.sh` for the trainer, `setup.sh test` for the tests too,
# `setup.sh plot` for dev/plot.py too.
# Says what it installs; does nothing, and needs no network, when all is there.
set -eu
needed=() better=()
missing() { # a file or command that shows the package is there
    ! { command -v "$1" >/dev/null 2>&1 || [ -e "$1" ] || compgen -G "/usr/include/*/$1" >/dev/null || [ -e "/usr/include/$1" ]; }
}
need() { ! missing "$1" || needed+=("$2"); } # then its package
want() { ! missing "$1" || better+=("$2"); } # the build works without it
need g++ g++
need make make
need nlohmann/json.hpp nlohmann-json3-dev
need zlib.h zlib1g-dev
need pcre2.h libpcre2-dev
need utf8proc.h libutf8proc-dev
want oneapi/dnnl/dnnl.hpp libdnnl-dev
want zstd.h libzstd-dev
want mpicxx libopenmpi-dev
want mpirun openmpi-bin
if [ "${1:-}" = test ]; then
    need gtest/gtest.h libgtest-dev
    need ctags universal-ctags
    need python3 python3
fi
if [ "${1:-}" = plot ]; then
    need python3 python3
    python3 -c 'import matplotlib' 2>/dev/null || needed+=(python3-matplotlib)
fi

# cuobjdump and nvdisasm, which it runs, show machine code to test/sass_guard_test.sh. Where a CUDA
# toolkit lacks them, pip installs them into a folder of their own.
cuda_tools() {
    local nvcc tools
    tools=$(dirname "$0")/../build/cuda_tools
    nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null) || return 0
    [ ! -x "$(dirname "$nvcc")/cuobjdump" ] && ! command -v cuobjdump >/dev/null || return 0
    ! compgen -G "$tools/nvidia/*/bin/cuobjdump" >/dev/null || return 0
    echo "setup: installing nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm into build/cuda_tools"
    python3 -m pip install -q --retries 0 --timeout 10 --root-user-action ignore --disable-pip-version-check \
        --target "$tools" nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm ||
        echo "setup: going on without: limits on machine code are not tested until pip has installed both" >&2
}
[ "${1:-}" != test ] || cuda_tools
[ $((${#needed[@]} + ${#better[@]})) -eq 0 ] && exit 0

echo "setup: installing ${needed[*]} ${better[*]}"
if ! command -v apt-get >/dev/null; then
    echo "setup: this is no Debian or Ubuntu: install the equivalents of: ${needed[*]} ${better[*]}" >&2
    [ ${#needed[@]} -eq 0 ] && exit 0 || exit 1
fi
sudo=""
[ "$(id -u)" = 0 ] || sudo=sudo
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
install() {
    [ $# -eq 0 ] || { $sudo apt-get update -qq && $sudo apt-get install -y -qq --no-install-recommends "$@"; } >"$log" 2>&1 || {
        tail -n 5 "$log" >&2
        echo "setup: could not install $* (whole output: $log)" >&2
        return 1
    }
}
install ${needed[@]+"${needed[@]}"} || exit 1
install ${better[@]+"${better[@]}"} ||
    echo "setup: going on without ${better[*]}: slower matrix products without oneDNN," \
        "no .zst files without zstd, no processes as ranks without MPI" >&2
rm -f "$log"
