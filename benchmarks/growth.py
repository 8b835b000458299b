"""How cost grows: time and memory of a training step against layers, d_model, length and vocabulary, beside formulas.

    python benchmarks/growth.py [--points 4] [--rounds 5]       writes results/growth.json, growth.md and growth.png

Solid: measured, each point in a fresh process. Dashed: what `headwater show` works out before anything exists (matrix
operations; weights, gradients, moments and activations), scaled in time by one constant: the median speed of all
points. If cost grows as it should, the lines run side by side.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

from side_by_side import HERE, Watch, environment, verdict, write

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
    command = [sys.executable, str(HERE / "contenders" / "growth_work.py"), *words]
    said = subprocess.run(command, env=environment(threads), capture_output=True, text=True, check=False)
    if said.returncode:
        sys.exit(f"{words}: {said.stderr.strip().splitlines()[-1]}")
    return json.loads(said.stdout.strip().splitlines()[-1])


def swept(points: int, rounds: int, threads: int) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {}
    for name, values in SWEEPS.items():
        found[name] = []
        for value in values[:points]:
            found[name].append({"at": value, **point({**BASE, name: value}, rounds, threads)})
            print(name, found[name][-1], file=sys.stderr, flush=True)
    return found


def speed(found: dict[str, list[dict[str, float]]]) -> float:
    """FLOP a second at the median of all points."""
    return statistics.median(p["flop"] / p["seconds"] for points in found.values() for p in points)


def drawn(found: dict[str, list[dict[str, float]]], path: Any) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rate = speed(found)
    figure, axes = plt.subplots(2, len(found), figsize=(4 * len(found), 6.5), constrained_layout=True)
    for column, (name, points) in enumerate(found.items()):
        at = [p["at"] for p in points]
        lines = (
            ("ms a step", [1000 * p["seconds"] for p in points], [1000 * p["flop"] / rate for p in points]),
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


def table(found: dict[str, list[dict[str, float]]], threads: int, others: float) -> str:
    rate = speed(found)
    lines = ["| | | ms a step | by its formula | peak MB | by its formula |", "|---" * 6 + "|"]
    for name, points in found.items():
        for p in points:
            lines.append(f"| {name} | {p['at']:,} | {1000 * p['seconds']:.1f} | {1000 * p['flop'] / rate:.1f} "
                         f"| {p['MB']:.0f} | {p['formula MB']:.0f} |")  # fmt: skip
    lines.append(f"\nTime's formula is scaled by one speed: {rate / 1e9:.0f} GFLOP/s, the median of all points.")
    return "\n".join([*lines, f"{threads} threads; machine {verdict(others)}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=5, help="of each line, the smallest first")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    watch = Watch([])
    found = swept(args.points, args.rounds, args.threads)
    others = watch.other_load()
    write({"points": found, "others": others}, table(found, args.threads, others), "growth")
    drawn(found, HERE / "results" / "growth.png")


if __name__ == "__main__":
    main()
