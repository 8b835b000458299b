"""Gradient norms per layer, gradient clipping, gradient spikes, and the loss scale of fp16 (GradScaler)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headwater.training.distributed import to_local

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LAYER = re.compile(r".*?\blayers\.\d+|head\b|[^.]+(?:\.[^.]+)?")
SumOverRanks = Callable[[Sequence[float]], list[float]]


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    """Mixed precision (bf16, fp16) of the forward pass; nothing for fp32."""
    return torch.autocast(device.type, DTYPES.get(dtype), enabled=dtype in ("bf16", "fp16"))


def layer_name(path: str) -> str:
    """
    >>> paths = ("decoder.layers.3.ffn.up.weight", "encoder.embed.tokens.weight", "head.out.bias")
    >>> [layer_name(path) for path in paths]
    ['decoder.layers.3', 'encoder.embed', 'head']
    """
    match = _LAYER.match(path)
    return match[0] if match else path


class GradNorms(NamedTuple):
    """L2 norms of a gradient: in total and per layer. total² = Σ per_layer²."""

    total: float
    per_layer: dict[str, float]


class ModelGradients:
    """The gradients of a model: norms and clipping, where a rank may hold shards of them."""

    def __init__(self, model: nn.Module) -> None:
        trainable = [(layer_name(path), p) for path, p in model.named_parameters() if p.requires_grad]
        self.layers = list(dict.fromkeys(layer for layer, _ in trainable))
        self.trainable = [(self.layers.index(layer), p) for layer, p in trainable]

    def local_grads(self) -> list[tuple[int, Tensor]]:
        """(layer index, gradient or its local shard) of every parameter that has one."""
        return [(layer, to_local(p.grad)) for layer, p in self.trainable if p.grad is not None]

    @torch.no_grad()
    def norms(self, sum_over_ranks: SumOverRanks, loss_scale: float = 1.0) -> GradNorms:
        """Gradient norms. sum_over_ranks: adds up over ranks that hold shards; loss_scale: divided out."""
        grads = self.local_grads()
        squares = [0.0] * len(self.layers)
        if grads:
            for (layer, _), norm in zip(
                grads, torch.stack(torch._foreach_norm([g for _, g in grads])).tolist(), strict=True
            ):
                squares[layer] += norm * norm
        squares = sum_over_ranks(squares)
        per_layer = {name: math.sqrt(square) / loss_scale for name, square in zip(self.layers, squares, strict=True)}
        return GradNorms(math.sqrt(sum(squares)) / loss_scale, per_layer)

    @torch.no_grad()
    def clip_(self, total_norm: float, max_norm: float, loss_scale: float = 1.0) -> None:
        """Gradient clipping: scale the gradients to at most max_norm (0: no limit), with loss_scale divided out."""
        factor = min(1.0, max_norm / (total_norm + 1e-6) if max_norm > 0 else 1.0) / loss_scale
        if factor != 1.0 and (grads := self.local_grads()):
            torch._foreach_mul_([g for _, g in grads], factor)


@dataclass
class GradScaler:
    """Loss scaling: fp16 underflows small gradients, so the loss is multiplied before the backward pass.

    The scale doubles after GROWTH_INTERVAL good steps in a row and halves when a gradient overflows, as that of
    torch.amp.GradScaler; but never below 1, and clipping divides by it in float64.
    """

    scale: float = 1.0
    good_steps: int = 0

    GROWTH_INTERVAL = 2000
    INIT_SCALE = 2.0**16

    def update(self, finite: bool) -> None:
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(1.0, self.scale / 2)
        elif self.good_steps == self.GROWTH_INTERVAL:
            self.scale *= 2
            self.good_steps = 0


def spike_ratio(norm: float, history: Sequence[float], min_history: int = 16) -> float:
    """Gradient norm over the median of its history; 0 while the history is too short."""
    return norm / max(median(history), 1e-30) if len(history) >= min_history else 0.0
