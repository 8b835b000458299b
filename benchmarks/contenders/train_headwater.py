"""Headwater: its own Trainer, given the work as a source of lessons; every step is the Trainer's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from train_work import BETAS, CLIP, DECAY, RATE, Asked, asked, count, serve
from train_work import Batch as Given

import headwater
from headwater.core import FeedForward
from headwater.data.batches import Batch
from headwater.data.objectives.lesson import Lesson
from headwater.parts import swap
from headwater.training.loop import Trainer
from headwater.training.objectives import words
from headwater.training.schedules import Constant
from headwater.training.settings import read


class Lessons:
    """One lesson at a time: the batch whose turn it is."""

    size = 1

    def __init__(self, two: bool) -> None:
        self.two, self.now = two, None

    def pieces(self, examples: np.ndarray, tokens: int) -> list[np.ndarray]:
        return [examples]

    def lesson(self, examples: np.ndarray, epoch: int) -> Lesson:
        source, ids, targets = (part.numpy() for part in self.now)
        keep = np.ones(ids.shape, bool)
        return Lesson(ids, keep, targets, source, keep) if self.two else Lesson(ids, keep, targets)


def spec(asked: Asked) -> Any:
    work, p = asked.work, asked.p
    sizes = {"d_model": work.d_model, "heads": work.heads, "layers": work.layers, "d_ff": work.d_ff, "dropout": p}
    sizes["attention_dropout"] = p if "attention" in asked.places else 0.0
    if work.two:
        made = headwater.transformer(work.vocab, **sizes)
    else:
        made = headwater.decoder(
            work.vocab, placement="pre", activation="gelu", position="learned", longest=work.length, **sizes
        )
    inside = p if "ffn" in asked.places else 0.0
    return swap(made, FeedForward, lambda ffn: replace(ffn, dropout=inside))


def main() -> None:
    given = asked()
    model, lessons = spec(given).build(seed=0).train(), Lessons(given.work.two)
    settings = read({
        "lr": RATE, "beta1": BETAS[0], "beta2": BETAS[1], "weight_decay": DECAY, "clip": CLIP, "max_steps": 10**6,
        "compile": given.compiled, "batch_tokens": 10**9})  # fmt: skip
    heard: list[float] = []
    trainer = Trainer(
        model, words, lessons, Constant(RATE), settings, listeners=[lambda event: heard.append(event.loss)]
    )

    def step(batch: Given) -> float:
        lessons.now = batch
        trainer.step(Batch(np.arange(given.work.rows), 0, 0))
        return heard.pop()

    serve(step, given.work, given.places, count(model))


if __name__ == "__main__":
    main()
