"""Scaling: time and memory of a training step by layers, d_model, length and vocabulary, compared with formulas.

    python benchmarks/scaling.py [--points 4] [--rounds 5]       writes results/scaling.json, scaling.md and scaling.png

Solid: measured, each point in a fresh process. Dashed: the formulas of `headwater show` (FLOPs; weights, gradients,
optimizer state and activations), with one constant for the time: the median speed of all points.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

from side_by_side import HERE, LoadMonitor, environment, verdict, write

BASE = {"layers": 3, "d_model": 256, "length": 64, "vocab": 4000}
SWEEPS = {
    "layers": [1, 2, 4, 8, 12],
    "d_model": [64, 128, 256, 384, 512],
    "length": [32, 64, 128, 256, 512],
    "vocab": [1000, 4000, 8000, 16000, 32000],
}
ROWS = 8


def point(shape: dict[str, int], rounds: int, threads: int) -> dict[str, float]:
    words = [f"{name}={value}" for name, value in {**shape, "rows": ROWS, "rounds": rounds}.items()]
    command = [sys.executable, str(HERE / "contenders" / "scaling_workload.py"), *words]
    process = subprocess.run(command, env=environment(threads), capture_output=True, text=True, check=False)
    if process.returncode:
        sys.exit(f"{words}: {process.stderr.strip().splitlines()[-1]}")
    return json.loads(process.stdout.strip().splitlines()[-1])


def run_sweeps(points: int, rounds: int, threads: int) -> dict[str, list[dict[str, float]]]:
    points_by_sweep: dict[str, list[dict[str, float]]] = {}
    for name, values in SWEEPS.items():
        points_by_sweep[name] = []
        for value in values[:points]:
            points_by_sweep[name].append({"at": value, **point({**BASE, name: value}, rounds, threads)})
            print(name, points_by_sweep[name][-1], file=sys.stderr, flush=True)
    return points_by_sweep


def speed(points_by_sweep: dict[str, list[dict[str, float]]]) -> float:
    """The median FLOP/s of all points."""
    return statistics.median(p["flop"] / p["seconds"] for points in points_by_sweep.values() for p in points)


def plot(points_by_sweep: dict[str, list[dict[str, float]]], path: Any) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rate = speed(points_by_sweep)
    figure, axes = plt.subplots(
        2, len(points_by_sweep), figsize=(4 * len(points_by_sweep), 6.5), constrained_layout=True
    )
    for column, (name, points) in enumerate(points_by_sweep.items()):
        at = [p["at"] for p in points]
        lines = (
            ("ms per step", [1000 * p["seconds"] for p in points], [1000 * p["flop"] / rate for p in points]),
            ("peak MB", [p["MB"] for p in points], [p["formula MB"] for p in points]),
        )
        for row, (label, measured, formula) in enumerate(lines):
            ax = axes[row][column]
            ax.plot(at, measured, "o-", color="#1f5fa8", label="measured")
            ax.plot(at, formula, "s--", color="#c4622d", label="formula of headwater show")
            ax.set(xlabel=name, xlim=(0, None), ylim=(0, None))
            ax.set_ylabel(label if column == 0 else "")
            ax.grid(alpha=0.3)
    axes[0][0].legend()
    figure.suptitle(
        "A training step: " + ", ".join(f"{k} {v:,}" for k, v in BASE.items()) + f", {ROWS} rows; one varies"
    )
    figure.savefig(path, dpi=110)


def table(points_by_sweep: dict[str, list[dict[str, float]]], threads: int, other_load: float) -> str:
    rate = speed(points_by_sweep)
    lines = ["| | | ms per step | by formula | peak MB | by formula |", "|---" * 6 + "|"]
    for name, points in points_by_sweep.items():
        for p in points:
            lines.append(f"| {name} | {p['at']:,} | {1000 * p['seconds']:.1f} | {1000 * p['flop'] / rate:.1f} "
                         f"| {p['MB']:.0f} | {p['formula MB']:.0f} |")  # fmt: skip
    lines.append(f"\nThe formula of the time uses one speed: {rate / 1e9:.0f} GFLOP/s, the median of all points.")
    return "\n".join([*lines, f"{threads} threads; machine {verdict(other_load)}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=5, help="points of each sweep, the smallest first")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    monitor = LoadMonitor([])
    points_by_sweep = run_sweeps(args.points, args.rounds, args.threads)
    other_load = monitor.other_load()
    write(
        {"points": points_by_sweep, "other_load": other_load},
        table(points_by_sweep, args.threads, other_load),
        "scaling",
    )
    plot(points_by_sweep, HERE / "results" / "scaling.png")


if __name__ == "__main__":
    main()
