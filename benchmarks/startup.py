"""Start-up time: seconds until a command has finished, or a run has done its first step; interleaved fresh processes.

python benchmarks/startup.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from side_by_side import LoadMonitor, environment, peers_python, spread, verdict, write

HEADWATER = [sys.executable, "-m", "headwater"]


def small_file(folder: Path) -> Path:
    """300 pairs: the digits of a number, and the same digits reversed."""
    file = folder / "pairs.tsv"
    file.write_text("".join(f"{' '.join(str(n))}\t{' '.join(str(n)[::-1])}\n" for n in range(1000, 1300)))
    return file


def commands(folder: Path) -> dict[str, list[str]]:
    """The commands to time."""
    run = [*HEADWATER, "train", str(small_file(folder)), "--max-steps", "100000", "--log-every", "1", "--out"]
    return {
        "headwater --help": [*HEADWATER, "--help"],
        "headwater show base": [*HEADWATER, "show", "base"],
        "headwater train to its first step": run,
        "python -c pass": [sys.executable, "-c", "pass"],
        "import torch": [sys.executable, "-c", "import torch"],
        "import transformers": [str(peers_python()), "-c", "import transformers"],
        "transformers: MarianMTModel": [str(peers_python()), "-c", "from transformers import MarianMTModel"],
    }


def seconds(name: str, command: list[str], folder: Path, env: dict[str, str]) -> float:
    if not name.startswith("headwater train"):
        start = time.perf_counter()
        subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        return time.perf_counter() - start
    out = folder / f"run-{time.monotonic_ns()}"
    start = time.perf_counter()
    process = subprocess.Popen([*command, str(out)], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not has_stepped(out / "metrics.jsonl"):
            if process.poll() is not None:
                sys.exit(f"headwater train ended with {process.returncode} before its first step")
            time.sleep(0.01)
        return time.perf_counter() - start
    finally:
        process.kill()
        process.wait()


def has_stepped(metrics_file: Path) -> bool:
    return metrics_file.is_file() and '"split": "train"' in metrics_file.read_text(encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    env = environment(args.threads)
    monitor = LoadMonitor([])
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        timed_commands = commands(folder)
        for turn in range(args.rounds + 1):
            for name, command in timed_commands.items():
                elapsed = seconds(name, command, folder, env)
                if turn:  # the first round warms the disk cache
                    times.setdefault(name, []).append(elapsed)
    results = {name: spread(values) for name, values in times.items()}
    other_load = monitor.other_load()
    lines = ["### Start-up\n", "| | seconds |", "|---|---|"]
    lines += [f"| {name} | {f['median']:.2f} [{f['low']:.2f}..{f['high']:.2f}] |" for name, f in results.items()]
    lines.append(
        f"\n{args.rounds} interleaved rounds, warm disk cache, {args.threads} threads; machine {verdict(other_load)}."
    )
    write({"figures": results, "other_load": other_load}, "\n".join(lines), "startup")


if __name__ == "__main__":
    main()
