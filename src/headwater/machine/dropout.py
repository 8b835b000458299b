"""Dropout that costs little more than reading its input: chance is a hash of the index, and nothing is stored.

torch draws its random numbers one after another, at eight nanoseconds a number: a tenth of a training step and more.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from headwater.machine.library import function, serves

WORD, TOP = 2**32, 2**31


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
    return _mixed(*_split(count), _signed(first), _signed(second)).long() & (WORD - 1)


def dropout(x: Tensor, p: float) -> Tensor:
    """x · mask / (1 - p), where each number of the mask is 0 with probability p and else 1.

    On a CPU the mask is the same with the C library and without: torch then works out the same hash.
    """
    if serves(x):
        return _DropAdd.apply(None, x, Drop.drawn(p))
    if x.device.type != "cpu":
        return F.dropout(x, p)
    return Mask.drawn(p)(x)


def add_dropout(x: Tensor, y: Tensor, p: float) -> Tensor:
    """x + dropout(y, p), in one pass over memory."""
    if serves(x, y) and x.shape == y.shape:
        return _DropAdd.apply(x, y, Drop.drawn(p))
    return x + dropout(y, p)


def attention_dropout(weights: Tensor, p: float) -> Tensor:
    """dropout of attention weights [B, H, Q, S]; rows are counted as attention.c does, from multiples of 16."""
    if weights.device.type != "cpu" or weights.shape[-1] % 16 == 0:
        return dropout(weights, p)
    return dropout(F.pad(weights, (0, -weights.shape[-1] % 16)), p)[..., : weights.shape[-1]]


@dataclass(frozen=True)
class Mask:
    """Dropout in torch's own operations, so that it may be compiled. The words stay tensors: a graph has no numbers."""

    first: Tensor  # int32, as all numbers here: what overflows is cut off, as in C
    second: Tensor
    p: float

    @staticmethod
    def drawn(p: float) -> Mask:
        """The same words that Drop.drawn takes from the generator."""
        key = torch.randint(2**62, ())
        return Mask(key.to(torch.int32), (key >> 32).to(torch.int32), p)

    def __call__(self, x: Tensor) -> Tensor:
        """x where it is kept, by the index of each number in x."""
        return self._masked(x, *_split(x.numel()))

    def of_part(self, weights: Tensor, queries: int, keys: int, first_query: int, first_key: int) -> Tensor:
        """A part [B, H, q, s] of attention weights [B, H, queries, keys], by the indices it has in the whole."""
        batch, heads, q, s = weights.shape
        rows = torch.arange(batch * heads).view(batch, heads, 1) * queries + first_query + torch.arange(q)
        index = (rows[..., None] * -(-keys // 16) * 16 + first_key + torch.arange(s)).flatten()
        return self._masked(weights, index.to(torch.int32), (index >> 32).to(torch.int32))

    def _masked(self, x: Tensor, low: Tensor, high: Tensor | int) -> Tensor:
        threshold = _signed(max(1, round(self.p * WORD)) ^ TOP)
        keep = (_mixed(low, high, self.first, self.second) ^ _signed(TOP)) >= threshold  # compared without a sign
        scales = keep.to(torch.promote_types(x.dtype, torch.float32)) * (1 / (1 - self.p))
        return (x * scales.view(x.shape)).to(x.dtype)


def _split(count: int) -> tuple[Tensor, Tensor | int]:
    """The indices 0, 1, …: their low and their high 32 bits."""
    if count <= TOP:
        return torch.arange(count, dtype=torch.int32), 0
    index = torch.arange(count)
    return index.to(torch.int32), (index >> 32).to(torch.int32)


def _mixed(low: Tensor, high: Tensor | int, first: Tensor | int, second: Tensor | int) -> Tensor:
    """The bits of a word for every index, as int32."""
    x = low + first
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D ^ (high * _signed(0x9E3779B9)) ^ second
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _signed(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _signed(word: int) -> int:
    """The int32 that has the bits of a word."""
    return word - WORD if word >= TOP else word


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
