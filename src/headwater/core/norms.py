"""Normalisations: what keeps the residual stream in range."""

from __future__ import annotations

from torch import Tensor, nn

from headwater.core.kinds import Norm
from headwater.machine.norm import norm_of_sum
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
class OffsetRMSNorm(RMSNorm):
    """RMSNorm whose weight is stored as its distance from one (Gemma)."""

    def build(self, d_model: int) -> nn.Module:
        return OffsetRMSNormLayer(d_model, self.eps)


@part
class NoNorm(Norm):
    """Leaves x as it is."""

    def build(self, d_model: int) -> nn.Module:
        return nn.Identity()


class LayerNormLayer(nn.LayerNorm):
    takes_branch = True  # called as norm(x, y, p) it gives norm(x + dropout(y))

    def forward(self, x: Tensor, y: Tensor | None = None, p: float = 0.0) -> Tensor:
        return norm_of_sum(x, y, p, self.weight, self.bias, self.eps, centred=True)


class RMSNormLayer(nn.RMSNorm):
    takes_branch = True

    def forward(self, x: Tensor, y: Tensor | None = None, p: float = 0.0) -> Tensor:
        return norm_of_sum(x, y, p, self.gain(), None, self.eps or 0.0, centred=False)

    def gain(self) -> Tensor:
        return self.weight


class OffsetRMSNormLayer(RMSNormLayer):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def gain(self) -> Tensor:
        return 1 + self.weight
