"""Start-up: how long until a command has answered, or a run has made its first step; fresh processes, in turn.

python benchmarks/start.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from side_by_side import Watch, environment, peers_python, spread, verdict, write

HEADWATER = [sys.executable, "-m", "headwater"]


def small_file(folder: Path) -> Path:
    """300 pairs: numbers in words of digits, and the same backwards."""
    file = folder / "pairs.tsv"
    file.write_text("".join(f"{' '.join(str(n))}\t{' '.join(str(n)[::-1])}\n" for n in range(1000, 1300)))
    return file


def commands(folder: Path) -> dict[str, list[str]]:
    """What is started. A run of one step ends after its first step, its evaluation and its files."""
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
        began = time.perf_counter()
        subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        return time.perf_counter() - began
    out = folder / f"run-{time.monotonic_ns()}"
    began = time.perf_counter()
    process = subprocess.Popen([*command, str(out)], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not stepped(out / "metrics.jsonl"):
            if process.poll() is not None:
                sys.exit(f"headwater train ended with {process.returncode} before its first step")
            time.sleep(0.01)
        return time.perf_counter() - began
    finally:
        process.kill()
        process.wait()


def stepped(journal: Path) -> bool:
    return journal.is_file() and '"split": "train"' in journal.read_text(encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    env, watch, times = environment(args.threads), Watch([]), {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        some = commands(folder)
        for turn in range(args.rounds + 1):
            for name, command in some.items():
                took = seconds(name, command, folder, env)
                if turn:  # the first round warms the disk
                    times.setdefault(name, []).append(took)
    found = {name: spread(values) for name, values in times.items()}
    others = watch.other_load()
    lines = ["### Start-up\n", "| | seconds |", "|---|---|"]
    lines += [f"| {name} | {f['median']:.2f} [{f['low']:.2f}..{f['high']:.2f}] |" for name, f in found.items()]
    lines.append(f"\n{args.rounds} rounds in turn, warm disk, {args.threads} threads; machine {verdict(others)}.")
    write({"figures": found, "others": others}, "\n".join(lines), "start")


if __name__ == "__main__":
    main()
