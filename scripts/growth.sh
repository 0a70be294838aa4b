#!/usr/bin/env bash
# Cost as it grows: milliseconds a token against the budget, the number of
# experts and the context, as docs/growth-*.svg. Synthetic models of up to
# 1 GB are made for it, one after the other.
# Usage: scripts/growth.sh [TOKENS [MODEL.gguf]]
# The budgets are those of MODEL.gguf if one is given.
set -euo pipefail
cd "$(dirname "$0")/.."
tokens=${1:-256} model=${2:-}
bin=${CARGO_TARGET_DIR:-target}/release
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

synth() { "$bin/pinscope-models" synth --shape small-qwen3moe --experts "$1" "$work/m.gguf" >&2; }

# An amount of memory for --ram. Another process may need a little more.
ram() { echo "$((($1 >> 20) + 8))M"; }

# A figure of the plan of a model with a context.
planned() {
    "$bin/pinscope" plan -m "$1" -c "$2" -ub 512 --ram 1T --json |
        sed -n "s/^ *\"$3\": \([0-9]*\),*$/\1/p"
}

# Results of $1 with a prompt of $2, half of the experts in RAM and all.
measure() {
    local full experts
    full=$(planned "$1" "$(($2 + tokens))" full_ram_bytes)
    experts=$(planned "$1" "$(($2 + tokens))" expert_bytes_total)
    "$bin/pinscope" bench -m "$1" --ram "$(ram $((full - experts / 2))),$(ram "$full")" --no-step-aside \
        --against resident --prompt "$2" --tokens "$tokens" --json
}
halves="pinscope: half of the experts in RAM,pinscope: all experts in RAM"

echo "budgets" >&2
if [ -z "$model" ]; then
    synth 512
    model=$work/m.gguf
fi
full=$(planned "$model" "$((64 + tokens))" full_ram_bytes)
least=$(planned "$model" "$((64 + tokens))" smallest_ram_bytes)
budgets=$(ram "$least")
for tenth in $(seq 1 9); do
    budgets+=,$(ram $((least + (full - least) * tenth / 9)))
done
"$bin/pinscope" bench -m "$model" --ram "$budgets" --no-step-aside --against resident \
    --prompt 64 --tokens "$tokens" --plot docs/growth-budget.svg >&2

points=()
for experts in 32 64 128 256 512; do
    echo "$experts experts" >&2
    synth "$experts"
    measure "$work/m.gguf" 64 >"$work/e$experts.json"
    points+=("$experts=$work/e$experts.json")
done
"$bin/pinscope" plot --x "experts in a layer (each token uses 8)" --budgets "$halves" \
    --title "One token, by the number of experts" -o docs/growth-experts.svg "${points[@]}"

synth 128
points=()
for prompt in 128 1024 4096 8192; do
    echo "context of $prompt" >&2
    measure "$work/m.gguf" "$prompt" >"$work/c$prompt.json"
    points+=("$prompt=$work/c$prompt.json")
done
"$bin/pinscope" plot --x "context, tokens" --budgets "$halves" \
    --title "One token, by the length of the context" -o docs/growth-context.svg "${points[@]}"
ls docs/growth-*.svg
