"""Linear maps for training: x · Wᵀ + b, and the activation and dropout that follow, on numbers that are still at hand.

The library of matrix products that torch brings is good at large squares; on a layer's long thin matrices panels in the
first cache are faster, and what comes next costs no pass over memory. The slope of W, a sum over many rows, is left to
torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from headwater.machine.dropout import Drop, dropout
from headwater.machine.library import at, function, serves

FEW = 2**25  # multiplications below which laying W out, and calling C, would not pay
DEEP, BLOCKS = 512, 8  # as in linear.c
NONE, RELU, GELU = range(3)
ACTS: dict[Callable[[Tensor], Tensor], int] = {F.relu: RELU, F.gelu: GELU}


class Linear(nn.Linear):
    """y = x · Wᵀ + b"""

    def forward(self, x: Tensor) -> Tensor:
        if multiplies(x, self.weight):
            return _Linear.apply(x, self.weight, self.bias, NONE, Drop.drawn(0.0))
        return F.linear(x, self.weight, self.bias)


def activated(up: nn.Module, act: Callable[[Tensor], Tensor], p: float, x: Tensor) -> Tensor:
    """dropout(act(up(x)), p), in one pass where the activation is known here and nobody listens to `up` itself."""
    if act in ACTS and type(up) is Linear and not _listened_to(up) and multiplies(x, up.weight):
        return _Linear.apply(x, up.weight, up.bias, ACTS[act], Drop.drawn(p))
    hidden = act(up(x))
    return dropout(hidden, p) if p else hidden


def _listened_to(module: nn.Module) -> bool:
    """Hooks of any kind: some hear, others make the weight anew before it is used (pruning, spectral norms)."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def multiplies(x: Tensor, weight: Tensor) -> bool:
    """Enough work, whole panels, and something to learn: what only reads does as torch does, to the last bit."""
    return (
        torch.is_grad_enabled()
        and serves(x, weight)  # before sizes are asked: a graph for any length must not depend on them
        and x.shape[-1] == weight.shape[1]
        and x.numel() * weight.shape[0] >= FEW
        and not (weight.shape[0] % 16 or weight.shape[1] % 16)
        and not torch.is_autocast_enabled("cpu")
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, act: int, drop: Drop) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        y, hidden = _product(flat, weight, True, bias, act, drop)
        ctx.act, ctx.drop = act, drop
        ctx.save_for_backward(flat, weight, y if act else None)
        return hidden.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, y = ctx.saved_tensors
        shape, above, d_bias = (*above.shape[:-1], -1), above.reshape(-1, len(weight)).contiguous(), None
        if ctx.act:
            above, d_bias = _act_back(y, above, ctx.act, ctx.drop)
        elif ctx.needs_input_grad[2]:
            d_bias = above.sum(0)
        d_x = _product(above, weight, False)[0].view(shape) if ctx.needs_input_grad[0] else None
        d_weight = above.t() @ x if ctx.needs_input_grad[1] else None
        return d_x, d_weight, d_bias if ctx.needs_input_grad[2] else None, None, None


def _product(
    x: Tensor, w: Tensor, turned: bool, bias: Tensor | None = None, act: int = NONE, drop: Drop | None = None
) -> tuple[Tensor, Tensor]:
    """y [M, N] = x · Wᵀ + bias where W is turned, else x · W; and dropout(act(y)), of a ReLU in the same memory."""
    w, (m, k) = w.contiguous(), x.shape
    n = w.numel() // k
    y, space = x.new_empty(m, n), x.new_empty(n * min(k, DEEP))
    hidden = torch.empty_like(y) if act == GELU else y
    drop = drop or Drop.drawn(0.0)
    _run("linear")(at(x), at(w), int(turned), at(bias), m, n, k, act, drop, *map(at, (y, hidden, space)))
    return y, hidden


def _act_back(y: Tensor, above: Tensor, act: int, drop: Drop) -> tuple[Tensor, Tensor]:
    m, n = y.shape
    dz, sums, d_bias = torch.empty_like(y), y.new_zeros(BLOCKS, n), y.new_zeros(n)
    _run("act_back")(at(y), at(above), m, n, act, drop, *map(at, (dz, sums, d_bias)))
    return dz, d_bias


@lru_cache
def _run(name: str) -> Any:
    pointer, whole, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    if name == "linear":
        return function(name, None, pointer, pointer, flag, pointer, *[whole] * 3, flag, Drop, *[pointer] * 3)
    return function(name, None, pointer, pointer, whole, whole, flag, Drop, *[pointer] * 3)
