#!/usr/bin/env bash
# Compares the NEON kernels' bits with those of a ggml compiled for 64-bit ARM,
# on any machine: cross-compiles both and runs the tests under qemu's user mode
# emulation. That says nothing about speed. Arguments go to cargo test.
set -euo pipefail
cd "$(dirname "$0")/.."
target=aarch64-unknown-linux-gnu
export CARGO_TARGET_DIR=$PWD/target/arm64 CARGO_BUILD_TARGET=$target
mkdir -p "$CARGO_TARGET_DIR"

packages=()
command -v aarch64-linux-gnu-g++ >/dev/null || packages+=(g++-aarch64-linux-gnu)
command -v qemu-aarch64 >/dev/null || packages+=(qemu-user)
if [ ${#packages[@]} -gt 0 ]; then
    as_root=()
    [ "$(id -u)" -eq 0 ] || as_root=(sudo)
    echo "Installing ${packages[*]}" >&2
    "${as_root[@]}" apt-get update -qq
    "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${packages[@]}" >&2
fi

# Where rustup has not fetched the target (rustup target add $target), Debian's
# Rust is unpacked beside the build: nothing of it is installed.
if [ ! -d "$(rustc --print target-libdir --target $target)" ]; then
    rust=$CARGO_TARGET_DIR/rust
    if [ ! -e "$rust/done" ]; then
        mkdir -p "$rust/lists/partial"
        here=(-o APT::Architectures=amd64,arm64 -o APT::Sandbox::User=root
            -o Dir::State::Lists="$rust/lists")
        depends() { apt-cache "${here[@]}" depends "$1" | sed -n "s/.*Depends: \($2.*\)/\1/p"; }
        apt-get "${here[@]}" -qq update
        std=$(depends libstd-rust-web-dev libstd-rust-web)
        (cd "$rust" && apt-get "${here[@]}" -qq download rustc-web "$std" \
            "$(depends "$std" libllvm)" libstd-rust-web-dev libstd-rust-web-dev:arm64)
        for package in "$rust"/*.deb; do dpkg -x "$package" "$rust"; done
        rm -r "$rust"/*.deb "$rust/lists"
        touch "$rust/done"
    fi
    export RUSTC=$rust/usr/bin/rustc LD_LIBRARY_PATH=$rust/usr/lib/x86_64-linux-gnu
fi

export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu"
export BINDGEN_EXTRA_CLANG_ARGS_aarch64_unknown_linux_gnu=-I/usr/aarch64-linux-gnu/include
# ggml's kernels are C; the C++ around them takes far longer to compile than to run.
export CMAKE_CXX_FLAGS_RELEASE="-O0 -DNDEBUG"
export OMP_WAIT_POLICY=passive
if [ $# -eq 0 ]; then set -- --test bits; fi
exec cargo test --release --workspace "$@"
