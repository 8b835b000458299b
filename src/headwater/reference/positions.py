"""5. Six ways to say where a token stands. Attention alone does not know: it would read a bag of words.

A position may add to the embedding, turn queries and keys, or add a bias to the scores. Each class answers all three
and leaves alone what it does not use, so that no caller asks which one it is.
B batch, H heads, Q queries, S keys, K head width, D model width. Places are whole numbers, [B, Q] and [B, S].
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from headwater.errors import TooLong
from headwater.reference.config import BUCKETS, Config
from headwater.reference.gradients import Array, Back, Parameters, identity
from headwater.reference.ops import linear, lookup

BiasBack = Callable[[Array], tuple[Array, Array]]


class NoPosition:
    """Order is told by nothing but the causal mask."""

    def __init__(self, config: Config, w: Parameters, layer: int = 0) -> None:
        self.config, self.w, self.layer = config, w, layer  # w: the parameters of the stack

    def add(self, x: Array, places: Array) -> tuple[Array, Back]:
        return x, identity

    def turn(self, x: Array, places: Array) -> tuple[Array, Back]:
        return x, identity

    def bias(self, q: Array, k: Array, q_places: Array, k_places: Array) -> tuple[Array, BiasBack]:
        """What is added to the scores [B, H, Q, S]; the way back gives dq and dk."""
        nothing = np.zeros((), q.dtype)
        return nothing, lambda dbias: (nothing, nothing)


def sinusoid(places: Array, width: int) -> Array:
    """PE(p, i) = sin(p / 10000^(i/width)) for even i, and cos of the same angle at i + 1: [..., width].

    Each pair is a clock hand; the first turns once in 2π places, the last in about 10000 · 2π.
    """
    angles = turns(places, width)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(*places.shape, width)


def turns(places: Array, width: int) -> Array:
    """The angles place / 10000^(i/width) for i = 0, 2, 4 …: [..., width / 2]. Not 2i/width: i is even already."""
    return places[..., None] / 10000.0 ** (np.arange(0, width, 2) / width)


class Sinusoidal(NoPosition):
    """x + PE(place): nothing to learn, no longest length."""

    def add(self, x: Array, places: Array) -> tuple[Array, Back]:
        return x + sinusoid(places, x.shape[-1]).astype(x.dtype), identity


class Learned(NoPosition):
    """x + T[place]: one learned vector for each place, up to config.longest places."""

    def add(self, x: Array, places: Array) -> tuple[Array, Back]:
        if places.max(initial=0) >= self.config.longest:
            longest = int(places.max()) + 1
            raise TooLong(f"at most {self.config.longest} places are learned, got {longest}; shorten the text")
        vectors, table_back = lookup(places, self.w / "embed.position.table")

        def back(dy: Array) -> Array:
            table_back(dy)
            return dy

        return x + vectors, back


class Rotary(NoPosition):
    """RoPE: the pair (x_i, x_{i+K/2}) of a head turns by the angle place · 10000^(−2i/K).

    a cos − b sin           q at place m and k at place n then meet at the angle between them:
    b cos + a sin           their product depends on m − n alone
    """

    def turn(self, x: Array, places: Array) -> tuple[Array, Back]:
        width = x.shape[-1]
        angles = turns(places[:, None], width)
        cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)

        def rotate(x: Array, sin: Array) -> Array:
            a, b = x[..., : width // 2], x[..., width // 2 :]
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

        return rotate(x, sin), lambda dy: rotate(dy, -sin)  # the inverse of a rotation is its transpose


class Alibi(NoPosition):
    """score − slope_h · |m − n|: far keys count less, at a rate fixed for each head; nothing to learn."""

    def bias(self, q: Array, k: Array, q_places: Array, k_places: Array) -> tuple[Array, BiasBack]:
        far = np.abs(q_places[:, :, None] - k_places[:, None, :])
        slopes = np.array(alibi_slopes(q.shape[1]))
        _, back = super().bias(q, k, q_places, k_places)
        return (-slopes[:, None, None] * far[:, None]).astype(q.dtype), back


def alibi_slopes(heads: int) -> list[float]:
    """2^(−8h/H) for h = 1 … H; beyond the largest power of two in H, the steps between those of twice as many heads."""
    power = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return slopes + [2 ** (-4 * h / power) for h in range(1, 2 * (heads - power), 2)]


class RelativeBias(NoPosition):
    """T5: score + T[bucket(n − m), h]: one learned number for each head and bucket of distances."""

    def bias(self, q: Array, k: Array, q_places: Array, k_places: Array) -> tuple[Array, BiasBack]:
        two_way = self.w.path.startswith("encoder")  # a decoder never looks ahead and spends no buckets on it
        distance = k_places[:, None, :] - q_places[:, :, None]
        per_head, table_back = lookup(bucket(distance, two_way), self.w / "positions.0.table")
        _, nothing = super().bias(q, k, q_places, k_places)

        def back(dbias: Array) -> tuple[Array, Array]:
            table_back(dbias.transpose(0, 2, 3, 1))
            return nothing(dbias)

        return per_head.transpose(0, 3, 1, 2), back


REACH = 128


def bucket(distance: Array, two_way: bool) -> Array:
    """Half of the buckets hold one distance each, the others grow with its logarithm; the last takes all beyond REACH.

    Two ways: the first 16 buckets look back and the other 16 ahead.
    """
    count = BUCKETS // 2 if two_way else BUCKETS
    ahead = count * (distance > 0) if two_way else 0
    far = np.abs(distance) if two_way else np.maximum(-distance, 0)
    exact = count // 2
    growth = np.log(np.maximum(far, 1).astype(np.float32) / exact) / np.float32(math.log(REACH / exact))
    wide = exact + (growth * (count - exact)).astype(np.int64)
    return ahead + np.where(far < exact, far, np.minimum(wide, count - 1))


class RelativeXL(NoPosition):
    """Transformer-XL: score = ((q + u)·k + (q + v)·r) / √K with r = W PE(m − n); u, v and W belong to one layer.

    q·k is what attention adds by itself; here are the other terms: u·k, which key matters to everyone, and (q + v)·r.
    """

    def bias(self, q: Array, k: Array, q_places: Array, k_places: Array) -> tuple[Array, BiasBack]:
        w, (heads, width) = self.w / f"positions.{self.layer}", (q.shape[1], q.shape[3])
        distance = q_places[:, :, None] - k_places[:, None, :]
        angles = turns(distance, heads * width)
        waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1).astype(q.dtype)
        r, distance_back = linear(waves, w / "distance")
        r = r.reshape(*distance.shape, heads, width)  # [B, Q, S, H, K]
        u, v, scale = w["u"], w["v"], 1 / math.sqrt(width)  # u, v [H, 1, K]
        terms = u @ k.swapaxes(-1, -2) + np.einsum("bhqk,bqshk->bhqs", q + v, r)

        def back(dbias: Array) -> tuple[Array, Array]:
            d = dbias * scale
            per_key = d.sum(axis=2)  # u·k is the same for every query
            dq = np.einsum("bhqs,bqshk->bhqk", d, r)
            w.add("u", np.einsum("bhs,bhsk->hk", per_key, k)[:, None])
            w.add("v", dq.sum(axis=(0, 2))[:, None])
            distance_back(np.einsum("bhqs,bhqk->bqshk", d, q + v).reshape(*distance.shape, -1))
            return dq, per_key[..., None] * u

        return terms * scale, back


POSITIONS: dict[str, type[NoPosition]] = {
    "none": NoPosition,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rotary": Rotary,
    "alibi": Alibi,
    "relative": RelativeBias,
    "xl": RelativeXL,
}
