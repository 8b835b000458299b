"""Normalisations: what keeps the residual stream in range."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.core.kinds import Norm
from headwater.machine.dropout import add_dropout
from headwater.machine.norm import normed, norms
from headwater.parts import must, part


@part
class LayerNorm(Norm):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, with the biased variance and eps inside the root."""

    eps: float = 1e-5
    bias: bool = True

    def __post_init__(self) -> None:
        must(self.eps > 0, self, "eps must be above 0", self.eps, "1e-5 is usual")

    def build(self, d_model: int) -> nn.Module:
        return LayerNormLayer(d_model, self.eps, bias=self.bias)


@part
class RMSNorm(Norm):
    """y = x / sqrt(mean(x²) + eps) * weight: no mean is taken away and nothing is added."""

    eps: float = 1e-6

    def __post_init__(self) -> None:
        must(self.eps > 0, self, "eps must be above 0", self.eps, "1e-6 is usual")

    def build(self, d_model: int) -> nn.Module:
        return RMSNormLayer(d_model, self.eps)


@part
class OffsetRMSNorm(Norm):
    """RMSNorm whose weight is stored as its distance from one (Gemma)."""

    eps: float = 1e-6

    def __post_init__(self) -> None:
        must(self.eps > 0, self, "eps must be above 0", self.eps, "1e-6 is usual")

    def build(self, d_model: int) -> nn.Module:
        return OffsetRMSNormLayer(d_model, self.eps)


@part
class NoNorm(Norm):
    """Leaves x as it is."""

    def build(self, d_model: int) -> nn.Module:
        return nn.Identity()


class Adding(nn.Module):
    """A norm that takes in what a branch adds: norm(x + dropout(y)), one pass over memory where it learns on a CPU."""

    centred = False
    eps: Any
    weight: nn.Parameter
    bias: Any

    def forward(self, x: Tensor, y: Tensor | None = None, p: float = 0.0) -> Tensor:
        weight = self.gain()
        if norms(x, weight, y):
            return normed(x, weight, self.bias, self.eps, self.centred, y, p)
        return self.formula(x if y is None else add_dropout(x, y, p) if p else x + y)

    def gain(self) -> Tensor:
        return self.weight

    def formula(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class LayerNormLayer(Adding, nn.LayerNorm):
    centred = True

    def formula(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class RMSNormLayer(Adding, nn.RMSNorm):
    bias = None

    def formula(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class OffsetRMSNormLayer(Adding):
    bias = None

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.empty(d_model))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def gain(self) -> Tensor:
        return 1 + self.weight

    def formula(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.gain(), self.eps)
