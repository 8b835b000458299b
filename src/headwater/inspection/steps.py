"""One training step on random tokens, ours beside torch.nn.Transformer's: how fast is this machine at learning?

Ours is the Trainer's own step; theirs is the plain one: loss, backward, clip, fused AdamW. Both drop nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.core import decoder, transformer
from headwater.core.model import Model
from headwater.data.batches import Batch
from headwater.data.objectives.lesson import Lesson
from headwater.training.loop import Trainer
from headwater.training.objectives import words
from headwater.training.schedules import Constant
from headwater.training.settings import read

RATE, BETAS, DECAY, CLIP = 1e-4, (0.9, 0.98), 0.01, 1.0


class Given(NamedTuple):
    """source [B, S] (for an encoder), ids [B, Q] what is read, targets [B, Q] what must be said."""

    source: Tensor
    ids: Tensor
    targets: Tensor


Step = Callable[[Given], float]


class Work(NamedTuple):
    d_model: int
    heads: int
    layers: int
    d_ff: int
    vocab: int
    rows: int
    length: int
    two: bool  # encoder and decoder, or a decoder alone

    def given(self, seed: int = 0) -> Given:
        chance = torch.Generator().manual_seed(seed)
        return Given(*torch.randint(4, self.vocab, (3, self.rows, self.length), generator=chance))

    @property
    def flop(self) -> float:
        """Of the matrix products of one step: backward twice forward, attention over all pairs of places."""
        d, tokens = self.d_model, self.rows * self.length
        attention = 2 * tokens * (4 * d * d) + 4 * tokens * self.length * d
        one = attention + 2 * tokens * (2 * d * self.d_ff)
        layers = 2 * one + attention if self.two else one
        return 3 * (self.layers * layers + 2 * tokens * d * self.vocab)


WORKS = {
    "a": Work(256, 4, 3, 1024, 8_000, 64, 32, two=True),
    "c": Work(384, 6, 6, 1536, 65, 12, 256, two=False),
    "small": Work(128, 4, 2, 512, 2_000, 32, 32, two=True),
}


class Lessons:
    """A source of one lesson at a time: the batch whose turn it is."""

    size = 1
    now: Given

    def __init__(self, two: bool) -> None:
        self.two = two

    def after(self, position: int) -> Iterator[Batch]:
        return iter(())

    def pieces(self, examples: np.ndarray, tokens: int) -> list[np.ndarray]:
        return [examples]

    def lesson(self, examples: np.ndarray, epoch: int) -> Lesson:
        source, ids, targets = (part.numpy() for part in self.now)
        keep = np.ones(ids.shape, bool)
        return Lesson(ids, keep, targets, source, keep) if self.two else Lesson(ids, keep, targets)


def trainer_step(spec: Model, **settings: Any) -> Step:
    """The Trainer's own step for a model of this spec."""
    model, lessons = spec.build(seed=0).train(), Lessons(spec.encoder is not None)
    usual = {"lr": RATE, "beta1": BETAS[0], "beta2": BETAS[1], "weight_decay": DECAY, "clip": CLIP}
    chosen = read({**usual, "max_steps": 10**6, "batch_tokens": 10**9, **settings})
    heard: list[float] = []
    trainer = Trainer(
        model,
        words,
        lessons,
        Constant(RATE),
        chosen,
        listeners=[lambda event: heard.append(getattr(event, "loss", 0.0))],
    )

    def step(given: Given) -> float:
        lessons.now = given
        trainer.step(Batch(np.arange(len(given.ids)), 0, 0))
        return heard[-1]

    return step


def ours(work: Work) -> Step:
    sizes: dict[str, Any] = {"d_model": work.d_model, "heads": work.heads, "layers": work.layers, "d_ff": work.d_ff}
    sizes["dropout"] = 0.0
    if work.two:
        return trainer_step(transformer(work.vocab, **sizes))
    like_gpt = {"placement": "pre", "activation": "gelu", "position": "learned", "longest": work.length}
    return trainer_step(decoder(work.vocab, **sizes, **like_gpt))


class Torch(nn.Module):
    """torch.nn.Transformer, or its encoder with a causal mask, between one table for what is read and said."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.two, shape = work.two, (work.d_model, work.heads)
        self.tokens, self.places = (nn.Embedding(n, work.d_model) for n in (work.vocab, work.length))
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)
        if work.two:
            self.body: Any = nn.Transformer(*shape, work.layers, work.layers, work.d_ff, 0.0, batch_first=True)
        else:
            layer = nn.TransformerEncoderLayer(*shape, work.d_ff, 0.0, "gelu", batch_first=True, norm_first=True)
            norm = nn.LayerNorm(work.d_model)
            self.body = nn.TransformerEncoder(layer, work.layers, norm, enable_nested_tensor=False)
        self.past = nn.Transformer.generate_square_subsequent_mask(work.length)

    def forward(self, given: Given) -> Tensor:
        read, said = (self.tokens(ids) + self.places.weight[: ids.shape[1]] for ids in given[:2])
        if self.two:
            states = self.body(read, said, tgt_mask=self.past, tgt_is_causal=True)
        else:
            states = self.body(said, mask=self.past, is_causal=True)
        scores = F.linear(states, self.tokens.weight)
        return F.cross_entropy(scores.flatten(0, 1), given.targets.flatten())


def theirs(work: Work) -> Step:
    model = Torch(work)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY, fused=True)

    def step(given: Given) -> float:
        loss = model(given)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def in_turn(steps: dict[str, Step], work: Work, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, all of them once a round; two rounds before the first warm up."""
    given, times = work.given(), {name: list[float]() for name in steps}
    for turn in range(-2, rounds):
        for name, step in steps.items():
            began = time.perf_counter()
            step(given)
            if turn >= 0:
                times[name].append(time.perf_counter() - began)
    return times
