"""Linear maps for training: x · Wᵀ + b, their slopes, and the activation that follows, on numbers still at hand.

The library of matrix products that torch brings is good at large squares; on a layer's long thin matrices panels in the
first cache are faster, and what comes next costs no pass over memory.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from headwater.machine.dropout import Drop
from headwater.machine.library import at, function, serves

FEW = 2**25  # multiplications below which laying W out, and calling C, would not pay
DEEP, SUMMED, TALL = 512, 256, 96  # DEEP of linear.c and of weights.c, TALL of six.h
NONE, RELU, GELU = range(3)
ALL = Drop.drawn(0.0)  # nothing is dropped


class Linear(nn.Linear):
    """y = x · Wᵀ + b"""

    def forward(self, x: Tensor) -> Tensor:
        if multiplies(x, self.weight):
            return _Linear.apply(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


def listened_to(module: nn.Module) -> bool:
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
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        flat = rows_of(x)
        ctx.save_for_backward(flat, weight)
        return product(flat, weight, True, bias)[0].view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), shape = ctx.saved_tensors, (*above.shape[:-1], -1)
        of_x, of_weight, of_bias = ctx.needs_input_grad
        above = rows_of(above)
        d_x = product(above, weight, False)[0].view(shape) if of_x else None
        return d_x, weights_back(above, x) if of_weight else None, above.sum(0) if of_bias else None


def rows_of(x: Tensor) -> Tensor:
    """[..., K] -> [M, K], row beside row in memory."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def product(
    x: Tensor, w: Tensor, turned: bool, bias: Tensor | None = None, act: int = NONE, drop: Drop = ALL
) -> tuple[Tensor, Tensor]:
    """y [M, N] = x · Wᵀ + bias where W is turned, else x · W; and dropout(act(y)), of a ReLU in the same memory."""
    w, (m, k) = w.contiguous(), x.shape
    n = w.numel() // k
    y, space = x.new_empty(m, n), x.new_empty(n * min(k, DEEP))
    hidden = torch.empty_like(y) if act == GELU else y
    _run("linear")(at(x), at(w), int(turned), at(bias), m, n, k, act, drop, *map(at, (y, hidden, space)))
    return y, hidden


def weights_back(above: Tensor, x: Tensor) -> Tensor:
    """dW [N, K] = aboveᵀ · x, summed over the M rows of above [M, N] and x [M, K]."""
    (m, n), k = above.shape, x.shape[1]
    d_weight, space = x.new_empty(n, k), x.new_empty(k * SUMMED)
    _run("weights_back")(at(above), at(x), m, n, k, 0, at(d_weight), at(space))
    return d_weight


def product_back(above: Tensor, w: Tensor, act: int, drop: Drop, z: Tensor) -> tuple[Tensor, Tensor]:
    """dz [M, N] = (above · W) · kept · act'(z), and its sums over the rows. A ReLU's result will do as z."""
    w, (m, n), k = w.contiguous(), z.shape, above.shape[1]
    dz, sums, space = torch.empty_like(z), z.new_empty(-(-m // (4 * TALL)) * 4, n), z.new_empty(n * min(k, DEEP))
    _run("linear_back")(at(above), at(w), m, n, k, act, drop, *map(at, (z, dz, sums, space)))
    return dz, sums.sum(0)


@lru_cache
def _run(name: str) -> Any:
    pointer, whole, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    if name == "linear":
        return function(name, None, pointer, pointer, flag, pointer, *[whole] * 3, flag, Drop, *[pointer] * 3)
    if name == "weights_back":
        return function(name, None, pointer, pointer, *[whole] * 3, flag, pointer, pointer)
    return function(name, None, pointer, pointer, *[whole] * 3, flag, Drop, *[pointer] * 4)
