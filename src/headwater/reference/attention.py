"""6. Attention: every token asks (q), is asked (k) and answers (v).

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
    """Attention(q, k, v) = P v with P = softmax(q kᵀ / √K + bias); also gives P, and the way back to q, k, v, bias.

    Without 1/√K the scores of wide heads grow, and the softmax hardens until no gradient passes.
    """
    scale = 1 / math.sqrt(q.shape[-1])
    scores = q @ k.swapaxes(-1, -2) * scale + bias
    weights, softmax_back = softmax(scores, allowed)
    kept, drop_back = drop(weights)

    def back(dy: Array) -> tuple[Array, Array, Array, Array]:
        # y = P v gives dP = dy vᵀ and dv = Pᵀ dy; s = scale q kᵀ gives dq = scale ds k and dk = scale dsᵀ q
        dscores = softmax_back(drop_back(dy @ v.swapaxes(-1, -2)))
        dv = kept.swapaxes(-1, -2) @ dy
        return dscores @ k * scale, dscores.swapaxes(-1, -2) @ q * scale, dv, dscores

    return kept @ v, weights, back


@dataclass(frozen=True)
class View:
    """What an attention knows beside its input: who may look at whom, where both stand, and who listens."""

    allowed: Array  # [B, Q, S]
    q_places: Array  # [B, Q]
    k_places: Array  # [B, S]
    position: NoPosition
    drop: Layer
    seen: dict[str, Array]  # attention weights [B, H, Q, S], by path


def multi_head(
    x: Array, memory: Array, w: Parameters, heads: int, view: View
) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
    """H small attentions side by side, joined by one last map: y = W_out [head_1 … head_H].

    Queries come from x [B, Q, D], keys and values from memory [B, S, D]: x itself, or an encoder's output.
    With fewer key/value heads, each serves the H / G query heads next to one another.
    """
    q, q_back = linear(x, w / "q")
    k, k_back = linear(memory, w / "k")
    v, v_back = linear(memory, w / "v")
    q = split(q, heads)
    k = split(k, k.shape[-1] // q.shape[-1])  # as wide as those of q, perhaps fewer
    v = split(v, k.shape[1])  # as many as those of k, perhaps of another width
    q, turn_q_back = view.position.turn(q, view.q_places)
    k, turn_k_back = view.position.turn(k, view.k_places)
    groups = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
    bias, bias_back = view.position.bias(q, k, view.q_places, view.k_places)
    mixed, weights, attend_back = attend(q, k, v, view.allowed[:, None], bias, view.drop)
    view.seen[w.path + "kernel.weights"] = weights
    y, out_back = linear(join(mixed), w / "out")

    def back(dy: Array) -> tuple[Array, Array]:
        dq, dk, dv, dbias = attend_back(split(out_back(dy), heads))
        dq_bias, dk_bias = bias_back(dbias)
        dk, dv = gather(dk + dk_bias, groups), gather(dv, groups)
        dx = q_back(join(turn_q_back(dq + dq_bias)))
        return dx, k_back(join(turn_k_back(dk))) + v_back(join(dv))

    return y, back


def split(x: Array, heads: int) -> Array:
    """[B, Q, H·K] → [B, H, Q, K]; the length is x's own, so keys may be longer or shorter than queries."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def join(x: Array) -> Array:
    """[B, H, Q, K] → [B, Q, H·K]"""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def gather(x: Array, groups: int) -> Array:
    """The way back through a repeat: the gradients of the copies add up, [B, G·groups, S, K] → [B, G, S, K]."""
    batch, heads, length, width = x.shape
    return x.reshape(batch, heads // groups, groups, length, width).sum(axis=2)
