#!/usr/bin/env bash
# Everything that needs NVIDIA GPUs, from one binary, on a machine without Rust:
#   tests/gpu.sh OUT [BINARY]
# Each stage has its own time limit, log and JSON in OUT; a table of all of them is OUT/summary.txt, and the exit code is the
# worst stage's. Checks run JOBS at a time (default 1), benches alone. STAGES=regex runs only stages whose names match;
# SLICES=folder keeps the models of real widths (45 GB at most at a time), which go to a temporary folder otherwise.
set -u
here=$(realpath "$(dirname "$0")/..")
[ $# -ge 1 ] || { echo "usage: tests/gpu.sh OUT [BINARY]"; exit 2; }
out=$(realpath -m "$1")
lockstep=$(realpath -m "${2:-$here/target/release/lockstep}")
cd "$here" || exit 2
[ -f "$lockstep" ] && [ -x "$lockstep" ] || { echo "expected the binary $lockstep; build it with cargo build --release"; exit 2; }
command -v nvidia-smi > /dev/null || { echo "no NVIDIA GPU: nvidia-smi was not found"; exit 2; }
stages=${STAGES:-.}
[[ x =~ $stages ]]
[ $? -ne 2 ] || { echo "expected a regular expression in STAGES, found $stages"; exit 2; }
jobs=${JOBS:-1}
[[ $jobs =~ ^[1-9][0-9]*$ ]] || { echo "expected a number from 1 in JOBS, found $jobs"; exit 2; }
mkdir -p "$out" || exit 2
slices=${SLICES:-$(mktemp -d)}
[ -n "${SLICES:-}" ] || trap 'rm -rf "$slices"' EXIT
nano=goldens/models/glm5-nano-Q4_K_M.gguf
nano52=goldens/models/nano52-Q2_K.gguf
asks=goldens/glm5-nano/recall.json
text="In the beginning" # 11 tokens of the synthetic vocabulary, more than --index-top-k of the slices
table=$out/summary.txt

# stop PID: ends what it has started, and what that has started.
stop() {
    local child
    for child in $(pgrep -P "$1"); do
        stop "$child"
        kill "$child" 2> /dev/null
    done
}
trap 'stop $$; exit 130' INT TERM
: > "$table"

wanted() { [[ $1 =~ $stages ]]; }

# line NAME EXIT SECONDS TEXT: a line of the table.
line() { printf '%-36s exit %-3s %6s s  %s\n' "$1" "$2" "$3" "$4" | tee -a "$table"; }

# run NAME SECONDS COMMAND..: stdout to NAME.json, stderr to NAME.log, a line to the table.
run() {
    local name=$1 limit=$2 start code
    shift 2
    start=$SECONDS
    # In the background, since a signal is heard while waiting and not while a command runs.
    timeout -k 5 "$limit" "$@" > "$out/$name.json" 2> "$out/$name.log" &
    wait $!
    code=$?
    line "$name" $code $((SECONDS - start)) "$(sed -n 's/^  "verdict": "\(.*\)",$/\1/p' "$out/$name.json" | head -1)"
}

# judged NAME SECONDS CODE GOOD BAD: a line for a command that has answered with 0 or 1: GOOD, or BAD where that is empty.
judged() {
    if [ "$3" -gt 1 ]; then
        line "$1" "$3" "$2" "did not run"
    else
        line "$1" "$([ -n "$4" ]; echo $?)" "$2" "${4:-$5}"
    fi
}

# named DEVICE FAULT TP SITE: the fault must be found and named: exit 1 is right, and the JSON names it.
named() {
    local name="bisect-$2-tp$3-${1//[:,]/-}" start=$SECONDS code found=""
    timeout -k 5 90 "$lockstep" bisect -m "$nano" --device "$1" --tp "$3" --inject "$2@$4" --json \
        > "$out/$name.json" 2> "$out/$name.log"
    code=$?
    # The first kind in the document is the culprit's; those that were ruled out stand behind it.
    if [ $code -eq 1 ] && [ "$(sed -n 's/^ *"kind": "\(.*\)",*$/\1/p' "$out/$name.json" | head -1)" = "$2" ]; then
        found=named
    fi
    judged "$name" $((SECONDS - start)) $code "$found" "NOT NAMED"
}

# drawn DEVICE TP SEED: a text that is drawn with a temperature is the CPU's, and not the likeliest one.
drawn() {
    local name="drawn-tp$2-${1//[:,]/-}" start=$SECONDS code found=""
    text() { # ids of a text: DEVICE TEMPERATURE
        timeout -k 5 90 "$lockstep" generate --raw "And it came to pass" -m "$nano" --device "$1" --tp "$tp" \
            --temperature "$2" --seed "$seed" -n 64 --json > "$out/$name.json" 2> "$out/$name.log" || return
        sed -n '/^  "ids"/,/^  \]/p' "$out/$name.json"
    }
    local tp=$2 seed=$3 plain host device
    plain=$(text cpu 0) && host=$(text cpu 1.5) && device=$(text "$1" 1.5)
    code=$?
    if [ $code -eq 0 ] && [ -n "$host" ] && [ "$host" != "$plain" ] && [ "$device" = "$host" ]; then
        found="$(grep -c '[0-9]' <<< "$device") tokens as on the CPU"
    fi
    judged "$name" $((SECONDS - start)) $code "$found" "OTHER TEXTS"
}

# mutant NAME FILE SED: a kernel source that SED changes must fail the stage kernels.
mutant() {
    local name="mutant-$1" start=$SECONDS code found="" folder="$out/mutant-$1.cu"
    rm -rf "$folder" && cp -r kernels/cu "$folder" && sed -i "$3" "$folder/$2"
    timeout -k 5 120 "$lockstep" verify kernels -m "$nano" --device cuda:0 --kernels-dir "$folder" --json \
        > "$out/$name.json" 2> "$out/$name.log"
    code=$?
    if [ $code -eq 1 ] && ! cmp -s "kernels/cu/$2" "$folder/$2" && ! grep -q "does not compile" "$out/$name.json"; then
        found="caught by $(grep -c '^          "verdict": "DIVERGENT"' "$out/$name.json") checks"
    fi
    rm -rf "$folder"
    judged "$name" $((SECONDS - start)) $code "$found" "NOT CAUGHT"
}

# check NAME COMMAND..: COMMAND beside others, at most $jobs at once.
check() {
    wanted "$1" || return 0
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
    "${@:2}" &
}

# alone NAME COMMAND..: COMMAND with nothing beside it.
alone() {
    wanted "$1" || return 0
    wait
    "${@:2}"
}

# slice NAME OPTIONS..: a model of real widths, made once.
slice() {
    [ -f "$slices/$1.gguf" ] || run "synth-$1" 300 "$lockstep" synth --out "$slices/$1.gguf" --json "${@:2}"
}

# drop NAME: removes it again.
drop() {
    wait
    [ -n "${SLICES:-}" ] || rm -f "$slices/$1.gguf"
}

# median NAME: decode tokens per second of a bench.
median() { sed -n '/"decode_tokens_per_second"/,/"median"/s/.*"median": \([0-9.]*\).*/\1/p' "$out/$1.json"; }

gpus=$(nvidia-smi -L 2> "$out/nvidia-smi.log" | grep -c '^GPU [0-9]')
[ "$gpus" -gt 0 ] || { echo "no NVIDIA GPU: nvidia-smi lists none"; exit 2; }
# Ranks are a power of two.
multi=1
while [ $((2 * multi)) -le "$gpus" ] && [ $multi -lt 8 ]; do multi=$((2 * multi)); done
echo "$gpus GPUs, $jobs checks at a time" | tee -a "$table"
case $(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1) in
    8.*) arch=sm_80 ;;
    9.0) arch=sm_90a ;;
    10.0) arch=sm_100a ;;
    12.0) arch=sm_120a ;;
    *) arch= ;; # kernels are then compiled at their first use
esac
[ -z "$arch" ] || alone kernels-build run kernels-build 240 "$lockstep" kernels build --arch $arch --json
alone doctor run doctor 200 "$lockstep" doctor --device cuda --json

# One GPU, virtual ranks.
check kernels run kernels 120 "$lockstep" verify kernels -m "$nano" --device cuda:0 --json
for recipe in strict fast; do
    for tp in 1 2 4 8; do
        check nano-$recipe-tp$tp run nano-$recipe-tp$tp 150 "$lockstep" verify -m "$nano" --device cuda:0 --tp $tp \
            --recipe $recipe --json
    done
    check nano52-$recipe-tp4 run nano52-$recipe-tp4 150 "$lockstep" verify -m "$nano52" --device cuda:0 --tp 4 \
        --recipe $recipe --untrained --json
    check turns-$recipe run turns-$recipe 150 "$lockstep" verify logits -m "$nano" --device cuda:0 --tp 1 \
        --recipe $recipe --asks "$asks" --all --json
done
check drawn drawn cuda:0 1 1
check drawn drawn cuda:0 2 5
check drawn drawn cuda:0 8 4294967297
for tp in 2 8; do
    check bisect-tp$tp run bisect-clean-tp$tp 90 "$lockstep" bisect -m "$nano" --device cuda:0 --tp $tp --json
    check bisect-tp$tp named cuda:0 SHARD_ORDER $tp blk.2.attn_qkv_a
    check bisect-tp$tp named cuda:0 KV_B_LAYOUT $tp blk.1.attn_k_b
    check bisect-tp$tp named cuda:0 NAME_MAP $tp blk.1.attn_q_a_norm
    check bisect-tp$tp named cuda:0 DTYPE_REINTERPRET $tp blk.2.ffn_down_exps
    check bisect-tp$tp named cuda:0 DSA_INACTIVE $tp layers.2.attn.latent
    check bisect-tp$tp named cuda:0 SHARD_PLACEMENT $tp blk.1.attn_output
    check bisect-tp$tp named cuda:0 REDUCE_MISSED $tp layers.1.attn.out
    check bisect-tp$tp named cuda:0 CONFIG_VALUE $tp rope_base=10000
done
check mutant mutant seed sample.cu 's/seed\[2 \* r + 1\] << 32/seed[2 * r + 1] << 31/'
check mutant mutant ties indexer.cu 's/at && rank < wanted/at \&\& rank > 0 \&\& rank <= wanted/'
check mutant mutant min-sign common/unpack.cuh 's/i % 4) - m;/i % 4) + m;/'
check mutant mutant tail matmul.cu 's/const int chunks = (w.cols + 15) \/ 16;/const int chunks = w.cols \/ 16;/'
check mutant mutant scale attention.cu 's/? dot \* scale : -INFINITY/? dot * scale * 1.0001f : -INFINITY/'
if command -v compute-sanitizer > /dev/null; then
    check memcheck run memcheck 280 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
        "$lockstep" verify kernels -m "$nano" --device cuda:0 --json
elif wanted memcheck; then
    line memcheck 3 0 "SKIPPED: there is no compute-sanitizer"
fi
if wanted slice-verify; then
    slice verify --layers 2 --index-top-k 8
    for tp in 1 8; do
        check slice-verify run slice-verify-tp$tp 280 "$lockstep" verify -m "$slices/verify.gguf" --device cuda:0 --tp $tp \
            --prompt "$text" --rows 4 --json
    done
fi

# Several GPUs: one rank each, over NCCL.
if [ "$gpus" -gt 1 ]; then
    for recipe in strict fast; do
        check multi-nano run multi-nano-$recipe 100 "$lockstep" verify -m "$nano" --device cuda --tp "$multi" \
            --recipe $recipe --json
        check multi-turns run multi-turns-$recipe 100 "$lockstep" verify logits -m "$nano" --device cuda --tp "$multi" \
            --recipe $recipe --asks "$asks" --all --json
    done
    check multi-drawn drawn cuda "$multi" 8
    check multi-bisect named cuda SHARD_ORDER "$multi" blk.2.attn_qkv_a
    check multi-bisect named cuda SHARD_PLACEMENT "$multi" blk.1.attn_output
    check multi-bisect named cuda REDUCE_MISSED "$multi" layers.1.attn.out
    if wanted multi-slice-verify; then
        slice verify --layers 2 --index-top-k 8
        check multi-slice-verify run multi-slice-verify 280 "$lockstep" verify -m "$slices/verify.gguf" --device cuda \
            --tp "$multi" --prompt "$text" --rows 4 --json
    fi
fi
drop verify

# Speed, with nothing beside it.
alone nano-bench run nano-bench 100 "$lockstep" bench -m "$nano" --device cuda:0 --json
if wanted slice-bench || { wanted multi-bench && [ "$gpus" -gt 1 ]; }; then
    wait
    slice bench
    alone slice-bench run slice-bench 200 "$lockstep" bench -m "$slices/bench.gguf" --device cuda:0 \
        --batch 1,2,4,8,16,32 --json
    if [ "$gpus" -gt 1 ] && wanted multi-bench; then
        run multi-bench-4 200 "$lockstep" bench -m "$slices/bench.gguf" --device cuda --tp "$multi" \
            --batch 1,2,4,8,16,32 --json
        drop bench
        # Deeper by four MoE layers, and by one dense one: the differences extrapolate to 78 layers, three of them dense.
        slice moe --layers 8
        run multi-bench-8 200 "$lockstep" bench -m "$slices/moe.gguf" --device cuda --tp "$multi" --json
        drop moe
        slice dense --layers 5 --dense-layers 2
        run multi-bench-dense 200 "$lockstep" bench -m "$slices/dense.gguf" --device cuda --tp "$multi" --json
        drop dense
        awk -v a="$(median multi-bench-4)" -v b="$(median multi-bench-8)" -v c="$(median multi-bench-dense)" 'BEGIN {
            if (a * b * c == 0) exit
            moe = (1 / b - 1 / a) / 4; dense = 1 / c - 1 / a; step = 1 / a + 72 * moe + 2 * dense
            printf "extrapolated, not measured: %.0f us a MoE layer, %.0f us a dense one; 78 layers: %.2f ms, %.0f tokens/s\n",
                moe * 1e6, dense * 1e6, step * 1e3, 1 / step }' | tee -a "$table"
        alone doctor run multi-doctor-LL 100 env NCCL_PROTO=LL "$lockstep" doctor --device cuda --json
    fi
    drop bench
fi
wait
grep -q ' exit ' "$table" || line "no stage matches $stages" 3 0 ""
worst=$(awk 'match($0, / exit [0-9]+/) { e = substr($0, RSTART + 6, RLENGTH - 6) + 0; if (e > w) w = e } END { print w + 0 }' "$table")
echo "worst exit $worst" | tee -a "$table"
exit "$worst"
