"""12. The copy task: train a small model to repeat its source, and measure the exact match of greedy decoding."""

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
from headwater.reference.optimizer import Adam, clip, warmup_cosine

PADDING = 0
START = 1
STOP = 2
SYMBOLS = 10
VOCAB = 3 + SYMBOLS
SHORTEST = 3
LONGEST = 8
WARMUP = 50

SIZES = {
    name: Config(VOCAB, d_model=d, heads=h, layers=n, d_ff=f, norm_position="pre", dropout=0.0, shared=True)
    for name, d, h, n, f in (("Mini", 32, 2, 1, 64), ("Small", 64, 4, 2, 256), ("Medium", 128, 8, 4, 512))
}


@dataclass(frozen=True)
class Batch:
    """A batch: source w₁ … w_n; decoder_input START w₁ … w_n; targets w₁ … w_n STOP; padded on the right."""

    source: Array
    decoder_input: Array
    targets: Array


def batch(rng: np.random.Generator, rows: int) -> Batch:
    """Random sentences of SHORTEST to LONGEST symbols."""
    lengths = rng.integers(SHORTEST, LONGEST + 1, (rows, 1))
    words = rng.integers(STOP + 1, VOCAB, (rows, LONGEST))
    source = np.where(np.arange(LONGEST) < lengths, words, PADDING)
    decoder_input = np.concatenate([np.full((rows, 1), START), source], axis=1)
    targets = np.concatenate([source, np.full((rows, 1), PADDING)], axis=1)
    targets[np.arange(rows), lengths[:, 0]] = STOP
    return Batch(source, decoder_input, targets)


@dataclass(frozen=True)
class Report:
    """The result of training: the model, its losses, the time, and the exact match on new sentences."""

    model: Transformer
    losses: list[float]
    seconds: float
    exact: float

    @property
    def parameters(self) -> int:
        return sum(array.size for array in self.model.values.values())


def train(config: Config, steps: int, seed: int = 0, rows: int = 32) -> Report:
    """Training with teacher forcing: the decoder reads the correct previous tokens and predicts the next."""
    rng = np.random.default_rng(seed)
    lr = 0.04 * config.d_model**-0.5  # a smaller learning rate for wider models
    model = Transformer(config, seed=seed)
    adam = Adam()
    losses = []
    start_time = time.perf_counter()
    for step in range(1, steps + 1):
        losses.append(train_step(model, adam, batch(rng, rows), lr * warmup_cosine(step, WARMUP, steps), rng))
    seconds = time.perf_counter() - start_time
    return Report(model, losses, seconds, exact_match(model, batch(np.random.default_rng(seed + 1), 500)))


def train_step(model: Transformer, adam: Adam, b: Batch, lr: float, rng: np.random.Generator) -> float:
    """One training step; returns the loss."""
    # forward
    drop = Dropout(model.config.dropout, rng) if model.config.dropout else no_dropout
    logits, backward = model(
        b.decoder_input,
        source=b.source,
        attention_mask=b.decoder_input != PADDING,
        source_attention_mask=b.source != PADDING,
        drop=drop,
    )
    loss, loss_backward = cross_entropy(logits, b.targets, PADDING, smoothing=0.1)

    # backward
    gradients = backward(loss_backward())

    # update
    clip(gradients, 1.0)
    adam.step(model.values, gradients, lr)
    return loss


def exact_match(model: Transformer, b: Batch) -> float:
    """Exact match: the fraction of rows that greedy decoding copies without a mistake."""
    generated = greedy(model, [[START]] * len(b.source), STOP, LONGEST + 2, b.source, b.source != PADDING)
    expected = [[int(symbol) for symbol in row if symbol != PADDING] for row in b.source]
    return float(np.mean([a == b for a, b in zip(generated, expected, strict=True)]))
