#!/usr/bin/env bash
# Makes sure that everything the build and the demo need is installed: with apt
# where there is apt, otherwise by naming what is missing. Does nothing, and
# asks nothing of the network, when all is there.
set -euo pipefail

# Debian packages of what is missing, and the same in words for other systems.
packages=()
words=()
need() { # COMMAND... -- PACKAGE WORDS
    local check=()
    while [ "$1" != -- ]; do check+=("$1"); shift; done
    if ! "${check[@]}" >/dev/null 2>&1; then
        packages+=("$2")
        words+=("$3")
    fi
}

have_libclang() {
    [ -n "${LIBCLANG_PATH:-}" ] ||
        [ -n "$(find /usr/lib* /usr/local/lib* -maxdepth 4 -name 'libclang[-.]*so*' \
            ! -name 'libclang-cpp*' 2>/dev/null)" ]
}

need command -v cmake -- cmake "cmake"
need command -v make -- make "make"
need command -v c++ -- g++ "a C++ compiler with OpenMP (g++)"
need command -v clang -- clang "clang"
need have_libclang -- libclang-dev "libclang (the library)"
need command -v pkg-config -- pkg-config "pkg-config"
need python3 -m pip --version -- python3-pip "python3 with pip (for make demo)"

if [ ${#packages[@]} -gt 0 ]; then
    if ! command -v apt-get >/dev/null; then
        printf 'Missing, and there is no apt here to install it with:\n' >&2
        printf '  - %s\n' "${words[@]}" >&2
        exit 1
    fi
    as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        if ! command -v sudo >/dev/null; then
            echo "Missing: ${packages[*]}. As root: apt-get install ${packages[*]}" >&2
            exit 1
        fi
        as_root=(sudo)
    fi
    echo "Installing ${packages[*]}" >&2
    export DEBIAN_FRONTEND=noninteractive
    "${as_root[@]}" apt-get update -qq
    "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${packages[@]}" >&2
fi

if ! command -v cargo >/dev/null; then
    echo "Missing: a Rust toolchain (cargo). See https://rustup.rs" >&2
    exit 1
fi
