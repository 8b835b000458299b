"""headwater.train in turns, with one of its recipes: `characters` or `translation`.

Logs, checkpoints and plots between steps are timed; evaluations are not, for any contender.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quality_workload import Turns, bleu_metrics, read_texts, validation_loss
from train_workload import count

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
    """A callback that trains only during the turns of this contender."""

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
            self.trainer.start_time += self.turns.after_step(event.step)  # extends the time limit of the run too
        elif isinstance(event, StepEvent | StopEvent) and not self.reported:
            self.reported = True
            self.turns.finish(event.step)


def characters_measure(folder: Path, window: int) -> Callable[[TrainSetup], Measure]:
    text = read_texts(folder)[1]

    def build_measure(setup: TrainSetup) -> Measure:
        ids = torch.from_numpy(encode_rows(setup.task_data.tokenizer, [text]).values.astype("int64"))
        assert len(ids) == len(text), "every character must be one token"
        return lambda last: {"loss": validation_loss(setup.model, ids, window)}

    return build_measure


def translation_measure(folder: Path, rows: int) -> Callable[[TrainSetup], Measure]:
    return lambda setup: lambda last: bleu_metrics(lambda texts: translate(setup, texts), folder, rows, last)


def translate(setup: TrainSetup, texts: list[str], batch_size: int = 100) -> list[str]:
    """Greedy translations, in batches of similar length."""
    tokenizer, special = setup.task_data.tokenizer, SpecialTokens.from_tokenizer(setup.task_data.tokenizer)
    ids = encode_rows(tokenizer, texts).with_affixes([special.bos_id], [special.eos_id])
    order, outputs = np.argsort(ids.lengths, kind="stable"), {}
    for batch in np.split(order, range(batch_size, len(order), batch_size)):
        rows = ids.take(batch)
        source, keep = torch.from_numpy(rows.to_padded(special.pad_id)), torch.from_numpy(length_mask(rows))
        result = greedy_decode(
            setup.model, source, keep, special.bos_id, special.eos_id, max_new_tokens=source.shape[1] * 3 // 2 + 10
        )
        outputs |= {int(n): tokenizer.decode(row) for n, row in zip(batch, result, strict=True)}
    return [outputs[n] for n in range(len(texts))]


def settings_of(variant: str) -> dict[str, Any]:
    """The settings of "characters,lr=2e-3,layers=3": a recipe with overrides."""
    name, *changes = variant.split(",")
    return {**recipe(name), **dict(change.split("=", 1) for change in changes)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["characters", "translation"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--window", type=int, default=64, help="characters per window")
    parser.add_argument("--minutes", type=float, default=0, help="overrides the time limit of the recipe")
    parser.add_argument("--rows", type=int, default=400, help="of valid, in translation")
    args = parser.parse_args()
    is_characters = args.part == "characters"
    paused = Paused(
        characters_measure(args.folder, args.window) if is_characters else translation_measure(args.folder, args.rows)
    )
    sides = ("txt",) if is_characters else ("en", "de")
    files, valid = ([str(args.folder / f"{name}.{side}") for side in sides] for name in ("train", "valid"))
    limit = {"max_time": 60 * args.minutes} if args.minutes else {}
    with tempfile.TemporaryDirectory() as out:
        train(
            *files, valid=valid, config={**settings_of(args.recipe), **limit}, seed=args.seed, eval_every=NEVER,
            out=str(Path(out) / "run"), callbacks=[paused], on_setup=paused.begin, quiet=True)  # fmt: skip


if __name__ == "__main__":
    main()
