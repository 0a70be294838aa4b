#!/usr/bin/env python3
"""Draws some layers of one token from a recording of `pinscope run --timeline`.

    pinscope run -m MODEL --ram 4500M -p "..." -n 64 --timeline t.json
    scripts/timeline.py t.json docs/timeline.svg --token 40 --layers 20-24
"""
import argparse
import json

COLOURS = {
    "rest": "#8da0cb", "experts": "#66c2a5", "wait": "#e5484d", "plan": "#b3b3b3",
    "predict": "#ffd92f", "evict": "#a6761d", "submit": "#7a4fbf",
    "demand": "#fc8d62", "prefetch": "#f9c9b6",
}
LEFT, WIDTH, LANE = 90, 1000, 26


def lanes(reads):
    """Gives each read the first lane that is free."""
    ends, placed = [], []
    for read in sorted(reads):
        at = next((i for i, end in enumerate(ends) if end <= read[0]), len(ends))
        ends[at:at + 1] = [read[1]]
        placed.append((at, *read))
    return placed, max(len(ends), 1)


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("recording")
    args.add_argument("svg")
    args.add_argument("--token", type=int, help="which token [default: the last but one]")
    args.add_argument("--layers", default="20-24", help="first and last layer [default: %(default)s]")
    args = args.parse_args()
    with open(args.recording) as file:
        text = file.read().rstrip().rstrip(",")
    events = json.loads(text if text.endswith("]") else text + "]")
    spans = [e for e in events if e["ph"] == "X"]
    token = args.token if args.token is not None else max(e["args"]["token"] for e in spans) - 1
    first, last = map(int, args.layers.split("-"))
    shown = [e for e in spans if e["args"]["token"] == token and first <= e["args"]["layer"] <= last]
    if not shown:
        raise SystemExit(f"{args.recording} has no layers {first} to {last} of token {token}")
    start, end = min(e["ts"] for e in shown), max(e["ts"] + e["dur"] for e in shown)
    begun, reads = {}, []
    for e in events:
        if e["ph"] == "b":
            begun[e["id"]] = e
        elif e["ph"] == "e" and e["id"] in begun:
            b = begun.pop(e["id"])
            if e["ts"] > start and b["ts"] < end:
                reads.append((max(b["ts"], start), min(e["ts"], end), b["args"]["class"]))
    reads, count = lanes(reads)
    x = lambda t: LEFT + (t - start) / (end - start) * WIDTH
    disk_y = 60 + LANE
    height = disk_y + count * 9 + 60
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{height}" '
           f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>',
           f'<text x="{LEFT}" y="18" font-size="14">Token {token}, layers {first} to {last}: '
           f'{(end - start) / 1000:.1f} ms</text>',
           f'<text x="8" y="{40 + LANE / 2}">compute</text><text x="8" y="{disk_y + 10}">reads</text>']
    box = lambda a, b, y, h, c: out.append(
        f'<rect x="{x(a):.2f}" y="{y}" width="{max(x(b) - x(a), 0.2):.2f}" height="{h}" fill="{COLOURS[c]}"/>')
    for e in shown:
        box(e["ts"], e["ts"] + e["dur"], 32, LANE, e["name"])
    for lane, a, b, kind in reads:
        box(a, b, disk_y + lane * 9, 7, kind)
    for layer in range(first, last + 1):
        at = min((e["ts"] for e in shown if e["args"]["layer"] == layer), default=None)
        if at is not None:
            out.append(f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="28" y2="{height - 40}" stroke="#444" '
                       f'stroke-dasharray="2 3"/><text x="{x(at) + 3:.1f}" y="{height - 42}">layer {layer}</text>')
    for i, (name, colour) in enumerate(COLOURS.items()):
        out.append(f'<rect x="{LEFT + i * 105}" y="{height - 24}" width="12" height="12" fill="{colour}"/>'
                   f'<text x="{LEFT + 16 + i * 105}" y="{height - 14}">{name}</text>')
    with open(args.svg, "w") as file:
        file.write("\n".join(out) + "\n</svg>\n")


if __name__ == "__main__":
    main()
