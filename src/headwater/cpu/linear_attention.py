"""Causal linear attention in chunks, with the feature map elu(x) + 1 inside, and its backward pass.

B batch, H heads, G key/value heads, S tokens, K width of a query or key head, V of a value head.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwater.cpu.build import TensorMismatch, bind, checked_ptr, float_ptr, supported
from headwater.cpu.layout import PANEL_COLUMNS, CStrides, LinearAttentionParams
from headwater.cpu.strided import empty_heads, like_strides, side_by_side, strided_args

State = tuple[Tensor, Tensor]  # Σ φ(k) vᵀ [B, G, K, V] and Σ φ(k) [B, G, K]


def linear_attention_supported(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether C takes q [B, H, S, K], k [B, G, S, K], v [B, G, S, V]: G divides H, K and V are multiples of 16."""
    return (
        q.dim() == k.dim() == v.dim() == 4
        and k.shape[:3] == v.shape[:3]
        and (q.shape[0], q.shape[2], q.shape[3]) == (k.shape[0], k.shape[2], k.shape[3])
        and k.shape[3] % PANEL_COLUMNS == v.shape[3] % PANEL_COLUMNS == 0
        and min(q.numel(), k.numel(), v.numel()) > 0
        and q.shape[1] % k.shape[1] == 0
        and supported(q, k, v)
    )


def fused_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State | None,
    attention_mask: Tensor | None,
    document_ids: Tensor | None,
    eps: float,
) -> tuple[Tensor, State]:
    """φ(q) S / (φ(q) z + eps) with the sums up to each query, and the sums after the last key.

    state: the sums before the first key. attention_mask [B, S]: False = a key that counts as none. document_ids [B, S]:
    each document begins with empty sums, but the first of a row.
    """
    if not linear_attention_supported(q, k, v):
        shapes = [list(t.shape) for t in (q, k, v)]
        raise TensorMismatch(f"linear attention in C needs q, k and v that fit, got {shapes}")
    kv, total = state if state is not None else (None, None)
    keep = None if attention_mask is None else attention_mask.to(torch.bool).contiguous()
    ids = None if document_ids is None else document_ids.to(torch.int32).contiguous()
    out, kv, total = _FusedLinearAttention.apply(q, k, v, kv, total, keep, ids, eps)
    return out, (kv, total)


class _FusedLinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: Tensor | None,
        total: Tensor | None,
        keep: Tensor | None,
        document_ids: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (side_by_side(t) for t in (q, k, v))
        kv = None if kv is None else kv.contiguous()
        total = None if total is None else total.contiguous()
        params = _params(q, k, v, keep, document_ids, eps)
        out = empty_heads(*q.shape[:3], v.shape[3])
        denominators = q.new_empty(q.shape[:3])
        kv_after = q.new_empty(*k.shape[:2], k.shape[3], v.shape[3])
        total_after = q.new_empty(*k.shape[:2], k.shape[3])
        failed = _kernel("linear_attention_forward")(
            params,
            *strided_args(q),
            *strided_args(k),
            *strided_args(v),
            float_ptr(kv, *kv_after.shape),
            float_ptr(total, *total_after.shape),
            *strided_args(out),
            float_ptr(denominators, *q.shape[:3]),
            float_ptr(kv_after, *kv_after.shape),
            float_ptr(total_after, *total_after.shape),
        )
        if failed:
            raise MemoryError("linear attention: no memory for a chunk")
        ctx.rules = keep, document_ids, eps
        ctx.save_for_backward(q, k, v, kv, total, out, denominators)
        return out, kv_after, total_after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_kv: Tensor, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, kv, total, out, denominators = ctx.saved_tensors
        grad_out = like_strides(grad_out, out)
        grad_q = empty_heads(*q.shape)
        grad_k = empty_heads(*k.shape)
        grad_v = empty_heads(*v.shape)
        grad_kv = grad_kv.clone().contiguous()  # C replaces these two
        grad_total = grad_total.clone().contiguous()
        failed = _kernel("linear_attention_backward")(
            _params(q, k, v, *ctx.rules),
            *strided_args(q),
            *strided_args(k),
            *strided_args(v),
            float_ptr(kv, *grad_kv.shape),
            float_ptr(total, *grad_total.shape),
            strided_args(out)[0],
            *strided_args(grad_out),
            float_ptr(denominators, *q.shape[:3]),
            *strided_args(grad_q),
            *strided_args(grad_k),
            *strided_args(grad_v),
            float_ptr(grad_kv, *grad_kv.shape),
            float_ptr(grad_total, *grad_total.shape),
        )
        if failed:
            raise MemoryError("linear attention: no memory for a chunk")
        grads = (None, None) if kv is None else (grad_kv, grad_total)
        return grad_q, grad_k, grad_v, *grads, None, None, None


def _params(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, document_ids: Tensor | None, eps: float
) -> LinearAttentionParams:
    batch, heads, length, key_dim = q.shape
    params = LinearAttentionParams(batch, heads, k.shape[1], length, key_dim, v.shape[3], eps)
    if keep is not None:
        params.keep = checked_ptr(keep, torch.bool, batch, length)
    if document_ids is not None:
        params.document_ids = checked_ptr(document_ids, torch.int32, batch, length)
    return params


@lru_cache
def _kernel(name: str) -> Any:
    pointer = ctypes.c_void_p
    tensor = (ctypes.c_void_p, CStrides)
    inputs = (LinearAttentionParams, *tensor * 3, pointer, pointer)
    if name == "linear_attention_forward":
        return bind(name, ctypes.c_int, *inputs, *tensor, pointer, pointer, pointer)
    return bind(name, ctypes.c_int, *inputs, pointer, *tensor, pointer, *tensor * 3, pointer, pointer)
