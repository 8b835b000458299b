"""A sliding window of 256 positions compared with full attention: time and memory by length, forward and backward.

    python benchmarks/sliding_window.py [--lengths 1024 4096 16384 32768]

8 heads of 64, batch 1, causal; both use the attention kernel of headwater.core, which is PyTorch's fused one for full
attention. Each point is a fresh process; memory is the peak above its inputs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from side_by_side import HERE, LoadMonitor, environment, verdict, write

LENGTHS = [1024, 2048, 4096, 8192, 16384, 32768]


def point(kind: str, n: int, mode: str, threads: int) -> dict[str, float]:
    command = [sys.executable, str(HERE / "contenders" / "sliding_window_workload.py"), kind, str(n), mode]
    process = subprocess.run(command, env=environment(threads), capture_output=True, text=True, check=False)
    if process.returncode:
        sys.exit(f"{kind} {n} {mode}: {process.stderr.strip().splitlines()[-1]}")
    return json.loads(process.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    monitor, points = LoadMonitor([]), []
    lines = ["### A sliding window of 256 positions compared with full attention\n"]
    lines += ["| positions | pass | full ms (MB) | window ms (MB) | window × as fast |", "|---|---|---|---|---|"]
    for n in args.lengths:
        for mode in ("forward", "both"):
            full, window = (point(kind, n, mode, args.threads) for kind in ("full", "window"))
            points.append({"positions": n, "pass": mode, "full": full, "window": window})
            cells = [f"{1000 * p['seconds']:.1f} ({p['peak MB']:.0f})" for p in (full, window)]
            pass_name = "forward" if mode == "forward" else "forward and backward"
            lines.append(f"| {n:,} | {pass_name} | {' | '.join(cells)} | {full['seconds'] / window['seconds']:.1f} |")
            print(lines[-1], file=sys.stderr, flush=True)
    other_load = monitor.other_load()
    lines.append(f"\n{args.threads} threads; machine {verdict(other_load)}.")
    write({"points": points, "other_load": other_load}, "\n".join(lines), "sliding_window")


if __name__ == "__main__":
    main()
