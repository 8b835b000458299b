"""Attentions for long sequences beside full attention and their public implementations: time and memory by length.

    python benchmarks/long.py [--lengths 1024 2048 … 65536] [--only linear window …] [--threads 2] [--add]

One layer's attention, 8 heads of 64, batch 1, float32, projections left out. Each point is a fresh process; memory is
the peak above q, k and v (and the gradient of the output). An output that differs from its dense re-statement gets no
ratio. A contender is left out from the length on at which it would take longer than --limit seconds, or would not fit
into memory.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from dataclasses import dataclass

from side_by_side import HERE, RESULTS, LoadMonitor, environment, peers_python, verdict, write

LENGTHS = [1024, 2048, 4096, 8192, 16384, 32768, 65536]
MAX_ERROR = 1e-3  # of the largest output, in float32
MAX_MB = 6000


@dataclass(frozen=True)
class Contender:
    """keys: the keys, or features, that a query reads. full: what it replaces; peer: its public implementation."""

    keys: str
    full: str = "full"
    peer: str = ""
    growth: int = 2  # of its time, when the length doubles
    is_peer: bool = False


CONTENDERS = {
    "full": Contender("all", growth=4),
    "full, causal": Contender("all before", "full, causal", growth=4),
    "window 256": Contender("256", "full, causal", "local-attention 256"),
    "window 512": Contender("512", "full, causal"),
    "longformer 256": Contender("257 + 1"),
    "longformer 512": Contender("513 + 1", peer="transformers longformer 512"),
    "bigbird": Contender("512", peer="transformers bigbird"),
    "linear, causal": Contender("64 sums", "full, causal", "performer-pytorch, causal"),
    "linear": Contender("64 sums", peer="performer-pytorch"),
    "performer, causal": Contender("256 sums", "full, causal", "performer-pytorch, causal"),
    "performer": Contender("256 sums", peer="performer-pytorch"),
    "linformer": Contender("256 mixtures"),
    "lsh, 2 rounds": Contender("256", "full, causal", "transformers lsh, 2 rounds"),
    "longt5 local": Contender("255", peer="transformers longt5 local"),
    "transformers longformer 512": Contender("513 + 1", is_peer=True),
    "transformers bigbird": Contender("512", growth=4, is_peer=True),
    "transformers lsh, 2 rounds": Contender("256", "full, causal", is_peer=True),
    "transformers longt5 local": Contender("255", is_peer=True),
    "performer-pytorch": Contender("256 sums", is_peer=True),
    "performer-pytorch, causal": Contender("256 sums", "full, causal", is_peer=True),
    "local-attention 256": Contender("257", "full, causal", is_peer=True),
}
Points = dict[tuple[str, int, str], dict]


def measure(name: str, n: int, mode: str, threads: int) -> dict:
    """One point, or why there is none."""
    python = str(peers_python()) if CONTENDERS[name].is_peer else sys.executable
    command = [python, str(HERE / "contenders" / "long_workload.py"), name, str(n), mode]
    process = subprocess.run(command, env=environment(threads), capture_output=True, text=True, check=False)
    if process.returncode:
        errors = process.stderr.strip().splitlines()
        return {"missing": errors[-1][:120] if errors else f"it ended with {process.returncode}"}
    point = json.loads(process.stdout.strip().splitlines()[-1])
    if not point["error"] <= MAX_ERROR:
        point["wrong"] = f"its output is wrong by {point['error']:.1g}"
    return point


def measure_all(
    names: list[str], lengths: list[int], modes: list[str], threads: int, limit: float, earlier: Points
) -> Points:
    points: Points = {}
    for n in lengths:
        for name in names:
            for mode in modes:
                before = (earlier | points).get((name, n // 2, mode), {})
                growth = CONTENDERS[name].growth
                too_long = before.get("seconds", 0) * growth > limit or before.get("peak MB", 0) * growth > MAX_MB
                if "left out" in before or too_long:
                    points[name, n, mode] = {"left out": f"above {limit:g} s or {MAX_MB:,} MB"}
                    continue
                points[name, n, mode] = measure(name, n, mode, threads)
                print(f"{name}, {n:,}, {mode}: {points[name, n, mode]}", file=sys.stderr, flush=True)
    return points


def earlier_points() -> Points:
    """Those of the last report."""
    file = RESULTS / "long.json"
    if not file.exists():
        return {}
    points: Points = {}
    for row in json.loads(file.read_text())["points"]:
        point = {name: value for name, value in row.items() if name not in ("attention", "length", "pass")}
        points[row["attention"], row["length"], row["pass"]] = point
    return points


def ratio(points: Points, name: str, other: str, n: int, mode: str, clock: str) -> float | None:
    """How many times as fast as the other; None where one is missing or wrong."""
    ours, theirs = points.get((name, n, mode), {}), points.get((other, n, mode), {})
    if clock not in ours or clock not in theirs or "wrong" in ours or "wrong" in theirs:
        return None
    return theirs[clock] / ours[clock]


def crossover(points: Points, name: str, lengths: list[int], mode: str, clock: str) -> str:
    """The length from which on it is faster than full attention, between two points by a line in logarithms."""
    full = CONTENDERS[name].full
    found = [(n, r) for n in lengths if (r := ratio(points, name, full, n, mode, clock)) is not None]
    if not found:
        return "-"
    slower = [i for i, (_n, r) in enumerate(found) if r < 1]
    if not slower:
        return f"below {found[0][0]:,}"
    if slower[-1] == len(found) - 1:
        return f"above {found[-1][0]:,}"
    (n, r), (after, r_after) = found[slower[-1]], found[slower[-1] + 1]
    share = -math.log(r) / (math.log(r_after) - math.log(r))
    return f"{n * (after / n) ** share:,.0f}"


def cell(point: dict) -> str:
    if "seconds" not in point:
        return "left out" if "left out" in point else point.get("missing", "-")
    return f"{1000 * point['seconds']:,.1f} ({1000 * point['processor seconds']:,.0f}) · {point['peak MB']:,.0f}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def report(points: Points, names: list[str], lengths: list[int], modes: list[str], clock: str) -> str:
    lines = []
    for mode in modes:
        title = "forward" if mode == "forward" else "forward and backward"
        lines += [f"\n#### {title}: ms (of processor) · peak MB above q, k, v\n"]
        lines += ["| attention | keys a query | " + " | ".join(f"{n:,}" for n in lengths) + " |"]
        lines += ["|---" * (len(lengths) + 2) + "|"]
        for name in names:
            cells = [cell(points.get((name, n, mode), {})) for n in lengths]
            lines.append(f"| {name} | {CONTENDERS[name].keys} | {' | '.join(cells)} |")
        lines += [
            f"\n#### {title}: times as fast as full attention (as the public implementation), and from which length\n"
        ]
        lines += ["| attention | " + " | ".join(f"{n:,}" for n in lengths) + " | faster from |"]
        lines += ["|---" * (len(lengths) + 2) + "|"]
        for name in names:
            contender = CONTENDERS[name]
            if name.startswith("full"):
                continue
            cells = []
            for n in lengths:
                peer = f" ({times(ratio(points, name, contender.peer, n, mode, clock))})" if contender.peer else ""
                cells.append(times(ratio(points, name, contender.full, n, mode, clock)) + peer)
            lines.append(f"| {name} | {' | '.join(cells)} | {crossover(points, name, lengths, mode, clock)} |")
    wrong = [f"{key[0]} at {key[1]:,}: {point['wrong']}" for key, point in points.items() if "wrong" in point]
    return "\n".join(lines + [f"\nNo ratio: {line}." for line in wrong])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--modes", nargs="+", default=["forward", "both"], choices=["forward", "both"])
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of one call (default: 60)")
    parser.add_argument("--threads", type=int, default=2)
    hint = "ratios of the clock, or of processor seconds, which other work on the machine disturbs less"
    parser.add_argument("--clock", default="seconds", choices=["seconds", "processor seconds"], help=hint)
    add = "keep the points of benchmarks/results/long.json: a run in parts, each of few minutes"
    parser.add_argument("--add", action="store_true", help=add)
    args = parser.parse_args()
    monitor = LoadMonitor([])
    earlier = earlier_points() if args.add else {}
    points = earlier | measure_all(args.only, args.lengths, args.modes, args.threads, args.limit, earlier)
    other_load = monitor.other_load()
    names = [name for name in CONTENDERS if any(key[0] == name for key in points)]
    lengths = sorted({n for _name, n, _mode in points})
    modes = [mode for mode in ("forward", "both") if any(key[2] == mode for key in points)]
    text = "### Attention for long sequences\n" + report(points, names, lengths, modes, args.clock)
    text += f"\n\n{args.threads} threads; ratios of {args.clock}; machine {verdict(other_load)}."
    rows = [{"attention": name, "length": n, "pass": mode, **point} for (name, n, mode), point in points.items()]
    write({"points": rows, "other_load": other_load}, text, "long")
    ours_wrong = [p for (name, _n, _m), p in points.items() if "wrong" in p and not CONTENDERS[name].is_peer]
    sys.exit(ours_wrong[0]["wrong"] if ours_wrong else 0)


if __name__ == "__main__":
    main()
