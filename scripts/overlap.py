#!/usr/bin/env python3
"""How well reading can overlap with arithmetic at best, by a small model.

Layers follow each other: attention, then the experts. A layer's router says what
it needs when attention is done; experts in RAM are computed while missing ones are
read, one after the other. Of the missing experts of the layer LOOKAHEAD layers on, a
share `recall` is known at that moment and queued behind all that is read already;
`waste` is read besides that nobody needs. Misses are drawn independently.

Prints the efficiency, max(arithmetic, disk) / time, where both take equally long,
which is the hardest case. Times in milliseconds are those of qwen3-30b-a3b at a
quarter of its size (README): only their proportions matter.
"""

import random

LAYERS, CHOSEN = 20_000, 8
ATTENTION, EXPERTS, BOOKS = 1.1, 1.4, 0.27  # of a layer; books are kept once
READ, MISS = 1.1, 0.29  # one expert; chance that a chosen one is missing


def efficiency(lookahead, recall, waste):
    rng = random.Random(1)
    draw = lambda n, p: sum(rng.random() < p for _ in range(n))
    misses = [draw(CHOSEN, MISS) for _ in range(LAYERS + lookahead + 1)]
    known = [draw(m, recall) if lookahead else 0 for m in misses]
    landed = [0.0] * len(misses)  # when what was known of a layer has landed
    now = disk_free = 0.0
    for layer in range(LAYERS):
        missing, unknown = misses[layer], misses[layer] - known[layer]
        last = landed[layer]
        if unknown:
            last = disk_free = max(disk_free, now, last) + unknown * READ
        if lookahead:
            disk_free = max(disk_free, now) + known[layer + lookahead] * READ * (1 + waste)
            landed[layer + lookahead] = disk_free
        expert = EXPERTS / CHOSEN
        # A third of an expert's work is left when its last byte has landed.
        now = max(now + BOOKS + EXPERTS, (last + expert / 3) if missing else 0) + ATTENTION
    arithmetic = LAYERS * (ATTENTION + EXPERTS)
    return max(arithmetic, sum(misses[:LAYERS]) * READ) / now


print("lookahead  recall  waste  efficiency")
for case in [(0, 0, 0), (1, 0.82, 0.25), (1, 1, 0), (2, 0.7, 0.4), (2, 1, 0), (4, 1, 0)]:
    print("{:9}  {:6.2f}  {:5.2f}  {:10.2f}".format(*case, efficiency(*case)))
