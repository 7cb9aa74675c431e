#!/usr/bin/env bash
# Install what the build needs on Debian or Ubuntu: `setup.sh` for the trainer, `setup.sh test` for the tests too.
# Says what it installs; does nothing, and needs no network, when all is there.
set -eu
packages=()
need() { # a file or command that shows the package is there, then the package
    command -v "$1" >/dev/null 2>&1 || [ -e "$1" ] || compgen -G "/usr/include/*/$1" >/dev/null ||
        [ -e "/usr/include/$1" ] || packages+=("$2")
}
need g++ g++
need make make
need nlohmann/json.hpp nlohmann-json3-dev
need zlib.h zlib1g-dev
need oneapi/dnnl/dnnl.hpp libdnnl-dev
if [ "${1:-}" = test ]; then
    need gtest/gtest.h libgtest-dev
    need python3 python3
    need mpicxx libopenmpi-dev
    need mpirun openmpi-bin
fi
[ ${#packages[@]} -eq 0 ] && exit 0

echo "setup: installing ${packages[*]}"
if ! command -v apt-get >/dev/null; then
    echo "setup: this is no Debian or Ubuntu: install the equivalents of: ${packages[*]}" >&2
    exit 1
fi
sudo=""
[ "$(id -u)" = 0 ] || sudo=sudo
export DEBIAN_FRONTEND=noninteractive
if ! { $sudo apt-get update -qq && $sudo apt-get install -y -qq --no-install-recommends "${packages[@]}"; } >/tmp/setup.$$.log 2>&1; then
    tail -n 5 "/tmp/setup.$$.log" >&2
    echo "setup: could not install ${packages[*]} (whole output: /tmp/setup.$$.log)" >&2
    # oneDNN only makes products faster; without the others nothing builds
    [ "${packages[*]}" = libdnnl-dev ] || exit 1
    echo "setup: going on without oneDNN: matrix products will be plain loops" >&2
fi
rm -f "/tmp/setup.$$.log"
