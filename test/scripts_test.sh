#!/usr/bin/env bash
# scripts/run_*.sh: what each one's comment says of EXPLAIN=1 is what the program says, and README's tables of hours and
# memory too; what they would run; a run of the smallest, and its resumption. Needs no network.
# usage: test/scripts_test.sh [--write]      --write puts what the program says into the comments
set -eu
cd "$(dirname "$0")/.."
export TRAIN_GPT=${TRAIN_GPT:-build/train_gpt}
program=$(realpath "$TRAIN_GPT")
unset GPUS OUT FLAGS DRY EXPLAIN DATA STEPS
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "FAIL $*"; exit 1; }
scripts=(scripts/run_gpt2_*.sh scripts/run_tiny*.sh)
[ ${#scripts[@]} = 7 ] || fail "there are ${#scripts[@]} scripts"

# The block: the lines that begin with "#   " after the one that announces it.
block() { sed -n '/^# EXPLAIN=1 prints/,/^[^#]/{s/^#   //p}' "$1"; }
# The workspace is the machine's: lines that count it lose their numbers, and all lose their bars. The rest is exact.
exact() { sed -E '/workspace|activations \(|^  total|the largest|^ +[0-9]+ /s/[0-9.]+//g; s/[█▏▎▍▌▋▊▉]//g; s/ +/ /g'; }
for script in "${scripts[@]}"; do
    EXPLAIN=1 "$script" >"$work/says"
    grep -q '^  total' "$work/says" || fail "$script: EXPLAIN=1 prints no table"
    if [ "${1:-}" = --write ]; then
        sed -e '/^# EXPLAIN=1 prints/,/^[^#]/{/^#   /d}' "$script" |
            awk -v says="$work/says" '{print} /^# EXPLAIN=1 prints/ {while ((getline line < says) > 0) print "#   " line}' >"$work/new"
        cp "$work/new" "$script"
    fi
    diff <(block "$script" | exact) <(exact <"$work/says") || fail "$script: its comment is not what EXPLAIN=1 prints: test/scripts_test.sh --write"
done

# README's row of each script for GPUs holds the hours and dollars of 8 H100.
for script in scripts/run_gpt2_*.sh scripts/run_tinyllama.sh; do
    row=$(EXPLAIN=1 "$script" | awk '/^  H100 at/ {sub(",", "", $14); print "| " $14 " | " $15 " |"}')
    grep -F "| \`$script\` |" README.md | grep -qF "$row" || fail "README.md: the row of $script does not say: $row"
done

# README's GiB are the program's, to the digit shown: a workspace of another machine may turn that by one.
gib() { # flags
    "$TRAIN_GPT" --precision bf16 --sample-tokens 0 --explain "$@" | awk '/^  (the largest|total)/ {sub(/ MiB.*/, ""); print $NF / 1024; exit}'
}
is_gib() { # what README says, then flags
    awk -v says="$1" -v found="$(gib "${@:2}")" 'BEGIN {exit !(found > 0 && says - found < 0.151 && found - says < 0.151)}' ||
        fail "README.md: $1 GiB, not $(gib "${@:2}"): ${*:2}"
}
section() { sed -n "/^<!-- $1 -->/,/^<!-- end of $1 -->/p" README.md; }
cells=0
while read -r model row; do
    while read -r says flags; do
        is_gib "$says" --model "$model" --seq $([[ $model = llama3* ]] && echo 8192 || echo 1024) $flags
        cells=$((cells + 1))
    done < <(grep -oE '`--[^`]*` [0-9.]+' <<<"$row" | sed -E 's/`(.*)` (.*)/\2 \1/')
done < <(section gpus | sed -nE 's/^\| ([a-z0-9-]+)/\1/p')
while read -r says flags; do
    [[ $flags == *p\ 8* ]] || flags="--dp 8 $flags" # what shares data unless it says otherwise
    is_gib "$says" --model tinyllama-1.1b --seq 2048 --micro-batch 8 $flags
    cells=$((cells + 1))
done < <(section layouts | sed -nE 's/^\| `([^`]*)` .* ([0-9.]+) \|$/\2 \1/p')
[ $cells = 29 ] || fail "README.md's tables of memory have $cells cells"

# What would run on no, one and eight GPUs. TRAIN_GPT empty: the scripts build.
dry() { TRAIN_GPT='' DRY=1 "$@" >"$work/dry" || fail "$*"; }
says() { grep -qE -- "$1" "$work/dry" || { cat "$work/dry"; fail "no line has: $1"; }; }
root=
[ "$(id -u)" != 0 ] || root='--allow-run-as-root '
for script in "${scripts[@]}"; do
    dry env GPUS=8 OUT="$work/o" FLAGS="--steps 7" "$script"
    says "^mpirun $root-np 8 --bind-to none build/train_gpt .* --device cuda --steps 7 $"
    says "^make DEVICE=cuda build/train_gpt $"
    dry env GPUS=1 OUT="$work/o" "$script"
    says "^build/train_gpt .* --out $work/o --device cuda $"
    dry env GPUS=0 OUT="$work/o" "$script"
    says "^build/train_gpt .* --out $work/o --device cpu $"
    says "^make DEVICE=cpu build/train_gpt $"
    [ ! -e "$work/o" ] || fail "$script: DRY=1 makes $work/o"
    GPUS=many "$script" >"$work/dry" 2>&1 && fail "$script takes GPUS=many"
    says "error: GPUS=many is no number"
done
dry env GPUS=0 scripts/run_gpt2_124M.sh
[ -e data/gpt2 ] || says '^dev/data/tokenizer.py gpt2 $'
says '--tokenizer data/gpt2 --evaluate hellaswag=data/hellaswag_val.jsonl '
mkdir -p "$work/o/step_00000100.tmp"
dry env GPUS=1 OUT="$work/o" scripts/run_gpt2_124M.sh
! grep -q -- --resume "$work/dry" || fail "half a checkpoint is no checkpoint"
mkdir "$work/o/step_00000100"
dry env GPUS=1 OUT="$work/o" scripts/run_gpt2_124M.sh
says '--resume'

# Without a GPU the scripts for GPUs say so; a stand-in for nvidia-smi lists two.
mkdir "$work/bin"
printf '#!/bin/sh\nexit 9\n' >"$work/bin/nvidia-smi" && chmod +x "$work/bin/nvidia-smi"
! PATH=$work/bin:$PATH scripts/run_gpt2_124M.sh >"$work/dry" 2>&1 || fail "run_gpt2_124M.sh runs without a GPU"
says 'error: nvidia-smi lists no GPU: GPUS=0 '
printf '#!/bin/sh\nexec echo "$@" >>%s/run\n' "$work" >"$work/bin/mpirun" && chmod +x "$work/bin/mpirun"
printf '#!/bin/sh\necho "GPU 0: A"; echo "GPU 1: B"\n' >"$work/bin/nvidia-smi"

# In a folder that has all data in small but HellaSwag, whose download fails: each script runs for real, and goes on.
repo=$work/repo
mkdir -p "$repo"/{data/{gpt2,llama2,fineweb10B,fineweb100B,finewebedu100B,tinyllama},dev/data} && cp -r scripts "$repo"
printf '#!/bin/sh\nexit 1\n' >"$repo/dev/data/hellaswag.py" && chmod +x "$repo/dev/data/hellaswag.py"
touch "$repo/data/gpt2/encoder.json" "$repo/data/llama2/tokenizer.model" "$repo/data/tinyllama/edu.json"
for shard in fineweb10B/fineweb_{train_000103,val_000000} fineweb100B/fineweb_{train_000315,train_001030,val_000000} \
    finewebedu100B/edu_fineweb_{train_000336,val_000000} tinyllama/edu{_000000,.val}; do
    python3 -c 'import array, struct, sys
n = 999 + len(sys.argv[1])  # files of the same bytes are refused
sys.stdout.buffer.write(struct.pack("<3i", 20240520, 1, n).ljust(1024, b"\0") + array.array("H", range(n)).tobytes())' $shard >"$repo/data/$shard.bin"
done
PATH=$work/bin:$PATH TRAIN_GPT=$program "$repo/scripts/run_gpt2_124M.sh" >"$work/dry"
says 'going on without HellaSwag'
grep -q -- "-np 2 .* --tokenizer data/gpt2 --out out/gpt2_124M --device cuda" "$work/run" && ! grep -q -- --evaluate "$work/run" || fail "$(cat "$work/run")"
for script in scripts/run_gpt2_*.sh scripts/run_tinyllama.sh; do
    small="--layers 1 --heads 2 --channels 16 --seq 16 --micro-batch 2 --batch-tokens 32 --eval-tokens 32 --sample-tokens 2 --tokenizer byte"
    [[ $script = *llama* ]] && small+=" --kv-heads 1"
    for steps in 2 3; do
        TRAIN_GPT=$program GPUS=0 OUT=$work/${script##*/} FLAGS="$small --steps $steps" "$repo/$script" >"$work/dry" 2>&1 || { cat "$work/dry"; fail "$script"; }
    done
    says '^resumed at step 2$'
    says '^val loss [0-9.]+'
done

# The smallest for real: three steps, then two more of the same run.
seq 1 4000 >"$work/numbers.txt"
small="--layers 1 --channels 48 --seq 32 --micro-batch 2 --batch-tokens 64 --eval-tokens 64 --sample-tokens 8 --save-every 3"
tiny() { DATA=$work/numbers.txt OUT=$work/tiny FLAGS="$small $1" scripts/run_tinyshakespeare.sh >"$work/dry" 2>&1 || { cat "$work/dry"; fail "run_tinyshakespeare.sh"; }; }
tiny "--steps 3"
says '^val loss [0-9.]+'
tiny "--steps 5"
says '^resumed at step 3$'
grep -q '"step":5,' "$work/tiny/log.jsonl" || fail "no step 5 in log.jsonl"
echo "ok: scripts/run_*.sh"
