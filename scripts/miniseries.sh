#!/usr/bin/env bash
# nanochats of rising depth on one text, and a line through their last validation losses.     flags, variables: run_common.sh
# DATA=FILES and VAL=FILES, which must be one text for all; DEPTHS="6 8 10 12"; RATIO=12 tokens a weight; --depth sets the rest.
# OUT/dD has the run of depth D (out/miniseries). Then a row a depth, and loss = a + b log10(x) by least squares, of FLOPs and
# of tokens. Expected: b below 0, and points on the line; nanochat's own series has value embeddings, smear and backout beside
# it, so its figures are no measure. Measured: not yet.
. "$(dirname "$0")/run_common.sh"
[ -n "${DATA:-}" ] && [ -n "${VAL:-}" ] || fail "DATA=FILES and VAL=FILES name the text"
out=${OUT:-out/miniseries} logs=()
for depth in ${DEPTHS:-6 8 10 12}; do
    OUT=$out/d$depth train --depth "$depth:${RATIO:-12}" --data "$DATA" --val "$VAL" --documents best-fit
    logs+=("$out/d$depth/log.jsonl")
done
[ -z "${DRY:-}${EXPLAIN:-}" ] || exit 0

awk '
    function number(key) { return match($0, "\"" key "\":") ? substr($0, RSTART + RLENGTH) + 0 : 0 }
    function fit(name, x,    i, mx, my, xy, xx) {
        for (i = 1; i <= n; i++) { mx += x[i] / n; my += loss[i] / n }
        for (i = 1; i <= n; i++) { xy += (x[i] - mx) * (loss[i] - my); xx += (x[i] - mx) ^ 2 }
        printf "loss = %.4f %+.4f log10(%s)\n", my - xy / xx * mx, xy / xx, name
    }
    FNR == 1 { n++; each = number("flops_per_token") }
    /"tokens":/ { tokens[n] = log(number("tokens")) / log(10); flops[n] = tokens[n] + log(each) / log(10) }
    /"val_loss":/ { loss[n] = number("val_loss") }
    END {
        for (i = 1; i <= n; i++) printf "%s: %.3e tokens, %.3e FLOPs, val loss %.4f\n", ARGV[i], 10 ^ tokens[i], 10 ^ flops[i], loss[i]
        if (n > 1) { fit("FLOPs", flops); fit("tokens", tokens) }
    }' "${logs[@]}"
