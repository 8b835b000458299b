"""A trainer small enough to be run hundreds of times: a copy task, a model of some thousand weights."""

from __future__ import annotations

import dataclasses
import json

import numpy as np

from headwater.data.collate import SpecialTokens, seq2seq_batch
from headwater.data.dataset import BatchSampler, StatelessData, micro_batches
from headwater.data.ragged import Ragged
from headwater.families.builders import transformer
from headwater.tasks.batch import num_targets, to_tensors
from headwater.tasks.language_model import lm_loss
from headwater.training.config import parse_config
from headwater.training.schedules import CosineSchedule
from headwater.training.setup import prepare_model
from headwater.training.state import EvalResult
from headwater.training.trainer import Trainer

VOCAB = 12


class Copies(StatelessData):
    """Sequences to be copied. Example i is a function of i; its place in the batches is the order's business."""

    def __init__(self, size=64, tokens=120, seed=0):
        draw = np.random.default_rng(7)
        self.rows = [draw.integers(3, VOCAB, draw.integers(2, 9)) for _ in range(size)]
        lengths = np.array([[len(r) + 2, len(r) + 1] for r in self.rows])
        self.batches, self.lengths, self.size, self.tokens = (
            BatchSampler(lengths, tokens, seed, window=24),
            lengths,
            size,
            tokens,
        )

    def batches_from(self, position):
        return self.batches.iter_from(position)

    def micro_batches(self, examples, max_tokens):
        return micro_batches(examples, self.lengths, max_tokens)

    def collate(self, examples, epoch):
        rows = Ragged.from_rows([self.rows[i] for i in examples])
        made = seq2seq_batch(rows, rows, SpecialTokens(pad_id=0, bos_id=1, eos_id=2))
        return dataclasses.replace(made, attention_mask=np.ones_like(made.attention_mask))


def model(dropout=0.1, seed=0):
    return transformer(VOCAB, d_model=8, heads=2, layers=1, d_ff=16, dropout=dropout).build(seed=seed)


def trainer(
    steps=20, listeners=(), dropout=0.1, source=None, net=None, evaluate=None, output=None, dist=None, **settings
):
    given = {
        "max_steps": steps,
        "batch_tokens": 120,
        "seed": 3,
        "checkpoint_steps": 5,
        "label_smoothing": 0.1,
        **settings,
    }
    config = parse_config(given)
    net = net or model(dropout)
    prepare_model(net, config, dist.world_size if dist else 1)
    return Trainer(
        net,
        lm_loss,
        source or Copies(),
        CosineSchedule(1e-2, 5, steps),
        config,
        evaluate_fn=evaluate,
        output=output,
        callbacks=listeners,
        dist=dist,
    )


def mean_loss(net):
    """An evaluation that draws on every kind of chance there is; the training stream must not notice."""
    import torch

    copies = Copies(16)
    batch = to_tensors(copies.collate(np.arange(16), 0))
    torch.rand(7)
    np.random.rand()
    loss = float(lm_loss(net, batch)) / num_targets(batch)
    return EvalResult((-loss,), {"loss": loss})


class Diary:
    """What each step was: its loss, norm and examples, unsorted."""

    def __init__(self):
        self.lines = []

    def __call__(self, event):
        if type(event).__name__ == "StepEvent":
            self.lines.append(json.dumps([event.step, event.loss, event.grad_norm, event.examples.tolist()]))
