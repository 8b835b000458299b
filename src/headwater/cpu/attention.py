"""Fused (tiled) attention for training, with dropout, over all keys or a band of them, and its backward pass.

As in FlashAttention, the scores exist a tile at a time; the dropout mask is recomputed from the hash of its indices.
B batch, H heads, G key/value heads, Q queries, S keys, L leading keys, R random blocks, D head width.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwater.cpu.build import TensorMismatch, bind, checked_ptr, float_ptr, strided_ptr, supported
from headwater.cpu.layout import (
    MASK_BOOL,
    MASK_FLOAT,
    PANEL_COLUMNS,
    VECTOR_SIZE,
    AttentionParams,
    CStrides,
    DropoutKey,
)
from headwater.cpu.strided import empty_heads, like_strides, side_by_side, strided_args

MAX_KEYS = 8192  # beyond, a tile of full attention does not fit into the processor's cache
MIN_QUERIES = 16  # below which packing the keys would not pay, where there are no gradients
MIN_MACS = 2**21  # multiply-accumulates of q kᵀ below which calling C would not pay, where there are no gradients
HIDDEN_ID = -(2**31)  # of a key that no query sees

Places = tuple[Tensor, Tensor]  # rows of the batch [N], and queries [N]


# --------------------------------------------------------------------------------------------------- what C can compute


def full_attention_supported(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float = 0.0) -> bool:
    """Whether attention over all keys can be by C: a mask that is not learned, few enough keys or dropout.

    Without gradients there must be enough queries and work: keys are packed first. A single new token is left to torch.
    """
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    mask_supported = mask is None or (
        not mask.requires_grad and mask.dtype in (torch.bool, torch.float32) and mask.device.type == "cpu"
    )
    return (
        mask_supported
        and attention_supported(q, k, v)
        and (k.shape[2] <= MAX_KEYS or p > 0)
        and (needs_grad or (q.shape[2] >= MIN_QUERIES and q.numel() * k.shape[2] >= MIN_MACS))
    )


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


@dataclass(frozen=True)
class KeyRules:
    """Which keys a query sees, and what is added to its scores; nothing of it has a gradient.

    A query sees the keys of its own block of `block` positions, of `back` blocks before it and of `ahead` after it;
    causal: none after itself. first_query: the index of the first query among the keys.
    mask [B, H, Q, S]: True = visible, or a float to add. q_ids [B, Q], k_ids [B, S]: int32, a query sees the keys of
    its own id. leading_index [B, L]: keys that every query sees, as leading keys. leading_bias [B, H, Q, L]: added to
    the scores of leading keys. block_numbers [H, Q / block, R]: int32.
    """

    back: int
    ahead: int
    block: int = 1
    first_query: int = 0
    causal: bool = False
    mask: Tensor | None = None
    q_ids: Tensor | None = None
    k_ids: Tensor | None = None
    leading_index: Tensor | None = None
    leading_bias: Tensor | None = None
    block_numbers: Tensor | None = None


def key_rules_supported(rules: KeyRules, keys: int, *others: Tensor | None) -> bool:
    """Whether C can follow the rules; others: leading keys and values and a distance bias, where there are any."""
    bias = rules.leading_bias
    bias_supported = bias is None or (not bias.requires_grad and bias.dtype == torch.float32 and supported(bias))
    whole_blocks = rules.block % VECTOR_SIZE == rules.first_query % rules.block == keys % rules.block == 0
    return (
        bias_supported
        and (rules.block_numbers is None or whole_blocks)
        and supported(*(t for t in others if t is not None))
    )


def visible_ids(
    key_mask: Tensor | None, document_ids: Tensor | None, first_query: int, queries: int
) -> tuple[Tensor | None, Tensor | None]:
    """q_ids and k_ids of KeyRules: the ids of documents, and HIDDEN_ID for keys that key_mask [B, S] hides."""
    if document_ids is not None:
        ids = document_ids.to(torch.int32)
    elif key_mask is not None:
        ids = torch.zeros_like(key_mask, dtype=torch.int32)
    else:
        return None, None
    q_ids = ids[:, first_query : first_query + queries].contiguous()
    k_ids = ids if key_mask is None else ids.masked_fill(~key_mask, HIDDEN_ID)
    return q_ids, k_ids.contiguous()


# ------------------------------------------------------------------------------------------------------------ the calls


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, p: float
) -> Tensor:
    """dropout(softmax(scale · q kᵀ + mask)) v: q [B, H, Q, D], k and v [B, G, S, D] -> [B, H, Q, D]."""
    _check_qkv(q, k, v)
    if mask is not None:
        mask = mask.expand(*q.shape[:3], k.shape[2])
    everything = max(q.shape[2], k.shape[2])
    rules = KeyRules(everything, everything, causal=causal, mask=mask)
    return _FusedAttention.apply(q, k, v, None, None, None, None, rules, None, scale, DropoutKey.sample(p))


def fused_banded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rules: KeyRules,
    scale: float,
    p: float,
    leading_k: Tensor | None = None,
    leading_v: Tensor | None = None,
    distance_bias: Tensor | None = None,
    given_rows: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention over the keys that the rules leave visible, and over leading keys; time and memory O(S · width).

    leading_k, leading_v [B, G, L, D]; distance_bias [H, back + 1 + ahead]: added at key - query = -back … ahead.
    given_rows: rows of the batch [N], queries [N], and their output [N, H, D], which is written in place of what they
    would get; so no second output exists.
    """
    _check_qkv(q, k, v)
    _check_rules(rules, q, k)
    if (leading_k is None) != (leading_v is None):
        raise TensorMismatch("leading keys need their values")
    row, query, given_out = (None, None, None) if given_rows is None else given_rows
    places = None if row is None or query is None else (row, query)
    key = DropoutKey.sample(p)
    return _FusedAttention.apply(q, k, v, leading_k, leading_v, distance_bias, given_out, rules, places, scale, key)


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not attention_supported(q, k, v):
        raise TensorMismatch(f"attention in C needs q, k and v that fit, got {[list(t.shape) for t in (q, k, v)]}")


def _check_rules(rules: KeyRules, q: Tensor, k: Tensor) -> None:
    """C reads keys by the numbers of the rules: those must lie inside."""
    queries = q.shape[2]
    keys = k.shape[2]
    if min(rules.back, rules.ahead, rules.first_query, rules.block - 1) < 0 or rules.first_query + queries > keys:
        raise TensorMismatch(f"a band of {keys} keys needs queries that are among them, got {queries} and {rules}")
    if rules.block_numbers is None:
        return
    blocks = keys // rules.block
    shape = (q.shape[1], -(-queries // rules.block))
    numbers = rules.block_numbers
    inside = not numbers.numel() or 0 <= int(numbers.min()) <= int(numbers.max()) < blocks
    if numbers.shape[:2] != shape or not inside:
        raise TensorMismatch(f"random blocks of {blocks} blocks must be [{shape}, R], got {list(numbers.shape)}")
    if rules.block % VECTOR_SIZE or rules.first_query % rules.block or keys % rules.block:
        raise TensorMismatch(f"random blocks need whole blocks of a multiple of {VECTOR_SIZE}, got {rules.block}")


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        leading_k: Tensor | None,
        leading_v: Tensor | None,
        distance_bias: Tensor | None,
        given_out: Tensor | None,
        rules: KeyRules,
        given_places: Places | None,
        scale: float,
        dropout_key: DropoutKey,
    ) -> Tensor:
        q, k, v = (side_by_side(t) for t in (q, k, v))
        if rules.leading_index is not None:
            leading_k, leading_v = (_take(t, rules.leading_index) for t in (k, v))
        leading_k = None if leading_k is None else side_by_side(leading_k)
        leading_v = None if leading_v is None else side_by_side(leading_v)
        distance_bias = None if distance_bias is None else distance_bias.contiguous()
        params = _params(q, k, leading_k, rules, scale, dropout_key)
        params.distance_bias = _distance_bias_ptr(distance_bias, q, rules)

        out = empty_heads(*q.shape)
        logsumexp = q.new_empty(q.shape[:3])
        failed = _kernel("attention_forward")(
            params,
            *_query_args(params, q),
            *_kv_args(params, k),
            *_kv_args(params, v),
            *_leading_args(params, leading_k),
            *_leading_args(params, leading_v),
            *_query_args(params, out),
            float_ptr(logsumexp, *q.shape[:3]),
        )
        if failed:
            raise MemoryError("attention: no memory for a tile of scores")
        if given_places is not None and given_out is not None:
            out.transpose(1, 2)[given_places] = given_out
            logsumexp.transpose(1, 2)[given_places] = torch.inf  # as of a row that sees nothing: no gradient

        ctx.rules = rules
        ctx.given_places = given_places
        ctx.params = params  # with the addresses of tensors in rules
        ctx.save_for_backward(q, k, v, leading_k, leading_v, distance_bias, out, logsumexp)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, leading_k, leading_v, distance_bias, out, logsumexp = ctx.saved_tensors
        params: AttentionParams = ctx.params
        params.distance_bias = _distance_bias_ptr(distance_bias, q, ctx.rules)  # a recomputed one lies elsewhere
        grad_out = like_strides(grad_out, out)

        grad_q = empty_heads(*q.shape)
        grad_k = empty_heads(*k.shape)
        grad_v = empty_heads(*v.shape)
        grad_leading_k = None if leading_k is None else empty_heads(*leading_k.shape)
        grad_leading_v = None if leading_v is None else empty_heads(*leading_v.shape)
        grad_bias = None if distance_bias is None else distance_bias.new_zeros(params.batch, *distance_bias.shape)
        failed = _kernel("attention_backward")(
            params,
            *_query_args(params, q),
            *_kv_args(params, k),
            *_kv_args(params, v),
            *_leading_args(params, leading_k),
            *_leading_args(params, leading_v),
            _query_args(params, out)[0],
            *_query_args(params, grad_out),
            float_ptr(logsumexp, *q.shape[:3]),
            *_query_args(params, grad_q),
            _kv_args(params, grad_k)[0],
            *_kv_args(params, grad_v),
            _leading_args(params, grad_leading_k)[0],
            *_leading_args(params, grad_leading_v),
            None if grad_bias is None else float_ptr(grad_bias, *grad_bias.shape),
        )
        if failed:
            raise MemoryError("attention: no memory for a tile of scores")
        if ctx.rules.leading_index is not None and grad_leading_k is not None and grad_leading_v is not None:
            _add_at(grad_k, ctx.rules.leading_index, grad_leading_k)
            _add_at(grad_v, ctx.rules.leading_index, grad_leading_v)
            grad_leading_k = None
            grad_leading_v = None
        grad_bias = None if grad_bias is None else grad_bias.sum(0)
        grad_given = None if ctx.given_places is None else grad_out.transpose(1, 2)[ctx.given_places]
        return grad_q, grad_k, grad_v, grad_leading_k, grad_leading_v, grad_bias, grad_given, *(None,) * 4


# ------------------------------------------------------------------------------------------------------ tensors for C


def _take(x: Tensor, index: Tensor) -> Tensor:
    """The keys index [B, L] of x [B, G, S, D] -> [B, G, L, D]"""
    return torch.take_along_dim(x, index[:, None, :, None], 2)


def _add_at(grad: Tensor, index: Tensor, values: Tensor) -> None:
    """grad [B, G, S, D] += values [B, G, L, D] at the keys index [B, L]."""
    grad.scatter_add_(2, index[:, None, :, None].expand_as(values), values)


def _params(
    q: Tensor, k: Tensor, leading_k: Tensor | None, rules: KeyRules, scale: float, dropout_key: DropoutKey
) -> AttentionParams:
    batch, heads, queries, head_dim = q.shape
    kv_heads, keys = k.shape[1:3]
    params = AttentionParams(batch, heads, kv_heads, queries, keys, head_dim, dropout=dropout_key)
    params.scale = scale
    params.back = rules.back
    params.ahead = rules.ahead
    params.block = rules.block
    params.first_query = rules.first_query
    params.causal = int(rules.causal)
    if rules.mask is not None:
        is_bool = rules.mask.dtype == torch.bool
        params.mask_type = MASK_BOOL if is_bool else MASK_FLOAT
        dtype = torch.bool if is_bool else torch.float32
        params.mask = strided_ptr(rules.mask, dtype, batch, heads, queries, keys)
        params.mask_strides = (ctypes.c_int64 * 4)(*rules.mask.stride())
    if rules.q_ids is not None and rules.k_ids is not None:
        params.q_ids = checked_ptr(rules.q_ids, torch.int32, batch, queries)
        params.k_ids = checked_ptr(rules.k_ids, torch.int32, batch, keys)
    if leading_k is not None:
        params.leading_keys = leading_k.shape[2]
    if rules.leading_bias is not None:
        shape = (batch, heads, queries, params.leading_keys)
        params.leading_bias = strided_ptr(rules.leading_bias, torch.float32, *shape)
        params.leading_bias_strides = (ctypes.c_int64 * 4)(*rules.leading_bias.stride())
    if rules.block_numbers is not None:
        params.random_blocks = rules.block_numbers.shape[2]
        params.block_numbers = checked_ptr(rules.block_numbers, torch.int32, *rules.block_numbers.shape)
    return params


def _distance_bias_ptr(bias: Tensor | None, q: Tensor, rules: KeyRules) -> int | None:
    return float_ptr(bias, q.shape[1], rules.back + 1 + rules.ahead)


def _query_args(params: AttentionParams, x: Tensor) -> tuple[int, CStrides]:
    return strided_args(x, params.batch, params.heads, params.queries, params.head_dim)


def _kv_args(params: AttentionParams, x: Tensor) -> tuple[int, CStrides]:
    return strided_args(x, params.batch, params.kv_heads, params.keys, params.head_dim)


def _leading_args(params: AttentionParams, x: Tensor | None) -> tuple[int | None, CStrides]:
    if x is None:
        return None, CStrides()
    return strided_args(x, params.batch, params.kv_heads, params.leading_keys, params.head_dim)


@lru_cache
def _kernel(name: str) -> Any:
    pointer = ctypes.c_void_p
    tensor = (ctypes.c_void_p, CStrides)
    if name == "attention_forward":
        return bind(name, ctypes.c_int, AttentionParams, *tensor * 6, pointer)
    gradients = (*tensor, pointer, *tensor, pointer, *tensor, pointer)
    return bind(name, ctypes.c_int, AttentionParams, *tensor * 5, pointer, *tensor, pointer, *gradients)
