#!/usr/bin/env bash
# Every operator file compiles alone, with the files that its "To copy" line names and no others: by
# g++, and by nvcc where there is one. Last line: N passed, N failed.
# usage: test/copycheck.sh [FILE ...]      without FILE: all, and README's example, which also runs
set -u
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
[ -n "$nvcc" ] || echo "skipped: nvcc (there is no CUDA toolkit)"
passed=0 failed=0
example() { # the program between README's ```cpp and ```, by its own command; it prints what README says
    rm -rf "$folder"/* && cp llmc/{layernorm.cuh,common.h} "$folder"
    sed -n '/^```cpp/,/^```$/{/^```/!p}' README.md >"$folder/example.cu"
    local command says
    command=$(sed -n 's/^    \(g++ .* -o example\) .*/\1/p' README.md)
    says=$(sed -n 's/^    \.\/example *# //p' README.md)
    [ -n "$says" ] && (cd "$folder" && $command && [ "$(./example)" = "$says" ])
}
if [ $# = 0 ]; then
    set -- llmc/*.cuh
    if example; then passed=$((passed + 1)); echo "ok   README's example"
    else failed=$((failed + 1)); echo "FAIL README's example"; fi
fi
for file in "$@"; do
    # the line, and those that continue it
    line=$(sed -n '/To copy:/,/^#pragma once/p' "$file" | grep '^//' | tr '\n' ' ')
    names=$(grep -oE '[a-z0-9_]+\.(cuh|h)' <<<"$line")
    rm -rf "$folder"/* && cp "$file" "$folder" && for name in $names; do cp "llmc/$name" "$folder"; done
    main=$(basename "$file")
    [[ $line != *"which includes this file"* ]] || main=${names%%$'\n'*}
    echo "#include \"$main\"
int main() {}" >"$folder/alone.cu"
    for compiler in g++ ${nvcc:+nvcc}; do
        if [ $compiler = g++ ]; then
            command="g++ -std=c++20 -Wall -Wextra -Wno-unknown-pragmas -x c++ -fsyntax-only"
        else
            command="$nvcc -std=c++20 -x cu -gencode=arch=compute_90a,code=sm_90a -c -o $folder/alone.o"
        fi
        if [ -n "$names" ] && (cd "$folder" && $command alone.cu) >"$folder/log" 2>&1; then
            passed=$((passed + 1))
            echo "ok   $file with $(echo $names) ($compiler)"
        else
            failed=$((failed + 1))
            echo "FAIL $file with $(echo $names) ($compiler)"
            [ -n "$names" ] || echo "it has no line 'To copy: this file, ...'"
            head -20 "$folder/log" 2>/dev/null
        fi
    done
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
