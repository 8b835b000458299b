"""Normalisation for training: norm(x + dropout(y)) in one pass over memory, and a way back that needs only its result.

What a norm gives is kept anyway, by the layer that reads it. Its unit form u is got back from there, (out - bias) /
weight, so neither x, nor y, nor their sum has to be kept; only where that would lose digits is u written down.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from headwater.machine.dropout import Drop, add_dropout
from headwater.machine.library import function, serves
from headwater.machine.pointers import floats

BLOCKS = 8  # as in norm.c


def norm_of_sum(
    x: Tensor, y: Tensor | None, p: float, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
) -> Tensor:
    """LayerNorm (centred) or RMSNorm of x + dropout(y, p), over the last dimension; without y, of x."""
    if norms(x, weight, bias, y):
        return _Norm.apply(x, y, weight, bias, eps, centred, Drop.drawn(p))
    x = x if y is None else add_dropout(x, y, p) if p else x + y
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps) if centred else F.rms_norm(x, x.shape[-1:], weight, eps)


def norms(x: Tensor, weight: Tensor, bias: Tensor | None = None, y: Tensor | None = None) -> bool:
    """Rows of eight, sixteen … numbers, and something to learn: what only reads does as torch does, to the last bit.

    Tensors that do not fit together are left to torch, which says so.
    """
    return (
        torch.is_grad_enabled()
        and x.dim() > 0
        and x.shape[-1] % 8 == 0
        and x.numel() > 0
        and weight.shape == x.shape[-1:]
        and (bias is None or (bias.shape == weight.shape and serves(bias)))
        and (y is None or (x.shape == y.shape and serves(y)))
        and serves(x, weight)
    )


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        centred: bool,
        drop: Drop,
    ) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        y, bias = (None if t is None else t.contiguous() for t in (y, bias))
        width = x.shape[-1]
        out, by = torch.empty_like(x), x.new_empty(x.numel() // width)
        scales = floats(weight, width), floats(bias, width)
        unit = None if _run("comes_back")(*scales, width) else torch.empty_like(x)
        ctx.told = (len(by), width, int(centred), drop)
        ctx.adds, ctx.drops = y is not None, bool(drop.threshold)
        given, made = (floats(t, *x.shape) for t in (x, y)), (floats(t, *x.shape) for t in (out, unit))
        _run("norm")(*given, drop, *scales, len(by), width, eps, int(centred), *made, floats(by, len(by)))
        ctx.save_for_backward(out, unit, weight, bias, by)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        out, unit, weight, bias, by = ctx.saved_tensors
        above, width = above.contiguous(), out.shape[-1]
        dx = torch.empty_like(out)
        dy = torch.empty_like(out) if ctx.adds and ctx.drops else None
        d_weight, d_bias = torch.zeros_like(weight), None if bias is None else torch.zeros_like(bias)
        sums = out.new_zeros(BLOCKS, 2, width)
        _run("norm_back")(
            *(floats(t, *out.shape) for t in (above, out, unit)),
            *(floats(t, width) for t in (weight, bias)),
            floats(by, out.numel() // width),
            *ctx.told,
            *(floats(t, *out.shape) for t in (dx, dy)),
            floats(sums, BLOCKS, 2, width),
            *(floats(t, width) for t in (d_weight, d_bias)),
        )
        return dx, (dx if dy is None else dy) if ctx.adds else None, d_weight, d_bias, None, None, None


@lru_cache
def _run(name: str) -> Any:
    pointer, whole, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    if name == "comes_back":
        return function(name, flag, pointer, pointer, whole)
    if name == "norm":
        return function(
            name, None, *[pointer] * 2, Drop, *[pointer] * 2, whole, whole, ctypes.c_float, flag, *[pointer] * 3
        )
    return function(name, None, *[pointer] * 6, whole, whole, flag, Drop, *[pointer] * 5)
