"""Feed-forward layers and activation functions, applied to each position separately."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.core import functional
from headwater.core.base import BranchLayerSpec, check_dropout, check_positive, choose
from headwater.core.modules import Dropout
from headwater.i18n import _
from headwater.parts import part

ACTIVATIONS: dict[str, functional.Activation] = {
    "relu": F.relu,
    "gelu": F.gelu,  # exact: x · Φ(x)
    "gelu_tanh": functional.gelu_tanh,
    "quick_gelu": functional.quick_gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


def get_activation(name: str) -> functional.Activation:
    """The activation function of that name."""
    return choose(name, ACTIVATIONS, "activation")


@part
class FeedForward(BranchLayerSpec):
    """Feed-forward layer: down(act(up(x))), with dropout on the hidden values."""

    d_ff: int
    activation: str = "relu"
    bias: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check_feed_forward(self)

    def build(self, d_model: int) -> nn.Module:
        return FeedForwardLayer(self, d_model)


@part
class GatedFeedForward(BranchLayerSpec):
    """Gated feed-forward layer: down(act(gate(x)) · up(x)): SwiGLU with silu, GEGLU with gelu."""

    d_ff: int
    activation: str = "silu"
    bias: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check_feed_forward(self)

    def build(self, d_model: int) -> nn.Module:
        return GatedFeedForwardLayer(self, d_model)


def _check_feed_forward(ffn: FeedForward | GatedFeedForward) -> None:
    get_activation(ffn.activation)
    check_positive(ffn, "d_ff", _("4 · d_model is usual"))
    check_dropout(ffn)


class FeedForwardLayer(nn.Module):
    def __init__(self, spec: FeedForward, d_model: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, spec.d_ff, spec.bias)
        self.down = nn.Linear(spec.d_ff, d_model, spec.bias)
        self.act = get_activation(spec.activation)
        self.dropout = Dropout(spec.dropout)

    def forward(self, x: Tensor, *_: object) -> Tensor:
        """x [..., D] -> [..., D]"""
        return functional.feed_forward(x, self.up, self.act, self.dropout.rate, self.down)


class GatedFeedForwardLayer(nn.Module):
    def __init__(self, spec: GatedFeedForward, d_model: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, spec.d_ff, spec.bias)
        self.up = nn.Linear(d_model, spec.d_ff, spec.bias)
        self.down = nn.Linear(spec.d_ff, d_model, spec.bias)
        self.act = get_activation(spec.activation)
        self.dropout = Dropout(spec.dropout)

    def forward(self, x: Tensor, *_: object) -> Tensor:
        """x [..., D] -> [..., D]"""
        gate = self.act(functional.linear(x, self.gate))  # [..., F]
        hidden = self.dropout(gate * functional.linear(x, self.up))  # [..., F]
        return functional.linear(hidden, self.down)
