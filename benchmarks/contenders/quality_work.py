"""Training in turns: a contender trains for some seconds in its turn and is then evaluated, while its clock stands.

It is given lines with a number of seconds. It trains about so long, and answers with a line of JSON: the seconds it has
trained in all, its step, its scores, and whether it is done. Its clock runs while it trains and at no other time.
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
    """The clock of a contender, and its conversation with the bench."""

    def __init__(self, examine: Callable[[bool], Mapping[str, float]]) -> None:
        """examine: is this the last time? -> scores"""
        self.examine, self.spent, self.due, self.began = examine, 0.0, 0.0, 0.0

    def ready(self, **facts: object) -> None:
        print(json.dumps(facts), flush=True)
        self._wait()

    def after_step(self, step: int) -> float:
        """To be called after every step. Where the turn is over: scores are reported, and the next turn is awaited.

        The seconds the clock stood are given back.
        """
        if self.seconds() < self.due:
            return 0.0
        stopped = time.perf_counter()
        self._tell(step, done=False)
        self._wait()
        return time.perf_counter() - stopped

    def over(self, step: int) -> None:
        """There are no more steps."""
        self._tell(step, done=True)

    def seconds(self) -> float:
        return self.spent + time.perf_counter() - self.began

    def _tell(self, step: int, done: bool) -> None:
        self.spent = self.seconds()
        print(json.dumps({"seconds": self.spent, "step": step, **self.examine(done), "done": done}), flush=True)

    def _wait(self) -> None:
        line = sys.stdin.readline()
        if not line.strip():
            sys.exit(0)
        self.due, self.began = self.spent + float(line), time.perf_counter()


@torch.no_grad()
def validation_loss(forward: Callable[[Tensor], Tensor], ids: Tensor, window: int) -> float:
    """The mean of -log p over every token of the text but the first, in windows that follow one another.

    ids [N]; forward: [B, window] -> [B, window, vocab]. A last stretch shorter than a window is left out.
    """
    rows = (len(ids) - 1) // window
    given = ids[: rows * window].view(rows, window)
    wanted = ids[1 : rows * window + 1].view(rows, window)
    total = 0.0
    for x, y in zip(given.split(64), wanted.split(64), strict=True):
        total += float(F.cross_entropy(forward(x).flatten(0, 1), y.flatten(), reduction="sum"))
    return total / given.numel()


def characters(folder: Path) -> tuple[str, str]:
    """train.txt and valid.txt, as they stand."""
    return tuple((folder / f"{name}.txt").read_text(encoding="utf-8") for name in ("train", "valid"))


def scored(translate: Callable[[list[str]], list[str]], folder: Path, rows: int, last: bool) -> dict[str, float]:
    """BLEU as sacrebleu computes it: on the first rows of valid; at the end on all of test too."""
    from sacrebleu import corpus_bleu

    found = {}
    for name, most in (("valid", rows), *((("test", None),) if last else ())):
        sides = [(folder / f"{name}.{side}").read_text(encoding="utf-8").splitlines()[:most] for side in ("en", "de")]
        found[f"{name} bleu"] = corpus_bleu(translate(sides[0]), [sides[1]]).score
    return found
