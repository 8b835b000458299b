"""LSH attention (Reformer) over tokens in the order of their buckets, and its backward pass.

Rows are gathered and scattered a chunk at a time: no sorted copy of queries, keys and values exists.
B batch, H heads, S tokens, R rounds, D head width.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwater.cpu.build import TensorMismatch, bind, checked_ptr, float_ptr, supported
from headwater.cpu.layout import PANEL_COLUMNS, CStrides, DropoutKey, LSHParams
from headwater.cpu.strided import empty_heads, like_strides, side_by_side, strided_args

MAX_TOKENS = 2**31 - 1  # positions are numbers of 32 bits


@dataclass(frozen=True)
class SortedChunks:
    """Which keys a query sees: those of its own chunk of sorted tokens, of `before` before it and of `after` after it.

    rounds: of hashing. causal: no key at a later position. itself: the score of the query's own key.
    """

    chunk: int
    before: int
    after: int
    rounds: int
    causal: bool
    itself: float


def lsh_attention_supported(qk: Tensor, v: Tensor, chunks: SortedChunks) -> bool:
    """Whether C takes qk and v [B, H, S, D]: D and the tokens of a chunk are multiples of 16, S is of whole chunks."""
    return (
        qk.dim() == 4
        and qk.shape == v.shape
        and qk.numel() > 0
        and qk.shape[3] % PANEL_COLUMNS == chunks.chunk % PANEL_COLUMNS == 0
        and qk.shape[2] % chunks.chunk == 0
        and qk.shape[2] * chunks.rounds <= MAX_TOKENS
        and supported(qk, v)
    )


def fused_lsh_attention(
    qk: Tensor,
    v: Tensor,
    order: Tensor,
    chunks: SortedChunks,
    key_mask: Tensor | None,
    scale: float,
    key_eps: float,
    p: float,
) -> Tensor:
    """[B, H, S, D]: attention in chunks of the order [B, H, R·S], in which each round has each position once.

    key_mask [B, S]: False = padding. key_eps: added to the mean square of a key that is brought to one length.
    """
    batch, heads, length, width = qk.shape
    if not lsh_attention_supported(qk, v, chunks):
        raise TensorMismatch(f"LSH attention in C needs whole chunks and fitting heads, got {list(qk.shape)}, {chunks}")
    if min(chunks.chunk, chunks.rounds, chunks.before + 1, chunks.after + 1) < 1:
        raise TensorMismatch(f"LSH attention needs at least one token a chunk and one round, got {chunks}")
    if not 0 <= int(order.min()) <= int(order.max()) < length:
        raise TensorMismatch(f"an order of {length} tokens must be numbers below it")
    order = order.to(torch.int32).contiguous()
    keep = None if key_mask is None else key_mask.to(torch.bool).contiguous()
    params = LSHParams(batch, heads, length, width, chunks.chunk, chunks.before, chunks.after, chunks.rounds)
    params.scale = scale
    params.itself = chunks.itself
    params.eps = key_eps
    params.causal = int(chunks.causal)
    params.order = checked_ptr(order, torch.int32, batch, heads, chunks.rounds * length)
    if keep is not None:
        params.keep = checked_ptr(keep, torch.bool, batch, length)
    params.dropout = DropoutKey.sample(p)
    return _FusedLSHAttention.apply(qk, v, params, (order, keep))


class _FusedLSHAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qk: Tensor, v: Tensor, params: LSHParams, pointed_at: tuple[Tensor, Tensor | None]) -> Tensor:
        qk, v = side_by_side(qk), side_by_side(v)
        out = empty_heads(*qk.shape)
        logsumexp = qk.new_empty(qk.shape[:3])
        failed = _kernel("lsh_attention_forward")(
            params,
            *strided_args(qk),
            *strided_args(v, *qk.shape),
            *strided_args(out, *qk.shape),
            float_ptr(logsumexp, *qk.shape[:3]),
        )
        if failed:
            raise MemoryError("LSH attention: no memory for a chunk")
        ctx.params = params
        ctx.pointed_at = pointed_at  # their addresses are in params
        ctx.save_for_backward(qk, v, out, logsumexp)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        qk, v, out, logsumexp = ctx.saved_tensors
        grad_out = like_strides(grad_out, out)
        grad_qk = empty_heads(*qk.shape)
        grad_v = empty_heads(*v.shape)
        failed = _kernel("lsh_attention_backward")(
            ctx.params,
            *strided_args(qk),
            *strided_args(v, *qk.shape),
            strided_args(out)[0],
            *strided_args(grad_out, *qk.shape),
            float_ptr(logsumexp, *qk.shape[:3]),
            *strided_args(grad_qk),
            *strided_args(grad_v),
        )
        if failed:
            raise MemoryError("LSH attention: no memory for a chunk")
        return grad_qk, grad_v, None, None


@lru_cache
def _kernel(name: str) -> Any:
    pointer = ctypes.c_void_p
    tensor = (ctypes.c_void_p, CStrides)
    if name == "lsh_attention_forward":
        return bind(name, ctypes.c_int, LSHParams, *tensor * 3, pointer)
    return bind(name, ctypes.c_int, LSHParams, *tensor * 2, pointer, *tensor, pointer, *tensor * 2)
