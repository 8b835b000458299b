"""Feed-forward layers: what each position does alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.core.dropout import Dropout
from headwater.core.kinds import Layer
from headwater.errors import BadSetting, nearest
from headwater.machine.feedforward import feed_forward
from headwater.machine.linear import Linear
from headwater.parts import must, part


def gelu_tanh(x: Tensor) -> Tensor:
    """x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³))): within 5e-4 of the exact form, and not the same."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,  # exact: x · Φ(x)
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise BadSetting(f"activation must be one of {known}, got {name!r}; {nearest(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]


@part
class FeedForward(Layer):
    """down(act(up(x))), with dropout on the hidden values."""

    d_ff: int
    activation: str = "relu"
    bias: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check(self)

    def build(self, d_model: int) -> nn.Module:
        return FeedForwardLayer(self, d_model)


@part
class GatedFeedForward(Layer):
    """down(act(gate(x)) · up(x)): SwiGLU with silu, GEGLU with gelu."""

    d_ff: int
    activation: str = "silu"
    bias: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check(self)

    def build(self, d_model: int) -> nn.Module:
        return GatedFeedForwardLayer(self, d_model)


def _check(ffn: FeedForward | GatedFeedForward) -> None:
    activation(ffn.activation)
    must(ffn.d_ff >= 1, ffn, "d_ff must be at least 1", ffn.d_ff, "4 · d_model is usual")
    must(0 <= ffn.dropout < 1, ffn, "dropout must be from 0 up to 1", ffn.dropout, "0.1 is usual")


class FeedForwardLayer(nn.Module):
    def __init__(self, spec: FeedForward, d_model: int) -> None:
        super().__init__()
        self.up = Linear(d_model, spec.d_ff, spec.bias)
        self.down = Linear(spec.d_ff, d_model, spec.bias)
        self.act, self.dropout = activation(spec.activation), Dropout(spec.dropout)

    def forward(self, x: Tensor, *_: object) -> Tensor:
        return feed_forward(self.up, self.act, self.dropout.p if self.training else 0.0, self.down, x)


class GatedFeedForwardLayer(nn.Module):
    def __init__(self, spec: GatedFeedForward, d_model: int) -> None:
        super().__init__()
        self.gate = Linear(d_model, spec.d_ff, spec.bias)
        self.up = Linear(d_model, spec.d_ff, spec.bias)
        self.down = Linear(spec.d_ff, d_model, spec.bias)
        self.act, self.dropout = activation(spec.activation), Dropout(spec.dropout)

    def forward(self, x: Tensor, *_: object) -> Tensor:
        return self.down(self.dropout(self.act(self.gate(x)) * self.up(x)))
