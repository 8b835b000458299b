"""Attention for training, with its dropout inside: quicker than torch's fused kernel, which has to leave dropout out.

The scores exist a tile at a time, as in any fused attention; what is dropped is asked again from the hash of its index.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwater.machine.dropout import Drop
from headwater.machine.library import function, serves

LONGEST = 8192  # keys: a tile of scores must fit into the processor's cache


class Strides(ctypes.Structure):
    _fields_ = [("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("place", ctypes.c_int64)]


class Attention(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "heads", "groups", "queries", "keys", "width")),
        ("scale", ctypes.c_float), ("causal", ctypes.c_int32), ("masked", ctypes.c_int32),
        ("window", ctypes.c_int64), ("mask", ctypes.c_void_p),
        ("mask_strides", ctypes.c_int64 * 4), ("drop", Drop)]  # fmt: skip


def attends(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Something to learn, not more keys than a tile can hold, and a mask that is not learned."""
    learning = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    free = mask is None or (not mask.requires_grad and mask.dtype in (torch.bool, torch.float32))
    return learning and k.shape[2] <= LONGEST and free and fits(q, k, v)


def fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Heads of one width that is a multiple of 16."""
    return q.shape[-1] == v.shape[-1] and q.shape[-1] % 16 == 0 and q.numel() > 0 and k.numel() > 0 and serves(q, k, v)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, p: float, window: int = 0
) -> Tensor:
    """dropout(softmax(scale · q kᵀ + mask)) v: q [B, H, Q, D], k and v [B, G, S, D] -> [B, H, Q, D].

    window: of a causal triangle only so many keys up to the query's own place; what lies before costs nothing.
    """
    return _Attend.apply(q, k, v, mask, causal, scale, Drop.drawn(p), window)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        drop: Drop,
        window: int,
    ) -> Tensor:
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        batch, heads, queries, width = q.shape
        out = q.new_empty(batch, queries, heads, width).transpose(1, 2)
        sums = q.new_empty(batch, heads, queries)
        shape = batch, heads, k.shape[1], queries, k.shape[2], width
        if mask is not None:
            mask = mask.expand(batch, heads, queries, k.shape[2])
        kind = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
        pointer, strides = (None, (0,) * 4) if mask is None else (mask.data_ptr(), mask.stride())
        ctx.told = Attention(*shape, scale, int(causal), kind, window, pointer, (ctypes.c_int64 * 4)(*strides), drop)
        if _run("attend")(ctx.told, *_at(q), *_at(k), *_at(v), *_at(out), sums.data_ptr()):
            raise MemoryError("attention: no memory for a tile of scores")
        ctx.save_for_backward(q, k, v, out, sums, mask)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums, _ = ctx.saved_tensors
        if above.stride() != out.stride():
            above = torch.empty_like(out).copy_(above)
        dq, dk, dv = (
            torch.empty_like(t.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
            for t in (q, k, v)
        )
        given = (*_at(q), *_at(k), *_at(v), out.data_ptr(), *_at(above), sums.data_ptr())
        if _run("attend_back")(ctx.told, *given, *_at(dq), dk.data_ptr(), *_at(dv)):
            raise MemoryError("attention: no memory for a tile of scores")
        return dq, dk, dv, None, None, None, None, None


def _at(x: Tensor) -> tuple[int, Strides]:
    return x.data_ptr(), Strides(*x.stride()[:3])


@lru_cache
def _run(name: str) -> Any:
    pointer, tensor = ctypes.c_void_p, (ctypes.c_void_p, Strides)
    if name == "attend":
        return function(name, ctypes.c_int, Attention, *tensor * 4, pointer)
    return function(name, ctypes.c_int, Attention, *tensor * 3, pointer, *tensor, pointer, *tensor, pointer, *tensor)
