"""Training in turns: a contender trains for some seconds per turn and is then evaluated with its clock stopped.

Each line of stdin is a number of seconds. The contender trains for about that time and prints one line of JSON: the
total seconds of training, its step, its metrics, and whether it is done. Its clock runs only while it trains.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F


class Turns:
    """The clock of a contender, and its communication with the benchmark over stdin and stdout."""

    def __init__(self, evaluate: Callable[[bool], Mapping[str, float]]) -> None:
        """evaluate(is_last) -> metrics."""
        self.evaluate = evaluate
        self.trained = 0.0  # seconds of all turns
        self.turn_end = 0.0
        self.start = 0.0

    def ready(self, **facts: object) -> None:
        print(json.dumps(facts), flush=True)
        self._wait()

    def after_step(self, step: int) -> float:
        """Call after every step. At the end of the turn, report the metrics and wait for the next turn.

        Returns the seconds for which the clock was stopped.
        """
        if self.seconds() < self.turn_end:
            return 0.0
        stopped = time.perf_counter()
        self._report(step, done=False)
        self._wait()
        return time.perf_counter() - stopped

    def finish(self, step: int) -> None:
        """Report the last evaluation: training is complete."""
        self._report(step, done=True)

    def seconds(self) -> float:
        return self.trained + time.perf_counter() - self.start

    def _report(self, step: int, done: bool) -> None:
        self.trained = self.seconds()
        print(json.dumps({"seconds": self.trained, "step": step, **self.evaluate(done), "done": done}), flush=True)

    def _wait(self) -> None:
        line = sys.stdin.readline()
        if not line.strip():
            sys.exit(0)
        self.turn_end, self.start = self.trained + float(line), time.perf_counter()


@torch.no_grad()
def validation_loss(forward: Callable[[Tensor], Tensor], ids: Tensor, window: int) -> float:
    """The mean of -log p over every token of the text but the first, in consecutive windows.

    ids [N]; forward: [B, window] -> [B, window, vocab]. An incomplete last window is dropped.
    """
    rows = (len(ids) - 1) // window
    inputs = ids[: rows * window].view(rows, window)
    targets = ids[1 : rows * window + 1].view(rows, window)
    total = 0.0
    for x, y in zip(inputs.split(64), targets.split(64), strict=True):
        total += float(F.cross_entropy(forward(x).flatten(0, 1), y.flatten(), reduction="sum"))
    return total / inputs.numel()


def read_texts(folder: Path) -> tuple[str, str]:
    """The texts of train.txt and valid.txt."""
    return tuple((folder / f"{name}.txt").read_text(encoding="utf-8") for name in ("train", "valid"))


def bleu_metrics(translate: Callable[[list[str]], list[str]], folder: Path, rows: int, last: bool) -> dict[str, float]:
    """BLEU of sacrebleu on the first rows of valid; at the end on all rows of test too."""
    from sacrebleu import corpus_bleu

    metrics = {}
    for name, limit in (("valid", rows), *((("test", None),) if last else ())):
        sides = [(folder / f"{name}.{side}").read_text(encoding="utf-8").splitlines()[:limit] for side in ("en", "de")]
        metrics[f"{name} bleu"] = corpus_bleu(translate(sides[0]), [sides[1]]).score
    return metrics
