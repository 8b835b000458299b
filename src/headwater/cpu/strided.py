"""Heads of queries, keys and values [B, H, S, D] for C: any strides, but the numbers of a head lie side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.cpu.build import TensorMismatch, strided_ptr
from headwater.cpu.layout import CStrides


def side_by_side(x: Tensor) -> Tensor:
    """x with the numbers of a head side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_heads(*shape: int) -> Tensor:
    """A tensor [B, H, S, D] that lies in memory as [B, S, H, D], so that heads join without a copy.

    It is no view, so that autograd may add a second gradient in place.
    """
    batch, heads, length, width = shape
    return torch.empty_strided((batch, heads, length, width), (length * heads * width, width, heads * width, 1))


def like_strides(x: Tensor, other: Tensor) -> Tensor:
    """x with the strides of a tensor of the same shape: C takes one set of strides for both."""
    return x if x.stride() == other.stride() else torch.empty_like(other).copy_(x)


def strided_args(x: Tensor, *shape: int) -> tuple[int, CStrides]:
    """Address and strides of float32 heads; shape: what x must have, by default its own."""
    if x.stride(-1) != 1:
        raise TensorMismatch(f"C needs heads whose numbers lie side by side, their strides are {list(x.stride())}")
    return strided_ptr(x, torch.float32, *(shape or x.shape)), CStrides(*x.stride()[:3])
