"""FAVOR+ attention (Performer) in chunks, with the random features inside, and its backward pass.

B batch, H heads, G key/value heads, Q queries, S keys, K width of a query or key head, V of a value head, M features.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwater.cpu.build import TensorMismatch, bind, checked_ptr, float_ptr, supported
from headwater.cpu.layout import PANEL_COLUMNS, CStrides, FavorParams
from headwater.cpu.strided import empty_heads, like_strides, side_by_side, strided_args

# Σ e vᵀ [B, G, M, V], Σ e [B, G, M], Σ v [B, G, V], the number of keys and the greatest W k so far [B, G]
Sums = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def favor_supported(q: Tensor, k: Tensor, v: Tensor, projection: Tensor) -> bool:
    """Whether C takes q [B, H, Q, K], k [B, G, S, K], v [B, G, S, V], projection [M, K], K, V and M multiples of 16."""
    return (
        q.dim() == k.dim() == v.dim() == 4
        and k.shape[:3] == v.shape[:3]
        and (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
        and projection.shape[1:] == q.shape[3:]
        and not any(size % PANEL_COLUMNS for size in (k.shape[3], v.shape[3], len(projection)))
        and min(q.numel(), k.numel(), v.numel(), projection.numel()) > 0
        and q.shape[1] % k.shape[1] == 0
        and not projection.requires_grad
        and supported(q, k, v, projection)
    )


def fused_favor(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    causal: bool,
    scale: float,
    eps: float,
    sums: Sums | None,
    attention_mask: Tensor | None,
) -> tuple[Tensor, Sums]:
    """φ(q) Σ φ(k) vᵀ / φ(q) Σ φ(k), and the sums after the last key. sums: those before the first, if causal.

    attention_mask [B, S]: False = padding.
    """
    if not favor_supported(q, k, v, projection) or (causal and q.shape[2] != k.shape[2]) or (sums and not causal):
        shapes = [list(t.shape) for t in (q, k, v, projection)]
        raise TensorMismatch(f"FAVOR+ attention in C needs q, k, v and directions that fit, got {shapes}")
    keep = None if attention_mask is None else attention_mask.to(torch.bool).contiguous()
    batch, heads, queries, width = q.shape
    params = FavorParams(batch, heads, k.shape[1], queries, k.shape[2], width, v.shape[3], len(projection))
    params.root = scale**0.5
    params.eps = eps
    params.causal = int(causal)
    if keep is not None:
        params.keep = checked_ptr(keep, torch.bool, batch, k.shape[2])
    before = (None,) * 5 if sums is None else tuple(t.contiguous() for t in sums)
    out, *after = _FusedFavor.apply(q, k, v, projection.contiguous(), *before, params, keep)
    return out, tuple(after)


class _FusedFavor(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        projection: Tensor,
        kv: Tensor | None,
        total: Tensor | None,
        values: Tensor | None,
        size: Tensor | None,
        maximum: Tensor | None,
        params: FavorParams,
        keep: Tensor | None,
    ) -> tuple[Tensor, ...]:
        q, k, v = (side_by_side(t) for t in (q, k, v))
        out = empty_heads(*q.shape[:3], v.shape[3])
        denominators = q.new_empty(q.shape[:3])
        maxima = q.new_empty(k.shape[:3])
        after = tuple(q.new_empty(shape) for shape in _shapes(params))
        failed = _kernel("favor_forward")(
            params,
            *strided_args(q),
            *strided_args(k),
            *strided_args(v),
            float_ptr(projection, params.features, params.key_dim),
            *_sum_ptrs(params, (kv, total, values, size, maximum)),
            *strided_args(out),
            float_ptr(denominators, *q.shape[:3]),
            float_ptr(maxima, *k.shape[:3]),
            *_sum_ptrs(params, after),
        )
        if failed:
            raise MemoryError("FAVOR+ attention: no memory for a chunk")
        ctx.params = params
        ctx.keep = keep  # its address is in params
        ctx.save_for_backward(q, k, v, projection, kv, total, values, size, maximum, out, denominators, maxima)
        ctx.mark_non_differentiable(*after[3:])
        return out, *after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, *grad_after: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, projection, *before, out, denominators, maxima = ctx.saved_tensors
        params: FavorParams = ctx.params
        grad_out = like_strides(grad_out, out)
        grad_q = empty_heads(*q.shape)
        grad_k = empty_heads(*k.shape)
        grad_v = empty_heads(*v.shape)
        grad_sums = tuple(grad.clone().contiguous() for grad in grad_after[:3])  # C replaces them
        failed = _kernel("favor_backward")(
            params,
            *strided_args(q),
            *strided_args(k),
            *strided_args(v),
            float_ptr(projection, params.features, params.key_dim),
            *_sum_ptrs(params, tuple(before)),
            strided_args(out)[0],
            *strided_args(grad_out, *out.shape),
            float_ptr(denominators, *q.shape[:3]),
            float_ptr(maxima, *k.shape[:3]),
            *strided_args(grad_q),
            *strided_args(grad_k),
            *strided_args(grad_v),
            *_sum_ptrs(params, grad_sums),
        )
        if failed:
            raise MemoryError("FAVOR+ attention: no memory for a chunk")
        grad_before = (None, None, None) if before[0] is None else grad_sums
        return grad_q, grad_k, grad_v, None, *grad_before, None, None, None, None


def _shapes(params: FavorParams) -> list[tuple[int, ...]]:
    """The shapes of Sums."""
    heads = params.batch, params.kv_heads
    features = params.features
    return [(*heads, features, params.value_dim), (*heads, features), (*heads, params.value_dim), heads, heads]


def _sum_ptrs(params: FavorParams, sums: tuple[Tensor | None, ...]) -> list[int | None]:
    return [float_ptr(t, *shape) for t, shape in zip(sums, _shapes(params), strict=False)]


@lru_cache
def _kernel(name: str) -> Any:
    pointer = ctypes.c_void_p
    tensor = (ctypes.c_void_p, CStrides)
    inputs = (FavorParams, *tensor * 3, pointer, *[pointer] * 5)
    if name == "favor_forward":
        return bind(name, ctypes.c_int, *inputs, *tensor, *[pointer] * 7)
    return bind(name, ctypes.c_int, *inputs, pointer, *tensor, pointer, pointer, *tensor * 3, *[pointer] * 3)
