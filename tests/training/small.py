"""A trainer small enough to be run hundreds of times: a copy task, a model of some thousand weights."""

from __future__ import annotations

import dataclasses
import json

import numpy as np

from headwater.core import transformer
from headwater.data.batches import Batches, micro
from headwater.data.objectives.lesson import Marks
from headwater.data.objectives.texts import seq2seq
from headwater.data.ragged import Ragged
from headwater.training import objectives
from headwater.training.loop import Scored, Trainer
from headwater.training.schedules import Cosine
from headwater.training.settings import read

VOCAB = 12


class Copies:
    """Sequences to be copied. Example i is a function of i; its place in the batches is the order's business."""

    def __init__(self, size=64, tokens=120, seed=0):
        draw = np.random.default_rng(7)
        self.rows = [draw.integers(3, VOCAB, draw.integers(2, 9)) for _ in range(size)]
        lengths = np.array([[len(r) + 2, len(r) + 1] for r in self.rows])
        self.batches, self.lengths, self.size, self.tokens = (
            Batches(lengths, tokens, seed, window=24),
            lengths,
            size,
            tokens,
        )

    def after(self, position):
        return self.batches.after(position)

    def pieces(self, examples, tokens):
        return micro(examples, self.lengths, tokens)

    def lesson(self, examples, epoch):
        rows = Ragged.of([self.rows[i] for i in examples])
        made = seq2seq(rows, rows, Marks(pad=0, bos=1, eos=2))
        return dataclasses.replace(made, keep=np.ones_like(made.keep))


def model(dropout=0.1, seed=0):
    return transformer(VOCAB, d_model=8, heads=2, layers=1, d_ff=16, dropout=dropout).build(seed=seed)


def trainer(steps=20, listeners=(), dropout=0.1, source=None, net=None, evaluate=None, team=None, **settings):
    given = {"max_steps": steps, "batch_tokens": 120, "seed": 3, "save_steps": 5, "smoothing": 0.1, **settings}
    return Trainer(
        net or model(dropout),
        objectives.words,
        source or Copies(),
        Cosine(1e-2, 5, steps),
        read(given),
        listeners=listeners,
        evaluate=evaluate,
        team=team,
    )


def mean_loss(net):
    """An evaluation that draws on every kind of chance there is; the training stream must not notice."""
    import torch

    copies = Copies(16)
    batch = objectives.to_tensors(copies.lesson(np.arange(16), 0))
    torch.rand(7)
    np.random.rand()
    loss = float(objectives.words(net, batch)) / objectives.how_many(batch, objectives.words)
    return Scored((-loss,), {"loss": loss})


class Diary:
    """What each step was: its loss, norm and examples, unsorted."""

    def __init__(self):
        self.lines = []

    def __call__(self, event):
        if type(event).__name__ == "Stepped":
            self.lines.append(json.dumps([event.step, event.loss, event.norm, event.examples.tolist()]))
