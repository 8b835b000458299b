"""One point of growth.py in a fresh process: seconds and peak memory of a training step, and what the formulas say."""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
from memory_work import peak_mb

from headwater.bench import TokenBatch, trainer_step
from headwater.core import transformer
from headwater.inspection.costs import count


def main() -> None:
    asked = {name: int(value) for name, value in (word.split("=") for word in sys.argv[1:])}
    rows, length, vocab, d_model = (asked[name] for name in ("rows", "length", "vocab", "d_model"))
    spec = transformer(vocab, d_model=d_model, heads=d_model // 32, layers=asked["layers"], dropout=0.0)
    given = TokenBatch(*torch.randint(4, vocab, (3, rows, length), generator=torch.Generator().manual_seed(0)))
    costs = count(spec, rows, length)
    trainer_step(transformer(8, d_model=32, heads=1, layers=1))(
        TokenBatch(*torch.full((3, 1, 4), 5))
    )  # what is made once
    before = peak_mb()
    step = trainer_step(spec)
    for _ in range(2):
        step(given)
    times = []
    for _ in range(asked["rounds"]):
        began = time.perf_counter()
        step(given)
        times.append(time.perf_counter() - began)
    kept = sum(costs.bytes[name] for name in ("weights", "gradients", "optimizer", "activations"))
    flop = costs.flops["training"] * rows * length
    found = {"seconds": statistics.median(times), "MB": peak_mb() - before, "flop": flop, "formula MB": kept / 2**20}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
