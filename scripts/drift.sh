#!/usr/bin/env bash
# Profiles program code, then runs code that was held out and prose after it:
# hit rates before the change, at it, and after the pins have moved.
# Usage: scripts/drift.sh MODEL.gguf RAM OUT.svg
set -euo pipefail
cd "$(dirname "$0")/.."
model=$1 ram=$2 out=$3
pinscope=${CARGO_TARGET_DIR:-target}/release/pinscope
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$pinscope" profile -m "$model" --ram "$ram" --text crates/pinscope/src/reader \
    --tokens 2560 -o "$work/code.json" >&2
# About 500 tokens of other code, then prose.
{ head -c 1700 crates/pinscope/src/layout.rs; cat crates/pinscope-cli/src/sample.txt; } \
    >"$work/both.txt"
"$pinscope" bench -m "$model" --ram "$ram" --profile "$work/code.json" --pin-share 0.5 \
    --text "$work/both.txt" --prompt 32 --tokens 1184 --repeat 1 --hit-plot "$out" --json
