"""Linear maps for training: x · Wᵀ + b, their slopes, and the activation that follows, on numbers still at hand.

The library of matrix products that torch brings is good at large squares; on a layer's long thin matrices panels in the
first cache are faster, and what comes next costs no pass over memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from headwater.machine.dropout import Drop
from headwater.machine.library import function, serves
from headwater.machine.pointers import Misfit, floats

FEW = 2**25  # multiplications below which laying W out, and calling C, would not pay
DEEP, SUMMED, TALL = 512, 256, 96  # DEEP of linear.c and of weights.c, TALL of six.h
NONE, RELU, GELU = range(3)
ALL = Drop.drawn(0.0)  # nothing is dropped


class Linear(nn.Linear):
    """y = x · Wᵀ + b"""

    def forward(self, x: Tensor) -> Tensor:
        if multiplies(x, self.weight, self.bias):
            return _Maps.apply(x, self.weight, self.bias)[0]
        return F.linear(x, self.weight, self.bias)


def maps(x: Tensor, *layers: nn.Module) -> Sequence[Tensor]:
    """Every layer of the same x. On the way back what they say of x is added up while it is worked out."""
    if all(plain(layer) and multiplies(x, layer.weight, layer.bias) for layer in layers):
        return _Maps.apply(x, *(tensor for layer in layers for tensor in (layer.weight, layer.bias)))
    return [layer(x) for layer in layers]


def plain(layer: nn.Module) -> TypeGuard[Linear]:
    """A linear map without hooks of any kind: some hear, others make the weight anew before it is used (pruning)."""
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return type(layer) is Linear and not any(hooks)


def multiplies(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Enough work, whole panels, and something to learn: what only reads does as torch does, to the last bit.

    Tensors that do not fit together are left to torch, which says so.
    """
    return (
        torch.is_grad_enabled()
        and serves(x, weight)  # before sizes are asked: a graph for any length must not depend on them
        and weight.dim() == 2
        and x.shape[-1:] == weight.shape[1:]
        and (bias is None or (bias.shape == weight.shape[:1] and serves(bias)))
        and x.numel() * weight.shape[0] >= FEW
        and not (weight.shape[0] % 16 or weight.shape[1] % 16)
        and not torch.is_autocast_enabled("cpu")
    )


class _Maps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *layers: Any) -> tuple[Tensor, ...]:
        """layers: weight, bias (or None), weight, bias …"""
        flat, weights = rows_of(x), layers[::2]
        ctx.save_for_backward(flat, *weights)
        made = (product(flat, w, True, b)[0] for w, b in zip(weights, layers[1::2], strict=True))
        return tuple(y.view(*x.shape[:-1], -1) for y in made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        of_x, *of_layers = ctx.needs_input_grad
        shape, d_x, d_layers = (*slopes[0].shape[:-1], -1), None, []
        for above, w, of_w, of_b in zip(map(rows_of, slopes), weights, of_layers[::2], of_layers[1::2], strict=True):
            if of_x:
                d_x = product(above, w, False, onto=d_x)[0]
            d_layers += [weights_back(above, x) if of_w else None, above.sum(0) if of_b else None]
        return None if d_x is None else d_x.view(shape), *d_layers


def rows_of(x: Tensor) -> Tensor:
    """[..., K] -> [M, K], row beside row in memory."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def product(
    x: Tensor,
    w: Tensor,
    turned: bool,
    bias: Tensor | None = None,
    act: int = NONE,
    drop: Drop = ALL,
    onto: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y [M, N] = x · Wᵀ + bias where W is turned, else x · W; and dropout(act(y)), of a ReLU in the same memory.

    onto [M, N]: what y is added to, in its memory.
    """
    w, (m, k) = w.contiguous(), x.shape
    n = w.shape[0] if turned else w.shape[1]
    bias = None if bias is None else bias.contiguous()
    y, space = x.new_empty(m, n) if onto is None else onto, x.new_empty(n * min(k, DEEP))
    hidden = torch.empty_like(y) if act == GELU else y
    given = floats(x, m, k), floats(w, *((n, k) if turned else (k, n))), int(turned), floats(bias, n)
    made = floats(y, m, n), floats(hidden, m, n), floats(space, n * min(k, DEEP))
    _whole_panels(n, k)
    _run("linear")(*given, int(onto is not None), m, n, k, act, drop, *made)
    return y, hidden


def weights_back(above: Tensor, x: Tensor) -> Tensor:
    """dW [N, K] = aboveᵀ · x, summed over the M rows of above [M, N] and x [M, K]."""
    (m, n), k = above.shape, x.shape[1]
    d_weight, space = x.new_empty(n, k), x.new_empty(k * SUMMED)
    _whole_panels(n, k)
    made = floats(d_weight, n, k), floats(space, k * SUMMED)
    _run("weights_back")(floats(above, m, n), floats(x, m, k), m, n, k, *made)
    return d_weight


def product_back(above: Tensor, w: Tensor, act: int, drop: Drop, z: Tensor) -> tuple[Tensor, Tensor]:
    """dz [M, N] = (above · W) · kept · act'(z), and its sums over the rows. A ReLU's result will do as z."""
    w, (m, n), k = w.contiguous(), z.shape, above.shape[1]
    shares = -(-m // (4 * TALL)) * 4
    dz, sums, space = torch.empty_like(z), z.new_empty(shares, n), z.new_empty(n * min(k, DEEP))
    made = floats(dz, m, n), floats(sums, shares, n), floats(space, n * min(k, DEEP))
    _whole_panels(n, k)
    _run("linear_back")(floats(above, m, k), floats(w, k, n), m, n, k, act, drop, floats(z, m, n), *made)
    return dz, sums.sum(0)


def _whole_panels(*sizes: int) -> None:
    if any(size < 1 or size % 16 for size in sizes):
        raise Misfit(f"C needs multiples of 16, got {list(sizes)}")


@lru_cache
def _run(name: str) -> Any:
    pointer, whole, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    if name == "linear":
        return function(name, None, pointer, pointer, flag, pointer, flag, *[whole] * 3, flag, Drop, *[pointer] * 3)
    if name == "weights_back":
        return function(name, None, pointer, pointer, *[whole] * 3, pointer, pointer)
    return function(name, None, pointer, pointer, *[whole] * 3, flag, Drop, *[pointer] * 4)
