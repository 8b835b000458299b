"""Attention for training, with its dropout inside: quicker than torch's fused kernel, which has to leave dropout out.

The scores exist a tile at a time, as in any fused attention; what is dropped is asked again from the hash of its index.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwater.machine.dropout import Drop, Mask
from headwater.machine.library import function, serves
from headwater.machine.pointers import Misfit, floats, strided_pointer

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
    free = mask is None or (
        not mask.requires_grad and mask.dtype in (torch.bool, torch.float32) and mask.device.type == "cpu"
    )
    return learning and free and fits(q, k, v) and k.shape[2] <= LONGEST


def fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """q [B, H, Q, D], k and v [B, G, S, D] of one batch, G a divisor of H, D a multiple of 16; torch says what else."""
    return (
        q.dim() == k.dim() == 4
        and k.shape == v.shape
        and (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
        and q.shape[3] % 16 == 0
        and q.numel() > 0
        and k.numel() > 0
        and q.shape[1] % k.shape[1] == 0
        and serves(q, k, v)
    )


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, p: float, window: int = 0
) -> Tensor:
    """dropout(softmax(scale · q kᵀ + mask)) v: q [B, H, Q, D], k and v [B, G, S, D] -> [B, H, Q, D].

    window: of a causal triangle only so many keys up to the query's own place; what lies before costs nothing.
    """
    if not fits(q, k, v):
        raise Misfit(f"attention in C needs q, k and v that fit, got {[list(t.shape) for t in (q, k, v)]}")
    if window < 0 or (window and not (causal and q.shape[2] <= k.shape[2])):
        raise Misfit(f"a window needs a causal triangle over the same tokens, got {window} of {q.shape[2]} queries")
    return _Attend.apply(q, k, v, mask, causal, scale, Drop.drawn(p), window)


def bands(q: Tensor, k: Tensor, v: Tensor, p: float) -> bool:
    """Whether attend_window is the one to ask: C serves, or its dropout mask is to be the same without."""
    return fits(q, k, v) or (p > 0 and q.device.type == "cpu")


def attend_window(q: Tensor, k: Tensor, v: Tensor, scale: float, p: float, window: int) -> Tensor:
    """The same with a window, in C where it fits; else in torch, a block of queries at a time, with the same mask."""
    if fits(q, k, v):
        return attend(q, k, v, None, True, scale, p, window)
    drop, length, out = Mask.drawn(p), q.shape[2], []
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    for begin in range(0, length, max(64, window)):
        end, first = min(length, begin + max(64, window)), max(0, begin - window + 1)
        distance = torch.arange(begin, end)[:, None] - torch.arange(first, end)
        scores = scale * (q[:, :, begin:end] @ k[:, :, first:end].mT)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        weights = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf).softmax(-1).to(v.dtype)
        out.append(drop.of_part(weights, length, length, begin, first) @ v[:, :, first:end])
    return torch.cat(out, 2)


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
        ctx.told = Attention(*shape, scale, int(causal), window=window, drop=drop)
        mask = None if mask is None else mask.expand(batch, heads, queries, k.shape[2])
        _tell_mask(ctx.told, mask)
        given = _queries(ctx.told, q), _keys(ctx.told, k), _keys(ctx.told, v), _queries(ctx.told, out)
        if _run("attend")(ctx.told, *chain(*given), floats(sums, batch, heads, queries)):
            raise MemoryError("attention: no memory for a tile of scores")
        ctx.save_for_backward(q, k, v, out, sums, mask)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums, mask = ctx.saved_tensors
        _tell_mask(ctx.told, mask)  # a layer that is computed again has made another
        if above.stride() != out.stride():
            above = torch.empty_like(out).copy_(above)
        dq, dk, dv = (
            torch.empty_like(t.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
            for t in (q, k, v)
        )
        told = ctx.told
        read = *_queries(told, q), *_keys(told, k), *_keys(told, v), _queries(told, out)[0], *_queries(told, above)
        written = *_queries(told, dq), _keys(told, dk)[0], *_keys(told, dv)
        if _run("attend_back")(told, *read, floats(sums, *q.shape[:3]), *written):
            raise MemoryError("attention: no memory for a tile of scores")
        return dq, dk, dv, None, None, None, None, None


def _queries(told: Attention, x: Tensor) -> tuple[int, Strides]:
    return _at(x, told.batch, told.heads, told.queries, told.width)


def _keys(told: Attention, x: Tensor) -> tuple[int, Strides]:
    return _at(x, told.batch, told.groups, told.keys, told.width)


def _at(x: Tensor, *shape: int) -> tuple[int, Strides]:
    if x.stride(-1) != 1:
        raise Misfit(f"C needs heads whose numbers lie side by side, their strides are {list(x.stride())}")
    return strided_pointer(x, torch.float32, *shape), Strides(*x.stride()[:3])


def _tell_mask(told: Attention, mask: Tensor | None) -> None:
    """mask [B, H, Q, S]: True where a query may look, or a float to add."""
    if mask is None:
        return
    kind = torch.bool if mask.dtype == torch.bool else torch.float32
    told.mask = strided_pointer(mask, kind, told.batch, told.heads, told.queries, told.keys)
    told.masked = 1 if kind == torch.bool else 2
    told.mask_strides = (ctypes.c_int64 * 4)(*mask.stride())


@lru_cache
def _run(name: str) -> Any:
    pointer, tensor = ctypes.c_void_p, (ctypes.c_void_p, Strides)
    if name == "attend":
        return function(name, ctypes.c_int, Attention, *tensor * 4, pointer)
    return function(name, ctypes.c_int, Attention, *tensor * 3, pointer, *tensor, pointer, *tensor, pointer, *tensor)
