"""Normalisations: what keeps the residual stream in range."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.core.kinds import Norm
from headwater.parts import must, part


@part
class LayerNorm(Norm):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, with the biased variance and eps inside the root."""

    eps: float = 1e-5
    bias: bool = True

    def __post_init__(self) -> None:
        must(self.eps > 0, self, "eps must be above 0", self.eps, "1e-5 is usual")

    def build(self, d_model: int) -> nn.Module:
        return nn.LayerNorm(d_model, self.eps, bias=self.bias)


@part
class RMSNorm(Norm):
    """y = x / sqrt(mean(x²) + eps) * weight: no mean is taken away and nothing is added."""

    eps: float = 1e-6

    def __post_init__(self) -> None:
        must(self.eps > 0, self, "eps must be above 0", self.eps, "1e-6 is usual")

    def build(self, d_model: int) -> nn.Module:
        return nn.RMSNorm(d_model, self.eps)


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


class OffsetRMSNormLayer(nn.Module):
    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.empty(d_model))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)
