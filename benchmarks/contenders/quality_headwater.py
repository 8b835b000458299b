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
    """A callback that lets the run go on only while it is this contender's turn."""

    def __init__(self, build_measure: Callable[[TrainSetup], Measure]) -> None:
        self.build_measure, self.reported = build_measure, False

    def begin(self, setup: TrainSetup) -> None:
        self.trainer, measure = setup.trainer, self.build_measure(setup)

        @torch.no_grad()
        def evaluate(last: bool) -> Mapping[str, float]:
            setup.model.eval()
            with self.trainer.ema.swapped_in(setup.model):
                result = measure(last)
            setup.model.train()
            return result

        self.turns = Turns(evaluate)
        facts = {
            "parameters": count(setup.model),
            "steps": setup.config.max_steps,
            "tokens": setup.task_data.num_tokens,
        }
        self.turns.ready(**facts)

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepEvent) and event.step < event.total_steps:
            self.trainer.start_time += self.turns.after_step(event.step)  # the run's own clock stands too
        elif isinstance(event, StepEvent | StopEvent) and not self.reported:
            self.reported = True
            self.turns.over(event.step)


def of_characters(folder: Path, window: int) -> Callable[[TrainSetup], Measure]:
    text = characters(folder)[1]

    def build_measure(setup: TrainSetup) -> Measure:
        ids = torch.from_numpy(encode_rows(setup.task_data.tokenizer, [text]).values.astype("int64"))
        assert len(ids) == len(text), "every character must be one token"
        return lambda last: {"loss": validation_loss(setup.model, ids, window)}

    return build_measure


def of_translation(folder: Path, rows: int) -> Callable[[TrainSetup], Measure]:
    return lambda setup: lambda last: scored(lambda texts: translated(setup, texts), folder, rows, last)


def translated(setup: TrainSetup, texts: list[str], batch_size: int = 100) -> list[str]:
    """Greedily, texts of like length batch_size."""
    words, marks = setup.task_data.tokenizer, SpecialTokens.from_tokenizer(setup.task_data.tokenizer)
    ids = encode_rows(words, texts).with_affixes([marks.bos_id], [marks.eos_id])
    order, outputs = np.argsort(ids.lengths, kind="stable"), {}
    for some in np.split(order, range(batch_size, len(order), batch_size)):
        rows = ids.take(some)
        source, keep = torch.from_numpy(rows.to_padded(marks.pad_id)), torch.from_numpy(length_mask(rows))
        result = greedy_decode(
            setup.model, source, keep, marks.bos_id, marks.eos_id, max_new_tokens=source.shape[1] * 3 // 2 + 10
        )
        outputs |= {int(n): words.decode(row) for n, row in zip(some, result, strict=True)}
    return [outputs[n] for n in range(len(texts))]


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
            out=str(Path(out) / "run"), callbacks=[paused], on_setup=paused.begin)  # fmt: skip


if __name__ == "__main__":
    main()
