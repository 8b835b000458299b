"""Peak memory of training the base model of 2017 (workload b): four configurations, and transformers' Marian.

    python benchmarks/memory.py [--workload b] [--rounds 3]

Each is measured in a fresh process: its peak memory minus its memory after the imports.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from side_by_side import HERE, environment, peers_python, spread, write

BASELINE = "transformers Marian"
RUNS = {
    "headwater": (Path(sys.executable), "memory_headwater.py", ()),
    "headwater, gradient checkpointing": (Path(sys.executable), "memory_headwater.py", ("--gradient-checkpointing",)),
    "headwater, adamw8": (Path(sys.executable), "memory_headwater.py", ("--optimizer", "adamw8")),
    "headwater, adamw8, gradient checkpointing": (
        Path(sys.executable),
        "memory_headwater.py",
        ("--optimizer", "adamw8", "--gradient-checkpointing"),
    ),
    BASELINE: (peers_python(), "memory_transformers.py", ("--kind", "marian")),
}


def measure(name: str, work: str, sites: str, threads: int) -> dict[str, float]:
    python, script, flags = RUNS[name]
    command = [str(python), str(HERE / "contenders" / script), work, "--dropout-sites", sites, *flags]
    process = subprocess.run(command, env=environment(threads), capture_output=True, text=True, check=False)
    if process.returncode:
        sys.exit(f"{name}: {process.stderr.strip().splitlines()[-1]}")
    return json.loads(process.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="b")
    parser.add_argument("--dropout-sites", default="residual")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    rounds = [
        {name: measure(name, args.workload, args.dropout_sites, args.threads) for name in RUNS}
        for _ in range(args.rounds)
    ]
    figures = {name: {metric: spread([r[name][metric] for r in rounds]) for metric in rounds[0][name]} for name in RUNS}
    baseline = figures[BASELINE]["peak MB above imports"]["median"]
    lines = [f"### Peak memory, workload ({args.workload}), dropout at: {args.dropout_sites}\n"]
    lines += ["| | peak MB above imports | MB after build | of transformers' |", "|---|---|---|---|"]
    for name, stats in figures.items():
        peak, built = stats["peak MB above imports"], stats["MB after build"]["median"]
        lines.append(f"| {name} | {peak['median']:,.0f} [{peak['low']:,.0f}..{peak['high']:,.0f}] | {built:,.0f} "
                     f"| {peak['median'] / baseline:.0%} |")  # fmt: skip
    write(figures, "\n".join(lines), "memory")


if __name__ == "__main__":
    main()
