"""Linear layers, several linears of one input (QKV), and the fused feed-forward layer, with their backward passes.

The BLAS that torch brings is good at large square matrices. On the long thin matrices of a layer, panels that stay in
the L1 cache are faster, and the activation and dropout that follow cost no further pass over memory. In the backward
pass of a feed-forward layer the gradients of activation, dropout and first bias are computed inside the matrix product
that comes from the second linear.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headwater.cpu.activations import ACTIVATION_CODES
from headwater.cpu.build import TensorMismatch, bind, float_ptr, supported, training_constants
from headwater.cpu.layout import NONE, PANEL_COLUMNS, RELU, DropoutKey

MIN_MACS = 2**25  # multiply-accumulates below which packing W, and calling C, would not pay
NO_DROPOUT = DropoutKey.sample(0.0)

# ------------------------------------------------------------------------------------------------------- linear layers


def linears(x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """Outputs of several linear layers of the same x; the backward pass accumulates their gradients of x in place."""
    return _Linears.apply(x, *(tensor for layer in layers for tensor in (layer.weight, layer.bias)))


def linear_supported(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether the C kernel takes these tensors: enough work, and whole panels.

    Tensors that do not fit together are left to torch, which refuses them.
    """
    return (
        supported(x, weight)  # before any size is read: a graph for any length must not depend on sizes
        and weight.dim() == 2
        and x.shape[-1:] == weight.shape[1:]
        and (bias is None or (bias.shape == weight.shape[:1] and supported(bias)))
        and x.numel() * weight.shape[0] >= MIN_MACS
        and not (weight.shape[0] % PANEL_COLUMNS or weight.shape[1] % PANEL_COLUMNS)
        and not torch.is_autocast_enabled("cpu")
    )


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *layers: Any) -> tuple[Tensor, ...]:
        """layers: weight, bias (or None), weight, bias …"""
        x_2d = as_2d(x)  # [M, K]
        weights = layers[::2]
        biases = layers[1::2]
        ctx.save_for_backward(x_2d, *weights)
        outputs = (gemm_bias_act(x_2d, w, True, b)[0] for w, b in zip(weights, biases, strict=True))
        return tuple(y.view(*x.shape[:-1], -1) for y in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        need_grad_x, *need_grads = ctx.needs_input_grad
        grad_x: Tensor | None = None
        grad_layers: list[Tensor | None] = []
        for grad, w, need_grad_w, need_grad_b in zip(grads, weights, need_grads[::2], need_grads[1::2], strict=True):
            grad_out = as_2d(grad)
            if need_grad_x:
                grad_x = gemm_bias_act(grad_out, w, False, accumulate_into=grad_x)[0]
            grad_layers.append(linear_grad_weight(grad_out, x) if need_grad_w else None)
            grad_layers.append(grad_out.sum(0) if need_grad_b else None)
        if grad_x is not None:
            grad_x = grad_x.view(*grads[0].shape[:-1], -1)
        return grad_x, *grad_layers


# -------------------------------------------------------------------------------------- feed-forward: two fused linears


def feed_forward_supported(x: Tensor, up: nn.Linear, act: Callable[[Tensor], Tensor], down: nn.Linear) -> bool:
    """Whether C has the activation and takes both linears: their shapes match, and the output is as wide as x."""
    return (
        act in ACTIVATION_CODES
        and linear_supported(x, up.weight, up.bias)
        and down.weight.shape == up.weight.shape[::-1]
        and linear_supported(x, down.weight.t())
        and (down.bias is None or (down.bias.shape == x.shape[-1:] and supported(down.bias)))
    )


def fused_feed_forward(x: Tensor, up: nn.Linear, act: Callable[[Tensor], Tensor], p: float, down: nn.Linear) -> Tensor:
    """down(dropout(act(up(x)), p))"""
    if not torch.is_grad_enabled():
        hidden = gemm_bias_act(as_2d(x), up.weight, True, up.bias, ACTIVATION_CODES[act], DropoutKey.sample(p))[1]
        return gemm_bias_act(hidden, down.weight, True, down.bias)[0].view(x.shape)
    return _FeedForward.apply(
        x, up.weight, up.bias, down.weight, down.bias, ACTIVATION_CODES[act], DropoutKey.sample(p)
    )


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor,
        up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        act: int,
        dropout_key: DropoutKey,
    ) -> Tensor:
        x_2d = as_2d(x)  # [M, D]
        z, hidden = gemm_bias_act(x_2d, up, True, up_bias, act, dropout_key, keep_y=True)  # [M, F]
        ctx.act = act
        ctx.dropout_key = dropout_key
        ctx.save_for_backward(x_2d, up, down, z, hidden)
        return gemm_bias_act(hidden, down, True, down_bias)[0].view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, up, down, z, hidden = ctx.saved_tensors
        need_grad_x, need_grad_up, need_grad_up_bias, need_grad_down, need_grad_down_bias, *_ = ctx.needs_input_grad
        shape = grad_out.shape
        grad_out = as_2d(grad_out)

        # the second linear, and through dropout and activation
        grad_down = linear_grad_weight(grad_out, hidden) if need_grad_down else None
        grad_down_bias = grad_out.sum(0) if need_grad_down_bias else None
        grad_z, grad_up_bias = linear_grad_input_act(grad_out, down, ctx.act, ctx.dropout_key, z)

        # the first linear
        grad_x = gemm_bias_act(grad_z, up, False)[0].view(shape) if need_grad_x else None
        grad_up = linear_grad_weight(grad_z, x) if need_grad_up else None
        return grad_x, grad_up, grad_up_bias if need_grad_up_bias else None, grad_down, grad_down_bias, None, None


# ------------------------------------------------------------------------------------------------- calls of the kernels


def as_2d(x: Tensor) -> Tensor:
    """[..., K] -> [M, K], contiguous."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def gemm_bias_act(
    x: Tensor,
    w: Tensor,
    transposed: bool,
    bias: Tensor | None = None,
    act: int = NONE,
    dropout_key: DropoutKey = NO_DROPOUT,
    accumulate_into: Tensor | None = None,
    keep_y: bool = False,
) -> tuple[Tensor, Tensor]:
    """y [M, N] = x · Wᵀ + bias if transposed, else x · W; and dropout(act(y)), which replaces y in its memory.

    keep_y: for the backward pass y stays, unless the activation is ReLU, whose output tells its gradient.

    accumulate_into [M, N]: what y is added to, in its memory.
    """
    m, k = x.shape
    n = w.shape[0] if transposed else w.shape[1]
    w = w.contiguous()
    bias = None if bias is None else bias.contiguous()
    _check_multiple_of_16(n, k)

    y = x.new_empty(m, n) if accumulate_into is None else accumulate_into
    hidden = torch.empty_like(y) if keep_y and act not in (NONE, RELU) else y
    workspace_size = n * min(k, training_constants()["K_BLOCK"])
    workspace = x.new_empty(workspace_size)
    _kernel("gemm_bias_act")(
        float_ptr(x, m, k),
        float_ptr(w, *((n, k) if transposed else (k, n))),
        int(transposed),
        float_ptr(bias, n),
        int(accumulate_into is not None),
        m,
        n,
        k,
        act,
        dropout_key,
        float_ptr(y, m, n),
        float_ptr(hidden, m, n),
        float_ptr(workspace, workspace_size),
    )
    return y, hidden


def linear_grad_weight(grad_out: Tensor, x: Tensor) -> Tensor:
    """Gradient of a weight [N, K] = grad_outᵀ · x, summed over the M rows of grad_out [M, N] and x [M, K]."""
    m, n = grad_out.shape
    k = x.shape[1]
    _check_multiple_of_16(n, k)

    grad_weight = x.new_empty(n, k)
    workspace_size = k * training_constants()["M_BLOCK"]
    workspace = x.new_empty(workspace_size)
    _kernel("linear_grad_weight")(
        float_ptr(grad_out, m, n),
        float_ptr(x, m, k),
        m,
        n,
        k,
        float_ptr(grad_weight, n, k),
        float_ptr(workspace, workspace_size),
    )
    return grad_weight


def linear_grad_input_act(
    grad_out: Tensor, w: Tensor, act: int, dropout_key: DropoutKey, z: Tensor
) -> tuple[Tensor, Tensor]:
    """grad_z [M, N] = (grad_out · W) · keep_mask · act'(z), and its sum over the rows. For ReLU z may be its output."""
    m, n = z.shape
    k = grad_out.shape[1]
    w = w.contiguous()
    _check_multiple_of_16(n, k)

    sizes = training_constants()
    partitions = -(-m // (sizes["PARTITIONS"] * sizes["ROW_BLOCK"])) * sizes["PARTITIONS"]
    grad_z = torch.empty_like(z)
    sums = z.new_empty(partitions, n)
    workspace_size = n * min(k, sizes["K_BLOCK"])
    workspace = z.new_empty(workspace_size)
    _kernel("linear_grad_input_act")(
        float_ptr(grad_out, m, k),
        float_ptr(w, k, n),
        m,
        n,
        k,
        act,
        dropout_key,
        float_ptr(z, m, n),
        float_ptr(grad_z, m, n),
        float_ptr(sums, partitions, n),
        float_ptr(workspace, workspace_size),
    )
    return grad_z, sums.sum(0)


def _check_multiple_of_16(*sizes: int) -> None:
    if any(size < 1 or size % PANEL_COLUMNS for size in sizes):
        raise TensorMismatch(f"C needs multiples of {PANEL_COLUMNS}, got {list(sizes)}")


@lru_cache
def _kernel(name: str) -> Any:
    pointer = ctypes.c_void_p
    integer = ctypes.c_int64
    flag = ctypes.c_int
    sizes = [integer] * 3
    if name == "gemm_bias_act":
        return bind(name, None, pointer, pointer, flag, pointer, flag, *sizes, flag, DropoutKey, *[pointer] * 3)
    if name == "linear_grad_weight":
        return bind(name, None, pointer, pointer, *sizes, pointer, pointer)
    return bind(name, None, pointer, pointer, *sizes, flag, DropoutKey, *[pointer] * 4)
