# --workspace everywhere: another choice of crates could choose other features
# and build llama.cpp (minutes) a second time.
CARGO ?= cargo

.PHONY: demo test test-arm64 test-avx512 lint build setup

# A model larger than the RAM it is given answers, exactly.
demo: setup
	scripts/demo.sh

# What CI runs, besides test-arm64.
test: setup lint
	$(CARGO) test --release --workspace

# Kernels for processors that are not here, on emulated ones (Debian, Ubuntu).
test-arm64: setup
	scripts/arm64.sh
test-avx512: setup
	scripts/avx512.sh

lint: setup
	$(CARGO) fmt --all --check
	$(CARGO) clippy --release --workspace --all-targets -- -D warnings
	for script in scripts/*.sh; do bash -n $$script || exit; done

build: setup
	$(CARGO) build --release --workspace

setup:
	scripts/setup.sh
