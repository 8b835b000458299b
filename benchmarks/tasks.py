"""Six public tasks, each trained by one command within a time limit and compared with baselines on a test set.

    python benchmarks/tasks.py                      all of them, 15 minutes each
    python benchmarks/tasks.py nl2bash --time 2m    one of them, for a short time
    python benchmarks/tasks.py nl2bash --steps 3000 a number of steps, if the machine is shared
    python benchmarks/tasks.py --table              only the table, from the existing results

Needs the datasets (in the folder HEADWATER_DATA, or --data FOLDER). Settings were chosen on the validation set; the two
exceptions (commands, synopsis) are listed in docs/en/results.md.
Results: benchmarks/results/tasks/NAME.json, and all of them as a table in benchmarks/results/tasks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from multi30k import DATA
from task_data import Task, debian, multi30k, nl2bash, polarity, wnut, xquad

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "tasks"


class Entry(NamedTuple):
    title: str
    make: Callable[[Path, Path], Task]
    flags: tuple[str, ...]  # of headwater train


ENTRIES = {
    "multi30k": Entry("Multi30k: English to German", multi30k, ("--recipe", "multi30k")),
    "debian": Entry("Debian: description to synopsis", debian, ("--recipe", "synopsis")),
    "nl2bash": Entry("nl2bash: description to command", nl2bash, ("--recipe", "commands")),
    "polarity": Entry("Sentence polarity, from MiniLM", polarity, ("--init-from", "minilm")),
    "polarity-scratch": Entry("Sentence polarity, from scratch", polarity, ("--recipe", "sentences")),
    "wnut": Entry("WNUT-17: new entities, from MiniLM", wnut, ("--init-from", "minilm")),
    "wnut-scratch": Entry("WNUT-17: new entities, from scratch", wnut, ("--recipe", "sentences")),
    "xquad-en": Entry("XQuAD English, from MiniLM", xquad("en"), ("--recipe", "answers", "--init-from", "minilm")),
    "xquad-zh": Entry("XQuAD Chinese, from MiniLM", xquad("zh"), ("--recipe", "answers", "--init-from", "minilm")),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ENTRIES)}")
    parser.add_argument("--time", default="15m", help="training time of each task [15m]")
    parser.add_argument("--steps", type=int, default=0, help="training steps of each task, instead of a time")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the datasets [HEADWATER_DATA]")
    parser.add_argument("--table", action="store_true", help="only write the table")
    args = parser.parse_args()
    if not args.table and not args.data.is_dir():
        print(f"the datasets must be in {args.data}, which does not exist; give --data FOLDER")
        return 5
    if unknown := [name for name in args.names if name not in ENTRIES]:
        print(f"there is no task {unknown[0]!r}; they are {', '.join(ENTRIES)}")
        return 2
    limit = ["--max-steps", str(args.steps), "--max-time", "1d"] if args.steps else ["--max-time", args.time]
    for name in [] if args.table else args.names or ENTRIES:
        result = run_task(name, limit, args.data)
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(table())
    return 0


def run_task(name: str, limit: list[str], data: Path) -> dict:
    """Train, evaluate and compare with the baselines."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        task = ENTRIES[name].make(data, Path(work) / "data")
        arguments = train_command(name, task, limit, Path(work) / "run")
        print(f"\n== {ENTRIES[name].title}\n$ headwater {' '.join(arguments)}", flush=True)
        start = time.monotonic()
        headwater(arguments)
        elapsed = time.monotonic() - start
        scores = json.loads(headwater(["eval", str(Path(work) / "run"), *map(str, task.test), "--json"], capture=True))
        shutil.copy(Path(work) / "run" / "config.yaml", RESULTS / f"{name}.yaml")
    command = " ".join(arguments).replace(work + "/data/", "").replace(work + "/", "").replace(str(data), "DATA")
    return {
        "task": ENTRIES[name].title,
        "command": f"headwater {command}",
        "metric": task.metric,
        "scores": scores,
        "baselines": task.baselines,
        "seconds": round(elapsed, 1),
        "limit": limit,
        "threads": threads(),
    }


def train_command(name: str, task: Task, limit: list[str], out: Path) -> list[str]:
    valid = ["--valid", *map(str, task.valid)] if task.valid else []
    files = list(map(str, task.train))
    return ["train", *files, *valid, *ENTRIES[name].flags, *limit, "--out", str(out)]


def headwater(arguments: list[str], capture: bool = False) -> str:
    command = [sys.executable, "-m", "headwater", *arguments]
    process = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE if capture else None)
    return process.stdout or ""


def threads() -> int:
    return int(os.environ.get("OMP_NUM_THREADS", 0)) or len(os.sched_getaffinity(0))


def table() -> str:
    """All existing results as a Markdown table."""
    lines = ["| task | metric | Headwater | baselines | command |", "|---|---|---|---|---|"]
    for name in ENTRIES:
        path = RESULTS / f"{name}.json"
        if path.is_file():
            result = json.loads(path.read_text())
            key = result["metric"]
            baselines = ", ".join(f"{baseline} {scores[key]:.1f}" for baseline, scores in result["baselines"].items())
            line = (result["task"], key, f"**{result['scores'][key]:.1f}**", baselines, f"`{result['command']}`")
            lines.append(f"| {' | '.join(line)} |")
    text = "\n".join(lines) + "\n"
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS.parent / "tasks.md").write_text(text)
    return text


if __name__ == "__main__":
    sys.exit(main())
