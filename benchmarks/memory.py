"""Peak memory of training the 2017 base model (work b): ours in four ways, and transformers' Marian.

    python benchmarks/memory.py [--work b] [--rounds 3]

Each is measured in a fresh process: the most memory it ever held, less what it held after its imports.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from side_by_side import HERE, environment, peers_python, spread, write

THEIRS = "transformers Marian"
RUNS = {
    "headwater": (Path(sys.executable), "memory_headwater.py", ()),
    "headwater, recomputing": (Path(sys.executable), "memory_headwater.py", ("--gradient-checkpointing",)),
    "headwater, adamw8": (Path(sys.executable), "memory_headwater.py", ("--optimizer", "adamw8")),
    "headwater, adamw8, recomputing": (
        Path(sys.executable),
        "memory_headwater.py",
        ("--optimizer", "adamw8", "--gradient-checkpointing"),
    ),
    THEIRS: (peers_python(), "memory_transformers.py", ("--kind", "marian")),
}


def measured(name: str, work: str, places: str, threads: int) -> dict[str, float]:
    python, script, words = RUNS[name]
    command = [str(python), str(HERE / "contenders" / script), work, "--places", places, *words]
    said = subprocess.run(command, env=environment(threads), capture_output=True, text=True, check=False)
    if said.returncode:
        sys.exit(f"{name}: {said.stderr.strip().splitlines()[-1]}")
    return json.loads(said.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", default="b")
    parser.add_argument("--places", default="residual")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    rounds = [{name: measured(name, args.work, args.places, args.threads) for name in RUNS} for _ in range(args.rounds)]
    figures = {name: {what: spread([r[name][what] for r in rounds]) for what in rounds[0][name]} for name in RUNS}
    whole = figures[THEIRS]["peak MB above imports"]["median"]
    lines = [f"### Peak memory, work ({args.work}), dropout at: {args.places}\n"]
    lines += ["| | peak MB above imports | MB when built | of transformers' |", "|---|---|---|---|"]
    for name, found in figures.items():
        peak, built = found["peak MB above imports"], found["MB when built"]["median"]
        lines.append(f"| {name} | {peak['median']:,.0f} [{peak['low']:,.0f}..{peak['high']:,.0f}] | {built:,.0f} "
                     f"| {peak['median'] / whole:.0%} |")  # fmt: skip
    write(figures, "\n".join(lines), "memory")


if __name__ == "__main__":
    main()
