# --workspace everywhere: another choice of crates could choose other features
# and build llama.cpp (minutes) a second time.
CARGO ?= cargo

.PHONY: demo test lint build setup

# A model larger than the RAM it is given answers, exactly.
demo: setup
	scripts/demo.sh

# Everything that CI runs.
test: setup lint
	$(CARGO) test --release --workspace

lint: setup
	$(CARGO) fmt --all --check
	$(CARGO) clippy --release --workspace --all-targets -- -D warnings
	for script in scripts/*.sh; do bash -n $$script || exit; done

build: setup
	$(CARGO) build --release --workspace

setup:
	scripts/setup.sh
