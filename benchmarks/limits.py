"""What this machine can do at most: matrix products of several shapes in GFLOP/s, memory in GB/s; then what we reach.

    python benchmarks/limits.py [--threads 2] [--rounds 5]

The last lines hold our training steps (work a and c without dropout) against the peak measured between them.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from side_by_side import Contender, Watch, compare, spread, verdict, write

sys.path.insert(0, str(Path(__file__).parent / "contenders"))
from limits_matmul import rate
from train_work import WORKS

SHAPES = {
    "1024³": (1024, 1024, 1024), "2048³": (2048, 2048, 2048), "(a) projection 2048×256×256": (2048, 256, 256),
    "(a) feed-forward 2048×256×1024": (2048, 256, 1024), "(a) vocabulary 512×256×8000": (512, 256, 8000),
    "(b) feed-forward 1024×512×2048": (1024, 512, 2048), "(b) vocabulary 512×512×32000": (512, 512, 32000),
    "(c) projection 3072×384×384": (3072, 384, 384), "(c) feed-forward 3072×384×1536": (3072, 384, 1536)}  # fmt: skip


def bandwidth(megabytes: int = 256, seconds: float = 0.3) -> dict[str, float]:
    """GB/s: read (a sum), copy, and triad (a + 2b), over arrays far larger than any cache."""
    a, b, out = (torch.rand(megabytes * 2**18) for _ in range(3))
    works = {
        "read": (lambda: a.sum(), 1),
        "copy": (lambda: out.copy_(a), 2),
        "triad": (lambda: torch.add(a, b, alpha=2.0, out=out), 3),
    }
    found = {}
    for name, (work, passes) in works.items():
        work()
        began, times = time.perf_counter(), 0
        while (took := time.perf_counter() - began) < seconds:
            work()
            times += 1
        found[f"{name} GB/s"] = passes * a.nbytes * times / took / 1e9
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", nargs="*", default=["a", "c"], choices=WORKS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    watch, turns = Watch([]), []
    for _ in range(args.rounds):
        turns.append({name: rate(*shape) for name, shape in SHAPES.items()} | bandwidth())
    found = {name: spread([turn[name] for turn in turns]) for name in turns[0]}
    others = watch.other_load()
    lines = ["| | GFLOP/s or GB/s |", "|---|---|"]
    lines += [f"| {name} | {f['median']:.1f} [{f['low']:.1f}..{f['high']:.1f}] |" for name, f in found.items()]
    lines.append(f"\n{args.rounds} rounds, {args.threads} threads; machine {verdict(others)}.\n")
    reached = {}
    for work in args.work:
        some = [Contender("headwater", "train_headwater.py", (work,)), Contender("peak", "limits_matmul.py", ("1024",))]
        report = compare(some, args.rounds, args.threads)
        own = WORKS[work].flops_per_step / 1e6 / report["figures"]["headwater"]["ms a step"]["median"]
        peak = report["figures"]["peak"]["GFLOP/s"]["median"]
        reached[work] = {"GFLOP/s": own, "peak": peak, "share": own / peak, "trust": report["trust"]}
        said = f"{own:.0f} of {peak:.0f} GFLOP/s, {own / peak:.0%}"
        lines.append(f"A training step of ({work}): {said}; machine {report['trust']}.")
    write({"limits": found, "others": others, "reached": reached}, "\n".join(lines), "limits")


if __name__ == "__main__":
    main()
