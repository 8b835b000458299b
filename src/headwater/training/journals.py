"""Listeners that write: metrics.jsonl, samples.jsonl, order.jsonl. A line is whole once its newline is there."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwater.training.events import Evaluated, Event, FinalEvaluated, Noted, Stepped, Stopped


class Journal:
    """Lines are appended and handed to the system at once, so that a killed run has said what it did."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name

    def write(self, **line: Any) -> None:
        text = line_of(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)  # it may have been removed meanwhile
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(handle, text.encode("utf-8", "backslashreplace"))
        finally:
            os.close(handle)


def line_of(line: Mapping[str, Any]) -> str:
    return json.dumps({name: _plain(value) for name, value in line.items()}, ensure_ascii=False) + "\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A journal as it stands; a last line that was cut short, or one that is no entry, is left out."""
    found = []
    for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if line.endswith(b"\n") and isinstance(said, dict) and type(said.get("step")) is int:
            found.append(said)
    return found


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: float) -> float | None:
    """Five digits are enough to draw."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


class Metrics(Journal):
    def __init__(self, path: Path, every: int) -> None:
        super().__init__(path)
        self.every, self.tokens, self.answers, self.seconds = every, 0, 0, 0.0

    def __call__(self, event: Event) -> None:
        now = round(time.time(), 3)
        if isinstance(event, Stepped):
            self.tokens, self.answers = self.tokens + event.tokens, self.answers + event.answers
            self.seconds += event.seconds
            if event.step % self.every == 0 or event.step == event.steps or not event.applied:
                tokens, answers = (round(n / max(self.seconds, 1e-9)) for n in (self.tokens, self.answers))
                self.write(step=event.step, split="train", epoch=round(event.epoch, 4), loss=event.loss, lr=event.lr,
                           grad_norm=event.norm, tokens_per_second=tokens, answers_per_second=answers,
                           applied=event.applied, time=now,
                           grad_norms={layer: _short(norm) for layer, norm in event.norms.items()})  # fmt: skip
                self.tokens, self.answers, self.seconds = 0, 0, 0.0
        elif isinstance(event, Evaluated):
            scores = {name: _plain(value) for name, value in event.scores.items()}
            self.write(step=event.step, split="valid", **scores, best=event.better, time=now)
        elif isinstance(event, FinalEvaluated):
            scores = {name: _plain(value) for name, value in event.scores.items()}
            self.write(step=event.step, split="final", **scores, best=True, rows=event.rows, time=now)
        elif isinstance(event, Noted):
            self.write(step=event.step, note=event.text, time=now)
        elif isinstance(event, Stopped):
            self.write(step=event.step, stopped=event.why, seconds=round(event.seconds, 1), time=now)


class Samples(Journal):
    def __call__(self, event: Event) -> None:
        if isinstance(event, Evaluated):
            for sample in event.samples:
                self.write(step=event.step, **sample)


class Order(Journal):
    """Which examples each step saw, in their order."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self.write(step=event.step, examples=event.examples.tolist())
