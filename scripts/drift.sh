#!/usr/bin/env bash
# Profiles prose, then runs prose that was held out and program code after it:
# hit rates before the change, at it, and after the pins have moved.
# Usage: scripts/drift.sh MODEL.gguf RAM OUT.svg
set -euo pipefail
cd "$(dirname "$0")/.."
model=$1 ram=$2 out=$3
pinscope=${CARGO_TARGET_DIR:-target}/release/pinscope
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$pinscope" profile -m "$model" --ram "$ram" --text crates/pinscope-models/text/mixed.txt \
    --tokens 3072 -o "$work/prose.json" >&2
# About 600 tokens of other prose, then code.
{ head -c 2900 crates/pinscope-cli/src/sample.txt; cat crates/pinscope/src/layout.rs; } \
    >"$work/both.txt"
"$pinscope" bench -m "$model" --ram "$ram" --profile "$work/prose.json" --pin-share 0.5 \
    --text "$work/both.txt" --prompt 64 --tokens 1536 --repeat 1 --hit-plot "$out"
