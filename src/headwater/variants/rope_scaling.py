"""RoPE scaling for longer contexts than trained: linear, dynamic NTK, Llama 3, per frequency (LongRoPE), YaRN."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwater.core.positions import RopeScaling
from headwater.i18n import _
from headwater.parts import must, part


@part
class LinearScaling(RopeScaling):
    """Linear scaling (position interpolation): every frequency divided by the factor."""

    factor: float

    def __post_init__(self) -> None:
        must(self.factor >= 1, self, _("factor must be at least 1"), self.factor, _("1 changes nothing"))

    def scale_frequencies(self, inv_freq: Tensor, theta: float) -> Tensor:
        return inv_freq / self.factor


@part
class DynamicScaling(RopeScaling):
    """Dynamic NTK: past the trained length L the base grows by (factor·n/L - (factor - 1))^(D/(D-2)); n of each row.

    Keys in a KV cache keep their old rotation, so past L cached decoding differs slightly from a full forward pass.
    """

    factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        must(self.factor >= 1, self, _("factor must be at least 1"), self.factor, _("1 changes nothing"))
        must(
            self.original_max_positions >= 1,
            self,
            _("original_max_positions must be at least 1"),
            self.original_max_positions,
            _("give the trained length"),
        )

    def for_length(self, inv_freq: Tensor, theta: float, positions: Tensor) -> Tensor:
        """The frequencies of each row of positions [B, Q]: [B, 1, 1, D / 2]."""
        width = 2 * inv_freq.numel()
        if width <= 2:
            return inv_freq
        length = (positions.amax(1) + 1).clamp(min=self.original_max_positions).double()[:, None, None, None]
        growth = (self.factor * length / self.original_max_positions - (self.factor - 1)) ** (width / (width - 2))
        even = torch.arange(0, width, 2, device=inv_freq.device, dtype=torch.float64)
        return ((theta * growth) ** (-even / width)).to(inv_freq.dtype)


@part
class Llama3Scaling(RopeScaling):
    """Llama 3: high frequencies are unchanged, low ones are divided by factor, those between are interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        must(self.factor >= 1, self, _("factor must be at least 1"), self.factor, _("1 changes nothing"))
        must(
            self.original_max_positions >= 1,
            self,
            _("original_max_positions must be at least 1"),
            self.original_max_positions,
            _("give the trained length"),
        )
        must(
            0 < self.low_freq_factor < self.high_freq_factor,
            self,
            _("low_freq_factor must be above 0 and below high_freq_factor"),
            (self.low_freq_factor, self.high_freq_factor),
            _("1 and 4"),
        )

    def scale_frequencies(self, inv_freq: Tensor, theta: float) -> Tensor:
        rotations = self.original_max_positions * inv_freq / (2 * math.pi)  # full rotations in the trained length
        smooth = ((rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return inv_freq * (smooth + (1 - smooth) / self.factor)


@part
class PerFrequencyScaling(RopeScaling):
    """Each frequency divided by its own factor (LongRoPE)."""

    factors: tuple[float, ...]

    def scale_frequencies(self, inv_freq: Tensor, theta: float) -> Tensor:
        fits = len(self.factors) == inv_freq.numel() and all(factor > 0 for factor in self.factors)
        must(
            fits or inv_freq.is_meta,
            self,
            _("there must be {numel} factors above 0", numel=inv_freq.numel()),
            len(self.factors),
            _("correct it"),
        )
        return inv_freq / torch.tensor(self.factors, dtype=inv_freq.dtype, device=inv_freq.device)


@part
class YarnScaling(RopeScaling):
    """YaRN: low frequencies are divided by factor, with a ramp to the high ones; cos, sin times 0.1·ln(factor) + 1."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        must(self.factor >= 1, self, _("factor must be at least 1"), self.factor, _("1 changes nothing"))
        must(
            self.original_max_positions >= 1,
            self,
            _("original_max_positions must be at least 1"),
            self.original_max_positions,
            _("give the trained length"),
        )
        must(
            0 < self.beta_slow < self.beta_fast,
            self,
            _("beta_slow must be above 0 and below beta_fast"),
            (self.beta_slow, self.beta_fast),
            _("1 and 32"),
        )

    @property
    def attention_scaling(self) -> float:  # type: ignore[override]
        return self.attention_factor if self.attention_factor is not None else 0.1 * math.log(self.factor) + 1

    def scale_frequencies(self, inv_freq: Tensor, theta: float) -> Tensor:
        width = 2 * inv_freq.numel()

        def dimension(rotations: float) -> float:
            """The dimension that makes this many full rotations within the trained length."""
            return width * math.log(self.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        # between `low` and `high` the frequencies change linearly from unscaled to divided by factor
        low = dimension(self.beta_fast)
        high = dimension(self.beta_slow)
        if self.truncate:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, width - 1)
        index = torch.arange(inv_freq.numel(), device=inv_freq.device, dtype=inv_freq.dtype)
        ramp = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
        return inv_freq * (1 - ramp) + inv_freq / self.factor * ramp
