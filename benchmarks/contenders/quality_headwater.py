"""Headwater learning in turns, by one of its recipes: `characters` or `translation`, through headwater.train itself.

What a user's run does between steps (journals, checkpoints, plots) is on the clock; evaluations are not, for anyone.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quality_work import Turns, characters, scored, validation_loss
from train_work import count

from headwater.data.encode import encode_rows
from headwater.data.objectives.lesson import Marks
from headwater.data.objectives.texts import real
from headwater.training.decode import greedy
from headwater.training.events import Event, Stepped, Stopped
from headwater.training.recipes import recipe
from headwater.training.teaching import Lesson, train

NEVER = 10**9


Measure = Callable[[bool], Mapping[str, float]]


class Paused:
    """A listener that lets the run go on only while it is this contender's turn."""

    def __init__(self, exam: Callable[[Lesson], Measure]) -> None:
        self.exam, self.told = exam, False

    def begin(self, lesson: Lesson) -> None:
        self.trainer, measure = lesson.trainer, self.exam(lesson)

        @torch.no_grad()
        def examine(last: bool) -> Mapping[str, float]:
            lesson.model.eval()
            with self.trainer.average.used_by(lesson.model):
                found = measure(last)
            lesson.model.train()
            return found

        self.turns = Turns(examine)
        facts = {
            "parameters": count(lesson.model),
            "steps": lesson.settings.max_steps,
            "tokens": lesson.material.tokens,
        }
        self.turns.ready(**facts)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Stepped) and event.step < event.steps:
            self.trainer.began += self.turns.after_step(event.step)  # the run's own clock stands too
        elif isinstance(event, Stepped | Stopped) and not self.told:
            self.told = True
            self.turns.over(event.step)


def of_characters(folder: Path, window: int) -> Callable[[Lesson], Measure]:
    text = characters(folder)[1]

    def exam(lesson: Lesson) -> Measure:
        ids = torch.from_numpy(encode_rows(lesson.material.tokenizer, [text]).values.astype("int64"))
        assert len(ids) == len(text), "every character must be one token"
        return lambda last: {"loss": validation_loss(lesson.model, ids, window)}

    return exam


def of_translation(folder: Path, rows: int) -> Callable[[Lesson], Measure]:
    return lambda lesson: lambda last: scored(lambda texts: translated(lesson, texts), folder, rows, last)


def translated(lesson: Lesson, texts: list[str], together: int = 100) -> list[str]:
    """Greedily, texts of like length together."""
    words, marks = lesson.material.tokenizer, Marks.of(lesson.material.tokenizer)
    ids = encode_rows(words, texts).wrapped([marks.bos], [marks.eos])
    order, said = np.argsort(ids.lengths, kind="stable"), {}
    for some in np.split(order, range(together, len(order), together)):
        rows = ids.take(some)
        source, keep = torch.from_numpy(rows.padded(marks.pad)), torch.from_numpy(real(rows))
        found = greedy(lesson.model, source, keep, marks.bos, marks.eos, most=source.shape[1] * 3 // 2 + 10)
        said |= {int(n): words.decode(row) for n, row in zip(some, found, strict=True)}
    return [said[n] for n in range(len(texts))]


def variant(words: str) -> dict[str, Any]:
    """characters,lr=2e-3,layers=3: a recipe, and what is changed in it."""
    name, *changes = words.split(",")
    return {**recipe(name), **dict(change.split("=", 1) for change in changes)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["characters", "translation"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--window", type=int, default=64, help="characters a window")
    parser.add_argument("--minutes", type=float, default=0, help="in place of the recipe's own time")
    parser.add_argument("--rows", type=int, default=400, help="of valid, in translation")
    args = parser.parse_args()
    letters = args.part == "characters"
    paused = Paused(of_characters(args.folder, args.window) if letters else of_translation(args.folder, args.rows))
    sides = ("txt",) if letters else ("en", "de")
    files, valid = ([str(args.folder / f"{name}.{side}") for side in sides] for name in ("train", "valid"))
    time = {"max_time": 60 * args.minutes} if args.minutes else {}
    with tempfile.TemporaryDirectory() as out:
        train(
            *files, valid=valid, config={**variant(args.recipe), **time}, seed=args.seed, eval_every=NEVER,
            out=str(Path(out) / "run"), listeners=[paused], say=paused.begin)  # fmt: skip


if __name__ == "__main__":
    main()
