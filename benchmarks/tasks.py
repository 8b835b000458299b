"""Six public tasks, each trained by one command within a time and compared with simple answers on a held-out test set.

    python benchmarks/tasks.py                      all of them, 15 minutes each
    python benchmarks/tasks.py nl2bash --time 2m    one of them, for a try
    python benchmarks/tasks.py nl2bash --steps 3000 so many steps, where others use the machine, too
    python benchmarks/tasks.py --table              the table again, from the results there are

Needs the data sets (HEADWATER_DATA names their folder, or --data FOLDER). Settings are chosen by the validation rows;
where a test score was known before a recipe changed (commands, synopsis), docs/en/results.md says so.
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
    what: str
    make: Callable[[Path, Path], Task]
    flags: tuple[str, ...]  # of headwater train


ENTRIES = {
    "multi30k": Entry("Multi30k: English to German", multi30k, ("--recipe", "multi30k")),
    "debian": Entry("Debian: description to synopsis", debian, ("--recipe", "synopsis")),
    "nl2bash": Entry("nl2bash: words to a command", nl2bash, ("--recipe", "commands")),
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
    parser.add_argument("--time", default="15m", help="for training each [15m]")
    parser.add_argument("--steps", type=int, default=0, help="of training each, however long they take")
    parser.add_argument("--data", type=Path, default=DATA, help="where the data sets are [HEADWATER_DATA]")
    parser.add_argument("--table", action="store_true", help="only write the table")
    args = parser.parse_args()
    if not args.table and not args.data.is_dir():
        print(f"the data sets must be in {args.data}, it is not there; --data FOLDER says where they are")
        return 5
    if strange := [name for name in args.names if name not in ENTRIES]:
        print(f"there is no task {strange[0]!r}; they are {', '.join(ENTRIES)}")
        return 2
    limit = ["--max-steps", str(args.steps), "--max-time", "1d"] if args.steps else ["--max-time", args.time]
    for name in [] if args.table else args.names or ENTRIES:
        done = one(name, limit, args.data)
        (RESULTS / f"{name}.json").write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n")
    print(table())
    return 0


def one(name: str, limit: list[str], data: Path) -> dict:
    """Train, measure, compare."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        task = ENTRIES[name].make(data, Path(work) / "data")
        words = train_command(name, task, limit, Path(work) / "run")
        print(f"\n== {ENTRIES[name].what}\n$ headwater {' '.join(words)}", flush=True)
        began = time.monotonic()
        headwater(words)
        took = time.monotonic() - began
        scores = json.loads(headwater(["eval", str(Path(work) / "run"), *map(str, task.test), "--json"], capture=True))
        shutil.copy(Path(work) / "run" / "config.yaml", RESULTS / f"{name}.yaml")
    shown = " ".join(words).replace(work + "/data/", "").replace(work + "/", "").replace(str(data), "DATA")
    return {"task": ENTRIES[name].what, "command": f"headwater {shown}", "measure": task.measure, "scores": scores,
            "simple": task.simple, "seconds": round(took, 1), "limit": limit, "threads": threads()}  # fmt: skip


def train_command(name: str, task: Task, limit: list[str], out: Path) -> list[str]:
    valid = ["--valid", *map(str, task.valid)] if task.valid else []
    files = list(map(str, task.train))
    return ["train", *files, *valid, *ENTRIES[name].flags, *limit, "--out", str(out)]


def headwater(words: list[str], capture: bool = False) -> str:
    command = [sys.executable, "-m", "headwater", *words]
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE if capture else None)
    return done.stdout or ""


def threads() -> int:
    return int(os.environ.get("OMP_NUM_THREADS", 0)) or len(os.sched_getaffinity(0))


def table() -> str:
    """All results there are, as Markdown."""
    lines = ["| task | measure | Headwater | simple answers | command |", "|---|---|---|---|---|"]
    for name in ENTRIES:
        path = RESULTS / f"{name}.json"
        if path.is_file():
            found = json.loads(path.read_text())
            key = found["measure"]
            simple = ", ".join(f"{who} {scores[key]:.1f}" for who, scores in found["simple"].items())
            line = (found["task"], key, f"**{found['scores'][key]:.1f}**", simple, f"`{found['command']}`")
            lines.append(f"| {' | '.join(line)} |")
    text = "\n".join(lines) + "\n"
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS.parent / "tasks.md").write_text(text)
    return text


if __name__ == "__main__":
    sys.exit(main())
