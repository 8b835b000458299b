"""Headwater learning in turns, by one of its recipes: `characters` or `translation`, through headwater.train itself.

What a user's run does between steps (journals, checkpoints, plots) is on the clock; evaluations are not, for anyone.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from quality_work import Turns, characters, validation_loss
from train_work import count

from headwater.data.encode import encode_rows
from headwater.training.events import Event, Stepped, Stopped
from headwater.training.recipes import recipe
from headwater.training.teaching import Lesson, train

NEVER = 10**9


class Paused:
    """A listener that lets the run go on only while it is this contender's turn."""

    def __init__(self, exam: Callable[[Lesson], Callable[[], Mapping[str, float]]]) -> None:
        self.exam = exam

    def begin(self, lesson: Lesson) -> None:
        self.trainer, measure = lesson.trainer, self.exam(lesson)

        @torch.no_grad()
        def examine() -> Mapping[str, float]:
            lesson.model.eval()
            with self.trainer.average.used_by(lesson.model):
                found = measure()
            lesson.model.train()
            return found

        self.turns = Turns(examine)
        self.turns.ready(parameters=count(lesson.model), steps=lesson.settings.max_steps, tokens=lesson.material.tokens)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Stepped) and event.step < event.steps:
            self.trainer.began += self.turns.after_step(event.step)  # the run's own clock stands too
        elif isinstance(event, Stepped | Stopped) and not getattr(self, "told", False):
            self.told = True
            self.turns.over(event.step)


def of_characters(folder: str, window: int) -> Callable[[Lesson], Callable[[], Mapping[str, float]]]:
    text = characters(folder)[1]

    def exam(lesson: Lesson) -> Callable[[], Mapping[str, float]]:
        ids = torch.from_numpy(encode_rows(lesson.material.tokenizer, [text]).values.astype("int64"))
        assert len(ids) == len(text), "every character must be one token"
        return lambda: {"loss": validation_loss(lesson.model, ids, window)}

    return exam


def variant(words: str) -> dict[str, Any]:
    """characters,lr=2e-3,layers=3: a recipe, and what is changed in it."""
    name, *changes = words.split(",")
    return {**recipe(name), **dict(change.split("=", 1) for change in changes)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--recipe", default="characters")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--window", type=int, default=64)
    args = parser.parse_args()
    folder = Path(args.folder)
    paused = Paused(of_characters(args.folder, args.window))
    with tempfile.TemporaryDirectory() as out:
        train(
            folder / "train.txt", valid=[str(folder / "valid.txt")], config=variant(args.recipe), seed=args.seed,
            out=str(Path(out) / "run"), eval_every=NEVER, listeners=[paused], say=paused.begin)  # fmt: skip


if __name__ == "__main__":
    main()
