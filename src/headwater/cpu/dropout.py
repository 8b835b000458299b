"""Dropout with a counter-based hash as its random numbers: no mask is stored, the backward pass recomputes it.

torch draws its random numbers one after another, at eight nanoseconds a number: a tenth of a training step and more.
Here the random number of an element is a hash of its index and a key. On a CPU the mask is the same with the C kernels
and without them, where torch computes the same hash.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwater.cpu.build import bind
from headwater.cpu.layout import PANEL_COLUMNS, TWO_POW_32, DropoutKey

TWO_POW_31 = 2**31


def keep_mask(count: int, dropout_key: DropoutKey) -> Tensor:
    """Dropout mask [count] of a key: 0 where an element is dropped, 1 / (1 - p) where it is kept."""
    keep = counter_hash(count, dropout_key.first, dropout_key.second) >= dropout_key.threshold
    return keep * torch.tensor(dropout_key.scale, dtype=torch.float32)


def counter_hash(count: int, first: int, second: int) -> Tensor:
    """Counter-based random words [count], a hash of each index: hash8() of simd.h in torch."""
    return _hash32(*_index_words(count), _to_int32(first), _to_int32(second)).long() & (TWO_POW_32 - 1)


def fused_dropout(y: Tensor, p: float, residual: Tensor | None = None) -> Tensor:
    """residual + dropout(y, p), in one pass over memory."""
    return _DropoutAdd.apply(residual, y, DropoutKey.sample(p))


@dataclass(frozen=True)
class DropoutMask:
    """Dropout in torch operations, so that torch can compile it. The key stays in tensors: a graph holds no numbers."""

    first: Tensor  # int32, as all words here: overflow wraps around, as in C
    second: Tensor
    p: float

    @staticmethod
    def sample(p: float) -> DropoutMask:
        """The same key that DropoutKey.sample takes from the generator."""
        key = torch.randint(2**62, ())
        return DropoutMask(key.to(torch.int32), (key >> 32).to(torch.int32), p)

    def __call__(self, x: Tensor) -> Tensor:
        """Dropout of x, by the index of each element in x."""
        return self._apply(x, *_index_words(x.numel()))

    def apply_slice(self, weights: Tensor, queries: int, keys: int, first_query: int, first_key: int) -> Tensor:
        """Dropout of a slice [B, H, q, s] of attention weights [B, H, queries, keys], by its indices in all of them."""
        return self.apply_at(weights, queries, keys, first_query, first_key + torch.arange(weights.shape[-1]))

    def apply_at(self, weights: Tensor, queries: int, keys: int, first_query: int, columns: Tensor) -> Tensor:
        """Dropout of rows from first_query on, at columns [s] or [H, s], of attention weights [B, H, queries, keys]."""
        batch, heads, q, _s = weights.shape
        padded_keys = -(-keys // PANEL_COLUMNS) * PANEL_COLUMNS
        rows = torch.arange(batch * heads).view(batch, heads, 1) * queries + first_query + torch.arange(q)  # [B, H, q]
        index = (rows[..., None] * padded_keys + columns[..., None, :]).flatten()
        return self._apply(weights, index.to(torch.int32), (index >> 32).to(torch.int32))

    def _apply(self, x: Tensor, low: Tensor, high: Tensor | int) -> Tensor:
        threshold = _to_int32(max(1, round(self.p * TWO_POW_32)) ^ TWO_POW_31)
        random = _hash32(low, high, self.first, self.second)
        keep = (random ^ _to_int32(TWO_POW_31)) >= threshold  # an unsigned comparison
        scales = keep.to(torch.promote_types(x.dtype, torch.float32)) * (1 / (1 - self.p))
        return (x * scales.view(x.shape)).to(x.dtype)


def _index_words(count: int) -> tuple[Tensor, Tensor | int]:
    """The indices 0, 1, … as words: their low and their high 32 bits."""
    if count <= TWO_POW_31:
        return torch.arange(count, dtype=torch.int32), 0
    index = torch.arange(count)
    return index.to(torch.int32), (index >> 32).to(torch.int32)


def _hash32(low: Tensor, high: Tensor | int, first: Tensor | int, second: Tensor | int) -> Tensor:
    """The hash of each index, as int32."""
    x = low + first
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D ^ (high * _to_int32(0x9E3779B9)) ^ second
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _to_int32(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _to_int32(word: int) -> int:
    """The int32 that has the bits of an unsigned word."""
    return word - TWO_POW_32 if word >= TWO_POW_31 else word


class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor | None, y: Tensor, dropout_key: DropoutKey) -> Tensor:
        ctx.dropout_key = dropout_key
        ctx.has_residual = x is not None
        return _dropout_add(None if x is None else x.contiguous(), y.contiguous(), dropout_key)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, Tensor, None]:
        grad_x = grad_out if ctx.has_residual else None
        grad_y = _dropout_add(None, grad_out.contiguous(), ctx.dropout_key)
        return grad_x, grad_y, None


def _dropout_add(x: Tensor | None, y: Tensor, dropout_key: DropoutKey) -> Tensor:
    out = torch.empty_like(y)
    _kernel()(None if x is None else x.data_ptr(), y.data_ptr(), out.data_ptr(), y.numel(), dropout_key)
    return out


@lru_cache(maxsize=1)
def _kernel() -> Any:
    return bind("dropout_add", None, *[ctypes.c_void_p] * 3, ctypes.c_int64, DropoutKey)
