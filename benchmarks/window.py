"""A sliding window of 256 places beside full attention: time and memory as the text grows, there and back.

    python benchmarks/window.py [--lengths 1024 4096 16384 32768]

8 heads of 64, batch 1, causal; both go through our core's attention kernel, full attention thus through PyTorch's fused
one. Each point is a fresh process; memory is the most it held above its inputs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from side_by_side import HERE, Watch, environment, verdict, write

USUAL = [1024, 2048, 4096, 8192, 16384, 32768]


def point(kind: str, n: int, way: str, threads: int) -> dict[str, float]:
    command = [sys.executable, str(HERE / "contenders" / "window_work.py"), kind, str(n), way]
    said = subprocess.run(command, env=environment(threads), capture_output=True, text=True, check=False)
    if said.returncode:
        sys.exit(f"{kind} {n} {way}: {said.stderr.strip().splitlines()[-1]}")
    return json.loads(said.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=USUAL)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    watch, found = Watch([]), []
    lines = ["### A window of 256 places beside full attention\n"]
    lines += ["| places | way | full ms (MB) | window ms (MB) | window × as fast |", "|---|---|---|---|---|"]
    for n in args.lengths:
        for way in ("forward", "both"):
            full, window = (point(kind, n, way, args.threads) for kind in ("full", "window"))
            found.append({"places": n, "way": way, "full": full, "window": window})
            cells = [f"{1000 * p['seconds']:.1f} ({p['peak MB']:.0f})" for p in (full, window)]
            way_said = "forward" if way == "forward" else "forward and backward"
            lines.append(f"| {n:,} | {way_said} | {' | '.join(cells)} | {full['seconds'] / window['seconds']:.1f} |")
            print(lines[-1], file=sys.stderr, flush=True)
    others = watch.other_load()
    lines.append(f"\n{args.threads} threads; machine {verdict(others)}.")
    write({"points": found, "others": others}, "\n".join(lines), "window")


if __name__ == "__main__":
    main()
