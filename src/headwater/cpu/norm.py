"""LayerNorm and RMSNorm fused with the residual addition and dropout; the backward pass needs only the output.

The output of a norm is saved anyway, by the layer that reads it. The normalized rows x_hat are recovered from it,
(out - bias) / weight, so neither x, nor y, nor their sum has to be saved; only where the division would lose digits is
x_hat written down.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwater.cpu.build import bind, float_ptr, supported, training_constants
from headwater.cpu.layout import VECTOR_SIZE, DropoutKey


def fused_add_norm(
    x: Tensor, y: Tensor | None, p: float, weight: Tensor, bias: Tensor | None, eps: float, centered: bool
) -> Tensor:
    """LayerNorm (centered) or RMSNorm of x + dropout(y, p), over the last dimension; without y, of x."""
    return _AddDropoutNorm.apply(x, y, weight, bias, eps, centered, DropoutKey.sample(p))


def norm_supported(x: Tensor, weight: Tensor, bias: Tensor | None = None, y: Tensor | None = None) -> bool:
    """Whether the C kernel takes these tensors: rows of whole vectors, and gradients are enabled.

    Inference is left to torch, so that it gives torch's results to the last bit; so are tensors that do not fit
    together, which torch refuses.
    """
    return (
        torch.is_grad_enabled()
        and x.dim() > 0
        and x.shape[-1] % VECTOR_SIZE == 0
        and x.numel() > 0
        and weight.shape == x.shape[-1:]
        and (bias is None or (bias.shape == weight.shape and supported(bias)))
        and (y is None or (x.shape == y.shape and supported(y)))
        and supported(x, weight)
    )


class _AddDropoutNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        centered: bool,
        dropout_key: DropoutKey,
    ) -> Tensor:
        x = x.contiguous()
        y = None if y is None else y.contiguous()
        weight = weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        width = x.shape[-1]
        rows = x.numel() // width

        out = torch.empty_like(x)
        rstd = x.new_empty(rows)
        scales = float_ptr(weight, width), float_ptr(bias, width)
        x_hat = None if _kernel("invertible")(*scales, width) else torch.empty_like(x)
        _kernel("add_dropout_norm")(
            float_ptr(x, *x.shape),
            float_ptr(y, *x.shape),
            dropout_key,
            *scales,
            rows,
            width,
            eps,
            int(centered),
            float_ptr(out, *x.shape),
            float_ptr(x_hat, *x.shape),
            float_ptr(rstd, rows),
        )

        ctx.params = (rows, width, int(centered), dropout_key)
        ctx.has_residual = y is not None
        ctx.has_dropout = bool(dropout_key.threshold)
        ctx.save_for_backward(out, x_hat, weight, bias, rstd)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        out, x_hat, weight, bias, rstd = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        width = out.shape[-1]
        row_blocks = training_constants()["ROW_BLOCKS"]

        grad_x = torch.empty_like(out)
        grad_y = torch.empty_like(out) if ctx.has_residual and ctx.has_dropout else None
        grad_weight = torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        sums = out.new_zeros(row_blocks, 2, width)
        _kernel("add_dropout_norm_backward")(
            *(float_ptr(t, *out.shape) for t in (grad_out, out, x_hat)),
            *(float_ptr(t, width) for t in (weight, bias)),
            float_ptr(rstd, out.numel() // width),
            *ctx.params,
            *(float_ptr(t, *out.shape) for t in (grad_x, grad_y)),
            float_ptr(sums, row_blocks, 2, width),
            *(float_ptr(t, width) for t in (grad_weight, grad_bias)),
        )

        if ctx.has_residual and grad_y is None:
            grad_y = grad_x  # without dropout the gradient of a sum is that of both
        return grad_x, grad_y, grad_weight, grad_bias, None, None, None


@lru_cache
def _kernel(name: str) -> Any:
    pointer = ctypes.c_void_p
    integer = ctypes.c_int64
    flag = ctypes.c_int
    if name == "invertible":
        return bind(name, flag, pointer, pointer, integer)
    if name == "add_dropout_norm":
        tensors = [pointer] * 2, [pointer] * 2, [pointer] * 3
        return bind(
            name, None, *tensors[0], DropoutKey, *tensors[1], integer, integer, ctypes.c_float, flag, *tensors[2]
        )
    return bind(name, None, *[pointer] * 6, integer, integer, flag, DropoutKey, *[pointer] * 5)
