"""12. Something to learn: say again what was read. Easy to state, impossible without attention that finds its place."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from headwater.reference.config import Config
from headwater.reference.decode import greedy
from headwater.reference.gradients import Array
from headwater.reference.loss import cross_entropy
from headwater.reference.model import Transformer
from headwater.reference.ops import Dropout, no_dropout
from headwater.reference.optimiser import Adam, clip, warmup_cosine

PADDING, START, STOP, SYMBOLS = 0, 1, 2, 10
VOCAB = 3 + SYMBOLS
SHORTEST, LONGEST = 3, 8
WARMUP = 50

SIZES = {
    name: Config(VOCAB, d_model=d, heads=h, layers=n, d_ff=f, placement="pre", dropout=0.0, shared=True)
    for name, d, h, n, f in (("Mini", 32, 2, 1, 64), ("Small", 64, 4, 2, 256), ("Medium", 128, 8, 4, 512))
}


@dataclass(frozen=True)
class Batch:
    """source: w₁ … w_n; entry: START w₁ … w_n; goal: w₁ … w_n STOP; shorter rows are padded on the right."""

    source: Array
    entry: Array
    goal: Array


def batch(chance: np.random.Generator, rows: int) -> Batch:
    lengths = chance.integers(SHORTEST, LONGEST + 1, (rows, 1))
    words = chance.integers(STOP + 1, VOCAB, (rows, LONGEST))
    source = np.where(np.arange(LONGEST) < lengths, words, PADDING)
    entry = np.concatenate([np.full((rows, 1), START), source], axis=1)
    goal = np.concatenate([source, np.full((rows, 1), PADDING)], axis=1)
    goal[np.arange(rows), lengths[:, 0]] = STOP
    return Batch(source, entry, goal)


@dataclass(frozen=True)
class Report:
    model: Transformer
    losses: list[float]
    seconds: float
    exact: float

    @property
    def parameters(self) -> int:
        return sum(array.size for array in self.model.values.values())


def train(config: Config, steps: int, seed: int = 0, rows: int = 32) -> Report:
    """Teacher forcing: the decoder reads the right words whatever it would have said, and is asked for the next."""
    chance, rate = np.random.default_rng(seed), 0.04 * config.d_model**-0.5  # wider models take smaller steps
    model, adam, losses, began = Transformer(config, seed=seed), Adam(), [], time.perf_counter()
    for step in range(1, steps + 1):
        losses.append(one_step(model, adam, batch(chance, rows), rate * warmup_cosine(step, WARMUP, steps), chance))
    seconds = time.perf_counter() - began
    return Report(model, losses, seconds, exactness(model, batch(np.random.default_rng(seed + 1), 500)))


def one_step(model: Transformer, adam: Adam, b: Batch, rate: float, chance: np.random.Generator) -> float:
    drop = Dropout(model.config.dropout, chance) if model.config.dropout else no_dropout
    real, source_real = b.entry != PADDING, b.source != PADDING
    logits, back = model(b.entry, source=b.source, keep=real, source_keep=source_real, drop=drop)
    loss, loss_back = cross_entropy(logits, b.goal, PADDING, smoothing=0.1)
    gradients = back(loss_back())
    clip(gradients, 1.0)
    adam.step(model.values, gradients, rate)
    return loss


def exactness(model: Transformer, b: Batch) -> float:
    """The share of rows that greedy decoding copies without a single mistake, its own words being all it reads."""
    said = greedy(model, [[START]] * len(b.source), STOP, LONGEST + 2, b.source, b.source != PADDING)
    wanted = [[int(w) for w in row if w != PADDING] for row in b.source]
    return float(np.mean([a == w for a, w in zip(said, wanted, strict=True)]))
