"""Dropout that costs little more than reading its input: chance is a hash of the index, and nothing is stored.

torch draws its random numbers one after another, at eight nanoseconds a number: a tenth of a training step and more.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwater.machine.library import function, serves

WORD = 2**32


class Drop(ctypes.Structure):
    """Whether a number is dropped is a hash of its index and of two words: nothing has to be stored."""

    _fields_ = [(word, ctypes.c_uint32) for word in ("first", "second", "threshold")] + [("scale", ctypes.c_float)]

    @staticmethod
    def drawn(p: float) -> Drop:
        """The words come from torch's generator, so a seed (and a recomputed layer) brings the same dropout back."""
        if not p:
            return Drop(0, 0, 0, 1.0)
        key = int(torch.randint(2**62, ()))
        return Drop(key % WORD, key // WORD, max(1, round(p * WORD)), 1 / (1 - p))


def kept(count: int, drop: Drop) -> Tensor:
    """[count] the hash spelled out: 0 where a number is dropped, 1 / (1 - p) where it is kept."""
    return (hashed(count, drop.first, drop.second) >= drop.threshold) * torch.tensor(drop.scale, dtype=torch.float32)


def hashed(count: int, first: int, second: int) -> Tensor:
    """[count] a word for every index: mixed() of vector.h spelled out."""
    x = (torch.arange(count) + first) % WORD
    x = (x ^ (x >> 16)) * 0x7FEB352D % WORD ^ second
    x = (x ^ (x >> 15)) * 0x846CA68B % WORD
    return x ^ (x >> 16)


def dropout(x: Tensor, p: float) -> Tensor:
    """x · mask / (1 - p), where each number of the mask is 0 with probability p and else 1."""
    if serves(x):
        return _DropAdd.apply(None, x, Drop.drawn(p))
    return torch.nn.functional.dropout(x, p)


def add_dropout(x: Tensor, y: Tensor, p: float) -> Tensor:
    """x + dropout(y, p), in one pass over memory."""
    if serves(x, y) and x.shape == y.shape:
        return _DropAdd.apply(x, y, Drop.drawn(p))
    return x + torch.nn.functional.dropout(y, p)


class _DropAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor | None, y: Tensor, drop: Drop) -> Tensor:
        ctx.drop, ctx.adds = drop, x is not None
        return _dropped(None if x is None else x.contiguous(), y.contiguous(), drop)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, Tensor, None]:
        return above if ctx.adds else None, _dropped(None, above.contiguous(), ctx.drop), None


def _dropped(x: Tensor | None, y: Tensor, drop: Drop) -> Tensor:
    out = torch.empty_like(y)
    _run()(None if x is None else x.data_ptr(), y.data_ptr(), out.data_ptr(), y.numel(), drop)
    return out


@lru_cache(maxsize=1)
def _run() -> Any:
    return function("drop_add", None, *[ctypes.c_void_p] * 3, ctypes.c_int64, Drop)
