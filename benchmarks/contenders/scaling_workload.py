"""One point of scaling.py in a fresh process: seconds and peak memory of a training step, and their formulas."""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
from memory_workload import peak_mb

from headwater.bench import TokenBatch, trainer_step
from headwater.families.builders import transformer
from headwater.inspection.costs import count


def main() -> None:
    sizes = {name: int(value) for name, value in (word.split("=") for word in sys.argv[1:])}
    rows, length, vocab, d_model = (sizes[name] for name in ("rows", "length", "vocab", "d_model"))
    spec = transformer(vocab, d_model=d_model, heads=d_model // 32, layers=sizes["layers"], dropout=0.0)
    batch = TokenBatch(*torch.randint(4, vocab, (3, rows, length), generator=torch.Generator().manual_seed(0)))
    costs = count(spec, rows, length)
    trainer_step(transformer(8, d_model=32, heads=1, layers=1))(
        TokenBatch(*torch.full((3, 1, 4), 5))
    )  # one-time allocations
    before = peak_mb()
    step = trainer_step(spec)
    for _ in range(2):
        step(batch)
    times = []
    for _ in range(sizes["rounds"]):
        start = time.perf_counter()
        step(batch)
        times.append(time.perf_counter() - start)
    predicted = sum(costs.bytes[name] for name in ("weights", "gradients", "optimizer", "activations"))
    flop = costs.flops["training"] * rows * length
    result = {
        "seconds": statistics.median(times),
        "MB": peak_mb() - before,
        "flop": flop,
        "formula MB": predicted / 2**20,
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
