"""The work of a training step, the same for every contender, and how a contender answers when its turn comes.

    (a) encoder-decoder 256/3+3/4/1024, 8,000 words, 64 rows of 32 tokens
    (b) the 2017 paper's base 512/6+6/8/2048, 32,000 words in one table, 16 rows of 64
    (c) a GPT 384/6/6 over 65 characters, 12 rows of 256

Where values may be dropped: at the embedding, on every branch before it joins the residual stream, on the attention
weights, and inside the feed-forward. A contender says which of these places it really serves.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

PLACES = {
    "none": (),
    "residual": ("embedding", "residual"),
    "attention": ("embedding", "residual", "attention"),
    "everywhere": ("embedding", "residual", "attention", "ffn"),
}
RATE, CLIP, BETAS, DECAY = 1e-4, 1.0, (0.9, 0.98), 0.01


class Work(NamedTuple):
    d_model: int
    heads: int
    layers: int
    d_ff: int
    vocab: int
    rows: int
    length: int
    is_encoder_decoder: bool  # encoder and decoder, or a decoder alone
    tied: bool = True

    @property
    def flops_per_step(self) -> float:
        """Of the matrix products of one step: backward twice forward, attention over all pairs of places."""
        d, tokens = self.d_model, self.rows * self.length
        attention = 2 * tokens * (4 * d * d) + 4 * tokens * self.length * d
        one = attention + 2 * tokens * (2 * d * self.d_ff)
        layers = 2 * one + attention if self.is_encoder_decoder else one
        return 3 * (self.layers * layers + 2 * tokens * d * self.vocab)


WORKS = {
    "a": Work(256, 4, 3, 1024, 8_000, 64, 32, is_encoder_decoder=True),
    "b": Work(512, 8, 6, 2048, 32_000, 16, 64, is_encoder_decoder=True),
    "c": Work(384, 6, 6, 1536, 65, 12, 256, is_encoder_decoder=False),
    "tiny": Work(64, 4, 2, 256, 1_000, 8, 16, is_encoder_decoder=True),  # to try the bench itself
    "tiny-gpt": Work(64, 4, 2, 256, 65, 4, 64, is_encoder_decoder=False),
}


class Batch(NamedTuple):
    """source [B, S] (not for a decoder alone), ids [B, Q] what the decoder reads, targets [B, Q] what it must say."""

    source: Tensor
    ids: Tensor
    targets: Tensor


def batches(work: Work, number: int = 8) -> list[Batch]:
    """Random tokens, the same for every contender; 0 to 3 are kept free for marks."""
    chance = torch.Generator().manual_seed(0)
    shape = (number, 3, work.rows, work.length)
    return [Batch(*three) for three in torch.randint(4, work.vocab, shape, generator=chance)]


class Asked(NamedTuple):
    work: Work
    p: float  # the share that is dropped
    places: tuple[str, ...]
    compiled: bool
    kind: str


def asked() -> Asked:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--places", choices=PLACES, default="none")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--kind", default="")
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    places = PLACES[given.places]
    return Asked(WORKS[given.work], given.dropout if places else 0.0, places, given.compile, given.kind)


Loss = Callable[[Batch], Tensor]


def plain_step(model: nn.Module, loss: Loss) -> Callable[[Batch], float]:
    """Forward, backward, clip, AdamW: as everyone writes it, with torch's fused optimizer for everyone."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY, fused=True)

    def step(batch: Batch) -> float:
        value = loss(batch)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.item()

    return step


def serve(step: Callable[[Batch], float], work: Work, drops: Iterable[str], parameters: int, warm: int = 2) -> None:
    """Two steps to warm up, then one step for every line."""
    given, began = batches(work), time.perf_counter()
    losses = [step(batch) for batch in given[:warm]]
    seconds = time.perf_counter() - began
    facts = {"parameters": parameters, "drops": list(drops), "warm-up seconds": seconds, "losses": losses}
    print(json.dumps(facts), flush=True)
    for turn, _ in enumerate(sys.stdin):
        began, worked = time.perf_counter(), time.process_time()
        loss = step(given[turn % len(given)])
        took, worked = time.perf_counter() - began, time.process_time() - worked
        figures = {"ms a step": 1000 * took, "processor ms": 1000 * worked, "tokens/s": work.rows * work.length / took}
        figures["loss"] = loss
        print(json.dumps(figures), flush=True)


def serve_model(model: nn.Module, loss: Loss, asked: Asked, serves: Iterable[str]) -> None:
    """A peer's model with the plain step. serves: the places in which it is able to drop, or always drops."""
    model.train()
    drops = [place for place in serves if asked.p]
    serve(plain_step(model, loss), asked.work, drops, count(model))


def count(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


def maybe_compiled(model: Any, asked: Asked) -> Any:
    return torch.compile(model) if asked.compiled else model
