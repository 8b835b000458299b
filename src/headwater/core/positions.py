"""Where a token stands. A position may add to the embedding, turn q and k, bias the scores, or score against the query.

Each module answers all four and leaves alone what it does not use, so no caller asks its kind. A part says where it
acts (so that it is not silently put where it would do nothing) and whether the layers of a stack share one module.
B batch, H heads, Q queries, S keys, D width of a head or of the model; places are whole numbers, [B|1, Q].
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headwater.core.kinds import Placing
from headwater.core.rope import NoScaling, Scaling
from headwater.errors import TooLong
from headwater.parts import must, part


class Position(nn.Module):
    """The position that does nothing; the others change one answer each."""

    def add(self, x: Tensor, places: Tensor) -> Tensor:
        """x [B, Q, D] at the embedding."""
        return x

    def angles(self, places: Tensor, dtype: torch.dtype) -> Any:
        """What turn needs of the places, made once a call for all layers."""
        return None

    def turn(self, q: Tensor, k: Tensor, angles: Any) -> tuple[Tensor, Tensor]:
        """q [B, H, Q, D] and k, after the projections and before any cache."""
        return q, k

    def bias(self, q_places: Tensor, k_places: Tensor) -> Tensor | None:
        """[B|1, H, Q, S] added to the scores; depends on places alone, so it is made once a call."""
        return None

    def score(self, q: Tensor, q_places: Tensor, k_places: Tensor) -> Tensor | None:
        """[B, H, Q, S] added to the scores, from the queries themselves."""
        return None

    def constants(self) -> None:
        """Fill the buffers that are computed rather than learned."""

    def _apply(self, fn: Any, recurse: bool = True) -> Position:
        """As every module moves, but computed buffers never go below float32: bfloat16 knows no place 257."""
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers(recurse=False):
            setattr(self, name, buffer.to(torch.promote_types(buffer.dtype, torch.float32)))
        with torch.no_grad():
            self.constants()
        return self


@part
class NoPosition(Placing):
    acts: ClassVar[str] = "nowhere"
    shared: ClassVar[bool] = True

    def build(self, width: int, heads: int = 1) -> Position:
        return Position()


# ------------------------------------------------------------------------------------------- added to the embedding


@part
class Sinusoidal(Placing):
    """PE(p, 2i) = sin(p / base^(2i/D)), PE(p, 2i + 1) = cos(p / base^(2i/D)): the paper's, interleaved."""

    base: float = 10000.0
    acts: ClassVar[str] = "embedding"

    def __post_init__(self) -> None:
        must(self.base > 1, self, "base must be above 1", self.base, "10000 is usual")

    def build(self, width: int, heads: int = 1) -> Position:
        must(width % 2 == 0, self, "the width must be even", width, "choose an even d_model")
        return Sines(width, self.base, halves=False)


@part
class SinusoidalHalves(Placing):
    """The same sines, all of them first and then all cosines (Marian)."""

    base: float = 10000.0
    acts: ClassVar[str] = "embedding"

    def __post_init__(self) -> None:
        must(self.base > 1, self, "base must be above 1", self.base, "10000 is usual")

    def build(self, width: int, heads: int = 1) -> Position:
        must(width % 2 == 0, self, "the width must be even", width, "choose an even d_model")
        return Sines(width, self.base, halves=True)


@part
class Learned(Placing):
    """A table of vectors, one a place. first: the row of place 0 (RoBERTa and BART begin at 2)."""

    size: int
    first: int = 0
    acts: ClassVar[str] = "embedding"

    def __post_init__(self) -> None:
        must(self.size > self.first, self, "size must be above first", self.size, "rows before `first` are never used")

    def build(self, width: int, heads: int = 1) -> Position:
        return LearnedTable(self.size, width, self.first)


class Sines(Position):
    speed: Tensor

    def __init__(self, width: int, base: float, halves: bool) -> None:
        super().__init__()
        self.base, self.halves = base, halves
        self.register_buffer("speed", torch.empty(width // 2), persistent=False)

    def constants(self) -> None:
        width = 2 * self.speed.numel()
        even = torch.arange(0, width, 2, dtype=torch.float64, device=self.speed.device)
        self.speed.copy_(self.base ** (-even / width))

    def add(self, x: Tensor, places: Tensor) -> Tensor:
        angle = places[..., None] * self.speed
        pair = (angle.sin(), angle.cos())
        waves = torch.cat(pair, -1) if self.halves else torch.stack(pair, -1).flatten(-2)
        return x + waves.to(x.dtype)


class LearnedTable(Position):
    def __init__(self, size: int, width: int, first: int) -> None:
        super().__init__()
        self.first, self.table = first, nn.Embedding(size, width)

    def add(self, x: Tensor, places: Tensor) -> Tensor:
        room = self.table.num_embeddings - self.first
        if torch.compiler.is_compiling() or places.device.type == "meta":
            return x + self.table(places + self.first)
        try:
            return x + self.table(places + self.first)
        except IndexError:
            raise TooLong(
                f"position.table: there are {room} places, got a token at place {int(places.max())}; "
                f"shorten the input to {room} tokens"
            ) from None


# --------------------------------------------------------------------------------------------- turning q and k


@part
class Rotary(Placing):
    """RoPE: the pair (x_i, x_{i + D/2}) is turned by place · theta^(-2i/D).

    share: the part of each head that turns. scaling: how the speeds change beyond the trained length (see rope.py).
    """

    theta: float = 10000.0
    share: float = 1.0
    scaling: Scaling = NoScaling()
    acts: ClassVar[str] = "attention"
    shared: ClassVar[bool] = True

    def __post_init__(self) -> None:
        must(self.theta > 1, self, "theta must be above 1", self.theta, "10000 is usual")
        must(0 < self.share <= 1, self, "share must be above 0 and at most 1", self.share, "1.0 turns the whole head")

    def build(self, width: int, heads: int = 1) -> Position:
        turned = int(width * self.share)
        must(turned % 2 == 0 and turned > 0, self, "the turned width must be even", turned, "choose an even head_dim")
        return Turn(turned, self.theta, self.scaling)


class Turn(Position):
    speed: Tensor

    def __init__(self, width: int, theta: float, scaling: Any) -> None:
        super().__init__()
        self.theta, self.scaling = theta, scaling
        self.register_buffer("speed", torch.empty(width // 2), persistent=False)

    def constants(self) -> None:
        width = 2 * self.speed.numel()
        even = torch.arange(0, width, 2, dtype=torch.float64, device=self.speed.device)
        self.speed.copy_(self.scaling.speeds(self.theta ** (-even / width), self.theta))

    def angles(self, places: Tensor, dtype: torch.dtype) -> Any:
        speed = self.scaling.at_length(self.speed, self.theta, places)
        angle = places[:, None, :, None] * speed
        gain = self.scaling.gain
        return (angle.cos() * gain).to(dtype), (angle.sin() * gain).to(dtype)

    def turn(self, q: Tensor, k: Tensor, angles: Any) -> tuple[Tensor, Tensor]:
        return rotate(q, *angles), rotate(k, *angles)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin) on the first 2n of D numbers; cos, sin [B|1, 1, Q, n]."""
    n = cos.shape[-1]
    a, b, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


# ------------------------------------------------------------------------------------------------ biasing the scores


@part
class Alibi(Placing):
    """Scores fall by slope · distance; head h of H has slope 2^(-8h/H), or BLOOM's rule where H is no power of 2."""

    acts: ClassVar[str] = "attention"
    shared: ClassVar[bool] = True

    def build(self, width: int, heads: int = 1) -> Position:
        return Slopes(heads)


@part
class RelativeBias(Placing):
    """T5: a learned bias per head for each bucket of distance; near distances have a bucket each, far ones share.

    two_way: half of the buckets are for keys ahead. Equal parts in one stack are one table.
    """

    buckets: int = 32
    reach: int = 128
    two_way: bool = True
    acts: ClassVar[str] = "attention"
    shared: ClassVar[bool] = True

    def __post_init__(self) -> None:
        near = self.buckets // (4 if self.two_way else 2)
        must(near >= 1 and self.reach > near, self, "reach must be above the near buckets", self.reach, f"above {near}")

    def build(self, width: int, heads: int = 1) -> Position:
        return BucketTable(self, heads)


class Slopes(Position):
    slope: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.register_buffer("slope", torch.empty(heads), persistent=False)

    def constants(self) -> None:
        heads = self.slope.numel()
        whole = 2 ** int(math.log2(heads))
        slopes = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
        slopes += [2 ** (-4 * (2 * i + 1) / whole) for i in range(heads - whole)]
        self.slope.copy_(torch.tensor(slopes))

    def bias(self, q_places: Tensor, k_places: Tensor) -> Tensor | None:
        distance = (q_places[:, :, None] - k_places[:, None, :]).abs()
        return -self.slope[:, None, None] * distance[:, None]


class BucketTable(Position):
    def __init__(self, spec: RelativeBias, heads: int) -> None:
        super().__init__()
        self.spec, self.table = spec, nn.Embedding(spec.buckets, heads)

    def bias(self, q_places: Tensor, k_places: Tensor) -> Tensor | None:
        return self.table(self.bucket(k_places[:, None, :] - q_places[:, :, None])).permute(0, 3, 1, 2)

    def bucket(self, offset: Tensor) -> Tensor:
        """Bucket of key - query. Of n buckets a side, n/2 are exact; the rest grow as the logarithm up to reach."""
        spec = self.spec
        side = spec.buckets // 2 if spec.two_way else spec.buckets
        ahead = side * (offset > 0) if spec.two_way else torch.zeros_like(offset)
        far = offset.abs() if spec.two_way else (-offset).clamp(min=0)
        near = side // 2
        log = torch.log(far.clamp(min=1) / near) / math.log(spec.reach / near) * (side - near)
        return ahead + torch.where(far < near, far, (near + log.long()).clamp(max=side - 1))


# ------------------------------------------------------------------------------------- scoring against the query


@part
class RelativeXL(Placing):
    """Transformer-XL: score = (q + u)·k + (q + v)·R(distance), R = W sines(distance); u, v, W belong to one layer."""

    acts: ClassVar[str] = "attention"
    shared: ClassVar[bool] = False

    def build(self, width: int, heads: int = 1) -> Position:
        return XLTerms(width, heads)


class XLTerms(Position):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.empty(heads, 1, width))
        self.v = nn.Parameter(torch.empty(heads, 1, width))
        self.distance = nn.Linear(heads * width, heads * width, bias=False)
        self.waves = Sines(heads * width, 10000.0, halves=True)

    def turn(self, q: Tensor, k: Tensor, angles: Any) -> tuple[Tensor, Tensor]:
        return q + self.u, k

    def score(self, q: Tensor, q_places: Tensor, k_places: Tensor) -> Tensor | None:
        """R is worked out once for each distance that occurs, not for each pair of places."""
        offset = q_places[:, :, None] - k_places[:, None, :]
        least, most = self._span(q_places, k_places, offset)
        steps = torch.arange(least, most + 1, device=q.device)
        r = self.distance(self.waves.add(q.new_zeros(1), steps)).unflatten(-1, q.shape[1::2]).transpose(0, 1)
        by_distance = (q - self.u + self.v) @ r.mT
        index = (offset - least)[:, None].expand(q.shape[0], q.shape[1], -1, -1)
        return by_distance.gather(-1, index)

    @staticmethod
    def _span(q_places: Tensor, k_places: Tensor, offset: Tensor) -> tuple[int, int]:
        """The least and greatest distance; from the lengths alone where values must not be looked at."""
        if torch.compiler.is_compiling() or offset.device.type == "meta":
            bound = max(q_places.shape[1], k_places.shape[1])
            return -bound, bound
        return int(offset.min()), int(offset.max())
