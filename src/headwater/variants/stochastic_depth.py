"""Stochastic depth (Huang et al. 2016): while training, the residual branch of a row is left out with probability p."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from headwater.core import functional
from headwater.core.base import NormSpec
from headwater.core.norms import NoNorm
from headwater.core.stack import Block
from headwater.i18n import _
from headwater.parts import must, part


@part
class StochasticDepth(NormSpec):
    """The out_norm of a branch: norm(x), while training times 0 (probability `rate`) or 1 / (1 - rate) for each row."""

    rate: float
    norm: NormSpec = NoNorm()

    def __post_init__(self) -> None:
        must(0 <= self.rate < 1, self, _("rate must be from 0 up to 1"), self.rate, _("0.1 is usual"))

    def build(self, d_model: int) -> nn.Module:
        return StochasticDepthLayer(self, d_model)


class StochasticDepthLayer(nn.Module):
    """The module of StochasticDepth."""

    def __init__(self, spec: StochasticDepth, d_model: int) -> None:
        super().__init__()
        self.rate = spec.rate
        self.norm = spec.norm.build(d_model)

    def forward(self, x: Tensor, y: Tensor | None = None, p: float = 0.0) -> Tensor:
        """x [B, Q, D] -> [B, Q, D], where y: the norm of x + dropout(y, p)."""
        x = self.norm(x) if y is None else self.norm(functional.add_dropout(x, y, p))
        if not self.training or not self.rate:
            return x
        kept = torch.rand(len(x), 1, 1, device=x.device, dtype=x.dtype) >= self.rate
        return x * (kept / (1 - self.rate))


def with_stochastic_depth(layers: tuple[Block, ...], rate: float) -> tuple[Block, ...]:
    """The blocks with rates that rise from 0 in the first to `rate` in the last, as in DeiT."""
    return tuple(_dropped(layer, rate * index / max(1, len(layers) - 1)) for index, layer in enumerate(layers))


def _dropped(block: Block, rate: float) -> Block:
    if not rate:
        return block
    return replace(
        block, branches=tuple(replace(b, out_norm=StochasticDepth(rate, b.out_norm)) for b in block.branches)
    )
