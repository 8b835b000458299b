"""Position encodings: sinusoidal, learned, rotary (RoPE), ALiBi, T5's relative bias.

A position encoding may add to the embedding, rotate q and k, add a bias to the scores, or add one that depends on the
queries. Each module implements all four and returns its input where it has no part, so no caller asks its type. A spec
says what it applies to (so that it is refused where it would do nothing) and whether equal layers share one module.
B batch, H heads, Q queries, S keys, D width of a head or of the model; positions are integers, [B|1, Q].
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from headwater.core.base import PositionSpec
from headwater.core.modules import ComputedBuffers
from headwater.errors import TooLong
from headwater.i18n import _
from headwater.parts import must, part

CosSin = tuple[Tensor, Tensor]


class PositionEncoding(ComputedBuffers):
    """Base class: no position encoding. Each subclass overrides what it uses, and says so if that is a bias."""

    has_bias: ClassVar[bool] = False  # whether bias() is added to the scores
    has_query_bias: ClassVar[bool] = False  # whether query_bias() is

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add to the embedding x [B, Q, D]."""
        return x

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> CosSin | None:
        """The tables that rotate() needs, computed once per forward pass for all layers."""
        return None

    def rotate(self, q: Tensor, k: Tensor, cos_sin: CosSin | None) -> tuple[Tensor, Tensor]:
        """Rotate q [B, H, Q, D] and k [B, G, Q, D], after the projections and before the KV cache."""
        return q, k

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """[B|1, H, Q, S] added to the scores; it depends on positions alone and is computed once per forward pass."""
        raise NotImplementedError

    def distance_bias(self, back: int, ahead: int) -> Tensor | None:
        """[H, back + 1 + ahead] the bias at key - query = -back … ahead, if it depends on the distance alone."""
        return None

    def query_bias(self, q: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """[B, H, Q, S] added to the scores, computed from the queries."""
        raise NotImplementedError


@part
class NoPosition(PositionSpec):
    """No position encoding."""

    applies_to: ClassVar[str] = "none"

    def build(self, width: int, heads: int = 1) -> PositionEncoding:
        return PositionEncoding()


# ------------------------------------------------------------------------------------------- added to the embedding


@part
class Sinusoidal(PositionSpec):
    """Sinusoidal: PE(p, 2i) = sin(p / base^(2i/D)), PE(p, 2i + 1) = cos(p / base^(2i/D)) (Vaswani et al. 2017)."""

    base: float = 10000.0
    applies_to: ClassVar[str] = "embedding"
    halves: ClassVar[bool] = False

    def __post_init__(self) -> None:
        must(self.base > 1, self, _("base must be above 1"), self.base, _("10000 is usual"))

    def build(self, width: int, heads: int = 1) -> PositionEncoding:
        must(width % 2 == 0, self, _("the width must be even"), width, _("choose an even d_model"))
        return SinusoidalEncoding(width, self.base, self.halves)


@part
class SinusoidalHalves(Sinusoidal):
    """Sinusoidal with all sines first and then all cosines (Marian)."""

    halves: ClassVar[bool] = True


@part
class Learned(PositionSpec):
    """Learned position embeddings, one vector per position. offset: the row of position 0 (2 in RoBERTa and BART)."""

    size: int
    offset: int = 0
    applies_to: ClassVar[str] = "embedding"

    def __post_init__(self) -> None:
        must(
            self.size > self.offset,
            self,
            _("size must be above offset"),
            self.size,
            _("rows before `offset` are never used"),
        )

    @property
    def max_positions(self) -> int:
        return self.size - self.offset

    def build(self, width: int, heads: int = 1) -> PositionEncoding:
        return LearnedEncoding(self.size, width, self.offset)


class SinusoidalEncoding(PositionEncoding):
    """Sinusoidal encodings, computed for the positions of a forward pass. inv_freq [D/2]."""

    inv_freq: Tensor

    def __init__(self, width: int, base: float, halves: bool) -> None:
        super().__init__()
        self.base = base
        self.halves = halves
        self.register_buffer("inv_freq", torch.empty(width // 2), persistent=False)

    def init_buffers(self) -> None:
        width = 2 * self.inv_freq.numel()
        even = torch.arange(0, width, 2, dtype=torch.float64, device=self.inv_freq.device)
        self.inv_freq.copy_(self.base ** (-even / width))

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        angle = positions[..., None] * self.inv_freq
        pair = (angle.sin(), angle.cos())
        sinusoids = torch.cat(pair, -1) if self.halves else torch.stack(pair, -1).flatten(-2)  # [B|1, Q, D]
        return x + sinusoids.to(x.dtype)


class LearnedEncoding(PositionEncoding):
    """A table of learned position embeddings."""

    def __init__(self, size: int, width: int, offset: int) -> None:
        super().__init__()
        self.offset = offset
        self.table = nn.Embedding(size, width)

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        size = self.table.num_embeddings - self.offset
        try:
            return x + self.table(positions + self.offset)
        except IndexError:
            raise TooLong(
                _(
                    "position.table: there are {size} positions, got a token at position {max}; "
                    "shorten the input to {size} tokens",
                    size=size,
                    max=int(positions.max()),
                )
            ) from None


# --------------------------------------------------------------------------------------------- rotation of q and k


class RopeScaling:
    """Base class of RoPE scaling, for longer contexts than trained (variants/rope_scaling.py)."""

    attention_scaling: ClassVar[float] = 1.0  # a factor on cos and sin

    def scale_frequencies(self, inv_freq: Tensor, theta: float) -> Tensor:
        """The frequencies of all forward passes, from theta^(-2i/D) in float64."""
        return inv_freq

    def for_length(self, inv_freq: Tensor, theta: float, positions: Tensor) -> Tensor:
        """The frequencies of one forward pass, [n] or [B|1, 1, 1, n], if they depend on its length."""
        return inv_freq


@part
class NoScaling(RopeScaling):
    """No RoPE scaling."""


@part
class Rotary(PositionSpec):
    """RoPE (Su et al. 2021): the pair (x_i, x_{i + D/2}) is rotated by position · theta^(-2i/D).

    partial_factor: the fraction of each head that is rotated. scaling: see RopeScaling.
    """

    theta: float = 10000.0
    partial_factor: float = 1.0
    scaling: RopeScaling = NoScaling()
    applies_to: ClassVar[str] = "attention"

    def __post_init__(self) -> None:
        must(self.theta > 1, self, _("theta must be above 1"), self.theta, _("10000 is usual"))
        must(
            0 < self.partial_factor <= 1,
            self,
            _("partial_factor must be above 0 and at most 1"),
            self.partial_factor,
            _("1.0 rotates the full head"),
        )

    def build(self, width: int, heads: int = 1) -> PositionEncoding:
        rotated = int(width * self.partial_factor)
        must(
            rotated % 2 == 0 and rotated > 0,
            self,
            _("the rotated width must be even"),
            rotated,
            _("choose an even head_dim"),
        )
        return RotaryEncoding(rotated, self.theta, self.scaling)


class RotaryEncoding(PositionEncoding):
    """Rotary position embedding of q and k. inv_freq [D/2]."""

    inv_freq: Tensor

    def __init__(self, width: int, theta: float, scaling: RopeScaling) -> None:
        super().__init__()
        self.theta = theta
        self.scaling = scaling
        self.register_buffer("inv_freq", torch.empty(width // 2), persistent=False)

    def init_buffers(self) -> None:
        width = 2 * self.inv_freq.numel()
        even = torch.arange(0, width, 2, dtype=torch.float64, device=self.inv_freq.device)
        self.inv_freq.copy_(self.scaling.scale_frequencies(self.theta ** (-even / width), self.theta))

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> CosSin:
        """cos and sin, each [B|1, 1, Q, D/2]."""
        inv_freq = self.scaling.for_length(self.inv_freq, self.theta, positions)
        angle = positions[:, None, :, None] * inv_freq
        gain = self.scaling.attention_scaling
        return (angle.cos() * gain).to(dtype), (angle.sin() * gain).to(dtype)

    def rotate(self, q: Tensor, k: Tensor, cos_sin: CosSin | None) -> tuple[Tensor, Tensor]:
        assert cos_sin is not None
        cos, sin = cos_sin
        return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs: (a, b) -> (a cos - b sin, b cos + a sin) on the first 2n of D values; cos, sin [B|1, 1, Q, n]."""
    n = cos.shape[-1]
    a, b, rest = x.tensor_split((n, 2 * n), -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


# --------------------------------------------------------------------------------------------- bias of the scores


@part
class Alibi(PositionSpec):
    """ALiBi: scores decrease by slope · distance; slope 2^(-8h/H) of head h, or BLOOM's if H is no power of 2."""

    applies_to: ClassVar[str] = "attention"

    def build(self, width: int, heads: int = 1) -> PositionEncoding:
        return AlibiBias(heads)


@part
class RelativeBias(PositionSpec):
    """T5's relative position bias: a learned bias per head and bucket of distance.

    Near distances have a bucket each; farther ones share buckets that grow with the logarithm, up to max_distance.
    bidirectional: half of the buckets are for keys ahead. Equal specs in one stack share one table.
    """

    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True
    applies_to: ClassVar[str] = "attention"

    def __post_init__(self) -> None:
        near = self.num_buckets // (4 if self.bidirectional else 2)
        must(
            near >= 1 and self.max_distance > near,
            self,
            _("max_distance must be above the near buckets"),
            self.max_distance,
            _("above {near}", near=near),
        )

    def build(self, width: int, heads: int = 1) -> PositionEncoding:
        return T5Bias(self, heads)


class AlibiBias(PositionEncoding):
    """ALiBi. slopes [H]."""

    has_bias = True
    slopes: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.empty(heads), persistent=False)

    def init_buffers(self) -> None:
        heads = self.slopes.numel()
        power = 2 ** int(math.log2(heads))  # the largest power of 2 up to heads
        values = [2 ** (-8 * (i + 1) / power) for i in range(power)]
        values += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
        self.slopes.copy_(torch.tensor(values))

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        distance = (q_positions[:, :, None] - k_positions[:, None, :]).abs()
        return -self.slopes[:, None, None] * distance[:, None]

    def distance_bias(self, back: int, ahead: int) -> Tensor:
        return _of_one_query(self, back, ahead, self.slopes.device)


class T5Bias(PositionEncoding):
    """The table of T5's relative position bias, [num_buckets, H]."""

    has_bias = True

    def __init__(self, spec: RelativeBias, heads: int) -> None:
        super().__init__()
        self.spec = spec
        self.table = nn.Embedding(spec.num_buckets, heads)

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        buckets = self.bucket(k_positions[:, None, :] - q_positions[:, :, None])
        return self.table(buckets).permute(0, 3, 1, 2)  # [B|1, H, Q, S]

    def distance_bias(self, back: int, ahead: int) -> Tensor:
        return _of_one_query(self, back, ahead, self.table.weight.device)

    def bucket(self, relative_position: Tensor) -> Tensor:
        """Bucket of key - query. Of n buckets a side, n/2 are exact; the rest grow by logarithm up to max_distance."""
        spec = self.spec
        side = spec.num_buckets // 2 if spec.bidirectional else spec.num_buckets
        ahead = side * (relative_position > 0) if spec.bidirectional else torch.zeros_like(relative_position)
        distance = relative_position.abs() if spec.bidirectional else (-relative_position).clamp(min=0)
        exact = side // 2
        log = torch.log(distance.clamp(min=1) / exact) / math.log(spec.max_distance / exact) * (side - exact)
        return ahead + torch.where(distance < exact, distance, (exact + log.long()).clamp(max=side - 1))


def _of_one_query(encoding: PositionEncoding, back: int, ahead: int, device: torch.device) -> Tensor:
    """[H, back + 1 + ahead] the bias of a query at position `back` for the keys around it."""
    keys = torch.arange(back + 1 + ahead, device=device)[None]
    return encoding.bias(keys[:, back : back + 1], keys)[0, :, 0]
