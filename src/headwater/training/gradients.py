"""Gradients: how long they are, layer by layer, and cut to the length that is allowed; and the scale fp16 needs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headwater.training.spread import mine

_LAYER = re.compile(r".*?\blayers\.\d+|head\b|[^.]+(?:\.[^.]+)?")
Sums = Callable[[Sequence[float]], list[float]]


def layer_of(path: str) -> str:
    """
    >>> layer_of("decoder.layers.3.ffn.up.weight"), layer_of("encoder.embed.tokens.weight"), layer_of("head.out.bias")
    ('decoder.layers.3', 'encoder.embed', 'head')
    """
    found = _LAYER.match(path)
    return found[0] if found else path


class Norms(NamedTuple):
    """Lengths of a gradient: of all of it, and of each layer's part. total² = Σ layers²."""

    total: float
    layers: dict[str, float]


class Gradients:
    def __init__(self, model: nn.Module) -> None:
        learned = [(layer_of(path), p) for path, p in model.named_parameters() if p.requires_grad]
        self.layers = list(dict.fromkeys(layer for layer, _ in learned))
        self.learned = [(self.layers.index(layer), p) for layer, p in learned]

    def here(self) -> list[tuple[int, Tensor]]:
        """The number of the layer, and the gradient, or this process's part of it."""
        return [(layer, mine(p.grad)) for layer, p in self.learned if p.grad is not None]

    @torch.no_grad()
    def norms(self, sums: Sums, scale: float = 1.0) -> Norms:
        """One pass over all gradients. sums: adds up over processes that hold a part each; scale: divided out."""
        here, squares = self.here(), [0.0] * len(self.layers)
        if here:
            for (layer, _), norm in zip(
                here, torch.stack(torch._foreach_norm([g for _, g in here])).tolist(), strict=True
            ):
                squares[layer] += norm * norm
        squares = sums(squares)
        lengths = {name: math.sqrt(square) / scale for name, square in zip(self.layers, squares, strict=True)}
        return Norms(math.sqrt(sum(squares)) / scale, lengths)

    @torch.no_grad()
    def cut(self, norm: float, most: float, scale: float = 1.0) -> None:
        """Scale them so that their length is at most `most` (0: any), once the scale is divided out."""
        factor = min(1.0, most / (norm + 1e-6) if most > 0 else 1.0) / scale
        if factor != 1.0 and (here := self.here()):
            torch._foreach_mul_([g for _, g in here], factor)


@dataclass
class Scale:
    """fp16 loses small gradients, so the loss is multiplied before the way back, and the gradients divided after it.

    Doubled after EVERY good steps in a row, halved when a gradient overflows; it finds its size by overflowing.
    """

    value: float = 1.0
    good: int = 0

    EVERY = 2000
    FIRST = 2.0**16

    def update(self, fine: bool) -> None:
        self.good = self.good + 1 if fine else 0
        if not fine:
            self.value = max(1.0, self.value / 2)
        elif self.good == self.EVERY:
            self.value, self.good = self.value * 2, 0


def times_the_usual(norm: float, before: Sequence[float], least: int = 16) -> float:
    """How many times the median of the steps before a gradient is long; 0 while too few are known."""
    return norm / max(median(before), 1e-30) if len(before) >= least else 0.0
