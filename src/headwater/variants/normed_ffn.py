"""Gated feed-forward layer with a norm on its hidden values (NormFormer, Shleifer et al. 2021)."""

from __future__ import annotations

from torch import Tensor, nn

from headwater.core import functional
from headwater.core.base import BranchLayerSpec, NormSpec, check_dropout, check_positive
from headwater.core.feedforward import get_activation
from headwater.core.modules import Dropout
from headwater.i18n import _
from headwater.parts import part


@part
class NormedGatedFeedForward(BranchLayerSpec):
    """Gated feed-forward layer with an inner norm: down(norm(act(gate(x)) · up(x)))."""

    d_ff: int
    norm: NormSpec
    activation: str = "gelu"
    bias: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        get_activation(self.activation)
        check_positive(self, "d_ff", _("4 · d_model is usual"))
        check_dropout(self)

    def build(self, d_model: int) -> nn.Module:
        return NormedGatedFeedForwardLayer(self, d_model)


class NormedGatedFeedForwardLayer(nn.Module):
    """gate, up [D -> F], norm [F], down [F -> D]."""

    def __init__(self, spec: NormedGatedFeedForward, d_model: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, spec.d_ff, spec.bias)
        self.up = nn.Linear(d_model, spec.d_ff, spec.bias)
        self.norm = spec.norm.build(spec.d_ff)
        self.down = nn.Linear(spec.d_ff, d_model, spec.bias)
        self.act = get_activation(spec.activation)
        self.dropout = Dropout(spec.dropout)

    def forward(self, x: Tensor, *_: object) -> Tensor:
        """x [..., D] -> [..., D]"""
        gate = self.act(functional.linear(x, self.gate))  # [..., F]
        hidden = self.norm(gate * functional.linear(x, self.up))  # [..., F]
        return functional.linear(self.dropout(hidden), self.down)
