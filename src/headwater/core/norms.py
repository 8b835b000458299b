"""Normalization layers: LayerNorm, RMSNorm, OffsetRMSNorm (Gemma)."""

from __future__ import annotations

from torch import Tensor, nn

from headwater.core import functional
from headwater.core.base import NormSpec
from headwater.i18n import _
from headwater.parts import must, part


@part
class LayerNorm(NormSpec):
    """LayerNorm: y = (x - mean) / sqrt(var + eps) * weight + bias, with the biased variance."""

    eps: float = 1e-5
    bias: bool = True

    def __post_init__(self) -> None:
        must(self.eps > 0, self, _("eps must be above 0"), self.eps, _("1e-5 is usual"))

    def build(self, d_model: int) -> nn.Module:
        return LayerNormLayer(d_model, self.eps, bias=self.bias)


@part
class RMSNorm(NormSpec):
    """RMSNorm: y = x / sqrt(mean(x²) + eps) * weight, without mean and bias."""

    eps: float = 1e-6

    def __post_init__(self) -> None:
        must(self.eps > 0, self, _("eps must be above 0"), self.eps, _("1e-6 is usual"))

    def build(self, d_model: int) -> nn.Module:
        return RMSNormLayer(d_model, self.eps)


@part
class OffsetRMSNorm(RMSNorm):
    """RMSNorm whose stored weight is an offset from one: gain = 1 + weight (Gemma)."""

    def build(self, d_model: int) -> nn.Module:
        return OffsetRMSNormLayer(d_model, self.eps)


@part
class NoNorm(NormSpec):
    """No normalization: identity."""

    def build(self, d_model: int) -> nn.Module:
        return NoNormLayer()


# Every norm layer is called as norm(x), or as norm(x, y, p) = norm(x + dropout(y, p)), in one pass over memory.


class LayerNormLayer(nn.LayerNorm):
    def forward(self, x: Tensor, y: Tensor | None = None, p: float = 0.0) -> Tensor:
        return functional.add_norm(x, y, p, self.weight, self.bias, self.eps, centered=True)


class RMSNormLayer(nn.RMSNorm):
    def forward(self, x: Tensor, y: Tensor | None = None, p: float = 0.0) -> Tensor:
        return functional.add_norm(x, y, p, self.gain(), None, self.eps or 0.0, centered=False)

    def gain(self) -> Tensor:
        return self.weight


class OffsetRMSNormLayer(RMSNormLayer):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def gain(self) -> Tensor:
        return 1 + self.weight


class NoNormLayer(nn.Identity):
    def forward(self, x: Tensor, y: Tensor | None = None, p: float = 0.0) -> Tensor:
        return x if y is None else functional.add_dropout(x, y, p)
