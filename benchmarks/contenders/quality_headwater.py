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

from headwater.data.collate import SpecialTokens, length_mask
from headwater.data.ragged import encode_rows
from headwater.tasks.seq2seq import greedy_decode
from headwater.training.api import train
from headwater.training.recipes import recipe
from headwater.training.setup import TrainSetup
from headwater.training.state import Event, StepEvent, StopEvent

NEVER = 10**9


Measure = Callable[[bool], Mapping[str, float]]


class Paused:
    """A listener that lets the run go on only while it is this contender's turn."""

    def __init__(self, exam: Callable[[TrainSetup], Measure]) -> None:
        self.exam, self.told = exam, False

    def begin(self, lesson: TrainSetup) -> None:
        self.trainer, measure = lesson.trainer, self.exam(lesson)

        @torch.no_grad()
        def examine(last: bool) -> Mapping[str, float]:
            lesson.model.eval()
            with self.trainer.ema.swapped_in(lesson.model):
                found = measure(last)
            lesson.model.train()
            return found

        self.turns = Turns(examine)
        facts = {
            "parameters": count(lesson.model),
            "steps": lesson.config.max_steps,
            "tokens": lesson.task_data.num_tokens,
        }
        self.turns.ready(**facts)

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepEvent) and event.step < event.total_steps:
            self.trainer.start_time += self.turns.after_step(event.step)  # the run's own clock stands too
        elif isinstance(event, StepEvent | StopEvent) and not self.told:
            self.told = True
            self.turns.over(event.step)


def of_characters(folder: Path, window: int) -> Callable[[TrainSetup], Measure]:
    text = characters(folder)[1]

    def exam(lesson: TrainSetup) -> Measure:
        ids = torch.from_numpy(encode_rows(lesson.task_data.tokenizer, [text]).values.astype("int64"))
        assert len(ids) == len(text), "every character must be one token"
        return lambda last: {"loss": validation_loss(lesson.model, ids, window)}

    return exam


def of_translation(folder: Path, rows: int) -> Callable[[TrainSetup], Measure]:
    return lambda lesson: lambda last: scored(lambda texts: translated(lesson, texts), folder, rows, last)


def translated(lesson: TrainSetup, texts: list[str], together: int = 100) -> list[str]:
    """Greedily, texts of like length together."""
    words, marks = lesson.task_data.tokenizer, SpecialTokens.from_tokenizer(lesson.task_data.tokenizer)
    ids = encode_rows(words, texts).with_affixes([marks.bos_id], [marks.eos_id])
    order, said = np.argsort(ids.lengths, kind="stable"), {}
    for some in np.split(order, range(together, len(order), together)):
        rows = ids.take(some)
        source, keep = torch.from_numpy(rows.to_padded(marks.pad_id)), torch.from_numpy(length_mask(rows))
        found = greedy_decode(
            lesson.model, source, keep, marks.bos_id, marks.eos_id, max_new_tokens=source.shape[1] * 3 // 2 + 10
        )
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
            *files, valid=valid, config={**variant(args.source), **time}, seed=args.seed, eval_every=NEVER,
            out=str(Path(out) / "run"), callbacks=[paused], on_setup=paused.begin)  # fmt: skip


if __name__ == "__main__":
    main()
