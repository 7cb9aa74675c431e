#!/usr/bin/env bash
# scripts/run_*.sh and the pages: what they say that the program prints is what it prints. A script's comment holds lines
# of EXPLAIN=1; scripts/README.md hours and dollars; docs/layouts.md memory; README.md and docs/ hold blocks of output.
# Then what the scripts would run; a run of the smallest, and its resumption. Needs no network.
# usage: test/scripts_test.sh [--write]      --write puts what the program says into the comments and the blocks
set -eu
cd "$(dirname "$0")/.."
export TRAIN_GPT=${TRAIN_GPT:-build/train_gpt}
program=$(realpath "$TRAIN_GPT")
programs=${program%/*}
unset GPUS OUT FLAGS DRY EXPLAIN DATA STEPS
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "FAIL $*"; exit 1; }
scripts=(scripts/run_gpt2_*.sh scripts/run_tiny*.sh scripts/run_track3.sh)
[ ${#scripts[@]} = 8 ] || fail "there are ${#scripts[@]} scripts"

# test/run.sh shows what a failed row or test printed, with the seed that repeats it, and nothing of those that passed.
mkdir "$work/tests"
printf '#!/bin/sh\n%s\n' "printf 'seed 7 (--seed repeats it)\n  a: fine\nok a: 2 checks\n  b: off by 2\nFAIL b: 1 checks\n'; exit 1" \
    >"$work/tests/test_table"
printf '#!/bin/sh\n%s\n' "printf '[ RUN      ] A.B\nwhy\n[  FAILED  ] A.B (1 ms)\n[ RUN      ] A.C\n[       OK ] A.C (1 ms)\n'; exit 1" \
    >"$work/tests/test_google"
chmod +x "$work"/tests/test_*
test/run.sh "$work/tests" test_table test_google >"$work/says" && fail "test/run.sh passes failed tests"
for line in 'seed 7 ' '  b: off by 2' 'FAIL b: 1 checks' why '[  FAILED  ] A.B' '2 passed, 2 failed'; do
    grep -qF -- "$line" "$work/says" || fail "test/run.sh does not print: $line"
done
! grep -qE 'fine|A\.C' "$work/says" || fail "test/run.sh prints what passed"

# The block: the lines that begin with "#   " after the one that announces it. Six of them are kept.
block() { sed -n '/^# EXPLAIN=1 prints/,/^[^#]/{s/^#   //p}' "$1"; }
kept() { grep -E '^parameters|^run:|^  (A100|H100) at|^  activations \(train|^  total'; }
# The workspace is the machine's: lines that count it lose their numbers, and all lose their bars. The rest is exact.
exact() {
    sed -E '/workspace|activations \(|^  total|the largest|^ +[0-9]+ /s/[0-9.]+//g; s/[█▏▎▍▌▋▊▉]//g; s/ +/ /g'
}
for script in "${scripts[@]}"; do
    EXPLAIN=1 "$script" | kept >"$work/says"
    [ "$(wc -l <"$work/says")" = 6 ] || fail "$script: EXPLAIN=1 prints no table"
    if [ "${1:-}" = --write ]; then
        sed -e '/^# EXPLAIN=1 prints/,/^[^#]/{/^#   /d}' "$script" |
            awk -v says="$work/says" '{print} /^# EXPLAIN=1 prints/ {while ((getline line < says) > 0) print "#   " line}' >"$work/new"
        cp "$work/new" "$script"
    fi
    diff <(block "$script" | exact) <(exact <"$work/says") ||
        fail "$script: its comment is not what EXPLAIN=1 prints: test/scripts_test.sh --write"
done

# Blocks of the pages. A line <!-- prints: COMMAND --> stands above the fence; the block's own first line is "$ " and
# the command as a reader types it.
blocks=0
for page in README.md docs/*.md; do
    while IFS=: read -r line _; do
        command=$(sed -n "${line}s/^<!-- prints: \(.*\) -->$/\1/p" "$page")
        OMP_NUM_THREADS=1 bash -c "${command//build\//$programs/}" >"$work/says"
        [ -s "$work/says" ] || fail "$page:$line: its command prints nothing: $command"
        if [ "${1:-}" = --write ]; then
            awk -v line="$line" -v says="$work/says" '
                NR == line + 2 {print; while ((getline text < says) > 0) print text; skip = 1; next}
                skip && /^```/ {skip = 0}
                !skip' "$page" >"$work/new"
            [[ $(sed -n "$((line + 2))p" "$page") == '$ '* ]] || fail "$page:$((line + 2)) does not begin with \$"
            cp "$work/new" "$page"
        fi
        diff <(sed -n "$((line + 3)),/^\`\`\`/{/^\`\`\`/!p}" "$page" | exact) <(exact <"$work/says") ||
            fail "$page:$line: its block is not what the program prints: test/scripts_test.sh --write"
        blocks=$((blocks + 1))
    done < <(grep -n '^<!-- prints: ' "$page" | sort -t: -k1,1nr) # the last first: lines move
done
[ $blocks -ge 2 ] || fail "README.md and docs/ hold $blocks blocks of output"

# The row of each script for GPUs in scripts/README.md holds the hours and dollars of 8 H100.
for script in scripts/run_gpt2_*.sh scripts/run_tinyllama.sh scripts/run_track3.sh; do
    row=$(EXPLAIN=1 "$script" | awk '/^  H100 at/ {sub(",", "", $14); print "| " $14 " | " $15 " |"}')
    grep -F "| \`$script\` |" scripts/README.md | grep -qF "$row" ||
        fail "scripts/README.md: the row of $script does not say: $row"
done

# docs/planning.md's table of cards is what --fit prints for them.
cards=$(sed -n 's/^<!-- fit: \(.*\) -->$/\1/p' docs/planning.md)
"$programs/plan_gpt" --fit "$cards" >"$work/says" || fail "--fit $cards"
if [ "${1:-}" = --write ]; then
    awk -v says="$work/says" '
        /^<!-- fit: / {print; while ((getline line < says) > 0) print line; skip = 1}
        /^<!-- end of fit/ {skip = 0}
        !skip' docs/planning.md >"$work/new"
    cp "$work/new" docs/planning.md
fi
[ "$(wc -l <"$work/says")" -ge 12 ] || fail "--fit $cards prints no table"
diff <(sed -n '/^<!-- fit: /,/^<!-- end of fit/{/^<!--/!p}' docs/planning.md) "$work/says" ||
    fail "docs/planning.md: its table is not what --fit prints: test/scripts_test.sh --write"

# docs/layouts.md's GiB are the program's, to the digit shown: a workspace of another machine may turn that by one.
gib() { # flags
    "$TRAIN_GPT" --precision bf16 --sample-tokens 0 --explain "$@" |
        awk '/^  (the largest|total)/ {for (i = 2; $i !~ /^[0-9]+$/; i++); print $i / 2 ^ 30; exit}'
}
is_gib() { # what the page says, then flags
    awk -v says="$1" -v found="$(gib "${@:2}")" 'BEGIN {exit !(found > 0 && says - found < 0.151 && found - says < 0.151)}' ||
        fail "docs/layouts.md: $1 GiB, not $(gib "${@:2}"): ${*:2}"
}
section() { sed -n "/^<!-- $1 -->/,/^<!-- end of $1 -->/p" docs/layouts.md; }
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
[ $cells = 36 ] || fail "docs/layouts.md's tables of memory have $cells cells"

# The first run's flags: accepted, and its sample ends before the first position that was never trained.
# It leaves a checkpoint, from which the same command goes on.
for steps in 2 3; do
    "$TRAIN_GPT" --config scripts/first_run.cfg --steps $steps --eval-tokens 512 --out "$work/first" >"$work/dry" 2>&1 ||
        { cat "$work/dry"; fail "scripts/first_run.cfg"; }
    [ $steps = 3 ] || cp "$work/dry" "$work/first_two"
done
grep -q '^resumed at step 2$' "$work/dry" || fail "scripts/first_run.cfg leaves no checkpoint to go on from"
cp "$work/first_two" "$work/dry"
grep -q '^step 2 | val loss [0-9.]' "$work/dry" || fail "scripts/first_run.cfg prints no val loss"
set_to() { sed -n "s/^$1 = //p" scripts/first_run.cfg; }
prompt=$(set_to prompt)
[ $((${#prompt} + $(set_to sample-tokens))) -lt "$(set_to seq)" ] || fail "scripts/first_run.cfg: its sample is longer than seq"

# The commands of docs/cookbook.md, in the order in which they stand, in one folder, at tiny sizes: what a command reads is
# there, or an earlier one has made it. Left out are those that want mpirun, machines, a download or fp16 on a GPU.
book=$work/book
mkdir -p "$book"/{data,corpus,talks,dev,scripts} && (
    cd "$book"
    for file in shakespeare.txt corpus.txt chats.txt; do seq -f "$file %g" 3000 >$file; done
    cp "$OLDPWD/dev/data/dialogue.jsonl" talks.jsonl && cp talks.jsonl chats.jsonl && gzip -c talks.jsonl >talks/a.jsonl.gz
    cp "$OLDPWD/dev/data/preferences.jsonl" pairs.jsonl
    for n in $(seq 8); do echo "{\"input_ids\": [$(seq -s, 200)], \"labels\": [$(seq -s, 200)]}"; done >tokens.jsonl
    for n in $(seq 40); do
        echo "{\"prompt\": \"$n\", \"completion\": \"$n\", \"label\": $((n % 2)), \"answer\": \"$n\", \"text\": \"$n\"}" |
            sed 's/"label": 0/"label": false/; s/"label": 1/"label": true/'
    done >thumbs.jsonl
    cp thumbs.jsonl sums.jsonl
    small="--model tiny-llama --layers 1 --heads 2 --kv-heads 1 --channels 32 --seq 256 --micro-batch 2 --steps 1 --sample-tokens 0"
    for folder in DIR LARGERDIR data/TinyLlama data/gpt2; do "$program" --data corpus.txt $small --export $folder; done
    "$program" --data corpus.txt --model tiny-moe --layers 1 --seq 64 --steps 1 --sample-tokens 0 --export EXPERTSDIR
) >"$work/dry" 2>&1 || { cat "$work/dry"; fail "the folders of the cookbook"; }
typed=0
while read -r command; do
    shape="--layers 2 --heads 2 --channels 32" # a model from files has its own
    [[ $command != *--model* && $command != *--resume* ]] || shape=
    [[ $command != *'--model tiny-m'* ]] || shape="--layers 2"
    [[ $command != *--lora-layers* ]] || command=${command/11-21/0}
    [[ $command = *'--steps 0'* || $command = *--eval* ]] || shape+=" --steps 2"
    shape+=" --seq 256 --micro-batch 2"
    [[ $command != *'--loss grpo'* ]] || shape+=" --micro-batch 8 --answer-tokens 4"
    [[ $command = *--resume* ]] && shape=$([[ $command = *'--steps 0'* ]] || echo "--steps 4")
    shape+=" --sample-tokens 0 --eval-tokens 64 --device cpu"
    [[ $command != *convert_gpt* ]] || shape="--device cpu"
    [[ $command != *'--out smooth --'* && $command != *'--save-every 200'* ]] || command=${command/200/1}
    ( cd "$book" && bash -c "${command/build\//$programs/} $shape" ) >"$work/dry" 2>&1 ||
        { tail -3 "$work/dry"; fail "docs/cookbook.md: $command $shape"; }
    typed=$((typed + 1))
done < <(sed -n '/^## Train/,/^## Data/{s/^    \(build\/[a-z]*_gpt .*\)/\1/p}' docs/cookbook.md | grep -vE 'fineweb|--precision fp16')
[ $typed -ge 25 ] || fail "docs/cookbook.md has $typed commands that train"

# What would run on no, one and eight GPUs. TRAIN_GPT empty: the scripts build.
dry() { TRAIN_GPT='' DRY=1 "$@" >"$work/dry" || fail "$*"; }
says() { grep -qE -- "$1" "$work/dry" || { cat "$work/dry"; fail "no line has: $1"; }; }
root=
[ "$(id -u)" != 0 ] || root='--allow-run-as-root '
for script in "${scripts[@]}"; do
    dry env GPUS=8 OUT="$work/o" FLAGS="--steps 7" "$script"
    says "^scripts/multi_node/gently.sh mpirun $root-np 8 --bind-to none build/train_gpt .* --device cuda --resume --steps 7 $"
    says "^make DEVICE=cuda all $"
    dry env GPUS=1 OUT="$work/o" "$script"
    says "^build/train_gpt .* --out $work/o --device cuda --resume $"
    dry env GPUS=0 OUT="$work/o" "$script"
    says "^build/train_gpt .* --out $work/o --device cpu --resume $"
    says "^make DEVICE=cpu all $"
    [ ! -e "$work/o" ] || fail "$script: DRY=1 makes $work/o"
    GPUS=many "$script" >"$work/dry" 2>&1 && fail "$script takes GPUS=many"
    says "error: GPUS=many is no number"
done
dry env GPUS=8 bash -c '. scripts/run_common.sh; env' scripts/run_none.sh
! grep '^GPUS=' "$work/dry" || fail "make takes a number of ranks for an architecture"
dry env GPUS=0 scripts/run_gpt2_124M.sh
[ -e data/gpt2 ] || says '^dev/data/tokenizer.py gpt2 $'
says '--tokenizer data/gpt2 --eval hellaswag=data/hellaswag_val.jsonl '
for optimizer in adamw normuon; do
    dry env GPUS=8 scripts/run_track3.sh $optimizer
    says "--expect dev/curves/track3_$optimizer.txt .* --out out/track3_$optimizer "
done
! DRY=1 scripts/run_track3.sh lion >"$work/dry" 2>&1 || fail "run_track3.sh takes lion"
says 'error: lion is none of muon, normuon, adamw'
dry env OUT="$work/o" scripts/run_chat.sh
says "--config scripts/first_run.cfg .* --export $work/o/base $"
says "^build/tune_gpt --model $work/o/base --loss sft --data dev/data/dialogue.jsonl "
dry env MODEL=folder scripts/run_chat.sh
says '^build/tune_gpt --model folder --loss sft '
dry env GPUS=0 OUT="$work/o" DATA=a.bin VAL=b.bin DEPTHS='4 6' RATIO=8 scripts/miniseries.sh
for depth in 4 6; do
    says "^build/train_gpt --depth $depth:8 --data a.bin --val b.bin --documents best-fit --out $work/o/d$depth --device cpu --resume $"
done
[ ! -e "$work/o" ] || fail "DRY=1 makes $work/o"

# The series' line, through losses that lie on one: 7 - 0.5 log10(tokens), where FLOPs grow as the tokens' square.
losses=(. 5.0 4.5 4.0)
for depth in 1 2 3; do
    mkdir -p "$work/series/d$depth"
    tokens=$((10 ** (depth + 3)))
    printf '{"config":{"batch-tokens":9},"flops_per_token":%d}\n{"step":8,"tokens":1}\n{"step":9,"val_loss":9.0}\n' $tokens \
        >"$work/series/d$depth/log.jsonl"
    printf '{"step":9,"tokens":%d,"tokens_per_second":5}\n{"step":9,"val_loss":%s}\n' $tokens ${losses[depth]} \
        >>"$work/series/d$depth/log.jsonl"
done
TRAIN_GPT=true GPUS=0 OUT=$work/series DATA=a VAL=b DEPTHS='1 2 3' scripts/miniseries.sh >"$work/dry" || fail "scripts/miniseries.sh"
says '^loss = 7.0000 -0.2500 log10\(FLOPs\)$'
says '^loss = 7.0000 -0.5000 log10\(tokens\)$'
says 'd2/log.jsonl: 1.000e\+05 tokens, 1.000e\+10 FLOPs, val loss 4.5000$'

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
cp -r dev/curves "$repo/dev"
printf '#!/bin/sh\nexit 1\n' >"$repo/dev/data/hellaswag.py" && chmod +x "$repo/dev/data/hellaswag.py"
touch "$repo/data/gpt2/encoder.json" "$repo/data/llama2/tokenizer.model" "$repo/data/tinyllama/edu.json"
for shard in fineweb10B/fineweb_{train_000030,train_000103,val_000000} \
    fineweb100B/fineweb_{train_000315,train_001030,val_000000} \
    finewebedu100B/edu_fineweb_{train_000336,val_000000} tinyllama/edu{_000000,.val}; do
    python3 -c 'import array, struct, sys
n = 999 + sum(map(ord, sys.argv[1])) % 97  # files of the same bytes are refused
sys.stdout.buffer.write(struct.pack("<3i", 20240520, 1, n).ljust(1024, b"\0") + array.array("H", range(n)).tobytes())' $shard >"$repo/data/$shard.bin"
done
PATH=$work/bin:$PATH TRAIN_GPT=$program "$repo/scripts/run_gpt2_124M.sh" >"$work/dry"
says 'going on without HellaSwag'
grep -q -- "-np 2 .* --tokenizer data/gpt2 --out out/gpt2_124M --device cuda" "$work/run" &&
    ! grep -q -- "--eval hellaswag" "$work/run" || fail "$(cat "$work/run")"
for script in scripts/run_gpt2_*.sh scripts/run_tinyllama.sh scripts/run_track3.sh; do
    small="--layers 1 --heads 2 --channels 16 --seq 16 --micro-batch 2 --batch-tokens 32 --eval-tokens 32"
    small+=" --sample-tokens 2 --tokenizer byte --vocab 50257"
    [[ $script = *llama* || $script = *track3* ]] && small+=" --kv-heads 2"
    for steps in 2 3; do
        TRAIN_GPT=$program GPUS=0 OUT=$work/${script##*/} FLAGS="$small --steps $steps" "$repo/$script" \
            >"$work/dry" 2>&1 || { cat "$work/dry"; fail "$script"; }
    done
    says '^resumed at step 2$'
    says '^step [0-9]+ \| val loss [0-9.]+'
done

# The smallest for real: three steps, then two more of the same run.
seq 1 4000 >"$work/numbers.txt"
small="--layers 1 --channels 48 --seq 32 --micro-batch 2 --batch-tokens 64 --eval-tokens 64 --sample-tokens 8 --save-every 3"
tiny() { # more flags
    DATA=$work/numbers.txt OUT=$work/tiny FLAGS="$small $1" scripts/run_tinyshakespeare.sh >"$work/dry" 2>&1 ||
        { cat "$work/dry"; fail "run_tinyshakespeare.sh"; }
}
tiny "--steps 3"
says '^step [0-9]+ \| val loss [0-9.]+'
tiny "--steps 5"
says '^resumed at step 3$'
grep -q '"step":5,' "$work/tiny/log.jsonl" || fail "no step 5 in log.jsonl"
echo "ok: scripts/run_*.sh"
