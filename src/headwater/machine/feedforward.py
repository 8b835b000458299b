"""down(dropout(act(up(x)))) for training: two maps, and what lies between them on numbers that are still at hand.

On the way back the slope of the activation, the dropout and the sums of the first bias are worked out inside the
product that comes down from the second map: what lies between them is written once, and not read for these alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from headwater.machine.dropout import Drop, dropout
from headwater.machine.library import serves
from headwater.machine.linear import (
    GELU,
    RELU,
    Linear,
    multiplies,
    plain,
    product,
    product_back,
    rows_of,
    weights_back,
)

ACTS: dict[Callable[[Tensor], Tensor], int] = {F.relu: RELU, F.gelu: GELU}


def feed_forward(up: nn.Module, act: Callable[[Tensor], Tensor], p: float, down: nn.Module, x: Tensor) -> Tensor:
    """down(dropout(act(up(x)), p)), in one go where the activation is known here and nobody listens to the maps."""
    if act in ACTS and plain(up) and plain(down) and _fit(x, up, down):
        return _FeedForward.apply(x, up.weight, up.bias, down.weight, down.bias, ACTS[act], Drop.drawn(p))
    hidden = act(up(x))
    return down(dropout(hidden, p) if p else hidden)


def _fit(x: Tensor, up: Linear, down: Linear) -> bool:
    """Both maps are for C, what one gives is what the other takes, and the result is as wide as x."""
    return (
        multiplies(x, up.weight, up.bias)
        and down.weight.shape == up.weight.shape[::-1]
        and multiplies(x, down.weight.t())
        and (down.bias is None or (down.bias.shape == x.shape[-1:] and serves(down.bias)))
    )


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor, b: Tensor | None, down: Tensor, c: Tensor | None, act: int, drop: Drop
    ) -> Tensor:
        flat = rows_of(x)
        z, hidden = product(flat, up, True, b, act, drop)
        ctx.act, ctx.drop = act, drop
        ctx.save_for_backward(flat, up, down, z, hidden)
        return product(hidden, down, True, c)[0].view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        x, up, down, z, hidden = ctx.saved_tensors
        of_x, of_up, of_b, of_down, of_c, *_ = ctx.needs_input_grad
        shape, above = above.shape, rows_of(above)
        d_down, d_c = weights_back(above, hidden) if of_down else None, above.sum(0) if of_c else None
        dz, d_b = product_back(above, down, ctx.act, ctx.drop, z)
        d_x = product(dz, up, False)[0].view(shape) if of_x else None
        return d_x, weights_back(dz, x) if of_up else None, d_b if of_b else None, d_down, d_c, None, None
