"""6. Scaled dot-product and multi-head attention: queries (q), keys (k) and values (v).

B batch, H query heads, G key/value heads, Q queries, S keys, K head width, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headwater.reference.gradients import Array, Layer, Parameters
from headwater.reference.ops import linear, softmax
from headwater.reference.positions import NoPosition


def attend(
    q: Array, k: Array, v: Array, allowed: Array, bias: Array, drop: Layer
) -> tuple[Array, Array, Callable[[Array], tuple[Array, Array, Array, Array]]]:
    """Attention(q, k, v) = P v with P = softmax(q kᵀ / √K + bias); also returns P, and the backward function.

    Without 1/√K the scores grow with the head width, and the softmax saturates: its gradients vanish.
    """
    scale = 1 / math.sqrt(q.shape[-1])
    scores = q @ k.swapaxes(-1, -2) * scale + bias
    weights, softmax_backward = softmax(scores, allowed)
    dropped, drop_backward = drop(weights)

    def backward(dy: Array) -> tuple[Array, Array, Array, Array]:
        # y = P v gives dP = dy vᵀ and dv = Pᵀ dy; s = scale q kᵀ gives dq = scale ds k and dk = scale dsᵀ q
        dscores = softmax_backward(drop_backward(dy @ v.swapaxes(-1, -2)))
        dv = dropped.swapaxes(-1, -2) @ dy
        return dscores @ k * scale, dscores.swapaxes(-1, -2) @ q * scale, dv, dscores

    return dropped @ v, weights, backward


@dataclass(frozen=True)
class AttentionContext:
    """The arguments of attention besides its input: mask, positions, dropout, and a dict for the attention weights."""

    allowed: Array  # [B, Q, S]
    q_positions: Array  # [B, Q]
    k_positions: Array  # [B, S]
    position: NoPosition
    drop: Layer
    attention_weights: dict[str, Array]  # [B, H, Q, S], by path


def multi_head(
    x: Array, memory: Array, w: Parameters, heads: int, context: AttentionContext
) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
    """Multi-head attention: H heads in parallel and an output projection, y = W_out [head_1 … head_H].

    Queries come from x [B, Q, D], keys and values from memory [B, S, D]: x itself, or an encoder's output.
    Grouped-query attention: each key/value head is shared by H / G consecutive query heads.
    """
    q, q_backward = linear(x, w / "q")
    k, k_backward = linear(memory, w / "k")
    v, v_backward = linear(memory, w / "v")
    q = split_heads(q, heads)  # [B, H, Q, K]
    k = split_heads(k, k.shape[-1] // q.shape[-1])  # [B, G, S, K]
    v = split_heads(v, k.shape[1])  # [B, G, S, width of a value head]
    q, rotate_q_backward = context.position.rotate(q, context.q_positions)
    k, rotate_k_backward = context.position.rotate(k, context.k_positions)
    groups = q.shape[1] // k.shape[1]
    k = np.repeat(k, groups, axis=1)
    v = np.repeat(v, groups, axis=1)
    bias, bias_backward = context.position.bias(q, k, context.q_positions, context.k_positions)
    attn_output, weights, attend_backward = attend(q, k, v, context.allowed[:, None], bias, context.drop)
    context.attention_weights[w.path + "kernel.weights"] = weights
    y, out_backward = linear(merge_heads(attn_output), w / "out")

    def backward(dy: Array) -> tuple[Array, Array]:
        dq, dk, dv, dbias = attend_backward(split_heads(out_backward(dy), heads))
        dq_bias, dk_bias = bias_backward(dbias)
        dk = sum_groups(dk + dk_bias, groups)
        dv = sum_groups(dv, groups)
        dx = q_backward(merge_heads(rotate_q_backward(dq + dq_bias)))
        return dx, k_backward(merge_heads(rotate_k_backward(dk))) + v_backward(merge_heads(dv))

    return y, backward


def split_heads(x: Array, heads: int) -> Array:
    """[B, Q, H·K] → [B, H, Q, K]; the length is x's own, so keys may be longer or shorter than queries."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def merge_heads(x: Array) -> Array:
    """[B, H, Q, K] → [B, Q, H·K]"""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def sum_groups(x: Array, groups: int) -> Array:
    """Backward of repeating heads: the gradients of the copies are summed, [B, G·groups, S, K] → [B, G, S, K]."""
    batch, heads, length, width = x.shape
    return x.reshape(batch, heads // groups, groups, length, width).sum(axis=2)
