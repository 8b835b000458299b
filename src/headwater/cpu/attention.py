"""Fused (tiled) scaled dot-product attention for training, with dropout and sliding window, and its backward pass.

As in FlashAttention, the scores exist a tile at a time; the dropout mask is recomputed from the hash of its indices.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwater.cpu.build import TensorMismatch, bind, float_ptr, strided_ptr, supported
from headwater.cpu.layout import MASK_BOOL, MASK_FLOAT, PANEL_COLUMNS, AttentionParams, CStrides, DropoutKey

MAX_KEYS = 8192  # a tile of scores must fit into the processor's cache


def attention_training_supported(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether training can use the C kernel: gradients are needed, few enough keys, a mask not learned."""
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    mask_supported = mask is None or (
        not mask.requires_grad and mask.dtype in (torch.bool, torch.float32) and mask.device.type == "cpu"
    )
    return needs_grad and mask_supported and attention_supported(q, k, v) and k.shape[2] <= MAX_KEYS


def attention_supported(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the C kernel takes q [B, H, Q, D], k and v [B, G, S, D]: G divides H, D is a multiple of 16."""
    return (
        q.dim() == k.dim() == 4
        and k.shape == v.shape
        and (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
        and q.shape[3] % PANEL_COLUMNS == 0
        and q.numel() > 0
        and k.numel() > 0
        and q.shape[1] % k.shape[1] == 0
        and supported(q, k, v)
    )


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, p: float, window: int = 0
) -> Tensor:
    """dropout(softmax(scale · q kᵀ + mask)) v: q [B, H, Q, D], k and v [B, G, S, D] -> [B, H, Q, D].

    window: with a causal mask, how many keys a query sees, up to its own position; keys before that cost nothing.
    """
    if not attention_supported(q, k, v):
        raise TensorMismatch(f"attention in C needs q, k and v that fit, got {[list(t.shape) for t in (q, k, v)]}")
    if window < 0 or (window and not (causal and q.shape[2] <= k.shape[2])):
        raise TensorMismatch(
            f"a window needs a causal triangle over the same tokens, got {window} of {q.shape[2]} queries"
        )
    return _FusedAttention.apply(q, k, v, mask, causal, scale, DropoutKey.sample(p), window)


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        dropout_key: DropoutKey,
        window: int,
    ) -> Tensor:
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        batch, heads, queries, head_dim = q.shape
        kv_heads, keys = k.shape[1:3]
        params = AttentionParams(
            batch, heads, kv_heads, queries, keys, head_dim, scale, int(causal), window=window, dropout=dropout_key
        )
        mask = None if mask is None else mask.expand(batch, heads, queries, keys)
        _set_mask(params, mask)

        out = q.new_empty(batch, queries, heads, head_dim).transpose(1, 2)
        logsumexp = q.new_empty(batch, heads, queries)
        failed = _kernel("attention_forward")(
            params,
            *_query_args(params, q),
            *_kv_args(params, k),
            *_kv_args(params, v),
            *_query_args(params, out),
            float_ptr(logsumexp, batch, heads, queries),
        )
        if failed:
            raise MemoryError("attention: no memory for a tile of scores")

        ctx.params = params
        ctx.save_for_backward(q, k, v, out, logsumexp, mask)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp, mask = ctx.saved_tensors
        params = ctx.params
        _set_mask(params, mask)  # a layer that is recomputed has made another
        if grad_out.stride() != out.stride():
            grad_out = torch.empty_like(out).copy_(grad_out)

        grad_q, grad_k, grad_v = (
            torch.empty_like(t.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
            for t in (q, k, v)
        )
        failed = _kernel("attention_backward")(
            params,
            *_query_args(params, q),
            *_kv_args(params, k),
            *_kv_args(params, v),
            _query_args(params, out)[0],
            *_query_args(params, grad_out),
            float_ptr(logsumexp, *q.shape[:3]),
            *_query_args(params, grad_q),
            _kv_args(params, grad_k)[0],
            *_kv_args(params, grad_v),
        )
        if failed:
            raise MemoryError("attention: no memory for a tile of scores")
        return grad_q, grad_k, grad_v, None, None, None, None, None


def _query_args(params: AttentionParams, x: Tensor) -> tuple[int, CStrides]:
    return _strided_args(x, params.batch, params.heads, params.queries, params.head_dim)


def _kv_args(params: AttentionParams, x: Tensor) -> tuple[int, CStrides]:
    return _strided_args(x, params.batch, params.kv_heads, params.keys, params.head_dim)


def _strided_args(x: Tensor, *shape: int) -> tuple[int, CStrides]:
    if x.stride(-1) != 1:
        raise TensorMismatch(f"C needs heads whose numbers lie side by side, their strides are {list(x.stride())}")
    return strided_ptr(x, torch.float32, *shape), CStrides(*x.stride()[:3])


def _set_mask(params: AttentionParams, mask: Tensor | None) -> None:
    """mask [B, H, Q, S]: True where a key is visible, or a float that is added to the score."""
    if mask is None:
        return
    is_bool = mask.dtype == torch.bool
    dtype = torch.bool if is_bool else torch.float32
    params.mask = strided_ptr(mask, dtype, params.batch, params.heads, params.queries, params.keys)
    params.mask_type = MASK_BOOL if is_bool else MASK_FLOAT
    params.mask_strides = (ctypes.c_int64 * 4)(*mask.stride())


@lru_cache
def _kernel(name: str) -> Any:
    pointer = ctypes.c_void_p
    tensor = (ctypes.c_void_p, CStrides)
    if name == "attention_forward":
        return bind(name, ctypes.c_int, AttentionParams, *tensor * 4, pointer)
    return bind(name, ctypes.c_int, AttentionParams, *tensor * 3, pointer, *tensor, pointer, *tensor, pointer, *tensor)
