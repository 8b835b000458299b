"""Shared by the demonstrations of tuning: files, bars that a result must reach, and the table of both."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from multi30k import DATA

from headwater.families.convert import convert


class Bar(NamedTuple):
    """A figure with the least (or, with at_most, the largest) value that it must have."""

    name: str
    value: float
    bar: float
    at_most: bool = False

    @property
    def is_reached(self) -> bool:
        return self.value <= self.bar if self.at_most else self.value >= self.bar


def judge(bars: Iterable[Bar]) -> int:
    """Print the figures with their bars; 1 where one is not reached."""
    bars = list(bars)
    print("\n| figure | value | bar | reached |\n|---|---|---|---|")
    for bar in bars:
        sign = "<=" if bar.at_most else ">="
        print(f"| {bar.name} | {bar.value:.3g} | {sign} {bar.bar:g} | {'yes' if bar.is_reached else 'NO'} |")
    return int(not all(bar.is_reached for bar in bars))


def parser(description: str) -> argparse.ArgumentParser:
    """Arguments of every demonstration."""
    made = argparse.ArgumentParser(description=description.partition("\n")[0])
    made.add_argument("--data", type=Path, default=DATA, help="folder of the datasets [HEADWATER_DATA/data]")
    made.add_argument("--work", type=Path, default=Path("runs/tuning"),
                      help="folder of files and runs; a run that is in it already is not repeated")  # fmt: skip
    made.add_argument("--quick", action="store_true", help="a few steps, to see that it runs; no bar is judged")
    return made


def parse(made: argparse.ArgumentParser, needs_data: bool = True) -> argparse.Namespace:
    args = made.parse_args()
    if needs_data and not args.data.is_dir():
        sys.exit(f"{args.data}: no folder of datasets; give --data, or set HEADWATER_DATA to the folder above data/")
    args.work.mkdir(parents=True, exist_ok=True)
    return args


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def is_trained(run: Path) -> bool:
    """Whether a run of an earlier call is whole; what is left of one that was stopped is removed."""
    if (run / "model").exists():
        print(f"kept: {run}", flush=True)
        return True
    shutil.rmtree(run, ignore_errors=True)
    return False


def float_base(work: Path) -> Path:
    """SmolLM2 with float32 weights, as a folder: what `headwater convert smollm2 FOLDER` writes."""
    folder = work / "smollm2-float32"
    if not folder.exists():
        convert("smollm2", folder)
    return folder


def metric_lines(run: Path, name: str) -> list[float]:
    """The values of a metric of training steps."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line[name] for line in lines if line.get("split") == "train" and line.get(name) is not None]
