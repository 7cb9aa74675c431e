#!/usr/bin/env bash
# Every file with a "To copy" line is copied with the files that line names and no others, into a
# project with names of its own (test/copycheck.cu), which calls the file's launchers: by g++ and in
# the emulator the calls run, nvcc compiles them, where there is one. Last line: N passed, N failed.
# usage: test/copycheck.sh [FILE ...]      without FILE: all, and README's example, which also runs
#        test/copycheck.sh README.md       the example alone
set -u
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
[ -n "$nvcc" ] || echo "skipped: nvcc (there is no CUDA toolkit)"
warnings="-Wall -Wextra -Wno-unknown-pragmas -Werror"
gcc="g++ -std=c++20 -O0 $warnings -x c++"
passed=0 failed=0

# the program between README's ```cpp and ```, by its own command; it prints what README says
example() {
    rm -rf "$folder"/*
    local file # README names the files to copy
    for file in $(sed -n 's/^.*With \(.*\) beside it this is a whole program:$/\1/p' README.md | grep -oE '[a-z_]+\.(h|cuh)'); do
        cp "llmc/ops/$file" "$folder"
    done
    sed -n '/^```cpp/,/^```$/{/^```/!p}' README.md >"$folder/example.cu"
    local command says
    command=$(sed -n 's/^    \(g++ .* -o example\) .*/\1/p' README.md)
    says=$(sed -n 's/^    \.\/example *# //p' README.md)
    [ -n "$says" ] && (cd "$folder" && $command && [ "$(./example)" = "$says" ])
}

# verdict WHAT COMMAND...: run it among the copied files, count and print
verdict() {
    local what=$1
    shift
    if (cd "$folder/llmc/ops" && "$@") >"$folder/log" 2>&1 && ! grep -q 'warning' "$folder/log"; then
        passed=$((passed + 1))
        echo "ok   $what"
    else
        failed=$((failed + 1))
        echo "FAIL $what"
        head -20 "$folder/log"
    fi
}

if [ "${1-README.md}" = README.md ]; then
    if example; then passed=1; echo "ok   README's example"
    else failed=1; echo "FAIL README's example"; fi
fi
# Without FILE: every file in a process of its own, two at a time; the lines of one come together.
if [ $# = 0 ]; then
    lines=$(grep -l '^//   To copy:' llmc/*.h llmc/ops/* |
        xargs -P 2 -I{} sh -c 'lines=$(test/copycheck.sh {}); echo "$lines"' |
        grep -vE '^[0-9]+ passed, [0-9]+ failed$|^skipped: nvcc')
    echo "$lines"
    passed=$((passed + $(grep -c '^ok ' <<<"$lines")))
    failed=$((failed + $(grep -c '^FAIL' <<<"$lines")))
fi
[ "${1-}" != README.md ] || shift
for file in "$@"; do
    # the "To copy" line, and those that continue it
    line=$(sed -n '/To copy:/,/^#pragma once/p' "$file" | grep '^//' | tr '\n' ' ')
    names=$(grep -oE '[a-z0-9_]+\.(cuh|h)' <<<"$line")
    # They keep their rooms: a file names those of another room by a path.
    rm -rf "$folder"/* && mkdir -p "$folder/llmc/ops" "$folder/test"
    cp test/copycheck.cu "$folder/llmc/ops"
    for name in $(basename "$file") $names; do
        for place in "$(dirname "$file")" llmc/ops llmc/comm llmc; do
            [ -e "$place/$name" ] && break
        done
        mkdir -p "$folder/$place" && cp "$place/$name" "$folder/$place"
    done
    main=$(basename "$file")
    [[ $line != *"which includes this file"* ]] || main=${names%%$'\n'*}
    what="$file with $(echo ${names:-no other file})"
    [ -n "$line" ] || { failed=$((failed + 1)); echo "FAIL $file has no line 'To copy: ...'"; continue; }
    word=${main%.*} path=../../$(cd "$folder" && find llmc -name "$main")

    verdict "$what (g++)" sh -c "$gcc '-DCOPIED=\"$path\"' -DCOPY_$word copycheck.cu -o a && ./a"
    cp -r test/harness "$folder/test" # the emulator's own files, for the project's tests alone
    verdict "$what (emulator)" \
        sh -c "$gcc -DEMULATE '-DCOPIED=\"$path\"' -DCOPY_$word copycheck.cu -o a && ./a"
    [ -z "$nvcc" ] || verdict "$what (nvcc)" "$nvcc" -std=c++20 -x cu "-DCOPIED=\"$path\"" \
        "-DCOPY_$word" -gencode=arch=compute_90a,code=sm_90a -c copycheck.cu -o a.o
    # each of Hopper's own kernels, compiled for another GPU, says so and traps: none is empty
    [ -z "$nvcc" ] || [ "$word" != attention_sm90 ] || verdict "$what (nvcc, another GPU)" \
        sh -c "$nvcc -std=c++20 -x cu '-DCOPIED=\"$path\"' -DCOPY_$word -arch=sm_80 -ptx copycheck.cu -o a.ptx &&
            awk '/[.]entry.*attention_hopper_(for|back)ward/ {kernel = 1; kernels++}
                /trap;/ && kernel {kernel = 0; traps++}
                END {exit !(kernels && kernels == traps)}' a.ptx"
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
