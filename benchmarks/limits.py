"""Hardware limits: matrix products of several shapes in GFLOP/s, memory bandwidth in GB/s; and the fraction reached.

    python benchmarks/limits.py [--threads 2] [--rounds 5]

The last lines compare training steps of Headwater (workloads a and c without dropout) with the measured matmul peak.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from side_by_side import Contender, LoadMonitor, compare, spread, verdict, write

sys.path.insert(0, str(Path(__file__).parent / "contenders"))
from limits_matmul import rate
from train_workload import WORKLOADS

SHAPES = {
    "1024³": (1024, 1024, 1024), "2048³": (2048, 2048, 2048), "(a) projection 2048×256×256": (2048, 256, 256),
    "(a) feed-forward 2048×256×1024": (2048, 256, 1024), "(a) vocabulary 512×256×8000": (512, 256, 8000),
    "(b) feed-forward 1024×512×2048": (1024, 512, 2048), "(b) vocabulary 512×512×32000": (512, 512, 32000),
    "(c) projection 3072×384×384": (3072, 384, 384), "(c) feed-forward 3072×384×1536": (3072, 384, 1536)}  # fmt: skip


def bandwidth(megabytes: int = 256, seconds: float = 0.3) -> dict[str, float]:
    """GB/s of read (a sum), copy and triad (a + 2b), over arrays much larger than the caches."""
    a, b, out = (torch.rand(megabytes * 2**18) for _ in range(3))
    operations = {
        "read": (lambda: a.sum(), 1),
        "copy": (lambda: out.copy_(a), 2),
        "triad": (lambda: torch.add(a, b, alpha=2.0, out=out), 3),
    }
    results = {}
    for name, (operation, passes) in operations.items():
        operation()
        start, repeats = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - start) < seconds:
            operation()
            repeats += 1
        results[f"{name} GB/s"] = passes * a.nbytes * repeats / elapsed / 1e9
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workload", nargs="*", default=["a", "c"], choices=WORKLOADS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    monitor, rounds = LoadMonitor([]), []
    for _ in range(args.rounds):
        rounds.append({name: rate(*shape) for name, shape in SHAPES.items()} | bandwidth())
    results = {name: spread([values[name] for values in rounds]) for name in rounds[0]}
    other_load = monitor.other_load()
    lines = ["| | GFLOP/s or GB/s |", "|---|---|"]
    lines += [f"| {name} | {f['median']:.1f} [{f['low']:.1f}..{f['high']:.1f}] |" for name, f in results.items()]
    lines.append(f"\n{args.rounds} rounds, {args.threads} threads; machine {verdict(other_load)}.\n")
    reached = {}
    for workload in args.workload:
        contenders = [
            Contender("headwater", "train_headwater.py", (workload,)),
            Contender("peak", "limits_matmul.py", ("1024",)),
        ]
        report = compare(contenders, args.rounds, args.threads)
        ours = WORKLOADS[workload].flops_per_step / 1e6 / report["figures"]["headwater"]["ms per step"]["median"]
        peak = report["figures"]["peak"]["GFLOP/s"]["median"]
        reached[workload] = {
            "GFLOP/s": ours,
            "peak": peak,
            "fraction": ours / peak,
            "load_verdict": report["load_verdict"],
        }
        speed = f"{ours:.0f} of {peak:.0f} GFLOP/s, {ours / peak:.0%}"
        lines.append(f"A training step of ({workload}): {speed}; machine {report['load_verdict']}.")
    write({"limits": results, "other_load": other_load, "reached": reached}, "\n".join(lines), "limits")


if __name__ == "__main__":
    main()
