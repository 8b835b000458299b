"""5. Position encodings: sinusoidal, learned, rotary, ALiBi, T5's relative bias, Transformer-XL.

Attention by itself ignores the order of tokens (a bag of words). A position encoding may add to the embedding, rotate
queries and keys, or add a bias to the scores. Each class implements all three, so that callers need no branches.
B batch, H heads, Q queries, S keys, K head width, D model width. Positions are integers, [B, Q] and [B, S].
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from headwater.errors import TooLong
from headwater.i18n import _
from headwater.reference.config import NUM_BUCKETS, Config
from headwater.reference.gradients import Array, Backward, Parameters, identity
from headwater.reference.ops import linear, lookup

BiasBackward = Callable[[Array], tuple[Array, Array]]


class NoPosition:
    """No position encoding (NoPE): only the causal mask depends on the order."""

    def __init__(self, config: Config, w: Parameters, layer: int = 0) -> None:
        self.config = config
        self.w = w  # the parameters of the stack
        self.layer = layer

    def add(self, x: Array, positions: Array) -> tuple[Array, Backward]:
        return x, identity

    def rotate(self, x: Array, positions: Array) -> tuple[Array, Backward]:
        return x, identity

    def bias(self, q: Array, k: Array, q_positions: Array, k_positions: Array) -> tuple[Array, BiasBackward]:
        """The term added to the scores [B, H, Q, S]; its backward function returns dq and dk."""
        zero_bias = np.zeros((), q.dtype)
        return zero_bias, lambda dbias: (zero_bias, zero_bias)


def sinusoid(positions: Array, width: int) -> Array:
    """Sinusoids: PE(p, i) = sin(p / 10000^(i/width)) for even i, and cos of the same angle at i + 1: [..., width].

    Each pair is a point on a circle; the first rotates once in 2π positions, the last in about 10000 · 2π.
    """
    angles = rotation_angles(positions, width)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(*positions.shape, width)


def rotation_angles(positions: Array, width: int) -> Array:
    """The angles position / 10000^(i/width) for i = 0, 2, 4 …: [..., width / 2]. Not 2i/width: i is even already."""
    return positions[..., None] / 10000.0 ** (np.arange(0, width, 2) / width)


class Sinusoidal(NoPosition):
    """Sinusoidal: x + PE(position); no parameters and no maximum length."""

    def add(self, x: Array, positions: Array) -> tuple[Array, Backward]:
        return x + sinusoid(positions, x.shape[-1]).astype(x.dtype), identity


class Learned(NoPosition):
    """Learned: x + T[position], one vector for each of config.max_positions positions."""

    def add(self, x: Array, positions: Array) -> tuple[Array, Backward]:
        if positions.max(initial=0) >= self.config.max_positions:
            length = int(positions.max()) + 1
            raise TooLong(
                _(
                    "at most {max_positions} positions are learned, got {length}; shorten the text",
                    max_positions=self.config.max_positions,
                    length=length,
                )
            )
        vectors, table_backward = lookup(positions, self.w / "embed.position.table")

        def backward(dy: Array) -> Array:
            table_backward(dy)
            return dy

        return x + vectors, backward


class Rotary(NoPosition):
    """RoPE: the pair (x_i, x_{i+K/2}) of a head is rotated by position · 10000^(−2i/K).

    a cos − b sin           the product of q at position m and k at position n
    b cos + a sin           then depends on m − n only
    """

    def rotate(self, x: Array, positions: Array) -> tuple[Array, Backward]:
        width = x.shape[-1]
        angles = rotation_angles(positions[:, None], width)
        cos = np.cos(angles).astype(x.dtype)
        sin = np.sin(angles).astype(x.dtype)

        def apply_rotary(x: Array, sin: Array) -> Array:
            a = x[..., : width // 2]
            b = x[..., width // 2 :]
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

        return apply_rotary(x, sin), lambda dy: apply_rotary(dy, -sin)  # the inverse of a rotation is its transpose


class Alibi(NoPosition):
    """ALiBi: score − slope_h · |m − n|, with a fixed slope for each head; no parameters."""

    def bias(self, q: Array, k: Array, q_positions: Array, k_positions: Array) -> tuple[Array, BiasBackward]:
        distance = np.abs(q_positions[:, :, None] - k_positions[:, None, :])
        slopes = np.array(alibi_slopes(q.shape[1]))
        _, backward = super().bias(q, k, q_positions, k_positions)
        return (-slopes[:, None, None] * distance[:, None]).astype(q.dtype), backward


def alibi_slopes(heads: int) -> list[float]:
    """ALiBi slopes: 2^(−8h/H) for h = 1 … H.

    Where H is not a power of two, the remaining heads have the slopes in between, of twice as many heads.
    """
    power = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return slopes + [2 ** (-4 * h / power) for h in range(1, 2 * (heads - power), 2)]


class RelativeBias(NoPosition):
    """T5: score + T[bucket(n − m), h]: one learned number for each head and bucket of distances."""

    def bias(self, q: Array, k: Array, q_positions: Array, k_positions: Array) -> tuple[Array, BiasBackward]:
        bidirectional = self.w.path.startswith("encoder")  # a decoder never attends ahead and needs no buckets for it
        distance = k_positions[:, None, :] - q_positions[:, :, None]
        per_head, table_backward = lookup(
            relative_bucket(distance, bidirectional), self.w / "position_encodings.0.table"
        )
        _, zero_grads = super().bias(q, k, q_positions, k_positions)

        def backward(dbias: Array) -> tuple[Array, Array]:
            table_backward(dbias.transpose(0, 2, 3, 1))
            return zero_grads(dbias)

        return per_head.transpose(0, 3, 1, 2), backward


MAX_DISTANCE = 128


def relative_bucket(distance: Array, bidirectional: bool) -> Array:
    """T5's buckets of distances: half of them hold one distance each, the others grow by logarithm up to MAX_DISTANCE.

    Bidirectional: the first 16 buckets are for keys behind and the other 16 for keys ahead.
    """
    count = NUM_BUCKETS // 2 if bidirectional else NUM_BUCKETS
    first_bucket = count * (distance > 0) if bidirectional else 0
    magnitude = np.abs(distance) if bidirectional else np.maximum(-distance, 0)
    exact = count // 2
    log_fraction = np.log(np.maximum(magnitude, 1).astype(np.float32) / exact) / np.float32(
        math.log(MAX_DISTANCE / exact)
    )
    log_bucket = exact + (log_fraction * (count - exact)).astype(np.int64)
    return first_bucket + np.where(magnitude < exact, magnitude, np.minimum(log_bucket, count - 1))


class RelativeXL(NoPosition):
    """Transformer-XL: score = ((q + u)·k + (q + v)·r) / √K with r = W PE(m − n); u, v and W belong to one layer.

    Attention itself computes q·k; the bias is the sum of the other terms: u·k, which is the same for every query, and
    (q + v)·r.
    """

    def bias(self, q: Array, k: Array, q_positions: Array, k_positions: Array) -> tuple[Array, BiasBackward]:
        w = self.w / f"position_encodings.{self.layer}"
        heads = q.shape[1]
        width = q.shape[3]
        distance = q_positions[:, :, None] - k_positions[:, None, :]
        angles = rotation_angles(distance, heads * width)
        sinusoids = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1).astype(q.dtype)
        r, distance_backward = linear(sinusoids, w / "position_projection")
        r = r.reshape(*distance.shape, heads, width)  # [B, Q, S, H, K]
        u = w["u.weight"][:, None]  # [H, 1, K]
        v = w["v.weight"][:, None]  # [H, 1, K]
        scale = 1 / math.sqrt(width)
        terms = u @ k.swapaxes(-1, -2) + np.einsum("bhqk,bqshk->bhqs", q + v, r)

        def backward(dbias: Array) -> tuple[Array, Array]:
            d = dbias * scale
            per_key = d.sum(axis=2)  # u·k is the same for every query
            dq = np.einsum("bhqs,bqshk->bhqk", d, r)
            w.add("u.weight", np.einsum("bhs,bhsk->hk", per_key, k))
            w.add("v.weight", dq.sum(axis=(0, 2)))
            distance_backward(np.einsum("bhqs,bhqk->bqshk", d, q + v).reshape(*distance.shape, -1))
            return dq, per_key[..., None] * u

        return terms * scale, backward


POSITIONS: dict[str, type[NoPosition]] = {
    "none": NoPosition,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rotary": Rotary,
    "alibi": Alibi,
    "relative": RelativeBias,
    "xl": RelativeXL,
}
