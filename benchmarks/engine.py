"""How much faster eight answers come together than one after another, on one engine.

    python benchmarks/engine.py [--streams 8] [--tokens 64]

A decoder of the size of SmolLM2-135M with weights that have learnt nothing (speed does not depend on what they know).
Prints tokens per second for one stream and for many, alternating, medians of the runs, and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from headwater.core import decoder
from headwater.generation.choosers import Temperature, TopK
from headwater.generation.engine import Engine
from headwater.generation.requests import Request

SIZES = {"d_model": 576, "heads": 9, "kv_heads": 3, "layers": 30, "d_ff": 1536, "gated": True, "activation": "silu"}
SHAPE = {"placement": "pre", "norm": "rms", "position": "rotary", "bias": False, "dropout": 0.0}


def seconds(model: torch.nn.Module, streams: int, tokens: int, prompt: int) -> float:
    """From the moment all prompts are read until every stream has its tokens."""
    engine = Engine(model, rows=streams, prefill=streams * prompt)
    for seed in range(streams):
        ids = tuple((seed * 131 + i * 7) % 40_000 for i in range(prompt))
        engine.submit(Request(ids, choosers=(Temperature(0.8), TopK(50)), max_tokens=tokens + 1, seed=seed))
    engine.step()
    start = time.perf_counter()
    engine.run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, usual in (("streams", 8), ("tokens", 64), ("prompt", 64), ("runs", 5), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = decoder(49_152, **SIZES, **SHAPE).build(seed=0).eval()
    seconds(model, 1, 2, args.prompt)
    one, many = [], []
    for _ in range(args.runs):
        one.append(args.tokens / seconds(model, 1, args.tokens, args.prompt))
        many.append(args.streams * args.tokens / seconds(model, args.streams, args.tokens, args.prompt))
    alone, together = statistics.median(one), statistics.median(many)
    print(f"1 stream          {alone:8.1f} tokens/s")
    print(f"{args.streams} streams         {together:8.1f} tokens/s")
    print(f"ratio             {together / alone:8.2f}")


if __name__ == "__main__":
    main()
