"""Runs as their files tell them, live or past: metrics, samples, checkpoints; and one head at a checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from headwater.serving.asking import Checkpoint, OfRun, OfText, reading_of
from headwater.serving.shelf import Shelf, checkpoints
from headwater.serving.tracing import Trace, labels
from headwater.training.journals import read_lines

MOST_POINTS, MOST_SAMPLES = 2000, 400
QUIET = 120.0  # seconds without a line after which a run that did not say why it stopped is no longer called live


def summary(name: str, folder: Path) -> dict[str, Any]:
    """One line about a run, for the list."""
    lines = read_lines(folder / "metrics.jsonl")
    best = [line for line in lines if line.get("split") in ("valid", "final") and line.get("best")]
    leave_out = ("step", "split", "best", "rows", "time")
    scores = {k: v for k, v in (best[-1] if best else {}).items() if k not in leave_out and isinstance(v, (int, float))}
    told = {"state": state(folder, lines), "step": lines[-1]["step"] if lines else 0, "scores": scores}
    return {"run": name, **told, "checkpoints": checkpoints(folder)}


def state(folder: Path, lines: list[dict[str, Any]]) -> str:
    """live, or why it stopped, or unfinished."""
    if lines and "stopped" in lines[-1]:
        return str(lines[-1]["stopped"])
    last = lines[-1].get("time", 0) if lines else 0
    return "live" if isinstance(last, (int, float)) and time.time() - last < QUIET else "unfinished"


def run(shelf: Shelf, ask: OfRun) -> dict[str, Any]:
    """Everything about a run; of the metrics only lines after the one the page has seen."""
    folder = shelf.run(ask.run)
    lines = read_lines(folder / "metrics.jsonl")
    new = [{"line": n, **line} for n, line in enumerate(lines) if n > ask.after]
    samples = read_lines(folder / "samples.jsonl")
    return {
        **summary(ask.run, folder),
        "lines": thinned(new),
        "last": len(lines) - 1,
        "samples": samples[-MOST_SAMPLES:],
        "has_model": (folder / "model" / "config.json").is_file(),
    }


def thinned(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most MOST_POINTS of the training lines, evenly; evaluations and notes all stay."""
    train = [n for n, line in enumerate(lines) if line.get("split") == "train"]
    if len(train) <= MOST_POINTS:
        return lines
    step = len(train) / MOST_POINTS
    kept = {train[int(n * step)] for n in range(MOST_POINTS)} | {train[-1]}
    return [line for n, line in enumerate(lines) if line.get("split") != "train" or n in kept]


def scrubbed(shelf: Shelf, ask: Checkpoint) -> dict[str, Any]:
    """One head, and what was said, at one checkpoint: a matrix of at most 48 × 48 weights, and the text."""
    opened = shelf.open(f"{ask.run}@{ask.checkpoint}")
    reading = reading_of(opened, OfText(model=ask.run, text=ask.text, source=ask.source))
    trace = Trace("scrub", reading)
    matrix = trace.matrix(ask.kind, ask.layer, ask.head)[:48, :48]
    said = "".join(token.text for token in reading.follows) if reading.generated else ""
    kind = trace.kinds[ask.kind]
    tokens = {"tokens": labels(reading.tokens), "source": labels(reading.source)}
    sizes = {"layers": len(kind.spots), "heads": kind.shape[0], "kinds": list(trace.kinds)}
    values = [[round(x, 6) for x in row] for row in matrix.tolist()]
    return {"checkpoint": ask.checkpoint, "weights": values, "said": said, **tokens, **sizes}
