#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, from one binary, on a machine without Rust:
#   tests/gpu.sh OUT [BINARY]
# Each stage has its own time limit, log and JSON in OUT; a table ends the run, and the exit code is the worst stage's.
# STAGES=regex runs only those whose names match. SLICE=path keeps the models of real widths there (default: a temporary
# folder, 27 GB at most).
set -u
cd "$(dirname "$0")/.."
out=${1:?usage: tests/gpu.sh OUT [BINARY]}
lockstep=$(realpath "${2:-target/release/lockstep}")
stages=${STAGES:-.}
mkdir -p "$out"
slices=${SLICE:-$(mktemp -d)}
[ -n "${SLICE:-}" ] || trap 'rm -rf "$slices"' EXIT
nano=goldens/models/glm5-nano-Q4_K_M.gguf
nano52=goldens/models/nano52-Q2_K.gguf
table=$out/summary.txt
: > "$table"
worst=0

# stage NAME SECONDS COMMAND..: runs it, keeps stdout as NAME.json and stderr as NAME.log, adds a line to the table.
stage() {
    local name=$1 limit=$2 start end code
    shift 2
    [[ $name =~ $stages ]] || return 0
    start=$(date +%s%N)
    timeout -k 10 "$limit" "$@" > "$out/$name.json" 2> "$out/$name.log"
    code=$?
    end=$(date +%s%N)
    printf '%-34s exit %-3s %7.1f s  %s\n' "$name" "$code" "$(((end - start) / 1000000))e-3" \
        "$(grep -o '"verdict": "[A-Z/]*"' "$out/$name.json" | tail -1)" | tee -a "$table"
    [ "$code" -le "$worst" ] || worst=$code
}

# named FAULT TP SITE: the fault must be found and named, so the command must end with 1 and its JSON must hold the name.
named() {
    local name="bisect-$1-tp$2"
    [[ $name =~ $stages ]] || return 0
    "$lockstep" bisect -m "$nano" --device cuda --tp "$2" --inject "$1@$3" --json > "$out/$name.json" 2> "$out/$name.log"
    if [ $? -eq 1 ] && grep -q "\"kind\": \"$1\"" "$out/$name.json"; then
        printf '%-34s named\n' "$name" | tee -a "$table"
    else
        printf '%-34s NOT NAMED\n' "$name" | tee -a "$table"
        worst=1
    fi
}

gpus=$(nvidia-smi -L 2> "$out/nvidia-smi.log" | wc -l)
echo "$gpus GPUs" | tee -a "$table"
stage kernels-build 240 "$lockstep" kernels build --arch "$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | sed 's/\.//; s/^/sm_/; s/^\(sm_\(9\|1.\)0\)$/\1a/; s/^sm_120$/sm_120a/')" --json
stage doctor 300 "$lockstep" doctor --device cuda --json
stage kernels 300 "$lockstep" verify kernels -m "$nano" --device cuda --json
for recipe in strict fast; do
    for tp in 1 2 4 8; do
        stage "nano-$recipe-tp$tp" 240 "$lockstep" verify -m "$nano" --device cuda:0 --tp "$tp" --recipe $recipe --json
    done
    stage "nano52-$recipe-tp4" 240 "$lockstep" verify -m "$nano52" --device cuda:0 --tp 4 --recipe $recipe --json
    stage "turns-$recipe" 240 "$lockstep" verify logits -m "$nano" --device cuda:0 --tp 1 --recipe $recipe --asks goldens/glm5-nano/recall.json --all --json
done
for tp in 2 8; do
    named SHARD_ORDER $tp blk.2.attn_qkv_a
    named KV_B_LAYOUT $tp blk.1.attn_k_b
    named NAME_MAP $tp blk.1.attn_q_a_norm
    named DTYPE_REINTERPRET $tp blk.2.ffn_down_exps
    named DSA_INACTIVE $tp layers.2.attn.latent
    named SHARD_PLACEMENT $tp blk.1.attn_output
    named REDUCE_MISSED $tp layers.1.attn.out
done
if command -v compute-sanitizer > /dev/null; then
    stage memcheck 300 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
        "$lockstep" verify kernels activations -m "$nano" --device cuda:0 --tp 2 --json
fi
if [[ slice =~ $stages || $stages == . || $stages =~ slice ]]; then
    stage slice-synth-verify 300 "$lockstep" synth --layers 2 --index-top-k 8 --out "$slices/verify.gguf" --json
    for tp in 1 8; do
        stage "slice-verify-tp$tp" 600 "$lockstep" verify -m "$slices/verify.gguf" --device cuda:0 --tp $tp \
            --prompt "In the beginning" --rows 4 --json
    done
    rm -f "$slices/verify.gguf"
    stage slice-synth-bench 600 "$lockstep" synth --out "$slices/bench.gguf" --json
    stage slice-bench 300 "$lockstep" bench -m "$slices/bench.gguf" --device cuda:0 --batch 1,2,4,8,16,32 --json
    rm -f "$slices/bench.gguf"
fi
stage nano-bench 120 "$lockstep" bench -m "$nano" --device cuda:0 --json
echo "worst exit $worst" | tee -a "$table"
exit "$worst"
